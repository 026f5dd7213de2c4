//! The device mesh: ranks as points on a grid with named axes, and groups as index expressions into that grid.
//!
//! # Note: the order of the axes
//! Rank numbers run fastest along the last axis. Launchers number the ranks of a host consecutively, so the axes that
//! communicate the most come last: tensor parallelism exchanges activations inside every layer and should stay within one host,
//! while pipeline stages exchange one activation per micro-batch and may be far apart. The order is fixed, because checkpoints
//! and logs contain coordinates.
//!
//! A group of ranks is a start and at most seven (size, stride) pairs. No list of ranks is ever built: in a world of 10,000
//! ranks, a group takes about a hundred bytes.

use std::fmt;

/// An axis of the mesh. A mesh has *axes*; a tensor has *dimensions*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Pipeline parallelism: consecutive units of the model on different ranks.
    Pipeline,
    /// Data parallelism over replicas of the sharded model.
    Replicate,
    /// Data parallelism with sharded parameters, gradients and optimizer state.
    Shard,
    /// Expert parallelism: the experts of a layer on different ranks.
    Expert,
    /// Context parallelism by ring attention: parts of a sequence on different ranks, which send each other keys and values.
    Ring,
    /// Context parallelism by Ulysses: parts of a sequence on different ranks, which exchange positions for heads.
    Ulysses,
    /// Tensor parallelism: parts of a layer's matrices on different ranks.
    Tensor,
}

impl Axis {
    /// All axes, slowest first.
    pub const ALL: [Axis; 7] =
        [Axis::Pipeline, Axis::Replicate, Axis::Shard, Axis::Expert, Axis::Ring, Axis::Ulysses, Axis::Tensor];
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Axis::Pipeline => "pipeline",
            Axis::Replicate => "replicate",
            Axis::Shard => "shard",
            Axis::Expert => "expert",
            Axis::Ring => "ring",
            Axis::Ulysses => "ulysses",
            Axis::Tensor => "tensor",
        })
    }
}

/// Why a mesh is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// An axis has size zero.
    #[error("the {axis} axis has size 0; an unused axis has size 1")]
    EmptyAxis {
        /// The axis at fault.
        axis: Axis,
    },
    /// The product of the sizes overflows a `usize`.
    #[error("the mesh {sizes} has too many ranks")]
    TooLarge {
        /// The requested sizes.
        sizes: String,
    },
    /// Ranks cannot be divided evenly along an axis.
    #[error("{count} {what} cannot be divided into {into}; use a divisor of {count}")]
    Indivisible {
        /// The axis at fault.
        axis: Axis,
        /// The number of ranks or groups to divide.
        count: usize,
        /// What is divided: `ranks`, or `groups of 2 ranks`.
        what: String,
        /// What it should be divided into: `3 replicas`, or `groups of 2`.
        into: String,
    },
    /// The mesh does not match the world size.
    #[error(
        "the mesh {sizes} has {mesh} ranks, but {world} were started; change an axis so that the product is {world}"
    )]
    WorldMismatch {
        /// The requested sizes.
        sizes: String,
        /// The product of the sizes.
        mesh: usize,
        /// The world size.
        world: usize,
    },
}

/// A rank's coordinates on the mesh, one index per axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coordinates([usize; Axis::ALL.len()]);

impl Coordinates {
    /// The index along `axis`.
    pub fn along(&self, axis: Axis) -> usize {
        self.0[axis as usize]
    }
}

/// A rank's index along an axis, and the size of the axis. The default is [`Place::ALONE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The number of ranks.
    pub size: usize,
    /// This rank's index.
    pub index: usize,
}

impl Place {
    /// The place of a rank that is alone.
    pub const ALONE: Place = Place { size: 1, index: 0 };
}

impl Default for Place {
    fn default() -> Self {
        Place::ALONE
    }
}

/// A rank's place among those that hold the parts of a layer's parameters. The default is a rank that holds all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerPlace {
    /// Among the ranks that hold the parts of a matrix.
    pub tensor: Place,
    /// Among the ranks that hold the experts of a layer.
    pub expert: Place,
}

/// The grid of all ranks (PyTorch: `DeviceMesh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    sizes: [usize; Axis::ALL.len()],
}

impl Mesh {
    /// Creates a mesh with the given axis sizes; all other axes have size 1.
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

    /// Divides ranks: first into the stages of a pipeline, then each stage, from the ranks that are closest to each other, along the
    /// tensor, Ulysses, ring, expert and replicate axes. Axes that are not given have size 1. What is left of the ranks shards the model.
    pub fn divide(ranks: usize, sizes: &[(Axis, usize)]) -> Result<Self, MeshError> {
        let size_of = |axis| sizes.iter().find(|(given, _)| *given == axis).map_or(1, |(_, size)| *size);
        let mut divided = Vec::new();
        let (mut left, mut together) = (ranks, 1);
        for axis in [Axis::Pipeline, Axis::Tensor, Axis::Ulysses, Axis::Ring, Axis::Expert, Axis::Replicate] {
            let size = size_of(axis);
            if size == 0 || !left.is_multiple_of(size) {
                let what = if together > 1 { format!("groups of {together} ranks") } else { "ranks".to_string() };
                let into = match axis {
                    Axis::Pipeline => format!("{size} stages"),
                    Axis::Replicate => format!("{size} replicas"),
                    _ => format!("groups of {size}"),
                };
                return Err(MeshError::Indivisible { axis, count: left, what, into });
            }
            left /= size;
            together *= if axis == Axis::Pipeline { 1 } else { size };
            divided.push((axis, size));
        }
        divided.push((Axis::Shard, left));
        Mesh::new(&divided)
    }

