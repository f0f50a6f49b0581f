//! A recording as a program of the simulator: one thread's records as an endless stream of accesses.

use std::path::{Path, PathBuf};

use cachemate_core::{Access, AccessKind, AccessSource, BatchEnd, FAR_DEPENDENCE};

use crate::{AccessRecord, CmtReader, FilePosition, TraceError, TraceReader};

/// Maximum number of instructions of a thread's recording, some hours of a fast core. A simulation of more, which a forged
/// file may state in a few bytes, would never end.
const MAX_ROUND_INSTRUCTIONS: u64 = 1 << 45;

/// Accesses per batch.
const BATCH_ACCESSES: usize = 2048;

/// One thread of a `.cmt` file in a loop: the first record follows the last one, and a phase shifts the start.
///
/// Records are loads or stores at their address (truncated to 48 bits) plus a load address. The instructions between
/// them become gaps, so that the loop executes exactly the thread's recorded instructions (one per access if they are
/// not known). A filtered recording gives the accesses that missed the filter. An access whose address depends on the
/// thread's preceding load is a dependent one; dependences on older loads are left out, because [`Access`] has no place for
/// them.
///
/// The file is read completely when it is opened, so that damage is found before a simulation begins. If it changes or
/// disappears afterward, the source returns [`BatchEnd::Exit`], and [`CmtSource::failure`] gives the reason.
pub struct CmtSource {
    path: PathBuf,
    reader: CmtReader<std::io::BufReader<std::fs::File>>,
    thread: u32,
    load_address: u64,
    are_instructions_known: bool,
    tail_instructions: u64,
    batch: Vec<AccessRecord>,
    position: usize,
    /// Instructions executed in excess of the records so far: those for the second access of one instruction.
    excess_instructions: u64,
    /// The thread's records since its last load, that one included; `None` before the first load.
    records_since_load: Option<u64>,
    rounds: u64,
    records_in_round: u64,
    records_per_round: u64,
    instructions_per_round: u64,
    failure: Option<TraceError>,
}

impl CmtSource {
    /// Opens `path` for one thread; addresses are shifted by `load_address` (wrapping at 48 bits), so that copies of
    /// one program have different addresses. The first `skip_records` of the thread's records come last in the first
    /// round, which is its phase.
    ///
    /// # Errors
    /// [`TraceError`] if the file is damaged, or has no record of that thread.
    pub fn open(
        path: impl AsRef<Path>,
        thread: u32,
        load_address: u64,
        skip_records: u64,
    ) -> Result<Self, TraceError> {
        let path = path.as_ref().to_path_buf();
        let name = path.display().to_string();
        let mut reader = CmtReader::open(&path)?;
        let (mut records_per_round, mut total_gap) = (0u64, 0u64);
        let mut batch = Vec::new();
        while reader.read_batch(&mut batch)? {
            for record in batch.iter().filter(|record| record.thread == thread) {
                records_per_round += 1;
                total_gap = total_gap.saturating_add(record.gap);
            }
        }

        if records_per_round == 0 {
            let totals = reader.totals();
            let threads = totals.map_or(0, |totals| {
                totals
                    .threads
                    .iter()
                    .filter(|thread| thread.records > 0)
                    .count()
            });

            let found = format!("no record of thread {thread}");
            let expected = match threads {
                0 => "at least one record: its program ended before the recorded part".to_string(),
                threads => format!("a thread among the {threads} it has"),
            };
            return Err(TraceError::format_error(
                &name,
                FilePosition::File,
                found,
                expected,
            ));
        }

        let thread_totals = reader
            .totals()
            .and_then(|totals| totals.threads.iter().find(|totals| totals.thread == thread));
        let instructions = thread_totals
            .and_then(|totals| totals.instructions)
            .unwrap_or(total_gap);
        if instructions.max(total_gap) > MAX_ROUND_INSTRUCTIONS {
            let found = format!("{} instructions", instructions.max(total_gap));
            let expected = format!("at most {MAX_ROUND_INSTRUCTIONS} in a recording");
            return Err(TraceError::format_error(
                &name,
                FilePosition::File,
                found,
                expected,
            ));
        }

        reader.rewind()?;
        let are_instructions_known = reader.header().instructions_known && instructions > 0;
        let mut source = CmtSource {
            are_instructions_known,
            path,
            reader,
            thread,
            load_address,
            tail_instructions: instructions.saturating_sub(total_gap),
            batch: Vec::new(),
            position: 0,
            excess_instructions: 0,
            records_since_load: None,
            rounds: 0,
            records_in_round: 0,
            records_per_round,
            instructions_per_round: if are_instructions_known {
                instructions
            } else {
                records_per_round
            },
            failure: None,
        };
        for _ in 0..skip_records % records_per_round {
            source.next_record()?;
        }

        Ok(source)
    }

