//! The key facts of a run, and the differences between the recipes of several runs.

use std::collections::{BTreeMap, BTreeSet};

use shardwise_journal::format::{
    format_count, format_count_of, format_digits, format_duration, format_large_number, format_memory,
};
use shardwise_journal::{Outcome, Start};

use super::figures::{extreme, letter_of};
use super::run_data::{RunData, median};
use super::text::{add, date, escape, truncate};

/// The maximum number of keys that are read; a recipe has fewer.
const KEYS_MAX: usize = 1000;
const VALUE_CHARS_MAX: usize = 120;

/// The outcome of a run, in a sentence or two.
pub(crate) fn summary(run: &RunData) -> String {
    let Some((first, last)) = run.timeline.time_s() else {
        return "The journal of this run is empty.".to_string();
    };
    let steps = run.points.last().map_or(0, |point| point.step);
    let wanted = run.start().map_or(0, |start| start.steps);
    let completed = match wanted > steps {
        true => format!("{} of {} steps", format_count(steps), format_count(wanted)),
        false => format_count_of(steps, "step"),
    };
    let took = format_duration(last - first);
    let mut text = match run.timeline.outcome() {
        Outcome::Finished => format!("Finished: {completed} in {took}"),
        Outcome::Saved => format!("Saved and stopped, can be resumed: {completed} in {took}"),
        Outcome::Interrupted => format!("Interrupted: {completed} in {took}"),
        Outcome::Failed { code } => format!("Failed with exit code {code}: {completed} in {took}"),
        Outcome::Unfinished | Outcome::Empty => {
            format!("Not finished: {completed} in {took}; last entry at {} UTC", date(last))
        }
    };
    let worlds = worlds(run);
    if !worlds.is_empty() {
        text += &format!(", on {worlds}");
    }
    match run.timeline.restarts() {
        0 => text + ".",
        restarts => format!("{text}. {}.", cost(run, restarts)),
    }
}

fn cost(run: &RunData, restarts: u64) -> String {
    let times = if restarts == 1 { "once".to_string() } else { format!("{} times", format_count(restarts)) };
    let again = run.timeline.repeated_steps().max(run.repeated.len() as u64);
    let (lost, steps) = (format_duration(run.timeline.lost_s()), format_count_of(again, "repeated step"));
    format!("Restarted {times}, which cost {lost} and {steps}")
}

/// `4 ranks`, or `4, then 2, then 4 ranks`.
fn worlds(run: &RunData) -> String {
    let mut pieces: Vec<String> = run.worlds().iter().map(|(.., ranks)| ranks.to_string()).collect();
    let shown = pieces.len().min(6);
    let more = if pieces.len() > shown { " and so on" } else { "" };
    pieces.truncate(shown);
    match &pieces[..] {
        [] => String::new(),
        [only] if only == "1" => "1 rank".to_string(),
        several => format!("{}{more} ranks", several.join(", then ")),
    }
}

/// The facts with their names, in the order of the page. The names are the same for every run.
fn facts(run: &RunData) -> Vec<(&'static str, String)> {
    let nothing = || "–".to_string();
    let from = |fact: &dyn Fn(&Start) -> String| run.start().map_or_else(nothing, fact);
    let tokens = run.tokens();
    let span = run.timeline.time_s();
    let points = &run.points;
    vec![
        ("outcome", outcome(run.timeline.outcome())),
        ("model", from(&|start| format!("{} parameters", format_large_number(start.parameters as f64)))),
        ("ranks", ranks(run)),
        (
            "ZeRO",
            from(&|start| {
                let replicas = format_count_of(start.replicate as u64, "replica");
                let mut text = format!("stage {}, {replicas}", start.zero_stage);
                if start.tensor > 1 {
                    text += &format!(", layers shared by {} ranks", start.tensor);
                }
                if start.expert > 1 {
                    text += &format!(", experts divided among {} ranks", start.expert);
                }
                if start.context > 1 {
                    text += &format!(", sequences divided among {} ranks", start.context);
                }
                if start.pipeline > 1 {
                    text += &format!(", a pipeline of {} stages", start.pipeline);
                }
                text
            }),
        ),
        ("param dtype", from(&|start| start.param_dtype.clone())),
        ("steps", steps(run)),
        (
            "tokens",
            from(&|start| {
                format!("{}; {} per step", format_large_number(tokens as f64), format_count(start.tokens_per_step))
            }),
        ),
        ("started", span.map_or_else(nothing, |(first, _)| format!("{} UTC", date(first)))),
        ("time", span.map_or_else(nothing, |(first, last)| format_duration(last - first))),
        (
            "throughput",
            median(points.iter().map(|p| p.tokens_per_s))
                .map_or_else(nothing, |m| format!("{} tokens/s", format_digits(m, 3))),
        ),
        ("MFU", median(points.iter().map(|p| p.mfu)).map_or_else(nothing, |mfu| format!("{:.1}%", mfu * 100.))),
        ("peak memory", peak(run)),
        ("loss", loss(run)),
        ("evaluation loss", evaluation_loss(run)),
        ("restarts", restarts(run)),
        ("skipped steps", format_count(run.skipped)),
        ("version", from(&|start| start.version.clone())),
        ("folder", run.folder.clone()),
    ]
}

