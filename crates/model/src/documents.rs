//! Documents that are packed into sequences and do not attend to each other.
//!
//! Attention is computed for each document separately, so masked pairs cost nothing: there is no mask of positions by
//! positions, and the results are bit for bit those of the document alone.

use shardwise_torch::attention::Boundaries;
use shardwise_torch::tch::{Device, Kind, Tensor};

use crate::Result;

/// The boundaries of the documents of a batch.
#[derive(Debug)]
pub struct Documents {
    /// For each sequence, the lengths of its documents.
    lengths: Vec<Vec<i64>>,
    /// The first token of each document, and the end of the last, on a device that has kernels for documents of different lengths.
    boundaries: Option<Tensor>,
}

impl Clone for Documents {
    fn clone(&self) -> Self {
        Documents { lengths: self.lengths.clone(), boundaries: self.boundaries.as_ref().map(Tensor::shallow_clone) }
    }
}

impl Documents {
    /// The documents of a batch, given the number of each token's document as a 64-bit integer (sequences, positions). A document ends
    /// where the number changes. Returns `None` if every sequence is one document.
    pub fn from_numbers(numbers: &Tensor) -> Result<Option<Documents>> {
        let positions = numbers.size2()?.1;
        let numbers: Vec<i64> = Vec::try_from(numbers.f_to_device(Device::Cpu)?.f_reshape(-1)?)?;
        let lengths_of = |sequence: &[i64]| sequence.chunk_by(|a, b| a == b).map(|run| run.len() as i64).collect();
        let lengths: Vec<Vec<i64>> = numbers.chunks(positions.max(1) as usize).map(lengths_of).collect();
        let is_packed = lengths.iter().any(|documents| documents.len() > 1);
        Ok(is_packed.then_some(Documents { lengths, boundaries: None }))
    }

    /// The documents of a batch that is copied to a device, for which the host does not wait.
    pub(crate) fn to_device(&self, device: Device) -> Documents {
        let boundaries = (device != Device::Cpu).then(|| {
            let mut end = 0;
            let ends = self.lengths.iter().flatten().map(|length| {
                end += *length as i32;
                end
            });
            let boundaries = Tensor::from_slice(&[0].into_iter().chain(ends).collect::<Vec<i32>>());
            boundaries.to_device_(device, Kind::Int, true, false)
        });
        Documents { lengths: self.lengths.clone(), boundaries }
    }

    pub(crate) fn tensor(&self) -> Option<&Tensor> {
        self.boundaries.as_ref()
    }

    /// What kernels for documents of different lengths need, if the device has any.
    pub(crate) fn boundaries(&self) -> Option<Boundaries<'_>> {
        self.boundaries.as_ref().map(|tokens| Boundaries { tokens, longest: self.longest() })
    }

    /// For each sequence, the lengths of its documents.
    pub(crate) fn lengths(&self) -> &[Vec<i64>] {
        &self.lengths
    }

    /// The length of the longest document.
    pub(crate) fn longest(&self) -> i64 {
        self.lengths.iter().flatten().copied().max().unwrap_or(0)
    }

    /// The position of every token in its document (sequences, positions).
    pub(crate) fn positions(&self) -> Result<Tensor> {
        let sequences = self.lengths.len() as i64;
        let Some(boundaries) = &self.boundaries else {
            let positions: Vec<i64> = self.lengths.iter().flatten().flat_map(|&length| 0..length).collect();
            return Ok(Tensor::f_from_slice(&positions)?.f_view([sequences, -1])?);
        };
        let tokens = Tensor::f_arange(self.lengths.iter().flatten().sum::<i64>(), (Kind::Int64, boundaries.device()))?;
        let ends = boundaries.f_narrow(0, 1, boundaries.size()[0] - 1)?;
        let first = boundaries.f_index_select(0, &tokens.f_bucketize(&ends, true, true)?)?;
        Ok(tokens.f_sub(&first)?.f_view([sequences, -1])?)
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

    fn documents(numbers: &[i64]) -> Option<Documents> {
        Documents::from_numbers(&Tensor::from_slice(numbers).view([2, -1])).unwrap()
    }

    #[test]
    fn a_document_ends_where_the_number_changes() {
        let documents = documents(&[4, 4, 9, 0, 1, 0]).unwrap();
        assert_eq!(documents.lengths, [vec![2, 1], vec![1, 1, 1]]);
        let positions = Tensor::from_slice(&[0i64, 1, 0, 0, 0, 0]).view([2, 3]);
        assert_eq!(documents.positions().unwrap(), positions);
        // As on a device.
        let boundaries = Tensor::from_slice(&[0i32, 2, 3, 4, 5, 6]);
        assert_eq!(Documents { boundaries: Some(boundaries), ..documents }.positions().unwrap(), positions);
    }

    #[test]
    fn sequences_of_one_document_are_not_packed() {
        assert!(documents(&[4, 4, 4, 4, 4, 4]).is_none());
        assert!(Documents::from_numbers(&Tensor::from_slice(&[1i64, 2])).is_err());
    }
}
