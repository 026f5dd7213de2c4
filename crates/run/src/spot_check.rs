//! Spot checks for silent data corruption: in a checked step, two ranks compute the same gradients, which are then compared.
//!
//! A faulty processor reports no error, and a sum over all ranks hides whose contribution was wrong. So in a checked step every
//! rank also computes the gradients of another rank's micro-batches, and keeps only a fingerprint of each unit's. If the two
//! fingerprints differ, a third rank computes the gradients as well, and the error names the odd one out before the update.
//!
//! This finds differences between ranks, not faults that all ranks share. It needs ranks whose results are bitwise identical: the
//! same libraries on the same kind of processor with the same number of threads. Otherwise all three fingerprints differ, and the
//! error says so.

use shardwise_model::Batch;
use shardwise_train::{Gradients, Trainer};

use crate::error::{Error, Result};
use crate::fingerprint::Fingerprints;
use crate::host;
use crate::run_probe::RunProbe;
use crate::spot_check_failure::SpotCheckFailure;

/// Returns the micro-batches of the current step of any of the ranks that read different samples, by their index among those.
pub type RankBatches<'a> = dyn Fn(usize) -> Result<Vec<Batch>> + 'a;

/// Computes the gradients of a step, in which every rank also computes another rank's gradients. `rank_batches` returns any rank's
/// micro-batches of this step; `micro_batches` are this rank's. If gradients differ, discards them and fails. `probe` must be the
/// trainer's. All ranks call it together.
pub fn compute_checked_gradients(
    trainer: &mut Trainer,
    probe: &RunProbe,
    micro_batches: &[Batch],
    rank_batches: &RankBatches<'_>,
) -> Result<Gradients> {
    let units = trainer.model().units().len();
    probe.record_fingerprints(units);
    let gradients = trainer.compute_gradients(micro_batches);
    let own = probe.take_fingerprints();
    let gradients = gradients?;
    let mut check = SpotCheck { trainer, probe, gradients: &gradients, rank_batches, units };
    let compared = check.compare(own);
    if let Err(error) = compared {
        if !matches!(error, Error::SpotCheck { .. }) {
            trainer.mark_broken(&error);
        }
        return Err(error);
    }
    Ok(gradients)
}

/// A spot check in progress.
struct SpotCheck<'a> {
    trainer: &'a mut Trainer,
    probe: &'a RunProbe,
    gradients: &'a Gradients,
    rank_batches: &'a RankBatches<'a>,
    units: usize,
}

