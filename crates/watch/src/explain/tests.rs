#![allow(clippy::unwrap_used, reason = "a test may fail")]

use super::*;
use crate::status::tests::call;
use crate::{CallState, Coordinates, ModelAxes, Ranks};

/// Two ranks per host, all in call #412, with a recent heartbeat.
fn situation(count: usize) -> (Vec<RankInfo>, Instant) {
    let now = Instant::now() + Duration::from_secs(100_000);
    let info = |rank: usize| RankInfo {
        coordinates: Coordinates::default(),
        host: if count <= 8 { ["a", "b", "c", "d"][rank / 2].to_string() } else { format!("n{}", rank / 8) },
        pid: 4708 + rank as u32,
        status: RankStatus {
            step: 41,
            first_step: 1,
            phase: "backward".to_string(),
            unit: "block.7".to_string(),
            in_phase_ms: 31_000,
            calls: vec![CallStatus {
                group: format!("shard 0-{}", count - 1),
                ranks: Ranks::from_ranks(0..count),
                ..call(412)
            }],
        },
        last_heard: Some(now),
        presence: Presence::Connected,
    };
    ((0..count).map(info).collect(), now)
}

/// Makes a rank late: its call #411 is done, and it is computing.
fn late(info: &mut RankInfo) {
    info.status.phase = "forward".to_string();
    info.status.unit = "block.2".to_string();
    info.status.in_phase_ms = 35_000;
    let call = &mut info.status.calls[0];
    (call.number, call.state, call.waiting_for) = (411, CallState::Done, Ranks::default());
}

fn ago(now: Instant, seconds: u64) -> Option<Instant> {
    Some(now - Duration::from_secs(seconds))
}

fn silent(ranks: &[usize]) -> Cause {
    Cause::Silent { ranks: ranks.to_vec() }
}

fn timeout(rank: usize) -> Cause {
    Cause::Failed { rank, kind: FailureKind::Timeout, text: "made no progress\n for 30s.".to_string() }
}

#[test]
fn one_silent_rank() {
    let (mut ranks, now) = situation(4);
    late(&mut ranks[3]);
    ranks[3].last_heard = ago(now, 31);
    assert_eq!(
        explain(&ranks, &silent(&[3]), now),
        "rank 3 (host b, process 4711) has sent no heartbeat for 31 s; it was last heard at step 41 in forward of block.2. It \
         never entered reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3), where ranks 0-2 are waiting."
    );
    // It entered the call, and fell silent there.
    let (mut ranks, now) = situation(4);
    ranks[3].last_heard = ago(now, 31);
    assert_eq!(
        explain(&ranks, &silent(&[3]), now),
        "rank 3 (host b, process 4711) has sent no heartbeat for 31 s; it was last heard at step 41 in backward of block.7. \
         Ranks 0-2 are waiting for it in reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3), which it has entered."
    );
}

#[test]
fn some_silent_ranks() {
    let (mut ranks, now) = situation(8);
    for rank in [3, 4] {
        late(&mut ranks[rank]);
        ranks[rank].last_heard = ago(now, 8 * rank as u64);
    }
    assert_eq!(
        explain(&ranks, &silent(&[4, 3]), now),
        "ranks 3-4 have sent no heartbeat for 24 s to 32 s; last heard: rank 3 (host b, process 4711) at step 41 in forward \
         of block.2 and rank 4 (host c, process 4712) at step 41 in forward of block.2. They never entered reduce-scatter \
         #412 of 'block.7' (12.6 MB, shard 0-7), where ranks 0-2 and 5-7 are waiting."
    );
}

#[test]
fn a_lost_host() {
    let (mut ranks, now) = situation(4);
    for rank in [2, 3] {
        late(&mut ranks[rank]);
        ranks[rank].last_heard = ago(now, 12);
    }
    let waiting =
        "They never entered reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3), where ranks 0-1 are waiting.";
    assert_eq!(
        explain(&ranks, &silent(&[2, 3]), now),
        format!("host b is lost: all its ranks (ranks 2-3) have sent no heartbeat for 12 s. {waiting}")
    );
    ranks[2].presence = Presence::Left { code: None };
    ranks[3].presence = Presence::Left { code: None };
    assert_eq!(
        explain(&ranks, &Cause::Died { rank: 2, how: None }, now),
        format!("host b is lost: all its ranks (ranks 2-3) died without reporting an error. {waiting}")
    );
    ranks.iter_mut().for_each(|info| info.presence = Presence::Connected);
    ranks.iter_mut().for_each(|info| info.last_heard = ago(now, 12));
    assert_eq!(
        explain(&ranks, &silent(&[0, 1, 2, 3]), now),
        "none of the 4 ranks has sent a heartbeat for 12 s: the supervisor's own host or network is more likely at fault \
         than all ranks at once."
    );
}

