//! How DeepSpeed's keys are treated: which are translated, which have no meaning here, which allow only one value, and why others
//! are refused. The table of keys in the guide is generated from these lists.

/// Keys that are translated, or that affect how others are translated, with a description for the guide.
const TRANSLATED: &[(&str, &str)] = &[
    ("train_batch_size", "`batch.global_batch_size`"),
    ("train_micro_batch_size_per_gpu", "`batch.micro_batch_size`"),
    ("gradient_accumulation_steps", "`batch.gradient_accumulation_steps`"),
    ("gradient_clipping", "`optimizer.max_grad_norm`; 0 means none"),
    ("steps_per_print", "`run.log_every`"),
    ("zero_optimization.stage", "`zero.stage`"),
    ("zero_optimization.zero_quantized_weights", "true: `compression.parameters = \"int8\"`"),
    ("bf16.enabled", "`precision.param_dtype = \"bf16\"`"),
    ("fp16.enabled", "`precision.param_dtype = \"f16\"`"),
    ("fp16.loss_scale", "0 only: the loss scale is dynamic"),
    ("fp16.initial_scale_power", "`precision.loss_scale_initial`, 2 to this power"),
    ("fp16.loss_scale_window", "`precision.loss_scale_window`"),
    ("fp16.hysteresis", "`precision.loss_scale_hysteresis`"),
    ("fp16.consecutive_hysteresis", "`precision.loss_scale_consecutive_hysteresis`"),
    ("fp16.min_loss_scale", "`precision.loss_scale_min`"),
    ("bf16.check_grad_overflow", "true: `run.on_nonfinite = \"skip\"`; false is refused"),
    ("data_types.grad_accum_dtype", "`precision.reduce_dtype`"),
    ("communication_data_type", "`precision.reduce_dtype`; must equal `data_types.grad_accum_dtype` if both are set"),
    (
        "optimizer.type",
        "`optimizer.kind`: Adam and AdamW are `adamw`, Lamb is `lamb`, SGD is `sgd`; any other is refused",
    ),
    ("optimizer.params.lr", "`optimizer.lr`"),
    ("optimizer.params.betas", "`optimizer.betas`"),
    ("optimizer.params.eps", "`optimizer.eps`"),
    ("optimizer.params.weight_decay", "`optimizer.weight_decay`"),
    ("optimizer.params.momentum", "`optimizer.momentum`, for SGD"),
    ("optimizer.params.torch_adam", "true: weight decay defaults to 0.01"),
    ("optimizer.params.adam_w_mode", "true only: weight decay is decoupled"),
    (
        "scheduler.type",
        "`schedule.kind`: WarmupLR is `constant`, WarmupDecayLR `linear`, WarmupCosineLR `cosine`; any other is refused",
    ),
    ("scheduler.params.warmup_type", "\"linear\" only; it is not DeepSpeed's default, so set it explicitly"),
    ("scheduler.params.warmup_min_lr", "0 only: the learning rate rises from 0"),
    ("scheduler.params.warmup_min_ratio", "0 only: the learning rate rises from 0"),
    ("scheduler.params.warmup_max_lr", "`optimizer.lr`"),
    ("scheduler.params.warmup_num_steps", "`schedule.warmup_steps`, at least 2"),
    ("scheduler.params.total_num_steps", "`run.steps`"),
    ("scheduler.params.cos_min_ratio", "`schedule.min_lr_ratio`"),
];

/// Sections that move something to another tier, with the key that their `device` or `nvme_path` becomes and what they are about.
pub(super) const OFFLOAD: &[(&str, &str, &str)] = &[
    ("zero_optimization.offload_optimizer", "offload.optimizer", "optimizer state"),
    ("zero_optimization.offload_param", "offload.parameters", "parameters"),
];

/// Keys that limit DeepSpeed's buffers. They do not affect results, but they do affect DeepSpeed's memory, so a note tells the
/// user what determines memory here.
pub(super) const BUFFER_LIMITS: &[&str] = &[
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.sub_group_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_model_persistence_threshold",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
];

