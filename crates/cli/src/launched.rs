//! What a launcher has said to the ranks that it started. Both programs read it.

/// The variables by which ranks know the supervisor that has started them. A secret in the environment is seen by its user alone.
pub(crate) const SUPERVISOR: &str = "SHARDWISE_SUPERVISOR";
pub(crate) const SECRET: &str = "SHARDWISE_SECRET";
pub(crate) const ATTEMPT: &str = "SHARDWISE_ATTEMPT";

/// The exit code of a run that was refused, and never started.
pub(crate) const REFUSED: u8 = 2;

/// And of one that was asked to end, has saved, and is to be started again: EX_TEMPFAIL of sysexits.h.
pub(crate) const RESUME: u8 = 75;

/// How many ranks there are.
#[derive(Default)]
pub(crate) struct Launched {
    /// In all.
    pub(crate) ranks: Option<usize>,
    /// On this host.
    pub(crate) ranks_here: Option<usize>,
}

/// Where a launcher says which rank this is.
pub(crate) const RANK: &[&str] = &["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];

/// Whether a launcher has started this process as a rank. A batch script of Slurm's is none, though its environment has much
/// that a rank's has.
pub(crate) fn launched() -> Option<Launched> {
    number(RANK)?;
    Some(Launched {
        ranks: number(&["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]),
        ranks_here: number(&["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"]),
    })
}

/// What this host calls itself.
pub(crate) fn own_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The number in the first of these variables that there is. Slurm writes `4(x2)` where two hosts have four each.
pub(crate) fn number(names: &[&str]) -> Option<usize> {
    let leading = |text: String| text.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
    names.iter().find_map(|name| leading(std::env::var(name).ok()?))
}
