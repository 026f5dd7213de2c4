//! A run's figures as they are now, for whoever asks for them: few, however long the run is.

use shardwise_journal::{Entry, Launch, Run, StepTraffic, What};

/// The newest line of each kind, and of those that are counted all, without their texts.
#[derive(Default)]
pub(crate) struct Figures {
    latest: Vec<Entry>,
    counted: Vec<Entry>,
    sent: Option<Entry>,
}

impl Figures {
    /// Takes a line of the journal.
    pub(crate) fn add(&mut self, entry: &Entry) {
        let Entry { time_s, what } = entry.clone();
        let counted = |what| Entry { time_s, what };
        match what {
            What::Start(_) | What::Step(_) | What::Memory { .. } | What::HeldOut(_) => self.replace(entry.clone()),
            What::Note { .. } | What::Trace { .. } => (),
            What::Traffic(traffic) => self.sent = Some(counted(What::Traffic(self.sum(traffic)))),
            What::Failed { attempt, step, .. } => {
                self.counted.push(counted(What::Failed { attempt, step, text: String::new() }));
            }
            What::Launched(Launch { attempt, ranks, .. }) => {
                self.counted.push(counted(What::Launched(Launch { attempt, ranks, ..Launch::default() })));
            }
            what => self.counted.push(counted(what)),
        }
    }

    /// As a run that has said only this.
    pub(crate) fn run(&self) -> Run {
        let mut run = Run::heard();
        self.latest.iter().chain(&self.counted).chain(&self.sent).for_each(|entry| run.hear(entry.clone()));
        run
    }

    fn replace(&mut self, entry: Entry) {
        let kind = std::mem::discriminant(&entry.what);
        self.latest.retain(|known| std::mem::discriminant(&known.what) != kind);
        self.latest.push(entry);
    }

    /// All that was sent so far, with this.
    fn sum(&self, more: StepTraffic) -> StepTraffic {
        let Some(Entry { what: What::Traffic(before), .. }) = &self.sent else { return more };
        let mut sum = StepTraffic { step: more.step, steps: before.steps + more.steps, verbs: before.verbs.clone() };
        for verb in more.verbs {
            match sum.verbs.iter_mut().find(|known| known.verb == verb.verb) {
                None => sum.verbs.push(verb),
                Some(known) => {
                    known.calls = known.calls.saturating_add(verb.calls);
                    known.bytes = known.bytes.saturating_add(verb.bytes);
                    known.theory_bytes = known.theory_bytes.saturating_add(verb.theory_bytes);
                }
            }
        }
        sum
    }
}
