//! Reads a recipe in layers: its file, then a DeepSpeed configuration, then `--set`. Each layer overrides the ones before it.
//!
//! The layers are merged into one table, which is deserialized once. The source of each value is recorded along with it.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use shardwise_checkpoint::hugging_face::Weights;
use shardwise_plan::package::Package;
use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use super::change::{Change, apply};
use super::faults::{faults, unknown};
use super::schema::{Node, Shape};
use super::source::Invalid;
use super::{Error, HOST, OffloadRecipe, Recipe, Result, Source, Sources, deepspeed, schema};

/// The maximum size of a recipe or a DeepSpeed configuration.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The maximum number of errors that are reported at once.
const ERRORS_MAX: usize = 20;

/// The merged recipe as TOML. It omits defaults, so that a diff of two recipes shows what people changed.
fn render(table: &Table, notes: &[String], sets: &[String]) -> Result<String> {
    let plain = toml::to_string(table).map_err(|error| Error::Options(format!("the recipe as TOML: {error}")))?;
    let sets = sets.iter().map(|set| format!("--set {set}"));
    let comments: String =
        notes.iter().cloned().chain(sets).map(|line| format!("# {}\n", line.replace(['\n', '\r'], " "))).collect();
    Ok(comments + &plain)
}

impl Recipe {
    /// Reads a recipe. Its relative paths are relative to the file.
    pub fn read(path: &Path) -> Result<Self> {
        Recipe::read_layered(path, None, &[])
    }

    /// Reads a recipe, and overrides it with a DeepSpeed configuration and then with settings such as `optimizer.lr=1e-3`. Relative
    /// paths, including those of settings, are relative to the recipe's file.
    pub fn read_layered(path: &Path, deepspeed: Option<&Path>, sets: &[String]) -> Result<Self> {
        let mut recipe = Recipe::merge(path, deepspeed, sets)?;
        recipe.open_package()?;
        recipe.check().map_err(|wrong| recipe.sources.error(wrong))?;
        Ok(recipe)
    }

    /// Reads a recipe whose model is to be compiled, so that its package may not exist yet.
    pub fn read_uncompiled(path: &Path, deepspeed: Option<&Path>, sets: &[String]) -> Result<Self> {
        let recipe = Recipe::merge(path, deepspeed, sets)?;
        recipe.check().map_err(|wrong| recipe.sources.error(wrong))?;
        Ok(recipe)
    }

    /// Merges the layers of a recipe, and resolves its paths.
    fn merge(path: &Path, deepspeed: Option<&Path>, sets: &[String]) -> Result<Self> {
        let schema = schema();
        let schema = Node(&schema);
        let text = read_text(path)?;
        let (mut table, lines) = parse(path, &text)?;
        let sources = lines.into_iter().map(|(key, line)| (key, Source::Line(line))).collect();
        let mut sources =
            Sources { path: path.to_path_buf(), deepspeed: deepspeed.unwrap_or(Path::new("")).into(), of: sources };
        let mut notes = Vec::new();
        if let Some(file) = deepspeed {
            let translated = deepspeed::translate(file, &read_text(file)?, &table)?;
            notes = translated.notes;
            translated.changes.into_iter().for_each(|change| apply(&mut table, &mut sources, change));
        }
        for set in sets {
            let change = parse_set(set, schema, &table)?;
            apply(&mut table, &mut sources, change);
        }
        drop_loss_scale(&mut table, &sources);
        let mut found = faults(&table, schema);
        found.sort_by_key(|fault| fault.keys.first().map_or(0, |(key, _)| sources.line(key)));
        if !found.is_empty() {
            return Err(combine(found.into_iter().map(|fault| sources.error(fault)).collect()));
        }
        let text = match deepspeed.is_none() && sets.is_empty() {
            true => text,
            false => render(&table, &notes, sets)?,
        };
        let mut recipe: Recipe = Value::Table(table).try_into().map_err(|error| at(path, error.message()))?;
        (recipe.sources, recipe.notes) = (sources, notes);
        recipe.find_files(path.parent().unwrap_or(Path::new("")))?;
        recipe.text = text;
        Ok(recipe)
    }

