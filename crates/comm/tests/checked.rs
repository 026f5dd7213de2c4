//! Ranks that disagree about a call: named at once in checked mode, and in any case an error, in time, without a byte out of
//! place.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{CallFault, Error, Fault, Group, Part, Payload, Reduce, Verb, mpi};
use shardwise_harness::{Rank, Stopwatch, ranks, try_ranks};
use shardwise_plan::{Axis, Dtype, Mesh};
use support::{checked_world, launched_rank, let_the_others_speak, run_in_mixed_order, run_random_calls, world_with};

fn random_calls(size: u64) {
    let world = checked_world(|_| None);
    assert_eq!(world.size() as u64, size);
    run_random_calls(&world, size * 1000..size * 1000 + 125);
}

#[test]
fn checked_calls_alone() {
    ranks!(1, || random_calls(1));
}

#[test]
fn checked_calls_on_2_ranks() {
    ranks!(2, || random_calls(2));
}

#[test]
fn checked_calls_on_3_ranks() {
    ranks!(3, || random_calls(3));
}

#[test]
fn checked_calls_on_4_ranks_and_in_the_groups_of_a_mesh() {
    ranks!(4, || {
        let world = checked_world(|_| None);
        run_random_calls(&world, 4000..4125);
        let mesh = Mesh::new(&[(Axis::Replicate, 2), (Axis::Shard, 2)]).unwrap();
        let groups = [&[Axis::Replicate][..], &[Axis::Shard], &[]].map(|axes| world.along(&mesh, axes).unwrap());
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
        world.reduce_scatter("block.7", Reduce::Sum, vec![1f32; 8192], vec![0f32; 2048]).wait()?;
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
        let skip = CallFault { verb: Some(Verb::AllGather), label: "block.6".to_string(), nth: 2, what: Fault::Skip };
        let world = checked_world(|rank| (rank == 3).then_some(skip));
        let started = Stopwatch::start();
        let error = rounds(&world).unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        println!("{error}");
        let Error::Mismatch { sides, .. } = error else { panic!("{error}") };
        assert_eq!(sides.iter().map(|side| &side.ranks[..]).collect::<Vec<_>>(), [&[3][..], &[0, 1, 2]]);
        println!("then: {}", world.barrier("next").wait().unwrap_err());
        let_the_others_speak();
    });
    let report = outcome.unwrap_err().report;
    let sentence = "rank 3 came with reduce-scatter #3 of 'block.7' (8192 × f32) where ranks 0-2 came with all-gather #3 \
                    of 'block.6' (4096 × f32, world 0-3): nothing was sent";
    assert_all_say(&report.ranks, sentence);
    assert_all_say(
        &report.ranks,
        "of 'next' (0 × u8, world 0-3) was not started: the group is out of step since rank 3",
    );
}

#[test]
fn a_short_call_is_named_at_once() {
    let outcome = try_ranks!(4, || {
        let short = CallFault { verb: None, label: "block.7".to_string(), nth: 2, what: Fault::Short };
        let world = checked_world(|rank| (rank == 1).then_some(short));
        let started = Stopwatch::start();
        println!("{}", rounds(&world).unwrap_err());
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        let_the_others_speak();
    });
    let sentence = "rank 1 came with reduce-scatter #4 of 'block.7' (8191 × f32) where ranks 0, 2-3 came with \
                    reduce-scatter #4 of 'block.7' (8192 × f32, world 0-3): nothing was sent";
    assert_all_say(&outcome.unwrap_err().report.ranks, sentence);
}

/// Counted by `Arc`, to see it dropped.
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
fn every_way_to_disagree_is_named() {
    let outcome = try_ranks!(4, || {
        let world = checked_world(|_| None);
        let mesh = Mesh::new(&[(Axis::Shard, 4)]).unwrap();
        // A group of its own for each, for a group is out of step after the first.
        let group = || world.along(&mesh, &[Axis::Shard]).unwrap();
        let odd = world.rank() == 2;
        let started = Stopwatch::start();

        let verb = group();
        let error = match odd {
            true => verb.all_gather("unit", vec![0f32; 2], vec![0f32; 8]).wait().unwrap_err(),
            false => verb.reduce_scatter("unit", Reduce::Sum, vec![0f32; 8], vec![0f32; 2]).wait().unwrap_err(),
        };
        println!("{error}");
        let dtype = group();
        let error = match odd {
            true => dtype.all_reduce("unit", Reduce::Sum, vec![0i64; 8]).wait().unwrap_err(),
            false => dtype.all_reduce("unit", Reduce::Sum, vec![0f64; 8]).wait().unwrap_err(),
        };
        println!("{error}");
        let how = if odd { Reduce::Max } else { Reduce::Sum };
        println!("{}", group().all_reduce("norm", how, vec![0f32; 8]).wait().unwrap_err());
        println!("{}", group().broadcast("root", world.rank() % 2, vec![0f32; 8]).wait().unwrap_err());
        println!("{}", group().barrier(if odd { "begin" } else { "end" }).wait().unwrap_err());

        // A call that one rank refuses, and the others do not.
        let refused = group();
        let part_len = if odd { 1 } else { 2 };
        let (mine, memory) = (Arc::new(()), vec![0f32; part_len]);
        let gathered = refused.all_gather("unit", Counted(memory, mine.clone()), vec![0f32; 8]);
        let error = match odd {
            true => refused.barrier("after").wait().unwrap_err(),
            false => gathered.wait().map(drop).unwrap_err(),
        };
        println!("{error}");
        // What was not sent is not lost.
        assert_eq!(Arc::strong_count(&mine), 1);

        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        // The group that nobody was wrong in goes on.
        world.barrier("all have spoken").wait().unwrap();
        let_the_others_speak();
    });
    let report = outcome.unwrap_err().report;
    for sentence in [
        "rank 2 came with all-gather #1 of 'unit' (8 × f32) where ranks 0-1, 3 came with reduce-scatter #1 of 'unit' \
         (8 × f32, shard 0-3): nothing was sent",
        "rank 2 came with all-reduce #1 of 'unit' (8 × i64) where ranks 0-1, 3 came with all-reduce #1 of 'unit' \
         (8 × f64, shard 0-3): nothing was sent",
        "rank 2 came with all-reduce #1 of 'norm' (8 × f32, max) where ranks 0-1, 3 came with all-reduce #1 of 'norm' \
         (8 × f32, sum, shard 0-3): nothing was sent",
        "ranks 0, 2 came with broadcast #1 of 'root' (8 × f32, from rank 0), ranks 1, 3 with broadcast #1 of 'root' \
         (8 × f32, from rank 1, shard 0-3): nothing was sent",
        "rank 2 came with barrier #1 of 'begin' (0 × u8) where ranks 0-1, 3 came with barrier #1 of 'end' \
         (0 × u8, shard 0-3): nothing was sent",
        "rank 2 came with barrier #2 of 'after' (0 × u8) where ranks 0-1, 3 came with all-gather #1 of 'unit' \
         (8 × f32, shard 0-3): nothing was sent",
    ] {
        assert_all_say(&report.ranks, sentence);
    }
}

