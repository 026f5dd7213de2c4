//! Splitting a corpus, as one stream of concatenated documents, into windows of equal length.

use crate::{Corpus, Error, Result};

/// A corpus, split into windows. A window has `seq_len + 1` tokens, since the last position needs a target too. Its last token
/// is also the first of the next window.
#[derive(Debug)]
pub struct Windows {
    corpus: Corpus,
    seq_len: u64,
}

impl Windows {
    /// Splits a corpus. The last tokens are left out if they do not fill a window.
    pub fn new(corpus: Corpus, seq_len: u64) -> Result<Self> {
        if seq_len == 0 {
            return Err(Error::invalid_argument("the sequence length is 0, but must be at least 1"));
        }
        if corpus.tokens() <= seq_len {
            let problem = format!(
                "it has {} tokens, too few for one sequence of {seq_len} and its last target; use shorter sequences",
                corpus.tokens()
            );
            return Err(Error::corpus(corpus.path(), problem));
        }
        Ok(Windows { corpus, seq_len })
    }

    /// The corpus.
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    /// The number of positions in a window, which has one token more.
    pub fn seq_len(&self) -> u64 {
        self.seq_len
    }

    /// The number of windows.
    pub fn count(&self) -> u64 {
        (self.corpus.tokens() - 1) / self.seq_len
    }

    /// Reads the tokens of a window from `start` on into `out`. A window has `seq_len + 1` tokens.
    pub fn read(&self, window: u64, start: u64, out: &mut [u32]) -> Result<()> {
        let end = start.saturating_add(out.len() as u64);
        if window >= self.count() || end > self.seq_len + 1 {
            return Err(Error::invalid_argument(format!(
                "cannot read tokens {start} to {end} of window {window}: there are {} windows of {} tokens",
                self.count(),
                self.seq_len + 1
            )));
        }
        self.corpus.read(window * self.seq_len + start, out)
    }
}
