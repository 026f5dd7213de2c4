//! The caching allocator. It is global to the process, so it has a separate test program.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use shardwise_plan::Dtype;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_torch::{Block, enable_caching_allocator};

fn megabytes(count: i64) -> Tensor {
    Tensor::ones([count << 18], (Kind::Float, Device::Cpu))
}

fn resident_megabytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() >> 10
}

#[test]
fn freed_memory_is_reused_and_never_exceeds_the_peak() {
    let before_it = megabytes(3);
    enable_caching_allocator();
    // Allocated by the previous allocator, and freed by it.
    drop(before_it);

    let first = megabytes(64);
    let address = first.data_ptr();
    drop(first);
    let again = megabytes(64);
    assert_eq!(again.data_ptr(), address, "the same request finds the same memory");
    drop(again);
    let slightly_less = megabytes(60);
    assert_eq!(slightly_less.data_ptr(), address, "so does one that is a little smaller");
    drop(slightly_less);

    // 64 MB are cached. Ten requests of other sizes, one at a time, must not add up.
    let before = resident_megabytes();
    for size in [40, 32, 26, 22, 18, 15, 12, 10, 8, 6] {
        let tensor = megabytes(size);
        assert_eq!(tensor.min().double_value(&[]), 1.);
    }
    assert!(resident_megabytes() <= before + 8, "{before} MB became {}", resident_megabytes());

    // They were in use at the same time, so all of them may be cached.
    let several: Vec<Tensor> = (0..4).map(|_| megabytes(20)).collect();
    let addresses: Vec<_> = several.iter().map(Tensor::data_ptr).collect();
    drop(several);
    let several: Vec<Tensor> = (0..4).map(|_| megabytes(20)).collect();
    assert!(several.iter().all(|tensor| addresses.contains(&tensor.data_ptr())), "all four are found again");

    // The peak counts from the last call.
    drop(several);
    shardwise_torch::take_peak_bytes();
    drop(megabytes(30));
    assert_eq!(shardwise_torch::take_peak_bytes() >> 20, 30);
    assert_eq!(shardwise_torch::take_peak_bytes(), 0);

    // Zeros are zero although the freed memory was not, and take no memory until they are written.
    drop(megabytes(64));
    let before = resident_megabytes();
    let zeros = Block::zeros(Dtype::F32, 64 << 18).unwrap().into_tensor().unwrap();
    assert!(resident_megabytes() <= before + 2, "{before} MB became {}", resident_megabytes());
    assert_eq!(zeros.abs().max().double_value(&[]), 0.);
    drop(zeros);
    assert_eq!(Block::zeros(Dtype::Bf16, 3).unwrap().into_tensor().unwrap().abs().max().double_value(&[]), 0.);

    // From several threads at once.
    std::thread::scope(|scope| {
        for thread in 0..4i64 {
            scope.spawn(move || {
                for round in 1..50 {
                    let size = 1 + (thread + round) % 5;
                    let tensor = megabytes(size) * (thread + 1);
                    assert_eq!(tensor.min().double_value(&[]), (thread + 1) as f64);
                    assert_eq!(tensor.max().double_value(&[]), (thread + 1) as f64);
                }
            });
        }
    });
}
