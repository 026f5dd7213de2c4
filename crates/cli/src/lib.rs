//! The commands of the `shardwise` program.
//!
//! Nothing here links libtorch or MPI; the ranks, which need both, run `shardwise-rank`. So the program starts in a millisecond, stays
//! small while it supervises a run, and can still report what is missing on a machine without libtorch or MPI. `shardwise-rank` takes
//! some of the same [`flags`].

#![forbid(unsafe_code)]

mod checkpoint;
mod compile;
mod config;
mod dashboard;
mod doctor;
pub mod flags;
mod inference;
mod init;
mod inspect;
mod plan;
mod profile;
mod progress_line;
mod report;
mod screen;
mod tokenize;
mod train;

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser, Subcommand};
use shardwise_supervisor::{daemon_command, rank_command, start_daemon};

/// Train transformer models that do not fit on one device
#[derive(Parser)]
#[command(name = "shardwise", version)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check this machine and explain how to fix what is missing
    ///
    /// Checks libtorch, MPI (library, thread level and launcher), NCCL and CUDA if present, cores, memory and shared memory. Prints the
    /// command that fixes each problem. Exits with code 1 if there is any.
    #[command(after_help = "Example:\n  shardwise doctor")]
    Doctor,
    /// Train a model from a recipe
    ///
    /// Starts the ranks on this host, or runs as one of the ranks if mpirun or srun started it. Prints the memory that each rank
    /// needs, and refuses to start a run that does not fit. Shows a progress bar on a terminal and plain lines elsewhere;
    /// `shardwise watch` shows more.
    ///
    /// Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops at once. Exits with code 2 if the recipe is wrong or does not fit, and
    /// with code 75 if the run was saved and should be started again.
    #[command(
        after_help = "Examples:\n  shardwise train recipes/small.toml -n 2\n  shardwise train recipes/small.toml -n 4 --dry-run\n  shardwise train recipes/small.toml -n 2 --set optimizer.lr=1e-3 --set run.steps=100\n  shardwise train recipes/small.toml -n 2 --deepspeed ds_config.json\n  shardwise train recipes/small.toml -n 2 --metrics 9464 --trace 10..12\n  mpirun -n 4 shardwise train recipes/small.toml"
    )]
    Train(train::Options),
    /// Watch a run, live or after it has ended
    ///
    /// Shows the loss, throughput, memory per rank, which ranks wait for which, and recent events. Prints plain lines if standard output
    /// is not a terminal. RUN is the folder that `shardwise train` prints when it starts.
    #[command(
        after_help = "Examples:\n  shardwise watch runs/kjv\n  shardwise watch runs/kjv | cat\n  SHARDWISE_SECRET=… shardwise watch --connect node1:40123"
    )]
    Watch(dashboard::Options),
    /// Profile a few steps of a recipe and suggest changes that make it faster
    ///
    /// Traces the steps, measures the peak performance of the machine, and tries the most promising changes to the recipe. Saves
    /// nothing and touches no checkpoint.
    #[command(
        after_help = "Examples:\n  shardwise profile recipes/small.toml -n 2\n  shardwise profile recipes/small.toml -n 2 --keep traces --draw step.svg\n  mpirun -n 4 shardwise profile recipes/small.toml --json"
    )]
    Profile(profile::Options),
    /// Find where to cut a model into the stages of a pipeline
    ///
    /// Reads what units and links cost from a file that `shardwise profile --costs` has written. Balances the stages, within a memory limit
    /// if there is one, simulates a step of each schedule, and prints a drawing of the fastest and the keys of the recipe. Starts no ranks.
    #[command(
        after_help = "Examples:\n  shardwise profile recipes/small.toml -n 2 --costs costs.json\n  shardwise plan recipes/small.toml -n 8 --costs costs.json\n  shardwise plan recipes/small.toml -n 8 --costs costs.json --pipeline 4 --memory 4096"
    )]
    Plan(plan::Options),
    /// Compile a PyTorch model ahead of time, to train it without Python
    ///
    /// Exports the model, cuts it into units, and compiles their forward and backward passes to native code with PyTorch's AOTInductor.
    /// A recipe with `model.package = "FOLDER"` trains it. Given a recipe, compiles the recipe's built-in model, for `model.compiled`.
    /// Shape and type of a micro-batch are fixed. Needs Python, torch and a C++
    /// compiler here, but not where the model is trained. A package is code: train only packages that you trust.
    #[command(
        after_help = "Examples:\n  export SHARDWISE_PYTHON=$(python/setup)\n  shardwise compile models/qwen3 --out packages/qwen3 --micro-batch-size 4 --seq-len 256 --dtype bf16\n  shardwise compile llama.toml\n  shardwise compile vision_transformer.py --out packages/vit --weights"
    )]
    Compile(compile::Options),
    /// Tokenize text into a corpus
    ///
    /// Reads plain text, JSON lines and Parquet, compressed or not, on all cores and with little memory, and writes Megatron's indexed
    /// format. To continue after an interruption, repeat the same command. Exits with code 3 if it was stopped.
    #[command(
        after_help = "Examples:\n  shardwise tokenize kjv.txt --to data/kjv --vocabulary 2048 --held-out 20\n  shardwise tokenize corpus/*.jsonl.zst --to data/web --tokenizer models/llama\n  shardwise tokenize wiki.parquet --to data/wiki --tokenizer tokenizer.json --field text"
    )]
    Tokenize(tokenize::Options),
    /// Write a starter recipe, interactively or from flags
    #[command(
        after_help = "Examples:\n  shardwise init\n  shardwise init kjv.toml --corpus data/kjv --size 5m --steps 1000\n  shardwise init tuned.toml --from models/llama --corpus data/web"
    )]
    Init(init::Options),
    /// Evaluate the newest checkpoint of a recipe on held-out text
    ///
    /// Prints the mean loss per token, the perplexity and, if the corpus records the length of its text, the bits per byte.
    #[command(after_help = "Examples:\n  shardwise eval kjv.toml -n 2\n  shardwise eval kjv.toml --corpus data/other")]
    Eval(inference::Evaluate),
    /// Generate text with the newest checkpoint of a recipe
    #[command(
        after_help = "Examples:\n  shardwise generate kjv.toml --prompt 'And God said'\n  shardwise generate kjv.toml -n 2 --tokens 50 --temperature 0"
    )]
    Generate(inference::Generate),
    /// Show what is in a corpus, a tokenizer or a checkpoint folder
    #[command(
        after_help = "Examples:\n  shardwise inspect data/kjv --tokenizer data/tokenizer.json\n  shardwise inspect data/tokenizer.json --text 'In the beginning'\n  shardwise inspect runs/kjv"
    )]
    Inspect(inspect::Options),
    /// Write an HTML report of one or more runs: loss, memory, traffic, failures
    ///
    /// Writes a single file that needs no network and no scripts. Several runs are shown side by side, with the recipe keys in which they
    /// differ. RUN is the folder that `shardwise train` prints when it starts.
    #[command(
        after_help = "Examples:\n  shardwise report runs/kjv\n  shardwise report runs/a runs/b --to compared.html"
    )]
    Report(report::Options),
    /// Print the resolved recipe and where each value comes from
    ///
    /// Prints every key, defaults included, as a valid recipe. Paths are relative to the recipe file, including paths given with
    /// --set. Exits with code 2 if the recipe is wrong.
    #[command(
        after_help = "Examples:\n  shardwise config recipes/small.toml -n 2\n  shardwise config recipes/small.toml --set optimizer.lr=1e-3 --deepspeed ds_config.json\n  shardwise config --schema > recipe.schema.json"
    )]
    Config(config::Options),
    /// List, verify, compare, prune, export and import checkpoints
    ///
    /// FOLDER is the checkpoint folder of a recipe: a local folder, or s3://bucket/folder, gs://…, az://….
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Print a shell completion script
    #[command(after_help = "Example:\n  shardwise completions bash > /etc/bash_completion.d/shardwise")]
    Completions {
        /// The shell to complete commands for
        shell: clap_complete::Shell,
    },
    /// Run one rank, with the libraries of this installation
    ///
    /// Launchers start it where Shardwise is installed with pip.
    #[command(hide = true)]
    Rank {
        /// What `shardwise-rank` gets
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Start a launcher's daemon on another host
    ///
    /// `mpirun` runs it like ssh, for `shardwise train --hosts`.
    #[command(hide = true)]
    StartDaemon {
        /// Arguments of the agent, the host, and what the launcher wants to run there
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<OsString>,
    },
    /// Run a daemon of this installation's launcher
    ///
    /// `shardwise start-daemon` runs it on the other host.
    #[command(hide = true)]
    Daemon {
        /// The daemon's path, and what a shell does before
        #[arg(allow_hyphen_values = true)]
        wanted: OsString,
        /// Its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Print the manual page
    #[command(after_help = "Example:\n  shardwise man > /usr/local/share/man/man1/shardwise.1")]
    Man,
}

/// Runs a command, and returns the exit code of the program. Prints the error if there is one.
pub fn run(arguments: Arguments) -> ExitCode {
    run_command(arguments.command).unwrap_or_else(|error| print_error(&error))
}

/// Prints an error and its causes, and returns the exit code of a program that has failed. Errors are for users, so they are printed
/// without the backtrace that RUST_BACKTRACE would add.
pub fn print_error(error: &anyhow::Error) -> ExitCode {
    let mut text = format!("Error: {error}\n");
    for (number, cause) in error.chain().skip(1).enumerate() {
        text += if number == 0 { "\nCaused by:\n" } else { "" };
        text += &format!("    {}\n", cause.to_string().replace('\n', "\n    "));
    }
    // In one piece: several ranks may print at the same time. Nobody may be left to read it.
    drop(std::io::stderr().write_all(text.as_bytes()));
    ExitCode::FAILURE
}

fn run_command(command: Command) -> Result<ExitCode> {
    match command {
        Command::Doctor => doctor::run(),
        Command::Train(options) => train::run(&options),
        Command::Watch(options) => dashboard::run(&options),
        Command::Profile(options) => profile::run(&options),
        Command::Plan(options) => plan::run(&options),
        Command::Compile(options) => compile::run(&options),
        Command::Report(options) => report::run(&options),
        Command::Config(options) => config::run(&options),
        Command::Checkpoint(command) => checkpoint::run(&command),
        Command::Tokenize(options) => tokenize::run(&options),
        Command::Init(options) => init::run(&options),
        Command::Eval(options) => inference::evaluate(&options),
        Command::Generate(options) => inference::generate(&options),
        Command::Inspect(options) => inspect::run(&options),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Arguments::command(), "shardwise", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
        Command::Rank { arguments } => become_command(rank_command()?.args(arguments)),
        Command::StartDaemon { words } => become_command(&mut start_daemon(&words)?),
        Command::Daemon { wanted, arguments } => become_command(&mut daemon_command(&wanted, &arguments)?),
        Command::Man => print_manual(),
    }
}

/// Runs a command in place of this process. Returns only if that fails.
fn become_command(command: &mut std::process::Command) -> Result<ExitCode> {
    let error = command.exec();
    Err(error).with_context(|| command.get_program().display().to_string())
}

/// Prints one manual page that covers every command.
fn print_manual() -> Result<ExitCode> {
    let (mut out, whole) = (std::io::stdout(), Arguments::command());
    clap_mangen::Man::new(whole.clone()).render(&mut out)?;
    for command in whole.get_subcommands().filter(|command| !command.is_hide_set()) {
        let named = command.clone().name(format!("shardwise {}", command.get_name()));
        let page = clap_mangen::Man::new(named);
        page.render_synopsis_section(&mut out)?;
        page.render_description_section(&mut out)?;
        page.render_options_section(&mut out)?;
        page.render_extra_section(&mut out)?;
    }
    Ok(ExitCode::SUCCESS)
}
