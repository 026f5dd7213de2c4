//! One step of training.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use shardwise_comm::Reduce;
use shardwise_model::{Activations, Batch, IGNORED, Model, Parameter, Unit};
use shardwise_torch::autograd::{self, Graph};
use shardwise_torch::tch::{Kind, Tensor, no_grad};
use shardwise_zero::{Bytes, Layout, Optimizer, Pool, Shape, ShardedUnit};

use crate::fault::{Fault, OnNotFinite};
use crate::guard::{Guard, Outlier};
use crate::outliers::PassedOver;
use crate::position::{Phase, Position};
use crate::scale::Scale;
use crate::snapshot::{Released, Snapshot};
use crate::spot_check::{MicroBatchesOf, Spot};
use crate::start::Start;
use crate::{Accumulation, Error, Options, Ranks, Recomputation, Result};

/// What a step did.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// Which step it was, from one.
    pub step: u64,
    /// The mean loss of all tokens that count, of all ranks and micro-batches.
    pub loss: f64,
    /// The norm of all gradients together, before clipping.
    pub gradient_norm: f64,
    /// The same for each unit's.
    pub unit_norms: Vec<f64>,
    /// The learning rate.
    pub rate: f64,
    /// How many targets counted: of a language model, tokens.
    pub tokens: u64,
    /// What the loss was multiplied by for the backward pass.
    pub loss_scale: f64,
    /// Why nothing was updated in this step, if nothing was.
    pub skipped: Option<Fault>,
    /// How many steps were skipped so far, this one included.
    pub skipped_so_far: u64,
    /// What is far outside what it usually is, if something is.
    pub outlier: Option<Outlier>,
    /// Trainable parameters whose gradient was zero because no rank's backward pass reached them. Looked for in a trainer's
    /// first step only.
    pub without_gradient: Vec<String>,
}

/// What an evaluation found, of all ranks and micro-batches together.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Evaluation {
    /// The sum of the losses of all tokens that count.
    pub loss_sum: f64,
    /// How many tokens counted.
    pub tokens: u64,
}

/// A model in training, as one rank holds it.
pub struct Trainer {
    pub(crate) model: Model,
    pub(crate) shards: Vec<ShardedUnit>,
    pool: Arc<Pool>,
    pub(crate) ranks: Ranks,
    pub(crate) options: Options,
    /// The first unit that learns anything; the backward pass ends there.
    pub(crate) first_trained: usize,
    pub(crate) scale: Scale,
    pub(crate) steps: u64,
    pub(crate) skipped: u64,
    /// Where this rank is, for who watches it.
    pub(crate) position: Arc<Position>,
    /// How many steps this rank is asked to trace, and how many any rank was at the beginning of the last step.
    pub(crate) trace_asked: Arc<AtomicU64>,
    pub(crate) trace_agreed: u64,
    /// Steps that are not taken again.
    pub(crate) passed_over: Vec<PassedOver>,
    pub(crate) guard: Guard,
    pub(crate) spot: Spot,
    /// What a save may still read, since the last update.
    pub(crate) snapshot: Option<Weak<Snapshot>>,
    /// Whether a step has been completed, so that the report on missing gradients has been made.
    has_stepped: bool,
    /// The error that interrupted a call halfway. From then on every call is refused.
    broken_by: Option<String>,
}

/// What a unit's forward pass leaves for its backward pass. Each unit has a graph of its own: its input is a leaf.
pub(crate) struct Passed {
    pub(crate) input: Option<Tensor>,
    /// With its graph, unless that is made again in the backward pass.
    pub(crate) output: Tensor,
}

/// What becomes of the gradients of a backward pass.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// They are added to those of earlier micro-batches.
    Add,
    /// So they are, and then handed to the ranks that own them.
    Reduce,
    /// They were for looking at.
    Forget,
}

/// What all ranks know after the backward pass.
struct Agreed {
    /// The mean over all tokens that count.
    loss: f64,
    /// Of all gradients together, before clipping.
    gradient_norm: f64,
    /// Of each unit's.
    unit_norms: Vec<f64>,
    /// Trainable parameters that have not received a gradient on any rank. Looked for in the first step only.
    without_gradient: Vec<String>,
}

/// The unit, the place in it, and the gradient.
type ParameterGradient = (usize, usize, Tensor);

