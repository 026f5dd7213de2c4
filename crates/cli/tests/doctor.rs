//! `shardwise doctor` on a working machine, and on machines where something is missing.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::PathBuf;
use std::process::{Command, Output};

fn doctor() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardwise"));
    command.arg("doctor").env_remove("LD_LIBRARY_PATH");
    command
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Creates a folder with a copy of the program and a script in place of `shardwise-rank`.
fn copy_program(name: &str, rank_program: Option<&str>) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("shardwise-doctor-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_shardwise"), folder.join("shardwise")).unwrap();
    if let Some(script) = rank_program {
        use std::os::unix::fs::PermissionsExt;
        std::fs::write(folder.join("shardwise-rank"), script).unwrap();
        std::fs::set_permissions(folder.join("shardwise-rank"), std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    folder
}

#[test]
fn a_working_machine() {
    let output = doctor().output().unwrap();
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("ok      libtorch       2.13.0"), "{text}");
    assert!(text.contains("thread level funneled or better"), "{text}");
    assert!(text.contains("launched 2 ranks that communicate"), "{text}");
    assert!(text.contains("This machine is ready to train."), "{text}");
}

#[test]
fn a_library_that_is_missing_is_named_with_its_remedy() {
    // The message of the dynamic loader when libtorch is missing.
    let folder = copy_program(
        "loader",
        Some(
            "#!/bin/sh\necho 'shardwise-rank: error while loading shared libraries: libtorch_cpu.so: cannot open' >&2\nexit 127\n",
        ),
    );
    let output = Command::new(folder.join("shardwise")).arg("doctor").output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("WRONG   libtorch") && text.contains("libtorch_cpu.so: cannot open"), "{text}");
    assert!(text.contains("to fix it: scripts/setup && cargo build --release"), "{text}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_launcher_that_is_missing_is_named_with_its_remedy() {
    let output = doctor().env("MPIRUN", "no-such-mpirun").output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("WRONG   MPI launcher   cannot run 'no-such-mpirun'"), "{text}");
    assert!(text.contains("to fix it: scripts/setup"), "{text}");
    assert!(text.contains("1 problem found."), "{text}");
}

#[test]
fn a_rank_program_that_is_missing_is_named() {
    let folder = copy_program("alone", None);
    let output = Command::new(folder.join("shardwise")).arg("doctor").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("shardwise-rank: No such file"), "{}", text(&output));
    std::fs::remove_dir_all(folder).unwrap();
}
