//! One attempt of a run: launches the ranks, monitors them until they end, and kills whatever is left.

use std::error::Error as _;
use std::net::SocketAddr;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use shardwise_journal::{EntryKind, Resumed};
use shardwise_watch::{
    self as watch, Cause, Event, FailureKind, ModelAxes, Order, Presence, RankInfo, Request, Secret, Server, explain,
};

use crate::error::{Error, Result};
use crate::event_log::EventLog;
use crate::exit_codes::{INTERRUPTED, REFUSED};
use crate::hosts::Host;
use crate::launch::RankCommand;
use crate::launcher_env::{ATTEMPT, SECRET, SUPERVISOR, hostname};
use crate::launcher_stderr::{LauncherStderr, first_death};
use crate::launcher_stdout::LauncherStdout;
use crate::screen::Screen;
use crate::signals::Signals;
use crate::supervisor_file::SupervisorFile;

/// How often the launcher and the signals are checked.
const POLL: Duration = Duration::from_millis(20);

/// How long ranks may take to join: the launcher has to reach all hosts.
const JOIN_TIMEOUT: Duration = Duration::from_secs(120);

/// How long to wait for reports from other ranks after the first sign of a failure. If a rank reports an error, wait longer: the
/// positions of all the others help to explain it.
const LISTEN: Duration = Duration::from_millis(100);
const LISTEN_TO_ALL: Duration = Duration::from_millis(1200);

/// The ranks of a lost host fall silent within this time of each other.
const HEARTBEAT_SPREAD: Duration = Duration::from_secs(1);

/// How long a launcher may keep running after all its ranks have left.
const LAUNCHER_EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs with few ranks can afford a shorter heartbeat.
const FEW_RANKS: usize = 64;
const SHORT_HEARTBEAT: Duration = Duration::from_millis(200);

/// The maximum number of steps that a viewer may ask to trace at once.
const TRACED_STEPS_MAX: u64 = 100;

/// How long a launcher may take to exit after its ranks are killed, and then after each signal.
const KILL_TIMEOUT: Duration = Duration::from_millis(1500);

/// The settings of an attempt.
pub(crate) struct Attempt<'a> {
    pub(crate) command: &'a RankCommand<'a>,
    pub(crate) ranks: usize,
    pub(crate) axes: ModelAxes,
    pub(crate) hosts: &'a [Host],
    pub(crate) agent: &'a str,
    pub(crate) listen: SocketAddr,
    pub(crate) secret: &'a Secret,
    pub(crate) number: u64,
    pub(crate) heartbeat_timeout: Duration,
    pub(crate) saves: bool,
    pub(crate) signals: &'a Signals,
    pub(crate) fault: Option<String>,
    pub(crate) last_failure: Option<&'a Failure>,
}

pub(crate) enum Outcome {
    /// The run finished, or stopped on request.
    Ended {
        code: u8,
        /// The time that the failure before this attempt cost.
        lost: Duration,
    },
    Failed(Failure),
}

pub(crate) struct Failure {
    /// An explanation for the user, one paragraph long.
    pub(crate) text: String,
    /// The exit code, if another attempt would fail the same way.
    pub(crate) final_code: Option<u8>,
    /// When the ranks stopped working, as far as that is known.
    pub(crate) stopped: Instant,
    /// When the supervisor noticed.
    pub(crate) noticed: Instant,
    /// The first step of the attempt, or 0 if it never got that far.
    pub(crate) first_step: u64,
    /// The last step that any rank reported.
    pub(crate) last_step: u64,
    /// The time that the failure before this one cost.
    pub(crate) lost_before: Duration,
}

/// The state of the ranks, as far as it is known.
#[derive(Default)]
struct State {
    /// The first sign of a failure, and when it came.
    failure: Option<(Cause, Instant)>,
    /// The exit codes of the ranks that have left.
    codes: Vec<Option<i32>>,
    joined: usize,
    first_step: Option<u64>,
    last_step: u64,
    /// The time that the failure before this attempt cost.
    lost: Duration,
    has_ordered_save: bool,
    /// When the last rank left.
    all_left: Option<Instant>,
}

