//! The lines of a run that someone who comes late is shown first: few, however long the run is.

use shardwise_journal::{Entry, What};

/// How many steps are kept, and how many lines of other kinds.
const STEPS_MAX: usize = 2048;
const OTHERS_MAX: usize = 512;

/// Lines of a run's journal. Of steps that are too many every other old one is left out; of what ranks hold and send only the
/// newest line is kept.
#[derive(Clone, Debug, Default)]
pub struct History {
    steps: Vec<Entry>,
    others: Vec<Entry>,
    memory: Option<Entry>,
    traffic: Option<Entry>,
}

impl History {
    /// Takes a line.
    pub fn add(&mut self, entry: Entry) {
        match entry.what {
            What::Memory { .. } => self.memory = Some(entry),
            What::Traffic(_) => self.traffic = Some(entry),
            What::Step(_) => {
                self.steps.push(entry);
                if self.steps.len() > STEPS_MAX {
                    thin(&mut self.steps);
                }
            }
            _ => {
                self.others.push(entry);
                if self.others.len() > OTHERS_MAX {
                    // The first says what the run is.
                    self.others.remove(1);
                }
            }
        }
    }

    /// What is kept, in the order of its times.
    pub fn entries(&self) -> Vec<&Entry> {
        let mut entries: Vec<&Entry> =
            self.steps.iter().chain(&self.others).chain(&self.memory).chain(&self.traffic).collect();
        entries.sort_by(|a, b| a.time_s.total_cmp(&b.time_s));
        entries
    }
}

/// Leaves every other line of the older three quarters.
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
    fn a_long_run_is_a_short_history_from_its_first_step_to_its_last() {
        let mut history = History::default();
        for step in 1..=100_000 {
            let time_s = step as f64;
            history.add(Entry { time_s, what: What::Step(Step { step, ..Step::default() }) });
            history.add(Entry { time_s, what: What::Memory { step, ranks: Vec::new() } });
            history.add(Entry { time_s, what: What::Note { step, text: String::new() } });
        }
        let entries = history.entries();
        assert!(entries.len() <= STEPS_MAX + OTHERS_MAX + 1, "{}", entries.len());
        let steps: Vec<u64> = history.steps.iter().map(|entry| entry.time_s as u64).collect();
        assert_eq!((steps.first(), steps.last()), (Some(&1), Some(&100_000)));
        assert!(steps.is_sorted() && history.others[0].time_s == 1.);
    }
}
