//! Which steps of a run are traced. Both programs read it: `shardwise` from people, `shardwise-rank` from `shardwise`.

#[derive(clap::Args)]
pub(crate) struct Tracing {
    /// Trace these steps, into a file beside the checkpoints that opens in ui.perfetto.dev
    #[arg(long, value_name = "FIRST..LAST")]
    pub(crate) trace: Option<String>,
    /// Ranks to trace beside the first 16
    #[arg(long, value_name = "RANK", value_delimiter = ',', requires = "trace")]
    pub(crate) trace_ranks: Vec<usize>,
}

impl Tracing {
    /// The same as arguments.
    #[allow(dead_code, reason = "one of the two programs reads them only")]
    pub(crate) fn arguments(&self) -> Vec<String> {
        let steps = self.trace.iter().map(|steps| format!("--trace={steps}"));
        steps.chain(self.trace_ranks.iter().map(|rank| format!("--trace-ranks={rank}"))).collect()
    }
}
