//! Measures a run: throughput, MFU, memory and traffic.
//!
//! Every rank counts its own figures, which costs a few clock readings per step. One small all-reduce combines them: for every
//! printed line the highest memory and traffic of any rank, and every few seconds a survey with the memory of the first ranks by
//! kind and the traffic by collective. Its size does not grow with the number of ranks. In each survey rank 0 announces the step of
//! the next one, so that all ranks know when it is due.

use std::time::{Duration, Instant};

use shardwise_comm::{Count, Group, ReduceOp, Verb};
use shardwise_journal::{ExpertLoad, RANKS_KEPT_MAX, RankMemory, Step, StepTraffic, VerbTraffic};
use shardwise_plan::Dtype;
use shardwise_torch::tch::Device;
use shardwise_train::{Report, Trainer};
use shardwise_zero::Bytes;

use crate::error::Result;
use crate::expected_traffic::{ByVerb, ExpectedTraffic};
use crate::memory_limit::{memory_now_and_peak, take_tensor_peak};
use crate::peak_flops::{PeakFlops, measure_peak_flops};
use crate::spike::Spike;

/// The approximate time between surveys, and the maximum in steps.
const SURVEY_PERIOD: Duration = Duration::from_secs(5);
const SURVEY_STEPS_MAX: u64 = 10_000;

/// The number of figures of the run as a whole: current and peak resident memory, bytes sent, the step of the next survey, and
/// whether to measure the peak FLOP/s again.
const FIGURES_OF_RUN: usize = 5;

/// The number of figures of each collective: calls, bytes, and expected bytes.
const FIGURES_OF_VERB: usize = 3;

/// The size of a step, and the peak of the hardware.
#[derive(Clone, Copy)]
pub(crate) struct Workload {
    /// The tokens of a step on all ranks, including ignored targets.
    pub(crate) tokens_per_step: u64,
    pub(crate) flops_per_token: f64,
    /// The measured peak of all ranks together.
    pub(crate) peak_flops_per_s: f64,
    /// The type in which units compute.
    pub(crate) dtype: Dtype,
    pub(crate) device: Device,
}

/// Measures a run; one per rank.
pub(crate) struct Meter<'a> {
    world: &'a Group,
    workload: Workload,
    peak: PeakFlops,
    expected_traffic: ExpectedTraffic,
    began: Instant,
    loading: Duration,
    window: LineWindow,
    /// The start of this step, and the traffic before it.
    step_began: Instant,
    sent_before: [Count; Verb::ALL.len()],
    /// Measured and expected traffic, and steps, since the last survey.
    sent: [Count; Verb::ALL.len()],
    expected: ByVerb,
    /// Whether the step before the current one has left updates to it.
    has_deferred_update: bool,
    steps: u64,
    /// The step of the next survey.
    next_survey: u64,
    /// The highest current and peak resident memory of any rank, as of the last all-reduce.
    memory_bytes: [u64; 2],
}

/// The time, tokens and steps since the last line.
#[derive(Clone, Copy)]
struct LineWindow {
    /// The time of the last line, moved forward by the time that was not training.
    since: Instant,
    tokens: u64,
    steps: u64,
}

/// The metrics of a step.
pub(crate) struct StepMetrics {
    /// The journal entry.
    pub(crate) step: Step,
    /// Tokens per second and MFU since the last line, if a line is due.
    pub(crate) throughput: Option<[f64; 2]>,
    /// The survey, if one was due.
    pub(crate) survey: Option<Survey>,
}

/// Memory and traffic of all ranks.
pub(crate) struct Survey {
    pub(crate) memory: Vec<RankMemory>,
    pub(crate) traffic: StepTraffic,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(world: &'a Group, workload: Workload, expected_traffic: ExpectedTraffic) -> Self {
        let now = Instant::now();
        Meter {
            world,
            peak: PeakFlops::new(workload.peak_flops_per_s),
            workload,
            expected_traffic,
            began: now,
            loading: Duration::ZERO,
            window: LineWindow { since: now, tokens: 0, steps: 0 },
            step_began: now,
            sent_before: world.meter().by_verb(),
            sent: Default::default(),
            expected: Default::default(),
            has_deferred_update: false,
            steps: 0,
            next_survey: 0,
            memory_bytes: [0; 2],
        }
    }

    /// Starts a step. Time and traffic since the last step do not count towards it.
    pub(crate) fn start_step(&mut self, trainer: &Trainer) {
        self.has_deferred_update = trainer.has_deferred_update();
        self.step_began = Instant::now();
        self.sent_before = self.world.meter().by_verb();
    }

