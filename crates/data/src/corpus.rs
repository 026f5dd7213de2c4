//! Tokens on disk, in the format of Megatron-LM's indexed datasets, which other trainers read and write too.
//!
//! `prefix.bin` holds only tokens, one document after another. `prefix.idx` holds a magic number, a version, the type of the tokens and two
//! counts, then the lengths of all sequences, their byte offsets, and the number of the first sequence of each document. A document is
//! one sequence here, or several if it is long. Files with nothing but tokens, as nanoGPT writes them, can be read as well.
//!
//! Files are memory-mapped, so opening a trillion tokens costs as much as opening a thousand. The index is not trusted: its counts are
//! checked against the lengths of the files, a sample of its entries when it is opened, and every entry when it is used. Reading tokens
//! does not need the index.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::{Error, Result};

const MAGIC: &[u8; 9] = b"MMIDIDX\x00\x00";
const VERSION: u64 = 1;
const HEADER_BYTES: usize = 34;
/// From this vocabulary size on, Megatron-LM uses four bytes per token.
const LARGE_VOCAB_SIZE: u64 = 65_500;
/// The number of index entries that are checked when a corpus is opened.
const SAMPLED: u64 = 1_000;
/// The bit that a [`Writer`] sets in the length of a sequence if its document continues in the next sequence.
const CONTINUES: u32 = 1 << 31;

/// The type of the tokens in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// One byte, unsigned.
    U8,
    /// Two bytes, signed.
    I16,
    /// Two bytes, unsigned.
    U16,
    /// Four bytes, signed.
    I32,
    /// Four bytes, unsigned.
    U32,
    /// Eight bytes, signed.
    I64,
}

impl TokenType {
    /// The type that Megatron-LM uses for a vocabulary of this size.
    pub fn for_vocab_size(vocab_size: u64) -> Self {
        if vocab_size < LARGE_VOCAB_SIZE { TokenType::U16 } else { TokenType::I32 }
    }

    /// The size of a token in bytes.
    pub fn bytes(self) -> usize {
        match self {
            TokenType::U8 => 1,
            TokenType::I16 | TokenType::U16 => 2,
            TokenType::I32 | TokenType::U32 => 4,
            TokenType::I64 => 8,
        }
    }

    /// Appends tokens, encoded as this type. All of them fit, since the type is chosen by the vocabulary size.
    pub(crate) fn extend(self, bytes: &mut Vec<u8>, tokens: &[u32]) {
        match self {
            TokenType::U8 => bytes.extend(tokens.iter().map(|&token| token as u8)),
            TokenType::I16 | TokenType::U16 => {
                bytes.extend(tokens.iter().flat_map(|&token| (token as u16).to_le_bytes()))
            }
            TokenType::I32 | TokenType::U32 => bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes())),
            TokenType::I64 => bytes.extend(tokens.iter().flat_map(|&token| u64::from(token).to_le_bytes())),
        }
    }

    fn code(self) -> Option<u8> {
        match self {
            TokenType::U8 => Some(1),
            TokenType::I16 => Some(3),
            TokenType::I32 => Some(4),
            TokenType::I64 => Some(5),
            TokenType::U16 => Some(8),
            TokenType::U32 => None,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        let all = [TokenType::U8, TokenType::I16, TokenType::I32, TokenType::I64, TokenType::U16];
        all.into_iter().find(|kind| kind.code() == Some(code))
    }

    /// Decodes tokens, and returns whether all of them fit into `u32`.
    fn read(self, bytes: &[u8], out: &mut [u32]) -> bool {
        let mut negative = 0;
        match self {
            TokenType::U8 => bytes.iter().zip(out).for_each(|(&byte, out)| *out = u32::from(byte)),
            TokenType::U16 => read_each(bytes, out, |bytes| u32::from(u16::from_le_bytes(bytes))),
            TokenType::U32 => read_each(bytes, out, u32::from_le_bytes),
            TokenType::I16 => read_each(bytes, out, |bytes| {
                let token = i16::from_le_bytes(bytes);
                negative |= i64::from(token);
                token as u32
            }),
            TokenType::I32 => read_each(bytes, out, |bytes| {
                let token = i32::from_le_bytes(bytes);
                negative |= i64::from(token);
                token as u32
            }),
            TokenType::I64 => read_each(bytes, out, |bytes| {
                let token = i64::from_le_bytes(bytes);
                negative |= token | -i64::from(token > i64::from(u32::MAX));
                token as u32
            }),
        }
        negative >= 0
    }
}

