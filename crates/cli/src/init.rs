//! `shardwise init`: writes a starter recipe, interactively or from flags.

use std::fmt::Write as _;
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use shardwise_data::{Corpus, CorpusInfo};
use shardwise_journal::format::format_count;
use shardwise_plan::{LlamaConfig, ModelConfig};
use shardwise_supervisor::absolute;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The recipe to write
    #[arg(default_value = "recipe.toml")]
    recipe: PathBuf,
    /// Train on this corpus of `shardwise tokenize`, with its vocabulary; without it, on random tokens
    #[arg(long)]
    corpus: Option<PathBuf>,
    /// Use a model of this size, embeddings included; the vocabulary of the corpus can change the size
    #[arg(long, value_enum)]
    size: Option<Size>,
    /// Start from this Hugging Face checkpoint instead of a new model
    #[arg(long, conflicts_with = "size", value_name = "FOLDER")]
    from: Option<PathBuf>,
    /// Train for this many steps
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// Overwrite an existing recipe
    #[arg(long)]
    force: bool,
}

/// Model sizes, named by their number of parameters.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Size {
    /// 5 million: minutes on a laptop
    #[value(name = "5m")]
    Laptop,
    /// 42 million
    #[value(name = "42m")]
    Small,
    /// 124 million, like GPT-2
    #[value(name = "124m")]
    Gpt2,
    /// 1 billion
    #[value(name = "1b")]
    Billion,
    /// 8 billion, like Llama 3
    #[value(name = "8b")]
    Eight,
}

impl Size {
    /// The model, with a vocabulary size that gives it the promised number of parameters, embeddings included.
    fn config(self) -> LlamaConfig {
        let (vocab_size, hidden_size, num_hidden_layers, heads, intermediate_size, tie_word_embeddings) = match self {
            Size::Laptop => (1024, 256, 6, [4, 4], 704, true),
            Size::Small => (32_000, 512, 8, [8, 8], 1408, true),
            Size::Gpt2 => (50_304, 768, 12, [12, 12], 2048, true),
            Size::Billion => (32_000, 2048, 16, [32, 8], 8192, true),
            Size::Eight => (128_256, 4096, 32, [32, 8], 14336, false),
        };
        let [num_attention_heads, num_key_value_heads] = heads;
        LlamaConfig {
            num_key_value_heads,
            tie_word_embeddings,
            ..LlamaConfig::new(vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size)
        }
    }

    /// The sequence length, the micro-batch size and the learning rate.
    fn batch(self) -> (usize, usize, f64) {
        match self {
            Size::Laptop => (256, 8, 3e-3),
            Size::Small => (512, 4, 1e-3),
            Size::Gpt2 => (1024, 8, 6e-4),
            Size::Billion => (2048, 4, 3e-4),
            Size::Eight => (8192, 1, 3e-4),
        }
    }

    /// The number of parameters in its name.
    fn parameters(self) -> usize {
        match self {
            Size::Laptop => 5_000_000,
            Size::Small => 42_000_000,
            Size::Gpt2 => 124_000_000,
            Size::Billion => 1_000_000_000,
            Size::Eight => 8_000_000_000,
        }
    }
}

