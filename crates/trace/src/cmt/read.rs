//! Reads `.cmt` as a stream, with one block in memory; seeks if the input is seekable.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use super::block::{Block, MAX_RAW_BYTES, PADDING_BYTES};
use super::{
    BLOCK_HEADER_BYTES, BLOCK_MAGIC, BLOCK_RECORDS, CMT_VERSION, END_MAGIC, FILE_MAGIC,
    FOOTER_HEADER_BYTES, FOOTER_LIMIT, FOOTER_MAGIC, HEADER_JSON_LIMIT, INDEX_ENTRIES_LIMIT,
    IndexEntry, OLDEST_CMT_VERSION, TRAILER_BYTES, u32_at, u64_at,
};
use crate::{AccessRecord, FilePosition, TraceError, TraceHeader, TraceReader, TraceTotals};

/// Reads a `.cmt` block by block.
///
/// A damaged or truncated file gives its intact blocks first, and then one [`TraceError::Bad`] that gives the block.
/// After [`CmtReader::salvage`], the data simply ends there, and [`CmtReader::first_damage`] returns the error.
pub struct CmtReader<R> {
    input: R,
    file: String,
    version: u32,
    header: TraceHeader,
    data_start: u64,
    offset: u64,
    block: u64,
    next_record: u64,
    packed_block: Vec<u8>,
    raw_block: Vec<u8>,
    decompressor: zstd::bulk::Decompressor<'static>,
    totals: Option<TraceTotals>,
    index: Vec<IndexEntry>,
    is_salvaging: bool,
    damage: Option<TraceError>,
    is_ended: bool,
}

impl CmtReader<BufReader<File>> {
    /// Opens a file; if it is complete, totals and index are read immediately.
    ///
    /// # Errors
    /// [`TraceError`] if it cannot be opened, or is not a `.cmt` of a known version.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, TraceError> {
        let name = path.as_ref().display().to_string();
        let input = cachemate_files::open_plain(path.as_ref())
            .map_err(TraceError::io_error(&name, "open"))?;
        let mut reader = CmtReader::new(BufReader::with_capacity(1 << 16, input), name)?;
        // A truncated file has no totals; reading it shows where it ends.
        reader.read_trailer().ok();
        reader.rewind()?;
        Ok(reader)
    }
}

/// The kind of section that a header introduces: a block or the footer.
enum SectionKind {
    Block { records: usize },
    Footer,
}

impl<R: Read> CmtReader<R> {
    /// Reads the header. `file` is the input's name in errors.
    ///
    /// # Errors
    /// [`TraceError::Bad`] if this is not a `.cmt` of a known version, or if its header is damaged.
    pub fn new(mut input: R, file: impl Into<String>) -> Result<Self, TraceError> {
        let file = file.into();
        let mut bytes = vec![0; 16];
        read_exactly(
            &mut input,
            &mut bytes,
            &file,
            FilePosition::Byte(0),
            "the 16 bytes a .cmt file begins with",
        )?;

        if bytes[..8] != FILE_MAGIC {
            let found = format!("'{}'", bytes[..8].escape_ascii());
            return Err(TraceError::format_error(
                &file,
                FilePosition::Byte(0),
                found,
                "'CMTRACE\\x00', the start of a .cmt file",
            ));
        }

        let version = u32_at(&bytes, 8);
        if !(OLDEST_CMT_VERSION..=CMT_VERSION).contains(&version) {
            let (found, expected) = (
                format!("format version {version}"),
                format!("version {OLDEST_CMT_VERSION} to {CMT_VERSION}"),
            );
            return Err(TraceError::format_error(
                &file,
                FilePosition::Byte(8),
                found,
                expected,
            ));
        }
        let json_bytes = u32_at(&bytes, 12) as usize;
        if json_bytes > HEADER_JSON_LIMIT {
            let found = format!("a header of {json_bytes} bytes");
            let expected = format!("at most {HEADER_JSON_LIMIT}");
            return Err(TraceError::format_error(
                &file,
                FilePosition::Byte(12),
                found,
                expected,
            ));
        }
        bytes.resize(16 + json_bytes + 8, 0);
        read_exactly(
            &mut input,
            &mut bytes[16..],
            &file,
            FilePosition::Byte(16),
            "the header",
        )?;
        let checksum_at = 16 + json_bytes;
        let position = FilePosition::Byte(checksum_at as u64);
        verify_checksum(
            &file,
            position,
            u64_at(&bytes, checksum_at),
            xxhash_rust::xxh3::xxh3_64(&bytes[..checksum_at]),
        )?;
        let header: TraceHeader =
            serde_json::from_slice(&bytes[16..checksum_at]).map_err(|error| {
                TraceError::format_error(
                    &file,
                    FilePosition::Byte(16),
                    error.to_string(),
                    "a trace header in JSON",
                )
            })?;
        header.check().map_err(|(found, expected)| {
            TraceError::format_error(&file, FilePosition::Byte(16), found, expected)
        })?;
        let decompressor = zstd::bulk::Decompressor::new()
            .map_err(TraceError::io_error(&file, "start zstd for"))?;
        Ok(CmtReader {
            input,
            file,
            version,
            header,
            data_start: bytes.len() as u64,
            offset: bytes.len() as u64,
            block: 0,
            next_record: 0,
            packed_block: Vec::new(),
            raw_block: Vec::new(),
            decompressor,
            totals: None,
            index: Vec::new(),
            is_salvaging: false,
            damage: None,
            is_ended: false,
        })
    }

