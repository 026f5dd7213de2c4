//! Random calls with a naive reference: every rank can compute the inputs of all ranks, and so every rank's expected result.

#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part, and a test may fail")]

use std::time::Duration;

use half::{bf16, f16};
use shardwise_comm::{CallFault, Error, Group, Pending, ReduceOp, mpi};
use shardwise_plan::{Dtype, Partition};
use shardwise_torch::tch::Device;
use shardwise_torch::{Block, Element, copy_bytes};

pub(crate) fn world() -> Group {
    world_with_timeout(Duration::from_secs(30))
}

pub(crate) fn world_with_timeout(timeout: Duration) -> Group {
    world_with(mpi::Options { timeout, ..mpi::Options::default() })
}

/// A world with collective verification, and a fault to inject on some rank.
pub(crate) fn verifying_world(fault: impl FnOnce(usize) -> Option<CallFault>) -> Group {
    world_with(mpi::Options {
        timeout: Duration::from_secs(60),
        verify_collectives: true,
        fault: fault(launched_rank()),
    })
}

/// This process's rank according to the launcher, known before MPI has started.
pub(crate) fn launched_rank() -> usize {
    let rank = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].iter().find_map(|name| std::env::var(name).ok());
    rank.unwrap().parse().unwrap()
}

pub(crate) fn world_with(options: mpi::Options) -> Group {
    let world = mpi::world(options).unwrap();
    // The launcher of another MPI would start separate worlds of one rank each.
    let launched = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].iter().find_map(|name| std::env::var(name).ok());
    assert_eq!(launched, Some(world.size().to_string()), "the ranks that the launcher started are the world");
    world
}

/// Waits until the other ranks have printed their errors: a rank that exits without finalizing ends them too.
pub(crate) fn let_others_print() {
    std::thread::sleep(Duration::from_secs(3));
}

/// Runs calls of different groups at once, started in an order that differs between ranks.
pub(crate) fn run_in_mixed_order(world: &Group, groups: &[Group]) {
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.rotate_left(world.rank() % groups.len());
    let sum = |index: usize| groups[index].all_reduce("mixed", ReduceOp::Sum, vec![world.rank() as i64; 40_000]);
    let sums: Vec<_> = order.into_iter().map(|index| (index, sum(index))).collect();
    for (index, pending) in sums {
        let expected: i64 = groups[index].ranks().iter().map(|rank| rank as i64).sum();
        assert_eq!(pending.wait().unwrap(), vec![expected; 40_000]);
    }
}

/// A seeded random number generator (splitmix64).
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// An element type, as the reference uses it.
pub(crate) trait Value: Element {
    fn of(bits: u64) -> Self;
    /// Reduces the contributions in rank order, the slow and obvious way.
    fn reduce(contributions: &[Self], how: ReduceOp) -> Self;
    fn bits(self) -> u64;
}

fn float_of(bits: u64) -> f32 {
    // Magnitudes over several powers of two, so that the order of a sum shows in its bits.
    let mantissa = (bits >> 40) as f32 / (1 << 24) as f32 - 0.5;
    mantissa * [0.001, 0.1, 1., 30., 1000.][(bits % 5) as usize]
}

fn reduce_floats(contributions: impl Iterator<Item = f32>, count: usize, how: ReduceOp) -> f32 {
    let total = contributions.reduce(|a, b| if how == ReduceOp::Max { a.max(b) } else { a + b }).unwrap();
    if how == ReduceOp::Mean { total / count as f32 } else { total }
}

