//! Runs the commands of the README's quick start, with fewer steps.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::Path;
use std::process::Command;

use shardwise_harness::readme_commands;

/// The commands, some with smaller numbers.
fn commands() -> Vec<String> {
    // Two held-out documents rather than five: a short run evaluates as often as a long one.
    let replacements =
        [("--steps 400", "--steps 6"), ("--tokens 120", "--tokens 12"), ("--held-out 20", "--held-out 50")];
    let shorten = |line: String| replacements.iter().fold(line, |line, (long, short)| line.replace(long, short));
    readme_commands("From text to verses").into_iter().map(shorten).collect()
}

#[test]
fn the_quick_start_works_word_for_word() {
    let folder = tempfile::tempdir().unwrap();
    let programs = Path::new(env!("CARGO_BIN_EXE_shardwise")).parent().unwrap();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let (installs, others): (Vec<_>, Vec<_>) = commands().into_iter().partition(|line| line.starts_with("apt-get"));
    assert!(others.len() >= 7, "{others:?}");
    let there = Command::new("sh").args(["-c", "command -v bible"]).output().unwrap();
    assert!(there.status.success(), "this test needs the Bible: {}", installs.join(" && "));
    let mut said = String::new();
    for line in &others {
        let mut shell = Command::new("sh");
        shell.args(["-c", line]).current_dir(folder.path()).env("PATH", &path).env("OMP_NUM_THREADS", "1");
        let output = shell.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{line}: {text}{}", String::from_utf8_lossy(&output.stderr));
        said.push_str(&text);
    }
    assert!(said.contains("data/kjv-held-out: ") && said.contains("evaluation after step 6: loss "), "{said}");
    assert!(
        said.trim_end().lines().last().unwrap().contains("And God said") || said.contains("\nAnd God said"),
        "{said}"
    );
    let bits = said.rsplit(" bits per byte").nth(1).and_then(|before| before.split_whitespace().next_back());
    let bits: f64 = bits.unwrap().parse().unwrap();
    assert!((1. ..4.).contains(&bits), "{bits} bits per byte after 6 steps");

    // The results can be inspected, and are not overwritten.
    let run = |line: &str| {
        let mut shell = Command::new("sh");
        let output = shell.args(["-c", line]).current_dir(folder.path()).env("PATH", &path).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let (code, text) = run("shardwise inspect data/kjv --tokenizer data/tokenizer.json");
    assert!(
        code == Some(0) && text.contains("In the beginning God created") && text.contains("vocabulary size 2048"),
        "{text}"
    );
    let (code, text) = run("shardwise inspect runs/kjv");
    assert!(code == Some(0) && text.contains("step 6") && text.contains("million"), "{text}");
    let (code, text) = run("shardwise inspect data/tokenizer.json --text 'In the beginning'");
    assert!(code == Some(0) && text.contains("2048 tokens") && text.contains(" the"), "{text}");
    let (code, text) = run("shardwise init kjv.toml");
    assert!(code == Some(1) && text.contains("already exists"), "{text}");
    let (code, text) = run("shardwise generate kjv.toml -n 2 --tokens 4 --temperature 0 --prompt 'And God said'");
    let (_, alone) = run("shardwise generate kjv.toml --tokens 4 --temperature 0 --prompt 'And God said'");
    assert!(code == Some(0) && text == alone, "two ranks: {text}one: {alone}");
    let (code, text) = run("shardwise completions bash && shardwise man");
    assert!(code == Some(0) && text.contains("tokenize") && text.contains(".TH"), "{text}");
}
