//! Reliability: the same bits under load, and an error that names the rank when one dies, lags, disagrees or is cut off.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use half::bf16;
use shardwise_comm::{CallFault, CallFaultKind, CallStatus, Error, Group, GroupStatus, ReduceOp, mpi};
use shardwise_harness::{Exit, Failure, Hosts, Launch, Stopwatch, ranks, try_ranks};
use shardwise_plan::{Axis, Mesh, RankSet};
use support::{
    Value, assert_same, input, launched_rank, let_others_print, run_random_calls, verifying_world, world, world_with,
    world_with_timeout,
};

#[test]
fn reduce_scatter_gives_the_same_bits_in_20_runs_under_load() {
    ranks!(4, || {
        let world = world();
        // Two threads per rank that alternate between computing and sleeping, out of phase with all others.
        let stop = Arc::new(AtomicBool::new(false));
        let loads: Vec<_> = (0..2)
            .map(|index| {
                let (stop, rest) = (stop.clone(), Duration::from_micros(150 + 370 * index + 90 * world.rank() as u64));
                std::thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let until = Instant::now() + 2 * rest;
                        while Instant::now() < until {
                            std::hint::spin_loop();
                        }
                        std::thread::sleep(rest);
                    }
                })
            })
            .collect();

        fn twenty_times<T: Value>(world: &shardwise_comm::Group, len: usize) {
            let whole: Vec<T> = input(4711, world.rank(), len);
            let range = world.partition(len).range(world.rank());
            let expected: Vec<T> = {
                let inputs: Vec<Vec<T>> = (0..world.size()).map(|rank| input(4711, rank, len)).collect();
                let reduced = |index| T::reduce(&inputs.iter().map(|x| x[index]).collect::<Vec<_>>(), ReduceOp::Sum);
                range.clone().map(reduced).collect()
            };
            for run in 0..20 {
                let call = || {
                    let part = vec![T::default(); range.len()];
                    world.reduce_scatter("grads", ReduceOp::Sum, whole.clone(), part)
                };
                if run % 2 == 0 {
                    assert_same("blocking", &call().wait().unwrap().1, &expected);
                } else {
                    let several = [call(), call(), call()];
                    for pending in several {
                        assert_same("several under way", &pending.wait().unwrap().1, &expected);
                    }
                }
            }
        }
        twenty_times::<f32>(&world, 1_000_003);
        twenty_times::<bf16>(&world, 1_000_003);

        stop.store(true, Ordering::Relaxed);
        loads.into_iter().for_each(|load| load.join().unwrap());
    });
}

#[test]
fn sums_of_bf16_payloads_are_exact_to_f32() {
    ranks!(8, || {
        let world = world();
        // 256 plus seven times 0.5: in bf16, each single addition would be lost.
        let mine = if world.rank() == 0 { 256. } else { 0.5 };
        let whole = vec![bf16::from_f32(mine); 80_000];
        let (_, part) = world.reduce_scatter("sum", ReduceOp::Sum, whole, vec![bf16::ZERO; 10_000]).wait().unwrap();
        assert!(part.iter().all(|x| *x == bf16::from_f32(259.5)));
        let all = world.all_reduce("sum", ReduceOp::Sum, vec![bf16::from_f32(mine)]).wait().unwrap();
        assert_eq!(all, [bf16::from_f32(259.5)]);
    });
}

#[test]
fn a_rank_that_exits_in_the_middle_of_a_collective_is_named() {
    let failure = try_ranks!(3, || {
        let world = world();
        if world.rank() == 1 {
            println!("rank 1 leaves without a word");
            std::process::exit(7);
        }
        drop(world.all_reduce("loss", ReduceOp::Sum, vec![0f32; 1_000_000]).wait());
    })
    .unwrap_err();
    assert!(failure.to_string().contains("rank 1 of 3 exited with code 7"), "{failure}");
    assert!(failure.to_string().contains("rank 1 leaves without a word"), "{failure}");
    assert_eq!(failure.rank, Some(1));
}

#[test]
fn a_rank_that_is_killed_is_named() {
    let failure = try_ranks!(2, || {
        let world = world();
        if world.rank() == 0 {
            let me = std::process::id().to_string();
            std::process::Command::new("kill").args(["-9", &me]).status().unwrap();
        }
        drop(world.barrier("start").wait());
    })
    .unwrap_err();
    assert!(failure.to_string().contains("rank 0 of 2 was killed by signal 9"), "{failure}");
}

