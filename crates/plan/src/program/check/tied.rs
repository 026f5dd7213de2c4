//! [`Rule::Passes`] and [`Rule::Gradients`] of tied units on different stages: the parameter is there before it is computed with, and
//! its gradient is sent when it is complete.

use super::scope::{Purpose, Scope};
use super::violation::{Problem, Rule};
use crate::program::{Codec, Instruction, Message, Payload, Program};

/// How far a message is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Receive {
    None,
    Started(Codec),
    Complete,
}

/// The messages of one unit.
#[derive(Clone)]
struct UnitMessages {
    /// The parameter that it owns is sent to the unit that is tied to it.
    is_sent: bool,
    /// The parameter that it is tied to.
    parameters: Receive,
    /// The gradients that the unit tied to it sends, by micro-batch.
    gradients: Vec<Receive>,
    /// How many times the gradient of the parameter that it is tied to was accumulated since it was last sent.
    added: usize,
    /// How many times it was sent.
    sent: usize,
}

struct Tied<'a> {
    scope: &'a Scope<'a>,
    units: Vec<UnitMessages>,
}

pub(super) fn check(program: &Program, scope: &Scope<'_>) -> Result<(), Problem> {
    let gradients = vec![Receive::None; scope.policy.micro_batches];
    let at_start = UnitMessages { is_sent: false, parameters: Receive::None, gradients, added: 0, sent: 0 };
    let mut tied = Tied { scope, units: vec![at_start; scope.units.len()] };
    for (position, instruction) in program.instructions.iter().enumerate() {
        tied.apply(instruction).map_err(|(rule, problem)| Problem::at(position, rule, problem.to_string()))?;
    }
    tied.check_end()
}

/// A rule, and how it is broken.
type Broken = (Rule, &'static str);

impl Tied<'_> {
    fn apply(&mut self, instruction: &Instruction) -> Result<(), Broken> {
        match *instruction {
            Instruction::Forward { unit, .. }
            | Instruction::Recompute { unit, .. }
            | Instruction::Backward { unit, .. }
            | Instruction::BackwardInput { unit, .. } => {
                let needs = self.scope.tied_elsewhere(unit).is_some();
                require(
                    !needs || self.units[unit].parameters == Receive::Complete,
                    (Rule::Passes, "the parameter that it is tied to is not received yet"),
                )
            }
            Instruction::Accumulate { unit, .. } => {
                self.units[unit].added += 1;
                let is_open = self.units[unit].sent < self.sends() || !self.sends_gradients(unit);
                require(is_open, (Rule::Gradients, "the gradient of the parameter that it is tied to is sent already"))
            }
            Instruction::Send(Message { payload: Payload::TiedParameters, unit, micro_batch, .. }) => {
                let is_needed = self.scope.tied_elsewhere_to(unit).is_some() && micro_batch == 0;
                require(is_needed, (Rule::Passes, "no other stage needs it"))?;
                let is_sent = std::mem::replace(&mut self.units[unit].is_sent, true);
                require(!is_sent, (Rule::Passes, "it is sent already"))
            }
            Instruction::Send(Message { payload: Payload::TiedGradients, unit, micro_batch, .. }) => {
                self.send_gradients(unit, micro_batch)
            }
            Instruction::StartReceive(message) if message.payload.is_tied() => {
                let receive = self.receive(&message)?;
                require(*receive == Receive::None, (Rule::Passes, "it is received already"))?;
                *receive = Receive::Started(message.codec);
                Ok(())
            }
            Instruction::WaitReceive(message) if message.payload.is_tied() => {
                let receive = self.receive(&message)?;
                let is_started = *receive == Receive::Started(message.codec);
                require(is_started, (Rule::Passes, "its receive was not started, or with another codec"))?;
                *receive = Receive::Complete;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn send_gradients(&mut self, unit: usize, micro_batch: usize) -> Result<(), Broken> {
        require(self.sends_gradients(unit), (Rule::Gradients, "no other stage needs it"))?;
        let (micro_batches, sends) = (self.scope.policy.micro_batches, self.sends());
        let UnitMessages { added, sent, .. } = &mut self.units[unit];
        require(*added * sends == micro_batches, (Rule::Gradients, "it is not complete, or more than that"))?;
        let last = if sends == 1 { micro_batches - 1 } else { *sent };
        require(micro_batch == last, (Rule::Gradients, "it is that of another micro-batch"))?;
        (*added, *sent) = (0, *sent + 1);
        Ok(())
    }

    /// How far the receive of a message is, if another stage sends it.
    fn receive(&mut self, message: &Message) -> Result<&mut Receive, Broken> {
        let Message { payload, unit, micro_batch, .. } = *message;
        let is_first = micro_batch == 0;
        let is_due = self.scope.policy.reduce_each_micro_batch || micro_batch + 1 == self.scope.policy.micro_batches;
        let is_sent = match payload {
            Payload::TiedParameters => self.scope.tied_elsewhere(unit).is_some() && is_first,
            _ => self.scope.tied_elsewhere_to(unit).is_some() && self.scope.units[unit].trainable > 0 && is_due,
        };
        let UnitMessages { parameters, gradients, .. } = &mut self.units[unit];
        let receive = match payload {
            Payload::TiedParameters => Some(parameters),
            _ => gradients.get_mut(micro_batch),
        };
        receive.filter(|_| is_sent).ok_or((Rule::Passes, "no other stage sends it"))
    }

    /// Whether a unit sends the gradient of the parameter that it is tied to.
    fn sends_gradients(&self, unit: usize) -> bool {
        let is_trained = |owner: usize| self.scope.units[owner].trainable > 0;
        self.scope.purpose == Purpose::Training && self.scope.tied_elsewhere(unit).is_some_and(is_trained)
    }

    /// How many times a step sends the gradient of a parameter.
    fn sends(&self) -> usize {
        if self.scope.policy.reduce_each_micro_batch { self.scope.policy.micro_batches } else { 1 }
    }

    fn check_end(&self) -> Result<(), Problem> {
        for unit in self.scope.own() {
            let (messages, name) = (&self.units[unit], self.scope.name(unit));
            if self.scope.tied_elsewhere_to(unit).is_some() && !messages.is_sent {
                let problem = format!("the tied parameters of {name} are never sent");
                return Err(Problem::missing(Rule::Passes, problem));
            }
            if self.sends_gradients(unit) && messages.sent != self.sends() {
                let problem = format!("the tied gradients of {name} are never sent");
                return Err(Problem::missing(Rule::Gradients, problem));
            }
        }
        Ok(())
    }
}

fn require(is_right: bool, broken: Broken) -> Result<(), Broken> {
    if is_right { Ok(()) } else { Err(broken) }
}
