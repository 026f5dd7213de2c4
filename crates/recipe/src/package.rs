//! Checks of a recipe with a compiled package, whose code has fixed shapes and a fixed dtype.

use serde_json::Value;
use shardwise_plan::ModelConfig;
use shardwise_plan::package::{Package, PackageCheckpointing, PackageDevice};

use super::resolve::word;
use super::source::Invalid;
use super::{ActivationCheckpointingRecipe, DeviceRecipe, Recipe};

type Checked = Result<(), Invalid>;

impl Recipe {
    /// Fails if the package with the layers of a built-in model was compiled from another model, or for something else than the recipe
    /// asks for.
    pub(super) fn check_compiled(&self, config: &ModelConfig, package: &Package) -> Checked {
        let wrong = |problem: String| {
            let (folder, recipe) = (package.folder().display(), self.sources.path.display());
            let problem = format!(
                "model.compiled: the package in {folder} {problem}; compile it again: shardwise compile {recipe}"
            );
            Invalid::at("model.compiled", problem)
        };
        let theirs = package.config().ok_or_else(|| wrong("is not that of a language model".to_string()))?;
        let theirs = ModelConfig::from_hugging_face(theirs)
            .map_err(|error| wrong(format!("was compiled from another model: {error}")))?;
        let keys = |config: &ModelConfig| match config.to_hugging_face(self.batch.seq_len) {
            Some(Value::Object(keys)) => keys,
            _ => serde_json::Map::new(),
        };
        let (ours, theirs) = (keys(config), keys(&theirs));
        // Where a run begins is not compiled in.
        let differs = |key: &&String| *key != "initializer_range" && ours.get(*key) != theirs.get(*key);
        if let Some(key) = ours.keys().chain(theirs.keys()).find(differs) {
            let shown = |keys: &serde_json::Map<String, Value>| keys.get(key).map_or("unset".into(), Value::to_string);
            return Err(wrong(format!("was compiled for {key} = {}, and here it is {}", shown(&theirs), shown(&ours))));
        }
        ModelConfig::Compiled(package.clone().into())
            .check_tensor_parallel(self.parallel.tensor)
            .map_err(|error| Invalid::at("parallel.tensor", format!("parallel.tensor: {error}")))?;
        self.check_package(package)
    }

    /// Fails if a key asks for something else than the package was compiled for. Names the key, both values, and what to do.
    pub(super) fn check_package(&self, package: &Package) -> Checked {
        let manifest = package.manifest();
        if package.vocab_size().is_none() {
            let problem = "model.package: the model does not read token ids, which is all that a recipe's data has; train it with \
                           the library (shardwise::model::Model::from_package)";
            return Err(Invalid::at("model.package", problem));
        }
        let (key, device) = ("run.device", self.run.device);
        let expected = match manifest.device {
            PackageDevice::Cpu => DeviceRecipe::Cpu,
            PackageDevice::Cuda => DeviceRecipe::Cuda,
        };
        if device != expected {
            return Err(mismatch(key, &word(&device), &word(&expected)));
        }
        let (key, seq_len) = ("batch.seq_len", self.batch.seq_len);
        let [_, expected] = manifest.inputs.shape[..] else {
            let problem = format!(
                "model.package: its inputs have the shape {:?}, not (sequences, tokens)",
                manifest.inputs.shape
            );
            return Err(Invalid::at("model.package", problem));
        };
        if seq_len != expected {
            return Err(mismatch(key, &seq_len.to_string(), &expected.to_string()));
        }
        if let Some(size) = self.batch.micro_batch_size {
            self.check_package_batch(size)?;
        }
        let (key, dtype) = ("precision.param_dtype", self.precision.param_dtype);
        if dtype.dtype() != manifest.dtype {
            return Err(mismatch(key, &word(&dtype), &format!("\"{}\"", manifest.dtype)));
        }
        self.check_package_checkpointing(manifest.activation_checkpointing)?;
        if manifest.needs_weights() && self.init.weights.is_none() && !self.model.compiled {
            let problem = "`init.weights`: the model's initial values cannot be drawn from a seed: compile it with --weights, and set \
                           `init.weights` to the weights.safetensors in the package";
            return Err(Invalid::at("init.weights", problem));
        }
        let is_masked = manifest.source.get("architecture").is_some_and(|name| name.to_string().contains("MaskedLM"));
        if is_masked && (self.data.corpus.is_some() || self.data.mixture.is_some()) {
            let problem = "model.package: a masked language model sees the tokens that a recipe's data would ask it to predict; train it \
                           with the library, on batches with masks";
            return Err(Invalid::at("model.package", problem));
        }
        if self.data.chat.is_some() {
            let problem = "`data.chat` packs several conversations into a sequence, which a compiled model cannot tell apart: use a \
                           corpus, or a built-in model that is not compiled";
            return Err(Invalid::at("data.chat", problem));
        }
        Ok(())
    }

    /// Fails if the recipe has a package that was compiled for another number of sequences.
    pub(super) fn check_package_batch(&self, micro_batch_size: usize) -> Checked {
        let package = self.model.opened_package.as_ref();
        let expected = package.and_then(|package| package.manifest().inputs.shape.first().copied());
        match expected {
            Some(expected) if expected != micro_batch_size => {
                Err(mismatch("batch.micro_batch_size", &micro_batch_size.to_string(), &expected.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// What is saved for the backward pass is compiled in. Recomputing whole units needs nothing but the forward function.
    fn check_package_checkpointing(&self, compiled: PackageCheckpointing) -> Checked {
        let asked = self.activation_checkpointing;
        let allowed: &[ActivationCheckpointingRecipe] = match compiled {
            PackageCheckpointing::None => &[ActivationCheckpointingRecipe::None, ActivationCheckpointingRecipe::Full],
            PackageCheckpointing::Selective => &[ActivationCheckpointingRecipe::Selective],
        };
        if allowed.contains(&asked) {
            return Ok(());
        }
        let allowed: Vec<String> = allowed.iter().map(word).collect();
        Err(mismatch("activation_checkpointing", &word(&asked), &allowed.join(" or ")))
    }
}

fn mismatch(key: &str, asked: &str, compiled: &str) -> Invalid {
    let problem = format!(
        "`{key}` is {asked}, but the package was compiled for {compiled}: change it, or compile the model again"
    );
    Invalid::at(key, problem)
}
