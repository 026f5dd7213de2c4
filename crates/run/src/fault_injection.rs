//! Fault injection: reproducible failures, to test how runs survive and explain them.
//!
//! A fault has a kind, a rank, the step from which it is due, and a phase. It is triggered once; `slow` and `delay` stay in effect
//! from then on. A run without `--fault` has none.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::net::Shutdown;
use rustix::process::{
    PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, Signal, getpid, kill_process, pidfd_getfd, pidfd_open, setrlimit,
};

use shardwise_train::Trainer;

use crate::phase::{Phase, Position};

/// The kind of an injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Kill the rank (SIGKILL).
    Kill,
    /// Stop the rank without killing it (SIGSTOP).
    Stop,
    /// Make every phase take twice as long from then on.
    Slow,
    /// Delay the phase by 200 ms from then on.
    Delay,
    /// Shut down all of the rank's connections.
    CutOff,
    /// Allow the rank no more memory than it already uses.
    Exhaust,
    /// Fail to copy tensors for a checkpoint, in the phase `save`.
    FailCopy,
    /// Flip a bit of a gradient. The trainer injects it.
    FlipBit,
    /// Leave out a collective. The group injects it.
    Skip,
    /// Call a collective with one element too few. The group injects it.
    Shorten,
}

const NAMES: [(FaultKind, &str); 10] = [
    (FaultKind::Kill, "kill"),
    (FaultKind::Stop, "stop"),
    (FaultKind::Slow, "slow"),
    (FaultKind::Delay, "delay"),
    (FaultKind::CutOff, "cut-off"),
    (FaultKind::Exhaust, "exhaust"),
    (FaultKind::FailCopy, "fail-copy"),
    (FaultKind::FlipBit, "flip-bit"),
    (FaultKind::Skip, "skip"),
    (FaultKind::Shorten, "shorten"),
];

const DELAY: Duration = Duration::from_millis(200);

/// A fault to inject. Its text form is `kill rank=2 step=40 phase=forward unit=block.3`. A step such as `+1` counts from the first
/// step after launch, and `unit` may be omitted.
#[derive(Debug)]
pub struct FaultInjection {
    /// What the fault does.
    pub kind: FaultKind,
    /// The rank on which it is injected.
    pub rank: usize,
    /// The first step at which it is due.
    pub step: u64,
    /// Whether `step` counts from the first step after launch.
    pub relative: bool,
    /// The phase at which it is due.
    pub phase: Phase,
    /// The unit at which it is due; any if `None`.
    pub unit: Option<String>,
    triggered: AtomicBool,
}

impl FromStr for FaultInjection {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split_whitespace();
        let name = words.next().unwrap_or_default();
        let found = NAMES.iter().find(|(_, named)| *named == name);
        let &(kind, _) = found.ok_or_else(|| {
            let names: Vec<&str> = NAMES.iter().map(|(_, name)| *name).collect();
            format!("'{text}' does not start with one of {}", names.join(", "))
        })?;
        let mut fault = FaultInjection {
            kind,
            rank: 0,
            step: 1,
            relative: false,
            phase: Phase::Forward,
            unit: None,
            triggered: AtomicBool::new(false),
        };
        for word in words {
            let (key, value) = word.split_once('=').ok_or_else(|| format!("'{word}' in '{text}' is not KEY=VALUE"))?;
            let number =
                |text: &str| text.parse::<u64>().map_err(|_| format!("{key} is '{value}', which is not a number"));
            match key {
                "rank" => fault.rank = number(value)? as usize,
                "step" => {
                    fault.relative = value.starts_with('+');
                    fault.step = number(value.trim_start_matches('+'))?;
                }
                "phase" => fault.phase = value.parse()?,
                "unit" => fault.unit = Some(value.to_string()),
                _ => return Err(format!("unknown key '{key}' in '{text}'; the keys are rank, step, phase and unit")),
            }
        }
        Ok(fault)
    }
}

impl fmt::Display for FaultInjection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FaultInjection { kind, rank, step, relative, phase, unit, .. } = self;
        let name = NAMES.iter().find(|(named, _)| named == kind).map_or("", |(_, name)| name);
        let plus = if *relative { "+" } else { "" };
        write!(f, "{name} rank={rank} step={plus}{step} phase={phase}")?;
        unit.as_ref().map_or(Ok(()), |unit| write!(f, " unit={unit}"))
    }
}

impl FaultInjection {
    /// Whether the trainer has the unit, if one is named.
    pub(crate) fn names_known_unit(&self, trainer: &Trainer) -> bool {
        self.unit.as_ref().is_none_or(|unit| trainer.model().units().iter().any(|known| known.name() == unit))
    }

    fn is_due(&self, position: &Position) -> bool {
        if position.step == 0 {
            return false;
        }
        let from = if self.relative { position.first_step + self.step } else { self.step };
        position.step >= from
            && position.phase == self.phase
            && self.unit.as_ref().is_none_or(|unit| position.unit.as_ref() == Some(unit))
    }

