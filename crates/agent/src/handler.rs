//! The handler: the single thread that assigns frames to missing pages, re-colors pages that have
//! wrong ones, and counts both.
//!
//! It runs inside a program that knows nothing of it, and answers the page faults of that program's
//! other threads, so whatever it waits for may be waiting for it: the allocator's lock, a page of
//! its own stack that is missing, a file that is not yet read. It therefore allocates nothing,
//! acquires no lock of the program, and touches no memory whose pages may be missing: the stack,
//! the frame pool and the file mappings belong to the handler, and are never registered with the
//! userfaultfd.
//!
//! For example, a thread touches a new page of its heap. The kernel stops it and sends the address;
//! the handler takes a frame of an allowed color from its stock and moves it there (`UFFDIO_MOVE`),
//! and the thread goes on. If the stock has none, it gets a frame of any color, which is counted
//! and migrated later, because a program that is slower is better than one that hangs.
//!
//! A fault, an event, a page being moved, and a frame being classified are handled one after the
//! other, so that no two of them see a page between two states.

use crate::frame_pool::{FramePool, FreeList};
use crate::handshake;
use crate::layout::{PAGE_BYTES, TARGET_BYTES, TICK_MS, parse_target};
use crate::ledger::Ledger;
use crate::maps::{AddressRange, AddressRanges, read_ranges};
use crate::removed_ranges::RemovedRanges;
use crate::sys::{self, userfaultfd};
use crate::timing::{BATCH_PAGES, ReferenceSet};

mod refill;

const PAGE: u64 = PAGE_BYTES as u64;
/// Frames of allowed colors that are kept ready while the program is idle.
const READY_FRAMES: u32 = 256;
/// Frames that the program waits for at its start; many programs never touch more pages.
const INITIAL_FRAMES: u32 = 64;
/// Maximum number of frames that one fault may fetch and classify before it gets any frame.
const MAX_FAULT_FRAMES: u32 = 2048;
/// Maximum number of consecutive pages that get frames ahead of their first touch.
const MAX_PAGES_AHEAD: u64 = 16;
/// Time that background work takes before the handler checks for faults again.
const SLICE_NS: u64 = 200_000;
/// Minimum interval between two counts of all resident pages; it grows so that counting takes at most a fiftieth of the
/// time.
const MIN_COUNT_PERIOD_NS: u64 = 250_000_000;
const COUNT_TIME_DIVISOR: u64 = 50;
/// Interval between two scans for ranges that the program has mapped: short after a fault, longer while nothing
/// happens.
const MIN_SCAN_PERIOD_NS: u64 = 20_000_000;
const MAX_SCAN_PERIOD_NS: u64 = 500_000_000;
/// Maximum number of attempts to return a page, so that a range that never settles does not stop the handler for good.
const MAX_RESTORE_ATTEMPTS: u32 = 1_000_000;

/// Descriptors that the handler uses; negative if not open.
#[derive(Clone, Copy, Debug)]
pub struct Files {
    /// The userfaultfd.
    pub fault_fd: isize,
    /// The process's `wanted` file ([`crate::layout`]).
    pub target_fd: isize,
    /// The process's `status` file.
    pub status_fd: isize,
    /// `/proc/self/pagemap`; opened by [`Agent::open_own_descriptors`].
    pub pagemap_fd: isize,
}

