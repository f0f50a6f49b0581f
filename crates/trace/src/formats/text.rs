//! Text formats: Valgrind's lackey (`--trace-mem=yes`) and Dinero's din.

use std::io::Read;

use super::lines::{LineReader, parse_hex, parse_size};
use crate::{AccessRecord, TraceError, TraceHeader, TraceReader, TraceTotals};

/// Number of records per batch of a text format or a foreign binary format.
pub(super) const BATCH_RECORDS: usize = 1 << 14;

/// The content of one line of a text format.
enum LineOutcome {
    Nothing,
    Instruction,
    Access { address: u64, size: u16, store: bool },
}

/// Counts that every text reader keeps.
#[derive(Default)]
struct TextCounts {
    gap: u64,
    instructions: u64,
    records: u64,
    has_ended: bool,
    /// Damage behind the records that were returned last.
    damage: Option<TraceError>,
}

impl TextCounts {
    fn record_outcome(&mut self, outcome: LineOutcome, batch: &mut Vec<AccessRecord>) {
        match outcome {
            LineOutcome::Nothing => {}
            LineOutcome::Instruction => {
                self.gap += 1;
                self.instructions += 1;
            }
            LineOutcome::Access { address, size, store } => {
                batch.push(AccessRecord { address, gap: self.gap, thread: 0, size, store });
                self.gap = 0;
                self.records += 1;
            }
        }
    }

    fn totals(&self) -> TraceTotals {
        TraceTotals {
            records: self.records,
            program_accesses: Some(self.records),
            // A trace without any instruction line does not count them.
            instructions: (self.instructions > 0).then_some(self.instructions),
            ..TraceTotals::default()
        }
    }
}

/// Fills `batch`. An error is returned after the records before it.
fn fill<R: Read>(
    lines: &mut LineReader<R>,
    counts: &mut TextCounts,
    batch: &mut Vec<AccessRecord>,
    parse: impl Fn(&[u8]) -> Result<LineOutcome, &'static str>,
) -> Result<bool, TraceError> {
    batch.clear();
    while !counts.has_ended && batch.len() < BATCH_RECORDS {
        let outcome = match lines.read_line() {
            Ok(true) => parse(lines.line()).map_err(|expected| lines.line_error(expected)).map(Some),
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        };
        match outcome {
            Ok(Some(outcome)) => counts.record_outcome(outcome, batch),
            Ok(None) => counts.has_ended = true,
            Err(error) => {
                counts.has_ended = true;
                counts.damage = Some(error);
            }
        }
    }
    match counts.damage.take_if(|_| batch.is_empty()) {
        Some(damage) => Err(damage),
        None => Ok(!batch.is_empty()),
    }
}

