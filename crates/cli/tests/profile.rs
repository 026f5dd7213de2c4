//! Traces and profiles: traces are complete and add up, and an injected bottleneck is named first.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Output;

use serde_json::Value;
use shardwise_harness::{Hosts, check_speed};
use support::{Folder, good, said};

const RECIPE: &str = r#"
[model.llama]
vocab_size = 512
hidden_size = 128
num_hidden_layers = 3
num_attention_heads = 4
intermediate_size = 344

[data]
seed = 7

[batch]
micro_batch_size = 4
seq_len = 128
gradient_accumulation_steps = 1

[optimizer]
lr = 1e-3

[run]
steps = 4
"#;

impl Folder {
    /// The output of `shardwise profile --json`.
    fn profile(&self, arguments: &[&str]) -> Value {
        let output = self.command("profile", &[&["--json"], arguments].concat()).output().unwrap();
        json(&output)
    }
}

fn json(output: &Output) -> Value {
    let said = good(output);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// The complete events of a trace, in Chrome's format.
fn events(path: &Path) -> Vec<Value> {
    let trace: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    events.iter().filter(|event| event["ph"] == "X").cloned().collect()
}

fn near(what: &str, a: f64, b: f64) {
    assert!((a - b).abs() <= 0.03 * b.abs().max(1e-6), "{what}: {a} and {b}");
}

/// Checks that the first suggested change has this cause, and that a change contains this text. The error lists all changes.
fn expect_first(profiled: &Value, cause: &str, text: &str) -> Result<(), String> {
    let changes = &profiled["changes"];
    let all = format!("{changes:#}");
    if changes[0]["cause"] == cause && all.contains(text) { Ok(()) } else { Err(all) }
}

const TRAINING: u64 = 1;

#[test]
fn a_trace_has_every_rank_and_adds_up_to_what_is_printed() {
    let folder = Folder::new(&RECIPE.replace("gradient_accumulation_steps = 1", "gradient_accumulation_steps = 2"));
    let profiled = folder.profile(&["-n", "4", "--steps", "2", "--no-tries", "--keep", "kept", "--draw", "step.svg"]);
    assert!(std::fs::read_to_string(folder.path("step.svg")).unwrap().contains(">rank 3<"));
    let events = events(&folder.path("kept/trace-step-000003.json"));
    let length = |event: &Value| event["dur"].as_f64().unwrap() / 1e6;
    let is_training = |event: &&Value| event["tid"] == TRAINING;

    // The sums per step and rank, computed from the events.
    let mut kinds = BTreeMap::<String, f64>::new();
    for event in events.iter().filter(is_training) {
        let kind = match event["cat"].as_str().unwrap() {
            "wait" => format!("wait {}", event["args"]["for"].as_str().unwrap()),
            kind => kind.to_string(),
        };
        *kinds.entry(kind).or_default() += length(event) / 2. / 4.;
    }
    let printed = profiled["profile"]["kinds"].as_array().unwrap();
    assert_eq!(printed.len(), kinds.len());
    for kind in printed {
        let name = kind["kind"].as_str().unwrap();
        near(name, kind["mean_s"].as_f64().unwrap(), kinds[name]);
    }
    // And compared with an independent clock.
    let of_first: f64 = events.iter().filter(is_training).filter(|event| event["pid"] == 0).map(length).sum();
    near("a step", of_first / 2., profiled["step_s"].as_f64().unwrap());

    for rank in 0..4 {
        let own: Vec<&Value> = events.iter().filter(|event| event["pid"] == rank).collect();
        let threads: BTreeSet<u64> = own.iter().map(|event| event["tid"].as_u64().unwrap()).collect();
        for thread in threads {
            let mut spans: Vec<(f64, f64)> = own
                .iter()
                .filter(|event| event["tid"] == thread)
                .map(|event| (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap()))
                .collect();
            spans.sort_by(|a, b| a.0.total_cmp(&b.0));
            for pair in spans.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0 + 0.002, "rank {rank}, thread {thread}: {pair:?}");
            }
        }
        let has = |kind: &str, unit: &str, on_training: bool| {
            own.iter().any(|event| {
                event["cat"] == kind
                    && event["args"]["unit"] == unit
                    && (event["tid"] == TRAINING) == on_training
                    && event["args"]["step"] == 4
            })
        };
        for unit in ["embedding", "block.0", "block.1", "block.2", "head"] {
            for (kind, on_training) in
                [("forward", true), ("backward", true), ("optimizer", true), ("gather", false), ("reduce", false)]
            {
                assert!(has(kind, unit, on_training), "rank {rank} has no {kind} of {unit}");
            }
        }
    }
}

