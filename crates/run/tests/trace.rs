//! A trace requested from one rank during a run covers all ranks.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use shardwise_comm::mpi;
use shardwise_harness::{Launch, ranks};
use shardwise_journal::spans::{Thread, Trace};
use shardwise_recipe::Recipe;
use shardwise_run::{PositionTracker, Requests, RunOutcome, run};

const FOLDER: &str = "SHARDWISE_TEST_FOLDER";

const RECIPE: &str = r#"
[model.llama]
vocab_size = 61
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 4
intermediate_size = 80

[data]
seed = 7

[batch]
micro_batch_size = 2
seq_len = 16

[optimizer]
lr = 1e-2

[run]
steps = 6

[checkpoints]
folder = "saved"
background = false
"#;

#[test]
fn a_request_to_one_rank_traces_all() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("recipe.toml"), RECIPE).unwrap();
    ranks!(Launch::ranks(3).variable(FOLDER, folder.path().to_str().unwrap()), || {
        let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
        let recipe = Recipe::read(&folder.join("recipe.toml")).unwrap();
        let world = Arc::new(mpi::world(mpi::Options::default()).unwrap());
        let requests = Requests::default();
        if world.rank() == 1 {
            requests.trace.store(2, Ordering::Relaxed);
        }
        let ended =
            run(&recipe, &world, &requests, &Arc::new(PositionTracker::default()), &mut |_| (), &mut std::io::sink())
                .unwrap();
        assert_eq!(ended, RunOutcome::Finished);
        assert_eq!(requests.trace.load(Ordering::Relaxed), 0, "a request is served once");
        // The first step sees the request, and the trace starts with the second.
        let trace = Trace::read(&folder.join("saved/trace-step-000002.json")).unwrap();
        assert_eq!((trace.info.first_step, trace.info.steps, trace.info.ranks), (2, 2, 3));
        for rank in 0..3 {
            for step in [2, 3] {
                let of = |thread: Thread| {
                    trace.spans.iter().any(|span| span.rank == rank && span.step == step && span.thread == thread)
                };
                assert!(of(Thread::Training) && of(Thread::Communication), "rank {rank}, step {step}");
            }
        }
        assert!(trace.ranks.iter().all(|(_, info)| info.dropped == 0 && info.clock_uncertainty_us == 0.));
    });
}
