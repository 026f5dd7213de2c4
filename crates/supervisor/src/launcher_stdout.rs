//! Reads the standard output of a launcher, and shows it on the screen.

use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::screen::Screen;

/// The longest line of a rank that is printed in one piece.
const LINE_BYTES_MAX: u64 = 64 << 10;

/// How long to wait for the last lines of the ranks after the launcher has exited.
const LAST_LINES_LIMIT: Duration = Duration::from_millis(300);

/// A thread that prints the ranks' standard output.
pub(crate) struct LauncherStdout {
    done: Receiver<()>,
}

impl LauncherStdout {
    pub(crate) fn read(stdout: impl Read + Send + 'static, screen: Arc<dyn Screen>) -> Self {
        let (sender, done) = channel::<()>();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(stdout);
            loop {
                let mut line = Vec::new();
                match (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
                    Ok(0) | Err(_) => break,
                    Ok(_) => screen.print(&line),
                }
            }
            drop(sender);
        });
        LauncherStdout { done }
    }

    /// Waits until everything is printed, up to a limit.
    pub(crate) fn finish(&self) {
        // The expected result is an error: the thread has ended and dropped its sender.
        let _ = self.done.recv_timeout(LAST_LINES_LIMIT);
    }
}
