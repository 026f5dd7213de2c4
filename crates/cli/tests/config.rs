//! `shardwise config` and `shardwise init` on a machine without libtorch, MPI and `shardwise-rank`.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::Path;
use std::process::{Command, Output};

use shardwise_recipe::{Recipe, schema};

/// The shared libraries that a program loads.
fn libraries(program: &str) -> String {
    let output = Command::new("ldd").arg(program).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_program_links_neither_libtorch_nor_mpi() {
    let of_program = libraries(env!("CARGO_BIN_EXE_shardwise"));
    let of_rank = libraries(env!("CARGO_BIN_EXE_shardwise-rank"));
    assert!(of_program.contains("libc.so"), "{of_program}");
    for name in ["libtorch", "libmpi"] {
        assert!(!of_program.contains(name), "{of_program}");
        assert!(of_rank.contains(name), "{of_rank}");
    }
}

#[test]
fn recipes_are_written_and_resolved_by_the_program_alone() {
    // A hard link, since a file that was just written may be busy while another test starts a process.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let here = folder.path().canonicalize().unwrap();
    let program = here.join("shardwise");
    std::fs::hard_link(env!("CARGO_BIN_EXE_shardwise"), &program).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command.args(arguments).current_dir(&here).env_clear().env("PATH", "").output().unwrap()
    };

    let text = printed(&run(&["init", "small.toml", "--size", "5m"]));
    assert!(text.starts_with("wrote small.toml: "), "{text}");

    let resolved = printed(&run(&["config", "small.toml", "-n", "2", "--set", "optimizer.lr=0.25"]));
    let recipe = read(&here.join("small.toml"), "optimizer.lr=0.25");
    assert_eq!(resolved.trim_end(), recipe.resolved_toml(Some(2)).unwrap().trim_end());
    assert!(resolved.contains("lr = 0.25"), "{resolved}");

    let text = printed(&run(&["config", "--schema"]));
    assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), schema());

    let wrong = run(&["config", "small.toml", "--set", "optimizer.rate=1"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(wrong.stdout.is_empty() && !wrong.stderr.is_empty());
}

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn read(path: &Path, set: &str) -> Recipe {
    Recipe::read_layered(path, None, &[set.to_string()]).unwrap()
}
