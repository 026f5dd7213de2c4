//! The claims of what a person sees.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shardwise_harness::launcher;

use crate::claims::{Claim, Verdict};
use crate::workspace::{Scratch, built, median, output_of, spread};

pub(crate) const CLAIMS: &[Claim] = &[Claim {
    group: "sight",
    name: "cost",
    what: "the 42M model, f32 and bf16: with supervisor, journal, TensorBoard and a scraped endpoint a step takes within 1% of a bare loop's",
    heavy: true,
    measure: cost,
}];

const ROUNDS: usize = 5;
const STEPS: u64 = 12;
/// Steps before the first that counts, on both sides.
const WARM_UP: u64 = 2;

fn cost() -> Result<Verdict> {
    let bare = built("bench-train", &["build", "--release", "--workspace", "--bins"])?;
    let program = bare.with_file_name("shardwise");
    let (mut figures, mut holds) = (Vec::new(), true);
    for precision in ["f32", "bf16"] {
        let scratch = Scratch::new("sight")?;
        let recipe = scratch.path().join("recipe.toml");
        std::fs::write(
            &recipe,
            format!(
                "[model.llama]\nvocabulary = 32000\nwidth = 512\nblocks = 8\nheads = 8\nmlp_width = 1408\ntied = true\n\
                 [start]\nweights = \"weights.safetensors\"\n[data]\nseed = 7\n[batch]\nsequences = 4\npositions = 256\n\
                 [sharding]\nstage = 2\n[precision]\nparameters = \"{precision}\"\n[optimizer]\nrate = 1e-4\n\
                 [run]\nsteps = {STEPS}\nfolder = \"run\"\n"
            ),
        )?;
        output_of(Command::new(&bare).arg("weights").arg(&recipe))?;
        let (mut ratios, mut shares) = (Vec::new(), Vec::new());
        for round in 1..=ROUNDS {
            let mut times = [0.; 2];
            for side in [round % 2, 1 - round % 2] {
                times[side] = match side {
                    0 => bare_loop(&bare, &recipe)?,
                    _ => {
                        let (step_s, share) = all_on(&program, &recipe)?;
                        shares.push(100. * share);
                        step_s
                    }
                };
            }
            println!("{precision}, round {round}: {:.3} s a step bare, {:.3} s with all of it on", times[0], times[1]);
            ratios.push(times[1] / times[0]);
        }
        let percent = |ratio: f64| 100. * (ratio - 1.);
        let (least, most) = spread(&ratios);
        let middle = percent(median(&ratios));
        figures.push(format!(
            "{precision} {middle:+.2}% ({:+.2} to {:+.2}), of which {:.2}% is counted between steps",
            percent(least),
            percent(most),
            median(&shares)
        ));
        holds &= middle < 1.;
    }
    Ok(Verdict { figure: figures.join(", "), bar: "1%".to_string(), holds })
}

/// Seconds of a step, of a loop that only trains.
fn bare_loop(program: &Path, recipe: &Path) -> Result<f64> {
    let mut command = launcher(None, 2, Duration::from_secs(600));
    command.args(["OMP_NUM_THREADS=1", "SHARDWISE_LAUNCHED=0", &format!("SHARDWISE_WARM_UP={WARM_UP}")]);
    let printed = output_of(command.arg(program).arg("stage-2").arg(recipe))?;
    let last = printed.lines().rev().find(|line| line.starts_with('{')).context("no figures were printed")?;
    serde_json::from_str::<Value>(last)?["step_seconds"].as_f64().context("step_seconds")
}

/// Seconds of a step, of a run as people have it, whose figures are asked for every second; and the part of them that lies between
/// steps, which a noisy machine repeats better. By the times of the journal's lines, so that what is done between two steps counts.
fn all_on(program: &Path, recipe: &Path) -> Result<(f64, f64)> {
    let run = recipe.with_file_name("run");
    drop(std::fs::remove_dir_all(&run));
    // Free now, and nobody else starts anything.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let mut command = Command::new(program);
    command.arg("train").arg(recipe).args(["-n", "2", "--metrics", &address.to_string()]).env("OMP_NUM_THREADS", "1");
    let mut child = command.stdout(Stdio::null()).spawn()?;
    let mut pages = 0;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let mut page = String::new();
        if let Ok(mut stream) = TcpStream::connect(address) {
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
            drop(stream.read_to_string(&mut page));
        }
        pages += usize::from(page.contains("shardwise_loss"));
        std::thread::sleep(Duration::from_secs(1));
    };
    ensure!(status.success() && pages > 0, "{status}, and {pages} pages of figures");
    let lines = std::fs::read_to_string(run.join("metrics.jsonl"))?;
    let lines = lines.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let figures = |line: &Value| Some((line["time_s"].as_f64()?, line["step_s"].as_f64()?));
    let steps: Vec<(f64, f64)> = lines.iter().filter(|line| line["kind"] == "step").filter_map(figures).collect();
    ensure!(steps.len() as u64 == STEPS, "{} steps are in the journal", steps.len());
    let counted = &steps[WARM_UP as usize..];
    let whole = steps[STEPS as usize - 1].0 - steps[WARM_UP as usize - 1].0;
    let inside: f64 = counted.iter().map(|(_, step_s)| step_s).sum();
    Ok((whole / counted.len() as f64, 1. - inside / whole))
}