    /// Resolves paths relative to the recipe's folder, and reads the config.json of a pretrained model.
    fn find_files(&mut self, folder: &Path) -> Result<()> {
        if self.model.compiled && self.model.package.is_none() {
            self.model.package = Some(Path::new("packages").join(self.name()));
        }
        let data = &mut self.data;
        let parts = data.mixture.iter_mut().flatten().map(|part| &mut part.corpus);
        let held_out = self.evaluation.as_mut().map(|evaluation| &mut evaluation.corpus);
        let files = [data.corpus.as_mut(), data.chat.as_mut(), data.tokenizer.as_mut()];
        let written = [self.schedule.plot.as_mut(), self.run.folder.as_mut(), self.model.package.as_mut()];
        // "host" is not a path.
        let OffloadRecipe { optimizer, parameters, gradients, activations } = &mut self.offload;
        let offload = [optimizer, parameters, gradients, activations];
        let offload = offload.map(|folder| folder.as_mut().filter(|folder| *folder != Path::new(HOST)));
        let written = written.into_iter().chain(offload);
        for file in files.into_iter().chain(written).flatten().chain(parts).chain(held_out) {
            *file = folder.join(&*file);
        }
        if self.parallel.has_schedule_file() {
            self.parallel.pipeline_schedule = folder.join(&self.parallel.pipeline_schedule).display().to_string();
        }
        let checkpoints = self.checkpoints.as_mut().map(|checkpoints| &mut checkpoints.folder);
        let addresses = [self.init.weights.as_mut(), self.model.from_pretrained.as_mut(), checkpoints];
        for address in addresses.into_iter().flatten().filter(|address| !address.contains("://")) {
            *address = folder.join(&*address).display().to_string();
        }
        if let Some(folder) = &self.model.from_pretrained {
            let key = "model.from_pretrained";
            let wrong = |problem: String| self.sources.error(Invalid::at(key, format!("{key}: {problem}")));
            let config = Weights::open(folder).and_then(|weights| weights.config());
            let config = config.map_err(|error| wrong(error.to_string()))?;
            let config = config.ok_or_else(|| wrong(format!("{folder}: there is no config.json")))?;
            self.model.config = Some(config);
        }
        Ok(())
    }

    /// Reads the manifest of the compiled package.
    fn open_package(&mut self) -> Result<()> {
        let Some(folder) = &self.model.package else { return Ok(()) };
        if self.model.compiled && !folder.exists() {
            let (folder, recipe) = (folder.display(), self.sources.path.display());
            let problem = format!(
                "model.compiled: there is no package in {folder}; compile the model: shardwise compile {recipe}"
            );
            return Err(self.sources.error_at("model.compiled", problem));
        }
        let package = Package::open(folder.clone());
        let package = package.map_err(|error| self.sources.error_at("model.package", format!("model.{error}")))?;
        self.model.opened_package = Some(Arc::new(package));
        Ok(())
    }
}

/// Drops the loss scale settings of a DeepSpeed configuration if `--set` chose a type without a loss scale.
fn drop_loss_scale(table: &mut Table, sources: &Sources) {
    let Some(Value::Table(precision)) = table.get_mut("precision") else { return };
    if precision.get("param_dtype").and_then(Value::as_str) == Some("f16") {
        return;
    }
    let is_dropped = |name: &str| {
        let source = sources.of(&format!("precision.{name}"));
        name.starts_with("loss_scale_") && matches!(source, Source::DeepSpeed(_))
    };
    let names: Vec<String> = precision.keys().filter(|name| is_dropped(name.as_str())).cloned().collect();
    for name in names {
        precision.remove(&name);
    }
}

fn read_text(path: &Path) -> Result<String> {
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| at(path, error.to_string()))?;
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(|error| at(path, error.to_string()))?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(at(path, format!("it is longer than {FILE_BYTES_MAX} bytes, too long for a recipe")));
    }
    Ok(text)
}

