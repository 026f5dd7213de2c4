//! A run: the loop around the step, and what it says.

use std::fmt;
use std::io::Write;
use std::sync::Arc;

use serde_json::Value;
use shardwise_checkpoint::hugging_face::Weights;
use shardwise_checkpoint::{Store, folder_of};
use shardwise_comm::Group;
use shardwise_journal::{Entry, Start, Step, What};
use shardwise_model::Model;
use shardwise_model::init::mixed;
use shardwise_torch::tch::Device;

use crate::agreement::agreed;
use crate::data::{Data, HeldOut};
use crate::diary::Diary;
use crate::fit::{Need, gib, limit};
use crate::host::ranks_here;
use crate::memory::explained;
use crate::meter::{Counted, Look, Meter, Scale, resident_bytes};
use crate::outliers::gone_back;
use crate::peak::flops_per_s;
use crate::plot::Range;
use crate::position::{Phase, Position};
use crate::recipe::{DeviceRecipe, OutlierRecipe, Recipe, ScheduleKind};
use crate::resume::resumed;
use crate::saving::{Next, Saver, about};
use crate::start::{from_seed, from_weights};
use crate::theory::Theory;
use crate::trace::{Traced, Tracer};
use crate::trained::figures;
use crate::{Asked, Deed, Error, Figures, Options, Outlier, Ranks, Report, Result, Trainer};

/// What is printed for a step.
#[derive(Clone, Debug)]
pub struct Line {
    /// What the journal says of it.
    pub step: Step,
    /// Of how many steps.
    pub steps: u64,
    /// Tokens that all ranks together trained on, per second, since the line before.
    pub tokens_per_s: f64,
    /// The part of the peak that went into the model's own arithmetic, since the line before; 0 where the peak is not known.
    pub utilisation: f64,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Step { step, loss, gradient_norm, rate, .. } = self.step;
        write!(
            f,
            "step {step:>width$}/{}  loss {loss:.6}  norm {gradient_norm:.3}  rate {rate:.2e}  {:.0} tokens/s  ",
            self.steps,
            self.tokens_per_s,
            width = self.steps.to_string().len(),
        )?;
        match 100. * self.utilisation {
            // No machine is faster than its peak: this one's was measured while it was busy.
            percent if percent > 100. => (),
            percent if percent >= 9.95 => write!(f, "{percent:.0}% of peak  ")?,
            percent if percent > 0. => write!(f, "{percent:.1}% of peak  ")?,
            _ => (),
        }
        write!(
            f,
            "memory {} (peak {})  sent {:.1} MB",
            gib(self.step.memory_bytes as usize),
            gib(self.step.memory_peak_bytes as usize),
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
        if let Some(outlier) = &self.step.outlier {
            write!(f, "\n  far outside: {outlier}")?;
        }
        Ok(())
    }
}

/// How a run has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// There is nothing left to do.
    Finished,
    /// It was asked to, has saved, and can go on from there.
    Asked,
}

/// Runs a recipe, does what it is asked for meanwhile, and says in `position` where it is. The first rank prints to `out`, writes
/// the run's journal, and hands every entry of it to `told`.
pub fn run(
    recipe: &Recipe,
    world: &Arc<Group>,
    asked: &Asked,
    position: &Arc<Position>,
    told: &mut dyn FnMut(&Entry),
    out: &mut dyn Write,
) -> Result<Ended> {
    let diary = Diary::open(&recipe.folder(), world, told, out);
    let (mut session, mut trainer) = Session::begin(recipe, world, asked, position, diary)?;
    let mut ended = Ended::Finished;
    while trainer.steps < recipe.run.steps {
        match session.step(&mut trainer) {
            Ok(()) => (),
            // A range test ends where numbers do: that is what it is for.
            Err(Error::NotFinite { step, fault }) if session.is_range_test() => {
                session.diary.note(step, &format!("step {step}: {fault}; the test ends here"));
                break;
            }
            Err(Error::Outlier { step, outlier }) if session.goes_back_to.is_some() => {
                trainer = session.gone_back(trainer, step, outlier)?;
                continue;
            }
            Err(error) => return Err(session.given_up(error)?),
        }
        session.evaluate(&mut trainer)?;
        if session.save(&mut trainer)? == Next::End {
            session.diary.note(trainer.steps, &format!("ends after step {}, as it was asked to", trainer.steps));
            ended = if trainer.steps == recipe.run.steps { Ended::Finished } else { Ended::Asked };
            break;
        }
        session.trace(&trainer)?;
    }
    session.end()?;
    Ok(ended)
}

