//! Builds the program of one stage, action by action.

mod offload;
mod parameters;
mod places;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use crate::pipeline::{Action, Pass};
use crate::program::instruction::unit_tied_to;
use crate::program::policy::{ActivationCheckpointing, Policy, UnitSpec};
use crate::program::{Codec, Instruction, Keep, Message, Program};
use parameters::offload_parameters;
use places::{Gradients, KeptInput};

/// What a program is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Goal {
    /// Forward passes only.
    Inference,
    /// Forward and backward passes, whose gradients are discarded.
    Replay,
    /// Forward and backward passes, and the reduction of gradients.
    Training,
}

/// A program that does not start its receives yet.
pub(super) struct Draft {
    pub(super) program: Program,
    /// Where each action starts.
    starts: Vec<usize>,
}

impl Draft {
    /// Where the action starts that comes before the one at a position.
    pub(super) fn action_before(&self, position: usize) -> usize {
        let actions = self.starts.partition_point(|&start| start <= position);
        self.starts[actions.saturating_sub(2)]
    }
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

/// The program of a stage, as it grows.
#[derive(Clone)]
pub(super) struct Stage<'a> {
    units: &'a [UnitSpec],
    policy: &'a Policy,
    /// The units of each chunk of the model.
    chunks: &'a [Range<usize>],
    /// The stage of each unit.
    stages: &'a [usize],
    /// This one.
    stage: usize,
    goal: Goal,
    /// The first unit with trainable parameters, where the backward pass ends.
    first_trainable: usize,
    parameters: Vec<Parameters>,
    /// How many more times gradients are accumulated before a unit's are reduced.
    missing: Vec<usize>,
    reductions: Vec<Reduction>,
    /// The units whose last backward pass is over, and how many were before each, until they are waited for.
    reducing: VecDeque<(usize, usize)>,
    backward_ends: usize,
    /// How many more times a unit's gradients are reduced.
    reductions_left: Vec<usize>,
    /// Where each unit's reduced gradients are.
    gradients: Vec<Gradients>,
    /// The unit whose gradients will be stored or used once they are reduced between replicas.
    replicating: Option<usize>,
    /// The units that are updated.
    updated: BTreeSet<usize>,
    /// The units for whose update everything is in memory, or being fetched.
    fetched: BTreeSet<usize>,
    /// The units that the step before has left to update.
    deferred: Vec<usize>,
    /// The units of which what an update has changed is being stored.
    storing_updated: VecDeque<usize>,
    /// The unit whose gradients are being stored.
    storing: Option<usize>,
    /// Where the inputs of units and micro-batches are that are kept on a tier.
    inputs: BTreeMap<(usize, usize), KeptInput>,
    /// Whether a unit has received the parameter that it is tied to.
    has_tied_parameters: Vec<bool>,
    starts: Vec<usize>,
    instructions: Vec<Instruction>,
}

