//! Counting the tokens of a step, and checking that ranks agree on its micro-batches.

use shardwise_model::init::splitmix64;
use shardwise_model::{Batch, IGNORED};
use shardwise_torch::tch::Kind;

use crate::error::{Error, Result};
use crate::step::Trainer;

/// The numbers that each rank sends: its targets, its micro-batches, its signal, the fingerprint of its micro-batches, that of its part
/// of them, and whether they are divided as the ranks divide sequences.
const NUMBERS: usize = 6;

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
        let [whole, part] = if is_shared { fingerprints(micro_batches) } else { [0; 2] };
        let own = vec![counted, micro_batches.len() as i64, signal as i64, whole, part, i64::from(is_divided)];
        let (own, all) = world.all_gather("tokens", own, vec![0i64; NUMBERS * world.size()]).wait()?;
        let of_rank = |rank: usize| &all[NUMBERS * rank..NUMBERS * (rank + 1)];
        if let Some(rank) = (0..world.size()).find(|&rank| of_rank(rank)[1] != own[1] || of_rank(rank)[1] == 0) {
            return Err(Error::MicroBatches { step, rank, theirs: of_rank(rank)[1], ours: own[1] });
        }
        if let Some(rank) = (0..world.size()).find(|&rank| of_rank(rank)[5] == 0) {
            let found = if divided_by > 1 { "a whole micro-batch" } else { "a part of one" };
            let problem = format!("sequences are divided among {divided_by} ranks, but rank {rank} has {found}");
            return Err(Error::Options(format!(
                "step {step}: {problem}; divide micro-batches with `ContextGroups::split`"
            )));
        }
        // The first ranks that must have the same micro-batches, or the same part of them.
        let counterparts = |rank: usize| [same_samples, shared_by].map(|ranks| rank % per_stage - rank % ranks);
        let differs = |rank: usize| {
            let [whole, part] = counterparts(rank);
            let is_whole_same = of_rank(rank)[3] == of_rank(whole)[3];
            let is_part_same = of_rank(rank)[4] == of_rank(part)[4];
            (!is_whole_same).then_some(whole).or((!is_part_same).then_some(part))
        };
        if let Some((rank, other)) = (0..world.size()).find_map(|rank| Some((rank, differs(rank)?))) {
            let what = if rank < per_stage { "share their layers or sequences" } else { "hold stages of one pipeline" };
            let problem = format!("ranks {other} and {rank} {what}, but have different micro-batches");
            return Err(Error::Options(format!("step {step}: {problem}")));
        }
        let tokens: i64 = (0..per_stage).step_by(shared_by).map(|rank| of_rank(rank)[0]).sum();
        let largest = (0..world.size()).map(|rank| of_rank(rank)[2]).max().unwrap_or(0);
        Ok((tokens as u64, largest.max(0) as u64))
    }
}

/// Numbers that almost certainly differ between different micro-batches, and between different parts of them.
fn fingerprints(micro_batches: &[Batch]) -> [i64; 2] {
    let mut hashes = [0u64; 2];
    for batch in micro_batches {
        let part = batch.fingerprint();
        let whole = batch.context.as_ref().map_or(part, |context| context.whole_fingerprint());
        hashes = [splitmix64(hashes[0] ^ whole), splitmix64(hashes[1] ^ part)];
    }
    hashes.map(|hash| hash as i64)
}
