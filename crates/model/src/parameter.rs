//! Parameters as a model declares them: names, shapes, initial values, and how ranks that share a layer divide them.

use shardwise_plan::program::Place;
use shardwise_plan::{LayerPlace, Slice, TensorPlacement};

/// A parameter as the model declares it.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its name in a Hugging Face checkpoint.
    pub name: String,
    /// Its shape in that checkpoint.
    pub shape: Vec<i64>,
    /// Its initial values.
    pub init: Init,
    /// Whether weight decay applies: to matrices, not to norms and biases.
    pub decays: bool,
    /// Whether it is trained; see [`Model::freeze`](crate::Model::freeze).
    pub trainable: bool,
    /// How it is placed on the ranks that share the layer.
    pub placement: TensorPlacement,
    /// Whether its first dimension is the expert, so that expert parallelism divides it.
    pub is_per_expert: bool,
    /// The share of its elements that a token is multiplied with: all of a matrix, and of the matrices of all experts those that the token
    /// has chosen. `None` if it is not multiplied with.
    pub active_share: Option<f64>,
}

/// The initial values of a parameter.
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
    /// Values that follow no plain distribution, and must be read from a file.
    Weights,
}

impl Parameter {
    /// Creates a trainable parameter. Weight decay applies if it has more than one dimension. All ranks that share the layer have
    /// all of it; see [`Parameter::placed`].
    pub fn new(name: impl Into<String>, shape: &[usize], init: Init) -> Self {
        let dimensions = shape.iter().map(|&size| size as i64).collect();
        Parameter {
            name: name.into(),
            shape: dimensions,
            init,
            decays: shape.len() > 1,
            trainable: true,
            placement: TensorPlacement::Replicated,
            is_per_expert: false,
            active_share: (shape.len() == 2).then_some(1.),
        }
    }

    /// Places the parameter on the ranks that share the layer.
    #[must_use]
    pub fn placed(self, placement: TensorPlacement) -> Self {
        Parameter { placement, ..self }
    }

    /// Declares that its first dimension is the expert, and that a token is multiplied with this share of the experts.
    #[must_use]
    pub fn per_expert(self, active_share: f64) -> Self {
        Parameter { is_per_expert: true, active_share: Some(active_share), ..self }
    }

    /// Creates a matrix with normally distributed initial values and weight decay.
    pub fn matrix(name: impl Into<String>, shape: [usize; 2], std: f64) -> Self {
        Parameter::new(name, &shape, Init::Normal { std })
    }

    /// Creates a vector without weight decay.
    pub fn vector(name: impl Into<String>, len: usize, init: Init) -> Self {
        Parameter::new(name, &[len], init)
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }

    /// The shape, as sizes.
    pub fn sizes(&self) -> Vec<usize> {
        self.shape.iter().map(|&size| size as usize).collect()
    }

    /// The part of it that a rank keeps; `None` for all of it. Parts that several ranks need are kept by all of them, as a whole.
    pub fn kept_slice(&self, place: LayerPlace) -> Option<Slice> {
        let split = self.split_slice(place.tensor, true);
        if !self.is_divided_by_expert(place) {
            return split;
        }
        let experts = Slice::of_experts(&self.sizes(), place.expert);
        match split {
            Some(split) => Some(split.with_experts(experts.ranges[0].clone())),
            None => Some(experts),
        }
    }

    /// Whether ranks hold different experts of it.
    pub fn is_divided_by_expert(&self, place: LayerPlace) -> bool {
        self.is_per_expert && place.expert.size > 1
    }

    /// The part of what a rank keeps that it computes with; `None` for all of it.
    pub(crate) fn used_slice(&self, tensor: Place) -> Option<Slice> {
        self.split_slice(tensor, false)
    }

    fn split_slice(&self, tensor: Place, disjoint: bool) -> Option<Slice> {
        match self.placement {
            TensorPlacement::Split(split) if tensor.size > 1 && split.is_disjoint(tensor.size) == disjoint => {
                Some(split.slice(&self.sizes(), tensor.index, tensor.size))
            }
            _ => None,
        }
    }

    /// The shape of what a rank keeps.
    pub fn kept_shape(&self, place: LayerPlace) -> Vec<i64> {
        match self.kept_slice(place) {
            Some(slice) => slice.shape(&self.sizes()).into_iter().map(|size| size as i64).collect(),
            None => self.shape.clone(),
        }
    }

    /// The number of elements that a rank keeps.
    pub fn kept_elements(&self, place: LayerPlace) -> usize {
        self.kept_shape(place).iter().product::<i64>() as usize
    }

    /// Whether all ranks that share the layer keep all of it.
    pub fn is_replicated(&self, tensor: Place) -> bool {
        tensor.size > 1 && self.split_slice(tensor, true).is_none()
    }

    /// Whether all ranks that share the layer compute the same gradient of it, instead of parts of a sum.
    pub fn has_same_gradient(&self, splits_sequence: bool) -> bool {
        match self.placement {
            TensorPlacement::Replicated => !splits_sequence,
            TensorPlacement::ReplicatedWhole => true,
            TensorPlacement::ReplicatedInside | TensorPlacement::Split(_) => false,
        }
    }
}
