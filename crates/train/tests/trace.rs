//! A trace that one rank is asked for in the midst of a run is made by all.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use shardwise_comm::mpi;
use shardwise_harness::{Launch, ranks};
use shardwise_journal::spans::{Thread, Trace};
use shardwise_train::{Asked, Ended, Position, Recipe, run};

const FOLDER: &str = "SHARDWISE_TEST_FOLDER";

const RECIPE: &str = r#"
[model.llama]
vocabulary = 61
width = 32
blocks = 2
heads = 4
mlp_width = 80

[data]
seed = 7

[batch]
sequences = 2
positions = 16

[optimizer]
rate = 1e-2

[run]
steps = 6

[checkpoints]
folder = "saved"
background = false
"#;

#[test]
fn one_rank_is_asked_and_all_are_traced() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("recipe.toml"), RECIPE).unwrap();
    ranks!(Launch::ranks(3).variable(FOLDER, folder.path().to_str().unwrap()), || {
        let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
        let recipe = Recipe::read(&folder.join("recipe.toml")).unwrap();
        let world = Arc::new(mpi::world(mpi::Options::default()).unwrap());
        let asked = Asked::default();
        if world.rank() == 1 {
            asked.trace.store(2, Ordering::Relaxed);
        }
        let ended =
            run(&recipe, &world, &asked, &Arc::new(Position::default()), &mut |_| (), &mut std::io::sink()).unwrap();
        assert_eq!(ended, Ended::Finished);
        assert_eq!(asked.trace.load(Ordering::Relaxed), 0, "a wish is fulfilled once");
        // It is heard in the first step, and begins with the second.
        let trace = Trace::read(&folder.join("saved/trace-step-000002.json")).unwrap();
        assert_eq!((trace.about.first_step, trace.about.steps, trace.about.ranks), (2, 2, 3));
        for rank in 0..3 {
            for step in [2, 3] {
                let of = |thread: Thread| {
                    trace.spans.iter().any(|span| span.rank == rank && span.step == step && span.thread == thread)
                };
                assert!(of(Thread::Training) && of(Thread::Communication), "rank {rank}, step {step}");
            }
        }
        assert!(trace.ranks.iter().all(|(_, about)| about.forgotten == 0 && about.clock_uncertainty_us == 0.));
    });
}
