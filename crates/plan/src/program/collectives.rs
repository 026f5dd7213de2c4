//! The collectives that a program calls.
//!
//! [`calls`] expands a program into the calls that one rank issues and waits for. The checker matches them between ranks, the
//! traffic is the sum of their bytes, and the simulator gives them a duration.

use super::policy::{Policy, Sharding, UnitSpec};
use super::{Instruction, Program};

/// The ranks that take part in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GroupKind {
    /// All ranks.
    World,
    /// The ranks that hold the shards of one replica.
    Shard,
    /// The ranks that hold the same shard of all replicas.
    Replicate,
}

impl GroupKind {
    /// All kinds, in the order of their indices.
    pub const ALL: [GroupKind; 3] = [GroupKind::World, GroupKind::Shard, GroupKind::Replicate];

    /// The name in texts: `world`, `shard` or `replicate`.
    pub fn name(self) -> &'static str {
        match self {
            GroupKind::World => "world",
            GroupKind::Shard => "shard",
            GroupKind::Replicate => "replicate",
        }
    }
}

/// What a collective does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CollectiveKind {
    /// Every rank receives the parts of all.
    AllGather,
    /// Every rank receives its part of the sum.
    ReduceScatter,
    /// Every rank receives the sum.
    AllReduce,
}

impl CollectiveKind {
    /// All kinds, in the order of their indices.
    pub const ALL: [CollectiveKind; 3] =
        [CollectiveKind::AllGather, CollectiveKind::ReduceScatter, CollectiveKind::AllReduce];

    /// The name in texts: `all-gather`, `reduce-scatter` or `all-reduce`.
    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::ReduceScatter => "reduce-scatter",
            CollectiveKind::AllReduce => "all-reduce",
        }
    }
}

/// A collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Collective {
    /// The ranks that take part.
    pub group: GroupKind,
    /// What it does.
    pub kind: CollectiveKind,
    /// The unit whose parameters or gradients it sends; `None` for the control calls of [`Instruction::CountTokens`] and
    /// [`Instruction::ReduceTotals`].
    pub unit: Option<usize>,
    /// The number of elements, over all parts. Control calls have 0: a few numbers, which are not part of the traffic.
    pub elements: usize,
    /// Whether it is called on the caller's part of `elements` in the shard group, instead of on all of them. All members of a
    /// replicate group have the same part.
    pub on_shard: bool,
}

/// A call that a rank makes: it issues a collective, or waits for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// The collective.
    pub collective: Collective,
    /// What the rank does with it.
    pub op: CallOp,
}

/// What a rank does with a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallOp {
    /// Issues it, and goes on.
    Issue,
    /// Waits until it is complete.
    Wait {
        /// The index of the matching [`CallOp::Issue`] in the list of [`calls`]; `None` if the step before has issued it, as with
        /// the all-gathers of its update.
        issued: Option<usize>,
    },
}

/// The collectives that an instruction issues, in order. It may also wait for others; see [`calls`].
///
/// [`Instruction::WaitReduce`] issues what [`Instruction::WaitReduceScatter`] does if that has not come before it. Only [`calls`]
/// knows; here it issues nothing.
pub fn collectives_of(instruction: &Instruction, units: &[UnitSpec], policy: &Policy) -> Vec<Collective> {
    let Sharding { optimizer, gradients, parameters } = policy.sharding;
    let sums_part = optimizer || gradients;
    let control = |kind| Collective { group: GroupKind::World, kind, unit: None, elements: 0, on_shard: false };
    let of_unit = |group: GroupKind, kind, unit, elements: usize| {
        let on_shard = group == GroupKind::Replicate && sums_part;
        (elements > 0).then_some(Collective { group, kind, unit: Some(unit), elements, on_shard })
    };
    let elements = |unit: usize| units.get(unit).map_or((0, 0), |unit| (unit.trainable, unit.frozen));
    match *instruction {
        Instruction::CountTokens => vec![control(CollectiveKind::AllGather)],
        Instruction::ReduceTotals => vec![control(CollectiveKind::AllReduce)],
        Instruction::StartGather(unit) if parameters => {
            let (trainable, frozen) = elements(unit);
            let gather = |elements| of_unit(GroupKind::Shard, CollectiveKind::AllGather, unit, elements);
            [trainable, frozen].into_iter().filter_map(gather).collect()
        }
        Instruction::StartReduce(unit) => {
            let kind = if sums_part { CollectiveKind::ReduceScatter } else { CollectiveKind::AllReduce };
            of_unit(GroupKind::Shard, kind, unit, elements(unit).0).into_iter().collect()
        }
        Instruction::WaitReduceScatter(unit) => {
            of_unit(GroupKind::Replicate, CollectiveKind::AllReduce, unit, elements(unit).0).into_iter().collect()
        }
        Instruction::Update(unit) if updates_are_gathered(policy) => {
            of_unit(GroupKind::Shard, CollectiveKind::AllGather, unit, elements(unit).0).into_iter().collect()
        }
        Instruction::StartGather(_)
        | Instruction::WaitGather(_)
        | Instruction::Release(_)
        | Instruction::Forward { .. }
        | Instruction::Recompute { .. }
        | Instruction::Backward { .. }
        | Instruction::Accumulate { .. }
        | Instruction::WaitReduce(_)
        | Instruction::Norm(_)
        | Instruction::Update(_) => Vec::new(),
    }
}

