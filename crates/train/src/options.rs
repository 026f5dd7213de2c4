//! The options of a trainer, and its groups of ranks.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use shardwise_comm::{Group, ReduceOp};
use shardwise_plan::pipeline::PipelineSchedule;
use shardwise_plan::program::{ActivationCheckpointing, Codec, GroupKind, Layout, Place, Policy, Tier};
use shardwise_plan::schedule::Schedule;
use shardwise_plan::{Axis, Dtype, DynamicScale, Mesh};
use shardwise_torch::Block;
use shardwise_torch::tch::Device;
use shardwise_zero::{Groups, Optimizer, Precision, Sharding};

use crate::context_groups::ContextGroups;
use crate::error::{Error, Result};
use crate::expert_groups::ExpertGroups;
use crate::loss_scale::{self, LossScale};
use crate::message_groups::MessageGroups;
use crate::nonfinite::OnNonFinite;

/// Where something is while a rank does not need it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OffloadPlace {
    /// In the host's memory, for ranks that compute on a device with memory of its own.
    Host,
    /// In a file in this folder, for ranks that compute on a CPU.
    Disk(PathBuf),
}

impl OffloadPlace {
    fn tier(&self) -> Tier {
        match self {
            OffloadPlace::Host => Tier::Host,
            OffloadPlace::Disk(_) => Tier::Disk,
        }
    }
}

/// What is elsewhere while a rank does not need it, because it does not fit in memory. It has the same bits as in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offloading {
    /// Masters and optimizer state. A unit's are in memory only while it is updated.
    pub optimizer: Option<OffloadPlace>,
    /// This rank's shards of the parameters. A unit's is in memory only until it is gathered, and while it is updated. Needs sharded
    /// parameters (stage 3).
    pub parameters: Option<OffloadPlace>,
    /// Gradients, from their reduction to the update.
    pub gradients: Option<OffloadPlace>,
    /// The inputs of units, from their forward passes until they are recomputed. Needs [`ActivationCheckpointing::Full`].
    pub activations: Option<OffloadPlace>,
}

impl Offloading {
    fn places(&self) -> impl Iterator<Item = &OffloadPlace> {
        let Offloading { optimizer, parameters, gradients, activations } = self;
        [optimizer, parameters, gradients, activations].into_iter().flatten()
    }
}