impl Attempt<'_> {
    /// Runs the attempt to its end. Returns its outcome and the address at which the ranks reported.
    pub(crate) fn run(&self, log: &mut EventLog) -> Result<(Outcome, SocketAddr)> {
        let fail = |error: std::io::Error| Error::failed(format!("cannot listen for ranks at {}", self.listen), error);
        let mut server = self.bind().map_err(fail)?;
        if self.ranks <= FEW_RANKS {
            server.set_heartbeat(SHORT_HEARTBEAT);
        }
        server.set_axes(self.axes);
        server.set_history(log.history());
        let address = server.address();
        let file = SupervisorFile::create(log.folder(), address, self.secret);
        if let Err(error) = &file {
            let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
            log.screen.say(&format!("{error}{cause}"));
        }
        let (mut launcher, stderr, stdout) = self.launch(address, &log.screen)?;
        let mut state = State { codes: vec![None; self.ranks], ..State::default() };
        let monitored = self.monitor(&mut server, &mut launcher, &mut state, log);
        // Copy the positions of the ranks before they are told to stop; afterwards they mean nothing.
        let (noticed, ranks) = (Instant::now(), server.ranks().to_vec());
        let status = monitored.as_ref().ok().copied().flatten();
        let (status, messages) = stop_all(&mut server, launcher, &stderr, status, &mut |server, event| {
            self.handle_event(event, server, &mut state, log)
        })?;
        if let Some(stdout) = stdout {
            stdout.finish();
        }
        monitored?;
        Ok((self.outcome(&ranks, state, status, &messages, noticed, log.screen.as_ref()), address))
    }

    /// Listens at the address of the previous attempt, or at another port if that one is taken.
    fn bind(&self) -> std::io::Result<Server> {
        let bind = |address| Server::bind(address, self.secret.clone(), self.ranks, self.number);
        match bind(self.listen) {
            Err(_) if self.listen.port() != 0 => bind(SocketAddr::new(self.listen.ip(), 0)),
            bound => bound,
        }
    }

    fn handle_event(&self, event: Event, server: &mut Server, state: &mut State, log: &mut EventLog) {
        match event {
            Event::Entry(entry) => log.forward(*entry, Some(server)),
            Event::Requested(request) => self.handle_request(request, server),
            event => state.handle_event(event, log.screen.as_ref()),
        }
    }

    /// Carries out a viewer's request, and answers it.
    fn handle_request(&self, request: Request, server: &mut Server) {
        let (order, answer) = match request {
            Request::Save if !self.saves => {
                return server.answer("Not saved: the recipe has no checkpoints.folder.");
            }
            Request::Save => (Order::Checkpoint, "Saving a checkpoint at the end of this step.".to_string()),
            Request::Trace { steps } => {
                let steps = steps.clamp(1, TRACED_STEPS_MAX);
                (Order::Trace { steps }, format!("Tracing the next {steps} steps."))
            }
        };
        match server.order_one(order) {
            true => server.answer(&answer),
            false => server.answer("No rank has joined yet; try again in a moment."),
        }
    }

    /// Monitors the ranks until the launcher exits, and returns its status, or until it has to be stopped, and returns `None`.
    fn monitor(
        &self,
        server: &mut Server,
        launcher: &mut Child,
        state: &mut State,
        log: &mut EventLog,
    ) -> Result<Option<ExitStatus>> {
        let started = Instant::now();
        loop {
            for event in server.poll(POLL)? {
                self.handle_event(event, server, state, log);
            }
            self.track_steps(server, state, log);
            log.screen.refresh();
            if let Some(status) = launcher.try_wait()? {
                return Ok(Some(status));
            }
            if self.signals.should_stop() {
                return Ok(None);
            }
            if self.signals.should_save() && !std::mem::replace(&mut state.has_ordered_save, true) {
                if !self.saves {
                    return Ok(None);
                }
                log.screen.say("Saving a checkpoint before stopping. A second request stops the run at once.");
                server.order(Order::Save);
            }
            if state.codes.iter().all(Option::is_some)
                && state.all_left.get_or_insert_with(Instant::now).elapsed() > LAUNCHER_EXIT_TIMEOUT
            {
                return Ok(None);
            }
            if state.failure.is_none() {
                let silent = server.silent(Instant::now(), self.heartbeat_timeout);
                if !silent.is_empty() {
                    state.failure = Some((Cause::Silent { ranks: silent }, Instant::now()));
                } else if started.elapsed() > JOIN_TIMEOUT && state.joined < self.ranks {
                    state.failure = Some((Cause::NotJoined { ranks: server.not_joined() }, Instant::now()));
                }
            }
            if state.failure.as_ref().is_some_and(|(cause, since)| since.elapsed() > listen_time(cause)) {
                if let Some((Cause::Silent { ranks }, _)) = &mut state.failure {
                    ranks
                        .extend(server.silent(Instant::now(), self.heartbeat_timeout.saturating_sub(HEARTBEAT_SPREAD)));
                    ranks.sort_unstable();
                    ranks.dedup();
                }
                return Ok(None);
            }
        }
    }

    /// Launches the ranks, with the environment that they need to report to this supervisor.
    fn launch(
        &self,
        address: SocketAddr,
        screen: &Arc<dyn Screen>,
    ) -> Result<(Child, LauncherStderr, Option<LauncherStdout>)> {
        let mut launcher = self.command.launcher(self.ranks, self.hosts, self.agent)?;
        launcher.env(SUPERVISOR, address.to_string()).env(SECRET, self.secret.to_hex());
        launcher.env(ATTEMPT, self.number.to_string());
        if let Some(fault) = &self.fault {
            launcher.arg("--fault").arg(fault);
        }
        // In a separate process group, so that signals from the terminal reach only this process, which decides what to tell the ranks.
        std::os::unix::process::CommandExt::process_group(&mut launcher, 0);
        launcher.stdin(Stdio::null()).stderr(Stdio::piped());
        if screen.captures_output() {
            launcher.stdout(Stdio::piped());
        }
        let spawned = launcher.spawn();
        let mut child = spawned.map_err(|error| Error::failed(launcher.get_program().display(), error))?;
        let stderr = child.stderr.take().ok_or(Error::Launcher("standard error"))?;
        let stderr = LauncherStderr::read(stderr, screen.clone());
        let stdout = child.stdout.take().map(|stdout| LauncherStdout::read(stdout, screen.clone()));
        Ok((child, stderr, stdout))
    }

    /// Tracks the steps that ranks report. Once they train again after a failure, reports what the failure cost.
    fn track_steps(&self, server: &mut Server, state: &mut State, log: &mut EventLog) {
        let of_all = |step: fn(&watch::RankStatus) -> u64| server.ranks().iter().map(|rank| step(&rank.status)).max();
        state.last_step = state.last_step.max(of_all(|status| status.step).unwrap_or(0));
        let first = of_all(|status| status.first_step).unwrap_or(0);
        if first == 0 || state.first_step.is_some() {
            return;
        }
        state.first_step = Some(first);
        if let Some(before) = self.last_failure {
            state.lost = before.stopped.elapsed();
            let noticed_s = before.noticed.duration_since(before.stopped).as_secs_f64();
            let (lost_s, repeated_steps) = (state.lost.as_secs_f64(), (before.last_step + 1).saturating_sub(first));
            let repeated = match repeated_steps {
                1 => "1 step".to_string(),
                steps => format!("{steps} steps"),
            };
            log.screen.say(&format!(
                "Resumed at step {first} after {lost_s:.1} s: noticed after {noticed_s:.1} s, restarted and loaded in {:.1} s; repeating \
                 {repeated}.",
                before.noticed.elapsed().as_secs_f64(),
            ));
            let resumed = Resumed { attempt: self.number, step: first, lost_s, noticed_s, repeated_steps };
            log.record(EntryKind::Resumed(resumed), Some(server));
        }
    }

    fn outcome(
        &self,
        ranks: &[RankInfo],
        state: State,
        status: ExitStatus,
        messages: &[String],
        noticed: Instant,
        screen: &dyn Screen,
    ) -> Outcome {
        let all_left = state.codes.iter().all(Option::is_some);
        let worst = state.codes.iter().flatten().copied().max().unwrap_or(0);
        if self.signals.should_stop() {
            return Outcome::Ended { code: INTERRUPTED, lost: state.lost };
        }
        // A run that has trained before may be retried even if it is refused now: a host may be short of memory for a while.
        let is_refused_now = worst == i32::from(REFUSED) && self.last_failure.is_some();
        if all_left && state.failure.is_none() && !is_refused_now {
            return Outcome::Ended { code: worst as u8, lost: state.lost };
        }
        if self.signals.should_save() && !self.saves {
            screen.say("Not saved: the recipe has no checkpoints.folder.");
            return Outcome::Ended {
                code: if self.signals.is_interrupted() { INTERRUPTED } else { 1 },
                lost: state.lost,
            };
        }
        let (cause, stopped) = first_cause(state.failure, ranks, messages, noticed);
        // An error in a run that has never trained would occur again.
        let never_worked = self.last_failure.is_none() && state.first_step.is_none();
        let (mut text, is_final) = match &cause {
            Some(Cause::Failed { kind: FailureKind::Final, text, .. }) => (text.clone(), true),
            // Another attempt would need as much memory.
            Some(Cause::Failed { rank, kind: FailureKind::Memory, text }) => (name_rank(*rank, ranks, text), true),
            Some(Cause::Failed { rank, kind: FailureKind::Error, text }) => {
                (name_rank(*rank, ranks, text), never_worked)
            }
            Some(cause) => (explain(ranks, cause, noticed), false),
            None if is_refused_now => ("The ranks refused to restart for the reason above.".to_string(), false),
            None => (format!("The launcher exited ({status}) before its ranks."), never_worked && state.joined == 0),
        };
        if !messages.is_empty() && matches!(&cause, None | Some(Cause::Died { how: None, .. })) {
            text = format!("{text}\nThe launcher printed:\n{}", messages.join("\n"));
        }
        Outcome::Failed(Failure {
            text,
            final_code: is_final.then_some(1),
            stopped,
            noticed,
            first_step: state.first_step.unwrap_or(0),
            last_step: state.last_step,
            lost_before: state.lost,
        })
    }
}

