//! The journal of a run has every step, and its traffic is the expected traffic.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{Group, mpi};
use shardwise_harness::{Launch, ranks};
use shardwise_journal::{Entry, EntryKind, JOURNAL_VERSION, METRICS, Run, Start};
use shardwise_recipe::Recipe;
use shardwise_run::{Requests, run};

const FOLDER: &str = "SHARDWISE_TEST_FOLDER";

const RECIPE: &str = "[model.llama]\nvocab_size = 61\nhidden_size = 36\nnum_hidden_layers = 3\n\
                      num_attention_heads = 6\nnum_key_value_heads = 3\nintermediate_size = 53\n\
                      [data]\n[batch]\nmicro_batch_size = 1\nseq_len = 16\ngradient_accumulation_steps = 2\n[optimizer]\nlr = 1e-2\n";

/// Runs a recipe with settings on top. Returns the entries and the output, on rank 0.
fn run_recipe(folder: &Path, world: &Arc<Group>, sets: &[&str]) -> (Vec<Entry>, String) {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let recipe = Recipe::read_layered(&folder.join("recipe.toml"), None, &sets).unwrap();
    let (mut entries, mut printed) = (Vec::new(), Vec::new());
    let on_entry = &mut |entry: &Entry| entries.push(entry.clone());
    run(&recipe, world, &Requests::default(), &Arc::default(), on_entry, &mut printed).unwrap();
    (entries, String::from_utf8(printed).unwrap())
}

