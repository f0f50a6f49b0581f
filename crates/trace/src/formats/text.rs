//! Text formats, one access a line: Valgrind's lackey, Dinero's din, DynamoRIO's view, and separated values.
//!
//! Each tool's text exists in dialects. A reader that guesses among them gives a smooth wrong curve, so every format here
//! accepts what identifies itself (a header line that names its columns, `0x` before hexadecimal digits, an ordinal
//! before a thread) and refuses the rest with the line.

use std::io::Read;

use super::csv::CsvSyntax;
use super::import::{BATCH_RECORDS, ImportCounts, ImportReader, RecordSource};
use super::lines::{LineOutcome, LineReader, parse_hex, parse_size};
use crate::record_type::MAX_THREADS;
use crate::{AccessRecord, TraceError};

/// A text format, with what it remembers from line to line.
enum LineSyntax {
    Lackey,
    Din,
    Csv(CsvSyntax),
    DrMemTrace(ViewSyntax),
}

impl LineSyntax {
    /// Parses one line, or describes a valid one.
    fn parse(&mut self, line: &[u8]) -> Result<LineOutcome, &'static str> {
        match self {
            LineSyntax::Lackey => parse_lackey_line(line),
            LineSyntax::Din => parse_din_line(line),
            LineSyntax::Csv(syntax) => syntax.parse(line),
            LineSyntax::DrMemTrace(syntax) => syntax.parse(line),
        }
    }
}

/// Lines of a text format.
pub struct TextSource<R> {
    lines: LineReader<R>,
    syntax: LineSyntax,
    has_ended: bool,
    /// Damage behind the records that were returned last.
    damage: Option<TraceError>,
}

impl<R: Read> TextSource<R> {
    fn new_reader(input: R, file: String, tool: &str, syntax: LineSyntax) -> ImportReader<Self> {
        let source = TextSource {
            lines: LineReader::new(input, file),
            syntax,
            has_ended: false,
            damage: None,
        };
        ImportReader::new(source, tool)
    }

    fn read_outcome(&mut self) -> Result<Option<LineOutcome>, TraceError> {
        if !self.lines.read_line()? {
            return Ok(None);
        }
        self.syntax
            .parse(self.lines.line())
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
                Ok(Some(
                    LineOutcome::Instruction { thread } | LineOutcome::Access { thread, .. },
                )) if !counts.has_room_for(thread) => {
                    let error = self
                        .lines
                        .line_error(format!("at most {MAX_THREADS} threads"));
                    (self.has_ended, self.damage) = (true, Some(error));
                }
                Ok(Some(LineOutcome::Instruction { thread })) => counts.count_instruction(thread),
                Ok(Some(LineOutcome::Access {
                    thread,
                    address,
                    size,
                    store,
                })) => batch.push(counts.record_access(thread, address, size, store)),
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
/// Valgrind's own messages (`==1234== ...`) and the superblocks of `--trace-superblocks` are skipped.
pub(crate) fn lackey_reader<R: Read>(input: R, file: String) -> ImportReader<TextSource<R>> {
    TextSource::new_reader(input, file, "lackey", LineSyntax::Lackey)
}

/// Reads Dinero's lines: a label (0 or r for a load, 1 or w for a store, 2 or i for an instruction), a hexadecimal
/// address, and optionally a hexadecimal size as in Dinero IV's extended form; the rest of the line is skipped.
pub(super) fn din_reader<R: Read>(input: R, file: String) -> ImportReader<TextSource<R>> {
    TextSource::new_reader(input, file, "din", LineSyntax::Din)
}

/// Reads separated values, as [`CsvSyntax`] describes them.
pub(super) fn csv_reader<R: Read>(input: R, file: String) -> ImportReader<TextSource<R>> {
    let syntax = LineSyntax::Csv(CsvSyntax::default());
    TextSource::new_reader(input, file, "csv", syntax)
}

/// Reads the output of DynamoRIO's `drmemtrace -tool view`, as [`ViewSyntax`] describes it.
pub(super) fn drmemtrace_reader<R: Read>(input: R, file: String) -> ImportReader<TextSource<R>> {
    let syntax = LineSyntax::DrMemTrace(ViewSyntax::default());
    TextSource::new_reader(input, file, "drmemtrace", syntax)
}

impl<R> ImportReader<TextSource<R>> {
    /// For a recording, which asks its input to stop the program.
    pub(crate) fn input_mut(&mut self) -> &mut R {
        self.source.lines.input_mut()
    }
}

const LACKEY_EXPECTED: &str = "I, L, S or M, a hexadecimal address, a comma and a size";

fn parse_lackey_line(line: &[u8]) -> Result<LineOutcome, &'static str> {
    let text = line.trim_ascii();
    let is_message = [&b"=="[..], b"--", b"**"]
        .iter()
        .any(|mark| text.starts_with(mark));
    let is_superblock = text
        .strip_prefix(b"SB ")
        .is_some_and(|address| parse_hex(address).is_some());
    if text.is_empty() || is_message || is_superblock {
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
        b'I' => Ok(LineOutcome::Instruction { thread: 0 }),
        b'L' => Ok(LineOutcome::access(address, size, false)),
        b'S' | b'M' => Ok(LineOutcome::access(address, size, true)),
        _ => Err(LACKEY_EXPECTED),
    }
}

const DRMEMTRACE_EXPECTED: &str =
    "a thread, then 'ifetch', 'read' or 'write', a size, 'byte(s) @' and a hexadecimal address";

/// DynamoRIO's view: `2 1: 7 read 8 byte(s) @ 0x1000 by PC 0x400000`, with the ordinals of the record and of the
/// instruction before the colon and the thread behind it. Lines without a reference or a fetch, such as markers, are
/// skipped.
///
/// Iterations of a string instruction look like fetches, but the processor fetches the instruction once: such a line says
/// `non-fetched`, and the instruction's ordinal stays. The view of 2022 has one ordinal and writes `T` before the thread;
/// its instructions are an address and either their disassembly or, without binaries, `non-branch 3 byte(s)`.
#[derive(Default)]
struct ViewSyntax {
    /// Ordinal of the last instruction counted, if the view has one.
    counted_ordinal: Option<u64>,
}

impl ViewSyntax {
    fn parse(&mut self, line: &[u8]) -> Result<LineOutcome, &'static str> {
        let mut words = line
            .split(|byte| byte.is_ascii_whitespace())
            .filter(|word| !word.is_empty());

