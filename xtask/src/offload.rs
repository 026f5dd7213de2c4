//! The claims about offloading.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shardwise_compare::frameworks::{
    Bench, Framework, Layout, Precision, Run, Size, Workload, median_of as median_of_runs, peers_python, run_rounds,
};
use shardwise_harness::launcher;

use crate::claim::{Claim, Verdict};
use crate::mutants;
use crate::setting::{BASE, M124, M213, Setting, compare_memory, number, profile, shardwise};
use crate::slow_disk;
use crate::workspace::{Scratch, build, median, output_of, root};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "offload",
        name: "memory",
        what: "the simulated peak memory with offloading is within 5% of the measured one",
        heavy: true,
        measure: memory,
    },
    Claim {
        group: "offload",
        name: "capacity",
        what: "2 ranks of 3 GiB each train 6 times the parameters that they train without offloading, over 1.5 billion, for 10 steps",
        heavy: true,
        measure: capacity,
    },
    Claim {
        group: "offload",
        name: "speed",
        what: "with clipping, a step that offloads takes at most 1.15 times (backward + the longer of forward and I/O at the speed of fio)",
        heavy: true,
        measure: speed,
    },
    Claim {
        group: "offload",
        name: "overlap",
        what: "with updates in the passes, a step that offloads takes at most 1.15 times the longer of a step in memory and I/O at \
               the speed of fio",
        heavy: true,
        measure: overlap,
    },
    Claim {
        group: "offload",
        name: "adamw",
        what: "AdamW takes at most 1.1 times as long as a loop with its reads and writes, and no longer than DeepSpeed's CPUAdam",
        heavy: true,
        measure: adamw,
    },
    Claim {
        group: "offload",
        name: "peers",
        what: "a step with optimizer state on a disk is faster than DeepSpeed's, and takes less memory",
        heavy: true,
        measure: peers,
    },
    Claim {
        group: "offload",
        name: "slow-disk",
        what: "a rank whose disk hardly answers any more is named with what it waits for, and the run resumes with the same numbers",
        heavy: true,
        measure: slow_disk::measure,
    },
    Claim {
        group: "offload",
        name: "mutants",
        what: "the mutants of zero/mutants that concern offloading and updates in the passes",
        heavy: true,
        measure: || mutants::measure_some(&["offload-", "in-backward-", "in-forward-"]),
    },
];

const STATE: &[&str] = &["optimizer"];
const BOTH: &[&str] = &["optimizer", "gradients"];
const PARAMETERS: &[&str] = &["parameters"];
const ALL: &[&str] = &["optimizer", "parameters", "gradients", "activations"];

fn memory() -> Result<Verdict> {
    let each = Setting { micro_batches: 2, reduce_each_micro_batch: true, ..BASE };
    compare_memory(&[
        Setting { offload: STATE, ..BASE },
        Setting { offload: PARAMETERS, ..BASE },
        Setting { offload: PARAMETERS, dtype: "bf16", prefetch: 2, sequences: 1, ..BASE },
        Setting { offload: BOTH, ..BASE },
        Setting { offload: BOTH, stage: 0, ..BASE },
        Setting { offload: BOTH, stage: 1, ..BASE },
        Setting { offload: BOTH, stage: 2, prefetch: 0, ..BASE },
        Setting { offload: BOTH, prefetch: 2, ..BASE },
        Setting { offload: BOTH, dtype: "bf16", sequences: 1, ..BASE },
        Setting { offload: BOTH, ..each },
        Setting { offload: BOTH, replicate: 2, ranks: 4, ..BASE },
        Setting { offload: BOTH, pipeline: 2, micro_batches: 2, stage: 0, ..BASE },
        Setting { offload: ALL, checkpointing: "full", size: &M124, ..BASE },
        Setting { offload: ALL, checkpointing: "full", dtype: "bf16", sequences: 16, micro_batches: 2, ..BASE },
        Setting { in_backward: true, ..BASE },
        Setting { in_backward: true, stage: 1, prefetch: 2, ..BASE },
        Setting { in_backward: true, offload: STATE, dtype: "bf16", sequences: 1, ..BASE },
        Setting { in_backward: true, offload: STATE, ..each },
        Setting { in_forward: true, ..BASE },
        Setting { in_forward: true, offload: BOTH, dtype: "bf16", sequences: 1, ..BASE },
        Setting { in_backward: true, in_forward: true, offload: STATE, ..BASE },
    ])
}

