//! One unit's parameters, gradients and optimizer state.

use std::ops::Range;
use std::sync::Arc;

use shardwise_comm::{Part, Pending, Reduce};
use shardwise_plan::{Dtype, Partition};
use shardwise_torch::tch::{Device, Kind, TchError, Tensor, no_grad};
use shardwise_torch::{Block, storage};

use crate::error::{Faults, StartError};
use crate::flat::Flat;
use crate::optimizer::{Run, Squares, sum_of_squares};
use crate::{Error, Groups, Lamb, Optimizer, Pool, Precision, Result, Sharding};

/// A parameter of a unit.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Its dimensions.
    pub dimensions: Vec<i64>,
    /// Whether weight decay applies to it.
    pub decays: bool,
    /// Whether it is trained. One that is not has no gradient, no master and no optimizer state.
    pub trainable: bool,
}

/// How a unit is held.
#[derive(Clone)]
pub struct Layout {
    /// Among whom.
    pub groups: Groups,
    /// What is sliced.
    pub sharding: Sharding,
    /// In which types.
    pub precision: Precision,
    /// How many numbers the optimizer keeps for each element: [`Optimizer::states`].
    pub states: usize,
    /// Where the memory for passing use comes from; its device is the unit's.
    pub pool: Arc<Pool>,
}

/// Writes the beginning of some elements of a parameter: which parameter, which of its elements, where to.
pub type Start<'a> = dyn FnMut(usize, Range<usize>, &mut [f32]) -> std::result::Result<(), StartError> + 'a;

/// The same of the optimizer's numbers: which parameter, which of its numbers, which elements, where to.
pub type StateStart<'a> = dyn FnMut(usize, usize, Range<usize>, &mut [f32]) -> std::result::Result<(), StartError> + 'a;

/// Bytes that a rank holds, by what for. The pool's are not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Parameters, in the type in which units compute.
    pub parameters: usize,
    /// Gradients, from the backward pass to the update. Whole ones that will be sliced are in the pool's memory.
    pub gradients: usize,
    /// f32 masters and the optimizer's state.
    pub optimizer: usize,
}

/// A tensor of [`ShardedUnit::saved`].
pub struct Saved {
    /// Its elements, which it shares with the unit.
    pub tensor: Tensor,
    /// Whether they stay as they are until the next update. Others are lent to the network when the unit is gathered.
    pub stays: bool,
}

/// A unit of a model, as one rank holds it.
pub struct ShardedUnit {
    faults: Faults,
    layout: Layout,
    trainable: Flat,
    frozen: Flat,
    /// All parameters in their order: leaves of autograd's where they are trainable, and views of one of the flat buffers.
    views: Vec<Tensor>,
    /// Where a parameter stands in the trainable buffer, if it does.
    places: Vec<Option<Range<usize>>>,
    /// The same of the frozen buffer.
    frozen_places: Vec<Option<Range<usize>>>,
    /// Which parameters have ever received a gradient on this rank.
    received: Vec<bool>,
    own: Own,
    sums: Sums,
    /// What this rank updates.
    slices: Vec<Slice>,
    steps: u32,
}

/// This rank's own gradients. `bytes` are those of their type.
enum Own {
    /// None.
    None,
    /// Of the whole unit, added up over micro-batches: `bytes` for each element.
    Adding {
        /// In memory of the pool's where gradients are sliced; otherwise in that of the sums.
        whole: Tensor,
        /// Which parameters have one yet.
        begun: Vec<bool>,
    },
    /// On their way to the ranks that own them: memory as before, and that of the sums.
    Scattering(Scattering),
    /// Summed inside the shard group, and on their way between replicas: memory of the sums.
    Replicating(Replicating),
}

enum Scattering {
    Whole(Pending<Block>),
    Sliced(Pending<(Block, Block)>),
}

enum Replicating {
    Whole(Pending<Part<Block>>),
    Sliced(Pending<Block>),
}

