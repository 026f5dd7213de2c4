//! What a run counts: time, tokens, memory and traffic.
//!
//! Every rank counts for itself, which costs a few clock readings a step. What all ranks together have is agreed on in one small
//! all-reduce: the highest memory and traffic for every line that is printed, and every few seconds a look at more: memory by
//! kind of the first ranks, and traffic by verb. How much that is does not grow with the ranks. When the next look is due the
//! first rank says in the last one, in steps, so that nobody has to ask.

use std::time::{Duration, Instant};

use shardwise_comm::{Count, Group, Reduce, Verb};
use shardwise_journal::{RANKS_KEPT_MAX, RankMemory, Step, StepTraffic, VerbTraffic};
use shardwise_plan::Dtype;
use shardwise_torch::take_peak_bytes;
use shardwise_torch::tch::Device;
use shardwise_zero::Bytes;

use crate::peak::{Peak, flops_per_s};
use crate::theory::{ByVerb, Theory};
use crate::{Report, Result, Trainer};

/// How long it is from look to look, about; and in steps, at most.
const LOOK: Duration = Duration::from_secs(5);
const LOOK_STEPS_MAX: u64 = 10_000;

/// What is agreed on beside the figures of verbs and ranks: resident memory now and at most, bytes sent, the step of the next look,
/// and whether the peak is measured again.
const FIGURES_OF_RUN: usize = 5;

/// Calls, bytes, and what theory has for them.
const FIGURES_OF_VERB: usize = 3;

/// What does not change from step to step.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    /// Tokens that a step reads on all ranks, whether they count or not.
    pub(crate) tokens_per_step: u64,
    /// Additions and multiplications for each.
    pub(crate) flops_per_token: f64,
    /// What all ranks reach of them in a second when they do nothing else.
    pub(crate) peak_flops_per_s: f64,
    /// In which type, and where.
    pub(crate) dtype: Dtype,
    pub(crate) device: Device,
}

/// What a run counts.
pub(crate) struct Meter<'a> {
    world: &'a Group,
    scale: Scale,
    peak: Peak,
    theory: Theory,
    began: Instant,
    loading: Duration,
    lately: Lately,
    /// Before this step.
    step_began: Instant,
    sent_before: [Count; Verb::ALL.len()],
    /// In steps, since the last look.
    sent: [Count; Verb::ALL.len()],
    due: ByVerb,
    steps: u64,
    /// The step after which the next look is due.
    next_look: u64,
    /// The highest resident memory of a rank, and the highest ever, as they were last agreed on.
    memory_bytes: [u64; 2],
}

/// What was counted since the last line.
#[derive(Clone, Copy)]
struct Lately {
    /// When that was, or later by what was not training.
    since: Instant,
    tokens: u64,
    steps: u64,
}

/// What there is to say after a step.
pub(crate) struct Counted {
    /// For the journal.
    pub(crate) step: Step,
    /// Tokens per second and utilisation since the last line, where one is due.
    pub(crate) pace: Option<[f64; 2]>,
    /// What the look has found, where one was due.
    pub(crate) look: Option<Look>,
}

/// What is seen of all ranks from time to time.
pub(crate) struct Look {
    pub(crate) memory: Vec<RankMemory>,
    pub(crate) traffic: StepTraffic,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(world: &'a Group, scale: Scale, theory: Theory) -> Self {
        let now = Instant::now();
        Meter {
            world,
            peak: Peak::new(scale.peak_flops_per_s),
            scale,
            theory,
            began: now,
            loading: Duration::ZERO,
            lately: Lately { since: now, tokens: 0, steps: 0 },
            step_began: now,
            sent_before: world.meter().by_verb(),
            sent: Default::default(),
            due: Default::default(),
            steps: 0,
            next_look: 0,
            memory_bytes: [0; 2],
        }
    }

    /// A step begins; what ranks have done since the last one is not training.
    pub(crate) fn begin_step(&mut self) {
        self.step_began = Instant::now();
        self.sent_before = self.world.meter().by_verb();
    }

    /// Notes how long data takes.
    pub(crate) fn loading<T>(&mut self, load: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let loaded = load();
        self.loading += began.elapsed();
        loaded
    }

