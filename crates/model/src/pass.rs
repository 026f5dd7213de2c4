//! How a unit computes in a pass, and what that costs.

use std::ops::Range;

use shardwise_plan::program::{CollectiveKind, GroupKind, InnerCollective, InnerCollectives, Place};
use shardwise_plan::{ContextPlace, Partition};

use crate::row_pieces::{multiplies_own_rows_first, row_pieces};
use crate::{
    Activations, ContextParallel, DeferredGradients, ExpertBias, ExpertParallel, ExpertTokens, TensorParallel,
};

/// How a unit computes in a pass.
#[derive(Clone)]
pub struct Pass {
    /// The activations that the forward pass keeps for the backward pass.
    pub activations: Activations,
    /// The verbs of tensor parallelism.
    pub parallel: TensorParallel,
    /// The ranks that divide sequences.
    pub context: ContextParallel,
    /// The ranks that hold the experts of a layer.
    pub experts: ExpertParallel,
    /// Whether the backward pass follows at once, so that what it would have to gather again is kept.
    pub keeps_gathered: bool,
    /// Where linear layers put the gradients of their weights aside, if the backward pass computes them later.
    pub deferred: Option<DeferredGradients>,
    /// The derivative of the step's loss with respect to the loss of one target, for layers that add a loss of their own.
    pub loss_weight: f64,
    /// Where layers with experts count tokens, if they are to be counted.
    pub expert_tokens: Option<ExpertTokens>,
    /// What is added to the scores of a layer's experts when tokens choose.
    pub expert_bias: Option<ExpertBias>,
    /// Whether experts drop the tokens that they have no capacity for, as in training.
    pub drops_tokens: bool,
}

impl Pass {
    /// A pass on one rank.
    pub fn new(activations: Activations) -> Self {
        Pass {
            activations,
            parallel: TensorParallel::none(),
            context: ContextParallel::none(),
            experts: ExpertParallel::none(),
            keeps_gathered: false,
            deferred: None,
            loss_weight: 1.,
            expert_tokens: None,
            expert_bias: None,
            drops_tokens: false,
        }
    }

    /// Whether the backward pass gathers again what [`TensorParallel::enter`] has gathered.
    pub(crate) fn gathers_again(&self) -> bool {
        self.parallel.splits_sequence() && !self.keeps_gathered
    }
}

/// The shape of a pass, from which its costs follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassShape {
    /// The number of tokens that this rank has of a micro-batch, all ranks that share the layer together.
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
    /// This rank among those that divide sequences.
    pub context: ContextPlace,
    /// This rank among those that hold the experts of a layer.
    pub expert: Place,
    /// Whether each of them has its own rows outside of tensor-parallel regions.
    pub splits_sequence: bool,
    /// Whether the backward pass computes a gradient of the input.
    pub input_has_grad: bool,
    /// Whether attention needs neither masks nor repeated key heads: see [`crate::may_use_flash_attention`].
    pub uses_flash_attention: bool,
    /// Whether it computes while collectives are under way (async tensor parallelism).
    pub overlaps: bool,
}

/// A tensor-parallel region: layers whose weights are divided by outputs, and one whose weight is divided by inputs. The backward
/// pass communicates only for gradients that it needs.
#[derive(Clone, Copy)]
pub(crate) struct Region {
    /// Whether a parameter applied just before the region, such as a norm's, is trained.
    pub(crate) trains_before: bool,
    /// Whether a parameter inside the region is trained.
    pub(crate) trains_inside: bool,
    /// Whether a parameter applied right after the region, such as a bias, is trained.
    pub(crate) trains_after: bool,
    /// What is between its layers and may communicate.
    pub(crate) inside: Inside,
    /// Whether a parameter inside the region is trained whose gradient comes through that.
    pub(crate) trains_before_inside: bool,
    /// The weights of the layers at its beginning.
    pub(crate) first: RegionWeights,
    /// The weight of the layer at its end.
    pub(crate) last: RegionWeights,
    /// Whether the first and the last layer multiply some rows while others are under way.
    pub(crate) in_pieces: bool,
}

/// What is between the layers of a region.
#[derive(Clone, Copy)]
pub(crate) enum Inside {
    Nothing,
    Attention(AttentionShape),
    Experts(ExpertShape),
}

/// The experts of a layer.
#[derive(Clone, Copy)]
pub(crate) struct ExpertShape {
    /// The number of all experts.
    pub(crate) experts: usize,
    /// The number of experts that process a token.
    pub(crate) per_token: usize,
    /// The number of features of a token.
    pub(crate) hidden: usize,
    /// The elements of the experts that process every token.
    pub(crate) shared_elements: usize,
    /// The elements of the first two matrices of a token's other experts, if they are trained.
    pub(crate) first_elements: usize,
}