const ROUNDS: usize = 3;

/// A round: a step in memory, one that offloads, and what fio moves on the same disk, in turn.
struct Round {
    memory_s: f64,
    disk_s: f64,
    /// Parts of the step in memory.
    forward_s: f64,
    update_s: f64,
    /// How long the bytes of all ranks would take at the speed of fio.
    io_s: f64,
}

impl Round {
    fn backward_s(&self) -> f64 {
        self.memory_s - self.forward_s - self.update_s
    }
}

fn rounds(plain: &Setting, offloading: &Setting) -> Result<Vec<Round>> {
    let (program, scratch) = (shardwise()?, Scratch::new("offload-speed")?);
    let round = |number_of_round: usize| {
        let measure = |setting: &Setting| {
            let recipe = setting.write(&scratch, setting.size.blocks)?;
            profile(&program, &recipe, setting.ranks, 4, &[])
        };
        let (memory, disk, disk_bytes_per_s) = (measure(plain)?, measure(offloading)?, fio(scratch.path())?);
        let of_units = |report: &Value, key: &str| -> f64 {
            let units = report["profile"]["units"].as_array().map_or(&[][..], Vec::as_slice);
            units.iter().map(|unit| number(unit, key)).sum()
        };
        let moved = ["read_bytes", "written_bytes"].map(|key| number(&disk["offload"], key)).iter().sum::<f64>();
        let moved = moved * plain.ranks as f64;
        let [memory_s, disk_s] = [&memory, &disk].map(|report| number(report, "least_step_s"));
        let (forward_s, update_s) = (of_units(&memory, "forward_s"), of_units(&memory, "optimizer_s"));
        let round = Round { memory_s, disk_s, forward_s, update_s, io_s: moved / disk_bytes_per_s };
        println!(
            "round {number_of_round}: {disk_s:.2} s, in memory {memory_s:.2} s: forward {forward_s:.2}, update {update_s:.2}; {:.2} GB at \
             {:.2} GB/s are {:.2} s; waiting for the disk {:.2} s, checksums {:.1}% of the step",
            moved / 1e9,
            disk_bytes_per_s / 1e9,
            round.io_s,
            of_units(&disk, "offload_s"),
            100. * number(&disk["offload"], "checksum_s") / disk_s,
        );
        Ok(round)
    };
    (1..=ROUNDS).map(round).collect()
}

fn median_of(rounds: &[Round], figure: impl Fn(&Round) -> f64) -> f64 {
    median(&rounds.iter().map(figure).collect::<Vec<_>>())
}

fn describe_times(rounds: &[Round]) -> String {
    let [disk_s, memory_s, io_s] =
        [|round: &Round| round.disk_s, |round: &Round| round.memory_s, |round: &Round| round.io_s]
            .map(|figure: fn(&Round) -> f64| median_of(rounds, figure));
    format!("{disk_s:.2} s, in memory {memory_s:.2} s, I/O {io_s:.2} s")
}

fn speed() -> Result<Verdict> {
    let plain = Setting { size: &M213, dtype: "bf16", ..BASE };
    let (mut ratios, mut texts) = (Vec::new(), Vec::new());
    for (in_forward, when) in [(false, "after the backward pass"), (true, "in the next forward pass")] {
        let rounds = rounds(&plain, &Setting { offload: BOTH, in_forward, ..plain })?;
        let ratio = median_of(&rounds, |round| round.disk_s / (round.backward_s() + round.forward_s.max(round.io_s)));
        texts.push(format!("updates {when}: {ratio:.2} times ({})", describe_times(&rounds)));
        ratios.push(ratio);
    }
    let holds = ratios.iter().all(|&ratio| ratio <= 1.15);
    Ok(Verdict { figure: texts.join("; "), bar: "1.15".to_string(), holds })
}

