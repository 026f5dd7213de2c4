//! A model as a chain of units.
//!
//! Start here to write your own model: a [`Layer`] is the computation, a [`Unit`] adds the parameters, which are gathered and
//! reduced together, and [`Model::new`] chains the units. Nothing here is specific to language models: only the first and the
//! last unit read the batch.

use std::collections::HashSet;
use std::sync::Arc;

use shardwise_plan::ContextPlace;
use shardwise_plan::package::Package;
use shardwise_plan::program::{InnerCollectives, Place};
use shardwise_plan::{LayerPlace, ModelConfig, Partition, check_frozen_prefixes, most_equal_parts};
use shardwise_torch::pin;
use shardwise_torch::tch::{Device, Kind, Tensor, no_grad};

use crate::context_batch::ContextBatch;
use crate::documents::Documents;
use crate::init::splitmix64;
use crate::linear::Orientation;
use crate::pass::{Pass, PassShape};
use crate::tensor_parallel::cut;
use crate::{Cache, DeferredGradients, Error, Linear, Parameter, Result, TensorParallel};

/// A model: a chain of units.
pub struct Model {
    units: Vec<Unit>,
    /// Whether it was built from a configuration, by code that tests compare with references.
    is_built_in: bool,
    /// The compiled package that it was built from.
    package: Option<Arc<Package>>,
}

/// Parameters that are all-gathered and reduced in one collective, and the layer that uses them: the embedding, a block, or the
/// head (FSDP2: a module with `fully_shard`).
pub struct Unit {
    name: String,
    parameters: Vec<Parameter>,
    tied: Option<Tied>,
    layer: Box<dyn Layer>,
}

/// A parameter that one unit uses and an earlier unit owns (weight tying).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tied {
    /// The index of the owner in the chain.
    pub unit: usize,
    /// The index of the parameter in the owner.
    pub parameter: usize,
}

/// A micro-batch.
pub struct Batch {
    /// The input of the first unit. For a language model, token ids (sequences, positions). A custom model may read images, or
    /// anything else that fits in a tensor.
    pub inputs: Tensor,
    /// The targets of the last unit. For a language model, the token that follows each input token. The loss of a step is the
    /// mean over all elements that are not [`crate::IGNORED`].
    pub targets: Tensor,
    /// For packed sequences, where their documents end. Tokens attend only to their own document.
    pub documents: Option<Documents>,
    /// If ranks divide the sequences, which positions this rank has.
    pub context: Option<ContextBatch>,
}

impl Batch {
    /// Creates a micro-batch in which every sequence is one document.
    pub fn new(inputs: Tensor, targets: Tensor) -> Batch {
        Batch { inputs, targets, documents: None, context: None }
    }

    /// Creates a micro-batch of packed sequences. `numbers` has the number of each token's document, as a 64-bit integer. A document
    /// ends where the number changes.
    pub fn packed(inputs: Tensor, targets: Tensor, numbers: &Tensor) -> Result<Batch> {
        let (shape, expected) = (numbers.size(), inputs.size());
        if shape != expected {
            let problem = format!("their numbers have shape {shape:?}, but the tokens have shape {expected:?}");
            return Err(Error::Config { key: "documents", problem });
        }
        Ok(Batch { inputs, targets, documents: Documents::from_numbers(numbers)?, context: None })
    }

    /// This rank's part of a micro-batch whose sequences are divided among ranks: inputs, targets, positions and documents together.
    pub fn split_context(&self, place: ContextPlace) -> Result<Batch> {
        let (sequences, positions) = self.inputs.size2()?;
        let whole = || vec![vec![positions]; sequences as usize];
        let documents = self.documents.as_ref().map_or_else(whole, |documents| documents.lengths().to_vec());
        let ranks = place.size();
        if (positions as usize) < ranks {
            let problem = format!("sequences of {positions} positions cannot be divided among {ranks} ranks");
            return Err(Error::Config { key: "context", problem });
        }
        let context = ContextBatch::new(&documents, place, self.fingerprint());
        let (inputs, targets) = (context.select(&self.inputs)?, context.select(&self.targets)?);
        Ok(Batch { inputs, targets, documents: None, context: Some(context) })
    }

