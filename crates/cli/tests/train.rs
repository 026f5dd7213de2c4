//! `shardwise train` as a user runs it.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use shardwise_harness::{Stopwatch, rank_pids};

const RECIPE: &str = r#"
[model.llama]
vocab_size = 61
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 4
intermediate_size = 80
tie_word_embeddings = true

[data]
corpus = "tokens.bin"
token_bytes = 2
seed = 7

[batch]
micro_batch_size = 2
seq_len = 16
gradient_accumulation_steps = 2

[zero]
stage = 3

[optimizer]
lr = 1e-2
max_grad_norm = 1.0

[schedule]
kind = "cosine"
warmup_steps = 2

[run]
steps = 12
"#;

/// A folder with a recipe and repeating tokens, so that there is something to learn.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, recipe: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("shardwise-train-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let tokens: Vec<u8> = (0..4000u32).flat_map(|place| ((place * place % 61) as u16).to_le_bytes()).collect();
        std::fs::write(folder.join("tokens.bin"), tokens).unwrap();
        std::fs::write(folder.join("recipe.toml"), recipe).unwrap();
        Folder(folder)
    }

    fn recipe(&self) -> PathBuf {
        self.0.join("recipe.toml")
    }

    fn train(&self, arguments: &[&str]) -> Output {
        shardwise().arg("train").arg(self.recipe()).args(arguments).output().unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

fn shardwise() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardwise"));
    command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0");
    command
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The number after a word in each step line.
fn column(text: &str, word: &str) -> Vec<f64> {
    let after = |line: &str| line.split_whitespace().skip_while(|found| *found != word).nth(1)?.parse().ok();
    text.lines().filter(|line| line.starts_with("step")).filter_map(after).collect()
}

fn mpirun() -> Command {
    let mut command = Command::new(option_env!("MPIRUN").unwrap_or("mpirun"));
    command.args(["--oversubscribe", "--bind-to", "none", "--allow-run-as-root"]);
    command.env("OMP_NUM_THREADS", "1");
    command
}

#[test]
fn the_program_of_a_step_is_printed_and_can_be_read_back() {
    let folder = Folder::new("program", RECIPE);
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardwise"));
    let output = command.arg("train").arg(folder.recipe()).args(["-n", "2", "--show-program"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("units embedding block.0 block.1 head\ncount-tokens\nstart-gather embedding\n"), "{text}");
    assert_eq!(text.matches("\nforward block.1 micro-batch=").count(), 2, "{text}");
    let program: shardwise_plan::program::Program = text.parse().unwrap();
    assert_eq!(program.to_string(), text);
}

#[test]
fn a_run_learns_and_prints_its_metrics() {
    let folder = Folder::new("learns", RECIPE);
    let output = folder.train(&["-n", "3"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{text}{}", stderr(&output));
    let losses = column(&text, "loss");
    assert_eq!(losses.len(), 12, "{text}");
    assert!(losses[11] < 0.8 * losses[0], "{text}");
    for word in ["norm", "lr", "memory", "(peak", "sent"] {
        assert_eq!(column(&text, word).len(), 12, "{word} in {text}");
    }
    assert!(text.contains(" tokens/s ") && text.contains("a rank needs about"), "{text}");
    assert!(text.contains("gradients stored and sent in f32"), "{text}");
    assert_eq!(column(&text, "lr")[0], 5e-3, "half of the warm-up");
}

#[test]
fn the_same_program_runs_under_a_plain_mpirun() {
    let folder = Folder::new("mpirun", RECIPE);
    let own = folder.train(&["-n", "2"]);
    let run = |arguments: &[&str]| {
        let mut command = mpirun();
        command.args(["-n", "2", env!("CARGO_BIN_EXE_shardwise"), "train"]).arg(folder.recipe());
        command.args(arguments).output().unwrap()
    };
    let plain = run(&[]);
    assert!(plain.status.success(), "{}", stderr(&plain));
    assert_eq!(column(&stdout(&own), "loss"), column(&stdout(&plain), "loss"));
    let contradicted = run(&["-n", "3"]);
    assert!(!contradicted.status.success());
    assert!(stderr(&contradicted).contains("-n 3 contradicts the launcher"), "{}", stderr(&contradicted));
}

#[test]
fn errors_in_a_recipe_are_reported_before_ranks_start() {
    for (name, from, to, expected) in [
        (
            "key",
            "warmup_steps = 2",
            "warm_up = 2",
            &["recipe.toml:29: there is no key `schedule.warm_up`", "schedule.warmup_steps"][..],
        ),
        ("stage", "stage = 3", "stage = 4", &["there is no ZeRO stage 4"]),
        (
            "heads",
            "num_attention_heads = 4",
            "num_attention_heads = 32",
            &["model.llama.head_dim: 1 is not a positive even number"],
        ),
        ("kind", "\"cosine\"", "\"cosin\"", &["is \"cosin\"", "wsd", "did you mean \"cosine\""]),
        (
            "idle",
            "warmup_steps = 2",
            "start_lr = 1e-6",
            &["`schedule.start_lr` is for \"lr-range-test\"", "leave it out"],
        ),
        (
            "replicas",
            "stage = 3",
            "stage = 3\n[parallel]\nreplicate = 3",
            &["2 ranks cannot be divided into 3 replicas"],
        ),
        ("bytes", "corpus = \"tokens.bin\"\n", "", &["there is no `data.corpus`"]),
        ("cuda", "steps = 12", "steps = 12\ndevice = \"cuda\"", &["no GPU is visible"]),
        ("zero", "steps = 12", "steps = 0", &["`run.steps` is 0, but must be at least 1"]),
        (
            "huge",
            "hidden_size = 32",
            "hidden_size = 9000000000000000000",
            &["`model.llama.hidden_size` is 9000000000000000000"],
        ),
        (
            "huge batch",
            "micro_batch_size = 2",
            "micro_batch_size = 4000000000",
            &["`batch.micro_batch_size` is 4000000000"],
        ),
        ("beta", "lr = 1e-2", "lr = 1e-2\nbetas = [0.9, 1.0]", &["from 0 to below 1"]),
        ("lr", "lr = 1e-2", "lr = nan", &["`optimizer.lr` is NaN, but must be a positive number"]),
        ("accumulation", "stage = 3", "stage = 1\nreduce_each_micro_batch = true", &["use stage 2 or 3"]),
        (
            "frozen",
            "[model.llama]",
            "[model]\nfrozen = [\"model.layer.0\"]\n[model.llama]",
            &["no parameter name starts"],
        ),
    ] {
        let folder = Folder::new(name, &RECIPE.replacen(from, to, 1));
        let output = folder.train(&["-n", "2"]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{name}: {said}");
        assert!(expected.iter().all(|part| said.contains(part)), "{name}: {said}");
    }
    let output = shardwise().args(["train", "/nowhere/recipe.toml"]).output().unwrap();
    assert!(stderr(&output).contains("/nowhere/recipe.toml: No such file"), "{}", stderr(&output));
}

#[test]
fn tokens_outside_the_vocabulary_are_named() {
    let folder = Folder::new("tokens", &RECIPE.replace("vocab_size = 61", "vocab_size = 31"));
    let output = folder.train(&["-n", "2"]);
    let said = stderr(&output);
    assert!(!output.status.success());
    assert!(said.contains("tokens.bin: token ") && said.contains("the model's vocab_size is 31"), "{said}");
}

#[test]
fn an_error_on_one_rank_is_reported_at_once() {
    // One of the 8 sequences of a step has an invalid token. The other rank would wait for its collectives.
    let folder = Folder::new("one-rank", &RECIPE.replace("steps = 12", "steps = 400"));
    let mut tokens = std::fs::read(folder.0.join("tokens.bin")).unwrap();
    tokens[6000..6002].copy_from_slice(&999u16.to_le_bytes());
    std::fs::write(folder.0.join("tokens.bin"), tokens).unwrap();
    let started = Stopwatch::start();
    let output = folder.train(&["-n", "2"]);
    let said = stderr(&output);
    assert!(!output.status.success());
    assert!(said.contains("token 3000 is 999"), "{said}");
    assert!(started.elapsed() < Duration::from_secs(60), "it took {:?}", started.elapsed());
}

#[test]
fn an_error_on_one_host_is_reported_by_that_host() {
    let folder = Folder::new("one-host", RECIPE);
    let mut command = mpirun();
    command.args(["-n", "1", env!("CARGO_BIN_EXE_shardwise"), "train"]).arg(folder.recipe());
    command.args([":", "-n", "1", env!("CARGO_BIN_EXE_shardwise"), "train", "/nowhere/recipe.toml"]);
    let output = command.output().unwrap();
    assert!(!output.status.success());
    assert!(stderr(&output).contains("/nowhere/recipe.toml: No such file"), "{}", stderr(&output));
}

#[test]
fn a_run_that_cannot_fit_is_refused_with_figures_and_a_remedy() {
    let recipe = RECIPE
        .replace("hidden_size = 32\nnum_hidden_layers = 2", "hidden_size = 512\nnum_hidden_layers = 24")
        .replace("intermediate_size = 80", "intermediate_size = 1408");
    let folder = Folder::new("fit", &recipe.replace("stage = 3", "stage = 0"));
    let output = Command::new("prlimit")
        .arg(format!("--data={}", 1 << 30))
        .args([env!("CARGO_BIN_EXE_shardwise"), "train"])
        .arg(folder.recipe())
        .args(["-n", "4"])
        .output()
        .unwrap();
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("a rank would need about") && said.contains("(ulimit -d) is 1.00 GiB"), "{said}");
    assert!(said.contains("zero.stage = 3 would fit"), "{said}");
    assert!(stdout(&output).is_empty(), "nothing has started");
}

#[test]
fn a_range_test_draws_its_plot() {
    let recipe = RECIPE
        .replace(
            "kind = \"cosine\"\nwarmup_steps = 2",
            "kind = \"lr-range-test\"\nstart_lr = 1e-6\nplot = \"range.svg\"",
        )
        .replace("steps = 12", "steps = 40")
        .replace("lr = 1e-2", "lr = 10.0");
    let folder = Folder::new("range", &recipe);
    let output = folder.train(&["-n", "2"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{text}{}", stderr(&output));
    assert!(text.contains("the loss was lowest") && text.contains("range.svg"), "{text}");
    let plot = std::fs::read_to_string(folder.0.join("range.svg")).unwrap();
    assert!(plot.starts_with("<svg") && plot.contains("learning rate") && plot.contains("polyline"), "{plot}");
}

#[test]
fn every_optimizer_schedule_and_precision_trains() {
    for (name, changes) in [
        ("sgd", &[("lr = 1e-2", "kind = \"sgd\"\nmomentum = 0.9\nlr = 0.1")][..]),
        ("lamb", &[("lr = 1e-2", "kind = \"lamb\"\nlr = 0.05"), ("\"cosine\"", "\"linear\"")]),
        ("one-cycle", &[("kind = \"cosine\"\nwarmup_steps = 2", "kind = \"one-cycle\"")]),
        ("decay", &[("\"cosine\"", "\"wsd\"\ndecay_steps = 3")]),
        ("f16", &[("[zero]", "[precision]\nparam_dtype = \"f16\"\n[zero]")]),
        (
            "bf16",
            &[
                ("[zero]", "[precision]\nparam_dtype = \"bf16\"\nreduce_dtype = \"bf16\"\n[zero]"),
                ("stage = 3", "stage = 2\nreduce_each_micro_batch = true\n[parallel]\nreplicate = 2"),
            ],
        ),
        ("full", &[("[model.llama]", "activation_checkpointing = \"full\"\n[model.llama]")]),
        ("frozen", &[("[model.llama]", "[model]\nfrozen = [\"model.layers.0.\"]\n[model.llama]")]),
    ] {
        let recipe = changes.iter().fold(RECIPE.to_string(), |recipe, (from, to)| recipe.replacen(from, to, 1));
        let folder = Folder::new(name, &recipe);
        let output = folder.train(&["-n", "2"]);
        let text = stdout(&output);
        assert!(output.status.success(), "{name}: {text}{}", stderr(&output));
        let losses = column(&text, "loss");
        assert!(losses[11] < 0.95 * losses[0], "{name}: {text}");
        if name == "f16" {
            assert_eq!(column(&text, "scale")[0], 65536., "{text}");
        }
    }
}

#[test]
fn a_run_starts_from_a_file_of_weights() {
    let folder = Folder::new("weights", &RECIPE.replacen("[data]", "[init]\nweights = \"w.safetensors\"\n[data]", 1));
    let output = folder.train(&["-n", "2"]);
    assert!(stderr(&output).contains("w.safetensors: it is missing"), "{}", stderr(&output));
    // One tensor with the right name and shape, in bf16, but none for the next parameter.
    let header = r#"{"model.embed_tokens.weight":{"dtype":"BF16","shape":[61,32],"data_offsets":[0,3904]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend([0x80, 0x3f].repeat(61 * 32));
    std::fs::write(folder.0.join("w.safetensors"), file).unwrap();
    let output = folder.train(&["-n", "2"]);
    let said = stderr(&output);
    assert!(said.contains("there is no tensor model.layers.0.input_layernorm.weight"), "{said}");
    for (bytes, expected) in [(&b"abc"[..], "too short"), (&[255; 64], "not a safetensors file")] {
        std::fs::write(folder.0.join("w.safetensors"), bytes).unwrap();
        let output = folder.train(&["-n", "1"]);
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    }
}

#[test]
fn a_rank_that_is_killed_ends_the_run() {
    let folder = Folder::new("killed", &RECIPE.replace("steps = 12", "steps = 100000"));
    let mut command = shardwise();
    command.arg("train").arg(folder.recipe()).args(["-n", "3"]).stdout(std::process::Stdio::null());
    let mut run = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let started = Stopwatch::start();
    while rank_pids(&folder.recipe()).len() < 3 {
        assert!(started.elapsed() < Duration::from_secs(60), "the ranks start");
        std::thread::sleep(Duration::from_millis(100));
    }
    std::thread::sleep(Duration::from_secs(2));
    let victim = rank_pids(&folder.recipe())[1];
    assert!(Command::new("kill").args(["-9", &victim.to_string()]).status().unwrap().success());
    let killed = Stopwatch::start();
    let status = loop {
        if let Some(status) = run.try_wait().unwrap() {
            break status;
        }
        assert!(killed.elapsed() < Duration::from_secs(30), "the run ends");
        std::thread::sleep(Duration::from_millis(100));
    };
    assert!(!status.success());
    let mut said = String::new();
    run.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("signal 9"), "the error names the signal: {said}");
    assert!(rank_pids(&folder.recipe()).is_empty(), "no rank is left behind");
}
