//! Ranks whose calls do not match: they skipped or repeated a call, or pass different sizes.

use std::collections::HashMap;

use crate::CallStatus;
use crate::situation::Situation;
use crate::wording::is_or_are;

impl Situation<'_> {
    /// Describes ranks whose calls have the same number in a group, but are not the same call.
    pub(crate) fn find_mismatch(&self) -> Option<String> {
        self.groups.iter().find_map(|group| {
            let mut numbers: HashMap<u64, Vec<(usize, &CallStatus)>> = HashMap::new();
            for &(rank, call) in &group.calls {
                numbers.entry(call.number).or_default().push((rank, call));
            }
            let odd = numbers.into_iter().filter(|(_, calls)| calls.iter().any(|(_, call)| differ(call, calls[0].1)));
            let (_, calls) = odd.min_by_key(|&(number, _)| number)?;
            let sides = sides(&calls, |call| (&call.verb, &call.label));
            if let [(most, common), (few, odd), ..] = &sides[..] {
                let verdict = match (most.len() == few.len(), few.len()) {
                    (true, _) => "one side has",
                    (false, 1) => "it has",
                    (false, _) => "they have",
                };
                let short = |call: &CallStatus| format!("{} #{} of '{}'", call.verb, call.number, call.label);
                return Some(format!(
                    "{} {} in {}, but {} {} in {} ({}): {verdict} skipped or repeated a call.",
                    self.name_ranks(few),
                    is_or_are(few),
                    short(odd),
                    self.name_ranks(most),
                    is_or_are(most),
                    short(common),
                    common.group
                ));
            }
            let sides = self::sides(&calls, size);
            let [(most, common), (few, odd), ..] = &sides[..] else { return None };
            let passes = |ranks: &[usize]| if ranks.len() == 1 { "passes" } else { "pass" };
            // With three sizes, the other ranks do not agree among themselves.
            let (others, pass) = match (sides.len(), most.len() > 1) {
                (2, true) => ("the others".to_string(), "pass"),
                _ => (self.name_ranks(most), passes(most)),
            };
            Some(format!(
                "{} {} {} × {} to {} #{} of '{}' ({}), but {others} {pass} {} × {}.",
                self.name_ranks(few),
                passes(few),
                odd.elements,
                odd.dtype,
                odd.verb,
                odd.number,
                odd.label,
                odd.group,
                common.elements,
                common.dtype
            ))
        })
    }
}

/// Whether two calls with the same number are different calls.
fn differ(one: &CallStatus, other: &CallStatus) -> bool {
    (&one.verb, &one.label) != (&other.verb, &other.label) || size(one) != size(other)
}

/// The size and dtype that ranks must agree on; in an all-to-all, sizes may differ.
fn size(call: &CallStatus) -> (Option<u64>, &str) {
    ((call.verb != "all-to-all").then_some(call.elements), &call.dtype)
}

type Side<'a> = (Vec<usize>, &'a CallStatus);

/// Groups ranks by a property of their call, the largest group first.
fn sides<'a, K: Eq + std::hash::Hash>(
    calls: &[(usize, &'a CallStatus)],
    key: impl Fn(&'a CallStatus) -> K,
) -> Vec<Side<'a>> {
    let mut sides: HashMap<K, Side<'a>> = HashMap::new();
    for &(rank, call) in calls {
        sides.entry(key(call)).or_insert_with(|| (Vec::new(), call)).0.push(rank);
    }
    let mut sides: Vec<Side<'a>> = sides.into_values().collect();
    // Of two groups of the same size, the one with the higher ranks comes first.
    sides.sort_by_key(|(ranks, _)| (usize::MAX - ranks.len(), usize::MAX - ranks[0]));
    sides
}
