//! The host that a rank is on: its name, and which ranks share it.

use shardwise_comm::Group;
use shardwise_model::init::splitmix64;

use crate::error::Result;

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

/// A number for the host of each rank: the same for ranks on the same host. All ranks call it together.
pub(crate) fn hosts_of_ranks(world: &Group) -> Result<Vec<i64>> {
    let (_, all) = world.all_gather("hosts", vec![hash_text(&name())], vec![0i64; world.size()]).wait()?;
    Ok(all)
}

/// A number for a text, to compare it between ranks.
pub(crate) fn hash_text(text: &str) -> i64 {
    text.bytes().fold(0u64, |hash, byte| splitmix64(hash ^ u64::from(byte))) as i64
}
