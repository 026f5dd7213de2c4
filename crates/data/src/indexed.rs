//! Tokens on disk, in the layout of Megatron-LM's indexed datasets, which other trainers read and write too.
//!
//! `prefix.bin` has the tokens of all documents, one after another and nothing else. `prefix.idx` says where each begins: a
//! magic number, a version, the tokens' type, two counts, and then, of each sequence, its length and its place, and of each
//! document the number of its first sequence. A document is one sequence here, or several if it was long. Files that have only
//! tokens, as nanoGPT writes them, can be read as well.
//!
//! Files are mapped into memory, so that opening costs the same for a thousand tokens and for a trillion. An index is not
//! trusted: its counts are held against the files' lengths, a sample of its entries is looked at when it is opened, and every
//! entry when it is used. Reading tokens needs no index at all.

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
/// From this many tokens on, Megatron-LM writes four bytes for each.
const LARGE_VOCABULARY: u64 = 65_500;
/// How many entries of an index are looked at when it is opened.
const SAMPLED: u64 = 1_000;
/// The bit of a length in a [`Writer`]'s list that says that its document goes on.
const CONTINUES: u32 = 1 << 31;

/// How a token is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// One byte.
    U8,
    /// Two bytes, signed.
    I16,
    /// Two bytes.
    U16,
    /// Four bytes, signed.
    I32,
    /// Four bytes.
    U32,
    /// Eight bytes, signed.
    I64,
}

impl TokenType {
    /// What Megatron-LM takes for a vocabulary of so many tokens.
    pub fn of_vocabulary(vocabulary: u64) -> Self {
        if vocabulary < LARGE_VOCABULARY { TokenType::U16 } else { TokenType::I32 }
    }

    /// The bytes of a token.
    pub fn bytes(self) -> usize {
        match self {
            TokenType::U8 => 1,
            TokenType::I16 | TokenType::U16 => 2,
            TokenType::I32 | TokenType::U32 => 4,
            TokenType::I64 => 8,
        }
    }

    /// Adds tokens as they are kept. None of them is beyond the type's range: types are chosen by the vocabulary.
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

    fn of_code(code: u8) -> Option<Self> {
        let all = [TokenType::U8, TokenType::I16, TokenType::I32, TokenType::I64, TokenType::U16];
        all.into_iter().find(|kind| kind.code() == Some(code))
    }

    /// Reads tokens; whether all of them are in the range of tokens.
    fn read(self, bytes: &[u8], out: &mut [u32]) -> bool {
        let mut negative = 0;
        match self {
            TokenType::U8 => bytes.iter().zip(out).for_each(|(&byte, out)| *out = u32::from(byte)),
            TokenType::U16 => each(bytes, out, |bytes| u32::from(u16::from_le_bytes(bytes))),
            TokenType::U32 => each(bytes, out, u32::from_le_bytes),
            TokenType::I16 => each(bytes, out, |bytes| {
                let token = i16::from_le_bytes(bytes);
                negative |= i64::from(token);
                token as u32
            }),
            TokenType::I32 => each(bytes, out, |bytes| {
                let token = i32::from_le_bytes(bytes);
                negative |= i64::from(token);
                token as u32
            }),
            TokenType::I64 => each(bytes, out, |bytes| {
                let token = i64::from_le_bytes(bytes);
                negative |= token | -i64::from(token > i64::from(u32::MAX));
                token as u32
            }),
        }
        negative >= 0
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [u32], mut token: impl FnMut([u8; N]) -> u32) {
    let (tokens, _) = bytes.as_chunks::<N>();
    tokens.iter().zip(out).for_each(|(&bytes, out)| *out = token(bytes));
}

/// The tokens of documents, on disk.
#[derive(Debug)]
pub struct Corpus {
    path: PathBuf,
    kind: TokenType,
    tokens: Map,
    index: Option<Index>,
}

impl Corpus {
    /// Opens `prefix.bin` with `prefix.idx`, by the prefix or by one of the two names.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let prefix = prefix_of(path.as_ref());
        let (path, index) = (with_ending(&prefix, ".bin"), with_ending(&prefix, ".idx"));
        if path.is_file() && !index.exists() {
            let problem = "it has no .idx beside it; if it has nothing but tokens, as nanoGPT's, say how long they are: data.token_bytes = 2";
            return Err(Error::corpus(&path, problem));
        }
        let (kind, index) = Index::open(&index)?;
        let corpus = Corpus { kind, tokens: Map::open(&path)?, index: Some(index), path };
        corpus.check_ends()?;
        Ok(corpus)
    }

