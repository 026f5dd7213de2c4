//! The orders of the known schedules, for any number of stages and micro-batches.

use super::action::{Action, Actions};

/// All forward passes of one chunk after the other, then all backward passes of one after the other. With one chunk per stage
/// this is GPipe.
pub(super) fn looped_breadth_first(stages: usize, chunks_per_stage: usize, micro_batches: usize) -> Actions {
    let order = |stage: usize| {
        let chunks = move || (0..chunks_per_stage).map(move |index| index * stages + stage);
        let forward = chunks().flat_map(|chunk| (0..micro_batches).map(move |m| Action::forward(chunk, m)));
        let backward = chunks().rev().flat_map(|chunk| (0..micro_batches).map(move |m| Action::backward(chunk, m)));
        forward.chain(backward).collect()
    };
    Actions { stages: (0..stages).map(order).collect() }
}

/// One backward pass, one forward pass, after as many forward passes as there are stages from here on. So the last stage makes the
/// backward pass of a micro-batch right after its forward pass.
pub(super) fn one_f_one_b(stages: usize, micro_batches: usize) -> Actions {
    let order = |stage: usize| {
        let ahead = (stages - stage).min(micro_batches);
        let first = (0..ahead).map(|m| Action::forward(stage, m));
        let steady =
            (ahead..micro_batches).flat_map(|m| [Action::backward(stage, m - ahead), Action::forward(stage, m)]);
        let last = (micro_batches - ahead..micro_batches).map(|m| Action::backward(stage, m));
        first.chain(steady).chain(last).collect()
    };
    Actions { stages: (0..stages).map(order).collect() }
}

/// 1F1B over several chunks per stage: rounds of as many micro-batches as stages pass one chunk after the other (Narayanan et al.,
/// 2021). A round may be incomplete.
pub(super) fn interleaved_1f1b(stages: usize, chunks_per_stage: usize, micro_batches: usize) -> Actions {
    let in_full_rounds = micro_batches.next_multiple_of(stages);
    let passes = in_full_rounds * chunks_per_stage;
    let order = |stage: usize| {
        let place = |index: usize| {
            let (round, in_round) = (index / (stages * chunks_per_stage), index % (stages * chunks_per_stage));
            (in_round / stages, round * stages + in_round % stages)
        };
        let forward = |index: usize| {
            let (chunk, micro_batch) = place(index);
            Action::forward(chunk * stages + stage, micro_batch)
        };
        let backward = |index: usize| {
            let (chunk, micro_batch) = place(index);
            Action::backward((chunks_per_stage - 1 - chunk) * stages + stage, micro_batch)
        };
        let ahead = ((chunks_per_stage - 1) * stages + 2 * (stages - 1 - stage)).min(passes);
        let first = (0..ahead).map(forward);
        let steady = (ahead..passes).flat_map(|index| [forward(index), backward(index - ahead)]);
        let last = (passes - ahead..passes).map(backward);
        first.chain(steady).chain(last).collect()
    };
    Actions { stages: (0..stages).map(order).collect() }.without_micro_batches_from(micro_batches)
}

/// 1F1B with split backward passes. Later stages have fewer micro-batches in flight, and use the memory that this leaves to compute
/// the gradients of parameters later, when they would wait (Qi et al., 2023).
pub(super) fn zero_bubble_h1(stages: usize, micro_batches: usize) -> Actions {
    let order = |stage: usize| {
        let ahead = (stages - stage).min(micro_batches);
        let mut actions: Vec<Action> = (0..ahead).map(|m| Action::forward(stage, m)).collect();
        for m in 0..micro_batches {
            actions.push(Action::backward_input(stage, m));
            actions.extend(m.checked_sub(stage).map(|late| Action::backward_weight(stage, late)));
            actions.extend((m + ahead < micro_batches).then(|| Action::forward(stage, m + ahead)));
        }
        let late = micro_batches.saturating_sub(stage)..micro_batches;
        actions.extend(late.map(|m| Action::backward_weight(stage, m)));
        actions
    };
    Actions { stages: (0..stages).map(order).collect() }
}

/// Two chunks per stage, the second on the way back, so that the first stage has the model's end as well. With passes that take
/// equally long no stage ever waits (Qi et al., 2024).
pub(super) fn zero_bubble_v(stages: usize, micro_batches: usize) -> Actions {
    // The order is that of a full pipeline. Fewer micro-batches leave gaps in it.
    let enough = micro_batches.max(2 * stages - 1);
    let order = |stage: usize| {
        let mut order = VOrder::new([stage, 2 * stages - 1 - stage]);
        order.forward(0, 2 * (stages - stage) - 1);
        for _ in 0..stage {
            order.forward(1, 1);
            order.forward(0, 1);
        }
        for _ in stage..stages {
            order.forward(1, 1);
            order.backward(1);
        }
        while order.forwards[1] < enough {
            order.forward(0, usize::from(order.forwards[0] < enough));
            order.backward(0);
            order.forward(1, 1);
            order.backward(1);
        }
        for _ in 0..stage {
            order.backward_input(0);
            order.backward_input(1);
        }
        for _ in stage..stages {
            order.backward(0);
        }
        order.finish()
    };
    Actions { stages: (0..stages).map(order).collect() }.without_micro_batches_from(micro_batches)
}

/// The order of a stage with two chunks, as it grows.
struct VOrder {
    chunks: [usize; 2],
    /// The number of passes of each chunk so far.
    forwards: [usize; 2],
    inputs: [usize; 2],
    weights: [usize; 2],
    actions: Vec<Action>,
}

impl VOrder {
    fn new(chunks: [usize; 2]) -> Self {
        VOrder { chunks, forwards: [0; 2], inputs: [0; 2], weights: [0; 2], actions: Vec::new() }
    }

    fn forward(&mut self, chunk: usize, times: usize) {
        for _ in 0..times {
            self.actions.push(Action::forward(self.chunks[chunk], self.forwards[chunk]));
            self.forwards[chunk] += 1;
        }
    }

    fn backward_input(&mut self, chunk: usize) {
        self.actions.push(Action::backward_input(self.chunks[chunk], self.inputs[chunk]));
        self.inputs[chunk] += 1;
    }

    fn backward_weight(&mut self, chunk: usize) {
        self.actions.push(Action::backward_weight(self.chunks[chunk], self.weights[chunk]));
        self.weights[chunk] += 1;
    }

    /// The gradient of the next input, and those of the parameters that are due first.
    fn backward(&mut self, chunk: usize) {
        self.backward_input(chunk);
        self.backward_weight(chunk);
    }

    /// Computes the gradients of parameters that are still due.
    fn finish(mut self) -> Vec<Action> {
        for chunk in [1, 0] {
            while self.weights[chunk] < self.inputs[chunk] {
                self.backward_weight(chunk);
            }
        }
        self.actions
    }
}