/// All calls of a program in order, each with the position of its instruction.
///
/// The calls do not depend on the rank, because [`Collective::elements`] counts all parts. A program that breaks the rules of unit
/// states has calls, too: waiting for what was never issued, or was waited for already, is no call.
pub fn calls(program: &Program, units: &[UnitSpec], policy: &Policy) -> Vec<(usize, Call)> {
    let mut expansion = Expansion { units, policy, calls: Vec::new(), pending: vec![Pending::default(); units.len()] };
    if updates_are_gathered(policy) {
        for (unit, pending) in expansion.pending.iter_mut().enumerate() {
            let before = collectives_of(&Instruction::Update(unit), units, policy);
            pending.gathers = before.into_iter().map(|collective| (collective, None)).collect();
        }
    }
    for (position, instruction) in program.instructions.iter().enumerate() {
        expansion.expand(position, instruction);
    }
    expansion.calls
}

/// Whether an update sends the parameters that it has changed.
fn updates_are_gathered(policy: &Policy) -> bool {
    policy.sharding.optimizer && !policy.sharding.parameters
}

/// A collective that was issued, with the index of the call that issued it, unless that was in the step before.
type Issued = (Collective, Option<usize>);

/// The collectives of a unit that were issued, and not waited for yet.
#[derive(Clone, Default)]
struct Pending {
    gathers: Vec<Issued>,
    within_shards: Vec<Issued>,
    between_replicas: Vec<Issued>,
}

struct Expansion<'a> {
    units: &'a [UnitSpec],
    policy: &'a Policy,
    calls: Vec<(usize, Call)>,
    pending: Vec<Pending>,
}

impl Expansion<'_> {
    fn expand(&mut self, position: usize, instruction: &Instruction) {
        let unit = instruction.unit().filter(|&unit| unit < self.units.len());
        match (*instruction, unit) {
            (Instruction::CountTokens | Instruction::ReduceTotals, _) => {
                let issued = self.issue(position, instruction);
                self.wait(position, issued);
            }
            (Instruction::StartGather(_) | Instruction::Update(_), Some(unit)) => {
                let issued = self.issue(position, instruction);
                self.pending[unit].gathers.extend(issued);
            }
            (Instruction::WaitGather(_), Some(unit)) => {
                let issued = std::mem::take(&mut self.pending[unit].gathers);
                self.wait(position, issued);
            }
            (Instruction::StartReduce(_), Some(unit)) => {
                let issued = self.issue(position, instruction);
                self.pending[unit].within_shards.extend(issued);
            }
            (Instruction::WaitReduceScatter(_), Some(unit)) => self.wait_reduce_scatter(position, unit),
            (Instruction::WaitReduce(_), Some(unit)) => {
                self.wait_reduce_scatter(position, unit);
                let issued = std::mem::take(&mut self.pending[unit].between_replicas);
                self.wait(position, issued);
            }
            _ => (),
        }
    }

    /// Waits for a unit's reduction within the shard group, and issues the one between replicas.
    fn wait_reduce_scatter(&mut self, position: usize, unit: usize) {
        let issued = std::mem::take(&mut self.pending[unit].within_shards);
        for reduction in issued {
            self.wait(position, vec![reduction]);
            let issued = self.issue(position, &Instruction::WaitReduceScatter(unit));
            self.pending[unit].between_replicas.extend(issued);
        }
    }

    fn issue(&mut self, position: usize, instruction: &Instruction) -> Vec<Issued> {
        let collectives = collectives_of(instruction, self.units, self.policy);
        let issue = |collective| {
            self.calls.push((position, Call { collective, op: CallOp::Issue }));
            (collective, Some(self.calls.len() - 1))
        };
        collectives.into_iter().map(issue).collect()
    }

    fn wait(&mut self, position: usize, issued: Vec<Issued>) {
        let wait = |(collective, issued)| (position, Call { collective, op: CallOp::Wait { issued } });
        self.calls.extend(issued.into_iter().map(wait));
    }
}
