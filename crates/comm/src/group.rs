//! The front end of all backends: names, checks, metering and recording.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use shardwise_plan::{Axis, Dtype, Mesh, Partition, RankSet};
use shardwise_torch::tch::Device;

use crate::fault::CallFaultKind;
use crate::instruments::{GroupSlot, Instruments};
use crate::transport::{Job, Operation, Splits, Transport};
use crate::{Call, Error, FlightRecorder, Meter, Payload, PayloadMut, Pending, ReduceOp, Result, Verb};

/// An ordered set of ranks that communicate (torch.distributed: a `ProcessGroup`).
///
/// All ranks of a group must call the same collectives in the same order. Calls on different groups may interleave differently
/// on different ranks. [`Partition`] splits buffers among the ranks: rank r's part of a buffer of any length is
/// `Partition::new(len, group.size()).range(r)`.
pub struct Group {
    name: Arc<str>,
    ranks: RankSet,
    rank: usize,
    transport: Arc<dyn Transport>,
    instruments: Arc<Instruments>,
    /// This group's slot in the flight recorder.
    slot: GroupSlot,
    collectives: AtomicU64,
    messages: AtomicU64,
}

impl Group {
    /// `name` is the group's purpose, `ranks` its global ranks, `rank` this rank's index among them.
    pub(crate) fn new(
        name: &str,
        ranks: RankSet,
        rank: usize,
        transport: Arc<dyn Transport>,
        instruments: Arc<Instruments>,
    ) -> Self {
        let name = format!("{name} {ranks}").into();
        let slot = instruments.add_group(ranks);
        let (collectives, messages) = (AtomicU64::new(0), AtomicU64::new(0));
        Group { name, ranks, rank, transport, instruments, slot, collectives, messages }
    }

    /// This rank's index in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks in the group.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The group's global ranks.
    pub fn ranks(&self) -> RankSet {
        self.ranks
    }

    /// The group's purpose and ranks, as in `shard 0-3`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device whose memory this group communicates.
    pub fn device(&self) -> Device {
        self.transport.device()
    }

    /// The counts of what this process has sent, over all of its groups.
    pub fn meter(&self) -> &Meter {
        self.instruments.meter()
    }

    /// The last calls of this process, over all of its groups. A clone of the `Arc` does not keep the group alive, so a
    /// monitoring thread can hold one.
    pub fn flight_recorder(&self) -> &Arc<FlightRecorder> {
        self.instruments.flight_recorder()
    }

    /// Fails if a call has failed although its `wait` has returned. On a device, `wait` only queues what comes after the call; so before
    /// the host believes what it has read from the device, it must ask.
    pub fn check(&self) -> Result<()> {
        self.transport.check()
    }

    /// The same ranks and records over another backend.
    pub(crate) fn over(&self, name: &str, transport: Arc<dyn Transport>) -> Group {
        Group::new(name, self.ranks, self.rank, transport, self.instruments.clone())
    }

    pub(crate) fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    /// How a buffer of `len` elements is split among the ranks of this group.
    pub fn partition(&self, len: usize) -> Partition {
        Partition::new(len, self.size())
    }

    fn partition_rows(&self, len: usize, row_len: usize) -> Partition {
        Partition::of_rows(len / row_len.max(1), row_len, self.size())
    }

    /// Creates this rank's group along `axes`: all ranks with the same mesh coordinates on every other axis. Must be called on
    /// the world group, and all ranks must make the same `split_along` calls in the same order. Finishes earlier calls first.
    pub fn split_along(&self, mesh: &Mesh, axes: &[Axis]) -> Result<Group> {
        if self.ranks != RankSet::world(self.size()) {
            let remedy = "a mesh covers all ranks; call split_along on the world group";
            return Err(Error::Setup(format!("the group '{}' is not the world: {remedy}", self.name)));
        }
        let ranks = mesh.for_world(self.size())?.group(self.rank, axes);
        // Most runs have no experts and divide no sequences.
        let is_rare = |axis: &Axis| matches!(axis, Axis::Expert | Axis::Ring | Axis::Ulysses);
        let is_named = |axis: &Axis| axes.len() == 1 || !is_rare(axis) || mesh.size(*axis) > 1;
        let mut used: Vec<Axis> = axes.iter().copied().filter(is_named).collect();
        used.sort();
        let name = match used.is_empty() {
            true => "alone".to_string(),
            false => used.iter().map(Axis::to_string).collect::<Vec<_>>().join("×"),
        };
        self.subgroup(&name, ranks)
    }

