//! Lines of a text format, numbered, with a bound on their length.

use std::io::{BufRead, BufReader, Read};

use crate::{FilePosition, TraceError};

/// Longer lines are rejected, so that a malformed file cannot request unbounded memory.
pub(super) const MAX_LINE_BYTES: usize = 4096;

/// The content of one line of a text format.
pub(super) enum LineOutcome {
    Nothing,
    /// An instruction of this thread of the recording tool.
    Instruction {
        thread: u64,
    },
    Access {
        thread: u64,
        address: u64,
        size: u16,
        store: bool,
    },
}

impl LineOutcome {
    /// An access of a trace without threads.
    pub(super) fn access(address: u64, size: u16, store: bool) -> Self {
        LineOutcome::Access {
            thread: 0,
            address,
            size,
            store,
        }
    }
}

/// Some editors and exporters begin a text with this.
pub(super) const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

pub(super) struct LineReader<R> {
    input: BufReader<R>,
    pub(super) file: String,
    line: Vec<u8>,
    line_number: u64,
}

impl<R: Read> LineReader<R> {
    pub(super) fn new(input: R, file: String) -> Self {
        LineReader {
            input: BufReader::with_capacity(1 << 16, input),
            file,
            line: Vec::new(),
            line_number: 0,
        }
    }

    /// Reads the next line, without its end; `false` at the end of the input.
    pub(super) fn read_line(&mut self) -> Result<bool, TraceError> {
        self.line.clear();
        let limit = MAX_LINE_BYTES as u64 + 1;
        let read_result = self
            .input
            .by_ref()
            .take(limit)
            .read_until(b'\n', &mut self.line);
        if read_result.map_err(TraceError::io_error(&self.file, "read"))? == 0 {
            return Ok(false);
        }

        self.line_number += 1;
        if self.line_number == 1 && self.line.starts_with(BYTE_ORDER_MARK) {
            self.line.drain(..BYTE_ORDER_MARK.len());
        }

        if self.line.last() == Some(&b'\n') {
            self.line.pop();
        } else if self.line.len() > MAX_LINE_BYTES {
            return Err(self.line_error(format!("a line of at most {MAX_LINE_BYTES} bytes")));
        }

        if self.line.last() == Some(&b'\r') {
            self.line.pop();
        }
        Ok(true)
    }

    pub(super) fn line(&self) -> &[u8] {
        &self.line
    }

    /// The message shows at most 60 bytes of the current line.
    pub(super) fn line_error(&self, expected: impl Into<String>) -> TraceError {
        let shown_bytes = &self.line[..self.line.len().min(60)];
        let dots = if self.line.len() > shown_bytes.len() {
            "..."
        } else {
            ""
        };
        TraceError::format_error(
            &self.file,
            FilePosition::Line(self.line_number),
            format!("'{}{dots}'", shown_bytes.escape_ascii()),
            expected,
        )
    }
}

impl<R> LineReader<R> {
    pub(super) fn input_mut(&mut self) -> &mut R {
        self.input.get_mut()
    }
}

/// Parses hexadecimal digits, with or without `0x`, at most 16.
pub(super) fn parse_hex(digits: &[u8]) -> Option<u64> {
    let digits = digits
        .strip_prefix(b"0x")
        .or_else(|| digits.strip_prefix(b"0X"))
        .unwrap_or(digits);
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |sum, &digit| {
        let value = (digit as char).to_digit(16)?;
        (sum >> 60 == 0).then_some(sum << 4 | u64::from(value))
    })
}

/// `None` unless the digits are a decimal number below 65,536.
pub(super) fn parse_size(digits: &[u8]) -> Option<u16> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}
