//! The memory estimate of a run, before it starts.
//!
//! Parameters, gradients and optimizer state are counted exactly. Buffers, activations and temporaries are estimated from the
//! shapes; `cargo xtask show zero/fits` prints the estimate next to the memory that runs actually use.

use std::fmt;

use shardwise_checkpoint::SaveId;
use shardwise_journal::format::format_memory_fixed;
use shardwise_model::{Footprint, Model};
use shardwise_plan::{Dtype, Partition};
use shardwise_recipe::{ActivationCheckpointingRecipe, FloatRecipe, Recipe};
use shardwise_torch::tch::Device;
use shardwise_train::{ActivationCheckpointing, Options, checkpoint_layouts};
use shardwise_zero::Sharding;

use crate::build;
use crate::error::Result;

/// The memory of a process with libtorch and MPI, without a model.
const PROCESS_BYTES: usize = 300 << 20;

/// The peak memory of the rank that needs the most, in bytes.
///
/// The peak is in some unit's backward pass. By then the activations of later units have been freed, and their gradients exist. So
/// the peak is late in the backward pass if gradients dominate, and early if activations do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Parameters, in the type in which units compute.
    pub parameters: usize,
    /// Reduced gradients of the units whose backward pass has started.
    pub gradients: usize,
    /// f32 master weights and optimizer state.
    pub optimizer: usize,
    /// Unsharded units: parameters at stage 3, gradients from stage 2 on.
    pub unsharded: usize,
    /// Activations kept for the backward pass.
    pub activations: usize,
    /// The temporaries of the unit with the most.
    pub temporaries: usize,
    /// Shards received from other ranks to be written to a checkpoint, and copies of this rank's own state.
    pub saving: usize,
    /// The process without a model: libtorch, MPI and the program.
    pub process: usize,
}

impl MemoryEstimate {
    /// The estimate for a recipe on this many ranks.
    pub fn of(recipe: &Recipe, ranks: usize) -> Result<Self> {
        let options = build::options(recipe, Device::Cpu)?;
        recipe.check_replicas(ranks)?;
        let batch = recipe.batch(ranks)?;
        let shard = ranks / recipe.parallel.replicate;
        let positions = recipe.batch.seq_len;
        let batch = [batch.micro_batch_size * positions, positions, batch.gradient_accumulation_steps];
        let model = build::model(recipe)?;
        let mut estimate = MemoryEstimate::of_model(&model, &options, shard, batch);
        if let Some(checkpoints) = &recipe.checkpoints {
            // A blocking save needs no buffer.
            let buffer = if checkpoints.background { checkpoints.buffer_bytes } else { 0 };
            estimate.saving = saving(&model, &options, shard, recipe.parallel.replicate, buffer);
        }
        Ok(estimate)
    }

