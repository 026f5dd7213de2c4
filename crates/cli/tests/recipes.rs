//! Recipes: the exact error messages for wrong ones, that the output of `shardwise config` can be read back, and that the recipes of this
//! repository are valid.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod snapshot;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use shardwise_recipe::{Batch, Recipe, Source, schema};
use shardwise_run::memory_estimate::MemoryEstimate;

use snapshot::{assert_no_differences, difference, files};

fn shardwise(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardwise"));
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/wrong")).args(arguments);
    command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0").output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The arguments in a recipe's `#!` lines: `#! set KEY=VALUE`, `#! ranks 4`.
fn directives(text: &str, what: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.strip_prefix("#! ")?.strip_prefix(what))
        .map(|rest| rest.trim().to_string())
        .collect()
}

#[test]
fn errors_in_recipes_have_the_expected_messages() {
    let recipes = files("wrong", "toml");
    assert!(recipes.len() >= 40, "{} wrong recipes", recipes.len());
    let differences = recipes.iter().filter_map(|path| {
        let text = std::fs::read_to_string(path).unwrap();
        let ranks = directives(&text, "ranks").first().map(|ranks| ranks.parse().unwrap());
        let recipe = Recipe::read_layered(path, None, &directives(&text, "set")).map_err(shardwise_run::Error::from);
        let outcome = recipe.and_then(|recipe| match ranks {
            Some(ranks) => MemoryEstimate::of(&recipe, ranks).map(|_| ()),
            None => Ok(()),
        });
        let said = outcome.err().map_or_else(|| "nothing is wrong".to_string(), |error| error.to_string());
        assert!(!said.contains("nothing is wrong"), "{}", path.display());
        difference(&path.with_extension("txt"), &said)
    });
    assert_no_differences(differences.collect());
}

#[test]
fn errors_in_command_lines_have_the_expected_messages() {
    let differences = files("wrong", "command").into_iter().filter_map(|path| {
        let line = std::fs::read_to_string(&path).unwrap();
        let output = shardwise(&line.split_whitespace().collect::<Vec<_>>());
        assert_eq!(output.status.code(), Some(2), "{line}{}", stderr(&output));
        assert_eq!(stdout(&output), "", "{line}");
        difference(&path.with_extension("txt"), &stderr(&output))
    });
    assert_no_differences(differences.collect());
}

#[test]
fn the_recipes_of_this_repository_are_valid_and_read_back() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let mut count = 0;
    // Runs of these recipes write to recipes/runs.
    let is_recipe = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "toml");
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).filter(is_recipe) {
        let recipe = Recipe::read(&path).unwrap();
        let ranks = 64;
        let need = MemoryEstimate::of(&recipe, ranks).unwrap();
        assert!(need.total() > 255 << 20, "{}", path.display());
        assert_reads_back(&recipe, ranks);
        count += 1;
    }
    assert!(count >= 5);
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn write_recipe(folder: &tempfile::TempDir, text: &str) -> PathBuf {
    let path = folder.path().join("recipe.toml");
    std::fs::write(&path, text).unwrap();
    path
}

fn without_comments(text: &str) -> Vec<String> {
    text.lines().map(|line| line.split(" # ").next().unwrap().trim_end().to_string()).collect()
}

fn assert_reads_back(recipe: &Recipe, ranks: usize) {
    for ranks in [None, Some(ranks)] {
        let printed = recipe.resolved_toml(ranks).unwrap();
        let folder = folder();
        let again = Recipe::read(&write_recipe(&folder, &printed)).unwrap_or_else(|error| panic!("{error}\n{printed}"));
        assert_eq!(without_comments(&again.resolved_toml(ranks).unwrap()), without_comments(&printed));
    }
}

const BASE: &str = include_str!("wrong/base.toml");

#[test]
fn a_save_takes_at_most_the_buffer_and_nothing_in_the_foreground() {
    let folder = folder();
    let saving = |settings: &str, ranks: usize| {
        let text = format!("{BASE}\n[checkpoints]\nfolder = \"saved\"\n{settings}\n");
        MemoryEstimate::of(&Recipe::read(&write_recipe(&folder, &text)).unwrap(), ranks).unwrap().saving
    };
    let state = saving("", 1);
    assert!(state > 1 << 20, "{state} bytes of parameters and moments");
    // File headers are in memory in any case.
    let headers = saving("background = false", 1);
    assert!(headers < 32 << 10, "{headers}");
    assert_eq!(saving("buffer_bytes = 100_000", 1), headers + 100_000);
    assert_eq!(saving("background = false\nbuffer_bytes = 100_000", 1), headers);
    // If two ranks share a file, the rank that writes it holds the shard of the other.
    assert!(saving("background = false", 2) > headers + state / 8);
}

