//! What happened to a run, in one paragraph for people.
//!
//! A rank that stands still shows it elsewhere: the others wait for it, and run into their time limits. So what a failure *says*
//! is seldom what it *is*. Here everything that the ranks said last is laid side by side: who has entered which call of which
//! group, and where those are who have not.
//!
//! These are functions of what is known, and of the time. They ask nobody and decide nothing. What they say is as old as the
//! ranks' last words, and they look at each rank's words a fixed number of times, however many ranks there are.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::ranks::{listed, named};
use crate::wording::{DESCRIBED_MAX, at, capital, described, few, is, last_heard, lasting, lost, shown, until};
use crate::{CallStanding, CallState, FailureKind, Presence, Ranks, Seen, Standing};

/// Beats are this late at most on a busy host; a rank that was not heard for longer is worth a word.
const LATE: Duration = Duration::from_secs(5);
/// How many ranks are looked for in others' lists of whom they wait for.
const LOOKED_FOR_MAX: usize = 16;

/// Why a run is being ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A rank's process has ended, and should not have.
    Died {
        /// The rank.
        rank: usize,
        /// How, where that is known: `signal 9, killed`.
        how: Option<String>,
    },
    /// Ranks are connected, and say nothing.
    Silent {
        /// The ranks.
        ranks: Vec<usize>,
    },
    /// Ranks have not joined in time.
    Absent {
        /// The ranks.
        ranks: Vec<usize>,
    },
    /// A rank says that something went wrong.
    Failed {
        /// The rank.
        rank: usize,
        /// What kind of failure.
        kind: FailureKind,
        /// What it says.
        text: String,
    },
}

/// What happened, as far as the ranks' last words tell.
///
/// `ranks` are all ranks of the run, as [`Server::ranks`](crate::Server::ranks) has them.
pub fn explain(ranks: &[Seen], cause: &Cause, now: Instant) -> String {
    let scene = Scene::new(ranks, now);
    let sentences = match cause {
        Cause::Died { rank, how } => scene.died(*rank, how.as_deref()),
        Cause::Silent { ranks } => scene.silent(&known(ranks, scene.ranks)),
        Cause::Absent { ranks } => scene.absent(&known(ranks, scene.ranks)),
        Cause::Failed { rank, kind: FailureKind::Timeout, text } => scene.timed_out(*rank, text),
        Cause::Failed { rank, kind, text } => scene.failed(*rank, *kind, text),
    };
    let mut sentences = sentences.into_iter();
    let first = sentences.next().unwrap_or_default();
    sentences.fold(first, |text, next| format!("{text} {}", capital(&next)))
}

/// Who waits for whom in what, and for how long: calls that some ranks are in and others have not entered. The longest wait first.
pub(crate) fn waits(ranks: &[Seen], now: Instant) -> Vec<(String, String, String, Duration)> {
    let mut stalls = Scene::new(ranks, now).stalls();
    stalls.sort_by_key(|stall| std::cmp::Reverse(stall.age));
    let told =
        |Stall { call, waiting, missing, age }: Stall<'_>| (named(&waiting), named(&missing), described(call), age);
    stalls.into_iter().map(told).collect()
}

/// What is known, by group.
struct Scene<'a> {
    ranks: &'a [Seen],
    now: Instant,
    groups: Vec<Group<'a>>,
}

/// The collectives that were last heard of in one group, by rank.
struct Group<'a> {
    members: &'a Ranks,
    calls: Vec<(usize, &'a CallStanding)>,
}

/// A call that some ranks of its group are in, and others have not entered.
struct Stall<'a> {
    call: &'a CallStanding,
    waiting: Vec<usize>,
    missing: Vec<usize>,
    /// How long the first has been waiting.
    age: Duration,
}

impl<'a> Scene<'a> {
    fn new(ranks: &'a [Seen], now: Instant) -> Self {
        let mut groups: Vec<Group<'a>> = Vec::new();
        let mut places: HashMap<&str, usize> = HashMap::new();
        for (rank, seen) in ranks.iter().enumerate() {
            // Two ranks that send to each other are not in one call, and number theirs as they like.
            let is_collective = |call: &&CallStanding| call.verb != "send" && call.verb != "receive";
            for call in seen.standing.calls.iter().filter(is_collective) {
                let place = *places.entry(&call.group).or_insert(groups.len());
                if place == groups.len() {
                    groups.push(Group { members: &call.ranks, calls: Vec::new() });
                }
                groups[place].calls.push((rank, call));
            }
        }
        Scene { ranks, now, groups }
    }

