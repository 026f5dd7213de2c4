//! A run as a file: what to train, on what, how.
//!
//! Parsed once, into narrow structs. A key that is not known is an error with its line, and so is one that would do nothing;
//! but for the first of `optimizer.betas`, which 1-cycle moves.

use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use shardwise_checkpoint::hugging_face::Weights;
use shardwise_model::hugging_face::Shape;
use shardwise_model::{Gpt2, Llama, Model};
use shardwise_plan::Dtype;
use shardwise_torch::tch::Device;
use shardwise_zero::{AdamW, Lamb, Optimizer, Precision, Sgd, Sharding};

use crate::{Accumulation, Error, Kind, LossScale, OnNotFinite, Options, Recomputation, Result, Schedule};

pub(crate) const NO_CUDA: &str =
    "run.device is 'cuda', and this program was built without it: cargo build --release --features cuda";

const UNITS_IN_FLIGHT_MAX: usize = 1 << 12;

/// The longest recipe that is read.
const RECIPE_BYTES_MAX: u64 = 1 << 20;

/// A recipe. Relative paths in it are relative to the file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// What is trained.
    pub model: ModelRecipe,
    /// What its parameters begin with.
    #[serde(default)]
    pub start: StartRecipe,
    /// What it is trained on.
    pub data: DataRecipe,
    /// How much of it in a step.
    pub batch: BatchRecipe,
    /// What is sliced, among whom.
    #[serde(default)]
    pub sharding: ShardingRecipe,
    /// In which types.
    #[serde(default)]
    pub precision: PrecisionRecipe,
    /// What is kept for the backward pass.
    #[serde(default)]
    pub recomputation: RecomputationRecipe,
    /// How parameters are updated.
    pub optimizer: OptimizerRecipe,
    /// How the rate moves.
    #[serde(default)]
    pub schedule: ScheduleRecipe,
    /// How long, and where.
    pub run: RunRecipe,
    /// What is saved, and gone on from.
    pub checkpoints: Option<CheckpointsRecipe>,
    /// The recipe as it was written.
    #[serde(skip)]
    pub text: String,
}

/// `[model]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelRecipe {
    /// `[model.llama]`
    pub llama: Option<LlamaRecipe>,
    /// `[model.gpt2]`
    pub gpt2: Option<Gpt2Recipe>,
    /// A Hugging Face checkpoint: a folder with `config.json`, whose shape the model has and, unless `[start]` says otherwise,
    /// whose weights it begins with.
    pub from: Option<String>,
    /// What that file says.
    #[serde(skip)]
    pub config: Option<Value>,
    /// Parameters that stay as they begin, by the beginnings of their names.
    #[serde(default)]
    pub frozen: Vec<String>,
}

/// `[model.llama]`: Llama 2 and 3, Mistral, Qwen 2 and 3.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "the keys are the fields of shardwise_model::Llama")]
pub struct LlamaRecipe {
    pub vocabulary: usize,
    pub width: usize,
    pub blocks: usize,
    pub heads: usize,
    pub mlp_width: usize,
    pub kv_heads: Option<usize>,
    pub head_width: Option<usize>,
    pub rope_base: Option<f64>,
    pub norm_epsilon: Option<f64>,
    pub window: Option<usize>,
    pub init_std: Option<f64>,
    pub head_chunk: Option<usize>,
    #[serde(default)]
    pub tied: bool,
    #[serde(default)]
    pub qkv_bias: bool,
    #[serde(default)]
    pub qk_norm: bool,
}

/// `[model.gpt2]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "the keys are the fields of shardwise_model::Gpt2")]
pub struct Gpt2Recipe {
    pub vocabulary: usize,
    pub positions: usize,
    pub width: usize,
    pub blocks: usize,
    pub heads: usize,
    pub head_chunk: Option<usize>,
}

/// `[start]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StartRecipe {
    /// What parameters are made of; 1 unless said otherwise.
    pub seed: Option<u64>,
    /// A safetensors file, or a folder of a Hugging Face checkpoint, that they are read from instead.
    pub weights: Option<String>,
}

/// `[data]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataRecipe {
    /// A file of token ids, little-endian; without one, tokens are random.
    pub tokens: Option<PathBuf>,
    /// The size of an id in that file: 2, unless said otherwise, or 4.
    pub token_bytes: Option<usize>,
    /// The order of the data.
    #[serde(default)]
    pub seed: u64,
}

/// `[batch]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchRecipe {
    /// Sequences that a rank computes at once.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub positions: usize,
    /// Micro-batches of a step, on every rank.
    #[serde(default = "one")]
    pub micro_batches: usize,
}

