//! A run as a file: what to train, on which data, and how.
//!
//! The structs here are the keys, and their doc comments are the help that an editor shows (`schema`). A recipe is read in
//! `layers`, compared with the schema in `faults` and checked in `check`; `resolve` computes what follows from several keys, such as
//! defaults that depend on other keys. This crate uses neither libtorch nor MPI: `shardwise-run` builds models and options.
//!
//! An unknown key is an error with its line, and so is a key that would have no effect. The one exception is the first of
//! `optimizer.betas`, which the one-cycle schedule overrides. Keys that were renamed are errors that name the new key (`renamed`).

#![forbid(unsafe_code)]

mod change;
mod check;
mod deepspeed;
mod error;
mod faults;
mod intent;
mod layers;
mod package;
mod print;
mod renamed;
mod resolve;
mod schema;
mod source;

use std::path::PathBuf;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use shardwise_plan::Dtype;
use shardwise_plan::package::Package;

pub use deepspeed::{KeyTable, deepspeed_keys};
pub use error::{Error, Result};
pub use resolve::{Batch, ResolvedOptimizer};
pub use schema::schema;
pub use source::{Source, Sources};

/// A training run. Relative paths are relative to this file.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The model to train.
    pub model: ModelRecipe,
    /// The initial values of the parameters.
    #[serde(default)]
    pub init: InitRecipe,
    /// The training data.
    pub data: DataRecipe,
    /// The held-out data to evaluate on.
    pub evaluation: Option<EvaluationRecipe>,
    /// The batch size and the sequence length.
    pub batch: BatchRecipe,
    /// What ZeRO shards, and how far ahead it prefetches.
    #[serde(default)]
    pub zero: ZeroRecipe,
    /// What is elsewhere while it is not needed, because it does not fit in memory: in a folder on a fast disk or, for ranks on GPUs, in the
    /// memory of the host (`"host"`).
    #[serde(default, skip_serializing_if = "OffloadRecipe::is_empty")]
    pub offload: OffloadRecipe,
    /// What is sent with fewer bytes than it has in memory. This changes the results.
    #[serde(default, skip_serializing_if = "CompressionRecipe::is_default")]
    pub compression: CompressionRecipe,
    /// How ranks are arranged in a mesh.
    #[serde(default)]
    pub parallel: ParallelRecipe,
    /// The dtypes of parameters and gradients, and the loss scale.
    #[serde(default)]
    pub precision: PrecisionRecipe,
    /// Which activations the backward pass recomputes.
    #[serde(default)]
    pub activation_checkpointing: ActivationCheckpointingRecipe,
    /// The optimizer and its settings.
    pub optimizer: OptimizerRecipe,
    /// The learning rate schedule.
    #[serde(default)]
    pub schedule: ScheduleRecipe,
    /// How long to train, on which device, and where to write the journal.
    pub run: RunRecipe,
    /// When and where to save checkpoints.
    pub checkpoints: Option<CheckpointsRecipe>,
    /// Timeouts, restarts and checks.
    #[serde(default)]
    pub supervision: SupervisionRecipe,
    /// The recipe's text: as it was written, or without comments if something was laid over it.
    #[serde(skip)]
    pub text: String,
    /// The source of each value.
    #[serde(skip)]
    pub sources: Sources,
    /// Notes for the user about the DeepSpeed configuration that was laid over the recipe.
    #[serde(skip)]
    pub notes: Vec<String>,
}

