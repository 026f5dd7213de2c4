//! The face of every back end: names, checks, instruments.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use shardwise_plan::{Axis, Dtype, Mesh, Partition, RankSet};

use crate::fault::Fault;
use crate::instruments::{Instruments, Seat};
use crate::transport::{Cuts, Job, Transport, Work};
use crate::{Call, Error, Meter, Payload, PayloadMut, Pending, Record, Reduce, Result, Verb};

/// An ordered set of ranks that act together.
///
/// All ranks of a group call the same collectives in the same order; calls on different groups may interleave
/// differently on different ranks. A part of a buffer is cut by [`Partition`]: rank r's part of a whole of any length is
/// `Partition::new(whole, group.size()).range(r)`.
pub struct Group {
    name: Arc<str>,
    ranks: RankSet,
    rank: usize,
    transport: Arc<dyn Transport>,
    instruments: Arc<Instruments>,
    /// This group's place in the record.
    seat: Seat,
    collectives: AtomicU64,
    messages: AtomicU64,
}

impl Group {
    /// `name` says what the group is for, `ranks` which ranks of the world are in it, `rank` which of them this is.
    pub(crate) fn new(
        name: &str,
        ranks: RankSet,
        rank: usize,
        transport: Arc<dyn Transport>,
        instruments: Arc<Instruments>,
    ) -> Self {
        let name = format!("{name} {ranks}").into();
        let seat = instruments.seat(ranks);
        let (collectives, messages) = (AtomicU64::new(0), AtomicU64::new(0));
        Group { name, ranks, rank, transport, instruments, seat, collectives, messages }
    }

    /// This rank's place in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks in the group.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The ranks of the world that form the group.
    pub fn ranks(&self) -> RankSet {
        self.ranks
    }

    /// What the group is for and who is in it, as in `shard 0-3`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What this process has sent so far, in all its groups.
    pub fn meter(&self) -> &Meter {
        self.instruments.meter()
    }

    /// The last calls of this process, in all its groups. A thread that watches them takes a clone along, which does not
    /// keep the group alive.
    pub fn record(&self) -> &Arc<Record> {
        self.instruments.record()
    }

    #[cfg(feature = "nccl")]
    pub(crate) fn instruments(&self) -> Arc<Instruments> {
        self.instruments.clone()
    }

    /// How a whole of `len` elements is cut among the ranks of this group.
    pub fn partition(&self, len: usize) -> Partition {
        Partition::new(len, self.size())
    }

    /// The group of the ranks that differ from this one along `axes` only. This group must be the whole mesh, and all its
    /// ranks ask for the same axes in the same order. Earlier calls are finished first.
    pub fn along(&self, mesh: &Mesh, axes: &[Axis]) -> Result<Group> {
        if self.ranks != RankSet::world(self.size()) {
            let problem = "a mesh is laid over the group of all ranks; ask that one for its groups";
            return Err(Error::Setup(format!("the group '{}' is not the world: {problem}", self.name)));
        }
        let ranks = mesh.for_world(self.size())?.group(self.rank, axes);
        let mut used: Vec<Axis> = axes.to_vec();
        used.sort();
        let name = match used.is_empty() {
            true => "alone".to_string(),
            false => used.iter().map(Axis::to_string).collect::<Vec<_>>().join("×"),
        };
        self.subgroup(&name, ranks)
    }

    /// The group of some of the ranks, of which this one is one.
    pub(crate) fn subgroup(&self, name: &str, ranks: RankSet) -> Result<Group> {
        let rank = ranks.index_of(self.ranks.rank_at(self.rank)).expect("a rank is in its own group");
        let transport = self.transport.split(ranks, &format!("{name} {ranks}").into())?;
        Ok(Group::new(name, ranks, rank, transport, self.instruments.clone()))
    }

    /// Everyone's `part` becomes everyone's `whole`.
    pub fn all_gather<I: Payload, O: PayloadMut>(&self, label: &str, part: I, mut whole: O) -> Pending<(I, O)> {
        let call = self.call(Verb::AllGather, label, whole.len(), whole.dtype());
        let partition = self.partition(whole.len());
        let checks = self
            .pair(&call, &part, &whole)
            .and_then(|()| length(&call, "part", partition.part_len(self.rank), part.len()));
        let work = Work::AllGather { part: part.as_ptr(), whole: whole.as_mut_ptr(), partition };
        self.start(checks, call, work, (part, whole))
    }

    /// The same where each rank's part already stands in its place in `whole`.
    pub fn all_gather_in_place<B: PayloadMut>(&self, label: &str, mut whole: B) -> Pending<B> {
        let call = self.call(Verb::AllGather, label, whole.len(), whole.dtype());
        let checks = self.reach(&call, &whole);
        let (partition, part) = self.own_part(&mut whole);
        let work = Work::AllGather { part, whole: whole.as_mut_ptr(), partition };
        self.start(checks, call, work, whole)
    }

