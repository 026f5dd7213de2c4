//! [`Rule::Gradients`]: from the backward passes to the update.

use super::scope::{Purpose, Scope};
use super::violation::{Problem, Rule};
use crate::program::{Buffer, Codec, Instruction, Message, Offload, Payload, Program};

/// How far the reduction of a unit's gradients is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reduction {
    None,
    WithinShards,
    BetweenReplicas,
}

/// The gradients of one unit.
#[derive(Clone)]
struct UnitGradients {
    /// How many times gradients were added since the last reduction.
    added: usize,
    /// The micro-batch of the unit's own gradients that were accumulated last.
    last_micro_batch: usize,
    /// The gradient that another stage has sent was added since the last reduction.
    has_tied: bool,
    reduction: Reduction,
    /// The last instruction that changed `reduction`.
    changed_at: Option<usize>,
    /// How many reductions were started.
    reductions: usize,
    has_norm: bool,
    /// The step before has left its update to this one, which has not come to it yet.
    awaits_update: bool,
    /// It was updated with the gradients of this step.
    is_updated: bool,
}

struct Gradients<'a> {
    scope: &'a Scope<'a>,
    /// The unit and micro-batch of the last backward pass, if its gradients were not accumulated yet.
    computed: Option<(usize, usize)>,
    units: Vec<UnitGradients>,
    has_totals: bool,
}

pub(super) fn check(program: &Program, scope: &Scope<'_>) -> Result<(), Problem> {
    let at_start = UnitGradients {
        added: 0,
        last_micro_batch: 0,
        has_tied: false,
        reduction: Reduction::None,
        changed_at: None,
        reductions: 0,
        has_norm: false,
        awaits_update: false,
        is_updated: false,
    };
    let at_start = |unit| UnitGradients { awaits_update: scope.has_deferred_update(unit), ..at_start.clone() };
    let units = (0..scope.units.len()).map(at_start).collect();
    let mut gradients = Gradients { scope, computed: None, units, has_totals: false };
    for (position, instruction) in program.instructions.iter().enumerate() {
        let applied = gradients.apply(position, instruction);
        applied.map_err(|problem| Problem::at(position, Rule::Gradients, problem))?;
    }
    gradients.check_end(program)
}

