//! The supply of the frame pool: frames from the kernel, classified by the ledger if it knows them, and by timing
//! otherwise.

use super::Agent;
use crate::frame_pool::FreeList;
use crate::sys;
use crate::timing::BATCH_PAGES;

impl Agent {
    /// Fetches at most `max_frames` frames until `requested_frames` of allowed colors are available. Returns whether at
    /// least one is.
    pub(super) fn fetch_frames(&mut self, requested_frames: u32, max_frames: u32) -> bool {
        let (mask, mut remaining) = (self.counters.mask, max_frames as usize);
        while remaining > 0 && self.frame_pool.allowed_count(mask) < requested_frames {
            let free_capacity = self
                .counters
                .max_hold
                .saturating_sub(u64::from(self.frame_pool.held_count()));
            let fetched_count =
                self.fetch_batch(remaining.min(BATCH_PAGES).min(free_capacity as usize));
            if fetched_count == 0 {
                break;
            }
            remaining -= fetched_count;
        }
        self.counters.held_frames = u64::from(self.frame_pool.held_count());
        self.counters.max_held = self.counters.max_held.max(self.counters.held_frames);
        self.frame_pool.allowed_count(mask) > 0
    }

    /// Fetches up to `count` frames and classifies them together; returns their number.
    fn fetch_batch(&mut self, count: usize) -> usize {
        let (mut slots, mut unclassified_count) = ([0; BATCH_PAGES], 0);
        while unclassified_count < count
            && let Some(slot) = self.frame_pool.pop(FreeList::Unclassified)
        {
            slots[unclassified_count] = slot;
            unclassified_count += 1;
        }
        let mut fetched_count = unclassified_count;
        while fetched_count < count {
            let Some(slot) = self.frame_pool.pop(FreeList::Empty) else {
                break;
            };

            fetched_count += 1;
            // SAFETY: a page of the region's first half, which is not registered. It is written, because a page that
            // was only read would be the kernel's zero page.
            unsafe { self.slot_address(slot).write_volatile(0) };
            match self.find_proven_color(self.slot_address(slot)) {
                Some(color) => self.frame_pool.push(FreeList::Color(color), slot),
                None => {
                    slots[unclassified_count] = slot;
                    unclassified_count += 1;
                }
            }
        }

        let mut colors = [None; BATCH_PAGES];
        self.classify_by_timing(
            &slots[..unclassified_count],
            &mut colors[..unclassified_count],
        );
        for (slot, color) in slots[..unclassified_count].iter().zip(colors) {
            self.frame_pool
                .push(color.map_or(FreeList::Unknown, FreeList::Color), *slot);
        }
        fetched_count
    }

    /// The ledger's color of the frame of one of the agent's pages; verified first if the frame is to be used.
    fn find_proven_color(&mut self, page: *mut u8) -> Option<u32> {
        let color = self
            .read_frame(page as u64)
            .and_then(|frame| self.recorded_color(frame))?;
        self.counters.proven += 1;
        // SAFETY: a page of the region that holds a frame and belongs only to the agent.
        (self.counters.mask >> color & 1 == 0
            || unsafe { self.reference_set.has_color(page, color) })
        .then_some(color)
    }

    /// Colors of frames without a correct entry in the ledger.
    fn classify_by_timing(&mut self, slots: &[u32], colors: &mut [Option<u32>]) {
        if slots.is_empty() {
            return;
        }
        let start_ns = sys::now_ns();
        let mut pages = [core::ptr::null::<u8>(); BATCH_PAGES];
        slots
            .iter()
            .zip(&mut pages)
            .for_each(|(slot, page)| *page = self.slot_address(*slot));

        // SAFETY: pages of the region that hold frames and belong only to the agent.
        unsafe {
            self.reference_set
                .classify_all(&pages[..slots.len()], colors)
        };

        for (page, color) in pages.iter().zip(&*colors) {
            if let Some(frame) = self.read_frame(*page as u64) {
                self.ledger.record(frame, *color);
            }

            // A neighbor that came or went shifts hits and misses, so that no color is found until the threshold is
            // calibrated again.
            self.unclassified_run = if color.is_none() {
                self.unclassified_run + 1
            } else {
                0
            };
            if self.unclassified_run % 8 == 7 {
                self.reference_set.calibrate();
            }
        }

        self.counters.classified += slots.len() as u64;
        self.counters.classify_ns += sys::now_ns() - start_ns;
    }

    pub(super) fn recorded_color(&self, frame: u64) -> Option<u32> {
        let color = self.ledger.color(frame)?;
        (color < self.reference_set.colors()).then_some(color)
    }
}
