//! Parameters, optimizer state, gradients and activations on a disk give the bits of those in memory.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::fs::{File, OpenOptions};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use shardwise_harness::{Launch, ranks};
use shardwise_model::Model;
use shardwise_plan::{Axis, Mesh};
use shardwise_torch::tch::{Device, no_grad};
use shardwise_train::{
    ActivationCheckpointing, OffloadPlace, Offloading, Options, Probe, Ranks, Sampling, StepPhase, Trainer, generate,
    init,
};
use shardwise_zero::{Lamb, Optimizer, Precision};
use support::bits::{batch, layouts, options, overflowing, partly_frozen, train, trainer, world};
use support::{gpt2, llama};

/// A folder on a disk, if there is one.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn offloaded(options: Options, folder: &Path) -> Options {
    let folder = Some(OffloadPlace::Disk(folder.to_path_buf()));
    let parameters = folder.clone().filter(|_| options.sharding.parameters);
    let offload = Offloading { optimizer: folder.clone(), parameters, gradients: folder, ..Offloading::default() };
    Options { offload, ..options }
}

fn parameters_on(folder: &Path) -> Offloading {
    Offloading { parameters: Some(OffloadPlace::Disk(folder.to_path_buf())), ..Offloading::default() }
}

/// As long as the shortest run in which a bit that differs has changed the loss many times.
const STEPS: i64 = 100;

#[test]
fn a_disk_changes_no_bit() {
    ranks!(Launch::ranks(2).timeout(Duration::from_secs(300)), || {
        let (ranks, folder) = (Ranks::sharded(world()), folder());
        for (stage, precision) in (0..4).flat_map(|stage| [(stage, Precision::F32), (stage, Precision::BF16)]) {
            let expected = train(trainer(&ranks, options(stage, precision)), STEPS, 1);
            let [first, last] = [0, expected.0.len() - 3].map(|at| f64::from_bits(expected.0[at]));
            assert!(last < 0.5 * first, "it learns: {first} to {last}");
            let found = train(trainer(&ranks, offloaded(options(stage, precision), folder.path())), STEPS, 1);
            assert!(found == expected, "stage {stage}, {precision:?}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the files have no names");
    });
}

#[test]
fn neither_prefetch_nor_accumulation_nor_optimizer_nor_skipped_updates_matter() {
    ranks!(Launch::ranks(2).timeout(Duration::from_secs(300)), || {
        let (ranks, folder) = (Ranks::sharded(world()), folder());
        let same = |what: &str, options: Options, model: fn() -> Model, number: i64| {
            let new = |options| Trainer::new(model(), ranks.clone(), options, &mut init::from_seed(5)).unwrap();
            let expected = train(new(options.clone()), 10, number);
            let folders = offloaded(options.clone(), folder.path()).offload;
            for offload in [
                Offloading { gradients: None, ..folders.clone() },
                Offloading { optimizer: None, ..folders.clone() },
                Offloading { optimizer: None, gradients: None, ..folders.clone() },
                folders,
            ] {
                let found = train(new(Options { offload: offload.clone(), ..options.clone() }), 10, number);
                assert!(found == expected, "{what}, {offload:?}");
            }
            expected.0
        };
        for prefetch in [0, 2, 9] {
            let options = Options { prefetch, ..options(3, Precision::BF16) };
            same(&format!("prefetch {prefetch}"), options.clone(), llama, 1);
            same(&format!("prefetch {prefetch}, 3 micro-batches"), options.clone(), gpt2, 3);
            let each = Options { reduce_each_micro_batch: true, ..options };
            same(&format!("prefetch {prefetch}, 3 micro-batches reduced each"), each, gpt2, 3);
        }
        same("f32, tied, without prefetch", Options { prefetch: 0, ..options(3, Precision::F32) }, gpt2, 2);
        same("partly frozen", options(3, Precision::F32), partly_frozen, 2);
        same("partly frozen, bf16", options(3, Precision::BF16), partly_frozen, 2);
        let lamb = Lamb { lr: 0., beta1: 0.9, beta2: 0.99, weight_decay: 0.05, eps: 1e-6 };
        same("LAMB", Options { optimizer: Optimizer::Lamb(lamb), ..options(1, Precision::F32) }, llama, 1);
        let numbers = same("f16", overflowing(options(2, Precision::F16)), llama, 1);
        let skipped: Vec<u64> = numbers.chunks(3).map(|step| step[2]).collect();
        assert!(skipped[0] == 1 && skipped[9] == 0, "{skipped:?}");
    });
}

#[test]
fn parameters_on_a_disk_change_no_bit_for_replicas_shared_layers_and_pipelines() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(300)), || {
        let (world, folder) = (world(), folder());
        let [hybrid, tensor, pipeline] = layouts(&world);
        for (ranks, precision) in [(&hybrid, Precision::BF16), (&tensor, Precision::F32), (&pipeline, Precision::BF16)]
        {
            let options = options(3, precision);
            let offloaded = Options { offload: parameters_on(folder.path()), ..options.clone() };
            assert!(train(trainer(ranks, offloaded), 10, 3) == train(trainer(ranks, options), 10, 3), "{precision:?}");
        }
    });
}

