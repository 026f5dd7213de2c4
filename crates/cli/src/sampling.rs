//! What text is to be generated. Both programs read it: `shardwise` from people, `shardwise-rank` from `shardwise`.

#[derive(clap::Args)]
pub(crate) struct Text {
    /// What it begins with
    #[arg(long, default_value = "")]
    pub(crate) prompt: String,
    /// How many tokens at most
    #[arg(long, default_value_t = 200)]
    pub(crate) tokens: usize,
    /// How bold: 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.8)]
    pub(crate) temperature: f64,
    /// Choose among so many of the likeliest
    #[arg(long)]
    pub(crate) top_k: Option<usize>,
    /// Choose among the likeliest that have this probability together
    #[arg(long)]
    pub(crate) top_p: Option<f64>,
    /// Another seed gives another text
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

impl Text {
    /// The same for another program. In one word each: a prompt may begin with a dash.
    #[allow(dead_code, reason = "the program for ranks only reads it")]
    pub(crate) fn arguments(&self) -> Vec<String> {
        let Text { prompt, tokens, temperature, top_k, top_p, seed } = self;
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