/// `[model]`
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ModelRecipe {
    /// Llama 2 and 3, Mistral and Mixtral, Qwen 2 and 3.
    pub llama: Option<LlamaRecipe>,
    /// GPT-2.
    pub gpt2: Option<Gpt2Recipe>,
    /// A folder with a Hugging Face checkpoint. The model takes its shape from config.json and, unless `[init]` says otherwise,
    /// starts from the checkpoint's weights.
    pub from_pretrained: Option<String>,
    /// The contents of that config.json.
    #[serde(skip)]
    pub config: Option<Value>,
    /// A folder with a compiled package: any PyTorch model, compiled ahead of time. The batch, the precision and activation
    /// checkpointing must be those that it was compiled for. Packages are code: use only those that you trust.
    pub package: Option<PathBuf>,
    /// Whether to train `model.llama`, `model.gpt2` or `model.from_pretrained` with the compiled layers in `model.package`, by default
    /// packages/NAME for a recipe NAME.toml. `shardwise compile NAME.toml` makes that package.
    #[serde(default)]
    pub compiled: bool,
    /// The manifest of the package.
    #[serde(skip)]
    pub opened_package: Option<Arc<Package>>,
    /// The name prefixes of parameters that are not trained.
    #[serde(default)]
    pub frozen: Vec<String>,
    /// How many tokens a block processes at a time, except in attention: for sequences so long that the activations of one block do not fit.
    /// A block then keeps only its input and output, and the query, key, value and output of attention; the backward pass computes
    /// the rest again, which takes as long as their forward pass. Defaults to all tokens. Cannot be combined with parallel.tensor, or with
    /// zero-bubble schedules.
    pub block_chunk_tokens: Option<usize>,
}

/// `[model.llama]`: Llama 2 and 3, Mistral and Mixtral, Qwen 2 and 3. Keys have the names of Hugging Face's config.json.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaRecipe {
    /// The size of the vocabulary. Token ids are smaller than this.
    pub vocab_size: usize,
    /// The size of the hidden states.
    pub hidden_size: usize,
    /// The number of transformer blocks.
    pub num_hidden_layers: usize,
    /// The number of query heads.
    pub num_attention_heads: usize,
    /// The size of the MLP's hidden layer.
    pub intermediate_size: usize,
    /// Experts in place of the MLP, in every block.
    pub moe: Option<MoeRecipe>,
    /// The number of key and value heads. Must divide num_attention_heads, which is also the default.
    pub num_key_value_heads: Option<usize>,
    /// The size of an attention head. Defaults to hidden_size / num_attention_heads.
    pub head_dim: Option<usize>,
    /// The base of the rotary position embedding (RoPE). Defaults to 10000.
    pub rope_theta: Option<f64>,
    /// The epsilon that RMSNorm adds to the mean square. Defaults to 1e-5.
    pub rms_norm_eps: Option<f64>,
    /// The size of the attention window, including the current token, as in Mistral. Defaults to the whole sequence.
    pub sliding_window: Option<usize>,
    /// The standard deviation of the initial values of weight matrices. Defaults to 0.02.
    pub initializer_range: Option<f64>,
    /// The number of tokens whose logits are computed at a time. Defaults to 256, and on a GPU to what fits into half a gibibyte.
    pub loss_chunk_tokens: Option<usize>,
    /// Whether the head and the embedding share one weight matrix.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Whether the query, key and value projections have biases, as in Qwen 2.
    #[serde(default)]
    pub qkv_bias: bool,
    /// Whether queries and keys are normalized per head, as in Qwen 3.
    #[serde(default)]
    pub qk_norm: bool,
}

/// `[model.llama.moe]`: a mixture of experts. Keys have the names of Hugging Face's config.json.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MoeRecipe {
    /// The number of experts in a block.
    pub num_experts: usize,
    /// The number of experts that process a token (top-k).
    pub num_experts_per_tok: usize,
    /// The size of an expert's hidden layer. Defaults to intermediate_size.
    pub moe_intermediate_size: Option<usize>,
    /// The number of experts that process every token, as in DeepSeek.
    #[serde(default)]
    pub n_shared_experts: usize,
    /// In training, how many tokens of a sequence an expert processes at most, relative to the mean of all experts (GShard, Switch Transformer).
    /// An expert drops tokens beyond that; evaluation and generation drop none. Without this key, nothing does (dropless).
    pub capacity_factor: Option<f64>,
    /// How the router's logits become scores.
    #[serde(default)]
    pub scoring_func: ScoringFuncRecipe,
    /// Whether the scores of a token's experts are divided by their sum. Defaults to true, unless num_experts_per_tok is 1.
    pub norm_topk_prob: Option<bool>,
    /// What the weights of a token's experts are multiplied by. Defaults to 1.
    pub routed_scaling_factor: Option<f64>,
    /// The number of groups of experts, as in DeepSeek-V3: a token chooses groups by the sum of their two highest scores, and then
    /// experts in these groups. Defaults to 1.
    pub n_group: Option<usize>,
    /// The number of groups that a token chooses.
    pub topk_group: Option<usize>,
    /// The coefficient of the loss that balances the experts, per sequence as in DeepSeek-V3. It is not part of the reported loss. Defaults
    /// to 0.01, or to 0 if router_bias_update_rate is set; 0 turns it off.
    pub router_aux_loss_coef: Option<f64>,
    /// The coefficient of the loss that keeps the router's logits small (ST-MoE: z-loss). Defaults to 0.
    #[serde(default)]
    pub router_z_loss_coef: f64,
    /// How much an update changes the bias that is added to scores when tokens choose experts. It balances experts without a loss
    /// (DeepSeek-V3: bias update speed, 0.001 there). 0 for no bias.
    #[serde(default)]
    pub router_bias_update_rate: f64,
}

