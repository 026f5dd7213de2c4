//! `cargo compare peers`: trains the same model with Shardwise, bare libtorch, PyTorch and DeepSpeed.

use std::fmt::Write as _;

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::frameworks::{
    Bench, Framework, Layout, Precision, Run, SENT, Size, WARM_UP, Workload, median_of, run_rounds,
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
    /// Numbers of ranks [default: 2, T,2T with --tensor T, or P with --pipeline P]
    #[arg(long, value_delimiter = ',')]
    ranks: Vec<usize>,
    /// Number of ranks that share each layer; above 1, compare tensor and sequence parallelism
    #[arg(long, value_name = "T", default_value_t = 1)]
    tensor: usize,
    /// Number of ranks that hold the stages of a pipeline; above 1, compare pipeline schedules
    #[arg(long, value_name = "P", default_value_t = 1, conflicts_with = "tensor")]
    pipeline: usize,
    /// Number of rounds; each runs every framework once
    #[arg(long, default_value_t = ROUNDS)]
    rounds: usize,
}

impl Options {
    fn layouts(&self) -> Result<Vec<Layout>> {
        let Options { tensor, pipeline, .. } = *self;
        ensure!(tensor > 0, "--tensor must be at least 1");
        ensure!(pipeline > 0, "--pipeline must be at least 1");
        let counts = match (&self.ranks[..], tensor, pipeline) {
            ([], 1, 1) => vec![2],
            ([], _, 1) => vec![tensor, 2 * tensor],
            ([], ..) => vec![pipeline],
            (given, ..) => given.to_vec(),
        };
        let layout = |ranks: usize| -> Result<Layout> {
            ensure!(ranks > 0, "at least one rank is needed");
            ensure!(ranks.is_multiple_of(tensor), "{ranks} ranks cannot be divided into groups of {tensor}");
            ensure!(
                pipeline == 1 || ranks == pipeline,
                "a pipeline of {pipeline} stages is compared on {pipeline} ranks"
            );
            Ok(Layout { ranks, tensor, pipeline })
        };
        counts.into_iter().map(layout).collect()
    }
}

/// The default number of rounds.
pub const ROUNDS: usize = 5;

/// The results of all frameworks on one layout.
#[derive(Clone, Serialize)]
pub struct Table {
    /// The ranks.
    #[serde(flatten)]
    pub layout: Layout,
    /// One row for each framework, in the order of [`Layout::frameworks`].
    pub rows: Vec<Row>,
}

/// The results of one framework.
#[derive(Clone, Serialize)]
pub struct Row {
    /// The framework.
    pub framework: Framework,
    /// Its runs, by round.
    pub runs: Vec<Run>,
    /// The speedup of Shardwise at the same stage or schedule, by round; empty if one of them shares a batch among ranks and the other does not.
    pub ratios: Vec<f64>,
    /// Its speed per rank as a fraction of its bare baseline's, by round.
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
    ensure!(options.rounds > 0, "at least one round is needed");
    measure(options.size, options.precision, &options.layouts()?, options.rounds).map(drop)
}

/// Measures, prints the tables and saves them in bench/results.
pub fn measure(size: Size, precision: Precision, layouts: &[Layout], count: usize) -> Result<Vec<Table>> {
    let has_pipeline = layouts.iter().any(|layout| layout.pipeline > 1);
    let workload = if has_pipeline { Workload::pipelined(size, precision) } else { Workload::new(size, precision) };
    let bench = Bench::new(&workload)?;
    let mut tables = Vec::new();
    for &layout in layouts {
        let rounds = run_rounds(&bench, &workload, layout.frameworks(), layout, count)?;
        tables.push(table(layout, &rounds));
    }
    save_tables(&workload, count, &tables)?;
    Ok(tables)
}

fn table(layout: Layout, rounds: &[Vec<(Framework, Run)>]) -> Table {
    let of = |framework: Framework| -> Vec<Run> {
        rounds
            .iter()
            .flat_map(|runs| runs.iter().filter(|(other, _)| *other == framework).map(|(_, run)| *run))
            .collect()
    };
    // The ranks whose work is one batch.
    let sharers = |framework: Framework| if framework.is_joint() { layout.sharers() } else { 1 };
    let ratios = |over: &[Run], under: &[Run]| -> Vec<f64> {
        over.iter().zip(under).map(|(a, b)| a.step_s / b.step_s).collect()
    };
    let row = |framework: Framework| {
        let (runs, ours) = (of(framework), framework.counterpart());
        let comparable = sharers(framework) == sharers(ours);
        let of_bare = ratios(&of(framework.bare()), &runs);
        Row {
            framework,
            ratios: if comparable { ratios(&runs, &of(ours)) } else { Vec::new() },
            of_bare: of_bare.iter().map(|ratio| ratio / sharers(framework) as f64).collect(),
            runs,
        }
    };
    Table { layout, rows: layout.frameworks().iter().map(|&framework| row(framework)).collect() }
}

