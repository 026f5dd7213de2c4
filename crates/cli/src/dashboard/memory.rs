//! What ranks hold of memory, by kind: a stacked bar for each, against the limit.

use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use shardwise_journal::RankMemory;

use super::draw::{BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, YELLOW};
use crate::bar::memory;

/// Every kind has a colour and a pattern, of which either is enough.
const LOOKS: [(Color, &str); 6] = [(BLUE, "█"), (ORANGE, "▓"), (GREEN, "▒"), (PURPLE, "╱"), (YELLOW, "░"), (GREY, "·")];

/// Lines of that many columns.
pub(crate) fn lines(ranks: &[RankMemory], limit: Option<u64>, world: usize, width: usize) -> Vec<Line<'static>> {
    let Some(largest) = ranks.iter().max_by_key(|rank| total(rank)) else {
        return vec![Line::styled("not measured yet", Style::new().dim())];
    };
    let mut lines = legend(largest, width);
    let most = ranks.iter().map(total).max().unwrap_or(0).max(limit.unwrap_or(0)).max(1);
    let label_width = 5 + ranks.iter().map(|rank| rank.rank.to_string().len()).max().unwrap_or(1);
    let text_width = ranks.iter().map(|rank| memory(total(rank), limit).chars().count()).max().unwrap_or(0);
    let room = width.saturating_sub(label_width + text_width + 2);
    for rank in ranks {
        let mut line = vec![Span::raw(format!("{:<label_width$} ", format!("rank {}", rank.rank)))];
        line.extend(bar(rank, limit, most, room));
        let is_over = limit.is_some_and(|limit| total(rank) > limit / 20 * 19);
        let style = if is_over { Style::new().fg(VERMILLION).bold() } else { Style::new() };
        line.push(Span::styled(format!(" {}", memory(total(rank), limit)), style));
        lines.push(Line::from(line));
    }
    if world > ranks.len() {
        lines.push(Line::styled(format!("… and {} more ranks", world - ranks.len()), Style::new().dim()));
    }
    lines
}

/// One rank's bar, of exactly that many columns, with a mark where the limit is.
fn bar(rank: &RankMemory, limit: Option<u64>, most: u64, width: usize) -> Vec<Span<'static>> {
    let column = |bytes: u64| (bytes as f64 / most as f64 * width as f64).round() as usize;
    let (mut spans, mut drawn, mut sum) = (Vec::new(), 0, 0u64);
    for ((_, bytes), (colour, pattern)) in rank.kinds().into_iter().zip(LOOKS) {
        sum = sum.saturating_add(bytes);
        let end = column(sum).min(width).max(drawn);
        spans.push(Span::styled(pattern.repeat(end - drawn), Style::new().fg(colour)));
        drawn = end;
    }
    let mark =
        limit.map(|limit| column(limit).min(width).saturating_sub(1)).filter(|mark| (drawn..width).contains(mark));
    let rest = match mark {
        Some(mark) => format!("{}│{}", " ".repeat(mark - drawn), " ".repeat(width - mark - 1)),
        None => " ".repeat(width - drawn),
    };
    spans.push(Span::styled(rest, Style::new().fg(VERMILLION)));
    spans
}

/// What the patterns mean, with the amounts of the rank that has the most, in as many lines as that takes.
fn legend(rank: &RankMemory, width: usize) -> Vec<Line<'static>> {
    let (mut lines, mut line, mut taken) = (Vec::new(), Vec::new(), 0);
    for ((name, bytes), (colour, pattern)) in rank.kinds().into_iter().zip(LOOKS) {
        let text = format!("{name} {}", memory(bytes, None));
        let columns = text.chars().count() + 5;
        if taken > 0 && taken + columns > width + 2 {
            lines.push(Line::from(std::mem::take(&mut line)));
            taken = 0;
        }
        line.push(Span::styled(pattern.repeat(2), Style::new().fg(colour)));
        line.push(Span::raw(format!(" {text}  ")));
        taken += columns;
    }
    lines.push(Line::from(line));
    lines
}

fn total(rank: &RankMemory) -> u64 {
    rank.kinds().iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes))
}
