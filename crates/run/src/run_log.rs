//! The log of a run: lines on the terminal, and entries for the journal, TensorBoard and viewers.
//!
//! Only rank 0 logs; on other ranks every call does nothing. The log measures nothing and decides nothing. A full or missing disk
//! does not end a run: the log reports it once and retries from time to time.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use shardwise_comm::Group;
use shardwise_journal::{Entry, EntryKind, Journal, METRICS, TensorBoard};

use crate::saver::SaveEvent;

/// The time between attempts to open files that cannot be written.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// Writes the log of a run.
pub(crate) struct RunLog<'a> {
    is_first: bool,
    folder: PathBuf,
    files: LogFiles,
    /// The attempt's first entry, if it could not be written yet. Later entries make no sense without it.
    unwritten_start: Option<Entry>,
    on_entry: &'a mut dyn FnMut(&Entry),
    out: &'a mut dyn Write,
}

enum LogFiles {
    Open(Box<(Journal, TensorBoard)>),
    /// They cannot be written. Holds the time of the last attempt.
    Closed(Instant),
}

impl<'a> RunLog<'a> {
    /// Opens a run's folder, creating it if necessary. `on_entry` is called with every entry; `out` is the terminal.
    pub(crate) fn open(
        folder: &Path,
        world: &Group,
        on_entry: &'a mut dyn FnMut(&Entry),
        out: &'a mut dyn Write,
    ) -> RunLog<'a> {
        let (is_first, files) = (world.rank() == 0, LogFiles::Closed(Instant::now()));
        let mut log = RunLog { is_first, folder: folder.to_path_buf(), files, unwritten_start: None, on_entry, out };
        if is_first {
            match open_files(folder) {
                Ok(files) => log.files = files,
                Err(error) => log.report_failure(&error),
            }
        }
        log
    }

    /// Whether this is rank 0, which logs.
    pub(crate) fn is_first(&self) -> bool {
        self.is_first
    }

    /// Prints a line, without recording it.
    pub(crate) fn print(&mut self, text: &dyn fmt::Display) {
        if self.is_first {
            // If nobody reads the output any more, the run continues.
            drop(writeln!(self.out, "{text}").and_then(|()| self.out.flush()));
        }
    }

    /// Prints a line and records it.
    pub(crate) fn note(&mut self, step: u64, text: &str) {
        self.print(&text);
        self.record(|| EntryKind::Note { step, text: text.to_string() });
    }

    /// Prints and records the progress of a save.
    pub(crate) fn record_save(&mut self, event: SaveEvent) {
        self.print(&event);
        self.record(|| match event {
            SaveEvent::Saved(saved) => EntryKind::Saved(saved),
            SaveEvent::Problem { step, text } => EntryKind::Note { step, text },
        });
    }

    /// Records an entry.
    pub(crate) fn record(&mut self, kind: impl FnOnce() -> EntryKind) {
        if !self.is_first {
            return;
        }
        let entry = Entry::now(kind());
        (self.on_entry)(&entry);
        if let LogFiles::Closed(tried) = self.files {
            self.retry_open(tried);
        }
        let LogFiles::Open(files) = &mut self.files else { return self.keep_if_start(entry) };
        let (journal, tensorboard) = &mut **files;
        if let Err(error) = journal.write(&entry).and_then(|()| tensorboard.add(&entry)) {
            self.files = LogFiles::Closed(Instant::now());
            self.report_failure(&error);
            self.keep_if_start(entry);
        }
    }

    fn retry_open(&mut self, tried: Instant) {
        if tried.elapsed() < RETRY_AFTER {
            return;
        }
        let unwritten_start = self.unwritten_start.take();
        let written = open_files(&self.folder).and_then(|mut files| {
            if let (LogFiles::Open(files), Some(unwritten_start)) = (&mut files, &unwritten_start) {
                files.0.write(unwritten_start).and_then(|()| files.1.add(unwritten_start))?;
            }
            Ok(files)
        });
        match written {
            Ok(files) => {
                self.files = files;
                self.print(&format!("the journal in {} can be written again", self.folder.display()));
            }
            Err(_) => (self.files, self.unwritten_start) = (LogFiles::Closed(Instant::now()), unwritten_start),
        }
    }

    fn keep_if_start(&mut self, entry: Entry) {
        if let EntryKind::Start(_) = entry.kind {
            self.unwritten_start = Some(entry);
        }
    }

    fn report_failure(&mut self, error: &shardwise_journal::Error) {
        self.print(&format!("the journal cannot be written: {error}; the run continues and will retry"));
    }
}

fn open_files(folder: &Path) -> shardwise_journal::Result<LogFiles> {
    Ok(LogFiles::Open(Box::new((Journal::open(folder, METRICS)?, TensorBoard::open(folder)?))))
}
