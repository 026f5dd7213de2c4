//! Starting ranks.

use std::path::{Path, PathBuf};
use std::process::Command;

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

/// What every rank's environment needs, whoever starts it.
pub(crate) fn prepared(mut command: Command, ranks: usize) -> Command {
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

/// A path that means the same in another working folder.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}
