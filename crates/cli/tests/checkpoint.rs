//! Checkpoints as a user sees them: runs that are stopped, killed or out of disk space, and the `shardwise checkpoint` commands.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use shardwise_harness::rank_pids;
use support::{Folder, good, said, shardwise, short_timeouts};

const RECIPE: &str = r#"
[model.llama]
vocab_size = 61
hidden_size = 36
num_hidden_layers = 3
num_attention_heads = 6
num_key_value_heads = 3
intermediate_size = 53

[data]
seed = 7

[batch]
micro_batch_size = 2
seq_len = 16

[optimizer]
lr = 1e-2

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
fn a_run_that_was_stopped_resumes_bit_for_bit() {
    let whole = Folder::new(&RECIPE.replace("every_steps = 4", "every_steps = 8"));
    let expected = losses(&whole.train(2));
    assert_eq!(expected.len(), 12);

    let folder = Folder::new(&RECIPE.replace("steps = 12", "steps = 8"));
    let text = folder.train(2);
    assert_eq!(losses(&text), expected[..8]);
    assert_eq!(text.matches("saved ").count(), 2, "{text}");
    folder.rewrite("\nsteps = 8", "\nsteps = 12");
    let text = folder.train(2);
    assert!(text.contains("resuming after step 8"), "{text}");
    assert_eq!(losses(&text), expected[8..]);

    // Bitwise identical, including the optimizer state.
    let other = whole.path("saved");
    let same = folder.checkpoint(&["diff", "saved", "12", "12", "--other", other.to_str().unwrap()]);
    assert!(good(&same).contains("the same to the last bit"), "{}", said(&same));
    // In a run that resumes, the next update does not touch what is being saved in the background.
    let saved_in_background = folder.checkpoint(&["diff", "saved", "8", "8", "--other", other.to_str().unwrap()]);
    assert!(good(&saved_in_background).contains("the same to the last bit"), "{}", said(&saved_in_background));
    let differs = folder.checkpoint(&["diff", "saved", "8", "12"]);
    assert_eq!(differs.status.code(), Some(1));
    assert!(said(&differs).contains("lm_head.weight/first_moment: "), "{}", said(&differs));

    // Another number of ranks needs the same number of sequences per step.
    folder.rewrite("\nsteps = 12", "\nsteps = 16");
    let refused = folder.training(1).output().unwrap();
    assert!(!refused.status.success());
    assert!(
        said(&refused).contains("4 sequences per step") && said(&refused).contains("another checkpoints.folder"),
        "{}",
        said(&refused)
    );
    folder.rewrite("micro_batch_size = 2", "micro_batch_size = 4");
    let text = folder.train(1);
    assert_eq!(losses(&text).first().unwrap().0, 13, "{text}");

    // Three are kept, and pruned ones are gone.
    let listed = good(&folder.checkpoint(&["ls", "saved"]));
    let steps: Vec<&str> = listed.lines().map(|line| line.split_whitespace().nth(1).unwrap()).collect();
    assert_eq!(steps, ["16", "12", "8"], "{listed}");
    assert!(good(&folder.checkpoint(&["verify", "saved"])).contains("step 8: intact"));
    good(&folder.checkpoint(&["prune", "saved", "--keep-last", "1", "--keep-every", "8"]));
    assert_eq!(good(&folder.checkpoint(&["ls", "saved"])).lines().count(), 2);

    // A second export does not overwrite the first without --force.
    good(&folder.checkpoint(&["export", "saved", "exported"]));
    let first = std::fs::read(folder.path("exported/model.safetensors")).unwrap();
    let again = folder.checkpoint(&["export", "saved", "exported", "--step", "8"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(said(&again).contains("exported/config.json already exists"), "{}", said(&again));
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
        said(&verified).contains("step 8: damaged") && said(&verified).contains("step 4: intact"),
        "{}",
        said(&verified)
    );
    let text = folder.train(2);
    assert!(text.contains("the checkpoint of step 8 is damaged and not used"), "{text}");
    assert!(text.contains("resuming after step 4"), "{text}");
    // If none is left, the run does not silently start over.
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
    assert!(text.contains("resuming after step 4"), "{text}");
    let verified = said(&folder.checkpoint(&["verify", "saved"]));
    assert!(verified.contains("step 6: intact") && verified.contains("step 4: intact"), "{verified}");
}

#[test]
fn eval_and_generate_use_the_checkpoint_before_a_damaged_one() {
    let recipe = RECIPE.replace("seed = 7", "seed = 7\ncorpus = \"tokens.bin\"\ntoken_bytes = 2");
    let folder = Folder::new(&recipe.replace("steps = 12", "steps = 8"));
    folder.write_tokens_and_tokenizer();
    folder.train(2);
    truncate_a_file(&folder.path("saved/step-00000008"));

    let damaged = "the checkpoint of step 8 is damaged and not used: ";
    let text = good(&folder.command("eval", &["-n", "2", "--corpus", "tokens.bin"]).output().unwrap());
    assert!(text.contains(damaged) && text.contains("step-00000004\n") && text.contains("perplexity"), "{text}");
    let arguments =
        ["--set", "data.tokenizer=tokenizer.json", "--tokens", "2", "--temperature", "0", "--prompt", "w3 w5"];
    let output = folder.command("generate", &arguments).output().unwrap();
    assert!(good(&output).contains(damaged), "{}", said(&output));
    assert!(output.stdout.starts_with(b"w3 w5"), "notes are not mixed into the text: {}", said(&output));
}

/// Truncates one file of a checkpoint.
fn truncate_a_file(checkpoint: &Path) {
    let mut files = std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap().path());
    let file = files.find(|file| file.extension().is_some_and(|ending| ending == "safetensors")).unwrap();
    let len = std::fs::metadata(&file).unwrap().len();
    std::fs::File::options().write(true).open(file).unwrap().set_len(len / 2).unwrap();
}

