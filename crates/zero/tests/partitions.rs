//! Uneven partitions as properties: random units whose sizes hardly ever divide among the ranks, down to fewer elements than
//! ranks. Every element is initialized, gathered, reduced, updated and saved exactly once.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use shardwise_comm::ReduceOp;
use shardwise_harness::ranks;
use shardwise_plan::Dtype;
use shardwise_zero::{Optimizer, ParameterSpec, Precision, ShardedUnit};
use support::{
    Assign, Ranks, Rng, STAGES, assigned, gradient_tensor, initial, len_of, new_unit, reduce, rounded, spec,
    sum_gradients, total_len, values, values_of,
};

const PRECISIONS: [Precision; 4] = [
    Precision::F32,
    Precision::BF16,
    Precision { param_dtype: Dtype::Bf16, reduce_dtype: Dtype::Bf16 },
    Precision::F64,
];

/// One to four parameters of 1 to 25 elements; some are frozen, and some do not decay.
fn random_specs(seed: u64) -> Vec<ParameterSpec> {
    let mut rng = Rng(seed);
    let count = 1 + rng.below(4);
    let random_spec = |_| {
        let dims = rng.below(3);
        let shape = (0..dims).map(|_| 1 + rng.below(5) as i64).collect();
        let (decays, trainable) = (rng.below(2) == 0, rng.below(4) > 0);
        ParameterSpec { shape, decays, trainable, layout: 0, adds_gradient: true }
    };
    (0..count).map(random_spec).collect()
}

/// A unit, and what is expected of it.
struct Case<'a> {
    ranks: &'a Ranks,
    specs: Vec<ParameterSpec>,
    stage: u8,
    precision: Precision,
    seed: usize,
    assign: Optimizer,
}