#[test]
fn a_death() {
    let (mut ranks, now) = situation(4);
    late(&mut ranks[2]);
    let how = Some("signal 9, killed".to_string());
    assert_eq!(
        explain(&ranks, &Cause::Died { rank: 2, how }, now),
        "rank 2 (host b, process 4710) died (signal 9, killed), last heard at step 41 in forward of block.2, while \
         ranks 0, 1 and 3 waited for it in reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3)."
    );
    let (ranks, now) = situation(4);
    assert_eq!(
        explain(&ranks, &Cause::Died { rank: 2, how: None }, now),
        "rank 2 (host b, process 4710) died without reporting an error, last heard at step 41 in backward of block.7, in \
         reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3)."
    );
    let not_joined = RankInfo {
        coordinates: Coordinates::default(),
        host: String::new(),
        presence: Presence::NotJoined,
        last_heard: None,
        status: RankStatus::default(),
        pid: 0,
    };
    let none = vec![not_joined; 2];
    assert_eq!(
        explain(&none, &Cause::Died { rank: 1, how: None }, now),
        "rank 1 died without reporting an error before its first step."
    );
    assert_eq!(
        explain(&none, &Cause::NotJoined { ranks: vec![0, 1] }, now),
        "ranks 0-1 never joined the run; no rank is connected."
    );
}

#[test]
fn a_skipped_call() {
    let (mut ranks, now) = situation(4);
    let call = &mut ranks[3].status.calls[0];
    (call.verb, call.label) = ("all-gather".to_string(), "block.6".to_string());
    assert_eq!(
        explain(&ranks, &timeout(0), now),
        "rank 0 (host a, process 4708) timed out: made no progress for 30s. Rank 3 is in all-gather #412 of 'block.6', but \
         ranks 0-2 are in reduce-scatter #412 of 'block.7' (shard 0-3): it has skipped or repeated a call."
    );
    // With two against two, nobody knows which side is right.
    ranks[2].status.calls[0] = ranks[3].status.calls[0].clone();
    let text = explain(&ranks, &timeout(0), now);
    assert!(
        text.contains("Ranks 0-1 are in reduce-scatter #412 of 'block.7', but ranks 2-3 are in all-gather"),
        "{text}"
    );
    assert!(text.ends_with("one side has skipped or repeated a call."), "{text}");
}

#[test]
fn different_sizes() {
    let (mut ranks, now) = situation(4);
    ranks[1].status.calls[0].elements = 4096;
    let expected =
        "Rank 1 passes 4096 × f32 to reduce-scatter #412 of 'block.7' (shard 0-3), but the others pass 3145728 × f32.";
    let text = explain(&ranks, &timeout(0), now);
    assert!(text.ends_with(expected), "{text}");
    ranks.iter_mut().for_each(|info| info.status.calls[0].verb = "all-to-all".to_string());
    assert!(!explain(&ranks, &timeout(0), now).contains("passes"), "sizes may differ in an all-to-all");
    ranks[1].status.calls[0].dtype = "bf16".to_string();
    let text = explain(&ranks, &timeout(0), now);
    assert!(text.contains("Rank 1 passes 4096 × bf16 to all-to-all #412"), "{text}");
}

