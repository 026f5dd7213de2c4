//! `package.json`, as the tool writes it. The conventions of the functions that it lists are in the guide.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::Dtype;

/// The manifest of a compiled package.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct PackageManifest {
    /// The version of the format.
    pub format: u64,
    /// The version of PyTorch that compiled it, without a suffix such as `+cpu`.
    pub torch: String,
    /// The device that it was compiled for.
    pub device: PackageDevice,
    /// The CPU features that the code needs, named as in `/proc/cpuinfo`.
    pub cpu_features: Vec<String>,
    /// The architecture that the kernels run on, such as `sm_90`, if the device is a GPU.
    #[serde(default)]
    pub gpu_architecture: Option<String>,
    /// The dtype of parameters and activations.
    #[serde(deserialize_with = "dtype")]
    pub dtype: Dtype,
    /// Which activations the forward functions save.
    pub activation_checkpointing: PackageCheckpointing,
    /// The inputs of a micro-batch.
    pub inputs: TensorSpec,
    /// The targets of a micro-batch.
    pub targets: TensorSpec,
    /// Where the model comes from: its class, and the version of `transformers` or the file. For people, so it may say anything.
    pub source: BTreeMap<String, Value>,
    /// The compiled functions. Identical units share one.
    pub functions: Vec<PackageFunction>,
    /// The units, in the order of the model.
    pub units: Vec<PackageUnit>,
}

/// The device that a package was compiled for.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum PackageDevice {
    /// CPUs with the features that the manifest lists.
    Cpu,
    /// GPUs of the architecture that the manifest names.
    Cuda,
}

/// Which activations the forward functions of a package save.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum PackageCheckpointing {
    /// All that the backward functions need.
    None,
    /// Fewer: the backward functions recompute what is cheap to compute.
    Selective,
}

/// The shape and dtype of a tensor.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// The shape.
    pub shape: Vec<usize>,
    /// The dtype.
    #[serde(deserialize_with = "dtype")]
    pub dtype: Dtype,
}

/// The compiled forward and backward pass of one or more units.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct PackageFunction {
    /// Its name in messages.
    pub name: String,
    /// The shapes of the unit's own parameters, and then that of the tied one.
    pub parameters: Vec<Vec<usize>>,
    /// Whether it takes the output of the unit before.
    pub has_input: bool,
    /// Whether it reads the micro-batch's inputs.
    pub reads_inputs: bool,
    /// Whether it reads the micro-batch's targets.
    pub reads_targets: bool,
    /// The shape of its input; for a chunked head, that of a chunk.
    pub input_shape: Option<Vec<usize>>,
    /// The shape of its output; empty for the loss.
    pub output_shape: Vec<usize>,
    /// The forward pass.
    pub forward: CompiledFile,
    /// The backward pass; `None` for a chunked head, whose forward pass computes gradients.
    pub backward: Option<CompiledFile>,
    /// What the forward pass keeps for the backward pass.
    pub saved: Vec<SavedValue>,
    /// For each parameter, and then for the input: the index of its gradient among the results of the backward pass.
    pub gradients: Vec<Option<usize>>,
    /// The rows that a chunked head takes at once.
    pub chunk_rows: Option<usize>,
    /// The FLOPs of a forward pass; 0 if unknown.
    pub forward_flops: f64,
    /// The FLOPs of a backward pass; 0 if unknown.
    pub backward_flops: f64,
    /// The peak of the memory of a forward pass besides its arguments and results.
    pub forward_temporary_bytes: usize,
    /// The peak of the memory of a backward pass besides its arguments and results.
    pub backward_temporary_bytes: usize,
}

/// A compiled file of a package.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct CompiledFile {
    /// Its name in the folder.
    pub file: String,
    /// Its SHA-256, in hexadecimal.
    pub sha256: String,
}

/// A value that a backward function takes from the forward pass.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum SavedValue {
    /// A parameter, by its index among the function's.
    Parameter(usize),
    /// The unit's input.
    Input,
    /// The micro-batch's inputs.
    Inputs,
    /// The micro-batch's targets.
    Targets,
    /// A value that the forward function returns.
    Value(ValueSpec),
}

