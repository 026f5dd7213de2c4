//! Ranks that disagree about a call: collective verification names them at once; without it, they get an error within the
//! timeout, and no memory is corrupted.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{CallFault, CallFaultKind, Error, Group, Part, Payload, ReduceOp, Verb, mpi};
use shardwise_harness::{Rank, Stopwatch, ranks, try_ranks};
use shardwise_plan::{Axis, Dtype, Mesh};
use support::{launched_rank, let_others_print, run_in_mixed_order, run_random_calls, verifying_world, world_with};

fn random_calls(size: u64) {
    let world = verifying_world(|_| None);
    assert_eq!(world.size() as u64, size);
    run_random_calls(&world, size * 1000..size * 1000 + 125);
}

#[test]
fn verified_calls_on_1_rank() {
    ranks!(1, || random_calls(1));
}

#[test]
fn verified_calls_on_2_ranks() {
    ranks!(2, || random_calls(2));
}

#[test]
fn verified_calls_on_3_ranks() {
    ranks!(3, || random_calls(3));
}

#[test]
fn verified_calls_on_4_ranks_and_in_the_groups_of_a_mesh() {
    ranks!(4, || {
        let world = verifying_world(|_| None);
        run_random_calls(&world, 4000..4125);
        let mesh = Mesh::new(&[(Axis::Replicate, 2), (Axis::Shard, 2)]).unwrap();
        let groups = [&[Axis::Replicate][..], &[Axis::Shard], &[]].map(|axes| world.split_along(&mesh, axes).unwrap());
        for (index, group) in groups.iter().enumerate() {
            let seed = 200_000 + (index * 10 + group.ranks().first()) as u64 * 100;
            run_random_calls(group, seed..seed + 60);
        }
        run_in_mixed_order(&world, &groups);
    });
}

/// Three rounds of two collectives.
fn rounds(world: &Group) -> Result<(), Error> {
    for _ in 0..3 {
        world.all_gather("block.6", vec![1f32; 1024], vec![0f32; 4096]).wait()?;
        world.reduce_scatter("block.7", ReduceOp::Sum, vec![1f32; 8192], vec![0f32; 2048]).wait()?;
    }
    Ok(())
}

fn assert_all_say(ranks: &[Rank], sentence: &str) {
    for (rank, Rank { output, .. }) in ranks.iter().enumerate() {
        assert!(output.contains(sentence), "rank {rank} does not say '{sentence}': {output}");
    }
}

#[test]
fn a_skipped_call_is_named_at_once() {
    let outcome = try_ranks!(4, || {
        let skip =
            CallFault { verb: Some(Verb::AllGather), label: "block.6".to_string(), nth: 2, kind: CallFaultKind::Skip };
        let world = verifying_world(|rank| (rank == 3).then_some(skip));
        let started = Stopwatch::start();
        let error = rounds(&world).unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        println!("{error}");
        let Error::Mismatch { variants, .. } = error else { panic!("{error}") };
        assert_eq!(variants.iter().map(|variant| &variant.ranks[..]).collect::<Vec<_>>(), [&[3][..], &[0, 1, 2]]);
        println!("then: {}", world.barrier("next").wait().unwrap_err());
        let_others_print();
    });
    let report = outcome.unwrap_err().report;
    let sentence = "rank 3 called reduce-scatter #3 of 'block.7' (8192 × f32) while ranks 0-2 called all-gather #3 \
                    of 'block.6' (4096 × f32, world 0-3): nothing was sent";
    assert_all_say(&report.ranks, sentence);
    assert_all_say(
        &report.ranks,
        "of 'next' (0 × u8, world 0-3) was not started: an earlier call of the group failed: rank 3",
    );
}

#[test]
fn a_short_call_is_named_at_once() {
    let outcome = try_ranks!(4, || {
        let short = CallFault { verb: None, label: "block.7".to_string(), nth: 2, kind: CallFaultKind::Shorten };
        let world = verifying_world(|rank| (rank == 1).then_some(short));
        let started = Stopwatch::start();
        println!("{}", rounds(&world).unwrap_err());
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        let_others_print();
    });
    let sentence = "rank 1 called reduce-scatter #4 of 'block.7' (8191 × f32) while ranks 0, 2-3 called \
                    reduce-scatter #4 of 'block.7' (8192 × f32, world 0-3): nothing was sent";
    assert_all_say(&outcome.unwrap_err().report.ranks, sentence);
}