    /// Leaves work that is not training out of the tokens per second.
    pub(crate) fn apart<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = work();
        self.lately.since += began.elapsed();
        done
    }

    /// The run has gone back, and counts steps again that it has counted already.
    pub(crate) fn gone_back(&mut self) {
        self.next_look = 0;
    }

    /// The step is made. All ranks call it together, with the same `is_printed`.
    pub(crate) fn end_step(
        &mut self,
        trainer: &Trainer,
        report: &Report,
        is_printed: bool,
        last: u64,
    ) -> Result<Counted> {
        let step_s = self.step_began.elapsed().as_secs_f64();
        let sent = since(self.world.meter().by_verb(), self.sent_before);
        self.add(sent, report);
        let looks = report.step >= self.next_look || report.step == last;
        let mut sent_bytes = sent.iter().map(|count| count.bytes).sum();
        let (mut look, mut measures_again) = (None, false);
        if is_printed || looks {
            let mut own = vec![resident_bytes("VmRSS:"), resident_bytes("VmHWM:"), sent_bytes, 0, 0];
            if looks {
                own[3] = if self.world.rank() == 0 { report.step + steps_within(LOOK, step_s) } else { 0 };
                // The first rank's figures are the ones that people see.
                let measures = self.world.rank() == 0 && report.step < last && self.peak.is_worth_measuring();
                own[4] = u64::from(measures);
                self.put(trainer, &mut own);
            }
            let own = own.into_iter().map(|figure| figure as i64).collect();
            let most: Vec<i64> = self.world.all_reduce("memory and traffic", Reduce::Max, own).wait()?;
            let most: Vec<u64> = most.into_iter().map(|figure| figure as u64).collect();
            (self.memory_bytes, sent_bytes) = ([most[0], most[1]], most[2]);
            if looks {
                self.next_look = most[3];
                look = Some(self.take(report.step, &most[FIGURES_OF_RUN..]));
                measures_again = most[4] > 0;
            }
        }
        let step = self.step(report, step_s, sent_bytes);
        let pace = is_printed.then(|| self.pace());
        if measures_again {
            let (world, Scale { dtype, device, .. }) = (self.world, self.scale);
            let reached = self.apart(|| flops_per_s(world, dtype, device))?;
            self.peak.raise(reached);
        }
        Ok(Counted { step, pace, look })
    }

    /// The part of the time that data took, on the rank where it was the most.
    pub(crate) fn share_of_loading(&self) -> Result<f64> {
        let share = self.loading.as_secs_f64() / self.began.elapsed().as_secs_f64().max(1e-9);
        let most = self.world.all_reduce("time for data", Reduce::Max, vec![(share * 1e9) as i64]).wait()?[0];
        Ok(most as f64 / 1e9)
    }

    fn add(&mut self, sent: [Count; Verb::ALL.len()], report: &Report) {
        self.lately.tokens += report.tokens;
        self.lately.steps += 1;
        self.steps += 1;
        for (index, count) in sent.into_iter().enumerate() {
            self.sent[index] = [self.sent[index], count].into_iter().sum();
            let of_update = if report.skipped.is_none() { self.theory.update[index] } else { 0 };
            self.due[index] += self.theory.step[index] + of_update;
        }
    }

    /// Adds this rank's figures for a look: those of each verb, and behind them, in its own place, its memory.
    fn put(&self, trainer: &Trainer, figures: &mut Vec<u64>) {
        for (sent, due) in self.sent.iter().zip(self.due) {
            figures.extend([sent.calls, sent.bytes, due]);
        }
        for rank in 0..self.world.size().min(RANKS_KEPT_MAX) {
            let own = if rank == self.world.rank() { held(rank, trainer) } else { RankMemory::default() };
            figures.extend(own.kinds().map(|(_, bytes)| bytes));
        }
    }

    /// Reads what all ranks have put there, and begins to count anew.
    fn take(&mut self, step: u64, figures: &[u64]) -> Look {
        let (verbs, ranks) = figures.split_at(FIGURES_OF_VERB * Verb::ALL.len());
        let mut traffic = StepTraffic { step, steps: std::mem::take(&mut self.steps), verbs: Vec::new() };
        for (verb, figures) in Verb::ALL.iter().zip(verbs.chunks_exact(FIGURES_OF_VERB)) {
            let [calls, bytes, theory_bytes] = [figures[0], figures[1], figures[2]];
            if calls > 0 {
                traffic.verbs.push(VerbTraffic { verb: verb.to_string(), calls, bytes, theory_bytes });
            }
        }
        (self.sent, self.due) = Default::default();
        let kinds = RankMemory::default().kinds().len();
        let memory = ranks.chunks_exact(kinds).enumerate().map(|(rank, figures)| RankMemory {
            rank,
            parameters: figures[0],
            gradients: figures[1],
            optimizer: figures[2],
            in_flight: figures[3],
            activations: figures[4],
            process: figures[5],
        });
        Look { memory: memory.collect(), traffic }
    }

    fn step(&mut self, report: &Report, step_s: f64, sent_bytes: u64) -> Step {
        Step {
            step: report.step,
            loss: report.loss,
            gradient_norm: report.gradient_norm,
            rate: report.rate,
            tokens: report.tokens,
            tokens_per_s: report.tokens as f64 / step_s,
            step_s,
            utilisation: self.utilisation(1, step_s),
            memory_bytes: self.memory_bytes[0],
            memory_peak_bytes: self.memory_bytes[1],
            sent_bytes,
            loss_scale: report.loss_scale,
            skipped_so_far: report.skipped_so_far,
            skipped: report.skipped.as_ref().map(ToString::to_string),
            outlier: report.outlier.as_ref().map(ToString::to_string),
        }
    }

    /// Tokens per second and utilisation since the last line, which is now.
    fn pace(&mut self) -> [f64; 2] {
        let Lately { since, tokens, steps } = self.lately;
        let seconds = since.elapsed().as_secs_f64();
        let pace = [tokens as f64 / seconds, self.utilisation(steps, seconds)];
        self.lately = Lately { since: Instant::now(), tokens: 0, steps: 0 };
        pace
    }

    fn utilisation(&mut self, steps: u64, seconds: f64) -> f64 {
        let Scale { tokens_per_step, flops_per_token, .. } = self.scale;
        self.peak.utilisation((steps * tokens_per_step) as f64 * flops_per_token / seconds)
    }
}

