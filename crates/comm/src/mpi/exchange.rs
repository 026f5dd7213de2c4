//! Collectives built from point-to-point messages, as polled state machines.
//!
//! # Note: no deadlock, and no hot spot
//! All ranks go through the same sequence of steps: in step k, rank r sends to rank r + k and receives from rank r − k, so in
//! each step every rank sends to a different rank. A rank posts its messages in that order, at most [`MESSAGES_MAX`] at once in
//! each direction (for a reduction: two rounds of one message to and from each rank). The earliest incomplete message of the
//! sequence is posted on both sides, because everything before it is complete; so some message can always complete.
//!
//! # Note: a long message only matches a receive of the same length
//! If ranks disagree about a call, their messages match receives that were meant for other messages. MPI promises an error if a
//! message is longer than its receive, but Open MPI 4.1.4, between processes of one host, returns the error after it has
//! written the whole message (262,144 bytes sent to a receive of 1,024 overwrote the 261,120 behind it). So the length of a
//! long message is part of its tag: ranks that disagree about it wait for each other until the timeout, and no memory is
//! touched. Short messages go through MPI's own buffers, where its error is correct and immediate.

use std::collections::VecDeque;
use std::ops::Range;

use shardwise_plan::{Dtype, Partition, RankSet};

use super::call_signature::{CallSignature, SIGNATURE_BYTES};
use super::sys::{Communicator, MpiResult, Request, Requests};
use crate::ReduceOp;
use crate::reduce::{reduce, reduce_into};
use crate::transport::{Operation, Splits};

/// The longest message. Even at 1 Gbit/s it takes only 34 ms, so progress is visible.
pub(super) const PIECE_BYTES_MAX: usize = 4 << 20;

/// The most messages that one call has posted at once, in each direction.
const MESSAGES_MAX: usize = 32;

/// The staging memory of a reduction: two rounds of one piece per rank. A piece is as large as that allows, within the bounds
/// of `ROUND_BYTES`. 256 KiB was the fastest of 64, 256 and 1024 KiB for 2, 4 and 8 ranks on one host.
const STAGING_BYTES: usize = 4 << 20;
const ROUND_BYTES: Range<usize> = 16 << 10..256 << 10;

/// The largest total size for which an all-reduce gathers all contributions.
const SMALL_BYTES_MAX: usize = 64 << 10;

/// The longest short message. Open MPI bypasses its own buffers from 4 KiB on by default.
const SHORT_BYTES_MAX: usize = 2 << 10;

/// A tag contains the call number modulo this, which is the largest value that leaves a tag for every length. Far fewer
/// collectives run at once, and messages between two ranks with the same number and length arrive in order.
pub(super) const CALL_NUMBERS: usize = 500;

/// The call number of a rendezvous.
const RENDEZVOUS: usize = CALL_NUMBERS;

/// The call number of signature exchanges.
const SIGNATURES: usize = CALL_NUMBERS + 1;

/// A call as a state machine.
pub(super) trait Machine {
    /// Makes as much progress as possible without blocking.
    fn poll(&mut self) -> Result<Progress, Failure>;

    /// The ranks of the group that the call is waiting for, if known.
    fn waits_for(&self) -> Vec<usize>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Stalled,
    Moved,
    Done,
}

/// Why a call failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// A message failed. Others may still be in progress.
    Message(String),
    /// The ranks made different calls: the signatures of all ranks, in order. No message is in progress.
    Mismatch(Vec<CallSignature>),
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Failure::Message(message)
    }
}

