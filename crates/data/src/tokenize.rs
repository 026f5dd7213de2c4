//! Documents to a corpus, by all processors, and from where it was interrupted.
//!
//! One thread reads, some encode, and the caller's writes, in the documents' order. Each batch of documents has a channel for
//! its tokens, and the channels are queued in the order of the batches, so that the writer waits for the right one, and the
//! length of the queue bounds what is in memory.
//!
//! Tokens, and the lengths of sequences, go to part files. Every [`SAVED_BYTES`] of text the part files are synced and then
//! `prefix.part.json` is replaced, which says how long they are and up to where the inputs are done. Whoever continues cuts the
//! part files to those lengths, and reads on from there: the bytes of the corpus do not depend on how often that happened.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::indexed::{LENGTHS_PART, TOKENS_PART, list_entry, prefix_of, publish, rename, with_ending};
use crate::source::{Piece, Pieces, Place};
use crate::tokenizer::read_text;
use crate::words::Memory;
use crate::{Error, Inputs, Result, TokenType, Tokenizer};

/// Text between two saves of the state.
const SAVED_BYTES: u64 = 64 << 20;
/// Text that a thread encodes at once.
const BATCH_BYTES: usize = 256 << 10;
/// Batches for each thread that may be read, and not yet written.
const BATCHES: usize = 4;
/// Longer texts are encoded in parts, cut at ends of lines, since encoding needs some hundred bytes for each byte.
const ENCODED_BYTES: usize = 1 << 20;
const STATE_BYTES_MAX: u64 = 1 << 20;

/// What becomes of the documents.
#[derive(Clone, Debug)]
pub struct Options {
    /// The corpus: `prefix.bin`, `prefix.idx`, and `prefix.json`, which is [`About`] it.
    pub prefix: PathBuf,
    /// Every n-th document goes to `prefix-held-out` instead.
    pub held_out: Option<u32>,
    /// How many threads encode; all processors, if it is not said.
    pub threads: Option<usize>,
}

/// How far the work is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// How much of the files was read.
    pub bytes_read: u64,
    /// How long the files are.
    pub bytes: u64,
    /// The documents that are written.
    pub documents: u64,
    /// The tokens that are written.
    pub tokens: u64,
}

/// What has become of the documents.
#[derive(Clone, Debug)]
pub struct Summary {
    /// What is in the corpus.
    pub corpus: Totals,
    /// What is held out.
    pub held_out: Option<Totals>,
    /// How long the files are.
    pub input_bytes: u64,
    /// Files that are no text.
    pub skipped_files: u64,
    /// How long it took, interruptions left out.
    pub seconds: f64,
}

/// The size of a corpus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Documents that are not empty.
    pub documents: u64,
    /// Tokens, with those that end documents.
    pub tokens: u64,
    /// The text in UTF-8, which bits per byte are counted for.
    pub text_bytes: u64,
}

/// What `prefix.json` says of a corpus.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Its size.
    #[serde(flatten)]
    pub totals: Totals,
    /// The hash of the tokenizer that it was made with.
    pub tokenizer: String,
    /// The tokenizer's vocabulary.
    pub vocabulary: u64,
    /// The token that ends every document.
    pub end_of_text: u32,
    /// The program and its version.
    pub written_by: String,
}

impl About {
    /// Reads what is said of a corpus, by its prefix or one of its files. Only those that Shardwise made have it.
    pub fn read(path: impl AsRef<Path>) -> Result<Option<Self>> {
        let path = with_ending(&prefix_of(path.as_ref()), ".json");
        match path.exists() {
            true => read_json(&path).map(Some),
            false => Ok(None),
        }
    }
}

