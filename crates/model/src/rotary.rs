//! Rotary position embeddings.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use shardwise_plan::{LlamaConfig, rotary_frequencies};
use shardwise_torch::tch::{Device, Kind, Tensor};

use crate::Result;

/// The rotary tables that were used last, which all blocks of a model share. The passes of a step all have the same positions: without
/// this, every block would compute the tables again, and copy the frequencies to its device, for which the host waits.
#[derive(Debug, Default)]
pub(crate) struct RotaryTables(Mutex<Option<(Key, Rope)>>);

/// The positions, type and device of tables.
type Key = (Positions, Kind, Device);

/// The positions of tables.
#[derive(Clone, Debug)]
pub(crate) enum Positions {
    /// Consecutive ones.
    Range(Range<i64>),
    /// Those of a rank that has a part of each sequence: of one sequence, or of several one after the other.
    Of { positions: Arc<[i64]>, per_sequence: usize, sequence_len: usize },
}

impl Positions {
    /// The number of positions of a whole sequence.
    fn sequence_len(&self) -> usize {
        match self {
            Positions::Range(range) => range.end as usize,
            Positions::Of { sequence_len, .. } => *sequence_len,
        }
    }
}

impl PartialEq for Positions {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Positions::Range(one), Positions::Range(other)) => one == other,
            (Positions::Of { positions: one, .. }, Positions::Of { positions: other, .. }) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl RotaryTables {
    pub(crate) fn get(&self, config: &LlamaConfig, positions: Positions, kind: Kind, device: Device) -> Result<Rope> {
        let key = (positions, kind, device);
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, rope)) = &*last
            && *known == key
        {
            return Ok(rope.shallow_clone());
        }
        let rope = Rope::new(config, &key.0, kind, device)?;
        *last = Some((key, rope.shallow_clone()));
        Ok(rope)
    }
}

/// The rotary position embedding: pairs of elements of a head, one from each half, rotated by an angle that grows with position.
#[derive(Debug)]
pub(crate) struct Rope {
    cosines: Tensor,
    sines: Tensor,
}

impl Rope {
    fn shallow_clone(&self) -> Rope {
        Rope { cosines: self.cosines.shallow_clone(), sines: self.sines.shallow_clone() }
    }

    fn new(config: &LlamaConfig, positions: &Positions, kind: Kind, device: Device) -> Result<Self> {
        let LlamaConfig { rope_theta, head_dim, rope_scaling, .. } = *config;
        let frequencies = rotary_frequencies(rope_theta, head_dim, rope_scaling, positions.sequence_len());
        // Angles are f32, as in the original code of the models, unless everything is f64.
        let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
        let frequencies = Tensor::f_from_slice(&frequencies)?.f_to_kind(wide)?.to_device(device);
        let angles = match positions {
            Positions::Range(range) => {
                Tensor::f_arange_start(range.start, range.end, (wide, device))?.f_outer(&frequencies)?
            }
            Positions::Of { positions, per_sequence, .. } => {
                let positions = Tensor::f_from_slice(positions)?.f_to_kind(wide)?.to_device(device);
                positions.f_outer(&frequencies)?.f_view([-1, 1, *per_sequence as i64, frequencies.size()[0]])?
            }
        };
        let angles = Tensor::f_cat(&[&angles, &angles], -1)?;
        let factor = rope_scaling.map_or(1., |scaling| scaling.attention_factor());
        let table = |values: Tensor| if factor == 1. { Ok(values) } else { values.f_mul_scalar(factor) };
        Ok(Rope { cosines: table(angles.f_cos()?)?.to_kind(kind), sines: table(angles.f_sin()?)?.to_kind(kind) })
    }

    pub(crate) fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let half = x.size()[3] / 2;
        let rotated = Tensor::f_cat(&[x.f_narrow(3, half, half)?.f_neg()?, x.f_narrow(3, 0, half)?], -1)?;
        Ok(x.f_mul(&self.cosines)?.f_add(&rotated.f_mul(&self.sines)?)?)
    }
}
