//! Conversations to tokens, of which those that the model has to say are known.
//!
//! A model's own chat template says how a conversation is written. It is a Jinja template, meant for Python's Jinja as Hugging
//! Face's `transformers` sets it up; here `minijinja` renders it with the same settings, functions and methods. Templates come
//! from others, so what one may compute, hold in memory and write is limited (`template`).
//!
//! Which characters are an answer is found with the template itself: what it writes of the conversation before the answer, with
//! the beginning of the model's turn, is a prefix of what it writes up to the answer's end, and the rest is the answer with
//! whatever ends the turn. A template that writes earlier turns in another way once later ones follow is refused.

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

use crate::source::Lines;
use crate::template::{Compiled, set_limits};
use crate::tokenizer::{ChatTemplates, SpecialToken, configured, read_text};
use crate::{Error, Result, Tokenizer};

/// The longest conversation, as it is written: a quarter of a million tokens. `tokenizers` needs 130 times as much.
const RENDERED_BYTES_MAX: usize = 1 << 20;
const TEMPLATE_BYTES_MAX: u64 = 4 << 20;
const TEMPLATE: &str = "chat template";

/// A conversation in tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// The tokens of all turns, and of what the template writes between them.
    pub tokens: Vec<u32>,
    /// Which of them the model has to say.
    pub answers: Vec<bool>,
}

/// A message of a conversation, whose role and content are as the file has them; other fields are handed to the template.
pub type Message = Value;

/// How a model writes conversations.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    source: String,
    environment: Environment<'static>,
    bos_token: Option<String>,
    eos_token: Option<String>,
}

impl ChatTemplate {
    /// Finds the template of a tokenizer: `chat_template.jinja` beside it, or what `tokenizer_config.json` has. `now` is what
    /// templates that write the date take for it, so that the same call makes the same tokens tomorrow.
    pub fn open(tokenizer: &Tokenizer, now: SystemTime) -> Result<Self> {
        let configured = configured(tokenizer.path())?;
        let alone = tokenizer.path().with_file_name("chat_template.jinja");
        let (path, template) = match (alone.is_file(), configured.chat_template) {
            (true, _) => (alone.clone(), Some(read_text(&alone, TEMPLATE_BYTES_MAX)?)),
            (false, Some(ChatTemplates::One(template))) => {
                (alone.with_file_name("tokenizer_config.json"), Some(template))
            }
            (false, Some(ChatTemplates::Named(all))) => {
                let default = all.into_iter().find(|template| template.name == "default");
                (alone.with_file_name("tokenizer_config.json"), default.map(|default| default.template))
            }
            (false, None) => (alone, None),
        };
        let Some(template) = template else {
            let problem = "there is no chat template; take the tokenizer of a model that was trained for conversations";
            return Err(template_error(&path, problem));
        };
        let names = [configured.bos_token, configured.eos_token].map(|token| token.map(SpecialToken::content));
        ChatTemplate::new(path, template, names, now)
    }

    fn new(path: PathBuf, template: String, names: [Option<String>; 2], now: SystemTime) -> Result<Self> {
        let mut environment = Environment::new();
        set_limits(&mut environment);
        environment.add_filter("tojson", to_json);
        environment.add_function(
            "raise_exception",
            |message: String| -> std::result::Result<Value, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_function("strftime_now", move |format: String| written_date(now, &format));
        let source = without_generation_tags(&template);
        if multiplies(&source) {
            // `'x' * 1000000000` is one operation, and any amount of memory.
            let problem =
                "it multiplies, which no template of a model's needs, and which could ask for any amount of memory";
            return Err(template_error(&path, problem.to_string()));
        }
        let [bos_token, eos_token] = names;
        let template = ChatTemplate { path, source, environment, bos_token, eos_token };
        // What is wrong with it is worth knowing now.
        template.compile()?;
        Ok(template)
    }

    fn compile(&self) -> Result<Compiled<'_>> {
        Compiled::new(TEMPLATE, &self.source).map_err(|error| template_error(&self.path, with_causes(&error)))
    }

