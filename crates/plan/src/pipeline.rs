//! Pipelines: which stage has which units, and in which order it works on micro-batches.
//!
//! A model is cut into chunks of consecutive units (PyTorch's stages, Megatron's virtual stages), and every stage of the mesh has
//! one chunk or several. A [`PipelineSchedule`] orders the passes of chunks: it is a list of [`Action`]s per stage, which prints as
//! the CSV of `torch.distributed.pipelining` and can be read from such a file.
//! [`build::pipeline_step`](crate::program::build::pipeline_step) makes programs of it, with everything that a step does between
//! the passes.
//!
//! ```
//! use shardwise_plan::pipeline::{Pipeline, PipelineSchedule};
//!
//! let pipeline = Pipeline::even(8, 2, PipelineSchedule::OneFOneB)?;
//! assert_eq!(pipeline.units_of(1), [4, 5, 6, 7]);
//! assert_eq!(pipeline.actions(3)?.to_string(), "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
//! # Ok::<(), shardwise_plan::pipeline::ScheduleError>(())
//! ```

mod action;
mod orders;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

pub use action::{Action, Actions, ActionsError, Pass};

/// The order in which stages work on micro-batches.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PipelineSchedule {
    /// All forward passes, then all backward passes (`ScheduleGPipe`). Holds the activations of all micro-batches.
    GPipe,
    /// One forward, one backward (`Schedule1F1B`). The bubble of GPipe, with the activations of as many micro-batches as stages.
    OneFOneB,
    /// 1F1B with several chunks per stage (`ScheduleInterleaved1F1B`). Divides the bubble by their number, for as many times the
    /// messages and a little more memory.
    Interleaved1F1B {
        /// The number of chunks on each stage.
        chunks_per_stage: usize,
    },
    /// 1F1B whose backward passes are split (`ScheduleInterleavedZeroBubble` with one chunk). A third of the bubble of 1F1B in the
    /// same memory.
    ZeroBubbleH1,
    /// Two chunks per stage, there and back (`ScheduleZBVZeroBubble`). No bubble if all passes take equally long, in the memory of
    /// 1F1B.
    ZeroBubbleV,
    /// GPipe with several chunks per stage (`ScheduleLoopedBFS`). Divides the bubble by their number; backward
    /// passes come in ascending order of micro-batches, not in PyTorch's descending one.
    LoopedBreadthFirst {
        /// The number of chunks on each stage.
        chunks_per_stage: usize,
    },
    /// A schedule of your own, such as one read from a file. [`check`](crate::program::check) judges what is built from it.
    Custom(Actions),
}

impl PipelineSchedule {
    /// Every built-in schedule; those with several chunks per stage have two.
    pub const BUILT_IN: [PipelineSchedule; 6] = [
        PipelineSchedule::GPipe,
        PipelineSchedule::OneFOneB,
        PipelineSchedule::Interleaved1F1B { chunks_per_stage: 2 },
        PipelineSchedule::ZeroBubbleH1,
        PipelineSchedule::ZeroBubbleV,
        PipelineSchedule::LoopedBreadthFirst { chunks_per_stage: 2 },
    ];

    /// The name, without the number of chunks.
    pub fn name(&self) -> &'static str {
        match self {
            PipelineSchedule::GPipe => "gpipe",
            PipelineSchedule::OneFOneB => "1f1b",
            PipelineSchedule::Interleaved1F1B { .. } => "interleaved-1f1b",
            PipelineSchedule::ZeroBubbleH1 => "zb-h1",
            PipelineSchedule::ZeroBubbleV => "zb-v",
            PipelineSchedule::LoopedBreadthFirst { .. } => "looped-bfs",
            PipelineSchedule::Custom(_) => "custom",
        }
    }

    /// The number of chunks into which a model is cut for this many stages.
    pub fn chunks(&self, stages: usize) -> usize {
        match self {
            PipelineSchedule::GPipe | PipelineSchedule::OneFOneB | PipelineSchedule::ZeroBubbleH1 => stages,
            PipelineSchedule::Interleaved1F1B { chunks_per_stage }
            | PipelineSchedule::LoopedBreadthFirst { chunks_per_stage } => stages * chunks_per_stage,
            PipelineSchedule::ZeroBubbleV => 2 * stages,
            PipelineSchedule::Custom(actions) => {
                actions.stages.iter().flatten().map(|action| action.chunk.saturating_add(1)).max().unwrap_or_default()
            }
        }
    }
}

