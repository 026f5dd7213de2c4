//! `cargo compare growth`: measures weak scaling, the cost per rank as ranks are added, each with the same workload.

use std::fmt::Write as _;

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::frameworks::{Bench, Framework, Layout, Precision, Run, SENT, Size, Workload, median_of, run_rounds};
use crate::plot::{self, Line, Lines};
use crate::workspace::{self, machine, median};

/// The options of the measurement.
#[derive(clap::Args)]
pub struct Options {
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16")]
    ranks: Vec<usize>,
    /// Number of rounds; each runs every framework once
    #[arg(long, default_value_t = ROUNDS)]
    rounds: usize,
}

/// The default number of rounds.
pub const ROUNDS: usize = 3;

const PLOTTED: [Framework; 3] = [Framework::Shardwise(1), Framework::Shardwise(3), Framework::Fsdp2];

/// The bare baselines measure the computation alone.
const RUN: [Framework; 5] =
    [Framework::Bare, Framework::Shardwise(1), Framework::Shardwise(3), Framework::PyTorch, Framework::Fsdp2];

/// One framework at one number of ranks: medians over rounds, per rank.
#[derive(Clone, Copy, Serialize)]
pub struct Point {
    /// The framework.
    pub framework: Framework,
    /// The number of ranks.
    pub ranks: usize,
    /// The bytes that a rank sends in a step.
    pub sent_bytes: f64,
    /// The CPU time of a step for forward, backward and this rank's part of the update, as measured with the bare baseline on the
    /// same number of ranks.
    pub model_cpu_s: f64,
    /// The remaining CPU time of a step.
    pub extra_cpu_s: f64,
    /// The peak memory.
    pub peak_bytes: f64,
    /// The time from launch to the first step.
    pub ready_s: f64,
}

/// Runs the measurement.
pub fn run(options: &Options) -> Result<()> {
    ensure!(options.rounds > 0 && !options.ranks.contains(&0), "at least one round and one rank are needed");
    measure(&options.ranks, options.rounds).map(drop)
}

/// Measures, prints the table and saves it in bench/results.
pub fn measure(ranks: &[usize], count: usize) -> Result<Vec<Point>> {
    // Compute little, so that the overhead shows.
    let workload = Workload { micro_batch_size: 1, seq_len: 64, ..Workload::new(Size::Small, Precision::F32) };
    let bench = Bench::new(&workload)?;
    let mut points = Vec::new();
    for &ranks in ranks {
        let rounds = run_rounds(&bench, &workload, &RUN, Layout::data_parallel(ranks), count)?;
        let of = |framework: Framework| -> Vec<Run> {
            rounds.iter().flatten().filter(|(other, _)| *other == framework).map(|(_, run)| *run).collect()
        };
        for framework in PLOTTED {
            let own = of(framework);
            // A rank updates only its own shard; the bare baseline updates everything.
            let sharded = |bare: &Run| bare.cpu_s - bare.optimizer_cpu_s * (1. - 1. / ranks as f64);
            let model: Vec<f64> = of(framework.bare()).iter().map(sharded).collect();
            let extra: Vec<f64> = own.iter().zip(&model).map(|(own, model)| own.cpu_s - model).collect();
            points.push(Point {
                framework,
                ranks,
                sent_bytes: median_of(&own, |run| run.sent_bytes),
                model_cpu_s: median(&model),
                extra_cpu_s: median(&extra),
                peak_bytes: median_of(&own, |run| run.peak_bytes),
                ready_s: median_of(&own, |run| run.ready_s),
            });
        }
    }
    save(&workload, count, ranks, &points)?;
    Ok(points)
}

fn save(workload: &Workload, count: usize, ranks: &[usize], points: &[Point]) -> Result<()> {
    let listed: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let mut text = format!(
        "# Weak scaling: {} parameters, {}, {} tokens per rank and step\n\n\
         Machine: {}. One thread per rank; from 3 ranks on they share cores, so CPU time is comparable and wall-clock time is not. \
         {count} rounds, frameworks interleaved; medians. 'Model' is a rank's CPU time for forward, backward and its part of the update, \
         measured with the same framework without communication on the same number of ranks; 'extra' is the rest. {SENT}\n\n\
         Command: `cargo compare growth --ranks {} --rounds {count}`\n\n![plot](plot.svg)\n\n\
         | framework | ranks | sent per step | extra CPU per step | model CPU per step | peak memory | launch to first step |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
        workload.size,
        workload.precision,
        workload.micro_batch_size * workload.seq_len,
        machine(),
        listed.join(","),
    );
    for framework in PLOTTED {
        for point in points.iter().filter(|point| point.framework == framework) {
            writeln!(
                text,
                "| {framework} | {} | {:.1} MB | {:.3} s | {:.3} s | {:.0} MB | {:.2} s |",
                point.ranks,
                point.sent_bytes / 1e6,
                point.extra_cpu_s,
                point.model_cpu_s,
                point.peak_bytes / 1e6,
                point.ready_s
            )
            .expect("writing to a string cannot fail");
        }
    }
    let folder =
        workspace::save_results("growth", &text, &serde_json::json!({ "machine": machine(), "points": points }))?;
    plot::lines(&folder.join("plot.svg"), &panels(points))
}

fn panels(points: &[Point]) -> [Lines; 4] {
    let panel = |title: &str, unit, figure: fn(&Point) -> f64| Lines {
        title: title.to_string(),
        unit,
        lines: PLOTTED
            .map(|framework| Line {
                name: framework.to_string(),
                points: points
                    .iter()
                    .filter(|point| point.framework == framework)
                    .map(|point| (point.ranks, figure(point)))
                    .collect(),
                colour: if framework.is_peer() { plot::THEIRS } else { plot::OURS },
                dashed: framework == Framework::Shardwise(1),
            })
            .into(),
    };
    [
        panel("Sent per rank and step", "MB", |point| point.sent_bytes / 1e6),
        panel("CPU time per rank and step, without the model's own", "seconds", |point| point.extra_cpu_s),
        panel("Peak memory per rank", "GB", |point| point.peak_bytes / 1e9),
        panel("Launch to first step (2 cores)", "seconds", |point| point.ready_s),
    ]
}
