//! The timeline of a run: its attempts and its events.
//!
//! A [`Timeline`] reads a run's entries in order. It keeps the attempts (where each started, how far it got, how it ended) and the
//! events, each a dated sentence. Consecutive saves become one event, and so do consecutive evaluations. It keeps no steps and draws
//! nothing; the dashboard and the report both show it.

use crate::format::{format_bytes, format_count, format_count_of, format_digits, format_duration, join_list_up_to};
use crate::{Entry, EntryKind, Evaluation, Launch, Resumed, Saved, Start, Step};

/// The maximum difference between the clocks of the supervisor and of rank 0.
const CLOCK_SKEW_MAX_S: f64 = 60.;

/// This many anomalies of each kind get their own event; later ones are only counted.
const SINGLE_EVENTS_MAX: u64 = 20;

/// Anomalies at most this many steps apart become one event.
const STEPS_APART: u64 = 10;

/// The maximum number of parts in a list of hosts.
const HOSTS_SHOWN_MAX: usize = 6;

/// The attempts and events of a run so far.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    attempts: Vec<Attempt>,
    events: Vec<Event>,
    outcome: Outcome,
    time_s: Option<(f64, f64)>,
    skipped: u64,
    spikes: u64,
    notes: u64,
    lost_s: f64,
    repeated_steps: u64,
}

/// One attempt at a run: ranks that were launched together.
#[derive(Clone, Debug, Default)]
pub struct Attempt {
    /// When it was launched; without a supervisor, when it started.
    pub time_s: f64,
    /// The world size.
    pub ranks: usize,
    /// The supervisor's entry, if there is a supervisor.
    pub launch: Option<Launch>,
    /// Rank 0's entry, once the ranks have started.
    pub start: Option<Box<Start>>,
    /// The first and the last completed step, if there is any.
    pub steps: Option<(u64, u64)>,
    /// The time of its last entry.
    pub last_entry_s: f64,
    /// The cost of the failure before it.
    pub resumed: Option<Resumed>,
    /// How it ended.
    pub end: AttemptEnd,
}

/// How an attempt ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum AttemptEnd {
    /// It has not ended, as far as the journal shows.
    #[default]
    Unfinished,
    /// It failed.
    Failed {
        /// When the failure was noticed.
        time_s: f64,
        /// The last step that it was seen at; 0 if it did not get to one.
        step: u64,
        /// What happened.
        text: String,
    },
    /// It ended with the run.
    Ended,
    /// The journal does not say: the next attempt was started by hand.
    Unknown,
}

/// The outcome of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// The journal is empty.
    #[default]
    Empty,
    /// It is still running, or was killed together with its supervisor.
    Unfinished,
    /// It completed its last step.
    Finished,
    /// It saved on request, to be resumed later.
    Saved,
    /// It was interrupted.
    Interrupted,
    /// It failed, and was not restarted.
    Failed {
        /// The exit code.
        code: u8,
    },
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// An attempt started.
    Started,
    /// An attempt failed.
    Failed,
    /// The ranks train again after a failure.
    Resumed,
    /// Checkpoints were saved.
    Saved,
    /// The model was evaluated.
    Evaluated,
    /// Updates were skipped.
    Skipped,
    /// Figures were far outside their usual range.
    Spike,
    /// A message for people.
    Note,
    /// Steps were traced.
    Traced,
    /// The run ended.
    Ended,
}