    fn died(&self, rank: usize, how: Option<&str>) -> Vec<String> {
        let Some(seen) = self.ranks.get(rank) else { return vec![format!("rank {rank} died.")] };
        let gone: Vec<usize> = (0..self.ranks.len())
            .filter(|&other| other == rank || self.ranks[other].presence == Presence::Left { code: None })
            .collect();
        let manner = how.map_or_else(|| "without a word".to_string(), |how| format!("({how})"));
        let (hosts, of_hosts, _) = self.lost_hosts(&gone);
        if hosts.iter().any(|host| *host == seen.host) {
            let first = format!("{}: {}, all that ran there, died {manner}.", lost(&hosts), named(&of_hosts));
            return [Some(first), self.waited_for(&of_hosts), self.disagreement()].into_iter().flatten().collect();
        }
        let mut first = format!("{} died {manner}{}", self.who(rank), until(&seen.standing));
        if let Some(stall) = self.stall_for(&[rank]) {
            first += &format!(", while {} waited for it in {}", named(&stall.waiting), described(stall.call));
        } else if let Some(call) = own_call(&seen.standing) {
            first += &format!(", in {}", described(call));
        }
        [Some(first + "."), self.disagreement()].into_iter().flatten().collect()
    }

    fn silent(&self, silent: &[usize]) -> Vec<String> {
        let here = self.ranks.iter().filter(|seen| seen.presence == Presence::Here).count();
        if silent.len() > 1 && silent.len() == here {
            let first = format!(
                "nothing was heard of any of the {here} ranks {}: the supervisor's own host or its network is more likely at \
                 fault than all of them.",
                self.silence(silent)
            );
            return vec![first];
        }
        let (hosts, of_hosts, others) = self.lost_hosts(silent);
        let mut sentences = Vec::new();
        if !hosts.is_empty() {
            let silence = self.silence(&of_hosts);
            sentences.push(format!(
                "{}: {}, all that ran there, are silent {silence}.",
                lost(&hosts),
                named(&of_hosts)
            ));
        }
        match others[..] {
            [] => {}
            [rank] => {
                let heard = last_heard(&self.ranks[rank].standing);
                let silence = self.silence(&others);
                sentences.push(format!("{} is silent {silence}; it was last heard {heard}.", self.who(rank)));
            }
            [..] => {
                let first = format!("{}{} are silent {}", named(&others), self.share(&others), self.silence(&others));
                let heard = |&rank: &usize| format!("{} {}", self.who(rank), last_heard(&self.ranks[rank].standing));
                sentences.push(if others.len() <= DESCRIBED_MAX {
                    let places: Vec<String> = others.iter().map(heard).collect();
                    format!("{first}; last heard were {}.", listed(&places))
                } else {
                    let earliest = others.iter().min_by_key(|&&rank| (self.ranks[rank].heard, rank));
                    let earliest = earliest.map(heard).unwrap_or_default();
                    format!("{first}; the first to fall silent was {earliest}.")
                });
            }
        }
        sentences.extend(self.waited_for(silent));
        sentences.extend(self.disagreement());
        sentences
    }

    fn absent(&self, absent: &[usize]) -> Vec<String> {
        let here: Vec<usize> =
            (0..self.ranks.len()).filter(|&rank| self.ranks[rank].presence == Presence::Here).collect();
        let first = format!("{}{} never joined the run", named(absent), self.share(absent));
        vec![match here[..] {
            [] => format!("{first}; no rank is here."),
            _ => {
                let (verb, hosts) = (is(&here), self.hosts_of(&here));
                format!("{first}; {} {verb} here, on {hosts}.", named(&here))
            }
        }]
    }

    fn failed(&self, rank: usize, kind: FailureKind, text: &str) -> Vec<String> {
        if kind.tells_of_all() {
            return vec![format!("{}.", shown(text))];
        }
        let place = self.ranks.get(rank).map(|seen| format!(" {}", at(&seen.standing))).unwrap_or_default();
        let first = format!("{} failed{place} ({kind}): {}.", self.who(rank), shown(text));
        [Some(first), self.disagreement()].into_iter().flatten().collect()
    }

    /// Who waits too long is not at fault: it is who has not come, or who has come to another call.
    fn timed_out(&self, rank: usize, text: &str) -> Vec<String> {
        let mut sentences = vec![format!("{} ran into a time limit: {}.", self.who(rank), shown(text))];
        if let Some(disagreement) = self.disagreement() {
            sentences.push(disagreement);
        } else if let Some(stall) = self.root() {
            let Stall { call, waiting, missing, age } = &stall;
            let waits = if waiting.len() == 1 { "waits" } else { "wait" };
            sentences.push(format!("{} {waits} in {}, {} so far.", named(waiting), described(call), lasting(*age)));
            sentences.extend(self.never_entered(missing));
        } else if let Some(call) = self.ranks.get(rank).and_then(|seen| own_call(&seen.standing)) {
            let waits_for: Vec<usize> = sorted(call.waits_for.iter(self.ranks.len()));
            let waits_for = match waits_for[..] {
                [] => String::new(),
                _ => format!(" It waits for {}, on {}.", named(&waits_for), self.hosts_of(&waits_for)),
            };
            sentences.push(format!(
                "every rank that belongs there has entered {}, so look at the network between them first.{waits_for}",
                described(call)
            ));
        }
        sentences
    }

