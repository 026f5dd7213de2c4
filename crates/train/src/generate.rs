//! Autoregressive text generation on the ranks that train the model.
//!
//! Every unit has a key-value cache ([`Cache`]), so a token costs the work of one position. Units are gathered and released as in
//! the forward pass of training, so at stage 3 each token costs the traffic of a forward pass.
//!
//! All ranks of a pipeline stage compute the same thing: the same tokens, the same gathered parameters, the same kernels. So their logits are bitwise
//! identical, and since sampling is a function of the seed and the position, they sample the same token without communication.
//! This requires the same kind of processor on all hosts. Only the last stage of a pipeline has logits, so it tells the others which token it has
//! sampled, and so does the first rank if ranks hold different experts.

use std::ops::ControlFlow;

use shardwise_model::init::splitmix64;
use shardwise_model::{Batch, Cache};
use shardwise_torch::tch::{Kind, TchError, Tensor};

use crate::error::{Error, Result};
use crate::step::Trainer;

/// How tokens are sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The divisor of the logits; 0 always samples the most likely token and ignores the other settings.
    pub temperature: f64,
    /// Sample only among this many of the most likely tokens.
    pub top_k: Option<usize>,
    /// Sample only among the smallest set of most likely tokens whose probabilities, after `top_k`, add up to this.
    pub top_p: Option<f64>,
    /// The seed. Together with the position, it determines each random number.
    pub seed: u64,
}

impl Sampling {
    /// Always picks the most likely token.
    pub const GREEDY: Sampling = Sampling { temperature: 0., top_k: None, top_p: None, seed: 0 };

    fn check(&self) -> Result<()> {
        let refuse = |problem: String| Err(Error::Options(problem));
        if !(self.temperature >= 0. && self.temperature.is_finite()) {
            return refuse(format!("temperature: {} is not a number of at least 0", self.temperature));
        }
        if self.top_k == Some(0) {
            return refuse("top_k: 0 leaves no token to sample; use at least 1".to_string());
        }
        match self.top_p {
            Some(share) if !(share > 0. && share <= 1.) => {
                refuse(format!("top_p: {share} is not above 0 and at most 1"))
            }
            _ => Ok(()),
        }
    }

    /// Samples the token at `position`.
    fn sample(&self, logits: &[f32], position: usize) -> Result<i64> {
        if let Some(token) = logits.iter().position(|logit| !logit.is_finite()) {
            let problem = format!("position {position}: the logit of token {token} is {}", logits[token]);
            return Err(Error::Options(problem));
        }
        // Ties go to the first token.
        let likelier = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        let mut tokens: Vec<usize> = (0..logits.len()).collect();
        let most = if self.temperature == 0. { 1 } else { self.top_k.unwrap_or(tokens.len()) };
        if most < tokens.len() {
            tokens.select_nth_unstable_by(most, likelier);
            tokens.truncate(most);
        }
        tokens.sort_unstable_by(likelier);
        if self.temperature == 0. {
            return Ok(tokens[0] as i64);
        }
        let largest = f64::from(logits[tokens[0]]);
        let weight = |token: &usize| ((f64::from(logits[*token]) - largest) / self.temperature).exp();
        // Cumulative weights.
        let mut sums: Vec<f64> = tokens.iter().map(weight).collect();
        (1..sums.len()).for_each(|index| sums[index] += sums[index - 1]);
        let among = |share: f64| {
            let enough = share * sums[sums.len() - 1];
            sums.partition_point(|&sum| sum < enough).min(sums.len() - 1)
        };
        let last = self.top_p.map_or(sums.len() - 1, among);
        let point = uniform(self.seed, position) * sums[last];
        let place = sums[..last].partition_point(|&sum| sum <= point);
        Ok(tokens[place] as i64)
    }
}

/// Continues `prompt` by at most `most` tokens, and calls `each` with every one. Stops before a token in `stop`, when `each`
/// returns `Break`, or when the model has no more positions.
///
/// All ranks call it together, with the same arguments, and with an `each` that returns the same on all of them.
pub fn generate(
    trainer: &mut Trainer,
    prompt: &[i64],
    most: usize,
    stop: &[i64],
    sampling: &Sampling,
    each: &mut dyn FnMut(i64) -> ControlFlow<()>,
) -> Result<Vec<i64>> {
    sampling.check()?;
    trainer.check_logits()?;
    let most = room(prompt.len(), trainer.model.max_positions())?.map_or(most, |room| most.min(room));
    let mut caches: Vec<Cache> = (0..trainer.shards.model_len()).map(|_| Cache::new()).collect();
    let mut generated = Vec::new();
    let mut new = prompt.to_vec();
    while generated.len() < most {
        let (logits, position) = (trainer.extend(&new, &mut caches)?, prompt.len() + generated.len());
        let token = trainer.share_token(logits.map(|logits| sampling.sample(&logits, position)), position)?;
        if stop.contains(&token) {
            break;
        }
        generated.push(token);
        if each(token).is_break() {
            break;
        }
        new = vec![token];
    }
    Ok(generated)
}

