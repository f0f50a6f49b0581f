//! Text formats: Valgrind's lackey (`--trace-mem=yes`) and Dinero's din.

use std::io::Read;

use super::import::{BATCH_RECORDS, ImportCounts, ImportReader, RecordSource};
use super::lines::{LineReader, parse_hex, parse_size};
use crate::{AccessRecord, TraceError};

/// The content of one line of a text format.
enum LineOutcome {
    Nothing,
    Instruction,
    Access {
        address: u64,
        size: u16,
        store: bool,
    },
}

/// Parses one line, or returns the description of a valid one.
type LineParser = fn(&[u8]) -> Result<LineOutcome, &'static str>;

/// Lines of a text format.
pub struct TextSource<R> {
    lines: LineReader<R>,
    parse_line: LineParser,
    has_ended: bool,
    /// Damage behind the records that were returned last.
    damage: Option<TraceError>,
}

impl<R: Read> TextSource<R> {
    fn new_reader(
        input: R,
        file: String,
        tool: &str,
        parse_line: LineParser,
    ) -> ImportReader<Self> {
        let lines = LineReader::new(input, file);
        ImportReader::new(
            TextSource {
                lines,
                parse_line,
                has_ended: false,
                damage: None,
            },
            tool,
            true,
        )
    }

    fn read_outcome(&mut self) -> Result<Option<LineOutcome>, TraceError> {
        if !self.lines.read_line()? {
            return Ok(None);
        }
        (self.parse_line)(self.lines.line())
            .map_err(|expected| self.lines.line_error(expected))
            .map(Some)
    }
}

impl<R: Read + Send> RecordSource for TextSource<R> {
    fn read_records(
        &mut self,
        counts: &mut ImportCounts,
        batch: &mut Vec<AccessRecord>,
    ) -> Result<(), TraceError> {
        while !self.has_ended && batch.len() < BATCH_RECORDS {
            match self.read_outcome() {
                Ok(Some(LineOutcome::Nothing)) => {}
                Ok(Some(LineOutcome::Instruction)) => counts.count_instruction(),
                Ok(Some(LineOutcome::Access {
                    address,
                    size,
                    store,
                })) => {
                    batch.push(counts.record_access(address, size, store));
                }
                Ok(None) => self.has_ended = true,
                Err(error) => (self.has_ended, self.damage) = (true, Some(error)),
            }
        }
        self.damage
            .take_if(|_| batch.is_empty())
            .map_or(Ok(()), Err)
    }
}

/// Reads lackey's lines: `I  04001000,3`, ` L 1ffe8,8`, ` S 1ffe8,8`, ` M 1ffe8,8` (a modify is one access, a store);
/// Valgrind's own messages (`==1234== ...`) are skipped.
pub(crate) fn lackey_reader<R: Read>(input: R, file: String) -> ImportReader<TextSource<R>> {
    TextSource::new_reader(input, file, "lackey", parse_lackey_line)
}

/// Reads Dinero's lines: a label (0 or r for a load, 1 or w for a store, 2 or i for an instruction), a hexadecimal
/// address, and optionally a hexadecimal size as in Dinero IV's extended form; the rest of the line is skipped.
pub(super) fn din_reader<R: Read>(input: R, file: String) -> ImportReader<TextSource<R>> {
    TextSource::new_reader(input, file, "din", parse_din_line)
}

/// Reads lines of `address[,size[,kind]]`: the address in decimal or, after `0x`, in hexadecimal; the kind is `r`, `w` or
/// `i`, or the word. A line that begins with `address` is a header.
pub(super) fn csv_reader<R: Read>(input: R, file: String) -> ImportReader<TextSource<R>> {
    TextSource::new_reader(input, file, "csv", parse_csv_line)
}

/// Reads the output of DynamoRIO's `drmemtrace -tool view`: `1 1: 7 read 8 byte(s) @ 0x1000 by PC 0x400000`. Lines
/// without a memory reference or a fetch, such as markers, are skipped.
pub(super) fn drmemtrace_reader<R: Read>(input: R, file: String) -> ImportReader<TextSource<R>> {
    TextSource::new_reader(input, file, "drmemtrace", parse_drmemtrace_line)
}

impl<R> ImportReader<TextSource<R>> {
    /// Returns the input, for control.
    pub(crate) fn input_mut(&mut self) -> &mut R {
        self.source.lines.input_mut()
    }
}

const LACKEY_EXPECTED: &str = "I, L, S or M, a hexadecimal address, a comma and a size";

