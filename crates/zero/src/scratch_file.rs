//! A file for what does not fit in memory while a process runs.
//!
//! Two threads move blocks between memory and the file: one reads, the other writes. They bypass the page cache, which would need as much
//! memory again, and compute checksums while a block is in the processor's cache.
//!
//! # Note: what a crash leaves
//! Nothing: the file loses its name as soon as it is open, so the system frees it when the process ends, in whatever way.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use shardwise_plan::Dtype;
use shardwise_torch::Block;

/// The size of one read or write: few enough bytes that the checksum finds them in the cache, or leaves them there.
const PIECE_BYTES: usize = 4 << 20;
/// The alignment of memory, offsets and lengths for direct I/O: enough for any disk and file system.
const ALIGNMENT: usize = 4096;

/// A file on a disk that blocks are written to and read from while training continues.
pub struct ScratchFile {
    folder: PathBuf,
    file: Arc<DirectFile>,
    /// The first byte that is not reserved.
    end: Mutex<u64>,
    reads: Lane,
    writes: Lane,
}

/// What has been moved so far, and how long it took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moved {
    /// The bytes that were read.
    pub read_bytes: u64,
    /// The time of the thread that read them.
    pub read_s: f64,
    /// The bytes that were written.
    pub written_bytes: u64,
    /// The time of the thread that wrote them.
    pub write_s: f64,
    /// The part of both times that went into checksums.
    pub checksum_s: f64,
}

impl Moved {
    /// What was moved after `before`.
    #[must_use]
    pub fn since(self, before: Moved) -> Moved {
        Moved {
            read_bytes: self.read_bytes - before.read_bytes,
            read_s: self.read_s - before.read_s,
            written_bytes: self.written_bytes - before.written_bytes,
            write_s: self.write_s - before.write_s,
            checksum_s: self.checksum_s - before.checksum_s,
        }
    }

    /// The sum of both.
    #[must_use]
    pub fn plus(self, other: Moved) -> Moved {
        Moved {
            read_bytes: self.read_bytes + other.read_bytes,
            read_s: self.read_s + other.read_s,
            written_bytes: self.written_bytes + other.written_bytes,
            write_s: self.write_s + other.write_s,
            checksum_s: self.checksum_s + other.checksum_s,
        }
    }
}

/// A thread that moves blocks one after the other.
struct Lane {
    jobs: mpsc::Sender<Job>,
    /// The bytes that it has moved, the nanoseconds that this took, and those that went into checksums.
    moved: Arc<[AtomicU64; 3]>,
}

impl Lane {
    fn start(
        name: &str,
        file: Arc<DirectFile>,
        work: fn(&DirectFile, &mut Job) -> io::Result<Checksum>,
    ) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let moved: Arc<[AtomicU64; 3]> = Arc::default();
        let counters = moved.clone();
        std::thread::Builder::new().name(name.to_string()).spawn(move || {
            for mut job in queue {
                let began = Instant::now();
                let worked = work(&file, &mut job);
                counters[0].fetch_add((job.block.len() * job.block.dtype().bytes()) as u64, Ordering::Relaxed);
                counters[1].fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
                let checksum = worked.map(|checksum| {
                    counters[2].fetch_add(checksum.took.as_nanos() as u64, Ordering::Relaxed);
                    checksum.value
                });
                // Nobody may wait for it any more.
                drop(job.done.send(checksum.map(|checksum| (job.block, checksum))));
            }
        })?;
        Ok(Lane { jobs, moved })
    }

    fn start_move(&self, region: Region, block: Block) -> Transfer {
        let (done, transfer) = mpsc::channel();
        // If the thread is gone, waiting says so.
        drop(self.jobs.send(Job { region, block, done }));
        Transfer(transfer)
    }

    /// The bytes that it has moved, the seconds that this took, and those that went into checksums.
    fn moved(&self) -> (u64, f64, f64) {
        let [bytes, nanoseconds, in_checksums] = [0, 1, 2].map(|at: usize| self.moved[at].load(Ordering::Relaxed));
        (bytes, nanoseconds as f64 / 1e9, in_checksums as f64 / 1e9)
    }
}

