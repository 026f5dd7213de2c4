//! Tokenizing files into a corpus: all kinds of files, interrupted or not.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use shardwise_data::{
    Corpus, CorpusInfo, Error, Inputs, Options, Progress, Result, Summary, Tokenizer, Totals, tokenize,
};

const CONTINUE: fn(&Progress) -> ControlFlow<()> = |_| ControlFlow::Continue(());

fn train(inputs: &Inputs) -> Tokenizer {
    Tokenizer::train_bpe(inputs.texts(), 400, &mut |_| ControlFlow::Continue(())).unwrap()
}

fn options(prefix: PathBuf, held_out: Option<u32>) -> Options {
    Options { prefix, held_out, threads: Some(3) }
}

/// The documents of a corpus as text, without the end-of-text tokens.
fn texts(prefix: &Path, tokenizer: &Tokenizer) -> Vec<String> {
    let corpus = Corpus::open(prefix).unwrap();
    corpus.check().unwrap();
    let text = |number| {
        let range = corpus.document(number).unwrap();
        let mut tokens = vec![0; (range.end - range.start) as usize];
        corpus.read(range.start, &mut tokens).unwrap();
        assert_eq!(tokens.pop(), tokenizer.end_of_text());
        assert!(!tokens.contains(&tokenizer.end_of_text().unwrap()));
        tokenizer.decode(&tokens).unwrap()
    };
    (0..corpus.documents()).map(text).collect()
}

fn lines(texts: &[&str]) -> Vec<u8> {
    let line = |text: &&str| format!("{{\"id\":{{\"a\":[1,2]}},\"text\":{}}}\n", serde_json::to_string(text).unwrap());
    texts.iter().map(line).collect::<String>().into_bytes()
}

fn write_parquet(path: &Path, rows: &[Option<&str>], compression: Compression) {
    let schema = parse_message_type("message m { required int32 n; optional binary text (UTF8); }").unwrap();
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut file =
        SerializedFileWriter::new(std::fs::File::create(path).unwrap(), Arc::new(schema), properties).unwrap();
    for rows in rows.chunks(2) {
        let mut group = file.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<parquet::data_type::Int32Type>().write_batch(&vec![1; rows.len()], None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let values: Vec<ByteArray> = rows.iter().flatten().map(|&text| ByteArray::from(text)).collect();
        let levels: Vec<i16> = rows.iter().map(|row| i16::from(row.is_some())).collect();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    file.close().unwrap();
}

#[test]
fn every_kind_of_file_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let said = ["one two", "drei\nvier \"fünf\"", "六"];
    std::fs::write(at("a.jsonl"), [&lines(&said)[..], b"\n  \n"].concat()).unwrap();
    let mut gz = flate2::write::GzEncoder::new(std::fs::File::create(at("b.jsonl.gz")).unwrap(), Default::default());
    gz.write_all(&lines(&said)).unwrap();
    gz.finish().unwrap();
    std::fs::write(at("c.json.zst"), zstd::encode_all(&lines(&said)[..], 3).unwrap()).unwrap();
    let rows = [Some("one two"), None, Some("drei\nvier \"fünf\""), Some("六"), None];
    let codecs = [
        Compression::SNAPPY,
        Compression::ZSTD(Default::default()),
        Compression::GZIP(Default::default()),
        Compression::LZ4_RAW,
    ];
    for (number, compression) in codecs.into_iter().enumerate() {
        write_parquet(&at(&format!("d{number}.parquet")), &rows, compression);
    }
    std::fs::write(at("plain.txt"), "just text").unwrap();

    let inputs = Inputs::new(&[folder.path()], "text").unwrap();
    let tokenizer = train(&inputs);
    let summary = tokenize(&inputs, &tokenizer, &options(at("out"), None), &mut { CONTINUE }).unwrap();
    let expected: Vec<&str> = [&said[..]; 7].concat().into_iter().chain(["just text"]).collect();
    assert_eq!(texts(&at("out"), &tokenizer), expected);
    let text_bytes = expected.iter().map(|text| text.len() as u64).sum();
    let tokens = Corpus::open(at("out")).unwrap().tokens();
    assert_eq!(summary.corpus, Totals { documents: 22, tokens, text_bytes });
    let info = CorpusInfo::read(at("out")).unwrap().unwrap();
    assert_eq!((info.totals, info.tokenizer), (summary.corpus, tokenizer.hash()));
}

#[test]
fn errors_name_the_document() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let failure = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let pieces: Result<Vec<_>> = Inputs::new(&[&path], "text").unwrap().pieces().collect();
        pieces.unwrap_err().to_string()
    };
    assert!(failure(b"{\"text\":\"a\"}\n{\"txt\":\"b\"}\n").contains("a.jsonl, document 2: the line has no \"text\""));
    assert!(failure(b"{\"text\":\"a\"\n").contains("document 1"));
    assert!(failure(b"{\"text\":7}").contains("document 1"));
    assert!(failure(b"{\"text\":\"\xff\"}").contains("document 1"));
    assert!(failure(&vec![b' '; (64 << 20) + 2]).contains("longer than"));
    let path = folder.path().join("a.parquet");
    std::fs::write(&path, "no parquet").unwrap();
    assert!(Inputs::new(&[&path], "text").unwrap().pieces().next().unwrap().is_err());
    write_parquet(&path, &[Some("a")], Compression::UNCOMPRESSED);
    for field in ["n", "none"] {
        let error = Inputs::new(&[&path], field).unwrap().pieces().next().unwrap().unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
}