#[test]
fn a_run_traces_the_requested_steps() {
    let recipe = format!("activation_checkpointing = \"full\"\n{RECIPE}\n[checkpoints]\nfolder = \"saved\"\n");
    let folder = Folder::new(&recipe);
    let output = folder.command("train", &["-n", "2", "--trace", "2..3"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("traced steps 2 to 3: "), "{text}");
    let events = events(&folder.path("saved/trace-step-000002.json"));
    let steps: BTreeSet<u64> = events.iter().map(|event| event["args"]["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, BTreeSet::from([2, 3]));
    assert!(events.iter().any(|event| event["name"] == "recompute block.1"));
    let again = good(&folder.command("train", &["-n", "2", "--trace", "2..3"]).output().unwrap());
    assert!(again.contains("steps 2 to 3 are past and will not be traced"), "{again}");
    let refused = folder.command("train", &["-n", "2", "--trace", "3..2"]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        refused.status.code() == Some(2) && said.contains("--trace: expected the first and the last step"),
        "{said}"
    );
}

#[test]
fn slow_data_is_named_first() {
    let folder = Folder::new(RECIPE);
    check_speed(|_| {
        let profiled = folder.profile(&["-n", "2", "--steps", "3", "--fault", "delay rank=1 step=1 phase=data"]);
        expect_first(&profiled, "data", "rank 1 reads its tokens")
    });
}

#[test]
fn a_tiny_micro_batch_is_named_first() {
    let tiny = RECIPE.replace("micro_batch_size = 4", "micro_batch_size = 1").replace("seq_len = 128", "seq_len = 8");
    let folder = Folder::new(&tiny.replace("gradient_accumulation_steps = 1", "gradient_accumulation_steps = 32"));
    check_speed(|_| {
        let profiled = folder.profile(&["-n", "2", "--steps", "3"]);
        expect_first(&profiled, "micro-batch", "batch.gradient_accumulation_steps = 1 ")
    });
}

#[test]
fn a_slow_link_is_named_first() {
    let folder = Folder::new(RECIPE);
    check_speed(|slowness| {
        let mbit_per_s = (50. / slowness).ceil();
        let rate = format!("{mbit_per_s}mbit");
        let network = Hosts { hosts: 2, ranks_per_host: 1, rate, delay: "0ms".into() }.start().unwrap();
        let mut command = network.on_first_host(option_env!("MPIRUN").unwrap_or("mpirun"));
        command.envs(network.mpi_settings()).env("OMP_NUM_THREADS", "1");
        let hosts: Vec<String> = network.names().iter().map(|name| format!("{name}:1")).collect();
        command.args(["-n", "2", "--allow-run-as-root", "--host", &hosts.join(","), "--mca", "pml", "ob1"]);
        command.args(["--mca", "plm_rsh_agent"]).arg(network.agent());
        command.arg(env!("CARGO_BIN_EXE_shardwise")).arg("profile").arg(folder.path("recipe.toml"));
        let profiled = json(&command.args(["--steps", "2", "--json"]).output().unwrap());
        assert_eq!(profiled["hosts"], 2);
        // 50 Mbit/s are 6.25 MB/s; short bursts are a little faster.
        let reached = profiled["peak_bytes_per_s"].as_f64().unwrap();
        assert!(reached < 1.28 * mbit_per_s * 1e6 / 8., "{reached}");
        expect_first(&profiled, "link", "ten times the bandwidth")
    });
}

#[test]
fn a_wrong_recipe_is_refused_once_before_ranks_start() {
    let folder = Folder::new(RECIPE);
    let output = folder.command("profile", &["-n", "2", "--set", "optimizer.learning_rate=1"]).output().unwrap();
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.matches("did you mean `optimizer.lr`").count() == 1 && !text.contains("mpirun"), "{text}");
}
