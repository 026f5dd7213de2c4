//! When to save a checkpoint, and how a save proceeds in the background.
//!
//! A thread writes this rank's files straight from the trainer's tensors; an update leaves it those that are not written yet
//! (`snapshot`). When the files of all ranks are written, the tables follow; then rank 0 writes the manifest and removes old
//! checkpoints. Between phases the ranks have to agree that all are done, which they do after each step. A blocking save has the
//! same phases and waits for each.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shardwise_checkpoint::{
    FORMAT, FilePlan, Hash, Manifest, RetentionPolicy, SaveId, Store, Table, UnitEntry, UnitLayout, lower_priority,
    step_folder, write_manifest, write_parts, write_table,
};
use shardwise_comm::{Group, ReduceOp};
use shardwise_journal::Saved;

use shardwise_recipe::{CheckpointsRecipe, Recipe};
use shardwise_train::{Ranks, Trainer};
use shardwise_zero::ShardedUnit;

use crate::agreement::agree;
use crate::error::{Error, Result};
use crate::phase;
use crate::position::PositionTracker;
use crate::requests::Requests;
use crate::snapshot::{Snapshot, TensorSet, WriterGuard, release_tensors};
use crate::take_snapshot::take_snapshot;

/// What the run does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Continue,
    Stop,
}

/// The progress of a save, for the log.
pub(crate) enum SaveEvent {
    Saved(Saved),
    Problem { step: u64, text: String },
}

impl fmt::Display for SaveEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SaveEvent::Saved(Saved { address, bytes, took_s, stalled_s, .. }) => write!(
                f,
                "saved {address}: {:.1} MB in {took_s:.1} s; training stalled for {stalled_s:.2} s",
                *bytes as f64 / 1e6,
            ),
            SaveEvent::Problem { text, .. } => f.write_str(text),
        }
    }
}

/// The number of attempts at a save, and the pause before the second.
const ATTEMPTS: u32 = 3;
const WAIT: Duration = Duration::from_secs(4);

/// The interval at which ranks that wait for a save check whether it is done.
const POLL: Duration = Duration::from_millis(5);

/// The shortest wait for a full buffer that is reported.
const NOTED_S: f64 = 0.1;

/// Saves a run's checkpoints.
pub(crate) struct Saver {
    store: Arc<Store>,
    world: Arc<Group>,
    recipe: CheckpointsRecipe,
    /// The manifest's description of the run, without its progress.
    about: Value,
    requests: Requests,
    position: Arc<PositionTracker>,
    last: Instant,
    last_step: u64,
    in_progress: Option<Save>,
    /// The snapshot of which units are not updated since it was taken, if there is one. A save may still read it.
    unreleased: Option<Weak<Snapshot>>,
    /// The number of the next attempt.
    attempt: u32,
    /// When to start it, if the last one failed. Rank 0's clock decides.
    retry_at: Option<Instant>,
    /// Files left over from failed attempts.
    leftover: Vec<String>,
    /// Why the last save was given up, if it was.
    failure: Option<String>,
}

/// Saves a checkpoint and waits until it is complete. All ranks call it together. `about` is a JSON object that describes the
/// run; the manifest stores it.
pub fn save(trainer: &mut Trainer, store: &Arc<Store>, about: Value) -> Result<()> {
    let recipe = CheckpointsRecipe { keep_last: None, background: false, ..CheckpointsRecipe::at("") };
    let (step, position) = (trainer.steps(), Arc::default());
    let mut saver = Saver::new(store.clone(), trainer.ranks(), recipe, about, Requests::default(), 0, position);
    saver.start(trainer, step, Retry::Here, &mut |_| ())?;
    saver.failure.map_or(Ok(()), |why| Err(Error::Checkpoint(why)))
}

/// When to retry a save whose snapshot failed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Retry {
    /// After the next step, which is then saved instead.
    NextStep,
    /// At once, while training waits.
    Here,
}

/// A save in progress.
struct Save {
    step: u64,
    id: SaveId,
    training: Value,
    layouts: Vec<UnitLayout>,
    snapshot: Arc<Snapshot>,
    phase: Phase,
    job: Job,
    attempt: u32,
    began: Instant,
    /// How long training stalled for it, excluding the stalls that the snapshot counts.
    stalled: Duration,
}

