//! Jinja templates of others, with a limit on memory.
//!
//! minijinja limits how many instructions a template takes, but not how much memory one of them asks for: a string that is doubled
//! forty times takes a few hundred instructions and a terabyte. It has no hook for that, so a template is compiled here, and every
//! instruction that makes or writes a value is followed by a check.
//!
//! # Note: why this bounds memory
//! Whatever a template makes is written out to at most [`VALUE_BYTES_MAX`], with shared parts counted as often as they occur: forty
//! lists, each of which has the one before it twice, are small until somebody writes them out. So the operands of every instruction
//! are small, and what it makes of them is small as well, but for operations that multiply: those are replaced by ones that look
//! first (`replace`, `join`, `indent`, `format`), or not there (`*`, `batch`, `slice`, printf's `format`, `debug`). All values that
//! were made together are at most [`MADE_BYTES_MAX`], and all that was written, captured or not, is at most [`WRITTEN_BYTES_MAX`].
//! Namespaces are the only values that change after they were checked. So they are used by their names alone, `ns.x`, and are in no
//! list and no operand.
//!
//! Compiling is minijinja's unstable interface, so its version is fixed in the workspace's `Cargo.toml`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use minijinja::machinery::{self, CodeGenerator, Instruction, Instructions};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State};

/// Instructions that a template may take. Those of today take some hundred for a message, and checks treble that.
const FUEL: u64 = 15_000_000;

/// The largest value, written out.
const VALUE_BYTES_MAX: usize = 2 << 20;
/// All values that are made while one conversation is written.
const MADE_BYTES_MAX: usize = 128 << 20;
/// All that is written meanwhile, to the conversation or into variables.
const WRITTEN_BYTES_MAX: usize = 16 << 20;

/// What an element of a list takes at least, and how deep lists may be nested.
const ELEMENT_BYTES: usize = 16;
const DEPTH_MAX: usize = 64;

/// The checks, as filters.
const MADE: &str = "__made";
const WRITTEN: &str = "__written";
const OPERAND: &str = "__operand";

/// A compiled template.
pub(crate) struct Compiled<'a> {
    instructions: Instructions<'a>,
    blocks: BTreeMap<&'a str, Instructions<'a>>,
}

impl<'a> Compiled<'a> {
    /// Compiles a template with the settings of Hugging Face's `transformers`.
    pub(crate) fn new(name: &'a str, source: &'a str) -> Result<Self, Error> {
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        let tree = machinery::parse(source, name, syntax)?;
        let mut generator = CodeGenerator::new(name, source);
        generator.compile_stmt(&tree);
        let (mut instructions, mut blocks) = generator.finish();
        add_checks(&mut instructions);
        blocks.values_mut().for_each(add_checks);
        Ok(Compiled { instructions, blocks })
    }

    /// Renders it in an environment with [`set_limits`].
    pub(crate) fn render(&self, environment: &Environment<'_>, variables: Value) -> Result<String, Error> {
        let mut text = String::new();
        {
            let mut output = machinery::make_string_output(&mut text);
            let (instructions, blocks) = (&self.instructions, &self.blocks);
            machinery::eval(environment, instructions, variables, blocks, &mut output, AutoEscape::None)?;
        }
        Ok(text)
    }
}

/// Limits what templates of an environment may compute and hold.
pub(crate) fn set_limits(environment: &mut Environment<'_>) {
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(call_method);
    environment.add_filter(MADE, check_made);
    environment.add_filter(WRITTEN, check_written);
    environment.add_filter(OPERAND, check_operand);
    environment.add_filter("replace", replace);
    environment.add_filter("join", join);
    environment.add_filter("indent", indent);
    for filter in ["batch", "slice", "format"] {
        environment.remove_filter(filter);
    }
    environment.remove_global("debug");
}