    /// Everyone's `whole` is reduced, and each rank keeps its `part` of the result.
    pub fn reduce_scatter<I: Payload, O: PayloadMut>(
        &self,
        label: &str,
        reduce: Reduce,
        whole: I,
        mut part: O,
    ) -> Pending<(I, O)> {
        let call = self.call(Verb::ReduceScatter, label, whole.len(), whole.dtype());
        let partition = self.partition(whole.len());
        let checks = self
            .pair(&call, &whole, &part)
            .and_then(|()| length(&call, "part", partition.part_len(self.rank), part.len()))
            .and_then(|()| reducible(&call, reduce));
        let work = Work::ReduceScatter { whole: whole.as_ptr(), part: part.as_mut_ptr(), partition, reduce };
        self.start(checks, call, work, (whole, part))
    }

    /// The same where each rank keeps its part in its place in `whole`; the other parts stay as they were.
    pub fn reduce_scatter_in_place<B: PayloadMut>(&self, label: &str, reduce: Reduce, mut whole: B) -> Pending<B> {
        let call = self.call(Verb::ReduceScatter, label, whole.len(), whole.dtype());
        let checks = self.reach(&call, &whole).and_then(|()| reducible(&call, reduce));
        let (partition, part) = self.own_part(&mut whole);
        let work = Work::ReduceScatter { whole: whole.as_ptr(), part, partition, reduce };
        self.start(checks, call, work, whole)
    }

    /// Everyone's `buffer` is reduced, and everyone has the result.
    pub fn all_reduce<B: PayloadMut>(&self, label: &str, reduce: Reduce, mut buffer: B) -> Pending<B> {
        let call = self.call(Verb::AllReduce, label, buffer.len(), buffer.dtype());
        let checks = self.reach(&call, &buffer).and_then(|()| reducible(&call, reduce));
        let work = Work::AllReduce { buffer: buffer.as_mut_ptr(), partition: self.partition(buffer.len()), reduce };
        self.start(checks, call, work, buffer)
    }

    /// Everyone sends the r-th of equal parts of `send` to rank r, and finds what rank r sent in the r-th of `receive`.
    pub fn all_to_all<I: Payload, O: PayloadMut>(&self, label: &str, send: I, mut receive: O) -> Pending<(I, O)> {
        let call = self.call(Verb::AllToAll, label, send.len(), send.dtype());
        let partition = self.partition(send.len());
        let even = send.len().next_multiple_of(self.size());
        let checks = self
            .pair(&call, &send, &receive)
            .and_then(|()| length(&call, "input, cut into equal parts,", even, send.len()))
            .and_then(|()| length(&call, "output", send.len(), receive.len()));
        let work = Work::AllToAll {
            send: send.as_ptr(),
            sends: Cuts::Even(partition),
            receive: receive.as_mut_ptr(),
            receives: Cuts::Even(partition),
        };
        self.start(checks, call, work, (send, receive))
    }

    /// Everyone sends the next `send_counts[r]` elements of `send` to rank r, and finds what rank r sent in the next
    /// `receive_counts[r]` of `receive`. What a rank sends must be what the other one expects.
    pub fn all_to_all_counts<I: Payload, O: PayloadMut>(
        &self,
        label: &str,
        send: I,
        send_counts: &[usize],
        mut receive: O,
        receive_counts: &[usize],
    ) -> Pending<(I, O)> {
        let call = self.call(Verb::AllToAll, label, send.len().max(receive.len()), send.dtype());
        let total = |counts: &[usize]| counts.iter().fold(0usize, |sum, &count| sum.saturating_add(count));
        let checks = self
            .pair(&call, &send, &receive)
            .and_then(|()| length(&call, "list of counts to send", self.size(), send_counts.len()))
            .and_then(|()| length(&call, "list of counts to receive", self.size(), receive_counts.len()))
            .and_then(|()| length(&call, "input, by its counts,", total(send_counts), send.len()))
            .and_then(|()| length(&call, "output, by its counts,", total(receive_counts), receive.len()))
            .and_then(|()| {
                length(&call, "part for this rank itself", receive_counts[self.rank], send_counts[self.rank])
            });
        // The cuts are only made of lists that were checked.
        if let Err(error) = checks {
            return Pending::failed(error);
        }
        let work = Work::AllToAll {
            send: send.as_ptr(),
            sends: Cuts::listed(send_counts),
            receive: receive.as_mut_ptr(),
            receives: Cuts::listed(receive_counts),
        };
        self.start(Ok(()), call, work, (send, receive))
    }

    /// `root`'s `buffer` becomes everyone's.
    pub fn broadcast<B: PayloadMut>(&self, label: &str, root: usize, mut buffer: B) -> Pending<B> {
        let call = self.call(Verb::Broadcast, label, buffer.len(), buffer.dtype());
        let checks = self.reach(&call, &buffer).and_then(|()| self.has(&call, root));
        let work = Work::Broadcast { buffer: buffer.as_mut_ptr(), len: buffer.len(), root };
        self.start(checks, call, work, buffer)
    }

    /// Sends `buffer` to another rank, which must receive as much. Messages between two ranks arrive in order.
    pub fn send<B: Payload>(&self, label: &str, to: usize, buffer: B) -> Pending<B> {
        let call = self.call(Verb::Send, label, buffer.len(), buffer.dtype());
        let checks = self.reach(&call, &buffer).and_then(|()| self.has_other(&call, to));
        let work = Work::Send { buffer: buffer.as_ptr(), len: buffer.len(), to };
        self.start(checks, call, work, buffer)
    }