/// The phases of a save. All ranks are in the same one.
enum Phase {
    Files,
    Tables(Vec<UnitEntry>),
    Manifest(Box<Manifest>),
    Tidy,
}

/// The result of a rank's part in a phase: the hashes of the files it wrote, if any.
type Outcome = std::result::Result<Vec<Vec<Hash>>, String>;

enum Job {
    Running(JoinHandle<Outcome>),
    Done(Outcome),
}

impl Job {
    fn spawn(work: impl FnOnce() -> Outcome + Send + 'static) -> Self {
        let work = || {
            lower_priority();
            work()
        };
        let spawned = std::thread::Builder::new().name("checkpoint".to_string()).spawn(work);
        match spawned {
            Ok(handle) => Job::Running(handle),
            Err(error) => Job::Done(Err(format!("cannot start a thread to save: {error}"))),
        }
    }

    /// The job's result, if it is done.
    fn outcome(&mut self) -> Option<&Outcome> {
        if let Job::Running(handle) = self {
            if !handle.is_finished() {
                return None;
            }
            let Job::Running(handle) = std::mem::replace(self, Job::Done(Ok(Vec::new()))) else { unreachable!() };
            *self = Job::Done(handle.join().unwrap_or_else(|_| Err("the saving thread panicked".to_string())));
        }
        match self {
            Job::Done(outcome) => Some(outcome),
            Job::Running(_) => None,
        }
    }
}

impl Saver {
    pub(crate) fn new(
        store: Arc<Store>,
        ranks: &Ranks,
        recipe: CheckpointsRecipe,
        about: Value,
        requests: Requests,
        last_step: u64,
        position: Arc<PositionTracker>,
    ) -> Self {
        let last = Instant::now();
        Saver {
            store,
            world: ranks.world.clone(),
            recipe,
            about,
            requests,
            position,
            last,
            last_step,
            in_progress: None,
            unreleased: None,
            attempt: 1,
            retry_at: None,
            leftover: Vec::new(),
            failure: None,
        }
    }

    /// Why the last save was given up, if it was.
    pub(crate) fn into_failure(self) -> Option<String> {
        self.failure
    }

    /// Resets to this step after a rollback, because later steps will be saved again.
    pub(crate) fn roll_back(&mut self, step: u64) {
        (self.last_step, self.attempt, self.retry_at, self.unreleased) = (step, 1, None, None);
    }

    /// Advances the save in progress after a step, and starts a new one if it is due. All ranks call it together.
    pub(crate) fn after_step(
        &mut self,
        trainer: &mut Trainer,
        last: bool,
        report: &mut dyn FnMut(SaveEvent),
    ) -> Result<Next> {
        self.position.enter(phase::Phase::Save);
        let step = trainer.steps();
        let is_first = self.world.rank() == 0;
        let time_due = |minutes: f64| is_first && self.last.elapsed().as_secs_f64() >= 60. * minutes;
        let own = [
            self.requests.save.swap(false, Ordering::Relaxed),
            self.requests.stop.load(Ordering::Relaxed),
            self.recipe.every_minutes.is_some_and(time_due),
            self.in_progress.as_mut().is_some_and(|save| save.job.outcome().is_none()),
            is_first && self.retry_at.is_some_and(|at| at <= Instant::now()),
        ];
        let all = self.world.all_reduce("checkpoints", ReduceOp::Max, own.map(i64::from).to_vec()).wait()?;
        let [save, stop, time_due, unfinished, retry_due] =
            [all[0], all[1], all[2], all[3], all[4]].map(|any| any != 0);
        if self.in_progress.is_some() && !unfinished {
            self.advance(report)?;
        }
        let step_due = self.recipe.every_steps.is_some_and(|every| step.is_multiple_of(every));
        let must = save || stop || last;
        if (must || step_due || time_due || retry_due) && self.last_step != step {
            if must {
                self.finish(report)?;
            }
            match &self.in_progress {
                Some(save) if step_due => {
                    let text = format!("step {step} is not saved: the save of step {} is still in progress", save.step);
                    report(SaveEvent::Problem { step, text });
                }
                // A timed save stays due until it is done.
                Some(_) => (),
                None => {
                    let retry = if stop || last { Retry::Here } else { Retry::NextStep };
                    self.start(trainer, step, retry, report)?;
                }
            }
        }
        if stop || last {
            self.finish(report)?;
        }
        Ok(if stop { Next::Stop } else { Next::Continue })
    }

