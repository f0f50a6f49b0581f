//! Writes `.cmt` as a stream, with one block in memory.

use std::io::Write;

use xxhash_rust::xxh3::Xxh3;

use super::block::Columns;
use super::{
    BLOCK_HEADER_BYTES, BLOCK_MAGIC, BLOCK_RECORDS, CMT_VERSION, END_MAGIC, FILE_MAGIC,
    FOOTER_HEADER_BYTES, FOOTER_LIMIT, FOOTER_MAGIC, HEADER_JSON_LIMIT, INDEX_ENTRIES_LIMIT,
    IndexEntry,
};
use crate::FilePosition;
use crate::{AccessRecord, ThreadTotals, TraceError, TraceHeader, TraceTotals};

/// Writes records into blocks; [`CmtWriter::finish`] closes the file with totals and index.
///
/// Without that call the file is truncated: readable up to its last complete block.
pub struct CmtWriter<W: Write> {
    out: W,
    file: String,
    columns: Columns,
    raw: Vec<u8>,
    packed: Vec<u8>,
    compressor: zstd::bulk::Compressor<'static>,
    offset: u64,
    record_count: u64,
    block_count: u64,
    index: Vec<IndexEntry>,
    index_stride: u64,
    records_by_thread: std::collections::BTreeMap<u32, u64>,
}

