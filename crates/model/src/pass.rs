//! How a unit computes in a pass, and what that costs.

use std::ops::Range;

use shardwise_plan::Partition;
use shardwise_plan::program::{CollectiveKind, GroupKind, InnerCollective, InnerCollectives, Place};

use crate::row_pieces::row_pieces;
use crate::{Activations, DeferredGradients, TensorParallel};

/// How a unit computes in a pass.
#[derive(Clone)]
pub struct Pass {
    /// The activations that the forward pass keeps for the backward pass.
    pub activations: Activations,
    /// The verbs of tensor parallelism.
    pub parallel: TensorParallel,
    /// Whether the backward pass follows at once, so that what it would have to gather again is kept.
    pub keeps_gathered: bool,
    /// Where linear layers put the gradients of their weights aside, if the backward pass computes them later.
    pub deferred: Option<DeferredGradients>,
}

impl Pass {
    /// A pass on one rank.
    pub fn new(activations: Activations) -> Self {
        Pass { activations, parallel: TensorParallel::none(), keeps_gathered: false, deferred: None }
    }

    /// Whether the backward pass gathers again what [`TensorParallel::enter`] has gathered.
    pub(crate) fn gathers_again(&self) -> bool {
        self.parallel.splits_sequence() && !self.keeps_gathered
    }
}

/// The shape of a pass, from which its costs follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassShape {
    /// The number of tokens of a micro-batch.
    pub tokens: usize,
    /// The number of positions of a sequence.
    pub positions: usize,
    /// The size of an element of the computation.
    pub element_bytes: usize,
    /// The activations that the forward pass keeps.
    pub activations: Activations,
    /// Whether the backward pass recomputes the unit, so that it does not have to gather anything again.
    pub is_recomputed: bool,
    /// This rank among those that share the layer.
    pub tensor: Place,
    /// Whether each of them has its own rows outside of tensor-parallel regions.
    pub splits_sequence: bool,
    /// Whether the backward pass computes a gradient of the input.
    pub input_has_grad: bool,
}

/// The parameters of a tensor-parallel region that are trained: the backward pass communicates only for gradients that it needs.
#[derive(Clone, Copy)]
pub(crate) struct Region {
    /// Any that is applied just before the region, such as a norm.
    pub(crate) trains_before: bool,
    /// Any inside.
    pub(crate) trains_inside: bool,
    /// Any that is applied right after it, such as a bias.
    pub(crate) trains_after: bool,
}

impl PassShape {
    /// The number of tokens that this rank has outside of tensor-parallel regions.
    pub fn own_tokens(&self) -> usize {
        if self.splits_sequence { self.part_of(self.tokens) } else { self.tokens }
    }

    /// This rank's part of items that are divided among the ranks that share the layer.
    pub fn part_of(&self, items: usize) -> usize {
        Partition::new(items, self.tensor.size).part_len(self.tensor.index)
    }

    /// The collectives of a unit with these tensor-parallel regions, one after the other, of rows with `features` elements.
    pub(crate) fn collectives_of_regions(&self, regions: &[Region], features: usize) -> InnerCollectives {
        let (enter, leave) = (self.enter(features), self.leave(features));
        let forward: Vec<InnerCollective> = enter.into_iter().chain(self.leave_in_pieces(features)).collect();
        let mut has_grad = self.input_has_grad;
        let mut backward = Vec::new();
        for region in regions {
            let enters_with_grad = has_grad || region.trains_before;
            let leaves_with_grad = enters_with_grad || region.trains_inside;
            has_grad = leaves_with_grad || region.trains_after;
            // The backward pass of each verb is the other one, and begins with gathering what the forward pass did not keep.
            let again = enter.filter(|_| has_grad && !self.is_recomputed);
            let of_leave = enter.filter(|_| leaves_with_grad);
            let of_enter = Some(leave).filter(|_| enters_with_grad);
            backward.push([again, of_leave, of_enter]);
        }
        let backward = backward.into_iter().rev().flatten().flatten().collect();
        // Without sequence parallelism, the input is divided until it is recomputed.
        let restored = (!self.splits_sequence).then_some(InnerCollective {
            kind: CollectiveKind::AllGather,
            row_bytes: features * self.element_bytes,
            ..leave
        });
        InnerCollectives {
            recompute: restored.into_iter().chain(forward.repeat(regions.len())).collect(),
            forward: forward.repeat(regions.len()),
            backward,
        }
    }

    /// The collectives of an embedding whose rows are divided among the ranks.
    pub(crate) fn collectives_of_embedding(&self, is_trained: bool, features: usize) -> InnerCollectives {
        let forward = vec![self.leave(features)];
        let backward = self.enter(features).into_iter().filter(|_| is_trained).collect();
        InnerCollectives { recompute: forward.clone(), forward, backward }
    }

    /// The collective with which a region starts: an all-gather, if the sequence is split.
    pub(crate) fn enter(&self, features: usize) -> Option<InnerCollective> {
        self.splits_sequence.then_some(InnerCollective { kind: CollectiveKind::AllGather, ..self.leave(features) })
    }

    /// The collective with which a region ends.
    pub(crate) fn leave(&self, features: usize) -> InnerCollective {
        self.leave_with(self.tokens, features)
    }

    /// The collectives with which a region ends in the forward pass, where a matrix product comes before: one for each of its pieces.
    fn leave_in_pieces(&self, features: usize) -> impl Iterator<Item = InnerCollective> {
        let pieces = row_pieces(self.tokens, if self.splits_sequence { self.tensor.size } else { 1 });
        pieces.into_iter().map(move |piece| self.leave_with(piece.iter().map(Range::len).sum(), features))
    }

    fn leave_with(&self, rows: usize, features: usize) -> InnerCollective {
        let row_bytes = features * self.element_bytes;
        let (group, bytes) = (GroupKind::Tensor, rows * row_bytes);
        match self.splits_sequence {
            true => InnerCollective { group, kind: CollectiveKind::ReduceScatter, bytes, row_bytes },
            // An all-reduce divides its buffer by elements.
            false => InnerCollective { group, kind: CollectiveKind::AllReduce, bytes, row_bytes: self.element_bytes },
        }
    }
}