    /// A number that almost certainly differs between different micro-batches.
    pub fn fingerprint(&self) -> u64 {
        let of_tensor = |tensor: &Tensor| {
            let elements = tensor.to_kind(Kind::Double).reshape(-1);
            let weights: Vec<f64> = (0..elements.numel() as i64).map(|index| (index % 8191 + 1) as f64).collect();
            let weights = Tensor::from_slice(&weights).to_device(tensor.device());
            elements.dot(&weights).double_value(&[]).to_bits()
        };
        let lengths = self.documents.iter().flat_map(Documents::lengths).flatten();
        let of_documents = lengths.fold(0, |hash, &length| splitmix64(hash ^ length as u64));
        splitmix64(of_tensor(&self.inputs)) ^ of_tensor(&self.targets) ^ of_documents
    }

    /// Everything of it that is a tensor.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.inputs, &self.targets].into_iter().chain(self.documents.as_ref().and_then(Documents::tensor))
    }

    /// Moves the tensors to pinned memory, from which a device copies without making the host wait.
    pub fn pin(&mut self) -> Result<()> {
        pin(&mut self.inputs)?;
        Ok(pin(&mut self.targets)?)
    }

    /// Returns a copy on a device, for which the host does not wait.
    pub fn to_device(&self, device: Device) -> Batch {
        let copy = |tensor: &Tensor| tensor.to_device_(device, tensor.kind(), true, false);
        Batch {
            inputs: copy(&self.inputs),
            targets: copy(&self.targets),
            documents: self.documents.as_ref().map(|documents| documents.to_device(device)),
            context: self.context.clone(),
        }
    }
}

/// The computation of a unit.
///
/// Training needs only [`Layer::forward`]. Tensor methods with the prefix `f_` return errors, which are reported with the name
/// of the unit; the others panic.
pub trait Layer: Send {
    /// Computes the output, which is the input of the next unit. The output of the last unit is a scalar: the sum of the losses
    /// of all targets that are not ignored. The first unit reads the batch's inputs, and has no `input`. There is one backward
    /// pass through the output. Parameters may be read here and in the backward pass, but not stored.
    ///
    /// `pass` says which activations to keep, which a layer without selective activation checkpointing ignores, and has the verbs
    /// of tensor parallelism, which a layer whose parameters are split needs.
    fn forward(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        batch: &Batch,
        pass: &Pass,
    ) -> Result<Tensor>;

    /// Loads what the passes need besides parameters, such as compiled code. A trainer calls it before it allocates memory, so that
    /// what is missing is noticed early.
    fn load(&self) -> Result<()> {
        Ok(())
    }

    /// Computes the output for new positions, and adds them to `cache`: incremental decoding. `tokens` are the new tokens
    /// (sequences, positions). The head returns the logits of the last position (sequences, vocab size). All ranks that share the
    /// layer have all positions. A model whose layers do not implement this cannot generate.
    fn extend(
        &self,
        _parameters: &Parameters<'_>,
        _input: Option<&Tensor>,
        _tokens: &Tensor,
        _cache: &mut Cache,
        _pass: &Pass,
    ) -> Result<Tensor> {
        let problem = "this unit computes whole sequences only; give its layer an `extend`".to_string();
        Err(Error::Config { key: "generation", problem })
    }

    /// The number of experts that tokens choose from; 0 if the layer has none.
    fn num_experts(&self) -> usize {
        0
    }

    /// How much an update changes the bias that is added to scores when tokens choose experts; 0 if nothing changes it. The layer counts
    /// tokens in [`Pass::expert_tokens`].
    fn router_bias_update_rate(&self) -> f64 {
        0.
    }

    /// Checks that this many ranks can share the layer; that they can share its parameters is checked elsewhere.
    fn check_tensor_parallel(&self, _ranks: usize) -> Result<()> {
        Ok(())
    }

