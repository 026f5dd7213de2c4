//! A recipe with a compiled package: planning, training, resuming on other ranks, evaluation and export; a built-in model with compiled
//! layers; what cannot be done is refused by name.
//!
//! The packages are those of `python/tests/packages`.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use shardwise_plan::ModelConfig;
use shardwise_plan::package::Package;

fn packages() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(shardwise_harness::packages().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = entries.filter(|path| path.join("package.json").exists()).collect();
    // A recipe's data are tokens.
    found.retain(|path| json(&path.join("package.json"))["inputs"]["dtype"] == "i64");
    found.sort();
    found
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// A folder with a recipe that trains a package on tokens that repeat.
fn recipe(package: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let manifest = json(&package.join("package.json"));
    let (shape, dtype) = (&manifest["inputs"]["shape"], &manifest["dtype"]);
    let micro_batch_size = shape[0].as_u64().unwrap();
    let tokens: Vec<u8> = (0..4000u32).flat_map(|place| ((place * place % 61) as u16).to_le_bytes()).collect();
    std::fs::write(folder.path().join("tokens.bin"), tokens).unwrap();
    let checkpointing = &manifest["activation_checkpointing"];
    let text = format!(
        "activation_checkpointing = {checkpointing}\n[model]\npackage = \"{}\"\n[data]\ncorpus = \"tokens.bin\"\ntoken_bytes = 2\n\
         [evaluation]\ncorpus = \"tokens.bin\"\nmax_sequences = 7\n\
         [batch]\nmicro_batch_size = {micro_batch_size}\nglobal_batch_size = {}\nseq_len = {}\n\
         [precision]\nparam_dtype = {dtype}\n[optimizer]\nlr = 1e-2\n[run]\nsteps = 6\nlog_every = 1\n\
         [checkpoints]\nfolder = \"checkpoints\"\nevery_steps = 4\n",
        package.display(),
        2 * micro_batch_size,
        shape[1],
    );
    std::fs::write(folder.path().join("recipe.toml"), text).unwrap();
    folder
}

fn shardwise(folder: &tempfile::TempDir, verb: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardwise"));
    command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0").current_dir(folder.path());
    command.arg(verb).args(if verb == "checkpoint" { &[][..] } else { &["recipe.toml"] });
    command.args(arguments).output().unwrap()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn good(output: &Output) -> String {
    assert!(output.status.success(), "{}", said(output));
    said(output)
}

/// The loss of a step, as it was printed.
fn loss(text: &str, step: u64) -> String {
    let words = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let number = step.to_string();
    let mut lines = words.filter(|words| {
        words.first() == Some(&"step")
            && words.get(1).is_some_and(|word| word.trim_end_matches([':', ',']).split('/').next() == Some(&number))
    });
    let line = lines.next().unwrap_or_else(|| panic!("no step {step} in {text}"));
    let place = line.iter().position(|word| *word == "loss").unwrap();
    line[place + 1].to_string()
}

#[test]
fn a_package_is_planned_trained_resumed_evaluated_and_exported() {
    for package in packages() {
        let folder = recipe(&package);
        let run = |verb: &str, arguments: &[&str]| shardwise(&folder, verb, arguments);
        good(&run("train", &["-n", "2", "--dry-run"]));
        let whole =
            good(&run("train", &["-n", "2", "--plain", "--set", "checkpoints.folder=whole", "--set", "run.folder=w"]));
        good(&run("train", &["-n", "2", "--plain", "--set", "run.steps=4"]));
        let resumed = good(&run("train", &["-n", "1", "--plain"]));
        assert!(resumed.contains("resuming after step 4"), "{resumed}");
        assert_eq!(loss(&resumed, 6).get(..5), loss(&whole, 6).get(..5), "{whole}\n{resumed}");

        let expected = format!("\"package\":\"{}\"", Package::open(&package).unwrap().hash());
        for file in ["checkpoints/step-00000004/manifest.json", "checkpoints/metrics.jsonl"] {
            let text = std::fs::read_to_string(folder.path().join(file)).unwrap();
            assert!(text.replace("\": ", "\":").contains(&expected), "{file} has the package's hash");
        }

        let evaluated = good(&run("eval", &["-n", "2"]));
        assert!(evaluated.contains("perplexity"), "{evaluated}");
        good(&run("checkpoint", &["export", "checkpoints", "exported", "--dtype", "f32"]));
        let exported = std::fs::read(folder.path().join("exported/model.safetensors")).unwrap();
        let header_len = u64::from_le_bytes(exported[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&exported[8..8 + header_len]).unwrap();
        for unit in json(&package.join("package.json"))["units"].as_array().unwrap() {
            for parameter in unit["parameters"].as_array().unwrap() {
                assert_eq!(header[parameter["name"].as_str().unwrap()]["shape"], parameter["shape"], "{parameter}");
            }
        }
        let config = json(&folder.path().join("exported/config.json"));
        assert_eq!(config["vocab_size"], json(&package.join("config.json"))["vocab_size"]);
        // A run that starts from what was exported.
        let weights =
            ["--set", "init.weights=exported", "--set", "checkpoints.folder=again", "--set", "run.folder=again"];
        let continued = good(&run("train", &[&["-n", "2", "--plain"][..], &weights].concat()));
        let (first, last): (f64, f64) = (loss(&continued, 1).parse().unwrap(), loss(&whole, 1).parse().unwrap());
        assert!(first < last, "{continued}");
    }
}

#[test]
fn what_a_package_cannot_do_is_refused_by_key() {
    for package in packages() {
        let folder = recipe(&package);
        let is_selective = json(&package.join("package.json"))["activation_checkpointing"] == "selective";
        let other = if is_selective { "full" } else { "selective" };
        for (setting, message) in [
            ("batch.micro_batch_size=77", "`batch.micro_batch_size` is 77, but the package was compiled for"),
            ("batch.seq_len=77", "`batch.seq_len` is 77, but the package was compiled for"),
            ("precision.param_dtype=f16", "`precision.param_dtype` is \"f16\", but the package was compiled for"),
            (
                &format!("activation_checkpointing={other}"),
                &format!("`activation_checkpointing` is \"{other}\", but the package was compiled for"),
            ),
            ("parallel.tensor=2", "parallel.tensor: package: its layers were compiled whole"),
            ("model.frozen=[\"nothing\"]", "no parameter name starts with 'nothing'"),
        ] {
            let text = said(&shardwise(&folder, "train", &["-n", "2", "--dry-run", "--set", setting]));
            assert!(text.contains(message), "{setting}: {text}");
        }
        let text = said(&shardwise(&folder, "generate", &["--set", "data.tokenizer=none"]));
        assert!(text.contains("model.package: a compiled model computes losses"), "{text}");
        let text = said(&shardwise(&folder, "train", &["-n", "2", "--dry-run", "--set", "model.package=nowhere"]));
        assert!(text.contains("model.package: ") && text.contains("nowhere/package.json"), "{text}");
    }
}

/// A package of Llama, and a recipe of the same Llama. The recipe's folder has a text, and its tokens.
fn llama() -> (PathBuf, tempfile::TempDir) {
    let package = shardwise_harness::packages().unwrap().join("llama");
    let folder = tempfile::tempdir().unwrap();
    let ModelConfig::Llama(llama) = ModelConfig::from_hugging_face(&json(&package.join("config.json"))).unwrap() else {
        panic!("{} is a Llama", package.display());
    };
    let shape = json(&package.join("package.json"))["inputs"]["shape"].clone();
    let text =
        "In the beginning God created the heaven and the earth. And the earth was without form, and void.\n".repeat(99);
    std::fs::write(folder.path().join("text.txt"), text).unwrap();
    let mut tokenize = Command::new(env!("CARGO_BIN_EXE_shardwise"));
    tokenize.current_dir(folder.path()).args(["tokenize", "text.txt", "--to", "tokens", "--vocabulary", "300"]);
    good(&tokenize.output().unwrap());
    let recipe = format!(
        "[model.llama]\nvocab_size = {}\nhidden_size = {}\nnum_hidden_layers = {}\nnum_attention_heads = {}\n\
         num_key_value_heads = {}\nintermediate_size = {}\nrms_norm_eps = {:e}\n[data]\ncorpus = \"tokens\"\n\
         [batch]\nmicro_batch_size = {}\nseq_len = {}\n[optimizer]\nlr = 1e-2\n[run]\nsteps = 12\nlog_every = 1\n\
         [checkpoints]\nfolder = \"saved\"\nevery_steps = 2\nbackground = false\n[supervision]\nmax_restarts = 9\n",
        llama.vocab_size,
        llama.hidden_size,
        llama.num_hidden_layers,
        llama.num_attention_heads,
        llama.num_key_value_heads,
        llama.intermediate_size,
        llama.rms_norm_eps,
        shape[0],
        shape[1],
    );
    std::fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
    (package, folder)
}

#[test]
fn a_built_in_model_trains_with_compiled_layers_and_generates_without_them() {
    let (package, folder) = llama();
    let missing = said(&shardwise(&folder, "train", &["--dry-run", "--set", "model.compiled=true"]));
    assert!(missing.contains("/packages/recipe; compile the model: shardwise compile "), "{missing}");
    std::fs::create_dir(folder.path().join("packages")).unwrap();
    std::os::unix::fs::symlink(&package, folder.path().join("packages/recipe")).unwrap();
    let train = |more: &[&str]| good(&shardwise(&folder, "train", &[&["-n", "2", "--plain"], more].concat()));

    let eager = train(&["--set", "checkpoints.folder=eager"]);
    let compiled = train(&["--set", "model.compiled=true", "--set", "run.steps=6"]);
    let resumed = train(&[]);
    assert!(resumed.contains("resuming after step 6"), "{resumed}");
    for (step, text) in [(1, &compiled), (6, &compiled), (12, &resumed)] {
        let [found, expected] = [text, &eager].map(|text| loss(text, step).parse::<f64>().unwrap());
        assert!((found / expected - 1.).abs() < 1e-4, "step {step}: {found} and {expected}");
    }

    // With kills, the checkpoint is that of an undisturbed run.
    let compiled = ["--set", "model.compiled=true", "--set"];
    train(&[&compiled[..], &["checkpoints.folder=whole"]].concat());
    let faults =
        ["kill rank=0 step=3 phase=forward", "kill rank=1 step=6 phase=backward", "kill rank=0 step=9 phase=optimizer"];
    let faults: Vec<&str> = faults.into_iter().flat_map(|fault| ["--fault", fault]).collect();
    let killed = train(&[&compiled[..], &["checkpoints.folder=killed"], &faults].concat());
    assert!(killed.contains("Restarted 3 times"), "{killed}");
    let same = good(&shardwise(&folder, "checkpoint", &["diff", "killed", "12", "12", "--other", "whole"]));
    assert!(same.contains("the same to the last bit"), "{same}");

    let generate = [
        "--set",
        "model.compiled=true",
        "--set",
        "data.tokenizer=tokenizer.json",
        "--prompt",
        "In the",
        "--tokens",
        "9",
    ];
    let generated = good(&shardwise(&folder, "generate", &generate));
    assert!(generated.starts_with("In the") && generated.len() > 9, "{generated}");
}

#[test]
fn layers_of_another_model_are_refused() {
    let (package, folder) = llama();
    let set = format!("model.package={}", package.display());
    for (setting, message) in [
        ("model.llama.rope_theta=500000.0", "was compiled for rope_theta = 10000.0, and here it is 500000.0"),
        ("model.llama.num_hidden_layers=3", "was compiled for num_hidden_layers = 2, and here it is 3"),
        ("model.llama.tie_word_embeddings=true", "was compiled for tie_word_embeddings = false, and here it is true"),
        ("batch.seq_len=77", "`batch.seq_len` is 77, but the package was compiled for"),
        ("parallel.tensor=2", "parallel.tensor: package: its layers were compiled whole"),
        ("model.compiled=false", "keep one of them, or set model.compiled to use the package's layers"),
    ] {
        let arguments = ["-n", "2", "--dry-run", "--set", &set, "--set", "model.compiled=true", "--set", setting];
        let text = said(&shardwise(&folder, "train", &arguments));
        assert!(text.contains(message), "{setting}: {text}");
    }
}

/// A stand-in for Python that prints its arguments, and the config that they name.
const PYTHON: &str = "#!/bin/sh\n[ \"$1\" = -c ] && exit\necho \"$@\"\ncat \"$3\"\n";

#[test]
fn a_recipe_is_compiled_for_what_it_trains_with() {
    let (_, folder) = llama();
    let python = folder.path().join("python");
    std::fs::write(&python, PYTHON).unwrap();
    std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let compile =
        |more: &[&str]| shardwise(&folder, "compile", &[&["--python", &python.display().to_string()], more].concat());
    let settings =
        ["precision.param_dtype=bf16", "activation_checkpointing=selective", "model.llama.loss_chunk_tokens=48"];
    let text = good(&compile(&settings.map(|setting| ["--set", setting]).concat()));
    for part in [
        "--micro-batch-size=2 --seq-len=32 --dtype=bf16 --device=cpu --activation-checkpointing=selective --chunk-rows=48",
        "packages/recipe",
        "\"num_key_value_heads\":2",
        "set model.compiled = true in recipe.toml",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = said(&compile(&["--dtype", "bf16"]));
    assert!(text.contains("--dtype: a recipe says what to compile for"), "{text}");
}