/// Makes a corpus of documents, or continues to. `progress` may stop the work; the same call continues it.
pub fn tokenize(
    inputs: &Inputs,
    tokenizer: &Tokenizer,
    options: &Options,
    progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<Summary> {
    let end_of_text = tokenizer.end_of_text().ok_or_else(|| {
        let problem = "it has no token that ends a text; name one as eos_token in tokenizer_config.json beside it";
        Error::tokenizer(tokenizer.path(), problem)
    })?;
    if options.held_out == Some(0) || options.threads == Some(0) {
        return Err(Error::settings("every 0th document held out, or 0 threads; give 1 or more, or neither"));
    }
    let mut work = Work::begin(inputs, tokenizer, options)?;
    if !work.state.complete {
        let encoder = Encoder { tokenizer, kind: work.kind, end_of_text };
        work.run(inputs, encoder, options, progress)?;
    }
    work.finish(tokenizer, end_of_text, inputs.bytes())
}

/// What `prefix.part.json` says.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct State {
    /// What the work was begun with.
    inputs: String,
    tokenizer: String,
    held_out: Option<u32>,
    /// Up to where the inputs are done.
    place: Place,
    documents: u64,
    skipped: u64,
    seconds: f64,
    complete: bool,
    /// The corpus, and what is held out.
    parts: Vec<Part>,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Part {
    totals: Totals,
    token_bytes: u64,
    length_bytes: u64,
}

/// The work between two interruptions.
struct Work {
    path: PathBuf,
    state: State,
    kind: TokenType,
    prefixes: Vec<PathBuf>,
    /// None, if only names are left to be given.
    outputs: Vec<Output>,
    began: Instant,
}

/// Part files, with their names.
struct Output {
    tokens: (PathBuf, File),
    lengths: (PathBuf, File),
}

impl Work {
    fn begin(inputs: &Inputs, tokenizer: &Tokenizer, options: &Options) -> Result<Self> {
        let prefix = &options.prefix;
        let path = with_ending(prefix, ".part.json");
        let mut prefixes = vec![prefix.clone()];
        prefixes.extend(options.held_out.map(|_| with_ending(prefix, "-held-out")));
        let fresh = State {
            inputs: inputs.hash(),
            tokenizer: tokenizer.hash(),
            held_out: options.held_out,
            place: Place::default(),
            documents: 0,
            skipped: 0,
            seconds: 0.0,
            complete: false,
            parts: vec![Part::default(); prefixes.len()],
        };
        let state = match path.exists() {
            true => continued(&path, fresh)?,
            false => fresh,
        };
        let kind = TokenType::of_vocabulary(tokenizer.vocabulary());
        let outputs = match state.complete {
            true => Vec::new(),
            false => prefixes
                .iter()
                .zip(&state.parts)
                .map(|(prefix, part)| Output::open(prefix, part))
                .collect::<Result<_>>()?,
        };
        let mut work = Work { path, state, kind, prefixes, outputs, began: Instant::now() };
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
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads.unwrap_or(processors);
        let batches = Batches {
            pieces: inputs.pieces_from(self.state.place),
            held_out: options.held_out.map(u64::from),
            documents: self.state.documents,
            skipped: self.state.skipped,
        };
        let (to_encode, queue) = sync_channel(threads);
        let (to_write, encoded) = sync_channel(threads * BATCHES);
        let queue = Mutex::new(queue);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| encoder.run(&queue));
            }
            scope.spawn(move || batches.send(&to_encode, &to_write));
            // Taken by value: when it ends, for whatever reason, the threads find nobody to work for, and end as well.
            self.write(encoded, inputs.bytes(), progress)
        })
    }

    /// Writes what is encoded, in its order.
    fn write(
        &mut self,
        encoded: Receiver<Receiver<Result<Encoded>>>,
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
            let Reached { place, documents, skipped, bytes_read, complete } = batch.reached;
            (self.state.place, self.state.documents, self.state.skipped) = (place, documents, skipped);
            self.state.complete = complete;
            let total = |count: fn(&Totals) -> u64| self.state.parts.iter().map(|part| count(&part.totals)).sum();
            let (documents, tokens) = (total(|totals| totals.documents), total(|totals| totals.tokens));
            let going_on = progress(&Progress { bytes_read, bytes, documents, tokens }).is_continue();
            if unsaved >= SAVED_BYTES || complete || !going_on {
                self.save()?;
                unsaved = 0;
            }
            if complete {
                return Ok(());
            }
            if !going_on {
                return Err(Error::Stopped { path: self.path.display().to_string() });
            }
        }
        unreachable!("the reader ends with a batch that is complete or an error, unless a thread has panicked")
    }

    /// Makes sure that the work can be continued from here.
    fn save(&mut self) -> Result<()> {
        for output in &self.outputs {
            for (path, file) in [&output.tokens, &output.lengths] {
                file.sync_data().map_err(Error::system(path))?;
            }
        }
        self.state.seconds += self.began.elapsed().as_secs_f64();
        self.began = Instant::now();
        write_json(&self.path, &self.state)
    }

    /// Gives everything its name. It can be interrupted anywhere, and be done again.
    fn finish(self, tokenizer: &Tokenizer, end_of_text: u32, input_bytes: u64) -> Result<Summary> {
        for (prefix, part) in self.prefixes.iter().zip(&self.state.parts) {
            publish(prefix, self.kind)?;
            let about = About {
                totals: part.totals,
                tokenizer: tokenizer.hash(),
                vocabulary: tokenizer.vocabulary(),
                end_of_text,
                written_by: concat!("shardwise ", env!("CARGO_PKG_VERSION")).to_string(),
            };
            write_json(&with_ending(prefix, ".json"), &about)?;
        }
        std::fs::remove_file(&self.path).map_err(Error::system(&self.path))?;
        Ok(Summary {
            corpus: self.state.parts[0].totals,
            held_out: self.state.parts.get(1).map(|part| part.totals),
            input_bytes,
            skipped_files: self.state.skipped,
            seconds: self.state.seconds + self.began.elapsed().as_secs_f64(),
        })
    }
}

