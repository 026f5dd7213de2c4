//! From text to deterministic, resumable batches of tokens.
//!
//! ```text
//! Inputs ──pieces──▶ tokenize ──▶ Corpus ──▶ Windows ─┐
//! files     Tokenizer              .bin .idx          ├─▶ Mixture: sample n is window i of source s
//! conversations ──ChatTemplate──▶ PackedConversations ┘
//! ```
//!
//! [`tokenize`] turns files into a corpus once, and resumes after an interruption. Training reads windows of the corpus in an order that
//! depends only on the seed and the sample number: each rank computes its own part, whatever the world size, and a run that resumes
//! needs to know only one number.
//!
//! Nothing here needs libtorch or communicates with other ranks.
//!
//! ```
//! use std::ops::ControlFlow;
//!
//! use shardwise_data::{Corpus, Inputs, Mixture, Options, Tokenizer, Windows, tokenize};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! std::fs::write(folder.join("poem.txt"), "The woods are lovely, dark and deep.\n".repeat(20))?;
//! let inputs = Inputs::new(&[folder.join("poem.txt")], "text")?;
//! let tokenizer = Tokenizer::train_bpe(inputs.texts(), 300, &mut |_bytes| ControlFlow::Continue(()))?;
//!
//! let options = Options { prefix: folder.join("corpus"), held_out: None, threads: None };
//! let summary = tokenize(&inputs, &tokenizer, &options, &mut |_progress| ControlFlow::Continue(()))?;
//! assert_eq!(summary.corpus.documents, 1);
//!
//! let windows = Windows::new(Corpus::open(folder.join("corpus"))?, 8)?;
//! let mixture = Mixture::new(vec![(windows.count(), 1.0)], 42)?;
//! let mut tokens = [0; 9];
//! for number in 0..4 {
//!     windows.read(mixture.at(number).index, 0, &mut tokens)?;
//!     println!("{}", tokenizer.decode(&tokens)?);
//! }
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code, missing_docs)]

mod chat;
mod corpus;
mod error;
mod mixture;
mod packing;
mod permutation;
mod source;
mod template;
mod tokenize;
mod tokenizer;
mod windows;
mod word_cache;

pub use chat::{ChatTemplate, Conversation, Message};
pub use corpus::{Corpus, TokenType, Writer};
pub use error::{Error, Result};
pub use mixture::{Mixture, Sample};
pub use packing::{IGNORED, PackedConversations, PackedWindow, TOKENS_MAX};
pub use permutation::Permutation;
pub use source::{DOCUMENT_BYTES_MAX, InputFile, Inputs, Piece, Pieces};
pub use tokenize::{CorpusInfo, Options, Progress, Summary, Totals, tokenize};
pub use tokenizer::{END_OF_TEXT, Tokenizer};
pub use windows::Windows;