impl EventKind {
    /// Returns its name, for a table.
    pub fn name(self) -> &'static str {
        match self {
            EventKind::Started => "start",
            EventKind::Failed => "failure",
            EventKind::Resumed => "resumed",
            EventKind::Saved => "saved",
            EventKind::Evaluated => "evaluation",
            EventKind::Skipped => "skipped",
            EventKind::Spike => "spike",
            EventKind::Note => "note",
            EventKind::Traced => "trace",
            EventKind::Ended => "end",
        }
    }

    /// Returns its symbol, which is one column wide.
    pub fn symbol(self) -> &'static str {
        match self {
            EventKind::Started => "▶",
            EventKind::Failed => "✕",
            EventKind::Resumed => "↻",
            EventKind::Saved => "●",
            EventKind::Evaluated => "○",
            EventKind::Skipped | EventKind::Spike | EventKind::Note => "!",
            EventKind::Traced => "◆",
            EventKind::Ended => "■",
        }
    }

    /// Whether events of this kind are frequent. They do not keep the events before and after them from being merged.
    fn is_routine(self) -> bool {
        matches!(self, EventKind::Saved | EventKind::Evaluated | EventKind::Skipped | EventKind::Spike)
    }
}

/// Something that happened, once or several times.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// When it first happened.
    pub time_s: f64,
    /// The step at which it first happened; 0 before the first step.
    pub step: u64,
    /// The step at which it last happened.
    pub last_step: u64,
    /// How many times it happened.
    pub times: u64,
    /// What kind of event it is.
    pub kind: EventKind,
    /// What happened, in a sentence.
    pub text: String,
    /// How long training stalled, over all occurrences.
    stalled_s: f64,
}

impl Event {
    /// Returns the step or steps for a narrow column: `812`, `400–800`, or nothing before the first step.
    pub fn steps(&self) -> String {
        match (self.step, self.last_step) {
            (0, 0) => String::new(),
            (first, last) if first < last => format!("{}–{}", format_count(first), format_count(last)),
            (step, _) => format_count(step),
        }
    }
}

impl Timeline {
    /// Creates the timeline of entries that are ordered by time.
    pub fn from_entries<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Self {
        let mut timeline = Timeline::default();
        entries.into_iter().for_each(|entry| timeline.add(entry));
        timeline
    }

    /// Adds the next entry.
    pub fn add(&mut self, entry: &Entry) {
        let now = entry.time_s;
        let (first, last) = self.time_s.unwrap_or((now, now));
        self.time_s = Some((first.min(now), last.max(now)));
        match &entry.kind {
            EntryKind::Launched(launch) => self.add_launch(now, launch),
            EntryKind::Start(start) => self.add_start(now, start),
            EntryKind::Step(step) => self.add_step(now, step),
            EntryKind::Failed { attempt, step, text } => self.add_failure(now, *attempt, *step, text),
            EntryKind::Resumed(resumed) => self.add_resumption(now, resumed),
            EntryKind::Ended { code, restarts, lost_s } => self.add_end(now, *code, *restarts, *lost_s),
            EntryKind::Saved(saved) => self.add_save(now, saved),
            EntryKind::Evaluation(evaluation) => self.add_evaluation(now, evaluation),
            EntryKind::Note { step, text } => {
                self.notes += 1;
                match self.notes <= SINGLE_EVENTS_MAX * 10 {
                    true => self.push_event(now, *step, EventKind::Note, sentence(text)),
                    false => self.extend_event(*step, EventKind::Note, 0., "notes"),
                }
            }
            EntryKind::Trace { first_step, steps, path } => {
                let text = format!("Traced {} to {path}.", format_count_of(*steps, "step"));
                self.push_event(now, *first_step, EventKind::Traced, text);
            }
            EntryKind::Memory { .. } | EntryKind::Traffic(_) => (),
        }
        if let (Some(attempt), Outcome::Empty | Outcome::Unfinished) = (self.attempts.last_mut(), self.outcome) {
            attempt.last_entry_s = attempt.last_entry_s.max(now);
            self.outcome = Outcome::Unfinished;
        }
    }

    /// Returns the attempts, in order.
    pub fn attempts(&self) -> &[Attempt] {
        &self.attempts
    }

    /// Returns the events, in order.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Returns the outcome of the run.
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Returns the times of the first and the last entry.
    pub fn time_s(&self) -> Option<(f64, f64)> {
        self.time_s
    }

