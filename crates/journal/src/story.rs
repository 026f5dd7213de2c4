//! What happened to a run, as pieces and as sentences.
//!
//! A [`Story`] hears a run's lines in their order and keeps its attempts (where each began, how far it came, how it ended) and its
//! events, each a dated sentence. What comes often, saves and evaluations, becomes one event for as long as nothing else happens.
//! It keeps no step and draws nothing: a dashboard and a report tell the same story from it.

use crate::words::{amount, count, counted, digits, duration, listed};
use crate::{Entry, HeldOut, Launch, Saved, Setback, Start, Step, What};

/// How far the clocks of a supervisor and of a first rank may be apart.
const CLOCKS_APART_S: f64 = 60.;

/// Of each kind of oddity so many are told one by one; then they are counted.
const TOLD_ONE_BY_ONE: u64 = 20;

/// Oddities at most so many steps apart are one event.
const STEPS_APART: u64 = 10;

/// A run's attempts and events so far.
#[derive(Clone, Debug, Default)]
pub struct Story {
    attempts: Vec<Attempt>,
    events: Vec<Event>,
    outcome: Outcome,
    time_s: Option<(f64, f64)>,
    skipped: u64,
    outliers: u64,
    notes: u64,
    lost_s: f64,
    steps_again: u64,
}

/// A piece of a run: ranks that were started together.
#[derive(Clone, Debug, Default)]
pub struct Attempt {
    /// When it was launched, or where nobody launched it, began.
    pub time_s: f64,
    /// How many ranks.
    pub ranks: usize,
    /// What the supervisor said of it, if there is one.
    pub launch: Option<Launch>,
    /// What the first rank said at its start, if it came to that.
    pub start: Option<Box<Start>>,
    /// The first and the last step that it made, if it made any.
    pub steps: Option<(u64, u64)>,
    /// When it was last heard of.
    pub heard_s: f64,
    /// What the failure before it has cost.
    pub setback: Option<Setback>,
    /// How it ended.
    pub end: End,
}

/// How an attempt ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum End {
    /// It has not, as far as was written down.
    #[default]
    Open,
    /// It failed.
    Failed {
        /// When.
        time_s: f64,
        /// The last step that it was seen at; zero if it came to none.
        step: u64,
        /// What happened.
        text: String,
    },
    /// With the run.
    Ended,
    /// Nobody wrote down how: the next one was started by hand.
    Silent,
}

/// What became of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing was written yet.
    #[default]
    Nothing,
    /// It goes on, or was ended by what nobody could write down.
    Open,
    /// It made its last step.
    Finished,
    /// It saved, to be started again.
    Saved,
    /// Somebody interrupted it.
    Interrupted,
    /// It failed for good.
    Failed {
        /// The exit code.
        code: u8,
    },
}

/// What an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Ranks were started.
    Started,
    /// An attempt failed.
    Failed,
    /// Ranks are at work again.
    Again,
    /// Checkpoints.
    Saved,
    /// Evaluations.
    HeldOut,
    /// Steps that updated nothing.
    Skipped,
    /// Figures far outside what they usually are.
    Outlier,
    /// What people should read.
    Note,
    /// Steps were traced.
    Traced,
    /// The run has ended.
    Ended,
}

impl Kind {
    /// One word for it.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Started => "start",
            Kind::Failed => "failure",
            Kind::Again => "at work",
            Kind::Saved => "saved",
            Kind::HeldOut => "held out",
            Kind::Skipped => "skipped",
            Kind::Outlier => "outlier",
            Kind::Note => "note",
            Kind::Traced => "trace",
            Kind::Ended => "end",
        }
    }

    /// One sign for it.
    pub fn sign(self) -> &'static str {
        match self {
            Kind::Started => "▶",
            Kind::Failed => "✕",
            Kind::Again => "↻",
            Kind::Saved => "●",
            Kind::HeldOut => "○",
            Kind::Skipped | Kind::Outlier | Kind::Note => "!",
            Kind::Traced => "◆",
            Kind::Ended => "■",
        }
    }

    /// What comes often, and does not part what comes before it from what comes after it.
    fn is_routine(self) -> bool {
        matches!(self, Kind::Saved | Kind::HeldOut | Kind::Skipped | Kind::Outlier)
    }
}

