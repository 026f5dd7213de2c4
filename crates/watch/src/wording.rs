//! How things are put: calls, places, hosts, times and amounts in the words of a paragraph.

use std::time::Duration;

use crate::ranks::listed;
use crate::{CallStanding, Standing};

/// Of how many ranks it is said where each one is.
pub(crate) const DESCRIBED_MAX: usize = 3;
/// How much of what a rank says of its failure is repeated.
const TEXT_CHARS_MAX: usize = 600;

const BEFORE: &str = "before its first step";

/// `reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3)`.
pub(crate) fn described(call: &CallStanding) -> String {
    let CallStanding { verb, number, label, group, bytes, .. } = call;
    let size = if *bytes == 0 { String::new() } else { format!("{}, ", megabytes(*bytes)) };
    format!("{verb} #{number} of '{label}' ({size}{group})")
}

/// `in forward of block.2 at step 41`.
pub(crate) fn last_heard(standing: &Standing) -> String {
    match activity(standing) {
        None => BEFORE.to_string(),
        Some(activity) => format!("in {activity} at step {}", standing.step),
    }
}

/// `at step 41 in forward of block.2`.
pub(crate) fn at(standing: &Standing) -> String {
    match activity(standing) {
        None => BEFORE.to_string(),
        Some(activity) => format!("at step {} in {activity}", standing.step),
    }
}

/// `, last heard at step 41 in forward of block.2`, of a rank that died: it reports twice a second, and may have come further.
pub(crate) fn until(standing: &Standing) -> String {
    match activity(standing) {
        None => format!(" {BEFORE}"),
        Some(_) => format!(", last heard {}", at(standing)),
    }
}

fn activity(Standing { step, phase, unit, .. }: &Standing) -> Option<String> {
    match (*step == 0 || phase.is_empty(), unit.is_empty()) {
        (true, _) => None,
        (false, true) => Some(phase.clone()),
        (false, false) => Some(format!("{phase} of {unit}")),
    }
}

pub(crate) fn lost(hosts: &[&str]) -> String {
    let (noun, verb) = if hosts.len() == 1 { ("host", "is") } else { ("hosts", "are") };
    format!("{noun} {} {verb} lost", few(hosts))
}

/// The first few of these names.
pub(crate) fn few(names: &[&str]) -> String {
    let mut shown: Vec<String> = names.iter().take(DESCRIBED_MAX + 1).map(|name| (*name).to_string()).collect();
    if names.len() > DESCRIBED_MAX + 1 {
        shown[DESCRIBED_MAX] = format!("{} more", names.len() - DESCRIBED_MAX);
    }
    listed(&shown)
}

pub(crate) fn is(ranks: &[usize]) -> &'static str {
    if ranks.len() == 1 { "is" } else { "are" }
}

fn megabytes(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..1_000 => return format!("{bytes} B"),
        1_000..1_000_000 => (1e3, "kB"),
        1_000_000..1_000_000_000 => (1e6, "MB"),
        _ => (1e9, "GB"),
    };
    let number = format!("{:.1}", bytes as f64 / unit);
    format!("{} {name}", number.strip_suffix(".0").unwrap_or(&number))
}

pub(crate) fn lasting(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..10 => {
            // Cut rather than rounded, as the others are: nothing lasts longer than it does.
            let number = format!("{}.{}", seconds, time.subsec_millis() / 100);
            format!("{} s", number.strip_suffix(".0").unwrap_or(&number))
        }
        10..120 => format!("{seconds} s"),
        120..7200 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// A rank's own words as a part of a paragraph.
pub(crate) fn shown(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let text = words.join(" ");
    let text = text.trim_end_matches('.');
    match text.char_indices().nth(TEXT_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None if text.is_empty() => "it does not say why".to_string(),
        None => text.to_string(),
    }
}

pub(crate) fn capital(sentence: &str) -> String {
    let mut letters = sentence.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}
