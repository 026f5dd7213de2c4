//! The windows of a corpus that a model is shown: its documents joined, and cut every so many tokens.

use crate::{Corpus, Error, Result};

/// A corpus, cut into windows. Each has one token more than positions, since every position has to tell the next token; that
/// token is the next window's first.
#[derive(Debug)]
pub struct Windows {
    corpus: Corpus,
    positions: u64,
}

impl Windows {
    /// Cuts a corpus. The last tokens are left out if they do not fill a window.
    pub fn new(corpus: Corpus, positions: u64) -> Result<Self> {
        if positions == 0 {
            return Err(Error::settings("windows of 0 positions"));
        }
        if corpus.tokens() <= positions {
            let problem = format!("its {} tokens do not fill one window of {positions} + 1", corpus.tokens());
            return Err(Error::corpus(corpus.path(), problem));
        }
        Ok(Windows { corpus, positions })
    }

    /// What is cut.
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    /// The positions of a window.
    pub fn positions(&self) -> u64 {
        self.positions
    }

    /// How many windows there are.
    pub fn count(&self) -> u64 {
        (self.corpus.tokens() - 1) / self.positions
    }

    /// Reads a window, of which `out` has the length: one more than its positions.
    pub fn read(&self, window: u64, out: &mut [u32]) -> Result<()> {
        if window >= self.count() || out.len() as u64 != self.positions + 1 {
            return Err(Error::settings(format!(
                "window {window} into {} places; there are {} windows of {} + 1 tokens",
                out.len(),
                self.count(),
                self.positions
            )));
        }
        self.corpus.read(window * self.positions, out)
    }
}