    /// The shape of the output for this micro-batch, which the next stage of a pipeline needs before the output arrives. `parallel`
    /// says which rows this rank has. Without it, the unit cannot be the last one of a stage.
    fn output_shape(&self, _batch: &Batch, _parallel: &TensorParallel) -> Option<Vec<i64>> {
        None
    }

    /// The maximum sequence length, if there is one.
    fn max_positions(&self) -> Option<usize> {
        None
    }

    /// The logits of every position; `None` for all units but the head. All ranks that share the layer have all positions.
    fn logits(
        &self,
        _parameters: &Parameters<'_>,
        _input: &Tensor,
        _parallel: &TensorParallel,
    ) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Estimates the memory besides the parameters. Used only to estimate the memory of a run.
    fn footprint(&self, _shape: &PassShape) -> Footprint {
        Footprint::default()
    }

    /// The collectives of the layer's passes, in order: those of the verbs of tensor parallelism that it calls. `is_trained` says of
    /// the ending of a name whether the layer trains a parameter with it.
    fn collectives(&self, _shape: &PassShape, _is_trained: &dyn Fn(&str) -> bool) -> InnerCollectives {
        InnerCollectives::default()
    }

    /// The FLOPs of attention in the forward pass, without the projections. Per token, averaged over a sequence of `positions`
    /// positions that is one document.
    fn attention_flops(&self, _positions: usize) -> f64 {
        0.
    }

    /// Whether the forward pass computes gradients of parameters, and holds them until the backward pass. A pipeline delays such a
    /// pass until just before the backward pass. Only the last layer, which computes the loss, can do this.
    fn forward_computes_gradients(&self) -> bool {
        false
    }

    /// Whether the backward pass returns dense gradients of all parameters, in the dtype of the parameters. Then the gradients of a single
    /// micro-batch are sent in that dtype, which loses nothing. Those of an embedding may be sparse: rows are added in f32.
    fn gradients_are_dense(&self) -> bool {
        false
    }

    /// Whether the backward pass reads the values of the parameters, so that they must be gathered for it. That of an embedding
    /// does not.
    fn backward_reads_parameters(&self) -> bool {
        true
    }
}

/// The estimated memory of a unit besides its parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Kept from the forward pass to the backward pass, including the output.
    pub kept_bytes: usize,
    /// The output alone.
    pub output_bytes: usize,
    /// The peak of the temporary memory of the forward pass.
    pub forward_temporary_bytes: usize,
    /// The peak of the temporary memory of a forward pass that keeps nothing but its output.
    pub no_grad_temporary_bytes: usize,
    /// The most that the backward pass holds in addition to what was held before it.
    pub temporary_bytes: usize,
    /// The size of an embedding's gradient without that of its rows in this batch, which are all that the backward pass returns.
    pub sparse_gradient_bytes: usize,
}

impl Footprint {
    /// The footprint of a lookup of `tokens` rows in an embedding.
    pub(crate) fn of_embedding(shape: &PassShape, vocab_size: usize, hidden_size: usize) -> Self {
        let &PassShape { tokens, element_bytes, .. } = shape;
        let vocab_size = shape.part_of(vocab_size);
        let (rows, table) = (tokens * hidden_size * element_bytes, vocab_size * hidden_size * element_bytes);
        // The rows and, if they are narrower than f32, the same in f32.
        let returned = if element_bytes >= 4 { rows } else { rows + 2 * rows };
        let output = shape.own_tokens() * hidden_size * element_bytes;
        // The rows of all tokens, of which this rank keeps its own.
        let forward_temporary_bytes = if shape.tensor.size > 1 { rows } else { 0 };
        Footprint {
            sparse_gradient_bytes: table.saturating_sub(returned),
            forward_temporary_bytes,
            no_grad_temporary_bytes: forward_temporary_bytes,
            ..Footprint::of_output(output)
        }
    }