/// Describes how large the model is, and why, if that is not the requested size.
fn describe(config: &LlamaConfig, size: Size) -> String {
    let parameters = |config: &LlamaConfig| ModelConfig::from(config.clone()).num_parameters();
    let all = parameters(config);
    let tables = if config.tie_word_embeddings { 1 } else { 2 };
    let embeddings = tables * config.vocab_size * config.hidden_size;
    let of = |number: usize| format_count(number as u64);
    let text = format!(
        "{} parameters, {} of them in the embeddings of {} tokens",
        of(all),
        of(embeddings),
        of(config.vocab_size)
    );
    let (asked, standard) = (size.parameters(), size.config());
    match all.abs_diff(asked) * 10 <= asked {
        true => text,
        false => format!(
            "{text}: the vocabulary of the corpus differs from the {} tokens with which a model of this size has {}",
            of(standard.vocab_size),
            of(parameters(&standard))
        ),
    }
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let path = &options.recipe;
    if path.exists() && !options.force {
        bail!("{} already exists: choose another file or pass --force", path.display());
    }
    let asks =
        std::io::stdin().is_terminal() && options.corpus.is_none() && options.size.is_none() && options.from.is_none();
    let (corpus, size, steps) = match asks {
        true => ask(options)?,
        false => (options.corpus.clone(), options.size.unwrap_or(Size::Laptop), options.steps.unwrap_or(1000)),
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // A corpus brings its own vocabulary.
    let config = LlamaConfig { vocab_size: vocab_size(corpus.as_deref(), size)?, ..size.config() };
    let text = recipe(path, folder, corpus.as_deref(), options.from.as_deref(), size, &config, steps)?;
    std::fs::write(path, text).with_context(|| path.display().to_string())?;
    match &options.from {
        Some(from) => println!("wrote {}: the model in {}. Next:", path.display(), from.display()),
        None => println!("wrote {}: {}. Next:", path.display(), describe(&config, size)),
    }
    println!("  shardwise train {} -n 2 --dry-run    # memory estimate", path.display());
    println!("  shardwise train {} -n 2", path.display());
    Ok(ExitCode::SUCCESS)
}

/// Asks for the options on the terminal.
fn ask(options: &Options) -> Result<(Option<PathBuf>, Size, u64)> {
    let corpus = prompt("Corpus of `shardwise tokenize` (empty for random tokens)", "")?;
    let size = prompt("Model size: 5m, 42m, 124m, 1b or 8b", "5m")?;
    let size = <Size as clap::ValueEnum>::from_str(&size, true).map_err(anyhow::Error::msg)?;
    let steps = match options.steps {
        Some(steps) => steps,
        None => prompt("Number of steps", "1000")?.parse().context("the number of steps is not a number")?,
    };
    Ok(((!corpus.is_empty()).then(|| corpus.into()), size, steps))
}

fn prompt(question: &str, default: &str) -> Result<String> {
    print!("{question}{}: ", if default.is_empty() { String::new() } else { format!(" [{default}]") });
    std::io::stdout().flush()?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let line = line.trim();
    Ok(if line.is_empty() { default } else { line }.to_string())
}

/// The vocabulary size of the corpus or, if there is none, the default of the model size.
fn vocab_size(corpus: Option<&Path>, size: Size) -> Result<usize> {
    let Some(corpus) = corpus else { return Ok(size.config().vocab_size) };
    // Fails early if the corpus cannot be opened.
    Corpus::open(corpus)?;
    Ok(CorpusInfo::read(corpus)?.map_or(50_304, |info| info.vocab_size as usize))
}

fn recipe(
    path: &Path,
    folder: &Path,
    corpus: Option<&Path>,
    from: Option<&Path>,
    size: Size,
    config: &LlamaConfig,
    steps: u64,
) -> Result<String> {
    let (seq_len, micro_batch_size, lr) = size.batch();
    let LlamaConfig { vocab_size, hidden_size, num_hidden_layers, num_attention_heads, .. } = *config;
    let LlamaConfig { num_key_value_heads, intermediate_size, tie_word_embeddings, .. } = *config;
    // Fine-tuning needs a much smaller learning rate.
    let lr = if from.is_some() { 1e-5 } else { lr };
    let mut text =
        String::from("# Written by `shardwise init`. `shardwise config` shows every key, with its default.\n\n");
    match from {
        Some(from) => write!(text, "[model]\nfrom_pretrained = {:?}\n", relative(folder, from))?,
        None => write!(
            text,
            "[model.llama]\nvocab_size = {vocab_size}\nhidden_size = {hidden_size}\n\
             num_hidden_layers = {num_hidden_layers}\nnum_attention_heads = {num_attention_heads}\n\
             num_key_value_heads = {num_key_value_heads}\nintermediate_size = {intermediate_size}\n\
             tie_word_embeddings = {tie_word_embeddings}\n"
        )?,
    }
    text.push_str("\n[data]\nseed = 1\n");
    if let Some(corpus) = corpus {
        writeln!(text, "corpus = {:?}", relative(folder, corpus))?;
    }
    let next_to_corpus = corpus.map(|corpus| corpus.with_file_name("tokenizer.json"));
    let tokenizer =
        from.map(|from| from.join("tokenizer.json")).or(next_to_corpus).filter(|tokenizer| tokenizer.exists());
    if let Some(tokenizer) = &tokenizer {
        writeln!(text, "tokenizer = {:?}", relative(folder, tokenizer))?;
    }
    if let Some(corpus) = corpus {
        let mut held_out = corpus.as_os_str().to_owned();
        held_out.push("-held-out");
        if Corpus::open(&held_out).is_ok() {
            let held_out = relative(folder, Path::new(&held_out));
            write!(text, "\n[evaluation]\ncorpus = {held_out:?}\nevery_steps = {}\n", (steps / 5).max(1))?;
        }
    }
    write!(
        text,
        "\n[batch]\nmicro_batch_size = {micro_batch_size}        # sequences per micro-batch, on each rank\nseq_len = {seq_len}\n\
         \n[optimizer]\nlr = {lr:e}\nweight_decay = 0.1\nmax_grad_norm = 1.0\n\
         \n[schedule]\nkind = \"cosine\"\nwarmup_steps = {}\n\
         \n[run]\nsteps = {steps}\nlog_every = {}\n\
         \n[checkpoints]\nfolder = \"runs/{}\"\nevery_minutes = 10\n",
        (steps / 20).max(1),
        (steps / 100).max(1),
        path.file_stem().map_or("recipe".into(), |stem| stem.to_string_lossy()),
    )?;
    Ok(text)
}

/// The path to write into a recipe in this folder.
fn relative(folder: &Path, path: &Path) -> String {
    let inside = path.strip_prefix(folder).unwrap_or(path);
    let named = if folder == Path::new(".") || inside != path { inside.to_path_buf() } else { absolute(path) };
    named.display().to_string()
}
