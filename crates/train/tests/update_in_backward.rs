//! Updates in the backward pass give the bits of updates after it, with the gradients of a few units at a time.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::path::Path;
use std::time::Duration;

use shardwise_harness::{Launch, ranks};
use shardwise_model::Model;
use shardwise_plan::pipeline::PipelineSchedule;
use shardwise_torch::tch::no_grad;
use shardwise_train::{
    ActivationCheckpointing, DynamicScale, LossScale, OffloadPlace, Offloading, OnNonFinite, Options, Ranks, Schedule,
    Trainer, init,
};
use shardwise_zero::{Lamb, Optimizer, Precision};
use support::bits::{batch, layouts, options, train, trainer, world};
use support::{gpt2, llama};

/// Options without clipping, which needs all gradients. Each step has its own learning rate.
fn unclipped(stage: u8, precision: Precision) -> Options {
    let schedule = Schedule { warmup_steps: 90, steps: 100, ..Schedule::constant(1e-2) };
    Options { max_grad_norm: None, schedule, ..options(stage, precision) }
}

/// The options to compare: updates in the backward pass, in memory and on a disk.
fn variants(options: &Options, folder: &Path) -> [Options; 2] {
    let folder = Some(OffloadPlace::Disk(folder.to_path_buf()));
    let parameters = folder.clone().filter(|_| options.sharding.parameters);
    let on_disk = Offloading { optimizer: folder, parameters, ..Offloading::default() };
    [Offloading::default(), on_disk].map(|offload| Options { update_in_backward: true, offload, ..options.clone() })
}

/// As long as the shortest run in which a bit that differs has changed the loss many times.
const STEPS: i64 = 100;

#[test]
fn updates_in_the_backward_pass_change_no_bit() {
    ranks!(Launch::ranks(2).timeout(Duration::from_secs(300)), || {
        let (ranks, folder) = (Ranks::sharded(world()), tempfile::tempdir().unwrap());
        for (stage, precision) in (0..4).flat_map(|stage| [(stage, Precision::F32), (stage, Precision::BF16)]) {
            let after = unclipped(stage, precision);
            let expected = train(trainer(&ranks, after.clone()), STEPS, 1);
            for options in variants(&after, folder.path()) {
                let found = train(trainer(&ranks, options.clone()), STEPS, 1);
                assert!(found == expected, "stage {stage}, {precision:?}, {:?}", options.offload);
            }
        }
    });
}

#[test]
fn neither_prefetch_nor_accumulation_nor_optimizer_matter() {
    ranks!(Launch::ranks(2).timeout(Duration::from_secs(300)), || {
        let (ranks, folder) = (Ranks::sharded(world()), tempfile::tempdir().unwrap());
        let same = |what: &str, after: Options, model: fn() -> Model, number: i64| {
            let new = |options| Trainer::new(model(), ranks.clone(), options, &mut init::from_seed(5)).unwrap();
            let expected = train(new(after.clone()), 10, number);
            let [in_memory, on_disk] = variants(&after, folder.path());
            for options in [in_memory, on_disk] {
                assert!(train(new(options.clone()), 10, number) == expected, "{what}, {:?}", options.offload);
            }
        };
        for prefetch in [0, 2, 9] {
            let options = Options { prefetch, ..unclipped(3, Precision::BF16) };
            same(&format!("prefetch {prefetch}"), options.clone(), llama, 1);
            // The head is tied to the embedding, which is updated last.
            same(&format!("prefetch {prefetch}, 3 micro-batches"), options.clone(), gpt2, 3);
            let each = Options { reduce_each_micro_batch: true, ..options };
            same(&format!("prefetch {prefetch}, 3 micro-batches reduced each"), each, gpt2, 3);
        }
        let full = ActivationCheckpointing::Full;
        same("checkpointing", Options { activation_checkpointing: full, ..unclipped(2, Precision::F32) }, gpt2, 2);
        let lamb = Lamb { lr: 0., beta1: 0.9, beta2: 0.99, weight_decay: 0.05, eps: 1e-6 };
        same("LAMB", Options { optimizer: Optimizer::Lamb(lamb), ..unclipped(1, Precision::F32) }, llama, 1);
        let loss_scale = LossScale::Fixed(64.);
        same("a fixed loss scale", Options { loss_scale, ..unclipped(3, Precision::F16) }, llama, 1);
    });
}

