#![allow(clippy::unwrap_used, reason = "a test may fail")]

use proptest::prelude::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use shardwise_journal::{Entry, RankMemory, Run, Start, Step, What};
use shardwise_watch::{Glimpse, Presence, Snapshot, Wait};

use super::draw::{Keys, Pane, Scene, draw};
use super::source::Link;
use super::story::{Status, Story};
use super::summary;

#[allow(dead_code, reason = "it is also a program")]
#[path = "../../../journal/examples/plausible.rs"]
mod plausible;
use plausible::plausible;

fn story(entries: Vec<Entry>) -> Story {
    let mut run = Run::heard();
    entries.into_iter().for_each(|entry| run.hear(entry));
    Story::of(&run)
}

fn screen(scene: &Scene<'_>, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, scene)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |row: &[ratatui::buffer::Cell]| row.iter().map(|cell| cell.symbol()).collect::<String>();
    buffer.content.chunks(usize::from(width).max(1)).map(|row| line(row) + "\n").collect()
}

fn snapshot(ranks: u64) -> Snapshot {
    let glimpse = |rank: u64| Glimpse {
        rank,
        host: "vm".to_string(),
        presence: if rank == 3 { Presence::Left { code: None } } else { Presence::Here },
        step: 412,
        doing: "forward of block.3".to_string(),
        for_ms: 120,
        call: String::new(),
        heard_ms_ago: 60,
    };
    let wait = Wait {
        waiting: "ranks 0, 1 and 3".to_string(),
        missing: "rank 2".to_string(),
        call: "all-gather #88 of 'block.2' (38.7 kB, shard 0-3)".to_string(),
        lasting: "12 s".to_string(),
    };
    let shown = (0..ranks.min(64)).map(glimpse).collect();
    Snapshot { attempt: 2, ranks, here: ranks - 1, steps: (411, 412), shown, waits: vec![wait], ..Snapshot::default() }
}

fn scene<'a>(story: &'a Story, snapshot: Option<&'a Snapshot>, keys: &'a Keys) -> Scene<'a> {
    Scene { story, snapshot, link: Link { is_live: story.is_live, said: None }, keys }
}

#[test]
fn a_wide_screen_has_all_panes() {
    let story = Story { is_live: true, ..story(plausible(812, 2000, Some(431))) };
    let (keys, snapshot) = (Keys::default(), snapshot(4));
    let text = screen(&scene(&story, Some(&snapshot), &keys), 160, 50);
    let expected = [
        "kjv  ● running; was started again once",
        "step 812/2000 (41%)",
        "4 ranks, stage 3, bf16",
        "lost 3 s to restarts",
        "• held out, 1 not finite",
        "tokens/s",
        "memory by kind",
        "██ parameters 21 MiB",
        "rank 3",
        "of 3.0 GiB",
        "ranks 0, 1 and 3 wait for rank 2, 12 s",
        "✖ is gone",
        "✕ step 431: Rank 2 (host vm, process 1389) died",
        "↻ step 401: At work again at step 401 after 2.5 s",
        "● step",
        "trace 3 steps",
    ];
    for words in expected {
        assert!(text.contains(words), "{words}:\n{text}");
    }
}

#[test]
fn a_narrow_screen_has_one_pane_after_the_other() {
    let story = story(plausible(812, 2000, Some(431)));
    let snapshot = snapshot(10_000);
    let words = [
        (Pane::Loss, "held out"),
        (Pane::Speed, "tokens/s"),
        (Pane::Memory, "▒▒ optimizer 127 MiB"),
        (Pane::Ranks, "9999 of 10000 ranks are here, 1 gone"),
        (Pane::Events, "checkpoints, the last of"),
    ];
    for (pane, words) in words {
        let keys = Keys { pane, ..Keys::default() };
        let text = screen(&scene(&story, Some(&snapshot), &keys), 80, 24);
        assert!(text.contains(words) && text.contains("tab  pane"), "{pane:?}:\n{text}");
        assert!(!text.contains("trace"), "nobody is there to be asked:\n{text}");
        let text = screen(&scene(&story, Some(&snapshot), &keys), 40, 12);
        assert!(text.contains("step 812/2000"), "{pane:?}:\n{text}");
    }
}

