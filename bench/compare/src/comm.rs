//! `cargo compare comm`: compares reduce-scatter and all-gather with MPI's and gloo's.
//!
//! Every round runs every backend once, in rotating order. A backend prints the seconds of several calls; its result in a round is
//! their median. Backends are compared by the median over rounds of the ratio within a round, because the speed of the machine varies
//! from minute to minute.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use shardwise_harness::{launcher, python};

use crate::workspace::{build, machine, median, output_of, root, save_results, spread};

/// The options of the comparison.
#[derive(clap::Args)]
pub struct Options {
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "2,4,8")]
    pub ranks: Vec<usize>,
    /// Number of rounds; each runs every backend once
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Size of the unsharded buffer, in bytes
    #[arg(long, default_value_t = 168_000_000)]
    pub bytes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { ranks: vec![2, 4, 8], rounds: 5, bytes: 168_000_000 }
    }
}

/// The number of calls of each collective per backend and round.
const REPEATS: usize = 5;

const BACKENDS: [Backend; 3] = [Backend::Shardwise, Backend::Mpi, Backend::Gloo];
const VERBS: [&str; 2] = ["reduce-scatter", "all-gather"];

/// An implementation of the collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// This project's groups.
    Shardwise,
    /// MPI's own collectives.
    Mpi,
    /// PyTorch's gloo backend.
    Gloo,
}

/// One collective at one number of ranks.
#[derive(Serialize)]
pub struct Row {
    /// The number of ranks.
    pub ranks: usize,
    /// The collective: `reduce-scatter` or `all-gather`.
    pub verb: &'static str,
    /// The median time of each backend.
    pub seconds: BTreeMap<Backend, f64>,
    /// The speedup of Shardwise over each backend, by round.
    pub ratios: BTreeMap<Backend, Vec<f64>>,
}

impl Row {
    /// The median speedup of Shardwise over a backend.
    pub fn ratio(&self, backend: Backend) -> f64 {
        median(&self.ratios[&backend])
    }
}

/// Measures, prints the table, and saves it in bench/results.
pub fn run(options: &Options) -> Result<Vec<Row>> {
    ensure!(options.rounds > 0 && !options.ranks.contains(&0), "at least one round and one rank are needed");
    let program = build("bench-comm", &["build", "--release", "--workspace", "--bins"])?;
    let python = python().map_err(anyhow::Error::msg)?;
    let mut rows = Vec::new();
    for &ranks in &options.ranks {
        let mut rounds = Vec::new();
        for round in 0..options.rounds {
            eprintln!("{ranks} ranks, round {} of {}", round + 1, options.rounds);
            let mut order = BACKENDS;
            order.rotate_left(round % BACKENDS.len());
            let times: BTreeMap<Backend, BTreeMap<String, f64>> = order
                .into_iter()
                .map(|backend| Ok((backend, measure(backend, ranks, options.bytes, &program, &python)?)))
                .collect::<Result<_>>()?;
            rounds.push(times);
        }
        for verb in VERBS {
            let of = |backend: Backend| rounds.iter().map(move |times| times[&backend][verb]);
            let ratios =
                |backend| of(backend).zip(of(Backend::Shardwise)).map(|(theirs, ours)| theirs / ours).collect();
            rows.push(Row {
                ranks,
                verb,
                seconds: BACKENDS.map(|backend| (backend, median(&of(backend).collect::<Vec<_>>()))).into(),
                ratios: [Backend::Mpi, Backend::Gloo].map(|backend| (backend, ratios(backend))).into(),
            });
        }
    }
    let text = table(options, &rows);
    save_results("comm", &text, &rows)?;
    Ok(rows)
}

/// The median time of a backend's calls, by collective.
fn measure(
    backend: Backend,
    ranks: usize,
    bytes: usize,
    program: &Path,
    python: &Path,
) -> Result<BTreeMap<String, f64>> {
    let numbers = [bytes.to_string(), REPEATS.to_string()];
    let printed = match backend {
        Backend::Gloo => output_of(
            Command::new(python)
                .arg(root().join("bench/peers/comm_gloo.py"))
                .arg(ranks.to_string())
                .args(&numbers)
                .env("OMP_NUM_THREADS", "1"),
        )?,
        Backend::Shardwise | Backend::Mpi => {
            let name = if backend == Backend::Mpi { "mpi" } else { "shardwise" };
            let mut command = launcher(None, ranks, Duration::from_secs(600));
            output_of(command.arg("OMP_NUM_THREADS=1").arg(program).arg(name).args(&numbers))?
        }
    };
    let mut times: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for line in printed.lines() {
        let (verb, seconds) = line.split_once(' ').with_context(|| format!("{backend:?} printed '{line}'"))?;
        times.entry(verb.to_string()).or_default().push(seconds.parse()?);
    }
    ensure!(
        VERBS.iter().all(|verb| times.get(*verb).is_some_and(|all| all.len() == REPEATS)),
        "{backend:?} printed {printed}"
    );
    Ok(times.into_iter().map(|(verb, all)| (verb, median(&all))).collect())
}

fn table(options: &Options, rows: &[Row]) -> String {
    let mut text = format!(
        "# Collectives: {} MB of f32\n\nMachine: {}. {} rounds, backends interleaved; a backend's result in a round is the median of \
         {REPEATS} calls, each timed on the slowest rank. Ratios are the speedup of Shardwise: medians over rounds, with minimum and \
         maximum.\n\nCommand: `cargo compare comm`\n\n\
         | collective | ranks | Shardwise | MPI | gloo | speedup over MPI | speedup over gloo |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
        options.bytes / 1_000_000,
        machine(),
        options.rounds,
    );
    for verb in VERBS {
        for row in rows.iter().filter(|row| row.verb == verb) {
            let seconds = |backend| format!("{:.3} s", row.seconds[&backend]);
            let ratio = |backend| {
                let all = &row.ratios[&backend];
                let (least, greatest) = spread(all);
                format!("{:.2}× ({least:.2} to {greatest:.2})", row.ratio(backend))
            };
            writeln!(
                text,
                "| {verb} | {} | {} | {} | {} | {} | {} |",
                row.ranks,
                seconds(Backend::Shardwise),
                seconds(Backend::Mpi),
                seconds(Backend::Gloo),
                ratio(Backend::Mpi),
                ratio(Backend::Gloo),
            )
            .expect("writing to a string cannot fail");
        }
    }
    text
}
