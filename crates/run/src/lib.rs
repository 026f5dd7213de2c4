//! Runs a recipe: the training loop, and everything around the step.
//!
//! [`run()`] opens the data and the checkpoint store, creates or resumes the trainer, and then repeats: a step, its log entry,
//! evaluation, checkpoint, trace. Between the two halves of a step it looks for spikes, spot-checks the gradients, and waits until
//! a save no longer reads what the update overwrites. The [`RunProbe`] observes the step from inside.
//!
//! [`profile()`], [`evaluate()`] and [`generate_text`] are the other things to do with a recipe. [`save`], [`SpikeDetector`] and
//! [`compute_checked_gradients`] also serve training loops without a recipe.

#![forbid(unsafe_code)]

mod advice;
mod agreement;
pub mod build;
mod check_collectives;
pub mod data;
mod device;
mod device_counts;
mod error;
mod evaluate;
mod expected_traffic;
mod fault_injection;
mod fingerprint;
mod host;
mod inference;
mod loader;
mod lr_range_test;
pub mod memory_estimate;
pub mod memory_limit;
mod memory_probe;
mod meter;
mod out_of_memory;
mod out_of_memory_report;
mod peak_flops;
mod phase;
mod plan_pipeline;
mod position;
mod profile;
mod requests;
mod resume;
mod rollback;
mod run;
mod run_log;
mod run_probe;
mod saver;
mod setup;
mod snapshot;
mod spike;
mod spike_detector;
mod spot_check;
mod spot_check_failure;
mod step_costs;
mod take_snapshot;
mod trace;

pub use advice::Recommendation;
pub use check_collectives::{CheckedOperation, check_collectives};
pub use device_counts::DeviceCounts;
pub use error::{Error, Result};
pub use evaluate::EvaluationMetrics;
pub use fault_injection::{FaultInjection, FaultKind};
pub use inference::{GenerationRequest, evaluate, generate_text};
pub use memory_probe::PhaseMemory;
pub use out_of_memory_report::{MemoryInUse, OutOfMemoryReport};
pub use phase::{Phase, Position};
pub use plan_pipeline::{PlanRequest, plan_pipeline};
pub use position::PositionTracker;
pub use profile::{OffloadedBytes, ProfileOptions, ProfileReport, profile};
pub use requests::{PlannedTrace, Requests, StepRange};
pub use run::{RunOutcome, StepLine, run};
pub use run_probe::RunProbe;
pub use saver::save;
pub use spike::{GradientShare, OnSpike, Spike, SpikedMetric};
pub use spike_detector::SpikeDetector;
pub use spot_check::{RankBatches, compute_checked_gradients};
pub use spot_check_failure::SpotCheckFailure;
pub use step_costs::{Link, StepCosts, UnitTimes, describe_simulated_step};
pub use trace::WrittenTrace;
