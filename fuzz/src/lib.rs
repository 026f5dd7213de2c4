//! The readers of untrusted input, each as a function of bytes that must not panic, take long, or take more memory than
//! [`checked`] allows.
//!
//! `cargo xtask fuzz NAME` looks for bytes that break one of them. What it found worth keeping is in `fuzz/corpus`, and
//! `fuzz/tests/corpus.rs` tries all of it again with every change.

#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::OnceLock;
use std::time::SystemTime;

use peak_alloc::PeakAlloc;
use shardwise_checkpoint::{Hash, Manifest, Place, Table, elements, safetensors};
use shardwise_data::{ChatTemplate, Corpus, Message, Tokenizer};
use shardwise_train::Recipe;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// A reader.
pub struct Target {
    /// What it is called, here and in `fuzz/corpus`.
    pub name: &'static str,
    /// Reads these bytes.
    pub read: fn(&[u8]),
    /// What it may take of memory whatever it reads: for what a chat template writes, or for the units that a recipe asks for.
    pub spare_bytes: usize,
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { name: "manifest", read: manifest, spare_bytes: 64 << 10 },
    Target { name: "safetensors", read: safetensors_header, spare_bytes: 64 << 10 },
    Target { name: "index", read: index, spare_bytes: 64 << 10 },
    Target { name: "chat", read: chat, spare_bytes: 192 << 20 },
    Target { name: "recipe", read: recipe, spare_bytes: 64 << 20 },
];

/// The memory that a reader may have at once for each byte that it reads. JSON of nothing but `0,` is the worst, two bytes of
/// which are a value of 32, in a list that doubles.
const MEMORY_PER_BYTE: usize = 96;

/// Reads as the target of that name does, and panics if that took too much memory.
pub fn checked(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("targets have their own names");
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    (target.read)(bytes);
    let taken = MEMORY.peak_usage().saturating_sub(before);
    let limit = MEMORY_PER_BYTE * bytes.len() + target.spare_bytes;
    assert!(taken <= limit, "{taken} bytes were taken for an input of {}, and {limit} is the most", bytes.len());
}

/// A manifest, with its seal and without, and a unit's table, with what is asked of the places in it.
pub fn manifest(bytes: &[u8]) {
    drop(Manifest::parse(bytes));
    if let Ok(text) = std::str::from_utf8(bytes) {
        let sealed = format!(r#"{{"blake3":"{}","manifest":{text}}}"#, Hash::of(bytes));
        if let Ok(manifest) = Manifest::parse(sealed.as_bytes()) {
            let again = Manifest::parse(&manifest.sealed()).expect("what was read can be written and read again");
            assert_eq!(again, manifest, "it is read as it was written");
        }
    }
    let Ok(table) = Table::parse(bytes) else { return };
    for tensor in &table.tensors {
        let whole = elements(&tensor.shape).expect("a table with a shape that is too large is refused");
        let wanted = Place::flat(whole / 3..whole.min(whole / 3 + 100));
        for slice in &tensor.slices {
            let shared: u64 = slice.place.shared(&wanted, &tensor.shape).iter().map(|run| run.len).sum();
            assert!(shared <= wanted.len().min(slice.place.len()), "two slices share no more than either has");
        }
    }
}

/// The header of a safetensors file, of which these are the first bytes.
pub fn safetensors_header(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first_chunk() else { return };
    for file_bytes in [bytes.len() as u64, 1 << 40, u64::MAX] {
        let Ok(len) = safetensors::header_len(*first, file_bytes) else { continue };
        // A header is as long as it says; what is not there of it was cut off.
        let header = &rest[..rest.len().min(len as usize)];
        let Ok(found) = safetensors::parse(header, file_bytes) else { continue };
        for (name, found) in &found {
            assert!(found.bytes.start <= found.bytes.end && found.bytes.end <= file_bytes, "{name} is in the file");
        }
    }
}

/// A folder in memory, for readers of files.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| tempfile::tempdir_in("/dev/shm").expect("memory has room for a folder")).path()
}

/// The index of a corpus, whose tokens are its own bytes.
pub fn index(bytes: &[u8]) {
    let prefix = folder().join("corpus");
    for ending in ["bin", "idx"] {
        std::fs::write(prefix.with_extension(ending), bytes).expect("memory has room for it");
    }
    let Ok(corpus) = Corpus::open(&prefix) else { return };
    let last = corpus.documents().saturating_sub(1);
    for number in [0, last / 2, last] {
        let Ok(range) = corpus.document(number) else { continue };
        assert!(range.start <= range.end && range.end <= corpus.tokens(), "a document is in the corpus");
        let mut tokens = vec![0; (range.end - range.start).min(1000) as usize];
        drop(corpus.read(range.start, &mut tokens));
    }
    drop(corpus.check());
}

/// A chat template and what it makes of a conversation; up to a zero byte the one, and then messages in JSON.
pub fn chat(bytes: &[u8]) {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    let tokenizer = TOKENIZER.get_or_init(|| {
        let words = ["a few words for a small vocabulary".to_string()].into_iter().map(Ok);
        let learned = Tokenizer::train_bpe(words, 300, &mut |_| std::ops::ControlFlow::Continue(()));
        let path = folder().join("tokenizer.json");
        learned.and_then(|learned| learned.save(&path)).expect("a tokenizer of 300 tokens can be learned");
        Tokenizer::open(&path).expect("it was just written")
    });
    let (template, messages) = bytes.split_at(bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len()));
    std::fs::write(folder().join("chat_template.jinja"), template).expect("memory has room for it");
    let Ok(template) = ChatTemplate::open(tokenizer, SystemTime::UNIX_EPOCH) else { return };
    let given: Option<Vec<Message>> = serde_json::from_slice(messages.get(1..).unwrap_or_default()).ok();
    let usual = r#"[{"role":"user","content":"Why?"},{"role":"assistant","content":"Because."}]"#;
    let messages = given.unwrap_or_else(|| serde_json::from_str(usual).expect("these are messages"));
    if let Ok(conversation) = template.conversation(tokenizer, &messages) {
        assert_eq!(conversation.tokens.len(), conversation.answers.len(), "every token is an answer's or not");
    }
}

/// A recipe; after a zero byte DeepSpeed's configuration, and after another one settings.
pub fn recipe(bytes: &[u8]) {
    let mut parts = bytes.splitn(3, |&byte| byte == 0);
    let mut file = |name: &str| {
        let path = folder().join(name);
        parts.next().map(|part| std::fs::write(&path, part).map(|()| path).expect("memory has room for it"))
    };
    let recipe = file("recipe.toml").expect("there is always a first part");
    let deepspeed = file("deepspeed.json");
    let sets = parts.next().map(|sets| String::from_utf8_lossy(sets).lines().map(String::from).collect::<Vec<_>>());
    if let Ok(recipe) = Recipe::layered(&recipe, deepspeed.as_deref(), &sets.unwrap_or_default()) {
        drop(recipe.resolved(Some(4)));
    }
}