/// A run under way: all that it has beside its trainer.
struct Session<'a> {
    recipe: &'a Recipe,
    position: &'a Arc<Position>,
    data: Data,
    /// What the order of the data depends on.
    order: Value,
    held_out: Option<HeldOut>,
    saver: Option<Saver>,
    /// Where checkpoints are, if the run goes back to them when a step is far out.
    goes_back_to: Option<Arc<Store>>,
    first_step: u64,
    range: Range,
    meter: Meter<'a>,
    tracer: Tracer,
    diary: Diary<'a>,
}

impl<'a> Session<'a> {
    /// Gets ready: opens what is read and written, and makes the trainer, from a checkpoint where there is one.
    fn begin(
        recipe: &'a Recipe,
        world: &'a Arc<Group>,
        asked: &Asked,
        position: &'a Arc<Position>,
        mut diary: Diary<'a>,
    ) -> Result<(Self, Trainer)> {
        let (ranks, options) = placed(recipe, world.clone())?;
        let data = Data::open(recipe, world.size())?;
        let model = recipe.model()?;
        diary.say(&heading(recipe, &options, model.elements(), &ranks)?);
        data.heading().iter().for_each(|heading| diary.say(heading));
        let folder = recipe.folder().display().to_string();
        diary.say(&format!("journal in {folder}; `shardwise watch {folder}` shows it"));
        let held_out = recipe.evaluation.as_ref().map(|held_out| HeldOut::of(recipe, held_out)).transpose()?;
        let order = data.order(world.size());
        same_everywhere(world, &format!("{order}{:?}", held_out.as_ref().map(HeldOut::about)))?;
        let scale = scale(recipe, &model, &options, world)?;
        let store = recipe.checkpoints.as_ref().map(|checkpoints| opened(&checkpoints.folder, world)).transpose()?;
        let mut notes = Vec::new();
        let found = match &store {
            Some(store) => resumed(recipe, &order, store, &ranks, &options, &mut |text| {
                diary.say(&text);
                notes.push(text.to_string());
            })?,
            None => None,
        };
        let resumed_from = store.as_ref().zip(found.as_ref());
        let resumed_from = resumed_from.map(|(store, trainer)| store.display(&folder_of(trainer.steps)));
        let mut trainer = match found {
            Some(trainer) => trainer,
            None => begun(recipe, model, ranks, options.clone())?,
        };
        trainer.report_to(position.clone());
        let first_step = trainer.steps + 1;
        plan_sabotage(&mut trainer, position, first_step)?;
        let is_done = first_step > recipe.run.steps;
        // A run that was through before stays as it was written down.
        if !is_done {
            diary.enter(|| What::Start(Box::new(start(recipe, &trainer, &scale, resumed_from))));
            notes.into_iter().for_each(|text| diary.enter(|| What::Note { step: first_step - 1, text }));
        }
        let saver = store.clone().zip(recipe.checkpoints.clone()).map(|(store, checkpoints)| {
            let about = about(recipe, order.clone());
            Saver::new(store, world.clone(), checkpoints, about, asked.clone(), first_step - 1, position.clone())
        });
        if is_done {
            diary.say(&format!("there is nothing left to do: run.steps is {}", recipe.run.steps));
        }
        if let Some(why) = asked.planned.why_not(first_step, recipe.run.steps) {
            diary.say(&why);
        }
        let theory = Theory::of(&trainer, recipe.batch(world.size())?.micro_batches);
        let session = Session {
            recipe,
            position,
            data,
            order,
            held_out,
            saver,
            goes_back_to: store.filter(|_| recipe.supervision.on_outlier == OutlierRecipe::GoBack),
            first_step,
            range: Range::default(),
            meter: Meter::new(world, scale, theory),
            tracer: Tracer::new(world, position, asked, recipe.folder()),
            diary,
        };
        Ok((session, trainer))
    }

