//! Reads a journal file, even while it is being written.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::{Entry, Error, Result};

/// The maximum length of a line. The longest is the start entry, which contains the recipe.
const LINE_BYTES_MAX: usize = 4 << 20;

/// The size of one read.
const PIECE_BYTES: usize = 64 << 10;

/// Follows a journal file, which may not exist yet.
pub struct Reader {
    path: PathBuf,
    read_bytes: u64,
    /// The start of a line whose end is not written yet.
    partial: Vec<u8>,
    /// Whether the current line is too long. The rest of it is skipped.
    is_too_long: bool,
    unreadable: u64,
}

impl Reader {
    /// Creates a reader that starts at the beginning of a file.
    pub fn new(path: impl AsRef<Path>) -> Self {
        let path = path.as_ref().to_path_buf();
        Reader { path, read_bytes: 0, partial: Vec::new(), is_too_long: false, unreadable: 0 }
    }

    /// Returns the entries written since the last read. Unreadable lines are counted and skipped.
    pub fn read(&mut self) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        self.for_each(|entry| entries.push(entry))?;
        Ok(entries)
    }

    /// Calls `f` with each entry written since the last read, without holding them all in memory.
    pub fn for_each(&mut self, mut f: impl FnMut(Entry)) -> Result<()> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.file_error(error)),
        };
        file.seek(SeekFrom::Start(self.read_bytes)).map_err(|error| self.file_error(error))?;
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let bytes = file.read(&mut piece).map_err(|error| self.file_error(error))?;
            if bytes == 0 {
                return Ok(());
            }
            self.read_bytes += bytes as u64;
            self.parse(&piece[..bytes], &mut f);
        }
    }

    /// Returns the number of lines that could not be parsed, or were of an unknown kind.
    pub fn unreadable(&self) -> u64 {
        self.unreadable
    }

    fn parse(&mut self, piece: &[u8], f: &mut impl FnMut(Entry)) {
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            let is_end = part.ends_with(b"\n");
            if self.partial.len() + part.len() > LINE_BYTES_MAX {
                self.is_too_long = true;
                self.partial.clear();
            }
            if !self.is_too_long {
                self.partial.extend_from_slice(part);
            }
            if !is_end {
                continue;
            }
            match serde_json::from_slice::<Entry>(&self.partial) {
                Ok(entry) if !self.is_too_long && entry.time_s.is_finite() => f(entry),
                // An empty line is not an entry, but not damage either.
                _ if self.partial == b"\n" && !self.is_too_long => (),
                _ => self.unreadable += 1,
            }
            self.partial.clear();
            self.is_too_long = false;
        }
    }

    fn file_error(&self, error: std::io::Error) -> Error {
        Error::File { path: self.path.display().to_string(), error }
    }
}
