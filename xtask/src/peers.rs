//! The claims about the comparison with peers.

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, ensure};
use shardwise_compare::frameworks::{
    Bench, Framework, Layout, Precision, Run, Schedule, Size, WARM_UP, Workload, check_losses, median_of, run_rounds,
};
use shardwise_compare::peers::Table;
use shardwise_compare::{growth, peers};
use shardwise_harness::Hosts;

use crate::claim::{Claim, Verdict};
use crate::workspace::median;

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
        what: "2 ranks, f32, 42M and 124M: 1.2 times as fast as FSDP2, DeepSpeed 2 and 3 at the same stage; not slower than DDP at stage 0",
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
        what: "2 ranks, bf16, 42M: every stage is faster than every uncompiled peer of that stage",
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
        what: "42M and 124M, f32: peak memory at stage 3 is at most half of FSDP2's and DeepSpeed's, and falls from 2 to 4 ranks",
        heavy: true,
        measure: memory,
    },
    Claim {
        group: "peers",
        name: "pipeline",
        what: "2 ranks, f32, 42M: 1F1B, interleaved 1F1B and ZB-V are not slower than PyTorch's, and their peak memory is lower",
        heavy: true,
        measure: pipeline,
    },
    Claim {
        group: "peers",
        name: "start",
        what: "2 ranks, 42M and 124M: at every stage, launch to first step takes at most a fifth of any peer's time",
        heavy: true,
        measure: start,
    },
    Claim {
        group: "peers",
        name: "growth",
        what: "from 2 to 16 ranks, bytes sent per rank follow theory, and CPU time outside the kernels grows no faster",
        heavy: true,
        measure: weak_scaling,
    },
    Claim {
        group: "peers",
        name: "overlap",
        what: "two hosts at 1 Gbit/s, stage 3, 42M: prefetching hides communication and makes steps faster",
        heavy: true,
        measure: overlap,
    },
];

/// Two ranks, the layout of most claims.
const TWO: Layout = Layout::data_parallel(2);

/// The results of all frameworks on two ranks, which are measured once for all claims.
fn measure_once(size: Size, precision: Precision) -> Result<Table> {
    static KNOWN: Mutex<Vec<(Size, Precision, Table)>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((.., table)) = known.iter().find(|(s, p, _)| (*s, *p) == (size, precision)) {
        return Ok(table.clone());
    }
    let table = peers::measure(size, precision, &[TWO], peers::ROUNDS)?.remove(0);
    known.push((size, precision, table.clone()));
    Ok(table)
}

fn same_loss() -> Result<Verdict> {
    let workload = Workload { seq_len: 32, ..Workload::new(Size::Tiny, Precision::F32) };
    let bench = Bench::new(&workload)?;
    let frameworks =
        [Framework::Bare, Framework::Shardwise(3), Framework::Ddp, Framework::Fsdp2, Framework::DeepSpeed(3)];
    let runs = frameworks
        .into_iter()
        .map(|framework| Ok((framework, bench.run(framework, TWO, None)?)))
        .collect::<Result<Vec<_>>>()?;
    runs.iter().for_each(|(framework, run)| println!("{framework}: {} after {} steps", run.last_loss, workload.steps));
    let agreed = check_losses(&runs, workload.precision, TWO);
    Ok(Verdict {
        figure: agreed.as_ref().map_or_else(ToString::to_string, |()| "all agree".to_string()),
        bar: "1e-5".to_string(),
        holds: agreed.is_ok(),
    })
}

fn speed() -> Result<Verdict> {
    let (mut figures, mut holds) = (Vec::new(), true);
    for size in [Size::Small, Size::Medium] {
        let table = measure_once(size, Precision::F32)?;
        for (framework, bar) in [
            (Framework::Fsdp2, 1.2),
            (Framework::DeepSpeed(2), 1.2),
            (Framework::DeepSpeed(3), 1.2),
            (Framework::Ddp, 1.),
        ] {
            let ratio = median(&table.row(framework).ratios);
            holds &= ratio >= bar;
            figures.push(format!("{size} {framework} {ratio:.2}"));
        }
    }
    Ok(Verdict { figure: figures.join(", "), bar: "1.2, DDP 1.0".to_string(), holds })
}

