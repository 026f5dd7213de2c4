//! Checkpoints as a person meets them: a run that is stopped, killed or out of disk, and the commands that look at what it left.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use shardwise_harness::ranks_of;
use support::{Folder, good, said, shardwise, watched_closely};

const RECIPE: &str = r#"
[model.llama]
vocabulary = 61
width = 36
blocks = 3
heads = 6
kv_heads = 3
mlp_width = 53

[data]
seed = 7

[batch]
sequences = 2
positions = 16

[optimizer]
rate = 1e-2

[run]
steps = 12

[checkpoints]
folder = "saved"
every_steps = 4
"#;

impl Folder {
    fn training(&self, ranks: usize) -> Command {
        self.command("train", &["-n", &ranks.to_string()])
    }

    fn train(&self, ranks: usize) -> String {
        good(&self.training(ranks).output().unwrap())
    }

    fn rewrite(&self, from: &str, to: &str) {
        let text = std::fs::read_to_string(self.path("recipe.toml")).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(self.path("recipe.toml"), text.replace(from, to)).unwrap();
    }

    fn checkpoint(&self, arguments: &[&str]) -> Output {
        shardwise().current_dir(self.0.path()).arg("checkpoint").args(arguments).output().unwrap()
    }
}

/// The steps' losses, by step.
fn losses(text: &str) -> Vec<(u64, String)> {
    let parse = |line: &str| {
        let mut words = line.split_whitespace();
        let step = words.nth(1)?.split('/').next()?.parse().ok()?;
        words.next().filter(|word| *word == "loss")?;
        Some((step, words.next()?.to_string()))
    };
    text.lines().filter(|line| line.starts_with("step ")).filter_map(parse).collect()
}