/// `scoring_func`
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum ScoringFuncRecipe {
    /// The scores of all experts sum to one.
    #[default]
    Softmax,
    /// The score of each expert is independent of the others, as in DeepSeek-V3.
    Sigmoid,
}

/// `[model.gpt2]`. Keys have the names of Hugging Face's config.json.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Gpt2Recipe {
    /// The size of the vocabulary. Token ids are smaller than this.
    pub vocab_size: usize,
    /// The maximum sequence length.
    pub n_positions: usize,
    /// The size of the hidden states.
    pub n_embd: usize,
    /// The number of transformer blocks.
    pub n_layer: usize,
    /// The number of attention heads.
    pub n_head: usize,
    /// The number of tokens whose logits are computed at a time. Defaults to 256, and on a GPU to what fits into half a gibibyte.
    pub loss_chunk_tokens: Option<usize>,
}

/// `[init]`
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct InitRecipe {
    /// The seed of the random initial values. Defaults to 1.
    pub seed: Option<u64>,
    /// A safetensors file, or a folder with a Hugging Face checkpoint, to load the initial values from instead.
    pub weights: Option<String>,
}

/// `[data]`: one of `corpus`, `mixture` and `chat`. Without any of them, tokens are random.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DataRecipe {
    /// A corpus of token ids: Megatron's PATH.bin and PATH.idx, or a raw file of ids, as in nanoGPT.
    pub corpus: Option<PathBuf>,
    /// Several corpora with their weights.
    pub mixture: Option<Vec<PartRecipe>>,
    /// A JSON Lines file with one conversation per line. Needs data.tokenizer.
    pub chat: Option<PathBuf>,
    /// The tokenizer: a tokenizer.json, or a folder with one.
    pub tokenizer: Option<PathBuf>,
    /// The size of a token id in a raw corpus, in bytes: 2 or 4.
    pub token_bytes: Option<usize>,
    /// The seed of the shuffle.
    #[serde(default)]
    pub seed: u64,
}

/// One corpus of `data.mixture`.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PartRecipe {
    /// A corpus, as in data.corpus.
    pub corpus: PathBuf,
    /// Its weight relative to the others.
    pub weight: f64,
}

/// `[evaluation]`: the loss on held-out tokens, at the end of the run and every `every_steps` steps.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluationRecipe {
    /// The held-out corpus, as in data.corpus.
    pub corpus: PathBuf,
    /// Evaluate every N steps, as well as at the end of the run. Defaults to the end only.
    pub every_steps: Option<u64>,
    /// The maximum number of sequences to evaluate on. Defaults to all of them.
    pub max_sequences: Option<u64>,
}

/// `[batch]`: global_batch_size = micro_batch_size × gradient_accumulation_steps × ranks. Two of the three give the third;
/// micro_batch_size alone means one micro-batch per step. Ranks that share layers (parallel.tensor), divide sequences
/// (parallel.context) or hold the stages of a pipeline (parallel.pipeline) count as one.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BatchRecipe {
    /// The number of sequences per step, over all ranks. Defaults to micro_batch_size × gradient_accumulation_steps × ranks.
    pub global_batch_size: Option<usize>,
    /// The number of sequences per micro-batch, on each rank. May be left out if the other two keys are given.
    pub micro_batch_size: Option<usize>,
    /// The number of micro-batches per step, on each rank. Defaults to 1, or to what follows from global_batch_size.
    pub gradient_accumulation_steps: Option<usize>,
    /// The number of tokens per sequence.
    pub seq_len: usize,
}

