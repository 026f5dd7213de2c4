//! The tracing flags of `shardwise train`. `shardwise` parses them from the user, and `shardwise-rank` from `shardwise`.

#[derive(clap::Args)]
pub(crate) struct TraceFlags {
    /// Trace these steps into a file next to the checkpoints; it opens in ui.perfetto.dev
    #[arg(long, value_name = "FIRST..LAST")]
    pub(crate) trace: Option<String>,
    /// Trace these ranks in addition to the first 16
    #[arg(long, value_name = "RANK", value_delimiter = ',', requires = "trace")]
    pub(crate) trace_ranks: Vec<usize>,
}

impl TraceFlags {
    /// Converts the flags back to arguments.
    #[allow(dead_code, reason = "only one of the two programs passes them on")]
    pub(crate) fn arguments(&self) -> Vec<String> {
        let steps = self.trace.iter().map(|steps| format!("--trace={steps}"));
        steps.chain(self.trace_ranks.iter().map(|rank| format!("--trace-ranks={rank}"))).collect()
    }
}
