//! Every operation between the GPUs of all ranks, compared with what it must give.

use shardwise_comm::{Group, ReduceOp, nccl};
use shardwise_plan::{Axis, Mesh, Partition};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_torch::{Block, storage};

use crate::device::choose_device;
use crate::error::{Error, Result};

/// An operation that was checked, such as `all-gather of 17 BFloat16`, and what was wrong with it on this rank.
pub type CheckedOperation = (String, std::result::Result<(), String>);

/// Checks every operation on the GPUs of all ranks, with parts of equal and of different lengths. All ranks call it together.
pub fn check_collectives(world: &Group) -> Result<Vec<CheckedOperation>> {
    let (device, _) = choose_device(world, false)?.map_err(Error::Options)?;
    let mesh = Mesh::new(&[(Axis::Shard, world.size())]).expect("a world has at least one rank");
    let group = nccl::connect(world.split_along(&mesh, &[Axis::Shard])?, device)?;
    let mut checked = Vec::new();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for len in [4 * group.size(), 4 * group.size() + 1] {
            let checker = Checker { group: &group, device, kind, len };
            for (verb, run) in OPERATIONS {
                let result = run(&checker);
                let has_failed = result.is_err();
                let result = result.and_then(|(found, expected)| compare(&found, &expected));
                checked.push((format!("{verb} of {len} {kind:?}"), result));
                if has_failed {
                    // This rank would no longer make the calls that the others make.
                    return Ok(checked);
                }
            }
        }
    }
    group.check()?;
    Ok(checked)
}

/// The elements that an operation gave, and those that it must give.
type Elements = (Vec<f64>, Vec<f64>);

type Operation = fn(&Checker<'_>) -> std::result::Result<Elements, String>;

const OPERATIONS: [(&str, Operation); 7] = [
    ("all-gather", |checker| {
        let own = checker.upload(&checker.part(checker.rank()))?;
        let whole = checker.upload(&vec![0.; checker.len])?;
        let (_, whole) = checker.group.all_gather("check", own, whole).wait().map_err(text)?;
        Ok((download(whole)?, (0..checker.size()).flat_map(|rank| checker.part(rank)).collect()))
    }),
    ("reduce-scatter", |checker| {
        let part = checker.partition().range(checker.rank());
        let (whole, own) = (checker.upload(&checker.whole(checker.rank()))?, checker.upload(&vec![0.; part.len()])?);
        let (_, own) = checker.group.reduce_scatter("check", ReduceOp::Sum, whole, own).wait().map_err(text)?;
        Ok((download(own)?, checker.sum()[part].to_vec()))
    }),
    ("all-reduce", |checker| {
        let whole = checker.upload(&checker.whole(checker.rank()))?;
        let sum = checker.group.all_reduce("check", ReduceOp::Sum, whole).wait().map_err(text)?;
        Ok((download(sum)?, checker.sum()))
    }),
    ("maximum", |checker| {
        let whole = checker.upload(&checker.whole(checker.rank()))?;
        let most = checker.group.all_reduce("check", ReduceOp::Max, whole).wait().map_err(text)?;
        let expected = (0..checker.len).map(|index| checker.element(0, index).max(checker.element(1, index)));
        Ok((download(most)?, if checker.size() > 1 { expected.collect() } else { checker.whole(0) }))
    }),
    ("broadcast", |checker| {
        let whole = checker.upload(&checker.whole(checker.rank()))?;
        let last = checker.size() - 1;
        Ok((download(checker.group.broadcast("check", last, whole).wait().map_err(text)?)?, checker.whole(last)))
    }),
    ("all-to-all", |checker| {
        let (rank, size) = (checker.rank(), checker.size());
        let element = |from: usize, to: usize| ((7 * from + to) % 100) as f64;
        // As many as can be divided by the number of ranks.
        let each = checker.len / size;
        let own: Vec<f64> = (0..size).flat_map(|to| vec![element(rank, to); each]).collect();
        let received = checker.upload(&vec![0.; size * each])?;
        let (_, received) = checker.group.all_to_all("check", checker.upload(&own)?, received).wait().map_err(text)?;
        Ok((download(received)?, (0..size).flat_map(|from| vec![element(from, rank); each]).collect()))
    }),
    ("send and receive", |checker| {
        // Pairs of ranks; the last of an odd number has none.
        let partner = checker.rank() ^ 1;
        if partner >= checker.size() {
            return Ok((Vec::new(), Vec::new()));
        }
        let send = |block: Block| checker.group.send("check", partner, block).wait().map(drop).map_err(text);
        let receive = |block: Block| checker.group.receive("check", partner, block).wait().map_err(text);
        let (own, empty) = (checker.upload(&checker.whole(checker.rank()))?, checker.upload(&vec![0.; checker.len])?);
        let received = match checker.rank() < partner {
            true => send(own).and_then(|()| receive(empty))?,
            false => {
                let received = receive(empty)?;
                send(own)?;
                received
            }
        };
        Ok((download(received)?, checker.whole(partner)))
    }),
];

struct Checker<'a> {
    group: &'a Group,
    device: Device,
    kind: Kind,
    len: usize,
}

impl Checker<'_> {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn partition(&self) -> Partition {
        self.group.partition(self.len)
    }

    /// An element of a rank. So small that sums over hundreds of ranks are exact in every type.
    fn element(&self, rank: usize, index: usize) -> f64 {
        ((rank + index) % 2) as f64
    }

    fn whole(&self, rank: usize) -> Vec<f64> {
        (0..self.len).map(|index| self.element(rank, index)).collect()
    }

    fn part(&self, rank: usize) -> Vec<f64> {
        self.whole(rank)[self.partition().range(rank)].to_vec()
    }

    fn sum(&self) -> Vec<f64> {
        let of = |index: usize| (0..self.size()).map(|rank| self.element(rank, index)).sum();
        (0..self.len).map(of).collect()
    }

    fn upload(&self, elements: &[f64]) -> std::result::Result<Block, String> {
        let tensor = Tensor::f_from_slice(elements).and_then(|tensor| tensor.f_to_kind(self.kind)).map_err(text)?;
        // The memory of a copy on the device has no other owner.
        let copy = tensor.f_to_device(self.device).map_err(text)?;
        storage::take(&copy, "it is sent").map_err(text)
    }
}

fn download(block: Block) -> std::result::Result<Vec<f64>, String> {
    let tensor = block.into_tensor().map_err(text)?.f_to_kind(Kind::Double).map_err(text)?;
    Vec::<f64>::try_from(tensor).map_err(text)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn compare(found: &[f64], expected: &[f64]) -> std::result::Result<(), String> {
    match found == expected {
        true => Ok(()),
        false => Err(format!("it gave {found:?} instead of {expected:?}")),
    }
}
