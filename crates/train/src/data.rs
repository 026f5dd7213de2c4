//! Batches of tokens: random ones, windows of corpora, or conversations.
//!
//! A sequence is a function of the seed and its number, so any number of ranks sees the same ones in the same step.

use std::path::Path;

use serde_json::{Value, json};
use shardwise_data::{ChatTemplate, Corpus, Mixture, Packed, Tokenizer, Windows};
use shardwise_model::init::mixed;
use shardwise_model::{Batch, IGNORED};
use shardwise_torch::tch::Tensor;

use crate::recipe::{EvaluationRecipe, Recipe};
use crate::{Error, Portion, Result};

/// Where tokens come from.
pub struct Data {
    source: Source,
    seed: u64,
    sequences: usize,
    positions: usize,
    micro_batches: usize,
    vocabulary: u64,
}

enum Source {
    Random,
    Corpora {
        windows: Vec<Windows>,
        weights: Vec<f64>,
        mixture: Mixture,
    },
    /// With the tokenizer's hash.
    Conversations {
        packed: Packed,
        tokenizer: String,
        mixture: Mixture,
    },
}

/// Sequences, one after the other.
#[derive(Default)]
struct Rows {
    tokens: Vec<i64>,
    targets: Vec<i64>,
    documents: Vec<i64>,
}

impl Data {
    /// What a recipe says, for so many ranks.
    pub fn open(recipe: &Recipe, ranks: usize) -> Result<Self> {
        let batch = recipe.batch(ranks)?;
        let data = &recipe.data;
        let corpora = match (&data.corpus, &data.mixture) {
            (Some(corpus), _) => vec![(corpus.as_path(), 1.)],
            (None, mixture) => mixture.iter().flatten().map(|part| (part.corpus.as_path(), part.weight)).collect(),
        };
        let source = match &data.chat {
            Some(chat) => conversations(recipe, chat)?,
            None if corpora.is_empty() => Source::Random,
            None => {
                let windows = |&(path, _): &(&Path, f64)| windows(path, data.token_bytes, recipe.batch.positions);
                let windows = corpora.iter().map(windows).collect::<Result<Vec<_>>>()?;
                let weights: Vec<f64> = corpora.iter().map(|(_, weight)| *weight).collect();
                let weighted = windows.iter().zip(&weights).map(|(windows, weight)| (windows.count(), *weight));
                Source::Corpora { mixture: Mixture::new(weighted.collect(), data.seed)?, windows, weights }
            }
        };
        Ok(Data {
            source,
            seed: data.seed,
            sequences: batch.sequences,
            positions: recipe.batch.positions,
            micro_batches: batch.micro_batches,
            vocabulary: recipe.vocabulary() as u64,
        })
    }

