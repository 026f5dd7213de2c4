//! The environment that a launcher gives to its ranks. Shared by `shardwise` and `shardwise-rank`.

/// The environment variables that tell a rank which supervisor started it. Only the user who runs a process can read its
/// environment, so the secret is safe there.
pub(crate) const SUPERVISOR: &str = "SHARDWISE_SUPERVISOR";
pub(crate) const SECRET: &str = "SHARDWISE_SECRET";
pub(crate) const ATTEMPT: &str = "SHARDWISE_ATTEMPT";

/// The exit code of a run that was refused before it started.
pub(crate) const REFUSED: u8 = 2;

/// The exit code of a run that was asked to stop, has saved, and should be started again: EX_TEMPFAIL of sysexits.h.
pub(crate) const RESUME: u8 = 75;

/// The numbers of ranks, if the launcher provides them.
#[derive(Default)]
pub(crate) struct LauncherEnv {
    pub(crate) world_size: Option<usize>,
    /// The number of ranks on this host.
    pub(crate) local_size: Option<usize>,
}

/// The variables in which launchers pass a rank its number.
pub(crate) const RANK: &[&str] = &["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];

/// Reads the launcher's environment. Returns `None` unless a launcher started this process as a rank. A Slurm batch script is not a
/// rank, although it has many of the same variables.
pub(crate) fn launcher_env() -> Option<LauncherEnv> {
    env_number(RANK)?;
    Some(LauncherEnv {
        world_size: env_number(&["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]),
        local_size: env_number(&["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"]),
    })
}

pub(crate) fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The leading number in the first of these variables that is set. Slurm writes `4(x2)` for two hosts with four tasks each.
pub(crate) fn env_number(names: &[&str]) -> Option<usize> {
    let leading = |text: String| text.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
    names.iter().find_map(|name| leading(std::env::var(name).ok()?))
}
