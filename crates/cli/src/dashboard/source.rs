//! The source of the dashboard's data: the run's folder, its supervisor, or both.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use shardwise_journal::Run;
use shardwise_supervisor::find_supervisor;
use shardwise_watch::{Request, Secret, Snapshot, Update, Viewer};

use super::run_view::RunView;

/// How long joining the supervisor may take, and the pause before another attempt.
const JOIN_LIMIT: Duration = Duration::from_secs(5);
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// How long an answer is shown.
const ANSWER_SHOWN: Duration = Duration::from_secs(8);

/// The data of a run, kept up to date.
pub(crate) struct Source {
    run: Run,
    view: RunView,
    location: Location,
    connection: Connection,
    snapshot: Option<Snapshot>,
    answer: Option<(String, Instant)>,
}

/// Where the run is.
enum Location {
    Folder(PathBuf),
    Channel(SocketAddr, Secret),
}

/// The connection to the supervisor.
enum Connection {
    Disconnected { since: Instant, reason: Option<String> },
    Joining(Receiver<shardwise_watch::Result<Viewer>>),
    Joined(Viewer),
}

/// The connection to the supervisor, as the dashboard shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Link {
    /// Whether requests can be sent.
    pub(crate) is_live: bool,
    /// An answer from the supervisor, or a problem with the connection.
    pub(crate) message: Option<String>,
}

impl Source {
    /// Opens a run's folder, and connects to its supervisor while it is running.
    pub(crate) fn folder(folder: &Path) -> Result<Self> {
        let run = Run::open(folder)?;
        Ok(Source::new(run, Location::Folder(folder.to_path_buf())))
    }

    /// Connects to a supervisor, which must be running. The run's folder is not read.
    pub(crate) fn channel(address: SocketAddr, secret: Secret) -> Result<Self> {
        let viewer = Viewer::join(address, &secret, JOIN_LIMIT).with_context(|| format!("--connect {address}"))?;
        let mut source = Source::new(Run::empty(), Location::Channel(address, secret));
        source.connection = Connection::Joined(viewer);
        Ok(source)
    }

    fn new(run: Run, location: Location) -> Self {
        let view = RunView::from_run(&run);
        let connection = Connection::Disconnected { since: Instant::now(), reason: None };
        let mut source = Source { run, view, location, connection, snapshot: None, answer: None };
        source.join();
        source
    }

    /// Returns the run as the dashboard shows it.
    pub(crate) fn run_view(&self) -> &RunView {
        &self.view
    }

    /// Returns the state of the ranks, if it is known.
    pub(crate) fn snapshot(&self) -> Option<&Snapshot> {
        self.snapshot.as_ref()
    }

    /// Returns the state of the connection.
    pub(crate) fn link(&self) -> Link {
        let answer =
            self.answer.as_ref().filter(|(_, when)| when.elapsed() < ANSWER_SHOWN).map(|(text, _)| text.clone());
        let reason = match (&self.connection, &self.location) {
            (Connection::Disconnected { reason: Some(reason), .. }, Location::Channel(..)) => Some(reason.clone()),
            _ => None,
        };
        Link { is_live: matches!(self.connection, Connection::Joined(_)), message: answer.or(reason) }
    }

    /// Sends a request to the supervisor.
    pub(crate) fn request(&mut self, request: Request) {
        let problem = match &mut self.connection {
            Connection::Joined(viewer) => viewer.request(request).err().map(|error| error.to_string()),
            _ => Some("This key works only while the run is running.".to_string()),
        };
        self.answer = problem.map(|problem| (problem, Instant::now())).or(self.answer.take());
    }

    /// Updates the data. Returns whether anything has changed.
    pub(crate) fn refresh(&mut self) -> bool {
        let mut is_new = match self.location {
            // Errors are ignored: a file that cannot be read now may be readable next time.
            Location::Folder(_) => self.run.refresh().unwrap_or(false),
            Location::Channel(..) => false,
        };
        is_new |= self.receive();
        let is_live = matches!(self.connection, Connection::Joined(_));
        if is_new || self.view.is_live != is_live {
            self.view = RunView { is_live, ..RunView::from_run(&self.run) };
            return true;
        }
        false
    }

    /// Waits up to a second for the state of the ranks.
    pub(crate) fn wait_for_snapshot(&mut self) {
        let until = Instant::now() + RETRY_AFTER;
        while Instant::now() < until && self.snapshot.is_none() && !self.is_disconnected() {
            std::thread::sleep(Duration::from_millis(20));
            self.refresh();
        }
        // Entries may have arrived after the first snapshot.
        self.refresh();
    }

    /// Receives from the supervisor. Returns whether anything has changed.
    fn receive(&mut self) -> bool {
        match &mut self.connection {
            Connection::Disconnected { since, .. } if since.elapsed() < RETRY_AFTER => false,
            Connection::Disconnected { .. } => {
                self.join();
                false
            }
            Connection::Joining(joining) => match joining.try_recv() {
                Err(TryRecvError::Empty) => false,
                Err(TryRecvError::Disconnected) => self.disconnect(None),
                Ok(Err(error)) => self.disconnect(Some(error.to_string())),
                Ok(Ok(viewer)) => {
                    self.connection = Connection::Joined(viewer);
                    if let Location::Channel(..) = self.location {
                        // The supervisor sends the whole history again.
                        self.run = Run::empty();
                    }
                    true
                }
            },
            Connection::Joined(viewer) => match viewer.receive() {
                Ok(updates) => {
                    let is_new = !updates.is_empty();
                    updates.into_iter().for_each(|update| self.apply(update));
                    is_new
                }
                Err(error) => self.disconnect(Some(error.to_string())),
            },
        }
    }

    fn apply(&mut self, update: Update) {
        match update {
            Update::Snapshot(snapshot) => self.snapshot = Some(snapshot),
            Update::Answer(text) => self.answer = Some((text, Instant::now())),
            Update::Entry(entry) => {
                // If there is a folder, it already has all entries.
                if let Location::Channel(..) = self.location {
                    self.run.add(entry);
                }
            }
        }
    }

    /// Starts to join the supervisor, if there is one.
    fn join(&mut self) {
        let found = match &self.location {
            Location::Folder(folder) => find_supervisor(folder),
            Location::Channel(address, secret) => Ok(Some((*address, secret.clone()))),
        };
        match found {
            Ok(Some((address, secret))) => {
                let (sender, receiver) = channel();
                // Joining may take seconds, and keys must keep working meanwhile.
                std::thread::spawn(move || drop(sender.send(Viewer::join(address, &secret, JOIN_LIMIT))));
                self.connection = Connection::Joining(receiver);
            }
            Ok(None) => drop(self.disconnect(None)),
            Err(error) => drop(self.disconnect(Some(error.to_string()))),
        }
    }

    fn is_disconnected(&self) -> bool {
        matches!(self.connection, Connection::Disconnected { .. })
    }

    /// Records the end of the connection. Returns whether the shown state changes.
    fn disconnect(&mut self, reason: Option<String>) -> bool {
        self.connection = Connection::Disconnected { since: Instant::now(), reason };
        self.snapshot.take().is_some()
    }
}
