//! Evaluation and text generation with the newest checkpoint of a recipe.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shardwise_checkpoint::Store;
use shardwise_comm::Group;
use shardwise_model::Model;
use shardwise_recipe::Recipe;
use shardwise_train::{Options, Sampling, Trainer, generate};
use shardwise_zero::{Optimizer, Sgd};

use crate::agreement::agree;
use crate::build;
use crate::data::{EvaluationSet, open_tokenizer};
use crate::error::{Error, Result};
use crate::evaluate::{EvaluationMetrics, evaluate_set};
use crate::resume::{Rejection, open_newest};
use crate::setup::{check_same_on_all_ranks, init_trainer, place_ranks};

/// Evaluates a recipe's newest checkpoint, on the recipe's held-out corpus or another one.
pub fn evaluate(
    recipe: &Recipe,
    world: &Arc<Group>,
    corpus: Option<PathBuf>,
    out: &mut dyn Write,
) -> Result<EvaluationMetrics> {
    let of_recipe = recipe.evaluation.as_ref();
    let corpus = corpus.or_else(|| of_recipe.map(|evaluation| evaluation.corpus.clone()));
    let corpus = corpus.ok_or_else(|| {
        Error::Options("there is no corpus to evaluate on; set evaluation.corpus or pass --corpus".to_string())
    })?;
    let evaluation_set =
        EvaluationSet::open(recipe, &corpus, of_recipe.and_then(|evaluation| evaluation.max_sequences))?;
    check_same_on_all_ranks(world, &format!("{:?}", evaluation_set.identity()))?;
    let mut print = |text: &str| {
        if world.rank() == 0 {
            // Errors are ignored: if nobody reads the output any more, this rank must still continue with the others.
            drop(writeln!(out, "{text}"));
        }
    };
    let (mut trainer, name) = load_newest(recipe, world, build::model, &mut print)?;
    if let Some(name) = name {
        print(name.as_str());
    }
    evaluate_set(&mut trainer, &evaluation_set, recipe.batch(world.size())?.micro_batch_size)
}

/// What text to generate, and how.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// The text to continue.
    pub prompt: String,
    /// The maximum number of tokens to generate.
    pub tokens: usize,
    /// How tokens are sampled.
    pub sampling: Sampling,
}

/// Generates text with a recipe's newest checkpoint, and streams it to `out`. Damaged checkpoints are reported to `notes`.
pub fn generate_text(
    recipe: &Recipe,
    world: &Arc<Group>,
    request: &GenerationRequest,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<()> {
    let checked = build::eager_model(recipe)?.check_logits();
    checked.map_err(|error| recipe.sources.error_at("model.package", format!("model.{error}")))?;
    let tokenizer = open_tokenizer(recipe)?;
    let end = tokenizer.end_of_text().map(i64::from);
    let mut prompt: Vec<i64> = tokenizer.encode(&request.prompt)?.into_iter().map(i64::from).collect();
    if prompt.is_empty() {
        // The end-of-text token separates texts, so it can also start one.
        prompt.extend(end);
    }
    let is_first = world.rank() == 0;
    let (mut trainer, _) = load_newest(recipe, world, build::eager_model, &mut |note| {
        if is_first {
            drop(writeln!(notes, "{note}"));
        }
    })?;
    let mut print = |text: &str| {
        if is_first {
            // Errors are ignored: if nobody reads the output any more, this rank must still continue with the others.
            drop(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
        }
    };
    print(&request.prompt);
    // A token may be only part of a character, so text is printed once its last character is complete.
    let (mut shown, mut tokens) = (String::new(), Vec::new());
    let mut show = |token: i64| {
        tokens.push(token as u32);
        let text = tokenizer.decode(&tokens).unwrap_or_default();
        if !text.ends_with(char::REPLACEMENT_CHARACTER) && text.len() > shown.len() {
            print(text.get(shown.len()..).unwrap_or_default());
            shown = text;
        }
        ControlFlow::Continue(())
    };
    generate(&mut trainer, &prompt, request.tokens, end.as_slice(), &request.sampling, &mut show)?;
    print("\n");
    Ok(())
}

/// Loads the newest readable checkpoint of a recipe, without optimizer state, and returns its name. If there is no checkpoint,
/// starts from the recipe's pretrained weights.
fn load_newest(
    recipe: &Recipe,
    world: &Arc<Group>,
    build: fn(&Recipe) -> Result<Model>,
    log: &mut dyn FnMut(&str),
) -> Result<(Trainer, Option<String>)> {
    let (ranks, options) = place_ranks(recipe, world.clone())?;
    let plain = Optimizer::Sgd(Sgd { lr: 0., momentum: 0., weight_decay: 0. });
    let options = Options { optimizer: plain, ..options };
    let folder = recipe.checkpoints.as_ref().map(|checkpoints| checkpoints.folder.as_str());
    // A folder that does not exist yet has no checkpoints.
    let folder = folder.filter(|folder| folder.contains("://") || Path::new(folder).is_dir());
    let opened = folder.map(|folder| Store::open(folder).map(Arc::new)).transpose();
    let store = agree(world, opened.map_err(|error| error.to_string()))?.map_err(Error::Checkpoint)?;
    check_same_on_all_ranks(world, &format!("{}", store.is_some()))?;
    let newest = match &store {
        Some(store) => open_newest(store, world, log, &mut |checkpoint| {
            let model = build(recipe).map_err(Rejection::from_error)?;
            let loaded = Trainer::load_weights(model, ranks.clone(), options.clone(), checkpoint);
            loaded.map_err(|error| Rejection::from_error(error.into()))
        })?,
        None => None,
    };
    let Some((checkpoint, trainer)) = newest else {
        if recipe.weights().is_none() {
            return Err(Error::Checkpoint(
                "there is no checkpoint yet; train first, or set model.from_pretrained or init.weights".to_string(),
            ));
        }
        return Ok((init_trainer(recipe, build(recipe)?, ranks, options)?, None));
    };
    Ok((trainer, Some(checkpoint.name())))
}
