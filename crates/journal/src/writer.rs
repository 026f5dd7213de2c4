//! Writing a journal: lines at the end of a file.

use std::fs::{File, OpenOptions, TryLockError, create_dir_all};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::{Entry, Error, Result, What};

/// A file of lines that one process adds to.
pub struct Journal {
    file: File,
    path: String,
}

impl Journal {
    /// Goes on with a file of a run's folder, or begins it. What a crash has left of a last line is ended first.
    pub fn open(folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(name);
        let fail = |error| Error::File { path: path.display().to_string(), error };
        create_dir_all(folder).map_err(fail)?;
        let mut file = OpenOptions::new().create(true).append(true).read(true).open(&path).map_err(fail)?;
        if !ends_with_a_line(&mut file).map_err(fail)? {
            file.write_all(b"\n").map_err(fail)?;
        }
        Ok(Journal { file, path: path.display().to_string() })
    }

    /// Keeps the file to itself for as long as it is open. False if another process does that already; where the file system knows
    /// no locks, nobody does.
    pub fn keep(&self) -> bool {
        !matches!(self.file.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Adds a line of what happens now, and returns it.
    pub fn add(&mut self, what: What) -> Result<Entry> {
        let entry = Entry::now(what);
        self.write(&entry)?;
        Ok(entry)
    }

    /// Adds a line. It is there for readers at once; a crash of the machine may take the last few. Where that fails, there may be
    /// half a line, which opening the file again ends.
    pub fn write(&mut self, entry: &Entry) -> Result<()> {
        let fail = |error| Error::File { path: self.path.clone(), error };
        let mut line = serde_json::to_vec(entry).map_err(|error| fail(error.into()))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(fail)
    }
}

impl Entry {
    /// What happens now.
    pub fn now(what: What) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Entry { time_s: since.map_or(0., |since| since.as_secs_f64()), what }
    }
}

fn ends_with_a_line(file: &mut File) -> std::io::Result<bool> {
    if file.seek(SeekFrom::End(0))? == 0 {
        return Ok(true);
    }
    file.seek(SeekFrom::End(-1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}
