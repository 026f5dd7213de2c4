//! A rank's end of its supervisor's channel. A rank that no supervisor has started is not watched, and says what there is to
//! say itself.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Signal, getpid, kill_process};
use shardwise_comm::{Group, Outcome, Record};
use shardwise_journal::Entry;
use shardwise_train::{Asked, Position};
use shardwise_watch::{CallStanding, CallState, Client, FailureKind, Order, Place, Ranks, Secret, Standing, Watch};

use crate::launched::{ATTEMPT, SECRET, SUPERVISOR, own_name};

/// How long a supervisor may take to answer.
const ANSWER: Duration = Duration::from_secs(30);

/// How long a rank that has failed waits to be ended, so that the others can be asked where they are.
const WAIT_FOR_END: Duration = Duration::from_secs(20);

/// A rank that may be watched.
pub(crate) struct Watched {
    watch: Option<Watch>,
    world: Arc<OnceLock<Arc<Record>>>,
}

impl Watched {
    /// Reports to the supervisor that started this rank, if one did. It asks for an end through `asked`.
    pub(crate) fn join(rank: usize, ranks: usize, position: &Arc<Position>, asked: &Asked) -> Result<Self> {
        let world = Arc::new(OnceLock::new());
        let Ok(address) = std::env::var(SUPERVISOR) else { return Ok(Watched { watch: None, world }) };
        let variable = |name: &str| std::env::var(name).with_context(|| format!("{name}, which the supervisor sets"));
        let secret = Secret::from_hex(&variable(SECRET)?)?;
        let place = Place {
            rank: rank as u32,
            ranks: ranks as u32,
            host: own_name(),
            pid: std::process::id(),
            attempt: variable(ATTEMPT)?.parse()?,
        };
        let address = address.parse().with_context(|| format!("{SUPERVISOR} is '{address}'"))?;
        let client = Client::join(&[address], &secret, &place, ANSWER)?;
        let (position, known, asked) = (position.clone(), world.clone(), asked.clone());
        let standing = move || standing(&position, known.get());
        let obey = move |order: Order| match order {
            Order::Save => asked.end.store(true, Ordering::Relaxed),
            Order::Checkpoint => asked.save.store(true, Ordering::Relaxed),
            Order::Trace { steps } => asked.trace.store(steps, Ordering::Relaxed),
            // Whatever the rank is in the middle of: no handler of any library's is to wait for another rank.
            Order::End { .. } => {
                let _ = kill_process(getpid(), Signal::KILL);
            }
        };
        Ok(Watched { watch: Some(client.watch(standing, obey)?), world })
    }

    /// A rank that nobody watches.
    pub(crate) fn nobody() -> Self {
        Watched { watch: None, world: Arc::default() }
    }

    /// From now on it can be said which calls the rank is in.
    pub(crate) fn started(&self, world: &Arc<Group>) {
        drop(self.world.set(world.record().clone()));
    }

    /// Hands on a line of the journal, which the first rank writes.
    pub(crate) fn wrote(&self, entry: &Entry) {
        if let Some(watch) = &self.watch {
            watch.entry(entry);
        }
    }

    /// Says that the rank cannot go on, and why.
    pub(crate) fn failed(&self, rank: usize, kind: FailureKind, text: &str) {
        match &self.watch {
            Some(watch) => {
                watch.failed(kind, text);
                std::thread::sleep(WAIT_FOR_END);
            }
            None if kind == FailureKind::Final => eprintln!("{text}"),
            None => eprintln!("rank {rank}: {text}"),
        }
    }

    /// Takes leave. With no supervisor the code is the process's own, which the launcher is told.
    pub(crate) fn bye(self, code: u8) -> u8 {
        match self.watch {
            Some(watch) => {
                watch.bye(i32::from(code));
                0
            }
            None => code,
        }
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.watch.is_some()
    }
}

/// Where the rank is, in the words of the channel.
fn standing(position: &Position, record: Option<&Arc<Record>>) -> Standing {
    let place = position.read();
    let calls = record.map(|record| record.standing()).unwrap_or_default();
    Standing {
        step: place.step,
        first_step: place.first_step,
        phase: place.phase.to_string(),
        unit: place.unit.unwrap_or_default(),
        in_phase_ms: place.since.as_millis() as u64,
        calls: calls.iter().map(call).collect(),
    }
}

fn call(standing: &shardwise_comm::Standing) -> CallStanding {
    let entry = &standing.entry;
    let call = &entry.call;
    let runs = standing.ranks.progressions();
    CallStanding {
        group: call.group.to_string(),
        ranks: Ranks::of_runs(runs),
        number: call.number,
        verb: call.verb.to_string(),
        label: call.label.to_string(),
        elements: call.elements as u64,
        bytes: (call.elements * call.dtype.bytes()) as u64,
        dtype: call.dtype.to_string(),
        state: match entry.outcome {
            Outcome::Queued => CallState::Queued,
            // A rank whose call has failed got no further than that.
            Outcome::UnderWay | Outcome::Failed(_) => CallState::UnderWay,
            Outcome::Done => CallState::Done,
        },
        for_ms: standing.lasts.as_millis() as u64,
        waits_for: Ranks::of(entry.waits_for.iter().copied()),
    }
}
