//! The training step: forward, backward, reduce, clip, update.
//!
//! The order of a step is a value, the [`Program`] that `plan` builds from the options. The step executes it between the first two
//! banners below, which fits on two screens. It names no layer and no ZeRO stage: `ShardedUnit` decides what gathering, releasing
//! and reducing a unit means.

use std::sync::Arc;

use shardwise_comm::ReduceOp;
use shardwise_model::{Activations, Batch, DeferredGradients, Model, Pass, TensorParallel, Unit};
use shardwise_plan::LayerPlace;
use shardwise_plan::program::{Instruction, Keep, ModelParallel, Policy, Program, Programs, UnitSpec};
use shardwise_torch::autograd::{self, Graph};
use shardwise_torch::tch::{Device, Tensor, no_grad};
use shardwise_torch::{Stream, kind_of};
use shardwise_zero::{Bytes, Moved, OffloadTargets, Pool, ShardedUnit};

use crate::error::{Error, Result};
use crate::expert_biases::ExpertBiases;
use crate::expert_counts;
use crate::init::ParameterInit;
use crate::loss_scale::LossScaler;
use crate::offloaded_inputs::OffloadedInputs;
use crate::options::{Options, Ranks};
use crate::own_units::OwnUnits;
use crate::probe::{Probe, StepPhase};
use crate::progress::SkippedBatch;
use crate::report::{Gradients, Report};
use crate::shard_model::{offload_targets, shard_model};
use crate::step_programs::{
    check_executable, check_programs, check_ties, checked_programs, replay_programs, splits_backward, stages_of_units,
};
use crate::step_values::{
    BeforeUpdate, DeferredUpdate, HalfBackward, ParameterGradient, StepValues, UnitPass, Unread, copy_batches,
};
use crate::tensor_group::TensorRanks;
use crate::unit_specs::{StepShape, unit_specs};

/// One rank's part of a model in training.
pub struct Trainer {
    pub(crate) model: Model,
    /// Those of this rank's stage.
    pub(crate) shards: OwnUnits,
    /// The stage of the pipeline that holds each unit.
    pub(crate) stage_of_unit: Vec<usize>,
    /// A parameter of another stage that a unit of this one is tied to, for the current step.
    pub(crate) tied_copy: Option<Tensor>,
    pool: Arc<Pool>,
    /// Where this rank offloads to.
    pub(crate) offload: OffloadTargets,
    /// The inputs of units that are offloaded, by unit and micro-batch.
    pub(crate) offloaded_inputs: OffloadedInputs,
    pub(crate) ranks: Ranks,
    pub(crate) options: Options,
    /// What the order of a step depends on, by unit.
    pub(crate) unit_specs: Vec<UnitSpec>,
    /// The verbs of tensor parallelism.
    pub(crate) parallel: TensorParallel,
    /// The program of the last step, which the next one probably has too.
    program: Option<(Policy, Arc<Program>)>,
    /// On which batches are copied to a device, and snapshots from it.
    copy_streams: Option<[Arc<Stream>; 2]>,
    /// The first unit with trainable parameters, where the backward pass ends.
    pub(crate) first_trainable: usize,
    pub(crate) loss_scaler: LossScaler,
    /// What is added to the scores of experts when tokens choose.
    pub(crate) expert_biases: ExpertBiases,
    pub(crate) steps: u64,
    /// The number of steps whose update was not skipped.
    pub(crate) updates: u32,
    pub(crate) skipped: u64,
    /// Batches that are skipped after a rollback.
    pub(crate) skipped_batches: Vec<SkippedBatch>,
    probe: Arc<dyn Probe>,
    /// By unit. Shared with every [`TensorLease`](crate::TensorLease).
    pub(crate) leases: Vec<Arc<()>>,
    /// The step whose gradients are complete and not applied yet.
    pending: Option<u64>,
    /// The update of the last step, if units are left that wait for it.
    pub(crate) deferred: Option<DeferredUpdate>,
    /// Whether a step has completed. Only the first reports missing gradients.
    has_stepped: bool,
    /// The error of a call that failed halfway. From then on every call fails.
    broken_by: Option<String>,
}

