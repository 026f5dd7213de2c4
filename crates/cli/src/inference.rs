//! `shardwise eval` and `shardwise generate`, which use the newest checkpoint of a recipe.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

use crate::launch::{RankCommand, absolute};
use crate::layers::Layers;

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
    let arguments = corpus.iter().map(|corpus| format!("--corpus={}", absolute(corpus).display())).collect();
    RankCommand { subcommand: "evaluate", recipe, ranks: *ranks, layers, arguments }.run()
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
    generation: crate::generate_flags::GenerateFlags,
}

pub(crate) fn generate(options: &Generate) -> Result<ExitCode> {
    let Generate { recipe, ranks, layers, generation } = options;
    RankCommand { subcommand: "generate", recipe, ranks: *ranks, layers, arguments: generation.arguments() }.run()
}
