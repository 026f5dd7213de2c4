//! The figures of one run, small enough to keep those of a million steps.
//!
//! It hears a run's lines one after the other. Steps that were made again count as they were made last, and the ones that they
//! replace are kept beside them for the picture of the run's progress.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use shardwise_journal::{Entry, RANKS_KEPT_MAX, RankMemory, Start, Step, Story, VerbTraffic, What, replay};

/// Verbs that are told apart; there are not as many.
const VERBS_MAX: usize = 32;

/// Numbers of ranks that memory and traffic are kept of.
const WORLDS_MAX: usize = 8;

/// A run.
pub(crate) struct History {
    /// The recipe's name, or the folder's.
    pub(crate) name: String,
    pub(crate) folder: String,
    pub(crate) story: Story,
    /// The steps as they were made last.
    pub(crate) points: Vec<Point>,
    /// Those that had to be made again.
    pub(crate) made_again: Vec<Point>,
    pub(crate) held_out: Vec<HeldOutPoint>,
    /// By the number of ranks: what ranks held there last.
    pub(crate) memory: BTreeMap<usize, MemoryAt>,
    /// By the number of ranks: what was sent there.
    pub(crate) traffic: BTreeMap<usize, Traffic>,
    pub(crate) skipped: u64,
    /// Lines that could not be read.
    pub(crate) unknown: u64,
}

/// A step, as it is drawn.
#[derive(Clone, Copy)]
pub(crate) struct Point {
    pub(crate) time_s: f64,
    pub(crate) step: u64,
    /// The attempt that made it, from zero.
    pub(crate) attempt: u32,
    pub(crate) tokens: u32,
    pub(crate) loss: f32,
    pub(crate) gradient_norm: f32,
    pub(crate) rate: f32,
    pub(crate) tokens_per_s: f32,
    pub(crate) utilisation: f32,
    pub(crate) memory_bytes: f32,
    pub(crate) memory_peak_bytes: f32,
    pub(crate) sent_bytes: f32,
}

/// An evaluation.
#[derive(Clone, Copy)]
pub(crate) struct HeldOutPoint {
    pub(crate) step: u64,
    pub(crate) loss: f64,
    pub(crate) bits_per_byte: Option<f64>,
}

/// What ranks held after a step.
pub(crate) struct MemoryAt {
    pub(crate) step: u64,
    pub(crate) ranks: Vec<RankMemory>,
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) estimate_bytes: u64,
}

/// What was sent in so many steps.
#[derive(Default)]
pub(crate) struct Traffic {
    pub(crate) steps: u64,
    pub(crate) verbs: Vec<VerbTraffic>,
}