    /// Writes messages, and the beginning of the model's next turn if it is asked for.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        self.write(&self.compile()?, messages, add_generation_prompt)
    }

    fn write(&self, compiled: &Compiled<'_>, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        // What a model does not have is not defined, and written as nothing.
        let named = |token: &Option<String>| token.as_deref().map_or(Value::UNDEFINED, Value::from);
        let variables = context! {
            messages,
            add_generation_prompt,
            bos_token => named(&self.bos_token),
            eos_token => named(&self.eos_token),
            tools => (),
            documents => (),
        };
        let written = compiled.render(&self.environment, variables);
        let written = written.map_err(|error| template_error(&self.path, with_causes(&error)))?;
        if written.len() > RENDERED_BYTES_MAX {
            let problem = format!("a conversation is longer than {RENDERED_BYTES_MAX} bytes");
            return Err(template_error(&self.path, problem));
        }
        Ok(written)
    }

    /// A conversation in tokens.
    pub fn conversation(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Conversation> {
        self.encode(&self.compile()?, tokenizer, messages)
    }

    fn encode(&self, compiled: &Compiled<'_>, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Conversation> {
        let (text, answers) = self.answers(compiled, messages)?;
        let encoded = tokenizer.encode_with_places(&text)?;
        let is_answer = |place: &Range<usize>| {
            let next = answers.partition_point(|answer| answer.end < place.end);
            answers.get(next).is_some_and(|answer| answer.start <= place.start && place.start < answer.end)
        };
        let answers = encoded.iter().map(|(_, place)| is_answer(place)).collect();
        Ok(Conversation { tokens: encoded.into_iter().map(|(token, _)| token).collect(), answers })
    }

    /// The conversation as it is written, and where its answers are, in bytes.
    fn answers(&self, compiled: &Compiled<'_>, messages: &[Message]) -> Result<(String, Vec<Range<usize>>)> {
        let whole = self.write(compiled, messages, false)?;
        let mut answers = Vec::new();
        for (number, _) in messages.iter().enumerate().filter(|(_, message)| is_of_model(message)) {
            let before = self.write(compiled, &messages[..number], true)?;
            let after = self.write(compiled, &messages[..=number], false)?;
            if !after.starts_with(&before) || !whole.starts_with(&after) {
                let problem = format!(
                    "what it writes up to message {} changes once later messages follow, so that answers cannot be told \
                     apart; keep only that part of the conversation, or take a template that leaves earlier turns as they are",
                    number + 1
                );
                return Err(template_error(&self.path, problem));
            }
            answers.push(before.len()..after.len());
        }
        Ok((whole, answers))
    }

    /// The conversations of a file of JSON lines, `{"messages": [{"role": …, "content": …}, …]}`, compressed or not.
    pub fn conversations<'a>(
        &'a self,
        tokenizer: &'a Tokenizer,
        path: impl AsRef<Path>,
    ) -> Result<impl Iterator<Item = Result<Conversation>> + 'a> {
        let path = path.as_ref().to_path_buf();
        let mut lines = Lines::open(&path)?;
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

fn is_of_model(message: &Message) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}

fn template_error(path: &Path, problem: impl ToString) -> Error {
    Error::Template { path: path.display().to_string(), problem: problem.to_string() }
}

/// An error with all that led to it.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Whether there is a `*` between the marks of an expression or a statement, and not in a string.
fn multiplies(template: &str) -> bool {
    let (mut rest, mut inside, mut quote) = (template, false, None);
    while let Some(letter) = rest.chars().next() {
        let marks = |marks: [&str; 2]| marks.iter().any(|mark| rest.starts_with(mark));
        match (inside, quote) {
            (false, _) if rest.starts_with("{#") => {
                // A comment without an end is an error of the template's, which is told elsewhere.
                rest = rest.find("#}").map_or("", |end| &rest[end..]);
                continue;
            }
            (false, _) => inside = marks(["{{", "{%"]),
            (true, None) if marks(["}}", "%}"]) => inside = false,
            (true, None) if letter == '*' => return true,
            (true, None) if letter == '\'' || letter == '"' => quote = Some(letter),
            (true, Some(_)) if letter == '\\' => rest = &rest[1..],
            (true, Some(begun)) if letter == begun => quote = None,
            (true, _) => (),
        }
        rest = rest.get(rest.chars().next().map_or(0, char::len_utf8)..).unwrap_or_default();
    }
    false
}

/// As Python's `strftime`.
fn written_date(now: SystemTime, format: &str) -> std::result::Result<String, minijinja::Error> {
    let mut date = String::new();
    match write!(date, "{}", DateTime::<Utc>::from(now).format(format)) {
        Ok(()) => Ok(date),
        Err(_) => Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("{format:?} is no format of a date"))),
    }
}

/// JSON as Python's `json.dumps` writes it, which is what models have seen: spaces after commas and colons, nothing escaped for
/// HTML.
fn to_json(value: &Value, options: Kwargs) -> std::result::Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Python's other settings do not matter here: letters beyond ASCII stay as they are.
    let _: Option<Value> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut json = Vec::new();
    let written = match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut json, Spaced)),
        Some(width) => {
            let spaces = vec![b' '; width.min(16)];
            value.serialize(&mut Serializer::with_formatter(&mut json, PrettyFormatter::with_indent(&spaces)))
        }
    };
    let fail = |problem: String| minijinja::Error::new(ErrorKind::InvalidOperation, problem);
    written.map_err(|error| fail(error.to_string()))?;
    String::from_utf8(json).map(Value::from_safe_string).map_err(|error| fail(error.to_string()))
}

struct Spaced;

impl Formatter for Spaced {
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

/// `transformers` has a tag of its own around what the model says, `{% generation %}`. It writes nothing, and becomes a
/// condition that holds.
fn without_generation_tags(template: &str) -> String {
    let mut written = String::with_capacity(template.len());
    let mut rest = template;
    while let Some((before, tag, after)) = next_tag(rest) {
        let word = tag.trim_matches(|sign: char| sign == '-' || sign == '+' || sign.is_whitespace());
        let tag = match word {
            "generation" => tag.replace(word, "if true"),
            "endgeneration" => tag.replace(word, "endif"),
            _ => tag.to_string(),
        };
        written.extend([before, "{%", &tag, "%}"]);
        rest = after;
    }
    written + rest
}

/// What is before, in and after the next `{% … %}`.
fn next_tag(template: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = template.split_once("{%")?;
    let (tag, after) = rest.split_once("%}")?;
    Some((before, tag, after))
}