#[test]
fn a_rank_that_panics_ends_the_run_at_once_and_is_named() {
    let started = Stopwatch::start();
    let failure = try_ranks!(2, || {
        let world = world();
        if world.rank() == 1 {
            panic!("the tokenizer is missing");
        }
        drop(world.barrier("start").wait());
    })
    .unwrap_err();
    assert!(failure.to_string().contains("rank 1 of 2 panicked"), "{failure}");
    assert!(failure.to_string().contains("the tokenizer is missing"), "{failure}");
    // Long before any timeout: the waiting rank is stopped.
    assert!(started.elapsed() < Duration::from_secs(25), "{:?}", started.elapsed());
}

/// A program whose `main` returns an error on rank 1, halfway, while the others wait for that rank in a call.
fn fail_halfway(
    world: &Group,
    wait: impl FnOnce(&Group) -> Result<(), Error>,
) -> Result<(), Box<dyn std::error::Error>> {
    world.barrier("start").wait()?;
    if world.rank() == 1 {
        return Err("the tokenizer is missing".into());
    }
    Ok(wait(world)?)
}

/// Does what `main` does with an error, after it has dropped everything.
fn end_like_main(result: Result<(), Box<dyn std::error::Error>>) {
    if let Err(error) = result {
        eprintln!("Error: {error}");
        std::process::exit(1);
    }
}

/// Three ranks, with a test timeout much shorter than that of their calls.
fn three_ranks_in_a_hurry() -> Launch {
    Launch::ranks(3).timeout(Duration::from_secs(25))
}

/// Asserts that the ranks were not stopped by the timeout, and that the one that failed printed its message once.
fn assert_ended_at_once(failure: &Failure, said: &str) {
    assert!(!failure.reason.contains("was not done"), "{failure}");
    let said_by = |rank: usize| failure.report.ranks[rank].output.matches(said).count();
    assert_eq!([0, 1, 2].map(said_by), [0, 1, 0], "{failure}");
}

#[test]
fn a_rank_that_returns_an_error_ends_the_run_at_once_with_its_message() {
    let failure = try_ranks!(three_ranks_in_a_hurry(), || {
        // As in a program without a supervisor: the timeout is five minutes.
        let world = world_with(mpi::Options::default());
        let result = fail_halfway(&world, |world| world.all_reduce("loss", ReduceOp::Sum, vec![1f32]).wait().map(drop));
        drop(world);
        end_like_main(result);
    })
    .unwrap_err();
    assert_ended_at_once(&failure, "Error: the tokenizer is missing");
    assert_eq!(failure.report.ranks[1].exit, Exit::Code(1), "{failure}");
    let message = "rank 1 has left the run, but rank";
    assert!(failure.report.ranks[1].output.contains(message), "{failure}");
}

#[test]
fn a_rank_that_returns_an_error_while_others_receive_or_create_a_group_ends_the_run() {
    let failure = try_ranks!(three_ranks_in_a_hurry(), || {
        let world = world_with(mpi::Options::default());
        // Rank 0 only receives from rank 1, and rank 2 waits for both.
        let result = fail_halfway(&world, |world| match world.rank() {
            0 => world.receive("from 1", 1, vec![0f32]).wait().map(drop),
            _ => world.split_along(&Mesh::new(&[(Axis::Shard, 3)]).unwrap(), &[Axis::Shard]).map(drop),
        });
        drop(world);
        end_like_main(result);
    })
    .unwrap_err();
    assert_ended_at_once(&failure, "Error: the tokenizer is missing");
}

#[test]
fn a_rank_that_aborts_ends_the_run_at_once_with_its_message() {
    let failure = try_ranks!(three_ranks_in_a_hurry(), || {
        let world = world_with(mpi::Options::default());
        if let Err(error) = fail_halfway(&world, |world| world.barrier("next").wait()) {
            world.abort(&error.to_string());
        }
    })
    .unwrap_err();
    assert_ended_at_once(&failure, "rank 1: the tokenizer is missing");
}