/// A range of a scratch file. It starts at a multiple of the alignment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    start: u64,
}

impl Region {
    #[cfg(test)]
    pub(crate) fn start(self) -> u64 {
        self.start
    }
}

/// A block that is being read or written. Nobody else can touch its memory.
pub(crate) struct Transfer(mpsc::Receiver<io::Result<(Block, u32)>>);

impl Transfer {
    /// Waits for the block. Returns it with the checksum of its bytes.
    pub(crate) fn wait(self) -> io::Result<(Block, u32)> {
        self.0.recv().unwrap_or_else(|_| Err(io::Error::other("the thread that reads or writes has panicked")))
    }
}

struct Job {
    region: Region,
    block: Block,
    done: mpsc::Sender<io::Result<(Block, u32)>>,
}

impl ScratchFile {
    /// Creates a file in an existing folder, and reserves this many bytes of the disk.
    pub fn create(folder: &Path, bytes: u64) -> io::Result<Self> {
        let file = Arc::new(DirectFile::create(folder)?);
        file.grow(bytes)?;
        let reads = Lane::start("offload read", file.clone(), read)?;
        let writes = Lane::start("offload write", file.clone(), write)?;
        Ok(ScratchFile { folder: folder.to_path_buf(), file, end: Mutex::new(0), reads, writes })
    }

    /// The folder that it was created in.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The same file, opened again: how another program would change it.
    #[cfg(test)]
    pub(crate) fn open_again(&self) -> io::Result<File> {
        use std::os::fd::AsRawFd;
        OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", self.file.cached.as_raw_fd()))
    }

    /// What has been moved so far.
    pub fn moved(&self) -> Moved {
        let (read_bytes, read_s, of_reads_s) = self.reads.moved();
        let (written_bytes, write_s, of_writes_s) = self.writes.moved();
        Moved { read_bytes, read_s, written_bytes, write_s, checksum_s: of_reads_s + of_writes_s }
    }

    /// Reserves a range.
    pub(crate) fn reserve(&self, bytes: usize) -> io::Result<Region> {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        let region = Region { start: *end };
        *end += bytes.next_multiple_of(ALIGNMENT) as u64;
        self.file.grow(*end)?;
        Ok(region)
    }

    /// Starts to fill a block.
    pub(crate) fn start_read(&self, region: Region, block: Block) -> Transfer {
        self.reads.start_move(region, block)
    }

    /// Starts to write a block.
    pub(crate) fn start_write(&self, region: Region, block: Block) -> Transfer {
        self.writes.start_move(region, block)
    }

    /// The elements at the start of a range, mapped into memory.
    pub(crate) fn map(&self, region: Region, dtype: Dtype, len: usize) -> shardwise_torch::Result<Block> {
        Block::map_file(&self.file.cached, region.start, dtype, len)
    }
}

/// The checksum of a block, and how long it took to compute.
#[derive(Default)]
struct Checksum {
    value: u32,
    took: Duration,
}

impl Checksum {
    fn add(&mut self, piece: &[u8]) {
        let began = Instant::now();
        self.value = crc32c::crc32c_append(self.value, piece);
        self.took += began.elapsed();
    }
}

fn read(file: &DirectFile, job: &mut Job) -> io::Result<Checksum> {
    let (mut checksum, mut at) = (Checksum::default(), job.region.start);
    for piece in job.block.bytes_mut().map_err(io::Error::other)?.chunks_mut(PIECE_BYTES) {
        file.read(piece, at)?;
        checksum.add(piece);
        at += piece.len() as u64;
    }
    Ok(checksum)
}

fn write(file: &DirectFile, job: &mut Job) -> io::Result<Checksum> {
    let (mut checksum, mut at) = (Checksum::default(), job.region.start);
    for piece in job.block.bytes().map_err(io::Error::other)?.chunks(PIECE_BYTES) {
        checksum.add(piece);
        file.write(piece, at)?;
        at += piece.len() as u64;
    }
    Ok(checksum)
}

