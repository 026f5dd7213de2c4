//! The environment that a launcher and a supervisor give to the ranks.

/// The environment variable with the address of the supervisor that started a rank.
pub const SUPERVISOR: &str = "SHARDWISE_SUPERVISOR";

/// The environment variable with the run's secret. Only the user who runs a process can read its environment, so it is safe there.
pub const SECRET: &str = "SHARDWISE_SECRET";

/// The environment variable with the number of the attempt.
pub const ATTEMPT: &str = "SHARDWISE_ATTEMPT";

/// The numbers of ranks, if the launcher provides them.
#[derive(Default)]
pub struct LauncherEnv {
    /// The number of all ranks.
    pub world_size: Option<usize>,
    /// The number of ranks on this host.
    pub local_size: Option<usize>,
}

/// The variables in which launchers pass a rank its number.
pub const RANK: &[&str] = &["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];

/// Reads the launcher's environment. Returns `None` unless a launcher started this process as a rank. A Slurm batch script is not a
/// rank, although it has many of the same variables.
pub fn launcher_env() -> Option<LauncherEnv> {
    env_number(RANK)?;
    Some(LauncherEnv {
        world_size: env_number(&["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]),
        local_size: env_number(&["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"]),
    })
}

/// The name of this host.
pub fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The leading number in the first of these variables that is set. Slurm writes `4(x2)` for two hosts with four tasks each.
pub fn env_number(names: &[&str]) -> Option<usize> {
    let leading = |text: String| text.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
    names.iter().find_map(|name| leading(std::env::var(name).ok()?))
}
