//! Profiles a recipe as one of the ranks.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use serde_json::json;
use shardwise_cli::flags::ProfileFlags;
use shardwise_comm::Group;
use shardwise_journal::spans::Trace;
use shardwise_journal::trace_svg;
use shardwise_recipe::Recipe;
use shardwise_run::{Error, PositionTracker, ProfileOptions, RunOutcome, profile};
use shardwise_supervisor::launcher_env::{RANK, env_number, launcher_env};

use crate::flags::parse_faults;
use crate::profile_table::table;
use crate::rank::{MemoryCheck, run_ranks};
use crate::recipe_arguments::RecipeArguments;
use crate::supervisor_link::SupervisorLink;

/// Profiles a recipe. Rank 0 prints the result.
pub(crate) fn run(arguments: &RecipeArguments, flags: &ProfileFlags, width: Option<usize>) -> Result<ExitCode> {
    let rank = env_number(RANK).unwrap_or(0);
    let faults = parse_faults(&flags.fault).map_err(anyhow::Error::msg)?;
    let position = Arc::new(PositionTracker::new(faults.into_iter().filter(|fault| fault.rank == rank).collect()));
    let temporary = tempfile::tempdir()?;
    let folder = flags.keep.clone().unwrap_or_else(|| temporary.path().to_path_buf());
    let launcher = launcher_env().unwrap_or_default();
    let work = |recipe: &Recipe, world: &Arc<Group>| {
        let ranks_here = launcher.local_size.unwrap_or(world.size());
        let (costs, try_changes) = (flags.costs.clone(), !flags.no_tries);
        let options = ProfileOptions { steps: flags.steps, try_changes, folder, costs, ranks_here };
        let Some(result) = profile(recipe, world, &position, &options)? else { return Ok(RunOutcome::Finished) };
        if let Some(file) = &flags.draw {
            let trace = Trace::read(&result.trace).map_err(|error| Error::Options(error.to_string()))?;
            let fail = |error: std::io::Error| Error::Data { path: file.clone(), problem: error.to_string() };
            std::fs::write(file, trace_svg(&trace)).map_err(fail)?;
        }
        let mut text = match flags.json {
            true => format!("{:#}\n", json!(result)),
            false => table(&result, width),
        };
        if flags.keep.is_some() && !flags.json {
            text += &format!("\ntrace: {} (opens in ui.perfetto.dev)\n", result.trace.display());
        }
        // A closed standard output is not an error.
        drop(std::io::stdout().write_all(text.as_bytes()));
        Ok(RunOutcome::Finished)
    };
    let link = SupervisorLink::none();
    run_ranks(arguments, MemoryCheck::Training, None, &link, work).map(ExitCode::from)
}