    /// The estimate for a model sharded among `shard` ranks. `batch` is the tokens of a micro-batch, the sequence length and the
    /// number of micro-batches.
    fn of_model(model: &Model, options: &Options, shard: usize, batch: [usize; 3]) -> Self {
        let [tokens, positions, micro_batches] = batch;
        let Sharding { optimizer, gradients, parameters } = options.sharding;
        let (parameter_bytes, gradient_bytes) =
            (options.precision.param_dtype.bytes(), options.precision.reduce_dtype.bytes());
        let masters = usize::from(options.precision.param_dtype != Dtype::F32);
        let state_bytes = (masters + options.optimizer.states()) * Dtype::F32.bytes();
        let kept = |elements: usize, sharded: bool| {
            if sharded { Partition::new(elements, shard).part_len(0) } else { elements }
        };
        let mut estimate = MemoryEstimate { process: PROCESS_BYTES, ..MemoryEstimate::default() };
        let units = model.units();
        let mut unsharded_units = Vec::new();
        let mut passes = Vec::new();
        for (index, unit) in units.iter().enumerate() {
            let trainable = unit.parameters().iter().filter(|p| p.trainable).map(|p| p.elements()).sum::<usize>();
            estimate.parameters += kept(unit.elements(), parameters) * parameter_bytes;
            estimate.optimizer += kept(trainable, optimizer) * state_bytes;
            let tied = unit.tied().map_or(0, |tied| units[tied.unit].elements());
            unsharded_units.push((unit.elements() + tied, trainable));
            let last = index + 1 == units.len();
            let is_full = options.activation_checkpointing == ActivationCheckpointing::Full;
            let recomputed = is_full && unit.backward_reads_parameters() && !last;
            let Footprint { kept_bytes, output_bytes, temporary_bytes } =
                unit.footprint(tokens, positions, parameter_bytes, options.activation_checkpointing.into());
            // Recomputed activations exist only during the unit's backward pass.
            let (activations, computed) = if recomputed { (output_bytes, kept_bytes) } else { (kept_bytes, 0) };
            passes.push(Pass {
                activations,
                temporaries: temporary_bytes + computed + trainable * parameter_bytes,
                gradients: kept(trainable, gradients) * gradient_bytes,
            });
        }
        // A tied parameter's gradient exists from the backward pass of the unit that uses it. If sharded, it counts as unsharded
        // until it is reduced.
        for (index, unit) in units.iter().enumerate().filter(|_| !gradients) {
            if let Some(tied) = unit.tied() {
                let bytes = std::mem::take(&mut passes[tied.unit].gradients);
                passes[index].gradients += bytes;
            }
        }
        let accumulates = micro_batches > 1;
        let most_demanding = most_demanding(&passes, accumulates);
        (estimate.activations, estimate.temporaries, estimate.gradients) =
            (most_demanding.activations, most_demanding.temporaries, most_demanding.gradients);
        // Inner units share buffers of the largest one's size; the first and the last unit share one more.
        let buffers = |size: &dyn Fn(&(usize, usize)) -> usize| {
            let ends = unsharded_units.first().into_iter().chain(unsharded_units.last()).map(size).max().unwrap_or(0);
            let inner_units = units.len().saturating_sub(2);
            let inner = unsharded_units.iter().skip(1).take(inner_units).map(size).max().unwrap_or(0);
            ends + inner * (1 + options.prefetch).min(inner_units)
        };
        if parameters {
            estimate.unsharded += buffers(&|&(all, _)| all) * parameter_bytes;
        }
        if gradients {
            let whole = accumulates && !options.reduce_each_micro_batch;
            let trainable: usize = unsharded_units.iter().map(|&(_, trainable)| trainable).sum();
            estimate.unsharded +=
                if whole { trainable } else { buffers(&|&(_, trainable)| trainable) } * gradient_bytes;
        }
        estimate
    }

    /// The sum of all parts.
    pub fn total(&self) -> usize {
        let MemoryEstimate { parameters, gradients, optimizer, unsharded, activations, temporaries, saving, process } =
            *self;
        parameters + gradients + optimizer + unsharded + activations + temporaries + saving + process
    }
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, bytes) in [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("unsharded units", self.unsharded),
            ("activations", self.activations),
            ("temporaries", self.temporaries),
            ("saving", self.saving),
            ("process", self.process),
        ] {
            writeln!(f, "  {what:16} {:>10}", format_memory_fixed(bytes))?;
        }
        write!(f, "  {:16} {:>10}", "total", format_memory_fixed(self.total()))
    }
}

/// The memory of a unit's backward pass.
#[derive(Clone, Copy, Default)]
struct Pass {
    /// Kept by the unit's forward pass, and freed at the end of this pass.
    activations: usize,
    /// Allocated only during this pass.
    temporaries: usize,
    /// Kept until the update.
    gradients: usize,
}

