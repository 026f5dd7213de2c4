//! What a recipe means: a model, options, a schedule, a batch.

use std::path::{Path, PathBuf};
use std::result::Result as Either;

use serde::Serialize;
use serde_json::Value;
use shardwise_model::hugging_face::Shape;
use shardwise_model::{Gpt2, Llama, Model};
use shardwise_torch::tch::Device;
use shardwise_zero::{AdamW, Lamb, Optimizer, Precision, Sgd, Sharding};

use super::source::Wrong;
use super::{
    AccumulationRecipe, FloatRecipe, NotFiniteRecipe, OptimizerKind, OptimizerRecipe, OutlierRecipe, Recipe,
    RecomputationRecipe, ScheduleKind,
};
use crate::{
    Accumulation, DynamicScale, Kind, LossScale, OnNotFinite, OnOutlier, Options, Recomputation, Result, Schedule,
};

/// The most sequences that a rank computes at once, of micro-batches, and of tokens that it computes at once: far beyond what
/// anybody trains, and far below where sizes could overflow.
pub(super) const SEQUENCES_MAX: usize = 1 << 16;
pub(super) const MICRO_BATCHES_MAX: usize = 1 << 20;
pub(super) const TOKENS_MAX: usize = 1 << 24;

/// The sequences of a step: `global` = `sequences` × `micro_batches` × ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// What a rank computes at once.
    pub sequences: usize,
    /// How many of those make a step, on every rank.
    pub micro_batches: usize,
    /// All of a step, on all ranks.
    pub global: usize,
}

impl Recipe {
    /// The batch on so many ranks. Two of the three keys give the third; all three are checked.
    pub fn batch(&self, ranks: usize) -> Result<Batch> {
        self.batch_of(ranks).map_err(|wrong| self.sources.error(wrong))
    }

    fn batch_of(&self, ranks: usize) -> Either<Batch, Wrong> {
        let given = &self.batch;
        let values = [
            ("batch.global", given.global),
            ("batch.sequences", given.sequences),
            ("batch.micro_batches", given.micro_batches),
        ];
        let said: Vec<(&str, String)> =
            values.iter().filter_map(|(key, value)| Some((*key, value.as_ref()?.to_string()))).collect();
        let wrong = |problem: String| Wrong::between(&said, problem);
        let product = |a: usize, b: usize| a.saturating_mul(b);
        let (sequences, micro_batches) = match (given.global, given.sequences, given.micro_batches) {
            (None, Some(sequences), micro_batches) => (sequences, micro_batches.unwrap_or(1)),
            (Some(global), Some(sequences), Some(micro_batches)) => {
                let actual = product(product(sequences, micro_batches), ranks);
                if actual != global {
                    return Err(wrong(contradiction(global, sequences, micro_batches, ranks)));
                }
                (sequences, micro_batches)
            }
            (Some(global), Some(sequences), None) => {
                (sequences, divided(global, ("batch.sequences", sequences), ranks).map_err(wrong)?)
            }
            (Some(global), None, Some(micro_batches)) => {
                (divided(global, ("batch.micro_batches", micro_batches), ranks).map_err(wrong)?, micro_batches)
            }
            (_, None, _) => return Err(wrong(NEITHER.to_string())),
        };
        let (tokens, global) = (product(sequences, given.positions), product(product(sequences, micro_batches), ranks));
        for (what, value, most) in [
            ("batch.sequences", sequences, SEQUENCES_MAX),
            ("batch.micro_batches", micro_batches, MICRO_BATCHES_MAX),
            ("batch.sequences × batch.positions", tokens, TOKENS_MAX),
        ] {
            if !(1..=most).contains(&value) {
                return Err(wrong(format!("on {ranks} ranks {what} is {value}, and must be from 1 to {most}")));
            }
        }
        Ok(Batch { sequences, micro_batches, global })
    }

    /// The shape of the model.
    pub fn shape(&self) -> Result<Shape> {
        self.shape_of().map_err(|wrong| self.sources.error(wrong))
    }

