//! Random calls with a naive reference: every rank can compute every rank's input, and so every rank's right answer.

#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part, and a test may fail")]

use std::time::Duration;

use half::{bf16, f16};
use shardwise_comm::{CallFault, Error, Group, Pending, Reduce, mpi};
use shardwise_plan::{Dtype, Partition};
use shardwise_torch::{Block, Element};

pub(crate) fn world() -> Group {
    world_with_limit(Duration::from_secs(30))
}

pub(crate) fn world_with_limit(time_limit: Duration) -> Group {
    world_with(mpi::Options { time_limit, ..mpi::Options::default() })
}

/// A world whose ranks compare their calls, one of which may be told to go wrong.
pub(crate) fn checked_world(fault: impl FnOnce(usize) -> Option<CallFault>) -> Group {
    world_with(mpi::Options { time_limit: Duration::from_secs(60), checked: true, fault: fault(launched_rank()) })
}

/// This process's rank, which only the launcher knows before MPI has started.
pub(crate) fn launched_rank() -> usize {
    let rank = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].iter().find_map(|name| std::env::var(name).ok());
    rank.unwrap().parse().unwrap()
}

pub(crate) fn world_with(options: mpi::Options) -> Group {
    let world = mpi::world(options).unwrap();
    // A launcher of another MPI would start as many worlds of one rank.
    let launched = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].iter().find_map(|name| std::env::var(name).ok());
    assert_eq!(launched, Some(world.size().to_string()), "the ranks that the launcher started are the world");
    world
}

/// A rank that leaves without finalizing takes the others with it, who may still have something to say.
pub(crate) fn let_the_others_speak() {
    std::thread::sleep(Duration::from_secs(3));
}

/// Calls of different groups under way at once, asked for in an order that differs from rank to rank.
pub(crate) fn run_in_mixed_order(world: &Group, groups: &[Group]) {
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.rotate_left(world.rank() % groups.len());
    let sum = |index: usize| groups[index].all_reduce("mixed", Reduce::Sum, vec![world.rank() as i64; 40_000]);
    let sums: Vec<_> = order.into_iter().map(|index| (index, sum(index))).collect();
    for (index, pending) in sums {
        let expected: i64 = groups[index].ranks().iter().map(|rank| rank as i64).sum();
        assert_eq!(pending.wait().unwrap(), vec![expected; 40_000]);
    }
}

/// A small, fast, seeded stream of numbers (splitmix64).
pub(crate) struct Chance(pub(crate) u64);

