//! Evaluation on a held-out corpus.

use std::fmt;

use shardwise_train::Trainer;

use crate::data::EvaluationSet;
use crate::error::Result;

/// The metrics of an evaluation on held-out text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvaluationMetrics {
    /// The mean loss per token.
    pub loss: f64,
    /// The number of tokens that were evaluated.
    pub tokens: u64,
    /// The loss in bits per byte of text, if the corpus records the length of its text.
    pub bits_per_byte: Option<f64>,
}

impl fmt::Display for EvaluationMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "loss {:.4}, perplexity {:.2}", self.loss, self.loss.exp())?;
        if let Some(bits) = self.bits_per_byte {
            write!(f, ", {bits:.4} bits per byte")?;
        }
        write!(f, " ({} tokens)", self.tokens)
    }
}

/// Evaluates on held-out text. All ranks call it together.
pub(crate) fn evaluate_set(
    trainer: &mut Trainer,
    evaluation_set: &EvaluationSet,
    sequences: usize,
) -> Result<EvaluationMetrics> {
    let ranks = trainer.ranks().clone();
    let (mut loss_sum, mut tokens) = (0., 0);
    for batch in evaluation_set.batches(&ranks, sequences) {
        let sums = trainer.evaluate(&[batch?])?;
        loss_sum += sums.loss_sum;
        tokens += sums.tokens;
    }
    let loss = loss_sum / tokens as f64;
    let bits_per_byte = evaluation_set.bytes_per_token.map(|bytes| loss / std::f64::consts::LN_2 / bytes);
    Ok(EvaluationMetrics { loss, tokens, bits_per_byte })
}
