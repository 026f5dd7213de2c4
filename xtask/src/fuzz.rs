//! `cargo xtask fuzz`: fuzzes the readers of untrusted input.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace::{output_of, root, tools};

const CARGO_FUZZ: &str = "0.13.1";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Reader to fuzz: a folder of fuzz/corpus
    target: String,
    /// Duration in minutes
    #[arg(long, default_value_t = 10.)]
    minutes: f64,
    /// Maximum length of an input, in bytes
    #[arg(long, default_value_t = 4096)]
    bytes: usize,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let Options { target, minutes, bytes } = options;
    let kept = root().join("fuzz/corpus").join(target);
    ensure!(kept.is_dir(), "there is no reader '{target}'; the readers are the folders of fuzz/corpus");
    // Only inputs that reach new code are kept.
    let found = root().join("target/fuzz").join(target);
    std::fs::create_dir_all(&found)?;
    fuzzer(options)?
        .arg(&found)
        .arg(&kept)
        .arg("--")
        .arg(format!("-max_total_time={}", (60. * minutes) as u64))
        .arg(format!("-max_len={bytes}"))
        .args(["-timeout=5", "-rss_limit_mb=1024", "-print_final_stats=1"])
        .status()?
        .success()
        .then_some(())
        .context(
            "an input broke the reader: it is in fuzz/artifacts; fix the reader and add the input to the corpus",
        )?;
    let before = std::fs::read_dir(&kept)?.count();
    output_of(
        fuzzer(options)?
            .arg(&kept)
            .arg(&found)
            .args(["--", "-set_cover_merge=1", "-use_counters=0"])
            .arg(format!("-max_len={bytes}")),
    )?;
    println!("{} inputs in the corpus, {before} before", std::fs::read_dir(&kept)?.count());
    Ok(())
}

/// Returns the command `cargo fuzz run`. Installs cargo-fuzz if necessary. It runs without the address sanitizer, which needs a
/// nightly compiler; the readers have no unsafe code.
fn fuzzer(options: &Options) -> Result<Command> {
    let program: PathBuf = tools()?.join("bin/cargo-fuzz");
    if !program.exists() {
        println!("installing cargo-fuzz {CARGO_FUZZ}");
        let mut install = Command::new(env!("CARGO"));
        install.args(["install", "--locked", "--quiet", "--root"]).arg(tools()?);
        output_of(install.arg(format!("cargo-fuzz@{CARGO_FUZZ}")))?;
    }
    let mut command = Command::new(program);
    command.current_dir(root().join("fuzz")).args(["run", "--fuzz-dir", ".", "--sanitizer", "none"]);
    command.args(["--features", "fuzzer", &options.target]);
    // The compiler flags that cargo-fuzz sets replace those that say where libtorch is.
    if let Some(libtorch) = std::env::var_os("LIBTORCH") {
        command.env("LD_LIBRARY_PATH", PathBuf::from(libtorch).join("lib"));
    }
    Ok(command)
}
