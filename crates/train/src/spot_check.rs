//! Spot checks for silent data corruption: in a checked step, two ranks compute the same gradients, which are then compared.
//!
//! A faulty processor reports no error, and a sum over all ranks hides whose contribution was wrong. So in a checked step every
//! rank also computes the gradients of another rank's micro-batches, and keeps only a fingerprint of each unit's. If the two
//! fingerprints differ, a third rank computes the gradients as well, and the error names the odd one out before the update.
//!
//! This finds differences between ranks, not faults that all ranks share. It needs ranks whose results are bitwise identical: the
//! same libraries on the same kind of processor with the same number of threads. Otherwise all three fingerprints differ, and the
//! error says so.

use std::fmt;

use shardwise_model::Batch;
use shardwise_torch::tch::{Kind, Tensor};
use shardwise_zero::ShardedUnit;

use crate::host;
use crate::step::Grads;
use crate::{Error, Report, Result, Trainer};

/// Returns any rank's micro-batches of the current step.
pub type RankBatches<'a> = dyn Fn(usize) -> Result<Vec<Batch>> + 'a;

/// A failed spot check: the ranks whose gradients differ although they should be identical.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpotCheckFailure {
    /// The first unit, in the order of the backward pass, whose gradients differ.
    pub unit: String,
    /// The ranks that computed them from the same samples.
    pub ranks: Vec<usize>,
    /// The rank among them that was wrong, if that can be determined.
    pub wrong: Option<usize>,
    /// The wrong rank's host, or else the hosts of all `ranks`.
    pub hosts: Vec<String>,
}

impl fmt::Display for SpotCheckFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SpotCheckFailure { unit, ranks, wrong, hosts } = self;
        let hosts = if hosts.len() == 1 { format!("host {}", hosts[0]) } else { format!("hosts {}", join_list(hosts)) };
        let Some(wrong) = wrong else {
            return write!(
                f,
                "ranks {} compute different gradients of unit {unit} from the same samples: either one of them computes wrongly, \
                 or they have different processors, libraries or numbers of threads ({hosts})",
                join_list(ranks),
            );
        };
        write!(f, "rank {wrong}'s gradients of unit {unit} differ from what ")?;
        let others: Vec<usize> = ranks.iter().copied().filter(|rank| rank != wrong).collect();
        match &others[..] {
            [] => write!(f, "it computes")?,
            [other] => write!(f, "rank {other} computes")?,
            others => write!(f, "ranks {} compute", join_list(others))?,
        }
        write!(f, " from the same samples: its hardware may be faulty ({hosts})")
    }
}

fn join_list<T: fmt::Display>(parts: &[T]) -> String {
    let parts: Vec<String> = parts.iter().map(T::to_string).collect();
    match &parts[..] {
        [most @ .., last] if !most.is_empty() => format!("{} and {last}", most.join(", ")),
        parts => parts.concat(),
    }
}

/// One number per unit: the sum of the bit patterns of its gradients as integers, over all tensors and micro-batches, so that the
/// order does not matter. A unit's gradients are those that its backward pass computes, including that of a tied parameter.
type Fingerprints = Vec<i64>;

/// The fingerprints of a checked step, and an injected fault to test the check with.
#[derive(Default)]
pub(crate) struct SpotCheck {
    own: Option<Fingerprints>,
    bit_flip: Option<BitFlip>,
}

struct BitFlip {
    step: u64,
    unit: usize,
}

impl Trainer {
    /// Trains one step in which every rank also computes another rank's gradients. `rank_batches` returns any rank's
    /// micro-batches of this step; `micro_batches` are this rank's.
    pub fn step_with_spot_check(&mut self, micro_batches: &[Batch], rank_batches: &RankBatches<'_>) -> Result<Report> {
        self.spot.own = Some(vec![0; self.shards.len()]);
        let report = self.step_with(micro_batches, Some(rank_batches));
        self.spot.own = None;
        report
    }

    /// Injects a fault: flips one bit of a unit's gradients in this step, to test spot checks.
    pub fn flip_bit(&mut self, step: u64, unit: &str) -> Result<()> {
        let index = self.shards.iter().position(|shard| shard.name() == unit);
        let unit = index.ok_or_else(|| Error::Options(format!("the model has no unit {unit} to flip a bit in")))?;
        self.spot.bit_flip = Some(BitFlip { step, unit });
        Ok(())
    }

