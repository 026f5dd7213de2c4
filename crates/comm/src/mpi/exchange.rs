//! Collectives made of messages between two ranks, as machines that are polled.
//!
//! # Note: no deadlock, and no hot spot
//! All ranks go through the same sequence of steps: in step k a rank sends to the rank k places up and receives from the
//! rank k places down, so at any time everyone sends to someone else. A rank posts its messages in that order, at most
//! [`MESSAGES_MAX`] at once each way (a reduction: two rounds of one to and from each rank). The earliest message of the
//! sequence that is not complete is posted on both its sides, because everything before it is complete; so some message can
//! always complete.
//!
//! # Note: a long message meets a receive of its own length, or none
//! Ranks that disagree about a call send messages to receives that were meant for others. MPI promises an error where a
//! message is longer than its receive; Open MPI 4.1.4, between processes of one host, gives the error and writes the whole
//! message (262,144 bytes sent to a receive of 1,024 overwrote the 261,120 behind it). So the length of a long message is part
//! of its tag: ranks that disagree about it wait for each other until the time limit, and no memory is touched. Short messages
//! pass through MPI's own buffers, where its error is true, and prompt.

use std::collections::VecDeque;
use std::ops::Range;

use shardwise_plan::{Dtype, Partition, RankSet};

use super::card::{CARD_BYTES, Card};
use super::sys::{Communicator, Outcome, Request, Requests};
use crate::Reduce;
use crate::reduce::reduce;
use crate::transport::{Cuts, Work};

/// The longest message. A few milliseconds of a slow link, so that a call that moves is seen to move.
pub(super) const PIECE_BYTES_MAX: usize = 4 << 20;

/// Messages that one call has under way at once, each way.
const MESSAGES_MAX: usize = 32;

/// The staging memory of a reduction is two rounds of one piece per rank; a piece is as large as this allows, between the
/// two bounds. 256 KiB was the fastest of 64, 256 and 1024 KiB for 2, 4 and 8 ranks on one host.
const STAGING_BYTES: usize = 4 << 20;
const ROUND_BYTES: Range<usize> = 16 << 10..256 << 10;

/// Up to this many bytes from all ranks together, an all-reduce gathers all contributions.
const SMALL_BYTES_MAX: usize = 64 << 10;

/// Up to this many bytes a message is short. Open MPI goes past its own buffers from 4 KiB on, unless it is told otherwise.
const SHORT_BYTES_MAX: usize = 2 << 10;

/// Calls are told apart by their place in the order, modulo this: as many as leave tags for every length. Collectives under way
/// are never nearly as many, and messages between two ranks that share a number and a length arrive in order.
pub(super) const NUMBERS: usize = 500;

/// The number of ranks that meet to make a group.
const MEETING: usize = NUMBERS;

/// The number of the cards that ranks show before a collective.
const CARDS: usize = NUMBERS + 1;

/// A call as a machine.
pub(super) trait Machine {
    /// Lets it go on without waiting.
    fn poll(&mut self) -> Result<Progress, Failure>;

    /// The ranks of the group from which or to which something is missing, where that is known.
    fn waits_for(&self) -> Vec<usize>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Still,
    Moved,
    Done,
}

/// Why a call cannot go on.
#[derive(Debug)]
pub(super) enum Failure {
    /// A message failed, in MPI's words or ours. Others may still be under way.
    Message(String),
    /// The ranks came with different calls: all their cards, in order. No message is under way.
    Cards(Vec<Card>),
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Failure::Message(message)
    }
}

