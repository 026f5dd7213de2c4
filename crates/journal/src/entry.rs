//! The entries of a journal, one JSON line each.
//!
//! This is version 2 of the format. Version 1 had other names for some fields and kinds, and early files of version 2 have
//! `steps_again` for [`Resumed::repeated_steps`]. These names are still read, as serde aliases, but no longer written.

use serde::{Deserialize, Serialize};

/// The version of the format that is written, for [`Start::journal_version`].
pub const JOURNAL_VERSION: u32 = 2;

/// The maximum number of ranks with figures of their own; these are the first ranks. Nothing in a journal may grow with the world size.
pub const RANKS_KEPT_MAX: usize = 64;

/// One line of a journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// When it was written, in seconds since 1970.
    pub time_s: f64,
    /// What it reports.
    #[serde(flatten)]
    pub kind: EntryKind,
}

/// What an entry reports. Readers skip kinds that they do not know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EntryKind {
    /// The ranks are ready for their first step. Written by rank 0.
    Start(Box<Start>),
    /// A step is complete. Written by rank 0.
    Step(Step),
    /// The memory that ranks hold. Written by rank 0.
    Memory {
        /// The step after which it was measured.
        step: u64,
        /// The first ranks, up to [`RANKS_KEPT_MAX`].
        ranks: Vec<RankMemory>,
    },
    /// Communication since the last such entry. Written by rank 0.
    Traffic(StepTraffic),
    /// The model was evaluated on held-out text. Written by rank 0.
    #[serde(alias = "held_out")]
    Evaluation(Evaluation),
    /// A checkpoint is complete. Written by rank 0.
    Saved(Saved),
    /// A message for people. Written by rank 0.
    Note {
        /// The step that it is about.
        step: u64,
        /// The message.
        text: String,
    },
    /// Steps were traced. Written by rank 0.
    Trace {
        /// The first traced step.
        first_step: u64,
        /// The number of traced steps.
        steps: u64,
        /// The trace file.
        path: String,
    },
    /// An attempt is being launched. Written by the supervisor.
    Launched(Launch),
    /// An attempt failed. Written by the supervisor.
    Failed {
        /// The attempt, counted from 1.
        attempt: u64,
        /// The last step that it was seen at; 0 if it did not get to one.
        step: u64,
        /// What happened, in a paragraph.
        text: String,
    },
    /// The ranks train again after a failure. Written by the supervisor.
    #[serde(alias = "again")]
    Resumed(Resumed),
    /// The run ended. Written by the supervisor.
    Ended {
        /// The exit code: 0 finished, 75 saved and to be resumed, 130 interrupted, any other failed.
        code: u8,
        /// The number of restarts.
        restarts: u64,
        /// The time that restarts cost, not counting repeated steps.
        lost_s: f64,
    },
}

/// The start of an attempt, and everything that stays the same throughout it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// The version of the journal's format: [`JOURNAL_VERSION`]. Version 1 did not write it.
    #[serde(default = "version_1")]
    pub journal_version: u32,
    /// The recipe's name.
    pub name: String,
    /// The recipe's text, with overrides applied.
    pub recipe: String,
    /// The version of Shardwise.
    pub version: String,
    /// The world size.
    pub ranks: usize,
    /// The number of ranks on rank 0's host.
    pub ranks_per_host: usize,
    /// The ZeRO stage.
    #[serde(alias = "stage")]
    pub zero_stage: u8,
    /// The number of replicas of the sharded state (`parallel.replicate`).
    #[serde(alias = "replicas")]
    pub replicate: usize,
    /// The number of stages of the pipeline (`parallel.pipeline`).
    #[serde(default = "one")]
    pub pipeline: usize,
    /// The number of ranks that hold the experts of a layer (`parallel.expert`).
    #[serde(default = "one")]
    pub expert: usize,
    /// The number of ranks that divide each sequence (`parallel.context`).
    #[serde(default = "one")]
    pub context: usize,
    /// The number of ranks that share each layer (`parallel.tensor`).
    #[serde(default = "one")]
    pub tensor: usize,
    /// The dtype that units compute in (`precision.param_dtype`).
    #[serde(alias = "precision")]
    pub param_dtype: String,
    /// The number of parameters of the model.
    pub parameters: u64,
    /// The hash of the compiled package, if the model is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<String>,
    /// The number of tokens that a step reads.
    pub tokens_per_step: u64,
    /// The first step of this attempt.
    pub first_step: u64,
    /// The last step of the run.
    pub steps: u64,
    /// The checkpoint that it resumes from.
    pub resumed_from: Option<String>,
    /// The memory that a rank may use, if a limit is known.
    pub memory_limit_bytes: Option<u64>,
    /// The memory that a rank is estimated to need.
    pub memory_estimate_bytes: u64,
    /// Floating-point operations per token, forward and backward, without those that activation checkpointing repeats.
    pub flops_per_token: f64,
    /// The FLOP/s of all ranks together in large matrix products, measured at the start.
    pub peak_flops_per_s: f64,
}