/// Returns the state machine of a call.
pub(super) fn machine(comm: Communicator, number: usize, dtype: Dtype, operation: &Operation) -> Box<dyn Machine> {
    let size = comm.size();
    match operation {
        Operation::AllGather { part, whole, partition } => {
            Box::new(gather(Channel { comm, number }, dtype, *part, *whole, *partition))
        }
        Operation::ReduceScatter { whole, part, part_dtype, partition, reduce } => {
            let channel = Channel { comm, number };
            Box::new(Reduction::new(channel, dtype, *whole, (*part, *part_dtype), *partition, *reduce))
        }
        Operation::AllReduce { buffer, partition, reduce }
            if size > 1 && partition.len() * dtype.bytes() * size <= SMALL_BYTES_MAX =>
        {
            let sum = Sum { dtype, how: *reduce, buffer: *buffer, len: partition.len() };
            Box::new(GatherAndSum::new(Channel { comm, number }, *buffer, partition.len() * dtype.bytes(), Some(sum)))
        }
        Operation::AllReduce { buffer, partition, reduce } => {
            let part = buffer.wrapping_add(partition.range(comm.rank()).start * dtype.bytes());
            let channel = Channel { comm, number };
            Box::new(ReduceThenGather {
                first: Some(Reduction::new(channel, dtype, *buffer, (part, dtype), *partition, *reduce)),
                then: gather(channel, dtype, part, *buffer, *partition),
            })
        }
        Operation::AllToAll { send, sends, receive, receives } => {
            Box::new(exchange(Channel { comm, number }, dtype, *send, sends, *receive, receives))
        }
        Operation::Broadcast { buffer, len, root } => {
            Box::new(Broadcast::new(Channel { comm, number }, pieces(*buffer, len * dtype.bytes()).collect(), *root))
        }
        Operation::Send { buffer, len, to } => {
            let mut flow = Flow::new(Channel { comm, number });
            flow.sends.extend(pieces(buffer.cast_mut(), len * dtype.bytes()).map(|piece| (*to, piece)));
            Box::new(flow)
        }
        Operation::Receive { buffer, len, from } => {
            let mut flow = Flow::new(Channel { comm, number });
            flow.receives.extend(pieces(*buffer, len * dtype.bytes()).map(|piece| (*from, piece)));
            Box::new(flow)
        }
        // A rank has a byte from every rank only after every rank has arrived.
        Operation::Barrier => {
            Box::new(GatherAndSum::new(Channel { comm, number }, std::ptr::from_ref(&ARRIVED), 1, None))
        }
    }
}

/// The byte that a rank sends when it arrives.
static ARRIVED: u8 = 1;

/// Exchanges a byte with each of `ranks`, which include this one. Done when all of them have started the exchange.
pub(super) fn rendezvous(comm: Communicator, ranks: &RankSet) -> impl Machine + use<> {
    let mut words = vec![0u64; ranks.len()];
    let mut gathering = Flow::new(Channel { comm, number: RENDEZVOUS });
    for (rank, word) in ranks.iter().zip(&mut words).filter(|(rank, _)| *rank != comm.rank()) {
        let word = std::ptr::from_mut(word).cast();
        gathering.receives.push_back((rank, Piece { data: word, bytes: 1 }));
        gathering.sends.push_back((rank, Piece { data: std::ptr::from_ref(&ARRIVED).cast_mut(), bytes: 1 }));
    }
    GatherAndSum { gathering, staging: words, contributions: Vec::new(), sum: None }
}

/// Runs `then` once all ranks of the group have sent the same signature. All signature exchanges use the same call number, so
/// that signatures still match those of a rank that has refused a call and moved on to a later one.
pub(super) fn verify_then(comm: Communicator, signature: CallSignature, then: Box<dyn Machine>) -> Box<dyn Machine> {
    let mut signatures = vec![CallSignature::EMPTY; comm.size()];
    signatures[comm.rank()] = signature;
    let all = signatures.as_mut_ptr().cast::<u8>();
    let own = all.wrapping_add(comm.rank() * SIGNATURE_BYTES);
    let partition = Partition::new(comm.size() * SIGNATURE_BYTES, comm.size());
    let gathering = gather(Channel { comm, number: SIGNATURES }, Dtype::U8, own, all, partition);
    Box::new(VerifiedCall { gathering: Some(gathering), signatures, then })
}

/// A run of bytes to send or to receive into.
#[derive(Clone, Copy)]
struct Piece {
    data: *mut u8,
    bytes: usize,
}

fn pieces(data: *mut u8, bytes: usize) -> impl Iterator<Item = Piece> {
    (0..bytes)
        .step_by(PIECE_BYTES_MAX)
        .map(move |start| Piece { data: data.wrapping_add(start), bytes: PIECE_BYTES_MAX.min(bytes - start) })
}

/// A call's communicator, and the number that keeps its messages apart from those of other calls.
#[derive(Clone, Copy)]
struct Channel {
    comm: Communicator,
    number: usize,
}

impl Channel {
    /// The tag of a message: the call number and, for a long message, its length. If an MPI library has too few tags for all
    /// lengths (Open MPI has enough), some lengths share a tag, and MPI itself must report the error.
    fn tag(&self, bytes: usize) -> usize {
        let lengths = ((self.comm.tag_max() + 1) / (SIGNATURES + 1)).min(PIECE_BYTES_MAX + 1);
        let length = if bytes <= SHORT_BYTES_MAX { 0 } else { bytes % lengths };
        self.number * lengths + length
    }

