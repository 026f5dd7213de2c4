//! What can be found wrong with a recipe without a rank: numbers out of bounds, keys that would do nothing, keys that contradict
//! each other.

use std::result::Result as Either;

use shardwise_model::hugging_face::Shape;
use shardwise_torch::tch::Device;

use super::build::{MICRO_BATCHES_MAX, NEITHER, SEQUENCES_MAX, TOKENS_MAX, number, word};
use super::source::Wrong;
use super::{AccumulationRecipe, DeviceRecipe, FloatRecipe, NO_CUDA, OutlierRecipe, Recipe, ScheduleKind};
use crate::Error;

type Checked = Either<(), Wrong>;

const UNITS_IN_FLIGHT_MAX: usize = 1 << 12;
const PARTS_MAX: usize = 1 << 12;

impl Recipe {
    pub(super) fn check(&self) -> Checked {
        self.check_counts()?;
        self.check_batch()?;
        self.check_data()?;
        self.check_optimizer()?;
        self.check_schedule()?;
        self.check_sharding()?;
        self.check_precision()?;
        self.check_checkpoints()?;
        self.check_supervision()?;
        if self.start.seed.is_some() && self.start.weights.is_some() {
            let seed = self.start.seed.unwrap_or_default().to_string();
            let weights = self.start.weights.clone().unwrap_or_default();
            let problem = "parameters begin with a seed or with weights: leave one of them out";
            return Err(Wrong::between(&[("start.seed", seed), ("start.weights", quoted(&weights))], problem));
        }
        if self.run.device == DeviceRecipe::Cuda && cfg!(not(feature = "cuda")) {
            return Err(Wrong::at("run.device", NO_CUDA));
        }
        let model = self.model_of()?;
        if !model.units().iter().flat_map(|unit| unit.parameters()).any(|parameter| parameter.trainable) {
            return Err(Wrong::at("model.frozen", Error::AllFrozen.to_string()));
        }
        // What is left to options is found by the checks above first, with its key; this is for what they have missed.
        let options = self.options_of(Device::Cpu)?;
        options.check().map_err(|error| Wrong { keys: Vec::new(), problem: error.to_string() })
    }

