//! Scalings of the rotary embedding for contexts that are longer than those of the original training.
//!
//! The embedding rotates pairs of elements of a head by an angle that grows with position. Scaling slows down the rotation of all pairs, or
//! only of those that rotate slowly (low frequencies), so that positions beyond the original context get angles that the model has seen.

use std::f64::consts::PI;

use crate::ConfigError;

/// How the rotary embedding is scaled. Names are those of Hugging Face's `rope_scaling`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// All rotations are slower by a factor: position interpolation.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// The base of the wavelengths grows with the length of the sequence beyond the original context: NTK-aware scaling, which transformers
    /// calls "dynamic".
    Dynamic {
        /// How fast it grows.
        factor: f64,
        /// The context length of the original training.
        max_position_embeddings: usize,
    },
    /// YaRN: slow rotations are slower by a factor, fast ones are as before, and attention is sharper.
    Yarn(YarnRope),
    /// That of Llama 3.1 and later.
    Llama3(Llama3Rope),
}

/// The settings of YaRN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct YarnRope {
    /// The factor by which slow rotations are slower.
    pub factor: f64,
    /// The context length of the original training.
    pub original_max_position_embeddings: usize,
    /// The factor on sines and cosines, and thereby, squared, on what attention is computed from.
    pub attention_factor: f64,
    /// Pairs with at least this many rotations in the original context rotate as before.
    pub beta_fast: f64,
    /// Pairs with at most this many rotations in the original context are slower by the full factor.
    pub beta_slow: f64,
    /// Whether the range of pairs in between begins and ends at whole pairs.
    pub truncate: bool,
}

/// The settings of Llama 3.1's scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Rope {
    /// The factor by which long wavelengths are stretched.
    pub factor: f64,
    /// Wavelengths longer than the original context divided by this are stretched by the full factor.
    pub low_freq_factor: f64,
    /// Wavelengths shorter than the original context divided by this are not stretched.
    pub high_freq_factor: f64,
    /// The context length of the original training.
    pub original_max_position_embeddings: usize,
}

impl YarnRope {
    /// The settings of the paper, for a factor.
    pub fn new(factor: f64, original_max_position_embeddings: usize) -> Self {
        YarnRope {
            factor,
            original_max_position_embeddings,
            attention_factor: YarnRope::sharpness(factor, 1.),
            beta_fast: 32.,
            beta_slow: 1.,
            truncate: true,
        }
    }

    /// The attention factor that the paper proposes, with a weight (transformers: `mscale`).
    pub fn sharpness(factor: f64, weight: f64) -> f64 {
        if factor <= 1. { 1. } else { 0.1 * weight * factor.ln() + 1. }
    }

    /// The pair with this many rotations in the original context.
    fn pair_with(&self, rotations: f64, head_dim: usize, theta: f64) -> f64 {
        let context = self.original_max_position_embeddings as f64;
        head_dim as f64 * (context / (rotations * 2. * PI)).ln() / (2. * theta.ln())
    }

    /// How much a pair keeps of its original rotation, from 0 to 1.
    fn kept(&self, pair: usize, head_dim: usize, theta: f64) -> f64 {
        let (mut first, mut last) =
            (self.pair_with(self.beta_fast, head_dim, theta), self.pair_with(self.beta_slow, head_dim, theta));
        if self.truncate {
            (first, last) = (first.floor(), last.ceil());
        }
        (first, last) = (first.max(0.), last.min(head_dim as f64 - 1.));
        let length = if first == last { 0.001 } else { last - first };
        1. - ((pair as f64 - first) / length).clamp(0., 1.)
    }
}

impl Llama3Rope {
    fn stretch(&self, frequency: f64) -> f64 {
        let wavelength = 2. * PI / frequency;
        let context = self.original_max_position_embeddings as f64;
        if wavelength < context / self.high_freq_factor {
            frequency
        } else if wavelength > context / self.low_freq_factor {
            frequency / self.factor
        } else {
            let smooth = (context / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
            (1. - smooth) * frequency / self.factor + smooth * frequency
        }
    }
}

impl RopeScaling {
    /// The factor on sines and cosines.
    pub fn attention_factor(&self) -> f64 {
        match self {
            RopeScaling::Yarn(yarn) => yarn.attention_factor,
            RopeScaling::Linear { .. } | RopeScaling::Dynamic { .. } | RopeScaling::Llama3(_) => 1.,
        }
    }

