//! The output of a run: its events, the progress bar, the summary of `shardwise watch`, and the Prometheus page.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use shardwise_journal::{EntryKind, Run};
use support::{Folder, RECIPE, good, said as said_by, shardwise, wait_until};

fn short_run() -> Folder {
    Folder::new(&RECIPE.replace("steps = 24", "steps = 12"))
}

impl Folder {
    fn run(&self) -> PathBuf {
        self.path("saved")
    }
}

fn watch(arguments: &[&str]) -> Command {
    let mut command = shardwise();
    command.arg("watch").args(arguments).stdin(Stdio::null());
    command
}

/// The supervisor's entries, in a few words each.
fn supervisor_entries(folder: &Path) -> Vec<String> {
    let run = Run::open(folder).unwrap();
    let summarize = |kind: &EntryKind| match kind {
        EntryKind::Launched(launch) => Some(format!("launched {} on {}", launch.attempt, launch.ranks)),
        EntryKind::Failed { attempt, text, .. } => Some(format!("failed {attempt}: {text}")),
        EntryKind::Resumed(resumed) => Some(format!("resumed at {}", resumed.step)),
        EntryKind::Ended { code, restarts, .. } => Some(format!("ended {code} after {restarts}")),
        _ => None,
    };
    run.entries().iter().filter_map(|entry| summarize(&entry.kind)).collect()
}

#[test]
fn the_supervisor_records_a_death_and_its_cost() {
    let folder = short_run();
    good(&folder.command("train", &["-n", "2", "--fault", "kill rank=1 step=5 phase=forward"]).output().unwrap());
    let entries = supervisor_entries(&folder.run());
    let [first, failed, second, resumed, ended] = &entries[..] else { panic!("{entries:?}") };
    assert_eq!((first.as_str(), second.as_str()), ("launched 1 on 2", "launched 2 on 2"));
    assert!(failed.starts_with("failed 1: rank 1 (host") && resumed == "resumed at 5", "{entries:?}");
    assert_eq!(ended, "ended 0 after 1");
    assert!(!folder.run().join("supervisor.json").exists(), "the supervisor removes its secret");

    // The summary after the run tells the same.
    let said = good(&watch(&[folder.run().to_str().unwrap()]).output().unwrap());
    assert!(said.starts_with("recipe: finished; restarted once\nstep 12/12 (100%)  loss "), "{said}");
    assert!(said.contains("✕ step ") && said.contains("↻ step 5: Resumed at step 5"), "{said}");
    assert!(said.trim_end().lines().last().unwrap().contains("■ step 12: Finished "), "{said}");
    let nothing = watch(&[folder.0.path().to_str().unwrap()]).output().unwrap();
    assert!(!nothing.status.success() && String::from_utf8_lossy(&nothing.stderr).contains("not the folder of a run"));
}

#[test]
fn a_run_is_visible_in_its_folder_over_its_channel_and_to_prometheus() {
    let folder =
        Folder::new(&RECIPE.replace("steps = 24", "steps = 100000").replace("every_steps = 2", "every_steps = 50000"));
    let mut training = folder.command("train", &["-n", "2", "--metrics", "0"]);
    let mut training = training.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    let mut errors = std::io::BufReader::new(training.stderr.take().unwrap());
    std::io::BufRead::read_line(&mut errors, &mut said).unwrap();
    let address = said.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect(&said).to_string();
    let supervisor_file = folder.run().join("supervisor.json");
    wait_until("the run completes no steps", || Run::open(folder.run()).is_ok_and(|run| run.steps().len() > 3));
    assert_eq!(std::fs::metadata(&supervisor_file).unwrap().permissions().mode() & 0o777, 0o600);

    // A second run in the same folder is refused.
    let second = folder.command("train", &["-n", "2"]).output().unwrap();
    assert!(
        !second.status.success()
            && String::from_utf8_lossy(&second.stderr).contains("another `shardwise train` is running in this folder"),
        "{}",
        said_by(&second)
    );

    let local = good(&watch(&[folder.run().to_str().unwrap()]).output().unwrap());
    assert!(local.starts_with("recipe: running\n") && local.contains("all 2 ranks are connected"), "{local}");

    let written: serde_json::Value = serde_json::from_slice(&std::fs::read(&supervisor_file).unwrap()).unwrap();
    let address_and_port = written["address"].as_str().unwrap();
    let remote = good(
        &watch(&["--connect", address_and_port])
            .env("SHARDWISE_SECRET", written["secret"].as_str().unwrap())
            .output()
            .unwrap(),
    );
    assert!(remote.starts_with("recipe: running\n") && remote.contains("all 2 ranks are connected"), "{remote}");
    assert!(remote.contains("/100000 (") && remote.contains("▶ step 1: Started with 2 ranks"), "{remote}");
    let stranger = watch(&["--connect", address_and_port]).env("SHARDWISE_SECRET", "ab".repeat(32)).output().unwrap();
    assert!(
        !stranger.status.success() && String::from_utf8_lossy(&stranger.stderr).contains("does not accept this secret")
    );

    let page = page(&address);
    let step = page.lines().find_map(|line| line.strip_prefix("shardwise_step ")).expect(&page);
    assert!(step.parse::<f64>().unwrap() >= 1. && page.contains("\nshardwise_running 1\n"), "{page}");

    rustix::process::kill_process(
        rustix::process::Pid::from_raw(training.id() as i32).unwrap(),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    let mut rest = String::new();
    errors.read_to_string(&mut rest).unwrap();
    assert_eq!(training.wait().unwrap().code(), Some(75), "{rest}");
    let summary = good(&watch(&[folder.run().to_str().unwrap()]).output().unwrap());
    assert!(summary.starts_with("recipe: saved, can be resumed\n"), "{summary}");
}

fn page(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Runs a command on a terminal of 120 columns, and returns its output.
fn on_a_terminal(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<String> = words.map(|word| format!("'{}'", word.to_str().unwrap())).collect();
    let line = format!("stty cols 120 rows 30; OMP_NUM_THREADS=1 {}", words.join(" "));
    // `script` is part of util-linux.
    let mut script = Command::new("script");
    let output = script.args(["-qec", &line, "/dev/null"]).env("TERM", "xterm").stdin(Stdio::null()).output().unwrap();
    good(&output)
}

#[test]
fn a_terminal_shows_a_bar_or_with_plain_lines() {
    let folder = short_run();
    let said = on_a_terminal(&folder.command("train", &["-n", "2", "--fault", "kill rank=1 step=5 phase=forward"]));
    assert!(
        said.contains("a rank needs about") && said.contains("died"),
        "other lines are printed above the bar: {said}"
    );
    assert!(!said.contains("  grad norm "), "steps are in the bar: {said}");
    let last = said.trim_end().rsplit(['\r', '\n']).next().unwrap();
    assert!(last.contains("step 12/12") && last.contains("█") && last.contains("finished"), "{last:?} of {said}");
    assert!(last.contains("restarts 1"), "{last:?}");

    let folder = short_run();
    let said = on_a_terminal(&folder.command("train", &["-n", "2", "--plain"]));
    assert!(said.contains("step 12/12  loss") && said.contains("  grad norm ") && !said.contains("█"), "{said}");
}