    /// Returns the number of restarts after a failure.
    pub fn restarts(&self) -> u64 {
        let is_restart = |pair: &&[Attempt]| matches!(pair[0].end, AttemptEnd::Failed { .. });
        self.attempts.windows(2).filter(is_restart).count() as u64
    }

    /// Returns the time that restarts cost, not counting repeated steps.
    pub fn lost_s(&self) -> f64 {
        self.lost_s
    }

    /// Returns the number of steps that had to be repeated, as the supervisor counted them.
    pub fn repeated_steps(&self) -> u64 {
        self.repeated_steps
    }

    /// Returns the start of the latest attempt that got that far.
    pub fn last_start(&self) -> Option<&Start> {
        self.attempts.iter().rev().find_map(|attempt| attempt.start.as_deref())
    }

    fn add_launch(&mut self, now: f64, launch: &Launch) {
        // The supervisor's clock is ahead of rank 0's, so the start appears before the launch.
        if let Some(attempt) = self.attempts.last_mut()
            && attempt.launch.is_none()
            && attempt.end == AttemptEnd::Unfinished
            && (now - attempt.time_s).abs() < CLOCK_SKEW_MAX_S
        {
            attempt.launch = Some(launch.clone());
            self.update_start_event();
            return;
        }
        let launch = launch.clone();
        self.push_attempt(Attempt { time_s: now, ranks: launch.ranks, launch: Some(launch), ..Attempt::default() });
    }

    fn add_start(&mut self, now: f64, start: &Start) {
        match self.attempts.last_mut() {
            Some(attempt) if attempt.start.is_none() && attempt.end == AttemptEnd::Unfinished => {
                attempt.start = Some(Box::new(start.clone()));
                attempt.ranks = start.ranks;
                self.update_start_event();
            }
            _ => {
                let start = Some(Box::new(start.clone()));
                let ranks = start.as_ref().map_or(0, |start| start.ranks);
                self.push_attempt(Attempt { time_s: now, ranks, start, ..Attempt::default() });
            }
        }
    }

    fn push_attempt(&mut self, mut attempt: Attempt) {
        if let Some(before) = self.attempts.last_mut()
            && before.end == AttemptEnd::Unfinished
        {
            before.end = AttemptEnd::Unknown;
            let (time_s, step) = (before.last_entry_s, before.steps.map_or(0, |(_, last)| last));
            let text = "The journal of this attempt ends here.".to_string();
            self.push_event(time_s, step, EventKind::Failed, text);
        }
        attempt.last_entry_s = attempt.time_s;
        self.outcome = Outcome::Unfinished;
        let time_s = attempt.time_s;
        self.attempts.push(attempt);
        let step = self.start_step();
        self.push_event(time_s, step, EventKind::Started, self.start_sentence());
    }

    /// Rewrites the event of the latest start, now that more is known about it.
    fn update_start_event(&mut self) {
        let (text, step) = (self.start_sentence(), self.start_step());
        if let Some(event) = self.events.iter_mut().rev().find(|event| event.kind == EventKind::Started) {
            (event.text, event.step, event.last_step) = (text, step, step);
        }
    }

    fn start_step(&self) -> u64 {
        let start = self.attempts.last().and_then(|attempt| attempt.start.as_ref());
        start.map_or(0, |start| start.first_step)
    }