/// Parses a recipe into a table and the line of each key.
fn parse(path: &Path, text: &str) -> Result<(Table, BTreeMap<String, usize>)> {
    let line_of = |offset: usize| 1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count();
    let fail = |error: toml::de::Error| {
        let line = error.span().map_or(1, |span| line_of(span.start));
        let shown = text.lines().nth(line - 1).unwrap_or_default().trim();
        let problem = match error.message() {
            _ if shown.ends_with('=') => "this key has no value".to_string(),
            "duplicate key" => "this key occurs twice".to_string(),
            other => format!("this is not TOML: {other}"),
        };
        Error::Recipe { place: format!("{}:{line}", path.display()), problem: format!("{problem}: {shown}") }
    };
    let root = DeTable::parse(text).map_err(fail)?;
    let mut lines = BTreeMap::new();
    note_lines(root.get_ref(), "", &line_of, &mut lines);
    let table = Table::deserialize(toml::de::Deserializer::from(root)).map_err(fail)?;
    Ok((table, lines))
}

fn note_lines(table: &DeTable<'_>, at: &str, line_of: &dyn Fn(usize) -> usize, lines: &mut BTreeMap<String, usize>) {
    for (name, value) in table {
        let key = if at.is_empty() { name.get_ref().to_string() } else { format!("{at}.{}", name.get_ref()) };
        lines.insert(key.clone(), line_of(name.span().start));
        note_lines_of(value, &key, line_of, lines);
    }
}

fn note_lines_of(
    value: &Spanned<DeValue<'_>>,
    key: &str,
    line_of: &dyn Fn(usize) -> usize,
    lines: &mut BTreeMap<String, usize>,
) {
    match value.get_ref() {
        DeValue::Table(table) => note_lines(table, key, line_of, lines),
        DeValue::Array(values) => {
            for (index, value) in values.iter().enumerate() {
                let key = format!("{key}[{index}]");
                lines.insert(key.clone(), line_of(value.span().start));
                note_lines_of(value, &key, line_of, lines);
            }
        }
        _ => {}
    }
}

/// Parses one `--set`.
fn parse_set(set: &str, schema: Node<'_>, table: &Table) -> Result<Change> {
    let fail = |problem: String| Error::Recipe { place: format!("--set {set}"), problem };
    let Some((key, text)) = set.split_once('=') else {
        return Err(fail("it has no value; write KEY=VALUE, such as optimizer.lr=1e-3".to_string()));
    };
    let (key, text) = (key.trim(), text.trim());
    let given = Value::String(text.trim_matches(['"', '\'']).to_string());
    let node = schema.find(key).ok_or_else(|| fail(unknown(key, Some(&given), schema, table)))?;
    if text.is_empty() {
        return Err(fail(format!("`{key}` is given no value; write {key}=VALUE")));
    }
    let value = match (node.shape(), text.parse::<Value>()) {
        (Shape::Table, _) => {
            return Err(fail(format!("`{key}` is a table; set its keys one by one, as {key}.KEY=VALUE")));
        }
        (_, Ok(value @ Value::String(_))) => value,
        (Shape::Text | Shape::Words(_), Ok(_)) => Value::String(text.to_string()),
        (_, Ok(value)) => value,
        // This is broken TOML, not a bare word.
        (_, Err(error)) if text.starts_with(['"', '\'', '[', '{']) => {
            return Err(fail(format!("the value is not TOML: {}", error.message())));
        }
        (_, Err(_)) => Value::String(text.to_string()),
    };
    Ok(Change { key: key.to_string(), value: Some(value), source: Source::Set })
}

/// Combines several errors into one.
fn combine(mut errors: Vec<Error>) -> Error {
    if errors.len() == 1 {
        return errors.remove(0);
    }
    let more = errors.len().saturating_sub(ERRORS_MAX);
    let mut lines: Vec<String> = errors.iter().take(ERRORS_MAX).map(Error::to_string).collect();
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    Error::Recipes(lines.join("\n"))
}

fn at(path: &Path, problem: impl Into<String>) -> Error {
    Error::Recipe { place: path.display().to_string(), problem: problem.into() }
}
