//! [`Rule::Passes`]: the way of each micro-batch through the units.

use super::violation::{Problem, Purpose, Rule, first_trainable};
use crate::program::{ActivationCheckpointing, Instruction, Keep, Policy, Program, UnitSpec};

/// What is kept for a backward pass.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Activations {
    None,
    /// The input only.
    Input,
    /// What the backward pass needs.
    Ready,
}

/// How far a micro-batch is.
#[derive(Clone)]
struct MicroBatch {
    /// The number of units that it has passed forward.
    forward: usize,
    /// The number of units that it has yet to pass backward, counted from the first unit of the model.
    backward: usize,
    /// By unit.
    activations: Vec<Activations>,
}

struct Passes<'a> {
    units: &'a [UnitSpec],
    policy: &'a Policy,
    /// The unit where the backward pass ends; the number of units if there is no backward pass.
    backward_end: usize,
    micro_batches: Vec<MicroBatch>,
}

pub(super) fn check(program: &Program, units: &[UnitSpec], policy: &Policy) -> Result<(), Problem> {
    let purpose = Purpose::of(program);
    let (backward_end, micro_batches) = match purpose {
        Purpose::Training | Purpose::Replay => (first_trainable(units), policy.micro_batches),
        Purpose::Inference => (units.len(), 1),
    };
    let at_start = MicroBatch { forward: 0, backward: units.len(), activations: vec![Activations::None; units.len()] };
    let mut passes = Passes { units, policy, backward_end, micro_batches: vec![at_start; micro_batches] };
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
            Instruction::Backward { unit, micro_batch } => self.backward(unit, micro_batch),
            _ => Ok(()),
        }
    }

    fn forward(&mut self, unit: usize, index: usize, keep: Keep) -> Result<(), String> {
        let activations = self.kept(unit, keep)?;
        let next = self.micro_batch(index)?.forward;
        if next != unit {
            return Err(format!("the next unit in micro-batch {index}'s forward pass is {}", self.name(next)));
        }
        let micro_batch = self.micro_batch(index)?;
        micro_batch.forward += 1;
        micro_batch.activations[unit] = activations;
        Ok(())
    }

    fn recompute(&mut self, unit: usize, index: usize) -> Result<(), String> {
        let activations = &mut self.micro_batch(index)?.activations[unit];
        match activations {
            Activations::Input => {
                *activations = Activations::Ready;
                Ok(())
            }
            Activations::Ready => Err("its activations exist already".to_string()),
            Activations::None => Err("there is no input to recompute its activations from".to_string()),
        }
    }

    fn backward(&mut self, unit: usize, index: usize) -> Result<(), String> {
        let (units, backward_end) = (self.units.len(), self.backward_end);
        let micro_batch = self.micro_batch(index)?;
        if micro_batch.forward < units {
            return Err(format!("micro-batch {index} has not passed all units forward"));
        }
        let next = micro_batch.backward;
        if next == backward_end {
            return Err(format!("micro-batch {index}'s backward pass is complete"));
        }
        if next != unit + 1 {
            return Err(format!("the next unit in micro-batch {index}'s backward pass is {}", self.name(next - 1)));
        }
        match micro_batch.activations[unit] {
            Activations::Ready => {
                micro_batch.backward -= 1;
                micro_batch.activations[unit] = Activations::None;
                Ok(())
            }
            Activations::Input => Err("its activations must be recomputed first".to_string()),
            Activations::None => Err("its forward pass kept no activations".to_string()),
        }
    }

    /// What a forward pass keeps, if it is what the policy says. Full activation checkpointing leaves it to the program which
    /// units are worth recomputing.
    fn kept(&self, unit: usize, keep: Keep) -> Result<Activations, String> {
        let checkpointing = self.policy.activation_checkpointing;
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
        for (index, micro_batch) in self.micro_batches.iter().enumerate() {
            if micro_batch.forward < self.units.len() {
                return Err(format!("micro-batch {index} never passes {} forward", self.name(micro_batch.forward)));
            }
            if micro_batch.backward > self.backward_end {
                return Err(format!(
                    "micro-batch {index} never passes {} backward",
                    self.name(micro_batch.backward - 1)
                ));
            }
        }
        Ok(())
    }

    fn micro_batch(&mut self, index: usize) -> Result<&mut MicroBatch, String> {
        let count = self.micro_batches.len();
        self.micro_batches.get_mut(index).ok_or_else(|| format!("there are {count} micro-batches, counted from 0"))
    }

    fn name(&self, unit: usize) -> &str {
        self.units.get(unit).map_or("none: it is complete", |unit| unit.name.as_str())
    }
}