    /// Loads data, and measures how long that takes.
    pub(crate) fn time_loading<T>(&mut self, load: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let loaded = load();
        self.loading += began.elapsed();
        loaded
    }

    /// Does work that is not training, and excludes its time from the throughput.
    pub(crate) fn exclude<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = work();
        self.window.since += began.elapsed();
        done
    }

    /// Resets the next survey after a rollback, because steps repeat.
    pub(crate) fn roll_back(&mut self) {
        self.next_survey = 0;
    }

    /// Ends a step. All ranks call it together, with the same `is_printed`.
    pub(crate) fn end_step(
        &mut self,
        trainer: &Trainer,
        (report, spike): (&Report, Option<&Spike>),
        is_printed: bool,
        last: u64,
    ) -> Result<StepMetrics> {
        let step_s = self.step_began.elapsed().as_secs_f64();
        let sent = since(self.world.meter().by_verb(), self.sent_before);
        self.add(sent, report);
        let surveys = report.step >= self.next_survey || report.step == last;
        let mut sent_bytes = sent.iter().map(|count| count.bytes).sum();
        let (mut survey, mut remeasures_peak) = (None, false);
        if is_printed || surveys {
            let [now, peak] = memory_now_and_peak(trainer.options().device);
            let mut own = vec![now, peak, sent_bytes, 0, 0];
            if surveys {
                own[3] = if self.world.rank() == 0 { report.step + steps_within(SURVEY_PERIOD, step_s) } else { 0 };
                // Rank 0's figures are the ones that are printed.
                let remeasures = self.world.rank() == 0 && report.step < last && self.peak.is_worth_measuring();
                own[4] = u64::from(remeasures);
                self.add_own_figures(trainer, &mut own);
            }
            let own = own.into_iter().map(|figure| figure as i64).collect();
            let most: Vec<i64> = self.world.all_reduce("memory and traffic", ReduceOp::Max, own).wait()?;
            let most: Vec<u64> = most.into_iter().map(|figure| figure as u64).collect();
            (self.memory_bytes, sent_bytes) = ([most[0], most[1]], most[2]);
            if surveys {
                self.next_survey = most[3];
                survey = Some(self.read_survey(report.step, &most[FIGURES_OF_RUN..]));
                remeasures_peak = most[4] > 0;
            }
        }
        let step = Step { spike: spike.map(ToString::to_string), ..self.step(report, step_s, sent_bytes) };
        let throughput = is_printed.then(|| self.throughput());
        if remeasures_peak {
            let (world, Workload { dtype, device, .. }) = (self.world, self.workload);
            let flops_per_s = self.exclude(|| measure_peak_flops(world, dtype, device))?;
            self.peak.raise(flops_per_s);
        }
        Ok(StepMetrics { step, throughput, survey })
    }

    /// The fraction of the time spent loading data, on the rank with the largest. All ranks call it together.
    pub(crate) fn share_of_loading(&self) -> Result<f64> {
        let share = self.loading.as_secs_f64() / self.began.elapsed().as_secs_f64().max(1e-9);
        let most = self.world.all_reduce("time for data", ReduceOp::Max, vec![(share * 1e9) as i64]).wait()?[0];
        Ok(most as f64 / 1e9)
    }

    fn add(&mut self, sent: [Count; Verb::ALL.len()], report: &Report) {
        self.window.tokens += report.tokens;
        self.window.steps += 1;
        self.steps += 1;
        for (index, count) in sent.into_iter().enumerate() {
            self.sent[index] = [self.sent[index], count].into_iter().sum();
            let of_update = if report.skipped.is_none() { self.expected_traffic.update[index] } else { 0 };
            let of_deferred = if self.has_deferred_update { self.expected_traffic.deferred[index] } else { 0 };
            self.expected[index] += self.expected_traffic.step[index] + of_update + of_deferred;
        }
    }

    /// Appends this rank's figures for a survey: those of each collective, then its memory in its own slot.
    fn add_own_figures(&self, trainer: &Trainer, figures: &mut Vec<u64>) {
        for (sent, expected) in self.sent.iter().zip(self.expected) {
            figures.extend([sent.calls, sent.bytes, expected]);
        }
        for rank in 0..self.world.size().min(RANKS_KEPT_MAX) {
            let own = if rank == self.world.rank() { rank_memory(rank, trainer) } else { RankMemory::default() };
            figures.extend(own.kinds().map(|(_, bytes)| bytes));
        }
    }

    /// Reads the combined figures, and resets the counters.
    fn read_survey(&mut self, step: u64, figures: &[u64]) -> Survey {
        let (verbs, ranks) = figures.split_at(FIGURES_OF_VERB * Verb::ALL.len());
        let mut traffic = StepTraffic { step, steps: std::mem::take(&mut self.steps), verbs: Vec::new() };
        for (verb, figures) in Verb::ALL.iter().zip(verbs.chunks_exact(FIGURES_OF_VERB)) {
            let [calls, bytes, expected_bytes] = [figures[0], figures[1], figures[2]];
            if calls > 0 {
                traffic.verbs.push(VerbTraffic { verb: verb.to_string(), calls, bytes, expected_bytes });
            }
        }
        (self.sent, self.expected) = Default::default();
        let kinds = RankMemory::default().kinds().len();
        let memory = ranks.chunks_exact(kinds).enumerate().map(|(rank, figures)| RankMemory {
            rank,
            parameters: figures[0],
            gradients: figures[1],
            optimizer: figures[2],
            unsharded: figures[3],
            activations: figures[4],
            process: figures[5],
        });
        Survey { memory: memory.collect(), traffic }
    }

    fn step(&mut self, report: &Report, step_s: f64, sent_bytes: u64) -> Step {
        Step {
            step: report.step,
            loss: report.loss,
            grad_norm: report.grad_norm,
            lr: report.lr,
            tokens: report.tokens,
            tokens_per_s: report.tokens as f64 / step_s,
            step_s,
            mfu: self.mfu(1, step_s),
            memory_bytes: self.memory_bytes[0],
            memory_peak_bytes: self.memory_bytes[1],
            sent_bytes,
            loss_scale: report.loss_scale,
            skipped_so_far: report.skipped_so_far,
            skipped: report.skipped.as_ref().map(ToString::to_string),
            spike: None,
            experts: report
                .expert_tokens
                .iter()
                .zip(&report.dropped_tokens)
                .filter(|(tokens, _)| !tokens.is_empty())
                .map(|(tokens, &dropped)| ExpertLoad::new(tokens, dropped))
                .collect(),
        }
    }

    /// Tokens per second and MFU since the last line. The next line counts from now.
    fn throughput(&mut self) -> [f64; 2] {
        let LineWindow { since, tokens, steps } = self.window;
        let seconds = since.elapsed().as_secs_f64();
        let throughput = [tokens as f64 / seconds, self.mfu(steps, seconds)];
        self.window = LineWindow { since: Instant::now(), tokens: 0, steps: 0 };
        throughput
    }

    fn mfu(&mut self, steps: u64, seconds: f64) -> f64 {
        let Workload { tokens_per_step, flops_per_token, .. } = self.workload;
        self.peak.mfu((steps * tokens_per_step) as f64 * flops_per_token / seconds)
    }
}