fn one() -> usize {
    1
}

/// `[sharding]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShardingRecipe {
    /// ZeRO's stage, 0 to 3.
    pub stage: u8,
    /// Into how many replicas the ranks are divided, each of which holds the whole model in slices.
    pub replicas: usize,
    /// Units on their way ahead of and behind the one that computes. With 0 the least memory is needed.
    pub units_in_flight: usize,
    /// Where gradients of several micro-batches are added up.
    pub accumulation: AccumulationRecipe,
}

impl Default for ShardingRecipe {
    fn default() -> Self {
        ShardingRecipe { stage: 3, replicas: 1, units_in_flight: 1, accumulation: AccumulationRecipe::Whole }
    }
}

/// `accumulation`
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "see Accumulation")]
pub enum AccumulationRecipe {
    Whole,
    Sharded,
}

/// `[precision]`
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionRecipe {
    /// Parameters, as units compute with them and as they are gathered.
    pub parameters: FloatRecipe,
    /// Gradients, as they are added up and sent to be reduced.
    pub gradients: FloatRecipe,
}

impl Default for PrecisionRecipe {
    fn default() -> Self {
        PrecisionRecipe { parameters: FloatRecipe::F32, gradients: FloatRecipe::F32 }
    }
}

/// A type of numbers.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "see Dtype")]
pub enum FloatRecipe {
    F32,
    Bf16,
    F16,
}

impl FloatRecipe {
    fn dtype(self) -> Dtype {
        match self {
            FloatRecipe::F32 => Dtype::F32,
            FloatRecipe::Bf16 => Dtype::Bf16,
            FloatRecipe::F16 => Dtype::F16,
        }
    }
}

/// `recomputation`
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "see Recomputation")]
pub enum RecomputationRecipe {
    #[default]
    None,
    Selective,
    Full,
}

/// `[optimizer]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerRecipe {
    /// Which.
    #[serde(default)]
    pub kind: OptimizerKind,
    /// The highest learning rate.
    pub rate: f64,
    /// AdamW's and LAMB's decays of the moments.
    pub betas: Option<[f64; 2]>,
    /// AdamW's and LAMB's guard against division by zero.
    pub epsilon: Option<f64>,
    /// SGD's momentum.
    pub momentum: Option<f64>,
    /// Weight decay.
    #[serde(default)]
    pub weight_decay: f64,
    /// The largest norm of all gradients together.
    pub clip_norm: Option<f64>,
}

/// `kind` of an optimizer.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "see Optimizer")]
pub enum OptimizerKind {
    #[default]
    AdamW,
    Sgd,
    Lamb,
}

/// `[schedule]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleRecipe {
    /// Which.
    #[serde(default)]
    pub kind: ScheduleKind,
    /// Steps over which the rate rises.
    #[serde(default)]
    pub warmup_steps: u64,
    /// The part of the rate with which it ends: of linear, cosine, stable-decay and 1-cycle.
    pub end: Option<f64>,
    /// Steps over which it falls: of stable-decay.
    pub decay_steps: Option<u64>,
    /// The part of the rate with which it begins: of 1-cycle.
    pub start: Option<f64>,
    /// The part of all steps over which it rises: of 1-cycle.
    pub rising: Option<f64>,
    /// The momentum at the lowest and at the highest rate: of 1-cycle.
    pub momentum: Option<[f64; 2]>,
    /// The first rate: of a range test.
    pub from: Option<f64>,
    /// Where a range test's plot goes.
    pub plot: Option<PathBuf>,
}

/// `kind` of a schedule.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "see Kind")]
pub enum ScheduleKind {
    #[default]
    Constant,
    Linear,
    Cosine,
    StableDecay,
    #[serde(rename = "1-cycle")]
    OneCycle,
    RangeTest,
}

/// `[run]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunRecipe {
    /// How many steps.
    pub steps: u64,
    /// Where ranks compute.
    #[serde(default)]
    pub device: DeviceRecipe,
    /// What to do when numbers are not finite; f16 skips unless told otherwise, the others stop.
    pub on_not_finite: Option<NotFiniteRecipe>,
    /// Every how many steps a line is printed.
    #[serde(default = "one_step")]
    pub print_every: u64,
}

fn one_step() -> u64 {
    1
}