/// Keys about streams, checks and DeepSpeed's own files. They affect neither results, nor skipped steps, nor memory.
pub(super) const NO_EFFECT: &[&str] = &[
    "zero_optimization.overlap_comm",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.allgather_partitions",
    "zero_optimization.reduce_scatter",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    "zero_optimization.stage3_module_granularity_threshold",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params",
    "zero_optimization.stage3_allgather_sequential",
    "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_optimization.memory_efficient_linear",
    "zero_optimization.elastic_checkpoint",
    "zero_optimization.grad_hooks",
    "zero_optimization.log_trace_cache_warnings",
    "zero_optimization.enable_sanity_checks",
    "zero_optimization.pipeline_loading_checkpoint",
    "zero_optimization.override_module_apply",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "bf16.immediate_grad_update",
    "activation_checkpointing.contiguous_memory_optimization",
    "activation_checkpointing.number_checkpoints",
    "activation_checkpointing.synchronize_checkpoint_boundary",
    "activation_checkpointing.profile",
    "optimizer.legacy_fusion",
    "optimizer.params.fused",
    "optimizer.params.foreach",
    "aio.block_size",
    "aio.queue_depth",
    "aio.thread_count",
    "aio.intra_op_parallelism",
    "aio.single_submit",
    "aio.overlap_events",
    "aio.use_gds",
    "checkpoint.tag_validation",
    "log_level",
];

/// Keys about the loss scale of f16.
pub(super) const LOSS_SCALE: &[&str] = &[
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
    "fp16.consecutive_hysteresis",
    "fp16.min_loss_scale",
];

/// Keys that allow only one value: the key, the value, and why no other is possible.
pub(super) const ONE_ALLOWED_VALUE: &[(&str, &str, &str)] = &[
    ("prescale_gradients", "false", "gradients are summed first and then divided: write false"),
    ("gradient_predivide_factor", "1", "gradients are divided once, after they are summed: write 1"),
    ("gradient_allreduce_op", "\"mean\"", "gradients are averaged here: write \"mean\""),
    ("managed_gradient_accumulation", "true", "Shardwise runs the step: write true"),
    ("dataloader_drop_last", "true", "every step has a full batch here: write true"),
    ("sparse_gradients", "false", "sparse gradients are not supported: write false"),
    ("disable_allgather", "false", "updated parameters are all-gathered here: write false"),
    ("fp32_allreduce", "false", "all-reduces have no dtype of their own here; set data_types.grad_accum_dtype instead"),
    ("wall_clock_breakdown", "false", "a run prints no such breakdown; use `shardwise profile`"),
    ("memory_breakdown", "false", "a run prints only the estimate; measured memory by kind is in metrics.jsonl"),
    ("dump_state", "false", "`shardwise config` prints the settings instead: write false"),
    ("fp16.auto_cast", "false", "inputs are token ids here: write false"),
    ("fp16.fp16_master_weights_and_grads", "false", "master weights are f32 here: write false"),
    ("bf16.bf16_master_weights_and_grads", "false", "master weights are f32 here: write false"),
    ("bf16.bf16_optimizer_states", "false", "optimizer state is f32 here: write false"),
    ("optimizer.params.bias_correction", "true", "moments are bias-corrected here: write true"),
    ("optimizer.params.amsgrad", "false", "AMSGrad is not supported: write false"),
    ("optimizer.params.nesterov", "false", "Nesterov momentum is not supported: write false"),
    ("optimizer.params.dampening", "0", "momentum is not dampened here: write 0"),
    ("optimizer.params.maximize", "false", "losses are minimized here: write false"),
    ("scheduler.params.last_batch_iteration", "-1", "a run resumes from its checkpoints: write -1"),
    (
        "zero_optimization.load_from_fp32_weights",
        "true",
        "master weights start from a checkpoint's f32 values: write true",
    ),
    (
        "zero_optimization.ignore_unused_parameters",
        "true",
        "a parameter without a gradient is reported here and does not end the run: write true",
    ),
    (
        "zero_optimization.cpu_offload",
        "false",
        "it is deprecated, and offload_optimizer or offload_param says it today: write false",
    ),
    (
        "zero_optimization.cpu_offload_params",
        "false",
        "it is deprecated, and offload_optimizer or offload_param says it today: write false",
    ),
    (
        "zero_optimization.cpu_offload_param",
        "false",
        "it is deprecated, and offload_optimizer or offload_param says it today: write false",
    ),
    (
        "zero_optimization.cpu_offload_use_pin_memory",
        "false",
        "it is deprecated, and offload_optimizer or offload_param says it today: write false",
    ),
    ("zero_optimization.legacy_stage1", "false", "there is only one stage 1: write false"),
    (
        "zero_optimization.zero_hpz_partition_size",
        "1",
        "hpZ is not supported; parallel.replicate in the recipe is hybrid sharding (HSDP, MiCS), which also replicates \
         gradients and optimizer state and so takes more memory than hpZ: write 1",
    ),
    ("zero_optimization.mics_shard_size", "-1", "hybrid sharding is parallel.replicate in the recipe: write -1"),
    (
        "zero_optimization.mics_hierarchical_params_gather",
        "false",
        "hybrid sharding is parallel.replicate in the recipe",
    ),
    (
        "zero_optimization.zero_quantized_nontrainable_weights",
        "false",
        "frozen weights are kept exactly, and compression.parameters quantizes what is sent: write false",
    ),
    (
        "zero_optimization.zero_quantized_gradients",
        "false",
        "gradients are sent in precision.reduce_dtype here: write false",
    ),
    ("activation_checkpointing.partition_activations", "false", "activations are not sharded here: write false"),
    (
        "activation_checkpointing.cpu_checkpointing",
        "false",
        "offload.activations of the recipe moves activations: write false",
    ),
    ("checkpoint.load_universal", "false", "DeepSpeed's checkpoints are not read: write false"),
    ("checkpoint.use_node_local_storage", "false", "checkpoints go to checkpoints.folder in the recipe: write false"),
];