    /// Opens a file of nothing but unsigned tokens of 1, 2 or 4 bytes, as one document.
    pub fn raw(path: impl AsRef<Path>, token_bytes: usize) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let kind = match token_bytes {
            1 => TokenType::U8,
            2 => TokenType::U16,
            4 => TokenType::U32,
            _ => return Err(Error::corpus(&path, format!("raw tokens have 1, 2 or 4 bytes, not {token_bytes}"))),
        };
        let corpus = Corpus { kind, tokens: Map::open(&path)?, index: None, path };
        match corpus.tokens.bytes().len() % token_bytes {
            0 => Ok(corpus),
            _ => Err(Error::corpus(&corpus.path, format!("its length is no multiple of {token_bytes} bytes"))),
        }
    }

    /// The file with the tokens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How tokens are kept.
    pub fn token_type(&self) -> TokenType {
        self.kind
    }

    /// How many tokens there are.
    pub fn tokens(&self) -> u64 {
        (self.tokens.bytes().len() / self.kind.bytes()) as u64
    }

    /// How many documents there are.
    pub fn documents(&self) -> u64 {
        self.index.as_ref().map_or(1, |index| index.documents - 1)
    }

    /// The tokens that are a document's.
    pub fn document(&self, number: u64) -> Result<Range<u64>> {
        if number >= self.documents() {
            let problem = format!("there is no document {number}; there are {}", self.documents());
            return Err(Error::corpus(&self.path, problem));
        }
        let Some(index) = &self.index else { return Ok(0..self.tokens()) };
        let (first, end) = (index.first_sequence(number), index.first_sequence(number + 1));
        if first > end || end > index.sequences {
            let problem =
                format!("document {number} is of sequences {first} to {end}, and there are {}", index.sequences);
            return Err(Error::corpus(&index.path, problem));
        }
        let begin = if first == index.sequences { self.tokens() } else { self.sequence(first)?.start };
        (first..end).try_fold(begin..begin, |range, sequence| Ok(range.start..self.sequence(sequence)?.end))
    }

    /// Reads as many tokens as `out` has places, whichever documents they are of.
    pub fn read(&self, from: u64, out: &mut [u32]) -> Result<()> {
        let outside = || {
            let problem = format!("{} tokens from {from} on are asked for, and it has {}", out.len(), self.tokens());
            Error::corpus(&self.path, problem)
        };
        let size = self.kind.bytes();
        let begin = usize::try_from(from).ok().and_then(|from| from.checked_mul(size)).ok_or_else(outside)?;
        let end = begin.checked_add(out.len() * size).ok_or_else(outside)?;
        let bytes = self.tokens.bytes().get(begin..end).ok_or_else(outside)?;
        match self.kind.read(bytes, out) {
            true => Ok(()),
            false => {
                let problem =
                    format!("a token between {from} and {} is negative or beyond 32 bits", from + out.len() as u64);
                Err(Error::corpus(&self.path, problem))
            }
        }
    }

    /// Looks at every entry of the index. Opening looks at some.
    pub fn check(&self) -> Result<()> {
        (0..self.documents()).try_for_each(|number| self.document(number).map(drop))
    }

    /// The tokens of a sequence, which has to end where the next one begins: only then is the file one stream.
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
                "sequence {number} begins at byte {pointer}, and the tokens have {bytes} of {size} each"
            ));
        }
        match pointer + length * size == next {
            true => Ok(pointer / size..next / size),
            false => fail(format!(
                "sequence {number} has {length} tokens from byte {pointer} on, and what follows begins at {next}; only tokens \
                 that stand one after another can be read, so write the corpus anew in order"
            )),
        }
    }

    /// What can be said of an index without reading all of it.
    fn check_ends(&self) -> Result<()> {
        let Some(index) = &self.index else { return Ok(()) };
        let fail = |problem: String| Err(Error::corpus(&index.path, problem));
        if index.first_sequence(0) != 0 || index.first_sequence(index.documents - 1) != index.sequences {
            return fail(format!("its documents do not begin with sequence 0 and end with {}", index.sequences));
        }
        match index.sequences {
            0 if !self.tokens.bytes().is_empty() => {
                return fail("it knows of no sequence, and there are tokens".into());
            }
            0 => return Ok(()),
            _ if index.pointer(0) != 0 => return fail("its first sequence is not where the tokens begin".into()),
            _ => (),
        }
        spread(index.sequences).try_for_each(|number| self.sequence(number).map(drop))?;
        spread(index.documents - 1).try_for_each(|number| self.document(number).map(drop))
    }
}

