//! The handler: the single thread that assigns frames to missing pages, re-colors pages that have wrong ones, and
//! counts both.
//!
//! This thread handles a fault, an event, a page being moved, and a frame being classified one after the other. The
//! code here allocates nothing, acquires no lock of the program, and touches no memory whose pages may be missing:
//! the stack, the stock and the file mappings belong to the handler, and are never registered with the userfaultfd.

use crate::frame_pool::{FramePool, FreeList};
use crate::handshake;
use crate::layout::{PAGE_BYTES, TICK_MS, WANTED_BYTES, parse_target};
use crate::maps::{AddressRange, AddressRanges, read_ranges};
use crate::removed_ranges::RemovedRanges;
use crate::sys::{self, fault};
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
const MAX_AHEAD: u64 = 16;
/// Time that background work takes before the handler checks for faults again.
const SLICE_NS: u64 = 200_000;
/// Minimum interval between two counts of all resident pages; it grows so that counting takes at most a fiftieth of the
/// time.
const COUNT_EVERY_NS: u64 = 250_000_000;
const COUNT_SHARE: u64 = 50;
/// Interval between two scans for ranges that the program has mapped: short after a fault, longer while nothing
/// happens.
const SCAN_SOON_NS: u64 = 20_000_000;
const SCAN_LATE_NS: u64 = 500_000_000;

/// Descriptors that the handler uses; negative if not open.
#[derive(Clone, Copy, Debug)]
pub struct Files {
    /// The userfaultfd.
    pub faults: isize,
    /// The process's `wanted` file ([`crate::layout`]).
    pub target: isize,
    /// The process's `status` file.
    pub status: isize,
    /// `/proc/self/pagemap`; opened by [`Agent::open_own_descriptors`].
    pub pagemap: isize,
}