    /// What the order of sequences depends on: a run that goes on must have the same.
    pub(crate) fn order(&self, ranks: usize) -> Value {
        let sequences = self.sequences * self.micro_batches * ranks;
        let mut order = json!({ "seed": self.seed, "sequences": sequences, "positions": self.positions });
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

    /// What there is to say of it before a run.
    pub(crate) fn heading(&self) -> Option<String> {
        match &self.source {
            Source::Random => None,
            Source::Corpora { windows, .. } => {
                let tokens: u64 = windows.iter().map(|windows| windows.corpus().tokens()).sum();
                Some(format!("{:.2} million tokens to train on", tokens as f64 / 1e6))
            }
            Source::Conversations { packed, .. } => Some(format!(
                "{} conversations in {} windows; {} were cut, {} have no answer and are left out",
                packed.conversations(),
                packed.count(),
                packed.cut(),
                packed.without_answers(),
            )),
        }
    }

    /// A rank's micro-batches of a step, which are counted from one.
    pub fn step(&self, step: u64, rank: usize, ranks: usize) -> Result<Vec<Batch>> {
        let portion = Portion { samples: self.sequences, micro_batches: self.micro_batches };
        let micro_batch = |numbers: Vec<u64>| {
            let mut rows = Rows::default();
            numbers.into_iter().try_for_each(|number| self.add(number, &mut rows))?;
            Ok(rows.batch(self.sequences))
        };
        portion.numbers(step, rank, ranks).into_iter().map(micro_batch).collect()
    }

    /// Which samples a step reads, on all ranks together: their numbers, and what the first of them are.
    pub fn samples(&self, step: u64, ranks: usize) -> String {
        let count = (self.sequences * self.micro_batches * ranks) as u64;
        let first = (step - 1).wrapping_mul(count);
        let numbers = (0..count).map(|index| first.wrapping_add(index));
        let samples = match &self.source {
            Source::Random => String::new(),
            Source::Corpora { windows, mixture, .. } => {
                let path = |source: usize| windows[source].corpus().path().display().to_string();
                let sample = |number| mixture.at(number);
                let shown = numbers.take(SAMPLES_SHOWN).map(sample);
                listed(shown.map(|sample| format!("window {} of {}", sample.index, path(sample.source))), count)
            }
            Source::Conversations { mixture, .. } => {
                let shown = numbers.take(SAMPLES_SHOWN).map(|number| mixture.at(number).index);
                listed(shown.map(|index| format!("window {index} of the conversations")), count)
            }
        };
        let last = first.wrapping_add(count - 1);
        format!("sequences {first} to {last} of the order with seed {}{samples}", self.seed)
    }

    /// Adds the sequence of that number.
    fn add(&self, number: u64, rows: &mut Rows) -> Result<()> {
        match &self.source {
            Source::Random => {
                let key = mixed(self.seed ^ mixed(number));
                let id = |place: u64| (mixed(key ^ place) % self.vocabulary) as i64;
                rows.tokens.extend((0..self.positions as u64).map(id));
                rows.targets.extend((1..=self.positions as u64).map(id));
                Ok(())
            }
            Source::Corpora { windows, mixture, .. } => {
                let sample = mixture.at(number);
                rows.add_window(&windows[sample.source], sample.index, self.vocabulary)
            }
            Source::Conversations { packed, mixture, .. } => {
                let window = packed.window(mixture.at(number).index)?;
                rows.tokens.extend(window.tokens.iter().map(|&id| i64::from(id)));
                rows.targets.extend(window.targets);
                rows.documents.extend(window.documents.iter().map(|&number| i64::from(number)));
                Ok(())
            }
        }
    }
}

impl Rows {
    /// A window has one token more than positions: each position's target is the next.
    fn add_window(&mut self, windows: &Windows, index: u64, vocabulary: u64) -> Result<()> {
        let mut ids = vec![0; windows.positions() as usize + 1];
        windows.read(index, &mut ids)?;
        if let Some(place) = ids.iter().position(|&id| u64::from(id) >= vocabulary) {
            let problem = format!(
                "token {} is {}, and the model's vocabulary has {vocabulary}: is the corpus of another tokenizer?",
                index * windows.positions() + place as u64,
                ids[place],
            );
            return Err(Error::Data { path: windows.corpus().path().to_path_buf(), problem });
        }
        let ids = ids.into_iter().map(i64::from);
        self.tokens.extend(ids.clone().take(windows.positions() as usize));
        self.targets.extend(ids.skip(1));
        Ok(())
    }

