//! A model at work: what it makes of text that it was not trained on, and text that it makes itself.

use std::fmt;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shardwise_checkpoint::{Checkpoint, Store};
use shardwise_comm::Group;
use shardwise_zero::{Optimizer, Sgd};

use crate::agreement::agreed;
use crate::data::{HeldOut, tokenizer};
use crate::recipe::Recipe;
use crate::run::{begun, placed, same_everywhere};
use crate::{Error, Options, Result, Sampling, Trainer, generate};

/// What a model makes of held-out text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// The mean loss of a token.
    pub loss: f64,
    /// Of how many tokens.
    pub tokens: u64,
    /// How many bits the model needs for a byte of the text, if it is known how many those are.
    pub bits_per_byte: Option<f64>,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "loss {:.4}, perplexity {:.2}", self.loss, self.loss.exp())?;
        if let Some(bits) = self.bits_per_byte {
            write!(f, ", {bits:.4} bits per byte")?;
        }
        write!(f, " ({} tokens)", self.tokens)
    }
}

/// The loss of held-out text; all ranks call it together.
pub(crate) fn figures(trainer: &mut Trainer, held_out: &HeldOut, sequences: usize) -> Result<Figures> {
    let (rank, ranks) = (trainer.ranks.world.rank(), trainer.ranks.world.size());
    let (mut loss_sum, mut tokens) = (0., 0);
    for batch in held_out.batches(rank, ranks, sequences) {
        let sums = trainer.evaluate(&[batch?])?;
        loss_sum += sums.loss_sum;
        tokens += sums.tokens;
    }
    let loss = loss_sum / tokens as f64;
    let bits_per_byte = held_out.bytes_per_token.map(|bytes| loss / std::f64::consts::LN_2 / bytes);
    Ok(Figures { loss, tokens, bits_per_byte })
}

/// Evaluates what a recipe has trained so far, on its own held-out corpus or another.
pub fn evaluate(recipe: &Recipe, world: &Arc<Group>, corpus: Option<PathBuf>, out: &mut dyn Write) -> Result<Figures> {
    let of_recipe = recipe.evaluation.as_ref();
    let corpus = corpus.or_else(|| of_recipe.map(|evaluation| evaluation.corpus.clone()));
    let corpus = corpus.ok_or_else(|| {
        Error::Options("there is nothing to evaluate on: give evaluation.corpus, or --corpus".to_string())
    })?;
    let held_out = HeldOut::open(recipe, &corpus, of_recipe.and_then(|evaluation| evaluation.windows))?;
    same_everywhere(world, &format!("{:?}", held_out.about()))?;
    let mut trainer = loaded(recipe, world, out)?;
    figures(&mut trainer, &held_out, recipe.batch(world.size())?.sequences)
}

/// What is to be generated.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// What it begins with.
    pub prompt: String,
    /// At most so many tokens.
    pub tokens: usize,
    /// How each is chosen.
    pub sampling: Sampling,
}

/// Generates text with what a recipe has trained so far, and writes it as it comes.
pub fn write_text(recipe: &Recipe, world: &Arc<Group>, wanted: &Wanted, out: &mut dyn Write) -> Result<()> {
    let tokenizer = tokenizer(recipe)?;
    let end = tokenizer.end_of_text().map(i64::from);
    let mut prompt: Vec<i64> = tokenizer.encode(&wanted.prompt)?.into_iter().map(i64::from).collect();
    if prompt.is_empty() {
        // A text begins where another one ended.
        prompt.extend(end);
    }
    let mut trainer = loaded(recipe, world, &mut std::io::sink())?;
    let is_first = world.rank() == 0;
    let mut say = |text: &str| {
        if is_first {
            // Whoever reads the output may be gone; ranks go on together.
            drop(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
        }
    };
    say(&wanted.prompt);
    // Tokens may be parts of characters, so text comes when it is whole.
    let (mut shown, mut tokens) = (String::new(), Vec::new());
    let mut show = |token: i64| {
        tokens.push(token as u32);
        let text = tokenizer.decode(&tokens).unwrap_or_default();
        if !text.ends_with(char::REPLACEMENT_CHARACTER) && text.len() > shown.len() {
            say(text.get(shown.len()..).unwrap_or_default());
            shown = text;
        }
        ControlFlow::Continue(())
    };
    generate(&mut trainer, &prompt, wanted.tokens, end.as_slice(), &wanted.sampling, &mut show)?;
    say("\n");
    Ok(())
}

/// The model of a recipe's newest checkpoint, or as the recipe begins it, without what an optimizer needs.
fn loaded(recipe: &Recipe, world: &Arc<Group>, out: &mut dyn Write) -> Result<Trainer> {
    let (ranks, options) = placed(recipe, world.clone())?;
    let plain = Optimizer::Sgd(Sgd { rate: 0., momentum: 0., weight_decay: 0. });
    let options = Options { optimizer: plain, ..options };
    let folder = recipe.checkpoints.as_ref().map(|checkpoints| checkpoints.folder.as_str());
    // One that is not there yet has no checkpoint in it.
    let folder = folder.filter(|folder| folder.contains("://") || Path::new(folder).is_dir());
    let opened = folder.map(|folder| Store::open(folder).map(Arc::new)).transpose();
    let store = agreed(world, opened.map_err(|error| error.to_string()))?.map_err(Error::Checkpoint)?;
    same_everywhere(world, &format!("{}", store.is_some()))?;
    let newest = match &store {
        Some(store) => crate::resume::steps(store, world)?.first().copied(),
        None => None,
    };
    let Some((store, step)) = store.zip(newest) else {
        if recipe.weights().is_none() {
            return Err(Error::Checkpoint(
                "there is no checkpoint yet: train first, or give the recipe model.from or start.weights".to_string(),
            ));
        }
        return begun(recipe, recipe.model()?, ranks, options);
    };
    let checkpoint = Checkpoint::open(&store, step).map_err(|error| error.to_string());
    let checkpoint = agreed(world, checkpoint)?.map_err(Error::Checkpoint)?;
    if world.rank() == 0 {
        drop(writeln!(out, "{}", checkpoint.name()));
    }
    Trainer::loaded(recipe.model()?, ranks, options, &checkpoint)
}
