//! A model as a chain of units.

use shardwise_torch::tch::Tensor;

use crate::Result;

/// A model: units that are run one after the other.
pub struct Model {
    units: Vec<Unit>,
}

/// What travels in one collective: the embedding, a block, or the head.
pub struct Unit {
    name: String,
    parameters: Vec<Parameter>,
    tied: Option<Tied>,
    layer: Box<dyn Layer>,
}

/// A parameter that a unit uses and another unit owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tied {
    /// The place of the owner in the chain.
    pub unit: usize,
    /// The place of the parameter in the owner.
    pub parameter: usize,
}

/// A parameter as the model declares it.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its name in a Hugging Face checkpoint.
    pub name: String,
    /// Its shape there.
    pub shape: Vec<i64>,
    /// How it begins.
    pub init: Init,
    /// Whether weight decay applies: to matrices, not to norms and biases.
    pub decays: bool,
}

/// How a parameter begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normally distributed around zero.
    Normal {
        /// The standard deviation.
        std: f64,
    },
}

/// A micro-batch.
pub struct Batch {
    /// Token ids, sequences by positions.
    pub tokens: Tensor,
    /// For each token the one that follows, or [`crate::IGNORED`].
    pub targets: Tensor,
}

/// The maths of a unit.
pub trait Layer: Send {
    /// Its output: hidden states, sequences by positions by width; of the head, the sum of all tokens' losses. The first
    /// unit of a chain reads the batch's tokens, and has no input.
    fn forward(&self, parameters: &Parameters<'_>, input: Option<&Tensor>, batch: &Batch) -> Result<Tensor>;
}

/// A unit's parameters, whole, by name.
pub struct Parameters<'a> {
    declared: &'a [Parameter],
    tensors: &'a [Tensor],
    tied: Option<&'a Tensor>,
}

impl Parameters<'_> {
    /// The parameter whose name ends in `ending`.
    ///
    /// # Panics
    /// If the unit has none: it has declared its parameters itself.
    pub fn get(&self, ending: &str) -> &Tensor {
        self.find(ending).unwrap_or_else(|| panic!("the unit has not declared a parameter '{ending}'"))
    }

    /// The same where the unit may have none, as with biases.
    pub fn find(&self, ending: &str) -> Option<&Tensor> {
        let place = self.declared.iter().position(|parameter| {
            parameter.name.strip_suffix(ending).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        })?;
        Some(&self.tensors[place])
    }

    /// The parameter that another unit owns.
    pub fn tied(&self) -> Option<&Tensor> {
        self.tied
    }
}

impl Unit {
    pub(crate) fn new(name: impl Into<String>, parameters: Vec<Parameter>, layer: impl Layer + 'static) -> Self {
        Unit { name: name.into(), parameters, tied: None, layer: Box::new(layer) }
    }

    pub(crate) fn with_tied(self, tied: Option<Tied>) -> Self {
        Unit { tied, ..self }
    }

    /// What it is called in reports: `embedding`, `block.7`, `head`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its own parameters, in the order in which [`Unit::forward`] wants them.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The parameter that it uses of another unit.
    pub fn tied(&self) -> Option<Tied> {
        self.tied
    }

    /// The number of elements of its own parameters.
    pub fn elements(&self) -> usize {
        self.parameters.iter().map(Parameter::elements).sum()
    }

    /// Its output. `tensors` are its own parameters; `tied` is the one that it uses of another unit, if it does.
    pub fn forward(
        &self,
        tensors: &[Tensor],
        tied: Option<&Tensor>,
        input: Option<&Tensor>,
        batch: &Batch,
    ) -> Result<Tensor> {
        assert_eq!(tensors.len(), self.parameters.len(), "{} is given all of its parameters", self.name);
        assert_eq!(tied.is_some(), self.tied.is_some(), "{} is given what it shares", self.name);
        self.layer.forward(&Parameters { declared: &self.parameters, tensors, tied }, input, batch)
    }
}

impl Parameter {
    /// A matrix, which begins normally distributed and decays.
    pub(crate) fn matrix(name: String, shape: [usize; 2], std: f64) -> Self {
        let shape = shape.map(|size| size as i64).to_vec();
        Parameter { name, shape, init: Init::Normal { std }, decays: true }
    }

    /// A vector, which does not decay.
    pub(crate) fn vector(name: String, len: usize, init: Init) -> Self {
        Parameter { name, shape: vec![len as i64], init, decays: false }
    }

    /// The number of its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }
}

impl Model {
    pub(crate) fn new(units: Vec<Unit>) -> Self {
        Model { units }
    }

    /// The chain.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The number of elements of all parameters, a tied one counted once.
    pub fn elements(&self) -> usize {
        self.units.iter().map(Unit::elements).sum()
    }
}