fn parse_lackey_line(line: &[u8]) -> Result<LineOutcome, &'static str> {
    let text = line.trim_ascii();
    if text.is_empty()
        || text.starts_with(b"==")
        || text.starts_with(b"--")
        || text.starts_with(b"**")
    {
        return Ok(LineOutcome::Nothing);
    }
    let operands = text[1..].trim_ascii_start();
    let comma = operands
        .iter()
        .position(|&byte| byte == b',')
        .ok_or(LACKEY_EXPECTED)?;
    let address = parse_hex(&operands[..comma]).ok_or(LACKEY_EXPECTED)?;
    let size = parse_size(&operands[comma + 1..]).ok_or(LACKEY_EXPECTED)?;
    match text[0] {
        b'I' => Ok(LineOutcome::Instruction),
        b'L' => Ok(LineOutcome::Access {
            address,
            size,
            store: false,
        }),
        b'S' | b'M' => Ok(LineOutcome::Access {
            address,
            size,
            store: true,
        }),
        _ => Err(LACKEY_EXPECTED),
    }
}

const CSV_EXPECTED: &str = "an address, and optionally a size and r, w or i, separated by commas";

fn parse_csv_line(line: &[u8]) -> Result<LineOutcome, &'static str> {
    let mut fields = line.split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
    let address_field = fields.next().unwrap_or_default();
    if address_field.is_empty()
        || address_field.starts_with(b"#")
        || address_field.eq_ignore_ascii_case(b"address")
    {
        return Ok(LineOutcome::Nothing);
    }
    let parse_decimal = || std::str::from_utf8(address_field).ok()?.parse().ok();
    let address = if address_field.starts_with(b"0x") {
        parse_hex(address_field)
    } else {
        parse_decimal()
    }
    .ok_or(CSV_EXPECTED)?;
    let size = match fields.next().filter(|field| !field.is_empty()) {
        Some(field) => parse_size(field).ok_or(CSV_EXPECTED)?,
        None => 0,
    };
    match fields.next().unwrap_or_default() {
        b"" | b"r" | b"R" | b"read" | b"load" => Ok(LineOutcome::Access {
            address,
            size,
            store: false,
        }),
        b"w" | b"W" | b"write" | b"store" => Ok(LineOutcome::Access {
            address,
            size,
            store: true,
        }),
        b"i" | b"I" | b"fetch" => Ok(LineOutcome::Instruction),
        _ => Err(CSV_EXPECTED),
    }
}

const DRMEMTRACE_EXPECTED: &str = "a size before 'byte(s) @' and a hexadecimal address after it";

fn parse_drmemtrace_line(line: &[u8]) -> Result<LineOutcome, &'static str> {
    let words: Vec<&[u8]> = line
        .split(|byte| byte.is_ascii_whitespace())
        .filter(|word| !word.is_empty())
        .take(12)
        .collect();
    let Some(unit_index) = words
        .iter()
        .position(|word| *word == b"byte(s)")
        .filter(|&unit| unit >= 2)
    else {
        return Ok(LineOutcome::Nothing);
    };
    let size = parse_size(words[unit_index - 1]).ok_or(DRMEMTRACE_EXPECTED)?;
    let address = words
        .get(unit_index + 2)
        .and_then(|word| parse_hex(word))
        .ok_or(DRMEMTRACE_EXPECTED)?;
    match words[unit_index - 2] {
        b"ifetch" => Ok(LineOutcome::Instruction),
        b"read" => Ok(LineOutcome::Access {
            address,
            size,
            store: false,
        }),
        b"write" => Ok(LineOutcome::Access {
            address,
            size,
            store: true,
        }),
        // Prefetches and flushes.
        _ => Ok(LineOutcome::Nothing),
    }
}

const DIN_EXPECTED: &str = "a label (0, 1, 2, r, w or i) and a hexadecimal address";

fn parse_din_line(line: &[u8]) -> Result<LineOutcome, &'static str> {
    let mut words = line
        .split(|byte| byte.is_ascii_whitespace())
        .filter(|word| !word.is_empty());
    let Some(label) = words.next() else {
        return Ok(LineOutcome::Nothing);
    };
    if label.starts_with(b"#") {
        return Ok(LineOutcome::Nothing);
    }
    let address = words.next().and_then(parse_hex).ok_or(DIN_EXPECTED)?;
    let size = words
        .next()
        .and_then(parse_hex)
        .and_then(|size| u16::try_from(size).ok())
        .unwrap_or(0);
    match label {
        b"0" | b"r" => Ok(LineOutcome::Access {
            address,
            size,
            store: false,
        }),
        b"1" | b"w" => Ok(LineOutcome::Access {
            address,
            size,
            store: true,
        }),
        b"2" | b"i" => Ok(LineOutcome::Instruction),
        _ => Err(DIN_EXPECTED),
    }
}
