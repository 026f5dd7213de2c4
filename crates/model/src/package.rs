//! Building the model of a compiled package. Its manifest is enough for that, and to plan its training.

use std::sync::Arc;

use shardwise_plan::package::{Package, PackageInit, PackageParameter, PackageUnit};
use shardwise_torch::libtorch_version;

use crate::chunked_head::ChunkedHead;
use crate::compiled::CompiledLayer;
use crate::unit_functions::{UnitFunctions, package_error};
use crate::{Init, Parameter, Result, Tied, Unit};

/// The units of a package.
pub(crate) fn units(package: &Arc<Package>) -> Result<Vec<Unit>> {
    let manifest = package.manifest();
    check_torch_version(&manifest.torch)?;
    let functions: Vec<Arc<UnitFunctions>> =
        manifest.functions.iter().map(|function| Arc::new(UnitFunctions::new(package, function))).collect();
    Ok(manifest.units.iter().map(|unit| build_unit(unit, &functions[unit.function])).collect())
}

fn build_unit(unit: &PackageUnit, functions: &Arc<UnitFunctions>) -> Unit {
    let parameter = |declared: &PackageParameter| Parameter {
        decays: declared.decays,
        ..Parameter::new(
            &declared.name,
            &declared.shape,
            match declared.init {
                PackageInit::Ones => Init::Ones,
                PackageInit::Zeros => Init::Zeros,
                PackageInit::Normal(std) => Init::Normal { std },
                PackageInit::Weights => Init::Weights,
            },
        )
    };
    let parameters = unit.parameters.iter().map(parameter).collect();
    let tied = unit.tied.map(|tied| Tied { unit: tied.unit, parameter: tied.parameter });
    let (functions, own) = (functions.clone(), unit.parameters.len());
    match functions.function.chunk_rows {
        Some(chunk_rows) => Unit::new(&unit.name, parameters, ChunkedHead { functions, chunk_rows, own }),
        None => Unit::new(&unit.name, parameters, CompiledLayer { functions, own }),
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
