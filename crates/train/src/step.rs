//! One step of training.

use std::sync::Arc;

use shardwise_comm::Group;
use shardwise_model::{Batch, IGNORED, Model, Unit, init};
use shardwise_torch::autograd::{self, Graph};
use shardwise_torch::optim::AdamW;
use shardwise_torch::tch::{Kind, Tensor, no_grad};
use shardwise_zero::{Shape, ShardedUnit, Sharding};

use crate::{Error, Result};

/// How to train.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// What is sliced.
    pub sharding: Sharding,
    /// With what the parameters begin.
    pub seed: u64,
    /// What the backward pass finds of the forward pass.
    pub recomputation: Recomputation,
    /// The optimizer's numbers.
    pub adamw: AdamW,
    /// The largest norm of all gradients together; larger ones are scaled down to it.
    pub clip_norm: Option<f64>,
}

/// What is kept of a unit's forward pass for its backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recomputation {
    /// All that autograd wants.
    None,
    /// Its input alone; the rest is computed again. The same numbers, for about a third more work.
    Full,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// The mean loss of all tokens that count, of all ranks and micro-batches.
    pub loss: f64,
    /// The norm of all gradients together, before clipping.
    pub gradient_norm: f64,
    /// How many tokens counted.
    pub tokens: u64,
}

/// A model in training, as one rank holds it.
pub struct Trainer {
    model: Model,
    shards: Vec<ShardedUnit>,
    group: Arc<Group>,
    options: Options,
    steps: u64,
}

/// What a unit's forward pass leaves for its backward pass. Each unit has a graph of its own: its input is a leaf.
struct Passed {
    input: Option<Tensor>,
    /// With its graph, unless that is made again in the backward pass.
    output: Tensor,
}

impl Trainer {
    /// Begins a model from a seed. Each rank makes what it keeps, and nothing else.
    pub fn new(model: Model, group: Arc<Group>, options: Options) -> Result<Self> {
        let shard = |unit: &Unit| {
            let parameters = unit.parameters().iter();
            let shapes: Vec<Shape> =
                parameters.map(|p| Shape { dimensions: p.shape.clone(), decays: p.decays }).collect();
            let mut begin = |parameter: usize, range, elements: &mut [f32]| {
                init::begin(options.seed, &unit.parameters()[parameter], range, elements);
            };
            ShardedUnit::new(unit.name(), &shapes, group.clone(), options.sharding, &mut begin)
        };
        let shards = model.units().iter().map(shard).collect::<std::result::Result<_, _>>()?;
        Ok(Trainer { model, shards, group, options, steps: 0 })
    }

    /// The shards, unit by unit.
    pub fn shards_mut(&mut self) -> &mut [ShardedUnit] {
        &mut self.shards
    }

    // ---- the step -----------------------------------------------------------------------------------------------------

    /// One step on this rank's micro-batches.
    pub fn step(&mut self, micro_batches: &[Batch]) -> Result<Report> {
        self.steps += 1;

        // A token weighs the same wherever it is: the loss is the mean over all ranks and micro-batches.
        let counted =
            micro_batches.iter().map(|batch| batch.targets.ne(IGNORED).sum(Kind::Int64).int64_value(&[])).sum();
        let tokens = self.agree_on_batches(counted, micro_batches.len())?;
        let weight = Tensor::from(1. / tokens as f32);

        let mut loss = 0.;
        for (index, batch) in micro_batches.iter().enumerate() {
            let passed = self.forward(batch)?;
            loss += passed.last().map_or(0., |head| head.output.double_value(&[]));
            // The last backward pass completes the gradients of unit after unit, and starts to reduce each at once.
            let last = index + 1 == micro_batches.len();
            self.backward(batch, passed, &weight, last)?;
        }

        let mut squares = Vec::new();
        for shard in &mut self.shards {
            shard.finish_reduce()?;
            squares.push(shard.gradient_squares()?);
        }
        let (loss, gradient_norm) = self.agree(loss, &squares)?;

        if let Some(largest) = self.options.clip_norm.filter(|&largest| gradient_norm > largest) {
            for shard in &mut self.shards {
                shard.scale_gradients(largest / gradient_norm)?;
            }
        }
        for shard in &mut self.shards {
            shard.update(self.options.adamw)?;
        }
        Ok(Report { loss: loss / tokens as f64, gradient_norm, tokens: tokens as u64 })
    }

    /// From the tokens to the loss, unit by unit. While one computes, the next one's parameters are on their way.
    fn forward(&mut self, batch: &Batch) -> Result<Vec<Passed>> {
        let mut passed: Vec<Passed> = Vec::with_capacity(self.shards.len());
        for index in 0..self.shards.len() {
            self.gather(index)?;
            self.begin_gather(index + 1)?;
            let input = passed.last().map(|before| before.output.detach().set_requires_grad(true));
            let output = match self.options.recomputation {
                Recomputation::None => self.compute(index, input.as_ref(), batch)?,
                Recomputation::Full => no_grad(|| self.compute(index, input.as_ref(), batch))?,
            };
            self.release(index)?;
            passed.push(Passed { input, output });
        }
        Ok(passed)
    }