    fn send(&self, to: usize, piece: Piece) -> MpiResult<Request> {
        // SAFETY: the engine keeps the call's buffers until its machine is done, or forever.
        unsafe { self.comm.send(piece.data, piece.bytes, to, self.tag(piece.bytes)) }
    }

    fn receive(&self, from: usize, piece: Piece) -> MpiResult<Request> {
        // SAFETY: as above.
        unsafe { self.comm.receive(piece.data, piece.bytes, from, self.tag(piece.bytes)) }
    }

    /// The other ranks, in the order in which this rank sends to them.
    fn send_order(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.comm.rank(), self.comm.size());
        (1..size).map(move |step| (rank + step) % size)
    }

    /// The other ranks, in the order in which this rank receives from them.
    fn receive_order(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.comm.rank(), self.comm.size());
        (1..size).map(move |step| (rank + size - step) % size)
    }
}

/// Checks the length of a received message: MPI accepts a shorter one silently.
fn check_message_length(from: usize, expected: usize, found: usize) -> MpiResult<()> {
    match expected == found {
        true => Ok(()),
        false => Err(format!(
            "rank {from} of the group sent a message of {found} bytes where {expected} were expected; the ranks disagree \
             about this call"
        )),
    }
}

/// Messages to and from other ranks, posted in order, with a limit on how many are posted at once.
struct Flow {
    channel: Channel,
    sends: VecDeque<(usize, Piece)>,
    receives: VecDeque<(usize, Piece)>,
    sending: Requests<usize>,
    receiving: Requests<(usize, usize)>,
    /// This rank's own contribution, which is copied locally once the first messages are posted.
    own: Option<LocalCopy>,
}

