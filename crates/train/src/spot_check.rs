//! Spot checks: a step whose gradients are computed by two ranks each, and compared.
//!
//! A processor that computes wrongly says nothing, and a sum over all ranks hides whose part was wrong. So in such a step every
//! rank computes the gradients of another's micro-batches once more, which are thrown away but for a fingerprint of each unit's.
//! Where the two differ, a third rank computes them as well, and the odd one out is named before anything is updated.
//!
//! It finds what differs between ranks, and no fault that they share. It relies on ranks that compute alike: the same libraries on
//! the same kind of processor with as many threads give the same bits. Where they do not, three opinions are three different
//! ones, and that is what is said.

use std::fmt;

use shardwise_model::Batch;
use shardwise_torch::tch::{Kind, Tensor};
use shardwise_zero::ShardedUnit;

use crate::host;
use crate::step::Then;
use crate::{Error, Report, Result, Trainer};

/// The micro-batches that a rank of the world has in this step.
pub type MicroBatchesOf<'a> = dyn Fn(usize) -> Result<Vec<Batch>> + 'a;

/// What a spot check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The first unit, in the order of the backward pass, whose gradients differ.
    pub unit: String,
    /// The ranks that computed them from the same samples, each once.
    pub ranks: Vec<usize>,
    /// The one of them that was wrong, if that can be told.
    pub wrong: Option<usize>,
    /// Where it is; or else where they all are, in their order.
    pub hosts: Vec<String>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { unit, ranks, wrong, hosts } = self;
        let hosts = if hosts.len() == 1 { format!("host {}", hosts[0]) } else { format!("hosts {}", listed(hosts)) };
        let Some(wrong) = wrong else {
            return write!(
                f,
                "ranks {} compute different gradients of unit {unit} from the same samples: the arithmetic of one of them is not \
                 to be trusted, or they do not compute alike, with other processors, libraries or numbers of threads ({hosts})",
                listed(ranks),
            );
        };
        write!(f, "rank {wrong}'s gradients of unit {unit} differ from what ")?;
        let others: Vec<usize> = ranks.iter().copied().filter(|rank| rank != wrong).collect();
        match &others[..] {
            [] => write!(f, "it computes")?,
            [other] => write!(f, "rank {other} computes")?,
            others => write!(f, "ranks {} compute", listed(others))?,
        }
        write!(f, " from the same samples: its arithmetic is not to be trusted ({hosts})")
    }
}

fn listed<T: fmt::Display>(parts: &[T]) -> String {
    let parts: Vec<String> = parts.iter().map(T::to_string).collect();
    match &parts[..] {
        [most @ .., last] if !most.is_empty() => format!("{} and {last}", most.join(", ")),
        parts => parts.concat(),
    }
}

/// A number for each unit's gradients: the sum of their bits as integers, over all tensors and micro-batches, so that the order
/// does not matter. A unit's are those that its backward pass has made, of whichever unit's parameters.
type Fingerprints = Vec<i64>;

/// What a trainer notes of its own gradients in a step that is checked; and a fault to try that with.
#[derive(Default)]
pub(crate) struct Spot {
    own: Option<Fingerprints>,
    flipped: Option<Flipped>,
}

/// A bit that is to be wrong.
struct Flipped {
    step: u64,
    unit: usize,
}

impl Trainer {
    /// One step, in which every rank computes another one's gradients as well. `of_rank` has the micro-batches of any rank in
    /// this step; its own are `micro_batches`.
    pub fn step_checked(&mut self, micro_batches: &[Batch], of_rank: &MicroBatchesOf<'_>) -> Result<Report> {
        self.spot.own = Some(vec![0; self.shards.len()]);
        let report = self.stepped(micro_batches, Some(of_rank));
        self.spot.own = None;
        report
    }

    /// Makes this rank compute a bit of a unit's gradients wrongly in a step, once: for trying spot checks.
    pub fn flip_bit(&mut self, step: u64, unit: &str) -> Result<()> {
        let place = self.shards.iter().position(|shard| shard.name() == unit);
        let unit = place.ok_or_else(|| Error::Options(format!("there is no unit {unit} to flip a bit in")))?;
        self.spot.flipped = Some(Flipped { step, unit });
        Ok(())
    }

