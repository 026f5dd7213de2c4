//! Saving: when, and how a save goes from phase to phase while training goes on.
//!
//! A thread writes this rank's files out of the trainer's tensors, of which training copies what it is about to overwrite
//! (`snapshot`). When every rank's files have been written, tables are; then the first rank writes the manifest, and removes what is
//! not to be kept. Between phases ranks have to agree that all are there, which they do after a step. A save that blocks is the same,
//! with waiting in between.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shardwise_checkpoint::{
    FORMAT, FilePlan, Hash, Keep, Manifest, SaveId, Store, Table, UnitEntry, UnitLayout, folder_of, write_manifest,
    write_parts, write_table, yield_to_others,
};
use shardwise_comm::{Group, Reduce};
use shardwise_journal::Saved;

use crate::agreement::agreed;
use crate::position::{self, Position};
use crate::recipe::{CheckpointsRecipe, Recipe};
use crate::snapshot::{Snapshot, Writing};
use crate::trace::PlannedTrace;
use crate::{Error, Result, Trainer};

/// What a run can be asked for from outside, on any of its ranks; a signal's handler sets it.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// To save.
    pub save: Arc<AtomicBool>,
    /// To save and end.
    pub end: Arc<AtomicBool>,
    /// To trace so many steps, from the next but one on.
    pub trace: Arc<AtomicU64>,
    /// Steps that were to be traced from the start; the same on all ranks.
    pub planned: PlannedTrace,
}

/// What a run should do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    GoOn,
    End,
}

/// What there is to say of a save.
pub(crate) enum News {
    /// It is there.
    Saved(Saved),
    /// Something is not as it should be.
    Trouble {
        /// With which step's.
        step: u64,
        /// What.
        text: String,
    },
}

impl fmt::Display for News {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            News::Saved(Saved { address, bytes, took_s, stood_still_s, .. }) => write!(
                f,
                "saved {address}: {:.1} MB in {took_s:.1} s, of which training stood still for {stood_still_s:.2} s",
                *bytes as f64 / 1e6,
            ),
            News::Trouble { text, .. } => f.write_str(text),
        }
    }
}

/// How often a save is tried, and how long it waits before it is tried again.
const ATTEMPTS: u32 = 3;
const WAIT: Duration = Duration::from_secs(4);

/// How often ranks that wait for a save look how far it is.
const POLL: Duration = Duration::from_millis(5);

/// For how long training has to wait for a full buffer before that is said.
const NOTED_S: f64 = 0.1;

/// Saves a run's checkpoints.
pub(crate) struct Saver {
    store: Arc<Store>,
    world: Arc<Group>,
    recipe: CheckpointsRecipe,
    /// What manifests say beside tensors and progress.
    about: Value,
    asked: Asked,
    position: Arc<Position>,
    last: Instant,
    last_step: u64,
    under_way: Option<Save>,
    /// Which attempt comes next.
    attempt: u32,
    /// When the first rank makes it, if the last one failed.
    retry_at: Option<Instant>,
    /// Files that failed attempts have left.
    leftover: Vec<String>,
    /// Why the last save was given up, if it was.
    given_up: Option<String>,
}

/// Saves a checkpoint, and waits until it is there. All ranks of the trainer call it together. `about` is an object for the
/// manifest, which says what the caller will want to know of the run.
pub fn save(trainer: &mut Trainer, store: &Arc<Store>, about: Value) -> Result<()> {
    let recipe = CheckpointsRecipe { keep_last: None, background: false, ..CheckpointsRecipe::at("") };
    let (world, step) = (trainer.ranks.world.clone(), trainer.progress().step);
    let mut saver = Saver::new(store.clone(), world, recipe, about, Asked::default(), 0, trainer.position.clone());
    saver.begin(trainer, step, Retry::Here, &mut |_| ())?;
    saver.given_up.map_or(Ok(()), |why| Err(Error::Checkpoint(why)))
}

/// When a save that failed before it was written is tried again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Retry {
    /// After the next step, of which the checkpoint then is.
    NextStep,
    /// While training stands still.
    Here,
}

