//! The NCCL backend: the real library as far as it runs without a GPU, and all of the backend on a library that stands in for it.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use shardwise_comm::{CallStatus, Error, Group, ReduceOp, mpi, nccl, single};
use shardwise_harness::{Launch, ranks, scale_timeout};
use shardwise_plan::{Axis, Mesh};
use shardwise_pretend_device::{device, set_seed};
use shardwise_torch::device::accelerators;
use shardwise_torch::storage;
use shardwise_torch::tch::{Device, Kind, Tensor};
use support::{download, run_random_calls, upload, world, world_with};

#[test]
fn the_nccl_of_the_torch_environment_is_loaded() {
    let version = nccl::library_version().unwrap();
    println!("NCCL {version}");
    assert!(version.starts_with("2."), "{version}");
}

#[test]
fn without_a_gpu_a_group_of_gpus_is_refused_with_a_reason() {
    if std::path::Path::new("/proc/driver/nvidia/version").exists() {
        let group = nccl::connect(single::group(), Device::Cuda(0)).unwrap();
        assert_eq!(group.size(), 1);
        return;
    }
    let error = nccl::connect(single::group(), Device::Cuda(0)).err().unwrap().to_string();
    assert!(error.contains("CUDA"), "{error}");
}

#[test]
fn cuda_s_part_of_libtorch_is_loaded_when_it_is_needed() {
    let is_loaded = || std::fs::read_to_string("/proc/self/maps").unwrap().contains("libtorch_cuda.so");
    assert!(!is_loaded(), "programs that train on the CPU do without");
    let devices = accelerators().unwrap();
    assert!(is_loaded() && devices.iter().all(|device| matches!(device, Device::Cuda(_))), "{devices:?}");
}

/// All ranks, with buffers on pretend devices.
fn gpu_world() -> Group {
    nccl::connect(world(), device()).unwrap()
}

/// Random calls, with streams that pause at random.
fn random_calls(size: u64) {
    set_seed(NonZeroU64::new(size));
    let world = gpu_world();
    assert_eq!((world.size() as u64, world.device()), (size, device()));
    run_random_calls(&world, size * 1000..size * 1000 + 60);
}

#[test]
fn random_calls_on_1_device() {
    ranks!(1, || random_calls(1));
}

#[test]
fn random_calls_on_2_devices() {
    ranks!(2, || random_calls(2));
}

#[test]
fn random_calls_on_3_devices() {
    ranks!(3, || random_calls(3));
}

#[test]
fn random_calls_on_5_devices() {
    ranks!(5, || random_calls(5));
}

#[test]
fn random_calls_in_the_groups_of_a_mesh_of_devices() {
    ranks!(4, || {
        let world = gpu_world();
        let mesh = Mesh::new(&[(Axis::Shard, 2), (Axis::Tensor, 2)]).unwrap();
        for (index, axes) in [&[Axis::Shard][..], &[Axis::Tensor], &[Axis::Shard, Axis::Tensor]].iter().enumerate() {
            let group = world.split_along(&mesh, axes).unwrap();
            let seed = 200_000 + (index * 100 + group.ranks().first()) as u64 * 100;
            run_random_calls(&group, seed..seed + 20);
        }
    });
}

/// The work of libtorch before and after a call, in order, though nobody waits for either.
fn compute_around_calls(group: &Group, seed: u64) {
    let len = 20_000;
    let on_device = |value: f64| Tensor::full([len], value, (Kind::Float, device()));
    let mut expected = 1.;
    let mut x = on_device(1.);
    for _ in 0..6 {
        // Many kernels, of which the call needs the last, and whose memory is used again while it runs.
        for _ in 0..4 {
            x = (&x * 3. - &x) * 0.5;
        }
        // The ranks' own terms cancel out.
        let own = if group.rank() == 0 { &x + 1. } else { &x - 1. };
        let block = storage::take(&own, "it is sent").unwrap();
        let pending = group.all_reduce("around", ReduceOp::Mean, block);
        let busy: Vec<Tensor> = (0..3).map(|index| on_device(f64::from(index)) * 2.).collect();
        x = pending.wait().unwrap().into_tensor().unwrap() + 1.;
        drop(busy);
        expected += 1.;
    }
    let found = Vec::<f32>::try_from(&x).unwrap();
    assert!(found.iter().all(|&element| f64::from(element) == expected), "seed {seed}: {} is not {expected}", found[0]);
}

