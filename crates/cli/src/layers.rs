//! What is laid over a recipe on the command line. Both programs read it: `shardwise` from people, `shardwise-rank` from
//! `shardwise`.

use std::path::PathBuf;

#[derive(clap::Args)]
pub(crate) struct Layers {
    /// Lay a DeepSpeed configuration over the recipe; keys that cannot be honoured are listed, and nothing starts
    #[arg(long, value_name = "DS_CONFIG.JSON")]
    pub(crate) deepspeed: Option<PathBuf>,
    /// Set a key of the recipe, such as optimizer.rate=1e-3; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}
