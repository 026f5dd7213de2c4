//! `shardwise train`: looks whether the run fits, starts its ranks, and watches them.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::chronicle::Chronicle;
use crate::endpoint::{self, Endpoint};
use crate::hosts::Host;
use crate::launch::{Work, absolute, as_it_ended, laid, rank_program};
use crate::launched::launched;
use crate::launched::own_name;
use crate::layers::Layers;
use crate::rank_count::RankCount;
use crate::sabotage::planned;
use crate::screen::Screen;
use crate::supervise::{Places, Settings, supervise};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// What to train, and how
    recipe: PathBuf,
    /// The number of ranks, or the least and the most, as in 2..8; under mpirun or srun the launcher says it
    #[arg(short = 'n', long)]
    ranks: Option<RankCount>,
    #[command(flatten)]
    layers: Layers,
    /// Say what it needs of memory, and do not start
    #[arg(long)]
    dry_run: bool,
    /// Hosts to start ranks on, each with the number of ranks that there is room for; this host unless said otherwise
    #[arg(long, value_name = "NAME:RANKS", value_delimiter = ',', requires = "listen")]
    hosts: Vec<Host>,
    /// The program that starts others on hosts: it is given a host's name and a command
    #[arg(long, default_value = "ssh")]
    agent: String,
    /// The address of this host at which ranks on others report to it; they prove that they know the job's secret
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<IpAddr>,
    /// Lines in place of the bar, also on a terminal
    #[arg(long)]
    plain: bool,
    /// Serve the run's figures to Prometheus: a port of this host, or an address and a port, as in 127.0.0.1:9464
    ///
    /// At http://ADDRESS/metrics, as long as the run lasts. A port alone is for programs of this host. At any other address
    /// whoever asks has to know the token that is in the environment as SHARDWISE_METRICS_TOKEN.
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<endpoint::Address>,
    /// Let something go wrong, to see what becomes of it: one fault for each start of the ranks, in their order
    ///
    /// As in 'kill rank=2 step=40 phase=forward unit=block.3'. What happens is one of kill, stop, slow, delay, cut-off, exhaust (no more
    /// memory), fail-copy (no memory for a checkpoint's copy), flip-bit, skip and shorten (a call between ranks); a step of +1 counts
    /// from the one that ranks start with; phases are data, gather, forward, backward, reduce, optimizer, save, save-before,
    /// save-inside and save-after. 'random seed=7 kills=200'
    /// stands for so many kills, always the same ones.
    #[arg(long, value_name = "FAULT")]
    fault: Vec<String>,
    #[command(flatten)]
    trace: crate::tracing::Tracing,
}

/// What `shardwise-rank check` says of a recipe.
#[derive(Deserialize)]
pub(crate) struct Checked {
    /// For people.
    text: String,
    #[serde(flatten)]
    settings: Settings,
}

/// Whether a recipe can be run at all, asked before ranks are started: it is then said once and without the launcher's words. The
/// code to end with if it cannot.
pub(crate) fn check(
    recipe: &Path,
    ranks: RankCount,
    layers: &Layers,
    rest: &[String],
) -> Result<Result<Checked, ExitCode>> {
    let program = rank_program()?;
    let mut check = Command::new(&program);
    check.arg("check").arg(absolute(recipe)).args(["--ranks", &ranks.to_string()]);
    laid(&mut check, layers);
    let checked = check.args(rest).stderr(Stdio::inherit()).output().with_context(|| program.display().to_string())?;
    if !checked.status.success() {
        return Ok(Err(as_it_ended(checked.status)));
    }
    serde_json::from_slice(&checked.stdout).with_context(|| format!("what {} says", program.display())).map(Ok)
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let asked = options.ranks.unwrap_or(RankCount { least: 1, most: 1 });
    let work = Work {
        verb: "train",
        recipe: &options.recipe,
        ranks: options.ranks.map(|ranks| ranks.most as u32),
        layers: &options.layers,
        rest: options.trace.arguments(),
    };
    if launched().is_some() {
        if options.dry_run {
            bail!("--dry-run needs no launcher: shardwise train {} -n RANKS --dry-run", options.recipe.display());
        }
        if asked.least < asked.most
            || !options.hosts.is_empty()
            || !options.fault.is_empty()
            || options.metrics.is_some()
        {
            bail!(
                "a launcher has started this rank, so it is too late for a range of ranks, --hosts, --fault and --metrics, which are \
                 for one that starts the ranks itself"
            );
        }
        return work.start();
    }
    let mut rest = options.trace.arguments();
    if !options.hosts.is_empty() {
        let here = options.hosts.iter().find(|host| host.name == own_name()).map_or(0, |host| host.ranks);
        rest.push(format!("--ranks-here={here}"));
    }
    let faults = planned(&options.fault, asked.most)?;
    rest.extend(faults.iter().map(|fault| format!("--fault={fault}")));
    let Checked { text, settings } = match check(&options.recipe, asked, &options.layers, &rest)? {
        Ok(checked) => checked,
        Err(code) => return Ok(code),
    };
    // Whoever reads it may be gone; the run goes on.
    drop(writeln!(std::io::stdout(), "{text}"));
    if options.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    let places = Places {
        hosts: options.hosts.clone(),
        agent: options.agent.clone(),
        listen: options.listen.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
    };
    if places.listen.is_loopback() && places.hosts.iter().any(|host| host.name != own_name()) {
        bail!(
            "--listen {}: other hosts cannot reach that; give the address that this host has for them",
            places.listen
        );
    }
    let mut chronicle = Chronicle::open(&settings.folder, Screen::new(options.plain))?;
    let endpoint = options.metrics.map(|address| Endpoint::serve(address, chronicle.figures())).transpose()?;
    if let Some(endpoint) = endpoint {
        chronicle.screen.say(&format!("Figures for Prometheus are at http://{}/metrics.", endpoint.address()));
    }
    supervise(&work, asked, &settings, &places, faults.into_iter(), &mut chronicle)
}
