//! The format of an input, and its reader.

use std::io::{BufReader, Read, Seek, SeekFrom};
use std::str::FromStr;

use super::compression::{is_compressed, uncompressed_name, unpack};
use super::frames::ZstdFrames;
use super::{binary, text};
use crate::cmt::FILE_MAGIC;
use crate::{CmtReader, FilePosition, TraceError, TraceReader};

/// The readable formats.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// cachemate's own format (`docs/formats.md`): binary, compressed in blocks.
    Cmt,
    /// The text of Valgrind's lackey with `--trace-mem=yes`.
    Lackey,
    /// The text of Dinero (`.din`): one access per line.
    Din,
    /// Comma-separated values: one access per line.
    Csv,
    /// The text of DynamoRIO's `drmemtrace -tool view`.
    DrMemTrace,
    /// Addresses only, as 64-bit little-endian numbers.
    U64,
    /// ChampSim's instructions, 64 bytes each.
    ChampSim,
    /// libCacheSim's requests, 24 bytes each, for objects of one size.
    OracleGeneral,
    /// The same for objects of any size, each counted as one line.
    OracleGeneralUnit,
}

impl Format {
    /// Every format.
    pub const ALL: [Format; 9] = [
        Format::Cmt,
        Format::Lackey,
        Format::Din,
        Format::Csv,
        Format::DrMemTrace,
        Format::U64,
        Format::ChampSim,
        Format::OracleGeneral,
        Format::OracleGeneralUnit,
    ];

    /// The name that [`Format::from_str`] reads.
    pub fn name(self) -> &'static str {
        match self {
            Format::Cmt => "cmt",
            Format::Lackey => "lackey",
            Format::Din => "din",
            Format::Csv => "csv",
            Format::DrMemTrace => "drmemtrace",
            Format::U64 => "u64",
            Format::ChampSim => "champsim",
            Format::OracleGeneral => "oracle-general",
            Format::OracleGeneralUnit => "oracle-general-unit",
        }
    }

    /// The format that the name shows. `.bin` and `.raw` say nothing of the content, so the extension before them
    /// decides, as in `x.oracleGeneral.bin`.
    fn format_by_extension(file: &str) -> Option<Format> {
        let name = uncompressed_name(file).to_ascii_lowercase();
        let name = name
            .strip_suffix(".bin")
            .or_else(|| name.strip_suffix(".raw"))
            .unwrap_or(&name);
        match name.rsplit_once('.')?.1 {
            "cmt" => Some(Format::Cmt),
            "lackey" => Some(Format::Lackey),
            "din" => Some(Format::Din),
            "csv" => Some(Format::Csv),
            "drmemtrace" => Some(Format::DrMemTrace),
            "u64" => Some(Format::U64),
            "champsim" | "champsimtrace" => Some(Format::ChampSim),
            "oraclegeneral" => Some(Format::OracleGeneral),
            _ => None,
        }
    }

    /// Whether entries of a fixed size follow one another, without a mark by which a wrong format is noticed.
    fn is_unmarked_binary(self) -> bool {
        matches!(
            self,
            Format::U64 | Format::ChampSim | Format::OracleGeneral | Format::OracleGeneralUnit
        )
    }

    /// Size of an entry, if each is one record; `None` if records can only be counted by reading them.
    fn record_bytes(self) -> Option<u64> {
        match self {
            Format::U64 => Some(8),
            Format::OracleGeneral | Format::OracleGeneralUnit => Some(24),
            _ => None,
        }
    }

    /// The format that the first bytes show, if they fit no other.
    fn format_by_content(start: &[u8]) -> Option<Format> {
        if start.starts_with(&FILE_MAGIC) {
            return Some(Format::Cmt);
        }

        let text = start.utf8_chunks().next()?.valid();
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        // The end of the window may truncate the last line.
        let whole_lines = text.rsplit_once('\n')?.0;
        let is_view = |line: &str| line.contains(" byte(s) @ 0x") || line.contains("<record#>: T");
        if whole_lines.lines().any(is_view) {
            return Some(Format::DrMemTrace);
        }
        if is_dinero(whole_lines) {
            return Some(Format::Din);
        }

        let line = whole_lines
            .lines()
            .find(|line| !line.starts_with("==") && !line.trim().is_empty())?;
        let mut words = line.split_ascii_whitespace();
        match (words.next()?, words.next()?) {
            ("I" | "L" | "S" | "M", rest) if rest.contains(',') => Some(Format::Lackey),
            ("SB", address) if super::lines::parse_hex(address.as_bytes()).is_some() => {
                Some(Format::Lackey)
            }
            _ => None,
        }
    }
}

