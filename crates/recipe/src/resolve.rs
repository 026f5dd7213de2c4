//! Values that follow from several keys: the batch, the model's configuration, folders, and defaults that depend on other keys.
//!
//! Each of these defaults is written once, here: `print` shows it, and `shardwise-run` builds the run from it.

use std::path::{Path, PathBuf};
use std::result::Result as Either;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;
use shardwise_plan::package::Package;
use shardwise_plan::schedule::{Kind, Schedule};
use shardwise_plan::{
    DynamicScale, Gpt2Config, LlamaConfig, ModelConfig, MoeConfig, MoeNames, QkNorm, RouterConfig, ScoringFunc,
};

use super::source::Invalid;
use super::{
    DeviceRecipe, FloatRecipe, LlamaRecipe, MoeRecipe, NonFiniteRecipe, OptimizerKind, Recipe, Result, ScheduleKind,
    ScoringFuncRecipe,
};

/// The maximum micro-batch size, micro-batches per step, and tokens per micro-batch: far beyond any real run, and far below where
/// sizes could overflow.
pub(super) const MICRO_BATCH_SIZE_MAX: usize = 1 << 16;
pub(super) const GRADIENT_ACCUMULATION_STEPS_MAX: usize = 1 << 20;
pub(super) const TOKENS_MAX: usize = 1 << 24;

/// The sequences of a step: `global_batch_size` = `micro_batch_size` × `gradient_accumulation_steps` × ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The number of sequences per micro-batch, on each rank.
    pub micro_batch_size: usize,
    /// The number of micro-batches per step, on each rank.
    pub gradient_accumulation_steps: usize,
    /// The number of sequences per step, on all ranks together.
    pub global_batch_size: usize,
}

/// The optimizer, with its defaults filled in. `optimizer.lr` and `optimizer.weight_decay` apply to every kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ResolvedOptimizer {
    /// Adam with decoupled weight decay.
    AdamW {
        /// The decay rates of the moments.
        betas: [f64; 2],
        /// The epsilon in the denominator.
        eps: f64,
    },
    /// Adam with updates scaled by the norm of each parameter.
    Lamb {
        /// The decay rates of the moments.
        betas: [f64; 2],
        /// The epsilon in the denominator.
        eps: f64,
    },
    /// Stochastic gradient descent.
    Sgd {
        /// The momentum; 0 for none.
        momentum: f64,
    },
}

impl Recipe {
    /// The batch on `ranks` ranks. Two of the three sizes determine the third; if all three are given, they must agree.
    pub fn batch(&self, ranks: usize) -> Result<Batch> {
        let readers = self.data_ranks(ranks);
        let keys = [
            ("parallel.pipeline", self.parallel.pipeline),
            ("parallel.context", self.parallel.context),
            ("parallel.tensor", self.parallel.tensor),
        ];
        let causes = keys.iter().filter(|(_, size)| *size > 1).map(|(key, size)| format!("{key} is {size}"));
        let causes = causes.collect::<Vec<_>>().join(" and ");
        self.compute_batch(readers).map_err(|wrong| match causes.is_empty() {
            true => self.sources.error(wrong),
            false => self.sources.error(
                wrong.with_note(&format!("the {ranks} ranks read {readers} different batches, because {causes}")),
            ),
        })
    }

