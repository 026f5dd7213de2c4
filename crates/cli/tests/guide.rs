//! Checks the guide: its commands run, its links are valid, its messages are those of the program, and its table of DeepSpeed keys matches
//! the code.
//!
//! Blocks that start with ```` ```sh ```` are run one after the other, in one folder per chapter, with the numbers of `SHORTER` replaced.
//! Blocks that cannot be run here start with ```` ```sh,norun ````, and the line before them says why.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use shardwise_recipe::deepspeed_keys;

/// Replacements that make commands faster.
const SHORTER: [(&str, &str); 7] = [
    // The run before it is shortened too.
    ("run.steps=404 --trace 401..403", "run.steps=8 --trace 5..7"),
    // Two held-out documents rather than five: a short run evaluates as often as a long one.
    ("--held-out 20", "--held-out 50"),
    ("--steps 400", "--steps 12"),
    ("--steps 100", "--steps 12"),
    ("--tokens 120", "--tokens 12"),
    ("--tokens 40", "--tokens 12"),
    ("run.steps=4", "run.steps=2"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_path_buf()
}

fn chapter(name: &str) -> String {
    std::fs::read_to_string(root().join("docs/src").join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A fenced block: the text after the fence, its contents, and the line before it.
struct Block {
    kind: String,
    text: String,
    before: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let (mut open, mut before) = (false, String::new());
    for line in page.lines() {
        match (open, line.strip_prefix("```")) {
            (false, Some(kind)) => {
                blocks.push(Block { kind: kind.into(), text: String::new(), before: before.clone() })
            }
            (false, None) => before = line.to_string(),
            (true, Some(_)) => {}
            (true, None) => writeln!(blocks.last_mut().unwrap().text, "{line}").unwrap(),
        }
        open ^= line.starts_with("```");
    }
    assert!(!open, "a block without an end");
    blocks
}

/// Runs the commands of a chapter. Returns their output and the number of blocks that were not run.
fn follow(name: &str, folder: &Path) -> (String, usize) {
    let programs = Path::new(env!("CARGO_BIN_EXE_shardwise")).parent().unwrap();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let (mut said, mut left_out) = (String::new(), 0);
    for block in blocks(&chapter(name)) {
        match block.kind.as_str() {
            "sh" => {}
            "sh,norun" => {
                assert!(block.before.starts_with("<!-- not run: "), "{name}: no reason before\n{}", block.text);
                left_out += 1;
                continue;
            }
            _ => continue,
        }
        let text = SHORTER.iter().fold(block.text, |text, (long, short)| text.replace(long, short));
        let mut shell = Command::new("bash");
        shell.args(["-euc", &text]).current_dir(folder).env("PATH", &path).env("OMP_NUM_THREADS", "1");
        let output = shell.output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}:\n{text}\n{printed}{errors}");
        said.push_str(&printed);
    }
    (said, left_out)
}

fn needs_the_bible() {
    let found = Command::new("bash").args(["-c", "command -v bible"]).output().unwrap();
    assert!(found.status.success(), "this test needs the Bible: apt-get install -y bible-kjv");
}

#[test]
fn the_quick_start_can_be_followed() {
    needs_the_bible();
    let folder = tempfile::tempdir().unwrap();
    let (said, left_out) = follow("quick-start.md", folder.path());
    assert_eq!(left_out, 2);
    for part in ["libtorch", "data/kjv-held-out: ", "total ", "step 12/12", "bits per byte", "And God said"] {
        assert!(said.contains(part), "no '{part}' in {said}");
    }
}

#[test]
fn choosing_a_stage_can_be_followed() {
    let folder = tempfile::tempdir().unwrap();
    let page = chapter("choosing-a-stage.md");
    let (said, left_out) = follow("choosing-a-stage.md", folder.path());
    assert_eq!(left_out, 0);
    // The tables match the output: stages 0 to 3, then the kinds of activation checkpointing, then replicas.
    let column = |what: &str| -> Vec<String> {
        let lines = said.lines().filter_map(|line| line.trim().strip_prefix(what));
        lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    };
    for what in [
        "parameters",
        "gradients",
        "optimizer",
        "unsharded units",
        "free buffers",
        "activations",
        "temporaries",
        "saving",
    ] {
        let row = format!("| {what} | {} |", column(what)[..4].join(" | "));
        assert!(page.contains(&row), "the page has other figures than\n{row}");
    }
    let total = format!("| **total** | **{}** |", column("total")[..4].join("** | **"));
    assert!(page.contains(&total), "{total}");
    for (kind, bytes) in ["none", "selective", "full"].iter().zip(&column("activations")[4..]) {
        assert!(page.contains(&format!("| `\"{kind}\"` | {bytes} |")), "{kind}: {bytes}");
    }
}

#[test]
fn a_hugging_face_model_can_be_fine_tuned_and_exported() {
    needs_the_bible();
    let folder = tempfile::tempdir().unwrap();
    let setup = Command::new(root().join("reference/setup"))
        .arg(shardwise_harness::python().unwrap())
        .arg("transformers")
        .output()
        .unwrap();
    assert!(setup.status.success(), "{}", String::from_utf8_lossy(&setup.stderr));
    let python = folder.path().join("hugging-face/bin/python");
    std::fs::create_dir_all(python.parent().unwrap()).unwrap();
    let command = format!("#!/bin/sh\nexec {} \"$@\"\n", String::from_utf8_lossy(&setup.stdout).trim());
    std::fs::write(&python, command).unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (said, left_out) = follow("fine-tuning.md", folder.path());
    assert_eq!(left_out, 1);
    for part in ["evaluation after step 12: loss ", "step 12: intact", " to exported: ", "torch.bfloat16 Praise ye"] {
        assert!(said.contains(part), "no '{part}' in {said}");
    }
}

#[test]
fn a_deepspeed_configuration_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let (said, left_out) = follow("from-deepspeed.md", folder.path());
    assert_eq!(left_out, 0);
    assert!(
        said.contains("# ds_config.json: zero_optimization.stage") && said.contains("stage 2 on 2 ranks"),
        "{said}"
    );
}

#[test]
fn checkpoints_can_be_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (said, left_out) = follow("checkpoints.md", folder.path());
    assert_eq!(left_out, 0);
    assert!(said.contains("intact, ") && said.contains(" to exported-small: "), "{said}");
}