impl Trainer {
    /// Shards a model. `init` is called only for the elements that this rank keeps.
    pub fn new(model: Model, ranks: Ranks, options: Options, init: &mut ParameterInit<'_>) -> Result<Self> {
        options.check()?;
        let (device, reached) = (options.device, ranks.groups.shard.device());
        if device != reached {
            let problem =
                format!("the options' device is {device:?}, but the ranks' groups communicate {reached:?} memory");
            return Err(Error::Options(problem));
        }
        let layer_place = ranks.mesh().layer_place(ranks.world.rank());
        model
            .check_tensor_parallel(ranks.tensor.size())
            .and_then(|()| model.check_expert_parallel(layer_place))
            .map_err(|error| Error::Options(error.to_string()))?;
        if ranks.experts.size() > 1 && !model.is_built_in() {
            let problem =
                "expert parallelism is for built-in models: others could not send tokens to the experts of other ranks";
            return Err(Error::Options(problem.to_string()));
        }
        if ranks.context.size() > 1 && (!model.is_built_in() || model.package().is_some()) {
            let problem = "context parallelism is for built-in models that are not compiled: others would attend to a rank's own part only";
            return Err(Error::Options(problem.to_string()));
        }
        let pool = Arc::new(Pool::new(options.device));
        let is_trained = |unit: &Unit| unit.parameters().iter().any(|parameter| parameter.trainable);
        let first_trainable = model.units().iter().position(is_trained).ok_or(Error::AllFrozen)?;
        let stage_of_unit = stages_of_units(model.units().len(), &options, &ranks.mesh())?;
        check_ties(&model, &ranks.mesh())?;
        let loss_scaler = LossScaler::new(options.loss_scale);
        let place = ModelParallel::of_rank(&ranks.mesh(), ranks.world.rank());
        // The number of tokens changes nothing about the order.
        let positions = place.tensor.size * place.context.size();
        let shape = StepShape { sequences: 1, positions, micro_batches: 1 };
        let unit_specs = unit_specs(&model, &options, &place, shape);
        let offload = offload_targets(&unit_specs, &ranks, &options, &stage_of_unit)?;
        let shards = shard_model(&model, &ranks, &options, &stage_of_unit, &pool, &offload, init)?;
        let tensor_ranks = Arc::new(TensorRanks(ranks.tensor.clone()));
        let parallel = TensorParallel::new(tensor_ranks, options.splits_sequence(place.tensor))
            .with_async(options.async_tensor_parallel);
        let expert_biases = ExpertBiases::new(&model, device)?;
        let leases = model.units().iter().map(|_| Arc::default()).collect();
        Ok(Trainer {
            model,
            shards,
            stage_of_unit,
            tied_copy: None,
            pool,
            offload,
            offloaded_inputs: OffloadedInputs::default(),
            ranks,
            options,
            unit_specs,
            parallel,
            program: None,
            copy_streams: match device {
                Device::Cpu => None,
                device => Some([Arc::new(Stream::new(device)?), Arc::new(Stream::new(device)?)]),
            },
            first_trainable,
            loss_scaler,
            expert_biases,
            steps: 0,
            updates: 0,
            skipped: 0,
            skipped_batches: Vec::new(),
            probe: Arc::new(()),
            leases,
            pending: None,
            deferred: None,
            has_stepped: false,
            broken_by: None,
        })
    }

