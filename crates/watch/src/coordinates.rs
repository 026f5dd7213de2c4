//! The coordinates of a rank: its stage of the pipeline, and its index among the ranks that hold different experts, divide its sequences or
//! share its layers.
//!
//! They say which part of the model and of a sequence a rank has. Ranks that differ only along the axes of data parallelism have the same part, so their
//! number is enough, and in a run with data parallelism alone no text has coordinates. The order of the axes is the one of `Mesh` in
//! `shardwise-plan`: ranks of a stage are consecutive, and so are the ranks that divide a sequence, and those that share a layer.

use std::fmt;

use serde::Deserialize;

/// The sizes of the axes that cut the model or its sequences into parts. An axis that is not in use has size 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ModelAxes {
    /// The number of stages of the pipeline (`parallel.pipeline`).
    pub pipeline: usize,
    /// The number of ranks that hold the experts of a layer (`parallel.expert`).
    pub expert: usize,
    /// The number of ranks that divide each sequence (`parallel.context`).
    pub context: usize,
    /// The number of ranks that share each layer (`parallel.tensor`).
    pub tensor: usize,
}

impl Default for ModelAxes {
    fn default() -> Self {
        ModelAxes { pipeline: 1, expert: 1, context: 1, tensor: 1 }
    }
}

impl ModelAxes {
    /// Returns the coordinates of a rank. A size that does not divide the world size belongs to another run, and gives none.
    pub fn coordinates(&self, rank: usize, world: usize) -> Coordinates {
        let is_used = |size: usize| size > 1 && world.is_multiple_of(size);
        let [tensor, context] = [self.tensor, self.context].map(|size| if is_used(size) { size } else { 1 });
        Coordinates {
            stage: is_used(self.pipeline).then(|| rank / (world / self.pipeline)),
            expert: is_used(self.expert).then(|| rank / (tensor * context) % self.expert),
            context: is_used(self.context).then(|| rank / tensor % self.context),
            tensor: is_used(self.tensor).then(|| rank % self.tensor),
        }
    }
}

/// The coordinates of a rank, along the axes that are in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coordinates {
    /// Its stage of the pipeline.
    pub stage: Option<usize>,
    /// Its index among the ranks that hold different experts.
    pub expert: Option<usize>,
    /// Its index among the ranks that divide its sequences.
    pub context: Option<usize>,
    /// Its index among the ranks that share its layers.
    pub tensor: Option<usize>,
}

impl Coordinates {
    /// The coordinates that two ranks have in common.
    pub(crate) fn shared(self, other: Self) -> Self {
        Coordinates {
            stage: self.stage.filter(|_| self.stage == other.stage),
            expert: self.expert.filter(|_| self.expert == other.expert),
            context: self.context.filter(|_| self.context == other.context),
            tensor: self.tensor.filter(|_| self.tensor == other.tensor),
        }
    }

    /// Formats the number of a rank with its coordinates: `rank 5 (stage 1, tensor 1)`.
    pub fn describe_rank(&self, rank: usize) -> String {
        match self.to_string() {
            none if none.is_empty() => format!("rank {rank}"),
            coordinates => format!("rank {rank} ({coordinates})"),
        }
    }
}

impl fmt::Display for Coordinates {
    /// Writes `stage 1, tensor 1`, or nothing if the run has data parallelism alone.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let along = |axis: &str, index: Option<usize>| index.map(|index| format!("{axis} {index}"));
        let parts = [
            along("stage", self.stage),
            along("expert", self.expert),
            along("context", self.context),
            along("tensor", self.tensor),
        ];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(axes: ModelAxes, rank: usize, world: usize) -> String {
        axes.coordinates(rank, world).describe_rank(rank)
    }

    #[test]
    fn axes_in_use_are_named() {
        // Stages of two data-parallel groups of two ranks that share layers.
        let both = ModelAxes { pipeline: 2, tensor: 2, ..ModelAxes::default() };
        let names: Vec<String> = (0..8).map(|rank| name(both, rank, 8)).collect();
        assert_eq!(names[0], "rank 0 (stage 0, tensor 0)");
        assert_eq!(names[3], "rank 3 (stage 0, tensor 1)");
        assert_eq!(names[5], "rank 5 (stage 1, tensor 1)");
        assert_eq!(names[6], "rank 6 (stage 1, tensor 0)");
        assert_eq!(name(ModelAxes { pipeline: 4, ..ModelAxes::default() }, 5, 8), "rank 5 (stage 2)");
        assert_eq!(name(ModelAxes { tensor: 4, ..ModelAxes::default() }, 5, 8), "rank 5 (tensor 1)");
        let context = ModelAxes { context: 2, tensor: 2, ..ModelAxes::default() };
        assert_eq!(name(context, 6, 8), "rank 6 (context 1, tensor 0)");
        let experts = ModelAxes { expert: 2, tensor: 2, ..ModelAxes::default() };
        assert_eq!(name(experts, 6, 8), "rank 6 (expert 1, tensor 0)");
        assert_eq!(name(ModelAxes::default(), 5, 8), "rank 5");
    }

    #[test]
    fn ranks_share_the_coordinates_that_are_equal() {
        let at = |rank: usize| ModelAxes { pipeline: 2, tensor: 2, ..ModelAxes::default() }.coordinates(rank, 8);
        assert_eq!(at(4).shared(at(7)).to_string(), "stage 1");
        assert_eq!(at(0).shared(at(6)).to_string(), "tensor 0");
        assert_eq!(at(0).shared(at(5)).to_string(), "");
    }

    #[test]
    fn sizes_of_another_run_are_ignored() {
        for size in [0, 3, usize::MAX] {
            assert_eq!(
                name(ModelAxes { pipeline: size, expert: size, context: size, tensor: size }, 5, 8),
                "rank 5",
                "{size}"
            );
        }
    }

    #[test]
    fn absent_sizes_are_one() {
        let read = |json: &str| serde_json::from_str::<ModelAxes>(json).expect("valid JSON");
        assert_eq!(read("{}"), ModelAxes::default());
        assert_eq!(read(r#"{"pipeline": 2}"#), ModelAxes { pipeline: 2, ..ModelAxes::default() });
    }
}