    /// Sleeps as long as the phase that just ended took, once a slowdown has been triggered.
    pub(crate) fn slow_down(&self, took: Duration) {
        if self.kind == FaultKind::Slow && self.triggered.load(Ordering::Relaxed) {
            std::thread::sleep(took);
        }
    }

    /// Whether the copy of a checkpoint fails at this position. True only once.
    pub(crate) fn should_fail_copy(&self, position: &Position) -> bool {
        self.kind == FaultKind::FailCopy && self.is_due(position) && !self.triggered.swap(true, Ordering::Relaxed)
    }

    /// Triggers the fault if it is due.
    pub(crate) fn trigger(&self, position: &Position) {
        if self.kind == FaultKind::FailCopy {
            // The copy itself checks `should_fail_copy`.
            return;
        }
        let is_repeated = self.kind == FaultKind::Delay;
        if (self.triggered.load(Ordering::Relaxed) && !is_repeated) || !self.is_due(position) {
            return;
        }
        self.triggered.store(true, Ordering::Relaxed);
        // Errors are ignored: a test that waits for the fault will notice that it did not happen.
        match self.kind {
            FaultKind::Kill => drop(kill_process(getpid(), Signal::KILL)),
            FaultKind::Stop => drop(kill_process(getpid(), Signal::STOP)),
            FaultKind::CutOff => cut_off(),
            FaultKind::Exhaust => exhaust(),
            FaultKind::Delay => std::thread::sleep(DELAY),
            FaultKind::Slow | FaultKind::FailCopy | FaultKind::FlipBit | FaultKind::Skip | FaultKind::Shorten => (),
        }
    }
}

/// Shuts down every socket of this process.
fn cut_off() {
    let Ok(itself) = pidfd_open(getpid(), PidfdFlags::empty()) else { return };
    for entry in std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten() {
        let number = entry.file_name().to_string_lossy().parse();
        if let Ok(copy) =
            number.map_or(Err(rustix::io::Errno::BADF), |fd| pidfd_getfd(&itself, fd, PidfdGetfdFlags::empty()))
        {
            // This fails for files that are not sockets.
            let _ = rustix::net::shutdown(&copy, Shutdown::Both);
        }
    }
}

/// Lowers this process's data limit to its current size plus 1 MiB.
fn exhaust() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let data =
        status.lines().find_map(|line| line.strip_prefix("VmData:")?.split_whitespace().next()?.parse::<u64>().ok());
    if let Some(kib) = data {
        let limit = (kib << 10) + (1 << 20);
        let _ = setrlimit(Resource::Data, Rlimit { current: Some(limit), maximum: None });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u64, phase: Phase, unit: &str) -> Position {
        Position { step, first_step: 7, phase, unit: Some(unit.to_string()), since: Duration::ZERO }
    }

    #[test]
    fn a_fault_is_due_where_its_text_says() {
        let fault: FaultInjection = "kill rank=2 step=40 phase=forward unit=block.3".parse().unwrap();
        assert_eq!(fault.to_string(), "kill rank=2 step=40 phase=forward unit=block.3");
        assert!(!fault.is_due(&at(39, Phase::Forward, "block.3")));
        assert!(!fault.is_due(&at(40, Phase::Backward, "block.3")));
        assert!(!fault.is_due(&at(40, Phase::Forward, "block.2")));
        assert!(fault.is_due(&at(41, Phase::Forward, "block.3")));
        let relative: FaultInjection = "stop rank=0 step=+1 phase=gather".parse().unwrap();
        assert_eq!(relative.to_string(), "stop rank=0 step=+1 phase=gather");
        assert!(!relative.is_due(&at(0, Phase::Gather, "head")), "before the first step");
        assert!(!relative.is_due(&at(7, Phase::Gather, "head")));
        assert!(relative.is_due(&at(8, Phase::Gather, "head")));
        let delay: FaultInjection = "delay rank=0 step=3 phase=forward".parse().unwrap();
        for _ in 0..2 {
            let began = std::time::Instant::now();
            delay.trigger(&at(8, Phase::Forward, "head"));
            assert!(began.elapsed() >= DELAY, "every time");
        }
        let fails: FaultInjection = "fail-copy rank=0 step=3 phase=save".parse().unwrap();
        fails.trigger(&at(8, Phase::Save, "head"));
        assert!(!fails.should_fail_copy(&at(2, Phase::Save, "head")));
        assert!(fails.should_fail_copy(&at(4, Phase::Save, "head")));
        assert!(!fails.should_fail_copy(&at(5, Phase::Save, "head")), "once");
        for wrong in ["", "bite", "kill rank", "kill rank=x", "kill day=3", "kill phase=lunch"] {
            assert!(wrong.parse::<FaultInjection>().is_err(), "{wrong}");
        }
    }
}
