//! The claims of the sharded step.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use shardwise_harness::launcher;

use crate::claims::{Claim, Verdict};
use crate::workspace::{Scratch, built, median, output_of, root};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "zero",
        name: "memory",
        what: "live bytes of a bf16 model at stages 0 to 3 are 16Ψ to 16Ψ/N (18Ψ to 18Ψ/N with f32 gradients), at 2, 4 and 8 ranks",
        heavy: false,
        measure: memory,
    },
    Claim {
        group: "zero",
        name: "traffic",
        what: "elements sent per rank and step are 2Ψ(N−1)/N at stages 0 to 2 and 3Ψ(N−1)/N at stage 3, at 2, 4 and 8 ranks",
        heavy: false,
        measure: traffic,
    },
    Claim {
        group: "zero",
        name: "step",
        what: "the step with its comments fits on two screens",
        heavy: false,
        measure: step,
    },
    Claim {
        group: "zero",
        name: "mutants",
        what: "bugs that this project or its peers have shipped are caught by the suite when they are put back",
        heavy: true,
        measure: crate::mutants::measure,
    },
    Claim {
        group: "zero",
        name: "peak",
        what: "the peak of a process falls from stage to stage with 213M parameters on 4 ranks, and memory is flat from step 3 to 200",
        heavy: true,
        measure: peak,
    },
    Claim {
        group: "zero",
        name: "fits",
        what: "with 3 GiB per rank, 4 ranks train a model at stage 3 that is 3 times as large as the largest at stage 0",
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

/// What `bench-zero` prints for a stage.
#[derive(Clone, Deserialize)]
struct Held {
    ranks: usize,
    stage: usize,
    gradients: String,
    elements: f64,
    live_bytes: f64,
    pool_bytes: f64,
    sent_elements: f64,
    sent_bytes: f64,
    gathered_elements: f64,
}

impl Held {
    fn gradient_bytes(&self) -> f64 {
        if self.gradients == "bf16" { 2. } else { 4. }
    }

    fn theory_bytes(&self) -> f64 {
        let (elements, ranks, grads) = (self.elements, self.ranks as f64, self.gradient_bytes());
        let (parameters, optimizer) = (2., 12.);
        match self.stage {
            0 => (parameters + grads + optimizer) * elements,
            1 => (parameters + grads) * elements + optimizer * elements / ranks,
            2 => parameters * elements + (grads + optimizer) * elements / ranks,
            _ => (parameters + grads + optimizer) * elements / ranks,
        }
    }

    fn theory_sent(&self) -> f64 {
        let times = if self.stage == 3 { 3. } else { 2. };
        times * self.elements * (self.ranks as f64 - 1.) / self.ranks as f64
    }

    /// Gathers are of parameters in bf16, the rest of gradients; stage 0 has one verb for both, which moves gradients.
    fn payload_bytes(&self) -> f64 {
        2. * self.gathered_elements + self.gradient_bytes() * (self.sent_elements - self.gathered_elements)
    }
}

/// Measured once for both claims.
fn held() -> Result<&'static [Held]> {
    static HELD: OnceLock<Vec<Held>> = OnceLock::new();
    if let Some(held) = HELD.get() {
        return Ok(held);
    }
    let program = built("bench-zero", &["build", "--release", "--workspace", "--bins"])?;
    let mut all = Vec::new();
    for ranks in [2, 4, 8] {
        let mut command = launcher(None, ranks, Duration::from_secs(600));
        let printed = output_of(command.arg("OMP_NUM_THREADS=1").arg(&program))?;
        let lines: Vec<Held> = printed.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        ensure!(lines.len() == 8, "bench-zero printed {printed}");
        all.extend(lines);
    }
    Ok(HELD.get_or_init(|| all))
}

fn memory() -> Result<Verdict> {
    let held = held()?;
    println!("ranks  stage  gradients  theory        live, less buffers  buffers");
    for line in held {
        println!(
            "{:5}  {:5}  {:9}  {:8.1} MB  {:8.1} MB ({:+.2}%)  {:5.1} MB",
            line.ranks,
            line.stage,
            line.gradients,
            line.theory_bytes() / 1e6,
            (line.live_bytes - line.pool_bytes) / 1e6,
            ((line.live_bytes - line.pool_bytes) / line.theory_bytes() - 1.) * 100.,
            line.pool_bytes / 1e6,
        );
    }
    let off = |line: &Held| ((line.live_bytes - line.pool_bytes) / line.theory_bytes() - 1.).abs();
    let worst = held.iter().map(off).fold(0., f64::max);
    Ok(Verdict {
        figure: format!("{:.2}% off at the most, in {} settings", worst * 100., held.len()),
        bar: "1%".to_string(),
        holds: worst <= 0.01,
    })
}

fn traffic() -> Result<Verdict> {
    let held = held()?;
    let off = |line: &Held| (line.sent_elements / line.theory_sent() - 1.).abs();
    let bytes_off = |line: &Held| (line.sent_bytes / line.payload_bytes() - 1.).abs();
    let worst = |off: &dyn Fn(&Held) -> f64| held.iter().map(off).fold(0., f64::max) * 100.;
    Ok(Verdict {
        figure: format!("{:.3}% off at the most, their bytes {:.3}%", worst(&off), worst(&bytes_off)),
        bar: "0.5%".to_string(),
        holds: worst(&off) <= 0.5 && worst(&bytes_off) <= 0.5,
    })
}

// ---- the step ---------------------------------------------------------------------------------------------------------

/// Lines of two screens.
const TWO_SCREENS: usize = 120;

