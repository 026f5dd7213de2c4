//! The collectives that a program calls.
//!
//! [`calls`] expands a program into the calls that one rank issues and waits for. The checker matches them between ranks, the
//! traffic is the sum of their bytes, and the simulator gives them a duration.

use super::Program;
use super::codec::Codec;
use super::groups::{CollectiveKind, GroupKind};
use super::instruction::Instruction;
use super::policy::{InnerCollective, Policy, Sharding, UnevenBytes, UnitSpec};

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
    /// What the elements are.
    pub element: Element,
    /// How they travel.
    pub codec: Codec,
    /// The number of elements that stay together when they are divided among the ranks.
    pub row_len: usize,
    /// The group that `elements` are sharded among, if it is called on the caller's part of them instead of on all. All members
    /// of a replicate group have the same part.
    pub on_shard_of: Option<GroupKind>,
    /// What ranks send, if they do not send equal parts of `elements`.
    pub uneven: Option<UnevenBytes>,
}

/// An element of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// In the dtype of the computation.
    Parameter,
    /// In the dtype of the reduction.
    Gradient,
    /// A byte of activations or of their gradients, inside a unit's pass.
    Byte,
}

/// A call that a rank makes: it issues a collective, or waits for one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// The collective.
    pub collective: Collective,
    /// What the rank does with it.
    pub op: CallOp,
    /// The share of the instruction's computation that comes after this call and before the next ([`InnerCollective::overlap`]).
    pub overlap: f64,
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
    let Some(unit) = instruction.unit() else { return control_call(instruction).into_iter().collect() };
    let Some(spec) = units.get(unit) else { return Vec::new() };
    let Sharding { optimizer, gradients, parameters } = policy.sharding;
    let sums_part = optimizer || gradients;
    let gather =
        |(group, elements), codec| of_unit(unit, group, CollectiveKind::AllGather, elements, Element::Parameter, codec);
    let (trainable, frozen) = (spec.trainable_by_group(), spec.frozen_by_group());
    let reduce = |kind, codec| {
        let each = trainable.into_iter();
        each.filter_map(|(group, elements)| of_unit(unit, group, kind, elements, Element::Gradient, codec)).collect()
    };
    let reduce_replicas = |(group, elements)| {
        let (kind, element) = (CollectiveKind::AllReduce, Element::Gradient);
        let collective = of_unit(unit, GroupKind::Replicate, kind, elements, element, Codec::None)?;
        Some(Collective { on_shard_of: sums_part.then_some(group), ..collective })
    };
    match *instruction {
        // Each flat buffer has trainable and frozen elements.
        Instruction::StartGather { codec, .. } if parameters => {
            let buffers = trainable.into_iter().zip(frozen).flat_map(|(trainable, frozen)| [trainable, frozen]);
            buffers.filter_map(|buffer| gather(buffer, codec)).collect()
        }
        Instruction::StartReduce { codec, .. } => {
            let kind = if sums_part { CollectiveKind::ReduceScatter } else { CollectiveKind::AllReduce };
            reduce(kind, codec)
        }
        Instruction::WaitReduceScatter(_) => trainable.into_iter().filter_map(reduce_replicas).collect(),
        Instruction::Update(_) if updates_are_gathered(policy) => {
            trainable.into_iter().filter_map(|buffer| gather(buffer, Codec::None)).collect()
        }
        _ => inner_collectives(instruction, spec).iter().filter_map(|inner| of_pass(unit, inner)).collect(),
    }
}

/// The collectives inside a pass.
fn inner_collectives<'a>(instruction: &Instruction, spec: &'a UnitSpec) -> &'a [InnerCollective] {
    match instruction {
        Instruction::Forward { .. } => &spec.inner.forward,
        Instruction::Recompute { .. } => &spec.inner.recompute,
        Instruction::Backward { .. } | Instruction::BackwardInput { .. } => &spec.inner.backward,
        _ => &[],
    }
}

fn of_pass(unit: usize, inner: &InnerCollective) -> Option<Collective> {
    let collective = of_unit(unit, inner.group, inner.kind, inner.bytes, Element::Byte, Codec::None)?;
    Some(Collective { row_len: inner.row_bytes, uneven: inner.uneven, ..collective })
}

