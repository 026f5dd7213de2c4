//! Reading documents from files: plain text, JSON lines and Parquet, compressed or not.
//!
//! Files are streamed: at most one document is in memory, and no document is longer than [`DOCUMENT_BYTES_MAX`]. Plain text has no limit,
//! since a long file is read in pieces. A position in the inputs is a file and a number of pieces, so that interrupted work can resume.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use flate2::bufread::MultiGzDecoder;
use parquet::basic::Type;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::reader::{FileReader, SerializedFileReader};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::{Error, Result};

/// The longest document that is accepted in a JSON lines or Parquet file.
pub const DOCUMENT_BYTES_MAX: u64 = 64 << 20;
/// Plain text is split at the first line end after this many bytes.
const PIECE_BYTES: usize = 64 << 10;
/// Plain text without line ends is split after this many bytes.
const PIECE_BYTES_MAX: usize = 1 << 20;
/// How much of a file is read at once. The first buffer decides whether the file is text.
const BUFFER_BYTES: usize = 256 << 10;
/// The number of Parquet rows that are read at once.
const ROWS: usize = 64;

/// A list of input files. There may be millions, so an entry takes little more than the name of its file.
#[derive(Clone, Debug)]
pub struct Inputs {
    folders: Vec<PathBuf>,
    /// The names of all files, concatenated.
    names: Vec<u8>,
    files: Vec<FileEntry>,
    field: String,
}

#[derive(Clone, Copy, Debug)]
struct FileEntry {
    folder: u32,
    name_bytes: u16,
    format: Format,
    name_at: u64,
    bytes: u64,
    modified_ns: u64,
}

/// An input file.
#[derive(Clone, Debug)]
pub struct InputFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The length of the file on disk, before decompression.
    pub bytes: u64,
    modified_ns: u64,
    format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Text,
    Lines,
    /// A `.json` file in a folder, which may be JSON lines or any other JSON. Its first line decides.
    LinesOrText,
    Parquet,
}

/// A piece of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The text, which may be empty.
    pub text: String,
    /// Whether this is the last piece of its document.
    pub last: bool,
}

impl Inputs {
    /// Finds the input files. A folder stands for all files in it, sorted by path, without symbolic links and folders whose
    /// names start with a dot. `field` is the JSON field or Parquet column with the text.
    pub fn new(paths: &[impl AsRef<Path>], field: &str) -> Result<Self> {
        let field = field.to_string();
        let mut inputs = Inputs { folders: Vec::new(), names: Vec::new(), files: Vec::new(), field };
        for path in paths.iter().map(AsRef::as_ref) {
            let kind = std::fs::metadata(path).map_err(Error::io(path))?;
            if kind.is_dir() {
                inputs.add_folder(path)?;
                continue;
            }
            let name =
                path.file_name().ok_or_else(|| Error::invalid_argument(format!("{} is not a file", path.display())))?;
            let folder = inputs.add_parent(path.parent().unwrap_or(Path::new("")));
            inputs.add(folder, name, &kind, format_of(name));
        }
        inputs.names.shrink_to_fit();
        inputs.files.shrink_to_fit();
        match inputs.files.is_empty() {
            false => Ok(inputs),
            true => Err(Error::invalid_argument("there are no files in the inputs")),
        }
    }

    fn add_folder(&mut self, folder: &Path) -> Result<()> {
        let entries = std::fs::read_dir(folder).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
        let mut entries = entries.map_err(Error::io(folder))?;
        entries.sort_by_key(|entry| entry.file_name());
        let own = self.add_parent(folder);
        for entry in entries {
            let (path, name) = (entry.path(), entry.file_name());
            let kind = entry.metadata().map_err(Error::io(&path))?;
            if kind.is_dir() && !name.as_encoded_bytes().starts_with(b".") {
                self.add_folder(&path)?;
            } else if kind.is_file() {
                let is_json = path.extension().is_some_and(|ending| ending == "json");
                let format = match format_of(&name) {
                    Format::Lines if is_json => Format::LinesOrText,
                    format => format,
                };
                self.add(own, &name, &kind, format);
            }
        }
        Ok(())
    }

    /// Adds a folder, and returns its index.
    fn add_parent(&mut self, folder: &Path) -> u32 {
        self.folders.push(folder.to_path_buf());
        self.folders.len() as u32 - 1
    }

    fn add(&mut self, folder: u32, name: &OsStr, kind: &std::fs::Metadata, format: Format) {
        let modified = kind.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let name = name.as_encoded_bytes();
        self.files.push(FileEntry {
            folder,
            name_bytes: name.len() as u16,
            format,
            name_at: self.names.len() as u64,
            bytes: kind.len(),
            modified_ns: modified.map_or(0, |time| time.as_nanos() as u64),
        });
        self.names.extend_from_slice(name);
    }

