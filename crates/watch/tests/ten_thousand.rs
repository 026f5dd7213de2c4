//! One thread watches ten thousand ranks, and finds the one that falls silent.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::process::Command;
use std::time::Duration;

use shardwise_harness::patience;

#[test]
fn ten_thousand_ranks_are_watched_and_the_silent_one_is_named() {
    // The simulated ranks share the machine with whoever else is there, and all of them are late when it is slow.
    let limit_s = patience(Duration::from_secs(4)).as_secs_f64().ceil().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_bench-watch"));
    let output = command.args(["10000", "5", "4711", &limit_s]).output().unwrap();
    let (text, errors) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
    println!("{text}");
    assert!(output.status.success(), "{text}\n{errors}");
    let named = format!("rank 4711 (host n588, process 104711) is silent for {limit_s}");
    assert!(text.starts_with(&named), "{text}");
    let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let figure = |name: &str| last[name].as_f64().unwrap();
    assert!(figure("found_after_s") <= figure("limit_s") + 1.0, "{last}");
    assert!(figure("cpu_share") < 0.25, "{last}");
    assert!(figure("rss_mb") < 100.0, "{last}");
}