    fn compute_batch(&self, ranks: usize) -> Either<Batch, Invalid> {
        let given = &self.batch;
        let values = [
            ("batch.global_batch_size", given.global_batch_size),
            ("batch.micro_batch_size", given.micro_batch_size),
            ("batch.gradient_accumulation_steps", given.gradient_accumulation_steps),
        ];
        let said: Vec<(&str, String)> =
            values.iter().filter_map(|(key, value)| Some((*key, value.as_ref()?.to_string()))).collect();
        let wrong = |problem: String| Invalid::between(&said, problem);
        let product = |a: usize, b: usize| a.saturating_mul(b);
        let (size, steps) = match (given.global_batch_size, given.micro_batch_size, given.gradient_accumulation_steps) {
            (None, Some(size), steps) => (size, steps.unwrap_or(1)),
            (Some(global), Some(size), Some(steps)) => {
                let actual = product(product(size, steps), ranks);
                if actual != global {
                    return Err(wrong(contradiction(global, size, steps, ranks)));
                }
                (size, steps)
            }
            (Some(global), Some(size), None) => {
                (size, divide(global, ("batch.micro_batch_size", size), ranks).map_err(wrong)?)
            }
            (Some(global), None, Some(steps)) => {
                (divide(global, ("batch.gradient_accumulation_steps", steps), ranks).map_err(wrong)?, steps)
            }
            (_, None, _) => return Err(wrong(NO_MICRO_BATCH_SIZE.to_string())),
        };
        let (tokens, global) = (product(size, given.seq_len), product(product(size, steps), ranks));
        for (what, value, most) in [
            ("batch.micro_batch_size", size, MICRO_BATCH_SIZE_MAX),
            ("batch.gradient_accumulation_steps", steps, GRADIENT_ACCUMULATION_STEPS_MAX),
            ("batch.micro_batch_size × batch.seq_len", tokens, TOKENS_MAX),
        ] {
            if !(1..=most).contains(&value) {
                return Err(wrong(format!("on {ranks} ranks {what} is {value}, but must be from 1 to {most}")));
            }
        }
        self.check_package_batch(size)?;
        Ok(Batch { micro_batch_size: size, gradient_accumulation_steps: steps, global_batch_size: global })
    }

    /// The configuration of the model: its architecture and sizes.
    pub fn model_config(&self) -> Result<ModelConfig> {
        self.read_model_config().map_err(|wrong| self.sources.error(wrong))
    }

    pub(super) fn read_model_config(&self) -> Either<ModelConfig, Invalid> {
        let config = self.read_named_config()?;
        if self.model.block_chunk_tokens.is_some() && (self.model.opened_package.is_some() || self.model.compiled) {
            let problem =
                "model.block_chunk_tokens: compiled layers process all tokens at once; remove one of the two keys";
            return Err(Invalid::at("model.block_chunk_tokens", problem));
        }
        if config.moe().is_some() && self.model.compiled {
            return Err(Invalid::at("model.compiled", "model.compiled: a mixture of experts cannot be compiled yet"));
        }
        if let Some(package) = self.compiled_package() {
            self.check_compiled(&config, package)?;
        }
        Ok(config)
    }

    /// The number of tokens whose logits are computed at a time. Every chunk adds to the gradient of the whole weight matrix. On a CPU, where
    /// a chunk should fit into the cache, that is cheap next to the products. On a GPU it is not, so a chunk's logits and their softmax
    /// take up to half a gibibyte.
    fn loss_chunk_tokens(&self, given: Option<usize>, vocab_size: usize) -> usize {
        const CPU: usize = 256;
        const GPU_BYTES: usize = 512 << 20;
        given.unwrap_or(match self.run.device {
            DeviceRecipe::Cpu => CPU,
            DeviceRecipe::Cuda => (GPU_BYTES / (8 * vocab_size.max(1)) / CPU * CPU).max(CPU),
        })
    }