/// A save under way.
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
    /// For how long training stood still for it, beside what the snapshot knows.
    stood: Duration,
}

/// What ranks are doing.
enum Phase {
    Files,
    Tables(Vec<UnitEntry>),
    Manifest(Box<Manifest>),
    Tidy,
}

/// A rank's part in a phase: the hashes of its files, where it wrote any.
type Outcome = std::result::Result<Vec<Vec<Hash>>, String>;

enum Job {
    Running(JoinHandle<Outcome>),
    Done(Outcome),
}

impl Job {
    fn spawn(work: impl FnOnce() -> Outcome + Send + 'static) -> Self {
        let work = || {
            yield_to_others();
            work()
        };
        let spawned = std::thread::Builder::new().name("checkpoint".to_string()).spawn(work);
        match spawned {
            Ok(handle) => Job::Running(handle),
            Err(error) => Job::Done(Err(format!("no thread for saving: {error}"))),
        }
    }

    /// What came of it, if it is done.
    fn outcome(&mut self) -> Option<&Outcome> {
        if let Job::Running(handle) = self {
            if !handle.is_finished() {
                return None;
            }
            let Job::Running(handle) = std::mem::replace(self, Job::Done(Ok(Vec::new()))) else { unreachable!() };
            *self = Job::Done(handle.join().unwrap_or_else(|_| Err("the thread that saves has panicked".to_string())));
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
        world: Arc<Group>,
        recipe: CheckpointsRecipe,
        about: Value,
        asked: Asked,
        last_step: u64,
        position: Arc<Position>,
    ) -> Self {
        let last = Instant::now();
        Saver {
            store,
            world,
            recipe,
            about,
            asked,
            position,
            last,
            last_step,
            under_way: None,
            attempt: 1,
            retry_at: None,
            leftover: Vec::new(),
            given_up: None,
        }
    }

    /// Why the last save was given up, if it was.
    pub(crate) fn given_up(self) -> Option<String> {
        self.given_up
    }

    /// The run has gone back to this step: what comes after it is yet to be saved.
    pub(crate) fn gone_back(&mut self, step: u64) {
        (self.last_step, self.attempt, self.retry_at) = (step, 1, None);
    }

    /// Looks after checkpoints when a step is done: whether one is due, and how the one under way goes.
    pub(crate) fn after_step(&mut self, trainer: &mut Trainer, last: bool, say: &mut dyn FnMut(News)) -> Result<Next> {
        self.position.enter(position::Phase::Save);
        let step = trainer.progress().step;
        let is_first = self.world.rank() == 0;
        let timed = |minutes: f64| is_first && self.last.elapsed().as_secs_f64() >= 60. * minutes;
        let own = [
            self.asked.save.swap(false, Ordering::Relaxed),
            self.asked.end.load(Ordering::Relaxed),
            self.recipe.every_minutes.is_some_and(timed),
            self.under_way.as_mut().is_some_and(|save| save.job.outcome().is_none()),
            is_first && self.retry_at.is_some_and(|at| at <= Instant::now()),
        ];
        let all = self.world.all_reduce("checkpoints", Reduce::Max, own.map(i64::from).to_vec()).wait()?;
        let [save, end, timed, unfinished, again] = [all[0], all[1], all[2], all[3], all[4]].map(|any| any != 0);
        if self.under_way.is_some() && !unfinished {
            self.advance(say)?;
        }
        let stepped = self.recipe.every_steps.is_some_and(|every| step.is_multiple_of(every));
        let must = save || end || last;
        if (must || stepped || timed || again) && self.last_step != step {
            if must {
                self.finish(say)?;
            }
            match &self.under_way {
                Some(save) if stepped => {
                    let text = format!("step {step} is not saved: the save of step {} is still under way", save.step);
                    say(News::Trouble { step, text });
                }
                // By the clock it is due until it is there.
                Some(_) => (),
                None => {
                    let retry = if end || last { Retry::Here } else { Retry::NextStep };
                    self.begin(trainer, step, retry, say)?;
                }
            }
        }
        if end || last {
            self.finish(say)?;
        }
        Ok(if end { Next::End } else { Next::GoOn })
    }

    /// Begins to write what the trainer has now.
    fn begin(&mut self, trainer: &mut Trainer, step: u64, retry: Retry, say: &mut dyn FnMut(News)) -> Result<()> {
        let began = Instant::now();
        let own = if self.world.rank() == 0 { i64::from(SaveId::new().number()) } else { 0 };
        let id = self.world.all_reduce("checkpoint's id", Reduce::Max, vec![own]).wait()?[0];
        let id = SaveId::from(id as u32);
        let layouts = trainer.layouts();
        let buffer_bytes = usize::try_from(self.recipe.buffer).unwrap_or(usize::MAX);
        let snapshot = loop {
            match trainer.snapshot(&layouts, id, buffer_bytes)? {
                Ok(snapshot) => break snapshot,
                Err(error) => {
                    let attempt = self.attempt;
                    self.snapshot_failed(step, retry, error, say);
                    match retry {
                        Retry::Here if attempt < ATTEMPTS => std::thread::sleep(WAIT * attempt),
                        _ => return Ok(()),
                    }
                }
            }
        };
        let attempt = std::mem::replace(&mut self.attempt, 1);
        self.retry_at = None;
        let mut training = self.about.clone();
        training["progress"] =
            serde_json::to_value(trainer.progress()).map_err(|error| Error::Checkpoint(error.to_string()))?;
        // What earlier attempts have left may be what leaves no room.
        let leftover = std::mem::take(&mut self.leftover);
        let job = self.write_files(step, &snapshot, leftover, Duration::ZERO);
        if self.recipe.background && retry == Retry::NextStep {
            trainer.release_lent()?;
        }
        let stood = began.elapsed();
        self.under_way =
            Some(Save { step, id, training, layouts, snapshot, phase: Phase::Files, job, attempt, began, stood });
        (self.last, self.last_step) = (Instant::now(), step);
        if !self.recipe.background {
            self.finish(say)?;
        }
        Ok(())
    }

    /// Reports why the snapshot failed and whether it will be tried again.
    fn snapshot_failed(&mut self, step: u64, retry: Retry, error: String, say: &mut dyn FnMut(News)) {
        let name = folder_of(step);
        let text = match (self.attempt < ATTEMPTS, retry) {
            (true, Retry::Here) => format!("{name} could not be saved, and will be tried again: {error}"),
            (true, Retry::NextStep) => {
                format!("{name} could not be saved, and the next step will be saved instead: {error}")
            }
            (false, _) => not_saved(&name, &error),
        };
        say(News::Trouble { step, text });
        match self.attempt < ATTEMPTS {
            true => (self.attempt, self.retry_at) = (self.attempt + 1, Some(Instant::now())),
            false => {
                (self.attempt, self.retry_at, self.given_up) = (1, None, Some(error));
                (self.last, self.last_step) = (Instant::now(), step);
            }
        }
    }

    /// Waits for the save under way.
    pub(crate) fn finish(&mut self, say: &mut dyn FnMut(News)) -> Result<()> {
        while let Some(save) = &mut self.under_way {
            let waited = Instant::now();
            // Ranks may be minutes apart, which is longer than they wait for each other in one call.
            loop {
                let running = i64::from(save.job.outcome().is_none());
                if self.world.all_reduce("checkpoint under way", Reduce::Max, vec![running]).wait()?[0] == 0 {
                    break;
                }
                std::thread::sleep(POLL);
            }
            save.stood += waited.elapsed();
            self.advance(say)?;
        }
        Ok(())
    }

    /// Every rank is through with its part of the phase: on to the next.
    fn advance(&mut self, say: &mut dyn FnMut(News)) -> Result<()> {
        let Some(mut save) = self.under_way.take() else { return Ok(()) };
        let own = match save.job.outcome() {
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(error.clone()),
            None => Err("a phase ended before this rank was through with it".to_string()),
        };
        if let Err(error) = agreed(&self.world, own)? {
            return self.failed(save, &error, say);
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
                self.position.enter(position::Phase::SaveBefore);
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
                self.position.enter(position::Phase::SaveAfter);
                let bytes: u64 =
                    save.layouts.iter().flat_map(|layout| layout.files(save.id)).map(|file| file.bytes()).sum();
                let (stood, waited) = save.snapshot.stood_still();
                let own = [save.stood + stood, waited].map(|time| time.as_micros() as i64);
                let most = self.world.all_reduce("checkpoint's delay", Reduce::Max, own.to_vec()).wait()?;
                let [stood_still_s, waited_s] = [most[0], most[1]].map(|microseconds| microseconds as f64 / 1e6);
                if waited_s >= NOTED_S {
                    let name = folder_of(step);
                    let text = format!("training waited {waited_s:.1} s for {name}: checkpoints.buffer was full");
                    say(News::Trouble { step, text });
                }
                say(News::Saved(Saved {
                    step,
                    address: self.store.display(&folder_of(step)),
                    bytes,
                    took_s: save.began.elapsed().as_secs_f64(),
                    stood_still_s,
                }));
                let (is_first, id) = (self.world.rank() == 0, save.id);
                let keep = Keep { last: self.recipe.keep_last, every: self.recipe.keep_every };
                self.given_up = None;
                save.job = Job::spawn(move || {
                    if is_first {
                        let kept = keep.steps(&store);
                        let tidied = kept.and_then(|kept| store.tidy(step, id, |step| kept.contains(&step)));
                        tidied.map_err(|error| error.to_string())?;
                    }
                    Ok(Vec::new())
                });
                Phase::Tidy
            }
            Phase::Tidy => return Ok(()),
        };
        self.under_way = Some(save);
        Ok(())
    }

