//! The known colors of the host's frames: one byte per frame, in a file that all agents and the command map.

use core::sync::atomic::{AtomicU8, Ordering};

/// A mapped ledger. Other processes change it at any time, so it is only accessed atomically.
#[derive(Debug)]
pub struct Ledger {
    start: *mut u8,
    bytes: usize,
}

impl Ledger {
    /// The ledger in a mapping.
    ///
    /// # Safety
    /// The mapping is readable and writable, has this length, and outlives the ledger.
    pub unsafe fn new(start: *mut u8, bytes: usize) -> Self {
        Ledger { start, bytes }
    }

    fn entry(&self, frame: u64) -> Option<&AtomicU8> {
        // SAFETY: inside the mapping.
        ((frame as usize) < self.bytes)
            .then(|| unsafe { AtomicU8::from_ptr(self.start.add(frame as usize)) })
    }

    /// Color of a frame, if it was ever classified.
    pub fn color(&self, frame: u64) -> Option<u32> {
        let byte = self.entry(frame)?.load(Ordering::Relaxed);
        byte.checked_sub(1).map(u32::from)
    }

    /// Records the color of a frame; `None` erases an earlier entry, because the frame fits no color.
    pub fn record(&self, frame: u64, color: Option<u32>) {
        if let Some(byte) = self.entry(frame) {
            byte.store(color.map_or(0, |color| color as u8 + 1), Ordering::Relaxed);
        }
    }
}