#[test]
fn a_timeout_while_all_are_alive() {
    let (mut ranks, now) = situation(4);
    late(&mut ranks[3]);
    assert_eq!(
        explain(&ranks, &timeout(0), now),
        "rank 0 (host a, process 4708) timed out: made no progress for 30s. Ranks 0-2 have been waiting in reduce-scatter \
         #412 of 'block.7' (12.6 MB, shard 0-3) for 31 s. Rank 3 (host b, process 4711) never entered it: it has been in \
         forward of block.2 at step 41 for 35 s."
    );
    ranks[3].presence = Presence::Left { code: Some(0) };
    let text = explain(&ranks, &timeout(0), now);
    assert!(text.ends_with("it exited with code 0, at step 41 in forward of block.2."), "{text}");
    let (ranks, now) = situation(4);
    let text = explain(&ranks, &timeout(0), now);
    let expected = "All ranks of the group have entered reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3), so check the \
                    network between them first. The call is waiting for rank 3, on host b.";
    assert!(text.ends_with(expected), "{text}");
}

#[test]
fn a_chain_of_waits_is_followed_to_its_end() {
    // Ranks 0 and 1 form a group, and so do 1 and 2: 0 waits for 1, which waits for 2, which computes.
    let (mut ranks, now) = situation(4);
    let group = |first: usize, number, state, in_state_ms| CallStatus {
        group: format!("pair {first}-{}", first + 1),
        ranks: Ranks::from_ranks([first, first + 1]),
        state,
        in_state_ms,
        ..call(number)
    };
    ranks[0].status.calls = vec![group(0, 9, CallState::InProgress, 40_000)];
    ranks[1].status.calls = vec![group(0, 8, CallState::Done, 1), group(1, 5, CallState::InProgress, 30_000)];
    late(&mut ranks[2]);
    ranks[2].status.calls = vec![group(1, 4, CallState::Done, 1)];
    ranks[3].status.calls.clear();
    let text = explain(&ranks, &timeout(0), now);
    assert!(
        text.contains("Rank 1 has been waiting in reduce-scatter #5 of 'block.7' (12.6 MB, pair 1-2) for 30 s."),
        "{text}"
    );
    assert!(
        text.ends_with(
            "Rank 2 (host b, process 4710) never entered it: it has been in forward of block.2 at step 41 for 35 s."
        ),
        "{text}"
    );
    // If they wait for each other, the text says so.
    ranks[1].status.calls = vec![group(1, 5, CallState::InProgress, 30_000)];
    ranks[2].status.calls = vec![group(1, 4, CallState::Done, 1), group(0, 1, CallState::InProgress, 20_000)];
    let text = explain(&ranks, &timeout(0), now);
    assert!(text.contains("it is itself waiting in"), "{text}");
}

#[test]
fn queued_calls_are_no_mismatch() {
    // Rank 0 has started #412 and queued #414 behind it; rank 3 is at #411.
    let (mut ranks, now) = situation(4);
    let ahead = CallStatus { state: CallState::Queued, ..ranks[0].status.calls[0].clone() };
    ranks[0].status.calls.push(CallStatus { number: 414, label: "block.5".to_string(), ..ahead });
    late(&mut ranks[3]);
    let text = explain(&ranks, &timeout(0), now);
    assert!(text.contains("Ranks 0-2 have been waiting in reduce-scatter #412 of 'block.7'"), "{text}");
}

/// Ranks with the coordinates of these axes, all computing a forward pass.
fn computing(count: usize, pipeline: usize, tensor: usize) -> (Vec<RankInfo>, Instant) {
    let (mut ranks, now) = situation(count);
    for (rank, info) in ranks.iter_mut().enumerate() {
        info.coordinates = ModelAxes { pipeline, tensor, ..ModelAxes::default() }.coordinates(rank, count);
        info.status.calls.clear();
        (info.status.phase, info.status.unit) = ("forward".to_string(), format!("block.{rank}"));
        info.status.in_phase_ms = 35_000;
    }
    (ranks, now)
}

/// Adds a receive from another stage, which the rank is waiting for.
fn receive(info: &mut RankInfo, label: &str, from: usize, in_state_ms: u64) {
    info.status.calls.push(CallStatus {
        group: "pipeline 0-3".to_string(),
        verb: "receive".to_string(),
        label: label.to_string(),
        waiting_for: Ranks::from_ranks([from]),
        in_state_ms,
        ..call(7)
    });
}

