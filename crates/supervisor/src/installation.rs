//! Where this program finds libtorch and MPI, which it does not link itself.
//!
//! Installed with pip, both are in the same Python environment, relative to this program. Built from source, ranks know where they
//! were at build time. A site's own MPI takes precedence over both.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The variable with the folder of the MPI to use (`bin/mpirun` and `lib/libmpi.so.40`).
pub const MPI: &str = "SHARDWISE_MPI";

/// The version of libtorch that ranks are linked with.
pub const TORCH_VERSION: &str = "2.13.0";

/// The library of Open MPI 4 and 5. Programs that are linked with one run with the other.
const OPEN_MPI: &str = "libmpi.so.40";

/// MPICH's, whose types have other sizes.
const MPICH: &str = "libmpi.so.12";

/// The folders of libraries, relative to where an MPI is installed.
const LIBRARY_FOLDERS: [&str; 4] = ["lib", "lib64", "lib/x86_64-linux-gnu/openmpi/lib", "lib/x86_64-linux-gnu"];

/// What a rank needs besides its program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installation {
    /// The Python environment that this program is installed in, unless it was built from source.
    pub environment: Option<Environment>,
    /// The program that starts ranks.
    pub launcher: PathBuf,
    /// The folders of the MPI library and those that it needs, unless the linker finds the right ones anyway.
    mpi_libraries: Vec<PathBuf>,
    /// Where the environment's own MPI is installed, which was built for another place.
    mpi_root: Option<PathBuf>,
}

/// A Python environment with Shardwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// The folder with `bin` and `lib`.
    pub root: PathBuf,
    /// The folder with `shardwise` and `torch`.
    packages: PathBuf,
}

impl Environment {
    /// The environment that this program is installed in, if any.
    pub fn current() -> Option<Environment> {
        Environment::of(&std::env::current_exe().ok()?)
    }

    /// The environment of the program at this path, if it is installed in one.
    fn of(program: &Path) -> Option<Environment> {
        let root = program.parent()?.parent()?;
        let packages = ["lib", "lib64"].into_iter().flat_map(|lib| package_folders(&root.join(lib)));
        let packages = packages.into_iter().find(|folder| folder.join("shardwise/__init__.py").exists())?;
        Some(Environment { root: root.to_path_buf(), packages })
    }

    /// The environment's Python.
    pub fn python(&self) -> PathBuf {
        // Without an environment of its own (pip install --user), it is the system's.
        Some(self.root.join("bin/python3")).filter(|python| python.exists()).unwrap_or_else(|| "python3".into())
    }

    /// The folders of libraries that ranks load. Fails if torch is missing or has another version.
    fn libraries(&self) -> Result<Vec<PathBuf>, String> {
        let (torch, root) = (self.packages.join("torch"), self.root.display());
        let install = format!("run 'pip install torch=={TORCH_VERSION}' there");
        let text = std::fs::read_to_string(torch.join("version.py"))
            .map_err(|_| format!("torch is not installed in {root}: {install}"))?;
        let version = text.lines().find_map(|line| line.strip_prefix("__version__ = ")).unwrap_or("unknown");
        let version = version.trim_matches(['\'', '"']);
        // A build for other hardware has a suffix, such as +cpu.
        if version.split('+').next() != Some(TORCH_VERSION) {
            return Err(format!(
                "torch {version} is installed in {root}, but Shardwise needs {TORCH_VERSION}: {install}"
            ));
        }
        // The last has a library that ranks load by a name that pip's NCCL does not have.
        Ok(vec![torch.join("lib"), self.packages.join("nvidia/nccl/lib"), self.packages.join("shardwise/lib")])
    }
}

/// The folders of Python's packages in a folder of libraries.
fn package_folders(lib: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(lib).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_python = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"));
    // Debian's own Python has another name for the folder.
    entries.filter(is_python).flat_map(|lib| ["site-packages", "dist-packages"].map(|name| lib.join(name))).collect()
}

impl Installation {
    /// The installation of this program.
    pub fn find() -> Result<Installation, String> {
        let program =
            std::env::current_exe().map_err(|error| format!("this program's own path is not known: {error}"))?;
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Installation::of(&program, variable(MPI), variable("MPIRUN"))
    }

