//! The memory estimate of a run, before it starts.
//!
//! The step's program is simulated (`shardwise_plan::program`) with the sizes of the model's units. `cargo xtask show program/memory`
//! prints the estimate next to the memory that runs actually use.

use std::fmt;
use std::path::PathBuf;

use shardwise_checkpoint::SaveId;
use shardwise_journal::format::format_memory_fixed;
use shardwise_model::Model;
use shardwise_plan::program::{
    Layout, Memory, MemoryKind, MemoryUse, ModelParallel, Program, Tier, memory_use, tier_bytes,
};
use shardwise_plan::{Axis, Mesh};
use shardwise_recipe::{ActivationCheckpointingRecipe, DeviceRecipe, FloatRecipe, HOST, Recipe};
use shardwise_train::{Options, checked_programs, checkpoint_layouts, memory_costs, stages_of_units, unit_specs};

use crate::build::{self, step_shape};
use crate::error::Result;
use crate::memory_limit::{Counted, MemoryLimit};

/// The memory of a process with libtorch and MPI, without a model: measured with libtorch 2.13 on the CPU, one thread, and Open MPI on
/// one host. The number of ranks, and what they send each other, make no measurable difference.
const PROCESS_BYTES: usize = 160 << 20;

/// What counts as data of that, for limits on a process's data: no libraries, no memory shared with other ranks, but memory that is
/// mapped and not used. Measured with `cargo xtask show program/limits`.
const PROCESS_DATA_BYTES: usize = 120 << 20;

/// The peak memory of the rank that needs the most, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// What a step holds at its peak, by kind.
    pub step: Memory,
    /// The instruction of the step's program during which it holds that.
    pub peak_instruction: String,
    /// Shards received from other ranks to be written to a checkpoint, and copies of this rank's own state.
    pub saving: usize,
    /// The process without a model: libtorch, MPI and the program.
    pub process: usize,
    /// What a rank that computes on a device offloads to its host.
    pub offloaded: usize,
}

impl MemoryEstimate {
    /// The estimate for a recipe on this many ranks.
    pub fn of(recipe: &Recipe, ranks: usize) -> Result<Self> {
        // Attention needs less memory on a GPU.
        let device = build::intended_device(recipe);
        let (options, model) = (build::options(recipe, device)?, build::model(recipe)?);
        let StepMemory { program, memory, offloaded } = simulate_memory(recipe, &model, &options, ranks)?;
        let peak_instruction = program.instructions.get(memory.peak_position);
        let mesh = recipe.mesh(ranks)?;
        let stages = stages_of_units(model.units().len(), &options, &mesh)?;
        Ok(MemoryEstimate {
            step: memory.peak(),
            peak_instruction: peak_instruction.map(|peak| program.describe(peak)).unwrap_or_default(),
            saving: recipe.checkpoints.as_ref().map_or(0, |checkpoints| {
                // A blocking save needs no buffer.
                let buffer = if checkpoints.background { checkpoints.buffer_bytes } else { 0 };
                saving(&model, &options, &mesh, &stages, buffer)
            }),
            process: PROCESS_BYTES,
            offloaded,
        })
    }

    /// The same estimate as a limit counts it.
    #[must_use]
    pub fn as_counted_by(self, limit: &MemoryLimit) -> Self {
        let process = match limit.counts {
            Counted::Data => PROCESS_DATA_BYTES,
            Counted::Resident | Counted::AddressSpace => self.process,
            // What CUDA itself holds is not part of the limit, and saving needs memory of the host.
            Counted::Device(_) => return MemoryEstimate { process: 0, saving: 0, ..self },
        };
        MemoryEstimate { process, ..self }
    }

    /// What a rank that computes on a device needs on its host.
    pub fn host_bytes(&self) -> usize {
        self.saving + self.process + self.offloaded
    }

    /// The tensors of a step and of a save.
    pub fn tensors(&self) -> usize {
        self.step.total_bytes() + self.saving
    }

    /// The sum of all parts.
    pub fn total(&self) -> usize {
        self.tensors() + self.process
    }
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_step = MemoryKind::ALL.map(|kind| (kind.name(), self.step.bytes(kind)));
        for (what, bytes) in of_step.into_iter().chain([("saving", self.saving), ("process", self.process)]) {
            writeln!(f, "  {what:16} {:>10}", format_memory_fixed(bytes))?;
        }
        writeln!(f, "  {:16} {:>10}", "total", format_memory_fixed(self.total()))?;
        if self.offloaded > 0 {
            writeln!(f, "  {:16} {:>10}", "on the host", format_memory_fixed(self.offloaded))?;
        }
        write!(f, "  at the peak, in: {}", self.peak_instruction)
    }
}

