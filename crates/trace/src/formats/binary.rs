//! Binary formats of fixed-size entries: raw u64, ChampSim, oracleGeneral.

use std::io::Read;

use super::import::{BATCH_RECORDS, ImportCounts, ImportReader, RecordSource};
use crate::{AccessRecord, FilePosition, TraceError};

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
    /// `offset` is that of the input in the file.
    fn new(input: R, file: String, offset: u64) -> Self {
        Entries {
            input,
            file,
            buffer: Vec::new(),
            offset,
            is_ended: false,
            damage: None,
        }
    }

    /// The next entries; none at the end. An error is returned after the complete entries before it.
    fn read_entries(&mut self) -> Result<&[[u8; N]], TraceError> {
        self.buffer.clear();
        if !self.is_ended {
            let wanted_bytes = N * BATCH_RECORDS;
            let read_result = self
                .input
                .by_ref()
                .take(wanted_bytes as u64)
                .read_to_end(&mut self.buffer);
            self.is_ended = self.buffer.len() < wanted_bytes;
            self.damage = read_result
                .err()
                .map(TraceError::io_error(&self.file, "read"));
        }

        let (entries, partial_entry) = self.buffer.as_chunks();
        if self.damage.is_none() && !partial_entry.is_empty() {
            let position = FilePosition::Byte(self.offset + (N * entries.len()) as u64);
            let found = format!("{} bytes before the end", partial_entry.len());
            let expected = format!("entries of {N} bytes");
            self.damage = Some(TraceError::format_error(
                &self.file, position, found, expected,
            ));
        }
        if entries.is_empty()
            && let Some(damage) = self.damage.take()
        {
            return Err(damage);
        }
        self.offset += self.buffer.len() as u64;
        Ok(entries)
    }

    /// Appends the records of the next entries. A damaged entry, of which `decode` returns the damaged byte, the value found
    /// and the values expected, ends the input.
    fn read_records(
        &mut self,
        batch: &mut Vec<AccessRecord>,
        mut decode: impl FnMut(
            &[u8; N],
            &mut Vec<AccessRecord>,
        ) -> Result<(), (usize, String, &'static str)>,
    ) -> Result<(), TraceError> {
        // Entries without any access are skipped, because an empty batch would mean the end.
        while batch.is_empty() {
            let start = self.offset;
            let entries = self.read_entries()?;
            if entries.is_empty() {
                break;
            }

            for (index, entry) in entries.iter().enumerate() {
                if let Err((byte, found, expected)) = decode(entry, batch) {
                    let position = FilePosition::Byte(start + (N * index + byte) as u64);
                    self.damage = Some(TraceError::format_error(
                        &self.file, position, found, expected,
                    ));
                    self.is_ended = true;
                    break;
                }
            }
        }

        Ok(())
    }
}

fn u64_of(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

/// Byte addresses only, as little-endian u64: loads of unknown size, without instructions.
pub struct RawU64Source<R>(Entries<R, 8>);

/// Reads a [`RawU64Source`]; `file` is the input's name in errors, and `offset` the input's place in it.
pub(super) fn raw_u64_reader<R: Read>(
    input: R,
    file: String,
    offset: u64,
) -> ImportReader<RawU64Source<R>> {
    ImportReader::new(RawU64Source(Entries::new(input, file, offset)), "u64")
}

impl<R: Read + Send> RecordSource for RawU64Source<R> {
    fn read_records(
        &mut self,
        _counts: &mut ImportCounts,
        batch: &mut Vec<AccessRecord>,
    ) -> Result<(), TraceError> {
        let record = |&bytes: &[u8; 8]| AccessRecord {
            address: u64::from_le_bytes(bytes),
            ..AccessRecord::default()
        };
        batch.extend(self.0.read_entries()?.iter().map(record));
        Ok(())
    }
    fn read_addresses(
        &mut self,
        _counts: &mut ImportCounts,
        batch: &mut Vec<u64>,
    ) -> Result<(), TraceError> {
        batch.extend(
            self.0
                .read_entries()?
                .iter()
                .map(|&bytes| u64::from_le_bytes(bytes)),
        );
        Ok(())
    }
}

/// ChampSim's 64-byte instructions: nonzero source memory operands are loads and destination operands are stores, both of
/// unknown size.
pub struct ChampSimSource<R>(Entries<R, 64>);

/// Reads a [`ChampSimSource`]; `file` is the input's name in errors.
pub(super) fn champsim_reader<R: Read>(input: R, file: String) -> ImportReader<ChampSimSource<R>> {
    ImportReader::new(ChampSimSource(Entries::new(input, file, 0)), "champsim")
}

impl<R: Read + Send> RecordSource for ChampSimSource<R> {
    fn read_records(
        &mut self,
        counts: &mut ImportCounts,
        batch: &mut Vec<AccessRecord>,
    ) -> Result<(), TraceError> {
        counts.counts_instructions = true;
        self.0.read_records(batch, |entry, batch| {
            // ip 8, branch flags 2, registers 2 + 4, then two destinations and four sources.
            if entry[8] > 1 || entry[9] > 1 {
                let found = format!("branch flags {} and {}", entry[8], entry[9]);
                let expected = "0 or 1, as in ChampSim's instructions of 64 bytes (other tools \
                                and older versions write other records; archives are unpacked first)";
                return Err((8, found, expected));
            }

            counts.count_instruction(0);
            for (index, operand) in entry[16..].chunks_exact(8).enumerate() {
                let address = u64_of(operand);
                if address != 0 {
                    batch.push(counts.record_access(0, address, 0, index < 2));
                }
            }
            Ok(())
        })
    }
}

/// libCacheSim's oracleGeneral: 24-byte requests (u32 time, u64 object, u32 size, i64 next access). An object counts as
/// one line: its id, truncated to 58 bits, is the line number. If sizes differ, a curve over lines is wrong.
pub struct OracleGeneralSource<R> {
    entries: Entries<R, 24>,
    object_bytes: Option<u32>,
}

/// Reads an [`OracleGeneralSource`]; `file` is the input's name in errors, and `offset` the input's place in it. Objects
/// of other sizes than `object_bytes` are rejected.
pub(super) fn oracle_general_reader<R: Read>(
    input: R,
    file: String,
    offset: u64,
    object_bytes: Option<u32>,
) -> ImportReader<OracleGeneralSource<R>> {
    let entries = Entries::new(input, file, offset);
    ImportReader::new(
        OracleGeneralSource {
            entries,
            object_bytes,
        },
        "oracle-general",
    )
}

/// Size of the first object of a file with these first bytes.
pub(super) fn first_object_bytes(start: &[u8]) -> Option<u32> {
    start.get(12..16).map(|bytes| u64_of(bytes) as u32)
}

impl<R: Read + Send> RecordSource for OracleGeneralSource<R> {
    fn read_records(
        &mut self,
        _counts: &mut ImportCounts,
        batch: &mut Vec<AccessRecord>,
    ) -> Result<(), TraceError> {
        self.entries.read_records(batch, |entry, batch| {
            let bytes = u64_of(&entry[12..16]) as u32;
            if let Some(first_bytes) = self.object_bytes.filter(|&first| first != bytes) {
                let found = format!("an object of {bytes} bytes after one of {first_bytes}");
                let expected = "objects of one size, because each counts as one line; the format 'oracle-general-unit' \
                                ignores sizes";
                return Err((0, found, expected));
            }

            batch.push(AccessRecord {
                address: u64_of(&entry[4..12]) << 6,
                ..AccessRecord::default()
            });
            Ok(())
        })
    }
}
