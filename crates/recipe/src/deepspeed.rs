//! A DeepSpeed configuration as a layer on top of a recipe.
//!
//! Every key of the file is translated, ignored because it has no meaning here, or refused: a configuration is never honoured in
//! part. `"auto"` and null leave a key to the recipe. If a section of the file omits a key, DeepSpeed's default applies and not
//! the recipe's value: an optimizer without betas gets DeepSpeed's betas. The keys are those of DeepSpeed's config-json.md.

mod json;
mod rules;

use std::collections::BTreeMap;
use std::path::Path;

use toml::{Table, Value};

use self::json::Json;
pub use self::rules::KeyTable;
use self::rules::is_within;
use super::change::Change;
use super::{Error, HOST, Result, Source};

/// The maximum `initial_scale_power`: far beyond the range of f16, and far below the limit of f32.
const SCALE_POWER_MAX: i64 = 64;

/// The maximum of counts, which are 32 bits wide in a recipe.
const COUNT_MAX: i64 = u32::MAX as i64;

/// The changes that a configuration makes to a recipe, and notes for the user.
pub(super) struct Translated {
    pub(super) changes: Vec<Change>,
    pub(super) notes: Vec<String>,
}

/// Translates a configuration into changes to `recipe`.
pub(super) fn translate(file: &Path, text: &str, recipe: &Table) -> Result<Translated> {
    let fail = |problem: String| Error::Recipe { place: file.display().to_string(), problem };
    let leaves = json::leaves(text).map_err(fail)?;
    let mut translation = Translation {
        leaves,
        recipe,
        changes: vec![],
        notes: vec![],
        no_effect: vec![],
        buffer_limits: vec![],
        refused: vec![],
    };
    translation.batch();
    translation.optimizer();
    translation.scheduler();
    translation.precision();
    translation.plain_keys();
    translation.sections();
    translation.leftovers();
    let Translation { changes, mut notes, no_effect, buffer_limits, mut refused, .. } = translation;
    if !refused.is_empty() {
        refused.sort();
        let count = if refused.len() == 1 { "a key".to_string() } else { format!("{} keys", refused.len()) };
        let list: Vec<String> = refused.iter().map(|(key, why)| format!("  {key}: {why}")).collect();
        return Err(fail(format!("{count} cannot be honoured:\n{}", list.join("\n"))));
    }
    if !no_effect.is_empty() {
        notes.push(format!("these keys tune DeepSpeed itself, and have no meaning here: {}", no_effect.join(", ")));
    }
    if !buffer_limits.is_empty() {
        notes.push(format!(
            "these keys limit DeepSpeed's buffers; here memory depends on zero.prefetch, zero.reduce_each_micro_batch and \
             activation_checkpointing, and `shardwise train --dry-run` prints the estimate: {}",
            buffer_limits.join(", ")
        ));
    }
    let name = file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    Ok(Translated { changes, notes: notes.into_iter().map(|note| format!("{name}: {note}")).collect() })
}

/// Every known DeepSpeed key, by how it is treated: the table in the guide.
pub fn deepspeed_keys() -> [KeyTable; 5] {
    rules::key_tables()
}

/// The value of a key of the file.
enum Said<T> {
    /// The key is missing.
    Absent,
    /// `"auto"` or null: the recipe decides.
    Auto,
    /// A value.
    Value(T),
}

/// A translation in progress. Keys that are understood are removed from `leaves`; the rest is refused at the end.
struct Translation<'a> {
    leaves: BTreeMap<String, Json>,
    recipe: &'a Table,
    changes: Vec<Change>,
    notes: Vec<String>,
    no_effect: Vec<String>,
    buffer_limits: Vec<String>,
    refused: Vec<(String, String)>,
}