    /// Creates a group of some of the ranks, including this one.
    pub(crate) fn subgroup(&self, name: &str, ranks: RankSet) -> Result<Group> {
        let rank = ranks.index_of(self.ranks.rank_at(self.rank)).expect("a rank is in its own group");
        let transport = self.transport.split(ranks, &format!("{name} {ranks}").into())?;
        Ok(Group::new(name, ranks, rank, transport, self.instruments.clone()))
    }

    /// Concatenates the `part`s of all ranks into `whole` on every rank.
    pub fn all_gather<I: Payload, O: PayloadMut>(&self, label: &str, part: I, whole: O) -> Pending<(I, O)> {
        self.all_gather_rows(label, 1, part, whole)
    }

    /// Like [`Group::all_gather`], for rows of `row_len` elements: a part consists of whole rows ([`Partition::of_rows`]).
    pub fn all_gather_rows<I: Payload, O: PayloadMut>(
        &self,
        label: &str,
        row_len: usize,
        part: I,
        mut whole: O,
    ) -> Pending<(I, O)> {
        let call = self.call(Verb::AllGather, label, whole.len(), whole.dtype());
        let partition = self.partition_rows(whole.len(), row_len);
        let checks = self
            .check_pair(&call, &part, &whole)
            .and_then(|()| check_length(&call, "buffer, in whole rows,", partition.len(), whole.len()))
            .and_then(|()| check_length(&call, "part", partition.part_len(self.rank), part.len()));
        let operation = Operation::AllGather { part: part.as_ptr(), whole: whole.as_mut_ptr(), partition };
        self.start(checks, call, operation, (part, whole))
    }

    /// Like [`Group::all_gather`], with each rank's part already in place in `whole`.
    pub fn all_gather_in_place<B: PayloadMut>(&self, label: &str, mut whole: B) -> Pending<B> {
        let call = self.call(Verb::AllGather, label, whole.len(), whole.dtype());
        let checks = self.check_device(&call, &whole);
        let (partition, part) = self.own_part(&mut whole);
        let operation = Operation::AllGather { part, whole: whole.as_mut_ptr(), partition };
        self.start(checks, call, operation, whole)
    }

    /// Reduces `whole` over all ranks, and writes each rank's part of the result to its `part`. On the CPU, `part` may be f32 if `whole` is
    /// bf16 or f16: then the sums are not rounded.
    pub fn reduce_scatter<I: Payload, O: PayloadMut>(
        &self,
        label: &str,
        reduce: ReduceOp,
        whole: I,
        part: O,
    ) -> Pending<(I, O)> {
        self.reduce_scatter_rows(label, reduce, 1, whole, part)
    }

    /// Like [`Group::reduce_scatter`], for rows of `row_len` elements: a part consists of whole rows ([`Partition::of_rows`]).
    pub fn reduce_scatter_rows<I: Payload, O: PayloadMut>(
        &self,
        label: &str,
        reduce: ReduceOp,
        row_len: usize,
        whole: I,
        mut part: O,
    ) -> Pending<(I, O)> {
        let call = self.call(Verb::ReduceScatter, label, whole.len(), whole.dtype());
        let partition = self.partition_rows(whole.len(), row_len);
        let is_wider = part.dtype() == Dtype::F32 && matches!(whole.dtype(), Dtype::Bf16 | Dtype::F16);
        let checks = match is_wider && self.device() == Device::Cpu {
            true => self.check_device(&call, &whole).and_then(|()| self.check_device(&call, &part)),
            false => self.check_pair(&call, &whole, &part),
        };
        let checks = checks
            .and_then(|()| check_length(&call, "buffer, in whole rows,", partition.len(), whole.len()))
            .and_then(|()| check_length(&call, "part", partition.part_len(self.rank), part.len()))
            .and_then(|()| check_reduction(&call, reduce));
        let (whole_ptr, part_ptr, part_dtype) = (whole.as_ptr(), part.as_mut_ptr(), part.dtype());
        let operation = Operation::ReduceScatter { whole: whole_ptr, part: part_ptr, part_dtype, partition, reduce };
        self.start(checks, call, operation, (whole, part))
    }

    /// Like [`Group::reduce_scatter`], but writes the result to this rank's part of `whole`, and leaves the other parts
    /// unchanged.
    pub fn reduce_scatter_in_place<B: PayloadMut>(&self, label: &str, reduce: ReduceOp, mut whole: B) -> Pending<B> {
        let call = self.call(Verb::ReduceScatter, label, whole.len(), whole.dtype());
        let checks = self.check_device(&call, &whole).and_then(|()| check_reduction(&call, reduce));
        let (partition, part) = self.own_part(&mut whole);
        let part_dtype = whole.dtype();
        let operation = Operation::ReduceScatter { whole: whole.as_ptr(), part, part_dtype, partition, reduce };
        self.start(checks, call, operation, whole)
    }