/// Prefixes an error with its rank, unless it already starts with a rank.
fn name_rank(rank: usize, ranks: &[RankInfo], text: &str) -> String {
    let names_one =
        text.strip_prefix("rank ").is_some_and(|rest| rest.starts_with(|letter: char| letter.is_ascii_digit()));
    let name = || ranks[rank].coordinates.describe_rank(rank);
    if names_one { text.to_string() } else { format!("{}: {text}", name()) }
}

/// Determines the first cause of the failure and when it stopped the ranks, from the reports of the ranks and of the launcher.
fn first_cause(
    reported: Option<(Cause, Instant)>,
    ranks: &[RankInfo],
    messages: &[String],
    noticed: Instant,
) -> (Option<Cause>, Instant) {
    match reported {
        // The launcher knows how a rank died, and which one died first.
        Some((Cause::Died { rank, .. }, when)) => {
            let (rank, how) = first_death(messages).map_or((rank, None), |(rank, how)| (rank, Some(how)));
            (Some(Cause::Died { rank, how }), when)
        }
        Some((Cause::Silent { ranks: silent }, when)) => {
            let heard = silent.iter().filter_map(|&rank| ranks[rank].last_heard).max();
            (Some(Cause::Silent { ranks: silent }), heard.unwrap_or(when))
        }
        Some((cause, when)) => (Some(cause), when),
        None => (first_death(messages).map(|(rank, how)| Cause::Died { rank, how: Some(how) }), noticed),
    }
}