#[test]
fn what_config_prints_is_the_same_recipe() {
    let folder = folder();
    for (from, to) in [
        ("seed = 7", "mixture = [{ corpus = \"a # b\", weight = 3.0 }, { corpus = \"/c\", weight = 1 }]"),
        ("seed = 7", "chat = \"talk.jsonl\"\ntokenizer = \"tokenizer\""),
        ("lr = 1e-3", "lr = 1e-3\nkind = \"sgd\""),
        ("lr = 1e-3", "lr = 1e-3\nkind = \"sgd\"\n[schedule]\nkind = \"one-cycle\""),
        ("lr = 1e-3", "lr = 1e-3\n[schedule]\nkind = \"lr-range-test\"\nplot = \"plot.svg\""),
        (
            "[run]",
            "[evaluation]\ncorpus = \"held\"\nmax_sequences = 5\n[init]\nweights = \"w\"\n[precision]\nparam_dtype = \"f16\"\n[run]",
        ),
        ("[run]", "[schedule]\nkind = \"wsd\"\n[checkpoints]\nfolder = \"s3://bucket/folder\"\n[run]"),
        ("micro_batch_size = 4", "global_batch_size = 48\ngradient_accumulation_steps = 2"),
    ] {
        let recipe = Recipe::read(&write_recipe(&folder, &BASE.replacen(from, to, 1))).unwrap();
        assert_reads_back(&recipe, 4);
    }
}

#[test]
fn config_says_where_each_value_comes_from() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/wrong/base.toml");
    let deepspeed = path.with_file_name("clip.json");
    let output = shardwise(&[
        "config",
        "base.toml",
        "-n",
        "2",
        "--deepspeed",
        "clip.json",
        "--set",
        "optimizer.lr=2e-3",
        "--set",
        "checkpoints.folder=s3://bucket/1",
        "--set",
        "batch.gradient_accumulation_steps=3",
    ]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_no_differences(difference(&path.with_file_name("config.txt"), &stdout(&output)).into_iter().collect());
    let sets = ["optimizer.lr=2e-3".to_string(), "run.steps = 7".to_string()];
    let recipe = Recipe::read_layered(&path, Some(&deepspeed), &sets).unwrap();
    assert_eq!(recipe.sources.of("optimizer.lr"), Source::Set);
    assert_eq!(recipe.sources.of("optimizer.max_grad_norm"), Source::DeepSpeed("gradient_clipping".to_string()));
    assert_eq!(recipe.sources.of("batch.micro_batch_size"), Source::Line(13));
    assert_eq!(recipe.sources.of("zero.stage"), Source::Default);
    assert_eq!((recipe.optimizer.lr, recipe.run.steps, recipe.optimizer.max_grad_norm), (2e-3, 7, Some(0.5)));
    assert!(recipe.text.contains("--set"), "a checkpoint has what was trained with: {}", recipe.text);
}

#[test]
fn values_of_set_are_toml_or_words() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/wrong/base.toml");
    for (set, expected) in [
        ("optimizer.kind=lamb", "kind = \"lamb\""),
        ("optimizer.kind=\"lamb\"", "kind = \"lamb\""),
        ("optimizer.betas=[0.8, 0.9]", "betas = [0.8, 0.9]"),
        ("optimizer.weight_decay=1", "weight_decay = 1.0"),
        ("data.corpus=2024-01-01", "/2024-01-01\""),
        ("data.corpus=../ids.bin", "/../ids.bin\""),
        ("checkpoints.folder=s3://bucket/a=b", "folder = \"s3://bucket/a=b\""),
        ("data.mixture=[{corpus='a', weight=1}]", "weight = 1.0"),
        ("model.llama.tie_word_embeddings=true", "tie_word_embeddings = true"),
    ] {
        let recipe =
            Recipe::read_layered(&path, None, &[set.to_string()]).unwrap_or_else(|error| panic!("{set}: {error}"));
        let text = recipe.resolved_toml(None).unwrap();
        let line = text.lines().find(|line| line.contains(expected)).unwrap_or_else(|| panic!("{set}: {text}"));
        assert!(line.ends_with("# --set"), "{line}");
    }
}

