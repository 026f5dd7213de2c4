//! What a run needs of a rank's memory, before it starts.
//!
//! Parameters, gradients and optimizer state are counted exactly. Buffers, activations and what a unit makes in passing are
//! estimated from the shapes; `cargo xtask show zero/fits` prints the estimate above what runs really take.

use std::fmt;

use shardwise_checkpoint::SaveId;
use shardwise_model::{Footprint, Model};
use shardwise_plan::{Dtype, Partition};
use shardwise_torch::tch::Device;
use shardwise_zero::Sharding;

use crate::recipe::{AccumulationRecipe, FloatRecipe, Recipe, RecomputationRecipe};
use crate::state::layouts;
use crate::{Accumulation, Options, Recomputation, Result};

/// What a process has with libtorch and MPI before it holds a model.
const PROCESS_BYTES: usize = 300 << 20;

/// Bytes that the rank with the most needs at the moment when it needs the most, by what for.
///
/// That moment is in the backward pass of some unit: the activations of the units after it are gone by then, and their gradients
/// are there; in the last unit's it is the other way round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Parameters, in the type in which units compute.
    pub parameters: usize,
    /// Gradients, once reduced, of the units whose backward pass has begun.
    pub gradients: usize,
    /// f32 masters and optimizer state.
    pub optimizer: usize,
    /// Whole units on their way: parameters at stage 3, gradients from stage 2 on.
    pub in_flight: usize,
    /// What forward passes leave for backward passes.
    pub activations: usize,
    /// What the unit with the most makes in passing.
    pub passing: usize,
    /// What other ranks send to be written for a checkpoint, and what is copied of the own state meanwhile.
    pub saving: usize,
    /// The process itself.
    pub process: usize,
}

impl Need {
    /// Of a recipe on so many ranks.
    pub fn of(recipe: &Recipe, ranks: usize) -> Result<Self> {
        let options = recipe.options(Device::Cpu)?;
        recipe.check_replicas(ranks)?;
        let batch = recipe.batch(ranks)?;
        let shard = ranks / recipe.sharding.replicas;
        let positions = recipe.batch.positions;
        let batch = [batch.sequences * positions, positions, batch.micro_batches];
        let model = recipe.model()?;
        let mut need = Need::of_model(&model, &options, shard, batch);
        if let Some(checkpoints) = &recipe.checkpoints {
            // A save that training waits for is written from where the state is.
            let buffer = if checkpoints.background { checkpoints.buffer } else { 0 };
            need.saving = saving(&model, &options, shard, recipe.sharding.replicas, buffer);
        }
        Ok(need)
    }

    /// Of a model that is cut among `shard` ranks. `batch` is the number of tokens of a micro-batch, the positions of a sequence
    /// and the number of micro-batches.
    fn of_model(model: &Model, options: &Options, shard: usize, batch: [usize; 3]) -> Self {
        let [tokens, positions, micro_batches] = batch;
        let Sharding { optimizer, gradients, parameters } = options.sharding;
        let (parameter_bytes, gradient_bytes) =
            (options.precision.parameters.bytes(), options.precision.gradients.bytes());
        let masters = usize::from(options.precision.parameters != Dtype::F32);
        let state_bytes = (masters + options.optimizer.states()) * Dtype::F32.bytes();
        let kept = |elements: usize, sliced: bool| {
            if sliced { Partition::new(elements, shard).part_len(0) } else { elements }
        };
        let mut need = Need { process: PROCESS_BYTES, ..Need::default() };
        let units = model.units();
        let mut wholes = Vec::new();
        let mut passes = Vec::new();
        for (index, unit) in units.iter().enumerate() {
            let trained = unit.parameters().iter().filter(|p| p.trainable).map(|p| p.elements()).sum::<usize>();
            need.parameters += kept(unit.elements(), parameters) * parameter_bytes;
            need.optimizer += kept(trained, optimizer) * state_bytes;
            let tied = unit.tied().map_or(0, |tied| units[tied.unit].elements());
            wholes.push((unit.elements() + tied, trained));
            let last = index + 1 == units.len();
            let again = options.recomputation == Recomputation::Full && unit.backward_reads_parameters() && !last;
            let Footprint { kept_bytes, output_bytes, passing_bytes } =
                unit.footprint(tokens, positions, parameter_bytes, options.recomputation.activations());
            // What is computed again is all there for as long as the unit's backward pass takes.
            let (activations, computed) = if again { (output_bytes, kept_bytes) } else { (kept_bytes, 0) };
            passes.push(Pass {
                activations,
                passing: passing_bytes + computed + trained * parameter_bytes,
                gradients: kept(trained, gradients) * gradient_bytes,
            });
        }
        // A tied parameter's gradient is there from the backward pass of the unit that uses it on. A sliced one is in flight till then.
        for (index, unit) in units.iter().enumerate().filter(|_| !gradients) {
            if let Some(tied) = unit.tied() {
                let bytes = std::mem::take(&mut passes[tied.unit].gradients);
                passes[index].gradients += bytes;
            }
        }
        let accumulates = micro_batches > 1;
        let worst = worst(&passes, accumulates);
        (need.activations, need.passing, need.gradients) = (worst.activations, worst.passing, worst.gradients);
        // Units that follow each other share buffers of the largest inner unit's size, and the first and the last one more.
        let flying = |size: &dyn Fn(&(usize, usize)) -> usize| {
            let ends = wholes.first().into_iter().chain(wholes.last()).map(size).max().unwrap_or(0);
            let inner_units = units.len().saturating_sub(2);
            let inner = wholes.iter().skip(1).take(inner_units).map(size).max().unwrap_or(0);
            ends + inner * (1 + options.units_in_flight).min(inner_units)
        };
        if parameters {
            need.in_flight += flying(&|&(all, _)| all) * parameter_bytes;
        }
        if gradients {
            let whole = accumulates && options.accumulation == Accumulation::Whole;
            let trained: usize = wholes.iter().map(|&(_, trained)| trained).sum();
            need.in_flight += if whole { trained } else { flying(&|&(_, trained)| trained) } * gradient_bytes;
        }
        need
    }

