//! Checks which crate uses which: in its sources and in its manifest.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Every crate, with the crates of the workspace that it may use, from the bottom up. A crate that is not listed is reported.
const LAYERS: &[(&str, &[&str])] = &[
    ("machine", &[]),
    ("plan", &["machine"]),
    ("journal", &[]),
    ("watch", &["journal"]),
    ("supervisor", &["journal", "watch"]),
    ("data", &["plan"]),
    ("checkpoint", &["plan"]),
    ("recipe", &["plan", "checkpoint"]),
    ("torch", &["plan"]),
    ("comm", &["plan", "torch"]),
    ("zero", &["plan", "torch", "comm"]),
    ("model", &["plan", "torch"]),
    ("train", &["plan", "torch", "comm", "zero", "model", "checkpoint"]),
    ("run", &["plan", "recipe", "journal", "torch", "comm", "zero", "model", "data", "checkpoint", "train"]),
    ("shardwise", &["plan", "torch", "comm", "zero", "model", "data", "checkpoint", "train", "run"]),
    ("cli", &["plan", "recipe", "journal", "watch", "supervisor", "data", "checkpoint"]),
];

/// The program that runs on every rank. It is the part of `cli` that may use every crate, so the manifest of `cli` may name them all.
const RANK_PROGRAM: &str = "crates/cli/src/bin/shardwise-rank";

/// Finds uses of crates that are not in a lower layer, and dependencies on them.
pub(super) fn find_violations(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for (name, allowed) in LAYERS {
        let folder = root.join("crates").join(name);
        let may_use = match allowed {
            [] => format!("{name} may use no crate of ours"),
            _ => format!("{name} may use {}", allowed.join(", ")),
        };
        for (file, text) in sources(&folder.join("src"))? {
            if file.starts_with(root.join(RANK_PROGRAM)) {
                continue;
            }
            let file = file.strip_prefix(root).unwrap_or(&file).display().to_string();
            let uses = uses_of_others(name, allowed, &text).into_iter();
            found.extend(uses.map(|(line, used)| format!("{file}:{line}: uses {used}; {may_use}")));
        }
        if *name != "cli" {
            let file = format!("crates/{name}/Cargo.toml");
            let manifest = std::fs::read_to_string(root.join(&file)).with_context(|| file.clone())?;
            let others = dependencies_on_others(name, allowed, &manifest).with_context(|| file.clone())?;
            found.extend(others.into_iter().map(|package| format!("{file}: depends on {package}; {may_use}")));
        }
    }
    for entry in std::fs::read_dir(root.join("crates"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !LAYERS.iter().any(|(known, _)| *known == name) {
            found.push(format!("crates/{name} is not in the list of layers (xtask/src/tidy/layers.rs)"));
        }
    }
    Ok(found)
}

/// The layer that a crate belongs to. `tch` counts as torch.
fn layer_of(name: &str) -> Option<&'static str> {
    let name = if name == "tch" { "torch" } else { name.strip_prefix("shardwise_")? };
    LAYERS.iter().map(|(known, _)| *known).find(|known| *known == name)
}

/// The crates of the workspace that a source mentions but may not use, with their lines.
fn uses_of_others<'a>(name: &str, allowed: &[&str], text: &'a str) -> Vec<(usize, &'a str)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        let words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
        for word in words {
            if layer_of(word).is_some_and(|used| used != name && !allowed.contains(&used)) {
                found.push((index + 1, word));
            }
        }
    }
    found
}

/// The packages that a manifest names in `[dependencies]`, for all targets or for some, but may not. `mpi` counts as comm.
fn dependencies_on_others(name: &str, allowed: &[&str], manifest: &str) -> Result<Vec<String>> {
    let manifest: toml::Table = toml::from_str(manifest)?;
    let targets = manifest.get("target").and_then(toml::Value::as_table);
    let of_targets = targets.into_iter().flat_map(|targets| targets.values()).filter_map(|t| t.get("dependencies"));
    let tables = of_targets.chain(manifest.get("dependencies")).filter_map(toml::Value::as_table);
    let mut found = Vec::new();
    for (key, value) in tables.flatten() {
        let package = value.get("package").and_then(toml::Value::as_str).unwrap_or(key);
        let used = match package {
            "mpi" => Some("comm"),
            "shardwise" => Some("shardwise"),
            _ => layer_of(&package.replace('-', "_")),
        };
        if used.is_some_and(|used| used != name && !allowed.contains(&used)) {
            found.push(package.to_string());
        }
    }
    Ok(found)
}

/// All Rust files below a folder, with their text.
pub(super) fn sources(folder: &Path) -> Result<Vec<(PathBuf, String)>> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(folder) = open.pop() {
        if !folder.exists() || folder.ends_with("target") {
            continue;
        }
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
                found.push((path, text));
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use super::*;

    fn allowed_in(name: &str) -> &'static [&'static str] {
        LAYERS.iter().find(|(known, _)| *known == name).expect("it is a layer").1
    }

    #[test]
    fn a_planted_use_of_torch_is_reported() {
        let text = "use shardwise_plan::Dtype;\nuse shardwise_torch::Block; // shardwise_comm is only mentioned here\nfn f(_: &tch::Tensor) {}\n";
        for name in ["recipe", "data"] {
            assert_eq!(uses_of_others(name, allowed_in(name), text), [(2, "shardwise_torch"), (3, "tch")], "{name}");
        }
    }

    #[test]
    fn a_planted_dependency_on_torch_is_reported() {
        let manifest = "[dependencies]\nshardwise-plan.workspace = true\nshardwise-torch.workspace = true\nserde = \"1\"\n\
            tensors = { package = \"tch\", version = \"1\" }\n[target.'cfg(unix)'.dependencies]\nmpi.workspace = true\n\
            [dev-dependencies]\nshardwise-train.workspace = true\n";
        let mut found = dependencies_on_others("recipe", allowed_in("recipe"), manifest).unwrap();
        found.sort();
        assert_eq!(found, ["mpi", "shardwise-torch", "tch"]);
    }

    #[test]
    fn only_the_rank_program_of_cli_may_use_torch() {
        let root = std::env::temp_dir().join(format!("tidy-layers-{}", std::process::id()));
        for (name, _) in LAYERS {
            std::fs::create_dir_all(root.join("crates").join(name).join("src")).unwrap();
            std::fs::write(root.join("crates").join(name).join("Cargo.toml"), "[dependencies]\n").unwrap();
        }
        std::fs::create_dir_all(root.join(RANK_PROGRAM)).unwrap();
        for file in ["crates/cli/src/lib.rs", "crates/cli/src/bin/shardwise-rank/main.rs"] {
            std::fs::write(root.join(file), "use shardwise_torch::Block;\n").unwrap();
        }
        let found = find_violations(&root).unwrap();
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("crates/cli/src/lib.rs:1: uses shardwise_torch"), "{found:?}");
    }
}
