//! The supervisor's event log. It writes the supervisor's journal entries to the run's folder, and forwards them and the entries of rank 0
//! to the screen, the viewers and the metrics endpoint.
//!
//! Nothing here may end a run. If the journal cannot be written, one message says so, and the run continues.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use shardwise_journal::{EVENTS, Entry, EntryKind, Journal, Run, Timeline};
use shardwise_watch::{History, Server};

use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::screen::Screen;

/// The supervisor's event log of a run.
pub struct EventLog {
    pub(crate) screen: Arc<dyn Screen>,
    folder: PathBuf,
    journal: Option<Journal>,
    /// Whether the run has completed its last step, so that the next launch may find nothing left to do.
    is_complete: bool,
    /// The entry of such a launch, held back until another entry follows it.
    pending_launch: Option<Entry>,
    history: History,
    metrics: Arc<Mutex<Metrics>>,
}

impl EventLog {
    /// Opens the log in a run's folder, with the history of earlier attempts. Fails if another supervisor is using the folder.
    pub fn open(folder: &Path, screen: Arc<dyn Screen>) -> Result<Self> {
        let (mut history, mut metrics) = (History::default(), Metrics::default());
        let mut is_complete = false;
        if let Ok(run) = Run::open(folder) {
            is_complete = has_completed_last_step(&Timeline::from_entries(run.entries()));
            for entry in run.entries() {
                history.add(entry.clone());
                metrics.add(entry);
            }
        }
        let mut log = EventLog {
            screen,
            folder: folder.to_path_buf(),
            journal: None,
            is_complete,
            pending_launch: None,
            history,
            metrics: Arc::new(Mutex::new(metrics)),
        };
        match Journal::open(folder, EVENTS) {
            Ok(journal) if journal.lock() => log.journal = Some(journal),
            Ok(_) => return Err(Error::FolderInUse { folder: folder.to_path_buf() }),
            Err(error) => log.give_up(&error),
        }
        Ok(log)
    }

    /// Returns the run's folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the run's metrics, which the log keeps up to date.
    pub fn metrics(&self) -> Arc<Mutex<Metrics>> {
        self.metrics.clone()
    }

    /// Returns the entries that new viewers receive first.
    pub(crate) fn history(&self) -> History {
        self.history.clone()
    }

    /// Records one of the supervisor's entries. The launch of a run that is already complete is recorded only once another entry
    /// follows it.
    pub(crate) fn record(&mut self, kind: EntryKind, mut server: Option<&mut Server>) {
        let entry = Entry::now(kind);
        if matches!(entry.kind, EntryKind::Launched(_)) && std::mem::take(&mut self.is_complete) {
            self.pending_launch = Some(entry);
            return;
        }
        self.write_pending_launch(server.as_deref_mut());
        self.write(entry, server);
    }

    /// Forwards an entry of rank 0, which writes its own entries to the journal.
    pub(crate) fn forward(&mut self, entry: Entry, mut server: Option<&mut Server>) {
        self.write_pending_launch(server.as_deref_mut());
        self.publish(entry, server);
    }

    /// Returns whether the run was launched after it was complete, and its ranks found nothing to do.
    pub(crate) fn is_idle(&self) -> bool {
        self.pending_launch.is_some()
    }

    /// Writes the pending launch, if there is one.
    fn write_pending_launch(&mut self, server: Option<&mut Server>) {
        if let Some(entry) = self.pending_launch.take() {
            self.write(entry, server);
        }
    }

    fn write(&mut self, entry: Entry, server: Option<&mut Server>) {
        if let Some(journal) = &mut self.journal
            && let Err(error) = journal.write(&entry)
        {
            self.give_up(&error);
        }
        self.publish(entry, server);
    }

    fn publish(&mut self, entry: Entry, server: Option<&mut Server>) {
        self.screen.add_entry(&entry);
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner).add(&entry);
        if let Some(server) = server {
            server.publish(entry.clone());
        }
        self.history.add(entry);
    }

    fn give_up(&mut self, error: &shardwise_journal::Error) {
        self.screen.say(&format!("{error}: the supervisor's events of this run will not be recorded."));
        self.journal = None;
    }
}

fn has_completed_last_step(timeline: &Timeline) -> bool {
    let steps = timeline.attempts().iter().rev().find_map(|attempt| attempt.steps);
    steps.zip(timeline.last_start()).is_some_and(|((_, last), start)| last >= start.steps)
}