/// Replaces every instruction that makes or writes a value by a jump behind the end, to the same instruction with its check and a
/// jump back. No other instruction moves, so all jumps stay right.
fn add_checks(code: &mut Instructions<'_>) {
    let check = |name: &'static str| Instruction::ApplyFilter(name, Some(1), !0);
    let len = len_of(code);
    // A template ends where the instructions do, so the end has to jump over those that are added from here on.
    let end = code.add(Instruction::Jump(0));
    for place in 0..len {
        let Some(instruction) = code.get(place).cloned() else { continue };
        let detour = match instruction {
            Instruction::EmitRaw(text) => {
                let text = Value::from_safe_string(text.to_string());
                vec![Instruction::LoadConst(text), check(WRITTEN), Instruction::Emit]
            }
            Instruction::Emit => vec![check(WRITTEN), Instruction::Emit],
            Instruction::Lookup(_) | Instruction::GetAttr(_) if !takes_attribute(code.get(place + 1)) => {
                vec![instruction, check(OPERAND)]
            }
            Instruction::Add
            | Instruction::StringConcat
            | Instruction::Slice
            | Instruction::BuildMap(_)
            | Instruction::BuildList(_)
            | Instruction::BuildTuple(_)
            | Instruction::ApplyFilter(..)
            | Instruction::CallFunction(..)
            | Instruction::CallMethod(..)
            | Instruction::CallObject(_)
            | Instruction::EndCapture => vec![instruction, check(MADE)],
            _ => continue,
        };
        let line = code.get_line(place).and_then(|line| u16::try_from(line).ok()).unwrap_or(0);
        let mut start = None;
        for instruction in detour {
            let added = code.add_with_line(instruction, line);
            start.get_or_insert(added);
        }
        code.add(Instruction::Jump(place + 1));
        if let (Some(instruction), Some(start)) = (code.get_mut(place), start) {
            *instruction = Instruction::Jump(start);
        }
    }
    let all = len_of(code);
    if let Some(instruction) = code.get_mut(end) {
        *instruction = Instruction::Jump(all);
    }
}

/// Whether an instruction takes or sets an attribute of the value before it.
fn takes_attribute(instruction: Option<&Instruction<'_>>) -> bool {
    matches!(instruction, Some(Instruction::GetAttr(_) | Instruction::SetAttr(_)))
}

fn len_of(code: &Instructions<'_>) -> u32 {
    (0..).take_while(|&place| code.get(place).is_some()).count() as u32
}

/// What a template has made and written so far, in bytes.
#[derive(Default)]
struct Spent {
    made: usize,
    written: usize,
}

fn spent<'a>(state: &'a mut State<'_, '_>) -> &'a mut Spent {
    state.get_or_insert_extension(Spent::default())
}

fn refuse<T>(problem: String) -> Result<T, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, problem))
}

/// A value that was made is within the limits.
fn check_made(state: &mut State<'_, '_>, value: Value) -> Result<Value, Error> {
    let (elements, _) = measure(&value)?;
    // The elements of a list were made before, or given.
    let own = value.as_str().map_or(elements * ELEMENT_BYTES, str::len);
    charge(state, own)?;
    Ok(value)
}

/// Refuses a namespace that is used as a whole.
fn check_operand(value: Value) -> Result<Value, Error> {
    match is_namespace(&value) {
        true => refuse("it uses a namespace as a value; it may be used by its names alone".to_string()),
        false => Ok(value),
    }
}

fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// A value that is about to be written is within the limits.
fn check_written(state: &mut State<'_, '_>, value: Value) -> Result<Value, Error> {
    let bytes = value.as_str().map_or_else(|| measure(&value).map(|(_, bytes)| bytes), |text| Ok(text.len()))?;
    let spent = spent(state);
    spent.written = spent.written.saturating_add(bytes);
    match spent.written <= WRITTEN_BYTES_MAX {
        true => Ok(value),
        false => refuse(format!("what it writes is longer than {WRITTEN_BYTES_MAX} bytes")),
    }
}

/// Counts what is made, before it is made where it may be large.
fn charge(state: &mut State<'_, '_>, bytes: usize) -> Result<(), Error> {
    if bytes > VALUE_BYTES_MAX {
        return refuse(too_large());
    }
    let spent = spent(state);
    spent.made = spent.made.saturating_add(bytes);
    match spent.made <= MADE_BYTES_MAX {
        true => Ok(()),
        false => refuse(format!("it makes more than {MADE_BYTES_MAX} bytes in all")),
    }
}

fn too_large() -> String {
    format!(
        "it makes a value of more than {VALUE_BYTES_MAX} bytes, or a list with namespaces or {DEPTH_MAX} lists in each other"
    )
}

/// The elements of a value and of all that is in it, and the bytes when it is written out, about.
fn measure(value: &Value) -> Result<(usize, usize), Error> {
    let mut room = VALUE_BYTES_MAX;
    match take_room(value, &mut room, DEPTH_MAX) {
        Some(elements) => Ok((elements, VALUE_BYTES_MAX - room)),
        None => refuse(too_large()),
    }
}

