//! `shardwise init`: the model has the requested number of parameters, and the program prints it.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use shardwise_data::Writer;
use shardwise_journal::format::format_count;
use shardwise_recipe::Recipe;
use shardwise_run::build;
use support::{good, shardwise};

#[test]
fn a_model_has_the_size_that_was_asked_for_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    for (size, asked) in [("5m", 5e6), ("42m", 42e6), ("124m", 124e6), ("1b", 1e9), ("8b", 8e9)] {
        let path = folder.path().join(format!("{size}.toml"));
        let text = good(&shardwise().arg("init").arg(&path).args(["--size", size]).output().unwrap());
        let parameters = build::model(&Recipe::read(&path).unwrap()).unwrap().elements();
        assert!((parameters as f64 / asked - 1.).abs() < 0.1, "{size}: {parameters} parameters");
        assert!(text.contains(&format!("{} parameters, ", format_count(parameters as u64))), "{size}: {text}");
        assert!(!text.contains("the vocabulary of the corpus differs"), "{text}");
    }
}

#[test]
fn a_corpus_with_many_tokens_makes_a_larger_model_and_the_program_says_why() {
    let folder = tempfile::tempdir().unwrap();
    // A corpus written by another program, such as Megatron, does not record its vocabulary size.
    let corpus = folder.path().join("tokens");
    let mut writer = Writer::create(&corpus, 50_304).unwrap();
    writer.document(&[1, 2, 3, 4]).unwrap();
    writer.finish().unwrap();
    let path = folder.path().join("small.toml");
    let text =
        good(&shardwise().arg("init").arg(&path).args(["--size", "5m"]).arg("--corpus").arg(&corpus).output().unwrap());
    let all = 6 * (4 * 256 * 256 + 3 * 256 * 704 + 2 * 256) + 256 + 50_304 * 256;
    assert!(text.contains(&format!("{} parameters, ", format_count(all))), "{text}");
    assert!(text.contains("of 50,304 tokens: the vocabulary of the corpus differs from the 1,024 tokens"), "{text}");
}
