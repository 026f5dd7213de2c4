//! What has happened in a run: a dated sentence each, with a symbol that says of what kind it is.

use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use shardwise_journal::{Entry, What};

use super::draw::{BLUE, GREEN, ORANGE, PURPLE, VERMILLION};
use crate::bar::{lasting, memory};

/// How many of the newest are drawn: more nobody scrolls through.
const DRAWN_MAX: usize = 500;

/// Something that has happened.
#[derive(Clone, Debug)]
pub(crate) struct Happened {
    pub(crate) time_s: f64,
    pub(crate) symbol: &'static str,
    pub(crate) colour: Color,
    pub(crate) text: String,
}

/// The sentence of a line of the journal, if it has one.
pub(crate) fn happened(entry: &Entry) -> Option<Happened> {
    let ranks = |ranks: usize| if ranks == 1 { "1 rank".to_string() } else { format!("{ranks} ranks") };
    let (symbol, colour, text) = match &entry.what {
        What::Launched(launch) => {
            let hosts =
                if launch.hosts.is_empty() { String::new() } else { format!(" on {}", launch.hosts.join(", ")) };
            let missing = match launch.missing.is_empty() {
                true => String::new(),
                false => format!(", without {}, which does not answer", launch.missing.join(" and ")),
            };
            let again = if launch.attempt > 1 { " again" } else { "" };
            ("▲", BLUE, format!("started{again}: {}{hosts}{missing}", ranks(launch.ranks)))
        }
        What::Start(start) => {
            let from = match &start.resumed_from {
                Some(from) => format!(", going on from {from}"),
                None => String::new(),
            };
            (
                "▲",
                BLUE,
                format!("{} at stage {} begin at step {}{from}", ranks(start.ranks), start.stage, start.first_step),
            )
        }
        What::Saved(saved) => {
            let times = format!("{:.1} s ({:.1} s still)", saved.took_s, saved.stood_still_s);
            ("●", GREEN, format!("saved step {}: {} in {times}", saved.step, memory(saved.bytes, None)))
        }
        What::Failed { attempt, step, text } => {
            ("✖", VERMILLION, format!("attempt {attempt} failed at step {step}: {text}"))
        }
        What::Again(again) => {
            let steps = match again.steps_again {
                1 => "1 step is".to_string(),
                steps => format!("{steps} steps are"),
            };
            (
                "↻",
                ORANGE,
                format!("at work again at step {} after {:.1} s; {steps} made again", again.step, again.lost_s),
            )
        }
        What::Note { step, text } => ("!", ORANGE, format!("step {step}: {text}")),
        What::Step(step) => {
            let said = step.skipped.as_ref().or(step.outlier.as_ref())?;
            ("!", ORANGE, format!("step {}: {said}", step.step))
        }
        What::Trace { first_step, steps, path } => {
            ("◆", PURPLE, format!("traced {steps} steps from step {first_step}: {path}"))
        }
        What::Ended { code, restarts, lost_s } => {
            let how = match code {
                0 => "finished".to_string(),
                75 => "saved and ended, to be started again".to_string(),
                130 => "interrupted".to_string(),
                code => format!("failed, with code {code}"),
            };
            let cost = match restarts {
                0 => String::new(),
                _ => format!("; restarts cost {} beside steps made again", lasting(*lost_s)),
            };
            ("■", BLUE, format!("{how}{cost}"))
        }
        What::Memory { .. } | What::Traffic(_) | What::HeldOut(_) => return None,
    };
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    Some(Happened { time_s: entry.time_s, symbol, colour, text })
}

/// The newest, as lines of that many columns, the oldest of them first.
pub(crate) fn lines(happened: &[Happened], began_s: f64, width: usize) -> Vec<Line<'static>> {
    let newest = &happened[happened.len().saturating_sub(DRAWN_MAX)..];
    let mut lines = Vec::new();
    for Happened { time_s, symbol, colour, text } in newest {
        let head = format!("{:>9} ", clock(time_s - began_s));
        let indent = head.chars().count() + 2;
        for (index, piece) in wrapped(text, width.saturating_sub(indent).max(10)).into_iter().enumerate() {
            lines.push(match index {
                0 => Line::from(vec![
                    Span::styled(head.clone(), Style::new().dim()),
                    Span::styled(format!("{symbol} "), Style::new().fg(*colour).bold()),
                    Span::raw(piece),
                ]),
                _ => Line::from(format!("{}{piece}", " ".repeat(indent))),
            });
        }
    }
    lines
}

/// Time since the run's beginning: `1:02:03`.
pub(crate) fn clock(seconds: f64) -> String {
    let seconds = if (0. ..1e9).contains(&seconds) { seconds as u64 } else { 0 };
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// A text in pieces of at most that many columns, cut between words where there are any.
fn wrapped(text: &str, width: usize) -> Vec<String> {
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