    /// Fingerprints a gradient in a checked step, after injecting a bit flip if one is due.
    pub(crate) fn observe_gradient(&mut self, unit: usize, grad: &Tensor) -> Result<()> {
        let step = self.steps;
        if self.spot.bit_flip.take_if(|bit_flip| (bit_flip.step, bit_flip.unit) == (step, unit)).is_some() {
            flip(grad).map_err(|error| self.failed(unit, error))?;
        }
        let Some(own) = &mut self.spot.own else { return Ok(()) };
        match fingerprint(grad) {
            Ok(fingerprint) => own[unit] = own[unit].wrapping_add(fingerprint),
            Err(error) => return Err(self.failed(unit, error)),
        }
        Ok(())
    }

    /// Compares this step's gradients with what other ranks compute. If they differ, discards them and fails.
    pub(crate) fn spot_check(&mut self, rank_batches: &RankBatches<'_>, weight: &Tensor) -> Result<()> {
        let own = self.spot.own.take().expect("a checked step records its fingerprints");
        let (rank, ranks) = (self.ranks.world.rank(), self.ranks.world.size());
        let second = self.exchange_fingerprints(1, rank_batches, weight)?;
        let differs = (0..own.len()).rev().find(|&unit| own[unit] != second[unit]);
        if self.first_on_any_rank(differs)?.is_none() {
            return Ok(());
        }
        // With two ranks there is no third: each computes both again, and the one that contradicts itself is wrong.
        let mut opinions = vec![(rank, own), ((rank + 1) % ranks, second)];
        for shift in 2..if ranks == 2 { 4 } else { 3 } {
            opinions.push(((rank + shift) % ranks, self.exchange_fingerprints(shift, rank_batches, weight)?));
        }
        self.shards.iter_mut().for_each(ShardedUnit::discard_gradients);
        let verdict = differs.map(|unit| {
            let of_unit: Vec<(usize, i64)> = opinions.iter().map(|(by, all)| (*by, all[unit])).collect();
            (unit, find_wrong_rank(&of_unit))
        });
        Err(Error::SpotCheck { step: self.steps, failure: Box::new(self.agree_on_failure(verdict)?) })
    }

    /// Computes the fingerprints of the rank that is `shift` before this one, and receives this rank's fingerprints from the rank
    /// that is `shift` after it. All ranks call it together.
    fn exchange_fingerprints(
        &mut self,
        shift: usize,
        rank_batches: &RankBatches<'_>,
        weight: &Tensor,
    ) -> Result<Fingerprints> {
        let (rank, ranks) = (self.ranks.world.rank(), self.ranks.world.size());
        let (whose, by) = ((rank + shift * (ranks - 1)) % ranks, (rank + shift) % ranks);
        let computed = self.compute_fingerprints(&rank_batches(whose)?, weight)?;
        if whose == rank {
            return Ok(computed);
        }
        let (world, label, units) = (&self.ranks.world, "spot check", self.shards.len());
        let sent = world.send(label, whose, computed);
        let received = world.receive(label, by, vec![0i64; units]).wait()?;
        sent.wait()?;
        Ok(received)
    }

    /// Fingerprints the gradients of micro-batches: a step's forward and backward passes, without accumulation and reduction.
    fn compute_fingerprints(&mut self, micro_batches: &[Batch], weight: &Tensor) -> Result<Fingerprints> {
        self.spot.own = Some(vec![0; self.shards.len()]);
        for batch in micro_batches {
            let batch = batch.to_device(self.options.device);
            let passes = self.forward(&batch)?;
            self.backward(&batch, passes, weight, Grads::Discard)?;
        }
        Ok(self.spot.own.take().unwrap_or_default())
    }