    /// The reason why the source ended early.
    pub fn failure(&self) -> Option<&TraceError> {
        self.failure.as_ref()
    }
    /// A round is one pass through the recording; only the thread's records count.
    pub fn records_per_round(&self) -> u64 {
        self.records_per_round
    }

    /// As many as records if the recording does not know its instructions.
    pub fn instructions_per_round(&self) -> u64 {
        self.instructions_per_round
    }

    /// The thread's next record; at the end of the file its first one, preceded by the instructions of the tail.
    fn next_record(&mut self) -> Result<AccessRecord, TraceError> {
        let mut wrap_count = 0;
        let mut tail_instructions = 0;

        loop {
            while let Some(&record) = self.batch.get(self.position) {
                self.position += 1;
                if record.thread == self.thread {
                    self.records_in_round += 1;
                    return Ok(AccessRecord {
                        gap: record.gap.saturating_add(tail_instructions),
                        ..record
                    });
                }
            }
            self.position = 0;

            if !self.reader.read_batch(&mut self.batch)? {
                wrap_count += 1;
                if wrap_count > 1 {
                    let name = self.path.display().to_string();
                    let found = format!("no record of thread {} any more", self.thread);
                    let expected = "the file as it was opened";
                    return Err(TraceError::format_error(
                        &name,
                        FilePosition::File,
                        found,
                        expected,
                    ));
                }

                self.reader.rewind()?;
                self.rounds += 1;
                self.records_in_round = 0;
                tail_instructions = self.tail_instructions;
            }
        }
    }

    fn push_access(&mut self, record: AccessRecord, batch: &mut Vec<Access>) {
        let address = record.address.wrapping_add(self.load_address) & (Access::ADDRESS_LIMIT - 1);
        let mut instructions_between = 0;
        if self.are_instructions_known {
            // The access itself is one of the gap's instructions; with a gap of zero, it shares the instruction of the
            // previous record.
            match record.gap.checked_sub(1 + self.excess_instructions) {
                Some(remaining) => {
                    (instructions_between, self.excess_instructions) = (remaining, 0)
                }
                None => self.excess_instructions = self.excess_instructions + 1 - record.gap,
            }
        }

        if instructions_between >= u64::from(Access::GAP_LIMIT) {
            batch.push(Access::compute(
                instructions_between.min(Access::ADDRESS_LIMIT - 1),
            ));
            instructions_between = 0;
        }
        let gap = instructions_between as u32;
        let is_dependent = ![0, FAR_DEPENDENCE].contains(&record.dependence)
            && self.records_since_load == Some(u64::from(record.dependence));
        let kind = if record.store {
            AccessKind::Store
        } else {
            self.records_since_load = Some(0);
            AccessKind::Load
        };
        self.records_since_load = self.records_since_load.map(|count| count + 1);
        batch.push(Access::new(kind, address, gap, is_dependent));
    }
}

impl AccessSource for CmtSource {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        for _ in 0..BATCH_ACCESSES {
            match self.next_record() {
                Ok(record) => self.push_access(record, batch),
                Err(error) => {
                    self.failure = Some(error);
                    return BatchEnd::Exit;
                }
            }
        }
        BatchEnd::More
    }

    /// The completed rounds through the recording.
    fn progress(&self) -> Option<f64> {
        Some(self.rounds as f64 + self.records_in_round as f64 / self.records_per_round as f64)
    }
}

#[cfg(test)]
mod tests;
