//! A rank's position in the run: its step, phase and unit.
//!
//! The training thread updates it with a few atomic stores; the thread that sends heartbeats reads it. While steps are traced, every
//! change is also recorded with its time. Injected faults ([`FaultInjection`]) are triggered here, because this is where every phase
//! and unit is entered.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::fault_injection::FaultInjection;
use crate::phase::{PHASE_NAMES, Phase, Position};

/// Tracks a rank's position. The training thread updates it; any thread may read it.
pub struct PositionTracker {
    began: Instant,
    step: AtomicU64,
    first_step: AtomicU64,
    /// The phase in the low bits, and the unit's index plus 1 in the bits above.
    doing: AtomicU32,
    since_us: AtomicU64,
    units: OnceLock<Vec<String>>,
    fault_injections: Vec<FaultInjection>,
    /// Whether changes are recorded.
    is_traced: AtomicBool,
    marks: Mutex<Marks>,
}

/// The moment at which a rank entered a phase and unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    pub(crate) at: Instant,
    pub(crate) phase: Phase,
    /// The unit's index plus 1; 0 for none.
    pub(crate) unit: u32,
}

/// The recorded positions of a rank.
#[derive(Default)]
pub(crate) struct Marks {
    /// Positions of the training thread. Each lasts until the next.
    pub(crate) training: Vec<Mark>,
    /// Background work, with its start and end.
    pub(crate) background: Vec<(Phase, Instant, Instant)>,
    /// The number of positions that were not recorded because there were too many.
    pub(crate) dropped: u64,
}

/// The maximum number of recorded positions, and the number allocated up front.
const MARKS_MAX: usize = 1 << 20;
const MARKS_ALLOCATED: usize = 1 << 14;

/// The number of bits for the phase in `doing`.
const PHASE_BITS: u32 = 8;

impl Default for PositionTracker {
    fn default() -> Self {
        PositionTracker::new(Vec::new())
    }
}

impl PositionTracker {
    /// Creates a tracker that triggers these faults.
    pub fn new(fault_injections: Vec<FaultInjection>) -> Self {
        PositionTracker {
            began: Instant::now(),
            step: AtomicU64::new(0),
            first_step: AtomicU64::new(0),
            doing: AtomicU32::new(Phase::Start as u32),
            since_us: AtomicU64::new(0),
            units: OnceLock::new(),
            fault_injections,
            is_traced: AtomicBool::new(false),
            marks: Mutex::default(),
        }
    }

    /// The current position. Its parts are read one by one, so they may come from two different moments.
    pub fn read(&self) -> Position {
        let doing = self.doing.load(Ordering::Relaxed);
        let (phase, unit) = (doing & ((1 << PHASE_BITS) - 1), (doing >> PHASE_BITS) as usize);
        let unit = unit.checked_sub(1).and_then(|unit| self.units.get()?.get(unit).cloned());
        let since = self.began.elapsed().saturating_sub(Duration::from_micros(self.since_us.load(Ordering::Relaxed)));
        let phase =
            PHASE_NAMES.iter().map(|(named, _)| *named).find(|named| *named as u32 == phase).unwrap_or(Phase::Start);
        let [step, first_step] = [&self.step, &self.first_step].map(|step| step.load(Ordering::Relaxed));
        Position { step, first_step, phase, unit, since }
    }

    /// The fault injections of this rank.
    pub fn fault_injections(&self) -> &[FaultInjection] {
        &self.fault_injections
    }

