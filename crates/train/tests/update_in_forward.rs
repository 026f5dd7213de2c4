//! Updates in the next step's forward pass give the bits of updates after the backward pass.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::path::Path;
use std::time::Duration;

use shardwise_harness::{Launch, ranks};
use shardwise_model::Model;
use shardwise_plan::pipeline::PipelineSchedule;
use shardwise_train::{
    ActivationCheckpointing, LossScale, OffloadPlace, Offloading, Options, Ranks, Schedule, Trainer, init,
};
use shardwise_zero::{Lamb, Optimizer, Precision};
use support::bits::{batch, layouts, micro_batches, options, overflowing, partly_frozen, saved, train, trainer, world};
use support::{gpt2, llama};

/// Options with clipping. Each step has its own learning rate.
fn clipped(stage: u8, precision: Precision) -> Options {
    let schedule = Schedule { warmup_steps: 90, steps: 100, ..Schedule::constant(1e-2) };
    Options { schedule, ..options(stage, precision) }
}

fn unclipped(stage: u8, precision: Precision) -> Options {
    Options { max_grad_norm: None, ..clipped(stage, precision) }
}

/// The options to compare: updates in the forward pass, in memory, and with optimizer state and gradients on a disk. Without clipping, also
/// updates in both passes.
fn variants(options: &Options, folder: &Path) -> Vec<Options> {
    let folder = Some(OffloadPlace::Disk(folder.to_path_buf()));
    let state = Offloading { optimizer: folder.clone(), ..Offloading::default() };
    let both = Offloading { gradients: folder, ..state.clone() };
    let in_forward = Options { update_in_forward: true, ..options.clone() };
    let mut variants: Vec<Options> = [Offloading::default(), state.clone(), both]
        .into_iter()
        .map(|offload| Options { offload, ..in_forward.clone() })
        .collect();
    if options.max_grad_norm.is_none() && !matches!(options.loss_scale, LossScale::Dynamic(_)) {
        let in_both = [Offloading::default(), state].map(|offload| Options { offload, ..in_forward.clone() });
        variants.extend(in_both.map(|options| Options { update_in_backward: true, ..options }));
    }
    variants
}

fn describe(options: &Options) -> String {
    format!("{:?}, in the backward pass: {}", options.offload, options.update_in_backward)
}

/// As long as the shortest run in which a bit that differs has changed the loss many times.
const STEPS: i64 = 100;

#[test]
fn updates_in_the_forward_pass_change_no_bit() {
    ranks!(Launch::ranks(2).timeout(Duration::from_secs(300)), || {
        let (ranks, folder) = (Ranks::sharded(world()), tempfile::tempdir().unwrap());
        for (stage, precision) in (0..4).flat_map(|stage| [(stage, Precision::F32), (stage, Precision::BF16)]) {
            for after in [clipped(stage, precision), unclipped(stage, precision)] {
                let expected = train(trainer(&ranks, after.clone()), STEPS, 1);
                // With clipping, optimizer state and gradients on a disk; without, updates in both passes.
                let options =
                    variants(&after, folder.path())[if after.max_grad_norm.is_some() { 2 } else { 4 }].clone();
                let what = describe(&options);
                assert!(train(trainer(&ranks, options), STEPS, 1) == expected, "stage {stage}, {precision:?}, {what}");
            }
        }
    });
}

