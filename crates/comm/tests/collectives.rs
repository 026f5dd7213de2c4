//! All operations against a naive reference, on real ranks: 1,240 random calls of every operation, dtype and group size.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use shardwise_comm::{CallStatus, Count, Error, Part, ReduceOp, Verb, single};
use shardwise_harness::{Launch, ranks};
use shardwise_plan::{Axis, Mesh};
use shardwise_torch::Block;
use shardwise_torch::tch::{Device, Tensor};
use support::{assert_same, run_in_mixed_order, run_random_calls, world};

/// Random calls for one group size; each size draws different calls.
fn random_calls(size: u64) {
    let world = world();
    assert_eq!(world.size() as u64, size);
    run_random_calls(&world, size * 1000..size * 1000 + 125);
}

#[test]
fn random_calls_on_1_rank() {
    run_random_calls(&single::group(), 0..125);
    ranks!(1, || random_calls(1));
}

#[test]
fn random_calls_on_2_ranks() {
    ranks!(2, || random_calls(2));
}

#[test]
fn random_calls_on_3_ranks() {
    ranks!(3, || random_calls(3));
}

#[test]
fn random_calls_on_4_ranks() {
    ranks!(4, || random_calls(4));
}

#[test]
fn random_calls_on_5_ranks() {
    ranks!(5, || random_calls(5));
}

#[test]
fn random_calls_on_6_ranks() {
    ranks!(6, || random_calls(6));
}

#[test]
fn random_calls_on_7_ranks() {
    ranks!(7, || random_calls(7));
}

#[test]
fn random_calls_on_8_ranks() {
    ranks!(8, || random_calls(8));
}

#[test]
fn random_calls_in_the_groups_of_a_mesh() {
    ranks!(8, || {
        let world = world();
        let mesh = Mesh::new(&[(Axis::Replicate, 2), (Axis::Shard, 2), (Axis::Tensor, 2)]).unwrap();
        let every_axes: [&[Axis]; 8] = [
            &[Axis::Replicate],
            &[Axis::Shard],
            &[Axis::Tensor],
            &[Axis::Replicate, Axis::Shard],
            &[Axis::Replicate, Axis::Tensor],
            &[Axis::Shard, Axis::Tensor],
            &[Axis::Replicate, Axis::Shard, Axis::Tensor],
            &[],
        ];
        let groups = every_axes.map(|axes| world.split_along(&mesh, axes).unwrap());
        for (index, group) in groups.iter().enumerate() {
            let me = group.ranks().rank_at(group.rank());
            assert_eq!(me, world.rank());
            assert_eq!(group.ranks(), mesh.group(me, every_axes[index]));
            // Groups along the same axes run at the same time, and draw different calls.
            let seed = 100_000 + (index * 100 + group.ranks().first()) as u64 * 100;
            run_random_calls(group, seed..seed + 30);
        }
        run_in_mixed_order(&world, &groups);
    });
}

#[test]
fn a_message_of_more_than_two_to_the_31_elements() {
    let launch = Launch::ranks(2).timeout(std::time::Duration::from_secs(240));
    ranks!(launch, || {
        const LEN: usize = (1 << 31) + 12_345;
        let pattern = |index: usize| (index ^ (index >> 11) ^ (index >> 23)) as u8;
        let world = world();
        let buffer: Vec<u8> = match world.rank() {
            0 => (0..LEN).map(pattern).collect(),
            _ => vec![0; LEN],
        };
        let buffer = match world.rank() {
            0 => world.send("huge", 1, buffer).wait().unwrap(),
            _ => world.receive("huge", 0, buffer).wait().unwrap(),
        };
        assert!(buffer.iter().enumerate().all(|(index, &byte)| byte == pattern(index)));
        let sent = world.meter().total(|key| key.verb == Verb::Send);
        assert_eq!(sent.elements, if world.rank() == 0 { LEN as u64 } else { 0 });
    });
}

#[test]
fn an_all_gather_of_more_than_two_to_the_31_elements() {
    let launch = Launch::ranks(2).timeout(std::time::Duration::from_secs(240));
    ranks!(launch, || {
        const LEN: usize = (1 << 31) + 12_345;
        let world = world();
        let part_len = world.partition(LEN).part_len(world.rank());
        let part = vec![world.rank() as u8 + 1; part_len];
        let (_, whole) = world.all_gather("huge", part, vec![0u8; LEN]).wait().unwrap();
        let (first, second) = whole.split_at(world.partition(LEN).part_len(0));
        assert!(first.iter().all(|&byte| byte == 1) && second.iter().all(|&byte| byte == 2));
    });
}