fn read_each<const N: usize>(bytes: &[u8], out: &mut [u32], mut token: impl FnMut([u8; N]) -> u32) {
    let (tokens, _) = bytes.as_chunks::<N>();
    tokens.iter().zip(out).for_each(|(&bytes, out)| *out = token(bytes));
}

/// The tokens of a set of documents on disk (Megatron-LM: `IndexedDataset`).
#[derive(Debug)]
pub struct Corpus {
    path: PathBuf,
    kind: TokenType,
    tokens: Map,
    index: Option<Index>,
}

impl Corpus {
    /// Opens `prefix.bin` and `prefix.idx`, given the prefix or one of the two names.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let prefix = prefix_of(path.as_ref());
        let (path, index) = (with_ending(&prefix, ".bin"), with_ending(&prefix, ".idx"));
        if path.is_file() && !index.exists() {
            let problem = "there is no .idx file for it; if it holds only tokens, as nanoGPT writes them, set their size: data.token_bytes = 2";
            return Err(Error::corpus(&path, problem));
        }
        let (kind, index) = Index::open(&index)?;
        let corpus = Corpus { kind, tokens: Map::open(&path)?, index: Some(index), path };
        corpus.check_sample()?;
        Ok(corpus)
    }

    /// Opens a file of unsigned tokens of 1, 2 or 4 bytes without an index, as one document.
    pub fn open_raw(path: impl AsRef<Path>, token_bytes: usize) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let kind = match token_bytes {
            1 => TokenType::U8,
            2 => TokenType::U16,
            4 => TokenType::U32,
            _ => return Err(Error::corpus(&path, format!("token_bytes is {token_bytes}, but must be 1, 2 or 4"))),
        };
        let corpus = Corpus { kind, tokens: Map::open(&path)?, index: None, path };
        match corpus.tokens.bytes().len() % token_bytes {
            0 => Ok(corpus),
            _ => Err(Error::corpus(&corpus.path, format!("its length is not a multiple of {token_bytes} bytes"))),
        }
    }

    /// The path of the file with the tokens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The type of the tokens.
    pub fn token_type(&self) -> TokenType {
        self.kind
    }

    /// The number of tokens.
    pub fn tokens(&self) -> u64 {
        (self.tokens.bytes().len() / self.kind.bytes()) as u64
    }

    /// The number of documents.
    pub fn documents(&self) -> u64 {
        self.index.as_ref().map_or(1, |index| index.documents - 1)
    }

    /// The range of tokens of a document.
    pub fn document(&self, number: u64) -> Result<Range<u64>> {
        if number >= self.documents() {
            let problem = format!("document {number} does not exist; there are {} documents", self.documents());
            return Err(Error::corpus(&self.path, problem));
        }
        let Some(index) = &self.index else { return Ok(0..self.tokens()) };
        let (first, end) = (index.first_sequence(number), index.first_sequence(number + 1));
        if first > end || end > index.sequences {
            let problem =
                format!("document {number} has sequences {first} to {end}, but there are only {}", index.sequences);
            return Err(Error::corpus(&index.path, problem));
        }
        let start = if first == index.sequences { self.tokens() } else { self.sequence(first)?.start };
        (first..end).try_fold(start..start, |range, sequence| Ok(range.start..self.sequence(sequence)?.end))
    }

    /// Fills `out` with the tokens from `from` on, across documents.
    pub fn read(&self, from: u64, out: &mut [u32]) -> Result<()> {
        let outside = || {
            let problem = format!("cannot read {} tokens from {from} on: there are only {}", out.len(), self.tokens());
            Error::corpus(&self.path, problem)
        };
        let size = self.kind.bytes();
        let start = usize::try_from(from).ok().and_then(|from| from.checked_mul(size)).ok_or_else(outside)?;
        let end = start.checked_add(out.len() * size).ok_or_else(outside)?;
        let bytes = self.tokens.bytes().get(start..end).ok_or_else(outside)?;
        match self.kind.read(bytes, out) {
            true => Ok(()),
            false => {
                let problem =
                    format!("a token between {from} and {} is negative or exceeds 32 bits", from + out.len() as u64);
                Err(Error::corpus(&self.path, problem))
            }
        }
    }

    /// Checks every entry of the index. Opening a corpus checks only a sample.
    pub fn check(&self) -> Result<()> {
        (0..self.documents()).try_for_each(|number| self.document(number).map(drop))
    }

    /// The range of tokens of a sequence. It must end where the next sequence starts, so that the file is one stream.
    fn sequence(&self, number: u64) -> Result<Range<u64>> {
        let Some(index) = &self.index else { return Ok(0..self.tokens()) };
        let size = self.kind.bytes() as u64;
        let (bytes, pointer) = (self.tokens.bytes().len() as u64, index.pointer(number));
        let next = if number + 1 == index.sequences { bytes } else { index.pointer(number + 1) };
        let fail = |problem: String| Err(Error::corpus(&index.path, problem));
        let Ok(length) = u64::try_from(index.length(number)) else {
            return fail(format!("sequence {number} has {} tokens", index.length(number)));
        };
        if pointer > bytes || pointer % size != 0 {
            return fail(format!(
                "sequence {number} starts at byte {pointer}, but the file has {bytes} bytes in tokens of {size}"
            ));
        }
        match pointer + length * size == next {
            true => Ok(pointer / size..next / size),
            false => fail(format!(
                "sequence {number} has {length} tokens from byte {pointer} on, but the next one starts at byte {next}; sequences must \
                 follow each other without gaps, so write the corpus again in order"
            )),
        }
    }

    /// Checks the first and the last entries of the index, and a sample of those in between.
    fn check_sample(&self) -> Result<()> {
        let Some(index) = &self.index else { return Ok(()) };
        let fail = |problem: String| Err(Error::corpus(&index.path, problem));
        if index.first_sequence(0) != 0 || index.first_sequence(index.documents - 1) != index.sequences {
            return fail(format!("its documents do not cover sequences 0 to {}", index.sequences));
        }
        match index.sequences {
            0 if !self.tokens.bytes().is_empty() => {
                return fail("it has no sequences, but there are tokens".into());
            }
            0 => return Ok(()),
            _ if index.pointer(0) != 0 => return fail("its first sequence does not start at the first token".into()),
            _ => (),
        }
        spread(index.sequences).try_for_each(|number| self.sequence(number).map(drop))?;
        spread(index.documents - 1).try_for_each(|number| self.document(number).map(drop))
    }
}

