//! The page: one self-contained file. It has no scripts and loads nothing from the network; its own content security policy forbids both.

use shardwise_journal::format::{format_count_of, format_duration};
use shardwise_journal::{Event, EventKind};

use super::bars::{hatch_patterns, memory_by_rank, traffic_by_verb};
use super::facts::{differences, facts_list, summary};
use super::figures::{figures, letter_of};
use super::run_data::RunData;
use super::text::{add, date, escape, truncate};

const STYLE: &str = include_str!("page.css");
/// If there are many events, this many of the first and of the last ones are shown.
const EVENTS_SHOWN: usize = 150;
/// The longest text of an event.
const TEXT_CHARS_MAX: usize = 3000;
const RECIPE_CHARS_MAX: usize = 100_000;

/// Creates the page.
pub(crate) fn page(runs: &[RunData]) -> String {
    let names: Vec<String> = runs.iter().map(|run| truncate(&run.name, 80)).collect();
    let title = escape(names.join(" · "));
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\"/>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<meta name=\"color-scheme\" content=\"light dark\"/>\n<title>{title} – Shardwise report</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
    );
    page.push_str(&hatch_patterns());
    header(runs, &names, &mut page);
    page.push_str("<main>\n");
    section("facts", "At a glance", &facts_list(runs), &mut page);
    if runs.len() > 1 {
        section("recipes", "Where the recipes differ", &differences(runs), &mut page);
    }
    if let [run] = runs {
        section("events", "What happened", &events_table(run), &mut page);
    }
    section("charts", "Charts", &format!("<div class=\"charts\">\n{}</div>\n", figures(runs)), &mut page);
    if runs.len() > 1 {
        per_run("events", "What happened", runs, events_table, &mut page);
    }
    per_run("memory", "Memory per rank, by kind", runs, memory_by_rank, &mut page);
    per_run("traffic", "Traffic by collective, measured and expected", runs, traffic_by_verb, &mut page);
    per_run("recipe", "Recipe", runs, recipe, &mut page);
    page.push_str("</main>\n");
    footer(runs, &mut page);
    page + "</body>\n</html>\n"
}

fn header(runs: &[RunData], names: &[String], page: &mut String) {
    page.push_str("<header>\n");
    match runs {
        [run] => {
            add(page, format_args!("<h1>{}</h1>\n<p class=\"lead\">{}</p>\n", escape(&names[0]), escape(summary(run))))
        }
        _ => {
            add(page, format_args!("<h1>{} runs side by side</h1>\n<ul class=\"lead\">\n", runs.len()));
            for (index, run) in runs.iter().enumerate() {
                let (letter, name) = (letter_of(runs, index), escape(&names[index]));
                add(page, format_args!("<li><b>{letter} {name}</b>: {}</li>\n", escape(summary(run))));
            }
            page.push_str("</ul>\n");
        }
    }
    page.push_str("</header>\n");
}

fn section(id: &str, title: &str, content: &str, page: &mut String) {
    add(page, format_args!("<section id=\"{id}\">\n<h2>{title}</h2>\n{content}</section>\n"));
}

/// Adds a section with a part for every run.
fn per_run(id: &str, title: &str, runs: &[RunData], part: impl Fn(&RunData) -> String, page: &mut String) {
    let mut content = String::new();
    for (index, run) in runs.iter().enumerate() {
        if runs.len() > 1 {
            let letter = letter_of(runs, index);
            add(&mut content, format_args!("<h3>{letter} {}</h3>\n", escape(truncate(&run.name, 80))));
        }
        content.push_str(&part(run));
    }
    section(id, title, &content, page);
}

/// The events of a run as a table.
fn events_table(run: &RunData) -> String {
    let (events, first_s) = (run.timeline.events(), run.timeline.time_s().map_or(0., |(first, _)| first));
    if events.is_empty() {
        return "<p class=\"note\">No events were recorded.</p>\n".to_string();
    }
    let mut page = format!(
        "<p class=\"note\">Times are since {} UTC.</p>\n<table class=\"events\"><thead><tr><th>time</th><th>step</th><th>event</th><th>description</th></tr></thead><tbody>\n",
        date(first_s)
    );
    let hidden = events.len().saturating_sub(2 * EVENTS_SHOWN);
    for (index, event) in events.iter().enumerate() {
        if hidden == 0 || index < EVENTS_SHOWN || index >= EVENTS_SHOWN + hidden {
            row(event, first_s, &mut page);
        } else if index == EVENTS_SHOWN {
            let more = format_count_of(hidden as u64, "event");
            add(
                &mut page,
                format_args!("<tr><td></td><td></td><td></td><td class=\"text\">{more} not shown.</td></tr>\n"),
            );
        }
    }
    page + "</tbody></table>\n"
}

fn row(event: &Event, first_s: f64, page: &mut String) {
    let class = match event.kind {
        EventKind::Started => "started",
        EventKind::Failed => "failed",
        EventKind::Resumed => "resumed",
        EventKind::Ended => "ended",
        EventKind::Skipped | EventKind::Spike | EventKind::Note => "anomaly",
        EventKind::Saved | EventKind::Evaluated | EventKind::Traced => "routine",
    };
    add(
        page,
        format_args!(
            "<tr class=\"{class}\"><td title=\"{} UTC\">{}</td><td>{}</td><td><span aria-hidden=\"true\">{}</span> {}</td><td class=\"text\">{}</td></tr>\n",
            date(event.time_s),
            format_duration(event.time_s - first_s),
            event.steps(),
            event.kind.symbol(),
            event.kind.name(),
            escape(truncate(&event.text, TEXT_CHARS_MAX))
        ),
    );
}

fn recipe(run: &RunData) -> String {
    let Some(start) = run.start().filter(|start| !start.recipe.is_empty()) else {
        return "<p class=\"note\">The recipe was not recorded.</p>\n".to_string();
    };
    let lines = format_count_of(start.recipe.lines().count() as u64, "line");
    let text = escape(truncate(&start.recipe, RECIPE_CHARS_MAX));
    format!(
        "<details><summary>{} ({lines})</summary>\n<pre>{text}</pre>\n</details>\n",
        escape(truncate(&run.name, 80))
    )
}

fn footer(runs: &[RunData], page: &mut String) {
    page.push_str("<footer>\n");
    for run in runs.iter().filter(|run| run.unreadable > 0) {
        add(
            page,
            format_args!(
                "<p>{} of {} could not be read and {} skipped.</p>\n",
                format_count_of(run.unreadable, "line"),
                escape(&run.folder),
                if run.unreadable == 1 { "was" } else { "were" }
            ),
        );
    }
    add(
        page,
        format_args!(
            "<p>Created by Shardwise {} from the {}. This page needs no network and runs no scripts.</p>\n</footer>\n",
            env!("CARGO_PKG_VERSION"),
            if runs.len() == 1 { "journal of the run" } else { "journals of the runs" }
        ),
    );
}
