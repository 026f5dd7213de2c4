//! Paths, builds, commands, statistics and results: helpers for the comparisons and for the claims in xtask.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

/// The root of the checkout.
pub fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.ancestors().nth(2).expect("bench/compare is a folder of the checkout").to_path_buf()
}

/// Runs a command and returns its output. Fails if the command fails.
pub fn output_of(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?} could not be started"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(output.status.success(), "{command:?} failed:\n{}{}", text(&output.stdout), text(&output.stderr));
    Ok(text(&output.stdout))
}

/// A temporary folder, which is removed on drop.
pub struct Scratch(PathBuf);

impl Scratch {
    /// Creates a folder whose name contains `name`.
    pub fn new(name: &str) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("shardwise-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        Ok(Scratch(folder))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Files left in the temporary folder do no harm.
        drop(std::fs::remove_dir_all(&self.0));
    }
}

#[derive(Deserialize)]
struct CargoMessage {
    executable: Option<PathBuf>,
    target: Option<CargoTarget>,
}

#[derive(Deserialize)]
struct CargoTarget {
    name: String,
}

/// The variables that .cargo/local.toml sets for this program. A nested cargo would see them as a change and rebuild libtorch's bindings.
pub const LOCAL_VARIABLES: [&str; 4] = ["LIBTORCH", "LIBTORCH_CXX11_ABI", "MPICC", "MPIRUN"];

/// Runs cargo with `arguments`, and returns the binary of the target `name`. Always build the whole workspace: any other selection of
/// packages enables other features, for which cargo would rebuild libtorch's bindings.
pub fn build(name: &str, arguments: &[&str]) -> Result<PathBuf> {
    let (verb, rest) = arguments.split_first().context("cargo needs a verb")?;
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root()).arg(verb).args(["--message-format", "json-render-diagnostics"]).args(rest);
    cargo.stderr(std::process::Stdio::inherit());
    for variable in LOCAL_VARIABLES {
        cargo.env_remove(variable);
    }
    let messages = output_of(&mut cargo)?;
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<CargoMessage>(line).ok())
        .find_map(|message| message.executable.filter(|_| message.target.is_some_and(|target| target.name == name)))
        .with_context(|| format!("cargo did not build '{name}'"))
}

/// A description of this machine in one line.
pub fn machine() -> String {
    let field = |file: &str, key: &str| {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
        line.split_once(':').map_or("unknown", |(_, value)| value.trim()).to_string()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kib: f64 = field("/proc/meminfo", "MemTotal").trim_end_matches(" kB").parse().unwrap_or(0.);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!(
        "{cores} cores ({}), {:.0} GiB, Linux {}",
        field("/proc/cpuinfo", "model name"),
        kib / 1048576.,
        kernel.trim()
    )
}

/// Today's date, as in 2026-11-15.
fn today() -> Result<String> {
    Ok(output_of(Command::new("date").arg("+%F"))?.trim().to_string())
}

/// The median.
pub fn median(values: &[f64]) -> f64 {
    assert!(!values.is_empty(), "the median of nothing");
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2. }
}

/// The minimum and the maximum.
pub fn spread(values: &[f64]) -> (f64, f64) {
    values.iter().fold((f64::MAX, f64::MIN), |(least, greatest), &value| (least.min(value), greatest.max(value)))
}

/// Prints a table and saves it, with its data, to a dated folder in bench/results. Returns the folder.
pub fn save_results(name: &str, table: &str, figures: &impl Serialize) -> Result<PathBuf> {
    println!("{table}");
    let folder = Path::new("bench/results").join(format!("{}-{name}", today()?));
    let to = root().join(&folder);
    std::fs::create_dir_all(&to).with_context(|| folder.display().to_string())?;
    std::fs::write(to.join("table.md"), table)?;
    std::fs::write(to.join("rows.json"), serde_json::to_string_pretty(figures)? + "\n")?;
    println!("saved in {}", folder.display());
    Ok(to)
}