#[test]
fn neither_prefetch_nor_accumulation_nor_optimizer_nor_skipped_updates_matter() {
    ranks!(Launch::ranks(2).timeout(Duration::from_secs(300)), || {
        let (ranks, folder) = (Ranks::sharded(world()), tempfile::tempdir().unwrap());
        let same = |what: &str, after: Options, model: fn() -> Model, number: i64| {
            let new = |options| Trainer::new(model(), ranks.clone(), options, &mut init::from_seed(5)).unwrap();
            let expected = train(new(after.clone()), 10, number);
            for options in variants(&after, folder.path()) {
                assert!(train(new(options.clone()), 10, number) == expected, "{what}, {}", describe(&options));
            }
            expected.0
        };
        for prefetch in [0, 9] {
            for options in [clipped(3, Precision::BF16), unclipped(3, Precision::BF16)] {
                let options = Options { prefetch, ..options };
                same(&format!("prefetch {prefetch}"), options.clone(), llama, 1);
                // The head is tied to the embedding.
                same(&format!("prefetch {prefetch}, 3 micro-batches"), options.clone(), gpt2, 3);
                let each = Options { reduce_each_micro_batch: true, ..options };
                same(&format!("prefetch {prefetch}, 3 micro-batches reduced each"), each, gpt2, 3);
            }
        }
        let full = ActivationCheckpointing::Full;
        same("checkpointing", Options { activation_checkpointing: full, ..unclipped(2, Precision::F32) }, gpt2, 2);
        same("partly frozen", clipped(3, Precision::F32), partly_frozen, 2);
        same("partly frozen, bf16", unclipped(1, Precision::BF16), partly_frozen, 2);
        let lamb = Lamb { lr: 0., beta1: 0.9, beta2: 0.99, weight_decay: 0.05, eps: 1e-6 };
        same("LAMB", Options { optimizer: Optimizer::Lamb(lamb), ..clipped(1, Precision::F32) }, llama, 1);
        for stage in [1, 2] {
            let numbers = same("f16", overflowing(clipped(stage, Precision::F16)), llama, 1);
            let skipped: Vec<u64> = numbers.chunks(3).map(|step| step[2]).collect();
            assert!(skipped[0] == 1 && skipped[9] == 0, "{skipped:?}");
        }
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
            // Tied units of a pipeline are on different stages.
            for (after, model) in
                [(clipped(stage, Precision::BF16), gpt2 as fn() -> Model), (unclipped(stage, Precision::F32), llama)]
            {
                let after = Options { pipeline_schedule: schedule.clone(), sum_tied_shares_apart: true, ..after };
                let new = |options| Trainer::new(model(), ranks.clone(), options, &mut init::from_seed(5)).unwrap();
                let expected = train(new(after.clone()), 10, 3);
                for options in variants(&after, folder.path()).into_iter().skip(2).step_by(2) {
                    let what = describe(&options);
                    assert!(train(new(options), 10, 3) == expected, "stage {stage}, {schedule}, {what}");
                }
            }
        }
    });
}

#[test]
fn whoever_reads_parameters_between_steps_reads_updated_ones() {
    ranks!(Launch::ranks(2), || {
        let (ranks, folder) = (Ranks::sharded(world()), tempfile::tempdir().unwrap());
        let rank = ranks.world.rank();
        for after in (0..4).flat_map(|stage| [clipped(stage, Precision::F32), unclipped(stage, Precision::BF16)]) {
            for options in variants(&after, folder.path()) {
                let [mut plain, mut deferring] = [&after, &options].map(|options| trainer(&ranks, options.clone()));
                for step in 0..6 {
                    let expected = plain.step(&[batch(step, rank)]).unwrap();
                    assert!(
                        deferring.step(&[batch(step, rank)]).unwrap() == expected,
                        "step {step}, {}",
                        describe(&options)
                    );
                    assert!(deferring.has_deferred_update());
                    // No gradients are left that could be discarded.
                    deferring.discard_gradients();
                    let inputs = batch(step, 0).inputs.shallow_clone();
                    match step {
                        1 => assert!(saved(&mut deferring) == saved(&mut plain), "{}", describe(&options)),
                        2 => {
                            let [found, expected] =
                                [&mut deferring, &mut plain].map(|t| t.evaluate(&[batch(9, rank)]).unwrap());
                            assert!(found == expected, "{}", describe(&options));
                        }
                        3 => {
                            let [found, expected] = [&mut deferring, &mut plain].map(|t| t.logits(&inputs).unwrap());
                            assert!(found.equal(&expected), "{}", describe(&options));
                        }
                        4 => {
                            deferring.finish_update().unwrap();
                            assert!(!deferring.has_deferred_update());
                            deferring.finish_update().unwrap();
                        }
                        _ => (),
                    }
                }
                assert!(saved(&mut deferring) == saved(&mut plain), "{}", describe(&options));
            }
        }
    });
}

