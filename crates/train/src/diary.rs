//! What a run says of itself: lines for people, and entries for the journal, for TensorBoard and for whoever follows the run.
//!
//! Only the first rank does; for the others every call is nothing. It measures nothing and decides nothing. A disk that is full or
//! gone does not end a run: that is said once, and tried again from time to time.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use shardwise_comm::Group;
use shardwise_journal::{Entry, Journal, METRICS, TensorBoard, What};

use crate::saving::News;

/// How long it is from one attempt to the next to write to a folder that cannot be written to.
const AGAIN: Duration = Duration::from_secs(10);

/// Tells what happens.
pub(crate) struct Diary<'a> {
    is_first: bool,
    folder: PathBuf,
    pages: Pages,
    /// An attempt's first entry, where it could not be written: all others need it.
    owed: Option<Entry>,
    told: &'a mut dyn FnMut(&Entry),
    out: &'a mut dyn Write,
}

/// The files.
enum Pages {
    Open(Box<(Journal, TensorBoard)>),
    /// They cannot be written. It was last tried then.
    Shut(Instant),
}

impl<'a> Diary<'a> {
    /// Opens a run's folder, which is made where it is not there. `told` is called with every entry, `out` is for people.
    pub(crate) fn open(
        folder: &Path,
        world: &Group,
        told: &'a mut dyn FnMut(&Entry),
        out: &'a mut dyn Write,
    ) -> Diary<'a> {
        let (is_first, pages) = (world.rank() == 0, Pages::Shut(Instant::now()));
        let mut diary = Diary { is_first, folder: folder.to_path_buf(), pages, owed: None, told, out };
        if is_first {
            match opened(folder) {
                Ok(pages) => diary.pages = pages,
                Err(error) => diary.cannot(&error),
            }
        }
        diary
    }

    /// Whether this rank is the one that tells.
    pub(crate) fn is_first(&self) -> bool {
        self.is_first
    }

    /// Says something to people, and writes nothing down.
    pub(crate) fn say(&mut self, text: &dyn fmt::Display) {
        if self.is_first {
            // Whoever reads the output may be gone; the run goes on.
            drop(writeln!(self.out, "{text}").and_then(|()| self.out.flush()));
        }
    }

    /// Says something to people, and writes it down.
    pub(crate) fn note(&mut self, step: u64, text: &str) {
        self.say(&text);
        self.enter(|| What::Note { step, text: text.to_string() });
    }

    /// What a save has come to.
    pub(crate) fn news(&mut self, news: News) {
        self.say(&news);
        self.enter(|| match news {
            News::Saved(saved) => What::Saved(saved),
            News::Trouble { step, text } => What::Note { step, text },
        });
    }

    /// Writes something down.
    pub(crate) fn enter(&mut self, what: impl FnOnce() -> What) {
        if !self.is_first {
            return;
        }
        let entry = Entry::now(what());
        (self.told)(&entry);
        if let Pages::Shut(tried) = self.pages {
            self.open_again(tried);
        }
        let Pages::Open(pages) = &mut self.pages else { return self.owe(entry) };
        let (journal, tensorboard) = &mut **pages;
        if let Err(error) = journal.write(&entry).and_then(|()| tensorboard.add(&entry)) {
            self.pages = Pages::Shut(Instant::now());
            self.cannot(&error);
            self.owe(entry);
        }
    }

    fn open_again(&mut self, tried: Instant) {
        if tried.elapsed() < AGAIN {
            return;
        }
        let owed = self.owed.take();
        let written = opened(&self.folder).and_then(|mut pages| {
            if let (Pages::Open(pages), Some(owed)) = (&mut pages, &owed) {
                pages.0.write(owed).and_then(|()| pages.1.add(owed))?;
            }
            Ok(pages)
        });
        match written {
            Ok(pages) => {
                self.pages = pages;
                self.say(&format!("the journal in {} is written again", self.folder.display()));
            }
            Err(_) => (self.pages, self.owed) = (Pages::Shut(Instant::now()), owed),
        }
    }

    fn owe(&mut self, entry: Entry) {
        if let What::Start(_) = entry.what {
            self.owed = Some(entry);
        }
    }

    fn cannot(&mut self, error: &shardwise_journal::Error) {
        self.say(&format!("the journal cannot be written, which is tried again, and the run goes on: {error}"));
    }
}

fn opened(folder: &Path) -> shardwise_journal::Result<Pages> {
    Ok(Pages::Open(Box::new((Journal::open(folder, METRICS)?, TensorBoard::open(folder)?))))
}