    /// The configuration of the model that the recipe names, compiled or not.
    fn read_named_config(&self) -> Either<ModelConfig, Invalid> {
        let model = &self.model;
        let package = model.opened_package.as_ref().filter(|_| !model.compiled);
        let block_chunk_tokens = model.block_chunk_tokens;
        match (&model.llama, &model.gpt2, &model.config, package) {
            (Some(llama), None, None, None) => {
                let plain = LlamaConfig::new(
                    llama.vocab_size,
                    llama.hidden_size,
                    llama.num_hidden_layers,
                    llama.num_attention_heads,
                    llama.intermediate_size,
                );
                Ok(ModelConfig::Llama(LlamaConfig {
                    num_key_value_heads: llama.num_key_value_heads.unwrap_or(plain.num_key_value_heads),
                    head_dim: llama.head_dim.unwrap_or(plain.head_dim),
                    rope_theta: llama.rope_theta.unwrap_or(plain.rope_theta),
                    rms_norm_eps: llama.rms_norm_eps.unwrap_or(plain.rms_norm_eps),
                    sliding_window: llama.sliding_window,
                    initializer_range: llama.initializer_range.unwrap_or(plain.initializer_range),
                    loss_chunk_tokens: self.loss_chunk_tokens(llama.loss_chunk_tokens, llama.vocab_size),
                    block_chunk_tokens,
                    tie_word_embeddings: llama.tie_word_embeddings,
                    qkv_bias: llama.qkv_bias,
                    qk_norm: llama.qk_norm.then_some(QkNorm::PerHead),
                    moe: llama.moe.as_ref().map(|moe| moe_config(moe, llama)),
                    ..plain
                }))
            }
            (None, Some(gpt2), None, None) => {
                let plain = Gpt2Config::new(gpt2.vocab_size, gpt2.n_positions, gpt2.n_embd, gpt2.n_layer, gpt2.n_head);
                let loss_chunk_tokens = self.loss_chunk_tokens(gpt2.loss_chunk_tokens, gpt2.vocab_size);
                Ok(ModelConfig::Gpt2(Gpt2Config { loss_chunk_tokens, block_chunk_tokens, ..plain }))
            }
            (None, None, Some(config), None) => {
                let config = ModelConfig::from_hugging_face(config).map_err(|error| {
                    Invalid::at("model.from_pretrained", format!("model.from_pretrained: config.json: {error}"))
                })?;
                Ok(match config {
                    ModelConfig::Llama(llama) => {
                        let loss_chunk_tokens = self.loss_chunk_tokens(None, llama.vocab_size);
                        ModelConfig::Llama(LlamaConfig { loss_chunk_tokens, block_chunk_tokens, ..llama })
                    }
                    ModelConfig::Gpt2(gpt2) => {
                        let loss_chunk_tokens = self.loss_chunk_tokens(None, gpt2.vocab_size);
                        ModelConfig::Gpt2(Gpt2Config { loss_chunk_tokens, block_chunk_tokens, ..gpt2 })
                    }
                    compiled @ ModelConfig::Compiled(_) => compiled,
                })
            }
            (None, None, None, Some(package)) => {
                self.check_package(package)?;
                Ok(ModelConfig::Compiled(package.clone()))
            }
            (None, None, None, None) if model.compiled => {
                let problem = "model.compiled: there is no model to compile: give model.from_pretrained, [model.llama] or [model.gpt2], or \
                               leave it out to train the model of model.package";
                Err(Invalid::at("model.compiled", problem))
            }
            (None, None, None, None) => {
                let problem =
                    "[model] names no model: give model.from_pretrained, model.package, [model.llama] or [model.gpt2]";
                Err(Invalid::at("model", problem))
            }
            (llama, gpt2, config, package) => {
                let given = [("model.llama", llama.is_some()), ("model.gpt2", gpt2.is_some())];
                let mut given: Vec<_> =
                    given.into_iter().filter(|(_, is)| *is).map(|(key, _)| (key, "…".into())).collect();
                let folder = || self.model.from_pretrained.clone().unwrap_or_default();
                given.extend(config.as_ref().map(|_| ("model.from_pretrained", folder())));
                let folder = |package: &Arc<Package>| package.folder().display().to_string();
                given.extend(package.map(|package| ("model.package", folder(package))));
                let hint = if package.is_some() { ", or set model.compiled to use the package's layers" } else { "" };
                Err(Invalid::between(&given, format!("[model] names more than one model: keep one of them{hint}")))
            }
        }
    }

    /// The recipe's name: its file name without the extension.
    pub fn name(&self) -> String {
        self.sources.path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
    }

    /// The folder that the run writes its journal, traces and reports to.
    pub fn folder(&self) -> PathBuf {
        let checkpoints = self.checkpoints.as_ref().map(|checkpoints| &checkpoints.folder);
        match (&self.run.folder, checkpoints) {
            (Some(folder), _) => folder.clone(),
            (None, Some(folder)) if !folder.contains("://") => PathBuf::from(folder),
            _ => self.sources.path.parent().unwrap_or(Path::new("")).join("runs").join(self.name()),
        }
    }

    /// The model's Hugging Face `config.json`, if there is one for this model.
    pub fn config(&self) -> Option<Value> {
        self.model.config.clone().or_else(|| self.model_config().ok()?.to_hugging_face(self.batch.seq_len))
    }

    /// The package with the compiled layers of a built-in model, if it is to be trained with them.
    pub fn compiled_package(&self) -> Option<&Arc<Package>> {
        self.model.opened_package.as_ref().filter(|_| self.model.compiled)
    }

    /// The hash of the compiled package, if there is one.
    pub fn package_hash(&self) -> Option<&str> {
        self.model.opened_package.as_deref().map(Package::hash)
    }

