//! The bare baseline: the same model without sharding, with one graph, one backward pass, fused AdamW, and no communication.

use std::time::Duration;

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};
use shardwise_model::{Activations, Batch, Model, Pass};
use shardwise_plan::{Dtype, FloatsMut};
use shardwise_torch::autograd::{self, Graph};
use shardwise_torch::exclusive;
use shardwise_torch::optim::{AdamW, AdamWTensors, adamw_step};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::init::ParameterInit;

/// A model and its optimizer state.
pub(crate) struct Bare {
    model: Model,
    adamw: AdamW,
    parameters: Vec<Vec<Tensor>>,
    /// The tensors that the optimizer updates: the parameters themselves, or f32 copies of them.
    masters: Vec<Tensor>,
    moments: Vec<[Tensor; 2]>,
    steps: f32,
    /// The CPU time of all updates so far.
    pub(crate) optimizer_cpu: Duration,
}

/// The CPU time of this process.
pub(crate) fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

impl Bare {
    /// Initializes a model.
    pub(crate) fn new(model: Model, dtype: Dtype, adamw: AdamW, start: &mut ParameterInit<'_>) -> Result<Self> {
        let kind = if dtype == Dtype::Bf16 { Kind::BFloat16 } else { Kind::Float };
        let mut masters = Vec::new();
        let mut leaf = |parameter: &shardwise_model::Parameter| -> Result<Tensor> {
            let mut tensor = Tensor::zeros(&parameter.shape[..], (Kind::Float, Device::Cpu));
            let elements = exclusive::<f32>(&mut tensor)?;
            start(parameter, 0..elements.len(), FloatsMut::F32(elements)).map_err(anyhow::Error::from_boxed)?;
            masters.push(tensor.shallow_clone());
            Ok(tensor.to_kind(kind).detach().set_requires_grad(true))
        };
        let mut unit = |unit: &shardwise_model::Unit| unit.parameters().iter().map(&mut leaf).collect();
        let parameters: Vec<Vec<Tensor>> = model.units().iter().map(&mut unit).collect::<Result<_>>()?;
        let moments = masters.iter().map(|master| [master.zeros_like(), master.zeros_like()]).collect();
        Ok(Bare { model, adamw, parameters, masters, moments, steps: 0., optimizer_cpu: Duration::ZERO })
    }

    /// Takes one step, and returns the mean loss per token.
    pub(crate) fn step(&mut self, micro_batches: &[Batch]) -> Result<f64> {
        let tokens = micro_batches.iter().map(|batch| batch.inputs.numel()).sum::<usize>() as f32;
        let leaves: Vec<&Tensor> = self.parameters.iter().flatten().collect();
        let mut grads: Vec<Option<Tensor>> = leaves.iter().map(|_| None).collect();
        let mut summed_loss = 0.;
        for batch in micro_batches {
            let loss = self.forward(batch)?;
            let added = autograd::grad(&[&loss], &[Some(&Tensor::from(1. / tokens))], &leaves, Graph::Free)?;
            for (sum, grad) in grads.iter_mut().zip(added) {
                add_grad(sum, grad)?;
            }
            summed_loss += loss.double_value(&[]);
        }
        let before = cpu();
        self.steps += 1.;
        let step = Tensor::from(self.steps);
        let parameters = self.model.units().iter().flat_map(|unit| unit.parameters());
        let (mut decayed, mut others) = (Vec::new(), Vec::new());
        for (((parameters, grads), [first_moments, second_moments]), parameter) in
            self.masters.iter_mut().zip(&grads).zip(&mut self.moments).zip(parameters)
        {
            let Some(grads) = grads else { continue };
            let tensors = AdamWTensors { parameters, grads, first_moments, second_moments, step: &step };
            if parameter.decays { &mut decayed } else { &mut others }.push(tensors);
        }
        adamw_step(self.adamw, &mut decayed)?;
        adamw_step(AdamW { weight_decay: 0., ..self.adamw }, &mut others)?;
        for (leaf, master) in leaves.iter().zip(&self.masters).filter(|(leaf, _)| leaf.kind() != Kind::Float) {
            leaf.detach().copy_(master);
        }
        self.optimizer_cpu += cpu() - before;
        Ok(summed_loss / f64::from(tokens))
    }

    /// The loss of a micro-batch, summed over its tokens.
    fn forward(&self, batch: &Batch) -> Result<Tensor> {
        let mut x: Option<Tensor> = None;
        for (unit, parameters) in self.model.units().iter().zip(&self.parameters) {
            let tied = unit.tied().map(|tied| &self.parameters[tied.unit][tied.parameter]);
            x = Some(unit.forward(parameters, tied, x.as_ref(), batch, &Pass::new(Activations::All))?);
        }
        x.context("a model has units")
    }
}

/// Adds a gradient to an f32 sum.
fn add_grad(sum: &mut Option<Tensor>, grad: Option<Tensor>) -> Result<()> {
    let Some(grad) = grad else { return Ok(()) };
    match sum {
        Some(sum) => drop(sum.f_add_(&grad)?),
        // The gradient of an embedding that is not tied is sparse.
        None if grad.is_sparse() => *sum = Some(grad.f_to_dense(None, false)?.f_to_kind(Kind::Float)?),
        None => *sum = Some(grad.to_kind(Kind::Float)),
    }
    Ok(())
}
