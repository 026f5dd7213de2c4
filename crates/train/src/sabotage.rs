//! What goes wrong on purpose: so that what survives and names failures can be tried, and tried again the same way.
//!
//! A sabotage says what happens, to which rank, from which step on, and in which phase, once. Nothing of it is there in a
//! run that was not told to.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::net::Shutdown;
use rustix::process::{
    PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, Signal, getpid, kill_process, pidfd_getfd, pidfd_open, setrlimit,
};

use crate::Trainer;
use crate::position::{Phase, Place};

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    /// The rank is killed (SIGKILL).
    Kill,
    /// It is stopped, and stays so (SIGSTOP).
    Stop,
    /// From then on all that it does takes twice as long.
    Slow,
    /// From then on it takes a fifth of a second more each time that it comes there.
    Delay,
    /// Every connection that it has is cut.
    CutOff,
    /// It gets no more memory than it has.
    Exhaust,
    /// There is no memory for what a checkpoint copies; in the phase `save`.
    FailCopy,
    /// A bit of a gradient is turned over; by the trainer.
    FlipBit,
    /// A call is left out; by the group.
    Skip,
    /// A call is made with an element less; by the group.
    Shorten,
}

const NAMES: [(Deed, &str); 10] = [
    (Deed::Kill, "kill"),
    (Deed::Stop, "stop"),
    (Deed::Slow, "slow"),
    (Deed::Delay, "delay"),
    (Deed::CutOff, "cut-off"),
    (Deed::Exhaust, "exhaust"),
    (Deed::FailCopy, "fail-copy"),
    (Deed::FlipBit, "flip-bit"),
    (Deed::Skip, "skip"),
    (Deed::Shorten, "shorten"),
];

/// How long a delay is.
const DELAY: Duration = Duration::from_millis(200);

/// One thing that is to go wrong. As text: `kill rank=2 step=40 phase=forward unit=block.3`, where `step=+1` counts from the
/// step with which the ranks begin, and `unit` may be left out.
#[derive(Debug)]
pub struct Sabotage {
    /// What happens.
    pub deed: Deed,
    /// To whom.
    pub rank: usize,
    /// From which step on.
    pub step: u64,
    /// Whether that counts from the first step of the ranks.
    pub relative: bool,
    /// Where in the step.
    pub phase: Phase,
    /// At which unit; any unless it is said.
    pub unit: Option<String>,
    struck: AtomicBool,
}

impl FromStr for Sabotage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split_whitespace();
        let name = words.next().unwrap_or_default();
        let found = NAMES.iter().find(|(_, named)| *named == name);
        let &(deed, _) = found.ok_or_else(|| {
            let names: Vec<&str> = NAMES.iter().map(|(_, name)| *name).collect();
            format!("'{text}' begins with none of {}", names.join(", "))
        })?;
        let mut sabotage = Sabotage {
            deed,
            rank: 0,
            step: 1,
            relative: false,
            phase: Phase::Forward,
            unit: None,
            struck: AtomicBool::new(false),
        };
        for word in words {
            let (key, value) = word.split_once('=').ok_or_else(|| format!("'{word}' in '{text}' is not KEY=VALUE"))?;
            let number = |text: &str| text.parse::<u64>().map_err(|_| format!("{key} is '{value}', and not a number"));
            match key {
                "rank" => sabotage.rank = number(value)? as usize,
                "step" => {
                    sabotage.relative = value.starts_with('+');
                    sabotage.step = number(value.trim_start_matches('+'))?;
                }
                "phase" => sabotage.phase = value.parse()?,
                "unit" => sabotage.unit = Some(value.to_string()),
                _ => return Err(format!("there is no '{key}' in '{text}'; there are rank, step, phase and unit")),
            }
        }
        Ok(sabotage)
    }
}

impl fmt::Display for Sabotage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sabotage { deed, rank, step, relative, phase, unit, .. } = self;
        let name = NAMES.iter().find(|(named, _)| named == deed).map_or("", |(_, name)| name);
        let plus = if *relative { "+" } else { "" };
        write!(f, "{name} rank={rank} step={plus}{step} phase={phase}")?;
        unit.as_ref().map_or(Ok(()), |unit| write!(f, " unit={unit}"))
    }
}

impl Sabotage {
    /// Whether the trainer has the unit, if one is named.
    pub(crate) fn is_possible(&self, trainer: &Trainer) -> bool {
        self.unit.as_ref().is_none_or(|unit| trainer.model.units().iter().any(|known| known.name() == unit))
    }

