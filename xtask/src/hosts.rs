//! `cargo xtask hosts`: runs a program on several simulated hosts.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use shardwise_harness::{Hosts, launcher};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Number of hosts
    #[arg(long, default_value_t = 2)]
    hosts: usize,
    /// Number of ranks per host
    #[arg(long, default_value_t = 1)]
    ranks_per_host: usize,
    /// Bandwidth of each host's link, in the notation of tc
    #[arg(long, default_value = "1gbit")]
    rate: String,
    /// One-way delay of each host's link, in the notation of tc
    #[arg(long, default_value = "0ms")]
    delay: String,
    /// Kill the program after this many seconds
    #[arg(long, default_value_t = 3600)]
    limit_s: u64,
    /// Program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let hosts = Hosts {
        hosts: options.hosts,
        ranks_per_host: options.ranks_per_host,
        rate: options.rate.clone(),
        delay: options.delay.clone(),
    };
    let network = hosts.start()?;
    let ranks = options.hosts * options.ranks_per_host;
    println!("{} hosts, {ranks} ranks, links of {} and {}", options.hosts, options.rate, options.delay);
    let status = launcher(Some(&network), ranks, Duration::from_secs(options.limit_s))
        .arg("OMP_NUM_THREADS=1")
        .args(&options.command)
        .status()
        .context("mpirun could not be started")?;
    drop(network);
    Ok(ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1)))
}
