//! The reader of every foreign format: a source of records, with the header and the totals that all formats share.

use crate::{AccessRecord, TraceError, TraceHeader, TraceReader, TraceTotals};

/// Number of records per batch of a foreign format.
pub(super) const BATCH_RECORDS: usize = 1 << 14;

/// Counts of a foreign trace so far.
#[derive(Default)]
pub struct ImportCounts {
    records: u64,
    /// Instructions since the last access.
    gap: u64,
    /// `None` for a trace that does not count them.
    pub(super) instructions: Option<u64>,
}

impl ImportCounts {
    pub(super) fn count_instruction(&mut self) {
        self.gap += 1;
        *self.instructions.get_or_insert(0) += 1;
    }

    /// Returns the record of the next access.
    pub(super) fn record_access(&mut self, address: u64, size: u16, store: bool) -> AccessRecord {
        AccessRecord {
            address,
            gap: std::mem::take(&mut self.gap),
            thread: 0,
            size,
            store,
        }
    }
}

/// Source of the records of one foreign format.
pub trait RecordSource: Send {
    /// Appends the next records to an empty batch; none at the end. An error is returned after the records before it.
    fn read_records(
        &mut self,
        counts: &mut ImportCounts,
        batch: &mut Vec<AccessRecord>,
    ) -> Result<(), TraceError>;

    /// Appends the addresses of the next records to an empty batch.
    fn read_addresses(
        &mut self,
        counts: &mut ImportCounts,
        batch: &mut Vec<u64>,
    ) -> Result<(), TraceError> {
        let mut records = Vec::new();
        self.read_records(counts, &mut records)?;
        batch.extend(records.iter().map(|record| record.address));
        Ok(())
    }
}

/// Reads the trace of another tool.
pub struct ImportReader<S> {
    pub(super) source: S,
    header: TraceHeader,
    counts: ImportCounts,
    totals: Option<TraceTotals>,
}

impl<S> ImportReader<S> {
    /// Builds a reader; `tool` names the format in the header.
    pub(super) fn new(source: S, tool: &str, instructions_known: bool) -> Self {
        let (header, counts) = (
            TraceHeader::for_import(tool, instructions_known),
            ImportCounts::default(),
        );
        ImportReader {
            source,
            header,
            counts,
            totals: None,
        }
    }

    /// Counts a batch, and returns whether it is not the end.
    fn count_batch(&mut self, records: usize) -> bool {
        self.counts.records += records as u64;
        if records == 0 {
            self.totals = Some(TraceTotals {
                records: self.counts.records,
                program_accesses: Some(self.counts.records),
                instructions: self.counts.instructions,
                ..TraceTotals::default()
            });
        }
        records > 0
    }
}

impl<S: RecordSource> TraceReader for ImportReader<S> {
    fn header(&self) -> &TraceHeader {
        &self.header
    }
    fn read_batch(&mut self, batch: &mut Vec<AccessRecord>) -> Result<bool, TraceError> {
        batch.clear();
        self.source.read_records(&mut self.counts, batch)?;
        Ok(self.count_batch(batch.len()))
    }
    fn read_addresses(&mut self, batch: &mut Vec<u64>) -> Result<bool, TraceError> {
        batch.clear();
        self.source.read_addresses(&mut self.counts, batch)?;
        Ok(self.count_batch(batch.len()))
    }
    fn totals(&self) -> Option<&TraceTotals> {
        self.totals.as_ref()
    }
}