impl Trainer {
    /// Begins a model. `start` is asked for the elements of parameters that this rank keeps, and for no others.
    pub fn new(model: Model, ranks: Ranks, options: Options, start: &mut Start<'_>) -> Result<Self> {
        options.check()?;
        let pool = Arc::new(Pool::new(options.device));
        let layout = Layout {
            groups: ranks.groups.clone(),
            sharding: options.sharding,
            precision: options.precision,
            states: options.optimizer.states(),
            pool: pool.clone(),
        };
        let mut shard = |unit: &Unit| {
            let shape = |p: &Parameter| Shape { dimensions: p.shape.clone(), decays: p.decays, trainable: p.trainable };
            let shapes: Vec<Shape> = unit.parameters().iter().map(shape).collect();
            let mut begin =
                |index: usize, range, elements: &mut [f32]| start(&unit.parameters()[index], range, elements);
            ShardedUnit::new(unit.name(), &shapes, layout.clone(), &mut begin)
        };
        let shards: Vec<ShardedUnit> = model.units().iter().map(&mut shard).collect::<std::result::Result<_, _>>()?;
        let first_trained = shards.iter().position(ShardedUnit::is_trainable).ok_or(Error::AllFrozen)?;
        let scale = Scale::new(options.loss_scale);
        let position = Arc::new(Position::default());
        position.name_units(model.units().iter().map(Unit::name));
        Ok(Trainer {
            model,
            shards,
            pool,
            ranks,
            options,
            first_trained,
            scale,
            steps: 0,
            skipped: 0,
            position,
            trace_asked: Arc::default(),
            trace_agreed: 0,
            passed_over: Vec::new(),
            guard: Guard::default(),
            spot: Spot::default(),
            snapshot: None,
            has_stepped: false,
            broken_by: None,
        })
    }

    /// Says from now on there where this rank is.
    pub fn report_to(&mut self, position: Arc<Position>) {
        position.name_units(self.model.units().iter().map(Unit::name));
        self.position = position;
    }

    /// The shards, unit by unit.
    pub fn shards_mut(&mut self) -> &mut [ShardedUnit] {
        &mut self.shards
    }

    /// What this rank holds of parameters, gradients and optimizer state; and, besides, for use in passing.
    pub fn bytes(&self) -> (Bytes, usize) {
        let held = self.shards.iter().map(ShardedUnit::bytes).fold(Bytes::default(), |sum, unit| Bytes {
            parameters: sum.parameters + unit.parameters,
            gradients: sum.gradients + unit.gradients,
            optimizer: sum.optimizer + unit.optimizer,
        });
        (held, self.pool.bytes())
    }

    /// One step on this rank's micro-batches.
    ///
    /// Where it fails, the trainer is either as it was before the step, or refuses all further calls with
    /// [`Error::Broken`].
    pub fn step(&mut self, micro_batches: &[Batch]) -> Result<Report> {
        self.stepped(micro_batches, None)
    }

    /// One step, all of it or nothing. It is checked against other ranks' arithmetic where their micro-batches are given.
    pub(crate) fn stepped(&mut self, micro_batches: &[Batch], checked: Option<&MicroBatchesOf<'_>>) -> Result<Report> {
        let before = (self.steps, self.skipped, self.scale);
        let report = self.unbroken(|trainer| trainer.take_step(micro_batches, checked));
        match report {
            Ok(_) => {
                self.has_stepped = true;
                self.position.enter(Phase::Between);
            }
            Err(_) => (self.steps, self.skipped, self.scale) = before,
        }
        report
    }

    // ---- the step -----------------------------------------------------------------------------------------------------