/// Gradients summed over all ranks: of this rank's slice, where gradients are sliced; otherwise of the whole, of which the
/// slices that this rank updates are the sums.
enum Sums {
    /// None. The next ones are given memory again: what the allocator keeps of the last ones is free for activations meanwhile,
    /// and the peak of a step, which is in the head's forward pass, is lower by all gradients.
    None,
    /// Over all micro-batches that were reduced since the last update.
    Summed(Tensor),
}

/// What of the unit this rank updates: its own slice or, where optimizer state is not sliced, everyone's.
struct Slice {
    owner: usize,
    /// f32 parameters, where the unit does not compute with f32.
    master: Option<Tensor>,
    state: Vec<Tensor>,
    runs: Vec<Place>,
}

/// The part of a parameter that is in a slice.
struct Place {
    parameter: usize,
    range: Range<usize>,
    decays: bool,
}

/// Elements of a parameter that are begun at once.
const START_CHUNK: usize = 1 << 20;

impl ShardedUnit {
    /// A unit with these parameters. `start` is asked for the elements that this rank keeps, and for no others.
    pub fn new(name: &str, shapes: &[Shape], layout: Layout, start: &mut Start<'_>) -> Result<Self> {
        let faults = Faults::of(name);
        let [mut trained, mut frozen_len] = [0, 0];
        let both: Vec<Range<usize>> = shapes
            .iter()
            .map(|shape| {
                let end = if shape.trainable { &mut trained } else { &mut frozen_len };
                let begin = *end;
                *end += shape.dimensions.iter().product::<i64>() as usize;
                begin..*end
            })
            .collect();
        let flat = |len| {
            let (group, pool) = (layout.groups.shard.clone(), layout.pool.clone());
            Flat::new(name, group, pool, layout.precision.parameters, len, layout.sharding.parameters)
        };
        let (trainable, frozen) = (flat(trained)?, flat(frozen_len)?);
        let views = both
            .iter()
            .zip(shapes)
            .map(|(place, shape)| {
                let flat = if shape.trainable { &trainable } else { &frozen };
                flat.view(place.clone(), &shape.dimensions).set_requires_grad(shape.trainable)
            })
            .collect();
        let places: Vec<Option<Range<usize>>> =
            both.iter().zip(shapes).map(|(place, shape)| shape.trainable.then(|| place.clone())).collect();
        let frozen_places =
            both.iter().zip(shapes).map(|(place, shape)| (!shape.trainable).then(|| place.clone())).collect();

        let group = &layout.groups.shard;
        let owners = if layout.sharding.optimizer { group.rank()..group.rank() + 1 } else { 0..group.size() };
        let slices = owners
            .map(|owner| {
                let range = trainable.partition().range(owner);
                let zeros = || zeros(&faults, range.len(), layout.pool.device());
                let master = (layout.precision.parameters != Dtype::F32).then(zeros).transpose()?;
                let state = (0..layout.states).map(|_| zeros()).collect::<Result<_>>()?;
                let runs = places.iter().zip(shapes).enumerate().filter_map(|(parameter, (place, shape))| {
                    let inside = intersection(place.as_ref()?, &range)?;
                    let range = inside.start - range.start..inside.end - range.start;
                    Some(Place { parameter, range, decays: shape.decays })
                });
                Ok(Slice { owner, master, state, runs: runs.collect() })
            })
            .collect::<Result<_>>()?;
        let mut unit = ShardedUnit {
            faults,
            layout,
            trainable,
            frozen,
            views,
            received: vec![false; places.len()],
            places,
            frozen_places,
            own: Own::None,
            sums: Sums::None,
            slices,
            steps: 0,
        };
        for (parameter, place) in both.into_iter().enumerate() {
            unit.begin(parameter, place, shapes[parameter].trainable, start)?;
        }
        Ok(unit)
    }