    /// From the loss back to the tokens, leaving gradients behind. While one unit computes, the one before it is gathered and
    /// those after it are reduced.
    fn backward(&mut self, batch: &Batch, passed: Vec<Passed>, weight: &Tensor, reduce: bool) -> Result<()> {
        let mut output_grad = weight.shallow_clone();
        for (index, Passed { input, output }) in passed.into_iter().enumerate().rev() {
            self.gather(index)?;
            if index > 0 {
                self.begin_gather(index - 1)?;
            }
            let output = match self.options.recomputation {
                Recomputation::None => output,
                Recomputation::Full => self.compute(index, input.as_ref(), batch)?,
            };
            let (own, tied) = (self.shards[index].parameters(), self.tied(index));
            let inputs: Vec<&Tensor> = own.iter().chain(tied).chain(&input).collect();
            let mut grads = autograd::grad(&[&output], &[Some(&output_grad)], &inputs, Graph::Free)
                .map_err(|error| Error::Backward { unit: self.shards[index].name().to_string(), error })?
                .into_iter();
            let own_grads: Vec<Option<Tensor>> = grads.by_ref().take(own.len()).collect();
            let tied_grad = tied.is_some().then(|| grads.next().flatten()).flatten();
            let input_grad = grads.next().flatten();
            drop(output);
            self.release(index)?;

            self.shards[index].add_gradients(own_grads)?;
            if let (Some(tied), Some(grad)) = (self.model.units()[index].tied(), tied_grad) {
                self.shards[tied.unit].add_gradient(tied.parameter, &grad)?;
            }
            if reduce {
                self.shards[index].begin_reduce()?;
            }
            if let Some(grad) = input_grad {
                output_grad = grad;
            }
        }
        Ok(())
    }

    // ---- its parts ----------------------------------------------------------------------------------------------------

    /// A unit's output.
    fn compute(&self, index: usize, input: Option<&Tensor>, batch: &Batch) -> Result<Tensor> {
        let unit = &self.model.units()[index];
        unit.forward(self.shards[index].parameters(), self.tied(index), input, batch)
            .map_err(|error| Error::Model { unit: unit.name().to_string(), error })
    }

    /// The parameter that a unit uses of another one.
    fn tied(&self, index: usize) -> Option<&Tensor> {
        let tied = self.model.units()[index].tied()?;
        Some(&self.shards[tied.unit].parameters()[tied.parameter])
    }

    /// Starts to make a unit's parameters whole, if there is such a unit.
    fn begin_gather(&mut self, index: usize) -> Result<()> {
        match self.shards.get_mut(index) {
            Some(shard) => Ok(shard.begin_gather()?),
            None => Ok(()),
        }
    }

    /// Makes a unit's parameters whole, with the one that it uses of another unit.
    fn gather(&mut self, index: usize) -> Result<()> {
        if let Some(tied) = self.model.units()[index].tied() {
            self.shards[tied.unit].gather()?;
        }
        Ok(self.shards[index].gather()?)
    }

    fn release(&mut self, index: usize) -> Result<()> {
        if let Some(tied) = self.model.units()[index].tied() {
            self.shards[tied.unit].release()?;
        }
        Ok(self.shards[index].release()?)
    }

    /// The number of tokens that count on all ranks. All ranks must have as many micro-batches: they gather together.
    fn agree_on_batches(&self, counted: i64, micro_batches: usize) -> Result<i64> {
        let step = self.steps;
        let own = vec![counted, micro_batches as i64];
        let (own, all) = self.group.all_gather("tokens", own, vec![0i64; 2 * self.group.size()]).wait()?;
        if let Some(rank) = all.chunks_exact(2).position(|other| other[1] != own[1] || other[1] == 0) {
            return Err(Error::MicroBatches { step, rank, theirs: all[2 * rank + 1], ours: own[1] });
        }
        match all.chunks_exact(2).map(|rank| rank[0]).sum() {
            0 => Err(Error::NothingToLearn { step }),
            tokens => Ok(tokens),
        }
    }

    /// The sum of all ranks' losses, and the norm of all gradients, from every rank's sums of squares per unit. Both are added
    /// in f64, in rank order.
    fn agree(&self, loss: f64, squares: &[f64]) -> Result<(f64, f64)> {
        let own: Vec<u8> = std::iter::once(&loss).chain(squares).flat_map(|number| number.to_le_bytes()).collect();
        let len = own.len();
        let all = vec![0u8; len * self.group.size()];
        let (_, all) = self.group.all_gather("loss and norm", own, all).wait()?;
        let numbers: Vec<f64> =
            all.chunks_exact(8).map(|bytes| f64::from_le_bytes(bytes.try_into().expect("eight bytes"))).collect();
        let rank_of = |rank: usize| &numbers[rank * (1 + squares.len())..(rank + 1) * (1 + squares.len())];
        let total = |place: usize| (0..self.group.size()).map(|rank| rank_of(rank)[place]).sum::<f64>();
        for (unit, place) in self.model.units().iter().zip(1..) {
            if !total(place).is_finite() {
                return Err(Error::NotFinite { step: self.steps, unit: unit.name().to_string() });
            }
        }
        let all_squares: f64 = (1..=squares.len()).map(total).sum();
        Ok((total(0), all_squares.sqrt()))
    }
}
