//! Which charts a page has, and what their captions say.

use shardwise_journal::End;
use shardwise_journal::words::{amount, count, counted, digits, duration, memory};

use super::chart::{Band, Chart, Curve, Size};
use super::history::{History, Point, median};
use super::text::{add, escaped, shortened};

const SMALL: Size = Size { width: 400., height: 262. };
const WIDE: Size = Size { width: 1100., height: 330. };
const GIB: f64 = (1 << 30) as f64;

/// All charts of one run, or of several on top of each other.
pub(crate) fn figures(runs: &[History]) -> String {
    if runs.iter().all(|run| run.points.is_empty()) {
        return "<p class=\"note\">No step was made.</p>\n".to_string();
    }
    let mut page = String::new();
    for chart in [loss(runs), progress(runs)] {
        figure(&chart, true, &mut page);
    }
    for chart in [throughput(runs), utilisation(runs), gradient_norm(runs), rate(runs), resident(runs), sent(runs)] {
        figure(&chart, false, &mut page);
    }
    page
}

/// A chart with its caption; those of which there is also a wide one take a row of their own where there is room.
fn figure(chart: &Chart, has_wide: bool, page: &mut String) {
    let class = if has_wide { " class=\"large\"" } else { "" };
    add(page, format_args!("<figure{class}>\n<h3>{}</h3>\n", escaped(&chart.title)));
    if has_wide {
        add(page, format_args!("<div class=\"wide\">{}</div>\n", chart.svg(WIDE, "-w")));
        add(page, format_args!("<div class=\"small\">{}</div>\n", chart.svg(SMALL, "-s")));
    } else {
        page.push_str(&chart.svg(SMALL, ""));
    }
    add(page, format_args!("<figcaption>{}</figcaption>\n</figure>\n", escaped(&chart.description)));
}

fn loss(runs: &[History]) -> Chart {
    let mut chart = over_steps("loss", "Loss", "mean loss of a token", runs, |point| f64::from(point.loss), true);
    for (run, curve) in runs.iter().zip(&mut chart.curves) {
        let text = |step, loss| format!("step {}: {} on held-out text", count(step), digits(loss, 4));
        curve.marks = run.held_out.iter().map(|h| (h.step as f64, h.loss, text(h.step, h.loss))).collect();
    }
    let spread = spread(runs, |point| point.loss);
    chart.is_log = spread.is_some_and(|(low, high)| low > 0. && high / low > 12.);
    chart.bands = bands(runs);
    chart.description = each(runs, |run| {
        let mut text = course("The loss", &run.points, |point| point.loss);
        if let Some(last) = run.held_out.last() {
            let bits = last.bits_per_byte.map_or(String::new(), |bits| format!(" ({} bits a byte)", digits(bits, 3)));
            text += &format!(" On held-out text: {}{bits} after step {}.", digits(last.loss, 3), count(last.step));
        }
        if run.skipped > 0 {
            text += &format!(" {} updated nothing.", counted(run.skipped, "step"));
        }
        text
    });
    if runs.iter().any(|run| !run.held_out.is_empty()) {
        chart.description += " Diamonds: held-out text.";
    }
    if runs.iter().flat_map(|run| &run.points).any(|point| !point.loss.is_finite()) {
        chart.description += " A cross: the loss was not finite.";
    }
    if runs.len() == 1 && !chart.moments.is_empty() {
        chart.description +=
            " Numbered lines: the run was started again. The bars below: how many ranks made these steps.";
    }
    chart
}

