//! `cargo xtask peers`: the same training by Shardwise, bare libtorch, PyTorch and DeepSpeed; and the claims about it.

use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, ensure};
use serde::Serialize;
use shardwise_harness::Hosts;

use crate::claims::{Claim, Verdict};
use crate::draw::{self, Bars};
use crate::sides::{Ground, Precision, Run, SENT, SIDES, Side, Size, WARM_UP, Work, agree, middle, rounds};
use crate::workspace::{keep, machine, median, spread};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "peers",
        name: "agree",
        what: "Shardwise, DDP, FSDP2 and DeepSpeed train the same small model to the same loss",
        heavy: true,
        measure: same_loss,
    },
    Claim {
        group: "peers",
        name: "speed",
        what: "2 ranks, f32, 42M and 124M: 1.2 times as fast as FSDP2, DeepSpeed 2 and 3 at their stages, not slower than DDP at stage 0",
        heavy: true,
        measure: speed,
    },
    Claim {
        group: "peers",
        name: "bare",
        what: "2 ranks, f32, 42M and 124M: stages 0 to 2 reach 0.97 of bare libtorch's speed, stage 3 0.94",
        heavy: true,
        measure: bare,
    },
    Claim {
        group: "peers",
        name: "bf16",
        what: "2 ranks, bf16, 42M: every stage is ahead of every peer of that stage that is not compiled",
        heavy: true,
        measure: bf16,
    },
    Claim {
        group: "peers",
        name: "bare-bf16",
        what: "2 ranks, bf16, 42M: every stage reaches 0.95 of bare libtorch's speed",
        heavy: true,
        measure: bare_bf16,
    },
    Claim {
        group: "peers",
        name: "memory",
        what: "42M and 124M, f32: a rank's peak at stage 3 is at most half of FSDP2's and DeepSpeed's, and falls from 2 to 4 ranks",
        heavy: true,
        measure: memory,
    },
    Claim {
        group: "peers",
        name: "start",
        what: "2 ranks, 42M and 124M: from launch to first step in at most a fifth of any peer's time, at every stage",
        heavy: true,
        measure: start,
    },
    Claim {
        group: "peers",
        name: "growth",
        what: "from 2 to 16 ranks, bytes per rank follow theory and processor time beside the kernels grows no more than they do",
        heavy: true,
        measure: crate::growth::claim,
    },
    Claim {
        group: "peers",
        name: "overlap",
        what: "two hosts at 1 Gbit/s, stage 3, 42M: how much of the communication is hidden, and what that is worth",
        heavy: true,
        measure: overlap,
    },
];

/// What to compare.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The model
    #[arg(long, value_enum, default_value = "42m")]
    size: Size,
    /// The type that parameters are computed with; masters and reductions are f32
    #[arg(long, value_enum, default_value = "f32")]
    precision: Precision,
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "2")]
    ranks: Vec<usize>,
    /// Rounds, each of which runs every side once
    #[arg(long, default_value_t = ROUNDS)]
    rounds: usize,
}

const ROUNDS: usize = 5;

/// All sides at one number of ranks.
#[derive(Clone, Serialize)]
pub(crate) struct Table {
    ranks: usize,
    rows: Vec<Row>,
}

/// One side.
#[derive(Clone, Serialize)]
struct Row {
    side: Side,
    runs: Vec<Run>,
    /// How many times faster Shardwise is at the same stage, round by round.
    ratios: Vec<f64>,
    /// Its speed in parts of that of the same framework's bare side, round by round.
    of_bare: Vec<f64>,
}

impl Row {
    fn middle(&self, figure: fn(&Run) -> f64) -> f64 {
        middle(&self.runs, figure)
    }

    fn figures(&self, figure: fn(&Run) -> f64) -> Vec<f64> {
        self.runs.iter().map(figure).collect()
    }
}

