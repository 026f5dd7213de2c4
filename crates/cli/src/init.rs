//! `shardwise init`: a recipe to begin with, by question or by flag.

use std::fmt::Write as _;
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use shardwise_data::{About, Corpus};
use shardwise_journal::words::count;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The recipe to write
    #[arg(default_value = "recipe.toml")]
    recipe: PathBuf,
    /// A corpus of `shardwise tokenize`, whose vocabulary is the model's; random tokens without one
    #[arg(long)]
    corpus: Option<PathBuf>,
    /// How large the model is to be, embeddings included; a corpus with another vocabulary changes that
    #[arg(long, value_enum)]
    size: Option<Size>,
    /// A Hugging Face checkpoint to begin with, in place of a size
    #[arg(long, conflicts_with = "size", value_name = "FOLDER")]
    from: Option<PathBuf>,
    /// How many steps
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// Write over a recipe that is there
    #[arg(long)]
    force: bool,
}

/// Sizes, in parameters.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Size {
    /// 5 million: minutes on a laptop
    #[value(name = "5m")]
    Laptop,
    /// 42 million
    #[value(name = "42m")]
    Small,
    /// 124 million, as GPT-2
    #[value(name = "124m")]
    Gpt2,
    /// 1 billion
    #[value(name = "1b")]
    Billion,
    /// 8 billion, as Llama 3
    #[value(name = "8b")]
    Eight,
}

impl Size {
    fn shape(self) -> Shape {
        let (vocabulary, width, blocks, heads, kv_heads, mlp_width, tied) = match self {
            Size::Laptop => (1024, 256, 6, 4, 4, 704, true),
            Size::Small => (32_000, 512, 8, 8, 8, 1408, true),
            Size::Gpt2 => (50_304, 768, 12, 12, 12, 2048, true),
            Size::Billion => (32_000, 2048, 16, 32, 8, 8192, true),
            Size::Eight => (128_256, 4096, 32, 32, 8, 14336, false),
        };
        Shape { vocabulary, width, blocks, heads, kv_heads, mlp_width, tied }
    }

    /// Positions, sequences and rate.
    fn batch(self) -> (usize, usize, f64) {
        match self {
            Size::Laptop => (256, 8, 3e-3),
            Size::Small => (512, 4, 1e-3),
            Size::Gpt2 => (1024, 8, 6e-4),
            Size::Billion => (2048, 4, 3e-4),
            Size::Eight => (8192, 1, 3e-4),
        }
    }

    /// The parameters that its name promises.
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

/// A Llama, as `[model.llama]` describes it. Without a corpus the vocabulary is one with which the model has the parameters that were
/// asked for, embeddings included.
struct Shape {
    vocabulary: usize,
    width: usize,
    blocks: usize,
    heads: usize,
    kv_heads: usize,
    mlp_width: usize,
    tied: bool,
}

impl Shape {
    /// Parameters of the blocks and the last norm, and of the embeddings.
    fn parameters(&self) -> [usize; 2] {
        let Shape { vocabulary, width, blocks, heads, kv_heads, mlp_width, tied } = *self;
        let (queries_and_output, keys_and_values) = (2 * width * width, 2 * width * (width / heads) * kv_heads);
        let block = queries_and_output + keys_and_values + 3 * width * mlp_width + 2 * width;
        let tables = if tied { 1 } else { 2 };
        [blocks * block + width, tables * vocabulary * width]
    }