    /// Says why a save failed, and tries again or gives it up.
    fn failed(&mut self, mut save: Save, error: &str, say: &mut dyn FnMut(News)) -> Result<()> {
        let (step, name) = (save.step, folder_of(save.step));
        let mut trouble = |text: String| say(News::Trouble { step, text });
        if let Phase::Tidy = save.phase {
            trouble(format!("{name} is saved, and what it replaces could not be removed: {error}"));
            return Ok(());
        }
        let is_over = save.attempt == ATTEMPTS;
        match &save.phase {
            _ if is_over => {
                trouble(not_saved(&name, error));
                if !matches!(save.phase, Phase::Manifest(_)) {
                    discard(&self.store, &paths(&save));
                }
                self.given_up = Some(error.to_string());
                return Ok(());
            }
            // It may be in place though the storage says otherwise, so what it names stays.
            Phase::Manifest(manifest) => {
                trouble(format!("{name} could not be saved, and will be tried again: {error}"));
                save.attempt += 1;
                save.job = self.write_manifest(manifest.clone(), save.attempt);
            }
            _ if save.snapshot.is_complete() => {
                trouble(format!("{name} could not be saved, and will be tried again: {error}"));
                save.job = self.write_files(step, &save.snapshot, paths(&save), WAIT * save.attempt);
                save.attempt += 1;
                save.phase = Phase::Files;
            }
            _ => {
                trouble(format!("{name} could not be saved, and will be tried again with a later step: {error}"));
                self.attempt = save.attempt + 1;
                self.retry_at = Some(Instant::now() + WAIT * save.attempt);
                self.leftover.extend(paths(&save));
                return Ok(());
            }
        }
        self.under_way = Some(save);
        Ok(())
    }