/// `[zero]`
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ZeroRecipe {
    /// The ZeRO stage, 0 to 3. Stage 1 shards the optimizer state, stage 2 also the gradients, stage 3 also the parameters.
    pub stage: u8,
    /// How many units to gather ahead of the one that is computing, and to reduce behind it. 0 uses the least memory.
    pub prefetch: usize,
    /// Whether to reduce gradients after each micro-batch instead of once per step: less memory, more traffic.
    pub reduce_each_micro_batch: bool,
}

impl Default for ZeroRecipe {
    fn default() -> Self {
        ZeroRecipe { stage: 3, prefetch: 1, reduce_each_micro_batch: false }
    }
}

/// `[compression]`
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct CompressionRecipe {
    /// How parameters are sent to the ranks that compute with them. int8 quantizes them for the passes of training steps, in blocks of 256
    /// with a scale each (ZeRO++: qwZ): a quarter of the bytes in f32, and half in bf16. Updates and evaluations use the exact parameters.
    /// Needs `zero.stage = 3`.
    pub parameters: ParameterCodecRecipe,
}

impl CompressionRecipe {
    fn is_default(&self) -> bool {
        *self == CompressionRecipe::default()
    }
}

/// `parameters` of `[compression]`
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum ParameterCodecRecipe {
    /// As they are.
    #[default]
    None,
    /// Quantized to 8 bits.
    Int8,
}

/// What a value of `[offload]` that is not a folder says: the memory of the host.
pub const HOST: &str = "host";

/// `[offload]`: where buffers are while they are not needed, each a folder or "host". Changes no result.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct OffloadRecipe {
    /// Where the optimizer state and, in mixed precision, the f32 master parameters are. Those of a unit are in memory only while it is
    /// updated. In a folder, each rank has a file without a name, which the system deletes when the rank ends. Defaults to memory.
    pub optimizer: Option<PathBuf>,
    /// Where this rank's shard of the parameters is. That of a unit is in memory only until it is gathered, and while it is updated. Needs
    /// `zero.stage = 3`. Defaults to memory.
    pub parameters: Option<PathBuf>,
    /// Where gradients are from their reduction to the update. Defaults to memory.
    pub gradients: Option<PathBuf>,
    /// Where the activations are that `activation_checkpointing = "full"` keeps: the input of each block, from its forward pass until it is
    /// recomputed. Defaults to memory.
    pub activations: Option<PathBuf>,
}

impl OffloadRecipe {
    fn is_empty(&self) -> bool {
        let OffloadRecipe { optimizer, parameters, gradients, activations } = self;
        [optimizer, parameters, gradients, activations].into_iter().all(Option::is_none)
    }
}