#[test]
fn a_run_that_was_ended_goes_on_as_if_it_had_not_been() {
    let whole = Folder::new(&RECIPE.replace("every_steps = 4", "every_steps = 8"));
    let expected = losses(&whole.train(2));
    assert_eq!(expected.len(), 12);

    let folder = Folder::new(&RECIPE.replace("steps = 12", "steps = 8"));
    let text = folder.train(2);
    assert_eq!(losses(&text), expected[..8]);
    assert_eq!(text.matches("saved ").count(), 2, "{text}");
    folder.rewrite("\nsteps = 8", "\nsteps = 12");
    let text = folder.train(2);
    assert!(text.contains("goes on after step 8"), "{text}");
    assert_eq!(losses(&text), expected[8..]);

    // The same to the last bit, with all of the optimizer's numbers.
    let other = whole.path("saved");
    let same = folder.checkpoint(&["diff", "saved", "12", "12", "--other", other.to_str().unwrap()]);
    assert!(good(&same).contains("the same to the last bit"), "{}", said(&same));
    // Where a run goes on, what is saved in the background is not touched by the next update.
    let beside = folder.checkpoint(&["diff", "saved", "8", "8", "--other", other.to_str().unwrap()]);
    assert!(good(&beside).contains("the same to the last bit"), "{}", said(&beside));
    let differs = folder.checkpoint(&["diff", "saved", "8", "12"]);
    assert_eq!(differs.status.code(), Some(1));
    assert!(said(&differs).contains("lm_head.weight/first_moment: "), "{}", said(&differs));

    // Another number of ranks needs as many sequences a step.
    folder.rewrite("\nsteps = 12", "\nsteps = 16");
    let refused = folder.training(1).output().unwrap();
    assert!(!refused.status.success());
    assert!(
        said(&refused).contains("4 sequences a step") && said(&refused).contains("another place"),
        "{}",
        said(&refused)
    );
    folder.rewrite("sequences = 2", "sequences = 4");
    let text = folder.train(1);
    assert_eq!(losses(&text).first().unwrap().0, 13, "{text}");

    // Three are kept, and what is pruned is gone.
    let listed = good(&folder.checkpoint(&["ls", "saved"]));
    let steps: Vec<&str> = listed.lines().map(|line| line.split_whitespace().nth(1).unwrap()).collect();
    assert_eq!(steps, ["16", "12", "8"], "{listed}");
    assert!(good(&folder.checkpoint(&["verify", "saved"])).contains("step 8: whole"));
    good(&folder.checkpoint(&["prune", "saved", "--keep-last", "1", "--keep-every", "8"]));
    assert_eq!(good(&folder.checkpoint(&["ls", "saved"])).lines().count(), 2);

    // A second export does not write over the first unless it is told to.
    good(&folder.checkpoint(&["export", "saved", "exported"]));
    let first = std::fs::read(folder.path("exported/model.safetensors")).unwrap();
    let again = folder.checkpoint(&["export", "saved", "exported", "--step", "8"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(said(&again).contains("exported/config.json is there already"), "{}", said(&again));
    assert!(said(&again).contains("--force"), "{}", said(&again));
    assert!(std::fs::read(folder.path("exported/model.safetensors")).unwrap() == first);
    good(&folder.checkpoint(&["export", "saved", "exported", "--step", "8", "--force"]));
    assert!(std::fs::read(folder.path("exported/model.safetensors")).unwrap() != first);
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_it_used() {
    let folder = Folder::new(&RECIPE.replace("steps = 12", "steps = 8"));
    folder.train(2);
    let newest = folder.path("saved/step-00000008");
    let file = std::fs::read_dir(&newest).unwrap().map(|entry| entry.unwrap().path());
    let file = file.into_iter().find(|file| file.extension().is_some_and(|ending| ending == "safetensors")).unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let verified = folder.checkpoint(&["verify", "saved"]);
    assert_eq!(verified.status.code(), Some(1));
    assert!(
        said(&verified).contains("step 8: damaged") && said(&verified).contains("step 4: whole"),
        "{}",
        said(&verified)
    );
    let text = folder.train(2);
    assert!(text.contains("the checkpoint of step 8 is damaged and not used"), "{text}");
    assert!(text.contains("goes on after step 4"), "{text}");
    // Where none is left, nothing begins anew by itself.
    for step in [4, 8] {
        std::fs::write(folder.path(&format!("saved/step-0000000{step}/manifest.json")), "{}").unwrap();
    }
    let refused = folder.training(2).output().unwrap();
    assert!(!refused.status.success());
    assert!(said(&refused).contains("none of the 2 checkpoints"), "{}", said(&refused));
}

#[test]
fn damaged_checkpoints_are_not_counted_among_the_last() {
    let folder = Folder::new(&RECIPE.replace("every_steps = 4", "every_steps = 4\nbackground = false"));
    folder.train(2);
    for step in [8, 12] {
        truncate_a_file(&folder.path(&format!("saved/step-{step:08}")));
    }
    folder.rewrite("every_steps = 4", "every_steps = 6\nkeep_last = 2");
    folder.rewrite("\nsteps = 12", "\nsteps = 6");
    let text = folder.train(2);
    assert!(text.contains("goes on after step 4"), "{text}");
    let verified = said(&folder.checkpoint(&["verify", "saved"]));
    assert!(verified.contains("step 6: whole") && verified.contains("step 4: whole"), "{verified}");
}

#[test]
fn eval_and_generate_use_the_checkpoint_before_a_damaged_one() {
    let recipe = RECIPE.replace("seed = 7", "seed = 7\ncorpus = \"tokens.bin\"\ntoken_bytes = 2");
    let folder = Folder::new(&recipe.replace("steps = 12", "steps = 8"));
    let tokens: Vec<u8> = (0..400u32).flat_map(|place| ((place * place % 61) as u16).to_le_bytes()).collect();
    std::fs::write(folder.path("tokens.bin"), tokens).unwrap();
    let words: serde_json::Map<String, Value> = (0..61).map(|word| (format!("w{word}"), json!(word))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": { "type": "Whitespace" },
        "post_processor": null,
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": words, "unk_token": "w0" },
    });
    std::fs::write(folder.path("tokenizer.json"), tokenizer.to_string()).unwrap();
    folder.train(2);
    truncate_a_file(&folder.path("saved/step-00000008"));

    let damaged = "the checkpoint of step 8 is damaged and not used: ";
    let text = good(&folder.command("eval", &["-n", "2", "--corpus", "tokens.bin"]).output().unwrap());
    assert!(text.contains(damaged) && text.contains("step-00000004\n") && text.contains("perplexity"), "{text}");
    let arguments =
        ["--set", "data.tokenizer=tokenizer.json", "--tokens", "2", "--temperature", "0", "--prompt", "w3 w5"];
    let output = folder.command("generate", &arguments).output().unwrap();
    assert!(good(&output).contains(damaged), "{}", said(&output));
    assert!(output.stdout.starts_with(b"w3 w5"), "notes are not among the text: {}", said(&output));
}

/// Cuts off the end of one of a checkpoint's files.
fn truncate_a_file(checkpoint: &Path) {
    let mut files = std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap().path());
    let file = files.find(|file| file.extension().is_some_and(|ending| ending == "safetensors")).unwrap();
    let len = std::fs::metadata(&file).unwrap().len();
    std::fs::File::options().write(true).open(file).unwrap().set_len(len / 2).unwrap();
}

#[test]
fn a_save_in_the_background_writes_what_a_blocking_one_does_whatever_the_buffer() {
    let cases: [(&str, &[&str]); 2] = [
        // Parameters are lent to the network in every pass, or are overwritten in place.
        ("stage = 3", &["buffer = 0", "background = true"]),
        ("stage = 2", &["buffer = 20_000"]),
    ];
    for (settings, hows) in cases {
        let run = |how: &str| {
            let folder = Folder::new(&format!("{RECIPE}keep_last = 9\n{how}\n[sharding]\n{settings}\n"));
            folder.train(2);
            folder
        };
        let blocking = run("background = false");
        let other = blocking.path("saved");
        for how in hows {
            let folder = run(how);
            // That of step 8 may be left out, where the one before it is still under way.
            for step in ["4", "12"] {
                let same = folder.checkpoint(&["diff", "saved", step, step, "--other", other.to_str().unwrap()]);
                assert!(said(&same).contains("the same to the last bit"), "{settings}, {how}: {}", said(&same));
            }
        }
    }
}

/// A run whose lines can be waited for.
struct Running {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    recipe: PathBuf,
}

impl Running {
    fn new(folder: &Folder) -> Self {
        let mut command = folder.training(2);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Running { child, lines, recipe: folder.path("recipe.toml") }
    }

    /// Reads until a line has this in it.
    fn until(&mut self, part: &str) -> String {
        let mut text = String::new();
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            text.push_str(&line);
            text.push('\n');
            if line.contains(part) {
                return text;
            }
        }
        panic!("no '{part}' in:\n{text}");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Who would start ranks again goes first.
        drop(self.child.kill());
        drop(self.child.wait());
        signal("KILL", &ranks_of(&self.recipe));
        // The launcher goes when its ranks have gone, and with it the other end of the pipe.
        self.lines.by_ref().for_each(drop);
    }
}