    /// The footprint of a unit that keeps only its output.
    pub fn of_output(output_bytes: usize) -> Self {
        Footprint { kept_bytes: output_bytes, output_bytes, ..Footprint::default() }
    }
}

/// A unit's unsharded parameters, by name: those parts that this rank computes with.
pub struct Parameters<'a> {
    declared: &'a [Parameter],
    tensors: &'a [Tensor],
    /// By parameter: the part of a tensor of which this rank uses only a part.
    narrowed: Vec<Option<Tensor>>,
    tied: Option<&'a Tensor>,
    /// Where the gradients of weights are put aside.
    deferred: Option<&'a DeferredGradients>,
}

impl<'a> Parameters<'a> {
    /// Parameters of which this rank uses all, in the order in which the unit declares them.
    pub(crate) fn whole(declared: &'a [Parameter], tensors: &'a [Tensor]) -> Self {
        Parameters { declared, tensors, narrowed: tensors.iter().map(|_| None).collect(), tied: None, deferred: None }
    }
}

impl Parameters<'_> {
    /// Returns the parameter whose name ends in `ending`.
    ///
    /// # Panics
    /// Panics if the unit has not declared such a parameter.
    pub fn get(&self, ending: &str) -> &Tensor {
        self.find(ending).unwrap_or_else(|| panic!("the unit has not declared a parameter '{ending}'"))
    }

    /// Returns the parameter whose name ends in `ending`, if there is one. For optional parameters, such as biases.
    pub fn find(&self, ending: &str) -> Option<&Tensor> {
        let place = self.place(ending)?;
        Some(self.narrowed[place].as_ref().unwrap_or(&self.tensors[place]))
    }

    /// The linear layer with the weight, of shape (output, input), whose name ends in `weight`. In a zero-bubble pipeline, the
    /// gradient of this weight is computed later than that of the layer's input.
    ///
    /// # Panics
    /// Panics if the unit has not declared such a parameter.
    pub fn layer<'a>(&'a self, weight: &str, bias: Option<&'a Tensor>) -> Linear<'a> {
        let (orientation, deferred) = (Orientation::OutputByInput, self.deferral(weight));
        Linear { weight: self.get(weight), bias, orientation, deferred }
    }

    /// The same with a weight of shape (input, output), as Hugging Face's GPT-2 has them.
    pub(crate) fn layer_transposed<'a>(&'a self, weight: &str, bias: Option<&'a Tensor>) -> Linear<'a> {
        Linear { orientation: Orientation::InputByOutput, ..self.layer(weight, bias) }
    }

    /// Applies the [layer](Parameters::layer) with this weight.
    pub fn linear(&self, x: &Tensor, weight: &str, bias: Option<&Tensor>) -> Result<Tensor> {
        self.layer(weight, bias).apply(x)
    }

    /// Where the gradient of a parameter is put aside, unless it belongs to a part of the parameter only.
    pub(crate) fn deferral(&self, ending: &str) -> Option<(usize, DeferredGradients)> {
        let place = self.place(ending).filter(|&place| self.narrowed[place].is_none())?;
        Some((place, self.deferred?.clone()))
    }

    /// The index of the parameter whose name ends in `ending`.
    fn place(&self, ending: &str) -> Option<usize> {
        self.declared.iter().position(|parameter| {
            parameter.name.strip_suffix(ending).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        })
    }

    /// The tied parameter, which another unit owns.
    pub fn tied(&self) -> Option<&Tensor> {
        self.tied
    }

    /// Those whose names fulfil a condition, as the unit declares them. For layers that ranks do not share.
    pub(crate) fn select(&self, is_selected: impl Fn(&str) -> bool) -> (Vec<Parameter>, Vec<&Tensor>) {
        let pairs = self.declared.iter().zip(self.tensors);
        pairs
            .filter(|(parameter, _)| is_selected(&parameter.name))
            .map(|(parameter, it)| (parameter.clone(), it))
            .unzip()
    }

    /// All of them in the order in which the unit declares them, and then the tied one. For layers that ranks do not share.
    pub(crate) fn in_order(&self) -> Vec<&Tensor> {
        self.tensors.iter().chain(self.tied).collect()
    }
}

