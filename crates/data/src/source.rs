//! Documents of files: plain text, JSON lines and Parquet, compressed or not.
//!
//! Everything is a stream: however large a file, no more of it is in memory than a document, and no document is longer than
//! [`DOCUMENT_BYTES_MAX`]. Plain text has no limit, since a long file comes in pieces. A place in the inputs is a file and a
//! number of pieces, so that work on them can be continued.

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

/// The longest document of a file that has several.
pub const DOCUMENT_BYTES_MAX: u64 = 64 << 20;
/// Plain text is cut at the first end of a line after so many bytes.
const PIECE_BYTES: usize = 64 << 10;
/// Plain text without ends of lines is cut here.
const PIECE_BYTES_MAX: usize = 1 << 20;
/// What is read of a file at once, and what is looked at to tell text from other things.
const BUFFER_BYTES: usize = 256 << 10;
/// Rows of Parquet that are read at once.
const ROWS: usize = 64;

/// Files with documents. A corpus may have a million of them, so a file is kept as little more than its name.
#[derive(Clone, Debug)]
pub struct Inputs {
    folders: Vec<PathBuf>,
    /// The names of all files, one after the other.
    names: Vec<u8>,
    files: Vec<Found>,
    field: String,
}

/// A file in a list of them.
#[derive(Clone, Copy, Debug)]
struct Found {
    folder: u32,
    name_bytes: u16,
    format: Format,
    name_at: u64,
    bytes: u64,
    modified_ns: u64,
}

/// A file with documents.
#[derive(Clone, Debug)]
pub struct InputFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its length, compressed or not.
    pub bytes: u64,
    modified_ns: u64,
    format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Text,
    Lines,
    /// Named like lines, but found in a folder, where it may be any JSON. Its beginning decides.
    LinesOrText,
    Parquet,
}

/// Some text of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The text. It may be empty.
    pub text: String,
    /// Whether the document ends with it.
    pub last: bool,
}

impl Inputs {
    /// Finds the files. A folder stands for all in it, sorted by path; links, and folders whose names begin with a dot, are left
    /// out. `field` is where JSON and Parquet have the text.
    pub fn new(paths: &[impl AsRef<Path>], field: &str) -> Result<Self> {
        let field = field.to_string();
        let mut inputs = Inputs { folders: Vec::new(), names: Vec::new(), files: Vec::new(), field };
        for path in paths.iter().map(AsRef::as_ref) {
            let kind = std::fs::metadata(path).map_err(Error::system(path))?;
            if kind.is_dir() {
                inputs.add_folder(path)?;
                continue;
            }
            let name = path.file_name().ok_or_else(|| Error::settings(format!("{} is no file", path.display())))?;
            let folder = inputs.folder(path.parent().unwrap_or(Path::new("")));
            inputs.add(folder, name, &kind, format_of(name));
        }
        inputs.names.shrink_to_fit();
        inputs.files.shrink_to_fit();
        match inputs.files.is_empty() {
            false => Ok(inputs),
            true => Err(Error::settings("there is no file in the inputs")),
        }
    }

    fn add_folder(&mut self, folder: &Path) -> Result<()> {
        let entries = std::fs::read_dir(folder).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
        let mut entries = entries.map_err(Error::system(folder))?;
        entries.sort_by_key(|entry| entry.file_name());
        let own = self.folder(folder);
        for entry in entries {
            let (path, name) = (entry.path(), entry.file_name());
            let kind = entry.metadata().map_err(Error::system(&path))?;
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

    /// The number of a folder that files are found in from now on.
    fn folder(&mut self, folder: &Path) -> u32 {
        self.folders.push(folder.to_path_buf());
        self.folders.len() as u32 - 1
    }

    fn add(&mut self, folder: u32, name: &OsStr, kind: &std::fs::Metadata, format: Format) {
        let modified = kind.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let name = name.as_encoded_bytes();
        self.files.push(Found {
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
        self.files.iter().map(|found| self.file(found))
    }

    fn file(&self, found: &Found) -> InputFile {
        let Found { folder, name_bytes, format, name_at, bytes, modified_ns } = *found;
        let name = &self.names[name_at as usize..][..usize::from(name_bytes)];
        InputFile { path: self.folders[folder as usize].join(OsStr::from_bytes(name)), bytes, modified_ns, format }
    }

    /// The length of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// What the inputs are known by: names, lengths and times of the files, and the field.
    pub fn hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.field.as_bytes());
        for file in self.files() {
            hasher.update(file.path.as_os_str().as_encoded_bytes());
            hasher.update(format!("\0{}\0{}\0", file.bytes, file.modified_ns).as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// All documents, from the first.
    pub fn pieces(&self) -> Pieces<'_> {
        self.pieces_from(Place::default())
    }

    /// All text, piece by piece, as a tokenizer learns from it.
    pub fn texts(&self) -> impl Iterator<Item = Result<String>> + Send + '_ {
        self.pieces().map(|piece| Ok(piece?.text))
    }

    pub(crate) fn pieces_from(&self, place: Place) -> Pieces<'_> {
        let read = self.files[..place.file.min(self.files.len())].iter().map(|file| file.bytes).sum();
        Pieces { inputs: self, place, skipped: 0, reader: None, bytes_read: Arc::new(AtomicU64::new(read)) }
    }
}

/// By a file's name, without the ending of a compression.
fn format_of(name: &OsStr) -> Format {
    let name = name.to_string_lossy().to_lowercase();
    let name = name.trim_end_matches(".gz").trim_end_matches(".zst");
    match name.rsplit_once('.').map(|(_, ending)| ending) {
        Some("jsonl" | "json") => Format::Lines,
        Some("parquet") => Format::Parquet,
        _ => Format::Text,
    }
}

/// A place between two pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Place {
    /// The file that is read.
    pub(crate) file: usize,
    /// How many of its pieces were read.
    pub(crate) pieces: u64,
}

/// The documents of inputs, in pieces. After an error there are no more.
pub struct Pieces<'a> {
    inputs: &'a Inputs,
    place: Place,
    skipped: u64,
    reader: Option<Reader>,
    bytes_read: Arc<AtomicU64>,
}

