//! The compiled functions of a unit: what they take and return, and loading their code.
//!
//! The code of a function is loaded when a trainer asks for it, or in the first pass, once for all units that share it. Before that,
//! its hash and this machine are checked.

use std::sync::{Arc, Mutex, PoisonError};

use shardwise_plan::package::{CompiledFile, Package, PackageFunction, PackageManifest, SavedValue, ValueDtype};
use shardwise_torch::tch::Kind;
use shardwise_torch::{CompiledFunction, Signature, TensorType, kind_of};

use crate::{Error, Result};

/// The compiled passes of one or more units.
pub(crate) struct UnitFunctions {
    pub(crate) package: Arc<Package>,
    pub(crate) function: PackageFunction,
    pub(crate) forward: LazyFunction,
    /// `None` for a chunked head.
    pub(crate) backward: Option<LazyFunction>,
}

impl UnitFunctions {
    pub(crate) fn new(package: &Arc<Package>, function: &PackageFunction) -> Self {
        let manifest = package.manifest();
        let (forward, backward) = match function.chunk_rows {
            Some(chunk_rows) => (chunk_signature(manifest, function, chunk_rows), None),
            None => (forward_signature(manifest, function), Some(backward_signature(manifest, function))),
        };
        let lazy = |file: &CompiledFile, signature| LazyFunction {
            package: package.clone(),
            file: file.clone(),
            signature,
            loaded: Mutex::new(None),
        };
        UnitFunctions {
            package: package.clone(),
            function: function.clone(),
            forward: lazy(&function.forward, forward),
            backward: function.backward.as_ref().zip(backward).map(|(file, signature)| lazy(file, signature)),
        }
    }

    /// Loads the code of both passes.
    pub(crate) fn load(&self) -> Result<()> {
        self.forward.get()?;
        self.backward.as_ref().map(LazyFunction::get).transpose()?;
        Ok(())
    }
}

/// A compiled function that is loaded when it is first needed.
pub(crate) struct LazyFunction {
    package: Arc<Package>,
    file: CompiledFile,
    signature: Signature,
    loaded: Mutex<Option<Arc<CompiledFunction>>>,
}

impl LazyFunction {
    /// The function, whose file is checked and loaded at the first call.
    pub(crate) fn get(&self) -> Result<Arc<CompiledFunction>> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = &*loaded {
            return Ok(function.clone());
        }
        check_cpu(self.package.manifest())?;
        let bytes = self.package.read_file(&self.file)?;
        let function = Arc::new(CompiledFunction::load(&self.file.file, &bytes, self.signature.clone())?);
        Ok(loaded.insert(function).clone())
    }
}

/// Fails if this CPU lacks a feature that the code needs: it would end the process with an illegal instruction.
fn check_cpu(manifest: &PackageManifest) -> Result<()> {
    let about = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    match missing_features(&manifest.cpu_features, &about) {
        missing if missing.is_empty() => Ok(()),
        missing => Err(package_error(format!(
            "its code needs CPU features that this machine does not have ({}): compile the model on a machine like this one",
            missing.join(", ")
        ))),
    }
}

/// The features that a machine with this `/proc/cpuinfo` does not have.
fn missing_features(needed: &[String], cpuinfo: &str) -> Vec<String> {
    let is_list = |line: &&str| line.starts_with("flags") || line.starts_with("Features");
    let list = cpuinfo.lines().find(is_list).and_then(|line| line.split_once(':')).map_or("", |(_, list)| list);
    let has: Vec<&str> = list.split_whitespace().collect();
    needed.iter().filter(|feature| !has.contains(&feature.as_str())).cloned().collect()
}

pub(crate) fn package_error(problem: String) -> Error {
    Error::Config { key: "package", problem }
}

fn tensor(shape: &[usize], kind: Kind) -> TensorType {
    TensorType { shape: sizes(shape), kind }
}

/// A shape as libtorch has it.
pub(crate) fn sizes(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|&size| size as i64).collect()
}

/// The type of a unit's output: the loss is f32, whatever the model computes in.
fn output(manifest: &PackageManifest, function: &PackageFunction) -> TensorType {
    let kind = if function.output_shape.is_empty() { Kind::Float } else { kind_of(manifest.dtype) };
    tensor(&function.output_shape, kind)
}

