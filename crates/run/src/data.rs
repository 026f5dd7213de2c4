//! The data of a recipe: random tokens, windows of corpora, or conversations.
//!
//! A sequence is a function of the seed and its index, so a step has the same sequences on any number of ranks.

use std::ops::Range;
use std::path::Path;

use serde_json::{Value, json};
use shardwise_data::{ChatTemplate, Corpus, Mixture, PackedConversations, Tokenizer, Windows};
use shardwise_model::init::splitmix64;
use shardwise_model::{Batch, ContextBatch, IGNORED};
use shardwise_plan::ContextPlace;
use shardwise_recipe::{EvaluationRecipe, Recipe};
use shardwise_torch::tch::Tensor;
use shardwise_train::{BatchSize, Ranks};

use crate::error::{Error, Result};

/// The training data of a recipe.
pub struct Data {
    source: Source,
    seed: u64,
    micro_batch_size: usize,
    seq_len: usize,
    gradient_accumulation_steps: usize,
    vocab_size: u64,
}

enum Source {
    Random,
    Corpora {
        windows: Vec<Windows>,
        weights: Vec<f64>,
        mixture: Mixture,
    },
    /// `tokenizer` is the tokenizer's hash.
    Conversations {
        packed: PackedConversations,
        tokenizer: String,
        mixture: Mixture,
    },
}

/// The sequences of a batch, or this rank's part of them, concatenated.
struct Rows {
    sequences: usize,
    /// The positions that are read of each sequence.
    positions: Vec<Range<usize>>,
    context: Option<ContextBatch>,
    tokens: Vec<i64>,
    targets: Vec<i64>,
    documents: Vec<i64>,
}

impl Data {
    /// Opens a recipe's data for this many ranks.
    pub fn open(recipe: &Recipe, ranks: usize) -> Result<Self> {
        let batch = recipe.batch(ranks)?;
        let data = &recipe.data;
        let corpora = match (&data.corpus, &data.mixture) {
            (Some(corpus), _) => vec![(corpus.as_path(), 1.)],
            (None, mixture) => mixture.iter().flatten().map(|part| (part.corpus.as_path(), part.weight)).collect(),
        };
        let source = match &data.chat {
            Some(chat) => open_conversations(recipe, chat)?,
            None if corpora.is_empty() => Source::Random,
            None => {
                let windows = |&(path, _): &(&Path, f64)| open_windows(path, data.token_bytes, recipe.batch.seq_len);
                let windows = corpora.iter().map(windows).collect::<Result<Vec<_>>>()?;
                let weights: Vec<f64> = corpora.iter().map(|(_, weight)| *weight).collect();
                let weighted = windows.iter().zip(&weights).map(|(windows, weight)| (windows.count(), *weight));
                Source::Corpora { mixture: Mixture::new(weighted.collect(), data.seed)?, windows, weights }
            }
        };
        Ok(Data {
            source,
            seed: data.seed,
            micro_batch_size: batch.micro_batch_size,
            seq_len: recipe.batch.seq_len,
            gradient_accumulation_steps: batch.gradient_accumulation_steps,
            vocab_size: recipe.vocab_size() as u64,
        })
    }

    /// Everything that the order of the sequences depends on. It must be the same when a run is resumed.
    pub(crate) fn order(&self, ranks: usize) -> Value {
        let sequences = self.micro_batch_size * self.gradient_accumulation_steps * ranks;
        let mut order = json!({ "seed": self.seed, "sequences": sequences, "positions": self.seq_len });
        match &self.source {
            Source::Random => (),
            Source::Corpora { windows, weights, .. } => {
                order["corpora"] = windows.iter().map(|windows| json!(windows.corpus().tokens())).collect();
                order["weights"] = json!(weights);
            }
            Source::Conversations { packed, tokenizer, .. } => {
                order["conversations"] = json!([packed.conversations(), packed.count(), tokenizer]);
            }
        }
        order
    }