/// `[checkpoints]`: a run goes on from the newest one in the folder, saves when it is said here, and saves at its end.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointsRecipe {
    /// Where they are: a folder, or `s3://bucket/folder`, `gs://…`, `az://…`.
    pub folder: String,
    /// Every how many steps one is saved.
    pub every_steps: Option<u64>,
    /// After how many minutes one is saved.
    pub every_minutes: Option<f64>,
    /// How many of the last ones are kept; 3 unless said otherwise.
    #[serde(default = "three")]
    pub keep_last: Option<usize>,
    /// Which ones are kept for good: those of every so manieth step.
    pub keep_every: Option<u64>,
    /// Whether training goes on while they are written, for the memory of a copy.
    #[serde(default = "yes")]
    pub background: bool,
}

fn three() -> Option<usize> {
    Some(3)
}

fn yes() -> bool {
    true
}

impl CheckpointsRecipe {
    /// Plain settings: in the background, at the end.
    pub fn at(folder: &str) -> Self {
        CheckpointsRecipe {
            folder: folder.to_string(),
            every_steps: None,
            every_minutes: None,
            keep_last: three(),
            keep_every: None,
            background: true,
        }
    }

    fn check(&self) -> Result<()> {
        let refuse = |problem: &str| Err(Error::Options(format!("checkpoints.{problem}")));
        for (key, value) in [("every_steps", self.every_steps), ("keep_every", self.keep_every)] {
            if value == Some(0) {
                return refuse(&format!("{key} is 0, and must be at least 1"));
            }
        }
        if self.every_minutes.is_some_and(|minutes| !(minutes > 0. && minutes.is_finite())) {
            return refuse("every_minutes must be a positive number");
        }
        match self.keep_last {
            Some(0) => refuse("keep_last is 0, and must be at least 1"),
            _ => Ok(()),
        }
    }
}

/// `device`
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum DeviceRecipe {
    #[default]
    Cpu,
    Cuda,
}

/// `on_not_finite`
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "see OnNotFinite")]
pub enum NotFiniteRecipe {
    Stop,
    Skip,
}

impl Recipe {
    /// Reads a recipe, and makes its paths relative to the file.
    pub fn read(path: &Path) -> Result<Self> {
        let fail = |problem: String| Error::Recipe { path: path.to_path_buf(), problem };
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(|error| fail(error.to_string()))?;
        file.take(RECIPE_BYTES_MAX + 1).read_to_string(&mut text).map_err(|error| fail(error.to_string()))?;
        if text.len() as u64 > RECIPE_BYTES_MAX {
            return Err(fail(format!("it is longer than {RECIPE_BYTES_MAX} bytes, too long for a recipe")));
        }
        let mut recipe: Recipe = toml::from_str(&text).map_err(|error| fail(error.to_string()))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        for file in [&mut recipe.data.tokens, &mut recipe.schedule.plot].into_iter().flatten() {
            *file = folder.join(&*file);
        }
        let checkpoints = recipe.checkpoints.as_mut().map(|checkpoints| &mut checkpoints.folder);
        let addresses = [recipe.start.weights.as_mut(), recipe.model.from.as_mut(), checkpoints];
        for address in addresses.into_iter().flatten().filter(|address| !address.contains("://")) {
            if address.is_empty() {
                return Err(fail(
                    "a folder is named by no text: give model.from, start.weights or checkpoints.folder one"
                        .to_string(),
                ));
            }
            *address = folder.join(&*address).display().to_string();
        }
        if let Some(from) = &recipe.model.from {
            let config = Weights::open(from).and_then(|weights| weights.config());
            let config = config.map_err(|error| fail(format!("model.from: {error}")))?;
            recipe.model.config =
                Some(config.ok_or_else(|| fail(format!("model.from: {from}: there is no config.json")))?);
        }
        recipe.text = text;
        recipe.check().map_err(|error| fail(error.to_string()))?;
        Ok(recipe)
    }

