//! The training loop of a recipe: data, steps, evaluation, checkpoints, rollbacks, traces and log.

use std::fmt;
use std::io::Write;
use std::sync::Arc;

use serde_json::Value;
use shardwise_checkpoint::{Store, step_folder};
use shardwise_comm::Group;
use shardwise_journal::format::format_memory_fixed;
use shardwise_journal::{Entry, EntryKind, Evaluation, JOURNAL_VERSION, Start, Step};
use shardwise_model::Model;
use shardwise_plan::Axis;
use shardwise_plan::program::{Codec, ModelParallel};
use shardwise_recipe::{Recipe, ScheduleKind, SpikeRecipe};
use shardwise_torch::tch::Device;
use shardwise_train::{Options, Ranks, Report, Trainer, checked_programs, unit_specs};
use shardwise_zero::Precision;

use crate::build;
use crate::build::step_shape;
use crate::data::{Data, EvaluationSet};
use crate::error::{Error, Result};
use crate::evaluate::{EvaluationMetrics, evaluate_set};
use crate::expected_traffic::ExpectedTraffic;
use crate::fault_injection::FaultKind;
use crate::host::ranks_here;
use crate::loader::Loader;
use crate::lr_range_test::LrRangeTest;
use crate::memory_estimate::MemoryEstimate;
use crate::memory_limit::MemoryLimit;
use crate::meter::{Meter, StepMetrics, Survey, Workload};
use crate::out_of_memory::explain_out_of_memory;
use crate::peak_flops::measure_peak_flops;
use crate::phase::Phase;
use crate::position::PositionTracker;
use crate::requests::Requests;
use crate::resume::resume_newest;
use crate::rollback::roll_back;
use crate::run_log::RunLog;
use crate::run_probe::RunProbe;
use crate::saver::{Next, Saver, run_info};
use crate::setup::{check_same_on_all_ranks, init_trainer, open_store, place_ranks};
use crate::spike::{OnSpike, Spike};
use crate::spike_detector::SpikeDetector;
use crate::spot_check::compute_checked_gradients;
use crate::trace::{Tracer, WrittenTrace};

/// The line that is printed for a step.
#[derive(Clone, Debug)]
pub struct StepLine {
    /// The journal entry of the step.
    pub step: Step,
    /// The number of steps of the run.
    pub steps: u64,
    /// Tokens per second on all ranks together, since the previous line.
    pub tokens_per_s: f64,
    /// Model FLOPs utilization since the previous line; 0 if the peak is not known.
    pub mfu: f64,
}

impl fmt::Display for StepLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Step { step, loss, grad_norm, lr, .. } = self.step;
        write!(
            f,
            "step {step:>width$}/{}  loss {loss:.6}  grad norm {grad_norm:.3}  lr {lr:.2e}  {:.0} tokens/s  ",
            self.steps,
            self.tokens_per_s,
            width = self.steps.to_string().len(),
        )?;
        match 100. * self.mfu {
            // Above 100%, the peak was measured while the machine was busy.
            percent if percent > 100. => (),
            percent if percent >= 9.95 => write!(f, "{percent:.0}% MFU  ")?,
            percent if percent > 0. => write!(f, "{percent:.1}% MFU  ")?,
            _ => (),
        }
        write!(
            f,
            "memory {} (peak {})  sent {:.1} MB",
            format_memory_fixed(self.step.memory_bytes as usize),
            format_memory_fixed(self.step.memory_peak_bytes as usize),
            self.step.sent_bytes as f64 / 1e6,
        )?;
        if self.step.loss_scale != 1. {
            write!(f, "  scale {}", self.step.loss_scale)?;
        }
        if self.step.skipped_so_far > 0 {
            write!(f, "  skipped {}", self.step.skipped_so_far)?;
        }
        if let Some(fault) = &self.step.skipped {
            write!(f, "\n  skipped: {fault}")?;
        }
        if let Some(spike) = &self.step.spike {
            write!(f, "\n  spike: {spike}")?;
        }
        Ok(())
    }
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome {
    /// All steps are done.
    Finished,
    /// The run saved a checkpoint and stopped on request; it can be resumed.
    Stopped,
}

