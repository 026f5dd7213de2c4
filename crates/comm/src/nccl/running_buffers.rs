//! The memory of a call on a GPU.

use std::sync::Arc;

use super::communicator::Padded;
use super::event::Event;
use crate::pending::Buffers;

/// The memory of a running call, which must not be freed before its end.
pub(super) struct RunningBuffers {
    pub(super) buffers: Buffers,
    #[expect(dead_code, reason = "it is kept for the GPU")]
    pub(super) padded: Option<Padded>,
    pub(super) end: Arc<Event>,
}