/// A completed step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The step's number, counted from 1.
    pub step: u64,
    /// The mean loss per token.
    #[serde(with = "float_or_text")]
    pub loss: f64,
    /// The norm of all gradients, before clipping.
    #[serde(with = "float_or_text", alias = "gradient_norm")]
    pub grad_norm: f64,
    /// The learning rate.
    #[serde(alias = "rate")]
    pub lr: f64,
    /// The number of tokens that contributed to the loss.
    pub tokens: u64,
    /// The throughput of all ranks together.
    pub tokens_per_s: f64,
    /// The time that the step took, without evaluations and saves.
    pub step_s: f64,
    /// Model FLOPs utilization, from 0 to 1; 0 if the peak is not known.
    #[serde(alias = "utilisation")]
    pub mfu: f64,
    /// The current resident memory of the rank that has the most.
    pub memory_bytes: u64,
    /// The largest resident memory that any rank ever had.
    pub memory_peak_bytes: u64,
    /// The bytes that the busiest rank sent in this step.
    pub sent_bytes: u64,
    /// The loss scale.
    pub loss_scale: f64,
    /// The number of steps skipped so far.
    pub skipped_so_far: u64,
    /// Why the update was skipped, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// The spike of the loss or the gradient norm, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none", alias = "outlier")]
    pub spike: Option<String>,
    /// How evenly tokens were routed to experts, in each block that has experts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<ExpertLoad>,
}

/// How evenly the tokens of a step were routed to the experts of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// The tokens of all experts: each token counts once for each of its experts.
    pub tokens: u64,
    /// The tokens of the busiest expert, divided by the mean of all experts.
    pub busiest: f64,
    /// The number of experts without tokens.
    pub unused: u64,
    /// The tokens that experts had no capacity for.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dropped: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl ExpertLoad {
    /// The load of experts that these numbers of tokens have chosen, of which some were dropped.
    pub fn new(tokens: &[u64], dropped: u64) -> Self {
        let all: u64 = tokens.iter().sum();
        let busiest = tokens.iter().max().map_or(0., |&most| most as f64 * tokens.len() as f64 / all.max(1) as f64);
        ExpertLoad {
            tokens: all,
            busiest: (busiest * 1e4).round() / 1e4,
            unused: tokens.iter().filter(|count| **count == 0).count() as u64,
            dropped,
        }
    }
}

impl Step {
    /// The tokens of the busiest expert of any block, divided by the mean of the block's experts; `None` without experts.
    pub fn busiest_expert(&self) -> Option<f64> {
        self.experts.iter().map(|load| load.busiest).reduce(f64::max)
    }

    /// The MFU, if it is known. A value above 1 is not valid: the machine was busy when its peak was measured.
    pub fn known_mfu(&self) -> Option<f64> {
        Some(self.mfu).filter(|mfu| *mfu > 0. && *mfu <= 1.)
    }
}

