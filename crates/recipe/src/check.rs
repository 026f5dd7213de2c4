//! Checks of a recipe that need no ranks: numbers out of range, keys without effect, keys that contradict each other.

mod offload;

use std::ops::Range;
use std::result::Result as Either;

use shardwise_plan::pipeline::{Actions, ActionsError, PipelineSchedule, ScheduleError};
use shardwise_plan::{
    Axis, ContextAttention, Mesh, MeshError, ModelConfig, check_chunks_not_shared, choose_ulysses, most_equal_parts,
};

use super::resolve::{
    GRADIENT_ACCUMULATION_STEPS_MAX, MICRO_BATCH_SIZE_MAX, NO_MICRO_BATCH_SIZE, TOKENS_MAX, number, word,
};
use super::source::Invalid;
use super::{
    ActivationCheckpointingRecipe, DeviceRecipe, FloatRecipe, NonFiniteRecipe, OptimizerKind, ParallelRecipe, Recipe,
    Result, ScheduleKind, SpikeRecipe,
};

type Checked = Either<(), Invalid>;

const PREFETCH_MAX: usize = 1 << 12;
const PARTS_MAX: usize = 1 << 12;

impl Recipe {
    pub(super) fn check(&self) -> Checked {
        self.check_counts()?;
        self.check_run()?;
        self.check_batch()?;
        self.check_data()?;
        self.check_optimizer()?;
        self.check_schedule()?;
        self.check_zero()?;
        self.check_offload()?;
        self.check_compression()?;
        self.check_precision()?;
        self.check_checkpoints()?;
        self.check_supervision()?;
        if self.init.seed.is_some() && self.init.weights.is_some() {
            let seed = self.init.seed.unwrap_or_default().to_string();
            let weights = self.init.weights.clone().unwrap_or_default();
            let problem = "parameters start from a seed or from weights: leave one of them out";
            return Err(Invalid::between(&[("init.seed", seed), ("init.weights", quoted(&weights))], problem));
        }
        let schedule = self.read_pipeline_schedule()?;
        self.check_chunks(&schedule)?;
        self.check_model()
    }

    /// Checks what blocks that are computed in chunks can be combined with.
    fn check_chunks(&self, schedule: &PipelineSchedule) -> Checked {
        let ParallelRecipe { tensor, pipeline, ref pipeline_schedule, .. } = self.parallel;
        let Some(chunk) = self.model.block_chunk_tokens else { return Ok(()) };
        let key = ("model.block_chunk_tokens", chunk.to_string());
        if self.read_model_config()?.moe().is_some() {
            let problem = "model.block_chunk_tokens: experts route all tokens at once, and cannot be computed in chunks; leave it out";
            return Err(Invalid::at("model.block_chunk_tokens", problem));
        }
        if let Err(error) = check_chunks_not_shared(Some(chunk), tensor) {
            return Err(Invalid::between(&[key, ("parallel.tensor", tensor.to_string())], error.problem));
        }
        let splits_backward = matches!(
            schedule,
            PipelineSchedule::ZeroBubbleH1 | PipelineSchedule::ZeroBubbleV | PipelineSchedule::Custom(_)
        );
        if pipeline > 1 && splits_backward {
            let problem =
                "blocks that are computed in chunks cannot split their backward pass, as this schedule may require";
            return Err(Invalid::between(&[key, ("parallel.pipeline_schedule", quoted(pipeline_schedule))], problem));
        }
        Ok(())
    }

