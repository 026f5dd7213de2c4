//! Which of DeepSpeed's keys mean nothing here, which may have one value only, and why others are refused. The guide's table of
//! keys is made from these lists.

/// Keys that become keys of a recipe, or decide what others become; and what that is, in words for the guide.
const TRANSLATED: &[(&str, &str)] = &[
    ("train_batch_size", "`batch.global`"),
    ("train_micro_batch_size_per_gpu", "`batch.sequences`"),
    ("gradient_accumulation_steps", "`batch.micro_batches`"),
    ("gradient_clipping", "`optimizer.clip_norm`; 0 means none"),
    ("steps_per_print", "`run.print_every`"),
    ("zero_optimization.stage", "`sharding.stage`"),
    ("bf16.enabled", "`precision.parameters = \"bf16\"`"),
    ("fp16.enabled", "`precision.parameters = \"f16\"`"),
    ("fp16.loss_scale", "0 alone: the scale moves by itself"),
    ("fp16.initial_scale_power", "`precision.loss_scale_initial`, 2 to this power"),
    ("fp16.loss_scale_window", "`precision.loss_scale_window`"),
    ("fp16.hysteresis", "`precision.loss_scale_hysteresis`"),
    ("fp16.consecutive_hysteresis", "`precision.loss_scale_consecutive_hysteresis`"),
    ("fp16.min_loss_scale", "`precision.loss_scale_min`"),
    ("bf16.check_grad_overflow", "true: `run.on_not_finite = \"skip\"`; false is refused"),
    ("data_types.grad_accum_dtype", "`precision.gradients`"),
    ("communication_data_type", "`precision.gradients`, and so the same as `data_types.grad_accum_dtype`"),
    (
        "optimizer.type",
        "`optimizer.kind`: Adam and AdamW are `adamw`, Lamb is `lamb`, SGD is `sgd`; any other is refused",
    ),
    ("optimizer.params.lr", "`optimizer.rate`"),
    ("optimizer.params.betas", "`optimizer.betas`"),
    ("optimizer.params.eps", "`optimizer.epsilon`"),
    ("optimizer.params.weight_decay", "`optimizer.weight_decay`"),
    ("optimizer.params.momentum", "`optimizer.momentum`, of SGD"),
    ("optimizer.params.torch_adam", "true: weight decay is 0.01 where it is not said"),
    ("optimizer.params.adam_w_mode", "true alone: weight decay is AdamW's"),
    (
        "scheduler.type",
        "`schedule.kind`: WarmupLR is `constant`, WarmupDecayLR `linear`, WarmupCosineLR `cosine`; any other is refused",
    ),
    ("scheduler.params.warmup_type", "\"linear\" alone, which is not DeepSpeed's default and has to be written"),
    ("scheduler.params.warmup_min_lr", "0 alone: the rate rises from 0"),
    ("scheduler.params.warmup_min_ratio", "0 alone: the rate rises from 0"),
    ("scheduler.params.warmup_max_lr", "`optimizer.rate`"),
    ("scheduler.params.warmup_num_steps", "`schedule.warmup_steps`, at least 2"),
    ("scheduler.params.total_num_steps", "`run.steps`"),
    ("scheduler.params.cos_min_ratio", "`schedule.end`"),
];

/// Sections that may be there if their `device` is `"none"`.
pub(super) const OFFLOAD: &[&str] = &["zero_optimization.offload_optimizer", "zero_optimization.offload_param"];

/// Keys that bound what DeepSpeed holds in passing. The numbers are the same whatever they say, but DeepSpeed's memory is not, so
/// their user is told what decides it here.
pub(super) const MEMORY: &[&str] = &[
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.sub_group_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_model_persistence_threshold",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
];

