//! Reads the standard error of a launcher. Lines from the ranks are passed on at once; messages of the launcher itself are kept. When a
//! rank dies, Open MPI writes a framed message that names a signal and little else. It is shown only if nothing better is known.

use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::screen::Screen;

/// Limits on what is kept of the launcher's messages.
const LINE_BYTES_MAX: u64 = 64 << 10;
const KEPT_LINES_MAX: usize = 200;

/// How long to wait for the last messages once the launcher has exited. Its children on a lost host may keep the pipe open for as long
/// as the host is lost.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(300);

/// A thread that reads the launcher's standard error.
pub(crate) struct LauncherStderr {
    messages: Receiver<String>,
    muted: Arc<AtomicBool>,
}

impl LauncherStderr {
    pub(crate) fn read(stderr: impl Read + Send + 'static, screen: Arc<dyn Screen>) -> Self {
        let (kept, messages) = channel();
        let muted = Arc::new(AtomicBool::new(false));
        let is_muted = muted.clone();
        std::thread::spawn(move || {
            let mut pass_on = |line: &[u8]| {
                if !is_muted.load(Ordering::Relaxed) {
                    screen.write_error(line);
                }
            };
            // The receiver may be gone.
            split_lines(BufReader::new(stderr), &mut pass_on, &mut |line| drop(kept.send(line)))
        });
        LauncherStderr { messages, muted }
    }

    /// Stops passing lines on: what a launcher prints while it is being stopped helps nobody.
    pub(crate) fn mute(&self) {
        self.muted.store(true, Ordering::Relaxed);
    }

    /// The launcher's messages. Call it once the launcher has exited.
    pub(crate) fn messages(&self) -> Vec<String> {
        std::iter::from_fn(|| self.messages.recv_timeout(DRAIN_TIMEOUT).ok()).take(KEPT_LINES_MAX).collect()
    }
}

/// Keeps the framed lines, which the launcher writes, and passes all others on.
fn split_lines(mut lines: impl BufRead, pass_on: &mut dyn FnMut(&[u8]), keep: &mut dyn FnMut(String)) {
    let (mut kept, mut framed) = (0, false);
    loop {
        let mut line = Vec::new();
        match (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => (),
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        let is_frame = text.len() > 60 && text.bytes().all(|byte| byte == b'-');
        if is_frame {
            framed = !framed;
        } else if framed {
            kept += 1;
            if kept <= KEPT_LINES_MAX {
                keep(text.to_string());
            }
        } else {
            pass_on(&line);
        }
    }
}

/// The rank that died first, and how, from a message like `… process rank 2 with PID 0 on node a exited on signal 9 (Killed).`
pub(crate) fn first_death(messages: &[String]) -> Option<(usize, String)> {
    let text = messages.join(" ");
    let (_, after) = text.split_once("process rank ")?;
    let (rank, after) = after.split_once(' ')?;
    let (_, how) = after.split_once("exited on ")?;
    let end = how.find([')', '.']).map_or(how.len(), |end| end + usize::from(how[end..].starts_with(')')));
    let how: String = how[..end].split_whitespace().collect::<Vec<_>>().join(" ");
    Some((rank.parse().ok()?, how))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn lines_of_ranks_are_passed_on_and_those_of_the_launcher_are_kept() {
        let frame = "-".repeat(74);
        let said = format!(
            "rank 1: no\n{frame}\nPrimary job  terminated normally, but 1 process returned\na non-zero exit code.\n{frame}\nlast\n\
             {frame}\nmpirun noticed that process rank 2 with PID 0 on node here exited on signal 9 (Killed).\n{frame}\n"
        );
        let (mut passed_on, mut kept) = (Vec::new(), Vec::new());
        split_lines(said.as_bytes(), &mut |line| passed_on.extend_from_slice(line), &mut |line| kept.push(line));
        assert_eq!(String::from_utf8(passed_on).unwrap(), "rank 1: no\nlast\n");
        assert_eq!(kept.len(), 3);
        assert_eq!(first_death(&kept), Some((2, "signal 9 (Killed)".to_string())));
        assert_eq!(first_death(&kept[..2]), None);
    }
}
