//! A run as a file: what to train, on what, how.
//!
//! The structs here are the keys, and their comments are what an editor says of them (`schema`). A recipe is read in `layers`,
//! compared with the schema in `faults`, checked in `check`, and turned into models and options in `build`. A key that is not
//! known is an error with its line, and so is one that would do nothing; but for the first of `optimizer.betas`, which 1-cycle
//! moves.

mod build;
mod check;
mod deepspeed;
mod faults;
mod intent;
mod layers;
mod print;
mod schema;
mod source;

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use shardwise_plan::Dtype;

pub use build::Batch;
pub use deepspeed::{Fates, deepspeed_keys};
pub use schema::schema;
pub use source::{Source, Sources};

pub(crate) const NO_CUDA: &str =
    "run.device is \"cuda\", and this program was built without it: cargo build --release --features cuda";

/// A recipe. Relative paths in it are relative to the file.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// What is trained.
    pub model: ModelRecipe,
    /// What its parameters begin with.
    #[serde(default)]
    pub start: StartRecipe,
    /// What it is trained on.
    pub data: DataRecipe,
    /// What it is measured on.
    pub evaluation: Option<EvaluationRecipe>,
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
    /// What is watched meanwhile.
    #[serde(default)]
    pub supervision: SupervisionRecipe,
    /// The recipe as it was written; or, where something was laid over it, with that and without comments.
    #[serde(skip)]
    pub text: String,
    /// Where each value comes from.
    #[serde(skip)]
    pub sources: Sources,
    /// What the user should know of what was laid over it.
    #[serde(skip)]
    pub notes: Vec<String>,
}

/// `[model]`
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ModelRecipe {
    /// `[model.llama]`
    pub llama: Option<LlamaRecipe>,
    /// `[model.gpt2]`
    pub gpt2: Option<Gpt2Recipe>,
    /// A Hugging Face checkpoint: a folder with config.json, whose shape the model has and, unless `[start]` says otherwise,
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
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaRecipe {
    /// Token ids are below this.
    pub vocabulary: usize,
    /// The width of the hidden states.
    pub width: usize,
    /// The number of blocks.
    pub blocks: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The width of the MLP.
    pub mlp_width: usize,
    /// The number of key and value heads, which divides heads; as many as heads unless said otherwise.
    pub kv_heads: Option<usize>,
    /// The width of a head; width / heads unless said otherwise.
    pub head_width: Option<usize>,
    /// The base of the rotary embedding's wavelengths.
    pub rope_base: Option<f64>,
    /// Added to the mean square in the norms.
    pub norm_epsilon: Option<f64>,
    /// How many positions a position sees, itself included, as in Mistral; all unless said otherwise.
    pub window: Option<usize>,
    /// The standard deviation with which matrices begin.
    pub init_std: Option<f64>,
    /// Tokens whose logits exist at once.
    pub head_chunk: Option<usize>,
    /// Whether the head uses the embedding's matrix.
    #[serde(default)]
    pub tied: bool,
    /// Whether query, key and value have biases, as in Qwen 2.
    #[serde(default)]
    pub qkv_bias: bool,
    /// Whether queries and keys are normed per head, as in Qwen 3.
    #[serde(default)]
    pub qk_norm: bool,
}

/// `[model.gpt2]`
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Gpt2Recipe {
    /// Token ids are below this.
    pub vocabulary: usize,
    /// The longest sequence.
    pub positions: usize,
    /// The width of the hidden states.
    pub width: usize,
    /// The number of blocks.
    pub blocks: usize,
    /// The number of query heads.
    pub heads: usize,
    /// Tokens whose logits exist at once.
    pub head_chunk: Option<usize>,
}

/// `[start]`
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct StartRecipe {
    /// What parameters are made of; 1 unless said otherwise.
    pub seed: Option<u64>,
    /// A safetensors file, or a folder of a Hugging Face checkpoint, that they are read from instead.
    pub weights: Option<String>,
}

/// `[data]`: one of `corpus`, `mixture` and `chat`; without any, tokens are random.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DataRecipe {
    /// A corpus of token ids: Megatron's PATH.bin and PATH.idx, or a raw file of ids, as nanoGPT has them.
    pub corpus: Option<PathBuf>,
    /// Several corpora, each with its weight.
    pub mixture: Option<Vec<PartRecipe>>,
    /// A file of conversations, one in a line; needs data.tokenizer.
    pub chat: Option<PathBuf>,
    /// What turns text into ids: a tokenizer.json, or a folder with one.
    pub tokenizer: Option<PathBuf>,
    /// The size of an id where the corpus is a raw file of nothing but ids: 2 or 4.
    pub token_bytes: Option<usize>,
    /// The order of the data.
    #[serde(default)]
    pub seed: u64,
}

