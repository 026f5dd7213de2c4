//! The host that a rank is on: its name, and how many ranks share it.

/// The host's name.
pub(crate) fn name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The number of ranks on this host according to the launcher, or `ranks` if it does not say.
pub(crate) fn ranks_here(ranks: usize) -> usize {
    let names = ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"];
    let leading = |text: String| text.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
    names.iter().find_map(|name| leading(std::env::var(name).ok()?)).unwrap_or(ranks)
}