/// Keys about streams, checks and DeepSpeed's own files: numbers, skipped steps and memory are the same whatever they say.
pub(super) const IDLE: &[&str] = &[
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

/// Keys that may have one value, and why no other.
pub(super) const ONLY: &[(&str, &str, &str)] = &[
    ("prescale_gradients", "false", "gradients are summed first and divided then: write false"),
    ("gradient_predivide_factor", "1", "gradients are divided once, after they are summed: write 1"),
    ("gradient_allreduce_op", "\"mean\"", "gradients are averaged here: write \"mean\""),
    ("managed_gradient_accumulation", "true", "the step is made here: write true"),
    ("dataloader_drop_last", "true", "every step has a whole batch here: write true"),
    ("sparse_gradients", "false", "there are no sparse gradients here: write false"),
    ("disable_allgather", "false", "updated parameters are gathered here: write false"),
    ("fp32_allreduce", "false", "it is said by data_types.grad_accum_dtype here: leave it out"),
    ("wall_clock_breakdown", "false", "there is no such breakdown here: write false"),
    ("memory_breakdown", "false", "there is no such breakdown here; `shardwise train --dry-run` has one: write false"),
    ("dump_state", "false", "`shardwise config` prints the settings instead: write false"),
    ("fp16.auto_cast", "false", "inputs are token ids here: write false"),
    ("fp16.fp16_master_weights_and_grads", "false", "masters are f32 here: write false"),
    ("bf16.bf16_master_weights_and_grads", "false", "masters are f32 here: write false"),
    ("bf16.bf16_optimizer_states", "false", "optimizer state is f32 here: write false"),
    ("optimizer.params.bias_correction", "true", "moments are corrected here: write true"),
    ("optimizer.params.amsgrad", "false", "there is no AMSGrad here: write false"),
    ("optimizer.params.nesterov", "false", "there is no Nesterov momentum here: write false"),
    ("optimizer.params.dampening", "0", "momentum is not dampened here: write 0"),
    ("optimizer.params.maximize", "false", "losses are made smaller here: write false"),
    ("scheduler.params.last_batch_iteration", "-1", "a run goes on by its checkpoints here: leave it out"),
    (
        "zero_optimization.load_from_fp32_weights",
        "true",
        "masters begin with a checkpoint's f32 numbers here: write true",
    ),
    (
        "zero_optimization.ignore_unused_parameters",
        "true",
        "a parameter without a gradient is reported here and does not end the run: write true",
    ),
    ("zero_optimization.cpu_offload", "false", "offloading is not built yet"),
    ("zero_optimization.cpu_offload_params", "false", "offloading is not built yet"),
    ("zero_optimization.cpu_offload_param", "false", "offloading is not built yet"),
    ("zero_optimization.cpu_offload_use_pin_memory", "false", "offloading is not built yet"),
    ("zero_optimization.legacy_stage1", "false", "there is one stage 1 here: write false"),
    ("zero_optimization.zero_hpz_partition_size", "1", "hybrid sharding is sharding.replicas of the recipe: write 1"),
    ("zero_optimization.mics_shard_size", "-1", "hybrid sharding is sharding.replicas of the recipe: write -1"),
    (
        "zero_optimization.mics_hierarchical_params_gather",
        "false",
        "hybrid sharding is sharding.replicas of the recipe",
    ),
    ("zero_optimization.zero_quantized_weights", "false", "weights are sent in their own type here: write false"),
    (
        "zero_optimization.zero_quantized_nontrainable_weights",
        "false",
        "weights are sent in their own type here: write false",
    ),
    (
        "zero_optimization.zero_quantized_gradients",
        "false",
        "gradients are sent in precision.gradients here: write false",
    ),
    ("activation_checkpointing.partition_activations", "false", "activations are not sliced here: write false"),
    ("activation_checkpointing.cpu_checkpointing", "false", "offloading is not built yet: write false"),
    ("checkpoint.load_universal", "false", "DeepSpeed's checkpoints are not read: write false"),
    ("checkpoint.use_node_local_storage", "false", "checkpoints go to checkpoints.folder of the recipe: write false"),
];

/// Sections that do nothing unless they are enabled, and why they cannot be.
pub(super) const SWITCHED: &[(&str, &str)] = &[
    ("tensorboard", "every run writes TensorBoard's events into run.folder: leave the section out"),
    ("wandb", "there is no Weights & Biases here: figures are in metrics.jsonl and TensorBoard's events of run.folder"),
    ("comet", "there is no Comet here: figures are in metrics.jsonl and TensorBoard's events of run.folder"),
    ("csv_monitor", "there are no CSV files here: figures are in metrics.jsonl of run.folder"),
    ("flops_profiler", "it is a command here: `shardwise profile RECIPE`"),
    (
        "comms_logger",
        "what was sent is in metrics.jsonl of run.folder, by verb and beside theory: leave the section out",
    ),
    ("autotuning", "there is no tuner here; `shardwise train --dry-run` says what fits"),
    ("elasticity", "`shardwise train -n 2..8` goes on with as many ranks as there is room for: leave the section out"),
    ("curriculum_learning", "there is no curriculum here"),
    ("data_efficiency", "data is not sampled by difficulty here"),
    ("eigenvalue", "there are no eigenvalues here"),
    ("progressive_layer_drop", "every layer takes part in every step here"),
    ("amp", "there is no Apex here: use bf16 or fp16"),
    ("torch_autocast", "types are chosen per run, not per operation: use bf16 or fp16"),
    ("hybrid_engine", "there is no inference here"),
    ("expert_parallel", "there are no experts here"),
    ("compile", "there is no compiler here"),
];

/// Why a scheduler is not there.
pub(super) fn no_scheduler(name: &str) -> String {
    match name {
        "OneCycle" => {
            "DeepSpeed's OneCycle moves along lines, and schedule.kind = \"1-cycle\" along half cosines: choose it in the recipe, and leave \
             the scheduler out"
        }
        "LRRangeTest" => {
            "DeepSpeed's rate rises by equal steps, and that of schedule.kind = \"range-test\" by equal factors: choose it in the recipe, \
             and leave the scheduler out"
        }
        _ => return format!("there is no {name} here, but WarmupLR, WarmupDecayLR and WarmupCosineLR"),
    }
    .to_string()
}

/// Sections that may be there without a key.
pub(super) fn is_section(key: &str) -> bool {
    let sections = ["optimizer.params", "scheduler.params", "zero_optimization", "fp16", "bf16", "data_types"];
    let others = ["activation_checkpointing", "aio", "checkpoint"];
    sections.contains(&key) || others.contains(&key)
}

/// Keys and sections that are refused whatever they say, and why; the first that a key is in counts.
const REFUSED: &[(&str, &str)] = &[
    ("optimizer.params.max_grad_norm", "it is gradient_clipping"),
    ("optimizer.params.max_coeff", "LAMB's trust ratio is not limited here: leave it out"),
    ("optimizer.params.min_coeff", "LAMB's trust ratio is not limited here: leave it out"),
    ("optimizer.params", "this optimizer has no such setting here"),
    ("scheduler.params", "this scheduler has no such setting here"),
    ("sparse_attention", "attention is dense here: leave the section out"),
    ("compression_training", "models are not compressed here: leave the section out"),
    ("tensor_parallel", "models are not sliced along tensors here: leave the section out"),
    ("pipeline", "models are not cut into pipelines here: leave the section out"),
    ("checkpoint", "checkpoints are [checkpoints] of the recipe: leave it out"),
    ("zero_optimization.zenflow", "offloading is not built yet: leave it out"),
    ("data_types", "parameters' types are bf16.enabled and fp16.enabled: leave it out"),
];

/// Why a key that nobody has taken is refused.
pub(super) fn why_not(key: &str) -> String {
    let found = REFUSED.iter().find(|(section, _)| super::is_within(key, section));
    found.map_or_else(|| "it is not a key of DeepSpeed's that is known here".to_string(), |(_, why)| why.to_string())
}

/// Whether a key that is asked for stands in one of the lists.
pub(super) fn is_listed(key: &str) -> bool {
    let within = |section: &str| super::is_within(key, section);
    TRANSLATED.iter().any(|(listed, _)| *listed == key)
        || ONLY.iter().any(|(listed, ..)| *listed == key)
        || SWITCHED.iter().any(|(section, _)| within(section))
        || OFFLOAD.iter().any(|section| within(section))
}

/// A heading, and keys with what becomes of each, in words.
pub type Fates = (&'static str, Vec<(&'static str, String)>);

