//! [`Rule::Passes`]: the way of each micro-batch through the units of a stage.

use super::scope::{Purpose, Scope};
use super::violation::{Problem, Rule};
use crate::program::{ActivationCheckpointing, Codec, Instruction, Keep, Message, Payload, Program};

/// What is kept for a backward pass.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Activations {
    None,
    /// The input only.
    Input,
    /// What the backward pass needs.
    Ready,
}

/// How far a backward pass is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Backward {
    None,
    /// The gradient of the input is computed.
    Input,
    Complete,
}

/// How far a message is that a unit needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Receive {
    None,
    Started(Codec),
    Complete,
}

/// How far a micro-batch is in a unit.
#[derive(Clone, Copy)]
struct Pass {
    has_forward: bool,
    activations: Activations,
    backward: Backward,
    /// By payload.
    received: [Receive; 2],
    /// By payload.
    is_sent: [bool; 2],
}

struct Passes<'a> {
    scope: &'a Scope<'a>,
    /// The unit where the backward pass ends; the number of units if there is no backward pass.
    backward_end: usize,
    /// By micro-batch and unit.
    passes: Vec<Vec<Pass>>,
}

pub(super) fn check(program: &Program, scope: &Scope<'_>) -> Result<(), Problem> {
    let (backward_end, micro_batches) = match scope.purpose {
        Purpose::Training | Purpose::Replay => (scope.first_trainable(), scope.policy.micro_batches),
        Purpose::Inference => (scope.units.len(), 1),
    };
    let at_start = Pass {
        has_forward: false,
        activations: Activations::None,
        backward: Backward::None,
        received: [Receive::None; 2],
        is_sent: [false; 2],
    };
    let passes = vec![vec![at_start; scope.units.len()]; micro_batches];
    let mut passes = Passes { scope, backward_end, passes };
    for (position, instruction) in program.instructions.iter().enumerate() {
        passes.apply(instruction).map_err(|problem| Problem::at(position, Rule::Passes, problem))?;
    }
    passes.check_end().map_err(|problem| Problem::missing(Rule::Passes, problem))
}

