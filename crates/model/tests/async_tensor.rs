//! Collectives run next to matrix products: those of the forward pass next to pieces of a layer's product, those of the backward pass
//! next to the gradients of weights.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::{Arc, Mutex};

use shardwise_model::{
    Activations, Batch, DeferredGradients, Layer, Parameter, Parameters, Pass, PendingTensor, Result as ModelResult,
    TensorGroup, TensorParallel, Unit,
};
use shardwise_torch::autograd::{self, ClosureError, Graph};
use shardwise_torch::tch::{Device, Kind, Tensor, no_grad};

/// Events, in order, and their number so far, as a weight. So a product with this weight shows between which events it was computed.
#[derive(Clone)]
struct Events(Arc<Mutex<(Vec<String>, Tensor)>>);

impl Events {
    fn new() -> Self {
        Events(Arc::new(Mutex::new((Vec::new(), Tensor::zeros([1, 1], (Kind::Float, Device::Cpu))))))
    }

    fn record(&self, event: impl Into<String>) {
        let (events, count) = &mut *self.0.lock().unwrap();
        events.push(event.into());
        drop(no_grad(|| count.fill_(events.len() as i64)));
    }

    fn count(&self) -> Tensor {
        self.0.lock().unwrap().1.shallow_clone()
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().0)
    }
}

/// The first of two ranks, of which the second always has the same. Records when collectives start and end.
struct Pair(Events);

impl Pair {
    fn start(&self, name: &'static str, result: Tensor) -> Result<PendingTensor, ClosureError> {
        let events = self.0.clone();
        events.record(format!("{name} starts"));
        Ok(Box::new(move || {
            events.record(format!("{name} ends"));
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
    let events = Events::new();
    let deferred = DeferredGradients::default();
    let parallel = TensorParallel::new(Arc::new(Pair(events.clone())), splits_sequence);
    let parallel = if overlaps { parallel.with_overlap(deferred.clone()) } else { parallel };
    let rows = if splits_sequence { 2 } else { 4 };
    let x = Tensor::ones([rows, 3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let left = parallel.leave(&parallel.enter(&x, 4).unwrap()).unwrap();
    events.take();
    for parameter in 0..3 {
        let events = events.clone();
        deferred.defer(parameter, move || {
            events.record(format!("gradient {parameter}"));
            Ok(Tensor::from(parameter as f64))
        });
    }
    let grad = left.ones_like();
    autograd::grad(&[&left], &[Some(&grad)], &[&x], Graph::Free).unwrap();
    events.record("end");
    let computed = deferred.compute().unwrap();
    assert_eq!(computed.iter().map(|(parameter, _)| *parameter).collect::<Vec<_>>(), [0, 1, 2]);
    events.take()
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

/// A layer at the beginning of a region, or at its end.
enum End {
    First,
    Last,
}

impl Layer for End {
    fn forward(&self, p: &Parameters<'_>, x: Option<&Tensor>, batch: &Batch, pass: &Pass) -> ModelResult<Tensor> {
        let (x, layer) = (x.unwrap(), p.layer("weight", None));
        match self {
            End::First => Ok(pass.parallel.column_parallel(x, batch.inputs.numel(), [layer])?.1[0].shallow_clone()),
            End::Last => pass.parallel.row_parallel(x, &layer),
        }
    }
}

/// Records what a layer's forward pass does on 300 rows in total. Returns the number of events before each row was multiplied, for one
/// row in 25.
fn events_of_forward(end: End, splits_sequence: bool, overlaps: bool) -> (Vec<String>, Vec<i64>) {
    let events = Events::new();
    let parallel = TensorParallel::new(Arc::new(Pair(events.clone())), splits_sequence).with_async(overlaps);
    let rows = if matches!(end, End::First) && splits_sequence { 150 } else { 300 };
    let is_summed = matches!(end, End::Last);
    let unit = Unit::new("unit", vec![Parameter::matrix("weight", [1, 1], 1.)], end);
    let x = Tensor::ones([rows, 1], (Kind::Float, Device::Cpu));
    let tokens = Tensor::zeros([3, 100], (Kind::Int64, Device::Cpu));
    let batch = Batch::new(tokens.shallow_clone(), tokens);
    let pass = Pass { parallel, ..Pass::new(Activations::All) };
    let output = no_grad(|| unit.forward(&[events.count()], None, Some(&x), &batch, &pass)).unwrap();
    let counts = if is_summed { output / 2. } else { output };
    let counts = Vec::<f32>::try_from(counts.view(-1)).unwrap().into_iter().map(|count| count as i64);
    (events.take(), counts.step_by(25).collect())
}

#[test]
fn own_rows_are_multiplied_while_those_of_others_arrive() {
    let gather = ["all-gather starts", "all-gather ends"];
    let (events, counts) = events_of_forward(End::First, true, true);
    assert_eq!(events, gather);
    assert_eq!(counts, [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);

    let (events, counts) = events_of_forward(End::First, true, false);
    assert_eq!(events, gather);
    assert_eq!(counts, [2; 12]);

    let (events, counts) = events_of_forward(End::First, false, true);
    assert!(events.is_empty() && counts == [0; 12], "a whole sequence is not gathered");
}

#[test]
fn a_piece_is_multiplied_while_the_one_before_is_summed() {
    for (splits_sequence, [starts, ends], rows) in [
        (true, ["reduce-scatter starts", "reduce-scatter ends"], 6),
        (false, ["all-reduce starts", "all-reduce ends"], 12),
    ] {
        let counts_of = |second: i64| [vec![0; rows / 2], vec![second; rows / 2]].concat();
        let (events, counts) = events_of_forward(End::Last, splits_sequence, true);
        assert_eq!(events, [starts, starts, ends, ends]);
        assert_eq!(counts, counts_of(1));

        let (events, counts) = events_of_forward(End::Last, splits_sequence, false);
        assert_eq!(events, [starts, ends, starts, ends]);
        assert_eq!(counts, counts_of(2));
    }
}