        // Ordinals, the last of them before the colon; other lines are headings.
        let mut ordinal_count = 0;
        let instruction_ordinal = loop {
            let word = words.next().unwrap_or_default();
            let digits = word.strip_suffix(b":");
            let Some(ordinal) = parse_decimal(digits.unwrap_or(word)) else {
                return Ok(LineOutcome::Nothing);
            };
            ordinal_count += 1;
            if digits.is_some() {
                break (ordinal_count == 2).then_some(ordinal);
            }
        };

        let tid = words.next().unwrap_or_default();
        let Some(thread) = parse_decimal(tid.strip_prefix(b"T").unwrap_or(tid)) else {
            return Err(DRMEMTRACE_EXPECTED);
        };
        let details: Vec<&[u8]> = words.take(12).collect();
        let Some(kind) = details.first() else {
            return Ok(LineOutcome::Nothing);
        };

        let is_instruction_of_2022 =
            kind.starts_with(b"0x") && parse_hex(kind).is_some() && details.len() > 1;
        if *kind == b"ifetch" || is_instruction_of_2022 {
            if *kind == b"ifetch" {
                parse_reference(&details)?;
            }
            let is_repeated =
                instruction_ordinal.is_some() && instruction_ordinal == self.counted_ordinal;
            if is_repeated || details.contains(&&b"non-fetched"[..]) {
                return Ok(LineOutcome::Nothing);
            }
            self.counted_ordinal = instruction_ordinal;
            return Ok(LineOutcome::Instruction { thread });
        }

        let store = match *kind {
            b"read" => false,
            b"write" => true,
            // Markers, prefetches, flushes, and further bytes of an instruction.
            _ => return Ok(LineOutcome::Nothing),
        };
        let (address, size) = parse_reference(&details)?;
        Ok(LineOutcome::Access {
            thread,
            address,
            size,
            store,
        })
    }
}

/// Parses `KIND SIZE byte(s) @ ADDRESS ...`.
fn parse_reference(details: &[&[u8]]) -> Result<(u64, u16), &'static str> {
    match details {
        [_, size, unit, at, address, ..] if *unit == b"byte(s)" && *at == b"@" => {
            let size = parse_size(size).ok_or(DRMEMTRACE_EXPECTED)?;
            let address = parse_hex(address).ok_or(DRMEMTRACE_EXPECTED)?;
            Ok((address, size))
        }
        _ => Err(DRMEMTRACE_EXPECTED),
    }
}

fn parse_decimal(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
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
        b"0" | b"r" => Ok(LineOutcome::access(address, size, false)),
        b"1" | b"w" => Ok(LineOutcome::access(address, size, true)),
        b"2" | b"i" => Ok(LineOutcome::Instruction { thread: 0 }),
        _ => Err(DIN_EXPECTED),
    }
}
