//! What a stage does in a step, as values and as text.
//!
//! The text is the CSV of `torch.distributed.pipelining`: a line per stage, a cell per action, such as `2F7`: chunk 2, forward,
//! micro-batch 7. An empty cell is a pause, which the order does not need.

use std::fmt;
use std::str::FromStr;

/// A pass of a chunk on a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// What is computed.
    pub pass: Pass,
    /// The chunk: PyTorch's stage index.
    pub chunk: usize,
    /// The micro-batch.
    pub micro_batch: usize,
}

/// What an action computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// `F`: the output.
    Forward,
    /// `B`: the gradients of the input and of the parameters.
    Backward,
    /// `I`: the gradient of the input, which the chunk before waits for.
    BackwardInput,
    /// `W`: the gradients of the parameters.
    BackwardWeight,
}

impl Pass {
    const LETTERS: [(Pass, char); 4] =
        [(Pass::Forward, 'F'), (Pass::Backward, 'B'), (Pass::BackwardInput, 'I'), (Pass::BackwardWeight, 'W')];

    /// Whether it computes the gradient of its input, and so needs that of its output.
    pub fn is_backward(self) -> bool {
        matches!(self, Pass::Backward | Pass::BackwardInput)
    }
}

impl Action {
    /// A forward pass.
    pub fn forward(chunk: usize, micro_batch: usize) -> Self {
        Action { pass: Pass::Forward, chunk, micro_batch }
    }

    /// A whole backward pass.
    pub fn backward(chunk: usize, micro_batch: usize) -> Self {
        Action { pass: Pass::Backward, chunk, micro_batch }
    }

    /// The half of a backward pass that computes the gradient of the input.
    pub fn backward_input(chunk: usize, micro_batch: usize) -> Self {
        Action { pass: Pass::BackwardInput, chunk, micro_batch }
    }

    /// The half of a backward pass that computes the gradients of the parameters.
    pub fn backward_weight(chunk: usize, micro_batch: usize) -> Self {
        Action { pass: Pass::BackwardWeight, chunk, micro_batch }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = Pass::LETTERS.iter().find(|(pass, _)| *pass == self.pass).map_or('?', |(_, letter)| *letter);
        write!(f, "{}{letter}{}", self.chunk, self.micro_batch)
    }
}

impl FromStr for Action {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fail = || format!("'{text}' is not a chunk, one of F, B, I and W, and a micro-batch, such as 0F0");
        let (at, letter) = text.char_indices().find(|(_, letter)| !letter.is_ascii_digit()).ok_or_else(fail)?;
        let pass = Pass::LETTERS.iter().find(|(_, known)| *known == letter).map(|(pass, _)| *pass);
        let number = |digits: &str| {
            let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
            digits.parse().ok().filter(|_| is_number)
        };
        match (pass, number(&text[..at]), number(&text[at + letter.len_utf8()..])) {
            (Some(pass), Some(chunk), Some(micro_batch)) => Ok(Action { pass, chunk, micro_batch }),
            _ => Err(fail()),
        }
    }
}

/// What every stage does in a step, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Actions {
    /// By stage.
    pub stages: Vec<Vec<Action>>,
}

impl Actions {
    /// Leaves out the micro-batches from this one on. What is left can be executed if all of it could.
    pub(super) fn without_micro_batches_from(mut self, micro_batches: usize) -> Self {
        self.stages.iter_mut().for_each(|actions| actions.retain(|action| action.micro_batch < micro_batches));
        self
    }
}

impl fmt::Display for Actions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for actions in &self.stages {
            let cells: Vec<String> = actions.iter().map(Action::to_string).collect();
            writeln!(f, "{}", cells.join(","))?;
        }
        Ok(())
    }
}

/// A cell of a schedule's CSV file that is not an action.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, cell {cell}: {problem}")]
pub struct ActionsError {
    /// The line, counted from 1.
    pub line: usize,
    /// The cell, counted from 1.
    pub cell: usize,
    /// What is wrong.
    pub problem: String,
}

impl FromStr for Actions {
    type Err = ActionsError;

    fn from_str(text: &str) -> Result<Self, ActionsError> {
        let parse_line = |(line, text): (usize, &str)| {
            let cells = text.split(',').map(str::trim).enumerate().filter(|(_, cell)| !cell.is_empty());
            let parse_cell = |(cell, text): (usize, &str)| {
                text.parse().map_err(|problem| ActionsError { line: line + 1, cell: cell + 1, problem })
            };
            cells.map(parse_cell).collect()
        };
        let stages = text.lines().enumerate().map(parse_line).collect::<Result<_, _>>()?;
        Ok(Actions { stages })
    }
}
