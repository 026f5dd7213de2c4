//! The claims about compiled models.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shardwise_compare::frameworks::{Bench, Framework, Layout, Precision, Run, Size, WARM_UP, Workload, run_rounds};
use shardwise_harness::launcher;

use crate::claim::{Claim, Verdict};
use crate::setting::{BASE, M124, Setting, compare_memory, compile, python, shardwise};
use crate::workspace::{Scratch, build, median, output_of, root};

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
        what: "2 ranks, stage 3, 42M: compiled units are 1.15 times as fast as eager ones in bf16, not slower in f32, 1.2 times as fast as FSDP2 \
               with torch.compile, and need no more memory",
        heavy: true,
        measure: || speed(Size::Small),
    },
    Claim {
        group: "compiled",
        name: "speed-124m",
        what: "as compiled/speed, with 124M parameters",
        heavy: true,
        measure: || speed(Size::Medium),
    },
    Claim {
        group: "compiled",
        name: "families",
        what: "the built-in families, compiled from a recipe with model.compiled = true and trained for 20 steps, have the losses of their eager layers",
        heavy: true,
        measure: families,
    },
    Claim {
        group: "compiled",
        name: "classifiers",
        what: "a vision transformer and a convolutional network in PyTorch, compiled and trained from Rust for 20 steps at stage 3 on 2 ranks, have \
               the losses of torch's AdamW",
        heavy: true,
        measure: classifiers,
    },
    Claim {
        group: "compiled",
        name: "memory",
        what: "simulated peaks of steps with compiled layers are within 5% of measured ones",
        heavy: true,
        measure: memory,
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
    let python = python()?;
    let python = Path::new(&python);
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

fn speed(size: Size) -> Result<Verdict> {
    let (mut figures, mut holds) = (Vec::new(), true);
    for precision in [Precision::F32, Precision::Bf16] {
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

fn memory() -> Result<Verdict> {
    let compiled = Setting { compiled: true, ..BASE };
    compare_memory(&[
        compiled,
        Setting { stage: 0, ..compiled },
        Setting { checkpointing: "full", ..compiled },
        Setting { checkpointing: "selective", ..compiled },
        Setting { dtype: "bf16", ..compiled },
        Setting { dtype: "bf16", stage: 1, micro_batches: 2, ..compiled },
        Setting { dtype: "bf16", checkpointing: "selective", ..compiled },
        Setting { size: &M124, dtype: "bf16", ..compiled },
    ])
}

const SHAPE: &str =
    "vocab_size = 512\nhidden_size = 64\nnum_hidden_layers = 2\nnum_attention_heads = 4\nintermediate_size = 128\n";

/// The name of a family, its part of a recipe, the type of its parameters, and how far losses may differ.
fn family_recipes() -> [(&'static str, String, &'static str, f64); 7] {
    let llama = |more: &str| format!("[model.llama]\n{SHAPE}{more}");
    let grouped = "num_key_value_heads = 2\n";
    let gpt2 = "[model.gpt2]\nvocab_size = 512\nn_positions = 64\nn_embd = 64\nn_layer = 2\nn_head = 4\n".to_string();
    [
        ("Llama", llama(grouped), "f32", TOLERANCE),
        ("Llama", llama(grouped), "bf16", 1e-2),
        ("Llama", llama(grouped), "f16", 1e-2),
        ("Mistral", llama("num_key_value_heads = 2\nsliding_window = 16\n"), "f32", TOLERANCE),
        ("Qwen 2", llama("qkv_bias = true\ntie_word_embeddings = true\n"), "f32", TOLERANCE),
        ("Qwen 3", llama("qk_norm = true\nhead_dim = 16\n"), "f32", TOLERANCE),
        ("GPT-2", gpt2, "f32", TOLERANCE),
    ]
}

fn families() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("families")?;
    let mut holds = true;
    let mut figures = Vec::new();
    for (name, model, dtype, tolerance) in family_recipes() {
        let recipe = scratch.path().join("recipe.toml");
        let text = format!(
            "{model}[data]\nseed = 3\n[batch]\nmicro_batch_size = 2\nglobal_batch_size = 4\nseq_len = 32\n[zero]\nstage = 3\n\
             [precision]\nparam_dtype = \"{dtype}\"\n[optimizer]\nlr = 1e-3\n[run]\nsteps = {STEPS}\nlog_every = 1\n"
        );
        std::fs::write(&recipe, text)?;
        compile(&program, &recipe, &[])?;
        let losses = |compiled: bool| {
            let folder = scratch.path().join(format!("{name}-{dtype}-{compiled}"));
            let mut command = Command::new(&program);
            command.env("OMP_NUM_THREADS", "1").arg("train").arg(&recipe).args(["-n", "2", "--plain"]);
            command
                .arg(format!("--set=model.compiled={compiled}"))
                .arg(format!("--set=run.folder={}", folder.display()));
            output_of(&mut command)?;
            read_losses(&folder)
        };
        let (eager, compiled) = (losses(false)?, losses(true)?);
        ensure!(
            eager.len() == STEPS && compiled.len() == STEPS,
            "{name}: {} and {} losses",
            eager.len(),
            compiled.len()
        );
        let difference = largest_difference(&compiled, &eager);
        holds &= difference <= tolerance;
        let figure = format!("{name} {dtype} {difference:.0e}");
        println!("{figure}");
        figures.push(figure);
    }
    Ok(Verdict { figure: figures.join(", "), bar: format!("{TOLERANCE:.0e} in f32, 1e-2 in bf16 and f16"), holds })
}

fn classifiers() -> Result<Verdict> {
    let example = build("compiled", &["build", "--release", "--workspace", "--examples"])?;
    let (program, scratch, python) = (shardwise()?, Scratch::new("classifiers")?, python()?);
    let (mut figures, mut worst) = (Vec::new(), 0f64);
    for name in ["vision_transformer", "convolutional"] {
        let (model, package) = (root().join(format!("python/examples/{name}.py")), scratch.path().join(name));
        compile(&program, &model, &["--weights", "--out", &package.display().to_string()])?;
        let mut ranks = launcher(None, 2, Duration::from_secs(600));
        let printed = output_of(ranks.arg("OMP_NUM_THREADS=1").arg(&example).arg(&package))?;
        let losses = printed.lines().filter_map(|line| line.split_once("loss ")?.1.parse().ok());
        let ours: Vec<f64> = losses.collect();
        // Two ranks with two micro-batches of four images.
        let mut reference = Command::new(&python);
        reference.arg(root().join("reference/classifiers.py")).arg(&model).arg(&package).arg("16");
        let theirs: Vec<f64> = serde_json::from_str(output_of(&mut reference)?.trim())?;
        ensure!(ours.len() == STEPS && theirs.len() == STEPS, "{name}: {} and {} losses", ours.len(), theirs.len());
        let difference = largest_difference(&ours, &theirs);
        worst = worst.max(difference);
        figures.push(format!("{name} {difference:.0e}, loss {:.2} to {:.2}", ours[0], ours[STEPS - 1]));
        println!("{}", figures[figures.len() - 1]);
    }
    Ok(Verdict { figure: figures.join("; "), bar: format!("{TOLERANCE:.0e}"), holds: worst <= TOLERANCE })
}

/// The largest relative difference of losses.
fn largest_difference(ours: &[f64], theirs: &[f64]) -> f64 {
    ours.iter().zip(theirs).map(|(ours, theirs)| (ours / theirs - 1.).abs()).fold(0., f64::max)
}

/// The losses in the journal of a run.
fn read_losses(folder: &Path) -> Result<Vec<f64>> {
    let journal = std::fs::read_to_string(folder.join("metrics.jsonl"))?;
    let entries = journal.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    Ok(entries.filter_map(|entry| entry["loss"].as_f64()).collect())
}

/// Makes Python, compilers and linkers unusable for a command, in a mount namespace of its own.
const WITHOUT_COMPILERS: &str = r#"
for folder in ${PATH//:/ } /usr/lib/gcc /usr/libexec/gcc "$SHARDWISE_TORCH"/../../../../bin; do
    find -L "$folder" -maxdepth 3 -type f \( -name 'python*' -o -name '*gcc*' -o -name '*g++*' -o -name 'c++*' -o -name 'cc1*' -o -name 'clang*' \
        -o -name 'ld' -o -name 'ld.bfd' -o -name 'ld.gold' -o -name 'ld.lld' -o -name 'collect2' -o -name 'as' -o -name 'rustc*' -o -name 'cargo*' \) -perm -1 2>/dev/null
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
    let ours = read_losses(&folder.join("checkpoints"))?;

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
    let exported = largest_difference(&after[..1], &after[1..]);
    Ok(largest_difference(&ours, &losses).max(exported))
}