    /// How large it is, and why, where that is not what was asked for.
    fn describe(&self, size: Size) -> String {
        let [blocks, embeddings] = self.parameters();
        let all = blocks + embeddings;
        let of = |number: usize| count(number as u64);
        let text = format!(
            "{} parameters, {} of them in the embeddings of {} tokens",
            of(all),
            of(embeddings),
            of(self.vocabulary)
        );
        let asked = size.parameters();
        match all.abs_diff(asked) * 10 <= asked {
            true => text,
            false => format!(
                "{text}: the corpus has another vocabulary than the {} tokens with which a model of this size has {}",
                of(size.shape().vocabulary),
                of(size.shape().parameters().iter().sum())
            ),
        }
    }
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let path = &options.recipe;
    if path.exists() && !options.force {
        bail!("{} is there already: name another file, or say --force", path.display());
    }
    let asks =
        std::io::stdin().is_terminal() && options.corpus.is_none() && options.size.is_none() && options.from.is_none();
    let (corpus, size, steps) = match asks {
        true => asked(options)?,
        false => (options.corpus.clone(), options.size.unwrap_or(Size::Laptop), options.steps.unwrap_or(1000)),
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let shape = Shape { vocabulary: vocabulary(corpus.as_deref(), size)?, ..size.shape() };
    let text = recipe(path, folder, corpus.as_deref(), options.from.as_deref(), size, &shape, steps)?;
    std::fs::write(path, text).with_context(|| path.display().to_string())?;
    match &options.from {
        Some(from) => println!("{} is written: the model of {}. Next:", path.display(), from.display()),
        None => println!("{} is written: {}. Next:", path.display(), shape.describe(size)),
    }
    println!("  shardwise train {} -n 2 --dry-run    # what it needs", path.display());
    println!("  shardwise train {} -n 2", path.display());
    Ok(ExitCode::SUCCESS)
}

fn asked(options: &Options) -> Result<(Option<PathBuf>, Size, u64)> {
    let corpus = answer("A corpus of `shardwise tokenize` (empty: random tokens)", "")?;
    let size = answer("How large: 5m, 42m, 124m, 1b or 8b", "5m")?;
    let size = <Size as clap::ValueEnum>::from_str(&size, true).map_err(anyhow::Error::msg)?;
    let steps = match options.steps {
        Some(steps) => steps,
        None => answer("How many steps", "1000")?.parse().context("steps are a number")?,
    };
    Ok(((!corpus.is_empty()).then(|| corpus.into()), size, steps))
}

fn answer(question: &str, usual: &str) -> Result<String> {
    print!("{question}{}: ", if usual.is_empty() { String::new() } else { format!(" [{usual}]") });
    std::io::stdout().flush()?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let line = line.trim();
    Ok(if line.is_empty() { usual } else { line }.to_string())
}

/// As many tokens as the corpus has, or as the size has without one.
fn vocabulary(corpus: Option<&Path>, size: Size) -> Result<usize> {
    let Some(corpus) = corpus else { return Ok(size.shape().vocabulary) };
    // That it can be opened is worth knowing now.
    Corpus::open(corpus)?;
    Ok(About::read(corpus)?.map_or(50_304, |about| about.vocabulary as usize))
}

fn recipe(
    path: &Path,
    folder: &Path,
    corpus: Option<&Path>,
    from: Option<&Path>,
    size: Size,
    shape: &Shape,
    steps: u64,
) -> Result<String> {
    let (positions, sequences, rate) = size.batch();
    let Shape { vocabulary, width, blocks, heads, kv_heads, mlp_width, tied } = *shape;
    // What was learned before is only touched up.
    let rate = if from.is_some() { 1e-5 } else { rate };
    let mut text =
        String::from("# Written by `shardwise init`. `shardwise config` shows every key, with its default.\n\n");
    match from {
        Some(from) => write!(text, "[model]\nfrom = {:?}\n", relative(folder, from))?,
        None => write!(
            text,
            "[model.llama]\nvocabulary = {vocabulary}\nwidth = {width}\nblocks = {blocks}\nheads = {heads}\n\
             kv_heads = {kv_heads}\nmlp_width = {mlp_width}\ntied = {tied}\n"
        )?,
    }
    text.push_str("\n[data]\nseed = 1\n");
    if let Some(corpus) = corpus {
        writeln!(text, "corpus = {:?}", relative(folder, corpus))?;
    }
    let beside = corpus.map(|corpus| corpus.with_file_name("tokenizer.json"));
    let tokenizer = from.map(|from| from.join("tokenizer.json")).or(beside).filter(|tokenizer| tokenizer.exists());
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
        "\n[batch]\nsequences = {sequences}        # a rank computes at once\npositions = {positions}\n\
         \n[optimizer]\nrate = {rate:e}\nweight_decay = 0.1\nclip_norm = 1.0\n\
         \n[schedule]\nkind = \"cosine\"\nwarmup_steps = {}\n\
         \n[run]\nsteps = {steps}\nprint_every = {}\n\
         \n[checkpoints]\nfolder = \"runs/{}\"\nevery_minutes = 10\n",
        (steps / 20).max(1),
        (steps / 100).max(1),
        path.file_stem().map_or("recipe".into(), |stem| stem.to_string_lossy()),
    )?;
    Ok(text)
}

/// A path as the recipe in that folder names it.
fn relative(folder: &Path, path: &Path) -> String {
    let inside = path.strip_prefix(folder).unwrap_or(path);
    let named =
        if folder == Path::new(".") || inside != path { inside.to_path_buf() } else { crate::launch::absolute(path) };
    named.display().to_string()
}
