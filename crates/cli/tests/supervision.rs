//! Fault injection: failures are explained, and do not change the numbers.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use shardwise_harness::{Hosts, Slurm, Stopwatch, rank_pids};
use support::{Folder, RECIPE, good, program, said, shardwise, short_timeouts, wait_until};

impl Folder {
    fn train(&self, arguments: &[&str]) -> Output {
        self.command("train", arguments).output().unwrap()
    }

    /// Asserts that the last checkpoint is bitwise identical to the other's, including the optimizer state.
    fn assert_same_checkpoint(&self, other: &Folder, step: u64) {
        let step = step.to_string();
        let mut diff = shardwise();
        diff.args(["checkpoint", "diff"]).arg(self.path("saved")).args([&step, &step, "--other"]);
        let same = good(&diff.arg(other.path("saved")).output().unwrap());
        assert!(same.contains("the same to the last bit"), "{same}");
    }
}

/// All printed losses by step. A repeated step has several.
fn losses(text: &str) -> BTreeMap<u64, Vec<String>> {
    let mut losses = BTreeMap::<u64, Vec<String>>::new();
    for line in text.lines().filter(|line| line.starts_with("step ")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.get(2) != Some(&"loss") {
            continue;
        }
        let step = words[1].split('/').next().unwrap().parse().unwrap();
        losses.entry(step).or_default().push(words[3].to_string());
    }
    losses
}

/// Asserts that all losses are those of an undisturbed run.
fn assert_same_losses(text: &str, expected: &str, tolerance: f64) {
    let (found, expected) = (losses(text), losses(expected));
    assert!(found.keys().eq(expected.keys()), "{text}");
    for (step, losses) in found {
        let whole: f64 = expected[&step][0].parse().unwrap();
        for loss in losses {
            let loss: f64 = loss.parse().unwrap();
            assert!((loss - whole).abs() <= tolerance * whole, "step {step}: {loss} and {whole}\n{text}");
        }
    }
}

fn run_undisturbed(recipe: &str, ranks: &str) -> (Folder, String) {
    let folder = Folder::new(recipe);
    let text = good(&folder.train(&["-n", ranks]));
    (folder, text)
}