fn step() -> Result<Verdict> {
    let text = std::fs::read_to_string(root().join("crates/train/src/step.rs")).context("step.rs")?;
    let begin = text.lines().position(|line| line.contains("---- the step --")).context("the step's banner")?;
    let end = text.lines().position(|line| line.contains("---- its parts --")).context("its parts' banner")?;
    let lines = end.saturating_sub(begin + 1);
    Ok(Verdict {
        figure: format!("{lines} lines"),
        bar: format!("{TWO_SCREENS}"),
        holds: (1..=TWO_SCREENS).contains(&lines),
    })
}

// ---- runs of `shardwise train` ----------------------------------------------------------------------------------------

/// A recipe for one stage.
fn recipe(scratch: &Scratch, shape: &Shape, stage: u8, steps: u64) -> Result<PathBuf> {
    let Shape { vocabulary, width, blocks, heads, mlp_width, positions } = *shape;
    let path = scratch.path().join(format!("stage-{stage}.toml"));
    let text = format!(
        "[model.llama]\nvocabulary = {vocabulary}\nwidth = {width}\nblocks = {blocks}\nheads = {heads}\n\
         mlp_width = {mlp_width}\ntied = true\n[data]\n[batch]\nsequences = 1\npositions = {positions}\n\
         [sharding]\nstage = {stage}\n[precision]\nparameters = \"bf16\"\ngradients = \"bf16\"\n\
         [optimizer]\nrate = 1e-4\n[run]\nsteps = {steps}\n"
    );
    std::fs::write(&path, text)?;
    Ok(path)
}

struct Shape {
    vocabulary: usize,
    width: usize,
    blocks: usize,
    heads: usize,
    mlp_width: usize,
    positions: usize,
}

impl Shape {
    fn elements(&self) -> usize {
        let block = 4 * self.width * self.width + 3 * self.width * self.mlp_width + 2 * self.width;
        self.vocabulary * self.width + self.blocks * block + self.width
    }
}

/// Where the program is, with the one for ranks beside it.
fn shardwise() -> Result<PathBuf> {
    built("shardwise-rank", &["build", "--release", "--workspace", "--bins"])?;
    built("shardwise", &["build", "--release", "--workspace", "--bins"])
}

/// Memory now and at peak, step by step, in GiB.
fn trained(program: &Path, recipe: &Path) -> Result<Vec<[f64; 2]>> {
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

/// By how much the peak rises after the third step.
fn drift(lines: &[[f64; 2]]) -> f64 {
    let third = lines[2][1];
    lines[2..].iter().map(|line| (line[1] / third - 1.).abs()).fold(0., f64::max)
}

fn peak() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("peak")?;
    let shape = Shape { vocabulary: 32_000, width: 1024, blocks: 14, heads: 16, mlp_width: 2816, positions: 64 };
    let mut peaks = Vec::new();
    let mut drifts = Vec::new();
    for stage in 0..4 {
        let lines = trained(&program, &recipe(&scratch, &shape, stage, 200)?)?;
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
    let shape = |blocks| Shape { vocabulary: 32_000, width: 1024, blocks, heads: 16, mlp_width: 2816, positions: 64 };
    let limited = |arguments: &[&str], recipe: &Path| {
        let mut command = Command::new("prlimit");
        command.arg(format!("--data={LIMIT_BYTES}")).arg(&program).arg("train").arg(recipe).args(["-n", "4"]);
        command.args(arguments).output().context("prlimit is of Debian's util-linux")
    };
    let mut largest = Vec::new();
    for stage in [0, 3] {
        let accepted = |blocks: usize| -> Result<bool> {
            Ok(limited(&["--dry-run"], &recipe(&scratch, &shape(blocks), stage, 3)?)?.status.success())
        };
        // The most blocks that are not refused.
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
            "stage {stage}: {most} blocks, {:.0}M parameters; one block more is refused:\n{said}",
            shape(most).elements() as f64 / 1e6
        );
        ensure!(
            refusal.status.code() == Some(2) && said.contains("would need about"),
            "the refusal has figures: {said}"
        );
        let run = limited(&[], &recipe(&scratch, &shape(most), stage, 3)?)?;
        let printed = String::from_utf8_lossy(&run.stdout).into_owned();
        println!("{printed}");
        ensure!(run.status.success(), "what is not refused must train:\n{}", String::from_utf8_lossy(&run.stderr));
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
    let program = built("bench-step", &["build", "--release", "--workspace", "--bins"])?;
    let mut command = launcher(None, 2, Duration::from_secs(1200));
    let printed = output_of(command.arg("OMP_NUM_THREADS=1").arg(&program).arg(ROUNDS.to_string()))?;
    let mut seconds: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for line in printed.lines() {
        let (side, time) = line.split_once(' ').with_context(|| format!("bench-step printed '{line}'"))?;
        seconds.entry(side).or_default().push(time.parse()?);
    }
    let bare = seconds.get("bare").context("the bare side")?.clone();
    let ratio = |side: &str| {
        let ratios: Vec<f64> = seconds[side].iter().zip(&bare).map(|(ours, bare)| ours / bare).collect();
        median(&ratios)
    };
    for (side, times) in &seconds {
        println!("{side}: median {:.3} s, {:.3} of bare", median(times), ratio(side));
    }
    let stages = ["stage-0", "stage-1", "stage-2", "stage-3"].map(ratio);
    Ok(Verdict {
        figure: format!("{:.3}, {:.3}, {:.3}, {:.3} of bare's time", stages[0], stages[1], stages[2], stages[3]),
        bar: "1.04, 1.04, 1.04, 1.08".to_string(),
        holds: stages[..3].iter().all(|&ratio| ratio <= 1.04) && stages[3] <= 1.08,
    })
}
