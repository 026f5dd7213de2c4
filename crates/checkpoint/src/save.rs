//! Writing: files and their hashes first, then tables, then the manifest.

use std::collections::VecDeque;
use std::fmt;

use bytes::Bytes;
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload};

use crate::manifest::{Manifest, PIECE_BYTES, Table, UnitEntry};
use crate::store::folder_of;
use crate::{Error, Hash, Result, Store, UnitLayout, direct};

/// What tells the files of one save from those of another of the same step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveId(u32);

impl SaveId {
    /// One that no other save has, as far as clocks go. All ranks of a save use the same.
    pub fn new() -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        SaveId(
            blake3::hash(&since.as_nanos().to_le_bytes()).as_bytes()[..4]
                .iter()
                .fold(0, |id, &byte| id << 8 | u32::from(byte)),
        )
    }

    /// As a number, to be sent between ranks.
    pub fn number(self) -> u32 {
        self.0
    }
}

impl Default for SaveId {
    fn default() -> Self {
        SaveId::new()
    }
}

impl From<u32> for SaveId {
    fn from(number: u32) -> Self {
        SaveId(number)
    }
}

impl fmt::Display for SaveId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// What is sent to the storage at once: the least that S3 takes is 5 MiB.
pub const UPLOAD_BYTES: u64 = 8 << 20;
/// How many of those may be on their way.
const UPLOADS_UNDER_WAY: usize = 3;

/// Writes a file of a step, and gives the hashes of its pieces. While some of it is hashed, what came before is written.
pub fn write_file(store: &Store, step: u64, name: &str, contents: &[Bytes]) -> Result<Vec<Hash>> {
    write_parts(store, step, name, cut(contents, UPLOAD_BYTES).into_iter().map(Ok))
}

/// The same of a file whose parts are made as it is written, each of which has [`UPLOAD_BYTES`] but for the last; or of which one
/// cannot be made, for the reason that is given.
pub fn write_parts(
    store: &Store,
    step: u64,
    name: &str,
    parts: impl ExactSizeIterator<Item = std::result::Result<Vec<Bytes>, String>>,
) -> Result<Vec<Hash>> {
    let path = format!("{}/{name}", folder_of(step));
    let is_long = parts.len() > 1;
    let failed = |problem: String| Error::System { path: store.display(&path), error: std::io::Error::other(problem) };
    let mut parts = parts.map(|part| part.map_err(failed));
    if is_long {
        return write_in_parts(store, &path, parts);
    }
    let only = parts.next().transpose()?.unwrap_or_default();
    let mut pieces = Pieces::default();
    only.iter().for_each(|bytes| pieces.add(bytes));
    let at = store.path(&path);
    let put = store.runtime().block_on(store.objects().put(&at, PutPayload::from_iter(only)));
    put.map_err(|error| store.failed(&path, error))?;
    Ok(pieces.hashes())
}

/// A part on its way.
type Upload = tokio::task::JoinHandle<object_store::Result<()>>;

/// Writes a file part by part, each of which has [`UPLOAD_BYTES`] but for the last. Those of a file system go to its disk
/// directly; a bucket is given several at a time. What makes the parts may itself read from a
/// storage, so they are asked for outside of the runtime.
pub(crate) fn write_in_parts(
    store: &Store,
    path: &str,
    parts: impl Iterator<Item = Result<Vec<Bytes>>>,
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
    let begun = store.runtime().block_on(store.objects().put_multipart(&at));
    let mut upload = begun.map_err(|error| store.failed(path, error))?;
    let (mut pieces, mut under_way) = (Pieces::default(), VecDeque::new());
    let written = send(store, path, parts, &mut *upload, &mut pieces, &mut under_way);
    if written.is_err() {
        under_way.iter().for_each(Upload::abort);
        // What was said first is what is told; the storage may be away altogether.
        drop(store.runtime().block_on(upload.abort()));
    }
    written.map(|()| pieces.hashes())
}