impl Translation<'_> {
    fn take(&mut self, key: &str) -> Said<Json> {
        assert!(rules::is_listed(key), "{key} is in no list of rules.rs, and so not in the guide");
        match self.leaves.remove(key) {
            None => Said::Absent,
            Some(Json::Null) => Said::Auto,
            Some(Json::Text(text)) if text == "auto" => Said::Auto,
            Some(value) => Said::Value(value),
        }
    }

    fn refuse(&mut self, key: &str, why: impl Into<String>) {
        self.refused.push((key.to_string(), why.into()));
    }

    fn set(&mut self, ours: &str, value: impl Into<Value>, theirs: &str) {
        let source = Source::DeepSpeed(theirs.to_string());
        self.changes.push(Change { key: ours.to_string(), value: Some(value.into()), source });
    }

    fn remove(&mut self, ours: &str, theirs: &str) {
        let source = Source::DeepSpeed(theirs.to_string());
        self.changes.push(Change { key: ours.to_string(), value: None, source });
    }

    /// Takes a value of the right type, and refuses any other.
    fn typed<T>(&mut self, key: &str, kind: &str, read: impl Fn(&Json) -> Option<T>) -> Said<T> {
        match self.take(key) {
            Said::Absent => Said::Absent,
            Said::Auto => Said::Auto,
            Said::Value(value) => match read(&value) {
                Some(value) => Said::Value(value),
                None => {
                    self.refuse(key, format!("it is {value}, but must be {kind}"));
                    Said::Auto
                }
            },
        }
    }

    fn number(&mut self, key: &str) -> Said<f64> {
        self.typed(key, "a number", Json::number)
    }

    fn whole(&mut self, key: &str) -> Said<i64> {
        self.typed(key, "a whole number, at least 0", Json::whole)
    }

    fn flag(&mut self, key: &str) -> Said<bool> {
        self.typed(key, "true or false", Json::flag)
    }

    fn text(&mut self, key: &str) -> Said<String> {
        self.typed(key, "text", Json::text)
    }

    fn has(&self, section: &str) -> bool {
        self.leaves.keys().any(|key| is_within(key, section))
    }

    /// The value of a key in the recipe's file.
    fn of_recipe(&self, key: &str) -> Option<&Value> {
        let (table, name) = key.split_once('.')?;
        self.recipe.get(table)?.as_table()?.get(name)
    }

    /// Translates the three batch sizes. The file's take precedence. Of the recipe's, only enough are kept to make two in total;
    /// the third follows from those.
    fn batch(&mut self) {
        let sizes = [
            ("train_batch_size", "batch.global_batch_size"),
            ("train_micro_batch_size_per_gpu", "batch.micro_batch_size"),
            ("gradient_accumulation_steps", "batch.gradient_accumulation_steps"),
        ];
        let given: Vec<Option<i64>> = sizes
            .iter()
            .map(|(theirs, _)| match self.whole(theirs) {
                Said::Value(size) => Some(size),
                Said::Absent | Said::Auto => None,
            })
            .collect();
        let mut kept = given.iter().flatten().count();
        let first = sizes.iter().zip(&given).find_map(|((theirs, _), size)| size.map(|_| *theirs));
        for ((theirs, ours), size) in sizes.into_iter().zip(given) {
            match (size, first) {
                (Some(size), _) => self.set(ours, size, theirs),
                (None, Some(_)) if kept < 2 => kept += usize::from(self.of_recipe(ours).is_some()),
                (None, Some(first)) => self.remove(ours, first),
                (None, None) => {}
            }
        }
    }

    fn optimizer(&mut self) {
        if !self.has("optimizer") {
            return;
        }
        let Said::Value(name) = self.text("optimizer.type") else {
            return self.refuse("optimizer.type", "it is missing");
        };
        let kind = match name.to_lowercase().as_str() {
            "adam" | "adamw" => "adamw",
            "lamb" => "lamb",
            "sgd" => "sgd",
            _ => {
                self.leaves.retain(|key, _| !is_within(key, "optimizer"));
                return self
                    .refuse("optimizer.type", format!("{name} is not supported, only Adam, AdamW, Lamb and SGD"));
            }
        };
        self.set("optimizer.kind", kind, "optimizer.type");
        let torch_adam = matches!(self.flag("optimizer.params.torch_adam"), Said::Value(true));
        if let Said::Value(false) = self.flag("optimizer.params.adam_w_mode") {
            self.refuse("optimizer.params.adam_w_mode", "weight decay is decoupled here: write true, or leave it out");
        }
        self.rates("lr", "lr", 1e-3);
        // PyTorch's AdamW, if the file asks for it, has another default.
        self.rates("weight_decay", "weight_decay", if torch_adam { 0.01 } else { 0. });
        if kind == "sgd" {
            self.rates("momentum", "momentum", 0.);
            self.remove("optimizer.betas", "optimizer.type");
            self.remove("optimizer.eps", "optimizer.type");
        } else {
            self.rates("eps", "eps", 1e-8);
            self.betas();
            self.remove("optimizer.momentum", "optimizer.type");
        }
        let decays = |change: &Change| change.value.as_ref().and_then(Value::as_float).is_some_and(|decay| decay > 0.);
        if self.changes.iter().any(|change| change.key == "optimizer.weight_decay" && decays(change)) {
            self.notes.push(
                "optimizer.params.weight_decay: norms and biases do not decay here; DeepSpeed's do, unless the script says otherwise"
                    .to_string(),
            );
        }
        if kind == "lamb" {
            self.notes.push(
                "optimizer.type: LAMB's trust ratio is not clamped here; DeepSpeed clamps it to 0.01 to 10".to_string(),
            );
        }
    }

    /// Translates a number in `optimizer.params`. If it is absent, DeepSpeed's default applies.
    fn rates(&mut self, theirs: &str, ours: &str, default: f64) {
        let (theirs, ours) = (format!("optimizer.params.{theirs}"), format!("optimizer.{ours}"));
        match self.number(&theirs) {
            Said::Value(value) => self.set(&ours, value, &theirs),
            Said::Absent => self.set(&ours, default, "optimizer, by default"),
            Said::Auto => {}
        }
    }

    fn betas(&mut self) {
        let theirs = "optimizer.params.betas";
        let list = |betas: [f64; 2]| Value::Array(betas.map(Value::Float).to_vec());
        match self.typed(theirs, "a list of two numbers", Json::pair) {
            Said::Value(betas) => self.set("optimizer.betas", list(betas), theirs),
            Said::Absent => self.set("optimizer.betas", list([0.9, 0.999]), "optimizer, by default"),
            Said::Auto => {}
        }
    }

    fn scheduler(&mut self) {
        if !self.has("scheduler") {
            return;
        }
        let Said::Value(name) = self.text("scheduler.type") else {
            return self.refuse("scheduler.type", "it is missing");
        };
        let kind = match name.as_str() {
            "WarmupLR" => "constant",
            "WarmupDecayLR" => "linear",
            "WarmupCosineLR" => "cosine",
            _ => {
                self.leaves.retain(|key, _| !is_within(key, "scheduler"));
                return self.refuse("scheduler.type", rules::no_scheduler(&name));
            }
        };
        self.set("schedule.kind", kind, "scheduler.type");
        for key in ["decay_steps", "start_lr_ratio", "pct_start", "momentum", "start_lr", "plot"] {
            self.remove(&format!("schedule.{key}"), "scheduler.type");
        }
        self.warmup();
        match kind {
            "constant" => self.remove("schedule.min_lr_ratio", "scheduler.type"),
            "linear" => self.set("schedule.min_lr_ratio", 0., "scheduler.type"),
            _ => match self.number("scheduler.params.cos_min_ratio") {
                Said::Value(ratio) => self.set("schedule.min_lr_ratio", ratio, "scheduler.params.cos_min_ratio"),
                Said::Absent => self.set("schedule.min_lr_ratio", 1e-4, "scheduler, by default"),
                Said::Auto => {}
            },
        }
        if kind != "cosine" {
            match self.number("scheduler.params.warmup_max_lr") {
                Said::Value(lr) => self.set("optimizer.lr", lr, "scheduler.params.warmup_max_lr"),
                Said::Absent if kind == "linear" => self.set("optimizer.lr", 1e-3, "scheduler, by default"),
                Said::Absent | Said::Auto => {}
            }
        }
        if kind != "constant" {
            match self.whole("scheduler.params.total_num_steps") {
                Said::Value(steps) => self.set("run.steps", steps, "scheduler.params.total_num_steps"),
                Said::Absent => self.refuse("scheduler.params.total_num_steps", "it is missing"),
                Said::Auto => {}
            }
        }
        self.notes.push(format!(
            "scheduler.type: here the learning rate of {name} rises from the first step; DeepSpeed's first two steps have a \
             learning rate of 0, and later steps are delayed accordingly"
        ));
    }

    fn warmup(&mut self) {
        let log = "the learning rate rises linearly here: write \"warmup_type\": \"linear\"";
        match self.text("scheduler.params.warmup_type") {
            Said::Value(rise) if rise == "linear" => {}
            Said::Auto => {}
            Said::Value(rise) => self.refuse("scheduler.params.warmup_type", format!("it is \"{rise}\", and {log}")),
            Said::Absent => self.refuse("scheduler.params.warmup_type", format!("it is \"log\" by default, and {log}")),
        }
        for key in ["scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_ratio"] {
            if let Said::Value(rate) = self.number(key)
                && rate != 0.
            {
                self.refuse(key, format!("it is {rate}, and the learning rate rises from 0 here"));
            }
        }
        let steps = "scheduler.params.warmup_num_steps";
        match self.whole(steps) {
            // DeepSpeed warms up for at least two steps.
            Said::Value(count) => self.set("schedule.warmup_steps", count.max(2), steps),
            Said::Absent => self.set("schedule.warmup_steps", 1000, "scheduler, by default"),
            Said::Auto => {}
        }
    }

    fn precision(&mut self) {
        let scales = self.has("fp16");
        let (bf16, fp16) = (self.flag("bf16.enabled"), self.flag("fp16.enabled"));
        let was = self.of_recipe("precision.param_dtype").and_then(Value::as_str).unwrap_or("f32").to_string();
        match (&bf16, &fp16) {
            (Said::Value(true), Said::Value(true)) => {
                self.refuse("fp16.enabled", "bf16.enabled is true as well: enable one of them");
            }
            (Said::Value(true), _) => self.set("precision.param_dtype", "bf16", "bf16.enabled"),
            (_, Said::Value(true)) => self.set("precision.param_dtype", "f16", "fp16.enabled"),
            (Said::Value(false), _) if was == "bf16" => self.set("precision.param_dtype", "f32", "bf16.enabled"),
            (_, Said::Value(false)) if was == "f16" => self.set("precision.param_dtype", "f32", "fp16.enabled"),
            _ => {}
        }
        let is_half = matches!(bf16, Said::Value(true)) || matches!(fp16, Said::Value(true));
        let is_f16 = match (&bf16, &fp16) {
            (Said::Value(true), _) | (_, Said::Value(false)) => false,
            (_, Said::Value(true)) => true,
            _ => was == "f16",
        };
        match is_f16 && scales {
            true => self.loss_scale(),
            // Without f16 there is no loss scale.
            false => self.leaves.retain(|key, _| !rules::LOSS_SCALE.contains(&key.as_str())),
        }
        let is_bf16 = match &bf16 {
            Said::Value(enabled) => *enabled,
            Said::Absent | Said::Auto => was == "bf16" && !is_f16,
        };
        match self.flag("bf16.check_grad_overflow") {
            _ if !is_bf16 => {}
            Said::Value(true) => self.set("run.on_nonfinite", "skip", "bf16.check_grad_overflow"),
            Said::Value(false) => self.refuse(
                "bf16.check_grad_overflow",
                "it is false, and numbers that are not finite are always found here: write true to skip such a step, or leave \
                 it to run.on_nonfinite",
            ),
            Said::Absent | Said::Auto => {}
        }
        let types = ["data_types.grad_accum_dtype", "communication_data_type"];
        let [kept, sent] = types.map(|key| (key, self.float(key)));
        match (kept, sent) {
            ((_, Some(kept)), (key, Some(sent))) if kept != sent => {
                self.refuse(key, format!("gradients are sent in the type they are added up in, {kept}, not {sent}"));
            }
            ((key, Some(float)), _) | (_, (key, Some(float))) => self.set("precision.reduce_dtype", float, key),
            _ if is_half => self.notes.push(
                "gradients are accumulated and sent in precision.reduce_dtype, f32 unless the recipe says otherwise; DeepSpeed's default \
                 is the parameters' type (communication_data_type)"
                    .to_string(),
            ),
            _ => {}
        }
    }

    /// The dynamic loss scale of f16, which decides which steps are skipped.
    fn loss_scale(&mut self) {
        if let Said::Value(scale) = self.number("fp16.loss_scale")
            && scale != 0.
        {
            self.refuse("fp16.loss_scale", format!("it is {scale}, and the loss scale is dynamic here: write 0"));
        }
        let key = "fp16.initial_scale_power";
        match self.whole(key) {
            Said::Value(power @ 0..=SCALE_POWER_MAX) => {
                self.set("precision.loss_scale_initial", 2f64.powi(power as i32), key);
            }
            Said::Value(power) => self.refuse(key, format!("it is {power}, but must be at most {SCALE_POWER_MAX}")),
            Said::Absent => self.set("precision.loss_scale_initial", 65536., "fp16, by default"),
            Said::Auto => {}
        }
        for (theirs, ours, default) in [
            ("fp16.loss_scale_window", "precision.loss_scale_window", 1000),
            ("fp16.hysteresis", "precision.loss_scale_hysteresis", 2),
        ] {
            match self.whole(theirs) {
                Said::Value(count @ 0..=COUNT_MAX) => self.set(ours, count, theirs),
                Said::Value(count) => self.refuse(theirs, format!("it is {count}, but must be at most {COUNT_MAX}")),
                Said::Absent => self.set(ours, default, "fp16, by default"),
                Said::Auto => {}
            }
        }
        let (theirs, ours) = ("fp16.consecutive_hysteresis", "precision.loss_scale_consecutive_hysteresis");
        match self.flag(theirs) {
            Said::Value(flag) => self.set(ours, flag, theirs),
            Said::Absent => self.set(ours, false, "fp16, by default"),
            Said::Auto => {}
        }
        let (theirs, ours) = ("fp16.min_loss_scale", "precision.loss_scale_min");
        match self.number(theirs) {
            Said::Value(scale) => self.set(ours, scale, theirs),
            Said::Absent => self.set(ours, 1., "fp16, by default"),
            Said::Auto => {}
        }
        self.notes.push(
            "fp16.loss_scale_window: here the loss scale doubles after exactly this many steps without an overflow; DeepSpeed waits \
             one step longer at the start and after each overflow"
                .to_string(),
        );
    }

    fn float(&mut self, key: &str) -> Option<&'static str> {
        let read = |value: &Json| match value.text()?.as_str() {
            "fp32" => Some("f32"),
            "fp16" => Some("f16"),
            "bf16" | "bfp16" => Some("bf16"),
            _ => None,
        };
        match self.typed(key, "\"fp32\", \"bf16\" or \"fp16\"", read) {
            Said::Value(float) => Some(float),
            Said::Absent | Said::Auto => None,
        }
    }

    /// Handles keys that are translated one to one, allow only one value, or have no meaning here.
    fn plain_keys(&mut self) {
        match self.number("gradient_clipping") {
            Said::Value(0.) => self.remove("optimizer.max_grad_norm", "gradient_clipping"),
            Said::Value(norm) => self.set("optimizer.max_grad_norm", norm, "gradient_clipping"),
            Said::Absent | Said::Auto => {}
        }
        for (theirs, ours) in [("steps_per_print", "run.log_every"), ("zero_optimization.stage", "zero.stage")] {
            if let Said::Value(number) = self.whole(theirs) {
                self.set(ours, number, theirs);
            }
        }
        if self.has("zero_optimization")
            && !self.changes.iter().any(|change| change.key == "zero.stage")
            && self.of_recipe("zero.stage").is_none()
        {
            self.set("zero.stage", 0, "zero_optimization, by default");
        }
        let quantized = "zero_optimization.zero_quantized_weights";
        match self.flag(quantized) {
            Said::Value(true) => self.set("compression.parameters", "int8", quantized),
            Said::Value(false) => self.remove("compression.parameters", quantized),
            Said::Absent | Said::Auto => {}
        }
        for &(key, wanted, why) in rules::ONE_ALLOWED_VALUE {
            match self.take(key) {
                Said::Value(value) if value.is(wanted) => {}
                Said::Value(value) => self.refuse(key, format!("it is {value}, and {why}")),
                Said::Absent | Said::Auto => {}
            }
        }
        for &key in rules::NO_EFFECT {
            if self.leaves.remove(key).is_some() {
                self.no_effect.push(key.to_string());
            }
        }
        for &key in rules::BUFFER_LIMITS {
            if self.leaves.remove(key).is_some() {
                self.buffer_limits.push(key.to_string());
            }
        }
    }

    /// Refuses sections that are enabled and have no counterpart.
    fn sections(&mut self) {
        for &(section, why) in rules::REFUSED_IF_ENABLED {
            if !self.has(section) {
                continue;
            }
            let enabled = format!("{section}.enabled");
            let is_on = !matches!(self.flag(&enabled), Said::Absent | Said::Value(false));
            self.leaves.retain(|key, _| !is_within(key, section));
            if is_on {
                self.refuse(&enabled, why);
            }
        }
        self.offload();
    }

    /// Optimizer state and parameters can be on a disk or in host memory.
    fn offload(&mut self) {
        for &(section, key, what) in rules::OFFLOAD {
            let [device_key, path_key, ratio_key] =
                ["device", "nvme_path", "ratio"].map(|key| format!("{section}.{key}"));
            let (device, path, ratio) = (self.text(&device_key), self.text(&path_key), self.number(&ratio_key));
            let others: Vec<String> = self.leaves.keys().filter(|key| is_within(key, section)).cloned().collect();
            self.leaves.retain(|key, _| !is_within(key, section));
            let Said::Value(device) = device else { continue };
            match (device.as_str(), path) {
                ("none", _) => continue,
                ("cpu", _) => self.set(key, HOST.to_string(), &device_key),
                ("nvme", Said::Value(path)) => self.set(key, path, &path_key),
                ("nvme", _) => self.refuse(&path_key, "it is missing"),
                _ => {
                    let why = format!("it is \"{device}\", but {what} can be offloaded only to \"cpu\" or \"nvme\"");
                    self.refuse(&device_key, why);
                }
            }
            if let Said::Value(ratio) = ratio
                && ratio != 1.
            {
                self.refuse(&ratio_key, format!("it is {ratio}, but all {what} can be offloaded, or none"));
            }
            self.no_effect.extend(others);
        }
    }

    fn leftovers(&mut self) {
        for (key, value) in std::mem::take(&mut self.leaves) {
            // An empty section has no effect.
            if !matches!(value, Json::Empty) || !rules::is_section(&key) {
                let why = rules::why_not(&key);
                self.refuse(&key, why);
            }
        }
    }
}
