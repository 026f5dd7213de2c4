//! The data of a run that the dashboard shows. It is computed when entries arrive, not for every frame.

use std::time::{SystemTime, UNIX_EPOCH};

use shardwise_journal::{Entry, EntryKind, Evaluation, Outcome, RankMemory, Run, Start, Step, Timeline};

/// A run without a supervisor counts as running for this long after its last entry.
const RUNNING_S: f64 = 120.;

/// A run as the dashboard shows it.
#[derive(Default)]
pub(crate) struct RunView {
    /// The start of the newest attempt.
    pub(crate) start: Start,
    /// The time of the first entry.
    pub(crate) started_s: f64,
    /// The time of the newest entry.
    pub(crate) last_s: f64,
    /// The losses, throughputs and evaluation losses by step. A repeated step counts once.
    pub(crate) losses: Vec<(f64, f64)>,
    pub(crate) throughput: Vec<(f64, f64)>,
    pub(crate) evaluations: Vec<(f64, f64)>,
    pub(crate) last_step: Option<Step>,
    pub(crate) last_evaluation: Option<Evaluation>,
    /// The remaining time, at the pace of the last steps.
    pub(crate) remaining_s: Option<f64>,
    pub(crate) memory: Vec<RankMemory>,
    /// The attempts and events.
    pub(crate) timeline: Timeline,
    /// Whether its supervisor is connected.
    pub(crate) is_live: bool,
}

/// The status of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Running,
    Finished,
    Saved,
    Interrupted,
    Failed,
    /// Its journal has no end, but it is not running.
    Lost,
}

impl RunView {
    pub(crate) fn from_run(run: &Run) -> Self {
        let mut view = RunView::default();
        let entries = run.entries();
        view.started_s = entries.first().map_or(0., |entry| entry.time_s);
        view.last_s = entries.last().map_or(0., |entry| entry.time_s);
        for entry in entries {
            view.add(entry);
        }
        let steps = run.steps();
        let number = |step: &Step| step.step as f64;
        view.losses = steps.iter().map(|(_, step)| (number(step), step.loss)).collect();
        let is_measured = |(_, step): &&(f64, &Step)| step.tokens_per_s.is_finite() && step.tokens_per_s > 0.;
        view.throughput = steps.iter().filter(is_measured).map(|(_, step)| (number(step), step.tokens_per_s)).collect();
        view.remaining_s = remaining_s(&steps, view.start.steps);
        view.last_step = steps.last().map(|(_, step)| (*step).clone());
        view
    }

    fn add(&mut self, entry: &Entry) {
        match &entry.kind {
            EntryKind::Start(start) => {
                self.start = Start { recipe: String::new(), ..(**start).clone() };
                let is_before = |(step, _): &(f64, f64)| *step < start.first_step as f64;
                self.evaluations.retain(is_before);
            }
            EntryKind::Memory { ranks, .. } => self.memory.clone_from(ranks),
            EntryKind::Evaluation(evaluation) => {
                self.evaluations.push((evaluation.step as f64, evaluation.loss));
                self.last_evaluation = Some(evaluation.clone());
            }
            _ => (),
        }
        self.timeline.add(entry);
    }

    /// Returns the status of the run at a time in seconds since 1970.
    pub(crate) fn status(&self, now_s: f64) -> Status {
        let is_supervised = self.timeline.attempts().iter().any(|attempt| attempt.launch.is_some());
        match self.timeline.outcome() {
            _ if self.is_live => Status::Running,
            Outcome::Finished => Status::Finished,
            Outcome::Saved => Status::Saved,
            Outcome::Interrupted => Status::Interrupted,
            Outcome::Failed { .. } => Status::Failed,
            Outcome::Unfinished | Outcome::Empty if !is_supervised && now_s - self.last_s < RUNNING_S => {
                Status::Running
            }
            Outcome::Unfinished | Outcome::Empty => Status::Lost,
        }
    }

    /// Returns the text for a status, with the number of restarts.
    pub(crate) fn status_text(&self, status: Status) -> String {
        let text = match status {
            Status::Running => "running",
            Status::Finished => "finished",
            Status::Saved => "saved, can be resumed",
            Status::Interrupted => "interrupted",
            Status::Failed => "failed",
            Status::Lost => "stopped unexpectedly",
        };
        match self.timeline.restarts() {
            0 => text.to_string(),
            1 => format!("{text}; restarted once"),
            times => format!("{text}; restarted {times} times"),
        }
    }
}

/// The current time, in seconds since 1970.
pub(crate) fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0., |since| since.as_secs_f64())
}

/// The remaining time, at the pace of the last tenth of the steps, or the last hundred if those are fewer.
fn remaining_s(steps: &[(f64, &Step)], last: u64) -> Option<f64> {
    let (end_s, end) = steps.last()?;
    let some = (steps.len() / 10).clamp(5, 100).min(steps.len() - 1);
    let (first_s, first) = steps[steps.len() - 1 - some];
    let pace = (end_s - first_s) / end.step.checked_sub(first.step).filter(|&steps| steps > 0)? as f64;
    Some(pace * last.checked_sub(end.step)? as f64).filter(|remaining| remaining.is_finite() && *remaining >= 0.)
}
