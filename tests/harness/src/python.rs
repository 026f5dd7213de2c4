//! The Python of the oracle, of the peers and of Hugging Face's transformers.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The Python that scripts/setup installed torch into, or why there is none.
pub fn python() -> Result<PathBuf, &'static str> {
    let libtorch = option_env!("LIBTORCH").ok_or("LIBTORCH is set by .cargo/local.toml: run scripts/setup")?;
    let mut environments = Path::new(libtorch).ancestors().map(|folder| folder.join("bin/python"));
    environments
        .find(|python| python.exists())
        .ok_or("libtorch does not stand in a Python environment: run scripts/setup without --libtorch")
}

/// Runs a script of `reference` with Hugging Face's packages, which it installs where they are not, and returns what it printed;
/// or why it failed.
pub fn transformers(script: &str, arguments: &[&Path]) -> Result<String, String> {
    reference("transformers", script, arguments)
}

/// The same with TensorBoard's.
pub fn tensorboard(script: &str, arguments: &[&Path]) -> Result<String, String> {
    reference("tensorboard", script, arguments)
}

fn reference(package: &str, script: &str, arguments: &[&Path]) -> Result<String, String> {
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).map(|root| root.join("reference"));
    let reference = reference.ok_or("the harness stands in the checkout")?;
    let printed = |command: &mut Command| {
        let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))),
        }
    };
    let python = printed(Command::new(reference.join("setup")).arg(python()?).arg(package))?;
    printed(Command::new(python.trim()).arg(reference.join(script)).args(arguments))
}
