//! Recipes whose sequences are divided among ranks have the losses of whole sequences, with the batches of the real loader, and send what
//! theory says.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use shardwise_comm::{Group, mpi};
use shardwise_data::{Tokenizer, Writer};
use shardwise_harness::{Launch, ranks};
use shardwise_journal::{Entry, EntryKind};
use shardwise_recipe::Recipe;
use shardwise_run::{Requests, run};

const FOLDER: &str = "SHARDWISE_TEST_FOLDER";

/// In f64, with a global batch that 1, 2, 3 and 4 ranks can read, and an odd length.
const RECIPE: &str = r#"
[model.llama]
vocab_size = 257
hidden_size = 24
num_hidden_layers = 2
num_attention_heads = 6
num_key_value_heads = 2
intermediate_size = 35
[data]
[batch]
global_batch_size = 12
micro_batch_size = 1
seq_len = 61
[precision]
param_dtype = "f64"
[optimizer]
lr = 1e-2
[run]
steps = 3
"#;

const TEMPLATE: &str = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}\
                        {% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}";

/// Where samples come from: random tokens, a corpus with a held-out one, and conversations that are packed into sequences.
const SOURCES: [&[&str]; 3] = [
    &[],
    &["data.corpus=corpus", "evaluation.corpus=held-out", "model.llama.sliding_window=17"],
    &["data.chat=chat.jsonl", "data.tokenizer=."],
];

fn scratch() -> tempfile::TempDir {
    let folder = std::env::var(FOLDER).map_or_else(|_| tempfile::tempdir(), tempfile::tempdir_in).unwrap();
    std::fs::write(folder.path().join("recipe.toml"), RECIPE).unwrap();
    for (name, tokens) in [("corpus", 4001u32), ("held-out", 500)] {
        let mut writer = Writer::create(folder.path().join(name), 257).unwrap();
        writer.document(&(0..tokens).map(|token| (token * token / 7 + token) % 257).collect::<Vec<_>>()).unwrap();
        writer.finish().unwrap();
    }
    let bytes = Tokenizer::train_bpe(std::iter::empty(), 257, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    bytes.save(folder.path()).unwrap();
    let config = json!({"chat_template": TEMPLATE});
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    // Some are as long as a sequence, and some are so short that several are packed into one.
    let conversation = |number: usize| {
        let messages = json!([
            {"role": "user", "content": "?".repeat(number % 5)},
            {"role": "assistant", "content": "abcdefghijklmnopqrstuvwxyz"[..number % 26].to_string() + "."},
        ]);
        json!({ "messages": messages }).to_string() + "\n"
    };
    std::fs::write(folder.path().join("chat.jsonl"), (0..200).map(conversation).collect::<String>()).unwrap();
    folder
}

fn launch(ranks: usize, folder: &Path) -> Launch {
    Launch::ranks(ranks).variable(FOLDER, folder.to_str().unwrap()).timeout(Duration::from_secs(200))
}

fn folder() -> PathBuf {
    PathBuf::from(std::env::var(FOLDER).unwrap())
}

fn world() -> Arc<Group> {
    Arc::new(mpi::world(mpi::Options::default()).unwrap())
}

/// Runs a recipe with settings on top. Returns the entries, on rank 0.
fn run_recipe(world: &Arc<Group>, sets: &[&str]) -> Vec<Entry> {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let recipe = Recipe::read_layered(&folder().join("recipe.toml"), None, &sets).unwrap();
    let mut entries = Vec::new();
    let on_entry = &mut |entry: &Entry| entries.push(entry.clone());
    run(&recipe, world, &Requests::default(), &Arc::default(), on_entry, &mut Vec::new()).unwrap();
    entries
}

/// The loss and the norm of every step, and of every evaluation the loss.
fn numbers(entries: &[Entry]) -> Vec<f64> {
    let of_entry = |entry: &Entry| match &entry.kind {
        EntryKind::Step(step) => vec![step.loss, step.grad_norm],
        EntryKind::Evaluation(evaluation) => vec![evaluation.loss, evaluation.tokens as f64],
        _ => vec![],
    };
    entries.iter().flat_map(of_entry).collect()
}

fn assert_same(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-12 * expected.abs(), "{what}: {found} instead of {expected}");
    }
}

/// Compares layouts with one in which every rank has whole sequences.
fn compare(layouts: &[&[&str]]) {
    let world = world();
    for source in SOURCES {
        let whole = numbers(&run_recipe(&world, source));
        for layout in layouts {
            let entries = run_recipe(&world, &[source, layout].concat());
            let what = format!("{source:?}, {layout:?}");
            if world.rank() > 0 {
                continue;
            }
            assert_same(&numbers(&entries), &whole, &what);
            for entry in &entries {
                let EntryKind::Traffic(traffic) = &entry.kind else { continue };
                for verb in traffic.verbs.iter().filter(|verb| verb.verb == "all-to-all") {
                    // What packed documents need depends on them.
                    if !source.iter().any(|set| set.starts_with("data.chat")) {
                        assert_eq!(verb.bytes, verb.expected_bytes, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn divided_sequences_have_the_losses_of_whole_ones() {
    let scratch = scratch();
    ranks!(launch(4, scratch.path()), || compare(&[
        &["parallel.context=2", "supervision.verify_collectives=true"],
        &["parallel.context=2", "parallel.ulysses=2", "zero.stage=1"],
        &["parallel.context=4", "parallel.ulysses=1", "activation_checkpointing=full"],
        &["parallel.context=4", "parallel.ulysses=2", "batch.micro_batch_size=3"],
        &["parallel.context=4", "parallel.ulysses=4", "activation_checkpointing=selective"],
        &["parallel.context=2", "parallel.tensor=2"],
        &["parallel.context=2", "parallel.ulysses=1", "parallel.pipeline=2"],
    ]));
}

#[test]
fn three_ranks_divide_sequences() {
    let scratch = scratch();
    ranks!(launch(3, scratch.path()), || compare(&[
        &["parallel.context=3", "parallel.ulysses=1"],
        &["parallel.context=3", "parallel.ulysses=3"],
    ]));
}

#[test]
fn a_checkpoint_is_resumed_with_other_divisions() {
    let scratch = scratch();
    ranks!(launch(4, scratch.path()), || {
        let world = world();
        let whole = numbers(&run_recipe(&world, &["run.steps=4"]));
        let mut found = Vec::new();
        for (steps, layout) in [
            ("run.steps=1", &["parallel.context=2", "parallel.ulysses=1"][..]),
            ("run.steps=2", &["parallel.context=4", "parallel.ulysses=2"]),
            ("run.steps=3", &[]),
            ("run.steps=4", &["parallel.context=2", "parallel.tensor=2"]),
        ] {
            found.extend(numbers(&run_recipe(&world, &[&["checkpoints.folder=saved", steps], layout].concat())));
        }
        if world.rank() == 0 {
            assert_same(&found, &whole, "resumed");
        }
    });
}
