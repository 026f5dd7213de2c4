//! What a run writes down of itself: every step, and traffic that is what theory says.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{Group, mpi};
use shardwise_harness::{Launch, ranks};
use shardwise_journal::{Entry, METRICS, Run, Start, What};
use shardwise_train::{Asked, Recipe, run};

const FOLDER: &str = "SHARDWISE_TEST_FOLDER";

const RECIPE: &str = "[model.llama]\nvocabulary = 61\nwidth = 36\nblocks = 3\nheads = 6\nkv_heads = 3\nmlp_width = 53\n\
                      [data]\n[batch]\nsequences = 1\npositions = 16\nmicro_batches = 2\n[optimizer]\nrate = 1e-2\n";

/// Runs a recipe with changes to it; every entry that it handed out, on the first rank.
fn ran(folder: &Path, world: &Arc<Group>, sets: &[&str]) -> (Vec<Entry>, String) {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let recipe = Recipe::layered(&folder.join("recipe.toml"), None, &sets).unwrap();
    let (mut entries, mut printed) = (Vec::new(), Vec::new());
    let told = &mut |entry: &Entry| entries.push(entry.clone());
    run(&recipe, world, &Asked::default(), &Arc::default(), told, &mut printed).unwrap();
    (entries, String::from_utf8(printed).unwrap())
}

/// A folder of the test's; that of a rank is inside, and goes with it.
fn scratch(steps: u64) -> tempfile::TempDir {
    let folder = std::env::var(FOLDER).map_or_else(|_| tempfile::tempdir(), tempfile::tempdir_in).unwrap();
    std::fs::write(folder.path().join("recipe.toml"), format!("{RECIPE}[run]\nsteps = {steps}\n")).unwrap();
    folder
}

fn launch(ranks: usize, folder: &Path) -> Launch {
    Launch::ranks(ranks).variable(FOLDER, folder.to_str().unwrap()).limit(Duration::from_secs(200))
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
        let What::Traffic(traffic) = &entry.what else { continue };
        steps += traffic.steps;
        for found in traffic.verbs.iter().filter(|found| found.verb == verb) {
            bytes += found.bytes;
            theory += found.theory_bytes;
        }
    }
    assert_eq!(steps, 3, "every step is counted once");
    (bytes, theory)
}