/// `[parallel]`
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelRecipe {
    /// The number of stages of a pipeline (pipeline parallelism). Each stage holds some consecutive units of the model on an equal share of
    /// the ranks. The micro-batches of a step, batch.gradient_accumulation_steps, pass through the stages.
    pub pipeline: usize,
    /// The order in which stages work on micro-batches: gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v or looped-bfs. Interleaved-1f1b and
    /// looped-bfs cut the model into 2 chunks per stage, or as many as a number says, as in looped-bfs:4. A path that ends in .csv is a
    /// schedule in the format of torch.distributed.pipelining. No effect if pipeline is 1.
    pub pipeline_schedule: String,
    /// The first unit of every chunk of the pipeline except the first, such as ["block.3"]. By default, chunks have about equally many
    /// FLOPs. No effect if pipeline is 1.
    pub pipeline_split_points: Option<Vec<String>>,
    /// The number of replicas, for hybrid sharding (HSDP). Each replica is sharded over an equal share of the ranks.
    pub replicate: usize,
    /// The number of ranks that divide each sequence (context parallelism), for sequences that are too long for one rank. These ranks are
    /// consecutive (if tensor is more than 1, consecutive groups of ranks that share layers), and read parts of the same samples.
    pub context: usize,
    /// The size of the Ulysses groups: this many consecutive ranks of those that divide a sequence exchange positions for heads. Across the
    /// groups, context / ulysses ranks form a ring (ring attention). 1 means ring attention alone, and the value of context means Ulysses
    /// alone. Must divide context. By default, whatever sends the fewest bytes.
    pub ulysses: Option<usize>,
    /// The number of ranks that each hold an equal share of a layer's experts (expert parallelism). Tokens travel to the ranks that hold their
    /// experts. These ranks are among those that shard a replica, and read different samples. Must divide num_experts.
    pub expert: usize,
    /// The number of ranks that share each layer (tensor parallelism). Consecutive ranks do, so they are usually on one host. They
    /// read the same samples.
    pub tensor: usize,
    /// Whether the ranks that share a layer each keep their own part of the sequence between attention and MLP (sequence
    /// parallelism): less memory, for a quarter more traffic unless activations are recomputed. No effect if tensor is 1.
    pub sequence: bool,
    /// Whether the ranks that share a layer compute while they communicate (async tensor parallelism): parts of matrix products in the
    /// forward pass, and gradients of weights in the backward pass. Less waiting, for a little more memory, and the same bits. No effect
    /// if tensor is 1.
    pub async_tensor: bool,
}

impl ParallelRecipe {
    /// Whether the schedule of the pipeline is in a file.
    pub(crate) fn has_schedule_file(&self) -> bool {
        self.pipeline_schedule.ends_with(".csv")
    }
}

impl Default for ParallelRecipe {
    fn default() -> Self {
        ParallelRecipe {
            pipeline: 1,
            pipeline_schedule: "1f1b".to_string(),
            pipeline_split_points: None,
            replicate: 1,
            context: 1,
            ulysses: None,
            expert: 1,
            tensor: 1,
            sequence: true,
            async_tensor: true,
        }
    }
}

/// `[precision]`
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionRecipe {
    /// The dtype of parameters in forward and backward passes and in all-gathers.
    pub param_dtype: FloatRecipe,
    /// The dtype in which gradients are accumulated and sent. Over MPI they are summed in f32, or in f64 if they are f64; NCCL sums in the
    /// dtype itself. At stages 2 and 3, MPI ranks send gradients to which no other micro-batch was added in `param_dtype`, in which
    /// they were computed, except those of embeddings: half the bytes, and the same sums. Defaults to f64 if `param_dtype` is f64, and to f32 otherwise.
    pub reduce_dtype: Option<FloatRecipe>,
    /// The initial loss scale, for f16. Defaults to 65536.
    pub loss_scale_initial: Option<f64>,
    /// Double the loss scale after this many consecutive steps without an overflow. Defaults to 2000.
    pub loss_scale_window: Option<u32>,
    /// Halve the loss scale at the Nth overflow, and at each further overflow until the scale doubles again. Defaults to 1.
    pub loss_scale_hysteresis: Option<u32>,
    /// Restart the hysteresis count after each step without an overflow. Defaults to false.
    pub loss_scale_consecutive_hysteresis: Option<bool>,
    /// The minimum loss scale. An overflow at this scale ends the run. Defaults to 1/1024.
    pub loss_scale_min: Option<f64>,
}

impl Default for PrecisionRecipe {
    fn default() -> Self {
        PrecisionRecipe {
            param_dtype: FloatRecipe::F32,
            reduce_dtype: None,
            loss_scale_initial: None,
            loss_scale_window: None,
            loss_scale_hysteresis: None,
            loss_scale_consecutive_hysteresis: None,
            loss_scale_min: None,
        }
    }
}

/// A floating-point type.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum FloatRecipe {
    /// 32 bits.
    F32,
    /// 16 bits, with the range of f32.
    Bf16,
    /// 16 bits, with a dynamic loss scale.
    F16,
    /// 64 bits, to check numerics: slow, and twice the memory of f32.
    F64,
}

