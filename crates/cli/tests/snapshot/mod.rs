//! Texts that are compared with files. `UPDATE_SNAPSHOTS=1` writes them anew: then read what `git diff` shows.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::{Path, PathBuf};

/// The files of a folder of this one with an extension, sorted.
pub(crate) fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder);
    let entries = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let is_case =
        |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(|c: char| c.is_ascii_digit());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|found| found == extension)).filter(is_case).collect();
    files.sort();
    files
}

/// What differs between a text and its file: nothing, or a report. Paths are those of the folder the file is in.
pub(crate) fn difference(path: &Path, text: &str) -> Option<String> {
    let folder = format!("{}/", path.parent().unwrap().display());
    let text = format!("{}\n", text.replace(&folder, "").trim_end());
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(path, text).unwrap();
        return None;
    }
    let expected = std::fs::read_to_string(path).unwrap_or_default();
    (expected != text).then(|| format!("{}:\n--- expected\n{expected}--- found\n{text}", path.display()))
}

/// Fails with all that differ.
pub(crate) fn settle(differences: Vec<String>) {
    assert!(differences.is_empty(), "UPDATE_SNAPSHOTS=1 writes them anew\n{}", differences.join("\n"));
}
