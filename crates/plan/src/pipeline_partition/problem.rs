//! What a pipeline partition is made for: the profile of the units, the workers, and the constraints.

/// What one unit of the chain costs, for one micro-batch on one worker.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UnitProfile {
    /// The unit's name.
    pub name: String,
    /// The time of its forward pass.
    pub forward_s: f64,
    /// The time of its backward pass, including recomputation.
    pub backward_s: f64,
    /// The bytes that later units read of this unit and of those before it: what is sent if a stage ends here. In a chain, the
    /// activations that the unit returns; with skip connections, the sum over all edges that cross this point.
    pub output_bytes: usize,
    /// The bytes of its parameters, and of their gradients.
    pub parameter_bytes: usize,
    /// The bytes of activations that its forward pass keeps for its backward pass.
    pub kept_bytes: usize,
}

/// The workers, one stage replica each, and the links between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Workers {
    /// The number of workers.
    pub count: usize,
    /// The levels of links, innermost first: for example within a host, then between hosts. The last one connects all workers.
    pub links: Vec<LinkLevel>,
}

/// The links of one level of the network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkLevel {
    /// The number of consecutive workers that these links connect.
    pub workers: usize,
    /// The bytes per second that one worker sends, while all others send as well; may be infinite.
    pub bytes_per_s: f64,
}

impl Workers {
    /// Workers that are all connected in the same way.
    pub fn on_one_network(count: usize, bytes_per_s: f64) -> Self {
        Workers { count, links: vec![LinkLevel { workers: count, bytes_per_s }] }
    }

    /// Workers on hosts, with one bandwidth within a host and another one between hosts.
    pub fn on_hosts(count: usize, workers_per_host: usize, within_bytes_per_s: f64, between_bytes_per_s: f64) -> Self {
        let within = LinkLevel { workers: workers_per_host, bytes_per_s: within_bytes_per_s };
        let between = LinkLevel { workers: count.max(workers_per_host), bytes_per_s: between_bytes_per_s };
        Workers { count, links: vec![within, between] }
    }
}

/// The kind of plan that is searched, and what it must respect.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constraints {
    /// How stages may be replicated.
    pub replication: Replication,
    /// How often gradients are reduced.
    pub reduction: GradientReduction,
    /// The state that a worker holds besides activations.
    pub state: StateBytes,
    /// The memory of a worker, if it is limited.
    pub memory_bytes_max: Option<usize>,
}

/// How stages may be replicated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replication {
    /// Equally: workers = stages × replicas, as on a mesh with a pipeline axis.
    Grid {
        /// The number of stages; if absent, all divisors of the number of workers are tried.
        stages: Option<usize>,
    },
    /// Each stage on its own, as in PipeDream; workers may be left idle. No mesh can run this; it is for comparison.
    Uneven,
}

/// How often a stage's replicas all-reduce their gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientReduction {
    /// Once per step (synchronous training).
    EachStep {
        /// The number of micro-batches in a step, over all replicas.
        micro_batches: usize,
    },
    /// Each time that every replica has computed one micro-batch, as in PipeDream, whose pipeline never drains.
    EachRound,
}

/// The bytes of parameters, gradients and optimizer state per byte of a stage's parameters. Adam in f32 without ZeRO has four
/// replicated ones; ZeRO stage 1 has two replicated and two sharded ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateBytes {
    /// Those that every replica holds.
    pub replicated: f64,
    /// Those that a stage's replicas share among them.
    pub sharded: f64,
}