/// Something that happened, or several of a kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// When; the first time, if several times.
    pub time_s: f64,
    /// At which step; zero before the first.
    pub step: u64,
    /// The last such step, if several.
    pub last_step: u64,
    /// How often.
    pub times: u64,
    /// About what.
    pub kind: Kind,
    /// What, in a sentence.
    pub text: String,
    /// How long training stood still, all times together.
    stood_still_s: f64,
}

impl Event {
    /// The step or steps that it was at, in words that fit a column: `812`, `400–800`, nothing before the first.
    pub fn steps(&self) -> String {
        match (self.step, self.last_step) {
            (0, 0) => String::new(),
            (first, last) if first < last => format!("{}–{}", count(first), count(last)),
            (step, _) => count(step),
        }
    }
}

impl Story {
    /// Of lines in their order.
    pub fn of<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Self {
        let mut story = Story::default();
        entries.into_iter().for_each(|entry| story.hear(entry));
        story
    }

    /// Hears the next line.
    pub fn hear(&mut self, entry: &Entry) {
        let now = entry.time_s;
        let (first, last) = self.time_s.unwrap_or((now, now));
        self.time_s = Some((first.min(now), last.max(now)));
        match &entry.what {
            What::Launched(launch) => self.launched(now, launch),
            What::Start(start) => self.started(now, start),
            What::Step(step) => self.step(now, step),
            What::Failed { attempt, step, text } => self.failed(now, *attempt, *step, text),
            What::Again(setback) => self.again(now, setback),
            What::Ended { code, restarts, lost_s } => self.ended(now, *code, *restarts, *lost_s),
            What::Saved(saved) => self.saved(now, saved),
            What::HeldOut(held_out) => self.held_out(now, held_out),
            What::Note { step, text } => {
                self.notes += 1;
                match self.notes <= TOLD_ONE_BY_ONE * 10 {
                    true => self.tell(now, *step, Kind::Note, sentence(text)),
                    false => self.more(*step, Kind::Note, 0., "notes"),
                }
            }
            What::Trace { first_step, steps, path } => {
                self.tell(now, *first_step, Kind::Traced, format!("Traced {} to {path}.", counted(*steps, "step")));
            }
            What::Memory { .. } | What::Traffic(_) => (),
        }
        if let (Some(attempt), Outcome::Nothing | Outcome::Open) = (self.attempts.last_mut(), self.outcome) {
            attempt.heard_s = attempt.heard_s.max(now);
            self.outcome = Outcome::Open;
        }
    }

    /// The attempts, the first one first.
    pub fn attempts(&self) -> &[Attempt] {
        &self.attempts
    }

    /// What happened, in the order in which it did.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// What became of it.
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// The times of the first and the last line.
    pub fn time_s(&self) -> Option<(f64, f64)> {
        self.time_s
    }

    /// How often it was started again after a failure.
    pub fn restarts(&self) -> u64 {
        let again = |pair: &&[Attempt]| matches!(pair[0].end, End::Failed { .. });
        self.attempts.windows(2).filter(again).count() as u64
    }

    /// What that has cost, beside steps made again.
    pub fn lost_s(&self) -> f64 {
        self.lost_s
    }

    /// How many steps had to be made again, as the supervisor saw it.
    pub fn steps_again(&self) -> u64 {
        self.steps_again
    }

    /// What was said last at a start.
    pub fn last_start(&self) -> Option<&Start> {
        self.attempts.iter().rev().find_map(|attempt| attempt.start.as_deref())
    }

    fn launched(&mut self, now: f64, launch: &Launch) {
        // Its clock is behind the first rank's: the start has been heard already.
        if let Some(attempt) = self.attempts.last_mut()
            && attempt.launch.is_none()
            && attempt.end == End::Open
            && (now - attempt.time_s).abs() < CLOCKS_APART_S
        {
            attempt.launch = Some(launch.clone());
            self.tell_start_again();
            return;
        }
        self.begin(Attempt { time_s: now, ranks: launch.ranks, launch: Some(launch.clone()), ..Attempt::default() });
    }