    /// Far beyond what anybody trains, and far below where sizes could overflow.
    fn check_counts(&self) -> Checked {
        let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let mut counts = vec![
            ("batch.global", self.batch.global.unwrap_or(1), 1 << 40),
            ("batch.sequences", self.batch.sequences.unwrap_or(1), SEQUENCES_MAX),
            ("batch.micro_batches", self.batch.micro_batches.unwrap_or(1), MICRO_BATCHES_MAX),
            ("batch.positions", self.batch.positions, 1 << 22),
            ("sharding.replicas", self.sharding.replicas, 1 << 20),
            ("run.steps", count(self.run.steps), 1 << 40),
            ("run.print_every", count(self.run.print_every), 1 << 40),
        ];
        match self.shape_of()? {
            Shape::Llama(llama) => counts.extend([
                ("model.llama.vocabulary", llama.vocabulary, 1 << 22),
                ("model.llama.width", llama.width, 1 << 17),
                ("model.llama.blocks", llama.blocks, 1 << 12),
                ("model.llama.heads", llama.heads, 1 << 17),
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
        if let Some(evaluation) = &self.evaluation {
            counts.push(("evaluation.every_steps", count(evaluation.every_steps.unwrap_or(1)), 1 << 40));
            counts.push(("evaluation.windows", count(evaluation.windows.unwrap_or(1)), 1 << 40));
        }
        for (key, value, most) in counts {
            if value == 0 {
                return Err(Wrong::at(key, format!("`{key}` is 0, and must be at least 1")));
            }
            if value > most {
                return Err(Wrong::at(key, format!("`{key}` is {value}, and must be at most {most}")));
            }
        }
        if let Shape::Llama(llama) = self.shape_of()? {
            let (heads, width, most) = (llama.heads, llama.head_width, 1 << 18);
            if heads.saturating_mul(width) > most {
                let keys = [("model.llama.heads", heads.to_string()), ("model.llama.head_width", width.to_string())];
                return Err(Wrong::between(&keys, format!("heads × head_width must be at most {most}")));
            }
        }
        Ok(())
    }

    fn check_batch(&self) -> Checked {
        let batch = &self.batch;
        let (sequences, positions) = (batch.sequences.unwrap_or(1), batch.positions);
        if batch.sequences.is_none() && (batch.global.is_none() || batch.micro_batches.is_none()) {
            return Err(Wrong::at("batch.sequences", NEITHER));
        }
        if sequences.saturating_mul(positions) > TOKENS_MAX {
            let keys = [("batch.sequences", sequences.to_string()), ("batch.positions", positions.to_string())];
            let tokens = sequences.saturating_mul(positions);
            let problem = format!("sequences × positions is {tokens} tokens at once, and must be at most {TOKENS_MAX}");
            return Err(Wrong::between(&keys, problem));
        }
        if let Shape::Gpt2(gpt2) = self.shape_of()?
            && gpt2.positions < positions
        {
            let keys =
                [("batch.positions", positions.to_string()), ("model.gpt2.positions", gpt2.positions.to_string())];
            let problem = format!("sequences of {positions} positions are longer than the model's {}", gpt2.positions);
            return Err(Wrong::between(&keys, problem));
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
            return Err(Wrong::between(&given, "there is more than one kind of data: leave all but one out"));
        }
        if let Some(parts) = &data.mixture {
            if !(1..=PARTS_MAX).contains(&parts.len()) {
                let problem = format!("`data.mixture` has {} corpora, and must have 1 to {PARTS_MAX}", parts.len());
                return Err(Wrong::at("data.mixture", problem));
            }
            for (index, part) in parts.iter().enumerate() {
                if !(part.weight > 0. && part.weight.is_finite()) {
                    let key = format!("data.mixture[{index}].weight");
                    let problem = format!("`{key}` is {}, and must be a positive number", part.weight);
                    return Err(Wrong::at(key, problem));
                }
            }
        }
        if data.chat.is_some() && data.tokenizer.is_none() {
            return Err(Wrong::at("data.chat", "`data.chat` is text, and needs a tokenizer: give `data.tokenizer`"));
        }
        let Some(bytes) = data.token_bytes else { return Ok(()) };
        if ![2, 4].contains(&bytes) {
            return Err(Wrong::at("data.token_bytes", format!("`data.token_bytes` is {bytes}, and must be 2 or 4")));
        }
        if data.corpus.is_none() && data.mixture.is_none() && self.evaluation.is_none() {
            let problem = "`data.token_bytes` is of a raw file of ids, and there is no `data.corpus`: leave it out";
            return Err(Wrong::at("data.token_bytes", problem));
        }
        Ok(())
    }

    fn check_optimizer(&self) -> Checked {
        let given = &self.optimizer;
        let positive = [
            ("optimizer.rate", Some(given.rate)),
            ("optimizer.clip_norm", given.clip_norm),
            ("optimizer.epsilon", given.epsilon),
        ];
        for (key, value) in positive {
            if let Some(value) = value.filter(|value| !(*value > 0. && value.is_finite())) {
                return Err(Wrong::at(key, format!("`{key}` is {value}, and must be a positive number")));
            }
        }
        let betas = given.betas.into_iter().flatten().map(|beta| ("optimizer.betas", beta));
        let momentum = given.momentum.map(|momentum| ("optimizer.momentum", momentum));
        for (key, part) in betas.chain(momentum) {
            if !(0. ..1.).contains(&part) {
                return Err(Wrong::at(key, format!("`{key}` has {part}, and must be from 0 to below 1")));
            }
        }
        let decay = given.weight_decay;
        if !(decay >= 0. && decay.is_finite()) {
            let problem = format!("`optimizer.weight_decay` is {decay}, and must be 0 or a positive number");
            return Err(Wrong::at("optimizer.weight_decay", problem));
        }
        self.optimizer_of().map(drop)
    }

    fn check_schedule(&self) -> Checked {
        let given = &self.schedule;
        let kind = given.kind;
        let pair = |pair: [f64; 2]| format!("{pair:?}");
        // Each key belongs to some kinds; with another one it would do nothing, silently.
        let falls = [ScheduleKind::Linear, ScheduleKind::Cosine, ScheduleKind::StableDecay, ScheduleKind::OneCycle];
        for (key, value, of) in [
            ("schedule.end", given.end.map(number), &falls[..]),
            ("schedule.decay_steps", given.decay_steps.map(|steps| steps.to_string()), &[ScheduleKind::StableDecay]),
            ("schedule.start", given.start.map(number), &[ScheduleKind::OneCycle]),
            ("schedule.rising", given.rising.map(number), &[ScheduleKind::OneCycle]),
            ("schedule.momentum", given.momentum.map(pair), &[ScheduleKind::OneCycle]),
            ("schedule.from", given.from.map(number), &[ScheduleKind::RangeTest]),
            ("schedule.plot", given.plot.as_ref().map(|plot| plot.display().to_string()), &[ScheduleKind::RangeTest]),
        ] {
            if let Some(value) = value.filter(|_| !of.contains(&kind)) {
                let of: Vec<String> = of.iter().map(word).collect();
                let problem =
                    format!("`{key}` is of {}, and the schedule is {}: leave it out", of.join(", "), word(&kind));
                return Err(Wrong::between(&[(key, value), ("schedule.kind", word(&kind))], problem));
            }
        }
        for (key, part) in
            [("schedule.end", given.end), ("schedule.start", given.start), ("schedule.rising", given.rising)]
        {
            if let Some(part) = part.filter(|part| !(0. ..=1.).contains(part)) {
                return Err(Wrong::at(key, format!("`{key}` is {part}; it is a part, and must be from 0 to 1")));
            }
        }
        if let Some(momentum) = given.momentum.into_iter().flatten().find(|momentum| !(0. ..1.).contains(momentum)) {
            let problem = format!("`schedule.momentum` has {momentum}, and must be from 0 to below 1");
            return Err(Wrong::at("schedule.momentum", problem));
        }
        if let (ScheduleKind::OneCycle, Some(momentum)) = (kind, self.optimizer.momentum) {
            let keys = [("optimizer.momentum", number(momentum)), ("schedule.kind", word(&kind))];
            let problem = "1-cycle moves the momentum itself: use `schedule.momentum` instead";
            return Err(Wrong::between(&keys, problem));
        }
        let rate = self.optimizer.rate;
        if let Some(from) = given.from.filter(|from| !(*from > 0. && *from <= rate)) {
            let keys = [("schedule.from", number(from)), ("optimizer.rate", number(rate))];
            return Err(Wrong::between(&keys, "`schedule.from` must be above 0, and at most `optimizer.rate`"));
        }
        let own_rise = [ScheduleKind::OneCycle, ScheduleKind::RangeTest].contains(&kind);
        if own_rise && given.warmup_steps > 0 {
            let keys = [("schedule.warmup_steps", given.warmup_steps.to_string()), ("schedule.kind", word(&kind))];
            let problem = format!("{} rises in its own way: leave `schedule.warmup_steps` out", word(&kind));
            return Err(Wrong::between(&keys, problem));
        }
        Ok(())
    }

    fn check_sharding(&self) -> Checked {
        let sharding = &self.sharding;
        if sharding.stage > 3 {
            let problem = format!("there is no ZeRO stage {}: `sharding.stage` is 0, 1, 2 or 3", sharding.stage);
            return Err(Wrong::at("sharding.stage", problem));
        }
        if sharding.units_in_flight > UNITS_IN_FLIGHT_MAX {
            let (key, asked) = ("sharding.units_in_flight", sharding.units_in_flight);
            return Err(Wrong::at(key, format!("`{key}` is {asked}, and must be at most {UNITS_IN_FLIGHT_MAX}")));
        }
        if sharding.accumulation == AccumulationRecipe::Sharded && sharding.stage < 2 {
            let keys = [
                ("sharding.accumulation", word(&sharding.accumulation)),
                ("sharding.stage", sharding.stage.to_string()),
            ];
            let problem = "sharded accumulation needs gradients that are sliced: use stage 2 or 3, or leave it out";
            return Err(Wrong::between(&keys, problem));
        }
        Ok(())
    }

    fn check_precision(&self) -> Checked {
        let precision = &self.precision;
        if precision.gradients == FloatRecipe::F16 && precision.parameters != FloatRecipe::F16 {
            let keys = [
                ("precision.gradients", word(&precision.gradients)),
                ("precision.parameters", word(&precision.parameters)),
            ];
            let problem = "gradients in f16 overflow where parameters are not f16: use \"f32\" or \"bf16\" for them";
            return Err(Wrong::between(&keys, problem));
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
        if precision.parameters != FloatRecipe::F16
            && let Some((key, value)) = given.into_iter().find_map(|(key, value)| Some((key, value?)))
        {
            let of = word(&precision.parameters);
            let problem = format!("`{key}` is of \"f16\", and parameters are {of}: leave it out");
            return Err(Wrong::between(&[(key, value), ("precision.parameters", of)], problem));
        }
        let scale = self.dynamic_scale();
        for (key, value) in [("precision.loss_scale_initial", scale.initial), ("precision.loss_scale_min", scale.min)] {
            if !(value > 0. && value.is_finite()) {
                return Err(Wrong::at(key, format!("`{key}` is {value}, and must be a positive number")));
            }
        }
        for (key, count) in
            [("precision.loss_scale_window", scale.window), ("precision.loss_scale_hysteresis", scale.hysteresis)]
        {
            if count == 0 {
                return Err(Wrong::at(key, format!("`{key}` is 0, and must be at least 1")));
            }
        }
        if scale.min > scale.initial {
            let keys = [
                ("precision.loss_scale_min", number(scale.min)),
                ("precision.loss_scale_initial", number(scale.initial)),
            ];
            return Err(Wrong::between(&keys, "the smallest loss scale is larger than the first: make it smaller"));
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
            return Err(Wrong::at(key, format!("`{key}` is 0, and must be at least 1")));
        }
        if let Some(minutes) = checkpoints.every_minutes.filter(|minutes| !(*minutes > 0. && minutes.is_finite())) {
            let problem = format!("`checkpoints.every_minutes` is {minutes}, and must be a positive number");
            return Err(Wrong::at("checkpoints.every_minutes", problem));
        }
        if self.schedule.kind == ScheduleKind::RangeTest {
            let keys =
                [("checkpoints.folder", quoted(&checkpoints.folder)), ("schedule.kind", word(&self.schedule.kind))];
            return Err(Wrong::between(&keys, "a range test is not gone on with: leave [checkpoints] out"));
        }
        Ok(())
    }

    fn check_supervision(&self) -> Checked {
        let supervision = &self.supervision;
        // A rank gives a sign twice a second; and a century is as good as for ever.
        let limits =
            [("supervision.time_limit_s", supervision.time_limit_s), ("supervision.silence_s", supervision.silence_s)];
        if let Some((key, seconds)) = limits.into_iter().find(|(_, seconds)| !(2. ..=3e9).contains(seconds)) {
            return Err(Wrong::at(key, format!("`{key}` is {seconds}, and must be at least 2 seconds")));
        }
        if supervision.spot_check_every == Some(0) {
            let key = "supervision.spot_check_every";
            return Err(Wrong::at(key, format!("`{key}` is 0, and must be at least 1")));
        }
        let (key, on_outlier) = ("supervision.on_outlier", supervision.on_outlier);
        if on_outlier != OutlierRecipe::Report && self.schedule.kind == ScheduleKind::RangeTest {
            let keys = [(key, word(&on_outlier)), ("schedule.kind", word(&self.schedule.kind))];
            return Err(Wrong::between(&keys, "a range test is there to see the loss rise: leave it out"));
        }
        if on_outlier == OutlierRecipe::GoBack && self.checkpoints.is_none() {
            let problem = format!(
                "`{key}` is {}, and there is nothing to go back to: give `checkpoints.folder`",
                word(&on_outlier)
            );
            return Err(Wrong::at(key, problem));
        }
        Ok(())
    }

    /// The replicas that ranks are divided into.
    pub fn check_replicas(&self, ranks: usize) -> crate::Result<()> {
        let replicas = self.sharding.replicas;
        if ranks.is_multiple_of(replicas) {
            return Ok(());
        }
        let problem = format!(
            "sharding.replicas: {ranks} ranks cannot be divided into {replicas} replicas; use a divisor of {ranks}"
        );
        Err(self.sources.error(Wrong::at("sharding.replicas", problem)))
    }
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}
