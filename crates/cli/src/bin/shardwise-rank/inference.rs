//! Evaluates and generates as one of the ranks, with the newest checkpoint of a recipe.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use shardwise_cli::flags::GenerateFlags;
use shardwise_run::{GenerationRequest, RunOutcome, generate_text};
use shardwise_train::Sampling;

use crate::rank::run_unsupervised;
use crate::recipe_arguments::RecipeArguments;

/// Evaluates on a corpus. Rank 0 prints the figures.
pub(crate) fn evaluate(arguments: &RecipeArguments, corpus: Option<PathBuf>) -> Result<ExitCode> {
    run_unsupervised(arguments, |recipe, world| {
        let figures = shardwise_run::evaluate(recipe, world, corpus, &mut std::io::stdout())?;
        if world.rank() == 0 {
            drop(writeln!(std::io::stdout(), "{figures}"));
        }
        Ok(RunOutcome::Finished)
    })
}

/// Generates text. Rank 0 prints it.
pub(crate) fn generate(arguments: &RecipeArguments, flags: GenerateFlags) -> Result<ExitCode> {
    let GenerateFlags { prompt, tokens, temperature, top_k, top_p, seed } = flags;
    let request = GenerationRequest { prompt, tokens, sampling: Sampling { temperature, top_k, top_p, seed } };
    run_unsupervised(arguments, |recipe, world| {
        generate_text(recipe, world, &request, &mut std::io::stdout(), &mut std::io::stderr())?;
        Ok(RunOutcome::Finished)
    })
}
