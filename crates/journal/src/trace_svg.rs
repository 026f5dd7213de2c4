//! Draws one step of a trace as SVG: a lane for the training thread of each rank and one for its communication, on one time axis.
//!
//! It is meant for documents; for details, open the trace in Perfetto. The palette is Okabe and Ito's, which is safe for
//! colour-blind readers.

use std::fmt::Write;

use crate::spans::{Kind, Span, Thread, Trace};

/// The maximum number of ranks that are drawn, and of spans per rank.
const RANKS_DRAWN_MAX: usize = 8;
const SPANS_DRAWN_MAX: usize = 20_000;

const WIDTH: f64 = 1000.;
const LEFT: f64 = 120.;
const TOP: f64 = 46.;
const LANE: f64 = 20.;

fn colour(kind: Kind) -> &'static str {
    match kind {
        Kind::Forward => "#56b4e9",
        Kind::Recompute => "#a6d8f4",
        Kind::Backward => "#0072b2",
        Kind::Gather => "#009e73",
        Kind::Reduce => "#e69f00",
        Kind::Optimizer => "#cc79a7",
        Kind::Fetch | Kind::Store => "#d55e00",
        Kind::Agree => "#999999",
        Kind::Data => "#f0e442",
        Kind::Wait => "#eeeeee",
        Kind::Evaluation | Kind::Save | Kind::Between => "#bbbbbb",
    }
}

/// Draws the last step of a trace as SVG.
pub fn trace_svg(trace: &Trace) -> String {
    let step = trace.spans.iter().map(|span| span.step).max().unwrap_or(0);
    let of_step = || trace.spans.iter().filter(|span| span.step == step && span.thread != Thread::Saving);
    let from = of_step().map(|span| span.start_ns).min().unwrap_or(0);
    let to = of_step().map(Span::end_ns).max().unwrap_or(0).max(from + 1);
    let scale = (WIDTH - LEFT - 10.) / (to - from) as f64;
    let ranks: Vec<usize> = trace.ranks.iter().map(|(rank, _)| *rank).take(RANKS_DRAWN_MAX).collect();
    let height = TOP + 2. * LANE * ranks.len() as f64 + 8. * ranks.len() as f64 + 24.;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    let mut text = |x: f64, y: f64, anchor: &str, text: &str| {
        // Writing to a string does not fail.
        let _ =
            writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#222222\">{text}</text>");
    };
    let milliseconds = (to - from) as f64 / 1e6;
    text(LEFT, 14., "start", &format!("step {step}: {milliseconds:.1} ms"));
    let mut x = LEFT;
    let mut boxes = Vec::new();
    for (kind, name) in Kind::ALL.iter().filter(|(kind, _)| of_step().any(|span| span.kind == *kind)) {
        boxes.push((x, *kind));
        text(x + 14., 33., "start", name);
        x += 24. + 6.5 * name.len() as f64;
    }
    let lane = |index: usize| TOP + index as f64 * (2. * LANE + 8.);
    for (index, rank) in ranks.iter().enumerate() {
        text(LEFT - 8., lane(index) + 14., "end", &format!("rank {rank}"));
        text(LEFT - 8., lane(index) + LANE + 14., "end", "communication");
    }
    text(LEFT, height - 8., "start", "0");
    text(WIDTH - 10., height - 8., "end", &format!("{milliseconds:.1} ms"));
    for (x, kind) in boxes {
        let _ = writeln!(out, "<rect x=\"{x:.1}\" y=\"24\" width=\"10\" height=\"10\" fill=\"{}\"/>", colour(kind));
    }
    for (index, rank) in ranks.iter().enumerate() {
        for span in of_step().filter(|span| span.rank == *rank).take(SPANS_DRAWN_MAX) {
            let width = span.length_ns as f64 * scale;
            // Too narrow to be seen.
            if width < 0.2 {
                continue;
            }
            let y = lane(index) + if span.thread == Thread::Training { 0. } else { LANE };
            let x = LEFT + (span.start_ns - from) as f64 * scale;
            let _ = writeln!(
                out,
                "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{:.1}\" fill=\"{}\"><title>{}</title></rect>",
                LANE - 2.,
                colour(span.kind),
                escape(&span.name())
            );
        }
    }
    out + "</svg>\n"
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spans::{TraceInfo, TraceRank};

    #[test]
    fn every_rank_has_lanes_and_names_are_escaped() {
        let span = |rank: usize, kind, start_ns: i64| Span {
            rank,
            thread: Thread::Training,
            kind,
            step: 3,
            unit: Some("<b&".to_string()),
            start_ns,
            length_ns: 5_000_000,
            call: None,
        };
        let spans = vec![span(0, Kind::Forward, 0), span(1, Kind::Backward, 5_000_000)];
        let ranks = (0..2).map(|rank| (rank, TraceRank::default())).collect();
        let picture = trace_svg(&Trace { info: TraceInfo::default(), ranks, spans });
        assert!(picture.contains("step 3: 10.0 ms") && picture.contains(">rank 1<"), "{picture}");
        assert!(picture.contains("forward &lt;b&amp;") && !picture.contains("<b&"), "{picture}");
        assert!(trace_svg(&Trace::default()).ends_with("</svg>\n"));
    }
}