/// The machine for a call.
pub(super) fn machine(comm: Communicator, number: usize, dtype: Dtype, work: &Work) -> Box<dyn Machine> {
    let size = comm.size();
    match work {
        Work::AllGather { part, whole, partition } => {
            Box::new(gather(Wire { comm, number }, dtype, *part, *whole, *partition))
        }
        Work::ReduceScatter { whole, part, partition, reduce } => {
            Box::new(Reduction::new(Wire { comm, number }, dtype, *whole, *part, *partition, *reduce))
        }
        Work::AllReduce { buffer, partition, reduce }
            if size > 1 && partition.len() * dtype.bytes() * size <= SMALL_BYTES_MAX =>
        {
            let sum = Sum { dtype, how: *reduce, buffer: *buffer, len: partition.len() };
            Box::new(Staged::new(Wire { comm, number }, *buffer, partition.len() * dtype.bytes(), Some(sum)))
        }
        Work::AllReduce { buffer, partition, reduce } => {
            let part = buffer.wrapping_add(partition.range(comm.rank()).start * dtype.bytes());
            let wire = Wire { comm, number };
            Box::new(Sequence {
                first: Some(Reduction::new(wire, dtype, *buffer, part, *partition, *reduce)),
                then: gather(wire, dtype, part, *buffer, *partition),
            })
        }
        Work::AllToAll { send, sends, receive, receives } => {
            Box::new(exchange(Wire { comm, number }, dtype, *send, sends, *receive, receives))
        }
        Work::Broadcast { buffer, len, root } => {
            Box::new(Broadcast::new(Wire { comm, number }, pieces(*buffer, len * dtype.bytes()).collect(), *root))
        }
        Work::Send { buffer, len, to } => {
            let mut flow = Flow::new(Wire { comm, number });
            flow.sends.extend(pieces(buffer.cast_mut(), len * dtype.bytes()).map(|piece| (*to, piece)));
            Box::new(flow)
        }
        Work::Receive { buffer, len, from } => {
            let mut flow = Flow::new(Wire { comm, number });
            flow.receives.extend(pieces(*buffer, len * dtype.bytes()).map(|piece| (*from, piece)));
            Box::new(flow)
        }
        // Nobody has a word from everyone before everyone has come.
        Work::Barrier => Box::new(Staged::new(Wire { comm, number }, std::ptr::from_ref(&HERE), 1, None)),
    }
}

/// What a rank sends to say that it has come.
static HERE: u8 = 1;

/// A word from and to each of `ranks`, of which this rank is one: done when all have asked for it.
pub(super) fn meeting(comm: Communicator, ranks: &RankSet) -> impl Machine + use<> {
    let mut words = vec![0u64; ranks.len()];
    let mut gathering = Flow::new(Wire { comm, number: MEETING });
    for (rank, word) in ranks.iter().zip(&mut words).filter(|(rank, _)| *rank != comm.rank()) {
        let word = std::ptr::from_mut(word).cast();
        gathering.receives.push_back((rank, Piece { data: word, bytes: 1 }));
        gathering.sends.push_back((rank, Piece { data: std::ptr::from_ref(&HERE).cast_mut(), bytes: 1 }));
    }
    Staged { gathering, staging: words, contributions: Vec::new(), sum: None }
}

/// `then`, once all ranks of the group have shown the same card. The cards of all calls have one number: a rank that
/// has refused a call, and comes with a later one, is met all the same.
pub(super) fn after_cards(comm: Communicator, card: Card, then: Box<dyn Machine>) -> Box<dyn Machine> {
    let mut cards = vec![Card::EMPTY; comm.size()];
    cards[comm.rank()] = card;
    let all = cards.as_mut_ptr().cast::<u8>();
    let own = all.wrapping_add(comm.rank() * CARD_BYTES);
    let partition = Partition::new(comm.size() * CARD_BYTES, comm.size());
    let gathering = gather(Wire { comm, number: CARDS }, Dtype::U8, own, all, partition);
    Box::new(Cards { gathering: Some(gathering), cards, then })
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

/// Where the messages of one call travel, and the call's number among those that could be confused with it.
#[derive(Clone, Copy)]
struct Wire {
    comm: Communicator,
    number: usize,
}

impl Wire {
    /// The number, and the length of a long message. Where MPI has too few tags for all lengths (not Open MPI), some share one,
    /// and it is for MPI to keep its promise.
    fn tag(&self, bytes: usize) -> usize {
        let lengths = ((self.comm.tag_max() + 1) / (CARDS + 1)).min(PIECE_BYTES_MAX + 1);
        let length = if bytes <= SHORT_BYTES_MAX { 0 } else { bytes % lengths };
        self.number * lengths + length
    }

    fn send(&self, to: usize, piece: Piece) -> Outcome<Request> {
        // SAFETY: the engine keeps the call's buffers until its machine is done, or forever.
        unsafe { self.comm.send(piece.data, piece.bytes, to, self.tag(piece.bytes)) }
    }

    fn receive(&self, from: usize, piece: Piece) -> Outcome<Request> {
        // SAFETY: as above.
        unsafe { self.comm.receive(piece.data, piece.bytes, from, self.tag(piece.bytes)) }
    }

    /// The other ranks in the order of the steps, as seen by a sender.
    fn upwards(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.comm.rank(), self.comm.size());
        (1..size).map(move |step| (rank + step) % size)
    }

    /// The same as seen by a receiver.
    fn downwards(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.comm.rank(), self.comm.size());
        (1..size).map(move |step| (rank + size - step) % size)
    }
}