    /// Takes a snapshot of the trainer and starts writing it.
    fn start(
        &mut self,
        trainer: &mut Trainer,
        step: u64,
        retry: Retry,
        report: &mut dyn FnMut(SaveEvent),
    ) -> Result<()> {
        trainer.finish_update()?;
        self.position.enter(phase::Phase::Save);
        let began = Instant::now();
        let own = if self.world.rank() == 0 { i64::from(SaveId::new().number()) } else { 0 };
        let id = self.world.all_reduce("checkpoint's id", ReduceOp::Max, vec![own]).wait()?[0];
        let id = SaveId::from(id as u32);
        let layouts = trainer.checkpoint_layouts();
        let buffer_bytes = usize::try_from(self.recipe.buffer_bytes).unwrap_or(usize::MAX);
        let snapshot = loop {
            match take_snapshot(trainer, &layouts, id, buffer_bytes, &self.position)? {
                Ok(snapshot) => break snapshot,
                Err(error) => {
                    let attempt = self.attempt;
                    self.snapshot_failed(step, retry, error, report);
                    match retry {
                        Retry::Here if attempt < ATTEMPTS => std::thread::sleep(WAIT * attempt),
                        _ => return Ok(()),
                    }
                }
            }
        };
        self.unreleased = Some(Arc::downgrade(&snapshot));
        let attempt = std::mem::replace(&mut self.attempt, 1);
        self.retry_at = None;
        let mut training = self.about.clone();
        training["progress"] =
            serde_json::to_value(trainer.progress()).map_err(|error| Error::Checkpoint(error.to_string()))?;
        // The disk may be full of files that earlier attempts left behind.
        let leftover = std::mem::take(&mut self.leftover);
        let job = self.write_files(step, &snapshot, leftover, Duration::ZERO);
        if self.recipe.background && retry == Retry::NextStep {
            release_tensors(&self.world, Some(&snapshot), TensorSet::Lent, &mut |_| None)?;
        }
        let stalled = began.elapsed();
        self.in_progress =
            Some(Save { step, id, training, layouts, snapshot, phase: Phase::Files, job, attempt, began, stalled });
        (self.last, self.last_step) = (Instant::now(), step);
        if !self.recipe.background {
            self.finish(report)?;
        }
        Ok(())
    }

    /// Releases the tensors of a unit that is about to be updated: waits until the save in progress has read, detached or copied
    /// them. All ranks call it together, before every update of a unit; the stages of a pipeline each for their own unit.
    pub(crate) fn release_unit(&mut self, shard: &mut ShardedUnit, unit: usize) -> shardwise_train::Result<()> {
        let Some(snapshot) = &self.unreleased else { return Ok(()) };
        // Running out of memory is treated like a full buffer.
        let mut detach = |tensor: usize| shard.detach_checkpoint_tensor(tensor).ok();
        release_tensors(&self.world, snapshot.upgrade().as_deref(), TensorSet::Unit(unit), &mut detach)?;
        Ok(())
    }

    /// Releases the tensors of all units before a step, because the stages of a pipeline will not update theirs at the same time: waits
    /// until the save in progress has read or copied them. None is detached: passes still read parameters. All ranks call it together.
    pub(crate) fn release_all_units(&mut self, trainer: &Trainer) -> Result<()> {
        let Some(snapshot) = &self.unreleased else { return Ok(()) };
        for unit in trainer.own_trainable_units() {
            release_tensors(&self.world, snapshot.upgrade().as_deref(), TensorSet::Unit(unit), &mut |_| None)?;
        }
        self.end_update(trainer.fewer_updates())
    }

