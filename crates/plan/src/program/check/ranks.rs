//! [`Rule::Collectives`], [`Rule::Deadlock`] and [`Rule::OneOrder`]: how the programs of different ranks meet.
//!
//! Ranks with the common program agree with each other, so only ranks with their own program are compared, each with one other
//! rank.

use std::collections::{BTreeMap, BTreeSet};

use super::violation::{Problem, Programs, Rule, Violation};
use crate::mesh::{Axis, Mesh, RankSet};
use crate::program::collectives::{Call, CallOp, Collective, GroupKind, calls};
use crate::program::{Policy, Program, UnitSpec};

/// The calls of a program.
struct Calls {
    /// Each with the position of its instruction.
    all: Vec<(usize, Call)>,
    /// For each call, the number of calls that were issued in its group before it; for a wait, before what it waits for.
    ordinals: Vec<usize>,
}

impl Calls {
    fn of(program: &Program, units: &[UnitSpec], policy: &Policy) -> Self {
        let all = calls(program, units, policy);
        let mut issued = [0usize; GroupKind::ALL.len()];
        let mut ordinals: Vec<usize> = Vec::with_capacity(all.len());
        for (_, call) in &all {
            let ordinal = match call.op {
                CallOp::Issue => {
                    let count = &mut issued[call.collective.group as usize];
                    *count += 1;
                    *count - 1
                }
                CallOp::Wait { issued: Some(index) } => ordinals[index],
                CallOp::Wait { issued: None } => 0,
            };
            ordinals.push(ordinal);
        }
        Calls { all, ordinals }
    }
}

pub(super) fn check(programs: &Programs, units: &[UnitSpec], policy: &Policy, mesh: &Mesh) -> Result<(), Violation> {
    let ranks = Ranks::new(programs, units, policy, mesh);
    ranks.check_collectives()?;
    ranks.check_updates()?;
    ranks.check_deadlock()?;
    ranks.check_one_order()
}

struct Ranks<'a> {
    programs: &'a Programs,
    units: &'a [UnitSpec],
    mesh: &'a Mesh,
    common: Calls,
    exceptions: BTreeMap<usize, Calls>,
}

impl<'a> Ranks<'a> {
    fn new(programs: &'a Programs, units: &'a [UnitSpec], policy: &Policy, mesh: &'a Mesh) -> Self {
        let common = Calls::of(&programs.common, units, policy);
        let exceptions =
            programs.exceptions.iter().map(|(&rank, program)| (rank, Calls::of(program, units, policy))).collect();
        Ranks { programs, units, mesh, common, exceptions }
    }

    fn calls(&self, rank: usize) -> &Calls {
        self.exceptions.get(&rank).unwrap_or(&self.common)
    }

    fn group(&self, rank: usize, kind: GroupKind) -> RankSet {
        match kind {
            GroupKind::World => RankSet::world(self.mesh.ranks()),
            GroupKind::Shard => self.mesh.group(rank, &[Axis::Shard]),
            GroupKind::Replicate => self.mesh.group(rank, &[Axis::Replicate]),
        }
    }

    /// The rank to compare `rank` with: one with the common program if the group has one, otherwise its first.
    fn peer(&self, rank: usize, group: &RankSet) -> Option<usize> {
        let common = group.iter().find(|member| !self.exceptions.contains_key(member));
        common.or(Some(group.first())).filter(|&peer| peer != rank)
    }

    fn violation(&self, rank: usize, problem: Problem) -> Violation {
        problem.on(rank, self.programs.of(rank))
    }

    fn check_collectives(&self) -> Result<(), Violation> {
        for &rank in self.exceptions.keys() {
            for kind in GroupKind::ALL {
                let group = self.group(rank, kind);
                if let Some(peer) = self.peer(rank, &group) {
                    self.compare_issues(rank, peer, Rule::Collectives, |collective| collective.group == kind)?;
                }
            }
        }
        Ok(())
    }

    /// All ranks update, or all skip the update: otherwise their parameters differ from then on.
    fn check_updates(&self) -> Result<(), Violation> {
        for &rank in self.exceptions.keys() {
            let Some(peer) = self.peer(rank, &self.group(rank, GroupKind::World)) else { continue };
            let updates = |rank: usize| !self.programs.of(rank).update().is_empty();
            if updates(rank) != updates(peer) {
                let (one, other) = if updates(rank) { (rank, peer) } else { (peer, rank) };
                let problem = format!("rank {one} updates the parameters, and rank {other} does not");
                return Err(self.violation(rank, Problem::missing(Rule::Gradients, problem)));
            }
        }
        Ok(())
    }