/// Reads lines up to one that starts with `prefix`.
fn read_to(lines: &mut impl Iterator<Item = std::io::Result<String>>, prefix: &str) -> String {
    let mut text = String::new();
    for line in lines {
        let line = line.unwrap();
        text += &(line.clone() + "\n");
        if line.starts_with(prefix) {
            return text;
        }
    }
    panic!("no line starts with '{prefix}':\n{text}");
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn kills_in_every_phase_leave_no_trace() {
    let recipe = RECIPE.replace("every_steps = 2", "every_steps = 1") + "max_restarts = 20\n";
    let (whole, expected) = run_undisturbed(&recipe, "4");
    let folder = Folder::new(&recipe);
    let text = good(&folder.train(&["-n", "4", "--fault", "random seed=3 kills=9"]));
    assert_same_losses(&text, &expected, 0.);
    folder.assert_same_checkpoint(&whole, 24);
    assert_eq!(text.matches("Restarting on 4 ranks").count(), 9, "{text}");
    assert_eq!(text.matches(" died (signal 9").count(), 9, "{text}");
    assert!(text.contains("Restarted 9 times"), "{text}");
    assert!(rank_pids(&folder.path("recipe.toml")).is_empty(), "no rank is left behind");
}

#[test]
fn a_job_that_is_killed_resumes_with_the_same_command() {
    let (whole, expected) = run_undisturbed(RECIPE, "2");
    let folder = Folder::new(RECIPE);
    let mut text = String::new();
    for step in ["step  4", "step 11"] {
        let mut run =
            folder.command("train", &["-n", "2"]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
        text += &read_to(&mut lines, step);
        run.kill().unwrap();
        run.wait().unwrap();
        // Ranks exit when their supervisor is gone.
        wait_until("ranks outlive their supervisor", || rank_pids(&folder.path("recipe.toml")).is_empty());
    }
    text += &good(&folder.train(&["-n", "2"]));
    assert_same_losses(&text, &expected, 0.);
    folder.assert_same_checkpoint(&whole, 24);
}

/// Two stages of two ranks, which take turns with four micro-batches.
const PIPELINE: [&str; 8] = [
    "-n",
    "4",
    "--set",
    "parallel.pipeline=2",
    "--set",
    "batch.gradient_accumulation_steps=4",
    "--set",
    "parallel.pipeline_schedule=zb-h1",
];

#[test]
fn kills_of_stages_leave_no_trace() {
    let recipe = RECIPE.replace("every_steps = 2", "every_steps = 1") + "max_restarts = 20\n";
    let whole = Folder::new(&recipe);
    let expected = good(&whole.train(&PIPELINE));
    assert!(expected.contains("on 4 ranks (pipeline 2 × 1 × 2)"), "{expected}");
    let folder = Folder::new(&recipe);
    let faults = [
        "kill rank=0 step=2 phase=forward",
        "kill rank=3 step=4 phase=forward",
        "kill rank=1 step=6 phase=backward",
        "kill rank=2 step=8 phase=backward",
        "kill rank=3 step=10 phase=reduce",
        "kill rank=0 step=12 phase=optimizer",
        "kill rank=2 step=14 phase=save-inside",
    ];
    let arguments: Vec<&str> = PIPELINE.into_iter().chain(faults.iter().flat_map(|fault| ["--fault", fault])).collect();
    let text = good(&folder.train(&arguments));
    assert_same_losses(&text, &expected, 0.);
    folder.assert_same_checkpoint(&whole, 24);
    assert_eq!(text.matches(" died (signal 9").count(), faults.len(), "{text}");
}

#[test]
fn kills_of_ranks_that_offload_leave_no_trace_and_no_file() {
    let recipe = RECIPE.replace("every_steps = 2", "every_steps = 1") + "max_restarts = 20\n";
    let (whole, expected) = run_undisturbed(&recipe, "2");
    let folder =
        Folder::new(&(recipe + "[offload]\noptimizer = \"fast\"\nparameters = \"fast\"\ngradients = \"fast\"\n"));
    std::fs::create_dir(folder.path("fast")).unwrap();
    let faults = [
        "kill rank=1 step=3 phase=fetch unit=embedding",
        "kill rank=0 step=6 phase=store unit=head",
        "kill rank=1 step=9 phase=optimizer",
        "kill rank=0 step=12 phase=store unit=embedding",
    ];
    let arguments: Vec<&str> =
        ["-n", "2"].into_iter().chain(faults.iter().flat_map(|fault| ["--fault", fault])).collect();
    let text = good(&folder.train(&arguments));
    // Those of a run that has everything in memory.
    assert_same_losses(&text, &expected, 0.);
    folder.assert_same_checkpoint(&whole, 24);
    assert_eq!(text.matches(" died (signal 9").count(), faults.len(), "{text}");
    assert_eq!(std::fs::read_dir(folder.path("fast")).unwrap().count(), 0);
}

#[test]
fn kills_of_ranks_that_update_in_the_backward_pass_leave_no_trace() {
    // It saves in the background, so that updates meet saves in progress.
    let recipe =
        RECIPE.replace("every_steps = 2", "every_steps = 1").replace("background = false", "background = true");
    let recipe = recipe + "max_restarts = 20\n";
    let (whole, expected) = run_undisturbed(&recipe, "4");
    let plain = Folder::new(&recipe);
    let recipe = recipe.replace("[optimizer]\n", "[optimizer]\nin_backward = true\n");
    let run = |recipe: &str, layout: &[&str], faults: &[&str]| {
        let arguments: Vec<&str> = faults.iter().flat_map(|fault| ["--fault", fault]).collect();
        let folder = Folder::new(recipe);
        std::fs::create_dir(folder.path("fast")).unwrap();
        let text = good(&folder.train(&[&["-n", "4"], layout, &arguments[..]].concat()));
        assert_eq!(text.matches(" died (signal 9").count(), faults.len(), "{text}");
        (folder, text)
    };
    let faults = [
        "kill rank=1 step=5 phase=optimizer unit=head",
        "kill rank=0 step=8 phase=optimizer unit=block.0",
        "kill rank=3 step=11 phase=backward unit=block.0",
    ];
    let (folder, text) = run(&(recipe.clone() + "[offload]\noptimizer = \"fast\"\n"), &[], &faults);
    assert_same_losses(&text, &expected, 0.);
    folder.assert_same_checkpoint(&whole, 24);
    // The stages of a pipeline update their units at different times.
    let sizes = ["--set", "batch.global_batch_size=16", "--set", "batch.micro_batch_size=2"];
    let faults = ["kill rank=3 step=5 phase=optimizer unit=head", "kill rank=0 step=8 phase=optimizer unit=block.0"];
    let layout = [&["--set", "parallel.pipeline=2"], &sizes[..]].concat();
    let expected = good(&plain.train(&[&["-n", "4"], &layout[..]].concat()));
    let (_, text) = run(&recipe, &layout, &faults);
    assert_same_losses(&text, &expected, 0.);
}

#[test]
fn kills_of_ranks_that_update_in_the_forward_pass_leave_no_trace() {
    // Saves in the background, evaluations and spot checks meet updates that wait for the next step.
    let recipe = RECIPE
        .replace("background = false", "background = true")
        .replace("seed = 7", "corpus = \"tokens.bin\"\ntoken_bytes = 2")
        .replace("[run]", "[evaluation]\ncorpus = \"tokens.bin\"\nevery_steps = 3\nmax_sequences = 4\n[run]");
    let recipe = recipe + "max_restarts = 20\nspot_check_every = 5\n";
    let run = |recipe: &str, layout: &[&str], faults: &[&str]| {
        let arguments: Vec<&str> = faults.iter().flat_map(|fault| ["--fault", fault]).collect();
        let folder = Folder::new(recipe);
        std::fs::create_dir(folder.path("fast")).unwrap();
        let tokens: Vec<u8> = (0..4000u32).flat_map(|place| ((place * place % 61) as u16).to_le_bytes()).collect();
        std::fs::write(folder.path("tokens.bin"), tokens).unwrap();
        let text = good(&folder.train(&[&["-n", "4"], layout, &arguments[..]].concat()));
        assert_eq!(text.matches(" died (signal 9").count(), faults.len(), "{text}");
        (folder, text)
    };
    let evaluations = |text: &str| -> BTreeMap<String, String> {
        let of_line = |line: &str| {
            line.strip_prefix("evaluation after ")?.split_once(": ").map(|(step, of)| (step.into(), of.into()))
        };
        text.lines().filter_map(of_line).collect()
    };
    let in_forward = recipe.replace("[optimizer]\n", "[optimizer]\nin_forward = true\n");
    let pipeline = ["--set", "parallel.pipeline=2", "--set", "batch.global_batch_size=16"];
    for (layout, keys, faults) in [
        (
            &[][..],
            "[offload]\noptimizer = \"fast\"\ngradients = \"fast\"\n",
            &[
                "kill rank=1 step=4 phase=optimizer unit=head",
                "kill rank=0 step=8 phase=optimizer unit=block.0",
                "kill rank=3 step=12 phase=backward unit=block.0",
            ][..],
        ),
        (&pipeline[..], "", &["kill rank=3 step=4 phase=optimizer unit=head"][..]),
    ] {
        for (clipping, in_backward) in [("max_grad_norm = 0.5\n", ""), ("", "in_backward = true\n")] {
            // Spot checks are refused next to updates in the backward pass.
            let without = |recipe: &str| match in_backward {
                "" => recipe.to_string(),
                _ => recipe.replace("spot_check_every = 5\n", ""),
            };
            let with = |recipe: &str, keys: &str| recipe.replace("[optimizer]\n", &format!("[optimizer]\n{keys}"));
            let (whole, expected) = run(&with(&without(&recipe), clipping), layout, &[]);
            let deferring = with(&without(&in_forward), &format!("{clipping}{in_backward}"));
            let keys =
                if in_backward.is_empty() { keys.to_string() } else { keys.replace("gradients = \"fast\"\n", "") };
            let (folder, text) = run(&(deferring + &keys), layout, faults);
            assert_same_losses(&text, &expected, 0.);
            assert_eq!(evaluations(&text), evaluations(&expected), "{text}");
            assert_eq!(evaluations(&text).len(), 8, "{text}");
            folder.assert_same_checkpoint(&whole, 24);
        }
    }
}

#[test]
fn a_pipeline_resumes_with_other_numbers_of_stages_and_ranks() {
    let whole = Folder::new(RECIPE);
    // In f32, rounding that differs between layouts grows to 3e-5 of the loss in so many steps.
    let settings = ["batch.global_batch_size=16", "batch.micro_batch_size=2", "precision.param_dtype=f64"];
    let settings: Vec<&str> = settings.into_iter().flat_map(|setting| ["--set", setting]).collect();
    let run = |folder: &Folder, layout: &[&str]| folder.command("train", &[layout, &settings].concat());
    let expected = good(&run(&whole, &["-n", "2"]).output().unwrap());
    let folder = Folder::new(RECIPE);
    let mut text = String::new();
    let layouts: [&[&str]; 2] = [
        &["-n", "4", "--set", "parallel.pipeline=2"],
        &[
            "-n",
            "4",
            "--set",
            "parallel.pipeline=2",
            "--set",
            "parallel.tensor=2",
            "--set",
            "parallel.pipeline_schedule=gpipe",
        ],
    ];
    for (layout, step) in layouts.into_iter().zip(["step  6", "step 13"]) {
        let mut child = run(&folder, layout).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        text += &read_to(&mut lines, step);
        child.kill().unwrap();
        child.wait().unwrap();
        wait_until("ranks outlive their supervisor", || rank_pids(&folder.path("recipe.toml")).is_empty());
    }
    text += &good(&run(&folder, &["-n", "1"]).output().unwrap());
    // As many digits as are printed.
    assert_same_losses(&text, &expected, 1e-6);
}

/// Faults, keys added to the recipe, and the expected parts of the explanation, with alternatives after `|`.
const EXPLAINED: [(&str, &str, &[&str]); 6] = [
    (
        "stop rank=2 step=5 phase=forward unit=block.1",
        "",
        // At step 4, or before the first step: on a fast machine there is no heartbeat in between. The others wait for the next unit, or
        // the one after it, whose parameters rank 2 may have asked for in advance.
        &["rank 2", "has sent no heartbeat for", "it was last heard ", "all-gather #", "of 'block.|of 'head'", "wait"],
    ),
    ("cut-off rank=1 step=5 phase=backward unit=block.0", "", &["rank 1"]),
    (
        "skip rank=3 step=31 unit=block.2",
        "verify_collectives = true",
        &["rank 3 called", "block.2", "while ranks 0-2 called", "nothing was sent"],
    ),
    (
        "shorten rank=1 step=31 unit=block.1",
        "verify_collectives = true",
        &["rank 1 called", "block.1", "nothing was sent"],
    ),
    ("flip-bit rank=2 step=8 phase=backward unit=block.1", "spot_check_every = 4", &["rank 2", "block.1", "step 8"]),
    ("skip rank=3 step=31 unit=block.2", "", &["rank 3", "block.2"]),
];

#[test]
fn failures_are_noticed_explained_and_survived() {
    let started = Stopwatch::start();
    let (whole, expected) = run_undisturbed(RECIPE, "4");
    let mut pace = started.elapsed();
    for (fault, keys, explanation) in EXPLAINED {
        let (limit_s, timeouts) = short_timeouts();
        let folder = Folder::new(&(RECIPE.to_string() + &timeouts + keys));
        let started = Stopwatch::start();
        let text = good(&folder.train(&["-n", "4", "--fault", fault]));
        let (took, share) = (started.elapsed(), started.share());
        let is_explained = explanation.iter().all(|part| part.split('|').any(|part| text.contains(part)));
        assert!(is_explained, "{fault}: {text}");
        assert!(text.contains("Resumed at step"), "{fault}: {text}");
        assert_same_losses(&text, &expected, 0.);
        folder.assert_same_checkpoint(&whole, 24);
        // The reported time is within the timeout plus 5 s.
        let noticed = text.split_once(": noticed after ").and_then(|(_, rest)| rest.split_once(" s,")).unwrap().0;
        assert!(share * noticed.parse::<f64>().unwrap() < limit_s as f64 + 5., "{fault}: {text}");
        // So is the measured time, with up to twice the time of an undisturbed run for the restart and the repeated steps. If the machine has
        // become slower meanwhile, the undisturbed run is measured again.
        let most = |pace| 2 * pace + Duration::from_secs(limit_s + 5);
        if took >= most(pace) {
            let started = Stopwatch::start();
            run_undisturbed(RECIPE, "4");
            pace = pace.max(started.elapsed());
        }
        assert!(took < most(pace), "{fault}: {took:?} of {:?}\n{text}", most(pace));
    }
}

#[test]
fn out_of_memory_errors_break_down_the_memory_and_suggest_a_remedy() {
    let recipe = RECIPE
        .replace("hidden_size = 36", "hidden_size = 360")
        .replace("intermediate_size = 53", "intermediate_size = 960");
    let recipe =
        recipe.replace("micro_batch_size = 1", "micro_batch_size = 4").replace("seq_len = 16", "seq_len = 512");
    let folder = Folder::new(&recipe);
    let output = folder.train(&["-n", "2", "--fault", "exhaust rank=1 step=1 phase=backward unit=head"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for part in
        ["rank 1", "backward pass of unit head", "parameters", "gradients", "optimizer", "activations", "should fit"]
    {
        assert!(text.contains(part), "'{part}' in {text}");
    }
    assert!(!text.contains("Restarting"), "a restart would fail the same way: {text}");
}

#[test]
fn a_slow_rank_raises_no_alarm() {
    let folder = Folder::new(&(RECIPE.to_string() + &short_timeouts().1));
    let text = good(&folder.train(&["-n", "4", "--fault", "slow rank=1 step=1 phase=forward"]));
    assert!(!text.contains("rank 1") && !text.contains("Restarting"), "{text}");
}

#[test]
fn a_run_that_makes_no_progress_is_given_up() {
    let folder = Folder::new(&(RECIPE.to_string() + "max_restarts = 2"));
    let faults: Vec<&str> = std::iter::repeat_n(["--fault", "kill rank=0 step=3 phase=forward"], 5).flatten().collect();
    let output = folder.train(&[&["-n", "2"][..], &faults].concat());
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("Restarting in 0.2 s") && text.contains("supervision.max_restarts"), "{text}");
    let without = Folder::new(RECIPE.split("[checkpoints]").next().unwrap());
    let output = without.train(&["-n", "2", "--fault", "kill rank=0 step=3 phase=forward"]);
    assert!(said(&output).contains("there are no checkpoints to resume from"), "{}", said(&output));
}

#[test]
fn a_signal_saves_and_the_exit_code_asks_for_a_restart() {
    let (whole, expected) = run_undisturbed(RECIPE, "2");
    for name in ["-TERM", "-USR1", "-INT", "-HUP"] {
        let folder = Folder::new(&RECIPE.replace("every_steps = 2", "every_steps = 1000"));
        let mut run = folder.command("train", &["-n", "2"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
        let mut text = read_to(&mut lines, "step  3");
        signal(&run, name);
        text += &lines.map(|line| line.unwrap() + "\n").collect::<String>();
        assert_eq!(run.wait().unwrap().code(), Some(75), "{text}");
        assert!(text.contains("as requested"), "{text}");
        text += &good(&folder.train(&["-n", "2"]));
        assert!(losses(&text).values().all(|losses| losses.len() == 1), "no step is repeated: {text}");
        assert_same_losses(&text, &expected, 0.);
        folder.assert_same_checkpoint(&whole, 24);
    }
    let (without, _) = RECIPE.split_once("[checkpoints]").unwrap();
    let folder = Folder::new(&without.replace("steps = 24", "steps = 100000"));
    let mut run = folder.command("train", &["-n", "2"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
    read_to(&mut lines, "step ");
    signal(&run, "-INT");
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(said(&output).contains("Not saved: the recipe has no checkpoints.folder."), "{}", said(&output));
}

#[test]
fn the_secret_is_in_no_command_line_and_no_log() {
    let folder = Folder::new(&RECIPE.replace("steps = 24", "steps = 100000"));
    let mut run = folder.command("train", &["-n", "2"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
    let text = read_to(&mut lines, "step ");
    let rank = rank_pids(&folder.path("recipe.toml"))[0];
    let environment = format!("/proc/{rank}/environ");
    assert_eq!(std::fs::metadata(&environment).unwrap().permissions().mode() & 0o077, 0, "only its user can read it");
    let environment = String::from_utf8_lossy(&std::fs::read(environment).unwrap()).into_owned();
    let variable = |name: &str| environment.split('\0').find_map(|entry| entry.strip_prefix(name)).unwrap().to_string();
    let secret = variable("SHARDWISE_SECRET=");
    assert_eq!(secret.len(), 64);
    assert!(variable("SHARDWISE_SUPERVISOR=").starts_with("127.0.0.1:"), "on loopback by default");
    let command_lines = Command::new("ps").args(["-eo", "args", "-ww"]).output().unwrap();
    assert!(!said(&command_lines).contains(&secret));
    signal(&run, "-TERM");
    let rest: String = lines.map(|line| line.unwrap()).collect();
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(75));
    assert!(!(text + &rest + &said(&output)).contains(&secret));
    wait_until("ranks are left behind", || rank_pids(&folder.path("recipe.toml")).is_empty());
}

#[test]
fn invalid_ranges_and_hosts_are_refused() {
    let folder = Folder::new(&RECIPE.replace("global_batch_size = 8", "gradient_accumulation_steps = 2"));
    let refused = |arguments: &[&str], expected: &str| {
        let text = said(&folder.train(arguments));
        assert!(text.contains(expected), "{arguments:?}: {text}");
    };
    refused(&["-n", "2..4"], "a step would have 4 sequences on 2 ranks and 8 on 4; set batch.global_batch_size");
    refused(&["-n", "4..2"], "or a range, such as 2..8");
    refused(&["--hosts", "a:2"], "--listen");
    refused(&["--hosts", "a;b:2", "--listen", "127.0.0.1"], "is not a host: write NAME:RANKS");
    refused(&["-n", "2", "--hosts", "elsewhere:2", "--listen", "127.0.0.1"], "other hosts cannot reach this address");
    refused(&["-n", "2", "--fault", "bite rank=1"], "does not start with one of kill");
}

#[test]
fn a_run_continues_without_a_lost_host_and_uses_it_again_later() {
    // Long enough to cut and restore the link meanwhile. And with a small learning rate: 2 ranks sum in another order than 4, and the
    // rounding differences grow with every step.
    let recipe = RECIPE.replace("steps = 24", "steps = 200").replace("lr = 1e-2", "lr = 1e-4");
    let (_, expected) = run_undisturbed(&recipe, "4");
    let folder = Folder::new(&(recipe + &short_timeouts().1));
    let network = Hosts { hosts: 2, ranks_per_host: 2, rate: "1gbit".into(), delay: "0ms".into() }.start().unwrap();
    // Like ssh, the agent needs the network.
    let agent = folder.path("agent");
    let script = format!(
        "#!/bin/bash\n[ \"$1\" = \"$(hostname)\" ] || timeout 2 bash -c \"exec 3<>/dev/tcp/$1/9\" 2>/dev/null\n\
         [ $? = 124 ] && exit 1\nexec {} \"$@\"\n",
        network.agent().display()
    );
    std::fs::File::create(&agent).unwrap().write_all(script.as_bytes()).unwrap();
    std::fs::set_permissions(&agent, std::fs::Permissions::from_mode(0o755)).unwrap();
    let names = network.names();
    let mut command = network.on_first_host(program().to_str().unwrap());
    command.envs(network.mpi_settings()).env("OMP_NUM_THREADS", "1");
    command.arg("train").arg(folder.path("recipe.toml")).args(["-n", "2..4", "--listen", "10.90.0.1", "--agent"]);
    command.arg(&agent).args(["--hosts", &format!("{}:2,{}:2", names[0], names[1])]);
    let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
    let mut errors = BufReader::new(run.stderr.take().unwrap()).lines();
    let mut text = read_to(&mut lines, "step  20");
    network.cut(1);
    let lost = read_to(&mut errors, "Resumed at step");
    assert!(lost.contains(&format!("host {} is lost", names[1])) && lost.contains("ranks 2-3"), "{lost}");
    assert!(lost.contains("Restarting on 2 ranks without"), "{lost}");
    network.restore(1);
    text += &read_to(&mut lines, "step  60");
    let rank = rank_pids(&folder.path("recipe.toml"))[0];
    assert!(Command::new("kill").args(["-9", &rank.to_string()]).status().unwrap().success());
    let back = read_to(&mut errors, "Resumed at step");
    assert!(back.contains("Restarting on 4 ranks."), "{back}");
    text += &lines.map(|line| line.unwrap() + "\n").collect::<String>();
    let rest: String = errors.map(|line| line.unwrap() + "\n").collect();
    assert!(run.wait().unwrap().success(), "{rest}");
    assert_same_losses(&text, &expected, 1e-5);
    // The report tells the same story.
    let mut report = shardwise();
    good(&report.arg("report").arg(folder.path("saved")).output().unwrap());
    let page = std::fs::read_to_string(folder.path("saved/report.html")).unwrap();
    let order = [
        "on 4, then 2, then 4 ranks",
        "Started with 4 ranks",
        "is lost",
        "does not answer",
        "Resumed at step",
        "Finished",
    ];
    let mut rest = page.as_str();
    for part in order {
        rest = rest.split_once(part).unwrap_or_else(|| panic!("no '{part}' in its place in {page}")).1;
    }
}

/// The batch script in the guide.
fn batch_script() -> String {
    let docs = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/clusters.md")).unwrap();
    let (_, after) = docs.split_once("## Slurm\n").unwrap();
    let (_, script) = after.split_once("```sh,norun\n").unwrap();
    script.split_once("```").unwrap().0.to_string()
}

#[test]
fn a_slurm_job_saves_before_its_time_is_up_and_resumes_in_the_next() {
    let recipe = RECIPE.replace("steps = 24", "steps = 100000").replace("every_steps = 2", "every_steps = 100000");
    let folder = Folder::new(&recipe);
    let slurm = Slurm::start(&folder.path("slurm")).unwrap();
    // The script of the guide with a much shorter time limit.
    let script = batch_script().replace("--time=24:00:00", "--time=1").replace("USR1@300", "USR1@45");
    std::fs::write(folder.path("train.sh"), script).unwrap();
    let programs = program().parent().unwrap().display().to_string();
    let mut submit = slurm.command("sbatch");
    submit.current_dir(folder.0.path()).env("PATH", format!("{programs}:{}", std::env::var("PATH").unwrap()));
    submit.args(["--export=ALL,RECIPE=recipe.toml,OMP_NUM_THREADS=1", "--output=log", "--parsable", "train.sh"]);
    let job = good(&submit.output().unwrap()).trim().to_string();
    let log = || std::fs::read_to_string(folder.path("log")).unwrap_or_default();
    let state = || slurm.output("squeue", &["-h", "-j", &job, "-o", "%T %r"]);
    wait_until(&format!("{}{}", state(), log()), || log().contains("as requested"));
    wait_until("it is put back into the queue", || state().contains("PENDING"));
    let saved = log();
    let (_, last) = saved.split_once("stopped after step ").unwrap();
    let last: u64 = last.split_once(',').unwrap().0.parse().unwrap();
    // Slurm waits two minutes before it restarts a requeued job, unless its start time is changed.
    let (asked, has_resumed) = (Stopwatch::start(), || log().contains(&format!("resuming after step {last}, from")));
    while !has_resumed() {
        assert!(asked.elapsed() < Duration::from_secs(200), "it does not resume: {}{}", state(), log());
        // A node does not accept a job again in the second in which it ended it.
        std::thread::sleep(Duration::from_secs(4));
        slurm.output("scontrol", &["update", &format!("job={job}"), "StartTime=now"]);
    }
    wait_until("it makes steps", || log().contains(&format!("step {:>6}/", last + 1)));
}