    /// Makes damage end the data without an error from now on.
    pub fn salvage(&mut self) {
        self.is_salvaging = true;
    }
    /// The damage that ended the data early, after [`CmtReader::salvage`]; `None` if there was none.
    pub fn first_damage(&self) -> Option<&TraceError> {
        self.damage.as_ref()
    }
    /// How many records precede the one that is read next.
    pub fn next_record(&self) -> u64 {
        self.next_record
    }

    fn format_error<T>(
        &self,
        position: FilePosition,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Result<T, TraceError> {
        Err(TraceError::format_error(
            &self.file, position, found, expected,
        ))
    }

    /// Reads the next section, header first, verifies its checksum and decompresses it. Lengths are checked before
    /// memory is allocated.
    fn read_section(&mut self) -> Result<(SectionKind, FilePosition), TraceError> {
        let block_position = FilePosition::Block {
            block: self.block,
            offset: self.offset,
        };
        let mut head = [0u8; BLOCK_HEADER_BYTES];
        let expected = "a further block or the footer (is the file truncated?)";
        read_exactly(
            &mut self.input,
            &mut head[..FOOTER_HEADER_BYTES],
            &self.file,
            block_position,
            expected,
        )?;

        let (packed_bytes, raw_bytes) = (u32_at(&head, 8) as usize, u32_at(&head, 12) as usize);
        let is_block = head[..4] == BLOCK_MAGIC;
        if !is_block && head[..4] != FOOTER_MAGIC {
            return self.format_error(
                block_position,
                format!("'{}'", head[..4].escape_ascii()),
                "'CMTB' or 'CMTE'",
            );
        }
        let (position, limit, head_bytes, hashed_bytes) = if is_block {
            read_exactly(
                &mut self.input,
                &mut head[24..],
                &self.file,
                block_position,
                "the rest of its header",
            )?;
            (block_position, MAX_RAW_BYTES, BLOCK_HEADER_BYTES, 24)
        } else {
            (
                FilePosition::Footer {
                    offset: self.offset,
                },
                FOOTER_LIMIT,
                FOOTER_HEADER_BYTES,
                16,
            )
        };
        if raw_bytes > limit || packed_bytes > zstd::zstd_safe::compress_bound(limit) {
            let found = format!("lengths of {packed_bytes} packed and {raw_bytes} unpacked bytes");
            let expected = format!("at most {limit} unpacked");
            return self.format_error(position, found, expected);
        }
        self.packed_block.clear();
        let read_result = self
            .input
            .by_ref()
            .take(packed_bytes as u64)
            .read_to_end(&mut self.packed_block);
        read_result.map_err(TraceError::io_error(&self.file, "read"))?;
        if self.packed_block.len() != packed_bytes {
            let found = format!(
                "the end of the file after {} of its {packed_bytes} bytes",
                self.packed_block.len()
            );
            let expected = "the whole of it";
            return self.format_error(position, found, expected);
        }
        let mut hash = Xxh3::new();
        hash.update(&head[..hashed_bytes]);
        hash.update(&self.packed_block);
        verify_checksum(
            &self.file,
            position,
            u64_at(&head, hashed_bytes),
            hash.digest(),
        )?;
        self.decompress_block(raw_bytes, position)?;
        self.offset += (head_bytes + packed_bytes) as u64;
        if !is_block {
            return Ok((SectionKind::Footer, position));
        }
        let (records, first_record) = (u32_at(&head, 4) as usize, u64_at(&head, 16));
        if !(1..=BLOCK_RECORDS).contains(&records) || first_record != self.next_record {
            let found = format!("{records} records from number {first_record}");
            let expected = format!("1-{BLOCK_RECORDS} from number {}", self.next_record);
            return self.format_error(position, found, expected);
        }
        Ok((SectionKind::Block { records }, position))
    }

    /// Decompresses `packed_block` into `raw_block`, followed by zeros.
    fn decompress_block(
        &mut self,
        raw_bytes: usize,
        position: FilePosition,
    ) -> Result<(), TraceError> {
        self.raw_block.resize(raw_bytes, 0);
        let unpack_result = self
            .decompressor
            .decompress_to_buffer(&self.packed_block, &mut self.raw_block[..]);

        match unpack_result {
            Ok(length) if length == raw_bytes => {
                self.raw_block.resize(raw_bytes + PADDING_BYTES, 0);
                Ok(())
            }
            Ok(length) => self.format_error(
                position,
                format!("{length} unpacked bytes"),
                format!("{raw_bytes}"),
            ),
            Err(error) => self.format_error(
                position,
                format!("bytes that do not unpack ({error})"),
                "a zstd frame",
            ),
        }
    }

    fn parse_footer(&mut self, position: FilePosition) -> Result<(), TraceError> {
        let raw = &self.raw_block[..self.raw_block.len() - PADDING_BYTES];
        let json_bytes = if raw.len() >= 4 {
            u32_at(raw, 0) as usize
        } else {
            usize::MAX
        };
        let Some((json, index)) = raw
            .get(4..)
            .and_then(|rest| rest.split_at_checked(json_bytes))
        else {
            return self.format_error(
                position,
                "totals longer than the footer",
                "totals and index",
            );
        };
        if !index.len().is_multiple_of(24) || index.len() / 24 > INDEX_ENTRIES_LIMIT {
            return self.format_error(
                position,
                format!("an index of {} bytes", index.len()),
                "entries of 24 bytes, 2^20 at most",
            );
        }
        let totals: TraceTotals = serde_json::from_slice(json).map_err(|error| {
            TraceError::format_error(&self.file, position, error.to_string(), "totals in JSON")
        })?;
        if let Err((found, expected)) = totals.check() {
            return self.format_error(position, found, expected);
        }
        let index: Vec<IndexEntry> = index
            .chunks_exact(24)
            .map(|entry| IndexEntry {
                offset: u64_at(entry, 0),
                first_record: u64_at(entry, 8),
                block: u64_at(entry, 16),
            })
            .collect();
        if !index.is_sorted_by_key(|entry| entry.first_record) {
            return self.format_error(position, "an index out of order", "ascending records");
        }
        self.index = index;
        self.totals = Some(totals);
        Ok(())
    }

    /// Loads the next block into `raw_block`, and returns its number of records; `None` at the proper end.
    fn next_block(&mut self) -> Result<Option<usize>, TraceError> {
        let (section, position) = self.read_section()?;

        match section {
            SectionKind::Block { records } => {
                self.block += 1;
                self.next_record += records as u64;
                Ok(Some(records))
            }
            SectionKind::Footer => {
                self.parse_footer(position)?;
                let records = self.totals.as_ref().map(|totals| totals.records);
                if records != Some(self.next_record) {
                    let found = format!("totals of {} records", records.unwrap_or(0));
                    let expected = format!("{}, as many as were read", self.next_record);
                    return self.format_error(position, found, expected);
                }

                let mut trailer = [0u8; TRAILER_BYTES];
                read_exactly(
                    &mut self.input,
                    &mut trailer,
                    &self.file,
                    position,
                    "the trailer behind it",
                )?;
                if trailer[8..] != END_MAGIC {
                    let found = format!("'{}' behind it", trailer[8..].escape_ascii());
                    let expected = "'CMTREND\\x00'";
                    return self.format_error(position, found, expected);
                }

                Ok(None)
            }
        }
    }

    fn decode_next_block(&mut self, decode: impl FnOnce(&Block<'_>)) -> Result<bool, TraceError> {
        if self.is_ended {
            return Ok(false);
        }

        let position = FilePosition::Block {
            block: self.block,
            offset: self.offset,
        };
        let result = match self.next_block() {
            Ok(None) => {
                self.is_ended = true;
                return Ok(false);
            }
            Ok(Some(records)) => Block::check(&self.raw_block, records, self.version)
                .map(|block| decode(&block))
                .map_err(|(found, expected)| {
                    TraceError::format_error(&self.file, position, found, expected)
                }),
            Err(error) => Err(error),
        };
        let Err(error) = result else { return Ok(true) };

        // After an error nothing more is read, because later data cannot be trusted.
        self.is_ended = true;
        if !self.is_salvaging {
            return Err(error);
        }
        self.damage = Some(error);
        Ok(false)
    }
}

impl<R: Read + Seek> CmtReader<R> {
    fn read_trailer(&mut self) -> Result<(), TraceError> {
        let file = self.file.clone();
        let seek_error = || TraceError::io_error(&file, "seek in");
        let trailer_offset = self
            .input
            .seek(SeekFrom::End(-(TRAILER_BYTES as i64)))
            .map_err(seek_error())?;
        let mut trailer = [0u8; TRAILER_BYTES];
        let position = FilePosition::Byte(trailer_offset);
        read_exactly(
            &mut self.input,
            &mut trailer,
            &file,
            position,
            "the trailer",
        )?;

        let offset = u64_at(&trailer, 0);
        if trailer[8..] != END_MAGIC || offset < self.data_start || offset >= trailer_offset {
            return self.format_error(
                position,
                "no trailer",
                "the footer's offset and 'CMTREND\\x00'",
            );
        }
        self.input
            .seek(SeekFrom::Start(offset))
            .map_err(seek_error())?;
        self.offset = offset;
        match self.read_section()? {
            (SectionKind::Footer, place) => {
                self.parse_footer(place)?;
                let check = self.check_record_count(place, offset);
                if check.is_err() {
                    self.totals = None;
                }
                check
            }
            (SectionKind::Block { .. }, place) => self.format_error(place, "a block", "the footer"),
        }
    }

    /// Checks that the blocks before the footer have room for its number of records, because readers reserve memory for it
    /// before they read a block.
    fn check_record_count(
        &self,
        position: FilePosition,
        footer_offset: u64,
    ) -> Result<(), TraceError> {
        let block_bytes = footer_offset - self.data_start;
        let most = block_bytes / BLOCK_HEADER_BYTES as u64 * BLOCK_RECORDS as u64;
        let records = self.totals.as_ref().map_or(0, |totals| totals.records);
        if records > most {
            let found = format!("totals of {records} records");
            return self.format_error(position, found, format!("at most {most} in its blocks"));
        }
        Ok(())
    }

    fn seek_to_block(&mut self, entry: IndexEntry) -> Result<(), TraceError> {
        self.input
            .seek(SeekFrom::Start(entry.offset))
            .map_err(TraceError::io_error(&self.file, "seek in"))?;
        (self.offset, self.block, self.next_record) =
            (entry.offset, entry.block, entry.first_record);
        (self.is_ended, self.damage) = (false, None);
        Ok(())
    }

    /// Goes back to the first record.
    ///
    /// # Errors
    /// [`TraceError::Io`].
    pub fn rewind(&mut self) -> Result<(), TraceError> {
        self.seek_to_block(IndexEntry {
            offset: self.data_start,
            first_record: 0,
            block: 0,
        })
    }

    /// Seeks to the last indexed block that begins at or before `record`, and returns the number of its first record;
    /// the caller skips the difference. Without an index, this is the start.
    ///
    /// # Errors
    /// [`TraceError::Io`].
    pub fn seek_near(&mut self, record: u64) -> Result<u64, TraceError> {
        let next_index = self
            .index
            .partition_point(|entry| entry.first_record <= record);
        let start = IndexEntry {
            offset: self.data_start,
            first_record: 0,
            block: 0,
        };
        let entry = next_index
            .checked_sub(1)
            .map_or(start, |index| self.index[index]);
        self.seek_to_block(entry)?;
        Ok(entry.first_record)
    }
}

impl<R: Read + Send> TraceReader for CmtReader<R> {
    fn header(&self) -> &TraceHeader {
        &self.header
    }
    fn read_batch(&mut self, batch: &mut Vec<AccessRecord>) -> Result<bool, TraceError> {
        batch.clear();
        self.decode_next_block(|block| block.decode(batch))
    }
    fn read_addresses(&mut self, batch: &mut Vec<u64>) -> Result<bool, TraceError> {
        batch.clear();
        self.decode_next_block(|block| block.decode_addresses(batch))
    }
    fn totals(&self) -> Option<&TraceTotals> {
        self.totals.as_ref()
    }
}

fn read_exactly(
    input: &mut impl Read,
    buffer: &mut [u8],
    file: &str,
    position: FilePosition,
    expected: &str,
) -> Result<(), TraceError> {
    let expected_bytes = buffer.len();
    let mut read_bytes = 0;
    while read_bytes < expected_bytes {
        match input.read(&mut buffer[read_bytes..]) {
            Ok(0) => {
                let found = format!("the end of the file after {read_bytes} bytes");
                return Err(TraceError::format_error(file, position, found, expected));
            }
            Ok(count) => read_bytes += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(TraceError::io_error(file, "read")(error)),
        }
    }

    Ok(())
}

fn verify_checksum(
    file: &str,
    position: FilePosition,
    stored: u64,
    computed: u64,
) -> Result<(), TraceError> {
    if stored == computed {
        return Ok(());
    }
    Err(TraceError::format_error(
        file,
        position,
        format!("checksum {stored:016x}"),
        format!("{computed:016x} by its content"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are totals of more records than the blocks before them can hold refused, before a reader reserves memory for them?
    #[test]
    fn totals_of_more_records_than_the_blocks_can_hold_are_refused() {
        let header = TraceHeader::for_import("a.cmt", true);
        let writer = crate::CmtWriter::new(Vec::new(), "a.cmt".to_string(), &header, 3).unwrap();
        let (bytes, _) = writer.finish(TraceTotals::default()).unwrap();
        let mut reader = CmtReader::new(std::io::Cursor::new(bytes), "a.cmt").unwrap();
        let footer_offset = reader.data_start + 2 * BLOCK_HEADER_BYTES as u64;
        let mut check = |records: u64| {
            reader.totals = Some(TraceTotals {
                records,
                ..TraceTotals::default()
            });
            reader.check_record_count(FilePosition::File, footer_offset)
        };
        let most = 2 * BLOCK_RECORDS as u64;
        check(most).unwrap();
        for records in [most + 1, 1 << 60] {
            let error = check(records).unwrap_err().to_string();
            assert!(error.contains(&format!("at most {most}")), "{error}");
        }
    }

    /// Is an index out of order refused, which would lead a reader to another record than the one that it asked for?
    #[test]
    fn an_index_out_of_order_is_refused() {
        let header = TraceHeader::for_import("a.cmt", true);
        let writer = crate::CmtWriter::new(Vec::new(), "a.cmt", &header, 3).unwrap();
        let (bytes, totals) = writer.finish(TraceTotals::default()).unwrap();
        let json = serde_json::to_vec(&totals).unwrap();
        let is_accepted = |first_records: [u64; 2]| {
            let mut reader = CmtReader::new(&bytes[..], "a.cmt").unwrap();
            let mut raw = [&(json.len() as u32).to_le_bytes()[..], &json].concat();
            for first_record in first_records {
                raw.extend([7, first_record, 7].iter().flat_map(|n| n.to_le_bytes()));
            }
            raw.extend([0; PADDING_BYTES]);
            reader.raw_block = raw;
            reader.parse_footer(FilePosition::File).is_ok()
        };
        assert!(is_accepted([3, 5]) && !is_accepted([5, 3]));
    }
}
