//! Any corruption of a checkpoint's files is detected, and the previous checkpoint is used.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shardwise_checkpoint::{RetentionPolicy, SaveId, Store, write_manifest};
use support::{load, newest, save, save_but_manifest, units};

/// A deterministic random number generator.
struct Rng(u64);

impl Rng {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Corrupts a file, and returns a description.
fn corrupt(rng: &mut Rng, newest: &Path, older: &Path) -> String {
    let all = files(newest);
    let file = &all[rng.below(all.len())];
    let name = file.file_name().unwrap().to_string_lossy().into_owned();
    let mut bytes = fs::read(file).unwrap();
    match rng.below(6) {
        0 => {
            let len = rng.below(bytes.len());
            bytes.truncate(len);
            fs::write(file, bytes).unwrap();
            format!("{name} truncated to {len} bytes")
        }
        1 => {
            let (at, bit) = (rng.below(bytes.len()), rng.below(8));
            bytes[at] ^= 1 << bit;
            fs::write(file, bytes).unwrap();
            format!("bit {bit} of byte {at} of {name} flipped")
        }
        2 => {
            let from = rng.below(bytes.len());
            let to = bytes.len().min(from + 1 + rng.below(4096));
            if bytes[from..to].iter().all(|&byte| byte == 0) {
                bytes[from] = 1;
            } else {
                bytes[from..to].fill(0);
            }
            fs::write(file, bytes).unwrap();
            format!("bytes {from} to {to} of {name} zeroed")
        }
        3 => {
            let others: Vec<&PathBuf> = all.iter().filter(|other| *other != file).collect();
            let other = others[rng.below(others.len())];
            let theirs = fs::read(other).unwrap();
            fs::write(other, bytes).unwrap();
            fs::write(file, theirs).unwrap();
            format!("{name} and {} swapped", other.display())
        }
        4 => {
            fs::remove_file(file).unwrap();
            format!("{name} deleted")
        }
        _ => {
            fs::copy(older.join("manifest.json"), newest.join("manifest.json")).unwrap();
            "an older manifest in the newest's place".to_string()
        }
    }
}

#[test]
fn a_thousand_corruptions_are_detected() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open(folder.path().to_str().unwrap()).unwrap());
    let layouts = units(&[&[&[97, 31], &[31]], &[&[64, 33], &[33], &[7, 5, 3]], &[&[400_003]]], 3, 20_000);
    for step in [10, 20, 30] {
        save(&store, step, &layouts, SaveId::from(step as u32));
    }
    assert_eq!(newest(&store, &layouts).0, Some(30));
    let (at_30, at_20) = (folder.path().join("step-00000030"), folder.path().join("step-00000020"));
    let whole: Vec<(PathBuf, Vec<u8>)> =
        files(&at_30).into_iter().map(|file| (file.clone(), fs::read(file).unwrap())).collect();
    let mut rng = Rng(7);
    for round in 0..1000 {
        let what = corrupt(&mut rng, &at_30, &at_20);
        let (found, reasons) = newest(&store, &layouts);
        assert_eq!(found, Some(20), "round {round}: {what}");
        assert!(reasons.iter().all(|reason| reason.is_damage()), "round {round}: {what}: {reasons:?}");
        for (file, bytes) in &whole {
            if fs::read(file).ok().as_ref() != Some(bytes) {
                fs::write(file, bytes).unwrap();
            }
        }
    }
    load(&store, 30, &layouts).unwrap();
}

#[test]
fn damaged_checkpoints_do_not_displace_intact_ones() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open(folder.path().to_str().unwrap()).unwrap());
    let layouts = units(&[&[&[97, 31]], &[&[64, 33]]], 2, 1 << 10);
    for step in [10, 20, 30, 40, 50] {
        save(&store, step, &layouts, SaveId::from(step as u32));
    }
    let file = |step: u64, ending: &str| {
        let all = files(&folder.path().join(format!("step-{step:08}")));
        all.into_iter().find(|file| file.to_string_lossy().ends_with(ending)).unwrap()
    };
    fs::remove_file(file(20, ".safetensors")).unwrap();
    fs::File::options().write(true).open(file(30, ".safetensors")).unwrap().set_len(100).unwrap();
    fs::write(file(40, "manifest.json"), "{}").unwrap();
    let keep = RetentionPolicy { last: Some(2), every: None };
    let kept = keep.steps_to_keep(&store).unwrap();
    assert_eq!(kept.len(), 5, "{kept:?}");
    assert_eq!(store.prune(50, SaveId::from(50), |step| kept.contains(&step)).unwrap(), [] as [u64; 0]);
    // Damaged ones that are older than the kept ones are removed.
    save(&store, 60, &layouts, SaveId::from(60));
    let kept = keep.steps_to_keep(&store).unwrap();
    assert_eq!(store.prune(60, SaveId::from(60), |step| kept.contains(&step)).unwrap(), [10, 20, 30, 40]);
    load(&store, 50, &layouts).unwrap();
}

#[test]
fn a_step_that_is_saved_again_is_intact_at_every_moment() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open(folder.path().to_str().unwrap()).unwrap());
    let layouts = units(&[&[&[97, 31]]], 2, 1 << 20);
    save(&store, 10, &layouts, SaveId::from(1));
    // The files of both saves coexist until the second manifest replaces the first.
    let again = units(&[&[&[97, 31]]], 5, 1 << 20);
    let manifest = save_but_manifest(&store, 10, &again, SaveId::from(2));
    load(&store, 10, &layouts).unwrap();
    write_manifest(&store, &manifest, &mut || ()).unwrap();
    load(&store, 10, &again).unwrap();
    assert_eq!(store.files("step-00000010").unwrap().len(), 5);
    fs::write(folder.path().join("step-00000010/unit.0-0.00000001.safetensors#7"), b"what a dead writer left").unwrap();
    assert_eq!(store.prune(10, SaveId::from(2), |_| true).unwrap(), [] as [u64; 0]);
    assert_eq!(files(&folder.path().join("step-00000010")).len(), 3);
    load(&store, 10, &again).unwrap();
}
