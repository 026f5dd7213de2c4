//! A run's latest figures in Prometheus's text format.
//!
//! It is a page for a scraper, made anew whenever it is asked for; who serves it is not known here. Counters are of the whole run,
//! over all attempts, since they are counted in what was written down.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::{Entry, HeldOut, RankMemory, Run, Saved, Start, Step, StepTraffic, What};

/// The content type of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What a run says of itself.
pub fn text(run: &Run) -> String {
    let mut page = Page(String::new());
    Latest::of(run.entries()).write(&mut page);
    page.0
}

/// The last of each kind, and what is counted.
#[derive(Default)]
struct Latest<'a> {
    start: Option<(f64, &'a Start)>,
    step: Option<(f64, &'a Step)>,
    memory: &'a [RankMemory],
    held_out: Option<&'a HeldOut>,
    saved: Option<&'a Saved>,
    saves: u64,
    restarts: u64,
    failures: u64,
    lost_s: f64,
    ended: Option<u8>,
    sent: BTreeMap<&'a str, [u64; 3]>,
}

impl<'a> Latest<'a> {
    fn of(entries: &'a [Entry]) -> Self {
        let mut latest = Latest::default();
        for Entry { time_s, what } in entries {
            match what {
                What::Start(start) => (latest.start, latest.ended) = (Some((*time_s, &**start)), None),
                What::Step(step) => latest.step = Some((*time_s, step)),
                What::Memory { ranks, .. } => latest.memory = ranks,
                What::Traffic(traffic) => latest.count(traffic),
                What::HeldOut(held_out) => latest.held_out = Some(held_out),
                What::Saved(saved) => (latest.saved, latest.saves) = (Some(saved), latest.saves + 1),
                What::Launched(launch) if launch.attempt > 1 => latest.restarts += 1,
                What::Failed { .. } => latest.failures += 1,
                What::Again(setback) => latest.lost_s += setback.lost_s,
                What::Ended { code, .. } => latest.ended = Some(*code),
                What::Note { .. } | What::Trace { .. } | What::Launched(_) => (),
            }
        }
        latest
    }

    fn count(&mut self, traffic: &'a StepTraffic) {
        for verb in &traffic.verbs {
            let sums = self.sent.entry(&verb.verb).or_default();
            for (sum, more) in sums.iter_mut().zip([verb.calls, verb.bytes, verb.theory_bytes]) {
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
        if let Some(held_out) = self.held_out {
            page.gauge("held_out_loss", "The mean loss of a token of held-out text.", held_out.loss);
            page.gauge("held_out_step", "The step after which that was measured.", held_out.step as f64);
        }
        if let Some(saved) = self.saved {
            page.gauge(
                "checkpoint_step",
                "The step of the newest checkpoint that this run has saved.",
                saved.step as f64,
            );
            page.gauge("checkpoint_seconds", "How long that checkpoint took.", saved.took_s);
        }
        page.counter("checkpoints_total", "Checkpoints that were saved.", self.saves as f64);
        page.counter("restarts_total", "How often the supervisor has started the ranks again.", self.restarts as f64);
        page.counter("failures_total", "Attempts that have failed.", self.failures as f64);
        page.counter("lost_seconds_total", "Time from when ranks stopped working until they did again.", self.lost_s);
        page.gauge(
            "running",
            "1 until the supervisor has written that the run has ended.",
            f64::from(u8::from(self.ended.is_none())),
        );
    }

    fn write_start(&self, page: &mut Page, time_s: f64, start: &Start) {
        let (stage, replicas) = (start.stage.to_string(), start.replicas.to_string());
        let labels: [(&str, &str); 5] = [
            ("name", &start.name),
            ("version", &start.version),
            ("precision", &start.precision),
            ("stage", &stage),
            ("replicas", &replicas),
        ];
        page.family("info", "gauge", "What is trained, and how.", [(&labels[..], 1.)]);
        page.gauge("start_time_seconds", "When the attempt began, since 1970.", time_s);
        page.gauge("ranks", "How many ranks.", start.ranks as f64);
        page.gauge("parameters", "How many parameters the model has.", start.parameters as f64);
        page.gauge("steps", "The last step of the run.", start.steps as f64);
        page.gauge("tokens_per_step", "How many tokens a step reads.", start.tokens_per_step as f64);
        page.gauge("peak_flops_per_second", "What all ranks reach in large matrix products.", start.peak_flops_per_s);
        if let Some(limit) = start.memory_limit_bytes {
            page.gauge("memory_limit_bytes", "What a rank may take of memory.", limit as f64);
        }
        let estimate = start.memory_estimate_bytes as f64;
        page.gauge("memory_estimate_bytes", "What a rank is thought to need of memory.", estimate);
    }

    fn write_step(&self, page: &mut Page, time_s: f64, step: &Step) {
        for (name, help, value) in [
            ("step", "The last step that was made.", step.step as f64),
            ("step_time_seconds", "When that was, since 1970.", time_s),
            ("loss", "The mean loss of its tokens.", step.loss),
            ("gradient_norm", "The norm of all gradients, before clipping.", step.gradient_norm),
            ("learning_rate", "The learning rate.", step.rate),
            ("tokens_per_second", "Tokens of all ranks together, per second.", step.tokens_per_s),
            ("step_seconds", "How long the step took.", step.step_s),
            ("utilisation_ratio", "The part of the peak that went into the model's own arithmetic.", step.utilisation),
            ("memory_resident_bytes", "Resident memory of the rank that has the most.", step.memory_bytes as f64),
            ("memory_resident_peak_bytes", "The most that a rank ever had resident.", step.memory_peak_bytes as f64),
            ("step_sent_bytes", "What the rank that sent the most has sent in the step.", step.sent_bytes as f64),
            ("loss_scale", "What the loss was multiplied by for the backward pass.", step.loss_scale),
        ] {
            page.gauge(name, help, value);
        }
        page.counter("skipped_steps_total", "Steps in which nothing was updated.", step.skipped_so_far as f64);
    }

    fn write_ranks(&self, page: &mut Page) {
        let ranks: Vec<String> = self.memory.iter().map(|memory| memory.rank.to_string()).collect();
        let kinds = self.memory.iter().zip(&ranks).flat_map(|(memory, rank)| {
            memory.kinds().map(|(kind, bytes)| ([("rank", rank.as_str()), ("kind", kind)], bytes as f64))
        });
        page.family("memory_bytes", "gauge", "What the first ranks hold, by kind.", kinds);
        for (index, name, help) in [
            (0, "calls_total", "Calls between ranks in steps, by verb."),
            (1, "sent_bytes_total", "What the rank that sent the most has sent in steps, by verb."),
            (2, "sent_theory_bytes_total", "What theory has for that: of parameters and gradients alone."),
        ] {
            let verbs = self.sent.iter().map(|(verb, sums)| ([("verb", *verb)], sums[index] as f64));
            page.family(name, "counter", help, verbs);
        }
    }
}

/// The text as it grows. All names begin with the program's.
struct Page(String);

impl Page {
    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, "gauge", help, [([], value)]);
    }

    fn counter(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, "counter", help, [([], value)]);
    }

    /// Samples of one name with their labels; none where there are none.
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
        // Text grows without failing.
        let _ = write!(self.0, "# HELP shardwise_{name} {help}\n# TYPE shardwise_{name} {kind}\n");
        for (labels, value) in samples {
            let labels: Vec<String> =
                labels.as_ref().iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
            let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            let _ = writeln!(self.0, "shardwise_{name}{labels} {}", number(value));
        }
    }
}

/// A label's value between quotation marks.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn number(value: f64) -> String {
    match value {
        value if value == f64::INFINITY => "+Inf".to_string(),
        value if value == f64::NEG_INFINITY => "-Inf".to_string(),
        value => value.to_string(),
    }
}
