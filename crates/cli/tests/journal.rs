//! What a run leaves behind: its journal, which TensorBoard reads too, beside checkpoints that are none the worse for it.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Output;

use shardwise_harness::tensorboard;
use shardwise_journal::{METRICS, Run, Story, What};
use support::{good, shardwise};

const RECIPE: &str = r#"
[model.llama]
vocabulary = 61
width = 36
blocks = 2
heads = 6
mlp_width = 53

[data]
corpus = "tokens.bin"
token_bytes = 2

[evaluation]
corpus = "tokens.bin"
every_steps = 4
windows = 4

[batch]
sequences = 1
positions = 16

[optimizer]
rate = 1e-2

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

/// Every scalar of the journal by the name that TensorBoard has for it, with its steps as they were made last.
fn scalars(run: &Run) -> BTreeMap<String, Vec<(u64, f64)>> {
    let mut all: Vec<(String, u64, f64)> = Vec::new();
    for entry in run.entries() {
        // The journal's own names are those of a step's scalars.
        let text = serde_json::to_value(entry).unwrap();
        let step = text["step"].as_u64().unwrap_or_default();
        match &entry.what {
            What::Start(start) => all.retain(|(_, step, _)| *step < start.first_step),
            What::Step(_) => {
                let own =
                    text.as_object().unwrap().iter().filter(|(name, _)| !["time_s", "step"].contains(&name.as_str()));
                all.extend(own.filter_map(|(name, value)| Some((name.clone(), step, value.as_f64()?))));
            }
            What::Memory { ranks, .. } => {
                for kind in 0..ranks[0].kinds().len() {
                    let (name, bytes) = ranks.iter().map(|rank| rank.kinds()[kind]).max_by_key(|kind| kind.1).unwrap();
                    all.push((format!("memory/{}", name.replace(' ', "_")), step, bytes as f64));
                }
            }
            What::Traffic(traffic) => {
                for verb in &traffic.verbs {
                    let name = format!("traffic/{}", verb.verb);
                    all.push((format!("{name}/theory"), step, verb.theory_bytes as f64 / traffic.steps as f64));
                    all.push((name, step, verb.bytes as f64 / traffic.steps as f64));
                }
            }
            What::HeldOut(held_out) => all.push(("held_out/loss".to_string(), step, held_out.loss)),
            What::Saved(saved) => all.extend([
                ("saved/took_s".to_string(), step, saved.took_s),
                ("saved/stood_still_s".to_string(), step, saved.stood_still_s),
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
    assert!(text.contains("/saved; `shardwise watch ") && text.contains("% of peak"), "{text}");

    let run = Run::open(folder.join("saved")).unwrap();
    let firsts: Vec<u64> = run.starts().iter().map(|(_, start)| start.first_step).collect();
    assert_eq!(firsts, [1, 5], "{text}");
    assert!(run.starts()[1].1.resumed_from.as_ref().unwrap().ends_with("saved/step-00000004"), "{text}");
    let made = run.entries().iter().filter(|entry| matches!(entry.what, What::Step(_))).count();
    assert!(made > 10 && run.steps().iter().map(|(_, step)| step.step).eq(1..=10), "some are made again");

    let ours = scalars(&run);
    assert!(ours.contains_key("held_out/loss") && ours.contains_key("traffic/reduce-scatter/theory"), "{ours:?}");
    let theirs = tensorboard("scalars.py", &[&folder.join("saved")]).unwrap();
    let theirs: BTreeMap<String, Vec<(u64, String)>> = serde_json::from_str(theirs.trim()).unwrap();
    assert_eq!(theirs.keys().collect::<Vec<_>>(), ours.keys().collect::<Vec<_>>());
    for (name, ours) in &ours {
        // It keeps 32 bits.
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
    assert!(again.contains("goes on after step 10"), "{again}");
}

#[test]
fn a_run_has_a_folder_of_its_own_name_where_it_saves_nothing_or_elsewhere() {
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
fn a_command_that_finds_nothing_left_to_do_is_no_part_of_the_story() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("recipe.toml"), RECIPE.replace("steps = 10", "steps = 4")).unwrap();
    std::fs::write(folder.join("tokens.bin"), [1u8, 0].repeat(200)).unwrap();
    let entries = || Run::open(folder.join("saved")).unwrap().entries().to_vec();
    good(&in_folder(folder, &["train", "recipe.toml", "-n", "1"]));
    let before = entries();
    let story = Story::of(&before);

    let text = good(&in_folder(folder, &["train", "recipe.toml", "-n", "1"]));
    assert!(text.contains("there is nothing left to do: run.steps is 4"), "{text}");
    assert_eq!(entries(), before, "{text}");
    assert_eq!((story.attempts().len(), Story::of(&entries()).time_s()), (1, story.time_s()));

    // What goes on with the run is.
    good(&in_folder(folder, &["train", "recipe.toml", "-n", "1", "--set", "run.steps=6"]));
    let longer = Story::of(&entries());
    assert_eq!(longer.attempts().len(), 2);
    assert!(longer.attempts()[1].launch.is_some() && longer.attempts()[1].steps == Some((5, 6)));
    assert!(longer.time_s() > story.time_s());
}
