//! Corpora on disk: they follow Megatron-LM's format, and invalid ones are refused.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::Path;

use proptest::prelude::*;
use shardwise_data::{Corpus, Error, TokenType, Windows, Writer};

fn write(prefix: &Path, vocabulary: u64, documents: &[Vec<u32>]) {
    let mut writer = Writer::create(prefix, vocabulary).unwrap();
    documents.iter().for_each(|document| writer.document(document).unwrap());
    writer.finish().unwrap();
}

/// The index of documents with 3, 0 and 1 two-byte tokens, written by hand from the published description.
fn by_hand() -> Vec<u8> {
    let mut bytes = b"MMIDIDX\x00\x00".to_vec();
    bytes.extend(1_u64.to_le_bytes());
    bytes.push(8);
    bytes.extend(3_u64.to_le_bytes());
    bytes.extend(4_u64.to_le_bytes());
    [3_i32, 0, 1].iter().for_each(|length| bytes.extend(length.to_le_bytes()));
    [0_i64, 6, 6].iter().for_each(|pointer| bytes.extend(pointer.to_le_bytes()));
    [0_i64, 1, 2, 3].iter().for_each(|sequence| bytes.extend(sequence.to_le_bytes()));
    bytes
}

#[test]
fn the_bytes_are_those_of_the_published_format() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a.corpus");
    write(&prefix, 50_257, &[vec![1, 2, 65_000], vec![], vec![7]]);
    assert_eq!(std::fs::read(folder.path().join("a.corpus.idx")).unwrap(), by_hand());
    assert_eq!(std::fs::read(folder.path().join("a.corpus.bin")).unwrap(), [1, 0, 2, 0, 0xe8, 0xfd, 7, 0]);
    let mut names: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["a.corpus.bin", "a.corpus.idx"]);
    // As Megatron-LM chooses.
    assert_eq!(TokenType::for_vocab_size(65_499), TokenType::U16);
    assert_eq!(TokenType::for_vocab_size(65_500), TokenType::I32);
}

#[test]
fn an_index_with_a_wrong_number_anywhere_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("corpus");
    write(&prefix, 100, &[vec![1, 2, 3], vec![], vec![7]]);
    assert!(Corpus::open(&prefix).unwrap().check().is_ok());
    let index = prefix.with_extension("idx");
    // Set every byte to several values: an index that is still accepted must mean the same.
    for at in 0..by_hand().len() {
        for value in [0, 1, 2, 4, 5, 6, 7, 8, 0x7f, 0x80, 0xff] {
            let mut bytes = by_hand();
            if bytes[at] == value {
                continue;
            }
            bytes[at] = value;
            std::fs::write(&index, &bytes).unwrap();
            let opened = Corpus::open(&prefix).and_then(|corpus| corpus.check().map(|()| corpus));
            match opened {
                Err(error) => assert!(matches!(error, Error::Corpus { .. }), "byte {at} = {value}: {error}"),
                // Small tokens are the same whether signed or not.
                Ok(corpus) => {
                    assert!(at == 17 && corpus.token_type() == TokenType::I16 || empty_moved(at), "byte {at} = {value}")
                }
            }
        }
    }
    for length in 0..by_hand().len() {
        std::fs::write(&index, &by_hand()[..length]).unwrap();
        assert!(Corpus::open(&prefix).is_err(), "{length} bytes");
    }
    std::fs::write(&index, [&by_hand()[..], &[0]].concat()).unwrap();
    assert!(Corpus::open(&prefix).is_err());
}

/// Document 1 is empty, so its sequence may just as well belong to the first document or to the last.
fn empty_moved(at: usize) -> bool {
    let documents = 34 + 3 * 12;
    at == documents + 8 || at == documents + 16
}

#[test]
fn tokens_that_are_not_one_after_another_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("corpus");
    write(&prefix, 100, &[vec![1, 2], vec![3, 4]]);
    let index = prefix.with_extension("idx");
    let mut bytes = std::fs::read(&index).unwrap();
    let pointers = 34 + 2 * 4;
    bytes[pointers] = 4;
    bytes[pointers + 8] = 0;
    std::fs::write(&index, bytes).unwrap();
    let error = Corpus::open(&prefix).unwrap_err().to_string();
    assert!(error.contains("corpus.idx") && error.contains("does not start at the first token"), "{error}");
}

#[test]
fn raw_tokens_are_one_document() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.bin");
    std::fs::write(&path, [1, 0, 255, 255, 3, 0]).unwrap();
    assert!(Corpus::open(&path).unwrap_err().to_string().contains("token_bytes = 2"));
    let corpus = Corpus::open_raw(&path, 2).unwrap();
    let mut tokens = [0; 3];
    corpus.read(0, &mut tokens).unwrap();
    assert_eq!((tokens, corpus.documents(), corpus.document(0).unwrap()), ([1, 65_535, 3], 1, 0..3));
    assert!(Corpus::open_raw(&path, 4).is_err() && Corpus::open_raw(&path, 3).is_err());
    std::fs::write(&path, []).unwrap();
    let corpus = Corpus::open_raw(&path, 2).unwrap();
    assert_eq!(corpus.tokens(), 0);
    assert!(Windows::new(corpus, 4).is_err());
}

#[test]
fn negative_tokens_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("corpus");
    write(&prefix, 100_000, &[vec![1, u32::MAX, 3]]);
    let corpus = Corpus::open(prefix.with_extension("bin")).unwrap();
    assert!(corpus.read(0, &mut [0; 1]).is_ok() && corpus.read(2, &mut [0; 1]).is_ok());
    assert!(corpus.read(0, &mut [0; 3]).unwrap_err().to_string().contains("negative"));
}

#[test]
fn windows_share_a_token_with_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("corpus");
    write(&prefix, 100, &[(0..5).collect(), (5..11).collect()]);
    let windows = Windows::new(Corpus::open(&prefix).unwrap(), 5).unwrap();
    assert_eq!(windows.count(), 2);
    let mut tokens = [0; 6];
    windows.read(1, 0, &mut tokens).unwrap();
    assert_eq!(tokens, [5, 6, 7, 8, 9, 10]);
    windows.read(1, 2, &mut tokens[..3]).unwrap();
    assert_eq!(tokens[..3], [7, 8, 9]);
    assert!(windows.read(2, 0, &mut tokens).is_err() && windows.read(0, 1, &mut tokens).is_err());
    assert_eq!(Windows::new(Corpus::open(&prefix).unwrap(), 10).unwrap().count(), 1);
    assert!(Windows::new(Corpus::open(&prefix).unwrap(), 11).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn any_range_reads_what_was_written(
        documents in prop::collection::vec(prop::collection::vec(0_u32..200_000, 0..40), 0..20),
        from in 0_u64..400,
        length in 0_usize..200,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("corpus");
        write(&prefix, 200_000, &documents);
        let corpus = Corpus::open(&prefix).unwrap();
        corpus.check().unwrap();
        let all = documents.concat();
        prop_assert_eq!(corpus.tokens(), all.len() as u64);
        prop_assert_eq!(corpus.documents(), documents.len() as u64);
        let mut out = vec![0; length];
        let read = corpus.read(from, &mut out);
        match all.get(from as usize..from as usize + length) {
            Some(expected) => prop_assert_eq!(&out, expected),
            None => prop_assert!(read.is_err()),
        }
        for (number, document) in documents.iter().enumerate() {
            let range = corpus.document(number as u64).unwrap();
            prop_assert_eq!(&all[range.start as usize..range.end as usize], &document[..]);
        }
        prop_assert!(corpus.document(documents.len() as u64).is_err());
    }
}
