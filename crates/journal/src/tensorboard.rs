//! Exports the scalars of a run to TensorBoard: `tensorboard --logdir RUN`.
//!
//! Every attempt writes its own file in TensorFlow's event format: records with a length and checksums, each a protocol buffer
//! `Event`. The few fields that we need are encoded here by hand. A file starts with its version. Before steps are repeated, a
//! session-start event makes TensorBoard discard what it has read from that step on.

use std::fs::{File, OpenOptions, create_dir_all, read_dir};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::{Entry, EntryKind, Error, ExpertLoad, Result};

/// The subfolder of the run's folder.
const FOLDER: &str = "tensorboard";

/// The prefix of event files. The time in seconds follows; TensorBoard reads the files in that order.
const PREFIX: &str = "events.out.tfevents.";

/// The event file of one attempt.
pub struct TensorBoard {
    file: File,
    path: PathBuf,
    /// The last step that was written.
    last: Option<u64>,
}

impl TensorBoard {
    /// Creates a new event file in a run's folder.
    pub fn open(run: &Path) -> Result<Self> {
        let folder = run.join(FOLDER);
        let fail = |error| Error::File { path: folder.display().to_string(), error };
        create_dir_all(&folder).map_err(fail)?;
        let now = Entry::now(EntryKind::Note { step: 0, text: String::new() }).time_s;
        // Sort after all existing files, even if another clock named them.
        let mut number = newest(&folder).map_err(fail)?.map_or(0, |newest| newest + 1).max(now as u64);
        let (file, path) = loop {
            let path = folder.join(format!("{PREFIX}{number:010}"));
            match OpenOptions::new().create_new(true).append(true).open(&path) {
                Ok(file) => break (file, path),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(Error::File { path: path.display().to_string(), error }),
            }
        };
        let mut tensorboard = TensorBoard { file, path, last: None };
        let mut version = event(now, 0);
        bytes(&mut version, 3, b"brain.Event:2");
        tensorboard.write(&version)?;
        Ok(tensorboard)
    }

    /// Writes the scalars of an entry, if it has any.
    pub fn add(&mut self, entry: &Entry) -> Result<()> {
        if let EntryKind::Start(start) = &entry.kind {
            return self.write_session_start(entry.time_s, start.first_step);
        }
        let Some((step, scalars)) = scalars(entry) else { return Ok(()) };
        if let EntryKind::Step(_) = entry.kind {
            if self.last.is_some_and(|last| step <= last) {
                self.write_session_start(entry.time_s, step)?;
            }
            self.last = Some(step);
        }
        let mut summary = Vec::new();
        for (tag, scalar) in scalars {
            let mut value = Vec::new();
            bytes(&mut value, 1, tag.as_bytes());
            key(&mut value, 2, FIXED_32);
            value.extend((scalar as f32).to_le_bytes());
            bytes(&mut summary, 1, &value);
        }
        let mut event = event(entry.time_s, step);
        bytes(&mut event, 5, &summary);
        self.write(&event)
    }

    /// Makes TensorBoard discard this step and later ones, because they are repeated.
    fn write_session_start(&mut self, time_s: f64, step: u64) -> Result<()> {
        let mut event = event(time_s, step);
        // A SessionLog with status START.
        bytes(&mut event, 7, &[1 << 3 | VARINT, 1]);
        self.write(&event)
    }