#[test]
fn traffic_is_what_theory_says() {
    let scratch = scratch(3);
    let sets: [&[&str]; 9] = [
        &["sharding.stage=0"],
        &["sharding.stage=1"],
        &["sharding.stage=2", "precision.gradients=bf16"],
        &["sharding.stage=2", "sharding.accumulation=sharded"],
        &["sharding.stage=3", "precision.parameters=bf16"],
        &["sharding.stage=3", "recomputation=full", "sharding.accumulation=sharded", "sharding.units_in_flight=0"],
        &["sharding.stage=3", "model.llama.tied=true", "sharding.units_in_flight=2"],
        &["sharding.stage=3", "sharding.replicas=2", "model.frozen=[\"model.embed_tokens\", \"model.layers.0.\"]"],
        &["sharding.stage=1", "sharding.replicas=2", "model.frozen=[\"model.layers.1.mlp\"]"],
    ];
    ranks!(launch(4, scratch.path()), || {
        let world = world();
        for sets in sets {
            let (entries, text) = ran(&folder(), &world, sets);
            if world.rank() > 0 {
                assert!(entries.is_empty() && text.is_empty());
                continue;
            }
            // Of each step: three numbers of every rank, for tokens, micro-batches and a wish for a trace.
            let (bytes, theory) = sent(&entries, "all-gather");
            assert_eq!(bytes - 3 * 3 * 8 * 3, theory, "all-gather, {sets:?}");
            let (bytes, theory) = sent(&entries, "reduce-scatter");
            assert_eq!(bytes, theory, "reduce-scatter, {sets:?}");
            // Besides: a loss, and a norm for each of five units.
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
        let sets = ["run.print_every=4", "run.folder=elsewhere", "precision.parameters=bf16"];
        let (entries, text) = ran(&folder, &world, &sets);
        if world.rank() > 0 {
            return;
        }
        let run = Run::open(folder.join("elsewhere")).unwrap();
        assert_eq!(run.entries(), entries, "what is written is what is handed out");
        assert_eq!(run.unknown(), 0);
        assert!(text.contains(&format!("journal in {}", folder.join("elsewhere").display())), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("step ")).count(), 2, "{text}");
        let steps = run.steps();
        assert!(steps.iter().map(|(_, step)| step.step).eq(1..=7));
        for (_, step) in &steps {
            assert!(step.memory_bytes > 10 << 20 && step.memory_peak_bytes >= step.memory_bytes, "{step:?}");
            assert!(step.tokens == 64 && step.tokens_per_s > 0. && step.sent_bytes > 0, "{step:?}");
            // It is 0 where the machine was too busy to measure its peak.
            assert!((0. ..=1.).contains(&step.utilisation), "{step:?}");
        }
        let Start { name, ranks, stage, precision, parameters, tokens_per_step, steps, .. } = run.starts()[0].1.clone();
        assert_eq!((name.as_str(), ranks, stage, precision.as_str()), ("recipe", 2, 3, "bf16"));
        // Embedding and head; per block query and output, key and value, the MLP and two norms; the last norm.
        let matrices = 3 * (2 * 36 * 36 + 2 * 36 * 18 + 3 * 36 * 53) + 61 * 36;
        let all = matrices + 61 * 36 + 3 * 2 * 36 + 36;
        assert_eq!((parameters, tokens_per_step, steps), (all as u64, 64, 7));
        // A position sees 8.5 on average; a product with keys and one with values, thrice.
        let attention = 3. * 3. * 4. * 36. * 8.5;
        assert_eq!(run.starts()[0].1.flops_per_token, 6. * matrices as f64 + attention);
        assert!(run.starts()[0].1.peak_flops_per_s > 1e8 && run.starts()[0].1.memory_estimate_bytes > 0);
        let memory = entries.iter().filter_map(|entry| match &entry.what {
            What::Memory { step, ranks } => Some((*step, ranks)),
            _ => None,
        });
        let memory: Vec<_> = memory.collect();
        assert!(memory.len() >= 2 && memory[0].0 == 1 && memory.last().unwrap().0 == 7, "the first and the last step");
        for (_, ranks) in memory {
            assert_eq!(ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [0, 1]);
            // Half of the model each: two bytes a parameter, and a master and two moments of four.
            let half = |rank: &shardwise_journal::RankMemory| [rank.parameters, rank.optimizer / 6];
            let figures = ranks.iter().flat_map(half);
            assert!(figures.into_iter().all(|bytes| bytes.abs_diff(all as u64) <= 2 * 5), "{ranks:?}");
            assert!(ranks.iter().all(|rank| rank.process > 10 << 20 && rank.in_flight > 0), "{ranks:?}");
        }
    });
}

#[test]
fn a_disk_that_is_full_does_not_end_a_run() {
    let scratch = scratch(5);
    ranks!(launch(1, scratch.path()), || {
        // What every write to it answers is that there is no space.
        let (world, runs) = (world(), folder().join("full"));
        std::fs::create_dir_all(&runs).unwrap();
        std::os::unix::fs::symlink("/dev/full", runs.join(METRICS)).unwrap();
        let (entries, text) = ran(&folder(), &world, &["run.folder=full"]);
        let steps = entries.iter().filter(|entry| matches!(entry.what, What::Step(_))).count();
        assert_eq!(steps, 5, "whoever follows the run sees it all");
        assert_eq!(text.matches("the journal cannot be written").count(), 1, "{text}");
        assert!(text.contains("No space left"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("step ")).count(), 5, "{text}");
        // And where there can be no folder at all.
        let (entries, text) = ran(&folder(), &world, &["run.folder=recipe.toml/inside"]);
        assert!(entries.len() > 5 && text.contains("the journal cannot be written"), "{text}");
    });
}
