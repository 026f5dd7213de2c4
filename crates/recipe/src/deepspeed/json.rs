//! JSON, flattened into a map from dotted keys to values. Duplicate keys are an error, and the parser limits the depth.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// A value other than a non-empty object.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Json {
    Null,
    Flag(bool),
    Number(f64),
    Text(String),
    List(Vec<Json>),
    /// An object without keys.
    Empty,
}

impl Json {
    pub(super) fn number(&self) -> Option<f64> {
        match self {
            Json::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// The value as an integer, even if it is written as 5e8.
    pub(super) fn whole(&self) -> Option<i64> {
        self.number().filter(|number| number.fract() == 0. && (0. ..1e15).contains(number)).map(|number| number as i64)
    }

    pub(super) fn flag(&self) -> Option<bool> {
        match self {
            Json::Flag(flag) => Some(*flag),
            _ => None,
        }
    }

    pub(super) fn text(&self) -> Option<String> {
        match self {
            Json::Text(text) => Some(text.clone()),
            _ => None,
        }
    }

    pub(super) fn pair(&self) -> Option<[f64; 2]> {
        match self {
            Json::List(values) => {
                let [first, second] = &values[..] else { return None };
                Some([first.number()?, second.number()?])
            }
            _ => None,
        }
    }

    /// Whether this equals `text`, which is a JSON value.
    pub(super) fn is(&self, text: &str) -> bool {
        match self {
            Json::Number(number) => text.parse() == Ok(*number),
            other => other.to_string() == text,
        }
    }
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Json::Null => write!(f, "null"),
            Json::Flag(flag) => write!(f, "{flag}"),
            Json::Number(number) => write!(f, "{number}"),
            Json::Text(text) => match text.char_indices().nth(60) {
                Some((end, _)) => write!(f, "{:?}…", &text[..end]),
                None => write!(f, "{text:?}"),
            },
            Json::List(values) => write!(f, "a list of {}", values.len()),
            Json::Empty => write!(f, "{{}}"),
        }
    }
}

/// Parses a file and flattens its values.
pub(super) fn leaves(text: &str) -> Result<BTreeMap<String, Json>, String> {
    let tree: Tree = serde_json::from_str(text).map_err(|error| format!("this is not DeepSpeed's JSON: {error}"))?;
    let mut leaves = BTreeMap::new();
    match tree {
        Tree::Section(keys) => flatten(keys, "", &mut leaves),
        Tree::Leaf(_) => return Err("it must be one section: { … }".to_string()),
    }
    Ok(leaves)
}

fn flatten(keys: Vec<(String, Tree)>, at: &str, leaves: &mut BTreeMap<String, Json>) {
    for (name, value) in keys {
        let key = if at.is_empty() { name } else { format!("{at}.{name}") };
        match value {
            Tree::Section(keys) if keys.is_empty() => drop(leaves.insert(key, Json::Empty)),
            Tree::Section(keys) => flatten(keys, &key, leaves),
            Tree::Leaf(value) => drop(leaves.insert(key, value)),
        }
    }
}

enum Tree {
    Section(Vec<(String, Tree)>),
    Leaf(Json),
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TreeVisitor)
    }
}

struct TreeVisitor;

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a value")
    }

    fn visit_unit<E>(self) -> Result<Tree, E> {
        Ok(Tree::Leaf(Json::Null))
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Tree, E> {
        Ok(Tree::Leaf(Json::Flag(flag)))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Tree, E> {
        Ok(Tree::Leaf(Json::Number(number as f64)))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Tree, E> {
        Ok(Tree::Leaf(Json::Number(number as f64)))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Tree, E> {
        Ok(Tree::Leaf(Json::Number(number)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Tree, E> {
        Ok(Tree::Leaf(Json::Text(text.to_string())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Tree, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element::<Tree>()? {
            values.push(match value {
                Tree::Leaf(value) => value,
                Tree::Section(_) => Json::Empty,
            });
        }
        Ok(Tree::Leaf(Json::List(values)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tree, A::Error> {
        let mut keys: BTreeMap<String, Tree> = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if keys.contains_key(&key) {
                return Err(A::Error::custom(format!("the key \"{key}\" occurs twice")));
            }
            let value = map.next_value()?;
            keys.insert(key, value);
        }
        Ok(Tree::Section(keys.into_iter().collect()))
    }
}