#[test]
fn parts_of_buffers_and_memory_of_tensors_can_be_sent() {
    ranks!(3, || {
        let world = world();
        let range = world.partition(10).range(world.rank());
        let flat = Tensor::arange(10, (shardwise_torch::tch::Kind::Float, Device::Cpu));
        // The memory is taken out of the tensor, gathered into, and put back.
        let whole = shardwise_torch::storage::take(&flat, "being gathered").unwrap();
        let part = Part::new(vec![world.rank() as f32 + 0.5; 10], range.clone());
        let (part, whole) = world.all_gather("flat", part, whole).wait().unwrap();
        shardwise_torch::storage::put(&flat, whole).unwrap();
        assert_same(
            "gathered",
            &Vec::<f32>::try_from(&flat).unwrap(),
            &[0.5, 0.5, 0.5, 0.5, 1.5, 1.5, 1.5, 2.5, 2.5, 2.5],
        );
        assert_eq!(part.into_whole().len(), 10);
    });
}

#[test]
fn messages_between_two_ranks_arrive_in_order() {
    ranks!(2, || {
        let world = world();
        // The longest has more pieces than are posted at once, so the next message overtakes its last pieces.
        let lens = [300_000, 0, 7, 200_000_000, 1];
        let other = 1 - world.rank();
        let (sends, receives): (Vec<_>, Vec<_>) = lens
            .iter()
            .enumerate()
            .map(|(index, &len)| {
                let send = world.send("ordered", other, vec![(index * 2 + world.rank()) as u8; len]);
                (send, world.receive("ordered", other, vec![99u8; len]))
            })
            .unzip();
        for (index, receive) in receives.into_iter().enumerate() {
            let received = receive.wait().unwrap();
            assert!(received.iter().all(|&byte| byte as usize == index * 2 + other), "message {index}");
        }
        sends.into_iter().for_each(|send| drop(send.wait().unwrap()));
    });
}

#[test]
fn the_meter_counts_sent_bytes_per_algorithm() {
    ranks!(4, || {
        let world = world();
        let (n, len) = (4u64, 100_000usize);
        let part = len / 4;
        let gathered = world.all_gather("unit", vec![0f32; part], vec![0f32; len]);
        let scattered = world.reduce_scatter("unit", ReduceOp::Sum, vec![0f32; len], vec![0f32; part]);
        let reduced = world.all_reduce("norm", ReduceOp::Sum, Block::from_slice(&vec![0f32; len]).unwrap());
        drop((gathered.wait().unwrap(), scattered.wait().unwrap(), reduced.wait().unwrap()));
        let each = len as u64 * (n - 1) / n;
        for (verb, label, elements) in
            [(Verb::AllGather, "unit", each), (Verb::ReduceScatter, "unit", each), (Verb::AllReduce, "norm", 2 * each)]
        {
            let total = world.meter().total(|key| key.verb == verb && &*key.label == label);
            assert_eq!(total, Count { calls: 1, elements, bytes: 4 * elements }, "{verb}");
        }
        let entries = world.flight_recorder().read();
        assert_eq!(entries.len(), 3);
        assert!(entries.iter().all(|entry| entry.status == CallStatus::Done));
        assert_eq!(entries[1].call.to_string(), "reduce-scatter #2 of 'unit' (100000 × f32, world 0-3)");
    });
}

#[test]
fn wrong_calls_are_refused_before_anything_is_sent() {
    let group = single::group();
    let message = |error: Error| error.to_string();
    assert_eq!(
        message(group.all_gather("unit", vec![1f32; 3], vec![0f32; 4]).wait().unwrap_err()),
        "all-gather #1 of 'unit' (4 × f32, world 0): the part has 3 elements, but 4 are needed"
    );
    assert_eq!(
        message(group.all_gather("unit", vec![1i64; 4], vec![0f32; 4]).wait().unwrap_err()),
        "all-gather #2 of 'unit' (4 × f32, world 0): the input is i64 and the output is f32; both must have the same dtype"
    );
    assert!(message(group.broadcast("unit", 1, vec![0u8]).wait().unwrap_err()).contains("no rank 1 in a group of 1"));
    assert!(message(group.send("unit", 0, vec![0u8]).wait().unwrap_err()).contains("cannot send to itself"));
    let counts = group.all_to_all_counts("experts", vec![0u8; 2], &[2], vec![0u8; 3], &[3]);
    assert!(message(counts.wait().unwrap_err()).contains("the part for this rank itself has 2 elements, but 3"));
    assert!(group.flight_recorder().read().is_empty());
    let mesh = Mesh::new(&[(Axis::Shard, 2)]).unwrap();
    assert!(
        message(group.split_along(&mesh, &[Axis::Shard]).err().unwrap()).contains("has 2 ranks, but 1 were started")
    );
}