/// A part of `data.mixture`.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PartRecipe {
    /// A corpus, as in data.corpus.
    pub corpus: PathBuf,
    /// How much of it, beside the other parts' weights.
    pub weight: f64,
}

/// `[evaluation]`: the loss on tokens that are not trained on, at the end and, if it is said, meanwhile.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluationRecipe {
    /// The corpus that was held out, as in data.corpus.
    pub corpus: PathBuf,
    /// Every how many steps, besides the end.
    pub every_steps: Option<u64>,
    /// How many windows of it at most; all unless said otherwise.
    pub windows: Option<u64>,
}

/// `[batch]`: global = sequences × micro_batches × ranks. Two of the three give the third; sequences alone means one
/// micro-batch.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BatchRecipe {
    /// Sequences of a step, on all ranks together.
    pub global: Option<usize>,
    /// Sequences that a rank computes at once.
    pub sequences: Option<usize>,
    /// Micro-batches of a step, on every rank.
    pub micro_batches: Option<usize>,
    /// Tokens of a sequence.
    pub positions: usize,
}

/// `[sharding]`
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
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
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum AccumulationRecipe {
    /// On every rank, whole, and reduced once a step.
    Whole,
    /// On the ranks that own them, reduced after each micro-batch: less memory, more traffic.
    Sharded,
}

/// `[precision]`
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionRecipe {
    /// Parameters, as units compute with them and as they are gathered.
    pub parameters: FloatRecipe,
    /// Gradients, as they are added up and sent to be reduced.
    pub gradients: FloatRecipe,
    /// The first loss scale of f16.
    pub loss_scale_initial: Option<f64>,
    /// Double the loss scale after this many steps in a row without an overflow.
    pub loss_scale_window: Option<u32>,
    /// Halve the loss scale at this overflow, and at every further one until it is doubled again.
    pub loss_scale_hysteresis: Option<u32>,
    /// Count overflows for the hysteresis anew after every step without one.
    pub loss_scale_consecutive_hysteresis: Option<bool>,
    /// The smallest loss scale: an overflow at this scale ends the run.
    pub loss_scale_min: Option<f64>,
}

impl Default for PrecisionRecipe {
    fn default() -> Self {
        PrecisionRecipe {
            parameters: FloatRecipe::F32,
            gradients: FloatRecipe::F32,
            loss_scale_initial: None,
            loss_scale_window: None,
            loss_scale_hysteresis: None,
            loss_scale_consecutive_hysteresis: None,
            loss_scale_min: None,
        }
    }
}

/// A type of numbers.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum FloatRecipe {
    /// 32 bits.
    F32,
    /// 16 bits, with f32's range.
    Bf16,
    /// 16 bits, with a loss scale that moves by itself.
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
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum RecomputationRecipe {
    /// What autograd wants.
    #[default]
    None,
    /// What linear layers have put out; the rest is computed again.
    Selective,
    /// The input of each unit alone; the rest is computed again.
    Full,
}

/// `[optimizer]`
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
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
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Adam with weight decay of its own.
    #[default]
    AdamW,
    /// Plain steps, with momentum if there is any.
    Sgd,
    /// Adam's directions, scaled by each parameter's norm.
    Lamb,
}