/// About [`SAMPLED`] evenly spaced numbers below `count`, including the first and the last.
fn spread(count: u64) -> impl Iterator<Item = u64> {
    let step = (count / SAMPLED).max(1) as usize;
    (0..count).step_by(step).chain(count.checked_sub(1))
}

/// The index of a corpus.
#[derive(Debug)]
struct Index {
    path: PathBuf,
    map: Map,
    sequences: u64,
    /// One more than the number of documents: the last entry is the end of the last document.
    documents: u64,
}

impl Index {
    fn open(path: &Path) -> Result<(TokenType, Self)> {
        let map = Map::open(path)?;
        let fail = |problem: String| Err(Error::corpus(path, problem));
        let Some((header, rest)) = map.bytes().split_at_checked(HEADER_BYTES) else {
            return fail("it is too short for an index".into());
        };
        if !header.starts_with(MAGIC) {
            return fail("it is not an index of tokens (MMIDIDX)".into());
        }
        let (version, sequences, documents) = (number_at(header, 9), number_at(header, 18), number_at(header, 26));
        if version != VERSION {
            return fail(format!("it has version {version}; only version {VERSION} is supported"));
        }
        let Some(kind) = TokenType::from_code(header[17]) else {
            return fail(format!("its data type {} is not a type of tokens", header[17]));
        };
        if documents == 0 {
            return fail("the end of the last document is missing".into());
        }
        let expected = u128::from(sequences) * 12 + u128::from(documents) * 8;
        match rest.len() as u128 == expected {
            true => Ok((kind, Index { path: path.to_path_buf(), map, sequences, documents })),
            false => fail(format!(
                "{sequences} sequences and {documents} document boundaries need {expected} bytes after the header, but there are {}",
                rest.len()
            )),
        }
    }

