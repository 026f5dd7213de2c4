//! The memory of ranks by kind: a stacked bar per rank, with a mark at the limit.

use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use shardwise_journal::RankMemory;
use shardwise_journal::format::format_memory_of_limit;

use super::colors::{BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, YELLOW};

/// The colour and pattern of each kind; either one identifies it.
const STYLES: [(Color, &str); 6] =
    [(BLUE, "█"), (ORANGE, "▓"), (GREEN, "▒"), (PURPLE, "╱"), (YELLOW, "░"), (GREY, "·")];

/// Formats the bars as lines of `width` columns.
pub(crate) fn lines(ranks: &[RankMemory], limit: Option<u64>, world: usize, width: usize) -> Vec<Line<'static>> {
    let Some(largest) = ranks.iter().max_by_key(|rank| total(rank)) else {
        return vec![Line::styled("not measured yet", Style::new().dim())];
    };
    let mut lines = legend(largest, width);
    let most = ranks.iter().map(total).max().unwrap_or(0).max(limit.unwrap_or(0)).max(1);
    let label_width = 5 + ranks.iter().map(|rank| rank.rank.to_string().len()).max().unwrap_or(1);
    let text_width =
        ranks.iter().map(|rank| format_memory_of_limit(total(rank), limit).chars().count()).max().unwrap_or(0);
    let room = width.saturating_sub(label_width + text_width + 2);
    for rank in ranks {
        let mut line = vec![Span::raw(format!("{:<label_width$} ", format!("rank {}", rank.rank)))];
        line.extend(bar(rank, limit, most, room));
        let is_near_limit = limit.is_some_and(|limit| total(rank) > limit / 20 * 19);
        let style = if is_near_limit { Style::new().fg(VERMILLION).bold() } else { Style::new() };
        line.push(Span::styled(format!(" {}", format_memory_of_limit(total(rank), limit)), style));
        lines.push(Line::from(line));
    }
    if world > ranks.len() {
        lines.push(Line::styled(format!("… and {} more ranks", world - ranks.len()), Style::new().dim()));
    }
    lines
}

/// The bar of one rank, exactly `width` columns wide, with a mark at the limit.
fn bar(rank: &RankMemory, limit: Option<u64>, most: u64, width: usize) -> Vec<Span<'static>> {
    let column = |bytes: u64| (bytes as f64 / most as f64 * width as f64).round() as usize;
    let (mut spans, mut drawn, mut sum) = (Vec::new(), 0, 0u64);
    for ((_, bytes), (colour, pattern)) in rank.kinds().into_iter().zip(STYLES) {
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

/// The legend of the patterns, with the figures of the rank that uses the most memory.
fn legend(rank: &RankMemory, width: usize) -> Vec<Line<'static>> {
    let (mut lines, mut line, mut taken) = (Vec::new(), Vec::new(), 0);
    for ((name, bytes), (colour, pattern)) in rank.kinds().into_iter().zip(STYLES) {
        let text = format!("{name} {}", format_memory_of_limit(bytes, None));
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