#[test]
fn a_rank_that_is_done_early_waits_for_the_others_without_an_error() {
    ranks!(3, || {
        let world = world();
        // Each rank is late once, so that the others probe it; rank 0 in the last call that it takes part in.
        for late in [1, 2, 0] {
            if world.rank() == late {
                std::thread::sleep(Duration::from_millis(1600));
            }
            world.barrier("all").wait().unwrap();
        }
        // Rank 0 is done. The others communicate with each other, and one of them is late.
        match world.rank() {
            0 => (),
            1 => drop(world.receive("late", 2, vec![0f32; 3]).wait().unwrap()),
            _ => {
                std::thread::sleep(Duration::from_secs(3));
                drop(world.send("late", 1, vec![1f32; 3]).wait().unwrap());
            }
        }
    });
}

#[test]
fn a_panic_of_the_communication_thread_ends_the_process_while_its_buffers_are_alive() {
    let failure = try_ranks!(2, || {
        let panic = CallFault { verb: None, label: "block.3".to_string(), nth: 1, kind: CallFaultKind::Panic };
        let fault = (launched_rank() == 1).then_some(panic);
        let world = world_with(mpi::Options { fault, ..mpi::Options::default() });
        world.barrier("start").wait().unwrap();
        let gathered = world.all_gather("block.3", vec![1u8; 4 << 20], vec![0u8; 8 << 20]).wait();
        println!("went on with {:?}", gathered.map(drop));
    })
    .unwrap_err();
    assert!(failure.to_string().contains("rank 1 of 2 was killed by signal 6"), "{failure}");
    let output = &failure.report.ranks[1].output;
    assert!(output.contains("all-gather #2 of 'block.3'") && output.contains("was told to panic"), "{output}");
    assert!(output.contains("rank 1: the communication thread panicked"), "{output}");
    assert!(!output.contains("went on"), "{output}");
}

#[test]
fn a_rank_that_does_not_exit_is_named() {
    let launch = Launch::ranks(2).timeout(Duration::from_secs(4));
    let failure = try_ranks!(launch, || {
        let world = world();
        world.barrier("start").wait().unwrap();
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_secs(60));
        }
    })
    .unwrap_err();
    assert!(
        failure.to_string().contains("after 4s, rank") && failure.to_string().contains("was not done"),
        "{failure}"
    );
    assert_eq!(failure.report.ranks[1].exit, Exit::Stopped);
}

#[test]
fn a_rank_that_never_joins_a_collective_is_named_by_the_others() {
    let outcome = try_ranks!(4, || {
        let timeout = Duration::from_secs(2);
        let world = world_with_timeout(timeout);
        if world.rank() == 2 {
            std::thread::sleep(6 * timeout);
            std::process::exit(0);
        }
        let started = Stopwatch::start();
        let whole = vec![1f32; 400_000];
        let error = world.reduce_scatter("block.7", ReduceOp::Sum, whole, vec![0f32; 100_000]).wait().unwrap_err();
        println!("after {:?}: {error}", started.elapsed());
        assert!(started.elapsed() < 2 * timeout);
        assert!(matches!(error, Error::TimedOut { .. }));
        // Later calls fail at once, with the reason.
        println!("then: {}", world.barrier("next").wait().unwrap_err());
        let_others_print();
    });
    // Ranks that fail exit without finalizing MPI, which the launcher reports.
    let report = outcome.unwrap_err().report;
    for rank in [0, 1, 3] {
        let output = &report.ranks[rank].output;
        let named =
            "reduce-scatter #1 of 'block.7' (400000 × f32, world 0-3) made no progress for 2s, waiting for rank 2;";
        assert!(output.contains(named), "rank {rank}: {output}");
        assert!(output.contains("then: barrier #2 of 'next' (0 × u8, world 0-3) was not started"), "{output}");
    }
}

#[test]
fn ranks_that_disagree_about_a_length_get_an_error() {
    let outcome = try_ranks!(2, || {
        let world = world_with_timeout(Duration::from_secs(5));
        let len = if world.rank() == 0 { 800 } else { 1000 };
        let error = world.all_gather("unit", vec![0f32; len / 2], vec![0f32; len]).wait().unwrap_err();
        println!("{error}");
        let_others_print();
    });
    let report = outcome.unwrap_err().report;
    assert!(report.ranks[0].output.contains("truncated"), "{}", report.ranks[0].output);
    assert!(
        report.ranks[1].output.contains("rank 0 of the group sent a message of 1600 bytes where 2000 were expected"),
        "{}",
        report.ranks[1].output
    );
}

