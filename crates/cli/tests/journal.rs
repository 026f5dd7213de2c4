//! The journal of a run: TensorBoard can read it, and it does not disturb the checkpoints next to it.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Output;

use shardwise_harness::run_with_tensorboard;
use shardwise_journal::{EntryKind, METRICS, Run, Timeline};
use support::{good, shardwise};

const RECIPE: &str = r#"
[model.llama]
vocab_size = 61
hidden_size = 36
num_hidden_layers = 2
num_attention_heads = 6
intermediate_size = 53

[data]
corpus = "tokens.bin"
token_bytes = 2

[evaluation]
corpus = "tokens.bin"
every_steps = 4
max_sequences = 4

[batch]
micro_batch_size = 1
seq_len = 16

[optimizer]
lr = 1e-2

[run]
steps = 10

[checkpoints]
folder = "saved"
every_steps = 4
keep_last = 1
background = false
"#;

fn in_folder(folder: &Path, arguments: &[&str]) -> Output {
    shardwise().args(arguments).current_dir(folder).output().unwrap()
}

/// All scalars of the journal by their TensorBoard tags. A repeated step counts once, with its latest figures.
fn scalars(run: &Run) -> BTreeMap<String, Vec<(u64, f64)>> {
    let mut all: Vec<(String, u64, f64)> = Vec::new();
    for entry in run.entries() {
        // The tags of a step's scalars are the names of the journal's fields.
        let text = serde_json::to_value(entry).unwrap();
        let step = text["step"].as_u64().unwrap_or_default();
        match &entry.kind {
            EntryKind::Start(start) => all.retain(|(_, step, _)| *step < start.first_step),
            EntryKind::Step(_) => {
                let own =
                    text.as_object().unwrap().iter().filter(|(name, _)| !["time_s", "step"].contains(&name.as_str()));
                all.extend(own.filter_map(|(name, value)| Some((name.clone(), step, value.as_f64()?))));
            }
            EntryKind::Memory { ranks, .. } => {
                for kind in 0..ranks[0].kinds().len() {
                    let (name, bytes) = ranks.iter().map(|rank| rank.kinds()[kind]).max_by_key(|kind| kind.1).unwrap();
                    all.push((format!("memory/{}", name.replace(' ', "_")), step, bytes as f64));
                }
            }
            EntryKind::Traffic(traffic) => {
                for verb in &traffic.verbs {
                    let name = format!("traffic/{}", verb.verb);
                    all.push((format!("{name}/expected"), step, verb.expected_bytes as f64 / traffic.steps as f64));
                    all.push((name, step, verb.bytes as f64 / traffic.steps as f64));
                }
            }
            EntryKind::Evaluation(evaluation) => all.push(("evaluation/loss".to_string(), step, evaluation.loss)),
            EntryKind::Saved(saved) => all.extend([
                ("saved/took_s".to_string(), step, saved.took_s),
                ("saved/stalled_s".to_string(), step, saved.stalled_s),
            ]),
            _ => (),
        }
    }
    let mut scalars: BTreeMap<String, Vec<(u64, f64)>> = BTreeMap::new();
    for (name, step, scalar) in all {
        scalars.entry(name).or_default().push((step, scalar));
    }
    scalars
}