    fn started(&mut self, now: f64, start: &Start) {
        match self.attempts.last_mut() {
            Some(attempt) if attempt.start.is_none() && attempt.end == End::Open => {
                attempt.start = Some(Box::new(start.clone()));
                attempt.ranks = start.ranks;
                self.tell_start_again();
            }
            _ => {
                let start = Some(Box::new(start.clone()));
                let ranks = start.as_ref().map_or(0, |start| start.ranks);
                self.begin(Attempt { time_s: now, ranks, start, ..Attempt::default() });
            }
        }
    }

    fn begin(&mut self, mut attempt: Attempt) {
        if let Some(before) = self.attempts.last_mut()
            && before.end == End::Open
        {
            before.end = End::Silent;
            let (time_s, step) = (before.heard_s, before.steps.map_or(0, |(_, last)| last));
            let text = "Nothing more was written down of these ranks.".to_string();
            self.tell(time_s, step, Kind::Failed, text);
        }
        attempt.heard_s = attempt.time_s;
        self.outcome = Outcome::Open;
        let time_s = attempt.time_s;
        self.attempts.push(attempt);
        let step = self.start_step();
        self.tell(time_s, step, Kind::Started, self.start_sentence());
    }

    /// The sentence of a start, once more is known of it.
    fn tell_start_again(&mut self) {
        let (text, step) = (self.start_sentence(), self.start_step());
        if let Some(event) = self.events.iter_mut().rev().find(|event| event.kind == Kind::Started) {
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
            None => "Started on ",
            Some(End::Failed { .. }) => "Started again on ",
            Some(_) => "Taken up again on ",
        }
        .to_string();
        text += &counted(attempt.ranks as u64, "rank");
        if let Some(Launch { hosts, missing, .. }) = &attempt.launch {
            match hosts.as_slice() {
                [] => (),
                [only] => text += &format!(" of host {only}"),
                several => text += &format!(" of hosts {}", listed(several)),
            }
            match missing.as_slice() {
                [] => (),
                [only] => text += &format!(", without host {only}, which does not answer"),
                several => text += &format!(", without hosts {}, which do not answer", listed(several)),
            }
        }
        if let Some(start) = &attempt.start {
            let comma = if text.contains(", without") { "," } else { "" };
            text += &format!("{comma} at stage {}", start.stage);
            match &start.resumed_from {
                Some(checkpoint) => {
                    text += &format!("; goes on with step {} from {checkpoint}", count(start.first_step));
                }
                None if before.is_some() => text += ", from the beginning",
                None => (),
            }
        }
        text + "."
    }

    fn step(&mut self, now: f64, step: &Step) {
        if self.attempts.is_empty() {
            self.attempts.push(Attempt { time_s: now, ..Attempt::default() });
        }
        if let Some(attempt) = self.attempts.last_mut() {
            let first = attempt.steps.map_or(step.step, |(first, _)| first);
            attempt.steps = Some((first, step.step));
        }
        if let Some(why) = &step.skipped {
            self.skipped += 1;
            let text = format!("Step {} updated nothing: {}", count(step.step), sentence(why));
            self.odd(now, step.step, Kind::Skipped, text, self.skipped);
        }
        if let Some(what) = &step.outlier {
            self.outliers += 1;
            self.odd(now, step.step, Kind::Outlier, sentence(what), self.outliers);
        }
    }

    /// An oddity of a step: told, or counted where it is one of many.
    fn odd(&mut self, now: f64, step: u64, kind: Kind, text: String, so_far: u64) {
        let near = self.recent(kind).is_some_and(|event| step.saturating_sub(event.last_step) <= STEPS_APART);
        let noun = if kind == Kind::Skipped { "steps updated nothing" } else { "steps were outliers" };
        match near || so_far > TOLD_ONE_BY_ONE {
            true if self.recent(kind).is_some() => self.more(step, kind, 0., noun),
            _ => self.tell(now, step, kind, text),
        }
    }

