//! Messages between the stages of a pipeline: activations go forward, gradients backward.
//!
//! A message is the output of a unit, or the gradient of a unit's input, for one micro-batch. Its receiver allocates the memory
//! before it arrives, so both sides must know its shape, which the layer declares ([`Layer::output_shape`]).
//!
//! [`Layer::output_shape`]: shardwise_model::Layer::output_shape

use shardwise_model::{Batch, TensorParallel, Tied, Unit};
use shardwise_plan::Dtype;
use shardwise_plan::program::{Message, Payload};
use shardwise_torch::tch::{Device, TchError, Tensor, no_grad};
use shardwise_torch::{Block, dtype_of, kind_of, storage};
use shardwise_zero::Precision;

use crate::error::{Error, Result};
use crate::step::Trainer;
use crate::step_values::{Receiving, StepValues, is_finite};

impl Trainer {
    /// The stage that holds a unit.
    fn stage_of(&self, unit: Option<usize>) -> usize {
        self.stage_of_unit[unit.expect("a message has a unit on either side")]
    }

    /// Sends a tensor to the stage that needs it. What is sent is a copy, whose memory is freed once it has arrived.
    pub(crate) fn send_message(&self, message: &Message, tensor: &Tensor) -> Result<()> {
        let fail = |error| self.message_error(message, error);
        let copy = no_grad(|| {
            let mut copy = Tensor::f_empty(tensor.size(), (tensor.f_kind()?, tensor.device()))?;
            copy.f_copy_(&tensor.f_detach()?)?;
            Ok(copy)
        });
        let copy = copy.map_err(|error: TchError| fail(error.into()))?;
        let memory = storage::take(&copy, "it is being sent to another stage").map_err(fail)?;
        let to = self.stage_of(message.receiving_unit(&self.unit_specs));
        // Nobody waits for it here: the receiver does, and an error breaks the group for all calls that follow.
        let group = self.ranks.messages.between(self.ranks.pipeline.rank(), to);
        drop(group.send(&self.message_label(message, Some(message.unit)), to, memory));
        Ok(())
    }

    /// The shape and type of a message about a micro-batch.
    pub(crate) fn message_shape(
        &self,
        message: &Message,
        batch: &Batch,
        parallel: &TensorParallel,
    ) -> Result<(Vec<i64>, Dtype)> {
        let Precision { param_dtype, reduce_dtype } = self.options.precision;
        match message.payload {
            Payload::Activations => {
                let before = message.sending_unit(&self.unit_specs).expect("the first unit receives no activations");
                Ok((self.output_shape(before, batch, parallel)?, param_dtype))
            }
            // The gradient of an output has the shape of the output.
            Payload::Gradients => Ok((self.output_shape(message.unit, batch, parallel)?, param_dtype)),
            Payload::TiedParameters => Ok((self.tied_shape(message), param_dtype)),
            Payload::TiedGradients => Ok((self.tied_shape(message), reduce_dtype)),
        }
    }

    /// Starts to receive a message of this shape and type.
    pub(crate) fn start_receive(
        &mut self,
        message: &Message,
        (shape, dtype): (Vec<i64>, Dtype),
        receiving: &mut Receiving,
    ) -> Result<()> {
        if message.payload == Payload::TiedParameters {
            self.tied_copy = None;
        }
        let elements = shape.iter().product::<i64>() as usize;
        let memory = Block::new(dtype, elements, self.options.device);
        let memory = memory.map_err(|error| self.message_error(message, error))?;
        let sending_unit = message.sending_unit(&self.unit_specs);
        let (label, from) = (self.message_label(message, sending_unit), self.stage_of(sending_unit));
        let group = self.ranks.messages.between(from, self.ranks.pipeline.rank());
        receiving.insert(message, (group.receive(&label, from, memory), shape));
        Ok(())
    }

    /// Waits for a message.
    pub(crate) fn wait_receive(&self, message: &Message, receiving: &mut Receiving) -> Result<Tensor> {
        let (pending, shape) = receiving.remove(message);
        let received = pending.wait()?.into_tensor().map_err(|error| self.message_error(message, error))?;
        received.f_view(&shape[..]).map_err(|error| self.message_error(message, error.into()))
    }

    /// The parameter that a unit shares with one on another stage: its owner and its index there.
    fn tied_of(&self, message: &Message) -> Tied {
        let units = self.model.units();
        let tied_to = |unit: &Unit| unit.tied().filter(|tied| tied.unit == message.unit);
        units[message.unit].tied().or_else(|| units.iter().find_map(tied_to)).expect("the unit shares a parameter")
    }

    /// The shape of that parameter on this rank.
    fn tied_shape(&self, message: &Message) -> Vec<i64> {
        let Tied { unit, parameter } = self.tied_of(message);
        self.model.units()[unit].parameters()[parameter].kept_shape(self.layer_place())
    }

    /// Sends the parameter that a unit of another stage is tied to.
    pub(crate) fn send_tied_parameter(&self, message: &Message) -> Result<()> {
        let tied = self.tied_of(message);
        self.send_message(message, &self.shards[tied.unit].parameters()[tied.parameter])
    }

    /// Keeps a parameter that another stage owns, for this step.
    pub(crate) fn keep_tied_parameter(&mut self, message: &Message, parameter: Tensor) {
        let tied = self.tied_of(message);
        let is_trainable = self.model.units()[tied.unit].parameters()[tied.parameter].trainable;
        self.tied_copy = Some(parameter.set_requires_grad(is_trainable));
    }

