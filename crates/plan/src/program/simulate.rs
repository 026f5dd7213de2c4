//! Simulates the programs of all ranks: how long a step takes, what it waits for, and what it holds.
//!
//! The simulation is a discrete-event run ([`execution`](super::execution)) with one rank per distinct program, because ranks that
//! differ only in their data do the same at the same time. So a call within a stage takes as long as the rank that sends the most,
//! and the cost does not grow with the number of ranks.
//!
//! The step is one of many: an all-gather that the update of one step starts may still run in the next, and the pool has the
//! buffers of earlier steps. All ranks start the step together.

mod durations;
mod memory;
mod pool;
mod report;
mod spans;
mod transfers;

use super::Program;
use super::collectives::{Call, calls};
use super::costs::{Costs, LinkCost};
use super::execution::execute;
use super::groups::GroupKind;
use super::policy::{Policy, UnitSpec};
use super::programs::{Party, Programs};
use super::topology::Topology;
use super::traffic::{Layout, Traffic, traffic};
use crate::mesh::{Axis, Mesh};
use durations::{Machine, Machines};
use report::Report;

pub use memory::{Memory, MemoryKind, MemoryUse, memory_use, tier_bytes};
pub use spans::{CommunicationTime, Lane, Span, WaitingTime};

/// The simulation of a step on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSimulation {
    /// The time of the slowest rank.
    pub step_s: f64,
    /// Each distinct program: those of the stages, then those of ranks with their own.
    pub programs: Vec<Simulation>,
}

impl StepSimulation {
    /// The simulation of the slowest rank.
    pub fn slowest(&self) -> &Simulation {
        let slower = |a: &&Simulation, b: &&Simulation| a.step_s.total_cmp(&b.step_s);
        self.programs.iter().max_by(slower).expect("a mesh has ranks, and each has a program")
    }
}

/// The simulation of one rank, or of all ranks with its program. Times are seconds since the start of the step.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// The rank: the lowest one with the program.
    pub rank: usize,
    /// The time of the step.
    pub step_s: f64,
    /// The work that the step could not be shorter without, in order, on whichever rank it is. Each span starts when the one before
    /// it ends.
    pub critical_path: Vec<Span>,
    /// The communication of units, and how much of it is hidden.
    pub communication: CommunicationTime,
    /// The time that the compute lane waits, by cause.
    pub waiting: WaitingTime,
    /// The bytes that the rank sends.
    pub traffic: Traffic,
    /// All work of the rank, by start. Time in which the compute lane has no span is spent waiting.
    pub timeline: Vec<Span>,
    /// When each instruction starts, by position.
    pub starts_s: Vec<f64>,
    /// The memory that the rank holds.
    pub memory: MemoryUse,
}

/// Simulates a step of all ranks of a mesh. The links are those of the topology, instead of [`Costs::links`].
///
/// # Panics
/// If there are costs of another number of units or programs of another number of stages, or if the programs wait for each other
/// forever, which [`check`](super::check) finds.
pub fn simulate(
    programs: &Programs,
    units: &[UnitSpec],
    policy: &Policy,
    topology: &Topology,
    costs: &Costs,
) -> StepSimulation {
    let parties = programs.parties(&topology.mesh);
    let machine = |party: &Party<'_>| {
        let links = GroupKind::ALL.map(|group| topology.link(group, party.rank));
        let costs = Costs { links, ..costs.clone() };
        Machine::new(party.program, topology.layout(party.rank), costs, topology.slowdown())
    };
    let machines: Vec<Machine> = parties.iter().map(machine).collect();
    let per_stage = topology.mesh.stride(Axis::Pipeline);
    let message_links = |from: usize, to: usize| {
        // Ranks that stand for many have their neighbors in their own column of the mesh.
        let receiver = parties[from].rank % per_stage + parties[to].stage * per_stage;
        topology.link_between(parties[from].rank, receiver)
    };
    let machines = Machines { units, policy, machines: &machines, message_links };
    run(&parties, &programs.stages_of_units(units.len()), &topology.mesh, &machines)
}

/// Simulates a step of one rank among equals: all ranks execute the same program, without a pipeline.
///
/// # Panics
/// If there are costs of another number of units, if the rank's index is not in its groups, or if the program waits for what it
/// does not start.
pub fn simulate_rank(
    program: &Program,
    units: &[UnitSpec],
    policy: &Policy,
    layout: &Layout,
    costs: &Costs,
) -> Simulation {
    let party = Party { rank: 0, stage: 0, program, is_exception: false };
    let mesh = Mesh::new(&[]).expect("a mesh of one rank is valid");
    let machine = Machine::new(program, *layout, costs.clone(), 1.);
    let message_links = |_, _| *costs.link(GroupKind::Pipeline);
    let machines = Machines { units, policy, machines: &[machine], message_links };
    run(&[party], &vec![Some(0); units.len()], &mesh, &machines).programs.remove(0)
}

/// Executes two steps, and reports the second.
fn run<L: Fn(usize, usize) -> LinkCost>(
    parties: &[Party<'_>],
    stages: &[Option<usize>],
    mesh: &Mesh,
    machines: &Machines<'_, L>,
) -> StepSimulation {
    let Machines { units, policy, machines: by_party, .. } = machines;
    let enough = by_party.iter().all(|machine| machine.costs.units.len() == units.len());
    assert!(enough, "every unit needs costs");
    let calls: Vec<Vec<(usize, Call)>> = parties.iter().map(|party| calls(party.program, units, policy)).collect();
    let before = execute(parties, &calls, (*units, stages), mesh, &[], machines);
    let step = execute(parties, &calls, (*units, stages), mesh, &before.unfinished(), machines);
    let blocked = step.first_blocked(|_| true).map(|party| parties[party].rank);
    assert!(blocked.is_none(), "rank {blocked:?} waits forever; check the programs first");
    let report = Report { execution: &step, ranks: parties.iter().map(|party| party.rank).collect() };
    let simulation = |(index, party): (usize, &Party<'_>)| {
        let Machine { layout, costs, .. } = &by_party[index];
        Simulation {
            rank: party.rank,
            step_s: step.lanes[index].now_s,
            critical_path: report.critical_path(index),
            communication: report.communication(index),
            waiting: report.waiting(index),
            traffic: traffic(party.program, units, policy, layout),
            timeline: report.timeline(index),
            starts_s: step.lanes[index].starts_s.clone(),
            memory: memory_use(party.program, units, policy, layout, costs),
        }
    };
    StepSimulation { step_s: step.end_s(), programs: parties.iter().enumerate().map(simulation).collect() }
}
