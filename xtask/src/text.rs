//! The claims about text: from files to a corpus, from a corpus to a model, from a model to text.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use shardwise_harness::{readme_commands, run_with_transformers};

use crate::claim::{Claim, Verdict};
use crate::workspace::{Scratch, build, median, output_of, peak_memory_of};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "text",
        name: "quick-start",
        what: "the README's quick start, word for word: from Debian's Bible to verses within 15 minutes, in fewer bits per byte than xz -9",
        heavy: true,
        measure: quick_start,
    },
    Claim {
        group: "text",
        name: "tokenize",
        what: "more than 1 GB of Linux source: as fast as Python's tokenizers (also with Llama 3's and Qwen's), constant memory, and the same bytes after kills",
        heavy: true,
        measure: tokenize,
    },
    Claim {
        group: "text",
        name: "loading",
        what: "42M: data loading takes less than 1% of a step, even with a cold page cache",
        heavy: true,
        measure: loading,
    },
];

fn shardwise() -> Result<PathBuf> {
    build("shardwise", &["build", "--release", "--workspace", "--bins"])
}

// ---- the quick start --------------------------------------------------------------------------------------------------

fn quick_start() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("quick-start")?;
    let folder = program.parent().context("the program's folder")?;
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
    let started = Instant::now();
    let mut said = String::new();
    for command in readme_commands("From text to verses") {
        println!("$ {command}");
        let mut shell = Command::new("sh");
        let output = shell.args(["-c", &command]).env("PATH", &path).current_dir(scratch.path()).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        println!(
            "{}",
            text.lines().rev().take(12).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n")
        );
        ensure!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        said.push_str(&text);
    }
    let minutes = started.elapsed().as_secs_f64() / 60.;
    let bits = said.rsplit(" bits per byte").nth(1).and_then(|before| before.split_whitespace().next_back());
    let bits: f64 = bits.context("bits per byte")?.parse()?;
    let text = scratch.path().join("kjv.txt");
    let packed = Command::new("xz").args(["-9", "-c"]).arg(&text).output()?.stdout.len();
    let of_xz = 8. * packed as f64 / std::fs::metadata(&text)?.len() as f64;
    Ok(Verdict {
        figure: format!(
            "{minutes:.1} minutes; {bits:.3} bits per byte on held-out text, where xz -9 needs {of_xz:.3} with the whole text in view"
        ),
        bar: "15 minutes, fewer bits than xz".to_string(),
        holds: minutes <= 15. && bits < of_xz,
    })
}

// ---- tokenizing -------------------------------------------------------------------------------------------------------

const ROUNDS: usize = 2;

/// The folder with the Linux source, which is downloaded once and cached.
fn linux() -> Result<PathBuf> {
    let kept = crate::workspace::tools()?.with_file_name("linux-source-6.1");
    if kept.join("complete").exists() {
        return Ok(kept.join("linux"));
    }
    println!("fetching linux-source-6.1 from Debian");
    drop(std::fs::remove_dir_all(&kept));
    std::fs::create_dir_all(kept.join("linux"))?;
    let fetch = "apt-get download -qq linux-source-6.1 && dpkg-deb -x linux-source-6.1_*.deb unpacked && \
                 tar -xJf unpacked/usr/src/linux-source-6.1.tar.xz -C linux --strip-components=1 && \
                 rm -rf unpacked *.deb && touch complete";
    output_of(Command::new("sh").args(["-c", fetch]).current_dir(&kept)).context("apt-get update may be needed")?;
    Ok(kept.join("linux"))
}