    /// Checks that the mesh has exactly `world` ranks, and returns it.
    pub fn for_world(self, world: usize) -> Result<Self, MeshError> {
        match self.ranks() == world {
            true => Ok(self),
            false => Err(MeshError::WorldMismatch { sizes: self.to_string(), mesh: self.ranks(), world }),
        }
    }

    /// The number of ranks in the mesh: the product of its axis sizes.
    pub fn ranks(&self) -> usize {
        self.sizes.iter().product()
    }

    /// The number of ranks along `axis`.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// The difference in rank between neighbors along `axis`.
    pub fn stride(&self, axis: Axis) -> usize {
        self.sizes[axis as usize + 1..].iter().product()
    }

    /// The coordinates of `rank`.
    ///
    /// # Panics
    /// If the mesh has no such rank.
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        assert!(rank < self.ranks(), "rank {rank} of a mesh of {} ranks", self.ranks());
        Coordinates(Axis::ALL.map(|axis| rank / self.stride(axis) % self.size(axis)))
    }

    /// The place of `rank` along an axis.
    ///
    /// # Panics
    /// If the mesh has no such rank.
    pub fn place(&self, rank: usize, axis: Axis) -> Place {
        Place { size: self.size(axis), index: self.coordinates(rank).along(axis) }
    }

    /// The place of `rank` among those that hold the parts of a layer's parameters.
    ///
    /// # Panics
    /// If the mesh has no such rank.
    pub fn layer_place(&self, rank: usize) -> LayerPlace {
        LayerPlace { tensor: self.place(rank, Axis::Tensor), expert: self.place(rank, Axis::Expert) }
    }

    /// The rank at `coordinates`.
    ///
    /// # Panics
    /// If the coordinates are outside the mesh.
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

    /// The number of ranks that divide a sequence: those along the ring and the Ulysses axes.
    pub fn context_size(&self) -> usize {
        self.size(Axis::Ring) * self.size(Axis::Ulysses)
    }

    /// The group of `rank` for a collective along `axes`: all ranks with the same coordinates as `rank` on every other axis.
    /// The ranks are in ascending order; the order of `axes` does not matter.
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
    /// Writes the axes in use, as in `replicate 2 × shard 4`.
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

/// A set of ranks as an index expression: `first + Σ indexᵢ · strideᵢ`, where the last span runs fastest.
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
    /// All ranks of a world of `size` ranks.
    ///
    /// # Panics
    /// If the world is empty.
    pub fn world(size: usize) -> Self {
        assert!(size > 0, "a world has at least one rank");
        let mut spans = [Span { size: 1, stride: 1 }; Axis::ALL.len()];
        spans[Axis::ALL.len() - 1].size = size;
        RankSet { first: 0, spans }
    }

    /// The number of ranks in the set; never zero.
    #[allow(clippy::len_without_is_empty, reason = "a group has at least one rank")]
    pub fn len(&self) -> usize {
        self.spans.iter().map(|span| span.size).product()
    }

    /// The lowest rank.
    pub fn first(&self) -> usize {
        self.first
    }

    /// The rank at `index`, in ascending order of ranks.
    ///
    /// # Panics
    /// If `index` is out of bounds.
    pub fn rank_at(&self, index: usize) -> usize {
        assert!(index < self.len(), "index {index} in a group of {}", self.len());
        let mut rest = index;
        let mut rank = self.first;
        for span in self.spans.iter().rev() {
            rank += rest % span.size * span.stride;
            rest /= span.size;
        }
        rank
    }

    /// The index of `rank`, or `None` if it is not in the set.
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

    /// Splits the set into as few arithmetic progressions `(first, last, stride)` as possible, as `MPI_Group_range_incl` takes
    /// them.
    pub fn progressions(&self) -> Vec<(usize, usize, usize)> {
        let spans: Vec<Span> = self.spans.iter().copied().filter(|span| span.size > 1).collect();
        // Merge adjacent spans that continue each other into one progression.
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
    /// Writes, for example, `0-3`, `0-6/2` (every second rank) or `0-1,4-5`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.progressions().into_iter().map(|(first, last, stride)| match (first == last, stride) {
            (true, _) => first.to_string(),
            (false, 1) => format!("{first}-{last}"),
            (false, _) => format!("{first}-{last}/{stride}"),
        });
        f.write_str(&parts.collect::<Vec<_>>().join(","))
    }
}
