//! The JSON Schema of recipes: for editors, for `docs/recipe.schema.json`, and for `faults`, which checks the names and types of
//! keys against it.

use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

use super::Recipe;

/// The JSON Schema of recipes. It is draft 7, which editors support.
pub fn schema() -> Value {
    let settings = SchemaSettings::draft07().with(|settings| settings.inline_subschemas = true);
    let schema = settings.into_generator().into_root_schema_for::<Recipe>();
    let mut schema = simplify(schema.to_value());
    schema["title"] = json!("A Shardwise recipe");
    schema
}

/// Removes nulls, which TOML does not have, and integer formats, which editors do not need.
fn simplify(value: Value) -> Value {
    match value {
        Value::Array(values) => Value::Array(values.into_iter().map(simplify).collect()),
        Value::Object(mut map) => {
            if map.get("format").is_some_and(Value::is_string) {
                map.remove("format");
            }
            let is_null = |value: &Value| value == "null" || value["type"] == "null";
            for key in ["type", "anyOf"] {
                let Some(Value::Array(choices)) = map.get_mut(key) else { continue };
                choices.retain(|choice| !is_null(choice));
                if let [only] = &choices[..] {
                    let only = only.clone();
                    map.remove(key);
                    match only {
                        Value::Object(inner) => inner.into_iter().for_each(|(key, value)| {
                            map.entry(key).or_insert(value);
                        }),
                        word => drop(map.insert(key.to_string(), word)),
                    }
                }
            }
            let said = map.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(said.map(|(key, value)| (key, simplify(value))).collect())
        }
        other => other,
    }
}

/// The schema of one key.
#[derive(Clone, Copy)]
pub(super) struct Node<'a>(pub(super) &'a Value);

/// The type of a value.
pub(super) enum Shape<'a> {
    Table,
    Array(Node<'a>),
    Words(Vec<&'a str>),
    Text,
    Whole,
    Number,
    Flag,
}

impl<'a> Node<'a> {
    pub(super) fn shape(self) -> Shape<'a> {
        let words = self.words();
        if !words.is_empty() {
            return Shape::Words(words);
        }
        match self.0["type"].as_str() {
            Some("object") => Shape::Table,
            Some("array") => Shape::Array(Node(&self.0["items"])),
            Some("integer") => Shape::Whole,
            Some("number") => Shape::Number,
            Some("boolean") => Shape::Flag,
            _ => Shape::Text,
        }
    }

    fn words(self) -> Vec<&'a str> {
        let of = |node: &'a Value| -> Vec<&'a str> {
            let listed = node["enum"].as_array().into_iter().flatten();
            listed.chain(std::iter::once(&node["const"])).filter_map(Value::as_str).collect()
        };
        let mut words = of(self.0);
        words.extend(self.0["oneOf"].as_array().into_iter().flatten().flat_map(of));
        words
    }

    /// A key of this table.
    pub(super) fn key(self, name: &str) -> Option<Node<'a>> {
        self.0["properties"].get(name).map(Node)
    }

    pub(super) fn names(self) -> impl Iterator<Item = &'a str> {
        self.0["properties"].as_object().into_iter().flat_map(|map| map.keys().map(String::as_str))
    }

    pub(super) fn required(self) -> impl Iterator<Item = &'a str> {
        self.0["required"].as_array().into_iter().flatten().filter_map(Value::as_str)
    }

    pub(super) fn description(self) -> &'a str {
        self.0["description"].as_str().unwrap_or_default()
    }

    /// Finds the node of a dotted key.
    pub(super) fn find(self, key: &str) -> Option<Node<'a>> {
        key.split('.').try_fold(self, |node, name| node.key(name))
    }

    /// All dotted keys below this node, including tables.
    pub(super) fn keys(self) -> Vec<String> {
        let mut keys = Vec::new();
        for name in self.names() {
            keys.push(name.to_string());
            let below = self.key(name).map(Node::keys).unwrap_or_default();
            keys.extend(below.into_iter().map(|key| format!("{name}.{key}")));
        }
        keys
    }
}
