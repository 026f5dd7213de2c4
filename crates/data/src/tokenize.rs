//! Tokenizing documents into a corpus on all cores, resumable after an interruption.
//!
//! One thread reads, several encode, and the calling thread writes in the order of the documents. Each batch of documents has a channel for
//! its tokens, and the channels are queued in the order of the batches. So the writer waits for the right one, and the length of the
//! queue bounds the memory.
//!
//! Tokens and the lengths of sequences go to part files. After every [`SAVE_INTERVAL_BYTES`] of text, the part files are synced, and then
//! `prefix.part.json` is replaced, which records their lengths and the position in the inputs. To resume, the part files are truncated to
//! those lengths and reading continues from there, so the corpus is the same however often it was interrupted.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::corpus::{LENGTHS_PART, TOKENS_PART, length_entry, prefix_of, publish, rename, with_ending};
use crate::source::{Cursor, Piece, Pieces};
use crate::tokenizer::read_text;
use crate::word_cache::WordCache;
use crate::{Error, Inputs, Result, TokenType, Tokenizer};

/// The amount of text between two saves of the state.
const SAVE_INTERVAL_BYTES: u64 = 64 << 20;
/// The amount of text that a thread encodes at once.
const BATCH_BYTES: usize = 256 << 10;
/// The number of batches per thread that may be read but not yet written.
const QUEUED_BATCHES: usize = 4;
/// The longest text that is encoded at once. Longer ones are split at line ends, since encoding takes a few hundred bytes of
/// memory per byte.
const ENCODED_BYTES_MAX: usize = 1 << 20;
const STATE_BYTES_MAX: u64 = 1 << 20;

/// Options for [`tokenize`].
#[derive(Clone, Debug)]
pub struct Options {
    /// The path of the corpus without its endings: `prefix.bin`, `prefix.idx`, and `prefix.json` with a [`CorpusInfo`].
    pub prefix: PathBuf,
    /// Write every n-th document to `prefix-held-out` instead.
    pub held_out: Option<u32>,
    /// The number of encoding threads, one per core by default.
    pub threads: Option<usize>,
}

/// The progress of [`tokenize`].
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The number of bytes read from the files.
    pub bytes_read: u64,
    /// The total length of the files.
    pub bytes: u64,
    /// The number of documents written.
    pub documents: u64,
    /// The number of tokens written.
    pub tokens: u64,
}

/// The result of [`tokenize`].
#[derive(Clone, Debug)]
pub struct Summary {
    /// The size of the corpus.
    pub corpus: Totals,
    /// The size of the held-out corpus.
    pub held_out: Option<Totals>,
    /// The total length of the files.
    pub input_bytes: u64,
    /// The number of files that were skipped because they are not text.
    pub skipped_files: u64,
    /// The time that the work took, excluding interruptions.
    pub seconds: f64,
}

/// The size of a corpus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// The number of documents that are not empty.
    pub documents: u64,
    /// The number of tokens, including the end-of-text tokens.
    pub tokens: u64,
    /// The length of the text in UTF-8, from which bits per byte are computed.
    pub text_bytes: u64,
}

/// The contents of `prefix.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorpusInfo {
    /// The size of the corpus.
    #[serde(flatten)]
    pub totals: Totals,
    /// The hash of the tokenizer.
    pub tokenizer: String,
    /// The vocabulary size of the tokenizer.
    #[serde(rename = "vocabulary")]
    pub vocab_size: u64,
    /// The token at the end of every document.
    pub end_of_text: u32,
    /// The name and version of the program that wrote the corpus.
    pub written_by: String,
}

impl CorpusInfo {
    /// Reads the info of a corpus, given its prefix or one of its files. Returns `None` for a corpus that Shardwise did not write.
    pub fn read(path: impl AsRef<Path>) -> Result<Option<Self>> {
        let path = with_ending(&prefix_of(path.as_ref()), ".json");
        match path.exists() {
            true => read_json(&path).map(Some),
            false => Ok(None),
        }
    }
}

