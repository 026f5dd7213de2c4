//! The memory of the second half of a block: an MLP, or experts.

use shardwise_plan::{LlamaConfig, MoeConfig};

use crate::{Activations, PassShape};

/// The memory of a pass besides its input, its output and their norms, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct FeedForwardMemory {
    /// Kept for the backward pass.
    pub(crate) kept: usize,
    /// The most that the forward pass holds in addition.
    pub(crate) forward: usize,
    /// The most that the backward pass holds in addition, without `gradient`.
    pub(crate) backward: usize,
    /// The gradient of `down_proj`, the first that the backward pass computes.
    pub(crate) gradient: usize,
    /// The most that a forward pass without autograd holds.
    pub(crate) no_grad: usize,
}

impl FeedForwardMemory {
    /// That of a block of this model.
    pub(crate) fn new(config: &LlamaConfig, shape: &PassShape) -> Self {
        match &config.moe {
            None => of_mlp(config.hidden_size, config.intermediate_size, shape),
            Some(moe) => of_experts(config.hidden_size, moe, shape),
        }
    }
}

fn of_mlp(hidden: usize, intermediate: usize, shape: &PassShape) -> FeedForwardMemory {
    let intermediate = shape.part_of(intermediate);
    let element = |count: usize| shape.tokens * count * shape.element_bytes;
    let gradient = hidden * intermediate * shape.element_bytes;
    let no_grad = element(4 * intermediate);
    match shape.activations {
        // Gate, up, and their product.
        Activations::All => FeedForwardMemory {
            kept: element(3 * intermediate),
            forward: element(intermediate),
            backward: element(3 * intermediate),
            gradient,
            no_grad,
        },
        Activations::Selective => FeedForwardMemory {
            kept: element(2 * intermediate),
            forward: element(hidden + 2 * intermediate),
            backward: element(hidden + 4 * intermediate),
            gradient,
            no_grad,
        },
    }
}

fn of_experts(hidden: usize, moe: &MoeConfig, shape: &PassShape) -> FeedForwardMemory {
    let intermediate = shape.part_of(moe.moe_intermediate_size);
    // If ranks divide the experts, a rank sends this many rows and, if experts get equally many tokens, receives as many.
    let rows = shape.tokens * moe.num_experts_per_tok;
    let is_divided = shape.expert.size > 1;
    let element = |count: usize| rows * count * shape.element_bytes;
    let of_tokens = |count: usize| shape.tokens * count * shape.element_bytes;
    let gradient = moe.num_experts / shape.expert.size * hidden * intermediate * shape.element_bytes;
    // Rows from other ranks are kept; those that are sent, or have not been sorted yet, are there at the same time.
    let received = if is_divided { element(hidden) } else { 0 };
    // Scores, those that are normalized, and where rows go, as 64-bit integers.
    let wide = shape.element_bytes.max(4);
    let routing = shape.tokens * 2 * moe.num_experts * wide + rows * (4 * 8 + 2 * wide);
    // What is normalized is computed again.
    let restored = if shape.activations == Activations::Selective { of_tokens(hidden) } else { 0 };
    // Sorted rows, then the gated ones and their outputs, and then those outputs by token.
    let forward = element((intermediate + hidden).max(2 * hidden)) + received;
    let backward = [
        // Gradients of outputs and of what is gated, the gate, what is gated, and their product.
        element(hidden + 4 * intermediate).saturating_sub(gradient),
        element(hidden + 3 * intermediate),
        // Gate and up have been freed, and replaced by their gradients.
        element(2 * hidden),
        2 * gradient + element(hidden) + of_tokens(hidden),
    ];
    let experts = FeedForwardMemory {
        kept: element(2 * intermediate) + routing + received,
        forward: forward + restored,
        backward: restored + received + backward.into_iter().max().unwrap_or(0),
        gradient,
        no_grad: element(2 * intermediate) + forward + routing + received,
    };
    if moe.n_shared_experts == 0 {
        return experts;
    }
    let shared = of_mlp(hidden, moe.shared_intermediate_size(), shape);
    // The shared experts compute while sorted rows travel, and their output is there while the others compute.
    let travelling = element(hidden) + received;
    // The backward pass begins with the others, whose activations are freed and whose gradients stay.
    let stays = 2 * gradient + shared.backward + shared.gradient;
    FeedForwardMemory {
        kept: experts.kept + shared.kept,
        forward: (experts.forward + of_tokens(hidden)).max(shared.forward + travelling),
        backward: experts.backward.max(stays.saturating_sub(element(2 * intermediate) + received)),
        gradient,
        no_grad: (experts.no_grad + of_tokens(hidden)).max(shared.no_grad + routing + travelling),
    }
}