/// Sections that have no effect unless they are enabled, and why they cannot be enabled here.
pub(super) const REFUSED_IF_ENABLED: &[(&str, &str)] = &[
    ("tensorboard", "every run writes TensorBoard events to run.folder; leave the section out"),
    ("wandb", "Weights & Biases is not supported; metrics are in metrics.jsonl and TensorBoard events in run.folder"),
    ("comet", "Comet is not supported; metrics are in metrics.jsonl and TensorBoard events in run.folder"),
    ("csv_monitor", "CSV files are not supported; metrics are in metrics.jsonl in run.folder"),
    ("flops_profiler", "use the command `shardwise profile RECIPE`"),
    (
        "comms_logger",
        "traffic is in metrics.jsonl in run.folder, by collective and with the expected bytes; leave the section out",
    ),
    ("autotuning", "there is no autotuner; `shardwise profile` tries a few changes"),
    ("elasticity", "`shardwise train -n 2..8` uses as many ranks as are available; leave the section out"),
    ("curriculum_learning", "curriculum learning is not supported"),
    ("data_efficiency", "data is not sampled by difficulty here"),
    ("eigenvalue", "eigenvalues are not supported"),
    ("progressive_layer_drop", "every layer takes part in every step here"),
    ("amp", "Apex is not supported; use bf16 or fp16"),
    ("torch_autocast", "dtypes are chosen per run, not per operation; use bf16 or fp16"),
    ("hybrid_engine", "generation during training is not supported"),
    ("expert_parallel", "use parallel.expert in the recipe; leave the section out"),
    ("compile", "compilation is not supported"),
];

/// Why a scheduler is refused.
pub(super) fn no_scheduler(name: &str) -> String {
    match name {
        "OneCycle" => {
            "DeepSpeed's OneCycle is piecewise linear, and schedule.kind = \"one-cycle\" follows half cosines: set it in the recipe, and \
             leave the scheduler out"
        }
        "LRRangeTest" => {
            "DeepSpeed's learning rate rises by equal steps, and that of schedule.kind = \"lr-range-test\" by equal factors: set it in \
             the recipe, and leave the scheduler out"
        }
        _ => return format!("{name} is not supported, only WarmupLR, WarmupDecayLR and WarmupCosineLR"),
    }
    .to_string()
}

