//! Custom programs: those that the checker accepts give the same bits as the built-in ones.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

#[allow(dead_code, reason = "these tests train one of its models")]
mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::mpi;
use shardwise_harness::ranks;
use shardwise_model::Batch;
use shardwise_plan::program::{Program, Programs};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{ActivationCheckpointing, Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{AdamW, Optimizer, Sharding};
use support::{VOCAB_SIZE, llama};

const STEPS: i64 = 2;
/// The number of mutants that are run in each setting.
const SAMPLE: usize = 12;

fn trainer(ranks: &Ranks, options: &Options) -> Trainer {
    Trainer::new(llama(), ranks.clone(), options.clone(), &mut init::from_seed(5)).unwrap()
}

fn batch(step: i64, micro: i64) -> Batch {
    let numbers = Tensor::arange(2 * 9, (Kind::Int64, Device::Cpu)).view([2, 9]);
    let tokens = (numbers * 7 + step * 31 + micro * 57).remainder(VOCAB_SIZE);
    let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
    Batch::new(tokens, targets)
}

/// Losses, norms and parameters, as bits.
fn train(trainer: &mut Trainer, micro_batches: i64) -> Vec<u64> {
    let (rank, size) = (trainer.ranks().world.rank() as i64, trainer.ranks().world.size() as i64);
    let mut bits = Vec::new();
    for step in 0..STEPS {
        let batches: Vec<Batch> = (0..micro_batches).map(|micro| batch(step, micro * size + rank)).collect();
        let report = trainer.step(&batches).unwrap();
        bits.extend([report.loss.to_bits(), report.grad_norm.to_bits()]);
    }
    for shard in trainer.shards_mut() {
        shard.gather().unwrap();
        for tensor in shard.parameters() {
            let elements = Vec::<f32>::try_from(tensor.detach().contiguous().view(-1)).unwrap();
            bits.extend(elements.iter().map(|element| u64::from(element.to_bits())));
        }
        shard.release().unwrap();
    }
    bits
}

/// A change of a program.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// Swaps two instructions.
    Swap(usize, usize),
    Drop(usize),
}

/// The same numbers on every rank.
struct Random(u64);

impl Random {
    /// A number less than `bound`.
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }

    /// A change of a program with this many instructions: most often of neighbors, which may well be independent.
    fn change(&mut self, instructions: usize) -> Change {
        let first = self.below(instructions - 1);
        match self.below(4) {
            0 => Change::Drop(first),
            1 => Change::Swap(first, self.below(instructions)),
            _ => Change::Swap(first, first + 1),
        }
    }
}

fn changed(program: &Program, change: Change) -> Program {
    let mut mutant = program.clone();
    match change {
        Change::Swap(first, second) => mutant.instructions.swap(first, second),
        Change::Drop(position) => drop(mutant.instructions.remove(position)),
    }
    mutant
}

/// The mutant on one rank, or on all.
fn on(rank: Option<usize>, program: &Program, mutant: Program) -> Programs {
    match rank {
        Some(rank) => Programs { stages: vec![program.clone()], exceptions: BTreeMap::from([(rank, mutant)]) },
        None => Programs::uniform(mutant),
    }
}

/// A sample of the mutants that are equivalent by the checker. Each is run.
fn run_mutants(size: usize) {
    let world = mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap();
    let ranks = Ranks::sharded(Arc::new(world));
    let mut random = Random(7);
    let (mut swapped, mut dropped, mut rejected) = (0, 0, 0);
    for (stage, micro_batches, activation_checkpointing) in [
        (0, 1, ActivationCheckpointing::None),
        (1, 2, ActivationCheckpointing::Full),
        (2, 2, ActivationCheckpointing::None),
        (3, 1, ActivationCheckpointing::Full),
        (3, 3, ActivationCheckpointing::None),
    ] {
        let plain =
            Options::new(Sharding::stage(stage).unwrap(), Optimizer::AdamW(AdamW::default()), Schedule::constant(1e-2));
        let options = Options { activation_checkpointing, ..plain };
        let mut unchanged = trainer(&ranks, &options);
        let program = unchanged.program(micro_batches).unwrap();
        let expected = train(&mut unchanged, micro_batches as i64);
        let mut run = 0;
        while run < SAMPLE {
            // All ranks draw the same numbers.
            let change = random.change(program.instructions.len());
            let rank = (random.below(2) == 0).then(|| random.below(size));
            let mutant = changed(&program, change);
            if mutant.instructions == program.instructions {
                continue;
            }
            let mut trainer = trainer(&ranks, &options);
            let programs = on(rank, &program, mutant);
            if trainer.set_programs(&programs, micro_batches).is_err() {
                rejected += 1;
                continue;
            }
            match change {
                Change::Swap(..) => swapped += 1,
                Change::Drop(_) => dropped += 1,
            }
            run += 1;
            let found = train(&mut trainer, micro_batches as i64);
            assert!(found == expected, "stage {stage}, {micro_batches} micro-batches, rank {rank:?}: {change:?}");
        }
    }
    println!("same bits: {swapped} swaps, {dropped} dropped waits; {rejected} rejected");
    assert!(swapped > 20 && rejected > 20, "{swapped} swaps, {rejected} rejected");
}

#[test]
fn mutants_that_the_checker_accepts_give_the_same_bits() {
    ranks!(2, || run_mutants(2));
    ranks!(3, || run_mutants(3));
}
