//! Flags of `shardwise generate`. `shardwise` parses them from the user, and `shardwise-rank` from `shardwise`.

#[derive(clap::Args)]
pub(crate) struct GenerateFlags {
    /// Continue this text
    #[arg(long, default_value = "")]
    pub(crate) prompt: String,
    /// Generate at most this many tokens
    #[arg(long, default_value_t = 200)]
    pub(crate) tokens: usize,
    /// Sample at this temperature; 0 always takes the most likely token
    #[arg(long, default_value_t = 0.8)]
    pub(crate) temperature: f64,
    /// Sample only from this many of the most likely tokens
    #[arg(long)]
    pub(crate) top_k: Option<usize>,
    /// Sample only from the most likely tokens whose probabilities add up to this
    #[arg(long)]
    pub(crate) top_p: Option<f64>,
    /// Seed the sampling; the same seed gives the same text
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

impl GenerateFlags {
    /// Converts the flags back to arguments, each as one `--flag=value`, since a prompt may start with a dash.
    #[allow(dead_code, reason = "only one of the two programs passes them on")]
    pub(crate) fn arguments(&self) -> Vec<String> {
        let GenerateFlags { prompt, tokens, temperature, top_k, top_p, seed } = self;
        let mut arguments = vec![
            format!("--prompt={prompt}"),
            format!("--tokens={tokens}"),
            format!("--temperature={temperature}"),
            format!("--seed={seed}"),
        ];
        arguments.extend(top_k.map(|count| format!("--top-k={count}")));
        arguments.extend(top_p.map(|part| format!("--top-p={part}")));
        arguments
    }
}
