//! Checks recipe keys: every key has a description and is listed in the guide's reference, and the guide uses no key that does not exist.
//!
//! The keys come from `docs/recipe.schema.json`, which a test compares with the schema that the program prints.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

const REFERENCE: &str = "docs/src/recipe.md";

/// A key of a recipe.
struct Key {
    description: String,
    /// `integer`, `string`, or the list of allowed values.
    values: String,
    default: Option<String>,
    is_table: bool,
}

/// Writes the guide's reference of recipe keys.
pub(crate) fn write_reference() -> Result<()> {
    let root = crate::workspace::root();
    let path = root.join(REFERENCE);
    std::fs::write(&path, reference(&keys(&root)?)).with_context(|| path.display().to_string())?;
    println!("{}", path.display());
    Ok(())
}

pub(super) fn find_differences(root: &Path) -> Result<Vec<String>> {
    let keys = keys(root)?;
    let mut found: Vec<String> = keys
        .iter()
        .filter(|(_, key)| key.description.trim().is_empty())
        .map(|(name, _)| format!("docs/recipe.schema.json: {name} has no description: give its field a doc comment"))
        .collect();
    if std::fs::read_to_string(root.join(REFERENCE)).unwrap_or_default() != reference(&keys) {
        found.push(format!("{REFERENCE} does not match the schema: cargo xtask recipe-reference"));
    }
    let mut pages = vec![root.join("README.md")];
    for entry in std::fs::read_dir(root.join("docs/src"))? {
        pages.push(entry?.path());
    }
    pages.sort();
    for page in pages.iter().filter(|page| page.extension().is_some_and(|extension| extension == "md")) {
        let text = std::fs::read_to_string(page)?;
        let name = page.strip_prefix(root).unwrap_or(page).display().to_string();
        // DeepSpeed's keys look like ours.
        let is_foreign = name.ends_with("from-deepspeed.md");
        for (line, key) in mentioned(&text, &keys, is_foreign) {
            found.push(format!("{name}:{line}: there is no key {key}"));
        }
    }
    Ok(found)
}

/// The keys in `text` that do not exist, with their lines. Looks in TOML blocks and, unless the page also contains other programs' keys, in
/// inline code such as `zero.stage` or `--set zero.stage=2`.
fn mentioned(text: &str, keys: &BTreeMap<String, Key>, is_foreign: bool) -> Vec<(usize, String)> {
    let tables: Vec<&str> = keys.iter().filter(|(_, key)| key.is_table).map(|(name, _)| name.as_str()).collect();
    let is_unknown = |name: &str| {
        let first = name.split('.').next().unwrap_or_default();
        let looks_like_a_key = name.contains('.')
            && tables.contains(&first)
            && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '.');
        let is_file = [".rs", ".md", ".toml", ".json", ".py", ".bin", ".idx", ".safetensors"]
            .iter()
            .any(|end| name.ends_with(end));
        looks_like_a_key && !is_file && !keys.contains_key(name)
    };
    let mut found = Vec::new();
    let (mut is_toml, mut table) = (false, String::new());
    for (index, line) in text.lines().enumerate() {
        let trimmed = line.trim();
        if let Some(language) = trimmed.strip_prefix("```") {
            is_toml = language.starts_with("toml");
            table.clear();
            continue;
        }
        if is_toml {
            if let Some(name) = trimmed.strip_prefix('[').and_then(|rest| rest.split(']').next()) {
                table = name.trim_start_matches('[').to_string();
                if !keys.contains_key(&table) {
                    found.push((index + 1, table.clone()));
                }
            } else if let Some((name, _)) = trimmed.split_once('=').filter(|_| !trimmed.starts_with('#')) {
                let name = name.trim();
                let full = if table.is_empty() { name.to_string() } else { format!("{table}.{name}") };
                let is_word = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
                if is_word && !keys.contains_key(&full) && !table.starts_with("data.mixture") {
                    found.push((index + 1, full));
                }
            }
            continue;
        }
        if is_foreign {
            continue;
        }
        let code = line.split('`').skip(1).step_by(2);
        let names = code.chain(line.split("--set ").skip(1)).flat_map(|code| code.split([' ', '=', ',']).next());
        found.extend(names.filter(|name| is_unknown(name)).map(|name| (index + 1, name.to_string())));
    }
    found
}

fn keys(root: &Path) -> Result<BTreeMap<String, Key>> {
    let path = root.join("docs/recipe.schema.json");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let schema: Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let mut keys = BTreeMap::new();
    collect(&schema, "", &mut keys);
    Ok(keys)
}