impl SpotCheck<'_> {
    /// The index of a reader, and the number of groups of readers: those that hold different experts compute together.
    fn groups(&self) -> (usize, usize) {
        let ranks = self.trainer.ranks();
        (ranks.data_rank(), ranks.data_size() / ranks.experts.size())
    }

    /// The reader that has the same experts `groups` groups after a reader.
    fn reader_after(&self, reader: usize, groups: usize) -> usize {
        let ranks = self.trainer.ranks();
        (reader + groups * ranks.experts.size()) % ranks.data_size()
    }

    /// Compares this step's gradients with what other ranks compute. If they differ, discards them and fails.
    fn compare(&mut self, own: Fingerprints) -> Result<()> {
        let (reader, groups) = self.groups();
        let second = self.exchange_fingerprints(1)?;
        let differs = (0..own.len()).rev().find(|&unit| own[unit] != second[unit]);
        if self.trainer.ranks().first_on_any_rank(differs)?.is_none() {
            return Ok(());
        }
        // With two ranks there is no third: each computes both again, and the one that contradicts itself is wrong.
        let mut opinions = vec![(self.rank_of(reader), own), (self.rank_of(self.reader_after(reader, 1)), second)];
        for shift in 2..if groups == 2 { 4 } else { 3 } {
            opinions.push((self.rank_of(self.reader_after(reader, shift)), self.exchange_fingerprints(shift)?));
        }
        self.trainer.discard_gradients();
        let verdict = differs.map(|unit| {
            let of_unit: Vec<(usize, i64)> = opinions.iter().map(|(by, all)| (*by, all[unit])).collect();
            (unit, find_wrong_rank(&of_unit))
        });
        Err(Error::SpotCheck { step: self.gradients.step, failure: Box::new(self.agree_on_failure(verdict)?) })
    }

    /// Computes the fingerprints of the rank that is `shift` groups before this one, and receives this rank's fingerprints from the rank
    /// that is `shift` groups after it. All ranks call it together.
    fn exchange_fingerprints(&mut self, shift: usize) -> Result<Fingerprints> {
        let world = self.trainer.ranks().world.clone();
        // The ranks that share layers compute together, for another such group of ranks.
        let (reader, groups) = self.groups();
        let (whose, by) = (self.reader_after(reader, shift * (groups - 1)), self.reader_after(reader, shift));
        let micro_batches = (self.rank_batches)(whose)?;
        self.probe.record_fingerprints(self.units);
        let replayed = self.trainer.replay(&micro_batches, self.gradients);
        let computed = self.probe.take_fingerprints();
        replayed?;
        if whose == reader {
            return Ok(computed);
        }
        let label = "spot check";
        let sent = world.send(label, self.rank_of(whose), computed);
        let received = world.receive(label, self.rank_of(by), vec![0i64; self.units]).wait()?;
        sent.wait()?;
        Ok(received)
    }

    /// The rank that reads the samples of `reader`, and computes with the same parameters as this rank.
    fn rank_of(&self, reader: usize) -> usize {
        self.trainer.ranks().counterpart(reader)
    }

    /// Chooses one verdict for all ranks, preferably one that names a rank. A verdict is a unit and a rank; each rank may have
    /// one on its own samples.
    fn agree_on_failure(&self, verdict: Option<(usize, Option<usize>)>) -> Result<SpotCheckFailure> {
        let ranks = self.trainer.ranks();
        let world = &ranks.world;
        let vague = verdict.map(|(_, wrong)| usize::from(wrong.is_none()));
        let (_, first) = ranks.first_on_any_rank(vague)?.expect("some rank's gradients differ, so it has a verdict");
        let (unit, wrong) = verdict.unwrap_or((0, None));
        let verdict = vec![unit as i64, wrong.map_or(-1, |rank| rank as i64)];
        let verdict = world.broadcast("spot check's verdict", first, verdict).wait()?;
        let (unit, wrong) = (verdict[0] as usize, usize::try_from(verdict[1]).ok());
        // A wrong number also changes what the ranks compute that share the layer, its experts or its sequences, or hold other stages of the
        // pipeline.
        let (experts, context) = (ranks.experts.size(), ranks.context.size());
        let is_alone = [ranks.tensor.size(), experts, context, ranks.pipeline.size()] == [1; 4];
        let wrong = wrong.filter(|_| is_alone);
        // The rank with the verdict and those that computed the same gradients, which are all on its stage; with experts on different ranks,
        // all ranks that exchanged tokens with one of them.
        let (groups, per_stage) = (ranks.data_size() / experts, ranks.stage.size());
        let (stage, place, per_group) = (first - first % per_stage, first % per_stage, per_stage / groups);
        let of_shift = |shift: usize| (place + shift * per_group) % per_stage;
        let of_group = |place: usize| {
            let others = (0..experts).map(|expert| place + expert * per_group / experts);
            others.map(|other| place - place % per_group + other % per_group).collect::<Vec<_>>()
        };
        let ranks: Vec<usize> =
            (0..groups.min(3)).flat_map(|shift| of_group(of_shift(shift))).map(|r| stage + r).collect();
        let hosts = wrong.map_or(ranks.clone(), |wrong| vec![wrong]);
        let hosts = hosts.into_iter().map(|rank| self.host_of(rank)).collect::<Result<_>>()?;
        let unit = self.trainer.model().units()[unit].name().to_string();
        Ok(SpotCheckFailure { unit, ranks, wrong, hosts })
    }

    /// The name of a rank's host, which that rank broadcasts. All ranks call it together.
    fn host_of(&self, rank: usize) -> Result<String> {
        let mut name = host::name().into_bytes();
        name.resize(HOST_BYTES, 0);
        let name = self.trainer.ranks().world.broadcast("spot check's host", rank, name).wait()?;
        Ok(String::from_utf8_lossy(&name).trim_end_matches('\0').to_string())
    }
}

/// The maximum length of a host name.
const HOST_BYTES: usize = 64;

/// Finds the wrong rank from `(rank, fingerprint)` pairs for the same gradients: the only one that contradicts itself, or the
/// only one that differs from others that agree.
fn find_wrong_rank(opinions: &[(usize, i64)]) -> Option<usize> {
    let mut ranks: Vec<usize> = opinions.iter().map(|(rank, _)| *rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let alike = |among: &dyn Fn(usize) -> bool| {
        let mut values = opinions.iter().filter(|(rank, _)| among(*rank)).map(|(_, value)| value);
        let first = values.next();
        values.all(|value| Some(value) == first)
    };
    let only = |suspects: Vec<usize>| if let [only] = suspects[..] { Some(only) } else { None };
    let contradicts_itself = |rank: &usize| !alike(&|by| by == *rank);
    let odd_one_out = |rank: &usize| ranks.len() > 2 && alike(&|by| by != *rank);
    only(ranks.iter().copied().filter(contradicts_itself).collect())
        .or_else(|| only(ranks.iter().copied().filter(odd_one_out).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wrong_rank_is_found() {
        assert_eq!(find_wrong_rank(&[(2, 5), (3, 7), (0, 7)]), Some(2));
        assert_eq!(find_wrong_rank(&[(2, 7), (3, 5), (0, 7)]), Some(3));
        assert_eq!(find_wrong_rank(&[(2, 5), (3, 7), (0, 6)]), None);
        // Two ranks, each computing twice.
        assert_eq!(find_wrong_rank(&[(0, 5), (1, 7), (0, 7), (1, 7)]), Some(0));
        assert_eq!(find_wrong_rank(&[(0, 7), (1, 5), (0, 7), (1, 7)]), Some(1));
        assert_eq!(find_wrong_rank(&[(0, 5), (1, 7), (0, 5), (1, 7)]), None);
        assert_eq!(find_wrong_rank(&[(0, 5), (1, 7), (0, 6), (1, 8)]), None);
        assert_eq!(find_wrong_rank(&[(0, 5), (0, 7), (0, 7)]), Some(0));
    }
}