/// The options of a trainer.
#[derive(Clone, Debug)]
pub struct Options {
    /// What is sharded; corresponds to the ZeRO stage.
    pub sharding: Sharding,
    /// The data types of parameters and gradients.
    pub precision: Precision,
    /// Which activations the forward pass keeps for the backward pass.
    pub activation_checkpointing: ActivationCheckpointing,
    /// Whether to reduce gradients after each micro-batch instead of once per step. This needs sharded gradients: a rank then
    /// keeps only its shards, at the cost of one reduction per micro-batch. Otherwise a rank accumulates the unsharded gradients
    /// of all units if a step has more than one micro-batch.
    pub reduce_each_micro_batch: bool,
    /// How many units to gather ahead of the one that computes, and to reduce behind it. At stage 3 each costs the memory of an
    /// unsharded unit: parameters ahead, gradients behind. With 0, ranks compute and communicate in turn, except for the
    /// all-gather of updated parameters at stages 1 and 2.
    pub prefetch: usize,
    /// Whether the ranks that share a layer each keep their own part of the sequence outside of attention and MLP (sequence
    /// parallelism). No effect without tensor parallelism.
    pub sequence_parallel: bool,
    /// Whether the ranks that share a layer compute while they communicate: parts of matrix products in the forward pass, and gradients
    /// of weights in the backward pass, unless a schedule splits it. Changes no bit. No effect without tensor parallelism.
    pub async_tensor_parallel: bool,
    /// The order in which the stages of a pipeline work on micro-batches. No effect without pipeline parallelism.
    pub pipeline_schedule: PipelineSchedule,
    /// The units of each chunk of the pipeline: of each stage, if a stage has one chunk. By default, chunks have equally many units.
    pub pipeline_chunks: Option<Vec<Range<usize>>>,
    /// Whether the gradient of a tied parameter is the sum of each unit's share over all micro-batches, instead of the sum over
    /// micro-batches of both. A pipeline whose stages share the parameter adds it up like this, so this makes other runs comparable.
    pub sum_tied_shares_apart: bool,
    /// The optimizer. The schedule sets its learning rate.
    pub optimizer: Optimizer,
    /// The learning rate schedule.
    pub schedule: Schedule,
    /// Gradient clipping: gradients with a larger global norm are scaled down to this norm.
    pub max_grad_norm: Option<f64>,
    /// The loss scale, for f16.
    pub loss_scale: LossScale,
    /// Whether to update each unit in the backward pass, as soon as its gradients are reduced. Changes no bit. Gradients then take the
    /// memory of a few units if a step has one micro-batch, and updates overlap with the backward pass. Nothing may depend on all
    /// gradients: no clipping, no dynamic loss scale, and no skipping of updates.
    pub update_in_backward: bool,
    /// Whether updates wait for the next step, which updates each unit just before its forward pass. Changes no bit. Updates, and what they
    /// fetch and store, then overlap with forward passes, and gradients stay until then. With [`Options::update_in_backward`], every third
    /// unit waits, or every fourth if forward passes are repeated, and the others are updated in the backward pass.
    ///
    /// Evaluations, generation and checkpoints finish what is left first; so must whoever reads parameters otherwise
    /// ([`Trainer::finish_update`](crate::Trainer::finish_update)).
    pub update_in_forward: bool,
    /// How parameters travel to the passes of training steps. [`Codec::Int8`] quantizes them for these passes: a quarter of the bytes in f32,
    /// and half in bf16. Needs sharded parameters (stage 3) in f32 or bf16, on CPUs.
    pub gather_codec: Codec,
    /// What to do if the loss or a gradient is not finite.
    pub on_nonfinite: OnNonFinite,
    /// What is offloaded, and where to.
    pub offload: Offloading,
    /// The device of this rank.
    pub device: Device,
}

impl Options {
    /// Default options: f32, one unit of prefetch, no clipping, stop if values are not finite.
    pub fn new(sharding: Sharding, optimizer: Optimizer, schedule: Schedule) -> Self {
        Options {
            sharding,
            precision: Precision::F32,
            activation_checkpointing: ActivationCheckpointing::None,
            reduce_each_micro_batch: false,
            prefetch: 1,
            sequence_parallel: true,
            async_tensor_parallel: true,
            pipeline_schedule: PipelineSchedule::OneFOneB,
            pipeline_chunks: None,
            sum_tied_shares_apart: false,
            optimizer,
            schedule,
            max_grad_norm: None,
            loss_scale: LossScale::Fixed(1.),
            update_in_backward: false,
            update_in_forward: false,
            gather_codec: Codec::None,
            on_nonfinite: OnNonFinite::Stop,
            offload: Offloading::default(),
            device: Device::Cpu,
        }
    }

    /// How a step with this many micro-batches is carried out.
    pub fn policy(&self, micro_batches: usize) -> Policy {
        Policy {
            sharding: self.sharding,
            prefetch: self.prefetch,
            activation_checkpointing: self.activation_checkpointing,
            reduce_each_micro_batch: self.reduce_each_micro_batch,
            micro_batches,
            update_in_backward: self.update_in_backward,
            update_in_forward: self.update_in_forward,
            gather_codec: self.gather_codec,
            optimizer_tier: self.offload.optimizer.as_ref().map(OffloadPlace::tier),
            parameter_tier: self.offload.parameters.as_ref().map(OffloadPlace::tier),
            gradient_tier: self.offload.gradients.as_ref().map(OffloadPlace::tier),
            activation_tier: self.offload.activations.as_ref().map(OffloadPlace::tier),
        }
    }

