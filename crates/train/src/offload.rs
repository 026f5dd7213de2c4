//! Offloads what a step does not need yet.
//!
//! Parameters, optimizer state and gradients belong to units, which move them. Here are the inputs that recomputed units keep.

use shardwise_plan::Dtype;
use shardwise_plan::program::{Buffer, Offload};
use shardwise_torch::tch::Tensor;
use shardwise_torch::{dtype_of, storage};
use shardwise_zero::{OffloadTarget, Offloaded};

use crate::Trainer;
use crate::error::{Error, Result};
use crate::step_values::{StepValues, UnitPass};

impl Trainer {
    /// Starts to fetch a buffer.
    pub(crate) fn start_fetch(&mut self, offload: Offload, step: &StepValues<'_>) -> Result<()> {
        match offload.buffer {
            Buffer::Activations { .. } => self.for_input(offload, step, Offloaded::start_fetch),
            buffer => Ok(self.shards[offload.unit].start_fetch(buffer)?),
        }
    }

    /// Waits until a buffer is in memory.
    pub(crate) fn finish_fetch(&mut self, offload: Offload, step: &StepValues<'_>) -> Result<()> {
        match offload.buffer {
            Buffer::Activations { .. } => self.for_input(offload, step, Offloaded::finish_fetch),
            buffer => Ok(self.shards[offload.unit].finish_fetch(buffer)?),
        }
    }

    /// Starts to store a buffer.
    pub(crate) fn start_store(&mut self, offload: Offload, step: &StepValues<'_>) -> Result<()> {
        match offload.buffer {
            Buffer::Activations { micro_batch } => {
                self.reserve_input(offload.unit, micro_batch, step)?;
                self.for_input(offload, step, Offloaded::start_store)
            }
            buffer => Ok(self.shards[offload.unit].start_store(buffer)?),
        }
    }

    /// Waits until a buffer is stored, and frees its memory.
    pub(crate) fn finish_store(&mut self, offload: Offload, step: &StepValues<'_>) -> Result<()> {
        match offload.buffer {
            Buffer::Activations { .. } => self.for_input(offload, step, Offloaded::finish_store),
            buffer => Ok(self.shards[offload.unit].finish_store(buffer)?),
        }
    }

    /// Reserves room for the input of a unit, unless there is room from an earlier step. An input that shares its memory stays there.
    fn reserve_input(&mut self, unit: usize, micro_batch: usize, step: &StepValues<'_>) -> Result<()> {
        let key = (unit, micro_batch);
        let (Some(target), Some(pass)) = (&self.offload.activations, &step.passes[micro_batch][unit]) else {
            return Ok(());
        };
        let owned = owned_tensor(pass).map_err(|error| Error::of_model(self.shards[unit].name(), error.into()))?;
        let Some(tensor) = owned else {
            self.offloaded_inputs.0.remove(&key);
            return Ok(());
        };
        if let Some(known) = self.offloaded_inputs.0.get_mut(&key).filter(|known| known.holds(&[tensor])) {
            known.reset();
            return Ok(());
        }
        let what = format!("the input of {}", self.shards[unit].name());
        let reserved = Offloaded::new(target, [tensor].into_iter(), what);
        self.offloaded_inputs.0.insert(key, reserved.map_err(|problem| self.offload_error(unit, problem))?);
        Ok(())
    }

    fn for_input(
        &mut self,
        Offload { unit, buffer, .. }: Offload,
        step: &StepValues<'_>,
        work: fn(&mut Offloaded, &[&Tensor]) -> std::result::Result<(), String>,
    ) -> Result<()> {
        let Buffer::Activations { micro_batch } = buffer else { return Ok(()) };
        let input = step.passes[micro_batch][unit].as_ref().and_then(|pass| pass.input.as_ref());
        let offloaded = self.offloaded_inputs.0.get_mut(&(unit, micro_batch));
        let (Some(offloaded), Some(input)) = (offloaded, input) else { return Ok(()) };
        work(offloaded, &[input]).map_err(|problem| self.offload_error(unit, problem))
    }

    fn offload_error(&self, unit: usize, problem: String) -> Error {
        let target = self.offload.activations.as_ref().map_or(String::new(), OffloadTarget::name);
        let unit = self.shards[unit].name().to_string();
        Error::Zero(shardwise_zero::Error::Offload { unit, what: "activations", target, problem })
    }

    /// Waits until the inputs of a micro-batch that are being stored are, so that they can be read there.
    pub(crate) fn finish_storing_inputs(&mut self, micro_batch: usize) -> Result<()> {
        for unit in 0..self.shards.model_len() {
            let Some(offloaded) = self.offloaded_inputs.0.get_mut(&(unit, micro_batch)) else { continue };
            offloaded.finish_store(&[]).map_err(|problem| self.offload_error(unit, problem))?;
        }
        Ok(())
    }
}

/// The dtype and length of a kept input, if nothing else uses its memory that is needed before the input is.
fn owned_tensor(pass: &UnitPass) -> shardwise_torch::Result<Option<(Dtype, usize)>> {
    let Some(input) = &pass.input else { return Ok(None) };
    let (dtype, len) = (dtype_of(input.f_kind()?)?, input.numel());
    let bytes = storage::bytes(input)?;
    let start = input.data_ptr().addr();
    // A unit may return its input.
    let is_shared = (start..start + bytes).contains(&pass.output.data_ptr().addr());
    Ok((bytes == len * dtype.bytes() && bytes > 0 && !is_shared).then_some((dtype, len)))
}
