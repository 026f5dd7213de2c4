//! `shardwise eval` and `shardwise generate`, which use the newest checkpoint of a recipe.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use shardwise_supervisor::{RankCommand, absolute};

use crate::flags::{GenerateFlags, Layers};

#[derive(clap::Args)]
pub(crate) struct Evaluate {
    /// The recipe of the model to evaluate
    recipe: PathBuf,
    /// Start this many ranks on this host
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Option<u32>,
    /// Evaluate on this corpus instead of the recipe's evaluation.corpus
    #[arg(long)]
    corpus: Option<PathBuf>,
    #[command(flatten)]
    layers: Layers,
}

pub(crate) fn evaluate(options: &Evaluate) -> Result<ExitCode> {
    let Evaluate { recipe, ranks, corpus, layers } = options;
    let corpus = corpus.iter().map(|corpus| OsString::from(format!("--corpus={}", absolute(corpus).display())));
    let arguments = layers.arguments().into_iter().chain(corpus).collect();
    Ok(RankCommand { subcommand: "evaluate", recipe, ranks: *ranks, arguments }.run()?)
}

#[derive(clap::Args)]
pub(crate) struct Generate {
    /// The recipe of the model to generate text with; it must set data.tokenizer
    recipe: PathBuf,
    /// Start this many ranks on this host
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Option<u32>,
    #[command(flatten)]
    layers: Layers,
    #[command(flatten)]
    generation: GenerateFlags,
}

pub(crate) fn generate(options: &Generate) -> Result<ExitCode> {
    let Generate { recipe, ranks, layers, generation } = options;
    let arguments = [layers.arguments(), generation.arguments()].concat();
    Ok(RankCommand { subcommand: "generate", recipe, ranks: *ranks, arguments }.run()?)
}
