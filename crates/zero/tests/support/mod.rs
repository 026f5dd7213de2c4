//! Units with known values, and the same training with whole parameters in plain f32.

#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part, and a test may fail")]

use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{Group, mpi, single};
use shardwise_plan::{Axis, Dtype, Mesh};
use shardwise_torch::kind_of;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_zero::{
    Elements, Elementwise, Groups, Layout, OffloadTargets, Optimizer, ParameterSpec, Pool, Precision, ShardedUnit,
    Sharding,
};

pub(crate) const STAGES: [u8; 4] = [0, 1, 2, 3];

/// The ranks of a test: all of them, and how they shard and replicate units.
pub(crate) struct Ranks {
    pub(crate) world: Arc<Group>,
    pub(crate) groups: Groups,
}

impl Ranks {
    /// This process alone, without MPI.
    pub(crate) fn alone() -> Self {
        let world = Arc::new(single::group());
        Ranks { groups: Groups::sharded(world.clone()), world }
    }

    /// All ranks that the launcher has started, as one replica.
    pub(crate) fn launched(size: usize) -> Self {
        let options = mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() };
        let world = Arc::new(mpi::world(options).unwrap());
        assert_eq!(world.size(), size);
        Ranks { groups: Groups::sharded(world.clone()), world }
    }

    /// All ranks that the launcher has started, as two replicas.
    pub(crate) fn two_replicas(size: usize) -> Self {
        let Ranks { world, .. } = Ranks::launched(size);
        let mesh = Mesh::new(&[(Axis::Replicate, 2), (Axis::Shard, size / 2)]).unwrap();
        let shard = Arc::new(world.split_along(&mesh, &[Axis::Shard]).unwrap());
        let replicate = Arc::new(world.split_along(&mesh, &[Axis::Replicate]).unwrap());
        Ranks { groups: Groups { shard, replicate }, world }
    }

    /// The length of this rank's shard of `len` elements.
    pub(crate) fn shard_len(&self, len: usize) -> usize {
        self.groups.shard.partition(len).part_len(self.groups.shard.rank())
    }

    pub(crate) fn layout(&self, stage: u8, precision: Precision, optimizer: &Optimizer) -> Layout {
        Layout {
            groups: self.groups.clone(),
            parts: None,
            sharding: Sharding::stage(stage).unwrap(),
            precision,
            states: optimizer.states(),
            pool: Arc::new(Pool::new(Device::Cpu)),
            offload: OffloadTargets::default(),
        }
    }
}

pub(crate) fn spec(shape: &[i64], decays: bool, trainable: bool) -> ParameterSpec {
    ParameterSpec { shape: shape.to_vec(), decays, trainable, layout: 0, adds_gradient: true }
}

/// The number of elements of a parameter.
pub(crate) fn len_of(spec: &ParameterSpec) -> usize {
    spec.shape.iter().product::<i64>() as usize
}

/// The number of elements of all trainable, or of all frozen parameters.
pub(crate) fn total_len(specs: &[ParameterSpec], trainable: bool) -> usize {
    specs.iter().filter(|spec| spec.trainable == trainable).map(len_of).sum()
}

/// The initial value of an element. Has few bits, but more than bf16 has.
pub(crate) fn initial(parameter: usize, index: usize) -> f32 {
    ((parameter * 7919 + index * 104_729) % 4093) as f32 / 1024. - 2.
}

/// A rank's gradient of an element: a small integer, so that sums are exact in any order, even in bf16.
pub(crate) fn gradient(rank: usize, parameter: usize, index: usize, micro_batch: usize) -> f32 {
    ((rank * 37 + parameter * 11 + index * 5 + micro_batch * 3) % 17) as f32 - 8.
}

/// The sum of [`gradient`] over `ranks`.
pub(crate) fn sum_gradients(
    ranks: impl Iterator<Item = usize>,
    parameter: usize,
    index: usize,
    micro_batch: usize,
) -> f32 {
    ranks.map(|rank| gradient(rank, parameter, index, micro_batch)).sum()
}

/// A unit with the values of [`initial`].
pub(crate) fn new_unit(specs: &[ParameterSpec], layout: Layout) -> ShardedUnit {
    let unit = ShardedUnit::new("block.3", specs, &[layout], &mut |parameter, range, elements| {
        elements.write(range.map(|index| f64::from(initial(parameter, index))));
        Ok(())
    });
    unit.unwrap()
}

/// This rank's gradient of one parameter, as [`gradient`] defines it.
pub(crate) fn gradient_tensor(spec: &ParameterSpec, rank: usize, parameter: usize, micro_batch: usize) -> Tensor {
    let elements: Vec<f32> = (0..len_of(spec)).map(|index| gradient(rank, parameter, index, micro_batch)).collect();
    Tensor::from_slice(&elements).reshape(&spec.shape[..])
}

/// Adds the gradients of all trainable parameters.
pub(crate) fn add_gradients(unit: &mut ShardedUnit, specs: &[ParameterSpec], rank: usize, micro_batch: usize) {
    for (parameter, spec) in specs.iter().enumerate().filter(|(_, spec)| spec.trainable) {
        unit.add_gradient(parameter, &gradient_tensor(spec, rank, parameter, micro_batch)).unwrap();
    }
}

/// Reduces the gradients and waits for the sums.
pub(crate) fn reduce(unit: &mut ShardedUnit) {
    unit.start_reduce().unwrap();
    unit.finish_reduce().unwrap();
}

pub(crate) fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.detach().to_kind(Kind::Float).contiguous().view(-1)).unwrap()
}

