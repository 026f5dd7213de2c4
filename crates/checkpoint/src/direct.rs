//! Writing files with direct I/O, bypassing the page cache.
//!
//! A checkpoint is gigabytes that nobody reads again soon. Through the page cache they would be copied once more, by the
//! processors that training needs, and evict what training reads. So they are copied once, into a few buffers, hashed while they
//! are in the processor's cache, and written to the disk from there.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};

use rustix::fs::OFlags;

use crate::byte_source::ByteSource;

/// The size of one write.
const BUFFER_BYTES: usize = 8 << 20;
/// The number of bytes that are copied and hashed at a time: few enough to stay in a processor's cache.
const CACHED_BYTES: usize = 256 << 10;
/// The number of buffers of a file: one is being filled, one is being written, and one waits.
const BUFFERS: usize = 3;
/// The buffers of files that have been written. Every save has threads of its own, and an allocator keeps what a thread frees for threads
/// to come, which may be others. Without this, a process would grow from save to save.
static SPARE: Mutex<Vec<Buffer>> = Mutex::new(Vec::new());
/// The alignment of memory, offsets and lengths for direct I/O: enough for any disk and file system.
const ALIGNMENT: usize = 4096;

/// Why a file could not be written: an error from the iterator of parts, or from the system.
pub(crate) enum Failure<E> {
    Part(E),
    System(io::Error),
}

impl<E> From<io::Error> for Failure<E> {
    fn from(error: io::Error) -> Self {
        Failure::System(error)
    }
}