    fn start_sentence(&self) -> String {
        let Some(attempt) = self.attempts.last() else { return String::new() };
        let before = self.attempts.len().checked_sub(2).map(|before| &self.attempts[before].end);
        let mut text = match before {
            None => "Started with ",
            Some(AttemptEnd::Failed { .. }) => "Restarted with ",
            Some(_) => "Continued with ",
        }
        .to_string();
        text += &format_count_of(attempt.ranks as u64, "rank");
        if let Some(Launch { hosts, missing, .. }) = &attempt.launch {
            match hosts.as_slice() {
                [] => (),
                [only] => text += &format!(" on host {only}"),
                several => text += &format!(" on hosts {}", join_list_up_to(several, HOSTS_SHOWN_MAX)),
            }
            match missing.as_slice() {
                [] => (),
                [only] => text += &format!(" (host {only} does not answer)"),
                several => text += &format!(" (hosts {} do not answer)", join_list_up_to(several, HOSTS_SHOWN_MAX)),
            }
        }
        if let Some(start) = &attempt.start {
            text += &format!(", ZeRO stage {}", start.zero_stage);
            match &start.resumed_from {
                Some(checkpoint) => {
                    text += &format!(", resuming at step {} from {checkpoint}", format_count(start.first_step));
                }
                None if before.is_some() => text += ", from the beginning",
                None => (),
            }
        }
        text + "."
    }

    fn add_step(&mut self, now: f64, step: &Step) {
        if self.attempts.is_empty() {
            self.attempts.push(Attempt { time_s: now, ..Attempt::default() });
        }
        if let Some(attempt) = self.attempts.last_mut() {
            let first = attempt.steps.map_or(step.step, |(first, _)| first);
            attempt.steps = Some((first, step.step));
        }
        if let Some(why) = &step.skipped {
            self.skipped += 1;
            let text = format!("Step {} was skipped: {}", format_count(step.step), sentence(why));
            self.add_anomaly(now, step.step, EventKind::Skipped, text, self.skipped);
        }
        if let Some(spike) = &step.spike {
            self.spikes += 1;
            self.add_anomaly(now, step.step, EventKind::Spike, sentence(spike), self.spikes);
        }
    }

    /// Adds an event for an anomaly of a step, or counts it if there are many.
    fn add_anomaly(&mut self, now: f64, step: u64, kind: EventKind, text: String, so_far: u64) {
        let is_near = self.recent_event(kind).is_some_and(|event| step.saturating_sub(event.last_step) <= STEPS_APART);
        let noun = if kind == EventKind::Skipped { "steps were skipped" } else { "steps had spikes" };
        match is_near || so_far > SINGLE_EVENTS_MAX {
            true if self.recent_event(kind).is_some() => self.extend_event(step, kind, 0., noun),
            _ => self.push_event(now, step, kind, text),
        }
    }

    fn add_failure(&mut self, now: f64, number: u64, step: u64, text: &str) {
        let is_it = |attempt: &Attempt| {
            matches!(attempt.end, AttemptEnd::Unfinished | AttemptEnd::Unknown)
                && attempt.launch.as_ref().is_some_and(|launch| launch.attempt == number)
        };
        // If rank 0's clock is behind, the next start appears before this failure, so look back one attempt, but no further.
        let recent = self.attempts.len().saturating_sub(2);
        let index = self.attempts[recent..].iter().rposition(is_it).map(|index| recent + index);
        let end = AttemptEnd::Failed { time_s: now, step, text: text.to_string() };
        let Some(attempt) = index.or(self.attempts.len().checked_sub(1)).map(|index| &mut self.attempts[index]) else {
            return self.push_event(now, step, EventKind::Failed, sentence(text));
        };
        let before = std::mem::replace(&mut attempt.end, end);
        match self.events.iter_mut().rev().find(|event| event.kind == EventKind::Failed) {
            Some(event) if before == AttemptEnd::Unknown => {
                (event.step, event.last_step, event.text) = (step, step, sentence(text));
                self.update_start_event();
            }
            _ => self.push_event(now, step, EventKind::Failed, sentence(text)),
        }
    }

    fn add_resumption(&mut self, now: f64, resumed: &Resumed) {
        self.lost_s += resumed.lost_s;
        self.repeated_steps = self.repeated_steps.saturating_add(resumed.repeated_steps);
        if let Some(attempt) = self.attempts.last_mut() {
            attempt.resumed = Some(resumed.clone());
        }
        let Resumed { step, lost_s, noticed_s, repeated_steps, .. } = resumed;
        let repeated = match repeated_steps {
            0 => "no step is repeated".to_string(),
            1 => "1 step is repeated".to_string(),
            many => format!("{} steps are repeated", format_count(*many)),
        };
        let text = format!(
            "Resumed at step {} after {}, of which {} until the failure was noticed; {repeated}.",
            format_count(*step),
            format_duration(*lost_s),
            format_duration(*noticed_s),
        );
        self.push_event(now, *step, EventKind::Resumed, text);
    }

