//! What could be changed in a recipe to make it faster, and what that would save.
//!
//! A candidate is a changed recipe that fits into memory. What it would save is estimated from the trace, to choose which are worth
//! trying; what is not the recipe's to change (`standing`) is estimated and no more.

use shardwise_journal::Profile;

use crate::Result;
use crate::fit::Need;
use crate::profile::Change;
use crate::recipe::{AccumulationRecipe, FloatRecipe, Recipe, RecomputationRecipe};

/// The most tokens of a micro-batch that are worth trying: matrices are large enough by then.
const MICRO_BATCH_TOKENS: usize = 4096;

/// What a recipe's estimate of memory may be at most of what there is, to be tried.
const ROOM: f64 = 0.85;

/// What is known of a recipe's steps. Times are seconds a step.
pub(crate) struct Facts<'a> {
    pub(crate) profile: &'a Profile,
    /// The least of any: what changes are compared with.
    pub(crate) step_s: f64,
    pub(crate) hosts: usize,
    pub(crate) micro_batches: usize,
    /// On a rank.
    pub(crate) micro_batch_tokens: usize,
    /// What the model's arithmetic would take at the speed of a large matrix product.
    pub(crate) arithmetic_s: f64,
    /// How many times as fast a matrix product is in the other type: bf16 for f32, and f32 for others.
    pub(crate) other_type: f64,
    pub(crate) threads: Option<(usize, f64)>,
    /// Of a large gather.
    pub(crate) bytes_per_s: f64,
}

impl Facts<'_> {
    fn computing_s(&self) -> f64 {
        ["forward", "recompute", "backward"].iter().map(|kind| self.profile.kind_s(kind)).sum()
    }

    /// What computing takes beyond what it would in matrices of a good size.
    fn inefficient_s(&self) -> f64 {
        (self.computing_s() - self.profile.kind_s("recompute") - self.arithmetic_s / 0.7).max(0.)
    }

    fn wait_gather_s(&self) -> f64 {
        self.profile.kind_s("wait gather")
    }

    fn wait_reduce_s(&self) -> f64 {
        self.profile.kind_s("wait reduce")
    }

    /// Of the rank that reads its tokens for longest.
    fn data_s(&self) -> f64 {
        self.profile.by_rank.iter().map(|rank| rank.data_s).fold(0., f64::max)
    }

    fn percent(&self, seconds: f64) -> f64 {
        100. * seconds / self.profile.step_s.max(1e-9)
    }

    /// Whether ranks stand still for what moves between them, more than computing loses by itself.
    fn is_link(&self) -> bool {
        let link = self.profile.communication.link_s();
        link > 0.3 * self.profile.step_s && link > self.inefficient_s()
    }
}

/// What a candidate changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lever {
    /// Fewer and larger micro-batches of the same step: so many in one.
    Larger(usize),
    /// Larger steps: so many times the tokens.
    More(usize),
    LessRecomputation,
    OtherType,
    SmallGradients,
    Stage2,
    MoreInFlight,
    AddedUpWhole,
    Replicas,
}

/// A changed recipe.
pub(crate) struct Candidate {
    pub(crate) lever: Lever,
    /// As one would write it.
    pub(crate) text: String,
    pub(crate) recipe: Recipe,
    /// How many times the tokens a step has then.
    pub(crate) tokens: f64,
}

impl Candidate {
    /// What it brings, now that a step of as many tokens was seen to take so long with it.
    pub(crate) fn as_change(&self, facts: &Facts<'_>, step_s: f64) -> Change {
        let (cause, why) = reason(self.lever, facts);
        // Larger steps also read more rarely, which is not what is wrong with their size.
        let step_s = step_s + facts.data_s() * (1. - 1. / self.tokens);
        Change { cause, change: self.text.clone(), why, step_s, gain: facts.step_s / step_s.max(1e-9), tried: true }
    }
}

