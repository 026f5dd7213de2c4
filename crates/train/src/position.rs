//! Where a rank is: its step, and in that the phase and the unit, for whoever watches it.
//!
//! The thread that trains writes it, with a few stores and no lock; another one reads it. While steps are traced, it also writes down
//! every place with its time. What is to go wrong on purpose ([`Sabotage`]) goes wrong here, for here is every place that has a
//! name.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::sabotage::Sabotage;

/// What a rank is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Getting ready: model, data, checkpoint.
    Start,
    /// Reading the step's tokens.
    Data,
    /// Waiting for a unit's parameters.
    Gather,
    /// Computing a unit's output.
    Forward,
    /// Computing it again, for the backward pass.
    Recompute,
    /// Computing a unit's gradients.
    Backward,
    /// Handing gradients to the ranks that own them.
    Reduce,
    /// Updating parameters.
    Optimizer,
    /// What the loop does between steps.
    Between,
    /// Measuring on text that was held out.
    Evaluation,
    /// Looking after checkpoints.
    Save,
    /// All files of a checkpoint are written, and its manifest is not.
    SaveBefore,
    /// The manifest is written under another name.
    SaveInside,
    /// The manifest has its name.
    SaveAfter,
    /// Through.
    End,
}

/// Every phase with its name.
const NAMES: [(Phase, &str); 15] = [
    (Phase::Start, "start"),
    (Phase::Data, "data"),
    (Phase::Gather, "gather"),
    (Phase::Forward, "forward"),
    (Phase::Recompute, "recompute"),
    (Phase::Backward, "backward"),
    (Phase::Reduce, "reduce"),
    (Phase::Optimizer, "optimizer"),
    (Phase::Between, "between"),
    (Phase::Evaluation, "evaluation"),
    (Phase::Save, "save"),
    (Phase::SaveBefore, "save-before"),
    (Phase::SaveInside, "save-inside"),
    (Phase::SaveAfter, "save-after"),
    (Phase::End, "end"),
];

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAMES.iter().find(|(phase, _)| phase == self).map_or("", |(_, name)| name))
    }
}

impl FromStr for Phase {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = NAMES.iter().find(|(_, name)| *name == text);
        found.map(|(phase, _)| *phase).ok_or_else(|| {
            let names: Vec<&str> = NAMES.iter().map(|(_, name)| *name).collect();
            format!("there is no phase '{text}'; there are {}", names.join(", "))
        })
    }
}

/// Where a rank is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its step, from one; zero before the first.
    pub step: u64,
    /// The first step that it made.
    pub first_step: u64,
    /// What it is doing.
    pub phase: Phase,
    /// To which unit, if to one.
    pub unit: Option<String>,
    /// For how long.
    pub since: Duration,
}

/// A rank's place, as it changes.
pub struct Position {
    began: Instant,
    step: AtomicU64,
    first_step: AtomicU64,
    /// The phase's number, and above it the unit's, from one.
    doing: AtomicU32,
    since_us: AtomicU64,
    units: OnceLock<Vec<String>>,
    sabotage: Vec<Sabotage>,
    /// Whether places are written down.
    is_traced: AtomicBool,
    marks: Mutex<Marks>,
}

/// A place that the rank has come to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    pub(crate) at: Instant,
    pub(crate) phase: Phase,
    /// The unit's number, from one; zero for none.
    pub(crate) unit: u32,
}

/// Where the rank has been.
#[derive(Default)]
pub(crate) struct Marks {
    /// The thread that trains; each place until the next.
    pub(crate) training: Vec<Mark>,
    /// What happened beside it, from and to.
    pub(crate) beside: Vec<(Phase, Instant, Instant)>,
    /// For how many there was no room.
    pub(crate) forgotten: u64,
}

/// How many places are written down at most, and for how many there is room at once.
const MARKS_MAX: usize = 1 << 20;
const MARKS_AT_ONCE: usize = 1 << 14;

/// Room for the phase in `doing`.
const PHASE_BITS: u32 = 8;

impl Default for Position {
    fn default() -> Self {
        Position::new(Vec::new())
    }
}

impl Position {
    /// Of a rank on which this is to go wrong.
    pub fn new(sabotage: Vec<Sabotage>) -> Self {
        Position {
            began: Instant::now(),
            step: AtomicU64::new(0),
            first_step: AtomicU64::new(0),
            doing: AtomicU32::new(Phase::Start as u32),
            since_us: AtomicU64::new(0),
            units: OnceLock::new(),
            sabotage,
            is_traced: AtomicBool::new(false),
            marks: Mutex::default(),
        }
    }

    /// Where the rank is now. The parts are read one after the other, so they may be of two moments.
    pub fn read(&self) -> Place {
        let doing = self.doing.load(Ordering::Relaxed);
        let (phase, unit) = (doing & ((1 << PHASE_BITS) - 1), (doing >> PHASE_BITS) as usize);
        let unit = unit.checked_sub(1).and_then(|unit| self.units.get()?.get(unit).cloned());
        let since = self.began.elapsed().saturating_sub(Duration::from_micros(self.since_us.load(Ordering::Relaxed)));
        let phase = NAMES.iter().map(|(named, _)| *named).find(|named| *named as u32 == phase).unwrap_or(Phase::Start);
        let [step, first_step] = [&self.step, &self.first_step].map(|step| step.load(Ordering::Relaxed));
        Place { step, first_step, phase, unit, since }
    }

