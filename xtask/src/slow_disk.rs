//! A disk that hardly answers any more, for one of two ranks: a real one, throttled by a cgroup.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::claim::Verdict;
use crate::setting::shardwise;
use crate::workspace::Scratch;

const KINDS: [&str; 4] = ["optimizer", "parameters", "gradients", "activations"];
const SLOW_RANK: &str = "1";

/// For each kind of buffer: whether the explanation names the rank and what it waits for, and whether the run then ends with the loss of
/// a run with a good disk.
pub(crate) fn measure() -> Result<Verdict> {
    let program = shardwise()?;
    let mut failures = Vec::new();
    for kind in KINDS {
        let scratch = Scratch::new("slow-disk")?;
        let recipe = write_recipe(scratch.path(), kind)?;
        let undisturbed = run(&program, &recipe, |_| Ok(()))?;
        fs::remove_dir_all(scratch.path().join("saved"))?;
        let (mut disk, mut is_slow) = (None, false);
        let said = run(&program, &recipe, |line| {
            // The next step saves nothing before it fetches and stores.
            if line.starts_with("step  5") && !std::mem::replace(&mut is_slow, true) {
                disk = Some(SlowDisk::new(scratch.path(), pid_of_rank(&recipe)?)?);
            } else if line.contains("timed out") {
                // A process that waits for a disk cannot be killed.
                disk = None;
            }
            Ok(())
        })?;
        let explanation = said.lines().find(|line| line.contains("timed out")).unwrap_or_default();
        println!("{kind}: {explanation}");
        let is_named =
            explanation.contains("Rank 1") && ["fetch of", "store of"].iter().any(|phase| explanation.contains(phase));
        let has_resumed = said.contains("Resumed at step") && last_loss(&said) == last_loss(&undisturbed);
        if !(is_named && has_resumed) {
            println!("{said}");
            failures.push(kind);
        }
    }
    Ok(Verdict {
        figure: match &failures[..] {
            [] => format!("{} kinds of buffers, each named, and resumed with the same loss", KINDS.len()),
            failures => format!("not for {}", failures.join(", ")),
        },
        bar: "named for every kind".to_string(),
        holds: failures.is_empty(),
    })
}

fn write_recipe(folder: &Path, kind: &str) -> Result<PathBuf> {
    let text = format!(
        "activation_checkpointing = \"full\"\n[model.llama]\nvocab_size = 4096\nhidden_size = 256\nnum_hidden_layers = \
         4\nnum_attention_heads = 4\nintermediate_size = 688\n[data]\nseed = 7\n[batch]\nmicro_batch_size = 4\nseq_len = 128\n[zero]\nstage = \
         3\n[offload]\n{kind} = \".\"\n[optimizer]\nlr = 1e-3\n[run]\nsteps = 12\nlog_every = 1\n[checkpoints]\nfolder = \"saved\"\nevery_steps = \
         2\nbackground = false\n[supervision]\ntimeout_s = 6\n"
    );
    let path = folder.join("recipe.toml");
    fs::write(&path, text)?;
    Ok(path)
}

/// Trains, and shows each line to `see`. Returns all that was printed.
fn run(program: &Path, recipe: &Path, mut see: impl FnMut(&str) -> Result<()>) -> Result<String> {
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" train \"$1\" -n 2 2>&1"]).arg(program).arg(recipe);
    let mut child = command.env("OMP_NUM_THREADS", "1").stdout(Stdio::piped()).spawn()?;
    let lines = BufReader::new(child.stdout.take().context("its output is a pipe")?).lines();
    let mut said = String::new();
    for line in lines {
        let line = line?;
        see(&line)?;
        said += &line;
        said.push('\n');
    }
    let status = child.wait()?;
    ensure!(status.success(), "{status}\n{said}");
    Ok(said)
}

fn last_loss(said: &str) -> Option<String> {
    let last = said.lines().rfind(|line| line.starts_with("step 12/12"))?;
    last.split_whitespace().nth(3).map(str::to_string)
}

/// The process of the rank whose disk becomes slow.
fn pid_of_rank(recipe: &Path) -> Result<u32> {
    let is_it = |process: &Path| {
        let read = |name| fs::read_to_string(process.join(name)).unwrap_or_default();
        let (command, variables) = (read("cmdline"), read("environ"));
        command.split('\0').next().is_some_and(|program| program.ends_with("shardwise-rank"))
            && command.contains(&*recipe.to_string_lossy())
            && variables.split('\0').any(|variable| variable == format!("OMPI_COMM_WORLD_RANK={SLOW_RANK}"))
    };
    let processes = fs::read_dir("/proc")?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found = processes.filter(|process| is_it(process));
    let name = found.next().context("the rank is not running")?;
    Ok(name.file_name().unwrap_or_default().to_string_lossy().parse()?)
}

/// A cgroup whose processes get a page per second from the disk of a folder.
struct SlowDisk {
    group: PathBuf,
    device: String,
}

const LIMITS: [&str; 2] = ["blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device"];

impl SlowDisk {
    fn new(folder: &Path, process: u32) -> Result<Self> {
        let device = fs::metadata(folder)?.st_dev();
        let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let group = PathBuf::from(format!("/sys/fs/cgroup/blkio/shardwise-{process}"));
        fs::create_dir(&group).context("this claim needs root, and version 1 of cgroups")?;
        let disk = SlowDisk { group, device };
        disk.throttle(4096)?;
        fs::write(disk.group.join("cgroup.procs"), process.to_string())?;
        Ok(disk)
    }

    /// Throttles the disk to so many bytes per second in each direction; 0 lifts the throttle.
    fn throttle(&self, bytes: usize) -> Result<()> {
        let write = |name: &str| fs::write(self.group.join(name), format!("{} {bytes}", self.device));
        LIMITS.into_iter().try_for_each(write).context("the disk cannot be throttled")
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        drop(self.throttle(0));
        // Its process has to leave it first.
        let processes = fs::read_to_string(self.group.join("cgroup.procs")).unwrap_or_default();
        let leave = |process: &str| drop(fs::write("/sys/fs/cgroup/blkio/cgroup.procs", process));
        processes.lines().for_each(leave);
        drop(fs::remove_dir(&self.group));
    }
}
