//! [`Rule::Tiers`]: where buffers are that leave the device.

use std::collections::{BTreeMap, BTreeSet};

use super::scope::{Purpose, Scope};
use super::violation::{Problem, Rule};
use crate::program::{Buffer, Instruction, Keep, Offload, Program, Tier};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Device,
    Storing(Tier),
    Stored(Tier),
    Fetching(Tier),
}

impl Place {
    fn name(self) -> &'static str {
        match self {
            Place::Device => "on the device",
            Place::Storing(_) => "being stored",
            Place::Stored(_) => "stored",
            Place::Fetching(_) => "being fetched",
        }
    }
}

/// Where the buffers of units are that are not always on the device.
type Places = BTreeMap<(usize, Buffer), Place>;

struct State {
    places: Places,
    /// The units whose parameters have changed since they were stored.
    updated: BTreeSet<usize>,
}

pub(super) fn check(program: &Program, scope: &Scope<'_>) -> Result<(), Problem> {
    let is_offload = |instruction: &Instruction| offload_of(instruction).is_some();
    let policy = scope.policy;
    let offloads = policy.optimizer_tier.is_some() || policy.parameter_tier.is_some();
    if !offloads && !program.instructions.iter().any(is_offload) {
        return Ok(());
    }
    let at_start = at_start(program, scope);
    let mut state = State { places: at_start.clone(), updated: BTreeSet::new() };
    for (position, instruction) in program.instructions.iter().enumerate() {
        apply(&mut state, instruction, scope).map_err(|problem| Problem::at(position, Rule::Tiers, problem))?;
    }
    let moved = state.places.iter().find(|(key, place)| at_start.get(key).copied().unwrap_or(Place::Device) != **place);
    match moved {
        Some(((unit, buffer), place)) => {
            let what = describe(scope, *unit, *buffer);
            let problem = format!("{what} are {} at the end, but not at the start", place.name());
            Err(Problem::missing(Rule::Tiers, problem))
        }
        None => Ok(()),
    }
}

/// Optimizer state and parameters are where the policy keeps them, or on their way, if the step before has left updates to this one. There
/// are no gradients, except for those of such updates: on a tier, if they are fetched from there. There are no activations.
fn at_start(program: &Program, scope: &Scope<'_>) -> Places {
    let named = || program.instructions.iter().filter_map(Instruction::unit);
    let kept = [(Buffer::Optimizer, scope.policy.optimizer_tier), (Buffer::Parameters, scope.policy.parameter_tier)];
    let kept = kept.into_iter().filter_map(|(buffer, tier)| Some((buffer, tier?)));
    let mut places: Places =
        kept.flat_map(|(buffer, tier)| named().map(move |unit| ((unit, buffer), Place::Stored(tier)))).collect();
    let first = |offload| program.instructions.iter().find(|instruction| offload_of(instruction) == Some(offload));
    let left = (0..scope.units.len()).filter(|&unit| scope.has_deferred_update(unit));
    for (unit, tier) in left.filter_map(|unit| Some((unit, scope.policy.gradient_tier?))) {
        let gradients = Offload { unit, buffer: Buffer::Gradients, tier };
        if first(gradients) == Some(&Instruction::StartFetch(gradients)) {
            places.insert((unit, Buffer::Gradients), Place::Stored(tier));
        }
    }
    if scope.policy.update_in_forward && scope.purpose == Purpose::Training {
        for (&(unit, buffer), place) in &mut places {
            if let Place::Stored(tier) = *place
                && first(Offload { unit, buffer, tier })
                    == Some(&Instruction::WaitStore(Offload { unit, buffer, tier }))
            {
                *place = Place::Storing(tier);
            }
        }
    }
    places
}

fn offload_of(instruction: &Instruction) -> Option<Offload> {
    match *instruction {
        Instruction::StartFetch(offload)
        | Instruction::WaitFetch(offload)
        | Instruction::StartStore(offload)
        | Instruction::WaitStore(offload)
        | Instruction::Evict(offload) => Some(offload),
        _ => None,
    }
}