    /// The files, in the order in which they are read.
    pub fn files(&self) -> impl Iterator<Item = InputFile> + '_ {
        self.files.iter().map(|entry| self.file(entry))
    }

    fn file(&self, entry: &FileEntry) -> InputFile {
        let FileEntry { folder, name_bytes, format, name_at, bytes, modified_ns } = *entry;
        let name = &self.names[name_at as usize..][..usize::from(name_bytes)];
        InputFile { path: self.folders[folder as usize].join(OsStr::from_bytes(name)), bytes, modified_ns, format }
    }

    /// The total length of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Identifies the inputs: the hash of the field, and of the paths, lengths and modification times of the files.
    pub fn hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.field.as_bytes());
        for file in self.files() {
            hasher.update(file.path.as_os_str().as_encoded_bytes());
            hasher.update(format!("\0{}\0{}\0", file.bytes, file.modified_ns).as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Reads all documents.
    pub fn pieces(&self) -> Pieces<'_> {
        self.pieces_from(Cursor::default())
    }

    /// Reads all text, piece by piece, for [`Tokenizer::train_bpe`](crate::Tokenizer::train_bpe).
    pub fn texts(&self) -> impl Iterator<Item = Result<String>> + Send + '_ {
        self.pieces().map(|piece| Ok(piece?.text))
    }

    pub(crate) fn pieces_from(&self, cursor: Cursor) -> Pieces<'_> {
        let read = self.files[..cursor.file.min(self.files.len())].iter().map(|file| file.bytes).sum();
        Pieces { inputs: self, cursor, skipped: 0, reader: None, bytes_read: Arc::new(AtomicU64::new(read)) }
    }
}

/// The format of a file, by its name. Ignores the endings of compressed files, `.gz` and `.zst`.
fn format_of(name: &OsStr) -> Format {
    let name = name.to_string_lossy().to_lowercase();
    let name = name.trim_end_matches(".gz").trim_end_matches(".zst");
    match name.rsplit_once('.').map(|(_, ending)| ending) {
        Some("jsonl" | "json") => Format::Lines,
        Some("parquet") => Format::Parquet,
        _ => Format::Text,
    }
}

/// A position between two pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Cursor {
    /// The index of the current file.
    pub(crate) file: usize,
    /// The number of pieces already read from it.
    pub(crate) pieces: u64,
}

/// An iterator over the pieces of all documents. It ends after an error.
pub struct Pieces<'a> {
    inputs: &'a Inputs,
    cursor: Cursor,
    skipped: u64,
    reader: Option<Reader>,
    bytes_read: Arc<AtomicU64>,
}

impl Pieces<'_> {
    /// The number of files that were skipped because they are not text.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// The number of bytes read from the files.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    pub(crate) fn cursor(&self) -> Cursor {
        self.cursor
    }

    fn advance(&mut self) -> Result<Option<Piece>> {
        while let Some(entry) = self.inputs.files.get(self.cursor.file) {
            if self.reader.is_none() {
                self.reader = Reader::open(self.inputs.file(entry), &self.inputs.field, &self.bytes_read)?;
                match &mut self.reader {
                    Some(reader) => reader.skip(self.cursor.pieces)?,
                    None => self.skipped += 1,
                }
            }
            let piece = self.reader.as_mut().map(Reader::next).transpose()?.flatten();
            if piece.is_some() {
                self.cursor.pieces += 1;
                return Ok(piece);
            }
            self.reader = None;
            self.cursor = Cursor { file: self.cursor.file + 1, pieces: 0 };
        }
        Ok(None)
    }
}

impl Iterator for Pieces<'_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.advance().transpose();
        if let Some(Err(_)) = next {
            self.cursor.file = self.inputs.files.len();
        }
        next
    }
}

type Bytes = BufReader<Box<dyn Read + Send>>;

/// A reader of one file.
enum Reader {
    Text(TextReader),
    Lines(LineReader),
    Parquet(Box<ParquetColumn>),
}

impl Reader {
    /// Opens a file. Returns `None` if it is not text.
    fn open(file: InputFile, field: &str, bytes_read: &Arc<AtomicU64>) -> Result<Option<Self>> {
        let path = file.path;
        if file.format == Format::Parquet {
            return ParquetColumn::open(path, field, bytes_read).map(|column| Some(Reader::Parquet(Box::new(column))));
        }
        let mut bytes = open_decoded(&path, bytes_read).map_err(Error::io(&path))?;
        let start = bytes.fill_buf().map_err(Error::io(&path))?;
        let lines = match file.format {
            Format::Lines => true,
            Format::LinesOrText => starts_with_object(start),
            _ => false,
        };
        Ok(match lines {
            true => {
                Some(Reader::Lines(LineReader { path, bytes, field: field.to_string(), number: 0, line: Vec::new() }))
            }
            false if start.contains(&0) => None,
            false => Some(Reader::Text(TextReader { path, bytes, left: Vec::new() })),
        })
    }

