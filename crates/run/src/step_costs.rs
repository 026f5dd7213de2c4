//! What a step costs in time, as measured by `shardwise profile`, and what another step would cost.
//!
//! The costs belong to a model and a machine. They do not depend on how the step is sharded, so the time of a step with another
//! stage, prefetch, batch, `parallel.tensor`, `parallel.pipeline` or number of ranks can be simulated from them, but not with another
//! `parallel.expert`. They are kept in a JSON file that can be edited: to ask what a faster link would change, write its bandwidth into the file.

use std::path::Path;

use serde::{Deserialize, Serialize};
use shardwise_journal::Profile;
use shardwise_plan::program::{
    Lane, Layout, LinkCost, ModelParallel, SharedLink, StepSimulation, Tier, Topology, UnitSpec, simulate,
};
use shardwise_recipe::Recipe;
use shardwise_torch::tch::Device;
use shardwise_train::{ActivationCheckpointing, Offloading, Options, checked_programs, memory_costs, unit_specs};
use shardwise_zero::Moved;

use crate::build;
use crate::build::step_shape;
use crate::error::{Error, Result};

/// The measured costs of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepCosts {
    /// The number of tokens in the micro-batches that were measured.
    pub micro_batch_tokens: usize,
    /// The number of ranks that shared each layer in the steps that were measured (`parallel.tensor`).
    pub tensor: usize,
    /// The number of ranks that held different experts in those steps (`parallel.expert`).
    #[serde(default = "one")]
    pub expert: usize,
    /// The time of a step that belongs to no unit.
    pub overhead_s: f64,
    /// The cores of a host.
    pub cores_per_host: usize,
    /// The threads that a rank computes with.
    pub threads_per_rank: usize,
    /// The ranks on a host; all ranks are on one host if it is absent.
    #[serde(default)]
    pub ranks_per_host: Option<usize>,
    /// The link between ranks of a host. Its bandwidth is that of all ranks of the host together.
    pub within_host: Link,
    /// The link from a host to the others, which its ranks share.
    pub between_hosts: Link,
    /// The bandwidth of the disk that is offloaded to, in bytes per second, of all ranks of a host together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes_per_s: Option<f64>,
    /// The units, in the model's order.
    pub units: Vec<UnitTimes>,
}

/// What sending costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// The time of the smallest call.
    pub latency_s: f64,
    /// The bandwidth in bytes per second.
    pub bytes_per_s: f64,
    /// The CPU time per byte, which computation loses if it uses all cores.
    pub cpu_s_per_byte: f64,
}

/// The times of a unit, on each of the ranks that share it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitTimes {
    /// The unit's name.
    pub name: String,
    /// The forward pass of a micro-batch.
    pub forward_s: f64,
    /// The backward pass of a micro-batch.
    pub backward_s: f64,
    /// The update of all of its parameters.
    pub update_s: f64,
    /// The norm of all of its gradients.
    pub norm_s: f64,
}

/// How much faster or slower computation would be: 1 for no change.
pub(crate) type Speedup = f64;

impl StepCosts {
    /// Reads the costs from a file.
    pub fn read(path: &Path) -> Result<Self> {
        let fail = |problem: String| Error::Data { path: path.to_path_buf(), problem };
        let text = std::fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
        serde_json::from_str(&text).map_err(|error| fail(error.to_string()))
    }

    /// Writes the costs to a file.
    pub fn write(&self, path: &Path) -> Result<()> {
        let fail = |problem: String| Error::Data { path: path.to_path_buf(), problem };
        let text = serde_json::to_string_pretty(self).map_err(|error| fail(error.to_string()))?;
        std::fs::write(path, text + "\n").map_err(|error| fail(error.to_string()))
    }

