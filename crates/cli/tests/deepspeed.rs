//! DeepSpeed configurations: real ones as a whole, and the effect of every supported key.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod snapshot;

use std::path::{Path, PathBuf};

use shardwise_recipe::Recipe;

use snapshot::{assert_no_differences, difference, files};

fn recipe() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/deepspeed/recipe.toml")
}

#[test]
fn real_configurations_are_honoured_or_refused_key_by_key() {
    let configurations = files("deepspeed", "json");
    assert_eq!(configurations.len(), 12);
    let mut accepted = 0;
    let mut differences = Vec::new();
    for path in configurations {
        let outcome =
            Recipe::read_layered(&recipe(), Some(&path), &[]).and_then(|recipe| recipe.resolved_toml(Some(4)));
        accepted += usize::from(outcome.is_ok());
        let said = outcome.unwrap_or_else(|error| error.to_string());
        differences.extend(difference(&path.with_extension("txt"), &said));
    }
    assert_no_differences(differences);
    assert_eq!(accepted, 6);
}

/// Changes the recipe, applies a configuration on top, and returns the resolved recipe.
fn apply(json: &str, changes: &[(&str, &str)]) -> Result<String, String> {
    let folder = tempfile::tempdir().unwrap();
    let text = changes.iter().fold(std::fs::read_to_string(recipe()).unwrap(), |text, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    });
    std::fs::write(folder.path().join("recipe.toml"), text).unwrap();
    std::fs::write(folder.path().join("ds.json"), json).unwrap();
    let recipe = Recipe::read_layered(&folder.path().join("recipe.toml"), Some(&folder.path().join("ds.json")), &[]);
    recipe.and_then(|recipe| recipe.resolved_toml(Some(4))).map_err(|error| error.to_string())
}

/// The value and the source of a key.
fn value(text: &str, key: &str) -> Option<(String, String)> {
    let (table, name) = key.rsplit_once('.').unwrap_or(("", key));
    let section = text.split("\n[").find(|section| section.starts_with(&format!("{table}]")))?;
    let line = section.lines().find(|line| line.starts_with(&format!("{name} = ")))?;
    let (value, source) = line.split_once(" # ").unwrap();
    Some((value.split_once(" = ").unwrap().1.trim().to_string(), source.to_string()))
}