    /// Asks `start` for what this rank keeps of a parameter, a piece at a time.
    fn begin(&mut self, parameter: usize, place: Range<usize>, trainable: bool, start: &mut Start<'_>) -> Result<()> {
        let flat = if trainable { &self.trainable } else { &self.frozen };
        let kept = flat.kept();
        let Some(wanted) = intersection(&place, &kept) else { return Ok(()) };
        let mut places = vec![(flat.kept_elements(), kept)];
        if trainable {
            let masters = self.slices.iter().filter_map(|slice| Some((slice.master.as_ref()?, slice.owner)));
            places.extend(masters.map(|(master, owner)| (master.shallow_clone(), flat.partition().range(owner))));
        }
        let mut elements = Vec::new();
        for from in wanted.clone().step_by(START_CHUNK) {
            let range = from..wanted.end.min(from + START_CHUNK);
            elements.resize(range.len(), 0f32);
            start(parameter, range.start - place.start..range.end - place.start, &mut elements)
                .map_err(|error| Error::Start { unit: self.name().to_string(), error })?;
            let chunk = self.faults.tch(Tensor::f_from_slice(&elements))?;
            for (tensor, standing) in &places {
                self.faults.tch(copy(&chunk, &range, tensor, standing))?;
            }
        }
        Ok(())
    }

    /// The unit's name.
    pub fn name(&self) -> &str {
        self.faults.unit()
    }

    /// The parameters, as leaves of autograd's. They can be read while they are whole, and fail with the unit's name
    /// otherwise.
    pub fn parameters(&self) -> &[Tensor] {
        &self.views
    }

    /// Whether any of them is trained.
    pub fn is_trainable(&self) -> bool {
        !self.trainable.partition().is_empty()
    }

    /// What this rank holds of the unit.
    pub fn bytes(&self) -> Bytes {
        let floats = |tensor: &Tensor| tensor.numel() * Dtype::F32.bytes();
        let gradient_bytes = self.layout.precision.gradients.bytes();
        Bytes {
            parameters: self.trainable.bytes() + self.frozen.bytes(),
            gradients: match (&self.sums, &self.own) {
                (Sums::Summed(sums), _) => sums.numel() * gradient_bytes,
                (Sums::None, Own::None) => 0,
                // Whole, in the pool's.
                (Sums::None, Own::Adding { .. }) if self.layout.sharding.gradients => 0,
                // With this rank's own gradients, or under way.
                (Sums::None, _) => self.sums_len() * gradient_bytes,
            },
            optimizer: self.slices.iter().flat_map(|slice| slice.master.iter().chain(&slice.state)).map(floats).sum(),
        }
    }

    // ---- parameters ---------------------------------------------------------------------------------------------------

    /// Starts to make the parameters whole, if they are not.
    pub fn begin_gather(&mut self) -> Result<()> {
        self.trainable.begin_gather()?;
        self.frozen.begin_gather()
    }

    /// Makes the parameters whole.
    pub fn gather(&mut self) -> Result<()> {
        self.begin_gather()?;
        self.trainable.gather()?;
        self.frozen.gather()
    }

    /// Gives the memory of the whole back, where parameters are sliced.
    pub fn release(&mut self) -> Result<()> {
        self.trainable.release()?;
        self.frozen.release()
    }

    // ---- gradients ----------------------------------------------------------------------------------------------------

    /// Adds to the gradient of one parameter.
    pub fn add_gradient(&mut self, parameter: usize, grad: &Tensor) -> Result<()> {
        let place = self.places[parameter].clone().expect("a gradient is of a parameter that is trained");
        if let Own::None = self.own {
            self.begin_adding()?;
        }
        let Own::Adding { whole, begun } = &mut self.own else {
            panic!("{}: gradients are added before they are reduced, and after they were used", self.faults.unit());
        };
        let first = !std::mem::replace(&mut begun[parameter], true);
        let added = no_grad(|| {
            let mut sum = whole.f_narrow(0, place.start as i64, place.len() as i64)?;
            let grad = grad.f_reshape(-1)?;
            match first {
                true => sum.f_copy_(&grad),
                false => sum.f_add_(&grad).map(drop),
            }
        });
        self.faults.tch(added)
    }

    fn begin_adding(&mut self) -> Result<()> {
        let memory = self.memory_for_own()?;
        let whole = self.faults.torch(memory.into_tensor())?;
        self.own = Own::Adding { whole, begun: vec![false; self.places.len()] };
        Ok(())
    }

