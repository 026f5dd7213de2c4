//! The lines of a journal.

use serde::{Deserialize, Serialize};

/// Of how many ranks figures of their own are kept: the first so many. Nothing may grow with the world.
pub const RANKS_KEPT_MAX: usize = 64;

/// A line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// When, in seconds since 1970.
    pub time_s: f64,
    /// What.
    #[serde(flatten)]
    pub what: What,
}

/// What a line says. A reader leaves out kinds that it does not know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum What {
    /// The ranks are ready to make steps. From the first rank.
    Start(Box<Start>),
    /// A step was made. From the first rank.
    Step(Step),
    /// What ranks hold. From the first rank.
    Memory {
        /// After which step.
        step: u64,
        /// The first ranks, up to [`RANKS_KEPT_MAX`].
        ranks: Vec<RankMemory>,
    },
    /// What was sent. From the first rank.
    Traffic(StepTraffic),
    /// The model was measured on text that was held out. From the first rank.
    HeldOut(HeldOut),
    /// A checkpoint is there. From the first rank.
    Saved(Saved),
    /// Something that people should read. From the first rank.
    Note {
        /// At which step.
        step: u64,
        /// What.
        text: String,
    },
    /// Steps were traced. From the first rank.
    Trace {
        /// The first step.
        first_step: u64,
        /// How many.
        steps: u64,
        /// The file.
        path: String,
    },
    /// Ranks are started. From the supervisor.
    Launched(Launch),
    /// An attempt has failed. From the supervisor.
    Failed {
        /// Which attempt, from one.
        attempt: u64,
        /// The last step that it was seen at; zero if it came to none.
        step: u64,
        /// What happened, in a paragraph.
        text: String,
    },
    /// The ranks are at work again. From the supervisor.
    Again(Setback),
    /// The run has ended. From the supervisor.
    Ended {
        /// The exit code: 0 finished, 75 saved and to be started again, 130 interrupted, others failed.
        code: u8,
        /// How often it was started again.
        restarts: u64,
        /// What that has cost, beside steps made again.
        lost_s: f64,
    },
}

/// Where an attempt begins, and all that stays the same in it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// The recipe's name.
    pub name: String,
    /// The recipe as it was written, or as it came out.
    pub recipe: String,
    /// The version of Shardwise.
    pub version: String,
    /// How many ranks.
    pub ranks: usize,
    /// How many of them on each host, at most.
    pub ranks_per_host: usize,
    /// The ZeRO stage.
    pub stage: u8,
    /// Copies of what is sliced.
    pub replicas: usize,
    /// The type in which units compute.
    pub precision: String,
    /// How many parameters.
    pub parameters: u64,
    /// How many tokens a step reads.
    pub tokens_per_step: u64,
    /// The first step of the attempt.
    pub first_step: u64,
    /// The last step of the run.
    pub steps: u64,
    /// The checkpoint that it goes on from.
    pub resumed_from: Option<String>,
    /// What a rank may take of memory, where that is known.
    pub memory_limit_bytes: Option<u64>,
    /// What a rank is thought to need.
    pub memory_estimate_bytes: u64,
    /// Additions and multiplications for a token, forward and backward, without those that recomputation makes again.
    pub flops_per_token: f64,
    /// What all ranks together reach in large matrix products, measured at the start.
    pub peak_flops_per_s: f64,
}

/// A step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Which, from one.
    pub step: u64,
    /// The mean loss of its tokens.
    #[serde(with = "number")]
    pub loss: f64,
    /// The norm of all gradients, before clipping.
    #[serde(with = "number")]
    pub gradient_norm: f64,
    /// The learning rate.
    pub rate: f64,
    /// How many tokens counted.
    pub tokens: u64,
    /// Tokens of all ranks together, per second, since the line before.
    pub tokens_per_s: f64,
    /// The mean time of a step since the line before, without evaluations and saves.
    pub step_s: f64,
    /// The part of the machine's peak that went into the model's own arithmetic; 0 where the peak is not known.
    pub utilisation: f64,
    /// Resident memory of the rank that has the most.
    pub memory_bytes: u64,
    /// And the most that a rank ever had.
    pub memory_peak_bytes: u64,
    /// What the rank that sent the most has sent in this step.
    pub sent_bytes: u64,
    /// What the loss was multiplied by for the backward pass.
    pub loss_scale: f64,
    /// How many steps were skipped so far.
    pub skipped_so_far: u64,
    /// Why nothing was updated, if nothing was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// What is far outside what it usually is, if something is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outlier: Option<String>,
}

