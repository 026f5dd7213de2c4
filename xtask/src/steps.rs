//! The guide's drawings of a step at each stage: `cargo xtask draw-steps` writes them to `docs/src/drawings`.
//!
//! They are of two shapes, for wide windows and for narrow ones, and stand in the page itself: lines and letters have the
//! page's colour, so that they can be read on light and on dark. What is what is told by pattern and place as well as by
//! colour, for print and for people who do not tell red from green.

mod schedule;
mod sheet;

use anyhow::{Context, Result};

use self::schedule::{HOLDINGS, Holding, Phase, Span, Step, UNITS, Verb};
use self::sheet::{Fill, Sheet};

/// Writes all drawings.
pub(crate) fn run() -> Result<()> {
    let folder = crate::workspace::root().join("docs/src/drawings");
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    for (name, text) in drawings() {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| path.display().to_string())?;
        println!("{}", path.display());
    }
    Ok(())
}

/// All drawings, by the names of their files.
fn drawings() -> Vec<(String, String)> {
    let steps: Vec<Step> = (0..4).map(Step::of).collect();
    let longest = steps.iter().map(|step| step.end - step.begin).fold(0., f64::max);
    let largest = steps.iter().map(Step::peak).fold(0., f64::max);
    let draw = |step: &Step, tall: bool| {
        let name = format!("stage-{}-{}.svg", step.stage, if tall { "narrow" } else { "wide" });
        (name, drawing(step, Sheet::new(step.stage, tall, longest, largest)))
    };
    steps.iter().flat_map(|step| [draw(step, false), draw(step, true)]).collect()
}

fn drawing(step: &Step, mut sheet: Sheet) -> String {
    sheet.lanes();
    for (phase, name) in [(Phase::Forward, "forward"), (Phase::Backward, "backward"), (Phase::Update, "update")] {
        let mut spans = within(&step.computed, step).filter(|span| span.what == phase);
        if let Some(first) = spans.next() {
            let end = spans.last().map_or(first.end, |last| last.end);
            sheet.phase(name, first.begin - step.begin, end - step.begin);
        }
    }
    let mut reached = 0.;
    for span in within(&step.computed, step) {
        let (begin, end) = (span.begin - step.begin, span.end - step.begin);
        sheet.waiting(reached, begin);
        let fill = match span.what {
            Phase::Forward => Fill::Forward,
            Phase::Backward => Fill::Backward,
            Phase::Update => Fill::Of(Holding::Optimizer),
        };
        sheet.computed(begin, end, fill, if span.what == Phase::Update { "" } else { UNITS[span.unit].sign });
        reached = end;
    }
    sheet.waiting(reached, step.end - step.begin);
    for call in &step.calls {
        let (begin, end) = (call.begin.max(step.begin) - step.begin, call.end.min(step.end) - step.begin);
        if end > begin + 0.05 {
            sheet.call(begin, end, fill_of(call.what), UNITS[call.unit].sign);
        }
    }
    memory(step, &mut sheet);
    sheet.legend(step.stage);
    sheet.finished(&format!("One step at stage {}", step.stage), &described(step), &order(step))
}

fn within<'a, T>(spans: &'a [Span<T>], step: &'a Step) -> impl Iterator<Item = &'a Span<T>> {
    spans.iter().filter(|span| span.begin >= step.begin - 1e-9 && span.end <= step.end + 1e-9)
}

fn fill_of(verb: Verb) -> Fill {
    match verb {
        Verb::AllGather => Fill::Of(Holding::Parameters),
        Verb::ReduceScatter | Verb::AllReduce => Fill::Of(Holding::Gradients),
    }
}

/// What is held, one kind on top of the other.
fn memory(step: &Step, sheet: &mut Sheet) {
    let times = step.times(step.begin, step.end);
    let mut below = vec![0.; times.len()];
    for holding in HOLDINGS {
        let above: Vec<f64> = times.iter().zip(&below).map(|(&time, base)| base + step.held(holding, time)).collect();
        let places: Vec<f64> = times.iter().map(|time| time - step.begin).collect();
        sheet.area(holding, &places, &below, &above);
        below = above;
    }
    if step.stage > 0 {
        sheet.whole(Step::of(0).kept());
    }
}

/// The calls in their order, for the test that compares them with a real step's.
fn order(step: &Step) -> String {
    let calls: Vec<String> =
        step.asked().map(|call| format!("{} {}", call.what.name(), UNITS[call.unit].name)).collect();
    calls.join(", ")
}

fn described(step: &Step) -> String {
    let same = "Time goes on along the drawing, with what a rank computes, what is under way between ranks beside it, and \
                the memory that the rank holds.";
    let own = match step.stage {
        0 => {
            "Nothing is sliced. The gradients of each unit are all-reduced while the next one's are computed. Every rank then \
              updates all parameters. Memory is the same throughout, but for activations."
        }
        1 => {
            "Optimizer state is sliced. Gradients are reduced and scattered, each rank updates its quarter, and updated \
              parameters are gathered while the next step begins."
        }
        2 => {
            "Optimizer state and gradients are sliced. Whole gradients are there for two units at a time, until they are reduced \
              and scattered."
        }
        _ => {
            "Everything is sliced. A unit is gathered while the one before it computes, released after its forward pass, gathered \
              again for its backward pass, and released once more; gradients are reduced and scattered behind it."
        }
    };
    format!("{own} {same}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use super::*;

    #[test]
    fn drawings_are_those_of_the_schedule() {
        for (name, text) in drawings() {
            let path = crate::workspace::root().join("docs/src/drawings").join(&name);
            let found = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(found == text, "{name} is not what the schedule says: cargo xtask draw-steps, and look at it");
        }
    }

    #[test]
    fn what_is_lent_is_given_back() {
        for step in (0..4).map(Step::of) {
            let held = |time: f64| HOLDINGS.map(|holding| (1e6 * step.held(holding, time)).round());
            assert_eq!(held(step.begin - 1e-6), held(step.end - 1e-6), "stage {}", step.stage);
        }
    }

    #[test]
    fn memory_falls_from_stage_to_stage() {
        let peaks: Vec<f64> = (0..4).map(|stage| Step::of(stage).peak()).collect();
        assert!(peaks.windows(2).all(|pair| pair[1] < pair[0]), "{peaks:?}");
    }
}
