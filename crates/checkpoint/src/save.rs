//! Writing checkpoints: files with their hashes first, then tables, then the manifest.

use std::collections::VecDeque;
use std::io;

use bytes::Bytes;
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload};

use crate::byte_source::ByteSource;
use crate::manifest::{Manifest, PIECE_BYTES, Table, UnitEntry};
use crate::store::step_folder;
use crate::{Error, Hash, Result, SaveId, Store, direct};

/// The size of one part of an upload; S3's minimum is 5 MiB.
pub const UPLOAD_BYTES: u64 = 8 << 20;
/// The most parts that are uploaded at once.
const UPLOADS_MAX: usize = 3;

/// Writes a file of a step, and returns the hashes of its pieces. Hashing overlaps with writing.
pub fn write_file(store: &Store, step: u64, name: &str, contents: &[Bytes]) -> Result<Vec<Hash>> {
    write_parts(store, step, name, split(contents, UPLOAD_BYTES).into_iter())
}

/// Like [`write_file`], with bytes that are read while the file is written. Each part has [`UPLOAD_BYTES`], except the last.
pub fn write_parts<S: ByteSource>(
    store: &Store,
    step: u64,
    name: &str,
    mut parts: impl ExactSizeIterator<Item = Vec<S>>,
) -> Result<Vec<Hash>> {
    let path = format!("{}/{name}", step_folder(step));
    if parts.len() > 1 {
        return write_in_parts(store, &path, parts.map(Ok));
    }
    let only = read_part(store, &path, parts.next().unwrap_or_default())?;
    let mut pieces = Pieces::default();
    only.iter().for_each(|bytes| pieces.add(bytes));
    let at = store.path(&path);
    let put = store.runtime().block_on(store.objects().put(&at, PutPayload::from_iter(only)));
    put.map_err(|error| store.storage_error(&path, error))?;
    Ok(pieces.hashes())
}

/// Reads a part into memory.
fn read_part<S: ByteSource>(store: &Store, path: &str, part: Vec<S>) -> Result<Vec<Bytes>> {
    let read = part.into_iter().map(ByteSource::read_all).collect::<io::Result<_>>();
    read.map_err(|error| Error::System { path: store.display(path), error })
}

/// A running upload of one part.
type Upload = tokio::task::JoinHandle<object_store::Result<()>>;

/// Writes a file in parts, each of [`UPLOAD_BYTES`] except the last: to a file system with direct I/O, to a bucket with
/// several uploads at a time. The iterator of parts may itself read from a store, so it runs outside of the runtime.
pub(crate) fn write_in_parts<S: ByteSource>(
    store: &Store,
    path: &str,
    parts: impl Iterator<Item = Result<Vec<S>>>,
) -> Result<Vec<Hash>> {
    if let Some(local) = store.local(path) {
        let mut pieces = Pieces::default();
        return match direct::write(&local, parts, &mut |bytes| pieces.add(bytes)) {
            Ok(()) => Ok(pieces.hashes()),
            Err(direct::Failure::Part(error)) => Err(error),
            Err(direct::Failure::System(error)) => Err(Error::System { path: store.display(path), error }),
        };
    }
    let at = store.path(path);
    let started = store.runtime().block_on(store.objects().put_multipart(&at));
    let mut upload = started.map_err(|error| store.storage_error(path, error))?;
    let (mut pieces, mut running) = (Pieces::default(), VecDeque::new());
    let written = send(store, path, parts, &mut *upload, &mut pieces, &mut running);
    if written.is_err() {
        running.iter().for_each(Upload::abort);
        // The first error is the one to report; the store may be unreachable.
        drop(store.runtime().block_on(upload.abort()));
    }
    written.map(|()| pieces.hashes())
}

fn send<S: ByteSource>(
    store: &Store,
    path: &str,
    parts: impl Iterator<Item = Result<Vec<S>>>,
    upload: &mut dyn MultipartUpload,
    pieces: &mut Pieces,
    running: &mut VecDeque<Upload>,
) -> Result<()> {
    let runtime = store.runtime();
    let wait = |part: Upload| {
        let done = runtime.block_on(part);
        let done = done.map_err(|error| store.damaged_error(path, format!("it was not written: {error}")))?;
        done.map_err(|error| store.storage_error(path, error))
    };
    for part in parts {
        let part = read_part(store, path, part?)?;
        if running.len() == UPLOADS_MAX
            && let Some(first) = running.pop_front()
        {
            wait(first)?;
        }
        running.push_back(runtime.spawn(upload.put_part(PutPayload::from_iter(part.iter().cloned()))));
        part.iter().for_each(|bytes| pieces.add(bytes));
    }
    while let Some(next) = running.pop_front() {
        wait(next)?;
    }
    runtime.block_on(upload.complete()).map(drop).map_err(|error| store.storage_error(path, error))
}