impl Case<'_> {
    fn describe(&self) -> String {
        let Case { specs, stage, precision, seed, .. } = self;
        format!("stage {stage}, {precision:?}, seed {seed}, {specs:?}")
    }

    /// The values of all trainable or all frozen parameters, one after the other.
    fn flat(&self, trainable: bool, value: impl Fn(usize, usize) -> f32) -> Vec<f32> {
        let chosen = self.specs.iter().enumerate().filter(|(_, spec)| spec.trainable == trainable);
        chosen
            .flat_map(|(parameter, spec)| (0..len_of(spec)).map(move |index| (parameter, index)))
            .map(|(parameter, index)| value(parameter, index))
            .collect()
    }

    /// The values of all parameters in the order of the specs, as the unit computes with them.
    fn by_parameter(&self, value: impl Fn(usize, usize) -> f32) -> Vec<Vec<f32>> {
        let values = |(parameter, spec): (usize, &ParameterSpec)| {
            let whole: Vec<f32> = (0..len_of(spec)).map(|index| value(parameter, index)).collect();
            rounded(&whole, self.precision.param_dtype)
        };
        self.specs.iter().enumerate().map(values).collect()
    }

    /// Whether a rank has a gradient of a parameter. Each rank misses different ones.
    fn has_gradient(&self, rank: usize, parameter: usize) -> bool {
        !(rank + parameter + self.seed).is_multiple_of(3)
    }

    /// The sum of all ranks' gradients of an element.
    fn sum(&self, parameter: usize, index: usize, micro_batch: usize) -> f32 {
        let ranks = (0..self.ranks.world.size()).filter(|&rank| self.has_gradient(rank, parameter));
        sum_gradients(ranks, parameter, index, micro_batch) + 0.
    }

    /// The value of an element after an update with [`Assign`].
    fn updated(&self, parameter: usize, index: usize, micro_batch: usize) -> f32 {
        let ParameterSpec { decays, trainable, .. } = self.specs[parameter];
        match trainable {
            true => assigned(self.sum(parameter, index, micro_batch).into(), decays) as f32,
            false => initial(parameter, index),
        }
    }

    /// Adds this rank's gradients of a micro-batch and reduces them.
    fn reduce_gradients(&self, unit: &mut ShardedUnit, micro_batch: usize) {
        let rank = self.ranks.world.rank();
        for (parameter, spec) in self.specs.iter().enumerate() {
            if spec.trainable && self.has_gradient(rank, parameter) {
                unit.add_gradient(parameter, &gradient_tensor(spec, rank, parameter, micro_batch)).unwrap();
            }
        }
        reduce(unit);
    }

    /// Concatenates every rank's part of a buffer of `len` elements. Fails if a rank's part has the wrong length.
    fn gather(&self, own: Vec<f32>, len: usize) -> Vec<f32> {
        assert_eq!(own.len(), self.ranks.shard_len(len), "{}", self.describe());
        match len {
            0 => own,
            len => self.ranks.groups.shard.all_gather("parts", own, vec![0f32; len]).wait().unwrap().1,
        }
    }

    /// The whole buffers of a checkpoint: parameters, the state of [`Assign`], and frozen parameters.
    fn gather_checkpoint(&self, unit: &mut ShardedUnit) -> [Vec<f32>; 3] {
        unit.wait_for_update().unwrap();
        let tensors = unit.checkpoint_tensors().unwrap();
        let stable: Vec<bool> = tensors.iter().map(|tensor| tensor.is_stable).collect();
        assert_eq!(
            stable,
            [self.stage < 3 || self.precision.has_masters(), true, self.stage < 3],
            "{}",
            self.describe()
        );
        let [trainable, frozen] = [true, false].map(|trainable| total_len(&self.specs, trainable));
        let mut buffers = tensors.iter().zip([trainable, trainable, frozen]);
        std::array::from_fn(|_| {
            let (tensor, len) = buffers.next().unwrap();
            self.gather(values(&tensor.tensor), len)
        })
    }

    fn check(&self) {
        let what = self.describe();
        let mut unit = self.check_initialization();
        let trainable = |(parameter, spec): (usize, &ParameterSpec)| spec.trainable.then_some(parameter);
        let all: Vec<usize> = self.specs.iter().enumerate().filter_map(trainable).collect();

        unit.gather().unwrap();
        assert_eq!(values_of(&unit), self.by_parameter(initial), "gathered: {what}");
        unit.release().unwrap();
        assert_eq!(unit.parameters_without_gradient().collect::<Vec<_>>(), all, "{what}");

        self.reduce_gradients(&mut unit, 0);
        let rank = self.ranks.world.rank();
        let missing: Vec<usize> =
            all.iter().copied().filter(|&parameter| !self.has_gradient(rank, parameter)).collect();
        assert_eq!(unit.parameters_without_gradient().collect::<Vec<_>>(), missing, "{what}");
        let squares = vec![unit.grad_norm_squared().unwrap()];
        let found = self.ranks.groups.shard.all_reduce("norm", ReduceOp::Sum, squares).wait().unwrap()[0];
        let sums = self.flat(true, |parameter, index| self.sum(parameter, index, 0));
        let expected: f64 = sums.iter().map(|&sum| f64::from(sum).powi(2)).sum();
        assert!((found - expected).abs() <= 1e-6 * expected, "norm² {found}, expected {expected}: {what}");

        unit.update(&self.assign, 1.).unwrap();
        unit.gather().unwrap();
        let updated = |parameter, index| self.updated(parameter, index, 0);
        assert_eq!(values_of(&unit), self.by_parameter(updated), "updated: {what}");
        unit.release().unwrap();

        let [parameters, state, frozen] = self.gather_checkpoint(&mut unit);
        assert_eq!(parameters, self.flat(true, updated), "saved parameters: {what}");
        assert_eq!(state, sums, "saved state: {what}");
        let kept = self.flat(false, initial);
        let kept = if kept.is_empty() { kept } else { rounded(&kept, self.precision.param_dtype) };
        assert_eq!(frozen, kept, "saved frozen parameters: {what}");
        self.check_resume(&mut unit, &parameters, &state);
    }

    /// Creates the unit, and checks that this rank initialized the elements that it keeps, each once, and no others.
    fn check_initialization(&self) -> ShardedUnit {
        let layout = self.ranks.layout(self.stage, self.precision, &self.assign);
        let mut counts: Vec<Vec<usize>> = self.specs.iter().map(|spec| vec![0; len_of(spec)]).collect();
        let unit = ShardedUnit::new("unit", &self.specs, &[layout], &mut |parameter, range, elements| {
            assert_eq!(range.len(), elements.len());
            elements.write(range.map(|index| {
                counts[parameter][index] += 1;
                f64::from(initial(parameter, index))
            }));
            Ok(())
        });
        let shard = &self.ranks.groups.shard;
        for trainable in [true, false] {
            let kept = match self.stage {
                3 => shard.partition(total_len(&self.specs, trainable)).range(shard.rank()),
                _ => 0..total_len(&self.specs, trainable),
            };
            let found = self.flat(trainable, |parameter, index| counts[parameter][index] as f32);
            let expected: Vec<f32> = (0..found.len()).map(|index| f32::from(u8::from(kept.contains(&index)))).collect();
            assert_eq!(found, expected, "initialized: {}", self.describe());
        }
        unit.unwrap()
    }

    /// Restores a second unit from a checkpoint of the first, and checks that both continue in the same way.
    fn check_resume(&self, unit: &mut ShardedUnit, parameters: &[f32], state: &[f32]) {
        let mut start = 0;
        let mut starts = Vec::new();
        for spec in &self.specs {
            starts.push(start);
            start += if spec.trainable { len_of(spec) } else { 0 };
        }
        let layout = self.ranks.layout(self.stage, self.precision, &self.assign);
        let restored = ShardedUnit::new("unit", &self.specs, &[layout], &mut |parameter, range, elements| {
            elements.write(range.map(|index| match self.specs[parameter].trainable {
                true => f64::from(parameters[starts[parameter] + index]),
                false => f64::from(initial(parameter, index)),
            }));
            Ok(())
        });
        let mut restored = restored.unwrap();
        let mut count = 0;
        let updates = unit.updates();
        let resumed = restored.resume(updates, &mut |parameter, state_index, range, elements| {
            assert_eq!((state_index, range.len()), (0, elements.len()));
            count += range.len();
            let start = starts[parameter];
            elements.write(state[start + range.start..start + range.end].iter().map(|&value| f64::from(value)));
            Ok(())
        });
        resumed.unwrap();
        let trainable = total_len(&self.specs, true);
        let kept = if self.stage == 0 { trainable } else { self.ranks.shard_len(trainable) };
        assert_eq!((restored.updates(), count), (updates, kept), "{}", self.describe());
        let [first, second] = [unit, &mut restored].map(|unit| {
            self.reduce_gradients(unit, 1);
            unit.update(&self.assign, 1.).unwrap();
            self.gather_checkpoint(unit)
        });
        assert_eq!(first, second, "continued: {}", self.describe());
        let sums = self.flat(true, |parameter, index| self.sum(parameter, index, 0) + self.sum(parameter, index, 1));
        assert_eq!(second[1], sums, "state after two updates: {}", self.describe());
    }
}