    /// Whether it is due here.
    fn is_due(&self, place: &Place) -> bool {
        if place.step == 0 {
            return false;
        }
        let from = if self.relative { place.first_step + self.step } else { self.step };
        place.step >= from
            && place.phase == self.phase
            && self.unit.as_ref().is_none_or(|unit| place.unit.as_ref() == Some(unit))
    }

    /// Slows the rank down, if that is its deed and has begun, after a phase that took so long.
    pub(crate) fn drag(&self, took: Duration) {
        if self.deed == Deed::Slow && self.struck.load(Ordering::Relaxed) {
            std::thread::sleep(took);
        }
    }

    /// Whether a checkpoint's copy fails here: once.
    pub(crate) fn fails_copy(&self, place: &Place) -> bool {
        self.deed == Deed::FailCopy && self.is_due(place) && !self.struck.swap(true, Ordering::Relaxed)
    }

    /// Does it, where it is due.
    pub(crate) fn strike(&self, place: &Place) {
        if self.deed == Deed::FailCopy {
            // Whoever copies asks.
            return;
        }
        let is_repeated = self.deed == Deed::Delay;
        if (self.struck.load(Ordering::Relaxed) && !is_repeated) || !self.is_due(place) {
            return;
        }
        self.struck.store(true, Ordering::Relaxed);
        // Whatever does not work here is seen by whoever waits for it to go wrong.
        match self.deed {
            Deed::Kill => drop(kill_process(getpid(), Signal::KILL)),
            Deed::Stop => drop(kill_process(getpid(), Signal::STOP)),
            Deed::CutOff => cut_off(),
            Deed::Exhaust => exhaust(),
            Deed::Delay => std::thread::sleep(DELAY),
            Deed::Slow | Deed::FailCopy | Deed::FlipBit | Deed::Skip | Deed::Shorten => (),
        }
    }
}

/// Shuts every socket of this process.
fn cut_off() {
    let Ok(itself) = pidfd_open(getpid(), PidfdFlags::empty()) else { return };
    for entry in std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten() {
        let number = entry.file_name().to_string_lossy().parse();
        if let Ok(copy) =
            number.map_or(Err(rustix::io::Errno::BADF), |fd| pidfd_getfd(&itself, fd, PidfdGetfdFlags::empty()))
        {
            // What is not a socket refuses.
            let _ = rustix::net::shutdown(&copy, Shutdown::Both);
        }
    }
}

/// Lowers the limit of this process's data to what it has, and a little.
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

    fn place(step: u64, phase: Phase, unit: &str) -> Place {
        Place { step, first_step: 7, phase, unit: Some(unit.to_string()), since: Duration::ZERO }
    }

    #[test]
    fn it_is_due_where_its_text_says() {
        let sabotage: Sabotage = "kill rank=2 step=40 phase=forward unit=block.3".parse().unwrap();
        assert_eq!(sabotage.to_string(), "kill rank=2 step=40 phase=forward unit=block.3");
        assert!(!sabotage.is_due(&place(39, Phase::Forward, "block.3")));
        assert!(!sabotage.is_due(&place(40, Phase::Backward, "block.3")));
        assert!(!sabotage.is_due(&place(40, Phase::Forward, "block.2")));
        assert!(sabotage.is_due(&place(41, Phase::Forward, "block.3")));
        let relative: Sabotage = "stop rank=0 step=+1 phase=gather".parse().unwrap();
        assert_eq!(relative.to_string(), "stop rank=0 step=+1 phase=gather");
        assert!(!relative.is_due(&place(0, Phase::Gather, "head")), "before the first step");
        assert!(!relative.is_due(&place(7, Phase::Gather, "head")));
        assert!(relative.is_due(&place(8, Phase::Gather, "head")));
        let delay: Sabotage = "delay rank=0 step=3 phase=forward".parse().unwrap();
        for _ in 0..2 {
            let began = std::time::Instant::now();
            delay.strike(&place(8, Phase::Forward, "head"));
            assert!(began.elapsed() >= DELAY, "every time");
        }
        let fails: Sabotage = "fail-copy rank=0 step=3 phase=save".parse().unwrap();
        fails.strike(&place(8, Phase::Save, "head"));
        assert!(!fails.fails_copy(&place(2, Phase::Save, "head")));
        assert!(fails.fails_copy(&place(4, Phase::Save, "head")));
        assert!(!fails.fails_copy(&place(5, Phase::Save, "head")), "once");
        for wrong in ["", "bite", "kill rank", "kill rank=x", "kill day=3", "kill phase=lunch"] {
            assert!(wrong.parse::<Sabotage>().is_err(), "{wrong}");
        }
    }
}
