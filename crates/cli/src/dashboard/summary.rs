//! A run in a few lines of plain text, for output that is not a terminal.

use shardwise_journal::format::format_clock;
use shardwise_watch::Snapshot;

use super::events::sentence;
use super::run_view::{RunView, now_s};
use super::{headline, ranks};

/// The maximum number of events, of which the newest are shown.
const EVENTS_MAX: usize = 20;

/// Returns the status, the progress, the ranks and the newest events as plain text.
pub(crate) fn text(run: &RunView, snapshot: Option<&Snapshot>) -> String {
    let mut text = String::new();
    let mut line = |line: &str| {
        text.push_str(line.trim_end());
        text.push('\n');
    };
    let status = run.status_text(run.status(now_s()));
    line(&format!("{}: {status}", headline::name(run)));
    line(&headline::progress(run).join("  "));
    line(&headline::facts(run).join("  "));
    if let Some(snapshot) = snapshot {
        for rank in ranks::lines(Some(snapshot)) {
            line(&rank.to_string());
        }
    }
    let events = run.timeline.events();
    for event in &events[events.len().saturating_sub(EVENTS_MAX)..] {
        line(&format!("{:>9} {} {}", format_clock(event.time_s - run.started_s), event.kind.symbol(), sentence(event)));
    }
    // Text from files and ranks may contain control characters, which terminals interpret.
    text.replace(|letter: char| letter.is_control() && letter != '\n', " ")
}