/// A message that was received must have the length that was expected: MPI itself accepts a shorter one in silence.
fn whole_message(from: usize, expected: usize, found: usize) -> Outcome<()> {
    match expected == found {
        true => Ok(()),
        false => Err(format!(
            "rank {from} of the group sent a message of {found} bytes where {expected} were expected; the ranks disagree \
             about what this call is"
        )),
    }
}

/// Messages to and from other ranks, posted in order with a bound on those under way.
struct Flow {
    wire: Wire,
    sends: VecDeque<(usize, Piece)>,
    receives: VecDeque<(usize, Piece)>,
    sending: Requests<usize>,
    receiving: Requests<(usize, usize)>,
    /// What this rank has for itself. It is copied when the first messages are on their way.
    own: Option<Copy>,
}

struct Copy {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

impl Flow {
    fn new(wire: Wire) -> Self {
        Flow {
            wire,
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
            self.receiving.push(self.wire.receive(from, piece)?, (from, piece.bytes));
        }
        while self.sending.len() < MESSAGES_MAX
            && let Some((to, piece)) = self.sends.pop_front()
        {
            self.sending.push(self.wire.send(to, piece)?, to);
        }
        if let Some(Copy { from, to, bytes }) = self.own.take() {
            // SAFETY: `Group` has checked the lengths; buffers of one call do not overlap, for they are owned.
            unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        }
        let received = self.receiving.poll(|(from, expected), found| whole_message(from, expected, found))?;
        let sent = self.sending.poll(|_, _| Ok(()))?;
        let posted_all = self.sends.is_empty() && self.receives.is_empty();
        Ok(match posted_all && self.sending.len() + self.receiving.len() == 0 {
            true => Progress::Done,
            false if received || sent => Progress::Moved,
            false => Progress::Still,
        })
    }