fn tokenize() -> Result<Verdict> {
    let (program, linux) = (shardwise()?, linux()?);
    let scratch = Scratch::new("tokenize")?;
    let at = |name: &str| scratch.path().join(name);
    let run = |from: &Path, to: &str, rest: &[&str]| {
        let mut command = Command::new(&program);
        command.arg("tokenize").arg(from).arg("--to").arg(at(to)).args(rest);
        command
    };
    output_of(&mut run(&linux.join("kernel"), "learned/kernel", &["--vocabulary", "16000"]))?;
    let tokenizer = at("learned/tokenizer.json");
    let ours = ["--tokenizer", tokenizer.to_str().context("a path")?];

    let (mut ratios, mut peaks, mut undisturbed) = (Vec::new(), Vec::new(), f64::INFINITY);
    let small = peak_memory_of(&mut run(&linux.join("fs"), "small", &ours))?;
    for round in 1..=ROUNDS {
        let started = Instant::now();
        peaks.push(peak_memory_of(&mut run(&linux, &format!("whole-{round}"), &ours))?);
        let seconds = started.elapsed().as_secs_f64();
        let theirs = run_with_transformers("tokenizers_speed.py", &[&tokenizer, &linux]).map_err(anyhow::Error::msg)?;
        let theirs: f64 = theirs.trim().parse().context("its seconds")?;
        println!("round {round}: {seconds:.1} s, Python's tokenizers {theirs:.1} s");
        ratios.push(theirs / seconds);
        undisturbed = undisturbed.min(seconds);
    }

    let mut others = Vec::new();
    for (name, digits, normalizer) in
        [("llama-3", r"\p{N}{1,3}", Value::Null), ("qwen", r"\p{N}", json!({ "type": "NFC" }))]
    {
        let file = at(&format!("{name}.json"));
        write_tokenizer_like_llama3(&tokenizer, &file, digits, normalizer)?;
        let mut ratios = Vec::new();
        for round in 1..=3 {
            let started = Instant::now();
            let arguments = ["--tokenizer", file.to_str().context("a path")?];
            output_of(&mut run(&linux.join("fs"), &format!("{name}-{round}"), &arguments))?;
            let seconds = started.elapsed().as_secs_f64();
            let theirs = run_with_transformers("tokenizers_speed.py", &[&file, &linux.join("fs")])
                .map_err(anyhow::Error::msg)?;
            let theirs: f64 = theirs.trim().parse().context("its seconds")?;
            println!("{name}, round {round}: {seconds:.1} s, Python's tokenizers {theirs:.1} s");
            ratios.push(theirs / seconds);
        }
        others.push(median(&ratios));
    }
    let slowest = others.iter().copied().fold(f64::INFINITY, f64::min);

    // Killed three times, each after a fifth of the work, and resumed.
    for _ in 0..3 {
        let mut child = run(&linux, "killed", &ours).stdout(Stdio::null()).spawn()?;
        std::thread::sleep(Duration::from_secs_f64(undisturbed / 5.));
        ensure!(child.try_wait()?.is_none(), "it was done before it was killed");
        child.kill()?;
        child.wait()?;
    }
    output_of(&mut run(&linux, "killed", &ours))?;
    for ending in ["bin", "idx"] {
        let same =
            Command::new("cmp").arg(at(&format!("whole-1.{ending}"))).arg(at(&format!("killed.{ending}"))).status()?;
        if !same.success() {
            bail!("the .{ending} file differs after kills");
        }
    }
    let (speed, peak) = (median(&ratios), peaks.iter().copied().fold(0., f64::max));
    Ok(Verdict {
        figure: format!(
            "{speed:.2} of the speed of Python's tokenizers, {slowest:.2} with Llama 3's and Qwen's splitting; peak {:.0} MB, \
             and {:.0} MB for a twentieth of the text; the same bytes after 3 kills",
            peak / 1e6,
            small / 1e6,
        ),
        bar: "1.00, constant memory (1.25 times), the same bytes".to_string(),
        holds: speed >= 1. && slowest >= 1. && peak <= 1.25 * small,
    })
}

/// Writes a tokenizer that has the same vocabulary, but splits text as Llama 3's or Qwen's does.
fn write_tokenizer_like_llama3(learned: &Path, to: &Path, digits: &str, normalizer: Value) -> Result<()> {
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(learned)?)?;
    let words = [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
        digits,
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
    .concat();
    tokenizer["normalizer"] = normalizer;
    tokenizer["pre_tokenizer"] = json!({
        "type": "Sequence",
        "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": words }, "behavior": "Isolated", "invert": false },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        ],
    });
    std::fs::write(to, tokenizer.to_string()).with_context(|| to.display().to_string())
}

// ---- loading ----------------------------------------------------------------------------------------------------------

fn loading() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("loading")?;
    let at = |name: &str| scratch.path().join(name);
    let text = "A corpus that is long enough to be read at random places.\n".repeat(4_000_000);
    std::fs::write(at("text.txt"), text)?;
    let to = at("corpus");
    output_of(
        Command::new(&program).arg("tokenize").arg(at("text.txt")).arg("--to").arg(&to).args(["--vocabulary", "300"]),
    )?;
    let recipe = "[model.llama]\nvocab_size = 32000\nhidden_size = 512\nnum_hidden_layers = 8\n\
                  num_attention_heads = 8\nintermediate_size = 1408\ntie_word_embeddings = true\n\
                  [data]\ncorpus = \"corpus\"\n[batch]\nmicro_batch_size = 2\nseq_len = 512\n[optimizer]\nlr = 1e-4\n[run]\nsteps = 12\n";
    std::fs::write(at("recipe.toml"), recipe)?;
    let mut shares = Vec::new();
    for cold in [false, true] {
        if cold {
            output_of(Command::new("sh").args(["-c", "sync; echo 3 > /proc/sys/vm/drop_caches"]))?;
        }
        let printed = output_of(Command::new(&program).arg("train").arg(at("recipe.toml")).args(["-n", "2"]))?;
        let share = printed
            .lines()
            .rev()
            .find_map(|line| line.strip_prefix("data loading took ")?.split('%').next()?.parse::<f64>().ok());
        let share = share.with_context(|| format!("no line about data in:\n{printed}"))?;
        println!("{} page cache: {share:.3}% of the time", if cold { "cold" } else { "warm" });
        shares.push(share);
    }
    Ok(Verdict {
        figure: format!("{:.3}% warm, {:.3}% cold", shares[0], shares[1]),
        bar: "1%".to_string(),
        holds: shares.iter().all(|&share| share < 1.),
    })
}