#[test]
fn long_text_comes_in_pieces_and_ends_once() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join("in").join(name);
    std::fs::create_dir_all(at("sub")).unwrap();
    std::fs::create_dir_all(at(".git")).unwrap();
    let line = "A line that says something, und mehr.\n";
    std::fs::write(at("sub/long.c"), line.repeat(10_000)).unwrap();
    std::fs::write(at("no-lines"), "ü".repeat(1_500_000)).unwrap();
    std::fs::write(at("empty"), "").unwrap();
    std::fs::write(at("latin1.txt"), b"caf\xe9").unwrap();
    std::fs::write(at("object.o"), b"\x7fELF\0\0").unwrap();
    std::fs::write(at("pretty.json"), "{\n \"text\": 1\n}\n").unwrap();
    std::fs::write(at(".git/pack"), "not read").unwrap();
    let inputs = Inputs::new(&[folder.path().join("in")], "text").unwrap();

    let mut pieces = inputs.pieces();
    let all: Vec<_> = pieces.by_ref().map(|piece| piece.unwrap()).collect();
    assert_eq!((pieces.skipped(), pieces.bytes_read()), (1, inputs.bytes()));
    assert_eq!(all.iter().filter(|piece| piece.last).count(), 4);
    let long: Vec<_> = all.iter().filter(|piece| piece.text.starts_with(line)).collect();
    assert_eq!(long.len(), (line.len() * 10_000).div_ceil(64 << 10));
    assert!(long.iter().all(|piece| piece.text.ends_with('\n') && piece.text.len() < (64 << 10) + line.len()));

    // Not trained on all files: a word of a million letters takes forever.
    let tokenizer = train(&Inputs::new(&[at("sub")], "text").unwrap());
    let prefix = folder.path().join("out");
    let summary = tokenize(&inputs, &tokenizer, &options(prefix.clone(), None), &mut { CONTINUE }).unwrap();
    assert_eq!((summary.skipped_files, summary.corpus.documents), (1, 4));
    let expected = ["caf\u{fffd}", &"ü".repeat(1_500_000), "{\n \"text\": 1\n}\n", &line.repeat(10_000)];
    assert!(texts(&prefix, &tokenizer) == expected);
}

/// Inputs of all kinds, enough for many batches.
fn many(folder: &Path) -> Inputs {
    std::fs::create_dir_all(folder).unwrap();
    let text = |seed: usize| -> String { (0..seed % 700).map(|i| format!("word{} ", (seed * i) % 97)).collect() };
    let documents: Vec<String> = (0..600).map(text).collect();
    let documents: Vec<&str> = documents.iter().map(String::as_str).collect();
    std::fs::write(folder.join("a.jsonl.zst"), zstd::encode_all(&lines(&documents)[..], 1).unwrap()).unwrap();
    std::fs::write(folder.join("b.txt"), "some line of text\n".repeat(60_000)).unwrap();
    std::fs::write(folder.join("b0.bin"), [0; 100]).unwrap();
    let rows: Vec<_> = documents.iter().map(|&text| Some(text)).collect();
    write_parquet(&folder.join("c.parquet"), &rows[..200], Compression::SNAPPY);
    Inputs::new(&[folder], "text").unwrap()
}

fn all_bytes(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let file = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    };
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(file).collect();
    files.sort();
    files
}

