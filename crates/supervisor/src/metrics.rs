//! The current metrics of a run. Memory grows with the number of saves and attempts, by about a hundred bytes each, and not with the steps.

use shardwise_journal::{Entry, EntryKind, Launch, Run, Saved, StepTraffic};

/// The newest entry of each kind; for kinds that are counted, all entries, without most of their texts.
#[derive(Default)]
pub struct Metrics {
    latest: Vec<Entry>,
    counted: Vec<Entry>,
    sent: Option<Entry>,
}

impl Metrics {
    /// Adds a journal entry.
    pub fn add(&mut self, entry: &Entry) {
        let Entry { time_s, kind } = entry.clone();
        let counted = |kind| Entry { time_s, kind };
        match kind {
            EntryKind::Start(_) | EntryKind::Step(_) | EntryKind::Memory { .. } | EntryKind::Evaluation(_) => {
                self.replace(entry.clone());
            }
            EntryKind::Note { .. } | EntryKind::Trace { .. } => (),
            EntryKind::Traffic(traffic) => self.sent = Some(counted(EntryKind::Traffic(self.sum(traffic)))),
            EntryKind::Failed { attempt, step, .. } => {
                self.counted.push(counted(EntryKind::Failed { attempt, step, text: String::new() }));
            }
            EntryKind::Launched(Launch { attempt, ranks, .. }) => {
                self.counted.push(counted(EntryKind::Launched(Launch { attempt, ranks, ..Launch::default() })));
            }
            EntryKind::Saved(saved) => {
                self.counted.push(counted(EntryKind::Saved(Saved { address: String::new(), ..saved })));
            }
            kind => self.counted.push(counted(kind)),
        }
    }

    /// Returns a run with these entries only.
    pub fn to_run(&self) -> Run {
        let mut run = Run::empty();
        self.latest.iter().chain(&self.counted).chain(&self.sent).for_each(|entry| run.add(entry.clone()));
        run
    }

    fn replace(&mut self, entry: Entry) {
        let kind = std::mem::discriminant(&entry.kind);
        self.latest.retain(|known| std::mem::discriminant(&known.kind) != kind);
        self.latest.push(entry);
    }

    /// Adds traffic to the total so far.
    fn sum(&self, more: StepTraffic) -> StepTraffic {
        let Some(Entry { kind: EntryKind::Traffic(before), .. }) = &self.sent else { return more };
        let mut sum = StepTraffic { step: more.step, steps: before.steps + more.steps, verbs: before.verbs.clone() };
        for verb in more.verbs {
            match sum.verbs.iter_mut().find(|known| known.verb == verb.verb) {
                None => sum.verbs.push(verb),
                Some(known) => {
                    known.calls = known.calls.saturating_add(verb.calls);
                    known.bytes = known.bytes.saturating_add(verb.bytes);
                    known.expected_bytes = known.expected_bytes.saturating_add(verb.expected_bytes);
                }
            }
        }
        sum
    }
}