    /// Checks that counts are in range. The limits are far beyond any real run, and far below where sizes could overflow.
    fn check_counts(&self) -> Checked {
        let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let batch = &self.batch;
        let mut counts = vec![
            ("batch.global_batch_size", batch.global_batch_size.unwrap_or(1), 1 << 40),
            ("batch.micro_batch_size", batch.micro_batch_size.unwrap_or(1), MICRO_BATCH_SIZE_MAX),
            (
                "batch.gradient_accumulation_steps",
                batch.gradient_accumulation_steps.unwrap_or(1),
                GRADIENT_ACCUMULATION_STEPS_MAX,
            ),
            ("batch.seq_len", batch.seq_len, 1 << 22),
            ("model.block_chunk_tokens", self.model.block_chunk_tokens.unwrap_or(1), 1 << 24),
            ("parallel.pipeline", self.parallel.pipeline, 1 << 12),
            ("parallel.replicate", self.parallel.replicate, 1 << 20),
            ("parallel.context", self.parallel.context, 1 << 12),
            ("parallel.ulysses", self.parallel.ulysses.unwrap_or(1), 1 << 12),
            ("parallel.expert", self.parallel.expert, 1 << 12),
            ("parallel.tensor", self.parallel.tensor, 1 << 10),
            ("run.steps", count(self.run.steps), 1 << 40),
            ("run.log_every", count(self.run.log_every), 1 << 40),
        ];
        match self.read_model_config()? {
            ModelConfig::Llama(llama) => counts.extend([
                ("model.llama.vocab_size", llama.vocab_size, 1 << 22),
                ("model.llama.hidden_size", llama.hidden_size, 1 << 17),
                ("model.llama.num_hidden_layers", llama.num_hidden_layers, 1 << 12),
                ("model.llama.num_attention_heads", llama.num_attention_heads, 1 << 17),
                ("model.llama.intermediate_size", llama.intermediate_size, 1 << 19),
                ("model.llama.loss_chunk_tokens", llama.loss_chunk_tokens, 1 << 24),
            ]),
            ModelConfig::Gpt2(gpt2) => counts.extend([
                ("model.gpt2.vocab_size", gpt2.vocab_size, 1 << 22),
                ("model.gpt2.n_positions", gpt2.n_positions, 1 << 22),
                ("model.gpt2.n_embd", gpt2.n_embd, 1 << 17),
                ("model.gpt2.n_layer", gpt2.n_layer, 1 << 12),
                ("model.gpt2.loss_chunk_tokens", gpt2.loss_chunk_tokens, 1 << 24),
            ]),
            // Its sizes were checked when it was opened.
            ModelConfig::Compiled(_) => {}
        }
        if let Some(moe) = self.model.llama.as_ref().and_then(|llama| llama.moe.as_ref()) {
            counts.extend([
                ("model.llama.moe.num_experts", moe.num_experts, 1 << 12),
                ("model.llama.moe.moe_intermediate_size", moe.moe_intermediate_size.unwrap_or(1), 1 << 16),
                // None is 0.
                ("model.llama.moe.n_shared_experts", moe.n_shared_experts.max(1), 1 << 8),
                ("model.llama.moe.n_group", moe.n_group.unwrap_or(1), 1 << 12),
                ("model.llama.moe.topk_group", moe.topk_group.unwrap_or(1), 1 << 12),
            ]);
        }
        if let Some(evaluation) = &self.evaluation {
            counts.push(("evaluation.every_steps", count(evaluation.every_steps.unwrap_or(1)), 1 << 40));
            counts.push(("evaluation.max_sequences", count(evaluation.max_sequences.unwrap_or(1)), 1 << 40));
        }
        for (key, value, most) in counts {
            if value == 0 {
                return Err(Invalid::at(key, format!("`{key}` is 0, but must be at least 1")));
            }
            if value > most {
                return Err(Invalid::at(key, format!("`{key}` is {value}, but must be at most {most}")));
            }
        }
        if let ModelConfig::Llama(llama) = self.read_model_config()? {
            let (heads, head_dim, most) = (llama.num_attention_heads, llama.head_dim, 1 << 18);
            if heads.saturating_mul(head_dim) > most {
                let keys = [
                    ("model.llama.num_attention_heads", heads.to_string()),
                    ("model.llama.head_dim", head_dim.to_string()),
                ];
                return Err(Invalid::between(&keys, format!("num_attention_heads × head_dim must be at most {most}")));
            }
        }
        Ok(())
    }

    fn check_run(&self) -> Checked {
        match self.run.cuda_graphs {
            true => Err(Invalid::at(
                "run.cuda_graphs",
                "`run.cuda_graphs` is not implemented yet; remove it. The guide's page \"On GPUs\" says how it is meant to work"
                    .to_string(),
            )),
            false => Ok(()),
        }
    }

    fn check_batch(&self) -> Checked {
        let batch = &self.batch;
        let (micro_batch_size, seq_len) = (batch.micro_batch_size.unwrap_or(1), batch.seq_len);
        if batch.micro_batch_size.is_none()
            && (batch.global_batch_size.is_none() || batch.gradient_accumulation_steps.is_none())
        {
            return Err(Invalid::at("batch.micro_batch_size", NO_MICRO_BATCH_SIZE));
        }
        if micro_batch_size.saturating_mul(seq_len) > TOKENS_MAX {
            let keys =
                [("batch.micro_batch_size", micro_batch_size.to_string()), ("batch.seq_len", seq_len.to_string())];
            let tokens = micro_batch_size.saturating_mul(seq_len);
            let problem =
                format!("micro_batch_size × seq_len is {tokens} tokens at once, but must be at most {TOKENS_MAX}");
            return Err(Invalid::between(&keys, problem));
        }
        if let ModelConfig::Gpt2(gpt2) = self.read_model_config()?
            && gpt2.n_positions < seq_len
        {
            let keys =
                [("batch.seq_len", seq_len.to_string()), ("model.gpt2.n_positions", gpt2.n_positions.to_string())];
            let problem = format!("sequences of {seq_len} tokens are longer than the model's {}", gpt2.n_positions);
            return Err(Invalid::between(&keys, problem));
        }
        Ok(())
    }