    /// The costs from the profile of steps in which nothing was prefetched, so that computation and communication took turns.
    pub(crate) fn from_profile(profile: &Profile, measured: &MeasuredStep<'_>) -> Self {
        let MeasuredStep { units, layout, micro_batches, .. } = *measured;
        // Other work on the machine only makes steps longer, so the shortest step is the least disturbed one.
        let undisturbed = measured.least_step_s / profile.step_s.max(1e-12);
        let share = |unit: &UnitSpec, is_sharded: bool| match unit.trainable {
            0 => 1.,
            elements => elements as f64 / layout.kept_trainable(unit, is_sharded).max(1) as f64,
        };
        let unit_times = |unit: &UnitSpec| {
            let times = profile.units.iter().find(|times| times.unit == unit.name).cloned().unwrap_or_default();
            UnitTimes {
                name: unit.name.clone(),
                forward_s: undisturbed * times.forward_s / micro_batches as f64,
                backward_s: undisturbed * times.backward_s / micro_batches as f64,
                update_s: undisturbed * times.optimizer_s * share(unit, measured.shards_optimizer),
                norm_s: undisturbed * times.copy_s * share(unit, true),
            }
        };
        let accounted_s: f64 = profile.units.iter().map(|unit| unit.total_s()).sum();
        StepCosts {
            micro_batch_tokens: measured.micro_batch_tokens,
            tensor: measured.tensor,
            expert: measured.expert,
            overhead_s: undisturbed * (profile.step_s - accounted_s).max(0.),
            cores_per_host: measured.cores_per_host,
            threads_per_rank: measured.threads_per_rank,
            ranks_per_host: (measured.hosts > 1).then_some(measured.ranks_per_host),
            within_host: measured.link(profile, undisturbed),
            between_hosts: measured.link(profile, undisturbed),
            disk_bytes_per_s: measured.moved.map(|moved| bytes_per_s(moved) * measured.ranks_per_host as f64),
            units: units.iter().map(unit_times).collect(),
        }
    }

    /// Simulates a step of a recipe on this many ranks. Computation is `speedup` times as fast as it was measured.
    pub(crate) fn simulate(&self, recipe: &Recipe, ranks: usize, speedup: Speedup) -> Result<SimulatedStep> {
        let (model, options) = (build::model(recipe)?, build::options(recipe, build::intended_device(recipe))?);
        let shape = step_shape(recipe, ranks)?;
        let place = ModelParallel::of_rank(&recipe.mesh(ranks)?, 0);
        if place.expert.size != self.expert {
            let problem = "the costs were measured with parallel.expert";
            return Err(Error::Options(format!(
                "{problem} = {}, not {}; profile again",
                self.expert, place.expert.size
            )));
        }
        let (units, policy) = (unit_specs(&model, &options, &place, shape), options.policy(shape.micro_batches));
        self.check_units(&units)?;
        let topology = self.topology(recipe, &options, ranks)?;
        let mut costs = memory_costs(&model, &options, &place, shape);
        if options.offload != Offloading::default() {
            if options.device != Device::Cpu {
                let problem = "the time of offloading to the memory of the host cannot be predicted yet";
                return Err(Error::Options(problem.to_string()));
            }
            let Some(bytes_per_s) = self.disk_bytes_per_s else {
                let problem = "the costs were measured without offloading; profile with it, or add disk_bytes_per_s";
                return Err(Error::Options(problem.to_string()));
            };
            costs.tiers[Tier::Disk as usize] = LinkCost::new(0., bytes_per_s / topology.ranks_per_host as f64);
        }
        let layout = topology.layout(0);
        let share = |unit: &UnitSpec, is_sharded: bool| {
            layout.kept_trainable(unit, is_sharded) as f64 / unit.trainable.max(1) as f64
        };
        let per_micro_batch = self.scale_pass(shape.tokens(&place), place.tensor.size) / speedup;
        let recomputed = match policy.activation_checkpointing {
            ActivationCheckpointing::Selective => SELECTIVE_RECOMPUTATION,
            ActivationCheckpointing::None | ActivationCheckpointing::Full => 0.,
        };
        for ((cost, times), unit) in costs.units.iter_mut().zip(&self.units).zip(&units) {
            cost.forward_s = times.forward_s * per_micro_batch;
            cost.backward_s = (times.backward_s + recomputed * times.forward_s) * per_micro_batch;
            cost.update_s =
                times.update_s * self.scale_layer(place.tensor.size) * share(unit, options.sharding.optimizer);
            cost.norm_s = times.norm_s * self.scale_layer(place.tensor.size) * share(unit, true);
        }
        let programs = checked_programs(&units, &options, &topology.mesh, shape.micro_batches)?;
        let simulation = simulate(&programs, &units, &policy, &topology, &costs);
        Ok(SimulatedStep { step_s: simulation.step_s + self.overhead_s, simulation })
    }