    /// Notes that all units have been updated since the snapshot was taken, so that nothing is left to release. `fewer` is the number of units that this stage
    /// has updated less than another one, whose calls it joins.
    pub(crate) fn end_update(&mut self, fewer: usize) -> Result<()> {
        if self.unreleased.take().is_some() {
            for _ in 0..fewer {
                release_tensors(&self.world, None, TensorSet::Lent, &mut |_| None)?;
            }
        }
        Ok(())
    }

    /// Reports why the snapshot failed and whether it will be tried again.
    fn snapshot_failed(&mut self, step: u64, retry: Retry, error: String, report: &mut dyn FnMut(SaveEvent)) {
        let name = step_folder(step);
        let text = match (self.attempt < ATTEMPTS, retry) {
            (true, Retry::Here) => format!("{name} could not be saved; retrying: {error}"),
            (true, Retry::NextStep) => format!("{name} could not be saved; saving the next step instead: {error}"),
            (false, _) => describe_giving_up(&name, &error),
        };
        report(SaveEvent::Problem { step, text });
        match self.attempt < ATTEMPTS {
            true => (self.attempt, self.retry_at) = (self.attempt + 1, Some(Instant::now())),
            false => {
                (self.attempt, self.retry_at, self.failure) = (1, None, Some(error));
                (self.last, self.last_step) = (Instant::now(), step);
            }
        }
    }

    /// Waits until the save in progress is complete.
    pub(crate) fn finish(&mut self, report: &mut dyn FnMut(SaveEvent)) -> Result<()> {
        while let Some(save) = &mut self.in_progress {
            let waited = Instant::now();
            // Ranks may be minutes apart, which is longer than the timeout of a single call.
            loop {
                let running = i64::from(save.job.outcome().is_none());
                if self.world.all_reduce("checkpoint in progress", ReduceOp::Max, vec![running]).wait()?[0] == 0 {
                    break;
                }
                std::thread::sleep(POLL);
            }
            save.stalled += waited.elapsed();
            self.advance(report)?;
        }
        Ok(())
    }

    /// Moves the save to its next phase. Call it only once every rank is done with its part of the current one.
    fn advance(&mut self, report: &mut dyn FnMut(SaveEvent)) -> Result<()> {
        let Some(mut save) = self.in_progress.take() else { return Ok(()) };
        let own = match save.job.outcome() {
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(error.clone()),
            None => Err("the phase ended before this rank was done with it".to_string()),
        };
        if let Err(error) = agree(&self.world, own)? {
            return self.failed(save, &error, report);
        }
        let (step, store) = (save.step, self.store.clone());
        save.phase = match &save.phase {
            Phase::Files => {
                let tables = self.tables(&save)?;
                let entries = tables.iter().map(|(entry, _)| entry.clone()).collect();
                save.job = Job::spawn(move || {
                    for (entry, table) in &tables {
                        let written = table.as_ref().map_or(Ok(()), |table| write_table(&store, step, entry, table));
                        written.map_err(|error| error.to_string())?;
                    }
                    Ok(Vec::new())
                });
                Phase::Tables(entries)
            }
            Phase::Tables(entries) => {
                self.position.enter(phase::Phase::SaveBefore);
                let manifest = Box::new(Manifest {
                    format: FORMAT,
                    written_by: format!("shardwise {}", env!("CARGO_PKG_VERSION")),
                    step,
                    training: save.training.clone(),
                    units: entries.clone(),
                });
                save.job = self.write_manifest(manifest.clone(), 1);
                Phase::Manifest(manifest)
            }
            Phase::Manifest(_) => {
                self.position.enter(phase::Phase::SaveAfter);
                let bytes: u64 =
                    save.layouts.iter().flat_map(|layout| layout.files(save.id)).map(|file| file.bytes()).sum();
                let (stalled, waited) = save.snapshot.stalls();
                let own = [save.stalled + stalled, waited].map(|time| time.as_micros() as i64);
                let most = self.world.all_reduce("checkpoint's delay", ReduceOp::Max, own.to_vec()).wait()?;
                let [stalled_s, waited_s] = [most[0], most[1]].map(|microseconds| microseconds as f64 / 1e6);
                if waited_s >= NOTED_S {
                    let name = step_folder(step);
                    let text = format!("training waited {waited_s:.1} s for {name}: checkpoints.buffer_bytes was full");
                    report(SaveEvent::Problem { step, text });
                }
                report(SaveEvent::Saved(Saved {
                    step,
                    address: self.store.display(&step_folder(step)),
                    bytes,
                    took_s: save.began.elapsed().as_secs_f64(),
                    stalled_s,
                }));
                let (is_first, id) = (self.world.rank() == 0, save.id);
                let keep = RetentionPolicy { last: self.recipe.keep_last, every: self.recipe.keep_every };
                self.failure = None;
                save.job = Job::spawn(move || {
                    if is_first {
                        let kept = keep.steps_to_keep(&store);
                        let pruned = kept.and_then(|kept| store.prune(step, id, |step| kept.contains(&step)));
                        pruned.map_err(|error| error.to_string())?;
                    }
                    Ok(Vec::new())
                });
                Phase::Tidy
            }
            Phase::Tidy => return Ok(()),
        };
        self.in_progress = Some(save);
        Ok(())
    }

