//! `shardwise init`: a recipe to begin with, by question or by flag.

use std::fmt::Write as _;
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use shardwise_data::{About, Corpus};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The recipe to write
    #[arg(default_value = "recipe.toml")]
    recipe: PathBuf,
    /// A corpus of `shardwise tokenize`; random tokens without one
    #[arg(long)]
    corpus: Option<PathBuf>,
    /// How large the model is to be
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

/// Width, blocks, heads, heads of keys and values, width of the MLP, positions, sequences, rate.
type Shape = (usize, usize, usize, usize, usize, usize, usize, f64);

impl Size {
    fn shape(self) -> Shape {
        match self {
            Size::Laptop => (256, 6, 4, 4, 704, 256, 8, 3e-3),
            Size::Small => (512, 8, 8, 8, 1408, 512, 4, 1e-3),
            Size::Gpt2 => (768, 12, 12, 12, 2048, 1024, 8, 6e-4),
            Size::Billion => (2048, 16, 32, 8, 8192, 2048, 4, 3e-4),
            Size::Eight => (4096, 32, 32, 8, 14336, 8192, 1, 3e-4),
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
    let text = recipe(path, folder, corpus.as_deref(), options.from.as_deref(), size, steps)?;
    std::fs::write(path, text).with_context(|| path.display().to_string())?;
    println!("{} is written. Next:", path.display());
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

fn recipe(
    path: &Path,
    folder: &Path,
    corpus: Option<&Path>,
    from: Option<&Path>,
    size: Size,
    steps: u64,
) -> Result<String> {
    let (width, blocks, heads, kv_heads, mlp_width, positions, sequences, rate) = size.shape();
    // What was learned before is only touched up.
    let rate = if from.is_some() { 1e-5 } else { rate };
    let vocabulary = match corpus {
        None => 32_000,
        Some(corpus) => {
            // That it can be opened is worth knowing now.
            Corpus::open(corpus)?;
            About::read(corpus)?.map_or(50_304, |about| about.vocabulary)
        }
    };
    let mut text =
        String::from("# Written by `shardwise init`. `shardwise config` shows every key, with its default.\n\n");
    match from {
        Some(from) => write!(text, "[model]\nfrom = {:?}\n", relative(folder, from))?,
        None => write!(
            text,
            "[model.llama]\nvocabulary = {vocabulary}\nwidth = {width}\nblocks = {blocks}\nheads = {heads}\n\
             kv_heads = {kv_heads}\nmlp_width = {mlp_width}\ntied = {}\n",
            matches!(size, Size::Laptop | Size::Small | Size::Gpt2)
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
