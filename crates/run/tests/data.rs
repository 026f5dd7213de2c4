//! The order of samples is the same for any number of ranks and from any step, without repetition within an epoch.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::HashSet;
use std::path::Path;

use shardwise_data::Writer;
use shardwise_recipe::Recipe;
use shardwise_run::data::Data;

/// Sequences per step, divisible among 1, 2, 3 and 4 ranks.
const GLOBAL: usize = 12;
const SEQ_LEN: u64 = 4;
const SAMPLES: usize = 10_000;

/// A corpus in which every window starts with its own index.
fn corpus(folder: &Path, windows: u64) -> Recipe {
    let mut writer = Writer::create(folder.join("corpus"), 1 << 20).unwrap();
    for window in 0..windows {
        let rest = std::iter::repeat_n(1, SEQ_LEN as usize - 1);
        writer.document(&std::iter::once(window as u32).chain(rest).collect::<Vec<_>>()).unwrap();
    }
    writer.document(&[0]).unwrap();
    writer.finish().unwrap();
    let text = format!(
        "[model.llama]\nvocab_size = 1048576\nhidden_size = 4\nnum_hidden_layers = 1\n\
         num_attention_heads = 1\nintermediate_size = 4\n[data]\ncorpus = \"corpus\"\n\
         seed = 5\n[batch]\nglobal_batch_size = {GLOBAL}\nmicro_batch_size = 1\nseq_len = {SEQ_LEN}\n[optimizer]\nlr = 1.0\n[run]\nsteps = 1\n"
    );
    std::fs::write(folder.join("recipe.toml"), text).unwrap();
    Recipe::read(&folder.join("recipe.toml")).unwrap()
}

/// The windows of all ranks in a step, in the order of their indices.
fn step(data: &Data, step: u64, ranks: usize) -> Vec<i64> {
    let of_rank = |rank| data.step(step, rank, ranks).unwrap();
    let ranks: Vec<_> = (0..ranks).map(of_rank).collect();
    let first = |batch: &shardwise_model::Batch| Vec::<i64>::try_from(batch.inputs.select(1, 0)).unwrap();
    (0..ranks[0].len()).flat_map(|micro_batch| ranks.iter().flat_map(move |rank| first(&rank[micro_batch]))).collect()
}

#[test]
fn samples_are_the_same_for_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = corpus(folder.path(), 12_345);
    let steps = SAMPLES.div_ceil(GLOBAL) as u64;
    let seen = |ranks: usize, from: u64| -> Vec<i64> {
        let data = Data::open(&recipe, ranks).unwrap();
        (from..=steps).flat_map(|number| step(&data, number, ranks)).collect()
    };
    let alone = seen(1, 1);
    assert!(alone.len() >= SAMPLES);
    assert_eq!(alone.iter().collect::<HashSet<_>>().len(), alone.len(), "nothing comes twice in an epoch");
    assert_ne!(alone[..GLOBAL], (0..GLOBAL as i64).collect::<Vec<_>>()[..], "and not in the order of the corpus");
    for ranks in 2..=4 {
        assert_eq!(seen(ranks, 1), alone, "{ranks} ranks");
        // A resumed run opens its data again.
        for from in [2, 77, 501, steps] {
            assert_eq!(seen(ranks, from), alone[(from as usize - 1) * GLOBAL..], "{ranks} ranks from step {from}");
        }
    }
}

#[test]
fn an_epoch_has_every_window_once_and_the_next_has_another_order() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = corpus(folder.path(), 10 * GLOBAL as u64);
    let data = Data::open(&recipe, 3).unwrap();
    let epoch = |epoch: u64| (1..=10).flat_map(|number| step(&data, 10 * epoch + number, 3)).collect::<Vec<i64>>();
    let (first, second) = (epoch(0), epoch(1));
    assert_eq!(first.iter().copied().collect::<HashSet<_>>(), (0..10 * GLOBAL as i64).collect());
    assert_eq!(second.iter().copied().collect::<HashSet<_>>(), (0..10 * GLOBAL as i64).collect());
    assert_ne!(first, second);
}

#[test]
fn a_corpus_of_another_tokenizer_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = corpus(folder.path(), 100);
    let text = std::fs::read_to_string(folder.path().join("recipe.toml")).unwrap();
    std::fs::write(folder.path().join("small.toml"), text.replace("1048576", "2")).unwrap();
    drop(recipe);
    let recipe = Recipe::read(&folder.path().join("small.toml")).unwrap();
    let data = Data::open(&recipe, 1).unwrap();
    let error = data.step(1, 0, 1).map(drop).unwrap_err().to_string();
    assert!(error.contains("corpus.bin: token") && error.contains("vocab_size is 2"), "{error}");
}