    /// Chooses one verdict for all ranks, preferably one that names a rank. A verdict is a unit and a rank; each rank may have
    /// one on its own samples.
    fn agree_on_failure(&self, verdict: Option<(usize, Option<usize>)>) -> Result<SpotCheckFailure> {
        let world = &self.ranks.world;
        let vague = verdict.map(|(_, wrong)| usize::from(wrong.is_none()));
        let (_, first) = self.first_on_any_rank(vague)?.expect("some rank's gradients differ, so it has a verdict");
        let (unit, wrong) = verdict.unwrap_or((0, None));
        let verdict = vec![unit as i64, wrong.map_or(-1, |rank| rank as i64)];
        let verdict = world.broadcast("spot check's verdict", first, verdict).wait()?;
        let (unit, wrong) = (verdict[0] as usize, usize::try_from(verdict[1]).ok());
        let ranks: Vec<usize> = (0..world.size().min(3)).map(|shift| (first + shift) % world.size()).collect();
        let hosts = wrong.map_or(ranks.clone(), |wrong| vec![wrong]);
        let hosts = hosts.into_iter().map(|rank| self.host_of(rank)).collect::<Result<_>>()?;
        Ok(SpotCheckFailure { unit: self.shards[unit].name().to_string(), ranks, wrong, hosts })
    }

    /// The name of a rank's host, which that rank broadcasts. All ranks call it together.
    fn host_of(&self, rank: usize) -> Result<String> {
        let mut name = host::name().into_bytes();
        name.resize(HOST_BYTES, 0);
        let name = self.ranks.world.broadcast("spot check's host", rank, name).wait()?;
        Ok(String::from_utf8_lossy(&name).trim_end_matches('\0').to_string())
    }

    fn failed(&self, unit: usize, error: shardwise_torch::Error) -> Error {
        Error::Backward { unit: self.shards[unit].name().to_string(), error }
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

/// A tensor's elements, reinterpreted as integers of the same size.
fn bits(tensor: &Tensor) -> shardwise_torch::Result<Tensor> {
    let kind = match tensor.f_kind()? {
        Kind::Float => Kind::Int,
        Kind::BFloat16 | Kind::Half => Kind::Int16,
        other => return Err(shardwise_torch::Error::UnsupportedKind(other)),
    };
    Ok(tensor.f_detach()?.f_view_dtype(kind)?)
}

fn fingerprint(tensor: &Tensor) -> shardwise_torch::Result<i64> {
    Ok(bits(tensor)?.f_sum(Kind::Int64)?.f_int64_value(&[])?)
}

/// Flips a bit of the first element.
fn flip(tensor: &Tensor) -> shardwise_torch::Result<()> {
    let mut first = bits(tensor)?;
    for _ in 0..first.dim() {
        first = first.f_select(0, 0)?;
    }
    first.f_bitwise_xor_(1 << 6).map(drop)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use shardwise_torch::tch::Device;

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

    #[test]
    fn a_failure_names_ranks_unit_and_host() {
        let hosts = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        let failure = SpotCheckFailure {
            unit: "block.3".to_string(),
            ranks: vec![2, 3, 0],
            wrong: Some(2),
            hosts: hosts(&["n7"]),
        };
        assert_eq!(
            failure.to_string(),
            "rank 2's gradients of unit block.3 differ from what ranks 3 and 0 compute from the same samples: its hardware may \
             be faulty (host n7)"
        );
        let alone = SpotCheckFailure { ranks: vec![0], wrong: Some(0), ..failure.clone() };
        assert!(alone.to_string().starts_with("rank 0's gradients of unit block.3 differ from what it computes from"));
        let two = SpotCheckFailure { ranks: vec![0, 1], wrong: Some(1), ..failure.clone() };
        assert!(two.to_string().contains("differ from what rank 0 computes from the same"), "{two}");
        let vague = SpotCheckFailure { wrong: None, hosts: hosts(&["n7", "n8", "n1"]), ..failure };
        let text = vague.to_string();
        assert!(text.starts_with("ranks 2, 3 and 0 compute different gradients of unit block.3"), "{text}");
        assert!(text.ends_with("(hosts n7, n8 and n1)"), "{text}");
    }

    #[test]
    fn fingerprints_do_not_depend_on_the_order_and_see_one_bit() {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            let numbers = (Tensor::arange(12, (Kind::Float, Device::Cpu)).view([3, 4]) - 5.5).to_kind(kind);
            let before = fingerprint(&numbers).unwrap();
            assert_eq!(fingerprint(&numbers.tr().flip([1])).unwrap(), before);
            flip(&numbers).unwrap();
            assert_ne!(fingerprint(&numbers).unwrap(), before);
            assert_eq!((&numbers + 5.5).argmin(None, false).int64_value(&[]), 0, "a small fault");
        }
    }
}