fn outcome(outcome: Outcome) -> String {
    match outcome {
        Outcome::Empty => "empty journal".to_string(),
        Outcome::Unfinished => "not finished".to_string(),
        Outcome::Finished => "finished".to_string(),
        Outcome::Saved => "saved, can be resumed".to_string(),
        Outcome::Interrupted => "interrupted".to_string(),
        Outcome::Failed { code } => format!("failed, exit code {code}"),
    }
}

fn ranks(run: &RunData) -> String {
    let worlds = worlds(run).trim_end_matches(" ranks").trim_end_matches(" rank").to_string();
    match run.start() {
        Some(start) if worlds.is_empty() => start.ranks.to_string(),
        Some(start) if start.ranks_per_host > 0 && start.ranks > start.ranks_per_host => {
            format!("{worlds}; at most {} per host", start.ranks_per_host)
        }
        _ if worlds.is_empty() => "–".to_string(),
        _ => worlds,
    }
}

fn steps(run: &RunData) -> String {
    let completed = format_count(run.points.last().map_or(0, |point| point.step));
    run.start().map_or(completed.clone(), |start| format!("{completed} of {}", format_count(start.steps)))
}

fn peak(run: &RunData) -> String {
    let Some((_, peak)) = extreme(&run.points, |point| point.memory_peak_bytes, |a, b| a > b) else {
        return "–".to_string();
    };
    match run.start().and_then(|start| start.memory_limit_bytes).filter(|limit| *limit > 0) {
        Some(limit) => {
            format!("{} of {} ({:.0}%)", format_memory(peak), format_memory(limit as f64), peak / limit as f64 * 100.)
        }
        None => format!("{} per rank", format_memory(peak)),
    }
}

fn loss(run: &RunData) -> String {
    let last = run.points.iter().rev().find(|point| point.loss.is_finite());
    match (last, extreme(&run.points, |point| point.loss, |a, b| a < b)) {
        (Some(last), Some((step, lowest))) => {
            format!(
                "{}; lowest {} at step {}",
                format_digits(f64::from(last.loss), 4),
                format_digits(lowest, 4),
                format_count(step)
            )
        }
        _ => "–".to_string(),
    }
}

fn evaluation_loss(run: &RunData) -> String {
    let Some(last) = run.evaluations.last() else { return "–".to_string() };
    let bits = last.bits_per_byte.map_or(String::new(), |bits| format!(", {} bits per byte", format_digits(bits, 3)));
    format!("{}{bits} after step {}", format_digits(last.loss, 4), format_count(last.step))
}

fn restarts(run: &RunData) -> String {
    match run.timeline.restarts() {
        0 => "none".to_string(),
        restarts => {
            let again = run.timeline.repeated_steps().max(run.repeated.len() as u64);
            format!(
                "{}; {} lost, {} repeated",
                format_count(restarts),
                format_duration(run.timeline.lost_s()),
                format_count_of(again, "step")
            )
        }
    }
}