impl Table {
    fn row(&self, side: Side) -> &Row {
        self.rows.iter().find(|row| row.side == side).expect("every side has a row")
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(options.rounds > 0 && !options.ranks.contains(&0), "at least one round and one rank are needed");
    measured(options.size, options.precision, &options.ranks, options.rounds).map(drop)
}

/// Measures, prints the tables and keeps them in bench/results.
fn measured(size: Size, precision: Precision, ranks: &[usize], count: usize) -> Result<Vec<Table>> {
    let work = Work::new(size, precision);
    let ground = Ground::new(&work)?;
    let mut tables = Vec::new();
    for &ranks in ranks {
        let rounds = rounds(&ground, &work, &SIDES, ranks, count)?;
        tables.push(table(ranks, &rounds));
    }
    kept(&work, count, &tables)?;
    Ok(tables)
}

fn table(ranks: usize, rounds: &[Vec<(Side, Run)>]) -> Table {
    let of = |side: Side| -> Vec<Run> {
        rounds.iter().flat_map(|runs| runs.iter().filter(|(other, _)| *other == side).map(|(_, run)| *run)).collect()
    };
    let ratios = |over: &[Run], under: &[Run]| over.iter().zip(under).map(|(a, b)| a.step_s / b.step_s).collect();
    let row = |side: Side| Row {
        side,
        ratios: ratios(&of(side), &of(Side::Shardwise(side.stage()))),
        of_bare: ratios(&of(side.bare()), &of(side)),
        runs: of(side),
    };
    Table { ranks, rows: SIDES.map(row).into() }
}

fn kept(work: &Work, count: usize, tables: &[Table]) -> Result<()> {
    let Work { size, precision, sequences, positions, steps, .. } = work;
    let size = size.to_string().to_lowercase();
    let ranks: Vec<String> = tables.iter().map(|table| table.ranks.to_string()).collect();
    let mut text = format!(
        "# Beside the peers: {} parameters, {precision}\n\n\
         Machine: {}. PyTorch 2.13, DeepSpeed 0.19.8. One thread per rank; {sequences} sequences of {positions} tokens per rank and \
         step. {count} rounds, each of which runs every side once, in turned order; {steps} steps a run, of which {WARM_UP} warm up and \
         the others are timed together. Figures are medians over rounds, of the slowest or largest rank; ratios are medians over rounds of \
         the ratio within a round, with the least and greatest. The last losses of all sides whose ranks train together agree, or \
         there would be no table. {SENT}\n\n\
         'Bare' is the same model with no word between ranks. Bare libtorch is Shardwise's own model, with its head in chunks and its \
         allocator; bare PyTorch is the peers'.\n\n\
         Command: `cargo xtask peers --size {size} --precision {precision} --ranks {} --rounds {count}`\n\n![plot](plot.svg)\n",
        work.size,
        machine(),
        ranks.join(","),
    );
    for table in tables {
        text += &markdown(table);
    }
    let figures =
        serde_json::json!({ "machine": machine(), "size": size, "precision": precision.to_string(), "tables": tables });
    let folder = keep(&format!("peers-{size}-{precision}-{}", ranks.join("-")), &text, &figures)?;
    draw::bars(&folder.join("plot.svg"), &tables.iter().flat_map(|table| panels(work, table)).collect::<Vec<_>>())
}

fn markdown(table: &Table) -> String {
    let mut text = format!(
        "\n## {} ranks\n\n\
         | side | step | Shardwise at that stage is | of its bare side's speed | CPU a step | peak | PSS at the end | to the first step | compilation in it | sent a step | last loss |\n\
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
            row.side,
            row.middle(|run| run.step_s),
            if row.side.is_peer() { format!("{}× as fast", with_spread(&row.ratios)) } else { String::new() },
            with_spread(&row.of_bare),
            row.middle(|run| run.cpu_s),
            row.middle(|run| run.peak_bytes) / 1e6,
            row.middle(|run| run.pss_bytes) / 1e6,
            row.middle(|run| run.ready_s),
            match row.middle(|run| run.compile_s) {
                0. => String::new(),
                compile_s => format!("{compile_s:.0} s"),
            },
            row.middle(|run| run.sent_bytes) / 1e6,
            row.middle(|run| run.last_loss),
        )
        .expect("a string takes any text");
    }
    text
}

fn panels(work: &Work, table: &Table) -> [Bars; 2] {
    let colour = |side: Side| match side {
        Side::Shardwise(_) => draw::OURS,
        Side::Bare | Side::PyTorch => draw::BARE,
        _ => draw::THEIRS,
    };
    let bars = |figure: fn(&Run) -> f64| {
        let bar =
            |row: &Row| (row.side.to_string(), row.middle(figure), spread(&row.figures(figure)), colour(row.side));
        table.rows.iter().map(bar).collect()
    };
    let setting = format!("{} parameters, {}, {} ranks", work.size, work.precision, table.ranks);
    [
        Bars {
            title: format!("A step: {setting}"),
            unit: "seconds; the line is the range of rounds",
            bars: bars(|run| run.step_s),
        },
        Bars { title: "Peak memory of a rank".to_string(), unit: "GB", bars: bars(|run| run.peak_bytes / 1e9) },
    ]
}

