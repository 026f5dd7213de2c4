//! `shardwise report`: the page shows what happened, in order and with the right figures; it is one self-contained file; and text from
//! names and errors is escaped.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod simulated_runs;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

use roxmltree::{Document, Node, ParsingOptions};
use simulated_runs::{Plan, SimulatedRun, recipe, run_with_failures, run_without_failures};

fn report(arguments: &[&Path]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shardwise")).arg("report").args(arguments).output().unwrap()
}

/// The folder of a test. It is kept, so that people can look at the pages.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report").join(name);
    drop(std::fs::remove_dir_all(&folder));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Creates the page of these runs.
fn page(runs: &[&Path]) -> String {
    let output = report(runs);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = std::fs::read_to_string(runs[0].join("report.html")).unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("report.html") && said.contains("kB"), "{said}");
    page
}

/// Parses the page, which is also XML.
fn parse(page: &str) -> Document<'_> {
    let options = ParsingOptions { allow_dtd: true, nodes_limit: 1_000_000, ..ParsingOptions::default() };
    Document::parse_with_options(page, options).unwrap_or_else(|error| panic!("{error}"))
}

fn text(node: Node) -> String {
    node.descendants().filter(|inner| inner.is_text()).filter_map(|inner| inner.text()).collect()
}

fn section<'a>(document: &'a Document, id: &str) -> Node<'a, 'a> {
    document.descendants().find(|node| node.attribute("id") == Some(id)).unwrap_or_else(|| panic!("no {id}"))
}

/// The cells of a section's tables, row by row.
fn rows(section: Node) -> Vec<Vec<String>> {
    let rows = section.descendants().filter(|node| node.has_tag_name("tr"));
    rows.map(|row| row.children().filter(Node::is_element).map(text).collect()).collect()
}

/// The caption of the chart with this title.
fn caption(document: &Document, title: &str) -> String {
    let is_it = |figure: &Node| figure.children().any(|node| node.has_tag_name("h3") && text(node) == title);
    let figure = document.descendants().filter(|node| node.has_tag_name("figure")).find(is_it).unwrap();
    text(figure.children().find(|node| node.has_tag_name("figcaption")).unwrap())
}

#[test]
fn failures_and_changes_of_the_world_size_are_shown() {
    let page = page(&[&run_with_failures(&folder("run_with_failures"))]);
    let document = parse(&page);
    let events: Vec<String> = rows(section(&document, "events"))
        .into_iter()
        .skip(1)
        .filter(|row| ["start", "failure", "resumed", "skipped", "end"].iter().any(|kind| row[2].ends_with(kind)))
        .map(|row| format!("{} | {}", row[1], row[3]))
        .collect();
    assert_eq!(
        events,
        [
            "1 | Started with 4 ranks on hosts a and b, ZeRO stage 3.",
            "60 | Step 60 was skipped: The gradient of block.3 is not finite: model.layers.3.mlp.up_proj.weight.",
            "128 | Rank 2 (host b, process 1389) died of signal 9 (killed) at step 128 in backward of block.1.",
            "101 | Restarted with 4 ranks on hosts a and b, ZeRO stage 3, resuming at step 101 from runs/kjv/step-100.",
            "101 | Resumed at step 101 after 2.5 s, of which 0.20 s until the failure was noticed; 27 steps are repeated.",
            "181 | Host b is lost: all its ranks (ranks 2-3) have sent no heartbeat for 30 s.",
            "151 | Restarted with 2 ranks on host a (host b does not answer), ZeRO stage 3, resuming at step 151 from runs/kjv/step-150.",
            "151 | Resumed at step 151 after 32.4 s, of which 30.1 s until the failure was noticed; 30 steps are repeated.",
            "263 | Rank 1 (host a, process 2077) has sent no heartbeat for 30.1 s; it was last heard at step 263 in reduce of block.0.",
            "251 | Restarted with 4 ranks on hosts a and b, ZeRO stage 3, resuming at step 251 from runs/kjv/step-250.",
            "251 | Resumed at step 251 after 32.4 s, of which 30.1 s until the failure was noticed; 12 steps are repeated.",
            "400 | Finished 51 min 38 s after the first start. Restarted 3 times, which cost 1 min 7 s and 69 repeated steps.",
        ]
    );
    let lead = text(document.descendants().find(|node| node.attribute("class") == Some("lead")).unwrap());
    assert_eq!(
        lead,
        "Finished: 400 steps in 51 min 38 s, on 4, then 2, then 4 ranks. Restarted 3 times, which cost 1 min 7 s and 69 repeated steps."
    );
    let facts = text(section(&document, "facts"));
    for fact in [
        "finished",
        "42.1 million parameters",
        "4, then 2, then 4; at most 2 per host",
        "stage 3, 1 replica",
        "6.55 million; 16,384 per step",
    ] {
        assert!(facts.contains(fact), "{fact}: {facts}");
    }
    assert!(
        caption(&document, "Loss")
            .contains("1 step skipped. Diamonds: held-out text. Crosses: the loss was not finite.")
    );
    assert!(caption(&document, "Throughput").contains(" on 2 ranks, "), "{}", caption(&document, "Throughput"));
    assert!(caption(&document, "Progress").contains("3 failures (crosses); 69 steps repeated"));
}

