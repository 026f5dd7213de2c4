//! One unit's parameters, gradients and optimizer state.

use std::ops::Range;
use std::sync::Arc;

use shardwise_comm::{Group, Pending, Reduce};
use shardwise_plan::{Dtype, Partition};
use shardwise_torch::optim::{AdamW, AdamWSlice, adamw_step};
use shardwise_torch::tch::{Device, Kind, Tensor, no_grad};
use shardwise_torch::{Block, exclusive, storage};

use crate::{Error, Result, Sharding};

/// A parameter of a unit.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Its dimensions.
    pub dimensions: Vec<i64>,
    /// Whether weight decay applies to it.
    pub decays: bool,
}

/// Writes the beginning of some elements of a parameter: which parameter, which of its elements, where to.
pub type Start<'a> = dyn FnMut(usize, Range<usize>, &mut [f32]) + 'a;

/// A unit of a model, as one rank of a group holds it.
pub struct ShardedUnit {
    name: String,
    group: Arc<Group>,
    sharding: Sharding,
    /// Where each parameter stands in the flat buffer.
    places: Vec<Range<usize>>,
    partition: Partition,
    /// All parameters one after the other. Its storage has memory only while they are whole.
    flat: Tensor,
    /// The parameters, as leaves of autograd's and views of `flat`.
    views: Vec<Tensor>,
    parameters: Parameters,
    gradients: Gradients,
    /// For each slice that this rank updates.
    moments: Vec<Moments>,
    steps: u32,
}

/// Where the parameters are.
enum Parameters {
    /// In the flat buffer, all of them: 4 bytes for each element of the unit.
    Whole {
        /// This rank's slice, kept beside them to be updated: 4 bytes for each element of the slice, where parameters are
        /// sliced; otherwise the slice is a part of the flat buffer.
        slice: Option<Tensor>,
    },
    /// Under way from all ranks; memory as when whole.
    Gathering(Gathering),
    /// This rank's slice alone: 4 bytes for each of its elements.
    Sliced { slice: Tensor },
    /// Being moved from one of the others to the next.
    Moving,
}

enum Gathering {
    /// From slices that stay.
    Beside(Pending<(Block, Block)>, Tensor),
    /// From the updated parts of the flat buffer.
    InPlace(Pending<Block>),
}

/// Where the gradients are.
enum Gradients {
    /// Nowhere.
    None,
    /// This rank's own, of the whole unit: 4 bytes for each element.
    Own(Tensor),
    /// On their way to the ranks that own them.
    Reducing(Reducing),
    /// Summed over all ranks. Where they are sliced: this rank's slice. Otherwise the whole, of which the slices that this
    /// rank updates are the sums.
    Reduced(Tensor),
}

enum Reducing {
    Whole(Pending<Block>),
    Sliced(Pending<(Block, Block)>),
}

struct Moments {
    owner: usize,
    first: Tensor,
    second: Tensor,
    /// The parts of the slice that are of one parameter, and whether they decay.
    runs: Vec<(Range<usize>, bool)>,
}

impl ShardedUnit {
    /// A unit with these parameters. `start` is asked for the elements that this rank keeps, and for no others.
    pub fn new(
        name: &str,
        shapes: &[Shape],
        group: Arc<Group>,
        sharding: Sharding,
        start: &mut Start<'_>,
    ) -> Result<Self> {
        let mut end = 0;
        let places: Vec<Range<usize>> = shapes
            .iter()
            .map(|shape| {
                let begin = end;
                end += shape.dimensions.iter().product::<i64>() as usize;
                begin..end
            })
            .collect();
        let partition = group.partition(end);
        let torch = |error| Error::Torch { unit: name.to_string(), error };

        let own = partition.range(group.rank());
        let kept = if sharding.parameters { own.clone() } else { 0..end };
        let mut elements = Tensor::zeros([kept.len() as i64], (Kind::Float, Device::Cpu));
        fill(exclusive::<f32>(&mut elements).map_err(torch)?, kept, &places, start);
        let (flat, parameters) = match sharding.parameters {
            false => (elements, Parameters::Whole { slice: None }),
            true => {
                let flat = emptied(name, end).map_err(torch)?;
                (flat, Parameters::Sliced { slice: elements })
            }
        };
        let views = places
            .iter()
            .zip(shapes)
            .map(|(place, shape)| {
                let view = flat.narrow(0, place.start as i64, place.len() as i64).view(&shape.dimensions[..]);
                view.detach().set_requires_grad(true)
            })
            .collect();
        let owners = if sharding.optimizer { group.rank()..group.rank() + 1 } else { 0..group.size() };
        let moments = owners
            .map(|owner| {
                let zeros = || Tensor::zeros([partition.part_len(owner) as i64], (Kind::Float, Device::Cpu));
                let slice = partition.range(owner);
                let runs = places
                    .iter()
                    .zip(shapes)
                    .map(|(place, shape)| (place.start.max(slice.start)..place.end.min(slice.end), shape.decays))
                    .filter(|(run, _)| run.start < run.end)
                    .map(|(run, decays)| (run.start - slice.start..run.end - slice.start, decays))
                    .collect();
                Moments { owner, first: zeros(), second: zeros(), runs }
            })
            .collect();
        Ok(ShardedUnit {
            name: name.to_string(),
            group,
            sharding,
            places,
            partition,
            flat,
            views,
            parameters,
            gradients: Gradients::None,
            moments,
            steps: 0,
        })
    }