/// The shape and dtype of a saved value.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct ValueSpec {
    /// The shape.
    pub shape: Vec<usize>,
    /// The dtype.
    pub dtype: ValueDtype,
}

/// The dtype of a saved value. Unlike parameters and activations, it can be anything, such as the mask of a ReLU.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum ValueDtype {
    F64,
    F32,
    Bf16,
    F16,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
}

/// A unit of a compiled model.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct PackageUnit {
    /// Its name.
    pub name: String,
    /// The index of its function.
    pub function: usize,
    /// Its own parameters.
    pub parameters: Vec<PackageParameter>,
    /// A parameter of an earlier unit that it also uses.
    pub tied: Option<PackageTie>,
}

/// A parameter of a unit.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct PackageParameter {
    /// Its name in a checkpoint.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its initial values.
    pub init: PackageInit,
    /// Whether weight decay applies.
    pub decays: bool,
}

/// The initial values of a parameter.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum PackageInit {
    /// All one.
    Ones,
    /// All zero.
    Zeros,
    /// Normally distributed around zero, with this standard deviation.
    Normal(f64),
    /// No plain distribution: they are read from a file.
    Weights,
}

/// A parameter that one unit uses and an earlier unit owns.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct PackageTie {
    /// The index of the owner.
    pub unit: usize,
    /// The index of the parameter in the owner.
    pub parameter: usize,
}

impl TensorSpec {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl ValueSpec {
    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        let element_bytes = match self.dtype {
            ValueDtype::F64 | ValueDtype::I64 => 8,
            ValueDtype::F32 | ValueDtype::I32 => 4,
            ValueDtype::Bf16 | ValueDtype::F16 | ValueDtype::I16 => 2,
            ValueDtype::I8 | ValueDtype::U8 | ValueDtype::Bool => 1,
        };
        self.shape.iter().product::<usize>() * element_bytes
    }
}

impl PackageManifest {
    /// Whether the initial values of some parameters must be read from a file.
    pub fn needs_weights(&self) -> bool {
        self.units.iter().flat_map(|unit| &unit.parameters).any(|parameter| parameter.init == PackageInit::Weights)
    }
}

impl PackageFunction {
    /// The number of elements of the output; 0 for the loss.
    pub fn output_elements(&self) -> usize {
        if self.output_shape.is_empty() { 0 } else { self.output_shape.iter().product() }
    }

    /// The number of elements of all gradients of parameters that the function returns.
    pub fn parameter_gradient_elements(&self) -> usize {
        let returned = self.parameters.iter().zip(&self.gradients).filter(|(_, place)| place.is_some());
        returned.map(|(shape, _)| shape.iter().product::<usize>()).sum()
    }

    /// The number of elements of all gradients that it returns: those of parameters, and that of the input.
    pub fn gradient_elements(&self) -> usize {
        let of_input = self.input_shape.iter().zip(self.gradients.iter().skip(self.parameters.len()));
        let of_input = of_input.filter(|(_, place)| place.is_some()).map(|(shape, _)| shape.iter().product::<usize>());
        self.parameter_gradient_elements() + of_input.sum::<usize>()
    }

    /// The size of the saved values, in bytes: what is kept besides parameters, the input and the batch.
    pub fn saved_bytes(&self) -> usize {
        let bytes = |saved: &SavedValue| match saved {
            SavedValue::Value(value) => value.bytes(),
            _ => 0,
        };
        self.saved.iter().map(bytes).sum()
    }

    /// Whether the backward pass reads a parameter.
    pub fn backward_reads_parameters(&self) -> bool {
        self.saved.iter().any(|saved| matches!(saved, SavedValue::Parameter(_)))
    }
}

fn dtype<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Dtype, D::Error> {
    let name = String::deserialize(deserializer)?;
    let found = Dtype::ALL.into_iter().find(|dtype| dtype.to_string() == name);
    found.ok_or_else(|| {
        let known: Vec<String> = Dtype::ALL.iter().map(Dtype::to_string).collect();
        serde::de::Error::custom(format!("the dtype \"{name}\" is not supported; use {}", known.join(", ")))
    })
}
