//! Collectives of the backward pass run next to the gradients of weights.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::{Arc, Mutex};

use shardwise_model::{DeferredGradients, PendingTensor, TensorGroup, TensorParallel};
use shardwise_torch::autograd::{self, ClosureError, Graph};
use shardwise_torch::tch::{Device, Kind, Tensor};

type Events = Arc<Mutex<Vec<String>>>;

fn record(events: &Events, event: impl Into<String>) {
    events.lock().unwrap().push(event.into());
}

/// The first of two ranks, of which the second always has the same. Records when collectives start and end.
struct Pair(Events);

impl Pair {
    fn start(&self, name: &'static str, result: Tensor) -> Result<PendingTensor, ClosureError> {
        let events = self.0.clone();
        record(&events, format!("{name} starts"));
        Ok(Box::new(move || {
            record(&events, format!("{name} ends"));
            Ok(result)
        }))
    }
}

impl TensorGroup for Pair {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        2
    }

    fn start_all_gather(&self, _: &str, part: &Tensor, _: usize) -> Result<PendingTensor, ClosureError> {
        self.start("all-gather", Tensor::cat(&[part, part], 0))
    }

    fn start_reduce_scatter(&self, _: &str, whole: &Tensor) -> Result<PendingTensor, ClosureError> {
        self.start("reduce-scatter", whole.narrow(0, 0, whole.size()[0] / 2) * 2.)
    }

    fn start_all_reduce(&self, _: &str, part: &Tensor) -> Result<PendingTensor, ClosureError> {
        self.start("all-reduce", part * 2.)
    }
}

/// Records what the backward pass of a region does that puts three gradients aside, one by one.
fn events_of_backward(splits_sequence: bool, overlaps: bool) -> Vec<String> {
    let events = Events::default();
    let deferred = DeferredGradients::default();
    let parallel = TensorParallel::new(Arc::new(Pair(events.clone())), splits_sequence);
    let parallel = if overlaps { parallel.with_overlap(deferred.clone()) } else { parallel };
    let rows = if splits_sequence { 2 } else { 4 };
    let x = Tensor::ones([rows, 3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let left = parallel.leave(&parallel.enter(&x, 4).unwrap()).unwrap();
    events.lock().unwrap().clear();
    for parameter in 0..3 {
        let events = events.clone();
        deferred.defer(parameter, move || {
            record(&events, format!("gradient {parameter}"));
            Ok(Tensor::from(parameter as f64))
        });
    }
    let grad = left.ones_like();
    autograd::grad(&[&left], &[Some(&grad)], &[&x], Graph::Free).unwrap();
    record(&events, "end");
    let computed = deferred.compute().unwrap();
    assert_eq!(computed.iter().map(|(parameter, _)| *parameter).collect::<Vec<_>>(), [0, 1, 2]);
    events.lock().unwrap().clone()
}

#[test]
fn gradients_of_weights_are_computed_while_those_of_activations_travel() {
    let split = events_of_backward(true, true);
    let all = ["all-gather starts", "gradient 0", "gradient 1", "gradient 2", "all-gather ends"];
    assert_eq!(split, [&all[..], &["reduce-scatter starts", "reduce-scatter ends", "end"]].concat());

    // Only the beginning of a region has a collective, and leaves one gradient for the collective after it.
    let whole = events_of_backward(false, true);
    assert_eq!(whole, ["all-reduce starts", "gradient 0", "gradient 1", "all-reduce ends", "end", "gradient 2"]);

    let apart = events_of_backward(false, false);
    assert_eq!(apart, ["all-reduce starts", "all-reduce ends", "end", "gradient 0", "gradient 1", "gradient 2"]);
}