    /// Where those are who have not entered a call.
    fn never_entered(&self, missing: &[usize]) -> Vec<String> {
        if missing.len() <= DESCRIBED_MAX {
            return missing
                .iter()
                .map(|&rank| format!("{} never entered it: it {}.", self.who(rank), self.doing(rank)))
                .collect();
        }
        // Those who are at the same make one sentence, because there is often one reason: a host's disk, a stage's length.
        let mut places: HashMap<String, Vec<usize>> = HashMap::new();
        for &rank in missing {
            let Standing { step, phase, .. } = &self.ranks[rank].standing;
            let place = match self.ranks[rank].presence {
                Presence::Awaited => "never joined the run".to_string(),
                Presence::Left { .. } => "left the run".to_string(),
                Presence::Here if phase.is_empty() => "have not begun their first step".to_string(),
                Presence::Here => format!("are in {phase} at step {step}"),
            };
            places.entry(place).or_default().push(rank);
        }
        let mut places: Vec<(String, Vec<usize>)> = places.into_iter().collect();
        places.sort_by_key(|(_, ranks)| (usize::MAX - ranks.len(), ranks[0]));
        let shown = places.iter().take(DESCRIBED_MAX).map(|(place, ranks)| match ranks[..] {
            [rank] => format!("{} {}", self.who(rank), self.doing(rank)),
            _ => format!("{} {place}", named(ranks)),
        });
        let shown: Vec<String> = shown.collect();
        vec![format!("{}{} never entered it: {}.", named(missing), self.share(missing), shown.join("; "))]
    }

    /// What a rank is at, after `it`.
    fn doing(&self, rank: usize) -> String {
        let Seen { standing, presence, .. } = &self.ranks[rank];
        let since = self.since_heard(rank);
        let late = if since > LATE { format!(", and was last heard {} ago", lasting(since)) } else { String::new() };
        match (presence, own_call(standing)) {
            (Presence::Awaited, _) => "never joined the run".to_string(),
            (Presence::Left { code: None }, _) => format!("died{}", until(standing)),
            (Presence::Left { code: Some(code) }, _) => format!("has ended with exit code {code}, {}", at(standing)),
            (Presence::Here, Some(call)) => {
                format!("waits itself in {}, {} so far{late}", described(call), lasting(millis(call.for_ms) + since))
            }
            (Presence::Here, None) if standing.phase.is_empty() => format!("has not begun its first step{late}"),
            (Presence::Here, None) => {
                let age = lasting(millis(standing.in_phase_ms) + since);
                format!("has been {} for {age}{late}", last_heard(standing))
            }
        }
    }

    /// Who waits for these ranks, and in what; or what they are in themselves.
    fn waited_for(&self, ranks: &[usize]) -> Option<String> {
        let it = |it: &str, they: &str| if ranks.len() == 1 { it.to_string() } else { they.to_string() };
        if let Some(stall) = self.stall_for(ranks) {
            let missing: Vec<usize> =
                stall.missing.iter().copied().filter(|rank| ranks.contains_sorted(rank)).collect();
            let who = if missing.len() == ranks.len() { it("it", "they") } else { named(&missing) };
            let waits = if stall.waiting.len() == 1 { "waits" } else { "wait" };
            return Some(format!(
                "{who} never entered {}, for which {} {waits}.",
                described(stall.call),
                named(&stall.waiting)
            ));
        }
        // Of a thousand silent ranks a few show who waits; to look for all of them in all lists would be a square.
        let waits = |call: &CallStanding| ranks.iter().take(LOOKED_FOR_MAX).any(|&rank| call.waits_for.contains(rank));
        let calls = self.groups.iter().flat_map(|group| &group.calls);
        let waiting = calls.filter(|(rank, call)| !ranks.contains_sorted(rank) && is_open(call) && waits(call));
        if let Some(&(_, call)) = waiting.clone().next() {
            let with_it = waiting.filter(|(_, other)| other.group == call.group && other.number == call.number);
            let who = sorted(with_it.map(|&(rank, _)| rank));
            let waits = if who.len() == 1 { "waits" } else { "wait" };
            let (them, entered) = (it("it", "them"), it("it has entered", "they have entered"));
            return Some(format!("{} {waits} for {them} in {}, which {entered}.", named(&who), described(call)));
        }
        let [rank] = ranks else { return None };
        own_call(&self.ranks[*rank].standing).map(|call| format!("it was in {}.", described(call)))
    }

