//! The claims about observability: journal, TensorBoard, dashboard and metrics.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::Value;
use shardwise_harness::launcher;

use crate::claim::{Claim, Verdict};
use crate::paired_jobs::{Job, measure_slowdown};
use crate::workspace::{Scratch, build, median, output_of};

pub(crate) const CLAIMS: &[Claim] = &[Claim {
    group: "observability",
    name: "cost",
    what: "42M, f32 and bf16: with supervisor, journal, TensorBoard and a scraped metrics endpoint, a step takes less than 1% longer than a bare loop's",
    heavy: true,
    measure: cost,
}];

fn cost() -> Result<Verdict> {
    let bare = build("bench-train", &["build", "--release", "--workspace", "--bins"])?;
    let program = bare.with_file_name("shardwise");
    let (mut figures, mut holds) = (Vec::new(), true);
    for precision in ["f32", "bf16"] {
        let scratch = Scratch::new("observability")?;
        let recipe = scratch.path().join("recipe.toml");
        std::fs::write(
            &recipe,
            format!(
                "[model.llama]\nvocab_size = 32000\nhidden_size = 512\nnum_hidden_layers = 8\n\
                 num_attention_heads = 8\nintermediate_size = 1408\ntie_word_embeddings = true\n\
                 [init]\nweights = \"weights.safetensors\"\n[data]\nseed = 7\n[batch]\nmicro_batch_size = 4\nseq_len = 256\n\
                 [zero]\nstage = 2\n[precision]\nparam_dtype = \"{precision}\"\n[optimizer]\nlr = 1e-4\n\
                 [run]\nsteps = 100000\nfolder = \"run\"\n"
            ),
        )?;
        output_of(Command::new(&bare).arg("weights").arg(&recipe))?;
        let mut without = Job::start(&mut bare_loop(&bare, &recipe))?;
        // This port is free now, and stays free because nothing else is started.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let mut with = Job::start(&mut all_on(&program, &recipe, address))?;
        let scraper = Scraper::start(address);
        let slowdown = measure_slowdown(precision, &mut without, &mut with)?;
        ensure!(scraper.pages() > 100, "only {} pages of metrics were scraped in ten minutes", scraper.pages());
        let between = 100. * between_steps(&recipe.with_file_name("run"))?;
        let watching = 100. * with.watching_cores();
        figures.push(format!(
            "{precision} {slowdown}; {between:.2}% of the time is between steps, and supervision takes {watching:.2}% of a core"
        ));
        holds &= slowdown.percent() < 1.;
    }
    Ok(Verdict { figure: figures.join(", "), bar: "1%".to_string(), holds })
}

/// The bare training loop.
fn bare_loop(program: &Path, recipe: &Path) -> Command {
    let mut command = launcher(None, 2, Duration::from_secs(3600));
    command.args(["OMP_NUM_THREADS=1", "SHARDWISE_LAUNCHED=0", "SHARDWISE_WARM_UP=0"]);
    command.arg(program).arg("stage-2").arg(recipe).arg("each");
    command
}

/// A normal run, with everything on.
fn all_on(program: &Path, recipe: &Path, metrics: SocketAddr) -> Command {
    let mut command = Command::new(program);
    command.arg("train").arg(recipe).args(["-n", "2", "--metrics", &metrics.to_string()]).env("OMP_NUM_THREADS", "1");
    command
}

/// Scrapes a run's metrics every second, which is more often than Prometheus does.
struct Scraper {
    pages: Arc<AtomicUsize>,
    ended: Arc<AtomicBool>,
}

impl Scraper {
    fn start(address: SocketAddr) -> Self {
        let (pages, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let scraper = Scraper { pages: pages.clone(), ended: ended.clone() };
        let page = move || -> std::io::Result<String> {
            let mut stream = TcpStream::connect(address)?;
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
            let mut page = String::new();
            stream.read_to_string(&mut page)?;
            Ok(page)
        };
        std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let has_figures = page().is_ok_and(|page| page.contains("shardwise_loss"));
                pages.fetch_add(usize::from(has_figures), Ordering::Relaxed);
                std::thread::sleep(Duration::from_secs(1));
            }
        });
        scraper
    }

    fn pages(&self) -> usize {
        self.pages.load(Ordering::Relaxed)
    }
}

impl Drop for Scraper {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

/// The fraction of a run's time that is spent between steps, where entries are written and sent, according to its journal.
fn between_steps(run: &Path) -> Result<f64> {
    let lines = std::fs::read_to_string(run.join("metrics.jsonl"))?;
    // The last line may be incomplete, because its writer was killed.
    let lines = lines.lines().filter_map(|line| serde_json::from_str(line).ok());
    let figures = |line: Value| Some((line["time_s"].as_f64()?, line["step_s"].as_f64()?));
    let steps: Vec<(f64, f64)> = lines.filter(|line: &Value| line["kind"] == "step").filter_map(figures).collect();
    ensure!(steps.len() > 10, "only {} steps are in the journal", steps.len());
    let between: Vec<f64> = steps.windows(2).map(|pair| pair[1].0 - pair[0].0 - pair[1].1).collect();
    let inside: Vec<f64> = steps.iter().map(|(_, step_s)| *step_s).collect();
    Ok(median(&between) / (median(&between) + median(&inside)))
}
