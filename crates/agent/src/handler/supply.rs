//! The stock's supply: frames of the kernel's, told apart by the ledger where it knows them, by time where it does not.

use core::sync::atomic::{AtomicU8, Ordering};

use super::Agent;
use crate::stock::List;
use crate::sys;
use crate::timing::TOGETHER;

impl Agent {
    /// Fetches frames until `wanted` of allowed colours are there, at most `at_most`; true = there is one at least.
    pub(super) fn fetch(&mut self, wanted: u32, at_most: u32) -> bool {
        let (mask, mut left) = (self.account.mask, at_most as usize);
        while left > 0 && self.stock.allowed(mask) < wanted {
            let room = self.account.hold_at_most.saturating_sub(u64::from(self.stock.held()));
            let fetched = self.fetch_some(left.min(TOGETHER).min(room as usize));
            if fetched == 0 {
                break;
            }
            left -= fetched;
        }
        self.account.held_frames = u64::from(self.stock.held());
        self.account.held_most = self.account.held_most.max(self.account.held_frames);
        self.stock.allowed(mask) > 0
    }

    /// Fetches up to `count` frames, told apart together; how many there were.
    fn fetch_some(&mut self, count: usize) -> usize {
        let (mut slots, mut strangers) = ([0; TOGETHER], 0);
        while strangers < count
            && let Some(slot) = self.stock.pop(List::Untold)
        {
            slots[strangers] = slot;
            strangers += 1;
        }
        let mut fetched = strangers;
        while fetched < count {
            let Some(slot) = self.stock.pop(List::Empty) else { break };
            fetched += 1;
            // SAFETY: a page of the region's first half, which nobody registered. Written: a page that was only read is
            // the kernel's page of zeros, and so would be whatever it is given to.
            unsafe { self.slot(slot).write_volatile(0) };
            match self.proven(self.slot(slot)) {
                Some(colour) => self.stock.push(List::Colour(colour), slot),
                None => {
                    slots[strangers] = slot;
                    strangers += 1;
                }
            }
        }
        let mut told = [None; TOGETHER];
        self.tell_apart(&slots[..strangers], &mut told[..strangers]);
        for (slot, colour) in slots[..strangers].iter().zip(told) {
            self.stock.push(colour.map_or(List::Unknown, List::Colour), *slot);
        }
        fetched
    }

    /// What the ledger says of the frame of one of our own pages; proven first, if it is to be used.
    fn proven(&mut self, page: *mut u8) -> Option<u32> {
        let colour = self.frame_at(page as u64).and_then(|frame| self.noted(frame))?;
        self.account.proven += 1;
        // SAFETY: a page of the region that holds a frame, and is only ours.
        (self.account.mask >> colour & 1 == 0 || unsafe { self.kit.is(page, colour) }).then_some(colour)
    }

    /// Colours of frames of which the ledger knows nothing that is true.
    fn tell_apart(&mut self, slots: &[u32], told: &mut [Option<u32>]) {
        if slots.is_empty() {
            return;
        }
        let start = sys::now_ns();
        let mut pages = [core::ptr::null::<u8>(); TOGETHER];
        slots.iter().zip(&mut pages).for_each(|(slot, page)| *page = self.slot(*slot));
        // SAFETY: pages of the region that hold frames, and are only ours.
        unsafe { self.kit.classify_all(&pages[..slots.len()], told) };
        for (page, colour) in pages.iter().zip(&*told) {
            if let Some(frame) = self.frame_at(*page as u64) {
                self.note(frame, *colour);
            }
            // A neighbour that came or went shifts hits and misses: nothing fits any more until that is measured anew.
            self.unclear = if colour.is_none() { self.unclear + 1 } else { 0 };
            if self.unclear % 8 == 7 {
                self.kit.calibrate();
            }
        }
        self.account.classified += slots.len() as u64;
        self.account.classify_ns += sys::now_ns() - start;
    }

    fn ledger_byte(&self, frame: u64) -> Option<&AtomicU8> {
        // SAFETY: inside the mapped ledger, which several agents share: only ever accessed atomically.
        ((frame as usize) < self.ledger.1).then(|| unsafe { AtomicU8::from_ptr(self.ledger.0.add(frame as usize)) })
    }

    pub(super) fn noted(&self, frame: u64) -> Option<u32> {
        let colour = u32::from(self.ledger_byte(frame)?.load(Ordering::Relaxed).checked_sub(1)?);
        (colour < self.kit.colours()).then_some(colour)
    }

    fn note(&self, frame: u64, colour: Option<u32>) {
        if let Some(byte) = self.ledger_byte(frame) {
            byte.store(colour.map_or(0, |colour| colour as u8 + 1), Ordering::Relaxed);
        }
    }
}
