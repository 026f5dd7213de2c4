//! Tokenizing conversations, with a mask of the tokens that the model should learn to generate.
//!
//! A model's chat template defines how a conversation is rendered. It is a Jinja template, written for Python's Jinja with the settings of
//! Hugging Face's `transformers`; here `minijinja` renders it with the same settings, functions and methods. Templates are untrusted, so
//! their computation, memory and output are limited (`template`).
//!
//! The template itself shows which characters are an answer. The conversation before the answer, rendered with the start of the model's
//! turn, is a prefix of the conversation rendered up to the end of the answer; the rest is the answer and the end of the turn. A template
//! that renders earlier turns differently once later ones follow is refused.

use std::fmt::Write as _;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use chrono::{DateTime, Utc};
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, ErrorKind, context};
use serde::{Deserialize, Serialize};
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use crate::source::LineReader;
use crate::template::{Compiled, set_limits};
use crate::tokenizer::{ChatTemplates, SpecialToken, read_config, read_text};
use crate::{Error, Result, Tokenizer};

/// The longest rendered conversation, about a quarter of a million tokens. `tokenizers` needs 130 times as much memory to
/// encode it.
const RENDERED_BYTES_MAX: usize = 1 << 20;
const TEMPLATE_BYTES_MAX: u64 = 4 << 20;
const TEMPLATE: &str = "chat template";

/// A tokenized conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// The tokens of the rendered conversation.
    pub tokens: Vec<u32>,
    /// Whether each token belongs to an answer of the model.
    pub answers: Vec<bool>,
}

/// A message of a conversation, with its role, its content, and any other fields that the template may use.
pub type Message = Value;

/// The chat template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    source: String,
    environment: Environment<'static>,
    bos_token: Option<String>,
    eos_token: Option<String>,
}

impl ChatTemplate {
    /// Opens the template of a tokenizer: `chat_template.jinja` in the same folder, or the one in `tokenizer_config.json`.
    /// `now` is the date for templates that print one; with a fixed `now`, the same conversation always gives the same tokens.
    pub fn open(tokenizer: &Tokenizer, now: SystemTime) -> Result<Self> {
        let config = read_config(tokenizer.path())?;
        let file = tokenizer.path().with_file_name("chat_template.jinja");
        let (path, template) = match (file.is_file(), config.chat_template) {
            (true, _) => (file.clone(), Some(read_text(&file, TEMPLATE_BYTES_MAX)?)),
            (false, Some(ChatTemplates::One(template))) => {
                (file.with_file_name("tokenizer_config.json"), Some(template))
            }
            (false, Some(ChatTemplates::Named(all))) => {
                let default = all.into_iter().find(|template| template.name == "default");
                (file.with_file_name("tokenizer_config.json"), default.map(|default| default.template))
            }
            (false, None) => (file, None),
        };
        let Some(template) = template else {
            let problem = "there is no chat template; use the tokenizer of a model that was trained for conversations";
            return Err(template_error(&path, problem));
        };
        let special_tokens = [config.bos_token, config.eos_token].map(|token| token.map(SpecialToken::content));
        ChatTemplate::new(path, template, special_tokens, now)
    }

    fn new(path: PathBuf, template: String, special_tokens: [Option<String>; 2], now: SystemTime) -> Result<Self> {
        let mut environment = Environment::new();
        set_limits(&mut environment);
        environment.add_filter("tojson", to_json);
        environment.add_function(
            "raise_exception",
            |message: String| -> std::result::Result<Value, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_function("strftime_now", move |format: String| format_date(now, &format));
        let source = replace_generation_tags(&template);
        if has_multiplication(&source) {
            // `'x' * 1000000000` is one operation that takes any amount of memory.
            let problem =
                "it uses multiplication, which could take any amount of memory and which no known model needs";
            return Err(template_error(&path, problem.to_string()));
        }
        let [bos_token, eos_token] = special_tokens;
        let template = ChatTemplate { path, source, environment, bos_token, eos_token };
        // Fail early if the template is invalid.
        template.compile()?;
        Ok(template)
    }

    fn compile(&self) -> Result<Compiled<'_>> {
        Compiled::new(TEMPLATE, &self.source).map_err(|error| template_error(&self.path, with_causes(&error)))
    }

