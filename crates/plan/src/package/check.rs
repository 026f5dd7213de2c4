//! Checks of a manifest: everything that the runtime relies on.

use std::collections::BTreeSet;

use super::manifest::{CompiledFile, PackageFunction, PackageManifest, PackageUnit, SavedValue};
use crate::Dtype;

type Checked = Result<(), String>;

/// The largest tensor that is accepted, far below where sizes could overflow.
const ELEMENTS_MAX: usize = 1 << 40;
const ITEMS_MAX: usize = 1 << 16;

impl PackageManifest {
    /// Checks that functions and units fit together. The message names what is wrong.
    pub(super) fn check(&self) -> Checked {
        if ![Dtype::F32, Dtype::Bf16, Dtype::F16].contains(&self.dtype) {
            return Err(format!("its dtype is {}, but must be f32, bf16 or f16", self.dtype));
        }
        for (name, spec) in [("inputs", &self.inputs), ("targets", &self.targets)] {
            check_shape(&spec.shape).map_err(|problem| format!("{name}: {problem}"))?;
            if ![Dtype::I64, Dtype::F32].contains(&spec.dtype) {
                return Err(format!("{name}: the dtype is {}, but must be i64 or f32", spec.dtype));
            }
        }
        for (name, count) in [("functions", self.functions.len()), ("units", self.units.len())] {
            if !(1..=ITEMS_MAX).contains(&count) {
                return Err(format!("it has {count} {name}, but must have 1 to {ITEMS_MAX}"));
            }
        }
        for function in &self.functions {
            self.check_function(function).map_err(|problem| format!("function \"{}\": {problem}", function.name))?;
        }
        for (index, unit) in self.units.iter().enumerate() {
            self.check_unit(index, unit).map_err(|problem| format!("unit \"{}\": {problem}", unit.name))?;
        }
        Ok(())
    }

    fn check_function(&self, function: &PackageFunction) -> Checked {
        let parameters = function.parameters.len();
        function.parameters.iter().chain(&function.input_shape).try_for_each(|shape| check_shape(shape))?;
        check_shape(&function.output_shape)?;
        check_file(&function.forward)?;
        function.backward.iter().try_for_each(check_file)?;
        if function.has_input != function.input_shape.is_some() {
            return Err(format!("has_input is {}, and input_shape says otherwise", function.has_input));
        }
        let expected = parameters + usize::from(function.has_input);
        if function.gradients.len() != expected {
            return Err(format!(
                "gradients has {} entries, but there are {parameters} parameters{}",
                function.gradients.len(),
                if function.has_input { " and the input" } else { "" }
            ));
        }
        let places: BTreeSet<usize> = function.gradients.iter().flatten().copied().collect();
        let count = function.gradients.iter().flatten().count();
        if places != (0..count).collect() {
            return Err(format!("gradients must have each place from 0 to below {count} once, but has {places:?}"));
        }
        for saved in &function.saved {
            let exists = match saved {
                SavedValue::Parameter(index) => *index < parameters,
                SavedValue::Input => function.has_input,
                SavedValue::Inputs | SavedValue::Targets => true,
                SavedValue::Value(value) => check_shape(&value.shape).is_ok(),
            };
            if !exists {
                return Err(format!("saved has {saved:?}, which does not exist or is too large"));
            }
        }
        for (key, flops) in [("forward_flops", function.forward_flops), ("backward_flops", function.backward_flops)] {
            if !(flops >= 0. && flops.is_finite()) {
                return Err(format!("{key} is {flops}, but must be 0 or a positive number"));
            }
        }
        Self::check_chunks(function)
    }

    /// Checks that a chunked head takes rows, and nothing else.
    fn check_chunks(function: &PackageFunction) -> Checked {
        if function.chunk_rows.is_some() == function.backward.is_some() {
            return Err("a function has a backward pass, unless it has chunk_rows".to_string());
        }
        let Some(chunk_rows) = function.chunk_rows else { return Ok(()) };
        if !matches!(function.input_shape.as_deref(), Some([rows, _]) if *rows == chunk_rows) {
            let shape = &function.input_shape;
            return Err(format!(
                "chunk_rows is {chunk_rows}, and its input must have as many rows, but has the shape {shape:?}"
            ));
        }
        if chunk_rows == 0 || !function.saved.is_empty() || function.reads_inputs || !function.output_shape.is_empty() {
            let problem =
                "chunk_rows must be at least 1; a chunked head saves nothing, reads no inputs and returns the loss";
            return Err(problem.to_string());
        }
        Ok(())
    }

    fn check_unit(&self, index: usize, unit: &PackageUnit) -> Checked {
        let function = self
            .functions
            .get(unit.function)
            .ok_or_else(|| format!("its function is {}, but there are {}", unit.function, self.functions.len()))?;
        let tied = match unit.tied {
            Some(tied) => Some(
                self.units[..index].get(tied.unit).and_then(|owner| owner.parameters.get(tied.parameter)).ok_or_else(
                    || {
                        format!(
                            "it is tied to parameter {} of unit {}, which no earlier unit has",
                            tied.parameter, tied.unit
                        )
                    },
                )?,
            ),
            None => None,
        };
        let shapes: Vec<_> = unit.parameters.iter().chain(tied).map(|parameter| &parameter.shape).collect();
        if shapes != function.parameters.iter().collect::<Vec<_>>() {
            return Err(format!(
                "its parameters have the shapes {shapes:?}, but function \"{}\" was compiled for {:?}",
                function.name, function.parameters
            ));
        }
        let before = index.checked_sub(1).map(|before| &self.functions[self.units[before].function].output_shape);
        if let (Some(chunk), Some([rows @ .., features])) =
            (function.chunk_rows.and(function.input_shape.as_ref()), before.map(Vec::as_slice))
        {
            let (rows, targets) = (rows.iter().product::<usize>(), self.targets.elements());
            if chunk.last() != Some(features) || rows != targets || self.targets.dtype != Dtype::I64 {
                let dtype = self.targets.dtype;
                return Err(format!(
                    "it takes rows of {:?}, each with an i64 target, but the unit before it returns {rows} rows of {features}, and there \
                     are {targets} {dtype} targets",
                    chunk.last()
                ));
            }
        } else if function.input_shape.as_ref() != before {
            return Err(format!(
                "its input has the shape {:?}, but the unit before it returns {before:?}",
                function.input_shape
            ));
        }
        match (index + 1 == self.units.len(), function.output_shape.is_empty(), function.chunk_rows) {
            (true, false, _) => Err(format!(
                "it is the last one and returns the shape {:?}, but must return a scalar, the loss",
                function.output_shape
            )),
            (false, true, _) | (false, _, Some(_)) => Err("it returns the loss, but is not the last one".to_string()),
            _ => Ok(()),
        }
    }
}

fn check_shape(shape: &[usize]) -> Checked {
    let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
    match elements.is_some_and(|elements| (1..=ELEMENTS_MAX).contains(&elements)) {
        true => Ok(()),
        false => Err(format!("the shape {shape:?} has no elements or too many")),
    }
}

/// Checks that a file is in the package's own folder, and has a hash.
fn check_file(CompiledFile { file, sha256 }: &CompiledFile) -> Checked {
    if file.is_empty() || file.starts_with('.') || file.contains(['/', '\\', '\0']) {
        return Err(format!("{file:?} is not the name of a file in the package's folder"));
    }
    match sha256.len() == 64 && sha256.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        true => Ok(()),
        false => Err(format!("{file}: \"{sha256}\" is not a SHA-256 in hexadecimal")),
    }
}