    /// The next step, and what there is to say of it; or why it is passed over.
    fn step(&mut self, trainer: &mut Trainer) -> Result<()> {
        let steps = self.recipe.run.steps;
        self.tracer.before_step(trainer)?;
        if let Some(passed_over) = trainer.pass_over() {
            let step = trainer.steps;
            self.diary.note(step, &format!("step {step}/{steps}  {passed_over}"));
            return Ok(());
        }
        self.meter.begin_step();
        let report = self.tried(trainer)?;
        self.range.add(report.rate, report.loss);
        let is_due = report.step % self.recipe.run.print_every == 0 || report.step == steps;
        let is_printed = is_due || report.skipped.is_some() || report.outlier.is_some();
        let counted = self.meter.end_step(trainer, &report, is_printed, steps)?;
        self.tell(counted);
        if !report.without_gradient.is_empty() {
            self.diary.note(report.step, &no_gradient(&report.without_gradient));
        }
        Ok(())
    }

    /// The next step, checked where that is due. What is far out in it comes with what the step read.
    fn tried(&mut self, trainer: &mut Trainer) -> Result<Report> {
        let (recipe, data) = (self.recipe, &self.data);
        let (step, world) = (trainer.steps + 1, trainer.ranks.world.clone());
        let of_rank = |rank: usize| data.step(step, rank, world.size());
        trainer.position.enter(Phase::Data);
        let own = self.meter.loading(|| of_rank(world.rank()))?;
        let is_checked = recipe.supervision.spot_check_every.is_some_and(|every| step.is_multiple_of(every));
        let mut taken = if is_checked { trainer.step_checked(&own, &of_rank) } else { trainer.step(&own) };
        match &mut taken {
            // A range test is there to see the loss rise.
            Ok(report) if recipe.schedule.kind == ScheduleKind::RangeTest => report.outlier = None,
            Ok(Report { outlier: Some(outlier), .. }) => outlier.samples = Some(data.samples(step, world.size())),
            Err(Error::Outlier { outlier, .. }) => outlier.samples = Some(data.samples(step, world.size())),
            _ => (),
        }
        taken.map_err(|error| explained(recipe, trainer, error))
    }

    /// Says and writes down what was counted in a step.
    fn tell(&mut self, counted: Counted) {
        let Counted { step, pace, look } = counted;
        let number = step.step;
        let skipped = step.skipped.as_ref().map(|fault| format!("step {number} is skipped: {fault}"));
        let outlier = step.outlier.as_ref().map(|outlier| format!("step {number} is far outside: {outlier}"));
        if let Some([tokens_per_s, utilisation]) = pace {
            let steps = self.recipe.run.steps;
            self.diary.say(&Line { step: step.clone(), steps, tokens_per_s, utilisation });
        }
        self.diary.enter(|| What::Step(step));
        for text in skipped.into_iter().chain(outlier) {
            self.diary.enter(|| What::Note { step: number, text });
        }
        if let Some(Look { memory, traffic }) = look {
            self.diary.enter(|| What::Memory { step: number, ranks: memory });
            self.diary.enter(|| What::Traffic(traffic));
        }
    }

    /// Measures the model on text that was held out, where that is due.
    fn evaluate(&mut self, trainer: &mut Trainer) -> Result<()> {
        let (step, steps) = (trainer.steps, self.recipe.run.steps);
        let Some(held_out) = self.held_out.as_ref().filter(|held_out| held_out.is_due(step, steps)) else {
            return Ok(());
        };
        self.position.enter(Phase::Evaluation);
        let sequences = self.recipe.batch(trainer.ranks.world.size())?.sequences;
        let figures = self.meter.apart(|| figures(trainer, held_out, sequences))?;
        self.diary.say(&format!("held out after step {step}: {figures}"));
        let Figures { loss, tokens, bits_per_byte } = figures;
        self.diary.enter(|| What::HeldOut(shardwise_journal::HeldOut { step, loss, tokens, bits_per_byte }));
        Ok(())
    }

    /// Looks after checkpoints.
    fn save(&mut self, trainer: &mut Trainer) -> Result<Next> {
        let Some(saver) = &mut self.saver else { return Ok(Next::GoOn) };
        let (last, diary) = (trainer.steps == self.recipe.run.steps, &mut self.diary);
        let next = saver.after_step(trainer, last, &mut |news| diary.news(news));
        next.map_err(|error| explained(self.recipe, trainer, error))
    }

