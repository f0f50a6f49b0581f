//! The reader of every foreign format: a source of records, with the header and the totals that all formats share.

use std::collections::BTreeMap;

use crate::record_type::MAX_THREADS;
use crate::{AccessRecord, ThreadTotals, TraceError, TraceHeader, TraceReader, TraceTotals};

/// Number of records per batch of a foreign format.
pub(super) const BATCH_RECORDS: usize = 1 << 14;

/// Counts of a foreign trace so far.
#[derive(Default)]
pub struct ImportCounts {
    records: u64,
    /// The threads, in the order of their first lines; one for a trace that does not tell threads apart.
    threads: Vec<ImportedThread>,
    /// Index of each of them, by the recording tool's number.
    thread_indices: BTreeMap<u64, usize>,
    /// Index of the thread of the last line, which most lines share.
    last_thread: usize,
    /// Whether the trace counts instructions.
    pub(super) counts_instructions: bool,
}

/// Counts of one thread.
#[derive(Default)]
struct ImportedThread {
    /// The recording tool's number.
    tid: u64,
    records: u64,
    instructions: u64,
    /// Instructions since the last access.
    gap: u64,
}

impl ImportCounts {
    fn thread_mut(&mut self, tid: u64) -> &mut ImportedThread {
        let is_last = self
            .threads
            .get(self.last_thread)
            .is_some_and(|thread| thread.tid == tid);
        if !is_last {
            let next_index = self.threads.len();
            self.last_thread = *self.thread_indices.entry(tid).or_insert(next_index);
            if self.last_thread == next_index {
                self.threads.push(ImportedThread {
                    tid,
                    ..ImportedThread::default()
                });
            }
        }
        &mut self.threads[self.last_thread]
    }

    /// Whether the thread is known, or may be a further one.
    pub(super) fn has_room_for(&self, tid: u64) -> bool {
        self.threads.len() < MAX_THREADS || self.thread_indices.contains_key(&tid)
    }

    pub(super) fn count_instruction(&mut self, tid: u64) {
        self.counts_instructions = true;
        let thread = self.thread_mut(tid);
        thread.gap += 1;
        thread.instructions += 1;
    }

    /// Its gap is what the thread has executed since its last access.
    pub(super) fn record_access(
        &mut self,
        tid: u64,
        address: u64,
        size: u16,
        store: bool,
    ) -> AccessRecord {
        let thread = self.thread_mut(tid);
        thread.records += 1;
        let gap = std::mem::take(&mut thread.gap);
        AccessRecord {
            address,
            gap,
            thread: self.last_thread as u32,
            size,
            store,
            ..AccessRecord::default()
        }
    }

    /// A single thread is not listed.
    fn totals(&self) -> TraceTotals {
        let sum = self.threads.iter().map(|thread| thread.instructions).sum();
        let totals = |(index, thread): (usize, &ImportedThread)| ThreadTotals {
            thread: index as u32,
            process: 0,
            created: None,
            os_thread: u32::try_from(thread.tid).ok(),
            records: thread.records,
            accesses: Some(thread.records),
            instructions: self.counts_instructions.then_some(thread.instructions),
        };

        let has_threads = self.threads.len() > 1;
        TraceTotals {
            records: self.records,
            program_accesses: Some(self.records),
            instructions: self.counts_instructions.then_some(sum),
            threads: match has_threads {
                true => self.threads.iter().enumerate().map(totals).collect(),
                false => Vec::new(),
            },
            ..TraceTotals::default()
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
    /// Builds a reader; `tool` names the format in the header. The header knows of instructions once a batch has any.
    pub(super) fn new(source: S, tool: &str) -> Self {
        ImportReader {
            source,
            header: TraceHeader::for_import(tool, false),
            counts: ImportCounts::default(),
            totals: None,
        }
    }

    /// Sets the totals of a file that has this number of records, if it is known, and nothing else to count.
    pub(super) fn with_records(mut self, records: Option<u64>) -> Self {
        let counts = |records| ImportCounts {
            records,
            ..ImportCounts::default()
        };
        self.totals = records.map(|records| counts(records).totals());
        self
    }

    /// `false` for an empty batch, which is the end and fixes the totals.
    fn count_batch(&mut self, records: usize) -> bool {
        self.header.instructions_known = self.counts.counts_instructions;
        self.counts.records += records as u64;
        if records == 0 {
            self.totals = Some(self.counts.totals());
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

#[cfg(test)]
mod tests {
    use super::super::text::drmemtrace_reader;
    use super::*;

    /// Is a text refused at the first line of a thread beyond the maximum, and read as long as it has only known ones?
    #[test]
    fn a_thread_beyond_the_maximum_is_refused_with_its_line() {
        let view = "1 1: 7 read 8 byte(s) @ 0x1000\n2 1: 7 read 8 byte(s) @ 0x1008\n3 1: 9 read 8 byte(s) @ 0x1010\n";
        let mut reader = drmemtrace_reader(view.as_bytes(), "v".to_string());
        let earlier_threads = (1..MAX_THREADS).map(|_| ImportedThread::default());
        reader.counts.threads = earlier_threads.collect();
        let mut batch = Vec::new();
        assert!(reader.read_batch(&mut batch).unwrap());
        assert_eq!(batch.len(), 2);
        let message = reader.read_batch(&mut batch).unwrap_err().to_string();
        assert!(
            message.starts_with("v: line 3: ") && message.ends_with("at most 1048576 threads"),
            "{message}"
        );
    }
}