    /// Renders messages, followed by the start of the model's next turn if `add_generation_prompt` is set.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        self.render_compiled(&self.compile()?, messages, add_generation_prompt)
    }

    fn render_compiled(
        &self,
        compiled: &Compiled<'_>,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String> {
        // A token that the model lacks is undefined, and renders as nothing.
        let value = |token: &Option<String>| token.as_deref().map_or(Value::UNDEFINED, Value::from);
        let variables = context! {
            messages,
            add_generation_prompt,
            bos_token => value(&self.bos_token),
            eos_token => value(&self.eos_token),
            tools => (),
            documents => (),
        };
        let text = compiled.render(&self.environment, variables);
        let text = text.map_err(|error| template_error(&self.path, with_causes(&error)))?;
        if text.len() > RENDERED_BYTES_MAX {
            let problem = format!("a rendered conversation is longer than {RENDERED_BYTES_MAX} bytes; split it");
            return Err(template_error(&self.path, problem));
        }
        Ok(text)
    }

    /// Tokenizes a conversation.
    pub fn conversation(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Conversation> {
        self.encode(&self.compile()?, tokenizer, messages)
    }

    fn encode(&self, compiled: &Compiled<'_>, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Conversation> {
        let (text, answers) = self.answers(compiled, messages)?;
        let encoded = tokenizer.encode_with_offsets(&text)?;
        let is_answer = |bytes: &Range<usize>| {
            let next = answers.partition_point(|answer| answer.end < bytes.end);
            answers.get(next).is_some_and(|answer| answer.start <= bytes.start && bytes.start < answer.end)
        };
        let answers = encoded.iter().map(|(_, bytes)| is_answer(bytes)).collect();
        Ok(Conversation { tokens: encoded.into_iter().map(|(token, _)| token).collect(), answers })
    }

    /// Renders a conversation, and returns the text and the byte ranges of its answers.
    fn answers(&self, compiled: &Compiled<'_>, messages: &[Message]) -> Result<(String, Vec<Range<usize>>)> {
        let whole = self.render_compiled(compiled, messages, false)?;
        let mut answers = Vec::new();
        for (number, _) in messages.iter().enumerate().filter(|(_, message)| is_assistant(message)) {
            let before = self.render_compiled(compiled, &messages[..number], true)?;
            let after = self.render_compiled(compiled, &messages[..=number], false)?;
            if !after.starts_with(&before) || !whole.starts_with(&after) {
                let problem = format!(
                    "it renders the conversation up to message {} differently once later messages follow, so the answers cannot be \
                     found; cut the conversation there, or use a template that does not change earlier turns",
                    number + 1
                );
                return Err(template_error(&self.path, problem));
            }
            answers.push(before.len()..after.len());
        }
        Ok((whole, answers))
    }

    /// Tokenizes the conversations in a file of JSON lines, `{"messages": [{"role": …, "content": …}, …]}`, compressed or not.
    pub fn conversations<'a>(
        &'a self,
        tokenizer: &'a Tokenizer,
        path: impl AsRef<Path>,
    ) -> Result<impl Iterator<Item = Result<Conversation>> + 'a> {
        let path = path.as_ref().to_path_buf();
        let mut lines = LineReader::open(&path)?;
        let compiled = self.compile()?;
        let next = move || -> Result<Option<Conversation>> {
            let Some((number, line)) = lines.line()? else { return Ok(None) };
            let fail = |problem: String| Error::document(&path, number, problem);
            let Line { messages } = serde_json::from_slice(line).map_err(|error| fail(error.to_string()))?;
            self.encode(&compiled, tokenizer, &messages).map(Some).map_err(|error| fail(error.to_string()))
        };
        let mut next = Some(next);
        Ok(std::iter::from_fn(move || {
            let conversation = next.as_mut()?().transpose();
            if !matches!(conversation, Some(Ok(_))) {
                next = None;
            }
            conversation
        }))
    }
}

