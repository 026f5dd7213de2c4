//! `shardwise doctor`: what this machine has, and how to mend what is wrong.
//!
//! Whatever needs libtorch or MPI is asked of `shardwise-rank` in a process of its own: a library that is missing, or that
//! crashes, ends that process and not the doctor.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Result;
use serde::Deserialize;

use crate::launch;

/// One thing that was looked at.
struct Finding {
    what: &'static str,
    state: State,
}

enum State {
    /// In order.
    Fine(String),
    /// Not there, and not needed.
    Absent(String),
    /// Wrong, and what mends it.
    Wrong { problem: String, remedy: String },
}

pub(crate) fn run() -> Result<ExitCode> {
    let rank_program = launch::rank_program()?;
    let findings = [
        Finding { what: "libtorch", state: libtorch(&rank_program) },
        Finding { what: "MPI library", state: mpi_library(&rank_program) },
        Finding { what: "MPI launcher", state: mpi_launcher(&rank_program) },
        Finding { what: "NCCL", state: nccl(&rank_program) },
        Finding { what: "CUDA", state: cuda(&rank_program) },
        Finding { what: "cores", state: cores() },
        Finding { what: "memory", state: memory() },
        Finding { what: "shared memory", state: shared_memory() },
    ];
    let mut wrong = 0;
    for Finding { what, state } in &findings {
        match state {
            State::Fine(text) => println!("ok      {what:14} {text}"),
            State::Absent(text) => println!("absent  {what:14} {text}"),
            State::Wrong { problem, remedy } => {
                wrong += 1;
                println!("WRONG   {what:14} {problem}");
                println!("        {:14} to mend it: {remedy}", "");
            }
        }
    }
    match wrong {
        0 => println!("\nThis machine can train."),
        1 => println!("\nOne thing is wrong."),
        more => println!("\n{more} things are wrong."),
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
    version: Option<String>,
}

/// Runs a command that prints a line of JSON. The error is what it said instead.
fn probe<T: for<'a> Deserialize<'a>>(command: &mut Command) -> Result<T, String> {
    let output = command.output().map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    let printed = String::from_utf8_lossy(&output.stdout);
    if let Some(probe) = printed.lines().find_map(|line| serde_json::from_str(line).ok()) {
        return Ok(probe);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let telling = said.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('-'));
    Err(telling.map_or_else(|| format!("it ended with {}", output.status), str::to_string))
}

fn asked<T: for<'a> Deserialize<'a>>(rank_program: &Path, about: &str) -> Result<T, String> {
    probe(Command::new(rank_program).args(["probe", about]))
}

const SETUP: &str = "scripts/setup && cargo build --release";

fn libtorch(rank_program: &Path) -> State {
    match asked::<LibtorchProbe>(rank_program, "libtorch") {
        Ok(probe) => State::Fine(probe.version),
        Err(problem) => {
            State::Wrong { problem, remedy: format!("{SETUP}  (installs libtorch, and builds against it)") }
        }
    }
}

fn mpi_library(rank_program: &Path) -> State {
    match asked::<MpiProbe>(rank_program, "mpi") {
        Ok(MpiProbe { version, threads, .. }) => State::Fine(format!("{version}; thread level {threads}")),
        Err(problem) => {
            State::Wrong { problem, remedy: format!("{SETUP}  (or scripts/setup --mpicc FILE for an MPI of your own)") }
        }
    }
}

/// Starts two ranks that add a number.
fn mpi_launcher(rank_program: &Path) -> State {
    let (mut command, version) = match launch::launcher(2) {
        Ok(found) => found,
        Err(problem) => {
            let remedy = format!("{SETUP}  (or set MPIRUN to the launcher of your MPI)");
            return State::Wrong { problem, remedy };
        }
    };
    match probe::<MpiProbe>(command.arg(rank_program).args(["probe", "mpi"])) {
        Ok(MpiProbe { ranks: 2, .. }) => {
            let name = version.lines().next().unwrap_or_default().to_string();
            State::Fine(format!("{name}; started 2 ranks that talked to each other"))
        }
        Ok(MpiProbe { ranks, .. }) => State::Wrong {
            problem: format!(
                "it started 2 ranks, of which each saw {ranks}: launcher and library are of different MPIs"
            ),
            remedy: "set MPIRUN to the launcher of the MPI that Shardwise was built with".to_string(),
        },
        Err(problem) => State::Wrong { problem, remedy: format!("{SETUP}  (launcher and library must be of one MPI)") },
    }
}

fn nccl(rank_program: &Path) -> State {
    match asked::<NcclProbe>(rank_program, "nccl") {
        Ok(NcclProbe { version: Some(version) }) => State::Fine(version),
        Ok(NcclProbe { version: None }) => {
            State::Absent("not built in; for GPU ranks: cargo build --release --features cuda".into())
        }
        Err(problem) => State::Wrong { problem, remedy: "apt-get install libnccl2, or scripts/setup".to_string() },
    }
}

fn cuda(rank_program: &Path) -> State {
    let driver = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
    let devices = asked::<LibtorchProbe>(rank_program, "libtorch").map_or(0, |probe| probe.cuda_devices);
    match (driver, devices) {
        (_, 1..) => State::Fine(format!("{devices} devices")),
        (None, _) => State::Absent("no NVIDIA driver; ranks use the CPU".to_string()),
        (Some(_), _) if cfg!(not(feature = "cuda")) => {
            State::Absent("a driver, but no GPU support built in: cargo build --release --features cuda".to_string())
        }
        (Some(_), _) => State::Wrong {
            problem: "there is an NVIDIA driver, and libtorch sees no device".to_string(),
            remedy: "nvidia-smi says whether driver and device work; libtorch 2.13 needs a driver for CUDA 13"
                .to_string(),
        },
    }
}

fn cores() -> State {
    match std::thread::available_parallelism() {
        Ok(cores) => State::Fine(cores.to_string()),
        Err(error) => State::Absent(error.to_string()),
    }
}

/// The least memory with which a rank is of use.
const MEMORY_BYTES_MIN: u64 = 2 << 30;

fn memory() -> State {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |key: &str| -> Option<u64> {
        let line = meminfo.lines().find(|line| line.starts_with(key))?;
        Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
    };
    let (Some(total), Some(available)) = (field("MemTotal:"), field("MemAvailable:")) else {
        return State::Absent("/proc/meminfo does not say".to_string());
    };
    let limit = cgroup_limit().filter(|&limit| limit < total);
    let text = format!(
        "{} available of {}{}",
        gib(available),
        gib(total),
        limit.map(|limit| format!(", limited to {} by a control group", gib(limit))).unwrap_or_default()
    );
    match limit.unwrap_or(available).min(available) >= MEMORY_BYTES_MIN {
        true => State::Fine(text),
        false => State::Wrong {
            problem: text,
            remedy: format!("a rank wants at least {}: end other programs, or raise the limit", gib(MEMORY_BYTES_MIN)),
        },
    }
}

fn cgroup_limit() -> Option<u64> {
    let text = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok()?;
    text.trim().parse().ok()
}

/// Open MPI keeps a few MiB per rank there; containers often have 64 MiB for everything.
const SHARED_BYTES_MIN: u64 = 256 << 20;

fn shared_memory() -> State {
    let output = Command::new("df").args(["--output=size,avail", "-B1", "/dev/shm"]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers[..] {
        [size, available] if size >= SHARED_BYTES_MIN => {
            State::Fine(format!("{} available of {} in /dev/shm", gib(available), gib(size)))
        }
        [size, _] => State::Wrong {
            problem: format!("/dev/shm has {}, and ranks on one host talk through it", gib(size)),
            remedy: "mount -o remount,size=2G /dev/shm  (docker run --shm-size=2g; in Kubernetes an emptyDir of medium Memory)"
                .to_string(),
        },
        _ => State::Wrong {
            problem: "there is no /dev/shm".to_string(),
            remedy: "mount -t tmpfs -o size=2G tmpfs /dev/shm".to_string(),
        },
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}