    fn check_data(&self) -> Checked {
        let data = &self.data;
        let path = |path: &std::path::Path| quoted(&path.display().to_string());
        let mut given = Vec::new();
        given.extend(data.corpus.as_deref().map(|corpus| ("data.corpus", path(corpus))));
        given.extend(data.mixture.as_ref().map(|parts| ("data.mixture", format!("[{} corpora]", parts.len()))));
        given.extend(data.chat.as_deref().map(|chat| ("data.chat", path(chat))));
        if given.len() > 1 {
            return Err(Invalid::between(&given, "there is more than one kind of data: keep one of them"));
        }
        if let Some(parts) = &data.mixture {
            if !(1..=PARTS_MAX).contains(&parts.len()) {
                let problem = format!("`data.mixture` has {} corpora, but must have 1 to {PARTS_MAX}", parts.len());
                return Err(Invalid::at("data.mixture", problem));
            }
            for (index, part) in parts.iter().enumerate() {
                if !(part.weight > 0. && part.weight.is_finite()) {
                    let key = format!("data.mixture[{index}].weight");
                    let problem = format!("`{key}` is {}, but must be a positive number", part.weight);
                    return Err(Invalid::at(key, problem));
                }
            }
        }
        if data.chat.is_some() && data.tokenizer.is_none() {
            return Err(Invalid::at("data.chat", "`data.chat` is text, and needs a tokenizer: give `data.tokenizer`"));
        }
        let Some(bytes) = data.token_bytes else { return Ok(()) };
        if ![2, 4].contains(&bytes) {
            return Err(Invalid::at("data.token_bytes", format!("`data.token_bytes` is {bytes}, but must be 2 or 4")));
        }
        if data.corpus.is_none() && data.mixture.is_none() && self.evaluation.is_none() {
            let problem = "`data.token_bytes` is for a raw corpus, and there is no `data.corpus`: leave it out";
            return Err(Invalid::at("data.token_bytes", problem));
        }
        Ok(())
    }

    fn check_optimizer(&self) -> Checked {
        let given = &self.optimizer;
        let positive = [
            ("optimizer.lr", Some(given.lr)),
            ("optimizer.max_grad_norm", given.max_grad_norm),
            ("optimizer.eps", given.eps),
        ];
        for (key, value) in positive {
            if let Some(value) = value.filter(|value| !(*value > 0. && value.is_finite())) {
                return Err(Invalid::at(key, format!("`{key}` is {value}, but must be a positive number")));
            }
        }
        let betas = given.betas.into_iter().flatten().map(|beta| ("optimizer.betas", beta));
        let momentum = given.momentum.map(|momentum| ("optimizer.momentum", momentum));
        for (key, part) in betas.chain(momentum) {
            if !(0. ..1.).contains(&part) {
                return Err(Invalid::at(key, format!("`{key}` has {part}, but must be from 0 to below 1")));
            }
        }
        let decay = given.weight_decay;
        if !(decay >= 0. && decay.is_finite()) {
            let problem = format!("`optimizer.weight_decay` is {decay}, but must be 0 or a positive number");
            return Err(Invalid::at("optimizer.weight_decay", problem));
        }
        self.check_optimizer_keys()?;
        if given.in_backward {
            self.check_update_in_backward()?;
        }
        match &self.offload.parameters {
            Some(folder) if given.in_forward => {
                let values =
                    [("optimizer.in_forward", "true".to_string()), ("offload.parameters", format!("{folder:?}"))];
                let problem =
                    "units cannot be updated in the forward pass: their offloaded parameters are fetched before";
                Err(Invalid::between(&values, problem))
            }
            _ => Ok(()),
        }
    }

