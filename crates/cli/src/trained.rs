//! `shardwise eval` and `shardwise generate`: what a recipe has trained so far, at work.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

use crate::launch::{Work, absolute};
use crate::layers::Layers;

#[derive(clap::Args)]
pub(crate) struct Evaluate {
    /// What was trained
    recipe: PathBuf,
    /// The number of ranks to start on this host
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Option<u32>,
    /// Another corpus than the recipe's evaluation.corpus
    #[arg(long)]
    corpus: Option<PathBuf>,
    #[command(flatten)]
    layers: Layers,
}

pub(crate) fn evaluate(options: &Evaluate) -> Result<ExitCode> {
    let Evaluate { recipe, ranks, corpus, layers } = options;
    let rest = corpus.iter().map(|corpus| format!("--corpus={}", absolute(corpus).display())).collect();
    Work { verb: "evaluate", recipe, ranks: *ranks, layers, rest }.start()
}

#[derive(clap::Args)]
pub(crate) struct Generate {
    /// What was trained; it names the tokenizer, as data.tokenizer
    recipe: PathBuf,
    /// The number of ranks to start on this host
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Option<u32>,
    #[command(flatten)]
    layers: Layers,
    #[command(flatten)]
    text: crate::sampling::Text,
}

pub(crate) fn generate(options: &Generate) -> Result<ExitCode> {
    let Generate { recipe, ranks, layers, text } = options;
    Work { verb: "generate", recipe, ranks: *ranks, layers, rest: text.arguments() }.start()
}