/// Takes a value out of the room that is left, and returns its elements; none where it does not fit.
fn take_room(value: &Value, room: &mut usize, depth: usize) -> Option<usize> {
    *room = room.checked_sub(value.as_str().map_or(ELEMENT_BYTES, |text| text.len().max(ELEMENT_BYTES)))?;
    if is_namespace(value) && depth < DEPTH_MAX {
        return None;
    }
    let kind = value.kind();
    if !matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Some(1);
    }
    let Ok(items) = value.try_iter() else { return Some(1) };
    let depth = depth.checked_sub(1)?;
    let mut elements = 1;
    for item in items {
        elements += take_room(&item, room, depth)?;
        if kind == ValueKind::Map
            && let Ok(of_key) = value.get_item(&item)
        {
            elements += take_room(&of_key, room, depth)?;
        }
    }
    Some(elements)
}

/// A method of Python's, of which minijinja has none.
fn call_method(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match (method, args) {
            ("replace", [from, to, ..]) => {
                if let (Some(from), Some(to)) = (from.as_str(), to.as_str()) {
                    charge(state, replaced_bytes(text, from, to))?;
                }
            }
            ("join", [items, ..]) => {
                let (elements, bytes) = measure(items)?;
                charge(state, bytes.saturating_add(elements.saturating_mul(text.len())))?;
            }
            ("format", _) => {
                let mut bytes = WIDTH_MAX;
                for value in args {
                    bytes += measure(value)?.1;
                }
                if !is_plain_format(text) {
                    return refuse(format!("a format asks for a width of more than {WIDTH_MAX}, or computes one"));
                }
                charge(state, text.len().saturating_add(text.matches('{').count().saturating_mul(bytes)))?;
            }
            _ => (),
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// The widest field of a format.
const WIDTH_MAX: usize = 999;

/// Whether the widths in a format of `str.format` are written in it, and short: no field has another in it.
fn is_plain_format(format: &str) -> bool {
    let (mut inside, mut digits) = (false, 0);
    for letter in format.chars() {
        digits = if letter.is_ascii_digit() { digits + 1 } else { 0 };
        match letter {
            '{' if inside => return false,
            '{' => inside = true,
            '}' => inside = false,
            _ if digits > 3 => return false,
            _ => (),
        }
    }
    true
}

fn replaced_bytes(text: &str, from: &str, to: &str) -> usize {
    text.len().saturating_add(text.matches(from).count().saturating_mul(to.len()))
}

fn replace(state: &mut State<'_, '_>, value: Value, from: Value, to: Value) -> Result<Value, Error> {
    let [value, from, to] = [value, from, to].map(|value| value.to_string());
    charge(state, replaced_bytes(&value, &from, &to))?;
    Ok(Value::from(value.replace(&from, &to)))
}

fn join(
    state: &mut State<'_, '_>,
    value: Value,
    joiner: Option<Value>,
    attribute: Option<String>,
    options: Kwargs,
) -> Result<Value, Error> {
    let (named_joiner, named_attribute): (Option<Value>, Option<String>) =
        (options.get("d")?, options.get("attribute")?);
    options.assert_all_used()?;
    let joiner = joiner.or(named_joiner).map_or_else(String::new, |joiner| joiner.to_string());
    let attribute = attribute.or(named_attribute);
    let mut text = String::new();
    for (place, item) in value.try_iter()?.enumerate() {
        let item = match &attribute {
            Some(attribute) => item.get_attr(attribute)?,
            None => item,
        };
        let before = if place > 0 { joiner.as_str() } else { "" };
        // Memory has room for whatever is asked to be written.
        let _ = write!(text, "{before}{item}");
        if text.len() > VALUE_BYTES_MAX {
            return refuse(too_large());
        }
    }
    charge(state, text.len())?;
    Ok(Value::from(text))
}

fn indent(
    state: &mut State<'_, '_>,
    value: Value,
    width: Option<usize>,
    first: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let (named_width, named_first): (Option<usize>, Option<bool>) = (options.get("width")?, options.get("first")?);
    let blank: Option<bool> = options.get("blank")?;
    options.assert_all_used()?;
    let width = width.or(named_width).unwrap_or(4);
    let (first, blank) = (first.or(named_first).unwrap_or(false), blank.unwrap_or(false));
    let value = value.to_string();
    let value = value.strip_suffix('\n').unwrap_or(&value);
    charge(state, value.len().saturating_add(value.split('\n').count().saturating_mul(width)))?;
    let spaces = " ".repeat(width);
    let indented = value.split('\n').enumerate().map(|(place, line)| {
        let is_indented = (place > 0 || first) && (blank || !line.trim_end_matches('\r').is_empty());
        format!("{}{line}", if is_indented { spaces.as_str() } else { "" })
    });
    Ok(Value::from(indented.collect::<Vec<_>>().join("\n")))
}
