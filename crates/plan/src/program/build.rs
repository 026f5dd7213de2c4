//! Builds programs from a policy.
//!
//! Everything about when parameters are gathered, activations recomputed and gradients reduced is decided here, and only here.

use super::policy::{ActivationCheckpointing, Policy, UnitSpec};
use super::{Instruction, Keep, Program};

/// A training step: for each micro-batch a forward and a backward pass, then the update.
pub fn train_step(units: &[UnitSpec], policy: &Policy) -> Program {
    let mut builder = Builder::new(units, policy);
    builder.push(Instruction::CountTokens);
    for micro_batch in 0..policy.micro_batches {
        builder.forward(micro_batch);
        let reduce = policy.reduce_each_micro_batch || micro_batch + 1 == policy.micro_batches;
        builder.backward(micro_batch, if reduce { Then::Reduce } else { Then::Accumulate });
        if policy.reduce_each_micro_batch {
            (0..units.len()).for_each(|unit| builder.wait_reduce(unit));
        }
    }
    for unit in builder.trainable_units() {
        builder.wait_reduce(unit);
        builder.push(Instruction::Norm(unit));
    }
    builder.push(Instruction::ReduceTotals);
    for unit in builder.trainable_units() {
        builder.push(Instruction::Update(unit));
    }
    builder.finish()
}

/// The passes of a step, without accumulation and reduction of gradients.
pub fn replay(units: &[UnitSpec], policy: &Policy) -> Program {
    let mut builder = Builder::new(units, policy);
    for micro_batch in 0..policy.micro_batches {
        builder.forward(micro_batch);
        builder.backward(micro_batch, Then::Discard);
    }
    builder.finish()
}

/// A forward pass that keeps nothing, on one micro-batch: evaluation and generation.
pub fn inference(units: &[UnitSpec], policy: &Policy) -> Program {
    let mut builder = Builder::new(units, policy);
    for unit in 0..units.len() {
        builder.gather(unit);
        (unit + 1..=unit + policy.prefetch).for_each(|next| builder.prefetch(next));
        builder.push(Instruction::Forward { unit, micro_batch: 0, keep: Keep::Nothing });
        builder.release(unit);
    }
    builder.finish()
}

/// Where a unit's parameters are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Parameters {
    Sharded,
    Gathering,
    Whole,
}

/// How far the reduction of a unit's gradients is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reduction {
    None,
    WithinShards,
    BetweenReplicas,
}

/// What becomes of the gradients of a backward pass.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    Discard,
    Accumulate,
    /// Accumulate them, and reduce the sum.
    Reduce,
}

struct Builder<'a> {
    units: &'a [UnitSpec],
    policy: &'a Policy,
    /// The first unit with trainable parameters, where the backward pass ends.
    first_trainable: usize,
    parameters: Vec<Parameters>,
    reductions: Vec<Reduction>,
    instructions: Vec<Instruction>,
}

impl<'a> Builder<'a> {
    fn new(units: &'a [UnitSpec], policy: &'a Policy) -> Self {
        let at_start = |unit: &UnitSpec| match policy.sharding.parameters {
            true => Parameters::Sharded,
            // The update before this step may still be gathering.
            false if policy.sharding.optimizer && unit.trainable > 0 => Parameters::Gathering,
            false => Parameters::Whole,
        };
        Builder {
            units,
            policy,
            first_trainable: units.iter().position(|unit| unit.trainable > 0).unwrap_or(units.len()),
            parameters: units.iter().map(at_start).collect(),
            reductions: vec![Reduction::None; units.len()],
            instructions: Vec::new(),
        }
    }

    fn finish(self) -> Program {
        let units = self.units.iter().map(|unit| unit.name.clone()).collect();
        Program { units, instructions: self.instructions }
    }

    fn push(&mut self, instruction: Instruction) {
        self.instructions.push(instruction);
    }

    fn trainable_units(&self) -> Vec<usize> {
        (0..self.units.len()).filter(|&unit| self.units[unit].trainable > 0).collect()
    }