impl Unit {
    /// Creates a unit. The layer looks up its parameters by name.
    pub fn new(name: impl Into<String>, parameters: Vec<Parameter>, layer: impl Layer + 'static) -> Self {
        Unit { name: name.into(), parameters, tied: None, layer: Box::new(layer) }
    }

    /// Lets this unit use a parameter of an earlier unit.
    pub fn with_tied(self, tied: Option<Tied>) -> Self {
        Unit { tied, ..self }
    }

    /// The name in reports: `embedding`, `block.7`, `head`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its own parameters, in the order in which [`Unit::forward`] takes them.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The parameter of an earlier unit that this unit uses.
    pub fn tied(&self) -> Option<Tied> {
        self.tied
    }

    /// Loads what its passes need besides parameters; see [`Layer::load`].
    pub fn load(&self) -> Result<()> {
        self.layer.load()
    }

    /// Estimates the memory besides the parameters; see [`Layer::footprint`].
    pub fn footprint(&self, shape: &PassShape) -> Footprint {
        self.layer.footprint(shape)
    }

    /// The shape of its output; see [`Layer::output_shape`].
    pub fn output_shape(&self, batch: &Batch, parallel: &TensorParallel) -> Option<Vec<i64>> {
        self.layer.output_shape(batch, parallel)
    }

    /// The collectives of its passes; see [`Layer::collectives`].
    pub fn collectives(&self, shape: &PassShape) -> InnerCollectives {
        match shape.tensor.size * shape.context.size() {
            1 => InnerCollectives::default(),
            _ => self.layer.collectives(shape, &|ending| {
                self.parameters.iter().any(|parameter| parameter.trainable && parameter.name.ends_with(ending))
            }),
        }
    }

    /// See [`Layer::num_experts`].
    pub fn num_experts(&self) -> usize {
        self.layer.num_experts()
    }

    /// See [`Layer::router_bias_update_rate`].
    pub fn router_bias_update_rate(&self) -> f64 {
        self.layer.router_bias_update_rate()
    }

    /// See [`Layer::gradients_are_dense`].
    pub fn gradients_are_dense(&self) -> bool {
        self.layer.gradients_are_dense()
    }

    /// See [`Layer::forward_computes_gradients`].
    pub fn forward_computes_gradients(&self) -> bool {
        self.layer.forward_computes_gradients()
    }

    /// See [`Layer::backward_reads_parameters`].
    pub fn backward_reads_parameters(&self) -> bool {
        self.layer.backward_reads_parameters()
    }

    /// The number of elements of its own parameters.
    pub fn elements(&self) -> usize {
        self.parameters.iter().map(Parameter::elements).sum()
    }

    /// Computes the output. `tensors` are the unit's own parameters, as [`Parameter::kept_slice`] divides them; `tied` is the
    /// parameter of an earlier unit, if it uses one. See [`Layer::forward`].
    pub fn forward(
        &self,
        tensors: &[Tensor],
        tied: Option<&Tensor>,
        input: Option<&Tensor>,
        batch: &Batch,
        pass: &Pass,
    ) -> Result<Tensor> {
        let given = self.given(tensors, tied, &pass.parallel)?;
        self.layer.forward(&Parameters { deferred: pass.deferred.as_ref(), ..given }, input, batch, pass)
    }

    /// The logits of every position; `None` for all units but the head.
    pub fn logits(
        &self,
        tensors: &[Tensor],
        tied: Option<&Tensor>,
        input: &Tensor,
        parallel: &TensorParallel,
    ) -> Result<Option<Tensor>> {
        self.layer.logits(&self.given(tensors, tied, parallel)?, input, parallel)
    }

