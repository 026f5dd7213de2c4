//! What people see of a run: lines, and on a terminal a bar below them.
//!
//! Where standard output is no terminal the ranks write to it themselves, and what is said here goes to standard error as it is.
//! On a terminal everything passes through here, because a line has to be put above the bar.

use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ratatui::crossterm::terminal;
use shardwise_journal::Entry;

use crate::bar::Facts;

/// How often the bar is drawn again: the time that is left changes, and the window's width may.
const REDRAW: Duration = Duration::from_millis(200);

/// The longest line of a rank's that is handed on in one piece.
const LINE_BYTES_MAX: u64 = 64 << 10;

/// How long the last lines of ranks are waited for, once the launcher has ended.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Where a run is shown.
#[derive(Clone)]
pub(crate) enum Screen {
    /// Lines alone.
    Lines,
    /// A bar below them.
    Bar(Arc<Bar>),
}

/// The bar on a terminal.
pub(crate) struct Bar {
    bar: ProgressBar,
    is_coloured: bool,
    state: Mutex<State>,
}

struct State {
    facts: Facts,
    drawn: Instant,
    /// How many columns the line had that was drawn last.
    columns: usize,
}

impl Screen {
    /// A bar where standard output is a terminal, unless lines are wanted.
    pub(crate) fn new(plain: bool) -> Self {
        if plain || !std::io::stdout().is_terminal() {
            return Screen::Lines;
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout_with_hz(20));
        // A template of one word cannot be wrong; without it the bar is indicatif's own.
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            bar.set_style(style);
        }
        let is_coloured = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let state = Mutex::new(State { facts: Facts::default(), drawn: Instant::now(), columns: 0 });
        Screen::Bar(Arc::new(Bar { bar, is_coloured, state }))
    }

    /// Says something to people, beside what the run prints. Whoever reads it may be gone; the run goes on.
    pub(crate) fn say(&self, text: &str) {
        self.error(format!("{text}\n").as_bytes());
    }

    /// Hands on what ranks say on their standard error.
    pub(crate) fn error(&self, bytes: &[u8]) {
        let write = || drop(std::io::stderr().write_all(bytes));
        match self {
            Screen::Lines => write(),
            Screen::Bar(bar) => bar.bar.suspend(write),
        }
    }

    /// Takes a line of the journal.
    pub(crate) fn hear(&self, entry: &Entry) {
        if let Screen::Bar(bar) = self {
            bar.state().facts.hear(entry);
        }
    }

    /// Draws the bar again, if it is time.
    pub(crate) fn refresh(&self) {
        if let Screen::Bar(bar) = self {
            let mut state = bar.state();
            if state.drawn.elapsed() >= REDRAW {
                state.drawn = Instant::now();
                bar.clear_rest(state.columns);
                state.columns = state.facts.line(width(), false).chars().count();
                bar.bar.set_message(bar.line(&state.facts));
                bar.bar.tick();
            }
        }
    }

    /// The run is over: the bar's last line stays.
    pub(crate) fn leave(&self) {
        if let Screen::Bar(bar) = self {
            let line = bar.line(&bar.state().facts);
            bar.bar.abandon_with_message(line);
        }
    }
}

impl Bar {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        // What a thread that panicked has left is still a line of text.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn line(&self, facts: &Facts) -> String {
        facts.line(width(), self.is_coloured)
    }

    /// A window that was made narrower has broken the line that was drawn into several, of which the bar knows the last alone.
    fn clear_rest(&self, drawn: usize) {
        let above = drawn.saturating_sub(1) / columns();
        if above > 0 {
            self.bar.suspend(|| drop(write!(std::io::stdout(), "\x1b[{above}A\x1b[J")));
        }
    }

    /// Puts a line of a rank's above the bar, unless the bar says the same.
    fn print(&self, line: &[u8]) {
        if line.starts_with(b"step ") && self.state().facts.has_begun() {
            return;
        }
        self.bar.suspend(|| drop(std::io::stdout().write_all(line)));
    }
}

/// The columns of the terminal.
fn columns() -> usize {
    terminal::size().map_or(80, |(width, _)| usize::from(width)).max(1)
}

/// As many as the bar has: in the last one some terminals begin a new line, and a `^C` needs two.
fn width() -> usize {
    columns().saturating_sub(3)
}

/// The ranks' standard output, which a thread puts above the bar.
pub(crate) struct Output {
    is_through: Receiver<()>,
}

impl Output {
    pub(crate) fn of(stdout: impl Read + Send + 'static, bar: Arc<Bar>) -> Self {
        let (through, is_through) = channel::<()>();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(stdout);
            loop {
                let mut line = Vec::new();
                match (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
                    Ok(0) | Err(_) => break,
                    Ok(_) => bar.print(&line),
                }
            }
            drop(through);
        });
        Output { is_through }
    }

    /// Waits until all was put there, but not for those who never end.
    pub(crate) fn finish(&self) {
        // An error is what is waited for: the thread has ended.
        let _ = self.is_through.recv_timeout(LAST_WORDS);
    }
}