    fn failed(&mut self, now: f64, number: u64, step: u64, text: &str) {
        let is_it = |attempt: &Attempt| {
            matches!(attempt.end, End::Open | End::Silent)
                && attempt.launch.as_ref().is_some_and(|launch| launch.attempt == number)
        };
        // The next start may have been heard before, by another clock; no further back than that.
        let recent = self.attempts.len().saturating_sub(2);
        let place = self.attempts[recent..].iter().rposition(is_it).map(|place| recent + place);
        let end = End::Failed { time_s: now, step, text: text.to_string() };
        let Some(attempt) = place.or(self.attempts.len().checked_sub(1)).map(|place| &mut self.attempts[place]) else {
            return self.tell(now, step, Kind::Failed, sentence(text));
        };
        let was = std::mem::replace(&mut attempt.end, end);
        match self.events.iter_mut().rev().find(|event| event.kind == Kind::Failed) {
            Some(event) if was == End::Silent => {
                (event.step, event.last_step, event.text) = (step, step, sentence(text));
                self.tell_start_again();
            }
            _ => self.tell(now, step, Kind::Failed, sentence(text)),
        }
    }

    fn again(&mut self, now: f64, setback: &Setback) {
        self.lost_s += setback.lost_s;
        self.steps_again = self.steps_again.saturating_add(setback.steps_again);
        if let Some(attempt) = self.attempts.last_mut() {
            attempt.setback = Some(setback.clone());
        }
        let Setback { step, lost_s, noticed_s, steps_again, .. } = setback;
        let repeated = match steps_again {
            0 => "no step is made again".to_string(),
            1 => "1 step is made again".to_string(),
            many => format!("{} steps are made again", count(*many)),
        };
        let text = format!(
            "At work again at step {} after {}, of which {} until the failure was noticed; {repeated}.",
            count(*step),
            duration(*lost_s),
            duration(*noticed_s),
        );
        self.tell(now, *step, Kind::Again, text);
    }

    fn ended(&mut self, now: f64, code: u8, restarts: u64, lost_s: f64) {
        self.outcome = match code {
            0 => Outcome::Finished,
            75 => Outcome::Saved,
            130 => Outcome::Interrupted,
            code => Outcome::Failed { code },
        };
        let took = duration(now - self.time_s.map_or(now, |(first, _)| first));
        let mut text = match self.outcome {
            Outcome::Finished => format!("Finished {took} after the first start"),
            Outcome::Saved => "Saved and ended as it was asked to; it can be started again".to_string(),
            Outcome::Interrupted => "Interrupted".to_string(),
            _ => format!("Failed for good, with exit code {code}"),
        };
        if restarts > 0 {
            let times = if restarts == 1 { "once".to_string() } else { format!("{} times", count(restarts)) };
            text += &format!(". It was started again {times}, for which {} were lost", duration(lost_s));
            if self.steps_again > 0 {
                text += &format!(" beside {} made again", counted(self.steps_again, "step"));
            }
        }
        let mut step = 0;
        if let Some(attempt) = self.attempts.last_mut() {
            attempt.heard_s = attempt.heard_s.max(now);
            step = attempt.steps.map_or(0, |(_, last)| last);
            if attempt.end == End::Open {
                attempt.end = End::Ended;
            }
        }
        self.tell(now, step, Kind::Ended, text + ".");
    }

    fn saved(&mut self, now: f64, saved: &Saved) {
        if self.recent(Kind::Saved).is_some() {
            let noun = format!("checkpoints, the last of {}", amount(saved.bytes as f64));
            return self.more(saved.step, Kind::Saved, saved.stood_still_s, &noun);
        }
        let text = format!(
            "Saved {} in {}; training stood still for {}.",
            amount(saved.bytes as f64),
            duration(saved.took_s),
            duration(saved.stood_still_s)
        );
        self.tell(now, saved.step, Kind::Saved, text);
        if let Some(event) = self.events.last_mut() {
            event.stood_still_s = saved.stood_still_s;
        }
    }