/// The first and last of so many things, and some between.
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
    /// One more than there are: the last entry says where the last document ends.
    documents: u64,
}

impl Index {
    fn open(path: &Path) -> Result<(TokenType, Self)> {
        let map = Map::open(path)?;
        let fail = |problem: String| Err(Error::corpus(path, problem));
        let Some((header, rest)) = map.bytes().split_at_checked(HEADER_BYTES) else {
            return fail("it is too short for an index of tokens".into());
        };
        if !header.starts_with(MAGIC) {
            return fail("it is no index of tokens (MMIDIDX)".into());
        }
        let (version, sequences, documents) = (number_at(header, 9), number_at(header, 18), number_at(header, 26));
        if version != VERSION {
            return fail(format!("it is of version {version}, and version {VERSION} can be read"));
        }
        let Some(kind) = TokenType::of_code(header[17]) else {
            return fail(format!("its data are of type {}, which is none of tokens", header[17]));
        };
        if documents == 0 {
            return fail("it has no end of the last document".into());
        }
        let expected = u128::from(sequences) * 12 + u128::from(documents) * 8;
        match rest.len() as u128 == expected {
            true => Ok((kind, Index { path: path.to_path_buf(), map, sequences, documents })),
            false => fail(format!(
                "{sequences} sequences and {documents} ends of documents need {expected} bytes after the header, and there are {}",
                rest.len()
            )),
        }
    }

    fn length(&self, sequence: u64) -> i32 {
        self.entry(HEADER_BYTES as u64 + sequence * 4, i32::from_le_bytes)
    }

    // Negative numbers become so large that they fail every check.
    fn pointer(&self, sequence: u64) -> u64 {
        self.entry(HEADER_BYTES as u64 + self.sequences * 4 + sequence * 8, u64::from_le_bytes)
    }

    fn first_sequence(&self, document: u64) -> u64 {
        self.entry(HEADER_BYTES as u64 + self.sequences * 12 + document * 8, u64::from_le_bytes)
    }

    /// Callers ask for entries within the counts, for which the file has room.
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

/// A file in memory, of which only what is looked at takes room.
#[derive(Debug)]
struct Map(Mmap);

impl Map {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::system(path))?;
        // SAFETY: the bytes are only read, as bytes, and any bytes will do. The writers of this crate never change a file under
        // its final name, they rename a new one over it; whoever else cuts a corpus short while it is read loses the process.
        #[allow(unsafe_code, reason = "the one place that maps memory")]
        let map = unsafe { Mmap::map(&file) };
        map.map(Map).map_err(Error::system(path))
    }

    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Writes a corpus, which appears when it is finished.
#[derive(Debug)]
pub struct Writer {
    prefix: PathBuf,
    kind: TokenType,
    tokens: BufWriter<File>,
    lengths: BufWriter<File>,
    bytes: Vec<u8>,
}

