//! The journal entries that a late viewer receives first. Their number is bounded, however long the run is.

use shardwise_journal::{Entry, EntryKind};

/// The maximum number of steps that are kept, and of entries of other kinds.
const STEPS_MAX: usize = 2048;
const OTHERS_MAX: usize = 512;

/// A selection of a run's journal entries. When there are too many steps, every other old one is dropped. Of memory and traffic
/// entries, only the newest is kept.
#[derive(Clone, Debug, Default)]
pub struct History {
    steps: Vec<Entry>,
    others: Vec<Entry>,
    memory: Option<Entry>,
    traffic: Option<Entry>,
}

impl History {
    /// Adds an entry.
    pub fn add(&mut self, entry: Entry) {
        match entry.kind {
            EntryKind::Memory { .. } => self.memory = Some(entry),
            EntryKind::Traffic(_) => self.traffic = Some(entry),
            EntryKind::Step(_) => {
                self.steps.push(entry);
                if self.steps.len() > STEPS_MAX {
                    thin(&mut self.steps);
                }
            }
            _ => {
                self.others.push(entry);
                if self.others.len() > OTHERS_MAX {
                    // The first entry identifies the run.
                    self.others.remove(1);
                }
            }
        }
    }

    /// Returns the kept entries, ordered by time.
    pub fn entries(&self) -> Vec<&Entry> {
        let mut entries: Vec<&Entry> =
            self.steps.iter().chain(&self.others).chain(&self.memory).chain(&self.traffic).collect();
        entries.sort_by(|a, b| a.time_s.total_cmp(&b.time_s));
        entries
    }
}

/// Drops every other entry of the oldest three quarters.
fn thin(steps: &mut Vec<Entry>) {
    let old = steps.len() / 4 * 3;
    let mut index = 0;
    steps.retain(|_| {
        index += 1;
        index > old || index % 2 == 1
    });
}

#[cfg(test)]
mod tests {
    use shardwise_journal::Step;

    use super::*;

    #[test]
    fn a_long_run_has_a_short_history_from_its_first_step_to_its_last() {
        let mut history = History::default();
        for step in 1..=100_000 {
            let time_s = step as f64;
            history.add(Entry { time_s, kind: EntryKind::Step(Step { step, ..Step::default() }) });
            history.add(Entry { time_s, kind: EntryKind::Memory { step, ranks: Vec::new() } });
            history.add(Entry { time_s, kind: EntryKind::Note { step, text: String::new() } });
        }
        let entries = history.entries();
        assert!(entries.len() <= STEPS_MAX + OTHERS_MAX + 1, "{}", entries.len());
        let steps: Vec<u64> = history.steps.iter().map(|entry| entry.time_s as u64).collect();
        assert_eq!((steps.first(), steps.last()), (Some(&1), Some(&100_000)));
        assert!(steps.is_sorted() && history.others[0].time_s == 1.);
    }
}
