//! Changes that a layer makes to the table of a recipe.

use toml::{Table, Value};

use super::source::{Source, Sources};

/// A new value for a key; `None` removes the key.
pub(super) struct Change {
    pub(super) key: String,
    pub(super) value: Option<Value>,
    pub(super) source: Source,
}

/// Applies a change to a table.
pub(super) fn apply(table: &mut Table, sources: &mut Sources, change: Change) {
    let Change { key, value, source } = change;
    let within =
        |other: &str| other.strip_prefix(&key).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']));
    sources.of.retain(|other, _| !within(other));
    let mut names: Vec<&str> = key.split('.').collect();
    let last = names.pop().unwrap_or_default();
    let mut here = table;
    let mut above = String::new();
    for name in names {
        above = if above.is_empty() { name.to_string() } else { format!("{above}.{name}") };
        if !here.contains_key(name) {
            if value.is_none() {
                return;
            }
            sources.of.insert(above.clone(), source.clone());
        }
        // A value in place of a table is reported later, with its line.
        let Value::Table(inner) = here.entry(name).or_insert_with(|| Value::Table(Table::new())) else { return };
        here = inner;
    }
    match value {
        Some(value) => {
            here.insert(last.to_string(), value);
            sources.of.insert(key, source);
        }
        None => drop(here.remove(last)),
    }
}
