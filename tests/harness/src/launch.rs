//! Launches ranks, and reports their outcome.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, SystemTime};

use crate::hosts::{Hosts, Network};
use crate::stopwatch::Stopwatch;

/// The environment variable, on the ranks, with the source location of the closure to run.
const SITE_VARIABLE: &str = "SHARDWISE_RANKS_SITE";
const OUTPUT_VARIABLE: &str = "SHARDWISE_RANKS_OUTPUT";

/// The number of lines of a rank's output that a failure shows.
const LINES_SHOWN: usize = 25;

/// Captures each rank's output and exit code in separate files, under any launcher.
const CAPTURE_OUTPUT: &str = r#"
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:?the launcher sets no rank}}}
"$@" >"$SHARDWISE_RANKS_OUTPUT/$rank.output" 2>&1 </dev/null
code=$?
echo "$code" >"$SHARDWISE_RANKS_OUTPUT/$rank.code"
exit "$code"
"#;

/// How to launch ranks.
#[derive(Clone, Debug)]
pub struct Launch {
    ranks: usize,
    hosts: Option<Hosts>,
    timeout: Duration,
    variables: Vec<(String, String)>,
}

impl Launch {
    /// Ranks on this host.
    pub fn ranks(ranks: usize) -> Self {
        Launch { ranks, hosts: None, timeout: Duration::from_secs(120), variables: Vec::new() }
    }

    /// Ranks on several hosts. Needs root, for the namespaces.
    pub fn hosts(hosts: Hosts) -> Self {
        Launch { hosts: Some(hosts.clone()), ..Launch::ranks(hosts.hosts * hosts.ranks_per_host) }
    }

    /// Sets the time after which unfinished ranks are stopped. Defaults to two minutes. A [`Stopwatch`] measures it, so time
    /// that the hypervisor gives to others does not count.
    pub fn timeout(self, timeout: Duration) -> Self {
        Launch { timeout, ..self }
    }

    /// Sets an environment variable on every rank.
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_string(), value.to_string()));
        self
    }
}

impl From<usize> for Launch {
    fn from(ranks: usize) -> Self {
        Launch::ranks(ranks)
    }
}

/// How a rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// With this exit code; 101 is a panic, and 128 + s is signal s.
    Code(i32),
    /// Stopped by the launcher because of another rank, or by the timeout.
    Stopped,
}

/// The outcome of one rank.
#[derive(Clone, Debug)]
pub struct Rank {
    /// How it ended.
    pub exit: Exit,
    /// Its standard output and error.
    pub output: String,
}

/// The outcome of all ranks.
#[derive(Clone, Debug)]
pub struct Report {
    /// One entry per rank.
    pub ranks: Vec<Rank>,
}

/// A failed run. Its message shows the last lines of the ranks at fault.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What happened.
    pub reason: String,
    /// The first rank that failed, unless all were stopped from outside.
    pub rank: Option<usize>,
    /// The outcome of all ranks.
    pub report: Report,
    launcher_output: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.reason)?;
        for (rank, outcome) in self.report.ranks.iter().enumerate() {
            if outcome.exit == Exit::Code(0) {
                continue;
            }
            let lines: Vec<&str> = outcome.output.lines().collect();
            let shown = &lines[lines.len().saturating_sub(LINES_SHOWN)..];
            writeln!(f, "---- rank {rank}: {} ----", describe(&outcome.exit))?;
            shown.iter().try_for_each(|line| writeln!(f, "    {line}"))?;
        }
        if self.rank.is_none() {
            writeln!(f, "---- the launcher ----\n{}", self.launcher_output)?;
        }
        Ok(())
    }
}

fn describe(exit: &Exit) -> String {
    match exit {
        Exit::Code(101) => "panicked".to_string(),
        Exit::Code(code @ 129..) => format!("was killed by signal {}", code - 128),
        Exit::Code(code) => format!("exited with code {code}"),
        Exit::Stopped => "was stopped".to_string(),
    }
}

