//! Starts ranks through an MPI launcher.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};

use crate::error::{Error, Result};
use crate::hosts::Host;
use crate::installation::{Installation, MPI};
use crate::launcher_env::{ATTEMPT, LauncherEnv, SECRET, SUPERVISOR, launcher_env};
use crate::remote::{RANK, add_agent};

/// Environment variables that are forwarded to ranks on other hosts.
const FORWARDED: [&str; 4] = [SUPERVISOR, SECRET, ATTEMPT, "OMP_NUM_THREADS"];

/// Returns a launcher command that starts the program appended to it on `ranks` ranks of this host, and the launcher's version text.
pub fn find_launcher(ranks: usize) -> std::result::Result<(Command, String), String> {
    let Installation { launcher: program, environment, .. } = Installation::find()?;
    let output = Command::new(&program).arg("--version").output();
    let output = output.map_err(|_| format!("cannot run '{}'", program.display()))?;
    let version = String::from_utf8_lossy(&output.stdout).into_owned();
    if version.is_empty() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("'{}' says: {}", program.display(), said.lines().next().unwrap_or("nothing")));
    }
    let mut command = Command::new(&program);
    command.args(["-n", &ranks.to_string()]);
    let is_open_mpi = is_open_mpi(&version);
    // A program from pip is linked with Open MPI; one that was built here, with any.
    if environment.is_some() && !is_open_mpi {
        let name = match version.contains("HYDRA") || version.contains("MPICH") {
            true => "MPICH",
            false => version.lines().next().unwrap_or_default(),
        };
        return Err(format!(
            "'{}' belongs to {name}, but Shardwise needs Open MPI 4.1 or 5; set {MPI} to the folder of an Open MPI",
            program.display()
        ));
    }
    if is_open_mpi {
        // There may be more ranks than cores, and containers normally run as root.
        command.args(["--oversubscribe", "--bind-to", "none", "--allow-run-as-root"]);
        // ob1 covers shared memory and TCP. Probing for other networks takes 0.2 s.
        if std::env::var_os("OMPI_MCA_pml").is_none() {
            command.args(["--mca", "pml", "ob1"]);
        }
        // Authenticate ranks on one host by user id. Trying munge takes 2 s if its daemon does not answer.
        if std::env::var_os("PMIX_MCA_psec").is_none() {
            command.env("PMIX_MCA_psec", "native");
        }
    }
    Ok((command, version))
}

/// A `shardwise-rank` command to run on all ranks.
pub struct RankCommand<'a> {
    /// The name of the command.
    pub subcommand: &'static str,
    /// The recipe, which is its first argument.
    pub recipe: &'a Path,
    /// The value of `-n`.
    pub ranks: Option<u32>,
    /// Its other arguments.
    pub arguments: Vec<OsString>,
}

impl RankCommand<'_> {
    /// Starts the ranks on this host and waits for them, or becomes a rank if a launcher started this process.
    pub fn run(&self) -> Result<ExitCode> {
        let asked = self.ranks.map(|ranks| ranks as usize);
        if let Some(LauncherEnv { world_size, local_size }) = launcher_env() {
            if let (Some(asked), Some(ranks)) = (asked, world_size.filter(|&ranks| Some(ranks) != asked)) {
                return Err(Error::WorldSize { asked, started: ranks });
            }
            let mut rank = with_rank_environment(rank_command()?, local_size.or(world_size).unwrap_or(1));
            self.add_arguments(&mut rank);
            let error = rank.exec();
            return Err(Error::failed(rank.get_program().display(), error));
        }
        let mut launcher = self.launcher(asked.unwrap_or(1), &[], "")?;
        let status = launcher.status();
        let status = status.map_err(|error| Error::failed(launcher.get_program().display(), error))?;
        Ok(exit_code(status))
    }

    /// The command that starts the ranks: on these hosts, through `agent`, or on this host if there are none.
    pub(crate) fn launcher(&self, ranks: usize, hosts: &[Host], agent: &str) -> Result<Command> {
        let (mut launcher, version) = find_launcher(ranks).map_err(|problem| {
            Error::failed("no MPI launcher works; `shardwise doctor` says how to fix it", problem)
        })?;
        if !hosts.is_empty() {
            if !is_open_mpi(&version) {
                return Err(Error::NotOpenMpi);
            }
            let hosts: Vec<String> = hosts.iter().map(Host::to_string).collect();
            launcher.args(["--host", &hosts.join(",")]);
            add_agent(&mut launcher, agent, hosts.len())?;
            // Pass only the names: anyone can read the values on a command line.
            launcher.args(FORWARDED.iter().flat_map(|name| ["-x", name]));
            if std::env::var_os(MPI).is_some() {
                launcher.args(["-x", MPI]);
            }
        }
        let here = hosts.iter().map(|host| host.ranks).max().unwrap_or(ranks);
        let mut launcher = with_rank_environment(launcher, here.min(ranks));
        match hosts.is_empty() {
            true => launcher.args(rank_program()?),
            // Each host has its own.
            false => launcher.args(RANK),
        };
        self.add_arguments(&mut launcher);
        Ok(launcher)
    }

    fn add_arguments(&self, command: &mut Command) {
        command.arg(self.subcommand).arg(absolute(self.recipe));
        command.args(&self.arguments);
    }
}

/// Converts the status of a program to the exit code that passes it on.
pub fn exit_code(status: ExitStatus) -> ExitCode {
    status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Sets the environment variables that every rank needs, whoever starts it. `ranks` is the number on one host.
fn with_rank_environment(mut command: Command, ranks: usize) -> Command {
    // For Open MPI: waiting ranks yield the core; for the TCP flags see the note on full duplex in shardwise_comm::mpi.
    command.env("OMPI_MCA_mpi_yield_when_idle", "1").env("OMPI_MCA_btl_tcp_flags", "1");
    // Without it, matrix products on a GPU have no form that gives the same bits every time, which spot checks need.
    if std::env::var_os("CUBLAS_WORKSPACE_CONFIG").is_none() {
        command.env("CUBLAS_WORKSPACE_CONFIG", ":4096:8");
    }
    if std::env::var_os("OMP_NUM_THREADS").is_none() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        command.env("OMP_NUM_THREADS", (cores / ranks).max(1).to_string());
    }
    command
}

/// Open MPI's launcher calls itself OpenRTE if its file is not named mpirun.
fn is_open_mpi(version: &str) -> bool {
    version.contains("Open MPI") || version.contains("OpenRTE")
}

/// A command that runs `shardwise-rank`, which is in the same folder as this program, with the libraries that it needs.
pub fn rank_command() -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?.with_file_name("shardwise-rank"));
    Installation::find().and_then(|found| found.add_library_path(&mut command)).map_err(Error::Installation)?;
    Ok(command)
}

/// What a launcher starts as a rank: a program, and its first arguments. If ranks need a library path, that is `shardwise rank`, which finds
/// the libraries on the rank's own host.
pub fn rank_program() -> Result<Vec<OsString>> {
    let program = std::env::current_exe()?;
    Ok(match Installation::find().map_err(Error::Installation)?.has_library_path() {
        true => vec![program.into(), "rank".into()],
        false => vec![program.with_file_name("shardwise-rank").into()],
    })
}

/// The absolute path, which stays valid in another working directory.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}
