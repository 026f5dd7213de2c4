//! Stages differ in who keeps what, and in nothing else: the same losses, norms and parameters, to the last bit.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{Group, Verb, mpi};
use shardwise_harness::{Launch, ranks};
use shardwise_model::{Batch, Gpt2, IGNORED, Llama, Model};
use shardwise_torch::optim::AdamW;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{Options, Recomputation, Trainer};
use shardwise_zero::Sharding;

const VOCABULARY: i64 = 101;

/// Divisible by as little as possible.
fn llama() -> Model {
    let llama = Llama { kv_heads: 3, head_chunk: 10, ..Llama::new(VOCABULARY as usize, 36, 3, 6, 53) };
    llama.model().unwrap()
}

fn gpt2() -> Model {
    Gpt2::new(VOCABULARY as usize, 16, 36, 2, 6).model().unwrap()
}

fn options(stage: u8, recomputation: Recomputation) -> Options {
    Options {
        sharding: Sharding::stage(stage).unwrap(),
        recomputation,
        seed: 5,
        adamw: AdamW { rate: 3e-3, beta1: 0.9, beta2: 0.95, weight_decay: 0.1, epsilon: 1e-8 },
        clip_norm: Some(0.5),
    }
}

/// Micro-batch `micro` of a step, as its global number says: the same whoever trains on it. Some targets do not count.
fn batch(step: i64, micro: i64) -> Batch {
    let numbers = Tensor::arange(3 * 12, (Kind::Int64, Device::Cpu)).view([3, 12]);
    let tokens = (numbers * 7 + step * 31 + micro * 57).remainder(VOCABULARY);
    let targets = (&tokens * 3 + 1).remainder(VOCABULARY);
    let ignored = (&tokens + micro).remainder(4).eq(0);
    Batch { tokens, targets: targets.masked_fill(&ignored, IGNORED) }
}

/// Losses, norms and final parameters, as bits.
fn train(model: Model, group: &Arc<Group>, options: Options, steps: i64, micro: i64) -> (Vec<u64>, Vec<u32>) {
    let mut trainer = Trainer::new(model, group.clone(), options).unwrap();
    let mut numbers = Vec::new();
    let (rank, size) = (group.rank() as i64, group.size() as i64);
    for step in 0..steps {
        let batches: Vec<Batch> = (0..micro).map(|index| batch(step, index * size + rank)).collect();
        let report = trainer.step(&batches).unwrap();
        numbers.extend([report.loss.to_bits(), report.gradient_norm.to_bits()]);
    }
    let mut parameters = Vec::new();
    for shard in trainer.shards_mut() {
        shard.gather().unwrap();
        for tensor in shard.parameters() {
            parameters.extend(
                Vec::<f32>::try_from(tensor.detach().contiguous().view(-1)).unwrap().iter().map(|x| x.to_bits()),
            );
        }
    }
    (numbers, parameters)
}

fn same_bits(size: usize) {
    let group = Arc::new(mpi::world(mpi::Options { time_limit: Duration::from_secs(60) }).unwrap());
    assert_eq!(group.size(), size);
    let every = |run: &dyn Fn(Options, &str)| {
        for stage in [0, 1, 2, 3] {
            for recomputation in [Recomputation::None, Recomputation::Full] {
                run(options(stage, recomputation), &format!("stage {stage}, recomputation {recomputation:?}"));
            }
        }
    };
    for micro in [1, 4] {
        let expected = train(llama(), &group, options(0, Recomputation::None), 50, micro);
        let first = f64::from_bits(expected.0[0]);
        let last = f64::from_bits(expected.0[expected.0.len() - 2]);
        assert!(last < 0.8 * first, "it learns: {first} to {last}");
        every(&|options, what| {
            let found = train(llama(), &group, options, 50, micro);
            assert!(found.0 == expected.0, "{what}, {micro} micro-batches: other losses or norms");
            assert!(found.1 == expected.1, "{what}, {micro} micro-batches: other parameters");
        });
    }
    let expected = train(gpt2(), &group, options(0, Recomputation::None), 20, 2);
    every(&|options, what| assert!(train(gpt2(), &group, options, 20, 2) == expected, "GPT-2, {what}"));
}

#[test]
fn stages_give_the_same_bits_on_2_ranks() {
    ranks!(Launch::ranks(2).limit(Duration::from_secs(300)), || same_bits(2));
}