    /// Lets `probe` observe this trainer from now on.
    pub fn set_probe(&mut self, probe: Arc<dyn Probe>) {
        self.probe = probe;
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The ranks that train together.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// The options.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The number of steps so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The index of the first unit with trainable parameters, where the backward pass ends.
    pub fn first_trainable(&self) -> usize {
        self.first_trainable
    }

    /// The sharded units of this rank's stage, in the model's order. Updates may be left: see [`Trainer::finish_update`].
    pub fn shards_mut(&mut self) -> impl Iterator<Item = &mut ShardedUnit> {
        self.shards.iter_mut().map(|(_, shard)| shard)
    }

    /// The bytes of this rank's parameters, gradients and optimizer state, and those of unsharded buffers.
    pub fn bytes(&self) -> (Bytes, usize) {
        let held = self.shards.iter().map(|(_, shard)| shard.bytes()).fold(Bytes::default(), Bytes::plus);
        (held, self.pool.bytes())
    }

    /// Trains one step on this rank's micro-batches. All ranks call it together.
    ///
    /// If it fails, the trainer is either unchanged, or fails all further calls with [`Error::Broken`].
    pub fn step(&mut self, micro_batches: &[Batch]) -> Result<Report> {
        let gradients = self.compute_gradients(micro_batches)?;
        self.apply_update(gradients)
    }

    /// The first half of a step: forward and backward passes, and the reduction of gradients. All ranks call it together. It
    /// discards gradients that were computed before and not applied.
    ///
    /// With [`Options::update_in_backward`], it also updates the units. [`Trainer::apply_update`] must follow: until then, other calls
    /// fail, and gradients that are discarded leave a trainer that cannot be used.
    ///
    /// Before the first step of a custom model whose layers ranks share, compares the layers with those on one rank.
    pub fn compute_gradients(&mut self, micro_batches: &[Batch]) -> Result<Gradients> {
        if self.options.update_in_backward || self.deferred.is_some() {
            self.check_no_leases()?;
        }
        self.compute_gradients_with(micro_batches, &mut |_, _| Ok(()))
    }

    /// Like [`Trainer::compute_gradients`], for whoever reads the trainer's tensors in the meantime: `before` is called for each unit
    /// that is updated in the passes, as by [`Trainer::apply_update_with`].
    pub fn compute_gradients_with(
        &mut self,
        micro_batches: &[Batch],
        before: &mut BeforeUpdate<'_>,
    ) -> Result<Gradients> {
        if !self.has_stepped && self.parallel.size() > 1 && !self.model.is_built_in() {
            // If a rank has no micro-batches, this fails on all ranks. Without it, the others would wait for that rank in the check.
            self.count_tokens(self.steps + 1, micro_batches, 0)?;
            self.check_shared_layers(&micro_batches[0])?;
        }
        let gradients = self.unless_broken(|trainer| trainer.compute_step(micro_batches, before))?;
        self.pending = Some(gradients.step);
        Ok(gradients)
    }

    /// The second half of a step: clips the gradients and updates the parameters, or skips the update if the gradients are not
    /// finite. All ranks call it together. A step that fails is not counted. Fails if these gradients have been discarded, or if
    /// someone holds a [`TensorLease`](crate::TensorLease).
    ///
    /// With [`Options::update_in_forward`], the units are updated in the next step, or by [`Trainer::finish_update`]. Leases can be held
    /// until then.
    pub fn apply_update(&mut self, gradients: Gradients) -> Result<Report> {
        if gradients.are_finite() && !self.options.update_in_backward && !self.options.update_in_forward {
            self.check_no_leases()?;
        }
        self.apply_update_with(gradients, &mut |_, _| Ok(()))
    }

    /// Like [`Trainer::apply_update`], for whoever reads the trainer's tensors in the meantime: `before` is called with each unit and
    /// its index just before the unit is updated, and must end the leases on it. It may detach the unit's tensors
    /// ([`ShardedUnit::detach_checkpoint_tensor`]).
    pub fn apply_update_with(&mut self, gradients: Gradients, before: &mut BeforeUpdate<'_>) -> Result<Report> {
        self.check_not_broken()?;
        if self.pending != Some(gradients.step) {
            let problem = format!("step {}: its gradients were discarded; compute them again", gradients.step);
            return Err(Error::Options(problem));
        }
        let earlier = (self.skipped, self.loss_scaler);
        let pending = self.pending.take();
        let report = self.unless_broken(|trainer| trainer.update_step(gradients, before));
        match &report {
            Ok(report) => (self.steps, self.has_stepped) = (report.step, true),
            Err(_) => (self.skipped, self.loss_scaler, self.pending) = (earlier.0, earlier.1, pending),
        }
        report
    }

    /// Discards the gradients of a step that is not applied.
    pub fn discard_gradients(&mut self) {
        if self.deferred.is_some() {
            // They have been applied, although not to all units yet.
            return;
        }
        if let Some(step) = self.pending.take().filter(|_| self.options.update_in_backward) {
            self.mark_broken(&format!("step {step} was abandoned after its units were updated in the backward pass"));
        }
        self.shards.iter_mut().for_each(|(_, shard)| shard.discard_gradients());
    }

    /// Repeats the passes of a step on these micro-batches, which may be those of another rank. The gradients are not accumulated:
    /// only the [`Probe`] sees them. All ranks call it together.
    pub fn replay(&mut self, micro_batches: &[Batch], step: &Gradients) -> Result<()> {
        self.unless_broken(|trainer| {
            let (units, mesh) = (&trainer.unit_specs, trainer.ranks.mesh());
            let programs = replay_programs(units, &trainer.options, &mesh, micro_batches.len())?;
            let program = programs.of(trainer.ranks.world.rank(), &mesh);
            let mut values = StepValues::new(micro_batches, trainer.shards.model_len(), step.loss_scale);
            values.batches = trainer.copy_batches(micro_batches)?;
            values.splits_backward = splits_backward(program);
            values.tokens = step.tokens;
            trainer.execute(&program.instructions, &mut values)
        })
    }

    /// The program of a step with this many micro-batches. When it is built, it is checked for all ranks.
    pub fn program(&mut self, micro_batches: usize) -> Result<Arc<Program>> {
        let policy = self.options.policy(micro_batches);
        if let Some((known, program)) = &self.program
            && *known == policy
        {
            return Ok(program.clone());
        }
        let mesh = self.ranks.mesh();
        let programs = checked_programs(&self.unit_specs, &self.options, &mesh, micro_batches)?;
        let program = programs.of(self.ranks.world.rank(), &mesh).clone();
        check_executable(&program)?;
        let program = Arc::new(program);
        self.program = Some((policy, program.clone()));
        Ok(program)
    }

    /// Replaces the programs of steps with this many micro-batches by custom ones, such as programs that were printed, edited and parsed
    /// back. They are checked first. All ranks call it with the same programs.
    pub fn set_programs(&mut self, programs: &Programs, micro_batches: usize) -> Result<()> {
        // What is left was left by the program that is replaced.
        self.finish_update()?;
        let (policy, mesh) = (self.options.policy(micro_batches), self.ranks.mesh());
        check_programs(programs, &self.unit_specs, &policy, &mesh)?;
        let program = programs.of(self.ranks.world.rank(), &mesh).clone();
        check_executable(&program)?;
        self.program = Some((policy, Arc::new(program)));
        Ok(())
    }

    /// What this rank has moved between memory and disks so far, if it offloads anything.
    pub fn moved(&self) -> Option<Moved> {
        self.offload.moved()
    }

    /// What the order of a step depends on, by unit.
    pub fn unit_specs(&self) -> &[UnitSpec] {
        &self.unit_specs
    }

    fn copy_batches(&self, micro_batches: &[Batch]) -> Result<Vec<Batch>> {
        let stream = self.copy_streams.as_ref().map(|[batches, _]| &**batches);
        copy_batches(micro_batches, self.options.device, stream)
    }

    /// The stream on which to copy tensors from a device while training goes on; none on the CPU.
    pub fn snapshot_stream(&self) -> Option<Arc<Stream>> {
        self.copy_streams.as_ref().map(|[_, snapshots]| snapshots.clone())
    }

    /// Sets how the gradients of each unit travel in the next reductions.
    fn set_gradient_codecs(&mut self, program: &Program) {
        let codecs = program.gradient_codecs(self.shards.model_len());
        self.shards.iter_mut().for_each(|(unit, shard)| shard.set_gradient_codec(codecs[unit]));
    }

    /// This rank's place among those that share its layers.
    pub(crate) fn layer_place(&self) -> LayerPlace {
        self.ranks.mesh().layer_place(self.ranks.world.rank())
    }

    // ---- the step -----------------------------------------------------------------------------------------------------

    fn compute_step(&mut self, micro_batches: &[Batch], before: &mut BeforeUpdate<'_>) -> Result<Gradients> {
        self.probe.start_step(self.steps + 1);
        self.discard_gradients();
        // Without micro-batches, counting tokens fails on all ranks.
        let program = self.program(micro_batches.len().max(1))?;
        let mut values = StepValues::new(micro_batches, self.shards.model_len(), self.loss_scaler.value());
        values.batches = self.copy_batches(micro_batches)?;
        values.splits_backward = splits_backward(&program);
        self.set_gradient_codecs(&program);
        values.before_update = Some(before);
        if self.options.update_in_backward {
            values.update = Some(self.update_of(self.steps + 1, 1. / values.loss_scale));
        }
        self.execute_passes(&program, &mut values)?;
        Ok(values.totals.expect("a step's program ends with its totals"))
    }

    fn update_step(&mut self, gradients: Gradients, before: &mut BeforeUpdate<'_>) -> Result<Report> {
        let scheduled = self.options.schedule.at(gradients.step);
        let mut skipped = None;
        if gradients.are_finite() {
            let clip = self.options.max_grad_norm.map_or(1., |largest| (largest / gradients.grad_norm).min(1.));
            let mut values = StepValues::new(&[], self.shards.model_len(), gradients.loss_scale);
            values.update = Some(self.update_of(gradients.step, clip / gradients.loss_scale));
            values.before_update = Some(before);
            let program = self.program(gradients.micro_batches)?;
            self.execute(program.update(), &mut values)?;
            let update = values.update.filter(|_| self.options.update_in_forward);
            self.deferred = update.map(|update| DeferredUpdate { update, program });
            self.record_update(&gradients)?;
        } else {
            skipped = Some(self.skip_update(&gradients)?);
        }
        Ok(Report { lr: scheduled.lr, skipped, skipped_so_far: self.skipped, ..Report::of(gradients) })
    }

    /// Executes instructions, in order.
    pub(crate) fn execute(&mut self, instructions: &[Instruction], step: &mut StepValues<'_>) -> Result<()> {
        for &instruction in instructions {
            self.enter(&instruction);
            match instruction {
                Instruction::CountTokens => self.count_targets(step)?,
                Instruction::StartGather { unit, codec } => self.shards[unit].start_gather_as(codec)?,
                Instruction::WaitGather(unit) => self.shards[unit].gather()?,
                Instruction::Release(unit) => self.shards[unit].release()?,
                Instruction::Forward { unit, micro_batch, keep } => self.forward(unit, micro_batch, keep, step)?,
                Instruction::Recompute { unit, micro_batch } => self.recompute(unit, micro_batch, step)?,
                Instruction::Backward { unit, micro_batch } => {
                    self.backward_input(unit, micro_batch, step)?;
                    self.backward_weight(unit, micro_batch, step)?;
                }
                Instruction::BackwardInput { unit, micro_batch } => self.backward_input(unit, micro_batch, step)?,
                Instruction::BackwardWeight { unit, micro_batch } => self.backward_weight(unit, micro_batch, step)?,
                Instruction::Accumulate { unit, .. } => self.accumulate(unit, step)?,
                Instruction::Send(message) => self.send(&message, step)?,
                Instruction::StartReceive(message) => self.start_receive_in_step(&message, step)?,
                Instruction::WaitReceive(message) => self.finish_receive(&message, step)?,
                Instruction::StartReduce { unit, .. } => self.start_reduce(unit, step)?,
                Instruction::WaitReduceScatter(unit) => self.shards[unit].finish_reduce_scatter()?,
                Instruction::WaitReduce(unit) => self.shards[unit].finish_reduce()?,
                Instruction::Norm(unit) => self.add_squares(unit, step)?,
                Instruction::ReduceTotals => step.totals = Some(self.reduce_totals(step)?),
                Instruction::Update(unit) => self.update_unit(unit, step)?,
                Instruction::StartFetch(offload) => self.start_fetch(offload, step)?,
                Instruction::WaitFetch(offload) => self.finish_fetch(offload, step)?,
                Instruction::StartStore(offload) => self.start_store(offload, step)?,
                Instruction::WaitStore(offload) => self.finish_store(offload, step)?,
                Instruction::Evict(offload) => self.shards[offload.unit].evict(offload.buffer)?,
            }
        }
        Ok(())
    }

    /// A unit's forward pass.
    fn forward(&mut self, unit: usize, micro_batch: usize, keep: Keep, step: &mut StepValues<'_>) -> Result<()> {
        let input = self.input_of(unit, micro_batch, step);
        let splits_backward = step.splits_backward;
        let deferred = if keep == Keep::Input { None } else { self.defer_gradients(splits_backward) };
        let batch = &step.batches[micro_batch];
        let compute = |activations| {
            let pass = self.with_deferred(self.first_pass(unit, activations, step), deferred.as_ref(), splits_backward);
            self.compute(unit, input.as_ref(), batch, &pass)
        };
        let output = match keep {
            Keep::All => compute(Activations::All)?,
            Keep::Selective => compute(Activations::Selective)?,
            Keep::Input | Keep::Nothing => no_grad(|| compute(Activations::All))?,
        };
        step.passes[micro_batch][unit] = Some(UnitPass { input, partitioned: None, output, deferred });
        if keep == Keep::Input {
            self.partition_input(unit, &mut step.passes[micro_batch])?;
        }
        if unit + 1 == self.shards.model_len() {
            self.add_loss(micro_batch, step)?;
        }
        Ok(())
    }

    /// A unit's backward pass, which frees its activations. If it has two halves, this is the first: it computes everything but the
    /// gradients of linear layers' weights.
    fn backward_input(&mut self, unit: usize, micro_batch: usize, step: &mut StepValues<'_>) -> Result<()> {
        // Those of a replay, which nobody has taken.
        step.grads.clear();
        let UnitPass { input, output, deferred, .. } =
            step.passes[micro_batch][unit].take().expect("the forward pass comes first");
        // The gradient of the loss is the weight of a target; every other unit gets its gradient from the unit after it.
        let output_grad = match unit + 1 == self.shards.model_len() {
            true => self.loss_gradient(step.loss_weight()),
            false => step.output_grads[micro_batch].take().expect("the next unit's backward pass comes first"),
        };
        let (grads, input_grad) = self.gradients(unit, &output, &output_grad, input.as_ref())?;
        step.output_grads[micro_batch] = input_grad;
        step.halves.insert((micro_batch, unit), HalfBackward { grads, deferred });
        if unit == self.first_trainable {
            step.passes[micro_batch].iter_mut().for_each(|pass| *pass = None);
        }
        Ok(())
    }

    // ---- its parts ----------------------------------------------------------------------------------------------------

    /// Runs `work`, unless an earlier call failed halfway. After such a failure units may still be gathered, gradients
    /// partly accumulated or parameters partly updated, so any further result would be silently wrong.
    pub(crate) fn unless_broken<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.check_unbroken()?;
        // On a device, a collective can fail after it was waited for, and what was computed from it is wrong.
        let result = work(self);
        let result = self.ranks.check().and(result);
        if let Err(error) = &result
            && !error.leaves_trainer_unchanged()
        {
            self.broken_by = Some(error.to_string());
        }
        result
    }

