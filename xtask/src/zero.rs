//! The claims about the sharded step.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use shardwise_harness::launcher;

use crate::claim::{Claim, Verdict};
use crate::workspace::{Scratch, build, median, output_of};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "zero",
        name: "memory",
        what: "a bf16 model at stages 0 to 3 takes 16Ψ to 16Ψ/N bytes (18Ψ to 18Ψ/N with f32 gradients), at 2, 4 and 8 ranks",
        heavy: false,
        measure: memory,
    },
    Claim {
        group: "zero",
        name: "traffic",
        what: "a rank sends 2Ψ(N−1)/N elements per step at stages 0 to 2 and 3Ψ(N−1)/N at stage 3, at 2, 4 and 8 ranks",
        heavy: false,
        measure: traffic,
    },
    Claim {
        group: "zero",
        name: "mutants",
        what: "the test suite catches bugs that this project or its peers have shipped, when they are reintroduced",
        heavy: true,
        measure: crate::mutants::measure,
    },
    Claim {
        group: "zero",
        name: "peak",
        what: "213M parameters on 4 ranks: peak memory falls from stage to stage, and is constant from step 3 to 200",
        heavy: true,
        measure: peak,
    },
    Claim {
        group: "zero",
        name: "fits",
        what: "with 3 GiB per rank, 4 ranks at stage 3 train a model 3 times as large as the largest at stage 0",
        heavy: true,
        measure: fits,
    },
    Claim {
        group: "zero",
        name: "speed",
        what: "on 2 ranks a step takes at most 4% longer than bare libtorch at stages 0 to 2, and 8% at stage 3",
        heavy: true,
        measure: speed,
    },
];

// ---- memory and traffic -----------------------------------------------------------------------------------------------

/// The output of `bench-zero` for a stage.
#[derive(Clone, Deserialize)]
struct Measurement {
    ranks: usize,
    stage: usize,
    gradients: String,
    elements: f64,
    embedding_elements: f64,
    live_bytes: f64,
    pool_bytes: f64,
    sent_elements: f64,
    sent_bytes: f64,
    gathered_elements: f64,
}

impl Measurement {
    fn gradient_bytes(&self) -> f64 {
        if self.gradients == "bf16" { 2. } else { 4. }
    }

    fn expected_bytes(&self) -> f64 {
        let (elements, ranks, grads) = (self.elements, self.ranks as f64, self.gradient_bytes());
        let (parameters, optimizer) = (2., 12.);
        match self.stage {
            0 => (parameters + grads + optimizer) * elements,
            1 => (parameters + grads) * elements + optimizer * elements / ranks,
            2 => parameters * elements + (grads + optimizer) * elements / ranks,
            _ => (parameters + grads + optimizer) * elements / ranks,
        }
    }

    fn expected_sent(&self) -> f64 {
        let times = if self.stage == 3 { 3. } else { 2. };
        times * self.elements * (self.ranks as f64 - 1.) / self.ranks as f64
    }

    /// The bytes of the sent elements: all-gathers carry parameters in bf16, other collectives gradients. At stage 0, an
    /// all-reduce carries gradients in both of its halves. At stages 2 and 3, gradients travel in the bf16 in which they were computed,
    /// except those of the embedding, to which the head's are added.
    fn payload_bytes(&self) -> f64 {
        let widened = if self.stage >= 2 { self.embedding_elements / self.elements } else { 1. };
        let per_gradient = widened * self.gradient_bytes() + (1. - widened) * 2.;
        2. * self.gathered_elements + per_gradient * (self.sent_elements - self.gathered_elements)
    }
}

/// The measurements, which are made once for both claims.
fn measurements() -> Result<&'static [Measurement]> {
    static MEASUREMENTS: OnceLock<Vec<Measurement>> = OnceLock::new();
    if let Some(measurements) = MEASUREMENTS.get() {
        return Ok(measurements);
    }
    let program = build("bench-zero", &["build", "--release", "--workspace", "--bins"])?;
    let mut all = Vec::new();
    for ranks in [2, 4, 8] {
        let mut command = launcher(None, ranks, Duration::from_secs(600));
        let printed = output_of(command.arg("OMP_NUM_THREADS=1").arg(&program))?;
        let lines: Vec<Measurement> = printed.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        ensure!(lines.len() == 8, "bench-zero printed {printed}");
        all.extend(lines);
    }
    Ok(MEASUREMENTS.get_or_init(|| all))
}