    /// Refuses everything that must see the gradients of all units before the first update.
    fn check_update_in_backward(&self) -> Checked {
        let (recipe, supervision) = (&self.optimizer, &self.supervision);
        let needs = [
            ("optimizer.max_grad_norm", recipe.max_grad_norm.map(number), "clipping needs the norm of all gradients"),
            (
                "precision.param_dtype",
                self.resolve_loss_scale().map(|_| word(&self.precision.param_dtype)),
                "a dynamic loss scale skips a step if any gradient overflows",
            ),
            (
                "run.on_nonfinite",
                (self.resolve_on_nonfinite() == NonFiniteRecipe::Skip).then(|| word(&NonFiniteRecipe::Skip)),
                "a step is skipped only if no unit is updated yet",
            ),
            (
                "schedule.kind",
                (self.schedule.kind == ScheduleKind::LrRangeTest).then(|| word(&self.schedule.kind)),
                "a learning rate range test ends before the first update with a loss that is not finite",
            ),
            (
                "supervision.on_spike",
                (supervision.on_spike != SpikeRecipe::Report).then(|| word(&supervision.on_spike)),
                "a spike is found once all gradients are reduced; only \"report\" works",
            ),
            (
                "supervision.spot_check_every",
                supervision.spot_check_every.map(|every| every.to_string()),
                "a spot check repeats the step with the same parameters",
            ),
            (
                "offload.gradients",
                self.offload.gradients.as_ref().map(|folder| format!("{folder:?}")),
                "the update uses gradients up before they could be offloaded",
            ),
        ];
        for (key, value, reason) in needs {
            if let Some(value) = value {
                let problem = format!("units cannot be updated in the backward pass: {reason}");
                return Err(Invalid::between(&[("optimizer.in_backward", "true".to_string()), (key, value)], problem));
            }
        }
        Ok(())
    }

    /// Refuses keys of other kinds of optimizers, which would silently have no effect.
    fn check_optimizer_keys(&self) -> Checked {
        let given = &self.optimizer;
        let kind = word(&given.kind);
        let (sgd, adaptive) = ("\"sgd\"", "\"adamw\" and \"lamb\"");
        let unused = match given.kind {
            OptimizerKind::AdamW | OptimizerKind::Lamb => {
                vec![("optimizer.momentum", given.momentum.map(number), sgd)]
            }
            OptimizerKind::Sgd => vec![
                ("optimizer.betas", given.betas.map(|betas| format!("{betas:?}")), adaptive),
                ("optimizer.eps", given.eps.map(number), adaptive),
            ],
        };
        for (key, value, of) in unused {
            if let Some(value) = value {
                let problem = format!("`{key}` is for {of}, and the optimizer is {kind}: leave it out");
                return Err(Invalid::between(&[(key, value), ("optimizer.kind", kind)], problem));
            }
        }
        Ok(())
    }

    fn check_schedule(&self) -> Checked {
        let given = &self.schedule;
        let kind = given.kind;
        let pair = |pair: [f64; 2]| format!("{pair:?}");
        // Each key applies to some kinds of schedule. With any other kind it would silently have no effect.
        let falls = [ScheduleKind::Linear, ScheduleKind::Cosine, ScheduleKind::Wsd, ScheduleKind::OneCycle];
        for (key, value, of) in [
            ("schedule.min_lr_ratio", given.min_lr_ratio.map(number), &falls[..]),
            ("schedule.decay_steps", given.decay_steps.map(|steps| steps.to_string()), &[ScheduleKind::Wsd]),
            ("schedule.start_lr_ratio", given.start_lr_ratio.map(number), &[ScheduleKind::OneCycle]),
            ("schedule.pct_start", given.pct_start.map(number), &[ScheduleKind::OneCycle]),
            ("schedule.momentum", given.momentum.map(pair), &[ScheduleKind::OneCycle]),
            ("schedule.start_lr", given.start_lr.map(number), &[ScheduleKind::LrRangeTest]),
            ("schedule.plot", given.plot.as_ref().map(|plot| plot.display().to_string()), &[ScheduleKind::LrRangeTest]),
        ] {
            if let Some(value) = value.filter(|_| !of.contains(&kind)) {
                let of: Vec<String> = of.iter().map(word).collect();
                let problem =
                    format!("`{key}` is for {}, and the schedule is {}: leave it out", of.join(", "), word(&kind));
                return Err(Invalid::between(&[(key, value), ("schedule.kind", word(&kind))], problem));
            }
        }
        for (key, ratio) in [
            ("schedule.min_lr_ratio", given.min_lr_ratio),
            ("schedule.start_lr_ratio", given.start_lr_ratio),
            ("schedule.pct_start", given.pct_start),
        ] {
            if let Some(ratio) = ratio.filter(|ratio| !(0. ..=1.).contains(ratio)) {
                return Err(Invalid::at(key, format!("`{key}` is {ratio}, but must be from 0 to 1")));
            }
        }
        if let Some(momentum) = given.momentum.into_iter().flatten().find(|momentum| !(0. ..1.).contains(momentum)) {
            let problem = format!("`schedule.momentum` has {momentum}, but must be from 0 to below 1");
            return Err(Invalid::at("schedule.momentum", problem));
        }
        if let (ScheduleKind::OneCycle, Some(momentum)) = (kind, self.optimizer.momentum) {
            let keys = [("optimizer.momentum", number(momentum)), ("schedule.kind", word(&kind))];
            let problem = "one-cycle sets the momentum itself: use `schedule.momentum` instead";
            return Err(Invalid::between(&keys, problem));
        }
        let lr = self.optimizer.lr;
        if let Some(start_lr) = given.start_lr.filter(|start_lr| !(*start_lr > 0. && *start_lr <= lr)) {
            let keys = [("schedule.start_lr", number(start_lr)), ("optimizer.lr", number(lr))];
            return Err(Invalid::between(&keys, "`schedule.start_lr` must be above 0, and at most `optimizer.lr`"));
        }
        let own_rise = [ScheduleKind::OneCycle, ScheduleKind::LrRangeTest].contains(&kind);
        if own_rise && given.warmup_steps > 0 {
            let keys = [("schedule.warmup_steps", given.warmup_steps.to_string()), ("schedule.kind", word(&kind))];
            let problem = format!("{} has its own warm-up: leave `schedule.warmup_steps` out", word(&kind));
            return Err(Invalid::between(&keys, problem));
        }
        Ok(())
    }

