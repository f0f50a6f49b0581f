//! Measures the peak memory of contenders.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

static NOW: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

/// The system's allocator, extended by a record of the peak number of bytes in use.
pub struct PeakAllocator;

fn add(bytes: isize) {
    let now = NOW.fetch_add(bytes, Relaxed) + bytes;
    if bytes > 0 {
        PEAK.fetch_max(now, Relaxed);
    }
}

// SAFETY: every call is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for PeakAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller upholds the contract, which is that of the system's allocator.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller upholds the contract, which is that of the system's allocator.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        add(-(layout.size() as isize));
        // SAFETY: the caller upholds the contract, which is that of the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // The peak counts the old and the new block together, the worst case of a reallocation.
        add(size as isize);
        // SAFETY: the caller upholds the contract, which is that of the system's allocator.
        let new_pointer = unsafe { System.realloc(pointer, layout, size) };
        add(-(layout.size() as isize));
        new_pointer
    }
}

/// Runs `work`. Returns its result, and the peak number of bytes beyond those allocated before.
pub fn peak_bytes<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let bytes_before = NOW.load(Relaxed);
    PEAK.store(bytes_before, Relaxed);
    let result = work();
    (result, (PEAK.load(Relaxed) - bytes_before).max(0) as u64)
}

/// Runs `work`. Returns its result, and the number of bytes that are still allocated after it.
pub fn retained_bytes<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let bytes_before = NOW.load(Relaxed);
    let result = work();
    (result, (NOW.load(Relaxed) - bytes_before).max(0) as u64)
}