#[test]
fn a_model_with_parameters_on_a_disk_is_evaluated_and_generates() {
    ranks!(2, || {
        let (ranks, folder) = (Ranks::sharded(world()), folder());
        let rank = ranks.world.rank();
        let outputs = |options: Options| {
            let mut trainer = trainer(&ranks, options);
            trainer.step(&[batch(0, rank)]).unwrap();
            let loss = trainer.evaluate(&[batch(1, rank), batch(2, rank)]).unwrap().loss_sum;
            let tokens =
                generate(&mut trainer, &[1, 2, 3], 5, &[], &Sampling::GREEDY, &mut |_| ControlFlow::Continue(()))
                    .unwrap();
            assert!(trainer.bytes().0.parameters == 0 || trainer.options().offload.parameters.is_none());
            (loss.to_bits(), tokens)
        };
        let plain = options(3, Precision::BF16);
        let offloaded = Options { offload: parameters_on(folder.path()), ..plain.clone() };
        assert_eq!(outputs(offloaded), outputs(plain));
    });
}

#[test]
fn while_units_compute_the_next_shard_is_fetched() {
    ranks!(1, || {
        let (ranks, folder) = (Ranks::sharded(world()), folder());
        let offload = parameters_on(folder.path());
        let mut trainer = trainer(&ranks, Options { offload, ..options(3, Precision::BF16) });
        let text = trainer.program(1).unwrap().to_string();
        let found: Vec<&str> = text.lines().skip(1).take(14).collect();
        let expected = [
            "count-tokens",
            "start-fetch embedding buffer=parameters tier=disk",
            "wait-fetch embedding buffer=parameters tier=disk",
            "start-gather embedding",
            "start-fetch block.0 buffer=parameters tier=disk",
            "wait-gather embedding",
            "evict embedding buffer=parameters tier=disk",
            "wait-fetch block.0 buffer=parameters tier=disk",
            "start-gather block.0",
            "start-fetch block.1 buffer=parameters tier=disk",
            "forward embedding micro-batch=0 keep=all",
            "release embedding",
            "wait-gather block.0",
            "evict block.0 buffer=parameters tier=disk",
        ];
        assert_eq!(found, expected, "{text}");
        // Masters are the only thing that an update reads.
        let end: Vec<&str> = text.lines().skip_while(|line| *line != "update embedding").take(3).collect();
        let store = "start-store embedding buffer=parameters tier=disk";
        assert_eq!(end, ["update embedding", store, "update block.0"], "{text}");
    });
}

#[test]
fn while_a_unit_is_updated_the_next_is_fetched_and_the_previous_stored() {
    ranks!(1, || {
        let (ranks, folder) = (Ranks::sharded(world()), folder());
        let mut trainer = trainer(&ranks, offloaded(options(2, Precision::BF16), folder.path()));
        let text = trainer.program(1).unwrap().to_string();
        let update: Vec<&str> = text.lines().skip_while(|line| *line != "reduce-totals").take(7).collect();
        let expected = [
            "reduce-totals",
            "start-fetch embedding buffer=optimizer tier=disk",
            "start-fetch block.0 buffer=optimizer tier=disk",
            "wait-fetch embedding buffer=optimizer tier=disk",
            "update embedding",
            "start-store embedding buffer=optimizer tier=disk",
            "start-fetch block.1 buffer=optimizer tier=disk",
        ];
        assert_eq!(update, expected);
    });
}