    /// Makes all further calls fail, because a call that all ranks make together failed halfway on this one.
    pub fn mark_broken(&mut self, error: &dyn std::fmt::Display) {
        self.broken_by.get_or_insert_with(|| error.to_string());
    }

    /// Fails if an earlier call failed halfway, or if a step has updated units and is not finished.
    pub(crate) fn check_unbroken(&self) -> Result<()> {
        self.check_not_broken()?;
        match self.pending.filter(|_| self.options.update_in_backward) {
            Some(step) => Err(Error::Options(format!("step {step} has updated units; finish it with `apply_update`"))),
            None => Ok(()),
        }
    }

    fn check_not_broken(&self) -> Result<()> {
        match &self.broken_by {
            Some(error) => Err(Error::Broken { error: error.clone() }),
            None => Ok(()),
        }
    }

    /// Tells the probe which phase of which unit an instruction starts.
    pub(crate) fn enter(&self, instruction: &Instruction) {
        if let (Some(phase), Some(unit)) = (StepPhase::of(instruction), instruction.unit()) {
            self.probe.enter(phase, unit);
        }
    }

    /// The second half of a unit's backward pass, which computes the gradients that the first has put aside.
    fn backward_weight(&mut self, unit: usize, micro_batch: usize, step: &mut StepValues<'_>) -> Result<()> {
        let HalfBackward { mut grads, deferred } =
            step.halves.remove(&(micro_batch, unit)).expect("the first half comes first");
        if let Some(deferred) = deferred {
            let computed = deferred.compute().map_err(|error| Error::of_model(self.unit_name(unit), error))?;
            grads.extend(computed.into_iter().map(|(parameter, grad)| (unit, parameter, grad)));
            grads.sort_by_key(|&(owner, parameter, _)| (owner != unit, parameter));
        }
        for (_, _, grad) in &grads {
            self.probe.observe_gradient(unit, grad).map_err(|error| self.backward_error(unit, error))?;
        }
        step.grads = grads;
        Ok(())
    }