#[test]
fn a_call_that_is_skipped_or_short_is_just_that() {
    ranks!(1, || {
        let fault = |label: &str, what| CallFault { verb: None, label: label.to_string(), nth: 1, what };
        let world = checked_world(|_| Some(fault("unit", Fault::Skip)));
        let gather = || world.all_gather("unit", vec![1f32; 3], vec![0f32; 3]).wait().unwrap().1;
        assert_eq!(gather(), [0.; 3]);
        assert!(world.record().read().is_empty());
        assert_eq!(gather(), [1.; 3]);
        assert_eq!(world.record().read()[0].call.number, 1);
    });
    ranks!(2, || {
        // Alike on both ranks, so that they agree.
        let short = CallFault { verb: None, label: "unit".to_string(), nth: 1, what: Fault::Short };
        let world = checked_world(|_| Some(short));
        let mine = world.rank() as f32 + 1.;
        // 5 elements are 3 and 2; 4 are 2 and 2, and this rank's part in place begins one earlier.
        let mut whole = vec![0f32; 5];
        whole[world.partition(4).range(world.rank())].fill(mine);
        let whole = world.all_gather_in_place("unit", whole).wait().unwrap();
        assert_eq!(whole, [1., 1., 2., 2., 0.]);
        assert_eq!(world.record().read()[0].call.elements, 4);
    });
}

/// What a rank that nobody checks makes of calls in which another has left one out.
fn out_of_step(calls: impl FnOnce(&Group) -> Result<(), Error>) {
    let limit = Duration::from_secs(3);
    let skip = CallFault { verb: None, label: "skipped".to_string(), nth: 1, what: Fault::Skip };
    let fault = (launched_rank() == 3).then_some(skip);
    let world = world_with(mpi::Options { time_limit: limit, checked: false, fault });
    let started = Stopwatch::start();
    let error = calls(&world).unwrap_err();
    println!("after {:?}: {error}", started.elapsed());
    assert!(matches!(error, Error::TimedOut { .. } | Error::Transport { .. }), "{error}");
    // Of several calls each may take its time, but only one stands still for the limit.
    assert!(started.elapsed() < 2 * limit, "{:?}", started.elapsed());
    println!("an error in time");
    std::thread::sleep(limit + Duration::from_millis(500));
}

#[test]
fn without_checks_a_skipped_call_is_an_error_in_time_and_no_byte_is_out_of_place() {
    const GUARD: f32 = 7.;
    let outcome = try_ranks!(4, || {
        out_of_step(|world| {
            // Rank 3 comes with pieces of 256 KiB where the others expect 4 KiB at the end of a whole; what follows
            // it in memory is not to be touched.
            let mut memory = vec![0f32; 4096];
            memory.resize(4096 + 1_000_000, GUARD);
            let guard = memory[4096..].as_ptr();
            let gathered = world.all_gather("skipped", vec![1f32; 1024], Part::new(memory, 0..4096));
            let scattered =
                world.reduce_scatter("large", Reduce::Sum, vec![1f32; 4_000_000], vec![0f32; 1_000_000]).wait();
            let gathered = gathered.wait();
            if gathered.is_err() {
                // Longer than MPI may take to write what it should not.
                std::thread::sleep(Duration::from_millis(500));
                // SAFETY: the buffers of a call that failed are leaked, so the memory is still there.
                let guard = unsafe { std::slice::from_raw_parts(guard, 1_000_000) };
                assert!(guard.iter().all(|&x| x == GUARD), "memory behind the buffer was written to");
                println!("the memory behind the buffer is as it was");
            }
            gathered.and(scattered).map(drop)
        });
    });
    let report = outcome.unwrap_err().report;
    assert_all_say(&report.ranks, "an error in time");
    assert_all_say(&report.ranks[..3], "the memory behind the buffer is as it was");
    // What is too long meets nobody.
    assert_all_say(&report.ranks[..3], "'skipped' (4096 × f32, world 0-3) made no progress for 3s, waiting for rank 3");
}

#[test]
fn without_checks_a_skipped_call_among_equals_is_an_error_at_the_end() {
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
