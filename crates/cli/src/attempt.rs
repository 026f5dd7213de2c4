//! One attempt of a run: ranks are started, watched to their end, and swept up.

use std::net::SocketAddr;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use shardwise_journal::{Setback, What};
use shardwise_watch::{self as watch, Cause, Event, FailureKind, Order, Presence, Request, Secret, Server, explain};

use crate::chronicle::Chronicle;
use crate::door::Door;
use crate::hosts::Host;
use crate::launch::Work;
use crate::launched::{ATTEMPT, REFUSED, SECRET, SUPERVISOR, own_name};
use crate::outcry::{Outcry, first_death};
use crate::screen::{Output, Screen};
use crate::supervise::{INTERRUPTED, Signals};

/// How often the launcher and signals are looked after.
const POLL: Duration = Duration::from_millis(20);

/// How long ranks may take to report for the first time: the launcher has to reach all hosts.
const START: Duration = Duration::from_secs(120);

/// After the first sign of a failure: how long to listen for what others say of it.
const LISTEN: Duration = Duration::from_millis(100);
const LISTEN_TO_ALL: Duration = Duration::from_millis(1200);

/// How far ranks that have fallen silent together may be apart.
const BEATS: Duration = Duration::from_secs(1);

/// How long a launcher may stay when all its ranks have said that they are through.
const LINGER: Duration = Duration::from_secs(10);

/// Few ranks say more often where they are.
const FEW_RANKS: usize = 64;
const SHORT_BEAT: Duration = Duration::from_millis(200);

/// The most steps that one who looks on may have traced at once.
const TRACED_STEPS_MAX: u64 = 100;

/// How long a launcher may take to end when its ranks are gone, and when it is asked to.
const LEAVE: Duration = Duration::from_millis(1500);

/// One attempt.
pub(crate) struct Attempt<'a> {
    pub(crate) work: &'a Work<'a>,
    pub(crate) ranks: usize,
    pub(crate) hosts: &'a [Host],
    pub(crate) agent: &'a str,
    pub(crate) listen: SocketAddr,
    pub(crate) secret: &'a Secret,
    pub(crate) number: u64,
    pub(crate) silence: Duration,
    pub(crate) saves: bool,
    pub(crate) signals: &'a Signals,
    pub(crate) fault: Option<String>,
    pub(crate) failed_before: Option<&'a Failure>,
}

/// What became of it.
pub(crate) enum Outcome {
    /// It went as far as it was asked to.
    Ended {
        code: u8,
        lost: Duration,
    },
    Failed(Failure),
}

/// Why an attempt has failed.
pub(crate) struct Failure {
    /// In a paragraph.
    pub(crate) text: String,
    /// With which code the run ends, if another attempt would fail the same way.
    pub(crate) is_final: Option<u8>,
    /// When the ranks stopped working, as far as that is known.
    pub(crate) stopped: Instant,
    /// When that was noticed.
    pub(crate) noticed: Instant,
    /// The first step that the attempt made, or would have; and the last that it was seen at.
    pub(crate) first_step: u64,
    pub(crate) last_step: u64,
    /// What the failure before this one has cost.
    pub(crate) lost_before: Duration,
}

/// What is known of the ranks so far.
#[derive(Default)]
struct Seen {
    /// The first sign of a failure, and when it came.
    failure: Option<(Cause, Instant)>,
    /// The codes with which ranks took their leave.
    codes: Vec<Option<i32>>,
    joined: usize,
    first_step: Option<u64>,
    last_step: u64,
    lost: Duration,
    asked_to_save: bool,
    /// Since when all ranks have taken their leave.
    all_left: Option<Instant>,
}