fn check_all(ranks: &Ranks, seeds: std::ops::Range<usize>) {
    let random = seeds.map(|seed| (seed, random_specs(seed as u64)));
    let special = [
        vec![spec(&[], true, true)],
        vec![spec(&[1], false, false)],
        vec![spec(&[1], true, true), spec(&[1], false, false), spec(&[1], false, true)],
    ];
    for (seed, specs) in random.chain(special.into_iter().enumerate()) {
        for stage in STAGES {
            let (precision, assign) = (PRECISIONS[seed % PRECISIONS.len()], Optimizer::custom(Assign));
            Case { ranks, specs: specs.clone(), stage, precision, seed, assign }.check();
        }
    }
}

/// A parameter that is initialized and updated in several chunks.
fn check_chunks(ranks: &Ranks) {
    let specs = vec![spec(&[7], false, true), spec(&[1_100_003], true, true)];
    for stage in [0, 3] {
        let case = Case {
            ranks,
            specs: specs.clone(),
            stage,
            precision: Precision::F32,
            seed: 1,
            assign: Optimizer::custom(Assign),
        };
        let mut unit = new_unit(&specs, ranks.layout(stage, Precision::F32, &case.assign));
        unit.gather().unwrap();
        assert!(values_of(&unit) == case.by_parameter(initial), "stage {stage}: other initial values");
        unit.release().unwrap();
        case.reduce_gradients(&mut unit, 0);
        unit.update(&case.assign, 1.).unwrap();
        unit.gather().unwrap();
        let updated = |parameter, index| case.updated(parameter, index, 0);
        assert!(values_of(&unit) == case.by_parameter(updated), "stage {stage}: other values after an update");
        unit.release().unwrap();
    }
}

#[test]
fn random_units_on_1_rank() {
    check_all(&Ranks::alone(), 0..60);
    check_chunks(&Ranks::alone());
}

#[test]
fn random_units_on_3_ranks() {
    ranks!(3, || {
        let ranks = Ranks::launched(3);
        check_all(&ranks, 1000..1040);
        check_chunks(&ranks);
    });
}

#[test]
fn random_units_in_two_replicas_of_2_ranks() {
    ranks!(4, || check_all(&Ranks::two_replicas(4), 2000..2020));
}