/// The memory of the rank that holds the most.
pub(crate) struct StepMemory {
    /// The program of a step.
    pub(crate) program: Program,
    /// What it holds.
    pub(crate) memory: MemoryUse,
    /// What it offloads to the memory of the host.
    pub(crate) offloaded: usize,
}

/// The memory of a step of a recipe.
pub(crate) fn simulate_memory(recipe: &Recipe, model: &Model, options: &Options, ranks: usize) -> Result<StepMemory> {
    let shape = step_shape(recipe, ranks)?;
    // The first rank has the largest parts.
    let mesh = recipe.mesh(ranks)?;
    let (parameter_bytes, gradient_bytes) =
        (options.precision.param_dtype.bytes(), options.precision.reduce_dtype.bytes());
    let layout = Layout::of_rank(&mesh, 0, parameter_bytes, gradient_bytes);
    let place = ModelParallel::of_rank(&mesh, 0);
    let (units, policy) = (unit_specs(model, options, &place, shape), options.policy(shape.micro_batches));
    let programs = checked_programs(&units, options, &mesh, shape.micro_batches)?;
    let costs = memory_costs(model, options, &place, shape);
    let of_stage = |program: Program| {
        let memory = memory_use(&program, &units, &policy, &layout, &costs);
        let offloaded = tier_bytes(&program, &units, &policy, &layout, &costs, Tier::Host);
        StepMemory { program, memory, offloaded }
    };
    let stages = programs.stages.into_iter().map(of_stage);
    let peak_bytes = |stage: &StepMemory| stage.memory.peak().total_bytes();
    Ok(stages.max_by_key(peak_bytes).expect("a pipeline has at least one stage"))
}

/// The memory of a save on the rank that needs the most: the shards of others that it writes, and a copy of its own shards up to
/// the size of the buffer.
fn saving(model: &Model, options: &Options, mesh: &Mesh, stage_of_unit: &[usize], buffer: u64) -> usize {
    let (replicas, per_stage) = (mesh.size(Axis::Replicate), mesh.stride(Axis::Pipeline));
    let owners = per_stage / replicas;
    let mut written = vec![[0; 2]; mesh.ranks()];
    for (unit, layout) in checkpoint_layouts(model, options, mesh).iter().enumerate() {
        for file in layout.files(SaveId::from(0)) {
            let of_writer = file.segments.iter().filter(|segment| segment.owner == file.writer);
            let own: u64 = of_writer.map(|segment| segment.bytes).sum();
            let [owns, others] = &mut written[stage_of_unit[unit] * per_stage + unit % replicas * owners + file.writer];
            *owns += own;
            *others += file.bytes() - own;
        }
    }
    written.into_iter().map(|[own, others]| others + own.min(buffer)).max().unwrap_or(0) as usize
}

/// Finds the smallest change to a recipe that makes its tensors fit into `room` bytes. Returns the settings and their estimate.
pub fn find_settings_that_fit(
    recipe: &Recipe,
    ranks: usize,
    room: usize,
) -> Option<(Vec<&'static str>, MemoryEstimate)> {
    type Change<'a> = (&'static str, &'a dyn Fn(&mut Recipe) -> bool);
    let micro_batches = recipe.batch(ranks).ok()?.gradient_accumulation_steps;
    // Ordered from the smallest to the largest cost in speed. Each returns whether it changes anything.
    let changes: [Change<'_>; 11] = [
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
        ("offload.optimizer = \"a folder on a fast disk\"", &|recipe: &mut Recipe| {
            // The estimate does not look into it.
            recipe.run.device == DeviceRecipe::Cpu && recipe.offload.optimizer.replace(PathBuf::new()).is_none()
        }),
        ("offload.parameters = \"a folder on a fast disk\"", &|recipe: &mut Recipe| {
            let is_possible = recipe.run.device == DeviceRecipe::Cpu && recipe.zero.stage == 3;
            is_possible && recipe.offload.parameters.replace(PathBuf::new()).is_none()
        }),
        ("offload.optimizer = \"host\"", &|recipe: &mut Recipe| {
            recipe.run.device != DeviceRecipe::Cpu && recipe.offload.optimizer.replace(HOST.into()).is_none()
        }),
        ("offload.parameters = \"host\"", &|recipe: &mut Recipe| {
            let is_possible = recipe.run.device != DeviceRecipe::Cpu && recipe.zero.stage == 3;
            is_possible && recipe.offload.parameters.replace(HOST.into()).is_none()
        }),
    ];
    let mut subsets: Vec<u32> = (1..1 << changes.len()).collect();
    // Another tier is the last resort.
    let is_slow = |&index: &usize| changes[index].0.starts_with("offload.");
    let offloads = |subset: u32| (0..changes.len()).filter(is_slow).filter(|index| subset & (1 << index) != 0).count();
    subsets.sort_by_key(|&subset| (offloads(subset), subset.count_ones(), subset));
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
        (estimate.tensors() <= room).then_some((keys, estimate))
    })
}
