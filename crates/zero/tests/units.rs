//! One unit at every stage: the memory and the access that each state allows, the values after updates, and misuse.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};

use shardwise_harness::ranks;
use shardwise_plan::program::Codec;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_zero::{AdamW, Bytes, Error, Lamb, Optimizer, ParameterSpec, Precision, Sgd, ShardedUnit, Sharding};
use support::{
    Assign, Plain, Ranks, STAGES, add_gradients, gradient_tensor, new_unit, read_error, reduce, rounded, spec,
    sum_gradients, total_len, values, values_of,
};

/// Eleven trainable elements and five frozen ones: neither divides among three ranks.
fn specs() -> Vec<ParameterSpec> {
    vec![spec(&[2, 3], true, true), spec(&[5], false, false), spec(&[5], false, true)]
}

fn sgd() -> Optimizer {
    Optimizer::Sgd(Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01 })
}

/// The sum of a micro-batch's gradients over all ranks.
fn summed(ranks: &Ranks, micro_batch: usize) -> impl Fn(usize, usize) -> f32 {
    let size = ranks.world.size();
    move |parameter, index| sum_gradients(0..size, parameter, index, micro_batch)
}

// ---- states -----------------------------------------------------------------------------------------------------------

/// Takes two steps, and checks memory, access and values after every call.
fn walk_through_states(ranks: &Ranks, stage: u8, precision: Precision) {
    let (specs, sgd) = (specs(), sgd());
    let layout = ranks.layout(stage, precision, &sgd);
    let (pool, rank) = (layout.pool.clone(), ranks.world.rank());
    let (trainable, frozen) = (total_len(&specs, true), total_len(&specs, false));
    let element = precision.param_dtype.bytes();
    let kept = |from_stage: u8, len: usize| if stage >= from_stage { ranks.shard_len(len) } else { len };
    let copies = if precision.has_masters() { 2 } else { 1 };
    let expect = |unit: &ShardedUnit, gradients: usize, when: &str| {
        let expected = Bytes {
            parameters: (kept(3, trainable) + kept(3, frozen)) * element,
            gradients: gradients * precision.reduce_dtype.bytes(),
            optimizer: copies * kept(1, trainable) * 4,
        };
        assert_eq!(unit.bytes(), expected, "stage {stage}, {precision:?}, {when}");
    };
    let unreadable = |unit: &ShardedUnit, parameter: usize, reason: &str| {
        let error = read_error(unit, parameter).unwrap_or_else(|| panic!("stage {stage}: {parameter} can be read"));
        assert!(error.contains(&format!("parameters of block.3 are {reason}")), "{error}");
    };
    let mut plain = Plain::new(&specs);
    let assert_values = |unit: &ShardedUnit, plain: &Plain, when: &str| {
        let expected: Vec<Vec<f32>> =
            plain.values.iter().map(|elements| rounded(elements, precision.param_dtype)).collect();
        assert_eq!(values_of(unit), expected, "stage {stage}, {precision:?}, {when}");
    };

    let mut unit = new_unit(&specs, layout);
    assert_eq!((unit.name(), unit.updates(), unit.is_trainable()), ("block.3", 0, true));
    let mut pool_bytes = Vec::new();
    for step in 0..2 {
        expect(&unit, 0, "before the step");
        unit.start_gather().unwrap();
        match (stage, step) {
            (3, _) => [0, 1, 2].iter().for_each(|&parameter| unreadable(&unit, parameter, "released")),
            (1 | 2, 1) => [0, 2].iter().for_each(|&parameter| unreadable(&unit, parameter, "being gathered")),
            _ => assert_values(&unit, &plain, "not sharded"),
        }
        unit.gather().unwrap();
        assert_values(&unit, &plain, "gathered");
        expect(&unit, 0, "gathered");
        if step == 0 {
            assert_eq!(pool.bytes(), if stage == 3 { (trainable + frozen) * element } else { 0 });
        }
        // The forward and the backward pass.
        let loss = unit.parameters()[0].square().sum(Kind::Float);
        assert!(loss.requires_grad() && !unit.parameters()[1].requires_grad());
        drop(loss);
        unit.release().unwrap();
        match stage {
            3 => [0, 1, 2].iter().for_each(|&parameter| unreadable(&unit, parameter, "released")),
            _ => assert_values(&unit, &plain, "not sharded"),
        }

        add_gradients(&mut unit, &specs, rank, step);
        expect(&unit, if stage >= 2 { 0 } else { trainable }, "accumulating");
        unit.start_reduce().unwrap();
        expect(&unit, kept(2, trainable), "reducing");
        unit.finish_reduce().unwrap();
        expect(&unit, kept(2, trainable), "reduced");
        unit.update(&sgd, 0.25).unwrap();
        expect(&unit, 0, "updated");
        assert_eq!(unit.updates(), step as u32 + 1);

        let sum = summed(ranks, step);
        plain.update(&sgd, |parameter, index| sum(parameter, index) * 0.25);
        match stage {
            0 => assert_values(&unit, &plain, "updated"),
            3 => unreadable(&unit, 0, "released"),
            _ => unreadable(&unit, 0, "being gathered"),
        }
        pool_bytes.push(pool.bytes());
    }
    assert_eq!(pool_bytes[0], pool_bytes[1], "stage {stage}: the second step needs no more memory");
    unit.gather().unwrap();
    assert_values(&unit, &plain, "after two steps");
    unit.release().unwrap();
}