/// The state of work that was begun, if it was begun with the same things.
fn continued(path: &Path, fresh: State) -> Result<State> {
    let state: State = read_json(path)?;
    let same = [
        ("files, or the field with the text", state.inputs == fresh.inputs),
        ("tokenizer", state.tokenizer == fresh.tokenizer),
        ("share that is held out", state.held_out == fresh.held_out && state.parts.len() == fresh.parts.len()),
    ];
    match same.iter().find(|(_, same)| !same) {
        None => Ok(state),
        Some((what, _)) => {
            let problem =
                format!("this was begun with another {what}; go back to those, or remove this file to begin anew");
            Err(Error::Continuation { path: path.display().to_string(), problem })
        }
    }
}

impl Output {
    /// Opens part files as they were when the state was saved.
    fn open(prefix: &Path, part: &Part) -> Result<Self> {
        let finished = with_ending(prefix, ".idx");
        if finished.exists() {
            return Err(Error::corpus(&finished, "it is there already; remove that corpus, or take another name"));
        }
        let open = |ending, bytes| {
            let path = with_ending(prefix, ending);
            let file = File::options().read(true).write(true).create(true).truncate(false).open(&path);
            let mut file = file.map_err(Error::system(&path))?;
            if file.try_lock().is_err() {
                return Err(Error::corpus(&path, "another process is writing it"));
            }
            let length = file.metadata().map_err(Error::system(&path))?.len();
            if length < bytes {
                let problem = format!("it has {length} bytes, and had {bytes}; remove the .part files to begin anew");
                return Err(Error::Continuation { path: path.display().to_string(), problem });
            }
            file.set_len(bytes).and_then(|()| file.seek(SeekFrom::End(0))).map_err(Error::system(&path))?;
            Ok((path, file))
        };
        Ok(Output { tokens: open(TOKENS_PART, part.token_bytes)?, lengths: open(LENGTHS_PART, part.length_bytes)? })
    }

    fn write(&mut self, part: &mut Part, chunk: &Chunk) -> Result<()> {
        let (path, file) = &mut self.tokens;
        file.write_all(&chunk.tokens).map_err(Error::system(path))?;
        let (path, file) = &mut self.lengths;
        file.write_all(&chunk.lengths).map_err(Error::system(path))?;
        part.token_bytes += chunk.tokens.len() as u64;
        part.length_bytes += chunk.lengths.len() as u64;
        part.totals.documents += chunk.totals.documents;
        part.totals.tokens += chunk.totals.tokens;
        part.totals.text_bytes += chunk.totals.text_bytes;
        Ok(())
    }
}

