//! Starts the launcher's daemons on other hosts, where Shardwise may be installed at another path.
//!
//! `mpirun` starts a daemon on every other host, which starts the ranks there. It gets `shardwise start-daemon` as its agent, which runs the
//! real agent (`ssh`) with a command that starts `shardwise daemon` from wherever it is on that host. That tells the ranks where it is and,
//! if MPI is in the same Python environment, finds the daemon and its libraries there; otherwise it runs what `mpirun` wanted to run.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::installation::{Installation, MPI};

/// The variable with the program that runs commands on other hosts, for `shardwise start-daemon`.
const AGENT: &str = "SHARDWISE_AGENT";

/// The variable with the path of `shardwise` on a host, for the ranks there.
const SELF: &str = "SHARDWISE_SELF";

/// The daemons of Open MPI 4 and 5.
const DAEMONS: [&str; 2] = ["orted", "prted"];

/// The number of hosts up to which `mpirun` starts all daemons itself.
const TREE_RADIX: usize = 64;

/// Runs on the other host. Its arguments are the path of `shardwise` on the first host, the value of `SHARDWISE_MPI`, and those of
/// `shardwise daemon`. It has no single quotes, so that it can be put between them.
const START: &str = r#"p=$0; [ -x "$p" ] || p=$(command -v shardwise) || { echo "$(uname -n): shardwise was not found at $0 or on the PATH of non-interactive ssh commands" >&2; exit 127; }; [ -z "$1" ] || export SHARDWISE_MPI="$1"; shift; exec "$p" daemon "$@""#;

/// What a launcher starts as a rank on several hosts, each of which has its own `shardwise`.
pub(crate) const RANK: [&str; 4] = ["/bin/sh", "-c", r#"exec "$SHARDWISE_SELF" rank "$@""#, "shardwise"];

/// Makes the launcher start its daemons on `hosts` hosts with `shardwise start-daemon`.
pub(crate) fn add_agent(launcher: &mut Command, agent: &str, hosts: usize) -> Result<()> {
    // The launcher splits this at spaces, which a path may have, and finds the program by the PATH.
    launcher.args(["--mca", "plm_rsh_agent", "shardwise start-daemon"]).env(AGENT, agent);
    // Daemons would start further daemons with an agent that only this host has.
    if hosts > TREE_RADIX {
        launcher.args(["--mca", "plm_rsh_no_tree_spawn", "1"]);
    }
    launcher.env(SELF, std::env::current_exe()?);
    add_to_path(launcher, &own_folder()?)
}

/// The command that starts a daemon on another host. `words` is what the launcher wants to run: arguments of the agent, the host, and a
/// command that is quoted for a shell.
pub fn start_daemon(words: &[OsString]) -> Result<Command> {
    let agent = std::env::var_os(AGENT).unwrap_or_else(|| "ssh".into());
    let mut command = Command::new(&agent);
    // As mpirun does for an agent of this name: X11 is of no use to daemons.
    if Path::new(&agent).file_name() == Some("ssh".as_ref()) {
        command.arg("-x");
    }
    let Some(at) = words.iter().position(|word| daemon_name(word).is_some()) else {
        command.args(words);
        return Ok(command);
    };
    let (before, daemon, mut rest) = (&words[..at], &words[at], &words[at + 1..]);
    // With some login shells, the launcher puts the command in parentheses and reads a profile first.
    let opening = before.iter().position(|word| word.to_string_lossy().trim() == "(").unwrap_or(before.len());
    if opening < before.len() && rest.last().is_some_and(|word| word.to_string_lossy().trim() == ")") {
        rest = &rest[..rest.len() - 1];
    }
    let quoted = |text: &OsStr| format!("'{}'", text.to_string_lossy().replace('\'', r"'\''"));
    let program = std::env::current_exe()?;
    let mpi = std::env::var_os(MPI).unwrap_or_default();
    command.args(&before[..opening]).args(["/bin/sh", "-c"]);
    command.args([START.as_ref(), program.as_os_str(), &mpi, daemon].map(quoted)).args(rest);
    Ok(command)
}

/// The daemon that a command of the launcher ends with: `PATH=… ; export PATH ; /usr/bin/orted`.
fn daemon_name(command: &OsStr) -> Option<&'static str> {
    let last = command.to_str()?.trim_end().rsplit(['/', ' ', ';']).next()?;
    DAEMONS.into_iter().find(|name| *name == last)
}