/// The memory of a rank, in bytes by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankMemory {
    /// The rank.
    pub rank: usize,
    /// Parameters.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Master weights and optimizer state.
    pub optimizer: u64,
    /// Parameters and gradients of units that are unsharded at the moment.
    #[serde(alias = "in_flight")]
    pub unsharded: u64,
    /// The peak of activations and all other tensors since the last entry.
    pub activations: u64,
    /// The process itself: resident memory that no tensor holds.
    pub process: u64,
}

impl RankMemory {
    /// Returns each kind with its name, in the order in which they are drawn.
    pub fn kinds(&self) -> [(&'static str, u64); 6] {
        [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("unsharded", self.unsharded),
            ("activations", self.activations),
            ("process", self.process),
        ]
    }
}

/// What the busiest rank sent since the last such entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTraffic {
    /// The last step that is counted.
    pub step: u64,
    /// The number of steps that are counted.
    pub steps: u64,
    /// The traffic by verb.
    pub verbs: Vec<VerbTraffic>,
}

/// The traffic of one verb.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerbTraffic {
    /// `all-gather`, `reduce-scatter`, `all-reduce`, …
    pub verb: String,
    /// The number of calls.
    pub calls: u64,
    /// The bytes sent.
    pub bytes: u64,
    /// The bytes that parameters and gradients alone should take, by formula.
    #[serde(alias = "theory_bytes")]
    pub expected_bytes: u64,
}

/// The result of an evaluation on held-out text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// The step after which the model was evaluated.
    pub step: u64,
    /// The mean loss per token.
    #[serde(with = "float_or_text")]
    pub loss: f64,
    /// The number of tokens that were evaluated.
    pub tokens: u64,
    /// Bits per byte of text, if the length of the text is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
}

/// A complete checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// The step whose state was saved.
    pub step: u64,
    /// The checkpoint's address.
    pub address: String,
    /// Its size.
    pub bytes: u64,
    /// The time that the save took.
    pub took_s: f64,
    /// The part of that time for which training stalled.
    #[serde(alias = "stood_still_s")]
    pub stalled_s: f64,
}

/// The launch of an attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// The number of the attempt, counted from 1.
    pub attempt: u64,
    /// The world size.
    pub ranks: usize,
    /// The hosts; empty if all ranks run on the supervisor's host.
    pub hosts: Vec<String>,
    /// Hosts that were requested and do not answer.
    pub missing: Vec<String>,
}

/// A resumption after a failure, and what the failure cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Resumed {
    /// The attempt that resumed.
    pub attempt: u64,
    /// Its first step.
    pub step: u64,
    /// The time for which no rank was training.
    pub lost_s: f64,
    /// The part of that time until the failure was noticed.
    pub noticed_s: f64,
    /// The number of steps that have to be repeated.
    #[serde(alias = "steps_again")]
    pub repeated_steps: u64,
}

/// The default of [`Start::journal_version`], for files that lack it.
fn version_1() -> u32 {
    1
}

/// Floats that may not be finite, for which JSON has no literal: `"NaN"`, `"inf"`, `"-inf"`.
mod float_or_text {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum FloatOrText {
        Float(f64),
        Text(String),
    }

    pub(super) fn serialize<S: Serializer>(float: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        match float.is_finite() {
            true => serializer.serialize_f64(*float),
            false => serializer.collect_str(float),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        match FloatOrText::deserialize(deserializer)? {
            FloatOrText::Float(float) => Ok(float),
            FloatOrText::Text(text) => text.parse().map_err(D::Error::custom),
        }
    }
}

/// Journals of earlier versions do not say how many ranks share a layer: each rank had its own.
fn one() -> usize {
    1
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn non_finite_numbers_survive() {
        for loss in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.1] {
            let entry = Entry { time_s: 1.5, kind: EntryKind::Step(Step { loss, ..Step::default() }) };
            let text = serde_json::to_string(&entry).unwrap();
            let Entry { kind: EntryKind::Step(read), .. } = serde_json::from_str(&text).unwrap() else {
                panic!("{text}")
            };
            assert_eq!(read.loss.to_bits(), loss.to_bits(), "{text}");
        }
    }