#[test]
fn lines_are_scrolled_no_further_than_there_are_any() {
    let story = story(plausible(812, 2000, Some(431)));
    let keys = Keys { pane: Pane::Events, ..Keys::default() };
    let newest = screen(&scene(&story, None, &keys), 80, 14);
    assert!(newest.contains("checkpoints, the last of"), "{newest}");
    keys.scroll(-1000);
    let oldest = screen(&scene(&story, None, &keys), 80, 14);
    assert!(oldest.contains("Started on 4 ranks") && !oldest.contains("At work again"), "{oldest}");
    keys.scroll(1);
    assert_ne!(screen(&scene(&story, None, &keys), 80, 14), oldest, "one line down shows at once");
}

#[test]
fn a_run_is_told_as_it_is() {
    let ended = |code| Entry::now(What::Ended { code, restarts: 1, lost_s: 2.5 });
    let now_s = ended(0).time_s;
    for (code, status) in [(0, Status::Finished), (75, Status::Saved), (130, Status::Interrupted), (1, Status::Failed)]
    {
        let mut entries = plausible(20, 20, None);
        entries.push(ended(code));
        assert_eq!(story(entries).status(now_s), status);
    }
    let killed = story(plausible(20, 2000, None));
    assert_eq!(killed.status(now_s), Status::Quiet);
    assert_eq!(Story { is_live: true, ..killed }.status(now_s), Status::Running);
    // A run of mpirun's own has no supervisor, and is at work as long as it writes.
    let of_ranks = plausible(20, 2000, None).into_iter().filter(|entry| !matches!(entry.what, What::Launched(_)));
    let alone = story(of_ranks.collect());
    assert_eq!((alone.status(now_s), alone.status(now_s + 3600.)), (Status::Running, Status::Quiet));
}

#[test]
fn a_summary_is_plain_text() {
    let mut entries = plausible(812, 2000, Some(431));
    entries.push(Entry::now(What::Note { step: 812, text: "\u{1b}[2Jthe disk is full".to_string() }));
    entries.push(Entry::now(What::Ended { code: 0, restarts: 1, lost_s: 2.5 }));
    let text = summary::text(&story(entries), Some(&snapshot(4)));
    assert!(text.starts_with("kjv: finished; was started again once\nstep 812/2000 (41%)  loss 2."), "{text}");
    assert!(text.contains("! step 812:  [2Jthe disk is full.\n"), "{text}");
    assert!(
        text.trim_end().lines().last().unwrap().contains("It was started again once, for which 2.5 s were lost"),
        "{text}"
    );
    assert!(!text.contains('\u{1b}'));
    assert!(summary::text(&Story::default(), None).contains("no step has been made yet"));
}

/// One of six runs whose numbers are as bad as numbers get.
fn absurd(which: usize) -> Story {
    let step = |step, loss: f64, figure: f64| {
        let step =
            Step { step, loss, tokens_per_s: figure, utilisation: figure, memory_bytes: u64::MAX, ..Step::default() };
        Entry { time_s: figure, what: What::Step(step) }
    };
    let huge = RankMemory { rank: usize::MAX, parameters: u64::MAX, process: u64::MAX, ..RankMemory::default() };
    let start = Start { name: "\u{1b}x".repeat(50), ranks: usize::MAX, steps: 0, ..Start::default() };
    let many = (0..64).map(|rank| RankMemory { rank, ..huge.clone() }).collect();
    match which {
        0 => Story::default(),
        1 => story(vec![step(1, f64::NAN, 0.), step(2, f64::NAN, 1.)]),
        2 => story(vec![step(1, -1e308, 1e308), step(u64::MAX, 1e308, 1e308)]),
        3 => story(vec![step(1, f64::INFINITY, 1e-308), step(2, f64::NEG_INFINITY, -1.), step(3, 0., 2.)]),
        4 => story(vec![
            Entry { time_s: -1e300, what: What::Start(Box::new(start)) },
            Entry { time_s: 1e300, what: What::Memory { step: 1, ranks: many } },
            Entry { time_s: 1e300, what: What::Note { step: 1, text: "x".repeat(5000) } },
        ]),
        _ => story(plausible(600, 500, Some(431))),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn no_size_and_no_run_breaks_the_screen(
        width in 0u16..220, height in 0u16..70, pane in 0usize..5, is_log: bool, which in 0usize..6, ranks in 1u64..20_000,
    ) {
        let (snapshot, keys) = (snapshot(ranks), Keys { pane: Pane::ALL[pane], is_log, ..Keys::default() });
        screen(&scene(&absurd(which), Some(&snapshot), &keys), width, height);
    }
}