#[derive(Deserialize)]
struct Line {
    messages: Vec<Message>,
}

fn is_assistant(message: &Message) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}

fn template_error(path: &Path, problem: impl ToString) -> Error {
    Error::Template { path: path.display().to_string(), problem: problem.to_string() }
}

/// Formats an error with the chain of its causes.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Whether there is a `*` in an expression or a statement, outside of strings.
fn has_multiplication(template: &str) -> bool {
    let (mut rest, mut inside, mut quote) = (template, false, None);
    while let Some(letter) = rest.chars().next() {
        let starts_with_any = |delimiters: [&str; 2]| delimiters.iter().any(|delimiter| rest.starts_with(delimiter));
        match (inside, quote) {
            (false, _) if rest.starts_with("{#") => {
                // The compiler reports a comment without an end.
                rest = rest.find("#}").map_or("", |end| &rest[end..]);
                continue;
            }
            (false, _) => inside = starts_with_any(["{{", "{%"]),
            (true, None) if starts_with_any(["}}", "%}"]) => inside = false,
            (true, None) if letter == '*' => return true,
            (true, None) if letter == '\'' || letter == '"' => quote = Some(letter),
            (true, Some(_)) if letter == '\\' => rest = &rest[1..],
            (true, Some(open)) if letter == open => quote = None,
            (true, _) => (),
        }
        rest = rest.get(rest.chars().next().map_or(0, char::len_utf8)..).unwrap_or_default();
    }
    false
}

/// Formats a date like Python's `strftime`.
fn format_date(now: SystemTime, format: &str) -> std::result::Result<String, minijinja::Error> {
    let mut date = String::new();
    match write!(date, "{}", DateTime::<Utc>::from(now).format(format)) {
        Ok(()) => Ok(date),
        Err(_) => Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("{format:?} is not a date format"))),
    }
}

/// Writes JSON like Python's `json.dumps`, which is what models have been trained on: with spaces after commas and colons, and without
/// escapes for HTML.
fn to_json(value: &Value, options: Kwargs) -> std::result::Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Non-ASCII characters are never escaped, whatever the template asks for.
    let _: Option<Value> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut json = Vec::new();
    let written = match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut json, PythonFormatter)),
        Some(width) => {
            let spaces = vec![b' '; width.min(16)];
            value.serialize(&mut Serializer::with_formatter(&mut json, PrettyFormatter::with_indent(&spaces)))
        }
    };
    let fail = |problem: String| minijinja::Error::new(ErrorKind::InvalidOperation, problem);
    written.map_err(|error| fail(error.to_string()))?;
    String::from_utf8(json).map(Value::from_safe_string).map_err(|error| fail(error.to_string()))
}

struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

/// Replaces the `{% generation %}` tags, which `transformers` adds to Jinja to mark answers and which render as nothing, with
/// `{% if true %}`.
fn replace_generation_tags(template: &str) -> String {
    let mut replaced = String::with_capacity(template.len());
    let mut rest = template;
    while let Some((before, tag, after)) = next_tag(rest) {
        let word = tag.trim_matches(|sign: char| sign == '-' || sign == '+' || sign.is_whitespace());
        let tag = match word {
            "generation" => tag.replace(word, "if true"),
            "endgeneration" => tag.replace(word, "endif"),
            _ => tag.to_string(),
        };
        replaced.extend([before, "{%", &tag, "%}"]);
        rest = after;
    }
    replaced + rest
}

/// The text before, inside and after the next `{% … %}`.
fn next_tag(template: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = template.split_once("{%")?;
    let (tag, after) = rest.split_once("%}")?;
    Some((before, tag, after))
}