fn memory() -> Result<Verdict> {
    let measurements = measurements()?;
    println!("ranks  stage  gradients  expected      live, w/o buffers   buffers");
    for line in measurements {
        println!(
            "{:5}  {:5}  {:9}  {:8.1} MB  {:8.1} MB ({:+.2}%)  {:5.1} MB",
            line.ranks,
            line.stage,
            line.gradients,
            line.expected_bytes() / 1e6,
            (line.live_bytes - line.pool_bytes) / 1e6,
            ((line.live_bytes - line.pool_bytes) / line.expected_bytes() - 1.) * 100.,
            line.pool_bytes / 1e6,
        );
    }
    let off = |line: &Measurement| ((line.live_bytes - line.pool_bytes) / line.expected_bytes() - 1.).abs();
    let worst = measurements.iter().map(off).fold(0., f64::max);
    Ok(Verdict {
        figure: format!("at most {:.2}% off, in {} settings", worst * 100., measurements.len()),
        bar: "1%".to_string(),
        holds: worst <= 0.01,
    })
}

fn traffic() -> Result<Verdict> {
    let measurements = measurements()?;
    let off = |line: &Measurement| (line.sent_elements / line.expected_sent() - 1.).abs();
    let bytes_off = |line: &Measurement| (line.sent_bytes / line.payload_bytes() - 1.).abs();
    let worst = |off: &dyn Fn(&Measurement) -> f64| measurements.iter().map(off).fold(0., f64::max) * 100.;
    Ok(Verdict {
        figure: format!("elements at most {:.3}% off, bytes {:.3}%", worst(&off), worst(&bytes_off)),
        bar: "0.5%".to_string(),
        holds: worst(&off) <= 0.5 && worst(&bytes_off) <= 0.5,
    })
}

// ---- runs of `shardwise train` ----------------------------------------------------------------------------------------

/// A recipe for one stage.
fn recipe(scratch: &Scratch, shape: &Shape, stage: u8, steps: u64) -> Result<PathBuf> {
    let Shape { vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, seq_len } = *shape;
    let path = scratch.path().join(format!("stage-{stage}.toml"));
    let text = format!(
        "[model.llama]\nvocab_size = {vocab_size}\nhidden_size = {hidden_size}\nnum_hidden_layers = {num_hidden_layers}\n\
         num_attention_heads = {num_attention_heads}\nintermediate_size = {intermediate_size}\ntie_word_embeddings = true\n\
         [data]\n[batch]\nmicro_batch_size = 1\nseq_len = {seq_len}\n\
         [zero]\nstage = {stage}\n[precision]\nparam_dtype = \"bf16\"\nreduce_dtype = \"bf16\"\n\
         [optimizer]\nlr = 1e-4\n[run]\nsteps = {steps}\n"
    );
    std::fs::write(&path, text)?;
    Ok(path)
}

struct Shape {
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    intermediate_size: usize,
    seq_len: usize,
}

fn shape(num_hidden_layers: usize) -> Shape {
    Shape {
        vocab_size: 32_000,
        hidden_size: 1024,
        num_hidden_layers,
        num_attention_heads: 16,
        intermediate_size: 2816,
        seq_len: 64,
    }
}

impl Shape {
    fn elements(&self) -> usize {
        let Shape { vocab_size, hidden_size, num_hidden_layers, intermediate_size, .. } = *self;
        let block = 4 * hidden_size * hidden_size + 3 * hidden_size * intermediate_size + 2 * hidden_size;
        vocab_size * hidden_size + num_hidden_layers * block + hidden_size
    }
}

/// Builds `shardwise`, and `shardwise-rank` in the same folder.
fn shardwise() -> Result<PathBuf> {
    build("shardwise-rank", &["build", "--release", "--workspace", "--bins"])?;
    build("shardwise", &["build", "--release", "--workspace", "--bins"])
}

/// Trains a recipe. Returns current and peak memory by step, in GiB.
fn train(program: &Path, recipe: &Path) -> Result<Vec<[f64; 2]>> {
    let printed = output_of(Command::new(program).arg("train").arg(recipe).args(["-n", "4"]))?;
    let bytes = |words: &[&str], key: &str| -> Option<f64> {
        let place = words.iter().position(|word| *word == key)?;
        let number: f64 = words.get(place + 1)?.parse().ok()?;
        let unit = words.get(place + 2)?.trim_end_matches(')');
        Some(if unit == "MiB" { number / 1024. } else { number })
    };
    let figures = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        Some([bytes(&words, "memory")?, bytes(&words, "(peak")?])
    };
    let lines: Vec<[f64; 2]> = printed.lines().filter(|line| line.starts_with("step")).filter_map(figures).collect();
    ensure!(!lines.is_empty(), "no step was printed:\n{printed}");
    Ok(lines)
}

/// The largest relative change of the peak after the third step.
fn drift(lines: &[[f64; 2]]) -> f64 {
    let third = lines[2][1];
    lines[2..].iter().map(|line| (line[1] / third - 1.).abs()).fold(0., f64::max)
}