    /// A one-line summary of the data, printed at the start of a run.
    pub(crate) fn summary(&self) -> Option<String> {
        match &self.source {
            Source::Random => None,
            Source::Corpora { windows, .. } => {
                let tokens: u64 = windows.iter().map(|windows| windows.corpus().tokens()).sum();
                Some(format!("{:.2} million tokens to train on", tokens as f64 / 1e6))
            }
            Source::Conversations { packed, .. } => Some(format!(
                "{} conversations in {} sequences; {} were truncated, {} without an answer were left out",
                packed.conversations(),
                packed.count(),
                packed.truncated(),
                packed.without_answers(),
            )),
        }
    }

    /// A rank's micro-batches of a step. Steps are counted from 1.
    pub fn step(&self, step: u64, rank: usize, ranks: usize) -> Result<Vec<Batch>> {
        self.step_part(step, rank, ranks, ContextPlace::ALONE)
    }

    /// A rank's micro-batches of a step, or its part of them, if it divides sequences with others.
    pub fn step_part(&self, step: u64, rank: usize, ranks: usize, place: ContextPlace) -> Result<Vec<Batch>> {
        let batch_size = BatchSize {
            micro_batch_size: self.micro_batch_size,
            gradient_accumulation_steps: self.gradient_accumulation_steps,
        };
        let micro_batch = |indices: Vec<u64>| {
            // How packed conversations are divided depends on all of them.
            let is_packed = matches!(self.source, Source::Conversations { .. });
            let read_at = if is_packed { ContextPlace::ALONE } else { place };
            let mut rows = Rows::new(&indices, self.seed, self.seq_len, read_at);
            indices.into_iter().try_for_each(|index| self.add(index, &mut rows))?;
            let batch = rows.batch()?;
            match is_packed && place.size() > 1 {
                true => Ok(batch.split_context(place).map_err(shardwise_train::Error::Batch)?),
                false => Ok(batch),
            }
        };
        batch_size.sample_indices(step, rank, ranks).into_iter().map(micro_batch).collect()
    }

    /// Describes the samples of a step on all ranks: their indices, and where the first ones come from.
    pub fn samples(&self, step: u64, ranks: usize) -> String {
        let count = (self.micro_batch_size * self.gradient_accumulation_steps * ranks) as u64;
        let first = (step - 1).wrapping_mul(count);
        let indices = (0..count).map(|index| first.wrapping_add(index));
        let samples = match &self.source {
            Source::Random => String::new(),
            Source::Corpora { windows, mixture, .. } => {
                let path = |source: usize| windows[source].corpus().path().display().to_string();
                let sample = |index| mixture.at(index);
                let shown = indices.take(SAMPLES_LISTED).map(sample);
                join_first(shown.map(|sample| format!("window {} of {}", sample.index, path(sample.source))), count)
            }
            Source::Conversations { mixture, .. } => {
                let shown = indices.take(SAMPLES_LISTED).map(|index| mixture.at(index).index);
                join_first(shown.map(|index| format!("window {index} of the conversations")), count)
            }
        };
        let last = first.wrapping_add(count - 1);
        format!("sequences {first} to {last} of the order with seed {}{samples}", self.seed)
    }

    /// Appends the sequence with this index.
    fn add(&self, index: u64, rows: &mut Rows) -> Result<()> {
        match &self.source {
            Source::Random => {
                let key = splitmix64(self.seed ^ splitmix64(index));
                let id = |place: u64| (splitmix64(key ^ place) % self.vocab_size) as i64;
                for run in rows.positions.clone() {
                    rows.tokens.extend(run.clone().map(|at| id(at as u64)));
                    rows.targets.extend(run.map(|at| id(at as u64 + 1)));
                }
                Ok(())
            }
            Source::Corpora { windows, mixture, .. } => {
                let sample = mixture.at(index);
                rows.add_window(&windows[sample.source], sample.index, self.vocab_size)
            }
            Source::Conversations { packed, mixture, .. } => {
                let window = packed.window(mixture.at(index).index)?;
                rows.tokens.extend(window.tokens.iter().map(|&id| i64::from(id)));
                rows.targets.extend(window.targets);
                rows.documents.extend(window.documents.iter().map(|&number| i64::from(number)));
                Ok(())
            }
        }
    }
}