    /// Whether a rank at this place among those that share a layer keeps only its own part of the sequence.
    pub(crate) fn splits_sequence(&self, tensor: Place) -> bool {
        self.sequence_parallel && tensor.size > 1
    }

    /// Fails if the options are invalid or contradict each other.
    pub fn check(&self) -> Result<()> {
        let refuse = |problem: &str| Err(Error::Options(problem.to_string()));
        if self.reduce_each_micro_batch && !self.sharding.gradients {
            return refuse("reduce_each_micro_batch needs sharded gradients: use stage 2 or 3, or set it to false");
        }
        if self.update_in_backward {
            self.check_update_in_backward()?;
        }
        if self.update_in_forward && self.offload.parameters.is_some() {
            return refuse(
                "update_in_forward: parameters that are offloaded are fetched before the update could change them",
            );
        }
        let is_on_cpu = self.device == Device::Cpu;
        if self.gather_codec != Codec::None {
            self.check_gather_codec()?;
        }
        if is_on_cpu && self.offload.places().any(|place| *place == OffloadPlace::Host) {
            return refuse(
                "ranks that compute on CPUs have everything in the host's memory already: offload to a disk",
            );
        }
        if !is_on_cpu && self.offload.places().any(|place| *place != OffloadPlace::Host) {
            return refuse(
                "only ranks that compute on CPUs can offload to a disk so far: offload to the host's memory",
            );
        }
        if self.offload.parameters.is_some() && !self.sharding.parameters {
            return refuse("only sharded parameters can be offloaded: use stage 3");
        }
        if self.offload.activations.is_some() && self.activation_checkpointing != ActivationCheckpointing::Full {
            return refuse("only full activation checkpointing keeps activations that can be offloaded");
        }
        let states = self.optimizer.state_names();
        let good = |name: &str| !name.is_empty() && !name.contains('/');
        if let Some(bad) = (0..states.len()).find(|&at| !good(states[at]) || states[..at].contains(&states[at])) {
            return refuse(&format!(
                "the optimizer has a state named {:?}: names must be unique, not empty, and without '/', because checkpoints \
                 use them",
                states[bad],
            ));
        }
        let Precision { param_dtype, reduce_dtype } = self.precision;
        let floats = [Dtype::F64, Dtype::F32, Dtype::Bf16, Dtype::F16];
        for (what, dtype) in [("parameters", param_dtype), ("gradients", reduce_dtype)] {
            if !floats.contains(&dtype) {
                return refuse(&format!("{what} in {dtype} cannot be trained; use f32, bf16, f16 or f64"));
            }
        }
        if (param_dtype == Dtype::F64) != (reduce_dtype == Dtype::F64) {
            return refuse(&format!(
                "parameters in {param_dtype} cannot be trained with gradients in {reduce_dtype}; use f64 for both or for neither"
            ));
        }
        if reduce_dtype == Dtype::F16 && param_dtype != Dtype::F16 {
            return refuse("gradients in f16 overflow unless parameters are f16, too; use f32 or bf16 for them");
        }
        let (LossScale::Fixed(value) | LossScale::Dynamic(DynamicScale { initial: value, .. })) = self.loss_scale;
        let is_usable = value > 0. && value <= loss_scale::LARGEST;
        if !is_usable {
            return refuse(&format!("a loss scale of {value} cannot be used; it must be positive and fit into f32"));
        }
        Ok(())
    }

    /// Fails if parameters cannot be gathered as the options say.
    fn check_gather_codec(&self) -> Result<()> {
        let problem = if self.gather_codec != Codec::Int8 {
            "parameters can be gathered as int8 only"
        } else if !self.sharding.parameters {
            "only sharded parameters are gathered for passes: use stage 3"
        } else if !matches!(self.precision.param_dtype, Dtype::F32 | Dtype::Bf16) {
            "only parameters in f32 or bf16 can be quantized"
        } else if self.device != Device::Cpu {
            "only ranks that compute on CPUs can quantize so far"
        } else {
            return Ok(());
        };
        Err(Error::Options(format!("gather_codec: {problem}")))
    }