fn bare() -> Result<Verdict> {
    let (mut figures, mut holds) = (Vec::new(), true);
    for size in [Size::Small, Size::Medium] {
        let table = measure_once(size, Precision::F32)?;
        let of_bare = |stage| median(&table.row(Framework::Shardwise(stage)).of_bare);
        let stages = [0, 1, 2, 3].map(of_bare);
        holds &= stages[..3].iter().all(|&speed| speed >= 0.97) && stages[3] >= 0.94;
        figures.push(format!("{size}: {:.3}, {:.3}, {:.3}, {:.3}", stages[0], stages[1], stages[2], stages[3]));
    }
    Ok(Verdict { figure: figures.join("; "), bar: "0.97, stage 3 0.94".to_string(), holds })
}

fn bf16() -> Result<Verdict> {
    let table = measure_once(Size::Small, Precision::Bf16)?;
    let peers = table.rows.iter().filter(|row| row.framework.is_peer() && row.framework.is_joint());
    let ratios: Vec<(Framework, f64)> = peers.map(|row| (row.framework, median(&row.ratios))).collect();
    let described: Vec<String> = ratios.iter().map(|(framework, ratio)| format!("{framework} {ratio:.2}")).collect();
    Ok(Verdict {
        figure: described.join(", "),
        bar: "more than 1 for uncompiled peers".to_string(),
        holds: ratios.iter().all(|(framework, ratio)| framework.is_compiled() || *ratio > 1.),
    })
}

/// Measures only the frameworks that the claim needs.
fn bare_bf16() -> Result<Verdict> {
    let workload = Workload::new(Size::Small, Precision::Bf16);
    let bench = Bench::new(&workload)?;
    let frameworks = [
        Framework::Bare,
        Framework::Shardwise(0),
        Framework::Shardwise(1),
        Framework::Shardwise(2),
        Framework::Shardwise(3),
    ];
    let rounds = run_rounds(&bench, &workload, &frameworks, TWO, peers::ROUNDS)?;
    let of_bare = |stage: usize| {
        let speed = |figure: fn(&Run) -> f64| {
            median(&rounds.iter().map(|runs| figure(&runs[0].1) / figure(&runs[1 + stage].1)).collect::<Vec<_>>())
        };
        (speed(|run| run.step_s), speed(|run| run.cpu_s))
    };
    let stages = [0, 1, 2, 3].map(of_bare);
    let described = stages.iter().map(|(wall, cpu)| format!("{wall:.3} ({cpu:.3} in CPU time)"));
    Ok(Verdict {
        figure: format!("stages 0 to 3: {}", described.collect::<Vec<_>>().join(", ")),
        bar: "0.95".to_string(),
        holds: stages.iter().all(|(wall, _)| *wall >= 0.95),
    })
}

fn memory() -> Result<Verdict> {
    let frameworks = [Framework::Shardwise(3), Framework::Fsdp2, Framework::DeepSpeed(3)];
    let (mut described, mut holds) = (Vec::new(), true);
    for size in [Size::Small, Size::Medium] {
        let workload = Workload::new(size, Precision::F32);
        let bench = Bench::new(&workload)?;
        let mut peaks = Vec::new();
        for ranks in [2, 4] {
            // Memory is reproducible: one round is enough.
            let runs = run_rounds(&bench, &workload, &frameworks, Layout::data_parallel(ranks), 1)?.remove(0);
            peaks.push(runs.iter().map(|(_, run)| run.peak_bytes / 1e9).collect::<Vec<f64>>());
        }
        for (place, framework) in frameworks.iter().enumerate() {
            let (two, four) = (peaks[0][place], peaks[1][place]);
            described.push(format!("{size} {framework} {two:.2} GB at 2 ranks, {four:.2} at 4"));
        }
        holds &= peaks.iter().all(|peaks| peaks[0] <= 0.5 * peaks[1].min(peaks[2])) && peaks[1][0] < peaks[0][0];
    }
    Ok(Verdict { figure: described.join("; "), bar: "at most half, and falling".to_string(), holds })
}

fn pipeline() -> Result<Verdict> {
    let layout = Layout { pipeline: 2, ..TWO };
    let table = peers::measure(Size::Small, Precision::F32, &[layout], peers::ROUNDS)?.remove(0);
    let (mut figures, mut holds) = (Vec::new(), true);
    for schedule in [Schedule::OneFOneB, Schedule::Interleaved1F1B, Schedule::ZeroBubbleV] {
        let peer = Framework::PyTorchPipeline(schedule);
        let peak = |framework| median_of(&table.row(framework).runs, |run| run.peak_bytes);
        let (ratio, memory) = (median(&table.row(peer).ratios), peak(peer.counterpart()) / peak(peer));
        holds &= ratio >= 1. && memory < 1.;
        figures.push(format!("{schedule}: {ratio:.2} times as fast in {memory:.2} of the memory"));
    }
    Ok(Verdict { figure: figures.join("; "), bar: "at least 1, less than 1".to_string(), holds })
}