impl<W: Write> CmtWriter<W> {
    /// Starts a file. `file` is its name in errors; `level` is the zstd level (3 while recording, 19 for files to
    /// ship).
    ///
    /// # Errors
    /// [`TraceError::Io`] if the header cannot be written, [`TraceError::Bad`] if it is larger than 4 MiB.
    pub fn new(
        mut out: W,
        file: impl Into<String>,
        header: &TraceHeader,
        level: i32,
    ) -> Result<Self, TraceError> {
        let file = file.into();
        let json = serde_json::to_vec(header).map_err(|error| {
            TraceError::format_error(
                &file,
                FilePosition::File,
                error.to_string(),
                "a header that JSON can hold",
            )
        })?;
        if json.len() > HEADER_JSON_LIMIT {
            let found = format!("a header of {} bytes", json.len());
            let expected = format!("at most {HEADER_JSON_LIMIT}");
            return Err(TraceError::format_error(
                &file,
                FilePosition::File,
                found,
                expected,
            ));
        }

        let mut bytes = FILE_MAGIC.to_vec();
        bytes.extend_from_slice(&CMT_VERSION.to_le_bytes());
        bytes.extend_from_slice(&(json.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&json);
        let checksum = xxhash_rust::xxh3::xxh3_64(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        out.write_all(&bytes)
            .map_err(TraceError::io_error(&file, "write"))?;
        let compressor = zstd::bulk::Compressor::new(level)
            .map_err(TraceError::io_error(&file, "start zstd for"))?;

        Ok(CmtWriter {
            out,
            file,
            columns: Columns::default(),
            raw: Vec::new(),
            packed: Vec::new(),
            compressor,
            offset: bytes.len() as u64,
            record_count: 0,
            block_count: 0,
            index: Vec::new(),
            index_stride: 1,
            records_by_thread: Default::default(),
        })
    }

    /// Records written so far.
    pub fn records(&self) -> u64 {
        self.record_count
    }
    /// Bytes written so far (complete blocks).
    pub fn bytes(&self) -> u64 {
        self.offset
    }

    /// Appends one record.
    ///
    /// # Errors
    /// [`TraceError::Io`] if a full block cannot be written.
    #[inline]
    pub fn push(&mut self, record: &AccessRecord) -> Result<(), TraceError> {
        self.columns.push(record);
        self.record_count += 1;
        if self.columns.len() == BLOCK_RECORDS {
            self.flush_block()
        } else {
            Ok(())
        }
    }

    /// Appends several records.
    pub fn push_all(&mut self, records: &[AccessRecord]) -> Result<(), TraceError> {
        records.iter().try_for_each(|record| self.push(record))
    }

    /// Writes the pending records as a separate block.
    ///
    /// # Errors
    /// [`TraceError::Io`] if it cannot be written.
    pub fn flush_block(&mut self) -> Result<(), TraceError> {
        let records = self.columns.len();
        if records == 0 {
            return Ok(());
        }

        for (thread, count) in self.columns.records_by_run() {
            *self.records_by_thread.entry(thread).or_default() += count;
        }

        self.columns.take_columns(&mut self.raw);
        self.compress()?;
        let mut head = [0u8; BLOCK_HEADER_BYTES];
        head[..4].copy_from_slice(&BLOCK_MAGIC);
        head[4..8].copy_from_slice(&(records as u32).to_le_bytes());
        head[8..12].copy_from_slice(&(self.packed.len() as u32).to_le_bytes());
        head[12..16].copy_from_slice(&(self.raw.len() as u32).to_le_bytes());
        let first_record = self.record_count - records as u64;
        head[16..24].copy_from_slice(&first_record.to_le_bytes());
        let mut hash = Xxh3::new();
        hash.update(&head[..24]);
        hash.update(&self.packed);
        head[24..].copy_from_slice(&hash.digest().to_le_bytes());
        self.push_index_entry(first_record);
        self.block_count += 1;
        self.write_section(&head)
    }

    fn push_index_entry(&mut self, first_record: u64) {
        if !self.block_count.is_multiple_of(self.index_stride) {
            return;
        }
        if self.index.len() == INDEX_ENTRIES_LIMIT {
            let mut visited_count = 0u64;
            self.index.retain(|_| {
                visited_count += 1;
                visited_count % 2 == 1
            });
            self.index_stride *= 2;
        }
        self.index.push(IndexEntry {
            offset: self.offset,
            first_record,
            block: self.block_count,
        });
    }

    fn compress(&mut self) -> Result<(), TraceError> {
        self.packed.clear();
        self.packed
            .reserve(zstd::zstd_safe::compress_bound(self.raw.len()));
        let pack_result = self
            .compressor
            .compress_to_buffer(&self.raw, &mut self.packed);
        pack_result
            .map(|_| ())
            .map_err(TraceError::io_error(&self.file, "compress a block of"))
    }

    fn write_section(&mut self, head: &[u8]) -> Result<(), TraceError> {
        let outcome = self
            .out
            .write_all(head)
            .and_then(|()| self.out.write_all(&self.packed));
        outcome.map_err(TraceError::io_error(&self.file, "write"))?;
        self.offset += (head.len() + self.packed.len()) as u64;
        Ok(())
    }

    /// Closes the file. The writer fills in the record counts of `totals` and adds missing threads; it stores the rest
    /// as given. Returns the underlying writer and the stored totals.
    ///
    /// # Errors
    /// [`TraceError::Io`] if it cannot be written.
    pub fn finish(mut self, mut totals: TraceTotals) -> Result<(W, TraceTotals), TraceError> {
        self.flush_block()?;
        totals.records = self.record_count;
        let mut records_by_thread = std::mem::take(&mut self.records_by_thread);
        for thread_totals in &mut totals.threads {
            if let Some(records) = records_by_thread.remove(&thread_totals.thread) {
                thread_totals.records = records;
            }
        }
        let missing_threads = records_by_thread.into_iter();
        let missing_totals = missing_threads.map(|(thread, records)| ThreadTotals {
            thread,
            records,
            ..Default::default()
        });
        totals.threads.extend(missing_totals);
        totals.threads.sort_by_key(|totals| totals.thread);
        let json = serde_json::to_vec(&totals).map_err(|error| {
            TraceError::format_error(
                &self.file,
                FilePosition::File,
                error.to_string(),
                "totals that JSON can hold",
            )
        })?;

        self.raw.clear();
        self.raw
            .extend_from_slice(&(json.len() as u32).to_le_bytes());
        self.raw.extend_from_slice(&json);
        for entry in &self.index {
            for number in [entry.offset, entry.first_record, entry.block] {
                self.raw.extend_from_slice(&number.to_le_bytes());
            }
        }

        if self.raw.len() > FOOTER_LIMIT {
            let found = format!("totals and index of {} bytes", self.raw.len());
            let expected = format!("at most {FOOTER_LIMIT}");
            return Err(TraceError::format_error(
                &self.file,
                FilePosition::File,
                found,
                expected,
            ));
        }

        self.compress()?;
        let footer_offset = self.offset;
        let mut head = [0u8; FOOTER_HEADER_BYTES];
        head[..4].copy_from_slice(&FOOTER_MAGIC);
        head[8..12].copy_from_slice(&(self.packed.len() as u32).to_le_bytes());
        head[12..16].copy_from_slice(&(self.raw.len() as u32).to_le_bytes());
        let mut hash = Xxh3::new();
        hash.update(&head[..16]);
        hash.update(&self.packed);
        head[16..].copy_from_slice(&hash.digest().to_le_bytes());
        self.write_section(&head)?;
        let mut trailer = footer_offset.to_le_bytes().to_vec();
        trailer.extend_from_slice(&END_MAGIC);
        let outcome = self.out.write_all(&trailer).and_then(|()| self.out.flush());
        outcome.map_err(TraceError::io_error(&self.file, "write"))?;
        Ok((self.out, totals))
    }
}
