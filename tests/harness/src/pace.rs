//! How slow the machine is right now.
//!
//! Test machines are shared: others have been seen to take nine tenths of the processor for an hour. A time limit in a test is
//! there to catch a program that hangs, so it has to grow when it is the machine that is slow. [`slowness`] is a factor for
//! limits that are given in advance; [`Stopwatch`] leaves out the time in which the machine did not run us.

use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Steps of [`work`] whose time is taken: about 60 ms on a quiet machine.
const STEPS: u64 = 25_000_000;

/// What a step takes on a quiet 2.5 GHz server core.
const QUIET_NS_PER_STEP: f64 = 2.4;

/// How many times as long as on a quiet machine a fixed piece of work takes now; at least 1.
pub fn slowness() -> f64 {
    let started = Instant::now();
    black_box(work(black_box(STEPS)));
    let ns_per_step = started.elapsed().as_nanos() as f64 / STEPS as f64;
    (ns_per_step / QUIET_NS_PER_STEP).max(1.)
}

/// A limit for something that takes up to `quiet` on a quiet machine.
pub fn patience(quiet: Duration) -> Duration {
    quiet.mul_f64(slowness())
}

/// Checks something about speed, which others on the machine can spoil: up to five times, until it holds.
///
/// `check` is given the [`slowness`] to reckon with, which doubles from one attempt to the next. It fails if the last attempt
/// does, unless the machine gave us less than two thirds of the time we wanted in every one: then nothing can be said about
/// speed, and that is printed.
pub fn check_speed(mut check: impl FnMut(f64) -> Result<(), String>) {
    let mut shares = Vec::new();
    for attempt in 1..=5 {
        let watch = Stopwatch::start();
        let Err(why) = check(slowness() * f64::from(1 << (attempt - 1))) else { return };
        shares.push(watch.share());
        eprintln!("attempt {attempt}, with {:.0}% of the processor time: {why}", 100. * watch.share());
    }
    assert!(shares.iter().all(|&share| share < 0.67), "it failed five times, see above");
    eprintln!("NOT CHECKED: others took more than a third of the machine in every attempt");
}

/// A chain of operations, each of which needs the result of the one before.
fn work(steps: u64) -> u64 {
    (0..steps).fold(1, |mut x: u64, _| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^ (x << 17)
    })
}

/// Measures time without what the hypervisor gave to others while this machine had work to do.
pub struct Stopwatch {
    started: Instant,
    then: Option<Processor>,
}

/// What all processors have done since the machine was started, in ticks.
#[derive(Clone, Copy)]
struct Processor {
    ran: u64,
    stolen: u64,
}

impl Stopwatch {
    /// Starts at zero.
    pub fn start() -> Self {
        Stopwatch { started: Instant::now(), then: Processor::read() }
    }

    /// The time since the start, times the share of it that was ours.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed().mul_f64(self.share())
    }

    /// The share of the wanted processor time that this machine got since the start.
    pub fn share(&self) -> f64 {
        match (self.then, Processor::read()) {
            (Some(then), Some(now)) => got(then, now),
            _ => 1.,
        }
    }
}

/// The share of the wanted processor time that there was.
fn got(then: Processor, now: Processor) -> f64 {
    let (ran, stolen) = (now.ran.saturating_sub(then.ran) as f64, now.stolen.saturating_sub(then.stolen) as f64);
    if stolen > 0. { ran / (ran + stolen) } else { 1. }
}

impl Processor {
    fn read() -> Option<Self> {
        Processor::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// The first line is `cpu user nice system idle iowait irq softirq steal …`.
    fn parse(stat: &str) -> Option<Self> {
        let ticks: Vec<u64> =
            stat.lines().next()?.split_whitespace().skip(1).map_while(|ticks| ticks.parse().ok()).collect();
        let [user, nice, system, _idle, _iowait, irq, softirq, stolen] = *ticks.first_chunk()?;
        Some(Processor { ran: user + nice + system + irq + softirq, stolen })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stolen_time_does_not_count() {
        let then = Processor::parse("cpu  100 0 50 900 7 0 0 30 0 0\ncpu0 …").expect("a line of /proc/stat");
        let now = Processor::parse("cpu  130 0 60 999 9 0 0 150 0 0\ncpu0 …").expect("a line of /proc/stat");
        // It ran for 40 ticks, and wanted to for another 120.
        assert_eq!(got(then, now), 0.25);
        assert_eq!(got(then, then), 1.);
        assert!(Processor::parse("cpu 1 2 3").is_none());
    }

    #[test]
    fn a_machine_is_never_faster_than_quiet() {
        assert!(slowness() >= 1.);
    }
}
