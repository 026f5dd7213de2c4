//! `cargo xtask growth`: what a rank pays as ranks are added, with the same work for each.

use std::fmt::Write as _;

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::claims::Verdict;
use crate::draw::{self, Line, Lines};
use crate::sides::{Ground, Precision, Run, Side, Size, Work, rounds};
use crate::workspace::{machine, median, results, root};

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

/// Both bare sides are what the others' computing is known from.
const SIDES: [Side; 5] = [Side::Bare, Side::Shardwise(1), Side::Shardwise(3), Side::PyTorch, Side::Fsdp2];

/// One side at one number of ranks; medians over rounds, for one rank.
#[derive(Clone, Copy, Serialize)]
struct Point {
    side: Side,
    ranks: usize,
    sent_bytes: f64,
    /// Of a step, outside of what the same framework's bare side takes for it on as many ranks.
    extra_cpu_s: f64,
    /// The same for a step of the bare side: kernels, and what autograd and the optimizer need around them.
    bare_cpu_s: f64,
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
    let work = Work { sequences: 1, positions: 64, ..Work::new(Size::Small, Precision::F32, 4) };
    let ground = Ground::new(&work)?;
    let mut points = Vec::new();
    for &ranks in ranks {
        let rounds = rounds(&ground, &work, &SIDES, ranks, count)?;
        let of = |side: Side| -> Vec<Run> {
            rounds.iter().flatten().filter(|(other, _)| *other == side).map(|(_, run)| *run).collect()
        };
        for side in [Side::Shardwise(1), Side::Shardwise(3), Side::Fsdp2] {
            let bare = of(if side.is_peer() { Side::PyTorch } else { Side::Bare });
            let own = of(side);
            let middle = |figure: fn(&Run) -> f64| median(&own.iter().map(figure).collect::<Vec<_>>());
            let extra: Vec<f64> = own.iter().zip(&bare).map(|(own, bare)| own.cpu_s - bare.cpu_s).collect();
            points.push(Point {
                side,
                ranks,
                sent_bytes: middle(|run| run.sent_bytes),
                extra_cpu_s: median(&extra),
                bare_cpu_s: median(&bare.iter().map(|run| run.cpu_s).collect::<Vec<_>>()),
                peak_bytes: middle(|run| run.peak_bytes),
                ready_s: middle(|run| run.ready_s),
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
         {count} rounds, sides interleaved; medians. 'Extra CPU' is a rank's processor time in a step less that of the same \
         framework without any communication on as many ranks, which stands beside it.\n\n\
         Command: `cargo xtask growth --ranks {} --rounds {count}`\n\n![plot](plot.svg)\n\n\
         | side | ranks | sent a step | extra CPU a step | bare CPU a step | peak | to the first step |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
        work.size,
        work.precision,
        work.sequences * work.positions,
        machine(),
        listed.join(","),
    );
    let mut sorted = points.to_vec();
    sorted.sort_by_key(|point| (point.side, point.ranks));
    for point in &sorted {
        writeln!(
            text,
            "| {} | {} | {:.1} MB | {:.3} s | {:.3} s | {:.0} MB | {:.2} s |",
            point.side,
            point.ranks,
            point.sent_bytes / 1e6,
            point.extra_cpu_s,
            point.bare_cpu_s,
            point.peak_bytes / 1e6,
            point.ready_s
        )
        .expect("a string takes any text");
    }
    println!("{text}");
    let folder = results("growth")?;
    let to = root().join(&folder);
    std::fs::write(to.join("table.md"), text)?;
    let json = serde_json::json!({ "machine": machine(), "points": points });
    std::fs::write(to.join("rows.json"), serde_json::to_string_pretty(&json)? + "\n")?;
    let panel = |title: &str, unit, figure: fn(&Point) -> f64| Lines {
        title: title.to_string(),
        unit,
        lines: [Side::Shardwise(1), Side::Shardwise(3), Side::Fsdp2]
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
    let panels = [
        panel("Sent by a rank in a step", "MB", |point| point.sent_bytes / 1e6),
        panel("Processor time of a rank in a step beside the model's own", "seconds", |point| point.extra_cpu_s),
        panel("Peak memory of a rank", "GB", |point| point.peak_bytes / 1e9),
        panel("From launch to the first step (2 cores)", "seconds", |point| point.ready_s),
    ];
    draw::lines(&to.join("plot.svg"), &panels)?;
    println!("kept in {}", folder.display());
    Ok(())
}

/// The claim peers/growth.
pub(crate) fn claim() -> Result<Verdict> {
    let points = measured(&[1, 2, 4, 8, 16], ROUNDS)?;
    let of =
        |side, ranks| points.iter().find(|point| (point.side, point.ranks) == (side, ranks)).expect("was measured");
    let (mut figures, mut holds) = (Vec::new(), true);
    for stage in [1u8, 3] {
        let (few, many) = (of(Side::Shardwise(stage), 2), of(Side::Shardwise(stage), 16));
        // A rank sends (N−1)/N of what is gathered and reduced.
        let theory = (15. / 16.) / (1. / 2.);
        let (bytes, cpu) = (many.sent_bytes / few.sent_bytes, many.extra_cpu_s / few.extra_cpu_s);
        holds &= (bytes / theory - 1.).abs() < 0.01 && cpu <= bytes;
        figures.push(format!("stage {stage}: bytes {bytes:.2} times (theory {theory:.2}), CPU {cpu:.2} times"));
    }
    Ok(Verdict { figure: figures.join("; "), bar: "CPU grows no more than bytes".to_string(), holds })
}
