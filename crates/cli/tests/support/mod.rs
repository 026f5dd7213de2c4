//! A folder with a recipe, the program that is run on it, and what that said.

#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part, and a test may fail")]

use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use shardwise_harness::{Stopwatch, patience};

/// A small run.
pub(crate) const RECIPE: &str = r#"
[model.llama]
vocabulary = 61
width = 36
blocks = 3
heads = 6
kv_heads = 3
mlp_width = 53

[data]
seed = 7

[batch]
global = 8
sequences = 1
positions = 16

[optimizer]
rate = 1e-2

[run]
steps = 24

[checkpoints]
folder = "saved"
every_steps = 2
background = false

[supervision]
"#;

/// Keys for a test that is about limits, and the limit in seconds: 4 on a quiet machine. On a busy one ranks are late by more,
/// which would be an alarm, and rightly so.
pub(crate) fn watched_closely() -> (u64, String) {
    let limit_s = patience(Duration::from_secs(4)).as_secs_f64().ceil() as u64;
    (limit_s, format!("time_limit_s = {limit_s}\nsilence_s = {limit_s}\n"))
}

/// A folder with a recipe.
pub(crate) struct Folder(pub(crate) tempfile::TempDir);

impl Folder {
    pub(crate) fn new(recipe: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
        Folder(folder)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A command of the program's on the recipe.
    pub(crate) fn command(&self, verb: &str, arguments: &[&str]) -> Command {
        let mut command = shardwise();
        command.arg(verb).arg(self.path("recipe.toml")).args(arguments).current_dir(self.0.path());
        command
    }
}

pub(crate) fn shardwise() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardwise"));
    command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0");
    command
}

pub(crate) fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// What it said, if it ended well.
pub(crate) fn good(output: &Output) -> String {
    assert!(output.status.success(), "{}", said(output));
    said(output)
}

pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Stopwatch::start();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