    fn check_zero(&self) -> Checked {
        let zero = &self.zero;
        if zero.stage > 3 {
            let problem = format!("there is no ZeRO stage {}: `zero.stage` is 0, 1, 2 or 3", zero.stage);
            return Err(Invalid::at("zero.stage", problem));
        }
        if zero.prefetch > PREFETCH_MAX {
            let (key, asked) = ("zero.prefetch", zero.prefetch);
            return Err(Invalid::at(key, format!("`{key}` is {asked}, but must be at most {PREFETCH_MAX}")));
        }
        if zero.reduce_each_micro_batch && zero.stage < 2 {
            let keys = [("zero.reduce_each_micro_batch", "true".to_string()), ("zero.stage", zero.stage.to_string())];
            let problem =
                "reducing gradients after each micro-batch needs sharded gradients: use stage 2 or 3, or leave it out";
            return Err(Invalid::between(&keys, problem));
        }
        Ok(())
    }

    fn check_precision(&self) -> Checked {
        let precision = &self.precision;
        let (param_dtype, reduce_dtype) = (precision.param_dtype, self.resolve_reduce_dtype());
        let keys = [("precision.reduce_dtype", word(&reduce_dtype)), ("precision.param_dtype", word(&param_dtype))];
        if param_dtype == FloatRecipe::F64 && reduce_dtype != FloatRecipe::F64 {
            let problem = "parameters in f64 need gradients in f64: leave `precision.reduce_dtype` out";
            return Err(Invalid::between(&keys, problem));
        }
        if reduce_dtype == FloatRecipe::F64 && param_dtype != FloatRecipe::F64 {
            let problem = "gradients in f64 need parameters in f64: use \"f64\" for both, or \"f32\" for gradients";
            return Err(Invalid::between(&keys, problem));
        }
        if reduce_dtype == FloatRecipe::F16 && param_dtype != FloatRecipe::F16 {
            let problem = "gradients in f16 overflow where parameters are not f16: use \"f32\" or \"bf16\" for them";
            return Err(Invalid::between(&keys, problem));
        }
        let given = [
            ("precision.loss_scale_initial", precision.loss_scale_initial.map(number)),
            ("precision.loss_scale_window", precision.loss_scale_window.map(|steps| steps.to_string())),
            ("precision.loss_scale_hysteresis", precision.loss_scale_hysteresis.map(|count| count.to_string())),
            (
                "precision.loss_scale_consecutive_hysteresis",
                precision.loss_scale_consecutive_hysteresis.map(|flag| flag.to_string()),
            ),
            ("precision.loss_scale_min", precision.loss_scale_min.map(number)),
        ];
        if precision.param_dtype != FloatRecipe::F16
            && let Some((key, value)) = given.into_iter().find_map(|(key, value)| Some((key, value?)))
        {
            let dtype = word(&precision.param_dtype);
            let problem = format!("`{key}` is for \"f16\", and parameters are {dtype}: leave it out");
            return Err(Invalid::between(&[(key, value), ("precision.param_dtype", dtype)], problem));
        }
        let Some(scale) = self.resolve_loss_scale() else { return Ok(()) };
        for (key, value) in [("precision.loss_scale_initial", scale.initial), ("precision.loss_scale_min", scale.min)] {
            if !(value > 0. && value.is_finite()) {
                return Err(Invalid::at(key, format!("`{key}` is {value}, but must be a positive number")));
            }
        }
        for (key, count) in
            [("precision.loss_scale_window", scale.window), ("precision.loss_scale_hysteresis", scale.hysteresis)]
        {
            if count == 0 {
                return Err(Invalid::at(key, format!("`{key}` is 0, but must be at least 1")));
            }
        }
        if scale.min > scale.initial {
            let keys = [
                ("precision.loss_scale_min", number(scale.min)),
                ("precision.loss_scale_initial", number(scale.initial)),
            ];
            return Err(Invalid::between(&keys, "the smallest loss scale is larger than the initial one: lower it"));
        }
        if scale.initial > f64::from(f32::MAX) {
            let problem =
                format!("a loss scale of {} cannot be used; it must be positive and fit into f32", scale.initial);
            return Err(Invalid::at("precision.loss_scale_initial", problem));
        }
        Ok(())
    }