    /// Writes a trace whose last step this was.
    fn trace(&mut self, trainer: &Trainer) -> Result<()> {
        if let Some(traced) = self.tracer.after_step(trainer, trainer.steps == self.recipe.run.steps)? {
            self.diary.say(&traced);
            let Traced { first_step, steps, path } = traced;
            if let Ok(path) = path {
                self.diary.enter(|| What::Trace { first_step, steps, path: path.display().to_string() });
            }
        }
        Ok(())
    }

    /// The trainer of the newest checkpoint, in place of one whose step was far out.
    fn gone_back(&mut self, trainer: Trainer, step: u64, outlier: Box<Outlier>) -> Result<Trainer> {
        let Session { recipe, order, saver, goes_back_to, diary, .. } = self;
        saver.iter_mut().try_for_each(|saver| saver.finish(&mut |news| diary.news(news)))?;
        let store = goes_back_to.as_ref().expect("the run goes back where it has somewhere to go back to");
        let say = &mut |text: &str| diary.note(step, text);
        let mut trainer = gone_back(recipe, order, store, trainer, (step, outlier), say)?;
        trainer.report_to(self.position.clone());
        saver.iter_mut().for_each(|saver| saver.gone_back(trainer.steps));
        self.meter.gone_back();
        Ok(trainer)
    }

    /// Finishes what was to be saved before an error that every rank has: it is still worth having.
    fn given_up(&mut self, error: Error) -> Result<Error> {
        let (saver, diary) = (&mut self.saver, &mut self.diary);
        if let Some(saver) = saver.as_mut().filter(|_| error.is_everyones()) {
            saver.finish(&mut |news| diary.news(news))?;
        }
        Ok(error)
    }

    fn is_range_test(&self) -> bool {
        self.recipe.schedule.kind == ScheduleKind::RangeTest
    }

    /// What there is to say when no step is left.
    fn end(mut self) -> Result<()> {
        self.position.enter(Phase::End);
        if self.first_step <= self.recipe.run.steps {
            self.diary.say(&format!("data took {:.3}% of the time", 100. * self.meter.share_of_loading()?));
        }
        if let Some(why) = self.saver.take().and_then(Saver::given_up) {
            return Err(Error::Checkpoint(format!("the last checkpoint is not saved: {why}")));
        }
        if self.is_range_test() && self.diary.is_first() {
            self.diary.say(&self.range.verdict());
            if let Some(path) = &self.recipe.schedule.plot {
                let fail = |problem: Box<dyn std::error::Error>| Error::Data {
                    path: path.clone(),
                    problem: problem.to_string(),
                };
                self.range.plot(path).map_err(fail)?;
                self.diary.say(&format!("plot: {}", path.display()));
            }
        }
        Ok(())
    }
}

/// How many parameters a note names.
const NAMED_MAX: usize = 8;

/// The note about parameters that the backward pass does not reach.
fn no_gradient(parameters: &[String]) -> String {
    let (named, rest) = parameters.split_at(parameters.len().min(NAMED_MAX));
    let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
    format!(
        "no gradient reaches {}{more}: the loss does not depend on them, and only weight decay changes them; freeze them with \
         model.frozen if that is intended",
        named.join(", "),
    )
}

/// Sees to what is to go wrong on purpose, where the trainer has a part in it.
fn plan_sabotage(trainer: &mut Trainer, position: &Position, first_step: u64) -> Result<()> {
    if let Some(unknown) = position.sabotage().iter().find(|sabotage| !sabotage.is_possible(trainer)) {
        return Err(Error::Options(format!("--fault '{unknown}': the model has no such unit")));
    }
    for flip in position.sabotage().iter().filter(|sabotage| sabotage.deed == Deed::FlipBit) {
        let unit = flip.unit.as_deref().unwrap_or_default();
        trainer.flip_bit(if flip.relative { first_step + flip.step } else { flip.step }, unit)?;
    }
    Ok(())
}

/// How much a step is, beside what the ranks can do. All ranks call it together, before they hold a model.
fn scale(recipe: &Recipe, model: &Model, options: &Options, world: &Group) -> Result<Scale> {
    let positions = recipe.batch.positions;
    Ok(Scale {
        tokens_per_step: (recipe.batch(world.size())?.global * positions) as u64,
        flops_per_token: model.flops_per_token(positions),
        peak_flops_per_s: flops_per_s(world, options.precision.parameters, options.device)?,
        dtype: options.precision.parameters,
        device: options.device,
    })
}