/// Tokenizes documents into a corpus. `progress` may stop the work; the same call resumes it.
pub fn tokenize(
    inputs: &Inputs,
    tokenizer: &Tokenizer,
    options: &Options,
    progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<Summary> {
    let end_of_text = tokenizer.end_of_text().ok_or_else(|| {
        let problem = "it has no end-of-text token; set eos_token in tokenizer_config.json in the same folder";
        Error::tokenizer(tokenizer.path(), problem)
    })?;
    if options.held_out == Some(0) || options.threads == Some(0) {
        return Err(Error::invalid_argument("held_out and threads must be at least 1"));
    }
    let mut work = Tokenization::start(inputs, tokenizer, options)?;
    if !work.state.complete {
        let encoder = Encoder { tokenizer, kind: work.kind, end_of_text };
        work.run(inputs, encoder, options, progress)?;
    }
    work.finish(tokenizer, end_of_text, inputs.bytes())
}

/// The contents of `prefix.part.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct State {
    /// The hash of the inputs.
    inputs: String,
    /// The hash of the tokenizer.
    tokenizer: String,
    held_out: Option<u32>,
    /// The position up to which the inputs are done.
    #[serde(rename = "place")]
    cursor: Cursor,
    documents: u64,
    skipped: u64,
    seconds: f64,
    complete: bool,
    /// The corpus, and the held-out corpus if there is one.
    parts: Vec<Part>,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Part {
    totals: Totals,
    token_bytes: u64,
    length_bytes: u64,
}

/// A running tokenization.
struct Tokenization {
    path: PathBuf,
    state: State,
    kind: TokenType,
    prefixes: Vec<PathBuf>,
    /// Empty if only the renaming is left to do.
    outputs: Vec<Output>,
    started: Instant,
}

/// The part files of a corpus, with their paths.
struct Output {
    tokens: (PathBuf, File),
    lengths: (PathBuf, File),
}

impl Tokenization {
    fn start(inputs: &Inputs, tokenizer: &Tokenizer, options: &Options) -> Result<Self> {
        let prefix = &options.prefix;
        let path = with_ending(prefix, ".part.json");
        let mut prefixes = vec![prefix.clone()];
        prefixes.extend(options.held_out.map(|_| with_ending(prefix, "-held-out")));
        let fresh = State {
            inputs: inputs.hash(),
            tokenizer: tokenizer.hash(),
            held_out: options.held_out,
            cursor: Cursor::default(),
            documents: 0,
            skipped: 0,
            seconds: 0.0,
            complete: false,
            parts: vec![Part::default(); prefixes.len()],
        };
        let state = match path.exists() {
            true => resume(&path, fresh)?,
            false => fresh,
        };
        let kind = TokenType::for_vocab_size(tokenizer.vocab_size());
        let outputs = match state.complete {
            true => Vec::new(),
            false => prefixes
                .iter()
                .zip(&state.parts)
                .map(|(prefix, part)| Output::open(prefix, part))
                .collect::<Result<_>>()?,
        };
        let mut work = Tokenization { path, state, kind, prefixes, outputs, started: Instant::now() };
        if !work.state.complete {
            work.save()?;
        }
        Ok(work)
    }

    fn run(
        &mut self,
        inputs: &Inputs,
        encoder: Encoder<'_>,
        options: &Options,
        progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<()> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads.unwrap_or(cores);
        let batches = BatchReader {
            pieces: inputs.pieces_from(self.state.cursor),
            held_out: options.held_out.map(u64::from),
            documents: self.state.documents,
            skipped: self.state.skipped,
        };
        let (to_encode, queue) = sync_channel(threads);
        let (to_write, encoded) = sync_channel(threads * QUEUED_BATCHES);
        let queue = Mutex::new(queue);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| encoder.run(&queue));
            }
            scope.spawn(move || batches.send(&to_encode, &to_write));
            // Pass `encoded` by value: when `write` returns, for whatever reason, the channel closes and the other threads end.
            self.write(encoded, inputs.bytes(), progress)
        })
    }

    /// Writes the encoded batches in their order.
    fn write(
        &mut self,
        encoded: Receiver<Receiver<Result<EncodedBatch>>>,
        bytes: u64,
        progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<()> {
        let mut unsaved = 0;
        for next in encoded {
            let Ok(batch) = next.recv() else { break };
            let batch = batch?;
            for ((output, part), chunk) in self.outputs.iter_mut().zip(&mut self.state.parts).zip(&batch.chunks) {
                output.write(part, chunk)?;
                unsaved += chunk.totals.text_bytes;
            }
            let InputState { cursor, documents, skipped, bytes_read, complete } = batch.input_state;
            (self.state.cursor, self.state.documents, self.state.skipped) = (cursor, documents, skipped);
            self.state.complete = complete;
            let total = |count: fn(&Totals) -> u64| self.state.parts.iter().map(|part| count(&part.totals)).sum();
            let (documents, tokens) = (total(|totals| totals.documents), total(|totals| totals.tokens));
            let is_stopped = progress(&Progress { bytes_read, bytes, documents, tokens }).is_break();
            if unsaved >= SAVE_INTERVAL_BYTES || complete || is_stopped {
                self.save()?;
                unsaved = 0;
            }
            if complete {
                return Ok(());
            }
            if is_stopped {
                return Err(Error::Stopped { path: self.path.display().to_string() });
            }
        }
        unreachable!("the last batch is complete or an error, unless a thread has panicked")
    }

    /// Saves the state, so that the work can resume from here.
    fn save(&mut self) -> Result<()> {
        for output in &self.outputs {
            for (path, file) in [&output.tokens, &output.lengths] {
                file.sync_data().map_err(Error::io(path))?;
            }
        }
        self.state.seconds += self.started.elapsed().as_secs_f64();
        self.started = Instant::now();
        write_json(&self.path, &self.state)
    }

    /// Renames all files to their final names. Can be interrupted anywhere and repeated.
    fn finish(self, tokenizer: &Tokenizer, end_of_text: u32, input_bytes: u64) -> Result<Summary> {
        for (prefix, part) in self.prefixes.iter().zip(&self.state.parts) {
            publish(prefix, self.kind)?;
            let info = CorpusInfo {
                totals: part.totals,
                tokenizer: tokenizer.hash(),
                vocab_size: tokenizer.vocab_size(),
                end_of_text,
                written_by: concat!("shardwise ", env!("CARGO_PKG_VERSION")).to_string(),
            };
            write_json(&with_ending(prefix, ".json"), &info)?;
        }
        std::fs::remove_file(&self.path).map_err(Error::io(&self.path))?;
        Ok(Summary {
            corpus: self.state.parts[0].totals,
            held_out: self.state.parts.get(1).map(|part| part.totals),
            input_bytes,
            skipped_files: self.state.skipped,
            seconds: self.state.seconds + self.started.elapsed().as_secs_f64(),
        })
    }
}

