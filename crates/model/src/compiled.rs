//! Units whose passes are compiled functions.
//!
//! # Note: what a compiled unit keeps
//! The backward function takes what the manifest lists: parameters, the unit's input, the batch, and values that the forward function
//! returned. Parameters and the input are kept as the tensors that they are, so that their memory can be taken away after the forward
//! pass and put back before the backward pass, as with any layer. The other values are kept in the closure, and not by autograd,
//! so that the backward function frees each of them after its last use.

use std::sync::{Arc, Mutex, PoisonError};

use shardwise_plan::package::{PackageDevice, SavedValue, TensorSpec};
use shardwise_torch::tch::{Device, Tensor, no_grad};
use shardwise_torch::{autograd, kind_of};

use crate::unit_functions::{UnitFunctions, package_error, sizes};
use crate::{Batch, Footprint, Layer, Parameters, Pass, PassShape, Result, TensorParallel};

/// A unit with a compiled forward and backward pass.
pub(crate) struct CompiledLayer {
    pub(crate) functions: Arc<UnitFunctions>,
    /// The number of parameters that the unit owns.
    pub(crate) own: usize,
}

impl Layer for CompiledLayer {
    fn forward(&self, parameters: &Parameters<'_>, input: Option<&Tensor>, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let function = &self.functions.function;
        self.functions.check_batch(batch)?;
        let parameters = parameters.in_order();
        let input = input.filter(|_| function.has_input);
        let (inputs, targets) = (batch.inputs.f_contiguous()?, batch.targets.f_contiguous()?);
        let differentiable: Vec<&Tensor> = parameters.iter().copied().chain(input).collect();
        let wanted: Vec<bool> = differentiable.iter().map(|tensor| tensor.requires_grad()).collect();

        let of_batch = [(&inputs, function.reads_inputs), (&targets, function.reads_targets)];
        let read = of_batch.into_iter().filter(|(_, is_read)| *is_read).map(|(tensor, _)| tensor);
        let arguments = no_grad(|| {
            differentiable.iter().copied().chain(read).map(Tensor::f_contiguous).collect::<std::result::Result<_, _>>()
        })?;
        let mut values = self.functions.forward.get()?.run(arguments)?;
        // A value that is also saved would be one tensor, which would own the graph that owns it.
        let output = values.remove(0).f_detach()?;

        let saved = function.saved.iter().filter_map(|saved| match saved {
            SavedValue::Parameter(index) => Some(parameters[*index].shallow_clone()),
            SavedValue::Input => input.map(Tensor::shallow_clone),
            SavedValue::Inputs => Some(inputs.shallow_clone()),
            SavedValue::Targets => Some(targets.shallow_clone()),
            SavedValue::Value(_) => None,
        });
        let saved = saved.collect();
        let kept = Mutex::new(Some(values));
        let functions = self.functions.clone();
        let mut outputs = autograd::function(
            "compiled unit",
            &differentiable,
            |_| Ok(autograd::Forward { outputs: vec![output], saved }),
            move |back| {
                let kept = kept.lock().unwrap_or_else(PoisonError::into_inner).take();
                let values = kept.ok_or("its activations have been used; its graph can be walked only once")?;
                Ok(functions.gradients(back, values, &wanted)?)
            },
        )?;
        Ok(outputs.remove(0))
    }

    fn load(&self) -> Result<()> {
        self.functions.load()
    }

    fn output_shape(&self, _: &Batch, _: &TensorParallel) -> Option<Vec<i64>> {
        Some(sizes(&self.functions.function.output_shape))
    }

    fn footprint(&self, shape: &PassShape) -> Footprint {
        let function = &self.functions.function;
        let output_bytes = function.output_elements() * shape.element_bytes;
        let saved = function.saved_bytes();
        Footprint {
            kept_bytes: output_bytes + saved,
            output_bytes,
            forward_temporary_bytes: function.forward_temporary_bytes,
            // A pass without autograd returns the saved values, too.
            no_grad_temporary_bytes: function.forward_temporary_bytes + saved,
            temporary_bytes: function.backward_temporary_bytes + function.gradient_elements() * shape.element_bytes,
            sparse_gradient_bytes: 0,
        }
    }

