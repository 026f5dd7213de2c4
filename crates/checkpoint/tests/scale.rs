//! A checkpoint of a thousand ranks: its cost depends on its bytes, not on the number of writers.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::sync::Arc;
use std::time::Instant;

use shardwise_checkpoint::{Checkpoint, FILE_BYTES, SaveId, Store, elements};
use shardwise_plan::{FloatsMut, Partition};
use support::{element, save, units};

#[test]
fn a_thousand_ranks_write_and_a_thousand_others_read() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open(folder.path().to_str().unwrap()).unwrap());
    let shapes: &[&[&[u64]]] = &[&[&[4999, 512]], &[&[1536, 512], &[512, 1531], &[512]], &[&[512], &[4999, 512]]];
    let of = |owners| {
        let layouts = units(shapes, owners, FILE_BYTES);
        let step = owners as u64;
        save(&store, step, &layouts, SaveId::from(1));
        let files = store.files(&shardwise_checkpoint::step_folder(step)).unwrap();
        let metadata: u64 = files.iter().filter(|(name, _)| name.ends_with(".json")).map(|(_, bytes)| bytes).sum();
        (files.len(), metadata)
    };
    let (files, metadata) = of(1000);
    assert_eq!((files, of(10).0), (7, 7), "a table and a file for each unit, and a manifest");
    println!("1,000 ranks: {files} files, {metadata} bytes of tables and manifest");
    assert!(metadata < 20_000, "{metadata} bytes of tables and manifest");

    // Rank 637 of 1,000 others with different shards: each tensor is partitioned separately.
    let started = Instant::now();
    let checkpoint = Checkpoint::open(&store, 1000).unwrap();
    let mut read = 0;
    for layout in units(shapes, 1000, FILE_BYTES) {
        let mut reader = checkpoint.unit(&layout.name).unwrap();
        for tensor in layout.buffers.iter().flat_map(|buffer| &buffer.tensors) {
            let range = Partition::new(elements(&tensor.shape).unwrap() as usize, 1000).range(637);
            let mut found = vec![0f32; range.len()];
            reader
                .read_floats(
                    &tensor.name,
                    &tensor.shape,
                    range.start as u64..range.end as u64,
                    FloatsMut::F32(&mut found),
                )
                .unwrap();
            for (found, index) in found.iter().zip(range) {
                assert_eq!(*found, element(1000, &tensor.name, index as u64));
                read += 4;
            }
        }
    }
    println!("one of 1,000 ranks read its {read} bytes in {:?}", started.elapsed());
}
