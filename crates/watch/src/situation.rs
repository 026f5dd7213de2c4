//! Who waits for whom, according to the last status of all ranks.
//!
//! [`explain`](crate::explain()) turns this into sentences. The work per rank is constant, whatever the world size.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::{CallState, CallStatus, Coordinates, RankInfo, RankStatus, Ranks};

/// The status of all ranks, with their collective calls by group.
pub(crate) struct Situation<'a> {
    pub(crate) ranks: &'a [RankInfo],
    now: Instant,
    pub(crate) groups: Vec<Group<'a>>,
}

/// The latest collective calls of one group, by rank.
pub(crate) struct Group<'a> {
    members: &'a Ranks,
    pub(crate) calls: Vec<(usize, &'a CallStatus)>,
}

/// A call that some ranks of its group have entered and others have not.
pub(crate) struct Stall<'a> {
    pub(crate) call: &'a CallStatus,
    pub(crate) waiting: Vec<usize>,
    pub(crate) missing: Vec<usize>,
    /// How long the first of them has been waiting.
    pub(crate) age: Duration,
}

/// A message that a rank is waiting to receive, or to see received.
pub(crate) struct MessageWait<'a> {
    pub(crate) call: &'a CallStatus,
    pub(crate) rank: usize,
    /// The other end of the message.
    pub(crate) peer: usize,
    /// How long the rank has been waiting.
    pub(crate) age: Duration,
}

/// What holds ranks up.
pub(crate) enum Holdup<'a> {
    Stall(Stall<'a>),
    Message(MessageWait<'a>),
}

impl Holdup<'_> {
    /// The ranks that others are waiting for.
    fn missing(&self) -> &[usize] {
        match self {
            Holdup::Stall(stall) => &stall.missing,
            Holdup::Message(wait) => std::slice::from_ref(&wait.peer),
        }
    }

    /// The ranks that are waiting.
    fn waiting(&self) -> &[usize] {
        match self {
            Holdup::Stall(stall) => &stall.waiting,
            Holdup::Message(wait) => std::slice::from_ref(&wait.rank),
        }
    }

    fn age(&self) -> Duration {
        match self {
            Holdup::Stall(stall) => stall.age,
            Holdup::Message(wait) => wait.age,
        }
    }
}

impl<'a> Situation<'a> {
    pub(crate) fn new(ranks: &'a [RankInfo], now: Instant) -> Self {
        let mut groups: Vec<Group<'a>> = Vec::new();
        let mut indices: HashMap<&str, usize> = HashMap::new();
        for (rank, info) in ranks.iter().enumerate() {
            for call in info.status.calls.iter().filter(|call| !is_message(call)) {
                let index = *indices.entry(&call.group).or_insert(groups.len());
                if index == groups.len() {
                    groups.push(Group { members: &call.ranks, calls: Vec::new() });
                }
                groups[index].calls.push((rank, call));
            }
        }
        Situation { ranks, now, groups }
    }

