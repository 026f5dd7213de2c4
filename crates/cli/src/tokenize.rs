//! `shardwise tokenize`: tokenizes text into a corpus.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use shardwise_data::{Error, Inputs, Tokenizer, Totals, tokenize};
use signal_hook::consts::{SIGINT, SIGTERM};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Files and folders with plain text, JSON lines (.jsonl, also .gz and .zst) or Parquet
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// Write the corpus to TO.bin and TO.idx
    #[arg(long)]
    to: PathBuf,
    /// Use this tokenizer.json, or the one in this folder
    #[arg(long, required_unless_present = "vocabulary")]
    tokenizer: Option<PathBuf>,
    /// Train a tokenizer of this many tokens on the inputs first, and save it as tokenizer.json next to the corpus
    #[arg(long, conflicts_with = "tokenizer", value_parser = clap::value_parser!(u32).range(257..=1 << 20))]
    vocabulary: Option<u32>,
    /// Write every Nth document to TO-held-out instead
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    held_out: Option<u32>,
    /// Read the text from this JSON field or Parquet column
    #[arg(long, default_value = "text")]
    field: String,
    /// Tokenize with this many threads instead of one per core
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
}

/// The exit code if tokenizing was stopped and can be continued.
const STOPPED: u8 = 3;

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let stopped = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // A second signal ends the process at once.
        let context = "cannot install a signal handler";
        signal_hook::flag::register_conditional_default(signal, stopped.clone()).context(context)?;
        signal_hook::flag::register(signal, stopped.clone()).context(context)?;
    }
    match write_corpus(options, &stopped) {
        Err(error) if matches!(error.downcast_ref(), Some(Error::Stopped { .. })) => {
            eprintln!("stopped; repeat the same command to continue");
            Ok(ExitCode::from(STOPPED))
        }
        done => done.map(|()| ExitCode::SUCCESS),
    }
}

fn write_corpus(options: &Options, stopped: &AtomicBool) -> Result<()> {
    let inputs = Inputs::new(&options.inputs, &options.field)?;
    if let Some(folder) = options.to.parent() {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let report = |line: &mut ProgressLine, part: f64, what: String| match stopped.load(Ordering::Relaxed) {
        true => ControlFlow::Break(()),
        false => {
            line.show(part, &what);
            ControlFlow::Continue(())
        }
    };
    let mut line = ProgressLine::new();
    let tokenizer = match (&options.tokenizer, options.vocabulary) {
        (Some(path), _) => Tokenizer::open(path)?,
        (None, vocabulary) => {
            let all = inputs.bytes().max(1) as f64;
            let mut progress = |bytes: u64| report(&mut line, bytes as f64 / all, "training a tokenizer".to_string());
            train_tokenizer(&inputs, vocabulary.unwrap_or_default() as usize, &options.to, &mut progress)?
        }
    };
    line.clear();
    let how = shardwise_data::Options {
        prefix: options.to.clone(),
        held_out: options.held_out,
        threads: options.threads.map(|threads| threads as usize),
    };
    let summary = tokenize(&inputs, &tokenizer, &how, &mut |progress| {
        let what = format!("{:.1} million tokens", progress.tokens as f64 / 1e6);
        report(&mut line, progress.bytes_read as f64 / progress.bytes.max(1) as f64, what)
    })?;
    line.clear();
    let print = |name: &str, totals: &Totals| {
        let Totals { documents, tokens, text_bytes } = *totals;
        let each = text_bytes as f64 / tokens.max(1) as f64;
        println!("{name}: {tokens} tokens in {documents} documents, {each:.2} bytes of text per token");
    };
    print(&options.to.display().to_string(), &summary.corpus);
    if let Some(totals) = &summary.held_out {
        print(&format!("{}-held-out", options.to.display()), totals);
    }
    if summary.skipped_files > 0 {
        println!("skipped {} files that are not text", summary.skipped_files);
    }
    let rate = summary.input_bytes as f64 / 1e6 / summary.seconds.max(1e-9);
    println!("{:.1} MB in {:.1} s: {rate:.1} MB/s", summary.input_bytes as f64 / 1e6, summary.seconds);
    Ok(())
}

/// Trains a tokenizer on the inputs and saves it next to the corpus. If an interrupted run has already done so, uses that tokenizer.
fn train_tokenizer(
    inputs: &Inputs,
    vocab_size: usize,
    to: &Path,
    progress: &mut (dyn FnMut(u64) -> ControlFlow<()> + Send),
) -> Result<Tokenizer> {
    let path = to.with_file_name("tokenizer.json");
    let mut state = to.as_os_str().to_owned();
    state.push(".part.json");
    if path.exists() {
        if Path::new(&state).exists() {
            let existing = Tokenizer::open(&path)?;
            if existing.vocab_size() <= vocab_size as u64 {
                return Ok(existing);
            }
        }
        let path = path.display();
        bail!("{path} already exists: use it with --tokenizer {path}, or choose another folder for --to");
    }
    let tokenizer = Tokenizer::train_bpe(inputs.texts(), vocab_size, progress)?;
    tokenizer.save(&path)?;
    println!("{}: {} tokens", path.display(), tokenizer.vocab_size());
    Ok(Tokenizer::open(path)?)
}

/// A progress line on standard error, shown only on a terminal.
struct ProgressLine {
    on: bool,
    started: Instant,
    shown: Option<Instant>,
}

impl ProgressLine {
    fn new() -> Self {
        ProgressLine { on: std::io::stderr().is_terminal(), started: Instant::now(), shown: None }
    }

    fn show(&mut self, part: f64, what: &str) {
        if !self.on || self.shown.is_some_and(|shown| shown.elapsed() < Duration::from_millis(200)) {
            return;
        }
        self.shown = Some(Instant::now());
        let passed = self.started.elapsed().as_secs_f64();
        let left = if part > 0.01 { format!(", about {:.0} s left", passed / part - passed) } else { String::new() };
        // Errors are ignored: there may be no reader.
        drop(write!(std::io::stderr(), "\r\x1b[K{:3.0}%  {what}{left}", (100. * part).min(100.)));
    }

    fn clear(&mut self) {
        if self.shown.take().is_some() {
            drop(write!(std::io::stderr(), "\r\x1b[K"));
        }
    }
}