/// Every key and section that is known here, by what becomes of it.
pub(super) fn fates() -> [Fates; 5] {
    let translated = TRANSLATED.iter().map(|&(key, becomes)| (key, becomes.to_string()));
    let only = ONLY.iter().map(|&(key, value, why)| (key, format!("`{value}`: {}", reason(why))));
    let offload = OFFLOAD.iter().map(|&section| (section, "its `device` is not `\"none\"`".to_string()));
    let switched = SWITCHED.iter().map(|&(section, why)| (section, format!("it is enabled: {why}")));
    let refused = REFUSED.iter().map(|&(key, why)| match is_section(key) {
        true => (key, format!("it has any other key: {why}")),
        false => (key, format!("it is there: {why}")),
    });
    let idle = IDLE.iter().map(|&key| (key, String::new()));
    let memory = MEMORY.iter().map(|&key| (key, String::new()));
    [
        ("What becomes a key of the recipe", translated.collect()),
        ("What may have one value only", only.collect()),
        ("What is refused, if", offload.chain(switched).chain(refused).collect()),
        ("What bounds DeepSpeed's buffers, and is noted", memory.collect()),
        ("What tunes DeepSpeed itself, and means nothing here", idle.collect()),
    ]
}

/// A reason without the advice to write the one value, which the table has already.
fn reason(why: &str) -> &str {
    why.rsplit_once(": write ").map_or(why, |(reason, _)| reason)
}