    /// Recomputes a unit's output in the backward pass, this time with its autograd graph.
    fn recompute(&self, index: usize, micro_batch: usize, step: &mut StepValues<'_>) -> Result<()> {
        let mut pass = step.passes[micro_batch][index].take().expect("the forward pass comes first");
        self.restore_input(index, &mut pass)?;
        pass.deferred = self.defer_gradients(step.splits_backward);
        let loss_weight = step.loss_weight();
        let recompute = Pass { keeps_gathered: true, loss_weight, ..self.pass(index, Activations::All) };
        let recompute = self.with_deferred(recompute, pass.deferred.as_ref(), step.splits_backward);
        let batch = &step.batches[micro_batch];
        pass.output = self.compute(index, pass.input.as_ref(), batch, &recompute)?;
        step.passes[micro_batch][index] = Some(pass);
        Ok(())
    }

    /// Computes a unit's output.
    pub(crate) fn compute(&self, index: usize, input: Option<&Tensor>, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let unit = &self.model.units()[index];
        let failed = |error| Error::of_model(unit.name(), error);
        let output =
            unit.forward(self.shards[index].parameters(), self.tied(index), input, batch, pass).map_err(failed)?;
        if index + 1 == self.shards.model_len() && output.numel() != 1 {
            let problem = format!(
                "the last unit returned a tensor of shape {:?}; it must return a scalar, the sum of the losses of all targets",
                output.size(),
            );
            return Err(failed(shardwise_model::Error::Config { key: "loss", problem }));
        }
        Ok(output)
    }