    fn next(&mut self) -> Result<Option<Piece>> {
        match self {
            Reader::Text(text) => text.next(),
            Reader::Lines(lines) => lines.next(),
            Reader::Parquet(column) => column.next(),
        }
    }

    fn skip(&mut self, pieces: u64) -> Result<()> {
        for _ in 0..pieces {
            match self {
                // Skipped lines are not parsed, which saves most of the time.
                Reader::Lines(lines) => drop(lines.advance()?),
                _ => drop(self.next()?),
            }
        }
        Ok(())
    }
}

/// Opens a file, and decompresses it while reading.
fn open_decoded(path: &Path, bytes_read: &Arc<AtomicU64>) -> io::Result<Bytes> {
    let file = CountingReader { file: File::open(path)?, bytes_read: Arc::clone(bytes_read) };
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
    let bytes: Box<dyn Read + Send> = match ending.as_deref() {
        Some("gz") => Box::new(MultiGzDecoder::new(BufReader::with_capacity(BUFFER_BYTES, file))),
        Some("zst") => Box::new(zstd::Decoder::with_buffer(BufReader::with_capacity(BUFFER_BYTES, file))?),
        _ => Box::new(file),
    };
    Ok(BufReader::with_capacity(BUFFER_BYTES, bytes))
}

struct CountingReader {
    file: File,
    bytes_read: Arc<AtomicU64>,
}

impl Read for CountingReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(into)?;
        self.bytes_read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// Whether the first line is a complete JSON object.
fn starts_with_object(start: &[u8]) -> bool {
    let line = start.split(|&byte| byte == b'\n').next().unwrap_or_default();
    line.starts_with(b"{") && serde_json::from_slice::<IgnoredAny>(line).is_ok()
}

/// Reads plain text as one document in pieces.
struct TextReader {
    path: PathBuf,
    bytes: Bytes,
    /// Bytes that were read but not yet returned.
    left: Vec<u8>,
}

impl TextReader {
    fn next(&mut self) -> Result<Option<Piece>> {
        let fail = |error| Error::io(&self.path)(error);
        let cut = loop {
            let from = self.left.len().min(PIECE_BYTES);
            if let Some(end) = self.left[from..].iter().position(|&byte| byte == b'\n') {
                break from + end + 1;
            }
            if self.left.len() > PIECE_BYTES_MAX {
                break last_character_start(&self.left[..PIECE_BYTES_MAX]);
            }
            let more = self.bytes.fill_buf().map_err(fail)?;
            let length = more.len();
            if length == 0 {
                break self.left.len();
            }
            self.left.extend_from_slice(more);
            self.bytes.consume(length);
        };
        if cut == 0 {
            return Ok(None);
        }
        let last = cut == self.left.len() && self.bytes.fill_buf().map_err(fail)?.is_empty();
        let rest = self.left.split_off(cut);
        let text = to_text(std::mem::replace(&mut self.left, rest));
        Ok(Some(Piece { text, last }))
    }
}

/// The start of the last UTF-8 character, which is a safe place to split.
fn last_character_start(bytes: &[u8]) -> usize {
    let is_start = |byte: &&u8| **byte & 0xc0 != 0x80;
    let after = bytes.iter().rev().take(4).position(|byte| is_start(&byte)).map_or(0, |position| position + 1);
    bytes.len() - after
}

fn to_text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// Reads JSON lines, each a document.
pub(crate) struct LineReader {
    path: PathBuf,
    bytes: Bytes,
    field: String,
    number: u64,
    line: Vec<u8>,
}

impl LineReader {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let bytes = open_decoded(path, &Arc::default()).map_err(Error::io(path))?;
        Ok(LineReader { path: path.to_path_buf(), bytes, field: String::new(), number: 0, line: Vec::new() })
    }

    /// Reads the next line that is not empty. Returns false at the end of the file.
    fn advance(&mut self) -> Result<bool> {
        loop {
            self.line.clear();
            self.number += 1;
            let mut limited = (&mut self.bytes).take(DOCUMENT_BYTES_MAX + 1);
            limited.read_until(b'\n', &mut self.line).map_err(Error::io(&self.path))?;
            if self.line.len() as u64 > DOCUMENT_BYTES_MAX {
                let problem = format!("the line is longer than {DOCUMENT_BYTES_MAX} bytes; split the document");
                return Err(Error::document(&self.path, self.number, problem));
            }
            match self.line.trim_ascii().is_empty() {
                true if self.line.is_empty() => return Ok(false),
                true => continue,
                false => return Ok(true),
            }
        }
    }

    /// The next line and its number.
    pub(crate) fn line(&mut self) -> Result<Option<(u64, &[u8])>> {
        Ok(self.advance()?.then_some((self.number, &self.line[..])))
    }

    fn next(&mut self) -> Result<Option<Piece>> {
        if !self.advance()? {
            return Ok(None);
        }
        let mut json = serde_json::Deserializer::from_slice(&self.line);
        let text = Field(&self.field).deserialize(&mut json).and_then(|text| json.end().map(|()| text));
        match text.map_err(|error| Error::document(&self.path, self.number, error))? {
            Some(text) => Ok(Some(Piece { text, last: true })),
            None => {
                let problem = format!("the line has no \"{}\"; give the field with the text (--field)", self.field);
                Err(Error::document(&self.path, self.number, problem))
            }
        }
    }
}