impl Passes<'_> {
    fn apply(&mut self, instruction: &Instruction) -> Result<(), String> {
        match *instruction {
            Instruction::Forward { unit, micro_batch, keep } => self.forward(unit, micro_batch, keep),
            Instruction::Recompute { unit, micro_batch } => self.recompute(unit, micro_batch),
            Instruction::Backward { unit, micro_batch } => {
                self.backward_input(unit, micro_batch)?;
                self.backward_weight(unit, micro_batch)
            }
            Instruction::BackwardInput { unit, micro_batch } => self.backward_input(unit, micro_batch),
            Instruction::BackwardWeight { unit, micro_batch } => self.backward_weight(unit, micro_batch),
            // See the rules of tied units.
            Instruction::Send(message) | Instruction::StartReceive(message) | Instruction::WaitReceive(message)
                if message.payload.is_tied() =>
            {
                Ok(())
            }
            Instruction::Send(message) => self.send(&message),
            Instruction::StartReceive(message) => self.start_receive(&message),
            Instruction::WaitReceive(message) => self.wait_receive(&message),
            _ => Ok(()),
        }
    }

    fn forward(&mut self, unit: usize, micro_batch: usize, keep: Keep) -> Result<(), String> {
        let activations = self.kept(unit, keep)?;
        if self.pass(unit, micro_batch)?.has_forward {
            return Err(format!("micro-batch {micro_batch} has passed it forward already"));
        }
        match unit.checked_sub(1) {
            Some(previous) if self.scope.has(previous) && !self.pass(previous, micro_batch)?.has_forward => {
                return Err(format!("micro-batch {micro_batch} has not passed {} forward", self.scope.name(previous)));
            }
            Some(previous) if !self.scope.has(previous) => {
                self.expect_received(Payload::Activations, unit, micro_batch)?
            }
            _ => (),
        }
        let pass = self.pass(unit, micro_batch)?;
        (pass.has_forward, pass.activations) = (true, activations);
        Ok(())
    }

    fn recompute(&mut self, unit: usize, micro_batch: usize) -> Result<(), String> {
        let activations = &mut self.pass(unit, micro_batch)?.activations;
        match activations {
            Activations::Input => {
                *activations = Activations::Ready;
                Ok(())
            }
            Activations::Ready => Err("its activations exist already".to_string()),
            Activations::None => Err("there is no input to recompute its activations from".to_string()),
        }
    }

    /// The gradient of the input follows from that of the output, which is that of the next unit's input.
    fn backward_input(&mut self, unit: usize, micro_batch: usize) -> Result<(), String> {
        let pass = *self.pass(unit, micro_batch)?;
        if unit < self.backward_end {
            return Err("no unit up to it is trainable, or there is no backward pass".to_string());
        }
        if pass.backward != Backward::None {
            return Err(format!("micro-batch {micro_batch} has passed it backward already"));
        }
        if !pass.has_forward {
            return Err(format!("micro-batch {micro_batch} has not passed it forward"));
        }
        let next = unit + 1;
        if self.scope.has(next) && self.pass(next, micro_batch)?.backward == Backward::None {
            return Err(format!("micro-batch {micro_batch} has not passed {} backward", self.scope.name(next)));
        }
        if next < self.scope.units.len() && !self.scope.has(next) {
            self.expect_received(Payload::Gradients, unit, micro_batch)?;
        }
        match pass.activations {
            Activations::Ready => {
                self.pass(unit, micro_batch)?.backward = Backward::Input;
                Ok(())
            }
            Activations::Input => Err("its activations must be recomputed first".to_string()),
            Activations::None => Err("its forward pass kept no activations".to_string()),
        }
    }

    fn backward_weight(&mut self, unit: usize, micro_batch: usize) -> Result<(), String> {
        let pass = self.pass(unit, micro_batch)?;
        match pass.backward {
            Backward::Input => {
                (pass.backward, pass.activations) = (Backward::Complete, Activations::None);
                Ok(())
            }
            Backward::None => Err("the gradient of its input comes first".to_string()),
            Backward::Complete => Err(format!("micro-batch {micro_batch} has passed it backward already")),
        }
    }

    fn send(&mut self, message: &Message) -> Result<(), String> {
        let Message { payload, unit, micro_batch, .. } = *message;
        if !self.crosses_stages(payload, Some(unit), message.receiving_unit(self.scope.units)) {
            return Err("no other stage needs it".to_string());
        }
        let pass = self.pass(unit, micro_batch)?;
        let is_computed = match payload {
            Payload::Activations => pass.has_forward,
            _ => pass.backward != Backward::None,
        };
        if !is_computed {
            return Err("it is not computed yet".to_string());
        }
        match std::mem::replace(&mut pass.is_sent[payload as usize], true) {
            true => Err("it is sent already".to_string()),
            false => Ok(()),
        }
    }

    fn start_receive(&mut self, message: &Message) -> Result<(), String> {
        let Message { payload, unit, micro_batch, codec } = *message;
        if !self.crosses_stages(payload, message.sending_unit(self.scope.units), Some(unit)) {
            return Err("no other stage sends it".to_string());
        }
        let received = &mut self.pass(unit, micro_batch)?.received[payload as usize];
        match received {
            Receive::None => {
                *received = Receive::Started(codec);
                Ok(())
            }
            Receive::Started(_) | Receive::Complete => Err("it is received already".to_string()),
        }
    }

    fn wait_receive(&mut self, message: &Message) -> Result<(), String> {
        let Message { payload, unit, micro_batch, codec } = *message;
        let received = &mut self.pass(unit, micro_batch)?.received[payload as usize];
        match received {
            Receive::Started(started) if *started == codec => {
                *received = Receive::Complete;
                Ok(())
            }
            Receive::Started(_) => Err("its receive was started with another codec".to_string()),
            Receive::None => Err("its receive was not started".to_string()),
            Receive::Complete => Err("it is received already".to_string()),
        }
    }

    /// Whether a payload goes from one unit to another that is on another stage, one of them on this stage.
    fn crosses_stages(&self, payload: Payload, from: Option<usize>, to: Option<usize>) -> bool {
        let (Some(from), Some(to)) = (from, to) else { return false };
        let is_needed = match payload {
            Payload::Activations => to < self.scope.units.len(),
            // The gradient of the output of the first trainable unit is the last that is needed.
            _ => from < self.scope.units.len() && to >= self.backward_end,
        };
        is_needed && self.scope.has(from) != self.scope.has(to)
    }

    fn expect_received(&mut self, payload: Payload, unit: usize, micro_batch: usize) -> Result<(), String> {
        match (self.pass(unit, micro_batch)?.received[payload as usize], payload) {
            (Receive::Complete, _) => Ok(()),
            (_, Payload::Activations) => Err("its input is not received yet".to_string()),
            _ => Err("the gradient of its output is not received yet".to_string()),
        }
    }

    /// What a forward pass keeps, if it is what the policy says. Full activation checkpointing leaves it to the program which
    /// units are worth recomputing.
    fn kept(&self, unit: usize, keep: Keep) -> Result<Activations, String> {
        let checkpointing = self.scope.policy.activation_checkpointing;
        match (unit >= self.backward_end, checkpointing, keep) {
            (false, _, Keep::Nothing) => Ok(Activations::None),
            (true, ActivationCheckpointing::None | ActivationCheckpointing::Full, Keep::All)
            | (true, ActivationCheckpointing::Selective, Keep::Selective) => Ok(Activations::Ready),
            (true, ActivationCheckpointing::Full, Keep::Input) => Ok(Activations::Input),
            (false, ..) => Err("it keeps activations, but has no backward pass".to_string()),
            (true, ..) => Err(format!("this is not what activation checkpointing {checkpointing:?} keeps")),
        }
    }

    fn check_end(&self) -> Result<(), String> {
        for (micro_batch, passes) in self.passes.iter().enumerate() {
            for unit in self.scope.own() {
                let (pass, name) = (&passes[unit], self.scope.name(unit));
                if !pass.has_forward {
                    return Err(format!("micro-batch {micro_batch} never passes {name} forward"));
                }
                if unit >= self.backward_end && pass.backward != Backward::Complete {
                    return Err(format!("micro-batch {micro_batch} never passes {name} backward"));
                }
                for message in [Message::activations(unit, micro_batch), Message::gradients(unit, micro_batch)] {
                    let is_needed =
                        self.crosses_stages(message.payload, Some(unit), message.receiving_unit(self.scope.units));
                    if is_needed && !pass.is_sent[message.payload as usize] {
                        let what = message.payload.name();
                        return Err(format!("the {what} of {name} in micro-batch {micro_batch} are never sent"));
                    }
                }
            }
        }
        Ok(())
    }

    fn pass(&mut self, unit: usize, micro_batch: usize) -> Result<&mut Pass, String> {
        let count = self.passes.len();
        let passes = self.passes.get_mut(micro_batch);
        passes.map(|units| &mut units[unit]).ok_or_else(|| format!("there are {count} micro-batches, counted from 0"))
    }
}