#[test]
fn a_stage_that_waits_for_a_dead_one() {
    let (mut ranks, now) = computing(2, 2, 1);
    receive(&mut ranks[1], "activations of block.0", 0, 31_000);
    let how = Some("signal 9, killed".to_string());
    assert_eq!(
        explain(&ranks, &Cause::Died { rank: 0, how }, now),
        "rank 0 (stage 0, host a, process 4708) died (signal 9, killed), last heard at step 41 in forward of block.0, while \
         stage 1 waited for stage 0 (activations of block.0)."
    );
    ranks[0].last_heard = ago(now, 31);
    assert_eq!(
        explain(&ranks, &silent(&[0]), now),
        "rank 0 (stage 0, host a, process 4708) has sent no heartbeat for 31 s; it was last heard at step 41 in forward of \
         block.0. Stage 1 waits for stage 0 (activations of block.0)."
    );
    // Both neighbors of a stage wait for it, and two ranks of one stage are named once.
    let (mut ranks, now) = computing(6, 3, 1);
    receive(&mut ranks[4], "activations of block.3", 2, 20_000);
    receive(&mut ranks[5], "activations of block.3", 3, 31_000);
    receive(&mut ranks[0], "gradients of block.2", 2, 10_000);
    ranks[2].presence = Presence::Left { code: None };
    ranks[3].presence = Presence::Left { code: None };
    assert_eq!(
        explain(&ranks, &silent(&[2, 3]), now),
        "host b is lost: all its ranks (ranks 2-3, stage 1) have sent no heartbeat for 0 s. Stage 2 waits for stage 1 (activations \
         of block.3) and stage 0 waits for stage 1 (gradients of block.2)."
    );
}

#[test]
fn a_stage_that_waits_for_one_that_hangs() {
    let (mut ranks, now) = computing(2, 2, 1);
    receive(&mut ranks[1], "activations of block.0", 0, 31_000);
    // Stage 0 has started to receive, but does not wait for it yet.
    receive(&mut ranks[0], "gradients of block.1", 1, 40_000);
    ranks[0].status.calls[0].is_awaited = false;
    let expected = "rank 1 (stage 1, host a, process 4709) timed out: made no progress for 30s. Stage 1 waits for stage 0 \
                    (activations of block.0). Rank 0 (stage 0, host a, process 4708) has been in forward of \
                    block.0 at step 41 for 35 s.";
    assert_eq!(explain(&ranks, &timeout(1), now), expected);
    // The sender timed out first.
    let (mut ranks, now) = computing(2, 2, 1);
    receive(&mut ranks[0], "activations of block.0", 1, 31_000);
    ranks[0].status.calls[0].verb = "send".to_string();
    let text = explain(&ranks, &timeout(0), now);
    let expected = "Stage 0 waits for stage 1 (sending activations of block.0). Rank 1 (stage 1, host a, \
                    process 4709) has been in forward of block.1 at step 41 for 35 s.";
    assert!(text.ends_with(expected), "{text}");
}

#[test]
fn waits_of_stages_are_followed_to_the_rank_that_hangs() {
    // Stage 3 waits for stage 2, and that one for stage 1, where rank 2 waits for rank 3, with which it shares layers.
    let (mut ranks, now) = computing(8, 4, 2);
    receive(&mut ranks[6], "activations of block.4", 4, 50_000);
    receive(&mut ranks[4], "activations of block.2", 2, 45_000);
    let pair = |number, state| CallStatus {
        group: "tensor 2-3".to_string(),
        ranks: Ranks::from_ranks([2, 3]),
        state,
        ..call(number)
    };
    ranks[2].status.calls.push(pair(9, CallState::InProgress));
    ranks[3].status.calls.push(pair(8, CallState::Done));
    let text = explain(&ranks, &timeout(6), now);
    assert!(text.starts_with("rank 6 (stage 3, tensor 0, host d, process 4714) timed out"), "{text}");
    let expected = "Rank 2 (stage 1, tensor 0) has been waiting in reduce-scatter #9 of 'block.7' (12.6 MB, tensor 2-3) for 31 s. \
                    Rank 3 (stage 1, tensor 1, host b, process 4711) never entered it: it has been in forward of block.3 at \
                    step 41 for 35 s.";
    assert!(text.ends_with(expected), "{text}");
}

