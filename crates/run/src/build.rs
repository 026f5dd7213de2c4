//! Builds the model and the options of a recipe: maps its plain values to the types of the trainer.
//!
//! Defaults are those of `shardwise-recipe`. The tests below check that they agree with the defaults of the library.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use shardwise_comm::mpi;
use shardwise_model::{Model, Unit};
use shardwise_plan::pipeline_partition::{
    Constraints, GradientReduction, Replication, StateBytes, UnitProfile, Workers, partition_stages,
};
use shardwise_plan::program::{Codec, ModelParallel, Programs};
use shardwise_recipe::{
    ActivationCheckpointingRecipe, DeviceRecipe, HOST, NonFiniteRecipe, ParameterCodecRecipe, Recipe,
    ResolvedOptimizer, SupervisionRecipe,
};
use shardwise_torch::device::accelerators;
use shardwise_torch::tch::Device;
use shardwise_train::{
    ActivationCheckpointing, LossScale, OffloadPlace, Offloading, OnNonFinite, Options, PipelineSchedule, StepShape,
    checked_programs, unit_specs,
};
use shardwise_zero::{AdamW, Lamb, Optimizer, Precision, Sgd, Sharding};

use crate::error::Result;

/// Builds the model, with the parameters of `model.frozen` frozen, and with the layers that the recipe asks for: libtorch's or compiled
/// ones.
pub fn model(recipe: &Recipe) -> Result<Model> {
    let model = eager_model(recipe)?;
    let Some(package) = recipe.compiled_package() else { return Ok(model) };
    let compiled = model.with_compiled_layers(package);
    Ok(compiled.map_err(|error| recipe.sources.error_at("model.compiled", format!("model.compiled: {error}")))?)
}

/// Builds the model without the compiled layers of `model.compiled`, which cannot generate.
pub(crate) fn eager_model(recipe: &Recipe) -> Result<Model> {
    let mut model = Model::from_config(recipe.model_config()?)
        .map_err(|error| recipe.sources.error_at("model", format!("model: {error}")))?;
    model
        .freeze(&recipe.model.frozen)
        .map_err(|error| recipe.sources.error_at("model.frozen", format!("model.{error}")))?;
    Ok(model)
}

/// The programs of a step on this many ranks: one, or one for each stage of a pipeline.
pub fn programs(recipe: &Recipe, ranks: usize) -> Result<Programs> {
    let (mesh, shape, options) =
        (recipe.mesh(ranks)?, step_shape(recipe, ranks)?, options(recipe, intended_device(recipe))?);
    let units = unit_specs(&model(recipe)?, &options, &ModelParallel::of_rank(&mesh, 0), shape);
    Ok(checked_programs(&units, &options, &mesh, shape.micro_batches)?)
}

/// A device of the kind that a recipe trains on, for what depends on the kind alone.
pub(crate) fn intended_device(recipe: &Recipe) -> Device {
    if recipe.run.device == DeviceRecipe::Cuda { Device::Cuda(0) } else { Device::Cpu }
}

/// The chunks of the recipe's pipeline: those that it asks for, or chunks whose slowest one has as few FLOPs as possible.
fn pipeline_chunks(recipe: &Recipe, model: &Model, schedule: &PipelineSchedule) -> Result<Option<Vec<Range<usize>>>> {
    let names: Vec<&str> = model.units().iter().map(Unit::name).collect();
    let stages = recipe.parallel.pipeline;
    let given = recipe.pipeline_chunks(&names)?;
    if stages == 1 || given.is_some() {
        return Ok(given);
    }
    let chunks = schedule.chunks(stages);
    let flops = model.unit_flops_per_token(recipe.batch.seq_len);
    let profile = |(name, flops): (&&str, f64)| UnitProfile {
        name: name.to_string(),
        forward_s: flops,
        backward_s: 0.,
        output_bytes: 0,
        parameter_bytes: 0,
        kept_bytes: 0,
    };
    let units: Vec<UnitProfile> = names.iter().zip(flops).map(profile).collect();
    let constraints = Constraints {
        replication: Replication::Grid { stages: Some(chunks) },
        reduction: GradientReduction::EachStep { micro_batches: 1 },
        state: StateBytes { replicated: 0., sharded: 0. },
        memory_bytes_max: None,
    };
    // If the model has too few units, building the pipeline says so.
    let plan = partition_stages(&units, &Workers::on_one_network(chunks, 1.), &constraints).ok();
    Ok(plan.map(|plan| plan.stages.into_iter().map(|stage| stage.units).collect()))
}

