//! Initial values of parameters, element by element.

use std::f64::consts::TAU;
use std::ops::Range;

use shardwise_plan::FloatsMut;

use crate::{Error, Init, Parameter, Result};

/// Writes the initial values of the elements `range` of a parameter.
///
/// A value depends only on the seed, the parameter's name and the element's index. So every rank can compute just the elements
/// that it keeps, and any number of ranks starts from the same model.
///
/// Fails if they must be read from a file ([`Init::Weights`]).
pub fn fill(seed: u64, parameter: &Parameter, range: Range<usize>, elements: FloatsMut<'_>) -> Result<()> {
    assert_eq!(range.len(), elements.len(), "{}: the range has as many elements as the slice", parameter.name);
    match parameter.init {
        Init::Zeros => elements.fill(0.),
        Init::Ones => elements.fill(1.),
        Init::Normal { std } => {
            let key = parameter.name.bytes().fold(splitmix64(seed), |key, byte| splitmix64(key ^ u64::from(byte)));
            elements.write(normals(key, range).map(|number| std * number));
        }
        Init::Weights => {
            let problem =
                "its initial values cannot be drawn from a seed; read them from the model's weights".to_string();
            return Err(Error::Config { key: "init", problem });
        }
    }
    Ok(())
}

/// A normally distributed number for each index, by the Box-Muller transform.
fn normals(key: u64, range: Range<usize>) -> impl Iterator<Item = f64> {
    let pairs = range.start / 2..range.end.div_ceil(2);
    pairs.flat_map(move |pair| normal_pair(key, pair as u64)).skip(range.start % 2).take(range.len())
}

/// Those of an even index and the next one, which share a pair of uniform numbers.
fn normal_pair(key: u64, pair: u64) -> [f64; 2] {
    let uniform = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let radius = (-2. * uniform(splitmix64(key ^ splitmix64(2 * pair))).ln()).sqrt();
    let (sin, cos) = (TAU * uniform(splitmix64(key ^ splitmix64(2 * pair + 1)))).sin_cos();
    [radius * cos, radius * sin]
}

/// One step of SplitMix64: maps every number to a pseudorandom one.
pub fn splitmix64(bits: u64) -> u64 {
    let z = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elements(seed: u64, name: &str, range: Range<usize>) -> Vec<f32> {
        let parameter = Parameter::matrix(name.to_string(), [1000, 100], 0.02);
        let mut elements = vec![0.; range.len()];
        fill(seed, &parameter, range, FloatsMut::F32(&mut elements)).expect("a matrix is drawn from a seed");
        elements
    }

    #[test]
    fn a_part_is_the_same_as_in_the_whole() {
        let whole = elements(7, "w", 0..100_000);
        assert_eq!(elements(7, "w", 333..777), whole[333..777]);
        assert_ne!(elements(8, "w", 0..10), whole[0..10]);
        assert_ne!(elements(7, "v", 0..10), whole[0..10]);
    }

    #[test]
    fn elements_are_normally_distributed() {
        let whole = elements(7, "w", 0..100_000);
        let mean = whole.iter().map(|&x| f64::from(x)).sum::<f64>() / 1e5;
        let variance = whole.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / 1e5;
        assert!(mean.abs() < 3e-4 && (variance.sqrt() - 0.02).abs() < 3e-4, "{mean} {}", variance.sqrt());
        let within = whole.iter().filter(|x| x.abs() < 0.02).count() as f64 / 1e5;
        assert!((within - 0.6827).abs() < 0.01, "{within} within one deviation");
    }

    #[test]
    fn values_that_must_be_read_are_not_drawn() {
        let parameter = Parameter { init: Init::Weights, ..Parameter::matrix("scale", [2, 2], 0.) };
        let refused = fill(1, &parameter, 0..4, FloatsMut::F32(&mut [0.; 4])).err().map(|error| error.to_string());
        assert!(refused.is_some_and(|error| error.contains("cannot be drawn from a seed")));
    }
}
