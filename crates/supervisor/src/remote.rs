//! Starts the launcher's daemons on other hosts, where Shardwise may be installed at another path.
//!
//! `mpirun` starts a daemon on every other host, which starts the ranks there. It assumes that its daemon has the same path everywhere.
//! So it gets `shardwise start-daemon` as its agent, which runs the real agent (`ssh`) with a command that starts `shardwise daemon` from
//! wherever it is on that host; that finds the daemon and its libraries next to itself.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Command;

use crate::error::{Error, Result};
use crate::installation::{Installation, MPI};

/// The variable with the program that runs commands on other hosts, for `shardwise start-daemon`.
const AGENT: &str = "SHARDWISE_AGENT";

/// The daemons of Open MPI 4 and 5.
const DAEMONS: [&str; 2] = ["orted", "prted"];

/// Runs on the other host. Its arguments are the path of `shardwise` on the first host, the value of `SHARDWISE_MPI`, and those of
/// `shardwise daemon`. It has no single quotes, so that it can be put between them.
const START: &str = r#"p=$0; [ -x "$p" ] || p=$(command -v shardwise) || { echo "$(hostname): shardwise is neither at $0 nor on the PATH that commands from other hosts see" >&2; exit 127; }; [ -z "$1" ] || export SHARDWISE_MPI="$1"; shift; exec "$p" daemon "$@""#;

/// Makes the launcher start its daemons with `shardwise start-daemon`, and find `shardwise` by its name, here and on the other hosts.
pub(crate) fn add_agent(launcher: &mut Command, agent: &str) -> Result<()> {
    // The launcher splits this at spaces, which a path may have.
    launcher.args(["--mca", "plm_rsh_agent", "shardwise start-daemon"]).env(AGENT, agent);
    // Otherwise, daemons start further daemons with an agent that only this host has.
    launcher.args(["--mca", "plm_rsh_no_tree_spawn", "1"]);
    add_to_path(launcher, &[own_folder()?.as_ref()])
}

/// The command that starts a daemon on another host. `words` is what the launcher wants to run there, quoted for a shell.
pub fn start_daemon(host: &OsStr, words: &[OsString]) -> Result<Command> {
    let agent = std::env::var_os(AGENT).unwrap_or_else(|| "ssh".into());
    let mut command = Command::new(agent);
    command.arg(host);
    match words.split_first().and_then(|(first, rest)| Some((daemon_name(first)?, rest))) {
        Some((name, rest)) => {
            let quoted = |text: &OsStr| format!("'{}'", text.to_string_lossy().replace('\'', r"'\''"));
            let program = std::env::current_exe()?;
            let mpi = std::env::var_os(MPI).unwrap_or_default();
            command.args(["/bin/sh", "-c", &quoted(START.as_ref()), &quoted(program.as_ref()), &quoted(&mpi), name]);
            command.args(rest)
        }
        None => command.args(words),
    };
    Ok(command)
}

/// The daemon that a command of the launcher ends with: `PATH=… ; export PATH ; /usr/bin/orted`.
fn daemon_name(command: &OsStr) -> Option<&'static str> {
    let last = command.to_str()?.trim_end().rsplit(['/', ' ']).next()?;
    DAEMONS.into_iter().find(|name| *name == last)
}

/// The command that runs a daemon of this host's launcher.
pub fn daemon_command(name: &OsStr) -> Result<Command> {
    let installation = Installation::find().map_err(Error::Installation)?;
    let daemon = installation.launcher.with_file_name(name);
    let mut command = Command::new(&daemon);
    installation.add_mpi_library_path(&mut command).map_err(Error::Installation)?;
    let folder = daemon.parent().filter(|folder| folder.is_absolute());
    // Open MPI 5 looks for its files where the first host has them, unless it is told where they are.
    if let Some(root) = folder.and_then(Path::parent).filter(|_| name == "prted") {
        command.env("PRTE_PREFIX", root).env("PMIX_PREFIX", root);
    }
    add_to_path(&mut command, &[Some(own_folder()?.as_path()), folder].into_iter().flatten().collect::<Vec<_>>())?;
    Ok(command)
}

fn own_folder() -> Result<std::path::PathBuf> {
    Ok(std::env::current_exe()?.parent().map(Path::to_path_buf).unwrap_or_default())
}

/// Puts folders in front of the `PATH` of a command.
fn add_to_path(command: &mut Command, folders: &[&Path]) -> Result<()> {
    let set = std::env::var_os("PATH").unwrap_or_default();
    let folders = folders.iter().map(|folder| folder.to_path_buf()).chain(std::env::split_paths(&set));
    let path = std::env::join_paths(folders).map_err(|error| Error::failed("PATH", error))?;
    command.env("PATH", path);
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn a_daemon_is_started_through_shardwise_and_anything_else_as_it_is() {
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let arguments = |given: &[&str]| -> Vec<String> {
            let command = start_daemon("b".as_ref(), &words(given)).unwrap();
            command.get_args().map(|word| word.to_str().unwrap().to_string()).collect()
        };
        let first = "PRTE_PREFIX=/an env;export PRTE_PREFIX;/an env/bin/prted";
        let started = arguments(&[first, "--prtemca", "ess", "\"env\""]);
        assert_eq!(started[..3], ["b", "/bin/sh", "-c"]);
        assert_eq!(started[6..], ["prted", "--prtemca", "ess", "\"env\""]);
        assert_eq!(arguments(&["echo", "$SHELL"]), ["b", "echo", "$SHELL"]);
        assert_eq!(daemon_name("  PATH=/usr/bin:$PATH ; export PATH ;   /usr/bin/orted".as_ref()), Some("orted"));
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
        assert!(said.contains("shardwise is neither at /nowhere/shardwise nor on the PATH"), "{said}");
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