#[test]
fn as_many_bytes_are_moved_as_the_formula_says() {
    ranks!(2, || {
        let (ranks, folder) = (Ranks::sharded(world()), folder());
        let mut trainer = trainer(&ranks, offloaded(options(3, Precision::BF16), folder.path()));
        let rank = ranks.world.rank();
        // The first step does not read zeros.
        trainer.step(&[batch(0, rank)]).unwrap();
        let before = trainer.moved().unwrap();
        trainer.step(&[batch(1, rank)]).unwrap();
        let held = trainer.bytes().0;
        assert_eq!(held.optimizer + held.parameters, 0, "between steps, nothing is in memory");
        let moved = trainer.moved().unwrap().since(before);
        let layout = ranks.layout(Precision::BF16);
        let kept: Vec<usize> = trainer.unit_specs().iter().map(|unit| layout.kept_trainable(unit, true)).collect();
        // A master and two moments of all units, and the gradients of those that were reduced two units before the last.
        let (all, blocks) = (kept.iter().sum::<usize>(), kept[1..kept.len() - 1].iter().sum::<usize>());
        let both = 12 * all + 4 * kept[2..].iter().sum::<usize>();
        // Parameters are read for the forward pass and, if they are released after it, for the backward pass, unless that does not read
        // them. They are written after the update.
        assert_eq!(
            [moved.read_bytes, moved.written_bytes],
            [both + 2 * (all + blocks), both + 2 * all].map(|n| n as u64)
        );
    });
}

#[test]
fn activations_on_a_disk_change_no_bit() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(300)), || {
        let (world, folder) = (world(), folder());
        let meshes = [
            Ranks::hybrid(world.clone(), 2).unwrap(),
            Ranks::on_mesh(world.clone(), Mesh::new(&[(Axis::Shard, 2), (Axis::Tensor, 2)]).unwrap()).unwrap(),
            Ranks::on_mesh(world.clone(), Mesh::new(&[(Axis::Pipeline, 2), (Axis::Shard, 2)]).unwrap()).unwrap(),
        ];
        for (ranks, precision, prefetch, sequence) in [
            (&meshes[0], Precision::BF16, 1, true),
            (&meshes[0], Precision::F32, 0, true),
            (&meshes[1], Precision::BF16, 2, true),
            // Each rank keeps its own rows of what all have (ZeRO-R).
            (&meshes[1], Precision::F32, 1, false),
            (&meshes[2], Precision::BF16, 1, true),
        ] {
            let options = Options {
                prefetch,
                sequence_parallel: sequence,
                activation_checkpointing: ActivationCheckpointing::Full,
                ..options(if ranks.pipeline.size() > 1 { 0 } else { 3 }, precision)
            };
            let expected = train(trainer(ranks, options.clone()), 10, 3);
            let activations = Some(OffloadPlace::Disk(folder.path().to_path_buf()));
            let alone = Offloading { activations: activations.clone(), ..Offloading::default() };
            let all = Offloading { activations, ..offloaded(options.clone(), folder.path()).offload };
            for offload in [alone, all] {
                let trainer = trainer(ranks, Options { offload: offload.clone(), ..options.clone() });
                assert!(train(trainer, 10, 3) == expected, "{precision:?}, prefetch {prefetch}, {offload:?}");
            }
        }
    });
}

#[test]
fn outputs_on_a_disk_are_searched_for_values_that_are_not_finite() {
    ranks!(1, || {
        let (ranks, folder) = (Ranks::sharded(world()), folder());
        let activations = Some(OffloadPlace::Disk(folder.path().to_path_buf()));
        for activations in [None, activations] {
            let options = Options {
                activation_checkpointing: ActivationCheckpointing::Full,
                offload: Offloading { activations, ..Offloading::default() },
                ..options(0, Precision::F32)
            };
            let mut trainer = trainer(&ranks, options);
            let block = trainer.shards_mut().nth(2).unwrap();
            no_grad(|| drop(block.parameters()[0].shallow_clone().fill_(f64::NAN)));
            let error = trainer.step(&[batch(0, 0)]).unwrap_err().to_string();
            assert!(error.contains("block.1"), "{error}");
        }
    });
}