    fn attention_flops(&self, _: usize) -> f64 {
        let function = &self.functions.function;
        let counted = if function.backward_reads_parameters() { 0 } else { self.own };
        self.functions.attention_flops(function.forward_flops, &function.parameters[counted..])
    }

    fn gradients_are_dense(&self) -> bool {
        true
    }

    fn backward_reads_parameters(&self) -> bool {
        self.functions.function.backward_reads_parameters()
    }
}

impl UnitFunctions {
    /// Runs the backward function. Returns the gradients of the parameters and of the input; `None` where none is wanted.
    fn gradients(
        &self,
        mut back: autograd::Backward,
        values: Vec<Tensor>,
        wanted: &[bool],
    ) -> Result<Vec<Option<Tensor>>> {
        let Some(output_grad) = back.grads.remove(0) else { return Ok(wanted.iter().map(|_| None).collect()) };
        let (mut values, mut saved) = (values.into_iter(), back.saved.into_iter());
        let mut arguments = Vec::new();
        for value in &self.function.saved {
            let argument = match value {
                SavedValue::Value(_) => values.next(),
                _ => saved.next(),
            };
            arguments.push(argument.expect("the forward pass has saved everything that is listed").f_contiguous()?);
        }
        arguments.push(output_grad.f_contiguous()?);
        let backward = self.backward.as_ref().expect("only a chunked head has no backward pass").get()?;
        let mut results: Vec<Option<Tensor>> = backward.run(arguments)?.into_iter().map(Some).collect();
        let of_each = self.function.gradients.iter().zip(wanted);
        Ok(of_each
            .map(|(place, is_wanted)| place.filter(|_| *is_wanted).and_then(|place| results[place].take()))
            .collect())
    }

    /// Fails if a batch is on another device or has other shapes than the code was compiled for, or has packed documents, which it does
    /// not know.
    pub(crate) fn check_batch(&self, batch: &Batch) -> Result<()> {
        let manifest = self.package.manifest();
        let device = batch.inputs.device();
        if (manifest.device == PackageDevice::Cpu) != (device == Device::Cpu) {
            let theirs = if device == Device::Cpu { "cuda" } else { "cpu" };
            return Err(package_error(format!(
                "it was compiled for \"{theirs}\", but the batch is on {device:?}: compile the model again, with --device"
            )));
        }
        for (name, tensor, spec) in
            [("inputs", &batch.inputs, &manifest.inputs), ("targets", &batch.targets, &manifest.targets)]
        {
            check_tensor(name, tensor, spec)?;
        }
        if batch.context.is_some() {
            return Err(package_error(
                "a compiled model attends to whole sequences, and this is a part of them".to_string(),
            ));
        }
        match &batch.documents {
            Some(_) => Err(package_error(
                "a compiled model attends to whole sequences, and cannot train on packed documents".to_string(),
            )),
            None => Ok(()),
        }
    }

    /// The part of a forward pass's FLOPs, per token, that are not those of products with the matrices among `counted`: a model
    /// counts those from their shapes.
    pub(crate) fn attention_flops(&self, forward_flops: f64, counted: &[Vec<usize>]) -> f64 {
        let tokens = self.package.manifest().targets.elements().max(1) as f64;
        let matrices = counted.iter().filter(|shape| shape.len() == 2);
        let products: usize = matrices.map(|shape| 2 * shape.iter().product::<usize>()).sum();
        (forward_flops / tokens - products as f64).max(0.)
    }
}

/// Fails if a tensor of the batch is not what the code was compiled for.
fn check_tensor(name: &str, tensor: &Tensor, spec: &TensorSpec) -> Result<()> {
    let (shape, kind, expected) = (tensor.size(), tensor.kind(), kind_of(spec.dtype));
    match shape == sizes(&spec.shape) && kind == expected {
        true => Ok(()),
        false => Err(package_error(format!(
            "the {name} of this micro-batch are {kind:?} of shape {shape:?}, but the package was compiled for {expected:?} of shape \
             {:?}: use batch.micro_batch_size and batch.seq_len of the package, or compile it for this shape",
            spec.shape
        ))),
    }
}
