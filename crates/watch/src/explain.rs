//! Explains a failure to people, in one paragraph.
//!
//! When a rank hangs, other ranks notice it first: they wait for it and time out. So the reported error is seldom the cause. The
//! explanation compares the last status of all ranks: which ranks have entered which call of which group (`situation.rs`), whether
//! it is the same call on all of them (`mismatch.rs`), and what the others are doing instead.
//!
//! These are pure functions of the known status and of the time; they send nothing and decide nothing. The result is as old as the last
//! heartbeats. The work per rank is constant, whatever the world size.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use shardwise_journal::format::{format_elapsed, join_list};

use crate::ranks::name_ranks;
use crate::situation::{ContainsSorted, Holdup, MessageWait, Situation, Stall, is_open, millis, own_call, sorted};
use crate::wording::{
    DESCRIBED_MAX, at_step, capitalize, describe_call, describe_message, has_or_have, in_phase, is_or_are, last_heard,
    list_names, lost_hosts, quote,
};
use crate::{CallStatus, FailureKind, Presence, RankInfo, RankStatus};

/// How late heartbeats may be on a busy host. A longer silence is mentioned.
const LATE: Duration = Duration::from_secs(5);
/// The maximum number of ranks to look up in the `waiting_for` sets of other ranks.
const SEARCHED_MAX: usize = 16;

/// Why an attempt is being ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A rank's process ended unexpectedly.
    Died {
        /// The rank that died.
        rank: usize,
        /// How it ended, if that is known: `signal 9, killed`.
        how: Option<String>,
    },
    /// Ranks are connected but send no heartbeats.
    Silent {
        /// The silent ranks.
        ranks: Vec<usize>,
    },
    /// Ranks have not joined in time.
    NotJoined {
        /// The missing ranks.
        ranks: Vec<usize>,
    },
    /// A rank reported a failure.
    Failed {
        /// The rank that reported it.
        rank: usize,
        /// The kind of failure.
        kind: FailureKind,
        /// The rank's message.
        text: String,
    },
}

/// Explains what happened, as far as the last status of the ranks shows it.
///
/// `ranks` are all ranks of the run, as [`Server::ranks`](crate::Server::ranks) returns them.
pub fn explain(ranks: &[RankInfo], cause: &Cause, now: Instant) -> String {
    let situation = Situation::new(ranks, now);
    let sentences = match cause {
        Cause::Died { rank, how } => situation.explain_death(*rank, how.as_deref()),
        Cause::Silent { ranks } => situation.explain_silence(&existing(ranks, situation.ranks)),
        Cause::NotJoined { ranks } => situation.explain_absence(&existing(ranks, situation.ranks)),
        Cause::Failed { rank, kind: FailureKind::Timeout, text } => situation.explain_timeout(*rank, text),
        Cause::Failed { rank, kind, text } => situation.explain_failure(*rank, *kind, text),
    };
    let mut sentences = sentences.into_iter();
    let first = sentences.next().unwrap_or_default();
    sentences.fold(first, |text, next| format!("{text} {}", capitalize(&next)))
}

/// Who waits, for whom, in which call or for which message, and for how long.
pub(crate) type DescribedWait = (String, String, String, Duration);

impl Situation<'_> {
    /// Lists the calls that some ranks have entered and others have not, the longest wait first.
    pub(crate) fn describe_stalls(&self) -> Vec<DescribedWait> {
        let mut stalls = self.stalls();
        stalls.sort_by_key(|stall| std::cmp::Reverse(stall.age));
        let describe = |Stall { call, waiting, missing, age }: Stall<'_>| {
            (self.name_ranks(&waiting), self.name_ranks(&missing), describe_call(call), age)
        };
        stalls.into_iter().map(describe).collect()
    }

    /// Lists the stages of a pipeline that wait for others, the longest wait first.
    pub(crate) fn describe_stage_waits(&self) -> Vec<DescribedWait> {
        let describe = |MessageWait { call, rank, peer, age }: MessageWait<'_>| {
            (self.name_stage(rank), self.name_stage(peer), describe_message(call), age)
        };
        self.stage_waits().into_iter().map(describe).collect()
    }
}

