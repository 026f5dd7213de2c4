//! The program that runs on every rank. `shardwise` starts it; users do not.

#![forbid(unsafe_code)]

mod check;
mod flags;
mod inference;
mod plan;
mod probe;
mod profile;
mod profile_table;
mod rank;
mod recipe_arguments;
mod simulation_table;
mod supervisor_link;
mod train;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use shardwise_cli::flags::{GenerateFlags, PlanFlags, ProfileFlags, TrainFlags};

use check::CheckFlags;
use probe::Library;
use recipe_arguments::RecipeArguments;

#[derive(Parser)]
#[command(name = "shardwise-rank", about = "Run one rank; started by shardwise, see `shardwise --help`")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the version of a library and check that it works
    Probe { library: Library },
    /// Check that a recipe can run and fits into memory
    Check {
        #[command(flatten)]
        recipe: RecipeArguments,
        #[command(flatten)]
        flags: CheckFlags,
    },
    /// Train as one of the ranks
    Train {
        #[command(flatten)]
        recipe: RecipeArguments,
        #[arg(long)]
        fault: Vec<String>,
        #[command(flatten)]
        flags: TrainFlags,
    },
    /// Profile a few steps as one of the ranks
    Profile {
        #[command(flatten)]
        recipe: RecipeArguments,
        #[command(flatten)]
        flags: ProfileFlags,
        #[arg(long)]
        width: Option<usize>,
    },
    /// Plan the stages of a pipeline
    Plan {
        #[command(flatten)]
        recipe: RecipeArguments,
        #[command(flatten)]
        flags: PlanFlags,
    },
    /// Evaluate the newest checkpoint as one of the ranks
    Evaluate {
        #[command(flatten)]
        recipe: RecipeArguments,
        #[arg(long)]
        corpus: Option<PathBuf>,
    },
    /// Generate text as one of the ranks
    Generate {
        #[command(flatten)]
        recipe: RecipeArguments,
        #[command(flatten)]
        flags: GenerateFlags,
    },
}

fn main() -> ExitCode {
    run(Arguments::parse().command).unwrap_or_else(|error| shardwise_cli::print_error(&error))
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Probe { library } => probe::run(library),
        Command::Check { recipe, flags } => Ok(check::run(&recipe, &flags)),
        Command::Train { recipe, fault, flags } => train::run(&recipe, &fault, &flags),
        Command::Profile { recipe, flags, width } => profile::run(&recipe, &flags, width),
        Command::Plan { recipe, flags } => Ok(plan::run(&recipe, &flags)),
        Command::Evaluate { recipe, corpus } => inference::evaluate(&recipe, corpus),
        Command::Generate { recipe, flags } => inference::generate(&recipe, flags),
    }
}