/// The backward pass that needs the most memory. With gradient accumulation all gradients exist from the start.
fn most_demanding(passes: &[Pass], accumulates: bool) -> Pass {
    let at = |index: usize| Pass {
        activations: passes[..=index].iter().map(|pass| pass.activations).sum(),
        temporaries: passes[index].temporaries,
        gradients: passes[if accumulates { 0 } else { index }..].iter().map(|pass| pass.gradients).sum(),
    };
    let total = |pass: &Pass| pass.activations + pass.temporaries + pass.gradients;
    (0..passes.len()).map(at).max_by_key(total).unwrap_or_default()
}

/// The memory of a save on the rank that needs the most: the shards of others that it writes, and a copy of its own shards up to
/// the size of the buffer.
fn saving(model: &Model, options: &Options, shard: usize, replicas: usize, buffer: u64) -> usize {
    let mut written = vec![[0; 2]; shard * replicas];
    for (unit, layout) in checkpoint_layouts(model, options, shard).iter().enumerate() {
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

/// Finds the smallest change to a recipe that makes it fit into `limit` bytes. Returns the settings and their estimate.
pub fn find_settings_that_fit(
    recipe: &Recipe,
    ranks: usize,
    limit: usize,
) -> Option<(Vec<&'static str>, MemoryEstimate)> {
    type Change<'a> = (&'static str, &'a dyn Fn(&mut Recipe) -> bool);
    let micro_batches = recipe.batch(ranks).ok()?.gradient_accumulation_steps;
    // Ordered from the smallest to the largest cost in speed. Each returns whether it changes anything.
    let changes: [Change<'_>; 7] = [
        ("zero.stage = 3", &|recipe: &mut Recipe| std::mem::replace(&mut recipe.zero.stage, 3) != 3),
        ("activation_checkpointing = \"selective\"", &|recipe: &mut Recipe| {
            let none = recipe.activation_checkpointing == ActivationCheckpointingRecipe::None;
            recipe.activation_checkpointing = ActivationCheckpointingRecipe::Selective;
            none
        }),
        ("activation_checkpointing = \"full\"", &|recipe: &mut Recipe| {
            let full = ActivationCheckpointingRecipe::Full;
            std::mem::replace(&mut recipe.activation_checkpointing, full) != full
        }),
        ("zero.reduce_each_micro_batch = true", &|recipe: &mut Recipe| {
            let was_set = std::mem::replace(&mut recipe.zero.reduce_each_micro_batch, true);
            !was_set && micro_batches > 1 && recipe.zero.stage >= 2
        }),
        ("zero.prefetch = 0", &|recipe: &mut Recipe| std::mem::replace(&mut recipe.zero.prefetch, 0) != 0),
        ("parallel.replicate = 1", &|recipe: &mut Recipe| std::mem::replace(&mut recipe.parallel.replicate, 1) != 1),
        ("precision.param_dtype = \"bf16\"", &|recipe: &mut Recipe| {
            std::mem::replace(&mut recipe.precision.param_dtype, FloatRecipe::Bf16) == FloatRecipe::F32
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
        let estimate = MemoryEstimate::of(&changed, ranks).ok()?;
        (estimate.total() <= limit).then_some((keys, estimate))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_demanding_backward_pass_is_counted() {
        let pass = |activations, temporaries, gradients| Pass { activations, temporaries, gradients };
        let found = |passes: &[Pass], accumulates| {
            let Pass { activations, temporaries, gradients } = most_demanding(passes, accumulates);
            (activations, temporaries, gradients)
        };
        // With many activations it is the last unit's; with many gradients it is the first unit's, when all gradients exist.
        assert_eq!(found(&[pass(10, 1, 3), pass(10, 1, 3), pass(5, 7, 3)], false), (25, 7, 3));
        assert_eq!(found(&[pass(1, 1, 30), pass(1, 2, 30), pass(1, 7, 30)], false), (1, 1, 90));
        assert_eq!(found(&[pass(1, 1, 30), pass(1, 2, 30), pass(1, 7, 30)], true), (3, 7, 90));
    }
}