/// `[schedule]`
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, Serialize)]
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
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// The rate stays.
    #[default]
    Constant,
    /// It falls along a line.
    Linear,
    /// It falls along half a cosine.
    Cosine,
    /// It stays, and falls along a line at the end.
    StableDecay,
    /// It rises and falls along half cosines, and the momentum the other way round.
    #[serde(rename = "1-cycle")]
    OneCycle,
    /// It rises geometrically, to find out which rates a model can bear.
    RangeTest,
}

/// `[run]`
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RunRecipe {
    /// How many steps.
    pub steps: u64,
    /// Where ranks compute.
    #[serde(default)]
    pub device: DeviceRecipe,
    /// What to do when numbers are not finite; f16 skips unless told otherwise, the others stop.
    pub on_not_finite: Option<NotFiniteRecipe>,
    /// Where the run writes what it says of itself; where its checkpoints are, if that is a folder, or else in `runs`, by the
    /// recipe's name.
    pub folder: Option<PathBuf>,
    /// Every how many steps a line is printed.
    #[serde(default = "one_step")]
    pub print_every: u64,
}

fn one_step() -> u64 {
    1
}

/// `[checkpoints]`: a run goes on from the newest one in the folder, saves when it is said here, and saves at its end.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointsRecipe {
    /// Where they are: a folder, or `s3://bucket/folder`, `gs://…`, `az://…`.
    pub folder: String,
    /// Every how many steps one is saved.
    pub every_steps: Option<u64>,
    /// After how many minutes one is saved.
    pub every_minutes: Option<f64>,
    /// How many of the last whole ones are kept; 3 unless said otherwise.
    #[serde(default = "three")]
    pub keep_last: Option<usize>,
    /// Which ones are kept for good: those of every so manieth step.
    pub keep_every: Option<u64>,
    /// Whether training goes on while they are written.
    #[serde(default = "yes")]
    pub background: bool,
    /// How many bytes a rank may copy at a time for a save in the background (1 GiB); training waits for what has no room.
    #[serde(default = "one_gib")]
    pub buffer: u64,
}

fn three() -> Option<usize> {
    Some(3)
}

fn yes() -> bool {
    true
}

fn one_gib() -> u64 {
    1 << 30
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
            buffer: one_gib(),
        }
    }
}

/// `[supervision]`: what is watched while a run goes on.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SupervisionRecipe {
    /// How long a call between ranks may stand still, in seconds.
    pub time_limit_s: f64,
    /// How long a rank may give no sign before it is given up, in seconds. It gives one twice a second, whatever it computes.
    pub silence_s: f64,
    /// How many starts in a row may bring nothing before the run is given up.
    pub restarts: u32,
    /// Whether ranks compare every call before they send anything: what does not agree is named at once, for some latency.
    pub checked: bool,
    /// What to do with a step whose loss or gradient norm is far above what it was in the last steps.
    pub on_outlier: OutlierRecipe,
    /// Every how many steps ranks compute each other's gradients once more, and compare; never unless said.
    pub spot_check_every: Option<u64>,
}

impl Default for SupervisionRecipe {
    fn default() -> Self {
        SupervisionRecipe {
            time_limit_s: 300.,
            silence_s: 30.,
            restarts: 5,
            checked: false,
            on_outlier: OutlierRecipe::Report,
            spot_check_every: None,
        }
    }
}

impl SupervisionRecipe {
    /// How ranks call each other.
    pub fn calls(&self) -> shardwise_comm::mpi::Options {
        let time_limit = std::time::Duration::from_secs_f64(self.time_limit_s);
        shardwise_comm::mpi::Options { time_limit, checked: self.checked, ..Default::default() }
    }
}

/// `on_outlier`
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum OutlierRecipe {
    /// It is taken, and reported.
    #[default]
    Report,
    /// The run ends before anything is updated.
    Stop,
    /// The run goes back to its newest checkpoint, and passes over the step's batch when it comes to it again.
    GoBack,
}

/// `device`
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum DeviceRecipe {
    /// The processor.
    #[default]
    Cpu,
    /// A GPU for each rank.
    Cuda,
}

/// `on_not_finite`
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum NotFiniteRecipe {
    /// The run ends.
    Stop,
    /// The step is left out.
    Skip,
}
