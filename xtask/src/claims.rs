//! The project's claims, as named measurements.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::claim::Claim;

fn all() -> impl Iterator<Item = &'static Claim> {
    [
        crate::foundation::CLAIMS,
        crate::zero::CLAIMS,
        crate::peers::CLAIMS,
        crate::program::CLAIMS,
        crate::tensor::CLAIMS,
        crate::context::CLAIMS,
        crate::experts::CLAIMS,
        crate::offload::CLAIMS,
        crate::links::CLAIMS,
        crate::pipeline::CLAIMS,
        crate::compiled::CLAIMS,
        crate::device::CLAIMS,
        crate::checkpoints::CLAIMS,
        crate::text::CLAIMS,
        crate::supervision::CLAIMS,
        crate::observability::CLAIMS,
        crate::install::CLAIMS,
    ]
    .into_iter()
    .flatten()
}

/// Lists claims, or measures those that `name` selects.
pub(crate) fn show(name: Option<&str>, heavy: bool) -> Result<ExitCode> {
    let Some(name) = name else {
        for claim in all() {
            let weight = if claim.heavy { "heavy" } else { "quick" };
            println!("{:24} {weight}  {}", format!("{}/{}", claim.group, claim.name), claim.what);
        }
        return Ok(ExitCode::SUCCESS);
    };
    let chosen: Vec<&Claim> = match name.split_once('/') {
        Some((group, name)) => all().filter(|claim| claim.group == group && claim.name == name).collect(),
        None => all().filter(|claim| claim.group == name && (heavy || !claim.heavy)).collect(),
    };
    if chosen.is_empty() {
        bail!("there is no claim '{name}'; `cargo xtask show` lists all claims");
    }
    let mut lines = Vec::new();
    let mut all_hold = true;
    for claim in chosen {
        println!("==== {}/{}: {}", claim.group, claim.name, claim.what);
        let started = Instant::now();
        let (outcome, holds) = match (claim.measure)() {
            Ok(verdict) => (format!("{} (bar: {})", verdict.figure, verdict.bar), verdict.holds),
            Err(error) => (format!("could not be measured: {error:#}"), false),
        };
        let word = if holds { "holds" } else { "DOES NOT HOLD" };
        all_hold &= holds;
        lines.push(format!(
            "{}/{} {word}: {outcome} [{:.0} s]",
            claim.group,
            claim.name,
            started.elapsed().as_secs_f64()
        ));
    }
    lines.iter().for_each(|line| println!("{line}"));
    Ok(if all_hold { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