fn start() -> Result<Verdict> {
    let peers = [Framework::Ddp, Framework::Fsdp2, Framework::DeepSpeed(3)];
    let ours = [0, 1, 2, 3].map(Framework::Shardwise);
    let (mut described, mut holds) = (Vec::new(), true);
    for size in [Size::Small, Size::Medium] {
        // Short steps: the time to be measured ends before the first one.
        let workload =
            Workload { micro_batch_size: 1, seq_len: 32, steps: WARM_UP + 1, ..Workload::new(size, Precision::F32) };
        let bench = Bench::new(&workload)?;
        let rounds = run_rounds(&bench, &workload, &[&ours[..], &peers[..]].concat(), TWO, 3)?;
        let ready = |framework: &Framework| {
            let runs = rounds.iter().flatten().filter(|(other, _)| other == framework).map(|(_, run)| run);
            median_of(runs, |run| run.ready_s)
        };
        let (slowest, fastest) =
            (ours.iter().map(ready).fold(0., f64::max), peers.iter().map(ready).fold(f64::MAX, f64::min));
        described.push(format!(
            "{size}: at most {slowest:.2} s, the fastest peer {fastest:.2} s: {:.2} of it",
            slowest / fastest
        ));
        holds &= slowest <= 0.2 * fastest;
    }
    Ok(Verdict { figure: described.join("; "), bar: "0.2".to_string(), holds })
}

fn weak_scaling() -> Result<Verdict> {
    let points = growth::measure(&[1, 2, 4, 8, 16], growth::ROUNDS)?;
    let of = |framework, ranks| {
        points.iter().find(|point| (point.framework, point.ranks) == (framework, ranks)).expect("was measured")
    };
    let (mut figures, mut holds) = (Vec::new(), true);
    for stage in [1u8, 3] {
        let (few, many) = (of(Framework::Shardwise(stage), 2), of(Framework::Shardwise(stage), 16));
        ensure!(few.extra_cpu_s > 0., "too noisy to measure: no CPU time beyond the model's own");
        // A rank sends (N−1)/N of what is gathered and reduced.
        let theory = (15. / 16.) / (1. / 2.);
        let (bytes, cpu) = (many.sent_bytes / few.sent_bytes, many.extra_cpu_s / few.extra_cpu_s);
        holds &= (bytes / theory - 1.).abs() < 0.01 && cpu <= bytes;
        figures
            .push(format!("stage {stage}: bytes grow {bytes:.2} times (theory {theory:.2}), CPU time {cpu:.2} times"));
    }
    Ok(Verdict { figure: figures.join("; "), bar: "CPU time grows no more than bytes".to_string(), holds })
}

/// Alternates between prefetching and not prefetching. The claim is only that it helps.
fn overlap() -> Result<Verdict> {
    let hosts = Hosts { hosts: 2, ranks_per_host: 1, rate: "1gbit".to_string(), delay: "0ms".to_string() };
    let on = Workload::new(Size::Small, Precision::F32);
    let off = Workload { prefetch: 0, ..on.clone() };
    let bench = Bench::new(&on)?;
    let (mut ons, mut offs) = (Vec::new(), Vec::new());
    for round in 0..peers::ROUNDS {
        for turn in 0..2 {
            let (workload, runs) = if (round + turn) % 2 == 0 { (&on, &mut ons) } else { (&off, &mut offs) };
            bench.set(workload)?;
            let run = bench.run(Framework::Shardwise(3), TWO, Some(&hosts))?;
            println!(
                "prefetch {}: {:.2} s per step, {:.2} s of calls, {:.2} s waited for",
                workload.prefetch, run.step_s, run.talked_s, run.waited_s
            );
            runs.push(run);
        }
    }
    let hidden = |runs: &[Run]| median_of(runs, |run| 1. - run.waited_s / run.talked_s);
    let faster: Vec<f64> = offs.iter().zip(&ons).map(|(off, on)| off.step_s / on.step_s).collect();
    let faster = median(&faster);
    Ok(Verdict {
        figure: format!(
            "{:.2} s with prefetching ({:.0}% hidden), {:.2} s without ({:.0}%): {faster:.2} times as fast",
            median_of(&ons, |run| run.step_s),
            100. * hidden(&ons),
            median_of(&offs, |run| run.step_s),
            100. * hidden(&offs),
        ),
        bar: "faster than without".to_string(),
        holds: faster > 1.,
    })
}