impl Rows {
    /// Rows for the samples with these indices in the order of a seed.
    fn new(indices: &[u64], seed: u64, seq_len: usize, place: ContextPlace) -> Self {
        let context = (place.size() > 1).then(|| {
            let samples = indices.iter().fold(splitmix64(seed), |hash, index| splitmix64(hash ^ index));
            ContextBatch::of_whole_documents(indices.len(), seq_len, place, samples)
        });
        let own = context.as_ref().and_then(ContextBatch::own_positions);
        Rows {
            sequences: indices.len(),
            positions: own.unwrap_or_else(|| std::iter::once(0..seq_len).collect()),
            context,
            tokens: Vec::new(),
            targets: Vec::new(),
            documents: Vec::new(),
        }
    }

    /// Appends a window. It has one token more than a sequence, because the target of each position is the next token.
    fn add_window(&mut self, windows: &Windows, index: u64, vocab_size: u64) -> Result<()> {
        for run in self.positions.clone() {
            let mut ids = vec![0; run.len() + 1];
            windows.read(index, run.start as u64, &mut ids)?;
            if let Some(place) = ids.iter().position(|&id| u64::from(id) >= vocab_size) {
                let problem = format!(
                    "token {} is {}, but the model's vocab_size is {vocab_size}: was the corpus written with another tokenizer?",
                    index * windows.seq_len() + (run.start + place) as u64,
                    ids[place],
                );
                return Err(Error::Data { path: windows.corpus().path().to_path_buf(), problem });
            }
            let ids = ids.into_iter().map(i64::from);
            self.tokens.extend(ids.clone().take(run.len()));
            self.targets.extend(ids.skip(1));
        }
        Ok(())
    }

    /// Appends a sequence whose targets are ignored.
    fn add_padding(&mut self) {
        let positions: usize = self.positions.iter().map(Range::len).sum();
        self.tokens.extend(std::iter::repeat_n(0, positions));
        self.targets.extend(std::iter::repeat_n(IGNORED, positions));
    }

    fn batch(self) -> Result<Batch> {
        let tensor = |values: &[i64]| Tensor::from_slice(values).view([self.sequences as i64, -1]);
        let (tokens, targets) = (tensor(&self.tokens), tensor(&self.targets));
        match self.documents.is_empty() {
            true => Ok(Batch { context: self.context, ..Batch::new(tokens, targets) }),
            false => {
                let packed = Batch::packed(tokens, targets, &tensor(&self.documents));
                packed.map_err(|error| shardwise_train::Error::Batch(error).into())
            }
        }
    }
}

/// The number of a step's samples that are listed.
const SAMPLES_LISTED: usize = 4;

/// Joins the listed samples, with an ellipsis if there are more than these among the step's `count`.
fn join_first(shown: impl Iterator<Item = String>, count: u64) -> String {
    let shown: Vec<String> = shown.collect();
    let more = if count > shown.len() as u64 { ", …" } else { "" };
    format!(" ({}{more})", shown.join(", "))
}

fn open_conversations(recipe: &Recipe, chat: &Path) -> Result<Source> {
    let tokenizer = open_tokenizer(recipe)?;
    // Templates may use the date. The file's modification time stays the same when a run is resumed.
    let modified = std::fs::metadata(chat).and_then(|about| about.modified());
    let modified = modified.map_err(|error| Error::Data { path: chat.to_path_buf(), problem: error.to_string() })?;
    let template = ChatTemplate::open(&tokenizer, modified)?;
    let padding = tokenizer.end_of_text().unwrap_or(0);
    let packed = PackedConversations::new(template.conversations(&tokenizer, chat)?, recipe.batch.seq_len, padding)?;
    if packed.count() == 0 {
        let problem = "it has no conversation with an answer to train on".to_string();
        return Err(Error::Data { path: chat.to_path_buf(), problem });
    }
    let mixture = Mixture::new(vec![(packed.count(), 1.)], recipe.data.seed)?;
    Ok(Source::Conversations { packed, tokenizer: tokenizer.hash(), mixture })
}

