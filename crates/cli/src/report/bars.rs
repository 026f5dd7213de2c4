//! Draws bars with figures: memory by rank and kind, and traffic by collective, measured and expected. Each kind of memory has its own
//! hatch pattern.

use shardwise_journal::RankMemory;
use shardwise_journal::format::{format_bytes, format_count, format_count_of, format_digits, format_memory};

use super::run_data::{MemoryAt, RunData, Traffic};
use super::text::{add, escape, truncate};

/// With more ranks than this, bars are drawn closer together.
const ROOMY_MAX: usize = 16;

/// The hatch patterns of the kinds of memory, which bars refer to. The style sheet defines the hues.
pub(crate) fn hatch_patterns() -> String {
    let lines = [
        "",
        "M-2 8L8 -2M3 13L13 3",
        "M2 2h3v3h-3zM7 7h3v3h-3z",
        "M2.5 0V10M7.5 0V10",
        "M2 -2L12 8M-3 3L7 13",
        "M0 5H10M5 0V10",
    ];
    let mut svg = "<svg class=\"defs\" width=\"0\" height=\"0\" aria-hidden=\"true\"><defs>\n".to_string();
    for (kind, path) in lines.iter().enumerate() {
        let class = if kind == 2 { "ink dots" } else { "ink" };
        add(
            &mut svg,
            format_args!(
                "<pattern id=\"k{kind}\" width=\"10\" height=\"10\" patternUnits=\"userSpaceOnUse\"><rect class=\"f{kind}\" width=\"10\" height=\"10\"/><path class=\"{class}\" d=\"{path}\"/></pattern>\n"
            ),
        );
    }
    svg + "</defs></svg>\n"
}

/// The memory of ranks by kind, for every world size of the run.
pub(crate) fn memory_by_rank(run: &RunData) -> String {
    let mut page = String::new();
    for (world, held) in run.memory.iter().rev().filter(|(_, held)| !held.ranks.is_empty()) {
        let (scale, is_close) = (scale_bytes(held), held.ranks.len() > ROOMY_MAX);
        let side = if is_close { "" } else { " held" };
        add(
            &mut page,
            format_args!(
                "<div class=\"world{side}\">\n<h4>On {}, after step {}</h4>\n",
                format_count_of(*world as u64, "rank"),
                format_count(held.step)
            ),
        );
        let class = if is_close { "bars close" } else { "bars" };
        add(&mut page, format_args!("<div class=\"{class}\">\n"));
        for rank in &held.ranks {
            rank_bar(rank, held, scale, &mut page);
        }
        page.push_str("</div>\n");
        kinds_table(held, &mut page);
        add(&mut page, format_args!("<p class=\"note\">{}</p>\n</div>\n", escape(remark(*world, held))));
    }
    match page.is_empty() {
        true => "<p class=\"note\">The memory of the ranks was not recorded.</p>\n".to_string(),
        false => page,
    }
}

fn total(rank: &RankMemory) -> f64 {
    rank.kinds().iter().map(|(_, bytes)| *bytes as f64).sum()
}

/// The number of bytes that the full width stands for: the limit if it is not far off, otherwise the largest rank's memory.
fn scale_bytes(held: &MemoryAt) -> f64 {
    let most = held.ranks.iter().map(total).fold(1., f64::max);
    let limit = held.limit_bytes.map_or(0., |limit| limit as f64);
    let shown = if limit <= most * 3. { most.max(limit) } else { most };
    shown * 1.02
}

fn rank_bar(rank: &RankMemory, held: &MemoryAt, scale: f64, page: &mut String) {
    let kinds: Vec<String> =
        rank.kinds().iter().map(|(kind, bytes)| format!("{kind} {}", format_memory(*bytes as f64))).collect();
    let (number, total) = (rank.rank, format_memory(total(rank)));
    add(
        page,
        format_args!(
            "<div class=\"bar\"><span>rank {number}</span><svg role=\"img\" aria-label=\"rank {number}: {}\"><rect class=\"empty\" width=\"100%\" height=\"100%\"/>",
            kinds.join(", ")
        ),
    );
    let mut from = 0.;
    for (kind, (name, bytes)) in rank.kinds().iter().enumerate() {
        let percent = *bytes as f64 / scale * 100.;
        if percent > 0.05 {
            add(
                page,
                format_args!(
                    "<rect class=\"part\" x=\"{from:.2}%\" width=\"{percent:.2}%\" height=\"100%\" fill=\"url(#k{kind})\"><title>{name}: {}</title></rect>",
                    format_memory(*bytes as f64)
                ),
            );
        }
        from += percent;
    }
    if let Some(limit) = held.limit_bytes.map(|limit| limit as f64).filter(|limit| *limit <= scale) {
        let x = limit / scale * 100.;
        add(page, format_args!("<line class=\"limit\" x1=\"{x:.2}%\" x2=\"{x:.2}%\" y1=\"0\" y2=\"100%\"/>"));
    }
    add(page, format_args!("</svg><span>{total}</span></div>\n"));
}

