//! Programs as text: a line with the names of the units, then one instruction per line.

use std::fmt;
use std::str::FromStr;

use super::Program;
use super::codec::Codec;
use super::instruction::{Buffer, Instruction, Keep, Message, Offload, Payload};
use super::tier::Tier;

/// A line that is not part of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong.
    pub problem: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.problem)
    }
}

impl std::error::Error for ParseError {}

// Names of instructions, and how to make them.
type OfUnit = (&'static str, fn(usize) -> Instruction);
type WithCodec = (&'static str, fn(usize, Codec) -> Instruction);
type OfMicroBatch = (&'static str, fn(usize, usize) -> Instruction);
type OfMessage = (&'static str, Payload, fn(Message) -> Instruction);
type OfOffload = (&'static str, fn(Offload) -> Instruction);

/// The names of instructions that have a unit and nothing else.
const OF_UNIT: [OfUnit; 6] = [
    ("wait-gather", Instruction::WaitGather),
    ("release", Instruction::Release),
    ("wait-reduce-scatter", Instruction::WaitReduceScatter),
    ("wait-reduce", Instruction::WaitReduce),
    ("norm", Instruction::Norm),
    ("update", Instruction::Update),
];

/// The names of instructions that have a unit and a codec.
const WITH_CODEC: [WithCodec; 2] = [
    ("start-gather", |unit, codec| Instruction::StartGather { unit, codec }),
    ("start-reduce", |unit, codec| Instruction::StartReduce { unit, codec }),
];

/// The names of instructions that have a unit and a micro-batch.
const OF_MICRO_BATCH: [OfMicroBatch; 5] = [
    ("recompute", |unit, micro_batch| Instruction::Recompute { unit, micro_batch }),
    ("backward", |unit, micro_batch| Instruction::Backward { unit, micro_batch }),
    ("backward-input", |unit, micro_batch| Instruction::BackwardInput { unit, micro_batch }),
    ("backward-weight", |unit, micro_batch| Instruction::BackwardWeight { unit, micro_batch }),
    ("accumulate", |unit, micro_batch| Instruction::Accumulate { unit, micro_batch }),
];

/// The names of instructions that have a message.
const OF_MESSAGE: [OfMessage; 12] = [
    ("send-activations", Payload::Activations, Instruction::Send),
    ("start-receive-activations", Payload::Activations, Instruction::StartReceive),
    ("wait-receive-activations", Payload::Activations, Instruction::WaitReceive),
    ("send-gradients", Payload::Gradients, Instruction::Send),
    ("start-receive-gradients", Payload::Gradients, Instruction::StartReceive),
    ("wait-receive-gradients", Payload::Gradients, Instruction::WaitReceive),
    ("send-tied-parameters", Payload::TiedParameters, Instruction::Send),
    ("start-receive-tied-parameters", Payload::TiedParameters, Instruction::StartReceive),
    ("wait-receive-tied-parameters", Payload::TiedParameters, Instruction::WaitReceive),
    ("send-tied-gradients", Payload::TiedGradients, Instruction::Send),
    ("start-receive-tied-gradients", Payload::TiedGradients, Instruction::StartReceive),
    ("wait-receive-tied-gradients", Payload::TiedGradients, Instruction::WaitReceive),
];

/// The names of instructions that have a buffer and a tier.
const OF_OFFLOAD: [OfOffload; 5] = [
    ("start-fetch", Instruction::StartFetch),
    ("wait-fetch", Instruction::WaitFetch),
    ("start-store", Instruction::StartStore),
    ("wait-store", Instruction::WaitStore),
    ("evict", Instruction::Evict),
];

const KEEPS: [(Keep, &str); 4] =
    [(Keep::All, "all"), (Keep::Selective, "selective"), (Keep::Input, "input"), (Keep::Nothing, "nothing")];
const CODECS: [(Codec, &str); 4] =
    [(Codec::None, "none"), (Codec::ParamDtype, "param-dtype"), (Codec::Bf16, "bf16"), (Codec::Int8, "int8")];
const TIERS: [(Tier, &str); 2] = [(Tier::Host, "host"), (Tier::Disk, "disk")];

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "units {}", self.units.join(" "))?;
        self.instructions.iter().try_for_each(|instruction| writeln!(f, "{}", self.describe(instruction)))
    }
}

impl Program {
    /// An instruction as text, with the name of its unit.
    pub fn describe(&self, instruction: &Instruction) -> String {
        let unit = instruction.unit().map_or("", |unit| self.units.get(unit).map_or("?", String::as_str));
        let name = name_of_instruction(instruction);
        match *instruction {
            Instruction::CountTokens | Instruction::ReduceTotals => name.to_string(),
            Instruction::Forward { micro_batch, keep, .. } => {
                format!("{name} {unit} micro-batch={micro_batch} keep={}", name_of(&KEEPS, keep))
            }
            Instruction::Recompute { micro_batch, .. }
            | Instruction::Backward { micro_batch, .. }
            | Instruction::BackwardInput { micro_batch, .. }
            | Instruction::BackwardWeight { micro_batch, .. }
            | Instruction::Accumulate { micro_batch, .. } => format!("{name} {unit} micro-batch={micro_batch}"),
            Instruction::StartGather { codec, .. } | Instruction::StartReduce { codec, .. } => {
                format!("{name} {unit}{}", describe_codec(codec))
            }
            Instruction::Send(message) | Instruction::StartReceive(message) | Instruction::WaitReceive(message) => {
                let Message { micro_batch, codec, .. } = message;
                format!("{name} {unit} micro-batch={micro_batch}{}", describe_codec(codec))
            }
            Instruction::StartFetch(offload)
            | Instruction::WaitFetch(offload)
            | Instruction::StartStore(offload)
            | Instruction::WaitStore(offload)
            | Instruction::Evict(offload) => {
                format!("{name} {unit} {} tier={}", describe_buffer(offload.buffer), name_of(&TIERS, offload.tier))
            }
            Instruction::WaitGather(_)
            | Instruction::Release(_)
            | Instruction::WaitReduceScatter(_)
            | Instruction::WaitReduce(_)
            | Instruction::Norm(_)
            | Instruction::Update(_) => format!("{name} {unit}"),
        }
    }
}

/// The first word of an instruction.
fn name_of_instruction(instruction: &Instruction) -> &'static str {
    let unit = instruction.unit().unwrap_or_default();
    match *instruction {
        Instruction::CountTokens => "count-tokens",
        Instruction::ReduceTotals => "reduce-totals",
        Instruction::Forward { .. } => "forward",
        Instruction::StartGather { codec, .. } | Instruction::StartReduce { codec, .. } => {
            find_name(WITH_CODEC.map(|(name, make)| (name, make(unit, codec))), instruction)
        }
        Instruction::Recompute { micro_batch, .. }
        | Instruction::Backward { micro_batch, .. }
        | Instruction::BackwardInput { micro_batch, .. }
        | Instruction::BackwardWeight { micro_batch, .. }
        | Instruction::Accumulate { micro_batch, .. } => {
            find_name(OF_MICRO_BATCH.map(|(name, make)| (name, make(unit, micro_batch))), instruction)
        }
        Instruction::Send(message) | Instruction::StartReceive(message) | Instruction::WaitReceive(message) => {
            let with = |payload| Message { payload, ..message };
            find_name(OF_MESSAGE.map(|(name, payload, make)| (name, make(with(payload)))), instruction)
        }
        Instruction::StartFetch(offload)
        | Instruction::WaitFetch(offload)
        | Instruction::StartStore(offload)
        | Instruction::WaitStore(offload)
        | Instruction::Evict(offload) => find_name(OF_OFFLOAD.map(|(name, make)| (name, make(offload))), instruction),
        Instruction::WaitGather(_)
        | Instruction::Release(_)
        | Instruction::WaitReduceScatter(_)
        | Instruction::WaitReduce(_)
        | Instruction::Norm(_)
        | Instruction::Update(_) => find_name(OF_UNIT.map(|(name, make)| (name, make(unit))), instruction),
    }
}

fn find_name<const N: usize>(named: [(&'static str, Instruction); N], instruction: &Instruction) -> &'static str {
    named.into_iter().find(|(_, made)| made == instruction).map_or("?", |(name, _)| name)
}

fn describe_codec(codec: Codec) -> String {
    match codec {
        Codec::None => String::new(),
        codec => format!(" codec={}", name_of(&CODECS, codec)),
    }
}

fn describe_buffer(buffer: Buffer) -> String {
    match buffer {
        Buffer::Parameters => "buffer=parameters".to_string(),
        Buffer::Optimizer => "buffer=optimizer".to_string(),
        Buffer::Gradients => "buffer=gradients".to_string(),
        Buffer::Activations { micro_batch } => format!("buffer=activations micro-batch={micro_batch}"),
    }
}

fn name_of<T: PartialEq>(names: &[(T, &'static str)], value: T) -> &'static str {
    names.iter().find(|(named, _)| *named == value).map_or("?", |(_, name)| name)
}

impl FromStr for Program {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut program = Program { units: Vec::new(), instructions: Vec::new() };
        for (index, line) in text.lines().enumerate() {
            let fail = |problem: String| ParseError { line: index + 1, problem };
            let line = line.split('#').next().unwrap_or_default().trim();
            let mut words = line.split_whitespace();
            match words.next() {
                None => (),
                Some("units") if index == 0 => program.units = words.map(str::to_string).collect(),
                Some(name) => {
                    let line = Line { name, words: words.collect(), units: &program.units };
                    program.instructions.push(line.parse().map_err(fail)?);
                }
            }
        }
        Ok(program)
    }
}

/// The name of an instruction, and the words after it.
struct Line<'a> {
    name: &'a str,
    words: Vec<&'a str>,
    units: &'a [String],
}

impl Line<'_> {
    fn parse(&self) -> Result<Instruction, String> {
        let name = self.name;
        let (instruction, words) = match name {
            "count-tokens" => (Instruction::CountTokens, 0),
            "reduce-totals" => (Instruction::ReduceTotals, 0),
            "forward" => {
                let keep = choose(&KEEPS, self.value("keep")?)?;
                (Instruction::Forward { unit: self.unit()?, micro_batch: self.micro_batch()?, keep }, 3)
            }
            name => {
                if let Some((_, make)) = OF_UNIT.iter().find(|(known, _)| *known == name) {
                    (make(self.unit()?), 1)
                } else if let Some((_, make)) = OF_MICRO_BATCH.iter().find(|(known, _)| *known == name) {
                    (make(self.unit()?, self.micro_batch()?), 2)
                } else if let Some((_, make)) = WITH_CODEC.iter().find(|(known, _)| *known == name) {
                    let (codec, words) = self.codec()?;
                    (make(self.unit()?, codec), 1 + words)
                } else if let Some((_, payload, make)) = OF_MESSAGE.iter().find(|(known, ..)| *known == name) {
                    let (codec, words) = self.codec()?;
                    let (unit, micro_batch) = (self.unit()?, self.micro_batch()?);
                    (make(Message { payload: *payload, unit, micro_batch, codec }), 2 + words)
                } else if let Some((_, make)) = OF_OFFLOAD.iter().find(|(known, _)| *known == name) {
                    let (buffer, words) = self.buffer()?;
                    let tier = choose(&TIERS, self.value("tier")?)?;
                    (make(Offload { unit: self.unit()?, buffer, tier }), 2 + words)
                } else {
                    return Err(format!("there is no instruction '{name}'"));
                }
            }
        };
        match self.words.len() == words {
            true => Ok(instruction),
            false => Err(format!("{name} takes {words} words, not {}", self.words.len())),
        }
    }

    fn unit(&self) -> Result<usize, String> {
        let named = self.words.first().ok_or_else(|| format!("{} needs a unit", self.name))?;
        self.units.iter().position(|unit| unit == named).ok_or_else(|| format!("there is no unit '{named}'"))
    }

    fn micro_batch(&self) -> Result<usize, String> {
        self.value("micro-batch")?.parse().map_err(|_| "the micro-batch is not a number".to_string())
    }

    /// A codec, and the number of words that name it.
    fn codec(&self) -> Result<(Codec, usize), String> {
        match self.find("codec") {
            Some(text) => Ok((choose(&CODECS, text)?, 1)),
            None => Ok((Codec::None, 0)),
        }
    }

    /// A buffer, and the number of words that name it.
    fn buffer(&self) -> Result<(Buffer, usize), String> {
        match self.value("buffer")? {
            "parameters" => Ok((Buffer::Parameters, 1)),
            "optimizer" => Ok((Buffer::Optimizer, 1)),
            "gradients" => Ok((Buffer::Gradients, 1)),
            "activations" => Ok((Buffer::Activations { micro_batch: self.micro_batch()? }, 2)),
            other => Err(format!("'{other}' is not one of parameters, optimizer, gradients, activations")),
        }
    }

    fn value(&self, key: &str) -> Result<&str, String> {
        self.find(key).ok_or_else(|| format!("{} needs {key}=…", self.name))
    }

    fn find(&self, key: &str) -> Option<&str> {
        self.words.iter().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
    }
}

fn choose<T: Copy>(names: &[(T, &'static str)], text: &str) -> Result<T, String> {
    names.iter().find(|(_, name)| *name == text).map(|(value, _)| *value).ok_or_else(|| {
        let known: Vec<&str> = names.iter().map(|(_, name)| *name).collect();
        format!("'{text}' is not one of {}", known.join(", "))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use super::super::{ActivationCheckpointing, Policy, UnitSpec, build};
    use super::*;

    fn units() -> Vec<UnitSpec> {
        let head = UnitSpec { tied: Some(0), ..UnitSpec::new("head", 8, true) };
        vec![UnitSpec::new("embedding", 64, false), UnitSpec::new("block.0", 96, true), head]
    }

    #[test]
    fn a_program_is_read_as_it_was_printed() {
        for stage in 0..4 {
            for checkpointing in
                [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full]
            {
                let policy = Policy { activation_checkpointing: checkpointing, ..Policy::stage(stage, 2) };
                for program in [
                    build::train_step(&units(), &policy),
                    build::replay(&units(), &policy),
                    build::inference(&units(), &policy),
                ] {
                    assert_eq!(program.to_string().parse(), Ok(program));
                }
            }
        }
    }

    #[test]
    fn a_step_at_stage_3_reads_like_this() {
        let program = build::train_step(&units(), &Policy::stage(3, 1));
        let expected = "units embedding block.0 head
count-tokens
start-gather embedding
wait-gather embedding
start-gather block.0
forward embedding micro-batch=0 keep=all
release embedding
wait-gather block.0
start-gather embedding
start-gather head
forward block.0 micro-batch=0 keep=all
release block.0
wait-gather embedding
wait-gather head
forward head micro-batch=0 keep=all
start-gather block.0
backward head micro-batch=0
release embedding
release head
accumulate head micro-batch=0
start-reduce head
wait-gather block.0
backward block.0 micro-batch=0
release block.0
accumulate block.0 micro-batch=0
start-reduce block.0
wait-reduce-scatter head
backward embedding micro-batch=0
accumulate embedding micro-batch=0
start-reduce embedding
wait-reduce-scatter block.0
wait-reduce embedding
norm embedding
wait-reduce block.0
norm block.0
wait-reduce head
norm head
reduce-totals
update embedding
update block.0
update head
";
        assert_eq!(program.to_string(), expected);
    }

    #[test]
    fn instructions_of_pipelines_offload_and_codecs_read_like_this() {
        let text = "units a b
start-receive-activations b micro-batch=0 codec=bf16
wait-receive-activations b micro-batch=0 codec=bf16
send-activations a micro-batch=1
start-receive-gradients a micro-batch=1
wait-receive-gradients a micro-batch=1
send-gradients b micro-batch=0 codec=int8
send-tied-parameters a micro-batch=0
wait-receive-tied-gradients a micro-batch=3 codec=bf16
backward-input b micro-batch=0
backward-weight b micro-batch=0
start-gather a codec=int8
start-reduce a codec=bf16
start-fetch a buffer=optimizer tier=disk
wait-fetch a buffer=optimizer tier=disk
start-store b buffer=activations micro-batch=3 tier=host
wait-store b buffer=activations micro-batch=3 tier=host
start-fetch b buffer=parameters tier=host
evict b buffer=parameters tier=host
";
        assert_eq!(text.parse::<Program>().unwrap().to_string(), text);
    }

    #[test]
    fn mistakes_are_named() {
        let mistake = |text: &str| text.parse::<Program>().unwrap_err().to_string();
        assert_eq!(mistake("units a\nforward b micro-batch=0 keep=all"), "line 2: there is no unit 'b'");
        assert_eq!(mistake("units a\njump a"), "line 2: there is no instruction 'jump'");
        assert_eq!(mistake("units a\nrelease a twice"), "line 2: release takes 1 words, not 2");
        let keep = "line 2: 'some' is not one of all, selective, input, nothing";
        assert_eq!(mistake("units a\nforward a micro-batch=0 keep=some"), keep);
        let buffer = "line 2: 'weights' is not one of parameters, optimizer, gradients, activations";
        assert_eq!(mistake("units a\nstart-fetch a buffer=weights tier=host"), buffer);
        assert_eq!(mistake("units a\nsend-gradients a"), "line 2: send-gradients needs micro-batch=…");
    }
}
