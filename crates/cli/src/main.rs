//! The `shardwise` program.
//!
//! It does not link libtorch or MPI: what needs them is `shardwise-rank`, the program beside it that runs on every rank. So
//! this one starts in a millisecond, stays small while it watches a run, and can still say what is wrong on a machine where
//! libtorch or MPI is missing.

#![forbid(unsafe_code)]

mod attempt;
mod bar;
mod checkpoint;
mod chronicle;
mod config;
mod dashboard;
mod doctor;
mod door;
mod endpoint;
mod figures;
mod hosts;
mod init;
mod inspect;
mod launch;
mod launched;
mod layers;
mod outcry;
mod profile;
mod profiling;
mod rank_count;
mod report;
mod sabotage;
mod sampling;
mod screen;
mod supervise;
mod tokenize;
mod tracing;
mod train;
mod trained;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};

/// Trains transformer models that do not fit on one device
#[derive(Parser)]
#[command(name = "shardwise", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check what this machine has, and say how to mend what is wrong
    ///
    /// Looks at libtorch, MPI (library, thread level, launcher), NCCL and CUDA if there are any, cores, memory and shared
    /// memory. Each thing that is wrong comes with the command that mends it. The exit code is 1 if anything is.
    #[command(after_help = "Example:\n  shardwise doctor")]
    Doctor,
    /// Train what a recipe says
    ///
    /// Starts the ranks itself, on this host; or is started on every rank by mpirun or srun. Says beforehand what a rank needs
    /// of memory, and does not start what cannot fit. On a terminal it shows a bar, elsewhere lines; `shardwise watch` shows more. The
    /// exit code is 2 if the recipe is wrong or does not fit, and 75 if it has saved and is to be started again: Ctrl-C asks for that,
    /// and a second Ctrl-C ends it at once.
    #[command(
        after_help = "Examples:\n  shardwise train recipes/small.toml -n 2\n  shardwise train recipes/small.toml -n 4 --dry-run\n  shardwise train recipes/small.toml -n 2 --set optimizer.rate=1e-3 --set run.steps=100\n  shardwise train recipes/small.toml -n 2 --deepspeed ds_config.json\n  shardwise train recipes/small.toml -n 2 --metrics 9464 --trace 10..12\n  mpirun -n 4 shardwise train recipes/small.toml"
    )]
    Train(train::Options),
    /// Look at a run, while it is at work or afterwards
    ///
    /// A screen with the loss, the speed, what ranks hold of memory, who waits for whom, and what has happened; plain lines where
    /// standard output is no terminal. RUN is the folder that `shardwise train` names in its first lines.
    #[command(
        after_help = "Examples:\n  shardwise watch runs/kjv\n  shardwise watch runs/kjv | cat\n  SHARDWISE_SECRET=… shardwise watch --connect node1:40123"
    )]
    Watch(dashboard::Options),
    /// Run a few steps of a recipe, say where their time goes, and what would make them faster
    ///
    /// Traces the steps, measures what the machine can do, and tries the changes of the recipe that promise most. Nothing is saved,
    /// and no checkpoint is touched.
    #[command(
        after_help = "Examples:\n  shardwise profile recipes/small.toml -n 2\n  shardwise profile recipes/small.toml -n 2 --keep traces --draw step.svg\n  mpirun -n 4 shardwise profile recipes/small.toml --json"
    )]
    Profile(profile::Options),
    /// Make a corpus of tokens from text
    ///
    /// Reads plain text, JSON lines and Parquet, also compressed, with all cores and little memory, and writes Megatron's format.
    /// A run that was stopped or killed goes on when the same command is given again. The exit code is 3 if it was stopped.
    #[command(
        after_help = "Examples:\n  shardwise tokenize kjv.txt --to data/kjv --vocabulary 2048 --held-out 20\n  shardwise tokenize corpus/*.jsonl.zst --to data/web --tokenizer models/llama\n  shardwise tokenize wiki.parquet --to data/wiki --tokenizer tokenizer.json --field text"
    )]
    Tokenize(tokenize::Options),
    /// Write a recipe to begin with, by question or by flag
    #[command(
        after_help = "Examples:\n  shardwise init\n  shardwise init kjv.toml --corpus data/kjv --size 5m --steps 1000\n  shardwise init tuned.toml --from models/llama --corpus data/web"
    )]
    Init(init::Options),
    /// Say how well a recipe's newest checkpoint does on text that was held out
    ///
    /// The mean loss of a token, perplexity, and bits per byte of the text where the corpus says how long that was.
    #[command(after_help = "Examples:\n  shardwise eval kjv.toml -n 2\n  shardwise eval kjv.toml --corpus data/other")]
    Eval(trained::Evaluate),
    /// Generate text with a recipe's newest checkpoint
    #[command(
        after_help = "Examples:\n  shardwise generate kjv.toml --prompt 'And God said'\n  shardwise generate kjv.toml -n 2 --tokens 50 --temperature 0"
    )]
    Generate(trained::Generate),
    /// Say what is in a corpus, a tokenizer or a folder of checkpoints
    #[command(
        after_help = "Examples:\n  shardwise inspect data/kjv --tokenizer data/tokenizer.json\n  shardwise inspect data/tokenizer.json --text 'In the beginning'\n  shardwise inspect runs/kjv"
    )]
    Inspect(inspect::Options),
    /// Make a page of what runs wrote down of themselves: loss, memory, traffic, failures
    ///
    /// One HTML file that needs no network and no script. Two or more runs are laid side by side, with the keys in which their
    /// recipes differ. RUN is the folder that `shardwise train` names in its first lines.
    #[command(
        after_help = "Examples:\n  shardwise report runs/kjv\n  shardwise report runs/a runs/b --to compared.html"
    )]
    Report(report::Options),
    /// Print a recipe as it comes out, with where each value comes from
    ///
    /// Every key, defaults included; what is printed can be used as a recipe. Paths are relative to the recipe's file, also those
    /// of --set. The exit code is 2 if the recipe is wrong.
    #[command(
        after_help = "Examples:\n  shardwise config recipes/small.toml -n 2\n  shardwise config recipes/small.toml --set optimizer.rate=1e-3 --deepspeed ds_config.json\n  shardwise config --schema > recipe.schema.json"
    )]
    Config(config::Options),
    /// Look at checkpoints, check them, compare them, remove them
    ///
    /// FOLDER is where a recipe's checkpoints are: a folder, or s3://bucket/folder, gs://…, az://….
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Print completions for a shell
    #[command(after_help = "Example:\n  shardwise completions bash > /etc/bash_completion.d/shardwise")]
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page
    #[command(after_help = "Example:\n  shardwise man > /usr/local/share/man/man1/shardwise.1")]
    Man,
}

