//! `shardwise report`: that the page tells what happened, in order and with the right figures; that it is one file that any
//! machine can show; and that what people wrote into names and errors stays text.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod made_up;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

use made_up::{MadeUp, Plan, quiet, recipe, troubled};
use roxmltree::{Document, Node, ParsingOptions};

fn report(arguments: &[&Path]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shardwise")).arg("report").args(arguments).output().unwrap()
}

/// Where pages are kept, to be looked at.
fn place(name: &str) -> PathBuf {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report").join(name);
    drop(std::fs::remove_dir_all(&place));
    std::fs::create_dir_all(&place).unwrap();
    place
}

/// The page of these runs.
fn page(runs: &[&Path]) -> String {
    let output = report(runs);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = std::fs::read_to_string(runs[0].join("report.html")).unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("report.html") && said.contains("kB"), "{said}");
    page
}

/// The page, which is also XML, as a tree.
fn parsed(page: &str) -> Document<'_> {
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

/// What captions say, by the chart's title.
fn caption(document: &Document, title: &str) -> String {
    let is_it = |figure: &Node| figure.children().any(|node| node.has_tag_name("h3") && text(node) == title);
    let figure = document.descendants().filter(|node| node.has_tag_name("figure")).find(is_it).unwrap();
    text(figure.children().find(|node| node.has_tag_name("figcaption")).unwrap())
}

#[test]
fn kills_and_a_changed_world_size_are_told_right() {
    let page = page(&[&troubled(&place("troubled"))]);
    let document = parsed(&page);
    let events: Vec<String> = rows(section(&document, "story"))
        .into_iter()
        .skip(1)
        .filter(|row| ["start", "failure", "at work", "skipped", "end"].iter().any(|kind| row[2].ends_with(kind)))
        .map(|row| format!("{} | {}", row[1], row[3]))
        .collect();
    assert_eq!(
        events,
        [
            "1 | Started on 4 ranks of hosts a and b at stage 3.",
            "60 | Step 60 updated nothing: The gradient of block.3 is not finite: model.layers.3.mlp.up_proj.weight.",
            "128 | Rank 2 (host b, process 1389) died of signal 9 (killed) at step 128 in backward of block.1.",
            "101 | Started again on 4 ranks of hosts a and b at stage 3; goes on with step 101 from runs/kjv/step-100.",
            "101 | At work again at step 101 after 2.5 s, of which 0.20 s until the failure was noticed; 27 steps are made again.",
            "181 | Host b is lost: it does not answer, and with it went ranks 2 and 3, at step 181 in forward of block.5.",
            "151 | Started again on 2 ranks of host a, without host b, which does not answer, at stage 3; goes on with step 151 from runs/kjv/step-150.",
            "151 | At work again at step 151 after 32.4 s, of which 30.1 s until the failure was noticed; 30 steps are made again.",
            "263 | Rank 1 (host a, process 2077) is silent for 30.1 s; it was last heard in reduce of block.0 at step 263.",
            "251 | Started again on 4 ranks of hosts a and b at stage 3; goes on with step 251 from runs/kjv/step-250.",
            "251 | At work again at step 251 after 32.4 s, of which 30.1 s until the failure was noticed; 12 steps are made again.",
            "400 | Finished 51 min 38 s after the first start. It was started again 3 times, for which 1 min 7 s were lost beside 69 steps made again.",
        ]
    );
    let lead = text(document.descendants().find(|node| node.attribute("class") == Some("lead")).unwrap());
    assert_eq!(
        lead,
        "Finished: 400 steps in 51 min 38 s, on 4, then 2, then 4 ranks. Started again 3 times, which cost 1 min 7 s and 69 steps made again."
    );
    let facts = text(section(&document, "facts"));
    for fact in [
        "finished",
        "42.1 million parameters",
        "4, then 2, then 4; at most 2 on a host",
        "stage 3, 1 replica",
        "6.55 million; 16,384 a step",
    ] {
        assert!(facts.contains(fact), "{fact}: {facts}");
    }
    assert!(
        caption(&document, "Loss")
            .contains("1 step updated nothing. Diamonds: held-out text. A cross: the loss was not finite.")
    );
    assert!(caption(&document, "Throughput").contains(" on 2 ranks, "), "{}", caption(&document, "Throughput"));
    assert!(caption(&document, "Progress").contains("3 failures (crosses) threw it back; 69 steps made again"));
}