    fn check_checkpoints(&self) -> Checked {
        let Some(checkpoints) = &self.checkpoints else { return Ok(()) };
        let at_least_one = [
            ("checkpoints.every_steps", checkpoints.every_steps == Some(0)),
            ("checkpoints.keep_every", checkpoints.keep_every == Some(0)),
            ("checkpoints.keep_last", checkpoints.keep_last == Some(0)),
        ];
        if let Some((key, _)) = at_least_one.into_iter().find(|(_, is_zero)| *is_zero) {
            return Err(Invalid::at(key, format!("`{key}` is 0, but must be at least 1")));
        }
        if let Some(minutes) = checkpoints.every_minutes.filter(|minutes| !(*minutes > 0. && minutes.is_finite())) {
            let problem = format!("`checkpoints.every_minutes` is {minutes}, but must be a positive number");
            return Err(Invalid::at("checkpoints.every_minutes", problem));
        }
        if self.schedule.kind == ScheduleKind::LrRangeTest {
            let keys =
                [("checkpoints.folder", quoted(&checkpoints.folder)), ("schedule.kind", word(&self.schedule.kind))];
            return Err(Invalid::between(
                &keys,
                "a learning rate range test cannot be resumed: leave [checkpoints] out",
            ));
        }
        Ok(())
    }

    fn check_supervision(&self) -> Checked {
        let supervision = &self.supervision;
        // Ranks send heartbeats at least twice a second, so 2 s is the least that makes sense. 3e9 s is a century, as good as forever.
        let limits = [
            ("supervision.timeout_s", supervision.timeout_s),
            ("supervision.heartbeat_timeout_s", supervision.heartbeat_timeout_s),
        ];
        if let Some((key, seconds)) = limits.into_iter().find(|(_, seconds)| !(2. ..=3e9).contains(seconds)) {
            return Err(Invalid::at(key, format!("`{key}` is {seconds}, but must be at least 2 seconds")));
        }
        if supervision.spot_check_every == Some(0) {
            let key = "supervision.spot_check_every";
            return Err(Invalid::at(key, format!("`{key}` is 0, but must be at least 1")));
        }
        let (key, on_spike) = ("supervision.on_spike", supervision.on_spike);
        if on_spike != SpikeRecipe::Report && self.schedule.kind == ScheduleKind::LrRangeTest {
            let keys = [(key, word(&on_spike)), ("schedule.kind", word(&self.schedule.kind))];
            return Err(Invalid::between(
                &keys,
                "a learning rate range test is meant to make the loss rise: leave it out",
            ));
        }
        if on_spike == SpikeRecipe::Rollback && self.checkpoints.is_none() {
            let problem = format!(
                "`{key}` is {}, and there is no checkpoint to roll back to: give `checkpoints.folder`",
                word(&on_spike)
            );
            return Err(Invalid::at(key, problem));
        }
        Ok(())
    }

    fn check_model(&self) -> Checked {
        let config = self.read_model_config()?;
        let family = match (&self.model.llama, &self.model.gpt2) {
            (Some(_), _) => Some("model.llama"),
            (_, Some(_)) => Some("model.gpt2"),
            _ => None,
        };
        config.check().map_err(|error| match family {
            Some(family) => Invalid::at(format!("{family}.{}", error.key), format!("{family}.{error}")),
            None => Invalid::at("model.from_pretrained", format!("model.from_pretrained: {error}")),
        })?;
        self.check_experts()?;
        let at_tensor = |error| Invalid::at("parallel.tensor", format!("parallel.tensor: {error}"));
        config.check_tensor_parallel(self.parallel.tensor).map_err(at_tensor)?;
        self.check_context(&config)?;
        self.check_expert_parallel(&config)?;
        let frozen = &self.model.frozen;
        config.check_frozen(frozen).map_err(|error| Invalid::at("model.frozen", format!("model.{error}")))?;
        if config.is_all_frozen(frozen) {
            let problem = "every parameter is frozen, so there is nothing to train; remove some from model.frozen";
            return Err(Invalid::at("model.frozen", problem));
        }
        Ok(())
    }

