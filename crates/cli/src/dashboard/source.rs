//! Where a run is looked at: its folder, its supervisor, or both.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use shardwise_journal::Run;
use shardwise_watch::{News, Request, Secret, Snapshot, Viewer};

use super::story::Story;
use crate::door;

/// How long joining may take, and how long is waited before it is tried again.
const JOIN_LIMIT: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_secs(1);

/// For how long an answer is shown.
const ANSWER: Duration = Duration::from_secs(8);

/// A run that is looked at.
pub(crate) struct Source {
    run: Run,
    story: Story,
    place: Place,
    state: State,
    snapshot: Option<Snapshot>,
    answer: Option<(String, Instant)>,
}

/// Where it is.
enum Place {
    Folder(PathBuf),
    Channel(SocketAddr, Secret),
}

/// How the channel is.
enum State {
    Apart { since: Instant, why: Option<String> },
    Joining(Receiver<shardwise_watch::Result<Viewer>>),
    Joined(Viewer),
}

/// What of the channel is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Link {
    /// Whether the supervisor can be asked.
    pub(crate) is_live: bool,
    /// What there is to say of it.
    pub(crate) said: Option<String>,
}

impl Source {
    /// A run's folder; and its supervisor, while it is at work.
    pub(crate) fn folder(folder: &Path) -> Result<Self> {
        let run = Run::open(folder)?;
        Ok(Source::new(run, Place::Folder(folder.to_path_buf())))
    }

    /// A supervisor alone, which has to be there.
    pub(crate) fn channel(address: SocketAddr, secret: Secret) -> Result<Self> {
        let viewer = Viewer::join(address, &secret, JOIN_LIMIT).with_context(|| format!("--connect {address}"))?;
        let mut source = Source::new(Run::heard(), Place::Channel(address, secret));
        source.state = State::Joined(viewer);
        Ok(source)
    }

    fn new(run: Run, place: Place) -> Self {
        let story = Story::of(&run);
        let state = State::Apart { since: Instant::now(), why: None };
        let mut source = Source { run, story, place, state, snapshot: None, answer: None };
        source.join();
        source
    }

    /// What is known.
    pub(crate) fn story(&self) -> &Story {
        &self.story
    }

    /// Where the ranks are, if that is known.
    pub(crate) fn snapshot(&self) -> Option<&Snapshot> {
        self.snapshot.as_ref()
    }

    /// How the channel is.
    pub(crate) fn link(&self) -> Link {
        let answer = self.answer.as_ref().filter(|(_, when)| when.elapsed() < ANSWER).map(|(text, _)| text.clone());
        let why = match (&self.state, &self.place) {
            (State::Apart { why: Some(why), .. }, Place::Channel(..)) => Some(why.clone()),
            _ => None,
        };
        Link { is_live: matches!(self.state, State::Joined(_)), said: answer.or(why) }
    }

    /// Asks the supervisor for something.
    pub(crate) fn ask(&mut self, request: Request) {
        let said = match &mut self.state {
            State::Joined(viewer) => viewer.ask(request).err().map(|error| error.to_string()),
            _ => Some("Only a run that is at work can be asked.".to_string()),
        };
        self.answer = said.map(|said| (said, Instant::now())).or(self.answer.take());
    }

    /// Looks for what is new; whether anything is.
    pub(crate) fn refresh(&mut self) -> bool {
        let mut is_new = match self.place {
            // What cannot be read now may be the next time.
            Place::Folder(_) => self.run.refresh().unwrap_or(false),
            Place::Channel(..) => false,
        };
        is_new |= self.listen();
        let is_live = matches!(self.state, State::Joined(_));
        if is_new || self.story.is_live != is_live {
            self.story = Story { is_live, ..Story::of(&self.run) };
            return true;
        }
        false
    }

    /// Takes a moment to hear where the ranks are.
    pub(crate) fn settle(&mut self) {
        let until = Instant::now() + AGAIN;
        while Instant::now() < until && self.snapshot.is_none() && !matches!(self.state, State::Apart { .. }) {
            std::thread::sleep(Duration::from_millis(20));
            self.refresh();
        }
        // Lines may have come after the first summary of ranks.
        self.refresh();
    }

    /// Hears what the supervisor has to say; whether it was anything.
    fn listen(&mut self) -> bool {
        match &mut self.state {
            State::Apart { since, .. } if since.elapsed() < AGAIN => false,
            State::Apart { .. } => {
                self.join();
                false
            }
            State::Joining(joining) => match joining.try_recv() {
                Err(TryRecvError::Empty) => false,
                Err(TryRecvError::Disconnected) => self.part(None),
                Ok(Err(error)) => self.part(Some(error.to_string())),
                Ok(Ok(viewer)) => {
                    self.state = State::Joined(viewer);
                    if let Place::Channel(..) = self.place {
                        // All that was shown before is shown again.
                        self.run = Run::heard();
                    }
                    true
                }
            },
            State::Joined(viewer) => match viewer.hear() {
                Ok(news) => {
                    let is_new = !news.is_empty();
                    news.into_iter().for_each(|news| self.take(news));
                    is_new
                }
                Err(error) => self.part(Some(error.to_string())),
            },
        }
    }

    fn take(&mut self, news: News) {
        match news {
            News::Snapshot(snapshot) => self.snapshot = Some(snapshot),
            News::Answer(text) => self.answer = Some((text, Instant::now())),
            News::Entry(entry) => {
                // The run's folder has it as well, and more.
                if let Place::Channel(..) = self.place {
                    self.run.hear(entry);
                }
            }
        }
    }

    /// Begins to join, if there is anyone.
    fn join(&mut self) {
        let found = match &self.place {
            Place::Folder(folder) => door::find(folder),
            Place::Channel(address, secret) => Ok(Some((*address, secret.clone()))),
        };
        match found {
            Ok(Some((address, secret))) => {
                let (sender, receiver) = channel();
                // It may take seconds, in which keys are looked for.
                std::thread::spawn(move || drop(sender.send(Viewer::join(address, &secret, JOIN_LIMIT))));
                self.state = State::Joining(receiver);
            }
            Ok(None) => drop(self.part(None)),
            Err(error) => drop(self.part(Some(error.to_string()))),
        }
    }

    fn part(&mut self, why: Option<String>) -> bool {
        self.state = State::Apart { since: Instant::now(), why };
        self.snapshot.take().is_some()
    }
}