/// Writes a unit's table.
pub fn write_table(store: &Store, step: u64, entry: &UnitEntry, table: &Table) -> Result<()> {
    store.write(&format!("{}/{}", step_folder(step), entry.table), table.to_json())
}

/// Writes the manifest, which completes the checkpoint. For fault injection, `inside` is called while the manifest is being
/// written, before it has its final name.
pub fn write_manifest(store: &Store, manifest: &Manifest, inside: &mut dyn FnMut()) -> Result<()> {
    let path = format!("{}/{}", step_folder(manifest.step), Manifest::file_name());
    let bytes = Bytes::from(manifest.to_json());
    if store.local(&path).is_none() {
        inside();
        return store.write(&path, bytes);
    }
    let mut only = Some(bytes);
    let parts = std::iter::from_fn(|| {
        let part = only.take();
        if part.is_none() {
            inside();
        }
        part.map(|bytes| Ok(vec![bytes]))
    });
    write_in_parts(store, &path, parts).map(drop)
}

impl Store {
    /// Removes leftovers of earlier saves: steps that `keeps` rejects, older folders without a manifest, and files that do not
    /// belong to the checkpoint of `step`. Returns the removed steps.
    pub fn prune(&self, step: u64, save: SaveId, keeps: impl Fn(u64) -> bool) -> Result<Vec<u64>> {
        let mut removed = Vec::new();
        let complete = self.steps()?;
        for other in self.folders()?.into_iter().filter(|&other| other != step) {
            let incomplete = !complete.contains(&other) && other < step;
            if incomplete || complete.contains(&other) && !keeps(other) {
                self.remove_step(other)?;
                removed.push(other);
            }
        }
        let own = format!(".{save}.");
        self.remove_files(&step_folder(step), |name| name != Manifest::file_name() && !name.contains(&own))?;
        removed.sort_unstable();
        Ok(removed)
    }
}

/// Splits a sequence of bytes into parts of at most `most` bytes, without copying.
fn split(contents: &[Bytes], most: u64) -> Vec<Vec<Bytes>> {
    let mut parts = vec![Vec::new()];
    let mut room = most as usize;
    for bytes in contents {
        let mut rest = bytes.clone();
        while !rest.is_empty() {
            if room == 0 {
                parts.push(Vec::new());
                room = most as usize;
            }
            let taken = rest.split_to(room.min(rest.len()));
            room -= taken.len();
            parts.last_mut().expect("there is always one").push(taken);
        }
    }
    parts
}

/// Computes the hashes of a file's pieces from a stream of bytes.
#[derive(Default)]
struct Pieces {
    done: Vec<Hash>,
    current: blake3::Hasher,
    current_bytes: usize,
}

impl Pieces {
    fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at((PIECE_BYTES as usize - self.current_bytes).min(bytes.len()));
            self.current.update(now);
            self.current_bytes += now.len();
            bytes = later;
            if self.current_bytes == PIECE_BYTES as usize {
                self.finish();
            }
        }
    }

    fn finish(&mut self) {
        self.done.push(Hash::from_hasher(&self.current));
        self.current.reset();
        self.current_bytes = 0;
    }

    fn hashes(mut self) -> Vec<Hash> {
        if self.current_bytes > 0 {
            self.finish();
        }
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn piece_hashes_do_not_depend_on_how_bytes_arrive() {
        let bytes: Vec<u8> = (0..3 * PIECE_BYTES as usize + 77).map(|i| (i * 7 % 251) as u8).collect();
        let expected: Vec<Hash> = bytes.chunks(PIECE_BYTES as usize).map(Hash::of).collect();
        for size in [1_000_003, 4096, bytes.len()] {
            let mut pieces = Pieces::default();
            bytes.chunks(size).for_each(|chunk| pieces.add(chunk));
            assert_eq!(pieces.hashes(), expected);
        }
        let parts = split(&[Bytes::from(bytes.clone()), Bytes::new(), Bytes::from_static(b"end")], 1 << 20);
        assert!(parts[..3].iter().all(|part| part.iter().map(Bytes::len).sum::<usize>() == 1 << 20));
        let joined: Vec<u8> = parts.concat().concat();
        assert_eq!(joined, [&bytes[..], b"end"].concat());
    }
}