    /// The installation of the program at this path, with the values of `SHARDWISE_MPI` and `MPIRUN`.
    fn of(program: &Path, mpi: Option<PathBuf>, mpirun: Option<PathBuf>) -> Result<Installation, String> {
        let environment = Environment::of(program);
        let mut mpi_root = None;
        let (launcher, mpi_libraries) = match (mpi, mpirun, &environment) {
            (Some(folder), _, _) => {
                let launcher = folder.join("bin/mpirun");
                if !launcher.exists() {
                    return Err(format!("{MPI}: there is no {}", launcher.display()));
                }
                let libraries = find_libraries(&folder, environment.is_none());
                (launcher, vec![libraries.map_err(|problem| format!("{MPI}: {problem}"))?])
            }
            (None, Some(launcher), _) => {
                let folder = launcher.parent().and_then(Path::parent);
                let libraries = folder.and_then(|folder| find_libraries(folder, false).ok());
                (launcher, libraries.filter(|_| environment.is_some()).into_iter().collect())
            }
            (None, None, Some(environment)) if environment.root.join("lib").join(OPEN_MPI).exists() => {
                let lib = environment.root.join("lib");
                mpi_root = Some(environment.root.clone());
                // Its own libraries, which a variable of the user's could otherwise replace.
                (environment.root.join("bin/mpirun"), vec![lib.clone(), lib.join("openmpi")])
            }
            (None, None, Some(_)) => (PathBuf::from("mpirun"), vec![]),
            // The launcher of the MPI that this program was built with, which scripts/setup found.
            (None, None, None) => (PathBuf::from(option_env!("MPIRUN").unwrap_or("mpirun")), vec![]),
        };
        Ok(Installation { environment, launcher, mpi_libraries, mpi_root })
    }

    /// Adds the library path that a rank needs to its command. A rank that was built from source needs none, except for another MPI.
    pub fn add_library_path(&self, command: &mut Command) -> Result<(), String> {
        let mut folders = match &self.environment {
            Some(environment) => environment.libraries()?,
            None => Vec::new(),
        };
        folders.extend(self.mpi_libraries.clone());
        if let Some(root) = &self.mpi_root {
            command.env("OPAL_PREFIX", root);
        }
        add_library_folders(command, folders)
    }

    /// Where the environment's own MPI is installed, if that is the one to use.
    pub(crate) fn mpi_root(&self) -> Option<&Path> {
        self.mpi_root.as_deref()
    }

    /// Adds the library path that a program of the MPI needs to its command.
    pub(crate) fn add_mpi_library_path(&self, command: &mut Command) -> Result<(), String> {
        add_library_folders(command, self.mpi_libraries.clone())
    }

    /// Whether ranks need another library path than this process has, so that `shardwise rank` must start them.
    pub(crate) fn has_library_path(&self) -> bool {
        self.environment.is_some() || !self.mpi_libraries.is_empty()
    }

    /// How to get a library that is missing.
    pub fn remedy(&self, package: &str) -> String {
        match &self.environment {
            Some(environment) => format!("pip install '{package}' in {}", environment.root.display()),
            None => "scripts/setup && cargo build --release".to_string(),
        }
    }
}

/// Puts folders in front of the library path of a command.
fn add_library_folders(command: &mut Command, mut folders: Vec<PathBuf>) -> Result<(), String> {
    if folders.is_empty() {
        return Ok(());
    }
    let set = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    folders.extend(std::env::split_paths(&set).filter(|folder| !folder.as_os_str().is_empty()));
    let joined: OsString = std::env::join_paths(&folders).map_err(|_| {
        let with_colon = folders.iter().find(|folder| folder.to_string_lossy().contains(':'));
        let folder = with_colon.map(|folder| folder.display().to_string()).unwrap_or_default();
        format!("{folder}: libraries cannot be loaded from a folder with a colon in its name; move the environment")
    })?;
    command.env("LD_LIBRARY_PATH", joined);
    Ok(())
}

