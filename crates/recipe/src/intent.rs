//! Guesses what an unknown key was meant to be. Former names of our own keys are in `renamed`.

use super::schema::Node;

/// Our counterpart of another framework's key.
enum Here {
    /// A key.
    Key(&'static str),
    /// A key of the model, by its name in Llama and in GPT-2.
    OfModel(&'static str, &'static str),
    /// There is no such key; this is the advice instead.
    Nothing(&'static str),
}

const WORDS: &[(&str, Here)] = &[
    ("lr rate learning_rate max_lr peak_lr base_lr", Here::Key("optimizer.lr")),
    ("optim optimizer_type", Here::Key("optimizer.kind")),
    ("beta1 beta2 adam_beta1 adam_beta2", Here::Key("optimizer.betas")),
    ("eps epsilon adam_eps adam_epsilon", Here::Key("optimizer.eps")),
    ("wd decay", Here::Key("optimizer.weight_decay")),
    (
        "max_grad_norm grad_clip clip_grad gradient_clipping max_norm gradient_clip_val clip clip_norm",
        Here::Key("optimizer.max_grad_norm"),
    ),
    ("optimizer_in_bwd optimizer_in_backward fused_backward", Here::Key("optimizer.in_backward")),
    ("scheduler lr_scheduler lr_scheduler_type lr_decay_style", Here::Key("schedule.kind")),
    (
        "warmup warm_up warmup_iters num_warmup_steps lr_warmup_iters warmup_num_steps",
        Here::Key("schedule.warmup_steps"),
    ),
    ("min_lr min_lr_ratio end_factor", Here::Key("schedule.min_lr_ratio")),
    (
        "batch_size micro_batch_size micro_batch per_device_train_batch_size train_micro_batch_size_per_gpu mbs",
        Here::Key("batch.micro_batch_size"),
    ),
    ("global_batch_size train_batch_size total_batch_size gbs", Here::Key("batch.global_batch_size")),
    (
        "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches grad_accum accumulation_steps micro_batches",
        Here::Key("batch.gradient_accumulation_steps"),
    ),
    (
        "seq_len seq_length sequence_length block_size max_seq_len max_length context context_length n_ctx",
        Here::Key("batch.seq_len"),
    ),
    ("zero_stage zero_optimization", Here::Key("zero.stage")),
    ("prefetch units_in_flight", Here::Key("zero.prefetch")),
    ("max_steps num_steps total_steps train_steps train_iters max_iters iterations", Here::Key("run.steps")),
    ("logging_steps log_interval log_every steps_per_print print_every", Here::Key("run.log_every")),
    ("epochs num_epochs num_train_epochs", Here::Nothing("a run is as long as `run.steps` says")),
    (
        "ranks world_size gpus num_gpus nproc_per_node",
        Here::Nothing("the number of ranks is `-n` of the command line, or the launcher's"),
    ),
    ("dtype bf16 fp16 mixed_precision amp", Here::Key("precision.param_dtype")),
    ("grad_dtype grad_accum_dtype", Here::Key("precision.reduce_dtype")),
    (
        "gradient_checkpointing activation_checkpointing activation_checkpoint recompute recomputation",
        Here::Key("activation_checkpointing"),
    ),
    ("tokens dataset data_path train_data train_file data_prefix", Here::Key("data.corpus")),
    ("eval_interval eval_steps eval_every", Here::Key("evaluation.every_steps")),
    ("eval_iters", Here::Key("evaluation.max_sequences")),
    ("eval_data val_data valid_data validation", Here::Key("evaluation.corpus")),
    ("save_steps save_interval checkpoint_interval", Here::Key("checkpoints.every_steps")),
    ("save_dir output_dir out_dir save checkpoint_dir", Here::Key("checkpoints.folder")),
    ("log_dir logging_dir tensorboard_dir", Here::Key("run.folder")),
    ("save_total_limit", Here::Key("checkpoints.keep_last")),
    ("model_name_or_path pretrained init_from", Here::Key("model.from_pretrained")),
    ("hidden_size n_embd d_model dim embed_dim width", Here::OfModel("hidden_size", "n_embd")),
    (
        "num_hidden_layers n_layer num_layers n_layers layers depth blocks",
        Here::OfModel("num_hidden_layers", "n_layer"),
    ),
    ("num_attention_heads n_head n_heads num_heads heads", Here::OfModel("num_attention_heads", "n_head")),
    ("vocab_size n_vocab vocabulary", Here::OfModel("vocab_size", "vocab_size")),
    ("max_position_embeddings n_positions", Here::Key("model.gpt2.n_positions")),
    ("num_key_value_heads n_kv_heads num_kv_heads n_kv_head kv_heads", Here::Key("model.llama.num_key_value_heads")),
    ("intermediate_size ffn_hidden_size ffn_dim", Here::Key("model.llama.intermediate_size")),
    ("num_experts num_local_experts n_routed_experts", Here::Key("model.llama.moe.num_experts")),
    (
        "num_experts_per_tok moe_router_topk top_k moe_top_k num_experts_per_token",
        Here::Key("model.llama.moe.num_experts_per_tok"),
    ),
    ("capacity_factor expert_capacity_factor moe_expert_capacity_factor", Here::Key("model.llama.moe.capacity_factor")),
    ("moe_intermediate_size moe_ffn_hidden_size", Here::Key("model.llama.moe.moe_intermediate_size")),
    ("router_aux_loss_coef moe_aux_loss_coeff", Here::Key("model.llama.moe.router_aux_loss_coef")),
    ("router_z_loss_coef moe_z_loss_coeff", Here::Key("model.llama.moe.router_z_loss_coef")),
    (
        "router_bias_update_rate moe_router_bias_update_rate bias_update_speed load_balance_coeff",
        Here::Key("model.llama.moe.router_bias_update_rate"),
    ),
    ("head_dim", Here::Key("model.llama.head_dim")),
    ("rope_theta", Here::Key("model.llama.rope_theta")),
    ("rms_norm_eps norm_eps", Here::Key("model.llama.rms_norm_eps")),
    ("sliding_window", Here::Key("model.llama.sliding_window")),
    ("initializer_range", Here::Key("model.llama.initializer_range")),
    ("tie_word_embeddings tie_embeddings", Here::Key("model.llama.tie_word_embeddings")),
    ("attention_bias", Here::Key("model.llama.qkv_bias")),
];

/// What an unknown key was meant to be.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Intent {
    /// This key.
    Key(String),
    /// There is no such key; this is the advice instead.
    Nothing(&'static str),
}

/// Guesses what `key` was meant to be, in a recipe whose model is of `family`.
pub(super) fn intent(key: &str, schema: Node<'_>, family: &str) -> Option<Intent> {
    let (table, name) = key.rsplit_once('.').map_or((None, key), |(table, name)| (Some(table), name));
    let keys = schema.keys();
    let in_table = |name: &str| table.map_or_else(|| name.to_string(), |table| format!("{table}.{name}"));
    let exists = |key: &String| keys.contains(key);
    let typed = Some(in_table("kind")).filter(|_| ["type", "name"].contains(&name)).filter(exists);
    let misspelt = || nearest(name, schema, table).map(|name| in_table(&name));
    let elsewhere = || {
        let same = keys.iter().filter(|other| other.rsplit('.').next() == Some(name));
        same.min_by_key(|other| !other.contains(family)).cloned()
    };
    let anywhere = || {
        let last = |key: &String| key.rsplit('.').next().unwrap_or_default().to_string();
        let close = keys.iter().filter(|other| distance(name, &last(other)).is_some());
        close.min_by_key(|other| distance(name, &last(other))).cloned()
    };
    if let Some(key) = typed {
        return Some(Intent::Key(key));
    }
    let word =
        WORDS.iter().find(|(words, _)| words.split(' ').any(|word| word == name.to_lowercase().replace('-', "_")));
    match word {
        Some((_, Here::Key(key))) => Some(Intent::Key(key.to_string())),
        Some((_, Here::OfModel(llama, gpt2))) => {
            let name = if family == "gpt2" { gpt2 } else { llama };
            Some(Intent::Key(format!("model.{family}.{name}")))
        }
        Some((_, Here::Nothing(why))) => Some(Intent::Nothing(why)),
        None => misspelt().or_else(elsewhere).or_else(anywhere).map(Intent::Key),
    }
}

/// The word in a list that is most similar to `word`, if any is similar enough.
pub(super) fn nearest_word<'a>(word: &str, words: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let close = words.filter_map(|other| Some((distance(word, other)?, other)));
    close.min_by_key(|(distance, _)| *distance).map(|(_, other)| other)
}

fn nearest(name: &str, schema: Node<'_>, table: Option<&str>) -> Option<String> {
    let table = table.map_or(Some(schema), |table| schema.find(table))?;
    nearest_word(name, table.names()).map(str::to_string)
}

/// The edit distance, if it is small enough for a misspelling.
fn distance(a: &str, b: &str) -> Option<usize> {
    // Nobody misspells a word with thousands of letters, and the time grows with both lengths.
    if a.len() > 64 {
        return None;
    }
    let distance = strsim::damerau_levenshtein(&a.to_lowercase(), b);
    (distance <= (a.len().min(b.len()) / 3).max(1) && distance < b.len()).then_some(distance)
}