#[test]
fn the_world_size_is_shown_below_the_charts() {
    let page = page(&[&run_with_failures(&folder("bands"))]);
    let document = parse(&page);
    let svg = section(&document, "loss-w-t").parent().unwrap();
    let number = |node: &Node, name| node.attribute(name).unwrap().parse::<f64>().unwrap();
    let bands: Vec<(String, f64, f64)> = svg
        .children()
        .filter(|node| node.attribute("class") == Some("band"))
        .map(|node| (text(node), number(&node, "width"), number(&node, "height")))
        .collect();
    let [(first, wide, high), (second, narrow, low), (third, ..)] = &bands[..] else { panic!("{bands:?}") };
    assert_eq!([first, second, third], ["4 ranks", "2 ranks", "4 ranks"]);
    // Steps 1 to 150 on 4 ranks, 151 to 250 on 2.
    assert!((wide / narrow - 1.5).abs() < 0.02 && (high / low - 2.).abs() < 0.01, "{bands:?}");
    let moments = svg.children().filter(|node| node.attribute("class") == Some("moment")).count();
    assert_eq!(moments, 3);
}

#[test]
fn memory_and_traffic_are_shown_for_every_world_size() {
    let page = page(&[&run_with_failures(&folder("worlds"))]);
    let document = parse(&page);
    let memory = section(&document, "memory");
    let heads: Vec<String> = memory.descendants().filter(|node| node.has_tag_name("h4")).map(text).collect();
    assert_eq!(heads, ["On 4 ranks, after step 400", "On 2 ranks, after step 260"]);
    let bars = memory.descendants().filter(|node| node.attribute("class") == Some("bar")).count();
    assert_eq!(bars, 6);
    // 12 bytes of optimizer state per parameter, in 4 and in 2 shards.
    let optimizer: Vec<String> =
        rows(memory).into_iter().filter(|row| row[0] == "optimizer").map(|row| row[2].clone()).collect();
    assert_eq!(optimizer, ["120 MiB", "241 MiB"]);
    let traffic = rows(section(&document, "traffic"));
    let gathers: Vec<&Vec<String>> = traffic.iter().filter(|row| row[0] == "all-gather").collect();
    assert_eq!(*gathers[0], ["all-gather", "19.0", "126 MB", "126 MB", "0.00%"]);
    assert_eq!(*gathers[1], ["all-gather", "19.0", "84.2 MB", "84.2 MB", "0.00%"]);
    assert!(traffic.iter().any(|row| row[0] == "reduce-scatter" && row[4] == "+0.20%"), "{traffic:?}");
    assert!(traffic.iter().any(|row| row[0] == "all-reduce" && row[3] == "none"), "{traffic:?}");
}