/// If this process is a rank that was launched for `body`, runs it and exits; otherwise launches the ranks and returns their
/// outcome. Called by the macros; `path` is the path of an item in the test function, `site` the source location of the macro.
pub fn run(launch: impl Into<Launch>, path: &str, site: &str, body: impl FnOnce()) -> Result<Report, Failure> {
    let test = test_name(path);
    if let Ok(wanted) = std::env::var(SITE_VARIABLE) {
        if wanted != site {
            // This rank was launched for another closure of the same test.
            return Ok(Report { ranks: Vec::new() });
        }
        body();
        // A rank that does not get here has not run the closure, whatever its exit code.
        println!("{DONE}");
        std::process::exit(0);
    }
    let program = std::env::current_exe().expect("a test knows its own program");
    let arguments = ["--exact", &test, "--nocapture", "--test-threads=1", "--include-ignored"].map(OsString::from);
    launch.into().start(&test, site, &program, &arguments)
}

/// The last line of a rank's output, if the closure has run.
const DONE: &str = "shardwise-harness: the closure has run";

/// `crate::module::test::here` is the test `module::test`.
fn test_name(path: &str) -> String {
    let parts: Vec<&str> = path.split("::").filter(|part| *part != "{{closure}}").collect();
    parts[1..parts.len() - 1].join("::")
}

impl Launch {
    fn start(&self, test: &str, site: &str, program: &Path, arguments: &[OsString]) -> Result<Report, Failure> {
        let folder = Folder::new().unwrap_or_else(|error| panic!("no folder for the ranks' output: {error}"));
        let _turn = lock_runs().unwrap_or_else(|error| panic!("no lock file for test runs: {error}"));
        let network = self.hosts.as_ref().map(|hosts| hosts.start().unwrap_or_else(|error| panic!("{error}")));

        let mut command = launcher(network.as_ref(), self.ranks, SLOWDOWN_MAX * self.timeout);
        for (name, value) in [
            (SITE_VARIABLE, site),
            (OUTPUT_VARIABLE, &folder.0.to_string_lossy()),
            ("OMP_NUM_THREADS", "1"),
            ("RUST_BACKTRACE", "0"),
        ]
        .into_iter()
        .chain(self.variables.iter().map(|(name, value)| (name.as_str(), value.as_str())))
        {
            // Set it with `env` on every rank, because launchers differ in how they pass variables to other hosts.
            command.arg(format!("{name}={value}"));
        }
        command.args(["sh", "-c", CAPTURE_OUTPUT, "rank"]).arg(program).args(arguments);
        let (output, timed_out) = run_within(self.timeout, &mut command)
            .unwrap_or_else(|error| panic!("mpirun could not be started ({error}); install it with scripts/setup"));

        let report = Report { ranks: (0..self.ranks).map(|rank| folder.rank(rank)).collect() };
        let idle = report.ranks.iter().position(|rank| rank.exit == Exit::Code(0) && !rank.output.contains(DONE));
        if let Some(rank) = idle {
            panic!(
                "{test}: rank {rank} of {} ended without running the closure at {site}; ranks! must be in the test function \
                 itself\n{}",
                self.ranks, report.ranks[rank].output
            );
        }
        if output.status.success() && report.ranks.iter().all(|rank| rank.exit == Exit::Code(0)) {
            return Ok(report);
        }
        let first = (0..self.ranks)
            .filter(|&rank| matches!(report.ranks[rank].exit, Exit::Code(code) if code != 0))
            .min_by_key(|&rank| folder.ended(rank));
        let reason = match (first, output.status.code()) {
            (None, _) if timed_out => {
                let left: Vec<String> = (0..self.ranks)
                    .filter(|&rank| report.ranks[rank].exit == Exit::Stopped)
                    .map(|rank| rank.to_string())
                    .collect();
                format!("{test}: after {:?}, rank {} of {} was not done", self.timeout, left.join(", "), self.ranks)
            }
            (Some(rank), _) => format!("{test}: rank {rank} of {} {}", self.ranks, describe(&report.ranks[rank].exit)),
            (None, code) => format!("{test}: the launcher failed with code {code:?}"),
        };
        let launcher_output = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(Failure { reason, rank: first, report, launcher_output })
    }
}