#[test]
fn tensorboard_reads_every_scalar_of_a_run_that_was_killed_and_checkpoints_are_undisturbed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("recipe.toml"), RECIPE).unwrap();
    let tokens: Vec<u8> = (0..2000u32).flat_map(|place| ((place * place % 61) as u16).to_le_bytes()).collect();
    std::fs::write(folder.join("tokens.bin"), tokens).unwrap();
    let text = good(&in_folder(folder, &["train", "recipe.toml", "-n", "2", "--fault", "kill rank=1 step=7"]));
    assert!(text.contains("/saved; `shardwise watch ") && text.contains("% MFU"), "{text}");

    let run = Run::open(folder.join("saved")).unwrap();
    let firsts: Vec<u64> = run.starts().iter().map(|(_, start)| start.first_step).collect();
    assert_eq!(firsts, [1, 5], "{text}");
    assert!(run.starts()[1].1.resumed_from.as_ref().unwrap().ends_with("saved/step-00000004"), "{text}");
    let completed = run.entries().iter().filter(|entry| matches!(entry.kind, EntryKind::Step(_))).count();
    assert!(completed > 10 && run.steps().iter().map(|(_, step)| step.step).eq(1..=10), "some are repeated");

    let ours = scalars(&run);
    assert!(ours.contains_key("evaluation/loss") && ours.contains_key("traffic/reduce-scatter/expected"), "{ours:?}");
    let theirs = run_with_tensorboard("scalars.py", &[&folder.join("saved")]).unwrap();
    let theirs: BTreeMap<String, Vec<(u64, String)>> = serde_json::from_str(theirs.trim()).unwrap();
    assert_eq!(theirs.keys().collect::<Vec<_>>(), ours.keys().collect::<Vec<_>>());
    for (name, ours) in &ours {
        // TensorBoard keeps 32 bits.
        let ours: Vec<(u64, f32)> = ours.iter().map(|(step, scalar)| (*step, *scalar as f32)).collect();
        let theirs: Vec<(u64, f32)> =
            theirs[name].iter().map(|(step, scalar)| (*step, scalar.parse::<f64>().unwrap() as f32)).collect();
        assert_eq!(theirs, ours, "{name}");
    }

    let listed = good(&in_folder(folder, &["checkpoint", "ls", "saved"]));
    assert!(listed.lines().count() == 1 && listed.starts_with("step        10 "), "{listed}");
    good(&in_folder(folder, &["checkpoint", "verify", "saved"]));
    good(&in_folder(folder, &["checkpoint", "prune", "saved", "--keep-last", "1"]));
    assert!(folder.join("saved").join(METRICS).exists() && !folder.join("saved/step-00000008").exists());
    let again = good(&in_folder(folder, &["train", "recipe.toml", "-n", "2", "--set", "run.steps=11"]));
    assert!(again.contains("resuming after step 10"), "{again}");
}

#[test]
fn the_default_folder_is_that_of_the_checkpoints_or_named_after_the_recipe() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (without, _) = RECIPE.split_once("[checkpoints]").unwrap();
    std::fs::write(folder.join("verses.toml"), without).unwrap();
    std::fs::write(folder.join("saves.toml"), RECIPE).unwrap();
    for (arguments, expected) in [
        (&["config", "verses.toml"][..], "runs/verses"),
        (&["config", "saves.toml"], "saved"),
        (&["config", "saves.toml", "--set", "checkpoints.folder=s3://bucket/x"], "runs/saves"),
        (&["config", "saves.toml", "--set", "run.folder=there"], "there"),
    ] {
        let text = good(&in_folder(folder, arguments));
        let (_, run) = text.split_once("[run]").unwrap();
        let line = run.lines().find(|line| line.starts_with("folder = ")).unwrap();
        let expected = format!("folder = \"{}\"", folder.join(expected).display());
        assert!(line.starts_with(&expected), "{line}, and not {expected}");
    }
}

#[test]
fn a_command_that_finds_nothing_left_to_do_is_not_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("recipe.toml"), RECIPE.replace("steps = 10", "steps = 4")).unwrap();
    std::fs::write(folder.join("tokens.bin"), [1u8, 0].repeat(200)).unwrap();
    let entries = || Run::open(folder.join("saved")).unwrap().entries().to_vec();
    good(&in_folder(folder, &["train", "recipe.toml", "-n", "1"]));
    let before = entries();
    let timeline = Timeline::from_entries(&before);

    let text = good(&in_folder(folder, &["train", "recipe.toml", "-n", "1"]));
    assert!(text.contains("there is nothing left to do: run.steps is 4"), "{text}");
    assert_eq!(entries(), before, "{text}");
    assert_eq!((timeline.attempts().len(), Timeline::from_entries(&entries()).time_s()), (1, timeline.time_s()));

    // A command that continues the run is recorded.
    good(&in_folder(folder, &["train", "recipe.toml", "-n", "1", "--set", "run.steps=6"]));
    let longer = Timeline::from_entries(&entries());
    assert_eq!(longer.attempts().len(), 2);
    assert!(longer.attempts()[1].launch.is_some() && longer.attempts()[1].steps == Some((5, 6)));
    assert!(longer.time_s() > timeline.time_s());
}
