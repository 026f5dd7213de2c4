//! When receives start.
//!
//! # Note: the order of receives
//! Messages from one stage to another arrive in the order in which they are sent. A stage with several chunks may need them in
//! another order: with two stages, activations and gradients go the same way. So a stage starts to receive a message, and all that
//! are sent before it, one action before it needs it. Starting to receive does not block, so neither order delays the other.

use std::collections::BTreeMap;

use super::stage::Draft;
use crate::program::{Instruction, Message, Program, UnitSpec};

/// Starts to receive what the drafts of all stages wait for.
pub(super) fn start_receives(drafts: Vec<Draft>, units: &[UnitSpec], stages: &[usize]) -> Vec<Program> {
    let mut channels: BTreeMap<(usize, usize), Channel> = BTreeMap::new();
    for (from, draft) in drafts.iter().enumerate() {
        for instruction in &draft.program.instructions {
            if let Instruction::Send(message) = *instruction
                && let Some(unit) = message.receiving_unit(units)
            {
                channels.entry((from, stages[unit])).or_default().sent.push(Message { unit, ..message });
            }
        }
    }
    let start = |(to, draft): (usize, Draft)| {
        let mut started: BTreeMap<usize, Vec<Message>> = BTreeMap::new();
        for (position, instruction) in draft.program.instructions.iter().enumerate() {
            if let Instruction::WaitReceive(message) = *instruction
                && let Some(from) = message.sending_unit(units).map(|unit| stages[unit])
            {
                let messages = channels.entry((from, to)).or_default().start_until(message);
                started.entry(draft.action_before(position)).or_default().extend(messages);
            }
        }
        let mut instructions = Vec::with_capacity(draft.program.instructions.len());
        for (position, instruction) in draft.program.instructions.into_iter().enumerate() {
            let messages = started.remove(&position).unwrap_or_default();
            instructions.extend(messages.into_iter().map(Instruction::StartReceive));
            instructions.push(instruction);
        }
        Program { instructions, ..draft.program }
    };
    drafts.into_iter().enumerate().map(start).collect()
}

/// The messages from one stage to another, as the receiver names them.
#[derive(Default)]
struct Channel {
    sent: Vec<Message>,
    /// The number of those whose receives are started.
    started: usize,
}

impl Channel {
    /// Starts to receive up to a message. One that is never sent is received alone: the checker says so.
    fn start_until(&mut self, message: Message) -> Vec<Message> {
        if self.sent[..self.started].contains(&message) {
            return Vec::new();
        }
        match self.sent[self.started..].iter().position(|sent| *sent == message) {
            Some(index) => {
                let until = self.started + index + 1;
                self.sent[std::mem::replace(&mut self.started, until)..until].to_vec()
            }
            None => vec![message],
        }
    }
}