/// Declares [`AgentCounters`]. The status file has them under these names and in this order, and `turn` once more as
/// its last line: a reader accepts a file only if both lines agree, because otherwise it was read while it was written.
macro_rules! status_counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of the status file, under these names.
        #[derive(Clone, Copy, Default, Debug)]
        struct AgentCounters { $($(#[$doc])* $name: u64),* }
        impl AgentCounters {
            const LINES: usize = [$(stringify!($name)),*].len();
            fn lines(&self) -> [(&'static str, u64); Self::LINES] { [$((stringify!($name), self.$name)),*] }
        }
    };
}
status_counters!(
    /// Ticks of [`TICK_MS`] or more in which the handler ran.
    turn,
    /// Allowed colors, one bit each.
    mask,
    /// Missing pages that a thread waited for.
    faults,
    /// Time from reading such a fault until it was resolved, including the pages that got frames ahead.
    fault_ns,
    /// Pages that had a frame before they were touched.
    faults_ahead,
    /// Pages that got a frame from the pool whose color is not allowed, or is not known.
    fallback_frames,
    /// Pages that were left to the kernel's zero page, and therefore to its frames.
    kernel_frames,
    /// Resident pages with an allowed color, in the last complete pass.
    allowed_pages,
    /// Resident pages with another color, in the last complete pass.
    other_pages,
    /// Resident pages with a color that the ledger does not know, in the last complete pass.
    unknown_pages,
    /// Pages re-colored since the mask last changed.
    recolor_done,
    /// `recolor_done`, plus the pages that the last complete pass left; 0 until a pass has ended under this mask.
    recolor_total,
    /// Pages re-colored since the start.
    moved_pages,
    /// Time for which pages were moved out.
    moved_ns,
    /// Pages that the kernel refused to move: in use elsewhere, or being changed.
    busy_pages,
    /// Pages that could not be moved back, and got a frame from the kernel with their content.
    copied_back,
    /// Pages that could not be restored at all.
    lost_pages,
    /// Frames in the pool.
    held_frames,
    /// Maximum number of frames that were in the pool.
    max_held,
    /// Number of frames that the pool may hold.
    max_hold,
    /// Frames whose color was measured by timing, with or without a result.
    classified,
    /// Time spent on these measurements.
    classify_ns,
    /// Frames whose color the ledger knew.
    proven,
    /// Complete passes over the resident pages.
    counts,
    /// Time spent in these passes, including pages re-colored on the way.
    count_ns,
    /// Address of the agent's own memory, which is never registered.
    own_start,
    /// Size of that memory.
    own_bytes,
);

/// One pass over all resident pages.
#[derive(Clone, Copy, Default, Debug)]
struct ResidencyScan {
    range: usize,
    page: u64,
    spent_ns: u64,
    allowed_pages: u64,
    other_pages: u64,
    unknown_pages: u64,
    is_running: bool,
}

/// The page that is moved out; recorded so that events can move or drop it.
#[derive(Clone, Copy, Default, Debug)]
struct InFlightPage {
    address: u64,
    is_dropped: bool,
}

/// All data of the handler's thread. It is created before the thread, and afterward belongs to that thread alone.
pub struct Agent {
    files: Files,
    reference_set: ReferenceSet,
    ledger: Ledger,
    /// One page per slot of the frame pool.
    region: *mut u8,
    frame_pool: FramePool<'static>,
    removed_ranges: RemovedRanges,
    ranges: AddressRanges,
    /// The agent's own memory, which is never registered.
    own_range: (u64, u64),
    program_path: [u8; 256],
    counters: AgentCounters,
    residency_scan: ResidencyScan,
    next_pass_ns: u64,
    next_scan_ns: u64,
    scan_period_ns: u64,
    next_tick_ns: u64,
    last_fault_page: u64,
    pages_ahead: u64,
    must_move_all: bool,
    unclassified_run: u32,
    in_flight: Option<InFlightPage>,
    buffer: [u8; 16384],
    pagemap_entries: [u64; 512],
}

impl Agent {
    /// A handler with these resources. `region` has one page for each entry of `slot_links`; a frame that may be held
    /// takes two of them. `mask` and `must_move_all` (whether resident pages move, too) are in force until the first
    /// target is read; `own_start` and `own_bytes` are the agent's own mapping.
    pub fn new(
        files: Files,
        reference_set: ReferenceSet,
        ledger: Ledger,
        region: *mut u8,
        slot_links: &'static mut [u32],
        (mask, must_move_all): (u64, bool),
        (own_start, own_bytes): (u64, u64),
    ) -> Self {
        let max_hold = slot_links.len() as u64 / 2;
        let counters = AgentCounters {
            mask,
            max_hold,
            own_start,
            own_bytes,
            ..AgentCounters::default()
        };

        Agent {
            files,
            reference_set,
            ledger,
            region,
            frame_pool: FramePool::new(slot_links),
            removed_ranges: RemovedRanges::default(),
            ranges: AddressRanges::default(),
            own_range: (own_start, own_start + own_bytes),
            program_path: [0; 256],
            counters,
            residency_scan: ResidencyScan::default(),
            next_pass_ns: 0,
            next_scan_ns: 0,
            scan_period_ns: MIN_SCAN_PERIOD_NS,
            next_tick_ns: 0,
            last_fault_page: 0,
            pages_ahead: 0,
            must_move_all,
            unclassified_run: 0,
            in_flight: None,
            buffer: [0; 16384],
            pagemap_entries: [0; 512],
        }
    }

    /// The current descriptors.
    pub fn files(&self) -> &Files {
        &self.files
    }

    fn slot_address(&self, slot: u32) -> *mut u8 {
        // SAFETY: slots are below the region's number of pages.
        unsafe { self.region.add(slot as usize * PAGE_BYTES) }
    }

    /// Creates a separate table of descriptors and opens the remaining ones. Returns false if the agent cannot work.
    pub fn open_own_descriptors(&mut self) -> bool {
        let mut kept_fds = [
            self.files.fault_fd,
            self.files.target_fd,
            self.files.status_fd,
        ];
        kept_fds.sort_unstable();
        // SAFETY: no memory is passed; CLONE_FILES is 0x400. The agent must not keep inherited descriptors of the
        // program open, or the reader of a pipe would never see its end.
        unsafe {
            if sys::call(sys::UNSHARE, [0x400]) < 0 {
                return false;
            }
            let mut range_start = 0;
            for fd in kept_fds {
                if fd > range_start {
                    sys::call(sys::CLOSE_RANGE, [range_start as usize, fd as usize - 1]);
                }
                range_start = fd + 1;
            }
            sys::call(sys::CLOSE_RANGE, [range_start as usize, u32::MAX as usize]);
            let path = c"/proc/self/exe".as_ptr() as usize;
            let target = &mut self.program_path;
            sys::call(
                sys::READLINK,
                [path, target.as_mut_ptr() as usize, target.len()],
            );
        }
        self.files.pagemap_fd = sys::open(c"/proc/self/pagemap", 0);
        // The half to which pages are moved must be a range whose missing pages the agent handles.
        let half_slots = u64::from(self.frame_pool.half_slots());
        let start = self.region as u64;
        if userfaultfd::register_range(
            self.files.fault_fd,
            start + half_slots * PAGE,
            half_slots * PAGE,
        ) < 0
            || self.files.pagemap_fd < 0
        {
            return false;
        }
        self.register_new_ranges();
        self.fetch_frames(INITIAL_FRAMES, INITIAL_FRAMES * 8);
        true
    }

    /// Serves faults until the userfaultfd is closed.
    pub fn serve(&mut self) {
        let mut has_more_work = false;
        loop {
            let max_wait_ms = if has_more_work { 0 } else { TICK_MS };
            if sys::wait_for_input(self.files.fault_fd, max_wait_ms) && !self.read_messages() {
                return;
            }
            has_more_work = self.run_background_work();
        }
    }

    /// Reads the kernel's messages. Returns false if there will be no more.
    fn read_messages(&mut self) -> bool {
        let mut messages = [[0u64; 4]; 16];
        let read_bytes = sys::read(self.files.fault_fd, &mut messages);
        if read_bytes < 0 {
            return read_bytes == sys::EAGAIN || read_bytes == sys::EINTR;
        }

        for message in &messages[..read_bytes as usize / 32] {
            match message[0] as u8 {
                userfaultfd::EVENT_FAULT => self.serve_fault(message[2] & !(PAGE - 1)),
                _ => self.track_layout_change(message),
            }
        }
        read_bytes > 0
    }

    /// Handles a message about memory that was moved or removed, and ignores any other.
    fn track_layout_change(&mut self, message: &[u64; 4]) {
        match message[0] as u8 {
            userfaultfd::EVENT_REMAP => self.track_remap(message[1], message[2], message[3]),
            userfaultfd::EVENT_REMOVE => {
                self.removed_ranges
                    .record(message[1], message[2], self.counters.turn);
                self.record_unmapped(message[1], message[2]);
            }
            userfaultfd::EVENT_UNMAP => self.record_unmapped(message[1], message[2]),
            _ => {}
        }
    }

    fn record_unmapped(&mut self, start: u64, end: u64) {
        if let Some(in_flight_page) = self
            .in_flight
            .as_mut()
            .filter(|page_out| (start..end).contains(&page_out.address))
        {
            in_flight_page.is_dropped = true;
        }
    }

    fn track_remap(&mut self, old_start: u64, new_start: u64, bytes: u64) {
        if let Some(in_flight_page) = self
            .in_flight
            .as_mut()
            .filter(|page_out| (old_start..old_start + bytes).contains(&page_out.address))
        {
            in_flight_page.address = in_flight_page.address - old_start + new_start;
        }
    }

    /// Assigns a frame to the page, and also to the following pages if pages are touched in sequence.
    fn serve_fault(&mut self, page: u64) {
        let start_ns = sys::now_ns();
        self.counters.faults += 1;
        self.scan_period_ns = MIN_SCAN_PERIOD_NS;
        let is_supplied = self.supply_page(page);
        self.pages_ahead = if page == self.last_fault_page + PAGE {
            (2 * self.pages_ahead).clamp(1, MAX_PAGES_AHEAD)
        } else {
            0
        };

        self.last_fault_page = page;
        if is_supplied {
            for _ in 0..self.pages_ahead {
                // Only frames that are ready: the faulting page already has its frame, and its thread is running again.
                let next_page = self.last_fault_page + PAGE;
                let Some((slot, color)) = self.frame_pool.take_allowed(self.counters.mask) else {
                    break;
                };

                if userfaultfd::move_page(
                    self.files.fault_fd,
                    self.slot_address(slot) as u64,
                    next_page,
                ) < 0
                {
                    self.frame_pool.push(FreeList::Color(color), slot);
                    self.pages_ahead = 0;
                    break;
                }

                self.release_slot(slot);
                self.last_fault_page = next_page;
                self.counters.faults_ahead += 1;
            }
        }
        self.counters.fault_ns += sys::now_ns() - start_ns;
    }

    fn release_slot(&mut self, slot: u32) {
        let list = if slot < self.frame_pool.half_slots() {
            FreeList::Empty
        } else {
            FreeList::EmptyInFlight
        };
        self.frame_pool.push(list, slot);
    }

    /// Assigns a frame of an allowed color, otherwise any frame of the pool, otherwise one from the kernel. Threads
    /// that wait for the page always continue. Returns whether the page got a frame of the pool.
    fn supply_page(&mut self, page: u64) -> bool {
        let mask = self.counters.mask;
        let mut allowed = self.frame_pool.take_allowed(mask);
        if allowed.is_none() && self.fetch_frames(READY_FRAMES / 4, MAX_FAULT_FRAMES) {
            allowed = self.frame_pool.take_allowed(mask);
        }
        // A slot with a frame, and the list to which it returns if the page cannot have the frame.
        let supply = match allowed {
            Some((slot, color)) => Some((slot, FreeList::Color(color))),
            None => self
                .frame_pool
                .take_any()
                .map(|slot| (slot, FreeList::Unknown)),
        };

        if let Some((slot, free_list)) = supply {
            let move_status =
                userfaultfd::move_page(self.files.fault_fd, self.slot_address(slot) as u64, page);
            if move_status >= 0 {
                self.release_slot(slot);
                self.counters.fallback_frames += u64::from(allowed.is_none());
                return true;
            }
            self.frame_pool.push(free_list, slot);
            if matches!(
                move_status,
                sys::EEXIST | sys::EAGAIN | sys::ENOENT | sys::ESRCH
            ) {
                userfaultfd::wake_waiters(self.files.fault_fd, page); // present already, being removed, or to be requested again
                return false;
            }
        }
        // The page is not writable now, or locked, or there is no frame: it gets the kernel's zero page, and a frame of
        // the kernel on the first write.
        self.counters.kernel_frames += 1;
        if userfaultfd::map_zero_page(self.files.fault_fd, page) < 0 {
            userfaultfd::wake_waiters(self.files.fault_fd, page);
        }
        false
    }

    fn read_frame(&mut self, page: u64) -> Option<u64> {
        self.read_entries(page, 1);
        parse_frame(self.pagemap_entries[0])
    }

    /// Gives the number of entries read: fewer at the end, and 0 after an error.
    fn read_entries(&mut self, start: u64, pages: usize) -> usize {
        self.pagemap_entries[0] = 0;
        let entries = &mut self.pagemap_entries[..pages];
        let read_bytes = sys::read_at(self.files.pagemap_fd, entries, start / PAGE * 8);
        read_bytes.max(0) as usize / 8
    }

    /// Does deferrable work: requests, new ranges, the frame pool, the count. Returns true if more work is pending.
    fn run_background_work(&mut self) -> bool {
        let now_ns = sys::now_ns();
        if now_ns >= self.next_tick_ns {
            self.next_tick_ns = now_ns + TICK_MS * 1_000_000;
            self.counters.turn += 1;
            self.apply_target(now_ns);
            self.write_status();
        }

        if now_ns >= self.next_scan_ns
            || (handshake::is_count_requested() && !self.residency_scan.is_running)
        {
            self.register_new_ranges();
            self.scan_period_ns = (2 * self.scan_period_ns).min(MAX_SCAN_PERIOD_NS);
            self.next_scan_ns = sys::now_ns() + self.scan_period_ns;
        }

        if !self.residency_scan.is_running
            && (now_ns >= self.next_pass_ns || handshake::is_count_requested())
        {
            self.residency_scan = ResidencyScan {
                is_running: true,
                ..ResidencyScan::default()
            };
        }

        let mut has_more = false;
        if self.frame_pool.allowed_count(self.counters.mask) < READY_FRAMES {
            let count_before = self.frame_pool.held_count();
            self.fetch_frames(READY_FRAMES, BATCH_PAGES as u32);
            has_more = self.frame_pool.held_count() > count_before;
        }
        if self.residency_scan.is_running {
            self.continue_pass();
            has_more = true;
        }
        has_more
    }

    fn apply_target(&mut self, now_ns: u64) {
        let mut text = [0u8; TARGET_BYTES];
        let read_bytes = sys::read_at(self.files.target_fd, &mut text, 0);
        if read_bytes <= 0 {
            return;
        }
        let Some((mask, must_move_all)) = parse_target(&text) else {
            return;
        };

        let mask = mask & (u64::MAX >> (64 - self.reference_set.colors()));
        if mask != 0 && (mask, must_move_all) != (self.counters.mask, self.must_move_all) {
            self.must_move_all = must_move_all;
            self.counters.mask = mask;
            self.counters.recolor_done = 0;
            self.counters.recolor_total = 0;
            self.residency_scan = ResidencyScan::default();
            self.next_pass_ns = now_ns;
        }
    }

    /// Registers the ranges that the program has mapped since the last scan.
    fn register_new_ranges(&mut self) {
        let program_len = self
            .program_path
            .iter()
            .position(|&byte| byte == 0)
            .unwrap_or(self.program_path.len());
        let program = &self.program_path[..program_len];
        read_ranges(&mut self.ranges, self.own_range, program, &mut self.buffer);
        for range in self.ranges.as_slice() {
            // A range that cannot be registered keeps the kernel's frames; registering a range twice changes nothing.
            userfaultfd::register_range(self.files.fault_fd, range.start, range.end - range.start);
        }
    }

    /// Counts resident pages for a while, and re-colors those with a wrong frame.
    fn continue_pass(&mut self) {
        let start_ns = sys::now_ns();
        let mut now_ns = start_ns;

        while now_ns - start_ns < SLICE_NS {
            let Some(&range) = self.ranges.as_slice().get(self.residency_scan.range) else {
                self.residency_scan.spent_ns += now_ns - start_ns;
                self.finish_pass(now_ns);
                return;
            };
            if !range.is_readable {
                self.residency_scan.range += 1;
                continue;
            }
            if self.residency_scan.page < range.start {
                self.residency_scan.page = range.start;
            }
            let remaining = range.end.saturating_sub(self.residency_scan.page) / PAGE;
            if remaining == 0 {
                self.residency_scan.range += 1;
                self.residency_scan.page = 0;
                continue;
            }
            self.count_pages(
                range,
                remaining.min(self.pagemap_entries.len() as u64) as usize,
                start_ns,
            );
            now_ns = sys::now_ns();
        }
        self.residency_scan.spent_ns += now_ns - start_ns;
    }

    fn count_pages(&mut self, range: AddressRange, pages: usize, start_ns: u64) {
        let first_page = self.residency_scan.page;
        let entry_count = self.read_entries(first_page, pages);
        if entry_count == 0 {
            self.residency_scan.page = range.end; // gone meanwhile
            return;
        }

        for index in 0..entry_count {
            let page = first_page + index as u64 * PAGE;
            self.residency_scan.page = page + PAGE;
            let entry = self.pagemap_entries[index];
            // A page of a file, or a shared one: the agent does not manage it.
            let is_foreign = entry >> 61 & 1 == 1;
            let Some(frame) = parse_frame(entry) else {
                continue;
            };
            if is_foreign {
                continue;
            }
            let known_color = self.recorded_color(frame);
            if known_color.is_some_and(|color| self.counters.mask >> color & 1 == 1) {
                self.residency_scan.allowed_pages += 1;
                continue;
            }

            let is_moved = range.is_writable
                && self.must_move_all
                && !handshake::is_count_requested()
                && self.recolor(page);
            if is_moved {
                self.residency_scan.allowed_pages += 1;
                self.counters.recolor_done += 1;
                self.counters.moved_pages += 1;
                self.read_entries(first_page, entry_count);
            } else if known_color.is_some() {
                self.residency_scan.other_pages += 1;
            } else {
                self.residency_scan.unknown_pages += 1;
            }

            if sys::now_ns() - start_ns > SLICE_NS {
                return;
            }
        }
    }

    fn finish_pass(&mut self, now_ns: u64) {
        self.counters.allowed_pages = self.residency_scan.allowed_pages;
        self.counters.other_pages = self.residency_scan.other_pages;
        self.counters.unknown_pages = self.residency_scan.unknown_pages;
        self.counters.recolor_total = self.counters.recolor_done
            + self.residency_scan.other_pages
            + self.residency_scan.unknown_pages;
        self.counters.counts += 1;
        self.counters.count_ns += self.residency_scan.spent_ns;
        self.next_pass_ns =
            now_ns + MIN_COUNT_PERIOD_NS.max(self.residency_scan.spent_ns * COUNT_TIME_DIVISOR);
        self.residency_scan = ResidencyScan::default();
        if handshake::is_count_requested() {
            // No page moves during a requested count. At the program's start, its first pages move right after it.
            self.next_pass_ns = now_ns;
            self.write_status();
            handshake::finish_requested_count();
        }
    }

    /// Moves one present page to another frame while the program runs: out, copied, in. Whatever happens in between,
    /// the page is restored with its content, unless the program has just freed it.
    fn recolor(&mut self, page: u64) -> bool {
        if !self.removed_ranges.may_take_out(page, self.counters.turn) || !handshake::try_acquire()
        {
            return false;
        }
        let is_done = self.recolor_in_flight(page);
        handshake::release();
        is_done
    }

    fn recolor_in_flight(&mut self, page: u64) -> bool {
        let mask = self.counters.mask;
        if self.frame_pool.allowed_count(mask) == 0
            && !self.fetch_frames(READY_FRAMES / 4, MAX_FAULT_FRAMES)
        {
            return false;
        }
        let Some((fresh_slot, color)) = self.frame_pool.take_allowed(mask) else {
            return false;
        };
        let Some(in_flight_slot) = self.frame_pool.pop(FreeList::EmptyInFlight) else {
            self.frame_pool.push(FreeList::Color(color), fresh_slot);
            return false;
        };
        let fresh_page = self.slot_address(fresh_slot);
        let parked_page = self.slot_address(in_flight_slot);
        let move_start_ns = sys::now_ns();
        if userfaultfd::move_page(self.files.fault_fd, page, parked_page as u64) < 0 {
            self.counters.busy_pages += 1;
            self.frame_pool
                .push(FreeList::EmptyInFlight, in_flight_slot);
            self.frame_pool.push(FreeList::Color(color), fresh_slot);
            return false;
        }
        // SAFETY: two pages of the region: one holds a fresh frame, the other one the page that was just taken out.
        unsafe { sys::copy_page(parked_page, fresh_page) };
        self.in_flight = Some(InFlightPage {
            address: page,
            is_dropped: false,
        });
        let is_restored = self.restore_page(fresh_page as u64, parked_page as u64);
        // Counts only the time in which the program may wait, because finding a frame before and zeroing the old one
        // afterward delay no thread.
        self.counters.moved_ns += sys::now_ns() - move_start_ns;
        if is_restored {
            self.release_slot(fresh_slot);
        } else {
            // SAFETY: still a page of the agent.
            unsafe { sys::zero_page(fresh_page) };
            self.frame_pool.push(FreeList::Color(color), fresh_slot);
        }
        // SAFETY: as above; the program's data must not leak to the next user of the frame.
        unsafe { sys::zero_page(parked_page) };
        // The ledger's color is used here without a test, because it is verified before the frame is used.
        let old_color = self
            .read_frame(parked_page as u64)
            .and_then(|frame| self.recorded_color(frame));
        self.frame_pool.push(
            old_color.map_or(FreeList::Unclassified, FreeList::Color),
            in_flight_slot,
        );
        is_restored
    }

    /// Moves the copy in; if this fails, retries after an event, copies the page, or wakes the waiting thread. Returns
    /// whether the copy was moved in; a page that could not be restored counts in `lost_pages`.
    fn restore_page(&mut self, copy: u64, original: u64) -> bool {
        for _ in 0..MAX_RESTORE_ATTEMPTS {
            let Some(in_flight_page) = self.in_flight.filter(|page_out| !page_out.is_dropped)
            else {
                self.in_flight = None;
                return false;
            };

            match userfaultfd::move_page(self.files.fault_fd, copy, in_flight_page.address) {
                0.. => {
                    self.in_flight = None;
                    return true;
                }
                // The program remaps or unmaps the range: the event for this page arrives before the program continues.
                sys::EAGAIN => {
                    if sys::wait_for_input(self.files.fault_fd, 1) {
                        self.handle_next_message();
                    }
                }
                sys::EBUSY => {}
                // The range was made read-only or locked meanwhile: the page gets a frame from the kernel, with its
                // content. If even this fails, the range no longer exists.
                _ => {
                    self.in_flight = None;
                    if userfaultfd::map_copied_page(
                        self.files.fault_fd,
                        original,
                        in_flight_page.address,
                    ) >= 0
                    {
                        self.counters.copied_back += 1;
                    } else {
                        self.counters.lost_pages += 1;
                        userfaultfd::wake_waiters(self.files.fault_fd, in_flight_page.address);
                    }
                    return false;
                }
            }
        }

        self.in_flight = None;
        self.counters.lost_pages += 1;
        false
    }

    /// Handles at most one message while a page is moved out. A fault is resolved by waking its threads, which fault
    /// again.
    fn handle_next_message(&mut self) {
        let mut message = [0u64; 4];
        if sys::read(self.files.fault_fd, &mut message) != 32 {
            return;
        }

        match message[0] as u8 {
            userfaultfd::EVENT_FAULT => {
                userfaultfd::wake_waiters(self.files.fault_fd, message[2] & !(PAGE - 1));
            }
            _ => self.track_layout_change(&message),
        }
    }

    fn write_status(&mut self) {
        self.counters.held_frames = u64::from(self.frame_pool.held_count());
        let mut position = 0;
        let mut digit_buffer = [0u8; 20];
        let turn = [("turn", self.counters.turn)];
        for (name, value) in self.counters.lines().iter().chain(&turn) {
            let digits = sys::decimal_digits(*value, &mut digit_buffer);
            // Always twenty digits, because a shorter text would leave part of the longer one before it.
            for byte in name
                .bytes()
                .chain([b' '])
                .chain((digits.len()..20).map(|_| b'0'))
                .chain(digits.iter().copied())
                .chain([b'\n'])
            {
                if let Some(slot) = self.buffer.get_mut(position) {
                    *slot = byte;
                    position += 1;
                }
            }
        }

        sys::write_at_start(self.files.status_fd, &self.buffer[..position]);
    }
}

/// Frame number of a present page, from its entry in the page map.
fn parse_frame(entry: u64) -> Option<u64> {
    let frame = entry & ((1 << 55) - 1);
    (entry >> 63 == 1 && frame != 0).then_some(frame)
}