    fn check_experts(&self) -> Checked {
        let Some(moe) = self.model.llama.as_ref().and_then(|llama| llama.moe.as_ref()) else { return Ok(()) };
        if moe.n_group.is_some_and(|groups| groups > 1) && moe.topk_group.is_none() {
            let problem = "model.llama.moe.n_group: also say how many groups a token chooses, with topk_group";
            return Err(Invalid::at("model.llama.moe.n_group", problem));
        }
        if moe.num_experts_per_tok == 1 && moe.norm_topk_prob == Some(true) {
            let problem = "model.llama.moe.norm_topk_prob: the weight of a single expert would always be 1, and its router would not learn \
                           from the loss; leave it out, or increase num_experts_per_tok";
            return Err(Invalid::at("model.llama.moe.norm_topk_prob", problem));
        }
        Ok(())
    }

    fn check_context(&self, config: &ModelConfig) -> Checked {
        let ParallelRecipe { context, tensor, ulysses, .. } = self.parallel;
        if let Some(ulysses) = ulysses.filter(|ulysses| !context.is_multiple_of(*ulysses)) {
            let keys = [("parallel.ulysses", ulysses.to_string()), ("parallel.context", context.to_string())];
            return Err(Invalid::between(
                &keys,
                format!("parallel.ulysses must be a divisor of parallel.context, which is {context}"),
            ));
        }
        if context == 1 {
            return Ok(());
        }
        let at = |key: &str, problem: String| Err(Invalid::at(key, format!("{key}: {problem}")));
        if config.moe().is_some_and(|moe| moe.router.has_loss()) {
            let problem = "the balance losses of experts need whole sequences; set parallel.context to 1, or balance experts by \
                           router_bias_update_rate and set router_aux_loss_coef and router_z_loss_coef to 0 (in a config.json: \
                           output_router_logits to false)";
            return at("parallel.context", problem.to_string());
        }
        if config.moe().is_some_and(|moe| moe.capacity_factor.is_some()) {
            let problem =
                "the capacity of experts is for whole sequences; set parallel.context to 1, or remove capacity_factor";
            return at("parallel.context", problem.to_string());
        }
        if self.run.device != DeviceRecipe::Cpu {
            return at(
                "parallel.context",
                "context parallelism runs only on CPUs so far; set parallel.context to 1".to_string(),
            );
        }
        let Some([heads, _]) = config.attention_heads().filter(|_| !self.model.compiled) else {
            let problem = "compiled models need whole sequences for attention; set parallel.context to 1";
            return at("parallel.context", problem.to_string());
        };
        let positions = self.batch.seq_len;
        if positions < context {
            return at("parallel.context", format!("{positions} positions cannot be divided among {context} ranks"));
        }
        match ulysses.filter(|ulysses| ulysses * tensor > heads) {
            Some(ulysses) if tensor > 1 => at(
                "parallel.ulysses",
                format!(
                    "{ulysses} × {tensor} ranks need at least {} heads, but the model has {heads}",
                    ulysses * tensor
                ),
            ),
            Some(ulysses) => at(
                "parallel.ulysses",
                format!("{ulysses} ranks need at least {ulysses} heads, but the model has {heads}"),
            ),
            None => Ok(()),
        }
    }

    fn check_expert_parallel(&self, config: &ModelConfig) -> Checked {
        let expert = self.parallel.expert;
        if expert == 1 {
            return Ok(());
        }
        let at_expert = |problem: String| Err(Invalid::at("parallel.expert", format!("parallel.expert: {problem}")));
        let Some(moe) = config.moe() else {
            let remedy = if self.model.llama.is_some() { ", or add [model.llama.moe]" } else { "" };
            return at_expert(format!("the model has no experts to divide among ranks; set it to 1{remedy}"));
        };
        if !moe.num_experts.is_multiple_of(expert) {
            let works = most_equal_parts(moe.num_experts, expert);
            let problem =
                format!("{expert} ranks cannot hold equally many of {} experts; {works} would work", moe.num_experts);
            return at_expert(problem);
        }
        if self.run.device != DeviceRecipe::Cpu {
            return at_expert("expert parallelism runs only on CPUs so far; set parallel.expert to 1".to_string());
        }
        Ok(())
    }

    /// How many of the ranks that divide a sequence exchange heads, and how many form a ring.
    fn context_axes(&self) -> Result<[usize; 2]> {
        let ParallelRecipe { context, tensor, ulysses, .. } = self.parallel;
        let ulysses = match ulysses {
            _ if context == 1 => 1,
            Some(ulysses) => ulysses,
            None => {
                let config = self.model_config()?;
                let Some([queries, keys]) = config.attention_heads() else { return Ok([1, context]) };
                let [queries, keys] = [queries, keys].map(|heads| heads.div_ceil(tensor));
                // Otherwise every query head has a copy of its key head.
                let keys = if queries.is_multiple_of(keys) { keys } else { queries };
                let attention = ContextAttention {
                    query_heads: queries,
                    key_heads: keys,
                    window: config.sliding_window(),
                    positions: self.batch.seq_len,
                    element_bytes: self.precision.param_dtype.dtype().bytes(),
                    is_recomputed: self.activation_checkpointing == ActivationCheckpointingRecipe::Full,
                };
                choose_ulysses(&attention, context)
            }
        };
        Ok([ulysses, context / ulysses])
    }

