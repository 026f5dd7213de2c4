//! The claims about the foundation: environment, memory safety and collectives.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use shardwise_compare::comm::{self, Backend};

use crate::claim::{Claim, Verdict};
use crate::workspace::{build, output_of};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "foundation",
        name: "doctor",
        what: "shardwise doctor finds libtorch, MPI with a working launcher, cores, memory and shared memory",
        heavy: false,
        measure: doctor,
    },
    Claim {
        group: "foundation",
        name: "leaks",
        what: "the tests of the libtorch shim leak no memory under valgrind",
        heavy: false,
        measure: leaks,
    },
    Claim {
        group: "foundation",
        name: "comm",
        what: "at 2, 4 and 8 ranks, reduce-scatter is 2× as fast as MPI's and 3× gloo's, all-gather within 5% of MPI's and 4× gloo's",
        heavy: true,
        measure: collectives,
    },
];

fn doctor() -> Result<Verdict> {
    // It examines the rank program in the same folder.
    build("shardwise-rank", &["build", "--release", "--workspace", "--bins"])?;
    let program = build("shardwise", &["build", "--release", "--workspace", "--bins"])?;
    let output = Command::new(program).arg("doctor").env_remove("LD_LIBRARY_PATH").output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    // NCCL and CUDA are optional.
    let needed = ["libtorch", "MPI library", "MPI launcher", "cores", "memory", "shared memory"];
    let in_order = |what: &&&str| text.lines().any(|line| line.starts_with(&format!("ok      {what:14} ")));
    let found = needed.iter().filter(in_order).count();
    Ok(Verdict {
        figure: format!("{found} of {} requirements found, exit code {:?}", needed.len(), output.status.code()),
        bar: format!("{}, exit code 0", needed.len()),
        holds: output.status.success() && found == needed.len(),
    })
}

fn leaks() -> Result<Verdict> {
    ensure!(
        Command::new("valgrind").arg("--version").output().is_ok_and(|output| output.status.success()),
        "valgrind is not installed: apt-get install valgrind"
    );
    let tests = build("shim", &["test", "--release", "--no-run", "--workspace", "--test", "shim"])?;
    let log = std::env::temp_dir().join(format!("shardwise-leaks-{}", std::process::id()));
    let mut valgrind = Command::new("valgrind");
    valgrind
        .args(["--leak-check=full", "--show-leak-kinds=definite,indirect"])
        .arg(format!("--log-file={}", log.display()))
        .arg(tests)
        // This test measures resident memory, which under valgrind is valgrind's own.
        .args(["--test-threads=1", "--skip", "released_memory_goes_back_to_the_system"])
        .env("OMP_NUM_THREADS", "1")
        .env("RUST_BACKTRACE", "0");
    let printed = output_of(&mut valgrind)?;
    let report = std::fs::read_to_string(&log)?;
    std::fs::remove_file(&log)?;
    let passed = printed.lines().filter(|line| line.ends_with("... ok")).count();
    let lost = |kind: &str| -> Result<u64> {
        let line = report.lines().find(|line| line.contains(&format!("{kind} lost:")));
        // Valgrind omits the summary if every block was freed.
        let Some((_, rest)) = line.and_then(|line| line.split_once("lost:")) else { return Ok(0) };
        let digits = rest.split_whitespace().next().unwrap_or_default().replace(',', "");
        digits.parse().with_context(|| format!("valgrind said '{rest}'"))
    };
    let bytes = lost("definitely")? + lost("indirectly")?;
    if bytes > 0 {
        println!("{report}");
    }
    Ok(Verdict {
        figure: format!("{bytes} bytes leaked by {passed} tests"),
        bar: "0 bytes by at least 17 tests".to_string(),
        holds: bytes == 0 && passed >= 17,
    })
}

fn collectives() -> Result<Verdict> {
    let rows = comm::run(&comm::Options::default())?;
    let least = |verb: &str, backend: Backend| {
        rows.iter().filter(|row| row.verb == verb).map(|row| row.ratio(backend)).fold(f64::MAX, f64::min)
    };
    let bars = [
        ("reduce-scatter", Backend::Mpi, 2.),
        ("reduce-scatter", Backend::Gloo, 3.),
        ("all-gather", Backend::Mpi, 0.95),
        ("all-gather", Backend::Gloo, 4.),
    ];
    let described = |number: &dyn Fn(&(&str, Backend, f64)) -> f64| {
        let parts: Vec<String> = bars.iter().map(|bar| format!("{} {:.2}× {:?}", bar.0, number(bar), bar.1)).collect();
        parts.join(", ")
    };
    Ok(Verdict {
        figure: format!("at least {}", described(&|bar| least(bar.0, bar.1))),
        bar: described(&|bar| bar.2),
        holds: bars.iter().all(|&(verb, backend, bar)| least(verb, backend) >= bar),
    })
}