fn peak() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("peak")?;
    let shape = shape(14);
    let mut peaks = Vec::new();
    let mut drifts = Vec::new();
    for stage in 0..4 {
        let lines = train(&program, &recipe(&scratch, &shape, stage, 200)?)?;
        let (peak, drift) = (lines.last().map_or(0., |line| line[1]), drift(&lines));
        println!("stage {stage}: peak {peak:.2} GiB, {} steps, drift {:.2}%", lines.len(), drift * 100.);
        peaks.push(peak);
        drifts.push(drift);
    }
    let worst = drifts.iter().copied().fold(0., f64::max);
    let described: Vec<String> = peaks.iter().map(|peak| format!("{peak:.2}")).collect();
    Ok(Verdict {
        figure: format!("{} GiB, drift at most {:.2}%", described.join(" > "), worst * 100.),
        bar: "falling, 1%".to_string(),
        holds: peaks.is_sorted_by(|a, b| a > b) && worst <= 0.01,
    })
}

// ---- what fits --------------------------------------------------------------------------------------------------------

const LIMIT_BYTES: u64 = 3 << 30;

fn fits() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("fits")?;
    let limited = |arguments: &[&str], recipe: &Path| {
        let mut command = Command::new("prlimit");
        command.arg(format!("--data={LIMIT_BYTES}")).arg(&program).arg("train").arg(recipe).args(["-n", "4"]);
        command.args(arguments).output().context("prlimit is missing; install Debian's util-linux")
    };
    let mut largest = Vec::new();
    for stage in [0, 3] {
        let accepted = |blocks: usize| -> Result<bool> {
            Ok(limited(&["--dry-run"], &recipe(&scratch, &shape(blocks), stage, 3)?)?.status.success())
        };
        // Search for the largest number of blocks that is accepted.
        let (mut most, mut refused) = (0, 1);
        while accepted(refused)? {
            (most, refused) = (refused, 2 * refused);
        }
        while refused - most > 1 {
            let middle = (most + refused) / 2;
            *(if accepted(middle)? { &mut most } else { &mut refused }) = middle;
        }
        let refusal = limited(&[], &recipe(&scratch, &shape(refused), stage, 3)?)?;
        let said = String::from_utf8_lossy(&refusal.stderr).into_owned();
        println!(
            "stage {stage}: {most} blocks, {:.0}M parameters; one more block is refused:\n{said}",
            shape(most).elements() as f64 / 1e6
        );
        ensure!(
            refusal.status.code() == Some(2) && said.contains("would need about"),
            "the refusal should have figures: {said}"
        );
        let run = limited(&[], &recipe(&scratch, &shape(most), stage, 3)?)?;
        let printed = String::from_utf8_lossy(&run.stdout).into_owned();
        println!("{printed}");
        ensure!(run.status.success(), "an accepted model must train:\n{}", String::from_utf8_lossy(&run.stderr));
        largest.push(shape(most).elements() as f64 / 1e6);
    }
    let ratio = largest[1] / largest[0];
    Ok(Verdict {
        figure: format!("{:.0}M at stage 0, {:.0}M at stage 3: {ratio:.2} times", largest[0], largest[1]),
        bar: "3 times".to_string(),
        holds: ratio >= 3.,
    })
}

// ---- speed ------------------------------------------------------------------------------------------------------------

fn speed() -> Result<Verdict> {
    const ROUNDS: usize = 15;
    let program = build("bench-step", &["build", "--release", "--workspace", "--bins"])?;
    let mut command = launcher(None, 2, Duration::from_secs(1200));
    let printed = output_of(command.arg("OMP_NUM_THREADS=1").arg(&program).arg(ROUNDS.to_string()))?;
    let mut seconds: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for line in printed.lines() {
        let (variant, time) = line.split_once(' ').with_context(|| format!("bench-step printed '{line}'"))?;
        seconds.entry(variant).or_default().push(time.parse()?);
    }
    let bare = seconds.get("bare").context("the bare variant")?.clone();
    let ratio = |variant: &str| {
        let ratios: Vec<f64> = seconds[variant].iter().zip(&bare).map(|(ours, bare)| ours / bare).collect();
        median(&ratios)
    };
    for (variant, times) in &seconds {
        println!("{variant}: median {:.3} s, {:.3} of bare", median(times), ratio(variant));
    }
    let stages = ["stage-0", "stage-1", "stage-2", "stage-3"].map(ratio);
    Ok(Verdict {
        figure: format!("{:.3}, {:.3}, {:.3}, {:.3} of bare's time", stages[0], stages[1], stages[2], stages[3]),
        bar: "1.04, 1.04, 1.04, 1.08".to_string(),
        holds: stages[..3].iter().all(|&ratio| ratio <= 1.04) && stages[3] <= 1.08,
    })
}
