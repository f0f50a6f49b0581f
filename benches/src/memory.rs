//! Peak memory of the contenders.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

static NOW: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

/// The system's allocator, which records the peak of the bytes in use.
pub struct PeakAllocator;

fn add(bytes: isize) {
    let now = NOW.fetch_add(bytes, Relaxed) + bytes;
    if bytes > 0 {
        PEAK.fetch_max(now, Relaxed);
    }
}

// SAFETY: all calls are passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for PeakAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller's promises are those that the system requires.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller's promises are those that the system requires.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        add(-(layout.size() as isize));
        // SAFETY: the caller's promises are those that the system requires.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Counted as if the old and the new block existed at the same time, the worst case of a reallocation.
        add(size as isize);
        // SAFETY: the caller's promises are those that the system requires.
        let new_pointer = unsafe { System.realloc(pointer, layout, size) };
        add(-(layout.size() as isize));
        new_pointer
    }
}

/// Runs `work`; returns its result, and its peak number of bytes beyond those allocated before.
pub fn peak_bytes<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let bytes_before = NOW.load(Relaxed);
    PEAK.store(bytes_before, Relaxed);
    let result = work();
    (result, (PEAK.load(Relaxed) - bytes_before).max(0) as u64)
}
