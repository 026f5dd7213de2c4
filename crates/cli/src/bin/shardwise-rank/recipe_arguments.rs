//! The arguments that name a recipe.

use std::path::PathBuf;

use shardwise_cli::flags::Layers;
use shardwise_recipe::Recipe;
use shardwise_supervisor::RankCount;

/// A recipe and its layers.
#[derive(clap::Args)]
pub(crate) struct RecipeArguments {
    #[arg(value_name = "RECIPE")]
    pub(crate) path: PathBuf,
    #[arg(long)]
    pub(crate) ranks: Option<RankCount>,
    #[command(flatten)]
    layers: Layers,
}

impl RecipeArguments {
    pub(crate) fn read(&self) -> Result<Recipe, String> {
        let Layers { deepspeed, set } = &self.layers;
        Recipe::read_layered(&self.path, deepspeed.as_deref(), set).map_err(|error| error.to_string())
    }
}