/// The micro-batches of a step of a recipe on one of this many ranks.
pub(crate) fn step_shape(recipe: &Recipe, ranks: usize) -> Result<StepShape> {
    recipe.mesh(ranks)?;
    let (batch, positions) = (recipe.batch(ranks)?, recipe.batch.seq_len);
    let micro_batches = batch.gradient_accumulation_steps;
    Ok(StepShape { sequences: batch.micro_batch_size, positions, micro_batches })
}

/// Fails if the recipe needs a GPU and this process sees none.
pub fn check_device(recipe: &Recipe) -> Result<()> {
    if recipe.run.device == DeviceRecipe::Cpu {
        return Ok(());
    }
    let problem = match accelerators() {
        Ok(devices) if devices.is_empty() => "no GPU is visible to this process; see `shardwise doctor`".to_string(),
        Ok(_) => return Ok(()),
        Err(error) => format!("libtorch's CUDA part cannot be loaded: {error}"),
    };
    Err(recipe.sources.error_at("run.device", format!("run.device is \"cuda\", and {problem}")).into())
}

/// The trainer's options, for a device.
pub fn options(recipe: &Recipe, device: Device) -> Result<Options> {
    let sharding = Sharding::stage(recipe.zero.stage)
        .map_err(|error| recipe.sources.error_at("zero.stage", format!("zero.stage: {error}")))?;
    let schedule = recipe.pipeline_schedule()?;
    let pipeline_chunks = pipeline_chunks(recipe, &model(recipe)?, &schedule)?;
    let options = Options {
        sharding,
        precision: Precision {
            param_dtype: recipe.precision.param_dtype.dtype(),
            reduce_dtype: recipe.resolve_reduce_dtype().dtype(),
        },
        activation_checkpointing: match recipe.activation_checkpointing {
            ActivationCheckpointingRecipe::None => ActivationCheckpointing::None,
            ActivationCheckpointingRecipe::Selective => ActivationCheckpointing::Selective,
            ActivationCheckpointingRecipe::Full => ActivationCheckpointing::Full,
        },
        reduce_each_micro_batch: recipe.zero.reduce_each_micro_batch,
        prefetch: recipe.zero.prefetch,
        sequence_parallel: recipe.parallel.sequence,
        async_tensor_parallel: recipe.parallel.async_tensor,
        pipeline_schedule: schedule,
        pipeline_chunks,
        sum_tied_shares_apart: false,
        optimizer: optimizer(recipe),
        schedule: recipe.resolve_schedule(),
        max_grad_norm: recipe.optimizer.max_grad_norm,
        loss_scale: recipe.resolve_loss_scale().map_or(LossScale::Fixed(1.), LossScale::Dynamic),
        update_in_backward: recipe.optimizer.in_backward,
        update_in_forward: recipe.optimizer.in_forward,
        gather_codec: match recipe.compression.parameters {
            ParameterCodecRecipe::None => Codec::None,
            ParameterCodecRecipe::Int8 => Codec::Int8,
        },
        on_nonfinite: match recipe.resolve_on_nonfinite() {
            NonFiniteRecipe::Stop => OnNonFinite::Stop,
            NonFiniteRecipe::Skip => OnNonFinite::Skip,
        },
        offload: Offloading {
            optimizer: offload_place(recipe.offload.optimizer.as_ref()),
            parameters: offload_place(recipe.offload.parameters.as_ref()),
            gradients: offload_place(recipe.offload.gradients.as_ref()),
            activations: offload_place(recipe.offload.activations.as_ref()),
        },
        device,
    };
    // The recipe's own checks name the key at fault. This catches anything that they miss.
    options.check()?;
    Ok(options)
}

/// The settings of collectives.
pub fn comm_options(supervision: &SupervisionRecipe) -> mpi::Options {
    let timeout = Duration::from_secs_f64(supervision.timeout_s);
    mpi::Options { timeout, verify_collectives: supervision.verify_collectives, ..Default::default() }
}