/// Whether every line is a label and a hexadecimal address, and one address shows that it is hexadecimal: other tools
/// write a small number and a decimal address, which would be read as Dinero without an error.
fn is_dinero(whole_lines: &str) -> bool {
    let mut shows_base = false;
    let mut is_empty = true;
    for line in whole_lines.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(label), address) = (words.next(), words.next().unwrap_or_default()) else {
            continue;
        };
        if label.starts_with('#') {
            continue;
        }

        let is_label = ["0", "1", "2", "r", "w", "i"].contains(&label);
        if !is_label || super::lines::parse_hex(address.as_bytes()).is_none() {
            return false;
        }
        let is_letter_label = ["r", "w", "i"].contains(&label);
        shows_base |= is_letter_label || address.bytes().any(|byte| !byte.is_ascii_digit());
        is_empty = false;
    }

    shows_base && !is_empty
}

impl FromStr for Format {
    type Err = TraceError;
    fn from_str(name: &str) -> Result<Format, TraceError> {
        let lower_name = name.to_ascii_lowercase().replace('_', "-");
        let lower_name = if lower_name == "oraclegeneral" {
            "oracle-general".to_string()
        } else {
            lower_name
        };
        let named_format = Format::ALL
            .into_iter()
            .find(|format| format.name() == lower_name);
        named_format.ok_or_else(|| {
            crate::unknown_name_error(
                "format",
                name,
                Format::ALL.map(|format| format.name().to_string()),
            )
        })
    }
}

/// Opens a trace: a regular file, or `-` for standard input. Without a format, the content decides, then the extension.
/// An input that is itself compressed by gzip, xz or zstd is decompressed while it is read.
///
/// # Errors
/// [`TraceError`] if it cannot be opened, its format cannot be determined, or its start is invalid.
pub fn open(path: &str, format: Option<Format>) -> Result<Box<dyn TraceReader>, TraceError> {
    if path == "-" {
        return open_input(Box::new(std::io::stdin()), "standard input", format);
    }
    open_near(path, format, 0).map(|(_, reader)| reader)
}

/// Opens a file at or before a record, and returns the number of the first record that will be read. This is 0 unless the
/// reader knows its totals immediately, as those of complete recordings and of uncompressed records of one size do.
///
/// # Errors
/// As [`open`].
pub fn open_near(
    path: &str,
    format: Option<Format>,
    record: u64,
) -> Result<(u64, Box<dyn TraceReader>), TraceError> {
    let mut file =
        cachemate_files::open_plain(path.as_ref()).map_err(TraceError::io_error(path, "open"))?;
    let mut start = read_start(&mut file, path)?;
    if start.starts_with(&FILE_MAGIC) && format.is_none_or(|format| format == Format::Cmt) {
        let mut reader = CmtReader::open(path)?;
        return Ok((reader.seek_near(record)?, Box::new(reader)));
    }

    let read_error = || TraceError::io_error(path, "read");
    let mut frames = None;
    if is_compressed(&start) {
        let Some(divided) = ZstdFrames::find(&file) else {
            file.rewind().map_err(read_error())?;
            return Ok((0, open_input(Box::new(file), path, format)?));
        };
        start = read_start(&mut divided.read_from(0).map_err(read_error())?, path)?;
        frames = Some(divided);
    }
    let format = choose_format(&start, path, format)?;
    let content_bytes = match &frames {
        Some(frames) => frames.content_bytes(),
        None => file.metadata().map_err(read_error())?.len(),
    };
    // A file that ends within a record is read in order, up to the error.
    let is_complete = |bytes: &u64| content_bytes > 0 && content_bytes.is_multiple_of(*bytes);
    let record_bytes = format.record_bytes().filter(is_complete);
    let file_records = record_bytes.map(|bytes| content_bytes / bytes);
    let first_record = record.min(file_records.unwrap_or(0));
    let offset = first_record * record_bytes.unwrap_or(0);
    let part = FilePart {
        file: path.to_string(),
        offset,
        file_records,
    };
    let reader = match frames {
        Some(frames) => {
            let input = frames.read_from(offset).map_err(read_error())?;
            build_reader(format, &start, input, part)?
        }
        None => {
            file.seek(SeekFrom::Start(offset)).map_err(read_error())?;
            build_reader(format, &start, file, part)?
        }
    };
    Ok((first_record, reader))
}

