//! The program with `run.device = "cuda"`, on a device that computes on the CPU and a library that stands in for NCCL.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use shardwise_pretend_device::PRELOAD;
use support::{Folder, RECIPE, good, said, shardwise};

impl Folder {
    /// A subcommand on the recipe, with ranks on devices.
    fn on_devices(&self, verb: &str, arguments: &[&str]) -> Command {
        let mut command = self.command(verb, &[arguments, &["--set", "run.device=cuda"]].concat());
        // Only ranks use it; the launcher and its helpers load it as well.
        command.env("LD_PRELOAD", PRELOAD);
        command
    }

    fn train_on_devices(&self, arguments: &[&str]) -> Output {
        self.on_devices("train", arguments).output().unwrap()
    }
}

#[test]
fn a_run_on_devices_with_kills_ends_with_the_bits_of_one_on_the_cpu() {
    // One micro-batch, because a device adds up the rows of an embedding's gradient before it accumulates them, and the CPU does not.
    let recipe = RECIPE.replace("steps = 24", "steps = 8").replace("global_batch_size = 8", "global_batch_size = 2");
    let recipe = recipe.replace("seed = 7", "seed = 7\ncorpus = \"tokens.bin\"\ntoken_bytes = 2");
    let [on_cpu, on_devices, on_hosts] = [(); 3].map(|()| Folder::new(&recipe));
    [&on_cpu, &on_devices, &on_hosts].into_iter().for_each(Folder::write_tokens_and_tokenizer);
    let arguments = ["-n", "2", "--set", "zero.stage=3"];
    good(&on_cpu.command("train", &arguments).output().unwrap());
    let faults = ["--fault", "kill rank=1 step=3 phase=backward", "--fault", "kill rank=0 step=6 phase=forward"];
    let of_offload = [
        "--fault",
        "kill rank=1 step=3 phase=fetch unit=head",
        "--fault",
        "kill rank=0 step=6 phase=store unit=block.0",
    ];
    let offload = ["optimizer", "parameters", "gradients"].map(|kind| format!("offload.{kind}=host"));
    let offload: Vec<&str> = offload.iter().flat_map(|setting| ["--set", setting]).collect();
    for (folder, more) in [(&on_devices, &faults[..]), (&on_hosts, &[&offload[..], &of_offload].concat())] {
        let text = good(&folder.train_on_devices(&[&arguments[..], more].concat()));
        assert!(text.contains("Restarted 2 times"), "{text}");
        assert!(text.contains("rank 0 uses Mps, the only GPU that it can see"), "{text}");
        let mut diff = shardwise();
        diff.args(["checkpoint", "diff"]).arg(folder.path("saved")).args(["8", "8", "--other"]);
        let same = good(&diff.arg(on_cpu.path("saved")).output().unwrap());
        assert!(same.contains("the same to the last bit"), "{same}");
    }

    let eval = ["-n", "2", "--corpus", "tokens.bin"];
    let generate =
        ["--set", "data.tokenizer=tokenizer.json", "--tokens", "8", "--temperature", "0", "--prompt", "w3 w5"];
    for (verb, arguments) in [("eval", &eval[..]), ("generate", &generate)] {
        let expected = on_devices.command(verb, arguments).output().unwrap();
        let found = on_devices.on_devices(verb, arguments).output().unwrap();
        good(&expected);
        good(&found);
        assert_eq!(String::from_utf8_lossy(&found.stdout), String::from_utf8_lossy(&expected.stdout), "{verb}");
    }
}

#[test]
fn two_ranks_on_one_device_are_refused_unless_the_recipe_allows_it() {
    let folder = Folder::new(&RECIPE.replace("steps = 24", "steps = 1"));
    let run = |arguments: &[&str]| {
        let mut command = folder.on_devices("train", &[&["-n", "2"], arguments].concat());
        command.env("SHARDWISE_PRETEND_SHARED_DEVICE", "1").output().unwrap()
    };
    let text = said(&run(&[]));
    assert!(text.contains("ranks 0 and 1 would use the same GPU"), "{text}");
    good(&run(&["--set", "run.share_devices=true"]));
}

#[test]
fn a_run_that_does_not_fit_on_its_device_is_refused() {
    let folder = Folder::new(RECIPE);
    let mut command = folder.on_devices("train", &["-n", "2", "--set", "model.llama.vocab_size=20000"]);
    let output = command.env("SHARDWISE_PRETEND_MEMORY_MIB", "4").output().unwrap();
    let text = said(&output);
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("but the free memory of its GPU is 4 MiB"), "{text}");
}

/// `scripts/gpu-check`, as a user with GPUs runs it.
#[test]
fn gpu_check_finds_that_everything_works() {
    let folder = tempfile::tempdir().unwrap();
    let programs = folder.path().join("programs");
    std::fs::create_dir(&programs).unwrap();
    for (name, program) in
        [("shardwise", env!("CARGO_BIN_EXE_shardwise")), ("shardwise-rank", env!("CARGO_BIN_EXE_shardwise-rank"))]
    {
        let script = format!("#!/bin/sh\nOMP_NUM_THREADS=1 LD_PRELOAD={PRELOAD} exec {program} \"$@\"\n");
        std::fs::write(programs.join(name), script).unwrap();
        std::fs::set_permissions(programs.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let check = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/gpu-check");
    let mut command = Command::new(check);
    let text = good(
        &command.arg("--folder").arg(folder.path().join("check")).arg("--programs").arg(programs).output().unwrap(),
    );
    println!("{text}");
    assert!(text.contains("Everything works."), "{text}");
    assert_eq!(text.matches("\nok      ").count(), 13, "{text}");
    let report = std::fs::read_to_string(folder.path().join("check/output.txt")).unwrap();
    let words = report.split_whitespace().collect::<Vec<_>>().join(" ");
    // Inputs and targets of four micro-batches; and the norm, with the losses.
    assert!(words.contains(" 8 copies to the device, 1 from it; times that the host waited: 1 "), "{report}");
}
