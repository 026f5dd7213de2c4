//! Tokenizing text and decoding tokens with Hugging Face's `tokenizers` and the `tokenizer.json` of a model.
//!
//! Nothing is added to a text: no beginning-of-text token, no padding, no truncation. Callers that join documents decide what separates
//! them.

use std::fs::File;
use std::io::Write;
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, ModelWrapper, PostProcessorWrapper};

use crate::corpus::{rename, with_ending};
use crate::word_cache::{WordCache, WordSplitter};
use crate::{Error, Result};

/// The end-of-text token of tokenizers that Shardwise trains.
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// The end-of-text tokens to look for if no configuration names one.
const COMMON_END_TOKENS: [&str; 4] = [END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>"];
/// The largest tokenizer file that is accepted. Today's largest are 35 MB.
const FILE_BYTES_MAX: u64 = 1 << 30;
/// The size of the cache inside `tokenizers`, for tokenizers that cannot use [`WordCache`].
const CACHED_WORDS: usize = 1 << 17;

/// Encodes text into tokens and decodes it again.
#[derive(Clone)]
pub struct Tokenizer {
    path: PathBuf,
    json: String,
    inner: tokenizers::Tokenizer,
    vocab_size: u64,
    end_of_text: Option<u32>,
    splitter: Option<WordSplitter>,
}

impl Tokenizer {
    /// Opens a `tokenizer.json`, or the one in a folder.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        Tokenizer::from_json(read_text(&path, FILE_BYTES_MAX)?, path)
    }

    /// Trains a byte-level BPE tokenizer on documents, like GPT-2's, so that it can encode any text. `progress` gets the number of bytes
    /// read, and may stop the work.
    pub fn train_bpe(
        documents: impl Iterator<Item = Result<String>> + Send,
        vocab_size: usize,
        progress: &mut (dyn FnMut(u64) -> ControlFlow<()> + Send),
    ) -> Result<Self> {
        let path = PathBuf::from("a tokenizer in training");
        let min = ByteLevel::alphabet().len() + 1;
        if vocab_size < min {
            let problem = format!("a vocabulary of {vocab_size} tokens is too small: the bytes alone need {min}");
            return Err(Error::invalid_argument(problem));
        }
        let gpt2_bytes = ByteLevel::new(false, true, true);
        let mut inner = tokenizers::Tokenizer::new(BPE::default());
        inner.with_pre_tokenizer(Some(gpt2_bytes)).with_decoder(Some(gpt2_bytes));
        let trainer = BpeTrainerBuilder::new()
            .vocab_size(vocab_size)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
            .build();
        let (mut failure, mut bytes) = (None, 0);
        let texts = documents.map_while(|document| match document {
            Ok(text) => {
                bytes += text.len() as u64;
                progress(bytes).is_continue().then_some(text).or_else(|| {
                    failure = Some(Error::Stopped { path: "the beginning".to_string() });
                    None
                })
            }
            Err(error) => {
                failure = Some(error);
                None
            }
        });
        let trained = inner.train(&mut TrainerWrapper::from(trainer), texts).map(drop);
        if let Some(error) = failure {
            return Err(error);
        }
        trained
            .and_then(|()| inner.to_string(false))
            .map_err(|error| Error::tokenizer(&path, error))
            .and_then(|json| Tokenizer::from_json(json, path))
    }

    /// Writes a `tokenizer.json` to this file or into this folder.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        let staged = with_ending(&path, ".part");
        let written = File::create(&staged).and_then(|mut file| {
            file.write_all(self.json.as_bytes())?;
            file.sync_all()
        });
        written.map_err(Error::io(&staged))?;
        rename(&staged, &path)
    }

    fn from_json(json: String, path: PathBuf) -> Result<Self> {
        let fail = |error: tokenizers::Error| Error::tokenizer(&path, error);
        let mut inner = tokenizers::Tokenizer::from_bytes(&json).map_err(fail)?;
        // Corpora are neither truncated nor padded, and post-processors only add tokens or shift offsets.
        inner.with_truncation(None).map_err(fail)?;
        inner.with_padding(None);
        inner.with_post_processor(None::<PostProcessorWrapper>);
        let splitter = WordSplitter::new(&inner);
        if let (ModelWrapper::BPE(model), None) = (inner.get_model(), &splitter) {
            let mut model = model.clone();
            model.resize_cache(CACHED_WORDS);
            inner.with_model(model);
        }
        // Ids may have gaps, so the highest one counts.
        let vocab_size = inner.get_vocab(true).into_values().max().map_or(0, |highest| u64::from(highest) + 1);
        let eos_token = read_config(&path)?.eos_token.map(SpecialToken::content);
        let end_of_text = match eos_token {
            Some(end) => inner.token_to_id(&end),
            None => COMMON_END_TOKENS.iter().find_map(|end| inner.token_to_id(end)),
        };
        Ok(Tokenizer { path, json, inner, vocab_size, end_of_text, splitter })
    }

    /// The path of the `tokenizer.json`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Encodes a text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(|error| Error::tokenizer(&self.path, error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Appends the tokens that [`Tokenizer::encode`] would return, with the help of a thread's cache.
    pub(crate) fn encode_cached(&self, cache: &mut WordCache, text: &str, tokens: &mut Vec<u32>) -> Result<()> {
        match self.splitter.as_ref().filter(|splitter| splitter.can_split(text)) {
            Some(splitter) => cache.encode(splitter.pattern(), text, tokens, |word| self.encode(word)),
            None => {
                tokens.extend(self.encode(text)?);
                Ok(())
            }
        }
    }

    /// Encodes many texts on all cores.
    pub fn encode_batch(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>> {
        let encodings = self.inner.encode_batch_fast(texts.to_vec(), false);
        let encodings = encodings.map_err(|error| Error::tokenizer(&self.path, error))?;
        Ok(encodings.iter().map(|encoding| encoding.get_ids().to_vec()).collect())
    }

    /// Encodes a text, and returns each token with the range of bytes that it stands for.
    pub fn encode_with_offsets(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        let encoding = self.inner.encode(text, false).map_err(|error| Error::tokenizer(&self.path, error))?;
        Ok(encoding.get_ids().iter().zip(encoding.get_offsets()).map(|(&id, &(from, to))| (id, from..to)).collect())
    }

    /// Decodes tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.inner.decode(tokens, false).map_err(|error| Error::tokenizer(&self.path, error))
    }

    /// One more than the highest token id.
    pub fn vocab_size(&self) -> u64 {
        self.vocab_size
    }

    /// The end-of-text token: the one that `tokenizer_config.json` in the same folder names, or else a common one.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    /// The id of the token with this text, if there is one.
    pub fn token_id(&self, name: &str) -> Option<u32> {
        self.inner.token_to_id(name)
    }

    /// Identifies the tokenizer: the hash of its file.
    pub fn hash(&self) -> String {
        blake3::hash(self.json.as_bytes()).to_hex().to_string()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("path", &self.path).field("vocab_size", &self.vocab_size).finish()
    }
}