// ---- claims -----------------------------------------------------------------------------------------------------------

/// Two ranks and all sides, measured once for all claims.
fn once(size: Size, precision: Precision) -> Result<Table> {
    static KNOWN: Mutex<Vec<(Size, Precision, Table)>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((.., table)) = known.iter().find(|(s, p, _)| (*s, *p) == (size, precision)) {
        return Ok(table.clone());
    }
    let table = measured(size, precision, &[2], ROUNDS)?.remove(0);
    known.push((size, precision, table.clone()));
    Ok(table)
}

fn same_loss() -> Result<Verdict> {
    let work = Work { positions: 32, ..Work::new(Size::Tiny, Precision::F32) };
    let ground = Ground::new(&work)?;
    let sides = [Side::Bare, Side::Shardwise(3), Side::Ddp, Side::Fsdp2, Side::DeepSpeed(3)];
    let runs = sides.into_iter().map(|side| Ok((side, ground.run(side, 2, None)?))).collect::<Result<Vec<_>>>()?;
    runs.iter().for_each(|(side, run)| println!("{side}: {} after {} steps", run.last_loss, work.steps));
    let agreed = agree(&runs, work.precision, 2);
    Ok(Verdict {
        figure: agreed.as_ref().map_or_else(ToString::to_string, |()| "they agree".to_string()),
        bar: "1e-5".to_string(),
        holds: agreed.is_ok(),
    })
}

fn speed() -> Result<Verdict> {
    let (mut figures, mut holds) = (Vec::new(), true);
    for size in [Size::Small, Size::Medium] {
        let table = once(size, Precision::F32)?;
        for (side, bar) in [(Side::Fsdp2, 1.2), (Side::DeepSpeed(2), 1.2), (Side::DeepSpeed(3), 1.2), (Side::Ddp, 1.)] {
            let ratio = median(&table.row(side).ratios);
            holds &= ratio >= bar;
            figures.push(format!("{size} {side} {ratio:.2}"));
        }
    }
    Ok(Verdict { figure: figures.join(", "), bar: "1.2, DDP 1.0".to_string(), holds })
}

fn bare() -> Result<Verdict> {
    let (mut figures, mut holds) = (Vec::new(), true);
    for size in [Size::Small, Size::Medium] {
        let table = once(size, Precision::F32)?;
        let of_bare = |stage| median(&table.row(Side::Shardwise(stage)).of_bare);
        let stages = [0, 1, 2, 3].map(of_bare);
        holds &= stages[..3].iter().all(|&speed| speed >= 0.97) && stages[3] >= 0.94;
        figures.push(format!("{size}: {:.3}, {:.3}, {:.3}, {:.3}", stages[0], stages[1], stages[2], stages[3]));
    }
    Ok(Verdict { figure: figures.join("; "), bar: "0.97, stage 3 0.94".to_string(), holds })
}

fn bf16() -> Result<Verdict> {
    let table = once(Size::Small, Precision::Bf16)?;
    let peers = table.rows.iter().filter(|row| row.side.is_peer() && row.side.is_joint());
    let ratios: Vec<(Side, f64)> = peers.map(|row| (row.side, median(&row.ratios))).collect();
    let described: Vec<String> = ratios.iter().map(|(side, ratio)| format!("{side} {ratio:.2}")).collect();
    Ok(Verdict {
        figure: described.join(", "),
        bar: "more than 1 where the peer is not compiled".to_string(),
        holds: ratios.iter().all(|(side, ratio)| side.is_compiled() || *ratio > 1.),
    })
}

/// The sides that the bar is about, and no others.
fn bare_bf16() -> Result<Verdict> {
    let work = Work::new(Size::Small, Precision::Bf16);
    let ground = Ground::new(&work)?;
    let sides = [Side::Bare, Side::Shardwise(0), Side::Shardwise(1), Side::Shardwise(2), Side::Shardwise(3)];
    let rounds = rounds(&ground, &work, &sides, 2, ROUNDS)?;
    let of_bare = |stage: usize| {
        let speed = |figure: fn(&Run) -> f64| {
            median(&rounds.iter().map(|runs| figure(&runs[0].1) / figure(&runs[1 + stage].1)).collect::<Vec<_>>())
        };
        (speed(|run| run.step_s), speed(|run| run.cpu_s))
    };
    let stages = [0, 1, 2, 3].map(of_bare);
    let described = stages.iter().map(|(wall, cpu)| format!("{wall:.3} ({cpu:.3} by processor time)"));
    Ok(Verdict {
        figure: format!("stages 0 to 3: {}", described.collect::<Vec<_>>().join(", ")),
        bar: "0.95".to_string(),
        holds: stages.iter().all(|(wall, _)| *wall >= 0.95),
    })
}

