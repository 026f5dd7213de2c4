//! A rank's part of a checkpoint, which is written while training continues.
//!
//! A snapshot is a list of pieces, each a range of a file. Most pieces are ranges of the trainer's own tensors, and are written
//! straight from there, in the order in which training will update them. If training reaches a unit before it is written, the unit's
//! tensors are detached: the save keeps the old memory, and the update writes to new memory. Where that is impossible, training
//! copies what is not written yet. The size of what is detached or copied is limited; at the limit, training waits. A blocking save
//! neither detaches nor copies.
//!
//! # Note: who may touch a saved tensor
//! While a thread writes a snapshot, it reads tensors that belong to the trainer. Until a tensor is released, the training thread
//! may neither write to it nor lend its memory to a collective; after that, the save no longer reads it. Shards that every pass
//! lends to collectives are released when training continues after the snapshot ([`TensorSet::Lent`]). All others are released
//! unit by unit, each before its update ([`TensorSet::Unit`]), which fails while a snapshot holds a [`TensorLease`].
//! A detached tensor belongs to the snapshot; the update may read it too.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use shardwise_checkpoint::{ByteSource, UPLOAD_BYTES};
use shardwise_comm::{Group, ReduceOp};
use shardwise_torch::tch::{Device, Kind, TchError, Tensor};
use shardwise_torch::{Block, Stream, read, storage};

use shardwise_train::TensorLease;

/// The files of a checkpoint that this rank writes.
pub(crate) struct Snapshot {
    pub(crate) files: Vec<OwnFile>,
    /// By unit: its pieces.
    units: Vec<Range<usize>>,
    buffer_bytes: usize,
    /// On which tensors are copied from a device, next to what training queues there.
    stream: Option<Arc<Stream>>,
    /// Whether the last unit is updated first.
    updates_last_first: bool,
    state: Mutex<State>,
    /// Signaled when a piece changes its state.
    changed: Condvar,
}

/// A file that this rank writes.
pub(crate) struct OwnFile {
    /// The index of the unit in the model.
    pub(crate) unit: usize,
    /// The index of the file among the unit's files.
    pub(crate) file: usize,
    pub(crate) name: String,
    /// For each part, the indices and lengths of its pieces in the snapshot. A part is written in one call.
    parts: Vec<Vec<(usize, usize)>>,
}

/// Reads a piece of a snapshot.
pub(crate) struct PieceReader<'a> {
    snapshot: &'a Snapshot,
    unit: usize,
    /// The index of the piece in the snapshot.
    index: usize,
    /// The bytes of the piece that have not been read yet.
    left: Range<usize>,
}

impl ByteSource for PieceReader<'_> {
    fn remaining(&self) -> usize {
        self.left.len()
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<()> {
        let end = self.left.start + into.len();
        let is_end = end == self.left.end;
        self.snapshot.read(self.unit, self.index, self.left.start, is_end, into).map_err(io::Error::other)?;
        self.left.start = end;
        Ok(())
    }
}

/// The contents of a range of a file.
pub(crate) enum Content {
    /// A header, or another rank's shard.
    Bytes(Bytes),
    /// A one-dimensional tensor of the trainer.
    Tensor(SavedTensor),
}

/// A tensor of the trainer.
pub(crate) struct SavedTensor {
    pub(crate) tensor: Tensor,
    /// Its index among the checkpoint tensors of its unit.
    pub(crate) index: usize,
    /// Whether its memory is lent to a collective when the unit is gathered. Other tensors are not touched until the next update.
    pub(crate) is_lent: bool,
    /// Whether the update can leave the memory to the snapshot.
    pub(crate) is_detachable: bool,
}

/// Detaches a tensor of a unit, by its index. Returns it, or none if there is no memory for a new one.
pub(crate) type Detach<'a> = dyn FnMut(usize) -> Option<Tensor> + 'a;

/// The tensors that training is about to touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorSet {
    /// Those lent to collectives in every pass.
    Lent,
    /// Those of a unit, which the optimizer updates.
    Unit(usize),
}

