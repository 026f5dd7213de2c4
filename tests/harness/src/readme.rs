//! README as a script.

use std::path::Path;

/// The commands of the first block of a section, without the comments behind them.
///
/// # Panics
/// If README has no such section, or no block in it.
pub fn readme_commands(section: &str) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the harness stands in the checkout");
    let readme = std::fs::read_to_string(root.join("README.md")).expect("README.md can be read");
    let text = readme.split(&format!("## {section}\n")).nth(1).expect("README has the section");
    let block = text.split("```sh").nth(1).and_then(|rest| rest.split("```").next()).expect("it has a block");
    let line = |line: &str| line.split("  #").next().unwrap_or_default().trim().to_string();
    block.replace("\\\n", " ").lines().map(line).filter(|line| !line.is_empty()).collect()
}
