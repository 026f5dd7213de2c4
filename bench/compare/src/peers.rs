//! `cargo compare peers`: trains the same model with Shardwise, bare libtorch, PyTorch and DeepSpeed.

use std::fmt::Write as _;

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::frameworks::{
    Bench, FRAMEWORKS, Framework, Precision, Run, SENT, Size, WARM_UP, Workload, median_of, run_rounds,
};
use crate::plot::{self, Bars};
use crate::workspace::{machine, median, save_results, spread};

/// The options of the comparison.
#[derive(clap::Args)]
pub struct Options {
    /// Size of the model
    #[arg(long, value_enum, default_value = "42m")]
    size: Size,
    /// Type of the parameters; master weights and reductions are f32
    #[arg(long, value_enum, default_value = "f32")]
    precision: Precision,
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "2")]
    ranks: Vec<usize>,
    /// Number of rounds; each runs every framework once
    #[arg(long, default_value_t = ROUNDS)]
    rounds: usize,
}

/// The default number of rounds.
pub const ROUNDS: usize = 5;

/// The results of all frameworks at one number of ranks.
#[derive(Clone, Serialize)]
pub struct Table {
    /// The number of ranks.
    pub ranks: usize,
    /// One row for each framework, in the order of [`FRAMEWORKS`].
    pub rows: Vec<Row>,
}

/// The results of one framework.
#[derive(Clone, Serialize)]
pub struct Row {
    /// The framework.
    pub framework: Framework,
    /// Its runs, by round.
    pub runs: Vec<Run>,
    /// The speedup of Shardwise at the same stage, by round.
    pub ratios: Vec<f64>,
    /// Its speed as a fraction of its bare baseline's, by round.
    pub of_bare: Vec<f64>,
}

impl Row {
    fn median_of(&self, figure: fn(&Run) -> f64) -> f64 {
        median_of(&self.runs, figure)
    }

    fn figures(&self, figure: fn(&Run) -> f64) -> Vec<f64> {
        self.runs.iter().map(figure).collect()
    }
}

impl Table {
    /// The row of a framework.
    pub fn row(&self, framework: Framework) -> &Row {
        self.rows.iter().find(|row| row.framework == framework).expect("every framework has a row")
    }
}

/// Runs the comparison.
pub fn run(options: &Options) -> Result<()> {
    ensure!(options.rounds > 0 && !options.ranks.contains(&0), "at least one round and one rank are needed");
    measure(options.size, options.precision, &options.ranks, options.rounds).map(drop)
}

/// Measures, prints the tables and saves them in bench/results.
pub fn measure(size: Size, precision: Precision, ranks: &[usize], count: usize) -> Result<Vec<Table>> {
    let workload = Workload::new(size, precision);
    let bench = Bench::new(&workload)?;
    let mut tables = Vec::new();
    for &ranks in ranks {
        let rounds = run_rounds(&bench, &workload, &FRAMEWORKS, ranks, count)?;
        tables.push(table(ranks, &rounds));
    }
    save_tables(&workload, count, &tables)?;
    Ok(tables)
}

fn table(ranks: usize, rounds: &[Vec<(Framework, Run)>]) -> Table {
    let of = |framework: Framework| -> Vec<Run> {
        rounds
            .iter()
            .flat_map(|runs| runs.iter().filter(|(other, _)| *other == framework).map(|(_, run)| *run))
            .collect()
    };
    let ratios = |over: &[Run], under: &[Run]| over.iter().zip(under).map(|(a, b)| a.step_s / b.step_s).collect();
    let row = |framework: Framework| Row {
        framework,
        ratios: ratios(&of(framework), &of(Framework::Shardwise(framework.stage()))),
        of_bare: ratios(&of(framework.bare()), &of(framework)),
        runs: of(framework),
    };
    Table { ranks, rows: FRAMEWORKS.map(row).into() }
}