/// Reads the state of interrupted work, and checks that it had the same inputs and options.
fn resume(path: &Path, fresh: State) -> Result<State> {
    let state: State = read_json(path)?;
    let same = [
        ("other files or another text field", state.inputs == fresh.inputs),
        ("another tokenizer", state.tokenizer == fresh.tokenizer),
        ("another held-out share", state.held_out == fresh.held_out && state.parts.len() == fresh.parts.len()),
    ];
    match same.iter().find(|(_, same)| !same) {
        None => Ok(state),
        Some((what, _)) => {
            let problem =
                format!("this corpus was started with {what}; use the same again, or remove this file to start over");
            Err(Error::Resume { path: path.display().to_string(), problem })
        }
    }
}

impl Output {
    /// Opens the part files, truncated to their lengths when the state was saved.
    fn open(prefix: &Path, part: &Part) -> Result<Self> {
        let finished = with_ending(prefix, ".idx");
        if finished.exists() {
            return Err(Error::corpus(&finished, "it already exists; remove that corpus or choose another name"));
        }
        let open = |ending, bytes| {
            let path = with_ending(prefix, ending);
            let file = File::options().read(true).write(true).create(true).truncate(false).open(&path);
            let mut file = file.map_err(Error::io(&path))?;
            if file.try_lock().is_err() {
                return Err(Error::corpus(&path, "another process is writing this corpus"));
            }
            let length = file.metadata().map_err(Error::io(&path))?.len();
            if length < bytes {
                let problem =
                    format!("it has {length} bytes, but had {bytes} before; remove the .part files to start over");
                return Err(Error::Resume { path: path.display().to_string(), problem });
            }
            file.set_len(bytes).and_then(|()| file.seek(SeekFrom::End(0))).map_err(Error::io(&path))?;
            Ok((path, file))
        };
        Ok(Output { tokens: open(TOKENS_PART, part.token_bytes)?, lengths: open(LENGTHS_PART, part.length_bytes)? })
    }

    fn write(&mut self, part: &mut Part, chunk: &Chunk) -> Result<()> {
        let (path, file) = &mut self.tokens;
        file.write_all(&chunk.tokens).map_err(Error::io(path))?;
        let (path, file) = &mut self.lengths;
        file.write_all(&chunk.lengths).map_err(Error::io(path))?;
        part.token_bytes += chunk.tokens.len() as u64;
        part.length_bytes += chunk.lengths.len() as u64;
        part.totals.documents += chunk.totals.documents;
        part.totals.tokens += chunk.totals.tokens;
        part.totals.text_bytes += chunk.totals.text_bytes;
        Ok(())
    }
}

/// A batch of text to encode, and the channel for its tokens.
struct Job {
    /// Each piece, with the index of the corpus that it belongs to.
    pieces: Vec<(usize, Piece)>,
    input_state: InputState,
    reply: SyncSender<Result<EncodedBatch>>,
}

/// The state of the inputs after a batch.
#[derive(Clone, Copy)]
struct InputState {
    cursor: Cursor,
    documents: u64,
    skipped: u64,
    bytes_read: u64,
    complete: bool,
}

