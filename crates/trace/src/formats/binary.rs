//! Binary formats of fixed-size entries: raw u64, ChampSim, oracleGeneral.

use std::io::Read;

use super::text::BATCH_RECORDS;
use crate::{AccessRecord, FilePosition, TraceError, TraceHeader, TraceReader, TraceTotals};

/// Reads complete entries of `N` bytes.
struct Entries<R, const N: usize> {
    input: R,
    file: String,
    buffer: Vec<u8>,
    offset: u64,
    is_ended: bool,
    /// Damage behind the entries that were returned last.
    damage: Option<TraceError>,
}

impl<R: Read, const N: usize> Entries<R, N> {
    fn new(input: R, file: String) -> Self {
        Entries { input, file, buffer: Vec::new(), offset: 0, is_ended: false, damage: None }
    }

    /// Returns the next entries; none at the end. An error is returned after the complete entries before it.
    fn read_entries(&mut self) -> Result<&[[u8; N]], TraceError> {
        self.buffer.clear();
        if !self.is_ended {
            let wanted_bytes = N * BATCH_RECORDS;
            let read_result = self.input.by_ref().take(wanted_bytes as u64).read_to_end(&mut self.buffer);
            self.is_ended = self.buffer.len() < wanted_bytes;
            self.damage = read_result.err().map(TraceError::io_error(&self.file, "read"));
        }
        let (entries, partial_entry) = self.buffer.as_chunks();
        if self.damage.is_none() && !partial_entry.is_empty() {
            let position = FilePosition::Byte(self.offset + (N * entries.len()) as u64);
            let found = format!("{} bytes before the end", partial_entry.len());
            let expected = format!("entries of {N} bytes");
            self.damage = Some(TraceError::format_error(&self.file, position, found, expected));
        }
        if entries.is_empty()
            && let Some(damage) = self.damage.take()
        {
            return Err(damage);
        }
        self.offset += self.buffer.len() as u64;
        Ok(entries)
    }
}