    fn waits_for(&self) -> Vec<usize> {
        let from =
            self.receiving.about().iter().map(|&(from, _)| from).chain(self.receives.iter().map(|&(from, _)| from));
        let to = self.sending.about().iter().copied().chain(self.sends.iter().map(|&(to, _)| to));
        from.chain(to).collect()
    }
}

/// Everyone's part to everyone's whole. The part may already stand in its place.
fn gather(wire: Wire, dtype: Dtype, part: *const u8, whole: *mut u8, partition: Partition) -> Flow {
    let place = |rank: usize| {
        let range = partition.range(rank);
        (whole.wrapping_add(range.start * dtype.bytes()), range.len() * dtype.bytes())
    };
    let (own, own_bytes) = place(wire.comm.rank());
    let mut flow = Flow::new(wire);
    if part != own.cast_const() {
        flow.own = Some(Copy { from: part, to: own, bytes: own_bytes });
    }
    for from in wire.downwards() {
        let (data, bytes) = place(from);
        flow.receives.extend(pieces(data, bytes).map(|piece| (from, piece)));
    }
    for to in wire.upwards() {
        flow.sends.extend(pieces(part.cast_mut(), own_bytes).map(|piece| (to, piece)));
    }
    flow
}

/// Everyone's parts to everyone.
fn exchange(wire: Wire, dtype: Dtype, send: *const u8, sends: &Cuts, receive: *mut u8, receives: &Cuts) -> Flow {
    let cut = |data: *mut u8, cuts: &Cuts, rank: usize| {
        let range = cuts.range(rank);
        (data.wrapping_add(range.start * dtype.bytes()), range.len() * dtype.bytes())
    };
    let rank = wire.comm.rank();
    let ((from, _), (to, bytes)) = (cut(send.cast_mut(), sends, rank), cut(receive, receives, rank));
    let mut flow = Flow::new(wire);
    flow.own = Some(Copy { from, to, bytes });
    for from in wire.downwards() {
        let (data, bytes) = cut(receive, receives, from);
        flow.receives.extend(pieces(data, bytes).map(|piece| (from, piece)));
    }
    for to in wire.upwards() {
        let (data, bytes) = cut(send.cast_mut(), sends, to);
        flow.sends.extend(pieces(data, bytes).map(|piece| (to, piece)));
    }
    flow
}

/// Exchange-then-sum in rounds: in each round everyone sends everyone a piece of their part, and sums what it received with
/// its own, in rank order. Two rounds are under way at once, each with its half of the staging memory.
///
/// `part` may stand in its place in `whole`: no other rank reads it there, and this one reads a piece before it writes it.
struct Reduction {
    wire: Wire,
    dtype: Dtype,
    how: Reduce,
    whole: *const u8,
    part: *mut u8,
    partition: Partition,
    /// Elements of a part that are summed in one round.
    round_len: usize,
    rounds: usize,
    /// The first round that is not summed.
    next: usize,
    /// The first round that is not posted.
    posted: usize,
    staging: Vec<u64>,
    receiving: [Requests<(usize, usize)>; 2],
    sending: Requests<usize>,
    /// Where this round's contributions are, in rank order.
    contributions: Vec<*const u8>,
}

impl Reduction {
    fn new(wire: Wire, dtype: Dtype, whole: *const u8, part: *mut u8, partition: Partition, how: Reduce) -> Self {
        let size = wire.comm.size();
        let round_bytes = (STAGING_BYTES / 2 / size).clamp(ROUND_BYTES.start, ROUND_BYTES.end);
        let round_len = round_bytes / dtype.bytes();
        // All ranks count rounds alike, by the longest part.
        let longest = partition.part_len(0);
        let rounds = longest.div_ceil(round_len);
        let staged_bytes = 2 * size * round_bytes.min(longest * dtype.bytes()).next_multiple_of(size_of::<u64>());
        let staging = if size > 1 { vec![0u64; staged_bytes / size_of::<u64>()] } else { Vec::new() };
        Reduction {
            wire,
            dtype,
            how,
            whole,
            part,
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

    /// Where what `from` contributes to `round` is received.
    fn staged(&mut self, from: usize, round: usize) -> *mut u8 {
        let size = self.wire.comm.size();
        let words = self.staging.len() / (2 * size);
        self.staging.as_mut_ptr().wrapping_add((round % 2 * size + from) * words).cast()
    }

    fn post(&mut self, round: usize) -> Outcome<()> {
        let own_bytes = self.range(self.wire.comm.rank(), round).len() * self.dtype.bytes();
        if own_bytes > 0 {
            for from in self.wire.downwards() {
                let piece = Piece { data: self.staged(from, round), bytes: own_bytes };
                self.receiving[round % 2].push(self.wire.receive(from, piece)?, (from, own_bytes));
            }
        }
        for to in self.wire.upwards() {
            let range = self.range(to, round);
            if !range.is_empty() {
                let data = self.whole.wrapping_add(range.start * self.dtype.bytes()).cast_mut();
                let piece = Piece { data, bytes: range.len() * self.dtype.bytes() };
                self.sending.push(self.wire.send(to, piece)?, to);
            }
        }
        Ok(())
    }

    fn sum(&mut self, round: usize) {
        let rank = self.wire.comm.rank();
        let range = self.range(rank, round);
        self.contributions.clear();
        for from in 0..self.wire.comm.size() {
            let contribution = match from == rank {
                true => self.whole.wrapping_add(range.start * self.dtype.bytes()),
                false => self.staged(from, round).cast_const(),
            };
            self.contributions.push(contribution);
        }
        let output = self.part.wrapping_add(round * self.round_len * self.dtype.bytes());
        // SAFETY: every contribution has been received whole; the part is as long as `Group` has checked.
        unsafe { reduce(self.dtype, self.how, &self.contributions, output, range.len()) };
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
            moved |= receiving.poll(|(from, expected), found| whole_message(from, expected, found))?;
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
            false => Progress::Still,
        })
    }

    fn waits_for(&self) -> Vec<usize> {
        let from = self.receiving[self.next % 2].about().iter().map(|&(from, _)| from);
        from.chain(self.sending.about().iter().copied()).collect()
    }
}

/// A reduction, then a gather of its results. The gather's first message is posted when the reduction's last is complete, so
/// nothing is received over what is still to be sent.
struct Sequence {
    first: Option<Reduction>,
    then: Flow,
}

impl Machine for Sequence {
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

/// Everyone's card to everyone, then the call itself, of which nothing is posted before.
struct Cards {
    /// Until they are all here.
    gathering: Option<Flow>,
    cards: Vec<Card>,
    then: Box<dyn Machine>,
}

impl Machine for Cards {
    fn poll(&mut self) -> Result<Progress, Failure> {
        let Some(gathering) = &mut self.gathering else {
            return self.then.poll();
        };
        let progress = gathering.poll()?;
        if progress != Progress::Done {
            return Ok(progress);
        }
        self.gathering = None;
        match self.cards.iter().all(|card| *card == self.cards[0]) {
            true => Ok(Progress::Moved),
            false => Err(Failure::Cards(std::mem::take(&mut self.cards))),
        }
    }

