//! Journal entries on the channel. They are shortened before they are sent, and checked when they arrive.
//!
//! The journal file is the record of the run. The channel only shows entries to viewers, so an entry that does not fit is dropped,
//! and no rank is stopped because of it.

use shardwise_journal::{Entry, EntryKind, RANKS_KEPT_MAX};

use crate::status::{TEXT_BYTES_MAX, check_length, shorten};
use crate::{Error, Result};

/// The longest recipe. Here it is only read by people, so it may be truncated.
const RECIPE_BYTES_MAX: usize = 16 << 10;
/// The longest name, path or address.
const NAME_BYTES_MAX: usize = 1 << 10;
/// The maximum number of hosts, and of verbs.
const NAMES_MAX: usize = 64;

/// Shortens an entry to the limits.
pub(crate) fn shorten_entry(mut entry: Entry) -> Entry {
    match &mut entry.kind {
        EntryKind::Memory { ranks, .. } => ranks.truncate(RANKS_KEPT_MAX),
        EntryKind::Traffic(traffic) => traffic.verbs.truncate(NAMES_MAX),
        EntryKind::Launched(launch) => {
            launch.hosts.truncate(NAMES_MAX);
            launch.missing.truncate(NAMES_MAX);
        }
        _ => (),
    }
    texts(&mut entry.kind, &mut |text, bytes_max| shorten(text, bytes_max));
    entry
}

/// Checks that a received entry is within the limits.
pub(crate) fn check_entry(entry: &mut Entry) -> Result<()> {
    let too_many = match &entry.kind {
        EntryKind::Memory { ranks, .. } => ranks.len() > RANKS_KEPT_MAX,
        EntryKind::Traffic(traffic) => traffic.verbs.len() > NAMES_MAX,
        EntryKind::Launched(launch) => launch.hosts.len().max(launch.missing.len()) > NAMES_MAX,
        _ => false,
    };
    if too_many || !entry.time_s.is_finite() {
        return Err(Error::Malformed("a journal entry that is too long, or has no valid time".to_string()));
    }
    let mut checked = Ok(());
    texts(&mut entry.kind, &mut |text, bytes_max| {
        if checked.is_ok() {
            checked = check_length(text, bytes_max);
        }
    });
    checked
}

/// Whether rank 0 writes entries of this kind; the supervisor writes the others.
pub(crate) fn is_written_by_rank(kind: &EntryKind) -> bool {
    !matches!(kind, EntryKind::Launched(_) | EntryKind::Failed { .. } | EntryKind::Resumed(_) | EntryKind::Ended { .. })
}

/// Calls `each` with every text of an entry and its maximum length in bytes.
fn texts(kind: &mut EntryKind, each: &mut dyn FnMut(&mut String, usize)) {
    match kind {
        EntryKind::Start(start) => {
            each(&mut start.recipe, RECIPE_BYTES_MAX);
            for name in [&mut start.name, &mut start.version, &mut start.param_dtype] {
                each(name, NAME_BYTES_MAX);
            }
            start.resumed_from.iter_mut().for_each(|address| each(address, NAME_BYTES_MAX));
        }
        EntryKind::Step(step) => {
            let texts = step.skipped.iter_mut().chain(&mut step.spike);
            texts.for_each(|text| each(text, TEXT_BYTES_MAX));
        }
        EntryKind::Traffic(traffic) => traffic.verbs.iter_mut().for_each(|verb| each(&mut verb.verb, NAME_BYTES_MAX)),
        EntryKind::Saved(saved) => each(&mut saved.address, NAME_BYTES_MAX),
        EntryKind::Trace { path, .. } => each(path, NAME_BYTES_MAX),
        EntryKind::Note { text, .. } | EntryKind::Failed { text, .. } => each(text, TEXT_BYTES_MAX),
        EntryKind::Launched(launch) => {
            launch.hosts.iter_mut().chain(&mut launch.missing).for_each(|host| each(host, NAME_BYTES_MAX / 4));
        }
        EntryKind::Memory { .. } | EntryKind::Evaluation(_) | EntryKind::Resumed(_) | EntryKind::Ended { .. } => (),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use shardwise_journal::{Launch, RankMemory, Start};

    use super::*;

    #[test]
    fn shortened_entries_are_accepted() {
        let long = "é\u{1b}[2J".repeat(20_000);
        let hosts = vec![long.clone(); 1000];
        let memory = RankMemory { optimizer: u64::MAX, ..RankMemory::default() };
        let lines = [
            EntryKind::Start(Box::new(Start {
                recipe: long.clone(),
                resumed_from: Some(long.clone()),
                ..Start::default()
            })),
            EntryKind::Note { step: 1, text: long.clone() },
            EntryKind::Memory { step: 1, ranks: vec![memory; 1000] },
            EntryKind::Launched(Launch { hosts: hosts.clone(), missing: hosts, ..Launch::default() }),
        ];
        for kind in lines {
            let mut entry = Entry { time_s: 1., kind };
            assert!(check_entry(&mut entry).is_err(), "{entry:?}");
            let mut entry = shorten_entry(entry);
            check_entry(&mut entry).unwrap();
            assert!(serde_json::to_string(&entry).unwrap().len() < crate::message::FRAME_BYTES_MAX);
        }
        assert!(
            check_entry(&mut Entry { time_s: f64::NAN, kind: EntryKind::Note { step: 1, text: String::new() } })
                .is_err()
        );
    }
}