impl fmt::Display for PipelineSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PipelineSchedule::Interleaved1F1B { chunks_per_stage }
            | PipelineSchedule::LoopedBreadthFirst { chunks_per_stage } => {
                write!(f, "{}:{chunks_per_stage}", self.name())
            }
            _ => f.write_str(self.name()),
        }
    }
}

impl FromStr for PipelineSchedule {
    type Err = ScheduleError;

    /// Reads a name, such as `1f1b`. Schedules of several chunks per stage have two unless a number follows, as in `looped-bfs:4`.
    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        let unknown = || ScheduleError::UnknownSchedule(text.to_string());
        let (name, chunks) = text.split_once(':').map_or((text, None), |(name, chunks)| (name, Some(chunks)));
        let chunks_per_stage = chunks.map_or(Ok(2), |chunks| chunks.parse().map_err(|_| unknown()))?;
        match (name, chunks) {
            ("gpipe", None) => Ok(PipelineSchedule::GPipe),
            ("1f1b", None) => Ok(PipelineSchedule::OneFOneB),
            ("zb-h1", None) => Ok(PipelineSchedule::ZeroBubbleH1),
            ("zb-v", None) => Ok(PipelineSchedule::ZeroBubbleV),
            ("interleaved-1f1b", _) => Ok(PipelineSchedule::Interleaved1F1B { chunks_per_stage }),
            ("looped-bfs", _) => Ok(PipelineSchedule::LoopedBreadthFirst { chunks_per_stage }),
            _ => Err(unknown()),
        }
    }
}

/// Why a pipeline cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// There is no schedule of this name.
    #[error(
        "there is no pipeline schedule '{0}'; choose gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v or looped-bfs; interleaved-1f1b:4 \
         and looped-bfs:4 have 4 chunks per stage"
    )]
    UnknownSchedule(String),
    /// A count that must not be zero.
    #[error("a pipeline needs at least one {0}")]
    Zero(&'static str),
    /// Every chunk has at least one unit.
    #[error(
        "{schedule} on {stages} stages cuts the model into {chunks} chunks, but it has only {units} units{}",
        describe_remedy(*stages_that_fit)
    )]
    TooFewUnits {
        /// The schedule.
        schedule: String,
        /// The stages that were asked for.
        stages: usize,
        /// The chunks that the schedule has on them.
        chunks: usize,
        /// The units of the model.
        units: usize,
        /// The most stages for which the model has enough units.
        stages_that_fit: usize,
    },
    /// Another number of chunks than the schedule has.
    #[error("{schedule} on {stages} stages needs {expected} chunks, not {found}")]
    Chunks {
        /// The schedule.
        schedule: String,
        /// The stages.
        stages: usize,
        /// The chunks that it needs.
        expected: usize,
        /// The chunks that were given.
        found: usize,
    },
    /// Chunks have consecutive units, each at least one, from the first to the last.
    #[error("chunk {chunk} must start at unit {expected} and have at least one unit, but it is {found:?}")]
    Gap {
        /// The chunk at fault.
        chunk: usize,
        /// Where it must start.
        expected: usize,
        /// Where it is.
        found: Range<usize>,
    },
    /// The chunks have another number of units than the model.
    #[error("the chunks of the pipeline have {chunks} units, but the model has {model}")]
    Units {
        /// The units of all chunks.
        chunks: usize,
        /// The units of the model.
        model: usize,
    },
    /// A custom schedule has another number of lines.
    #[error("the schedule has {found} lines, but the pipeline has {expected} stages; write one line per stage")]
    Stages {
        /// The lines of the schedule.
        found: usize,
        /// The stages of the pipeline.
        expected: usize,
    },
    /// A chunk of a custom schedule that no stage or several stages have.
    #[error("{}", describe_placement(*chunk, stages))]
    Placement {
        /// The chunk.
        chunk: usize,
        /// The stages that have it.
        stages: Vec<usize>,
    },
    /// A custom schedule was made for another number of micro-batches.
    #[error(
        "the schedule has {found} micro-batches, but the step has {expected}; set the number of micro-batches to {found}"
    )]
    MicroBatches {
        /// The micro-batches of the schedule.
        found: usize,
        /// The micro-batches of the step.
        expected: usize,
    },
    /// Gradients of a tied parameter that cannot be reduced after each micro-batch.
    #[error(
        "gradients of {tied} cannot be reduced after each micro-batch: {unit} uses its weight and is on the same stage, but in a \
         different chunk that works on other micro-batches; set zero.reduce_each_micro_batch = false, or choose a schedule that \
         puts them on different stages"
    )]
    TiedChunks {
        /// The unit that owns the parameter.
        tied: String,
        /// The unit that is tied to it.
        unit: String,
    },
    /// Several units are tied to one, across stages.
    #[error("several units are tied to {tied}, and not all are on its stage; that works for one unit only")]
    TiedTwice {
        /// The unit that owns the parameter.
        tied: String,
    },
}

