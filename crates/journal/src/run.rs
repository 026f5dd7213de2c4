//! A run as one story, from what its first rank and its supervisor wrote.

use std::path::{Path, PathBuf};

use crate::{EVENTS, Entry, Error, METRICS, Reader, Result, Start, Step, What};

/// A run, as far as it was written down; [`Run::refresh`] reads what came since.
pub struct Run {
    folder: PathBuf,
    metrics: Reader,
    events: Reader,
    entries: Vec<Entry>,
}

impl Run {
    /// Reads a run's folder.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        if !folder.join(METRICS).exists() && !folder.join(EVENTS).exists() {
            return Err(Error::NoRun { path: folder.display().to_string() });
        }
        let [metrics, events] = [METRICS, EVENTS].map(|name| Reader::new(folder.join(name)));
        let mut run = Run { folder: folder.to_path_buf(), metrics, events, entries: Vec::new() };
        run.refresh()?;
        Ok(run)
    }

    /// A run of which nothing was written here: all of it is heard ([`Run::hear`]).
    pub fn heard() -> Self {
        let nowhere = || Reader::new("");
        Run { folder: PathBuf::new(), metrics: nowhere(), events: nowhere(), entries: Vec::new() }
    }

    /// Reads what was written since; whether that was anything.
    pub fn refresh(&mut self) -> Result<bool> {
        let before = self.entries.len();
        self.entries.append(&mut self.metrics.read()?);
        self.entries.append(&mut self.events.read()?);
        // Two clocks of one host, or of two that are near each other: what one process wrote stays in its order.
        self.entries.sort_by(|a, b| a.time_s.total_cmp(&b.time_s));
        Ok(self.entries.len() > before)
    }

    /// Adds what was heard and not read.
    pub fn hear(&mut self, entry: Entry) {
        let place = self.entries.partition_point(|known| known.time_s <= entry.time_s);
        self.entries.insert(place, entry);
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// All lines, in the order of their times.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Lines that could not be read.
    pub fn unknown(&self) -> u64 {
        self.metrics.unknown() + self.events.unknown()
    }

    /// Where attempts began, with their times, the first one first.
    pub fn starts(&self) -> Vec<(f64, &Start)> {
        let mut starts = Vec::new();
        for entry in &self.entries {
            if let What::Start(start) = &entry.what {
                starts.push((entry.time_s, &**start));
            }
        }
        starts
    }

    /// The steps as they were made last, with their times, in their order.
    pub fn steps(&self) -> Vec<(f64, &Step)> {
        let mut steps: Vec<(f64, &Step)> = Vec::new();
        for entry in &self.entries {
            match &entry.what {
                What::Start(start) => made_before(&mut steps, start.first_step),
                What::Step(step) => {
                    made_before(&mut steps, step.step);
                    steps.push((entry.time_s, step));
                }
                _ => (),
            }
        }
        steps
    }
}

/// Tells a run's lines one after the other, those of both files in the order of their times, and keeps none: a run of a
/// million steps takes no memory here. How many lines could not be read.
pub fn replay(folder: impl AsRef<Path>, mut hear: impl FnMut(Entry)) -> Result<u64> {
    let folder = folder.as_ref();
    if !folder.join(METRICS).exists() && !folder.join(EVENTS).exists() {
        return Err(Error::NoRun { path: folder.display().to_string() });
    }
    let [mut metrics, mut events] = [METRICS, EVENTS].map(|name| Reader::new(folder.join(name)));
    let (mut told, mut steps) = (0_u64, 0_u64);
    // The supervisor writes a few lines an attempt.
    let mut waiting = events.read()?.into_iter().peekable();
    metrics.each(|entry| {
        while let Some(event) = waiting.next_if(|event| event.time_s <= entry.time_s) {
            told += 1;
            hear(event);
        }
        steps += 1;
        hear(entry);
    })?;
    for event in waiting {
        told += 1;
        hear(event);
    }
    for (reader, name, known) in [(&metrics, METRICS, steps), (&events, EVENTS, told)] {
        if known == 0 && reader.unknown() > 0 {
            return Err(Error::NoJournal { path: folder.join(name).display().to_string(), lines: reader.unknown() });
        }
    }
    Ok(metrics.unknown() + events.unknown())
}

/// Leaves those that are not made again.
fn made_before(steps: &mut Vec<(f64, &Step)>, first: u64) {
    let kept = steps.partition_point(|(_, step)| step.step < first);
    steps.truncate(kept);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use std::fs::OpenOptions;
    use std::io::Write;

    use super::*;
    use crate::Journal;

    fn step(number: u64, loss: f64) -> What {
        What::Step(Step { step: number, loss, ..Step::default() })
    }

    fn start(first_step: u64) -> What {
        What::Start(Box::new(Start { first_step, ..Start::default() }))
    }

    #[test]
    fn steps_that_were_made_again_count_as_they_were_made_last() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(Run::open(folder.path()), Err(Error::NoRun { .. })));
        let mut metrics = Journal::open(folder.path(), METRICS).unwrap();
        for what in [start(1), step(1, 9.), step(2, 8.), step(3, 7.), start(2), step(2, 6.)] {
            metrics.add(what).unwrap();
        }
        let mut run = Run::open(folder.path()).unwrap();
        let losses: Vec<f64> = run.steps().iter().map(|(_, step)| step.loss).collect();
        assert_eq!(losses, [9., 6.]);
        // An attempt that went nowhere takes back what it would make again.
        metrics.add(start(1)).unwrap();
        assert!(run.refresh().unwrap() && run.steps().is_empty() && run.starts().len() == 3);
        assert!(!run.refresh().unwrap());
    }

    #[test]
    fn torn_lines_and_unknown_kinds_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        Journal::open(folder.path(), METRICS).unwrap().add(step(1, 3.)).unwrap();
        let mut raw = OpenOptions::new().append(true).open(folder.path().join(METRICS)).unwrap();
        raw.write_all(b"{\"time_s\":1,\"kind\":\"weather\"}\n{\"time_s\":2,\"kind\":\"st").unwrap();
        let mut run = Run::open(folder.path()).unwrap();
        assert_eq!((run.entries().len(), run.unknown()), (1, 1));
        Journal::open(folder.path(), METRICS).unwrap().add(step(2, 2.)).unwrap();
        run.refresh().unwrap();
        assert_eq!((run.steps().len(), run.unknown()), (2, 2));
    }

    #[test]
    fn a_replay_tells_what_a_run_has() {
        let folder = tempfile::tempdir().unwrap();
        let [mut metrics, mut events] = [METRICS, EVENTS].map(|name| Journal::open(folder.path(), name).unwrap());
        let ended = || What::Ended { code: 0, restarts: 0, lost_s: 0. };
        metrics.add(start(1)).unwrap();
        events.add(ended()).unwrap();
        metrics.add(step(1, 3.)).unwrap();
        events.add(ended()).unwrap();
        let mut heard = Vec::new();
        assert_eq!(replay(folder.path(), |entry| heard.push(entry)).unwrap(), 0);
        assert_eq!(heard, Run::open(folder.path()).unwrap().entries());
        assert!(matches!(heard[1].what, What::Ended { .. }));
    }

    #[test]
    fn a_file_of_something_else_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(METRICS), "a poem\nof two lines\n").unwrap();
        let error = replay(folder.path(), drop).unwrap_err();
        assert!(matches!(error, Error::NoJournal { lines: 2, .. }) && error.to_string().contains(METRICS), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_break_the_reader(bytes: Vec<u8>) {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join(METRICS), &bytes).unwrap();
            Run::open(folder.path()).unwrap().steps();
        }
    }
}
