//! The command-line options that change a recipe. `shardwise` parses them from the user, and `shardwise-rank` from `shardwise`.

use std::path::PathBuf;

#[derive(clap::Args)]
pub(crate) struct Layers {
    /// Apply a DeepSpeed configuration on top of the recipe; refuse to start if a key has no counterpart
    #[arg(long, value_name = "DS_CONFIG.JSON")]
    pub(crate) deepspeed: Option<PathBuf>,
    /// Set a key of the recipe, such as optimizer.lr=1e-3; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}