#[test]
fn stages_give_the_same_bits_on_3_ranks() {
    ranks!(Launch::ranks(3).limit(Duration::from_secs(300)), || same_bits(3));
}

#[test]
fn stages_give_the_same_bits_on_4_ranks() {
    ranks!(Launch::ranks(4).limit(Duration::from_secs(300)), || same_bits(4));
}

#[test]
fn traffic_is_the_theory() {
    ranks!(4, || {
        let group = Arc::new(mpi::world(mpi::Options { time_limit: Duration::from_secs(60) }).unwrap());
        let elements = llama().elements() as f64;
        for stage in [0, 1, 2, 3] {
            let mut trainer = Trainer::new(llama(), group.clone(), options(stage, Recomputation::None)).unwrap();
            group.meter().reset();
            trainer.step(&[batch(0, group.rank() as i64)]).unwrap();
            // The last gathers of stages 1 and 2 are finished by the next use.
            trainer.shards_mut().iter_mut().for_each(|shard| shard.gather().unwrap());
            if stage == 3 {
                // That was one more than the step's own.
                let extra = elements * 3. / 4.;
                let sent =
                    group.meter().total(|tally| tally.verb != Verb::Barrier && &*tally.label != "tokens").elements
                        as f64;
                assert!((sent - extra - 3. * extra).abs() < 0.01 * sent, "stage 3 sent {sent}");
                continue;
            }
            let sent = group.meter().total(|tally| {
                tally.label.starts_with("block") || &*tally.label == "head" || &*tally.label == "embedding"
            });
            let theory = 2. * elements * 3. / 4.;
            assert!((sent.elements as f64 - theory).abs() < 0.005 * theory, "stage {stage} sent {}", sent.elements);
        }
    });
}

#[test]
fn uneven_batches_equal_one_big_batch() {
    ranks!(3, || {
        let group = Arc::new(mpi::world(mpi::Options { time_limit: Duration::from_secs(60) }).unwrap());
        let alone = Arc::new(shardwise_comm::single::group());
        let size = group.size() as i64;
        let mut together = Trainer::new(llama(), group.clone(), options(3, Recomputation::None)).unwrap();
        let mut single = Trainer::new(llama(), alone, options(0, Recomputation::None)).unwrap();
        for step in 0..10 {
            let all: Vec<Batch> = (0..2 * size).map(|index| batch(step, index)).collect();
            let joined = |part: fn(&Batch) -> &Tensor| Tensor::cat(&all.iter().map(part).collect::<Vec<_>>(), 0);
            let big = Batch { tokens: joined(|batch| &batch.tokens), targets: joined(|batch| &batch.targets) };
            let own: Vec<Batch> = (0..2).map(|index| batch(step, index * size + group.rank() as i64)).collect();
            let (found, expected) = (together.step(&own).unwrap(), single.step(&[big]).unwrap());
            assert_eq!(found.tokens, expected.tokens);
            assert!((found.loss / expected.loss - 1.).abs() < 1e-5, "step {step}: {found:?} {expected:?}");
            assert!(
                (found.gradient_norm / expected.gradient_norm - 1.).abs() < 1e-4,
                "step {step}: {found:?} {expected:?}"
            );
        }
    });
}

#[test]
fn ranks_with_different_numbers_of_micro_batches_are_told() {
    ranks!(3, || {
        let group = Arc::new(mpi::world(mpi::Options { time_limit: Duration::from_secs(60) }).unwrap());
        let mut trainer = Trainer::new(llama(), group.clone(), options(3, Recomputation::None)).unwrap();
        let micro = if group.rank() == 1 { 3 } else { 2 };
        let batches: Vec<Batch> = (0..micro).map(|index| batch(0, index)).collect();
        let error = trainer.step(&batches).unwrap_err().to_string();
        let expected = match group.rank() {
            1 => "step 1: rank 0 has 2 micro-batches and this rank 3; all ranks need as many, and at least one",
            _ => "step 1: rank 1 has 3 micro-batches and this rank 2; all ranks need as many, and at least one",
        };
        assert_eq!(error, expected);
        // Nothing is lost: the next step can be right.
        trainer.step(&[batch(0, group.rank() as i64)]).unwrap();
        let nothing = Batch { tokens: batch(0, 0).tokens, targets: batch(0, 0).targets.fill_(IGNORED) };
        let error = trainer.step(&[nothing]).unwrap_err().to_string();
        assert!(error.contains("step 3: no rank has a token that counts"), "{error}");
    });
}
