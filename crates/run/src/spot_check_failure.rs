//! What is reported when a spot check fails.

use std::fmt;

use shardwise_journal::format::join_list;

/// A failed spot check: the ranks whose gradients differ although they should be identical.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpotCheckFailure {
    /// The first unit, in the order of the backward pass, whose gradients differ.
    pub unit: String,
    /// The ranks that computed them from the same samples.
    pub ranks: Vec<usize>,
    /// The rank among them that was wrong, if that can be determined.
    pub wrong: Option<usize>,
    /// The wrong rank's host, or else the hosts of all `ranks`.
    pub hosts: Vec<String>,
}

impl fmt::Display for SpotCheckFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SpotCheckFailure { unit, ranks, wrong, hosts } = self;
        let hosts = if hosts.len() == 1 { format!("host {}", hosts[0]) } else { format!("hosts {}", join_list(hosts)) };
        let Some(wrong) = wrong else {
            return write!(
                f,
                "ranks {} compute different gradients of unit {unit} from the same samples: either one of them computes wrongly, \
                 or they have different processors, libraries or numbers of threads ({hosts})",
                join_list(ranks),
            );
        };
        write!(f, "rank {wrong}'s gradients of unit {unit} differ from what ")?;
        let others: Vec<usize> = ranks.iter().copied().filter(|rank| rank != wrong).collect();
        match &others[..] {
            [] => write!(f, "it computes")?,
            [other] => write!(f, "rank {other} computes")?,
            others => write!(f, "ranks {} compute", join_list(others))?,
        }
        write!(f, " from the same samples: its hardware may be faulty ({hosts})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_ranks_unit_and_host() {
        let hosts = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        let failure = SpotCheckFailure {
            unit: "block.3".to_string(),
            ranks: vec![2, 3, 0],
            wrong: Some(2),
            hosts: hosts(&["n7"]),
        };
        assert_eq!(
            failure.to_string(),
            "rank 2's gradients of unit block.3 differ from what ranks 3 and 0 compute from the same samples: its hardware may \
             be faulty (host n7)"
        );
        let alone = SpotCheckFailure { ranks: vec![0], wrong: Some(0), ..failure.clone() };
        assert!(alone.to_string().starts_with("rank 0's gradients of unit block.3 differ from what it computes from"));
        let two = SpotCheckFailure { ranks: vec![0, 1], wrong: Some(1), ..failure.clone() };
        assert!(two.to_string().contains("differ from what rank 0 computes from the same"), "{two}");
        let vague = SpotCheckFailure { wrong: None, hosts: hosts(&["n7", "n8", "n1"]), ..failure };
        let text = vague.to_string();
        assert!(text.starts_with("ranks 2, 3 and 0 compute different gradients of unit block.3"), "{text}");
        assert!(text.ends_with("(hosts n7, n8 and n1)"), "{text}");
    }
}