    /// How many times as long a unit's pass takes as the one that was measured, for this many tokens on this many ranks that share it.
    pub(crate) fn scale_pass(&self, tokens: usize, tensor: usize) -> f64 {
        self.scale_layer(tensor) * tokens as f64 / self.micro_batch_tokens.max(1) as f64
    }

    /// How many times as large a rank's part of a unit is as the one that was measured, if this many ranks share it. What every rank
    /// has, such as a norm, is small enough to ignore.
    fn scale_layer(&self, tensor: usize) -> f64 {
        self.tensor.max(1) as f64 / tensor as f64
    }

    fn topology(&self, recipe: &Recipe, options: &Options, ranks: usize) -> Result<Topology> {
        let mesh = recipe.mesh(ranks)?;
        let ranks_per_host = self.ranks_per_host.unwrap_or(ranks).clamp(1, ranks);
        let shared = |link: Link| {
            let Link { latency_s, bytes_per_s, cpu_s_per_byte } = link;
            SharedLink { cost: LinkCost { latency_s, bytes_per_s, cpu_s_per_byte }, ranks: ranks_per_host }
        };
        Ok(Topology {
            mesh,
            ranks_per_host,
            cores_per_host: self.cores_per_host,
            threads_per_rank: self.threads_per_rank,
            within_host: shared(self.within_host),
            between_hosts: shared(self.between_hosts),
            parameter_bytes: options.precision.param_dtype.bytes(),
            gradient_bytes: options.precision.reduce_dtype.bytes(),
        })
    }

    pub(crate) fn check_units(&self, units: &[UnitSpec]) -> Result<()> {
        let is_same = self.units.iter().map(|unit| &unit.name).eq(units.iter().map(|unit| &unit.name));
        match is_same {
            true => Ok(()),
            false => Err(Error::Options("the costs are those of a model with other units".to_string())),
        }
    }
}

fn one() -> usize {
    1
}

/// The part of a forward pass that selective checkpointing repeats: norms, attention and activation functions.
const SELECTIVE_RECOMPUTATION: f64 = 0.15;

/// How the measured steps were carried out.
#[derive(Clone, Copy)]
pub(crate) struct MeasuredStep<'a> {
    pub(crate) units: &'a [UnitSpec],
    pub(crate) layout: Layout,
    pub(crate) shards_optimizer: bool,
    pub(crate) micro_batches: usize,
    pub(crate) micro_batch_tokens: usize,
    pub(crate) tensor: usize,
    pub(crate) expert: usize,
    pub(crate) hosts: usize,
    pub(crate) ranks_per_host: usize,
    pub(crate) cores_per_host: usize,
    pub(crate) threads_per_rank: usize,
    pub(crate) latency_s: f64,
    pub(crate) least_step_s: f64,
    /// What the rank has moved between memory and disks, if it offloads anything.
    pub(crate) moved: Option<Moved>,
}

/// The bandwidth of a rank's disk while it reads or writes.
pub(crate) fn bytes_per_s(moved: Moved) -> f64 {
    (moved.read_bytes + moved.written_bytes) as f64 / (moved.read_s + moved.write_s).max(1e-9)
}

impl MeasuredStep<'_> {
    /// The link that the steps used. Within a host, a rank's own thread moves every byte.
    fn link(&self, profile: &Profile, undisturbed: f64) -> Link {
        let moving_s: f64 = profile.verbs.iter().map(|verb| undisturbed * verb.moving_s).sum();
        let sent_bytes: f64 = profile.verbs.iter().map(|verb| verb.sent_bytes).sum();
        let of_rank = if moving_s > 0. { sent_bytes / moving_s } else { FREE_BYTES_PER_S };
        let cpu_s_per_byte = if self.hosts > 1 { 0. } else { 1. / of_rank };
        Link { latency_s: self.latency_s, bytes_per_s: of_rank * self.ranks_per_host as f64, cpu_s_per_byte }
    }
}