    /// Computes the output for new positions under `no_grad`, and adds them to `cache`; see [`Layer::extend`]. Every sequence
    /// is one document.
    pub fn extend(
        &self,
        tensors: &[Tensor],
        tied: Option<&Tensor>,
        input: Option<&Tensor>,
        tokens: &Tensor,
        cache: &mut Cache,
        pass: &Pass,
    ) -> Result<Tensor> {
        no_grad(|| self.layer.extend(&self.given(tensors, tied, &pass.parallel)?, input, tokens, cache, pass))
    }

    fn check(&self, before: &[Unit]) -> std::result::Result<(), String> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if self.name.is_empty() || self.name.starts_with('.') || !self.name.chars().all(plain) {
            let rule = "use letters, digits, '.', '_' and '-', and do not start with '.'";
            return Err(format!("{:?} is not a valid unit name: {rule}", self.name));
        }
        for Parameter { name, shape, .. } in &self.parameters {
            if name.is_empty() || name.contains('/') {
                return Err(format!(
                    "{}: {name:?} is not a valid parameter name: it must not be empty or contain '/'",
                    self.name
                ));
            }
            if shape.iter().any(|&size| size < 1) {
                return Err(format!("{}: the shape of '{name}' is {shape:?}, which has no elements", self.name));
            }
        }
        let owned = |tied: Tied| before.get(tied.unit).is_some_and(|unit| tied.parameter < unit.parameters.len());
        match self.tied {
            Some(tied) if !owned(tied) => {
                Err(format!("{}: it is tied to {tied:?}, which no earlier unit has", self.name))
            }
            _ => Ok(()),
        }
    }

    fn given<'a>(
        &'a self,
        tensors: &'a [Tensor],
        tied: Option<&'a Tensor>,
        parallel: &TensorParallel,
    ) -> Result<Parameters<'a>> {
        assert_eq!(tensors.len(), self.parameters.len(), "{} is given all of its parameters", self.name);
        assert_eq!(tied.is_some(), self.tied.is_some(), "{} is given what it shares", self.name);
        let place = Place { size: parallel.size(), index: parallel.rank() };
        let narrow = |(parameter, tensor): (&Parameter, &Tensor)| {
            parameter.used_slice(place).map(|slice| cut(tensor, &slice)).transpose()
        };
        let narrowed = self.parameters.iter().zip(tensors).map(narrow).collect::<Result<_>>()?;
        Ok(Parameters { declared: &self.parameters, tensors, narrowed, tied, deferred: None })
    }
}

impl Model {
    /// Chains units into a model. The first one reads the batch, the last one returns the loss.
    pub fn new(units: Vec<Unit>) -> Result<Self> {
        let model = Model { units, is_built_in: false, package: None };
        model.check().map_err(|problem| Error::Config { key: "units", problem })?;
        Ok(model)
    }

    /// Marks a model that was built from a configuration.
    pub(crate) fn built_in(self) -> Self {
        Model { is_built_in: true, ..self }
    }

    /// Whether it is one of this crate's models, and not a custom one.
    pub fn is_built_in(&self) -> bool {
        self.is_built_in
    }

    /// Remembers the compiled package that the model was built from.
    pub(crate) fn with_package(self, package: Arc<Package>) -> Self {
        Model { package: Some(package), ..self }
    }

    /// The compiled package that it was built from, if any.
    pub fn package(&self) -> Option<&Package> {
        self.package.as_deref()
    }

    /// Fails if the model has no logits, and so cannot generate.
    pub fn check_logits(&self) -> Result<()> {
        let problem = "a compiled model computes losses, and has no logits to generate from: export the checkpoint (shardwise \
                       checkpoint export), and generate with Hugging Face";
        match self.package {
            Some(_) => Err(Error::Config { key: "package", problem: problem.to_string() }),
            None => Ok(()),
        }
    }

