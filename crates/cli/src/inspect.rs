//! `shardwise inspect`: what is in a corpus, a tokenizer or a folder of checkpoints.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use shardwise_checkpoint::{Checkpoint, Store, elements};
use shardwise_data::{About, Corpus, Tokenizer};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// A corpus (TO, TO.bin or TO.idx), a tokenizer.json, or a folder of checkpoints
    path: PathBuf,
    /// With a tokenizer: show the tokens of this text
    #[arg(long)]
    text: Option<String>,
    /// With a corpus: show its first documents as text, by this tokenizer
    #[arg(long)]
    tokenizer: Option<PathBuf>,
    /// How many documents are shown
    #[arg(long, default_value_t = 3)]
    documents: u64,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let path = &options.path;
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if name == "tokenizer.json" || path.join("tokenizer.json").is_file() {
        tokenizer(options)?;
    } else if path.is_dir() {
        checkpoints(path)?;
    } else if name.ends_with(".toml") {
        bail!("{} is a recipe: `shardwise config {0}` shows what it means", path.display());
    } else {
        corpus(options)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn tokenizer(options: &Options) -> Result<()> {
    let tokenizer = Tokenizer::open(&options.path)?;
    let end = tokenizer.end_of_text().map_or("no token that ends a text".to_string(), |id| {
        format!("{:?} ({id}) ends a text", tokenizer.decode(&[id]).unwrap_or_default())
    });
    println!("{}: {} tokens; {end}", tokenizer.path().display(), tokenizer.vocabulary());
    if let Some(text) = &options.text {
        for id in tokenizer.encode(text)? {
            println!("{id:>8}  {:?}", tokenizer.decode(&[id])?);
        }
    }
    Ok(())
}

fn corpus(options: &Options) -> Result<()> {
    let corpus = Corpus::open(&options.path)?;
    let kind = format!("{:?}", corpus.token_type()).to_lowercase();
    println!("{}: {} tokens in {} documents, as {kind}", corpus.path().display(), corpus.tokens(), corpus.documents());
    if let Some(About { totals, vocabulary, end_of_text, written_by, .. }) = About::read(corpus.path())? {
        let each = totals.text_bytes as f64 / totals.tokens.max(1) as f64;
        println!(
            "{} bytes of text, {each:.2} a token; vocabulary {vocabulary}, {end_of_text} ends a text; {written_by}",
            totals.text_bytes
        );
    }
    let Some(path) = &options.tokenizer else { return Ok(()) };
    let tokenizer = Tokenizer::open(path)?;
    for number in 0..options.documents.min(corpus.documents()) {
        let place = corpus.document(number)?;
        let shown = place.start..place.end.min(place.start + 60);
        let mut ids = vec![0; (shown.end - shown.start) as usize];
        corpus.read(shown.start, &mut ids)?;
        println!("document {number}, {} tokens: {:?}…", place.end - place.start, tokenizer.decode(&ids)?);
    }
    Ok(())
}

fn checkpoints(folder: &Path) -> Result<()> {
    let store = Arc::new(Store::open(&folder.display().to_string())?);
    let steps = store.steps()?;
    let Some(&newest) = steps.first() else {
        bail!("{}: there is no checkpoint in it, no tokenizer.json, and it is no corpus", folder.display())
    };
    let checkpoint = Checkpoint::open(&store, newest)?;
    let manifest = checkpoint.manifest();
    let noun = if steps.len() == 1 { "checkpoint" } else { "checkpoints" };
    println!("{} {noun}; the newest, of step {newest}, by {}:", steps.len(), manifest.written_by);
    let model = &manifest.training["model"];
    for key in
        ["model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "n_embd", "n_layer"]
    {
        if !model[key].is_null() {
            println!("  {key:20} {}", model[key]);
        }
    }
    let (mut parameters, mut state) = (0, 0);
    for unit in &manifest.units {
        for tensor in &checkpoint.unit(&unit.name)?.table().tensors {
            let count = elements(&tensor.shape).unwrap_or(0);
            *(if tensor.name.contains('/') { &mut state } else { &mut parameters }) += count;
        }
    }
    println!(
        "  {:20} {:.1} million, and {:.1} million numbers of the optimizer's",
        "parameters",
        parameters as f64 / 1e6,
        state as f64 / 1e6
    );
    println!("  {:20} {:.1} MB in {} units", "size", checkpoint.bytes()? as f64 / 1e6, manifest.units.len());
    if let Some(progress) = manifest.training["progress"].as_object() {
        for (key, value) in progress {
            println!("  {key:20} {value}");
        }
    }
    Ok(())
}