    /// The unit's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The parameters, as leaves of autograd's. They can be read while they are whole, and fail with the unit's name
    /// otherwise.
    pub fn parameters(&self) -> &[Tensor] {
        &self.views
    }

    /// Starts to make the parameters whole, if they are not.
    pub fn begin_gather(&mut self) -> Result<()> {
        self.parameters = match self.take_parameters() {
            Parameters::Sliced { slice } => {
                let part = self.torch(storage::take(&slice, "the slice is being gathered"))?;
                let whole = self.torch(Block::new(Dtype::F32, self.partition.len(), Device::Cpu))?;
                Parameters::Gathering(Gathering::Beside(self.group.all_gather(&self.name, part, whole), slice))
            }
            already => already,
        };
        Ok(())
    }

    /// Makes the parameters whole.
    pub fn gather(&mut self) -> Result<()> {
        self.begin_gather()?;
        self.parameters = match self.take_parameters() {
            Parameters::Gathering(Gathering::Beside(pending, slice)) => {
                let (part, whole) = self.comm(pending.wait())?;
                self.put(&slice, part)?;
                self.put(&self.flat, whole)?;
                Parameters::Whole { slice: Some(slice) }
            }
            Parameters::Gathering(Gathering::InPlace(pending)) => {
                let whole = self.comm(pending.wait())?;
                self.put(&self.flat, whole)?;
                Parameters::Whole { slice: None }
            }
            whole => whole,
        };
        Ok(())
    }

    /// Gives the memory of the whole back, where parameters are sliced.
    pub fn release(&mut self) -> Result<()> {
        self.parameters = match self.take_parameters() {
            Parameters::Whole { slice: Some(slice) } => {
                drop(self.torch(storage::take(&self.flat, &released(&self.name)))?);
                Parameters::Sliced { slice }
            }
            whole @ Parameters::Whole { slice: None } => whole,
            _ => panic!("{}: parameters that are not whole cannot be released", self.name),
        };
        Ok(())
    }

    /// Adds to the gradients of parameter after parameter; `None` adds nothing.
    pub fn add_gradients(&mut self, grads: impl IntoIterator<Item = Option<Tensor>>) -> Result<()> {
        grads.into_iter().enumerate().try_for_each(|(parameter, grad)| match grad {
            Some(grad) => self.add_gradient(parameter, &grad),
            None => Ok(()),
        })
    }

    /// Adds to the gradient of one parameter.
    pub fn add_gradient(&mut self, parameter: usize, grad: &Tensor) -> Result<()> {
        if let Gradients::None = self.gradients {
            let zeros = Tensor::zeros([self.partition.len() as i64], (Kind::Float, Device::Cpu));
            self.gradients = Gradients::Own(zeros);
        }
        let Gradients::Own(own) = &self.gradients else {
            panic!("{}: gradients are added before they are reduced, and after they were used", self.name);
        };
        let place = &self.places[parameter];
        let added = no_grad(|| {
            let mut sum = own.f_narrow(0, place.start as i64, place.len() as i64)?;
            sum.f_add_(&grad.f_reshape(-1)?).map(drop)
        });
        self.tch(added)
    }

    /// Starts to sum the gradients over all ranks.
    pub fn begin_reduce(&mut self) -> Result<()> {
        let Gradients::Own(own) = std::mem::replace(&mut self.gradients, Gradients::None) else {
            panic!("{}: there are no gradients to reduce", self.name);
        };
        let whole = self.torch(storage::take(&own, "the gradients are being reduced"))?;
        let (label, sum) = (&self.name, Reduce::Sum);
        let reducing = if self.sharding.gradients {
            let part = self.torch(Block::new(Dtype::F32, self.partition.part_len(self.group.rank()), Device::Cpu))?;
            Reducing::Sliced(self.group.reduce_scatter(label, sum, whole, part))
        } else if self.sharding.optimizer {
            Reducing::Whole(self.group.reduce_scatter_in_place(label, sum, whole))
        } else {
            Reducing::Whole(self.group.all_reduce(label, sum, whole))
        };
        self.gradients = Gradients::Reducing(reducing);
        Ok(())
    }

    /// Finishes what `begin_reduce` started.
    pub fn finish_reduce(&mut self) -> Result<()> {
        let reduced = match std::mem::replace(&mut self.gradients, Gradients::None) {
            Gradients::Reducing(Reducing::Whole(pending)) => self.comm(pending.wait())?,
            Gradients::Reducing(Reducing::Sliced(pending)) => self.comm(pending.wait())?.1,
            _ => panic!("{}: no reduction is under way", self.name),
        };
        self.gradients = Gradients::Reduced(self.torch(reduced.into_tensor())?);
        Ok(())
    }