    /// What can be found wrong without a model or a rank.
    fn check(&self) -> Result<()> {
        let refuse = |problem: &str| Err(Error::Options(problem.to_string()));
        // Far beyond what anybody trains, and far below where sizes could overflow.
        let mut counts = vec![
            ("batch.sequences", self.batch.sequences, 1 << 16),
            ("batch.positions", self.batch.positions, 1 << 22),
            ("batch.sequences × batch.positions", self.batch.sequences.saturating_mul(self.batch.positions), 1 << 24),
            ("batch.micro_batches", self.batch.micro_batches, 1 << 20),
            ("sharding.replicas", self.sharding.replicas, 1 << 20),
            ("run.steps", usize::try_from(self.run.steps).unwrap_or(usize::MAX), 1 << 40),
            ("run.print_every", usize::try_from(self.run.print_every).unwrap_or(usize::MAX), 1 << 40),
        ];
        match self.shape()? {
            Shape::Llama(llama) => counts.extend([
                ("model.llama.vocabulary", llama.vocabulary, 1 << 22),
                ("model.llama.width", llama.width, 1 << 17),
                ("model.llama.blocks", llama.blocks, 1 << 12),
                ("model.llama.heads × head_width", llama.heads.saturating_mul(llama.head_width), 1 << 18),
                ("model.llama.mlp_width", llama.mlp_width, 1 << 19),
                ("model.llama.head_chunk", llama.head_chunk, 1 << 24),
            ]),
            Shape::Gpt2(gpt2) => counts.extend([
                ("model.gpt2.vocabulary", gpt2.vocabulary, 1 << 22),
                ("model.gpt2.positions", gpt2.positions, 1 << 22),
                ("model.gpt2.width", gpt2.width, 1 << 17),
                ("model.gpt2.blocks", gpt2.blocks, 1 << 12),
                ("model.gpt2.head_chunk", gpt2.head_chunk, 1 << 24),
            ]),
        }
        for (key, value, most) in counts {
            if !(1..=most).contains(&value) {
                return refuse(&format!("{key} is {value}, and must be between 1 and {most}"));
            }
        }
        if self.sharding.units_in_flight > UNITS_IN_FLIGHT_MAX {
            let (asked, most) = (self.sharding.units_in_flight, UNITS_IN_FLIGHT_MAX);
            return refuse(&format!("sharding.units_in_flight is {asked}, and must be at most {most}"));
        }
        if let Some(bytes) = self.data.token_bytes.filter(|bytes| ![2, 4].contains(bytes)) {
            return refuse(&format!("data.token_bytes is {bytes}, and must be 2 or 4"));
        }
        if self.data.token_bytes.is_some() && self.data.tokens.is_none() {
            return refuse("data.token_bytes is of a file, and there is no data.tokens; leave it out");
        }
        if self.start.seed.is_some() && self.start.weights.is_some() {
            return refuse("start.seed and start.weights: parameters begin with one or the other; leave one out");
        }
        if let Shape::Gpt2(gpt2) = self.shape()? {
            let (batch, model) = (self.batch.positions, gpt2.positions);
            if model < batch {
                return refuse(&format!(
                    "batch.positions is {batch}, and the model has {model} (model.gpt2.positions)"
                ));
            }
        }
        if self.run.device == DeviceRecipe::Cuda && cfg!(not(feature = "cuda")) {
            return refuse(NO_CUDA);
        }
        let model = self.model()?;
        if !model.units().iter().flat_map(|unit| unit.parameters()).any(|parameter| parameter.trainable) {
            return Err(Error::AllFrozen);
        }
        if let Some(checkpoints) = &self.checkpoints {
            checkpoints.check()?;
            if self.schedule.kind == ScheduleKind::RangeTest {
                return refuse("a range test is not gone on with: leave [checkpoints] out");
            }
        }
        self.optimizer()?;
        self.schedule()?;
        self.options(Device::Cpu)?.check()
    }

