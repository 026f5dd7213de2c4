//! The Python of the oracle and of the peers.

use std::path::{Path, PathBuf};

/// The Python that scripts/setup installed torch into, or why there is none.
pub fn python() -> Result<PathBuf, &'static str> {
    let libtorch = option_env!("LIBTORCH").ok_or("LIBTORCH is set by .cargo/local.toml: run scripts/setup")?;
    let mut environments = Path::new(libtorch).ancestors().map(|folder| folder.join("bin/python"));
    environments
        .find(|python| python.exists())
        .ok_or("libtorch does not stand in a Python environment: run scripts/setup without --libtorch")
}
