//! Lines of a run's journal on their way over the channel: cut before they are sent, checked when they came.
//!
//! A rank writes its lines into a file, and that file is the record. What goes over the channel is for people who look on, so a line
//! that does not fit is left out, and no rank is ended for one.

use shardwise_journal::{Entry, RANKS_KEPT_MAX, What};

use crate::standing::{TEXT_BYTES_MAX, check_length, cut};
use crate::{Error, Result};

/// The longest recipe; only people read it.
const RECIPE_BYTES_MAX: usize = 16 << 10;
/// The longest name, path or address.
const NAME_BYTES_MAX: usize = 1 << 10;
/// The most hosts, and the most verbs.
const NAMES_MAX: usize = 64;

/// Within the limits.
pub(crate) fn cut_entry(mut entry: Entry) -> Entry {
    match &mut entry.what {
        What::Memory { ranks, .. } => ranks.truncate(RANKS_KEPT_MAX),
        What::Traffic(traffic) => traffic.verbs.truncate(NAMES_MAX),
        What::Launched(launch) => {
            launch.hosts.truncate(NAMES_MAX);
            launch.missing.truncate(NAMES_MAX);
        }
        _ => (),
    }
    texts(&mut entry.what, &mut |text, bytes_max| cut(text, bytes_max));
    entry
}

/// What came is within the limits.
pub(crate) fn check_entry(entry: &mut Entry) -> Result<()> {
    let too_many = match &entry.what {
        What::Memory { ranks, .. } => ranks.len() > RANKS_KEPT_MAX,
        What::Traffic(traffic) => traffic.verbs.len() > NAMES_MAX,
        What::Launched(launch) => launch.hosts.len().max(launch.missing.len()) > NAMES_MAX,
        _ => false,
    };
    if too_many || !entry.time_s.is_finite() {
        return Err(Error::Malformed("a line of the journal that is too long, or of no time".to_string()));
    }
    let mut checked = Ok(());
    texts(&mut entry.what, &mut |text, bytes_max| {
        if checked.is_ok() {
            checked = check_length(text, bytes_max);
        }
    });
    checked
}

/// Whether the first rank writes such lines; the others are the supervisor's.
pub(crate) fn is_of_a_rank(what: &What) -> bool {
    !matches!(what, What::Launched(_) | What::Failed { .. } | What::Again(_) | What::Ended { .. })
}

/// Every text, with the most bytes that it may have.
fn texts(what: &mut What, each: &mut dyn FnMut(&mut String, usize)) {
    match what {
        What::Start(start) => {
            each(&mut start.recipe, RECIPE_BYTES_MAX);
            for name in [&mut start.name, &mut start.version, &mut start.precision] {
                each(name, NAME_BYTES_MAX);
            }
            start.resumed_from.iter_mut().for_each(|address| each(address, NAME_BYTES_MAX));
        }
        What::Step(step) => {
            let said = step.skipped.iter_mut().chain(&mut step.outlier);
            said.for_each(|text| each(text, TEXT_BYTES_MAX));
        }
        What::Traffic(traffic) => traffic.verbs.iter_mut().for_each(|verb| each(&mut verb.verb, NAME_BYTES_MAX)),
        What::Saved(saved) => each(&mut saved.address, NAME_BYTES_MAX),
        What::Trace { path, .. } => each(path, NAME_BYTES_MAX),
        What::Note { text, .. } | What::Failed { text, .. } => each(text, TEXT_BYTES_MAX),
        What::Launched(launch) => {
            launch.hosts.iter_mut().chain(&mut launch.missing).for_each(|host| each(host, NAME_BYTES_MAX / 4));
        }
        What::Memory { .. } | What::HeldOut(_) | What::Again(_) | What::Ended { .. } => (),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use shardwise_journal::{Launch, RankMemory, Start};

    use super::*;

    #[test]
    fn what_is_sent_is_cut_to_what_is_read() {
        let long = "é\u{1b}[2J".repeat(20_000);
        let hosts = vec![long.clone(); 1000];
        let memory = RankMemory { optimizer: u64::MAX, ..RankMemory::default() };
        let lines = [
            What::Start(Box::new(Start { recipe: long.clone(), resumed_from: Some(long.clone()), ..Start::default() })),
            What::Note { step: 1, text: long.clone() },
            What::Memory { step: 1, ranks: vec![memory; 1000] },
            What::Launched(Launch { hosts: hosts.clone(), missing: hosts, ..Launch::default() }),
        ];
        for what in lines {
            let mut entry = Entry { time_s: 1., what };
            assert!(check_entry(&mut entry).is_err(), "{entry:?}");
            let mut entry = cut_entry(entry);
            check_entry(&mut entry).unwrap();
            assert!(serde_json::to_string(&entry).unwrap().len() < crate::message::FRAME_BYTES_MAX);
        }
        assert!(
            check_entry(&mut Entry { time_s: f64::NAN, what: What::Note { step: 1, text: String::new() } }).is_err()
        );
    }
}