impl State {
    fn handle_event(&mut self, event: Event, screen: &dyn Screen) {
        let cause = match event {
            Event::Joined { .. } => {
                self.joined += 1;
                return;
            }
            Event::Entry(_) | Event::Requested(_) => return,
            Event::Note { text, .. } => return screen.say(&text),
            Event::Refused { rank, reason } => {
                return screen.say(&format!("Refused a connection that claimed to be rank {rank}: {reason}"));
            }
            Event::Malformed { rank, error } => {
                let text = format!("it sent an invalid message: {error}");
                Cause::Failed { rank, kind: FailureKind::Error, text }
            }
            Event::Left { rank, code: Some(code) } => {
                self.codes[rank] = Some(code);
                return;
            }
            Event::Left { rank, code: None } => Cause::Died { rank, how: None },
            Event::Failed { rank, kind, text } => Cause::Failed { rank, kind, text },
        };
        // One failure causes others, so a rank's own error takes precedence over what it reports about other ranks. Among equals the
        // lowest rank counts, whichever reported first.
        let is_better = |(known, _): &(Cause, Instant)| match (&cause, known) {
            (Cause::Failed { rank, .. }, Cause::Failed { rank: known_rank, .. })
                if precedence(&cause) == precedence(known) =>
            {
                rank < known_rank
            }
            _ => precedence(&cause) > precedence(known),
        };
        if self.failure.as_ref().is_none_or(is_better) {
            let when = self.failure.as_ref().map_or_else(Instant::now, |(_, when)| *when);
            self.failure = Some((cause, when));
        }
    }
}