/// Text to be encoded, and where its tokens are waited for.
struct Job {
    /// With the number of the part that each belongs to.
    pieces: Vec<(usize, Piece)>,
    reached: Reached,
    reply: SyncSender<Result<Encoded>>,
}

/// Where the inputs are after a batch.
#[derive(Clone, Copy)]
struct Reached {
    place: Place,
    documents: u64,
    skipped: u64,
    bytes_read: u64,
    complete: bool,
}

/// The reader's side: documents, some at once.
struct Batches<'a> {
    pieces: Pieces<'a>,
    held_out: Option<u64>,
    documents: u64,
    /// Before this run.
    skipped: u64,
}

impl Batches<'_> {
    /// Sends everything, until there is no more, or nobody who wants it.
    fn send(mut self, to_encode: &SyncSender<Job>, to_write: &SyncSender<Receiver<Result<Encoded>>>) {
        loop {
            let (reply, answer) = sync_channel(1);
            if to_write.send(answer).is_err() {
                return;
            }
            let (pieces, reached) = match self.next() {
                Ok(batch) => batch,
                // Nobody has to be there for it.
                Err(error) => return drop(reply.send(Err(error))),
            };
            if to_encode.send(Job { pieces, reached, reply }).is_err() || reached.complete {
                return;
            }
        }
    }

    fn next(&mut self) -> Result<(Vec<(usize, Piece)>, Reached)> {
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
        let reached = Reached {
            place: self.pieces.place(),
            documents: self.documents,
            skipped: self.skipped + self.pieces.skipped(),
            bytes_read: self.pieces.bytes_read(),
            complete,
        };
        Ok((batch, reached))
    }
}

/// What a batch has become.
struct Encoded {
    chunks: [Chunk; 2],
    reached: Reached,
}

/// What is to be added to a part.
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
        let mut memory = Memory::default();
        loop {
            let job = queue.lock().map(|queue| queue.recv());
            let Ok(Ok(Job { pieces, reached, reply })) = job else { return };
            // The writer may be gone, if it was stopped.
            drop(reply.send(self.encoded(&mut memory, pieces, reached)));
        }
    }

    fn encoded(self, memory: &mut Memory, pieces: Vec<(usize, Piece)>, reached: Reached) -> Result<Encoded> {
        let mut chunks = [Chunk::default(), Chunk::default()];
        for (part, piece) in pieces.into_iter().filter(|(_, piece)| !piece.text.is_empty()) {
            let mut tokens = Vec::with_capacity(piece.text.len() / 3);
            for text in divided(&piece.text) {
                self.tokenizer.encode_with(memory, text, &mut tokens)?;
            }
            tokens.extend(piece.last.then_some(self.end_of_text));
            let entry = list_entry(tokens.len(), piece.last).expect("a document has fewer bytes than 2^31");
            let chunk = &mut chunks[part];
            self.kind.extend(&mut chunk.tokens, &tokens);
            chunk.lengths.extend(entry.to_le_bytes());
            chunk.totals.documents += u64::from(piece.last);
            chunk.totals.tokens += tokens.len() as u64;
            chunk.totals.text_bytes += piece.text.len() as u64;
        }
        Ok(Encoded { chunks, reached })
    }
}

/// A text in parts that are not too long, cut at ends of lines where there are any.
fn divided(mut text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    while text.len() > ENCODED_BYTES {
        let most = text.floor_char_boundary(ENCODED_BYTES);
        let cut = text[..most].rfind('\n').map_or(most, |end| end + 1);
        let (part, rest) = text.split_at(cut);
        parts.push(part);
        text = rest;
    }
    parts.push(text);
    parts
}

fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T> {
    serde_json::from_str(&read_text(path, STATE_BYTES_MAX)?).map_err(|error| Error::corpus(path, error.to_string()))
}

/// Writes a file that is there whole or not at all.
fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let json = serde_json::to_vec_pretty(value).map_err(|error| Error::corpus(path, error.to_string()))?;
    let staged = with_ending(path, ".new");
    let written = File::create(&staged).and_then(|mut file| file.write_all(&json).and_then(|()| file.sync_all()));
    written.map_err(Error::system(&staged))?;
    rename(&staged, path)
}