    /// The base of the wavelengths, in a sequence of this many positions.
    fn base(&self, theta: f64, head_dim: usize, positions: usize) -> f64 {
        let RopeScaling::Dynamic { factor, max_position_embeddings } = *self else { return theta };
        let (original, head_dim) = (max_position_embeddings as f64, head_dim as f64);
        let longer = (positions as f64).max(original) / original;
        theta * (factor * longer - (factor - 1.)).powf(head_dim / (head_dim - 2.))
    }

    /// Fails if a setting makes no sense.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let (factor, context) = match *self {
            RopeScaling::Linear { factor } => (factor, 1),
            RopeScaling::Dynamic { factor, max_position_embeddings } => (factor, max_position_embeddings),
            RopeScaling::Yarn(YarnRope { factor, original_max_position_embeddings, .. })
            | RopeScaling::Llama3(Llama3Rope { factor, original_max_position_embeddings, .. }) => {
                (factor, original_max_position_embeddings)
            }
        };
        let wrong = |problem: String| Err(ConfigError { key: "rope_scaling", problem });
        if !(factor >= 1. && factor.is_finite()) {
            return wrong(format!("factor is {factor}, but must be at least 1"));
        }
        if context == 0 {
            return wrong("the original context has 0 positions".to_string());
        }
        Ok(())
    }
}

/// The angle by which each pair of elements of a head rotates per position, in a sequence of this many positions.
pub fn rotary_frequencies(theta: f64, head_dim: usize, scaling: Option<RopeScaling>, positions: usize) -> Vec<f64> {
    let base = scaling.map_or(theta, |scaling| scaling.base(theta, head_dim, positions));
    let frequency = |pair: usize| {
        let frequency = base.powf(-2. * pair as f64 / head_dim as f64);
        match scaling {
            None | Some(RopeScaling::Dynamic { .. }) => frequency,
            Some(RopeScaling::Linear { factor }) => frequency / factor,
            Some(RopeScaling::Yarn(yarn)) => {
                let kept = yarn.kept(pair, head_dim, theta);
                frequency / yarn.factor * (1. - kept) + frequency * kept
            }
            Some(RopeScaling::Llama3(llama)) => llama.stretch(frequency),
        }
    };
    (0..head_dim / 2).map(frequency).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_rotations_stay_and_slow_ones_are_slower_by_the_factor() {
        let [plain, linear, yarn, llama] = [
            None,
            Some(RopeScaling::Linear { factor: 8. }),
            Some(RopeScaling::Yarn(YarnRope::new(8., 4096))),
            Some(RopeScaling::Llama3(Llama3Rope {
                factor: 8.,
                low_freq_factor: 1.,
                high_freq_factor: 4.,
                original_max_position_embeddings: 4096,
            })),
        ]
        .map(|scaling| rotary_frequencies(10_000., 128, scaling, 32_768));
        let last = plain.len() - 1;
        assert!(linear.iter().zip(&plain).all(|(scaled, plain)| *scaled == plain / 8.));
        for scaled in [yarn, llama] {
            assert_eq!((scaled[0], scaled[last]), (plain[0], plain[last] / 8.));
            assert!(scaled.is_sorted_by(|a, b| a > b));
        }
        // transformers: 0.1 · ln 8 + 1.
        assert!((RopeScaling::Yarn(YarnRope::new(8., 4096)).attention_factor() - 1.2079441541679836).abs() < 1e-15);
    }

    #[test]
    fn a_dynamic_base_grows_beyond_the_original_context_only() {
        let scaling = Some(RopeScaling::Dynamic { factor: 2., max_position_embeddings: 1000 });
        let slowest = |positions: usize| *rotary_frequencies(10_000., 64, scaling, positions).last().unwrap_or(&0.);
        let plain = *rotary_frequencies(10_000., 64, None, 1).last().unwrap_or(&0.);
        assert_eq!((slowest(10), slowest(1000)), (plain, plain));
        assert!(slowest(1001) < plain);
        // The slowest pair rotates as much at the end as at the end of the original context, times factor − 1 + 1/…: 2·2 − 1 = 3 times slower.
        assert!((slowest(2000) * 3. - plain).abs() < 1e-12);
    }
}
