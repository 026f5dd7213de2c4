//! Which checkpoints stay when older ones are removed.
//!
//! Only whole ones count: a run falls back to them, so a damaged one must not take the place of one that can be read.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::{Checkpoint, Error, Fault, Result, Store};

/// Which checkpoints stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// How many of the newest whole ones; all where it is not said. Damaged ones between them stay as well.
    pub last: Option<usize>,
    /// Those whose step is a multiple of this.
    pub every: Option<u64>,
}

impl Keep {
    /// The steps of a store that stay. A checkpoint counts as whole if its manifest and tables can be read and its files have
    /// the right lengths; the tensors in them are not read.
    pub fn steps(&self, store: &Arc<Store>) -> Result<BTreeSet<u64>> {
        self.choose(&store.steps()?, |step| is_whole(store, step))
    }

    /// The same of some steps, the newest first.
    fn choose(&self, steps: &[u64], mut is_whole: impl FnMut(u64) -> Result<bool>) -> Result<BTreeSet<u64>> {
        let is_multiple = |step: &u64| self.every.is_some_and(|every| step.is_multiple_of(every));
        let mut kept: BTreeSet<u64> = steps.iter().copied().filter(is_multiple).collect();
        let mut whole = 0;
        for &step in steps {
            if self.last == Some(whole) {
                break;
            }
            kept.insert(step);
            // Where all stay, none has to be looked at.
            if self.last.is_some() && is_whole(step)? {
                whole += 1;
            }
        }
        Ok(kept)
    }
}

fn is_whole(store: &Arc<Store>, step: u64) -> Result<bool> {
    match Checkpoint::open(store, step).and_then(|checkpoint| checkpoint.check_files()) {
        Ok(()) => Ok(true),
        // What a newer program wrote is not damaged.
        Err(Error::Fault { fault: Fault::Format(_), .. }) => Ok(true),
        Err(error) if error.is_damage() => Ok(false),
        // Of a storage that does not answer nothing is removed.
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn the_last_whole_ones_and_multiples_stay() {
        let keep = Keep { last: Some(2), every: Some(30) };
        let steps = [70, 60, 50, 40, 30, 20];
        assert_eq!(keep.choose(&steps, |_| Ok(true)).unwrap(), BTreeSet::from([70, 60, 30]));
        let all = Keep { last: None, every: None };
        assert_eq!(all.choose(&steps, |_| Ok(false)).unwrap().len(), 6);
        // Damaged ones do not count, and go once enough newer ones are whole.
        let last = Keep { last: Some(2), every: None };
        let damaged = [60, 50, 30];
        let kept = last.choose(&steps, |step| Ok(!damaged.contains(&step))).unwrap();
        assert_eq!(kept, BTreeSet::from([70, 60, 50, 40]));
        assert_eq!(last.choose(&steps, |_| Ok(false)).unwrap().len(), 6, "where none is whole all stay");
    }
}
