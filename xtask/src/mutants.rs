//! Mutation tests: known bugs that the test suite must catch.
//!
//! `tests/mutants/NAME.patch` reintroduces a bug that we or others have shipped. Its first lines describe the bug and name the test
//! that catches it:
//!
//! ```text
//! # The gradients of a failed step are kept, and count twice in the next.
//! # caught-by: shardwise-run custom_layers a_trainer_whose_step_failed_halfway_is_not_used_again
//! diff --git a/… b/…
//! ```
//!
//! Each patch is applied to a copy of the checkout. The named test must pass without the patch and fail with it. A patch that no longer
//! applies or compiles is an error: mutants must be kept up to date.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::claim::Verdict;
use crate::workspace::{LOCAL_VARIABLES, Scratch, output_of, root};

/// A test, identified by package, file (or `lib`) and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Test {
    package: String,
    file: String,
    name: String,
}

struct Mutant {
    path: PathBuf,
    /// The description of the bug.
    what: String,
    caught_by: Test,
}

pub(crate) fn measure() -> Result<Verdict> {
    measure_some(&[""])
}

/// Measures the mutants whose names start with one of `prefixes`.
pub(crate) fn measure_some(prefixes: &[&str]) -> Result<Verdict> {
    let mut mutants = read_all(&root().join("tests/mutants"))?;
    mutants.retain(|mutant| prefixes.iter().any(|prefix| mutant.name().starts_with(prefix)));
    ensure!(!mutants.is_empty(), "no mutant's name starts with {prefixes:?}");
    let scratch = Scratch::new("mutants")?;
    let checkout = scratch.path().join("checkout");
    copy_checkout(&checkout)?;
    for test in mutants.iter().map(|mutant| &mutant.caught_by).collect::<BTreeSet<_>>() {
        ensure!(passes(&checkout, test)?, "{test:?} fails without any mutant");
    }
    let mut survivors = Vec::new();
    for mutant in &mutants {
        let name = mutant.name();
        apply(&checkout, &mutant.path, &[]).with_context(|| format!("{name} does not apply: update the patch"))?;
        let survives = passes(&checkout, &mutant.caught_by).with_context(|| name.clone())?;
        apply(&checkout, &mutant.path, &["--reverse"])?;
        println!("{} {name}: {}", if survives { "SURVIVES" } else { "caught  " }, mutant.what);
        if survives {
            survivors.push(name);
        }
    }
    Ok(Verdict {
        figure: match &survivors[..] {
            [] => format!("{} mutants, all caught", mutants.len()),
            survivors => format!("{} of {} survive: {}", survivors.len(), mutants.len(), survivors.join(", ")),
        },
        bar: "all caught".to_string(),
        holds: survivors.is_empty(),
    })
}

impl Mutant {
    fn name(&self) -> String {
        self.path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }
}

fn read_all(folder: &Path) -> Result<Vec<Mutant>> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "patch"));
    paths.sort();
    ensure!(!paths.is_empty(), "there are no mutants in {}", folder.display());
    paths.into_iter().map(|path| read(&path).with_context(|| path.display().to_string())).collect()
}

fn read(path: &Path) -> Result<Mutant> {
    let text = fs::read_to_string(path)?;
    let mut comments = text.lines().map_while(|line| line.strip_prefix("# "));
    let what: Vec<&str> = comments.by_ref().take_while(|line| !line.starts_with("caught-by: ")).collect();
    let caught_by = text.lines().find_map(|line| line.strip_prefix("# caught-by: "));
    let words: Vec<&str> = caught_by.context("the line '# caught-by: …' is missing")?.split_whitespace().collect();
    let [package, file, name] = words[..] else {
        bail!("'caught-by' must name a package, a test file or lib, and a test")
    };
    let caught_by = Test { package: package.to_string(), file: file.to_string(), name: name.to_string() };
    Ok(Mutant { path: path.to_path_buf(), what: what.join(" "), caught_by })
}

/// Copies the tracked files of the working tree, and the settings written by scripts/setup.
fn copy_checkout(to: &Path) -> Result<()> {
    let files = output_of(Command::new("git").current_dir(root()).args(["ls-files", "-z"]))?;
    for file in files.split_terminator('\0').chain([".cargo/local.toml"]) {
        let to = to.join(file);
        fs::create_dir_all(to.parent().context("a file is in a folder")?)?;
        fs::copy(root().join(file), &to).with_context(|| format!("copying {file}"))?;
    }
    Ok(())
}

fn apply(checkout: &Path, patch: &Path, flags: &[&str]) -> Result<()> {
    // The copy is not a repository. Keep git from looking for one above it.
    let mut git = Command::new("git");
    git.current_dir(checkout).env("GIT_CEILING_DIRECTORIES", checkout).arg("apply").args(flags).arg(patch);
    output_of(&mut git).map(drop)
}

/// Whether a test passes in a checkout. Fails if the test cannot be built or does not exist.
fn passes(checkout: &Path, test: &Test) -> Result<bool> {
    let target = match test.file.as_str() {
        "lib" => vec!["--lib"],
        file => vec!["--test", file],
    };
    let cargo = || {
        let mut cargo = Command::new(env!("CARGO"));
        // Share the build folder of the real checkout, but not its binaries.
        cargo.current_dir(checkout).env("CARGO_BUILD_BUILD_DIR", root().join("target"));
        cargo.env("CARGO_TARGET_DIR", checkout.join("target")).env("CARGO_INCREMENTAL", "0");
        for variable in LOCAL_VARIABLES {
            cargo.env_remove(variable);
        }
        cargo.args(["test", "--release", "--workspace", "--quiet"]).args(&target);
        cargo
    };
    output_of(cargo().arg("--no-run"))?;
    let filter = ["--", "--exact", &test.name];
    let output = cargo().arg("--no-fail-fast").args(filter).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(said.contains("running 1 test"), "there is no test {test:?}:\n{said}");
    Ok(output.status.success())
}