/// Reads documents in batches.
struct BatchReader<'a> {
    pieces: Pieces<'a>,
    held_out: Option<u64>,
    documents: u64,
    /// The number of files that were skipped before this call.
    skipped: u64,
}

impl BatchReader<'_> {
    /// Sends all batches, until there are no more or the receivers are gone.
    fn send(mut self, to_encode: &SyncSender<Job>, to_write: &SyncSender<Receiver<Result<EncodedBatch>>>) {
        loop {
            let (reply, answer) = sync_channel(1);
            if to_write.send(answer).is_err() {
                return;
            }
            let (pieces, input_state) = match self.next() {
                Ok(batch) => batch,
                // The writer may be gone.
                Err(error) => return drop(reply.send(Err(error))),
            };
            if to_encode.send(Job { pieces, input_state, reply }).is_err() || input_state.complete {
                return;
            }
        }
    }

    fn next(&mut self) -> Result<(Vec<(usize, Piece)>, InputState)> {
        let (mut batch, mut bytes, mut complete) = (Vec::new(), 0, false);
        while bytes < BATCH_BYTES && !complete {
            let Some(piece) = self.pieces.next().transpose()? else {
                complete = true;
                continue;
            };
            bytes += piece.text.len().max(1);
            let part = self.held_out.is_some_and(|nth| self.documents % nth == nth - 1);
            self.documents += u64::from(piece.last);
            batch.push((usize::from(part), piece));
        }
        let input_state = InputState {
            cursor: self.pieces.cursor(),
            documents: self.documents,
            skipped: self.skipped + self.pieces.skipped(),
            bytes_read: self.pieces.bytes_read(),
            complete,
        };
        Ok((batch, input_state))
    }
}

struct EncodedBatch {
    chunks: [Chunk; 2],
    input_state: InputState,
}

/// Encoded data to append to a part.
#[derive(Default)]
struct Chunk {
    tokens: Vec<u8>,
    lengths: Vec<u8>,
    totals: Totals,
}

#[derive(Clone, Copy)]
struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    kind: TokenType,
    end_of_text: u32,
}

impl Encoder<'_> {
    fn run(self, queue: &Mutex<Receiver<Job>>) {
        let mut cache = WordCache::default();
        loop {
            let job = queue.lock().map(|queue| queue.recv());
            let Ok(Ok(Job { pieces, input_state, reply })) = job else { return };
            // The writer is gone if it was stopped.
            drop(reply.send(self.encode(&mut cache, pieces, input_state)));
        }
    }

    fn encode(
        self,
        cache: &mut WordCache,
        pieces: Vec<(usize, Piece)>,
        input_state: InputState,
    ) -> Result<EncodedBatch> {
        let mut chunks = [Chunk::default(), Chunk::default()];
        for (part, piece) in pieces.into_iter().filter(|(_, piece)| !piece.text.is_empty()) {
            let mut tokens = Vec::with_capacity(piece.text.len() / 3);
            for text in split_long(&piece.text) {
                self.tokenizer.encode_cached(cache, text, &mut tokens)?;
            }
            tokens.extend(piece.last.then_some(self.end_of_text));
            let entry = length_entry(tokens.len(), piece.last).expect("a document has fewer bytes than 2^31");
            let chunk = &mut chunks[part];
            self.kind.extend(&mut chunk.tokens, &tokens);
            chunk.lengths.extend(entry.to_le_bytes());
            chunk.totals.documents += u64::from(piece.last);
            chunk.totals.tokens += tokens.len() as u64;
            chunk.totals.text_bytes += piece.text.len() as u64;
        }
        Ok(EncodedBatch { chunks, input_state })
    }
}

/// Splits a text that is too long to encode at once, at line ends if it has any.
fn split_long(mut text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    while text.len() > ENCODED_BYTES_MAX {
        let max = text.floor_char_boundary(ENCODED_BYTES_MAX);
        let end = text[..max].rfind('\n').map_or(max, |end| end + 1);
        let (part, rest) = text.split_at(end);
        parts.push(part);
        text = rest;
    }
    parts.push(text);
    parts
}

fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T> {
    serde_json::from_str(&read_text(path, STATE_BYTES_MAX)?).map_err(|error| Error::corpus(path, error.to_string()))
}

/// Writes a file atomically.
fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let json = serde_json::to_vec_pretty(value).map_err(|error| Error::corpus(path, error.to_string()))?;
    let staged = with_ending(path, ".new");
    let written = File::create(&staged).and_then(|mut file| file.write_all(&json).and_then(|()| file.sync_all()));
    written.map_err(Error::io(&staged))?;
    rename(&staged, path)
}
