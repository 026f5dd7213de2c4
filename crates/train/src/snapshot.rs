//! What a rank writes for a checkpoint, while training goes on.
//!
//! A snapshot is a list of pieces, each a range of a file. Most are still in the trainer's own tensors, and are written straight
//! from there, in the order in which training will need the tensors again. What has not been written when it does is copied first,
//! into a buffer of limited size; where that is full, training waits. It copies from the end, where the writer comes last, so that
//! nothing is copied that is about to be written. A save that training waits for copies nothing.
//!
//! # Note: who may touch a saved tensor
//! While a thread writes a snapshot, it reads tensors that belong to the trainer. So the thread that trains neither writes to them
//! nor lends their memory before they are released: from then on nobody reads them on behalf of the save. Slices that are lent to
//! the network in every pass are released when training goes on after a snapshot ([`Trainer::release_lent`]). Everything else is
//! released before the next update ([`Trainer::release_saved`]), which cannot be made without the proof of it, a [`Released`].

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use shardwise_checkpoint::UPLOAD_BYTES;
use shardwise_comm::Reduce;
use shardwise_torch::tch::{Device, Tensor};
use shardwise_torch::{Block, storage};

use crate::{Result, Trainer};

/// What this rank writes of a checkpoint.
pub(crate) struct Snapshot {
    pub(crate) files: Vec<OwnFile>,
    buffer_bytes: usize,
    state: Mutex<State>,
    /// A piece has changed its state.
    changed: Condvar,
}

/// A file that this rank writes.
pub(crate) struct OwnFile {
    /// The unit's place in the model.
    pub(crate) unit: usize,
    /// The file's place among the unit's.
    pub(crate) file: usize,
    pub(crate) name: String,
    /// The pieces of each part that is written at once, by their places in the snapshot.
    parts: Vec<Vec<usize>>,
}

/// The contents of a part of a file.
pub(crate) enum Content {
    /// In memory of its own: a header, or another rank's slice.
    Bytes(Bytes),
    /// A tensor of the trainer's, of one dimension.
    Tensor {
        tensor: Tensor,
        /// Whether its memory is lent to the network when the unit is gathered. Others stay as they are until the next update.
        is_lent: bool,
    },
}

/// Which tensors training is about to touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    /// Those that are lent to the network in every pass.
    Lent,
    /// All that are updated.
    All,
}

/// Proof that no save reads the trainer's tensors any more.
pub(crate) struct Released(());

struct State {
    pieces: Vec<Piece>,
    /// How much of the buffer is taken.
    buffered_bytes: usize,
    /// Whether a thread is writing it, or will be.
    is_being_written: bool,
    /// Whether something may have been released, so that it cannot be written a second time.
    is_stale: bool,
    /// For how long an update stood still until tensors were released.
    stood: Duration,
    /// For how long training waited because the buffer was full.
    waited: Duration,
}

/// Where the bytes of a piece are.
enum Piece {
    /// In memory of its own from the start.
    Here(Bytes),
    /// In the trainer's tensor, and not written yet.
    Waiting(Source),
    /// One thread is copying it out of the tensor.
    Busy,
    /// Written, and still in the tensor.
    Written(Source),
    /// In the buffer.
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
    /// Whether training has to wait for it, or copy it.
    fn is_held(&self, which: Held) -> bool {
        match self {
            Piece::Waiting(source) | Piece::Written(source) => which == Held::All || source.is_lent,
            Piece::Busy => true,
            Piece::Here(_) | Piece::Copied(_) | Piece::Gone => false,
        }
    }
}

impl Source {
    /// A copy in memory of the host.
    fn copy(&self) -> std::result::Result<Bytes, String> {
        let size = self.tensor.kind().elt_size_in_bytes();
        // A part may end inside an element.
        let (first, end) = (self.bytes.start / size, self.bytes.end.div_ceil(size));
        let elements = self.tensor.f_narrow(0, first as i64, (end - first) as i64);
        let copied = into_bytes(copy(&elements.map_err(|error| first_line(&error))?)?);
        Ok(copied.slice(self.bytes.start - first * size..self.bytes.end - first * size))
    }
}

