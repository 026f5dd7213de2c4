//! The bias that balances experts without a loss.

use std::cmp::Ordering;

use shardwise_torch::tch::{Device, Tensor};

use crate::Result;

/// What is added to the scores of a layer's experts when tokens choose (DeepSeek-V3: `e_score_correction_bias`).
pub struct ExpertBias {
    biases: Vec<f32>,
    on_device: Tensor,
}

impl Clone for ExpertBias {
    fn clone(&self) -> Self {
        ExpertBias { biases: self.biases.clone(), on_device: self.on_device.shallow_clone() }
    }
}

impl ExpertBias {
    /// The bias of each expert, on a device.
    pub fn new(biases: Vec<f32>, device: Device) -> Result<Self> {
        let on_device = Tensor::f_from_slice(&biases)?.f_to_device(device)?;
        Ok(ExpertBias { biases, on_device })
    }

    /// The bias of each expert.
    pub fn biases(&self) -> &[f32] {
        &self.biases
    }

    pub(crate) fn on_device(&self) -> &Tensor {
        &self.on_device
    }

    /// The bias after a step in which experts got this many tokens: higher by `rate` for those with fewer than the mean, lower for those
    /// with more.
    pub fn update(&self, expert_tokens: &[u64], rate: f64) -> Result<Self> {
        // Compared as whole numbers, so that all ranks find the same.
        let (experts, all) = (expert_tokens.len() as u64, expert_tokens.iter().sum::<u64>());
        let direction = |&tokens: &u64| match (tokens * experts).cmp(&all) {
            Ordering::Less => 1.,
            Ordering::Equal => 0.,
            Ordering::Greater => -1.,
        };
        let updated = |(bias, tokens)| bias + direction(tokens) * rate as f32;
        ExpertBias::new(self.biases.iter().zip(expert_tokens).map(updated).collect(), self.on_device.device())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn experts_with_fewer_tokens_than_the_mean_get_a_higher_bias() {
        let bias = ExpertBias::new(vec![0., 1., 2., 3.], Device::Cpu).unwrap();
        let updated = bias.update(&[4, 5, 3, 4], 0.5).unwrap();
        assert_eq!(updated.biases(), [0., 0.5, 2.5, 3.]);
        // The mean is 1/3, which must not be rounded.
        let equal = ExpertBias::new(vec![0.; 3], Device::Cpu).unwrap().update(&[1, 0, 0], 1.).unwrap();
        assert_eq!(equal.biases(), [-1., 1., 1.]);
    }
}
