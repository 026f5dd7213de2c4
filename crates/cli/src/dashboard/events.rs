//! The events of a run as lines: the time, a symbol for the kind, the step, and the sentence of the timeline.

use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use shardwise_journal::format::format_clock;
use shardwise_journal::{Event, EventKind};

use super::colors::{BLUE, GREEN, ORANGE, PURPLE, VERMILLION};

/// The maximum number of events that are drawn; older ones are left out. Nobody scrolls through more.
const DRAWN_MAX: usize = 500;

fn colour(kind: EventKind) -> Color {
    match kind {
        EventKind::Started | EventKind::Ended => BLUE,
        EventKind::Failed => VERMILLION,
        EventKind::Resumed | EventKind::Skipped | EventKind::Spike | EventKind::Note => ORANGE,
        EventKind::Saved | EventKind::Evaluated => GREEN,
        EventKind::Traced => PURPLE,
    }
}

/// The step and the sentence of an event, in one line.
pub(crate) fn sentence(event: &Event) -> String {
    let steps = match (event.steps(), event.step < event.last_step) {
        (none, _) if none.is_empty() => none,
        (step, false) => format!("step {step}: "),
        (steps, true) => format!("steps {steps}: "),
    };
    let text = steps + &event.text;
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Formats the newest events as lines of `width` columns, in the order in which they happened.
pub(crate) fn lines(events: &[Event], started_s: f64, width: usize) -> Vec<Line<'static>> {
    let newest = &events[events.len().saturating_sub(DRAWN_MAX)..];
    let mut lines = Vec::new();
    for event in newest {
        let head = format!("{:>9} ", format_clock(event.time_s - started_s));
        let indent = head.chars().count() + 2;
        for (index, piece) in wrap(&sentence(event), width.saturating_sub(indent).max(10)).into_iter().enumerate() {
            lines.push(match index {
                0 => Line::from(vec![
                    Span::styled(head.clone(), Style::new().dim()),
                    Span::styled(format!("{} ", event.kind.symbol()), Style::new().fg(colour(event.kind)).bold()),
                    Span::raw(piece),
                ]),
                _ => Line::from(format!("{}{piece}", " ".repeat(indent))),
            });
        }
    }
    lines
}

/// Wraps a text at spaces where possible.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for word in text.split(' ') {
        let mut letters: Vec<char> = word.chars().collect();
        let last = pieces.last().map_or(0, |piece| piece.chars().count());
        if last > 0 && last + 1 + letters.len() > width {
            pieces.push(String::new());
        }
        while letters.len() > width {
            let rest = letters.split_off(width);
            pieces.push(letters.into_iter().collect());
            letters = rest;
        }
        let word: String = letters.into_iter().collect();
        match pieces.last_mut() {
            Some(piece) if piece.is_empty() => piece.push_str(&word),
            Some(piece) if piece.chars().count() + 1 + word.chars().count() <= width => {
                piece.push(' ');
                piece.push_str(&word);
            }
            _ => pieces.push(word),
        }
    }
    pieces.retain(|piece| !piece.is_empty());
    pieces
}
