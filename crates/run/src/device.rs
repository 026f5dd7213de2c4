//! Which device a rank computes on.

use shardwise_comm::{Group, nccl};
use shardwise_recipe::Recipe;
use shardwise_torch::device::accelerators;
use shardwise_torch::tch::Device;

use crate::agreement::agree;
use crate::error::Result;
use crate::host;

/// Chooses this rank's GPU, and prints which. All ranks call it together.
pub(crate) fn choose_gpu(recipe: &Recipe, world: &Group) -> Result<Device> {
    let chosen = choose_device(world, recipe.run.share_devices)?;
    let (device, count) =
        chosen.map_err(|problem| recipe.sources.error_at("run.device", format!("run.device: {problem}")))?;
    let name = if let Device::Cuda(index) = device { format!("GPU {index}") } else { format!("{device:?}") };
    let of =
        if count == 1 { "the only GPU that it can see".to_string() } else { format!("of {count} that it can see") };
    eprintln!("rank {} uses {name}, {of}", world.rank());
    Ok(device)
}

/// Chooses this rank's GPU, and says how many it sees. The launcher may have made one GPU visible to each rank, or all GPUs of a host to all
/// of its ranks. In either case, no two ranks get the same one, unless they may share. All ranks call it together.
pub(crate) fn choose_device(world: &Group, may_share: bool) -> Result<std::result::Result<(Device, usize), String>> {
    let local = local_rank(world)?;
    let visible = accelerators().map_err(|error| format!("libtorch's CUDA part cannot be loaded: {error}"));
    let chosen = visible.and_then(|devices| {
        let device = devices[index_for(local, devices.len())?];
        Ok((device, devices.len(), nccl::device_uuid(device).map_err(|error| error.to_string())?))
    });
    let (device, count, uuid) = match agree(world, chosen)? {
        Ok(chosen) => chosen,
        Err(problem) => return Ok(Err(problem)),
    };
    let own = uuid.map(u64::cast_signed).to_vec();
    let (_, uuids) = world.all_gather("gpus", own, vec![0i64; 2 * world.size()]).wait()?;
    Ok(match find_pair(uuids.as_chunks().0).filter(|_| !may_share) {
        Some((first, second)) => Err(format!(
            "ranks {first} and {second} would use the same GPU; start one rank per GPU, or set run.share_devices = true"
        )),
        None => Ok((device, count)),
    })
}

/// The index of the GPU for a host's rank of this index.
fn index_for(local: usize, visible: usize) -> std::result::Result<usize, String> {
    match visible {
        0 => Err(format!(
            "no GPU is visible to it on {}; check nvidia-smi, CUDA_VISIBLE_DEVICES and the launcher's GPU options",
            host::name()
        )),
        visible => Ok(local % visible),
    }
}

/// The number of lower ranks on the same host.
fn local_rank(world: &Group) -> Result<usize> {
    let hosts = host::hosts_of_ranks(world)?;
    Ok(hosts[..world.rank()].iter().filter(|&&host| host == hosts[world.rank()]).count())
}

/// The first two ranks with the same device.
fn find_pair(uuids: &[[i64; 2]]) -> Option<(usize, usize)> {
    let first_with = |uuid: &[i64; 2]| uuids.iter().position(|other| other == uuid);
    uuids.iter().enumerate().find_map(|(rank, uuid)| Some((first_with(uuid)?, rank)).filter(|(first, _)| *first < rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_takes_the_gpu_of_its_index_among_those_it_sees() {
        assert_eq!((0..4).map(|local| index_for(local, 4).unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
        // `srun --gpus-per-task=1`: every rank sees one, each another.
        assert_eq!((0..4).map(|local| index_for(local, 1).unwrap()).collect::<Vec<_>>(), [0; 4]);
        assert!(index_for(0, 0).unwrap_err().contains("no GPU is visible"));
    }

    #[test]
    fn two_ranks_with_one_gpu_are_found() {
        assert_eq!(find_pair(&[[1, 0], [2, 0], [3, 0]]), None);
        assert_eq!(find_pair(&[[1, 0], [2, 0], [2, 1], [2, 0]]), Some((1, 3)));
    }
}
