//! The handle to a running call.

use std::any::Any;
use std::marker::PhantomData;
use std::time::Instant;

use crate::instruments::EntryHandle;
use crate::{Error, Result};

/// The buffers of a running call, with their types erased.
pub(crate) type Buffers = Box<dyn Any + Send>;

/// Blocks until a call is done, and returns its buffers. Supplied by the backend.
pub(crate) type Completion = Box<dyn FnOnce() -> Result<Buffers> + Send>;

/// A running call, which owns its buffers until [`Pending::wait`] (torch.distributed: the `Work` of an asynchronous call).
///
/// Dropping it does not stop the call; its buffers are dropped when the call is done.
#[must_use = "the call is running; wait() returns the buffers, or the error"]
pub struct Pending<T> {
    completion: Completion,
    /// `None` for a call that was never started.
    handle: Option<EntryHandle>,
    buffers: PhantomData<fn() -> T>,
}

impl<T: 'static> Pending<T> {
    /// # Panics
    /// In `wait`, if the completion's buffers are not a `T`.
    pub(crate) fn new(completion: Completion, handle: EntryHandle) -> Self {
        Pending { completion, handle: Some(handle), buffers: PhantomData }
    }

    /// A call that failed before it started.
    pub(crate) fn failed(error: Error) -> Self {
        Pending { completion: Box::new(move || Err(error)), handle: None, buffers: PhantomData }
    }

    /// A call that is already done.
    pub(crate) fn done(buffers: T) -> Self
    where
        T: Send,
    {
        let buffers: Buffers = Box::new(buffers);
        Pending { completion: Box::new(move || Ok(buffers)), handle: None, buffers: PhantomData }
    }

    /// Blocks until the call is done, and returns the buffers.
    ///
    /// After an error the buffers are lost: the network may still write to them.
    pub fn wait(self) -> Result<T> {
        let started = Instant::now();
        if let Some(handle) = &self.handle {
            handle.mark_awaited();
        }
        let buffers = (self.completion)();
        if let Some(handle) = self.handle {
            handle.mark_waited(started.elapsed());
        }
        let buffers = buffers?;
        Ok(*buffers.downcast::<T>().expect("a call returns the buffers that it was given"))
    }
}