impl Step {
    /// The utilisation, where it is known. More than the peak is none: the peak was measured on a machine that was busy.
    pub fn known_utilisation(&self) -> Option<f64> {
        Some(self.utilisation).filter(|part| *part > 0. && *part <= 1.)
    }
}

/// What a rank holds, in bytes, by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankMemory {
    /// The rank.
    pub rank: usize,
    /// Parameters.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Masters and optimizer state.
    pub optimizer: u64,
    /// Whole units on their way.
    pub in_flight: u64,
    /// Activations and whatever else tensors hold, at the most since the line before.
    pub activations: u64,
    /// The process itself: what is resident and no tensor's.
    pub process: u64,
}

impl RankMemory {
    /// Each kind with its name, in the order in which they are drawn.
    pub fn kinds(&self) -> [(&'static str, u64); 6] {
        [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("in flight", self.in_flight),
            ("activations", self.activations),
            ("process", self.process),
        ]
    }
}

/// What the rank that sent the most has sent since the line before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTraffic {
    /// The last step of it.
    pub step: u64,
    /// How many steps.
    pub steps: u64,
    /// By verb.
    pub verbs: Vec<VerbTraffic>,
}

/// What was sent by one verb.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerbTraffic {
    /// `all-gather`, `reduce-scatter`, `all-reduce`, …
    pub verb: String,
    /// How many calls.
    pub calls: u64,
    /// How many bytes.
    pub bytes: u64,
    /// How many theory has for it: of parameters and gradients alone.
    pub theory_bytes: u64,
}

/// An evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeldOut {
    /// After which step.
    pub step: u64,
    /// The mean loss of a token.
    #[serde(with = "number")]
    pub loss: f64,
    /// Of how many.
    pub tokens: u64,
    /// Bits for a byte of the text, where its length is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
}

/// A checkpoint that is there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// Of which step.
    pub step: u64,
    /// Where.
    pub address: String,
    /// How much.
    pub bytes: u64,
    /// How long that took.
    pub took_s: f64,
    /// For how much of that training stood still.
    pub stood_still_s: f64,
}

/// Ranks that are started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Which attempt of this supervisor's, from one.
    pub attempt: u64,
    /// How many ranks.
    pub ranks: usize,
    /// The hosts; none where it is this one alone.
    pub hosts: Vec<String>,
    /// Hosts that were wanted, and do not answer.
    pub missing: Vec<String>,
}

/// What a failure has cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Setback {
    /// The attempt that is at work.
    pub attempt: u64,
    /// Its first step.
    pub step: u64,
    /// From when ranks stopped working until they did again.
    pub lost_s: f64,
    /// Of that, until it was noticed.
    pub noticed_s: f64,
    /// Steps that are made again.
    pub steps_again: u64,
}

/// Numbers that may not be finite, which JSON has no words for: `"NaN"`, `"inf"`, `"-inf"`.
mod number {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Number(f64),
        Text(String),
    }

    pub(super) fn serialize<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        match number.is_finite() {
            true => serializer.serialize_f64(*number),
            false => serializer.collect_str(number),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        match Written::deserialize(deserializer)? {
            Written::Number(number) => Ok(number),
            Written::Text(text) => text.parse().map_err(D::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn numbers_that_are_none_survive() {
        for loss in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.1] {
            let entry = Entry { time_s: 1.5, what: What::Step(Step { loss, ..Step::default() }) };
            let text = serde_json::to_string(&entry).unwrap();
            let Entry { what: What::Step(read), .. } = serde_json::from_str(&text).unwrap() else { panic!("{text}") };
            assert_eq!(read.loss.to_bits(), loss.to_bits(), "{text}");
        }
    }
}