struct State {
    pieces: Vec<Piece>,
    tensors: Vec<TensorState>,
    /// The bytes of copies and of detached tensors.
    buffered_bytes: usize,
    /// A unit whose tensors are being detached, which no thread may start to read.
    paused: Option<usize>,
    /// Whether a thread writes the snapshot, or will.
    is_being_written: bool,
    /// Whether pieces may have been released, so that the snapshot cannot be written again.
    is_stale: bool,
    /// By unit: prevents its update until it is released.
    leases: Vec<Option<TensorLease>>,
    /// How long updates stalled until their tensors were released.
    stalled: Duration,
    /// How long training waited because the buffer was full.
    waited: Duration,
}

/// The bytes of a piece, and where they are.
enum Piece {
    /// Not in a tensor of the trainer.
    Here(Bytes),
    /// In the trainer's tensor, not yet written.
    Waiting(Source),
    /// A thread is copying it from the tensor.
    Busy,
    /// Written, and still in the tensor.
    Written(Source),
    /// Copied into the buffer.
    Copied(Bytes),
    /// Released: the tensor may have changed.
    Gone,
}

/// A range of a tensor's bytes.
struct Source {
    /// The index of the tensor in the snapshot.
    tensor: usize,
    bytes: Range<usize>,
}

/// A tensor that has pieces.
struct TensorState {
    saved: SavedTensor,
    pieces: Range<usize>,
    /// Whether the memory belongs to the snapshot.
    is_detached: bool,
}

impl TensorState {
    fn bytes(&self) -> usize {
        self.saved.bytes()
    }
}

impl SavedTensor {
    fn bytes(&self) -> usize {
        self.tensor.numel() * self.tensor.kind().elt_size_in_bytes()
    }
}

impl State {
    /// Whether training has to wait for a piece, or copy it, before touching its tensor.
    fn is_held(&self, piece: usize, which: TensorSet) -> bool {
        match &self.pieces[piece] {
            Piece::Waiting(source) | Piece::Written(source) => {
                let tensor = &self.tensors[source.tensor];
                !tensor.is_detached && (which != TensorSet::Lent || tensor.saved.is_lent)
            }
            Piece::Busy => true,
            Piece::Here(_) | Piece::Copied(_) | Piece::Gone => false,
        }
    }

    /// The tensors of a unit that could be detached, and of which something is not written yet.
    fn detachable(&self, unit: &Range<usize>) -> Vec<usize> {
        let is_wanted = |tensor: &TensorState| {
            let is_in_unit = unit.contains(&tensor.pieces.start);
            let is_unwritten =
                || self.pieces[tensor.pieces.clone()].iter().any(|piece| matches!(piece, Piece::Waiting(_)));
            is_in_unit && tensor.saved.is_detachable && !tensor.is_detached && is_unwritten()
        };
        (0..self.tensors.len()).filter(|&index| is_wanted(&self.tensors[index])).collect()
    }

    /// Frees a detached tensor once all of it is written.
    fn free_written(&mut self, tensor: usize) {
        let TensorState { saved, pieces, is_detached } = &mut self.tensors[tensor];
        if *is_detached && self.pieces[pieces.clone()].iter().all(|piece| matches!(piece, Piece::Gone)) {
            self.buffered_bytes -= saved.bytes();
            saved.tensor = Tensor::new();
            *is_detached = false;
        }
    }
}

impl Source {
    /// Copies the range of the tensor into host memory, on `stream` if it is on a device.
    fn copy(&self, tensor: &Tensor, stream: Option<&Stream>) -> std::result::Result<Bytes, String> {
        if let Some(stream) = stream {
            let mut bytes = Vec::new();
            bytes.try_reserve_exact(self.bytes.len()).map_err(|error| error.to_string())?;
            bytes.resize(self.bytes.len(), 0);
            self.read(tensor, 0, &mut bytes, Some(stream))?;
            return Ok(Bytes::from(bytes));
        }
        let bytes = self.view(tensor, 0, self.bytes.len()).map_err(|error| first_line(&error))?;
        Ok(into_bytes(copy(&bytes)?))
    }

