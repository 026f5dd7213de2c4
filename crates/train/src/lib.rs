//! The training step.
//!
//! [`Trainer::step`] executes a [`Program`](shardwise_plan::program::Program) on two screens: it walks the units of a model forward and
//! backward, gathers and releases their parameters, reduces their gradients and runs the optimizer. It has two halves, [`Trainer::compute_gradients`] and
//! [`Trainer::apply_update`]; whoever wants to look at the gradients or to wait before the update does so in between. A
//! [`Probe`] observes the step from inside. [`Trainer::train`] is the training loop for your own [`Source`].
//!
//! ```
//! use std::sync::Arc;
//!
//! use shardwise_model::{Batch, LlamaConfig, Model};
//! use shardwise_torch::tch::Tensor;
//! use shardwise_train::{Options, Ranks, Schedule, Trainer, init};
//! use shardwise_zero::{AdamW, Optimizer, Sharding};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ranks = Ranks::sharded(Arc::new(shardwise_comm::single::group()));
//! let options = Options::new(Sharding::stage(3)?, Optimizer::AdamW(AdamW::default()), Schedule::constant(1e-3));
//! let model = Model::from_config(LlamaConfig::new(32, 16, 1, 2, 40))?;
//! let mut trainer = Trainer::new(model, ranks, options, &mut init::from_seed(1))?;
//!
//! let tokens = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6]).view([1, 8]);
//! let batch = Batch::new(tokens.narrow(1, 0, 7), tokens.narrow(1, 1, 7));
//! let first = trainer.step(&[batch])?;
//! println!("loss {:.3}, {} tokens, gradient norm {:.3}", first.loss, first.tokens, first.grad_norm);
//! assert_eq!(first.tokens, 7);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod accumulate;
mod check_layers;
mod context_groups;
mod costs;
mod count_tokens;
mod error;
mod evaluate;
mod exchange;
mod expert_biases;
mod expert_counts;
mod expert_groups;
mod generate;
pub mod init;
mod loss_scale;
mod message_groups;
mod nonfinite;
mod offload;
mod offloaded_inputs;
mod options;
mod own_units;
mod partitioned_inputs;
mod probe;
mod progress;
mod read_values;
mod report;
mod shard_model;
mod share_output;
mod skip_update;
mod source;
mod stage_messages;
mod state;
mod step;
mod step_programs;
mod step_values;
mod tensor_group;
mod unit_specs;
mod update;

pub use context_groups::ContextGroups;
pub use costs::memory_costs;
pub use error::{Error, Result, SourceError};
pub use evaluate::Evaluation;
pub use expert_groups::ExpertGroups;
pub use generate::{Sampling, generate};
pub use loss_scale::LossScale;
pub use nonfinite::{NonFiniteValue, OnNonFinite};
pub use options::{OffloadPlace, Offloading, Options, Ranks};
pub use probe::{Probe, StepPhase};
pub use progress::{Progress, SkippedBatch};
pub use report::{Gradients, Report};
pub use shardwise_plan::DynamicScale;
pub use shardwise_plan::pipeline::PipelineSchedule;
pub use shardwise_plan::program::ActivationCheckpointing;
pub use shardwise_plan::schedule::{Kind, LrAndMomentum, Schedule};
pub use source::{BatchSize, Source};
pub use state::{TensorLease, checkpoint_layouts};
pub use step::Trainer;
pub use step_programs::{checked_programs, stages_of_units};
pub use step_values::BeforeUpdate;
pub use unit_specs::{StepShape, unit_specs};