impl Situation<'_> {
    fn explain_death(&self, rank: usize, how: Option<&str>) -> Vec<String> {
        let Some(info) = self.ranks.get(rank) else { return vec![format!("rank {rank} died.")] };
        let dead: Vec<usize> = (0..self.ranks.len())
            .filter(|&other| other == rank || self.ranks[other].presence == Presence::Left { code: None })
            .collect();
        let manner = how.map_or_else(|| "without reporting an error".to_string(), |how| format!("({how})"));
        let (hosts, on_hosts, _) = self.split_lost_hosts(&dead);
        if hosts.iter().any(|host| *host == info.host) {
            let first = format!("{} ({}) died {manner}.", lost_hosts(&hosts), self.list_ranks(&on_hosts));
            return [Some(first), self.explain_waiters(&on_hosts), self.find_mismatch()]
                .into_iter()
                .flatten()
                .collect();
        }
        let mut first = format!("{} died {manner}{}", self.identify(rank), last_heard(&info.status));
        if let Some(stall) = self.stall_for(&[rank]) {
            let waiting = self.name_ranks(&stall.waiting);
            first += &format!(", while {waiting} waited for it in {}", describe_call(stall.call));
        } else if let Some(waits) = self.describe_message_waits(&[rank], "waited") {
            first += &format!(", while {waits}");
        } else if let Some(call) = own_call(&info.status) {
            first += &format!(", in {}", describe_call(call));
        }
        [Some(first + "."), self.find_mismatch()].into_iter().flatten().collect()
    }

    fn explain_silence(&self, silent: &[usize]) -> Vec<String> {
        let connected = self.ranks.iter().filter(|info| info.presence == Presence::Connected).count();
        if silent.len() > 1 && silent.len() == connected {
            let first = format!(
                "none of the {connected} ranks has sent a heartbeat {}: the supervisor's own host or network is more likely at \
                 fault than all ranks at once.",
                self.silence(silent)
            );
            return vec![first];
        }
        let (hosts, on_hosts, others) = self.split_lost_hosts(silent);
        let mut sentences = Vec::new();
        if !hosts.is_empty() {
            let (hosts, ranks, silence) = (lost_hosts(&hosts), self.list_ranks(&on_hosts), self.silence(&on_hosts));
            sentences.push(format!("{hosts} ({ranks}) have sent no heartbeat {silence}."));
        }
        match others[..] {
            [] => {}
            [rank] => {
                let (who, silence) = (self.identify(rank), self.silence(&others));
                let position = at_step(&self.ranks[rank].status);
                sentences.push(format!("{who} has sent no heartbeat {silence}; it was last heard {position}."));
            }
            [..] => {
                let (who, silence) = (self.count_ranks(&others), self.silence(&others));
                let first = format!("{who} have sent no heartbeat {silence}");
                let position = |&rank: &usize| format!("{} {}", self.identify(rank), at_step(&self.ranks[rank].status));
                sentences.push(if others.len() <= DESCRIBED_MAX {
                    let positions: Vec<String> = others.iter().map(position).collect();
                    format!("{first}; last heard: {}.", join_list(&positions))
                } else {
                    let earliest = others.iter().min_by_key(|&&rank| (self.ranks[rank].last_heard, rank));
                    let earliest = earliest.map(position).unwrap_or_default();
                    format!("{first}; the first to fall silent was {earliest}.")
                });
            }
        }
        sentences.extend(self.explain_waiters(silent));
        sentences.extend(self.find_mismatch());
        sentences
    }

    fn explain_absence(&self, absent: &[usize]) -> Vec<String> {
        let connected: Vec<usize> =
            (0..self.ranks.len()).filter(|&rank| self.ranks[rank].presence == Presence::Connected).collect();
        let first = format!("{} never joined the run", self.count_ranks(absent));
        vec![match connected[..] {
            [] => format!("{first}; no rank is connected."),
            _ => {
                let (verb, hosts) = (is_or_are(&connected), self.name_hosts(&connected));
                format!("{first}; {} {verb} connected, on {hosts}.", self.name_ranks(&connected))
            }
        }]
    }

    fn explain_failure(&self, rank: usize, kind: FailureKind, text: &str) -> Vec<String> {
        if kind.is_collective() {
            return vec![format!("{}.", quote(text))];
        }
        let position = self.ranks.get(rank).map(|info| format!(" {}", at_step(&info.status))).unwrap_or_default();
        let first = format!("{} failed{position} ({kind}): {}.", self.identify(rank), quote(text));
        [Some(first), self.find_mismatch()].into_iter().flatten().collect()
    }

    /// Explains a timeout. The rank that times out is not at fault, but one that never entered the call, or entered a different one.
    fn explain_timeout(&self, rank: usize, text: &str) -> Vec<String> {
        let mut sentences = vec![format!("{} timed out: {}.", self.identify(rank), quote(text))];
        if let Some(mismatch) = self.find_mismatch() {
            sentences.push(mismatch);
        } else if let Some(holdup) = self.root_holdup() {
            match holdup {
                Holdup::Stall(Stall { call, waiting, missing, age }) => {
                    let (who, have, age) = (self.name_ranks(&waiting), has_or_have(&waiting), format_elapsed(age));
                    sentences.push(format!("{who} {have} been waiting in {} for {age}.", describe_call(call)));
                    sentences.extend(self.never_entered(&missing));
                }
                Holdup::Message(wait) => {
                    // The age of a call that failed counts from its failure, so it says nothing here.
                    sentences.push(format!("{}.", self.describe_message_wait(&wait, "waits")));
                    sentences.push(format!("{} {}.", self.identify(wait.peer), self.activity(wait.peer)));
                }
            }
        } else if let Some(call) = self.ranks.get(rank).and_then(|info| own_call(&info.status)) {
            let waiting_for: Vec<usize> = sorted(call.waiting_for.iter(self.ranks.len()));
            let waiting_for = match waiting_for[..] {
                [] => String::new(),
                _ => {
                    let (ranks, hosts) = (self.name_ranks(&waiting_for), self.name_hosts(&waiting_for));
                    format!(" The call is waiting for {ranks}, on {hosts}.")
                }
            };
            sentences.push(format!(
                "all ranks of the group have entered {}, so check the network between them first.{waiting_for}",
                describe_call(call)
            ));
        }
        sentences
    }

    /// Describes what the ranks that have not entered a call are doing.
    fn never_entered(&self, missing: &[usize]) -> Vec<String> {
        if missing.len() <= DESCRIBED_MAX {
            return missing
                .iter()
                .map(|&rank| format!("{} never entered it: it {}.", self.identify(rank), self.activity(rank)))
                .collect();
        }
        // Ranks that do the same thing share a sentence, because they often have the same cause: a host's slow disk, a long phase.
        let mut activities: HashMap<String, Vec<usize>> = HashMap::new();
        for &rank in missing {
            let RankStatus { step, phase, .. } = &self.ranks[rank].status;
            let activity = match self.ranks[rank].presence {
                Presence::NotJoined => "never joined the run".to_string(),
                Presence::Left { .. } => "left the run".to_string(),
                Presence::Connected if phase.is_empty() => "have not started their first step".to_string(),
                Presence::Connected => format!("are in {phase} at step {step}"),
            };
            activities.entry(activity).or_default().push(rank);
        }
        let mut activities: Vec<(String, Vec<usize>)> = activities.into_iter().collect();
        activities.sort_by_key(|(_, ranks)| (usize::MAX - ranks.len(), ranks[0]));
        let shown = activities.iter().take(DESCRIBED_MAX).map(|(activity, ranks)| match ranks[..] {
            [rank] => format!("{} {}", self.identify(rank), self.activity(rank)),
            _ => format!("{} {activity}", self.name_ranks(ranks)),
        });
        let shown: Vec<String> = shown.collect();
        vec![format!("{} never entered it: {}.", self.count_ranks(missing), shown.join("; "))]
    }

    /// Describes what a rank is doing, as the predicate of a sentence.
    fn activity(&self, rank: usize) -> String {
        let RankInfo { status, presence, .. } = &self.ranks[rank];
        let since = self.since_heard(rank);
        let late =
            if since > LATE { format!(", and was last heard {} ago", format_elapsed(since)) } else { String::new() };
        match (presence, own_call(status)) {
            (Presence::NotJoined, _) => "never joined the run".to_string(),
            (Presence::Left { code: None }, _) => format!("died{}", last_heard(status)),
            (Presence::Left { code: Some(code) }, _) => format!("exited with code {code}, {}", at_step(status)),
            (Presence::Connected, Some(call)) => {
                let age = format_elapsed(millis(call.in_state_ms) + since);
                format!("is itself waiting in {}, for {age} so far{late}", describe_call(call))
            }
            (Presence::Connected, None) if status.phase.is_empty() => format!("has not started its first step{late}"),
            (Presence::Connected, None) => {
                let age = format_elapsed(millis(status.in_phase_ms) + since);
                format!("has been {} for {age}{late}", in_phase(status))
            }
        }
    }

    /// Describes which ranks are waiting for these, and in which call; otherwise, the call that a single rank was in.
    fn explain_waiters(&self, ranks: &[usize]) -> Option<String> {
        let it = |it: &str, they: &str| if ranks.len() == 1 { it.to_string() } else { they.to_string() };
        if let Some(stall) = self.stall_for(ranks) {
            let missing: Vec<usize> =
                stall.missing.iter().copied().filter(|rank| ranks.contains_sorted(rank)).collect();
            let who = if missing.len() == ranks.len() { it("it", "they") } else { self.name_ranks(&missing) };
            let (waiting, are) = (self.name_ranks(&stall.waiting), is_or_are(&stall.waiting));
            return Some(format!("{who} never entered {}, where {waiting} {are} waiting.", describe_call(stall.call)));
        }
        if let Some(waits) = self.describe_message_waits(ranks, "waits") {
            return Some(format!("{waits}."));
        }
        // A few of a thousand silent ranks are enough to show who is waiting. Looking up all of them would take quadratic time.
        let waits = |call: &CallStatus| ranks.iter().take(SEARCHED_MAX).any(|&rank| call.waiting_for.contains(rank));
        let calls = self.groups.iter().flat_map(|group| &group.calls);
        let waiting = calls.filter(|(rank, call)| !ranks.contains_sorted(rank) && is_open(call) && waits(call));
        if let Some(&(_, call)) = waiting.clone().next() {
            let with_it = waiting.filter(|(_, other)| other.group == call.group && other.number == call.number);
            let who = sorted(with_it.map(|&(rank, _)| rank));
            let (waiting, are, call) = (self.name_ranks(&who), is_or_are(&who), describe_call(call));
            let (them, entered) = (it("it", "them"), it("it has entered", "they have entered"));
            return Some(format!("{waiting} {are} waiting for {them} in {call}, which {entered}."));
        }
        let [rank] = ranks else { return None };
        own_call(&self.ranks[*rank].status).map(|call| format!("it was in {}.", describe_call(call)))
    }

    fn name_hosts(&self, ranks: &[usize]) -> String {
        let hosts = self.hosts(ranks);
        format!("{} {}", if hosts.len() == 1 { "host" } else { "hosts" }, list_names(&hosts))
    }

    /// Describes which stages, or ranks, wait for messages to or from these ranks.
    fn describe_message_waits(&self, ranks: &[usize], verb: &str) -> Option<String> {
        let is_theirs =
            |wait: &MessageWait<'_>| ranks.contains_sorted(&wait.peer) && !ranks.contains_sorted(&wait.rank);
        let mut waits: Vec<String> = Vec::new();
        for wait in self.message_waits().iter().filter(|wait| is_theirs(wait)) {
            let text = self.describe_message_wait(wait, verb);
            if waits.len() < DESCRIBED_MAX && !waits.contains(&text) {
                waits.push(text);
            }
        }
        (!waits.is_empty()).then(|| join_list(&waits))
    }

    /// `stage 1 waits for stage 0 (activations of block.3)`.
    fn describe_message_wait(&self, wait: &MessageWait<'_>, verb: &str) -> String {
        let (rank, peer) = (self.name_stage(wait.rank), self.name_stage(wait.peer));
        format!("{rank} {verb} for {peer} ({})", describe_message(wait.call))
    }

    /// `stage 1`, or the rank itself in a run without stages.
    fn name_stage(&self, rank: usize) -> String {
        self.ranks[rank].coordinates.stage.map_or_else(|| format!("rank {rank}"), |stage| format!("stage {stage}"))
    }

    /// `rank 3 (host b, process 4711)`, or `rank 3 (stage 1, host b, process 4711)`.
    fn identify(&self, rank: usize) -> String {
        let mut details = self.details(&[rank]);
        if let Some(RankInfo { host, pid, .. }) = self.ranks.get(rank).filter(|info| !info.host.is_empty()) {
            details.extend([format!("host {host}"), format!("process {pid}")]);
        }
        add_details(format!("rank {rank}"), &details)
    }

    /// `ranks 4-7`, or `ranks 4-7 (stage 1)`.
    pub(crate) fn name_ranks(&self, ranks: &[usize]) -> String {
        add_details(name_ranks(ranks), &self.details(ranks))
    }

    /// `ranks 4-7, stage 1`, for use in parentheses.
    fn list_ranks(&self, ranks: &[usize]) -> String {
        [vec![name_ranks(ranks)], self.details(ranks)].concat().join(", ")
    }

    /// `ranks 0, 3, 6, 9, 12 and 3329 more (3334 of 10000)`: with their number, if there are too many for a list to show it.
    fn count_ranks(&self, ranks: &[usize]) -> String {
        let mut details = self.details(ranks);
        if ranks.len() > DESCRIBED_MAX {
            details.push(format!("{} of {}", ranks.len(), self.ranks.len()));
        }
        add_details(name_ranks(ranks), &details)
    }

    /// The coordinates that ranks have in common, if there are any.
    fn details(&self, ranks: &[usize]) -> Vec<String> {
        let shared = self.shared_coordinates(ranks).to_string();
        if shared.is_empty() { Vec::new() } else { vec![shared] }
    }

    /// The time since the last heartbeats of these ranks: `for 31 s`.
    fn silence(&self, ranks: &[usize]) -> String {
        let ages = ranks.iter().map(|&rank| self.since_heard(rank));
        let (shortest, longest) = (ages.clone().min().unwrap_or_default(), ages.max().unwrap_or_default());
        match (format_elapsed(shortest), format_elapsed(longest)) {
            (short, long) if short == long => format!("for {long}"),
            (short, long) => format!("for {short} to {long}"),
        }
    }
}

/// Appends details in parentheses, if there are any.
fn add_details(name: String, details: &[String]) -> String {
    if details.is_empty() { name } else { format!("{name} ({})", details.join(", ")) }
}

/// Sorts ranks, and drops those beyond the world size.
fn existing(ranks: &[usize], all: &[RankInfo]) -> Vec<usize> {
    sorted(ranks.iter().copied().filter(|&rank| rank < all.len()))
}

#[cfg(test)]
mod tests;
