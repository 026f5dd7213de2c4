//! The readers of untrusted input, each as a function of bytes that must not panic, take long, or take more memory than
//! [`memory_limit`] says.
//!
//! `cargo xtask fuzz NAME` looks for bytes that break one of them. What it found worth keeping is in `fuzz/corpus`, and
//! `fuzz/tests/corpus.rs` tries all of it again with every change.

#![forbid(unsafe_code)]

use peak_alloc::PeakAlloc;
use shardwise_checkpoint::{Hash, Manifest, Place, Table, elements, safetensors};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// A reader.
pub struct Target {
    /// What it is called, here and in `fuzz/corpus`.
    pub name: &'static str,
    /// Reads these bytes.
    pub read: fn(&[u8]),
}

/// All of them.
pub const TARGETS: &[Target] =
    &[Target { name: "manifest", read: manifest }, Target { name: "safetensors", read: safetensors_header }];

/// The most memory that a reader may have at once, beside what it reads: JSON of nothing but `0,` is the worst, two bytes of
/// which are a value of 32, in a list that doubles.
pub fn memory_limit(input_bytes: usize) -> usize {
    96 * input_bytes + (64 << 10)
}

/// Reads as the target says, and panics if that took too much memory.
pub fn checked(read: fn(&[u8]), bytes: &[u8]) {
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    read(bytes);
    let taken = MEMORY.peak_usage().saturating_sub(before);
    let limit = memory_limit(bytes.len());
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
