//! The data of one run, compact enough for a million steps.
//!
//! It is built from the run's entries, one by one. A step that was repeated counts once, with its latest figures; the figures that
//! it replaces are kept for the chart of the run's progress.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use shardwise_journal::{Entry, EntryKind, RANKS_KEPT_MAX, RankMemory, Start, Step, Timeline, VerbTraffic, replay};

/// The maximum number of verbs that are kept; in practice there are fewer.
const VERBS_MAX: usize = 32;

/// The maximum number of world sizes for which memory and traffic are kept.
const WORLDS_MAX: usize = 8;

/// The data of a run.
pub(crate) struct RunData {
    /// The recipe's name, or the folder's.
    pub(crate) name: String,
    pub(crate) folder: String,
    pub(crate) timeline: Timeline,
    /// The steps, with their latest figures.
    pub(crate) points: Vec<Point>,
    /// The steps that were replaced when they were repeated.
    pub(crate) repeated: Vec<Point>,
    pub(crate) evaluations: Vec<EvaluationPoint>,
    /// The latest memory, by world size.
    pub(crate) memory: BTreeMap<usize, MemoryAt>,
    /// The traffic, by world size.
    pub(crate) traffic: BTreeMap<usize, Traffic>,
    pub(crate) skipped: u64,
    /// The number of lines that could not be read.
    pub(crate) unreadable: u64,
}

/// A step, as the charts show it.
#[derive(Clone, Copy)]
pub(crate) struct Point {
    pub(crate) time_s: f64,
    pub(crate) step: u64,
    /// The index of its attempt.
    pub(crate) attempt: u32,
    pub(crate) tokens: u32,
    pub(crate) loss: f32,
    pub(crate) grad_norm: f32,
    pub(crate) lr: f32,
    pub(crate) tokens_per_s: f32,
    pub(crate) mfu: f32,
    pub(crate) memory_bytes: f32,
    pub(crate) memory_peak_bytes: f32,
    pub(crate) sent_bytes: f32,
    /// The tokens of the busiest expert of any block, relative to the mean; not finite without experts.
    pub(crate) busiest_expert: f32,
}

/// An evaluation.
#[derive(Clone, Copy)]
pub(crate) struct EvaluationPoint {
    pub(crate) step: u64,
    pub(crate) loss: f64,
    pub(crate) bits_per_byte: Option<f64>,
}

/// The memory of ranks after a step.
pub(crate) struct MemoryAt {
    pub(crate) step: u64,
    pub(crate) ranks: Vec<RankMemory>,
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) estimate_bytes: u64,
}

/// The traffic of a number of steps.
#[derive(Default)]
pub(crate) struct Traffic {
    pub(crate) steps: u64,
    pub(crate) verbs: Vec<VerbTraffic>,
}