struct LocalCopy {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

impl Flow {
    fn new(channel: Channel) -> Self {
        Flow {
            channel,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            sending: Requests::new(),
            receiving: Requests::new(),
            own: None,
        }
    }
}

impl Machine for Flow {
    fn poll(&mut self) -> Result<Progress, Failure> {
        while self.receiving.len() < MESSAGES_MAX
            && let Some((from, piece)) = self.receives.pop_front()
        {
            self.receiving.push(self.channel.receive(from, piece)?, (from, piece.bytes));
        }
        while self.sending.len() < MESSAGES_MAX
            && let Some((to, piece)) = self.sends.pop_front()
        {
            self.sending.push(self.channel.send(to, piece)?, to);
        }
        if let Some(LocalCopy { from, to, bytes }) = self.own.take() {
            // SAFETY: `Group` has checked the lengths; the buffers of a call are owned, so they do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        }
        let received = self.receiving.poll(|(from, expected), found| check_message_length(from, expected, found))?;
        let sent = self.sending.poll(|_, _| Ok(()))?;
        let posted_all = self.sends.is_empty() && self.receives.is_empty();
        Ok(match posted_all && self.sending.len() + self.receiving.len() == 0 {
            true => Progress::Done,
            false if received || sent => Progress::Moved,
            false => Progress::Stalled,
        })
    }

    fn waits_for(&self) -> Vec<usize> {
        let from =
            self.receiving.contexts().iter().map(|&(from, _)| from).chain(self.receives.iter().map(|&(from, _)| from));
        let to = self.sending.contexts().iter().copied().chain(self.sends.iter().map(|&(to, _)| to));
        from.chain(to).collect()
    }
}

/// All-gather: every rank sends its part directly to every other rank. This rank's part may already be in place in `whole`.
fn gather(channel: Channel, dtype: Dtype, part: *const u8, whole: *mut u8, partition: Partition) -> Flow {
    let location = |rank: usize| {
        let range = partition.range(rank);
        (whole.wrapping_add(range.start * dtype.bytes()), range.len() * dtype.bytes())
    };
    let (own, own_bytes) = location(channel.comm.rank());
    let mut flow = Flow::new(channel);
    if part != own.cast_const() {
        flow.own = Some(LocalCopy { from: part, to: own, bytes: own_bytes });
    }
    for from in channel.receive_order() {
        let (data, bytes) = location(from);
        flow.receives.extend(pieces(data, bytes).map(|piece| (from, piece)));
    }
    for to in channel.send_order() {
        flow.sends.extend(pieces(part.cast_mut(), own_bytes).map(|piece| (to, piece)));
    }
    flow
}

/// All-to-all: every rank sends a range of `send` to every other rank, and copies its own.
fn exchange(
    channel: Channel,
    dtype: Dtype,
    send: *const u8,
    sends: &Splits,
    receive: *mut u8,
    receives: &Splits,
) -> Flow {
    let cut = |data: *mut u8, splits: &Splits, rank: usize| {
        let range = splits.range(rank);
        (data.wrapping_add(range.start * dtype.bytes()), range.len() * dtype.bytes())
    };
    let rank = channel.comm.rank();
    let ((from, _), (to, bytes)) = (cut(send.cast_mut(), sends, rank), cut(receive, receives, rank));
    let mut flow = Flow::new(channel);
    flow.own = Some(LocalCopy { from, to, bytes });
    for from in channel.receive_order() {
        let (data, bytes) = cut(receive, receives, from);
        flow.receives.extend(pieces(data, bytes).map(|piece| (from, piece)));
    }
    for to in channel.send_order() {
        let (data, bytes) = cut(send.cast_mut(), sends, to);
        flow.sends.extend(pieces(data, bytes).map(|piece| (to, piece)));
    }
    flow
}

/// Reduce-scatter in rounds: in each round every rank sends every other rank a piece of that rank's part, then sums the
/// pieces it received and its own, in rank order. Two rounds run at once, each with its half of the staging memory.
///
/// `part` may be in place in `whole`: no other rank reads it there, and this rank reads a piece before it overwrites it.
struct Reduction {
    channel: Channel,
    dtype: Dtype,
    how: ReduceOp,
    whole: *const u8,
    part: *mut u8,
    part_dtype: Dtype,
    partition: Partition,
    /// The number of elements of a part that one round sums.
    round_len: usize,
    rounds: usize,
    /// The first round that is not summed yet.
    next: usize,
    /// The first round that is not posted yet.
    posted: usize,
    staging: Vec<u64>,
    receiving: [Requests<(usize, usize)>; 2],
    sending: Requests<usize>,
    /// The addresses of this round's contributions, in rank order.
    contributions: Vec<*const u8>,
}

impl Reduction {
    fn new(
        channel: Channel,
        dtype: Dtype,
        whole: *const u8,
        (part, part_dtype): (*mut u8, Dtype),
        partition: Partition,
        how: ReduceOp,
    ) -> Self {
        let size = channel.comm.size();
        let round_bytes = (STAGING_BYTES / 2 / size).clamp(ROUND_BYTES.start, ROUND_BYTES.end);
        let round_len = round_bytes / dtype.bytes();
        // All ranks run the same number of rounds, set by the longest part.
        let longest = partition.part_len(0);
        let rounds = longest.div_ceil(round_len);
        let staged_bytes = 2 * size * round_bytes.min(longest * dtype.bytes()).next_multiple_of(size_of::<u64>());
        let staging = if size > 1 { vec![0u64; staged_bytes / size_of::<u64>()] } else { Vec::new() };
        Reduction {
            channel,
            dtype,
            how,
            whole,
            part,
            part_dtype,
            partition,
            round_len,
            rounds,
            next: 0,
            posted: 0,
            staging,
            receiving: [Requests::new(), Requests::new()],
            sending: Requests::new(),
            contributions: Vec::with_capacity(size),
        }
    }

    /// The elements of rank `owner`'s part that are summed in `round`, as a range of the whole.
    fn range(&self, owner: usize, round: usize) -> Range<usize> {
        let part = self.partition.range(owner);
        let start = (part.start + round * self.round_len).min(part.end);
        start..(start + self.round_len).min(part.end)
    }

    /// The staging address for the contribution of rank `from` to `round`.
    fn staging_address(&mut self, from: usize, round: usize) -> *mut u8 {
        let size = self.channel.comm.size();
        let words = self.staging.len() / (2 * size);
        self.staging.as_mut_ptr().wrapping_add((round % 2 * size + from) * words).cast()
    }