/// Trains a recipe, serves `requests`, and reports its progress to `position`. Rank 0 prints to `out`, writes the run's journal,
/// and passes every entry to `on_entry`.
pub fn run(
    recipe: &Recipe,
    world: &Arc<Group>,
    requests: &Requests,
    position: &Arc<PositionTracker>,
    on_entry: &mut dyn FnMut(&Entry),
    out: &mut dyn Write,
) -> Result<RunOutcome> {
    let log = RunLog::open(&recipe.folder(), world, on_entry, out);
    let (mut session, mut trainer) = Session::start(recipe, world, requests, position, log)?;
    let mut outcome = RunOutcome::Finished;
    while trainer.steps() < recipe.run.steps {
        match session.step(&mut trainer) {
            Ok(()) => (),
            // An LR range test ends where the loss diverges: that is its purpose.
            Err(Error::Train(shardwise_train::Error::NonFinite { step, fault })) if session.is_range_test() => {
                session.log.note(step, &format!("step {step}: {fault}; the LR range test ends here"));
                break;
            }
            Err(Error::Spike { step, spike }) if session.rollback_store.is_some() => {
                trainer = session.roll_back(trainer, step, spike)?;
                continue;
            }
            Err(error) => return Err(session.finish_save(error)?),
        }
        session.evaluate(&mut trainer)?;
        if session.save(&mut trainer)? == Next::Stop {
            let steps = trainer.steps();
            session.log.note(steps, &format!("stopped after step {steps}, as requested"));
            outcome = if steps == recipe.run.steps { RunOutcome::Finished } else { RunOutcome::Stopped };
            break;
        }
        session.trace(&trainer)?;
    }
    session.end()?;
    Ok(outcome)
}

/// The state of a run, except for its trainer, which a rollback replaces.
struct Session<'a> {
    recipe: &'a Recipe,
    position: &'a Arc<PositionTracker>,
    probe: Arc<RunProbe>,
    spike_detector: SpikeDetector,
    data: Arc<Data>,
    loader: Loader,
    /// Everything that the order of the samples depends on.
    order: Value,
    evaluation_set: Option<EvaluationSet>,
    saver: Option<Saver>,
    /// The checkpoint store, if the run rolls back after a spike.
    rollback_store: Option<Arc<Store>>,
    first_step: u64,
    range: LrRangeTest,
    meter: Meter<'a>,
    tracer: Tracer,
    log: RunLog<'a>,
}

impl<'a> Session<'a> {
    /// Opens the data and the checkpoint store, and creates the trainer, from a checkpoint if there is one.
    fn start(
        recipe: &'a Recipe,
        world: &'a Arc<Group>,
        requests: &Requests,
        position: &'a Arc<PositionTracker>,
        mut log: RunLog<'a>,
    ) -> Result<(Self, Trainer)> {
        let (ranks, options) = place_ranks(recipe, world.clone())?;
        let data = Arc::new(Data::open(recipe, world.size())?);
        let model = build::model(recipe)?;
        log.print(&describe_run(recipe, &options, &model, &ranks)?);
        data.summary().iter().for_each(|summary| log.print(summary));
        let folder = recipe.folder().display().to_string();
        log.print(&format!("journal in {folder}; `shardwise watch {folder}` shows it"));
        let evaluation = recipe.evaluation.as_ref();
        let evaluation_set = evaluation.map(|evaluation| EvaluationSet::of(recipe, evaluation)).transpose()?;
        let order = data.order(ranks.data_size());
        let held_out = evaluation_set.as_ref().map(EvaluationSet::identity);
        check_same_on_all_ranks(world, &format!("{order}{held_out:?}{:?}", recipe.package_hash()))?;
        let workload = measure_workload(recipe, &model, &options, world)?;
        let store =
            recipe.checkpoints.as_ref().map(|checkpoints| open_store(&checkpoints.folder, world)).transpose()?;
        let mut notes = Vec::new();
        let found = match &store {
            Some(store) => resume_newest(recipe, &order, store, &ranks, &options, &mut |text| {
                log.print(&text);
                notes.push(text.to_string());
            })?,
            None => None,
        };
        let resumed_from = store.as_ref().zip(found.as_ref());
        let resumed_from = resumed_from.map(|(store, trainer)| store.display(&step_folder(trainer.steps())));
        let mut trainer = match found {
            Some(trainer) => trainer,
            None => init_trainer(recipe, model, ranks, options.clone())?,
        };
        let probe = Arc::new(RunProbe::new(position.clone(), requests.trace.clone()));
        probe.attach(&mut trainer);
        let first_step = trainer.steps() + 1;
        prepare_fault_injections(&trainer, &probe, position, first_step)?;
        let is_done = first_step > recipe.run.steps;
        // A run that was already finished adds nothing to its journal.
        if !is_done {
            log.record(|| EntryKind::Start(Box::new(journal_start(recipe, &trainer, &workload, resumed_from))));
            notes.into_iter().for_each(|text| log.record(|| EntryKind::Note { step: first_step - 1, text }));
        }
        let saver = store.clone().zip(recipe.checkpoints.clone()).map(|(store, checkpoints)| {
            let about = run_info(recipe, order.clone());
            Saver::new(store, trainer.ranks(), checkpoints, about, requests.clone(), first_step - 1, position.clone())
        });
        if is_done {
            log.print(&format!("there is nothing left to do: run.steps is {}", recipe.run.steps));
        }
        if let Some(why) = requests.planned_trace.explain_if_unreachable(first_step, recipe.run.steps) {
            log.print(&why);
        }
        let expected_traffic = ExpectedTraffic::of(&mut trainer, build::step_shape(recipe, world.size())?)?;
        let session = Session {
            recipe,
            position,
            probe,
            spike_detector: SpikeDetector::default(),
            loader: Loader::new(data.clone(), trainer.ranks(), options.device != Device::Cpu, recipe.run.steps),
            data,
            order,
            evaluation_set,
            saver,
            rollback_store: store.filter(|_| recipe.supervision.on_spike == SpikeRecipe::Rollback),
            first_step,
            range: LrRangeTest::default(),
            meter: Meter::new(world, workload, expected_traffic),
            tracer: Tracer::new(world, position, requests, recipe.folder()),
            log,
        };
        Ok((session, trainer))
    }

