//! `shardwise inspect`: shows what is in a corpus, a tokenizer or a checkpoint folder.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use shardwise_checkpoint::{Checkpoint, Store, elements};
use shardwise_data::{Corpus, CorpusInfo, Tokenizer};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// A corpus (TO, TO.bin or TO.idx), a tokenizer.json, or a checkpoint folder
    path: PathBuf,
    /// Show the tokens of this text, if PATH is a tokenizer
    #[arg(long)]
    text: Option<String>,
    /// Show the first documents as text, decoded with this tokenizer, if PATH is a corpus
    #[arg(long)]
    tokenizer: Option<PathBuf>,
    /// Show this many documents
    #[arg(long, default_value_t = 3)]
    documents: u64,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let path = &options.path;
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if name == "tokenizer.json" || path.join("tokenizer.json").is_file() {
        show_tokenizer(options)?;
    } else if path.is_dir() {
        show_checkpoints(path)?;
    } else if name.ends_with(".toml") {
        bail!("{} is a recipe: use `shardwise config {0}` to see its values", path.display());
    } else {
        show_corpus(options)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn show_tokenizer(options: &Options) -> Result<()> {
    let tokenizer = Tokenizer::open(&options.path)?;
    let end = tokenizer.end_of_text().map_or("no end-of-text token".to_string(), |id| {
        format!("end-of-text token {:?} ({id})", tokenizer.decode(&[id]).unwrap_or_default())
    });
    println!("{}: {} tokens; {end}", tokenizer.path().display(), tokenizer.vocab_size());
    if let Some(text) = &options.text {
        for id in tokenizer.encode(text)? {
            println!("{id:>8}  {:?}", tokenizer.decode(&[id])?);
        }
    }
    Ok(())
}

fn show_corpus(options: &Options) -> Result<()> {
    let corpus = Corpus::open(&options.path)?;
    let kind = format!("{:?}", corpus.token_type()).to_lowercase();
    println!("{}: {} tokens in {} documents, as {kind}", corpus.path().display(), corpus.tokens(), corpus.documents());
    if let Some(CorpusInfo { totals, vocab_size, end_of_text, written_by, .. }) = CorpusInfo::read(corpus.path())? {
        let each = totals.text_bytes as f64 / totals.tokens.max(1) as f64;
        println!(
            "{} bytes of text, {each:.2} per token; vocabulary size {vocab_size}, end-of-text token {end_of_text}; written by \
             {written_by}",
            totals.text_bytes
        );
    }
    let Some(path) = &options.tokenizer else { return Ok(()) };
    let tokenizer = Tokenizer::open(path)?;
    for number in 0..options.documents.min(corpus.documents()) {
        let document = corpus.document(number)?;
        let shown = document.start..document.end.min(document.start + 60);
        let mut ids = vec![0; (shown.end - shown.start) as usize];
        corpus.read(shown.start, &mut ids)?;
        println!("document {number}, {} tokens: {:?}…", document.end - document.start, tokenizer.decode(&ids)?);
    }
    Ok(())
}

fn show_checkpoints(folder: &Path) -> Result<()> {
    let store = Arc::new(Store::open(&folder.display().to_string())?);
    let steps = store.steps()?;
    let Some(&newest) = steps.first() else {
        bail!("{}: this folder has neither checkpoints nor a tokenizer.json", folder.display())
    };
    let checkpoint = Checkpoint::open(&store, newest)?;
    let manifest = checkpoint.manifest();
    let noun = if steps.len() == 1 { "checkpoint" } else { "checkpoints" };
    println!("{} {noun}; the newest is of step {newest}, written by {}:", steps.len(), manifest.written_by);
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
        "  {:20} {:.1} million, and {:.1} million values of optimizer state",
        "parameters",
        parameters as f64 / 1e6,
        state as f64 / 1e6
    );
    println!("  {:20} {:.1} MB in {} units", "size", checkpoint.bytes()? as f64 / 1e6, manifest.units.len());
    if let Some(progress) = manifest.training["progress"].as_object() {
        for (key, value) in progress {
            match value.as_array() {
                Some(units) if key == "expert_biases" => {
                    let blocks =
                        units.iter().filter(|biases| biases.as_array().is_some_and(|biases| !biases.is_empty()));
                    println!("  {key:20} of {} blocks", blocks.count());
                }
                _ => println!("  {key:20} {value}"),
            }
        }
    }
    Ok(())
}