fn signal(name: &str, processes: &[u32]) {
    drop(Command::new("kill").arg(format!("-{name}")).args(processes.iter().map(u32::to_string)).status());
}

#[test]
fn signals_save_and_end_a_run() {
    let folder =
        Folder::new(&RECIPE.replace("steps = 12", "steps = 100000").replace("every_steps = 4", "keep_last = 9"));
    let mut running = Running::new(&folder);
    running.until("step      3/");
    let ranks = ranks_of(&running.recipe);
    assert_eq!(ranks.len(), 2);
    signal("USR2", &ranks[1..]);
    running.until("saved ");
    running.until("step ");
    signal("USR1", &ranks[..1]);
    let text = running.until("as it was asked to");
    assert!(text.contains("saved "), "{text}");
    assert_eq!(running.child.wait().unwrap().code(), Some(75), "resume me");
    let steps = good(&folder.checkpoint(&["verify", "saved"]));
    assert_eq!(steps.matches(": whole").count(), 2, "{steps}");
}

#[test]
fn a_disk_that_is_full_stops_no_run() {
    let folder =
        Folder::new(&RECIPE.replace("steps = 12", "steps = 100000").replace("every_steps = 4", "every_steps = 2000"));
    let saved = folder.path("saved");
    std::fs::create_dir(&saved).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "none"]).arg(&saved).status().unwrap();
    assert!(mounted.success(), "this test mounts a small disk, for which it has to be root");
    struct Unmount(PathBuf);
    impl Drop for Unmount {
        fn drop(&mut self) {
            drop(Command::new("umount").arg("-l").arg(&self.0).status());
        }
    }
    let _unmount = Unmount(saved.clone());
    let mut running = Running::new(&folder);
    let ranks = || ranks_of(&folder.path("recipe.toml"));
    running.until("step      1/");
    signal("USR2", &ranks()[..1]);
    running.until("saved ");
    // Something else takes the room.
    drop(std::fs::write(saved.join("else"), vec![0u8; 4 << 20]));
    signal("USR2", &ranks()[..1]);
    let text = running.until("could not be saved, and will be tried again");
    assert!(text.contains("No space left"), "{text}");
    running.until("step ");
    std::fs::remove_file(saved.join("else")).unwrap();
    running.until("saved ");
    signal("USR1", &ranks()[..1]);
    running.until("as it was asked to");
    let verified = good(&folder.checkpoint(&["verify", "saved"]));
    assert_eq!(verified.matches(": whole").count(), 3, "{verified}");
}