    /// A unit's forward pass that keeps these activations.
    pub(crate) fn pass(&self, index: usize, activations: Activations) -> Pass {
        let parallel = self.parallel.with_label(self.model.units()[index].name());
        let context = self.ranks.context.verbs().with_label(self.model.units()[index].name());
        let experts = self.ranks.experts.verbs().with_label(self.model.units()[index].name());
        let expert_bias = self.expert_biases.of_unit(index);
        Pass { parallel, context, experts, expert_bias, drops_tokens: true, ..Pass::new(activations) }
    }

    /// How a unit computes in the forward pass of a step. Tokens are counted there, and not again where it is recomputed.
    fn first_pass(&self, unit: usize, activations: Activations, step: &StepValues<'_>) -> Pass {
        let expert_tokens = Some(step.expert_tokens[unit].clone());
        Pass { loss_weight: step.loss_weight(), expert_tokens, ..self.pass(unit, activations) }
    }

    /// Where a pass puts the gradients of weights aside: if another half of the backward pass computes them, or if they are computed
    /// while tensor-parallel ranks communicate.
    fn defer_gradients(&self, splits_backward: bool) -> Option<DeferredGradients> {
        let overlaps = self.options.async_tensor_parallel && self.parallel.size() > 1;
        (splits_backward || overlaps).then(DeferredGradients::default)
    }

    /// A pass that puts the gradients of weights aside. They are computed next to its collectives, unless they are to fill bubbles.
    fn with_deferred(&self, pass: Pass, deferred: Option<&DeferredGradients>, splits_backward: bool) -> Pass {
        let parallel = match deferred.filter(|_| !splits_backward) {
            Some(deferred) => pass.parallel.with_overlap(deferred.clone()),
            None => pass.parallel,
        };
        Pass { parallel, deferred: deferred.cloned(), ..pass }
    }

