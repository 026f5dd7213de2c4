//! What a launcher says on its standard error: the ranks' own words, which go on to ours at once, and its own outcry, which is
//! kept. When a rank dies Open MPI writes a framed page about it that names a signal and little else; it is shown only
//! where nothing better is known.

use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::screen::Screen;

/// The longest line, and the most lines of an outcry, that are kept.
const LINE_BYTES_MAX: u64 = 64 << 10;
const KEPT_LINES_MAX: usize = 200;

/// How long the end of it is waited for, once the launcher has ended. What it has started on hosts that are lost may hold on
/// to its standard error for as long as they are.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Reads it, in a thread of its own.
pub(crate) struct Outcry {
    heard: Receiver<String>,
    muted: Arc<AtomicBool>,
}

impl Outcry {
    pub(crate) fn of(stderr: impl Read + Send + 'static, screen: Screen) -> Self {
        let (kept, heard) = channel();
        let muted = Arc::new(AtomicBool::new(false));
        let is_muted = muted.clone();
        std::thread::spawn(move || {
            let mut others = |line: &[u8]| {
                if !is_muted.load(Ordering::Relaxed) {
                    screen.error(line);
                }
            };
            // Whoever wanted to know may be gone.
            sorted(BufReader::new(stderr), &mut others, &mut |line| drop(kept.send(line)))
        });
        Outcry { heard, muted }
    }

    /// From now on nothing is handed on: what a launcher says of its own end is of no use to anybody.
    pub(crate) fn mute(&self) {
        self.muted.store(true, Ordering::Relaxed);
    }

    /// What the launcher itself said, once it has ended.
    pub(crate) fn heard(&self) -> Vec<String> {
        std::iter::from_fn(|| self.heard.recv_timeout(LAST_WORDS).ok()).take(KEPT_LINES_MAX).collect()
    }
}

/// Hands on what is not the launcher's, and keeps what is.
fn sorted(mut lines: impl BufRead, others: &mut dyn FnMut(&[u8]), keep: &mut dyn FnMut(String)) {
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
            others(&line);
        }
    }
}

/// Which rank was first to go, and how, if it says so: `… process rank 2 with PID 0 on node a exited on signal 9 (Killed).`
pub(crate) fn first_death(outcry: &[String]) -> Option<(usize, String)> {
    let text = outcry.join(" ");
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
    fn ranks_are_heard_and_the_launcher_is_kept() {
        let frame = "-".repeat(74);
        let said = format!(
            "rank 1: no\n{frame}\nPrimary job  terminated normally, but 1 process returned\na non-zero exit code.\n{frame}\nlast\n\
             {frame}\nmpirun noticed that process rank 2 with PID 0 on node here exited on signal 9 (Killed).\n{frame}\n"
        );
        let (mut others, mut outcry) = (Vec::new(), Vec::new());
        sorted(said.as_bytes(), &mut |line| others.extend_from_slice(line), &mut |line| outcry.push(line));
        assert_eq!(String::from_utf8(others).unwrap(), "rank 1: no\nlast\n");
        assert_eq!(outcry.len(), 3);
        assert_eq!(first_death(&outcry), Some((2, "signal 9 (Killed)".to_string())));
        assert_eq!(first_death(&outcry[..2]), None);
    }
}
