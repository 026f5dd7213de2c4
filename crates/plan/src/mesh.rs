//! The device mesh: ranks as points of a grid with named axes, and groups as index expressions into it.
//!
//! # Note: the order of the axes
//! Rank numbers run fastest along the last axis. Launchers number the ranks of a host consecutively, so the axes that
//! talk most and wait least for each other stand last: tensor parallelism exchanges activations inside every layer and
//! wants the ranks of one host, pipeline stages exchange one activation per micro-batch and may be far apart. The order
//! is fixed, because a rank's coordinates are part of what a checkpoint and a log say.
//!
//! A group of ranks is a start and at most five (size, stride) pairs. No list of ranks is ever built, so a rank of a
//! world of 10,000 knows its groups in a hundred bytes.

use std::fmt;

/// A direction of the mesh. An *axis* is of the mesh; a tensor has *dimensions*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Consecutive ranges of the model's units.
    Pipeline,
    /// Copies of the sharded model that train on different data.
    Replicate,
    /// Slices of parameters, gradients and optimizer state; different data as well.
    Shard,
    /// Parts of one sequence.
    Sequence,
    /// Parts of one layer's matrices.
    Tensor,
}

impl Axis {
    /// All axes, slowest first.
    pub const ALL: [Axis; 5] = [Axis::Pipeline, Axis::Replicate, Axis::Shard, Axis::Sequence, Axis::Tensor];
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Axis::Pipeline => "pipeline",
            Axis::Replicate => "replicate",
            Axis::Shard => "shard",
            Axis::Sequence => "sequence",
            Axis::Tensor => "tensor",
        })
    }
}

/// Why a mesh cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// An axis of length zero has no ranks.
    #[error("the {axis} axis has size 0; an axis that is not used has size 1")]
    EmptyAxis {
        /// The axis at fault.
        axis: Axis,
    },
    /// The product of the sizes does not fit into a machine word.
    #[error("the mesh {sizes} has more ranks than can be counted")]
    TooLarge {
        /// The sizes that were asked for.
        sizes: String,
    },
    /// The mesh does not cover the ranks that were started.
    #[error(
        "the mesh {sizes} has {mesh} ranks, and {world} were started; change an axis so that the product is {world}"
    )]
    WorldMismatch {
        /// The sizes that were asked for.
        sizes: String,
        /// Their product.
        mesh: usize,
        /// The ranks there are.
        world: usize,
    },
}

/// A rank's place on the mesh, one index per axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coordinates([usize; Axis::ALL.len()]);

impl Coordinates {
    /// The index along `axis`.
    pub fn along(&self, axis: Axis) -> usize {
        self.0[axis as usize]
    }
}

/// The grid of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    sizes: [usize; Axis::ALL.len()],
}

impl Mesh {
    /// A mesh with the given axis sizes; an axis that is not named has size 1.
    pub fn new(sizes: &[(Axis, usize)]) -> Result<Self, MeshError> {
        let mut mesh = Mesh { sizes: [1; Axis::ALL.len()] };
        for &(axis, size) in sizes {
            if size == 0 {
                return Err(MeshError::EmptyAxis { axis });
            }
            mesh.sizes[axis as usize] = size;
        }
        match mesh.sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size)) {
            Some(_) => Ok(mesh),
            None => Err(MeshError::TooLarge { sizes: mesh.to_string() }),
        }
    }

    /// The same mesh, or an error where it does not have exactly `world` ranks.
    pub fn for_world(self, world: usize) -> Result<Self, MeshError> {
        match self.ranks() == world {
            true => Ok(self),
            false => Err(MeshError::WorldMismatch { sizes: self.to_string(), mesh: self.ranks(), world }),
        }
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.sizes.iter().product()
    }

    /// The size of `axis`.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// How far apart two neighbours along `axis` are in rank numbers.
    pub fn stride(&self, axis: Axis) -> usize {
        self.sizes[axis as usize + 1..].iter().product()
    }

    /// Where `rank` stands.
    ///
    /// # Panics
    /// If the mesh has no such rank.
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        assert!(rank < self.ranks(), "rank {rank} of a mesh of {} ranks", self.ranks());
        Coordinates(Axis::ALL.map(|axis| rank / self.stride(axis) % self.size(axis)))
    }

    /// Who stands at `coordinates`.
    ///
    /// # Panics
    /// If the coordinates are of a larger mesh.
    pub fn rank(&self, coordinates: Coordinates) -> usize {
        Axis::ALL
            .iter()
            .map(|&axis| {
                let index = coordinates.along(axis);
                assert!(index < self.size(axis), "{axis} index {index} on an axis of size {}", self.size(axis));
                index * self.stride(axis)
            })
            .sum()
    }

    /// The ranks that share all of `rank`'s coordinates but those along `axes`: the group in which a collective along
    /// `axes` takes place. Its ranks ascend; the order in which `axes` are named does not matter.
    pub fn group(&self, rank: usize, axes: &[Axis]) -> RankSet {
        let coordinates = self.coordinates(rank);
        let mut set = RankSet { first: rank, spans: [Span { size: 1, stride: 1 }; Axis::ALL.len()] };
        for axis in Axis::ALL {
            if axes.contains(&axis) {
                set.first -= coordinates.along(axis) * self.stride(axis);
                set.spans[axis as usize] = Span { size: self.size(axis), stride: self.stride(axis) };
            }
        }
        set
    }
}

