//! What a supervisor writes down of a run, and hands on of what the first rank writes: to the run's folder, the screen, those who
//! look on, and whoever scrapes figures.
//!
//! Nothing here may end a run. What cannot be written is said once.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, bail};
use shardwise_journal::{EVENTS, Entry, Journal, Run, Story, What};
use shardwise_watch::{History, Server};

use crate::figures::Figures;
use crate::screen::Screen;

/// A run as its supervisor tells it.
pub(crate) struct Chronicle {
    pub(crate) screen: Screen,
    folder: PathBuf,
    journal: Option<Journal>,
    /// Whether the run has made its last step, so that the next launch may find nothing left to do.
    is_through: bool,
    /// Such a launch, until anything comes of it.
    held_back: Option<Entry>,
    history: History,
    figures: Arc<Mutex<Figures>>,
}

impl Chronicle {
    /// Goes on with what is in the run's folder, if there is anything. Two at once would train over each other: the second is refused.
    pub(crate) fn open(folder: &Path, screen: Screen) -> Result<Self> {
        let (mut history, mut figures) = (History::default(), Figures::default());
        let mut is_through = false;
        if let Ok(run) = Run::open(folder) {
            is_through = has_made_last_step(&Story::of(run.entries()));
            for entry in run.entries() {
                history.add(entry.clone());
                figures.add(entry);
            }
        }
        let mut chronicle = Chronicle {
            screen,
            folder: folder.to_path_buf(),
            journal: None,
            is_through,
            held_back: None,
            history,
            figures: Arc::new(Mutex::new(figures)),
        };
        match Journal::open(folder, EVENTS) {
            Ok(journal) if journal.keep() => chronicle.journal = Some(journal),
            Ok(_) => {
                let folder = folder.display();
                bail!(
                    "{folder}: another `shardwise train` is at work on this run; `shardwise watch {folder}` shows it. To end it, press \
                     Ctrl-C where it was started"
                );
            }
            Err(error) => chronicle.give_up(&error),
        }
        Ok(chronicle)
    }

    /// The run's folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its figures, as they change.
    pub(crate) fn figures(&self) -> Arc<Mutex<Figures>> {
        self.figures.clone()
    }

    /// What those who come later have to know.
    pub(crate) fn history(&self) -> History {
        self.history.clone()
    }

    /// Writes down what happens now. The launch of a run that has made its last step is written down with what comes of it, which may
    /// be nothing.
    pub(crate) fn note(&mut self, what: What, mut server: Option<&mut Server>) {
        let entry = Entry::now(what);
        if matches!(entry.what, What::Launched(_)) && std::mem::take(&mut self.is_through) {
            self.held_back = Some(entry);
            return;
        }
        self.release(server.as_deref_mut());
        self.write(entry, server);
    }

    /// Hands on what was written down.
    pub(crate) fn hear(&mut self, entry: Entry, mut server: Option<&mut Server>) {
        self.release(server.as_deref_mut());
        self.hand_on(entry, server);
    }

    /// Whether ranks were launched and nothing came of it.
    pub(crate) fn is_idle(&self) -> bool {
        self.held_back.is_some()
    }

    /// Writes down the launch that was held back, if one was.
    fn release(&mut self, server: Option<&mut Server>) {
        if let Some(entry) = self.held_back.take() {
            self.write(entry, server);
        }
    }

    fn write(&mut self, entry: Entry, server: Option<&mut Server>) {
        if let Some(journal) = &mut self.journal
            && let Err(error) = journal.write(&entry)
        {
            self.give_up(&error);
        }
        self.hand_on(entry, server);
    }

    fn hand_on(&mut self, entry: Entry, server: Option<&mut Server>) {
        self.screen.hear(&entry);
        self.figures.lock().unwrap_or_else(PoisonError::into_inner).add(&entry);
        if let Some(server) = server {
            server.show(entry.clone());
        }
        self.history.add(entry);
    }

    fn give_up(&mut self, error: &shardwise_journal::Error) {
        self.screen.say(&format!("{error}: what the supervisor has to say of this run is not written down."));
        self.journal = None;
    }
}

fn has_made_last_step(story: &Story) -> bool {
    let made = story.attempts().iter().rev().find_map(|attempt| attempt.steps);
    made.zip(story.last_start()).is_some_and(|((_, last), start)| last >= start.steps)
}
