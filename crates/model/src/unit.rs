//! A model as a chain of units.
//!
//! This is where a model of one's own begins: [`Layer`] is its maths, [`Unit`] names what travels together, and [`Model::new`] makes
//! a chain of them. Nothing here is for language alone; what a batch holds is between the first unit and whoever makes batches.

use std::collections::HashSet;

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
    /// What the first unit reads: of a language model token ids, sequences by positions. A model of one's own may as well read
    /// images, or whatever fits into a tensor.
    pub inputs: Tensor,
    /// What the last unit compares with: of a language model for each token the one that follows. The loss is the mean over all
    /// elements that are not [`crate::IGNORED`].
    pub targets: Tensor,
    /// Where several documents stand in one sequence: for each token the number of its document, of 64 bits. Documents do
    /// not see each other. One ends where the number changes.
    pub documents: Option<Tensor>,
}

impl Batch {
    /// A micro-batch in which every sequence is one document.
    pub fn new(inputs: Tensor, targets: Tensor) -> Batch {
        Batch { inputs, targets, documents: None }
    }

    /// The same on a device. Where documents end is for the host to know, and stays with it.
    pub fn to_device(&self, device: Device) -> Batch {
        Batch {
            inputs: self.inputs.to_device(device),
            targets: self.targets.to_device(device),
            documents: self.documents.as_ref().map(|numbers| numbers.to_device(Device::Cpu)),
        }
    }
}

/// The maths of a unit.
///
/// [`Layer::forward`] is all that training needs. Methods of tensors that begin with `f_` return errors, which then come with the
/// name of the unit; the others panic.
pub trait Layer: Send {
    /// Its output, which is the next unit's input; of the last unit, one number: the sum of the losses of all targets that count.
    /// The first unit of a chain reads the batch's inputs, and has no input of its own. The graph behind the output may be walked
    /// once, and parameters may be read here and in the backward pass, but not kept.
    ///
    /// A layer that cannot keep less than all of its activations does not look at `activations`.
    fn forward(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        batch: &Batch,
        activations: Activations,
    ) -> Result<Tensor>;

    /// Its output for new positions alone, after those in `cache`, which they are added to. `tokens` are the new ones,
    /// sequences by positions. Of the head: what it says of every token of the vocabulary after the last position,
    /// sequences by vocabulary. A model whose layers lack it cannot generate.
    fn extend(
        &self,
        _parameters: &Parameters<'_>,
        _input: Option<&Tensor>,
        _tokens: &Tensor,
        _cache: &mut Cache,
    ) -> Result<Tensor> {
        let problem = "this unit computes whole sequences only; give its layer an `extend`".to_string();
        Err(Error::Config { key: "generation", problem })
    }

    /// The most positions that a sequence may have, if there is such a number.
    fn positions(&self) -> Option<usize> {
        None
    }

    /// Of the head: what it says of every token of the vocabulary, or of every class, for every position of its input.
    fn logits(&self, _parameters: &Parameters<'_>, _input: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// What it takes of memory besides its parameters, estimated for so many tokens, in sequences of so many positions,
    /// and elements of so many bytes. Only estimates of what fits use it.
    fn footprint(
        &self,
        _tokens: usize,
        _positions: usize,
        _element_bytes: usize,
        _activations: Activations,
    ) -> Footprint {
        Footprint::default()
    }

    /// Additions and multiplications of a token's forward pass that no parameter is a factor of, on average over a sequence of so
    /// many positions that is one document: attention's.
    fn attention_flops(&self, _positions: usize) -> f64 {
        0.
    }

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
    /// A unit of this name, with parameters that its layer finds by their names.
    pub fn new(name: impl Into<String>, parameters: Vec<Parameter>, layer: impl Layer + 'static) -> Self {
        Unit { name: name.into(), parameters, tied: None, layer: Box::new(layer) }
    }

    /// The same, which also uses a parameter of an earlier unit.
    pub fn with_tied(self, tied: Option<Tied>) -> Self {
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

    fn check(&self, before: &[Unit]) -> std::result::Result<(), String> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if self.name.is_empty() || self.name.starts_with('.') || !self.name.chars().all(plain) {
            let rule = "names have letters, digits, '.', '_' and '-', and do not begin with '.'";
            return Err(format!("{:?} is no name of a unit: {rule}", self.name));
        }
        for Parameter { name, shape, .. } in &self.parameters {
            if name.is_empty() || name.contains('/') {
                return Err(format!("{}: {name:?} is no name of a parameter: it has letters, and no '/'", self.name));
            }
            if shape.iter().any(|&size| size < 1) {
                return Err(format!("{}: the shape of '{name}' is {shape:?}, which has no elements", self.name));
            }
        }
        let owned = |tied: Tied| before.get(tied.unit).is_some_and(|unit| tied.parameter < unit.parameters.len());
        match self.tied {
            Some(tied) if !owned(tied) => {
                Err(format!("{}: it is tied to {tied:?}, which no unit before it has", self.name))
            }
            _ => Ok(()),
        }
    }

    fn given<'a>(&'a self, tensors: &'a [Tensor], tied: Option<&'a Tensor>) -> Parameters<'a> {
        assert_eq!(tensors.len(), self.parameters.len(), "{} is given all of its parameters", self.name);
        assert_eq!(tied.is_some(), self.tied.is_some(), "{} is given what it shares", self.name);
        Parameters { declared: &self.parameters, tensors, tied }
    }
}