/// The facts of one run as a list, or of several runs as a table with one column each.
pub(crate) fn facts_list(runs: &[RunData]) -> String {
    let mut page = String::new();
    if let [run] = runs {
        page.push_str("<dl class=\"facts\">\n");
        for (name, fact) in facts(run) {
            add(&mut page, format_args!("<div><dt>{name}</dt><dd>{}</dd></div>\n", escape(truncate(&fact, 200))));
        }
        return page + "</dl>\n";
    }
    page.push_str("<div class=\"scrolled\"><table class=\"side\"><thead><tr><td></td>");
    heads(runs, &mut page);
    page.push_str("</tr></thead><tbody>\n");
    let columns: Vec<_> = runs.iter().map(facts).collect();
    for (row, (name, _)) in columns[0].iter().enumerate() {
        add(&mut page, format_args!("<tr><th>{name}</th>"));
        for column in &columns {
            add(&mut page, format_args!("<td>{}</td>", escape(truncate(&column[row].1, 200))));
        }
        page.push_str("</tr>\n");
    }
    page + "</tbody></table></div>\n"
}

/// The headers of the columns: letter, shape and name of every run.
fn heads(runs: &[RunData], page: &mut String) {
    for (index, run) in runs.iter().enumerate() {
        let mut shape = String::new();
        super::chart::shape(index, 8., 8., 5., &mut shape);
        add(
            page,
            format_args!(
                "<th><svg class=\"key\" aria-hidden=\"true\">{}</svg>{} {}</th>",
                shape.trim_end(),
                letter_of(runs, index),
                escape(truncate(&run.name, 60))
            ),
        );
    }
}

/// The keys in which the recipes of several runs differ.
pub(crate) fn differences(runs: &[RunData]) -> String {
    let recipes: Vec<Option<BTreeMap<String, String>>> =
        runs.iter().map(|run| keys(&run.start().map_or(String::new(), |start| start.recipe.clone()))).collect();
    let mut page = String::new();
    for (index, _) in recipes.iter().enumerate().filter(|(_, recipe)| recipe.is_none()) {
        let letter = letter_of(runs, index);
        add(&mut page, format_args!("<p class=\"note\">The recipe of {letter} is not valid TOML.</p>\n"));
    }
    let recipes: Vec<BTreeMap<String, String>> = recipes.into_iter().map(Option::unwrap_or_default).collect();
    let all: BTreeSet<&String> = recipes.iter().flat_map(BTreeMap::keys).collect();
    let differing: Vec<&String> =
        all.into_iter().filter(|key| recipes.iter().any(|recipe| recipe.get(*key) != recipes[0].get(*key))).collect();
    if differing.is_empty() {
        return page + "<p class=\"note\">The recipes do not differ.</p>\n";
    }
    page.push_str("<div class=\"scrolled\"><table class=\"side\"><thead><tr><th>key</th>");
    heads(runs, &mut page);
    page.push_str("</tr></thead><tbody>\n");
    for key in differing {
        add(&mut page, format_args!("<tr><th><code>{}</code></th>", escape(truncate(key, VALUE_CHARS_MAX))));
        for recipe in &recipes {
            match recipe.get(key) {
                Some(value) => {
                    add(&mut page, format_args!("<td><code>{}</code></td>", escape(truncate(value, VALUE_CHARS_MAX))));
                }
                None => page.push_str("<td>not set</td>"),
            }
        }
        page.push_str("</tr>\n");
    }
    page + "</tbody></table></div>\n"
}

/// Returns the dotted keys of a recipe, such as `batch.global_batch_size`, with their values as TOML.
fn keys(recipe: &str) -> Option<BTreeMap<String, String>> {
    let table: toml::Table = recipe.parse().ok()?;
    let mut found = BTreeMap::new();
    let mut open: Vec<(String, toml::Value)> = table.into_iter().collect();
    while let Some((key, value)) = open.pop() {
        match value {
            toml::Value::Table(inner) => {
                open.extend(inner.into_iter().map(|(name, value)| (format!("{key}.{name}"), value)))
            }
            value if found.len() < KEYS_MAX => drop(found.insert(key, value.to_string())),
            _ => (),
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn keys_are_dotted() {
        let found = keys("a = 1\n[b]\nc = 'x'\n[b.d]\ne = [1, 2]").unwrap();
        let found: Vec<String> = found.into_iter().map(|(key, value)| format!("{key}={value}")).collect();
        assert_eq!(found, ["a=1", "b.c=\"x\"", "b.d.e=[1, 2]"]);
        assert!(keys("a = ").is_none());
    }
}
