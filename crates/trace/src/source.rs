//! A recording as a program of the simulator: one thread's records as an endless stream of accesses.

use std::path::{Path, PathBuf};

use cachemate_core::{Access, AccessSource, BatchEnd};

use crate::{AccessRecord, CmtReader, FilePosition, TraceError, TraceReader};

/// Accesses per batch.
const TURN_ACCESSES: usize = 2048;

/// One thread of a `.cmt` file in a loop: the first record follows the last one, and a phase shifts the start.
///
/// Records are loads or stores at their address (truncated to 48 bits) plus a load address. The instructions between
/// them become gaps, so that the loop executes exactly the thread's recorded instructions (one per access if they are
/// not known). A filtered recording gives the accesses that missed the filter.
///
/// The file is read completely when it is opened, so that damage is found before a simulation begins. If it changes or
/// disappears afterward, the source returns [`BatchEnd::Exit`], and [`CmtSource::failure`] gives the reason.
pub struct CmtSource {
    path: PathBuf,
    reader: CmtReader<std::io::BufReader<std::fs::File>>,
    thread: u32,
    load_at: u64,
    instructions_known: bool,
    tail_instructions: u64,
    batch: Vec<AccessRecord>,
    position: usize,
    /// Instructions executed in excess of the records so far: those for the second access of one instruction.
    debt: u64,
    rounds: u64,
    done_in_round: u64,
    per_round: u64,
    instructions_per_round: u64,
    failure: Option<TraceError>,
}

impl CmtSource {
    /// Opens `path` for one thread; addresses are shifted by `load_at` (wrapping at 48 bits), so that copies of one
    /// program have different addresses. The first `skip_records` of the thread's records come last in the first round,
    /// which is its phase.
    ///
    /// # Errors
    /// [`TraceError`] if the file is damaged, or has no record of that thread.
    pub fn open(path: impl AsRef<Path>, thread: u32, load_at: u64, skip_records: u64) -> Result<Self, TraceError> {
        let path = path.as_ref().to_path_buf();
        let name = path.display().to_string();
        let mut reader = CmtReader::open(&path)?;
        let (mut per_round, mut gaps) = (0u64, 0u64);
        let mut batch = Vec::new();
        while reader.read_batch(&mut batch)? {
            for record in batch.iter().filter(|record| record.thread == thread) {
                per_round += 1;
                gaps = gaps.saturating_add(record.gap);
            }
        }
        if per_round == 0 {
            let totals = reader.totals();
            let threads = totals.map_or(0, |totals| totals.threads.iter().filter(|thread| thread.records > 0).count());
            let found = format!("no record of thread {thread}");
            let expected = format!("a thread among the {threads} it has");
            return Err(TraceError::format_error(&name, FilePosition::File, found, expected));
        }
        let of_thread = reader.totals().and_then(|totals| totals.threads.iter().find(|totals| totals.thread == thread));
        let instructions = of_thread.and_then(|totals| totals.instructions).unwrap_or(gaps);
        reader.rewind()?;
        let instructions_known = reader.header().instructions_known;
        let mut source = CmtSource {
            instructions_known,
            path,
            reader,
            thread,
            load_at,
            tail_instructions: instructions.saturating_sub(gaps),
            batch: Vec::new(),
            position: 0,
            debt: 0,
            rounds: 0,
            done_in_round: 0,
            per_round,
            instructions_per_round: if instructions_known { instructions } else { per_round },
            failure: None,
        };
        for _ in 0..skip_records % per_round {
            source.next_record()?;
        }
        Ok(source)
    }

    /// The reason why the source ended early.
    pub fn failure(&self) -> Option<&TraceError> {
        self.failure.as_ref()
    }
    /// Number of the thread's records in one round.
    pub fn records_per_round(&self) -> u64 {
        self.per_round
    }

    /// Number of instructions that one round executes.
    pub fn instructions_per_round(&self) -> u64 {
        self.instructions_per_round
    }

    /// The thread's next record; at the end of the file its first one, preceded by the instructions of the tail.
    fn next_record(&mut self) -> Result<AccessRecord, TraceError> {
        let mut wrapped = 0;
        let mut tail = 0;
        loop {
            while let Some(&record) = self.batch.get(self.position) {
                self.position += 1;
                if record.thread == self.thread {
                    self.done_in_round += 1;
                    return Ok(AccessRecord { gap: record.gap.saturating_add(tail), ..record });
                }
            }
            self.position = 0;
            if !self.reader.read_batch(&mut self.batch)? {
                wrapped += 1;
                if wrapped > 1 {
                    let name = self.path.display().to_string();
                    let found = format!("no record of thread {} any more", self.thread);
                    let expected = "the file as it was opened";
                    return Err(TraceError::format_error(&name, FilePosition::File, found, expected));
                }
                self.reader.rewind()?;
                self.rounds += 1;
                self.done_in_round = 0;
                tail = self.tail_instructions;
            }
        }
    }

    fn push(&mut self, record: AccessRecord, batch: &mut Vec<Access>) {
        let address = record.address.wrapping_add(self.load_at) & (Access::ADDRESS_LIMIT - 1);
        let mut accesses_between = 0;
        if self.instructions_known {
            // The access itself is one of the gap's instructions; with a gap of zero, it shares the instruction of the
            // previous record.
            match record.gap.checked_sub(1 + self.debt) {
                Some(remaining) => (accesses_between, self.debt) = (remaining, 0),
                None => self.debt = self.debt + 1 - record.gap,
            }
        }
        if accesses_between >= u64::from(Access::GAP_LIMIT) {
            batch.push(Access::compute(accesses_between.min(Access::ADDRESS_LIMIT - 1)));
            accesses_between = 0;
        }
        let gap = accesses_between as u32;
        batch.push(if record.store { Access::store(address, gap) } else { Access::load(address, gap) });
    }
}

impl AccessSource for CmtSource {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        for _ in 0..TURN_ACCESSES {
            match self.next_record() {
                Ok(record) => self.push(record, batch),
                Err(error) => {
                    self.failure = Some(error);
                    return BatchEnd::Exit;
                }
            }
        }
        BatchEnd::More
    }

    /// Completed rounds through the recording.
    fn progress(&self) -> Option<f64> {
        Some(self.rounds as f64 + self.done_in_round as f64 / self.per_round as f64)
    }
}

#[cfg(test)]
mod tests;