macro_rules! float_value {
    ($type:ty, $from:expr, $to:expr) => {
        impl Value for $type {
            fn of(bits: u64) -> Self {
                $from(float_of(bits))
            }
            fn reduce(contributions: &[Self], how: ReduceOp) -> Self {
                $from(reduce_floats(contributions.iter().map(|&x| $to(x)), contributions.len(), how))
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
        }
    };
}
float_value!(f32, |x| x, |x: f32| x);
float_value!(bf16, bf16::from_f32, bf16::to_f32);
float_value!(f16, f16::from_f32, f16::to_f32);

impl Value for f64 {
    fn of(bits: u64) -> Self {
        f64::from(float_of(bits)) * (1. + (bits & 0xffff) as f64 * 1e-12)
    }
    fn reduce(contributions: &[Self], how: ReduceOp) -> Self {
        let sum = contributions[1..].iter().fold(contributions[0], |sum, x| sum + x);
        match how {
            ReduceOp::Sum => sum,
            ReduceOp::Mean => sum / contributions.len() as f64,
            ReduceOp::Max => contributions.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }
    fn bits(self) -> u64 {
        self.to_bits()
    }
}

impl Value for i64 {
    fn of(bits: u64) -> Self {
        bits as i64 >> 8
    }
    fn reduce(contributions: &[Self], how: ReduceOp) -> Self {
        match how {
            ReduceOp::Max => *contributions.iter().max().unwrap(),
            _ => contributions.iter().sum(),
        }
    }
    fn bits(self) -> u64 {
        self as u64
    }
}

impl Value for u8 {
    fn of(bits: u64) -> Self {
        bits as u8
    }
    fn reduce(_: &[Self], _: ReduceOp) -> Self {
        unreachable!("bytes have no reduction")
    }
    fn bits(self) -> u64 {
        self.into()
    }
}

/// The input of rank `rank` in the case `seed`.
pub(crate) fn input<T: Value>(seed: u64, rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| element(seed, rank, index)).collect()
}

fn element<T: Value>(seed: u64, rank: usize, index: usize) -> T {
    T::of(mix(seed ^ mix(rank as u64 + 1) ^ mix(index as u64).rotate_left(17)))
}

pub(crate) fn assert_same<T: Value>(what: &str, found: &[T], expected: &[T]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let wrong = (0..found.len()).find(|&index| found[index].bits() != expected[index].bits());
    if let Some(index) = wrong {
        panic!("{what}: element {index} is {:?}, and should be {:?}", found[index], expected[index]);
    }
}

/// A block on the group's device with these elements.
pub(crate) fn upload<T: Value>(group: &Group, elements: &[T]) -> Block {
    let block = Block::new(T::DTYPE, elements.len(), group.device()).unwrap();
    let from = (Device::Cpu, elements.as_ptr().cast());
    // SAFETY: as many bytes on both sides, and nobody else has the block.
    unsafe { copy_bytes(from, (group.device(), block.as_ptr()), size_of_val(elements)) }.unwrap();
    block
}

/// A block's elements, wherever it is.
pub(crate) fn download<T: Value>(block: &Block) -> Vec<T> {
    let mut elements = vec![T::default(); block.len()];
    let to = (Device::Cpu, elements.as_mut_ptr().cast());
    // SAFETY: as many bytes on both sides.
    unsafe { copy_bytes((block.device(), block.as_ptr()), to, size_of_val(&elements[..])) }.unwrap();
    elements
}

/// Waits for a running call and checks its result.
pub(crate) type Check = Box<dyn FnOnce()>;

/// Starts the `case`-th random call on `group`; all ranks of the group start the same one.
pub(crate) fn start_random_call(group: &Group, case: u64) -> Check {
    let mut rng = Rng(case.wrapping_mul(0x5851_f42d_4c95_7f2d));
    match rng.pick(&Dtype::ALL) {
        Dtype::F64 => start_typed::<f64>(group, rng),
        Dtype::F32 => start_typed::<f32>(group, rng),
        Dtype::Bf16 => start_typed::<bf16>(group, rng),
        Dtype::F16 => start_typed::<f16>(group, rng),
        Dtype::I64 => start_typed::<i64>(group, rng),
        Dtype::U8 => start_typed::<u8>(group, rng),
    }
}

fn any_len(rng: &mut Rng) -> usize {
    match rng.below(12) {
        0 => 0,
        1 => 1,
        2 => rng.pick(&[2, 3, 5, 7]),
        3 => rng.pick(&[97, 1009, 7919]),
        // Several rounds of a reduction.
        4 => 200_000 + rng.below(100_000),
        // Too long for a small all-reduce.
        5 => 20_000 + rng.below(5000),
        _ => rng.below(3000),
    }
}

fn start_typed<T: Value>(group: &Group, mut rng: Rng) -> Check {
    let (rank, size) = (group.rank(), group.size());
    let seed = rng.next();
    let len = any_len(&mut rng);
    let how = rng.pick(&[ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max]);
    let partition = Partition::new(len, size);
    let what = move |verb: &str| format!("{verb} of {len} × {} in {how:?} among {size}, seed {seed:#x}", T::DTYPE);
    let expected_sum = move |range: std::ops::Range<usize>| -> Vec<T> {
        range.map(|index| T::reduce(&(0..size).map(|r| element(seed, r, index)).collect::<Vec<T>>(), how)).collect()
    };
    let own = |len: usize| upload(group, &input::<T>(seed, rank, len));
    let empty = |len: usize| upload(group, &vec![T::default(); len]);
    let refused = T::DTYPE == Dtype::U8 || (T::DTYPE == Dtype::I64 && how == ReduceOp::Mean);
    match rng.below(10) {
        0 => {
            let whole_input = input::<T>(seed, 0, len);
            let part = upload(group, &whole_input[partition.range(rank)]);
            let pending = group.all_gather("random", part, empty(len));
            Box::new(move || assert_same(&what("all-gather"), &download(&pending.wait().unwrap().1), &whole_input))
        }
        1 => {
            let pending = group.reduce_scatter("random", how, own(len), empty(partition.part_len(rank)));
            Box::new(move || match refused {
                true => assert_refused(pending),
                false => {
                    let (_, part) = pending.wait().unwrap();
                    assert_same(&what("reduce-scatter"), &download(&part), &expected_sum(partition.range(rank)));
                }
            })
        }
        2 => {
            let pending = group.all_reduce("random", how, own(len));
            Box::new(move || match refused {
                true => assert_refused(pending),
                false => assert_same(&what("all-reduce"), &download(&pending.wait().unwrap()), &expected_sum(0..len)),
            })
        }
        3 => {
            let len = len / size * size;
            let part = len / size;
            let pending = group.all_to_all("random", own(len), empty(len));
            Box::new(move || {
                let expected: Vec<T> = (0..size)
                    .flat_map(|from| (rank * part..(rank + 1) * part).map(move |index| element(seed, from, index)))
                    .collect();
                assert_same(&what("all-to-all"), &download(&pending.wait().unwrap().1), &expected);
            })
        }
        4 => {
            // The number of elements that `from` sends to `to`: uneven, often zero.
            let count = move |from: usize, to: usize| match mix(seed ^ (from * size + to) as u64) {
                bits if bits % 4 == 0 => 0,
                bits => (bits >> 8) as usize % (len / size + 2),
            };
            let sends: Vec<usize> = (0..size).map(|to| count(rank, to)).collect();
            let receives: Vec<usize> = (0..size).map(|from| count(from, rank)).collect();
            let (send, receive) = (own(sends.iter().sum()), empty(receives.iter().sum()));
            let pending = group.all_to_all_counts("random", send, &sends, receive, &receives);
            Box::new(move || {
                let expected: Vec<T> = (0..size)
                    .flat_map(|from| {
                        let start: usize = (0..rank).map(|to| count(from, to)).sum();
                        (start..start + count(from, rank)).map(move |index| element(seed, from, index))
                    })
                    .collect();
                assert_same(&what("all-to-all with counts"), &download(&pending.wait().unwrap().1), &expected);
            })
        }
        5 => {
            let root = (seed % size as u64) as usize;
            let pending = group.broadcast("random", root, own(len));
            let expected = input::<T>(seed, root, len);
            Box::new(move || assert_same(&what("broadcast"), &download(&pending.wait().unwrap()), &expected))
        }
        6 => {
            let whole_input = input::<T>(seed, 0, len);
            // Every rank has its own part in place, and other values elsewhere.
            let mut whole = input::<T>(seed, rank + 1, len);
            whole[partition.range(rank)].copy_from_slice(&whole_input[partition.range(rank)]);
            let pending = group.all_gather_in_place("random", upload(group, &whole));
            Box::new(move || {
                assert_same(&what("all-gather in place"), &download(&pending.wait().unwrap()), &whole_input);
            })
        }
        7 => {
            let pending = group.reduce_scatter_in_place("random", how, own(len));
            Box::new(move || match refused {
                true => assert_refused(pending),
                false => {
                    let part = partition.range(rank);
                    let found = download::<T>(&pending.wait().unwrap());
                    assert_same(&what("reduce-scatter in place"), &found[part.clone()], &expected_sum(part.clone()));
                    // The other parts are unchanged.
                    let mut expected = input::<T>(seed, rank, len);
                    expected[part.clone()].copy_from_slice(&found[part]);
                    assert_same(&what("around reduce-scatter in place"), &found, &expected);
                }
            })
        }
        8 if size > 1 => {
            let (up, down) = ((rank + 1) % size, (rank + size - 1) % size);
            let send = || group.send("random", up, own(len));
            let receive = || group.receive("random", down, empty(len));
            // Around the ring; everyone sends before anyone receives. On a device, messages run one after the other.
            let (send, receive) = match group.device() == Device::Cpu || rank == 0 {
                true => {
                    let send = send();
                    (send, receive())
                }
                false => {
                    let receive = receive();
                    (send(), receive)
                }
            };
            Box::new(move || {
                assert_same(&what("receive"), &download(&receive.wait().unwrap()), &input::<T>(seed, down, len));
                send.wait().unwrap();
            })
        }
        _ => {
            let pending = group.barrier("random");
            Box::new(move || pending.wait().unwrap())
        }
    }
}

fn assert_refused<X: 'static>(pending: Pending<X>) {
    assert!(matches!(pending.wait(), Err(Error::Reduction { .. })));
}

/// Runs random calls on a group, some waited for at once, some several at a time.
pub(crate) fn run_random_calls(group: &Group, cases: std::ops::Range<u64>) {
    let mut running: Vec<Check> = Vec::new();
    for case in cases {
        let check = start_random_call(group, case);
        match case % 3 {
            0 => check(),
            _ => running.push(check),
        }
        if running.len() == 6 {
            running.drain(..).for_each(|check| check());
        }
    }
    running.into_iter().for_each(|check| check());
}
