//! `shardwise tokenize`: from text to a corpus of tokens.

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
    /// Files and folders: plain text, JSON lines (.jsonl, also .gz and .zst), Parquet
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// Where the corpus goes: TO.bin and TO.idx
    #[arg(long)]
    to: PathBuf,
    /// A tokenizer.json, or the folder that it is in
    #[arg(long, required_unless_present = "vocabulary")]
    tokenizer: Option<PathBuf>,
    /// Learn a tokenizer of that many tokens from the inputs first, and keep it as tokenizer.json beside the corpus
    #[arg(long, conflicts_with = "tokenizer", value_parser = clap::value_parser!(u32).range(257..=1 << 20))]
    vocabulary: Option<u32>,
    /// Keep every so manieth document out of the corpus, in TO-held-out
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    held_out: Option<u32>,
    /// The field or column that has the text, in JSON and Parquet
    #[arg(long, default_value = "text")]
    field: String,
    /// How many threads encode; all cores unless said otherwise
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
}

/// The exit code of work that was stopped and can be continued.
const STOPPED: u8 = 3;

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let stopped = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // Who asks a second time does not want to wait.
        signal_hook::flag::register_conditional_default(signal, stopped.clone()).context("a signal's handler")?;
        signal_hook::flag::register(signal, stopped.clone()).context("a signal's handler")?;
    }
    match corpus(options, &stopped) {
        Err(error) if matches!(error.downcast_ref(), Some(Error::Stopped { .. })) => {
            eprintln!("{error}; the same command goes on from there");
            Ok(ExitCode::from(STOPPED))
        }
        done => done.map(|()| ExitCode::SUCCESS),
    }
}

fn corpus(options: &Options, stopped: &AtomicBool) -> Result<()> {
    let inputs = Inputs::new(&options.inputs, &options.field)?;
    if let Some(folder) = options.to.parent() {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let flow = |bar: &mut Bar, part: f64, what: String| match stopped.load(Ordering::Relaxed) {
        true => ControlFlow::Break(()),
        false => {
            bar.show(part, &what);
            ControlFlow::Continue(())
        }
    };
    let mut bar = Bar::new();
    let tokenizer = match (&options.tokenizer, options.vocabulary) {
        (Some(path), _) => Tokenizer::open(path)?,
        (None, vocabulary) => {
            let all = inputs.bytes().max(1) as f64;
            let mut progress = |bytes: u64| flow(&mut bar, bytes as f64 / all, "learning a tokenizer".to_string());
            learned(&inputs, vocabulary.unwrap_or_default() as usize, &options.to, &mut progress)?
        }
    };
    bar.clear();
    let how = shardwise_data::Options {
        prefix: options.to.clone(),
        held_out: options.held_out,
        threads: options.threads.map(|threads| threads as usize),
    };
    let summary = tokenize(&inputs, &tokenizer, &how, &mut |progress| {
        let what = format!("{:.1} million tokens", progress.tokens as f64 / 1e6);
        flow(&mut bar, progress.bytes_read as f64 / progress.bytes.max(1) as f64, what)
    })?;
    bar.clear();
    let said = |name: &str, totals: &Totals| {
        let Totals { documents, tokens, text_bytes } = *totals;
        let each = text_bytes as f64 / tokens.max(1) as f64;
        println!("{name}: {tokens} tokens of {documents} documents, {each:.2} bytes of text each");
    };
    said(&options.to.display().to_string(), &summary.corpus);
    if let Some(totals) = &summary.held_out {
        said(&format!("{}-held-out", options.to.display()), totals);
    }
    if summary.skipped_files > 0 {
        println!("{} files are no text, and were left out", summary.skipped_files);
    }
    let rate = summary.input_bytes as f64 / 1e6 / summary.seconds.max(1e-9);
    println!("{:.1} MB in {:.1} s: {rate:.1} MB/s", summary.input_bytes as f64 / 1e6, summary.seconds);
    Ok(())
}

/// A tokenizer that is learned from the inputs, beside the corpus. Where the corpus was begun, it was begun with the one that is
/// there.
fn learned(
    inputs: &Inputs,
    vocabulary: usize,
    to: &Path,
    progress: &mut (dyn FnMut(u64) -> ControlFlow<()> + Send),
) -> Result<Tokenizer> {
    let path = to.with_file_name("tokenizer.json");
    let mut state = to.as_os_str().to_owned();
    state.push(".part.json");
    if path.exists() {
        if Path::new(&state).exists() {
            let begun = Tokenizer::open(&path)?;
            if begun.vocabulary() <= vocabulary as u64 {
                return Ok(begun);
            }
        }
        let path = path.display();
        bail!("{path} is there already: use it with --tokenizer {path}, or give --to another folder");
    }
    let tokenizer = Tokenizer::train_bpe(inputs.texts(), vocabulary, progress)?;
    tokenizer.save(&path)?;
    println!("{}: {} tokens", path.display(), tokenizer.vocabulary());
    Ok(Tokenizer::open(path)?)
}

/// A line that says how far the work is, on a terminal.
struct Bar {
    on: bool,
    began: Instant,
    shown: Option<Instant>,
}

impl Bar {
    fn new() -> Self {
        Bar { on: std::io::stderr().is_terminal(), began: Instant::now(), shown: None }
    }

    fn show(&mut self, part: f64, what: &str) {
        if !self.on || self.shown.is_some_and(|shown| shown.elapsed() < Duration::from_millis(200)) {
            return;
        }
        self.shown = Some(Instant::now());
        let passed = self.began.elapsed().as_secs_f64();
        let left = if part > 0.01 { format!(", about {:.0} s left", passed / part - passed) } else { String::new() };
        // Whoever reads it may be gone.
        drop(write!(std::io::stderr(), "\r\x1b[K{:3.0}%  {what}{left}", (100. * part).min(100.)));
    }

    fn clear(&mut self) {
        if self.shown.take().is_some() {
            drop(write!(std::io::stderr(), "\r\x1b[K"));
        }
    }
}
