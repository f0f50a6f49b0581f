//! The page table of one address space, in chunks of 512 entries like the hardware's lowest level.

use std::collections::BTreeMap;

const CHUNK_PAGES: u64 = 512;
/// Flag of an entry: the page was looked up after the flag was last cleared.
const TOUCHED: u32 = 1 << 31;

/// A map from virtual pages to frames.
#[derive(Clone, Debug, Default)]
pub struct PageTable {
    /// Entries by chunk: frame + 1 and the touched flag, or 0 if the page is not mapped.
    chunks: BTreeMap<u64, Vec<u32>>,
    resident_count: u64,
}

impl PageTable {
    pub fn resident_pages(&self) -> u64 {
        self.resident_count
    }

    /// Marks the page as touched; `None` if it is not mapped.
    pub fn touch(&mut self, page: u64) -> Option<u32> {
        let entry = self
            .chunks
            .get_mut(&(page / CHUNK_PAGES))?
            .get_mut((page % CHUNK_PAGES) as usize)?;
        let frame = (*entry & !TOUCHED).checked_sub(1)?;
        *entry |= TOUCHED;
        Some(frame)
    }

    pub fn frame(&self, page: u64) -> Option<u32> {
        let entry = self
            .chunks
            .get(&(page / CHUNK_PAGES))?
            .get((page % CHUNK_PAGES) as usize)?;
        (entry & !TOUCHED).checked_sub(1)
    }

    /// Maps or remaps a page, and returns the earlier frame, if any. The touched flag does not change.
    pub fn map(&mut self, page: u64, frame: u32) -> Option<u32> {
        let chunk = self
            .chunks
            .entry(page / CHUNK_PAGES)
            .or_insert_with(|| vec![0; CHUNK_PAGES as usize]);
        let entry = &mut chunk[(page % CHUNK_PAGES) as usize];
        let previous_frame = (*entry & !TOUCHED).checked_sub(1);
        *entry = (frame + 1) | (*entry & TOUCHED);
        self.resident_count += u64::from(previous_frame.is_none());
        previous_frame
    }

    /// Page, frame and touched flag of every mapped page, in ascending order of pages.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u32, bool)> + '_ {
        self.chunks.iter().flat_map(|(chunk, entries)| {
            entries
                .iter()
                .enumerate()
                .filter(|(_, entry)| **entry & !TOUCHED != 0)
                .map(move |(offset, entry)| {
                    (
                        chunk * CHUNK_PAGES + offset as u64,
                        (entry & !TOUCHED) - 1,
                        entry & TOUCHED != 0,
                    )
                })
        })
    }

    /// Clears the touched flags, so that the next look-up of each page counts as new.
    pub fn clear_touched(&mut self) {
        for entry in self.chunks.values_mut().flatten() {
            *entry &= !TOUCHED;
        }
    }
}
