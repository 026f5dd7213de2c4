//! A real one-node Slurm cluster on loopback: Debian's `slurmctld`, `slurmd` and `munged`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A Slurm cluster of this host only. Dropping it stops the cluster.
pub struct Slurm {
    folder: PathBuf,
}

const NEEDED: &str = "this needs root and Debian's slurm-wlm and munge: apt-get install slurm-wlm munge";

impl Slurm {
    /// Starts a cluster with all its files in `folder`.
    pub fn start(folder: &Path) -> Result<Slurm, String> {
        let fail = |what: &str, problem: &dyn std::fmt::Display| format!("{what}: {problem} ({NEEDED})");
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").map_err(|error| fail("hostname", &error))?;
        let (host, at) = (host.trim(), folder.display());
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let ports = free_ports().map_err(|error| fail("ports", &error))?;
        for part in ["state", "spool"] {
            std::fs::create_dir_all(folder.join(part)).map_err(|error| fail(part, &error))?;
        }
        let settings = format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=pmix\nSlurmctldPort={}\nSlurmdPort={}\n\
             StateSaveLocation={at}/state\nSlurmdSpoolDir={at}/spool\nSlurmctldPidFile={at}/slurmctld.pid\n\
             SlurmdPidFile={at}/slurmd.pid\nSlurmctldLogFile={at}/slurmctld.log\nSlurmdLogFile={at}/slurmd.log\n\
             ReturnToService=2\nJobRequeue=1\nKillWait=5\nSchedulerType=sched/builtin\n\
             SchedulerParameters=sched_interval=2,batch_sched_delay=1\n\
             NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN\n\
             PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP\n",
            ports[0], ports[1],
        );
        std::fs::write(folder.join("slurm.conf"), settings).map_err(|error| fail("slurm.conf", &error))?;
        let munge = "pgrep -x munged >/dev/null || { mkdir -p /run/munge && chown munge: /run/munge && \
                     runuser -u munge -- munged; }";
        let slurm = Slurm { folder: folder.to_path_buf() };
        for command in [munge, "slurmctld", "slurmd"] {
            let output = slurm.command("sh").args(["-c", command]).output().map_err(|error| fail(command, &error))?;
            if !output.status.success() {
                return Err(fail(command, &String::from_utf8_lossy(&output.stderr)));
            }
        }
        let started = Instant::now();
        while !slurm.output("sinfo", &["-h", "-o", "%t"]).contains("idle") {
            if started.elapsed() > Duration::from_secs(30) {
                return Err(fail("sinfo", &slurm.output("sinfo", &[])));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(slurm)
    }

    /// Returns a command that uses this cluster.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("SLURM_CONF", self.folder.join("slurm.conf")).stdin(Stdio::null());
        command
    }

    /// Returns the standard output of a command.
    pub fn output(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.command(program).args(arguments).output();
        output.map_or_else(|error| error.to_string(), |output| String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        drop(self.command("scancel").args(["--user", "root"]).status());
        for name in ["slurmd", "slurmctld"] {
            let id = std::fs::read_to_string(self.folder.join(format!("{name}.pid"))).unwrap_or_default();
            drop(Command::new("kill").arg(id.trim()).stderr(Stdio::null()).status());
        }
        // Kill jobs that the daemons did not get around to ending: they would disturb other tests for hours. They inherited this
        // variable from the process that submitted them, and no other process has it.
        let own = format!("SLURM_CONF={}", self.folder.join("slurm.conf").display());
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
            if environment.split(|byte| *byte == 0).any(|variable| variable == own.as_bytes()) {
                drop(Command::new("kill").arg("-KILL").arg(entry.file_name()).stderr(Stdio::null()).status());
            }
        }
    }
}

/// Finds two unused ports.
fn free_ports() -> std::io::Result<[u16; 2]> {
    let listeners = [std::net::TcpListener::bind("127.0.0.1:0")?, std::net::TcpListener::bind("127.0.0.1:0")?];
    Ok([listeners[0].local_addr()?.port(), listeners[1].local_addr()?.port()])
}
