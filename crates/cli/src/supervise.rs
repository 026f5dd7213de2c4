//! The supervisor: starts the ranks of a run, watches them, says in a paragraph what went wrong, and starts them again.
//!
//! An attempt ends well, or because it was asked to, or with a failure. A failure ends it everywhere; what is left of it is
//! swept up before the next attempt, which goes on from the newest checkpoint that is good, on the hosts that answer. Attempts
//! that bring nothing are spaced further and further apart, and there is a limit to them.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use shardwise_journal::{Launch, What};
use shardwise_watch::Secret;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

use crate::attempt::{Attempt, Failure, Outcome};
use crate::chronicle::Chronicle;
use crate::hosts::{Host, answering};
use crate::launch::Work;
use crate::launched::RESUME;
use crate::rank_count::RankCount;
use crate::screen::Screen;

/// The exit code of a run that has failed.
const FAILED: u8 = 1;

/// The exit code of a run that was interrupted, as shells have it.
pub(crate) const INTERRUPTED: u8 = 130;

/// The same where it is hosts that are missing, which may be starting up.
const PAUSE_FOR_HOSTS: Duration = Duration::from_secs(5);

/// How long the first pause is between attempts that bring nothing, and the longest.
const PAUSE: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// What of a recipe a supervisor has to know.
#[derive(Debug, Deserialize)]
pub(crate) struct Settings {
    /// The numbers of ranks that the recipe can be run on, the least first, all with the same global batch.
    pub(crate) ranks: Vec<usize>,
    /// Where the run writes what it says of itself.
    pub(crate) folder: PathBuf,
    /// Whether there is a place for checkpoints.
    pub(crate) saves: bool,
    /// After how long without a sign a rank is given up.
    pub(crate) silence_s: f64,
    /// How many attempts in a row may bring nothing.
    pub(crate) restarts: u32,
}

/// Where ranks are started and watched.
pub(crate) struct Places {
    /// None for this host alone.
    pub(crate) hosts: Vec<Host>,
    /// What starts a program on another host.
    pub(crate) agent: String,
    /// Where ranks report to.
    pub(crate) listen: IpAddr,
}

/// What people ask of a supervisor by signals.
#[derive(Clone, Default)]
pub(crate) struct Signals {
    /// To save and end (SIGTERM, SIGUSR1, and SIGHUP, when a terminal goes).
    save: Arc<AtomicBool>,
    /// To save and end, or to end where that was asked for before (SIGINT); not yet heard.
    interrupt: Arc<AtomicBool>,
    interrupted: Arc<AtomicBool>,
    /// To end.
    end: Arc<AtomicBool>,
}

impl Signals {
    fn register() -> Result<Self> {
        let signals = Signals::default();
        // Who asks a second time does not want to wait: the ranks see their supervisor go, and go.
        signal_hook::flag::register_conditional_default(SIGTERM, signals.save.clone()).context("a signal's handler")?;
        let mut flags = vec![(SIGTERM, &signals.save), (SIGUSR1, &signals.save), (SIGINT, &signals.interrupt)];
        if !hangups_are_ignored() {
            flags.push((SIGHUP, &signals.save));
        }
        for (signal, flag) in flags {
            signal_hook::flag::register(signal, flag.clone()).context("a signal's handler")?;
        }
        Ok(signals)
    }

    pub(crate) fn save(&self) -> bool {
        self.hear();
        self.save.load(Ordering::Relaxed)
    }