    fn take_step(&mut self, micro_batches: &[Batch], checked: Option<&MicroBatchesOf<'_>>) -> Result<Report> {
        self.steps += 1;
        self.position.begin_step(self.steps);

        // A token weighs the same wherever it is: the loss is the mean over all ranks and micro-batches.
        let tokens = self.count_to_learn(micro_batches)?;
        let loss_scale = self.scale.value();
        let weight = Tensor::from((loss_scale / tokens as f64) as f32).to_device(self.options.device);

        let (mut loss, mut fault) = (0., None);
        for (index, batch) in micro_batches.iter().enumerate() {
            let batch = batch.to_device(self.options.device);
            let passed = self.forward(&batch)?;
            let own = passed.last().map_or(0., |head| head.output.double_value(&[]));
            fault = fault.or_else(|| self.fault_of_outputs(own, &passed));
            loss += own;
            // Gradients are added up here until the last micro-batch, or on the ranks that own them after each. Either way
            // the backward pass completes those of unit after unit, and starts to reduce each at once.
            let reduce = index + 1 == micro_batches.len() || self.options.accumulation == Accumulation::Sharded;
            self.backward(&batch, passed, &weight, if reduce { Then::Reduce } else { Then::Add })?;
        }
        let squares = self.finish_reduce()?;
        let Agreed { loss, gradient_norm, unit_norms, without_gradient } = self.agree(loss, &squares, tokens)?;
        if let Some(of_rank) = checked {
            self.spot_check(of_rank, &weight)?;
        }

        let pace = self.options.schedule.at(self.steps);
        let (mut skipped, mut outlier) = (None, None);
        if loss.is_finite() && gradient_norm.is_finite() {
            outlier = self.judged(loss, &unit_norms)?;
            let clip = self.options.clip_norm.map_or(1., |largest| (largest / gradient_norm).min(1.));
            let optimizer = self.options.optimizer.at(pace.rate, pace.momentum);
            let released = self.release_saved()?;
            self.update(&optimizer, clip / loss_scale, released)?;
            self.scale.went_well();
        } else {
            skipped = Some(self.skip(fault)?);
        }
        Ok(Report {
            step: self.steps,
            loss,
            gradient_norm,
            unit_norms,
            rate: pace.rate,
            tokens: tokens as u64,
            loss_scale,
            skipped,
            skipped_so_far: self.skipped,
            outlier,
            without_gradient,
        })
    }

    /// From the tokens to the loss, unit by unit. While one computes, the next ones' parameters are on their way.
    pub(crate) fn forward(&mut self, batch: &Batch) -> Result<Vec<Passed>> {
        let mut passed: Vec<Passed> = Vec::with_capacity(self.shards.len());
        for index in 0..self.shards.len() {
            self.gather(index)?;
            for next in index + 1..=index + self.options.units_in_flight {
                self.begin_gather(next)?;
            }
            let input =
                passed.last().map(|before| before.output.detach().set_requires_grad(index > self.first_trained));
            let output = match self.is_computed_again(index) || index < self.first_trained {
                true => no_grad(|| self.compute(index, input.as_ref(), batch, Activations::Kept))?,
                false => self.compute(index, input.as_ref(), batch, self.options.recomputation.activations())?,
            };
            // The last unit's backward pass is next. What that reads stays.
            if index + 1 < self.shards.len() || !self.model.units()[index].backward_reads_parameters() {
                self.release(index)?;
            }
            passed.push(Passed { input, output });
        }
        Ok(passed)
    }

    /// From the loss back to the first unit that learns. While one unit computes, those before it are gathered and those after
    /// it are reduced.
    pub(crate) fn backward(&mut self, batch: &Batch, passed: Vec<Passed>, weight: &Tensor, then: Then) -> Result<()> {
        let mut output_grad = weight.shallow_clone();
        for (index, Passed { input, output }) in passed.into_iter().enumerate().skip(self.first_trained).rev() {
            let reads = self.model.units()[index].backward_reads_parameters();
            if reads {
                self.gather(index)?;
            }
            for next in (self.first_trained..index).rev().take(self.options.units_in_flight) {
                if self.model.units()[next].backward_reads_parameters() {
                    self.begin_gather(next)?;
                }
            }
            let output = match self.is_computed_again(index) {
                true => self.compute_again(index, input.as_ref(), batch)?,
                false => output,
            };
            let (grads, input_grad) = self.gradients(index, &output, &output_grad, input.as_ref())?;
            drop(output);
            if reads {
                self.release(index)?;
            }
            for (unit, parameter, grad) in grads {
                self.see(index, &grad)?;
                if then != Then::Forget {
                    self.shards[unit].add_gradient(parameter, &grad)?;
                }
            }
            if let Some(input_grad) = input_grad {
                output_grad = input_grad;
            }
            if then == Then::Reduce {
                self.begin_reduce(index)?;
            }
        }
        if then == Then::Reduce && self.options.accumulation == Accumulation::Sharded {
            self.shards.iter_mut().try_for_each(ShardedUnit::finish_reduce)?;
        }
        Ok(())
    }

