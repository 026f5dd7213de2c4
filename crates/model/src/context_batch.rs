//! Which positions of a micro-batch a rank has, if ranks divide its sequences.

use std::ops::Range;
use std::sync::Arc;

use shardwise_plan::{ContextPlace, ContextSplit, Segment};
use shardwise_torch::tch::Tensor;

use crate::Result;

/// Which positions a rank has of each sequence of a micro-batch.
#[derive(Clone, Debug)]
pub struct ContextBatch {
    /// How the ranks of the ring divide each sequence.
    pub(crate) splits: Arc<[ContextSplit]>,
    /// This rank among those that divide the sequences.
    pub(crate) place: ContextPlace,
    /// The number of positions of a whole sequence.
    positions: usize,
    /// The position in its sequence of each of this rank's tokens: of one sequence, if they are divided alike, or of all.
    in_sequence: Arc<[i64]>,
    /// The fingerprint of the whole micro-batch.
    whole_fingerprint: u64,
}

impl ContextBatch {
    /// Divides sequences of documents with these lengths.
    pub(crate) fn new(documents: &[Vec<i64>], place: ContextPlace, whole_fingerprint: u64) -> Self {
        let lengths = |documents: &Vec<i64>| documents.iter().map(|&length| length as usize).collect::<Vec<_>>();
        let splits: Arc<[ContextSplit]> =
            documents.iter().map(|documents| ContextSplit::new(&lengths(documents), place.ring.size)).collect();
        let positions = documents.first().map_or(0, |documents| documents.iter().sum::<i64>() as usize);
        let mut batch = ContextBatch { splits, place, positions, in_sequence: [].into(), whole_fingerprint };
        let different = if batch.is_alike() { 1 } else { batch.splits.len() };
        batch.in_sequence = batch.of_tokens(different, |segment, at| (segment.start + at) as i64).into();
        batch
    }

    /// Divides sequences of one document each. `whole_fingerprint` must be the same on all ranks that divide them, and almost certainly
    /// another for other sequences.
    pub fn of_whole_documents(
        sequences: usize,
        positions: usize,
        place: ContextPlace,
        whole_fingerprint: u64,
    ) -> ContextBatch {
        ContextBatch::new(&vec![vec![positions as i64]; sequences], place, whole_fingerprint)
    }

    /// The positions that this rank has of each sequence, in order, if all sequences are divided alike.
    pub fn own_positions(&self) -> Option<Vec<Range<usize>>> {
        if !self.is_alike() {
            return None;
        }
        let mut runs: Vec<Range<usize>> = Vec::new();
        for position in self.in_sequence.iter().map(|&position| position as usize) {
            match runs.last_mut().filter(|run| run.end == position) {
                Some(run) => run.end += 1,
                None => runs.push(position..position + 1),
            }
        }
        Some(runs)
    }

    /// Whether all sequences are divided alike, as those without packed documents are.
    pub(crate) fn is_alike(&self) -> bool {
        self.splits.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// The fingerprint of the whole micro-batch, which all ranks that divide it have.
    pub fn whole_fingerprint(&self) -> u64 {
        self.whole_fingerprint
    }

    /// The number of positions of a whole sequence.
    pub(crate) fn sequence_len(&self) -> usize {
        self.positions
    }

    /// The number of positions of the longest document.
    pub(crate) fn longest_document(&self) -> usize {
        let parts = self.splits.iter().flat_map(|split| (0..split.ranks()).flat_map(|rank| split.part(rank)));
        parts.map(|segment| segment.offset + segment.len).max().unwrap_or(0)
    }

    /// The positions of one of the ranks that exchange heads, among those that they have together.
    pub(crate) fn rows_of(&self, ulysses_index: usize) -> Range<usize> {
        self.place.rows_of(ulysses_index, self.positions)
    }

    /// Something of each token of this rank in the first sequences, from the segment that it is in and its index there.
    fn of_tokens(&self, sequences: usize, of_token: impl Fn(&Segment, usize) -> i64) -> Vec<i64> {
        let own = self.rows_of(self.place.ulysses.index);
        let mut values = Vec::with_capacity(sequences * own.len());
        for split in self.splits.iter().take(sequences) {
            let part = split.part(self.place.ring.index);
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
        let own = self.rows_of(self.place.ulysses.index).len() as i64;
        let positions = Tensor::f_from_slice(&self.in_sequence)?.f_view([-1, own])?.f_to_device(whole.device())?;
        Ok(whole.f_gather(1, &positions.f_expand([whole.size()[0], own], false)?, false)?)
    }
}
