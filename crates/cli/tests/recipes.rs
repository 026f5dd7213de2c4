//! Recipes: what is said of wrong ones, word for word; that what `shardwise config` prints can be read back; and that the ones
//! in `recipes` are right.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod snapshot;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use shardwise_train::Recipe;
use shardwise_train::fit::Need;
use shardwise_train::recipe::{Batch, Source, schema};

use snapshot::{difference, files, settle};

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

/// The arguments that a recipe's first lines ask for: `#! set KEY=VALUE`, `#! ranks 4`.
fn asked(text: &str, what: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.strip_prefix("#! ")?.strip_prefix(what))
        .map(|rest| rest.trim().to_string())
        .collect()
}

#[test]
fn what_is_wrong_with_a_recipe_is_said_well() {
    let recipes = files("wrong", "toml");
    assert!(recipes.len() >= 40, "{} wrong recipes", recipes.len());
    let differences = recipes.iter().filter_map(|path| {
        let text = std::fs::read_to_string(path).unwrap();
        let ranks = asked(&text, "ranks").first().map(|ranks| ranks.parse().unwrap());
        let outcome = Recipe::layered(path, None, &asked(&text, "set")).and_then(|recipe| match ranks {
            Some(ranks) => Need::of(&recipe, ranks).map(|_| ()),
            None => Ok(()),
        });
        let said = outcome.err().map_or_else(|| "nothing is wrong".to_string(), |error| error.to_string());
        assert!(!said.contains("nothing is wrong"), "{}", path.display());
        difference(&path.with_extension("txt"), &said)
    });
    settle(differences.collect());
}

#[test]
fn what_is_wrong_with_a_command_line_is_said_well() {
    let differences = files("wrong", "command").into_iter().filter_map(|path| {
        let line = std::fs::read_to_string(&path).unwrap();
        let output = shardwise(&line.split_whitespace().collect::<Vec<_>>());
        assert_eq!(output.status.code(), Some(2), "{line}{}", stderr(&output));
        assert_eq!(stdout(&output), "", "{line}");
        difference(&path.with_extension("txt"), &stderr(&output))
    });
    settle(differences.collect());
}

#[test]
fn the_recipes_of_this_repository_are_right_and_read_back() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let recipe = Recipe::read(&path).unwrap();
        let ranks = 64;
        let need = Need::of(&recipe, ranks).unwrap();
        assert!(need.total() > 300 << 20, "{}", path.display());
        reads_back(&recipe, ranks);
        count += 1;
    }
    assert!(count >= 5);
}

/// A folder that goes when the test does.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn written(folder: &tempfile::TempDir, text: &str) -> PathBuf {
    let path = folder.path().join("recipe.toml");
    std::fs::write(&path, text).unwrap();
    path
}

fn without_comments(text: &str) -> Vec<String> {
    text.lines().map(|line| line.split(" # ").next().unwrap().trim_end().to_string()).collect()
}

fn reads_back(recipe: &Recipe, ranks: usize) {
    for ranks in [None, Some(ranks)] {
        let printed = recipe.resolved(ranks).unwrap();
        let folder = folder();
        let again = Recipe::read(&written(&folder, &printed)).unwrap_or_else(|error| panic!("{error}\n{printed}"));
        assert_eq!(without_comments(&again.resolved(ranks).unwrap()), without_comments(&printed));
    }
}

const BASE: &str = include_str!("wrong/base.toml");

#[test]
fn a_save_takes_the_buffer_at_most_and_nothing_where_training_waits() {
    let folder = folder();
    let saving = |settings: &str, ranks: usize| {
        let text = format!("{BASE}\n[checkpoints]\nfolder = \"saved\"\n{settings}\n");
        Need::of(&Recipe::read(&written(&folder, &text)).unwrap(), ranks).unwrap().saving
    };
    let state = saving("", 1);
    assert!(state > 1 << 20, "{state} bytes of parameters and moments");
    // Headers of files are in memory whatever is copied.
    let headers = saving("background = false", 1);
    assert!(headers < 32 << 10, "{headers}");
    assert_eq!(saving("buffer = 100_000", 1), headers + 100_000);
    assert_eq!(saving("background = false\nbuffer = 100_000", 1), headers);
    // Of a file that two ranks share, the one that writes it holds what the other sends.
    assert!(saving("background = false", 2) > headers + state / 8);
}

