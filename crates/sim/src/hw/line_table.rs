//! A 16-bit word per line of physical memory, stored only for pages that were used.
//!
//! It serves as the record of how each line last left a cache (the cause of the next miss), and as the directory of the
//! caches that may hold it. Pages are found by their frame in an open-addressed table, so that the size depends on the
//! pages used and not on the machine's memory.

use super::host_prefetch::prefetch;

/// Number of slots in a line of the host's caches.
const SLOTS_PER_BLOCK: u64 = 8;

#[derive(Clone, Copy, Default)]
struct PageSlot {
    /// Frame + 1; 0 if the slot is free.
    key: u32,
    /// Position of the page's words.
    page_number: u32,
}

pub(crate) struct LineTable {
    lines_per_page_shift: u32,
    /// Slots; a power of two, of which at most a quarter is in use, so that most pages are found at the first slot.
    slots: Vec<PageSlot>,
    /// Number of bits by which a hash is shifted right to get the number of a block.
    slot_shift: u32,
    words: Vec<u16>,
    page_count: u32,
}

impl LineTable {
    /// Builds a table for pages of `1 << lines_per_page_shift` lines each; frames are below 2^32 - 1.
    pub fn new(lines_per_page_shift: u32) -> Self {
        LineTable {
            lines_per_page_shift,
            slots: vec![PageSlot::default(); 64],
            slot_shift: 64 - 6 + SLOTS_PER_BLOCK.trailing_zeros(),
            words: Vec::new(),
            page_count: 0,
        }
    }

    #[inline(always)]
    fn key_and_offset(&self, line: u64) -> (u32, usize) {
        let line_in_page = line & ((1 << self.lines_per_page_shift) - 1);
        (
            (line >> self.lines_per_page_shift) as u32 + 1,
            line_in_page as usize,
        )
    }

    /// The page's slot, or the free one where it would be inserted. Neighboring pages have
    /// neighboring slots, eight to a line of the host's caches, because programs go from page to
    /// page. Blocks of eight are scattered.
    #[inline(always)]
    fn find_slot(&self, key: u32) -> usize {
        let block = (u64::from(key) / SLOTS_PER_BLOCK).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            >> self.slot_shift;
        // Page colors leave only frames of equal low bits, so each block has its own order.
        let mut index =
            (block * SLOTS_PER_BLOCK + (u64::from(key) ^ block) % SLOTS_PER_BLOCK) as usize;
        loop {
            let occupant_key = self.slots[index].key;
            if occupant_key == key || occupant_key == 0 {
                return index;
            }
            // An odd step, so that every slot is visited.
            index = (index + SLOTS_PER_BLOCK as usize + 1) & (self.slots.len() - 1);
        }
    }

    /// Hints to the host that the line's word will be read.
    #[inline(always)]
    pub fn prefetch_host_entry(&self, line: u64) {
        let (key, in_page) = self.key_and_offset(line);
        let PageSlot {
            key: slot_key,
            page_number: page,
        } = self.slots[self.find_slot(key)];
        let index = ((page as usize) << self.lines_per_page_shift) + in_page;
        if slot_key != 0 {
            prefetch(&self.words[index..=index]);
        }
    }

    #[inline(always)]
    pub fn get(&self, line: u64) -> u16 {
        let (key, in_page) = self.key_and_offset(line);
        let PageSlot {
            key: slot_key,
            page_number: page,
        } = self.slots[self.find_slot(key)];
        if slot_key == 0 {
            0
        } else {
            self.words[((page as usize) << self.lines_per_page_shift) + in_page]
        }
    }

    #[inline(always)]
    pub fn word_mut(&mut self, line: u64) -> &mut u16 {
        let (key, in_page) = self.key_and_offset(line);
        let mut slot = self.find_slot(key);
        if self.slots[slot].key == 0 {
            slot = self.add_page(key);
        }
        &mut self.words
            [((self.slots[slot].page_number as usize) << self.lines_per_page_shift) + in_page]
    }

    #[cold]
    fn add_page(&mut self, key: u32) -> usize {
        if 4 * (self.page_count as usize + 1) > self.slots.len() {
            let larger_slots = vec![PageSlot::default(); 2 * self.slots.len()];
            let old_slots = std::mem::replace(&mut self.slots, larger_slots);
            self.slot_shift -= 1;
            for slot in old_slots.into_iter().filter(|slot| slot.key != 0) {
                let index = self.find_slot(slot.key);
                self.slots[index] = slot;
            }
        }
        let index = self.find_slot(key);
        self.slots[index] = PageSlot {
            key,
            page_number: self.page_count,
        };
        self.page_count += 1;
        self.words
            .resize((self.page_count as usize) << self.lines_per_page_shift, 0);
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Does the table store the same as a plain map, for frames in a row, of one color, of two nodes, and at random?
    #[test]
    fn a_table_stores_the_same_as_a_plain_map() {
        let mut dice = crate::hw::tests::TestRng::new(5);
        let frames: [&dyn Fn(u64) -> u64; 4] = [
            &|nth| nth,
            &|nth| 3 + 16 * nth,
            &|nth| nth / 2 + ((nth % 2) << 20),
            &|nth| nth.wrapping_mul(0x9e37_79b9) >> 4 & 0xfff_ffff,
        ];
        for (kind, frame) in frames.into_iter().enumerate() {
            let (mut table, mut map) = (LineTable::new(4), BTreeMap::new());
            for step in 0..20_000 {
                let line = frame(dice.draw_below(3_000)) << 4 | dice.draw_below(16);
                assert_eq!(
                    table.get(line),
                    map.get(&line).copied().unwrap_or(0),
                    "kind {kind}, step {step}, line {line}"
                );
                table.prefetch_host_entry(line);
                let word = dice.draw_below(1 << 16) as u16;
                *table.word_mut(line) = word;
                map.insert(line, word);
            }
        }
    }
}
