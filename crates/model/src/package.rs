//! Building the model of a compiled package. Its manifest is enough for that, and to plan its training.

use std::sync::Arc;

use shardwise_plan::package::{Package, PackageInit, PackageParameter, PackageUnit};
use shardwise_torch::libtorch_version;

use crate::chunked_head::ChunkedHead;
use crate::compiled::CompiledLayer;
use crate::unit_functions::{UnitFunctions, package_error};
use crate::{Init, Model, Parameter, Result, Tied, Unit};

/// The units of a package.
pub(crate) fn units(package: &Arc<Package>) -> Result<Vec<Unit>> {
    let functions = functions(package)?;
    let units = package.manifest().units.iter();
    Ok(units
        .map(|unit| build_unit(unit, &unit.name, unit.parameters.iter().map(declare).collect(), &functions))
        .collect())
}

impl Model {
    /// The same model, computed by the compiled functions of a package. Its units keep their names, and its parameters their names, initial
    /// values and weight decay, so that either reads the other's checkpoints.
    pub fn with_compiled_layers(&self, package: &Arc<Package>) -> Result<Model> {
        let functions = functions(package)?;
        let compiled = &package.manifest().units;
        if compiled.len() != self.units().len() {
            let (theirs, ours) = (compiled.len(), self.units().len());
            return Err(package_error(format!("it has {theirs} units, and the model has {ours}")));
        }
        let pairs = self.units().iter().zip(compiled);
        let units = pairs.map(|(own, unit)| Ok(build_unit(unit, own.name(), own_parameters(own, unit)?, &functions)));
        Ok(Model::new(units.collect::<Result<_>>()?)?.built_in().with_package(package.clone()))
    }
}

/// The parameters of a built-in unit, in the order of a compiled one.
fn own_parameters(own: &Unit, compiled: &PackageUnit) -> Result<Vec<Parameter>> {
    // Hugging Face adds a prefix to the names in GPT-2's own files.
    let plain = |name: &str| name.strip_prefix("transformer.").unwrap_or(name).to_string();
    let find = |theirs: &PackageParameter| {
        let mut ours = own.parameters().iter();
        ours.find(|ours| plain(&ours.name) == plain(&theirs.name) && ours.sizes() == theirs.shape).cloned().ok_or_else(
            || {
                let (name, unit) = (&theirs.name, own.name());
                package_error(format!("its {name} of shape {:?} does not belong to the model's {unit}", theirs.shape))
            },
        )
    };
    let parameters = compiled.parameters.iter().map(find).collect::<Result<Vec<_>>>()?;
    if parameters.len() != own.parameters().len() || compiled.tied.is_some() != own.tied().is_some() {
        return Err(package_error(format!("it has other parameters than the model's {}", own.name())));
    }
    Ok(parameters)
}

/// The compiled functions of a package. Nothing is loaded yet.
fn functions(package: &Arc<Package>) -> Result<Vec<Arc<UnitFunctions>>> {
    let manifest = package.manifest();
    check_torch_version(&manifest.torch)?;
    Ok(manifest.functions.iter().map(|function| Arc::new(UnitFunctions::new(package, function))).collect())
}

/// A parameter as a package describes it.
fn declare(parameter: &PackageParameter) -> Parameter {
    let init = match parameter.init {
        PackageInit::Ones => Init::Ones,
        PackageInit::Zeros => Init::Zeros,
        PackageInit::Normal(std) => Init::Normal { std },
        PackageInit::Weights => Init::Weights,
    };
    Parameter { decays: parameter.decays, ..Parameter::new(&parameter.name, &parameter.shape, init) }
}

fn build_unit(unit: &PackageUnit, name: &str, parameters: Vec<Parameter>, functions: &[Arc<UnitFunctions>]) -> Unit {
    let tied = unit.tied.map(|tied| Tied { unit: tied.unit, parameter: tied.parameter });
    let (functions, own) = (functions[unit.function].clone(), parameters.len());
    match functions.function.chunk_rows {
        Some(chunk_rows) => Unit::new(name, parameters, ChunkedHead { functions, chunk_rows, own }),
        None => Unit::new(name, parameters, CompiledLayer { functions, own }),
    }
    .with_tied(tied)
}

/// Fails if the package was compiled with another version of PyTorch: its code calls libtorch's internals.
fn check_torch_version(theirs: &str) -> Result<()> {
    let ours = libtorch_version().split('+').next().unwrap_or_default();
    match theirs == ours {
        true => Ok(()),
        false => Err(package_error(format!(
            "it was compiled with PyTorch {theirs}, but this program has libtorch {ours}: compile the model with PyTorch {ours}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn a_package_of_another_version_is_refused_by_name() {
        let error = check_torch_version("2.12.1").unwrap_err().to_string();
        assert!(error.contains("compiled with PyTorch 2.12.1, but this program has libtorch 2.13"), "{error}");
    }
}