/// `[own parameters…, tied parameter, input, inputs, targets]` → `[output, saved values…]`
fn forward_signature(manifest: &PackageManifest, function: &PackageFunction) -> Signature {
    let kind = kind_of(manifest.dtype);
    let mut arguments: Vec<TensorType> = function.parameters.iter().map(|shape| tensor(shape, kind)).collect();
    arguments.extend(function.input_shape.as_ref().map(|shape| tensor(shape, kind)));
    for (spec, is_read) in [(&manifest.inputs, function.reads_inputs), (&manifest.targets, function.reads_targets)] {
        arguments.extend(is_read.then(|| tensor(&spec.shape, kind_of(spec.dtype))));
    }
    let values = function.saved.iter().filter(|saved| matches!(saved, SavedValue::Value(_)));
    let results =
        [output(manifest, function)].into_iter().chain(values.map(|saved| saved_type(manifest, function, saved)));
    Signature { arguments, results: results.collect() }
}

/// `[saved…, gradient of the output]` → the gradients
fn backward_signature(manifest: &PackageManifest, function: &PackageFunction) -> Signature {
    let saved = function.saved.iter().map(|saved| saved_type(manifest, function, saved));
    let kind = kind_of(manifest.dtype);
    let results = gradient_types(function, |shape| tensor(shape, kind), |shape| tensor(shape, kind));
    Signature { arguments: saved.chain([output(manifest, function)]).collect(), results }
}

/// `[own parameters…, tied parameter, rows of the input, their targets]` → `[loss, gradients…]`
fn chunk_signature(manifest: &PackageManifest, function: &PackageFunction, chunk_rows: usize) -> Signature {
    let kind = kind_of(manifest.dtype);
    let mut arguments: Vec<TensorType> = function.parameters.iter().map(|shape| tensor(shape, kind)).collect();
    arguments.extend(function.input_shape.as_deref().map(|shape| tensor(shape, kind)));
    arguments.push(tensor(&[chunk_rows], kind_of(manifest.targets.dtype)));
    let gradients = gradient_types(function, |shape| tensor(shape, Kind::Float), |shape| tensor(shape, kind));
    Signature { arguments, results: [tensor(&[], Kind::Float)].into_iter().chain(gradients).collect() }
}

/// The types of the gradients, in the order in which a function returns them.
fn gradient_types(
    function: &PackageFunction,
    of_parameter: impl Fn(&[usize]) -> TensorType,
    of_input: impl Fn(&[usize]) -> TensorType,
) -> Vec<TensorType> {
    let parameters = function.parameters.iter().map(|shape| of_parameter(shape));
    let all = parameters.chain(function.input_shape.as_deref().map(of_input));
    let mut placed: Vec<(usize, TensorType)> =
        function.gradients.iter().zip(all).filter_map(|(place, gradient)| Some(((*place)?, gradient))).collect();
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, gradient)| gradient).collect()
}

fn saved_type(manifest: &PackageManifest, function: &PackageFunction, saved: &SavedValue) -> TensorType {
    let kind = kind_of(manifest.dtype);
    match saved {
        SavedValue::Parameter(index) => tensor(&function.parameters[*index], kind),
        SavedValue::Input => tensor(function.input_shape.as_deref().unwrap_or_default(), kind),
        SavedValue::Inputs => tensor(&manifest.inputs.shape, kind_of(manifest.inputs.dtype)),
        SavedValue::Targets => tensor(&manifest.targets.shape, kind_of(manifest.targets.dtype)),
        SavedValue::Value(value) => tensor(&value.shape, value_kind(value.dtype)),
    }
}

fn value_kind(dtype: ValueDtype) -> Kind {
    match dtype {
        ValueDtype::F64 => Kind::Double,
        ValueDtype::F32 => Kind::Float,
        ValueDtype::Bf16 => Kind::BFloat16,
        ValueDtype::F16 => Kind::Half,
        ValueDtype::I64 => Kind::Int64,
        ValueDtype::I32 => Kind::Int,
        ValueDtype::I16 => Kind::Int16,
        ValueDtype::I8 => Kind::Int8,
        ValueDtype::U8 => Kind::Uint8,
        ValueDtype::Bool => Kind::Bool,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_that_a_machine_lacks_are_named() {
        let needed = ["avx2".to_string(), "avx512f".to_string()];
        assert_eq!(missing_features(&needed, "processor : 0\nflags\t\t: fpu avx2 fma\n"), ["avx512f"]);
        assert_eq!(missing_features(&needed, ""), needed);
        assert!(missing_features(&[], "").is_empty());
    }
}
