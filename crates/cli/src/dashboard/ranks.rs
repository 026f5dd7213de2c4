//! Where the ranks are, and who waits for whom.

use ratatui::style::{Style, Stylize};
use ratatui::text::{Line, Span};
use shardwise_watch::{Glimpse, Presence, Snapshot};

use super::draw::{BLUE, ORANGE, VERMILLION};
use crate::bar::lasting;

/// A rank that was not heard for longer than this is worth a word.
const LATE_MS: u64 = 2_000;

/// Lines of any length.
pub(crate) fn lines(snapshot: Option<&Snapshot>) -> Vec<Line<'static>> {
    let Some(snapshot) = snapshot else {
        return vec![Line::styled("where ranks are is known while the run is at work", Style::new().dim())];
    };
    let mut lines = vec![counts(snapshot)];
    if snapshot.waits.is_empty() && snapshot.here > 0 {
        lines.push(Line::from(vec!["= ".fg(BLUE), "nobody waits for a rank that has not come".into()]));
    }
    for wait in &snapshot.waits {
        let verb = if wait.waiting.starts_with("ranks ") { "wait" } else { "waits" };
        lines.push(Line::from(vec![
            Span::styled("» ", Style::new().fg(ORANGE).bold()),
            Span::raw(format!("{} {verb} for ", wait.waiting)),
            Span::styled(wait.missing.clone(), Style::new().fg(ORANGE).bold()),
            Span::raw(format!(", {}", wait.lasting)),
        ]));
        lines.push(Line::styled(format!("  in {}", wait.call), Style::new().dim()));
    }
    let host_width = snapshot.shown.iter().map(|rank| rank.host.chars().count()).max().unwrap_or(0).min(16);
    lines.extend(snapshot.shown.iter().map(|rank| of_rank(rank, host_width)));
    let more = snapshot.ranks.saturating_sub(snapshot.shown.len() as u64);
    if more > 0 {
        lines.push(Line::styled(format!("… and {more} more ranks"), Style::new().dim()));
    }
    lines
}

fn counts(snapshot: &Snapshot) -> Line<'static> {
    let Snapshot { ranks, here, awaited, steps: (least, most), .. } = snapshot;
    let gone = ranks.saturating_sub(here + awaited);
    let mut parts = vec![match here == ranks {
        true if *ranks == 1 => "1 rank is here".to_string(),
        true => format!("all {ranks} ranks are here"),
        false => format!("{here} of {ranks} ranks are here"),
    }];
    if *awaited > 0 {
        parts.push(format!("{awaited} awaited"));
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

fn of_rank(rank: &Glimpse, host_width: usize) -> Line<'static> {
    let host: String = rank.host.chars().take(host_width).collect();
    let mut line = vec![Span::raw(format!("{:>4} {host:<host_width$} ", rank.rank))];
    let strong = Style::new().fg(VERMILLION).bold();
    match rank.presence {
        Presence::Awaited => line.push(Span::styled("? awaited", Style::new().dim())),
        Presence::Left { code: Some(code) } => line.push(Span::raw(format!("■ has ended with code {code}"))),
        Presence::Left { code: None } => line.push(Span::styled("✖ is gone", strong)),
        Presence::Here => {
            line.push(Span::raw(format!("{:<24} ", rank.doing)));
            line.push(Span::styled(for_how_long(rank.for_ms), Style::new().dim()));
            if rank.heard_ms_ago > LATE_MS {
                line.push(Span::styled(format!("  ! silent for {}", for_how_long(rank.heard_ms_ago)), strong));
            }
        }
    }
    Line::from(line)
}

fn for_how_long(ms: u64) -> String {
    match ms {
        0..1000 => format!("{ms} ms"),
        1000..10_000 => format!("{:.1} s", ms as f64 / 1e3),
        _ => lasting(ms as f64 / 1e3),
    }
}
