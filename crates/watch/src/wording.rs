//! Describes calls, positions and hosts for the sentences of [`explain`](crate::explain()).

use shardwise_journal::format::{format_short_bytes, join_list_up_to};

use crate::{CallStatus, RankStatus};

/// The maximum number of ranks that are described individually.
pub(crate) const DESCRIBED_MAX: usize = 3;
/// The maximum length of a rank's own failure text, in characters.
const TEXT_CHARS_MAX: usize = 600;

const BEFORE: &str = "before its first step";

/// `reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3)`.
pub(crate) fn describe_call(call: &CallStatus) -> String {
    let CallStatus { verb, number, label, group, bytes, .. } = call;
    let size = if *bytes == 0 { String::new() } else { format!("{}, ", format_short_bytes(*bytes)) };
    format!("{verb} #{number} of '{label}' ({size}{group})")
}

/// `activations of block.3`, which a rank is to receive, or `sending activations of block.3`.
pub(crate) fn describe_message(call: &CallStatus) -> String {
    if call.verb == "send" { format!("sending {}", call.label) } else { call.label.clone() }
}

/// `in forward of block.2 at step 41`.
pub(crate) fn in_phase(status: &RankStatus) -> String {
    match activity(status) {
        None => BEFORE.to_string(),
        Some(activity) => format!("in {activity} at step {}", status.step),
    }
}

/// `at step 41 in forward of block.2`.
pub(crate) fn at_step(status: &RankStatus) -> String {
    match activity(status) {
        None => BEFORE.to_string(),
        Some(activity) => format!("at step {} in {activity}", status.step),
    }
}

/// `, last heard at step 41 in forward of block.2`. The last heartbeat may be half a second old, so a rank that died may have got further.
pub(crate) fn last_heard(status: &RankStatus) -> String {
    match activity(status) {
        None => format!(" {BEFORE}"),
        Some(_) => format!(", last heard {}", at_step(status)),
    }
}

fn activity(RankStatus { step, phase, unit, .. }: &RankStatus) -> Option<String> {
    match (*step == 0 || phase.is_empty(), unit.is_empty()) {
        (true, _) => None,
        (false, true) => Some(phase.clone()),
        (false, false) => Some(format!("{phase} of {unit}")),
    }
}

/// `host b is lost: all its ranks`.
pub(crate) fn lost_hosts(hosts: &[&str]) -> String {
    match hosts.len() {
        1 => format!("host {} is lost: all its ranks", list_names(hosts)),
        _ => format!("hosts {} are lost: all their ranks", list_names(hosts)),
    }
}

/// Lists names. If there are many, lists the first few and counts the rest.
pub(crate) fn list_names(names: &[&str]) -> String {
    join_list_up_to(names, DESCRIBED_MAX + 1)
}

pub(crate) fn is_or_are(ranks: &[usize]) -> &'static str {
    if ranks.len() == 1 { "is" } else { "are" }
}

pub(crate) fn has_or_have(ranks: &[usize]) -> &'static str {
    if ranks.len() == 1 { "has" } else { "have" }
}

/// A rank's own failure text, shortened to fit into a paragraph.
pub(crate) fn quote(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let text = words.join(" ");
    let text = text.trim_end_matches('.');
    match text.char_indices().nth(TEXT_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None if text.is_empty() => "it gave no reason".to_string(),
        None => text.to_string(),
    }
}

pub(crate) fn capitalize(sentence: &str) -> String {
    let mut letters = sentence.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}
