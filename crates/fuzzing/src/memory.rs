//! A counting allocator for tests that limit the memory of a target.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, extended by counters of the bytes in use and of their maximum.
pub struct CountingAllocator {
    used_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
    /// Size above which an allocation fails, as it does on a host that has run out of memory.
    max_piece_bytes: usize,
}

impl CountingAllocator {
    /// Builds an allocator whose counters are zero.
    pub const fn new(max_piece_bytes: usize) -> Self {
        CountingAllocator {
            used_bytes: AtomicUsize::new(0),
            peak_bytes: AtomicUsize::new(0),
            max_piece_bytes,
        }
    }

    /// Resets the maximum to the bytes in use, and returns them.
    pub fn start(&self) -> usize {
        let used_bytes = self.used_bytes.load(Ordering::Relaxed);
        self.peak_bytes.store(used_bytes, Ordering::Relaxed);
        used_bytes
    }

    /// Bytes in use at their maximum since [`CountingAllocator::start`].
    pub fn peak_bytes(&self) -> usize {
        self.peak_bytes.load(Ordering::Relaxed)
    }

    fn add_bytes(&self, bytes: usize) {
        let used_bytes = self.used_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak_bytes.fetch_max(used_bytes, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged, or returns null, as any allocator may.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > self.max_piece_bytes {
            return std::ptr::null_mut();
        }
        self.add_bytes(layout.size());
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > self.max_piece_bytes {
            return std::ptr::null_mut();
        }
        self.add_bytes(layout.size());
        // SAFETY: the caller upholds the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        self.used_bytes.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(start, layout) }
    }
}