    /// Looks at a gradient that a unit's backward pass has made, before it is added to the others.
    pub(crate) fn see(&mut self, unit: usize, grad: &Tensor) -> Result<()> {
        let step = self.steps;
        if self.spot.flipped.take_if(|flipped| (flipped.step, flipped.unit) == (step, unit)).is_some() {
            flip(grad).map_err(|error| self.failed(unit, error))?;
        }
        let Some(own) = &mut self.spot.own else { return Ok(()) };
        match fingerprint(grad) {
            Ok(print) => own[unit] = own[unit].wrapping_add(print),
            Err(error) => return Err(self.failed(unit, error)),
        }
        Ok(())
    }

    /// Compares this step's gradients with what other ranks compute. Where they differ, it is an error, and they are not used.
    pub(crate) fn spot_check(&mut self, of_rank: &MicroBatchesOf<'_>, weight: &Tensor) -> Result<()> {
        let own = self.spot.own.take().expect("a step that is checked notes its own fingerprints");
        let (rank, ranks) = (self.ranks.world.rank(), self.ranks.world.size());
        let second = self.opinion(1, of_rank, weight)?;
        let differs = (0..own.len()).rev().find(|&unit| own[unit] != second[unit]);
        if self.first_of_all(differs)?.is_none() {
            return Ok(());
        }
        // Two ranks have nobody else to ask: each computes both once more, and who contradicts itself was wrong.
        let mut opinions = vec![(rank, own), ((rank + 1) % ranks, second)];
        for shift in 2..if ranks == 2 { 4 } else { 3 } {
            opinions.push(((rank + shift) % ranks, self.opinion(shift, of_rank, weight)?));
        }
        self.shards.iter_mut().for_each(ShardedUnit::discard_gradients);
        let verdict = differs.map(|unit| {
            let of_unit: Vec<(usize, i64)> = opinions.iter().map(|(by, prints)| (*by, prints[unit])).collect();
            (unit, wrong(&of_unit))
        });
        Err(Error::SpotCheck { step: self.steps, finding: Box::new(self.agreed_finding(verdict)?) })
    }

    /// What the rank `shift` places further on computes of this rank's micro-batches. All ranks call it together.
    fn opinion(&mut self, shift: usize, of_rank: &MicroBatchesOf<'_>, weight: &Tensor) -> Result<Fingerprints> {
        let (rank, ranks) = (self.ranks.world.rank(), self.ranks.world.size());
        let (whose, by) = ((rank + shift * (ranks - 1)) % ranks, (rank + shift) % ranks);
        let computed = self.computed(&of_rank(whose)?, weight)?;
        if whose == rank {
            return Ok(computed);
        }
        let (world, label, units) = (&self.ranks.world, "spot check", self.shards.len());
        let sent = world.send(label, whose, computed);
        let received = world.receive(label, by, vec![0i64; units]).wait()?;
        sent.wait()?;
        Ok(received)
    }

    /// The fingerprints of what micro-batches would teach: the passes of a step, with nothing added up and nothing reduced.
    fn computed(&mut self, micro_batches: &[Batch], weight: &Tensor) -> Result<Fingerprints> {
        self.spot.own = Some(vec![0; self.shards.len()]);
        for batch in micro_batches {
            let batch = batch.to_device(self.options.device);
            let passed = self.forward(&batch)?;
            self.backward(&batch, passed, weight, Then::Forget)?;
        }
        Ok(self.spot.own.take().unwrap_or_default())
    }

