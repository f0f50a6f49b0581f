//! The key by which caches identify a frame if an L1 is indexed by virtual addresses.
//!
//! Problem: such an L1 finds a line by bits of its virtual address, but every other cache and every snoop finds it by
//! its physical one.
//!
//! Method: the frame's bits are extended by those low bits of the virtual page that lie within the L1's index. The
//! first page that reaches a frame determines them; they stay until the frame is flushed, even if further pages reach
//! it (operating systems give shared pages equal low bits on such machines). The L1 uses them for its set, all other
//! caches for part of the tag.
//!
//! Properties: a frame has one name at any time, so coherence works on names as it does on frames; without such a
//! cache, the name is the frame.

use cachemate_core::{CacheSpec, MachineSpec, SetIndexing};

pub(crate) struct PageIndex {
    /// Number of bits of a frame.
    frame_bits: u32,
    /// Number of bits of the virtual page that are in some L1's index.
    page_bits: u32,
    /// The index bits of the virtual page, plus 1, for each frame; 0 if no access has reached it.
    index_bits_by_frame: Vec<u8>,
}

fn frame_bits(machine: &MachineSpec) -> u32 {
    (machine.memory.size_bytes / machine.pages.page_bytes)
        .next_power_of_two()
        .trailing_zeros()
}

/// How one cache derives its set from a line of a named frame.
#[derive(Clone, Copy)]
pub(crate) struct SetBits {
    /// Number of bits of the line number within a page.
    pub line_bits_within_page: u32,
    /// Shift of the line number for the bits above.
    pub page_bits_shift: u32,
}

impl SetBits {
    /// `None` if the bits that select the set lie within a page, or are those of the physical
    /// address.
    pub fn new(machine: &MachineSpec, cache: &CacheSpec) -> Option<Self> {
        let within_page = (machine.pages.page_bytes / u64::from(cache.line_bytes))
            .max(1)
            .trailing_zeros();
        let exceeds_page =
            cache.index == SetIndexing::Virtual && cache.sets_per_slice() > 1 << within_page;
        exceeds_page.then(|| SetBits {
            line_bits_within_page: within_page,
            page_bits_shift: frame_bits(machine),
        })
    }
}

impl PageIndex {
    /// Largest number of bits that a byte of `index_bits_by_frame` can hold.
    pub const MAX_PAGE_BITS: u32 = 7;

    /// The number of bits by which names are longer than frames.
    pub fn page_bits(machine: &MachineSpec) -> u32 {
        let bits = machine.caches.iter().filter_map(|cache| {
            let within_page = SetBits::new(machine, cache)?.line_bits_within_page;
            Some(cache.sets_per_slice().trailing_zeros() - within_page)
        });
        bits.max().unwrap_or(0)
    }

    pub fn new(machine: &MachineSpec) -> Self {
        PageIndex {
            frame_bits: frame_bits(machine),
            page_bits: Self::page_bits(machine),
            index_bits_by_frame: Vec::new(),
        }
    }

    /// The name of a frame to which a virtual page is (about to be) mapped.
    pub fn name_frame(&mut self, frame: u64, page: u64) -> u64 {
        if self.page_bits == 0 {
            return frame;
        }
        let index = frame as usize;
        if index >= self.index_bits_by_frame.len() {
            self.index_bits_by_frame.resize(index + 1, 0);
        }
        if self.index_bits_by_frame[index] == 0 {
            self.index_bits_by_frame[index] = (page & ((1 << self.page_bits) - 1)) as u8 + 1;
        }
        u64::from(self.index_bits_by_frame[index] - 1) << self.frame_bits | frame
    }

    /// The frame then has no name; one that had none is named by its own number.
    pub fn take_name(&mut self, frame: u64) -> u64 {
        let stored_bits = self
            .index_bits_by_frame
            .get_mut(frame as usize)
            .map_or(0, std::mem::take);
        u64::from(stored_bits.saturating_sub(1)) << self.frame_bits | frame
    }
}