#[test]
fn ranks_that_share_layers() {
    let (mut ranks, now) = situation(4);
    for (rank, info) in ranks.iter_mut().enumerate() {
        info.coordinates = ModelAxes { tensor: 2, ..ModelAxes::default() }.coordinates(rank, 4);
    }
    late(&mut ranks[1]);
    let how = Some("signal 9, killed".to_string());
    assert_eq!(
        explain(&ranks, &Cause::Died { rank: 1, how }, now),
        "rank 1 (tensor 1, host a, process 4709) died (signal 9, killed), last heard at step 41 in forward of block.2, while \
         ranks 0, 2 and 3 waited for it in reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3)."
    );
    late(&mut ranks[3]);
    let text = explain(&ranks, &timeout(0), now);
    assert!(text.contains("Ranks 0 and 2 (tensor 0) have been waiting in reduce-scatter"), "{text}");
    ranks.iter_mut().for_each(|info| info.presence = Presence::NotJoined);
    let text = explain(&ranks, &Cause::NotJoined { ranks: vec![1] }, now);
    assert_eq!(text, "rank 1 (tensor 1) never joined the run; no rank is connected.");
}

#[test]
fn a_failure_with_the_text_of_the_rank() {
    let (ranks, now) = situation(4);
    let cause =
        Cause::Failed { rank: 3, kind: FailureKind::Memory, text: "out of memory:\n  12 GB asked for.\n".to_string() };
    assert_eq!(
        explain(&ranks, &cause, now),
        "rank 3 (host b, process 4711) failed at step 41 in backward of block.7 (memory): out of memory: 12 GB asked for."
    );
    let cause = Cause::Failed { rank: 3, kind: FailureKind::Error, text: "é".repeat(5000) };
    assert!(explain(&ranks, &cause, now).chars().count() < 800);
}

#[test]
fn ten_thousand_ranks_in_one_paragraph_and_a_moment() {
    let (mut ranks, now) = situation(10_000);
    late(&mut ranks[3]);
    let text = explain(&ranks, &timeout(0), now);
    assert!(text.contains("Ranks 0-2 and 4-9999 have been waiting in reduce-scatter #412"), "{text}");
    for rank in (0..10_000).filter(|rank| rank % 3 == 0) {
        late(&mut ranks[rank]);
        ranks[rank].last_heard = ago(now, 20);
    }
    let causes = [
        timeout(1),
        silent(&(0..10_000).filter(|rank| rank % 3 == 0).collect::<Vec<_>>()),
        silent(&(16..1016).collect::<Vec<_>>()),
        Cause::Died { rank: 9, how: None },
        Cause::NotJoined { ranks: (5000..10_000).collect() },
    ];
    for cause in &causes {
        let started = Instant::now();
        let text = explain(&ranks, cause, now);
        assert!(text.len() < 1000, "{} bytes: {text}", text.len());
        assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    }
    let text = explain(&ranks, &causes[0], now);
    assert!(text.ends_with("Ranks 0, 3, 6, 9, 12 and 3329 more (3334 of 10000) never entered it: ranks 0, 3, 6, 9, 12 and 3329 more are in forward at step 41."), "{text}");
    let text = explain(&ranks, &causes[2], now);
    assert!(
        text.starts_with(
            "hosts n2, n3, n4 and 122 more are lost: all their ranks (ranks 16-1015) have sent no heartbeat for 0 s to 20 s."
        ),
        "{text}"
    );
}

#[test]
fn absurd_statuses_break_nothing() {
    let (mut ranks, now) = situation(4);
    for info in &mut ranks {
        info.status.in_phase_ms = u64::MAX;
        info.status.calls[0].in_state_ms = u64::MAX;
        info.status.calls[0].bytes = u64::MAX;
        info.status.calls[0].waiting_for = "0-4294967295".parse().unwrap();
    }
    ranks[1].status.calls[0].ranks = Ranks::default();
    ranks[0].status.calls[0].ranks = "4000000000-4294967295".parse().unwrap();
    for cause in [
        timeout(0),
        timeout(9),
        silent(&[1, 9, 9]),
        silent(&[]),
        Cause::Died { rank: 77, how: None },
        Cause::NotJoined { ranks: vec![] },
    ] {
        explain(&ranks, &cause, now);
    }
}