#[test]
fn ranks_that_disagree_about_a_small_sum_get_an_error() {
    let outcome = try_ranks!(2, || {
        let world = world_with_timeout(Duration::from_secs(3));
        println!("{}", world.all_reduce("norm", ReduceOp::Sum, vec![1f32; 2 - world.rank()]).wait().unwrap_err());
        let_others_print();
    });
    let report = outcome.unwrap_err().report;
    assert!(report.ranks[0].output.contains("sent a message of 4 bytes where 8 were expected"));
    assert!(report.ranks[1].output.contains("truncated"), "{}", report.ranks[1].output);
}

#[test]
fn ranks_that_disagree_about_a_broadcast_get_an_error() {
    let outcome = try_ranks!(2, || {
        let world = world_with_timeout(Duration::from_secs(3));
        let result = world.broadcast("unit", 0, vec![1f32; 1 + world.rank()]).wait();
        println!("{}", result.map_or_else(|error| error.to_string(), |_| "sent".to_string()));
        let_others_print();
    });
    let report = outcome.unwrap_err().report;
    assert!(report.ranks[1].output.contains("sent a message of 4 bytes where 8 were expected"));
}

#[test]
fn a_rank_that_does_not_create_a_group_is_named_and_nothing_hangs() {
    let outcome = try_ranks!(4, || {
        let timeout = Duration::from_secs(2);
        let world = world_with_timeout(timeout);
        if world.rank() == 3 {
            std::thread::sleep(6 * timeout);
            std::process::exit(0);
        }
        let started = Stopwatch::start();
        let mesh = Mesh::new(&[(Axis::Shard, 4)]).unwrap();
        println!("{}", world.split_along(&mesh, &[Axis::Shard]).err().unwrap());
        println!("then: {}", world.barrier("next").wait().unwrap_err());
        assert!(started.elapsed() < 2 * timeout);
        let_others_print();
    });
    let report = outcome.unwrap_err().report;
    for rank in 0..3 {
        let output = &report.ranks[rank].output;
        let named = "the group 'shard 0-3' could not be created: not all of its ranks asked for it within 2s, waiting for rank 3";
        assert!(output.contains(named), "rank {rank}: {output}");
        assert!(output.contains("then: barrier #1 of 'next'") && output.contains("was not started"), "{output}");
    }
}

#[test]
fn a_barrier_names_who_is_missing() {
    let outcome = try_ranks!(3, || {
        let timeout = Duration::from_secs(2);
        let world = world_with_timeout(timeout);
        if world.rank() == 1 {
            std::thread::sleep(6 * timeout);
            std::process::exit(0);
        }
        println!("{}", world.barrier("epoch").wait().unwrap_err());
        let_others_print();
    });
    let report = outcome.unwrap_err().report;
    for rank in [0, 2] {
        let output = &report.ranks[rank].output;
        assert!(
            output.contains("barrier #1 of 'epoch' (0 × u8, world 0-2) made no progress for 2s, waiting for rank 1"),
            "{output}"
        );
    }
}

/// Rank 1 of 3 is late, and the flight recorders of the others show it while they wait.
fn stand_and_wait(world: &Group) {
    world.barrier("start").wait().unwrap();
    let record = world.flight_recorder().clone();
    let status = move || -> GroupStatus {
        let [status] = record.group_status().try_into().unwrap();
        status
    };
    assert_eq!((status().entry.call.number, status().entry.status), (1, CallStatus::Done));
    if world.rank() == 1 {
        std::thread::sleep(Duration::from_secs(3));
    }
    let watch = (world.rank() != 1).then(|| {
        let status = status.clone();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(1500));
            status()
        })
    });
    let calls = ["block.7", "block.6"].map(|label| world.all_reduce(label, ReduceOp::Sum, vec![1f32; 100_000]));
    if let Some(watch) = watch {
        let GroupStatus { ranks, entry, status_age, calls_behind } = watch.join().unwrap();
        assert_eq!((ranks, calls_behind), (RankSet::world(3), 1));
        assert_eq!(entry.call.to_string(), "all-reduce #2 of 'block.7' (100000 × f32, world 0-2)");
        assert_eq!((entry.status, entry.waits_for), (CallStatus::Running, vec![1]));
        assert!(status_age > Duration::from_secs(1) && status_age < Duration::from_secs(3), "{status_age:?}");
    }
    calls.into_iter().for_each(|call| drop(call.wait().unwrap()));
    let GroupStatus { entry, calls_behind, .. } = status();
    assert_eq!((entry.call.number, entry.status, calls_behind), (3, CallStatus::Done, 0));
    assert!(world.flight_recorder().read().iter().all(|entry| entry.waits_for.is_empty()));
}

