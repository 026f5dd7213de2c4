//! [`Rule::Collectives`], [`Rule::Deadlock`] and [`Rule::OneOrder`]: how the programs of different ranks meet.
//!
//! Ranks with the program of their stage agree with each other in the groups of the stage. So only ranks with their own program are
//! compared there, each with one other rank, and the stages in the groups that they share.

use super::messages;
use super::violation::{Problem, Rule, Violation};
use crate::mesh::{Axis, Mesh, RankSet};
use crate::program::collectives::{Call, CallOp, Collective, calls};
use crate::program::execution::{Durations, execute};
use crate::program::groups::GroupKind;
use crate::program::instruction::{Instruction, Message, Offload};
use crate::program::programs::Party;
use crate::program::{Policy, UnitSpec};

pub(super) fn check(
    parties: &[Party<'_>],
    stages: &[Option<usize>],
    units: &[UnitSpec],
    policy: &Policy,
    mesh: &Mesh,
) -> Result<(), Violation> {
    if parties.len() == 1 {
        return Ok(());
    }
    let calls = parties.iter().map(|party| calls(party.program, units, policy)).collect();
    let ranks = Ranks { parties, stages, calls, units, mesh };
    ranks.check_collectives()?;
    ranks.check_updates()?;
    messages::check(parties, stages, units, mesh)?;
    ranks.check_deadlock()?;
    ranks.check_one_order()
}

struct Ranks<'a> {
    parties: &'a [Party<'a>],
    /// The stage of each unit.
    stages: &'a [Option<usize>],
    /// By party, each with the position of its instruction.
    calls: Vec<Vec<(usize, Call)>>,
    units: &'a [UnitSpec],
    mesh: &'a Mesh,
}

