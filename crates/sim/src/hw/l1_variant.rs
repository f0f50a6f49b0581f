//! Shapes of L1s for which the fast path is compiled, with known ways and replacement, and pages of 4 KB.
//!
//! A shape is a number, because it is a const parameter of functions: the number of ways, and a bit for random
//! replacement.

use cachemate_core::{CacheSpec, MachineSpec, ReplacementPolicy};

const RANDOM: usize = 64;

/// Any other cache, or another page size.
pub(crate) const ANY: usize = 0;
pub(crate) const LRU_2: usize = 2;
pub(crate) const LRU_4: usize = 4;
pub(crate) const LRU_8: usize = 8;
pub(crate) const RANDOM_4: usize = RANDOM + 4;

/// The page size of all shapes but [`ANY`], as a shift.
pub(crate) const PLAIN_PAGE_SHIFT: u32 = 12;

pub(crate) const fn ways(shape: usize) -> usize {
    shape % RANDOM
}

pub(crate) const fn is_random(shape: usize) -> bool {
    shape >= RANDOM
}

/// Returns the shape of a cache of the machine. Its sets must follow from the low bits of lines and pages.
pub(crate) fn variant_of(machine: &MachineSpec, cache: &CacheSpec) -> usize {
    let bits_give_the_set = cache.slices == 1 && cache.sets_per_slice().is_power_of_two();
    let shape = match cache.replacement {
        ReplacementPolicy::Lru => cache.ways as usize,
        ReplacementPolicy::Random => RANDOM + cache.ways as usize,
        ReplacementPolicy::TreePlru => ANY,
    };
    let known = [LRU_2, LRU_4, LRU_8, RANDOM_4].contains(&shape);
    if known && bits_give_the_set && machine.pages.page_bytes == 1 << PLAIN_PAGE_SHIFT { shape } else { ANY }
}
