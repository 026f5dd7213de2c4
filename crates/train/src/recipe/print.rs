//! A recipe as it came out: every value, defaults included, with where it comes from. It can be read back.

use shardwise_model::hugging_face::Shape;
use shardwise_zero::Optimizer;

use super::build::number;
use super::{Recipe, Source};
use crate::{Error, Kind, LossScale, Result};

/// Where comments begin, at the least.
const COMMENT_COLUMN: usize = 40;

impl Recipe {
    /// The recipe as TOML: every value, defaults included, with its source behind it. With the number of ranks, the batch has
    /// all three of its sizes.
    pub fn resolved(&self, ranks: Option<usize>) -> Result<String> {
        resolved(self, ranks)
    }
}

pub(super) fn resolved(recipe: &Recipe, ranks: Option<usize>) -> Result<String> {
    let full = filled(recipe, ranks)?;
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
                let line = short(line);
                text += &format!("{line:COMMENT_COLUMN$} # {}\n", source(recipe, &key, ranks));
            }
            None => text += &format!("{line}\n"),
        }
    }
    Ok(text)
}

/// A line with its number as people write it.
fn short(line: &str) -> String {
    match line.split_once(" = ") {
        Some((name, value)) if value.contains('.') => match value.parse() {
            Ok(value) => format!("{name} = {}", number(value)),
            Err(_) => line.to_string(),
        },
        _ => line.to_string(),
    }
}

/// Where a printed value comes from. A size of the batch that nobody gave follows from the others.
fn source(recipe: &Recipe, key: &str, ranks: Option<usize>) -> String {
    let own = if key.starts_with("data.mixture.") { "data.mixture" } else { key };
    let follows = match key {
        "batch.global" | "batch.sequences" => true,
        "batch.micro_batches" => recipe.batch.global.is_some(),
        _ => false,
    };
    match (recipe.sources.of(own), ranks) {
        (Source::Default, Some(ranks)) if follows => {
            format!("from global = sequences × micro_batches × {ranks} ranks")
        }
        _ => recipe.sources.describe(own),
    }
}

/// The recipe with what it leaves to defaults filled in.
fn filled(recipe: &Recipe, ranks: Option<usize>) -> Result<Recipe> {
    let mut full = recipe.clone();
    if let Some(ranks) = ranks {
        let batch = recipe.batch(ranks)?;
        full.batch.global = Some(batch.global);
        full.batch.sequences = Some(batch.sequences);
        full.batch.micro_batches = Some(batch.micro_batches);
    } else if full.batch.global.is_none() {
        full.batch.micro_batches = Some(full.batch.micro_batches.unwrap_or(1));
    }
    if let (Shape::Llama(llama), Some(keys)) = (recipe.shape()?, &mut full.model.llama) {
        keys.kv_heads = Some(llama.kv_heads);
        keys.head_width = Some(llama.head_width);
        keys.rope_base = Some(llama.rope_base);
        keys.norm_epsilon = Some(llama.norm_epsilon);
        keys.init_std = Some(llama.init_std);
        keys.head_chunk = Some(llama.head_chunk);
    }
    if let (Shape::Gpt2(gpt2), Some(keys)) = (recipe.shape()?, &mut full.model.gpt2) {
        keys.head_chunk = Some(gpt2.head_chunk);
    }
    if recipe.weights().is_none() {
        full.start.seed = Some(recipe.start.seed.unwrap_or(1));
    }
    let options = recipe.options(shardwise_torch::tch::Device::Cpu)?;
    match options.optimizer {
        Optimizer::AdamW(adamw) => {
            full.optimizer.betas = Some([adamw.beta1, adamw.beta2]);
            full.optimizer.epsilon = Some(adamw.epsilon);
        }
        Optimizer::Lamb(lamb) => {
            full.optimizer.betas = Some([lamb.beta1, lamb.beta2]);
            full.optimizer.epsilon = Some(lamb.epsilon);
        }
        // 1-cycle moves the momentum, and has its own key for it.
        Optimizer::Sgd(sgd) if !matches!(options.schedule.kind, Kind::OneCycle { .. }) => {
            full.optimizer.momentum = Some(sgd.momentum);
        }
        // One's own is no recipe's.
        _ => {}
    }
    let schedule = &mut full.schedule;
    match options.schedule.kind {
        Kind::Constant => {}
        Kind::Linear { end } | Kind::Cosine { end } => schedule.end = Some(end),
        Kind::StableDecay { decay_steps, end } => {
            (schedule.decay_steps, schedule.end) = (Some(decay_steps), Some(end));
        }
        Kind::OneCycle { rising, start, end, momentum } => {
            (schedule.rising, schedule.start) = (Some(rising), Some(start));
            (schedule.end, schedule.momentum) = (Some(end), Some(momentum));
        }
        Kind::RangeTest { from } => schedule.from = Some(from),
    }
    if let LossScale::Dynamic(scale) = options.loss_scale {
        let precision = &mut full.precision;
        precision.loss_scale_initial = Some(scale.initial);
        precision.loss_scale_window = Some(scale.window);
        precision.loss_scale_hysteresis = Some(scale.hysteresis);
        precision.loss_scale_consecutive_hysteresis = Some(scale.consecutive_hysteresis);
        precision.loss_scale_min = Some(scale.min);
    }
    full.run.folder = Some(recipe.folder());
    full.run.on_not_finite = Some(recipe.on_not_finite());
    Ok(full)
}
