//! Where the supervisor shows what happens.

use std::io::Write;

use shardwise_journal::Entry;

/// The output of a run. By default, the ranks write to standard output themselves, and messages go to standard error. A screen that
/// draws something, such as a progress bar, replaces the other methods too.
pub trait Screen: Send + Sync {
    /// Writes bytes to standard error. A reader that is gone does not end the run.
    fn write_error(&self, bytes: &[u8]) {
        drop(std::io::stderr().write_all(bytes));
    }

    /// Prints a message to standard error.
    fn say(&self, text: &str) {
        self.write_error(format!("{text}\n").as_bytes());
    }

    /// Whether the ranks' standard output passes through [`Screen::print`].
    fn captures_output(&self) -> bool {
        false
    }

    /// Prints a line of the ranks' standard output.
    fn print(&self, line: &[u8]) {
        drop(std::io::stdout().write_all(line));
    }

    /// Shows a journal entry.
    fn add_entry(&self, _entry: &Entry) {}

    /// Redraws the screen if it is due. Called many times a second.
    fn refresh(&self) {}

    /// Ends the output.
    fn finish(&self) {}
}

/// A screen of lines only.
pub struct PlainLines;

impl Screen for PlainLines {}
