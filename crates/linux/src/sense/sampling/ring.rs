//! The memory that an event of perf_event_open(2) shares with the kernel: a control page, and a ring of records.

use std::fs::File;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use perf_event_open_sys as perf;

use super::records::unroll_ring;
use crate::kernel::memory_map::MemoryMap;

const PAGE_BYTES: usize = 4096;

/// The mapped ring of one event; records are taken from it in the order in which the kernel wrote them.
pub(crate) struct SampleRing {
    map: MemoryMap,
}

impl SampleRing {
    /// Maps a ring of at least `bytes` bytes; the size is rounded up to a power of two.
    ///
    /// # Errors
    /// The kernel's error: `EPERM` if the user may not lock so much memory (`kernel.perf_event_mlock_kb`).
    pub(crate) fn map(event: &File, bytes: usize) -> io::Result<Self> {
        let data_bytes = bytes.max(PAGE_BYTES).next_power_of_two();
        Ok(SampleRing {
            map: MemoryMap::of_file(event, PAGE_BYTES + data_bytes, true)?,
        })
    }

    /// The bytes that the kernel has written since the last call; their room is free again.
    pub(crate) fn take_bytes(&mut self) -> Vec<u8> {
        let control = self
            .map
            .start()
            .cast::<perf::bindings::perf_event_mmap_page>();
        // SAFETY: the control page lives as long as the mapping. The head is written by the kernel and read with
        // acquire order, so that the records before it are whole; the tail is ours, and the kernel reads it.
        let (head, tail) = unsafe {
            (
                &*ptr::addr_of!((*control).data_head).cast::<AtomicU64>(),
                &*ptr::addr_of!((*control).data_tail).cast::<AtomicU64>(),
            )
        };
        let (tail_position, head_position) =
            (tail.load(Ordering::Relaxed), head.load(Ordering::Acquire));
        // SAFETY: the data pages follow the control page; between tail and head the kernel does not write.
        let ring_bytes = unsafe {
            std::slice::from_raw_parts(
                self.map.start().add(PAGE_BYTES),
                self.map.bytes() - PAGE_BYTES,
            )
        };
        let bytes = unroll_ring(ring_bytes, tail_position, head_position);
        tail.store(head_position, Ordering::Release);
        bytes
    }
}
