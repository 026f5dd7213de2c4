//! Finds unknown keys, missing keys and values of the wrong type in a recipe. All of them are reported at once, before any value is used.

use toml::{Table, Value};

use super::intent::{Intent, intent, nearest_word};
use super::renamed;
use super::schema::{Node, Shape};
use super::source::Invalid;

/// The maximum length of a text. No name or path is longer.
const TEXT_BYTES_MAX: usize = 4096;

/// Compares a recipe with the schema, and returns every difference.
pub(super) fn faults(recipe: &Table, schema: Node<'_>) -> Vec<Invalid> {
    let family = family(recipe);
    let mut faults = Faults { schema, family, found: Vec::new(), meant: Vec::new(), missing: Vec::new() };
    faults.table(recipe, schema, "");
    let Faults { mut found, meant, missing, .. } = faults;
    // A required key that was misspelt, or given by its old name, is not reported as missing as well.
    let forgotten = missing.into_iter().filter(|(key, _)| !meant.iter().any(|other| is_or_is_in(other, key)));
    found.extend(forgotten.map(|(key, problem)| Invalid::at(key, problem)));
    found
}

/// The error message for a key that does not exist, with what to write instead.
pub(super) fn unknown(key: &str, given: Option<&Value>, schema: Node<'_>, recipe: &Table) -> String {
    renamed::problem(key, given).unwrap_or_else(|| explain(key, intent(key, schema, family(recipe)), schema))
}

/// The model family, which is also the name of its table.
fn family(recipe: &Table) -> &'static str {
    let is_gpt2 = recipe.get("model").and_then(Value::as_table).is_some_and(|model| model.contains_key("gpt2"));
    if is_gpt2 { "gpt2" } else { "llama" }
}

struct Faults<'a> {
    schema: Node<'a>,
    family: &'static str,
    found: Vec<Invalid>,
    /// The keys that unknown keys were probably meant to be.
    meant: Vec<String>,
    missing: Vec<(String, String)>,
}

impl Faults<'_> {
    fn table(&mut self, table: &Table, node: Node<'_>, at: &str) {
        for (name, value) in table {
            let key = below(at, name);
            match node.key(name) {
                Some(node) => self.value(value, node, &key),
                None => self.unknown(key, value, node, at),
            }
        }
        for name in node.required().filter(|name| !table.contains_key(*name)) {
            let key = below(at, name);
            let (what, is_table) =
                node.key(name).map_or(("", false), |node| (node.description(), matches!(node.shape(), Shape::Table)));
            let shown = if is_table { format!("[{key}]") } else { format!("`{key}`") };
            self.missing.push((key, format!("{shown} is missing: {}", lower_first(what))));
        }
    }

    fn unknown(&mut self, key: String, value: &Value, node: Node<'_>, at: &str) {
        // Keys inside a list, such as the parts of a mixture, have no dotted name to compare with.
        if at.ends_with(']') {
            let names: Vec<&str> = node.names().collect();
            return self.fault(&key, format!("there is no key `{key}`; it has {}", names.join(", ")));
        }
        if let Some(problem) = renamed::problem(&key, Some(value)) {
            return match value {
                Value::Table(table) if renamed::is_table(&key) && !table.is_empty() => {
                    table.iter().for_each(|(name, value)| self.unknown(below(&key, name), value, node, &key));
                }
                _ => {
                    self.meant.extend(renamed::new_key(&key).map(str::to_string));
                    self.fault(&key, problem);
                }
            };
        }
        let meant = intent(&key, self.schema, self.family);
        let problem = explain(&key, meant, self.schema);
        if let Some(Intent::Key(meant)) = intent(&key, self.schema, self.family) {
            self.meant.push(meant);
        }
        self.fault(&key, problem);
    }

    fn value(&mut self, value: &Value, node: Node<'_>, key: &str) {
        let must = match (node.shape(), value) {
            (Shape::Table, Value::Table(table)) => return self.table(table, node, key),
            (Shape::Array(items), Value::Array(values)) => return self.array(values, node, items, key),
            (Shape::Words(words), Value::String(word)) if words.contains(&word.as_str()) => return,
            (Shape::Words(words), given) => one_of(key, &words, given),
            (Shape::Text, Value::String(text)) => match text {
                text if text.is_empty() => "must not be empty".to_string(),
                text if text.len() > TEXT_BYTES_MAX => format!("must be at most {TEXT_BYTES_MAX} bytes long"),
                text if text.chars().any(char::is_control) => "must be one line of text".to_string(),
                _ => return,
            },
            (Shape::Whole, Value::Integer(number)) if *number >= 0 => match node.0["maximum"].as_i64() {
                Some(most) if *number > most => format!("must be at most {most}"),
                _ => return,
            },
            (Shape::Number, Value::Float(_) | Value::Integer(_)) | (Shape::Flag, Value::Boolean(_)) => return,
            (Shape::Table, _) => format!("must be a table: [{key}]"),
            (Shape::Array(_), _) => "must be a list: [a, b]".to_string(),
            (Shape::Text, _) => "must be text in quotation marks".to_string(),
            (Shape::Whole, _) => "must be a whole number, at least 0".to_string(),
            (Shape::Number, _) => "must be a number".to_string(),
            (Shape::Flag, given) => match renamed::new_value(key, given) {
                Some(now) => format!("must be true or false: {now}"),
                None => "must be true or false".to_string(),
            },
        };
        self.fault(key, format!("`{key}` is {}, but {must}", shown(value)));
    }

    fn array(&mut self, values: &[Value], node: Node<'_>, items: Node<'_>, key: &str) {
        let count = |name: &str| node.0[name].as_u64();
        if count("minItems").is_some_and(|least| (values.len() as u64) < least)
            || count("maxItems").is_some_and(|most| values.len() as u64 > most)
        {
            let wanted = count("minItems").unwrap_or_default();
            return self.fault(key, format!("`{key}` has {} values, but must have {wanted}", values.len()));
        }
        for (index, value) in values.iter().enumerate() {
            self.value(value, items, &format!("{key}[{index}]"));
        }
    }

    fn fault(&mut self, key: &str, problem: String) {
        self.found.push(Invalid::at(key, problem));
    }
}