fn overlap() -> Result<Verdict> {
    let plain = Setting { size: &M124, dtype: "bf16", in_backward: true, ..BASE };
    let (mut ratios, mut texts) = (Vec::new(), Vec::new());
    for (sequences, in_forward) in [(1, false), (1, true), (4, false), (4, true)] {
        let plain = Setting { sequences, ..plain };
        let rounds = rounds(&plain, &Setting { offload: STATE, in_forward, ..plain })?;
        let ratio = median_of(&rounds, |round| round.disk_s / round.memory_s.max(round.io_s));
        let passes = if in_forward { "both passes" } else { "the backward pass" };
        let times = describe_times(&rounds);
        texts.push(format!("{sequences} sequences, updates in {passes}: {ratio:.2} times ({times})"));
        ratios.push(ratio);
    }
    let holds = ratios.iter().all(|&ratio| ratio <= 1.15);
    Ok(Verdict { figure: texts.join("; "), bar: "1.15".to_string(), holds })
}

/// Stage 3 of DeepSpeed with its optimizer state on a disk, FSDP2 with its own in memory, and ours on the disk, in turn.
fn peers() -> Result<Verdict> {
    let workload = Workload { offloads: true, ..Workload::new(Size::Medium, Precision::F32) };
    let bench = Bench::new(&workload)?;
    let frameworks = [Framework::Shardwise(3), Framework::DeepSpeed(3), Framework::Fsdp2];
    let rounds = run_rounds(&bench, &workload, &frameworks, Layout::data_parallel(RANKS), 3)?;
    let runs = |side: usize| rounds.iter().map(move |round| &round[side].1);
    let figures = |figure: fn(&Run) -> f64| [0, 1, 2].map(|side| median_of_runs(runs(side), figure));
    let (steps_s, peaks_bytes) = (figures(|run| run.step_s), figures(|run| run.peak_bytes));
    let side = |side: usize| format!("{}: {:.2} s, {:.0} MB", frameworks[side], steps_s[side], peaks_bytes[side] / 1e6);
    Ok(Verdict {
        figure: format!("{}; {}; {}", side(0), side(1), side(2)),
        bar: "less time and memory than DeepSpeed".to_string(),
        holds: steps_s[0] < steps_s[1] && peaks_bytes[0] < peaks_bytes[1],
    })
}

/// Our AdamW on two ranks with one thread each, and DeepSpeed's on two threads, in turn.
fn adamw() -> Result<Verdict> {
    const ELEMENTS: usize = 1 << 26;
    let program = build("bench-adamw", &["build", "--release", "--workspace", "--bins"])?;
    let python = peers_python()?;
    let environment = python.ancestors().nth(2).context("the environment of the peers")?;
    let (mut to_loop, mut to_peer) = (Vec::new(), Vec::new());
    for round in 1..=5 {
        let mut ours = launcher(None, RANKS, Duration::from_secs(600));
        ours.arg("OMP_NUM_THREADS=1").arg(&program).arg((ELEMENTS / RANKS).to_string());
        let ours: Value = serde_json::from_str(&output_of(&mut ours)?)?;
        let mut peer = Command::new(&python);
        peer.env("TORCH_EXTENSIONS_DIR", environment.join("extensions")).env("DS_ACCELERATOR", "cpu");
        let path = std::env::var("PATH").unwrap_or_default();
        peer.env("PATH", format!("{}:{path}", environment.join("bin").display()));
        peer.env("OMP_NUM_THREADS", RANKS.to_string());
        peer.arg(root().join("bench/peers/adamw.py")).arg(ELEMENTS.to_string());
        let said = output_of(&mut peer)?;
        let peer_s: f64 = said.lines().last().context("DeepSpeed's time")?.trim().parse()?;
        let [update_s, loop_s] = ["update_s", "loop_s"].map(|key| number(&ours, key));
        let gigabytes = 28. * ELEMENTS as f64 / 1e9;
        println!(
            "round {round}: AdamW {update_s:.3} s ({:.1} GB/s), loop {loop_s:.3} s ({:.1} GB/s), CPUAdam {peer_s:.3} s",
            gigabytes / update_s,
            gigabytes / loop_s
        );
        to_loop.push(update_s / loop_s);
        to_peer.push(update_s / peer_s);
    }
    let [to_loop, to_peer] = [median(&to_loop), median(&to_peer)];
    Ok(Verdict {
        figure: format!("{to_loop:.2} times the loop, {to_peer:.2} times CPUAdam"),
        bar: "1.1 times the loop, 1.0 times CPUAdam".to_string(),
        holds: to_loop <= 1.1 && to_peer <= 1.,
    })
}