    /// One line of every kind, as version 1 wrote it.
    const VERSION_1: &str = r#"{"time_s":0.5,"kind":"launched","attempt":2,"ranks":4,"hosts":["a","b"],"missing":["c"]}
{"time_s":1.5,"kind":"start","name":"kjv","recipe":"[run]\nsteps = 9\n","version":"0.1.0","ranks":4,"ranks_per_host":2,"stage":3,"replicas":2,"precision":"bf16","parameters":42,"tokens_per_step":64,"first_step":5,"steps":9,"resumed_from":"saved/step-4","memory_limit_bytes":1024,"memory_estimate_bytes":512,"flops_per_token":2.5,"peak_flops_per_s":1000.0}
{"time_s":2.5,"kind":"step","step":5,"loss":3.25,"gradient_norm":"inf","rate":0.001,"tokens":64,"tokens_per_s":128.0,"step_s":0.5,"utilisation":0.25,"memory_bytes":100,"memory_peak_bytes":200,"sent_bytes":300,"loss_scale":1.0,"skipped_so_far":1,"skipped":"not finite","outlier":"the loss is 3.25"}
{"time_s":3.5,"kind":"memory","step":5,"ranks":[{"rank":0,"parameters":1,"gradients":2,"optimizer":3,"in_flight":4,"activations":5,"process":6}]}
{"time_s":4.5,"kind":"traffic","step":5,"steps":1,"verbs":[{"verb":"all-gather","calls":7,"bytes":8,"theory_bytes":9}]}
{"time_s":5.5,"kind":"held_out","step":5,"loss":2.5,"tokens":640,"bits_per_byte":1.25}
{"time_s":6.5,"kind":"saved","step":5,"address":"saved/step-5","bytes":10,"took_s":1.5,"stood_still_s":0.5}
{"time_s":7.5,"kind":"note","step":5,"text":"look"}
{"time_s":8.5,"kind":"trace","first_step":5,"steps":1,"path":"trace.json"}
{"time_s":9.5,"kind":"failed","attempt":1,"step":5,"text":"rank 2 died"}
{"time_s":10.5,"kind":"again","attempt":2,"step":5,"lost_s":2.5,"noticed_s":0.5,"steps_again":1}
{"time_s":11.5,"kind":"ended","code":0,"restarts":1,"lost_s":2.5}"#;

    /// The same entries in today's types.
    fn version_1_entries() -> Vec<EntryKind> {
        let hosts = ["a", "b"].map(String::from).to_vec();
        let memory =
            RankMemory { rank: 0, parameters: 1, gradients: 2, optimizer: 3, unsharded: 4, activations: 5, process: 6 };
        let verb = VerbTraffic { verb: "all-gather".to_string(), calls: 7, bytes: 8, expected_bytes: 9 };
        vec![
            EntryKind::Launched(Launch { attempt: 2, ranks: 4, hosts, missing: vec!["c".to_string()] }),
            EntryKind::Start(Box::new(Start {
                journal_version: 1,
                name: "kjv".to_string(),
                recipe: "[run]\nsteps = 9\n".to_string(),
                version: "0.1.0".to_string(),
                ranks: 4,
                ranks_per_host: 2,
                zero_stage: 3,
                replicate: 2,
                pipeline: 1,
                expert: 1,
                context: 1,
                tensor: 1,
                param_dtype: "bf16".to_string(),
                parameters: 42,
                package: None,
                tokens_per_step: 64,
                first_step: 5,
                steps: 9,
                resumed_from: Some("saved/step-4".to_string()),
                memory_limit_bytes: Some(1024),
                memory_estimate_bytes: 512,
                flops_per_token: 2.5,
                peak_flops_per_s: 1000.,
            })),
            EntryKind::Step(Step {
                step: 5,
                loss: 3.25,
                grad_norm: f64::INFINITY,
                lr: 1e-3,
                tokens: 64,
                tokens_per_s: 128.,
                step_s: 0.5,
                mfu: 0.25,
                memory_bytes: 100,
                memory_peak_bytes: 200,
                sent_bytes: 300,
                loss_scale: 1.,
                skipped_so_far: 1,
                skipped: Some("not finite".to_string()),
                spike: Some("the loss is 3.25".to_string()),
                experts: Vec::new(),
            }),
            EntryKind::Memory { step: 5, ranks: vec![memory] },
            EntryKind::Traffic(StepTraffic { step: 5, steps: 1, verbs: vec![verb] }),
            EntryKind::Evaluation(Evaluation { step: 5, loss: 2.5, tokens: 640, bits_per_byte: Some(1.25) }),
            EntryKind::Saved(Saved {
                step: 5,
                address: "saved/step-5".to_string(),
                bytes: 10,
                took_s: 1.5,
                stalled_s: 0.5,
            }),
            EntryKind::Note { step: 5, text: "look".to_string() },
            EntryKind::Trace { first_step: 5, steps: 1, path: "trace.json".to_string() },
            EntryKind::Failed { attempt: 1, step: 5, text: "rank 2 died".to_string() },
            EntryKind::Resumed(Resumed { attempt: 2, step: 5, lost_s: 2.5, noticed_s: 0.5, repeated_steps: 1 }),
            EntryKind::Ended { code: 0, restarts: 1, lost_s: 2.5 },
        ]
    }