    /// The trainable parameters that have never received a gradient on this rank.
    pub fn without_gradient(&self) -> impl Iterator<Item = usize> + '_ {
        let missing = |(place, received): (&Option<Range<usize>>, &bool)| place.is_some() && !received;
        self.places
            .iter()
            .zip(&self.received)
            .enumerate()
            .filter(move |(_, pair)| missing(*pair))
            .map(|(index, _)| index)
    }

    /// Where the whole's gradients are added up: in the pool's memory until they are sliced, otherwise in that of the sums.
    fn memory_for_own(&self) -> Result<Block> {
        let (dtype, len) = (self.layout.precision.gradients, self.partition().len());
        match (&self.sums, self.layout.sharding.gradients) {
            (_, true) => self.faults.torch(self.layout.pool.lend(dtype, len)),
            (Sums::None, false) => self.new_sums(),
            (Sums::Summed(_), false) => {
                panic!("{}: gradients that are kept whole are reduced once a step", self.name())
            }
        }
    }

    /// How many gradients this rank keeps once they are summed.
    fn sums_len(&self) -> usize {
        match self.layout.sharding.gradients {
            true => self.partition().part_len(self.layout.groups.shard.rank()),
            false => self.partition().len(),
        }
    }

    /// Memory for sums.
    fn new_sums(&self) -> Result<Block> {
        self.faults.torch(Block::new(self.layout.precision.gradients, self.sums_len(), self.layout.pool.device()))
    }

    /// Starts to sum the gradients over all ranks, and adds the result to what was reduced since the last update. A
    /// parameter without a gradient on this rank counts as zero: on other ranks it may have one.
    pub fn begin_reduce(&mut self) -> Result<()> {
        if !self.is_trainable() {
            return Ok(());
        }
        if let Own::None = self.own {
            self.begin_adding()?;
        }
        let Own::Adding { whole, begun } = std::mem::replace(&mut self.own, Own::None) else {
            panic!("{}: its gradients are being reduced already", self.name());
        };
        for ((place, received), begun) in self.places.iter().zip(&mut self.received).zip(begun) {
            *received |= begun;
            if let (Some(place), false) = (place, begun) {
                let mut unused = whole.narrow(0, place.start as i64, place.len() as i64);
                self.faults.tch(unused.f_zero_().map(drop))?;
            }
        }
        let whole = self.faults.torch(storage::take(&whole, "the gradients are being reduced"))?;
        let part = match (&self.sums, self.layout.sharding.gradients) {
            (_, false) => None,
            (Sums::None, true) => Some(self.new_sums()?),
            // They are added to the sums that there are, and not needed any more then.
            (Sums::Summed(_), true) => {
                Some(self.faults.torch(self.layout.pool.lend(self.layout.precision.gradients, self.sums_len()))?)
            }
        };
        let (group, label) = (&self.layout.groups.shard, self.faults.unit());
        self.own = Own::Scattering(if let Some(part) = part {
            Scattering::Sliced(group.reduce_scatter(label, Reduce::Sum, whole, part))
        } else if self.layout.sharding.optimizer {
            Scattering::Whole(group.reduce_scatter_in_place(label, Reduce::Sum, whole))
        } else {
            Scattering::Whole(group.all_reduce(label, Reduce::Sum, whole))
        });
        Ok(())
    }

    /// Waits until this rank's own gradients are sent, and starts to sum between replicas.
    pub fn settle_reduce(&mut self) -> Result<()> {
        let (group, label) = (&self.layout.groups.replicate, self.faults.unit());
        self.own = match std::mem::replace(&mut self.own, Own::None) {
            Own::Scattering(Scattering::Sliced(pending)) => {
                let (whole, part) = self.faults.comm(pending.wait())?;
                self.layout.pool.give_back(whole);
                Own::Replicating(Replicating::Sliced(group.all_reduce(label, Reduce::Sum, part)))
            }
            Own::Scattering(Scattering::Whole(pending)) => {
                let whole = self.faults.comm(pending.wait())?;
                let summed = match self.layout.sharding.optimizer {
                    true => self.partition().range(self.layout.groups.shard.rank()),
                    false => 0..self.partition().len(),
                };
                let part = Part::new(whole, summed);
                Own::Replicating(Replicating::Whole(group.all_reduce(label, Reduce::Sum, part)))
            }
            settled => settled,
        };
        Ok(())
    }

    /// Finishes what `begin_reduce` started.
    pub fn finish_reduce(&mut self) -> Result<()> {
        self.settle_reduce()?;
        let summed = match std::mem::replace(&mut self.own, Own::None) {
            Own::Replicating(Replicating::Sliced(pending)) => self.faults.comm(pending.wait())?,
            Own::Replicating(Replicating::Whole(pending)) => self.faults.comm(pending.wait())?.into_whole(),
            Own::None => return Ok(()),
            _ => panic!("{}: no reduction is under way", self.name()),
        };
        let summed = self.faults.torch(summed.into_tensor())?;
        self.sums = match std::mem::replace(&mut self.sums, Sums::None) {
            Sums::None => Sums::Summed(summed),
            Sums::Summed(mut sums) => {
                self.faults.tch(sums.f_add_(&summed).map(drop))?;
                let memory = self.faults.torch(storage::take(&summed, "the sums have been added"))?;
                self.layout.pool.give_back(memory);
                Sums::Summed(sums)
            }
        };
        Ok(())
    }

    /// The sum of the squares of this rank's slice of the reduced gradients.
    pub fn gradient_squares(&self) -> Result<f64> {
        if !self.is_trainable() {
            return Ok(0.);
        }
        self.faults.tch(sum_of_squares(&self.summed_slice(self.layout.groups.shard.rank())))
    }

    /// The first parameter of which this rank's slice of the reduced gradients has an element that is not finite.
    pub fn first_not_finite(&self) -> Result<Option<usize>> {
        if !self.is_trainable() {
            return Ok(None);
        }
        self.first_run_not_finite(|slice| self.summed_slice(slice.owner))
    }

    /// The first parameter, trained or frozen, of which this rank's slice has an element that is not finite.
    pub fn first_parameter_not_finite(&self) -> Result<Option<usize>> {
        for parameter in 0..self.places.len() {
            if !self.is_parameter_finite(parameter)? {
                return Ok(Some(parameter));
            }
        }
        Ok(None)
    }

    /// Whether all elements of a parameter are finite that are in this rank's slice: as they are updated, where they are trained.
    pub fn is_parameter_finite(&self, parameter: usize) -> Result<bool> {
        let part = match &self.frozen_places[parameter] {
            Some(place) => {
                let kept = self.frozen.kept();
                let inside = intersection(place, &kept);
                inside.map(|inside| (self.frozen.kept_elements(), inside.start - kept.start..inside.end - kept.start))
            }
            None => {
                let own = self.own_slice();
                let run = own.runs.iter().find(|run| run.parameter == parameter);
                run.map(|run| (self.updated(own), run.range.clone()))
            }
        };
        let Some((elements, range)) = part else { return Ok(true) };
        self.faults.tch(is_finite(&elements.narrow(0, range.start as i64, range.len() as i64)))
    }

    /// The first parameter that is not finite in `elements`, looked for in this rank's own slice.
    fn first_run_not_finite(&self, elements: impl Fn(&Slice) -> Tensor) -> Result<Option<usize>> {
        let own = self.own_slice();
        let elements = elements(own);
        for run in &own.runs {
            let part = elements.narrow(0, run.range.start as i64, run.range.len() as i64);
            if !self.faults.tch(is_finite(&part))? {
                return Ok(Some(run.parameter));
            }
        }
        Ok(None)
    }

    // ---- the update ---------------------------------------------------------------------------------------------------

    /// One step of the optimizer on what this rank updates, with the gradients multiplied by `factor`. They are used up, and
    /// where every rank keeps the whole, it starts to gather the others' updates.
    pub fn update(&mut self, optimizer: &Optimizer, factor: f64) -> Result<()> {
        if !self.is_trainable() {
            return Ok(());
        }
        self.steps += 1;
        let step = Tensor::from(self.steps as f32).to_device(self.layout.pool.device());
        let runs: Vec<Vec<Run<'_>>> = self.slices.iter().map(|slice| self.runs_of(slice, &step, factor)).collect();
        let mut every = runs.iter().flatten();
        match optimizer {
            Optimizer::AdamW(adamw) => self.faults.torch(every.try_for_each(|run| run.adamw(*adamw)))?,
            Optimizer::Sgd(sgd) => self.faults.torch(every.try_for_each(|run| run.sgd(*sgd)))?,
            Optimizer::Lamb(lamb) => self.update_by_lamb(*lamb, &runs)?,
            Optimizer::Own(own) => self.faults.torch(every.try_for_each(|run| run.own(own)))?,
        }
        drop(runs);
        for slice in &self.slices {
            if let Some(master) = &slice.master {
                self.faults.tch(self.trainable.slice(slice.owner).f_copy_(master))?;
            }
        }
        self.discard_gradients();
        if self.layout.sharding.optimizer { self.trainable.begin_update() } else { Ok(()) }
    }

    /// Moments first, then the norms of whole parameters, which all owners add up, then the step.
    fn update_by_lamb(&self, lamb: Lamb, runs: &[Vec<Run<'_>>]) -> Result<()> {
        let moments = |run: &Run<'_>| self.faults.torch(run.lamb_moments(lamb));
        let squares: Vec<Vec<Squares>> =
            runs.iter().map(|slice| slice.iter().map(moments).collect()).collect::<Result<_>>()?;
        let total = self.squares_of_all(&squares)?;
        for (slice, runs) in self.slices.iter().zip(runs) {
            for (place, run) in slice.runs.iter().zip(runs) {
                self.faults.torch(run.lamb_step(lamb, total[place.parameter]))?;
            }
        }
        Ok(())
    }

    /// Gives the memory of the reduced gradients up: they have been used, or the step is not taken.
    pub fn discard_gradients(&mut self) {
        self.sums = Sums::None;
    }

    fn runs_of<'a>(&self, slice: &Slice, step: &'a Tensor, factor: f64) -> Vec<Run<'a>> {
        let parameters = self.updated(slice);
        let grads = self.summed_slice(slice.owner);
        let run = |place: &Place| {
            let part = |whole: &Tensor| whole.narrow(0, place.range.start as i64, place.range.len() as i64);
            Run {
                parameters: part(&parameters),
                grads: part(&grads),
                state: slice.state.iter().map(part).collect(),
                step,
                step_number: self.steps,
                decays: place.decays,
                factor,
            }
        };
        slice.runs.iter().map(run).collect()
    }

    /// The f32 parameters of a slice.
    fn updated(&self, slice: &Slice) -> Tensor {
        match &slice.master {
            Some(master) => master.shallow_clone(),
            None => self.trainable.slice(slice.owner),
        }
    }

    /// Each parameter's squares, added up over all slices in the order of their owners.
    fn squares_of_all(&self, squares: &[Vec<Squares>]) -> Result<Vec<Squares>> {
        let mut totals = vec![0f64; 2 * self.places.len()];
        for (slice, squares) in self.slices.iter().zip(squares) {
            for (place, squares) in slice.runs.iter().zip(squares) {
                totals[2 * place.parameter] += squares.parameter;
                totals[2 * place.parameter + 1] += squares.direction;
            }
        }
        if self.layout.sharding.optimizer {
            let shard = &self.layout.groups.shard;
            let own = Tensor::from_slice(&totals).to_device(self.layout.pool.device());
            let own = self.faults.torch(storage::take(&own, "LAMB's norms are being summed"))?;
            let all = self.faults.comm(shard.all_reduce("LAMB's norms", Reduce::Sum, own).wait())?;
            totals = self.faults.tch(Vec::try_from(self.faults.torch(all.into_tensor())?))?;
        }
        Ok(totals.chunks_exact(2).map(|pair| Squares { parameter: pair[0], direction: pair[1] }).collect())
    }

    // ---- checkpoints --------------------------------------------------------------------------------------------------

    /// Waits until updated parameters have come to where they are kept.
    pub fn settle(&mut self) -> Result<()> {
        self.trainable.settle()
    }

    /// What a checkpoint keeps of this rank's slice, once it is settled: f32 parameters and the optimizer's numbers for each of
    /// them; then the slice of what is not trained, in the type in which the unit computes.
    pub fn saved(&self) -> Vec<Saved> {
        let own = self.own_slice();
        let gathered = self.layout.sharding.parameters;
        let master = Saved { tensor: self.updated(own), stays: own.master.is_some() || !gathered };
        let state = own.state.iter().map(|state| Saved { tensor: state.shallow_clone(), stays: true });
        let frozen = Saved { tensor: self.frozen.slice(self.layout.groups.shard.rank()), stays: !gathered };
        std::iter::once(master).chain(state).chain([frozen]).collect()
    }

    /// How many updates there have been.
    pub fn updates(&self) -> u32 {
        self.steps
    }

    /// Goes on after so many updates: `start` is asked for the optimizer's numbers, of which it is told the first, second and so
    /// on, of what this rank updates.
    pub fn resume(&mut self, updates: u32, start: &mut StateStart<'_>) -> Result<()> {
        self.steps = updates;
        let mut elements = Vec::new();
        for slice in &self.slices {
            let first = self.partition().range(slice.owner).start;
            for run in &slice.runs {
                let parameter = self.places[run.parameter].as_ref().expect("a run is of a parameter that is trained");
                for (index, state) in slice.state.iter().enumerate() {
                    for from in run.range.clone().step_by(START_CHUNK) {
                        let range = from..run.range.end.min(from + START_CHUNK);
                        elements.resize(range.len(), 0f32);
                        // From places in the slice to places in the parameter.
                        let within = first + range.start - parameter.start..first + range.end - parameter.start;
                        start(run.parameter, index, within, &mut elements)
                            .map_err(|error| Error::Start { unit: self.name().to_string(), error })?;
                        let chunk = self.faults.tch(Tensor::f_from_slice(&elements))?;
                        self.faults.tch(copy(&chunk, &range, state, &(0..state.numel())))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn own_slice(&self) -> &Slice {
        let own = self.slices.iter().find(|slice| slice.owner == self.layout.groups.shard.rank());
        own.expect("a rank updates its own slice, whatever else")
    }

    fn partition(&self) -> Partition {
        self.trainable.partition()
    }

    fn summed_slice(&self, owner: usize) -> Tensor {
        match &self.sums {
            Sums::Summed(slice) if self.layout.sharding.gradients => slice.shallow_clone(),
            Sums::Summed(whole) => {
                let range = self.partition().range(owner);
                whole.narrow(0, range.start as i64, range.len() as i64)
            }
            Sums::None => panic!("{}: the gradients are not reduced", self.name()),
        }
    }
}

/// f32 zeros. On the CPU no page is touched for them: moments become resident in the first update, not at the start.
fn zeros(faults: &Faults, len: usize, device: Device) -> Result<Tensor> {
    match device {
        Device::Cpu => faults.torch(Block::zeros(Dtype::F32, len).and_then(Block::into_tensor)),
        device => faults.tch(Tensor::f_zeros([len as i64], (Kind::Float, device))),
    }
}

fn is_finite(elements: &Tensor) -> std::result::Result<bool, TchError> {
    Ok(elements.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0)
}

fn intersection(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (both.start < both.end).then_some(both)
}

/// Copies what `from`, which stands at `from_place`, and `to`, which stands at `to_place`, have in common.
fn copy(
    from: &Tensor,
    from_place: &Range<usize>,
    to: &Tensor,
    to_place: &Range<usize>,
) -> std::result::Result<(), TchError> {
    let Some(both) = intersection(from_place, to_place) else { return Ok(()) };
    let part = |tensor: &Tensor, place: &Range<usize>| {
        tensor.f_narrow(0, (both.start - place.start) as i64, both.len() as i64)
    };
    part(to, to_place)?.f_copy_(&part(from, from_place)?)
}