fn describe_remedy(stages_that_fit: usize) -> String {
    match stages_that_fit {
        0 => String::new(),
        stages => format!("; {stages} stages would fit"),
    }
}

fn describe_placement(chunk: usize, stages: &[usize]) -> String {
    match stages {
        [] => format!("chunk {chunk} is on no stage; chunks are counted from 0 without gaps"),
        stages => format!("chunk {chunk} is on stages {stages:?}; a chunk is on one stage"),
    }
}

/// A pipeline: the chunks of a model, where they are, and in which order they are passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// The number of stages: the size of the mesh along the pipeline axis.
    pub stages: usize,
    /// The units of each chunk. Chunks follow each other, and cover the model.
    pub chunks: Vec<Range<usize>>,
    /// The schedule.
    pub schedule: PipelineSchedule,
}

impl Pipeline {
    /// A pipeline of given chunks.
    pub fn new(stages: usize, chunks: Vec<Range<usize>>, schedule: PipelineSchedule) -> Result<Self, ScheduleError> {
        check_counts(stages, &schedule)?;
        let (expected, found) = (schedule.chunks(stages), chunks.len());
        if found != expected {
            return Err(ScheduleError::Chunks { schedule: schedule.to_string(), stages, expected, found });
        }
        let mut start = 0;
        for (chunk, units) in chunks.iter().enumerate() {
            if units.start != start || units.is_empty() {
                return Err(ScheduleError::Gap { chunk, expected: start, found: units.clone() });
            }
            start = units.end;
        }
        if let PipelineSchedule::Custom(actions) = &schedule {
            check_placement(actions, found)?;
        }
        Ok(Pipeline { stages, chunks, schedule })
    }

    /// A pipeline whose chunks have equally many units, or one more.
    pub fn even(units: usize, stages: usize, schedule: PipelineSchedule) -> Result<Self, ScheduleError> {
        check_counts(stages, &schedule)?;
        let chunks = schedule.chunks(stages);
        if units < chunks {
            let stages_that_fit = (1..stages).rev().find(|&stages| schedule.chunks(stages) <= units).unwrap_or(0);
            let schedule = schedule.to_string();
            return Err(ScheduleError::TooFewUnits { schedule, stages, chunks, units, stages_that_fit });
        }
        let cut = |chunk: usize| chunk * units / chunks;
        Pipeline::new(stages, (0..chunks).map(|chunk| cut(chunk)..cut(chunk + 1)).collect(), schedule)
    }

