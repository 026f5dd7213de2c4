//! Conversations side by side in windows of one length.
//!
//! Most conversations are far shorter than what a model can see, and a window for each would be mostly padding. So each is laid
//! into the first window that has room for it. Every position knows which conversation it belongs to, so that attention stays
//! within it, and only positions whose next token is an answer's have a target.
//!
//! All is held in memory, since data for fine-tuning are small: [`TOKENS_MAX`] tokens at the most.

use crate::{Conversation, Error, Result};

/// The target of a position that has none, as PyTorch's cross entropy has it.
pub const IGNORED: i64 = -100;
/// How many tokens of conversations can be held.
pub const TOKENS_MAX: u64 = 1 << 31;

/// Conversations, laid into windows.
#[derive(Clone, Debug)]
pub struct Packed {
    conversations: Vec<Conversation>,
    /// Which conversations a window has.
    windows: Vec<Vec<u32>>,
    positions: usize,
    padding: u32,
    cut: u64,
    without_answers: u64,
}

/// A window of conversations: as many of each as it has positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedWindow {
    /// What the model is shown.
    pub tokens: Vec<u32>,
    /// What it has to say next, or [`IGNORED`].
    pub targets: Vec<i64>,
    /// Which conversation of the window a position belongs to, from 0. Padding is the last.
    pub documents: Vec<u32>,
}

impl Packed {
    /// Lays conversations into windows, in their order. What is longer than a window is cut at its end, and what has no answer,
    /// then, is left out. The rest of a window is filled with `padding`.
    pub fn new(
        conversations: impl IntoIterator<Item = Result<Conversation>>,
        positions: usize,
        padding: u32,
    ) -> Result<Self> {
        if positions < 2 {
            return Err(Error::settings(format!("windows of {positions} positions; a token and the next need 2")));
        }
        let mut packed =
            Packed { conversations: Vec::new(), windows: Vec::new(), positions, padding, cut: 0, without_answers: 0 };
        let mut tokens = 0;
        for conversation in conversations {
            let mut conversation = conversation?;
            packed.cut += u64::from(conversation.tokens.len() > positions);
            conversation.tokens.truncate(positions);
            conversation.answers.truncate(positions);
            // The first token is nobody's next.
            if !conversation.answers.iter().skip(1).any(|&answer| answer) {
                packed.without_answers += 1;
                continue;
            }
            tokens += conversation.tokens.len() as u64;
            if tokens > TOKENS_MAX {
                return Err(Error::settings(format!(
                    "the conversations have more than {TOKENS_MAX} tokens; take fewer"
                )));
            }
            packed.conversations.push(conversation);
        }
        let mut room = Room::new(packed.conversations.len(), positions);
        for (number, conversation) in packed.conversations.iter().enumerate() {
            let window = room.take(conversation.tokens.len());
            packed.windows.resize_with(packed.windows.len().max(window + 1), Vec::new);
            packed.windows[window].push(number as u32);
        }
        Ok(packed)
    }

    /// How many windows there are.
    pub fn count(&self) -> u64 {
        self.windows.len() as u64
    }

    /// The positions of a window.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// How many conversations are in the windows.
    pub fn conversations(&self) -> u64 {
        self.conversations.len() as u64
    }

    /// How many conversations lost their end.
    pub fn cut(&self) -> u64 {
        self.cut
    }

    /// How many conversations were left out, since the model says nothing in them.
    pub fn without_answers(&self) -> u64 {
        self.without_answers
    }

    /// A window.
    pub fn window(&self, number: u64) -> Result<PackedWindow> {
        let window = usize::try_from(number).ok().and_then(|number| self.windows.get(number));
        let window = window.ok_or_else(|| Error::settings(format!("window {number} of {}", self.windows.len())))?;
        let (mut tokens, mut targets, mut documents) = (Vec::new(), Vec::new(), Vec::new());
        for (document, &conversation) in window.iter().enumerate() {
            let Conversation { tokens: its, answers } = &self.conversations[conversation as usize];
            let next = its.iter().zip(answers).skip(1);
            targets.extend(next.map(|(&token, &answer)| if answer { i64::from(token) } else { IGNORED }));
            targets.push(IGNORED);
            tokens.extend_from_slice(its);
            documents.resize(tokens.len(), document as u32);
        }
        tokens.resize(self.positions, self.padding);
        targets.resize(self.positions, IGNORED);
        documents.resize(self.positions, window.len() as u32);
        Ok(PackedWindow { tokens, targets, documents })
    }
}

/// How much room windows have: a tree whose nodes know the most of the windows below, so that the first with room is found
/// without looking at all.
struct Room {
    most: Vec<usize>,
    leaves: usize,
}

impl Room {
    fn new(windows: usize, positions: usize) -> Self {
        let leaves = windows.next_power_of_two();
        Room { most: vec![positions; 2 * leaves], leaves }
    }

    /// Takes room in the first window that has it. There are as many windows as are ever asked for, so that one has.
    fn take(&mut self, tokens: usize) -> usize {
        let mut node = 1;
        while node < self.leaves {
            node = if self.most[2 * node] >= tokens { 2 * node } else { 2 * node + 1 };
        }
        self.most[node] -= tokens;
        let window = node - self.leaves;
        while node > 1 {
            node /= 2;
            self.most[node] = self.most[2 * node].max(self.most[2 * node + 1]);
        }
        window
    }
}
