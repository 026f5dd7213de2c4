//! Reading a journal, also while it is written.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::{Entry, Error, Result};

/// The longest line that is read; a recipe is in one of them.
const LINE_BYTES_MAX: usize = 4 << 20;

/// How much is read at once.
const PIECE_BYTES: usize = 64 << 10;

/// Follows a file that may not be there yet.
pub struct Reader {
    path: PathBuf,
    read_bytes: u64,
    /// What there is of a line whose end is not written yet.
    begun: Vec<u8>,
    /// The line is too long, and its rest is passed over.
    passes_over: bool,
    unknown: u64,
}

impl Reader {
    /// Of a file, from its beginning.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Reader { path: path.as_ref().to_path_buf(), read_bytes: 0, begun: Vec::new(), passes_over: false, unknown: 0 }
    }

    /// What was written since the last time. Lines that are none are counted, and left out.
    pub fn read(&mut self) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        self.each(|entry| entries.push(entry))?;
        Ok(entries)
    }

    /// The same, one after the other, for who does not need them all at once.
    pub fn each(&mut self, mut hear: impl FnMut(Entry)) -> Result<()> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.fault(error)),
        };
        file.seek(SeekFrom::Start(self.read_bytes)).map_err(|error| self.fault(error))?;
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let bytes = file.read(&mut piece).map_err(|error| self.fault(error))?;
            if bytes == 0 {
                return Ok(());
            }
            self.read_bytes += bytes as u64;
            self.take(&piece[..bytes], &mut hear);
        }
    }

    /// How many lines were none, or of a kind that is not known here.
    pub fn unknown(&self) -> u64 {
        self.unknown
    }

    fn take(&mut self, piece: &[u8], hear: &mut impl FnMut(Entry)) {
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            let is_end = part.ends_with(b"\n");
            if self.begun.len() + part.len() > LINE_BYTES_MAX {
                self.passes_over = true;
                self.begun.clear();
            }
            if !self.passes_over {
                self.begun.extend_from_slice(part);
            }
            if !is_end {
                continue;
            }
            match serde_json::from_slice::<Entry>(&self.begun) {
                Ok(entry) if !self.passes_over && entry.time_s.is_finite() => hear(entry),
                // An empty line is where a crash has torn one.
                _ if self.begun == b"\n" && !self.passes_over => (),
                _ => self.unknown += 1,
            }
            self.begun.clear();
            self.passes_over = false;
        }
    }

    fn fault(&self, error: std::io::Error) -> Error {
        Error::File { path: self.path.display().to_string(), error }
    }
}