fn walk_through_all_states(ranks: &Ranks) {
    for stage in STAGES {
        for precision in [Precision::F32, Precision::BF16] {
            walk_through_states(ranks, stage, precision);
        }
    }
}

#[test]
fn every_state_holds_its_memory_on_1_rank() {
    walk_through_all_states(&Ranks::alone());
}

#[test]
fn every_state_holds_its_memory_on_3_ranks() {
    ranks!(3, || walk_through_all_states(&Ranks::launched(3)));
}

// ---- values -----------------------------------------------------------------------------------------------------------

/// Compares three updates by each optimizer with the plain computation.
fn compare_optimizers(ranks: &Ranks) {
    let specs = specs();
    let adamw = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
    let lamb = Lamb { lr: 0.1, beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-6 };
    for optimizer in [sgd(), Optimizer::AdamW(adamw), Optimizer::Lamb(lamb)] {
        for stage in STAGES {
            let mut unit = new_unit(&specs, ranks.layout(stage, Precision::F32, &optimizer));
            let mut plain = Plain::new(&specs);
            for step in 0..3 {
                unit.gather().unwrap();
                unit.release().unwrap();
                add_gradients(&mut unit, &specs, ranks.world.rank(), step);
                reduce(&mut unit);
                unit.update(&optimizer, 0.5).unwrap();
                let sum = summed(ranks, step);
                plain.update(&optimizer, |parameter, index| sum(parameter, index) * 0.5);
            }
            unit.gather().unwrap();
            for (found, expected) in values_of(&unit).concat().into_iter().zip(plain.values.concat()) {
                let close = (found - expected).abs() <= 1e-5 * (1. + expected.abs());
                assert!(close, "{optimizer:?} at stage {stage}: {found}, but {expected} was expected");
            }
            unit.release().unwrap();
        }
    }
}

#[test]
fn updates_are_those_of_the_plain_optimizer_on_1_rank() {
    compare_optimizers(&Ranks::alone());
}

#[test]
fn updates_are_those_of_the_plain_optimizer_on_3_ranks() {
    ranks!(3, || compare_optimizers(&Ranks::launched(3)));
}

/// A gradient that is not finite is found by the rank that owns it, and so is the parameter that it spoils.
/// This rank's tensors of a checkpoint, bit by bit.
fn saved_bits(unit: &mut ShardedUnit) -> Vec<Vec<u32>> {
    unit.wait_for_update().unwrap();
    unit.checkpoint_tensors().unwrap().iter().map(|saved| bits(&saved.tensor)).collect()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    values(tensor).into_iter().map(f32::to_bits).collect()
}

