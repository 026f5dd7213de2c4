//! The page: its parts in their order, in one file that needs nothing else. No script, and nothing from a network: the page's
//! own policy forbids both.

use shardwise_journal::words::{counted, duration};
use shardwise_journal::{Event, Kind};

use super::bars::{hatchings, memory_by_rank, traffic_by_verb};
use super::facts::{differences, facts_of, summary};
use super::figures::{figures, letter_of};
use super::history::History;
use super::text::{add, date, escaped, shortened};

const STYLE: &str = include_str!("page.css");
/// Of a long story the first and the last so many events are shown.
const EVENTS_SHOWN: usize = 150;
/// As long as a failure's paragraph may be.
const TEXT_CHARS_MAX: usize = 3000;
const RECIPE_CHARS_MAX: usize = 100_000;

/// The whole page.
pub(crate) fn page(runs: &[History]) -> String {
    let names: Vec<String> = runs.iter().map(|run| shortened(&run.name, 80)).collect();
    let title = escaped(names.join(" · "));
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\"/>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<meta name=\"color-scheme\" content=\"light dark\"/>\n<title>{title} – Shardwise report</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
    );
    page.push_str(&hatchings());
    header(runs, &names, &mut page);
    page.push_str("<main>\n");
    section("facts", "At a glance", &facts_of(runs), &mut page);
    if runs.len() > 1 {
        section("recipes", "Where the recipes differ", &differences(runs), &mut page);
    }
    if let [run] = runs {
        section("story", "What happened", &story(run), &mut page);
    }
    section("charts", "Charts", &format!("<div class=\"charts\">\n{}</div>\n", figures(runs)), &mut page);
    if runs.len() > 1 {
        per_run("story", "What happened", runs, story, &mut page);
    }
    per_run("memory", "Memory by kind, rank by rank", runs, memory_by_rank, &mut page);
    per_run("traffic", "Traffic by verb, against theory", runs, traffic_by_verb, &mut page);
    per_run("recipe", "Recipe", runs, recipe, &mut page);
    page.push_str("</main>\n");
    footer(runs, &mut page);
    page + "</body>\n</html>\n"
}

fn header(runs: &[History], names: &[String], page: &mut String) {
    page.push_str("<header>\n");
    match runs {
        [run] => add(
            page,
            format_args!("<h1>{}</h1>\n<p class=\"lead\">{}</p>\n", escaped(&names[0]), escaped(summary(run))),
        ),
        _ => {
            add(page, format_args!("<h1>{} runs side by side</h1>\n<ul class=\"lead\">\n", runs.len()));
            for (place, run) in runs.iter().enumerate() {
                let (letter, name) = (letter_of(runs, place), escaped(&names[place]));
                add(page, format_args!("<li><b>{letter} {name}</b>: {}</li>\n", escaped(summary(run))));
            }
            page.push_str("</ul>\n");
        }
    }
    page.push_str("</header>\n");
}

fn section(id: &str, title: &str, content: &str, page: &mut String) {
    add(page, format_args!("<section id=\"{id}\">\n<h2>{title}</h2>\n{content}</section>\n"));
}

/// A section with a part for every run.
fn per_run(id: &str, title: &str, runs: &[History], part: impl Fn(&History) -> String, page: &mut String) {
    let mut content = String::new();
    for (place, run) in runs.iter().enumerate() {
        if runs.len() > 1 {
            let letter = letter_of(runs, place);
            add(&mut content, format_args!("<h3>{letter} {}</h3>\n", escaped(shortened(&run.name, 80))));
        }
        content.push_str(&part(run));
    }
    section(id, title, &content, page);
}

/// The events as a table.
fn story(run: &History) -> String {
    let (events, first_s) = (run.story.events(), run.story.time_s().map_or(0., |(first, _)| first));
    if events.is_empty() {
        return "<p class=\"note\">Nothing was written down.</p>\n".to_string();
    }
    let mut page = format!(
        "<p class=\"note\">Times are since {} UTC.</p>\n<table class=\"story\"><thead><tr><th>after</th><th>step</th><th>event</th><th>what</th></tr></thead><tbody>\n",
        date(first_s)
    );
    let hidden = events.len().saturating_sub(2 * EVENTS_SHOWN);
    for (place, event) in events.iter().enumerate() {
        if hidden == 0 || place < EVENTS_SHOWN || place >= EVENTS_SHOWN + hidden {
            row(event, first_s, &mut page);
        } else if place == EVENTS_SHOWN {
            let more = counted(hidden as u64, "event");
            add(
                &mut page,
                format_args!("<tr><td></td><td></td><td></td><td class=\"what\">{more} are left out here.</td></tr>\n"),
            );
        }
    }
    page + "</tbody></table>\n"
}

fn row(event: &Event, first_s: f64, page: &mut String) {
    let class = match event.kind {
        Kind::Started => "started",
        Kind::Failed => "failed",
        Kind::Again => "again",
        Kind::Ended => "ended",
        Kind::Skipped | Kind::Outlier | Kind::Note => "odd",
        Kind::Saved | Kind::HeldOut | Kind::Traced => "quiet",
    };
    add(
        page,
        format_args!(
            "<tr class=\"{class}\"><td title=\"{} UTC\">{}</td><td>{}</td><td><span aria-hidden=\"true\">{}</span> {}</td><td class=\"what\">{}</td></tr>\n",
            date(event.time_s),
            duration(event.time_s - first_s),
            event.steps(),
            event.kind.sign(),
            event.kind.word(),
            escaped(shortened(&event.text, TEXT_CHARS_MAX))
        ),
    );
}

fn recipe(run: &History) -> String {
    let Some(start) = run.start().filter(|start| !start.recipe.is_empty()) else {
        return "<p class=\"note\">The recipe was not written down.</p>\n".to_string();
    };
    let lines = counted(start.recipe.lines().count() as u64, "line");
    let text = escaped(shortened(&start.recipe, RECIPE_CHARS_MAX));
    format!(
        "<details><summary>{} ({lines})</summary>\n<pre>{text}</pre>\n</details>\n",
        escaped(shortened(&run.name, 80))
    )
}

fn footer(runs: &[History], page: &mut String) {
    page.push_str("<footer>\n");
    for run in runs.iter().filter(|run| run.unknown > 0) {
        add(
            page,
            format_args!(
                "<p>{} of {} could not be read and {} left out.</p>\n",
                counted(run.unknown, "line"),
                escaped(&run.folder),
                if run.unknown == 1 { "is" } else { "are" }
            ),
        );
    }
    add(
        page,
        format_args!(
            "<p>Written by Shardwise {} from what the {} wrote down. This page needs no network and runs no script.</p>\n</footer>\n",
            env!("CARGO_PKG_VERSION"),
            if runs.len() == 1 { "run" } else { "runs" }
        ),
    );
}