/// The number of tokens that the model can append to a prompt. The last one needs no position, because nothing is computed from it.
fn room(prompt: usize, positions: Option<usize>) -> Result<Option<usize>> {
    if prompt == 0 {
        return Err(Error::Options(
            "the prompt has no tokens; it needs at least one, such as a beginning-of-text token".into(),
        ));
    }
    match positions {
        Some(positions) if prompt > positions => Err(Error::Options(format!(
            "the prompt has {prompt} tokens, but the model has only {positions} positions; shorten the prompt"
        ))),
        positions => Ok(positions.map(|positions| positions - prompt + 1)),
    }
}

impl Trainer {
    /// Runs new tokens through the model, and returns the logits for the next token in f32, if this rank has the head.
    fn extend(&mut self, new: &[i64], caches: &mut [Cache]) -> Result<Option<Vec<f32>>> {
        let tokens = Tensor::from_slice(new).view([1, -1]).to_device(self.options.device);
        let (batch, parallel) = (Batch::new(tokens.shallow_clone(), tokens.shallow_clone()), self.parallel.clone());
        let logits = self.forward_no_grad(&batch, &parallel.with_whole_sequence(), |trainer, index, input| {
            let unit = &trainer.model.units()[index];
            let parameters = trainer.shards[index].parameters();
            let pass = trainer.inference_pass(index);
            unit.extend(parameters, trainer.tied(index), input, &tokens, &mut caches[index], &pass)
                .map_err(|error| Error::of_model(unit.name(), error))
        })?;
        let fail = |error: TchError| Error::Model { unit: "head".to_string(), error: error.into() };
        let read = logits.map(|logits| Vec::try_from(logits.to_kind(Kind::Float).view(-1)).map_err(fail)).transpose();
        // Only now is it known whether all collectives have succeeded.
        self.ranks.check().and(read)
    }
}

/// A pseudo-random number in [0, 1), determined by the seed and the position.
fn uniform(seed: u64, position: usize) -> f64 {
    (splitmix64(splitmix64(seed) ^ position as u64) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probabilities 0.1, 0.4, 0.3 and 0.2.
    fn logits() -> Vec<f32> {
        [0.1f32, 0.4, 0.3, 0.2].iter().map(|share| share.ln()).collect()
    }

    /// How often each token is sampled in ten thousand draws.
    fn counts(sampling: &Sampling) -> [i32; 4] {
        let mut counts = [0; 4];
        (0..10_000).for_each(|position| counts[sampling.sample(&logits(), position).unwrap() as usize] += 1);
        counts
    }

    fn assert_near(counts: [i32; 4], expected: [i32; 4]) {
        let near = |(a, b): (&i32, &i32)| if *b == 0 { *a == 0 } else { (a - b).abs() < 250 };
        assert!(counts.iter().zip(&expected).all(near), "{counts:?} instead of {expected:?}");
    }

    #[test]
    fn tokens_are_sampled_as_often_as_they_are_likely() {
        let plain = Sampling { temperature: 1., top_k: None, top_p: None, seed: 7 };
        assert_near(counts(&plain), [1000, 4000, 3000, 2000]);
        assert_near(counts(&Sampling { top_k: Some(2), ..plain }), [0, 5714, 4286, 0]);
        assert_near(counts(&Sampling { top_k: Some(9), ..plain }), [1000, 4000, 3000, 2000]);
        assert_near(counts(&Sampling { top_p: Some(0.65), ..plain }), [0, 5714, 4286, 0]);
        assert_near(counts(&Sampling { top_p: Some(0.75), ..plain }), [0, 4444, 3333, 2222]);
        assert_near(counts(&Sampling { top_p: Some(1e-9), ..plain }), [0, 10_000, 0, 0]);
        // Of the two tokens that top_k leaves, the likelier one alone reaches top_p.
        assert_near(counts(&Sampling { top_k: Some(2), top_p: Some(0.57), ..plain }), [0, 10_000, 0, 0]);
        // Proportional to the squares of the probabilities.
        assert_near(counts(&Sampling { temperature: 0.5, ..plain }), [333, 5333, 3000, 1333]);
        assert_near(counts(&Sampling::GREEDY), [0, 10_000, 0, 0]);
    }

    #[test]
    fn ties_go_to_the_first_token() {
        assert_eq!(Sampling::GREEDY.sample(&[1., 2., 0., 2.], 0).unwrap(), 1);
    }

    #[test]
    fn invalid_settings_are_explained() {
        let message = |sampling: Sampling| sampling.check().unwrap_err().to_string();
        let plain = Sampling { temperature: 1., ..Sampling::GREEDY };
        assert_eq!(message(Sampling { temperature: -1., ..plain }), "temperature: -1 is not a number of at least 0");
        assert!(message(Sampling { top_k: Some(0), ..plain }).contains("top_k: 0 leaves no token"));
        assert_eq!(message(Sampling { top_p: Some(1.5), ..plain }), "top_p: 1.5 is not above 0 and at most 1");
        let error = plain.sample(&[0., f32::NAN], 3).unwrap_err();
        assert_eq!(error.to_string(), "position 3: the logit of token 1 is NaN");
    }
}