impl Writer {
    /// Begins a corpus of tokens of a vocabulary of that size.
    pub fn create(prefix: impl AsRef<Path>, vocabulary: u64) -> Result<Self> {
        let prefix = prefix.as_ref().to_path_buf();
        let open = |ending| {
            let path = with_ending(&prefix, ending);
            let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
            file.map(BufWriter::new).map_err(Error::system(&path))
        };
        let (tokens, lengths) = (open(TOKENS_PART)?, open(LENGTHS_PART)?);
        Ok(Writer { kind: TokenType::of_vocabulary(vocabulary), tokens, lengths, bytes: Vec::new(), prefix })
    }

    /// Adds a document.
    pub fn document(&mut self, tokens: &[u32]) -> Result<()> {
        let path = with_ending(&self.prefix, TOKENS_PART);
        if self.kind == TokenType::U16 && tokens.iter().any(|&token| token > u32::from(u16::MAX)) {
            return Err(Error::corpus(&path, "a token is beyond the vocabulary that the corpus was begun with"));
        }
        let length =
            list_entry(tokens.len(), true).ok_or_else(|| Error::corpus(&path, "a document has 2^31 tokens"))?;
        self.bytes.clear();
        self.kind.extend(&mut self.bytes, tokens);
        self.tokens.write_all(&self.bytes).map_err(Error::system(&path))?;
        self.lengths.write_all(&length.to_le_bytes()).map_err(Error::system(&path))
    }

    /// Writes the index, and gives both files their names.
    pub fn finish(self) -> Result<()> {
        for (mut file, ending) in [(self.tokens, TOKENS_PART), (self.lengths, LENGTHS_PART)] {
            let path = with_ending(&self.prefix, ending);
            file.flush().and_then(|()| file.get_ref().sync_all()).map_err(Error::system(&path))?;
        }
        publish(&self.prefix, self.kind)
    }
}

/// The names of what is not finished.
pub(crate) const TOKENS_PART: &str = ".bin.part";
/// Lengths of sequences, four bytes each, as [`list_entry`] makes them.
pub(crate) const LENGTHS_PART: &str = ".lengths.part";
const INDEX_PART: &str = ".idx.part";

/// What the list of lengths has of a sequence.
pub(crate) fn list_entry(tokens: usize, last_of_document: bool) -> Option<u32> {
    let length = u32::try_from(tokens).ok().filter(|&length| length < CONTINUES)?;
    Some(if last_of_document { length } else { length | CONTINUES })
}

/// Makes a corpus of its parts. It can be called again if it was interrupted: what is done is left as it is.
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
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::system(&lengths)(error)),
        _ => Ok(()),
    }
}

/// Renames a file, on the disk as well.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<()> {
    std::fs::rename(from, to).map_err(Error::system(from))?;
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(Error::system(folder))
}

/// Writes an index from a list of lengths, which is read once for each of the index's three parts.
fn write_index(lengths: &Path, path: &Path, kind: TokenType) -> Result<()> {
    let mut list = File::open(lengths).map_err(Error::system(lengths))?;
    let (mut sequences, mut documents) = (0_u64, 0_u64);
    for_each_length(&mut list, |_, last| {
        sequences += 1;
        documents += u64::from(last);
        Ok(())
    })
    .map_err(Error::system(lengths))?;
    let code = kind.code().ok_or_else(|| Error::corpus(path, "an index has no type for unsigned tokens of 4 bytes"))?;
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
    written.map_err(Error::system(path))
}

/// Goes through a list from its beginning: lengths, and whether a document ends with them.
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

/// The prefix that is meant by a prefix, or by the name of a file of a corpus.
pub(crate) fn prefix_of(path: &Path) -> PathBuf {
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("bin" | "idx") => path.with_extension(""),
        _ => path.to_path_buf(),
    }
}

/// A prefix may have dots in it, so that its ending is added, not replaced.
pub(crate) fn with_ending(prefix: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(prefix);
    name.push(ending);
    PathBuf::from(name)
}