/// The collective of a few numbers that an instruction without a unit issues.
fn control_call(instruction: &Instruction) -> Option<Collective> {
    let kind = match instruction {
        Instruction::CountTokens => CollectiveKind::AllGather,
        Instruction::ReduceTotals => CollectiveKind::AllReduce,
        _ => return None,
    };
    let (group, element, codec) = (GroupKind::World, Element::Byte, Codec::None);
    let (unit, on_shard_of, uneven) = (None, None, None);
    Some(Collective { group, kind, unit, elements: 0, element, codec, row_len: 1, on_shard_of, uneven })
}

/// A collective on all elements of a unit, if it has any.
fn of_unit(
    unit: usize,
    group: GroupKind,
    kind: CollectiveKind,
    elements: usize,
    element: Element,
    codec: Codec,
) -> Option<Collective> {
    let (unit, on_shard_of, uneven) = (Some(unit), None, None);
    (elements > 0).then_some(Collective {
        group,
        kind,
        unit,
        elements,
        element,
        codec,
        row_len: 1,
        on_shard_of,
        uneven,
    })
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
            (Instruction::CountTokens | Instruction::ReduceTotals, _) => self.issue_and_wait(position, instruction),
            (
                Instruction::Forward { .. }
                | Instruction::Recompute { .. }
                | Instruction::Backward { .. }
                | Instruction::BackwardInput { .. },
                Some(unit),
            ) => self.expand_pass(position, instruction, unit),
            (Instruction::StartGather { .. } | Instruction::Update(_), Some(unit)) => {
                let issued = self.issue_all(position, instruction);
                self.pending[unit].gathers.extend(issued);
            }
            (Instruction::WaitGather(_), Some(unit)) => {
                let issued = std::mem::take(&mut self.pending[unit].gathers);
                self.wait(position, issued);
            }
            (Instruction::StartReduce { .. }, Some(unit)) => {
                let issued = self.issue_all(position, instruction);
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

    /// Waits for a unit's reduction within the shard group, and issues the one between replicas, which travels alike.
    fn wait_reduce_scatter(&mut self, position: usize, unit: usize) {
        let issued = std::mem::take(&mut self.pending[unit].within_shards);
        let between = collectives_of(&Instruction::WaitReduceScatter(unit), self.units, self.policy);
        for (reduction, between) in issued.into_iter().zip(between.iter().cycle()) {
            self.wait(position, vec![reduction]);
            // What was summed has more digits than its summands.
            let codec = Some(reduction.0.codec).filter(|codec| *codec != Codec::ParamDtype).unwrap_or_default();
            let issued = self.issue(position, Collective { codec, ..*between }, 0.);
            self.pending[unit].between_replicas.push(issued);
        }
    }

    /// Issues the collectives of an instruction, and waits for each before the next.
    fn issue_and_wait(&mut self, position: usize, instruction: &Instruction) {
        for collective in collectives_of(instruction, self.units, self.policy) {
            let issued = self.issue(position, collective, 0.);
            self.wait(position, vec![issued]);
        }
    }

    /// Issues the collectives inside a pass, and waits for each before the next. In between, the pass may compute. The first half of
    /// a backward pass does not: what would overlap is in the second half.
    fn expand_pass(&mut self, position: usize, instruction: &Instruction, unit: usize) {
        let is_half = matches!(instruction, Instruction::BackwardInput { .. });
        for inner in inner_collectives(instruction, &self.units[unit]) {
            let Some(collective) = of_pass(unit, inner) else { continue };
            let overlap = if is_half { 0. } else { inner.overlap };
            let issued = self.issue(position, collective, overlap);
            self.wait(position, vec![issued]);
        }
    }

    fn issue_all(&mut self, position: usize, instruction: &Instruction) -> Vec<Issued> {
        let collectives = collectives_of(instruction, self.units, self.policy);
        collectives.into_iter().map(|collective| self.issue(position, collective, 0.)).collect()
    }

    fn issue(&mut self, position: usize, collective: Collective, overlap: f64) -> Issued {
        self.calls.push((position, Call { collective, op: CallOp::Issue, overlap }));
        (collective, Some(self.calls.len() - 1))
    }

    fn wait(&mut self, position: usize, issued: Vec<Issued>) {
        let wait = |(collective, issued)| (position, Call { collective, op: CallOp::Wait { issued }, overlap: 0. });
        self.calls.extend(issued.into_iter().map(wait));
    }
}
