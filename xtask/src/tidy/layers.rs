//! Checks which crate uses which, and a few limits on single files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Every crate, with the crates of the workspace that it may use, from the bottom up. A crate that is not listed is reported.
const LAYERS: &[(&str, &[&str])] = &[
    ("plan", &[]),
    ("journal", &[]),
    ("watch", &["journal"]),
    ("data", &["plan"]),
    ("checkpoint", &["plan"]),
    ("torch", &["plan"]),
    ("comm", &["plan", "torch"]),
    ("zero", &["plan", "torch", "comm"]),
    ("model", &["plan", "torch"]),
    ("train", &["plan", "journal", "torch", "comm", "zero", "model", "data", "checkpoint"]),
    ("shardwise", &["plan", "torch", "comm", "zero", "model", "data", "checkpoint", "train"]),
    ("cli", &["plan", "journal", "watch", "torch", "comm", "zero", "model", "data", "checkpoint", "train"]),
];

/// The maximum number of lines of the step: two screens.
const STEP_LINES_MAX: usize = 120;

/// Finds uses of crates that are not in a lower layer.
pub(super) fn find_violations(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for (name, allowed) in LAYERS {
        let folder = root.join("crates").join(name);
        for (file, text) in sources(&folder.join("src"))? {
            let file = file.strip_prefix(root).unwrap_or(&file).display().to_string();
            found.extend(uses_of_others(name, allowed, &text).into_iter().map(|(line, used)| {
                format!(
                    "{file}:{line}: uses {used}; {name} may use {}",
                    if allowed.is_empty() { "no crate of ours".to_string() } else { allowed.join(", ") }
                )
            }));
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

/// The crates of the workspace that a source mentions but may not use, with their lines. `tch` counts as torch.
fn uses_of_others<'a>(name: &str, allowed: &[&str], text: &'a str) -> Vec<(usize, &'a str)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        let words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
        for word in words {
            let used = match word {
                "tch" => "torch",
                _ => match word.strip_prefix("shardwise_") {
                    Some(used) if LAYERS.iter().any(|(known, _)| *known == used) => used,
                    _ => continue,
                },
            };
            if used != name && !allowed.contains(&used) {
                found.push((index + 1, word));
            }
        }
    }
    found
}

/// Finds modules whose file is given by a `path` attribute, with which a file can belong to several crates.
pub(super) fn find_path_attributes(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for folder in ["crates", "xtask", "bench", "tests", "fuzz"] {
        for (file, text) in sources(&root.join(folder))? {
            let lines = text.lines().enumerate().filter(|(_, line)| line.trim_start().starts_with("#[path"));
            let file = file.strip_prefix(root).unwrap_or(&file).display().to_string();
            found.extend(lines.map(|(index, _)| format!("{file}:{}: a module belongs to one crate", index + 1)));
        }
    }
    Ok(found)
}

/// Reports the training step if it is too long.
pub(super) fn find_long_step(root: &Path) -> Result<Vec<String>> {
    let file = "crates/train/src/step.rs";
    let text = std::fs::read_to_string(root.join(file)).context(file)?;
    let banner = |name: &str| {
        text.lines().position(|line| line.contains(name)).with_context(|| format!("{file}: no banner '{name}'"))
    };
    let lines = banner("---- its parts --")?.saturating_sub(banner("---- the step --")? + 1);
    Ok(if lines > STEP_LINES_MAX {
        vec![format!("{file}: the step has {lines} lines, at most {STEP_LINES_MAX}")]
    } else {
        Vec::new()
    })
}

/// All Rust files below a folder, with their text.
fn sources(folder: &Path) -> Result<Vec<(PathBuf, String)>> {
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
    use super::*;

    #[test]
    fn a_planted_use_of_torch_is_reported() {
        let (_, allowed) = LAYERS.iter().find(|(name, _)| *name == "data").expect("data is a layer");
        let text = "use shardwise_plan::Dtype;\nuse shardwise_torch::Block; // shardwise_comm is only mentioned here\nfn f(_: &tch::Tensor) {}\n";
        assert_eq!(uses_of_others("data", allowed, text), [(2, "shardwise_torch"), (3, "tch")]);
    }
}