/// The bandwidth if nothing was sent, so that none could be measured.
const FREE_BYTES_PER_S: f64 = 1e12;

/// The simulation of a step.
pub(crate) struct SimulatedStep {
    pub(crate) step_s: f64,
    pub(crate) simulation: StepSimulation,
}

/// Simulates a step of a recipe from measured costs. Returns a text.
pub fn describe_simulated_step(recipe: &Recipe, ranks: usize, costs: &StepCosts) -> Result<String> {
    let SimulatedStep { step_s, simulation } = costs.simulate(recipe, ranks, 1.)?;
    let tokens = recipe.batch(ranks)?.global_batch_size * recipe.batch.seq_len;
    let slowest = simulation.slowest();
    let waiting = &slowest.waiting;
    let percent = |seconds: f64| 100. * seconds / step_s.max(1e-12);
    let mut text = format!(
        "a step of {tokens} tokens would take about {step_s:.3} s, {:.0} tokens/s\n  {:.0}% of the communication is hidden; ranks \
         wait for {:.3} s ({:.0}%): for parameters {:.3} s, for gradients {:.3} s\n  it sends {:.1} MB per rank",
        tokens as f64 / step_s.max(1e-12),
        100. * slowest.communication.hidden_share(),
        waiting.total_s(),
        percent(waiting.total_s()),
        waiting.gather_s,
        waiting.reduce_s + waiting.reduce_scatter_s,
        slowest.traffic.total_bytes() as f64 / 1e6,
    );
    let mut path: Vec<_> = slowest.critical_path.iter().map(|span| (span.end_s - span.start_s, &span.label)).collect();
    path.sort_by(|a, b| b.0.total_cmp(&a.0));
    let longest = path.iter().take(3).map(|(seconds, label)| format!("{label} ({:.0}%)", percent(*seconds)));
    text += &format!("\n  longest on the critical path: {}", longest.collect::<Vec<_>>().join(", "));
    Ok(text)
}

/// The simulated time of each unit: what it computes, and what the compute lane waits for before that.
pub(crate) fn unit_times(units: usize, step: &SimulatedStep) -> Vec<f64> {
    let mut times = vec![0.; units];
    let mut before_s = 0.;
    let timeline = &step.simulation.slowest().timeline;
    for span in timeline.iter().filter(|span| span.lane == Lane::Compute) {
        if let Some(unit) = span.unit {
            times[unit] += span.end_s - before_s;
        }
        before_s = span.end_s;
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::tests::recipe;

    #[test]
    fn ranks_that_share_layers_divide_their_times() {
        let recipe = |tensor: usize| recipe(&format!("[zero]\nstage = 0\n[parallel]\ntensor = {tensor}\n"));
        let times =
            |name: &str| UnitTimes { name: name.to_string(), forward_s: 1., backward_s: 2., update_s: 0.5, norm_s: 0. };
        let free = Link { latency_s: 0., bytes_per_s: f64::INFINITY, cpu_s_per_byte: 0. };
        let costs = StepCosts {
            micro_batch_tokens: 8,
            tensor: 2,
            expert: 1,
            overhead_s: 0.,
            cores_per_host: 64,
            threads_per_rank: 1,
            ranks_per_host: None,
            within_host: free,
            between_hosts: free,
            disk_bytes_per_s: None,
            units: ["embedding", "block.0", "head"].map(times).to_vec(),
        };
        for (tensor, expected_s) in [(1, 21.), (2, 10.5), (3, 7.)] {
            let step = costs.simulate(&recipe(tensor), tensor, 1.).unwrap();
            assert!((step.step_s - expected_s).abs() < 1e-9, "tensor {tensor}: {} s", step.step_s);
        }
    }
}
