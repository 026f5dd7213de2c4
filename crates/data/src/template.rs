//! Rendering untrusted Jinja templates within a memory limit.
//!
//! minijinja limits the number of instructions of a template, but not the memory that each takes: doubling a string forty times
//! takes a few hundred instructions and a terabyte. It has no hook for that, so templates are compiled here, and a check
//! follows every instruction that creates or writes a value.
//!
//! # Note: why this bounds memory
//! Every value that a template creates takes at most [`VALUE_BYTES_MAX`] when written out, with shared parts counted every
//! time: forty nested lists, each of which contains the previous one twice, are small until they are printed. So the operands
//! of every instruction are small, and so are its results, except for operations that multiply. Those are replaced by versions
//! that check first (`replace`, `join`, `indent`, `format`), or removed (`*`, `batch`, `slice`, printf's `format`, `debug`).
//! All created values add up to at most [`CREATED_BYTES_MAX`], and all written text, captured or not, to at most
//! [`WRITTEN_BYTES_MAX`]. Namespaces are the only values that can change after the check. So only their attributes may be used,
//! `ns.x`, and they may not be elements of lists or operands.
//!
//! Compiling uses minijinja's unstable interface, so its version is pinned in the workspace's `Cargo.toml`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use minijinja::machinery::{self, CodeGenerator, Instruction, Instructions};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State};

/// The number of instructions that a template may execute. Today's templates take a few hundred per message, and the checks
/// triple that.
const FUEL: u64 = 15_000_000;

/// The largest size of a value, when written out.
const VALUE_BYTES_MAX: usize = 2 << 20;
/// The total size of all values that are created while one conversation is rendered.
const CREATED_BYTES_MAX: usize = 128 << 20;
/// The total size of all text that is written in that time, to the output or into variables.
const WRITTEN_BYTES_MAX: usize = 16 << 20;

/// The minimum size that is counted for a list element.
const ELEMENT_BYTES: usize = 16;
/// How deep lists may be nested.
const DEPTH_MAX: usize = 64;

/// The names of the filters that do the checks.
const CREATED: &str = "__created";
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

    /// Renders the template in an environment prepared by [`set_limits`].
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

/// Limits the computation and memory of templates in an environment.
pub(crate) fn set_limits(environment: &mut Environment<'_>) {
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(call_method);
    environment.add_filter(CREATED, check_created);
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

/// Replaces every instruction that creates or writes a value with a jump past the end, to the same instruction followed by its
/// check and a jump back. No other instruction moves, so all existing jumps stay valid.
fn add_checks(code: &mut Instructions<'_>) {
    let check = |name: &'static str| Instruction::ApplyFilter(name, Some(1), !0);
    let len = len_of(code);
    // A template ends at its last instruction, so the original end has to jump over the instructions added below.
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
            | Instruction::EndCapture => vec![instruction, check(CREATED)],
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

/// Whether an instruction gets or sets an attribute of the value before it.
fn takes_attribute(instruction: Option<&Instruction<'_>>) -> bool {
    matches!(instruction, Some(Instruction::GetAttr(_) | Instruction::SetAttr(_)))
}

fn len_of(code: &Instructions<'_>) -> u32 {
    (0..).take_while(|&place| code.get(place).is_some()).count() as u32
}

/// The bytes that a template has created and written so far.
#[derive(Default)]
struct Usage {
    created: usize,
    written: usize,
}

fn usage<'a>(state: &'a mut State<'_, '_>) -> &'a mut Usage {
    state.get_or_insert_extension(Usage::default())
}

fn refuse<T>(problem: String) -> Result<T, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, problem))
}

/// Checks that a new value is within the limits.
fn check_created(state: &mut State<'_, '_>, value: Value) -> Result<Value, Error> {
    let (elements, _) = measure(&value)?;
    // The elements of a list were counted when they were created, or are part of the input.
    let own = value.as_str().map_or(elements * ELEMENT_BYTES, str::len);
    charge(state, own)?;
    Ok(value)
}

/// Refuses a namespace that is used as a value.
fn check_operand(value: Value) -> Result<Value, Error> {
    match is_namespace(&value) {
        true => refuse("it uses a namespace as a value; only the attributes of a namespace may be used".to_string()),
        false => Ok(value),
    }
}

fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// Checks a value that is about to be written.
fn check_written(state: &mut State<'_, '_>, value: Value) -> Result<Value, Error> {
    let bytes = value.as_str().map_or_else(|| measure(&value).map(|(_, bytes)| bytes), |text| Ok(text.len()))?;
    let usage = usage(state);
    usage.written = usage.written.saturating_add(bytes);
    match usage.written <= WRITTEN_BYTES_MAX {
        true => Ok(value),
        false => refuse(format!("its output is longer than {WRITTEN_BYTES_MAX} bytes")),
    }
}

/// Adds the size of a new value to the total. Values that may be large are counted before they are created.
fn charge(state: &mut State<'_, '_>, bytes: usize) -> Result<(), Error> {
    if bytes > VALUE_BYTES_MAX {
        return refuse(too_large());
    }
    let usage = usage(state);
    usage.created = usage.created.saturating_add(bytes);
    match usage.created <= CREATED_BYTES_MAX {
        true => Ok(()),
        false => refuse(format!("its values add up to more than {CREATED_BYTES_MAX} bytes")),
    }
}

fn too_large() -> String {
    format!(
        "it creates a value of more than {VALUE_BYTES_MAX} bytes, or a list that contains namespaces or {DEPTH_MAX} nested lists"
    )
}

/// The number of elements in a value, nested ones included, and its approximate size when written out.
fn measure(value: &Value) -> Result<(usize, usize), Error> {
    let mut room = VALUE_BYTES_MAX;
    match take_room(value, &mut room, DEPTH_MAX) {
        Some(elements) => Ok((elements, VALUE_BYTES_MAX - room)),
        None => refuse(too_large()),
    }
}

/// Subtracts the size of a value from `room` and returns its number of elements, or `None` if it does not fit.
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

/// Calls a Python method that minijinja lacks, after checking the size of its result.
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
                    return refuse(format!("a format has a width of more than {WIDTH_MAX}, or a computed one"));
                }
                charge(state, text.len().saturating_add(text.matches('{').count().saturating_mul(bytes)))?;
            }
            _ => (),
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// The largest width of a field in a format string.
const WIDTH_MAX: usize = 999;

/// Whether all widths in a `str.format` string are small literals, and no field is nested in another.
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
        // Writing to a string cannot fail.
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
