//! What is shown of a run, taken from its lines once, and not with every drawing.

use shardwise_journal::{self as journal, Entry, HeldOut, Outcome, RankMemory, Run, Start, Step, What};

/// A run that nobody supervises is thought to be at work for so long after its last line.
const QUIET_S: f64 = 120.;

/// A run, as it is shown.
#[derive(Default)]
pub(crate) struct Story {
    /// What the newest attempt began with.
    pub(crate) start: Start,
    /// When the first began.
    pub(crate) began_s: f64,
    /// The newest line of all.
    pub(crate) last_s: f64,
    /// The steps as they were made last: number and loss, and number and tokens per second.
    pub(crate) losses: Vec<(f64, f64)>,
    pub(crate) speeds: Vec<(f64, f64)>,
    pub(crate) held_out: Vec<(f64, f64)>,
    pub(crate) last: Option<Step>,
    pub(crate) last_held_out: Option<HeldOut>,
    /// How long is left, at the pace of the last steps.
    pub(crate) left_s: Option<f64>,
    pub(crate) memory: Vec<RankMemory>,
    /// What happened to it.
    pub(crate) told: journal::Story,
    /// Whether its supervisor is there.
    pub(crate) is_live: bool,
}

/// How a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Running,
    Finished,
    Saved,
    Interrupted,
    Failed,
    /// It does not say that it has ended, and nobody is at work on it.
    Quiet,
}

impl Story {
    pub(crate) fn of(run: &Run) -> Self {
        let mut story = Story::default();
        let entries = run.entries();
        story.began_s = entries.first().map_or(0., |entry| entry.time_s);
        story.last_s = entries.last().map_or(0., |entry| entry.time_s);
        for entry in entries {
            story.take(entry);
        }
        let steps = run.steps();
        let number = |step: &Step| step.step as f64;
        story.losses = steps.iter().map(|(_, step)| (number(step), step.loss)).collect();
        let is_measured = |(_, step): &&(f64, &Step)| step.tokens_per_s.is_finite() && step.tokens_per_s > 0.;
        story.speeds = steps.iter().filter(is_measured).map(|(_, step)| (number(step), step.tokens_per_s)).collect();
        story.left_s = left_s(&steps, story.start.steps);
        story.last = steps.last().map(|(_, step)| (*step).clone());
        story
    }

    fn take(&mut self, entry: &Entry) {
        match &entry.what {
            What::Start(start) => {
                self.start = Start { recipe: String::new(), ..(**start).clone() };
                let before = |(step, _): &(f64, f64)| *step < start.first_step as f64;
                self.held_out.retain(before);
            }
            What::Memory { ranks, .. } => self.memory.clone_from(ranks),
            What::HeldOut(held_out) => {
                self.held_out.push((held_out.step as f64, held_out.loss));
                self.last_held_out = Some(held_out.clone());
            }
            _ => (),
        }
        self.told.hear(entry);
    }

    /// How the run is, at that time in seconds since 1970.
    pub(crate) fn status(&self, now_s: f64) -> Status {
        let is_supervised = self.told.attempts().iter().any(|attempt| attempt.launch.is_some());
        match self.told.outcome() {
            _ if self.is_live => Status::Running,
            Outcome::Finished => Status::Finished,
            Outcome::Saved => Status::Saved,
            Outcome::Interrupted => Status::Interrupted,
            Outcome::Failed { .. } => Status::Failed,
            Outcome::Open | Outcome::Nothing if !is_supervised && now_s - self.last_s < QUIET_S => Status::Running,
            Outcome::Open | Outcome::Nothing => Status::Quiet,
        }
    }

    /// The same in words.
    pub(crate) fn status_text(&self, status: Status) -> String {
        let text = match status {
            Status::Running => "running",
            Status::Finished => "finished",
            Status::Saved => "saved, to be started again",
            Status::Interrupted => "interrupted",
            Status::Failed => "failed",
            Status::Quiet => "gone without a word",
        };
        match self.told.restarts() {
            0 => text.to_string(),
            1 => format!("{text}; was started again once"),
            times => format!("{text}; was started again {times} times"),
        }
    }
}

/// How long is left, at the pace of the last tenth of a run, but of no more than a hundred steps.
fn left_s(steps: &[(f64, &Step)], last: u64) -> Option<f64> {
    let (end_s, end) = steps.last()?;
    let some = (steps.len() / 10).clamp(5, 100).min(steps.len() - 1);
    let (begin_s, begin) = steps[steps.len() - 1 - some];
    let pace = (end_s - begin_s) / end.step.checked_sub(begin.step).filter(|&made| made > 0)? as f64;
    Some(pace * last.checked_sub(end.step)? as f64).filter(|left| left.is_finite() && *left >= 0.)
}