    /// Runs the next step and logs it, or skips its batch.
    fn step(&mut self, trainer: &mut Trainer) -> Result<()> {
        let steps = self.recipe.run.steps;
        self.tracer.before_step(trainer.steps() + 1)?;
        if let Some(skipped) = trainer.skip_batch() {
            let step = trainer.steps();
            self.log.note(step, &format!("step {step}/{steps}  {skipped}"));
            return Ok(());
        }
        self.meter.start_step(trainer);
        let (report, spike) = self.run_step(trainer).map_err(|error| self.explain(trainer, error))?;
        self.range.add(report.lr, report.loss);
        let is_due = report.step % self.recipe.run.log_every == 0 || report.step == steps;
        let is_printed = is_due || report.skipped.is_some() || spike.is_some();
        let metrics = self.meter.end_step(trainer, (&report, spike.as_ref()), is_printed, steps)?;
        self.log_step(metrics);
        if !report.without_gradient.is_empty() {
            self.log.note(report.step, &describe_missing_gradients(&report.without_gradient));
        }
        Ok(())
    }

    /// Runs the next step: its gradients, the checks between its halves, and its update.
    fn run_step(&mut self, trainer: &mut Trainer) -> Result<(Report, Option<Spike>)> {
        let (recipe, data) = (self.recipe, &self.data);
        let data_size = trainer.ranks().data_size();
        let step = trainer.steps() + 1;
        let place = trainer.ranks().context.place();
        let rank_batches = |data_rank: usize| data.step_part(step, data_rank, data_size, place);
        self.position.enter(Phase::Data);
        let own = self.meter.time_loading(|| self.loader.load(step))?;

        let is_checked = recipe.supervision.spot_check_every.is_some_and(|every| step.is_multiple_of(every));
        let is_pipeline = trainer.ranks().pipeline.size() > 1;
        if is_checked {
            finish_update(trainer, self.saver.as_mut())?;
        }
        let is_deferred = trainer.has_deferred_update();
        let updates_in_passes = is_deferred || recipe.optimizer.in_backward;
        if let Some(saver) = self.saver.as_mut().filter(|_| is_pipeline && updates_in_passes) {
            saver.release_all_units(trainer)?;
        }
        let gradients = match is_checked {
            true => compute_checked_gradients(trainer, &self.probe, &own, &rank_batches)?,
            false => {
                // What is updated in the passes, too, may still be read by a save.
                let saver = &mut self.saver;
                trainer.compute_gradients_with(&own, &mut |shard, unit| match saver {
                    Some(saver) => saver.release_unit(shard, unit),
                    None => Ok(()),
                })?
            }
        };
        if let Some(saver) = self.saver.as_mut().filter(|_| is_deferred) {
            saver.end_update(trainer.fewer_updates())?;
        }
        self.tracer.request(gradients.largest_signal);
        let on_spike = match recipe.supervision.on_spike {
            SpikeRecipe::Report => OnSpike::Report,
            SpikeRecipe::Stop | SpikeRecipe::Rollback => OnSpike::Stop,
        };
        let mut spike = self.spike_detector.check(trainer, &gradients, on_spike);
        if let Ok(Some(spike)) = &mut spike {
            spike.samples = Some(data.samples(step, data_size));
        } else if let Err(Error::Spike { spike, .. }) = &mut spike {
            spike.samples = Some(data.samples(step, data_size));
        }
        // In an LR range test the loss is supposed to rise.
        let spike = spike?.filter(|_| !self.is_range_test());
        // The update overwrites tensors that a save may still be reading.
        let report = match self.saver.as_mut().filter(|_| gradients.are_finite()) {
            Some(saver) => {
                let updated =
                    trainer.apply_update_with(gradients, &mut |shard, unit| saver.release_unit(shard, unit))?;
                if !trainer.has_deferred_update() {
                    saver.end_update(trainer.fewer_updates())?;
                }
                updated
            }
            None => trainer.apply_update(gradients)?,
        };
        self.position.enter(Phase::Between);
        Ok((report, spike))
    }

