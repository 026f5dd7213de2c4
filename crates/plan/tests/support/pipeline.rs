//! Models, costs and machines for pipelines.

use shardwise_plan::Mesh;
use shardwise_plan::pipeline::{Pipeline, PipelineSchedule};
use shardwise_plan::program::{Costs, LinkCost, Policy, Programs, SharedLink, Topology, UnitCost, UnitSpec, build};

/// Equal blocks of 64 elements and 32 bytes of output.
pub(crate) fn blocks(count: usize) -> Vec<UnitSpec> {
    let block = |index| UnitSpec { output_bytes: 32, ..UnitSpec::new(&format!("block.{index}"), 64, true) };
    (0..count).map(block).collect()
}

/// Ties the last unit to the first.
pub(crate) fn tie(units: &mut [UnitSpec]) {
    let last = units.len() - 1;
    (units[last].tied, units[last].tied_elements) = (Some(0), 64);
}

/// Units that take 1 s forward and 2 s backward, and nothing for the rest. Links are free.
pub(crate) fn costs(units: &[UnitSpec]) -> Costs {
    let cost = |unit: &UnitSpec| UnitCost {
        name: unit.name.clone(),
        forward_s: 1.,
        backward_s: 2.,
        kept_bytes: 600,
        selective_bytes: 300,
        output_bytes: 32,
        ..UnitCost::default()
    };
    Costs {
        units: units.iter().map(cost).collect(),
        links: Costs::free_links_except(&[]),
        tiers: [LinkCost::FREE; 2],
        optimizer_element_bytes: 8,
    }
}

/// One rank per host, with free links and unlimited cores.
pub(crate) fn topology(mesh: Mesh) -> Topology {
    Topology {
        mesh,
        ranks_per_host: 1,
        cores_per_host: 1,
        threads_per_rank: 1,
        within_host: SharedLink::unshared(LinkCost::FREE),
        between_hosts: SharedLink::unshared(LinkCost::FREE),
        parameter_bytes: 4,
        gradient_bytes: 4,
    }
}

#[track_caller]
pub(crate) fn assert_close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-9 * expected.abs().max(1.), "{found} is not {expected}");
}

/// A step of a pipeline whose chunks have equally many units.
pub(crate) fn pipeline(units: &[UnitSpec], policy: &Policy, stages: usize, schedule: PipelineSchedule) -> Programs {
    let pipeline = Pipeline::even(units.len(), stages, schedule).unwrap();
    build::pipeline_step(units, policy, &pipeline).unwrap()
}
