//! A sixteen-bit word per line of physical memory, held only for pages that were used.
//!
//! Serves as the memory of how each line last left a cache (the cause of the next miss), and as the directory of
//! which caches may hold it. One look is two array reads, no hashing.

/// Words of 1024 pages are allocated together.
const PAGES_PER_SEGMENT: usize = 1024;

pub(crate) struct LineTable {
    lines_per_page_shift: u32,
    /// By frame: number of the page's words + 1; 0 = none yet. Zeroed memory that the host commits when touched.
    pages: Vec<u32>,
    segments: Vec<Box<[u16]>>,
    used: u32,
}

impl LineTable {
    /// For `frames` pages of `1 << lines_per_page_shift` lines each.
    pub fn new(frames: u64, lines_per_page_shift: u32) -> Self {
        LineTable { lines_per_page_shift, pages: vec![0; frames as usize], segments: Vec::new(), used: 0 }
    }

    fn split(&self, line: u64) -> (usize, usize) {
        let in_page = line & ((1 << self.lines_per_page_shift) - 1);
        ((line >> self.lines_per_page_shift) as usize, in_page as usize)
    }

    #[inline]
    pub fn get(&self, line: u64) -> u16 {
        let (frame, in_page) = self.split(line);
        match self.pages[frame] {
            0 => 0,
            page => {
                let page = page as usize - 1;
                let within = (page % PAGES_PER_SEGMENT) << self.lines_per_page_shift;
                self.segments[page / PAGES_PER_SEGMENT][within + in_page]
            }
        }
    }

    #[inline]
    pub fn at(&mut self, line: u64) -> &mut u16 {
        let (frame, in_page) = self.split(line);
        if self.pages[frame] == 0 {
            if (self.used as usize).is_multiple_of(PAGES_PER_SEGMENT) {
                let words = PAGES_PER_SEGMENT << self.lines_per_page_shift;
                self.segments.push(vec![0; words].into_boxed_slice());
            }
            self.used += 1;
            self.pages[frame] = self.used;
        }
        let page = self.pages[frame] as usize - 1;
        let within = (page % PAGES_PER_SEGMENT) << self.lines_per_page_shift;
        &mut self.segments[page / PAGES_PER_SEGMENT][within + in_page]
    }
}