    fn check_one_order(&self) -> Result<(), Violation> {
        for &rank in self.exceptions.keys() {
            let connected = self.mesh.group(rank, &[Axis::Replicate, Axis::Shard]);
            if let Some(peer) = self.peer(rank, &connected) {
                let is_shared = |collective: &Collective| self.group(rank, collective.group).len() > 1;
                self.compare_issues(rank, peer, Rule::OneOrder, is_shared)?;
            }
        }
        Ok(())
    }

    /// Compares those collectives that two ranks issue and that `filter` selects.
    fn compare_issues(
        &self,
        rank: usize,
        peer: usize,
        rule: Rule,
        filter: impl Fn(&Collective) -> bool,
    ) -> Result<(), Violation> {
        let issues = |rank: usize| {
            let issued =
                self.calls(rank).all.iter().filter(|(_, call)| call.op == CallOp::Issue && filter(&call.collective));
            issued.map(|&(position, call)| (position, call.collective)).collect::<Vec<_>>()
        };
        let (own, others) = (issues(rank), issues(peer));
        let same = own.iter().zip(&others).take_while(|(own, other)| own.1 == other.1).count();
        let problem = match (own.get(same), others.get(same)) {
            (None, None) => return Ok(()),
            (Some((position, own)), Some((_, other))) => {
                let (own, other) = (self.describe(own), self.describe(other));
                Problem::at(*position, rule, format!("it issues {own}, where rank {peer} issues {other}"))
            }
            (Some((position, own)), None) => {
                let own = self.describe(own);
                Problem::at(*position, rule, format!("it issues {own}, which rank {peer} does not"))
            }
            (None, Some((_, other))) => {
                Problem::missing(rule, format!("it does not issue {}, which rank {peer} does", self.describe(other)))
            }
        };
        Err(self.violation(rank, problem))
    }

    fn describe(&self, collective: &Collective) -> String {
        let Collective { group, kind, unit, elements, .. } = collective;
        let of_unit = unit.and_then(|unit| self.units.get(unit));
        let of_unit = of_unit.map(|unit| format!(" of {} ({elements} elements)", unit.name)).unwrap_or_default();
        format!("the {}{of_unit} in the {} group", kind.name(), group.name())
    }

    /// Runs the ranks without time: those that share a shard or replicate group with an exception, and one that stands for all
    /// others. Calls of a group are matched in the order in which they are issued.
    fn check_deadlock(&self) -> Result<(), Violation> {
        let near = |&rank: &usize| {
            let groups = [GroupKind::Shard, GroupKind::Replicate].map(|kind| self.group(rank, kind));
            groups.into_iter().flat_map(|group| group.iter())
        };
        let mut simulated: BTreeSet<usize> = self.exceptions.keys().flat_map(near).collect();
        let stand_in = (0..self.mesh.ranks()).find(|rank| !simulated.contains(rank));
        simulated.extend(stand_in);

        let mut groups = Groups::default();
        let mut lanes: Vec<Lane<'_>> = Vec::new();
        for &rank in &simulated {
            let groups = GroupKind::ALL.map(|kind| groups.join(kind, self.group(rank, kind)));
            lanes.push(Lane { rank, calls: self.calls(rank), next: 0, groups, stands_in: Vec::new() });
        }
        if let Some(lane) = lanes.iter_mut().find(|lane| Some(lane.rank) == stand_in) {
            lane.stands_in = groups.add_stand_in(lane.rank);
        }
        let mut moves = true;
        while moves {
            moves = false;
            for lane in &mut lanes {
                moves |= lane.run(&mut groups);
            }
        }
        let is_blocked = |lane: &&Lane<'_>| lane.next < lane.calls.all.len();
        let mut blocked: Vec<&Lane<'_>> = lanes.iter().filter(is_blocked).collect();
        blocked.sort_by_key(|lane| !self.exceptions.contains_key(&lane.rank));
        match blocked.first() {
            Some(lane) => {
                let (position, call) = &lane.calls.all[lane.next];
                let problem = format!(
                    "it waits forever for {}: another rank of the group waits for something else before it issues that",
                    self.describe(&call.collective)
                );
                Err(self.violation(lane.rank, Problem::at(*position, Rule::Deadlock, problem)))
            }
            None => Ok(()),
        }
    }
}

/// A rank in the simulation without time.
struct Lane<'a> {
    rank: usize,
    calls: &'a Calls,
    /// The index of the next call.
    next: usize,
    /// The indices of its groups, in the order of [`GroupKind::ALL`].
    groups: [usize; GroupKind::ALL.len()],
    /// The indices of the groups of other ranks for whose members it stands.
    stands_in: Vec<usize>,
}