    pub(crate) fn name_units<'a>(&self, names: impl Iterator<Item = &'a str>) {
        // After a rollback the new trainer has the same units.
        self.units.get_or_init(|| names.map(str::to_string).collect());
    }

    pub(crate) fn start_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
        // Only set once.
        let _ = self.first_step.compare_exchange(0, step, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Enters a phase.
    pub(crate) fn enter(&self, phase: Phase) {
        self.at(phase, 0);
    }

    /// Enters a phase of a unit.
    pub(crate) fn enter_unit(&self, phase: Phase, unit: usize) {
        self.at(phase, unit as u32 + 1);
    }

    /// Enters a phase on a background thread. This only triggers faults.
    pub(crate) fn enter_in_background(&self, phase: Phase) {
        self.trigger_faults(&Position { phase, unit: None, ..self.read() });
    }

    /// Whether an injected fault makes the copy of a checkpoint fail now.
    pub(crate) fn should_fail_copy(&self) -> bool {
        let position = Position { phase: Phase::Save, unit: None, ..self.read() };
        self.fault_injections.iter().any(|fault| fault.should_fail_copy(&position))
    }

    /// Records background work that started at `since` and ends now.
    pub(crate) fn record_background(&self, phase: Phase, since: Instant) {
        if self.is_traced.load(Ordering::Relaxed) {
            let mut marks = self.marks();
            match marks.background.len() < MARKS_MAX {
                true => marks.background.push((phase, since, Instant::now())),
                false => marks.dropped += 1,
            }
        }
    }

    /// Records every position from now on, starting with the current one.
    pub(crate) fn start_trace(&self) {
        let Position { phase, .. } = self.read();
        let unit = self.doing.load(Ordering::Relaxed) >> PHASE_BITS;
        let mut marks = self.marks();
        *marks = Marks { training: Vec::with_capacity(MARKS_ALLOCATED), ..Marks::default() };
        marks.training.push(Mark { at: Instant::now(), phase, unit });
        self.is_traced.store(true, Ordering::Relaxed);
    }

    /// Stops recording and returns the recorded positions.
    pub(crate) fn end_trace(&self) -> Marks {
        self.is_traced.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.marks())
    }

    /// The names of the units, in the model's order.
    pub(crate) fn units(&self) -> &[String] {
        self.units.get().map_or(&[], Vec::as_slice)
    }

    fn at(&self, phase: Phase, unit: u32) {
        let now = self.began.elapsed().as_micros() as u64;
        let before = self.since_us.swap(now, Ordering::Relaxed);
        if !self.fault_injections.is_empty() {
            // An injected slowdown lengthens the phase that ends here.
            self.fault_injections.iter().for_each(|fault| fault.slow_down(Duration::from_micros(now - before)));
        }
        self.doing.store(phase as u32 | unit << PHASE_BITS, Ordering::Relaxed);
        if self.is_traced.load(Ordering::Relaxed) {
            self.mark(phase, unit);
        }
        if !self.fault_injections.is_empty() {
            self.trigger_faults(&self.read());
            // The time that a fault takes is not part of the phase.
            self.since_us.store(self.began.elapsed().as_micros() as u64, Ordering::Relaxed);
        }
    }

    #[cold]
    fn mark(&self, phase: Phase, unit: u32) {
        let mut marks = self.marks();
        match marks.training.len() < MARKS_MAX {
            true => marks.training.push(Mark { at: Instant::now(), phase, unit }),
            false => marks.dropped += 1,
        }
    }

    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn trigger_faults(&self, position: &Position) {
        self.fault_injections.iter().for_each(|fault| fault.trigger(position));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_read_as_it_was_entered() {
        let position = PositionTracker::default();
        assert_eq!(position.read().phase, Phase::Start);
        position.name_units(["embedding", "block.0"].into_iter());
        position.start_step(41);
        position.enter_unit(Phase::Forward, 1);
        let read = position.read();
        assert_eq!((read.step, read.phase, read.unit.as_deref()), (41, Phase::Forward, Some("block.0")));
        position.enter(Phase::Save);
        assert_eq!(position.read().unit, None);
        for (phase, name) in PHASE_NAMES {
            assert_eq!(name.parse(), Ok(phase));
        }
        position.start_trace();
        position.enter_unit(Phase::Backward, 0);
        let marks = position.end_trace();
        position.enter(Phase::End);
        let recorded: Vec<(Phase, u32)> = marks.training.iter().map(|mark| (mark.phase, mark.unit)).collect();
        assert_eq!(recorded, [(Phase::Save, 0), (Phase::Backward, 1)], "what was entered while it was traced");
        assert!(marks.training[0].at <= marks.training[1].at && position.end_trace().training.is_empty());
        assert!("lunch".parse::<Phase>().unwrap_err().contains("the phases are start, data"));
    }
}