/// The values of a gathered unit, by parameter.
pub(crate) fn values_of(unit: &ShardedUnit) -> Vec<Vec<f32>> {
    unit.parameters().iter().map(values).collect()
}

/// Why a parameter cannot be read, if it cannot.
pub(crate) fn read_error(unit: &ShardedUnit, parameter: usize) -> Option<String> {
    unit.parameters()[parameter].f_neg().err().map(|error| error.to_string())
}

/// The values as a unit computes with them.
pub(crate) fn rounded(elements: &[f32], dtype: Dtype) -> Vec<f32> {
    values(&Tensor::from_slice(elements).to_kind(kind_of(dtype)))
}

/// Sets parameters to their gradients, plus 0.5 if weight decay does not apply, and adds up the gradients. So a test can read
/// what the optimizer was given.
#[derive(Debug)]
pub(crate) struct Assign;

impl Elementwise for Assign {
    fn state_names(&self) -> &[&str] {
        &["sum"]
    }

    fn update(&self, elements: Elements) -> shardwise_torch::Result<()> {
        let Elements { mut parameters, grads, mut state, decays, .. } = elements;
        let _ = state[0].f_add_(&grads)?;
        parameters.f_copy_(&grads.f_add_scalar(assigned(0., decays))?)?;
        Ok(())
    }
}

/// What [`Assign`] sets an element to.
pub(crate) fn assigned(grad: f64, decays: bool) -> f64 {
    if decays { grad } else { grad + 0.5 }
}

/// The same training on one rank with whole parameters, written as plainly as possible.
pub(crate) struct Plain {
    specs: Vec<ParameterSpec>,
    pub(crate) values: Vec<Vec<f32>>,
    /// SGD's momentum, or the first moment.
    first: Vec<Vec<f32>>,
    second: Vec<Vec<f32>>,
    step: i32,
}

impl Plain {
    pub(crate) fn new(specs: &[ParameterSpec]) -> Self {
        let init = |(parameter, spec): (usize, &ParameterSpec)| -> Vec<f32> {
            (0..len_of(spec)).map(|index| initial(parameter, index)).collect()
        };
        let zeros: Vec<Vec<f32>> = specs.iter().map(|spec| vec![0.; len_of(spec)]).collect();
        Plain {
            specs: specs.to_vec(),
            values: specs.iter().enumerate().map(init).collect(),
            first: zeros.clone(),
            second: zeros,
            step: 0,
        }
    }

    /// Takes a step with these gradients, given a parameter and an index.
    pub(crate) fn update(&mut self, optimizer: &Optimizer, gradient: impl Fn(usize, usize) -> f32) {
        self.step += 1;
        for (parameter, spec) in self.specs.iter().enumerate().filter(|(_, spec)| spec.trainable) {
            let grads: Vec<f32> = (0..len_of(spec)).map(|index| gradient(parameter, index)).collect();
            let (values, first, second) =
                (&mut self.values[parameter], &mut self.first[parameter], &mut self.second[parameter]);
            match optimizer {
                Optimizer::Sgd(sgd) => {
                    let (lr, momentum, decay) = (sgd.lr as f32, sgd.momentum as f32, sgd.weight_decay as f32);
                    for ((value, direction), grad) in values.iter_mut().zip(first.iter_mut()).zip(grads) {
                        let decay = if spec.decays { *value * decay } else { 0. };
                        *direction = *direction * momentum + (grad + decay);
                        *value -= *direction * lr;
                    }
                }
                Optimizer::AdamW(adamw) => {
                    let decay = if spec.decays { (adamw.lr * adamw.weight_decay) as f32 } else { 0. };
                    let directions =
                        adam(&grads, first, second, self.step, [adamw.beta1, adamw.beta2, adamw.eps].map(|x| x as f32));
                    for (value, direction) in values.iter_mut().zip(directions) {
                        *value -= *value * decay + adamw.lr as f32 * direction;
                    }
                }
                Optimizer::Lamb(lamb) => {
                    let decay = if spec.decays { lamb.weight_decay as f32 } else { 0. };
                    let mut directions =
                        adam(&grads, first, second, self.step, [lamb.beta1, lamb.beta2, lamb.eps].map(|x| x as f32));
                    directions.iter_mut().zip(&*values).for_each(|(direction, value)| *direction += value * decay);
                    let trust = if spec.decays { norm(values) / norm(&directions) } else { 1. };
                    for (value, direction) in values.iter_mut().zip(directions) {
                        *value -= lamb.lr as f32 * trust * direction;
                    }
                }
                other => panic!("{other:?} has no plain version"),
            }
        }
    }
}

/// Updates Adam's moments, and returns the directions. The hyperparameters are beta1, beta2 and epsilon.
fn adam(grads: &[f32], first: &mut [f32], second: &mut [f32], step: i32, hyperparameters: [f32; 3]) -> Vec<f32> {
    let [beta1, beta2, eps] = hyperparameters;
    (0..grads.len())
        .map(|index| {
            first[index] = beta1 * first[index] + (1. - beta1) * grads[index];
            second[index] = beta2 * second[index] + (1. - beta2) * grads[index] * grads[index];
            let corrected = (second[index] / (1. - beta2.powi(step))).sqrt();
            first[index] / (1. - beta1.powi(step)) / (corrected + eps)
        })
        .collect()
}

fn norm(elements: &[f32]) -> f32 {
    elements.iter().map(|element| element * element).sum::<f32>().sqrt()
}

/// A seeded random number generator (splitmix64), the same on every rank.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}