    /// The first rank does.
    fn write_manifest(&self, manifest: Box<Manifest>, attempt: u32) -> Job {
        let (store, is_first, position) = (self.store.clone(), self.world.rank() == 0, self.position.clone());
        Job::spawn(move || {
            std::thread::sleep(WAIT * (attempt - 1));
            let mut inside = || position.beside(position::Phase::SaveInside);
            match is_first {
                true => write_manifest(&store, &manifest, &mut inside).map_err(|error| error.to_string())?,
                false => inside(),
            }
            Ok(Vec::new())
        })
    }

    /// Writes files, after those that are left over have been removed and after a pause.
    fn write_files(&self, step: u64, snapshot: &Arc<Snapshot>, leftover: Vec<String>, pause: Duration) -> Job {
        let (store, position) = (self.store.clone(), self.position.clone());
        let writing = Writing::new(snapshot);
        Job::spawn(move || {
            let began = Instant::now();
            discard(&store, &leftover);
            std::thread::sleep(pause);
            let written = written(&store, step, writing.snapshot());
            position.lasted_beside(position::Phase::Save, began);
            written
        })
    }

    /// What the manifest says of every unit, and its table where this rank writes it. Every rank has hashes of its own files; all
    /// of them together are the sum.
    fn tables(&self, save: &Save) -> Result<Vec<(UnitEntry, Option<Table>)>> {
        let Job::Done(Ok(hashes)) = &save.job else {
            return Err(Error::Checkpoint("files are written first".to_string()));
        };
        let (rank, ranks) = (self.world.rank(), self.world.size());
        let mut tables = Vec::new();
        for (unit, layout) in save.layouts.iter().enumerate() {
            let plans = layout.files(save.id);
            let mut words = vec![0i64; 4 * plans.iter().map(FilePlan::pieces).sum::<usize>()];
            for (file, hashes) in save.snapshot.files.iter().zip(hashes).filter(|(file, _)| file.unit == unit) {
                let before: usize = plans[..file.file].iter().map(FilePlan::pieces).sum();
                for (four, hash) in words[4 * before..].chunks_exact_mut(4).zip(hashes) {
                    four.copy_from_slice(&hash.words());
                }
            }
            let words = self.world.all_reduce("checkpoint's hashes", Reduce::Sum, words).wait()?;
            let pieces: Vec<Hash> =
                words.chunks_exact(4).map(|four| Hash::from_words([four[0], four[1], four[2], four[3]])).collect();
            let table = layout.table(save.id, &pieces);
            let entry = layout.entry(save.id, &table);
            tables.push((entry, (unit % ranks == rank).then_some(table)));
        }
        Ok(tables)
    }
}