    fn length(&self, sequence: u64) -> i32 {
        self.entry(HEADER_BYTES as u64 + sequence * 4, i32::from_le_bytes)
    }

    // A negative number is read as one so large that it fails every check.
    fn pointer(&self, sequence: u64) -> u64 {
        self.entry(HEADER_BYTES as u64 + self.sequences * 4 + sequence * 8, u64::from_le_bytes)
    }

    fn first_sequence(&self, document: u64) -> u64 {
        self.entry(HEADER_BYTES as u64 + self.sequences * 12 + document * 8, u64::from_le_bytes)
    }

    /// Reads the entry at a byte offset. Callers stay within the counts, and `open` has checked that the file is that long.
    fn entry<const N: usize, T>(&self, at: u64, number: fn([u8; N]) -> T) -> T {
        let at = at as usize;
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.map.bytes()[at..at + N]);
        number(bytes)
    }
}

fn number_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

/// A memory-mapped file.
#[derive(Debug)]
struct Map(Mmap);

impl Map {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io(path))?;
        // SAFETY: the bytes are only read, and any bytes are valid. The writers of this crate never change a file under its final name,
        // they rename a new one over it. If another program truncates a corpus while it is read, the process dies.
        #[allow(unsafe_code, reason = "the only place that maps memory")]
        let map = unsafe { Mmap::map(&file) };
        map.map(Map).map_err(Error::io(path))
    }

    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Writes a corpus. Its files get their final names when it is finished.
#[derive(Debug)]
pub struct Writer {
    prefix: PathBuf,
    kind: TokenType,
    tokens: BufWriter<File>,
    lengths: BufWriter<File>,
    bytes: Vec<u8>,
}

impl Writer {
    /// Starts a corpus of tokens from a vocabulary of this size.
    pub fn create(prefix: impl AsRef<Path>, vocab_size: u64) -> Result<Self> {
        let prefix = prefix.as_ref().to_path_buf();
        let open = |ending| {
            let path = with_ending(&prefix, ending);
            let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
            file.map(BufWriter::new).map_err(Error::io(&path))
        };
        let (tokens, lengths) = (open(TOKENS_PART)?, open(LENGTHS_PART)?);
        Ok(Writer { kind: TokenType::for_vocab_size(vocab_size), tokens, lengths, bytes: Vec::new(), prefix })
    }

    /// Adds a document.
    pub fn document(&mut self, tokens: &[u32]) -> Result<()> {
        let path = with_ending(&self.prefix, TOKENS_PART);
        if self.kind == TokenType::U16 && tokens.iter().any(|&token| token > u32::from(u16::MAX)) {
            return Err(Error::corpus(&path, "a token is outside the vocabulary that the corpus was created with"));
        }
        let length = length_entry(tokens.len(), true)
            .ok_or_else(|| Error::corpus(&path, "a document has 2^31 tokens or more; split it"))?;
        self.bytes.clear();
        self.kind.extend(&mut self.bytes, tokens);
        self.tokens.write_all(&self.bytes).map_err(Error::io(&path))?;
        self.lengths.write_all(&length.to_le_bytes()).map_err(Error::io(&path))
    }

    /// Writes the index, and renames both files to their final names.
    pub fn finish(self) -> Result<()> {
        for (mut file, ending) in [(self.tokens, TOKENS_PART), (self.lengths, LENGTHS_PART)] {
            let path = with_ending(&self.prefix, ending);
            file.flush().and_then(|()| file.get_ref().sync_all()).map_err(Error::io(&path))?;
        }
        publish(&self.prefix, self.kind)
    }
}