    fn waits_for(&self) -> Vec<usize> {
        self.gathering.as_ref().map_or_else(|| self.then.waits_for(), Machine::waits_for)
    }
}

/// A little from everyone: all contributions are gathered, then summed by everyone in rank order, or just waited for.
struct Staged {
    gathering: Flow,
    /// Where they are received.
    staging: Vec<u64>,
    /// Their addresses there, in rank order.
    contributions: Vec<*const u8>,
    sum: Option<Sum>,
}

struct Sum {
    dtype: Dtype,
    how: Reduce,
    buffer: *mut u8,
    len: usize,
}

impl Staged {
    fn new(wire: Wire, own: *const u8, bytes: usize, sum: Option<Sum>) -> Self {
        let size = wire.comm.size();
        let mut staging = vec![0u64; (bytes * size).div_ceil(size_of::<u64>())];
        let whole = staging.as_mut_ptr().cast::<u8>();
        let contributions = (0..size).map(|rank| whole.wrapping_add(rank * bytes).cast_const()).collect();
        let gathering = gather(wire, Dtype::U8, own, whole, Partition::new(bytes * size, size));
        Staged { gathering, staging, contributions, sum }
    }
}

impl Machine for Staged {
    fn poll(&mut self) -> Result<Progress, Failure> {
        let progress = self.gathering.poll()?;
        if progress == Progress::Done
            && let Some(Sum { dtype, how, buffer, len }) = self.sum.take()
        {
            assert!(self.staging.len() * size_of::<u64>() >= len * dtype.bytes() * self.contributions.len());
            // SAFETY: the contributions are in the staging memory, one run of `len` elements per rank, received whole.
            unsafe { reduce(dtype, how, &self.contributions, buffer, len) };
        }
        Ok(progress)
    }

    fn waits_for(&self) -> Vec<usize> {
        self.gathering.waits_for()
    }
}

/// From the root down a binomial tree, piece by piece: a rank hands a piece on as soon as it has it.
struct Broadcast {
    wire: Wire,
    parent: Option<usize>,
    children: Vec<usize>,
    pieces: Vec<Piece>,
    /// Which pieces are here.
    here: Vec<bool>,
    /// The first piece that is not asked for.
    asked: usize,
    /// The first piece that is not handed on.
    handed: usize,
    receiving: Requests<(usize, usize)>,
    sending: Requests<usize>,
}

impl Broadcast {
    fn new(wire: Wire, pieces: Vec<Piece>, root: usize) -> Self {
        let (rank, size) = (wire.comm.rank(), wire.comm.size());
        // Places count from the root. A place's parent is the place without its lowest bit; its children add a lower one.
        let place = (rank + size - root) % size;
        let lowest = if place == 0 { size.next_power_of_two() } else { place & place.wrapping_neg() };
        let bits = std::iter::successors(Some(lowest / 2), |bit| Some(bit / 2)).take_while(|&bit| bit > 0);
        let at = |place: usize| (place + root) % size;
        Broadcast {
            wire,
            parent: (place != 0).then(|| at(place & (place - 1))),
            children: bits.map(|bit| place + bit).filter(|&child| child < size).map(at).collect(),
            here: vec![place == 0; pieces.len()],
            asked: if place == 0 { pieces.len() } else { 0 },
            handed: 0,
            pieces,
            receiving: Requests::new(),
            sending: Requests::new(),
        }
    }
}

impl Machine for Broadcast {
    fn poll(&mut self) -> Result<Progress, Failure> {
        while let Some(parent) = self.parent
            && self.asked < self.pieces.len()
            && self.receiving.len() < MESSAGES_MAX
        {
            let piece = self.pieces[self.asked];
            self.receiving.push(self.wire.receive(parent, piece)?, (self.asked, piece.bytes));
            self.asked += 1;
        }
        let (here, parent) = (&mut self.here, self.parent.unwrap_or_default());
        let mut moved = self.receiving.poll(|(index, expected), found| {
            here[index] = true;
            whole_message(parent, expected, found)
        })?;
        // In order, for that is how the children take them.
        while self.handed < self.pieces.len() && self.here[self.handed] && self.sending.len() < MESSAGES_MAX {
            for &child in &self.children {
                self.sending.push(self.wire.send(child, self.pieces[self.handed])?, child);
            }
            self.handed += 1;
            moved = true;
        }
        moved |= self.sending.poll(|_, _| Ok(()))?;
        Ok(match self.handed == self.pieces.len() && self.sending.len() == 0 {
            true => Progress::Done,
            false if moved => Progress::Moved,
            false => Progress::Still,
        })
    }

    fn waits_for(&self) -> Vec<usize> {
        let from = self.parent.filter(|_| self.here.contains(&false));
        from.into_iter().chain(self.sending.about().iter().copied()).collect()
    }
}