fn collect(schema: &Value, prefix: &str, keys: &mut BTreeMap<String, Key>) {
    let properties = schema["properties"].as_object();
    for (name, property) in properties.into_iter().flatten() {
        let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let is_table = property["properties"].is_object();
        let key = Key {
            description: property["description"].as_str().unwrap_or_default().replace('\n', " "),
            values: values(property),
            default: property.get("default").filter(|default| !default.is_object()).map(Value::to_string),
            is_table,
        };
        keys.insert(name.clone(), key);
        collect(property, &name, keys);
        if property["items"]["properties"].is_object() {
            collect(&property["items"], &format!("{name}[]"), keys);
        }
    }
}

/// The type or the allowed values of a property.
fn values(property: &Value) -> String {
    match property["oneOf"].as_array() {
        Some(choices) => {
            let names: Vec<String> = choices.iter().map(|choice| format!("`{}`", choice["const"])).collect();
            names.join(", ")
        }
        None => property["type"].as_str().unwrap_or("table").to_string(),
    }
}

fn reference(keys: &BTreeMap<String, Key>) -> String {
    let mut text = "# Recipe reference\n\n\
        Every key of a recipe. `shardwise config RECIPE` prints the values that a recipe resolves to. An unknown key is an error, and \
        the message gives its line. This page is generated from the schema: `cargo xtask recipe-reference`.\n"
        .to_string();
    let mut tables: BTreeMap<&str, Vec<(&String, &Key)>> = BTreeMap::new();
    for (name, key) in keys.iter().filter(|(_, key)| !key.is_table) {
        tables.entry(name.rsplit_once('.').map_or("", |(table, _)| table)).or_default().push((name, key));
    }
    for (table, entries) in tables {
        let heading = match (table, table.strip_suffix("[]")) {
            ("", _) => "Top-level keys".to_string(),
            (_, Some(list)) => format!("[[{list}]]"),
            _ => format!("[{table}]"),
        };
        let about = keys.get(table).map(|key| format!("{}\n\n", key.description)).unwrap_or_default();
        write!(text, "\n## {heading}\n\n{about}| key | values | default | meaning |\n| --- | --- | --- | --- |\n")
            .expect("a string takes whatever is written");
        for (name, key) in entries {
            let short = name.rsplit('.').next().unwrap_or(name);
            let default = key.default.as_deref().map(|default| format!("`{default}`")).unwrap_or_default();
            writeln!(text, "| `{short}` | {} | {default} | {} |", key.values, key.description.replace('|', "\\|"))
                .expect("a string takes whatever is written");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use super::*;

    fn two_keys() -> BTreeMap<String, Key> {
        let schema = serde_json::json!({ "properties": {
            "zero": { "description": "ZeRO.", "properties": { "stage": { "description": "The stage.", "type": "integer", "default": 3 } } },
            "steps": { "description": "", "type": "integer" },
        }});
        let mut keys = BTreeMap::new();
        collect(&schema, "", &mut keys);
        keys
    }

    #[test]
    fn a_key_in_the_guide_that_does_not_exist_is_found() {
        let keys = two_keys();
        let page = "Set `zero.stage`, not `zero.level`, by `--set zero.depth=2`.\n```toml\nstepz = 3\n[zero]\nstage = 2\nstages = 2\n```\n";
        let found = mentioned(page, &keys, false);
        let names: Vec<&str> = found.iter().map(|(_, name)| name.as_str()).collect();
        assert_eq!(names, ["zero.level", "zero.depth", "stepz", "zero.stages"]);
    }

    #[test]
    fn an_undocumented_key_is_found() {
        let folder = std::env::temp_dir().join(format!("tidy-keys-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("docs/src")).unwrap();
        std::fs::write(folder.join("README.md"), "").unwrap();
        let schema = r#"{"properties": {"steps": {"type": "integer"}}}"#;
        std::fs::write(folder.join("docs/recipe.schema.json"), schema).unwrap();
        let found = find_differences(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(found[0].contains("steps has no description"), "{found:?}");
        assert!(found[1].contains("recipe-reference"), "{found:?}");
    }

    #[test]
    fn the_reference_has_every_key() {
        let text = reference(&two_keys());
        assert!(text.contains("| `stage` | integer | `3` | The stage. |"), "{text}");
        assert!(text.contains("## [zero]\n\nZeRO.\n"), "{text}");
    }
}