fn memory() -> Result<Verdict> {
    let sides = [Side::Shardwise(3), Side::Fsdp2, Side::DeepSpeed(3)];
    let (mut described, mut holds) = (Vec::new(), true);
    for size in [Size::Small, Size::Medium] {
        let work = Work::new(size, Precision::F32);
        let ground = Ground::new(&work)?;
        let mut peaks = Vec::new();
        for ranks in [2, 4] {
            // Memory repeats: one round is enough.
            let runs = rounds(&ground, &work, &sides, ranks, 1)?.remove(0);
            peaks.push(runs.iter().map(|(_, run)| run.peak_bytes / 1e9).collect::<Vec<f64>>());
        }
        for (place, side) in sides.iter().enumerate() {
            let (two, four) = (peaks[0][place], peaks[1][place]);
            described.push(format!("{size} {side} {two:.2} GB at 2 ranks, {four:.2} at 4"));
        }
        holds &= peaks.iter().all(|peaks| peaks[0] <= 0.5 * peaks[1].min(peaks[2])) && peaks[1][0] < peaks[0][0];
    }
    Ok(Verdict { figure: described.join("; "), bar: "half, and falling".to_string(), holds })
}

fn start() -> Result<Verdict> {
    let peers = [Side::Ddp, Side::Fsdp2, Side::DeepSpeed(3)];
    let ours = [0, 1, 2, 3].map(Side::Shardwise);
    let (mut described, mut holds) = (Vec::new(), true);
    for size in [Size::Small, Size::Medium] {
        let work = Work { steps: WARM_UP + 1, ..Work::new(size, Precision::F32) };
        let ground = Ground::new(&work)?;
        let rounds = rounds(&ground, &work, &[&ours[..], &peers[..]].concat(), 2, 3)?;
        let ready = |side: &Side| {
            let runs = rounds.iter().flatten().filter(|(other, _)| other == side).map(|(_, run)| run);
            middle(runs, |run| run.ready_s)
        };
        let (slowest, fastest) =
            (ours.iter().map(ready).fold(0., f64::max), peers.iter().map(ready).fold(f64::MAX, f64::min));
        described.push(format!(
            "{size}: {slowest:.2} s at the most, the fastest peer {fastest:.2} s: {:.2} of it",
            slowest / fastest
        ));
        holds &= slowest <= 0.2 * fastest;
    }
    Ok(Verdict { figure: described.join("; "), bar: "0.2".to_string(), holds })
}

/// On and off in turn. There is no bar but that it helps.
fn overlap() -> Result<Verdict> {
    let hosts = Hosts { hosts: 2, ranks_per_host: 1, rate: "1gbit".to_string(), delay: "0ms".to_string() };
    let on = Work::new(Size::Small, Precision::F32);
    let off = Work { units_in_flight: 0, ..on.clone() };
    let ground = Ground::new(&on)?;
    let (mut ons, mut offs) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        for turn in 0..2 {
            let (work, runs) = if (round + turn) % 2 == 0 { (&on, &mut ons) } else { (&off, &mut offs) };
            ground.set(work)?;
            let run = ground.run(Side::Shardwise(3), 2, Some(&hosts))?;
            println!(
                "{} units in flight: {:.2} s a step, {:.2} s of calls, {:.2} s waited for",
                work.units_in_flight, run.step_s, run.talked_s, run.waited_s
            );
            runs.push(run);
        }
    }
    let hidden = |runs: &[Run]| middle(runs, |run| 1. - run.waited_s / run.talked_s);
    let faster: Vec<f64> = offs.iter().zip(&ons).map(|(off, on)| off.step_s / on.step_s).collect();
    let faster = median(&faster);
    Ok(Verdict {
        figure: format!(
            "on {:.2} s with {:.0}% hidden, off {:.2} s with {:.0}%: {faster:.2} times as fast",
            middle(&ons, |run| run.step_s),
            100. * hidden(&ons),
            middle(&offs, |run| run.step_s),
            100. * hidden(&offs),
        ),
        bar: "faster than without".to_string(),
        holds: faster > 1.,
    })
}