    /// Checks that the layers can be shared by this many ranks.
    pub fn check_tensor_parallel(&self, ranks: usize) -> Result<()> {
        self.units.iter().try_for_each(|unit| unit.layer.check_tensor_parallel(ranks))?;
        if let Some(package) = &self.package {
            let config = ModelConfig::Compiled(package.clone());
            config.check_tensor_parallel(ranks)?;
        }
        for unit in self.units.iter().filter(|_| ranks > 1) {
            for parameter in &unit.parameters {
                parameter.placement.check(&parameter.sizes(), ranks).map_err(|problem| {
                    let problem = format!("{} of unit {}: {problem}", parameter.name, unit.name);
                    Error::Config { key: "tensor parallelism", problem }
                })?;
            }
        }
        Ok(())
    }

    /// Checks that the experts of every layer can be divided among this many ranks.
    pub fn check_expert_parallel(&self, place: LayerPlace) -> Result<()> {
        let refuse = |problem: String| Err(Error::Config { key: "expert parallelism", problem });
        let ranks = place.expert.size;
        if ranks == 1 {
            return Ok(());
        }
        let parameters =
            || self.units.iter().flat_map(|unit| &unit.parameters).filter(|parameter| parameter.is_per_expert);
        if parameters().next().is_none() {
            return refuse(format!("the model has no experts to divide among {ranks} ranks"));
        }
        for parameter in parameters() {
            let experts = parameter.sizes()[0];
            if !experts.is_multiple_of(ranks) {
                let works = most_equal_parts(experts, ranks);
                return refuse(format!(
                    "{ranks} ranks cannot hold equally many of the {experts} experts of {}; {works} would work",
                    parameter.name
                ));
            }
            if parameter.is_replicated(place.tensor) {
                return refuse(format!("{}: tensor parallelism must split it", parameter.name));
            }
        }
        Ok(())
    }

    /// Checks the names, which checkpoints use for files and tensors: they must be valid and unique.
    fn check(&self) -> std::result::Result<(), String> {
        if self.units.is_empty() {
            return Err("a model needs at least one".to_string());
        }
        if let Some(name) = repeated(self.units.iter().map(Unit::name)) {
            return Err(format!("two are named '{name}'; use unique names"));
        }
        let parameters = self.units.iter().flat_map(|unit| &unit.parameters);
        if let Some(name) = repeated(parameters.map(|parameter| parameter.name.as_str())) {
            return Err(format!("two parameters are named '{name}'; use unique names"));
        }
        self.units.iter().enumerate().try_for_each(|(index, unit)| unit.check(&self.units[..index]))
    }

    /// Freezes parameters whose names start with one of `prefixes`. Each prefix must match at least one.
    pub fn freeze<P: AsRef<str>>(&mut self, prefixes: &[P]) -> Result<()> {
        let parameters = self.units.iter().flat_map(|unit| &unit.parameters);
        check_frozen_prefixes(parameters.map(|parameter| parameter.name.as_str()), prefixes)?;
        for parameter in self.units.iter_mut().flat_map(|unit| &mut unit.parameters) {
            if prefixes.iter().any(|prefix| parameter.name.starts_with(prefix.as_ref())) {
                parameter.trainable = false;
            }
        }
        Ok(())
    }

    /// The units, in order.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The maximum sequence length, if there is one.
    pub fn max_positions(&self) -> Option<usize> {
        self.units.iter().filter_map(|unit| unit.layer.max_positions()).min()
    }

    /// The FLOPs per token of a forward and a backward pass, averaged over a sequence of `positions` positions: those of matrix
    /// products and of causal attention. Recomputed activations are not counted, and neither are gradients of frozen parameters.
    pub fn flops_per_token(&self, positions: usize) -> f64 {
        self.unit_flops_per_token(positions).into_iter().sum()
    }

