//! The supervisor: launches the ranks of a run, monitors them, explains what went wrong, and restarts them.
//!
//! An attempt finishes, stops on request, or fails. A failure ends the attempt on all ranks. The supervisor kills whatever is left of it,
//! then launches the next attempt on the hosts that can be reached. That one resumes from the newest intact checkpoint. Attempts that
//! make no progress are spaced further and further apart, and limited in number.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use shardwise_journal::{EntryKind, Launch};
use shardwise_watch::{ModelAxes, Secret};

use crate::attempt::{Attempt, Failure, Outcome};
use crate::error::{Error, Result};
use crate::event_log::EventLog;
use crate::exit_codes::FAILED;
use crate::hosts::{Host, reachable_hosts};
use crate::launch::RankCommand;
use crate::rank_count::RankCount;
use crate::screen::Screen;
use crate::signals::Signals;

/// The first and the longest pause between attempts that make no progress.
const PAUSE: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The first pause if hosts are missing: they may still be booting.
const PAUSE_FOR_HOSTS: Duration = Duration::from_secs(5);

/// The part of a recipe that the supervisor needs.
#[derive(Debug, Deserialize)]
pub struct Settings {
    /// The world sizes that the recipe can run on, in ascending order, all with the same global batch.
    pub ranks: Vec<usize>,
    /// The sizes of the axes that cut the model into parts, which are the same on any number of ranks.
    #[serde(default)]
    pub axes: ModelAxes,
    /// The run folder, which holds the journal.
    pub folder: PathBuf,
    /// Whether the recipe has a checkpoint folder.
    pub saves: bool,
    /// How long a rank may send no heartbeat before it counts as lost.
    pub heartbeat_timeout_s: f64,
    /// The maximum number of attempts in a row that make no progress.
    pub max_restarts: u32,
}

/// Where ranks run, and where they report.
pub struct Placement {
    /// The hosts to run ranks on; empty for this host only.
    pub hosts: Vec<Host>,
    /// The program that runs commands on other hosts.
    pub agent: String,
    /// The address at which the supervisor listens for ranks.
    pub listen: IpAddr,
}

/// Runs a command until it finishes, stops on request, or keeps failing, and records what happens. Each attempt gets the next one of
/// `faults`, as long as there are any.
pub fn supervise(
    command: &RankCommand,
    asked: RankCount,
    settings: &Settings,
    placement: &Placement,
    faults: impl Iterator<Item = String>,
    log: &mut EventLog,
) -> Result<ExitCode> {
    let mut history = AttemptHistory::new(log.screen.clone());
    let result = run_attempts(command, asked, settings, placement, faults, log, &mut history);
    // A launch that found nothing left to do adds nothing to the run's journal.
    let is_idle = matches!(result, Ok(0)) && log.is_idle();
    if history.attempts > 0 && !is_idle {
        let (code, lost_s) = (*result.as_ref().unwrap_or(&1), history.lost.as_secs_f64());
        log.record(EntryKind::Ended { code, restarts: history.attempts - 1, lost_s }, None);
    }
    log.screen.finish();
    result.map(ExitCode::from)
}

/// Launches attempts until the run ends, and returns its exit code.
fn run_attempts(
    command: &RankCommand,
    asked: RankCount,
    settings: &Settings,
    placement: &Placement,
    mut faults: impl Iterator<Item = String>,
    log: &mut EventLog,
    history: &mut AttemptHistory,
) -> Result<u8> {
    let signals = Signals::register()?;
    let secret = Secret::new().map_err(|error| Error::failed("cannot create a secret for the job", error))?;
    let screen = log.screen.clone();
    let mut listen = SocketAddr::new(placement.listen, 0);
    loop {
        let hosts = reachable_hosts(&placement.hosts, &placement.agent);
        let ranks = match choose_world_size(asked, settings, placement, &hosts) {
            Ok(ranks) => ranks,
            Err(error) if history.attempts > 0 => {
                screen.say(&format!("{error}."));
                if !history.wait_to_retry(settings.max_restarts, PAUSE_FOR_HOSTS, &signals) {
                    return Ok(FAILED);
                }
                if let Some(code) = signals.exit_code() {
                    return Ok(code);
                }
                continue;
            }
            Err(error) => return Err(error),
        };
        if history.attempts > 0 {
            history.announce_restart(&placement.hosts, &hosts, ranks);
        }
        history.attempts += 1;
        log.record(EntryKind::Launched(describe_launch(history.attempts, ranks, &placement.hosts, &hosts)), None);
        let attempt = Attempt {
            command,
            ranks,
            axes: settings.axes,
            hosts: &hosts,
            agent: &placement.agent,
            listen,
            secret: &secret,
            number: history.attempts,
            heartbeat_timeout: Duration::from_secs_f64(settings.heartbeat_timeout_s),
            saves: settings.saves,
            signals: &signals,
            fault: faults.next(),
            last_failure: history.last_failure.as_ref(),
        };
        let (outcome, address) = attempt.run(log)?;
        // The next attempt listens at the same address, so that viewers find it.
        listen = address;
        match outcome {
            Outcome::Ended { code, lost } => {
                history.lost += lost;
                history.announce_total();
                return Ok(code);
            }
            Outcome::Failed(failure) => {
                screen.say(&failure.text);
                let Failure { last_step: step, ref text, .. } = failure;
                log.record(EntryKind::Failed { attempt: history.attempts, step, text: text.clone() }, None);
                history.lost += failure.lost_before;
                if let Some(code) = failure.final_code {
                    return Ok(code);
                }
                if !settings.saves {
                    screen.say(
                        "Not restarting: there are no checkpoints to resume from. Set checkpoints.folder in the recipe.",
                    );
                    return Ok(FAILED);
                }
                if !history.add_failure(failure, settings.max_restarts, &signals) {
                    return Ok(FAILED);
                }
                // The newest checkpoint is on disk, so a requested stop has nothing to wait for.
                if let Some(code) = signals.exit_code() {
                    return Ok(code);
                }
            }
        }
    }
}

