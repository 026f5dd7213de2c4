//! Compares texts with files. `UPDATE_SNAPSHOTS=1` updates the files; check the result with `git diff`.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::{Path, PathBuf};

/// The test cases of a folder: its files with this extension, sorted.
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

/// Compares a text with its file, and describes the difference. Paths in the text are relative to the folder of the file.
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

/// Fails if there are any differences.
pub(crate) fn assert_no_differences(differences: Vec<String>) {
    assert!(differences.is_empty(), "UPDATE_SNAPSHOTS=1 updates the files\n{}", differences.join("\n"));
}