impl Ranks<'_> {
    fn exceptions(&self) -> impl Iterator<Item = usize> {
        (0..self.parties.len()).filter(|&party| self.parties[party].is_exception)
    }

    /// The party that stands for a rank.
    fn party_of(&self, rank: usize) -> usize {
        let stage = self.mesh.coordinates(rank).along(Axis::Pipeline);
        let is_its_own = |party: &Party<'_>| party.is_exception && party.rank == rank;
        let is_its_stage = |party: &Party<'_>| !party.is_exception && party.stage == stage;
        let own = self.parties.iter().position(is_its_own);
        own.or_else(|| self.parties.iter().position(is_its_stage)).expect("every rank has a program")
    }

    /// The party to compare an exception with: one with the program of its stage if the group has one, otherwise its first rank.
    fn peer(&self, party: usize, group: &RankSet) -> Option<usize> {
        let is_exception = |rank: &usize| self.exceptions().any(|party| self.parties[party].rank == *rank);
        let rank = group.iter().find(|rank| !is_exception(rank)).unwrap_or(group.first());
        Some(self.party_of(rank)).filter(|&peer| peer != party)
    }

    fn violation(&self, party: usize, problem: Problem) -> Violation {
        let Party { rank, program, .. } = self.parties[party];
        problem.on(rank, program)
    }

    fn check_collectives(&self) -> Result<(), Violation> {
        for party in self.exceptions() {
            for kind in GroupKind::ALL {
                let group = kind.ranks(self.mesh, self.parties[party].rank);
                if let Some(peer) = self.peer(party, &group) {
                    self.compare_issues(party, peer, Rule::Collectives, |collective| collective.group == kind)?;
                }
            }
        }
        for party in (1..self.parties.len()).filter(|&party| !self.parties[party].is_exception) {
            let is_shared = |collective: &Collective| collective.group.spans_stages();
            self.compare_issues(party, 0, Rule::Collectives, is_shared)?;
        }
        Ok(())
    }

    /// All ranks that have something to update do it, or all skip it: otherwise their parameters belong to different steps.
    fn check_updates(&self) -> Result<(), Violation> {
        let is_update = |instruction: &Instruction| matches!(instruction, Instruction::Update(_));
        let updates = |party: usize| self.parties[party].program.instructions.iter().any(is_update);
        let has_trainable = |party: &usize| {
            let stage = Some(self.parties[*party].stage);
            self.units.iter().zip(self.stages).any(|(unit, on)| *on == stage && unit.trainable > 0)
        };
        let mut parties = (0..self.parties.len()).filter(has_trainable);
        let Some(first) = parties.next() else { return Ok(()) };
        match parties.find(|&party| updates(party) != updates(first)) {
            Some(party) => {
                let (one, other) = if updates(party) { (party, first) } else { (first, party) };
                let [updating, skipping] = [one, other].map(|party| self.parties[party].rank);
                let problem = format!("rank {updating} updates the parameters, and rank {skipping} does not");
                let at_fault = if self.parties[party].is_exception { party } else { other };
                Err(self.violation(at_fault, Problem::missing(Rule::Gradients, problem)))
            }
            None => Ok(()),
        }
    }

    fn check_one_order(&self) -> Result<(), Violation> {
        let within_stage = [Axis::Replicate, Axis::Shard, Axis::Expert, Axis::Ring, Axis::Ulysses, Axis::Tensor];
        for party in self.exceptions() {
            let rank = self.parties[party].rank;
            if let Some(peer) = self.peer(party, &self.mesh.group(rank, &within_stage)) {
                let is_shared = |collective: &Collective| collective.group.ranks(self.mesh, rank).len() > 1;
                self.compare_issues(party, peer, Rule::OneOrder, is_shared)?;
            }
        }
        Ok(())
    }

    /// Compares those collectives that two ranks issue and that `filter` selects.
    fn compare_issues(
        &self,
        party: usize,
        peer: usize,
        rule: Rule,
        filter: impl Fn(&Collective) -> bool,
    ) -> Result<(), Violation> {
        let issues = |party: usize| {
            let is_selected = |(_, call): &&(usize, Call)| call.op == CallOp::Issue && filter(&call.collective);
            self.calls[party].iter().filter(is_selected).map(|(position, call)| (*position, call.collective))
        };
        let (own, others): (Vec<_>, Vec<_>) = (issues(party).collect(), issues(peer).collect());
        let same = own.iter().zip(&others).take_while(|(own, other)| own.1 == other.1).count();
        let peer = self.parties[peer].rank;
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
        Err(self.violation(party, problem))
    }

    fn describe(&self, collective: &Collective) -> String {
        let Collective { group, kind, unit, elements, .. } = collective;
        let of_unit = unit.and_then(|unit| self.units.get(unit));
        let of_unit = of_unit.map(|unit| format!(" of {} ({elements} elements)", unit.name)).unwrap_or_default();
        format!("the {}{of_unit} in the {} group", kind.name(), group.name())
    }

    /// Executes the programs without time.
    fn check_deadlock(&self) -> Result<(), Violation> {
        let execution = execute(self.parties, &self.calls, (self.units, self.stages), self.mesh, &[], &NoTime);
        let Some(party) = execution.first_blocked(|party| self.parties[party].is_exception) else { return Ok(()) };
        let lane = &execution.lanes[party];
        let call = lane.calls.get(lane.next_call).filter(|(position, _)| *position == lane.position);
        let awaited = call.map_or("the message".to_string(), |(_, call)| self.describe(&call.collective));
        let problem =
            format!("it waits forever for {awaited}: another rank waits for something else before it issues that");
        Err(self.violation(party, Problem::at(lane.position, Rule::Deadlock, problem)))
    }
}

/// Nothing takes any time.
struct NoTime;

impl Durations for NoTime {
    fn compute_s(&self, _: usize, _: &Instruction) -> f64 {
        0.
    }

    fn call_s(&self, _: usize, _: &Collective) -> f64 {
        0.
    }

    fn call_cpu_s(&self, _: usize, _: &Collective) -> f64 {
        0.
    }

    fn message_s(&self, _: usize, _: usize, _: &Message) -> f64 {
        0.
    }

    fn fetch_s(&self, _: usize, _: &Offload) -> f64 {
        0.
    }

    fn store_s(&self, _: usize, _: &Offload) -> f64 {
        0.
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use std::collections::BTreeMap;

    use super::*;
    use crate::program::{Program, Programs};

    /// The first violation among two ranks that shard one unit at stage 3. The rules of single ranks are not checked.
    fn violation(rank_0: &str, rank_1: &str) -> Option<Violation> {
        let parse = |text: &str| format!("units a\n{}", text.replace(", ", "\n")).parse::<Program>().unwrap();
        let programs = Programs { stages: vec![parse(rank_0)], exceptions: BTreeMap::from([(1, parse(rank_1))]) };
        let mesh = Mesh::new(&[(Axis::Shard, 2)]).unwrap();
        let units = [UnitSpec::new("a", 8, true)];
        check(&programs.parties(&mesh), &[Some(0)], &units, &Policy::stage(3, 1), &mesh).err()
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
