//! From text to deterministic, resumable batches of tokens.
//!
//! ```text
//! Inputs ──pieces──▶ tokenize ──▶ Corpus ──▶ Windows ─┐
//! files     Tokenizer              .bin .idx          ├─▶ Mixture: sample n is window i of source s
//! conversations ──ChatTemplate──▶ Packed ─────────────┘
//! ```
//!
//! [`tokenize`] makes a corpus of files once, and goes on where it was interrupted. Training reads windows of it, in an order
//! that is a function of a seed and the sample's number: every rank computes the part that is its own, whatever the number of
//! ranks, and a run that continues needs to remember one number.
//!
//! Nothing here needs libtorch, or talks to other ranks.
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
//!     windows.read(mixture.at(number).index, &mut tokens)?;
//!     println!("{}", tokenizer.decode(&tokens)?);
//! }
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code, missing_docs)]

mod chat;
mod error;
mod indexed;
mod mixture;
mod order;
mod packing;
mod source;
mod template;
mod tokenize;
mod tokenizer;
mod windows;
mod words;

pub use chat::{ChatTemplate, Conversation, Message};
pub use error::{Error, Result};
pub use indexed::{Corpus, TokenType, Writer};
pub use mixture::{Mixture, Sample};
pub use order::Permutation;
pub use packing::{IGNORED, Packed, PackedWindow, TOKENS_MAX};
pub use source::{DOCUMENT_BYTES_MAX, InputFile, Inputs, Piece, Pieces};
pub use tokenize::{About, Options, Progress, Summary, Totals, tokenize};
pub use tokenizer::{END_OF_TEXT, Tokenizer};
pub use windows::Windows;