    /// Copies a part of the range into `into`, on `stream` if it is on a device. Waits for nothing else there.
    fn read(
        &self,
        tensor: &Tensor,
        from: usize,
        into: &mut [u8],
        stream: Option<&Stream>,
    ) -> std::result::Result<(), String> {
        let bytes = self.view(tensor, from, into.len()).map_err(|error| first_line(&error))?;
        match stream {
            Some(stream) => stream.run(|| read(&bytes, into)).flatten().map_err(|error| first_line(&error)),
            None => bytes.f_copy_data_u8(into, into.len()).map_err(|error| first_line(&error)),
        }
    }

    /// Views a part of the range as bytes: it may start or end inside an element.
    fn view(&self, tensor: &Tensor, from: usize, len: usize) -> std::result::Result<Tensor, TchError> {
        tensor.f_view_dtype(Kind::Uint8)?.f_narrow(0, (self.bytes.start + from) as i64, len as i64)
    }
}

/// Builds a snapshot.
#[derive(Default)]
pub(crate) struct Builder {
    files: Vec<OwnFile>,
    pieces: Vec<Piece>,
    tensors: Vec<TensorState>,
    units: Vec<Range<usize>>,
    leases: Vec<Option<TensorLease>>,
}

impl Builder {
    /// Starts the next unit of the model, whose files follow.
    pub(crate) fn start_unit(&mut self, lease: Option<TensorLease>) {
        self.units.push(self.pieces.len()..self.pieces.len());
        self.leases.push(lease);
    }

    /// Adds a file of the current unit.
    pub(crate) fn add(&mut self, file: usize, name: String, contents: Vec<Content>) {
        let mut parts = vec![Vec::new()];
        let mut room = UPLOAD_BYTES as usize;
        for content in contents {
            let (mut from, len) = (0, content.len());
            let (first, tensor) = (self.pieces.len(), self.tensors.len());
            while from < len {
                if room == 0 {
                    parts.push(Vec::new());
                    room = UPLOAD_BYTES as usize;
                }
                let to = len.min(from + room);
                parts.last_mut().expect("parts starts with one").push((self.pieces.len(), to - from));
                self.pieces.push(match &content {
                    Content::Bytes(all) => Piece::Here(all.slice(from..to)),
                    Content::Tensor(_) => Piece::Waiting(Source { tensor, bytes: from..to }),
                });
                room -= to - from;
                from = to;
            }
            if let Content::Tensor(saved) = content {
                self.tensors.push(TensorState { saved, pieces: first..self.pieces.len(), is_detached: false });
            }
        }
        let unit = self.units.len() - 1;
        self.units[unit].end = self.pieces.len();
        self.files.push(OwnFile { unit, file, name, parts });
    }

    /// Returns the snapshot. Its copies and detached tensors take at most `buffer_bytes`. Its writer holds a [`WriterGuard`]. If the
    /// tensors are on a device, `stream` has waited for everything that writes to them.
    /// `updates_last_first` says whether the next update starts with the last unit.
    pub(crate) fn finish(self, buffer_bytes: usize, stream: Option<Arc<Stream>>, updates_last_first: bool) -> Snapshot {
        let state = State {
            pieces: self.pieces,
            tensors: self.tensors,
            buffered_bytes: 0,
            paused: None,
            is_being_written: false,
            is_stale: false,
            leases: self.leases,
            stalled: Duration::ZERO,
            waited: Duration::ZERO,
        };
        let (files, units) = (self.files, self.units);
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Snapshot { files, units, buffer_bytes, stream, updates_last_first, state, changed }
    }
}

impl Content {
    fn len(&self) -> usize {
        match self {
            Content::Bytes(bytes) => bytes.len(),
            Content::Tensor(saved) => saved.bytes(),
        }
    }
}

/// Held by a thread that writes a snapshot, or is about to. Once it is dropped, training no longer waits for the thread.
pub(crate) struct WriterGuard(Arc<Snapshot>);