impl History {
    /// Reads a run's folder.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let name = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
        let name = name.file_name().map_or_else(|| folder.display().to_string(), |n| n.to_string_lossy().into_owned());
        let mut history = History {
            name,
            folder: folder.display().to_string(),
            story: Story::default(),
            points: Vec::new(),
            made_again: Vec::new(),
            held_out: Vec::new(),
            memory: BTreeMap::new(),
            traffic: BTreeMap::new(),
            skipped: 0,
            unknown: 0,
        };
        history.unknown = replay(folder, |entry| history.hear(entry))?;
        if let Some(start) = history.start().filter(|start| !start.name.trim().is_empty()) {
            history.name = start.name.clone();
        }
        Ok(history)
    }

    /// What was said last at a start.
    pub(crate) fn start(&self) -> Option<&Start> {
        self.story.last_start()
    }

    /// The first steps of attempts that went on after a failure or a stop.
    pub(crate) fn restarts(&self) -> Vec<u64> {
        let begun = self.story.attempts().iter().skip(1).filter_map(|attempt| attempt.steps);
        begun.map(|(first, _)| first).collect()
    }

    /// Who made the steps, as they were made last: the first step, the last step and the number of ranks of each piece.
    pub(crate) fn worlds(&self) -> Vec<(u64, u64, usize)> {
        let mut worlds: Vec<(u64, u64, usize)> = Vec::new();
        for point in &self.points {
            let ranks = self.story.attempts().get(point.attempt as usize).map_or(0, |attempt| attempt.ranks);
            match worlds.last_mut() {
                Some((_, last, same)) if *same == ranks => *last = point.step,
                _ => worlds.push((point.step, point.step, ranks)),
            }
        }
        worlds
    }

    /// Tokens that the steps have read.
    pub(crate) fn tokens(&self) -> u64 {
        // Lines may be several steps apart, and the tokens of a line are one step's.
        let mut before = None;
        let mut tokens = 0_u64;
        for point in &self.points {
            let steps = before.map_or(point.step.min(1), |before| point.step.saturating_sub(before));
            tokens = tokens.saturating_add(steps.saturating_mul(u64::from(point.tokens)));
            before = Some(point.step);
        }
        tokens
    }

    fn hear(&mut self, entry: Entry) {
        self.story.hear(&entry);
        let ranks = self.story.attempts().last().map_or(0, |attempt| attempt.ranks);
        match entry.what {
            // Not at a start: an attempt that comes to nothing leaves the picture of what was made before it.
            What::Step(step) => {
                self.take_back(step.step);
                let attempt = self.story.attempts().len().saturating_sub(1) as u32;
                self.skipped += u64::from(step.skipped.is_some());
                self.points.push(point(entry.time_s, attempt, &step));
            }
            What::HeldOut(held) if held.loss.is_finite() => {
                self.held_out.push(HeldOutPoint {
                    step: held.step,
                    loss: held.loss,
                    bits_per_byte: held.bits_per_byte.filter(|bits| bits.is_finite()),
                });
            }
            What::Memory { step, ranks: mut held } => {
                held.truncate(RANKS_KEPT_MAX);
                if self.memory.len() < WORLDS_MAX || self.memory.contains_key(&ranks) {
                    let start = self.story.attempts().last().and_then(|attempt| attempt.start.as_deref());
                    let limit_bytes = start.and_then(|start| start.memory_limit_bytes);
                    let estimate_bytes = start.map_or(0, |start| start.memory_estimate_bytes);
                    self.memory.insert(ranks, MemoryAt { step, ranks: held, limit_bytes, estimate_bytes });
                }
            }
            What::Traffic(sent) if self.traffic.len() < WORLDS_MAX || self.traffic.contains_key(&ranks) => {
                self.traffic.entry(ranks).or_default().add(sent.steps, &sent.verbs);
            }
            _ => (),
        }
    }

    /// Steps from this one on are made again, if they had been made.
    fn take_back(&mut self, first: u64) {
        let kept = self.points.partition_point(|point| point.step < first);
        self.made_again.extend(self.points.drain(kept..));
        // An evaluation is made after its step, so one of the step before stays.
        let kept = self.held_out.partition_point(|held| held.step < first);
        self.held_out.truncate(kept);
    }
}

impl Traffic {
    fn add(&mut self, steps: u64, verbs: &[VerbTraffic]) {
        self.steps = self.steps.saturating_add(steps);
        for verb in verbs {
            match self.verbs.iter().position(|known| known.verb == verb.verb) {
                Some(place) => {
                    let known = &mut self.verbs[place];
                    known.calls = known.calls.saturating_add(verb.calls);
                    known.bytes = known.bytes.saturating_add(verb.bytes);
                    known.theory_bytes = known.theory_bytes.saturating_add(verb.theory_bytes);
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
        gradient_norm: step.gradient_norm as f32,
        rate: step.rate as f32,
        tokens_per_s: step.tokens_per_s as f32,
        utilisation: step.known_utilisation().map_or(f32::NAN, |part| part as f32),
        memory_bytes: step.memory_bytes as f32,
        memory_peak_bytes: step.memory_peak_bytes as f32,
        sent_bytes: step.sent_bytes as f32,
    }
}

/// The middle of the finite ones among them.
pub(crate) fn median(numbers: impl Iterator<Item = f32>) -> Option<f64> {
    let mut finite: Vec<f32> = numbers.filter(|number| number.is_finite()).collect();
    if finite.is_empty() {
        return None;
    }
    let middle = finite.len() / 2;
    let (_, median, _) = finite.select_nth_unstable_by(middle, f32::total_cmp);
    Some(f64::from(*median))
}
