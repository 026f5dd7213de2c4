//! One thread supervises ten thousand ranks, and finds the one that falls silent.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::process::Command;

use shardwise_harness::check_speed;

#[test]
fn the_silent_one_of_ten_thousand_ranks_is_named() {
    check_speed(|slowness| {
        // The simulated ranks share the machine with other processes, and are all late when it is slow.
        let limit_s = (4. * slowness).ceil().to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_bench-watch"));
        let output = command.args(["10000", "5", "4711", &limit_s]).output().unwrap();
        let (text, errors) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
        println!("{text}");
        let named = format!("rank 4711 (host n588, process 104711) has sent no heartbeat for {limit_s}");
        if !output.status.success() || !text.starts_with(&named) {
            return Err(format!("{text}\n{errors}"));
        }
        let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        let figure = |name: &str| last[name].as_f64().unwrap();
        assert!(figure("rss_mb") < 100.0, "{last}");
        let in_time = figure("found_after_s") <= figure("limit_s") + slowness;
        if in_time && figure("cpu_share") < 0.25 { Ok(()) } else { Err(last.to_string()) }
    });
}