    /// Reduces `buffer` over all ranks, and writes the result to it on every rank.
    pub fn all_reduce<B: PayloadMut>(&self, label: &str, reduce: ReduceOp, mut buffer: B) -> Pending<B> {
        let call = self.call(Verb::AllReduce, label, buffer.len(), buffer.dtype());
        let checks = self.check_device(&call, &buffer).and_then(|()| check_reduction(&call, reduce));
        let operation =
            Operation::AllReduce { buffer: buffer.as_mut_ptr(), partition: self.partition(buffer.len()), reduce };
        self.start(checks, call, operation, buffer)
    }

    /// Splits `send` into equal parts, sends the r-th part to rank r, and receives from rank r into the r-th part of `receive`.
    pub fn all_to_all<I: Payload, O: PayloadMut>(&self, label: &str, send: I, mut receive: O) -> Pending<(I, O)> {
        let call = self.call(Verb::AllToAll, label, send.len(), send.dtype());
        let partition = self.partition(send.len());
        let even = send.len().next_multiple_of(self.size());
        let checks = self
            .check_pair(&call, &send, &receive)
            .and_then(|()| check_length(&call, "input, split into equal parts,", even, send.len()))
            .and_then(|()| check_length(&call, "output", send.len(), receive.len()));
        let operation = Operation::AllToAll {
            send: send.as_ptr(),
            sends: Splits::Even(partition),
            receive: receive.as_mut_ptr(),
            receives: Splits::Even(partition),
        };
        self.start(checks, call, operation, (send, receive))
    }