impl WriterGuard {
    pub(crate) fn new(snapshot: &Arc<Snapshot>) -> Self {
        snapshot.lock().is_being_written = true;
        WriterGuard(snapshot.clone())
    }

    pub(crate) fn snapshot(&self) -> &Snapshot {
        &self.0
    }
}

impl Drop for WriterGuard {
    fn drop(&mut self) {
        self.0.lock().is_being_written = false;
        self.0.changed.notify_all();
    }
}

/// Releases the tensors that training is about to touch, of a snapshot that may already have been written and dropped on this rank.
/// `detach` is called for tensors of the unit that is released. All ranks of `group` call it together.
pub(crate) fn release_tensors(
    group: &Group,
    snapshot: Option<&Snapshot>,
    which: TensorSet,
    detach: &mut Detach<'_>,
) -> std::result::Result<(), shardwise_comm::Error> {
    let began = Instant::now();
    let mut waits_since = None;
    // Disks may differ in speed by more than the timeout of a single call.
    loop {
        let is_held = snapshot.is_some_and(|snapshot| !snapshot.release(which, detach));
        let any = group.all_reduce("checkpoint's buffer", ReduceOp::Max, vec![i64::from(is_held)]).wait()?;
        if any[0] == 0 {
            break;
        }
        waits_since.get_or_insert_with(Instant::now);
    }
    if let Some(snapshot) = snapshot {
        let mut state = snapshot.lock();
        if let TensorSet::Unit(unit) = which {
            state.stalled += began.elapsed();
            state.leases[unit] = None;
        }
        state.waited += waits_since.map_or(Duration::ZERO, |since| since.elapsed());
    }
    Ok(())
}

/// The maximum wait of one call of [`Snapshot::release`].
const WAIT: Duration = Duration::from_millis(20);

impl Snapshot {
    /// The parts of a file, whose bytes are read from the tensors when they are written.
    pub(crate) fn parts(&self, file: usize) -> impl ExactSizeIterator<Item = Vec<PieceReader<'_>>> + '_ {
        let OwnFile { unit, parts, .. } = &self.files[file];
        let reader = |&(index, len): &(usize, usize)| PieceReader { snapshot: self, unit: *unit, index, left: 0..len };
        parts.iter().map(move |pieces| pieces.iter().map(reader).collect())
    }

    /// The files in the order in which they are to be written: those of units that are updated first come first.
    pub(crate) fn files_in_order(&self) -> Vec<(usize, &OwnFile)> {
        let mut files: Vec<_> = self.files.iter().enumerate().collect();
        if self.updates_last_first {
            files.reverse();
        }
        files
    }

    /// Whether the snapshot can still be written from the start.
    pub(crate) fn is_complete(&self) -> bool {
        !self.lock().is_stale
    }

    /// How long updates stalled until tensors were released, and how long training waited because the buffer was full.
    pub(crate) fn stalls(&self) -> (Duration, Duration) {
        let state = self.lock();
        (state.stalled, state.waited)
    }

