//! Runs Python scripts: the oracle, the peers and Hugging Face's transformers.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the Python that scripts/setup installed torch into.
pub fn python() -> Result<PathBuf, &'static str> {
    let libtorch = option_env!("LIBTORCH").ok_or("LIBTORCH is set by .cargo/local.toml: run scripts/setup")?;
    let mut environments = Path::new(libtorch).ancestors().map(|folder| folder.join("bin/python"));
    environments
        .find(|python| python.exists())
        .ok_or("libtorch is not in a Python environment: run scripts/setup without --libtorch")
}

/// Runs a script of `reference` with Hugging Face's packages, which it installs if necessary, and returns its output.
pub fn run_with_transformers(script: &str, arguments: &[&Path]) -> Result<String, String> {
    reference("transformers", script, arguments)
}

/// Runs a script of `reference` with TensorBoard's packages, which it installs if necessary, and returns its output.
pub fn run_with_tensorboard(script: &str, arguments: &[&Path]) -> Result<String, String> {
    reference("tensorboard", script, arguments)
}

/// The folder with the packages of small compiled models (`shardwise compile`), which are compiled if necessary.
pub fn packages() -> Result<PathBuf, String> {
    if let Some(folder) = std::env::var_os("SHARDWISE_PACKAGES") {
        return Ok(folder.into());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).ok_or("the harness is in the checkout")?;
    Ok(print_of(&mut Command::new(root.join("python/tests/packages")))?.trim().into())
}

fn reference(package: &str, script: &str, arguments: &[&Path]) -> Result<String, String> {
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).map(|root| root.join("reference"));
    let reference = reference.ok_or("the harness is in the checkout")?;
    let python = print_of(Command::new(reference.join("setup")).arg(python()?).arg(package))?;
    print_of(Command::new(python.trim()).arg(reference.join(script)).args(arguments))
}

/// What a command prints.
fn print_of(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))),
    }
}
