//! Counting the tokens of a step, and checking that ranks agree on its micro-batches.

use shardwise_model::init::splitmix64;
use shardwise_model::{Batch, IGNORED};
use shardwise_torch::tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::step::Trainer;

/// The numbers that each rank sends: its targets, its micro-batches, its signal, and the fingerprint of its micro-batches.
const NUMBERS: usize = 4;

impl Trainer {
    /// Counts the targets of all ranks that are not ignored. The same collective returns the largest `signal` of any rank. Fails
    /// unless all ranks have the same number of micro-batches, because they gather together, and unless the ranks that share a layer
    /// or hold the stages of a pipeline have the same ones.
    pub(crate) fn count_tokens(&self, step: u64, micro_batches: &[Batch], signal: u64) -> Result<(u64, u64)> {
        let (world, divided_by) = (&self.ranks.world, self.ranks.context.size());
        if let Some(batch) = micro_batches.iter().find(|batch| batch.context.is_some() != (divided_by > 1)) {
            let found = if batch.context.is_some() { "a part of one" } else { "whole" };
            let problem = format!("sequences are divided among {divided_by} ranks, but a micro-batch is {found}");
            return Err(Error::Options(format!("step {step}: {problem}; divide it with `ContextGroups::split`")));
        }
        let counted: i64 =
            micro_batches.iter().map(|batch| batch.targets.ne(IGNORED).sum(Kind::Int64).int64_value(&[])).sum();
        let (shared_by, per_stage) = (self.ranks.tensor.size(), self.ranks.stage.size());
        let is_shared = shared_by > 1 || per_stage < world.size();
        let fingerprint = if is_shared { fingerprint(micro_batches) } else { 0 };
        let own = vec![counted, micro_batches.len() as i64, signal as i64, fingerprint];
        let (own, all) = world.all_gather("tokens", own, vec![0i64; NUMBERS * world.size()]).wait()?;
        let of_rank = |rank: usize| &all[NUMBERS * rank..NUMBERS * (rank + 1)];
        if let Some(rank) = (0..world.size()).find(|&rank| of_rank(rank)[1] != own[1] || of_rank(rank)[1] == 0) {
            return Err(Error::MicroBatches { step, rank, theirs: of_rank(rank)[1], ours: own[1] });
        }
        // The first rank that must have the same micro-batches.
        let counterpart = |rank: usize| rank % per_stage - rank % shared_by;
        if let Some(rank) = (0..world.size()).find(|&rank| of_rank(rank)[3] != of_rank(counterpart(rank))[3]) {
            let other = counterpart(rank);
            let what = if rank < per_stage { "share their layers" } else { "hold stages of one pipeline" };
            let problem = format!("ranks {other} and {rank} {what}, but have different micro-batches");
            return Err(Error::Options(format!("step {step}: {problem}")));
        }
        let tokens: i64 = (0..per_stage).step_by(shared_by).map(|rank| of_rank(rank)[0]).sum();
        let largest = (0..world.size()).map(|rank| of_rank(rank)[2]).max().unwrap_or(0);
        Ok((tokens as u64, largest.max(0) as u64))
    }
}

/// A number that almost certainly differs between different micro-batches.
fn fingerprint(micro_batches: &[Batch]) -> i64 {
    let of_batch = |batch: &Batch| {
        let weights = |len: usize| (0..len as i64).map(|index| (index % 8191 + 1) as f64).collect::<Vec<_>>();
        let of_tensor = |tensor: &Tensor| {
            let elements = tensor.to_kind(Kind::Double).reshape(-1);
            let weights = Tensor::from_slice(&weights(elements.numel())).to_device(tensor.device());
            elements.dot(&weights).double_value(&[]).to_bits()
        };
        splitmix64(of_tensor(&batch.inputs)) ^ of_tensor(&batch.targets)
    };
    micro_batches.iter().fold(0, |hash, batch| splitmix64(hash ^ of_batch(batch))) as i64
}