    #[test]
    fn the_load_of_experts_is_kept() {
        let load = ExpertLoad::new(&[0, 30, 10], 5);
        assert_eq!(load, ExpertLoad { tokens: 40, busiest: 2.25, unused: 1, dropped: 5 });
        let step = Step { experts: vec![ExpertLoad::new(&[1, 1], 0), load], ..Step::default() };
        assert_eq!(step.busiest_expert(), Some(2.25));
        let text = serde_json::to_string(&step).unwrap();
        assert_eq!(serde_json::from_str::<Step>(&text).unwrap(), step);
        assert!(!serde_json::to_string(&Step::default()).unwrap().contains("experts"));
    }

    #[test]
    fn version_1_is_read() {
        let read: Vec<Entry> = VERSION_1.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let expected = (0..).zip(version_1_entries());
        let expected: Vec<Entry> =
            expected.map(|(index, kind)| Entry { time_s: f64::from(index) + 0.5, kind }).collect();
        assert_eq!(read, expected);
    }

    #[test]
    fn version_2_is_written_and_read() {
        for kind in version_1_entries() {
            let entry = Entry { time_s: 1.5, kind };
            let text = serde_json::to_string(&entry).unwrap();
            assert_eq!(serde_json::from_str::<Entry>(&text).unwrap(), entry, "{text}");
            let old = [
                "\"rate\"",
                "\"gradient_norm\"",
                "\"utilisation\"",
                "\"outlier\"",
                "\"stage\"",
                "\"replicas\"",
                "\"precision\"",
                "\"in_flight\"",
                "\"held_out\"",
                "\"again\"",
                "\"steps_again\"",
                "\"stood_still_s\"",
                "\"theory_bytes\"",
            ];
            assert!(!old.iter().any(|name| text.contains(name)), "{text}");
        }
        let start = Start { journal_version: JOURNAL_VERSION, ..Start::default() };
        assert!(serde_json::to_string(&start).unwrap().starts_with("{\"journal_version\":2,"));
    }

    #[test]
    fn early_files_of_version_2_are_read() {
        let line =
            r#"{"time_s":1.5,"kind":"resumed","attempt":2,"step":5,"lost_s":2.5,"noticed_s":0.5,"steps_again":3}"#;
        let resumed = Resumed { attempt: 2, step: 5, lost_s: 2.5, noticed_s: 0.5, repeated_steps: 3 };
        let expected = Entry { time_s: 1.5, kind: EntryKind::Resumed(resumed) };
        assert_eq!(serde_json::from_str::<Entry>(line).unwrap(), expected);
    }
}