#[test]
fn replicas_shared_layers_and_pipelines_change_no_bit() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(300)), || {
        let (world, folder) = (world(), tempfile::tempdir().unwrap());
        let [hybrid, tensor, pipeline] = layouts(&world);
        for (ranks, stage, schedule) in [
            (&hybrid, 3, PipelineSchedule::OneFOneB),
            (&hybrid, 1, PipelineSchedule::OneFOneB),
            (&tensor, 2, PipelineSchedule::OneFOneB),
            (&pipeline, 3, PipelineSchedule::OneFOneB),
            (&pipeline, 1, PipelineSchedule::ZeroBubbleH1),
        ] {
            let after = Options { pipeline_schedule: schedule.clone(), ..unclipped(stage, Precision::BF16) };
            let expected = train(trainer(ranks, after.clone()), 10, 3);
            for options in variants(&after, folder.path()) {
                assert!(train(trainer(ranks, options), 10, 3) == expected, "stage {stage}, {schedule}");
            }
        }
    });
}

#[test]
fn a_unit_is_updated_while_others_compute_their_gradients() {
    ranks!(1, || {
        let ranks = Ranks::sharded(world());
        let folder = tempfile::tempdir().unwrap();
        let [_, on_disk] = variants(&unclipped(3, Precision::BF16), folder.path());
        let text = trainer(&ranks, on_disk).program(1).unwrap().to_string();
        let lines: Vec<&str> = text.lines().collect();
        let at = |line: &str| lines.iter().position(|&found| found == line).unwrap_or_else(|| panic!("{line}\n{text}"));
        assert!(at("start-fetch block.2 buffer=optimizer tier=disk") < at("backward block.0 micro-batch=0"));
        assert!(at("update head") < at("backward block.0 micro-batch=0"));
        assert!(at("update embedding") < at("reduce-totals"));
    });
}

#[test]
fn values_that_are_not_finite_are_named_and_end_the_run() {
    ranks!(2, || {
        let ranks = Ranks::sharded(world());
        let options = Options { update_in_backward: true, ..unclipped(0, Precision::F32) };
        let mut trainer = trainer(&ranks, options);
        let block = trainer.shards_mut().nth(2).unwrap();
        no_grad(|| drop(block.parameters()[0].shallow_clone().fill_(f64::NAN)));
        let error = trainer.step(&[batch(0, ranks.world.rank())]).unwrap_err().to_string();
        let expected =
            "step 1: the output of unit block.1 on rank 0 is not finite, and parameters were updated with it";
        assert!(error.contains(expected), "{error}");
        let error = trainer.step(&[batch(0, ranks.world.rank())]).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    });
}

#[test]
fn a_step_that_has_updated_units_cannot_be_abandoned() {
    ranks!(1, || {
        let ranks = Ranks::sharded(world());
        let options = Options { update_in_backward: true, ..unclipped(1, Precision::F32) };
        let mut discarded = trainer(&ranks, options.clone());
        let gradients = discarded.compute_gradients(&[batch(0, 0)]).unwrap();
        discarded.discard_gradients();
        for error in
            [discarded.apply_update(gradients).map(drop), discarded.compute_gradients(&[batch(1, 0)]).map(drop)]
        {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("step 1 was abandoned after its units were updated"), "{error}");
        }

        let mut repeated = trainer(&ranks, options.clone());
        let gradients = repeated.compute_gradients(&[batch(0, 0)]).unwrap();
        let error = repeated.compute_gradients(&[batch(0, 0)]).err().unwrap().to_string();
        assert!(error.contains("step 1 has updated units; finish it"), "{error}");
        let error = repeated.checkpoint_tensors(0).err().unwrap().to_string();
        assert!(error.contains("step 1 has updated units; finish it"), "{error}");
        repeated.apply_update(gradients).unwrap();
        repeated.step(&[batch(1, 0)]).unwrap();

        // A save that reads what would be overwritten.
        let mut saved = trainer(&ranks, options);
        let lease = saved.lease_tensors(1);
        let error = saved.step(&[batch(0, 0)]).err().unwrap().to_string();
        assert!(error.contains("a save still reads the tensors of block.0"), "{error}");
        drop(lease);
        saved.step(&[batch(0, 0)]).unwrap();
    });
}

#[test]
fn what_needs_all_gradients_is_refused() {
    let folder = Some(OffloadPlace::Disk("/tmp".into()));
    let plain = Options { update_in_backward: true, ..unclipped(2, Precision::F32) };
    let dynamic = LossScale::Dynamic(DynamicScale::DEFAULT);
    let gradients = Offloading { gradients: folder, ..Offloading::default() };
    for (options, reason) in [
        (Options { max_grad_norm: Some(1.), ..plain.clone() }, "clipping needs the norm of all gradients"),
        (Options { loss_scale: dynamic, ..plain.clone() }, "a dynamic loss scale skips updates"),
        (Options { on_nonfinite: OnNonFinite::Skip, ..plain.clone() }, "could not be skipped"),
        (Options { offload: gradients, ..plain.clone() }, "uses gradients up before they could be offloaded"),
    ] {
        let error = options.check().unwrap_err().to_string();
        assert!(error.contains("update_in_backward: ") && error.contains(reason), "{error}");
    }
    plain.check().unwrap();
}