macro_rules! text_reader {
    ($(#[$doc:meta])* $name:ident, $source:literal, $parse:path) => {
        $(#[$doc])*
        pub struct $name<R> {
            lines: LineReader<R>,
            header: TraceHeader,
            counts: TextCounts,
            totals: Option<TraceTotals>,
        }
        impl<R: Read> $name<R> {
            /// Builds a reader; `file` is the input's name in errors.
            pub fn new(input: R, file: impl Into<String>) -> Self {
                $name {
                    lines: LineReader::new(input, file.into()),
                    header: TraceHeader::for_import($source, true),
                    counts: TextCounts::default(),
                    totals: None,
                }
            }
        }
        impl<R: Read + Send> TraceReader for $name<R> {
            fn header(&self) -> &TraceHeader {
                &self.header
            }
            fn read_batch(&mut self, batch: &mut Vec<AccessRecord>) -> Result<bool, TraceError> {
                let has_more = fill(&mut self.lines, &mut self.counts, batch, $parse)?;
                if !has_more {
                    self.totals = Some(self.counts.totals());
                }
                Ok(has_more)
            }
            fn totals(&self) -> Option<&TraceTotals> {
                self.totals.as_ref()
            }
        }
    };
}

text_reader!(
    /// Lackey's lines: `I  04001000,3`, ` L 1ffe8,8`, ` S 1ffe8,8`, ` M 1ffe8,8` (a modify is one access, a store);
    /// Valgrind's own messages (`==1234== ...`) are skipped.
    LackeyReader,
    "lackey",
    parse_lackey_line
);
text_reader!(
    /// Dinero's lines: a label (0 or r for a load, 1 or w for a store, 2 or i for an instruction), a hexadecimal
    /// address, and optionally a hexadecimal size as in Dinero IV's extended form; the rest of the line is skipped.
    DinReader,
    "din",
    parse_din_line
);

text_reader!(
    /// Lines of `address[,size[,kind]]`: the address in decimal or, after `0x`, in hexadecimal; the kind is `r`, `w` or
    /// `i`, or the word. A line that begins with `address` is a header.
    CsvReader,
    "csv",
    parse_csv_line
);
text_reader!(
    /// The output of DynamoRIO's `drmemtrace -tool view`: `1 1: 7 read 8 byte(s) @ 0x1000 by PC 0x400000`. Lines
    /// without a memory reference or a fetch, such as markers, are skipped.
    DrMemTraceReader,
    "drmemtrace",
    parse_drmemtrace_line
);

impl<R> LackeyReader<R> {
    /// Returns the input, for control.
    pub(crate) fn input_mut(&mut self) -> &mut R {
        self.lines.input_mut()
    }
}

const LACKEY_EXPECTED: &str = "I, L, S or M, a hexadecimal address, a comma and a size";

fn parse_lackey_line(line: &[u8]) -> Result<LineOutcome, &'static str> {
    let text = line.trim_ascii();
    if text.is_empty() || text.starts_with(b"==") || text.starts_with(b"--") || text.starts_with(b"**") {
        return Ok(LineOutcome::Nothing);
    }
    let operands = text[1..].trim_ascii_start();
    let comma = operands.iter().position(|&byte| byte == b',').ok_or(LACKEY_EXPECTED)?;
    let address = parse_hex(&operands[..comma]).ok_or(LACKEY_EXPECTED)?;
    let size = parse_size(&operands[comma + 1..]).ok_or(LACKEY_EXPECTED)?;
    match text[0] {
        b'I' => Ok(LineOutcome::Instruction),
        b'L' => Ok(LineOutcome::Access { address, size, store: false }),
        b'S' | b'M' => Ok(LineOutcome::Access { address, size, store: true }),
        _ => Err(LACKEY_EXPECTED),
    }
}

const CSV_EXPECTED: &str = "an address, and optionally a size and r, w or i, separated by commas";

fn parse_csv_line(line: &[u8]) -> Result<LineOutcome, &'static str> {
    let mut fields = line.split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
    let address_field = fields.next().unwrap_or_default();
    if address_field.is_empty() || address_field.starts_with(b"#") || address_field.eq_ignore_ascii_case(b"address") {
        return Ok(LineOutcome::Nothing);
    }
    let parse_decimal = || std::str::from_utf8(address_field).ok()?.parse().ok();
    let address = if address_field.starts_with(b"0x") { parse_hex(address_field) } else { parse_decimal() }
        .ok_or(CSV_EXPECTED)?;
    let size = match fields.next().filter(|field| !field.is_empty()) {
        Some(field) => parse_size(field).ok_or(CSV_EXPECTED)?,
        None => 0,
    };
    match fields.next().unwrap_or_default() {
        b"" | b"r" | b"R" | b"read" | b"load" => Ok(LineOutcome::Access { address, size, store: false }),
        b"w" | b"W" | b"write" | b"store" => Ok(LineOutcome::Access { address, size, store: true }),
        b"i" | b"I" | b"fetch" => Ok(LineOutcome::Instruction),
        _ => Err(CSV_EXPECTED),
    }
}

const DRMEMTRACE_EXPECTED: &str = "a size before 'byte(s) @' and a hexadecimal address after it";

fn parse_drmemtrace_line(line: &[u8]) -> Result<LineOutcome, &'static str> {
    let words: Vec<&[u8]> =
        line.split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty()).take(12).collect();
    let Some(unit_index) = words.iter().position(|word| *word == b"byte(s)").filter(|&unit| unit >= 2) else {
        return Ok(LineOutcome::Nothing);
    };
    let size = parse_size(words[unit_index - 1]).ok_or(DRMEMTRACE_EXPECTED)?;
    let address = words.get(unit_index + 2).and_then(|word| parse_hex(word)).ok_or(DRMEMTRACE_EXPECTED)?;
    match words[unit_index - 2] {
        b"ifetch" => Ok(LineOutcome::Instruction),
        b"read" => Ok(LineOutcome::Access { address, size, store: false }),
        b"write" => Ok(LineOutcome::Access { address, size, store: true }),
        // Prefetches and flushes.
        _ => Ok(LineOutcome::Nothing),
    }
}

const DIN_EXPECTED: &str = "a label (0, 1, 2, r, w or i) and a hexadecimal address";

fn parse_din_line(line: &[u8]) -> Result<LineOutcome, &'static str> {
    let mut words = line.split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    let Some(label) = words.next() else { return Ok(LineOutcome::Nothing) };
    if label.starts_with(b"#") {
        return Ok(LineOutcome::Nothing);
    }
    let address = words.next().and_then(parse_hex).ok_or(DIN_EXPECTED)?;
    let size = words.next().and_then(parse_hex).and_then(|size| u16::try_from(size).ok()).unwrap_or(0);
    match label {
        b"0" | b"r" => Ok(LineOutcome::Access { address, size, store: false }),
        b"1" | b"w" => Ok(LineOutcome::Access { address, size, store: true }),
        b"2" | b"i" => Ok(LineOutcome::Instruction),
        _ => Err(DIN_EXPECTED),
    }
}