impl<'a> Stage<'a> {
    pub(super) fn new(
        units: &'a [UnitSpec],
        policy: &'a Policy,
        chunks: &'a [Range<usize>],
        (stages, stage): (&'a [usize], usize),
        goal: Goal,
    ) -> Self {
        let at_start = |unit: &UnitSpec| match policy.sharding.parameters {
            true => Parameters::Sharded,
            // The update before this step may still be gathering.
            false if policy.sharding.optimizer && unit.trainable > 0 => Parameters::Gathering,
            false => Parameters::Whole,
        };
        let mut stage = Stage {
            units,
            policy,
            chunks,
            stages,
            stage,
            goal,
            first_trainable: units.iter().position(|unit| unit.trainable > 0).unwrap_or(units.len()),
            parameters: units.iter().map(at_start).collect(),
            missing: Vec::new(),
            reductions: vec![Reduction::None; units.len()],
            reducing: VecDeque::new(),
            backward_ends: 0,
            reductions_left: vec![if policy.reduce_each_micro_batch { policy.micro_batches } else { 1 }; units.len()],
            gradients: vec![Gradients::InMemory; units.len()],
            replicating: None,
            updated: BTreeSet::new(),
            fetched: BTreeSet::new(),
            deferred: Vec::new(),
            storing_updated: VecDeque::new(),
            storing: None,
            inputs: BTreeMap::new(),
            has_tied_parameters: vec![false; units.len()],
            starts: Vec::new(),
            instructions: Vec::new(),
        };
        stage.missing = (0..units.len()).map(|unit| stage.accumulations(unit)).collect();
        stage
    }

    pub(super) fn finish(self) -> Draft {
        let units = self.units.iter().map(|unit| unit.name.clone()).collect();
        let (instructions, starts) = match self.policy.parameter_tier {
            Some(tier) => offload_parameters(&self.instructions, &self.starts, tier),
            None => (self.instructions, self.starts),
        };
        Draft { program: Program { units, instructions }, starts }
    }

    pub(super) fn count_tokens(&mut self) {
        self.push(Instruction::CountTokens);
    }

    /// Takes over what a step like this one has left: updates, and the stores of those that it has made last. Starts to fetch what the first
    /// update needs.
    pub(super) fn defer_updates_of(&mut self, last: &Stage<'_>) {
        self.deferred =
            (0..self.units.len()).filter(|&unit| self.is_trained(unit) && self.policy.defers_update(unit)).collect();
        for &unit in &self.deferred {
            self.gradients[unit] = last.gradients[unit];
        }
        self.storing_updated = last.storing_updated.clone();
        self.fetch_for_deferred();
    }

    /// The reduced gradients' norms, the totals, and the update of the units that are not updated yet.
    pub(super) fn update(&mut self) {
        let is_left = |&unit: &usize| self.is_trained(unit) && !self.updated.contains(&unit);
        let is_deferred = |&unit: &usize| self.policy.defers_update(unit);
        let (deferred, mut left): (Vec<usize>, Vec<usize>) =
            (0..self.units.len()).filter(is_left).partition(is_deferred);
        if self.policy.update_in_backward {
            // In the order in which their gradients are reduced.
            left.reverse();
            self.update_units(&left);
            deferred.into_iter().rev().for_each(|unit| self.add_norm(unit));
            self.push(Instruction::ReduceTotals);
        } else {
            for &unit in deferred.iter().chain(&left) {
                // Stored gradients have their norms.
                if self.gradients[unit] == Gradients::InMemory {
                    self.add_norm(unit);
                }
            }
            self.wait_store_gradients();
            self.push(Instruction::ReduceTotals);
            self.update_units(&left);
        }
        if !self.policy.update_in_forward {
            self.wait_store_updated(0);
        }
    }

    /// Waits until a unit's gradients are reduced, and adds their norm to the totals.
    fn add_norm(&mut self, unit: usize) {
        self.wait_reduce(unit);
        self.push(Instruction::Norm(unit));
    }

    /// Updates units. While one unit is updated, what the update of the next needs is fetched, and the state of the previous is stored.
    fn update_units(&mut self, trained: &[usize]) {
        let ahead = self.policy.prefetch;
        trained.iter().take(ahead).for_each(|&unit| self.fetch_for_update(unit));
        for (index, &unit) in trained.iter().enumerate() {
            trained.get(index + ahead).into_iter().for_each(|&next| self.fetch_for_update(next));
            self.update_unit(unit);
        }
    }

    /// Updates a unit with the gradients of this step.
    fn update_unit(&mut self, unit: usize) {
        self.fetch_for_update(unit);
        if self.policy.update_in_backward {
            self.add_norm(unit);
        }
        self.finish_update(unit, self.policy.prefetch);
        self.updated.insert(unit);
    }

    /// Updates a unit, if the step before has left that to this one. Meanwhile, what the next of these updates need is fetched.
    fn update_deferred(&mut self, unit: usize) {
        if self.deferred.contains(&unit) {
            self.fetch_for_update(unit);
            self.deferred.retain(|&deferred| deferred != unit);
            self.fetch_for_deferred();
            // The stores that the step before has started last have this forward pass to finish.
            let more = usize::from(self.policy.update_in_backward && self.policy.prefetch > 0);
            self.finish_update(unit, self.policy.prefetch + more);
            // They are used up.
            self.gradients[unit] = Gradients::InMemory;
        }
    }

    /// Starts to fetch what the next deferred updates need.
    fn fetch_for_deferred(&mut self) {
        let next: Vec<usize> = self.deferred.iter().copied().take(self.policy.prefetch).collect();
        next.into_iter().for_each(|unit| self.fetch_for_update(unit));
    }

    /// Updates a unit once everything is fetched, and starts to store what has changed, while at most `stores` units are being stored.
    fn finish_update(&mut self, unit: usize, stores: usize) {
        self.for_fetched(unit, Instruction::WaitFetch);
        self.push(Instruction::Update(unit));
        self.for_updated(unit, Instruction::StartStore);
        self.storing_updated.push_back(unit);
        self.wait_store_updated(stores);
    }

    /// Sends parameters to the stages whose units are tied to them. They stay gathered if the first action needs them.
    pub(super) fn send_tied_parameters(&mut self, actions: &[Action]) {
        let first = actions.first().map(|action| self.chunks[action.chunk].start);
        for owner in 0..self.units.len() {
            if self.has(owner) && self.tied_elsewhere_to(owner).is_some() {
                self.starts.push(self.instructions.len());
                self.gather(owner);
                self.push(Instruction::Send(Message::tied_parameters(owner)));
                if first != Some(owner) {
                    self.release(owner);
                }
            }
        }
    }

    /// The passes of a list of actions. While the last unit of one computes, the first unit of the next is gathered.
    pub(super) fn run(&mut self, actions: &[Action]) {
        let has_pass =
            |action: &&Action| action.pass == Pass::Forward || self.chunks[action.chunk].end > self.first_trainable;
        let actions: Vec<Action> = actions.iter().filter(has_pass).copied().collect();
        for (index, &action) in actions.iter().enumerate() {
            let Action { pass, chunk, micro_batch } = action;
            self.starts.push(self.instructions.len());
            // Gradients of parameters need no parameters.
            let reads = actions[index + 1..].iter().find(|action| action.pass != Pass::BackwardWeight);
            let next = reads.and_then(|action| self.first_read(action));
            match pass {
                Pass::Forward => {
                    let is_its_backward = |next: &Action| next.pass.is_backward() && same_micro_batch(next, &action);
                    self.forward(chunk, micro_batch, next, actions.get(index + 1).is_some_and(is_its_backward));
                }
                Pass::Backward | Pass::BackwardInput => {
                    let before = index.checked_sub(1).map(|before| actions[before]);
                    let follows = before == Some(Action::forward(chunk, micro_batch));
                    self.backward(action, next, follows);
                }
                Pass::BackwardWeight => self.backward_weight(chunk, micro_batch),
            }
            if self.policy.reduce_each_micro_batch && matches!(pass, Pass::Backward | Pass::BackwardWeight) {
                (0..self.units.len()).for_each(|unit| self.wait_reduce(unit));
                self.reducing.clear();
                self.replicating = None;
            }
        }
    }

    /// The forward pass of a chunk. While one unit computes, the parameters of the next are gathered. `next` is the unit that the
    /// next action reads first; `is_followed` says whether that is the backward pass of this micro-batch.
    fn forward(&mut self, chunk: usize, micro_batch: usize, next: Option<usize>, is_followed: bool) {
        let Range { start, end } = self.chunks[chunk];
        if start > 0 && !self.has(start - 1) {
            self.prefetch(start);
            self.push(Instruction::WaitReceive(Message::activations(start, micro_batch)));
        }
        let now = start..if self.is_delayed(end - 1, is_followed) { end - 1 } else { end };
        for unit in now.clone() {
            self.wait_tied_parameters(unit);
            self.gather(unit);
            (unit + 1..now.end).chain(next).take(self.policy.prefetch).for_each(|next| self.prefetch(next));
            let keep = self.kept_activations(unit, is_followed && unit + 1 == end);
            self.push(Instruction::Forward { unit, micro_batch, keep });
            if keep == Keep::Input && unit > 0 {
                self.store_input(unit, micro_batch);
            }
            self.release_unless_next(unit, next.filter(|_| unit + 1 == now.end));
        }
        if end < self.units.len() && !self.has(end) {
            self.push(Instruction::Send(Message::activations(end - 1, micro_batch)));
        }
    }

    /// The backward pass of a chunk, or its first half. While one unit computes, parameters of the next are gathered and gradients
    /// of the previous reduced. `follows` says whether the action before was the forward pass of this micro-batch.
    fn backward(&mut self, action: Action, next: Option<usize>, follows: bool) {
        let Action { pass, chunk, micro_batch } = action;
        let Range { start, end } = self.chunks[chunk];
        let lowest = start.max(self.first_trainable);
        if end < self.units.len() && !self.has(end) {
            self.first_read(&action).into_iter().for_each(|last| self.prefetch(last));
            self.push(Instruction::WaitReceive(Message::gradients(end - 1, micro_batch)));
        }
        let is_delayed = self.is_delayed(end - 1, follows);
        if is_delayed {
            self.wait_tied_parameters(end - 1);
            self.gather(end - 1);
            let keep = self.kept_activations(end - 1, true);
            self.push(Instruction::Forward { unit: end - 1, micro_batch, keep });
        }
        let follows = follows || is_delayed;
        for unit in (lowest..end).rev() {
            let reads = self.units[unit].backward_reads_parameters;
            if reads {
                self.gather(unit);
            }
            let is_read = |unit: usize| self.units[unit].backward_reads_parameters.then_some(unit);
            let later: Vec<Option<usize>> = (lowest..unit).rev().map(is_read).chain([next]).collect();
            later.into_iter().take(self.policy.prefetch).flatten().for_each(|next| self.prefetch(next));
            self.fetch_input(unit, micro_batch);
            let soon = (lowest..unit).rev().take(self.policy.prefetch);
            soon.for_each(|unit| self.prefetch_input(unit, micro_batch));
            if self.is_recomputed(unit, follows && unit + 1 == end) {
                self.push(Instruction::Recompute { unit, micro_batch });
            }
            if pass == Pass::Backward {
                self.prefetch_gradients(unit);
            }
            self.push(match pass {
                Pass::BackwardInput => Instruction::BackwardInput { unit, micro_batch },
                _ => Instruction::Backward { unit, micro_batch },
            });
            if action.micro_batch == 0 && unit + 1 == end && self.policy.update_in_forward {
                // Those of deferred updates, which had this backward pass to be stored.
                self.wait_store_updated(0);
            }
            if unit == start && start > self.first_trainable && !self.has(start - 1) {
                self.push(Instruction::Send(Message::gradients(start, micro_batch)));
            }
            if reads {
                self.release_unless_next(unit, next.filter(|_| unit == lowest));
            }
            if pass == Pass::Backward {
                self.accumulate(unit, micro_batch);
            }
        }
    }

    /// The second half of a backward pass.
    fn backward_weight(&mut self, chunk: usize, micro_batch: usize) {
        let Range { start, end } = self.chunks[chunk];
        for unit in (start.max(self.first_trainable)..end).rev() {
            self.prefetch_gradients(unit);
            self.push(Instruction::BackwardWeight { unit, micro_batch });
            self.accumulate(unit, micro_batch);
        }
    }

    /// The unit that an action reads first, if it reads the parameters of the first unit that it passes.
    fn first_read(&self, action: &Action) -> Option<usize> {
        let Range { start, end } = self.chunks[action.chunk];
        match action.pass {
            Pass::Forward => Some(start),
            _ => Some(end - 1).filter(|&last| self.units[last].backward_reads_parameters),
        }
    }

    /// Whether a unit's forward pass is delayed until just before its backward pass, so that few of the gradients that it computes
    /// exist at once. Only the last unit's can be: no other waits for it.
    fn is_delayed(&self, unit: usize, is_followed: bool) -> bool {
        self.units[unit].forward_computes_gradients
            && unit + 1 == self.units.len()
            && self.goal != Goal::Inference
            && !is_followed
    }

    fn kept_activations(&self, unit: usize, is_followed: bool) -> Keep {
        match self.policy.activation_checkpointing {
            _ if unit < self.first_trainable || self.goal == Goal::Inference => Keep::Nothing,
            _ if self.is_recomputed(unit, is_followed) => Keep::Input,
            ActivationCheckpointing::Selective => Keep::Selective,
            ActivationCheckpointing::None | ActivationCheckpointing::Full => Keep::All,
        }
    }

    /// Whether full activation checkpointing recomputes a unit in the backward pass. It does not if that would save nothing: if the
    /// unit's backward pass follows its forward pass at once, and if its graph holds next to nothing.
    fn is_recomputed(&self, unit: usize, is_followed: bool) -> bool {
        self.policy.activation_checkpointing == ActivationCheckpointing::Full
            && unit >= self.first_trainable
            && !is_followed
            && self.units[unit].backward_reads_parameters
    }

    /// Starts to gather a unit and the one on this stage that it is tied to, as soon as they are updated.
    fn prefetch(&mut self, unit: usize) {
        for unit in self.tied_here(unit).into_iter().chain([unit]) {
            self.update_deferred(unit);
            if self.parameters[unit] == Parameters::Sharded {
                self.parameters[unit] = Parameters::Gathering;
                // Evaluations use the exact parameters.
                let codec = if self.goal == Goal::Inference { Codec::None } else { self.policy.gather_codec };
                self.push(Instruction::StartGather { unit, codec });
            }
        }
    }

    /// Gathers a unit and the one on this stage that it is tied to.
    fn gather(&mut self, unit: usize) {
        self.prefetch(unit);
        for unit in self.tied_here(unit).into_iter().chain([unit]) {
            if self.parameters[unit] == Parameters::Gathering {
                self.parameters[unit] = Parameters::Whole;
                self.push(Instruction::WaitGather(unit));
            }
        }
    }

    /// Releases a unit and the one on this stage that it is tied to, if parameters are sharded.
    fn release(&mut self, unit: usize) {
        for unit in self.tied_here(unit).into_iter().chain([unit]).filter(|_| self.policy.sharding.parameters) {
            if self.parameters[unit] == Parameters::Whole {
                self.parameters[unit] = Parameters::Sharded;
                self.instructions.push(Instruction::Release(unit));
            }
        }
    }

    /// Releases a unit, unless the next action starts with it.
    fn release_unless_next(&mut self, unit: usize, next: Option<usize>) {
        if next != Some(unit) {
            self.release(unit);
        }
    }

    /// Waits for the parameter that a unit is tied to, if another stage sends it and this is the first to need it.
    fn wait_tied_parameters(&mut self, unit: usize) {
        let is_elsewhere = self.units[unit].tied.is_some_and(|owner| !self.has(owner));
        if is_elsewhere && !std::mem::replace(&mut self.has_tied_parameters[unit], true) {
            self.push(Instruction::WaitReceive(Message::tied_parameters(unit)));
        }
    }

    /// Accumulates the gradients of a backward pass, and starts to reduce those that are complete.
    fn accumulate(&mut self, unit: usize, micro_batch: usize) {
        if self.goal != Goal::Training {
            return;
        }
        self.push(Instruction::Accumulate { unit, micro_batch });
        let tied = self.tied_here(unit).filter(|&owner| self.units[owner].trainable > 0);
        for target in tied.into_iter().chain([unit]) {
            self.missing[target] = self.missing[target].saturating_sub(1);
            if self.missing[target] == 0 {
                self.missing[target] = self.accumulations(target);
                if target == unit && self.sends_tied_gradients(unit) {
                    self.push(Instruction::Send(Message::tied_gradients(unit, micro_batch)));
                }
                self.start_reduce(target, micro_batch);
            }
        }
    }

    /// Starts to reduce a unit's gradients, and waits for those of an earlier one, so that few unsharded gradients exist at once.
    fn start_reduce(&mut self, unit: usize, micro_batch: usize) {
        if self.units[unit].trainable > 0 {
            if self.tied_elsewhere_to(unit).is_some() {
                self.push(Instruction::WaitReceive(Message::tied_gradients(unit, micro_batch)));
            }
            self.fetch_gradients(unit);
            self.reductions[unit] = Reduction::WithinShards;
            self.reductions_left[unit] = self.reductions_left[unit].saturating_sub(1);
            let codec = self.gradient_codec(unit);
            self.push(Instruction::StartReduce { unit, codec });
            self.reducing.push_back((unit, self.backward_ends));
        }
        while let Some(&(earlier, index)) = self.reducing.front()
            && index + self.policy.prefetch <= self.backward_ends
        {
            self.reducing.pop_front();
            self.reductions[earlier] = Reduction::BetweenReplicas;
            self.push(Instruction::WaitReduceScatter(earlier));
            let is_updated = self.policy.update_in_backward && self.reductions_left[earlier] == 0;
            if is_updated && self.policy.prefetch > 0 && !self.policy.defers_update(earlier) {
                self.fetch_for_update(earlier);
            }
            if (is_updated || self.policy.gradient_tier.is_some())
                && let Some(reduced) = self.replicating.replace(earlier)
            {
                match is_updated {
                    true if self.policy.defers_update(reduced) => (),
                    true => self.update_unit(reduced),
                    false => self.store_gradients(reduced),
                }
            }
        }
        self.backward_ends += 1;
    }

    /// How a unit's gradients travel: as they were computed, if nothing was added to them. Without shards, they are summed where they are
    /// accumulated, in the dtype of the reduction.
    fn gradient_codec(&self, unit: usize) -> Codec {
        let is_single = self.accumulations(unit) == 1 && self.tied_elsewhere_to(unit).is_none();
        match self.units[unit].narrow_gradients && is_single && self.policy.sharding.gradients {
            true => Codec::ParamDtype,
            false => Codec::None,
        }
    }

    fn wait_reduce(&mut self, unit: usize) {
        if self.reductions[unit] != Reduction::None {
            self.reductions[unit] = Reduction::None;
            self.push(Instruction::WaitReduce(unit));
        }
    }

    /// How many times gradients are added to a unit's on this stage before they are reduced.
    fn accumulations(&self, unit: usize) -> usize {
        let gives = |&from: &usize| from == unit || self.units[from].tied == Some(unit);
        let backward = (self.first_trainable..self.units.len()).filter(|&from| self.has(from));
        backward.filter(gives).count() * if self.policy.reduce_each_micro_batch { 1 } else { self.policy.micro_batches }
    }

    /// Whether a unit is on this stage and has trainable parameters.
    fn is_trained(&self, unit: usize) -> bool {
        self.has(unit) && self.units[unit].trainable > 0
    }

    /// Whether a unit is on this stage.
    fn has(&self, unit: usize) -> bool {
        self.stages[unit] == self.stage
    }

    /// The unit that a unit is tied to, if it is on this stage.
    fn tied_here(&self, unit: usize) -> Option<usize> {
        self.units[unit].tied.filter(|&owner| self.has(owner))
    }

    /// The unit of another stage that is tied to a unit of this one.
    fn tied_elsewhere_to(&self, owner: usize) -> Option<usize> {
        unit_tied_to(self.units, owner).filter(|&tied| !self.has(tied))
    }

    fn sends_tied_gradients(&self, unit: usize) -> bool {
        self.units[unit].tied.is_some_and(|owner| !self.has(owner) && self.units[owner].trainable > 0)
    }

    fn push(&mut self, instruction: Instruction) {
        self.instructions.push(instruction);
    }
}

fn same_micro_batch(one: &Action, other: &Action) -> bool {
    (one.chunk, one.micro_batch) == (other.chunk, other.micro_batch)
}
