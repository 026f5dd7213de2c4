//! A run, merged from the files of rank 0 and of the supervisor.

use std::path::{Path, PathBuf};

use crate::{EVENTS, Entry, EntryKind, Error, METRICS, Reader, Result, Start, Step};

/// The entries of a run so far; [`Run::refresh`] reads new ones.
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

    /// Creates a run without a folder, whose entries all come from [`Run::add`].
    pub fn empty() -> Self {
        let nowhere = || Reader::new("");
        Run { folder: PathBuf::new(), metrics: nowhere(), events: nowhere(), entries: Vec::new() }
    }

    /// Reads what was written since the last read. Returns whether there was anything new.
    pub fn refresh(&mut self) -> Result<bool> {
        let before = self.entries.len();
        self.entries.append(&mut self.metrics.read()?);
        self.entries.append(&mut self.events.read()?);
        // The writers of the two files may have slightly different clocks. The sort is stable, so entries with the same time stay in order.
        self.entries.sort_by(|a, b| a.time_s.total_cmp(&b.time_s));
        Ok(self.entries.len() > before)
    }

    /// Adds an entry that did not come from the folder.
    pub fn add(&mut self, entry: Entry) {
        let index = self.entries.partition_point(|known| known.time_s <= entry.time_s);
        self.entries.insert(index, entry);
    }

    /// Returns the run's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns all entries, ordered by time.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the number of lines that could not be read.
    pub fn unreadable(&self) -> u64 {
        self.metrics.unreadable() + self.events.unreadable()
    }

    /// Returns the starts of all attempts with their times, in order.
    pub fn starts(&self) -> Vec<(f64, &Start)> {
        let mut starts = Vec::new();
        for entry in &self.entries {
            if let EntryKind::Start(start) = &entry.kind {
                starts.push((entry.time_s, &**start));
            }
        }
        starts
    }

    /// Returns the steps with their times, in order. A step that was repeated counts once, with its latest figures.
    pub fn steps(&self) -> Vec<(f64, &Step)> {
        let mut steps: Vec<(f64, &Step)> = Vec::new();
        for entry in &self.entries {
            match &entry.kind {
                EntryKind::Start(start) => discard_from(&mut steps, start.first_step),
                EntryKind::Step(step) => {
                    discard_from(&mut steps, step.step);
                    steps.push((entry.time_s, step));
                }
                _ => (),
            }
        }
        steps
    }
}

/// Calls `f` with each entry of a run, in the order of their times, without holding them in memory: a run may have millions of
/// steps. Returns the number of lines that could not be read.
pub fn replay(folder: impl AsRef<Path>, mut f: impl FnMut(Entry)) -> Result<u64> {
    let folder = folder.as_ref();
    if !folder.join(METRICS).exists() && !folder.join(EVENTS).exists() {
        return Err(Error::NoRun { path: folder.display().to_string() });
    }
    let [mut metrics, mut events] = [METRICS, EVENTS].map(|name| Reader::new(folder.join(name)));
    let (mut from_events, mut from_metrics) = (0_u64, 0_u64);
    // The supervisor writes only a few lines per attempt, so they fit in memory.
    let mut pending = events.read()?.into_iter().peekable();
    metrics.for_each(|entry| {
        while let Some(event) = pending.next_if(|event| event.time_s <= entry.time_s) {
            from_events += 1;
            f(event);
        }
        from_metrics += 1;
        f(entry);
    })?;
    for event in pending {
        from_events += 1;
        f(event);
    }
    for (reader, name, read) in [(&metrics, METRICS, from_metrics), (&events, EVENTS, from_events)] {
        let lines = reader.unreadable();
        if read == 0 && lines > 0 {
            return Err(Error::NoJournal { path: folder.join(name).display().to_string(), lines });
        }
    }
    Ok(metrics.unreadable() + events.unreadable())
}

/// Discards the steps from `first` on, because they are repeated.
fn discard_from(steps: &mut Vec<(f64, &Step)>, first: u64) {
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

    fn step(number: u64, loss: f64) -> EntryKind {
        EntryKind::Step(Step { step: number, loss, ..Step::default() })
    }

    fn start(first_step: u64) -> EntryKind {
        EntryKind::Start(Box::new(Start { first_step, ..Start::default() }))
    }

    #[test]
    fn a_repeated_step_counts_once_with_its_latest_figures() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(Run::open(folder.path()), Err(Error::NoRun { .. })));
        let mut metrics = Journal::open(folder.path(), METRICS).unwrap();
        for kind in [start(1), step(1, 9.), step(2, 8.), step(3, 7.), start(2), step(2, 6.)] {
            metrics.add(kind).unwrap();
        }
        let mut run = Run::open(folder.path()).unwrap();
        let losses: Vec<f64> = run.steps().iter().map(|(_, step)| step.loss).collect();
        assert_eq!(losses, [9., 6.]);
        // An attempt that got nowhere still discards the steps that it was about to repeat.
        metrics.add(start(1)).unwrap();
        assert!(run.refresh().unwrap() && run.steps().is_empty() && run.starts().len() == 3);
        assert!(!run.refresh().unwrap());
    }

    #[test]
    fn torn_lines_and_unknown_kinds_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        Journal::open(folder.path(), METRICS).unwrap().add(step(1, 3.)).unwrap();
        let mut raw = OpenOptions::new().append(true).open(folder.path().join(METRICS)).unwrap();
        raw.write_all(b"{\"time_s\":1,\"kind\":\"weather\"}\n{\"time_s\":2,\"kind\":\"st").unwrap();
        let mut run = Run::open(folder.path()).unwrap();
        assert_eq!((run.entries().len(), run.unreadable()), (1, 1));
        Journal::open(folder.path(), METRICS).unwrap().add(step(2, 2.)).unwrap();
        run.refresh().unwrap();
        assert_eq!((run.steps().len(), run.unreadable()), (2, 2));
    }

    #[test]
    fn a_replay_has_the_entries_of_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let [mut metrics, mut events] = [METRICS, EVENTS].map(|name| Journal::open(folder.path(), name).unwrap());
        let ended = || EntryKind::Ended { code: 0, restarts: 0, lost_s: 0. };
        metrics.add(start(1)).unwrap();
        events.add(ended()).unwrap();
        metrics.add(step(1, 3.)).unwrap();
        events.add(ended()).unwrap();
        let mut replayed = Vec::new();
        assert_eq!(replay(folder.path(), |entry| replayed.push(entry)).unwrap(), 0);
        assert_eq!(replayed, Run::open(folder.path()).unwrap().entries());
        assert!(matches!(replayed[1].kind, EntryKind::Ended { .. }));
    }

    #[test]
    fn a_file_that_is_not_a_journal_is_named() {
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
