//! Fine-tuning a `transformers` model on conversations, with its own chat template and with targets only in the answers.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use shardwise_data::{ChatTemplate, IGNORED, PackedConversations, Tokenizer};
use shardwise_harness::run_with_transformers;

fn python(verb: &str, folder: &Path) -> String {
    run_with_transformers("hugging_face.py", &[Path::new(verb), folder]).unwrap()
}

fn shardwise(folder: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardwise"));
    let output = command.args(arguments).current_dir(folder).env("OMP_NUM_THREADS", "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

const RECIPE: &str = r#"
[model]
from_pretrained = "model"
[data]
chat = "chat.jsonl"
tokenizer = "model"
[batch]
micro_batch_size = 4
seq_len = 96
[optimizer]
lr = 1e-2
max_grad_norm = 1.0
[schedule]
kind = "cosine"
warmup_steps = 10
[run]
steps = 120
[checkpoints]
folder = "saved"
"#;

#[test]
fn a_model_learns_to_answer_and_goes_back_to_transformers() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    python("chat", folder);

    // The targets in the first conversation are those of transformers' own rendering.
    let tokenizer = Tokenizer::open(folder.join("model")).unwrap();
    let template = ChatTemplate::open(&tokenizer, SystemTime::UNIX_EPOCH).unwrap();
    let conversations = template.conversations(&tokenizer, folder.join("chat.jsonl")).unwrap();
    let packed = PackedConversations::new(conversations, 96, 0).unwrap();
    let window = packed.window(0).unwrap();
    let of_first = window.targets.iter().zip(&window.documents).filter(|(_, document)| **document == 0);
    let counted: Vec<i64> = of_first.map(|(target, _)| *target).filter(|target| *target != IGNORED).collect();
    let expected: Vec<i64> =
        serde_json::from_str(&std::fs::read_to_string(folder.join("counted.json")).unwrap()).unwrap();
    assert_eq!(counted, expected, "{:?}", tokenizer.decode(&window.tokens));

    std::fs::write(folder.join("recipe.toml"), RECIPE).unwrap();
    let text = shardwise(folder, &["train", "recipe.toml", "-n", "2"]);
    assert!(text.contains("64 conversations in "), "{text}");
    let losses: Vec<f64> =
        text.lines().filter_map(|line| line.split("loss ").nth(1)?.split_whitespace().next()?.parse().ok()).collect();
    assert!(losses.len() == 120 && losses[119] < 0.2 * losses[0], "{losses:?}");

    shardwise(folder, &["checkpoint", "export", "saved", "exported", "--like", "model"]);
    let answer = python("check-chat", folder);
    assert!(answer.contains("It is") && answer.contains("no more."), "{answer}");
    // Our generation gives the same answer to the same rendered prompt.
    let prompt = "<|im_start|>user\nWhat is 7 plus 7?<|im_end|>\n<|im_start|>assistant\n";
    let ours =
        shardwise(folder, &["generate", "recipe.toml", "--temperature", "0", "--tokens", "12", "--prompt", prompt]);
    let ours = ours.strip_prefix(prompt).unwrap().trim();
    assert!(!ours.is_empty() && answer.trim().starts_with(ours), "ours: {ours:?}, theirs: {answer:?}");
}