#[test]
fn a_save_in_the_background_writes_what_a_blocking_one_does_whatever_the_buffer() {
    let cases: [(&str, &[&str]); 2] = [
        // At stage 3 parameters are lent to the network in every pass; at stage 2 the update overwrites them, or leaves them to the save.
        ("stage = 3", &["buffer_bytes = 0", "background = true"]),
        ("stage = 2", &["buffer_bytes = 20_000", "background = true"]),
    ];
    for (settings, hows) in cases {
        let run = |how: &str| {
            let folder = Folder::new(&format!("{RECIPE}keep_last = 9\n{how}\n[zero]\n{settings}\n"));
            folder.train(2);
            folder
        };
        let blocking = run("background = false");
        let other = blocking.path("saved");
        for how in hows {
            let folder = run(how);
            // Step 8 may be missing, if the save of step 4 is still running.
            for step in ["4", "12"] {
                let same = folder.checkpoint(&["diff", "saved", step, step, "--other", other.to_str().unwrap()]);
                assert!(said(&same).contains("the same to the last bit"), "{settings}, {how}: {}", said(&same));
            }
        }
    }
}

/// A running `shardwise train` whose output can be waited for.
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

    /// Reads until a line contains `part`.
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
        // The supervisor first, since it would restart the ranks.
        drop(self.child.kill());
        drop(self.child.wait());
        signal("KILL", &rank_pids(&self.recipe));
        // The launcher exits after its ranks, and closes the pipe.
        self.lines.by_ref().for_each(drop);
    }
}

fn signal(name: &str, processes: &[u32]) {
    drop(Command::new("kill").arg(format!("-{name}")).args(processes.iter().map(u32::to_string)).status());
}

#[test]
fn signals_save_and_stop_a_run() {
    let folder =
        Folder::new(&RECIPE.replace("steps = 12", "steps = 100000").replace("every_steps = 4", "keep_last = 9"));
    let mut running = Running::new(&folder);
    running.until("step      3/");
    let ranks = rank_pids(&running.recipe);
    assert_eq!(ranks.len(), 2);
    signal("USR2", &ranks[1..]);
    running.until("saved ");
    running.until("step ");
    signal("USR1", &ranks[..1]);
    let text = running.until("as requested");
    assert!(text.contains("saved "), "{text}");
    assert_eq!(running.child.wait().unwrap().code(), Some(75), "resume me");
    let steps = good(&folder.checkpoint(&["verify", "saved"]));
    assert_eq!(steps.matches(": intact").count(), 2, "{steps}");
}

