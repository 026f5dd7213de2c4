//! A folder with a recipe, and helpers to run the program on it.

#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part, and a test may fail")]

use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use serde_json::json;
use shardwise_harness::{Stopwatch, scale_timeout};

/// A small run.
pub(crate) const RECIPE: &str = r#"
[model.llama]
vocab_size = 61
hidden_size = 36
num_hidden_layers = 3
num_attention_heads = 6
num_key_value_heads = 3
intermediate_size = 53

[data]
seed = 7

[batch]
global_batch_size = 8
micro_batch_size = 1
seq_len = 16

[optimizer]
lr = 1e-2

[run]
steps = 24

[checkpoints]
folder = "saved"
every_steps = 2
background = false

[supervision]
"#;

/// Short timeouts, in seconds and as recipe keys: 4 s on a quiet machine, longer on a busy one, where ranks are late for good reason.
pub(crate) fn short_timeouts() -> (u64, String) {
    let limit_s = scale_timeout(Duration::from_secs(4)).as_secs_f64().ceil() as u64;
    // A rank without a heartbeat is noticed before a call that waits for it times out.
    (limit_s, format!("timeout_s = {}\nheartbeat_timeout_s = {limit_s}\n", limit_s + 2))
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

    /// Writes a corpus that can be learned, of tokens below 61, and a tokenizer with a word for each.
    pub(crate) fn write_tokens_and_tokenizer(&self) {
        let tokens: Vec<u8> = (0..400u32).flat_map(|place| ((place * place % 61) as u16).to_le_bytes()).collect();
        std::fs::write(self.path("tokens.bin"), tokens).unwrap();
        let words: serde_json::Map<String, serde_json::Value> =
            (0..61).map(|word| (format!("w{word}"), json!(word))).collect();
        let tokenizer = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [],
            "normalizer": null,
            "pre_tokenizer": { "type": "Whitespace" },
            "post_processor": null,
            "decoder": null,
            "model": { "type": "WordLevel", "vocab": words, "unk_token": "w0" },
        });
        std::fs::write(self.path("tokenizer.json"), tokenizer.to_string()).unwrap();
    }

    /// A subcommand of the program on the recipe.
    pub(crate) fn command(&self, verb: &str, arguments: &[&str]) -> Command {
        let mut command = shardwise();
        command.arg(verb).arg(self.path("recipe.toml")).args(arguments).current_dir(self.0.path());
        command
    }
}

/// The program under test: the one that was just built, or an installed one.
pub(crate) fn program() -> PathBuf {
    let built = env!("CARGO_BIN_EXE_shardwise");
    std::env::var_os("SHARDWISE_PROGRAM").map_or_else(|| PathBuf::from(built), PathBuf::from)
}

pub(crate) fn shardwise() -> Command {
    let mut command = Command::new(program());
    command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0");
    command
}

pub(crate) fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Asserts that the program succeeded, and returns its output.
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
