//! Runs the readers of untrusted input on the whole fuzzing corpus.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::Path;
use std::time::{Duration, Instant};

use shardwise_fuzz::{TARGETS, check};

/// How long a reader may take for one input. A chat template that uses up its instruction limit takes half a second without optimization,
/// and machines may be busy.
const TIMEOUT: Duration = Duration::from_secs(5);

#[test]
fn readers_withstand_the_corpus() {
    for target in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
        let inputs: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(inputs.len() > 5, "{} has no corpus", target.name);
        for input in &inputs {
            let bytes = std::fs::read(input).unwrap();
            let started = Instant::now();
            check(target.name, &bytes);
            assert!(started.elapsed() < TIMEOUT, "{} took {:?}", input.display(), started.elapsed());
        }
        println!("{}: {} inputs", target.name, inputs.len());
    }
}
