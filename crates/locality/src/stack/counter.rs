//! Counts the dead slots above a given slot.
//!
//! Every access takes the next slot, and the previous slot of its line dies. The stack distance of an access at slot t,
//! whose line was last accessed at o, is the number of live slots between the two: (t - o - 1) - #{dead slots > o}.
//! Each access queries and updates only the position o; appending a slot costs nothing.
//!
//! Each slot has one dead bit, 64 to a word. Above the words are counters of the dead slots in *later siblings*: per
//! word (32 words to a group), per group (32 groups to a block), per block (16 blocks to a section), and per section. A
//! query reads one counter of each level. An update adds one to all earlier siblings at each level, with one vector
//! addition and no branch. At most 31 * 64 slots are dead in later words and 31 * 2^11 < 2^16 in later groups, so these
//! counters are narrow; blocks, sections and slots use 32 bits.

use super::tally::Tally;
use crate::simd::{Lanes, U16x32, U32x16, prefetch};

const SLOTS_PER_GROUP: usize = 64 * 32;
const SLOTS_PER_BLOCK: usize = SLOTS_PER_GROUP * 32;
const SLOTS_PER_SECTION: usize = SLOTS_PER_BLOCK * 16;
/// Number of accesses ahead for which counters are prefetched.
const PREFETCH_AHEAD: usize = 16;

/// Dead bits and counters for a fixed number of slots.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeadSlotCounter {
    dead_bits: Vec<u64>,
    dead_in_later_words: Vec<U16x32>,
    dead_in_later_groups: Vec<U16x32>,
    dead_in_later_blocks: Vec<U32x16>,
    dead_in_later_sections: Vec<U32x16>,
}

impl DeadSlotCounter {
    /// Builds the counter with all slots alive, and room for at least `slots`.
    pub(crate) fn new(slots: usize) -> Self {
        let sections = slots.div_ceil(SLOTS_PER_SECTION);
        DeadSlotCounter {
            dead_bits: vec![0; slots.div_ceil(SLOTS_PER_GROUP) * 32],
            dead_in_later_words: vec![U16x32([0; 32]); slots.div_ceil(SLOTS_PER_GROUP)],
            dead_in_later_groups: vec![U16x32([0; 32]); slots.div_ceil(SLOTS_PER_BLOCK)],
            dead_in_later_blocks: vec![U32x16([0; 16]); sections],
            dead_in_later_sections: vec![U32x16([0; 16]); sections.div_ceil(16)],
        }
    }

    /// 64 slots to a word, the lowest slot in the lowest bit.
    pub(super) fn dead_bits(&self) -> &[u64] {
        &self.dead_bits
    }

    /// Kills these slots as well, without counting; 0 stands for none.
    pub(super) fn with_dead(mut self, slots: &[u32]) -> Self {
        for &slot in slots {
            self.dead_bits[slot as usize / 64] |= u64::from(slot != 0) << (slot % 64);
        }
        let words: Vec<u32> = self
            .dead_bits
            .iter()
            .map(|word| word.count_ones())
            .collect();
        let groups = sum_later(&words, 32, |word, dead_later| {
            self.dead_in_later_words[word / 32].0[word % 32] = dead_later as u16;
        });
        let blocks = sum_later(&groups, 32, |group, dead_later| {
            self.dead_in_later_groups[group / 32].0[group % 32] = dead_later as u16;
        });
        let sections = sum_later(&blocks, 16, |block, dead_later| {
            self.dead_in_later_blocks[block / 16].0[block % 16] = dead_later;
        });
        sum_later(&sections, sections.len().max(1), |section, dead_later| {
            self.dead_in_later_sections[section / 16].0[section % 16] = dead_later;
        });
        self
    }

    /// Kills the old slot of each access (old, new) in turn, and counts its distance in `tally`. There are at most
    /// [`BATCH_ACCESSES`](super::batch::BATCH_ACCESSES) accesses, for which `tally` has reserved room.
    #[inline(always)]
    pub(super) unsafe fn kill_and_count<L: Lanes>(
        &mut self,
        old_slots: &[u32],
        new_slots: &[u32],
        tally: &mut Tally,
    ) {
        let new_slots = &new_slots[..old_slots.len()];
        for &slot in &old_slots[..old_slots.len().min(PREFETCH_AHEAD)] {
            self.prefetch(slot);
        }
        for index in 0..old_slots.len() {
            if let Some(&slot) = old_slots.get(index + PREFETCH_AHEAD) {
                self.prefetch(slot);
            }
            // SAFETY: the caller guarantees that the processor has `L`.
            let dead_above = unsafe { self.kill_one::<L>(old_slots[index]) };
            tally.count(index, new_slots[index] - old_slots[index] - 1 - dead_above);
        }
    }

    #[inline(always)]
    fn prefetch(&self, slot: u32) {
        prefetch(self.dead_bits.as_ptr().wrapping_add(slot as usize / 64));
        prefetch(
            self.dead_in_later_words
                .as_ptr()
                .wrapping_add(slot as usize / SLOTS_PER_GROUP),
        );
    }

    /// Kills one slot, which is alive; returns the number of dead slots above it.
    ///
    /// # Safety
    /// The processor has `L`.
    #[inline(always)]
    pub(crate) unsafe fn kill_one<L: Lanes>(&mut self, slot: u32) -> u32 {
        let slot = slot as usize;
        let (word, group) = (slot / 64, slot / SLOTS_PER_GROUP);
        let (block, section) = (slot / SLOTS_PER_BLOCK, slot / SLOTS_PER_SECTION);
        // One check instead of one per level: every level is at least as long as `dead_bits` requires.
        assert!(word < self.dead_bits.len());
        // SAFETY: `new` made every level long enough for the slots of `dead_bits`; the caller guarantees that the
        // processor has `L`; lanes are below 32 and 16 because of the remainders.
        unsafe {
            let dead_word = self.dead_bits.get_unchecked_mut(word);
            debug_assert_eq!(*dead_word >> (slot % 64) & 1, 0);
            let mut dead_above = (*dead_word >> (slot % 64)).count_ones();
            *dead_word |= 1 << (slot % 64);
            dead_above += u32::from(L::bump_u16(
                self.dead_in_later_words.get_unchecked_mut(group),
                word % 32,
            ));
            dead_above += u32::from(L::bump_u16(
                self.dead_in_later_groups.get_unchecked_mut(block),
                group % 32,
            ));
            dead_above += L::bump_u32(
                self.dead_in_later_blocks.get_unchecked_mut(section),
                block % 16,
            );
            dead_above += L::bump_u32(
                self.dead_in_later_sections.get_unchecked_mut(section / 16),
                section % 16,
            );
            // More than 2^24 slots: all sections of earlier groups of sixteen.
            for section_counters in self
                .dead_in_later_sections
                .get_unchecked_mut(..section / 16)
            {
                section_counters.0.iter_mut().for_each(|count| *count += 1);
            }
            dead_above
        }
    }
}

/// Calls `set` with each index and the sum of its later siblings, of which there are `siblings` together; returns the
/// sums of all siblings.
fn sum_later(counts: &[u32], siblings: usize, mut set: impl FnMut(usize, u32)) -> Vec<u32> {
    let mut sums = Vec::with_capacity(counts.len().div_ceil(siblings));
    for (parent, counts) in counts.chunks(siblings).enumerate() {
        let mut later_sum = 0;
        for (sibling, count) in counts.iter().enumerate().rev() {
            set(parent * siblings + sibling, later_sum);
            later_sum += count;
        }
        sums.push(later_sum);
    }
    sums
}
