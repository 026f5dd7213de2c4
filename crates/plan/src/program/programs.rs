//! The programs of all ranks of a mesh.

use std::collections::BTreeMap;

use super::Program;
use crate::mesh::{Axis, Mesh};

/// The programs of all ranks of a mesh: one per stage of the pipeline. Ranks that differ in another coordinate share a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    /// The program of each stage, by the rank's index along the pipeline axis.
    pub stages: Vec<Program>,
    /// The programs of ranks that have their own.
    pub exceptions: BTreeMap<usize, Program>,
}

impl Programs {
    /// The same program on all ranks.
    pub fn uniform(program: Program) -> Self {
        Programs::pipeline(vec![program])
    }

    /// A program for each stage of a pipeline.
    pub fn pipeline(stages: Vec<Program>) -> Self {
        Programs { stages, exceptions: BTreeMap::new() }
    }

    /// The program of a rank.
    ///
    /// # Panics
    /// If there is no such rank, or no program for its stage.
    pub fn of(&self, rank: usize, mesh: &Mesh) -> &Program {
        self.exceptions.get(&rank).unwrap_or_else(|| &self.stages[mesh.coordinates(rank).along(Axis::Pipeline)])
    }

    /// The ranks that stand for all: for each stage the lowest one with the stage's program, then those with their own.
    pub(super) fn parties(&self, mesh: &Mesh) -> Vec<Party<'_>> {
        let per_stage = mesh.stride(Axis::Pipeline);
        let of_stage = |(stage, program)| {
            let mut ranks = stage * per_stage..(stage + 1) * per_stage;
            let rank = ranks.find(|rank| !self.exceptions.contains_key(rank))?;
            Some(Party { rank, stage, program, is_exception: false })
        };
        let of_exception = |(&rank, program)| {
            let stage = mesh.coordinates(rank).along(Axis::Pipeline);
            Party { rank, stage, program, is_exception: true }
        };
        let stages = self.stages.iter().enumerate().filter_map(of_stage);
        stages.chain(self.exceptions.iter().map(of_exception)).collect()
    }

    /// Which stage has which unit: the one whose program names it. `None` if several do, or none.
    pub(super) fn stages_of_units(&self, units: usize) -> Vec<Option<usize>> {
        if self.stages.len() == 1 {
            return vec![Some(0); units];
        }
        let mut stages = vec![Vec::new(); units];
        for (stage, program) in self.stages.iter().enumerate() {
            for unit in program.instructions.iter().filter_map(|instruction| instruction.unit()) {
                if unit < units && stages[unit].last() != Some(&stage) {
                    stages[unit].push(stage);
                }
            }
        }
        let only = |stages: Vec<usize>| if let [stage] = stages[..] { Some(stage) } else { None };
        stages.into_iter().map(only).collect()
    }
}

/// A rank that stands for all ranks of its stage that execute the same program.
#[derive(Clone, Copy)]
pub(super) struct Party<'a> {
    /// The lowest of them.
    pub(super) rank: usize,
    pub(super) stage: usize,
    pub(super) program: &'a Program,
    /// Whether it stands for itself only.
    pub(super) is_exception: bool,
}
