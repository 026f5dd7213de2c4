//! The Prometheus page, checked by Prometheus's own tool.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use shardwise_journal::{
    EVENTS, EntryKind, Evaluation, Journal, Launch, METRICS, RankMemory, Resumed, Run, Saved, Start, Step, StepTraffic,
    VerbTraffic, prometheus,
};

/// Asserts that `promtool` accepts a page without any warning.
fn assert_accepted(text: &str) {
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut promtool = promtool.spawn().expect("promtool is missing: apt-get install prometheus");
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.is_empty(), "{said}\n{text}");
}

fn write(folder: &Path, name: &str, entries: Vec<EntryKind>) {
    let mut journal = Journal::open(folder, name).unwrap();
    entries.into_iter().for_each(|kind| drop(journal.add(kind).unwrap()));
}

fn page(folder: &Path) -> String {
    prometheus::text(&Run::open(folder).unwrap())
}

#[test]
fn promtool_accepts_a_run_from_its_first_line_to_its_last() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write(folder, EVENTS, vec![EntryKind::Launched(Launch { attempt: 1, ranks: 2, ..Launch::default() })]);
    assert_accepted(&page(folder));
    let name = "a \"name\" \\ of\ntwo lines".to_string();
    let start = Start { name, ranks: 2, zero_stage: 3, memory_limit_bytes: Some(3 << 30), ..Start::default() };
    let step = |number, loss| EntryKind::Step(Step { step: number, loss, tokens_per_s: 1234.5, ..Step::default() });
    let traffic = || {
        let verb = VerbTraffic { verb: "all-gather".to_string(), calls: 7, bytes: 1 << 40, expected_bytes: 12 };
        EntryKind::Traffic(StepTraffic { step: 2, steps: 2, verbs: vec![verb] })
    };
    let rank = |rank| RankMemory { rank, parameters: 5, unsharded: 9, ..RankMemory::default() };
    write(
        folder,
        METRICS,
        vec![
            EntryKind::Start(Box::new(start)),
            step(1, f64::INFINITY),
            step(2, 3.25),
            EntryKind::Memory { step: 2, ranks: vec![rank(0), rank(1)] },
            traffic(),
            traffic(),
            EntryKind::Evaluation(Evaluation { step: 2, loss: 2.5, ..Evaluation::default() }),
            EntryKind::Saved(Saved { step: 2, took_s: 0.5, ..Saved::default() }),
        ],
    );
    write(
        folder,
        EVENTS,
        vec![
            EntryKind::Failed { attempt: 1, step: 2, text: "rank 1 died".to_string() },
            EntryKind::Launched(Launch { attempt: 2, ranks: 2, ..Launch::default() }),
            EntryKind::Resumed(Resumed { attempt: 2, lost_s: 1.5, ..Resumed::default() }),
        ],
    );
    let text = page(folder);
    assert_accepted(&text);
    for line in [
        "# TYPE shardwise_loss gauge",
        "shardwise_loss 3.25",
        "shardwise_step 2",
        "shardwise_tokens_per_second 1234.5",
        r#"shardwise_memory_bytes{rank="1",kind="unsharded"} 9"#,
        r#"shardwise_sent_bytes_total{collective="all-gather"} 2199023255552"#,
        r#"shardwise_sent_expected_bytes_total{collective="all-gather"} 24"#,
        "shardwise_restarts_total 1",
        "shardwise_lost_seconds_total 1.5",
        "shardwise_memory_limit_bytes 3221225472",
        "shardwise_running 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }
    assert!(text.contains(r#"name="a \"name\" \\ of\ntwo lines""#), "{text}");
    write(folder, METRICS, vec![step(3, f64::NAN), step(4, f64::INFINITY)]);
    write(folder, EVENTS, vec![EntryKind::Ended { code: 1, restarts: 1, lost_s: 1.5 }]);
    let text = page(folder);
    assert_accepted(&text);
    assert!(text.contains("\nshardwise_loss +Inf\n") && text.contains("\nshardwise_running 0\n"), "{text}");
}