#[test]
fn what_config_prints_is_the_same_recipe() {
    let folder = folder();
    for (from, to) in [
        ("seed = 7", "mixture = [{ corpus = \"a # b\", weight = 3.0 }, { corpus = \"/c\", weight = 1 }]"),
        ("seed = 7", "chat = \"talk.jsonl\"\ntokenizer = \"tokenizer\""),
        ("rate = 1e-3", "rate = 1e-3\nkind = \"sgd\""),
        ("rate = 1e-3", "rate = 1e-3\nkind = \"sgd\"\n[schedule]\nkind = \"1-cycle\""),
        ("rate = 1e-3", "rate = 1e-3\n[schedule]\nkind = \"range-test\"\nplot = \"plot.svg\""),
        (
            "[run]",
            "[evaluation]\ncorpus = \"held\"\nwindows = 5\n[start]\nweights = \"w\"\n[precision]\nparameters = \"f16\"\n[run]",
        ),
        ("[run]", "[schedule]\nkind = \"stable-decay\"\n[checkpoints]\nfolder = \"s3://bucket/folder\"\n[run]"),
        ("sequences = 4", "global = 48\nmicro_batches = 2"),
    ] {
        let recipe = Recipe::read(&written(&folder, &BASE.replacen(from, to, 1))).unwrap();
        reads_back(&recipe, 4);
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
        "optimizer.rate=2e-3",
        "--set",
        "checkpoints.folder=s3://bucket/1",
        "--set",
        "batch.micro_batches=3",
    ]);
    assert!(output.status.success(), "{}", stderr(&output));
    settle(difference(&path.with_file_name("config.txt"), &stdout(&output)).into_iter().collect());
    let sets = ["optimizer.rate=2e-3".to_string(), "run.steps = 7".to_string()];
    let recipe = Recipe::layered(&path, Some(&deepspeed), &sets).unwrap();
    assert_eq!(recipe.sources.of("optimizer.rate"), Source::Set);
    assert_eq!(recipe.sources.of("optimizer.clip_norm"), Source::DeepSpeed("gradient_clipping".to_string()));
    assert_eq!(recipe.sources.of("batch.sequences"), Source::Line(13));
    assert_eq!(recipe.sources.of("sharding.stage"), Source::Default);
    assert_eq!((recipe.optimizer.rate, recipe.run.steps, recipe.optimizer.clip_norm), (2e-3, 7, Some(0.5)));
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
        ("model.llama.tied=true", "tied = true"),
    ] {
        let recipe = Recipe::layered(&path, None, &[set.to_string()]).unwrap_or_else(|error| panic!("{set}: {error}"));
        let text = recipe.resolved(None).unwrap();
        let line = text.lines().find(|line| line.contains(expected)).unwrap_or_else(|| panic!("{set}: {text}"));
        assert!(line.ends_with("# --set"), "{line}");
    }
}

#[test]
fn two_sizes_of_a_batch_give_the_third() {
    let folder = folder();
    let batch = |keys: &str, ranks| {
        Recipe::read(&written(&folder, &BASE.replacen("sequences = 4", keys, 1))).unwrap().batch(ranks)
    };
    let whole = Batch { sequences: 4, micro_batches: 3, global: 48 };
    assert_eq!(batch("sequences = 4\nmicro_batches = 3", 4).unwrap(), whole);
    assert_eq!(batch("sequences = 4\nglobal = 48", 4).unwrap(), whole);
    assert_eq!(batch("micro_batches = 3\nglobal = 48", 4).unwrap(), whole);
    assert_eq!(batch("sequences = 4\nmicro_batches = 3\nglobal = 48", 4).unwrap(), whole);
    assert_eq!(batch("sequences = 4", 2).unwrap(), Batch { sequences: 4, micro_batches: 1, global: 8 });
    let said = batch("sequences = 4\nmicro_batches = 3\nglobal = 64", 4).unwrap_err().to_string();
    let equation = "batch.global = 64, but batch.sequences × batch.micro_batches × ranks = 4 × 3 × 4 = 48: change one of them \
                    (batch.micro_batches = 4 would do)";
    assert!(said.contains(equation), "{said}");
}

#[test]
fn a_recipe_that_is_nonsense_is_an_error_and_no_panic() {
    let folder = folder();
    let deep = format!("a = {}1{}", "[".repeat(10_000), "]".repeat(10_000));
    let long = format!("{BASE}\n[{}]\nx = 1\n", "a".repeat(100_000));
    let many: String = (0..1000).map(|number| format!("key_{number} = 1\n")).chain([BASE.to_string()]).collect();
    for text in ["", "\0", "=", "[", "[model]\n[model]", "model = 3", "batch = []", "[[run]]", &deep, &long, &many] {
        let said = Recipe::read(&written(&folder, text)).unwrap_err().to_string();
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
    settle(difference(&path, &text).into_iter().collect());
    assert_eq!(schema()["properties"]["optimizer"]["properties"]["rate"]["description"], "The highest learning rate.");
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
