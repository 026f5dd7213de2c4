//! Executes the programs of all ranks without doing the work: who waits for whom, and until when.
//!
//! A rank has a lane for computation, one for copies between tiers, and one for each group. The calls of a group run one at a time,
//! in the order in which they are issued, and start when all members have issued them. A message starts when one rank has sent it
//! and the other has started to receive it; those from one rank to another go one at a time. Different groups, pairs of ranks and
//! copies run at the same time. A wait blocks the lane for computation, and nothing else does.
//!
//! The simulator gives all that durations. The checker gives it none, and asks who never gets to the end.

mod lane;
mod meetings;

use super::collectives::{Call, CallOp, Collective};
use super::groups::GroupKind;
use super::instruction::{Instruction, Message, Offload};
use super::policy::UnitSpec;
use super::programs::Party;
use crate::mesh::Mesh;
use lane::{Arrival, receive_key};
use meetings::{Channels, Meetings, Transfer};

pub(super) use lane::{Activity, Lane, Wait, Work, WorkId};

/// How long things take.
pub(super) trait Durations {
    /// The computation of an instruction.
    fn compute_s(&self, party: usize, instruction: &Instruction) -> f64;
    /// A collective.
    fn call_s(&self, party: usize, collective: &Collective) -> f64;
    /// The CPU time that a collective takes from the computation of a rank.
    fn call_cpu_s(&self, party: usize, collective: &Collective) -> f64;
    /// A message, from its sender to its receiver.
    fn message_s(&self, from: usize, to: usize, sent: &Message) -> f64;
    /// A copy from another tier.
    fn fetch_s(&self, party: usize, offload: &Offload) -> f64;
    /// A copy to another tier.
    fn store_s(&self, party: usize, offload: &Offload) -> f64;
}

/// A call or a copy that still runs at the end of a step. Times are since then.
#[derive(Clone, Copy)]
pub(super) struct Unfinished {
    party: usize,
    position: usize,
    activity: Activity,
    end_s: f64,
}

/// The programs of all ranks in execution, or after it.
pub(super) struct Execution<'a> {
    pub(super) lanes: Vec<Lane<'a>>,
    meetings: Meetings,
    channels: Channels,
    units: &'a [UnitSpec],
    /// The stage of each unit.
    stages: &'a [Option<usize>],
}

/// Executes the programs of `parties`, whose calls are `calls`, with each unit on its stage, until all are at their end or wait for each other.
pub(super) fn execute<'a>(
    parties: &[Party<'a>],
    calls: &[Vec<(usize, Call)>],
    (units, stages): (&'a [UnitSpec], &'a [Option<usize>]),
    mesh: &Mesh,
    unfinished: &[Unfinished],
    durations: &impl Durations,
) -> Execution<'a> {
    let lanes = parties.iter().zip(calls).map(|(party, calls)| Lane::new(party.program, calls)).collect();
    let (meetings, channels) = (Meetings::new(parties, mesh), Channels::new(parties, mesh));
    let mut execution = Execution { lanes, meetings, channels, units, stages };
    unfinished.iter().for_each(|call| execution.resume(call));
    let mut moves = true;
    while moves {
        moves = false;
        for party in 0..parties.len() {
            moves |= execution.run(party, durations);
        }
    }
    execution
}

