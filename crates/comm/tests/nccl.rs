//! The parts of the NCCL backend that run without a GPU.

#![cfg(feature = "nccl")]
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use shardwise_comm::{nccl, single};

#[test]
fn the_nccl_of_the_torch_environment_is_loaded() {
    let version = nccl::library_version().unwrap();
    println!("NCCL {version}");
    assert!(version.starts_with("2."), "{version}");
}

#[test]
fn without_a_gpu_a_group_of_gpus_is_refused_with_a_reason() {
    if shardwise_torch::tch::Cuda::is_available() {
        let group = nccl::connect(single::group(), 0).unwrap();
        assert_eq!(group.size(), 1);
        return;
    }
    let error = nccl::connect(single::group(), 0).err().unwrap().to_string();
    assert!(error.contains("CUDA"), "{error}");
}

#[test]
fn a_cuda_build_keeps_libtorch_cuda_loaded() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains("libtorch_cuda.so"), "CUDA would silently be unavailable");
}
