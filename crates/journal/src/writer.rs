//! Appends to a journal file.

use std::fs::{File, OpenOptions, TryLockError, create_dir_all};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::{Entry, EntryKind, Error, Result};

/// A journal file that one process appends to.
pub struct Journal {
    file: File,
    path: String,
}

impl Journal {
    /// Opens a file in a run's folder, or creates it. A partial last line, left by a crash, is terminated first.
    pub fn open(folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(name);
        let fail = |error| Error::File { path: path.display().to_string(), error };
        create_dir_all(folder).map_err(fail)?;
        let mut file = OpenOptions::new().create(true).append(true).read(true).open(&path).map_err(fail)?;
        if !ends_with_newline(&mut file).map_err(fail)? {
            file.write_all(b"\n").map_err(fail)?;
        }
        Ok(Journal { file, path: path.display().to_string() })
    }

    /// Locks the file for as long as it is open. Returns false if another process holds the lock. A file system without locks
    /// grants it to everyone.
    pub fn lock(&self) -> bool {
        !matches!(self.file.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Appends an entry with the current time, and returns it.
    pub fn add(&mut self, kind: EntryKind) -> Result<Entry> {
        let entry = Entry::now(kind);
        self.write(&entry)?;
        Ok(entry)
    }

    /// Appends an entry. Readers see it at once; a crash of the machine may lose the last few. A failed write may leave a partial
    /// line, which the next [`Journal::open`] terminates.
    pub fn write(&mut self, entry: &Entry) -> Result<()> {
        let fail = |error| Error::File { path: self.path.clone(), error };
        let mut line = serde_json::to_vec(entry).map_err(|error| fail(error.into()))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(fail)
    }
}

impl Entry {
    /// Creates an entry with the current time.
    pub fn now(kind: EntryKind) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Entry { time_s: since.map_or(0., |since| since.as_secs_f64()), kind }
    }
}

fn ends_with_newline(file: &mut File) -> std::io::Result<bool> {
    if file.seek(SeekFrom::End(0))? == 0 {
        return Ok(true);
    }
    file.seek(SeekFrom::End(-1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}
