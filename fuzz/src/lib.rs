//! The readers of untrusted input. Each is a function of bytes that must not panic, take long, or use more memory than [`check`] allows.
//!
//! `cargo xtask fuzz NAME` looks for inputs that break one of them. Interesting inputs are kept in `fuzz/corpus`, and `fuzz/tests/corpus.rs`
//! runs them all again.

#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::OnceLock;
use std::time::SystemTime;

use peak_alloc::PeakAlloc;
use shardwise_checkpoint::{Hash, Manifest, Region, Table, elements, safetensors};
use shardwise_data::{ChatTemplate, Corpus, Message, Tokenizer};
use shardwise_recipe::Recipe;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// A reader to fuzz.
pub struct Target {
    /// The name of the target and of its folder in `fuzz/corpus`.
    pub name: &'static str,
    /// Reads an input.
    pub read: fn(&[u8]),
    /// The memory that the reader may use whatever the size of the input, for example for the output of a chat template or the units of a
    /// recipe.
    pub spare_bytes: usize,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "manifest", read: manifest, spare_bytes: 64 << 10 },
    Target { name: "safetensors", read: safetensors_header, spare_bytes: 64 << 10 },
    Target { name: "index", read: index, spare_bytes: 64 << 10 },
    Target { name: "chat", read: chat, spare_bytes: 192 << 20 },
    Target { name: "recipe", read: recipe, spare_bytes: 64 << 20 },
];

/// The memory that a reader may use at once per input byte. The worst input is JSON of nothing but `0,`, where two bytes become a value of
/// 32 bytes in a list that doubles.
const MEMORY_PER_BYTE: usize = 96;

/// Runs a target on an input, and panics if that takes too much memory.
pub fn check(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("there is a target of that name");
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    (target.read)(bytes);
    let used = MEMORY.peak_usage().saturating_sub(before);
    let limit = MEMORY_PER_BYTE * bytes.len() + target.spare_bytes;
    assert!(used <= limit, "an input of {} bytes took {used} bytes of memory; the limit is {limit}", bytes.len());
}

/// Parses a manifest with and without its seal, and a unit's table, and computes overlaps of shards in the table.
pub fn manifest(bytes: &[u8]) {
    drop(Manifest::parse(bytes));
    if let Ok(text) = std::str::from_utf8(bytes) {
        let sealed = format!(r#"{{"blake3":"{}","manifest":{text}}}"#, Hash::of(bytes));
        if let Ok(manifest) = Manifest::parse(sealed.as_bytes()) {
            let again = Manifest::parse(&manifest.to_json()).expect("what was read can be written and read again");
            assert_eq!(again, manifest, "it is read as it was written");
        }
    }
    let Ok(table) = Table::parse(bytes) else { return };
    for tensor in &table.tensors {
        let whole = elements(&tensor.shape).expect("a table with a shape that is too large is refused");
        let wanted = Region::flat(whole / 3..whole.min(whole / 3 + 100));
        for shard in &tensor.shards {
            let overlap: u64 = shard.region.overlaps(&wanted, &tensor.shape).iter().map(|run| run.len).sum();
            assert!(overlap <= wanted.len().min(shard.region.len()), "two shards overlap in no more than either has");
        }
    }
}

/// Parses the header of a safetensors file that starts with these bytes.
pub fn safetensors_header(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first_chunk() else { return };
    for file_bytes in [bytes.len() as u64, 1 << 40, u64::MAX] {
        let Ok(len) = safetensors::header_len(*first, file_bytes) else { continue };
        // The header may be truncated.
        let header = &rest[..rest.len().min(len as usize)];
        let Ok(found) = safetensors::parse(header, file_bytes) else { continue };
        for (name, found) in &found {
            assert!(found.bytes.start <= found.bytes.end && found.bytes.end <= file_bytes, "{name} is in the file");
        }
    }
}

/// A folder in memory for readers of files.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| tempfile::tempdir_in("/dev/shm").expect("memory has room for a folder")).path()
}

/// Opens a corpus whose index and tokens are both these bytes.
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

/// Renders and tokenizes a conversation. The input is a chat template, optionally followed by a zero byte and messages in JSON.
pub fn chat(bytes: &[u8]) {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    let tokenizer = TOKENIZER.get_or_init(|| {
        let words = ["a few words for a small vocabulary".to_string()].into_iter().map(Ok);
        let trained = Tokenizer::train_bpe(words, 300, &mut |_| std::ops::ControlFlow::Continue(()));
        let path = folder().join("tokenizer.json");
        trained.and_then(|trained| trained.save(&path)).expect("a tokenizer of 300 tokens can be trained");
        Tokenizer::open(&path).expect("it was just written")
    });
    let (template, messages) = bytes.split_at(bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len()));
    std::fs::write(folder().join("chat_template.jinja"), template).expect("memory has room for it");
    let Ok(template) = ChatTemplate::open(tokenizer, SystemTime::UNIX_EPOCH) else { return };
    let given: Option<Vec<Message>> = serde_json::from_slice(messages.get(1..).unwrap_or_default()).ok();
    let usual = r#"[{"role":"user","content":"Why?"},{"role":"assistant","content":"Because."}]"#;
    let messages = given.unwrap_or_else(|| serde_json::from_str(usual).expect("these are messages"));
    if let Ok(conversation) = template.conversation(tokenizer, &messages) {
        assert_eq!(conversation.tokens.len(), conversation.answers.len(), "every token has an answer flag");
    }
}

/// Reads a recipe, optionally followed by a zero byte and a DeepSpeed configuration, and by another one and `--set` values.
pub fn recipe(bytes: &[u8]) {
    let mut parts = bytes.splitn(3, |&byte| byte == 0);
    let mut file = |name: &str| {
        let path = folder().join(name);
        parts.next().map(|part| std::fs::write(&path, part).map(|()| path).expect("memory has room for it"))
    };
    let recipe = file("recipe.toml").expect("there is always a first part");
    let deepspeed = file("deepspeed.json");
    let sets = parts.next().map(|sets| String::from_utf8_lossy(sets).lines().map(String::from).collect::<Vec<_>>());
    if let Ok(recipe) = Recipe::read_layered(&recipe, deepspeed.as_deref(), &sets.unwrap_or_default()) {
        drop(recipe.resolved_toml(Some(4)));
    }
}