    /// The parameter of another unit that this unit is tied to.
    pub(crate) fn tied(&self, index: usize) -> Option<&Tensor> {
        let tied = self.model.units()[index].tied()?;
        Some(self.parameter(tied.unit, tied.parameter))
    }

    /// A parameter that a unit of this rank computes with: its own, or the copy of one of another stage.
    fn parameter(&self, unit: usize, parameter: usize) -> &Tensor {
        match self.shards.get(unit) {
            Some(shard) => &shard.parameters()[parameter],
            None => self.tied_copy.as_ref().expect("the stage that owns the parameter sends it first"),
        }
    }

    /// A unit's backward pass: the gradients of its parameters, and that of its input if it needs one. The latter is zero if the
    /// output does not depend on the input.
    pub(crate) fn gradients(
        &self,
        index: usize,
        output: &Tensor,
        output_grad: &Tensor,
        input: Option<&Tensor>,
    ) -> Result<(Vec<ParameterGradient>, Option<Tensor>)> {
        let trainable = self.trainable_parameters(index);
        let tensors = trainable.iter().map(|&(unit, parameter)| self.parameter(unit, parameter));
        let input = input.filter(|input| input.requires_grad());
        let inputs: Vec<&Tensor> = tensors.chain(input).collect();
        let mut grads = match output.requires_grad() {
            true => autograd::grad(&[output], &[Some(output_grad)], &inputs, Graph::Free)
                .map_err(|error| self.backward_error(index, error))?,
            false => inputs.iter().map(|_| None).collect(),
        }
        .into_iter();
        let parameter_grads = trainable.into_iter().zip(grads.by_ref());
        let parameter_grads =
            parameter_grads.filter_map(|((unit, parameter), grad)| Some((unit, parameter, grad?))).collect();
        let input_grad = input.map(|input| grads.next().flatten().unwrap_or_else(|| input.zeros_like()));
        Ok((parameter_grads, input_grad))
    }

    /// The parameters that a unit's backward pass computes gradients for: its own and the tied one, unless frozen.
    fn trainable_parameters(&self, index: usize) -> Vec<(usize, usize)> {
        let own = (0..self.shards[index].parameters().len()).map(|parameter| (index, parameter));
        let tied = self.model.units()[index].tied().map(|tied| (tied.unit, tied.parameter));
        own.chain(tied)
            .filter(|&(unit, parameter)| self.model.units()[unit].parameters()[parameter].trainable)
            .collect()
    }

    /// Adds the loss of a micro-batch, whose last forward pass is done, and looks for its cause if it is not finite.
    fn add_loss(&mut self, micro_batch: usize, step: &mut StepValues<'_>) -> Result<()> {
        let head = step.passes[micro_batch].last().and_then(Option::as_ref).expect("the head's pass is done");
        if self.options.device != Device::Cpu {
            step.unread.push((Unread::Loss, head.output.detach()));
            return Ok(());
        }
        let own = head.output.double_value(&[]);
        step.loss += own;
        if !own.is_finite() {
            self.finish_storing_inputs(micro_batch)?;
            step.find_non_finite_output(micro_batch, &self.offloaded_inputs);
        }
        Ok(())
    }

    /// Counts the targets of all ranks that are not ignored, and fails if there are none. The loss is the mean over the tokens of all
    /// ranks and micro-batches, so that every token has the same weight.
    fn count_targets(&self, step: &mut StepValues<'_>) -> Result<()> {
        let number = self.steps + 1;
        (step.tokens, step.largest_signal) = self.count_tokens(number, step.micro_batches, self.probe.signal())?;
        if step.tokens == 0 { Err(Error::AllTargetsIgnored { step: number }) } else { Ok(()) }
    }

    /// The derivative with which the backward pass starts.
    fn loss_gradient(&self, loss_weight: f64) -> Tensor {
        let no_dimensions: [i64; 0] = [];
        let kind = kind_of(self.options.precision.state_dtype());
        // Made on the device: the host would wait for a copy.
        Tensor::full(no_dimensions, loss_weight, (kind, self.options.device))
    }