/// All changes that a recipe allows and that fit into so many bytes.
pub(crate) fn candidates(recipe: &Recipe, ranks: usize, hosts: usize, room: usize) -> Result<Vec<Candidate>> {
    let batch = recipe.batch(ranks)?;
    let (sequences, micro_batches, positions) = (batch.sequences, batch.micro_batches, recipe.batch.positions);
    let fits = |recipe: &Recipe| Need::of(recipe, ranks).is_ok_and(|need| need.total() as f64 <= ROOM * room as f64);
    let mut all = Vec::new();
    let mut add = |lever: Lever, tokens: f64, text: String, change: &dyn Fn(&mut Recipe)| -> bool {
        let mut changed = recipe.clone();
        change(&mut changed);
        let is_possible = fits(&changed);
        if is_possible {
            all.push(Candidate { lever, text, recipe: changed, tokens });
        }
        is_possible
    };
    let resized = |recipe: &mut Recipe, sequences: usize, micro_batches: usize| {
        recipe.batch.global = None;
        recipe.batch.sequences = Some(sequences);
        recipe.batch.micro_batches = Some(micro_batches);
    };
    let is_small = |times: usize| sequences * times * positions <= MICRO_BATCH_TOKENS;
    let joined = |times: &usize| micro_batches.is_multiple_of(*times) && (is_small(*times) || *times == 2);
    for times in (2..=micro_batches).rev().filter(joined) {
        let (sequences, micro_batches) = (sequences * times, micro_batches / times);
        let text = format!("batch.sequences = {sequences}, batch.micro_batches = {micro_batches} (the same step)");
        if add(Lever::Larger(times), 1., text, &|recipe| resized(recipe, sequences, micro_batches)) {
            break;
        }
    }
    if micro_batches == 1 && is_small(2) {
        let text = format!("batch.sequences = {} (twice the tokens in a step)", 2 * sequences);
        add(Lever::More(2), 2., text, &|recipe| resized(recipe, 2 * sequences, 1));
    }
    if recipe.recomputation != RecomputationRecipe::None {
        let none = "recomputation = \"none\"".to_string();
        let fits = add(Lever::LessRecomputation, 1., none, &|recipe| recipe.recomputation = RecomputationRecipe::None);
        if !fits && recipe.recomputation == RecomputationRecipe::Full {
            let selective = "recomputation = \"selective\"".to_string();
            add(Lever::LessRecomputation, 1., selective, &|r| r.recomputation = RecomputationRecipe::Selective);
        }
    }
    let (other, name) = match recipe.precision.parameters {
        FloatRecipe::F32 => (FloatRecipe::Bf16, "bf16"),
        _ => (FloatRecipe::F32, "f32"),
    };
    add(Lever::OtherType, 1., format!("precision.parameters = \"{name}\""), &|r| r.precision.parameters = other);
    if recipe.precision.gradients == FloatRecipe::F32 {
        let text = "precision.gradients = \"bf16\"".to_string();
        add(Lever::SmallGradients, 1., text, &|recipe| recipe.precision.gradients = FloatRecipe::Bf16);
    }
    if recipe.sharding.stage == 3 && ranks > 1 {
        add(Lever::Stage2, 1., "sharding.stage = 2".to_string(), &|recipe| recipe.sharding.stage = 2);
    }
    let in_flight = recipe.sharding.units_in_flight + 1;
    let text = format!("sharding.units_in_flight = {in_flight}");
    add(Lever::MoreInFlight, 1., text, &|recipe| recipe.sharding.units_in_flight = in_flight);
    if micro_batches > 1 && recipe.sharding.accumulation == AccumulationRecipe::Sharded {
        let text = "sharding.accumulation = \"whole\"".to_string();
        add(Lever::AddedUpWhole, 1., text, &|recipe| recipe.sharding.accumulation = AccumulationRecipe::Whole);
    }
    if hosts > 1 && ranks > hosts && recipe.sharding.replicas == 1 && ranks.is_multiple_of(hosts) {
        let text = format!("sharding.replicas = {hosts} (one for each host)");
        add(Lever::Replicas, 1., text, &|recipe| recipe.sharding.replicas = hosts);
    }
    Ok(all)
}

/// What a candidate would save of a step.
pub(crate) fn estimated_s(candidate: &Candidate, facts: &Facts<'_>) -> f64 {
    let (gather, reduce) = (facts.wait_gather_s(), facts.wait_reduce_s());
    let micro_batches = facts.micro_batches as f64;
    let handing: f64 = ["gather", "reduce", "optimizer"].iter().map(|kind| facts.profile.kind_s(kind)).sum();
    match candidate.lever {
        Lever::Larger(times) => (gather + facts.inefficient_s() + handing) * (1. - 1. / times as f64),
        Lever::More(times) => {
            let once = gather + reduce + handing + facts.profile.kind_s("wait agree");
            (once + facts.inefficient_s()) * (1. - 1. / times as f64)
        }
        Lever::LessRecomputation => facts.profile.kind_s("recompute").max(0.04 * facts.computing_s()),
        Lever::OtherType => {
            let halved = if facts.other_type > 1. { gather / 2. } else { -gather };
            facts.computing_s() * (1. - 1. / facts.other_type.max(0.01)) + halved
        }
        Lever::SmallGradients => reduce / 2.,
        Lever::Stage2 => gather * (2. * micro_batches - 1.) / (2. * micro_batches),
        Lever::MoreInFlight => {
            // What can be hidden needs something to hide behind.
            let communication = facts.profile.communication;
            let behind = (facts.computing_s() - communication.hidden_s).max(0.);
            0.5 * communication.link_s().min(behind)
        }
        Lever::AddedUpWhole => reduce * (1. - 1. / micro_batches),
        Lever::Replicas => 0.7 * facts.profile.communication.link_s(),
    }
}

