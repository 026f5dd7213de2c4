//! The charts of the page and their captions.

use shardwise_journal::AttemptEnd;
use shardwise_journal::format::{
    format_bytes, format_count, format_count_of, format_digits, format_duration, format_memory,
};

use super::chart::{Band, Chart, Curve, Size};
use super::run_data::{Point, RunData, median};
use super::text::{add, escape, truncate};

const SMALL: Size = Size { width: 400., height: 262. };
const WIDE: Size = Size { width: 1100., height: 330. };
const GIB: f64 = (1 << 30) as f64;

/// All charts of one run, or of several runs in the same axes.
pub(crate) fn figures(runs: &[RunData]) -> String {
    if runs.iter().all(|run| run.points.is_empty()) {
        return "<p class=\"note\">No step was completed.</p>\n".to_string();
    }
    let mut page = String::new();
    for chart in [loss(runs), progress(runs)] {
        figure(&chart, true, &mut page);
    }
    for chart in [throughput(runs), mfu(runs), grad_norm(runs), lr(runs), resident(runs), sent(runs)] {
        figure(&chart, false, &mut page);
    }
    if runs.iter().flat_map(|run| &run.points).any(|point| point.busiest_expert.is_finite()) {
        figure(&expert_balance(runs), false, &mut page);
    }
    page
}

/// Adds a chart with its caption. A chart with a wide version takes up a full row on wide screens.
fn figure(chart: &Chart, has_wide: bool, page: &mut String) {
    let class = if has_wide { " class=\"large\"" } else { "" };
    add(page, format_args!("<figure{class}>\n<h3>{}</h3>\n", escape(&chart.title)));
    if has_wide {
        add(page, format_args!("<div class=\"wide\">{}</div>\n", chart.svg(WIDE, "-w")));
        add(page, format_args!("<div class=\"small\">{}</div>\n", chart.svg(SMALL, "-s")));
    } else {
        page.push_str(&chart.svg(SMALL, ""));
    }
    add(page, format_args!("<figcaption>{}</figcaption>\n</figure>\n", escape(&chart.description)));
}

fn loss(runs: &[RunData]) -> Chart {
    let mut chart = over_steps("loss", "Loss", "mean loss per token", runs, |point| f64::from(point.loss), true);
    for (run, curve) in runs.iter().zip(&mut chart.curves) {
        let text = |step, loss| format!("step {}: {} on held-out text", format_count(step), format_digits(loss, 4));
        curve.marks = run.evaluations.iter().map(|e| (e.step as f64, e.loss, text(e.step, e.loss))).collect();
    }
    let spread = spread(runs, |point| point.loss);
    chart.is_log = spread.is_some_and(|(low, high)| low > 0. && high / low > 12.);
    chart.bands = bands(runs);
    chart.description = each(runs, |run| {
        let mut text = describe_course("The loss", &run.points, |point| point.loss);
        if let Some(last) = run.evaluations.last() {
            let bits =
                last.bits_per_byte.map_or(String::new(), |bits| format!(" ({} bits per byte)", format_digits(bits, 3)));
            text += &format!(
                " On held-out text: {}{bits} after step {}.",
                format_digits(last.loss, 3),
                format_count(last.step)
            );
        }
        if run.skipped > 0 {
            text += &format!(" {} skipped.", format_count_of(run.skipped, "step"));
        }
        text
    });
    if runs.iter().any(|run| !run.evaluations.is_empty()) {
        chart.description += " Diamonds: held-out text.";
    }
    if runs.iter().flat_map(|run| &run.points).any(|point| !point.loss.is_finite()) {
        chart.description += " Crosses: the loss was not finite.";
    }
    if runs.len() == 1 && !chart.moments.is_empty() {
        chart.description += " Numbered lines: restarts. Bars below: the number of ranks.";
    }
    chart
}

fn grad_norm(runs: &[RunData]) -> Chart {
    let mut chart = over_steps(
        "grad-norm",
        "Grad norm",
        "norm of all gradients, before clipping",
        runs,
        |point| f64::from(point.grad_norm),
        true,
    );
    chart.is_log = spread(runs, |point| point.grad_norm).is_some_and(|(low, high)| low > 0. && high / low > 12.);
    chart.from_zero = true;
    chart.description = each(runs, |run| {
        let most = extreme(&run.points, |point| point.grad_norm, |a, b| a > b);
        match (median(run.points.iter().map(|point| point.grad_norm)), most) {
            (Some(middle), Some((step, most))) => format!(
                "The median grad norm was {}; the maximum was {}, at step {}.",
                format_digits(middle, 3),
                format_digits(most, 3),
                format_count(step)
            ),
            _ => "No step was completed.".to_string(),
        }
    });
    chart
}