    fn write(&mut self, event: &[u8]) -> Result<()> {
        let length = (event.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(event.len() + 16);
        record.extend(length);
        record.extend(masked(crc32c::crc32c(&length)).to_le_bytes());
        record.extend(event);
        record.extend(masked(crc32c::crc32c(event)).to_le_bytes());
        self.file.write_all(&record).map_err(|error| Error::File { path: self.path.display().to_string(), error })
    }
}

/// The step of an entry, and its scalars with their tags.
fn scalars(entry: &Entry) -> Option<(u64, Vec<(String, f64)>)> {
    let named = |scalars: &[(&str, f64)]| -> Vec<(String, f64)> {
        scalars.iter().map(|(name, scalar)| (name.to_string(), *scalar)).collect()
    };
    match &entry.kind {
        EntryKind::Step(step) => {
            let scalars = [
                ("loss", step.loss),
                ("grad_norm", step.grad_norm),
                ("lr", step.lr),
                ("tokens", step.tokens as f64),
                ("tokens_per_s", step.tokens_per_s),
                ("step_s", step.step_s),
                ("mfu", step.mfu),
                ("memory_bytes", step.memory_bytes as f64),
                ("memory_peak_bytes", step.memory_peak_bytes as f64),
                ("sent_bytes", step.sent_bytes as f64),
                ("loss_scale", step.loss_scale),
                ("skipped_so_far", step.skipped_so_far as f64),
            ];
            let of_block = |(block, load): (usize, &ExpertLoad)| {
                let name = |what: &str| format!("experts/{block}/{what}");
                [
                    (name("busiest"), load.busiest),
                    (name("unused"), load.unused as f64),
                    (name("dropped"), load.dropped as f64),
                ]
            };
            let experts = step.experts.iter().enumerate().flat_map(of_block);
            Some((step.step, named(&scalars).into_iter().chain(experts).collect()))
        }
        EntryKind::Memory { step, ranks } => {
            let mut most: Vec<(String, f64)> = Vec::new();
            for (name, bytes) in ranks.iter().flat_map(|rank| rank.kinds()) {
                let name = format!("memory/{}", name.replace(' ', "_"));
                match most.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, known)) => *known = known.max(bytes as f64),
                    None => most.push((name, bytes as f64)),
                }
            }
            Some((*step, most))
        }
        EntryKind::Traffic(traffic) => {
            let per_step = |bytes: u64| bytes as f64 / traffic.steps.max(1) as f64;
            let both = |verb: &crate::VerbTraffic| {
                let name = format!("traffic/{}", verb.verb);
                [(format!("{name}/expected"), per_step(verb.expected_bytes)), (name, per_step(verb.bytes))]
            };
            Some((traffic.step, traffic.verbs.iter().flat_map(both).collect()))
        }
        EntryKind::Evaluation(evaluation) => {
            let mut scalars = named(&[("evaluation/loss", evaluation.loss)]);
            scalars.extend(evaluation.bits_per_byte.map(|bits| ("evaluation/bits_per_byte".to_string(), bits)));
            Some((evaluation.step, scalars))
        }
        EntryKind::Saved(saved) => {
            let seconds = [("saved/took_s", saved.took_s), ("saved/stalled_s", saved.stalled_s)];
            Some((saved.step, named(&seconds)))
        }
        _ => None,
    }
}

/// The number of the newest event file in a folder.
fn newest(folder: &Path) -> std::io::Result<Option<u64>> {
    let mut newest = None;
    for file in read_dir(folder)? {
        let name = file?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<u64>().ok());
        // Ignore numbers too large to be ours: the next one might not fit.
        newest = newest.max(number.filter(|number| *number < 1 << 40));
    }
    Ok(newest)
}

// ---- protocol buffers -------------------------------------------------------------------------------------------------

const VARINT: u8 = 0;
const FIXED_64: u8 = 1;
const DELIMITED: u8 = 2;
const FIXED_32: u8 = 5;

/// Starts an event with its time and step.
fn event(time_s: f64, step: u64) -> Vec<u8> {
    let mut event = Vec::new();
    key(&mut event, 1, FIXED_64);
    event.extend(time_s.to_le_bytes());
    key(&mut event, 2, VARINT);
    varint(&mut event, step);
    event
}

fn key(to: &mut Vec<u8>, field: u8, kind: u8) {
    to.push(field << 3 | kind);
}

fn bytes(to: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    key(to, field, DELIMITED);
    varint(to, bytes.len() as u64);
    to.extend(bytes);
}

fn varint(to: &mut Vec<u8>, mut number: u64) {
    while number >= 1 << 7 {
        to.push(number as u8 | 1 << 7);
        number >>= 7;
    }
    to.push(number as u8);
}

/// TensorFlow's masking, so that the checksum of data that itself contains checksums is still strong.
fn masked(checksum: u32) -> u32 {
    checksum.rotate_right(15).wrapping_add(0xa282_ead8)
}