/// The difference between two readings of the traffic.
fn since(now: [Count; Verb::ALL.len()], before: [Count; Verb::ALL.len()]) -> [Count; Verb::ALL.len()] {
    let mut sent = now;
    for (sent, before) in sent.iter_mut().zip(before) {
        // The meter may have been reset in between.
        *sent = Count {
            calls: sent.calls.saturating_sub(before.calls),
            elements: sent.elements.saturating_sub(before.elements),
            bytes: sent.bytes.saturating_sub(before.bytes),
        };
    }
    sent
}

/// The number of steps that fit into this time.
fn steps_within(time: Duration, step_s: f64) -> u64 {
    ((time.as_secs_f64() / step_s.max(1e-9)) as u64).clamp(1, SURVEY_STEPS_MAX)
}

/// This rank's memory by kind. `activations` is the peak of all other tensors since the last survey; `process` is the remaining
/// resident memory.
fn rank_memory(rank: usize, trainer: &Trainer) -> RankMemory {
    let (Bytes { parameters, gradients, optimizer }, unsharded) = trainer.bytes();
    let held = parameters + gradients + optimizer + unsharded;
    let device = trainer.options().device;
    let activations = take_tensor_peak(device).saturating_sub(held);
    let [now, _] = memory_now_and_peak(device);
    let process = (now as usize).saturating_sub(held + activations);
    let [parameters, gradients, optimizer, unsharded, activations, process] =
        [parameters, gradients, optimizer, unsharded, activations, process].map(|bytes| bytes as u64);
    RankMemory { rank, parameters, gradients, optimizer, unsharded, activations, process }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn surveys_are_seconds_apart_with_a_maximum_in_steps() {
        assert_eq!(steps_within(SURVEY_PERIOD, 0.5), 10);
        assert_eq!(steps_within(SURVEY_PERIOD, 60.), 1);
        assert_eq!(steps_within(SURVEY_PERIOD, 0.), SURVEY_STEPS_MAX);
    }
}