/// A temporary folder of the test. That of a rank is inside it.
fn scratch(steps: u64) -> tempfile::TempDir {
    let folder = std::env::var(FOLDER).map_or_else(|_| tempfile::tempdir(), tempfile::tempdir_in).unwrap();
    std::fs::write(folder.path().join("recipe.toml"), format!("{RECIPE}[run]\nsteps = {steps}\n")).unwrap();
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

/// How many bytes of traffic a step had and how many theory has for it, of a verb.
fn sent(entries: &[Entry], verb: &str) -> (u64, u64) {
    let (mut bytes, mut theory, mut steps) = (0, 0, 0);
    for entry in entries {
        let EntryKind::Traffic(traffic) = &entry.kind else { continue };
        steps += traffic.steps;
        for found in traffic.verbs.iter().filter(|found| found.verb == verb) {
            bytes += found.bytes;
            theory += found.expected_bytes;
        }
    }
    assert_eq!(steps, 3, "every step is counted once");
    (bytes, theory)
}

#[test]
fn traffic_is_what_theory_says() {
    let scratch = scratch(3);
    let sets: [&[&str]; 12] = [
        &["zero.stage=0"],
        &["zero.stage=1"],
        &["zero.stage=2", "precision.reduce_dtype=bf16"],
        &["zero.stage=2", "zero.reduce_each_micro_batch=true"],
        &["zero.stage=3", "precision.param_dtype=bf16"],
        &["zero.stage=3", "activation_checkpointing=full", "zero.reduce_each_micro_batch=true", "zero.prefetch=0"],
        &["zero.stage=3", "model.llama.tie_word_embeddings=true", "zero.prefetch=2"],
        &["zero.stage=3", "parallel.replicate=2", "model.frozen=[\"model.embed_tokens\", \"model.layers.0.\"]"],
        &["zero.stage=1", "parallel.replicate=2", "model.frozen=[\"model.layers.1.mlp\"]"],
        // Ranks that share layers read the same samples: 1 sequence × 2 micro-batches × 2 pairs of ranks.
        &["zero.stage=3", "parallel.tensor=2", "batch.global_batch_size=4"],
        &["zero.stage=1", "parallel.tensor=2", "parallel.replicate=2", "parallel.sequence=false"],
        &["zero.stage=3", "parallel.pipeline=2", "parallel.pipeline_schedule=zb-v", "batch.global_batch_size=4"],
    ];
    ranks!(launch(4, scratch.path()), || {
        let world = world();
        for sets in sets {
            let (entries, text) = run_recipe(&folder(), &world, sets);
            if world.rank() > 0 {
                assert!(entries.is_empty() && text.is_empty());
                continue;
            }
            // In addition, each step sends six numbers per rank: tokens, micro-batches, a trace request, two fingerprints, and whether
            // sequences are divided.
            let (bytes, theory) = sent(&entries, "all-gather");
            assert_eq!(bytes - 3 * 6 * 8 * 3, theory, "all-gather, {sets:?}");
            let (bytes, theory) = sent(&entries, "send");
            assert_eq!(bytes, theory, "send, {sets:?}");
            let (bytes, theory) = sent(&entries, "reduce-scatter");
            assert_eq!(bytes, theory, "reduce-scatter, {sets:?}");
            // In addition: a loss, and a norm for each of five units.
            let (bytes, theory) = sent(&entries, "all-reduce");
            assert!((3 * 60..3 * 300).contains(&(bytes - theory)), "all-reduce, {sets:?}: {bytes} and {theory}");
        }
    });
}

#[test]
fn every_step_is_written_though_few_are_printed() {
    let scratch = scratch(7);
    ranks!(launch(2, scratch.path()), || {
        let (world, folder) = (world(), folder());
        let sets = ["run.log_every=4", "run.folder=elsewhere", "precision.param_dtype=bf16"];
        let (entries, text) = run_recipe(&folder, &world, &sets);
        if world.rank() > 0 {
            return;
        }
        let run = Run::open(folder.join("elsewhere")).unwrap();
        assert_eq!(run.entries(), entries, "what is written is what is handed out");
        assert_eq!(run.unreadable(), 0);
        assert!(text.contains(&format!("journal in {}", folder.join("elsewhere").display())), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("step ")).count(), 2, "{text}");
        let steps = run.steps();
        assert!(steps.iter().map(|(_, step)| step.step).eq(1..=7));
        for (_, step) in &steps {
            assert!(step.memory_bytes > 10 << 20 && step.memory_peak_bytes >= step.memory_bytes, "{step:?}");
            assert!(step.tokens == 64 && step.tokens_per_s > 0. && step.sent_bytes > 0, "{step:?}");
            // It is 0 if the machine was too busy to measure its peak.
            assert!((0. ..=1.).contains(&step.mfu), "{step:?}");
        }
        let start = run.starts()[0].1.clone();
        assert_eq!((start.journal_version, start.zero_stage, start.param_dtype.as_str()), (JOURNAL_VERSION, 3, "bf16"));
        let Start { name, ranks, parameters, tokens_per_step, steps, .. } = start;
        assert_eq!((name.as_str(), ranks), ("recipe", 2));
        // Embedding and head; in each block query and output, key and value, the MLP and two norms; the last norm.
        let matrices = 3 * (2 * 36 * 36 + 2 * 36 * 18 + 3 * 36 * 53) + 61 * 36;
        let all = matrices + 61 * 36 + 3 * 2 * 36 + 36;
        assert_eq!((parameters, tokens_per_step, steps), (all as u64, 64, 7));
        // A position attends to 8.5 on average; a product with keys and one with values, times three.
        let attention = 3. * 3. * 4. * 36. * 8.5;
        assert_eq!(run.starts()[0].1.flops_per_token, 6. * matrices as f64 + attention);
        assert!(run.starts()[0].1.peak_flops_per_s > 1e8 && run.starts()[0].1.memory_estimate_bytes > 0);
        let memory = entries.iter().filter_map(|entry| match &entry.kind {
            EntryKind::Memory { step, ranks } => Some((*step, ranks)),
            _ => None,
        });
        let memory: Vec<_> = memory.collect();
        assert!(memory.len() >= 2 && memory[0].0 == 1 && memory.last().unwrap().0 == 7, "the first and the last step");
        for (_, ranks) in memory {
            assert_eq!(ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [0, 1]);
            // Half of the model each: two bytes per parameter, plus a master weight and two moments of four bytes.
            let half = |rank: &shardwise_journal::RankMemory| [rank.parameters, rank.optimizer / 6];
            let figures = ranks.iter().flat_map(half);
            assert!(figures.into_iter().all(|bytes| bytes.abs_diff(all as u64) <= 2 * 5), "{ranks:?}");
            assert!(ranks.iter().all(|rank| rank.process > 10 << 20 && rank.unsharded > 0), "{ranks:?}");
        }
    });
}

#[test]
fn a_disk_that_is_full_does_not_end_a_run() {
    let scratch = scratch(5);
    ranks!(launch(1, scratch.path()), || {
        // Every write to it fails with "no space left".
        let (world, runs) = (world(), folder().join("full"));
        std::fs::create_dir_all(&runs).unwrap();
        std::os::unix::fs::symlink("/dev/full", runs.join(METRICS)).unwrap();
        let (entries, text) = run_recipe(&folder(), &world, &["run.folder=full"]);
        let steps = entries.iter().filter(|entry| matches!(entry.kind, EntryKind::Step(_))).count();
        assert_eq!(steps, 5, "whoever follows the run sees it all");
        assert_eq!(text.matches("the journal cannot be written").count(), 1, "{text}");
        assert!(text.contains("No space left"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("step ")).count(), 5, "{text}");
        // And if the folder cannot be created.
        let (entries, text) = run_recipe(&folder(), &world, &["run.folder=recipe.toml/inside"]);
        assert!(entries.len() > 5 && text.contains("the journal cannot be written"), "{text}");
    });
}