    /// Fails if an update depends on the gradients of all units, or gradients are offloaded that are used up at once.
    fn check_update_in_backward(&self) -> Result<()> {
        let problem = if self.max_grad_norm.is_some() {
            "clipping needs the norm of all gradients before the first update"
        } else if matches!(self.loss_scale, LossScale::Dynamic(_)) {
            "a dynamic loss scale skips updates if any gradient overflows"
        } else if self.on_nonfinite == OnNonFinite::Skip {
            "updates with gradients that are not finite could not be skipped"
        } else if self.offload.gradients.is_some() {
            "an update in the backward pass uses gradients up before they could be offloaded"
        } else {
            return Ok(());
        };
        Err(Error::Options(format!("update_in_backward: {problem}")))
    }
}

/// The ranks that train together.
#[derive(Clone)]
pub struct Ranks {
    /// All ranks. This group communicates values in host memory: losses, counts, norms.
    pub world: Arc<Group>,
    /// The groups for sharding and replication, which communicate tensors on the device.
    pub groups: Groups,
    /// The groups of parameters that all tensor-parallel ranks have: they are sharded among all ranks of a replica.
    pub replicated: Groups,
    /// The ranks that share each layer (tensor parallelism).
    pub tensor: Arc<Group>,
    /// The ranks that divide sequences (context parallelism).
    pub context: ContextGroups,
    /// The ranks that hold different experts of a layer (expert parallelism), and those that shard the same experts.
    pub experts: ExpertGroups,
    /// The ranks that hold the stages of one pipeline, by stage.
    pub pipeline: Arc<Group>,
    /// The groups in which these ranks send activations and their gradients to each other.
    pub(crate) messages: MessageGroups,
    /// All ranks of this rank's stage. This group communicates values in host memory.
    pub stage: Arc<Group>,
    mesh: Mesh,
}

impl Ranks {
    /// One replica, sharded among all ranks, with a single group for everything. A group runs one call at a time, so the next
    /// step's token count waits until all updated parameters are gathered (stages 1 and 2). To train on several ranks, use
    /// [`Ranks::on_mesh`], which creates separate groups.
    pub fn sharded(world: Arc<Group>) -> Self {
        let mesh = Mesh::new(&[(Axis::Shard, world.size())]).expect("a world has at least one rank");
        let groups = Groups::sharded(world.clone());
        let [tensor, pipeline] = [(); 2].map(|()| Arc::new(shardwise_comm::single::group()));
        let messages = MessageGroups::same(&pipeline);
        let (replicated, stage, context) = (groups.clone(), world.clone(), ContextGroups::none());
        let experts = ExpertGroups::none(&groups, &tensor);
        Ranks { replicated, groups, stage, world, tensor, context, experts, pipeline, messages, mesh }
    }

    /// Hybrid sharding: `replicas` replicas, each sharded among consecutive ranks. Calls of different groups run concurrently. All
    /// ranks call this together.
    pub fn hybrid(world: Arc<Group>, replicas: usize) -> Result<Self> {
        Ranks::parallel(world, replicas, 1)
    }

    /// `replicas` replicas whose layers are each shared by `tensor` consecutive ranks. What is left of the ranks shards each
    /// replica. All ranks call this together.
    pub fn parallel(world: Arc<Group>, replicas: usize, tensor: usize) -> Result<Self> {
        let mesh = Mesh::divide(world.size(), &[(Axis::Replicate, replicas), (Axis::Tensor, tensor)])
            .map_err(|error| Error::Options(error.to_string()))?;
        Ranks::on_mesh(world, mesh)
    }

