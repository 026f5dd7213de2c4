//! Compares the speed of two jobs that run at the same time on the same cores.
//!
//! Other work on the machine then slows down both at the same moment. Consecutive runs, and even jobs that alternate every few seconds,
//! differ by ten times the effect to be measured. The CPU time of the supervisor, which slows down both, is counted separately.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

/// The number of windows that are compared, and the length of each.
const WINDOWS: u32 = 20;
const WINDOW: Duration = Duration::from_secs(30);
/// The number of warm-up steps before the first window.
const WARM_UP: usize = 3;

/// How much longer a step takes in one of the jobs.
pub(crate) struct Slowdown {
    /// The number of steps in each window: of the job without, and of the job with.
    windows: Vec<(f64, f64)>,
}

/// Measures the slowdown of the job `with` relative to the job `without`.
pub(crate) fn measure_slowdown(name: &str, without: &mut Job, with: &mut Job) -> Result<Slowdown> {
    for job in [&mut *without, &mut *with] {
        job.warm_up()?;
    }
    let mut windows = Vec::new();
    let mut began = Instant::now();
    for window in 1..=WINDOWS {
        let ended = began + WINDOW;
        let (off, on) = (without.steps_within(began, ended)?, with.steps_within(began, ended)?);
        println!("{name}, window {window}: {off:.2} steps without, {on:.2} with");
        windows.push((off, on));
        began = ended;
    }
    Ok(Slowdown { windows })
}

/// The slowdown over all steps in these windows.
fn percent<'a>(windows: impl Iterator<Item = &'a (f64, f64)>) -> f64 {
    let (off, on) = windows.fold((0., 0.), |all, window| (all.0 + window.0, all.1 + window.1));
    100. * (off / on - 1.)
}

impl Slowdown {
    pub(crate) fn percent(&self) -> f64 {
        percent(self.windows.iter())
    }

    /// The 95% confidence interval, by bootstrapping the windows.
    fn confidence_interval(&self) -> (f64, f64) {
        let mut random = 1u64;
        let mut draw = || {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            &self.windows[(random >> 33) as usize % self.windows.len()]
        };
        let mut drawn: Vec<f64> = (0..2000)
            .map(|_| {
                let again: Vec<&(f64, f64)> = self.windows.iter().map(|_| draw()).collect();
                percent(again.into_iter())
            })
            .collect();
        drawn.sort_by(f64::total_cmp);
        (drawn[50], drawn[1949])
    }
}

impl fmt::Display for Slowdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (least, most) = self.confidence_interval();
        write!(f, "{:+.2}% (95% confidence: {least:+.2} to {most:+.2})", self.percent())
    }
}

/// One of the jobs. It prints a line that starts with `step ` after every step.
pub(crate) struct Job {
    process: Child,
    receiver: Receiver<Instant>,
    /// The times of the steps received so far.
    steps: Vec<Instant>,
    began: Instant,
    cpu_s_before: f64,
}

impl Job {
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let mut job = command.stdout(Stdio::piped()).spawn()?;
        let (sender, receiver) = channel();
        let lines = BufReader::new(job.stdout.take().context("its output is a pipe")?).lines();
        std::thread::spawn(move || {
            let mut lines = lines.map_while(Result::ok).filter(|line| line.starts_with("step "));
            lines.try_for_each(|_| sender.send(Instant::now()))
        });
        Ok(Job { process: job, receiver, steps: Vec::new(), began: Instant::now(), cpu_s_before: 0. })
    }

    /// Waits for the warm-up steps.
    fn warm_up(&mut self) -> Result<()> {
        while self.steps.len() < WARM_UP {
            self.receive_step()?;
        }
        (self.began, self.cpu_s_before) = (Instant::now(), self.cpu_s());
        Ok(())
    }

    fn receive_step(&mut self) -> Result<()> {
        self.steps.push(self.receiver.recv().context("a job ended too early")?);
        Ok(())
    }

    /// The number of steps between two times, including fractions of steps at both ends.
    fn steps_within(&mut self, from: Instant, to: Instant) -> Result<f64> {
        while self.steps.last().is_none_or(|last| *last < to) {
            self.receive_step()?;
        }
        let steps_until = |at: Instant| {
            let whole = self.steps.partition_point(|step| *step <= at);
            let (before, after) = (self.steps[whole - 1], self.steps[whole]);
            whole as f64 + (at - before).as_secs_f64() / (after - before).as_secs_f64()
        };
        Ok(steps_until(to) - steps_until(from))
    }

    /// The cores used for supervision since the first window: by the supervisor, and by each rank's thread that reports to it. CPU
    /// time is reproducible where wall-clock time is not.
    pub(crate) fn watching_cores(&self) -> f64 {
        (self.cpu_s() - self.cpu_s_before) / self.began.elapsed().as_secs_f64()
    }

    fn cpu_s(&self) -> f64 {
        let of_thread = |thread: &Path| {
            let spent = std::fs::read_to_string(thread.join("schedstat")).unwrap_or_default();
            spent.split(' ').next().and_then(|spent| spent.parse::<f64>().ok()).unwrap_or(0.) / 1e9
        };
        let is_counted = |id: u32, thread: &Path| {
            id == self.process.id() || std::fs::read_to_string(thread.join("comm")).is_ok_and(|name| name == "watch\n")
        };
        let of_process = |id: u32| -> f64 {
            threads(id).iter().filter(|thread| is_counted(id, thread)).map(|thread| of_thread(thread)).sum()
        };
        self.processes().into_iter().map(of_process).sum()
    }

    /// The job's process and all of its descendants.
    fn processes(&self) -> Vec<u32> {
        let mut processes = vec![self.process.id()];
        let mut visited = 0;
        while let Some(&id) = processes.get(visited) {
            processes.extend(children(id));
            visited += 1;
        }
        processes
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for id in self.processes().into_iter().filter_map(|id| Pid::from_raw(id as i32)) {
            // The process may have ended in the meantime.
            let _ = kill_process(id, Signal::KILL);
        }
        drop(self.process.wait());
    }
}

/// The children of a process.
fn children(id: u32) -> Vec<u32> {
    let list = |thread: PathBuf| std::fs::read_to_string(thread.join("children")).unwrap_or_default();
    let lists = threads(id).into_iter().map(list);
    lists.flat_map(|list| list.split_whitespace().filter_map(|id| id.parse().ok()).collect::<Vec<_>>()).collect()
}

/// The `/proc` folders of a process's threads.
fn threads(id: u32) -> Vec<PathBuf> {
    let threads = std::fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    threads.map(|thread| thread.path()).collect()
}