macro_rules! account {
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
account!(
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
    /// Pages that got a frame from the stock whose color is not allowed, or is not known.
    fallback_frames,
    /// Pages that were left to the kernel's zero page, and therefore to its frames.
    kernel_frames,
    /// Resident pages with an allowed color, in the last complete pass.
    inside_pages,
    /// Resident pages with another color, in the last complete pass.
    outside_pages,
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
    /// Frames in the stock.
    held_frames,
    /// Maximum number of frames that were in the stock.
    max_held,
    /// Number of frames that the stock may hold.
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
    inside: u64,
    outside: u64,
    unknown: u64,
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
    kit: ReferenceSet,
    ledger: (*mut u8, usize),
    /// One page per slot of the stock.
    region: *mut u8,
    stock: FramePool<'static>,
    removed_ranges: RemovedRanges,
    ranges: AddressRanges,
    /// The agent's own memory, which is never registered.
    own_range: (u64, u64),
    program: [u8; 256],
    account: AgentCounters,
    pass: ResidencyScan,
    next_pass_ns: u64,
    next_scan_ns: u64,
    scan_every_ns: u64,
    next_tick_ns: u64,
    last_fault: u64,
    ahead: u64,
    move_all: bool,
    unclassified: u32,
    in_flight: Option<InFlightPage>,
    buffer: [u8; 16384],
    entries: [u64; 512],
}

impl Agent {
    /// A handler with these resources. `ledger` is the mapped ledger and its size in bytes. `region` has one page for
    /// each entry of `lists`; each frame that may be held takes two of them. The mask, and whether all pages move,
    /// are initial values. `own_start` and `own_bytes` are the address and the size of the agent's own mapping.
    pub fn new(
        files: Files,
        kit: ReferenceSet,
        ledger: (*mut u8, usize),
        region: *mut u8,
        lists: &'static mut [u32],
        (mask, move_all): (u64, bool),
        (own_start, own_bytes): (u64, u64),
    ) -> Self {
        let max_hold = lists.len() as u64 / 2;
        let account = AgentCounters { mask, max_hold, own_start, own_bytes, ..AgentCounters::default() };
        Agent {
            files,
            kit,
            ledger,
            region,
            stock: FramePool::new(lists),
            removed_ranges: RemovedRanges::default(),
            ranges: AddressRanges::default(),
            own_range: (own_start, own_start + own_bytes),
            program: [0; 256],
            account,
            pass: ResidencyScan::default(),
            next_pass_ns: 0,
            next_scan_ns: 0,
            scan_every_ns: SCAN_SOON_NS,
            next_tick_ns: 0,
            last_fault: 0,
            ahead: 0,
            move_all,
            unclassified: 0,
            in_flight: None,
            buffer: [0; 16384],
            entries: [0; 512],
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

    /// Creates a separate table of descriptors and opens the remaining ones; false if the agent cannot work.
    pub fn open_own_descriptors(&mut self) -> bool {
        let mut kept_files = [self.files.faults, self.files.target, self.files.status];
        kept_files.sort_unstable();
        // SAFETY: no memory is passed; CLONE_FILES is 0x400. The agent must not keep inherited descriptors of the
        // program open, or the reader of a pipe would never see its end.
        unsafe {
            if sys::call(sys::UNSHARE, [0x400, 0, 0, 0, 0, 0]) < 0 {
                return false;
            }
            let mut range_start = 0;
            for file in kept_files {
                if file > range_start {
                    sys::call(sys::CLOSE_RANGE, [range_start as usize, file as usize - 1, 0, 0, 0, 0]);
                }
                range_start = file + 1;
            }
            sys::call(sys::CLOSE_RANGE, [range_start as usize, u32::MAX as usize, 0, 0, 0, 0]);
            let path = b"/proc/self/pagemap\0";
            self.files.pagemap = sys::call(sys::OPEN, [path.as_ptr() as usize, 0o2_000_000, 0, 0, 0, 0]);
            let (exe, room) = (b"/proc/self/exe\0", self.program.len());
            sys::call(sys::READLINK, [exe.as_ptr() as usize, self.program.as_mut_ptr() as usize, room, 0, 0, 0]);
        }
        // The half to which pages are moved must be a range whose missing pages the agent handles.
        let (half_slots, start) = (u64::from(self.stock.half_slots()), self.region as u64);
        if fault::register_range(self.files.faults, start + half_slots * PAGE, half_slots * PAGE) < 0
            || self.files.pagemap < 0
        {
            return false;
        }
        self.scan();
        self.fetch(INITIAL_FRAMES, INITIAL_FRAMES * 8);
        true
    }

    /// Serves faults until the userfaultfd is closed.
    pub fn serve(&mut self) {
        let mut busy = false;
        loop {
            let mut poll = [self.files.faults as u64 | 1 << 32];
            let wait = if busy { 0 } else { TICK_MS as usize };
            // SAFETY: one pollfd: descriptor, POLLIN.
            let ready = unsafe { sys::call(sys::POLL, [poll.as_mut_ptr() as usize, 1, wait, 0, 0, 0]) };
            if ready > 0 && !self.read_messages() {
                return;
            }
            busy = self.run_background_work();
        }
    }

    /// Reads the kernel's messages; false if there will be no more.
    fn read_messages(&mut self) -> bool {
        let mut messages = [[0u64; 4]; 16];
        let (file, bytes) = (self.files.faults as usize, size_of_val(&messages));
        // SAFETY: the kernel writes at most that many bytes.
        let read = unsafe { sys::call(sys::READ, [file, messages.as_mut_ptr() as usize, bytes, 0, 0, 0]) };
        if read < 0 {
            return read == sys::EAGAIN || read == -4;
        }
        for message in &messages[..read as usize / 32] {
            match message[0] as u8 {
                fault::EVENT_FAULT => self.serve_fault(message[2] & !(PAGE - 1)),
                _ => self.track_layout_change(message),
            }
        }
        read > 0
    }

    /// Handles a message about memory that was moved or removed, and ignores any other.
    fn track_layout_change(&mut self, message: &[u64; 4]) {
        match message[0] as u8 {
            fault::EVENT_REMAP => self.track_remap(message[1], message[2], message[3]),
            fault::EVENT_REMOVE => {
                self.removed_ranges.record(message[1], message[2], self.account.turn);
                self.note_unmapped(message[1], message[2]);
            }
            fault::EVENT_UNMAP => self.note_unmapped(message[1], message[2]),
            _ => {}
        }
    }

    fn note_unmapped(&mut self, start: u64, end: u64) {
        if let Some(out) = self.in_flight.as_mut().filter(|out| (start..end).contains(&out.address)) {
            out.is_dropped = true;
        }
    }

    fn track_remap(&mut self, old_start: u64, new_start: u64, bytes: u64) {
        if let Some(out) = self.in_flight.as_mut().filter(|out| (old_start..old_start + bytes).contains(&out.address)) {
            out.address = out.address - old_start + new_start;
        }
    }

    /// Assigns a frame to the page, and also to the following pages if pages are touched in sequence.
    fn serve_fault(&mut self, page: u64) {
        let start = sys::now_ns();
        self.account.faults += 1;
        self.scan_every_ns = SCAN_SOON_NS;
        let is_supplied = self.supply_page(page);
        self.ahead = if page == self.last_fault + PAGE { (2 * self.ahead).clamp(1, MAX_AHEAD) } else { 0 };
        self.last_fault = page;
        if is_supplied {
            for _ in 0..self.ahead {
                // Only frames that are ready: the faulting page already has its frame, and its thread is running again.
                let next_page = self.last_fault + PAGE;
                let Some((slot, color)) = self.stock.take(self.account.mask) else { break };
                if fault::move_page(self.files.faults, self.slot_address(slot) as u64, next_page) < 0 {
                    self.stock.push(FreeList::Color(color), slot);
                    self.ahead = 0;
                    break;
                }
                self.release_slot(slot);
                self.last_fault = next_page;
                self.account.faults_ahead += 1;
            }
        }
        self.account.fault_ns += sys::now_ns() - start;
    }

    fn release_slot(&mut self, slot: u32) {
        let list = if slot < self.stock.half_slots() { FreeList::Empty } else { FreeList::EmptyInFlight };
        self.stock.push(list, slot);
    }

    /// Assigns a frame of an allowed color, otherwise any frame of the stock, otherwise one from the kernel. Threads
    /// that wait for the page always continue.
    fn supply_page(&mut self, page: u64) -> bool {
        let mask = self.account.mask;
        let mut frame = self.stock.take(mask);
        if frame.is_none() && self.fetch(READY_FRAMES / 4, MAX_FAULT_FRAMES) {
            frame = self.stock.take(mask);
        }
        let mut wrong = false;
        if frame.is_none() {
            wrong = true;
            frame = self.stock.take_any().map(|slot| (slot, u32::MAX));
        }
        if let Some((slot, color)) = frame {
            let answer = fault::move_page(self.files.faults, self.slot_address(slot) as u64, page);
            if answer >= 0 {
                self.release_slot(slot);
                self.account.fallback_frames += u64::from(wrong);
                return true;
            }
            self.stock.push(if color == u32::MAX { FreeList::Unknown } else { FreeList::Color(color) }, slot);
            if matches!(answer, sys::EEXIST | sys::EAGAIN | sys::ENOENT | sys::ESRCH) {
                fault::wake_waiters(self.files.faults, page); // there already, going away, or to be asked again
                return false;
            }
        }
        // The page is not writable now, or locked, or there is no frame: it gets the kernel's zero page, and a frame of
        // the kernel on the first write.
        self.account.kernel_frames += 1;
        if fault::map_zero_page(self.files.faults, page) < 0 {
            fault::wake_waiters(self.files.faults, page);
        }
        false
    }

    fn frame_at(&mut self, page: u64) -> Option<u64> {
        self.read_entries(page, 1);
        frame_of(self.entries[0])
    }

    /// Reads the page map entries of `pages` pages from `start` on.
    fn read_entries(&mut self, start: u64, pages: usize) -> usize {
        let args = [
            self.files.pagemap as usize,
            self.entries.as_mut_ptr() as usize,
            pages * 8,
            (start / PAGE * 8) as usize,
            0,
            0,
        ];
        self.entries[0] = 0;
        // SAFETY: the kernel writes at most that many bytes; callers ask for no more than there are entries.
        let read = unsafe { sys::call(sys::PREAD, args) };
        if read < 0 { 0 } else { read as usize / 8 }
    }

    /// Does deferrable work: requests, new ranges, the stock, the count; true if more work is pending.
    fn run_background_work(&mut self) -> bool {
        let now = sys::now_ns();
        if now >= self.next_tick_ns {
            self.next_tick_ns = now + TICK_MS * 1_000_000;
            self.account.turn += 1;
            self.read_wanted(now);
            self.write_status();
        }
        if now >= self.next_scan_ns || (handshake::is_ending() && !self.pass.is_running) {
            self.scan();
            self.scan_every_ns = (2 * self.scan_every_ns).min(SCAN_LATE_NS);
            self.next_scan_ns = sys::now_ns() + self.scan_every_ns;
        }
        if !self.pass.is_running && (now >= self.next_pass_ns || handshake::is_ending()) {
            self.pass = ResidencyScan { is_running: true, ..ResidencyScan::default() };
        }
        let mut has_more = false;
        if self.stock.allowed_count(self.account.mask) < READY_FRAMES {
            let count_before = self.stock.held_count();
            self.fetch(READY_FRAMES, BATCH_PAGES as u32);
            has_more = self.stock.held_count() > count_before;
        }
        if self.pass.is_running {
            self.continue_scan();
            has_more = true;
        }
        has_more
    }

    fn read_wanted(&mut self, now: u64) {
        let mut text = [0u8; WANTED_BYTES];
        let args = [self.files.target as usize, text.as_mut_ptr() as usize, text.len(), 0, 0, 0];
        // SAFETY: the kernel writes at most that many bytes.
        let read = unsafe { sys::call(sys::PREAD, args) };
        let all_colors = if self.kit.colors() == 64 { u64::MAX } else { (1 << self.kit.colors()) - 1 };
        let Some((mask, move_all)) = parse_target(&text).filter(|_| read > 0) else { return };
        let mask = mask & all_colors;
        if mask != 0 && (mask, move_all) != (self.account.mask, self.move_all) {
            self.move_all = move_all;
            self.account.mask = mask;
            self.account.recolor_done = 0;
            self.account.recolor_total = 0;
            self.pass = ResidencyScan::default();
            self.next_pass_ns = now;
        }
    }

    /// Registers the ranges that the program has mapped since the last scan.
    fn scan(&mut self) {
        let end = self.program.iter().position(|&byte| byte == 0).unwrap_or(self.program.len());
        let program = &self.program[..end];
        read_ranges(&mut self.ranges, &[self.own_range], program, &mut self.buffer);
        for range in self.ranges.as_slice() {
            // A range that cannot be registered keeps the kernel's frames; registering a range twice changes nothing.
            fault::register_range(self.files.faults, range.start, range.end - range.start);
        }
    }

    /// Counts resident pages for a while, and re-colors those with a wrong frame.
    fn continue_scan(&mut self) {
        let start = sys::now_ns();
        let mut now = start;
        while now - start < SLICE_NS {
            let Some(&range) = self.ranges.as_slice().get(self.pass.range) else {
                self.pass.spent_ns += now - start;
                self.finish_pass(now);
                return;
            };
            if !range.readable {
                self.pass.range += 1;
                continue;
            }
            if self.pass.page < range.start {
                self.pass.page = range.start;
            }
            let remaining = range.end.saturating_sub(self.pass.page) / PAGE;
            if remaining == 0 {
                self.pass.range += 1;
                self.pass.page = 0;
                continue;
            }
            self.scan_pages(range, remaining.min(self.entries.len() as u64) as usize, start);
            now = sys::now_ns();
        }
        self.pass.spent_ns += now - start;
    }

    fn scan_pages(&mut self, range: AddressRange, pages: usize, start: u64) {
        let first = self.pass.page;
        let read = self.read_entries(first, pages);
        if read == 0 {
            self.pass.page = range.end; // gone meanwhile
            return;
        }
        for index in 0..read {
            let page = first + index as u64 * PAGE;
            self.pass.page = page + PAGE;
            // Bit 61: a page of a file, or a shared one, which the agent does not manage.
            let Some(frame) = frame_of(self.entries[index]).filter(|_| self.entries[index] >> 61 & 1 == 0) else {
                continue;
            };
            let noted = self.recorded_color(frame);
            if noted.is_some_and(|color| self.account.mask >> color & 1 == 1) {
                self.pass.inside += 1;
                continue;
            }
            let is_moved = range.writable && self.move_all && !handshake::is_ending() && self.recolor(page);
            if is_moved {
                self.pass.inside += 1;
                self.account.recolor_done += 1;
                self.account.moved_pages += 1;
                self.read_entries(first, read);
            } else if noted.is_some() {
                self.pass.outside += 1;
            } else {
                self.pass.unknown += 1;
            }
            if sys::now_ns() - start > SLICE_NS {
                return;
            }
        }
    }

    fn finish_pass(&mut self, now: u64) {
        self.account.inside_pages = self.pass.inside;
        self.account.outside_pages = self.pass.outside;
        self.account.unknown_pages = self.pass.unknown;
        self.account.recolor_total = self.account.recolor_done + self.pass.outside + self.pass.unknown;
        self.account.counts += 1;
        self.account.count_ns += self.pass.spent_ns;
        self.next_pass_ns = now + COUNT_EVERY_NS.max(self.pass.spent_ns * COUNT_SHARE);
        self.pass = ResidencyScan::default();
        if handshake::is_ending() {
            // At the start, the program's first pages move immediately.
            self.next_pass_ns = now;
            self.write_status();
            handshake::finish_final_count();
        }
    }

    /// Moves one present page to another frame while the program runs: out, copied, in. Whatever happens in between,
    /// the page is restored with its content, unless the program has just freed it.
    fn recolor(&mut self, page: u64) -> bool {
        if !self.removed_ranges.may_take_out(page, self.account.turn) || !handshake::try_acquire() {
            return false;
        }
        let is_done = self.recolor_in_flight(page);
        handshake::release();
        is_done
    }

    fn recolor_in_flight(&mut self, page: u64) -> bool {
        let mask = self.account.mask;
        if self.stock.allowed_count(mask) == 0 && !self.fetch(READY_FRAMES / 4, MAX_FAULT_FRAMES) {
            return false;
        }
        let Some((fresh, color)) = self.stock.take(mask) else { return false };
        let Some(aside) = self.stock.pop(FreeList::EmptyInFlight) else {
            self.stock.push(FreeList::Color(color), fresh);
            return false;
        };
        let (target, source) = (self.slot_address(fresh), self.slot_address(aside));
        let begun = sys::now_ns();
        if fault::move_page(self.files.faults, page, source as u64) < 0 {
            self.account.busy_pages += 1;
            self.stock.push(FreeList::EmptyInFlight, aside);
            self.stock.push(FreeList::Color(color), fresh);
            return false;
        }
        // SAFETY: two pages of the region: one holds a fresh frame, the other one the page that was just taken out.
        unsafe { sys::copy_page(source, target) };
        self.in_flight = Some(InFlightPage { address: page, is_dropped: false });
        let is_restored = self.restore_page(target as u64, source as u64);
        // Only the time in which the program may wait; finding a frame before and zeroing the old one after delay no
        // thread.
        self.account.moved_ns += sys::now_ns() - begun;
        if is_restored {
            self.release_slot(fresh);
        } else {
            // SAFETY: still a page of the agent.
            unsafe { sys::zero_page(target) };
            self.stock.push(FreeList::Color(color), fresh);
        }
        // SAFETY: as above; the program's data must not leak to the next user of the frame.
        unsafe { sys::zero_page(source) };
        // The ledger's color is used here without a test, because it is verified before the frame is used.
        let old_color = self.frame_at(source as u64).and_then(|frame| self.recorded_color(frame));
        self.stock.push(old_color.map_or(FreeList::Unclassified, FreeList::Color), aside);
        is_restored
    }

    /// Moves the copy in; if this fails, retries after an event, copies the page, or wakes the waiting thread.
    fn restore_page(&mut self, copy: u64, original: u64) -> bool {
        for _ in 0..1_000_000 {
            let Some(out) = self.in_flight.filter(|out| !out.is_dropped) else {
                self.in_flight = None;
                return false;
            };
            match fault::move_page(self.files.faults, copy, out.address) {
                0.. => {
                    self.in_flight = None;
                    return true;
                }
                // The program remaps or unmaps the range: the event for this page arrives before the program goes on.
                sys::EAGAIN => {
                    let mut poll = [self.files.faults as u64 | 1 << 32];
                    // SAFETY: one pollfd.
                    let ready = unsafe { sys::call(sys::POLL, [poll.as_mut_ptr() as usize, 1, 1, 0, 0, 0]) };
                    if ready > 0 {
                        self.drain_events();
                    }
                }
                sys::EBUSY => {}
                // The range was made read-only or locked meanwhile: the page gets a frame from the kernel, with its
                // content. If even this fails, the range no longer exists.
                _ => {
                    self.in_flight = None;
                    if fault::map_copied_page(self.files.faults, original, out.address) >= 0 {
                        self.account.copied_back += 1;
                    } else {
                        self.account.lost_pages += 1;
                        fault::wake_waiters(self.files.faults, out.address);
                    }
                    return false;
                }
            }
        }
        self.in_flight = None;
        self.account.lost_pages += 1;
        false
    }

    /// Handles events while a page is moved out. Faults that arrive with them are resolved by waking their threads,
    /// which fault again.
    fn drain_events(&mut self) {
        let mut message = [0u64; 4];
        let args = [self.files.faults as usize, message.as_mut_ptr() as usize, 32, 0, 0, 0];
        // SAFETY: the kernel writes one message.
        if unsafe { sys::call(sys::READ, args) } != 32 {
            return;
        }
        match message[0] as u8 {
            fault::EVENT_FAULT => {
                fault::wake_waiters(self.files.faults, message[2] & !(PAGE - 1));
            }
            _ => self.track_layout_change(&message),
        }
    }

    fn write_status(&mut self) {
        self.account.held_frames = u64::from(self.stock.held_count());
        let (mut position, mut text) = (0, [0u8; 20]);
        let turn = [("turn", self.account.turn)];
        for (name, value) in self.account.lines().iter().chain(&turn) {
            let digits = sys::decimal_digits(*value, &mut text);
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
        let args = [self.files.status as usize, self.buffer.as_ptr() as usize, position, 0, 0, 0];
        // SAFETY: the buffer's first bytes.
        unsafe { sys::call(sys::PWRITE, args) };
    }
}

/// Frame number of a present page, from its entry in the page map.
fn frame_of(entry: u64) -> Option<u64> {
    let frame = entry & ((1 << 55) - 1);
    (entry >> 63 == 1 && frame != 0).then_some(frame)
}