    /// Of all ranks' verdicts on their own samples, each a unit and a rank, one that names a rank, if there is such a one.
    fn agreed_finding(&self, verdict: Option<(usize, Option<usize>)>) -> Result<Finding> {
        let world = &self.ranks.world;
        let vague = verdict.map(|(_, wrong)| usize::from(wrong.is_none()));
        let (_, first) = self.first_of_all(vague)?.expect("some rank's gradients differ, so it has a verdict");
        let (unit, wrong) = verdict.unwrap_or((0, None));
        let said = vec![unit as i64, wrong.map_or(-1, |rank| rank as i64)];
        let said = world.broadcast("spot check's verdict", first, said).wait()?;
        let (unit, wrong) = (said[0] as usize, usize::try_from(said[1]).ok());
        let ranks: Vec<usize> = (0..world.size().min(3)).map(|shift| (first + shift) % world.size()).collect();
        let hosts = wrong.map_or(ranks.clone(), |wrong| vec![wrong]);
        let hosts = hosts.into_iter().map(|rank| self.host_of(rank)).collect::<Result<_>>()?;
        Ok(Finding { unit: self.shards[unit].name().to_string(), ranks, wrong, hosts })
    }

    /// The name of a rank's host, as all ranks learn it from that one.
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

/// As long as a host's name can be.
const HOST_BYTES: usize = 64;

/// Who was wrong, if opinions on the same thing, each with the rank whose it is, show it: a rank that contradicts itself; or one
/// that contradicts two others, which agree.
fn wrong(opinions: &[(usize, i64)]) -> Option<usize> {
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

/// A tensor's elements as integers of their size.
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
    fn the_odd_one_out_is_found() {
        assert_eq!(wrong(&[(2, 5), (3, 7), (0, 7)]), Some(2));
        assert_eq!(wrong(&[(2, 7), (3, 5), (0, 7)]), Some(3));
        assert_eq!(wrong(&[(2, 5), (3, 7), (0, 6)]), None);
        // Two ranks, each twice.
        assert_eq!(wrong(&[(0, 5), (1, 7), (0, 7), (1, 7)]), Some(0));
        assert_eq!(wrong(&[(0, 7), (1, 5), (0, 7), (1, 7)]), Some(1));
        assert_eq!(wrong(&[(0, 5), (1, 7), (0, 5), (1, 7)]), None);
        assert_eq!(wrong(&[(0, 5), (1, 7), (0, 6), (1, 8)]), None);
        assert_eq!(wrong(&[(0, 5), (0, 7), (0, 7)]), Some(0));
    }

    #[test]
    fn a_finding_says_who_where_and_what() {
        let hosts = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        let finding =
            Finding { unit: "block.3".to_string(), ranks: vec![2, 3, 0], wrong: Some(2), hosts: hosts(&["n7"]) };
        assert_eq!(
            finding.to_string(),
            "rank 2's gradients of unit block.3 differ from what ranks 3 and 0 compute from the same samples: its arithmetic is \
             not to be trusted (host n7)"
        );
        let alone = Finding { ranks: vec![0], wrong: Some(0), ..finding.clone() };
        assert!(alone.to_string().starts_with("rank 0's gradients of unit block.3 differ from what it computes from"));
        let two = Finding { ranks: vec![0, 1], wrong: Some(1), ..finding.clone() };
        assert!(two.to_string().contains("differ from what rank 0 computes from the same"), "{two}");
        let vague = Finding { wrong: None, hosts: hosts(&["n7", "n8", "n1"]), ..finding };
        let said = vague.to_string();
        assert!(said.starts_with("ranks 2, 3 and 0 compute different gradients of unit block.3"), "{said}");
        assert!(said.ends_with("(hosts n7, n8 and n1)"), "{said}");
    }

    #[test]
    fn fingerprints_do_not_depend_on_the_order_and_see_one_bit() {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            let numbers = (Tensor::arange(12, (Kind::Float, Device::Cpu)).view([3, 4]) - 5.5).to_kind(kind);
            let print = fingerprint(&numbers).unwrap();
            assert_eq!(fingerprint(&numbers.tr().flip([1])).unwrap(), print);
            flip(&numbers).unwrap();
            assert_ne!(fingerprint(&numbers).unwrap(), print);
            assert_eq!((&numbers + 5.5).argmin(None, false).int64_value(&[]), 0, "a small fault");
        }
    }
}