    /// The ranks of a mesh. All ranks call this together.
    pub fn on_mesh(world: Arc<Group>, mesh: Mesh) -> Result<Self> {
        let along = |axes: &[Axis]| -> Result<Arc<Group>> { Ok(Arc::new(world.split_along(&mesh, axes)?)) };
        let groups = Groups { shard: along(GroupKind::Shard.axes())?, replicate: along(&[Axis::Replicate])? };
        let (tensor, replicated) = match mesh.size(Axis::Tensor) {
            1 => (Arc::new(shardwise_comm::single::group()), groups.clone()),
            _ => {
                let (shard, replicate) = (along(GroupKind::ShardTensor.axes())?, groups.replicate.clone());
                (along(&[Axis::Tensor])?, Groups { shard, replicate })
            }
        };
        let (pipeline, stage) = match mesh.size(Axis::Pipeline) {
            1 => (Arc::new(shardwise_comm::single::group()), world.clone()),
            _ => {
                let within: Vec<Axis> = Axis::ALL.into_iter().filter(|&axis| axis != Axis::Pipeline).collect();
                (along(&[Axis::Pipeline])?, along(&within)?)
            }
        };
        let messages = MessageGroups::same(&pipeline);
        let unless_single = |axis| match mesh.size(axis) {
            1 => Ok(Arc::new(shardwise_comm::single::group())),
            _ => along(&[axis]),
        };
        let context = ContextGroups { ulysses: unless_single(Axis::Ulysses)?, ring: unless_single(Axis::Ring)? };
        let experts = match mesh.size(Axis::Expert) {
            1 => ExpertGroups::none(&groups, &tensor),
            _ => {
                let exchange = along(&[Axis::Expert])?;
                let parts = match mesh.size(Axis::Tensor) {
                    1 => exchange.clone(),
                    _ => along(&[Axis::Expert, Axis::Tensor])?,
                };
                let (shard, replicate) = (along(GroupKind::ExpertShard.axes())?, groups.replicate.clone());
                ExpertGroups { exchange, groups: Groups { shard, replicate }, parts }
            }
        };
        Ok(Ranks { world, groups, replicated, tensor, context, experts, pipeline, messages, stage, mesh })
    }

    /// The ranks of this stage as if there were no others: those of a model that is not cut into stages, with the same data
    /// parallelism. Every stage can train the whole model with them, to be compared with the pipeline.
    #[must_use]
    pub fn of_stage(&self) -> Self {
        let sizes = Axis::ALL.map(|axis| (axis, if axis == Axis::Pipeline { 1 } else { self.mesh.size(axis) }));
        let mesh = Mesh::new(&sizes).expect("a part of a valid mesh");
        let pipeline = Arc::new(shardwise_comm::single::group());
        let messages = MessageGroups::same(&pipeline);
        Ranks { world: self.stage.clone(), pipeline, messages, mesh, ..self.clone() }
    }

    /// Fails if a call of one of the groups has failed; see [`Group::check`].
    pub(crate) fn check(&self) -> Result<()> {
        let groups = [&self.groups, &self.replicated, &self.experts.groups];
        let groups = groups.map(|groups| [&groups.shard, &groups.replicate]);
        let context = [&self.context.ulysses, &self.context.ring, &self.experts.exchange, &self.experts.parts];
        let others = [&self.tensor, &self.pipeline].into_iter().chain(context).chain(self.messages.all());
        let mut all = groups.iter().flatten().copied().chain(others);
        Ok(all.try_for_each(|group| group.check())?)
    }

    /// The mesh of all ranks.
    pub fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// The number of ranks that read different samples.
    pub fn data_size(&self) -> usize {
        self.stage.size() / self.ranks_per_sample()
    }

    /// The number of ranks that read the same samples: those that share a layer, or divide sequences.
    pub(crate) fn ranks_per_sample(&self) -> usize {
        self.tensor.size() * self.context.size()
    }

    /// This rank's index among those that read different samples. The ranks that share a layer, those that divide sequences, and those
    /// that hold the stages of a pipeline, have the same.
    pub fn data_rank(&self) -> usize {
        self.stage.rank() / self.ranks_per_sample()
    }

    /// The rank that reads the samples of `data_rank`, and has the same stage and the same parts of layers as this rank.
    pub fn counterpart(&self, data_rank: usize) -> usize {
        self.stage.ranks().rank_at(data_rank * self.ranks_per_sample() + self.stage.rank() % self.ranks_per_sample())
    }

