//! The claim about pipelines on several hosts: next to ZeRO-3 and to PyTorch's pipelines, measured and simulated.

use std::path::{Path, PathBuf};

use anyhow::Result;
use shardwise_compare::frameworks::{
    Bench, Framework, Layout, Precision, Run, Schedule, Size, WARM_UP, Workload, check_losses, median_of,
};
use shardwise_harness::Hosts;

use crate::claim::Verdict;
use crate::setting::{predict_on_hosts, profile, shardwise};
use crate::workspace::{Scratch, median};

/// The ranks, on two hosts or on four.
const RANKS: usize = 4;
/// The sequences of a step, which all sides divide in their own way.
const SEQUENCES: usize = 8;
const RATES: [&str; 2] = ["1gbit", "100mbit"];
const ROUNDS: usize = 3;

/// A side of the comparison.
#[derive(Clone, Copy)]
struct Side {
    name: &'static str,
    framework: Framework,
    layout: Layout,
}

const fn side(name: &'static str, framework: Framework, pipeline: usize) -> Side {
    Side { name, framework, layout: Layout { ranks: RANKS, tensor: 1, pipeline } }
}

const ZERO_3: Side = side("ZeRO-3", Framework::Shardwise(3), 1);
const PIPELINE: Side = side("pipeline", Framework::ShardwisePipeline(Schedule::OneFOneB), RANKS);
const PIPELINE_ZERO_1: Side = side("pipeline × ZeRO-1", Framework::ShardwisePipeline(Schedule::OneFOneB), 2);

const SIDES: [Side; 8] = [
    ZERO_3,
    PIPELINE,
    PIPELINE_ZERO_1,
    side("PyTorch 1F1B", Framework::PyTorchPipeline(Schedule::OneFOneB), RANKS),
    side("interleaved", Framework::ShardwisePipeline(Schedule::Interleaved1F1B), RANKS),
    side("PyTorch interleaved", Framework::PyTorchPipeline(Schedule::Interleaved1F1B), RANKS),
    side("ZB-V", Framework::ShardwisePipeline(Schedule::ZeroBubbleV), RANKS),
    side("PyTorch ZB-V", Framework::PyTorchPipeline(Schedule::ZeroBubbleV), RANKS),
];

/// The sides whose ranking is simulated.
const RANKED: [Side; 3] = [ZERO_3, PIPELINE, PIPELINE_ZERO_1];

impl Side {
    /// The same step for all sides: a pipeline works on one sequence at a time, ZeRO-3 on all of a rank's at once.
    fn workload(self) -> Workload {
        let usual = Workload::pipelined(Size::Medium, Precision::F32);
        let sequences = SEQUENCES / self.layout.data_ranks();
        let (micro_batch_size, micro_batches) = if self.layout.pipeline == 1 { (sequences, 1) } else { (1, sequences) };
        // At 100 Mbit/s a step of ZeRO-3 takes minutes.
        let measured = if self.layout.pipeline == 1 { 1 } else { 3 };
        Workload { micro_batch_size, micro_batches, seq_len: 128, steps: WARM_UP + measured, ..usual }
    }

    /// The keys of the recipe that `bench-train` gets as arguments.
    fn keys(self) -> Vec<String> {
        vec![
            format!("parallel.pipeline={}", self.layout.pipeline),
            format!("zero.stage={}", self.framework.stage()),
            "parallel.replicate=1".to_string(),
        ]
    }
}

/// The figures of all sides on the same hosts, in the order of [`SIDES`].
struct Setting {
    hosts: Hosts,
    runs: Vec<Vec<Run>>,
    /// In the order of [`RANKED`].
    predicted_s: Vec<Vec<f64>>,
}

impl Setting {
    fn new(hosts: usize, rate: &str) -> Self {
        let hosts = Hosts { hosts, ranks_per_host: RANKS / hosts, rate: rate.to_string(), delay: "0ms".to_string() };
        Setting { hosts, runs: vec![Vec::new(); SIDES.len()], predicted_s: vec![Vec::new(); RANKED.len()] }
    }