    /// Explains running out of memory.
    fn explain(&self, trainer: &Trainer, error: Error) -> Error {
        explain_out_of_memory(self.recipe, trainer, self.position.read().phase, error)
    }

    /// Prints a step's line, if one is due, and records its metrics.
    fn log_step(&mut self, metrics: StepMetrics) {
        let StepMetrics { step, throughput, survey } = metrics;
        let number = step.step;
        let skipped = step.skipped.as_ref().map(|fault| format!("step {number} was skipped: {fault}"));
        let spike = step.spike.as_ref().map(|spike| format!("spike at step {number}: {spike}"));
        if let Some([tokens_per_s, mfu]) = throughput {
            let steps = self.recipe.run.steps;
            self.log.print(&StepLine { step: step.clone(), steps, tokens_per_s, mfu });
        }
        self.log.record(|| EntryKind::Step(step));
        for text in skipped.into_iter().chain(spike) {
            self.log.record(|| EntryKind::Note { step: number, text });
        }
        if let Some(Survey { memory, traffic }) = survey {
            self.log.record(|| EntryKind::Memory { step: number, ranks: memory });
            self.log.record(|| EntryKind::Traffic(traffic));
        }
    }

    /// Evaluates the model on the held-out corpus, if that is due.
    fn evaluate(&mut self, trainer: &mut Trainer) -> Result<()> {
        let (step, steps) = (trainer.steps(), self.recipe.run.steps);
        let Some(evaluation_set) = self.evaluation_set.as_ref().filter(|set| set.is_due(step, steps)) else {
            return Ok(());
        };
        finish_update(trainer, self.saver.as_mut())?;
        self.position.enter(Phase::Evaluation);
        let micro_batch_size = self.recipe.batch(trainer.ranks().world.size())?.micro_batch_size;
        let metrics = self.meter.exclude(|| evaluate_set(trainer, evaluation_set, micro_batch_size))?;
        self.log.print(&format!("evaluation after step {step}: {metrics}"));
        let EvaluationMetrics { loss, tokens, bits_per_byte } = metrics;
        self.log.record(|| EntryKind::Evaluation(Evaluation { step, loss, tokens, bits_per_byte }));
        Ok(())
    }

    /// Saves a checkpoint, if one is due, and advances the save in progress.
    fn save(&mut self, trainer: &mut Trainer) -> Result<Next> {
        let Some(saver) = &mut self.saver else { return Ok(Next::Continue) };
        let (last, log) = (trainer.steps() == self.recipe.run.steps, &mut self.log);
        let next = saver.after_step(trainer, last, &mut |event| log.record_save(event));
        next.map_err(|error| self.explain(trainer, error))
    }

    /// Ends and writes the trace, if this was its last step.
    fn trace(&mut self, trainer: &Trainer) -> Result<()> {
        if let Some(traced) = self.tracer.after_step(trainer.steps(), trainer.steps() == self.recipe.run.steps)? {
            self.log.print(&traced);
            let WrittenTrace { first_step, steps, path } = traced;
            if let Ok(path) = path {
                self.log.record(|| EntryKind::Trace { first_step, steps, path: path.display().to_string() });
            }
        }
        Ok(())
    }