    /// Receives into `buffer` from another rank, which must send as much.
    pub fn receive<B: PayloadMut>(&self, label: &str, from: usize, mut buffer: B) -> Pending<B> {
        let call = self.call(Verb::Receive, label, buffer.len(), buffer.dtype());
        let checks = self.reach(&call, &buffer).and_then(|()| self.has_other(&call, from));
        let work = Work::Receive { buffer: buffer.as_mut_ptr(), len: buffer.len(), from };
        self.start(checks, call, work, buffer)
    }

    /// Prints why this rank cannot go on, and ends all ranks of the run at once, also those that wait for this one in a call.
    /// For a program that knows that it has failed. A program that just drops its groups and ends, as `main` does when it
    /// returns an error, is found out by the ranks that wait for it, within seconds.
    pub fn abort(&self, message: &str) -> ! {
        eprintln!("rank {}: {message}", self.ranks.rank_at(self.rank));
        // Whoever reads the output may be gone.
        drop(std::io::stdout().flush());
        self.transport.abort();
        std::process::exit(1)
    }

    /// Is done when every rank has come here.
    pub fn barrier(&self, label: &str) -> Pending<()> {
        self.start(Ok(()), self.call(Verb::Barrier, label, 0, Dtype::U8), Work::Barrier, ())
    }

    fn call(&self, verb: Verb, label: &str, elements: usize, dtype: Dtype) -> Call {
        let number = self.counter(verb).fetch_add(1, Ordering::Relaxed) + 1;
        Call { verb, label: label.into(), group: self.name.clone(), number, elements, dtype }
    }

    fn counter(&self, verb: Verb) -> &AtomicU64 {
        if verb.is_collective() { &self.collectives } else { &self.messages }
    }

    fn start<T: Send + 'static>(&self, checks: Result<()>, call: Call, work: Work, buffers: T) -> Pending<T> {
        if let Err(error) = checks {
            return Pending::failed(error);
        }
        let fault = self.instruments.fault(&call);
        let (call, work) = match fault {
            None | Some(Fault::Panic) => (call, work),
            Some(Fault::Skip) => {
                self.counter(call.verb).fetch_sub(1, Ordering::Relaxed);
                return Pending::done(buffers);
            }
            Some(Fault::Short) => {
                let work = work.shortened(self.rank, call.dtype.bytes());
                (Call { elements: call.elements.saturating_sub(1), ..call }, work)
            }
        };
        let ticket = self.instruments.enter(self.seat, &call, work.elements_sent(self.rank, self.size()));
        let panics = fault == Some(Fault::Panic);
        let job = Job { call, work, luggage: Box::new(buffers), ticket: ticket.clone(), panics };
        Pending::new(self.transport.start(job), ticket)
    }

    /// Whether the back end can move this memory.
    fn reach(&self, call: &Call, buffer: &impl Payload) -> Result<()> {
        match self.transport.device() == buffer.device() {
            true => Ok(()),
            false => Err(Error::Device {
                call: Box::new(call.clone()),
                device: buffer.device(),
                reached: self.transport.device(),
            }),
        }
    }

    fn pair(&self, call: &Call, input: &impl Payload, output: &impl Payload) -> Result<()> {
        self.reach(call, input)?;
        self.reach(call, output)?;
        match input.dtype() == output.dtype() {
            true => Ok(()),
            false => Err(Error::Dtype { call: Box::new(call.clone()), input: input.dtype(), output: output.dtype() }),
        }
    }

    /// How a whole is cut, and where this rank's part of it begins.
    fn own_part(&self, whole: &mut impl PayloadMut) -> (Partition, *mut u8) {
        let partition = self.partition(whole.len());
        let offset = partition.range(self.rank).start * whole.dtype().bytes();
        (partition, whole.as_mut_ptr().wrapping_add(offset))
    }

    fn has(&self, call: &Call, rank: usize) -> Result<()> {
        match rank < self.size() {
            true => Ok(()),
            false => Err(Error::Rank { call: Box::new(call.clone()), rank, size: self.size() }),
        }
    }

    fn has_other(&self, call: &Call, rank: usize) -> Result<()> {
        self.has(call, rank)?;
        match rank != self.rank {
            true => Ok(()),
            false => Err(Error::Transport {
                call: Box::new(call.clone()),
                message: format!("rank {rank} is this rank; a rank does not send to itself"),
            }),
        }
    }
}

fn length(call: &Call, what: &'static str, expected: usize, found: usize) -> Result<()> {
    match expected == found {
        true => Ok(()),
        false => Err(Error::Length { call: Box::new(call.clone()), what, expected, found }),
    }
}

fn reducible(call: &Call, reduce: Reduce) -> Result<()> {
    match reduce.refusal(call.dtype) {
        None => Ok(()),
        Some(reason) => Err(Error::Reduction { call: Box::new(call.clone()), reason }),
    }
}