    fn batch(self, sequences: usize) -> Batch {
        let tensor = |values: &[i64]| Tensor::from_slice(values).view([sequences as i64, -1]);
        let documents = (!self.documents.is_empty()).then(|| tensor(&self.documents));
        Batch { documents, ..Batch::new(tensor(&self.tokens), tensor(&self.targets)) }
    }
}

/// How many of a step's samples are told one by one.
const SAMPLES_SHOWN: usize = 4;

/// The first ones of so many.
fn listed(shown: impl Iterator<Item = String>, count: u64) -> String {
    let shown: Vec<String> = shown.collect();
    let more = if count > shown.len() as u64 { ", …" } else { "" };
    format!(" ({}{more})", shown.join(", "))
}

fn conversations(recipe: &Recipe, chat: &Path) -> Result<Source> {
    let tokenizer = tokenizer(recipe)?;
    // Templates may ask for the date. The file's own is the same whenever a run goes on.
    let modified = std::fs::metadata(chat).and_then(|about| about.modified());
    let modified = modified.map_err(|error| Error::Data { path: chat.to_path_buf(), problem: error.to_string() })?;
    let template = ChatTemplate::open(&tokenizer, modified)?;
    let padding = tokenizer.end_of_text().unwrap_or(0);
    let packed = Packed::new(template.conversations(&tokenizer, chat)?, recipe.batch.positions, padding)?;
    if packed.count() == 0 {
        let problem = "there is no conversation in it with an answer to learn from".to_string();
        return Err(Error::Data { path: chat.to_path_buf(), problem });
    }
    let mixture = Mixture::new(vec![(packed.count(), 1.)], recipe.data.seed)?;
    Ok(Source::Conversations { packed, tokenizer: tokenizer.hash(), mixture })
}

/// The recipe's tokenizer, whose tokens the model knows.
pub(crate) fn tokenizer(recipe: &Recipe) -> Result<Tokenizer> {
    let path = recipe.data.tokenizer.as_ref().ok_or_else(|| {
        Error::Options("the recipe needs data.tokenizer: a tokenizer.json, or the folder with it".to_string())
    })?;
    let tokenizer = Tokenizer::open(path)?;
    let (has, knows) = (tokenizer.vocabulary(), recipe.vocabulary() as u64);
    if has > knows {
        let problem = format!("it has {has} tokens, and the model's vocabulary {knows}: are they of one model?");
        return Err(Error::Data { path: path.clone(), problem });
    }
    Ok(tokenizer)
}

fn windows(path: &Path, token_bytes: Option<usize>, positions: usize) -> Result<Windows> {
    let corpus = match token_bytes {
        Some(bytes) => Corpus::raw(path, bytes)?,
        None => Corpus::open(path)?,
    };
    Ok(Windows::new(corpus, positions as u64)?)
}

/// Text that a model has not been trained on, window by window.
pub(crate) struct HeldOut {
    windows: Windows,
    /// How many of them are looked at.
    count: u64,
    /// Bytes of text for each token, if that is known.
    pub(crate) bytes_per_token: Option<f64>,
    vocabulary: u64,
    every_steps: Option<u64>,
}

impl HeldOut {
    pub(crate) fn of(recipe: &Recipe, evaluation: &EvaluationRecipe) -> Result<Self> {
        let held_out = HeldOut::open(recipe, &evaluation.corpus, evaluation.windows)?;
        Ok(HeldOut { every_steps: evaluation.every_steps, ..held_out })
    }

    /// What all ranks must have in common.
    pub(crate) fn about(&self) -> [u64; 2] {
        [self.windows.corpus().tokens(), self.count]
    }

    /// Whether it is looked at after this step, of so many.
    pub(crate) fn is_due(&self, step: u64, steps: u64) -> bool {
        step == steps || self.every_steps.is_some_and(|every| step.is_multiple_of(every))
    }

    pub(crate) fn open(recipe: &Recipe, corpus: &Path, most: Option<u64>) -> Result<Self> {
        let windows = windows(corpus, recipe.data.token_bytes, recipe.batch.positions)?;
        let about = shardwise_data::About::read(corpus)?;
        let bytes_per_token = about.map(|about| about.totals.text_bytes as f64 / about.totals.tokens.max(1) as f64);
        let count = windows.count().min(most.unwrap_or(u64::MAX));
        Ok(HeldOut { windows, count, bytes_per_token, vocabulary: recipe.vocabulary() as u64, every_steps: None })
    }

    /// Batches of so many sequences, as many for every rank: what is missing at the end counts for nothing.
    pub(crate) fn batches(&self, rank: usize, ranks: usize, sequences: usize) -> impl Iterator<Item = Result<Batch>> {
        let together = (ranks * sequences) as u64;
        (0..self.count.div_ceil(together)).map(move |round| {
            let first = round * together + (rank * sequences) as u64;
            let mut rows = Rows::default();
            for index in first..first + sequences as u64 {
                match index < self.count {
                    true => rows.add_window(&self.windows, index, self.vocabulary)?,
                    false => {
                        let positions = self.windows.positions() as usize;
                        rows.tokens.extend(std::iter::repeat_n(0, positions));
                        rows.targets.extend(std::iter::repeat_n(IGNORED, positions));
                    }
                }
            }
            Ok(rows.batch(sequences))
        })
    }
}