/// A payload whose drop an `Arc` makes visible.
struct Counted(Vec<f32>, #[expect(dead_code, reason = "it counts")] Arc<()>);

// SAFETY: a vector's memory stays where it is.
unsafe impl Payload for Counted {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }
    fn len(&self) -> usize {
        self.0.len()
    }
    fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }
}

#[test]
fn every_kind_of_mismatch_is_reported() {
    let outcome = try_ranks!(4, || {
        let world = verifying_world(|_| None);
        let mesh = Mesh::new(&[(Axis::Shard, 4)]).unwrap();
        // A new group for each case, because a group is broken after its first failure.
        let group = || world.split_along(&mesh, &[Axis::Shard]).unwrap();
        let odd = world.rank() == 2;
        let started = Stopwatch::start();

        let verb = group();
        let error = match odd {
            true => verb.all_gather("unit", vec![0f32; 2], vec![0f32; 8]).wait().unwrap_err(),
            false => verb.reduce_scatter("unit", ReduceOp::Sum, vec![0f32; 8], vec![0f32; 2]).wait().unwrap_err(),
        };
        println!("{error}");
        let dtype = group();
        let error = match odd {
            true => dtype.all_reduce("unit", ReduceOp::Sum, vec![0i64; 8]).wait().unwrap_err(),
            false => dtype.all_reduce("unit", ReduceOp::Sum, vec![0f64; 8]).wait().unwrap_err(),
        };
        println!("{error}");
        let how = if odd { ReduceOp::Max } else { ReduceOp::Sum };
        println!("{}", group().all_reduce("norm", how, vec![0f32; 8]).wait().unwrap_err());
        println!("{}", group().broadcast("root", world.rank() % 2, vec![0f32; 8]).wait().unwrap_err());
        println!("{}", group().barrier(if odd { "begin" } else { "end" }).wait().unwrap_err());

        // A call that one rank refuses and the others do not.
        let refused = group();
        let part_len = if odd { 1 } else { 2 };
        let (mine, memory) = (Arc::new(()), vec![0f32; part_len]);
        let gathered = refused.all_gather("unit", Counted(memory, mine.clone()), vec![0f32; 8]);
        let error = match odd {
            true => refused.barrier("after").wait().unwrap_err(),
            false => gathered.wait().map(drop).unwrap_err(),
        };
        println!("{error}");
        // Buffers that were not sent are not leaked.
        assert_eq!(Arc::strong_count(&mine), 1);

        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        // A group without a mismatch still works.
        world.barrier("all have printed").wait().unwrap();
        let_others_print();
    });
    let report = outcome.unwrap_err().report;
    for sentence in [
        "rank 2 called all-gather #1 of 'unit' (8 × f32) while ranks 0-1, 3 called reduce-scatter #1 of 'unit' \
         (8 × f32, shard 0-3): nothing was sent",
        "rank 2 called all-reduce #1 of 'unit' (8 × i64) while ranks 0-1, 3 called all-reduce #1 of 'unit' \
         (8 × f64, shard 0-3): nothing was sent",
        "rank 2 called all-reduce #1 of 'norm' (8 × f32, max) while ranks 0-1, 3 called all-reduce #1 of 'norm' \
         (8 × f32, sum, shard 0-3): nothing was sent",
        "ranks 0, 2 called broadcast #1 of 'root' (8 × f32, from rank 0), ranks 1, 3 called broadcast #1 of 'root' \
         (8 × f32, from rank 1, shard 0-3): nothing was sent",
        "rank 2 called barrier #1 of 'begin' (0 × u8) while ranks 0-1, 3 called barrier #1 of 'end' \
         (0 × u8, shard 0-3): nothing was sent",
        "rank 2 called barrier #2 of 'after' (0 × u8) while ranks 0-1, 3 called all-gather #1 of 'unit' \
         (8 × f32, shard 0-3): nothing was sent",
    ] {
        assert_all_say(&report.ranks, sentence);
    }
}