/// What a change is about, and why it helps.
fn reason(lever: Lever, facts: &Facts<'_>) -> (&'static str, String) {
    let (gather, reduce) = (facts.percent(facts.wait_gather_s()), facts.percent(facts.wait_reduce_s()));
    let link = facts.profile.communication.link_s();
    match lever {
        Lever::Larger(_) | Lever::More(_) if facts.is_link() => (
            "link",
            format!("ranks stand still for the link for {:.0}% of a step, whatever its size", facts.percent(link)),
        ),
        Lever::Larger(_) | Lever::More(_) => {
            let reached = 100. * facts.arithmetic_s / facts.computing_s().max(1e-9);
            // More than all of it means that the product was measured on a busy machine.
            let speed = match reached <= 100. {
                true => format!(": it computes at {reached:.0}% of a large matrix product's speed"),
                false => String::new(),
            };
            let why = format!("a micro-batch of {} tokens is small{speed}", facts.micro_batch_tokens);
            let gathers = match facts.micro_batches {
                1 => String::new(),
                count => {
                    format!(", and units are gathered {count} times over ({gather:.0}% of a step is waiting for it)")
                }
            };
            ("micro-batch", why + &gathers)
        }
        Lever::LessRecomputation => {
            let again = facts.percent(facts.profile.kind_s("recompute"));
            ("recomputation", format!("{again:.0}% of a step is computing again what there is memory to keep"))
        }
        Lever::OtherType => {
            ("precision", format!("a matrix product in it is {:.1} times as fast here", facts.other_type))
        }
        Lever::SmallGradients => {
            ("link", format!("{reduce:.0}% of a step is waiting for gradients, which would be half as large"))
        }
        Lever::Stage2 => {
            ("link", format!("{gather:.0}% of a step is waiting for parameters, which there is memory to keep"))
        }
        Lever::MoreInFlight => {
            let hidden = 100. * facts.profile.communication.hidden_share();
            (
                "in flight",
                format!("{hidden:.0}% of the communication is hidden, and there is computing to hide more behind"),
            )
        }
        Lever::AddedUpWhole => {
            ("link", format!("gradients are reduced {} times in a step, and once would do", facts.micro_batches))
        }
        Lever::Replicas => (
            "link",
            format!("parameters would not leave their hosts; the link takes {:.0}% of a step", facts.percent(link)),
        ),
    }
}

/// What stands in the way and is not the recipe's to change.
pub(crate) fn standing(facts: &Facts<'_>) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut add = |cause: &'static str, saved_s: f64, change: String, why: String| {
        let step_s = (facts.step_s - saved_s).max(0.02 * facts.step_s);
        changes.push(Change { cause, change, why, step_s, gain: facts.step_s / step_s, tried: false });
    };
    let ranks = &facts.profile.by_rank;
    if let Some(slowest) = ranks.iter().max_by(|a, b| a.data_s.total_cmp(&b.data_s)) {
        add(
            "data",
            slowest.data_s,
            "a faster source of data: a local disk, or tokens made beforehand (shardwise tokenize)".to_string(),
            format!(
                "rank {} reads its tokens for {:.0} ms of a step, and all wait for it",
                slowest.rank,
                1e3 * slowest.data_s
            ),
        );
    }
    let mut busy: Vec<f64> = ranks.iter().map(|rank| rank.busy_s).collect();
    busy.sort_by(f64::total_cmp);
    let slowest = ranks.iter().max_by(|a, b| a.busy_s.total_cmp(&b.busy_s));
    if let (Some(slowest), Some(&usual)) = (slowest, busy.get(busy.len().saturating_sub(1) / 2)) {
        let extra = slowest.busy_s - usual;
        if extra > 0.2 * usual {
            let why = format!(
                "it works for {:.0} ms of a step, the others for {:.0}, who wait for it",
                1e3 * slowest.busy_s,
                1e3 * usual
            );
            let change = format!("rank {} on {}: find what slows it down, or leave it out", slowest.rank, slowest.host);
            add("slow rank", extra, change, why);
        }
    }
    // From the mean of steps to the least of them.
    let undisturbed = facts.step_s / facts.profile.step_s.max(1e-9);
    let link = facts.profile.communication.link_s();
    if facts.hosts > 1 && link > 0.25 * facts.profile.step_s {
        add(
            "link",
            0.9 * link * undisturbed,
            "a link between hosts of ten times the rate".to_string(),
            format!(
                "it moves {:.1} MB/s, and ranks stand still for it for {:.0}% of a step",
                facts.bytes_per_s / 1e6,
                facts.percent(link)
            ),
        );
    }
    if let Some((threads, gain)) = facts.threads {
        let why = format!("a matrix product is {gain:.1} times as fast with as many threads as the rank has cores");
        let saved = facts.computing_s() * (1. - 1. / gain) * undisturbed;
        add("threads", saved, format!("OMP_NUM_THREADS={threads}"), why);
    }
    changes
}
