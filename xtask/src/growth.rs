//! `cargo xtask growth`: what a rank pays as ranks are added, with the same work for each.

use std::fmt::Write as _;

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::claims::Verdict;
use crate::draw::{self, Line, Lines};
use crate::sides::{Ground, Precision, Run, SENT, Side, Size, Work, middle, rounds};
use crate::workspace::{self, machine, median};

/// How far to go.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16")]
    ranks: Vec<usize>,
    /// Rounds, each of which runs every side once
    #[arg(long, default_value_t = ROUNDS)]
    rounds: usize,
}

const ROUNDS: usize = 3;

const SHOWN: [Side; 3] = [Side::Shardwise(1), Side::Shardwise(3), Side::Fsdp2];

/// The bare sides are what the others' computing is known from.
const RUN: [Side; 5] = [Side::Bare, Side::Shardwise(1), Side::Shardwise(3), Side::PyTorch, Side::Fsdp2];

/// One side at one number of ranks; medians over rounds, for one rank.
#[derive(Clone, Copy, Serialize)]
struct Point {
    side: Side,
    ranks: usize,
    sent_bytes: f64,
    /// Of a step: forward, backward and this rank's part of the update, as the same framework's bare side takes them on as many
    /// ranks.
    model_cpu_s: f64,
    /// The rest.
    extra_cpu_s: f64,
    peak_bytes: f64,
    ready_s: f64,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(options.rounds > 0 && !options.ranks.contains(&0), "at least one round and one rank are needed");
    measured(&options.ranks, options.rounds).map(drop)
}

/// Measures, prints the table and keeps it in bench/results.
fn measured(ranks: &[usize], count: usize) -> Result<Vec<Point>> {
    // Little computing, so that what surrounds it shows.
    let work = Work { sequences: 1, positions: 64, ..Work::new(Size::Small, Precision::F32) };
    let ground = Ground::new(&work)?;
    let mut points = Vec::new();
    for &ranks in ranks {
        let rounds = rounds(&ground, &work, &RUN, ranks, count)?;
        let of = |side: Side| -> Vec<Run> {
            rounds.iter().flatten().filter(|(other, _)| *other == side).map(|(_, run)| *run).collect()
        };
        for side in SHOWN {
            let own = of(side);
            // A rank updates its own slice, the bare side everything.
            let sliced = |bare: &Run| bare.cpu_s - bare.optimizer_cpu_s * (1. - 1. / ranks as f64);
            let model: Vec<f64> = of(side.bare()).iter().map(sliced).collect();
            let extra: Vec<f64> = own.iter().zip(&model).map(|(own, model)| own.cpu_s - model).collect();
            points.push(Point {
                side,
                ranks,
                sent_bytes: middle(&own, |run| run.sent_bytes),
                model_cpu_s: median(&model),
                extra_cpu_s: median(&extra),
                peak_bytes: middle(&own, |run| run.peak_bytes),
                ready_s: middle(&own, |run| run.ready_s),
            });
        }
    }
    keep(&work, count, ranks, &points)?;
    Ok(points)
}

fn keep(work: &Work, count: usize, ranks: &[usize], points: &[Point]) -> Result<()> {
    let listed: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let mut text = format!(
        "# As ranks are added: {} parameters, {}, {} tokens per rank and step\n\n\
         Machine: {}. One thread per rank, so from 3 ranks on they share cores: processor time is comparable, time is not. \
         {count} rounds, sides interleaved; medians. 'Model' is a rank's processor time for forward, backward and its part of the \
         update, as the same framework without any communication takes it on as many ranks; 'extra' is all the rest. {SENT}\n\n\
         Command: `cargo xtask growth --ranks {} --rounds {count}`\n\n![plot](plot.svg)\n\n\
         | side | ranks | sent a step | extra CPU a step | model CPU a step | peak | to the first step |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
        work.size,
        work.precision,
        work.sequences * work.positions,
        machine(),
        listed.join(","),
    );
    for side in SHOWN {
        for point in points.iter().filter(|point| point.side == side) {
            writeln!(
                text,
                "| {side} | {} | {:.1} MB | {:.3} s | {:.3} s | {:.0} MB | {:.2} s |",
                point.ranks,
                point.sent_bytes / 1e6,
                point.extra_cpu_s,
                point.model_cpu_s,
                point.peak_bytes / 1e6,
                point.ready_s
            )
            .expect("a string takes any text");
        }
    }
    let folder = workspace::keep("growth", &text, &serde_json::json!({ "machine": machine(), "points": points }))?;
    draw::lines(&folder.join("plot.svg"), &panels(points))
}

fn panels(points: &[Point]) -> [Lines; 4] {
    let panel = |title: &str, unit, figure: fn(&Point) -> f64| Lines {
        title: title.to_string(),
        unit,
        lines: SHOWN
            .map(|side| Line {
                name: side.to_string(),
                points: points
                    .iter()
                    .filter(|point| point.side == side)
                    .map(|point| (point.ranks, figure(point)))
                    .collect(),
                colour: if side.is_peer() { draw::THEIRS } else { draw::OURS },
                dashed: side == Side::Shardwise(1),
            })
            .into(),
    };
    [
        panel("Sent by a rank in a step", "MB", |point| point.sent_bytes / 1e6),
        panel("Processor time of a rank in a step beside the model's own", "seconds", |point| point.extra_cpu_s),
        panel("Peak memory of a rank", "GB", |point| point.peak_bytes / 1e9),
        panel("From launch to the first step (2 cores)", "seconds", |point| point.ready_s),
    ]
}

/// The claim peers/growth.
pub(crate) fn claim() -> Result<Verdict> {
    let points = measured(&[1, 2, 4, 8, 16], ROUNDS)?;
    let of =
        |side, ranks| points.iter().find(|point| (point.side, point.ranks) == (side, ranks)).expect("was measured");
    let (mut figures, mut holds) = (Vec::new(), true);
    for stage in [1u8, 3] {
        let (few, many) = (of(Side::Shardwise(stage), 2), of(Side::Shardwise(stage), 16));
        ensure!(few.extra_cpu_s > 0., "nothing is left beside the model's own: too noisy to tell");
        // A rank sends (N−1)/N of what is gathered and reduced.
        let theory = (15. / 16.) / (1. / 2.);
        let (bytes, cpu) = (many.sent_bytes / few.sent_bytes, many.extra_cpu_s / few.extra_cpu_s);
        holds &= (bytes / theory - 1.).abs() < 0.01 && cpu <= bytes;
        figures.push(format!("stage {stage}: bytes {bytes:.2} times (theory {theory:.2}), CPU {cpu:.2} times"));
    }
    Ok(Verdict { figure: figures.join("; "), bar: "CPU grows no more than bytes".to_string(), holds })
}
