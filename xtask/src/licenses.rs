//! Checks the licenses and sources of all dependencies against deny.toml.
//!
//! `cargo deny check` does the same and more, but takes as long to build as the whole workspace, so `.ci/run` uses this instead. It
//! reads the same file, and fails on anything that it does not understand.

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
    /// `None` for packages of this workspace.
    source: Option<String>,
}

/// Lists every dependency, with all features and on all targets of deny.toml, that is not from crates.io or has no allowed license.
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

/// Whether the allowed licenses satisfy an SPDX expression. AND binds tighter than OR; an exception (WITH) only adds permissions.
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
    fn spdx_expressions_are_evaluated() {
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