/// How likely a cause is to be the first one. Higher wins.
fn precedence(cause: &Cause) -> u32 {
    match cause {
        Cause::Failed { kind, .. } => match kind {
            FailureKind::Timeout => 1,
            FailureKind::Transport => 2,
            FailureKind::Mismatch => 4,
            FailureKind::Final | FailureKind::Memory | FailureKind::Error | FailureKind::SpotCheck => 5,
        },
        Cause::Died { .. } => 3,
        Cause::Silent { .. } | Cause::NotJoined { .. } => 2,
    }
}

/// How long to wait for further reports.
fn listen_time(cause: &Cause) -> Duration {
    match cause {
        Cause::Died { .. } | Cause::Silent { .. } | Cause::NotJoined { .. } => LISTEN,
        Cause::Failed { .. } => LISTEN_TO_ALL,
    }
}

/// Stops the ranks and the launcher on all hosts, whatever state they are in. Returns the launcher's status and messages.
fn stop_all(
    server: &mut Server,
    mut launcher: Child,
    stderr: &LauncherStderr,
    status: Option<ExitStatus>,
    handle_event: &mut dyn FnMut(&mut Server, Event),
) -> Result<(ExitStatus, Vec<String>)> {
    if let Some(status) = status {
        // The last reports of the ranks may still be on their way.
        for event in server.poll(Duration::from_millis(50))? {
            handle_event(server, event);
        }
        return Ok((status, stderr.messages()));
    }
    stderr.mute();
    server.order(Order::End { reason: "the attempt has ended".to_string() });
    drop(server.poll(Duration::from_millis(10)));
    let own = hostname();
    for rank in server.ranks().iter().filter(|rank| rank.presence != Presence::NotJoined && rank.host == own) {
        // A process that is stopped (SIGSTOP) does not act on orders.
        if let Some(id) = i32::try_from(rank.pid).ok().and_then(Pid::from_raw) {
            let _ = kill_process(id, Signal::KILL);
        }
    }
    let id = i32::try_from(launcher.id()).ok().and_then(Pid::from_raw).ok_or(Error::Launcher("valid process id"))?;
    let mut status = None;
    for signal in [None, Some(Signal::TERM), Some(Signal::KILL)] {
        signal.map(|signal| kill_process_group(id, signal));
        let until = Instant::now() + KILL_TIMEOUT;
        while status.is_none() && Instant::now() < until {
            drop(server.poll(Duration::from_millis(5)));
            status = launcher.try_wait()?;
        }
        if status.is_some() {
            break;
        }
    }
    let status = match status {
        Some(status) => status,
        None => launcher.wait()?,
    };
    Ok((status, stderr.messages()))
}