fn expert_balance(runs: &[RunData]) -> Chart {
    let mut chart = over_steps(
        "experts",
        "Expert balance",
        "tokens of the busiest expert / mean",
        runs,
        |point| f64::from(point.busiest_expert),
        true,
    );
    chart.from_zero = true;
    chart.description = each(runs, |run| {
        let middle = median(run.points.iter().map(|point| point.busiest_expert));
        let last = run.points.last().map(|point| f64::from(point.busiest_expert)).filter(|last| last.is_finite());
        match (middle, last) {
            (Some(middle), Some(last)) => format!(
                "In the median step, the busiest expert of any block had {} times as many tokens as the mean; in the last step, {} times.",
                format_digits(middle, 3),
                format_digits(last, 3)
            ),
            _ => "This model has no experts.".to_string(),
        }
    });
    chart
}

fn lr(runs: &[RunData]) -> Chart {
    let mut chart = over_steps("lr", "Learning rate", "lr", runs, |point| f64::from(point.lr), false);
    chart.from_zero = true;
    chart.description = each(runs, |run| {
        let most = extreme(&run.points, |point| point.lr, |a, b| a > b);
        match (most, run.points.last()) {
            (Some((step, most)), Some(last)) => format!(
                "The highest lr was {}, at step {}; at the last step it was {}.",
                format_digits(most, 3),
                format_count(step),
                format_digits(f64::from(last.lr), 3)
            ),
            _ => "No step was completed.".to_string(),
        }
    });
    chart
}

fn throughput(runs: &[RunData]) -> Chart {
    let mut chart = over_steps("tokens", "Throughput", "tokens/s", runs, |point| f64::from(point.tokens_per_s), true);
    chart.from_zero = true;
    chart.bands = bands(runs);
    chart.description = each(runs, |run| {
        let Some(middle) = median(run.points.iter().map(|point| point.tokens_per_s)) else {
            return "No step was completed.".to_string();
        };
        let mut text = format!("The median throughput was {} tokens/s", format_digits(middle, 3));
        let attempts = run.timeline.attempts();
        let ranks_of = |point: &Point| attempts.get(point.attempt as usize).map_or(0, |attempt| attempt.ranks);
        let mut worlds: Vec<usize> = run.worlds().iter().map(|(.., ranks)| *ranks).collect();
        worlds.sort_unstable();
        worlds.dedup();
        if (2..=4).contains(&worlds.len()) {
            let parts = worlds.iter().filter_map(|ranks| {
                let own = run.points.iter().filter(|point| ranks_of(point) == *ranks).map(|point| point.tokens_per_s);
                Some(format!("{} on {}", format_digits(median(own)?, 3), format_count_of(*ranks as u64, "rank")))
            });
            text += &format!(": {}", parts.collect::<Vec<_>>().join(", "));
        }
        text + "."
    });
    chart
}

fn mfu(runs: &[RunData]) -> Chart {
    let figure = |point: &Point| f64::from(point.mfu) * 100.;
    let mut chart = over_steps("mfu", "MFU", "%", runs, figure, true);
    chart.from_zero = true;
    // Steps whose MFU is not known get no mark.
    chart.curves = chart.curves.into_iter().map(Curve::without_gaps).collect();
    chart.description = each(runs, |run| match median(run.points.iter().map(|point| point.mfu)) {
        None if !run.points.is_empty() => "The peak of the machine is not known.".to_string(),
        Some(middle) => {
            format!(
                "The median MFU was {:.1}%, relative to what the ranks reach in large matrix products.",
                middle * 100.
            )
        }
        None => "No step was completed.".to_string(),
    });
    chart
}

fn sent(runs: &[RunData]) -> Chart {
    let most = runs.iter().filter_map(|run| extreme(&run.points, |point| point.sent_bytes, |a, b| a > b));
    let most = most.fold(0_f64, |most, (_, bytes)| most.max(bytes));
    let (unit_bytes, unit) = if most >= 1e9 { (1e9, "GB") } else { (1e6, "MB") };
    let figure = |point: &Point| f64::from(point.sent_bytes) / unit_bytes;
    let unit = format!("{unit}/step, busiest rank");
    let mut chart = over_steps("sent", "Sent", &unit, runs, figure, false);
    chart.from_zero = true;
    chart.description = each(runs, |run| match median(run.points.iter().map(|point| point.sent_bytes)) {
        Some(middle) => format!("The busiest rank sent {} in the median step.", format_bytes(middle)),
        None => "No step was completed.".to_string(),
    });
    chart
}

