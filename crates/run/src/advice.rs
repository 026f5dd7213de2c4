//! Recommendations that make a recipe faster.
//!
//! A candidate is a changed recipe that fits into memory. Its saving is simulated, but only to choose which candidates are worth
//! trying. Recommendations outside the recipe, such as a faster disk, cannot be tried and remain estimates.

use serde::Serialize;
use shardwise_journal::Profile;
use shardwise_recipe::{ActivationCheckpointingRecipe, FloatRecipe, Recipe};

use crate::error::Result;
use crate::memory_estimate::MemoryEstimate;
use crate::step_costs::StepCosts;

/// The maximum number of tokens in a candidate's micro-batch. Larger ones gain nothing: their matrices are already large enough.
const MICRO_BATCH_TOKENS_MAX: usize = 4096;

/// A candidate's memory estimate may be at most this fraction of the limit.
const MEMORY_SHARE: f64 = 0.85;

/// A recommended change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recommendation {
    /// The bottleneck: `data`, `link`, `micro-batch`, `slow rank`, …
    pub cause: &'static str,
    /// What to change, as written in a recipe.
    pub change: String,
    /// Why it helps.
    pub why: String,
    /// The time of a step of the same size after the change.
    pub step_s: f64,
    /// The speedup: 1.2 means 1.2 times as fast.
    pub gain: f64,
    /// Whether the speedup was measured; otherwise it is estimated.
    pub tried: bool,
}

/// The measurements of a recipe and the machine. Times are in seconds per step.
pub(crate) struct Facts<'a> {
    pub(crate) ranks: usize,
    pub(crate) costs: &'a StepCosts,
    /// The time of a step, simulated from these costs.
    pub(crate) simulated_step_s: f64,
    pub(crate) profile: &'a Profile,
    /// The shortest step: the baseline for candidates.
    pub(crate) step_s: f64,
    pub(crate) hosts: usize,
    pub(crate) micro_batches: usize,
    pub(crate) micro_batch_tokens: usize,
    /// The time that the model FLOPs would take at the speed of a large matrix product.
    pub(crate) arithmetic_s: f64,
    /// The speedup of matrix products in the other type: bf16 if the recipe computes in f32, and f32 otherwise.
    pub(crate) other_dtype_speedup: f64,
    /// A better number of threads, and the speedup of a matrix product with it.
    pub(crate) threads: Option<(usize, f64)>,
    /// The bandwidth of a large all-gather.
    pub(crate) bytes_per_s: f64,
}

impl Facts<'_> {
    fn computing_s(&self) -> f64 {
        ["forward", "recompute", "backward"].iter().map(|kind| self.profile.kind_s(kind)).sum()
    }

    /// The time lost to matrices that are too small.
    fn inefficiency_s(&self) -> f64 {
        (self.computing_s() - self.profile.kind_s("recompute") - self.arithmetic_s / 0.7).max(0.)
    }

    fn wait_gather_s(&self) -> f64 {
        self.profile.kind_s("wait gather")
    }

    fn wait_reduce_s(&self) -> f64 {
        self.profile.kind_s("wait reduce")
    }

    /// The longest data loading time of any rank.
    fn data_s(&self) -> f64 {
        self.profile.by_rank.iter().map(|rank| rank.data_s).fold(0., f64::max)
    }

    fn percent(&self, seconds: f64) -> f64 {
        100. * seconds / self.profile.step_s.max(1e-9)
    }

    /// Whether waiting for communication is the bottleneck, rather than small matrices.
    fn is_link_bound(&self) -> bool {
        let link = self.profile.communication.link_s();
        link > 0.3 * self.profile.step_s && link > self.inefficiency_s()
    }
}

/// The setting that a candidate changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Knob {
    /// Micro-batches that are this many times as large, in a step of the same size.
    LargerMicroBatch(usize),
    /// A step that is this many times as large.
    LargerStep(usize),
    LessCheckpointing,
    OtherDtype,
    Bf16Gradients,
    Stage2,
    MorePrefetch,
    ReduceOncePerStep,
    Replicate,
}

/// A changed recipe.
pub(crate) struct Candidate {
    pub(crate) knob: Knob,
    /// The change as written in a recipe.
    pub(crate) text: String,
    pub(crate) recipe: Recipe,
    /// The tokens of a step, relative to the unchanged recipe.
    pub(crate) tokens: f64,
}

impl Candidate {
    /// The recommendation, given the measured time for the tokens of one original step.
    pub(crate) fn recommend(&self, facts: &Facts<'_>, step_s: f64) -> Recommendation {
        let (cause, why) = explain(self.knob, facts);
        // A larger step also loads data less often. That saving is not due to its size, so it is added back.
        let step_s = step_s + facts.data_s() * (1. - 1. / self.tokens);
        Recommendation {
            cause,
            change: self.text.clone(),
            why,
            step_s,
            gain: facts.step_s / step_s.max(1e-9),
            tried: true,
        }
    }
}

