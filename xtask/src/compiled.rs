//! The claims about compiled models.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shardwise_compare::frameworks::{Bench, Framework, Layout, Precision, Run, Size, WARM_UP, Workload, run_rounds};
use shardwise_harness::launcher;

use crate::claim::{Claim, Verdict};
use crate::setting::shardwise;
use crate::workspace::{Scratch, median, output_of, root};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "compiled",
        name: "architectures",
        what: "eleven Hugging Face architectures, compiled and trained for 20 steps at stage 3 on 2 ranks, have the losses of transformers and \
           torch's AdamW, and their exports load in transformers",
        heavy: true,
        measure: architectures,
    },
    Claim {
        group: "compiled",
        name: "speed",
        what: "2 ranks, stage 3, 42M and 124M: compiled units are 1.15 times as fast as eager ones in bf16, not slower in f32, 1.2 times as fast \
               as FSDP2 with torch.compile, and need no more memory",
        heavy: true,
        measure: speed,
    },
    Claim {
        group: "compiled",
        name: "start",
        what: "2 ranks, 42M, bf16, where Python and compilers cannot be executed: a compiled model trains, and launch to first step takes less than a \
               second",
        heavy: true,
        measure: start,
    },
];

const ARCHITECTURES: [&str; 11] =
    ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "olmo2", "bert"];
const STEPS: usize = 20;
const TOLERANCE: f64 = 1e-4;

fn architectures() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("architectures")?;
    let python = output_of(&mut Command::new(root().join("python/setup")))?;
    let python = Path::new(python.trim());
    let mut failures = Vec::new();
    let mut worst = 0f64;
    for name in ARCHITECTURES {
        match compare(&program, python, scratch.path(), name) {
            Ok(difference) => {
                println!("{name}: losses differ by at most {difference:.1e}");
                worst = worst.max(difference);
            }
            Err(error) => {
                println!("{name}: {error:#}");
                failures.push(name);
            }
        }
    }
    let failed = if failures.is_empty() { String::new() } else { format!("; failed: {}", failures.join(", ")) };
    Ok(Verdict {
        figure: format!("{} architectures, losses differ by at most {worst:.1e}{failed}", ARCHITECTURES.len()),
        bar: format!("{TOLERANCE:.0e}"),
        holds: failures.is_empty() && worst <= TOLERANCE,
    })
}

const ROUNDS: usize = 3;

fn speed() -> Result<Verdict> {
    let (mut figures, mut holds) = (Vec::new(), true);
    for (size, precision) in [
        (Size::Small, Precision::Bf16),
        (Size::Small, Precision::F32),
        (Size::Medium, Precision::Bf16),
        (Size::Medium, Precision::F32),
    ] {
        let workload = Workload::new(size, precision);
        let bench = Bench::new(&workload)?;
        let compile_s = bench.compile(&workload)?;
        println!("{size}, {precision}: compiled in {compile_s:.0} s");
        let frameworks = [Framework::ShardwiseCompiled(3), Framework::Shardwise(3), Framework::Fsdp2Compiled];
        let rounds = run_rounds(&bench, &workload, &frameworks, Layout::data_parallel(2), ROUNDS)?;
        let ratio = |other: usize, figure: fn(&Run) -> f64| {
            median(&rounds.iter().map(|runs| figure(&runs[other].1) / figure(&runs[0].1)).collect::<Vec<_>>())
        };
        let (eager, fsdp2) = (ratio(1, |run| run.step_s), ratio(2, |run| run.step_s));
        let (eager_cpu, memory) = (ratio(1, |run| run.cpu_s), 1. / ratio(1, |run| run.peak_bytes));
        holds &= eager >= if precision == Precision::Bf16 { 1.15 } else { 1. } && fsdp2 >= 1.2 && memory <= 1.;
        let figure = format!(
            "{size} {precision}: {eager:.2} times as fast as eager ({eager_cpu:.2} in CPU time) in {memory:.2} of its memory, {fsdp2:.2} \
             times as fast as FSDP2, compiled"
        );
        println!("{figure}");
        figures.push(figure);
    }
    Ok(Verdict { figure: figures.join("; "), bar: "1.15 in bf16, 1 in f32; 1.2; at most 1".to_string(), holds })
}