impl FloatRecipe {
    /// The type of a tensor's elements.
    pub fn dtype(self) -> Dtype {
        match self {
            FloatRecipe::F32 => Dtype::F32,
            FloatRecipe::Bf16 => Dtype::Bf16,
            FloatRecipe::F16 => Dtype::F16,
            FloatRecipe::F64 => Dtype::F64,
        }
    }
}

/// `activation_checkpointing`
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum ActivationCheckpointingRecipe {
    /// Keep all activations.
    #[default]
    None,
    /// Keep the outputs of linear layers and recompute the rest.
    Selective,
    /// Keep only the input of each block and recompute the rest.
    Full,
}

/// `[optimizer]`
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerRecipe {
    /// The optimizer.
    #[serde(default)]
    pub kind: OptimizerKind,
    /// The peak learning rate.
    pub lr: f64,
    /// The decay rates of AdamW's and LAMB's moments. Defaults to 0.9 and 0.95 for AdamW, and to 0.9 and 0.999 for LAMB.
    pub betas: Option<[f64; 2]>,
    /// The epsilon in the denominator of AdamW and LAMB. Defaults to 1e-8 for AdamW and to 1e-6 for LAMB.
    pub eps: Option<f64>,
    /// The momentum of SGD. Defaults to 0.
    pub momentum: Option<f64>,
    /// The weight decay. It does not apply to norms and biases.
    #[serde(default)]
    pub weight_decay: f64,
    /// Clip the global gradient norm to this value. Defaults to no clipping.
    pub max_grad_norm: Option<f64>,
    /// Update each unit in the backward pass, as soon as its gradients are reduced, and free them. With one micro-batch per step, gradients
    /// then take the memory of a few units, unless `in_forward` leaves some to the next step. The results are the same. Not possible with anything that must see all gradients first, such as
    /// clipping.
    #[serde(default)]
    pub in_backward: bool,
    /// Leave updates to the next step, which updates each unit just before its forward pass: what updates fetch and store then overlaps with
    /// forward passes. The results are the same. Gradients take memory until then. Together with `in_backward`, every third unit waits for
    /// the forward pass, or every fourth with full activation checkpointing. Not possible with `offload.parameters`.
    #[serde(default)]
    pub in_forward: bool,
}

/// `kind` of an optimizer.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay.
    #[default]
    AdamW,
    /// Stochastic gradient descent, with or without momentum.
    Sgd,
    /// Adam with each parameter's update scaled by a trust ratio.
    Lamb,
}

/// `[schedule]`
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleRecipe {
    /// The shape of the schedule.
    #[serde(default)]
    pub kind: ScheduleKind,
    /// The number of steps over which the learning rate rises from 0 to its peak.
    #[serde(default)]
    pub warmup_steps: u64,
    /// The final learning rate divided by the peak, for linear, cosine, wsd and one-cycle. Defaults to 0.1 for cosine, to 4e-6
    /// for one-cycle, and to 0 for linear and wsd.
    pub min_lr_ratio: Option<f64>,
    /// The number of steps over which the learning rate decays, for wsd. Defaults to a tenth of run.steps.
    pub decay_steps: Option<u64>,
    /// The initial learning rate divided by the peak, for one-cycle. Defaults to 0.04.
    pub start_lr_ratio: Option<f64>,
    /// The fraction of all steps over which the learning rate rises, for one-cycle. Defaults to 0.3.
    pub pct_start: Option<f64>,
    /// The momentum at the lowest and at the highest learning rate, for one-cycle. Defaults to 0.95 and 0.85.
    pub momentum: Option<[f64; 2]>,
    /// The initial learning rate, for lr-range-test. Defaults to a millionth of optimizer.lr.
    pub start_lr: Option<f64>,
    /// The file to write the plot to, for lr-range-test. Defaults to no plot.
    pub plot: Option<PathBuf>,
}

/// `kind` of a schedule.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// Stay at the peak.
    #[default]
    Constant,
    /// Decay linearly.
    Linear,
    /// Decay along half a cosine.
    Cosine,
    /// Warmup-stable-decay: stay at the peak, then decay linearly at the end.
    Wsd,
    /// Rise and fall along half cosines, while the momentum falls and rises.
    OneCycle,
    /// Rise exponentially, to find out at which learning rates training is stable.
    LrRangeTest,
}

