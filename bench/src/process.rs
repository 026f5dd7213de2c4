//! Figures of this process from /proc.

use anyhow::{Context, Result};

/// Reads a figure from a file of /proc, in bytes.
pub(crate) fn kernel_bytes(file: &str, key: &str) -> Result<f64> {
    let text = std::fs::read_to_string(file).with_context(|| file.to_string())?;
    let line = text.lines().find(|line| line.starts_with(key)).with_context(|| format!("{file} has no {key}"))?;
    let kib: f64 = line.split_whitespace().nth(1).context("a figure")?.parse()?;
    Ok(kib * 1024.)
}