/// All changes that the recipe allows and that fit into `room` bytes of memory per rank.
pub(crate) fn candidates(recipe: &Recipe, ranks: usize, hosts: usize, room: usize) -> Result<Vec<Candidate>> {
    let batch = recipe.batch(ranks)?;
    let (sequences, micro_batches) = (batch.micro_batch_size, batch.gradient_accumulation_steps);
    let fits = |recipe: &Recipe| {
        MemoryEstimate::of(recipe, ranks).is_ok_and(|estimate| estimate.total() as f64 <= MEMORY_SHARE * room as f64)
    };
    let mut all = Vec::new();
    let mut add = |knob: Knob, tokens: f64, text: String, change: &dyn Fn(&mut Recipe)| -> bool {
        let mut changed = recipe.clone();
        change(&mut changed);
        let is_possible = fits(&changed);
        if is_possible {
            all.push(Candidate { knob, text, recipe: changed, tokens });
        }
        is_possible
    };
    let resize = |recipe: &mut Recipe, sequences: usize, micro_batches: usize| {
        recipe.batch.global_batch_size = None;
        recipe.batch.micro_batch_size = Some(sequences);
        recipe.batch.gradient_accumulation_steps = Some(micro_batches);
    };
    let own_positions = recipe.batch.seq_len.div_ceil(recipe.parallel.context);
    let is_small = |times: usize| sequences * times * own_positions <= MICRO_BATCH_TOKENS_MAX;
    let divides = |times: &usize| micro_batches.is_multiple_of(*times) && (is_small(*times) || *times == 2);
    for times in (2..=micro_batches).rev().filter(divides) {
        let (sequences, micro_batches) = (sequences * times, micro_batches / times);
        let text = format!(
            "batch.micro_batch_size = {sequences}, batch.gradient_accumulation_steps = {micro_batches} (the same step)"
        );
        if add(Knob::LargerMicroBatch(times), 1., text, &|recipe| resize(recipe, sequences, micro_batches)) {
            break;
        }
    }
    if micro_batches == 1 && is_small(2) {
        let text = format!("batch.micro_batch_size = {} (twice the tokens in a step)", 2 * sequences);
        add(Knob::LargerStep(2), 2., text, &|recipe| resize(recipe, 2 * sequences, 1));
    }
    if recipe.activation_checkpointing != ActivationCheckpointingRecipe::None {
        let (none, selective) = (ActivationCheckpointingRecipe::None, ActivationCheckpointingRecipe::Selective);
        let text = "activation_checkpointing = \"none\"".to_string();
        let fits = add(Knob::LessCheckpointing, 1., text, &|recipe| recipe.activation_checkpointing = none);
        if !fits && recipe.activation_checkpointing == ActivationCheckpointingRecipe::Full {
            let text = "activation_checkpointing = \"selective\"".to_string();
            add(Knob::LessCheckpointing, 1., text, &|recipe| recipe.activation_checkpointing = selective);
        }
    }
    let (other, name) = match recipe.precision.param_dtype {
        FloatRecipe::F32 => (FloatRecipe::Bf16, "bf16"),
        _ => (FloatRecipe::F32, "f32"),
    };
    add(Knob::OtherDtype, 1., format!("precision.param_dtype = \"{name}\""), &|recipe| {
        recipe.precision.param_dtype = other;
        recipe.precision.reduce_dtype = recipe.precision.reduce_dtype.filter(|dtype| *dtype != FloatRecipe::F64);
    });
    if recipe.resolve_reduce_dtype() == FloatRecipe::F32 {
        let text = "precision.reduce_dtype = \"bf16\"".to_string();
        add(Knob::Bf16Gradients, 1., text, &|recipe| recipe.precision.reduce_dtype = Some(FloatRecipe::Bf16));
    }
    if recipe.zero.stage == 3 && ranks > 1 {
        add(Knob::Stage2, 1., "zero.stage = 2".to_string(), &|recipe| recipe.zero.stage = 2);
    }
    let prefetch = recipe.zero.prefetch + 1;
    let text = format!("zero.prefetch = {prefetch}");
    add(Knob::MorePrefetch, 1., text, &|recipe| recipe.zero.prefetch = prefetch);
    if micro_batches > 1 && recipe.zero.reduce_each_micro_batch {
        let text = "zero.reduce_each_micro_batch = false".to_string();
        add(Knob::ReduceOncePerStep, 1., text, &|recipe| recipe.zero.reduce_each_micro_batch = false);
    }
    if hosts > 1 && ranks > hosts && recipe.parallel.replicate == 1 && ranks.is_multiple_of(hosts) {
        let text = format!("parallel.replicate = {hosts} (one for each host)");
        add(Knob::Replicate, 1., text, &|recipe| recipe.parallel.replicate = hosts);
    }
    Ok(all)
}

/// Simulates the seconds per step that a candidate saves; negative if it costs time.
pub(crate) fn simulate_saving_s(candidate: &Candidate, facts: &Facts<'_>) -> f64 {
    // The simulation knows what is sent and what waits, but not how fast other computations are.
    let speedup = match candidate.knob {
        Knob::OtherDtype => facts.other_dtype_speedup.max(0.01),
        Knob::LargerMicroBatch(times) | Knob::LargerStep(times) => {
            let lost = facts.inefficiency_s() / facts.computing_s().max(1e-9);
            1. / (1. - lost * (1. - 1. / times as f64))
        }
        _ => 1.,
    };
    let simulated = facts.costs.simulate(&candidate.recipe, facts.ranks, speedup);
    simulated.map_or(0., |simulated| facts.simulated_step_s - simulated.step_s / candidate.tokens)
}

