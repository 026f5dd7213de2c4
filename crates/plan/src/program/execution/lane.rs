//! A rank in execution: what it has done, and what it waits for.

use std::collections::BTreeMap;

use super::super::Program;
use super::super::collectives::{Call, Collective};
use super::super::instruction::{Buffer, Message, Offload, Payload};

/// Work of a rank, by its index in [`Lane::work`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::program) struct WorkId {
    pub(in crate::program) party: usize,
    pub(in crate::program) index: usize,
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::program) enum Activity {
    Compute,
    Call(Collective),
    Send(Message),
    Receive(Message),
    Copy(Offload),
}

/// Something that takes time.
#[derive(Clone, Copy, Debug)]
pub(in crate::program) struct Work {
    pub(in crate::program) activity: Activity,
    pub(in crate::program) position: usize,
    pub(in crate::program) start_s: f64,
    pub(in crate::program) end_s: f64,
    /// The work whose end let it start.
    pub(in crate::program) after: Option<WorkId>,
    /// When the last of the other ranks was ready for it.
    pub(in crate::program) others_ready_s: f64,
}

/// A wait of the compute lane.
pub(in crate::program) struct Wait {
    pub(in crate::program) position: usize,
    pub(in crate::program) activity: Activity,
    /// The part that would pass even if communication took no time, because another rank is not ready.
    pub(in crate::program) late_s: f64,
    /// The rest.
    pub(in crate::program) transfer_s: f64,
}

/// When a rank arrives at an instruction, and after which work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) position: usize,
    pub(super) time_s: f64,
    pub(super) after: Option<WorkId>,
}

/// A rank in execution, or after it.
pub(in crate::program) struct Lane<'a> {
    pub(in crate::program) program: &'a Program,
    pub(in crate::program) calls: Vec<(usize, Call)>,
    /// The position of the instruction that is executed.
    pub(in crate::program) position: usize,
    /// The index of the next call.
    pub(in crate::program) next_call: usize,
    /// Whether the instruction at `position` has computed, sent or started what it does.
    pub(super) has_started: bool,
    /// The time of the compute lane.
    pub(in crate::program) now_s: f64,
    /// When each instruction started, by position.
    pub(in crate::program) starts_s: Vec<f64>,
    /// The work at whose end the compute lane arrived at `now_s`.
    pub(in crate::program) last: Option<WorkId>,
    pub(in crate::program) work: Vec<Work>,
    pub(in crate::program) waits: Vec<Wait>,
    /// The work of each call that issued a collective, once it is known when it runs.
    pub(super) call_work: Vec<Option<usize>>,
    /// The number of works that the step before left.
    pub(super) resumed: usize,
    /// Receives that were started: the stage that sends, and how many were started from it before.
    pub(super) receives: BTreeMap<ReceiveKey, (usize, usize)>,
    /// The number of receives that were started, by the stage that sends.
    pub(super) receives_started: BTreeMap<usize, usize>,
    /// The last copy of each buffer.
    pub(super) copies: BTreeMap<(usize, Buffer), usize>,
    /// When the lane for copies is free, and its last work.
    pub(super) copies_free: (f64, Option<WorkId>),
    /// CPU time of communication that computation has yet to give.
    pub(super) cpu_debt_s: f64,
}

impl<'a> Lane<'a> {
    pub(super) fn new(program: &'a Program, calls: &[(usize, Call)]) -> Self {
        Lane {
            program,
            calls: calls.to_vec(),
            position: 0,
            next_call: 0,
            has_started: false,
            now_s: 0.,
            starts_s: Vec::with_capacity(program.instructions.len()),
            last: None,
            work: Vec::new(),
            waits: Vec::new(),
            call_work: vec![None; calls.len()],
            resumed: 0,
            receives: BTreeMap::new(),
            receives_started: BTreeMap::new(),
            copies: BTreeMap::new(),
            copies_free: (0., None),
            cpu_debt_s: 0.,
        }
    }

    /// Whether the instruction that is executed has another call.
    pub(super) fn has_call(&self) -> bool {
        self.calls.get(self.next_call).is_some_and(|(position, _)| *position == self.position)
    }

    /// The share of the instruction's computation that is done between its calls.
    pub(super) fn overlap(&self) -> f64 {
        let calls = self.calls[self.next_call..].iter().take_while(|(position, _)| *position == self.position);
        calls.map(|(_, call)| call.overlap).sum()
    }

    /// Whether all instructions are executed.
    pub(in crate::program) fn is_done(&self) -> bool {
        self.position == self.program.instructions.len()
    }
}

/// What a rank receives only once per step.
pub(super) type ReceiveKey = (Payload, usize, usize);

pub(super) fn receive_key(message: &Message) -> ReceiveKey {
    (message.payload, message.unit, message.micro_batch)
}