#[test]
fn a_run_is_watched_profiled_and_reported() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = "[model.llama]\nvocab_size = 61\nhidden_size = 32\nnum_hidden_layers = 2\n\
                  num_attention_heads = 4\nintermediate_size = 80\n[data]\nseed = 7\n[batch]\n\
                  micro_batch_size = 2\nseq_len = 16\n[optimizer]\nlr = 1e-2\n[run]\nsteps = 8\nfolder = \"runs/kjv\"\n";
    std::fs::write(folder.path().join("kjv.toml"), recipe).unwrap();
    let (said, _) = follow("profiling.md", folder.path());
    assert!(said.contains("traced steps 5 to 7") && folder.path().join("step.svg").exists(), "{said}");
    let (said, left_out) = follow("watching.md", folder.path());
    assert_eq!(left_out, 3);
    assert!(said.contains("finished"), "{said}");
    let (said, _) = follow("report.md", folder.path());
    assert!(said.contains("report.html") && said.contains("compared.html"), "{said}");
}

#[test]
fn two_ranks_hold_different_experts() {
    let folder = tempfile::tempdir().unwrap();
    let (said, left_out) = follow("mixture-of-experts.md", folder.path());
    assert_eq!(left_out, 0);
    assert!(said.contains("stage 3 on 2 ranks (1 × 1 × expert 2)"), "{said}");
}

#[test]
fn two_ranks_share_each_layer() {
    let folder = tempfile::tempdir().unwrap();
    let (said, _) = follow("tensor-parallelism.md", folder.path());
    assert!(said.contains("stage 3 on 2 ranks (1 × 1 × tensor 2)"), "{said}");
}

#[test]
fn two_ranks_divide_each_sequence() {
    let folder = tempfile::tempdir().unwrap();
    let (said, _) = follow("context-parallelism.md", folder.path());
    assert!(said.contains("stage 3 on 2 ranks (1 × 1 × "), "{said}");
}

#[test]
fn two_stages_form_a_pipeline() {
    let folder = tempfile::tempdir().unwrap();
    let (said, _) = follow("pipeline-parallelism.md", folder.path());
    assert!(said.contains("stage 3 on 2 ranks (pipeline 2 × 1 × 1)"), "{said}");
    assert!(said.contains("2 stages on 4 workers") && said.contains("pipeline_split_points = [\"block."), "{said}");
}

#[test]
fn a_compiled_model_is_trained_resumed_and_exported() {
    let packages = shardwise_harness::packages().unwrap();
    let is_f32 = |folder: &PathBuf| {
        let manifest = std::fs::read_to_string(folder.join("package.json")).unwrap_or_default();
        let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap_or_default();
        manifest["dtype"] == "f32" && manifest["inputs"]["dtype"] == "i64"
    };
    let mut found = std::fs::read_dir(&packages).unwrap().map(|entry| entry.unwrap().path());
    let package = found.find(is_f32).expect("a language model in f32");
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("packages")).unwrap();
    std::os::unix::fs::symlink(package, folder.path().join("packages/qwen3")).unwrap();
    let recipe = blocks(&chapter("compiled-models.md")).into_iter().find(|block| block.kind == "toml").unwrap();
    std::fs::write(folder.path().join("qwen3.toml"), recipe.text).unwrap();
    let (said, left_out) = follow("compiled-models.md", folder.path());
    assert_eq!(left_out, 2);
    assert!(said.contains("resuming after step 20") && said.contains(" to exported: "), "{said}");
}