/// Makes Python, compilers and linkers unusable for a command, in a mount namespace of its own.
const WITHOUT_COMPILERS: &str = r#"
for folder in ${PATH//:/ } /usr/lib/gcc /usr/libexec/gcc "$SHARDWISE_TORCH"/../../../../bin; do
    find -L "$folder" -maxdepth 3 -type f \( -name 'python*' -o -name '*gcc*' -o -name '*g++*' -o -name 'c++*' -o -name 'cc1*' -o -name 'clang*' \
        -o -name 'ld' -o -name 'ld.*' -o -name 'collect2' -o -name 'as' -o -name 'rustc*' -o -name 'cargo*' \) -perm -1 2>/dev/null
done | sort -u | while read -r program; do mount --bind /dev/null "$program"; done
for program in python3 g++ cc rustc; do
    if "$program" --version >/dev/null 2>&1; then echo "$program still runs" >&2; exit 1; fi
done
export SHARDWISE_LAUNCHED=$(date +%s.%N)
exec "$@"
"#;

fn start() -> Result<Verdict> {
    let workload = Workload { steps: WARM_UP + 1, ..Workload::new(Size::Small, Precision::Bf16) };
    let bench = Bench::new(&workload)?;
    bench.compile(&workload)?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let ranks = launcher(None, 2, Duration::from_secs(600));
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "bash", "-euc", WITHOUT_COMPILERS, "bash"])
            .arg(ranks.get_program())
            .args(ranks.get_args());
        command.envs(ranks.get_envs().filter_map(|(key, value)| Some((key, value?))));
        command.env("SHARDWISE_TORCH", option_env!("LIBTORCH").unwrap_or_default());
        command.args(["OMP_NUM_THREADS=1", &format!("SHARDWISE_WARM_UP={WARM_UP}")]);
        let printed = output_of(command.arg(bench.program()).arg("stage-3").arg(bench.compiled_recipe()))?;
        let last: Value = serde_json::from_str(printed.lines().last().context("it printed nothing")?)?;
        times.push(last["ready_seconds"].as_f64().context("it printed no time")?);
    }
    let ready_s = median(&times);
    Ok(Verdict { figure: format!("{ready_s:.2} s"), bar: "1 s".to_string(), holds: ready_s < 1. })
}

/// Compiles and trains a model, and trains it with transformers. Returns the largest relative difference of losses.
fn compare(program: &Path, python: &Path, scratch: &Path, name: &str) -> Result<f64> {
    let script = root().join("python/tests/architectures.py");
    output_of(Command::new(python).arg(script).arg(scratch).arg(name))?;
    let (package, folder) = (scratch.join(name), scratch.join(format!("{name}-run")));
    std::fs::create_dir_all(&folder)?;
    let recipe = folder.join("recipe.toml");
    let text = format!(
        "[model]\npackage = \"{}\"\n[init]\nweights = \"{}/weights.safetensors\"\n[data]\nseed = 3\n[batch]\nmicro_batch_size = 2\n\
         global_batch_size = 4\nseq_len = 32\n[zero]\nstage = 3\n[optimizer]\nlr = 1e-3\nbetas = [0.9, 0.95]\neps = 1e-8\n\
         weight_decay = 0.1\n[run]\nsteps = {STEPS}\nlog_every = 1\n[checkpoints]\nfolder = \"checkpoints\"\nevery_steps = {STEPS}\n",
        package.display(),
        package.display(),
    );
    std::fs::write(&recipe, text)?;
    let run = |arguments: &[&str]| {
        output_of(Command::new(program).current_dir(&folder).env("OMP_NUM_THREADS", "1").args(arguments))
    };
    run(&["train", "recipe.toml", "-n", "2", "--plain"])?;
    run(&["checkpoint", "export", "checkpoints", "exported", "--dtype", "f32"])?;
    let journal = std::fs::read_to_string(folder.join("checkpoints/metrics.jsonl"))?;
    let entries = journal.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let ours: Vec<f64> = entries.filter_map(|entry| entry["loss"].as_f64()).collect();

    let mut reference = Command::new(python);
    reference.arg(root().join("reference/compiled.py")).arg(&package).arg(&recipe).arg(STEPS.to_string());
    let printed = output_of(reference.arg(folder.join("exported")))?;
    let theirs: Value = serde_json::from_str(printed.lines().last().context("it printed nothing")?)?;
    let numbers =
        |key: &str| -> Vec<f64> { theirs[key].as_array().into_iter().flatten().filter_map(Value::as_f64).collect() };
    let (losses, after) = (numbers("losses"), numbers("after"));
    ensure!(
        ours.len() == STEPS && losses.len() == STEPS && after.len() == 2,
        "{} and {} losses",
        ours.len(),
        losses.len()
    );
    let pairs = ours.iter().zip(&losses).chain([(&after[0], &after[1])]);
    Ok(pairs.map(|(ours, theirs)| (ours / theirs - 1.).abs()).fold(0., f64::max))
}
