//! Faults on demand: a process that leaves out one call, makes one too short, or panics in one.
//!
//! Ranks that disagree about a call are a program's mistake: rare, hard to provoke, and dear when nobody says who it was. So
//! that what names them (checked mode, time limits, whoever supervises the ranks) can be tested on programs as they are, a
//! process can be told to make such a mistake once, at a call that is named. That is all it is for. It is given
//! with the options that start the process's communication, and nothing else changes: what follows the mistake follows from it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Call, Verb};

/// The call at which this process goes wrong, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallFault {
    /// The verb; any where there is none.
    pub verb: Option<Verb>,
    /// The call's label.
    pub label: String,
    /// The how-manieth call of this process with that label and verb, from 1.
    pub nth: u64,
    /// What goes wrong.
    pub what: Fault,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call is not made, as if the program had left it out: its buffers come back untouched, and the group's next call
    /// has its number.
    Skip,
    /// The call is made with one element fewer.
    Short,
    /// Over MPI, the communication thread panics once the call is under way.
    Panic,
}

/// The fault of a process, with the calls that it has counted.
pub(crate) struct Awaited {
    fault: CallFault,
    met: AtomicU64,
}

impl Awaited {
    pub(crate) fn new(fault: CallFault) -> Self {
        Awaited { fault, met: AtomicU64::new(0) }
    }

    /// What goes wrong with this call, if anything does. Every call is asked about once.
    pub(crate) fn strikes(&self, call: &Call) -> Option<Fault> {
        let CallFault { verb, label, nth, what } = &self.fault;
        let meant = verb.is_none_or(|verb| verb == call.verb) && **label == *call.label;
        (meant && self.met.fetch_add(1, Ordering::Relaxed) + 1 == *nth).then_some(*what)
    }
}