    fn add_end(&mut self, now: f64, code: u8, restarts: u64, lost_s: f64) {
        self.outcome = match code {
            0 => Outcome::Finished,
            75 => Outcome::Saved,
            130 => Outcome::Interrupted,
            code => Outcome::Failed { code },
        };
        let took = format_duration(now - self.time_s.map_or(now, |(first, _)| first));
        let mut text = match self.outcome {
            Outcome::Finished => format!("Finished {took} after the first start"),
            Outcome::Saved => "Saved and stopped on request; the same command resumes the run".to_string(),
            Outcome::Interrupted => "Interrupted".to_string(),
            _ => format!("Failed with exit code {code}"),
        };
        if restarts > 0 {
            let times = if restarts == 1 { "once".to_string() } else { format!("{} times", format_count(restarts)) };
            text += &format!(". Restarted {times}, which cost {}", format_duration(lost_s));
            if self.repeated_steps > 0 {
                text += &format!(" and {}", format_count_of(self.repeated_steps, "repeated step"));
            }
        }
        let mut step = 0;
        if let Some(attempt) = self.attempts.last_mut() {
            attempt.last_entry_s = attempt.last_entry_s.max(now);
            step = attempt.steps.map_or(0, |(_, last)| last);
            if attempt.end == AttemptEnd::Unfinished {
                attempt.end = AttemptEnd::Ended;
            }
        }
        self.push_event(now, step, EventKind::Ended, text + ".");
    }

    fn add_save(&mut self, now: f64, saved: &Saved) {
        if self.recent_event(EventKind::Saved).is_some() {
            let noun = format!("checkpoints, the last of {}", format_bytes(saved.bytes as f64));
            return self.extend_event(saved.step, EventKind::Saved, saved.stalled_s, &noun);
        }
        let text = format!(
            "Saved {} in {}; training stalled for {}.",
            format_bytes(saved.bytes as f64),
            format_duration(saved.took_s),
            format_duration(saved.stalled_s)
        );
        self.push_event(now, saved.step, EventKind::Saved, text);
        if let Some(event) = self.events.last_mut() {
            event.stalled_s = saved.stalled_s;
        }
    }

    fn add_evaluation(&mut self, now: f64, evaluation: &Evaluation) {
        let bits = evaluation.bits_per_byte.map(|bits| format!(", {} bits per byte", format_digits(bits, 3)));
        let figures = format!("loss {}{}", format_digits(evaluation.loss, 4), bits.unwrap_or_default());
        match self.recent_event(EventKind::Evaluated) {
            Some(event) => {
                (event.times, event.last_step) = (event.times + 1, evaluation.step);
                event.text =
                    format!("Evaluated {} times on held-out text; the latest: {figures}.", format_count(event.times));
            }
            None => {
                let text = format!("Evaluated on held-out text: {figures}.");
                self.push_event(now, evaluation.step, EventKind::Evaluated, text);
            }
        }
    }

    /// The latest event of this kind, if only routine events followed it.
    fn recent_event(&mut self, kind: EventKind) -> Option<&mut Event> {
        let index = self.events.iter().rposition(|event| event.kind == kind || !event.kind.is_routine())?;
        Some(&mut self.events[index]).filter(|event| event.kind == kind)
    }