fn kinds_table(held: &MemoryAt, page: &mut String) {
    page.push_str("<table class=\"kinds\"><thead><tr><th>kind</th><th>min</th><th>max</th></tr></thead><tbody>\n");
    let names = RankMemory::default().kinds();
    for (kind, (name, _)) in names.iter().enumerate() {
        let each = || held.ranks.iter().map(|rank| rank.kinds()[kind].1);
        let (least, most) = (each().min().unwrap_or(0), each().max().unwrap_or(0));
        add(
            page,
            format_args!(
                "<tr><th><svg class=\"swatch\" aria-hidden=\"true\"><rect class=\"part\" width=\"100%\" height=\"100%\" fill=\"url(#k{kind})\"/></svg>{name}</th><td>{}</td><td>{}</td></tr>\n",
                format_memory(least as f64),
                format_memory(most as f64)
            ),
        );
    }
    page.push_str("</tbody></table>\n");
}

fn remark(world: usize, held: &MemoryAt) -> String {
    let most = held.ranks.iter().map(total).fold(0., f64::max);
    let mut text = format!("The largest rank held {}", format_memory(most));
    if held.estimate_bytes > 0 {
        text += &format!("; the estimate was {}", format_memory(held.estimate_bytes as f64));
    }
    if let Some(limit) = held.limit_bytes.filter(|limit| *limit > 0).map(|limit| limit as f64) {
        let drawn = if limit <= scale_bytes(held) { " (the vertical line)" } else { "" };
        text += &format!("; that is {:.0}% of its limit of {}{drawn}", most / limit * 100., format_memory(limit));
    }
    if held.ranks.len() < world {
        text += &format!(". These are the first {} of {} ranks", held.ranks.len(), format_count(world as u64));
    }
    text + "."
}

/// The traffic of the busiest rank by collective, next to what the formula predicts.
pub(crate) fn traffic_by_verb(run: &RunData) -> String {
    let mut page = String::new();
    for (world, sent) in run.traffic.iter().rev().filter(|(_, sent)| sent.steps > 0 && !sent.verbs.is_empty()) {
        add(
            &mut page,
            format_args!(
                "<div class=\"world\">\n<h4>On {}, in {}</h4>\n",
                format_count_of(*world as u64, "rank"),
                format_count_of(sent.steps, "step")
            ),
        );
        verbs_table(sent, &mut page);
        add(&mut page, format_args!("<p class=\"note\">{}</p>\n</div>\n", escape(compare_with_expected(sent))));
    }
    match page.is_empty() {
        true => "<p class=\"note\">The traffic was not recorded.</p>\n".to_string(),
        false => page,
    }
}

fn verbs_table(sent: &Traffic, page: &mut String) {
    page.push_str(
        "<table class=\"verbs\"><thead><tr><th>collective</th><th>calls/step</th><th>sent/step</th><th>expected</th><th>difference</th></tr></thead><tbody>\n",
    );
    let steps = sent.steps as f64;
    let scale =
        sent.verbs.iter().map(|verb| verb.bytes.max(verb.expected_bytes)).max().unwrap_or(1).max(1) as f64 * 1.03;
    for verb in &sent.verbs {
        let (bytes, expected) = (verb.bytes as f64, verb.expected_bytes as f64);
        let (expected_text, difference) = match expected > 0. {
            true => (format_bytes(expected / steps), percent(bytes / expected - 1.)),
            false => ("none".to_string(), "–".to_string()),
        };
        add(
            page,
            format_args!(
                "<tr><th>{}</th><td>{}</td><td>{}</td><td>{expected_text}</td><td>{difference}</td></tr>\n",
                escape(truncate(&verb.verb, 40)),
                format_digits(verb.calls as f64 / steps, 3),
                format_bytes(bytes / steps)
            ),
        );
        let (width, at) = (bytes / scale * 100., expected / scale * 100.);
        add(
            page,
            format_args!(
                "<tr class=\"drawn\"><td colspan=\"5\"><svg aria-hidden=\"true\"><rect class=\"empty\" width=\"100%\" height=\"100%\"/><rect class=\"part\" y=\"3\" width=\"{width:.2}%\" height=\"8\" fill=\"url(#k0)\"/>"
            ),
        );
        if expected > 0. {
            add(page, format_args!("<line class=\"limit\" x1=\"{at:.2}%\" x2=\"{at:.2}%\" y1=\"0\" y2=\"100%\"/>"));
        }
        page.push_str("</svg></td></tr>\n");
    }
    page.push_str("</tbody></table>\n");
}

fn percent(fraction: f64) -> String {
    match fraction {
        p if p.abs() < 0.000_05 => "0.00%".to_string(),
        p if p.abs() < 10. => format!("{:+.2}%", p * 100.),
        p => format!("{} times", format_digits(p + 1., 3)),
    }
}

fn compare_with_expected(sent: &Traffic) -> String {
    let bytes: f64 = sent.verbs.iter().map(|verb| verb.bytes as f64).sum();
    let expected: f64 = sent.verbs.iter().map(|verb| verb.expected_bytes as f64).sum();
    let all = format!("The busiest rank sent {} per step", format_bytes(bytes / sent.steps as f64));
    match expected > 0. {
        true => format!(
            "{all}; the formula (the vertical lines) predicts {} for parameters and gradients alone, so that is {}.",
            format_bytes(expected / sent.steps as f64),
            match bytes / expected - 1. {
                more if more >= 0. => format!("{} more", percent(more).trim_start_matches('+')),
                less => format!("{} less", percent(less).trim_start_matches('-')),
            }
        ),
        false => format!("{all}."),
    }
}
