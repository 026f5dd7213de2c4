//! Where ranks meet: the calls of groups, and the messages between pairs of ranks.

use std::collections::{BTreeMap, VecDeque};

use super::super::groups::GroupKind;
use super::super::instruction::Message;
use super::super::programs::Party;
use super::lane::{Arrival, WorkId};
use crate::mesh::{Axis, Mesh};

/// The groups of all ranks. Ranks that stand for many are in one group of each kind with all ranks of their stage.
pub(super) struct Meetings {
    groups: Vec<Group>,
    /// By rank, and kind of group.
    of_party: Vec<[usize; GroupKind::ALL.len()]>,
}

#[derive(Default)]
struct Group {
    members: usize,
    /// Who has issued which call, from the first that is not complete.
    calls: VecDeque<Vec<(usize, usize, Arrival)>>,
    /// The number of calls that each member has issued, and of those that are complete.
    issued: BTreeMap<usize, usize>,
    complete: usize,
    /// When the last call ends, and its work.
    free_s: f64,
    last: Option<WorkId>,
}

impl Meetings {
    pub(super) fn new(parties: &[Party<'_>], mesh: &Mesh) -> Self {
        let mut indices = BTreeMap::new();
        let mut groups: Vec<Group> = Vec::new();
        let mut join = |kind: GroupKind, party: &Party<'_>| {
            let is_alone = kind != GroupKind::World && kind.axes().iter().all(|&axis| mesh.size(axis) == 1);
            let key = match kind.spans_stages() && !is_alone {
                true => (kind, 0, 0),
                false => (kind, party.stage, if is_alone { party.rank } else { 0 }),
            };
            let index = *indices.entry(key).or_insert(groups.len());
            if index == groups.len() {
                groups.push(Group::default());
            }
            groups[index].members += 1;
            index
        };
        let of_party = parties.iter().map(|party| GroupKind::ALL.map(|kind| join(kind, party))).collect();
        Meetings { groups, of_party }
    }

    /// Issues a rank's next call in its group. Returns all members, with the indices of their calls, if it is the last to issue it.
    pub(super) fn arrive(
        &mut self,
        party: usize,
        kind: GroupKind,
        (call, arrival): (usize, Arrival),
    ) -> Option<Vec<(usize, usize, Arrival)>> {
        let group = self.group(party, kind);
        let issued = group.issued.entry(party).or_default();
        let ahead = *issued - group.complete;
        *issued += 1;
        if group.calls.len() <= ahead {
            group.calls.push_back(Vec::new());
        }
        group.calls[ahead].push((party, call, arrival));
        if group.calls[ahead].len() < group.members {
            return None;
        }
        group.complete += 1;
        group.calls.pop_front()
    }

    /// When the lane of a rank's group is free, and its last work.
    pub(super) fn free(&mut self, party: usize, kind: GroupKind) -> (f64, Option<WorkId>) {
        let group = self.group(party, kind);
        (group.free_s, group.last)
    }

    /// Occupies the lane of a rank's group. Returns what [`Meetings::free`] was before.
    pub(super) fn occupy(&mut self, party: usize, kind: GroupKind, end_s: f64, work: WorkId) -> (f64, Option<WorkId>) {
        let before = self.free(party, kind);
        let group = self.group(party, kind);
        (group.free_s, group.last) = (end_s, Some(work));
        before
    }

    fn group(&mut self, party: usize, kind: GroupKind) -> &mut Group {
        &mut self.groups[self.of_party[party][kind as usize]]
    }
}

/// The messages between ranks of different stages.
pub(super) struct Channels {
    /// By rank and stage: the ranks of that stage that it exchanges messages with.
    peers: Vec<Vec<Vec<usize>>>,
    /// By sender and receiver.
    channels: BTreeMap<(usize, usize), Channel>,
}

#[derive(Default)]
struct Channel {
    sent: Vec<(Message, Arrival, f64)>,
    receives: Vec<(Message, Arrival)>,
    /// The receiver's work of each message that was transferred.
    received: Vec<usize>,
    free_s: f64,
    last: Option<WorkId>,
}

/// A message that can be transferred.
pub(super) struct Transfer {
    pub(super) sent: (Message, Arrival),
    pub(super) received: (Message, Arrival),
    pub(super) start_s: f64,
    pub(super) after: Option<WorkId>,
    pub(super) duration_s: f64,
}

impl Channels {
    pub(super) fn new(parties: &[Party<'_>], mesh: &Mesh) -> Self {
        let per_stage = mesh.stride(Axis::Pipeline);
        let is_exception = |rank: usize| parties.iter().any(|party| party.is_exception && party.rank == rank);
        // Whether a rank for which `party` stands exchanges messages with one for which `other` stands.
        let meet = |party: &Party<'_>, other: &Party<'_>| match (party.is_exception, other.is_exception) {
            (false, false) => true,
            (true, true) => party.rank % per_stage == other.rank % per_stage,
            (true, false) => !is_exception(party.rank % per_stage + other.stage * per_stage),
            (false, true) => !is_exception(other.rank % per_stage + party.stage * per_stage),
        };
        let peers_at = |party: &Party<'_>, stage: usize| {
            let is_peer = |other: &Party<'_>| other.stage == stage && stage != party.stage && meet(party, other);
            (0..parties.len()).filter(|&other| is_peer(&parties[other])).collect()
        };
        let stages = mesh.size(Axis::Pipeline);
        let peers = parties.iter().map(|party| (0..stages).map(|stage| peers_at(party, stage)).collect()).collect();
        Channels { peers, channels: BTreeMap::new() }
    }

    /// The ranks of a stage that a rank exchanges messages with.
    pub(super) fn peers(&self, party: usize, stage: usize) -> Vec<usize> {
        self.peers[party].get(stage).cloned().unwrap_or_default()
    }

    pub(super) fn send(&mut self, from: usize, to: usize, sent: (Message, Arrival, f64)) {
        self.channels.entry((from, to)).or_default().sent.push(sent);
    }

    pub(super) fn receive(&mut self, from: usize, to: usize, received: (Message, Arrival)) {
        self.channels.entry((from, to)).or_default().receives.push(received);
    }

    /// The receiver's work of a message, if it is known when it is transferred.
    pub(super) fn received(&self, from: usize, to: usize, ordinal: usize) -> Option<usize> {
        self.channels.get(&(from, to))?.received.get(ordinal).copied()
    }

    /// The next message of a channel, if it was sent and its receive has started.
    pub(super) fn next(&self, from: usize, to: usize) -> Option<Transfer> {
        let channel = self.channels.get(&(from, to))?;
        let ordinal = channel.received.len();
        let (&(message, sent, duration_s), &received) = (channel.sent.get(ordinal)?, channel.receives.get(ordinal)?);
        let mut first = (channel.free_s, channel.last);
        for arrival in [sent, received.1] {
            if arrival.time_s >= first.0 {
                first = (arrival.time_s, arrival.after);
            }
        }
        let (start_s, after) = first;
        Some(Transfer { sent: (message, sent), received, start_s, after, duration_s })
    }

    /// Records the transfer of the next message.
    pub(super) fn complete(&mut self, from: usize, to: usize, end_s: f64, work: WorkId, received: usize) {
        let channel = self.channels.entry((from, to)).or_default();
        channel.received.push(received);
        (channel.free_s, channel.last) = (end_s, Some(work));
    }
}
