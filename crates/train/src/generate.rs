//! Text from a model, token by token, on the ranks that train it.
//!
//! Every unit remembers the positions that it has seen ([`Cache`]), so a token costs one position's work. Units are gathered
//! and released as in the forward pass, at any stage; at stage 3 a token therefore costs the traffic of a forward pass.
//!
//! All ranks compute the same: the same tokens, the same whole parameters, the same kernels. So they have the same logits to
//! the last bit, and since chance is a function of the seed and the position, they pick the same token without a word
//! between them. That holds as long as their machines have the same kind of processor.

use std::ops::ControlFlow;

use shardwise_model::Cache;
use shardwise_model::init::mixed;
use shardwise_torch::tch::{Kind, TchError, Tensor};

use crate::{Error, Result, Trainer};

/// How a token is picked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// What logits are divided by; 0 picks the likeliest token, whatever else is said here.
    pub temperature: f64,
    /// Pick among so many of the likeliest.
    pub top_k: Option<usize>,
    /// Pick among the fewest likeliest whose probabilities, after `top_k`, add up to this.
    pub top_p: Option<f64>,
    /// What chance depends on, with the position.
    pub seed: u64,
}

impl Sampling {
    /// The likeliest token, always.
    pub const GREEDY: Sampling = Sampling { temperature: 0., top_k: None, top_p: None, seed: 0 };

    fn check(&self) -> Result<()> {
        let refuse = |problem: String| Err(Error::Options(problem));
        if !(self.temperature >= 0. && self.temperature.is_finite()) {
            return refuse(format!("temperature: {} is not a number from 0", self.temperature));
        }
        if self.top_k == Some(0) {
            return refuse("top_k: is 0, and a token must be picked; use at least 1".to_string());
        }
        match self.top_p {
            Some(share) if !(share > 0. && share <= 1.) => {
                refuse(format!("top_p: {share} is not above 0 and at most 1"))
            }
            _ => Ok(()),
        }
    }