fn apply(state: &mut State, instruction: &Instruction, scope: &Scope<'_>) -> Result<(), String> {
    let State { places, updated } = state;
    let mut change = |Offload { unit, buffer, tier }: Offload, from: Place, to: Place| {
        check_tier(scope, unit, buffer, tier)?;
        expect(places, scope, unit, buffer, from)?;
        places.insert((unit, buffer), to);
        Ok(())
    };
    match *instruction {
        Instruction::StartStore(offload) => change(offload, Place::Device, Place::Storing(offload.tier)),
        Instruction::WaitStore(offload) => {
            change(offload, Place::Storing(offload.tier), Place::Stored(offload.tier))?;
            if offload.buffer == Buffer::Parameters {
                updated.remove(&offload.unit);
            }
            Ok(())
        }
        Instruction::Evict(Offload { unit, buffer, .. }) if buffer != Buffer::Parameters => {
            Err(format!("{} may have changed since they were stored", describe(scope, unit, buffer)))
        }
        Instruction::Evict(Offload { unit, buffer, .. }) if updated.contains(&unit) => {
            Err(format!("{} have changed since they were stored", describe(scope, unit, buffer)))
        }
        Instruction::Evict(offload) => change(offload, Place::Device, Place::Stored(offload.tier)),
        Instruction::StartFetch(offload) => change(offload, Place::Stored(offload.tier), Place::Fetching(offload.tier)),
        Instruction::WaitFetch(offload) => change(offload, Place::Fetching(offload.tier), Place::Device),
        Instruction::Forward { unit, micro_batch, keep } => {
            if keep != Keep::Nothing {
                places.insert((unit, Buffer::Activations { micro_batch }), Place::Device);
            }
            expect_parameters(places, scope, unit)
        }
        Instruction::Recompute { unit, micro_batch } | Instruction::BackwardInput { unit, micro_batch } => {
            expect(places, scope, unit, Buffer::Activations { micro_batch }, Place::Device)?;
            expect_parameters(places, scope, unit)
        }
        Instruction::Backward { unit, micro_batch } => {
            expect(places, scope, unit, Buffer::Activations { micro_batch }, Place::Device)?;
            places.remove(&(unit, Buffer::Activations { micro_batch }));
            expect_parameters(places, scope, unit)
        }
        Instruction::BackwardWeight { unit, micro_batch } => {
            expect(places, scope, unit, Buffer::Activations { micro_batch }, Place::Device)?;
            places.remove(&(unit, Buffer::Activations { micro_batch }));
            Ok(())
        }
        // The shard is gathered.
        Instruction::StartGather { unit, .. } => expect(places, scope, unit, Buffer::Parameters, Place::Device),
        // Gradients are added to those of earlier micro-batches.
        Instruction::StartReduce { unit, .. } | Instruction::Norm(unit) => {
            expect(places, scope, unit, Buffer::Gradients, Place::Device)
        }
        Instruction::Update(unit) => {
            expect(places, scope, unit, Buffer::Gradients, Place::Device)?;
            expect(places, scope, unit, Buffer::Optimizer, Place::Device)?;
            let parameters = (unit, Buffer::Parameters);
            if !scope.units[unit].update_reads_parameters
                && let Some(Place::Stored(_)) = places.get(&parameters)
            {
                places.insert(parameters, Place::Device);
            }
            updated.insert(unit);
            expect(places, scope, unit, Buffer::Parameters, Place::Device)
        }
        _ => Ok(()),
    }
}

/// Buffers are offloaded only to where the policy says.
fn check_tier(scope: &Scope<'_>, unit: usize, buffer: Buffer, tier: Tier) -> Result<(), String> {
    let expected = match buffer {
        Buffer::Optimizer => scope.policy.optimizer_tier,
        Buffer::Gradients => scope.policy.gradient_tier,
        Buffer::Activations { .. } => scope.policy.activation_tier,
        Buffer::Parameters => scope.policy.parameter_tier,
    };
    match expected == Some(tier) {
        true => Ok(()),
        false => Err(format!("{} are not offloaded there", describe(scope, unit, buffer))),
    }
}

/// A pass computes with the parameters that a rank keeps, unless they are sharded: then it computes with gathered ones.
fn expect_parameters(places: &Places, scope: &Scope<'_>, unit: usize) -> Result<(), String> {
    match scope.policy.sharding.parameters {
        true => Ok(()),
        false => {
            let read = scope.tied_here(unit).into_iter().chain([unit]);
            read.into_iter().try_for_each(|unit| expect(places, scope, unit, Buffer::Parameters, Place::Device))
        }
    }
}

fn expect(places: &Places, scope: &Scope<'_>, unit: usize, buffer: Buffer, expected: Place) -> Result<(), String> {
    let place = match (places.get(&(unit, buffer)), buffer) {
        (Some(place), _) => *place,
        (None, Buffer::Activations { .. }) => return Err(format!("{} do not exist", describe(scope, unit, buffer))),
        (None, _) => Place::Device,
    };
    match place == expected {
        true => Ok(()),
        false => {
            let what = describe(scope, unit, buffer);
            Err(format!("{what} are {}, but must be {}", place.name(), expected.name()))
        }
    }
}

fn describe(scope: &Scope<'_>, unit: usize, buffer: Buffer) -> String {
    let name = scope.name(unit);
    match buffer {
        Buffer::Parameters => format!("the parameters of {name}"),
        Buffer::Optimizer => format!("the optimizer states of {name}"),
        Buffer::Gradients => format!("the gradients of {name}"),
        Buffer::Activations { micro_batch } => format!("the activations of {name} in micro-batch {micro_batch}"),
    }
}