    /// The sum of the squares of this rank's slice of the reduced gradients.
    pub fn gradient_squares(&self) -> Result<f64> {
        let slice = self.reduced_slice(self.group.rank());
        let squares = slice.f_square().and_then(|squares| squares.f_sum(Kind::Double));
        self.tch(squares.and_then(|sum| sum.f_double_value(&[])))
    }

    /// Multiplies the reduced gradients by a number: clipping.
    pub fn scale_gradients(&mut self, factor: f64) -> Result<()> {
        let Gradients::Reduced(reduced) = &mut self.gradients else {
            panic!("{}: gradients are scaled when they are reduced", self.name);
        };
        let scaled = reduced.f_mul_scalar_(factor).map(drop);
        self.tch(scaled)
    }

    /// One step of the optimizer on the slices that this rank updates. The gradients are used up, and where every rank keeps
    /// the whole, it starts to gather the others' updates.
    pub fn update(&mut self, adamw: AdamW) -> Result<()> {
        self.steps += 1;
        let step = Tensor::from(self.steps as f32);
        let mut moments = std::mem::take(&mut self.moments);
        for Moments { owner, first, second, runs } in &mut moments {
            let (slice, grads) = (self.parameter_slice(*owner), self.reduced_slice(*owner));
            for (run, decays) in runs {
                let part = |whole: &Tensor| whole.narrow(0, run.start as i64, run.len() as i64);
                let slices = AdamWSlice {
                    parameters: &mut part(&slice),
                    grads: &part(&grads),
                    first_moments: &mut part(first),
                    second_moments: &mut part(second),
                    step: &step,
                };
                let weight_decay = if *decays { adamw.weight_decay } else { 0. };
                self.torch(adamw_step(AdamW { weight_decay, ..adamw }, &mut [slices]))?;
            }
        }
        self.moments = moments;
        self.gradients = Gradients::None;
        if self.sharding.optimizer && !self.sharding.parameters {
            let whole = self.torch(storage::take(&self.flat, "the updated parameters are being gathered"))?;
            let pending = self.group.all_gather_in_place(&self.name, whole);
            self.parameters = Parameters::Gathering(Gathering::InPlace(pending));
        }
        Ok(())
    }

    /// The parameters that `owner` updates.
    fn parameter_slice(&self, owner: usize) -> Tensor {
        match &self.parameters {
            Parameters::Sliced { slice } | Parameters::Whole { slice: Some(slice) } => slice.shallow_clone(),
            Parameters::Whole { slice: None } => self.slice_of(&self.flat, owner),
            Parameters::Gathering(_) | Parameters::Moving => {
                panic!("{}: parameters are updated while nobody moves them", self.name)
            }
        }
    }

    fn reduced_slice(&self, owner: usize) -> Tensor {
        match &self.gradients {
            Gradients::Reduced(slice) if self.sharding.gradients => slice.shallow_clone(),
            Gradients::Reduced(whole) => self.slice_of(whole, owner),
            _ => panic!("{}: the gradients are not reduced", self.name),
        }
    }

    fn slice_of(&self, whole: &Tensor, owner: usize) -> Tensor {
        let range = self.partition.range(owner);
        whole.narrow(0, range.start as i64, range.len() as i64)
    }

    fn take_parameters(&mut self) -> Parameters {
        std::mem::replace(&mut self.parameters, Parameters::Moving)
    }

    fn put(&self, tensor: &Tensor, block: Block) -> Result<()> {
        self.torch(storage::put(tensor, block).map_err(|refused| refused.error))
    }

    fn torch<T>(&self, result: shardwise_torch::Result<T>) -> Result<T> {
        result.map_err(|error| Error::Torch { unit: self.name.clone(), error })
    }

    fn tch<T>(&self, result: std::result::Result<T, shardwise_torch::tch::TchError>) -> Result<T> {
        self.torch(result.map_err(shardwise_torch::Error::from))
    }

    fn comm<T>(&self, result: shardwise_comm::Result<T>) -> Result<T> {
        result.map_err(|error| Error::Comm { unit: self.name.clone(), error })
    }
}

fn released(name: &str) -> String {
    format!("the parameters of {name} are released; gather them before they are used")
}

/// A flat tensor without memory.
fn emptied(name: &str, len: usize) -> shardwise_torch::Result<Tensor> {
    // Never touched, so it never becomes resident.
    let flat = Tensor::f_empty([len as i64], (Kind::Float, Device::Cpu))?;
    if len > 0 {
        drop(storage::take(&flat, &released(name))?);
    }
    Ok(flat)
}

/// Asks `start` for the elements `kept` of the flat buffer, parameter by parameter.
fn fill(elements: &mut [f32], kept: Range<usize>, places: &[Range<usize>], start: &mut Start<'_>) {
    for (parameter, place) in places.iter().enumerate() {
        let (from, to) = (place.start.max(kept.start), place.end.min(kept.end));
        if from < to {
            let wanted = from - place.start..to - place.start;
            start(parameter, wanted, &mut elements[from - kept.start..to - kept.start]);
        }
    }
}
