//! The hardware's state of a thread: its stream of accesses with the current position, its translations, and its
//! counters.

use cachemate_core::{Access, AccessSource, BatchEnd, ProcessId, TaskId};

use super::counters::TaskCounters;
use super::probe::Probes;
use super::sampling::SamplingUnit;

/// Bytes of an instruction, for code fetches.
const INSTRUCTION_BYTES: u64 = 4;

/// A software thread, loaded on a context or not.
pub struct HwThread {
    /// The thread's number, also used in the caches' records.
    pub task: TaskId,
    /// The process whose pages the thread touches.
    pub process: ProcessId,
    /// Class of service, which selects the way masks.
    pub class: u8,
    /// Counters, complete up to the last stop; see [`super::Hardware::thread`].
    pub counters: TaskCounters,
    pub(crate) probes: Probes,
    pub(crate) source: Box<dyn AccessSource>,
    pub(crate) batch: Vec<Access>,
    pub(crate) position: usize,
    /// Number of instructions of `batch[position]` that have already been issued.
    pub(crate) issued_in_record: u64,
    /// The source's request at the end of the batch.
    pub(crate) batch_end: BatchEnd,
    pub(crate) tlb: TranslationTable,
    /// Virtual address of the code that is fetched when `instructions_until_fetch` is used up.
    pub(crate) next_code_address: u64,
    /// Number of instructions until the next fetch; `u64::MAX` for a source that has named no code address yet.
    pub(crate) instructions_until_fetch: u64,
}

impl HwThread {
    /// Builds a thread at the start of its source, with nothing counted. Class 0 has all ways unless it was restricted.
    pub fn new(task: TaskId, process: ProcessId, class: u8, source: Box<dyn AccessSource>) -> Self {
        HwThread {
            task,
            process,
            class,
            counters: TaskCounters::default(),
            probes: Probes::default(),
            source,
            batch: Vec::new(),
            position: 0,
            issued_in_record: 0,
            batch_end: BatchEnd::More,
            tlb: TranslationTable::default(),
            next_code_address: 0,
            instructions_until_fetch: u64::MAX,
        }
    }

    /// Drops the translation of a page whose frame changes, while the thread is not loaded on a context.
    pub fn shoot_down(&mut self, page: u64) {
        self.tlb.drop_page(page);
    }

    /// Fetches the next batch when the last one is used up.
    pub(crate) fn fetch_next_batch(&mut self) {
        self.batch.clear();
        self.position = 0;
        self.batch_end = self.source.next_batch(&mut self.batch);
    }

    /// Transfers control to `target`. Within the line that is being fetched, no new fetch is needed (a loop buffer).
    pub(crate) fn jump_to(&mut self, target: u64, line_bytes: u64) {
        let line_start = target & !(line_bytes - 1);
        if self.instructions_until_fetch != u64::MAX
            && line_start + line_bytes == self.next_code_address
        {
            self.instructions_until_fetch =
                (self.next_code_address - target).div_ceil(INSTRUCTION_BYTES);
        } else {
            (self.next_code_address, self.instructions_until_fetch) = (target, 0);
        }
    }

    /// Advances past the line at `next_code_address`, which is present now.
    pub(crate) fn advance_past_fetched_line(&mut self, line_bytes: u64) {
        let line_end = (self.next_code_address & !(line_bytes - 1)) + line_bytes;
        self.instructions_until_fetch =
            (line_end - self.next_code_address).div_ceil(INSTRUCTION_BYTES);
        self.next_code_address = line_end;
    }

    /// Reports the line that was fetched last to the probes that watch locations.
    pub(crate) fn report_code_line(&mut self, line_shift: u32, tick: u64, sampling: SamplingUnit) {
        self.probes
            .observe_code((self.next_code_address - 1) >> line_shift, tick, sampling);
    }

    /// The task's number in the caches' records. Tasks from 65 533 on share one number.
    pub(crate) fn slot_number(&self) -> u16 {
        self.task.0.min(u32::from(u16::MAX) - 2) as u16
    }

    /// Work in the program's own unit; `None` if it has none.
    pub fn progress(&self) -> Option<f64> {
        self.source.progress()
    }
}

/// Direct-mapped translations, so that the operating system is rarely called. This does not model a TLB: it costs no
/// time.
pub(crate) struct TranslationTable {
    /// By low bits of the virtual page: the other bits + 1 (0 if empty) above the frame, which is below 2^32.
    entries: Box<[u64; TLB_ENTRIES]>,
}

const TLB_ENTRIES: usize = 1024;

impl Default for TranslationTable {
    fn default() -> Self {
        TranslationTable {
            entries: Box::new([0; TLB_ENTRIES]),
        }
    }
}

impl TranslationTable {
    /// Pages are below 2^41: 48 bits of address, at least 128 bytes per page.
    #[inline]
    fn page_tag(page: u64) -> u64 {
        page / TLB_ENTRIES as u64 + 1
    }
    #[inline]
    pub(crate) fn find(&self, page: u64) -> Option<u64> {
        let (is_mapped, frame) = self.probe_entry(page);
        is_mapped.then_some(frame)
    }
    /// Whether the page is present, and the frame stored in its place.
    #[inline(always)]
    pub(crate) fn probe_entry(&self, page: u64) -> (bool, u64) {
        let entry = self.entries[page as usize % TLB_ENTRIES];
        (
            entry >> 32 == Self::page_tag(page),
            entry & u64::from(u32::MAX),
        )
    }
    pub(crate) fn insert(&mut self, page: u64, frame: u64) {
        self.entries[page as usize % TLB_ENTRIES] = Self::page_tag(page) << 32 | frame;
    }
    pub(crate) fn drop_page(&mut self, page: u64) {
        let entry = &mut self.entries[page as usize % TLB_ENTRIES];
        if *entry >> 32 == Self::page_tag(page) {
            *entry = 0;
        }
    }
}