/// The attention of a layer, on a rank that may share the layer with others.
#[derive(Clone, Copy)]
pub(crate) struct AttentionShape {
    pub(crate) query_heads: usize,
    pub(crate) key_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) window: Option<usize>,
    /// The FLOPs of a position, of all heads, averaged over a sequence.
    pub(crate) flops: f64,
}

/// Weights of a region, in elements on all ranks.
#[derive(Clone, Copy)]
pub(crate) struct RegionWeights {
    /// All of them.
    pub(crate) elements: usize,
    /// Those that are trained.
    pub(crate) trained: usize,
    /// Those whose gradient is computed last: the first of several layers.
    pub(crate) left: usize,
}

impl RegionWeights {
    /// The weights with these names and numbers of elements.
    pub(crate) fn new(weights: &[(&str, usize)], is_trained: &dyn Fn(&str) -> bool) -> Self {
        let trained: Vec<usize> =
            weights.iter().filter(|(name, _)| is_trained(name)).map(|(_, elements)| *elements).collect();
        RegionWeights {
            elements: weights.iter().map(|(_, elements)| elements).sum(),
            trained: trained.iter().sum(),
            left: trained.first().copied().unwrap_or(0),
        }
    }
}

impl PassShape {
    /// The same for a chunk of this many tokens.
    pub(crate) fn chunk(&self, tokens: usize) -> PassShape {
        PassShape { tokens, positions: tokens, context: ContextPlace::ALONE, activations: Activations::All, ..*self }
    }

    /// The number of tokens that this rank has outside of tensor-parallel regions.
    pub fn own_tokens(&self) -> usize {
        if self.splits_sequence { self.part_of(self.tokens) } else { self.tokens }
    }

    /// This rank's part of items that are divided among the ranks that share the layer.
    pub fn part_of(&self, items: usize) -> usize {
        Partition::new(items, self.tensor.size).part_len(self.tensor.index)
    }

    /// The collectives of a unit with these tensor-parallel regions, one after the other, of rows with `features` elements. What
    /// overlaps with them is a share of the unit's FLOPs.
    pub(crate) fn collectives_of_regions(&self, regions: &[Region], features: usize) -> InnerCollectives {
        let attention_flops = |region: &Region| match region.inside {
            Inside::Attention(attention) => attention.flops,
            Inside::Nothing | Inside::Experts(_) => 0.,
        };
        let of_weights: usize = regions.iter().map(|region| region.first.elements + region.last.elements).sum();
        let flops = 2. * of_weights as f64 + regions.iter().map(attention_flops).sum::<f64>();
        let of_flops = |elements: usize| 2. * elements as f64 / flops;
        let share = |elements: usize| if self.overlaps { of_flops(elements) } else { 0. };
        let inside = |region: &Region| match &region.inside {
            Inside::Nothing => InnerCollectives::default(),
            Inside::Attention(attention) => self.collectives_of_attention(attention, attention.flops / flops),
            Inside::Experts(experts) => self.forward_of_experts(experts, of_flops),
        };
        let inside: Vec<InnerCollectives> = regions.iter().map(inside).collect();
        let forward: Vec<InnerCollective> = regions
            .iter()
            .zip(&inside)
            .flat_map(|(region, inside)| self.forward_of_region(region, inside, features, &share))
            .collect();
        // Without sequence parallelism, the input is divided until it is recomputed.
        let restored = self.leave(features).filter(|_| !self.splits_sequence).map(|leave| InnerCollective {
            kind: CollectiveKind::AllGather,
            row_bytes: features * self.element_bytes,
            ..leave
        });
        InnerCollectives {
            recompute: restored.into_iter().chain(forward.clone()).collect(),
            forward,
            backward: self.backward_of_regions(regions, &inside, features, &share, &of_flops),
        }
    }

    /// This rank's rows are multiplied while the others' arrive, and a piece of the last product while another is summed.
    fn forward_of_region(
        &self,
        region: &Region,
        inside: &InnerCollectives,
        features: usize,
        share: &dyn Fn(usize) -> f64,
    ) -> Vec<InnerCollective> {
        let own_rows = match region.in_pieces && multiplies_own_rows_first(self.tokens, self.tensor.size) {
            true => share(region.first.elements) / self.tensor.size as f64,
            false => 0.,
        };
        let enter = self.enter(features).map(|enter| InnerCollective { overlap: own_rows, ..enter });
        let pieces = match region.in_pieces {
            true => row_pieces(self.tokens, if self.splits_sequence { self.tensor.size } else { 1 }),
            false => vec![vec![0..self.tokens]],
        };
        let leave = pieces.iter().enumerate().filter_map(|(index, piece)| {
            let leave = self.leave_with(piece.iter().map(Range::len).sum(), features)?;
            let is_last = index + 1 == pieces.len();
            Some(InnerCollective {
                overlap: if is_last { 0. } else { share(region.last.elements) / pieces.len() as f64 },
                ..leave
            })
        });
        enter.into_iter().chain(inside.forward.iter().copied()).chain(leave).collect()
    }

