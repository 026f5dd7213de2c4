//! Programs as text: a line with the names of the units, then one instruction per line.

use std::fmt;
use std::str::FromStr;

use super::{Instruction, Keep, Program};

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

/// The names of instructions that have a unit and nothing else.
type OfUnit = (&'static str, fn(usize) -> Instruction);
const OF_UNIT: [OfUnit; 8] = [
    ("start-gather", Instruction::StartGather),
    ("wait-gather", Instruction::WaitGather),
    ("release", Instruction::Release),
    ("start-reduce", Instruction::StartReduce),
    ("wait-reduce-scatter", Instruction::WaitReduceScatter),
    ("wait-reduce", Instruction::WaitReduce),
    ("norm", Instruction::Norm),
    ("update", Instruction::Update),
];

const KEEPS: [(Keep, &str); 4] =
    [(Keep::All, "all"), (Keep::Selective, "selective"), (Keep::Input, "input"), (Keep::Nothing, "nothing")];

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
        match *instruction {
            Instruction::CountTokens => "count-tokens".to_string(),
            Instruction::ReduceTotals => "reduce-totals".to_string(),
            Instruction::Forward { micro_batch, keep, .. } => {
                format!("forward {unit} micro-batch={micro_batch} keep={}", name_of(&KEEPS, keep))
            }
            Instruction::Recompute { micro_batch, .. } => format!("recompute {unit} micro-batch={micro_batch}"),
            Instruction::Backward { micro_batch, .. } => format!("backward {unit} micro-batch={micro_batch}"),
            Instruction::Accumulate { micro_batch, .. } => format!("accumulate {unit} micro-batch={micro_batch}"),
            of_unit => {
                let same = |(_, make): &&OfUnit| of_unit.unit().map(make) == Some(of_unit);
                let name = OF_UNIT.iter().find(same).map_or("?", |(name, _)| name);
                format!("{name} {unit}")
            }
        }
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
                    program.instructions.push(parse(name, &words.collect::<Vec<_>>(), &program.units).map_err(fail)?);
                }
            }
        }
        Ok(program)
    }
}

fn parse(name: &str, words: &[&str], units: &[String]) -> Result<Instruction, String> {
    let unit = || {
        let named = words.first().ok_or_else(|| format!("{name} needs a unit"))?;
        units.iter().position(|unit| unit == named).ok_or_else(|| format!("there is no unit '{named}'"))
    };
    let value = |key: &str| {
        let prefix = format!("{key}=");
        words.iter().find_map(|word| word.strip_prefix(&prefix)).ok_or_else(|| format!("{name} needs {prefix}…"))
    };
    let micro_batch = || value("micro-batch")?.parse().map_err(|_| "the micro-batch is not a number".to_string());
    let expect_words = |count: usize| match words.len() == count {
        true => Ok(()),
        false => Err(format!("{name} takes {count} words, not {}", words.len())),
    };
    let (instruction, count) = match name {
        "count-tokens" => (Instruction::CountTokens, 0),
        "reduce-totals" => (Instruction::ReduceTotals, 0),
        "forward" => {
            let keep = choose(&KEEPS, value("keep")?)?;
            (Instruction::Forward { unit: unit()?, micro_batch: micro_batch()?, keep }, 3)
        }
        "recompute" => (Instruction::Recompute { unit: unit()?, micro_batch: micro_batch()? }, 2),
        "backward" => (Instruction::Backward { unit: unit()?, micro_batch: micro_batch()? }, 2),
        "accumulate" => (Instruction::Accumulate { unit: unit()?, micro_batch: micro_batch()? }, 2),
        name => match OF_UNIT.iter().find(|(known, _)| *known == name) {
            Some((_, make)) => (make(unit()?), 1),
            None => return Err(format!("there is no instruction '{name}'")),
        },
    };
    expect_words(count)?;
    Ok(instruction)
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
    fn mistakes_are_named() {
        let mistake = |text: &str| text.parse::<Program>().unwrap_err().to_string();
        assert_eq!(mistake("units a\nforward b micro-batch=0 keep=all"), "line 2: there is no unit 'b'");
        assert_eq!(mistake("units a\njump a"), "line 2: there is no instruction 'jump'");
        assert_eq!(mistake("units a\nrelease a twice"), "line 2: release takes 1 words, not 2");
        let keep = "line 2: 'some' is not one of all, selective, input, nothing";
        assert_eq!(mistake("units a\nforward a micro-batch=0 keep=some"), keep);
    }
}