    /// The same for each unit.
    pub fn unit_flops_per_token(&self, positions: usize) -> Vec<f64> {
        let is_trained = |unit: &Unit| unit.parameters.iter().any(|parameter| parameter.trainable);
        let first_trained = self.units.iter().position(is_trained).unwrap_or(self.units.len());
        let flops_of = |(index, unit): (usize, &Unit)| {
            let tied = unit.tied.map(|tied| &self.units[tied.unit].parameters[tied.parameter]);
            // An embedding looks up rows of its table, and multiplies nothing.
            let own = unit.parameters.iter().filter(|_| unit.backward_reads_parameters());
            // The gradient of each factor costs as much as the product itself.
            let of_input = f64::from(u8::from(index > first_trained));
            let product = |parameter: &Parameter| {
                let active = parameter.active_share? * parameter.elements() as f64;
                let of_parameter = f64::from(u8::from(parameter.trainable));
                Some(2. * active * (1. + of_input + of_parameter))
            };
            let both_factors = if index >= first_trained { 2. } else { 0. };
            own.chain(tied).filter_map(product).sum::<f64>()
                + unit.layer.attention_flops(positions) * (1. + both_factors)
        };
        self.units.iter().enumerate().map(flops_of).collect()
    }

    /// The number of elements of all parameters. A tied parameter is counted once.
    pub fn elements(&self) -> usize {
        self.units.iter().map(Unit::elements).sum()
    }
}

/// The first name that occurs a second time, if any.
fn repeated<'a>(mut names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut seen = HashSet::new();
    names.find(|name| !seen.insert(*name))
}

/// Looks up the embeddings of tokens. On the CPU the gradient of the table is sparse (PyTorch: `Embedding(sparse=True)`): it has
/// one row for each token of the batch, where a dense one has a row of zeros for every other token of the vocabulary. On other
/// devices it is dense, because adding rows in parallel gives different bits each time.
///
/// The ranks that share the table each look up the tokens of their own rows, and sum the results.
pub(crate) fn embed(table: &Tensor, tokens: &Tensor, vocab_size: usize, parallel: &TensorParallel) -> Result<Tensor> {
    let look_up = |tokens: &Tensor| Tensor::f_embedding(table, tokens, -1, false, table.device() == Device::Cpu);
    if parallel.size() == 1 {
        return Ok(look_up(tokens)?);
    }
    let own = Partition::new(vocab_size, parallel.size()).range(parallel.rank());
    let is_others = tokens.f_lt(own.start as i64)?.f_logical_or(&tokens.f_ge(own.end as i64)?)?;
    let rows = tokens.f_sub_scalar(own.start as i64)?.f_masked_fill(&is_others, 0)?;
    parallel.leave(&look_up(&rows)?.f_masked_fill(&is_others.f_unsqueeze(-1)?, 0)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activations, Init};

    struct Nothing;

    impl Layer for Nothing {
        fn forward(&self, _: &Parameters<'_>, _: Option<&Tensor>, _: &Batch, _: &Pass) -> Result<Tensor> {
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
        assert!(refused(vec![]).contains("at least one"));
        assert!(refused(vec![unit("a", &["w"]), unit("a", &["v"])]).contains("two are named 'a'"));
        assert!(refused(vec![unit("a", &["w"]), unit("b", &["w"])]).contains("two parameters are named 'w'"));
        for name in ["", "../up", ".hidden", "a b"] {
            assert!(refused(vec![unit(name, &[])]).contains("is not a valid unit name"), "{name:?}");
        }
        assert!(refused(vec![unit("a", &["w/x"])]).contains("\"w/x\" is not a valid parameter name"));
        let empty = Unit::new("a", vec![Parameter::vector("w", 0, Init::Ones)], Nothing);
        assert!(refused(vec![empty]).contains("has no elements"));
        assert!(refused(vec![unit("a", &["w"]).with_tied(tied(0))]).contains("which no earlier unit has"));
    }

    #[test]
    fn a_layer_that_only_trains_cannot_generate() {
        let unit = unit("head", &[]);
        let tokens = Tensor::from_slice(&[1i64]).view([1, 1]);
        let error = unit
            .extend(&[], None, None, &tokens, &mut Cache::new(), &Pass::new(Activations::All))
            .err()
            .map(|error| error.to_string());
        assert!(error.is_some_and(|error| error.contains("give its layer an `extend`")));
    }
}