    /// The address of the weights to initialize parameters from; `None` if they are initialized from a seed.
    pub fn weights(&self) -> Option<&str> {
        let pretrained = self.model.from_pretrained.as_ref().filter(|_| self.init.seed.is_none());
        self.init.weights.as_ref().or(pretrained).map(String::as_str)
    }

    /// The size of the vocabulary. Token ids are smaller than this.
    pub fn vocab_size(&self) -> usize {
        self.model_config().map_or(0, |config| config.vocab_size())
    }

    /// The seed of random initial values, for a recipe without weights to start from.
    pub fn init_seed(&self) -> u64 {
        self.init.seed.unwrap_or(1)
    }

    /// The optimizer, with its defaults filled in.
    pub fn resolve_optimizer(&self) -> ResolvedOptimizer {
        let given = &self.optimizer;
        match given.kind {
            OptimizerKind::AdamW => {
                ResolvedOptimizer::AdamW { betas: given.betas.unwrap_or([0.9, 0.95]), eps: given.eps.unwrap_or(1e-8) }
            }
            OptimizerKind::Lamb => {
                ResolvedOptimizer::Lamb { betas: given.betas.unwrap_or([0.9, 0.999]), eps: given.eps.unwrap_or(1e-6) }
            }
            OptimizerKind::Sgd => ResolvedOptimizer::Sgd { momentum: given.momentum.unwrap_or(0.) },
        }
    }

    /// The learning rate schedule, with its defaults filled in.
    pub fn resolve_schedule(&self) -> Schedule {
        let given = &self.schedule;
        let kind = match given.kind {
            ScheduleKind::Constant => Kind::Constant,
            ScheduleKind::Linear => Kind::Linear { min_lr_ratio: given.min_lr_ratio.unwrap_or(0.) },
            ScheduleKind::Cosine => Kind::Cosine { min_lr_ratio: given.min_lr_ratio.unwrap_or(0.1) },
            ScheduleKind::Wsd => Kind::Wsd {
                decay_steps: given.decay_steps.unwrap_or(self.run.steps / 10),
                min_lr_ratio: given.min_lr_ratio.unwrap_or(0.),
            },
            ScheduleKind::OneCycle => Kind::OneCycle {
                pct_start: given.pct_start.unwrap_or(0.3),
                start_lr_ratio: given.start_lr_ratio.unwrap_or(0.04),
                min_lr_ratio: given.min_lr_ratio.unwrap_or(4e-6),
                momentum: given.momentum.unwrap_or([0.95, 0.85]),
            },
            ScheduleKind::LrRangeTest => {
                Kind::LrRangeTest { start_lr: given.start_lr.unwrap_or(self.optimizer.lr * 1e-6) }
            }
        };
        Schedule { lr: self.optimizer.lr, warmup_steps: given.warmup_steps, steps: self.run.steps, kind }
    }

    /// The dtype of gradients: `precision.reduce_dtype` or its default.
    pub fn resolve_reduce_dtype(&self) -> FloatRecipe {
        self.precision.reduce_dtype.unwrap_or(match self.precision.param_dtype {
            FloatRecipe::F64 => FloatRecipe::F64,
            _ => FloatRecipe::F32,
        })
    }

    /// The dynamic loss scale, with its defaults filled in; `None` if parameters are not f16.
    pub fn resolve_loss_scale(&self) -> Option<DynamicScale> {
        let (given, default) = (&self.precision, DynamicScale::DEFAULT);
        (given.param_dtype == FloatRecipe::F16).then(|| DynamicScale {
            initial: given.loss_scale_initial.unwrap_or(default.initial),
            window: given.loss_scale_window.unwrap_or(default.window),
            hysteresis: given.loss_scale_hysteresis.unwrap_or(default.hysteresis),
            consecutive_hysteresis: given.loss_scale_consecutive_hysteresis.unwrap_or(default.consecutive_hysteresis),
            min: given.loss_scale_min.unwrap_or(default.min),
        })
    }

    /// What to do when the loss or the gradients are not finite: `run.on_nonfinite` or its default.
    pub fn resolve_on_nonfinite(&self) -> NonFiniteRecipe {
        self.run.on_nonfinite.unwrap_or(match self.precision.param_dtype {
            FloatRecipe::F16 => NonFiniteRecipe::Skip,
            _ => NonFiniteRecipe::Stop,
        })
    }
}

