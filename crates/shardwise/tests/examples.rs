//! The examples, run as a user would: on one rank and on two.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use shardwise_harness::launcher;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

/// The binary of an example, which cargo builds with this test.
fn example(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let program = tests.ancestors().nth(2).unwrap().join("examples").join(name);
    assert!(program.is_file(), "{} is not built: cargo build --package shardwise --examples", program.display());
    program
}

/// Runs an example on this many ranks, without a launcher if it is one. Returns its output.
fn run(name: &str, ranks: usize, arguments: &[&str]) -> String {
    let mut command = match ranks {
        1 => Command::new("env"),
        _ => launcher(None, ranks, Duration::from_secs(300)),
    };
    let output =
        command.arg("OMP_NUM_THREADS=1").arg(example(name)).args(arguments).current_dir(root()).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{name} on {ranks} ranks: {printed}{}", String::from_utf8_lossy(&output.stderr));
    printed
}

/// The numbers printed before `unit`.
fn numbers(printed: &str, unit: &str) -> Vec<f64> {
    let lines = printed.lines().filter_map(|line| line.split_once(unit)?.0.split_whitespace().next_back());
    lines.filter_map(|number| number.parse().ok()).collect()
}

#[test]
fn a_vision_transformer_in_under_150_lines_learns_on_two_ranks() {
    let source = std::fs::read_to_string(root().join("crates/shardwise/examples/vision.rs")).unwrap();
    assert!(source.lines().count() < 150, "{} lines", source.lines().count());
    let two_share_layers: &[&str] = &["2"];
    for (ranks, arguments) in [(1, &[][..]), (2, &[]), (2, two_share_layers)] {
        let printed = run("vision", ranks, arguments);
        let right = numbers(&printed, "% of unseen images");
        assert_eq!(right.len(), 6, "{printed}");
        assert!(right[0] < 50., "it starts at chance: {printed}");
        assert!(right[5] > 80., "it learns: {printed}");
    }
}

#[test]
fn a_custom_optimizer_gives_the_same_losses_at_stages_0_and_3() {
    for ranks in [1, 2] {
        let printed = run("optimizer", ranks, &[]);
        assert!(printed.ends_with("the same, to the last bit\n"), "{printed}");
        let losses = |line: &str| line.split_whitespace().skip(2).map(|loss| loss.parse().unwrap()).collect();
        let losses: Vec<Vec<f64>> = printed.lines().filter(|line| line.starts_with("step")).map(losses).collect();
        assert_eq!(losses.len(), 5, "{printed}");
        assert!(losses.iter().all(|stages| stages[0] == stages[1]), "{printed}");
        assert!(losses[4][0] < 0.6 * losses[0][0], "it learns: {printed}");
        let kept = numbers(&printed.replace("kB", "kB\n"), "kB");
        assert!((kept[0] / kept[1] / ranks as f64 - 1.).abs() < 0.01, "each rank keeps its shard: {printed}");
    }
}

#[test]
fn a_custom_source_gives_any_number_of_ranks_the_same_samples() {
    let [alone, two] = [1, 2].map(|ranks| run("data", ranks, &["README.md", "ARCHITECTURE.md"]));
    let [bits, of_two] = [&alone, &two].map(|printed| numbers(printed, " bits per byte"));
    assert_eq!(bits.len(), 7, "{alone}");
    assert!(bits[0] > 7. && bits[6] < 3.6, "it learns: {alone}");
    let near = |(a, b): (&f64, &f64)| (a / b - 1.).abs() < 5e-3;
    assert!(bits.iter().zip(&of_two).all(near), "one rank and two: {alone}{two}");
    assert!(alone.contains("\nShardwise ") && two.contains("\nShardwise "), "{alone}{two}");
}

#[test]
fn the_guide_shows_the_program_of_the_first_page() {
    let page = std::fs::read_to_string(root().join("crates/shardwise/src/lib.rs")).unwrap();
    let program = page.split("//! ```\n").nth(1).unwrap();
    let shown = program.lines().map(|line| line.trim_start_matches("//!")).filter(|line| !line.starts_with(" # "));
    let shown: String = shown.map(|line| format!("{}\n", line.strip_prefix(' ').unwrap_or(line))).collect();
    let guide = std::fs::read_to_string(root().join("docs/src/library.md")).unwrap();
    assert!(guide.contains(&format!("```rust\n{shown}```")), "the guide shows another program than this:\n{shown}");
}