/// What readers of a table have to know if ranks share layers.
const TENSOR_NOTES: &str = "TP is tensor and sequence parallelism. Ranks that share layers share a batch, so 'speed relative to bare' is \
                            per rank; the ranks of the bare baselines each train the whole batch of their group.\n\n";

/// What readers of a table have to know if ranks hold the stages of a pipeline.
const PIPELINE_NOTES: &str = "The ranks hold the stages of a pipeline, cut at the same units for all frameworks. They share a batch, so \
                              'speed relative to bare' is per rank; the ranks of the bare baselines each train all micro-batches. The \
                              head is not tied to the embedding, because PyTorch's stages cannot share a parameter.\n\n";

fn save_tables(workload: &Workload, count: usize, tables: &[Table]) -> Result<()> {
    let Workload { size, precision, micro_batch_size, micro_batches, seq_len, steps, .. } = workload;
    let size = size.to_string().to_lowercase();
    let ranks: Vec<String> = tables.iter().map(|table| table.layout.ranks.to_string()).collect();
    let (tensor, pipeline) = tables.first().map_or((1, 1), |table| (table.layout.tensor, table.layout.pipeline));
    let (flag, suffix, sharers, notes) = match (tensor, pipeline) {
        (1, 1) => (String::new(), String::new(), "rank".to_string(), ""),
        (_, 1) => (
            format!(" --tensor {tensor}"),
            format!("-tensor-{tensor}"),
            format!("group of {tensor} ranks"),
            TENSOR_NOTES,
        ),
        _ => (
            format!(" --pipeline {pipeline}"),
            format!("-pipeline-{pipeline}"),
            format!("pipeline of {pipeline} ranks"),
            PIPELINE_NOTES,
        ),
    };
    let batch = match micro_batches {
        1 => format!("{micro_batch_size} sequences of {seq_len} tokens"),
        _ => format!("{micro_batches} micro-batches of {micro_batch_size} × {seq_len} tokens"),
    };
    let mut text = format!(
        "# Comparison with peers: {} parameters, {precision}\n\n\
         Machine: {}. PyTorch 2.13, DeepSpeed 0.19.8. One thread per rank; {batch} per {sharers} and \
         step. {count} rounds, each of which runs every framework once, in varying order; {steps} steps per run, of which the first {WARM_UP} \
         are warm-up. Figures are medians over rounds, of the slowest or largest rank; ratios are medians over rounds of the ratio within a \
         round, with minimum and maximum. The final losses of all frameworks whose ranks train together agree; otherwise the run is void. \
         {SENT}\n\n\
         'Bare' is the same model without communication. Bare libtorch is Shardwise's own model, with its chunked loss and its allocator; \
         bare PyTorch is the peers'.\n\n{notes}\
         Command: `cargo compare peers --size {size} --precision {precision} --ranks {}{flag} --rounds {count}`\n\n![plot](plot.svg)\n",
        workload.size,
        machine(),
        ranks.join(","),
    );
    for table in tables {
        text += &markdown(table);
    }
    let figures =
        serde_json::json!({ "machine": machine(), "size": size, "precision": precision.to_string(), "tables": tables });
    let folder = save_results(&format!("peers-{size}-{precision}-{}{suffix}", ranks.join("-")), &text, &figures)?;
    plot::bars(&folder.join("plot.svg"), &tables.iter().flat_map(|table| panels(workload, table)).collect::<Vec<_>>())
}

fn markdown(table: &Table) -> String {
    let counterpart = if table.layout.pipeline > 1 { "with that schedule" } else { "at that stage" };
    let mut text = format!(
        "\n## {}\n\n\
         | framework | step | Shardwise {counterpart} is | speed relative to bare | CPU per step | peak memory | PSS at the end | launch to first step | of which compilation | sent per step | final loss |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        table.layout
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
            match &row.ratios[..] {
                ratios @ [_, ..] if row.framework.is_peer() => format!("{}× as fast", with_spread(ratios)),
                _ => String::new(),
            },
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
        Framework::Shardwise(_) | Framework::ShardwiseCompiled(_) | Framework::ShardwisePipeline(_) => plot::OURS,
        Framework::Bare | Framework::PyTorch => plot::BARE,
        _ => plot::THEIRS,
    };
    let bars = |figure: fn(&Run) -> f64| {
        let bar = |row: &Row| {
            (row.framework.to_string(), row.median_of(figure), spread(&row.figures(figure)), colour(row.framework))
        };
        table.rows.iter().map(bar).collect()
    };
    let setting = format!("{} parameters, {}, {}", workload.size, workload.precision, table.layout);
    [
        Bars {
            title: format!("Step time: {setting}"),
            unit: "seconds; lines show the range over rounds",
            bars: bars(|run| run.step_s),
        },
        Bars { title: "Peak memory per rank".to_string(), unit: "GB", bars: bars(|run| run.peak_bytes / 1e9) },
    ]
}
