//! Two jobs at the same time on the same cores, and which makes steps faster. What else goes on on the machine then meets both within
//! milliseconds; runs that follow each other, and even jobs that take turns every few seconds, differ by ten times what is to be found
//! out. What neither side can escape, the processor time of a supervisor, is counted beside.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

/// How many windows are compared, and how long each is.
const WINDOWS: u32 = 20;
const WINDOW: Duration = Duration::from_secs(30);
/// Steps before the first window.
const WARM_UP: usize = 3;

/// How much longer a step takes on one side.
pub(crate) struct More {
    /// The steps of each window, without and with.
    windows: Vec<(f64, f64)>,
}

/// Compares two sides.
pub(crate) fn more_of(name: &str, without: &mut Side, with: &mut Side) -> Result<More> {
    for side in [&mut *without, &mut *with] {
        side.begin()?;
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
    Ok(More { windows })
}

/// Of all steps in these windows.
fn percent<'a>(windows: impl Iterator<Item = &'a (f64, f64)>) -> f64 {
    let (off, on) = windows.fold((0., 0.), |all, window| (all.0 + window.0, all.1 + window.1));
    100. * (off / on - 1.)
}

impl More {
    pub(crate) fn percent(&self) -> f64 {
        percent(self.windows.iter())
    }

    /// Between what it lies 19 times in 20, if these windows are like others: by drawing as many of them again and again.
    fn likely(&self) -> (f64, f64) {
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

impl fmt::Display for More {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (least, most) = self.likely();
        write!(f, "{:+.2}% (19 in 20: {least:+.2} to {most:+.2})", self.percent())
    }
}

/// One of the jobs. It prints a line that begins with `step ` after every step.
pub(crate) struct Side {
    job: Child,
    said: Receiver<Instant>,
    /// When steps were made, as far as it has been heard.
    steps: Vec<Instant>,
    began: Instant,
    processor_before: f64,
}

impl Side {
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let mut job = command.stdout(Stdio::piped()).spawn()?;
        let (saying, said) = channel();
        let lines = BufReader::new(job.stdout.take().context("its output is a pipe")?).lines();
        std::thread::spawn(move || {
            let mut lines = lines.map_while(Result::ok).filter(|line| line.starts_with("step "));
            lines.try_for_each(|_| saying.send(Instant::now()))
        });
        Ok(Side { job, said, steps: Vec::new(), began: Instant::now(), processor_before: 0. })
    }

    /// Waits for the first steps, which do not count.
    fn begin(&mut self) -> Result<()> {
        while self.steps.len() < WARM_UP {
            self.hear()?;
        }
        (self.began, self.processor_before) = (Instant::now(), self.processor_seconds());
        Ok(())
    }

    fn hear(&mut self) -> Result<()> {
        self.steps.push(self.said.recv().context("a job has ended before its time")?);
        Ok(())
    }

    /// How many steps it makes from one time to another, with the parts of those that it was in the midst of.
    fn steps_within(&mut self, from: Instant, to: Instant) -> Result<f64> {
        while self.steps.last().is_none_or(|last| *last < to) {
            self.hear()?;
        }
        let made = |at: Instant| {
            let whole = self.steps.partition_point(|step| *step <= at);
            let (before, after) = (self.steps[whole - 1], self.steps[whole]);
            whole as f64 + (at - before).as_secs_f64() / (after - before).as_secs_f64()
        };
        Ok(made(to) - made(from))
    }

    /// What being watched takes of a core since the first window: the supervisor, and in each rank the thread that reports to it. That
    /// is counted, so it repeats where times do not.
    pub(crate) fn beside(&self) -> f64 {
        (self.processor_seconds() - self.processor_before) / self.began.elapsed().as_secs_f64()
    }

    fn processor_seconds(&self) -> f64 {
        let of_thread = |thread: &Path| {
            let spent = std::fs::read_to_string(thread.join("schedstat")).unwrap_or_default();
            spent.split(' ').next().and_then(|spent| spent.parse::<f64>().ok()).unwrap_or(0.) / 1e9
        };
        let is_counted = |id: u32, thread: &Path| {
            id == self.job.id() || std::fs::read_to_string(thread.join("comm")).is_ok_and(|name| name == "watch\n")
        };
        let of_process = |id: u32| -> f64 {
            threads(id).iter().filter(|thread| is_counted(id, thread)).map(|thread| of_thread(thread)).sum()
        };
        self.family().into_iter().map(of_process).sum()
    }

    /// The job's process and all that it has started.
    fn family(&self) -> Vec<u32> {
        let mut family = vec![self.job.id()];
        let mut asked = 0;
        while let Some(&id) = family.get(asked) {
            family.extend(children(id));
            asked += 1;
        }
        family
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        for id in self.family().into_iter().filter_map(|id| Pid::from_raw(id as i32)) {
            // One that has ended meanwhile needs no signal.
            let _ = kill_process(id, Signal::KILL);
        }
        drop(self.job.wait());
    }
}

/// The processes that a process's threads have started.
fn children(id: u32) -> Vec<u32> {
    let list = |thread: PathBuf| std::fs::read_to_string(thread.join("children")).unwrap_or_default();
    let lists = threads(id).into_iter().map(list);
    lists.flat_map(|list| list.split_whitespace().filter_map(|id| id.parse().ok()).collect::<Vec<_>>()).collect()
}

/// Where the kernel tells of a process's threads.
fn threads(id: u32) -> Vec<PathBuf> {
    let threads = std::fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    threads.map(|thread| thread.path()).collect()
}