impl Chance {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

fn mixed(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What the reference needs to know of an element type.
pub(crate) trait Value: Element {
    fn of(bits: u64) -> Self;
    /// The contributions in rank order, reduced the slow and obvious way.
    fn reduced(contributions: &[Self], how: Reduce) -> Self;
    fn bits(self) -> u64;
}

fn float_of(bits: u64) -> f32 {
    // Magnitudes over several powers of two, so that the order of a sum shows in its bits.
    let mantissa = (bits >> 40) as f32 / (1 << 24) as f32 - 0.5;
    mantissa * [0.001, 0.1, 1., 30., 1000.][(bits % 5) as usize]
}

fn float_reduced(contributions: impl Iterator<Item = f32>, count: usize, how: Reduce) -> f32 {
    let total = contributions.reduce(|a, b| if how == Reduce::Max { a.max(b) } else { a + b }).unwrap();
    if how == Reduce::Mean { total / count as f32 } else { total }
}

macro_rules! float_value {
    ($type:ty, $from:expr, $to:expr) => {
        impl Value for $type {
            fn of(bits: u64) -> Self {
                $from(float_of(bits))
            }
            fn reduced(contributions: &[Self], how: Reduce) -> Self {
                $from(float_reduced(contributions.iter().map(|&x| $to(x)), contributions.len(), how))
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
    fn reduced(contributions: &[Self], how: Reduce) -> Self {
        let sum = contributions[1..].iter().fold(contributions[0], |sum, x| sum + x);
        match how {
            Reduce::Sum => sum,
            Reduce::Mean => sum / contributions.len() as f64,
            Reduce::Max => contributions.iter().copied().fold(f64::NEG_INFINITY, f64::max),
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
    fn reduced(contributions: &[Self], how: Reduce) -> Self {
        match how {
            Reduce::Max => *contributions.iter().max().unwrap(),
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
    fn reduced(_: &[Self], _: Reduce) -> Self {
        unreachable!("bytes have no reduction")
    }
    fn bits(self) -> u64 {
        self.into()
    }
}

/// Rank `rank`'s `len` elements in the case `seed`.
pub(crate) fn input<T: Value>(seed: u64, rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| element(seed, rank, index)).collect()
}

fn element<T: Value>(seed: u64, rank: usize, index: usize) -> T {
    T::of(mixed(seed ^ mixed(rank as u64 + 1) ^ mixed(index as u64).rotate_left(17)))
}

pub(crate) fn assert_same<T: Value>(what: &str, found: &[T], expected: &[T]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let wrong = (0..found.len()).find(|&index| found[index].bits() != expected[index].bits());
    if let Some(index) = wrong {
        panic!("{what}: element {index} is {:?}, and should be {:?}", found[index], expected[index]);
    }
}

/// A call under way with the check of its result.
pub(crate) type Check = Box<dyn FnOnce()>;

/// Starts the `case`-th random call on `group`; all ranks of the group start the same one.
pub(crate) fn start_random_call(group: &Group, case: u64) -> Check {
    let mut chance = Chance(case.wrapping_mul(0x5851_f42d_4c95_7f2d));
    match chance.pick(&Dtype::ALL) {
        Dtype::F64 => start_typed::<f64>(group, chance),
        Dtype::F32 => start_typed::<f32>(group, chance),
        Dtype::Bf16 => start_typed::<bf16>(group, chance),
        Dtype::F16 => start_typed::<f16>(group, chance),
        Dtype::I64 => start_typed::<i64>(group, chance),
        Dtype::U8 => start_typed::<u8>(group, chance),
    }
}

fn any_len(chance: &mut Chance) -> usize {
    match chance.below(12) {
        0 => 0,
        1 => 1,
        2 => chance.pick(&[2, 3, 5, 7]),
        3 => chance.pick(&[97, 1009, 7919]),
        // Several rounds of a reduction.
        4 => 200_000 + chance.below(100_000),
        // Beyond what a small all-reduce takes.
        5 => 20_000 + chance.below(5000),
        _ => chance.below(3000),
    }
}

fn start_typed<T: Value>(group: &Group, mut chance: Chance) -> Check {
    let (rank, size) = (group.rank(), group.size());
    let seed = chance.next();
    let len = any_len(&mut chance);
    let how = chance.pick(&[Reduce::Sum, Reduce::Sum, Reduce::Mean, Reduce::Max]);
    let partition = Partition::new(len, size);
    let what = move |verb: &str| format!("{verb} of {len} × {} in {how:?} among {size}, seed {seed:#x}", T::DTYPE);
    let expected_sum = move |range: std::ops::Range<usize>| -> Vec<T> {
        range.map(|index| T::reduced(&(0..size).map(|r| element(seed, r, index)).collect::<Vec<T>>(), how)).collect()
    };
    let refused = T::DTYPE == Dtype::U8 || (T::DTYPE == Dtype::I64 && how == Reduce::Mean);
    match chance.below(10) {
        0 => {
            let whole_input = input::<T>(seed, 0, len);
            let part = whole_input[partition.range(rank)].to_vec();
            // Into memory of libtorch's.
            let whole = Block::from_slice(&vec![T::default(); len]).unwrap();
            let pending = group.all_gather("random", part, whole);
            Box::new(move || {
                assert_same(&what("all-gather"), pending.wait().unwrap().1.as_slice::<T>().unwrap(), &whole_input);
            })
        }
        1 => {
            let part = vec![T::default(); partition.part_len(rank)];
            let pending = group.reduce_scatter("random", how, input::<T>(seed, rank, len), part);
            Box::new(move || match refused {
                true => assert_refused(pending),
                false => {
                    let (_, part) = pending.wait().unwrap();
                    assert_same(&what("reduce-scatter"), &part, &expected_sum(partition.range(rank)));
                }
            })
        }
        2 => {
            let pending = group.all_reduce("random", how, input::<T>(seed, rank, len));
            Box::new(move || match refused {
                true => assert_refused(pending),
                false => assert_same(&what("all-reduce"), &pending.wait().unwrap(), &expected_sum(0..len)),
            })
        }
        3 => {
            let len = len / size * size;
            let part = len / size;
            let pending = group.all_to_all("random", input::<T>(seed, rank, len), vec![T::default(); len]);
            Box::new(move || {
                let expected: Vec<T> = (0..size)
                    .flat_map(|from| (rank * part..(rank + 1) * part).map(move |index| element(seed, from, index)))
                    .collect();
                assert_same(&what("all-to-all"), &pending.wait().unwrap().1, &expected);
            })
        }
        4 => {
            // How much `from` sends to `to`: uneven, often nothing.
            let count = move |from: usize, to: usize| match mixed(seed ^ (from * size + to) as u64) {
                bits if bits % 4 == 0 => 0,
                bits => (bits >> 8) as usize % (len / size + 2),
            };
            let sends: Vec<usize> = (0..size).map(|to| count(rank, to)).collect();
            let receives: Vec<usize> = (0..size).map(|from| count(from, rank)).collect();
            let send = input::<T>(seed, rank, sends.iter().sum());
            let receive = vec![T::default(); receives.iter().sum()];
            let pending = group.all_to_all_counts("random", send, &sends, receive, &receives);
            Box::new(move || {
                let expected: Vec<T> = (0..size)
                    .flat_map(|from| {
                        let start: usize = (0..rank).map(|to| count(from, to)).sum();
                        (start..start + count(from, rank)).map(move |index| element(seed, from, index))
                    })
                    .collect();
                assert_same(&what("all-to-all with counts"), &pending.wait().unwrap().1, &expected);
            })
        }
        5 => {
            let root = (seed % size as u64) as usize;
            let pending = group.broadcast("random", root, input::<T>(seed, rank, len));
            Box::new(move || assert_same(&what("broadcast"), &pending.wait().unwrap(), &input::<T>(seed, root, len)))
        }
        6 => {
            let whole_input = input::<T>(seed, 0, len);
            // Every rank has its own part, and something else elsewhere.
            let mut whole = input::<T>(seed, rank + 1, len);
            whole[partition.range(rank)].copy_from_slice(&whole_input[partition.range(rank)]);
            let pending = group.all_gather_in_place("random", whole);
            Box::new(move || assert_same(&what("all-gather in place"), &pending.wait().unwrap(), &whole_input))
        }
        7 => {
            let pending = group.reduce_scatter_in_place("random", how, input::<T>(seed, rank, len));
            Box::new(move || match refused {
                true => assert_refused(pending),
                false => {
                    let part = partition.range(rank);
                    let found = pending.wait().unwrap();
                    assert_same(&what("reduce-scatter in place"), &found[part.clone()], &expected_sum(part.clone()));
                    // The other parts are as they were.
                    let mut expected = input::<T>(seed, rank, len);
                    expected[part.clone()].copy_from_slice(&found[part]);
                    assert_same(&what("around reduce-scatter in place"), &found, &expected);
                }
            })
        }
        8 if size > 1 => {
            // Around the ring; everyone sends before anyone receives.
            let (up, down) = ((rank + 1) % size, (rank + size - 1) % size);
            let send = group.send("random", up, input::<T>(seed, rank, len));
            let receive = group.receive("random", down, vec![T::default(); len]);
            Box::new(move || {
                assert_same(&what("receive"), &receive.wait().unwrap(), &input::<T>(seed, down, len));
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

/// Runs random calls on a group, some waited for at once, some with several under way.
pub(crate) fn run_random_calls(group: &Group, cases: std::ops::Range<u64>) {
    let mut under_way: Vec<Check> = Vec::new();
    for case in cases {
        let check = start_random_call(group, case);
        match case % 3 {
            0 => check(),
            _ => under_way.push(check),
        }
        if under_way.len() == 6 {
            under_way.drain(..).for_each(|check| check());
        }
    }
    under_way.into_iter().for_each(|check| check());
}