#[test]
fn steps_can_differ_in_their_number_of_micro_batches() {
    ranks!(Launch::ranks(2), || {
        let (ranks, folder) = (Ranks::sharded(world()), tempfile::tempdir().unwrap());
        let rank = ranks.world.rank();
        for after in [clipped(2, Precision::BF16), unclipped(3, Precision::F32)] {
            for options in variants(&after, folder.path()) {
                let [mut plain, mut deferring] = [&after, &options].map(|options| trainer(&ranks, options.clone()));
                for (step, number) in (0..).zip([1, 3, 1, 2, 1]) {
                    let batches = micro_batches(3 * step, rank, number);
                    let expected = plain.step(&batches).unwrap();
                    assert!(deferring.step(&batches).unwrap() == expected, "step {step}, {}", describe(&options));
                }
                assert!(saved(&mut deferring) == saved(&mut plain), "{}", describe(&options));
            }
        }
    });
}

#[test]
fn a_unit_is_updated_before_its_forward_pass_while_others_compute() {
    ranks!(1, || {
        let ranks = Ranks::sharded(world());
        let folder = tempfile::tempdir().unwrap();
        let program = |options: &Options| trainer(&ranks, options.clone()).program(1).unwrap().to_string();
        let position = |text: &str, line: &str| {
            text.lines().position(|found| found == line).unwrap_or_else(|| panic!("{line}\n{text}"))
        };
        let on_disk = &variants(&clipped(3, Precision::BF16), folder.path())[2];
        let text = program(on_disk);
        let at = |line: &str| position(&text, line);
        assert!(at("forward embedding micro-batch=0 keep=all") < at("update block.1"), "{text}");
        assert!(
            at("start-fetch block.2 buffer=optimizer tier=disk") < at("forward block.0 micro-batch=0 keep=all"),
            "{text}"
        );
        assert!(at("update head") < at("start-gather head"), "{text}");

        // In both passes: every third unit waits.
        let in_both = &variants(&unclipped(3, Precision::BF16), folder.path())[4];
        let text = program(in_both);
        let at = |line: &str| position(&text, line);
        assert!(at("update block.1") < at("forward block.1 micro-batch=0 keep=all"), "{text}");
        for unit in ["embedding", "block.0", "block.2", "head"] {
            assert!(at(&format!("update {unit}")) > at("backward head micro-batch=0"), "{text}");
        }
        assert!(at("update head") < at("backward block.0 micro-batch=0"), "{text}");
    });
}

#[test]
fn a_save_that_reads_what_would_be_overwritten_is_an_error_that_changes_nothing() {
    ranks!(1, || {
        let ranks = Ranks::sharded(world());
        let options = Options { update_in_forward: true, ..clipped(1, Precision::F32) };
        let mut trainer = trainer(&ranks, options);
        trainer.step(&[batch(0, 0)]).unwrap();
        let lease = trainer.lease_tensors(1);
        for error in [trainer.step(&[batch(1, 0)]).map(drop), trainer.finish_update()] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("a save still reads the tensors of block.0"), "{error}");
        }
        drop(lease);
        trainer.step(&[batch(1, 0)]).unwrap();
    });
}

#[test]
fn offloaded_parameters_are_refused() {
    let parameters = Some(OffloadPlace::Disk("/tmp".into()));
    let offload = Offloading { parameters, ..Offloading::default() };
    let options = Options { update_in_forward: true, offload, ..clipped(3, Precision::F32) };
    let error = options.check().unwrap_err().to_string();
    assert!(error.contains("update_in_forward: parameters that are offloaded"), "{error}");
}
