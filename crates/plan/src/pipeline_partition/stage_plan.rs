//! The result of partitioning: stages with their costs.

use std::fmt;
use std::ops::Range;

/// A partition of the units into pipeline stages. Prints as a table.
#[derive(Clone, Debug, PartialEq)]
pub struct StagePlan {
    /// The stages, in the order of the units.
    pub stages: Vec<PlannedStage>,
    /// The number of workers that were available. With uneven replication, some may be idle.
    pub workers: usize,
    /// The time of the slowest stage per micro-batch of the whole job.
    pub bottleneck_s: f64,
    /// Whether a mesh has this shape: all stages have equally many replicas, and no worker is idle.
    pub is_runnable: bool,
}

/// A stage and what it costs; the documentation of [the module](super) has the formulas.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedStage {
    /// Its units.
    pub units: Range<usize>,
    /// The number of workers that run it.
    pub replicas: usize,
    /// The number of micro-batches whose activations a worker holds at most.
    pub in_flight: usize,
    /// The time of its forward and backward passes, divided among its replicas.
    pub compute_s: f64,
    /// The time of the messages at its slower boundary, divided among its replicas.
    pub transfer_s: f64,
    /// The time of its gradient all-reduce, divided among the micro-batches that it is for.
    pub reduce_s: f64,
    /// The state and activations on each of its workers.
    pub memory_bytes: usize,
}

impl PlannedStage {
    /// The time that the stage takes per micro-batch of the whole job.
    pub fn time_s(&self) -> f64 {
        (self.compute_s + self.reduce_s).max(self.transfer_s)
    }
}

impl StagePlan {
    /// The plan that has these stages.
    pub(super) fn new(stages: Vec<PlannedStage>, workers: usize) -> Self {
        let bottleneck_s = stages.iter().map(PlannedStage::time_s).fold(0., f64::max);
        let has_equal_stages = stages.windows(2).all(|pair| pair[0].replicas == pair[1].replicas);
        let used: usize = stages.iter().map(|stage| stage.replicas).sum();
        StagePlan { stages, workers, bottleneck_s, is_runnable: has_equal_stages && used == workers }
    }

    /// The memory of the fullest worker.
    pub fn memory_bytes(&self) -> usize {
        self.stages.iter().map(|stage| stage.memory_bytes).max().unwrap_or(0)
    }

    /// The number of workers that run no stage.
    pub fn idle_workers(&self) -> usize {
        self.workers - self.stages.iter().map(|stage| stage.replicas).sum::<usize>()
    }
}

impl fmt::Display for StagePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |count: usize, noun: &str| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
        let stages = count(self.stages.len(), "stage");
        write!(f, "{stages} on {}", count(self.workers, "worker"))?;
        if self.idle_workers() > 0 {
            write!(f, " ({} idle)", self.idle_workers())?;
        }
        let bottleneck = format_seconds(self.bottleneck_s);
        writeln!(f, ", {bottleneck} per micro-batch{}", if self.is_runnable { "" } else { ", for comparison only" })?;
        writeln!(f, "stage      units  replicas  in flight     compute      reduce    transfer      memory")?;
        for (index, stage) in self.stages.iter().enumerate() {
            writeln!(
                f,
                "{index:>5}{:>11}{:>10}{:>11}{:>12}{:>12}{:>12}{:>12}",
                format!("{}-{}", stage.units.start, stage.units.end - 1),
                stage.replicas,
                stage.in_flight,
                format_seconds(stage.compute_s),
                format_seconds(stage.reduce_s),
                format_seconds(stage.transfer_s),
                format_bytes(stage.memory_bytes),
            )?;
        }
        Ok(())
    }
}

fn format_seconds(seconds: f64) -> String {
    match seconds {
        0. => "0".to_string(),
        _ if seconds < 1e-3 => format!("{:.3} µs", seconds * 1e6),
        _ if seconds < 1. => format!("{:.3} ms", seconds * 1e3),
        _ => format!("{seconds:.3} s"),
    }
}

pub(super) fn format_bytes(bytes: usize) -> String {
    match bytes as f64 {
        amount if amount < 1e3 => format!("{bytes} B"),
        amount if amount < 1e6 => format!("{:.2} kB", amount / 1e3),
        amount if amount < 1e9 => format!("{:.2} MB", amount / 1e6),
        amount => format!("{:.2} GB", amount / 1e9),
    }
}