#[test]
fn injected_faults_skip_or_shorten_one_call() {
    ranks!(1, || {
        let fault = |label: &str, kind| CallFault { verb: None, label: label.to_string(), nth: 1, kind };
        let world = verifying_world(|_| Some(fault("unit", CallFaultKind::Skip)));
        let gather = || world.all_gather("unit", vec![1f32; 3], vec![0f32; 3]).wait().unwrap().1;
        assert_eq!(gather(), [0.; 3]);
        assert!(world.flight_recorder().read().is_empty());
        assert_eq!(gather(), [1.; 3]);
        assert_eq!(world.flight_recorder().read()[0].call.number, 1);
    });
    ranks!(2, || {
        // The same on both ranks, so that they agree.
        let short = CallFault { verb: None, label: "unit".to_string(), nth: 1, kind: CallFaultKind::Shorten };
        let world = verifying_world(|_| Some(short));
        let mine = world.rank() as f32 + 1.;
        // 5 elements split into 3 and 2, 4 into 2 and 2: rank 1's in-place part starts one element earlier.
        let mut whole = vec![0f32; 5];
        whole[world.partition(4).range(world.rank())].fill(mine);
        let whole = world.all_gather_in_place("unit", whole).wait().unwrap();
        assert_eq!(whole, [1., 1., 2., 2., 0.]);
        assert_eq!(world.flight_recorder().read()[0].call.elements, 4);
    });
}

/// Without verification, runs calls of which rank 3 skips one, and expects an error within the timeout.
fn out_of_step(calls: impl FnOnce(&Group) -> Result<(), Error>) {
    let timeout = Duration::from_secs(3);
    let skip = CallFault { verb: None, label: "skipped".to_string(), nth: 1, kind: CallFaultKind::Skip };
    let fault = (launched_rank() == 3).then_some(skip);
    let world = world_with(mpi::Options { timeout, verify_collectives: false, fault });
    let started = Stopwatch::start();
    let error = calls(&world).unwrap_err();
    println!("after {:?}: {error}", started.elapsed());
    assert!(matches!(error, Error::TimedOut { .. } | Error::Transport { .. }), "{error}");
    // Several calls may take a while each, but only one stalls for the timeout.
    assert!(started.elapsed() < 2 * timeout, "{:?}", started.elapsed());
    println!("an error in time");
    std::thread::sleep(timeout + Duration::from_millis(500));
}

#[test]
fn without_verification_a_skipped_call_times_out_and_corrupts_no_memory() {
    const GUARD: f32 = 7.;
    let outcome = try_ranks!(4, || {
        out_of_step(|world| {
            // Rank 3 sends pieces of 256 KiB where the others expect 4 KiB at the end of a buffer; the memory behind the
            // buffer must not be touched.
            let mut memory = vec![0f32; 4096];
            memory.resize(4096 + 1_000_000, GUARD);
            let guard = memory[4096..].as_ptr();
            let gathered = world.all_gather("skipped", vec![1f32; 1024], Part::new(memory, 0..4096));
            let scattered =
                world.reduce_scatter("large", ReduceOp::Sum, vec![1f32; 4_000_000], vec![0f32; 1_000_000]).wait();
            let gathered = gathered.wait();
            if gathered.is_err() {
                // Enough time for MPI to write where it should not.
                std::thread::sleep(Duration::from_millis(500));
                // SAFETY: the buffers of a failed call are leaked, so the memory is still valid.
                let guard = unsafe { std::slice::from_raw_parts(guard, 1_000_000) };
                assert!(guard.iter().all(|&x| x == GUARD), "memory behind the buffer was written to");
                println!("the memory behind the buffer is unchanged");
            }
            gathered.and(scattered).map(drop)
        });
    });
    let report = outcome.unwrap_err().report;
    assert_all_say(&report.ranks, "an error in time");
    assert_all_say(&report.ranks[..3], "the memory behind the buffer is unchanged");
    // A message that is too long matches no receive.
    assert_all_say(&report.ranks[..3], "'skipped' (4096 × f32, world 0-3) made no progress for 3s, waiting for rank 3");
}

#[test]
fn without_verification_a_skipped_call_among_equals_is_an_error_at_the_end() {
    let outcome = try_ranks!(4, || {
        out_of_step(|world| {
            for label in ["first", "skipped", "third"] {
                world.all_gather(label, vec![1f32; 1024], vec![0f32; 4096]).wait()?;
            }
            world.barrier("end").wait()
        });
    });
    assert_all_say(&outcome.unwrap_err().report.ranks, "an error in time");
}
