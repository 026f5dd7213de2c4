//! A run in a few lines, for a log or a pipe.

use std::time::{SystemTime, UNIX_EPOCH};

use shardwise_watch::Snapshot;

use super::events::{clock, told};
use super::story::Story;
use super::{draw, ranks};

/// How many of the newest events are told.
const EVENTS_MAX: usize = 20;

/// The text.
pub(crate) fn text(story: &Story, snapshot: Option<&Snapshot>) -> String {
    let mut text = String::new();
    let mut line = |line: &str| {
        text.push_str(line.trim_end());
        text.push('\n');
    };
    let status = story.status_text(story.status(now_s()));
    line(&format!("{}: {status}", draw::name(story)));
    line(&draw::progress(story).join("  "));
    line(&draw::facts(story).join("  "));
    if let Some(snapshot) = snapshot {
        for told in ranks::lines(Some(snapshot)) {
            line(&told.to_string());
        }
    }
    let events = story.told.events();
    for event in &events[events.len().saturating_sub(EVENTS_MAX)..] {
        line(&format!("{:>9} {} {}", clock(event.time_s - story.began_s), event.kind.sign(), told(event)));
    }
    // What came from files and ranks ends up on people's terminals, which obey control characters.
    text.replace(|letter: char| letter.is_control() && letter != '\n', " ")
}

/// Now, in seconds since 1970.
pub(crate) fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0., |since| since.as_secs_f64())
}