/// Where an attempt begins.
fn start(recipe: &Recipe, trainer: &Trainer, scale: &Scale, resumed_from: Option<String>) -> Start {
    let ranks = trainer.ranks.world.size();
    let ranks_per_host = ranks_here(ranks);
    Start {
        name: recipe.name(),
        recipe: recipe.text.clone(),
        version: env!("CARGO_PKG_VERSION").to_string(),
        ranks,
        ranks_per_host,
        stage: recipe.sharding.stage,
        replicas: trainer.ranks.groups.replicate.size(),
        precision: trainer.options.precision.parameters.to_string(),
        parameters: trainer.model.elements() as u64,
        tokens_per_step: scale.tokens_per_step,
        first_step: trainer.steps + 1,
        steps: recipe.run.steps,
        resumed_from,
        memory_limit_bytes: limit(ranks_per_host, resident_bytes("VmRSS:") as usize).map(|limit| limit.bytes as u64),
        memory_estimate_bytes: Need::of(recipe, ranks).unwrap_or_default().total() as u64,
        flops_per_token: scale.flops_per_token,
        peak_flops_per_s: scale.peak_flops_per_s,
    }
}

/// Files are each host's own: where they differ, ranks would train on something else than they say.
pub(crate) fn same_everywhere(world: &Group, about: &str) -> Result<()> {
    let own = about.bytes().fold(0u64, |hash, byte| mixed(hash ^ u64::from(byte))) as i64;
    let first = world.broadcast("data", 0, vec![own]).wait()?[0];
    let differs = "its corpora or checkpoints are not those of rank 0: give all hosts the same files".to_string();
    agreed(world, if own == first { Ok(()) } else { Err(differs) })?.map_err(Error::Options)
}

/// The place for checkpoints, which every rank can reach or none uses.
pub(crate) fn opened(folder: &str, world: &Group) -> Result<Arc<Store>> {
    let store = Store::create(folder).map(Arc::new).map_err(|error| error.to_string());
    agreed(world, store)?.map_err(Error::Checkpoint)
}

/// A trainer whose parameters begin as the recipe says.
pub(crate) fn begun(recipe: &Recipe, model: Model, ranks: Ranks, options: Options) -> Result<Trainer> {
    let Some(address) = recipe.weights() else {
        return Trainer::new(model, ranks, options, &mut from_seed(recipe.start.seed.unwrap_or(1)));
    };
    let weights = Weights::open(address).map_err(|error| error.to_string());
    let weights = agreed(&ranks.world, weights)?.map_err(Error::Checkpoint)?;
    Trainer::new(model, ranks, options, &mut from_weights(&weights))
}

/// The groups, and the options with the device of this rank.
pub(crate) fn placed(recipe: &Recipe, world: Arc<Group>) -> Result<(Ranks, Options)> {
    match recipe.run.device {
        DeviceRecipe::Cpu => Ok((Ranks::hybrid(world, recipe.sharding.replicas)?, recipe.options(Device::Cpu)?)),
        DeviceRecipe::Cuda => on_gpu(recipe, world),
    }
}

#[cfg(feature = "cuda")]
fn on_gpu(recipe: &Recipe, world: Arc<Group>) -> Result<(Ranks, Options)> {
    let local = ["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"];
    let device = local.iter().find_map(|name| std::env::var(name).ok()?.parse().ok()).unwrap_or(0);
    let ranks = Ranks::on_gpu(world, recipe.sharding.replicas, device)?;
    Ok((ranks, recipe.options(Device::Cuda(device))?))
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &Recipe, _: Arc<Group>) -> Result<(Ranks, Options)> {
    Err(Error::Options(crate::recipe::NO_CUDA.to_string()))
}

/// What is about to happen, with the type of everything that is reduced.
fn heading(recipe: &Recipe, options: &Options, elements: usize, ranks: &Ranks) -> Result<String> {
    let tokens = recipe.batch(ranks.world.size())?.global * recipe.batch.positions;
    Ok(format!(
        "{:.1} million parameters, stage {} on {} ranks ({} × {}), {tokens} tokens a step\n\
         parameters in {}; gradients kept and reduced in {}, summed in f32; loss and norm in f64; masters and optimizer in f32",
        elements as f64 / 1e6,
        recipe.sharding.stage,
        ranks.world.size(),
        ranks.groups.replicate.size(),
        ranks.groups.shard.size(),
        options.precision.parameters,
        options.precision.gradients,
    ))
}