impl Execution<'_> {
    /// The first rank that never gets to its end, in the order of `priority`.
    pub(super) fn first_blocked(&self, priority: impl Fn(usize) -> bool) -> Option<usize> {
        let mut blocked: Vec<usize> = (0..self.lanes.len()).filter(|&party| !self.lanes[party].is_done()).collect();
        blocked.sort_by_key(|&party| !priority(party));
        blocked.first().copied()
    }

    /// When the last rank is done.
    pub(super) fn end_s(&self) -> f64 {
        self.lanes.iter().map(|lane| lane.now_s).fold(0., f64::max)
    }

    /// The calls and copies that still run when the last rank is done.
    pub(super) fn unfinished(&self) -> Vec<Unfinished> {
        let step_s = self.end_s();
        let of_lane = |(party, lane): (usize, &Lane<'_>)| {
            let unfinished = |work: &Work| {
                let goes_on = matches!(work.activity, Activity::Call(_) | Activity::Copy(_)) && work.end_s > step_s;
                let Work { activity, position, end_s, .. } = *work;
                goes_on.then_some(Unfinished { party, position, activity, end_s: end_s - step_s })
            };
            lane.work.iter().filter_map(unfinished).collect::<Vec<_>>()
        };
        self.lanes.iter().enumerate().flat_map(of_lane).collect()
    }

    fn resume(&mut self, unfinished: &Unfinished) {
        let Unfinished { party, position, activity, end_s } = *unfinished;
        let id = WorkId { party, index: self.lanes[party].work.len() };
        let (start_s, after) = match activity {
            Activity::Copy(offload) => {
                self.lanes[party].copies.insert((offload.unit, offload.buffer), id.index);
                std::mem::replace(&mut self.lanes[party].copies_free, (end_s, Some(id)))
            }
            Activity::Call(collective) => self.meetings.occupy(party, collective.group, end_s, id),
            _ => return,
        };
        self.lanes[party].work.push(Work { activity, position, start_s, end_s, after, others_ready_s: 0. });
        self.lanes[party].resumed += 1;
    }

    /// Executes instructions of a rank until one blocks, and says whether it got any further.
    fn run(&mut self, party: usize, durations: &impl Durations) -> bool {
        let mut moves = false;
        while let Some(instruction) = self.lanes[party].program.instructions.get(self.lanes[party].position) {
            if !self.lanes[party].has_started {
                let now_s = self.lanes[party].now_s;
                self.lanes[party].starts_s.push(now_s);
                self.start(party, instruction, durations);
                self.lanes[party].has_started = true;
                moves = true;
            }
            while self.lanes[party].has_call() {
                if !self.make_call(party, durations) {
                    return moves;
                }
                self.lanes[party].next_call += 1;
                moves = true;
            }
            if !self.finish(party, instruction) {
                return moves;
            }
            let lane = &mut self.lanes[party];
            (lane.position, lane.has_started) = (lane.position + 1, false);
        }
        moves
    }

    /// Does what an instruction does without waiting.
    fn start(&mut self, party: usize, instruction: &Instruction, durations: &impl Durations) {
        let overlap = self.lanes[party].overlap();
        self.compute(party, (1. - overlap) * durations.compute_s(party, instruction));
        match *instruction {
            Instruction::Send(message) => {
                let to = message.receiving_unit(self.units).and_then(|unit| self.stage_of(unit));
                let arrival = self.arrival(party);
                for receiver in to.map_or(Vec::new(), |to| self.channels.peers(party, to)) {
                    let duration_s = durations.message_s(party, receiver, &message);
                    self.channels.send(party, receiver, (message, arrival, duration_s));
                    self.transfer(party, receiver);
                }
            }
            Instruction::StartReceive(message) => {
                let from = message.sending_unit(self.units).and_then(|unit| self.stage_of(unit));
                let Some(from) = from else { return };
                let arrival = self.arrival(party);
                let lane = &mut self.lanes[party];
                let started = lane.receives_started.entry(from).or_default();
                lane.receives.insert(receive_key(&message), (from, *started));
                *started += 1;
                for sender in self.channels.peers(party, from) {
                    self.channels.receive(sender, party, (message, arrival));
                    self.transfer(sender, party);
                }
            }
            Instruction::StartFetch(offload) => self.copy(party, offload, durations.fetch_s(party, &offload)),
            Instruction::StartStore(offload) => self.copy(party, offload, durations.store_s(party, &offload)),
            _ => (),
        }
    }

    /// Makes the next call of a rank, unless it waits for a collective that is not complete.
    fn make_call(&mut self, party: usize, durations: &impl Durations) -> bool {
        let index = self.lanes[party].next_call;
        let (position, Call { collective, op, overlap }) = self.lanes[party].calls[index];
        match op {
            CallOp::Issue => {
                self.lanes[party].cpu_debt_s += durations.call_cpu_s(party, &collective);
                let arrival = self.arrival(party);
                let met = self.meetings.arrive(party, collective.group, (index, arrival));
                if let Some(members) = met {
                    self.start_call(collective.group, &members, durations.call_s(party, &collective));
                }
                if overlap > 0. {
                    let instruction = &self.lanes[party].program.instructions[position];
                    self.compute(party, overlap * durations.compute_s(party, instruction));
                }
            }
            CallOp::Wait { issued: Some(issued) } => match self.lanes[party].call_work[issued] {
                Some(work) => self.wait(party, &[work]),
                None => return false,
            },
            // The step before has issued it. If it is not there, it has ended.
            CallOp::Wait { issued: None } => {
                let lane = &self.lanes[party];
                let is_it = |work: &Work| work.activity == Activity::Call(collective);
                if let Some(work) = lane.work[..lane.resumed].iter().position(is_it) {
                    self.wait(party, &[work]);
                }
            }
        }
        true
    }

    /// Waits for what an instruction waits for, unless that has not started.
    fn finish(&mut self, party: usize, instruction: &Instruction) -> bool {
        match instruction {
            Instruction::WaitReceive(message) => {
                let Some(&(from, ordinal)) = self.lanes[party].receives.get(&receive_key(message)) else {
                    return false;
                };
                let senders = self.channels.peers(party, from).into_iter();
                match senders.map(|sender| self.channels.received(sender, party, ordinal)).collect::<Option<Vec<_>>>() {
                    Some(work) => self.wait(party, &work),
                    None => return false,
                }
            }
            Instruction::WaitFetch(offload) | Instruction::WaitStore(offload) => {
                match self.lanes[party].copies.get(&(offload.unit, offload.buffer)) {
                    Some(&work) => self.wait(party, &[work]),
                    // The step before may have started a store. If it is not there, it has ended.
                    None => return matches!(instruction, Instruction::WaitStore(_)),
                }
            }
            _ => (),
        }
        true
    }

    fn compute(&mut self, party: usize, duration_s: f64) {
        if duration_s > 0. {
            let duration_s = duration_s + std::mem::take(&mut self.lanes[party].cpu_debt_s);
            let Arrival { position, time_s, after } = self.arrival(party);
            let end_s = time_s + duration_s;
            let work =
                Work { activity: Activity::Compute, position, start_s: time_s, end_s, after, others_ready_s: 0. };
            let index = self.push(party, work);
            self.lanes[party].now_s = end_s;
            self.lanes[party].last = Some(WorkId { party, index });
        }
    }

    fn copy(&mut self, party: usize, offload: Offload, duration_s: f64) {
        let Arrival { position, time_s, after } = self.arrival(party);
        let (free_s, last) = self.lanes[party].copies_free;
        let (start_s, after) = if free_s > time_s { (free_s, last) } else { (time_s, after) };
        let end_s = start_s + duration_s;
        let work = Work { activity: Activity::Copy(offload), position, start_s, end_s, after, others_ready_s: 0. };
        let index = self.push(party, work);
        self.lanes[party].copies_free = (end_s, Some(WorkId { party, index }));
        self.lanes[party].copies.insert((offload.unit, offload.buffer), index);
    }

    /// Runs a call that all members of a group have issued.
    fn start_call(&mut self, group: GroupKind, members: &[(usize, usize, Arrival)], duration_s: f64) {
        let (free_s, last) = self.meetings.free(members[0].0, group);
        let mut first = (free_s, last);
        for (_, _, arrival) in members {
            if arrival.time_s >= first.0 {
                first = (arrival.time_s, arrival.after);
            }
        }
        let (start_s, after) = first;
        let end_s = start_s + duration_s;
        for &(party, call, Arrival { position, .. }) in members {
            let others = members.iter().filter(|(member, ..)| *member != party).map(|(_, _, arrival)| arrival.time_s);
            let others_ready_s = others.fold(0., f64::max);
            let activity = Activity::Call(self.lanes[party].calls[call].1.collective);
            let index = self.push(party, Work { activity, position, start_s, end_s, after, others_ready_s });
            self.lanes[party].call_work[call] = Some(index);
            self.meetings.occupy(party, group, end_s, WorkId { party, index });
        }
    }

    /// Runs the messages from one rank to another that one has sent and the other has started to receive.
    fn transfer(&mut self, from: usize, to: usize) {
        while let Some(transfer) = self.channels.next(from, to) {
            let Transfer { sent, received, start_s, after, duration_s } = transfer;
            let end_s = start_s + duration_s;
            let sends = Work {
                activity: Activity::Send(sent.0),
                position: sent.1.position,
                start_s,
                end_s,
                after,
                others_ready_s: received.1.time_s,
            };
            let receives = Work {
                activity: Activity::Receive(received.0),
                position: received.1.position,
                others_ready_s: sent.1.time_s,
                ..sends
            };
            let index = self.push(from, sends);
            let work = self.push(to, receives);
            self.channels.complete(from, to, end_s, WorkId { party: from, index }, work);
        }
    }

    /// Waits until all of these works of the rank have ended.
    fn wait(&mut self, party: usize, work: &[usize]) {
        let lane = &mut self.lanes[party];
        let ends = |&index: &usize| lane.work[index].end_s;
        let Some(&index) = work.iter().max_by(|a, b| ends(a).total_cmp(&ends(b))) else { return };
        let Work { activity, end_s, others_ready_s, .. } = lane.work[index];
        let waited_s = end_s - lane.now_s;
        if waited_s > 0. {
            let late_s = (others_ready_s.min(end_s) - lane.now_s).max(0.);
            lane.waits.push(Wait { position: lane.position, activity, late_s, transfer_s: waited_s - late_s });
            lane.cpu_debt_s = (lane.cpu_debt_s - waited_s).max(0.);
            lane.now_s = end_s;
            lane.last = Some(WorkId { party, index });
        }
    }

    fn push(&mut self, party: usize, work: Work) -> usize {
        self.lanes[party].work.push(work);
        self.lanes[party].work.len() - 1
    }

    /// A rank at its current instruction and time.
    fn arrival(&self, party: usize) -> Arrival {
        let lane = &self.lanes[party];
        Arrival { position: lane.position, time_s: lane.now_s, after: lane.last }
    }

    fn stage_of(&self, unit: usize) -> Option<usize> {
        self.stages.get(unit).copied().flatten()
    }
}