/// The bytes that fio reads and writes per second with direct I/O, half of each, by two jobs.
fn fio(folder: &Path) -> Result<f64> {
    let mut command = Command::new("fio");
    command.args([
        "--name=mix",
        "--rw=readwrite",
        "--rwmixread=50",
        "--bs=4m",
        "--direct=1",
        "--ioengine=libaio",
        "--iodepth=4",
    ]);
    command.args([
        "--numjobs=2",
        "--size=1g",
        "--runtime=8",
        "--time_based",
        "--group_reporting",
        "--output-format=json",
    ]);
    let said = output_of(command.arg(format!("--directory={}", folder.display())))
        .context("this claim needs fio: apt-get install fio")?;
    let report: Value = serde_json::from_str(said.get(said.find('{').unwrap_or(0)..).unwrap_or_default())?;
    let bytes_per_s = |direction: &str| number(&report["jobs"][0][direction], "bw_bytes");
    Ok(bytes_per_s("read") + bytes_per_s("write"))
}

const RANKS: usize = 2;
const LIMIT_BYTES: usize = 3 << 30;

/// A model of blocks of 28.3 million parameters, on the tokens of a text.
fn recipe(folder: &Path, corpus: &Path, blocks: usize, offloads: bool) -> Result<PathBuf> {
    let offload = if offloads { "[offload]\noptimizer = \".\"\ngradients = \".\"\n" } else { "" };
    let text = format!(
        "activation_checkpointing = \"full\"\n[model.llama]\nvocab_size = 4096\nhidden_size = 1536\nnum_hidden_layers = \
         {blocks}\nnum_attention_heads = 12\nintermediate_size = 4096\n[data]\ncorpus = \"{}\"\n[batch]\nmicro_batch_size = 1\nseq_len = \
         128\n[zero]\nstage = 3\n[precision]\nparam_dtype = \"bf16\"\n{offload}[optimizer]\nlr = 3e-4\n[schedule]\nkind = \
         \"constant\"\n[run]\nsteps = 10\nlog_every = 1\n",
        corpus.display()
    );
    let path = folder.join("recipe.toml");
    fs::write(&path, text)?;
    Ok(path)
}

/// A cgroup for each rank, which limits its memory.
struct Limits(Vec<PathBuf>);

impl Limits {
    fn new() -> Result<Self> {
        let is_v1 = Path::new("/sys/fs/cgroup/memory").exists();
        let parent = Path::new(if is_v1 { "/sys/fs/cgroup/memory" } else { "/sys/fs/cgroup" });
        let file = if is_v1 { "memory.limit_in_bytes" } else { "memory.max" };
        let group = |rank: usize| {
            let group = parent.join(format!("shardwise-{}-{rank}", std::process::id()));
            fs::create_dir_all(&group).context("a cgroup cannot be created: this claim needs root")?;
            fs::write(group.join(file), LIMIT_BYTES.to_string())?;
            Ok(group)
        };
        Ok(Limits((0..RANKS).map(group).collect::<Result<_>>()?))
    }

    /// Trains with each rank in its group. Returns what it prints, or the end of its complaints if it fails.
    fn train(&self, program: &Path, recipe: &Path) -> Result<std::result::Result<String, String>> {
        let prefix = self.0[0].to_string_lossy().trim_end_matches('0').to_string();
        let enter = format!("echo $$ >{prefix}$OMPI_COMM_WORLD_RANK/cgroup.procs && exec \"$0\" \"$@\"");
        let mut command = launcher(None, RANKS, Duration::from_secs(3600));
        command.args(["sh", "-c", &enter]).arg(program).arg("train").arg(recipe);
        let output = command.env("OMP_NUM_THREADS", "1").output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(Ok(said));
        }
        let complaints = String::from_utf8_lossy(&output.stderr);
        let end: Vec<&str> = complaints.lines().rev().take(12).collect();
        Ok(Err(format!("{}: {}", output.status, end.into_iter().rev().collect::<Vec<_>>().join("\n"))))
    }
}