/// `[run]`
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RunRecipe {
    /// The number of steps to train.
    pub steps: u64,
    /// The device that ranks compute on.
    #[serde(default)]
    pub device: DeviceRecipe,
    /// Allow several ranks to use the same GPU. NCCL must allow it, too.
    #[serde(default)]
    pub share_devices: bool,
    /// Capture the passes of each unit in CUDA graphs. Not implemented yet: `true` is refused.
    #[serde(default)]
    pub cuda_graphs: bool,
    /// What to do when the loss or the gradients are not finite. Defaults to skip for f16 and to stop for other dtypes.
    pub on_nonfinite: Option<NonFiniteRecipe>,
    /// The folder for the journal, traces and reports. Defaults to checkpoints.folder if that is a local folder, otherwise to
    /// `runs/NAME` next to the recipe.
    pub folder: Option<PathBuf>,
    /// Print a line every N steps.
    #[serde(default = "one_step")]
    pub log_every: u64,
}

fn one_step() -> u64 {
    1
}

/// `[checkpoints]`: a run resumes from the latest checkpoint in the folder, saves as configured here, and saves at its end.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointsRecipe {
    /// The checkpoint folder: a path, or `s3://bucket/folder`, `gs://…`, `az://…`.
    pub folder: String,
    /// Save every N steps, in addition to the save at the end of the run. Defaults to never.
    pub every_steps: Option<u64>,
    /// Save every N minutes, in addition to the save at the end of the run. Defaults to never.
    pub every_minutes: Option<f64>,
    /// Keep the latest N complete checkpoints.
    #[serde(default = "three")]
    pub keep_last: Option<usize>,
    /// Also keep every checkpoint whose step is a multiple of N. Defaults to none.
    pub keep_every: Option<u64>,
    /// Whether training continues while checkpoints are written.
    #[serde(default = "yes")]
    pub background: bool,
    /// The most bytes of old state that a background save may keep at a time, on each rank. Training waits when the buffer is full.
    #[serde(default = "one_gib")]
    pub buffer_bytes: u64,
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
    /// The defaults: save in the background, at the end of the run.
    pub fn at(folder: &str) -> Self {
        CheckpointsRecipe {
            folder: folder.to_string(),
            every_steps: None,
            every_minutes: None,
            keep_last: three(),
            keep_every: None,
            background: true,
            buffer_bytes: one_gib(),
        }
    }
}

/// `[supervision]`: timeouts, restarts and checks.
#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SupervisionRecipe {
    /// Fail when a collective makes no progress for this many seconds.
    pub timeout_s: f64,
    /// Give up on a rank that sends no heartbeat for this many seconds. Ranks send one every half second, even while they compute.
    pub heartbeat_timeout_s: f64,
    /// Give up after this many restarts in a row without progress.
    pub max_restarts: u32,
    /// Whether ranks compare each collective call before they send data. Mismatches are reported at once; each call takes
    /// longer.
    pub verify_collectives: bool,
    /// What to do when the loss or the gradient norm is far above its recent range.
    pub on_spike: SpikeRecipe,
    /// Every N steps, recompute another rank's gradients and compare them. Defaults to never.
    pub spot_check_every: Option<u64>,
}

impl Default for SupervisionRecipe {
    fn default() -> Self {
        SupervisionRecipe {
            timeout_s: 300.,
            heartbeat_timeout_s: 30.,
            max_restarts: 5,
            verify_collectives: false,
            on_spike: SpikeRecipe::Report,
            spot_check_every: None,
        }
    }
}

/// `on_spike`
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum SpikeRecipe {
    /// Take the step and report the spike.
    #[default]
    Report,
    /// End the run before the update.
    Stop,
    /// Return to the latest checkpoint and skip the batch when it comes up again.
    Rollback,
}

/// `device`
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum DeviceRecipe {
    /// The CPU.
    #[default]
    Cpu,
    /// One GPU per rank.
    Cuda,
}

/// `on_nonfinite`
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum NonFiniteRecipe {
    /// End the run.
    Stop,
    /// Skip the step.
    Skip,
}
