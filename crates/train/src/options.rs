//! How to train, and with whom.

use std::sync::Arc;

use shardwise_comm::Group;
use shardwise_model::Activations;
use shardwise_plan::{Axis, Dtype, Mesh};
use shardwise_torch::tch::Device;
use shardwise_zero::{Groups, Optimizer, Precision, Sharding};

use crate::{DynamicScale, Error, LossScale, OnNotFinite, OnOutlier, Result, Schedule, scale};

/// How to train.
#[derive(Clone, Debug)]
pub struct Options {
    /// What is sliced.
    pub sharding: Sharding,
    /// In which types numbers are kept and sent.
    pub precision: Precision,
    /// What the backward pass finds of the forward pass.
    pub recomputation: Recomputation,
    /// Where gradients of several micro-batches are added up.
    pub accumulation: Accumulation,
    /// How many units may be on their way ahead of the one that computes, and how many behind it. At stage 3 each costs the
    /// memory of a whole unit: parameters ahead, gradients behind. With 0 ranks compute and talk
    /// in turn, but for the gather of updated parameters at stages 1 and 2.
    pub units_in_flight: usize,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// How its rate moves.
    pub schedule: Schedule,
    /// The largest norm of all gradients together; larger ones are scaled down to it.
    pub clip_norm: Option<f64>,
    /// What the loss is multiplied by for the backward pass.
    pub loss_scale: LossScale,
    /// What to do when numbers are not finite.
    pub on_not_finite: OnNotFinite,
    /// What to do when they are, and far outside what they usually are.
    pub on_outlier: OnOutlier,
    /// Where this rank computes.
    pub device: Device,
}

impl Options {
    /// Plain settings: f32, one unit in flight, no clipping; stop when numbers are not finite.
    pub fn new(sharding: Sharding, optimizer: Optimizer, schedule: Schedule) -> Self {
        Options {
            sharding,
            precision: Precision::F32,
            recomputation: Recomputation::None,
            accumulation: Accumulation::Whole,
            units_in_flight: 1,
            optimizer,
            schedule,
            clip_norm: None,
            loss_scale: LossScale::Fixed(1.),
            on_not_finite: OnNotFinite::Stop,
            on_outlier: OnOutlier::Report,
            device: Device::Cpu,
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |problem: &str| Err(Error::Options(problem.to_string()));
        if self.accumulation == Accumulation::Sharded && !self.sharding.gradients {
            return refuse(
                "sharded accumulation needs gradients that are sliced: use stage 2 or 3, or accumulation 'whole'",
            );
        }
        let states = self.optimizer.state_names();
        let good = |name: &str| !name.is_empty() && !name.contains('/');
        if let Some(place) = (0..states.len()).find(|&at| !good(states[at]) || states[..at].contains(&states[at])) {
            return refuse(&format!(
                "the optimizer keeps {:?}: names of its state are there once, and have no '/', for checkpoints use them",
                states[place],
            ));
        }
        let floats = [Dtype::F32, Dtype::Bf16, Dtype::F16];
        for (what, dtype) in [("parameters", self.precision.parameters), ("gradients", self.precision.gradients)] {
            if !floats.contains(&dtype) {
                return refuse(&format!("{what} in {dtype} cannot be trained; use f32, bf16 or f16"));
            }
        }
        if self.precision.gradients == Dtype::F16 && self.precision.parameters != Dtype::F16 {
            return refuse("gradients in f16 overflow where parameters are not f16; use f32 or bf16 for them");
        }
        let (LossScale::Fixed(value) | LossScale::Dynamic(DynamicScale { initial: value, .. })) = self.loss_scale;
        let is_usable = value > 0. && value <= scale::LARGEST;
        if !is_usable {
            return refuse(&format!("a loss scale of {value} spoils gradients; use a positive one that f32 can hold"));
        }
        Ok(())
    }
}

/// What is kept of a unit's forward pass for its backward pass. The numbers are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recomputation {
    /// What autograd wants, but for what is made again at once.
    None,
    /// What linear layers have put out; norms, attention and activation functions are computed again. About three tenths of the
    /// memory less, for a few hundredths more work.
    Selective,
    /// Its input alone; the rest is computed again. The least memory, for about a third more work.
    Full,
}