    /// Takes a key that was pressed for what it means: to save and end at first, then to end.
    fn hear(&self) {
        if self.interrupt.swap(false, Ordering::Relaxed) {
            self.interrupted.store(true, Ordering::Relaxed);
            if self.save.swap(true, Ordering::Relaxed) {
                self.end.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Whether it was a key that asked.
    pub(crate) fn interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// With which code the run ends between two attempts, if it was asked to.
    fn code(&self) -> Option<u8> {
        match (self.end(), self.save()) {
            (true, _) => Some(INTERRUPTED),
            (false, true) => Some(RESUME),
            (false, false) => None,
        }
    }

    pub(crate) fn end(&self) -> bool {
        self.hear();
        self.end.load(Ordering::Relaxed)
    }
}

/// Whether it was started so that it outlives its terminal, by `nohup` for one.
fn hangups_are_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    ignored.is_some_and(|ignored| ignored & (1 << (SIGHUP - 1)) != 0)
}

/// Runs `work` to its end, however many attempts that takes, and writes down what becomes of it. Each attempt but the last is given
/// one of `faults`, in their order.
pub(crate) fn supervise(
    work: &Work,
    asked: RankCount,
    settings: &Settings,
    places: &Places,
    faults: impl Iterator<Item = String>,
    chronicle: &mut Chronicle,
) -> Result<ExitCode> {
    let mut past = Past::new(chronicle.screen.clone());
    let ended = attempts(work, asked, settings, places, faults, chronicle, &mut past);
    // Ranks that found nothing left to do have added nothing to the run: its story is as it was.
    let is_idle = matches!(ended, Ok(0)) && chronicle.is_idle();
    if past.attempts > 0 && !is_idle {
        let (code, lost_s) = (*ended.as_ref().unwrap_or(&1), past.lost.as_secs_f64());
        chronicle.note(What::Ended { code, restarts: past.attempts - 1, lost_s }, None);
    }
    chronicle.screen.leave();
    ended.map(ExitCode::from)
}

/// Attempt after attempt; the code with which the run ends.
fn attempts(
    work: &Work,
    asked: RankCount,
    settings: &Settings,
    places: &Places,
    mut faults: impl Iterator<Item = String>,
    chronicle: &mut Chronicle,
    past: &mut Past,
) -> Result<u8> {
    let signals = Signals::register()?;
    let secret = Secret::new().context("a secret for the job")?;
    let screen = chronicle.screen.clone();
    let mut listen = SocketAddr::new(places.listen, 0);
    loop {
        let hosts = answering(&places.hosts, &places.agent);
        let ranks = match ranks_for(asked, settings, places, &hosts) {
            Ok(ranks) => ranks,
            Err(error) if past.attempts > 0 => {
                screen.say(&format!("{error:#}."));
                if !past.waits(settings.restarts, PAUSE_FOR_HOSTS, &signals) {
                    return Ok(FAILED);
                }
                if let Some(code) = signals.code() {
                    return Ok(code);
                }
                continue;
            }
            Err(error) => return Err(error),
        };
        if past.attempts > 0 {
            past.say_where(&places.hosts, &hosts, ranks);
        }
        past.attempts += 1;
        chronicle.note(What::Launched(launch(past.attempts, ranks, &places.hosts, &hosts)), None);
        let attempt = Attempt {
            work,
            ranks,
            hosts: &hosts,
            agent: &places.agent,
            listen,
            secret: &secret,
            number: past.attempts,
            silence: Duration::from_secs_f64(settings.silence_s),
            saves: settings.saves,
            signals: &signals,
            fault: faults.next(),
            failed_before: past.last.as_ref(),
        };
        let (outcome, address) = attempt.run(chronicle)?;
        // Whoever looks on finds the next attempt where this one was.
        listen = address;
        match outcome {
            Outcome::Ended { code, lost } => {
                past.lost += lost;
                past.say_all();
                return Ok(code);
            }
            Outcome::Failed(failure) => {
                screen.say(&failure.text);
                let Failure { last_step: step, ref text, .. } = failure;
                chronicle.note(What::Failed { attempt: past.attempts, step, text: text.clone() }, None);
                past.lost += failure.lost_before;
                if let Some(code) = failure.is_final {
                    return Ok(code);
                }
                if !settings.saves {
                    screen.say(
                        "There are no checkpoints to go on from; with checkpoints.folder in the recipe it would go on by itself.",
                    );
                    return Ok(FAILED);
                }
                if !past.add(failure, settings.restarts, &signals) {
                    return Ok(FAILED);
                }
                // What was saved is there: whoever wants the run to end has it.
                if let Some(code) = signals.code() {
                    return Ok(code);
                }
            }
        }
    }
}

/// What is started where.
fn launch(attempt: u64, ranks: usize, wanted: &[Host], hosts: &[Host]) -> Launch {
    let names = |hosts: &mut dyn Iterator<Item = &Host>| hosts.map(|host| host.name.clone()).collect();
    let missing = names(&mut wanted.iter().filter(|host| !hosts.contains(host)));
    Launch { attempt, ranks, hosts: names(&mut hosts.iter()), missing }
}

/// As many ranks as there is room for.
fn ranks_for(asked: RankCount, settings: &Settings, places: &Places, hosts: &[Host]) -> Result<usize> {
    let room = match places.hosts.is_empty() {
        true => asked.most,
        false => hosts.iter().map(|host| host.ranks).sum(),
    };
    match settings.ranks.iter().rev().find(|&&ranks| ranks <= room) {
        Some(&ranks) => Ok(ranks),
        None => {
            let missing: Vec<&str> =
                places.hosts.iter().filter(|host| !hosts.contains(host)).map(|host| host.name.as_str()).collect();
            let missing = match missing.is_empty() {
                true => String::new(),
                false => format!(" (no answer from {})", missing.join(", ")),
            };
            bail!(
                "there is room for {room} ranks{missing}, and -n {asked} needs {}",
                settings.ranks.first().unwrap_or(&asked.least)
            )
        }
    }
}

/// What became of earlier attempts.
struct Past {
    screen: Screen,
    attempts: u64,
    /// In a row, that brought nothing.
    in_vain: u32,
    last: Option<Failure>,
    failures: u32,
    lost: Duration,
}

impl Past {
    fn new(screen: Screen) -> Self {
        Past { screen, attempts: 0, in_vain: 0, last: None, failures: 0, lost: Duration::ZERO }
    }

    /// Whether there is to be another attempt after this failure; waits until it is time for it.
    fn add(&mut self, failure: Failure, restarts: u32, signals: &Signals) -> bool {
        let before = self.last.take();
        let furthest = before.as_ref().map_or(0, |before| before.first_step);
        let brought_nothing = before.is_some() && failure.first_step <= furthest;
        self.failures += 1;
        self.last = Some(match before {
            // It never came to work, so what the failure before it costs is not over.
            Some(before) if failure.first_step == 0 => before,
            _ => Failure { first_step: failure.first_step.max(furthest), ..failure },
        });
        match brought_nothing {
            true => self.waits(restarts, PAUSE, signals),
            false if restarts == 0 => {
                self.screen.say("It is not started again: supervision.restarts is 0.");
                false
            }
            false => {
                self.in_vain = 0;
                true
            }
        }
    }

    /// Whether there is to be another attempt after one that brought nothing; waits until it is time for it, longer every time.
    fn waits(&mut self, restarts: u32, first: Duration, signals: &Signals) -> bool {
        self.in_vain += 1;
        if self.in_vain >= restarts {
            self.screen.say(&format!(
                "It has been tried {} times from the same checkpoint and is not started again (supervision.restarts).",
                self.in_vain + 1
            ));
            return false;
        }
        let pause = first.saturating_mul(1 << (self.in_vain - 1).min(16)).min(PAUSE_MAX);
        self.screen
            .say(&format!("It is started again in {:.1} s: the last attempt brought nothing.", pause.as_secs_f64()));
        let until = Instant::now() + pause;
        while Instant::now() < until && signals.code().is_none() {
            std::thread::sleep(Duration::from_millis(20).min(until.saturating_duration_since(Instant::now())));
        }
        true
    }

    fn say_where(&self, all: &[Host], hosts: &[Host], ranks: usize) {
        let missing: Vec<&str> =
            all.iter().filter(|host| !hosts.contains(host)).map(|host| host.name.as_str()).collect();
        match missing.is_empty() {
            true => self.screen.say(&format!("Starting again on {ranks} ranks.")),
            false => self.screen.say(&format!(
                "Starting again on {ranks} ranks, without {}, which does not answer.",
                missing.join(" and ")
            )),
        }
    }

    /// What failures have cost.
    fn say_all(&self) {
        if self.failures > 0 {
            let times = if self.failures == 1 { "once".to_string() } else { format!("{} times", self.failures) };
            self.screen.say(&format!(
                "It was started again {times}, for which {:.1} s were lost beside steps made again.",
                self.lost.as_secs_f64()
            ));
        }
    }
}