/// Writes a file from parts, atomically and durably: it is complete and on the disk, or does not exist. `seen` is called with
/// all bytes in order.
pub(crate) fn write<S: ByteSource, E>(
    path: &Path,
    parts: impl Iterator<Item = Result<Vec<S>, E>>,
    seen: &mut dyn FnMut(&[u8]),
) -> Result<(), Failure<E>> {
    let folder = path.parent().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    std::fs::create_dir_all(folder)?;
    // The process that created the folder may have died before it synced it.
    folder.parent().map_or(Ok(()), sync_folder)?;
    let mut staged = path.as_os_str().to_owned();
    // No file name contains '#', so leftovers of a crashed writer can be recognized.
    staged.push(format!("#{}", std::process::id()));
    let staged = Path::new(&staged);
    let written = fill(staged, parts, seen).and_then(|()| {
        std::fs::rename(staged, path)?;
        Ok(sync_folder(folder)?)
    });
    if written.is_err() {
        // The first error is the one to report.
        drop(std::fs::remove_file(staged));
    }
    written
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

fn fill<S: ByteSource, E>(
    path: &Path,
    parts: impl Iterator<Item = Result<Vec<S>, E>>,
    seen: &mut dyn FnMut(&[u8]),
) -> Result<(), Failure<E>> {
    let mut file = open_direct(path)?;
    std::thread::scope(|scope| {
        let (to_fill, empty) = mpsc::channel();
        let (to_write, full) = mpsc::channel::<Buffer>();
        for _ in 0..BUFFERS {
            drop(to_fill.send(Buffer::take()?));
        }
        let writer = scope.spawn(move || {
            crate::lower_priority();
            for mut buffer in full {
                file.write(buffer.filled())?;
                buffer.len = 0;
                // The filling side may be done.
                drop(to_fill.send(buffer));
            }
            file.finish()
        });
        let mut current: Option<Buffer> = None;
        let mut made = Ok(());
        'parts: for part in parts {
            let part = match part {
                Ok(part) => part,
                Err(error) => {
                    made = Err(Failure::Part(error));
                    break;
                }
            };
            for mut source in part {
                while source.remaining() > 0 {
                    let Some(mut buffer) = current.take().or_else(|| empty.recv().ok()) else { break 'parts };
                    match buffer.add(&mut source) {
                        Ok(added) => seen(added),
                        Err(error) => {
                            made = Err(Failure::System(error));
                            break 'parts;
                        }
                    }
                    match buffer.len == BUFFER_BYTES {
                        // A writer that has failed accepts no more; its error is returned below.
                        true => drop(to_write.send(buffer)),
                        false => current = Some(buffer),
                    }
                }
            }
        }
        if made.is_ok() {
            current.map(|last| to_write.send(last));
        }
        drop(to_write);
        let written = writer.join().unwrap_or_else(|_| Err(io::Error::other("the thread that writes has panicked")));
        spare().extend(empty.try_iter());
        made.and(written.map_err(Failure::System))
    })
}

fn spare() -> MutexGuard<'static, Vec<Buffer>> {
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Aligned memory.
struct Buffer {
    memory: Vec<u8>,
    /// The first aligned byte.
    start: usize,
    len: usize,
}

impl Buffer {
    /// An empty buffer.
    fn take() -> io::Result<Self> {
        if let Some(spare) = spare().pop() {
            return Ok(spare);
        }
        // If memory is short, a failed save is better than a rank that dies.
        let mut memory: Vec<u8> = Vec::new();
        memory.try_reserve_exact(BUFFER_BYTES + ALIGNMENT)?;
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        Ok(Buffer { memory, start, len: 0 })
    }

    /// Appends the next bytes of a source, and returns them. They are now in the processor's cache.
    fn add(&mut self, source: &mut impl ByteSource) -> io::Result<&[u8]> {
        let len = source.remaining().min(BUFFER_BYTES - self.len).min(CACHED_BYTES);
        let from = self.start + self.len;
        if self.memory.len() < from + len {
            // Within its capacity, and so in place.
            self.memory.resize(from + len, 0);
        }
        let added = &mut self.memory[from..from + len];
        source.read(added)?;
        self.len += len;
        Ok(added)
    }

    fn filled(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

/// A file that is written with direct I/O until a length is not aligned, and through the page cache from then on.
struct Direct {
    file: File,
    direct: bool,
}

fn open_direct(path: &Path) -> io::Result<Direct> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    match options.clone().custom_flags(OFlags::DIRECT.bits() as i32).open(path) {
        Ok(file) => Ok(Direct { file, direct: true }),
        // A file system without direct I/O.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            Ok(Direct { file: options.open(path)?, direct: false })
        }
        Err(error) => Err(error),
    }
}

impl Direct {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        while self.direct && rest.len() >= ALIGNMENT {
            match self.file.write(&rest[..rest.len() / ALIGNMENT * ALIGNMENT]) {
                // A nearly full disk writes less than it was given.
                Ok(written) if written > 0 && written.is_multiple_of(ALIGNMENT) => rest = &rest[written..],
                Ok(written) => {
                    rest = &rest[written..];
                    self.use_cache()?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                // A file system that accepts the flag on open, but not the write.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => self.use_cache()?,
                Err(error) => return Err(error),
            }
        }
        if self.direct && !rest.is_empty() {
            // The end of the file.
            self.use_cache()?;
        }
        self.file.write_all(rest)
    }

    fn use_cache(&mut self) -> io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&self.file)?;
        rustix::fs::fcntl_setfl(&self.file, flags - OFlags::DIRECT)?;
        self.direct = false;
        Ok(())
    }

    fn finish(self) -> io::Result<()> {
        self.file.sync_all()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use bytes::Bytes;

    use super::*;

    fn bytes(len: usize) -> Bytes {
        (0..len).map(|i| (i * 7 % 251) as u8).collect::<Vec<u8>>().into()
    }

    #[test]
    fn files_of_any_length_have_the_given_bytes() {
        // One folder on a disk, if there is one, and one in memory.
        let folders =
            [tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()];
        for folder in folders {
            for len in [0, 1, ALIGNMENT, BUFFER_BYTES - 1, BUFFER_BYTES, 3 * BUFFER_BYTES + 12_345] {
                let path = folder.path().join("new").join("file");
                let all = bytes(len);
                let parts = [all.slice(..len / 3), Bytes::new(), all.slice(len / 3..)];
                let mut seen = Vec::new();
                let parts = parts.into_iter().map(|part| Ok::<_, ()>(vec![part]));
                assert!(write(&path, parts, &mut |bytes| seen.extend_from_slice(bytes)).is_ok());
                assert!(std::fs::read(&path).unwrap() == all && seen == all, "{len} bytes");
            }
        }
    }

    /// Fails to read the byte after this many.
    struct FailsAfter(usize);

    impl ByteSource for FailsAfter {
        fn remaining(&self) -> usize {
            self.0 + 1
        }

        fn read(&mut self, into: &mut [u8]) -> io::Result<()> {
            self.0 = self.0.checked_sub(into.len()).ok_or_else(|| io::Error::other("no more"))?;
            Ok(())
        }
    }

    #[test]
    fn a_file_whose_parts_fail_never_appears() {
        let folder = tempfile::tempdir().unwrap();
        let parts = [Ok(vec![bytes(2 * BUFFER_BYTES)]), Err("no more")];
        let failed = write(&folder.path().join("file"), parts.into_iter(), &mut |_| ());
        assert!(matches!(failed, Err(Failure::Part("no more"))));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);

        let parts = [Ok::<_, ()>(vec![FailsAfter(CACHED_BYTES + 1)])];
        let failed = write(&folder.path().join("file"), parts.into_iter(), &mut |_| ());
        assert!(matches!(failed, Err(Failure::System(error)) if error.to_string() == "no more"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