/// Updates two units in the same way, except that the tensors of one are detached before each update.
fn detach_tensors(ranks: &Ranks) {
    // The last parameter is updated in two chunks.
    let mut specs = specs();
    specs.push(spec(&[300_001], true, true));
    let adamw = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
    let lamb = Lamb { lr: 0.1, beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-6 };
    for optimizer in [sgd(), Optimizer::AdamW(adamw), Optimizer::Lamb(lamb), Optimizer::custom(Assign)] {
        for (stage, precision) in
            STAGES.into_iter().flat_map(|stage| [(stage, Precision::F32), (stage, Precision::BF16)])
        {
            let what = format!("{optimizer:?} at stage {stage}, {precision:?}, on {} ranks", ranks.world.size());
            let [mut plain, mut detached] =
                [(); 2].map(|()| new_unit(&specs, ranks.layout(stage, precision, &optimizer)));
            for step in 0..2 {
                for unit in [&mut plain, &mut detached] {
                    unit.gather().unwrap();
                    unit.release().unwrap();
                    add_gradients(unit, &specs, ranks.world.rank(), step);
                    reduce(unit);
                }
                let before = saved_bits(&mut detached);
                let detachable: Vec<bool> =
                    detached.checkpoint_tensors().unwrap().iter().map(|saved| saved.is_detachable).collect();
                assert_eq!(detachable[0], precision.has_masters() || stage == 3 || ranks.world.size() == 1, "{what}");
                let indices: Vec<usize> = (0..detachable.len()).filter(|&index| detachable[index]).collect();
                assert!(indices.len() >= optimizer.states(), "{what}");
                let old: Vec<Tensor> =
                    indices.iter().map(|&index| detached.detach_checkpoint_tensor(index).unwrap()).collect();
                plain.update(&optimizer, 0.5).unwrap();
                detached.update(&optimizer, 0.5).unwrap();
                for (old, &index) in old.iter().zip(&indices) {
                    assert!(bits(old) == before[index], "{what}: tensor {index} was overwritten");
                }
                assert!(saved_bits(&mut detached) == saved_bits(&mut plain), "{what}: other bits");
            }
            for unit in [&mut plain, &mut detached] {
                unit.gather().unwrap();
            }
            assert!(values_of(&detached) == values_of(&plain), "{what}: other parameters");
        }
    }
}

#[test]
fn an_update_leaves_detached_tensors_and_has_the_same_bits_on_1_rank() {
    detach_tensors(&Ranks::alone());
}

#[test]
fn an_update_leaves_detached_tensors_and_has_the_same_bits_on_3_ranks() {
    ranks!(3, || detach_tensors(&Ranks::launched(3)));
}

fn find_non_finite_values(ranks: &Ranks) {
    let (specs, assign) = (specs(), Optimizer::custom(Assign));
    let shard = &ranks.groups.shard;
    let is_owner = shard.rank() + 1 == shard.size();
    for stage in STAGES {
        let mut unit = new_unit(&specs, ranks.layout(stage, Precision::F32, &assign));
        assert_eq!(unit.first_nonfinite_parameter().unwrap(), None);
        add_gradients(&mut unit, &specs, ranks.world.rank(), 0);
        if ranks.world.rank() == 0 {
            // The last element is in the last rank's shard.
            unit.add_gradient(2, &Tensor::from_slice(&[0., 0., 0., 0., f32::NAN])).unwrap();
        }
        reduce(&mut unit);
        assert_eq!(unit.first_nonfinite_gradient().unwrap(), is_owner.then_some(2), "stage {stage}");
        assert_eq!(unit.grad_norm_squared().unwrap().is_finite(), !is_owner, "stage {stage}");
        unit.update(&assign, 1.).unwrap();
        unit.wait_for_update().unwrap();
        assert_eq!(unit.first_nonfinite_parameter().unwrap(), is_owner.then_some(2), "stage {stage}");
        assert!(unit.is_parameter_finite(0).unwrap() && unit.is_parameter_finite(1).unwrap());
    }
}

#[test]
fn non_finite_values_are_found_by_their_owner_on_1_rank() {
    find_non_finite_values(&Ranks::alone());
}

