//! The supply of the stock: frames from the kernel, classified by the ledger if it knows them, and by timing otherwise.

use core::sync::atomic::{AtomicU8, Ordering};

use super::Agent;
use crate::frame_pool::FreeList;
use crate::sys;
use crate::timing::BATCH_PAGES;

impl Agent {
    /// Fetches at most `max_frames` frames until `wanted_frames` of allowed colors are available; true if there is at least
    /// one.
    pub(super) fn fetch(&mut self, wanted_frames: u32, max_frames: u32) -> bool {
        let (mask, mut remaining) = (self.account.mask, max_frames as usize);
        while remaining > 0 && self.stock.allowed_count(mask) < wanted_frames {
            let room = self.account.max_hold.saturating_sub(u64::from(self.stock.held_count()));
            let fetched = self.fetch_batch(remaining.min(BATCH_PAGES).min(room as usize));
            if fetched == 0 {
                break;
            }
            remaining -= fetched;
        }
        self.account.held_frames = u64::from(self.stock.held_count());
        self.account.max_held = self.account.max_held.max(self.account.held_frames);
        self.stock.allowed_count(mask) > 0
    }

    /// Fetches up to `count` frames and classifies them together; returns their number.
    fn fetch_batch(&mut self, count: usize) -> usize {
        let (mut slots, mut strangers) = ([0; BATCH_PAGES], 0);
        while strangers < count
            && let Some(slot) = self.stock.pop(FreeList::Unclassified)
        {
            slots[strangers] = slot;
            strangers += 1;
        }
        let mut fetched = strangers;
        while fetched < count {
            let Some(slot) = self.stock.pop(FreeList::Empty) else { break };
            fetched += 1;
            // SAFETY: a page of the region's first half, which is not registered. It is written, because a page that
            // was only read would be the kernel's zero page.
            unsafe { self.slot_address(slot).write_volatile(0) };
            match self.proven_color(self.slot_address(slot)) {
                Some(color) => self.stock.push(FreeList::Color(color), slot),
                None => {
                    slots[strangers] = slot;
                    strangers += 1;
                }
            }
        }
        let mut colors = [None; BATCH_PAGES];
        self.classify_by_timing(&slots[..strangers], &mut colors[..strangers]);
        for (slot, color) in slots[..strangers].iter().zip(colors) {
            self.stock.push(color.map_or(FreeList::Unknown, FreeList::Color), *slot);
        }
        fetched
    }

    /// The ledger's color of the frame of one of the agent's pages; verified first if the frame is to be used.
    fn proven_color(&mut self, page: *mut u8) -> Option<u32> {
        let color = self.frame_at(page as u64).and_then(|frame| self.recorded_color(frame))?;
        self.account.proven += 1;
        // SAFETY: a page of the region that holds a frame and belongs only to the agent.
        (self.account.mask >> color & 1 == 0 || unsafe { self.kit.has_color(page, color) }).then_some(color)
    }

    /// Colors of frames without a correct entry in the ledger.
    fn classify_by_timing(&mut self, slots: &[u32], colors: &mut [Option<u32>]) {
        if slots.is_empty() {
            return;
        }
        let start = sys::now_ns();
        let mut pages = [core::ptr::null::<u8>(); BATCH_PAGES];
        slots.iter().zip(&mut pages).for_each(|(slot, page)| *page = self.slot_address(*slot));
        // SAFETY: pages of the region that hold frames and belong only to the agent.
        unsafe { self.kit.classify_all(&pages[..slots.len()], colors) };
        for (page, color) in pages.iter().zip(&*colors) {
            if let Some(frame) = self.frame_at(*page as u64) {
                self.record_color(frame, *color);
            }
            // A neighbor that came or went shifts hits and misses, so that no color is found until the threshold is
            // calibrated again.
            self.unclassified = if color.is_none() { self.unclassified + 1 } else { 0 };
            if self.unclassified % 8 == 7 {
                self.kit.calibrate();
            }
        }
        self.account.classified += slots.len() as u64;
        self.account.classify_ns += sys::now_ns() - start;
    }

    fn ledger_byte(&self, frame: u64) -> Option<&AtomicU8> {
        // SAFETY: inside the mapped ledger, which several agents share, so it is only accessed atomically.
        ((frame as usize) < self.ledger.1).then(|| unsafe { AtomicU8::from_ptr(self.ledger.0.add(frame as usize)) })
    }

    pub(super) fn recorded_color(&self, frame: u64) -> Option<u32> {
        let color = u32::from(self.ledger_byte(frame)?.load(Ordering::Relaxed).checked_sub(1)?);
        (color < self.kit.colors()).then_some(color)
    }

    fn record_color(&self, frame: u64, color: Option<u32>) {
        if let Some(byte) = self.ledger_byte(frame) {
            byte.store(color.map_or(0, |color| color as u8 + 1), Ordering::Relaxed);
        }
    }
}
