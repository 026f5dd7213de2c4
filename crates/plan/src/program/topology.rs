//! Where the ranks of a mesh are: hosts, their cores, and the links within and between them.

use super::costs::LinkCost;
use super::groups::GroupKind;
use super::traffic::Layout;
use crate::mesh::Mesh;

/// The machines that ranks run on. Hosts have consecutive ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Topology {
    /// The mesh of all ranks.
    pub mesh: Mesh,
    /// The number of ranks on a host.
    pub ranks_per_host: usize,
    /// The number of cores of a host.
    pub cores_per_host: usize,
    /// The number of threads that a rank computes with; 0 if it does not compute on the host's cores.
    pub threads_per_rank: usize,
    /// The link between ranks of a host.
    pub within_host: SharedLink,
    /// The link from one host to the others.
    pub between_hosts: SharedLink,
    /// The bytes of a parameter, in the dtype of the computation.
    pub parameter_bytes: usize,
    /// The bytes of a gradient, in the dtype of the reduction.
    pub gradient_bytes: usize,
}

/// A link, and how many ranks of a host share its bandwidth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedLink {
    /// What it costs if one rank uses it.
    pub cost: LinkCost,
    /// The number of ranks that use it at the same time. They cannot be more than a host has.
    pub ranks: usize,
}

impl SharedLink {
    /// A link that every rank has for itself.
    pub const fn unshared(cost: LinkCost) -> Self {
        SharedLink { cost, ranks: 1 }
    }
}

impl Topology {
    /// The factor by which computation is slower because the ranks of a host want more cores than it has.
    pub fn slowdown(&self) -> f64 {
        (self.cores_wanted() as f64 / self.cores_per_host.max(1) as f64).max(1.)
    }

    /// A rank's share of the link that one of its groups communicates over.
    ///
    /// # Panics
    /// If the mesh has no such rank.
    pub fn link(&self, group: GroupKind, rank: usize) -> LinkCost {
        let ranks = group.ranks(&self.mesh, rank);
        self.link_between(ranks.first(), ranks.rank_at(ranks.len() - 1))
    }

    /// A rank's share of the link between two ranks. Its CPU time counts only if computation leaves no core to communication.
    pub fn link_between(&self, rank: usize, other: usize) -> LinkCost {
        let is_within = rank / self.ranks_on_host() == other / self.ranks_on_host();
        let SharedLink { cost, ranks } = if is_within { self.within_host } else { self.between_hosts };
        LinkCost {
            latency_s: cost.latency_s,
            bytes_per_s: cost.bytes_per_s / ranks.clamp(1, self.ranks_on_host()) as f64,
            cpu_s_per_byte: match self.cores_wanted() >= self.cores_per_host {
                true => cost.cpu_s_per_byte * self.slowdown(),
                false => 0.,
            },
        }
    }

    /// The layout of a rank.
    ///
    /// # Panics
    /// If the mesh has no such rank.
    pub fn layout(&self, rank: usize) -> Layout {
        Layout::of_rank(&self.mesh, rank, self.parameter_bytes, self.gradient_bytes)
    }

    fn cores_wanted(&self) -> usize {
        self.ranks_on_host() * self.threads_per_rank
    }

    /// The number of ranks on a full host.
    fn ranks_on_host(&self) -> usize {
        self.ranks_per_host.clamp(1, self.mesh.ranks())
    }
}