/// This process's files without names in a folder. Each is open twice.
fn unnamed_files(folder: &Path) -> Vec<PathBuf> {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().map(|link| link.unwrap().path());
    let is_in = |link: &PathBuf| {
        std::fs::read_link(link)
            .is_ok_and(|target| target.starts_with(folder) && target.to_string_lossy().ends_with("(deleted)"))
    };
    links.filter(is_in).collect()
}

fn unnamed_file(folder: &Path) -> PathBuf {
    unnamed_files(folder).remove(0)
}

fn all_offloaded(stage: u8, folder: &Path) -> Options {
    let options = offloaded(options(stage, Precision::BF16), folder);
    let activations = Some(OffloadPlace::Disk(folder.to_path_buf()));
    let offload = Offloading { activations, ..options.offload };
    Options { activation_checkpointing: ActivationCheckpointing::Full, offload, ..options }
}

/// A disk that loses everything whenever the trainer enters a phase of the third step.
struct FailingDisk {
    phase: StepPhase,
    step: AtomicU64,
    files: Vec<File>,
}

impl Probe for FailingDisk {
    fn start_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }

    fn enter(&self, phase: StepPhase, _unit: usize) {
        if phase == self.phase && self.step.load(Ordering::Relaxed) == 3 {
            self.files.iter().for_each(|file| file.set_len(0).unwrap());
        }
    }
}

#[test]
fn a_disk_that_fails_in_any_phase_is_an_error_that_names_the_unit() {
    ranks!(1, || {
        let (ranks, folder) = (Ranks::sharded(world()), folder());
        let after = [StepPhase::Fetch, StepPhase::Optimizer, StepPhase::Store];
        let before =
            [StepPhase::Gather, StepPhase::Forward, StepPhase::Recompute, StepPhase::Backward, StepPhase::Reduce];
        for phase in before.into_iter().chain(after) {
            let mut trainer = trainer(&ranks, all_offloaded(3, folder.path()));
            let open = |path| OpenOptions::new().write(true).open(path).unwrap();
            let files = unnamed_files(folder.path()).into_iter().map(open).collect();
            trainer.set_probe(Arc::new(FailingDisk { phase, step: AtomicU64::new(0), files }));
            (0..2).for_each(|step| drop(trainer.step(&[batch(step, 0)]).unwrap()));
            // What is lost in the update is missed in the next step.
            let error = (2..4).find_map(|step| trainer.step(&[batch(step, 0)]).err()).unwrap().to_string();
            let names = ["parameters", "optimizer state", "gradients", "activations"];
            let is_named = |what: &&str| error.contains(&format!(": its {what} in {}: ", folder.path().display()));
            assert!(error.contains("unit ") && names.iter().any(is_named), "{phase:?}: {error}");
            // No number is computed from what was lost.
            let again = trainer.step(&[batch(4, 0)]).err().unwrap().to_string();
            assert!(again.contains(&error), "{phase:?}: {again}");
            drop(trainer);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    });
}

/// A file system with room for a few pages.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Only root can create one.
    fn mount(size: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "small"]).arg(folder.path());
        mount.status().is_ok_and(|status| status.success()).then_some(SmallDisk(folder))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        drop(Command::new("umount").arg(self.0.path()).status());
    }
}