/// What is said of a save that is given up.
fn not_saved(name: &str, error: &str) -> String {
    format!("{name} is not saved, after {ATTEMPTS} attempts: {error}; training goes on")
}

/// How many files a rank writes at a time: while one goes to the disk, another is hashed.
const WRITERS: usize = 2;

fn written(store: &Store, step: u64, snapshot: &Snapshot) -> Outcome {
    let queue = Mutex::new(snapshot.files.iter().enumerate());
    let write = || -> std::result::Result<Vec<(usize, Vec<Hash>)>, String> {
        let mut own = Vec::new();
        loop {
            let next = queue.lock().map_err(|_| "a thread that writes has panicked".to_string())?.next();
            let Some((index, file)) = next else { return Ok(own) };
            let hashes = write_parts(store, step, &file.name, snapshot.parts(index));
            let hashes = hashes.map_err(|error| error.to_string());
            if hashes.is_err() {
                // The others need not go on either.
                queue.lock().map(|mut queue| queue.by_ref().for_each(drop)).unwrap_or_default();
            }
            own.push((index, hashes?));
        }
    };
    let parts = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS).map(|_| scope.spawn(write)).collect();
        let panicked = |_| Err("a thread that writes has panicked".to_string());
        // All of them are waited for, whatever the first says.
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap_or_else(panicked)).collect();
        ended.into_iter().collect::<std::result::Result<Vec<_>, String>>()
    });
    let mut all = parts?.concat();
    all.sort_unstable_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, hashes)| hashes).collect())
}

/// The files that this rank writes for a save.
fn paths(save: &Save) -> Vec<String> {
    save.snapshot.files.iter().map(|file| format!("{}/{}", folder_of(save.step), file.name)).collect()
}

/// Removes what this rank has written for a save that failed, where that is possible.
fn discard(store: &Store, paths: &[String]) {
    paths.iter().for_each(|path| drop(store.remove(path)));
}

/// What a manifest says of a run beside its progress.
pub(crate) fn about(recipe: &Recipe, data: Value) -> Value {
    json!({
        "data": data,
        "recipe": recipe.text,
        // As Hugging Face describes the model, for export.
        "model": recipe.config(),
        "began_with": recipe.weights(),
        "versions": {
            "shardwise": env!("CARGO_PKG_VERSION"),
            "libtorch": shardwise_torch::libtorch_version(),
        },
    })
}
