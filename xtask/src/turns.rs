//! Two jobs that take turns at making steps: while one does, the other is stopped with all of its processes, so that both meet the
//! same minutes of a noisy machine. Whole runs that follow each other differ by more than what is to be found out.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::workspace::median;

/// How often each side has its turn.
pub(crate) const TURNS: usize = 40;
/// The steps of a turn that count. One before them does not: in its midst the side was woken.
const STEPS: u32 = 2;

/// How much longer a step takes on one side.
pub(crate) struct More {
    /// In order.
    ratios: Vec<f64>,
}

/// Compares two sides, each of which goes first in every second turn.
pub(crate) fn more_of(name: &str, without: &mut Side, with: &mut Side) -> Result<More> {
    let mut ratios = Vec::new();
    for turn in 1..=TURNS {
        let (off, on) = if turn % 2 == 0 {
            let on = with.turn()?;
            (without.turn()?, on)
        } else {
            (without.turn()?, with.turn()?)
        };
        println!("{name}, turn {turn}: {off:.3} s a step without, {on:.3} s with");
        ratios.push(on / off);
    }
    ratios.sort_by(f64::total_cmp);
    Ok(More { ratios })
}

fn percent(ratio: f64) -> f64 {
    100. * (ratio - 1.)
}

impl More {
    pub(crate) fn percent(&self) -> f64 {
        percent(median(&self.ratios))
    }
}

impl fmt::Display for More {
    /// With what the median lies between 19 times in 20, by the order of the ratios: it then does not matter how they are spread.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (last, reach) = (self.ratios.len() - 1, (self.ratios.len() as f64).sqrt() as usize);
        let least = self.ratios[(last / 2).saturating_sub(reach)];
        let most = self.ratios[last.div_ceil(2).saturating_add(reach).min(last)];
        write!(f, "{:+.2}% (19 in 20: {:+.2} to {:+.2})", self.percent(), percent(least), percent(most))
    }
}

/// One of the jobs. It prints a line that begins with `step ` after every step.
pub(crate) struct Side {
    job: Child,
    steps: Receiver<Instant>,
    at_work: Duration,
}

impl Side {
    /// Starts a job, and stops it after its first steps.
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let mut job = command.stdout(Stdio::piped()).spawn()?;
        let (said, steps) = channel();
        let lines = BufReader::new(job.stdout.take().context("its output is a pipe")?).lines();
        std::thread::spawn(move || {
            let mut lines = lines.map_while(Result::ok).filter(|line| line.starts_with("step "));
            lines.try_for_each(|_| said.send(Instant::now()))
        });
        let mut side = Side { job, steps, at_work: Duration::ZERO };
        side.turn()?;
        side.at_work = Duration::ZERO;
        Ok(side)
    }

    /// The process that was started.
    pub(crate) fn id(&self) -> u32 {
        self.job.id()
    }

    /// How long it was not stopped, after its start.
    pub(crate) fn at_work(&self) -> Duration {
        self.at_work
    }

    /// Seconds of a step.
    fn turn(&mut self) -> Result<f64> {
        // What it said when it was being stopped.
        while self.steps.try_recv().is_ok() {}
        let woken = Instant::now();
        self.tell(Signal::CONT);
        let next = || self.steps.recv().context("a job has ended before its time");
        let started = next()?;
        let ended = (0..STEPS).try_fold(started, |_, _| next())?;
        self.tell(Signal::STOP);
        self.at_work += woken.elapsed();
        Ok((ended - started).as_secs_f64() / f64::from(STEPS))
    }

    fn tell(&self, signal: Signal) {
        let mut family = vec![self.job.id()];
        let mut asked = 0;
        while let Some(&id) = family.get(asked) {
            family.extend(children(id));
            asked += 1;
        }
        for id in family.into_iter().filter_map(|id| Pid::from_raw(id as i32)) {
            // One that has ended meanwhile needs no signal.
            let _ = kill_process(id, signal);
        }
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.tell(Signal::KILL);
        drop(self.job.wait());
    }
}

/// The processes that a process's threads have started.
fn children(id: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    let lists = threads.map(|thread| std::fs::read_to_string(thread.path().join("children")).unwrap_or_default());
    lists.flat_map(|list| list.split_whitespace().filter_map(|id| id.parse().ok()).collect::<Vec<_>>()).collect()
}