fn gradient_norm(runs: &[History]) -> Chart {
    let mut chart =
        over_steps("norm", "Gradient norm", "norm before clipping", runs, |point| f64::from(point.gradient_norm), true);
    chart.is_log = spread(runs, |point| point.gradient_norm).is_some_and(|(low, high)| low > 0. && high / low > 12.);
    chart.from_zero = true;
    chart.description = each(runs, |run| {
        let most = extreme(&run.points, |point| point.gradient_norm, |a, b| a > b);
        match (median(run.points.iter().map(|point| point.gradient_norm)), most) {
            (Some(middle), Some((step, most))) => format!(
                "The norm of all gradients was {} for the median step, and at most {}, at step {}.",
                digits(middle, 3),
                digits(most, 3),
                count(step)
            ),
            _ => "No step was made.".to_string(),
        }
    });
    chart
}

fn rate(runs: &[History]) -> Chart {
    let mut chart = over_steps("rate", "Learning rate", "learning rate", runs, |point| f64::from(point.rate), false);
    chart.from_zero = true;
    chart.description = each(runs, |run| {
        let most = extreme(&run.points, |point| point.rate, |a, b| a > b);
        match (most, run.points.last()) {
            (Some((step, most)), Some(last)) => format!(
                "The learning rate was highest at step {}, with {}, and {} at the last step.",
                count(step),
                digits(most, 3),
                digits(f64::from(last.rate), 3)
            ),
            _ => "No step was made.".to_string(),
        }
    });
    chart
}

fn throughput(runs: &[History]) -> Chart {
    let mut chart =
        over_steps("tokens", "Throughput", "tokens a second", runs, |point| f64::from(point.tokens_per_s), true);
    chart.from_zero = true;
    chart.bands = bands(runs);
    chart.description = each(runs, |run| {
        let Some(middle) = median(run.points.iter().map(|point| point.tokens_per_s)) else {
            return "No step was made.".to_string();
        };
        let mut text = format!("The median step read {} tokens a second", digits(middle, 3));
        let attempts = run.story.attempts();
        let ranks_of = |point: &Point| attempts.get(point.attempt as usize).map_or(0, |attempt| attempt.ranks);
        let mut worlds: Vec<usize> = run.worlds().iter().map(|(.., ranks)| *ranks).collect();
        worlds.sort_unstable();
        worlds.dedup();
        if (2..=4).contains(&worlds.len()) {
            let parts = worlds.iter().filter_map(|ranks| {
                let own = run.points.iter().filter(|point| ranks_of(point) == *ranks).map(|point| point.tokens_per_s);
                Some(format!("{} on {}", digits(median(own)?, 3), counted(*ranks as u64, "rank")))
            });
            text += &format!(": {}", parts.collect::<Vec<_>>().join(", "));
        }
        text + "."
    });
    chart
}

fn utilisation(runs: &[History]) -> Chart {
    let figure = |point: &Point| f64::from(point.utilisation) * 100.;
    let mut chart = over_steps("utilisation", "Utilisation", "% of the machine's peak", runs, figure, true);
    chart.from_zero = true;
    // A step whose utilisation is not known is nothing to mark.
    chart.curves = chart.curves.into_iter().map(Curve::without_gaps).collect();
    chart.description = each(runs, |run| match median(run.points.iter().map(|point| point.utilisation)) {
        None if !run.points.is_empty() => "The machine's peak is not known.".to_string(),
        Some(middle) => format!(
            "In the median step {:.1}% of what the ranks reach in large matrix products went into the model's own arithmetic.",
            middle * 100.
        ),
        None => "No step was made.".to_string(),
    });
    chart
}

fn sent(runs: &[History]) -> Chart {
    let most = runs.iter().filter_map(|run| extreme(&run.points, |point| point.sent_bytes, |a, b| a > b));
    let most = most.fold(0_f64, |most, (_, bytes)| most.max(bytes));
    let (unit_bytes, unit) = if most >= 1e9 { (1e9, "GB") } else { (1e6, "MB") };
    let figure = |point: &Point| f64::from(point.sent_bytes) / unit_bytes;
    let unit = format!("{unit} a step, of the rank that sent the most");
    let mut chart = over_steps("sent", "Sent", &unit, runs, figure, false);
    chart.from_zero = true;
    chart.description = each(runs, |run| match median(run.points.iter().map(|point| point.sent_bytes)) {
        Some(middle) => format!("The rank that sent the most sent {} in the median step.", amount(middle)),
        None => "No step was made.".to_string(),
    });
    chart
}