    pub(super) fn shape_of(&self) -> Either<Shape, Wrong> {
        match (&self.model.llama, &self.model.gpt2, &self.model.config) {
            (Some(llama), None, None) => {
                let plain = Llama::new(llama.vocabulary, llama.width, llama.blocks, llama.heads, llama.mlp_width);
                Ok(Shape::Llama(Llama {
                    kv_heads: llama.kv_heads.unwrap_or(plain.kv_heads),
                    head_width: llama.head_width.unwrap_or(plain.head_width),
                    rope_base: llama.rope_base.unwrap_or(plain.rope_base),
                    norm_epsilon: llama.norm_epsilon.unwrap_or(plain.norm_epsilon),
                    window: llama.window,
                    init_std: llama.init_std.unwrap_or(plain.init_std),
                    head_chunk: llama.head_chunk.unwrap_or(plain.head_chunk),
                    tied: llama.tied,
                    qkv_bias: llama.qkv_bias,
                    qk_norm: llama.qk_norm,
                    ..plain
                }))
            }
            (None, Some(gpt2), None) => {
                let plain = Gpt2::new(gpt2.vocabulary, gpt2.positions, gpt2.width, gpt2.blocks, gpt2.heads);
                Ok(Shape::Gpt2(Gpt2 { head_chunk: gpt2.head_chunk.unwrap_or(plain.head_chunk), ..plain }))
            }
            (None, None, Some(config)) => Shape::from_config(config)
                .map_err(|error| Wrong::at("model.from", format!("model.from: config.json: {error}"))),
            (None, None, None) => {
                Err(Wrong::at("model", "[model] names no model: give model.from, [model.llama] or [model.gpt2]"))
            }
            (llama, gpt2, config) => {
                let given = [("model.llama", llama.is_some()), ("model.gpt2", gpt2.is_some())];
                let mut given: Vec<_> =
                    given.into_iter().filter(|(_, is)| *is).map(|(key, _)| (key, "…".into())).collect();
                given.extend(config.as_ref().map(|_| ("model.from", self.model.from.clone().unwrap_or_default())));
                Err(Wrong::between(&given, "[model] names more than one model: leave all but one out"))
            }
        }
    }

    /// The model.
    pub fn model(&self) -> Result<Model> {
        self.model_of().map_err(|wrong| self.sources.error(wrong))
    }

    pub(super) fn model_of(&self) -> Either<Model, Wrong> {
        let family = match (&self.model.llama, &self.model.gpt2) {
            (Some(_), _) => "model.llama",
            (_, Some(_)) => "model.gpt2",
            _ => "model.from",
        };
        let mut model = self.shape_of()?.model().map_err(|error| match error {
            shardwise_model::Error::Config { key, problem } if family != "model.from" => {
                Wrong::at(format!("{family}.{key}"), format!("{family}.{key}: {problem}"))
            }
            error => Wrong::at(family, format!("{family}: {error}")),
        })?;
        let frozen = |error: shardwise_model::Error| Wrong::at("model.frozen", format!("model.{error}"));
        model.freeze(&self.model.frozen).map_err(frozen)?;
        Ok(model)
    }

    /// What the recipe is called: as its file, without its ending.
    pub fn name(&self) -> String {
        self.sources.path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
    }

    /// Where the run writes what it says of itself.
    pub fn folder(&self) -> PathBuf {
        let checkpoints = self.checkpoints.as_ref().map(|checkpoints| &checkpoints.folder);
        match (&self.run.folder, checkpoints) {
            (Some(folder), _) => folder.clone(),
            (None, Some(folder)) if !folder.contains("://") => PathBuf::from(folder),
            _ => self.sources.path.parent().unwrap_or(Path::new("")).join("runs").join(self.name()),
        }
    }

    /// The model as Hugging Face describes it, if it does.
    pub fn config(&self) -> Option<Value> {
        self.model.config.clone().or_else(|| self.shape().ok()?.config(self.batch.positions))
    }

    /// The weights that parameters begin with, unless they begin with a seed.
    pub fn weights(&self) -> Option<&str> {
        let of_model = self.model.from.as_ref().filter(|_| self.start.seed.is_none());
        self.start.weights.as_ref().or(of_model).map(String::as_str)
    }