    /// The longest stall that one of these ranks causes.
    pub(crate) fn stall_for(&self, ranks: &[usize]) -> Option<Stall<'a>> {
        let is_caused = |stall: &Stall<'_>| stall.missing.iter().any(|rank| ranks.contains_sorted(rank));
        let without = |mut stall: Stall<'a>| {
            stall.waiting.retain(|rank| !ranks.contains_sorted(rank));
            stall
        };
        let stalls = self.stalls().into_iter().filter(is_caused).map(without).filter(|stall| !stall.waiting.is_empty());
        stalls.max_by_key(|stall| stall.age)
    }

    /// The holdup that caused the others: one whose missing ranks include a rank that is not itself waiting. If all ranks wait for
    /// each other, the longest holdup.
    pub(crate) fn root_holdup(&self) -> Option<Holdup<'a>> {
        let messages = self.message_waits().into_iter().map(Holdup::Message);
        let holdups: Vec<Holdup<'a>> = messages.chain(self.stalls().into_iter().map(Holdup::Stall)).collect();
        let mut is_waiting = vec![false; self.ranks.len()];
        holdups.iter().flat_map(Holdup::waiting).for_each(|&rank| is_waiting[rank] = true);
        let is_root = |holdup: &Holdup<'_>| holdup.missing().iter().any(|&rank| !is_waiting[rank]);
        holdups.into_iter().max_by_key(|holdup| (is_root(holdup), holdup.age()))
    }

    /// The messages that ranks are waiting for, the longest wait first.
    pub(crate) fn message_waits(&self) -> Vec<MessageWait<'a>> {
        let wait = |rank: usize, call: &'a CallStatus| {
            let is_waiting = is_message(call) && is_open(call) && call.is_awaited;
            let peer = call.waiting_for.iter(self.ranks.len()).next().filter(|&peer| is_waiting && peer != rank)?;
            Some(MessageWait { call, rank, peer, age: millis(call.in_state_ms) + self.since_heard(rank) })
        };
        let of_rank =
            |(rank, info): (usize, &'a RankInfo)| info.status.calls.iter().filter_map(move |call| wait(rank, call));
        let mut waits: Vec<MessageWait<'a>> = self.ranks.iter().enumerate().flat_map(of_rank).collect();
        waits.sort_by_key(|wait| std::cmp::Reverse(wait.age));
        waits
    }

    /// The longest wait of each stage of the pipeline for another stage, the longest first.
    pub(crate) fn stage_waits(&self) -> Vec<MessageWait<'a>> {
        let mut known = HashSet::new();
        let stage = |rank: usize| self.ranks[rank].coordinates.stage;
        let is_first = |wait: &MessageWait<'_>| stage(wait.peer).is_some() && known.insert(stage(wait.rank));
        self.message_waits().into_iter().filter(is_first).collect()
    }

    /// The coordinates that these ranks have in common.
    pub(crate) fn shared_coordinates(&self, ranks: &[usize]) -> Coordinates {
        let all = ranks.iter().filter_map(|&rank| self.ranks.get(rank)).map(|info| info.coordinates);
        all.reduce(Coordinates::shared).unwrap_or_default()
    }

    /// The first stall of each group that has one.
    pub(crate) fn stalls(&self) -> Vec<Stall<'a>> {
        self.groups.iter().filter_map(|group| self.stall(group)).collect()
    }

    /// The first call of a group that some rank has entered and another has not.
    fn stall(&self, group: &Group<'a>) -> Option<Stall<'a>> {
        let mut entered: HashMap<usize, u64> = HashMap::new();
        for &(rank, call) in &group.calls {
            let newest = entered.entry(rank).or_default();
            *newest = call.number.max(*newest);
        }
        let members = sorted(group.members.iter(self.ranks.len()));
        let entered = |rank: &usize| entered.get(rank).copied().unwrap_or(0);
        let least = members.iter().map(entered).min()?;
        let open = group.calls.iter().filter(|(_, call)| is_open(call));
        let &(_, call) = open.clone().filter(|(_, call)| call.number > least).min_by_key(|(_, call)| call.number)?;
        let waiting = open.filter(|(_, other)| other.number >= call.number);
        let age = waiting.clone().map(|&(rank, other)| millis(other.in_state_ms) + self.since_heard(rank)).max()?;
        let waiting = sorted(waiting.map(|&(rank, _)| rank));
        let missing: Vec<usize> = members.into_iter().filter(|rank| entered(rank) < call.number).collect();
        Some(Stall { call, waiting, missing, age })
    }

    /// Splits ranks into those on lost hosts and the others. Returns the lost hosts, their ranks, and the other ranks. A host is lost
    /// if all of its ranks are among `ranks`, it has more than one, and there are other hosts.
    pub(crate) fn split_lost_hosts(&self, ranks: &[usize]) -> (Vec<&'a str>, Vec<usize>, Vec<usize>) {
        let mut counts: HashMap<&str, (usize, usize)> = HashMap::new();
        for info in self.ranks {
            counts.entry(&info.host).or_default().0 += 1;
        }
        for &rank in ranks {
            counts.entry(&self.ranks[rank].host).or_default().1 += 1;
        }
        let is_lost = |rank: &usize| {
            let host = self.ranks[*rank].host.as_str();
            let (all, among) = counts[host];
            !host.is_empty() && all > 1 && all == among && counts.len() > 1
        };
        let (on_hosts, others): (Vec<usize>, Vec<usize>) = ranks.iter().copied().partition(is_lost);
        (self.hosts(&on_hosts), on_hosts, others)
    }

    /// The hosts of these ranks, in the order of the first rank on each.
    pub(crate) fn hosts(&self, ranks: &[usize]) -> Vec<&'a str> {
        let mut known = HashSet::new();
        ranks.iter().map(|&rank| self.ranks[rank].host.as_str()).filter(|host| known.insert(*host)).collect()
    }

    /// The time since a rank's last heartbeat.
    pub(crate) fn since_heard(&self, rank: usize) -> Duration {
        self.ranks[rank].last_heard.map_or(Duration::ZERO, |heard| self.now.saturating_duration_since(heard))
    }
}

/// Binary search in a sorted list of ranks, of which there may be ten thousand.
pub(crate) trait ContainsSorted {
    fn contains_sorted(&self, rank: &usize) -> bool;
}

impl ContainsSorted for [usize] {
    fn contains_sorted(&self, rank: &usize) -> bool {
        self.binary_search(rank).is_ok()
    }
}

/// The call that a rank is in: the oldest one in progress. Messages that it is not waiting for run in the background.
pub(crate) fn own_call(status: &RankStatus) -> Option<&CallStatus> {
    let is_own = |call: &&CallStatus| call.state == CallState::InProgress && (call.is_awaited || !is_message(call));
    status.calls.iter().filter(is_own).max_by_key(|call| call.in_state_ms)
}

/// Whether a call is one end of a message. A send and a receive are two calls, and their numbers need not agree.
pub(crate) fn is_message(call: &CallStatus) -> bool {
    call.verb == "send" || call.verb == "receive"
}

/// Whether a call is queued or in progress.
pub(crate) fn is_open(call: &CallStatus) -> bool {
    call.state != CallState::Done
}

pub(crate) fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Sorts ranks and removes duplicates.
pub(crate) fn sorted(ranks: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut ranks: Vec<usize> = ranks.collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}