pub(super) const NO_MICRO_BATCH_SIZE: &str = "[batch] has no micro-batch size: give `batch.micro_batch_size`, or \
                                  `batch.global_batch_size` with `batch.gradient_accumulation_steps`";

/// An enum value as written in a recipe, in quotation marks.
pub(super) fn word(value: &impl Serialize) -> String {
    toml::Value::try_from(value).map_or_else(|_| String::new(), |value| value.to_string())
}

/// A number as people write it: 1e-8 rather than 0.00000001.
pub(super) fn number(value: f64) -> String {
    let is_small = value != 0. && value.abs() < 1e-3;
    if is_small { format!("{value:e}") } else { format!("{value:?}") }
}

/// Computes the missing one of `micro_batch_size` and `gradient_accumulation_steps` from the other.
fn divide(global: usize, (key, given): (&str, usize), ranks: usize) -> Either<usize, String> {
    let each = given.saturating_mul(ranks);
    if each != 0 && global.is_multiple_of(each) && global > 0 {
        return Ok(global / each);
    }
    let below = global.checked_div(each).unwrap_or(0).saturating_mul(each);
    let above = below.saturating_add(each);
    let near = if below == 0 { format!("{above} would do") } else { format!("{below} or {above} would do") };
    Err(format!(
        "batch.global_batch_size = {global}, but must be a multiple of {key} × ranks = {given} × {ranks} = {each} ({near})"
    ))
}

/// Describes the equation that does not hold, and one change that makes it hold.
fn contradiction(global: usize, size: usize, steps: usize, ranks: usize) -> String {
    let actual = size.saturating_mul(steps).saturating_mul(ranks);
    let whole = |each: usize| (each != 0 && global >= each && global.is_multiple_of(each)).then(|| global / each);
    let remedy = match (whole(size.saturating_mul(ranks)), whole(steps.saturating_mul(ranks))) {
        (Some(steps), _) => format!("batch.gradient_accumulation_steps = {steps}"),
        (None, Some(size)) => format!("batch.micro_batch_size = {size}"),
        (None, None) => format!("batch.global_batch_size = {actual}"),
    };
    format!(
        "batch.global_batch_size = {global}, but batch.micro_batch_size × batch.gradient_accumulation_steps × ranks = \
         {size} × {steps} × {ranks} = {actual}: change one of them ({remedy} would do)"
    )
}

/// The experts of a recipe's model.
fn moe_config(moe: &MoeRecipe, llama: &LlamaRecipe) -> MoeConfig {
    let intermediate_size = moe.moe_intermediate_size.unwrap_or(llama.intermediate_size);
    let plain = MoeConfig::new(moe.num_experts, moe.num_experts_per_tok, intermediate_size);
    let n_group = moe.n_group.unwrap_or(plain.router.n_group);
    let balance_by_loss = if moe.router_bias_update_rate > 0. { 0. } else { AUX_LOSS_COEF };
    MoeConfig {
        n_shared_experts: moe.n_shared_experts,
        capacity_factor: moe.capacity_factor,
        router: RouterConfig {
            scoring_func: match moe.scoring_func {
                ScoringFuncRecipe::Softmax => ScoringFunc::Softmax,
                ScoringFuncRecipe::Sigmoid => ScoringFunc::Sigmoid,
            },
            // The weight of a single expert would always be 1.
            norm_topk_prob: moe.norm_topk_prob.unwrap_or(moe.num_experts_per_tok > 1),
            routed_scaling_factor: moe.routed_scaling_factor.unwrap_or(plain.router.routed_scaling_factor),
            n_group,
            topk_group: moe.topk_group.unwrap_or(n_group),
            router_aux_loss_coef: moe.router_aux_loss_coef.unwrap_or(balance_by_loss),
            router_z_loss_coef: moe.router_z_loss_coef,
            router_bias_update_rate: moe.router_bias_update_rate,
        },
        // Hugging Face's models with norms of queries and keys are Qwen's.
        names: if llama.qk_norm { MoeNames::Qwen } else { MoeNames::Mixtral },
        ..plain
    }
}

/// The default weight of the balance loss, as in Switch Transformer.
const AUX_LOSS_COEF: f64 = 0.01;