impl Attempt<'_> {
    /// Runs it to its end. With what became of it, where its ranks reported to.
    pub(crate) fn run(&self, chronicle: &mut Chronicle) -> Result<(Outcome, SocketAddr)> {
        let mut server = self.bind().with_context(|| format!("{}: ranks cannot report there", self.listen))?;
        if self.ranks <= FEW_RANKS {
            server.set_beat(SHORT_BEAT);
        }
        server.set_history(chronicle.history());
        let address = server.address();
        let door = Door::open(chronicle.folder(), address, self.secret);
        if let Err(error) = &door {
            chronicle.screen.say(&format!("{error:#}"));
        }
        let (mut launcher, outcry, output) = self.launch(address, &chronicle.screen)?;
        let mut seen = Seen { codes: vec![None; self.ranks], ..Seen::default() };
        let watched = self.watch(&mut server, &mut launcher, &mut seen, chronicle);
        // What ranks say of where they are is worth nothing once they are told to end.
        let (noticed, standing) = (Instant::now(), server.ranks().to_vec());
        let ended = watched.as_ref().ok().copied().flatten();
        let (status, outcry) = sweep(&mut server, launcher, &outcry, ended, &mut |server, event| {
            self.hear(event, server, &mut seen, chronicle)
        })?;
        if let Some(output) = output {
            output.finish();
        }
        watched?;
        Ok((self.outcome(&standing, seen, status, &outcry, noticed, &chronicle.screen), address))
    }

    /// Where the attempt before listened, if that is still to be had.
    fn bind(&self) -> std::io::Result<Server> {
        let bind = |address| Server::bind(address, self.secret.clone(), self.ranks, self.number);
        match bind(self.listen) {
            Err(_) if self.listen.port() != 0 => bind(SocketAddr::new(self.listen.ip(), 0)),
            bound => bound,
        }
    }

    /// Takes what has happened.
    fn hear(&self, event: Event, server: &mut Server, seen: &mut Seen, chronicle: &mut Chronicle) {
        match event {
            Event::Entry(entry) => chronicle.hear(*entry, Some(server)),
            Event::Asked(request) => self.obey(request, server),
            event => seen.hear(event, &chronicle.screen),
        }
    }

    /// Does what one who looks on asks for, and says what becomes of it.
    fn obey(&self, request: Request, server: &mut Server) {
        let (order, answer) = match request {
            Request::Save if !self.saves => {
                return server.answer("Nothing is saved: the recipe has no checkpoints.folder.");
            }
            Request::Save => (Order::Checkpoint, "A checkpoint is saved at the end of the step.".to_string()),
            Request::Trace { steps } => {
                let steps = steps.clamp(1, TRACED_STEPS_MAX);
                (Order::Trace { steps }, format!("The next {steps} steps are traced."))
            }
        };
        match server.ask_one(order) {
            true => server.answer(&answer),
            false => server.answer("There is no rank yet that could be asked."),
        }
    }

    /// Until the launcher has ended, or has to be: its status in the one case, none in the other.
    fn watch(
        &self,
        server: &mut Server,
        launcher: &mut Child,
        seen: &mut Seen,
        chronicle: &mut Chronicle,
    ) -> Result<Option<ExitStatus>> {
        let began = Instant::now();
        loop {
            for event in server.poll(POLL)? {
                self.hear(event, server, seen, chronicle);
            }
            self.look_at_steps(server, seen, chronicle);
            chronicle.screen.refresh();
            if let Some(status) = launcher.try_wait()? {
                return Ok(Some(status));
            }
            if self.signals.end() {
                return Ok(None);
            }
            if self.signals.save() && !std::mem::replace(&mut seen.asked_to_save, true) {
                if !self.saves {
                    return Ok(None);
                }
                chronicle.screen.say("It was asked to end, and saves first; asked once more, it ends at once.");
                server.order(Order::Save);
            }
            if seen.codes.iter().all(Option::is_some)
                && seen.all_left.get_or_insert_with(Instant::now).elapsed() > LINGER
            {
                return Ok(None);
            }
            if seen.failure.is_none() {
                let silent = server.silent(Instant::now(), self.silence);
                if !silent.is_empty() {
                    seen.failure = Some((Cause::Silent { ranks: silent }, Instant::now()));
                } else if began.elapsed() > START && seen.joined < self.ranks {
                    seen.failure = Some((Cause::Absent { ranks: server.awaited() }, Instant::now()));
                }
            }
            if seen.failure.as_ref().is_some_and(|(cause, since)| since.elapsed() > patience(cause)) {
                if let Some((Cause::Silent { ranks }, _)) = &mut seen.failure {
                    // Ranks of a lost host fall silent within a beat or two.
                    ranks.extend(server.silent(Instant::now(), self.silence.saturating_sub(BEATS)));
                    ranks.sort_unstable();
                    ranks.dedup();
                }
                return Ok(None);
            }
        }
    }

    /// Starts the ranks, with what they need to report.
    fn launch(&self, address: SocketAddr, screen: &Screen) -> Result<(Child, Outcry, Option<Output>)> {
        let mut launcher = self.work.launcher(self.ranks, self.hosts, self.agent)?;
        launcher.env(SUPERVISOR, address.to_string()).env(SECRET, self.secret.to_hex());
        launcher.env(ATTEMPT, self.number.to_string());
        if let Some(fault) = &self.fault {
            launcher.arg("--fault").arg(fault);
        }
        // A group of its own: what a terminal sends to ours, and what is for the ranks, is decided here.
        std::os::unix::process::CommandExt::process_group(&mut launcher, 0);
        launcher.stdin(Stdio::null()).stderr(Stdio::piped());
        if let Screen::Bar(_) = screen {
            launcher.stdout(Stdio::piped());
        }
        let mut child = launcher.spawn().with_context(|| launcher.get_program().display().to_string())?;
        let outcry = Outcry::of(child.stderr.take().context("the launcher's standard error")?, screen.clone());
        let output = match (screen, child.stdout.take()) {
            (Screen::Bar(bar), Some(stdout)) => Some(Output::of(stdout, bar.clone())),
            _ => None,
        };
        Ok((child, outcry, output))
    }

    /// Notes where the ranks are, and says what the failure before has cost once they are at work again.
    fn look_at_steps(&self, server: &mut Server, seen: &mut Seen, chronicle: &mut Chronicle) {
        let of_all = |step: fn(&watch::Standing) -> u64| server.ranks().iter().map(|rank| step(&rank.standing)).max();
        seen.last_step = seen.last_step.max(of_all(|standing| standing.step).unwrap_or(0));
        let first = of_all(|standing| standing.first_step).unwrap_or(0);
        if first == 0 || seen.first_step.is_some() {
            return;
        }
        seen.first_step = Some(first);
        if let Some(before) = self.failed_before {
            seen.lost = before.stopped.elapsed();
            let noticed_s = before.noticed.duration_since(before.stopped).as_secs_f64();
            let (lost_s, steps_again) = (seen.lost.as_secs_f64(), (before.last_step + 1).saturating_sub(first));
            let again = match steps_again {
                1 => "1 step is".to_string(),
                steps => format!("{steps} steps are"),
            };
            chronicle.screen.say(&format!(
                "At work again at step {first} after {lost_s:.1} s: noticed after {noticed_s:.1} s, started and loaded in {:.1} s; {again} \
                 made again.",
                before.noticed.elapsed().as_secs_f64(),
            ));
            let setback = Setback { attempt: self.number, step: first, lost_s, noticed_s, steps_again };
            chronicle.note(What::Again(setback), Some(server));
        }
    }

    fn outcome(
        &self,
        ranks: &[watch::Seen],
        seen: Seen,
        status: ExitStatus,
        outcry: &[String],
        noticed: Instant,
        screen: &Screen,
    ) -> Outcome {
        let all_left = seen.codes.iter().all(Option::is_some);
        let worst = seen.codes.iter().flatten().copied().max().unwrap_or(0);
        if self.signals.end() {
            return Outcome::Ended { code: INTERRUPTED, lost: seen.lost };
        }
        // A run that has worked before is not refused for good: a host may lack memory for now.
        let is_refused_now = worst == i32::from(REFUSED) && self.failed_before.is_some();
        if all_left && seen.failure.is_none() && !is_refused_now {
            return Outcome::Ended { code: worst as u8, lost: seen.lost };
        }
        if self.signals.save() && !self.saves {
            screen.say("Nothing is saved: the recipe has no checkpoints.folder.");
            return Outcome::Ended { code: if self.signals.interrupted() { INTERRUPTED } else { 1 }, lost: seen.lost };
        }
        let (cause, stopped) = first_cause(seen.failure, ranks, outcry, noticed);
        // What has not worked once, and not for want of a rank, will not the next time.
        let never_worked = self.failed_before.is_none() && seen.first_step.is_none();
        let (mut text, is_final) = match &cause {
            Some(Cause::Failed { kind: FailureKind::Final, text, .. }) => (text.clone(), true),
            // Another attempt would need as much.
            Some(Cause::Failed { rank, kind: FailureKind::Memory, text }) => (of_rank(*rank, text), true),
            Some(Cause::Failed { rank, kind: FailureKind::Error, text }) => (of_rank(*rank, text), never_worked),
            Some(cause) => (explain(ranks, cause, noticed), false),
            None if is_refused_now => {
                ("The ranks have refused to start again; what they miss is above.".to_string(), false)
            }
            None => {
                (format!("The launcher has ended ({status}) before its ranks had."), never_worked && seen.joined == 0)
            }
        };
        if !outcry.is_empty() && matches!(&cause, None | Some(Cause::Died { how: None, .. })) {
            text = format!("{text}\nThe launcher says:\n{}", outcry.join("\n"));
        }
        Outcome::Failed(Failure {
            text,
            is_final: is_final.then_some(1),
            stopped,
            noticed,
            first_step: seen.first_step.unwrap_or(0),
            last_step: seen.last_step,
            lost_before: seen.lost,
        })
    }
}

