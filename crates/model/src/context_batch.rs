//! Which positions of a micro-batch a rank has, if ranks divide its sequences.

use std::ops::Range;
use std::sync::Arc;

use shardwise_plan::program::Place;
use shardwise_plan::{ContextSplit, Partition, Segment};
use shardwise_torch::tch::Tensor;

use crate::Result;

/// Which positions a rank has of each sequence of a micro-batch.
#[derive(Clone, Debug)]
pub struct ContextBatch {
    /// How the ranks of the ring divide each sequence.
    pub(crate) splits: Arc<[ContextSplit]>,
    /// This rank in the ring.
    pub(crate) ring: Place,
    /// This rank among those that exchange heads. They divide the part of one rank of the ring.
    pub(crate) heads: Place,
    /// The number of positions of a whole sequence.
    positions: usize,
    /// The position in its sequence of each of this rank's tokens: of one sequence, if they are divided alike, or of all.
    in_sequence: Arc<[i64]>,
    /// The fingerprint of the whole micro-batch.
    whole_fingerprint: u64,
}

impl ContextBatch {
    /// Divides sequences of documents with these lengths.
    pub(crate) fn new(documents: &[Vec<i64>], ring: Place, heads: Place, whole_fingerprint: u64) -> Self {
        let lengths = |documents: &Vec<i64>| documents.iter().map(|&length| length as usize).collect::<Vec<_>>();
        let splits: Arc<[ContextSplit]> =
            documents.iter().map(|documents| ContextSplit::new(&lengths(documents), ring.size)).collect();
        let positions = documents.first().map_or(0, |documents| documents.iter().sum::<i64>() as usize);
        let mut batch = ContextBatch { splits, ring, heads, positions, in_sequence: [].into(), whole_fingerprint };
        let different = if batch.is_alike() { 1 } else { batch.splits.len() };
        batch.in_sequence = batch.of_tokens(different, |segment, at| (segment.start + at) as i64).into();
        batch
    }

    /// Whether all sequences are divided alike, as those without packed documents are.
    pub(crate) fn is_alike(&self) -> bool {
        self.splits.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// The fingerprint of the whole micro-batch, which all ranks that divide it have.
    pub fn whole_fingerprint(&self) -> u64 {
        self.whole_fingerprint
    }

    /// The number of positions of the longest document.
    pub(crate) fn longest_document(&self) -> usize {
        let parts = self.splits.iter().flat_map(|split| (0..split.ranks()).flat_map(|rank| split.part(rank)));
        parts.map(|segment| segment.offset + segment.len).max().unwrap_or(0)
    }

    /// The number of positions that the ranks that exchange heads have together.
    fn ring_len(&self) -> usize {
        ContextSplit::part_len(self.positions, self.ring.size, self.ring.index)
    }

    /// The positions of a rank among those that exchange heads, of `ring_len` that they have together.
    pub(crate) fn rows_of(&self, index: usize) -> Range<usize> {
        Partition::new(self.ring_len(), self.heads.size).range(index)
    }

    /// Something of each token of this rank in the first sequences, from the segment that it is in and its index there.
    fn of_tokens(&self, sequences: usize, of_token: impl Fn(&Segment, usize) -> i64) -> Vec<i64> {
        let own = self.rows_of(self.heads.index);
        let mut values = Vec::with_capacity(sequences * own.len());
        for split in self.splits.iter().take(sequences) {
            let part = split.part(self.ring.index);
            let tokens = part.iter().flat_map(|segment| (0..segment.len).map(move |at| (segment, at)));
            values.extend(tokens.skip(own.start).take(own.len()).map(|(segment, at)| of_token(segment, at)));
        }
        values
    }

    /// The position in its sequence of each of this rank's tokens: of one sequence, if they are divided alike, or of all.
    pub(crate) fn positions_in_sequence(&self) -> &Arc<[i64]> {
        &self.in_sequence
    }

    /// The position in its document of each of this rank's tokens (sequences, positions).
    pub(crate) fn positions_in_document(&self) -> Result<Tensor> {
        let positions = self.of_tokens(self.splits.len(), |segment, at| (segment.offset + at) as i64);
        Ok(Tensor::f_from_slice(&positions)?.f_view([self.splits.len() as i64, -1])?)
    }

    /// This rank's part of a tensor (sequences, positions).
    pub(crate) fn select(&self, whole: &Tensor) -> Result<Tensor> {
        let own = self.rows_of(self.heads.index).len() as i64;
        let positions = Tensor::f_from_slice(&self.in_sequence)?.f_view([-1, own])?.f_to_device(whole.device())?;
        Ok(whole.f_gather(1, &positions.f_expand([whole.size()[0], own], false)?, false)?)
    }
}