#[test]
fn several_runs_are_compared_side_by_side() {
    let base = folder("several");
    let a = run_without_failures(&base.join("a"), Plan::default());
    let plan =
        Plan { name: "kjv-faster".into(), recipe: recipe("kjv", 400, "1e-3"), floor: 2.6, seed: 5, ..Plan::default() };
    let b = run_without_failures(&base.join("b"), plan);
    let page = page(&[&a, &b, &run_with_failures(&base.join("c"))]);
    let document = parse(&page);
    let differing = rows(section(&document, "recipes"));
    assert_eq!(differing[1..], [["optimizer.lr", "0.0006", "0.001", "0.0006"].map(ToString::to_string)]);
    let facts = rows(section(&document, "facts"));
    assert_eq!(facts[0], ["", "A kjv", "B kjv-faster", "C kjv"]);
    assert_eq!(
        facts[3],
        ["ranks", "4; at most 2 per host", "4; at most 2 per host", "4, then 2, then 4; at most 2 per host"]
    );
    let svg = section(&document, "loss-w-t").parent().unwrap();
    // Each has its own hue, dash and shape, and its name at the end.
    for style in 0..3 {
        let lines =
            svg.descendants().filter(|n| n.attribute("class") == Some(&format!("line s{style} d{style}"))).count();
        let shapes =
            svg.descendants().filter(|n| n.attribute("class") == Some(&format!("shape f{style} s{style}"))).count();
        assert_eq!((lines, shapes), (1, 5), "style {style}");
    }
    assert!(text(svg).contains("B kjv-faste…"), "{}", text(svg));
}

#[test]
fn text_from_users_is_escaped() {
    let bad = "<script>alert(1)</script>\"'&\u{0}<img src=http://bad/>";
    let plan = Plan { name: bad.to_string(), recipe: format!("# {bad}\n[{bad}"), steps: 20, ..Plan::default() };
    let mut run = SimulatedRun::new(&folder("bad"), plan.clone());
    run.start(2, 1, &[bad], &[bad]);
    run.steps(1, 10);
    run.skip(11, bad);
    run.note(bad);
    run.fail(0.2, bad);
    run.end(1);
    let run = run.folder();
    let page = page(&[&run, &run_without_failures(&folder("good"), plan)]);
    let document = parse(&page);
    assert!(!document.descendants().any(|node| node.has_tag_name("script") || node.has_tag_name("img")));
    assert!(!document.descendants().any(|node| node.attributes().any(|attribute| attribute.name().starts_with("on"))));
    assert!(text(document.root()).contains("<script>alert(1)</script>"), "the text itself is on the page");
}

#[test]
fn the_page_needs_no_network() {
    let page = page(&[&run_with_failures(&folder("alone"))]);
    for word in ["http://", "https://", "//cdn", "@import", "url(\"", "src=", "href=", "<script", "<link", "<iframe"] {
        assert!(!page.contains(word), "{word}");
    }
    let own = page.matches("url(").count();
    assert_eq!(own, page.matches("url(#").count(), "every url refers to the page itself");
    let document = parse(&page);
    let is_policy = |node: &Node| node.attribute("http-equiv") == Some("Content-Security-Policy");
    let policy = document.descendants().find(is_policy).and_then(|node| node.attribute("content")).unwrap();
    assert!(policy.starts_with("default-src 'none'; style-src 'unsafe-inline'"), "{policy}");
}

#[test]
fn ids_are_unique_and_pictures_are_described() {
    let page = page(&[&run_with_failures(&folder("described"))]);
    let document = parse(&page);
    let mut ids: Vec<&str> = document.descendants().filter_map(|node| node.attribute("id")).collect();
    let all = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), all);
    for svg in document.descendants().filter(|node| node.has_tag_name("svg")) {
        let is_described = svg.has_attribute("aria-hidden") || svg.has_attribute("aria-label") || {
            let names = svg.attribute("aria-labelledby").unwrap();
            names.split(' ').all(|name| ids.contains(&name))
        };
        assert!(is_described, "{svg:?}");
    }
}

#[test]
fn many_ranks_a_final_failure_and_an_empty_journal() {
    let mut run =
        SimulatedRun::new(&folder("many"), Plan { parameters: 7.2e9, name: "large".into(), ..Plan::default() });
    run.start(64, 1, &[], &[]);
    run.steps(1, 40);
    run.fail(0.2, "out of memory on every rank");
    run.start(64, 1, &[], &[]);
    run.fail(0.2, "out of memory on every rank");
    run.end(1);
    let page_of = page(&[&run.folder()]);
    let document = parse(&page_of);
    let lead = text(document.descendants().find(|node| node.attribute("class") == Some("lead")).unwrap());
    assert!(lead.starts_with("Failed with exit code 1: 40 of 400 steps in "), "{lead}");
    let memory = section(&document, "memory");
    assert_eq!(memory.descendants().filter(|node| node.attribute("class") == Some("bar")).count(), 64);

    let empty = folder("empty");
    std::fs::write(empty.join("metrics.jsonl"), "").unwrap();
    let page_of = page(&[&empty]);
    assert!(text(parse(&page_of).root()).contains("The journal of this run is empty."));
}