    /// Token ids are below this.
    pub fn vocabulary(&self) -> usize {
        self.shape().map_or(0, |shape| shape.vocabulary())
    }

    /// How to train, on a device.
    pub fn options(&self, device: Device) -> Result<Options> {
        self.options_of(device).map_err(|wrong| self.sources.error(wrong))
    }

    pub(super) fn options_of(&self, device: Device) -> Either<Options, Wrong> {
        Ok(Options {
            sharding: Sharding::stage(self.sharding.stage)
                .map_err(|error| Wrong::at("sharding.stage", format!("sharding.stage: {error}")))?,
            precision: Precision {
                parameters: self.precision.parameters.dtype(),
                gradients: self.precision.gradients.dtype(),
            },
            recomputation: match self.recomputation {
                RecomputationRecipe::None => Recomputation::None,
                RecomputationRecipe::Selective => Recomputation::Selective,
                RecomputationRecipe::Full => Recomputation::Full,
            },
            accumulation: match self.sharding.accumulation {
                AccumulationRecipe::Whole => Accumulation::Whole,
                AccumulationRecipe::Sharded => Accumulation::Sharded,
            },
            units_in_flight: self.sharding.units_in_flight,
            optimizer: self.optimizer_of()?,
            schedule: self.schedule_of()?,
            clip_norm: self.optimizer.clip_norm,
            loss_scale: match self.precision.parameters {
                FloatRecipe::F16 => LossScale::Dynamic(self.dynamic_scale()),
                _ => LossScale::Fixed(1.),
            },
            on_not_finite: match self.on_not_finite() {
                NotFiniteRecipe::Stop => OnNotFinite::Stop,
                NotFiniteRecipe::Skip => OnNotFinite::Skip,
            },
            on_outlier: match self.supervision.on_outlier {
                OutlierRecipe::Report => OnOutlier::Report,
                // The run goes back from where the step has stopped.
                OutlierRecipe::Stop | OutlierRecipe::GoBack => OnOutlier::Stop,
            },
            device,
        })
    }

    /// How the loss scale of f16 moves.
    pub(super) fn dynamic_scale(&self) -> DynamicScale {
        let (given, default) = (&self.precision, DynamicScale::DEFAULT);
        DynamicScale {
            initial: given.loss_scale_initial.unwrap_or(default.initial),
            window: given.loss_scale_window.unwrap_or(default.window),
            hysteresis: given.loss_scale_hysteresis.unwrap_or(default.hysteresis),
            consecutive_hysteresis: given.loss_scale_consecutive_hysteresis.unwrap_or(default.consecutive_hysteresis),
            min: given.loss_scale_min.unwrap_or(default.min),
        }
    }

    pub(super) fn on_not_finite(&self) -> NotFiniteRecipe {
        self.run.on_not_finite.unwrap_or(match self.precision.parameters {
            FloatRecipe::F16 => NotFiniteRecipe::Skip,
            _ => NotFiniteRecipe::Stop,
        })
    }

    pub(super) fn optimizer_of(&self) -> Either<Optimizer, Wrong> {
        let OptimizerRecipe { kind, rate, betas, epsilon, momentum, weight_decay, .. } = self.optimizer;
        let unused = |key: &str, value: Option<String>, of: &str| match value {
            Some(value) => Err(Wrong::between(
                &[(key, value), ("optimizer.kind", word(&kind))],
                format!("`{key}` is of {of}, and the optimizer is {}: leave it out", word(&kind)),
            )),
            None => Ok(()),
        };
        let momentum_given = momentum.map(number);
        Ok(match kind {
            OptimizerKind::AdamW => {
                unused("optimizer.momentum", momentum_given, "\"sgd\"")?;
                let [beta1, beta2] = betas.unwrap_or([0.9, 0.95]);
                Optimizer::AdamW(AdamW { rate, beta1, beta2, weight_decay, epsilon: epsilon.unwrap_or(1e-8) })
            }
            OptimizerKind::Lamb => {
                unused("optimizer.momentum", momentum_given, "\"sgd\"")?;
                let [beta1, beta2] = betas.unwrap_or([0.9, 0.999]);
                Optimizer::Lamb(Lamb { rate, beta1, beta2, weight_decay, epsilon: epsilon.unwrap_or(1e-6) })
            }
            OptimizerKind::Sgd => {
                let adaptive = "\"adamw\" and \"lamb\"";
                unused("optimizer.betas", betas.map(|betas| format!("{betas:?}")), adaptive)?;
                unused("optimizer.epsilon", epsilon.map(number), adaptive)?;
                Optimizer::Sgd(Sgd { rate, momentum: momentum.unwrap_or(0.), weight_decay })
            }
        })
    }