    /// Counts one more occurrence of the latest event of this kind.
    fn extend_event(&mut self, step: u64, kind: EventKind, stalled_s: f64, noun: &str) {
        let Some(event) = self.events.iter_mut().rev().find(|event| event.kind == kind) else { return };
        (event.times, event.last_step) = (event.times + 1, step);
        event.stalled_s += stalled_s;
        let times = format_count(event.times);
        if kind == EventKind::Saved {
            let stalled = format_duration(event.stalled_s);
            event.text = format!("Saved {times} {noun}; training stalled for {stalled} in total.");
            return;
        }
        // The text of the first occurrence is kept.
        let first = match event.times {
            2 => std::mem::take(&mut event.text),
            _ => event.text.split_once(" The first: ").map_or(String::new(), |(_, first)| first.to_string()),
        };
        event.text = format!("{times} {noun}. The first: {first}");
    }

    fn push_event(&mut self, time_s: f64, step: u64, kind: EventKind, text: String) {
        self.events.push(Event { time_s, step, last_step: step, times: 1, kind, text, stalled_s: 0. });
    }
}

/// Capitalizes a text, ends it with a full stop, and cuts it if it is very long.
fn sentence(text: &str) -> String {
    const CHARS_MAX: usize = 2000;
    let text = text.trim();
    let mut chars = text.chars();
    let mut sentence: String = chars.next().map(char::to_uppercase).into_iter().flatten().collect();
    sentence.extend(chars.by_ref().take(CHARS_MAX));
    if chars.next().is_some() {
        sentence.push('…');
    } else if !sentence.ends_with(['.', '!', '?', '…']) && !sentence.is_empty() {
        sentence.push('.');
    }
    sentence
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    fn timeline(entries: Vec<(f64, EntryKind)>) -> Timeline {
        let entries: Vec<Entry> = entries.into_iter().map(|(time_s, kind)| Entry { time_s, kind }).collect();
        Timeline::from_entries(&entries)
    }

    fn texts(timeline: &Timeline) -> Vec<&str> {
        timeline.events().iter().map(|event| event.text.as_str()).collect()
    }

    fn launched(attempt: u64, ranks: usize, missing: &[&str]) -> EntryKind {
        let missing = missing.iter().map(ToString::to_string).collect();
        EntryKind::Launched(Launch { attempt, ranks, hosts: vec!["a".into()], missing })
    }

    fn start(ranks: usize, first_step: u64) -> EntryKind {
        let resumed_from = (first_step > 1).then(|| format!("step-{}", first_step - 1));
        EntryKind::Start(Box::new(Start { ranks, zero_stage: 3, first_step, resumed_from, ..Start::default() }))
    }

    fn step(step: u64) -> EntryKind {
        EntryKind::Step(Step { step, loss: 3., ..Step::default() })
    }

    #[test]
    fn a_death_and_a_lost_host_are_told_in_order() {
        let failed = EntryKind::Failed { attempt: 1, step: 31, text: "rank 2 died".to_string() };
        let resumed = Resumed { attempt: 2, step: 30, lost_s: 3.1, noticed_s: 0.1, repeated_steps: 1 };
        let timeline = timeline(vec![
            (0., launched(1, 4, &[])),
            (2., start(4, 1)),
            (3., step(1)),
            (31., step(30)),
            (32., failed),
            (33., launched(2, 2, &["b"])),
            (34., start(2, 30)),
            (35., EntryKind::Resumed(resumed)),
            (36., step(30)),
            (7200., EntryKind::Ended { code: 0, restarts: 1, lost_s: 3.1 }),
        ]);
        assert_eq!(
            texts(&timeline),
            [
                "Started with 4 ranks on host a, ZeRO stage 3.",
                "Rank 2 died.",
                "Restarted with 2 ranks on host a (host b does not answer), ZeRO stage 3, resuming at step 30 from step-29.",
                "Resumed at step 30 after 3.1 s, of which 0.10 s until the failure was noticed; 1 step is repeated.",
                "Finished 2 h after the first start. Restarted once, which cost 3.1 s and 1 repeated step.",
            ]
        );
        let [first, second] = timeline.attempts() else { panic!("{:?}", timeline.attempts()) };
        assert_eq!((first.steps, second.steps, second.ranks), (Some((1, 30)), Some((30, 30)), 2));
        assert!(matches!(first.end, AttemptEnd::Failed { step: 31, .. }) && second.end == AttemptEnd::Ended);
        assert_eq!((timeline.outcome(), timeline.restarts(), timeline.repeated_steps()), (Outcome::Finished, 1, 1));
    }

    #[test]
    fn clock_skew_does_not_split_attempts() {
        let failed = EntryKind::Failed { attempt: 1, step: 1, text: "gone.".to_string() };
        let timeline = timeline(vec![
            (0., start(4, 1)),
            (1., launched(1, 4, &[])),
            (2., step(1)),
            (3., start(4, 1)),
            (3.1, failed),
            (3.2, launched(2, 4, &[])),
        ]);
        // Rank 0's clock is behind: its second start comes before the failure of the first attempt.
        assert_eq!(timeline.attempts().len(), 2, "{:#?}", timeline.attempts());
        assert_eq!(timeline.attempts()[1].launch.as_ref().unwrap().attempt, 2);
        let expected = ["Started with 4 ranks on host a, ZeRO stage 3.", "Gone."];
        assert_eq!((&texts(&timeline)[..2], texts(&timeline).len()), (&expected[..], 3));
        assert!(texts(&timeline)[2].starts_with("Restarted with 4 ranks"));
    }

    #[test]
    fn an_attempt_without_an_end_is_reported() {
        let cut_off = timeline(vec![(0., start(4, 1)), (1., step(1)), (9., start(2, 2)), (10., step(2))]);
        assert_eq!(texts(&cut_off)[1], "The journal of this attempt ends here.");
        assert_eq!(texts(&cut_off)[2], "Continued with 2 ranks, ZeRO stage 3, resuming at step 2 from step-1.");
        assert_eq!((cut_off.events()[1].time_s, cut_off.outcome()), (1., Outcome::Unfinished));
        assert_eq!(timeline(vec![]).outcome(), Outcome::Empty);
    }

    #[test]
    fn frequent_events_are_merged() {
        let saved =
            |step| EntryKind::Saved(Saved { step, bytes: 1_000_000, took_s: 2., stalled_s: 0.5, ..Saved::default() });
        let evaluation = |step| EntryKind::Evaluation(Evaluation { step, loss: 2.5, ..Evaluation::default() });
        let note = EntryKind::Note { step: 3, text: "look".to_string() };
        let merged = timeline(vec![
            (1., saved(1)),
            (2., evaluation(1)),
            (3., saved(2)),
            (4., evaluation(2)),
            (5., note),
            (6., saved(4)),
        ]);
        assert_eq!(
            texts(&merged),
            [
                "Saved 2 checkpoints, the last of 1.00 MB; training stalled for 1.0 s in total.",
                "Evaluated 2 times on held-out text; the latest: loss 2.500.",
                "Look.",
                "Saved 1.00 MB in 2.0 s; training stalled for 0.50 s.",
            ]
        );
        let skipped = |step| EntryKind::Step(Step { step, skipped: Some("inf".to_string()), ..Step::default() });
        let many = timeline((1..100_000).map(|number| (number as f64, skipped(number * 11))).collect());
        assert_eq!(many.events().len(), 20);
        assert_eq!(many.events()[19].times, 99_980);
        assert!(many.events()[19].text.ends_with("The first: Step 220 was skipped: Inf."), "{:?}", many.events()[19]);
    }

    #[test]
    fn outcomes_follow_from_exit_codes() {
        let ended =
            |code| timeline(vec![(0., step(1)), (1., EntryKind::Ended { code, restarts: 0, lost_s: 0. })]).outcome();
        let all = [Outcome::Finished, Outcome::Saved, Outcome::Interrupted, Outcome::Failed { code: 1 }];
        assert_eq!([0, 75, 130, 1].map(ended), all);
    }
}
