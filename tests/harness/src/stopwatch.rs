//! Measures how slow the machine is right now.
//!
//! Test machines are shared: other users have taken nine tenths of the processor for an hour. A timeout in a test must catch a
//! program that hangs, but not a slow machine. [`slowdown`] is a factor for timeouts that are set in advance; [`Stopwatch`] does
//! not count the time in which the hypervisor did not run this machine.

use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// The number of steps of [`work`] to time: about 60 ms on a quiet machine.
const STEPS: u64 = 25_000_000;

/// The time of a step on a quiet 2.5 GHz server core.
const QUIET_NS_PER_STEP: f64 = 2.4;

/// Measures how many times longer a fixed piece of work takes than on a quiet machine; at least 1.
pub fn slowdown() -> f64 {
    let started = Instant::now();
    black_box(work(black_box(STEPS)));
    let ns_per_step = started.elapsed().as_nanos() as f64 / STEPS as f64;
    (ns_per_step / QUIET_NS_PER_STEP).max(1.)
}

/// Scales a timeout for a quiet machine to the current speed.
pub fn scale_timeout(quiet: Duration) -> Duration {
    quiet.mul_f64(slowdown())
}

/// Checks a claim about speed, which other load can spoil, up to five times until it holds.
///
/// `check` receives the [`slowdown`] to allow for, which doubles with each attempt. The last failure counts, unless every
/// attempt got less than two thirds of the processor time it wanted: then the claim cannot be checked, which is printed.
pub fn check_speed(mut check: impl FnMut(f64) -> Result<(), String>) {
    let mut shares = Vec::new();
    for attempt in 1..=5 {
        let watch = Stopwatch::start();
        let Err(why) = check(slowdown() * f64::from(1 << (attempt - 1))) else { return };
        shares.push(watch.share());
        eprintln!("attempt {attempt}, with {:.0}% of the processor time: {why}", 100. * watch.share());
    }
    assert!(shares.iter().all(|&share| share < 0.67), "it failed five times, see above");
    eprintln!("NOT CHECKED: other load took more than a third of the machine in every attempt");
}

/// A chain of dependent operations.
fn work(steps: u64) -> u64 {
    (0..steps).fold(1, |mut x: u64, _| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^ (x << 17)
    })
}

/// Measures time, not counting time that the hypervisor gave to others while this machine had work to do.
pub struct Stopwatch {
    started: Instant,
    then: Option<Processor>,
}

/// The time of all processors since the machine was booted, in ticks.
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

    /// The time since the start, times this machine's share of it.
    pub fn elapsed(&self) -> Duration {
        let stolen = match (self.then, Processor::read()) {
            (Some(then), Some(now)) => TICK * (now.stolen.saturating_sub(then.stolen) as u32),
            _ => Duration::ZERO,
        };
        not_stolen(self.started.elapsed(), self.share(), stolen)
    }

    /// The share of the requested processor time that this machine got since the start.
    pub fn share(&self) -> f64 {
        match (self.then, Processor::read()) {
            (Some(then), Some(now)) => share_of(then, now),
            _ => 1.,
        }
    }
}

/// A tick of `/proc/stat`.
const TICK: Duration = Duration::from_millis(10);

/// The part of a time in which a machine had this share of the processor time that it requested, and lost `stolen` in all. A machine that
/// sleeps requests next to nothing, so that its share says little; but no more than `stolen` is missing.
fn not_stolen(elapsed: Duration, share: f64, stolen: Duration) -> Duration {
    elapsed.mul_f64(share).max(elapsed.saturating_sub(stolen))
}

/// The share of the requested processor time that was granted.
fn share_of(then: Processor, now: Processor) -> f64 {
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
        // It ran for 40 ticks, and wanted to run for another 120.
        assert_eq!(share_of(then, now), 0.25);
        assert_eq!(share_of(then, then), 1.);
        assert!(Processor::parse("cpu 1 2 3").is_none());
    }

    #[test]
    fn a_machine_that_sleeps_loses_no_more_than_was_stolen() {
        let seconds = Duration::from_secs;
        // Two processors wanted to run all the time, and got a quarter of it.
        assert_eq!(not_stolen(seconds(60), 0.25, seconds(90)), seconds(15));
        // It ran for 0.2 s, and wanted to run for 4 s.
        assert_eq!(not_stolen(seconds(60), 0.05, seconds(4)), seconds(56));
    }

    #[test]
    fn slowdown_is_at_least_one() {
        assert!(slowdown() >= 1.);
    }
}