impl Pieces<'_> {
    /// Files that were left out, since they are no text.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// How much of the files was read.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    pub(crate) fn place(&self) -> Place {
        self.place
    }

    fn advance(&mut self) -> Result<Option<Piece>> {
        while let Some(found) = self.inputs.files.get(self.place.file) {
            if self.reader.is_none() {
                self.reader = Reader::open(self.inputs.file(found), &self.inputs.field, &self.bytes_read)?;
                match &mut self.reader {
                    Some(reader) => reader.skip(self.place.pieces)?,
                    None => self.skipped += 1,
                }
            }
            let piece = self.reader.as_mut().map(Reader::next).transpose()?.flatten();
            if piece.is_some() {
                self.place.pieces += 1;
                return Ok(piece);
            }
            self.reader = None;
            self.place = Place { file: self.place.file + 1, pieces: 0 };
        }
        Ok(None)
    }
}

impl Iterator for Pieces<'_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.advance().transpose();
        if let Some(Err(_)) = next {
            self.place.file = self.inputs.files.len();
        }
        next
    }
}

type Bytes = BufReader<Box<dyn Read + Send>>;

/// A file that is being read.
enum Reader {
    Text(Text),
    Lines(Lines),
    Parquet(Box<Column>),
}

impl Reader {
    /// `None` if it is no text.
    fn open(file: InputFile, field: &str, bytes_read: &Arc<AtomicU64>) -> Result<Option<Self>> {
        let path = file.path;
        if file.format == Format::Parquet {
            return Column::open(path, field, bytes_read).map(|column| Some(Reader::Parquet(Box::new(column))));
        }
        let mut bytes = decoded(&path, bytes_read).map_err(Error::system(&path))?;
        let beginning = bytes.fill_buf().map_err(Error::system(&path))?;
        let lines = match file.format {
            Format::Lines => true,
            Format::LinesOrText => begins_with_object(beginning),
            _ => false,
        };
        Ok(match lines {
            true => Some(Reader::Lines(Lines { path, bytes, field: field.to_string(), number: 0, line: Vec::new() })),
            false if beginning.contains(&0) => None,
            false => Some(Reader::Text(Text { path, bytes, left: Vec::new() })),
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
                // What a line says is of no interest here, and takes most of the time.
                Reader::Lines(lines) => drop(lines.advance()?),
                _ => drop(self.next()?),
            }
        }
        Ok(())
    }
}

/// The bytes of a file, without their compression.
fn decoded(path: &Path, bytes_read: &Arc<AtomicU64>) -> io::Result<Bytes> {
    let file = Counted { file: File::open(path)?, bytes_read: Arc::clone(bytes_read) };
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
    let bytes: Box<dyn Read + Send> = match ending.as_deref() {
        Some("gz") => Box::new(MultiGzDecoder::new(BufReader::with_capacity(BUFFER_BYTES, file))),
        Some("zst") => Box::new(zstd::Decoder::with_buffer(BufReader::with_capacity(BUFFER_BYTES, file))?),
        _ => Box::new(file),
    };
    Ok(BufReader::with_capacity(BUFFER_BYTES, bytes))
}