/// Where a value of `[offload]` says that something is.
fn offload_place(value: Option<&PathBuf>) -> Option<OffloadPlace> {
    value.map(|value| match value == Path::new(HOST) {
        true => OffloadPlace::Host,
        false => OffloadPlace::Disk(value.clone()),
    })
}

fn optimizer(recipe: &Recipe) -> Optimizer {
    let (lr, weight_decay) = (recipe.optimizer.lr, recipe.optimizer.weight_decay);
    match recipe.resolve_optimizer() {
        ResolvedOptimizer::AdamW { betas: [beta1, beta2], eps } => {
            Optimizer::AdamW(AdamW { lr, beta1, beta2, weight_decay, eps })
        }
        ResolvedOptimizer::Lamb { betas: [beta1, beta2], eps } => {
            Optimizer::Lamb(Lamb { lr, beta1, beta2, weight_decay, eps })
        }
        ResolvedOptimizer::Sgd { momentum } => Optimizer::Sgd(Sgd { lr, momentum, weight_decay }),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A recipe with only the required keys, plus `keys`.
    pub(crate) fn recipe(keys: &str) -> Recipe {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("recipe.toml");
        let text = format!(
            "[model.llama]\nvocab_size = 61\nhidden_size = 36\nnum_hidden_layers = 1\nnum_attention_heads = 6\n\
             intermediate_size = 53\n[data]\n[batch]\nmicro_batch_size = 1\nseq_len = 8\n[optimizer]\nlr = 1e-3\n\
             [run]\nsteps = 10\n{keys}"
        );
        std::fs::write(&path, text).unwrap();
        Recipe::read(&path).unwrap()
    }

    #[test]
    fn the_defaults_of_recipes_are_those_of_the_library() {
        let recipe = recipe("");
        let options = options(&recipe, Device::Cpu).unwrap();
        let Optimizer::AdamW(adamw) = &options.optimizer else { panic!("{:?}", options.optimizer) };
        let AdamW { beta1, beta2, eps, .. } = AdamW::default();
        assert_eq!((adamw.beta1, adamw.beta2, adamw.eps), (beta1, beta2, eps));

        let library = Options::new(options.sharding, options.optimizer.clone(), options.schedule);
        assert_eq!(options.precision, library.precision);
        assert_eq!(options.activation_checkpointing, library.activation_checkpointing);
        assert_eq!(options.reduce_each_micro_batch, library.reduce_each_micro_batch);
        assert_eq!(options.prefetch, library.prefetch);
        assert_eq!(options.max_grad_norm, library.max_grad_norm);
        assert_eq!(options.loss_scale, library.loss_scale);
        assert_eq!(options.on_nonfinite, library.on_nonfinite);

        let (comm, library) = (comm_options(&recipe.supervision), mpi::Options::default());
        assert_eq!((comm.timeout, comm.verify_collectives), (library.timeout, library.verify_collectives));
    }

    #[test]
    fn f16_has_the_loss_scale_of_the_library_and_skips_overflows() {
        let options = options(&recipe("[precision]\nparam_dtype = \"f16\"\n"), Device::Cpu).unwrap();
        assert_eq!(options.loss_scale, LossScale::DYNAMIC);
        assert_eq!(options.on_nonfinite, OnNonFinite::Skip);
    }

    #[test]
    fn frozen_parameters_are_frozen_in_the_model() {
        let model = model(&recipe("[model]\nfrozen = [\"model.embed_tokens\"]\n")).unwrap();
        let parameters = model.units().iter().flat_map(|unit| unit.parameters());
        for parameter in parameters {
            assert_eq!(parameter.trainable, parameter.name != "model.embed_tokens.weight", "{}", parameter.name);
        }
    }

    #[test]
    fn a_host_without_a_gpu_is_refused() {
        if std::path::Path::new("/proc/driver/nvidia/version").exists() {
            return;
        }
        let text = check_device(&recipe("device = \"cuda\"\n")).unwrap_err().to_string();
        assert!(text.contains("recipe.toml:15: run.device is \"cuda\", and no GPU is visible"), "{text}");
    }
}
