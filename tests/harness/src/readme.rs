//! The commands of the README, as tests run them.

use std::path::Path;

/// Returns the commands of a section's first code block, without trailing comments.
///
/// # Panics
/// If README.md has no such section, or the section has no code block.
pub fn readme_commands(section: &str) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the harness is in the checkout");
    let readme = std::fs::read_to_string(root.join("README.md")).expect("README.md can be read");
    let text = readme.split(&format!("## {section}\n")).nth(1).expect("README has the section");
    let block = text.split("```sh").nth(1).and_then(|rest| rest.split("```").next()).expect("it has a block");
    let line = |line: &str| line.split("  #").next().unwrap_or_default().trim().to_string();
    block.replace("\\\n", " ").lines().map(line).filter(|line| !line.is_empty()).collect()
}
