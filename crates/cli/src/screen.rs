//! The output of a run: lines and, on a terminal, a progress bar below them.
//!
//! If standard output is not a terminal, the ranks write to it themselves, and messages go to standard error unchanged. On a terminal,
//! everything passes through here, because lines must be printed above the bar.

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ratatui::crossterm::terminal;
use shardwise_journal::Entry;
use shardwise_supervisor::{PlainLines, Screen};

use crate::progress_line::ProgressLine;

/// How often the bar is redrawn. The remaining time changes, and so may the width of the window.
const REDRAW: Duration = Duration::from_millis(200);

/// The progress bar on a terminal.
struct Bar {
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

/// Opens the output: with a bar if standard output is a terminal and `plain` is not set.
pub(crate) fn open(plain: bool) -> Arc<dyn Screen> {
    match plain || !std::io::stdout().is_terminal() {
        true => Arc::new(PlainLines),
        false => Arc::new(Bar::new()),
    }
}

impl Screen for Bar {
    /// Writes above the bar.
    fn write_error(&self, bytes: &[u8]) {
        self.bar.suspend(|| drop(std::io::stderr().write_all(bytes)));
    }

    fn captures_output(&self) -> bool {
        true
    }

    /// Prints a line above the bar, unless the bar already shows its content.
    fn print(&self, line: &[u8]) {
        if line.starts_with(b"step ") && self.state().progress.has_started() {
            return;
        }
        self.bar.suspend(|| drop(std::io::stdout().write_all(line)));
    }

    fn add_entry(&self, entry: &Entry) {
        self.state().progress.add(entry);
    }

    fn refresh(&self) {
        let mut state = self.state();
        if state.drawn.elapsed() >= REDRAW {
            state.drawn = Instant::now();
            self.clear_wrapped_lines(state.columns);
            state.columns = state.progress.format(width(), false).chars().count();
            self.bar.set_message(self.line(&state.progress));
            self.bar.tick();
        }
    }

    /// Ends the output; the last line of the bar stays.
    fn finish(&self) {
        let line = self.line(&self.state().progress);
        self.bar.abandon_with_message(line);
    }
}

impl Bar {
    fn new() -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout_with_hz(20));
        // This template is always valid. Without it, indicatif would draw its default bar.
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            bar.set_style(style);
        }
        let is_coloured = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let state = Mutex::new(State { progress: ProgressLine::default(), drawn: Instant::now(), columns: 0 });
        Bar { bar, is_coloured, state }
    }

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
}

/// The width of the terminal.
fn columns() -> usize {
    terminal::size().map_or(80, |(width, _)| usize::from(width)).max(1)
}

/// The width of the bar. Some terminals wrap after the last column, and `^C` takes two columns.
fn width() -> usize {
    columns().saturating_sub(3)
}
