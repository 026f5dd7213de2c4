//! `shardwise train`: checks that the run fits, then starts and supervises its ranks.

use std::ffi::OsString;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use shardwise_supervisor::launcher_env::{hostname, launcher_env};
use shardwise_supervisor::{
    Address, Endpoint, EventLog, Host, Placement, RankCommand, RankCount, Settings, absolute, exit_code, plan_faults,
    rank_command, supervise,
};

use crate::flags::{Layers, TrainFlags};
use crate::screen;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The recipe to train
    recipe: PathBuf,
    /// Start this many ranks, or as many as there is room for in a range such as 2..8; not needed under mpirun or srun
    #[arg(short = 'n', long)]
    ranks: Option<RankCount>,
    #[command(flatten)]
    layers: Layers,
    /// Print the memory estimate and exit
    #[arg(long)]
    dry_run: bool,
    /// Also print how long a step would take, simulated from the costs that profile --costs has measured
    #[arg(long, value_name = "FILE.json", requires = "dry_run")]
    costs: Option<PathBuf>,
    /// Print what a rank does in a step, one instruction per line, and exit
    #[arg(long, conflicts_with = "dry_run")]
    show_program: bool,
    /// Start the ranks on these hosts, each with room for the given number of ranks, instead of on this host
    #[arg(long, value_name = "NAME:RANKS", value_delimiter = ',', requires = "listen")]
    hosts: Vec<Host>,
    /// Use this program to run commands on other hosts; its arguments are a host name and a command
    #[arg(long, default_value = "ssh")]
    agent: String,
    /// Accept reports from ranks on other hosts at this address of this host; ranks must know the job's secret
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<IpAddr>,
    /// Print plain lines instead of the progress bar, even on a terminal
    #[arg(long)]
    plain: bool,
    /// Serve Prometheus metrics on this port, or on this address and port, such as 127.0.0.1:9464
    ///
    /// Serves http://ADDRESS/metrics until the run ends. A port without an address can be reached only from this host. At any other
    /// address, clients must send the token in the environment variable SHARDWISE_METRICS_TOKEN.
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<Address>,
    /// Inject a fault to test recovery; may be given several times, one for each attempt
    ///
    /// For example 'kill rank=2 step=40 phase=forward unit=block.3'. The kinds of fault are kill, stop, slow, delay, cut-off, exhaust (use up
    /// the memory), fail-copy (no memory for a checkpoint's copy), flip-bit, skip and shorten (both of a collective call). A step of
    /// +1 counts from the first step of the attempt. The phases are data, gather, forward, backward, reduce, fetch, optimizer, store, save,
    /// save-before, save-inside and save-after. 'random seed=7 kills=200' stands for 200 kills, which depend only on the seed.
    #[arg(long, value_name = "FAULT")]
    fault: Vec<String>,
    #[command(flatten)]
    trace: TrainFlags,
}

/// The output of `shardwise-rank check`.
#[derive(Deserialize)]
pub(crate) struct CheckReport {
    /// The memory estimate, to be printed.
    text: String,
    /// The program of a step, if it was requested.
    program: Option<String>,
    #[serde(flatten)]
    settings: Settings,
}

/// Before the ranks start, checks whether a recipe can run, so that an error is printed once and without the launcher's messages.
/// Returns the exit code if it cannot.
pub(crate) fn check(
    recipe: &Path,
    ranks: RankCount,
    layers: &Layers,
    arguments: &[OsString],
) -> Result<Result<CheckReport, ExitCode>> {
    let mut check = rank_command()?;
    let program = PathBuf::from(check.get_program());
    check.arg("check").arg(absolute(recipe)).args(["--ranks", &ranks.to_string()]);
    check.args(layers.arguments()).args(arguments).stderr(Stdio::inherit());
    let output = check.output().with_context(|| program.display().to_string())?;
    if !output.status.success() {
        return Ok(Err(exit_code(output.status)));
    }
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("cannot parse the output of {}", program.display()))
        .map(Ok)
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let asked = options.ranks.unwrap_or(RankCount { min: 1, max: 1 });
    let command = RankCommand {
        subcommand: "train",
        recipe: &options.recipe,
        ranks: options.ranks.map(|ranks| ranks.max as u32),
        arguments: [options.layers.arguments(), options.trace.arguments()].concat(),
    };
    if launcher_env().is_some() {
        for (flag, is_given) in [("--dry-run", options.dry_run), ("--show-program", options.show_program)] {
            if is_given {
                let recipe = options.recipe.display();
                bail!("{flag} does not work under a launcher; run shardwise train {recipe} -n RANKS {flag}");
            }
        }
        if asked.min < asked.max || !options.hosts.is_empty() || !options.fault.is_empty() || options.metrics.is_some()
        {
            bail!(
                "a range of ranks, --hosts, --fault and --metrics do not work under a launcher; run shardwise train without one, so \
                 that it starts the ranks"
            );
        }
        return Ok(command.run()?);
    }
    let mut arguments = options.trace.arguments();
    if !options.hosts.is_empty() {
        let here = options.hosts.iter().find(|host| host.name == hostname()).map_or(0, |host| host.ranks);
        arguments.push(format!("--ranks-here={here}").into());
    }
    let faults = plan_faults(&options.fault, asked.max)?;
    arguments.extend(faults.iter().map(|fault| OsString::from(format!("--fault={fault}"))));
    if options.show_program {
        arguments.push("--show-program".into());
    }
    if let Some(file) = &options.costs {
        arguments.push(format!("--costs={}", file.display()).into());
    }
    let CheckReport { text, program, settings } = match check(&options.recipe, asked, &options.layers, &arguments)? {
        Ok(report) => report,
        Err(code) => return Ok(code),
    };
    // A closed standard output does not stop the run.
    drop(writeln!(std::io::stdout(), "{}", program.as_deref().unwrap_or(&text)));
    if options.dry_run || options.show_program {
        return Ok(ExitCode::SUCCESS);
    }
    let placement = Placement {
        hosts: options.hosts.clone(),
        agent: options.agent.clone(),
        listen: options.listen.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
    };
    if placement.listen.is_loopback() && placement.hosts.iter().any(|host| host.name != hostname()) {
        bail!(
            "--listen {}: other hosts cannot reach this address; give one at which they can reach this host",
            placement.listen
        );
    }
    let screen = screen::open(options.plain);
    let mut log = EventLog::open(&settings.folder, screen.clone())?;
    let endpoint = options.metrics.map(|address| Endpoint::serve(address, log.metrics())).transpose()?;
    if let Some(endpoint) = endpoint {
        screen.say(&format!("Serving Prometheus metrics at http://{}/metrics.", endpoint.address()));
    }
    Ok(supervise(&command, asked, &settings, &placement, faults.into_iter(), &mut log)?)
}