    /// Gradients of weights are computed while those of activations travel. Each region leaves one to overlap with the first collective
    /// of the region before it.
    fn backward_of_regions(
        &self,
        regions: &[Region],
        inside: &[InnerCollectives],
        features: usize,
        share: &dyn Fn(usize) -> f64,
        of_flops: &dyn Fn(usize) -> f64,
    ) -> Vec<InnerCollective> {
        let (enter, leave) = (self.enter(features), self.leave(features));
        let mut has_grad = self.input_has_grad;
        let mut grads = Vec::new();
        for (region, inside) in regions.iter().zip(inside) {
            let enters_with_grad = has_grad || region.trains_before;
            let leaves_with_grad = enters_with_grad || region.trains_inside;
            has_grad = leaves_with_grad || region.trains_after;
            grads.push((region, inside, enters_with_grad, leaves_with_grad));
        }
        let (mut backward, mut deferred) = (Vec::new(), 0.);
        for (region, inside, enters_with_grad, leaves_with_grad) in grads.into_iter().rev() {
            let has_grad = leaves_with_grad || region.trains_after;
            // The backward pass of each verb is the other one, and begins with gathering what the forward pass did not keep.
            backward.extend(enter.filter(|_| has_grad && !self.is_recomputed));
            if let Some(of_leave) = enter.filter(|_| leaves_with_grad) {
                backward.push(InnerCollective { overlap: std::mem::take(&mut deferred), ..of_leave });
            }
            match &region.inside {
                // The gradients of projections come through attention.
                Inside::Attention(_) if enters_with_grad || region.trains_before_inside => {
                    backward.extend(&inside.backward);
                }
                Inside::Experts(experts)
                    if enters_with_grad
                        || region.trains_before_inside
                        || region.first.trained + region.last.trained > 0 =>
                {
                    let trains_router = region.trains_before_inside;
                    // If ranks share the layer, its weights' gradients overlap with their collectives instead.
                    let is_put_aside = self.overlaps && self.tensor.size > 1;
                    let overlap = if is_put_aside { 0. } else { of_flops(experts.first_elements) / 2. };
                    backward.extend(self.backward_of_experts(experts, enters_with_grad, trains_router, overlap));
                }
                _ => (),
            }
            // A backward pass has twice the FLOPs, half of them for gradients of weights.
            if let Some(leave) = leave.filter(|_| enters_with_grad) {
                let now = region.last.trained + region.first.trained - region.first.left;
                backward.push(InnerCollective { overlap: deferred + share(now) / 2., ..leave });
                deferred = share(region.first.left) / 2.;
            }
        }
        backward
    }

    /// The collectives of an embedding whose rows are divided among the ranks.
    pub(crate) fn collectives_of_embedding(&self, is_trained: bool, features: usize) -> InnerCollectives {
        let forward: Vec<InnerCollective> = self.leave(features).into_iter().collect();
        let backward = self.enter(features).into_iter().filter(|_| is_trained).collect();
        InnerCollectives { recompute: forward.clone(), forward, backward }
    }

    /// The collective with which a region starts: an all-gather, if the sequence is split.
    pub(crate) fn enter(&self, features: usize) -> Option<InnerCollective> {
        let leave = self.leave(features).filter(|_| self.splits_sequence)?;
        Some(InnerCollective { kind: CollectiveKind::AllGather, ..leave })
    }

    /// The collective with which a region ends, if several ranks share the layer.
    pub(crate) fn leave(&self, features: usize) -> Option<InnerCollective> {
        self.leave_with(self.tokens, features)
    }

    fn leave_with(&self, rows: usize, features: usize) -> Option<InnerCollective> {
        let row_bytes = features * self.element_bytes;
        let (kind, divided_by) = match self.splits_sequence {
            true => (CollectiveKind::ReduceScatter, row_bytes),
            // An all-reduce divides its buffer by elements.
            false => (CollectiveKind::AllReduce, self.element_bytes),
        };
        (self.tensor.size > 1).then_some(InnerCollective {
            group: GroupKind::Tensor,
            kind,
            bytes: rows * row_bytes,
            row_bytes: divided_by,
            overlap: 0.,
            uneven: None,
        })
    }
}
