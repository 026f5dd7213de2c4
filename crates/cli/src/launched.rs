//! What a launcher has said to the ranks that it started. Both programs read it.

/// How many ranks there are.
pub(crate) struct Launched {
    /// In all.
    pub(crate) ranks: Option<usize>,
    /// On this host.
    pub(crate) ranks_here: Option<usize>,
}

/// Whether a launcher has started this process as a rank. A batch script of Slurm's is none, though its environment has much
/// that a rank's has.
pub(crate) fn launched() -> Option<Launched> {
    // Slurm writes `4(x2)` where two hosts have four each.
    let leading = |text: String| text.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
    let number = |names: &[&str]| -> Option<usize> { names.iter().find_map(|name| leading(std::env::var(name).ok()?)) };
    number(&["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"])?;
    Some(Launched {
        ranks: number(&["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]),
        ranks_here: number(&["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"]),
    })
}