#[test]
fn two_sizes_of_a_batch_give_the_third() {
    let folder = folder();
    let batch = |keys: &str, ranks| {
        Recipe::read(&write_recipe(&folder, &BASE.replacen("micro_batch_size = 4", keys, 1))).unwrap().batch(ranks)
    };
    let whole = Batch { micro_batch_size: 4, gradient_accumulation_steps: 3, global_batch_size: 48 };
    assert_eq!(batch("micro_batch_size = 4\ngradient_accumulation_steps = 3", 4).unwrap(), whole);
    assert_eq!(batch("micro_batch_size = 4\nglobal_batch_size = 48", 4).unwrap(), whole);
    assert_eq!(batch("gradient_accumulation_steps = 3\nglobal_batch_size = 48", 4).unwrap(), whole);
    assert_eq!(
        batch("micro_batch_size = 4\ngradient_accumulation_steps = 3\nglobal_batch_size = 48", 4).unwrap(),
        whole
    );
    assert_eq!(
        batch("micro_batch_size = 4", 2).unwrap(),
        Batch { micro_batch_size: 4, gradient_accumulation_steps: 1, global_batch_size: 8 }
    );
    let said = batch("micro_batch_size = 4\ngradient_accumulation_steps = 3\nglobal_batch_size = 64", 4)
        .unwrap_err()
        .to_string();
    let equation = "batch.global_batch_size = 64, but batch.micro_batch_size × batch.gradient_accumulation_steps × ranks = 4 × 3 \
                    × 4 = 48: change one of them (batch.gradient_accumulation_steps = 4 would do)";
    assert!(said.contains(equation), "{said}");
}

#[test]
fn a_nonsensical_recipe_is_an_error_and_not_a_panic() {
    let folder = folder();
    let deep = format!("a = {}1{}", "[".repeat(10_000), "]".repeat(10_000));
    let long = format!("{BASE}\n[{}]\nx = 1\n", "a".repeat(100_000));
    let many: String = (0..1000).map(|number| format!("key_{number} = 1\n")).chain([BASE.to_string()]).collect();
    for text in ["", "\0", "=", "[", "[model]\n[model]", "model = 3", "batch = []", "[[run]]", &deep, &long, &many] {
        let said = Recipe::read(&write_recipe(&folder, text)).unwrap_err().to_string();
        assert!(said.contains("recipe.toml"), "{said}");
    }
    std::fs::write(folder.path().join("recipe.toml"), vec![b' '; 2 << 20]).unwrap();
    assert!(Recipe::read(&folder.path().join("recipe.toml")).unwrap_err().to_string().contains("too long"));
    std::fs::write(folder.path().join("recipe.toml"), [0xff, 0xfe]).unwrap();
    assert!(Recipe::read(&folder.path().join("recipe.toml")).is_err());
}

#[test]
fn the_schema_is_the_one_in_the_documentation() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/recipe.schema.json");
    let text = format!("{:#}", schema());
    assert_no_differences(difference(&path, &text).into_iter().collect());
    assert_eq!(schema()["properties"]["optimizer"]["properties"]["lr"]["description"], "The peak learning rate.");
}

#[test]
fn layers_reach_every_rank() {
    let folder = folder();
    let journal = format!("run.folder={}", folder.path().display());
    let sets = ["--set", "run.steps=1", "--set", "data.seed=3", "--set", &journal];
    let arguments = [&["-n", "2"][..], &sets, &["--deepspeed", "clip.json"]].concat();
    let own = shardwise(&[&["train", "base.toml"][..], &arguments].concat());
    assert!(own.status.success(), "{}", stderr(&own));
    let step = |output: &Output| {
        let text = stdout(output);
        let line =
            text.lines().find(|line| line.starts_with("step 1/1")).unwrap_or_else(|| panic!("{text}")).to_string();
        line.split(" tokens/s").next().unwrap().rsplit_once(' ').unwrap().0.to_string()
    };
    let mut command = Command::new(option_env!("MPIRUN").unwrap_or("mpirun"));
    command.args(["--oversubscribe", "--bind-to", "none", "--allow-run-as-root", "-n", "2"]);
    command.args([env!("CARGO_BIN_EXE_shardwise"), "train", "base.toml"]).args(&arguments[2..]);
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/wrong")).env("OMP_NUM_THREADS", "1");
    let plain = command.output().unwrap();
    assert!(plain.status.success(), "{}", stderr(&plain));
    assert_eq!(step(&own), step(&plain));
    for output in [own, plain] {
        assert_eq!(stdout(&output).matches("have no meaning here: zero_allow_untested_optimizer").count(), 1);
    }
}
