//! `cargo xtask bench-comm`: reduce-scatter and all-gather beside MPI's own and gloo's.
//!
//! Every round starts every side once, in an order that rotates. A side prints the seconds of several calls; its figure of a
//! round is their median, and what is compared is the median over rounds of the ratio within a round, because the machine
//! is faster in some minutes than in others.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use shardwise_harness::{launcher, python};

use crate::workspace::{built, keep, machine, median, output_of, root, spread};

/// What to compare.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "2,4,8")]
    pub(crate) ranks: Vec<usize>,
    /// Rounds, each of which runs every side
    #[arg(long, default_value_t = 5)]
    pub(crate) rounds: usize,
    /// The size of the whole that is reduced or gathered
    #[arg(long, default_value_t = 168_000_000)]
    pub(crate) bytes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { ranks: vec![2, 4, 8], rounds: 5, bytes: 168_000_000 }
    }
}

/// Calls of each verb that a side makes in a round.
const REPEATS: usize = 5;

const SIDES: [Side; 3] = [Side::Shardwise, Side::Mpi, Side::Gloo];
const VERBS: [&str; 2] = ["reduce-scatter", "all-gather"];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Side {
    Shardwise,
    Mpi,
    Gloo,
}

/// One verb at one number of ranks.
#[derive(Serialize)]
pub(crate) struct Row {
    pub(crate) ranks: usize,
    pub(crate) verb: &'static str,
    /// The median of each side.
    pub(crate) seconds: BTreeMap<Side, f64>,
    /// How many times faster Shardwise was than the side, in each round.
    pub(crate) ratios: BTreeMap<Side, Vec<f64>>,
}

impl Row {
    /// How many times faster Shardwise is than the side.
    pub(crate) fn ratio(&self, side: Side) -> f64 {
        median(&self.ratios[&side])
    }
}

/// Measures, prints the table, and keeps it in bench/results.
pub(crate) fn run(options: &Options) -> Result<Vec<Row>> {
    ensure!(options.rounds > 0 && !options.ranks.contains(&0), "at least one round and one rank are needed");
    let program = built("bench-comm", &["build", "--release", "--workspace", "--bins"])?;
    let python = python().map_err(anyhow::Error::msg)?;
    let mut rows = Vec::new();
    for &ranks in &options.ranks {
        let mut rounds = Vec::new();
        for round in 0..options.rounds {
            eprintln!("{ranks} ranks, round {} of {}", round + 1, options.rounds);
            let mut order = SIDES;
            order.rotate_left(round % SIDES.len());
            let times: BTreeMap<Side, BTreeMap<String, f64>> = order
                .into_iter()
                .map(|side| Ok((side, measured(side, ranks, options.bytes, &program, &python)?)))
                .collect::<Result<_>>()?;
            rounds.push(times);
        }
        for verb in VERBS {
            let of = |side: Side| rounds.iter().map(move |times| times[&side][verb]);
            let ratios = |side| of(side).zip(of(Side::Shardwise)).map(|(theirs, ours)| theirs / ours).collect();
            rows.push(Row {
                ranks,
                verb,
                seconds: SIDES.map(|side| (side, median(&of(side).collect::<Vec<_>>()))).into(),
                ratios: [Side::Mpi, Side::Gloo].map(|side| (side, ratios(side))).into(),
            });
        }
    }
    let text = table(options, &rows);
    keep("comm", &text, &rows)?;
    Ok(rows)
}

/// The median seconds of a side's calls, by verb.
fn measured(side: Side, ranks: usize, bytes: usize, program: &Path, python: &Path) -> Result<BTreeMap<String, f64>> {
    let numbers = [bytes.to_string(), REPEATS.to_string()];
    let printed = match side {
        Side::Gloo => output_of(
            Command::new(python)
                .arg(root().join("bench/peers/comm_gloo.py"))
                .arg(ranks.to_string())
                .args(&numbers)
                .env("OMP_NUM_THREADS", "1"),
        )?,
        Side::Shardwise | Side::Mpi => {
            let name = if side == Side::Mpi { "mpi" } else { "shardwise" };
            let mut command = launcher(None, ranks, Duration::from_secs(600));
            output_of(command.arg("OMP_NUM_THREADS=1").arg(program).arg(name).args(&numbers))?
        }
    };
    let mut times: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for line in printed.lines() {
        let (verb, seconds) = line.split_once(' ').with_context(|| format!("{side:?} printed '{line}'"))?;
        times.entry(verb.to_string()).or_default().push(seconds.parse()?);
    }
    ensure!(
        VERBS.iter().all(|verb| times.get(*verb).is_some_and(|all| all.len() == REPEATS)),
        "{side:?} printed {printed}"
    );
    Ok(times.into_iter().map(|(verb, all)| (verb, median(&all))).collect())
}

fn table(options: &Options, rows: &[Row]) -> String {
    let mut text = format!(
        "# Collectives: {} MB of f32\n\nMachine: {}. {} rounds, sides interleaved; a side's figure of a round is the median of \
         {REPEATS} calls, the slowest rank's time each. Ratios are how many times faster Shardwise is, medians over rounds \
         with the least and greatest.\n\nCommand: `cargo xtask bench-comm`\n\n\
         | verb | ranks | Shardwise | MPI's own | gloo | against MPI | against gloo |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
        options.bytes / 1_000_000,
        machine(),
        options.rounds,
    );
    for verb in VERBS {
        for row in rows.iter().filter(|row| row.verb == verb) {
            let seconds = |side| format!("{:.3} s", row.seconds[&side]);
            let ratio = |side| {
                let all = &row.ratios[&side];
                let (least, greatest) = spread(all);
                format!("{:.2}× ({least:.2} to {greatest:.2})", row.ratio(side))
            };
            writeln!(
                text,
                "| {verb} | {} | {} | {} | {} | {} | {} |",
                row.ranks,
                seconds(Side::Shardwise),
                seconds(Side::Mpi),
                seconds(Side::Gloo),
                ratio(Side::Mpi),
                ratio(Side::Gloo),
            )
            .expect("a string takes any text");
        }
    }
    text
}