#[test]
fn non_finite_values_are_found_by_their_owner_on_3_ranks() {
    ranks!(3, || find_non_finite_values(&Ranks::launched(3)));
}

// ---- misuse -----------------------------------------------------------------------------------------------------------

/// The message of the panic that `misuse` ends with.
fn panic_of<T>(misuse: impl FnOnce() -> T) -> String {
    let Err(payload) = catch_unwind(AssertUnwindSafe(misuse)) else { panic!("the misuse was accepted") };
    let text = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
    text.unwrap().to_string()
}

#[track_caller]
fn assert_panics<T>(expected: &str, misuse: impl FnOnce() -> T) {
    let message = panic_of(misuse);
    assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
}

/// A unit whose update shows its reduced gradients, and the gradients of each rank.
struct Example<'a> {
    ranks: &'a Ranks,
    specs: Vec<ParameterSpec>,
    assign: Optimizer,
    stage: u8,
}

impl<'a> Example<'a> {
    fn new(ranks: &'a Ranks, stage: u8) -> Self {
        Example { ranks, specs: specs(), assign: Optimizer::custom(Assign), stage }
    }

    fn unit(&self) -> ShardedUnit {
        new_unit(&self.specs, self.ranks.layout(self.stage, Precision::F32, &self.assign))
    }

    fn add(&self, unit: &mut ShardedUnit, micro_batch: usize) {
        add_gradients(unit, &self.specs, self.ranks.world.rank(), micro_batch);
    }

    fn reduce(&self, unit: &mut ShardedUnit, micro_batch: usize) {
        self.add(unit, micro_batch);
        reduce(unit);
    }

    /// Updates the unit, and checks that the gradients were the sums of these micro-batches.
    fn assert_update(&self, unit: &mut ShardedUnit, micro_batches: &[usize]) {
        unit.update(&self.assign, 1.).unwrap();
        unit.gather().unwrap();
        for (parameter, found) in values_of(unit).into_iter().enumerate().filter(|(parameter, _)| *parameter != 1) {
            let added = if self.specs[parameter].decays { 0. } else { 0.5 };
            let sum = |index: usize| -> f32 {
                micro_batches.iter().map(|&micro_batch| summed(self.ranks, micro_batch)(parameter, index)).sum()
            };
            let expected: Vec<f32> = (0..found.len()).map(|index| sum(index) + added).collect();
            assert_eq!(found, expected, "stage {}, parameter {parameter}", self.stage);
        }
        unit.release().unwrap();
    }
}

/// A sparse gradient counts like the dense one, as the first gradient of a parameter and as a further one.
fn add_sparse_gradients(ranks: &Ranks) {
    let options = (Kind::Float, Device::Cpu);
    for stage in STAGES {
        let example = Example::new(ranks, stage);
        let mut unit = example.unit();
        let rank = ranks.world.rank();
        let dense = |parameter: usize| gradient_tensor(&example.specs[parameter], rank, parameter, 0);
        // Out of order, and one row in two halves.
        let (order, weights) = (Tensor::from_slice(&[1i64, 0, 1]), Tensor::from_slice(&[0.5f32, 1., 0.5]).view([3, 1]));
        let rows = dense(0).index_select(0, &order) * weights;
        let sparse = Tensor::sparse_coo_tensor_indices_size(&order.view([1, 3]), &rows, [2, 3], options, false);
        unit.add_gradient(0, &sparse).unwrap();
        unit.add_gradient(2, &dense(2)).unwrap();
        reduce(&mut unit);
        example.assert_update(&mut unit, &[0]);

        example.add(&mut unit, 1);
        unit.add_gradient(0, &sparse).unwrap();
        unit.add_gradient(2, &dense(2)).unwrap();
        reduce(&mut unit);
        example.assert_update(&mut unit, &[1, 0]);
    }
}

#[test]
fn sparse_gradients_count_like_dense_ones_on_1_rank() {
    add_sparse_gradients(&Ranks::alone());
}

#[test]
fn sparse_gradients_count_like_dense_ones_on_3_ranks() {
    ranks!(3, || add_sparse_gradients(&Ranks::launched(3)));
}

