//! Permutations contain every number once, and mixtures have exact shares.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::HashSet;
use std::time::Instant;

use proptest::prelude::*;
use shardwise_data::{Mixture, Permutation};

proptest! {
    #[test]
    fn an_order_has_every_number_once(len in 1_u64..5_000, key: u64) {
        let order = Permutation::new(len, key);
        let numbers: HashSet<u64> = (0..len).map(|index| order.at(index)).collect();
        prop_assert!(numbers.len() as u64 == len && numbers.iter().all(|&number| number < len));
    }

    #[test]
    fn keys_that_differ_in_a_bit_are_other_orders(len in 100_u64..1 << 62, key: u64, bit in 0_u32..64) {
        let (one, other) = (Permutation::new(len, key), Permutation::new(len, key ^ 1 << bit));
        let same = (0..100).filter(|&index| one.at(index) == other.at(index)).count();
        prop_assert!(same < 20, "{} of 100 places are the same", same);
    }

    #[test]
    fn shares_are_exact(weights in prop::collection::vec(0.01_f64..10.0, 1..8), number in 0_u64..1 << 50) {
        let mixture = Mixture::new(weights.iter().map(|&weight| (1_000, weight)).collect(), 1).unwrap();
        let counts = mixture.source_counts(number);
        prop_assert_eq!(counts.iter().sum::<u64>(), number);
        let whole: f64 = weights.iter().sum();
        for (count, weight) in counts.iter().zip(&weights) {
            // Each division before a source may be off by one.
            let expected = weight / whole * number as f64;
            prop_assert!((*count as f64 - expected).abs() < weights.len() as f64 + expected * 1e-12);
        }
    }
}

#[test]
fn orders_look_random() {
    // Neighbours move independently: in a random order their mean distance is a third of the length.
    let len = 1_000_000_007;
    let order = Permutation::new(len, 7);
    let distance = |index| order.at(index).abs_diff(order.at(index + 1)) as f64 / len as f64;
    let mean = (0..100_000).map(distance).sum::<f64>() / 100_000.0;
    assert!((mean - 1.0 / 3.0).abs() < 0.005, "{mean}");
    // Small orders too: the 24 orders of four numbers are about equally frequent.
    let mut seen = std::collections::HashMap::new();
    for key in 0..24_000 {
        let order = Permutation::new(4, key);
        *seen.entry([0, 1, 2, 3].map(|index| order.at(index))).or_insert(0) += 1;
    }
    assert!(seen.len() >= 12, "{seen:?}");
}

#[test]
fn an_element_takes_less_than_a_microsecond() {
    for len in [1_000_000_000_000 / 1024, 1_000_000_000_000, (1 << 40) + 1] {
        let order = Permutation::new(len, 3);
        let started = Instant::now();
        let sum = (0..100_000).fold(0_u64, |sum, index| sum.wrapping_add(order.at(index * 7)));
        let ns = started.elapsed().as_nanos() as f64 / 100_000.0;
        println!("{len}: {ns:.0} ns ({sum})");
        assert!(ns < 1_000.0, "{ns} ns at length {len}");
    }
}

#[test]
fn nothing_repeats_within_an_epoch() {
    let counts = [400, 3_000, 9_000];
    let mixture = Mixture::new(vec![(counts[0], 1.0), (counts[1], 3.0), (counts[2], 6.0)], 42).unwrap();
    let samples: Vec<_> = (0..10_000).map(|number| mixture.at(number)).collect();
    let different: HashSet<_> = samples.iter().collect();
    assert_eq!(different.len(), samples.len());
    for (source, count) in counts.iter().enumerate() {
        let its: Vec<_> = samples.iter().filter(|sample| sample.source == source).collect();
        assert_eq!(its.len() as u64, mixture.source_counts(10_000)[source]);
        // Epochs come one after another, and each is whole before the next.
        assert!(its.iter().enumerate().all(|(k, sample)| sample.epoch == k as u64 / count && sample.index < *count));
    }
    assert_eq!(mixture.source_counts(10_000), [1_000, 3_000, 6_000]);
    let first: Vec<_> = samples.iter().filter(|s| s.source == 0 && s.epoch == 0).map(|s| s.index).collect();
    let second: Vec<_> = samples.iter().filter(|s| s.source == 0 && s.epoch == 1).map(|s| s.index).collect();
    assert_ne!(first, second, "epochs have orders of their own");
}

#[test]
fn a_sample_depends_on_seed_and_number_only() {
    let mixture = |seed| Mixture::new(vec![(1_000, 0.7), (50, 0.3)], seed).unwrap();
    let (one, again, other) = (mixture(1), mixture(1), mixture(2));
    assert!((0..1_000).rev().all(|number| one.at(number) == again.at(number)));
    assert!((0..1_000).any(|number| one.at(number) != other.at(number)));
    // Pinned, because a change of the order would break runs that resume.
    let pinned: Vec<_> = (0..6).map(|number| (one.at(number).source, one.at(number).index)).collect();
    assert_eq!(pinned, PINNED);
    assert!(one.at(u64::MAX).index < 1_000);
}

const PINNED: [(usize, u64); 6] = [(1, 27), (0, 86), (0, 116), (1, 40), (0, 485), (0, 455)];

#[test]
fn mixtures_of_nothing_are_refused() {
    assert!(Mixture::new(vec![], 1).is_err());
    assert!(Mixture::new(vec![(0, 1.0)], 1).is_err());
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(Mixture::new(vec![(10, weight)], 1).is_err());
    }
    // A share of almost everything.
    let mixture = Mixture::new(vec![(10, 1.0), (10, 1e-300)], 1).unwrap();
    assert_eq!(mixture.at(u64::MAX - 1).source, 0);
}