impl Gradients<'_> {
    fn apply(&mut self, position: usize, instruction: &Instruction) -> Result<(), String> {
        match *instruction {
            Instruction::Forward { unit, .. }
            | Instruction::Recompute { unit, .. }
            | Instruction::BackwardInput { unit, .. } => self.check_updates(unit),
            Instruction::Send(Message { payload: Payload::TiedParameters, unit, .. }) => self.check_updates(unit),
            Instruction::Backward { unit, micro_batch } => {
                self.check_updates(unit)?;
                self.backward(unit, micro_batch)
            }
            Instruction::BackwardWeight { unit, micro_batch } => self.backward(unit, micro_batch),
            Instruction::Accumulate { unit, micro_batch } => self.accumulate(unit, micro_batch),
            Instruction::WaitReceive(Message { payload: Payload::TiedGradients, unit, .. }) => self.add_tied(unit),
            Instruction::StartReduce { unit, codec } => self.start_reduce(unit, codec, position),
            Instruction::WaitReduceScatter(unit) => self.wait_reduce_scatter(unit, position),
            Instruction::WaitReduce(unit) => self.wait_reduce(unit, position),
            Instruction::Norm(unit) => self.norm(unit),
            Instruction::ReduceTotals => self.reduce_totals(),
            Instruction::Update(unit) => self.update(unit),
            Instruction::StartStore(Offload { unit, buffer: Buffer::Gradients, .. }) => self.store(unit),
            _ => Ok(()),
        }
    }

    fn backward(&mut self, unit: usize, micro_batch: usize) -> Result<(), String> {
        if self.scope.purpose == Purpose::Training {
            self.check_accumulated()?;
        }
        self.computed = Some((unit, micro_batch));
        Ok(())
    }

    fn accumulate(&mut self, unit: usize, micro_batch: usize) -> Result<(), String> {
        if self.computed.take() != Some((unit, micro_batch)) {
            return Err("it must follow the backward pass whose gradients it adds, before the next one".to_string());
        }
        let last = std::mem::replace(&mut self.units[unit].last_micro_batch, micro_batch);
        if micro_batch < last {
            let name = self.scope.name(unit);
            return Err(format!("{name} has gradients of micro-batch {last}; they are added in ascending order"));
        }
        for target in self.targets(unit) {
            self.check_open(target)?;
            self.units[target].added += 1;
        }
        Ok(())
    }

    /// Whether a unit and the one that it is tied to have the parameters of this step.
    fn check_updates(&self, unit: usize) -> Result<(), String> {
        self.scope.tied_here(unit).into_iter().chain([unit]).try_for_each(|unit| {
            let (name, gradients) = (self.scope.name(unit), &self.units[unit]);
            match (gradients.awaits_update, gradients.is_updated) {
                (true, _) => Err(format!("{name} still has the parameters of the step before")),
                (false, true) => Err(format!("{name} is updated already")),
                (false, false) => Ok(()),
            }
        })
    }

    /// Adds the gradient that another stage has sent, after all gradients of this one.
    fn add_tied(&mut self, unit: usize) -> Result<(), String> {
        self.check_trainable(unit)?;
        self.check_open(unit)?;
        let (expected, gradients) = (self.expected(unit), &mut self.units[unit]);
        if gradients.added != expected || std::mem::replace(&mut gradients.has_tied, true) {
            return Err("it is added once, after the gradients of this stage".to_string());
        }
        Ok(())
    }

    /// Whether gradients can be added to those of a unit.
    fn check_open(&self, unit: usize) -> Result<(), String> {
        let (name, gradients) = (self.scope.name(unit), &self.units[unit]);
        if gradients.is_updated {
            return Err(format!("{name} is updated already"));
        }
        if gradients.awaits_update {
            return Err(format!("{name} still has the gradients of the step before"));
        }
        if gradients.reduction != Reduction::None {
            return Err(format!("the gradients of {name} are being reduced"));
        }
        if gradients.reductions > 0 && !self.scope.policy.sharding.gradients {
            return Err(format!("the gradients of {name} were reduced; without shards that works once per step"));
        }
        Ok(())
    }

    fn start_reduce(&mut self, unit: usize, codec: Codec, position: usize) -> Result<(), String> {
        self.check_trainable(unit)?;
        if codec == Codec::ParamDtype {
            self.check_narrow(unit)?;
        }
        let (expected, needs_tied) = (self.expected(unit), self.scope.tied_elsewhere_to(unit).is_some());
        let gradients = &mut self.units[unit];
        if gradients.reduction != Reduction::None {
            return Err("its gradients are already being reduced".to_string());
        }
        if gradients.added != expected {
            return Err(format!("it has {} of {expected} gradients to reduce", gradients.added));
        }
        if needs_tied && !gradients.has_tied {
            return Err("the gradient of the tied unit on another stage is not received yet".to_string());
        }
        (gradients.added, gradients.has_tied) = (0, false);
        gradients.reductions += 1;
        gradients.reduction = Reduction::WithinShards;
        gradients.changed_at = Some(position);
        Ok(())
    }

    /// Whether a unit's gradients can travel in the dtype of its parameters without losing digits.
    fn check_narrow(&self, unit: usize) -> Result<(), String> {
        if !self.scope.units[unit].narrow_gradients {
            return Err("its gradients are not computed in the dtype of its parameters".to_string());
        }
        if !self.scope.policy.sharding.gradients {
            return Err("gradients that are not sharded are summed where they were accumulated".to_string());
        }
        match self.expected(unit) == 1 && self.scope.tied_elsewhere_to(unit).is_none() {
            true => Ok(()),
            false => Err("its gradients are sums, which have more digits than its parameters".to_string()),
        }
    }

    fn wait_reduce_scatter(&mut self, unit: usize, position: usize) -> Result<(), String> {
        let gradients = &mut self.units[unit];
        if gradients.reduction != Reduction::WithinShards {
            return Err("its gradients are not being reduced within the shard group".to_string());
        }
        gradients.reduction = Reduction::BetweenReplicas;
        gradients.changed_at = Some(position);
        Ok(())
    }

    fn wait_reduce(&mut self, unit: usize, position: usize) -> Result<(), String> {
        let gradients = &mut self.units[unit];
        if gradients.reduction == Reduction::None {
            return Err("its gradients are not being reduced".to_string());
        }
        gradients.reduction = Reduction::None;
        gradients.changed_at = Some(position);
        Ok(())
    }

    fn store(&self, unit: usize) -> Result<(), String> {
        match self.units[unit].reduction == Reduction::None && self.units[unit].reductions > 0 {
            true => Ok(()),
            false => Err("its gradients are not reduced".to_string()),
        }
    }

    fn norm(&mut self, unit: usize) -> Result<(), String> {
        self.check_trainable(unit)?;
        let planned = if self.scope.policy.reduce_each_micro_batch { self.scope.policy.micro_batches } else { 1 };
        let gradients = &mut self.units[unit];
        if gradients.reduction != Reduction::None || gradients.reductions != planned {
            return Err("its gradients are not completely reduced".to_string());
        }
        if gradients.has_norm {
            return Err("it has a norm already".to_string());
        }
        gradients.has_norm = true;
        Ok(())
    }

    fn reduce_totals(&mut self) -> Result<(), String> {
        if self.has_totals {
            return Err("the totals are reduced already".to_string());
        }
        let lacks_norm = |&unit: &usize| self.scope.units[unit].trainable > 0 && !self.units[unit].has_norm;
        if let Some(unit) = self.scope.own().find(lacks_norm) {
            return Err(format!("{} has no norm yet", self.scope.units[unit].name));
        }
        self.has_totals = true;
        Ok(())
    }

    fn update(&mut self, unit: usize) -> Result<(), String> {
        self.check_trainable(unit)?;
        if std::mem::take(&mut self.units[unit].awaits_update) {
            return Ok(());
        }
        if self.scope.policy.defers_update(unit) {
            return Err("its update with the gradients of this step is left to the next one".to_string());
        }
        match (self.has_totals, self.scope.policy.update_in_backward) {
            (false, false) => return Err("it is updated before the totals are reduced".to_string()),
            (true, true) => return Err("it is updated after the totals are reduced".to_string()),
            _ => (),
        }
        if !self.units[unit].has_norm {
            return Err("its gradients have no norm yet".to_string());
        }
        if self.units[unit].is_updated {
            return Err("it is updated already".to_string());
        }
        self.units[unit].is_updated = true;
        Ok(())
    }

    fn check_end(&self, program: &Program) -> Result<(), Problem> {
        let missing = |problem: String| Err(Problem::missing(Rule::Gradients, problem));
        if let Some(running) = self.units.iter().position(|unit| unit.reduction != Reduction::None) {
            let problem =
                format!("the gradients of {} are still being reduced at the end", self.scope.units[running].name);
            return Err(Problem { position: self.units[running].changed_at, rule: Rule::Gradients, problem });
        }
        if self.scope.purpose != Purpose::Training {
            return Ok(());
        }
        self.check_accumulated().map_err(|problem| Problem::missing(Rule::Gradients, problem))?;
        if !self.has_totals {
            return missing("the totals are never reduced".to_string());
        }
        if let Some(unit) = self.units.iter().position(|unit| unit.awaits_update) {
            let problem = format!("{} is never updated with the gradients of the step before", self.scope.name(unit));
            return missing(problem);
        }
        let lacks_update = |&unit: &usize| {
            let is_updated = self.units[unit].is_updated || self.scope.policy.defers_update(unit);
            self.scope.units[unit].trainable > 0 && !is_updated
        };
        match self.scope.own().find(lacks_update) {
            Some(unit) if self.units.iter().any(|unit| unit.is_updated) => {
                missing(format!("{} is never updated, but other units are", self.scope.units[unit].name))
            }
            Some(unit) if self.scope.policy.update_in_backward => {
                missing(format!("{} is never updated", self.scope.units[unit].name))
            }
            // A skipped step.
            Some(_) if program.instructions.last() != Some(&Instruction::ReduceTotals) => {
                missing("a step without an update ends with the totals".to_string())
            }
            _ => Ok(()),
        }
    }

    fn check_accumulated(&self) -> Result<(), String> {
        match self.computed {
            Some((unit, micro_batch)) => {
                let name = &self.scope.units[unit].name;
                Err(format!("the gradients of {name} in micro-batch {micro_batch} were not accumulated"))
            }
            None => Ok(()),
        }
    }

    fn check_trainable(&self, unit: usize) -> Result<(), String> {
        match self.scope.units[unit].trainable > 0 {
            true => Ok(()),
            false => Err("it has no trainable parameters".to_string()),
        }
    }

    /// The units of this stage that get gradients from a backward pass of `unit`.
    fn targets(&self, unit: usize) -> Vec<usize> {
        let tied = self.scope.tied_here(unit).filter(|&tied| tied != unit);
        tied.into_iter().chain([unit]).filter(|&target| self.scope.units[target].trainable > 0).collect()
    }

    /// How many times backward passes of this stage add gradients to those of `unit` before they are reduced.
    fn expected(&self, unit: usize) -> usize {
        let gives = |&from: &usize| from == unit || self.scope.units[from].tied == Some(unit);
        let contributors = self.scope.own().filter(|&from| from >= self.scope.first_trainable()).filter(gives).count();
        contributors * if self.scope.policy.reduce_each_micro_batch { 1 } else { self.scope.policy.micro_batches }
    }
}
