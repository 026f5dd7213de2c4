//! Documents that are packed into sequences and do not attend to each other.
//!
//! Attention is computed for each document separately, so masked pairs cost nothing: there is no mask of positions by
//! positions, and the results are bit for bit those of the document alone.

use shardwise_torch::tch::{Device, Tensor};

use crate::{Batch, Error, Result};

/// The boundaries of the documents of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Documents {
    /// For each sequence, the lengths of its documents.
    lengths: Vec<Vec<i64>>,
}

impl Documents {
    /// The documents of a batch, or `None` if every sequence is one document. A document ends where the number changes.
    pub(crate) fn of(batch: &Batch) -> Result<Option<Documents>> {
        let Some(numbers) = &batch.documents else { return Ok(None) };
        let (shape, expected) = (numbers.size(), batch.inputs.size());
        if shape != expected {
            let problem = format!("their numbers have shape {shape:?}, but the tokens have shape {expected:?}");
            return Err(Error::Config { key: "documents", problem });
        }
        let numbers: Vec<i64> = Vec::try_from(numbers.f_to_device(Device::Cpu)?.f_reshape(-1)?)?;
        let lengths_of = |sequence: &[i64]| sequence.chunk_by(|a, b| a == b).map(|run| run.len() as i64).collect();
        let lengths: Vec<Vec<i64>> = numbers.chunks(shape[1].max(1) as usize).map(lengths_of).collect();
        let is_packed = lengths.iter().any(|documents| documents.len() > 1);
        Ok(is_packed.then_some(Documents { lengths }))
    }

    /// The length of the longest document.
    pub(crate) fn longest(&self) -> i64 {
        self.lengths.iter().flatten().copied().max().unwrap_or(0)
    }

    /// The position of every token in its document (sequences, positions).
    pub(crate) fn positions(&self, device: Device) -> Result<Tensor> {
        let positions: Vec<i64> = self.lengths.iter().flatten().flat_map(|&length| 0..length).collect();
        Ok(Tensor::f_from_slice(&positions)?.f_view([self.lengths.len() as i64, -1])?.f_to_device(device)?)
    }

    /// Splits a tensor (sequences, heads, positions, head dim) into documents, in order.
    pub(crate) fn split(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        let mut parts = Vec::new();
        // Not with `narrow`, whose backward pass would allocate a full gradient for every part.
        for (sequence, lengths) in tensor.f_split(1, 0)?.iter().zip(&self.lengths) {
            parts.extend(sequence.f_split_with_sizes(lengths.as_slice(), 2)?);
        }
        Ok(parts)
    }

    /// Joins the attention outputs of all documents (1, positions, heads × head dim) to (sequences, positions, heads × head
    /// dim).
    pub(crate) fn join(&self, parts: &[Tensor]) -> Result<Tensor> {
        let joined = Tensor::f_cat(parts, 1)?;
        Ok(joined.f_view([self.lengths.len() as i64, -1, joined.size()[2]])?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(numbers: &[i64]) -> Batch {
        let tokens = Tensor::from_slice(&[5i64, 6, 7, 8, 9, 10]).view([2, 3]);
        let targets = tokens.copy();
        Batch { documents: Some(Tensor::from_slice(numbers).view([2, -1])), ..Batch::new(tokens, targets) }
    }

    #[test]
    fn a_document_ends_where_the_number_changes() {
        let documents = Documents::of(&batch(&[4, 4, 9, 0, 1, 0])).unwrap().unwrap();
        assert_eq!(documents.lengths, [vec![2, 1], vec![1, 1, 1]]);
        let positions = documents.positions(Device::Cpu).unwrap();
        assert_eq!(positions, Tensor::from_slice(&[0i64, 1, 0, 0, 0, 0]).view([2, 3]));
    }

    #[test]
    fn sequences_of_one_document_are_not_packed() {
        assert_eq!(Documents::of(&batch(&[4, 4, 4, 4, 4, 4])).unwrap(), None);
        let error = Documents::of(&batch(&[1, 2])).unwrap_err();
        assert_eq!(error.to_string(), "documents: their numbers have shape [2, 1], but the tokens have shape [2, 3]");
    }
}