/// What a rank said, which may be what it heard from another one: then that one is named already.
fn of_rank(rank: usize, text: &str) -> String {
    let names_one =
        text.strip_prefix("rank ").is_some_and(|rest| rest.starts_with(|letter: char| letter.is_ascii_digit()));
    if names_one { text.to_string() } else { format!("rank {rank}: {text}") }
}

/// What came first, and when the ranks stopped working for it: as they have told, and as the launcher has.
fn first_cause(
    told: Option<(Cause, Instant)>,
    ranks: &[watch::Seen],
    outcry: &[String],
    noticed: Instant,
) -> (Option<Cause>, Instant) {
    match told {
        // A launcher knows how a rank has died, and which was the first.
        Some((Cause::Died { rank, .. }, when)) => {
            let (rank, how) = first_death(outcry).map_or((rank, None), |(rank, how)| (rank, Some(how)));
            (Some(Cause::Died { rank, how }), when)
        }
        Some((Cause::Silent { ranks: silent }, when)) => {
            let heard = silent.iter().filter_map(|&rank| ranks[rank].heard).max();
            (Some(Cause::Silent { ranks: silent }), heard.unwrap_or(when))
        }
        Some((cause, when)) => (Some(cause), when),
        None => (first_death(outcry).map(|(rank, how)| Cause::Died { rank, how: Some(how) }), noticed),
    }
}