fn save_tables(workload: &Workload, count: usize, tables: &[Table]) -> Result<()> {
    let Workload { size, precision, micro_batch_size, seq_len, steps, .. } = workload;
    let size = size.to_string().to_lowercase();
    let ranks: Vec<String> = tables.iter().map(|table| table.ranks.to_string()).collect();
    let mut text = format!(
        "# Comparison with peers: {} parameters, {precision}\n\n\
         Machine: {}. PyTorch 2.13, DeepSpeed 0.19.8. One thread per rank; {micro_batch_size} sequences of {seq_len} tokens per rank and \
         step. {count} rounds, each of which runs every framework once, in varying order; {steps} steps per run, of which the first {WARM_UP} \
         are warm-up. Figures are medians over rounds, of the slowest or largest rank; ratios are medians over rounds of the ratio within a \
         round, with minimum and maximum. The final losses of all frameworks whose ranks train together agree; otherwise the run is void. \
         {SENT}\n\n\
         'Bare' is the same model without communication. Bare libtorch is Shardwise's own model, with its chunked loss and its allocator; \
         bare PyTorch is the peers'.\n\n\
         Command: `cargo compare peers --size {size} --precision {precision} --ranks {} --rounds {count}`\n\n![plot](plot.svg)\n",
        workload.size,
        machine(),
        ranks.join(","),
    );
    for table in tables {
        text += &markdown(table);
    }
    let figures =
        serde_json::json!({ "machine": machine(), "size": size, "precision": precision.to_string(), "tables": tables });
    let folder = save_results(&format!("peers-{size}-{precision}-{}", ranks.join("-")), &text, &figures)?;
    plot::bars(&folder.join("plot.svg"), &tables.iter().flat_map(|table| panels(workload, table)).collect::<Vec<_>>())
}

fn markdown(table: &Table) -> String {
    let mut text = format!(
        "\n## {} ranks\n\n\
         | framework | step | Shardwise at that stage is | speed relative to bare | CPU per step | peak memory | PSS at the end | launch to first step | of which compilation | sent per step | final loss |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        table.ranks
    );
    let with_spread = |values: &[f64]| {
        let (least, greatest) = spread(values);
        format!("{:.2} ({least:.2} to {greatest:.2})", median(values))
    };
    for row in &table.rows {
        writeln!(
            text,
            "| {} | {:.2} s | {} | {} | {:.2} s | {:.0} MB | {:.0} MB | {:.1} s | {} | {:.0} MB | {:.5} |",
            row.framework,
            row.median_of(|run| run.step_s),
            if row.framework.is_peer() { format!("{}× as fast", with_spread(&row.ratios)) } else { String::new() },
            with_spread(&row.of_bare),
            row.median_of(|run| run.cpu_s),
            row.median_of(|run| run.peak_bytes) / 1e6,
            row.median_of(|run| run.pss_bytes) / 1e6,
            row.median_of(|run| run.ready_s),
            match row.median_of(|run| run.compile_s) {
                0. => String::new(),
                compile_s => format!("{compile_s:.0} s"),
            },
            row.median_of(|run| run.sent_bytes) / 1e6,
            row.median_of(|run| run.last_loss),
        )
        .expect("writing to a string cannot fail");
    }
    text
}

fn panels(workload: &Workload, table: &Table) -> [Bars; 2] {
    let colour = |framework: Framework| match framework {
        Framework::Shardwise(_) => plot::OURS,
        Framework::Bare | Framework::PyTorch => plot::BARE,
        _ => plot::THEIRS,
    };
    let bars = |figure: fn(&Run) -> f64| {
        let bar = |row: &Row| {
            (row.framework.to_string(), row.median_of(figure), spread(&row.figures(figure)), colour(row.framework))
        };
        table.rows.iter().map(bar).collect()
    };
    let setting = format!("{} parameters, {}, {} ranks", workload.size, workload.precision, table.ranks);
    [
        Bars {
            title: format!("Step time: {setting}"),
            unit: "seconds; lines show the range over rounds",
            bars: bars(|run| run.step_s),
        },
        Bars { title: "Peak memory per rank".to_string(), unit: "GB", bars: bars(|run| run.peak_bytes / 1e9) },
    ]
}
