//! Checks whether a recipe can run, before any rank starts.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;
use shardwise_cli::flags::TrainFlags;
use shardwise_journal::format::format_memory_fixed;
use shardwise_plan::program::Programs;
use shardwise_recipe::{DeviceRecipe, Recipe};
use shardwise_run::build::{check_device, programs};
use shardwise_run::memory_estimate::{MemoryEstimate, find_settings_that_fit};
use shardwise_run::memory_limit::MemoryLimit;
use shardwise_run::{StepCosts, describe_simulated_step};
use shardwise_supervisor::RankCount;
use shardwise_supervisor::exit_codes::REFUSED;
use shardwise_torch::device::accelerators;
use shardwise_torch::tch::Device;

use crate::flags::{parse_faults, parse_trace};
use crate::recipe_arguments::RecipeArguments;

/// What to check.
#[derive(clap::Args)]
pub(crate) struct CheckFlags {
    /// Assume that this many of the ranks run on this host, instead of all
    #[arg(long)]
    ranks_here: Option<usize>,
    #[arg(long)]
    fault: Vec<String>,
    #[command(flatten)]
    train: TrainFlags,
    /// Also print the program of a step
    #[arg(long)]
    show_program: bool,
    /// Also print how long a step would take with the costs in this file
    #[arg(long)]
    costs: Option<PathBuf>,
}

/// Prints the result of the check to standard output, or the error to standard error.
pub(crate) fn run(arguments: &RecipeArguments, flags: &CheckFlags) -> ExitCode {
    match parse_trace(&flags.train).and_then(|_| check(arguments, flags)) {
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::from(REFUSED)
        }
        Ok(text) => {
            // A closed standard output is not an error.
            drop(writeln!(std::io::stdout(), "{}", text.trim_end()));
            ExitCode::SUCCESS
        }
    }
}

/// Checks that a recipe is valid and fits into the memory of this host. Returns JSON for `shardwise`.
fn check(arguments: &RecipeArguments, flags: &CheckFlags) -> Result<String, String> {
    parse_faults(&flags.fault)?;
    let asked = arguments.ranks.unwrap_or(RankCount { min: 1, max: 1 });
    let recipe = arguments.read()?;
    let sizes = world_sizes(&recipe, asked)?;
    let ranks = sizes.last().copied().unwrap_or(asked.max);
    let estimate = match flags.ranks_here {
        // If no rank runs on this host, only the other hosts know their memory.
        here if here == Some(0) || flags.train.force => {
            MemoryEstimate::of(&recipe, ranks).map_err(|error| error.to_string())?
        }
        here => {
            check_device(&recipe).map_err(|error| error.to_string())?;
            // GPUs of a host are usually alike, so the first stands for all. This process ends soon; a rank would keep it open.
            let device = match recipe.run.device {
                DeviceRecipe::Cpu => Device::Cpu,
                DeviceRecipe::Cuda => accelerators().map_err(|error| error.to_string())?[0],
            };
            check_memory(arguments, &recipe, ranks, here.unwrap_or(ranks), device)?
        }
    };
    let mut text = format!("a rank needs about {} of memory:\n{estimate}", format_memory_fixed(estimate.total()));
    if let Some(file) = &flags.costs {
        let step = StepCosts::read(file).and_then(|costs| describe_simulated_step(&recipe, ranks, &costs));
        text += &format!("\n{}", step.map_err(|error| error.to_string())?);
    }
    let show_program = flags.show_program;
    let program = show_program.then(|| programs(&recipe, ranks).map(|programs| describe_programs(&programs)));
    let report = json!({
        "program": program.transpose().map_err(|error| error.to_string())?,
        "text": text,
        "ranks": sizes,
        "axes": {
            "pipeline": recipe.parallel.pipeline,
            "expert": recipe.parallel.expert,
            "context": recipe.parallel.context,
            "tensor": recipe.parallel.tensor,
        },
        "folder": recipe.folder(),
        "saves": recipe.checkpoints.is_some(),
        "heartbeat_timeout_s": recipe.supervision.heartbeat_timeout_s,
        "max_restarts": recipe.supervision.max_restarts,
    });
    Ok(report.to_string())
}

