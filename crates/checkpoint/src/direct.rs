//! Files of a file system, written past its cache.
//!
//! A checkpoint is gigabytes that nobody reads again soon. Through the cache they would be copied once more, by the processors
//! that training needs, and drive out of it what training reads. So they are gathered in a few buffers, hashed while they are
//! there, and handed to the disk from there.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::mpsc;

use bytes::Bytes;
use rustix::fs::OFlags;

/// What is handed to the disk at once.
const BUFFER_BYTES: usize = 8 << 20;
/// One is filled, one is written, and one waits.
const BUFFERS: usize = 3;
/// Where memory, files and lengths have to begin and end: what any disk and file system is content with.
const ALIGNMENT: usize = 4096;

/// What became of a file that is made of parts: an error of the parts' maker's, or one of the system's.
pub(crate) enum Failure<E> {
    Part(E),
    System(io::Error),
}

impl<E> From<io::Error> for Failure<E> {
    fn from(error: io::Error) -> Self {
        Failure::System(error)
    }
}

/// Writes a file of parts, which appears whole, and is on the disk, or not at all. `seen` is shown all bytes in their order.
pub(crate) fn write<E>(
    path: &Path,
    parts: impl Iterator<Item = Result<Vec<Bytes>, E>>,
    seen: &mut dyn FnMut(&[u8]),
) -> Result<(), Failure<E>> {
    let folder = path.parent().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    std::fs::create_dir_all(folder)?;
    // Whoever made the folder may have died before this.
    folder.parent().map_or(Ok(()), synced)?;
    let mut staged = path.as_os_str().to_owned();
    // No name of a file has this in it, so that what a writer that died has left is known for what it is.
    staged.push(format!("#{}", std::process::id()));
    let staged = Path::new(&staged);
    let written = filled(staged, parts, seen).and_then(|()| {
        std::fs::rename(staged, path)?;
        Ok(synced(folder)?)
    });
    if written.is_err() {
        // What was said first is what is told.
        drop(std::fs::remove_file(staged));
    }
    written
}

fn synced(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

fn filled<E>(
    path: &Path,
    parts: impl Iterator<Item = Result<Vec<Bytes>, E>>,
    seen: &mut dyn FnMut(&[u8]),
) -> Result<(), Failure<E>> {
    let mut file = opened(path)?;
    std::thread::scope(|scope| {
        let (to_fill, empty) = mpsc::channel();
        let (to_write, full) = mpsc::channel::<Buffer>();
        for _ in 0..BUFFERS {
            drop(to_fill.send(Buffer::new()?));
        }
        let writer = scope.spawn(move || {
            crate::yield_to_others();
            for mut buffer in full {
                file.write(buffer.filled())?;
                buffer.len = 0;
                // Whoever fills them may be through.
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
            for mut bytes in part {
                while !bytes.is_empty() {
                    let Some(mut buffer) = current.take().or_else(|| empty.recv().ok()) else { break 'parts };
                    let taken = bytes.split_to(bytes.len().min(BUFFER_BYTES - buffer.len));
                    seen(buffer.add(&taken));
                    match buffer.len == BUFFER_BYTES {
                        // A writer that has failed takes no more, and says why below.
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
        made.and(written.map_err(Failure::System))
    })
}

/// Memory that begins where disks want it to.
struct Buffer {
    memory: Vec<u8>,
    begin: usize,
    len: usize,
}

impl Buffer {
    fn new() -> io::Result<Self> {
        // Where a run's memory is short, a save that fails is better than a rank that dies.
        let mut memory = Vec::new();
        memory.try_reserve_exact(BUFFER_BYTES + ALIGNMENT)?;
        memory.resize(BUFFER_BYTES + ALIGNMENT, 0);
        let begin = memory.as_ptr().align_offset(ALIGNMENT);
        Ok(Buffer { memory, begin, len: 0 })
    }

    /// Adds bytes, and gives them as they are here now, near the processor.
    fn add(&mut self, bytes: &[u8]) -> &[u8] {
        let from = self.begin + self.len;
        let place = &mut self.memory[from..from + bytes.len()];
        place.copy_from_slice(bytes);
        self.len += bytes.len();
        place
    }

    fn filled(&self) -> &[u8] {
        &self.memory[self.begin..self.begin + self.len]
    }
}

/// A file that is written past the cache for as long as lengths allow it.
struct Direct {
    file: File,
    direct: bool,
}

fn opened(path: &Path) -> io::Result<Direct> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    match options.clone().custom_flags(OFlags::DIRECT.bits() as i32).open(path) {
        Ok(file) => Ok(Direct { file, direct: true }),
        // A file system that has nothing but its cache.
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
                // A disk that is nearly full takes less than it was given.
                Ok(written) if written > 0 && written.is_multiple_of(ALIGNMENT) => rest = &rest[written..],
                Ok(written) => {
                    rest = &rest[written..];
                    self.through_the_cache()?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                // A file system that only opens files like this.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => self.through_the_cache()?,
                Err(error) => return Err(error),
            }
        }
        if self.direct && !rest.is_empty() {
            // The end of the file.
            self.through_the_cache()?;
        }
        self.file.write_all(rest)
    }

    fn through_the_cache(&mut self) -> io::Result<()> {
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
    use super::*;

    fn bytes(len: usize) -> Bytes {
        (0..len).map(|i| (i * 7 % 251) as u8).collect::<Vec<u8>>().into()
    }

    #[test]
    fn files_have_what_they_were_given_whatever_its_length() {
        // One place with a disk, if there is any, and one without.
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

    #[test]
    fn a_file_whose_parts_fail_never_appears() {
        let folder = tempfile::tempdir().unwrap();
        let parts = [Ok(vec![bytes(2 * BUFFER_BYTES)]), Err("no more")];
        let failed = write(&folder.path().join("file"), parts.into_iter(), &mut |_| ());
        assert!(matches!(failed, Err(Failure::Part("no more"))));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
