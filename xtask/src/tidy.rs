//! `cargo xtask tidy`: checks the rules of the code base that the compiler does not check.
//!
//! Every rule returns the places that break it, as `file:line: what is wrong`. The rules are listed in [`RULES`]; the tests plant a
//! violation of each and expect to see it reported.

mod imports;
mod keys;
mod layers;
mod limits;

pub(crate) use keys::write_reference;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};

struct Rule {
    name: &'static str,
    about: &'static str,
    check: fn(&Path) -> Result<Vec<String>>,
}

const RULES: &[Rule] = &[
    Rule { name: "cycles", about: "no cycle of files", check: imports::find_cycles },
    Rule { name: "layers", about: "crates use only the crates below them", check: layers::find_violations },
    Rule {
        name: "keys",
        about: "every recipe key is documented, and the guide names no other",
        check: keys::find_differences,
    },
    Rule { name: "modules", about: "every module belongs to one crate", check: limits::find_path_attributes },
    Rule { name: "step", about: "the training step fits on two screens", check: limits::find_long_step },
    Rule {
        name: "fields",
        about: "the trainer's fields are private, and none belongs to the run",
        check: limits::find_open_fields,
    },
    Rule {
        name: "architecture",
        about: "ARCHITECTURE.md explains a collective and a step in a page each, and names files that exist",
        check: limits::find_map_errors,
    },
];

/// Checks the workspace by these rules, or by all if none is named.
pub(crate) fn run(names: &[String]) -> Result<ExitCode> {
    let root = crate::workspace::root();
    if let Some(name) = names.iter().find(|name| !RULES.iter().any(|rule| rule.name == **name)) {
        let known: Vec<&str> = RULES.iter().map(|rule| rule.name).collect();
        bail!("there is no rule '{name}'; the rules are {}", known.join(", "));
    }
    let mut is_tidy = true;
    for rule in RULES.iter().filter(|rule| names.is_empty() || names.iter().any(|name| name == rule.name)) {
        let violations = (rule.check)(&root)?;
        println!("{:7} {}: {}", if violations.is_empty() { "ok" } else { "BROKEN" }, rule.name, rule.about);
        violations.iter().for_each(|violation| println!("        {violation}"));
        is_tidy &= violations.is_empty();
    }
    Ok(if is_tidy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
