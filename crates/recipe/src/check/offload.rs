//! Checks of what is kept outside a rank's memory, and of how it travels.

use std::path::Path;

use super::Checked;
use crate::resolve::word;
use crate::source::Invalid;
use crate::{ActivationCheckpointingRecipe, DeviceRecipe, FloatRecipe, HOST, ParameterCodecRecipe, Recipe};

impl Recipe {
    /// Checks whether parameters can be quantized.
    pub(super) fn check_compression(&self) -> Checked {
        const KEY: &str = "compression.parameters";
        if self.compression.parameters == ParameterCodecRecipe::None {
            return Ok(());
        }
        let value = (KEY, word(&self.compression.parameters));
        if self.zero.stage < 3 {
            let values = [("zero.stage", self.zero.stage.to_string()), value];
            return Err(Invalid::between(&values, "only sharded parameters are gathered; set zero.stage = 3"));
        }
        let dtype = self.precision.param_dtype;
        if !matches!(dtype, FloatRecipe::F32 | FloatRecipe::Bf16) {
            let values = [("precision.param_dtype", word(&dtype)), value];
            return Err(Invalid::between(&values, "only parameters in f32 or bf16 can be quantized"));
        }
        if self.run.device != DeviceRecipe::Cpu {
            return Err(Invalid::at(KEY, format!("{KEY}: only ranks on CPUs can quantize so far; leave it out")));
        }
        Ok(())
    }

    /// Checks where parameters, optimizer state, gradients and activations can be kept.
    pub(super) fn check_offload(&self) -> Checked {
        let folders = [
            ("offload.optimizer", "optimizer state", &self.offload.optimizer),
            ("offload.parameters", "parameters", &self.offload.parameters),
            ("offload.gradients", "gradients", &self.offload.gradients),
            ("offload.activations", "activations", &self.offload.activations),
        ];
        for (key, what, folder) in folders {
            let Some(folder) = folder else { continue };
            let at = |problem: &str| Err(Invalid::at(key, format!("{key}: {problem}")));
            match (self.run.device == DeviceRecipe::Cpu, folder == Path::new(HOST)) {
                (true, true) => {
                    let problem = format!("a rank on a CPU already has its {what} in host memory");
                    return at(&format!("{problem}; give a folder on a disk, or leave it out"));
                }
                (false, false) => {
                    return at("a rank on a GPU can offload only to the memory of the host so far; set it to \"host\"");
                }
                (true, false) | (false, true) => (),
            }
        }
        if let Some(folder) = self.offload.parameters.as_ref().filter(|_| self.zero.stage < 3) {
            let values = [("zero.stage", self.zero.stage.to_string()), ("offload.parameters", format!("{folder:?}"))];
            let problem = "only sharded parameters can be offloaded; set zero.stage = 3";
            return Err(Invalid::between(&values, problem));
        }
        if self.offload.activations.is_some() && self.activation_checkpointing != ActivationCheckpointingRecipe::Full {
            let problem = "only the activations that full checkpointing keeps can be offloaded; set activation_checkpointing = \"full\"";
            return Err(Invalid::at("offload.activations", format!("offload.activations: {problem}")));
        }
        Ok(())
    }
}