    /// Where this rank is among the others, and the size of the elements that they send.
    pub fn layout(&self, precision: Precision) -> Layout {
        let (parameter_bytes, gradient_bytes) = (precision.param_dtype.bytes(), precision.reduce_dtype.bytes());
        Layout::of_rank(&self.mesh, self.world.rank(), parameter_bytes, gradient_bytes)
    }

    /// The smallest `own` of all ranks, and the first rank that has it. All ranks call it together.
    pub fn first_on_any_rank(&self, own: Option<usize>) -> Result<Option<(usize, usize)>> {
        let (rank, ranks) = (self.world.rank(), self.world.size());
        let key = own.map_or(i64::MIN, |own| -((own * ranks + rank) as i64));
        let first = self.world.all_reduce("fault", ReduceOp::Max, vec![key]).wait()?[0];
        Ok((first != i64::MIN).then(|| (-first as usize / ranks, -first as usize % ranks)))
    }

    /// The ranks of a mesh with this rank's tensors on `device`, a GPU.
    pub fn on_gpu(world: Arc<Group>, mesh: Mesh, device: Device) -> Result<Self> {
        Ranks::on_device(world, mesh, |control| shardwise_comm::nccl::connect(control, device))
    }

    /// The ranks of a mesh with this rank's tensors on a device. `connect` turns a group of CPU ranks into one that communicates the
    /// memory of the device. All ranks call this together.
    pub fn on_device(
        world: Arc<Group>,
        mesh: Mesh,
        connect: impl Fn(Group) -> shardwise_comm::Result<Group>,
    ) -> Result<Self> {
        if mesh.context_size() > 1 {
            return Err(Error::Options("context parallelism has been written for CPUs only".into()));
        }
        if mesh.size(Axis::Expert) > 1 {
            return Err(Error::Options("expert parallelism has been written for CPUs only".into()));
        }
        let Ranks { world, groups, replicated, tensor, context, experts, pipeline, messages, stage, mesh } =
            Ranks::on_mesh(world, mesh)?;
        drop((messages, experts));
        let over = |group: Arc<Group>| -> Result<Arc<Group>> {
            let control = Arc::into_inner(group).expect("on_mesh returned the only reference");
            Ok(Arc::new(connect(control)?))
        };
        let over_unless_single = |group: Arc<Group>| if group.size() == 1 { Ok(group) } else { over(group) };
        let Groups { shard, replicate } = groups;
        let all_shards = Some(replicated.shard).filter(|_| tensor.size() > 1);
        drop(replicated.replicate);
        let groups = Groups { shard: over(shard)?, replicate: over(replicate)? };
        let replicated = match all_shards {
            Some(shard) => Groups { shard: over(shard)?, replicate: groups.replicate.clone() },
            None => groups.clone(),
        };
        let messages = match pipeline.size() {
            1 => MessageGroups::same(&pipeline),
            _ => MessageGroups::new(|| {
                let group = over(Arc::new(world.split_along(&mesh, &[Axis::Pipeline])?))?;
                connect_pairs(&group)?;
                Ok(group)
            })?,
        };
        let (tensor, pipeline) = (over_unless_single(tensor)?, over_unless_single(pipeline)?);
        let experts = ExpertGroups::none(&groups, &tensor);
        Ok(Ranks { world, groups, replicated, tensor, context, experts, pipeline, messages, stage, mesh })
    }
}

/// Lets every two ranks of a group exchange a message. NCCL connects them when they first do, and makes each wait for the other; in a
/// step, which stages exchange messages in an order of their own, that could be forever.
fn connect_pairs(group: &Group) -> Result<()> {
    let block = || Block::new(Dtype::U8, group.size(), group.device());
    let [send, receive] = [block(), block()];
    let fail = |error: shardwise_torch::Error| Error::Options(error.to_string());
    group.all_to_all("connect", send.map_err(fail)?, receive.map_err(fail)?).wait()?;
    Ok(())
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