#[test]
fn a_full_disk_does_not_stop_a_run() {
    let folder =
        Folder::new(&RECIPE.replace("steps = 12", "steps = 100000").replace("every_steps = 4", "every_steps = 2000"));
    let saved = folder.path("saved");
    std::fs::create_dir(&saved).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "none"]).arg(&saved).status().unwrap();
    assert!(mounted.success(), "this test mounts a small disk and needs to be root");
    struct Unmount(PathBuf);
    impl Drop for Unmount {
        fn drop(&mut self) {
            drop(Command::new("umount").arg("-l").arg(&self.0).status());
        }
    }
    let _unmount = Unmount(saved.clone());
    let mut running = Running::new(&folder);
    let ranks = || rank_pids(&folder.path("recipe.toml"));
    running.until("step      1/");
    signal("USR2", &ranks()[..1]);
    running.until("saved ");
    // Another file fills the disk.
    drop(std::fs::write(saved.join("else"), vec![0u8; 4 << 20]));
    signal("USR2", &ranks()[..1]);
    let text = running.until("could not be saved; retrying");
    assert!(text.contains("No space left"), "{text}");
    running.until("step ");
    std::fs::remove_file(saved.join("else")).unwrap();
    running.until("saved ");
    signal("USR1", &ranks()[..1]);
    running.until("as requested");
    let verified = good(&folder.checkpoint(&["verify", "saved"]));
    assert_eq!(verified.matches(": intact").count(), 3, "{verified}");
}

#[test]
fn a_copy_that_fails_on_one_rank_stops_no_run() {
    let recipe = RECIPE.replace("every_steps = 4", "every_steps = 4\nbackground = false");
    let folder = Folder::new(&format!("{recipe}[supervision]\n{}", short_timeouts().1));
    let mut training = folder.training(2);
    let text = good(&training.args(["--fault", "fail-copy rank=1 step=4 phase=save"]).output().unwrap());
    let why = "step-00000004 could not be saved; saving the next step instead: rank 1: unit embedding: ";
    assert!(text.contains(why) && !text.contains("Restarting"), "{text}");
    assert_eq!(losses(&text).len(), 12, "{text}");
    let verified = good(&folder.checkpoint(&["verify", "saved"]));
    for step in [12, 8, 5] {
        assert!(verified.contains(&format!("step {step}: intact")), "{verified}");
    }
}

/// Kills while saving; the claim `checkpoints/killed` does it 500 times.
#[test]
fn a_run_killed_while_saving_resumes_from_an_intact_checkpoint() {
    let recipe = RECIPE
        .replace("steps = 12", "steps = 100000")
        .replace("every_steps = 4", "every_steps = 1\nbackground = false");
    let folder = Folder::new(&recipe);
    let mut newest = 0;
    for round in 0..8u64 {
        let mut running = Running::new(&folder);
        let text = running.until("saved ");
        if round > 0 {
            let resumed: u64 = text
                .split("resuming after step ")
                .nth(1)
                .and_then(|rest| rest.split(',').next()?.parse().ok())
                .unwrap();
            assert!(resumed >= newest, "resumed after step {resumed}, but step {newest} had been saved");
            assert!(!text.contains("damaged"), "{text}");
        }
        std::thread::sleep(Duration::from_millis(37 * round % 200));
        let ranks = rank_pids(&running.recipe);
        signal("KILL", if round % 2 == 0 { &ranks[..1] } else { &ranks });
        drop(running);
        while !rank_pids(&folder.path("recipe.toml")).is_empty() {
            std::thread::sleep(Duration::from_millis(20));
        }
        let verified = good(&folder.checkpoint(&["verify", "saved"]));
        newest = verified.split("step ").nth(1).and_then(|rest| rest.split(':').next()?.parse().ok()).unwrap();
    }
    assert!(newest >= 8, "{newest}");
}

/// The memory of each step, in MiB, as it was printed.
fn memory_mib(text: &str) -> Vec<f64> {
    text.lines().filter_map(|line| line.split_once("  memory ")?.1.split_once(" MiB")?.0.parse().ok()).collect()
}

#[test]
fn a_resumed_run_does_not_grow_from_save_to_save() {
    let folder = Folder::new(&RECIPE.replace("every_steps = 4", "every_steps = 1\nbackground = false"));
    folder.rewrite("steps = 12", "steps = 2");
    folder.train(1);
    folder.rewrite("steps = 2", "steps = 12");
    let text = folder.train(1);
    let memory = memory_mib(&text);
    assert_eq!(memory.len(), 10, "{text}");
    assert!(memory[9] - memory[3] < 24., "six saves took {} MiB: {text}", memory[9] - memory[3]);
}