#[test]
fn every_command_is_run_or_says_why_not() {
    let followed = [
        "quick-start",
        "choosing-a-stage",
        "tensor-parallelism",
        "pipeline-parallelism",
        "context-parallelism",
        "mixture-of-experts",
        "fine-tuning",
        "from-deepspeed",
        "checkpoints",
        "watching",
        "profiling",
        "report",
        "compiled-models",
    ];
    for page in pages() {
        let name = page.file_stem().unwrap().to_str().unwrap();
        let commands =
            blocks(&std::fs::read_to_string(&page).unwrap()).into_iter().filter(|b| b.kind.starts_with("sh"));
        for block in commands {
            let excused = block.kind == "sh,norun" && block.before.starts_with("<!-- not run: ");
            assert!(excused || block.kind == "sh" && followed.contains(&name), "{name}: not run:\n{}", block.text);
        }
    }
}

// ---- contents of the pages --------------------------------------------------------------------------------------------

#[test]
fn every_key_of_deepspeeds_is_in_the_table() {
    let path = root().join("docs/src/from-deepspeed.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once("<!-- keys -->\n").unwrap();
    let (found, after) = rest.split_once("<!-- end of keys -->").unwrap();
    let mut table = String::new();
    for (heading, keys) in deepspeed_keys() {
        writeln!(table, "### {heading}\n").unwrap();
        if keys.iter().all(|(_, words)| words.is_empty()) {
            let keys: Vec<String> = keys.iter().map(|(key, _)| format!("`{key}`")).collect();
            writeln!(table, "{}\n", keys.join(",\n")).unwrap();
            continue;
        }
        table += "| key | |\n| --- | --- |\n";
        keys.iter().for_each(|(key, words)| writeln!(table, "| `{key}` | {words} |").unwrap());
        table.push('\n');
    }
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        return std::fs::write(&path, format!("{before}<!-- keys -->\n{table}<!-- end of keys -->{after}")).unwrap();
    }
    assert!(found == table, "UPDATE_SNAPSHOTS=1 rewrites the table, which should be\n{table}");
}

#[test]
fn messages_are_those_of_the_program() {
    let mut sources = String::new();
    let mut folders = vec![root().join("crates")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let is_source = entry.extension().is_some_and(|extension| extension == "rs");
            match entry.is_dir() {
                true if entry.ends_with("tests") => {}
                true => folders.push(entry),
                false if is_source => sources += &std::fs::read_to_string(&entry).unwrap(),
                false => {}
            }
        }
    }
    // A backslash at the end of a line continues a string.
    let words = |text: &str| text.replace("\\\n", "\n").split_whitespace().collect::<Vec<_>>().join(" ");
    let sources = words(&sources);
    let mut symptoms = 0;
    for block in blocks(&chapter("troubleshooting.md")) {
        symptoms += 1;
        if block.before == "<!-- the system's own words -->" {
            continue;
        }
        let said = block.before.strip_prefix("<!-- the program says: ").and_then(|rest| rest.strip_suffix(" -->"));
        let said = words(said.unwrap_or_else(|| panic!("no comment says who prints this:\n{}", block.text)));
        assert!(words(&block.text).contains(&said), "'{said}' is not in\n{}", block.text);
        assert!(sources.contains(&said), "the program does not say '{said}'");
    }
    assert!(symptoms >= 15, "{symptoms} symptoms");
}

/// The pages of the guide.
fn pages() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join("docs/src")).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|found| found == "md")).collect();
    pages.sort();
    assert!(pages.len() >= 10, "{pages:?}");
    pages
}

/// The anchor of a heading in links.
fn anchor(heading: &str) -> String {
    let letters = heading.trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    letters.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

/// The targets of links, images and includes outside of code blocks.
fn targets(page: &str) -> Vec<String> {
    let prose = page.split("\n```").step_by(2).collect::<Vec<_>>().join("\n");
    let links = prose.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
    let included = prose.split("{{#include ").skip(1).filter_map(|rest| rest.split("}}").next());
    links.chain(included).map(str::to_string).collect()
}

#[test]
fn every_link_leads_somewhere() {
    let root = root();
    let others = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(|name| root.join(name));
    let mut links = 0;
    for path in pages().into_iter().chain(others) {
        let page = std::fs::read_to_string(&path).unwrap();
        for target in targets(&page).iter().filter(|target| !target.contains("://")) {
            links += 1;
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let to = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(to.exists(), "{}: there is no {target}", path.display());
            if !heading.is_empty() {
                let there = std::fs::read_to_string(&to).unwrap();
                let mut headings = there.lines().filter(|line| line.starts_with('#'));
                let is_it = |line: &str| anchor(line.trim_start_matches('#')) == heading;
                assert!(headings.any(is_it), "{}: {target}: there is no such heading", path.display());
            }
        }
        // Links of the book must not leave it.
        let outside =
            targets(&page).into_iter().find(|target| target.starts_with("..") && path.starts_with(root.join("docs")));
        assert_eq!(outside, None, "{}", path.display());
    }
    assert!(links > 40, "{links} links");
    let summary = chapter("SUMMARY.md");
    for page in pages() {
        let name = page.file_name().unwrap().to_str().unwrap();
        assert!(name == "SUMMARY.md" || summary.contains(&format!("({name})")), "{name} is not in SUMMARY.md");
    }
}