struct Counted {
    file: File,
    bytes_read: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(into)?;
        self.bytes_read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// Whether the first line is an object of its own, as JSON lines are.
fn begins_with_object(beginning: &[u8]) -> bool {
    let line = beginning.split(|&byte| byte == b'\n').next().unwrap_or_default();
    line.starts_with(b"{") && serde_json::from_slice::<IgnoredAny>(line).is_ok()
}

/// Plain text: one document, in pieces.
struct Text {
    path: PathBuf,
    bytes: Bytes,
    /// What was read, and is not yet given.
    left: Vec<u8>,
}

impl Text {
    fn next(&mut self) -> Result<Option<Piece>> {
        let fail = |error| Error::system(&self.path)(error);
        let cut = loop {
            let from = self.left.len().min(PIECE_BYTES);
            if let Some(end) = self.left[from..].iter().position(|&byte| byte == b'\n') {
                break from + end + 1;
            }
            if self.left.len() > PIECE_BYTES_MAX {
                break whole_characters(&self.left[..PIECE_BYTES_MAX]);
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
        let text = text_of(std::mem::replace(&mut self.left, rest));
        Ok(Some(Piece { text, last }))
    }
}

/// Where the last character begins, so that a cut does not go through it.
fn whole_characters(bytes: &[u8]) -> usize {
    let begins = |byte: &&u8| **byte & 0xc0 != 0x80;
    let after = bytes.iter().rev().take(4).position(|byte| begins(&byte)).map_or(0, |position| position + 1);
    bytes.len() - after
}

fn text_of(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// JSON lines: a document each.
pub(crate) struct Lines {
    path: PathBuf,
    bytes: Bytes,
    field: String,
    number: u64,
    line: Vec<u8>,
}

impl Lines {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let bytes = decoded(path, &Arc::default()).map_err(Error::system(path))?;
        Ok(Lines { path: path.to_path_buf(), bytes, field: String::new(), number: 0, line: Vec::new() })
    }

    /// Reads the next line that has anything in it.
    fn advance(&mut self) -> Result<bool> {
        loop {
            self.line.clear();
            self.number += 1;
            let mut limited = (&mut self.bytes).take(DOCUMENT_BYTES_MAX + 1);
            limited.read_until(b'\n', &mut self.line).map_err(Error::system(&self.path))?;
            if self.line.len() as u64 > DOCUMENT_BYTES_MAX {
                let problem = format!("the line is longer than {DOCUMENT_BYTES_MAX} bytes; divide it");
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
                let problem = format!("the line has no \"{}\"; name the field that has the text", self.field);
                Err(Error::document(&self.path, self.number, problem))
            }
        }
    }
}

/// The text of one field of an object. Nothing else of it is kept.
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

/// A column of texts of a Parquet file.
struct Column {
    path: PathBuf,
    file: SerializedFileReader<File>,
    column: usize,
    /// The level of a value that is there; 0 if all are.
    present: i16,
    group: usize,
    reader: Option<ColumnReaderImpl<ByteArrayType>>,
    rows: std::vec::IntoIter<Option<ByteArray>>,
    number: u64,
    bytes_read: Arc<AtomicU64>,
}

impl Column {
    fn open(path: PathBuf, field: &str, bytes_read: &Arc<AtomicU64>) -> Result<Self> {
        let file = File::open(&path).map_err(Error::system(&path))?;
        let file = SerializedFileReader::new(file).map_err(|error| Error::document(&path, 0, error))?;
        let schema = file.metadata().file_metadata().schema_descr_ptr();
        let column = schema.columns().iter().position(|column| column.path().string() == field);
        let Some(column) = column else {
            return Err(Error::document(
                &path,
                0,
                format!("there is no column \"{field}\"; name the one with the text"),
            ));
        };
        let kind = schema.column(column);
        if kind.physical_type() != Type::BYTE_ARRAY || kind.max_rep_level() > 0 {
            return Err(Error::document(&path, 0, format!("column \"{field}\" is not of texts")));
        }
        let (present, bytes_read) = (kind.max_def_level(), Arc::clone(bytes_read));
        let rows = Vec::new().into_iter();
        Ok(Column { path, file, column, present, group: 0, reader: None, rows, number: 0, bytes_read })
    }

    fn next(&mut self) -> Result<Option<Piece>> {
        loop {
            if let Some(row) = self.rows.next() {
                self.number += 1;
                let bytes = row.as_ref().map_or(&[][..], |row| row.data());
                if bytes.len() as u64 > DOCUMENT_BYTES_MAX {
                    let problem = format!("the text is longer than {DOCUMENT_BYTES_MAX} bytes; divide it");
                    return Err(Error::document(&self.path, self.number, problem));
                }
                return Ok(Some(Piece { text: String::from_utf8_lossy(bytes).into_owned(), last: true }));
            }
            if !self.read_rows().map_err(|error| Error::document(&self.path, self.number + 1, error))? {
                return Ok(None);
            }
        }
    }

    /// Reads some rows, if there are any left.
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