#[test]
fn a_copy_that_fails_on_one_rank_stops_no_run() {
    let recipe = RECIPE.replace("every_steps = 4", "every_steps = 4\nbackground = false");
    let folder = Folder::new(&format!("{recipe}[supervision]\n{}", watched_closely().1));
    let mut training = folder.training(2);
    let text = good(&training.args(["--fault", "fail-copy rank=1 step=4 phase=save"]).output().unwrap());
    let why = "step-00000004 could not be saved, and the next step will be saved instead: rank 1: unit embedding: ";
    assert!(text.contains(why) && !text.contains("Starting again"), "{text}");
    assert_eq!(losses(&text).len(), 12, "{text}");
    let verified = good(&folder.checkpoint(&["verify", "saved"]));
    for step in [12, 8, 5] {
        assert!(verified.contains(&format!("step {step}: whole")), "{verified}");
    }
}

/// Kills while saving; the claim `checkpoints/killed` does it 500 times.
#[test]
fn a_run_that_is_killed_while_it_saves_goes_on_from_a_whole_checkpoint() {
    let recipe = RECIPE
        .replace("steps = 12", "steps = 100000")
        .replace("every_steps = 4", "every_steps = 1\nbackground = false");
    let folder = Folder::new(&recipe);
    let mut newest = 0;
    for round in 0..8u64 {
        let mut running = Running::new(&folder);
        let text = running.until("saved ");
        if round > 0 {
            let went_on: u64 =
                text.split("goes on after step ").nth(1).and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap();
            assert!(went_on >= newest, "{went_on} after {newest} had been saved");
            assert!(!text.contains("damaged"), "{text}");
        }
        std::thread::sleep(Duration::from_millis(37 * round % 200));
        let ranks = ranks_of(&running.recipe);
        signal("KILL", if round % 2 == 0 { &ranks[..1] } else { &ranks });
        drop(running);
        while !ranks_of(&folder.path("recipe.toml")).is_empty() {
            std::thread::sleep(Duration::from_millis(20));
        }
        let verified = good(&folder.checkpoint(&["verify", "saved"]));
        newest = verified.split("step ").nth(1).and_then(|rest| rest.split(':').next()?.parse().ok()).unwrap();
    }
    assert!(newest >= 8, "{newest}");
}
