//! Checks of a recipe with a compiled package, whose code has fixed shapes and a fixed dtype.

use shardwise_plan::package::{Package, PackageCheckpointing};

use super::resolve::word;
use super::source::Invalid;
use super::{ActivationCheckpointingRecipe, Recipe};

type Checked = Result<(), Invalid>;

impl Recipe {
    /// Fails if a key asks for something else than the package was compiled for. Names the key, both values, and what to do.
    pub(super) fn check_package(&self, package: &Package) -> Checked {
        let manifest = package.manifest();
        if package.vocab_size().is_none() {
            let problem = "model.package: the model does not read token ids, which is all that a recipe's data has; train it with \
                           the library (shardwise::model::Model::from_package)";
            return Err(Invalid::at("model.package", problem));
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
        if manifest.needs_weights() && self.init.weights.is_none() {
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
                           corpus, or a model of `model.llama` or `model.gpt2`";
            return Err(Invalid::at("data.chat", problem));
        }
        Ok(())
    }

    /// Fails if the recipe has a package that was compiled for another number of sequences.
    pub(super) fn check_package_batch(&self, micro_batch_size: usize) -> Checked {
        let expected =
            self.model.compiled.as_ref().and_then(|package| package.manifest().inputs.shape.first().copied());
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
