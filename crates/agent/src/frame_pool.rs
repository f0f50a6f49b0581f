//! The agent's supply of frames: lists by color, in memory that the caller provides.
//!
//! Problem: the handler must not allocate. Method: a slot is a page of the agent's own region that holds a frame or
//! is empty. A slot in use is in no list; any other slot is in exactly one list, and one array links the lists.
//! Properties: every operation takes constant time, and there are never more frames than slots.

use crate::layout::MAX_COLORS;

const NO_SLOT: u32 = u32::MAX;
const COLORS: usize = MAX_COLORS as usize;

/// The list of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FreeList {
    /// The slot holds a frame of this color.
    Color(u32),
    /// The slot holds a frame of unknown color.
    Unknown,
    /// The slot holds a frame whose color has not been looked up or measured.
    Unclassified,
    /// The slot is empty and in the half that the kernel fills.
    Empty,
    /// The slot is empty and in the half to which pages are moved.
    EmptyInFlight,
}

const LIST_COUNT: usize = COLORS + 4;

impl FreeList {
    fn index(self) -> usize {
        match self {
            FreeList::Color(color) => color as usize,
            FreeList::Unknown => COLORS,
            FreeList::Unclassified => COLORS + 1,
            FreeList::Empty => COLORS + 2,
            FreeList::EmptyInFlight => COLORS + 3,
        }
    }
}

/// Lists over the slots of one region.
#[derive(Debug)]
pub struct FramePool<'a> {
    next_slots: &'a mut [u32],
    first_slots: [u32; LIST_COUNT],
    slot_counts: [u32; LIST_COUNT],
    /// First slot of each half that was never used; the slots from there on are empty, and in no list.
    first_fresh_slots: [u32; 2],
    last_color: u32,
}

impl<'a> FramePool<'a> {
    /// `next_slots` has an entry for each slot; at first, all are empty.
    pub fn new(next_slots: &'a mut [u32]) -> Self {
        let half_count = next_slots.len() as u32 / 2;
        FramePool {
            next_slots,
            first_slots: [NO_SLOT; LIST_COUNT],
            slot_counts: [0; LIST_COUNT],
            first_fresh_slots: [0, half_count],
            last_color: 0,
        }
    }

    /// Number of slots in each half; slots below it are in the half that the kernel fills.
    pub fn half_slots(&self) -> u32 {
        self.next_slots.len() as u32 / 2
    }

    /// Adds a slot that is in no list to the front of one. The slot must not be a fresh one that [`FramePool::pop`] has
    /// not returned yet.
    pub fn push(&mut self, list: FreeList, slot: u32) {
        let index = list.index();
        self.next_slots[slot as usize] = self.first_slots[index];
        self.first_slots[index] = slot;
        self.slot_counts[index] += 1;
    }

    /// Removes a slot from a list; `None` if the list is empty. The two empty lists return fresh slots when nothing
    /// else is left.
    pub fn pop(&mut self, list: FreeList) -> Option<u32> {
        let index = list.index();
        let slot = self.first_slots[index];
        if slot == NO_SLOT {
            let (next_fresh, end) = match list {
                FreeList::Empty => (
                    &mut self.first_fresh_slots[0],
                    self.next_slots.len() as u32 / 2,
                ),
                FreeList::EmptyInFlight => (
                    &mut self.first_fresh_slots[1],
                    self.next_slots.len() as u32 / 2 * 2,
                ),
                _ => return None,
            };
            *next_fresh += 1;
            if *next_fresh > end {
                *next_fresh = end;
                return None;
            }
            return Some(*next_fresh - 1);
        }

        self.first_slots[index] = self.next_slots[slot as usize];
        self.slot_counts[index] -= 1;
        Some(slot)
    }

    /// Number of slots in the list; fresh slots are in no list.
    pub fn count(&self, list: FreeList) -> u32 {
        self.slot_counts[list.index()]
    }

    /// `mask` has a bit for each allowed color.
    pub fn allowed_count(&self, mask: u64) -> u32 {
        (0..MAX_COLORS)
            .filter(|color| mask >> color & 1 == 1)
            .map(|color| self.count(FreeList::Color(color)))
            .sum()
    }

    /// Frames of any color, known or not.
    pub fn held_count(&self) -> u32 {
        self.slot_counts[..=COLORS + 1].iter().sum()
    }

    /// Takes a frame of an allowed color; colors alternate, so that a program's pages spread over all of its sets.
    pub fn take_allowed(&mut self, mask: u64) -> Option<(u32, u32)> {
        for step in 1..=MAX_COLORS {
            let color = (self.last_color + step) % MAX_COLORS;
            if mask >> color & 1 == 1
                && let Some(slot) = self.pop(FreeList::Color(color))
            {
                self.last_color = color;
                return Some((slot, color));
            }
        }
        None
    }

    /// Takes any frame, preferably one of unknown color.
    pub fn take_any(&mut self) -> Option<u32> {
        self.pop(FreeList::Unknown)
            .or_else(|| self.pop(FreeList::Unclassified))
            .or_else(|| self.take_allowed(u64::MAX).map(|(slot, _)| slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    /// After any sequence of pushes and pops: is every slot in exactly one place, and is no frame of a forbidden color
    /// returned?
    #[test]
    fn no_slot_is_lost_or_given_twice() {
        let mut memory = vec![0; 300];
        let mut stock = FramePool::new(&mut memory);
        let mut free_slots: Vec<u32> = Vec::new();
        let mut seed = 9u64;
        for _ in 0..20_000 {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let (step, which) = ((seed >> 40) % 4, (seed >> 50) as u32 % 8);
            let empty = |slot| {
                if slot < 150 {
                    FreeList::Empty
                } else {
                    FreeList::EmptyInFlight
                }
            };

            match step {
                0 => free_slots.extend(stock.pop(if which < 4 {
                    FreeList::Empty
                } else {
                    FreeList::EmptyInFlight
                })),
                1 => {
                    let mask = 1u64 << which;
                    if let Some((slot, color)) = stock.take_allowed(mask) {
                        assert_eq!(color, which);
                        free_slots.push(slot);
                    } else {
                        assert_eq!(stock.allowed_count(mask), 0);
                    }
                }
                2 => free_slots.extend(stock.take_any()),
                _ => {
                    if let Some(slot) = free_slots.pop() {
                        let lists = [
                            FreeList::Color(which),
                            FreeList::Unknown,
                            FreeList::Unclassified,
                            empty(slot),
                        ];
                        stock.push(lists[which as usize % 4], slot);
                    }
                }
            }

            let mut sorted = free_slots.clone();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), free_slots.len(), "a slot was given twice");
            assert!(free_slots.iter().all(|&slot| slot < 300));
            let listed = stock.count(FreeList::Empty) + stock.count(FreeList::EmptyInFlight);
            let empty =
                listed + 150 - stock.first_fresh_slots[0] + 300 - stock.first_fresh_slots[1];
            assert_eq!(free_slots.len() as u32 + stock.held_count() + empty, 300);
        }
    }

    /// Do allowed colors alternate?
    #[test]
    fn allowed_colors_alternate() {
        let mut memory = vec![0; 64];
        let mut stock = FramePool::new(&mut memory);
        for color in [1, 2, 5, 1, 2, 5] {
            let slot = stock.pop(FreeList::Empty).unwrap();
            stock.push(FreeList::Color(color), slot);
        }
        let colors: Vec<u32> =
            core::iter::from_fn(|| stock.take_allowed(0b10_0110).map(|(_, color)| color)).collect();
        assert_eq!(colors, [1, 2, 5, 1, 2, 5]);
    }
}