    /// Replaces a trainer whose step spiked with one from the newest checkpoint.
    fn roll_back(&mut self, trainer: Trainer, step: u64, spike: Box<Spike>) -> Result<Trainer> {
        let Session { recipe, order, saver, rollback_store, log, .. } = self;
        saver.iter_mut().try_for_each(|saver| saver.finish(&mut |event| log.record_save(event)))?;
        let store = rollback_store.as_ref().expect("the caller has checked that there is a store");
        let note = &mut |text: &str| log.note(step, text);
        let mut trainer = roll_back(recipe, order, store, trainer, (step, spike), note)?;
        self.probe.attach(&mut trainer);
        self.spike_detector.roll_back_to(trainer.steps());
        saver.iter_mut().for_each(|saver| saver.roll_back(trainer.steps()));
        self.meter.roll_back();
        Ok(trainer)
    }

    /// Finishes the save in progress before the run ends with an error that all ranks share.
    fn finish_save(&mut self, error: Error) -> Result<Error> {
        let (saver, log) = (&mut self.saver, &mut self.log);
        if let Some(saver) = saver.as_mut().filter(|_| error.is_same_on_all_ranks()) {
            saver.finish(&mut |event| log.record_save(event))?;
        }
        Ok(error)
    }

    fn is_range_test(&self) -> bool {
        self.recipe.schedule.kind == ScheduleKind::LrRangeTest
    }

    /// Ends the run: prints its summary, and plots an LR range test.
    fn end(mut self) -> Result<()> {
        self.position.enter(Phase::End);
        if self.first_step <= self.recipe.run.steps {
            self.log.print(&format!("data loading took {:.3}% of the time", 100. * self.meter.share_of_loading()?));
        }
        if let Some(why) = self.saver.take().and_then(Saver::into_failure) {
            return Err(Error::Checkpoint(format!("the last checkpoint was not saved: {why}")));
        }
        if self.is_range_test() && self.log.is_first() {
            self.log.print(&self.range.verdict());
            if let Some(path) = &self.recipe.schedule.plot {
                let fail = |problem: Box<dyn std::error::Error>| Error::Data {
                    path: path.clone(),
                    problem: problem.to_string(),
                };
                self.range.plot(path).map_err(fail)?;
                self.log.print(&format!("plot: {}", path.display()));
            }
        }
        Ok(())
    }
}

/// Updates the units that wait for the next step, before anything else reads their parameters. All ranks call it together.
fn finish_update(trainer: &mut Trainer, saver: Option<&mut Saver>) -> Result<()> {
    let Some(saver) = saver.filter(|_| trainer.has_deferred_update()) else { return Ok(trainer.finish_update()?) };
    if trainer.ranks().pipeline.size() > 1 {
        saver.release_all_units(trainer)?;
    }
    trainer.finish_update_with(&mut |shard, unit| saver.release_unit(shard, unit))?;
    saver.end_update(trainer.fewer_updates())
}

/// The maximum number of parameters that a note names.
const NAMED_MAX: usize = 8;

/// The note about trainable parameters that the backward pass does not reach.
fn describe_missing_gradients(parameters: &[String]) -> String {
    let (named, rest) = parameters.split_at(parameters.len().min(NAMED_MAX));
    let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
    format!(
        "no gradient reaches {}{more}: the loss does not depend on them, and only weight decay changes them; if that is \
         intended, freeze them with model.frozen",
        named.join(", "),
    )
}

/// Checks the units named by fault injections, and schedules bit flips.
fn prepare_fault_injections(
    trainer: &Trainer,
    probe: &RunProbe,
    position: &PositionTracker,
    first_step: u64,
) -> Result<()> {
    if let Some(unknown) = position.fault_injections().iter().find(|fault| !fault.names_known_unit(trainer)) {
        return Err(Error::Options(format!("--fault '{unknown}': the model has no such unit")));
    }
    for flip in position.fault_injections().iter().filter(|fault| fault.kind == FaultKind::FlipBit) {
        let unit = flip.unit.as_deref().unwrap_or_default();
        probe.flip_bit(trainer, if flip.relative { first_step + flip.step } else { flip.step }, unit)?;
    }
    Ok(())
}

