//! Memory whose frames are classified by timing.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use cachemate_agent::layout::PAGE_BYTES;
use cachemate_agent::timing::{is_slow, reload_cycles};

use super::grouping::EvictionOracle;
use crate::kernel::memory_map::MemoryMap;

/// Pages of anonymous memory, each with its own frame, and none of them part of a huge page.
#[derive(Debug)]
pub struct PagePool {
    map: MemoryMap,
}

impl PagePool {
    /// Allocates this number of pages, and writes each so that it has a frame.
    ///
    /// # Errors
    /// The kernel cannot map the memory.
    pub fn new(pages: usize) -> io::Result<Self> {
        // One frame of 2 MiB would cover 512 pages of all colors.
        let pool = PagePool {
            map: MemoryMap::of_small_pages(pages * PAGE_BYTES)?,
        };
        for page in 0..pages {
            // SAFETY: inside the mapping. Written, not read, because all pages that were only read share one frame of
            // zeros.
            unsafe { pool.map.start().add(page * PAGE_BYTES).write_volatile(1) };
        }
        Ok(pool)
    }

    /// Number of pages.
    pub fn page_count(&self) -> usize {
        self.map.bytes() / PAGE_BYTES
    }

    /// Address of a page.
    ///
    /// # Panics
    /// There is no page `index`.
    pub fn page_address(&self, index: usize) -> *mut u8 {
        assert!(
            index < self.page_count(),
            "page {index} of {}",
            self.page_count()
        );
        // SAFETY: inside the mapping, as just asserted.
        unsafe { self.map.start().add(index * PAGE_BYTES) }
    }

    /// Frame numbers. Without CAP_SYS_ADMIN, the kernel reports 0 for every frame, which becomes `None`.
    pub fn read_frames(&self) -> Vec<Option<u64>> {
        let pagemap = cachemate_files::open_plain(std::path::Path::new("/proc/self/pagemap"));
        let pages = read_present_pages(&pagemap, self.map.start() as usize, self.page_count());
        pages.into_iter().map(|page| Some(page?.frame)).collect()
    }
}

/// A page that is in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PresentPage {
    /// Frame number; never 0.
    pub frame: u64,
    /// Whether the page belongs to the page cache (a file or shared memory) rather than to the process alone.
    pub is_file_page: bool,
}

/// The pages in memory among `pages` pages from `address` on; without CAP_SYS_ADMIN none.
pub fn read_present_pages(
    pagemap: &io::Result<File>,
    address: usize,
    pages: usize,
) -> Vec<Option<PresentPage>> {
    let mut bytes = vec![0u8; pages * 8];
    let read_bytes = pagemap.as_ref().map_or(0, |file| {
        file.read_at(&mut bytes, (address / PAGE_BYTES * 8) as u64)
            .unwrap_or(0)
    });
    let present_page = |index: usize| {
        let word = u64::from_le_bytes(bytes.get(index * 8..index * 8 + 8)?.try_into().ok()?);
        // Bit 63 = present, 61 = of a file or shared, 0-54 = frame number (Documentation/admin-guide/mm/pagemap.rst).
        let (frame, is_file_page) = (word & ((1 << 55) - 1), word >> 61 & 1 == 1);
        (index * 8 < read_bytes && word >> 63 == 1 && frame != 0).then_some(PresentPage {
            frame,
            is_file_page,
        })
    };
    (0..pages).map(present_page).collect()
}

/// An oracle that decides by the time of loads on the real cache.
pub struct TimingOracle<'a> {
    /// Address of the page of an item.
    pub page_address: &'a dyn Fn(usize) -> *const u8,
    /// A load that takes longer has left the private cache.
    pub threshold_cycles: u64,
    /// Advances with each test, so that the next test uses another line.
    pub line_index: usize,
    /// Time at which it gives up.
    pub deadline: Instant,
}

impl TimingOracle<'_> {
    fn is_reload_slow(&mut self, target: usize, set: &[usize]) -> bool {
        self.line_index += 13;
        let pages = set.iter().map(|&item| (self.page_address)(item));
        // SAFETY: `page` gives pages of a pool or of a mapped file, which outlive the borrow.
        unsafe {
            reload_cycles((self.page_address)(target), pages, self.line_index)
                > self.threshold_cycles
        }
    }
}

impl EvictionOracle for TimingOracle<'_> {
    fn evicts(&mut self, target: usize, set: &[usize]) -> bool {
        is_slow(|| self.is_reload_slow(target, set))
    }
    fn evicts_reliably(&mut self, target: usize, set: &[usize]) -> bool {
        (0..6).all(|_| self.is_reload_slow(target, set))
    }
    fn is_exhausted(&self) -> bool {
        Instant::now() > self.deadline
    }
}