    /// The input of a unit's forward pass: the output of the unit before, which another stage may have sent.
    pub(crate) fn input_of(&self, unit: usize, micro_batch: usize, step: &mut StepValues<'_>) -> Option<Tensor> {
        let before = unit.checked_sub(1)?;
        let output = match &step.passes[micro_batch][before] {
            Some(pass) => pass.output.detach(),
            None => step.received.remove(&(unit, micro_batch)).expect("the unit before comes first"),
        };
        Some(output.set_requires_grad(unit > self.first_trainable))
    }

    /// Sends what an instruction of a step says.
    pub(crate) fn send(&mut self, message: &Message, step: &mut StepValues<'_>) -> Result<()> {
        let Message { payload, unit, micro_batch, .. } = *message;
        match payload {
            Payload::Activations => {
                let pass = step.passes[micro_batch][unit].as_ref().expect("a pass comes before its message");
                let output = pass.output.shallow_clone();
                self.check_output(unit, &output, &step.batches[micro_batch], &self.parallel)?;
                self.send_message(message, &output)?;
                // The last stage only knows the units that it has. On a device, the host would have to wait.
                if self.options.device == Device::Cpu && !is_finite(&output) {
                    self.finish_storing_inputs(micro_batch)?;
                    step.find_non_finite_output(micro_batch, &self.offloaded_inputs);
                }
                // What has no backward pass is not needed any more.
                step.passes[micro_batch]
                    .iter_mut()
                    .take(self.first_trainable.min(unit + 1))
                    .for_each(|pass| *pass = None);
                Ok(())
            }
            Payload::Gradients => {
                let grad = step.output_grads[micro_batch].take().expect("a pass comes before its message");
                self.send_message(message, &grad)
            }
            Payload::TiedParameters => self.send_tied_parameter(message),
            Payload::TiedGradients => {
                let tied = self.tied_of(message);
                // If only other parameters of its owner are trained, there is none.
                let zeros = || {
                    let kind = kind_of(self.options.precision.reduce_dtype);
                    Tensor::zeros(self.tied_shape(message), (kind, self.options.device))
                };
                let sum = step.tied_sums.remove(&(tied.unit, tied.parameter)).unwrap_or_else(zeros);
                self.send_message(message, &sum)
            }
        }
    }

    /// Starts to receive what an instruction of a step says.
    pub(crate) fn start_receive_in_step(&mut self, message: &Message, step: &mut StepValues<'_>) -> Result<()> {
        let batch = &step.batches[message.micro_batch];
        let shape = self.message_shape(message, batch, &self.parallel)?;
        self.start_receive(message, shape, &mut step.receiving)
    }

    /// Waits for what an instruction of a step says, and puts it where the next pass looks for it.
    pub(crate) fn finish_receive(&mut self, message: &Message, step: &mut StepValues<'_>) -> Result<()> {
        let Message { payload, unit, micro_batch, .. } = *message;
        let received = self.wait_receive(message, &mut step.receiving)?;
        match payload {
            Payload::Activations => drop(step.received.insert((unit, micro_batch), received)),
            Payload::Gradients => step.output_grads[micro_batch] = Some(received),
            Payload::TiedParameters => self.keep_tied_parameter(message, received),
            Payload::TiedGradients => {
                let tied = self.tied_of(message);
                if self.model.units()[tied.unit].parameters()[tied.parameter].trainable {
                    self.shards[tied.unit].add_gradient(tied.parameter, &received)?;
                }
            }
        }
        Ok(())
    }

    /// The name of a unit.
    pub(crate) fn unit_name(&self, unit: usize) -> &str {
        self.model.units()[unit].name()
    }

    /// The shape of a unit's output, which must be declared if it is sent.
    pub(crate) fn output_shape(&self, unit: usize, batch: &Batch, parallel: &TensorParallel) -> Result<Vec<i64>> {
        let unit = &self.model.units()[unit];
        unit.output_shape(batch, parallel).ok_or_else(|| {
            let problem = "it is the last one of a pipeline stage; implement `Layer::output_shape` for it".to_string();
            Error::of_model(unit.name(), shardwise_model::Error::Config { key: "pipeline", problem })
        })
    }

    /// Fails unless a unit's output is what the stage that receives it expects.
    pub(crate) fn check_output(
        &self,
        unit: usize,
        output: &Tensor,
        batch: &Batch,
        parallel: &TensorParallel,
    ) -> Result<()> {
        let declared = (self.output_shape(unit, batch, parallel)?, kind_of(self.options.precision.param_dtype));
        let found = (output.size(), output.kind());
        if declared == found {
            return Ok(());
        }
        let dtype = |kind| dtype_of(kind).map_or_else(|_| format!("{kind:?}"), |dtype| dtype.to_string());
        let problem = format!(
            "its output has shape {:?} and type {}, but `Layer::output_shape` and the precision say {:?} and {}",
            found.0,
            dtype(found.1),
            declared.0,
            dtype(declared.1),
        );
        let name = self.model.units()[unit].name();
        Err(Error::of_model(name, shardwise_model::Error::Config { key: "pipeline", problem }))
    }

    /// What reports call a message: its contents, and the unit that has computed them.
    fn message_label(&self, message: &Message, sending_unit: Option<usize>) -> String {
        let unit = sending_unit.map_or("?", |unit| self.model.units()[unit].name());
        format!("{} of {unit}", message.payload.name())
    }

    fn message_error(&self, message: &Message, error: shardwise_torch::Error) -> Error {
        let unit = self.model.units()[message.unit].name();
        Error::of_model(unit, shardwise_model::Error::Torch(error))
    }
}
