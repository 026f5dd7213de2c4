//! The library's calls overlap like the program's: the next step's token count does not wait for the all-gathers of updated
//! parameters.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::Arc;
use std::time::Duration;

use shardwise::model::{Batch, LlamaConfig, Model};
use shardwise::tch::Tensor;
use shardwise::{AdamW, BatchSize, Optimizer, Options, Ranks, Schedule, Sharding, SourceError, Trainer, init};
use shardwise_comm::{Entry, Group, Verb};
use shardwise_harness::{Hosts, Launch, check_speed, ranks, try_ranks};
use shardwise_recipe::Recipe;
use shardwise_run::{PositionTracker, Requests, RunOutcome, run};

const FOLDER: &str = "SHARDWISE_TEST_FOLDER";

/// The same model and number of steps as [`train`].
const RECIPE: &str = "
[model.llama]
vocab_size = 64
hidden_size = 256
num_hidden_layers = 4
num_attention_heads = 4
intermediate_size = 1024

[data]
seed = 7

[batch]
micro_batch_size = 1
seq_len = 16

[zero]
stage = 2

[optimizer]
lr = 1e-3

[run]
steps = 6
";

/// Two hosts with a slow link: the all-gathers of 4.2 million parameters take 70 ms.
fn two_hosts() -> Launch {
    Launch::hosts(Hosts { hosts: 2, ranks_per_host: 1, rate: "1gbit".to_string(), delay: "1ms".to_string() })
}

fn samples(indices: &[u64]) -> Result<Batch, SourceError> {
    let row = |from: i64| indices.iter().flat_map(move |n| (0..16).map(move |i| (*n as i64 + from + i) % 64));
    let rows = |from| Tensor::from_slice(&row(from).collect::<Vec<i64>>()).view([-1, 16]);
    Ok(Batch::new(rows(0), rows(1)))
}

fn train(ranks: &Ranks, stage: u8) {
    let model = Model::from_config(LlamaConfig::new(64, 256, 4, 4, 1024)).unwrap();
    let optimizer = Optimizer::AdamW(AdamW::default());
    let options = Options::new(Sharding::stage(stage).unwrap(), optimizer, Schedule::constant(1e-3));
    let mut trainer = Trainer::new(model, ranks.clone(), options, &mut init::from_seed(1)).unwrap();
    trainer.train(&samples, BatchSize { micro_batch_size: 1, gradient_accumulation_steps: 1 }, 6, &mut |_| ()).unwrap();
}

/// Token counts that were started while updated parameters were still being gathered.
#[derive(Debug)]
struct TokenCounts {
    /// How many ran at the same time as such an all-gather.
    overlapped: usize,
    /// The time spent waiting for them, as a fraction of the time that was left until all gathers had ended. At least 1 if they
    /// wait for the gathers.
    waited_share: f64,
}

impl TokenCounts {
    /// The token counts since `since`.
    fn since(world: &Group, since: Duration) -> Self {
        let entries = world.flight_recorder().read();
        let of = |is_count: bool| -> Vec<&Entry> {
            let is_meant = |entry: &&Entry| {
                let is_gather = entry.call.verb == Verb::AllGather && entry.queued >= since;
                is_gather && entry.ended.is_some() && (&*entry.call.label == "tokens") == is_count
            };
            entries.iter().filter(is_meant).collect()
        };
        let (counts, gathers) = (of(true), of(false));
        let overlap = |a: &Entry, b: &Entry| a.started < b.ended && b.started < a.ended;
        let overlapped = counts.iter().filter(|count| gathers.iter().any(|gather| overlap(count, gather))).count();
        let (mut waited, mut left) = (Duration::ZERO, Duration::ZERO);
        for count in &counts {
            let before = gathers.iter().filter(|gather| gather.queued < count.queued);
            let end = before.filter_map(|gather| gather.ended).max().unwrap_or_default();
            if end > count.queued {
                left += end - count.queued;
                waited += count.waited.unwrap_or_default();
            }
        }
        TokenCounts { overlapped, waited_share: waited.as_secs_f64() / left.as_secs_f64().max(1e-9) }
    }
}

#[test]
fn token_counts_overlap_gathers_in_the_library_as_in_the_program() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("recipe.toml"), RECIPE).unwrap();
    ranks!(two_hosts().variable(FOLDER, folder.path().to_str().unwrap()), || {
        let ranks = shardwise::ranks().unwrap();
        let record = ranks.world.flight_recorder().clone();
        for stage in [1, 2] {
            let since = record.epoch().elapsed();
            train(&ranks, stage);
            let counts = TokenCounts::since(&ranks.world, since);
            assert!(counts.overlapped > 0, "the library, stage {stage}: {counts:?}");
        }
        let recipe = format!("{}/recipe.toml", std::env::var(FOLDER).unwrap());
        let recipe = Recipe::read(recipe.as_ref()).unwrap();
        let since = record.epoch().elapsed();
        let (requests, position) = (Requests::default(), Arc::new(PositionTracker::default()));
        let ended = run(&recipe, &ranks.world, &requests, &position, &mut |_| (), &mut std::io::sink()).unwrap();
        assert_eq!(ended, RunOutcome::Finished);
        let counts = TokenCounts::since(&ranks.world, since);
        assert!(counts.overlapped > 0, "the program: {counts:?}");
    });
}

#[test]
fn token_counts_end_before_the_gathers() {
    check_speed(|_| {
        let outcome = try_ranks!(two_hosts(), || {
            let ranks = shardwise::ranks().unwrap();
            train(&ranks, 2);
            println!("waited share: {:.3}", TokenCounts::since(&ranks.world, Duration::ZERO).waited_share);
        });
        let report = outcome.map_err(|failure| failure.to_string())?;
        let output = &report.ranks[0].output;
        let share = output.lines().find_map(|line| line.split_once("waited share: ")?.1.parse::<f64>().ok());
        match share {
            Some(share) if share < 0.7 => Ok(()),
            _ => Err(format!("token counts wait for gathers:\n{output}")),
        }
    });
}
