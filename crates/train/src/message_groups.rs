//! The groups of ranks for messages between the stages of a pipeline.
//!
//! # Note: why several
//! NCCL runs the calls of a communicator one after the other. If two stages send to each other, and each has first queued a receive,
//! both wait forever; on a ring of stages, so may all of them. So messages are divided into classes. Within a class, a rank either
//! only sends or only receives, and all of its messages have the same partner, in an order that the program's checker has compared. Each
//! class has its own communicator. Over MPI, messages run concurrently, and all classes use the same group.

use std::sync::Arc;

use shardwise_comm::Group;

/// Messages from even and from odd stages to the next one, from even and from odd stages to the previous one, and messages between
/// stages that are not neighbors, such as the last and the first, in either direction.
const CLASSES: usize = 6;

/// The groups for messages between the stages of a pipeline.
#[derive(Clone)]
pub(crate) struct MessageGroups([Arc<Group>; CLASSES]);

impl MessageGroups {
    /// The same group for all classes.
    pub(crate) fn same(group: &Arc<Group>) -> Self {
        MessageGroups(std::array::from_fn(|_| group.clone()))
    }

    /// A group for each class.
    pub(crate) fn new(mut create: impl FnMut() -> crate::Result<Arc<Group>>) -> crate::Result<Self> {
        let groups = (0..CLASSES).map(|_| create()).collect::<crate::Result<Vec<_>>>()?;
        Ok(MessageGroups(groups.try_into().unwrap_or_else(|_| unreachable!("one group for each class"))))
    }

    /// The groups of all classes.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Group>> {
        self.0.iter()
    }

    /// The group for messages from one stage to another.
    pub(crate) fn between(&self, from: usize, to: usize) -> &Group {
        &self.0[class(from, to)]
    }
}

/// The class of messages from one stage to another.
fn class(from: usize, to: usize) -> usize {
    match (from, to) {
        _ if to == from + 1 => from % 2,
        _ if from == to + 1 => 2 + from % 2,
        _ => 4 + usize::from(from < to),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn within_a_class_a_stage_has_one_role_and_one_partner() {
        for stages in 2..=9 {
            let mut roles = BTreeMap::new();
            for from in 0..stages {
                for to in [(from + 1) % stages, (from + stages - 1) % stages] {
                    for (stage, role) in [(from, ("sends to", to)), (to, ("receives from", from))] {
                        let known = roles.entry((stage, class(from, to))).or_insert(role);
                        assert_eq!(*known, role, "stage {stage} of {stages}, class {}", class(from, to));
                    }
                }
            }
        }
    }
}
