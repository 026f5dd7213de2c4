//! Helpers for all commands: those of `shardwise-compare`, the folder of developers' tools, tests, and the peak memory of a command.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};

pub(crate) use shardwise_compare::workspace::{LOCAL_VARIABLES, Scratch, build, median, output_of, root, spread};

/// The folder for programs that only developers need.
pub(crate) fn tools() -> Result<PathBuf> {
    let home = std::env::var("SHARDWISE_HOME").map(PathBuf::from);
    let home = home.or_else(|_| std::env::var("HOME").map(|home| Path::new(&home).join(".cache/shardwise")))?;
    Ok(home.join("tools"))
}

/// Runs tests of the workspace with these arguments and variables. Returns whether they pass.
pub(crate) fn run_tests(arguments: &[&str], variables: &[(&str, &str)]) -> Result<bool> {
    let mut command = Command::new("cargo");
    command.current_dir(root()).args(["nextest", "run", "--release", "--workspace"]);
    Ok(command.args(arguments).envs(variables.iter().copied()).status()?.success())
}

/// The peak memory of a command. The kernel's figure never falls, so polling it often is enough.
pub(crate) fn peak_memory_of(command: &mut Command) -> Result<f64> {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let mut peak: f64 = 0.;
    loop {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let kib =
            status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next()?.parse::<f64>().ok());
        peak = peak.max(kib.unwrap_or(0.) * 1024.);
        if let Some(end) = child.try_wait()? {
            ensure!(end.success(), "{command:?} failed: {end}");
            return Ok(peak);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
