//! Where each value of a recipe comes from, and errors that say so.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::Error;

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A line of the recipe's file.
    Line(usize),
    /// A key of a DeepSpeed configuration.
    DeepSpeed(String),
    /// `--set`.
    Set,
    /// Nobody has said anything.
    Default,
}

/// Where each value of a recipe comes from, by its key.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    pub(super) path: PathBuf,
    pub(super) deepspeed: PathBuf,
    pub(super) of: BTreeMap<String, Source>,
}

impl Sources {
    /// Where the value of a key comes from, such as `optimizer.rate`.
    pub fn of(&self, key: &str) -> Source {
        self.of.get(key).cloned().unwrap_or(Source::Default)
    }

    /// The same for people: `recipe.toml:12`, `--set`, `ds_config.json: train_batch_size` or `default`.
    pub fn describe(&self, key: &str) -> String {
        match self.of(key) {
            Source::Line(line) => format!("{}:{line}", name(&self.path)),
            Source::DeepSpeed(theirs) => format!("{}: {theirs}", name(&self.deepspeed)),
            Source::Set => "--set".to_string(),
            Source::Default => "default".to_string(),
        }
    }

    /// The line of a key, or of the table that it is missing from; none comes last.
    pub(super) fn line(&self, key: &str) -> usize {
        match (self.of(key), key.rsplit_once('.')) {
            (Source::Line(line), _) => line,
            (Source::Default, Some((table, _))) => self.line(table),
            _ => usize::MAX,
        }
    }

    /// What an error begins with.
    fn place(&self, key: &str) -> String {
        match self.of(key) {
            Source::Line(line) => format!("{}:{line}", self.path.display()),
            Source::DeepSpeed(theirs) => format!("{}: {theirs}", self.deepspeed.display()),
            Source::Set => format!("--set {key}"),
            // A key that is missing is missing from its table, if that is anywhere.
            Source::Default => match key.rsplit_once('.') {
                Some((table, _)) if self.of.contains_key(table) => self.place(table),
                _ => self.path.display().to_string(),
            },
        }
    }

    /// An error that says where. Several keys that contradict each other are listed.
    pub(super) fn error(&self, wrong: Wrong) -> Error {
        let Wrong { keys, problem } = wrong;
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

/// What is wrong with a recipe: a sentence, and the keys that it is about with their values.
#[derive(Clone, Debug)]
pub(super) struct Wrong {
    pub(super) keys: Vec<(String, String)>,
    pub(super) problem: String,
}

impl Wrong {
    /// About one key.
    pub(super) fn at(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Wrong { keys: vec![(key.into(), String::new())], problem: problem.into() }
    }

    /// About keys that contradict each other.
    pub(super) fn between(keys: &[(&str, String)], problem: impl Into<String>) -> Self {
        let keys = keys.iter().map(|(key, value)| (key.to_string(), value.clone())).collect();
        Wrong { keys, problem: problem.into() }
    }
}

fn name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}