/// A snapshot in the making.
#[derive(Default)]
pub(crate) struct Builder {
    files: Vec<OwnFile>,
    pieces: Vec<Piece>,
}

impl Builder {
    /// Adds a file. They are written in the order in which they are added, so those whose tensors are updated first come first.
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
                parts.last_mut().expect("there is always one").push(self.pieces.len());
                self.pieces.push(content.piece(from..to));
                room -= to - from;
                from = to;
            }
        }
        self.files.push(OwnFile { unit, file, name, parts });
    }

    /// The snapshot, of which as many bytes may be copied at a time. Whoever writes it holds a [`Writing`].
    pub(crate) fn finish(self, buffer_bytes: usize) -> Snapshot {
        let state = State {
            pieces: self.pieces,
            buffered_bytes: 0,
            is_being_written: false,
            is_stale: false,
            stood: Duration::ZERO,
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

/// A thread that writes a snapshot, or is about to. When it goes, however it ends, training need not wait for it.
pub(crate) struct Writing(Arc<Snapshot>);

impl Writing {
    pub(crate) fn new(snapshot: &Arc<Snapshot>) -> Self {
        snapshot.lock().is_being_written = true;
        Writing(snapshot.clone())
    }

    pub(crate) fn snapshot(&self) -> &Snapshot {
        &self.0
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.0.lock().is_being_written = false;
        self.0.changed.notify_all();
    }
}

impl Trainer {
    /// Lets the next pass lend its slices to the network while a save goes on. All ranks call it together.
    pub(crate) fn release_lent(&self) -> Result<()> {
        self.release_held(Held::Lent)
    }

    /// Lets the next update overwrite what a save may not have written yet. All ranks call it together.
    pub(crate) fn release_saved(&mut self) -> Result<Released> {
        self.release_held(Held::All)?;
        self.snapshot = None;
        Ok(Released(()))
    }

    fn release_held(&self, which: Held) -> Result<()> {
        let Some(snapshot) = &self.snapshot else { return Ok(()) };
        let (snapshot, began) = (snapshot.upgrade(), Instant::now());
        let mut waits_since = None;
        // A disk may be slower on one rank than on another, by longer than they wait for each other in one call.
        loop {
            let is_held = snapshot.as_ref().is_some_and(|snapshot| !snapshot.release(which));
            let any =
                self.ranks.world.all_reduce("checkpoint's buffer", Reduce::Max, vec![i64::from(is_held)]).wait()?;
            if any[0] == 0 {
                break;
            }
            waits_since.get_or_insert_with(Instant::now);
        }
        if let Some(snapshot) = snapshot {
            let mut state = snapshot.lock();
            if which == Held::All {
                state.stood += began.elapsed();
            }
            state.waited += waits_since.map_or(Duration::ZERO, |since| since.elapsed());
        }
        Ok(())
    }
}

/// How long one call of [`Snapshot::release`] waits.
const WAIT: Duration = Duration::from_millis(20);

impl Snapshot {
    /// The parts of a file, one after the other. Each is copied out of its tensors as it comes.
    pub(crate) fn parts(
        &self,
        file: usize,
    ) -> impl ExactSizeIterator<Item = std::result::Result<Vec<Bytes>, String>> + '_ {
        self.files[file].parts.iter().map(move |pieces| pieces.iter().map(|&piece| self.take(piece)).collect())
    }

    /// Whether it can be written from the start.
    pub(crate) fn is_complete(&self) -> bool {
        !self.lock().is_stale
    }

    /// For how long an update stood still until tensors were released, and for how long training waited because the buffer was full.
    pub(crate) fn stood_still(&self) -> (Duration, Duration) {
        let state = self.lock();
        (state.stood, state.waited)
    }

    /// Sees to it that tensors are not read any more: what of them is not written yet is copied, while there is room. If there is
    /// none, it waits for a moment, and returns false if that was not long enough.
    fn release(&self, which: Held) -> bool {
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
                    // Memory that there is not is as good as a buffer that is full.
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

    /// The bytes of a piece, to be written.
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
                    return Err("training has gone on, and what was to be written is no longer there".to_string());
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A tensor's elements in memory of the host, which libtorch's allocator keeps for the next copy.
pub(crate) fn copy(tensor: &Tensor) -> std::result::Result<Block, String> {
    let copy = tensor.f_to_device_(Device::Cpu, tensor.kind(), false, true).map_err(|error| first_line(&error))?;
    storage::take(&copy, "it has been copied").map_err(|error| first_line(&error))
}

/// What libtorch says of an error. What follows is its stack.
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

    /// Elements of a tensor that takes up a little more than three parts.
    const ELEMENTS: usize = (3 * UPLOAD_BYTES as usize) / 4 + 5;

    /// A file of a short header and two tensors, the first of which is lent; and what is in it.
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
        (Arc::new(builder.finish(buffer_bytes)), tensors, expected)
    }

    fn overwrite(tensor: &Tensor) {
        let _ = tensor.shallow_clone().fill_(-1.);
    }

    fn joined(parts: impl Iterator<Item = std::result::Result<Vec<Bytes>, String>>) -> Vec<u8> {
        parts.map(|part| part.unwrap().concat()).collect::<Vec<_>>().concat()
    }

    #[test]
    fn what_training_overwrites_is_copied_first() {
        let (snapshot, [lent, other], expected) = example(usize::MAX);
        let writing = Writing::new(&snapshot);
        let mut parts = writing.snapshot().parts(0);
        assert_eq!(parts.len(), 7);
        let mut written: Vec<u8> = parts.next().unwrap().unwrap().concat();
        assert_eq!(written.len(), UPLOAD_BYTES as usize);
        assert!(snapshot.is_complete());
        assert!(snapshot.release(Held::Lent));
        overwrite(&lent);
        written.extend(parts.next().unwrap().unwrap().concat());
        assert!(snapshot.release(Held::All));
        overwrite(&other);
        written.extend(joined(parts));
        assert!(written == expected, "other bytes");
        assert!(!snapshot.is_complete());
    }

    #[test]
    fn a_save_that_training_waits_for_can_be_written_again() {
        let (snapshot, _, expected) = example(0);
        for _ in 0..2 {
            let writing = Writing::new(&snapshot);
            assert!(joined(writing.snapshot().parts(0)) == expected, "other bytes");
        }
        assert!(snapshot.is_complete());
        assert_eq!(snapshot.lock().buffered_bytes, 0, "nothing is copied");
        assert!(snapshot.release(Held::All));
        assert!(snapshot.parts(0).any(|part| part.is_err()), "it may have been overwritten");
    }

    #[test]
    fn training_waits_where_the_buffer_is_full() {
        let buffer_bytes = 2 * UPLOAD_BYTES as usize;
        let (snapshot, tensors, expected) = example(buffer_bytes);
        let writing = Writing::new(&snapshot);
        assert!(!snapshot.release(Held::All), "there is room for two of seven parts");
        let writer = std::thread::spawn(move || joined(writing.snapshot().parts(0)));
        while !snapshot.release(Held::All) {
            assert!(snapshot.lock().buffered_bytes <= buffer_bytes);
        }
        tensors.iter().for_each(overwrite);
        assert!(writer.join().unwrap() == expected, "other bytes");
    }

    #[test]
    fn nobody_waits_for_a_writer_that_is_gone() {
        let (snapshot, ..) = example(0);
        let writing = Writing::new(&snapshot);
        assert!(!snapshot.release(Held::All));
        drop(writing);
        assert!(snapshot.release(Held::All));
    }
}