impl RunData {
    /// Reads a run's folder.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let name = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
        let name = name.file_name().map_or_else(|| folder.display().to_string(), |n| n.to_string_lossy().into_owned());
        let mut data = RunData {
            name,
            folder: folder.display().to_string(),
            timeline: Timeline::default(),
            points: Vec::new(),
            repeated: Vec::new(),
            evaluations: Vec::new(),
            memory: BTreeMap::new(),
            traffic: BTreeMap::new(),
            skipped: 0,
            unreadable: 0,
        };
        data.unreadable = replay(folder, |entry| data.add(entry))?;
        if let Some(start) = data.start().filter(|start| !start.name.trim().is_empty()) {
            data.name = start.name.clone();
        }
        Ok(data)
    }

    /// Returns the start of the latest attempt.
    pub(crate) fn start(&self) -> Option<&Start> {
        self.timeline.last_start()
    }

    /// Returns the first steps of all attempts but the first.
    pub(crate) fn restarts(&self) -> Vec<u64> {
        let later = self.timeline.attempts().iter().skip(1).filter_map(|attempt| attempt.steps);
        later.map(|(first, _)| first).collect()
    }

    /// Returns the pieces of the run between changes of the world size: the first step, the last step and the world size of each.
    pub(crate) fn worlds(&self) -> Vec<(u64, u64, usize)> {
        let mut worlds: Vec<(u64, u64, usize)> = Vec::new();
        for point in &self.points {
            let ranks = self.timeline.attempts().get(point.attempt as usize).map_or(0, |attempt| attempt.ranks);
            match worlds.last_mut() {
                Some((_, last, same)) if *same == ranks => *last = point.step,
                _ => worlds.push((point.step, point.step, ranks)),
            }
        }
        worlds
    }

    /// Returns the number of tokens that the steps have read.
    pub(crate) fn tokens(&self) -> u64 {
        // Entries may be several steps apart, and each has the tokens of only one step.
        let mut before = None;
        let mut tokens = 0_u64;
        for point in &self.points {
            let steps = before.map_or(point.step.min(1), |before| point.step.saturating_sub(before));
            tokens = tokens.saturating_add(steps.saturating_mul(u64::from(point.tokens)));
            before = Some(point.step);
        }
        tokens
    }

    fn add(&mut self, entry: Entry) {
        self.timeline.add(&entry);
        let ranks = self.timeline.attempts().last().map_or(0, |attempt| attempt.ranks);
        match entry.kind {
            // Discard steps here and not at a start: an attempt that completes no step leaves the earlier steps as they are.
            EntryKind::Step(step) => {
                self.discard_from(step.step);
                let attempt = self.timeline.attempts().len().saturating_sub(1) as u32;
                self.skipped += u64::from(step.skipped.is_some());
                self.points.push(point(entry.time_s, attempt, &step));
            }
            EntryKind::Evaluation(evaluation) if evaluation.loss.is_finite() => {
                self.evaluations.push(EvaluationPoint {
                    step: evaluation.step,
                    loss: evaluation.loss,
                    bits_per_byte: evaluation.bits_per_byte.filter(|bits| bits.is_finite()),
                });
            }
            EntryKind::Memory { step, ranks: mut held } => {
                held.truncate(RANKS_KEPT_MAX);
                if self.memory.len() < WORLDS_MAX || self.memory.contains_key(&ranks) {
                    let start = self.timeline.attempts().last().and_then(|attempt| attempt.start.as_deref());
                    let limit_bytes = start.and_then(|start| start.memory_limit_bytes);
                    let estimate_bytes = start.map_or(0, |start| start.memory_estimate_bytes);
                    self.memory.insert(ranks, MemoryAt { step, ranks: held, limit_bytes, estimate_bytes });
                }
            }
            EntryKind::Traffic(sent) if self.traffic.len() < WORLDS_MAX || self.traffic.contains_key(&ranks) => {
                self.traffic.entry(ranks).or_default().add(sent.steps, &sent.verbs);
            }
            _ => (),
        }
    }

    /// Moves the steps from this one on to the repeated ones.
    fn discard_from(&mut self, first: u64) {
        let kept = self.points.partition_point(|point| point.step < first);
        self.repeated.extend(self.points.drain(kept..));
        // An evaluation belongs to the step before it, so one after the previous step stays.
        let kept = self.evaluations.partition_point(|evaluation| evaluation.step < first);
        self.evaluations.truncate(kept);
    }
}

impl Traffic {
    fn add(&mut self, steps: u64, verbs: &[VerbTraffic]) {
        self.steps = self.steps.saturating_add(steps);
        for verb in verbs {
            match self.verbs.iter().position(|known| known.verb == verb.verb) {
                Some(index) => {
                    let known = &mut self.verbs[index];
                    known.calls = known.calls.saturating_add(verb.calls);
                    known.bytes = known.bytes.saturating_add(verb.bytes);
                    known.expected_bytes = known.expected_bytes.saturating_add(verb.expected_bytes);
                }
                None if self.verbs.len() < VERBS_MAX => self.verbs.push(verb.clone()),
                None => (),
            }
        }
    }
}

fn point(time_s: f64, attempt: u32, step: &Step) -> Point {
    Point {
        time_s,
        step: step.step,
        attempt,
        tokens: u32::try_from(step.tokens).unwrap_or(u32::MAX),
        loss: step.loss as f32,
        grad_norm: step.grad_norm as f32,
        lr: step.lr as f32,
        tokens_per_s: step.tokens_per_s as f32,
        mfu: step.known_mfu().map_or(f32::NAN, |mfu| mfu as f32),
        memory_bytes: step.memory_bytes as f32,
        memory_peak_bytes: step.memory_peak_bytes as f32,
        sent_bytes: step.sent_bytes as f32,
        busiest_expert: step.busiest_expert().map_or(f32::NAN, |busiest| busiest as f32),
    }
}

/// The median of the finite numbers.
pub(crate) fn median(numbers: impl Iterator<Item = f32>) -> Option<f64> {
    let mut finite: Vec<f32> = numbers.filter(|number| number.is_finite()).collect();
    if finite.is_empty() {
        return None;
    }
    let middle = finite.len() / 2;
    let (_, median, _) = finite.select_nth_unstable_by(middle, f32::total_cmp);
    Some(f64::from(*median))
}
