//! The same model without Shardwise: one graph, one backward pass, fused AdamW, no word between ranks.

use anyhow::{Context, Result};
use shardwise_model::{Activations, Batch, Model};
use shardwise_plan::Dtype;
use shardwise_torch::autograd::{self, Graph};
use shardwise_torch::exclusive;
use shardwise_torch::optim::{AdamW, AdamWSlice, adamw_step};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::start::Start;

/// A model and its optimizer's state.
pub(crate) struct Bare {
    model: Model,
    adamw: AdamW,
    parameters: Vec<Vec<Tensor>>,
    /// What the optimizer updates: the parameters themselves, or f32 copies of them.
    masters: Vec<Tensor>,
    moments: Vec<[Tensor; 2]>,
    steps: f32,
}

impl Bare {
    /// Begins a model.
    pub(crate) fn new(model: Model, dtype: Dtype, adamw: AdamW, start: &mut Start<'_>) -> Result<Self> {
        let kind = if dtype == Dtype::Bf16 { Kind::BFloat16 } else { Kind::Float };
        let mut masters = Vec::new();
        let mut leaf = |parameter: &shardwise_model::Parameter| -> Result<Tensor> {
            let mut tensor = Tensor::zeros(&parameter.shape[..], (Kind::Float, Device::Cpu));
            let elements = exclusive::<f32>(&mut tensor)?;
            start(parameter, 0..elements.len(), elements).map_err(anyhow::Error::from_boxed)?;
            masters.push(tensor.shallow_clone());
            Ok(tensor.to_kind(kind).detach().set_requires_grad(true))
        };
        let mut unit = |unit: &shardwise_model::Unit| unit.parameters().iter().map(&mut leaf).collect();
        let parameters: Vec<Vec<Tensor>> = model.units().iter().map(&mut unit).collect::<Result<_>>()?;
        let moments = masters.iter().map(|master| [master.zeros_like(), master.zeros_like()]).collect();
        Ok(Bare { model, adamw, parameters, masters, moments, steps: 0. })
    }

    /// One step, and the mean loss of a token.
    pub(crate) fn step(&mut self, batch: &Batch) -> Result<f64> {
        let mut x: Option<Tensor> = None;
        for (unit, parameters) in self.model.units().iter().zip(&self.parameters) {
            let tied = unit.tied().map(|tied| &self.parameters[tied.unit][tied.parameter]);
            x = Some(unit.forward(parameters, tied, x.as_ref(), batch, Activations::Kept)?);
        }
        let loss = x.context("a model has units")?;
        let tokens = batch.tokens.numel() as f32;
        let leaves: Vec<&Tensor> = self.parameters.iter().flatten().collect();
        let grads = autograd::grad(&[&loss], &[Some(&Tensor::from(1. / tokens))], &leaves, Graph::Free)?;
        let grads: Vec<Option<Tensor>> =
            grads.into_iter().map(|grad| grad.map(|grad| grad.to_kind(Kind::Float))).collect();
        self.steps += 1.;
        let step = Tensor::from(self.steps);
        let mut slices: Vec<AdamWSlice<'_>> = self
            .masters
            .iter_mut()
            .zip(&grads)
            .zip(&mut self.moments)
            .filter_map(|((parameters, grads), [first_moments, second_moments])| {
                Some(AdamWSlice { parameters, grads: grads.as_ref()?, first_moments, second_moments, step: &step })
            })
            .collect();
        adamw_step(self.adamw, &mut slices)?;
        for (leaf, master) in leaves.iter().zip(&self.masters).filter(|(leaf, _)| leaf.kind() != Kind::Float) {
            leaf.detach().copy_(master);
        }
        Ok(loss.double_value(&[]) / f64::from(tokens))
    }
}
