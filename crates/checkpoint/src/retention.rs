//! Which checkpoints to keep when old ones are removed.
//!
//! Only intact checkpoints count. A run falls back to an older one if the last is damaged, so a damaged checkpoint must not
//! displace an intact one.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::{Checkpoint, Error, ManifestError, Result, Store};

/// Which checkpoints to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetentionPolicy {
    /// Keep the last N intact checkpoints, and damaged ones between them; `None` keeps all.
    pub last: Option<usize>,
    /// Keep checkpoints whose step is a multiple of this.
    pub every: Option<u64>,
}

impl RetentionPolicy {
    /// Returns the steps of a store to keep. A checkpoint counts as intact if its manifest and tables can be read and its files
    /// have the right lengths; the tensors are not read.
    pub fn steps_to_keep(&self, store: &Arc<Store>) -> Result<BTreeSet<u64>> {
        self.choose(&store.steps()?, |step| is_intact(store, step))
    }

    /// Selects from `steps`, which are in descending order.
    fn choose(&self, steps: &[u64], mut is_intact: impl FnMut(u64) -> Result<bool>) -> Result<BTreeSet<u64>> {
        let is_multiple = |step: &u64| self.every.is_some_and(|every| step.is_multiple_of(every));
        let mut kept: BTreeSet<u64> = steps.iter().copied().filter(is_multiple).collect();
        let mut intact = 0;
        for &step in steps {
            if self.last == Some(intact) {
                break;
            }
            kept.insert(step);
            // If all are kept, none has to be checked.
            if self.last.is_some() && is_intact(step)? {
                intact += 1;
            }
        }
        Ok(kept)
    }
}

fn is_intact(store: &Arc<Store>, step: u64) -> Result<bool> {
    match Checkpoint::open(store, step).and_then(|checkpoint| checkpoint.check_files()) {
        Ok(()) => Ok(true),
        // A checkpoint of a newer version is not damaged.
        Err(Error::Manifest { error: ManifestError::Format(_), .. }) => Ok(true),
        Err(error) if error.is_damage() => Ok(false),
        // Remove nothing from a store that does not answer.
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn the_last_intact_ones_and_multiples_are_kept() {
        let keep = RetentionPolicy { last: Some(2), every: Some(30) };
        let steps = [70, 60, 50, 40, 30, 20];
        assert_eq!(keep.choose(&steps, |_| Ok(true)).unwrap(), BTreeSet::from([70, 60, 30]));
        let all = RetentionPolicy { last: None, every: None };
        assert_eq!(all.choose(&steps, |_| Ok(false)).unwrap().len(), 6);
        // Damaged ones do not count, and are removed once enough newer ones are intact.
        let last = RetentionPolicy { last: Some(2), every: None };
        let damaged = [60, 50, 30];
        let kept = last.choose(&steps, |step| Ok(!damaged.contains(&step))).unwrap();
        assert_eq!(kept, BTreeSet::from([70, 60, 50, 40]));
        assert_eq!(last.choose(&steps, |_| Ok(false)).unwrap().len(), 6, "where none is intact all stay");
    }
}