/// Opens the recipe's tokenizer, and checks that the model has all of its tokens.
pub(crate) fn open_tokenizer(recipe: &Recipe) -> Result<Tokenizer> {
    let path = recipe.data.tokenizer.as_ref().ok_or_else(|| {
        Error::Options("the recipe has no data.tokenizer; set it to a tokenizer.json or its folder".to_string())
    })?;
    let tokenizer = Tokenizer::open(path)?;
    let (has, knows) = (tokenizer.vocab_size(), recipe.vocab_size() as u64);
    if has > knows {
        let problem =
            format!("it has {has} tokens, but the model's vocab_size is {knows}: is it another model's tokenizer?");
        return Err(Error::Data { path: path.clone(), problem });
    }
    Ok(tokenizer)
}

fn open_windows(path: &Path, token_bytes: Option<usize>, seq_len: usize) -> Result<Windows> {
    let corpus = match token_bytes {
        Some(bytes) => Corpus::open_raw(path, bytes)?,
        None => Corpus::open(path)?,
    };
    Ok(Windows::new(corpus, seq_len as u64)?)
}

/// The held-out corpus of a recipe.
pub(crate) struct EvaluationSet {
    windows: Windows,
    /// The number of windows to evaluate on.
    count: u64,
    /// Bytes of text per token, if known.
    pub(crate) bytes_per_token: Option<f64>,
    vocab_size: u64,
    every_steps: Option<u64>,
}

impl EvaluationSet {
    pub(crate) fn of(recipe: &Recipe, evaluation: &EvaluationRecipe) -> Result<Self> {
        let set = EvaluationSet::open(recipe, &evaluation.corpus, evaluation.max_sequences)?;
        Ok(EvaluationSet { every_steps: evaluation.every_steps, ..set })
    }

    /// The values that must be the same on all ranks.
    pub(crate) fn identity(&self) -> [u64; 2] {
        [self.windows.corpus().tokens(), self.count]
    }

    /// Whether to evaluate after this step of `steps`.
    pub(crate) fn is_due(&self, step: u64, steps: u64) -> bool {
        step == steps || self.every_steps.is_some_and(|every| step.is_multiple_of(every))
    }

    pub(crate) fn open(recipe: &Recipe, corpus: &Path, max_sequences: Option<u64>) -> Result<Self> {
        let windows = open_windows(corpus, recipe.data.token_bytes, recipe.batch.seq_len)?;
        let about = shardwise_data::CorpusInfo::read(corpus)?;
        let bytes_per_token = about.map(|about| about.totals.text_bytes as f64 / about.totals.tokens.max(1) as f64);
        let count = windows.count().min(max_sequences.unwrap_or(u64::MAX));
        Ok(EvaluationSet { windows, count, bytes_per_token, vocab_size: recipe.vocab_size() as u64, every_steps: None })
    }

    /// This rank's batches of `sequences` sequences, or its part of them. Every rank has the same number of batches; the last ones are
    /// padded with sequences whose targets are ignored.
    pub(crate) fn batches(&self, ranks: &Ranks, sequences: usize) -> impl Iterator<Item = Result<Batch>> {
        let (rank, together, place) =
            (ranks.data_rank(), (ranks.data_size() * sequences) as u64, ranks.context.place());
        (0..self.count.div_ceil(together)).map(move |round| {
            let first = round * together + (rank * sequences) as u64;
            let indices: Vec<u64> = (first..first + sequences as u64).collect();
            let mut rows = Rows::new(&indices, 0, self.windows.seq_len() as usize, place);
            for index in indices {
                match index < self.count {
                    true => rows.add_window(&self.windows, index, self.vocab_size)?,
                    false => rows.add_padding(),
                }
            }
            rows.batch()
        })
    }
}