impl fmt::Display for Mesh {
    /// The axes that are used, as in `replicate 2 × shard 4`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used: Vec<String> = Axis::ALL
            .iter()
            .filter(|&&axis| self.size(axis) > 1)
            .map(|&axis| format!("{axis} {}", self.size(axis)))
            .collect();
        match used.is_empty() {
            true => f.write_str("of one rank"),
            false => f.write_str(&used.join(" × ")),
        }
    }
}

/// A set of ranks as an index expression: `first + Σ indexᵢ · strideᵢ`, the last span running fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RankSet {
    first: usize,
    spans: [Span; Axis::ALL.len()],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Span {
    size: usize,
    stride: usize,
}

impl RankSet {
    /// All ranks of a world.
    ///
    /// # Panics
    /// If the world is empty.
    pub fn world(size: usize) -> Self {
        assert!(size > 0, "a world has at least one rank");
        let mut spans = [Span { size: 1, stride: 1 }; Axis::ALL.len()];
        spans[Axis::ALL.len() - 1].size = size;
        RankSet { first: 0, spans }
    }

    /// The number of ranks in it; never zero.
    #[allow(clippy::len_without_is_empty, reason = "a group has at least the rank that asks for it")]
    pub fn len(&self) -> usize {
        self.spans.iter().map(|span| span.size).product()
    }

    /// The lowest rank.
    pub fn first(&self) -> usize {
        self.first
    }

    /// The rank at place `index`.
    ///
    /// # Panics
    /// If there are fewer ranks.
    pub fn rank_at(&self, index: usize) -> usize {
        assert!(index < self.len(), "place {index} of a group of {}", self.len());
        let mut rest = index;
        let mut rank = self.first;
        for span in self.spans.iter().rev() {
            rank += rest % span.size * span.stride;
            rest /= span.size;
        }
        rank
    }

    /// The place of `rank`, or `None` where it is not in the set.
    pub fn index_of(&self, rank: usize) -> Option<usize> {
        let mut rest = rank.checked_sub(self.first)?;
        let mut index = 0;
        for span in &self.spans {
            let along = if span.size == 1 { 0 } else { (rest / span.stride).min(span.size - 1) };
            rest -= along * span.stride;
            index = index * span.size + along;
        }
        (rest == 0).then_some(index)
    }

    /// The ranks in ascending order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = usize> + use<> {
        let set = *self;
        (0..set.len()).map(move |index| set.rank_at(index))
    }

    /// The set as arithmetic progressions `(first, last, stride)` of ranks, as few as its shape allows.
    pub fn progressions(&self) -> Vec<(usize, usize, usize)> {
        let spans: Vec<Span> = self.spans.iter().copied().filter(|span| span.size > 1).collect();
        // Neighbouring spans that continue each other are one progression.
        let mut inner = Span { size: 1, stride: 1 };
        let mut outer = spans.len();
        while let Some(next) = outer.checked_sub(1).map(|i| spans[i]) {
            if inner.size == 1 {
                inner = next;
            } else if next.stride == inner.stride * inner.size {
                inner.size *= next.size;
            } else {
                break;
            }
            outer -= 1;
        }
        let length = inner.stride * (inner.size - 1);
        (0..self.len() / inner.size)
            .map(|index| self.rank_at(index * inner.size))
            .map(|first| (first, first + length, inner.stride))
            .collect()
    }
}

impl fmt::Display for RankSet {
    /// As in `0-3`, `0-6/2` (every second one) or `0-1,4-5`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.progressions().into_iter().map(|(first, last, stride)| match (first == last, stride) {
            (true, _) => first.to_string(),
            (false, 1) => format!("{first}-{last}"),
            (false, _) => format!("{first}-{last}/{stride}"),
        });
        f.write_str(&parts.collect::<Vec<_>>().join(","))
    }
}
