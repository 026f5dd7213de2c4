//! Starting ranks.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};

use anyhow::{Context, Result, bail};

use crate::hosts::Host;
use crate::launched::{ATTEMPT, SECRET, SUPERVISOR};
use crate::launched::{Launched, launched};
use crate::layers::Layers;

/// Variables that ranks on other hosts need.
const HANDED_ON: [&str; 4] = [SUPERVISOR, SECRET, ATTEMPT, "OMP_NUM_THREADS"];

/// A launcher that will start what is appended to it on `ranks` ranks of this host, and what it says of its version. The error
/// is why there is none.
pub(crate) fn launcher(ranks: usize) -> Result<(Command, String), String> {
    // The one that scripts/setup found beside the MPI that this was built with, unless told otherwise.
    let built_with = option_env!("MPIRUN").unwrap_or("mpirun");
    let program = std::env::var_os("MPIRUN").map_or_else(|| PathBuf::from(built_with), PathBuf::from);
    let version = Command::new(&program).arg("--version").output();
    let version = version.map_err(|_| format!("there is no '{}'", program.display()))?;
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let mut command = Command::new(&program);
    command.args(["-n", &ranks.to_string()]);
    // It calls itself by the one name or, where its file has another name than mpirun, by the other.
    if version.contains("Open MPI") || version.contains("OpenRTE") {
        // There may be more ranks than cores, and root in a container is meant to be root.
        command.args(["--oversubscribe", "--bind-to", "none", "--allow-run-as-root"]);
        // The engine for shared memory and TCP. Looking for networks that one host does not need takes 0.2 s.
        if std::env::var_os("OMPI_MCA_pml").is_none() {
            command.args(["--mca", "pml", "ob1"]);
        }
    }
    Ok((command, version))
}

/// What the ranks of a recipe are to do.
pub(crate) struct Work<'a> {
    /// A command of `shardwise-rank`.
    pub(crate) verb: &'static str,
    pub(crate) recipe: &'a Path,
    /// As it was asked for.
    pub(crate) ranks: Option<u32>,
    pub(crate) layers: &'a Layers,
    /// What else `shardwise-rank` is told.
    pub(crate) rest: Vec<String>,
}

impl Work<'_> {
    /// Starts the ranks on this host, and waits for them; or becomes one, where a launcher has started this process.
    pub(crate) fn start(&self) -> Result<ExitCode> {
        let program = rank_program()?;
        let asked = self.ranks.map(|ranks| ranks as usize);
        if let Some(Launched { ranks, ranks_here }) = launched() {
            if let (Some(asked), Some(ranks)) = (asked, ranks.filter(|&ranks| Some(ranks) != asked)) {
                bail!("-n {asked} contradicts the launcher, which has started {ranks} ranks; leave -n out");
            }
            let mut rank = prepared(Command::new(&program), ranks_here.or(ranks).unwrap_or(1));
            self.told(&mut rank);
            return Err(rank.exec()).with_context(|| program.display().to_string());
        }
        let mut launcher = self.launcher(asked.unwrap_or(1), &[], "")?;
        let status = launcher.status().with_context(|| launcher.get_program().display().to_string())?;
        Ok(as_it_ended(status))
    }

    /// What starts so many ranks: on these hosts, by an agent that starts programs there; on this host where there are none.
    pub(crate) fn launcher(&self, ranks: usize, hosts: &[Host], agent: &str) -> Result<Command> {
        let (mut launcher, version) =
            launcher(ranks).map_err(anyhow::Error::msg).context("scripts/setup installs it")?;
        if !hosts.is_empty() {
            if !version.contains("Open MPI") && !version.contains("OpenRTE") {
                bail!(
                    "--hosts needs Open MPI's mpirun; with another, write a host file for it and start shardwise under it"
                );
            }
            let hosts: Vec<String> = hosts.iter().map(Host::to_string).collect();
            launcher.args(["--host", &hosts.join(","), "--mca", "plm_rsh_agent", agent]);
            // By name alone: what is in its command line everyone can read.
            launcher.args(HANDED_ON.iter().flat_map(|name| ["-x", name]));
        }
        let here = hosts.iter().map(|host| host.ranks).max().unwrap_or(ranks);
        let mut launcher = prepared(launcher, here.min(ranks));
        launcher.arg(rank_program()?);
        self.told(&mut launcher);
        Ok(launcher)
    }

    fn told(&self, command: &mut Command) {
        command.arg(self.verb).arg(absolute(self.recipe));
        laid(command, self.layers);
        command.args(&self.rest);
    }
}

/// A program's exit code as this one's.
pub(crate) fn as_it_ended(status: ExitStatus) -> ExitCode {
    status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// What every rank's environment needs, whoever starts it.
fn prepared(mut command: Command, ranks: usize) -> Command {
    // Read by Open MPI when a rank starts: waiting ranks yield, and see the note on full duplex in shardwise_comm::mpi.
    command.env("OMPI_MCA_mpi_yield_when_idle", "1").env("OMPI_MCA_btl_tcp_flags", "1");
    if std::env::var_os("OMP_NUM_THREADS").is_none() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        command.env("OMP_NUM_THREADS", (cores / ranks).max(1).to_string());
    }
    command
}

/// The program that runs on every rank, beside this one.
pub(crate) fn rank_program() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name("shardwise-rank"))
}

/// The same layers for the program of ranks.
pub(crate) fn laid(command: &mut Command, layers: &Layers) {
    if let Some(file) = &layers.deepspeed {
        command.arg("--deepspeed").arg(absolute(file));
    }
    // In one word each: a value may begin with a dash.
    command.args(layers.set.iter().map(|set| format!("--set={set}")));
}

/// A path that means the same in another working folder.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}