    /// Sends the next `send_counts[r]` elements of `send` to rank r, and receives from rank r into the next `receive_counts[r]`
    /// elements of `receive` (torch.distributed: `all_to_all_single` with split sizes). The counts of sender and receiver must
    /// match.
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
            .check_pair(&call, &send, &receive)
            .and_then(|()| check_length(&call, "list of counts to send", self.size(), send_counts.len()))
            .and_then(|()| check_length(&call, "list of counts to receive", self.size(), receive_counts.len()))
            .and_then(|()| check_length(&call, "input, by its counts,", total(send_counts), send.len()))
            .and_then(|()| check_length(&call, "output, by its counts,", total(receive_counts), receive.len()))
            .and_then(|()| {
                check_length(&call, "part for this rank itself", receive_counts[self.rank], send_counts[self.rank])
            });
        // Splits can only be built from checked counts.
        if let Err(error) = checks {
            return Pending::failed(error);
        }
        let operation = Operation::AllToAll {
            send: send.as_ptr(),
            sends: Splits::from_counts(send_counts),
            receive: receive.as_mut_ptr(),
            receives: Splits::from_counts(receive_counts),
        };
        self.start(Ok(()), call, operation, (send, receive))
    }

    /// Copies `root`'s `buffer` to all ranks.
    pub fn broadcast<B: PayloadMut>(&self, label: &str, root: usize, mut buffer: B) -> Pending<B> {
        let call = self.call(Verb::Broadcast, label, buffer.len(), buffer.dtype());
        let checks = self.check_device(&call, &buffer).and_then(|()| self.check_rank(&call, root));
        let operation = Operation::Broadcast { buffer: buffer.as_mut_ptr(), len: buffer.len(), root };
        self.start(checks, call, operation, buffer)
    }

    /// Sends `buffer` to another rank, which must receive the same length. Messages between two ranks arrive in order.
    pub fn send<B: Payload>(&self, label: &str, to: usize, buffer: B) -> Pending<B> {
        let call = self.call(Verb::Send, label, buffer.len(), buffer.dtype());
        let checks = self.check_device(&call, &buffer).and_then(|()| self.check_other_rank(&call, to));
        let operation = Operation::Send { buffer: buffer.as_ptr(), len: buffer.len(), to };
        self.start(checks, call, operation, buffer)
    }

    /// Receives into `buffer` from another rank, which must send the same length.
    pub fn receive<B: PayloadMut>(&self, label: &str, from: usize, mut buffer: B) -> Pending<B> {
        let call = self.call(Verb::Receive, label, buffer.len(), buffer.dtype());
        let checks = self.check_device(&call, &buffer).and_then(|()| self.check_other_rank(&call, from));
        let operation = Operation::Receive { buffer: buffer.as_mut_ptr(), len: buffer.len(), from };
        self.start(checks, call, operation, buffer)
    }

    /// Prints `message` and terminates all ranks of the run immediately, including those that wait for this rank in a call. Use
    /// it when the program knows that it has failed. If a program only drops its groups and exits, as when `main` returns an
    /// error, the ranks that wait for it notice within seconds.
    pub fn abort(&self, message: &str) -> ! {
        eprintln!("rank {}: {message}", self.ranks.rank_at(self.rank));
        // Ignore errors: the reader of the output may be gone.
        drop(std::io::stdout().flush());
        self.transport.abort();
        std::process::exit(1)
    }

    /// Waits until every rank has made this call.
    pub fn barrier(&self, label: &str) -> Pending<()> {
        self.start(Ok(()), self.call(Verb::Barrier, label, 0, Dtype::U8), Operation::Barrier, ())
    }

    fn call(&self, verb: Verb, label: &str, elements: usize, dtype: Dtype) -> Call {
        let number = self.counter(verb).fetch_add(1, Ordering::Relaxed) + 1;
        Call { verb, label: label.into(), group: self.name.clone(), number, elements, dtype, elements_sent: 0 }
    }

    fn counter(&self, verb: Verb) -> &AtomicU64 {
        if verb.is_collective() { &self.collectives } else { &self.messages }
    }

    fn start<T: Send + 'static>(&self, checks: Result<()>, call: Call, operation: Operation, buffers: T) -> Pending<T> {
        if let Err(error) = checks {
            return Pending::failed(error);
        }
        let fault = self.instruments.fault(&call);
        let (call, operation) = match fault {
            None | Some(CallFaultKind::Panic) => (call, operation),
            Some(CallFaultKind::Skip) => {
                self.counter(call.verb).fetch_sub(1, Ordering::Relaxed);
                return Pending::done(buffers);
            }
            Some(CallFaultKind::Shorten) => {
                let operation = operation.shorten(self.rank, call.dtype.bytes());
                (Call { elements: call.elements.saturating_sub(1), ..call }, operation)
            }
        };
        let call = Call { elements_sent: operation.elements_sent(self.rank, self.size()), ..call };
        let handle = self.instruments.enter(self.slot, &call);
        let panics = fault == Some(CallFaultKind::Panic);
        let job = Job { call, operation, buffers: Box::new(buffers), handle: handle.clone(), panics };
        Pending::new(self.transport.start(job), handle)
    }

    /// Checks that the buffer is on the device that the backend communicates.
    fn check_device(&self, call: &Call, buffer: &impl Payload) -> Result<()> {
        match self.transport.device() == buffer.device() {
            true => Ok(()),
            false => Err(Error::Device {
                call: Box::new(call.clone()),
                device: buffer.device(),
                reached: self.transport.device(),
            }),
        }
    }

    fn check_pair(&self, call: &Call, input: &impl Payload, output: &impl Payload) -> Result<()> {
        self.check_device(call, input)?;
        self.check_device(call, output)?;
        match input.dtype() == output.dtype() {
            true => Ok(()),
            false => Err(Error::Dtype { call: Box::new(call.clone()), input: input.dtype(), output: output.dtype() }),
        }
    }

    /// The partition of a buffer, and the address of this rank's part.
    fn own_part(&self, whole: &mut impl PayloadMut) -> (Partition, *mut u8) {
        let partition = self.partition(whole.len());
        let offset = partition.range(self.rank).start * whole.dtype().bytes();
        (partition, whole.as_mut_ptr().wrapping_add(offset))
    }

    fn check_rank(&self, call: &Call, rank: usize) -> Result<()> {
        match rank < self.size() {
            true => Ok(()),
            false => Err(Error::Rank { call: Box::new(call.clone()), rank, size: self.size() }),
        }
    }

    fn check_other_rank(&self, call: &Call, rank: usize) -> Result<()> {
        self.check_rank(call, rank)?;
        match rank != self.rank {
            true => Ok(()),
            false => Err(Error::Transport {
                call: Box::new(call.clone()),
                message: format!("rank {rank} is this rank; a rank cannot send to itself"),
            }),
        }
    }
}

fn check_length(call: &Call, what: &'static str, expected: usize, found: usize) -> Result<()> {
    match expected == found {
        true => Ok(()),
        false => Err(Error::Length { call: Box::new(call.clone()), what, expected, found }),
    }
}

fn check_reduction(call: &Call, reduce: ReduceOp) -> Result<()> {
    match reduce.unsupported(call.dtype) {
        None => Ok(()),
        Some(reason) => Err(Error::Reduction { call: Box::new(call.clone()), reason }),
    }
}
