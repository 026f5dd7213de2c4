//! Checks single files: where modules are, the length of the step, the trainer's fields, and the map in ARCHITECTURE.md.

use std::path::Path;

use anyhow::{Context, Result};
use syn::visit::Visit;

use super::layers::sources;

/// The file with the step and the trainer.
const STEP: &str = "crates/train/src/step.rs";

/// The maximum number of lines of the step: two screens.
const STEP_LINES_MAX: usize = 120;

/// Finds modules whose file is given by a `path` attribute, with which a file can belong to several crates.
pub(super) fn find_path_attributes(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for folder in ["crates", "xtask", "bench", "docs", "tests", "fuzz"] {
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
    let text = std::fs::read_to_string(root.join(STEP)).context(STEP)?;
    let banner = |name: &str| {
        text.lines().position(|line| line.contains(name)).with_context(|| format!("{STEP}: no banner '{name}'"))
    };
    let lines = banner("---- its parts --")?.saturating_sub(banner("---- the step --")? + 1);
    Ok(if lines > STEP_LINES_MAX {
        vec![format!("{STEP}: the step has {lines} lines, at most {STEP_LINES_MAX}")]
    } else {
        Vec::new()
    })
}

/// Reports fields of the trainer that other crates can reach, or that belong to the run.
pub(super) fn find_open_fields(root: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(root.join(STEP)).context(STEP)?;
    let found = open_fields(&text).context(STEP)?.into_iter();
    Ok(found.map(|(line, problem)| format!("{STEP}:{line}: {problem}")).collect())
}

/// The run traces, checks and saves a trainer, which knows nothing of that.
const NOT_OF_A_TRAINER: [&str; 4] = ["trace", "tracing", "spot", "snapshot"];

/// What is wrong with the fields of `struct Trainer`, with their lines.
fn open_fields(text: &str) -> Result<Vec<(usize, String)>> {
    let parsed = syn::parse_file(text)?;
    let trainer = parsed.items.iter().find_map(|item| match item {
        syn::Item::Struct(item) if item.ident == "Trainer" => Some(item),
        _ => None,
    });
    let mut found = Vec::new();
    for field in &trainer.context("there is no struct Trainer")?.fields {
        let Some(name) = &field.ident else { continue };
        let line = name.span().start().line;
        if matches!(field.vis, syn::Visibility::Public(_)) {
            found.push((line, format!("Trainer::{name} is public: other crates call methods")));
        }
        let mut names = Names::default();
        names.visit_field(field);
        if let Some(word) = NOT_OF_A_TRAINER.iter().find(|word| names.0.iter().any(|name| name.contains(*word))) {
            found.push((line, format!("Trainer::{name} is named or typed after '{word}', which belongs to the run")));
        }
    }
    Ok(found)
}

/// The names in a piece of code, in lower case.
#[derive(Default)]
struct Names(Vec<String>);

impl<'ast> Visit<'ast> for Names {
    fn visit_ident(&mut self, ident: &'ast proc_macro2::Ident) {
        self.0.push(ident.to_string().to_lowercase());
    }
}

/// The number of lines on a page.
const PAGE_LINES: usize = 60;

/// Reports walks through the code in ARCHITECTURE.md that are longer than a page, and files that it names but that do not exist.
pub(super) fn find_map_errors(root: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(root.join("ARCHITECTURE.md")).context("ARCHITECTURE.md")?;
    Ok(map_errors(&text, |file| root.join(file).exists()))
}

fn map_errors(text: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for heading in ["## One collective, from caller to wire", "## One parameter, through one step"] {
        let section = text.split_once(heading).map_or("", |(_, rest)| rest.split("\n## ").next().unwrap_or_default());
        let lines = section.trim().lines().count();
        if !(1..PAGE_LINES).contains(&lines) {
            found.push(format!("ARCHITECTURE.md: '{heading}' has {lines} lines, at least 1 and under {PAGE_LINES}"));
        }
    }
    let is_path = |word: &&str| word.contains('/') && word.contains('.') && !word.contains([' ', ':', '<']);
    let mut names_files = false;
    for (index, line) in text.lines().enumerate() {
        for file in line.split('`').skip(1).step_by(2).filter(is_path) {
            names_files = true;
            if !exists(file) {
                found.push(format!("ARCHITECTURE.md:{}: there is no {file}", index + 1));
            }
        }
    }
    if !names_files {
        found.push("ARCHITECTURE.md names no files".to_string());
    }
    found
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use super::*;

    #[test]
    fn a_planted_public_field_and_one_of_the_run_are_reported() {
        let text = "pub struct Trainer {\n    model: Model,\n    pub steps: u64,\n    pub(crate) shards: Vec<Unit>,\n    \
            spot: Option<Box<SpotCheck>>,\n    kept: Weak<Snapshot>,\n}\npub struct Other {\n    pub trace: u64,\n}\n";
        let found = open_fields(text).unwrap();
        let lines: Vec<usize> = found.iter().map(|(line, _)| *line).collect();
        assert_eq!(lines, [3, 5, 6], "{found:?}");
        assert!(found[0].1.contains("steps is public"), "{found:?}");
        assert!(found[2].1.contains("'snapshot'"), "{found:?}");
    }

    #[test]
    fn a_long_section_and_a_missing_file_are_reported() {
        let walk = "1. `a/b.rs` or `a::b`\n".repeat(60);
        let map =
            format!("## One collective, from caller to wire\n{walk}\n## One parameter, through one step\n`a/c.rs`\n");
        let found = map_errors(&map, |file| file == "a/b.rs");
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("has 60 lines"), "{found:?}");
        assert_eq!(found[1], "ARCHITECTURE.md:64: there is no a/c.rs");
    }
}