/// The folder of the MPI library in a folder where an MPI is installed.
fn find_libraries(folder: &Path, allows_mpich: bool) -> Result<PathBuf, String> {
    let has =
        |library: &str| LIBRARY_FOLDERS.iter().map(|name| folder.join(name)).find(|lib| lib.join(library).exists());
    match (has(OPEN_MPI), has(MPICH)) {
        (Some(libraries), _) => Ok(libraries),
        (None, Some(libraries)) if allows_mpich => Ok(libraries),
        (None, Some(_)) => Err(format!("{} has MPICH, but Shardwise needs Open MPI 4.1 or 5", folder.display())),
        (None, None) => Err(format!("{} has no {OPEN_MPI} in lib or lib64", folder.display())),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    fn write(path: &Path, text: &str) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// An environment with a space in its name, and this torch.
    fn environment(torch: Option<&str>) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("my env");
        write(&root.join("bin/shardwise"), "");
        let packages = root.join("lib/python3.11/site-packages");
        write(&packages.join("shardwise/__init__.py"), "");
        if let Some(version) = torch {
            write(&packages.join("torch/version.py"), &format!("x = 1\n__version__ = '{version}'\n"));
        }
        (folder, root)
    }

    fn library_path(installation: &Installation) -> Result<Vec<PathBuf>, String> {
        let mut command = Command::new("true");
        installation.add_library_path(&mut command)?;
        let set = command.get_envs().find(|(name, _)| *name == "LD_LIBRARY_PATH").and_then(|(_, value)| value);
        Ok(set.map(|value| std::env::split_paths(value).collect()).unwrap_or_default())
    }

    #[test]
    fn an_environment_has_its_own_libraries() {
        let (_folder, root) = environment(Some("2.13.0+cu130"));
        write(&root.join("bin/mpirun"), "");
        write(&root.join("lib").join(OPEN_MPI), "");
        let found = Installation::of(&root.join("bin/shardwise"), None, None).unwrap();
        assert_eq!(found.launcher, root.join("bin/mpirun"));
        let path = library_path(&found).unwrap();
        assert_eq!(path[0], root.join("lib/python3.11/site-packages/torch/lib"));
        assert!(path.contains(&root.join("lib")), "{path:?}");
    }

    #[test]
    fn what_is_wrong_with_an_environment_is_named() {
        let (_folder, root) = environment(None);
        let found = Installation::of(&root.join("bin/shardwise"), None, None).unwrap();
        assert_eq!(found.launcher, Path::new("mpirun"), "there is no MPI in it");
        let missing = library_path(&found).unwrap_err();
        assert!(
            missing.starts_with("torch is not installed in ") && missing.contains("pip install torch=="),
            "{missing}"
        );
        let (_folder, root) = environment(Some("2.12.1"));
        let wrong = library_path(&Installation::of(&root.join("bin/shardwise"), None, None).unwrap()).unwrap_err();
        assert!(wrong.contains("torch 2.12.1 is installed in ") && wrong.contains("needs 2.13.0"), "{wrong}");
    }

    #[test]
    fn another_mpi_can_be_chosen() {
        let (_folder, root) = environment(Some("2.13.0"));
        let program = root.join("bin/shardwise");
        let site = tempfile::tempdir().unwrap();
        let choose = || Installation::of(&program, Some(site.path().to_path_buf()), None);
        assert!(choose().unwrap_err().contains("there is no "));
        write(&site.path().join("bin/mpirun"), "");
        assert!(choose().unwrap_err().contains("has no libmpi.so.40"));
        write(&site.path().join("lib").join(MPICH), "");
        assert!(choose().unwrap_err().contains("has MPICH, but Shardwise needs Open MPI"));
        write(&site.path().join("lib64").join(OPEN_MPI), "");
        let found = choose().unwrap();
        assert_eq!(found.launcher, site.path().join("bin/mpirun"));
        assert!(library_path(&found).unwrap().contains(&site.path().join("lib64")));
        // By its launcher, as before.
        let found = Installation::of(&program, None, Some(site.path().join("bin/mpirun"))).unwrap();
        assert!(library_path(&found).unwrap().contains(&site.path().join("lib64")));
    }

    #[test]
    fn a_program_that_was_built_here_needs_no_library_path() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("target/release/shardwise");
        let found = Installation::of(&program, None, None).unwrap();
        assert_eq!((found.environment.clone(), library_path(&found)), (None, Ok(vec![])));
    }
}
