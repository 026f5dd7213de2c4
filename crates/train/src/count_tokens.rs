//! Counting the tokens of a step, and checking that ranks agree on its micro-batches.

use shardwise_model::init::splitmix64;
use shardwise_model::{Batch, IGNORED};
use shardwise_torch::tch::Kind;

use crate::error::{Error, Result};
use crate::step::Trainer;

/// The numbers that each rank sends: its targets, its micro-batches, its signal, the fingerprint of its micro-batches, and whether they
/// are divided as the ranks divide sequences.
const NUMBERS: usize = 5;

impl Trainer {
    /// Counts the targets of all ranks that are not ignored. The same collective returns the largest `signal` of any rank. Fails
    /// unless all ranks have the same number of micro-batches, because they gather together; unless the ranks that share a layer, divide
    /// sequences or hold the stages of a pipeline have the same ones; and unless micro-batches are divided as the ranks divide sequences.
    pub(crate) fn count_tokens(&self, step: u64, micro_batches: &[Batch], signal: u64) -> Result<(u64, u64)> {
        let (world, divided_by) = (&self.ranks.world, self.ranks.context.size());
        let is_divided = micro_batches.iter().all(|batch| batch.context.is_some() == (divided_by > 1));
        let counted: i64 =
            micro_batches.iter().map(|batch| batch.targets.ne(IGNORED).sum(Kind::Int64).int64_value(&[])).sum();
        let (shared_by, per_stage) = (self.ranks.tensor.size(), self.ranks.stage.size());
        let same_samples = self.ranks.ranks_per_sample();
        let is_shared = same_samples > 1 || per_stage < world.size();
        let fingerprint = if is_shared { fingerprint(micro_batches) } else { 0 };
        let own = vec![counted, micro_batches.len() as i64, signal as i64, fingerprint, i64::from(is_divided)];
        let (own, all) = world.all_gather("tokens", own, vec![0i64; NUMBERS * world.size()]).wait()?;
        let of_rank = |rank: usize| &all[NUMBERS * rank..NUMBERS * (rank + 1)];
        if let Some(rank) = (0..world.size()).find(|&rank| of_rank(rank)[1] != own[1] || of_rank(rank)[1] == 0) {
            return Err(Error::MicroBatches { step, rank, theirs: of_rank(rank)[1], ours: own[1] });
        }
        if let Some(rank) = (0..world.size()).find(|&rank| of_rank(rank)[4] == 0) {
            let found = if divided_by > 1 { "a whole micro-batch" } else { "a part of one" };
            let problem = format!("sequences are divided among {divided_by} ranks, but rank {rank} has {found}");
            return Err(Error::Options(format!(
                "step {step}: {problem}; divide micro-batches with `ContextGroups::split`"
            )));
        }
        // The first rank that must have the same micro-batches, or other parts of them.
        let counterpart = |rank: usize| rank % per_stage - rank % same_samples;
        if let Some(rank) = (0..world.size()).find(|&rank| of_rank(rank)[3] != of_rank(counterpart(rank))[3]) {
            let other = counterpart(rank);
            let what = if rank < per_stage { "share their layers or sequences" } else { "hold stages of one pipeline" };
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
    let of_batch =
        |batch: &Batch| batch.context.as_ref().map_or_else(|| batch.fingerprint(), |part| part.whole_fingerprint());
    micro_batches.iter().fold(0, |hash, batch| splitmix64(hash ^ of_batch(batch))) as i64
}
