//! The licenses and origins of all dependencies, against what deny.toml allows.
//!
//! `cargo deny check` does the same and more. It takes as long to build as all of ours, so `.ci/run` has this instead: it reads
//! the same file, and what it does not understand is an error.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::workspace::{output_of, root};

#[derive(Deserialize)]
struct Deny {
    graph: Graph,
    licenses: Licenses,
}

#[derive(Deserialize)]
struct Graph {
    targets: Vec<String>,
}

#[derive(Deserialize)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    /// None for what is in this repository.
    source: Option<String>,
}

/// Names every dependency, with any feature and on any of deny.toml's targets, that is not from crates.io or that has no license
/// among those allowed.
pub(crate) fn run() -> Result<ExitCode> {
    let deny: Deny = toml::from_str(&std::fs::read_to_string(root().join("deny.toml"))?).context("deny.toml")?;
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root()).args(["metadata", "--format-version", "1", "--locked", "--all-features"]);
    cargo.args(deny.graph.targets.iter().flat_map(|target| ["--filter-platform", target]));
    let metadata: Metadata = serde_json::from_str(&output_of(&mut cargo)?)?;
    let faults: Vec<String> =
        metadata.packages.iter().filter_map(|package| fault(package, &deny.licenses.allow)).collect();
    faults.iter().for_each(|fault| println!("{fault}"));
    println!("{} packages, {} not allowed by deny.toml", metadata.packages.len(), faults.len());
    Ok(if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn fault(package: &Package, allowed: &[String]) -> Option<String> {
    let Package { name, version, license, source } = package;
    if source.as_ref().is_some_and(|source| source != "registry+https://github.com/rust-lang/crates.io-index") {
        return Some(format!("{name} {version} is not from crates.io: {source:?}"));
    }
    let license = license.as_deref().unwrap_or("none");
    (!is_allowed(license, allowed)).then(|| format!("{name} {version} has a license that is not allowed: {license}"))
}

/// Whether an SPDX expression can be satisfied by licenses that are allowed. AND binds tighter than OR; an exception (WITH)
/// only adds permissions.
fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = &tokens[..];
    any(&mut rest, allowed) && rest.is_empty()
}

fn any(rest: &mut &[&str], allowed: &[String]) -> bool {
    let mut found = all(rest, allowed);
    while rest.first() == Some(&"OR") {
        *rest = &rest[1..];
        found |= all(rest, allowed);
    }
    found
}

fn all(rest: &mut &[&str], allowed: &[String]) -> bool {
    let mut found = one(rest, allowed);
    while rest.first() == Some(&"AND") {
        *rest = &rest[1..];
        found &= one(rest, allowed);
    }
    found
}

fn one(rest: &mut &[&str], allowed: &[String]) -> bool {
    let Some((&first, after)) = rest.split_first() else { return false };
    *rest = after;
    if first == "(" {
        let found = any(rest, allowed);
        let closed = rest.first() == Some(&")");
        *rest = rest.get(1..).unwrap_or_default();
        return found && closed;
    }
    if rest.first() == Some(&"WITH") {
        *rest = rest.get(2..).unwrap_or_default();
    }
    allowed.iter().any(|allowed| allowed == first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_read_as_spdx_means_them() {
        let allowed = ["MIT".to_string(), "Apache-2.0".to_string()];
        for good in [
            "MIT",
            "GPL-3.0 OR MIT",
            "MIT/Apache-2.0",
            "Apache-2.0 WITH LLVM-exception",
            "(MIT OR GPL-3.0) AND Apache-2.0",
            "GPL-3.0 AND MIT OR MIT",
        ] {
            assert!(is_allowed(good, &allowed), "{good}");
        }
        for bad in
            ["", "none", "GPL-3.0", "MIT AND GPL-3.0", "(MIT AND GPL-3.0) OR LGPL-2.1", "(MIT", "MIT MIT", "MIT AND"]
        {
            assert!(!is_allowed(bad, &allowed), "{bad}");
        }
    }
}