/// The world sizes in a range that a recipe can run on. All of them must have the same global batch size.
fn world_sizes(recipe: &Recipe, asked: RankCount) -> Result<Vec<usize>, String> {
    let batch = |ranks: usize| {
        recipe.mesh(ranks)?;
        Ok::<_, shardwise_recipe::Error>(recipe.batch(ranks)?.global_batch_size)
    };
    let found: Vec<(usize, usize)> =
        (asked.min..=asked.max).filter_map(|ranks| Some((ranks, batch(ranks).ok()?))).collect();
    let Some(&(largest, global)) = found.last() else {
        return Err(batch(asked.max).err().map_or_else(String::new, |error| error.to_string()));
    };
    if let Some((ranks, other)) = found.iter().find(|(_, other)| *other != global) {
        return Err(format!(
            "-n {asked}: a step would have {other} sequences on {ranks} ranks and {global} on {largest}; set batch.global_batch_size and \
             batch.micro_batch_size, and leave batch.gradient_accumulation_steps out"
        ));
    }
    Ok(found.into_iter().map(|(ranks, _)| ranks).collect())
}

/// Estimates the memory of a rank. If it does not fit, the error has the figures, and the settings with which it would fit. For a rank on a GPU,
/// checks that of `device`, or the host's alone if that is the CPU.
pub(crate) fn check_memory(
    arguments: &RecipeArguments,
    recipe: &Recipe,
    ranks: usize,
    ranks_here: usize,
    device: Device,
) -> Result<MemoryEstimate, String> {
    let estimate = MemoryEstimate::of(recipe, ranks).map_err(|error| error.to_string())?;
    let host = MemoryLimit::of_host(ranks_here, 0);
    if let Some(MemoryLimit { bytes, what, .. }) = host.filter(|_| recipe.run.device == DeviceRecipe::Cuda) {
        let needed = estimate.host_bytes();
        if needed > bytes {
            let [needed, bytes] = [needed, bytes].map(format_memory_fixed);
            return Err(format!(
                "a rank needs about {needed} of host memory, besides its GPU's, but {what} is {bytes}"
            ));
        }
    }
    let limit = match (recipe.run.device, device) {
        (DeviceRecipe::Cpu, _) => host,
        (DeviceRecipe::Cuda, Device::Cpu) => None,
        (DeviceRecipe::Cuda, device) => MemoryLimit::of(device, ranks_here),
    };
    let Some(limit) = limit else { return Ok(estimate) };
    let estimate = estimate.as_counted_by(&limit);
    let MemoryLimit { bytes, what, .. } = limit;
    if estimate.total() <= bytes {
        return Ok(estimate);
    }
    let remedy = match find_settings_that_fit(recipe, ranks, bytes.saturating_sub(estimate.process)) {
        Some((keys, then)) => {
            let total = format_memory_fixed(then.as_counted_by(&limit).total());
            format!("{} would fit, with {total}", keys.join(" and "))
        }
        None => {
            "no settings make it fit on these ranks: use more ranks, a smaller batch or a smaller model".to_string()
        }
    };
    let (stage, total, limit) = (recipe.zero.stage, format_memory_fixed(estimate.total()), format_memory_fixed(bytes));
    let path = arguments.path.display();
    Err(format!(
        "{path}: at stage {stage} a rank would need about {total}, but {what} is {limit}:\n{estimate}\n{remedy}"
    ))
}

/// The programs of all stages of a pipeline, or the only one, as text.
fn describe_programs(programs: &Programs) -> String {
    let texts = programs.stages.iter().map(|program| program.to_string().trim_end().to_string());
    let texts: Vec<String> = match programs.stages.len() {
        1 => texts.collect(),
        _ => texts.enumerate().map(|(stage, text)| format!("# stage {stage}\n{text}")).collect(),
    };
    texts.join("\n\n")
}
