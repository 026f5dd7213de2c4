//! What has been tried on the readers of untrusted input is tried again.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::Path;
use std::time::{Duration, Instant};

use shardwise_fuzz::{TARGETS, checked};

/// The most that a reader may take for an input of the corpus, which are all short: a chat template that runs for as long as it
/// may takes half a second without optimisation, and machines may be busy.
const TIME_LIMIT: Duration = Duration::from_secs(5);

#[test]
fn readers_withstand_the_corpus() {
    for target in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
        let inputs: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(inputs.len() > 5, "{} has no corpus", target.name);
        for input in &inputs {
            let bytes = std::fs::read(input).unwrap();
            let began = Instant::now();
            checked(target.name, &bytes);
            assert!(began.elapsed() < TIME_LIMIT, "{} took {:?}", input.display(), began.elapsed());
        }
        println!("{}: {} inputs", target.name, inputs.len());
    }
}