    /// All-reduces the loss and the sums of squares in f64, in rank order, and unscales the norms by the loss scale.
    fn reduce_totals(&mut self, step: &mut StepValues<'_>) -> Result<Gradients> {
        self.read_values(step)?;
        let missing: usize = match self.has_stepped {
            true => 0,
            false => self.shards.iter().map(|(_, shard)| shard.parameters_without_gradient().count()).sum(),
        };
        // The ranks that share the head have the same loss, and those of other stages have none.
        let loss = if self.ranks.tensor.rank() == 0 { step.loss } else { 0. };
        let experts: Vec<usize> = self.model.units().iter().map(Unit::num_experts).collect();
        let own =
            [&[loss, missing as f64], &step.squares[..], &expert_counts::pack(&step.expert_tokens, &experts)].concat();
        let all = self.ranks.world.all_reduce("loss and norm", ReduceOp::Sum, own).wait()?;
        let (loss_sum, missing, (squares, routed)) = (all[0], all[1], all[2..].split_at(experts.len()));
        let (expert_tokens, dropped_tokens) = expert_counts::unpack(routed, &experts);
        // Every replica contributed the same gradients.
        let (replicas, loss_scale) = (self.ranks.groups.replicate.size() as f64, step.loss_scale);
        let norm = |squares: f64| (squares / replicas).sqrt() / loss_scale;
        // On the CPU, it has been found in the passes. To find it on a device, they are repeated with the same parameters.
        let can_repeat = self.options.device != Device::Cpu && !self.options.update_in_backward;
        if !loss_sum.is_finite() && can_repeat {
            step.non_finite_output = self.find_non_finite_output(step.micro_batches)?;
        }
        Ok(Gradients {
            step: self.steps + 1,
            loss: loss_sum / step.tokens as f64,
            grad_norm: norm(squares.iter().sum()),
            unit_norms: squares.iter().map(|&squares| norm(squares)).collect(),
            tokens: step.tokens,
            expert_tokens,
            dropped_tokens,
            loss_scale,
            without_gradient: if missing > 0. { self.without_gradient()? } else { Vec::new() },
            largest_signal: step.largest_signal,
            non_finite_output: step.non_finite_output,
            micro_batches: step.micro_batches.len(),
        })
    }

    /// The trainable parameters that received no gradient on any rank. All ranks call it together.
    fn without_gradient(&self) -> Result<Vec<String>> {
        // What other stages have received, they say themselves.
        let none = |unit: &Unit| vec![0; unit.parameters().len()];
        let mut received: Vec<Vec<i64>> = self.model.units().iter().map(none).collect();
        for (unit, shard) in self.shards.iter() {
            received[unit].fill(1);
            shard.parameters_without_gradient().for_each(|parameter| received[unit][parameter] = 0);
        }
        let anywhere = self.ranks.world.all_reduce("gradients received", ReduceOp::Max, received.concat()).wait()?;
        let parameters = self.model.units().iter().flat_map(Unit::parameters);
        let missing = parameters.zip(anywhere).filter(|(_, received)| *received == 0);
        Ok(missing.map(|(parameter, _)| parameter.name.clone()).collect())
    }

    fn backward_error(&self, index: usize, error: shardwise_torch::Error) -> Error {
        Error::Backward { unit: self.unit_name(index).to_string(), error }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use std::time::Instant;

    use shardwise_model::LlamaConfig;
    use shardwise_plan::schedule::Schedule;
    use shardwise_zero::{AdamW, Optimizer, Sharding};

    use super::*;

    /// The shortest step of 42 million parameters that was ever measured on any machine took longer.
    const STEP_NS: f64 = 1e8;

    #[test]
    fn interpreting_a_program_costs_less_than_a_thousandth_of_a_step() {
        let ranks = Ranks::sharded(Arc::new(shardwise_comm::single::group()));
        let options =
            Options::new(Sharding::stage(3).unwrap(), Optimizer::AdamW(AdamW::default()), Schedule::constant(1e-3));
        let model = |blocks| Model::from_config(LlamaConfig::new(32, 16, blocks, 2, 40)).unwrap();
        let shape = StepShape { sequences: 1, positions: 8, micro_batches: 1 };
        let specs = unit_specs(&model(8), &options, &ModelParallel::NONE, shape);
        let program = shardwise_plan::program::build::train_step(&specs, &options.policy(1));

        let unsharded = Options { sharding: Sharding::stage(0).unwrap(), ..options };
        let mut trainer = Trainer::new(model(1), ranks, unsharded, &mut crate::init::from_seed(1)).unwrap();
        // At stage 0 there is nothing to release.
        let nothing = vec![Instruction::Release(1); 100_000];
        let mut values = StepValues::new(&[], 3, 1.);
        let time_ns = |trainer: &mut Trainer, values: &mut StepValues<'_>| {
            let start = Instant::now();
            trainer.execute(&nothing, values).unwrap();
            start.elapsed().as_nanos() as f64 / nothing.len() as f64
        };
        let instruction_ns = (0..10).map(|_| time_ns(&mut trainer, &mut values)).fold(f64::INFINITY, f64::min);
        let count = program.instructions.len();
        let share = instruction_ns * count as f64 / STEP_NS;
        println!("{count} instructions of {instruction_ns:.1} ns each are {:.5}% of 0.1 s", 100. * share);
        assert!(share < 0.001, "{instruction_ns} ns per instruction");
    }
}