/// Every rank computes with the same numbers, those of the shards' blocks, and the shards stay as they are.
fn gather_quantized(ranks: &Ranks) {
    let specs = [spec(&[40, 50], true, true), spec(&[3], false, false), spec(&[700], false, true)];
    for precision in [Precision::F32, Precision::BF16] {
        let mut unit = new_unit(&specs, ranks.layout(3, precision, &sgd()));
        unit.gather().unwrap();
        let exact = values_of(&unit);
        unit.release().unwrap();
        unit.start_gather_as(Codec::Int8).unwrap();
        assert!(read_error(&unit, 0).unwrap().contains("released"));
        unit.gather().unwrap();
        let found = values_of(&unit);
        unit.release().unwrap();
        let quantized = |flat: &[f32]| -> Vec<f32> {
            let partition = ranks.groups.shard.partition(flat.len());
            let shards = (0..ranks.world.size()).map(|rank| &flat[partition.range(rank)]);
            let near: Vec<f32> = shards.flat_map(|shard| shard.chunks(256)).flat_map(nearest_multiples).collect();
            rounded(&near, precision.param_dtype)
        };
        assert_eq!([&found[0][..], &found[2]].concat(), quantized(&[&exact[0][..], &exact[2]].concat()));
        assert_eq!(found[1], quantized(&exact[1]));
        assert_ne!(found, exact);
        unit.gather().unwrap();
        assert_eq!(values_of(&unit), exact);
    }
}

/// The elements of a block as multiples of its scale.
fn nearest_multiples(block: &[f32]) -> Vec<f32> {
    let largest = block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    block.iter().map(|x| (x * (127. / largest)).round_ties_even() * (largest / 127.)).collect()
}

#[test]
fn quantized_gathers_leave_the_shards_as_they_are_on_1_rank() {
    gather_quantized(&Ranks::alone());
}

#[test]
fn quantized_gathers_leave_the_shards_as_they_are_on_3_ranks() {
    ranks!(3, || gather_quantized(&Ranks::launched(3)));
}

fn misuse_parameters(ranks: &Ranks) {
    for stage in STAGES {
        let example = Example::new(ranks, stage);
        let calls = || ranks.groups.shard.meter().total(|_| true).calls;

        // Gathering twice does nothing more.
        let mut unit = example.unit();
        let before = calls();
        unit.gather().unwrap();
        let (gathered, once) = (values_of(&unit), calls());
        assert_eq!(once - before, if stage == 3 { 2 } else { 0 });
        unit.start_gather().unwrap();
        unit.gather().unwrap();
        assert_eq!((values_of(&unit), calls()), (gathered, once));

        // Sharded parameters are released once, and cannot be updated or saved in between.
        example.reduce(&mut unit, 0);
        if stage == 3 {
            assert_panics("release the parameters before they are updated", || unit.checkpoint_tensors());
            assert_panics("release the parameters before they are updated", || unit.update(&example.assign, 1.));
            let mut unit = example.unit();
            assert_panics("only unsharded parameters can be released", || unit.release());
            let mut unit = example.unit();
            unit.start_gather().unwrap();
            assert_panics("only unsharded parameters can be released", || unit.release());
            let mut unit = example.unit();
            unit.gather().unwrap();
            unit.release().unwrap();
            assert_panics("block.3: only unsharded parameters can be released", || unit.release());
            // After that, nothing can be computed with it.
            assert!(read_error(&unit, 0).unwrap().contains("block.3"));
        } else {
            unit.release().unwrap();
            unit.release().unwrap();
            example.assert_update(&mut unit, &[0]);
        }

        // Two updates without a gather in between would lose the other ranks' part of the first.
        let mut unit = example.unit();
        example.reduce(&mut unit, 0);
        unit.update(&example.assign, 1.).unwrap();
        example.reduce(&mut unit, 1);
        if stage == 1 || stage == 2 {
            assert_panics("block.3: its shard is in use", || unit.update(&example.assign, 1.));
            let mut unit = example.unit();
            example.reduce(&mut unit, 0);
            unit.update(&example.assign, 1.).unwrap();
            assert_panics("block.3: its shard is in use", || unit.checkpoint_tensors());
            unit.wait_for_update().unwrap();
            assert_eq!(unit.checkpoint_tensors().unwrap().len(), 3);
            unit.release().unwrap();
            // Neither can a unit be released while its update is being gathered.
            example.reduce(&mut unit, 0);
            unit.update(&example.assign, 1.).unwrap();
            assert_panics("block.3: only unsharded parameters can be released", || unit.release());
        } else {
            example.assert_update(&mut unit, &[1]);
        }
    }
}