/// The journal entry of a launch.
fn describe_launch(attempt: u64, ranks: usize, wanted: &[Host], hosts: &[Host]) -> Launch {
    let names = |hosts: &mut dyn Iterator<Item = &Host>| hosts.map(|host| host.name.clone()).collect();
    let missing = names(&mut wanted.iter().filter(|host| !hosts.contains(host)));
    Launch { attempt, ranks, hosts: names(&mut hosts.iter()), missing }
}

/// Chooses the largest world size that there is room for.
fn choose_world_size(asked: RankCount, settings: &Settings, placement: &Placement, hosts: &[Host]) -> Result<usize> {
    let room = match placement.hosts.is_empty() {
        true => asked.max,
        false => hosts.iter().map(|host| host.ranks).sum(),
    };
    match settings.ranks.iter().rev().find(|&&ranks| ranks <= room) {
        Some(&ranks) => Ok(ranks),
        None => {
            let missing = placement.hosts.iter().filter(|host| !hosts.contains(host));
            Err(Error::NoRoom {
                room,
                missing: missing.map(|host| host.name.clone()).collect(),
                asked,
                needed: *settings.ranks.first().unwrap_or(&asked.min),
            })
        }
    }
}

/// The attempts so far.
struct AttemptHistory {
    screen: Arc<dyn Screen>,
    attempts: u64,
    /// The number of attempts in a row that made no progress.
    fruitless: u32,
    last_failure: Option<Failure>,
    failures: u32,
    lost: Duration,
}

impl AttemptHistory {
    fn new(screen: Arc<dyn Screen>) -> Self {
        AttemptHistory { screen, attempts: 0, fruitless: 0, last_failure: None, failures: 0, lost: Duration::ZERO }
    }

    /// Records a failure, waits until it is time for the next attempt, and returns whether there is one.
    fn add_failure(&mut self, failure: Failure, max_restarts: u32, signals: &Signals) -> bool {
        let before = self.last_failure.take();
        let furthest = before.as_ref().map_or(0, |before| before.first_step);
        let made_no_progress = before.is_some() && failure.first_step <= furthest;
        self.failures += 1;
        self.last_failure = Some(match before {
            // This attempt never trained, so the previous failure still costs time.
            Some(before) if failure.first_step == 0 => before,
            _ => Failure { first_step: failure.first_step.max(furthest), ..failure },
        });
        match made_no_progress {
            true => self.wait_to_retry(max_restarts, PAUSE, signals),
            false if max_restarts == 0 => {
                self.screen.say("Not restarting: supervision.max_restarts is 0.");
                false
            }
            false => {
                self.fruitless = 0;
                true
            }
        }
    }

    /// Waits after an attempt that made no progress, longer each time. Returns whether there is another attempt.
    fn wait_to_retry(&mut self, max_restarts: u32, first_pause: Duration, signals: &Signals) -> bool {
        self.fruitless += 1;
        if self.fruitless >= max_restarts {
            self.screen.say(&format!(
                "Not restarting after {} attempts from the same checkpoint (supervision.max_restarts).",
                self.fruitless + 1
            ));
            return false;
        }
        let pause = first_pause.saturating_mul(1 << (self.fruitless - 1).min(16)).min(PAUSE_MAX);
        self.screen.say(&format!("Restarting in {:.1} s: the last attempt made no progress.", pause.as_secs_f64()));
        let until = Instant::now() + pause;
        while Instant::now() < until && signals.exit_code().is_none() {
            std::thread::sleep(Duration::from_millis(20).min(until.saturating_duration_since(Instant::now())));
        }
        true
    }

    fn announce_restart(&self, all: &[Host], hosts: &[Host], ranks: usize) {
        let missing: Vec<&str> =
            all.iter().filter(|host| !hosts.contains(host)).map(|host| host.name.as_str()).collect();
        match missing.is_empty() {
            true => self.screen.say(&format!("Restarting on {ranks} ranks.")),
            false => self
                .screen
                .say(&format!("Restarting on {ranks} ranks without {}, which does not answer.", missing.join(" and "))),
        }
    }

    /// Says how much time the failures have cost.
    fn announce_total(&self) {
        if self.failures > 0 {
            let times = if self.failures == 1 { "once".to_string() } else { format!("{} times", self.failures) };
            self.screen.say(&format!(
                "Restarted {times}, which cost {:.1} s in addition to repeated steps.",
                self.lost.as_secs_f64()
            ));
        }
    }
}