    /// Reports why a save failed, then retries it or gives it up.
    fn failed(&mut self, mut save: Save, error: &str, report: &mut dyn FnMut(SaveEvent)) -> Result<()> {
        let (step, name) = (save.step, step_folder(save.step));
        let mut problem = |text: String| report(SaveEvent::Problem { step, text });
        if let Phase::Tidy = save.phase {
            problem(format!("{name} is saved, but older checkpoints could not be removed: {error}"));
            return Ok(());
        }
        let is_over = save.attempt == ATTEMPTS;
        match &save.phase {
            _ if is_over => {
                problem(describe_giving_up(&name, error));
                if !matches!(save.phase, Phase::Manifest(_)) {
                    discard(&self.store, &paths(&save));
                }
                self.failure = Some(error.to_string());
                return Ok(());
            }
            // The manifest may be in place although the storage reported an error, so the files it names stay.
            Phase::Manifest(manifest) => {
                problem(format!("{name} could not be saved; retrying: {error}"));
                save.attempt += 1;
                save.job = self.write_manifest(manifest.clone(), save.attempt);
            }
            _ if save.snapshot.is_complete() => {
                problem(format!("{name} could not be saved; retrying: {error}"));
                save.job = self.write_files(step, &save.snapshot, paths(&save), WAIT * save.attempt);
                save.attempt += 1;
                save.phase = Phase::Files;
            }
            _ => {
                problem(format!("{name} could not be saved; retrying with a later step: {error}"));
                self.attempt = save.attempt + 1;
                self.retry_at = Some(Instant::now() + WAIT * save.attempt);
                self.leftover.extend(paths(&save));
                return Ok(());
            }
        }
        self.in_progress = Some(save);
        Ok(())
    }

    /// Writes the manifest, on rank 0.
    fn write_manifest(&self, manifest: Box<Manifest>, attempt: u32) -> Job {
        let (store, is_first, position) = (self.store.clone(), self.world.rank() == 0, self.position.clone());
        Job::spawn(move || {
            std::thread::sleep(WAIT * (attempt - 1));
            let mut inside = || position.enter_in_background(phase::Phase::SaveInside);
            match is_first {
                true => write_manifest(&store, &manifest, &mut inside).map_err(|error| error.to_string())?,
                false => inside(),
            }
            Ok(Vec::new())
        })
    }

    /// Removes left-over files, pauses, and writes this rank's files.
    fn write_files(&self, step: u64, snapshot: &Arc<Snapshot>, leftover: Vec<String>, pause: Duration) -> Job {
        let (store, position) = (self.store.clone(), self.position.clone());
        let writer = WriterGuard::new(snapshot);
        Job::spawn(move || {
            let began = Instant::now();
            discard(&store, &leftover);
            std::thread::sleep(pause);
            let written = write_files(&store, step, writer.snapshot());
            position.record_background(phase::Phase::Save, began);
            written
        })
    }