fn send(
    store: &Store,
    path: &str,
    parts: impl Iterator<Item = Result<Vec<Bytes>>>,
    upload: &mut dyn MultipartUpload,
    pieces: &mut Pieces,
    under_way: &mut VecDeque<Upload>,
) -> Result<()> {
    let runtime = store.runtime();
    let wait = |part: Upload| {
        let done = runtime.block_on(part);
        let done = done.map_err(|error| store.damaged(path, format!("it was not written: {error}")))?;
        done.map_err(|error| store.failed(path, error))
    };
    for part in parts {
        let part = part?;
        if under_way.len() == UPLOADS_UNDER_WAY
            && let Some(first) = under_way.pop_front()
        {
            wait(first)?;
        }
        under_way.push_back(runtime.spawn(upload.put_part(PutPayload::from_iter(part.iter().cloned()))));
        part.iter().for_each(|bytes| pieces.add(bytes));
    }
    while let Some(next) = under_way.pop_front() {
        wait(next)?;
    }
    runtime.block_on(upload.complete()).map(drop).map_err(|error| store.failed(path, error))
}

/// Writes a unit's table.
pub fn write_table(store: &Store, step: u64, entry: &UnitEntry, table: &Table) -> Result<()> {
    store.write(&format!("{}/{}", folder_of(step), entry.table), table.text())
}

/// Writes the manifest: from here on the checkpoint is there. `inside` is called while it is on its way, and does not have its
/// name yet.
pub fn write_manifest(store: &Store, manifest: &Manifest, inside: &mut dyn FnMut()) -> Result<()> {
    let path = format!("{}/{}", folder_of(manifest.step), Manifest::file());
    let bytes = Bytes::from(manifest.sealed());
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

impl UnitLayout {
    /// What the manifest says of this unit.
    pub fn entry(&self, save: SaveId, table: &Table) -> UnitEntry {
        let text = table.text();
        UnitEntry {
            name: self.name.clone(),
            table: format!("{}.{save}.json", self.name),
            table_bytes: text.len() as u64,
            table_hash: Hash::of(&text),
        }
    }
}

impl Store {
    /// Removes what earlier saves have left: steps that are not to be kept, folders before the newest checkpoint that never
    /// got a manifest, and files that the checkpoint of `step` does not have.
    pub fn tidy(&self, step: u64, save: SaveId, keeps: impl Fn(u64) -> bool) -> Result<Vec<u64>> {
        let mut removed = Vec::new();
        let whole = self.steps()?;
        for other in self.folders()?.into_iter().filter(|&other| other != step) {
            let torn = !whole.contains(&other) && other < step;
            if torn || whole.contains(&other) && !keeps(other) {
                self.remove_step(other)?;
                removed.push(other);
            }
        }
        let own = format!(".{save}.");
        self.remove_files(&folder_of(step), |name| name != Manifest::file() && !name.contains(&own))?;
        removed.sort_unstable();
        Ok(removed)
    }
}

/// Cuts a sequence of bytes into parts of at most so many; no byte is copied.
fn cut(contents: &[Bytes], most: u64) -> Vec<Vec<Bytes>> {
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

/// The hashes of a file's pieces, as it goes by.
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
        self.done.push(Hash::finished(&self.current));
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
    fn pieces_are_cut_at_the_same_places_however_bytes_come() {
        let bytes: Vec<u8> = (0..3 * PIECE_BYTES as usize + 77).map(|i| (i * 7 % 251) as u8).collect();
        let expected: Vec<Hash> = bytes.chunks(PIECE_BYTES as usize).map(Hash::of).collect();
        for size in [1_000_003, 4096, bytes.len()] {
            let mut pieces = Pieces::default();
            bytes.chunks(size).for_each(|chunk| pieces.add(chunk));
            assert_eq!(pieces.hashes(), expected);
        }
        let parts = cut(&[Bytes::from(bytes.clone()), Bytes::new(), Bytes::from_static(b"end")], 1 << 20);
        assert!(parts[..3].iter().all(|part| part.iter().map(Bytes::len).sum::<usize>() == 1 << 20));
        let joined: Vec<u8> = parts.concat().concat();
        assert_eq!(joined, [&bytes[..], b"end"].concat());
    }
}