fn misuse_gradients(ranks: &Ranks) {
    let rank = ranks.world.rank();
    for stage in STAGES {
        let example = Example::new(ranks, stage);

        // A gradient of another shape is refused, even if it has as many elements or could be broadcast.
        let mut unit = example.unit();
        let right = gradient_tensor(&example.specs[0], rank, 0, 0);
        for wrong in [right.transpose(0, 1), right.reshape(6), right.narrow(0, 0, 1), right.sum(Kind::Float)] {
            let error = unit.add_gradient(0, &wrong).unwrap_err();
            assert!(matches!(&error, Error::GradientShape { unit, parameter: 0, .. } if unit == "block.3"), "{error}");
            assert!(error.to_string().ends_with("but the parameter has [2, 3]"), "{error}");
        }
        assert_eq!(unit.bytes().gradients, 0);
        example.add(&mut unit, 0);
        assert!(unit.add_gradient(0, &right.transpose(0, 1)).is_err());
        reduce(&mut unit);
        example.assert_update(&mut unit, &[0]);

        assert_panics("only trainable parameters have gradients", || unit.add_gradient(1, &Tensor::from(0f32)));

        // Gradients have to be reduced, all of them, before they are used.
        let mut unit = example.unit();
        assert_panics("block.3: there are no reduced gradients", || unit.grad_norm_squared());
        assert_panics("block.3: there are no reduced gradients", || unit.first_nonfinite_gradient());
        assert_panics("block.3: there are no reduced gradients", || unit.update(&example.assign, 1.));
        let mut unit = example.unit();
        example.add(&mut unit, 0);
        assert_panics("block.3: its gradients are not reduced yet", || unit.update(&example.assign, 1.));
        assert_panics("block.3: no reduction is running", || unit.finish_reduce());
        let mut unit = example.unit();
        unit.finish_reduce().unwrap();
        example.add(&mut unit, 0);
        unit.start_reduce().unwrap();
        assert_panics("block.3: its gradients are not reduced yet", || unit.grad_norm_squared());
        assert_panics("block.3: its gradients are not reduced yet", || unit.update(&example.assign, 1.));
        assert_panics("while gradients are being reduced", || example.add(&mut unit, 0));
        assert_panics("cannot be discarded while they are being reduced", || unit.discard_gradients());
        unit.finish_reduce_scatter().unwrap();
        assert_panics("block.3: its gradients are not reduced yet", || unit.grad_norm_squared());
        unit.finish_reduce().unwrap();
        unit.finish_reduce().unwrap();
        example.assert_update(&mut unit, &[0]);
        let mut unit = example.unit();
        unit.start_reduce().unwrap();
        assert_panics("block.3: its gradients are already being reduced", || unit.start_reduce());

        // Only sharded gradients can be reduced more than once per step, and then none may be left out.
        let mut unit = example.unit();
        example.reduce(&mut unit, 0);
        if stage >= 2 {
            example.add(&mut unit, 1);
            assert_panics("block.3: its gradients are not reduced yet", || unit.update(&example.assign, 1.));
            unit.start_reduce().unwrap();
            assert_panics("block.3: its gradients are not reduced yet", || unit.grad_norm_squared());
            unit.finish_reduce().unwrap();
            example.reduce(&mut unit, 2);
            example.assert_update(&mut unit, &[0, 1, 2]);
        } else {
            assert_panics("block.3: gradients that are not sharded can be reduced only once per step", || {
                example.add(&mut unit, 1);
            });
            assert_panics("can be reduced only once per step", || unit.start_reduce());
            example.assert_update(&mut unit, &[0]);
        }

        // Micro-batches are summed before the reduction too.
        let mut unit = example.unit();
        example.add(&mut unit, 0);
        example.add(&mut unit, 1);
        reduce(&mut unit);
        example.assert_update(&mut unit, &[0, 1]);

        // Discarded gradients are gone, reduced or not.
        let mut unit = example.unit();
        example.reduce(&mut unit, 0);
        unit.discard_gradients();
        assert_eq!((unit.bytes().gradients, unit.updates()), (0, 0));
        assert_panics("block.3: there are no reduced gradients", || unit.update(&example.assign, 1.));
        let mut unit = example.unit();
        example.add(&mut unit, 0);
        unit.discard_gradients();
        assert_eq!(unit.bytes().gradients, 0);
        example.reduce(&mut unit, 2);
        example.assert_update(&mut unit, &[2]);

        // A reduction without any gradients gives zeros, not what the memory had before.
        example.reduce(&mut unit, 1);
        unit.discard_gradients();
        reduce(&mut unit);
        assert_eq!(unit.grad_norm_squared().unwrap(), 0.);
        example.assert_update(&mut unit, &[]);
    }
}