/// A file without a name, which is read and written with direct I/O where memory and file system permit.
struct DirectFile {
    cached: File,
    direct: Option<File>,
}

impl DirectFile {
    fn create(folder: &Path) -> io::Result<Self> {
        static CREATED: AtomicUsize = AtomicUsize::new(0);
        let number = CREATED.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".shardwise-offload-{}-{number}", std::process::id()));
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        let cached = options.clone().create_new(true).open(&path)?;
        let direct = options.custom_flags(OFlags::DIRECT.bits() as i32).open(&path);
        std::fs::remove_file(&path)?;
        let direct = match direct {
            Ok(direct) => Some(direct),
            // A file system without direct I/O.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => None,
            Err(error) => return Err(error),
        };
        Ok(DirectFile { cached, direct })
    }

    /// Makes room for this many bytes, if the file is shorter.
    fn grow(&self, bytes: u64) -> io::Result<()> {
        let size = self.cached.metadata()?.len();
        if bytes <= size {
            return Ok(());
        }
        match rustix::fs::fallocate(&self.cached, FallocateFlags::empty(), size, bytes - size) {
            // A file system that cannot reserve bytes.
            Err(Errno::OPNOTSUPP) => self.cached.set_len(bytes),
            other => Ok(other?),
        }
    }

    /// The file for direct I/O, and how many of the bytes at this address can be moved with it.
    fn direct(&self, bytes: &[u8]) -> Option<(&File, usize)> {
        let direct = self.direct.as_ref().filter(|_| bytes.as_ptr().addr().is_multiple_of(ALIGNMENT))?;
        Some((direct, bytes.len() / ALIGNMENT * ALIGNMENT))
    }

    fn read(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        let mut rest = 0;
        if let Some((direct, len)) = self.direct(bytes) {
            direct.read_exact_at(&mut bytes[..len], at)?;
            rest = len;
        }
        self.cached.read_exact_at(&mut bytes[rest..], at + rest as u64)
    }

    fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let mut rest = 0;
        if let Some((direct, len)) = self.direct(bytes) {
            direct.write_all_at(&bytes[..len], at)?;
            rest = len;
        }
        self.cached.write_all_at(&bytes[rest..], at + rest as u64)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn blocks_of_any_length_are_read_back() {
        // One folder on a disk, if there is one, and one in memory.
        let folders =
            [tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()];
        for folder in folders {
            let file = ScratchFile::create(folder.path(), 100).unwrap();
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the file has no name");
            let lens = [0, 1, 1023, 1024, 1025, PIECE_BYTES / 4, 2 * PIECE_BYTES / 4 + 77];
            let elements = |len: usize| (0..len).map(|index| (index * 7 % 1009) as f32).collect::<Vec<f32>>();
            let start = |&len: &usize| {
                let region = file.reserve(4 * len).unwrap();
                (len, region, file.start_write(region, Block::from_slice(&elements(len)).unwrap()))
            };
            let written: Vec<_> = lens.iter().map(start).collect();
            for (len, region, transfer) in written {
                let (_, stored) = transfer.wait().unwrap();
                let block = Block::new(Dtype::F32, len, shardwise_torch::tch::Device::Cpu).unwrap();
                let (block, read) = file.start_read(region, block).wait().unwrap();
                assert!(block.as_slice::<f32>().unwrap() == elements(len) && read == stored, "{len} elements");
                if len > 0 {
                    let mapped = file.map(region, Dtype::F32, len).unwrap();
                    assert!(mapped.as_slice::<f32>().unwrap() == elements(len), "{len} elements");
                }
            }
        }
    }

    #[test]
    fn a_folder_that_cannot_be_used_is_an_error() {
        assert!(ScratchFile::create(Path::new("/nowhere"), 1).is_err());
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        assert!(ScratchFile::create(folder.path(), 1 << 50).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
