//! One thread watches ten thousand ranks, and finds the one that falls silent.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::process::Command;

#[test]
fn ten_thousand_ranks_are_watched_and_the_silent_one_is_named() {
    let output = Command::new(env!("CARGO_BIN_EXE_bench-watch")).args(["10000", "5", "4711", "4"]).output().unwrap();
    let (text, errors) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
    println!("{text}");
    assert!(output.status.success(), "{text}\n{errors}");
    assert!(text.starts_with("rank 4711 (host n588, process 104711) is silent for 4"), "{text}");
    let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let figure = |name: &str| last[name].as_f64().unwrap();
    assert!(figure("found_after_s") <= figure("limit_s") + 1.0, "{last}");
    assert!(figure("cpu_share") < 0.25, "{last}");
    assert!(figure("rss_mb") < 100.0, "{last}");
}