/// Does the same as [`open`], for a stream; `file` is its name in errors.
pub fn open_input(
    mut input: Box<dyn Read + Send>,
    file: &str,
    format: Option<Format>,
) -> Result<Box<dyn TraceReader>, TraceError> {
    let mut start = read_start(&mut input, file)?;
    if is_compressed(&start) {
        let whole_input = std::io::Cursor::new(start.clone()).chain(input);
        input = unpack(&start, whole_input).map_err(TraceError::io_error(file, "unpack"))?;
        start = read_start(&mut input, file)?;
    }
    let format = choose_format(&start, file, format)?;
    let input = std::io::Cursor::new(start.clone()).chain(input);
    let part = FilePart {
        file: file.to_string(),
        offset: 0,
        file_records: None,
    };
    build_reader(format, &start, input, part)
}

/// The given format, or the one that the first bytes or the name show.
///
/// # Errors
/// The format is unknown, or the first bytes do not have it.
fn choose_format(start: &[u8], file: &str, format: Option<Format>) -> Result<Format, TraceError> {
    let chosen_format = format
        .or_else(|| Format::format_by_content(start))
        .or_else(|| Format::format_by_extension(file));

    let position = FilePosition::Byte(0);
    let refusal = |found: String, expected: String| {
        Err(TraceError::format_error(file, position, found, expected))
    };
    if start.is_empty() {
        return refusal("nothing".to_string(), "a trace".to_string());
    }
    if is_archive(start) {
        let found = "a tar archive".to_string();
        return refusal(found, "a trace (unpack the archive first)".to_string());
    }

    let Some(format) = chosen_format else {
        let shown_bytes = &start[..start.len().min(16)];
        let expected = format!(
            "a known format; name one of {} with --format",
            Format::ALL.map(Format::name).join(", ")
        );
        return refusal(format!("'{}'", shown_bytes.escape_ascii()), expected);
    };
    if format.is_unmarked_binary() && is_text(start) {
        let expected = format!("binary entries of the format '{}'", format.name());
        let shown_bytes = &start[..start.len().min(16)];
        return refusal(format!("text ('{}')", shown_bytes.escape_ascii()), expected);
    }
    Ok(format)
}

/// An input in a file.
struct FilePart {
    /// Name of the file in errors.
    file: String,
    /// First byte of the input.
    offset: u64,
    /// Number of records of the whole file, if it is known.
    file_records: Option<u64>,
}

/// Reads an input in a format; `start` are the first bytes of the file.
fn build_reader(
    format: Format,
    start: &[u8],
    input: impl Read + Send + 'static,
    part: FilePart,
) -> Result<Box<dyn TraceReader>, TraceError> {
    let FilePart {
        file,
        offset,
        file_records,
    } = part;
    Ok(match format {
        Format::Cmt => Box::new(CmtReader::new(
            BufReader::with_capacity(1 << 16, input),
            file,
        )?),
        Format::Lackey => Box::new(text::lackey_reader(input, file)),
        Format::Din => Box::new(text::din_reader(input, file)),
        Format::Csv => Box::new(text::csv_reader(input, file)),
        Format::DrMemTrace => Box::new(text::drmemtrace_reader(input, file)),
        Format::ChampSim => Box::new(binary::champsim_reader(input, file)),
        Format::U64 => {
            let reader = binary::raw_u64_reader(input, file, offset);
            Box::new(reader.with_records(file_records))
        }
        Format::OracleGeneral | Format::OracleGeneralUnit => {
            let object_bytes = binary::first_object_bytes(start);
            let object_bytes = object_bytes.filter(|_| format == Format::OracleGeneral);
            let reader = binary::oracle_general_reader(input, file, offset, object_bytes);
            Box::new(reader.with_records(file_records))
        }
    })
}

/// Whether the first bytes are those of a tar archive.
fn is_archive(start: &[u8]) -> bool {
    start.get(257..262) == Some(b"ustar")
}

/// Whether the first bytes are lines of text, which no binary format's entries are.
fn is_text(start: &[u8]) -> bool {
    start
        .iter()
        .all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace())
        && start.contains(&b'\n')
}

/// The first bytes, enough to determine the format.
fn read_start(input: &mut impl Read, file: &str) -> Result<Vec<u8>, TraceError> {
    let mut start = Vec::new();
    input
        .take(4096)
        .read_to_end(&mut start)
        .map_err(TraceError::io_error(file, "read"))?;
    Ok(start)
}