fn resident(runs: &[History]) -> Chart {
    let gib = |point: &Point| f64::from(point.memory_bytes) / GIB;
    let mut chart = over_steps("resident", "Memory", "GiB, of the rank that has the most", runs, gib, false);
    chart.from_zero = true;
    let most = runs.iter().filter_map(|run| extreme(&run.points, |point| point.memory_peak_bytes, |a, b| a > b));
    let most = most.fold(0_f64, |most, (_, peak)| most.max(peak));
    if most > 0. {
        chart.levels.push((most / GIB, format!("most ever: {}", memory(most))));
    }
    let limits = runs.iter().filter_map(|run| run.start()?.memory_limit_bytes).map(|limit| limit as f64);
    if let Some(limit) = limits.reduce(f64::min).filter(|limit| *limit < most * 2.5 && *limit > most * 1.12) {
        chart.levels.push((limit / GIB, format!("limit: {}", memory(limit))));
    }
    chart.description = each(runs, |run| {
        let Some((_, peak)) = extreme(&run.points, |point| point.memory_peak_bytes, |a, b| a > b) else {
            return "No step was made.".to_string();
        };
        let limit = run.start().and_then(|start| start.memory_limit_bytes).filter(|limit| *limit > 0);
        let of = limit.map_or(String::new(), |limit| {
            let limit = limit as f64;
            format!(", which is {:.0}% of its limit of {}", peak / limit * 100., memory(limit))
        });
        format!("No rank ever had more than {} resident{of}.", memory(peak))
    });
    chart
}

/// Steps over time: how a run came forward, and where it was thrown back.
fn progress(runs: &[History]) -> Chart {
    let longest = runs.iter().filter_map(|run| run.story.time_s()).map(|(first, last)| last - first).fold(0., f64::max);
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
    for (look, run) in runs.iter().enumerate() {
        let first_s = run.story.time_s().map_or(0., |(first, _)| first);
        let at = |time_s: f64| (time_s - first_s) / unit_s;
        let mut curve = Curve::new(&pieces(run, &at), None).without_gaps();
        (curve.look, curve.label) = (look, end_label(runs, look));
        for attempt in run.story.attempts() {
            if let End::Failed { time_s, step, text } = &attempt.end {
                curve.failures.push((at(*time_s), *step as f64, shortened(text, 200)));
            }
        }
        chart.curves.push(curve);
        let worlds =
            run.story.attempts().iter().map(|attempt| (at(attempt.time_s), at(attempt.heard_s), attempt.ranks));
        chart.bands.push(Band { label: letter_of(runs, look), pieces: worlds.collect() });
    }
    chart.description = each(runs, |run| {
        let Some((first, last)) = run.story.time_s() else { return "Nothing was written yet.".to_string() };
        let steps = run.points.last().map_or(0, |point| point.step);
        let mut text = format!("{} in {}.", counted(steps, "step"), duration(last - first));
        let failures = run.story.attempts().iter().filter(|attempt| matches!(attempt.end, End::Failed { .. })).count();
        if failures > 0 {
            text += &format!(" {} (crosses)", counted(failures as u64, "failure"));
            text += &match run.made_again.len() as u64 {
                0 => ", and no step was made again.".to_string(),
                lost => format!(" threw it back; {} made again, where the line falls.", counted(lost, "step")),
            };
        }
        text
    });
    chart
}

