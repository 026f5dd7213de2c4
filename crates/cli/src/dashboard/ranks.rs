//! The state of the ranks, and which of them are waiting for which.

use ratatui::style::{Style, Stylize};
use ratatui::text::{Line, Span};
use shardwise_journal::format::format_short_millis;
use shardwise_watch::{Presence, RankSnapshot, Snapshot};

use super::colors::{BLUE, ORANGE, VERMILLION};

/// A rank whose last heartbeat is older than this is marked.
const LATE_MS: u64 = 2_000;

/// Formats the state of the ranks as lines, which may be wider than the pane.
pub(crate) fn lines(snapshot: Option<&Snapshot>) -> Vec<Line<'static>> {
    let Some(snapshot) = snapshot else {
        return vec![Line::styled("shown while the run is running", Style::new().dim())];
    };
    let mut lines = vec![counts(snapshot)];
    if snapshot.waits.is_empty() && snapshot.stage_waits.is_empty() && snapshot.connected > 0 {
        lines.push(Line::from(vec!["= ".fg(BLUE), "no rank is waiting for another".into()]));
    }
    for wait in &snapshot.stage_waits {
        lines.push(Line::from(vec![
            Span::styled("» ", Style::new().fg(ORANGE).bold()),
            Span::raw(format!("{} waits for ", wait.waiting)),
            Span::styled(wait.missing.clone(), Style::new().fg(ORANGE).bold()),
            Span::raw(format!(": {}, {}", wait.call, wait.duration)),
        ]));
    }
    for wait in &snapshot.waits {
        let verb = if wait.waiting.starts_with("ranks ") { "are" } else { "is" };
        lines.push(Line::from(vec![
            Span::styled("» ", Style::new().fg(ORANGE).bold()),
            Span::raw(format!("{} {verb} waiting for ", wait.waiting)),
            Span::styled(wait.missing.clone(), Style::new().fg(ORANGE).bold()),
            Span::raw(format!(", {}", wait.duration)),
        ]));
        lines.push(Line::styled(format!("  in {}", wait.call), Style::new().dim()));
    }
    let widest = |text: fn(&RankSnapshot) -> &str| {
        snapshot.shown.iter().map(|rank| text(rank).chars().count()).max().unwrap_or(0)
    };
    let host_width = widest(|rank| &rank.host).min(16);
    // A run with data parallelism alone has no coordinates.
    let coordinates_width = widest(|rank| &rank.coordinates).min(24);
    lines.extend(snapshot.shown.iter().map(|rank| rank_line(rank, coordinates_width, host_width)));
    let more = snapshot.ranks.saturating_sub(snapshot.shown.len() as u64);
    if more > 0 {
        lines.push(Line::styled(format!("… and {more} more ranks"), Style::new().dim()));
    }
    lines
}

fn counts(snapshot: &Snapshot) -> Line<'static> {
    let Snapshot { ranks, connected, not_joined, steps: (least, most), .. } = snapshot;
    let gone = ranks.saturating_sub(connected + not_joined);
    let mut parts = vec![match connected == ranks {
        true if *ranks == 1 => "1 rank is connected".to_string(),
        true => format!("all {ranks} ranks are connected"),
        false => format!("{connected} of {ranks} ranks are connected"),
    }];
    if *not_joined > 0 {
        parts.push(format!("{not_joined} not joined yet"));
    }
    if gone > 0 {
        parts.push(format!("{gone} gone"));
    }
    parts.push(match least == most {
        true => format!("at step {most}"),
        false => format!("at steps {least} to {most}"),
    });
    Line::from(parts.join(", "))
}

fn rank_line(rank: &RankSnapshot, coordinates_width: usize, host_width: usize) -> Line<'static> {
    let host: String = rank.host.chars().take(host_width).collect();
    let mut line = vec![Span::raw(format!("{:>4} ", rank.rank))];
    if coordinates_width > 0 {
        let coordinates: String = rank.coordinates.chars().take(coordinates_width).collect();
        line.push(Span::raw(format!("{coordinates:<coordinates_width$} ")));
    }
    line.push(Span::raw(format!("{host:<host_width$} ")));
    let strong = Style::new().fg(VERMILLION).bold();
    match rank.presence {
        Presence::NotJoined => line.push(Span::styled("? not joined yet", Style::new().dim())),
        Presence::Left { code: Some(code) } => line.push(Span::raw(format!("■ exited with code {code}"))),
        Presence::Left { code: None } => line.push(Span::styled("✖ gone", strong)),
        Presence::Connected => {
            line.push(Span::raw(format!("{:<24} ", rank.activity)));
            line.push(Span::styled(format_short_millis(rank.in_phase_ms), Style::new().dim()));
            if rank.last_heard_ms_ago > LATE_MS {
                line.push(Span::styled(
                    format!("  ! silent for {}", format_short_millis(rank.last_heard_ms_ago)),
                    strong,
                ));
            }
        }
    }
    Line::from(line)
}