/// What was counted between two readings.
fn since(now: [Count; Verb::ALL.len()], before: [Count; Verb::ALL.len()]) -> [Count; Verb::ALL.len()] {
    let mut sent = now;
    for (sent, before) in sent.iter_mut().zip(before) {
        // Whoever reads the meter may also have reset it.
        *sent = Count {
            calls: sent.calls.saturating_sub(before.calls),
            elements: sent.elements.saturating_sub(before.elements),
            bytes: sent.bytes.saturating_sub(before.bytes),
        };
    }
    sent
}

/// How many steps it takes until so much time has passed.
fn steps_within(time: Duration, step_s: f64) -> u64 {
    ((time.as_secs_f64() / step_s.max(1e-9)) as u64).clamp(1, LOOK_STEPS_MAX)
}

/// What this rank holds. Of what tensors have held in passing since the last look it is the most; what is resident besides is the
/// process's.
fn held(rank: usize, trainer: &Trainer) -> RankMemory {
    let (Bytes { parameters, gradients, optimizer }, in_flight) = trainer.bytes();
    let held = parameters + gradients + optimizer + in_flight;
    let activations = take_peak_bytes().saturating_sub(held);
    let process = (resident_bytes("VmRSS:") as usize).saturating_sub(held + activations);
    let [parameters, gradients, optimizer, in_flight, activations, process] =
        [parameters, gradients, optimizer, in_flight, activations, process].map(|bytes| bytes as u64);
    RankMemory { rank, parameters, gradients, optimizer, in_flight, activations, process }
}

/// A figure of this process's, as the system counts it.
pub(crate) fn resident_bytes(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(key));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).map_or(0, |kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_seconds_apart_and_never_more_than_so_many_steps() {
        assert_eq!(steps_within(LOOK, 0.5), 10);
        assert_eq!(steps_within(LOOK, 60.), 1);
        assert_eq!(steps_within(LOOK, 0.), LOOK_STEPS_MAX);
    }
}