    /// A pipeline of one stage: a model that is not cut.
    pub fn one_stage(units: usize) -> Result<Self, ScheduleError> {
        Pipeline::even(units, 1, PipelineSchedule::OneFOneB)
    }

    /// The stage that has a chunk.
    pub fn stage_of_chunk(&self, chunk: usize) -> usize {
        match &self.schedule {
            PipelineSchedule::ZeroBubbleV if chunk >= self.stages => 2 * self.stages - 1 - chunk,
            PipelineSchedule::Custom(actions) => {
                let has_chunk = |actions: &Vec<Action>| actions.iter().any(|action| action.chunk == chunk);
                actions.stages.iter().position(has_chunk).unwrap_or_default()
            }
            _ => chunk % self.stages,
        }
    }

    /// The stage of each unit.
    pub fn stages_of_units(&self) -> Vec<usize> {
        let of_chunk = |(chunk, units): (usize, &Range<usize>)| vec![self.stage_of_chunk(chunk); units.len()];
        self.chunks.iter().enumerate().flat_map(of_chunk).collect()
    }

    /// The units of a stage, in the model's order.
    pub fn units_of(&self, stage: usize) -> Vec<usize> {
        let on_stage = |(_, of): &(usize, usize)| *of == stage;
        self.stages_of_units().into_iter().enumerate().filter(on_stage).map(|(unit, _)| unit).collect()
    }

    /// What each stage does in a step of this many micro-batches.
    pub fn actions(&self, micro_batches: usize) -> Result<Actions, ScheduleError> {
        if micro_batches == 0 {
            return Err(ScheduleError::Zero("micro-batch"));
        }
        match &self.schedule {
            PipelineSchedule::GPipe => Ok(orders::looped_breadth_first(self.stages, 1, micro_batches)),
            PipelineSchedule::OneFOneB => Ok(orders::one_f_one_b(self.stages, micro_batches)),
            PipelineSchedule::Interleaved1F1B { chunks_per_stage } => {
                Ok(orders::interleaved_1f1b(self.stages, *chunks_per_stage, micro_batches))
            }
            PipelineSchedule::ZeroBubbleH1 => Ok(orders::zero_bubble_h1(self.stages, micro_batches)),
            PipelineSchedule::ZeroBubbleV => Ok(orders::zero_bubble_v(self.stages, micro_batches)),
            PipelineSchedule::LoopedBreadthFirst { chunks_per_stage } => {
                Ok(orders::looped_breadth_first(self.stages, *chunks_per_stage, micro_batches))
            }
            PipelineSchedule::Custom(actions) => {
                let found = actions.stages.iter().flatten().map(|action| action.micro_batch.saturating_add(1)).max();
                match found.unwrap_or_default() {
                    found if found == micro_batches => Ok(actions.clone()),
                    found => Err(ScheduleError::MicroBatches { found, expected: micro_batches }),
                }
            }
        }
    }
}

fn check_counts(stages: usize, schedule: &PipelineSchedule) -> Result<(), ScheduleError> {
    match schedule {
        _ if stages == 0 => Err(ScheduleError::Zero("stage")),
        PipelineSchedule::Custom(actions) if actions.stages.len() != stages => {
            Err(ScheduleError::Stages { found: actions.stages.len(), expected: stages })
        }
        schedule if schedule.chunks(stages) == 0 => Err(ScheduleError::Zero("chunk per stage")),
        _ => Ok(()),
    }
}

/// Every chunk of a custom schedule is on exactly one stage.
fn check_placement(actions: &Actions, chunks: usize) -> Result<(), ScheduleError> {
    let mut stages_of = vec![Vec::new(); chunks];
    for (stage, actions) in actions.stages.iter().enumerate() {
        for action in actions {
            let stages = &mut stages_of[action.chunk];
            if stages.last() != Some(&stage) {
                stages.push(stage);
            }
        }
    }
    match stages_of.iter().position(|stages| stages.len() != 1) {
        Some(chunk) => Err(ScheduleError::Placement { chunk, stages: stages_of.swap_remove(chunk) }),
        None => Ok(()),
    }
}
