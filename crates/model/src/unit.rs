//! A model as a chain of units.

use shardwise_torch::tch::{Device, Tensor, no_grad};

use crate::{Activations, Cache, Error, Result};

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
    /// Whether it is trained; [`Model::freeze`] says which are not.
    pub trainable: bool,
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
    /// Where several documents stand in one sequence: for each token the number of its document, of 64 bits. Documents do
    /// not see each other. One ends where the number changes.
    pub documents: Option<Tensor>,
}

impl Batch {
    /// A micro-batch in which every sequence is one document.
    pub fn new(tokens: Tensor, targets: Tensor) -> Batch {
        Batch { tokens, targets, documents: None }
    }

    /// The same on a device. Where documents end is for the host to know, and stays with it.
    pub fn to_device(&self, device: Device) -> Batch {
        Batch {
            tokens: self.tokens.to_device(device),
            targets: self.targets.to_device(device),
            documents: self.documents.as_ref().map(|numbers| numbers.to_device(Device::Cpu)),
        }
    }
}

/// The maths of a unit.
pub trait Layer: Send {
    /// Its output: hidden states, sequences by positions by width; of the head, the sum of all tokens' losses. The first
    /// unit of a chain reads the batch's tokens, and has no input.
    fn forward(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        batch: &Batch,
        activations: Activations,
    ) -> Result<Tensor>;

    /// Its output for new positions alone, after those in `cache`, which they are added to. `tokens` are the new ones,
    /// sequences by positions. Of the head: what it says of every token of the vocabulary after the last position,
    /// sequences by vocabulary.
    fn extend(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        tokens: &Tensor,
        cache: &mut Cache,
    ) -> Result<Tensor>;

    /// The most positions that a sequence may have, if there is such a number.
    fn positions(&self) -> Option<usize> {
        None
    }

    /// Of the head: what it says of every token of the vocabulary, for every position of its input.
    fn logits(&self, _parameters: &Parameters<'_>, _input: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// What it takes of memory besides its parameters, estimated for so many tokens, in sequences of so many positions,
    /// and elements of so many bytes.
    fn footprint(&self, tokens: usize, positions: usize, element_bytes: usize, activations: Activations) -> Footprint;

    /// Whether the backward pass reads the parameters' values. A table that is only looked up in does not need them twice.
    fn backward_reads_parameters(&self) -> bool {
        true
    }
}

/// What a unit takes of memory besides its parameters: an estimate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// From its forward to its backward pass, its output included.
    pub kept_bytes: usize,
    /// Its output alone.
    pub output_bytes: usize,
    /// While it computes, at the most.
    pub passing_bytes: usize,
}

impl Footprint {
    /// Of a unit that keeps its output and nothing else.
    pub fn of_output(output_bytes: usize) -> Self {
        Footprint { kept_bytes: output_bytes, output_bytes, passing_bytes: 0 }
    }
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

    /// What it takes of memory besides its parameters, estimated for so many tokens, in sequences of so many positions,
    /// and elements of so many bytes.
    pub fn footprint(
        &self,
        tokens: usize,
        positions: usize,
        element_bytes: usize,
        activations: Activations,
    ) -> Footprint {
        self.layer.footprint(tokens, positions, element_bytes, activations)
    }

    /// Whether its backward pass reads the parameters' values.
    pub fn backward_reads_parameters(&self) -> bool {
        self.layer.backward_reads_parameters()
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
        activations: Activations,
    ) -> Result<Tensor> {
        self.layer.forward(&self.given(tensors, tied), input, batch, activations)
    }

    /// Of the head: what it says of every token of the vocabulary, for every position of its input. Of the others: none.
    pub fn logits(&self, tensors: &[Tensor], tied: Option<&Tensor>, input: &Tensor) -> Result<Option<Tensor>> {
        self.layer.logits(&self.given(tensors, tied), input)
    }

    /// Its output for new positions alone, after those in `cache`, which they are added to; without a graph. `tokens` are
    /// the new ones, sequences by positions. Of the head: what it says of every token of the vocabulary after the last
    /// position, sequences by vocabulary. Documents are one to a sequence.
    pub fn extend(
        &self,
        tensors: &[Tensor],
        tied: Option<&Tensor>,
        input: Option<&Tensor>,
        tokens: &Tensor,
        cache: &mut Cache,
    ) -> Result<Tensor> {
        no_grad(|| self.layer.extend(&self.given(tensors, tied), input, tokens, cache))
    }

    fn given<'a>(&'a self, tensors: &'a [Tensor], tied: Option<&'a Tensor>) -> Parameters<'a> {
        assert_eq!(tensors.len(), self.parameters.len(), "{} is given all of its parameters", self.name);
        assert_eq!(tied.is_some(), self.tied.is_some(), "{} is given what it shares", self.name);
        Parameters { declared: &self.parameters, tensors, tied }
    }
}

impl Parameter {
    /// A matrix, which begins normally distributed and decays.
    pub(crate) fn matrix(name: String, shape: [usize; 2], std: f64) -> Self {
        let shape = shape.map(|size| size as i64).to_vec();
        Parameter { name, shape, init: Init::Normal { std }, decays: true, trainable: true }
    }

    /// A vector, which does not decay.
    pub(crate) fn vector(name: String, len: usize, init: Init) -> Self {
        Parameter { name, shape: vec![len as i64], init, decays: false, trainable: true }
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

    /// Keeps parameters as they begin: those whose names begin with one of `prefixes`. Each must name at least one.
    pub fn freeze<P: AsRef<str>>(&mut self, prefixes: &[P]) -> Result<()> {
        for prefix in prefixes.iter().map(AsRef::as_ref) {
            let named = |parameter: &&mut Parameter| parameter.name.starts_with(prefix);
            let mut parameters = self.units.iter_mut().flat_map(|unit| &mut unit.parameters).filter(named).peekable();
            if parameters.peek().is_none() {
                let known = self.units.iter().find_map(|unit| unit.parameters.first());
                let example = known.map_or("", |parameter| parameter.name.as_str());
                let problem = format!("no parameter's name begins with '{prefix}'; names are like '{example}'");
                return Err(Error::Config { key: "frozen", problem });
            }
            parameters.for_each(|parameter| parameter.trainable = false);
        }
        Ok(())
    }

    /// The chain.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The most positions that a sequence may have, if there is such a number.
    pub fn positions(&self) -> Option<usize> {
        self.units.iter().filter_map(|unit| unit.layer.positions()).min()
    }

    /// The number of elements of all parameters, a tied one counted once.
    pub fn elements(&self) -> usize {
        self.units.iter().map(Unit::elements).sum()
    }
}
