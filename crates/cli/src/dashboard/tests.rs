#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod simulated_run;

use proptest::prelude::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use shardwise_journal::{Entry, EntryKind, RankMemory, Run, Start, Step};
use shardwise_watch::{Presence, RankSnapshot, Snapshot, Wait};

use super::draw::{Dashboard, Pane, UiState, draw};
use super::run_view::{RunView, Status};
use super::source::Link;
use super::summary;
use simulated_run::simulate;

fn view(entries: Vec<Entry>) -> RunView {
    let mut run = Run::empty();
    entries.into_iter().for_each(|entry| run.add(entry));
    RunView::from_run(&run)
}

fn screen(dashboard: &Dashboard<'_>, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, dashboard)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |row: &[ratatui::buffer::Cell]| row.iter().map(|cell| cell.symbol()).collect::<String>();
    buffer.content.chunks(usize::from(width).max(1)).map(|row| line(row) + "\n").collect()
}

fn snapshot(ranks: u64) -> Snapshot {
    let rank = |rank: u64| RankSnapshot {
        rank,
        coordinates: String::new(),
        host: "vm".to_string(),
        presence: if rank == 3 { Presence::Left { code: None } } else { Presence::Connected },
        step: 412,
        activity: "forward of block.3".to_string(),
        in_phase_ms: 120,
        call: String::new(),
        last_heard_ms_ago: 60,
    };
    let wait = Wait {
        waiting: "ranks 0, 1 and 3".to_string(),
        missing: "rank 2".to_string(),
        call: "all-gather #88 of 'block.2' (38.7 kB, shard 0-3)".to_string(),
        duration: "12 s".to_string(),
    };
    let shown = (0..ranks.min(64)).map(rank).collect();
    Snapshot {
        attempt: 2,
        ranks,
        connected: ranks - 1,
        steps: (411, 412),
        shown,
        waits: vec![wait],
        ..Snapshot::default()
    }
}

/// The ranks of two stages, each of which has two ranks that share layers. Stage 1 waits for stage 0.
fn pipeline_snapshot() -> Snapshot {
    let mut snapshot = Snapshot { waits: Vec::new(), ..snapshot(4) };
    for (rank, shown) in snapshot.shown.iter_mut().enumerate() {
        shown.coordinates = format!("stage {}, tensor {}", rank / 2, rank % 2);
    }
    snapshot.stage_waits.push(Wait {
        waiting: "stage 1".to_string(),
        missing: "stage 0".to_string(),
        call: "activations of block.3".to_string(),
        duration: "12 s".to_string(),
    });
    snapshot
}

fn dashboard<'a>(run: &'a RunView, snapshot: Option<&'a Snapshot>, ui: &'a UiState) -> Dashboard<'a> {
    Dashboard { run, snapshot, link: Link { is_live: run.is_live, message: None }, ui }
}

#[test]
fn a_large_screen_has_all_panes() {
    let run = RunView { is_live: true, ..view(simulate(812, 2000, Some(431))) };
    let (ui, snapshot) = (UiState::default(), snapshot(4));
    let text = screen(&dashboard(&run, Some(&snapshot), &ui), 160, 50);
    let expected = [
        "kjv  ● running; restarted once",
        "step 812/2000 (41%)",
        "4 ranks, ZeRO stage 3, bf16",
        "3 s lost to restarts",
        "• evaluation, 1 not finite",
        "tokens/s",
        "memory per rank, by kind",
        "██ parameters 21 MiB",
        "rank 3",
        "of 3.0 GiB",
        "ranks 0, 1 and 3 are waiting for rank 2, 12 s",
        "✖ gone",
        "✕ step 431: Rank 2 (host vm, process 1389) died",
        "↻ step 401: Resumed at step 401 after 2.5 s",
        "● step",
        "trace 3 steps",
    ];
    for words in expected {
        assert!(text.contains(words), "{words}:\n{text}");
    }
}

#[test]
fn a_pipeline_shows_its_stages_and_which_of_them_wait() {
    let run = RunView { is_live: true, ..view(simulate(812, 2000, None)) };
    let (ui, snapshot) = (UiState { pane: Pane::Ranks, ..UiState::default() }, pipeline_snapshot());
    let text = screen(&dashboard(&run, Some(&snapshot), &ui), 80, 24);
    let expected = [
        "» stage 1 waits for stage 0: activations of block.3, 12 s",
        "   0 stage 0, tensor 0 vm forward of block.3       120 ms",
        "   2 stage 1, tensor 0 vm forward of block.3       120 ms",
        "   3 stage 1, tensor 1 vm ✖ gone",
    ];
    for words in expected {
        assert!(text.contains(words), "{words}:\n{text}");
    }
    assert!(!text.contains("no rank is waiting"), "{text}");
    let plain = summary::text(&run, Some(&snapshot));
    assert!(plain.contains("» stage 1 waits for stage 0: activations of block.3, 12 s\n"), "{plain}");
}