    fn held_out(&mut self, now: f64, held_out: &HeldOut) {
        let bits = held_out.bits_per_byte.map_or(String::new(), |bits| format!(", {} bits a byte", digits(bits, 3)));
        let figure = format!("loss {}{bits} on text that was held out", digits(held_out.loss, 4));
        match self.recent(Kind::HeldOut) {
            Some(event) => {
                (event.times, event.last_step) = (event.times + 1, held_out.step);
                event.text = format!("Measured {} times; last, {figure}.", count(event.times));
            }
            None => self.tell(now, held_out.step, Kind::HeldOut, format!("Measured: {figure}.")),
        }
    }

    /// The last event of this kind, if nothing but routine came after it.
    fn recent(&mut self, kind: Kind) -> Option<&mut Event> {
        let place = self.events.iter().rposition(|event| event.kind == kind || !event.kind.is_routine())?;
        Some(&mut self.events[place]).filter(|event| event.kind == kind)
    }

    fn more(&mut self, step: u64, kind: Kind, stood_still_s: f64, noun: &str) {
        let Some(event) = self.events.iter_mut().rev().find(|event| event.kind == kind) else { return };
        (event.times, event.last_step) = (event.times + 1, step);
        event.stood_still_s += stood_still_s;
        let times = count(event.times);
        if kind == Kind::Saved {
            let still = duration(event.stood_still_s);
            event.text = format!("Saved {times} {noun}; training stood still for {still} in all.");
            return;
        }
        // What was said of the first stays.
        let first = match event.times {
            2 => std::mem::take(&mut event.text),
            _ => event.text.split_once(" The first: ").map_or(String::new(), |(_, first)| first.to_string()),
        };
        event.text = format!("{times} {noun}. The first: {first}");
    }

    fn tell(&mut self, time_s: f64, step: u64, kind: Kind, text: String) {
        self.events.push(Event { time_s, step, last_step: step, times: 1, kind, text, stood_still_s: 0. });
    }
}