fn u64_of(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

macro_rules! binary_reader {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, $source:literal, $instructions:literal) => {
        $(#[$doc])*
        pub struct $name<R> {
            entries: Entries<R, $bytes>,
            header: TraceHeader,
            records: u64,
            /// Instructions up to the last record, and since then.
            instructions: u64,
            gap: u64,
            totals: Option<TraceTotals>,
        }
        impl<R: Read> $name<R> {
            /// Builds a reader; `file` is the input's name in errors.
            pub fn new(input: R, file: impl Into<String>) -> Self {
                $name {
                    entries: Entries::new(input, file.into()),
                    header: TraceHeader::for_import($source, $instructions),
                    records: 0,
                    instructions: 0,
                    gap: 0,
                    totals: None,
                }
            }
            fn end_run(&mut self) {
                self.totals = Some(TraceTotals {
                    records: self.records,
                    program_accesses: Some(self.records),
                    instructions: $instructions.then_some(self.instructions + self.gap),
                    ..TraceTotals::default()
                });
            }
        }
    };
}

binary_reader!(
    /// Byte addresses only, as little-endian u64: loads of unknown size, without instructions.
    RawU64Reader, 8, "u64", false
);
binary_reader!(
    /// ChampSim's 64-byte instructions: nonzero source memory operands are loads and destination operands are stores,
    /// both of unknown size.
    ChampSimReader, 64, "champsim", true
);
/// libCacheSim's oracleGeneral: 24-byte requests (u32 time, u64 object, u32 size, i64 next access). An object counts as
/// one line: its id, truncated to 58 bits, is the line number. If sizes differ, a curve over lines is wrong, so such a
/// trace is rejected, unless the reader was created by [`OracleGeneralReader::with_any_object_size`].
pub struct OracleGeneralReader<R> {
    entries: Entries<R, 24>,
    file: String,
    header: TraceHeader,
    records: u64,
    requires_one_size: bool,
    /// Size of the first object.
    object_bytes: Option<u32>,
    totals: Option<TraceTotals>,
}

impl<R: Read> OracleGeneralReader<R> {
    /// Builds a reader that rejects objects of different sizes; `file` is the input's name in errors.
    pub fn new(input: R, file: impl Into<String>) -> Self {
        let file = file.into();
        OracleGeneralReader {
            entries: Entries::new(input, file.clone()),
            file,
            header: TraceHeader::for_import("oracle-general", false),
            records: 0,
            requires_one_size: true,
            object_bytes: None,
            totals: None,
        }
    }

    /// Builds a reader that counts an object of any size as one line.
    pub fn with_any_object_size(input: R, file: impl Into<String>) -> Self {
        OracleGeneralReader { requires_one_size: false, ..Self::new(input, file) }
    }
}

impl<R: Read + Send> TraceReader for RawU64Reader<R> {
    fn header(&self) -> &TraceHeader {
        &self.header
    }
    fn read_batch(&mut self, batch: &mut Vec<AccessRecord>) -> Result<bool, TraceError> {
        batch.clear();
        let entries = self.entries.read_entries()?;
        batch.extend(
            entries.iter().map(|&bytes| AccessRecord { address: u64::from_le_bytes(bytes), ..AccessRecord::default() }),
        );
        self.records += batch.len() as u64;
        if batch.is_empty() {
            self.end_run();
        }
        Ok(!batch.is_empty())
    }
    fn read_addresses(&mut self, batch: &mut Vec<u64>) -> Result<bool, TraceError> {
        batch.clear();
        batch.extend(self.entries.read_entries()?.iter().map(|&bytes| u64::from_le_bytes(bytes)));
        self.records += batch.len() as u64;
        if batch.is_empty() {
            self.end_run();
        }
        Ok(!batch.is_empty())
    }
    fn totals(&self) -> Option<&TraceTotals> {
        self.totals.as_ref()
    }
}

impl<R: Read + Send> TraceReader for ChampSimReader<R> {
    fn header(&self) -> &TraceHeader {
        &self.header
    }
    fn read_batch(&mut self, batch: &mut Vec<AccessRecord>) -> Result<bool, TraceError> {
        batch.clear();
        // A batch of instructions without any access is skipped, because an empty batch would mean the end.
        while batch.is_empty() {
            let entries = self.entries.read_entries()?;
            if entries.is_empty() {
                self.end_run();
                return Ok(false);
            }
            for entry in entries {
                self.gap += 1;
                // ip 8, branch flags 2, registers 2 + 4, then two destinations and four sources.
                for (index, operand) in entry[16..].chunks_exact(8).enumerate() {
                    let address = u64_of(operand);
                    if address != 0 {
                        batch.push(AccessRecord { address, gap: self.gap, thread: 0, size: 0, store: index < 2 });
                        self.instructions += self.gap;
                        self.gap = 0;
                    }
                }
            }
        }
        self.records += batch.len() as u64;
        Ok(true)
    }
    fn totals(&self) -> Option<&TraceTotals> {
        self.totals.as_ref()
    }
}

impl<R: Read + Send> TraceReader for OracleGeneralReader<R> {
    fn header(&self) -> &TraceHeader {
        &self.header
    }
    fn read_batch(&mut self, batch: &mut Vec<AccessRecord>) -> Result<bool, TraceError> {
        batch.clear();
        let start = self.entries.offset;
        let entries = self.entries.read_entries()?;
        if self.requires_one_size {
            for (index, entry) in entries.iter().enumerate() {
                let bytes = u64_of(&entry[12..16]) as u32;
                let first_bytes = *self.object_bytes.get_or_insert(bytes);
                if bytes != first_bytes {
                    let position = FilePosition::Byte(start + (24 * index) as u64);
                    let found = format!("an object of {bytes} bytes after one of {first_bytes}");
                    let expected = "objects of one size, because each counts as one line; the format \
                                    'oracle-general-unit' ignores sizes";
                    return Err(TraceError::format_error(&self.file, position, found, expected));
                }
            }
        }
        batch.extend(
            entries.iter().map(|entry| AccessRecord { address: u64_of(&entry[4..12]) << 6, ..AccessRecord::default() }),
        );
        self.records += batch.len() as u64;
        if batch.is_empty() {
            self.totals = Some(TraceTotals {
                records: self.records,
                program_accesses: Some(self.records),
                ..TraceTotals::default()
            });
        }
        Ok(!batch.is_empty())
    }
    fn totals(&self) -> Option<&TraceTotals> {
        self.totals.as_ref()
    }
}
