//! The biases that are added to scores when tokens choose experts. They are not parameters: no gradient trains them, every rank has all of
//! them, and a checkpoint stores them with its [`Progress`](crate::Progress).

use shardwise_checkpoint::Checkpoint;
use shardwise_model::{ExpertBias, Model, Unit};
use shardwise_torch::tch::Device;

use crate::error::{Error, Result};

/// By unit: its bias, if it has one.
pub(crate) struct ExpertBiases(Vec<Option<ExpertBias>>);

impl ExpertBiases {
    /// Zeros for units whose bias changes with updates.
    pub(crate) fn new(model: &Model, device: Device) -> Result<Self> {
        let of_unit = |unit: &Unit| match unit.router_bias_update_rate() {
            0. => Ok(None),
            _ => make_bias(unit, vec![0.; unit.num_experts()], device).map(Some),
        };
        Ok(ExpertBiases(model.units().iter().map(of_unit).collect::<Result<_>>()?))
    }

    /// The bias of a unit.
    pub(crate) fn of_unit(&self, unit: usize) -> Option<ExpertBias> {
        self.0[unit].clone()
    }

    /// Changes the biases once a step has been applied, except in units that are frozen. All ranks know the tokens of all.
    pub(crate) fn update(&mut self, model: &Model, expert_tokens: &[Vec<u64>]) -> Result<()> {
        for ((bias, unit), tokens) in self.0.iter_mut().zip(model.units()).zip(expert_tokens) {
            let rate = unit.router_bias_update_rate();
            let is_trained = unit.parameters().iter().any(|parameter| parameter.trainable);
            if let Some(bias) = bias.as_mut().filter(|_| rate > 0. && is_trained) {
                *bias = bias.update(tokens, rate).map_err(|error| Error::of_model(unit.name(), error))?;
            }
        }
        Ok(())
    }

    /// The biases as a checkpoint stores them: nothing if no unit has any.
    pub(crate) fn stored(&self) -> Vec<Vec<f32>> {
        if self.0.iter().all(Option::is_none) {
            return Vec::new();
        }
        let of_unit = |bias: &Option<ExpertBias>| bias.as_ref().map_or_else(Vec::new, |bias| bias.biases().to_vec());
        self.0.iter().map(of_unit).collect()
    }

    /// Takes over the biases of a checkpoint, if it has any, also where no update changes them any more.
    pub(crate) fn load(&mut self, model: &Model, device: Device, checkpoint: &Checkpoint) -> Result<()> {
        let stored = &checkpoint.manifest().training["progress"]["expert_biases"];
        if stored.is_null() {
            return Ok(());
        }
        let failed =
            |problem: String| Error::Checkpoint(format!("{}: the biases of experts: {problem}", checkpoint.name()));
        let stored: Vec<Vec<f32>> =
            serde_json::from_value(stored.clone()).map_err(|error| failed(error.to_string()))?;
        let units = model.units();
        let fits = |(biases, unit): (&Vec<f32>, &Unit)| biases.is_empty() || biases.len() == unit.num_experts();
        if stored.len() != units.len() || !stored.iter().zip(units).all(fits) {
            return Err(failed("they belong to another model".to_string()));
        }
        for ((own, unit), biases) in self.0.iter_mut().zip(units).zip(stored) {
            if !biases.is_empty() {
                *own = Some(make_bias(unit, biases, device)?);
            }
        }
        Ok(())
    }
}

fn make_bias(unit: &Unit, biases: Vec<f32>, device: Device) -> Result<ExpertBias> {
    ExpertBias::new(biases, device).map_err(|error| Error::of_model(unit.name(), error))
}
