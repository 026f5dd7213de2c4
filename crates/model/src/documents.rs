//! Documents that are packed into sequences one after the other, and do not see each other.
//!
//! Attention is computed for each document on its own, so what documents do not see costs nothing: there is no mask of
//! positions by positions, and the bits are those of the document by itself.

use shardwise_torch::tch::{Device, Tensor};

use crate::{Batch, Error, Result};

/// Where the documents of a batch begin and end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Documents {
    /// For every sequence how many positions each of its documents has.
    lengths: Vec<Vec<i64>>,
}

impl Documents {
    /// Those of a batch; none where every sequence is one document. A document ends where the number changes.
    pub(crate) fn of(batch: &Batch) -> Result<Option<Documents>> {
        let Some(numbers) = &batch.documents else { return Ok(None) };
        let (shape, expected) = (numbers.size(), batch.inputs.size());
        if shape != expected {
            let problem = format!("their numbers have the shape {shape:?}, and the tokens {expected:?}");
            return Err(Error::Config { key: "documents", problem });
        }
        let numbers: Vec<i64> = Vec::try_from(numbers.f_to_device(Device::Cpu)?.f_reshape(-1)?)?;
        let lengths_of = |sequence: &[i64]| sequence.chunk_by(|a, b| a == b).map(|run| run.len() as i64).collect();
        let lengths: Vec<Vec<i64>> = numbers.chunks(shape[1].max(1) as usize).map(lengths_of).collect();
        let is_packed = lengths.iter().any(|documents| documents.len() > 1);
        Ok(is_packed.then_some(Documents { lengths }))
    }

    /// The positions of the longest.
    pub(crate) fn longest(&self) -> i64 {
        self.lengths.iter().flatten().copied().max().unwrap_or(0)
    }

    /// Every position's place in its document: sequences by positions.
    pub(crate) fn places(&self, device: Device) -> Result<Tensor> {
        let places: Vec<i64> = self.lengths.iter().flatten().flat_map(|&length| 0..length).collect();
        Ok(Tensor::f_from_slice(&places)?.f_view([self.lengths.len() as i64, -1])?.f_to_device(device)?)
    }

    /// A tensor (sequences, heads, positions, width) in parts of one document each, in order.
    pub(crate) fn split(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        let mut parts = Vec::new();
        // Not by narrowing: its backward pass would make a whole gradient for every part.
        for (sequence, lengths) in tensor.f_split(1, 0)?.iter().zip(&self.lengths) {
            parts.extend(sequence.f_split_with_sizes(lengths.as_slice(), 2)?);
        }
        Ok(parts)
    }

    /// The reverse for what attention has put out: parts (1, positions, width) as sequences by positions by width.
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
        let places = documents.places(Device::Cpu).unwrap();
        assert_eq!(places, Tensor::from_slice(&[0i64, 1, 0, 0, 0, 0]).view([2, 3]));
    }

    #[test]
    fn sequences_of_one_document_are_not_packed() {
        assert_eq!(Documents::of(&batch(&[4, 4, 4, 4, 4, 4])).unwrap(), None);
        let error = Documents::of(&batch(&[1, 2])).unwrap_err();
        assert_eq!(error.to_string(), "documents: their numbers have the shape [2, 1], and the tokens [2, 3]");
    }
}
