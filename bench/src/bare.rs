//! The same model without Shardwise: one graph, one backward pass, fused AdamW, no word between ranks.

use anyhow::{Context, Result};
use shardwise_model::{Activations, Batch, Model};
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
    moments: Vec<[Tensor; 2]>,
    steps: f32,
}

impl Bare {
    /// Begins a model.
    pub(crate) fn new(model: Model, adamw: AdamW, start: &mut Start<'_>) -> Result<Self> {
        let mut leaf = |parameter: &shardwise_model::Parameter| -> Result<Tensor> {
            let mut tensor = Tensor::zeros(&parameter.shape[..], (Kind::Float, Device::Cpu));
            let elements = exclusive::<f32>(&mut tensor)?;
            start(parameter, 0..elements.len(), elements).map_err(anyhow::Error::from_boxed)?;
            Ok(tensor.set_requires_grad(true))
        };
        let mut unit = |unit: &shardwise_model::Unit| unit.parameters().iter().map(&mut leaf).collect();
        let parameters: Vec<Vec<Tensor>> = model.units().iter().map(&mut unit).collect::<Result<_>>()?;
        let moments = parameters.iter().flatten().map(|p| [p.detach().zeros_like(), p.detach().zeros_like()]).collect();
        Ok(Bare { model, adamw, parameters, moments, steps: 0. })
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
        self.steps += 1.;
        let step = Tensor::from(self.steps);
        let mut leaves: Vec<Tensor> = leaves.into_iter().map(Tensor::detach).collect();
        let mut slices: Vec<AdamWSlice<'_>> = leaves
            .iter_mut()
            .zip(&grads)
            .zip(&mut self.moments)
            .filter_map(|((parameters, grads), [first_moments, second_moments])| {
                Some(AdamWSlice { parameters, grads: grads.as_ref()?, first_moments, second_moments, step: &step })
            })
            .collect();
        adamw_step(self.adamw, &mut slices)?;
        Ok(loss.double_value(&[]) / f64::from(tokens))
    }
}