/// Sections that may be empty.
pub(super) fn is_section(key: &str) -> bool {
    let sections = ["optimizer.params", "scheduler.params", "zero_optimization", "fp16", "bf16", "data_types"];
    let others = ["activation_checkpointing", "aio", "checkpoint"];
    sections.contains(&key) || others.contains(&key)
}

/// Keys and sections that are always refused, and why. The first match applies.
const REFUSED: &[(&str, &str)] = &[
    ("optimizer.params.max_grad_norm", "use gradient_clipping"),
    ("optimizer.params.max_coeff", "LAMB's trust ratio is not clamped here; leave it out"),
    ("optimizer.params.min_coeff", "LAMB's trust ratio is not clamped here; leave it out"),
    ("optimizer.params", "this optimizer has no such setting"),
    ("scheduler.params", "this scheduler has no such setting"),
    ("sparse_attention", "attention is dense here; leave the section out"),
    ("compression_training", "models are not compressed here; leave the section out"),
    ("tensor_parallel", "use parallel.tensor in the recipe; leave the section out"),
    ("pipeline", "use parallel.pipeline in the recipe; leave the section out"),
    ("checkpoint", "use [checkpoints] in the recipe"),
    ("zero_optimization.zenflow", "it updates most parameters with gradients of earlier steps; leave it out"),
    ("data_types", "the parameters' dtype is set by bf16.enabled and fp16.enabled; leave it out"),
];

/// Why a leftover key is refused.
pub(super) fn why_not(key: &str) -> String {
    let found = REFUSED.iter().find(|(section, _)| is_within(key, section));
    found.map_or_else(|| "this DeepSpeed key is unknown here".to_string(), |(_, why)| why.to_string())
}

/// Whether a key is in one of the lists.
pub(super) fn is_listed(key: &str) -> bool {
    let within = |section: &str| is_within(key, section);
    TRANSLATED.iter().any(|(listed, _)| *listed == key)
        || ONE_ALLOWED_VALUE.iter().any(|(listed, ..)| *listed == key)
        || REFUSED_IF_ENABLED.iter().any(|(section, _)| within(section))
        || OFFLOAD.iter().any(|(section, ..)| within(section))
}

/// A heading, and keys with a description of how each is treated.
pub type KeyTable = (&'static str, Vec<(&'static str, String)>);

/// Every known key and section, by how it is treated.
pub(super) fn key_tables() -> [KeyTable; 5] {
    let translated = TRANSLATED.iter().map(|&(key, becomes)| (key, becomes.to_string()));
    let one_allowed = ONE_ALLOWED_VALUE.iter().map(|&(key, value, why)| (key, format!("`{value}`: {}", reason(why))));
    let offload = OFFLOAD.iter().map(|(section, key, _)| {
        (*section, format!("if only part is offloaded (`ratio`); otherwise `{key}` is \"host\" for `\"cpu\"`, and `nvme_path` for `\"nvme\"`"))
    });
    let refused_if_enabled =
        REFUSED_IF_ENABLED.iter().map(|&(section, why)| (section, format!("if it is enabled: {why}")));
    let refused = REFUSED.iter().map(|&(key, why)| match is_section(key) {
        true => (key, format!("if it has any other key: {why}")),
        false => (key, format!("if it is present: {why}")),
    });
    let no_effect = NO_EFFECT.iter().map(|&key| (key, String::new()));
    let buffer_limits = BUFFER_LIMITS.iter().map(|&key| (key, String::new()));
    [
        ("Keys that are translated", translated.collect()),
        ("Keys with one allowed value", one_allowed.collect()),
        ("Keys that are refused under certain conditions", offload.chain(refused_if_enabled).chain(refused).collect()),
        ("Keys that limit DeepSpeed's buffers: ignored, with a note", buffer_limits.collect()),
        ("Keys that tune DeepSpeed itself and have no meaning here", no_effect.collect()),
    ]
}

/// A reason without the advice to write the allowed value, which the table already has.
fn reason(why: &str) -> &str {
    why.rsplit_once(": write ").map_or(why, |(reason, _)| reason)
}

/// Whether `key` is `section` or is inside of it.
pub(super) fn is_within(key: &str, section: &str) -> bool {
    key.strip_prefix(section).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}