#[test]
fn a_disk_that_is_full_is_an_error_that_names_the_unit() {
    ranks!(1, || {
        let Some(disk) = SmallDisk::mount("16k") else { return };
        let ranks = Ranks::sharded(world());
        let activations = Some(OffloadPlace::Disk(disk.0.path().to_path_buf()));
        let options = Options {
            activation_checkpointing: ActivationCheckpointing::Full,
            offload: Offloading { activations, ..Offloading::default() },
            ..options(0, Precision::F32)
        };
        let mut trainer = trainer(&ranks, options.clone());
        let error = trainer.step(&[batch(0, 0)]).unwrap_err().to_string();
        let expected = format!("its activations in {}: No space left on device", disk.0.path().display());
        assert!(error.starts_with("unit block.") && error.contains(&expected), "{error}");
        // The space for everything else is reserved.
        let offload = offloaded(options.clone(), disk.0.path()).offload;
        let made = Trainer::new(llama(), ranks, Options { offload, ..options }, &mut init::from_seed(5));
        let error = made.err().unwrap().to_string();
        assert!(error.contains("optimizer state cannot be offloaded") && error.contains("No space left"), "{error}");
    });
}

#[test]
fn a_changed_byte_is_an_error_that_names_the_unit() {
    ranks!(1, || {
        let (ranks, folder) = (Ranks::sharded(world()), folder());
        let mut trainer = trainer(&ranks, offloaded(options(2, Precision::F32), folder.path()));
        trainer.step(&[batch(0, 0)]).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(unnamed_file(folder.path())).unwrap();
        let mut byte = [0];
        // In a moment of the first unit.
        file.read_exact_at(&mut byte, 1001).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], 1001).unwrap();
        let error = trainer.step(&[batch(1, 0)]).unwrap_err().to_string();
        let expected =
            format!("unit embedding: its optimizer state in {}: what was read is not", folder.path().display());
        assert!(error.contains(&expected), "{error}");
        // The trainer cannot be used any more.
        assert!(trainer.step(&[batch(1, 0)]).unwrap_err().to_string().contains(&expected));
    });
}

#[test]
fn a_changed_byte_of_parameters_is_an_error_that_names_the_unit() {
    ranks!(1, || {
        let (ranks, folder) = (Ranks::sharded(world()), folder());
        let offload = parameters_on(folder.path());
        let mut trainer = trainer(&ranks, Options { offload, ..options(3, Precision::BF16) });
        trainer.step(&[batch(0, 0)]).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(unnamed_file(folder.path())).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 101).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], 101).unwrap();
        let error = trainer.step(&[batch(1, 0)]).unwrap_err().to_string();
        let expected = format!("unit embedding: its parameters in {}: what was read is not", folder.path().display());
        assert!(error.contains(&expected), "{error}");
    });
}

#[test]
fn a_read_that_fails_is_an_error_that_names_the_unit() {
    ranks!(1, || {
        let (ranks, folder) = (Ranks::sharded(world()), folder());
        let mut trainer = trainer(&ranks, offloaded(options(2, Precision::BF16), folder.path()));
        trainer.step(&[batch(0, 0)]).unwrap();
        let file = OpenOptions::new().write(true).open(unnamed_file(folder.path())).unwrap();
        file.set_len(4096).unwrap();
        let error = trainer.step(&[batch(1, 0)]).unwrap_err().to_string();
        let expected = format!("its optimizer state in {}: failed to fill whole buffer", folder.path().display());
        assert!(error.contains(&expected), "{error}");
    });
}

#[test]
fn a_folder_that_cannot_be_used_is_refused() {
    ranks!(1, || {
        let ranks = Ranks::sharded(world());
        let refused = |options: Options| {
            Trainer::new(llama(), ranks.clone(), options, &mut init::from_seed(5)).err().unwrap().to_string()
        };
        let error = refused(offloaded(options(1, Precision::F32), Path::new("/nowhere")));
        assert!(error.contains("GB of optimizer state cannot be offloaded to /nowhere: No such file"), "{error}");
        let whole = Options { offload: parameters_on(Path::new("/tmp")), ..options(2, Precision::F32) };
        assert!(refused(whole).contains("only sharded parameters can be offloaded"));
        let device = Options { device: Device::Cuda(0), ..offloaded(options(1, Precision::F32), Path::new("/tmp")) };
        let error = refused(device);
        assert!(error.contains("only ranks that compute on CPUs can offload to a disk"), "{error}");
        let host = Offloading { gradients: Some(OffloadPlace::Host), ..Offloading::default() };
        let error = refused(Options { offload: host, ..options(1, Precision::F32) });
        assert!(error.contains("have everything in the host's memory already"), "{error}");
    });
}
