//! Text to tokens and back, by Hugging Face's `tokenizers`, from the `tokenizer.json` that every published model has.
//!
//! Nothing is added to a text: no token for its beginning, no padding, no cutting. Whoever joins documents says what stands
//! between them.

use std::fs::File;
use std::io::Write;
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, ModelWrapper, PostProcessorWrapper};

use crate::indexed::{rename, with_ending};
use crate::words::{Memory, Words};
use crate::{Error, Result};

/// What ends a text in the vocabularies that Shardwise makes.
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// What ends a text, where no configuration says it.
const USUAL_ENDS: [&str; 4] = [END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>"];
/// The longest file that is taken for a tokenizer. The largest of today's have 35 MB.
const FILE_BYTES_MAX: u64 = 1 << 30;
/// Words of which `tokenizers` remembers the tokens, where nobody else does.
const REMEMBERED_WORDS: usize = 1 << 17;

/// A vocabulary, and how a text is cut into its tokens.
#[derive(Clone)]
pub struct Tokenizer {
    path: PathBuf,
    json: String,
    inner: tokenizers::Tokenizer,
    vocabulary: u64,
    end_of_text: Option<u32>,
    words: Option<Words>,
}

impl Tokenizer {
    /// Opens a `tokenizer.json`, or the one in a folder.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        Tokenizer::of_json(read_text(&path, FILE_BYTES_MAX)?, path)
    }

    /// Learns a vocabulary of that size from documents: byte pairs, as in GPT-2, so that it has tokens for any text. `progress`
    /// is told the bytes that were read, and may end the work.
    pub fn train_bpe(
        documents: impl Iterator<Item = Result<String>> + Send,
        vocabulary: usize,
        progress: &mut (dyn FnMut(u64) -> ControlFlow<()> + Send),
    ) -> Result<Self> {
        let path = PathBuf::from("a tokenizer in training");
        let least = ByteLevel::alphabet().len() + 1;
        if vocabulary < least {
            return Err(Error::settings(format!("a vocabulary of {vocabulary} tokens; the bytes alone need {least}")));
        }
        let bytes_of_gpt2 = ByteLevel::new(false, true, true);
        let mut inner = tokenizers::Tokenizer::new(BPE::default());
        inner.with_pre_tokenizer(Some(bytes_of_gpt2)).with_decoder(Some(bytes_of_gpt2));
        let trainer = BpeTrainerBuilder::new()
            .vocab_size(vocabulary)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
            .build();
        let (mut failed, mut bytes) = (None, 0);
        let texts = documents.map_while(|document| match document {
            Ok(text) => {
                bytes += text.len() as u64;
                progress(bytes).is_continue().then_some(text).or_else(|| {
                    failed = Some(Error::Stopped { path: "the beginning".to_string() });
                    None
                })
            }
            Err(error) => {
                failed = Some(error);
                None
            }
        });
        let trained = inner.train(&mut TrainerWrapper::from(trainer), texts).map(drop);
        if let Some(error) = failed {
            return Err(error);
        }
        trained
            .and_then(|()| inner.to_string(false))
            .map_err(|error| Error::tokenizer(&path, error))
            .and_then(|json| Tokenizer::of_json(json, path))
    }

    /// Writes a `tokenizer.json`, into a folder if it is one.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        let staged = with_ending(&path, ".part");
        let written = File::create(&staged).and_then(|mut file| {
            file.write_all(self.json.as_bytes())?;
            file.sync_all()
        });
        written.map_err(Error::system(&staged))?;
        rename(&staged, &path)
    }

    fn of_json(json: String, path: PathBuf) -> Result<Self> {
        let fail = |error: tokenizers::Error| Error::tokenizer(&path, error);
        let mut inner = tokenizers::Tokenizer::from_bytes(&json).map_err(fail)?;
        // Corpora are neither cut nor filled up, and processors only add tokens or shift where a token is said to begin.
        inner.with_truncation(None).map_err(fail)?;
        inner.with_padding(None);
        inner.with_post_processor(None::<PostProcessorWrapper>);
        let words = Words::of(&inner);
        if let (ModelWrapper::BPE(model), None) = (inner.get_model(), &words) {
            let mut model = model.clone();
            model.resize_cache(REMEMBERED_WORDS);
            inner.with_model(model);
        }
        // Numbers may have gaps, so that the highest counts.
        let vocabulary = inner.get_vocab(true).into_values().max().map_or(0, |highest| u64::from(highest) + 1);
        let ends = configured(&path)?.eos_token.map(SpecialToken::content);
        let end_of_text = match ends {
            Some(end) => inner.token_to_id(&end),
            None => USUAL_ENDS.iter().find_map(|end| inner.token_to_id(end)),
        };
        Ok(Tokenizer { path, json, inner, vocabulary, end_of_text, words })
    }

    /// The file that it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(|error| Error::tokenizer(&self.path, error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Adds the tokens of a text, which are those of [`Tokenizer::encode`], with what a thread remembers of this tokenizer.
    pub(crate) fn encode_with(&self, memory: &mut Memory, text: &str, tokens: &mut Vec<u32>) -> Result<()> {
        match self.words.as_ref().filter(|words| words.can_cut(text)) {
            Some(words) => memory.encode(words.cut(), text, tokens, |word| self.encode(word)),
            None => {
                tokens.extend(self.encode(text)?);
                Ok(())
            }
        }
    }

    /// The tokens of many texts, by all processors.
    pub fn encode_batch(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>> {
        let encodings = self.inner.encode_batch_fast(texts.to_vec(), false);
        let encodings = encodings.map_err(|error| Error::tokenizer(&self.path, error))?;
        Ok(encodings.iter().map(|encoding| encoding.get_ids().to_vec()).collect())
    }

    /// The tokens of a text, and which of its bytes each stands for.
    pub fn encode_with_places(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        let encoding = self.inner.encode(text, false).map_err(|error| Error::tokenizer(&self.path, error))?;
        Ok(encoding.get_ids().iter().zip(encoding.get_offsets()).map(|(&id, &(from, to))| (id, from..to)).collect())
    }

    /// The text of tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.inner.decode(tokens, false).map_err(|error| Error::tokenizer(&self.path, error))
    }

    /// One more than the highest token.
    pub fn vocabulary(&self) -> u64 {
        self.vocabulary
    }

    /// The token that ends a text: what `tokenizer_config.json` beside it says, or else one of the usual ones.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    /// The token of that name.
    pub fn token(&self, name: &str) -> Option<u32> {
        self.inner.token_to_id(name)
    }

    /// What the tokenizer is known by: a hash of its file.
    pub fn hash(&self) -> String {
        blake3::hash(self.json.as_bytes()).to_hex().to_string()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("path", &self.path).field("vocabulary", &self.vocabulary).finish()
    }
}

/// What is read of `tokenizer_config.json`.
#[derive(Default, Deserialize)]
pub(crate) struct Configured {
    pub(crate) bos_token: Option<SpecialToken>,
    pub(crate) eos_token: Option<SpecialToken>,
    pub(crate) chat_template: Option<ChatTemplates>,
}

/// A token is named, or described.
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

/// A template, or several with names.
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

/// What `tokenizer_config.json` beside a tokenizer says; nothing, if there is none.
pub(crate) fn configured(tokenizer: &Path) -> Result<Configured> {
    let path = tokenizer.with_file_name("tokenizer_config.json");
    if !path.is_file() {
        return Ok(Configured::default());
    }
    serde_json::from_str(&read_text(&path, FILE_BYTES_MAX)?).map_err(|error| Error::tokenizer(&path, error))
}

/// A whole file of text, if it is no longer than that.
pub(crate) fn read_text(path: &Path, bytes_max: u64) -> Result<String> {
    let length = std::fs::metadata(path).map_err(Error::system(path))?.len();
    if length > bytes_max {
        return Err(Error::tokenizer(path, format!("it has {length} bytes, and at most {bytes_max} are read")));
    }
    std::fs::read_to_string(path).map_err(Error::system(path))
}