/// One page with all commands.
fn manual() -> Result<ExitCode> {
    let (mut out, whole) = (std::io::stdout(), Arguments::command());
    clap_mangen::Man::new(whole.clone()).render(&mut out)?;
    for command in whole.get_subcommands() {
        let named = command.clone().name(format!("shardwise {}", command.get_name()));
        let page = clap_mangen::Man::new(named);
        page.render_synopsis_section(&mut out)?;
        page.render_description_section(&mut out)?;
        page.render_options_section(&mut out)?;
        page.render_extra_section(&mut out)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    run(Arguments::parse().command).unwrap_or_else(|error| {
        eprintln!("Error: {error}");
        // What people can do something about, and so without the stack that RUST_BACKTRACE would add.
        for (number, cause) in error.chain().skip(1).enumerate() {
            eprint!("{}", if number == 0 { "\nCaused by:\n" } else { "" });
            eprintln!("    {}", cause.to_string().replace('\n', "\n    "));
        }
        ExitCode::FAILURE
    })
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Doctor => doctor::run(),
        Command::Train(options) => train::run(&options),
        Command::Watch(options) => dashboard::run(&options),
        Command::Profile(options) => profile::run(&options),
        Command::Report(options) => report::run(&options),
        Command::Config(options) => config::run(&options),
        Command::Checkpoint(command) => checkpoint::run(&command),
        Command::Tokenize(options) => tokenize::run(&options),
        Command::Init(options) => init::run(&options),
        Command::Eval(options) => trained::evaluate(&options),
        Command::Generate(options) => trained::generate(&options),
        Command::Inspect(options) => inspect::run(&options),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Arguments::command(), "shardwise", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
        Command::Man => manual(),
    }
}
