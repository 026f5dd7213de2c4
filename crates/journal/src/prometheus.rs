//! Exports the latest figures of a run in the Prometheus text format.
//!
//! The page is built anew for each request; serving it is the caller's job. Counters cover all attempts of the run, because they are
//! computed from the journal.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::{Entry, EntryKind, Evaluation, ExpertLoad, RankMemory, Run, Saved, Start, Step, StepTraffic};

/// The content type of [`text`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Returns the page with all metrics of a run.
pub fn text(run: &Run) -> String {
    let mut page = Page(String::new());
    Latest::from_entries(run.entries()).write(&mut page);
    page.0
}

/// The latest entry of each kind, and the counters.
#[derive(Default)]
struct Latest<'a> {
    start: Option<(f64, &'a Start)>,
    step: Option<(f64, &'a Step)>,
    memory: &'a [RankMemory],
    evaluation: Option<&'a Evaluation>,
    saved: Option<&'a Saved>,
    saves: u64,
    restarts: u64,
    failures: u64,
    lost_s: f64,
    ended: Option<u8>,
    sent: BTreeMap<&'a str, [u64; 3]>,
}

impl<'a> Latest<'a> {
    fn from_entries(entries: &'a [Entry]) -> Self {
        let mut latest = Latest::default();
        for Entry { time_s, kind } in entries {
            match kind {
                EntryKind::Start(start) => (latest.start, latest.ended) = (Some((*time_s, &**start)), None),
                EntryKind::Step(step) => latest.step = Some((*time_s, step)),
                EntryKind::Memory { ranks, .. } => latest.memory = ranks,
                EntryKind::Traffic(traffic) => latest.count(traffic),
                EntryKind::Evaluation(evaluation) => latest.evaluation = Some(evaluation),
                EntryKind::Saved(saved) => (latest.saved, latest.saves) = (Some(saved), latest.saves + 1),
                EntryKind::Launched(launch) if launch.attempt > 1 => latest.restarts += 1,
                EntryKind::Failed { .. } => latest.failures += 1,
                EntryKind::Resumed(resumed) => latest.lost_s += resumed.lost_s,
                EntryKind::Ended { code, .. } => latest.ended = Some(*code),
                EntryKind::Note { .. } | EntryKind::Trace { .. } | EntryKind::Launched(_) => (),
            }
        }
        latest
    }

    fn count(&mut self, traffic: &'a StepTraffic) {
        for verb in &traffic.verbs {
            let sums = self.sent.entry(&verb.verb).or_default();
            for (sum, more) in sums.iter_mut().zip([verb.calls, verb.bytes, verb.expected_bytes]) {
                *sum = sum.saturating_add(more);
            }
        }
    }

    fn write(&self, page: &mut Page) {
        if let Some((time_s, start)) = self.start {
            self.write_start(page, time_s, start);
        }
        if let Some((time_s, step)) = self.step {
            self.write_step(page, time_s, step);
        }
        self.write_ranks(page);
        if let Some(evaluation) = self.evaluation {
            page.gauge("evaluation_loss", "Mean loss per token of held-out text.", evaluation.loss);
            page.gauge("evaluation_step", "Step after which the model was evaluated.", evaluation.step as f64);
        }
        if let Some(saved) = self.saved {
            page.gauge("checkpoint_step", "Step of the newest checkpoint that this run saved.", saved.step as f64);
            page.gauge("checkpoint_seconds", "Time to save the newest checkpoint.", saved.took_s);
        }
        page.counter("checkpoints_total", "Checkpoints saved.", self.saves as f64);
        page.counter("restarts_total", "Restarts by the supervisor.", self.restarts as f64);
        page.counter("failures_total", "Attempts that failed.", self.failures as f64);
        page.counter("lost_seconds_total", "Time lost to failures, until ranks trained again.", self.lost_s);
        page.gauge(
            "running",
            "1 until the supervisor records the end of the run, then 0.",
            f64::from(u8::from(self.ended.is_none())),
        );
    }

    fn write_start(&self, page: &mut Page, time_s: f64, start: &Start) {
        let (zero_stage, replicate) = (start.zero_stage.to_string(), start.replicate.to_string());
        let labels: [(&str, &str); 5] = [
            ("name", &start.name),
            ("version", &start.version),
            ("param_dtype", &start.param_dtype),
            ("zero_stage", &zero_stage),
            ("replicate", &replicate),
        ];
        page.family("info", "gauge", "The run and its configuration.", [(&labels[..], 1.)]);
        page.gauge("start_time_seconds", "Start time of the current attempt, since 1970.", time_s);
        page.gauge("ranks", "World size.", start.ranks as f64);
        page.gauge("parameters", "Parameters of the model.", start.parameters as f64);
        page.gauge("steps", "Last step of the run.", start.steps as f64);
        page.gauge("tokens_per_step", "Tokens that a step reads.", start.tokens_per_step as f64);
        let peak = start.peak_flops_per_s;
        page.gauge("peak_flops_per_second", "FLOP/s of all ranks together in large matrix products.", peak);
        if let Some(limit) = start.memory_limit_bytes {
            page.gauge("memory_limit_bytes", "Memory that a rank may use.", limit as f64);
        }
        let estimate = start.memory_estimate_bytes as f64;
        page.gauge("memory_estimate_bytes", "Estimated memory need of a rank.", estimate);
    }

    fn write_step(&self, page: &mut Page, time_s: f64, step: &Step) {
        for (name, help, value) in [
            ("step", "Last completed step.", step.step as f64),
            ("step_time_seconds", "Time at which that step was completed, since 1970.", time_s),
            ("loss", "Mean loss per token.", step.loss),
            ("grad_norm", "Norm of all gradients, before clipping.", step.grad_norm),
            ("lr", "Learning rate.", step.lr),
            ("tokens_per_second", "Throughput of all ranks together.", step.tokens_per_s),
            ("step_seconds", "Duration of the step.", step.step_s),
            ("mfu", "Model FLOPs utilization, from 0 to 1.", step.mfu),
            ("memory_resident_bytes", "Largest resident memory of any rank.", step.memory_bytes as f64),
            ("memory_resident_peak_bytes", "Largest resident memory any rank ever had.", step.memory_peak_bytes as f64),
            ("step_sent_bytes", "Bytes that the busiest rank sent in the step.", step.sent_bytes as f64),
            ("loss_scale", "Loss scale.", step.loss_scale),
        ] {
            page.gauge(name, help, value);
        }
        let blocks: Vec<String> = (0..step.experts.len()).map(|block| block.to_string()).collect();
        let of_block = |load: fn(&ExpertLoad) -> f64| {
            step.experts.iter().zip(&blocks).map(move |(experts, block)| ([("block", block.as_str())], load(experts)))
        };
        if !blocks.is_empty() {
            let help = "Tokens of the busiest expert of a block, relative to the mean of its experts.";
            page.family("expert_busiest", "gauge", help, of_block(|load| load.busiest));
            page.family(
                "expert_unused",
                "gauge",
                "Experts of a block without tokens.",
                of_block(|load| load.unused as f64),
            );
            let help = "Tokens that the experts of a block had no capacity for in the step.";
            page.family("expert_dropped", "gauge", help, of_block(|load| load.dropped as f64));
        }
        page.counter("skipped_steps_total", "Steps whose update was skipped.", step.skipped_so_far as f64);
    }

    fn write_ranks(&self, page: &mut Page) {
        let ranks: Vec<String> = self.memory.iter().map(|memory| memory.rank.to_string()).collect();
        let kinds = self.memory.iter().zip(&ranks).flat_map(|(memory, rank)| {
            memory.kinds().map(|(kind, bytes)| ([("rank", rank.as_str()), ("kind", kind)], bytes as f64))
        });
        page.family("memory_bytes", "gauge", "Memory of the first ranks, by kind.", kinds);
        for (index, name, help) in [
            (0, "calls_total", "Communication calls in steps, by collective."),
            (1, "sent_bytes_total", "Bytes that the busiest rank sent in steps, by collective."),
            (
                2,
                "sent_expected_bytes_total",
                "Bytes that the formula predicts for parameters and gradients, by collective.",
            ),
        ] {
            let verbs = self.sent.iter().map(|(verb, sums)| ([("collective", *verb)], sums[index] as f64));
            page.family(name, "counter", help, verbs);
        }
    }
}

/// The page under construction. All metrics get the prefix `shardwise_`.
struct Page(String);

impl Page {
    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, "gauge", help, [([], value)]);
    }

    fn counter(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, "counter", help, [([], value)]);
    }

    /// Adds a metric with all its samples. Adds nothing if there are none.
    fn family<'l, L: AsRef<[(&'l str, &'l str)]>>(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        samples: impl IntoIterator<Item = (L, f64)>,
    ) {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return;
        }
        // Writing to a string does not fail.
        let _ = write!(self.0, "# HELP shardwise_{name} {help}\n# TYPE shardwise_{name} {kind}\n");
        for (labels, value) in samples {
            let labels: Vec<String> =
                labels.as_ref().iter().map(|(label, value)| format!("{label}=\"{}\"", escape(value))).collect();
            let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            let _ = writeln!(self.0, "shardwise_{name}{labels} {}", number(value));
        }
    }
}

/// Escapes a label's value.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn number(value: f64) -> String {
    match value {
        value if value == f64::INFINITY => "+Inf".to_string(),
        value if value == f64::NEG_INFINITY => "-Inf".to_string(),
        value => value.to_string(),
    }
}