/// Deserializes the text of one field of an object, and ignores the rest.
struct Field<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> std::result::Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "an object with a string \"{}\"", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut text = None;
        while let Some(name) = map.next_key::<std::borrow::Cow<'de, str>>()? {
            match name == self.0 {
                true => text = Some(map.next_value()?),
                false => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(text)
    }
}

/// Reads a text column of a Parquet file.
struct ParquetColumn {
    path: PathBuf,
    file: SerializedFileReader<File>,
    column: usize,
    /// The definition level of a value that is not null, or 0 if the column has no nulls.
    present: i16,
    group: usize,
    reader: Option<ColumnReaderImpl<ByteArrayType>>,
    rows: std::vec::IntoIter<Option<ByteArray>>,
    number: u64,
    bytes_read: Arc<AtomicU64>,
}

impl ParquetColumn {
    fn open(path: PathBuf, field: &str, bytes_read: &Arc<AtomicU64>) -> Result<Self> {
        let file = File::open(&path).map_err(Error::io(&path))?;
        let file = SerializedFileReader::new(file).map_err(|error| Error::document(&path, 0, error))?;
        let schema = file.metadata().file_metadata().schema_descr_ptr();
        let column = schema.columns().iter().position(|column| column.path().string() == field);
        let Some(column) = column else {
            return Err(Error::document(
                &path,
                0,
                format!("there is no column \"{field}\"; give the column with the text (--field)"),
            ));
        };
        let kind = schema.column(column);
        if kind.physical_type() != Type::BYTE_ARRAY || kind.max_rep_level() > 0 {
            return Err(Error::document(&path, 0, format!("column \"{field}\" does not contain text")));
        }
        let (present, bytes_read) = (kind.max_def_level(), Arc::clone(bytes_read));
        let rows = Vec::new().into_iter();
        Ok(ParquetColumn { path, file, column, present, group: 0, reader: None, rows, number: 0, bytes_read })
    }

    fn next(&mut self) -> Result<Option<Piece>> {
        loop {
            if let Some(row) = self.rows.next() {
                self.number += 1;
                let bytes = row.as_ref().map_or(&[][..], |row| row.data());
                if bytes.len() as u64 > DOCUMENT_BYTES_MAX {
                    let problem = format!("the text is longer than {DOCUMENT_BYTES_MAX} bytes; split the document");
                    return Err(Error::document(&self.path, self.number, problem));
                }
                return Ok(Some(Piece { text: String::from_utf8_lossy(bytes).into_owned(), last: true }));
            }
            if !self.read_rows().map_err(|error| Error::document(&self.path, self.number + 1, error))? {
                return Ok(None);
            }
        }
    }

    /// Reads some rows. Returns false at the end of the file.
    fn read_rows(&mut self) -> parquet::errors::Result<bool> {
        let Some(reader) = &mut self.reader else {
            if self.group == self.file.num_row_groups() {
                return Ok(false);
            }
            let group = self.file.get_row_group(self.group)?;
            if let ColumnReader::ByteArrayColumnReader(reader) = group.get_column_reader(self.column)? {
                self.reader = Some(reader);
            }
            self.group += 1;
            return Ok(true);
        };
        let (mut levels, mut values) = (Vec::new(), Vec::new());
        let (rows, ..) = reader.read_records(ROWS, (self.present > 0).then_some(&mut levels), None, &mut values)?;
        if rows == 0 {
            let length = self.file.metadata().row_group(self.group - 1).compressed_size();
            self.bytes_read.fetch_add(u64::try_from(length).unwrap_or(0), Ordering::Relaxed);
            self.reader = None;
            return Ok(true);
        }
        let mut values = values.into_iter();
        let all: Vec<_> = match self.present {
            0 => values.map(Some).collect(),
            present => levels.iter().map(|&level| if level == present { values.next() } else { None }).collect(),
        };
        self.rows = all.into_iter();
        Ok(true)
    }
}