    /// Releases tensors: detaches them, or copies what is not written yet, while there is room in the buffer. Otherwise waits for a
    /// moment, and returns false if that was not long enough.
    fn release(&self, which: TensorSet, detach: &mut Detach<'_>) -> bool {
        let deadline = Instant::now() + WAIT;
        let mut state = self.lock();
        state.is_stale = true;
        let range = match which {
            TensorSet::Lent => 0..state.pieces.len(),
            TensorSet::Unit(unit) => {
                state = self.detach(state, unit, deadline, detach);
                self.units[unit].clone()
            }
        };
        let mut left = range.end;
        while left > range.start {
            let index = left - 1;
            if !state.is_held(index, which) {
                left -= 1;
                continue;
            }
            match std::mem::replace(&mut state.pieces[index], Piece::Busy) {
                Piece::Waiting(source) if state.is_being_written => {
                    let bytes = source.bytes.len();
                    let copied = match state.buffered_bytes + bytes <= self.buffer_bytes {
                        true => {
                            let tensor = state.tensors[source.tensor].saved.tensor.shallow_clone();
                            drop(state);
                            let copied = source.copy(&tensor, self.stream.as_deref()).ok();
                            state = self.lock();
                            copied
                        }
                        false => None,
                    };
                    // Running out of memory is treated like a full buffer.
                    if let Some(copied) = copied {
                        state.buffered_bytes += bytes;
                        state.pieces[index] = Piece::Copied(copied);
                        self.changed.notify_all();
                        continue;
                    }
                    state.pieces[index] = Piece::Waiting(source);
                    self.changed.notify_all();
                }
                Piece::Busy if state.is_being_written => (),
                _ => {
                    state.pieces[index] = Piece::Gone;
                    continue;
                }
            }
            let time_left = deadline.saturating_duration_since(Instant::now());
            if time_left.is_zero() {
                return false;
            }
            (state, _) = self.changed.wait_timeout(state, time_left).unwrap_or_else(PoisonError::into_inner);
        }
        true
    }