/// The tokens of an unfinished corpus.
pub(crate) const TOKENS_PART: &str = ".bin.part";
/// The lengths of its sequences, four bytes each, encoded by [`length_entry`].
pub(crate) const LENGTHS_PART: &str = ".lengths.part";
const INDEX_PART: &str = ".idx.part";

/// Encodes the length of a sequence for the list of lengths.
pub(crate) fn length_entry(tokens: usize, last_of_document: bool) -> Option<u32> {
    let length = u32::try_from(tokens).ok().filter(|&length| length < CONTINUES)?;
    Some(if last_of_document { length } else { length | CONTINUES })
}

/// Turns the part files into a corpus. Can be called again after an interruption.
pub(crate) fn publish(prefix: &Path, kind: TokenType) -> Result<()> {
    let [lengths, index, tokens] = [LENGTHS_PART, INDEX_PART, TOKENS_PART].map(|ending| with_ending(prefix, ending));
    if lengths.exists() {
        write_index(&lengths, &index, kind)?;
        rename(&index, &with_ending(prefix, ".idx"))?;
    }
    if tokens.exists() {
        rename(&tokens, &with_ending(prefix, ".bin"))?;
    }
    match std::fs::remove_file(&lengths) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io(&lengths)(error)),
        _ => Ok(()),
    }
}

/// Renames a file, and syncs the folder so that the new name survives a crash.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<()> {
    std::fs::rename(from, to).map_err(Error::io(from))?;
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(Error::io(folder))
}

/// Writes an index from a list of lengths. The list is read once to count, and once for each of the three parts of the index.
fn write_index(lengths: &Path, path: &Path, kind: TokenType) -> Result<()> {
    let mut list = File::open(lengths).map_err(Error::io(lengths))?;
    let (mut sequences, mut documents) = (0_u64, 0_u64);
    for_each_length(&mut list, |_, last| {
        sequences += 1;
        documents += u64::from(last);
        Ok(())
    })
    .map_err(Error::io(lengths))?;
    let code =
        kind.code().ok_or_else(|| Error::corpus(path, "the format has no type for unsigned tokens of 4 bytes"))?;
    let written = File::create(path).and_then(|file| {
        let mut out = BufWriter::new(file);
        out.write_all(MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&[code])?;
        out.write_all(&sequences.to_le_bytes())?;
        out.write_all(&(documents + 1).to_le_bytes())?;
        for_each_length(&mut list, |length, _| out.write_all(&length.to_le_bytes()))?;
        let mut pointer = 0_u64;
        for_each_length(&mut list, |length, _| {
            out.write_all(&pointer.to_le_bytes())?;
            pointer += u64::from(length) * kind.bytes() as u64;
            Ok(())
        })?;
        out.write_all(&0_u64.to_le_bytes())?;
        let mut sequence = 0_u64;
        for_each_length(&mut list, |_, last| {
            sequence += 1;
            if last { out.write_all(&sequence.to_le_bytes()) } else { Ok(()) }
        })?;
        out.flush()?;
        out.get_ref().sync_all()
    });
    written.map_err(Error::io(path))
}

/// Calls `each` for every length in a list, with whether the sequence is the last of its document.
fn for_each_length(list: &mut File, mut each: impl FnMut(u32, bool) -> std::io::Result<()>) -> std::io::Result<()> {
    list.seek(SeekFrom::Start(0))?;
    let mut list = BufReader::with_capacity(1 << 16, list);
    let mut entry = [0; 4];
    loop {
        match list.read_exact(&mut entry) {
            Ok(()) => (),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        }
        let entry = u32::from_le_bytes(entry);
        each(entry & !CONTINUES, entry & CONTINUES == 0)?;
    }
}

/// The prefix of a corpus, given the prefix itself or one of its files.
pub(crate) fn prefix_of(path: &Path) -> PathBuf {
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("bin" | "idx") => path.with_extension(""),
        _ => path.to_path_buf(),
    }
}

/// Appends an ending. A prefix may contain dots, so `with_extension` would be wrong.
pub(crate) fn with_ending(prefix: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(prefix);
    name.push(ending);
    PathBuf::from(name)
}