fn resident(runs: &[RunData]) -> Chart {
    let gib = |point: &Point| f64::from(point.memory_bytes) / GIB;
    let mut chart = over_steps("resident", "Memory", "GiB, largest rank", runs, gib, false);
    chart.from_zero = true;
    let most = runs.iter().filter_map(|run| extreme(&run.points, |point| point.memory_peak_bytes, |a, b| a > b));
    let most = most.fold(0_f64, |most, (_, peak)| most.max(peak));
    if most > 0. {
        chart.levels.push((most / GIB, format!("peak: {}", format_memory(most))));
    }
    let limits = runs.iter().filter_map(|run| run.start()?.memory_limit_bytes).map(|limit| limit as f64);
    if let Some(limit) = limits.reduce(f64::min).filter(|limit| *limit < most * 2.5 && *limit > most * 1.12) {
        chart.levels.push((limit / GIB, format!("limit: {}", format_memory(limit))));
    }
    chart.description = each(runs, |run| {
        let Some((_, peak)) = extreme(&run.points, |point| point.memory_peak_bytes, |a, b| a > b) else {
            return "No step was completed.".to_string();
        };
        let limit = run.start().and_then(|start| start.memory_limit_bytes).filter(|limit| *limit > 0);
        let of = limit.map_or(String::new(), |limit| {
            let limit = limit as f64;
            format!(", {:.0}% of its limit of {}", peak / limit * 100., format_memory(limit))
        });
        format!("The peak resident memory of any rank was {}{of}.", format_memory(peak))
    });
    chart
}

/// The chart of steps over time: the progress of a run, and where failures set it back.
fn progress(runs: &[RunData]) -> Chart {
    let longest =
        runs.iter().filter_map(|run| run.timeline.time_s()).map(|(first, last)| last - first).fold(0., f64::max);
    let (unit_s, unit) = match longest {
        s if s < 300. => (1., "seconds"),
        s if s < 3. * 3600. => (60., "minutes"),
        s if s < 72. * 3600. => (3600., "hours"),
        _ => (86400., "days"),
    };
    let mut chart = Chart {
        id: "progress".to_string(),
        title: "Progress".to_string(),
        unit: "step".to_string(),
        along: format!("{unit} since the first start"),
        from_zero: true,
        ..Chart::default()
    };
    for (index, run) in runs.iter().enumerate() {
        let first_s = run.timeline.time_s().map_or(0., |(first, _)| first);
        let at = |time_s: f64| (time_s - first_s) / unit_s;
        let mut curve = Curve::new(&pieces(run, &at), None).without_gaps();
        (curve.style, curve.label) = (index, end_label(runs, index));
        for attempt in run.timeline.attempts() {
            if let AttemptEnd::Failed { time_s, step, text } = &attempt.end {
                curve.failures.push((at(*time_s), *step as f64, truncate(text, 200)));
            }
        }
        chart.curves.push(curve);
        let worlds =
            run.timeline.attempts().iter().map(|attempt| (at(attempt.time_s), at(attempt.last_entry_s), attempt.ranks));
        chart.bands.push(Band { label: letter_of(runs, index), pieces: worlds.collect() });
    }
    chart.description = each(runs, |run| {
        let Some((first, last)) = run.timeline.time_s() else { return "The journal is empty.".to_string() };
        let steps = run.points.last().map_or(0, |point| point.step);
        let mut text = format!("{} in {}.", format_count_of(steps, "step"), format_duration(last - first));
        let failures =
            run.timeline.attempts().iter().filter(|attempt| matches!(attempt.end, AttemptEnd::Failed { .. })).count();
        if failures > 0 {
            text += &format!(" {} (crosses)", format_count_of(failures as u64, "failure"));
            text += &match run.repeated.len() as u64 {
                0 => "; no step was repeated.".to_string(),
                repeated => format!("; {} repeated, where the line drops.", format_count_of(repeated, "step")),
            };
        }
        text
    });
    chart
}

/// All steps by time, including repeated ones, with a gap between attempts.
fn pieces(run: &RunData, at: &dyn Fn(f64) -> f64) -> Vec<(f64, f64)> {
    let mut all: Vec<&Point> = run.repeated.iter().chain(&run.points).collect();
    all.sort_by(|a, b| (a.attempt, a.time_s).partial_cmp(&(b.attempt, b.time_s)).unwrap_or(std::cmp::Ordering::Equal));
    let mut points = Vec::with_capacity(all.len());
    let mut before = None;
    for point in all {
        if before.is_some_and(|attempt| attempt != point.attempt) {
            points.push((at(point.time_s), f64::NAN));
        }
        before = Some(point.attempt);
        points.push((at(point.time_s), point.step as f64));
    }
    points
}