#[test]
fn calls_and_the_work_around_them_are_ordered_for_every_seed() {
    ranks!(2, || {
        let group = gpu_world();
        let count = std::env::var("SHARDWISE_SEEDS").map_or(50, |count| count.parse().unwrap());
        for seed in 1..=count {
            set_seed(NonZeroU64::new(seed));
            compute_around_calls(&group, seed);
        }
    });
}

#[test]
fn a_call_that_others_do_not_make_is_named_and_ends_the_group() {
    let launch = Launch::ranks(2).timeout(Duration::from_secs(120));
    ranks!(launch, || {
        let device = device();
        let timeout = scale_timeout(Duration::from_secs(3));
        let control = world_with(mpi::Options { timeout, ..mpi::Options::default() });
        let rank = control.rank();
        let group = nccl::connect(control, device).unwrap();
        group.all_reduce("first", ReduceOp::Sum, upload(&group, &[1f32; 100])).wait().unwrap();
        if rank == 0 {
            let began = Instant::now();
            let lost = group.all_reduce("stuck", ReduceOp::Sum, upload(&group, &[1f32; 100])).wait().unwrap();
            // The host waits for the device, which waits for the other rank, until the call is aborted.
            let _ = download::<f32>(&lost);
            assert!(began.elapsed() >= timeout, "{:?}", began.elapsed());
            let error = group.check().unwrap_err();
            assert!(matches!(error, Error::TimedOut { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("'stuck'") && text.contains("made no progress for "), "{text}");
            let status = group.flight_recorder().group_status();
            let failed = status.iter().find(|status| &*status.entry.call.label == "stuck").unwrap();
            assert!(matches!(failed.entry.status, CallStatus::Failed(_)), "{:?}", failed.entry);
            let next = group.all_reduce("next", ReduceOp::Sum, upload(&group, &[1f32; 100])).wait();
            assert!(matches!(next.err().unwrap(), Error::Broken { .. }));
        } else {
            // Otherwise the call would fail because this rank has gone.
            std::thread::sleep(2 * timeout);
        }
    });
}

#[test]
fn a_call_that_nobody_waits_for_keeps_its_buffers() {
    ranks!(2, || {
        let group = gpu_world();
        let elements: Vec<f32> = (0..50_000).map(|index| index as f32).collect();
        for round in 0..20u8 {
            let send = upload(&group, &elements);
            let received = match group.rank() {
                // The buffer's memory would be used again at once, while the other rank has not even asked for it.
                0 => {
                    drop(group.send("lost", 1, send));
                    drop(upload(&group, &vec![-1f32; elements.len()]));
                    elements.clone()
                }
                _ => {
                    std::thread::sleep(Duration::from_millis(5));
                    download(&group.receive("lost", 0, send).wait().unwrap())
                }
            };
            assert!(received == elements, "round {round}");
        }
    });
}

#[test]
fn a_failure_is_known_as_soon_as_its_result_can_be_read() {
    ranks!(2, || {
        let device = device();
        let world = world();
        let mesh = Mesh::new(&[(Axis::Shard, 2)]).unwrap();
        for round in 0..10 {
            let group = nccl::connect(world.split_along(&mesh, &[Axis::Shard]).unwrap(), device).unwrap();
            match world.rank() {
                // Its connections close, as if it had died.
                1 => drop(group),
                _ => {
                    let lost = group.all_reduce("lost", ReduceOp::Sum, upload(&group, &[1f32; 100])).wait();
                    // Unless it has failed before it was waited for.
                    if let Ok(lost) = lost {
                        let _ = download::<f32>(&lost);
                        assert!(group.check().is_err(), "round {round}");
                    }
                }
            }
            world.barrier("round").wait().unwrap();
        }
    });
}

#[test]
fn a_call_has_ended_when_the_device_has_got_to_its_end() {
    ranks!(2, || {
        let group = gpu_world();
        let rank = group.rank();
        let status = |label: &str| {
            let entries = group.flight_recorder().read();
            entries.into_iter().rfind(|entry| &*entry.call.label == label).unwrap().status
        };
        let buffer = upload(&group, &[1f32; 1000]);
        if rank == 1 {
            std::thread::sleep(scale_timeout(Duration::from_secs(1)));
        }
        let pending = group.all_reduce("slow", ReduceOp::Sum, buffer);
        let block = pending.wait().unwrap();
        if rank == 0 {
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(status("slow"), CallStatus::Running, "`wait` has only queued what comes after it");
        }
        assert_eq!(download::<f32>(&block), [2.; 1000]);
        let waited = Instant::now();
        while status("slow") != CallStatus::Done {
            assert!(waited.elapsed() < scale_timeout(Duration::from_secs(5)), "{:?}", status("slow"));
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}