/// The bottleneck that a change addresses, and why it helps.
fn explain(knob: Knob, facts: &Facts<'_>) -> (&'static str, String) {
    let (gather, reduce) = (facts.percent(facts.wait_gather_s()), facts.percent(facts.wait_reduce_s()));
    let link = facts.profile.communication.link_s();
    match knob {
        Knob::LargerMicroBatch(_) | Knob::LargerStep(_) if facts.is_link_bound() => (
            "link",
            format!("ranks wait for the link for {:.0}% of a step, regardless of its size", facts.percent(link)),
        ),
        Knob::LargerMicroBatch(_) | Knob::LargerStep(_) => {
            let reached = 100. * facts.arithmetic_s / facts.computing_s().max(1e-9);
            // Above 100%, the matrix product was measured on a busy machine.
            let speed = match reached <= 100. {
                true => format!(": it computes at {reached:.0}% of a large matrix product's speed"),
                false => String::new(),
            };
            let why = format!("a micro-batch of {} tokens is small{speed}", facts.micro_batch_tokens);
            let gathers = match facts.micro_batches {
                1 => String::new(),
                count => {
                    format!(
                        ", and units are gathered {count} times per step ({gather:.0}% of a step is spent waiting for it)"
                    )
                }
            };
            ("micro-batch", why + &gathers)
        }
        Knob::LessCheckpointing => {
            let again = facts.percent(facts.profile.kind_s("recompute"));
            (
                "activation checkpointing",
                format!("{again:.0}% of a step is spent recomputing activations, and there is memory to keep them"),
            )
        }
        Knob::OtherDtype => (
            "precision",
            format!("matrix products of this type are {:.1} times as fast here", facts.other_dtype_speedup),
        ),
        Knob::Bf16Gradients => {
            ("link", format!("{reduce:.0}% of a step is spent waiting for gradients, which would be half as large"))
        }
        Knob::Stage2 => (
            "link",
            format!("{gather:.0}% of a step is spent waiting for parameters, and there is memory to keep them"),
        ),
        Knob::MorePrefetch => {
            let hidden = 100. * facts.profile.communication.hidden_share();
            (
                "prefetch",
                format!(
                    "only {hidden:.0}% of the communication is hidden, and there is computation to hide more behind"
                ),
            )
        }
        Knob::ReduceOncePerStep => {
            ("link", format!("gradients are reduced {} times per step, and once would be enough", facts.micro_batches))
        }
        Knob::Replicate => (
            "link",
            format!("parameters would stay within a host; the link takes {:.0}% of a step", facts.percent(link)),
        ),
    }
}

/// Recommendations for bottlenecks that no recipe key removes. Their gains are estimates.
pub(crate) fn recommend_outside_recipe(facts: &Facts<'_>) -> Vec<Recommendation> {
    let mut recommendations = Vec::new();
    let mut add = |cause: &'static str, saved_s: f64, change: String, why: String| {
        let step_s = (facts.step_s - saved_s).max(0.02 * facts.step_s);
        recommendations.push(Recommendation { cause, change, why, step_s, gain: facts.step_s / step_s, tried: false });
    };
    let ranks = &facts.profile.by_rank;
    if let Some(slowest) = ranks.iter().max_by(|a, b| a.data_s.total_cmp(&b.data_s)) {
        add(
            "data",
            slowest.data_s,
            "load data faster: from a local disk, or tokenized in advance (shardwise tokenize)".to_string(),
            format!(
                "rank {} reads its tokens for {:.0} ms of a step, and all ranks wait for it",
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
                "it is busy for {:.0} ms of a step and the others for {:.0} ms, then they wait for it",
                1e3 * slowest.busy_s,
                1e3 * usual
            );
            let change = format!("find out what slows down rank {} on {}, or leave it out", slowest.rank, slowest.host);
            add("slow rank", extra, change, why);
        }
    }
    // Converts times of the mean step to times of the shortest step.
    let undisturbed = facts.step_s / facts.profile.step_s.max(1e-9);
    let link = facts.profile.communication.link_s();
    if facts.hosts > 1 && link > 0.25 * facts.profile.step_s {
        add(
            "link",
            0.9 * link * undisturbed,
            "a link between hosts with ten times the bandwidth".to_string(),
            format!(
                "it moves {:.1} MB/s, and ranks wait for it for {:.0}% of a step",
                facts.bytes_per_s / 1e6,
                facts.percent(link)
            ),
        );
    }
    if let Some((threads, gain)) = facts.threads {
        let why = format!("matrix products are {gain:.1} times as fast with one thread per core of the rank");
        let saved = facts.computing_s() * (1. - 1. / gain) * undisturbed;
        add("threads", saved, format!("OMP_NUM_THREADS={threads}"), why);
    }
    recommendations
}