/// The size of a step, and the measured peak of the ranks. All ranks call it together, before they create their trainers.
fn measure_workload(recipe: &Recipe, model: &Model, options: &Options, world: &Group) -> Result<Workload> {
    let positions = recipe.batch.seq_len;
    Ok(Workload {
        tokens_per_step: (recipe.batch(world.size())?.global_batch_size * positions) as u64,
        flops_per_token: model.flops_per_token(positions),
        peak_flops_per_s: measure_peak_flops(world, options.precision.param_dtype, options.device)?,
        dtype: options.precision.param_dtype,
        device: options.device,
    })
}

/// The first journal entry of an attempt.
fn journal_start(recipe: &Recipe, trainer: &Trainer, workload: &Workload, resumed_from: Option<String>) -> Start {
    let ranks = trainer.ranks().world.size();
    let ranks_per_host = ranks_here(ranks);
    Start {
        journal_version: JOURNAL_VERSION,
        name: recipe.name(),
        recipe: recipe.text.clone(),
        version: env!("CARGO_PKG_VERSION").to_string(),
        ranks,
        ranks_per_host,
        zero_stage: recipe.zero.stage,
        replicate: trainer.ranks().groups.replicate.size(),
        pipeline: trainer.ranks().pipeline.size(),
        expert: trainer.ranks().experts.size(),
        context: trainer.ranks().context.size(),
        tensor: trainer.ranks().tensor.size(),
        param_dtype: trainer.options().precision.param_dtype.to_string(),
        parameters: trainer.model().elements() as u64,
        package: recipe.package_hash().map(str::to_string),
        tokens_per_step: workload.tokens_per_step,
        first_step: trainer.steps() + 1,
        steps: recipe.run.steps,
        resumed_from,
        memory_limit_bytes: MemoryLimit::of(trainer.options().device, ranks_per_host).map(|limit| limit.bytes as u64),
        memory_estimate_bytes: MemoryEstimate::of(recipe, ranks).unwrap_or_default().total() as u64,
        flops_per_token: workload.flops_per_token,
        peak_flops_per_s: workload.peak_flops_per_s,
    }
}

/// The sizes of the mesh: replicas by shards and, if there are any, the stages of a pipeline and the ranks that hold different experts,
/// divide sequences or share each layer.
fn describe_mesh(ranks: &Ranks) -> String {
    let (mesh, replicas) = (ranks.mesh(), ranks.groups.replicate.size());
    let shards = mesh.size(Axis::Shard);
    let along = |axis: &str, size: usize| (size > 1).then(|| format!("{axis} {size}"));
    let parts = [
        along("pipeline", ranks.pipeline.size()),
        Some(format!("{replicas} × {shards}")),
        along("expert", ranks.experts.size()),
        along("ring", ranks.context.ring.size()),
        along("ulysses", ranks.context.ulysses.size()),
        along("tensor", ranks.tensor.size()),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" × ")
}

/// The first lines that a run prints: its size, and all data types.
fn describe_run(recipe: &Recipe, options: &Options, model: &Model, ranks: &Ranks) -> Result<String> {
    let tokens = recipe.batch(ranks.world.size())?.global_batch_size * recipe.batch.seq_len;
    let (Precision { param_dtype, reduce_dtype }, sums) = (options.precision, options.precision.state_dtype());
    let (shape, mesh) = (step_shape(recipe, ranks.world.size())?, ranks.mesh());
    let units = unit_specs(model, options, &ModelParallel::of_rank(&mesh, ranks.world.rank()), shape);
    let programs = checked_programs(&units, options, &mesh, shape.micro_batches)?;
    let codecs = programs.of(ranks.world.rank(), &mesh).gradient_codecs(units.len());
    let gradients = match codecs.contains(&Codec::ParamDtype) {
        true => format!("sent in {param_dtype}, those of embeddings in {reduce_dtype}, and summed in {sums}"),
        false => format!("stored and sent in {reduce_dtype}, summed in {sums}"),
    };
    Ok(format!(
        "{:.1} million parameters, stage {} on {} ranks ({}), {tokens} tokens per step\n\
         parameters in {param_dtype}; gradients {gradients}; loss and grad norm in f64; master weights and optimizer state in {sums}",
        model.elements() as f64 / 1e6,
        recipe.zero.stage,
        ranks.world.size(),
        describe_mesh(ranks),
    ))
}
