//! Plans the stages of a pipeline.

use std::io::Write;
use std::process::ExitCode;

use shardwise_cli::flags::PlanFlags;
use shardwise_run::{PlanRequest, StepCosts, plan_pipeline};
use shardwise_supervisor::exit_codes::REFUSED;

use crate::recipe_arguments::RecipeArguments;

/// Prints the plan to standard output, or the error to standard error.
pub(crate) fn run(arguments: &RecipeArguments, flags: &PlanFlags) -> ExitCode {
    match plan(arguments, flags) {
        Ok(text) => {
            // A closed standard output is not an error.
            drop(writeln!(std::io::stdout(), "{}", text.trim_end()));
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::from(REFUSED)
        }
    }
}

fn plan(arguments: &RecipeArguments, flags: &PlanFlags) -> Result<String, String> {
    let recipe = arguments.read()?;
    let costs = StepCosts::read(&flags.costs).map_err(|error| error.to_string())?;
    let request = PlanRequest {
        ranks: arguments.ranks.map_or(1, |ranks| ranks.max),
        stages: flags.pipeline.map(|stages| stages as usize),
        memory_bytes_max: flags.memory.map(|mib| mib << 20),
        width: usize::from(flags.width),
    };
    plan_pipeline(&recipe, &costs, &request).map_err(|error| error.to_string())
}