impl Recomputation {
    pub(crate) fn activations(self) -> Activations {
        match self {
            Recomputation::None | Recomputation::Full => Activations::Kept,
            Recomputation::Selective => Activations::Few,
        }
    }
}

/// Where the gradients of several micro-batches are added up: a trade of memory for traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulation {
    /// On every rank, whole, and reduced once a step. Where gradients are sliced, it costs the memory of all of them while a
    /// step has more than one micro-batch.
    Whole,
    /// On the ranks that own them: reduced after each micro-batch, so that only slices are ever kept. It costs a reduction
    /// per micro-batch.
    Sharded,
}

/// Who trains together.
#[derive(Clone)]
pub struct Ranks {
    /// All of them, for numbers in the host's memory: losses, counts, norms.
    pub world: Arc<Group>,
    /// Those among which memory of the device is sliced and replicated.
    pub groups: Groups,
}

impl Ranks {
    /// One replica, sliced among all ranks, with one group for everything. Its calls run one at a time, so the next step's token
    /// count waits until all updated parameters are gathered (stages 1 and 2). To train on several ranks, use
    /// [`Ranks::hybrid`] with one replica, which makes groups of their own.
    pub fn sharded(world: Arc<Group>) -> Self {
        Ranks { groups: Groups::sharded(world.clone()), world }
    }

    /// `replicas` replicas, each sliced among ranks that stand next to each other in the world. Calls of the world and of each
    /// of the groups go on beside each other. All ranks call this together.
    pub fn hybrid(world: Arc<Group>, replicas: usize) -> Result<Self> {
        if replicas == 0 || !world.size().is_multiple_of(replicas) {
            return Err(indivisible(world.size(), replicas));
        }
        let sizes = [(Axis::Replicate, replicas), (Axis::Shard, world.size() / replicas)];
        let mesh = Mesh::new(&sizes).map_err(|error| Error::Options(error.to_string()))?;
        let groups = Groups {
            shard: Arc::new(world.along(&mesh, &[Axis::Shard])?),
            replicate: Arc::new(world.along(&mesh, &[Axis::Replicate])?),
        };
        Ok(Ranks { world, groups })
    }

    /// The same ranks, whose memory is that of their GPU `device` (cargo feature `cuda`).
    #[cfg(feature = "cuda")]
    pub fn on_gpu(world: Arc<Group>, replicas: usize, device: usize) -> Result<Self> {
        let Ranks { world, groups } = Ranks::hybrid(world, replicas)?;
        let over = |group: Arc<Group>| -> Result<Arc<Group>> {
            let control = Arc::into_inner(group).expect("the group has just been made");
            Ok(Arc::new(shardwise_comm::nccl::over(control, device)?))
        };
        let Groups { shard, replicate } = groups;
        Ok(Ranks { world, groups: Groups { shard: over(shard)?, replicate: over(replicate)? } })
    }
}

pub(crate) fn indivisible(ranks: usize, replicas: usize) -> Error {
    Error::Options(format!("sharding.replicas: {ranks} ranks cannot be divided into {replicas} replicas"))
}

#[cfg(test)]
mod tests {
    use shardwise_zero::AdamW;

    use super::*;

    #[test]
    fn a_loss_scale_that_f32_cannot_hold_is_refused() {
        let with = |loss_scale| {
            let sharding = Sharding::stage(0).unwrap();
            let options = Options::new(sharding, Optimizer::AdamW(AdamW::default()), Schedule::constant(1e-3));
            Options { loss_scale, ..options }.check()
        };
        assert!(with(LossScale::DYNAMIC).is_ok());
        for value in [0., -2., 1e39, f64::INFINITY, f64::NAN] {
            for loss_scale in
                [LossScale::Fixed(value), LossScale::Dynamic(DynamicScale { initial: value, ..DynamicScale::DEFAULT })]
            {
                let error = with(loss_scale).unwrap_err().to_string();
                assert!(error.contains(&format!("a loss scale of {value}")), "{error}");
            }
        }
    }
}
