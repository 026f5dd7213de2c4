//! Packing conversations into windows of one length.
//!
//! Most conversations are much shorter than a sequence, so one window each would be mostly padding. Instead each conversation goes into
//! the first window that has room for it. Every position knows its conversation, so that attention stays within it, and only positions
//! whose next token belongs to an answer have a target.
//!
//! Everything is held in memory, since fine-tuning data is small: at most [`TOKENS_MAX`] tokens.

use crate::{Conversation, Error, Result};

/// The target of a position that has none: the `ignore_index` of PyTorch's cross entropy.
pub const IGNORED: i64 = -100;
/// The most tokens that all conversations together may have.
pub const TOKENS_MAX: u64 = 1 << 31;

/// Conversations, packed into windows.
#[derive(Clone, Debug)]
pub struct PackedConversations {
    conversations: Vec<Conversation>,
    /// The indices of the conversations in each window.
    windows: Vec<Vec<u32>>,
    seq_len: usize,
    padding: u32,
    truncated: u64,
    without_answers: u64,
}

/// A window of conversations. Each field has one value per position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedWindow {
    /// The input tokens.
    pub tokens: Vec<u32>,
    /// The next token, or [`IGNORED`] if it is not part of an answer.
    pub targets: Vec<i64>,
    /// The number of the conversation in the window, from 0. Padding has the highest number.
    pub documents: Vec<u32>,
}

impl PackedConversations {
    /// Packs conversations into windows in their order. A conversation longer than a window is truncated, and one without an answer is left
    /// out. The rest of a window is filled with `padding`.
    pub fn new(
        conversations: impl IntoIterator<Item = Result<Conversation>>,
        seq_len: usize,
        padding: u32,
    ) -> Result<Self> {
        if seq_len < 2 {
            let problem = format!("a sequence length of {seq_len} is too short: a token and its target need 2");
            return Err(Error::invalid_argument(problem));
        }
        let mut packed = PackedConversations {
            conversations: Vec::new(),
            windows: Vec::new(),
            seq_len,
            padding,
            truncated: 0,
            without_answers: 0,
        };
        let mut tokens = 0;
        for conversation in conversations {
            let mut conversation = conversation?;
            packed.truncated += u64::from(conversation.tokens.len() > seq_len);
            conversation.tokens.truncate(seq_len);
            conversation.answers.truncate(seq_len);
            // The first token is never a target.
            if !conversation.answers.iter().skip(1).any(|&answer| answer) {
                packed.without_answers += 1;
                continue;
            }
            tokens += conversation.tokens.len() as u64;
            if tokens > TOKENS_MAX {
                return Err(Error::invalid_argument(format!(
                    "the conversations have more than {TOKENS_MAX} tokens in total; use fewer"
                )));
            }
            packed.conversations.push(conversation);
        }
        let mut space = FreeSpace::new(packed.conversations.len(), seq_len);
        for (number, conversation) in packed.conversations.iter().enumerate() {
            let window = space.take(conversation.tokens.len());
            packed.windows.resize_with(packed.windows.len().max(window + 1), Vec::new);
            packed.windows[window].push(number as u32);
        }
        Ok(packed)
    }

    /// The number of windows.
    pub fn count(&self) -> u64 {
        self.windows.len() as u64
    }

    /// The number of positions in a window.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// The number of conversations in all windows.
    pub fn conversations(&self) -> u64 {
        self.conversations.len() as u64
    }

    /// The number of conversations that were truncated.
    pub fn truncated(&self) -> u64 {
        self.truncated
    }

    /// The number of conversations that were left out because they have no answer.
    pub fn without_answers(&self) -> u64 {
        self.without_answers
    }

    /// Returns a window, with its padding.
    pub fn window(&self, number: u64) -> Result<PackedWindow> {
        let window = usize::try_from(number).ok().and_then(|number| self.windows.get(number));
        let window = window.ok_or_else(|| {
            Error::invalid_argument(format!("window {number} does not exist; there are {}", self.windows.len()))
        })?;
        let (mut tokens, mut targets, mut documents) = (Vec::new(), Vec::new(), Vec::new());
        for (document, &conversation) in window.iter().enumerate() {
            let Conversation { tokens: its, answers } = &self.conversations[conversation as usize];
            let next = its.iter().zip(answers).skip(1);
            targets.extend(next.map(|(&token, &answer)| if answer { i64::from(token) } else { IGNORED }));
            targets.push(IGNORED);
            tokens.extend_from_slice(its);
            documents.resize(tokens.len(), document as u32);
        }
        tokens.resize(self.seq_len, self.padding);
        targets.resize(self.seq_len, IGNORED);
        documents.resize(self.seq_len, window.len() as u32);
        Ok(PackedWindow { tokens, targets, documents })
    }
}

/// The free space of the windows, as a segment tree of maxima, which finds the first window with enough space in logarithmic
/// time.
struct FreeSpace {
    max: Vec<usize>,
    leaves: usize,
}

impl FreeSpace {
    fn new(windows: usize, seq_len: usize) -> Self {
        let leaves = windows.next_power_of_two();
        FreeSpace { max: vec![seq_len; 2 * leaves], leaves }
    }

    /// Takes space in the first window that has enough, and returns the window. There are as many windows as conversations, so
    /// one always has.
    fn take(&mut self, tokens: usize) -> usize {
        let mut node = 1;
        while node < self.leaves {
            node = if self.max[2 * node] >= tokens { 2 * node } else { 2 * node + 1 };
        }
        self.max[node] -= tokens;
        let window = node - self.leaves;
        while node > 1 {
            node /= 2;
            self.max[node] = self.max[2 * node].max(self.max[2 * node + 1]);
        }
        window
    }
}
