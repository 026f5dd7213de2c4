//! The output of a run: lines and, on a terminal, a progress bar below them.
//!
//! If standard output is not a terminal, the ranks write to it themselves, and messages go to standard error unchanged. On a terminal,
//! everything passes through here, because lines must be printed above the bar.

use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ratatui::crossterm::terminal;
use shardwise_journal::Entry;

use crate::progress_line::ProgressLine;

/// How often the bar is redrawn. The remaining time changes, and so may the width of the window.
const REDRAW: Duration = Duration::from_millis(200);

/// The longest line of a rank that is printed in one piece.
const LINE_BYTES_MAX: u64 = 64 << 10;

/// How long to wait for the last lines of the ranks after the launcher has exited.
const LAST_LINES_LIMIT: Duration = Duration::from_millis(300);

/// The output of a run.
#[derive(Clone)]
pub(crate) enum Screen {
    /// Lines only.
    Lines,
    /// Lines with a progress bar below them.
    Bar(Arc<Bar>),
}

/// The progress bar on a terminal.
pub(crate) struct Bar {
    bar: ProgressBar,
    is_coloured: bool,
    state: Mutex<State>,
}

struct State {
    progress: ProgressLine,
    drawn: Instant,
    /// The number of columns of the last drawn line.
    columns: usize,
}

impl Screen {
    /// Creates the output: with a bar if standard output is a terminal and `plain` is not set.
    pub(crate) fn new(plain: bool) -> Self {
        if plain || !std::io::stdout().is_terminal() {
            return Screen::Lines;
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout_with_hz(20));
        // This template is always valid. Without it, indicatif would draw its default bar.
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            bar.set_style(style);
        }
        let is_coloured = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let state = Mutex::new(State { progress: ProgressLine::default(), drawn: Instant::now(), columns: 0 });
        Screen::Bar(Arc::new(Bar { bar, is_coloured, state }))
    }

    /// Prints a message to standard error. A reader that is gone does not end the run.
    pub(crate) fn say(&self, text: &str) {
        self.error(format!("{text}\n").as_bytes());
    }

    /// Writes bytes to standard error, above the bar if there is one.
    pub(crate) fn error(&self, bytes: &[u8]) {
        let write = || drop(std::io::stderr().write_all(bytes));
        match self {
            Screen::Lines => write(),
            Screen::Bar(bar) => bar.bar.suspend(write),
        }
    }

    /// Updates the bar with a journal entry.
    pub(crate) fn add_entry(&self, entry: &Entry) {
        if let Screen::Bar(bar) = self {
            bar.state().progress.add(entry);
        }
    }

    /// Redraws the bar if it is due.
    pub(crate) fn refresh(&self) {
        if let Screen::Bar(bar) = self {
            let mut state = bar.state();
            if state.drawn.elapsed() >= REDRAW {
                state.drawn = Instant::now();
                bar.clear_wrapped_lines(state.columns);
                state.columns = state.progress.format(width(), false).chars().count();
                bar.bar.set_message(bar.line(&state.progress));
                bar.bar.tick();
            }
        }
    }

    /// Ends the output; the last line of the bar stays.
    pub(crate) fn finish(&self) {
        if let Screen::Bar(bar) = self {
            let line = bar.line(&bar.state().progress);
            bar.bar.abandon_with_message(line);
        }
    }
}

impl Bar {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        // The state is still usable after a panic: it is only text.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn line(&self, progress: &ProgressLine) -> String {
        progress.format(width(), self.is_coloured)
    }

    /// Clears what is left of the bar after the window got narrower: the terminal has wrapped it, and indicatif knows only the last line.
    fn clear_wrapped_lines(&self, drawn: usize) {
        let above = drawn.saturating_sub(1) / columns();
        if above > 0 {
            self.bar.suspend(|| drop(write!(std::io::stdout(), "\x1b[{above}A\x1b[J")));
        }
    }

    /// Prints a line of a rank above the bar, unless the bar already shows its content.
    fn print(&self, line: &[u8]) {
        if line.starts_with(b"step ") && self.state().progress.has_started() {
            return;
        }
        self.bar.suspend(|| drop(std::io::stdout().write_all(line)));
    }
}

/// The width of the terminal.
fn columns() -> usize {
    terminal::size().map_or(80, |(width, _)| usize::from(width)).max(1)
}

/// The width of the bar. Some terminals wrap after the last column, and `^C` takes two columns.
fn width() -> usize {
    columns().saturating_sub(3)
}

/// A thread that prints the ranks' standard output above the bar.
pub(crate) struct Output {
    done: Receiver<()>,
}

impl Output {
    pub(crate) fn spawn(stdout: impl Read + Send + 'static, bar: Arc<Bar>) -> Self {
        let (sender, done) = channel::<()>();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(stdout);
            loop {
                let mut line = Vec::new();
                match (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
                    Ok(0) | Err(_) => break,
                    Ok(_) => bar.print(&line),
                }
            }
            drop(sender);
        });
        Output { done }
    }

    /// Waits until everything is printed, up to a limit.
    pub(crate) fn finish(&self) {
        // The expected result is an error: the thread has ended and dropped its sender.
        let _ = self.done.recv_timeout(LAST_LINES_LIMIT);
    }
}