/// The command that runs a daemon on this host. `wanted` is the beginning of what the launcher wants to run: the daemon's path, and what a
/// shell does before.
pub fn daemon_command(wanted: &OsStr, arguments: &[OsString]) -> Result<Command> {
    let installation = Installation::find().map_err(Error::Installation)?;
    let mut command = match (installation.mpi_root(), daemon_name(wanted)) {
        // Open MPI 5 looks for its files where the first host has them, unless it is told where they are.
        (Some(root), Some(name)) => {
            let mut command = Command::new(root.join("bin").join(name));
            installation.add_mpi_library_path(&mut command).map_err(Error::Installation)?;
            command.env("PRTE_PREFIX", root).env("PMIX_PREFIX", root);
            add_to_path(&mut command, &root.join("bin"))?;
            command
        }
        _ => {
            let mut command = Command::new("/bin/sh");
            let mut line = wanted.to_os_string();
            line.push(r#" "$@""#);
            command.arg("-c").arg(line).arg("shardwise");
            add_to_path(&mut command, &own_folder()?)?;
            command
        }
    };
    command.args(arguments).env(SELF, std::env::current_exe()?);
    Ok(command)
}

fn own_folder() -> Result<PathBuf> {
    Ok(std::env::current_exe()?.parent().map(Path::to_path_buf).unwrap_or_default())
}

/// Puts a folder in front of the `PATH` of a command.
fn add_to_path(command: &mut Command, folder: &Path) -> Result<()> {
    let set = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
    // An empty entry would be the current folder.
    let others = std::env::split_paths(&set).filter(|other| !other.as_os_str().is_empty());
    let path = std::env::join_paths([folder.to_path_buf()].into_iter().chain(others));
    command.env("PATH", path.map_err(|error| Error::failed("PATH", error))?);
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn a_daemon_is_started_through_shardwise_and_anything_else_as_it_is() {
        let arguments = |given: &[&str]| -> Vec<String> {
            let words: Vec<OsString> = given.iter().map(OsString::from).collect();
            let command = start_daemon(&words).unwrap();
            command.get_args().map(|word| word.to_str().unwrap().to_string()).collect()
        };
        let first = "PRTE_PREFIX=/an env;export PRTE_PREFIX;/an env/bin/prted";
        let started = arguments(&["-o", "ConnectionAttempts=10", "b", first, "--prtemca", "ess", "\"env\""]);
        assert_eq!(started[..6], ["-x", "-o", "ConnectionAttempts=10", "b", "/bin/sh", "-c"]);
        assert_eq!(started[9..], [&format!("'{first}'"), "--prtemca", "ess", "\"env\""]);
        assert_eq!(arguments(&["b", "echo", "$SHELL"]), ["-x", "b", "echo", "$SHELL"]);
        // With dash as the login shell.
        let profile =
            ["b", "(", "test", "!", "-r", "./.profile", "||", ".", "./.profile;", " orted", "-mca", "ess", ")"];
        let started = arguments(&profile);
        assert_eq!(started[..4], ["-x", "b", "/bin/sh", "-c"]);
        assert_eq!(started[7..], ["' orted'", "-mca", "ess"]);
        for end in ["  PATH=/usr/bin:$PATH ; export PATH ;   /usr/bin/orted", "export LD_LIBRARY_PATH;prted", " orted"]
        {
            assert!(daemon_name(end.as_ref()).is_some(), "{end}");
        }
        assert_eq!(daemon_name("./imported".as_ref()), None);
    }

    /// Without an MPI of its own, a host runs what the launcher wanted to run.
    #[test]
    fn a_daemon_of_the_site_gets_its_variables_and_arguments() {
        let arguments = ["a b".into(), "c".into()];
        let mut command = daemon_command("X='1 2'; export X; printf '[%s]' \"$X\"".as_ref(), &arguments).unwrap();
        assert_eq!(String::from_utf8(command.output().unwrap().stdout).unwrap(), "[1 2][a b][c]");
    }

    /// What the other host's shell does with the command, which starts `shardwise daemon` from where it is there.
    #[test]
    fn the_other_host_finds_its_own_shardwise() {
        let folder = tempfile::tempdir().unwrap();
        let run = |path: &str, program: &str| {
            let line = format!("/bin/sh -c '{START}' '{program}' '/opt/an mpi' prted --x \"a b\"");
            let mut shell = Command::new("/bin/sh");
            shell.args(["-c", &line]).env("PATH", path).env_remove(MPI).output().unwrap()
        };
        let missing = run("/usr/bin:/bin", "/nowhere/shardwise");
        assert_eq!(missing.status.code(), Some(127));
        let said = String::from_utf8(missing.stderr).unwrap();
        assert!(said.contains("shardwise was not found at /nowhere/shardwise or on the PATH"), "{said}");
        let program = folder.path().join("shardwise");
        std::fs::write(&program, "#!/bin/sh\nprintf '[%s]' \"$0\" \"$SHARDWISE_MPI\" \"$@\"\n").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, mode).unwrap();
        let expected = format!("[{}][/opt/an mpi][daemon][prted][--x][a b]", program.display());
        for (path, named) in [
            (format!("{}:/usr/bin:/bin", folder.path().display()), "/nowhere/shardwise"),
            ("/usr/bin:/bin".to_string(), program.to_str().unwrap()),
        ] {
            assert_eq!(String::from_utf8(run(&path, named).stdout).unwrap(), expected);
        }
    }
}