    /// The forward pass. While one unit computes, the parameters of the next are gathered.
    fn forward(&mut self, micro_batch: usize) {
        for unit in 0..self.units.len() {
            self.gather(unit);
            (unit + 1..=unit + self.policy.prefetch).for_each(|next| self.prefetch(next));
            self.push(Instruction::Forward { unit, micro_batch, keep: self.kept_activations(unit) });
            // The last unit stays gathered if its backward pass, which is next, reads its parameters.
            if unit + 1 < self.units.len() || !self.units[unit].backward_reads_parameters {
                self.release(unit);
            }
        }
    }

    /// The backward pass. While one unit computes, parameters of the next are gathered and gradients of the previous reduced.
    fn backward(&mut self, micro_batch: usize, then: Then) {
        for unit in (self.first_trainable..self.units.len()).rev() {
            let reads = self.units[unit].backward_reads_parameters;
            if reads {
                self.gather(unit);
            }
            for next in (self.first_trainable..unit).rev().take(self.policy.prefetch) {
                if self.units[next].backward_reads_parameters {
                    self.prefetch(next);
                }
            }
            if self.is_recomputed(unit) {
                self.push(Instruction::Recompute { unit, micro_batch });
            }
            self.push(Instruction::Backward { unit, micro_batch });
            if reads {
                self.release(unit);
            }
            if then != Then::Discard {
                self.push(Instruction::Accumulate { unit, micro_batch });
            }
            if then == Then::Reduce {
                self.start_reduce(unit);
            }
        }
    }

    fn kept_activations(&self, unit: usize) -> Keep {
        match self.policy.activation_checkpointing {
            _ if unit < self.first_trainable => Keep::Nothing,
            _ if self.is_recomputed(unit) => Keep::Input,
            ActivationCheckpointing::Selective => Keep::Selective,
            ActivationCheckpointing::None | ActivationCheckpointing::Full => Keep::All,
        }
    }

    /// Whether full activation checkpointing recomputes a unit in the backward pass. It does not if that would save nothing: for
    /// the last unit, whose backward pass follows at once, and for units whose graph holds next to nothing.
    fn is_recomputed(&self, unit: usize) -> bool {
        self.policy.activation_checkpointing == ActivationCheckpointing::Full
            && unit >= self.first_trainable
            && unit + 1 < self.units.len()
            && self.units[unit].backward_reads_parameters
    }

    /// Starts to gather a unit and the one it is tied to, if a unit with this index exists.
    fn prefetch(&mut self, unit: usize) {
        let Some(spec) = self.units.get(unit) else { return };
        for unit in spec.tied.into_iter().chain([unit]) {
            if self.parameters[unit] == Parameters::Sharded {
                self.parameters[unit] = Parameters::Gathering;
                self.push(Instruction::start_gather(unit));
            }
        }
    }

    /// Gathers a unit and the one it is tied to.
    fn gather(&mut self, unit: usize) {
        self.prefetch(unit);
        for unit in self.units[unit].tied.into_iter().chain([unit]) {
            if self.parameters[unit] == Parameters::Gathering {
                self.parameters[unit] = Parameters::Whole;
                self.push(Instruction::WaitGather(unit));
            }
        }
    }

    /// Releases a unit and the one it is tied to, if parameters are sharded.
    fn release(&mut self, unit: usize) {
        for unit in self.units[unit].tied.into_iter().chain([unit]).filter(|_| self.policy.sharding.parameters) {
            if self.parameters[unit] == Parameters::Whole {
                self.parameters[unit] = Parameters::Sharded;
                self.instructions.push(Instruction::Release(unit));
            }
        }
    }

    /// Starts to reduce a unit's gradients, and waits for those of an earlier one, so that few unsharded gradients exist at once.
    fn start_reduce(&mut self, unit: usize) {
        if self.units[unit].trainable > 0 {
            self.reductions[unit] = Reduction::WithinShards;
            self.push(Instruction::start_reduce(unit));
        }
        let earlier = unit + self.policy.prefetch;
        if self.reductions.get(earlier) == Some(&Reduction::WithinShards) {
            self.reductions[earlier] = Reduction::BetweenReplicas;
            self.push(Instruction::WaitReduceScatter(earlier));
        }
    }

    fn wait_reduce(&mut self, unit: usize) {
        if self.reductions[unit] != Reduction::None {
            self.reductions[unit] = Reduction::None;
            self.push(Instruction::WaitReduce(unit));
        }
    }
}