    fn post(&mut self, round: usize) -> MpiResult<()> {
        let own_bytes = self.range(self.channel.comm.rank(), round).len() * self.dtype.bytes();
        if own_bytes > 0 {
            for from in self.channel.receive_order() {
                let piece = Piece { data: self.staging_address(from, round), bytes: own_bytes };
                self.receiving[round % 2].push(self.channel.receive(from, piece)?, (from, own_bytes));
            }
        }
        for to in self.channel.send_order() {
            let range = self.range(to, round);
            if !range.is_empty() {
                let data = self.whole.wrapping_add(range.start * self.dtype.bytes()).cast_mut();
                let piece = Piece { data, bytes: range.len() * self.dtype.bytes() };
                self.sending.push(self.channel.send(to, piece)?, to);
            }
        }
        Ok(())
    }

    fn sum(&mut self, round: usize) {
        let rank = self.channel.comm.rank();
        let range = self.range(rank, round);
        self.contributions.clear();
        for from in 0..self.channel.comm.size() {
            let contribution = match from == rank {
                true => self.whole.wrapping_add(range.start * self.dtype.bytes()),
                false => self.staging_address(from, round).cast_const(),
            };
            self.contributions.push(contribution);
        }
        let output = self.part.wrapping_add(round * self.round_len * self.part_dtype.bytes());
        // SAFETY: every contribution has been received whole; the part is as long as `Group` has checked.
        unsafe { reduce_into(self.dtype, self.part_dtype, self.how, &self.contributions, output, range.len()) };
    }
}

impl Machine for Reduction {
    fn poll(&mut self) -> Result<Progress, Failure> {
        let mut moved = false;
        while self.posted < self.rounds.min(self.next + 2) {
            self.post(self.posted)?;
            self.posted += 1;
            moved = true;
        }
        if self.next < self.rounds {
            let receiving = &mut self.receiving[self.next % 2];
            moved |= receiving.poll(|(from, expected), found| check_message_length(from, expected, found))?;
            if receiving.len() == 0 {
                self.sum(self.next);
                self.next += 1;
                moved = true;
            }
        }
        moved |= self.sending.poll(|_, _| Ok(()))?;
        Ok(match self.next == self.rounds && self.sending.len() == 0 {
            true => Progress::Done,
            false if moved => Progress::Moved,
            false => Progress::Stalled,
        })
    }

    fn waits_for(&self) -> Vec<usize> {
        let from = self.receiving[self.next % 2].contexts().iter().map(|&(from, _)| from);
        from.chain(self.sending.contexts().iter().copied()).collect()
    }
}

/// All-reduce: a reduce-scatter, then an all-gather of its results. The gather posts its first message after the reduction's
/// last one is complete, so it does not overwrite data that is yet to be sent.
struct ReduceThenGather {
    first: Option<Reduction>,
    then: Flow,
}

impl Machine for ReduceThenGather {
    fn poll(&mut self) -> Result<Progress, Failure> {
        if let Some(first) = &mut self.first {
            let progress = first.poll()?;
            if progress != Progress::Done {
                return Ok(progress);
            }
            self.first = None;
            return Ok(Progress::Moved);
        }
        self.then.poll()
    }

    fn waits_for(&self) -> Vec<usize> {
        self.first.as_ref().map_or_else(|| self.then.waits_for(), Machine::waits_for)
    }
}

/// Exchanges the signatures of all ranks, then runs the call, which posts nothing before that.
struct VerifiedCall {
    /// `None` once all signatures are here.
    gathering: Option<Flow>,
    signatures: Vec<CallSignature>,
    then: Box<dyn Machine>,
}

impl Machine for VerifiedCall {
    fn poll(&mut self) -> Result<Progress, Failure> {
        let Some(gathering) = &mut self.gathering else {
            return self.then.poll();
        };
        let progress = gathering.poll()?;
        if progress != Progress::Done {
            return Ok(progress);
        }
        self.gathering = None;
        match self.signatures.iter().all(|signature| *signature == self.signatures[0]) {
            true => Ok(Progress::Moved),
            false => Err(Failure::Mismatch(std::mem::take(&mut self.signatures))),
        }
    }