    /// All of it.
    pub fn total(&self) -> usize {
        let Need { parameters, gradients, optimizer, in_flight, activations, passing, saving, process } = *self;
        parameters + gradients + optimizer + in_flight + activations + passing + saving + process
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, bytes) in [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("units in flight", self.in_flight),
            ("activations", self.activations),
            ("in passing", self.passing),
            ("saving", self.saving),
            ("process", self.process),
        ] {
            writeln!(f, "  {what:16} {:>10}", gib(bytes))?;
        }
        write!(f, "  {:16} {:>10}", "together", gib(self.total()))
    }
}

/// What a unit's backward pass needs.
#[derive(Clone, Copy, Default)]
struct Pass {
    /// What its forward pass leaves for it, and is free once it has ended.
    activations: usize,
    /// What it makes in passing.
    passing: usize,
    /// What it makes for the update.
    gradients: usize,
}

/// The needs in the backward pass that needs the most, beside those that are the same in all. Gradients of earlier micro-batches
/// are there from the beginning.
fn worst(passes: &[Pass], accumulates: bool) -> Pass {
    let at = |index: usize| Pass {
        activations: passes[..=index].iter().map(|pass| pass.activations).sum(),
        passing: passes[index].passing,
        gradients: passes[if accumulates { 0 } else { index }..].iter().map(|pass| pass.gradients).sum(),
    };
    let total = |pass: &Pass| pass.activations + pass.passing + pass.gradients;
    (0..passes.len()).map(at).max_by_key(total).unwrap_or_default()
}

/// What a checkpoint takes on the rank with the most: what it writes for others, and of its own as much as the buffer has room for.
fn saving(model: &Model, options: &Options, shard: usize, replicas: usize, buffer: u64) -> usize {
    let mut written = vec![[0; 2]; shard * replicas];
    for (unit, layout) in layouts(model, options, shard).iter().enumerate() {
        for file in layout.files(SaveId::from(0)) {
            let of_writer = file.segments.iter().filter(|segment| segment.owner == file.writer);
            let own: u64 = of_writer.map(|segment| segment.bytes).sum();
            let [owns, others] = &mut written[unit % replicas * shard + file.writer];
            *owns += own;
            *others += file.bytes() - own;
        }
    }
    written.into_iter().map(|[own, others]| others + own.min(buffer)).max().unwrap_or(0) as usize
}

