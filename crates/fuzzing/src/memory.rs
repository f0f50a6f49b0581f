//! An allocator that counts, for test programs that state how much memory a target may take.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, which also tracks the bytes in use and their maximum.
pub struct CountingAllocator {
    now_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
    /// More than this in one piece is refused, as a host refuses it that has no more.
    piece_at_most_bytes: usize,
}

impl CountingAllocator {
    /// An allocator that has counted nothing yet.
    pub const fn new(piece_at_most_bytes: usize) -> Self {
        CountingAllocator { now_bytes: AtomicUsize::new(0), peak_bytes: AtomicUsize::new(0), piece_at_most_bytes }
    }

    /// Forgets the peak so far; answers with the bytes in use.
    pub fn start(&self) -> usize {
        let now = self.now_bytes.load(Ordering::Relaxed);
        self.peak_bytes.store(now, Ordering::Relaxed);
        now
    }

    /// The most bytes in use since [`CountingAllocator::start`].
    pub fn peak_bytes(&self) -> usize {
        self.peak_bytes.load(Ordering::Relaxed)
    }

    fn add_bytes(&self, bytes: usize) {
        let now = self.now_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak_bytes.fetch_max(now, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator as it came, or is answered with null, which an allocator may always do.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > self.piece_at_most_bytes {
            return std::ptr::null_mut();
        }
        self.add_bytes(layout.size());
        // SAFETY: the caller keeps to the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > self.piece_at_most_bytes {
            return std::ptr::null_mut();
        }
        self.add_bytes(layout.size());
        // SAFETY: the caller keeps to the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        self.now_bytes.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps to the contract of `dealloc`.
        unsafe { System.dealloc(start, layout) }
    }
}