    /// The token at `position`, by what the model says of each.
    fn pick(&self, logits: &[f32], position: usize) -> Result<i64> {
        if let Some(token) = logits.iter().position(|logit| !logit.is_finite()) {
            let problem = format!("position {position}: the logit of token {token} is {}", logits[token]);
            return Err(Error::Options(problem));
        }
        // Of equals the first.
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
        // Up to each token, itself included.
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

/// Continues `prompt` by `most` tokens, or fewer: until it would continue with one of `stop`, which is not part of the
/// result; until `each`, which is shown every token, says to break; or until the model has no more positions.
///
/// All ranks call it together, with the same arguments, and with an `each` that says the same on all of them.
pub fn generate(
    trainer: &mut Trainer,
    prompt: &[i64],
    most: usize,
    stop: &[i64],
    sampling: &Sampling,
    each: &mut dyn FnMut(i64) -> ControlFlow<()>,
) -> Result<Vec<i64>> {
    sampling.check()?;
    let most = room(prompt.len(), trainer.model.positions())?.map_or(most, |room| most.min(room));
    let mut caches: Vec<Cache> = trainer.shards.iter().map(|_| Cache::new()).collect();
    let mut generated = Vec::new();
    let mut new = prompt.to_vec();
    while generated.len() < most {
        let logits = trainer.extend(&new, &mut caches)?;
        let token = sampling.pick(&logits, prompt.len() + generated.len())?;
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

/// How many tokens may follow a prompt. The last one needs no position: nothing is computed from it.
fn room(prompt: usize, positions: Option<usize>) -> Result<Option<usize>> {
    if prompt == 0 {
        return Err(Error::Options(
            "the prompt has no tokens; it needs at least one, such as that of a beginning".into(),
        ));
    }
    match positions {
        Some(positions) if prompt > positions => Err(Error::Options(format!(
            "the prompt has {prompt} tokens, and the model has {positions} positions; shorten the prompt"
        ))),
        positions => Ok(positions.map(|positions| positions - prompt + 1)),
    }
}

impl Trainer {
    /// What the model says of every token of the vocabulary after new tokens, in f32.
    fn extend(&mut self, new: &[i64], caches: &mut [Cache]) -> Result<Vec<f32>> {
        let tokens = Tensor::from_slice(new).view([1, -1]).to_device(self.options.device);
        let logits = self.pass(|trainer, index, input| {
            let unit = &trainer.model.units()[index];
            let parameters = trainer.shards[index].parameters();
            unit.extend(parameters, trainer.tied(index), input, &tokens, &mut caches[index])
                .map_err(|error| Error::Model { unit: unit.name().to_string(), error })
        })?;
        let fail = |error: TchError| Error::Model { unit: "head".to_string(), error: error.into() };
        Vec::try_from(logits.to_kind(Kind::Float).view(-1)).map_err(fail)
    }
}

/// A number from 0 to 1, without 1.
fn uniform(seed: u64, position: usize) -> f64 {
    (mixed(mixed(seed) ^ position as u64) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probabilities 0.1, 0.4, 0.3 and 0.2.
    fn logits() -> Vec<f32> {
        [0.1f32, 0.4, 0.3, 0.2].iter().map(|share| share.ln()).collect()
    }

    /// How often each token is picked, of ten thousand times.
    fn counts(sampling: &Sampling) -> [i32; 4] {
        let mut counts = [0; 4];
        (0..10_000).for_each(|position| counts[sampling.pick(&logits(), position).unwrap() as usize] += 1);
        counts
    }

    fn assert_near(counts: [i32; 4], expected: [i32; 4]) {
        let near = |(a, b): (&i32, &i32)| if *b == 0 { *a == 0 } else { (a - b).abs() < 250 };
        assert!(counts.iter().zip(&expected).all(near), "{counts:?} instead of {expected:?}");
    }

    #[test]
    fn tokens_are_picked_as_often_as_they_are_likely() {
        let plain = Sampling { temperature: 1., top_k: None, top_p: None, seed: 7 };
        assert_near(counts(&plain), [1000, 4000, 3000, 2000]);
        assert_near(counts(&Sampling { top_k: Some(2), ..plain }), [0, 5714, 4286, 0]);
        assert_near(counts(&Sampling { top_k: Some(9), ..plain }), [1000, 4000, 3000, 2000]);
        assert_near(counts(&Sampling { top_p: Some(0.65), ..plain }), [0, 5714, 4286, 0]);
        assert_near(counts(&Sampling { top_p: Some(0.75), ..plain }), [0, 4444, 3333, 2222]);
        assert_near(counts(&Sampling { top_p: Some(1e-9), ..plain }), [0, 10_000, 0, 0]);
        // Of the two that are left, the likelier one is enough.
        assert_near(counts(&Sampling { top_k: Some(2), top_p: Some(0.57), ..plain }), [0, 10_000, 0, 0]);
        // Squares of the probabilities.
        assert_near(counts(&Sampling { temperature: 0.5, ..plain }), [333, 5333, 3000, 1333]);
        assert_near(counts(&Sampling::GREEDY), [0, 10_000, 0, 0]);
    }

    #[test]
    fn of_equals_the_first_is_likelier() {
        assert_eq!(Sampling::GREEDY.pick(&[1., 2., 0., 2.], 0).unwrap(), 1);
    }

    #[test]
    fn what_cannot_be_sampled_is_explained() {
        let message = |sampling: Sampling| sampling.check().unwrap_err().to_string();
        let plain = Sampling { temperature: 1., ..Sampling::GREEDY };
        assert_eq!(message(Sampling { temperature: -1., ..plain }), "temperature: -1 is not a number from 0");
        assert!(message(Sampling { top_k: Some(0), ..plain }).contains("top_k: is 0"));
        assert_eq!(message(Sampling { top_p: Some(1.5), ..plain }), "top_p: 1.5 is not above 0 and at most 1");
        let error = plain.pick(&[0., f32::NAN], 3).unwrap_err();
        assert_eq!(error.to_string(), "position 3: the logit of token 1 is NaN");
    }
}
