//! The resolved recipe: every value, defaults included, with its source. It is itself a valid recipe.

use shardwise_plan::ModelConfig;
use shardwise_plan::schedule::Kind;

use super::resolve::{ResolvedOptimizer, number};
use super::{Error, Recipe, Result, Source};

/// The column at which comments start.
const COMMENT_COLUMN: usize = 40;

impl Recipe {
    /// The recipe as TOML: every value, defaults included, with its source as a comment. If the number of ranks is given, all
    /// three batch sizes are filled in.
    pub fn resolved_toml(&self, ranks: Option<usize>) -> Result<String> {
        resolved_toml(self, ranks)
    }
}

fn resolved_toml(recipe: &Recipe, ranks: Option<usize>) -> Result<String> {
    let full = fill_defaults(recipe, ranks)?;
    let plain = toml::to_string(&full).map_err(|error| Error::Options(format!("the recipe as TOML: {error}")))?;
    let mut table = String::new();
    let mut text = String::new();
    for note in &recipe.notes {
        text += &format!("# {note}\n");
    }
    for line in plain.lines() {
        if let Some(name) = line.strip_prefix('[') {
            table = name.trim_matches(['[', ']']).to_string();
        }
        let name = line.split_once(" = ").map(|(name, _)| name);
        let key = name.map(|name| if table.is_empty() { name.to_string() } else { format!("{table}.{name}") });
        match key {
            Some(key) => {
                let line = shorten(line);
                text += &format!("{line:COMMENT_COLUMN$} # {}\n", source(recipe, &key, ranks));
            }
            None => text += &format!("{line}\n"),
        }
    }
    Ok(text)
}

/// Shortens the number in a line, as in 1e-8.
fn shorten(line: &str) -> String {
    match line.split_once(" = ") {
        Some((name, value)) if value.contains('.') => match value.parse() {
            Ok(value) => format!("{name} = {}", number(value)),
            Err(_) => line.to_string(),
        },
        _ => line.to_string(),
    }
}

/// The source of a printed value. A batch size that was not given is derived from the others.
fn source(recipe: &Recipe, key: &str, ranks: Option<usize>) -> String {
    let own = if key.starts_with("data.mixture.") { "data.mixture" } else { key };
    let follows = match key {
        "batch.global_batch_size" | "batch.micro_batch_size" => true,
        "batch.gradient_accumulation_steps" => recipe.batch.global_batch_size.is_some(),
        _ => false,
    };
    match (recipe.sources.of(own), ranks) {
        (Source::Default, Some(ranks)) if follows => {
            format!("from global_batch_size = micro_batch_size × gradient_accumulation_steps × {ranks} ranks")
        }
        _ => recipe.sources.describe(own),
    }
}

/// The recipe with its defaults filled in.
fn fill_defaults(recipe: &Recipe, ranks: Option<usize>) -> Result<Recipe> {
    let mut full = recipe.clone();
    if let Some(ranks) = ranks {
        let batch = recipe.batch(ranks)?;
        full.batch.global_batch_size = Some(batch.global_batch_size);
        full.batch.micro_batch_size = Some(batch.micro_batch_size);
        full.batch.gradient_accumulation_steps = Some(batch.gradient_accumulation_steps);
    } else if full.batch.global_batch_size.is_none() {
        full.batch.gradient_accumulation_steps = Some(full.batch.gradient_accumulation_steps.unwrap_or(1));
    }
    match (recipe.model_config()?, &mut full.model.llama, &mut full.model.gpt2) {
        (ModelConfig::Llama(llama), Some(keys), _) => {
            keys.num_key_value_heads = Some(llama.num_key_value_heads);
            keys.head_dim = Some(llama.head_dim);
            keys.rope_theta = Some(llama.rope_theta);
            keys.rms_norm_eps = Some(llama.rms_norm_eps);
            keys.initializer_range = Some(llama.initializer_range);
            keys.loss_chunk_tokens = Some(llama.loss_chunk_tokens);
            if let (Some(moe), Some(keys)) = (&llama.moe, &mut keys.moe) {
                keys.moe_intermediate_size = Some(moe.moe_intermediate_size);
                keys.norm_topk_prob = Some(moe.router.norm_topk_prob);
                keys.routed_scaling_factor = Some(moe.router.routed_scaling_factor);
                keys.n_group = Some(moe.router.n_group);
                keys.topk_group = Some(moe.router.topk_group);
                keys.router_aux_loss_coef = Some(moe.router.router_aux_loss_coef);
            }
        }
        (ModelConfig::Gpt2(gpt2), _, Some(keys)) => keys.loss_chunk_tokens = Some(gpt2.loss_chunk_tokens),
        // A pretrained model has its own config.json.
        _ => {}
    }
    if recipe.weights().is_none() {
        full.init.seed = Some(recipe.init_seed());
    }
    let schedule_kind = recipe.resolve_schedule().kind;
    match recipe.resolve_optimizer() {
        ResolvedOptimizer::AdamW { betas, eps } | ResolvedOptimizer::Lamb { betas, eps } => {
            full.optimizer.betas = Some(betas);
            full.optimizer.eps = Some(eps);
        }
        // One-cycle sets the momentum, and has its own key for it.
        ResolvedOptimizer::Sgd { .. } if matches!(schedule_kind, Kind::OneCycle { .. }) => {}
        ResolvedOptimizer::Sgd { momentum } => full.optimizer.momentum = Some(momentum),
    }
    let schedule = &mut full.schedule;
    match schedule_kind {
        Kind::Constant => {}
        Kind::Linear { min_lr_ratio } | Kind::Cosine { min_lr_ratio } => {
            schedule.min_lr_ratio = Some(min_lr_ratio);
        }
        Kind::Wsd { decay_steps, min_lr_ratio } => {
            (schedule.decay_steps, schedule.min_lr_ratio) = (Some(decay_steps), Some(min_lr_ratio));
        }
        Kind::OneCycle { pct_start, start_lr_ratio, min_lr_ratio, momentum } => {
            (schedule.pct_start, schedule.start_lr_ratio) = (Some(pct_start), Some(start_lr_ratio));
            (schedule.min_lr_ratio, schedule.momentum) = (Some(min_lr_ratio), Some(momentum));
        }
        Kind::LrRangeTest { start_lr } => schedule.start_lr = Some(start_lr),
    }
    if let Some(scale) = recipe.resolve_loss_scale() {
        let precision = &mut full.precision;
        precision.loss_scale_initial = Some(scale.initial);
        precision.loss_scale_window = Some(scale.window);
        precision.loss_scale_hysteresis = Some(scale.hysteresis);
        precision.loss_scale_consecutive_hysteresis = Some(scale.consecutive_hysteresis);
        precision.loss_scale_min = Some(scale.min);
    }
    full.run.folder = Some(recipe.folder());
    full.precision.reduce_dtype = Some(recipe.resolve_reduce_dtype());
    full.run.on_nonfinite = Some(recipe.resolve_on_nonfinite());
    Ok(full)
}