/// A chart of one figure over the steps.
fn over_steps(
    id: &str,
    title: &str,
    unit: &str,
    runs: &[RunData],
    figure: impl Fn(&Point) -> f64,
    is_smoothed: bool,
) -> Chart {
    let curves = runs.iter().enumerate().map(|(index, run)| {
        let points: Vec<(f64, f64)> = run.points.iter().map(|point| (point.step as f64, figure(point))).collect();
        let parts: Vec<f64> = run.worlds().iter().map(|(first, ..)| *first as f64).collect();
        let mut curve = Curve::new(&points, is_smoothed.then_some(&parts[..]));
        (curve.style, curve.label) = (index, end_label(runs, index));
        curve
    });
    let moments = match runs {
        [run] => run.restarts().iter().zip(1..).map(|(step, n)| (*step as f64, n.to_string())).collect(),
        _ => Vec::new(),
    };
    Chart {
        id: id.to_string(),
        title: title.to_string(),
        unit: unit.to_string(),
        along: "step".to_string(),
        curves: curves.collect(),
        moments,
        ..Chart::default()
    }
}

/// The letter of a run, `A`, `B`, …, if there are several.
pub(crate) fn letter_of(runs: &[RunData], index: usize) -> String {
    match runs.len() {
        1 => String::new(),
        _ => char::from(b'A' + (index % 26) as u8).to_string(),
    }
}

fn end_label(runs: &[RunData], index: usize) -> String {
    match runs.len() {
        1 => String::new(),
        _ => format!("{} {}", letter_of(runs, index), truncate(&runs[index].name, 9)),
    }
}

fn bands(runs: &[RunData]) -> Vec<Band> {
    let band = |(index, run): (usize, &RunData)| {
        let worlds = run.worlds();
        let next = worlds.iter().skip(1).map(|(first, ..)| *first).chain(worlds.last().map(|(_, last, _)| *last));
        let pieces = worlds.iter().zip(next).map(|((first, _, ranks), next)| (*first as f64, next as f64, *ranks));
        Band { label: letter_of(runs, index), pieces: pieces.collect() }
    };
    runs.iter().enumerate().map(band).collect()
}

/// A sentence for every run, with its letter if there are several.
fn each(runs: &[RunData], sentence: impl Fn(&RunData) -> String) -> String {
    let sentences = runs.iter().enumerate().map(|(index, run)| match runs.len() {
        1 => sentence(run),
        _ => format!("{}: {}", letter_of(runs, index), sentence(run)),
    });
    sentences.collect::<Vec<_>>().join(" ")
}

/// Describes the first, the last and the lowest value of a figure.
fn describe_course(name: &str, points: &[Point], figure: impl Fn(&Point) -> f32) -> String {
    let mut finite = points.iter().filter(|point| figure(point).is_finite());
    let (Some(first), Some((lowest_at, lowest))) = (finite.next(), extreme(points, &figure, |a, b| a < b)) else {
        return format!("{name} was never finite, or no step was completed.");
    };
    let (from, to) = (f64::from(figure(first)), f64::from(finite.next_back().map_or(figure(first), &figure)));
    let verb = if to < from { "fell" } else { "went" };
    format!(
        "{name} {verb} from {} to {}; lowest {} at step {}.",
        format_digits(from, 3),
        format_digits(to, 3),
        format_digits(lowest, 3),
        format_count(lowest_at)
    )
}

/// The step with the most extreme value of a figure, and the value.
pub(crate) fn extreme(
    points: &[Point],
    figure: impl Fn(&Point) -> f32,
    is_further: impl Fn(f32, f32) -> bool,
) -> Option<(u64, f64)> {
    let finite = points.iter().filter(|point| figure(point).is_finite());
    let furthest = finite.reduce(|best, point| if is_further(figure(point), figure(best)) { point } else { best })?;
    Some((furthest.step, f64::from(figure(furthest))))
}

/// The range of a figure in all runs, without the few most extreme values.
fn spread(runs: &[RunData], figure: impl Fn(&Point) -> f32) -> Option<(f64, f64)> {
    let mut all: Vec<f32> = runs.iter().flat_map(|run| &run.points).map(figure).filter(|f| f.is_finite()).collect();
    all.sort_unstable_by(f32::total_cmp);
    let out = all.len() / 300;
    let most = all.len().checked_sub(out + 1)?;
    Some((f64::from(*all.get(out)?), f64::from(all[most])))
}
