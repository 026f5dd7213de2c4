//! Evaluation and logits: forward passes without autograd.

use shardwise_comm::ReduceOp;
use shardwise_model::{Activations, Batch, IGNORED, Pass, TensorParallel};
use shardwise_plan::program::{Instruction, Payload};
use shardwise_torch::tch::{Tensor, no_grad};

use crate::error::{Error, Result};

use crate::step::Trainer;
use crate::step_programs::inference_programs;
use crate::step_values::Receiving;

/// The result of an evaluation over all ranks and micro-batches.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Evaluation {
    /// The sum of the losses of all targets that are not ignored.
    pub loss_sum: f64,
    /// The number of those targets.
    pub tokens: u64,
}

impl Trainer {
    /// The logits for these inputs: sequences by positions by vocabulary, or whatever a custom head's `logits` returns. All
    /// ranks call it together, each with its own inputs; the stages of a pipeline with the same.
    pub fn logits(&mut self, inputs: &Tensor) -> Result<Tensor> {
        self.check_logits()?;
        let inputs = inputs.to_device(self.options.device);
        let targets = inputs.full_like(IGNORED);
        let batch = Batch::new(inputs, targets);
        let head = self.shards.model_len() - 1;
        let parallel = self.parallel.with_whole_sequence();
        let logits = self.forward_no_grad(&batch, &parallel, |trainer, index, input| match input {
            Some(input) if index == head => trainer.head_logits(input),
            _ => trainer.compute(index, input, &batch, &trainer.inference_pass(index)),
        })?;
        self.share_from_last_stage("logits", logits)
    }

    /// The loss on micro-batches, without training on them. All ranks call it together, each with the same number of
    /// micro-batches.
    pub fn evaluate(&mut self, micro_batches: &[Batch]) -> Result<Evaluation> {
        let (tokens, _) = self.count_tokens(self.steps, micro_batches, 0)?;
        let parallel = self.parallel.clone();
        let mut loss_sum = 0.;
        for batch in micro_batches {
            let batch = batch.to_device(self.options.device);
            let compute = |trainer: &Trainer, index, input: Option<&Tensor>| {
                let pass = Pass { drops_tokens: false, ..trainer.pass(index, Activations::All) };
                trainer.compute(index, input, &batch, &pass)
            };
            // Only the last stage of a pipeline computes the loss.
            loss_sum += self.forward_no_grad(&batch, &parallel, compute)?.map_or(0., |loss| loss.double_value(&[]));
        }
        // The ranks that share the head have the same loss.
        let loss_sum = if self.ranks.tensor.rank() == 0 { loss_sum } else { 0. };
        let loss_sum = self.ranks.world.all_reduce("evaluation", ReduceOp::Sum, vec![loss_sum]).wait()?[0];
        // The host has read what the device has computed. Only now is it known whether all collectives have succeeded.
        self.ranks.check()?;
        Ok(Evaluation { loss_sum, tokens })
    }

    /// A forward pass without autograd, which keeps only the last unit's output, and returns it if this rank has that unit. While
    /// one unit computes, the parameters of the next are all-gathered. `batch` and `parallel` say which activations the stages of a
    /// pipeline send.
    pub(crate) fn forward_no_grad(
        &mut self,
        batch: &Batch,
        parallel: &TensorParallel,
        mut compute: impl FnMut(&Trainer, usize, Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        self.finish_update()?;
        self.unless_broken(|trainer| {
            let (mesh, rank) = (trainer.ranks.mesh(), trainer.ranks.world.rank());
            let programs = inference_programs(&trainer.unit_specs, &trainer.options, &mesh)?;
            let program = programs.of(rank, &mesh);
            let mut receiving = Receiving::default();
            let mut x: Option<Tensor> = None;
            for instruction in &program.instructions {
                trainer.enter(instruction);
                match *instruction {
                    Instruction::StartFetch(offload) => trainer.shards[offload.unit].start_fetch(offload.buffer)?,
                    Instruction::WaitFetch(offload) => trainer.shards[offload.unit].finish_fetch(offload.buffer)?,
                    Instruction::Evict(offload) => trainer.shards[offload.unit].evict(offload.buffer)?,
                    Instruction::StartGather { unit, codec } => trainer.shards[unit].start_gather_as(codec)?,
                    Instruction::WaitGather(unit) => trainer.shards[unit].gather()?,
                    Instruction::StartReceive(message) => {
                        let shape = trainer.message_shape(&message, batch, parallel)?;
                        trainer.start_receive(&message, shape, &mut receiving)?;
                    }
                    Instruction::WaitReceive(message) => {
                        let received = trainer.wait_receive(&message, &mut receiving)?;
                        match message.payload {
                            Payload::TiedParameters => trainer.keep_tied_parameter(&message, received),
                            _ => x = Some(received),
                        }
                    }
                    Instruction::Forward { unit, .. } => x = Some(no_grad(|| compute(trainer, unit, x.as_ref()))?),
                    Instruction::Send(message) if message.payload == Payload::TiedParameters => {
                        trainer.send_tied_parameter(&message)?;
                    }
                    Instruction::Send(message) => {
                        let output = x.take().expect("a pass comes before its message");
                        trainer.check_output(message.unit, &output, batch, parallel)?;
                        trainer.send_message(&message, &output)?;
                    }
                    Instruction::Release(unit) => trainer.shards[unit].release()?,
                    other => unreachable!("inference has no {other:?}"),
                }
            }
            Ok(x)
        })
    }

    /// Fails if the model has no logits.
    pub(crate) fn check_logits(&self) -> Result<()> {
        self.model.check_logits().map_err(|error| Error::Options(error.to_string()))
    }

    /// A pass in which all ranks that share a layer have the whole sequence, as logits and generation need it.
    pub(crate) fn inference_pass(&self, index: usize) -> Pass {
        let pass = self.pass(index, Activations::All);
        Pass { parallel: pass.parallel.with_whole_sequence(), drops_tokens: false, ..pass }
    }

    fn head_logits(&self, input: &Tensor) -> Result<Tensor> {
        let index = self.shards.model_len() - 1;
        let (unit, tied) = (&self.model.units()[index], self.tied(index));
        let failed = |error| Error::of_model(unit.name(), error);
        let parallel = self.inference_pass(index).parallel;
        unit.logits(self.shards[index].parameters(), tied, input, &parallel).map_err(failed)?.ok_or_else(|| {
            let problem = "the last unit has none; implement `Layer::logits` for it".to_string();
            failed(shardwise_model::Error::Config { key: "logits", problem })
        })
    }
}
