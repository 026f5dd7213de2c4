//! The guide's drawings: a step at each ZeRO stage, and one of each pipeline schedule. `cargo drawings` writes them to
//! `docs/src/drawings`.
//!
//! Each drawing has two versions, for wide and for narrow windows. They are inlined in the page: lines and letters have the page's
//! text color, so that they are readable on light and dark backgrounds. Patterns and positions carry the same information as
//! colors, for print and for color-blind readers.

#![forbid(unsafe_code)]

mod canvas;
mod pipeline;
mod schedule;
mod sheet;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use shardwise_plan::program::{MemoryKind, Span};

use crate::canvas::Fill;
use crate::schedule::{MEMORY_KINDS, Phase, Step, sign};
use crate::sheet::{BACKWARD, FORWARD, Sheet, fill_of};

/// Writes all drawings.
fn main() -> Result<()> {
    let folder = folder();
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    for (name, text) in drawings() {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| path.display().to_string())?;
        println!("{}", path.display());
    }
    Ok(())
}

/// The folder of the drawings.
fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("src").join("drawings")
}

/// All drawings with their file names.
fn drawings() -> Vec<(String, String)> {
    let steps: Vec<Step> = (0..4).map(Step::of).collect();
    let longest = steps.iter().map(Step::duration).fold(0., f64::max);
    let largest = steps.iter().map(Step::peak).fold(0., f64::max);
    let draw = |step: &Step, tall: bool| {
        let name = format!("stage-{}-{}.svg", step.stage, if tall { "narrow" } else { "wide" });
        (name, drawing(step, Sheet::new(step.stage, tall, longest, largest)))
    };
    let steps = steps.iter().flat_map(|step| [draw(step, false), draw(step, true)]);
    steps.chain(pipeline::drawings()).collect()
}

fn drawing(step: &Step, mut sheet: Sheet) -> String {
    sheet.lanes();
    for (phase, name) in [(Phase::Forward, "forward"), (Phase::Backward, "backward"), (Phase::Update, "update")] {
        let mut spans = step.computed().filter(|span| step.phase(span) == phase);
        if let Some(first) = spans.next() {
            sheet.phase(name, first.start_s, spans.last().unwrap_or(first).end_s);
        }
    }
    let mut reached = 0.;
    for span in step.computed() {
        sheet.waiting(reached, span.start_s);
        let (fill, sign) = match step.phase(span) {
            Phase::Forward => (FORWARD, sign(span)),
            Phase::Backward => (BACKWARD, sign(span)),
            Phase::Update => (fill_of(MemoryKind::Optimizer), ""),
        };
        sheet.computed(span.start_s, span.end_s, fill, sign);
        reached = span.end_s;
    }
    sheet.waiting(reached, step.duration());
    for span in step.sent() {
        let end = span.end_s.min(step.duration());
        if end > span.start_s + 0.05 {
            sheet.call(span.start_s, end, fill_of_call(span), sign(span));
        }
    }
    memory(step, &mut sheet);
    sheet.legend(step.stage);
    sheet.finish(&format!("One step at stage {}", step.stage), &describe(step), &step.calls.join(", "))
}

/// All-gathers send parameters, and everything else gradients.
fn fill_of_call(span: &Span) -> Fill {
    match span.label.starts_with("all-gather") {
        true => fill_of(MemoryKind::Parameters),
        false => fill_of(MemoryKind::Gradients),
    }
}

/// Draws the memory over time, stacked by kind.
fn memory(step: &Step, sheet: &mut Sheet) {
    let times = step.times();
    let mut below = vec![0.; times.len()];
    for kind in MEMORY_KINDS {
        let above: Vec<f64> = times.iter().zip(&below).map(|(&time, base)| base + step.held(kind, time)).collect();
        sheet.area(kind, &times, &below, &above);
        below = above;
    }
    if step.stage > 0 {
        sheet.whole(Step::of(0).kept());
    }
}

fn describe(step: &Step) -> String {
    let same = "Time runs along the drawing, with the computation of a rank, the communication that overlaps it, and the \
                memory that the rank holds.";
    let own = match step.stage {
        0 => {
            "Nothing is sharded. The gradients of each unit are all-reduced while the next unit's are computed. Then every rank \
              updates all parameters, and frees the gradients."
        }
        1 => {
            "Optimizer state is sharded. Gradients are reduce-scattered, each rank updates its quarter, and updated parameters are \
              all-gathered while the next step starts."
        }
        2 => {
            "Optimizer state and gradients are sharded. Unsharded gradients exist for two units at a time, until they are \
              reduce-scattered."
        }
        _ => {
            "Everything is sharded. A unit is all-gathered while the one before it computes, released after its forward pass, \
              gathered again for its backward pass, and released again; gradients are reduce-scattered while the next unit \
              computes."
        }
    };
    format!("{own} {same}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use super::*;

    #[test]
    fn the_drawings_match_the_schedule() {
        for (name, text) in drawings() {
            let path = folder().join(&name);
            let found = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(found == text, "{name} does not match the schedule: run cargo drawings and look at it");
        }
    }

    #[test]
    fn only_shards_are_held_between_steps() {
        for step in (0..4).map(Step::of) {
            let kept = [MemoryKind::Optimizer, MemoryKind::Parameters];
            let kept: f64 = kept.iter().map(|&kind| step.held(kind, 0.)).sum();
            assert_eq!(step.kept(), kept, "stage {}", step.stage);
        }
    }

    #[test]
    fn memory_falls_from_stage_to_stage() {
        let peaks: Vec<f64> = (0..4).map(|stage| Step::of(stage).peak()).collect();
        assert!(peaks.windows(2).all(|pair| pair[1] < pair[0]), "{peaks:?}");
    }
}