#[test]
fn a_small_screen_has_one_pane_at_a_time() {
    let run = view(simulate(812, 2000, Some(431)));
    let snapshot = snapshot(10_000);
    let words = [
        (Pane::Loss, "• evaluation"),
        (Pane::Throughput, "tokens/s"),
        (Pane::Memory, "▒▒ optimizer 127 MiB"),
        (Pane::Ranks, "9999 of 10000 ranks are connected, 1 gone"),
        (Pane::Events, "checkpoints, the last of"),
    ];
    for (pane, words) in words {
        let ui = UiState { pane, ..UiState::default() };
        let text = screen(&dashboard(&run, Some(&snapshot), &ui), 80, 24);
        assert!(text.contains(words) && text.contains("tab  pane"), "{pane:?}:\n{text}");
        assert!(!text.contains("trace"), "there is no supervisor:\n{text}");
        let text = screen(&dashboard(&run, Some(&snapshot), &ui), 40, 12);
        assert!(text.contains("step 812/2000"), "{pane:?}:\n{text}");
    }
}

#[test]
fn scrolling_stops_at_the_last_line() {
    let run = view(simulate(812, 2000, Some(431)));
    let ui = UiState { pane: Pane::Events, ..UiState::default() };
    let newest = screen(&dashboard(&run, None, &ui), 80, 14);
    assert!(newest.contains("checkpoints, the last of"), "{newest}");
    ui.scroll(-1000);
    let oldest = screen(&dashboard(&run, None, &ui), 80, 14);
    assert!(oldest.contains("Started with 4 ranks") && !oldest.contains("Resumed at"), "{oldest}");
    ui.scroll(1);
    assert_ne!(screen(&dashboard(&run, None, &ui), 80, 14), oldest, "one line down shows at once");
}

#[test]
fn the_status_follows_from_the_journal() {
    let ended = |code| Entry::now(EntryKind::Ended { code, restarts: 1, lost_s: 2.5 });
    let now_s = ended(0).time_s;
    for (code, status) in [(0, Status::Finished), (75, Status::Saved), (130, Status::Interrupted), (1, Status::Failed)]
    {
        let mut entries = simulate(20, 20, None);
        entries.push(ended(code));
        assert_eq!(view(entries).status(now_s), status);
    }
    let killed = view(simulate(20, 2000, None));
    assert_eq!(killed.status(now_s), Status::Lost);
    assert_eq!(RunView { is_live: true, ..killed }.status(now_s), Status::Running);
    // A run under plain mpirun has no supervisor, and counts as running for as long as it writes.
    let is_ranks = |entry: &Entry| !matches!(entry.kind, EntryKind::Launched(_));
    let unsupervised = view(simulate(20, 2000, None).into_iter().filter(is_ranks).collect());
    assert_eq!((unsupervised.status(now_s), unsupervised.status(now_s + 3600.)), (Status::Running, Status::Lost));
}

#[test]
fn a_summary_is_plain_text() {
    let mut entries = simulate(812, 2000, Some(431));
    entries.push(Entry::now(EntryKind::Note { step: 812, text: "\u{1b}[2Jthe disk is full".to_string() }));
    entries.push(Entry::now(EntryKind::Ended { code: 0, restarts: 1, lost_s: 2.5 }));
    let text = summary::text(&view(entries), Some(&snapshot(4)));
    assert!(text.starts_with("kjv: finished; restarted once\nstep 812/2000 (41%)  loss 2."), "{text}");
    assert!(text.contains("! step 812:  [2Jthe disk is full.\n"), "{text}");
    assert!(text.trim_end().lines().last().unwrap().contains("Restarted once, which cost 2.5 s"), "{text}");
    assert!(!text.contains('\u{1b}'));
    assert!(summary::text(&RunView::default(), None).contains("no step completed yet"));
}

/// One of six runs with extreme numbers.
fn absurd(which: usize) -> RunView {
    let step = |step, loss: f64, figure: f64| {
        let step = Step { step, loss, tokens_per_s: figure, mfu: figure, memory_bytes: u64::MAX, ..Step::default() };
        Entry { time_s: figure, kind: EntryKind::Step(step) }
    };
    let huge = RankMemory { rank: usize::MAX, parameters: u64::MAX, process: u64::MAX, ..RankMemory::default() };
    let start = Start { name: "\u{1b}x".repeat(50), ranks: usize::MAX, steps: 0, ..Start::default() };
    let many = (0..64).map(|rank| RankMemory { rank, ..huge.clone() }).collect();
    match which {
        0 => RunView::default(),
        1 => view(vec![step(1, f64::NAN, 0.), step(2, f64::NAN, 1.)]),
        2 => view(vec![step(1, -1e308, 1e308), step(u64::MAX, 1e308, 1e308)]),
        3 => view(vec![step(1, f64::INFINITY, 1e-308), step(2, f64::NEG_INFINITY, -1.), step(3, 0., 2.)]),
        4 => view(vec![
            Entry { time_s: -1e300, kind: EntryKind::Start(Box::new(start)) },
            Entry { time_s: 1e300, kind: EntryKind::Memory { step: 1, ranks: many } },
            Entry { time_s: 1e300, kind: EntryKind::Note { step: 1, text: "x".repeat(5000) } },
        ]),
        _ => view(simulate(600, 500, Some(431))),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn no_size_and_no_run_breaks_the_screen(
        width in 0u16..220, height in 0u16..70, pane in 0usize..5, is_log: bool, which in 0usize..6, ranks in 1u64..20_000,
    ) {
        let (snapshot, ui) = (snapshot(ranks), UiState { pane: Pane::ALL[pane], is_log, ..UiState::default() });
        screen(&dashboard(&absurd(which), Some(&snapshot), &ui), width, height);
    }
}