impl Drop for Limits {
    fn drop(&mut self) {
        self.0.iter().for_each(|group| drop(fs::remove_dir(group)));
    }
}

/// The memory that a rank needs according to the dry run, in bytes, and the parameters of the model.
fn estimate(program: &Path, recipe: &Path) -> Result<[f64; 2]> {
    let mut command = Command::new(program);
    let said = output_of(command.arg("train").arg(recipe).args(["-n", &RANKS.to_string(), "--dry-run"]))?;
    let bytes_after = |word: &str| -> Result<f64> {
        let mut words = said.split_whitespace().skip_while(|found| *found != word).skip(1);
        let number: f64 = words.next().context("a number of bytes")?.parse()?;
        Ok(number * if words.next() == Some("GiB") { 1024. } else { 1. } * 1024. * 1024.)
    };
    // The shard of a rank has two bytes per parameter.
    Ok([bytes_after("total")?, RANKS as f64 * bytes_after("parameters")? / 2.])
}

fn losses(said: &str) -> Vec<f64> {
    let steps = said.lines().filter(|line| line.starts_with("step "));
    steps.filter_map(|line| line.split_whitespace().nth(3)?.parse().ok()).collect()
}

fn capacity() -> Result<Verdict> {
    let (program, scratch) = (shardwise()?, Scratch::new("offload")?);
    let folder = scratch.path();
    let corpus = folder.join("kjv");
    let run = |command: &mut Command| output_of(command.current_dir(folder));
    let text = run(Command::new("bible").args(["-f", "Gen1:1-Rev22:21"]))?;
    fs::create_dir(folder.join("text"))?;
    fs::write(folder.join("text/kjv.txt"), text)?;
    run(Command::new(&program).args(["tokenize", "text", "--to", "kjv", "--vocabulary", "4096"]))?;

    let limits = Limits::new()?;
    let plain = |blocks| recipe(folder, &corpus, blocks, false);
    // The largest model that fits in memory, and one that is a little larger.
    let mut blocks = 1;
    while estimate(&program, &plain(blocks + 1)?)?[0] <= LIMIT_BYTES as f64 {
        blocks += 1;
    }
    let [_, parameters] = estimate(&program, &plain(blocks)?)?;
    let trained = limits.train(&program, &plain(blocks)?)?;
    println!("in memory, {blocks} blocks, {:.0} million parameters: {trained:?}", parameters / 1e6);
    let larger = blocks + blocks.div_ceil(8);
    let refused = limits.train(&program, &plain(larger)?)?;
    println!("in memory, {larger} blocks: {refused:?}");
    ensure!(trained.is_ok() && refused.is_err(), "the limit is not where the estimate sees it");

    let mut offloaded = 6 * blocks;
    let [needed, mut more] = estimate(&program, &recipe(folder, &corpus, offloaded, true)?)?;
    while more < (6. * parameters).max(1.5e9) {
        offloaded += 1;
        more = estimate(&program, &recipe(folder, &corpus, offloaded, true)?)?[1];
    }
    println!(
        "offloaded, {offloaded} blocks, {:.0} million parameters, estimated {:.2} GiB",
        more / 1e6,
        needed / 1.074e9
    );
    let said = limits.train(&program, &recipe(folder, &corpus, offloaded, true)?)?.map_err(anyhow::Error::msg)?;
    println!("{said}");
    let losses = losses(&said);
    let [first, last] = [losses.first(), losses.last()].map(|loss| loss.copied().unwrap_or(f64::NAN));
    Ok(Verdict {
        figure: format!(
            "{:.2} billion parameters, {:.1} times the {:.2} billion that fit in memory; {} steps, loss {first:.2} to {last:.2}",
            more / 1e9,
            more / parameters,
            parameters / 1e9,
            losses.len(),
        ),
        bar: "6 times, 1.5 billion, 10 steps, a falling loss".to_string(),
        holds: more >= 6. * parameters && more >= 1.5e9 && losses.len() == 10 && last < first,
    })
}