#[test]
fn the_ranks_stand_below_the_charts_where_they_worked() {
    let page = page(&[&troubled(&place("bands"))]);
    let document = parsed(&page);
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
fn memory_and_traffic_are_shown_for_every_number_of_ranks() {
    let page = page(&[&troubled(&place("worlds"))]);
    let document = parsed(&page);
    let memory = section(&document, "memory");
    let heads: Vec<String> = memory.descendants().filter(|node| node.has_tag_name("h4")).map(text).collect();
    assert_eq!(heads, ["On 4 ranks, after step 400", "On 2 ranks, after step 260"]);
    let bars = memory.descendants().filter(|node| node.attribute("class") == Some("bar")).count();
    assert_eq!(bars, 6);
    // 12 bytes of optimizer state for each parameter, in 4 and in 2 slices.
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
fn several_runs_are_side_by_side() {
    let place = place("several");
    let a = quiet(&place.join("a"), Plan::default());
    let plan =
        Plan { name: "kjv-faster".into(), recipe: recipe("kjv", 400, "1e-3"), floor: 2.6, seed: 5, ..Plan::default() };
    let b = quiet(&place.join("b"), plan);
    let page = page(&[&a, &b, &troubled(&place.join("c"))]);
    let document = parsed(&page);
    let differing = rows(section(&document, "recipes"));
    assert_eq!(differing[1..], [["optimizer.rate", "0.0006", "0.001", "0.0006"].map(ToString::to_string)]);
    let facts = rows(section(&document, "facts"));
    assert_eq!(facts[0], ["", "A kjv", "B kjv-faster", "C kjv"]);
    assert_eq!(
        facts[3],
        ["ranks", "4; at most 2 on a host", "4; at most 2 on a host", "4, then 2, then 4; at most 2 on a host"]
    );
    let svg = section(&document, "loss-w-t").parent().unwrap();
    // A hue, a dash and a shape of their own, and a name at the end.
    for look in 0..3 {
        let lines =
            svg.descendants().filter(|n| n.attribute("class") == Some(&format!("line s{look} d{look}"))).count();
        let shapes =
            svg.descendants().filter(|n| n.attribute("class") == Some(&format!("shape f{look} s{look}"))).count();
        assert_eq!((lines, shapes), (1, 5), "look {look}");
    }
    assert!(text(svg).contains("B kjv-faste…"), "{}", text(svg));
}

#[test]
fn what_people_wrote_stays_text() {
    let bad = "<script>alert(1)</script>\"'&\u{0}<img src=http://bad/>";
    let plan = Plan { name: bad.to_string(), recipe: format!("# {bad}\n[{bad}"), steps: 20, ..Plan::default() };
    let mut run = MadeUp::new(&place("bad"), plan.clone());
    run.start(2, 1, &[bad], &[bad]);
    run.steps(1, 10);
    run.skip(11, bad);
    run.note(bad);
    run.fail(0.2, bad);
    run.end(1);
    let run = run.folder();
    let page = page(&[&run, &quiet(&place("good"), plan)]);
    let document = parsed(&page);
    assert!(!document.descendants().any(|node| node.has_tag_name("script") || node.has_tag_name("img")));
    assert!(!document.descendants().any(|node| node.attributes().any(|attribute| attribute.name().starts_with("on"))));
    assert!(text(document.root()).contains("<script>alert(1)</script>"), "the text itself is shown");
}

#[test]
fn the_page_needs_no_network() {
    let page = page(&[&troubled(&place("alone"))]);
    for word in ["http://", "https://", "//cdn", "@import", "url(\"", "src=", "href=", "<script", "<link", "<iframe"] {
        assert!(!page.contains(word), "{word}");
    }
    let own = page.matches("url(").count();
    assert_eq!(own, page.matches("url(#").count(), "every url is of the page itself");
    let document = parsed(&page);
    let is_policy = |node: &Node| node.attribute("http-equiv") == Some("Content-Security-Policy");
    let policy = document.descendants().find(is_policy).and_then(|node| node.attribute("content")).unwrap();
    assert!(policy.starts_with("default-src 'none'; style-src 'unsafe-inline'"), "{policy}");
}

#[test]
fn names_of_parts_are_unique_and_pictures_are_described() {
    let page = page(&[&troubled(&place("described"))]);
    let document = parsed(&page);
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
fn many_ranks_a_failure_for_good_and_nothing_at_all() {
    let mut run = MadeUp::new(&place("many"), Plan { parameters: 7.2e9, name: "large".into(), ..Plan::default() });
    run.start(64, 1, &[], &[]);
    run.steps(1, 40);
    run.fail(0.2, "out of memory on every rank");
    run.start(64, 1, &[], &[]);
    run.fail(0.2, "out of memory on every rank");
    run.end(1);
    let page_of = page(&[&run.folder()]);
    let document = parsed(&page_of);
    let lead = text(document.descendants().find(|node| node.attribute("class") == Some("lead")).unwrap());
    assert!(lead.starts_with("Failed for good, with exit code 1: 40 of 400 steps in "), "{lead}");
    let memory = section(&document, "memory");
    assert_eq!(memory.descendants().filter(|node| node.attribute("class") == Some("bar")).count(), 64);

    let empty = place("empty");
    std::fs::write(empty.join("metrics.jsonl"), "").unwrap();
    let page_of = page(&[&empty]);
    assert!(text(parsed(&page_of).root()).contains("Nothing has been written by this run yet."));
}

#[test]
fn what_is_no_run_is_named_with_the_remedy() {
    let place = place("none");
    let output = report(&[&place]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("no run has written here") && said.contains("run.folder"),
        "{said}"
    );

    std::fs::write(place.join("metrics.jsonl"), [0xff; 1000]).unwrap();
    std::fs::write(place.join("events.jsonl"), "what?\n").unwrap();
    let output = report(&[&place]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("events.jsonl: not one of its 1 lines"), "{said}");
    assert!(!place.join("report.html").exists());

    let run = quiet(&place.join("good"), Plan { steps: 10, ..Plan::default() });
    let mut metrics = std::fs::read(run.join("metrics.jsonl")).unwrap();
    let half = metrics.len() / 2;
    metrics[half..half + 5].fill(0);
    std::fs::write(run.join("metrics.jsonl"), metrics).unwrap();
    let output = report(&[&run]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("could not be read and is left out."), "{output:?}");
    let page = std::fs::read_to_string(run.join("report.html")).unwrap();
    assert!(text(parsed(&page).root()).contains("could not be read and is left out"));

    let output = report(&[&run, Path::new("--to"), &place.join("no/such/folder.html")]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("folder.html cannot be written; --to FILE"), "{said}");
}

#[test]
fn numbers_that_cannot_be_make_a_page_all_the_same() {
    let run = place("wild");
    let numbers = ["0", "-1e300", "1e300", "1e-300", "\"NaN\"", "\"inf\""];
    let mut lines = String::new();
    for (place, number) in numbers.iter().enumerate() {
        let plain = if number.starts_with('"') { "0" } else { number };
        for step in [0, 1, u64::MAX, place as u64] {
            lines += &format!(
                "{{\"time_s\":{plain},\"kind\":\"step\",\"step\":{step},\"loss\":{number},\"gradient_norm\":{number},\"rate\":{plain},\"tokens\":{step},\"tokens_per_s\":{plain},\"step_s\":{plain},\"utilisation\":{plain},\"memory_bytes\":{step},\"memory_peak_bytes\":{step},\"sent_bytes\":{step},\"loss_scale\":1,\"skipped_so_far\":0}}\n"
            );
        }
        lines += &format!(
            "{{\"time_s\":{plain},\"kind\":\"again\",\"attempt\":0,\"step\":0,\"lost_s\":{plain},\"noticed_s\":{plain},\"steps_again\":{}}}\n",
            u64::MAX
        );
    }
    std::fs::write(run.join("metrics.jsonl"), lines).unwrap();
    let page = page(&[&run]);
    let document = parsed(&page);
    assert!(!text(document.root()).contains("could not be read"), "every line is a line");
}

#[test]
fn a_million_steps_make_a_small_page() {
    let mut run = MadeUp::new(&place("million"), Plan { steps: 1_000_000, step_s: 0.5, ..Plan::default() });
    run.start(4, 1, &[], &[]);
    run.bare_steps(1, 600_000);
    run.fail(0.2, "rank 1 died");
    run.start(2, 590_001, &[], &[]);
    run.again(590_001, 10_000, 1.);
    run.bare_steps(590_001, 1_000_000);
    run.end(0);
    let run = run.folder();
    let began = Instant::now();
    let output = Command::new("bash")
        .args(["-c", "ulimit -v 1000000; exec \"$0\" report \"$1\"", env!("CARGO_BIN_EXE_shardwise")])
        .arg(&run)
        .output()
        .unwrap();
    println!("{:.1} s", began.elapsed().as_secs_f64());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = std::fs::read_to_string(run.join("report.html")).unwrap();
    assert!(page.len() < 1_000_000, "{}", page.len());
    assert!(text(parsed(&page).root()).contains("1,000,000 of 1,000,000"));
    std::fs::remove_file(run.join("metrics.jsonl")).unwrap();
}