    /// The manifest's entry for every unit, and the unit's table if this rank writes it. Every rank has the hashes of its own
    /// files and zeros for the others, so a sum over ranks collects them all.
    fn tables(&self, save: &Save) -> Result<Vec<(UnitEntry, Option<Table>)>> {
        let Job::Done(Ok(hashes)) = &save.job else {
            return Err(Error::Checkpoint("the tables need the hashes of the files".to_string()));
        };
        let (rank, ranks) = (self.world.rank(), self.world.size());
        let mut tables = Vec::new();
        for (unit, layout) in save.layouts.iter().enumerate() {
            let plans = layout.files(save.id);
            let mut words = vec![0i64; 4 * plans.iter().map(FilePlan::pieces).sum::<usize>()];
            for (file, hashes) in save.snapshot.files.iter().zip(hashes).filter(|(file, _)| file.unit == unit) {
                let before: usize = plans[..file.file].iter().map(FilePlan::pieces).sum();
                for (four, hash) in words[4 * before..].chunks_exact_mut(4).zip(hashes) {
                    four.copy_from_slice(&hash.to_words());
                }
            }
            let words = self.world.all_reduce("checkpoint's hashes", ReduceOp::Sum, words).wait()?;
            let pieces: Vec<Hash> =
                words.chunks_exact(4).map(|four| Hash::from_words([four[0], four[1], four[2], four[3]])).collect();
            let table = layout.table(save.id, &pieces);
            let entry = layout.entry(save.id, &table);
            tables.push((entry, (unit % ranks == rank).then_some(table)));
        }
        Ok(tables)
    }
}

fn describe_giving_up(name: &str, error: &str) -> String {
    format!("{name} was not saved after {ATTEMPTS} attempts: {error}; training continues")
}

/// The number of files that a rank writes at a time: while one goes to disk, another is hashed.
const WRITERS: usize = 2;

fn write_files(store: &Store, step: u64, snapshot: &Snapshot) -> Outcome {
    let queue = Mutex::new(snapshot.files_in_order().into_iter());
    let write = || -> std::result::Result<Vec<(usize, Vec<Hash>)>, String> {
        let mut own = Vec::new();
        loop {
            let next = queue.lock().map_err(|_| "a writer thread panicked".to_string())?.next();
            let Some((index, file)) = next else { return Ok(own) };
            let hashes = write_parts(store, step, &file.name, snapshot.parts(index));
            let hashes = hashes.map_err(|error| error.to_string());
            if hashes.is_err() {
                // Make the other writers stop, too.
                queue.lock().map(|mut queue| queue.by_ref().for_each(drop)).unwrap_or_default();
            }
            own.push((index, hashes?));
        }
    };
    let parts = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS).map(|_| scope.spawn(write)).collect();
        let panicked = |_| Err("a writer thread panicked".to_string());
        // Wait for all of them, even if the first failed.
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap_or_else(panicked)).collect();
        ended.into_iter().collect::<std::result::Result<Vec<_>, String>>()
    });
    let mut all = parts?.concat();
    all.sort_unstable_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, hashes)| hashes).collect())
}

/// The files that this rank writes for a save.
fn paths(save: &Save) -> Vec<String> {
    save.snapshot.files.iter().map(|file| format!("{}/{}", step_folder(save.step), file.name)).collect()
}

/// Removes files of a failed save, ignoring errors.
fn discard(store: &Store, paths: &[String]) {
    paths.iter().for_each(|path| drop(store.remove(path)));
}

/// The manifest's description of a run, without its progress.
pub(crate) fn run_info(recipe: &Recipe, data: Value) -> Value {
    json!({
        "data": data,
        "recipe": recipe.text,
        // The Hugging Face config, for export.
        "model": recipe.config(),
        // The hash of the compiled package, if the model is one.
        "package": recipe.package_hash(),
        "began_with": recipe.weights(),
        "versions": {
            "shardwise": env!("CARGO_PKG_VERSION"),
            "libtorch": shardwise_torch::libtorch_version(),
        },
    })
}