fn explain(key: &str, meant: Option<Intent>, schema: Node<'_>) -> String {
    match meant {
        Some(Intent::Key(meant)) => format!("there is no key `{key}`: did you mean `{meant}`?"),
        Some(Intent::Nothing(why)) => format!("there is no key `{key}`: {why}"),
        None => {
            let table = key.rsplit_once('.').map(|(table, _)| table);
            let node = table.map_or(Some(schema), |table| schema.find(table));
            let names: Vec<&str> = node.into_iter().flat_map(Node::names).collect();
            match table {
                Some(table) if !names.is_empty() => {
                    format!("there is no key `{key}`; [{table}] has {}", names.join(", "))
                }
                Some(_) => format!("there is no key `{key}`"),
                None => format!("there is no key `{key}`; a recipe has {}", names.join(", ")),
            }
        }
    }
}

fn one_of(key: &str, words: &[&str], given: &Value) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    let nearest = || given.as_str().and_then(|given| nearest_word(given, words.iter().copied()));
    let hint = match renamed::new_value(key, given) {
        Some(now) => format!(": {now}"),
        None => nearest().map(|word| format!(": did you mean \"{word}\"?")).unwrap_or_default(),
    };
    format!("must be one of {}{hint}", quoted.join(", "))
}

/// A value as TOML, truncated to 60 characters.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn below(table: &str, name: &str) -> String {
    if table.is_empty() { name.to_string() } else { format!("{table}.{name}") }
}

/// Whether `key` is `other`, or a table that contains it.
fn is_or_is_in(other: &str, key: &str) -> bool {
    other.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn lower_first(text: &str) -> String {
    let text = text.trim_end_matches('.');
    let mut letters = text.chars();
    // A name such as ZeRO stays as it is.
    let is_name = text.split(' ').next().is_some_and(|word| word.chars().skip(1).any(char::is_uppercase));
    match letters.next() {
        Some(first) if !is_name => first.to_lowercase().chain(letters).collect(),
        _ => text.to_string(),
    }
}