    /// Runs every side once, in varying order, and simulates those that are ranked.
    fn run_round(&mut self, bench: &Bench, costs: &Costs, round: usize) -> Result<()> {
        let mut order: Vec<usize> = (0..SIDES.len()).collect();
        order.rotate_left(round * SIDES.len() / ROUNDS);
        // One round shows that it is slower by far.
        order.retain(|&index| SIDES[index].name != ZERO_3.name || self.hosts.rate != "100mbit" || round == 0);
        let mut runs = Vec::new();
        for index in order {
            let side = SIDES[index];
            bench.set(&side.workload())?;
            let run = bench.run(side.framework, side.layout, Some(&self.hosts))?;
            println!(
                "{} hosts at {}, round {}: {:20} {:.2} s, {:.0} MB",
                self.hosts.hosts,
                self.hosts.rate,
                round + 1,
                side.name,
                run.step_s,
                run.peak_bytes / 1e6
            );
            // ZeRO-3 trains for fewer steps, so its last loss is another.
            if side.layout.pipeline > 1 {
                runs.push((side.framework, run));
            }
            self.runs[index].push(run);
        }
        check_losses(&runs, Precision::F32, PIPELINE.layout)?;
        costs.measure(bench)?;
        for (side, predicted_s) in RANKED.iter().zip(&mut self.predicted_s) {
            bench.set(&side.workload())?;
            predicted_s.push(predict_on_hosts(
                &costs.program,
                &bench.recipe(),
                RANKS,
                &costs.path,
                Some(&self.hosts),
                &side.keys(),
            )?);
        }
        Ok(())
    }

    fn step_s(&self, side: Side) -> f64 {
        median_of(self.runs_of(side), |run| run.step_s)
    }

    fn runs_of(&self, side: Side) -> &[Run] {
        let index = SIDES.iter().position(|other| other.name == side.name).expect("a side of the comparison");
        &self.runs[index]
    }

    /// Whether no pipeline is slower than PyTorch's, or needs more memory, and whether the simulated ranking is the measured one.
    fn judge(&self) -> (bool, String) {
        let (mut holds, mut figures) = (true, Vec::new());
        for ours in SIDES.iter().filter(|side| matches!(side.framework, Framework::ShardwisePipeline(_))) {
            let is_peer = |side: &&Side| side.framework.is_peer() && side.framework.counterpart() == ours.framework;
            let Some(peer) = SIDES.iter().find(is_peer).filter(|peer| peer.layout == ours.layout) else { continue };
            let (ours, theirs) = (self.runs_of(*ours), self.runs_of(*peer));
            let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| theirs.step_s / ours.step_s).collect();
            let peak = |runs: &[Run]| median_of(runs, |run| run.peak_bytes);
            let (faster, memory) = (median(&ratios), peak(ours) / peak(theirs));
            holds &= faster >= 1. && memory < 1.;
            figures.push(format!("{faster:.2} times as fast as {} in {memory:.2} of its memory", peer.name));
        }
        let measured = ranking(RANKED.map(|side| self.step_s(side)));
        let simulated = ranking([0, 1, 2].map(|index| median(&self.predicted_s[index])));
        holds &= measured == simulated;
        let seconds = |index: usize| {
            format!(
                "{} {:.2} ({:.2}) s",
                RANKED[index].name,
                self.step_s(RANKED[index]),
                median(&self.predicted_s[index])
            )
        };
        figures.push(format!("measured (simulated): {}", measured.map(seconds).join(" < ")));
        let Hosts { hosts, rate, .. } = &self.hosts;
        (holds, format!("{hosts} hosts at {rate}: {}", figures.join(", ")))
    }
}

/// The sides from fast to slow.
fn ranking(times: [f64; 3]) -> [usize; 3] {
    let mut order = [0, 1, 2];
    order.sort_by(|&a, &b| times[a].total_cmp(&times[b]));
    order
}

/// The costs of a step, measured here on as many ranks as there are cores, just before they are used.
struct Costs {
    program: PathBuf,
    path: PathBuf,
}

impl Costs {
    fn new(scratch: &Path) -> Result<Self> {
        Ok(Costs { program: shardwise()?, path: scratch.join("costs.json") })
    }

    fn measure(&self, bench: &Bench) -> Result<()> {
        bench.set(&PIPELINE.workload())?;
        let ranks = std::thread::available_parallelism()?.get().min(RANKS);
        profile(&self.program, &bench.recipe(), ranks, 2, &[format!("--costs={}", self.path.display())])?;
        Ok(())
    }
}

pub(crate) fn compare_on_hosts() -> Result<Verdict> {
    let scratch = Scratch::new("pipeline-hosts")?;
    let costs = Costs::new(scratch.path())?;
    let bench = Bench::new(&PIPELINE.workload())?;
    let mut settings: Vec<Setting> =
        RATES.iter().flat_map(|rate| [2, 4].map(|hosts| Setting::new(hosts, rate))).collect();
    for round in 0..ROUNDS {
        for setting in &mut settings {
            setting.run_round(&bench, &costs, round)?;
        }
        settings.iter().for_each(|setting| println!("{}", setting.judge().1));
    }
    let judged: Vec<(bool, String)> = settings.iter().map(Setting::judge).collect();
    Ok(Verdict {
        figure: judged.iter().map(|(_, figures)| figures.clone()).collect::<Vec<_>>().join("; "),
        bar: "not slower, less memory, the same ranking".to_string(),
        holds: judged.iter().all(|(holds, _)| *holds),
    })
}