#[test]
fn a_waiting_rank_names_the_missing_rank_before_the_timeout() {
    ranks!(3, || stand_and_wait(&world()));
}

#[test]
fn a_rank_waiting_for_signatures_names_the_missing_rank() {
    ranks!(3, || stand_and_wait(&verifying_world(|_| None)));
}

#[test]
fn a_test_may_have_several_closures_and_each_runs() {
    let counts: Vec<usize> =
        [try_ranks!(2, || println!("first")).unwrap(), try_ranks!(3, || println!("second")).unwrap()]
            .iter()
            .zip(["first", "second"])
            .map(|(report, word)| report.ranks.iter().filter(|rank| rank.output.contains(word)).count())
            .collect();
    assert_eq!(counts, [2, 3]);
}

#[test]
#[should_panic(expected = "ranks! must be in the test function itself")]
fn a_closure_that_does_not_run_is_noticed() {
    fn helper() {
        ranks!(1, || println!("never"));
    }
    helper();
}

fn two_hosts() -> Hosts {
    Hosts { hosts: 2, ranks_per_host: 1, rate: "1gbit".to_string(), delay: "1ms".to_string() }
}

#[test]
fn random_calls_between_two_hosts() {
    ranks!(Launch::hosts(two_hosts()), || {
        let world = world();
        assert_eq!(world.size(), 2);
        run_random_calls(&world, 2000..2125);
        // The link has the configured rate: 25 MB each way at 1 Gbit/s take 0.2 s.
        world.barrier("start").wait().unwrap();
        let (started, watch) = (Instant::now(), Stopwatch::start());
        let part = vec![0u8; 25_000_000];
        drop(world.all_gather("rate", part, vec![0u8; 50_000_000]).wait().unwrap());
        // A busy machine makes the call longer, never shorter; only the upper limit follows its pace.
        let (seconds, scaled) = (started.elapsed().as_secs_f64(), watch.elapsed().as_secs_f64());
        assert!(seconds > 0.18 && scaled < 2., "25 MB took {seconds} s");
    });
}

#[test]
fn random_calls_between_two_hosts_of_two_ranks() {
    ranks!(Launch::hosts(Hosts { ranks_per_host: 2, ..two_hosts() }), || {
        let world = world();
        assert_eq!(world.size(), 4);
        run_random_calls(&world, 4000..4060);
    });
}

#[test]
fn a_link_cut_during_a_collective_is_an_error_on_both_sides() {
    let outcome = try_ranks!(Launch::hosts(two_hosts()).timeout(Duration::from_secs(60)), || {
        let timeout = Duration::from_secs(3);
        let world = world_with_timeout(timeout);
        world.barrier("connected").wait().unwrap();
        // 250 MB each way take two seconds; the link is cut after half a second.
        let pending = world.all_gather("block.3", vec![1u8; 250_000_000], vec![0u8; 500_000_000]);
        std::thread::sleep(Duration::from_millis(500));
        if world.rank() == 0 {
            let cut = std::process::Command::new("ip").args(["link", "set", "data", "down"]).status().unwrap();
            assert!(cut.success());
        }
        let started = Stopwatch::start();
        let error = pending.wait().unwrap_err();
        println!("{error}");
        assert!(started.elapsed() < timeout + Duration::from_secs(2), "{:?}", started.elapsed());
    });
    let report = outcome.unwrap_err().report;
    for (rank, outcome) in report.ranks.iter().enumerate() {
        let named = format!("made no progress for 3s, waiting for rank {};", 1 - rank);
        assert!(outcome.output.contains("all-gather #2 of 'block.3'"), "{}", outcome.output);
        assert!(outcome.output.contains(&named), "rank {rank}: {}", outcome.output);
    }
}