impl Parameter {
    /// A parameter of any shape, which is trained. It decays if it has more than one dimension.
    pub fn new(name: impl Into<String>, shape: &[usize], init: Init) -> Self {
        let dimensions = shape.iter().map(|&size| size as i64).collect();
        Parameter { name: name.into(), shape: dimensions, init, decays: shape.len() > 1, trainable: true }
    }

    /// A matrix, which begins normally distributed and decays.
    pub fn matrix(name: impl Into<String>, shape: [usize; 2], std: f64) -> Self {
        Parameter::new(name, &shape, Init::Normal { std })
    }

    /// A vector, which does not decay.
    pub fn vector(name: impl Into<String>, len: usize, init: Init) -> Self {
        Parameter::new(name, &[len], init)
    }

    /// The number of its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }
}

impl Model {
    /// A chain of units. The first reads the batch, the last puts out the loss.
    pub fn new(units: Vec<Unit>) -> Result<Self> {
        let model = Model { units };
        model.check().map_err(|problem| Error::Config { key: "units", problem })?;
        Ok(model)
    }

    /// Names become those of files and tensors in checkpoints, so each must do as one, and be there once.
    fn check(&self) -> std::result::Result<(), String> {
        if self.units.is_empty() {
            return Err("there is none, and a model has at least one".to_string());
        }
        if let Some(name) = repeated(self.units.iter().map(Unit::name)) {
            return Err(format!("two are called '{name}'; give each a name of its own"));
        }
        let parameters = self.units.iter().flat_map(|unit| &unit.parameters);
        if let Some(name) = repeated(parameters.map(|parameter| parameter.name.as_str())) {
            return Err(format!("two parameters are called '{name}'; give each a name of its own"));
        }
        self.units.iter().enumerate().try_for_each(|(index, unit)| unit.check(&self.units[..index]))
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

    /// Additions and multiplications that a token takes in a forward and a backward pass, on average over a sequence of so many
    /// positions: of matrices and of attention, in which a position sees itself and those before it. What recomputation makes
    /// again is not counted, and neither is the gradient of what is frozen.
    pub fn flops_per_token(&self, positions: usize) -> f64 {
        let is_trained = |unit: &Unit| unit.parameters.iter().any(|parameter| parameter.trainable);
        let first_trained = self.units.iter().position(is_trained).unwrap_or(self.units.len());
        let mut flops = 0.;
        for (index, unit) in self.units.iter().enumerate() {
            let tied = unit.tied.map(|tied| &self.units[tied.unit].parameters[tied.parameter]);
            // A table that is only looked up in multiplies nothing.
            let own = unit.parameters.iter().filter(|_| unit.backward_reads_parameters());
            // A product costs as much again for the gradient of each of its factors.
            let of_input = f64::from(u8::from(index > first_trained));
            for matrix in own.chain(tied).filter(|parameter| parameter.shape.len() == 2) {
                let of_parameter = f64::from(u8::from(matrix.trainable));
                flops += 2. * matrix.elements() as f64 * (1. + of_input + of_parameter);
            }
            let both_factors = if index >= first_trained { 2. } else { 0. };
            flops += unit.layer.attention_flops(positions) * (1. + both_factors);
        }
        flops
    }

    /// The number of elements of all parameters, a tied one counted once.
    pub fn elements(&self) -> usize {
        self.units.iter().map(Unit::elements).sum()
    }
}

/// A name that is there twice.
fn repeated<'a>(mut names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut seen = HashSet::new();
    names.find(|name| !seen.insert(*name))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl Layer for Nothing {
        fn forward(&self, _: &Parameters<'_>, _: Option<&Tensor>, _: &Batch, _: Activations) -> Result<Tensor> {
            Ok(Tensor::from(0f32))
        }
    }

    fn unit(name: &str, parameters: &[&str]) -> Unit {
        let parameters = parameters.iter().map(|name| Parameter::new(*name, &[2, 3], Init::Zeros)).collect();
        Unit::new(name, parameters, Nothing)
    }

    fn refused(units: Vec<Unit>) -> String {
        Model::new(units).err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_chain_whose_names_will_not_do_is_refused() {
        let tied = |index| Some(Tied { unit: index, parameter: 0 });
        let good = vec![unit("patches", &["w"]), unit("block.0", &[]), unit("head", &["v"]).with_tied(tied(0))];
        assert_eq!(Model::new(good).map(|model| model.elements()).ok(), Some(12));
        assert!(refused(vec![]).contains("there is none"));
        assert!(refused(vec![unit("a", &["w"]), unit("a", &["v"])]).contains("two are called 'a'"));
        assert!(refused(vec![unit("a", &["w"]), unit("b", &["w"])]).contains("two parameters are called 'w'"));
        for name in ["", "../up", ".hidden", "a b"] {
            assert!(refused(vec![unit(name, &[])]).contains("is no name of a unit"), "{name:?}");
        }
        assert!(refused(vec![unit("a", &["w/x"])]).contains("\"w/x\" is no name of a parameter"));
        let empty = Unit::new("a", vec![Parameter::vector("w", 0, Init::Ones)], Nothing);
        assert!(refused(vec![empty]).contains("has no elements"));
        assert!(refused(vec![unit("a", &["w"]).with_tied(tied(0))]).contains("no unit before it has"));
    }

    #[test]
    fn a_layer_that_only_trains_cannot_generate() {
        let unit = unit("head", &[]);
        let tokens = Tensor::from_slice(&[1i64]).view([1, 1]);
        let error = unit.extend(&[], None, None, &tokens, &mut Cache::new()).err().map(|error| error.to_string());
        assert!(error.is_some_and(|error| error.contains("give its layer an `extend`")));
    }
}
