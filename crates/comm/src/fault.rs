//! Fault injection: skip one call, shorten one, or panic in one.
//!
//! Ranks that disagree about a call are a program bug: rare, hard to provoke, and expensive to find. To test the code that
//! reports such bugs (collective verification, timeouts, the supervisor) on unmodified programs, a process can be told at
//! startup to go wrong once, at a given call. This is for tests only, and changes nothing else: whatever happens afterwards is
//! a consequence of the fault.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Call, Verb};

/// A fault to inject into one call of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallFault {
    /// The operation; `None` matches any.
    pub verb: Option<Verb>,
    /// The call's label.
    pub label: String,
    /// Which of this process's calls with that label and operation to hit, counting from 1.
    pub nth: u64,
    /// What goes wrong.
    pub kind: CallFaultKind,
}

/// What goes wrong with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFaultKind {
    /// Skips the call, as if the program had left it out: its buffers come back untouched, and the group's next call gets its
    /// number.
    Skip,
    /// Makes the call with one element fewer.
    Shorten,
    /// Makes MPI's communication thread panic while the call is running. Other backends ignore it.
    Panic,
}

/// A fault, with the number of matching calls so far.
pub(crate) struct ArmedFault {
    fault: CallFault,
    seen: AtomicU64,
}

impl ArmedFault {
    pub(crate) fn new(fault: CallFault) -> Self {
        ArmedFault { fault, seen: AtomicU64::new(0) }
    }

    /// Returns the fault to inject into this call, if any. Must be called once per call.
    pub(crate) fn fires(&self, call: &Call) -> Option<CallFaultKind> {
        let CallFault { verb, label, nth, kind } = &self.fault;
        let matches = verb.is_none_or(|verb| verb == call.verb) && **label == *call.label;
        (matches && self.seen.fetch_add(1, Ordering::Relaxed) + 1 == *nth).then_some(*kind)
    }
}