    /// The call that has been waited in for longest, of those that one of these ranks has not entered.
    fn stall_for(&self, ranks: &[usize]) -> Option<Stall<'a>> {
        let concerned = |stall: &Stall<'_>| stall.missing.iter().any(|rank| ranks.contains_sorted(rank));
        let without = |mut stall: Stall<'a>| {
            stall.waiting.retain(|rank| !ranks.contains_sorted(rank));
            stall
        };
        let stalls = self.stalls().into_iter().filter(concerned).map(without).filter(|stall| !stall.waiting.is_empty());
        stalls.max_by_key(|stall| stall.age)
    }

    /// The call where the waiting began: of those that were waited in for long, one that a rank has not entered which waits
    /// for nobody. Where all wait for each other, the first.
    fn root(&self) -> Option<Stall<'a>> {
        let stalls = self.stalls();
        let mut waits = vec![false; self.ranks.len()];
        stalls.iter().flat_map(|stall| &stall.waiting).for_each(|&rank| waits[rank] = true);
        let is_root = |stall: &Stall<'_>| stall.missing.iter().any(|&rank| !waits[rank]);
        stalls.into_iter().max_by_key(|stall| (is_root(stall), stall.age))
    }

    fn stalls(&self) -> Vec<Stall<'a>> {
        self.groups.iter().filter_map(|group| self.stall(group)).collect()
    }

    /// The first call of a group that is under way somewhere and was not entered elsewhere.
    fn stall(&self, group: &Group<'a>) -> Option<Stall<'a>> {
        let mut entered: HashMap<usize, u64> = HashMap::new();
        for &(rank, call) in &group.calls {
            let newest = entered.entry(rank).or_default();
            *newest = call.number.max(*newest);
        }
        let members = sorted(group.members.iter(self.ranks.len()));
        let entered = |rank: &usize| entered.get(rank).copied().unwrap_or(0);
        let least = members.iter().map(entered).min()?;
        let open = group.calls.iter().filter(|(_, call)| is_open(call));
        let &(_, call) = open.clone().filter(|(_, call)| call.number > least).min_by_key(|(_, call)| call.number)?;
        let waiting = open.filter(|(_, other)| other.number >= call.number);
        let age = waiting.clone().map(|&(rank, other)| millis(other.for_ms) + self.since_heard(rank)).max()?;
        let waiting = sorted(waiting.map(|&(rank, _)| rank));
        let missing: Vec<usize> = members.into_iter().filter(|rank| entered(rank) < call.number).collect();
        Some(Stall { call, waiting, missing, age })
    }

    /// Ranks that are in the same call of a group by its number, and in different ones by all else.
    fn disagreement(&self) -> Option<String> {
        self.groups.iter().find_map(|group| {
            let mut numbers: HashMap<u64, Vec<(usize, &CallStanding)>> = HashMap::new();
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
                let short = |call: &CallStanding| format!("{} #{} of '{}'", call.verb, call.number, call.label);
                return Some(format!(
                    "{} {} in {} where {} {} in {} ({}): {verdict} skipped or repeated a call.",
                    named(few),
                    is(few),
                    short(odd),
                    named(most),
                    is(most),
                    short(common),
                    common.group
                ));
            }
            let sides = self::sides(&calls, size);
            let [(most, common), (few, odd), ..] = &sides[..] else { return None };
            let brings = |ranks: &[usize]| if ranks.len() == 1 { "brings" } else { "bring" };
            // Where there are three sizes, the others are not one.
            let (others, bring) = match (sides.len(), most.len() > 1) {
                (2, true) => ("the others".to_string(), "bring"),
                _ => (named(most), brings(most)),
            };
            Some(format!(
                "{} {} {} × {} to {} #{} of '{}' ({}) where {others} {bring} {} × {}.",
                named(few),
                brings(few),
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

    /// The hosts of which all ranks are among these, if they had several and there are others; their ranks; and the rest.
    fn lost_hosts(&self, ranks: &[usize]) -> (Vec<&'a str>, Vec<usize>, Vec<usize>) {
        let mut counts: HashMap<&str, (usize, usize)> = HashMap::new();
        for seen in self.ranks {
            counts.entry(&seen.host).or_default().0 += 1;
        }
        for &rank in ranks {
            counts.entry(&self.ranks[rank].host).or_default().1 += 1;
        }
        let is_lost = |rank: &usize| {
            let host = self.ranks[*rank].host.as_str();
            let (all, among) = counts[host];
            !host.is_empty() && all > 1 && all == among && counts.len() > 1
        };
        let (of_hosts, others): (Vec<usize>, Vec<usize>) = ranks.iter().copied().partition(is_lost);
        (self.hosts(&of_hosts), of_hosts, others)
    }

    /// The hosts of these ranks, in the order of their first.
    fn hosts(&self, ranks: &[usize]) -> Vec<&'a str> {
        let mut known = std::collections::HashSet::new();
        ranks.iter().map(|&rank| self.ranks[rank].host.as_str()).filter(|host| known.insert(*host)).collect()
    }

    fn hosts_of(&self, ranks: &[usize]) -> String {
        let hosts = self.hosts(ranks);
        format!("{} {}", if hosts.len() == 1 { "host" } else { "hosts" }, few(&hosts))
    }

    /// `rank 3 (host b, process 4711)`.
    fn who(&self, rank: usize) -> String {
        match self.ranks.get(rank) {
            Some(Seen { host, pid, .. }) if !host.is_empty() => format!("rank {rank} (host {host}, process {pid})"),
            _ => format!("rank {rank}"),
        }
    }

    /// How many of all these are, where a list of them does not show it.
    fn share(&self, ranks: &[usize]) -> String {
        if ranks.len() <= DESCRIBED_MAX { String::new() } else { format!(" ({} of {})", ranks.len(), self.ranks.len()) }
    }

    /// For how long nothing was heard of these.
    fn silence(&self, ranks: &[usize]) -> String {
        let ages = ranks.iter().map(|&rank| self.since_heard(rank));
        let (shortest, longest) = (ages.clone().min().unwrap_or_default(), ages.max().unwrap_or_default());
        match (lasting(shortest), lasting(longest)) {
            (short, long) if short == long => format!("for {long}"),
            (short, long) => format!("for {short} to {long}"),
        }
    }

    fn since_heard(&self, rank: usize) -> Duration {
        self.ranks[rank].heard.map_or(Duration::ZERO, |heard| self.now.saturating_duration_since(heard))
    }
}

/// Looking up a rank in ascending ones, of which there may be ten thousand.
trait ContainsSorted {
    fn contains_sorted(&self, rank: &usize) -> bool;
}

impl ContainsSorted for [usize] {
    fn contains_sorted(&self, rank: &usize) -> bool {
        self.binary_search(rank).is_ok()
    }
}

/// The call that a rank stands in: the oldest that is under way.
fn own_call(standing: &Standing) -> Option<&CallStanding> {
    let under_way = standing.calls.iter().filter(|call| call.state == CallState::UnderWay);
    under_way.max_by_key(|call| call.for_ms)
}

fn is_open(call: &CallStanding) -> bool {
    call.state != CallState::Done
}

/// Whether two calls of one number are not the same call.
fn differ(one: &CallStanding, other: &CallStanding) -> bool {
    (&one.verb, &one.label) != (&other.verb, &other.label) || size(one) != size(other)
}

/// What ranks must agree on; in an all-to-all everyone brings as much as it likes.
fn size(call: &CallStanding) -> (Option<u64>, &str) {
    ((call.verb != "all-to-all").then_some(call.elements), &call.dtype)
}

type Side<'a> = (Vec<usize>, &'a CallStanding);

/// The ranks by what they say of a call, most first.
fn sides<'a, K: Eq + std::hash::Hash>(
    calls: &[(usize, &'a CallStanding)],
    key: impl Fn(&'a CallStanding) -> K,
) -> Vec<Side<'a>> {
    let mut sides: HashMap<K, Side<'a>> = HashMap::new();
    for &(rank, call) in calls {
        sides.entry(key(call)).or_insert_with(|| (Vec::new(), call)).0.push(rank);
    }
    let mut sides: Vec<Side<'a>> = sides.into_values().collect();
    // Of two sides of one size, the one with the lower rank is named last.
    sides.sort_by_key(|(ranks, _)| (usize::MAX - ranks.len(), usize::MAX - ranks[0]));
    sides
}

fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

fn sorted(ranks: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut ranks: Vec<usize> = ranks.collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// Those of these ranks that there are.
fn known(ranks: &[usize], all: &[Seen]) -> Vec<usize> {
    sorted(ranks.iter().copied().filter(|&rank| rank < all.len()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;
    use crate::standing::tests::call;

    /// Two ranks to a host, all in call #412 and just heard.
    fn scene(count: usize) -> (Vec<Seen>, Instant) {
        let now = Instant::now() + Duration::from_secs(100_000);
        let seen = |rank: usize| Seen {
            host: if count <= 8 { ["a", "b", "c", "d"][rank / 2].to_string() } else { format!("n{}", rank / 8) },
            pid: 4708 + rank as u32,
            standing: Standing {
                step: 41,
                first_step: 1,
                phase: "backward".to_string(),
                unit: "block.7".to_string(),
                in_phase_ms: 31_000,
                calls: vec![CallStanding {
                    group: format!("shard 0-{}", count - 1),
                    ranks: Ranks::of(0..count),
                    ..call(412)
                }],
            },
            heard: Some(now),
            presence: Presence::Here,
        };
        ((0..count).map(seen).collect(), now)
    }

    /// This rank is still at call #411, which is done, and computes.
    fn late(seen: &mut Seen) {
        seen.standing.phase = "forward".to_string();
        seen.standing.unit = "block.2".to_string();
        seen.standing.in_phase_ms = 35_000;
        let call = &mut seen.standing.calls[0];
        (call.number, call.state, call.waits_for) = (411, CallState::Done, Ranks::default());
    }

    fn ago(now: Instant, seconds: u64) -> Option<Instant> {
        Some(now - Duration::from_secs(seconds))
    }

    fn silent(ranks: &[usize]) -> Cause {
        Cause::Silent { ranks: ranks.to_vec() }
    }

    fn timeout(rank: usize) -> Cause {
        Cause::Failed { rank, kind: FailureKind::Timeout, text: "made no progress\n for 30s.".to_string() }
    }

    #[test]
    fn one_silent_rank() {
        let (mut ranks, now) = scene(4);
        late(&mut ranks[3]);
        ranks[3].heard = ago(now, 31);
        assert_eq!(
            explain(&ranks, &silent(&[3]), now),
            "rank 3 (host b, process 4711) is silent for 31 s; it was last heard in forward of block.2 at step 41. It never \
             entered reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3), for which ranks 0-2 wait."
        );
        // It has come to the call, and fell silent there.
        let (mut ranks, now) = scene(4);
        ranks[3].heard = ago(now, 31);
        assert_eq!(
            explain(&ranks, &silent(&[3]), now),
            "rank 3 (host b, process 4711) is silent for 31 s; it was last heard in backward of block.7 at step 41. Ranks 0-2 \
             wait for it in reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3), which it has entered."
        );
    }

    #[test]
    fn some_silent_ranks() {
        let (mut ranks, now) = scene(8);
        for rank in [3, 4] {
            late(&mut ranks[rank]);
            ranks[rank].heard = ago(now, 8 * rank as u64);
        }
        assert_eq!(
            explain(&ranks, &silent(&[4, 3]), now),
            "ranks 3-4 are silent for 24 s to 32 s; last heard were rank 3 (host b, process 4711) in forward of block.2 at \
             step 41 and rank 4 (host c, process 4712) in forward of block.2 at step 41. They never entered reduce-scatter \
             #412 of 'block.7' (12.6 MB, shard 0-7), for which ranks 0-2 and 5-7 wait."
        );
    }

    #[test]
    fn a_lost_host() {
        let (mut ranks, now) = scene(4);
        for rank in [2, 3] {
            late(&mut ranks[rank]);
            ranks[rank].heard = ago(now, 12);
        }
        let waited =
            "They never entered reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3), for which ranks 0-1 wait.";
        assert_eq!(
            explain(&ranks, &silent(&[2, 3]), now),
            format!("host b is lost: ranks 2-3, all that ran there, are silent for 12 s. {waited}")
        );
        ranks[2].presence = Presence::Left { code: None };
        ranks[3].presence = Presence::Left { code: None };
        assert_eq!(
            explain(&ranks, &Cause::Died { rank: 2, how: None }, now),
            format!("host b is lost: ranks 2-3, all that ran there, died without a word. {waited}")
        );
        ranks.iter_mut().for_each(|seen| seen.presence = Presence::Here);
        ranks.iter_mut().for_each(|seen| seen.heard = ago(now, 12));
        assert_eq!(
            explain(&ranks, &silent(&[0, 1, 2, 3]), now),
            "nothing was heard of any of the 4 ranks for 12 s: the supervisor's own host or its network is more likely at \
             fault than all of them."
        );
    }

    #[test]
    fn a_death() {
        let (mut ranks, now) = scene(4);
        late(&mut ranks[2]);
        let how = Some("signal 9, killed".to_string());
        assert_eq!(
            explain(&ranks, &Cause::Died { rank: 2, how }, now),
            "rank 2 (host b, process 4710) died (signal 9, killed), last heard at step 41 in forward of block.2, while \
             ranks 0, 1 and 3 waited for it in reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3)."
        );
        let (ranks, now) = scene(4);
        assert_eq!(
            explain(&ranks, &Cause::Died { rank: 2, how: None }, now),
            "rank 2 (host b, process 4710) died without a word, last heard at step 41 in backward of block.7, in \
             reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3)."
        );
        let awaited = Seen {
            host: String::new(),
            presence: Presence::Awaited,
            heard: None,
            standing: Standing::default(),
            pid: 0,
        };
        let none = vec![awaited; 2];
        assert_eq!(
            explain(&none, &Cause::Died { rank: 1, how: None }, now),
            "rank 1 died without a word before its first step."
        );
        assert_eq!(
            explain(&none, &Cause::Absent { ranks: vec![0, 1] }, now),
            "ranks 0-1 never joined the run; no rank is here."
        );
    }

    #[test]
    fn a_skipped_call() {
        let (mut ranks, now) = scene(4);
        let call = &mut ranks[3].standing.calls[0];
        (call.verb, call.label) = ("all-gather".to_string(), "block.6".to_string());
        assert_eq!(
            explain(&ranks, &timeout(0), now),
            "rank 0 (host a, process 4708) ran into a time limit: made no progress for 30s. Rank 3 is in all-gather #412 of \
             'block.6' where ranks 0-2 are in reduce-scatter #412 of 'block.7' (shard 0-3): it has skipped or repeated a call."
        );
        // Two against two: nobody knows who is right.
        ranks[2].standing.calls[0] = ranks[3].standing.calls[0].clone();
        let text = explain(&ranks, &timeout(0), now);
        assert!(
            text.contains("Ranks 0-1 are in reduce-scatter #412 of 'block.7' where ranks 2-3 are in all-gather"),
            "{text}"
        );
        assert!(text.ends_with("one side has skipped or repeated a call."), "{text}");
    }

    #[test]
    fn different_sizes() {
        let (mut ranks, now) = scene(4);
        ranks[1].standing.calls[0].elements = 4096;
        let expected = "Rank 1 brings 4096 × f32 to reduce-scatter #412 of 'block.7' (shard 0-3) where the others bring 3145728 × f32.";
        let text = explain(&ranks, &timeout(0), now);
        assert!(text.ends_with(expected), "{text}");
        ranks.iter_mut().for_each(|seen| seen.standing.calls[0].verb = "all-to-all".to_string());
        assert!(!explain(&ranks, &timeout(0), now).contains("brings"), "everyone brings what it likes");
        ranks[1].standing.calls[0].dtype = "bf16".to_string();
        let text = explain(&ranks, &timeout(0), now);
        assert!(text.contains("Rank 1 brings 4096 × bf16 to all-to-all #412"), "{text}");
    }

    #[test]
    fn a_timeout_while_all_are_alive() {
        let (mut ranks, now) = scene(4);
        late(&mut ranks[3]);
        assert_eq!(
            explain(&ranks, &timeout(0), now),
            "rank 0 (host a, process 4708) ran into a time limit: made no progress for 30s. Ranks 0-2 wait in reduce-scatter \
             #412 of 'block.7' (12.6 MB, shard 0-3), 31 s so far. Rank 3 (host b, process 4711) never entered it: it has been \
             in forward of block.2 at step 41 for 35 s."
        );
        ranks[3].presence = Presence::Left { code: Some(0) };
        let text = explain(&ranks, &timeout(0), now);
        assert!(text.ends_with("it has ended with exit code 0, at step 41 in forward of block.2."), "{text}");
        let (ranks, now) = scene(4);
        let text = explain(&ranks, &timeout(0), now);
        let expected = "Every rank that belongs there has entered reduce-scatter #412 of 'block.7' (12.6 MB, shard 0-3), so look \
                        at the network between them first. It waits for rank 3, on host b.";
        assert!(text.ends_with(expected), "{text}");
    }

    #[test]
    fn a_chain_of_waiting_leads_to_its_end() {
        // Ranks 0 and 1 are a group, and so are 1 and 2: 0 waits for 1, which waits for 2, which computes.
        let (mut ranks, now) = scene(4);
        let group = |first: usize, number, state, for_ms| CallStanding {
            group: format!("pair {first}-{}", first + 1),
            ranks: Ranks::of([first, first + 1]),
            state,
            for_ms,
            ..call(number)
        };
        ranks[0].standing.calls = vec![group(0, 9, CallState::UnderWay, 40_000)];
        ranks[1].standing.calls = vec![group(0, 8, CallState::Done, 1), group(1, 5, CallState::UnderWay, 30_000)];
        late(&mut ranks[2]);
        ranks[2].standing.calls = vec![group(1, 4, CallState::Done, 1)];
        ranks[3].standing.calls.clear();
        let text = explain(&ranks, &timeout(0), now);
        assert!(
            text.contains("Rank 1 waits in reduce-scatter #5 of 'block.7' (12.6 MB, pair 1-2), 30 s so far."),
            "{text}"
        );
        assert!(
            text.ends_with(
                "Rank 2 (host b, process 4710) never entered it: it has been in forward of block.2 at step 41 for 35 s."
            ),
            "{text}"
        );
        // And where they wait for each other, that is said.
        ranks[1].standing.calls = vec![group(1, 5, CallState::UnderWay, 30_000)];
        ranks[2].standing.calls = vec![group(1, 4, CallState::Done, 1), group(0, 1, CallState::UnderWay, 20_000)];
        let text = explain(&ranks, &timeout(0), now);
        assert!(text.contains("it waits itself in"), "{text}");
    }

    #[test]
    fn calls_that_are_queued_ahead_are_no_fault() {
        // Rank 0 has begun #412 and queued #414 behind it; rank 3 is at #411.
        let (mut ranks, now) = scene(4);
        let ahead = CallStanding { state: CallState::Queued, ..ranks[0].standing.calls[0].clone() };
        ranks[0].standing.calls.push(CallStanding { number: 414, label: "block.5".to_string(), ..ahead });
        late(&mut ranks[3]);
        let text = explain(&ranks, &timeout(0), now);
        assert!(text.contains("Ranks 0-2 wait in reduce-scatter #412 of 'block.7'"), "{text}");
    }

    #[test]
    fn a_failure_in_its_own_words() {
        let (ranks, now) = scene(4);
        let cause = Cause::Failed {
            rank: 3,
            kind: FailureKind::Memory,
            text: "out of memory:\n  12 GB asked for.\n".to_string(),
        };
        assert_eq!(
            explain(&ranks, &cause, now),
            "rank 3 (host b, process 4711) failed at step 41 in backward of block.7 (memory): out of memory: 12 GB asked for."
        );
        let cause = Cause::Failed { rank: 3, kind: FailureKind::Error, text: "é".repeat(5000) };
        assert!(explain(&ranks, &cause, now).chars().count() < 800);
    }

    #[test]
    fn ten_thousand_ranks_in_one_paragraph_and_a_moment() {
        let (mut ranks, now) = scene(10_000);
        late(&mut ranks[3]);
        let text = explain(&ranks, &timeout(0), now);
        assert!(text.contains("Ranks 0-2 and 4-9999 wait in reduce-scatter #412"), "{text}");
        for rank in (0..10_000).filter(|rank| rank % 3 == 0) {
            late(&mut ranks[rank]);
            ranks[rank].heard = ago(now, 20);
        }
        let causes = [
            timeout(1),
            silent(&(0..10_000).filter(|rank| rank % 3 == 0).collect::<Vec<_>>()),
            silent(&(16..1016).collect::<Vec<_>>()),
            Cause::Died { rank: 9, how: None },
            Cause::Absent { ranks: (5000..10_000).collect() },
        ];
        for cause in &causes {
            let started = Instant::now();
            let text = explain(&ranks, cause, now);
            assert!(text.len() < 1000, "{} bytes: {text}", text.len());
            assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
        }
        let text = explain(&ranks, &causes[0], now);
        assert!(text.ends_with("Ranks 0, 3, 6, 9, 12 and 3329 more (3334 of 10000) never entered it: ranks 0, 3, 6, 9, 12 and 3329 more are in forward at step 41."), "{text}");
        let text = explain(&ranks, &causes[2], now);
        assert!(
            text.starts_with(
                "hosts n2, n3, n4 and 122 more are lost: ranks 16-1015, all that ran there, are silent for 0 s to 20 s."
            ),
            "{text}"
        );
    }

    #[test]
    fn absurd_words_break_nothing() {
        let (mut ranks, now) = scene(4);
        for seen in &mut ranks {
            seen.standing.in_phase_ms = u64::MAX;
            seen.standing.calls[0].for_ms = u64::MAX;
            seen.standing.calls[0].bytes = u64::MAX;
            seen.standing.calls[0].waits_for = "0-4294967295".parse().unwrap();
        }
        ranks[1].standing.calls[0].ranks = Ranks::default();
        ranks[0].standing.calls[0].ranks = "4000000000-4294967295".parse().unwrap();
        for cause in [
            timeout(0),
            timeout(9),
            silent(&[1, 9, 9]),
            silent(&[]),
            Cause::Died { rank: 77, how: None },
            Cause::Absent { ranks: vec![] },
        ] {
            explain(&ranks, &cause, now);
        }
    }
}