/// With a capital at its beginning and a stop at its end, and not endless.
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

    fn told(lines: Vec<(f64, What)>) -> Story {
        let entries: Vec<Entry> = lines.into_iter().map(|(time_s, what)| Entry { time_s, what }).collect();
        Story::of(&entries)
    }

    fn texts(story: &Story) -> Vec<&str> {
        story.events().iter().map(|event| event.text.as_str()).collect()
    }

    fn launched(attempt: u64, ranks: usize, missing: &[&str]) -> What {
        let missing = missing.iter().map(ToString::to_string).collect();
        What::Launched(Launch { attempt, ranks, hosts: vec!["a".into()], missing })
    }

    fn start(ranks: usize, first_step: u64) -> What {
        let resumed_from = (first_step > 1).then(|| format!("step-{}", first_step - 1));
        What::Start(Box::new(Start { ranks, stage: 3, first_step, resumed_from, ..Start::default() }))
    }

    fn step(step: u64) -> What {
        What::Step(Step { step, loss: 3., ..Step::default() })
    }

    #[test]
    fn a_death_and_a_lost_host_are_told_in_order() {
        let failed = What::Failed { attempt: 1, step: 31, text: "rank 2 died".to_string() };
        let setback = Setback { attempt: 2, step: 30, lost_s: 3.1, noticed_s: 0.1, steps_again: 1 };
        let story = told(vec![
            (0., launched(1, 4, &[])),
            (2., start(4, 1)),
            (3., step(1)),
            (31., step(30)),
            (32., failed),
            (33., launched(2, 2, &["b"])),
            (34., start(2, 30)),
            (35., What::Again(setback)),
            (36., step(30)),
            (7200., What::Ended { code: 0, restarts: 1, lost_s: 3.1 }),
        ]);
        assert_eq!(
            texts(&story),
            [
                "Started on 4 ranks of host a at stage 3.",
                "Rank 2 died.",
                "Started again on 2 ranks of host a, without host b, which does not answer, at stage 3; goes on with step 30 from step-29.",
                "At work again at step 30 after 3.1 s, of which 0.10 s until the failure was noticed; 1 step is made again.",
                "Finished 2 h after the first start. It was started again once, for which 3.1 s were lost beside 1 step made again.",
            ]
        );
        let [first, second] = story.attempts() else { panic!("{:?}", story.attempts()) };
        assert_eq!((first.steps, second.steps, second.ranks), (Some((1, 30)), Some((30, 30)), 2));
        assert!(matches!(first.end, End::Failed { step: 31, .. }) && second.end == End::Ended);
        assert_eq!((story.outcome(), story.restarts(), story.steps_again()), (Outcome::Finished, 1, 1));
    }

    #[test]
    fn clocks_that_differ_do_not_make_attempts_of_their_own() {
        let failed = What::Failed { attempt: 1, step: 1, text: "gone.".to_string() };
        let story = told(vec![
            (0., start(4, 1)),
            (1., launched(1, 4, &[])),
            (2., step(1)),
            (3., start(4, 1)),
            (3.1, failed),
            (3.2, launched(2, 4, &[])),
        ]);
        // The first rank's clock is ahead: its second start comes before the first one's failure.
        assert_eq!(story.attempts().len(), 2, "{:#?}", story.attempts());
        assert_eq!(story.attempts()[1].launch.as_ref().unwrap().attempt, 2);
        let told = ["Started on 4 ranks of host a at stage 3.", "Gone."];
        assert_eq!((&texts(&story)[..2], texts(&story).len()), (&told[..], 3));
        assert!(texts(&story)[2].starts_with("Started again on 4 ranks"));
    }

    #[test]
    fn what_nobody_wrote_down_is_said() {
        let story = told(vec![(0., start(4, 1)), (1., step(1)), (9., start(2, 2)), (10., step(2))]);
        assert_eq!(texts(&story)[1], "Nothing more was written down of these ranks.");
        assert_eq!(texts(&story)[2], "Taken up again on 2 ranks at stage 3; goes on with step 2 from step-1.");
        assert_eq!((story.events()[1].time_s, story.outcome()), (1., Outcome::Open));
        assert_eq!(told(vec![]).outcome(), Outcome::Nothing);
    }

    #[test]
    fn what_comes_often_is_one_event() {
        let saved =
            |step| What::Saved(Saved { step, bytes: 1_000_000, took_s: 2., stood_still_s: 0.5, ..Saved::default() });
        let held_out = |step| What::HeldOut(HeldOut { step, loss: 2.5, ..HeldOut::default() });
        let note = What::Note { step: 3, text: "look".to_string() };
        let story = told(vec![
            (1., saved(1)),
            (2., held_out(1)),
            (3., saved(2)),
            (4., held_out(2)),
            (5., note),
            (6., saved(4)),
        ]);
        assert_eq!(
            texts(&story),
            [
                "Saved 2 checkpoints, the last of 1.00 MB; training stood still for 1.0 s in all.",
                "Measured 2 times; last, loss 2.500 on text that was held out.",
                "Look.",
                "Saved 1.00 MB in 2.0 s; training stood still for 0.50 s.",
            ]
        );
        let odd = |step| What::Step(Step { step, skipped: Some("inf".to_string()), ..Step::default() });
        let story = told((1..100_000).map(|number| (number as f64, odd(number * 11))).collect());
        assert_eq!(story.events().len(), 20);
        assert_eq!(story.events()[19].times, 99_980);
        assert!(
            story.events()[19].text.ends_with("The first: Step 220 updated nothing: Inf."),
            "{:?}",
            story.events()[19]
        );
    }

    #[test]
    fn outcomes_are_what_codes_mean() {
        let ended = |code| told(vec![(0., step(1)), (1., What::Ended { code, restarts: 0, lost_s: 0. })]).outcome();
        let all = [Outcome::Finished, Outcome::Saved, Outcome::Interrupted, Outcome::Failed { code: 1 }];
        assert_eq!([0, 75, 130, 1].map(ended), all);
    }
}