    pub(super) fn schedule_of(&self) -> Either<Schedule, Wrong> {
        let given = &self.schedule;
        let kind = match given.kind {
            ScheduleKind::Constant => Kind::Constant,
            ScheduleKind::Linear => Kind::Linear { end: given.end.unwrap_or(0.) },
            ScheduleKind::Cosine => Kind::Cosine { end: given.end.unwrap_or(0.1) },
            ScheduleKind::StableDecay => Kind::StableDecay {
                decay_steps: given.decay_steps.unwrap_or(self.run.steps / 10),
                end: given.end.unwrap_or(0.),
            },
            ScheduleKind::OneCycle => Kind::OneCycle {
                rising: given.rising.unwrap_or(0.3),
                start: given.start.unwrap_or(0.04),
                end: given.end.unwrap_or(4e-6),
                momentum: given.momentum.unwrap_or([0.95, 0.85]),
            },
            ScheduleKind::RangeTest => Kind::RangeTest { from: given.from.unwrap_or(self.optimizer.rate * 1e-6) },
        };
        Ok(Schedule { rate: self.optimizer.rate, warmup_steps: given.warmup_steps, steps: self.run.steps, kind })
    }
}

pub(super) const NEITHER: &str = "[batch] does not say how much a rank computes at once: give `batch.sequences`, or \
                                  `batch.global` with `batch.micro_batches`";

/// A word as a recipe has it, in its quotation marks.
pub(super) fn word(value: &impl Serialize) -> String {
    toml::Value::try_from(value).map_or_else(|_| String::new(), |value| value.to_string())
}

/// A number as people write it: 1e-8 rather than 0.00000001.
pub(super) fn number(value: f64) -> String {
    let is_small = value != 0. && value.abs() < 1e-3;
    if is_small { format!("{value:e}") } else { format!("{value:?}") }
}

/// What `global` leaves for the one of sequences and micro-batches that is not given.
fn divided(global: usize, (key, part): (&str, usize), ranks: usize) -> Either<usize, String> {
    let each = part.saturating_mul(ranks);
    if each != 0 && global.is_multiple_of(each) && global > 0 {
        return Ok(global / each);
    }
    let below = global.checked_div(each).unwrap_or(0).saturating_mul(each);
    let above = below.saturating_add(each);
    let near = if below == 0 { format!("{above} would do") } else { format!("{below} or {above} would do") };
    Err(format!(
        "batch.global = {global}, and must be a multiple of {key} × ranks = {part} × {ranks} = {each} ({near})"
    ))
}

/// The equation that does not hold, and one change that makes it hold.
fn contradiction(global: usize, sequences: usize, micro_batches: usize, ranks: usize) -> String {
    let actual = sequences.saturating_mul(micro_batches).saturating_mul(ranks);
    let whole = |each: usize| (each != 0 && global >= each && global.is_multiple_of(each)).then(|| global / each);
    let remedy = match (whole(sequences.saturating_mul(ranks)), whole(micro_batches.saturating_mul(ranks))) {
        (Some(micro_batches), _) => format!("batch.micro_batches = {micro_batches}"),
        (None, Some(sequences)) => format!("batch.sequences = {sequences}"),
        (None, None) => format!("batch.global = {actual}"),
    };
    format!(
        "batch.global = {global}, but batch.sequences × batch.micro_batches × ranks = {sequences} × {micro_batches} × {ranks} = \
         {actual}: change one of them ({remedy} would do)"
    )
}