/// The part of `tokenizer_config.json` that is used.
#[derive(Default, Deserialize)]
pub(crate) struct TokenizerConfig {
    pub(crate) bos_token: Option<SpecialToken>,
    pub(crate) eos_token: Option<SpecialToken>,
    pub(crate) chat_template: Option<ChatTemplates>,
}

/// A special token, given by its text or as an object.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum SpecialToken {
    Name(String),
    Description { content: String },
}

impl SpecialToken {
    pub(crate) fn content(self) -> String {
        match self {
            SpecialToken::Name(content) | SpecialToken::Description { content } => content,
        }
    }
}

/// One chat template, or several with names.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum ChatTemplates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
pub(crate) struct NamedTemplate {
    pub(crate) name: String,
    pub(crate) template: String,
}

/// Reads the `tokenizer_config.json` in the folder of a tokenizer, or returns the defaults if there is none.
pub(crate) fn read_config(tokenizer: &Path) -> Result<TokenizerConfig> {
    let path = tokenizer.with_file_name("tokenizer_config.json");
    if !path.is_file() {
        return Ok(TokenizerConfig::default());
    }
    serde_json::from_str(&read_text(&path, FILE_BYTES_MAX)?).map_err(|error| Error::tokenizer(&path, error))
}

/// Reads a text file, and fails if it is longer than `bytes_max`.
pub(crate) fn read_text(path: &Path, bytes_max: u64) -> Result<String> {
    let length = std::fs::metadata(path).map_err(Error::io(path))?.len();
    if length > bytes_max {
        return Err(Error::tokenizer(path, format!("it has {length} bytes; the limit is {bytes_max}")));
    }
    std::fs::read_to_string(path).map_err(Error::io(path))
}
