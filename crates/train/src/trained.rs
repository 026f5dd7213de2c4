//! A model at work: what it makes of text that it was not trained on, and text that it makes itself.

use std::fmt;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shardwise_checkpoint::Store;
use shardwise_comm::Group;
use shardwise_zero::{Optimizer, Sgd};

use crate::agreement::agreed;
use crate::data::{HeldOut, tokenizer};
use crate::recipe::Recipe;
use crate::resume::{Why, open_newest};
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
    let mut say = |text: &str| {
        if world.rank() == 0 {
            // Whoever reads the output may be gone; ranks go on together.
            drop(writeln!(out, "{text}"));
        }
    };
    let (mut trainer, name) = load_newest(recipe, world, &mut say)?;
    if let Some(name) = name {
        say(name.as_str());
    }
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

/// Generates text with what a recipe has trained so far, and writes it to `out` as it comes. Checkpoints that are damaged and
/// not used are named in `notes`.
pub fn write_text(
    recipe: &Recipe,
    world: &Arc<Group>,
    wanted: &Wanted,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<()> {
    let tokenizer = tokenizer(recipe)?;
    let end = tokenizer.end_of_text().map(i64::from);
    let mut prompt: Vec<i64> = tokenizer.encode(&wanted.prompt)?.into_iter().map(i64::from).collect();
    if prompt.is_empty() {
        // A text begins where another one ended.
        prompt.extend(end);
    }
    let is_first = world.rank() == 0;
    let (mut trainer, _) = load_newest(recipe, world, &mut |note| {
        if is_first {
            drop(writeln!(notes, "{note}"));
        }
    })?;
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

/// The model of a recipe's newest checkpoint that can be read, with the checkpoint's name, or as the recipe begins it; without
/// what an optimizer needs.
fn load_newest(recipe: &Recipe, world: &Arc<Group>, say: &mut dyn FnMut(&str)) -> Result<(Trainer, Option<String>)> {
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
        Some(store) => open_newest(store, world, say, &mut |checkpoint| {
            let model = recipe.model().map_err(Why::of)?;
            Trainer::loaded(model, ranks.clone(), options.clone(), checkpoint).map_err(Why::of)
        })?,
        None => None,
    };
    let Some((checkpoint, trainer)) = newest else {
        if recipe.weights().is_none() {
            return Err(Error::Checkpoint(
                "there is no checkpoint yet: train first, or give the recipe model.from or start.weights".to_string(),
            ));
        }
        return Ok((begun(recipe, recipe.model()?, ranks, options)?, None));
    };
    Ok((trainer, Some(checkpoint.name())))
}