    /// The shape of the model.
    pub fn shape(&self) -> Result<Shape> {
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
            (None, None, Some(config)) => {
                Shape::from_config(config).map_err(|error| Error::Options(format!("model.from: config.json: {error}")))
            }
            _ => Err(Error::Options("model needs one of from, [model.llama] and [model.gpt2]".to_string())),
        }
    }

    /// The model.
    pub fn model(&self) -> Result<Model> {
        let at = |error: shardwise_model::Error| Error::Options(format!("model.{error}"));
        let mut model = self.shape()?.model().map_err(at)?;
        model.freeze(&self.model.frozen).map_err(at)?;
        Ok(model)
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
        let is_f16 = self.precision.parameters == FloatRecipe::F16;
        Ok(Options {
            sharding: Sharding::stage(self.sharding.stage)
                .map_err(|error| Error::Options(format!("sharding.stage: {error}")))?,
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
            optimizer: self.optimizer()?,
            schedule: self.schedule()?,
            clip_norm: self.optimizer.clip_norm,
            loss_scale: if is_f16 { LossScale::DYNAMIC } else { LossScale::Fixed(1.) },
            on_not_finite: match self.run.on_not_finite {
                Some(NotFiniteRecipe::Stop) => OnNotFinite::Stop,
                Some(NotFiniteRecipe::Skip) => OnNotFinite::Skip,
                None if is_f16 => OnNotFinite::Skip,
                None => OnNotFinite::Stop,
            },
            device,
        })
    }

    fn optimizer(&self) -> Result<Optimizer> {
        let OptimizerRecipe { kind, rate, betas, epsilon, momentum, weight_decay, clip_norm } = self.optimizer;
        let unused = |key: &str, given: bool, of: &str| match given {
            true => Err(Error::Options(format!("optimizer.{key} is of {of}, and this is {kind:?}; leave it out"))),
            false => Ok(()),
        };
        for (key, value) in [("rate", Some(rate)), ("clip_norm", clip_norm), ("epsilon", epsilon)] {
            if value.is_some_and(|value| !(value > 0. && value.is_finite())) {
                return Err(Error::Options(format!("optimizer.{key} must be a positive number")));
            }
        }
        let parts = betas.into_iter().flatten().chain(momentum);
        if parts.into_iter().any(|part| !(0. ..1.).contains(&part)) {
            return Err(Error::Options("optimizer.betas and optimizer.momentum are from 0 to below 1".to_string()));
        }
        if !(weight_decay >= 0. && weight_decay.is_finite()) {
            return Err(Error::Options("optimizer.weight_decay must be 0 or a positive number".to_string()));
        }
        Ok(match kind {
            OptimizerKind::AdamW => {
                unused("momentum", momentum.is_some(), "SGD")?;
                let [beta1, beta2] = betas.unwrap_or([0.9, 0.95]);
                Optimizer::AdamW(AdamW { rate, beta1, beta2, weight_decay, epsilon: epsilon.unwrap_or(1e-8) })
            }
            OptimizerKind::Lamb => {
                unused("momentum", momentum.is_some(), "SGD")?;
                let [beta1, beta2] = betas.unwrap_or([0.9, 0.999]);
                Optimizer::Lamb(Lamb { rate, beta1, beta2, weight_decay, epsilon: epsilon.unwrap_or(1e-6) })
            }
            OptimizerKind::Sgd => {
                unused("betas", betas.is_some(), "AdamW and LAMB")?;
                unused("epsilon", epsilon.is_some(), "AdamW and LAMB")?;
                Optimizer::Sgd(Sgd { rate, momentum: momentum.unwrap_or(0.), weight_decay })
            }
        })
    }

    fn schedule(&self) -> Result<Schedule> {
        let given = &self.schedule;
        let kind = given.kind;
        // Each key belongs to some kinds; with another one it would do nothing, silently.
        let falls = [ScheduleKind::Linear, ScheduleKind::Cosine, ScheduleKind::StableDecay, ScheduleKind::OneCycle];
        for (key, is_given, of) in [
            ("end", given.end.is_some(), &falls[..]),
            ("decay_steps", given.decay_steps.is_some(), &[ScheduleKind::StableDecay]),
            ("start", given.start.is_some(), &[ScheduleKind::OneCycle]),
            ("rising", given.rising.is_some(), &[ScheduleKind::OneCycle]),
            ("momentum", given.momentum.is_some(), &[ScheduleKind::OneCycle]),
            ("from", given.from.is_some(), &[ScheduleKind::RangeTest]),
            ("plot", given.plot.is_some(), &[ScheduleKind::RangeTest]),
        ] {
            if is_given && !of.contains(&kind) {
                return Err(Error::Options(format!("schedule.{key} is of {of:?}, and this is {kind:?}; leave it out")));
            }
        }
        let parts = [("end", given.end), ("start", given.start), ("rising", given.rising)];
        for (key, part) in parts {
            if part.is_some_and(|part| !(0. ..=1.).contains(&part)) {
                return Err(Error::Options(format!("schedule.{key} is a part, and must be from 0 to 1")));
            }
        }
        if given.momentum.into_iter().flatten().any(|momentum| !(0. ..1.).contains(&momentum)) {
            return Err(Error::Options("schedule.momentum is from 0 to below 1".to_string()));
        }
        if kind == ScheduleKind::OneCycle && self.optimizer.momentum.is_some() {
            let problem = "optimizer.momentum: 1-cycle moves the momentum itself; use schedule.momentum";
            return Err(Error::Options(problem.to_string()));
        }
        if given.from.is_some_and(|from| !(from > 0. && from <= self.optimizer.rate)) {
            return Err(Error::Options("schedule.from must be above 0, and at most optimizer.rate".to_string()));
        }
        let own_rise = [ScheduleKind::OneCycle, ScheduleKind::RangeTest].contains(&kind);
        if own_rise && given.warmup_steps > 0 {
            return Err(Error::Options(format!("schedule.warmup_steps: {kind:?} rises in its own way; leave it out")));
        }
        let kind = match kind {
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