/// The least change of a recipe that fits into `limit` bytes: which keys to what, and what it needs then.
pub fn remedy(recipe: &Recipe, ranks: usize, limit: usize) -> Option<(Vec<&'static str>, Need)> {
    type Change<'a> = (&'static str, &'a dyn Fn(&mut Recipe) -> bool);
    let micro_batches = recipe.batch(ranks).ok()?.micro_batches;
    // From the cheapest to the dearest in speed. A change says whether it changes anything.
    let changes: [Change<'_>; 7] = [
        ("sharding.stage = 3", &|recipe: &mut Recipe| std::mem::replace(&mut recipe.sharding.stage, 3) != 3),
        ("recomputation = \"selective\"", &|recipe: &mut Recipe| {
            let none = recipe.recomputation == RecomputationRecipe::None;
            recipe.recomputation = RecomputationRecipe::Selective;
            none
        }),
        ("recomputation = \"full\"", &|recipe: &mut Recipe| {
            std::mem::replace(&mut recipe.recomputation, RecomputationRecipe::Full) != RecomputationRecipe::Full
        }),
        ("sharding.accumulation = \"sharded\"", &|recipe: &mut Recipe| {
            let whole = recipe.sharding.accumulation == AccumulationRecipe::Whole;
            recipe.sharding.accumulation = AccumulationRecipe::Sharded;
            whole && micro_batches > 1 && recipe.sharding.stage >= 2
        }),
        ("sharding.units_in_flight = 0", &|recipe: &mut Recipe| {
            std::mem::replace(&mut recipe.sharding.units_in_flight, 0) != 0
        }),
        ("sharding.replicas = 1", &|recipe: &mut Recipe| std::mem::replace(&mut recipe.sharding.replicas, 1) != 1),
        ("precision.parameters = \"bf16\"", &|recipe: &mut Recipe| {
            std::mem::replace(&mut recipe.precision.parameters, FloatRecipe::Bf16) == FloatRecipe::F32
        }),
    ];
    let mut subsets: Vec<u32> = (1..1 << changes.len()).collect();
    subsets.sort_by_key(|subset| (subset.count_ones(), *subset));
    subsets.into_iter().find_map(|subset| {
        let mut changed = recipe.clone();
        let mut keys = Vec::new();
        for (index, (key, change)) in changes.iter().enumerate() {
            if subset & (1 << index) != 0 {
                if !change(&mut changed) {
                    return None;
                }
                keys.push(*key);
            }
        }
        let need = Need::of(&changed, ranks).ok()?;
        (need.total() <= limit).then_some((keys, need))
    })
}

/// The memory that a rank may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// How much.
    pub bytes: usize,
    /// What limits it.
    pub what: &'static str,
    /// What of the process counts towards it, as `/proc/self/status` calls it.
    pub counts: &'static str,
}

/// The memory that a rank may use: by the process's own limits, and its share of what the host's control group allows and the
/// host has available, beside the bytes that the rank has already.
pub fn limit(ranks_here: usize, resident_bytes: usize) -> Option<Limit> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let limits = read("/proc/self/limits");
    let own = |name: &str| -> Option<usize> {
        let line = limits.lines().find(|line| line.starts_with(name))?;
        line[name.len()..].split_whitespace().next()?.parse().ok()
    };
    let group: Option<usize> = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        .iter()
        .find_map(|path| read(path).trim().parse().ok());
    let meminfo = read("/proc/meminfo");
    let available = meminfo
        .lines()
        .find(|line| line.starts_with("MemAvailable:"))
        .and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok())
        .map(|kib| kib << 10);
    let share = |bytes: usize| bytes / ranks_here.max(1);
    let beside = |bytes: usize| share(bytes) + resident_bytes;
    [
        (own("Max data size"), "the limit of a process's data (ulimit -d)", "VmData:"),
        (own("Max address space"), "the limit of a process's address space (ulimit -v)", "VmSize:"),
        (group.map(share), "this rank's share of its control group's memory", "VmRSS:"),
        (available.map(beside), "this rank's share of the memory that is available", "VmRSS:"),
    ]
    .into_iter()
    .filter_map(|(bytes, what, counts)| Some(Limit { bytes: bytes?, what, counts }))
    .min_by_key(|limit| limit.bytes)
}

/// Bytes for people.
pub fn gib(bytes: usize) -> String {
    match bytes as f64 / f64::from(1 << 30) {
        much if much >= 1. => format!("{much:.2} GiB"),
        little => format!("{:.0} MiB", little * 1024.),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_backward_pass_is_the_one_that_is_counted() {
        let pass = |activations, passing, gradients| Pass { activations, passing, gradients };
        let found = |passes: &[Pass], accumulates| {
            let Pass { activations, passing, gradients } = worst(passes, accumulates);
            (activations, passing, gradients)
        };
        // Many activations: in the last unit's. Many gradients: in the first one's, when all of them are there.
        assert_eq!(found(&[pass(10, 1, 3), pass(10, 1, 3), pass(5, 7, 3)], false), (25, 7, 3));
        assert_eq!(found(&[pass(1, 1, 30), pass(1, 2, 30), pass(1, 7, 30)], false), (1, 1, 90));
        assert_eq!(found(&[pass(1, 1, 30), pass(1, 2, 30), pass(1, 7, 30)], true), (3, 7, 90));
    }
}