impl Lane<'_> {
    /// Makes calls until one blocks, and says whether it made any.
    fn run(&mut self, groups: &mut Groups) -> bool {
        let start = self.next;
        while let Some((_, call)) = self.calls.all.get(self.next) {
            let (kind, ordinal) = (call.collective.group, self.calls.ordinals[self.next]);
            let own = self.groups[kind as usize];
            match call.op {
                CallOp::Issue => {
                    groups.arrive(own, ordinal);
                    let others = self.stands_in.iter().filter(|&&group| groups.all[group].kind == kind).copied();
                    let others: Vec<usize> = others.collect();
                    others.into_iter().for_each(|group| groups.arrive(group, ordinal));
                }
                // The step before has issued it.
                CallOp::Wait { issued: None } => (),
                CallOp::Wait { issued: Some(_) } if groups.is_complete(own, ordinal) => (),
                CallOp::Wait { issued: Some(_) } => break,
            }
            self.next += 1;
        }
        self.next > start
    }
}

/// The groups of the simulated ranks.
#[derive(Default)]
struct Groups {
    by_first_rank: BTreeMap<(GroupKind, usize), usize>,
    all: Vec<SimulatedGroup>,
}

struct SimulatedGroup {
    kind: GroupKind,
    ranks: RankSet,
    /// The number of simulated ranks that take part.
    members: usize,
    /// How many of them have issued each call.
    arrived: Vec<usize>,
}

impl Groups {
    /// Adds a rank to its group, and returns the group's index.
    fn join(&mut self, kind: GroupKind, ranks: RankSet) -> usize {
        let index = *self.by_first_rank.entry((kind, ranks.first())).or_insert(self.all.len());
        if index == self.all.len() {
            self.all.push(SimulatedGroup { kind, ranks, members: 0, arrived: Vec::new() });
        }
        self.all[index].members += 1;
        index
    }

    /// Adds a rank to the groups that have members that are not simulated, and returns their indices.
    fn add_stand_in(&mut self, rank: usize) -> Vec<usize> {
        let mut joined = Vec::new();
        for (index, group) in self.all.iter_mut().enumerate() {
            if group.members < group.ranks.len() && group.ranks.index_of(rank).is_none() {
                group.members += 1;
                joined.push(index);
            }
        }
        joined
    }

    fn arrive(&mut self, group: usize, ordinal: usize) {
        let arrived = &mut self.all[group].arrived;
        if arrived.len() <= ordinal {
            arrived.resize(ordinal + 1, 0);
        }
        arrived[ordinal] += 1;
    }

    fn is_complete(&self, group: usize, ordinal: usize) -> bool {
        let group = &self.all[group];
        group.arrived.get(ordinal) == Some(&group.members)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use super::*;

    /// The first violation among two ranks that shard one unit at stage 3. The rules of single ranks are not checked.
    fn violation(rank_0: &str, rank_1: &str) -> Option<Violation> {
        let parse = |text: &str| format!("units a\n{}", text.replace(", ", "\n")).parse::<Program>().unwrap();
        let programs = Programs { common: parse(rank_0), exceptions: BTreeMap::from([(1, parse(rank_1))]) };
        let mesh = Mesh::new(&[(Axis::Shard, 2)]).unwrap();
        check(&programs, &[UnitSpec::new("a", 8, true)], &Policy::stage(3, 1), &mesh).err()
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_found() {
        assert_eq!(violation("start-gather a, wait-gather a", "start-gather a, wait-gather a"), None);
        let found =
            violation("count-tokens, start-gather a, wait-gather a", "start-gather a, wait-gather a, count-tokens");
        let found = found.unwrap();
        assert_eq!((found.rank, found.position, found.rule), (1, Some(1), Rule::Deadlock));
        let text = "rank 1, instruction 1 (wait-gather a): it waits forever for the all-gather of a (8 elements)";
        assert!(found.to_string().starts_with(text), "{found}");
    }

    #[test]
    fn another_order_of_two_groups_is_found_even_if_it_does_not_block() {
        let found =
            violation("count-tokens, start-gather a, wait-gather a", "start-gather a, count-tokens, wait-gather a");
        let found = found.unwrap();
        assert_eq!((found.rank, found.position, found.rule), (1, Some(0), Rule::OneOrder));
    }

    #[test]
    fn a_missing_collective_is_found() {
        let found = violation("count-tokens, start-gather a", "count-tokens").unwrap();
        assert_eq!((found.rank, found.position, found.rule), (1, None, Rule::Collectives));
        let text = "rank 1: it does not issue the all-gather of a (8 elements) in the shard group, which rank 0 does";
        assert_eq!(found.to_string(), text);
    }
}