    /// What is to go wrong on this rank.
    pub fn sabotage(&self) -> &[Sabotage] {
        &self.sabotage
    }

    pub(crate) fn name_units<'a>(&self, names: impl Iterator<Item = &'a str>) {
        // A second model of the same run has the same units.
        self.units.get_or_init(|| names.map(str::to_string).collect());
    }

    pub(crate) fn begin_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
        // Only the first time.
        let _ = self.first_step.compare_exchange(0, step, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The rank is now at this.
    pub(crate) fn enter(&self, phase: Phase) {
        self.at(phase, 0);
    }

    /// The rank is now at this, of that unit.
    pub(crate) fn enter_unit(&self, phase: Phase, unit: usize) {
        self.at(phase, unit as u32 + 1);
    }

    /// This happens beside what the rank is at.
    pub(crate) fn beside(&self, phase: Phase) {
        self.strike(&Place { phase, unit: None, ..self.read() });
    }

    /// Whether a checkpoint's copy is to fail on this rank now.
    pub(crate) fn copy_fails(&self) -> bool {
        let place = Place { phase: Phase::Save, unit: None, ..self.read() };
        self.sabotage.iter().any(|sabotage| sabotage.fails_copy(&place))
    }

    /// This takes until then beside what the rank is at.
    pub(crate) fn lasted_beside(&self, phase: Phase, since: Instant) {
        if self.is_traced.load(Ordering::Relaxed) {
            let mut marks = self.marks();
            match marks.beside.len() < MARKS_MAX {
                true => marks.beside.push((phase, since, Instant::now())),
                false => marks.forgotten += 1,
            }
        }
    }

    /// Writes down every place from now on, this one first.
    pub(crate) fn begin_trace(&self) {
        let Place { phase, .. } = self.read();
        let unit = self.doing.load(Ordering::Relaxed) >> PHASE_BITS;
        let mut marks = self.marks();
        *marks = Marks { training: Vec::with_capacity(MARKS_AT_ONCE), ..Marks::default() };
        marks.training.push(Mark { at: Instant::now(), phase, unit });
        self.is_traced.store(true, Ordering::Relaxed);
    }

    /// Ends that, and says what was written down.
    pub(crate) fn end_trace(&self) -> Marks {
        self.is_traced.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.marks())
    }

    /// The units' names, in their order.
    pub(crate) fn units(&self) -> &[String] {
        self.units.get().map_or(&[], Vec::as_slice)
    }

    fn at(&self, phase: Phase, unit: u32) {
        let now = self.began.elapsed().as_micros() as u64;
        let before = self.since_us.swap(now, Ordering::Relaxed);
        if !self.sabotage.is_empty() {
            // What slows a rank down lengthens the phase that is over.
            self.sabotage.iter().for_each(|sabotage| sabotage.drag(Duration::from_micros(now - before)));
        }
        self.doing.store(phase as u32 | unit << PHASE_BITS, Ordering::Relaxed);
        if self.is_traced.load(Ordering::Relaxed) {
            self.mark(phase, unit);
        }
        if !self.sabotage.is_empty() {
            self.strike(&self.read());
            // What a sabotage takes is not the phase's.
            self.since_us.store(self.began.elapsed().as_micros() as u64, Ordering::Relaxed);
        }
    }

    #[cold]
    fn mark(&self, phase: Phase, unit: u32) {
        let mut marks = self.marks();
        match marks.training.len() < MARKS_MAX {
            true => marks.training.push(Mark { at: Instant::now(), phase, unit }),
            false => marks.forgotten += 1,
        }
    }

    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn strike(&self, place: &Place) {
        self.sabotage.iter().for_each(|sabotage| sabotage.strike(place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_as_it_was_entered() {
        let position = Position::default();
        assert_eq!(position.read().phase, Phase::Start);
        position.name_units(["embedding", "block.0"].into_iter());
        position.begin_step(41);
        position.enter_unit(Phase::Forward, 1);
        let place = position.read();
        assert_eq!((place.step, place.phase, place.unit.as_deref()), (41, Phase::Forward, Some("block.0")));
        position.enter(Phase::Save);
        assert_eq!(position.read().unit, None);
        for (phase, name) in NAMES {
            assert_eq!(name.parse(), Ok(phase));
        }
        position.begin_trace();
        position.enter_unit(Phase::Backward, 0);
        let marks = position.end_trace();
        position.enter(Phase::End);
        let places: Vec<(Phase, u32)> = marks.training.iter().map(|mark| (mark.phase, mark.unit)).collect();
        assert_eq!(places, [(Phase::Save, 0), (Phase::Backward, 1)], "what was entered while it was traced");
        assert!(marks.training[0].at <= marks.training[1].at && position.end_trace().training.is_empty());
        assert!("lunch".parse::<Phase>().unwrap_err().contains("there are start, data"));
    }
}
