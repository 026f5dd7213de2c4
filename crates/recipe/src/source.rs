//! The source of each value of a recipe, and errors that name it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::Error;

/// The source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A line of the recipe's file.
    Line(usize),
    /// A key of a DeepSpeed configuration.
    DeepSpeed(String),
    /// A `--set` argument.
    Set,
    /// The key's default.
    Default,
}

/// The source of each value of a recipe, by its key.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    pub(super) path: PathBuf,
    pub(super) deepspeed: PathBuf,
    pub(super) of: BTreeMap<String, Source>,
}

impl Sources {
    /// The source of a key such as `optimizer.lr`.
    pub fn of(&self, key: &str) -> Source {
        self.of.get(key).cloned().unwrap_or(Source::Default)
    }

    /// The source as text: `recipe.toml:12`, `--set`, `ds_config.json: train_batch_size` or `default`.
    pub fn describe(&self, key: &str) -> String {
        match self.of(key) {
            Source::Line(line) => format!("{}:{line}", name(&self.path)),
            Source::DeepSpeed(theirs) => format!("{}: {theirs}", name(&self.deepspeed)),
            Source::Set => "--set".to_string(),
            Source::Default => "default".to_string(),
        }
    }

    /// The line of a key, or of the table that it is missing from. Keys without a line sort last.
    pub(super) fn line(&self, key: &str) -> usize {
        match (self.of(key), key.rsplit_once('.')) {
            (Source::Line(line), _) => line,
            (Source::Default, Some((table, _))) => self.line(table),
            _ => usize::MAX,
        }
    }

    /// The location that an error message starts with.
    fn place(&self, key: &str) -> String {
        match self.of(key) {
            Source::Line(line) => format!("{}:{line}", self.path.display()),
            Source::DeepSpeed(theirs) => format!("{}: {theirs}", self.deepspeed.display()),
            Source::Set => format!("--set {key}"),
            // A missing key is reported at its table, if that exists.
            Source::Default => match key.rsplit_once('.') {
                Some((table, _)) if self.of.contains_key(table) => self.place(table),
                _ => self.path.display().to_string(),
            },
        }
    }

    /// An error about a key, with the key's location.
    pub fn error_at(&self, key: &str, problem: impl Into<String>) -> Error {
        self.error(Invalid::at(key, problem))
    }

    /// Adds the location to an error. Keys that contradict each other are listed with their sources.
    pub(super) fn error(&self, wrong: Invalid) -> Error {
        let Invalid { keys, problem } = wrong;
        let place = match keys.first() {
            Some((key, _)) => self.place(key),
            None => self.path.display().to_string(),
        };
        let width = keys.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
        let mut lines = problem;
        if keys.len() > 1 {
            for (key, value) in &keys {
                let source = self.describe(key);
                lines += &format!("\n  {key:width$} = {value}  ({source})");
            }
        }
        Error::Recipe { place, problem: lines }
    }
}

/// An error in a recipe: the problem, and the keys at fault with their values.
#[derive(Clone, Debug)]
pub(super) struct Invalid {
    pub(super) keys: Vec<(String, String)>,
    pub(super) problem: String,
}

impl Invalid {
    /// An error about one key.
    pub(super) fn at(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Invalid { keys: vec![(key.into(), String::new())], problem: problem.into() }
    }

    /// The same error with a note after the problem.
    pub(super) fn with_note(self, note: &str) -> Self {
        Invalid { problem: format!("{}; {note}", self.problem), ..self }
    }

    /// An error about keys that contradict each other.
    pub(super) fn between(keys: &[(&str, String)], problem: impl Into<String>) -> Self {
        let keys = keys.iter().map(|(key, value)| (key.to_string(), value.clone())).collect();
        Invalid { keys, problem: problem.into() }
    }
}

fn name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}