fn misuse_the_rest(ranks: &Ranks) {
    for stage in STAGES {
        let example = Example::new(ranks, stage);

        // An optimizer with more or fewer states than the layout.
        let adamw = Optimizer::AdamW(AdamW::default());
        let mut unit = example.unit();
        example.reduce(&mut unit, 0);
        assert_panics("block.3: the layout's states per element", || unit.update(&adamw, 1.));
        assert_eq!(unit.updates(), 0);
        example.assert_update(&mut unit, &[0]);
        let mut unit = new_unit(&example.specs, ranks.layout(stage, Precision::F32, &adamw));
        example.reduce(&mut unit, 0);
        assert_panics("block.3: the layout's states per element", || unit.update(&example.assign, 1.));

        // Errors of the functions that supply values.
        let layout = ranks.layout(stage, Precision::F32, &example.assign);
        let failed = ShardedUnit::new("block.3", &example.specs, &[layout], &mut |_, _, _| Err("no such file".into()));
        let error = failed.err().unwrap();
        assert!(matches!(&error, Error::Init { unit, .. } if unit == "block.3"), "{error}");
        assert!(error.to_string().contains("no such file"), "{error}");
        let error = example.unit().resume(5, &mut |_, _, _, _| Err("too short".into())).unwrap_err();
        assert!(matches!(&error, Error::Init { unit, .. } if unit == "block.3"), "{error}");
        assert!(error.to_string().contains("too short"), "{error}");

        // A unit without trainable parameters has nothing to reduce or update.
        let frozen = [spec(&[4], false, false)];
        let mut unit = new_unit(&frozen, ranks.layout(stage, Precision::F32, &example.assign));
        unit.gather().unwrap();
        let before = values(&unit.parameters()[0]);
        unit.release().unwrap();
        reduce(&mut unit);
        assert_eq!(unit.grad_norm_squared().unwrap(), 0.);
        assert_eq!(unit.first_nonfinite_gradient().unwrap(), None);
        unit.update(&example.assign, 1.).unwrap();
        assert_eq!((unit.is_trainable(), unit.updates()), (false, 0));
        unit.gather().unwrap();
        assert_eq!(values(&unit.parameters()[0]), before);
        unit.release().unwrap();
    }
    assert!(matches!(Sharding::stage(4), Err(shardwise_zero::StageError(4))));
}

fn misuse(ranks: &Ranks) {
    misuse_parameters(ranks);
    misuse_gradients(ranks);
    misuse_the_rest(ranks);
}

#[test]
fn misuse_is_refused_on_1_rank() {
    misuse(&Ranks::alone());
}

#[test]
fn misuse_is_refused_on_3_ranks() {
    ranks!(3, || misuse(&Ranks::launched(3)));
}