/// How many times longer than its timeout a run may take, however slow the machine is.
const SLOWDOWN_MAX: u32 = 20;

/// Runs a command, and terminates it after the timeout. Returns its output, and whether it timed out.
fn run_within(timeout: Duration, command: &mut Command) -> io::Result<(Output, bool)> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (process, watch) = (child.id().to_string(), Stopwatch::start());
    let (done, done_receiver) = channel::<()>();
    std::thread::scope(|scope| {
        let guard = scope.spawn(move || {
            loop {
                match done_receiver.recv_timeout(Duration::from_millis(200)) {
                    Err(RecvTimeoutError::Timeout) if watch.elapsed() < timeout => (),
                    Err(RecvTimeoutError::Timeout) => break,
                    _ => return false,
                }
            }
            // If this fails, the process has just ended.
            drop(Command::new("kill").arg(process).status());
            true
        });
        let output = child.wait_with_output()?;
        drop(done);
        Ok((output, guard.join().expect("a thread that only waits does not panic")))
    })
}

/// Returns a command that launches the program appended to it on `ranks` ranks, through `env`, with a timeout.
pub fn launcher(network: Option<&Network>, ranks: usize, timeout: Duration) -> Command {
    let mut command = match network {
        None => Command::new("timeout"),
        Some(network) => network.on_first_host("timeout"),
    };
    command.args(["--kill-after=10", &format!("{}", timeout.as_secs_f64())]);
    command.arg(mpirun()).args(["-n", &ranks.to_string()]);
    if is_open_mpi() {
        command.args(["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]);
        // See the note on full duplex in shardwise_comm::mpi.
        command.args(["--mca", "btl_tcp_flags", "1"]);
        // The layer for shared memory and TCP. Probing for other networks takes 0.2 s.
        command.args(["--mca", "pml", "ob1"]);
        // As in `shardwise train`: trying munge takes 2 s if it is installed and its daemon does not answer.
        command.env("PMIX_MCA_psec", "native");
        // Open MPI refuses to run as root, as in a container, unless told otherwise.
        command.arg("--allow-run-as-root");
    }
    if let Some(network) = network {
        command.args(network.mpirun_arguments());
    }
    command.arg("env");
    command
}

/// The launcher of the MPI that the program was built with, as found by scripts/setup.
fn mpirun() -> PathBuf {
    let built_with = option_env!("MPIRUN").unwrap_or("mpirun");
    std::env::var_os("MPIRUN").map_or_else(|| PathBuf::from(built_with), PathBuf::from)
}

fn is_open_mpi() -> bool {
    let version = Command::new(mpirun())
        .arg("--version")
        .output()
        .unwrap_or_else(|error| panic!("mpirun could not be started ({error}); install it with scripts/setup"));
    // Open MPI's launcher prints the second name if its file is not called mpirun.
    let version = String::from_utf8_lossy(&version.stdout);
    version.contains("Open MPI") || version.contains("OpenRTE")
}

/// Waits for the runs of other tests, in this or another process.
fn lock_runs() -> io::Result<File> {
    let file = File::create(std::env::temp_dir().join("shardwise-ranks.lock"))?;
    file.lock()?;
    Ok(file)
}

/// A temporary folder for the ranks' output.
struct Folder(PathBuf);

impl Folder {
    fn new() -> io::Result<Self> {
        let nanoseconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_nanos());
        let path = std::env::temp_dir().join(format!("shardwise-ranks-{}-{nanoseconds}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Folder(path))
    }

    fn rank(&self, rank: usize) -> Rank {
        let read = |kind: &str| fs::read(self.0.join(format!("{rank}.{kind}"))).unwrap_or_default();
        let exit = String::from_utf8_lossy(&read("code")).trim().parse().map_or(Exit::Stopped, Exit::Code);
        Rank { exit, output: String::from_utf8_lossy(&read("output")).into_owned() }
    }

    fn ended(&self, rank: usize) -> Option<SystemTime> {
        fs::metadata(self.0.join(format!("{rank}.code"))).and_then(|code| code.modified()).ok()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Leftovers in the temporary folder do no harm.
        drop(fs::remove_dir_all(&self.0));
    }
}
