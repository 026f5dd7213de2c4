//! A rank's link to its supervisor. A rank that was not started by a supervisor prints its errors itself.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Signal, getpid, kill_process};
use shardwise_comm::{CallStatus, FlightRecorder, Group, GroupStatus};
use shardwise_journal::Entry;
use shardwise_run::{PositionTracker, Requests};
use shardwise_supervisor::launcher_env::{ATTEMPT, SECRET, SUPERVISOR, hostname};
use shardwise_watch::{
    self as watch, CallState, Client, FailureKind, Order, RankIdentity, RankStatus, Ranks, Reporter, Secret,
};

/// How long joining the supervisor may take.
const JOIN_LIMIT: Duration = Duration::from_secs(30);

/// How long a failed rank waits for its order to end. Meanwhile the supervisor collects the status of the others.
const WAIT_FOR_END: Duration = Duration::from_secs(20);

/// A rank's link to its supervisor, if it has one.
pub(crate) struct SupervisorLink {
    reporter: Option<Reporter>,
    world: Arc<OnceLock<Arc<FlightRecorder>>>,
}

impl SupervisorLink {
    /// Joins the supervisor that started this rank, if one did. Its orders set the flags in `asked`.
    pub(crate) fn join(rank: usize, ranks: usize, position: &Arc<PositionTracker>, asked: &Requests) -> Result<Self> {
        let world = Arc::new(OnceLock::new());
        let Ok(address) = std::env::var(SUPERVISOR) else { return Ok(SupervisorLink { reporter: None, world }) };
        let variable = |name: &str| std::env::var(name).with_context(|| format!("{name}, which the supervisor sets"));
        let secret = Secret::from_hex(&variable(SECRET)?)?;
        let identity = RankIdentity {
            rank: rank as u32,
            ranks: ranks as u32,
            host: hostname(),
            pid: std::process::id(),
            attempt: variable(ATTEMPT)?.parse()?,
        };
        let address = address.parse().with_context(|| format!("{SUPERVISOR} is '{address}'"))?;
        let client = Client::join(&[address], &secret, &identity, JOIN_LIMIT)?;
        let (position, known, asked) = (position.clone(), world.clone(), asked.clone());
        let status = move || rank_status(&position, known.get());
        let on_order = move |order: Order| match order {
            Order::Save => asked.stop.store(true, Ordering::Relaxed),
            Order::Checkpoint => asked.save.store(true, Ordering::Relaxed),
            Order::Trace { steps } => asked.trace.store(steps, Ordering::Relaxed),
            // Kill the process: an orderly exit could run handlers of libraries that wait for other ranks.
            Order::End { .. } => {
                let _ = kill_process(getpid(), Signal::KILL);
            }
        };
        Ok(SupervisorLink { reporter: Some(client.start_reporting(status, on_order)?), world })
    }

    /// The link of a rank without a supervisor.
    pub(crate) fn none() -> Self {
        SupervisorLink { reporter: None, world: Arc::default() }
    }

    /// Includes this process's calls in the status from now on.
    pub(crate) fn set_world(&self, world: &Arc<Group>) {
        drop(self.world.set(world.flight_recorder().clone()));
    }

    /// Forwards a journal entry of rank 0.
    pub(crate) fn send_entry(&self, entry: &Entry) {
        if let Some(reporter) = &self.reporter {
            reporter.send_entry(entry);
        }
    }

    /// Reports that the rank failed, to the supervisor or on standard error. Then waits for the supervisor, if there is one, to
    /// end this rank.
    pub(crate) fn report_failure(&self, rank: usize, kind: FailureKind, text: &str) {
        match &self.reporter {
            Some(reporter) => {
                reporter.report_failure(kind, text);
                std::thread::sleep(WAIT_FOR_END);
            }
            None if kind == FailureKind::Final => eprintln!("{text}"),
            None => eprintln!("rank {rank}: {text}"),
        }
    }

    /// Announces the end of the rank, and returns the exit code for the process. With a supervisor that is 0, so that the launcher does
    /// not report a failure; the supervisor learns the real code from the announcement.
    pub(crate) fn bye(self, code: u8) -> u8 {
        match self.reporter {
            Some(reporter) => {
                reporter.bye(i32::from(code));
                0
            }
            None => code,
        }
    }

    pub(crate) fn is_supervised(&self) -> bool {
        self.reporter.is_some()
    }
}

/// The status of the rank, for a heartbeat.
fn rank_status(position: &PositionTracker, record: Option<&Arc<FlightRecorder>>) -> RankStatus {
    let place = position.read();
    let calls = record.map(|record| record.group_status()).unwrap_or_default();
    RankStatus {
        step: place.step,
        first_step: place.first_step,
        phase: place.phase.to_string(),
        unit: place.unit.unwrap_or_default(),
        in_phase_ms: place.since.as_millis() as u64,
        calls: calls.iter().map(call_status).collect(),
    }
}

fn call_status(status: &GroupStatus) -> watch::CallStatus {
    let entry = &status.entry;
    let call = &entry.call;
    let runs = status.ranks.progressions();
    watch::CallStatus {
        group: call.group.to_string(),
        ranks: Ranks::from_runs(runs),
        number: call.number,
        verb: call.verb.to_string(),
        label: call.label.to_string(),
        elements: call.elements as u64,
        bytes: (call.elements * call.dtype.bytes()) as u64,
        dtype: call.dtype.to_string(),
        state: match entry.status {
            CallStatus::Queued => CallState::Queued,
            // A rank whose call failed is still at that call.
            CallStatus::Running | CallStatus::Failed(_) => CallState::InProgress,
            CallStatus::Done => CallState::Done,
        },
        in_state_ms: status.status_age.as_millis() as u64,
        waiting_for: Ranks::from_ranks(entry.waits_for.iter().copied()),
        is_awaited: entry.is_awaited || matches!(entry.status, CallStatus::Failed(_)),
    }
}