    fn waits_for(&self) -> Vec<usize> {
        self.gathering.as_ref().map_or_else(|| self.then.waits_for(), Machine::waits_for)
    }
}

/// A small all-reduce: every rank gathers all contributions and sums them in rank order. Without a `sum`, this is a barrier.
struct GatherAndSum {
    gathering: Flow,
    /// The memory for the contributions.
    staging: Vec<u64>,
    /// The addresses of the contributions in `staging`, in rank order.
    contributions: Vec<*const u8>,
    sum: Option<Sum>,
}

struct Sum {
    dtype: Dtype,
    how: ReduceOp,
    buffer: *mut u8,
    len: usize,
}

impl GatherAndSum {
    fn new(channel: Channel, own: *const u8, bytes: usize, sum: Option<Sum>) -> Self {
        let size = channel.comm.size();
        let mut staging = vec![0u64; (bytes * size).div_ceil(size_of::<u64>())];
        let whole = staging.as_mut_ptr().cast::<u8>();
        let contributions = (0..size).map(|rank| whole.wrapping_add(rank * bytes).cast_const()).collect();
        let gathering = gather(channel, Dtype::U8, own, whole, Partition::new(bytes * size, size));
        GatherAndSum { gathering, staging, contributions, sum }
    }
}

impl Machine for GatherAndSum {
    fn poll(&mut self) -> Result<Progress, Failure> {
        let progress = self.gathering.poll()?;
        if progress == Progress::Done
            && let Some(Sum { dtype, how, buffer, len }) = self.sum.take()
        {
            assert!(self.staging.len() * size_of::<u64>() >= len * dtype.bytes() * self.contributions.len());
            // SAFETY: the contributions are in the staging memory, `len` elements per rank, completely received.
            unsafe { reduce(dtype, how, &self.contributions, buffer, len) };
        }
        Ok(progress)
    }

    fn waits_for(&self) -> Vec<usize> {
        self.gathering.waits_for()
    }
}

/// Broadcast down a binomial tree, piece by piece: a rank forwards a piece as soon as it has it.
struct Broadcast {
    channel: Channel,
    parent: Option<usize>,
    children: Vec<usize>,
    pieces: Vec<Piece>,
    /// Which pieces have arrived.
    arrived: Vec<bool>,
    /// The first piece whose receive is not posted yet.
    posted: usize,
    /// The first piece that is not forwarded yet.
    forwarded: usize,
    receiving: Requests<(usize, usize)>,
    sending: Requests<usize>,
}

impl Broadcast {
    fn new(channel: Channel, pieces: Vec<Piece>, root: usize) -> Self {
        let (rank, size) = (channel.comm.rank(), channel.comm.size());
        // Nodes count from the root. A node's parent is the node without its lowest bit; its children add a lower bit.
        let node = (rank + size - root) % size;
        let lowest = if node == 0 { size.next_power_of_two() } else { node & node.wrapping_neg() };
        let bits = std::iter::successors(Some(lowest / 2), |bit| Some(bit / 2)).take_while(|&bit| bit > 0);
        let rank_of = |node: usize| (node + root) % size;
        Broadcast {
            channel,
            parent: (node != 0).then(|| rank_of(node & (node - 1))),
            children: bits.map(|bit| node + bit).filter(|&child| child < size).map(rank_of).collect(),
            arrived: vec![node == 0; pieces.len()],
            posted: if node == 0 { pieces.len() } else { 0 },
            forwarded: 0,
            pieces,
            receiving: Requests::new(),
            sending: Requests::new(),
        }
    }
}

impl Machine for Broadcast {
    fn poll(&mut self) -> Result<Progress, Failure> {
        while let Some(parent) = self.parent
            && self.posted < self.pieces.len()
            && self.receiving.len() < MESSAGES_MAX
        {
            let piece = self.pieces[self.posted];
            self.receiving.push(self.channel.receive(parent, piece)?, (self.posted, piece.bytes));
            self.posted += 1;
        }
        let (arrived, parent) = (&mut self.arrived, self.parent.unwrap_or_default());
        let mut moved = self.receiving.poll(|(index, expected), found| {
            arrived[index] = true;
            check_message_length(parent, expected, found)
        })?;
        // Forward in order: the children post their receives in that order.
        while self.forwarded < self.pieces.len() && self.arrived[self.forwarded] && self.sending.len() < MESSAGES_MAX {
            for &child in &self.children {
                self.sending.push(self.channel.send(child, self.pieces[self.forwarded])?, child);
            }
            self.forwarded += 1;
            moved = true;
        }
        moved |= self.sending.poll(|_, _| Ok(()))?;
        Ok(match self.forwarded == self.pieces.len() && self.sending.len() == 0 {
            true => Progress::Done,
            false if moved => Progress::Moved,
            false => Progress::Stalled,
        })
    }

    fn waits_for(&self) -> Vec<usize> {
        let from = self.parent.filter(|_| self.arrived.contains(&false));
        from.into_iter().chain(self.sending.contexts().iter().copied()).collect()
    }
}