#[test]
fn errors_name_the_file_and_the_remedy() {
    let base = folder("none");
    let output = report(&[&base]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("not the folder of a run") && said.contains("run.folder"),
        "{said}"
    );

    std::fs::write(base.join("metrics.jsonl"), [0xff; 1000]).unwrap();
    std::fs::write(base.join("events.jsonl"), "what?\n").unwrap();
    let output = report(&[&base]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("events.jsonl: none of its 1 lines"), "{said}");
    assert!(!base.join("report.html").exists());

    let run = run_without_failures(&base.join("good"), Plan { steps: 10, ..Plan::default() });
    let mut metrics = std::fs::read(run.join("metrics.jsonl")).unwrap();
    let half = metrics.len() / 2;
    metrics[half..half + 5].fill(0);
    std::fs::write(run.join("metrics.jsonl"), metrics).unwrap();
    let output = report(&[&run]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("could not be read and was skipped."), "{output:?}");
    let page = std::fs::read_to_string(run.join("report.html")).unwrap();
    assert!(text(parse(&page).root()).contains("could not be read and was skipped"));

    let output = report(&[&run, Path::new("--to"), &base.join("no/such/folder.html")]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("folder.html cannot be written; choose another file with --to FILE"),
        "{said}"
    );
}

#[test]
fn extreme_numbers_still_make_a_page() {
    let run = folder("wild");
    let numbers = ["0", "-1e300", "1e300", "1e-300", "\"NaN\"", "\"inf\""];
    let mut lines = String::new();
    for (index, number) in numbers.iter().enumerate() {
        let plain = if number.starts_with('"') { "0" } else { number };
        for step in [0, 1, u64::MAX, index as u64] {
            lines += &format!(
                "{{\"time_s\":{plain},\"kind\":\"step\",\"step\":{step},\"loss\":{number},\"grad_norm\":{number},\"lr\":{plain},\"tokens\":{step},\"tokens_per_s\":{plain},\"step_s\":{plain},\"mfu\":{plain},\"memory_bytes\":{step},\"memory_peak_bytes\":{step},\"sent_bytes\":{step},\"loss_scale\":1,\"skipped_so_far\":0}}\n"
            );
        }
        lines += &format!(
            "{{\"time_s\":{plain},\"kind\":\"resumed\",\"attempt\":0,\"step\":0,\"lost_s\":{plain},\"noticed_s\":{plain},\"steps_again\":{}}}\n",
            u64::MAX
        );
    }
    std::fs::write(run.join("metrics.jsonl"), lines).unwrap();
    let page = page(&[&run]);
    let document = parse(&page);
    assert!(!text(document.root()).contains("could not be read"), "every line is valid");
}

#[test]
fn a_million_steps_make_a_small_page() {
    let mut run = SimulatedRun::new(&folder("million"), Plan { steps: 1_000_000, step_s: 0.5, ..Plan::default() });
    run.start(4, 1, &[], &[]);
    run.bare_steps(1, 600_000);
    run.fail(0.2, "rank 1 died");
    run.start(2, 590_001, &[], &[]);
    run.resume(590_001, 10_000, 1.);
    run.bare_steps(590_001, 1_000_000);
    run.end(0);
    let run = run.folder();
    let start = Instant::now();
    let output = Command::new("bash")
        .args(["-c", "ulimit -v 1000000; exec \"$0\" report \"$1\"", env!("CARGO_BIN_EXE_shardwise")])
        .arg(&run)
        .output()
        .unwrap();
    println!("{:.1} s", start.elapsed().as_secs_f64());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = std::fs::read_to_string(run.join("report.html")).unwrap();
    assert!(page.len() < 1_000_000, "{}", page.len());
    assert!(text(parse(&page).root()).contains("1,000,000 of 1,000,000"));
    std::fs::remove_file(run.join("metrics.jsonl")).unwrap();
}