    /// Detaches the tensors of a unit that are not written yet, as far as there is room.
    fn detach<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        unit: usize,
        deadline: Instant,
        detach: &mut Detach<'_>,
    ) -> MutexGuard<'a, State> {
        let range = &self.units[unit];
        let fits = |state: &State, tensor: usize| {
            state.is_being_written && state.buffered_bytes + state.tensors[tensor].bytes() <= self.buffer_bytes
        };
        if !state.detachable(range).into_iter().any(|tensor| fits(&state, tensor)) {
            return state;
        }
        // Nobody may read a tensor while its memory is replaced.
        state.paused = Some(unit);
        while state.pieces[range.clone()].iter().any(|piece| matches!(piece, Piece::Busy)) {
            let time_left = deadline.saturating_duration_since(Instant::now());
            if time_left.is_zero() {
                break;
            }
            (state, _) = self.changed.wait_timeout(state, time_left).unwrap_or_else(PoisonError::into_inner);
        }
        if !state.pieces[range.clone()].iter().any(|piece| matches!(piece, Piece::Busy)) {
            for tensor in state.detachable(range) {
                if !fits(&state, tensor) {
                    break;
                }
                let Some(old) = detach(state.tensors[tensor].saved.index) else { break };
                let detached = &mut state.tensors[tensor];
                (detached.saved.tensor, detached.is_detached) = (old, true);
                let (bytes, pieces) = (detached.bytes(), detached.pieces.clone());
                state.buffered_bytes += bytes;
                for piece in &mut state.pieces[pieces] {
                    if let Piece::Written(_) = piece {
                        *piece = Piece::Gone;
                    }
                }
            }
        }
        state.paused = None;
        self.changed.notify_all();
        state
    }

    /// Reads some bytes of a piece, from `from` on. `is_end` says that they are the last.
    fn read(
        &self,
        unit: usize,
        index: usize,
        from: usize,
        is_end: bool,
        into: &mut [u8],
    ) -> std::result::Result<(), String> {
        let range = from..from + into.len();
        let mut state = self.lock();
        loop {
            if state.paused == Some(unit) {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            match std::mem::replace(&mut state.pieces[index], Piece::Busy) {
                Piece::Here(bytes) => {
                    into.copy_from_slice(&bytes[range]);
                    state.pieces[index] = if is_end && state.is_stale { Piece::Gone } else { Piece::Here(bytes) };
                    return Ok(());
                }
                Piece::Waiting(source) | Piece::Written(source) => {
                    // While the piece is busy, its tensor is not detached.
                    let tensor = state.tensors[source.tensor].saved.tensor.shallow_clone();
                    drop(state);
                    let read = source.read(&tensor, from, into, self.stream.as_deref());
                    drop(tensor);
                    let (mut state, tensor) = (self.lock(), source.tensor);
                    state.pieces[index] = match read.is_ok() && is_end {
                        true if state.tensors[tensor].is_detached => Piece::Gone,
                        true => Piece::Written(source),
                        false => Piece::Waiting(source),
                    };
                    state.free_written(tensor);
                    self.changed.notify_all();
                    return read;
                }
                Piece::Copied(bytes) => {
                    into.copy_from_slice(&bytes[range]);
                    match is_end {
                        true => {
                            state.pieces[index] = Piece::Gone;
                            state.buffered_bytes -= bytes.len();
                            self.changed.notify_all();
                        }
                        false => state.pieces[index] = Piece::Copied(bytes),
                    }
                    return Ok(());
                }
                Piece::Busy => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Piece::Gone => {
                    state.pieces[index] = Piece::Gone;
                    return Err("training continued and has overwritten this part of the snapshot".to_string());
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies a tensor's elements into host memory. The memory comes from libtorch's allocator, which keeps it for the next copy.
pub(crate) fn copy(tensor: &Tensor) -> std::result::Result<Block, String> {
    let copy = tensor.f_to_device_(Device::Cpu, tensor.kind(), false, true).map_err(|error| first_line(&error))?;
    storage::take(&copy, "it has been copied").map_err(|error| first_line(&error))
}

/// The first line of a libtorch error; the rest is its stack trace.
pub(crate) fn first_line(error: &dyn std::error::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}

pub(crate) fn into_bytes(memory: Block) -> Bytes {
    Bytes::from_owner(HostMemory(memory))
}

struct HostMemory(Block);

impl AsRef<[u8]> for HostMemory {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes().expect("it was copied to the host")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    /// The number of f32 elements that take a little more than three parts.
    const ELEMENTS: usize = (3 * UPLOAD_BYTES as usize) / 4 + 5;

    /// A file with a short header and two tensors, of which the first is lent; also returns the expected contents.
    fn example(buffer_bytes: usize, is_detachable: bool) -> (Arc<Snapshot>, [Tensor; 2], Vec<u8>) {
        let numbers = || Tensor::arange(ELEMENTS as i64, (Kind::Float, Device::Cpu));
        let tensors = [numbers(), numbers() + 0.5];
        let floats = |tensor: &Tensor| Vec::<f32>::try_from(tensor).unwrap();
        let bytes = tensors.iter().flat_map(floats).flat_map(f32::to_le_bytes);
        let expected: Vec<u8> = b"header".iter().copied().chain(bytes).collect();
        let content = |index: usize| {
            let tensor = tensors[index].shallow_clone();
            Content::Tensor(SavedTensor { tensor, index, is_lent: index == 0, is_detachable })
        };
        let mut builder = Builder::default();
        let header = Content::Bytes(Bytes::from_static(b"header"));
        builder.start_unit(None);
        builder.add(0, "file".to_string(), vec![header, content(0), content(1)]);
        (Arc::new(builder.finish(buffer_bytes, None, false)), tensors, expected)
    }

    fn overwrite(tensor: &Tensor) {
        let _ = tensor.shallow_clone().fill_(-1.);
    }

    /// Reads a part, a third of a piece at a time.
    fn read_part(part: Vec<PieceReader<'_>>) -> Vec<u8> {
        let piece = |mut piece: PieceReader<'_>| {
            let mut bytes = vec![0; piece.remaining()];
            bytes.chunks_mut(piece.remaining().div_ceil(3)).for_each(|chunk| piece.read(chunk).unwrap());
            bytes
        };
        part.into_iter().flat_map(piece).collect()
    }

    fn joined<'a>(parts: impl Iterator<Item = Vec<PieceReader<'a>>>) -> Vec<u8> {
        parts.flat_map(read_part).collect()
    }

    /// Releases tensors that cannot be detached.
    fn release(snapshot: &Snapshot, which: TensorSet) -> bool {
        snapshot.release(which, &mut |_| panic!("it is not detachable"))
    }

    #[test]
    fn training_copies_what_it_overwrites() {
        let (snapshot, [lent, other], expected) = example(usize::MAX, false);
        let writer_guard = WriterGuard::new(&snapshot);
        let mut parts = writer_guard.snapshot().parts(0);
        assert_eq!(parts.len(), 7);
        let mut written = read_part(parts.next().unwrap());
        assert_eq!(written.len(), UPLOAD_BYTES as usize);
        assert!(snapshot.is_complete());
        assert!(release(&snapshot, TensorSet::Lent));
        overwrite(&lent);
        written.extend(read_part(parts.next().unwrap()));
        assert!(release(&snapshot, TensorSet::Unit(0)));
        overwrite(&other);
        written.extend(joined(parts));
        assert!(written == expected, "other bytes");
        assert!(!snapshot.is_complete());
    }

    #[test]
    fn a_blocking_save_can_be_written_again() {
        let (snapshot, _, expected) = example(0, true);
        for _ in 0..2 {
            let writer_guard = WriterGuard::new(&snapshot);
            assert!(joined(writer_guard.snapshot().parts(0)) == expected, "other bytes");
        }
        assert!(snapshot.is_complete());
        assert_eq!(snapshot.lock().buffered_bytes, 0, "nothing is copied");
        assert!(release(&snapshot, TensorSet::Unit(0)));
        let is_lost = |part: Vec<PieceReader<'_>>| part.into_iter().any(|piece| piece.read_all().is_err());
        assert!(snapshot.parts(0).any(is_lost), "it may have been overwritten");
    }

    #[test]
    fn training_waits_while_the_buffer_is_full() {
        let buffer_bytes = 2 * UPLOAD_BYTES as usize;
        let (snapshot, tensors, expected) = example(buffer_bytes, true);
        let writer_guard = WriterGuard::new(&snapshot);
        let unit = TensorSet::Unit(0);
        assert!(!release(&snapshot, unit), "there is room for two of seven parts");
        let writer = std::thread::spawn(move || joined(writer_guard.snapshot().parts(0)));
        while !release(&snapshot, unit) {
            assert!(snapshot.lock().buffered_bytes <= buffer_bytes);
        }
        tensors.iter().for_each(overwrite);
        assert!(writer.join().unwrap() == expected, "other bytes");
    }

    #[test]
    fn training_does_not_wait_for_a_writer_that_is_gone() {
        let (snapshot, ..) = example(0, true);
        let writer_guard = WriterGuard::new(&snapshot);
        assert!(!release(&snapshot, TensorSet::Unit(0)));
        drop(writer_guard);
        assert!(release(&snapshot, TensorSet::Unit(0)));
    }

    #[test]
    fn detached_tensors_are_written_during_the_update_and_then_freed() {
        // Room for one tensor: the other is detached when the first is written.
        let buffer_bytes = 4 * ELEMENTS;
        let (snapshot, tensors, expected) = example(buffer_bytes, true);
        let writer_guard = WriterGuard::new(&snapshot);
        let mut parts = writer_guard.snapshot().parts(0);
        let mut written = read_part(parts.next().unwrap());
        let mut detached = Vec::new();
        let mut detach = |index: usize| {
            detached.push(index);
            // The trainer's tensor gets other memory.
            let old = tensors[index].copy();
            overwrite(&tensors[index]);
            Some(old)
        };
        assert!(!snapshot.release(TensorSet::Unit(0), &mut detach), "the second tensor does not fit");
        assert_eq!(snapshot.lock().buffered_bytes, buffer_bytes);
        for _ in 0..3 {
            written.extend(read_part(parts.next().unwrap()));
        }
        // The fourth part had the end of the first tensor, and the beginning of the second from the trainer.
        assert_eq!(snapshot.lock().buffered_bytes, 0, "the first tensor is free");
        assert!(snapshot.release(TensorSet::Unit(0), &mut detach));
        assert_eq!(snapshot.lock().buffered_bytes, buffer_bytes);
        written.extend(joined(parts));
        assert_eq!(detached, [0, 1]);
        assert_eq!(snapshot.lock().buffered_bytes, 0);
        assert!(written == expected, "other bytes");
    }
}