/// All steps by time, those that were made again too, with a gap between attempts.
fn pieces(run: &History, at: &dyn Fn(f64) -> f64) -> Vec<(f64, f64)> {
    let mut all: Vec<&Point> = run.made_again.iter().chain(&run.points).collect();
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

/// A chart of one figure of every step.
fn over_steps(
    id: &str,
    title: &str,
    unit: &str,
    runs: &[History],
    figure: impl Fn(&Point) -> f64,
    is_smoothed: bool,
) -> Chart {
    let curves = runs.iter().enumerate().map(|(look, run)| {
        let points: Vec<(f64, f64)> = run.points.iter().map(|point| (point.step as f64, figure(point))).collect();
        let parts: Vec<f64> = run.worlds().iter().map(|(first, ..)| *first as f64).collect();
        let mut curve = Curve::new(&points, is_smoothed.then_some(&parts[..]));
        (curve.look, curve.label) = (look, end_label(runs, look));
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

/// `A`, `B`, … where there are several.
pub(crate) fn letter_of(runs: &[History], place: usize) -> String {
    match runs.len() {
        1 => String::new(),
        _ => char::from(b'A' + (place % 26) as u8).to_string(),
    }
}

fn end_label(runs: &[History], place: usize) -> String {
    match runs.len() {
        1 => String::new(),
        _ => format!("{} {}", letter_of(runs, place), shortened(&runs[place].name, 9)),
    }
}

fn bands(runs: &[History]) -> Vec<Band> {
    let of = |(place, run): (usize, &History)| {
        let worlds = run.worlds();
        let next = worlds.iter().skip(1).map(|(first, ..)| *first).chain(worlds.last().map(|(_, last, _)| *last));
        let pieces = worlds.iter().zip(next).map(|((first, _, ranks), next)| (*first as f64, next as f64, *ranks));
        Band { label: letter_of(runs, place), pieces: pieces.collect() }
    };
    runs.iter().enumerate().map(of).collect()
}

/// A sentence for every run, with its letter where there are several.
fn each(runs: &[History], sentence: impl Fn(&History) -> String) -> String {
    let said = runs.iter().enumerate().map(|(place, run)| match runs.len() {
        1 => sentence(run),
        _ => format!("{}: {}", letter_of(runs, place), sentence(run)),
    });
    said.collect::<Vec<_>>().join(" ")
}

/// From where to where a figure went, and where it was lowest.
fn course(name: &str, points: &[Point], figure: impl Fn(&Point) -> f32) -> String {
    let mut finite = points.iter().filter(|point| figure(point).is_finite());
    let (Some(first), Some((lowest_at, lowest))) = (finite.next(), extreme(points, &figure, |a, b| a < b)) else {
        return format!("{name} was never finite, or no step was made.");
    };
    let (from, to) = (f64::from(figure(first)), f64::from(finite.next_back().map_or(figure(first), &figure)));
    let verb = if to < from { "fell" } else { "went" };
    format!(
        "{name} {verb} from {} to {}; lowest {} at step {}.",
        digits(from, 3),
        digits(to, 3),
        digits(lowest, 3),
        count(lowest_at)
    )
}

/// The step at which a figure was furthest to one side, and the figure.
pub(crate) fn extreme(
    points: &[Point],
    figure: impl Fn(&Point) -> f32,
    is_further: impl Fn(f32, f32) -> bool,
) -> Option<(u64, f64)> {
    let finite = points.iter().filter(|point| figure(point).is_finite());
    let furthest = finite.reduce(|best, point| if is_further(figure(point), figure(best)) { point } else { best })?;
    Some((furthest.step, f64::from(figure(furthest))))
}

/// The least and the most of a figure in all runs, but for the few furthest out.
fn spread(runs: &[History], figure: impl Fn(&Point) -> f32) -> Option<(f64, f64)> {
    let mut all: Vec<f32> = runs.iter().flat_map(|run| &run.points).map(figure).filter(|f| f.is_finite()).collect();
    all.sort_unstable_by(f32::total_cmp);
    let out = all.len() / 300;
    let most = all.len().checked_sub(out + 1)?;
    Some((f64::from(*all.get(out)?), f64::from(all[most])))
}
