//! A rank's part of a checkpoint, which is written while training continues.
//!
//! A snapshot is a list of pieces, each a range of a file. Most pieces are ranges of the trainer's own tensors, and are written
//! straight from there, in the order in which training will need the tensors again. If training needs a tensor before it is written,
//! training first copies it into a buffer of limited size; if the buffer is full, training waits. Training copies from the end of
//! the list and the writer starts at the front, so nothing is copied that is about to be written. A blocking save copies nothing.
//!
//! # Note: who may touch a saved tensor
//! While a thread writes a snapshot, it reads tensors that belong to the trainer. Until a tensor is released, the training thread
//! may neither write to it nor lend its memory to a collective; after that, the save no longer reads it. Shards that every pass
//! lends to collectives are released when training continues after the snapshot ([`TensorSet::Lent`]). All others are released
//! before the next update ([`TensorSet::All`]), which fails while a snapshot holds a [`TensorLease`].

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use shardwise_checkpoint::UPLOAD_BYTES;
use shardwise_comm::{Group, ReduceOp};
use shardwise_torch::tch::{Device, Tensor};
use shardwise_torch::{Block, storage};

use shardwise_train::TensorLease;

use crate::error::Result;

/// The files of a checkpoint that this rank writes.
pub(crate) struct Snapshot {
    pub(crate) files: Vec<OwnFile>,
    buffer_bytes: usize,
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
    /// For each part, the indices of its pieces in the snapshot. A part is written in one call.
    parts: Vec<Vec<usize>>,
}

/// The contents of a range of a file.
pub(crate) enum Content {
    /// A header, or another rank's shard.
    Bytes(Bytes),
    /// A one-dimensional tensor of the trainer.
    Tensor {
        tensor: Tensor,
        /// Whether its memory is lent to a collective when the unit is gathered. Other tensors are not touched until the next update.
        is_lent: bool,
    },
}

/// The tensors that training is about to touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorSet {
    /// Those lent to collectives in every pass.
    Lent,
    /// All that the optimizer updates.
    All,
}

struct State {
    pieces: Vec<Piece>,
    /// The bytes of the buffer that are in use.
    buffered_bytes: usize,
    /// Whether a thread writes the snapshot, or will.
    is_being_written: bool,
    /// Whether pieces may have been released, so that the snapshot cannot be written again.
    is_stale: bool,
    /// Prevents updates until everything is released.
    lease: Option<TensorLease>,
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
    tensor: Tensor,
    bytes: Range<usize>,
    is_lent: bool,
}

impl Piece {
    /// Whether training has to wait for it or copy it before touching its tensor.
    fn is_held(&self, which: TensorSet) -> bool {
        match self {
            Piece::Waiting(source) | Piece::Written(source) => which == TensorSet::All || source.is_lent,
            Piece::Busy => true,
            Piece::Here(_) | Piece::Copied(_) | Piece::Gone => false,
        }
    }
}

impl Source {
    /// Copies the range into host memory.
    fn copy(&self) -> std::result::Result<Bytes, String> {
        let size = self.tensor.kind().elt_size_in_bytes();
        // A part may end inside an element.
        let (first, end) = (self.bytes.start / size, self.bytes.end.div_ceil(size));
        let elements = self.tensor.f_narrow(0, first as i64, (end - first) as i64);
        let copied = into_bytes(copy(&elements.map_err(|error| first_line(&error))?)?);
        Ok(copied.slice(self.bytes.start - first * size..self.bytes.end - first * size))
    }
}

/// Builds a snapshot.
#[derive(Default)]
pub(crate) struct Builder {
    files: Vec<OwnFile>,
    pieces: Vec<Piece>,
}

impl Builder {
    /// Adds a file. Files are written in this order, so those whose tensors are updated first must be added first.
    pub(crate) fn add(&mut self, unit: usize, file: usize, name: String, contents: Vec<Content>) {
        let mut parts = vec![Vec::new()];
        let mut room = UPLOAD_BYTES as usize;
        for content in contents {
            let (mut from, len) = (0, content.len());
            while from < len {
                if room == 0 {
                    parts.push(Vec::new());
                    room = UPLOAD_BYTES as usize;
                }
                let to = len.min(from + room);
                parts.last_mut().expect("parts starts with one").push(self.pieces.len());
                self.pieces.push(content.piece(from..to));
                room -= to - from;
                from = to;
            }
        }
        self.files.push(OwnFile { unit, file, name, parts });
    }