#[test]
fn every_honoured_key_has_its_effect() {
    let adam = |params: &str| format!(r#"{{"optimizer": {{"type": "Adam", "params": {{{params}}}}}}}"#);
    let of = |kind: &str, params: &str| format!(r#"{{"optimizer": {{"type": "{kind}", "params": {{{params}}}}}}}"#);
    let schedule = |kind: &str, params: &str| {
        format!(r#"{{"scheduler": {{"type": "{kind}", "params": {{"warmup_type": "linear", {params}}}}}}}"#)
    };
    let fp16 = |keys: &str| format!(r#"{{"fp16": {{"enabled": true, {keys}}}}}"#);
    let total = r#""total_num_steps": 70, "warmup_num_steps": 7"#;
    let cases: Vec<(String, &str, &str, &str)> = vec![
        (r#"{"train_batch_size": 64}"#.into(), "batch.global_batch_size", "64", "train_batch_size"),
        (r#"{"train_batch_size": 64}"#.into(), "batch.gradient_accumulation_steps", "4", ""),
        (
            r#"{"train_micro_batch_size_per_gpu": 2}"#.into(),
            "batch.micro_batch_size",
            "2",
            "train_micro_batch_size_per_gpu",
        ),
        (
            r#"{"gradient_accumulation_steps": 5}"#.into(),
            "batch.gradient_accumulation_steps",
            "5",
            "gradient_accumulation_steps",
        ),
        (r#"{"train_batch_size": 64, "gradient_accumulation_steps": 2}"#.into(), "batch.micro_batch_size", "8", ""),
        (
            r#"{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 1}"#.into(),
            "batch.global_batch_size",
            "8",
            "",
        ),
        (adam(""), "optimizer.kind", "\"adamw\"", "optimizer.type"),
        (of("AdamW", ""), "optimizer.kind", "\"adamw\"", "optimizer.type"),
        (of("Lamb", ""), "optimizer.kind", "\"lamb\"", "optimizer.type"),
        (of("SGD", r#""momentum": 0.9"#), "optimizer.momentum", "0.9", "optimizer.params.momentum"),
        (of("sgd", ""), "optimizer.kind", "\"sgd\"", "optimizer.type"),
        (adam(r#""lr": 0.002"#), "optimizer.lr", "0.002", "optimizer.params.lr"),
        (adam(""), "optimizer.lr", "0.001", "optimizer, by default"),
        (adam(r#""lr": "auto""#), "optimizer.lr", "3e-4", "recipe.toml:20"),
        (adam(r#""betas": [0.8, 0.99]"#), "optimizer.betas", "[0.8, 0.99]", "optimizer.params.betas"),
        (adam(""), "optimizer.betas", "[0.9, 0.999]", "optimizer, by default"),
        (adam(r#""eps": 1e-6"#), "optimizer.eps", "1e-6", "optimizer.params.eps"),
        (adam(r#""weight_decay": 0.3"#), "optimizer.weight_decay", "0.3", "optimizer.params.weight_decay"),
        (adam(r#""torch_adam": true"#), "optimizer.weight_decay", "0.01", "optimizer, by default"),
        (
            adam(r#""adam_w_mode": true, "bias_correction": true, "amsgrad": false"#),
            "optimizer.weight_decay",
            "0.0",
            "",
        ),
        (schedule("WarmupLR", r#""warmup_num_steps": 7"#), "schedule.kind", "\"constant\"", "scheduler.type"),
        (
            schedule("WarmupLR", r#""warmup_num_steps": 7"#),
            "schedule.warmup_steps",
            "7",
            "scheduler.params.warmup_num_steps",
        ),
        (
            schedule("WarmupLR", r#""warmup_num_steps": 1"#),
            "schedule.warmup_steps",
            "2",
            "scheduler.params.warmup_num_steps",
        ),
        (schedule("WarmupLR", r#""warmup_min_lr": 0"#), "schedule.warmup_steps", "1000", "scheduler, by default"),
        (schedule("WarmupLR", r#""warmup_max_lr": 0.5"#), "optimizer.lr", "0.5", "scheduler.params.warmup_max_lr"),
        (schedule("WarmupDecayLR", total), "schedule.kind", "\"linear\"", "scheduler.type"),
        (schedule("WarmupDecayLR", total), "run.steps", "70", "scheduler.params.total_num_steps"),
        (schedule("WarmupDecayLR", total), "optimizer.lr", "0.001", "scheduler, by default"),
        (schedule("WarmupCosineLR", total), "schedule.min_lr_ratio", "1e-4", "scheduler, by default"),
        (
            schedule("WarmupCosineLR", &format!(r#"{total}, "cos_min_ratio": 0.2"#)),
            "schedule.min_lr_ratio",
            "0.2",
            "scheduler.params.cos_min_ratio",
        ),
        (r#"{"gradient_clipping": 0.7}"#.into(), "optimizer.max_grad_norm", "0.7", "gradient_clipping"),
        (r#"{"gradient_clipping": "auto"}"#.into(), "optimizer.max_grad_norm", "1.0", "recipe.toml:23"),
        (r#"{"fp16": {"enabled": true, "loss_scale": 0}}"#.into(), "precision.param_dtype", "\"f16\"", "fp16.enabled"),
        (fp16(r#""initial_scale_power": 20"#), "precision.loss_scale_initial", "1048576.0", "fp16.initial_scale_power"),
        (fp16(r#""loss_scale_window": 500"#), "precision.loss_scale_window", "500", "fp16.loss_scale_window"),
        (fp16(r#""hysteresis": 4"#), "precision.loss_scale_hysteresis", "4", "fp16.hysteresis"),
        (
            fp16(r#""consecutive_hysteresis": true"#),
            "precision.loss_scale_consecutive_hysteresis",
            "true",
            "fp16.consecutive_hysteresis",
        ),
        (fp16(r#""min_loss_scale": 0.5"#), "precision.loss_scale_min", "0.5", "fp16.min_loss_scale"),
        // DeepSpeed's defaults.
        (fp16(r#""loss_scale": 0"#), "precision.loss_scale_initial", "65536.0", "fp16, by default"),
        (fp16(r#""loss_scale": 0"#), "precision.loss_scale_window", "1000", "fp16, by default"),
        (fp16(r#""loss_scale": 0"#), "precision.loss_scale_hysteresis", "2", "fp16, by default"),
        (fp16(r#""loss_scale": 0"#), "precision.loss_scale_min", "1.0", "fp16, by default"),
        (fp16(r#""loss_scale_window": "auto""#), "precision.loss_scale_window", "2000", "default"),
        (
            r#"{"bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale": 128, "hysteresis": 4}}"#.into(),
            "precision.param_dtype",
            "\"bf16\"",
            "bf16.enabled",
        ),
        (
            r#"{"bf16": {"enabled": true, "check_grad_overflow": true}}"#.into(),
            "run.on_nonfinite",
            "\"skip\"",
            "bf16.check_grad_overflow",
        ),
        (r#"{"bf16": {"enabled": true}}"#.into(), "precision.param_dtype", "\"bf16\"", "bf16.enabled"),
        (
            r#"{"bf16": {"enabled": false}, "fp16": {"enabled": false, "loss_scale": 128}}"#.into(),
            "precision.param_dtype",
            "\"f32\"",
            "",
        ),
        (
            r#"{"data_types": {"grad_accum_dtype": "bf16"}}"#.into(),
            "precision.reduce_dtype",
            "\"bf16\"",
            "data_types.grad_accum_dtype",
        ),
        (
            r#"{"communication_data_type": "bf16"}"#.into(),
            "precision.reduce_dtype",
            "\"bf16\"",
            "communication_data_type",
        ),
        (r#"{"zero_optimization": {"stage": 2}}"#.into(), "zero.stage", "2", "zero_optimization.stage"),
        (r#"{"zero_optimization": {"overlap_comm": true}}"#.into(), "zero.stage", "0", "zero_optimization, by default"),
        (r#"{"zero_optimization": {"stage": 1, "offload_param": {"device": "none"}}}"#.into(), "zero.stage", "1", ""),
        (
            r#"{"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}}}"#.into(),
            "offload.optimizer",
            "\"/fast\"",
            "",
        ),
        (
            r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/fast"}}}"#.into(),
            "offload.parameters",
            "\"/fast\"",
            "",
        ),
        (
            r#"{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}"#.into(),
            "compression.parameters",
            "\"int8\"",
            "zero_optimization.zero_quantized_weights",
        ),
        (r#"{"steps_per_print": 25}"#.into(), "run.log_every", "25", "steps_per_print"),
    ];
    for (json, key, expected, source) in cases {
        let text = apply(&json, &[]).unwrap_or_else(|error| panic!("{json}: {error}"));
        let (found, from) = value(&text, key).unwrap_or_else(|| panic!("{json}: no {key} in {text}"));
        assert_eq!(found, expected, "{json}: {key}");
        let source = if ["", "default"].contains(&source) || source.contains(':') {
            source.into()
        } else {
            format!("ds.json: {source}")
        };
        assert!(source.is_empty() || from == source, "{json}: {key} is from {from}, not {source}");
    }
}

#[test]
fn a_section_removes_the_keys_it_replaces() {
    let sgd = apply(r#"{"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}"#, &[]).unwrap();
    assert_eq!((value(&sgd, "optimizer.betas"), value(&sgd, "optimizer.eps")), (None, None), "{sgd}");
    let unclipped = apply(r#"{"gradient_clipping": 0.0}"#, &[]).unwrap();
    assert_eq!(value(&unclipped, "optimizer.max_grad_norm"), None);
    let offloaded = r#"{"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": true}}}"#;
    let on_gpu = apply(offloaded, &[("[run]", "[run]\ndevice = \"cuda\"")]).unwrap();
    let expected = ("\"host\"".into(), "ds.json: zero_optimization.offload_optimizer.device".into());
    assert_eq!(value(&on_gpu, "offload.optimizer"), Some(expected), "{on_gpu}");
    let off = apply(
        r#"{"bf16": {"enabled": false}}"#,
        &[("[optimizer]", "[precision]\nparam_dtype = \"bf16\"\n[optimizer]")],
    )
    .unwrap();
    assert_eq!(value(&off, "precision.param_dtype").unwrap().0, "\"f32\"");
    // The file sets the loss scaling of a recipe that already uses f16. Other recipes have none to set.
    let scaled = r#"{"fp16": {"enabled": "auto", "loss_scale_window": 30}}"#;
    let half = [("[optimizer]", "[precision]\nparam_dtype = \"f16\"\n[optimizer]")];
    assert_eq!(value(&apply(scaled, &half).unwrap(), "precision.loss_scale_window").unwrap().0, "30");
    assert_eq!(value(&apply(scaled, &[]).unwrap(), "precision.loss_scale_window"), None);
    // Choosing another type with --set drops the loss scaling.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("ds.json"), r#"{"fp16": {"enabled": true}}"#).unwrap();
    let sets = ["precision.param_dtype=\"bf16\"".to_string()];
    let other = Recipe::read_layered(&recipe(), Some(&folder.path().join("ds.json")), &sets).unwrap();
    assert_eq!(value(&other.resolved_toml(Some(4)).unwrap(), "precision.loss_scale_window"), None);
    let cycle =
        [("kind = \"cosine\"\nwarmup_steps = 5", "kind = \"one-cycle\"\npct_start = 0.2\nmomentum = [0.9, 0.8]")];
    let warmup = r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}}"#;
    assert_eq!(value(&apply(warmup, &cycle).unwrap(), "schedule.pct_start"), None);
}

#[test]
fn keys_without_meaning_are_noted_and_others_refused() {
    let notes =
        apply(r#"{"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": false}}"#, &[]).unwrap();
    assert!(
        notes.contains("have no meaning here: zero_optimization.overlap_comm\n")
            && notes
                .contains("`shardwise train --dry-run` prints the estimate: zero_optimization.reduce_bucket_size\n"),
        "{notes}"
    );
    for (json, expected) in [
        (r#"{"prescale_gradients": true}"#, "prescale_gradients: it is true"),
        (r#"{"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}}"#, "optimizer.params.adam_w_mode"),
        (r#"{"optimizer": {"params": {"lr": 1}}}"#, "optimizer.type: it is missing"),
        (
            r#"{"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}"#,
            "optimizer.params.lr: it is \"fast\", but must be a number",
        ),
        (r#"{"optimizer": {"type": "SGD", "params": {"nesterov": true}}}"#, "optimizer.params.nesterov"),
        (
            r#"{"optimizer": {"type": "SGD", "params": {"betas": [0, 0]}}}"#,
            "optimizer.params.betas: this optimizer has no such setting",
        ),
        (r#"{"scheduler": {"type": "LRRangeTest"}}"#, "scheduler.type: DeepSpeed's learning rate rises by equal steps"),
        (r#"{"fp16": {"enabled": true, "loss_scale": 128}}"#, "fp16.loss_scale: it is 128"),
        (r#"{"fp16": {"enabled": true, "initial_scale_power": 65}}"#, "fp16.initial_scale_power: it is 65"),
        (r#"{"fp16": {"enabled": true, "loss_scale_window": 0}}"#, "`precision.loss_scale_window` is 0"),
        (r#"{"fp16": {"enabled": true, "hysteresis": 0}}"#, "`precision.loss_scale_hysteresis` is 0"),
        (r#"{"fp16": {"enabled": true, "hysteresis": "often"}}"#, "fp16.hysteresis: it is \"often\""),
        (r#"{"fp16": {"enabled": true, "min_loss_scale": 0}}"#, "`precision.loss_scale_min` is 0"),
        (
            r#"{"fp16": {"enabled": true, "initial_scale_power": 0, "min_loss_scale": 4}}"#,
            "larger than the initial one",
        ),
        (r#"{"bf16": {"enabled": true, "check_grad_overflow": false}}"#, "bf16.check_grad_overflow: it is false"),
        (r#"{"zero_optimization": {"ignore_unused_parameters": false}}"#, "ignore_unused_parameters: it is false"),
        (r#"{"dataloader_drop_last": false}"#, "dataloader_drop_last: it is false"),
        (r#"{"fp16": {"enabled": true}, "bf16": {"enabled": true}}"#, "enable one of them"),
        (
            r#"{"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "bf16"}"#,
            "communication_data_type: gradients are sent in the type",
        ),
        (r#"{"zero_optimization": {"load_from_fp32_weights": false}}"#, "zero_optimization.load_from_fp32_weights"),
        (
            r#"{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}"#,
            "a rank on a CPU already has its optimizer state in host memory",
        ),
        (
            r#"{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}"#,
            "offload_optimizer.nvme_path: it is missing",
        ),
        (
            r#"{"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/x", "ratio": 0.5}}}"#,
            "offload_optimizer.ratio: it is 0.5",
        ),
        (
            r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}"#,
            "a rank on a CPU already has its parameters in host memory",
        ),
        (
            r#"{"zero_optimization": {"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "/x"}}}"#,
            "only sharded parameters can be offloaded",
        ),
        (r#"{"train_batch_size": 2.5}"#, "train_batch_size: it is 2.5, but must be a whole number"),
        (r#"{"train_batch_size": 33}"#, "must be a multiple of batch.micro_batch_size × ranks = 4 × 4 = 16"),
        (r#"{"steps_per_print": 0}"#, "ds.json: steps_per_print: `run.log_every` is 0"),
        (r#"{"zero_optimization": {"stage": 4}}"#, "ds.json: zero_optimization.stage: there is no ZeRO stage 4"),
        (r#"{"train_batch_size": 32, "train_batch_size": 64}"#, "the key \"train_batch_size\" occurs twice"),
        (r#"[1, 2]"#, "it must be one section"),
        (r#"{"a": "#, "this is not DeepSpeed's JSON"),
        (r#"{"hybrid_engine": {"enabled": "maybe"}}"#, "hybrid_engine.enabled"),
    ] {
        let said = apply(json, &[]).expect_err(json);
        assert!(said.contains("ds.json") && said.contains(expected), "{json}: {said}");
    }
    let long = format!("{{\"a\": \"{}\"}}", "x".repeat(1 << 20));
    assert!(apply(&long, &[]).unwrap_err().contains("longer than"));
    assert!(apply(&"[".repeat(100_000), &[]).is_err());
}