    // ---- its parts ----------------------------------------------------------------------------------------------------

    /// Does `work`, unless something was interrupted before: then units may be gathered, gradients half added up, or
    /// parameters half updated, and what is computed with them would be silently wrong.
    pub(crate) fn unbroken<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.check_unbroken()?;
        let done = work(self);
        if let Err(error) = &done
            && !error.leaves_trainer_as_it_was()
        {
            self.broken_by = Some(error.to_string());
        }
        done
    }

    /// Refuses a trainer that was interrupted halfway.
    pub(crate) fn check_unbroken(&self) -> Result<()> {
        match &self.broken_by {
            Some(error) => Err(Error::Broken { error: error.clone() }),
            None => Ok(()),
        }
    }

    /// A unit's output.
    pub(crate) fn compute(
        &self,
        index: usize,
        input: Option<&Tensor>,
        batch: &Batch,
        activations: Activations,
    ) -> Result<Tensor> {
        self.position.enter_unit(Phase::Forward, index);
        self.output(index, input, batch, activations)
    }

    /// The same in the backward pass, with the graph that the forward pass did not make.
    fn compute_again(&self, index: usize, input: Option<&Tensor>, batch: &Batch) -> Result<Tensor> {
        self.position.enter_unit(Phase::Recompute, index);
        self.output(index, input, batch, Activations::Kept)
    }

    fn output(&self, index: usize, input: Option<&Tensor>, batch: &Batch, activations: Activations) -> Result<Tensor> {
        let unit = &self.model.units()[index];
        let failed = |error| Error::Model { unit: unit.name().to_string(), error };
        let output = unit
            .forward(self.shards[index].parameters(), self.tied(index), input, batch, activations)
            .map_err(failed)?;
        if index + 1 == self.shards.len() && output.numel() != 1 {
            let problem = format!(
                "the last unit has put out {:?}; its output is one number, the sum of the losses of all targets",
                output.size(),
            );
            return Err(failed(shardwise_model::Error::Config { key: "loss", problem }));
        }
        Ok(output)
    }

    /// The parameter that a unit uses of another unit.
    pub(crate) fn tied(&self, index: usize) -> Option<&Tensor> {
        let tied = self.model.units()[index].tied()?;
        Some(&self.shards[tied.unit].parameters()[tied.parameter])
    }

    /// Whether a unit's graph is made in the backward pass. It is not where that would save nothing: in the last unit, whose
    /// backward pass follows at once, and where the graph holds next to nothing.
    pub(crate) fn is_computed_again(&self, index: usize) -> bool {
        self.options.recomputation == Recomputation::Full
            && index + 1 < self.shards.len()
            && self.model.units()[index].backward_reads_parameters()
    }

    /// A unit's backward pass: the gradients of parameters, with unit and place, and that of its input, if it has one to
    /// learn from. It is zero where the output does not depend on the input.
    pub(crate) fn gradients(
        &self,
        index: usize,
        output: &Tensor,
        output_grad: &Tensor,
        input: Option<&Tensor>,
    ) -> Result<(Vec<ParameterGradient>, Option<Tensor>)> {
        self.position.enter_unit(Phase::Backward, index);
        let trained = self.trained(index);
        let tensors = trained.iter().map(|&(unit, parameter)| &self.shards[unit].parameters()[parameter]);
        let input = input.filter(|input| input.requires_grad());
        let inputs: Vec<&Tensor> = tensors.chain(input).collect();
        let mut grads = match output.requires_grad() {
            true => autograd::grad(&[output], &[Some(output_grad)], &inputs, Graph::Free)
                .map_err(|error| Error::Backward { unit: self.shards[index].name().to_string(), error })?,
            false => inputs.iter().map(|_| None).collect(),
        }
        .into_iter();
        let named = trained.into_iter().zip(grads.by_ref());
        let named = named.filter_map(|((unit, parameter), grad)| Some((unit, parameter, grad?))).collect();
        let input_grad = input.map(|input| grads.next().flatten().unwrap_or_else(|| input.zeros_like()));
        Ok((named, input_grad))
    }

    /// The parameters that a unit's backward pass has gradients for: its own, and the one that it uses of another unit.
    fn trained(&self, index: usize) -> Vec<(usize, usize)> {
        let own = (0..self.shards[index].parameters().len()).map(|parameter| (index, parameter));
        let tied = self.model.units()[index].tied().map(|tied| (tied.unit, tied.parameter));
        own.chain(tied)
            .filter(|&(unit, parameter)| self.model.units()[unit].parameters()[parameter].trainable)
            .collect()
    }

    /// Starts to make a unit's parameters whole, with the one that it uses of another unit; if there is such a unit.
    fn begin_gather(&mut self, index: usize) -> Result<()> {
        let Some(unit) = self.model.units().get(index) else { return Ok(()) };
        if let Some(tied) = unit.tied() {
            self.shards[tied.unit].begin_gather()?;
        }
        Ok(self.shards[index].begin_gather()?)
    }

    /// Makes them whole.
    pub(crate) fn gather(&mut self, index: usize) -> Result<()> {
        self.position.enter_unit(Phase::Gather, index);
        self.begin_gather(index)?;
        if let Some(tied) = self.model.units()[index].tied() {
            self.shards[tied.unit].gather()?;
        }
        Ok(self.shards[index].gather()?)
    }

    /// Starts to hand a unit's gradients to the ranks that own them, and sees to it that not too many are on their way.
    fn begin_reduce(&mut self, index: usize) -> Result<()> {
        self.position.enter_unit(Phase::Reduce, index);
        self.shards[index].begin_reduce()?;
        match self.shards.get_mut(index + self.options.units_in_flight) {
            Some(earlier) => Ok(earlier.settle_reduce()?),
            None => Ok(()),
        }
    }

    /// Waits until all gradients are where they belong; the sum of this rank's squares, for each unit.
    fn finish_reduce(&mut self) -> Result<Vec<f64>> {
        let mut squares = Vec::with_capacity(self.shards.len());
        for (index, shard) in self.shards.iter_mut().enumerate() {
            self.position.enter_unit(Phase::Reduce, index);
            shard.finish_reduce()?;
            squares.push(shard.gradient_squares()?);
        }
        Ok(squares)
    }

    /// Updates what this rank owns, which no save reads any more, with gradients that are multiplied by `factor`.
    fn update(&mut self, optimizer: &Optimizer, factor: f64, _: Released) -> Result<()> {
        for (index, shard) in self.shards.iter_mut().enumerate() {
            self.position.enter_unit(Phase::Optimizer, index);
            shard.update(optimizer, factor)?;
        }
        Ok(())
    }

    /// Gives their memory back.
    pub(crate) fn release(&mut self, index: usize) -> Result<()> {
        if let Some(tied) = self.model.units()[index].tied() {
            self.shards[tied.unit].release()?;
        }
        Ok(self.shards[index].release()?)
    }

    /// The number of tokens that count on all ranks, of which there must be some.
    fn count_to_learn(&mut self, micro_batches: &[Batch]) -> Result<i64> {
        let asked = self.trace_asked.swap(0, Ordering::Relaxed);
        let (tokens, trace_agreed) = self.count(micro_batches, asked)?;
        self.trace_agreed = trace_agreed;
        match tokens {
            0 => Err(Error::NothingToLearn { step: self.steps }),
            tokens => Ok(tokens),
        }
    }

    /// The number of tokens that count on all ranks, and the most steps that any was asked to trace, which travels along. All
    /// ranks must have as many micro-batches: they gather together.
    fn count(&self, micro_batches: &[Batch], asked: u64) -> Result<(i64, u64)> {
        let (step, world) = (self.steps, &self.ranks.world);
        let counted =
            micro_batches.iter().map(|batch| batch.targets.ne(IGNORED).sum(Kind::Int64).int64_value(&[])).sum();
        let own = vec![counted, micro_batches.len() as i64, asked as i64];
        let (own, all) = world.all_gather("tokens", own, vec![0i64; 3 * world.size()]).wait()?;
        if let Some(rank) = all.chunks_exact(3).position(|other| other[1] != own[1] || other[1] == 0) {
            return Err(Error::MicroBatches { step, rank, theirs: all[3 * rank + 1], ours: own[1] });
        }
        let asked = all.chunks_exact(3).map(|rank| rank[2]).max().unwrap_or(0);
        Ok((all.chunks_exact(3).map(|rank| rank[0]).sum(), asked.max(0) as u64))
    }

    /// What ranks have to agree on before the update, from every rank's loss and its sums of squares per unit, of gradients
    /// that are as many times as large as they should be as the loss was scaled. All are added in f64, in rank order.
    fn agree(&self, loss: f64, squares: &[f64], tokens: i64) -> Result<Agreed> {
        let missing: usize = match self.has_stepped {
            true => 0,
            false => self.shards.iter().map(|shard| shard.without_gradient().count()).sum(),
        };
        let own: Vec<f64> = [loss, missing as f64].into_iter().chain(squares.iter().copied()).collect();
        let all = self.ranks.world.all_reduce("loss and norm", Reduce::Sum, own).wait()?;
        let (loss_sum, missing, squares) = (all[0], all[1], &all[2..]);
        // Every replica has counted the same gradients.
        let replicas = self.ranks.groups.replicate.size() as f64;
        let norm = |squares: f64| (squares / replicas).sqrt() / self.scale.value();
        Ok(Agreed {
            loss: loss_sum / tokens as f64,
            gradient_norm: norm(squares.iter().sum()),
            unit_norms: squares.iter().map(|&squares| norm(squares)).collect(),
            without_gradient: if missing > 0. { self.without_gradient()? } else { Vec::new() },
        })
    }

    /// The trainable parameters that have not received a gradient on any rank. All ranks call it together.
    fn without_gradient(&self) -> Result<Vec<String>> {
        let mut received: Vec<Vec<i64>> = self.shards.iter().map(|shard| vec![1; shard.parameters().len()]).collect();
        for (shard, received) in self.shards.iter().zip(&mut received) {
            shard.without_gradient().for_each(|parameter| received[parameter] = 0);
        }
        let anywhere = self.ranks.world.all_reduce("gradients received", Reduce::Max, received.concat()).wait()?;
        let parameters = self.model.units().iter().flat_map(Unit::parameters);
        let missing = parameters.zip(anywhere).filter(|(_, received)| *received == 0);
        Ok(missing.map(|(parameter, _)| parameter.name.clone()).collect())
    }

    // ---- without learning ---------------------------------------------------------------------------------------------

    /// What the model says of every token of the vocabulary, for every position of these inputs: sequences by positions by
    /// vocabulary; of a model of one's own, what its head's `logits` are. All ranks call it together, with inputs of their own.
    pub fn logits(&mut self, inputs: &Tensor) -> Result<Tensor> {
        let inputs = inputs.to_device(self.options.device);
        let targets = inputs.full_like(IGNORED);
        let batch = Batch::new(inputs, targets);
        let head = self.shards.len() - 1;
        self.pass(|trainer, index, input| match input {
            Some(input) if index == head => trainer.head_logits(input),
            _ => trainer.compute(index, input, &batch, Activations::Kept),
        })
    }

    /// The loss on micro-batches that nothing is learned from. All ranks call it together, with as many micro-batches of
    /// their own.
    pub fn evaluate(&mut self, micro_batches: &[Batch]) -> Result<Evaluation> {
        let (tokens, _) = self.count(micro_batches, 0)?;
        let mut loss_sum = 0.;
        for batch in micro_batches {
            let batch = batch.to_device(self.options.device);
            let loss = self.pass(|trainer, index, input| trainer.compute(index, input, &batch, Activations::Kept))?;
            loss_sum += loss.double_value(&[]);
        }
        let loss_sum = self.ranks.world.all_reduce("evaluation", Reduce::Sum, vec![loss_sum]).wait()?[0];
        Ok(Evaluation { loss_sum, tokens: tokens as u64 })
    }

    /// One unit after the other, each whole while it computes; the last one's output. There is no graph, so a unit leaves
    /// its output behind and nothing else. While one computes, the next ones' parameters are on their way.
    pub(crate) fn pass(
        &mut self,
        mut compute: impl FnMut(&Trainer, usize, Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.unbroken(|trainer| {
            let mut x: Option<Tensor> = None;
            for index in 0..trainer.shards.len() {
                trainer.gather(index)?;
                for next in index + 1..=index + trainer.options.units_in_flight {
                    trainer.begin_gather(next)?;
                }
                x = Some(no_grad(|| compute(trainer, index, x.as_ref()))?);
                trainer.release(index)?;
            }
            Ok(x.expect("a model has units"))
        })
    }

    fn head_logits(&self, input: &Tensor) -> Result<Tensor> {
        let index = self.shards.len() - 1;
        let (unit, tied) = (&self.model.units()[index], self.tied(index));
        let failed = |error| Error::Model { unit: unit.name().to_string(), error };
        unit.logits(self.shards[index].parameters(), tied, input).map_err(failed)?.ok_or_else(|| {
            let problem = "the last unit has none; give its layer a `logits`".to_string();
            failed(shardwise_model::Error::Config { key: "logits", problem })
        })
    }

    // ---- numbers that are not finite ----------------------------------------------------------------------------------

    /// The first unit whose output is not finite on this rank, if the loss is not.
    fn fault_of_outputs(&self, loss: f64, passed: &[Passed]) -> Option<usize> {
        let is_finite = |passed: &Passed| passed.output.isfinite().all().int64_value(&[]) != 0;
        if loss.is_finite() { None } else { passed.iter().position(|passed| !is_finite(passed)) }
    }

    /// Leaves the gradients unused: an error, or the reason to go on without this step.
    fn skip(&mut self, own_output: Option<usize>) -> Result<Fault> {
        let fault = self.first_fault(own_output)?;
        self.shards.iter_mut().for_each(ShardedUnit::discard_gradients);
        let step = self.steps;
        if self.options.on_not_finite == OnNotFinite::Stop {
            return Err(Error::NotFinite { step, fault });
        }
        self.skipped += 1;
        match self.scale.went_wrong() {
            true => Ok(fault),
            false => Err(Error::ScaleTooSmall { step, scale: self.scale.value(), fault }),
        }
    }

    /// What was first not to be finite on any rank, in the order of the computation: outputs forward, gradients backward.
    fn first_fault(&self, own_output: Option<usize>) -> Result<Fault> {
        if let Some((unit, rank)) = self.first_of_all(own_output)? {
            let parameter = self.first_of_all(self.shards[unit].first_parameter_not_finite()?)?;
            let parameter = match (parameter, self.model.units()[unit].tied()) {
                (Some((parameter, _)), _) => Some(self.named(unit, parameter)),
                // It also computes with another unit's.
                (None, Some(tied)) => {
                    let is_finite = self.shards[tied.unit].is_parameter_finite(tied.parameter)?;
                    let at_fault = self.first_of_all((!is_finite).then_some(tied.parameter))?;
                    at_fault.map(|(parameter, _)| self.named(tied.unit, parameter))
                }
                (None, None) => None,
            };
            return Ok(Fault::Output { unit: self.shards[unit].name().to_string(), rank, parameter });
        }
        let mut own = None;
        for (from_last, shard) in self.shards.iter().rev().enumerate() {
            if shard.first_not_finite()?.is_some() {
                own = Some(from_last);
                break;
            }
        }
        let (from_last, _) = self.first_of_all(own)?.expect("finite numbers have a finite norm, so one is not");
        let unit = self.shards.len() - 1 - from_last;
        let parameter = self.first_of_all(self.shards[unit].first_not_finite()?)?;
        let (parameter, _) = parameter.expect("a unit at fault has a parameter at fault");
        Ok(Fault::Gradient { unit: self.shards[unit].name().to_string(), parameter: self.named(unit, parameter) })
    }

    /// The least number that any rank has, and the first rank that has it.
    pub(crate) fn first_of_all(&self, own: Option<usize>) -> Result<Option<(usize, usize)>> {
        let world = &self.ranks.world;
        let key = own.map_or(i64::MIN, |own| -((own * world.size() + world.rank()) as i64));
        let first = world.all_reduce("fault", Reduce::Max, vec![key]).wait()?[0];
        Ok((first != i64::MIN).then(|| (-first as usize / world.size(), -first as usize % world.size())))
    }

    fn named(&self, unit: usize, parameter: usize) -> String {
        self.model.units()[unit].parameters()[parameter].name.clone()
    }
}