    /// The mesh of this many ranks. Fails if they cannot be divided into replicas whose layers are shared as the recipe says.
    pub fn mesh(&self, ranks: usize) -> Result<Mesh> {
        let ParallelRecipe { pipeline, replicate, expert, tensor, .. } = self.parallel;
        let [ulysses, ring] = self.context_axes()?;
        // The user has set the product of two axes of the mesh.
        let groups = ranks / pipeline / tensor;
        if ranks.is_multiple_of(pipeline * tensor) && !groups.is_multiple_of(self.parallel.context) {
            let (context, key) = (self.parallel.context, "parallel.context");
            let what = if tensor > 1 { format!("groups of {tensor} ranks") } else { "ranks".to_string() };
            let problem =
                format!("{key}: {groups} {what} cannot be divided into groups of {context}; use a divisor of {groups}");
            return Err(self.sources.error_at(key, problem));
        }
        let sizes = [
            (Axis::Pipeline, pipeline),
            (Axis::Replicate, replicate),
            (Axis::Expert, expert),
            (Axis::Ring, ring),
            (Axis::Ulysses, ulysses),
            (Axis::Tensor, tensor),
        ];
        Mesh::divide(ranks, &sizes).map_err(|error| {
            let key = match &error {
                MeshError::Indivisible { axis: Axis::Pipeline, .. } => "parallel.pipeline",
                MeshError::Indivisible { axis: Axis::Tensor, .. } => "parallel.tensor",
                MeshError::Indivisible { axis: Axis::Ring | Axis::Ulysses, .. } => "parallel.context",
                MeshError::Indivisible { axis: Axis::Expert, .. } => "parallel.expert",
                _ => "parallel.replicate",
            };
            self.sources.error_at(key, format!("{key}: {error}"))
        })
    }

    /// The number of these ranks that read different samples: those that share layers, divide sequences, or hold the stages of a pipeline,
    /// count as one.
    pub fn data_ranks(&self, ranks: usize) -> usize {
        let ParallelRecipe { pipeline, context, tensor, .. } = self.parallel;
        (ranks / tensor.max(1) / context.max(1) / pipeline.max(1)).max(1)
    }

    /// The schedule of the pipeline: one with a name, or one that is read from a file.
    pub fn pipeline_schedule(&self) -> Result<PipelineSchedule> {
        self.read_pipeline_schedule().map_err(|wrong| self.sources.error(wrong))
    }

    fn read_pipeline_schedule(&self) -> Either<PipelineSchedule, Invalid> {
        let (key, text) = ("parallel.pipeline_schedule", &self.parallel.pipeline_schedule);
        if !self.parallel.has_schedule_file() {
            return text.parse().map_err(|error: ScheduleError| Invalid::at(key, format!("{key}: {error}")));
        }
        let wrong = |problem: String| Invalid::at(key, format!("{key}: {text}: {problem}"));
        let actions = std::fs::read_to_string(text).map_err(|error| wrong(error.to_string()))?;
        let actions: Actions = actions.parse().map_err(|error: ActionsError| wrong(error.to_string()))?;
        Ok(PipelineSchedule::Custom(actions))
    }

    /// The chunks of a pipeline, if `parallel.pipeline_split_points` says where they begin. `units` are the names of the model's
    /// units.
    pub fn pipeline_chunks(&self, units: &[&str]) -> Result<Option<Vec<Range<usize>>>> {
        let Some(points) = &self.parallel.pipeline_split_points else { return Ok(None) };
        let key = "parallel.pipeline_split_points";
        let wrong = |problem: String| self.sources.error_at(key, format!("{key}: {problem}"));
        let mut cuts = vec![0];
        for point in points {
            let unit = units.iter().position(|unit| unit == point).ok_or_else(|| {
                wrong(format!("the model has no unit {}; its units are {}", quoted(point), units.join(", ")))
            })?;
            if unit <= cuts[cuts.len() - 1] {
                return Err(wrong(format!("{} is not after the split point before it", quoted(point))));
            }
            cuts.push(unit);
        }
        let ends = cuts[1..].iter().copied().chain([units.len()]);
        Ok(Some(cuts.iter().copied().zip(ends).map(|(start, end)| start..end).collect()))
    }
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}
