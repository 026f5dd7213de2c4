//! The collectives of experts that ranks divide.
//!
//! With E ranks that process T tokens each, k experts per token and h features, a rank sends in a layer, if experts get equally many tokens:
//!
//! ```text
//! forward     (E − 1)/E · 2 · T · k · h            tokens to their experts, and outputs back
//! backward    (E − 1)/E · 2 · T · k · (h + 1)      gradients of outputs with their weights, and gradients of both back
//! ```
//!
//! Before that, ranks tell each other how many rows every expert gets. What is really sent depends on the experts that tokens choose, so these
//! counts are expectations.

use shardwise_plan::program::{GroupKind, InnerCollective, InnerCollectives, UnevenBytes};

use crate::PassShape;
use crate::context_costs::all_to_all;
use crate::pass::ExpertShape;

/// The size of a count of rows.
const COUNT_BYTES: usize = 8;

impl PassShape {
    /// The collectives of the forward pass of experts, and of recomputing it. Those of the backward pass depend on what is trained; see
    /// [`PassShape::backward_of_experts`]. `share` is that of a number of elements of weights in the pass's computation.
    pub(crate) fn forward_of_experts(&self, experts: &ExpertShape, share: impl Fn(usize) -> f64) -> InnerCollectives {
        let counts = self.send_to_others(experts.experts * COUNT_BYTES);
        // The shared experts compute while tokens travel.
        let tokens = self.exchange_rows(experts, experts.hidden);
        let tokens = tokens.map(|tokens| InnerCollective { overlap: share(experts.shared_elements), ..tokens });
        let outputs = self.exchange_rows(experts, experts.hidden);
        let forward: Vec<InnerCollective> = counts.into_iter().chain(tokens).chain(outputs).collect();
        InnerCollectives { recompute: forward.clone(), forward, backward: Vec::new() }
    }

    /// The collectives of the backward pass of experts. The first of their weights' gradients, which have this share of the pass's
    /// computation, are computed while gradients of tokens travel back.
    pub(crate) fn backward_of_experts(
        &self,
        experts: &ExpertShape,
        tokens_have_grad: bool,
        trains_router: bool,
        share: f64,
    ) -> Vec<InnerCollective> {
        let returned = match (tokens_have_grad, trains_router) {
            // The router computes from tokens, so weights have gradients, too.
            (true, _) => Some(experts.hidden + 1),
            (false, true) => Some(1),
            (false, false) => None,
        };
        let sent = self.exchange_rows(experts, experts.hidden + 1);
        let returned = returned.and_then(|columns| self.exchange_rows(experts, columns));
        let returned = returned.map(|returned| InnerCollective { overlap: share, ..returned });
        sent.into_iter().chain(returned).collect()
    }

    /// Sends the rows of this rank's tokens to other ranks, or those of other ranks back.
    fn exchange_rows(&self, experts: &ExpertShape, columns: usize) -> Option<InnerCollective> {
        self.send_to_others(self.tokens * experts.per_token * columns * self.element_bytes)
    }

    /// Sends equal parts of this many bytes to all ranks that hold experts, among them this one.
    fn send_to_others(&self, bytes: usize) -> Option<InnerCollective> {
        let ranks = self.expert.size;
        let sent = bytes / ranks * (ranks - 1);
        (ranks > 1).then(|| all_to_all(GroupKind::Expert, UnevenBytes { own: sent, most: sent }, 0.))
    }
}