#[test]
fn interrupted_work_ends_in_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let inputs = many(&folder.path().join("in"));
    let tokenizer = train(&inputs);
    let run = |name: &str, progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>| -> Result<Summary> {
        std::fs::create_dir_all(folder.path().join(name)).unwrap();
        tokenize(&inputs, &tokenizer, &options(folder.path().join(name).join("out"), Some(7)), progress)
    };
    let mut batches = 0;
    let whole = run("whole", &mut |_| {
        batches += 1;
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(batches > 8, "{batches}");

    // Stopped after every batch, with extra bytes in the part files as after a crash.
    let mut stops = 0;
    let stopped = loop {
        let result = run("stopped", &mut |_| ControlFlow::Break(()));
        match result {
            Err(Error::Stopped { path }) => assert!(path.ends_with("out.part.json")),
            other => break other.unwrap(),
        }
        stops += 1;
        for part in ["out.bin.part", "out.lengths.part", "out-held-out.bin.part"] {
            let path = folder.path().join("stopped").join(part);
            std::fs::OpenOptions::new().append(true).open(path).unwrap().write_all(b"unsaved").unwrap();
        }
    };
    assert!(stops + 1 >= batches, "{stops} stops of {batches}");
    assert_eq!((stopped.corpus, stopped.held_out, stopped.skipped_files), (whole.corpus, whole.held_out, 1));
    let (whole, stopped) = (all_bytes(&folder.path().join("whole")), all_bytes(&folder.path().join("stopped")));
    assert_eq!(whole.iter().map(|(name, _)| name).collect::<Vec<_>>(), NAMES);
    assert!(whole == stopped);
}

const NAMES: [&str; 6] =
    ["out-held-out.bin", "out-held-out.idx", "out-held-out.json", "out.bin", "out.idx", "out.json"];

#[test]
fn every_nth_document_is_held_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let documents: Vec<String> = (0..100).map(|number| format!("document {number}")).collect();
    std::fs::write(&path, lines(&documents.iter().map(String::as_str).collect::<Vec<_>>())).unwrap();
    let inputs = Inputs::new(&[&path], "text").unwrap();
    let tokenizer = train(&inputs);
    let prefix = folder.path().join("out");
    let summary = tokenize(&inputs, &tokenizer, &options(prefix.clone(), Some(10)), &mut { CONTINUE }).unwrap();
    let held_out = texts(&folder.path().join("out-held-out"), &tokenizer);
    assert_eq!(held_out, (0..10).map(|n| format!("document {}", 10 * n + 9)).collect::<Vec<_>>());
    assert_eq!(texts(&prefix, &tokenizer).len(), 90);
    assert_eq!(summary.held_out.unwrap().text_bytes, held_out.iter().map(|text| text.len() as u64).sum::<u64>());

    // An existing corpus is not overwritten.
    let again = tokenize(&inputs, &tokenizer, &options(prefix, Some(10)), &mut { CONTINUE });
    assert!(again.unwrap_err().to_string().contains("already"));
}

#[test]
fn work_resumes_only_with_the_same_inputs() {
    let folder = tempfile::tempdir().unwrap();
    let inputs = many(&folder.path().join("in"));
    let tokenizer = train(&inputs);
    let prefix = folder.path().join("out");
    let stop = &mut |_: &Progress| ControlFlow::Break(());
    assert!(matches!(tokenize(&inputs, &tokenizer, &options(prefix.clone(), None), stop), Err(Error::Stopped { .. })));
    let refused = |result: Result<Summary>, what: &str| {
        let error = result.unwrap_err();
        assert!(matches!(&error, Error::Resume { .. }) && error.to_string().contains(what), "{error}");
    };
    refused(tokenize(&inputs, &tokenizer, &options(prefix.clone(), Some(3)), stop), "held-out");
    let other = Tokenizer::train_bpe(inputs.texts(), 300, &mut |_| ControlFlow::Continue(())).unwrap();
    refused(tokenize(&inputs, &other, &options(prefix.clone(), None), stop), "tokenizer");
    std::fs::write(folder.path().join("in/b.txt"), "changed").unwrap();
    let changed = Inputs::new(&[folder.path().join("in")], "text").unwrap();
    refused(tokenize(&changed, &tokenizer, &options(prefix.clone(), None), stop), "files");
    std::fs::write(folder.path().join("out.bin.part"), "").unwrap();
    refused(tokenize(&inputs, &tokenizer, &options(prefix, None), stop), "bytes");
}

#[test]
fn tokenizers_are_saved_and_opened() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.txt"), "the quick brown fox jumps over the lazy dog ".repeat(50)).unwrap();
    let tokenizer = train(&Inputs::new(&[folder.path().join("a.txt")], "text").unwrap());
    tokenizer.save(folder.path()).unwrap();
    let opened = Tokenizer::open(folder.path()).unwrap();
    assert_eq!((opened.hash(), opened.end_of_text()), (tokenizer.hash(), Some(0)));
    let text = "  the quick\tfox — 日本 \u{1f600}\0\n\n";
    let tokens = opened.encode(text).unwrap();
    assert_eq!(opened.decode(&tokens).unwrap(), text);
    assert_eq!(opened.encode_batch(&[text, "the"]).unwrap(), [tokens, opened.encode("the").unwrap()]);
    assert!(opened.vocab_size() <= 400 && opened.encode("<|endoftext|>").unwrap() == [0]);
    let offsets = opened.encode_with_offsets(text).unwrap();
    assert_eq!(&text[offsets[0].1.start..offsets[0].1.end], " ");
    // The configuration in the same folder takes precedence.
    std::fs::write(folder.path().join("tokenizer_config.json"), r#"{"eos_token": {"content": "the"}}"#).unwrap();
    assert_eq!(Tokenizer::open(folder.path()).unwrap().end_of_text(), opened.token_id("the"));
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    assert!(matches!(Tokenizer::open(folder.path()), Err(Error::Tokenizer { .. })));
    let stopped = Tokenizer::train_bpe([Ok("a".to_string())].into_iter(), 300, &mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(Error::Stopped { .. })));
}