impl Seen {
    fn hear(&mut self, event: Event, screen: &Screen) {
        let cause = match event {
            Event::Joined { .. } => {
                self.joined += 1;
                return;
            }
            Event::Entry(_) | Event::Asked(_) => return,
            Event::Note { text, .. } => return screen.say(&text),
            Event::Refused { rank, reason } => {
                return screen.say(&format!("Someone who wanted to be rank {rank} was refused: {reason}"));
            }
            Event::Malformed { rank, error } => {
                let text = format!("it has sent what is no message: {error}");
                Cause::Failed { rank, kind: FailureKind::Error, text }
            }
            Event::Left { rank, code: Some(code) } => {
                self.codes[rank] = Some(code);
                return;
            }
            Event::Left { rank, code: None } => Cause::Died { rank, how: None },
            Event::Failed { rank, kind, text } => Cause::Failed { rank, kind, text },
        };
        // One failure makes others: what a rank says of its own comes before what it says of others.
        // Of ranks with the same to say it is the first that says it, whichever was heard first.
        let is_worse = |(known, _): &(Cause, Instant)| match (&cause, known) {
            (Cause::Failed { rank, .. }, Cause::Failed { rank: known_rank, .. }) if weight(&cause) == weight(known) => {
                rank < known_rank
            }
            _ => weight(&cause) > weight(known),
        };
        if self.failure.as_ref().is_none_or(is_worse) {
            let when = self.failure.as_ref().map_or_else(Instant::now, |(_, when)| *when);
            self.failure = Some((cause, when));
        }
    }
}

/// How much a sign says of what came first.
fn weight(cause: &Cause) -> u32 {
    match cause {
        Cause::Failed { kind, .. } => match kind {
            FailureKind::Timeout => 1,
            FailureKind::Transport => 2,
            FailureKind::Mismatch => 4,
            FailureKind::Final | FailureKind::Memory | FailureKind::Error | FailureKind::SpotCheck => 5,
        },
        Cause::Died { .. } => 3,
        Cause::Silent { .. } | Cause::Absent { .. } => 2,
    }
}

/// How long to listen after such a sign.
fn patience(cause: &Cause) -> Duration {
    match cause {
        Cause::Died { .. } | Cause::Silent { .. } | Cause::Absent { .. } => LISTEN,
        // Where all the others are is what explains it.
        Cause::Failed { .. } => LISTEN_TO_ALL,
    }
}

/// Ends the ranks and the launcher, wherever they are, and whatever state they are in.
fn sweep(
    server: &mut Server,
    mut launcher: Child,
    outcry: &Outcry,
    status: Option<ExitStatus>,
    hear: &mut dyn FnMut(&mut Server, Event),
) -> Result<(ExitStatus, Vec<String>)> {
    if let Some(status) = status {
        // The last words of ranks may still be on their way.
        for event in server.poll(Duration::from_millis(50))? {
            hear(server, event);
        }
        return Ok((status, outcry.heard()));
    }
    outcry.mute();
    server.order(Order::End { reason: "the attempt has ended".to_string() });
    drop(server.poll(Duration::from_millis(10)));
    let own = own_name();
    for rank in server.ranks().iter().filter(|rank| rank.presence != Presence::Awaited && rank.host == own) {
        // One that is stopped takes no orders.
        if let Some(id) = i32::try_from(rank.pid).ok().and_then(Pid::from_raw) {
            let _ = kill_process(id, Signal::KILL);
        }
    }
    let id = i32::try_from(launcher.id()).ok().and_then(Pid::from_raw).context("the launcher's process")?;
    let mut status = None;
    for signal in [None, Some(Signal::TERM), Some(Signal::KILL)] {
        signal.map(|signal| kill_process_group(id, signal));
        let until = Instant::now() + LEAVE;
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
    Ok((status, outcry.heard()))
}