    /// Returns the snapshot. Its buffer holds at most `buffer_bytes`. Its writer holds a [`WriterGuard`].
    pub(crate) fn finish(self, buffer_bytes: usize, lease: Option<TensorLease>) -> Snapshot {
        let state = State {
            pieces: self.pieces,
            buffered_bytes: 0,
            is_being_written: false,
            is_stale: false,
            lease,
            stalled: Duration::ZERO,
            waited: Duration::ZERO,
        };
        Snapshot { files: self.files, buffer_bytes, state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl Content {
    fn len(&self) -> usize {
        match self {
            Content::Bytes(bytes) => bytes.len(),
            Content::Tensor { tensor, .. } => tensor.numel() * tensor.kind().elt_size_in_bytes(),
        }
    }

    fn piece(&self, bytes: Range<usize>) -> Piece {
        match self {
            Content::Bytes(all) => Piece::Here(all.slice(bytes)),
            Content::Tensor { tensor, is_lent } => {
                Piece::Waiting(Source { tensor: tensor.shallow_clone(), bytes, is_lent: *is_lent })
            }
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
/// All ranks call it together.
pub(crate) fn release_tensors(world: &Group, snapshot: Option<&Snapshot>, which: TensorSet) -> Result<()> {
    let began = Instant::now();
    let mut waits_since = None;
    // Disks may differ in speed by more than the timeout of a single call.
    loop {
        let is_held = snapshot.is_some_and(|snapshot| !snapshot.release(which));
        let any = world.all_reduce("checkpoint's buffer", ReduceOp::Max, vec![i64::from(is_held)]).wait()?;
        if any[0] == 0 {
            break;
        }
        waits_since.get_or_insert_with(Instant::now);
    }
    if let Some(snapshot) = snapshot {
        let mut state = snapshot.lock();
        if which == TensorSet::All {
            state.stalled += began.elapsed();
            state.lease = None;
        }
        state.waited += waits_since.map_or(Duration::ZERO, |since| since.elapsed());
    }
    Ok(())
}

/// The maximum wait of one call of [`Snapshot::release`].
const WAIT: Duration = Duration::from_millis(20);

impl Snapshot {
    /// The parts of a file. The iterator copies each from its tensors.
    pub(crate) fn parts(
        &self,
        file: usize,
    ) -> impl ExactSizeIterator<Item = std::result::Result<Vec<Bytes>, String>> + '_ {
        self.files[file].parts.iter().map(move |pieces| pieces.iter().map(|&piece| self.take(piece)).collect())
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

    /// Releases tensors: copies what is not written yet, while there is room in the buffer. Otherwise waits for a moment, and
    /// returns false if that was not long enough.
    fn release(&self, which: TensorSet) -> bool {
        let deadline = Instant::now() + WAIT;
        let mut state = self.lock();
        state.is_stale = true;
        let mut left = state.pieces.len();
        while left > 0 {
            let index = left - 1;
            if !state.pieces[index].is_held(which) {
                left -= 1;
                continue;
            }
            match std::mem::replace(&mut state.pieces[index], Piece::Busy) {
                Piece::Waiting(source) if state.is_being_written => {
                    let bytes = source.bytes.len();
                    let copied = match state.buffered_bytes + bytes <= self.buffer_bytes {
                        true => {
                            drop(state);
                            let copied = source.copy().ok();
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

    /// Returns the bytes of a piece for writing.
    fn take(&self, index: usize) -> std::result::Result<Bytes, String> {
        let mut state = self.lock();
        loop {
            match std::mem::replace(&mut state.pieces[index], Piece::Busy) {
                Piece::Here(bytes) => {
                    let stays = if state.is_stale { Piece::Gone } else { Piece::Here(bytes.clone()) };
                    state.pieces[index] = stays;
                    return Ok(bytes);
                }
                Piece::Waiting(source) | Piece::Written(source) => {
                    drop(state);
                    let copied = source.copy();
                    let piece = if copied.is_ok() { Piece::Written(source) } else { Piece::Waiting(source) };
                    self.lock().pieces[index] = piece;
                    self.changed.notify_all();
                    return copied;
                }
                Piece::Copied(bytes) => {
                    state.pieces[index] = Piece::Gone;
                    state.buffered_bytes -= bytes.len();
                    self.changed.notify_all();
                    return Ok(bytes);
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
    use shardwise_torch::tch::Kind;

    use super::*;

    /// The number of f32 elements that take a little more than three parts.
    const ELEMENTS: usize = (3 * UPLOAD_BYTES as usize) / 4 + 5;

    /// A file with a short header and two tensors, of which the first is lent; also returns the expected contents.
    fn example(buffer_bytes: usize) -> (Arc<Snapshot>, [Tensor; 2], Vec<u8>) {
        let numbers = || Tensor::arange(ELEMENTS as i64, (Kind::Float, Device::Cpu));
        let tensors = [numbers(), numbers() + 0.5];
        let floats = |tensor: &Tensor| Vec::<f32>::try_from(tensor).unwrap();
        let bytes = tensors.iter().flat_map(floats).flat_map(f32::to_le_bytes);
        let expected: Vec<u8> = b"header".iter().copied().chain(bytes).collect();
        let content = |index: usize| Content::Tensor { tensor: tensors[index].shallow_clone(), is_lent: index == 0 };
        let mut builder = Builder::default();
        let header = Content::Bytes(Bytes::from_static(b"header"));
        builder.add(0, 0, "file".to_string(), vec![header, content(0), content(1)]);
        (Arc::new(builder.finish(buffer_bytes, None)), tensors, expected)
    }

    fn overwrite(tensor: &Tensor) {
        let _ = tensor.shallow_clone().fill_(-1.);
    }

    fn joined(parts: impl Iterator<Item = std::result::Result<Vec<Bytes>, String>>) -> Vec<u8> {
        parts.map(|part| part.unwrap().concat()).collect::<Vec<_>>().concat()
    }

    #[test]
    fn training_copies_what_it_overwrites() {
        let (snapshot, [lent, other], expected) = example(usize::MAX);
        let writer_guard = WriterGuard::new(&snapshot);
        let mut parts = writer_guard.snapshot().parts(0);
        assert_eq!(parts.len(), 7);
        let mut written: Vec<u8> = parts.next().unwrap().unwrap().concat();
        assert_eq!(written.len(), UPLOAD_BYTES as usize);
        assert!(snapshot.is_complete());
        assert!(snapshot.release(TensorSet::Lent));
        overwrite(&lent);
        written.extend(parts.next().unwrap().unwrap().concat());
        assert!(snapshot.release(TensorSet::All));
        overwrite(&other);
        written.extend(joined(parts));
        assert!(written == expected, "other bytes");
        assert!(!snapshot.is_complete());
    }

    #[test]
    fn a_blocking_save_can_be_written_again() {
        let (snapshot, _, expected) = example(0);
        for _ in 0..2 {
            let writer_guard = WriterGuard::new(&snapshot);
            assert!(joined(writer_guard.snapshot().parts(0)) == expected, "other bytes");
        }
        assert!(snapshot.is_complete());
        assert_eq!(snapshot.lock().buffered_bytes, 0, "nothing is copied");
        assert!(snapshot.release(TensorSet::All));
        assert!(snapshot.parts(0).any(|part| part.is_err()), "it may have been overwritten");
    }

    #[test]
    fn training_waits_while_the_buffer_is_full() {
        let buffer_bytes = 2 * UPLOAD_BYTES as usize;
        let (snapshot, tensors, expected) = example(buffer_bytes);
        let writer_guard = WriterGuard::new(&snapshot);
        assert!(!snapshot.release(TensorSet::All), "there is room for two of seven parts");
        let writer = std::thread::spawn(move || joined(writer_guard.snapshot().parts(0)));
        while !snapshot.release(TensorSet::All) {
            assert!(snapshot.lock().buffered_bytes <= buffer_bytes);
        }
        tensors.iter().for_each(overwrite);
        assert!(writer.join().unwrap() == expected, "other bytes");
    }

    #[test]
    fn training_does_not_wait_for_a_writer_that_is_gone() {
        let (snapshot, ..) = example(0);
        let writer_guard = WriterGuard::new(&snapshot);
        assert!(!snapshot.release(TensorSet::All));
        drop(writer_guard);
        assert!(snapshot.release(TensorSet::All));
    }
}
