//! Several caches on one trace, simulated on all threads with the result of one.
//!
//! Sets are independent of each other, so a thread can simulate a part of the sets of every cache. If the number of
//! sets is a multiple of the number of parts, the line modulo the latter says to which part a set belongs, whatever the
//! cache, and so one pass over the lines serves all caches. The part holds its own sets only: of line l, one of p parts
//! sees the quotient l / p, which has the same place among the part's sets and the same tag as l among all. Otherwise,
//! and under random replacement, where all sets share one stream of random numbers, each cache is simulated by one
//! thread.

#[cfg(test)]
use super::SetStore;
use super::{CacheGeometry, CacheSim, Replacement};
use crate::simd::{Lanes, Simd, dispatch};
use cachemate_core::FieldError;

/// Number of lines among which a part looks for its own ones together, so that these stay in the host core's own cache.
const SEARCH_LINES: usize = 2048;

/// Caches of different sizes on one trace, initially empty.
#[derive(Debug)]
pub struct CacheSimGroup {
    parts: Vec<GroupPart>,
    cache_count: usize,
    /// Whether the work is done by other threads than the caller's.
    is_threaded: bool,
}

/// The work of one thread.
#[derive(Debug)]
struct GroupPart {
    /// Caches with their index; with a residue, those sets of each that belong to this part.
    caches: Vec<(usize, CacheSim)>,
    /// The lines modulo the second number that belong to this part; `None` for all lines.
    residue: Option<(u64, u64)>,
    /// Quotients of this part's lines by the number of parts.
    own_quotients: Vec<u64>,
}

impl CacheSimGroup {
    /// Builds empty caches, which at most this number of threads simulate.
    ///
    /// # Errors
    /// As [`CacheSim::new`], for any of the caches.
    pub fn new(
        geometries: &[CacheGeometry],
        replacement: Replacement,
        threads: usize,
    ) -> Result<Self, FieldError> {
        let threads = threads.max(1);
        let shares_random_numbers = matches!(replacement, Replacement::Random { .. });
        let divides_sets = |parts: usize| {
            let mut sets = geometries.iter().map(|geometry| geometry.sets as usize);
            sets.all(|sets| sets.is_multiple_of(parts))
        };
        let set_parts = match shares_random_numbers {
            true => 1,
            false => (1..=threads)
                .rev()
                .find(|&parts| divides_sets(parts))
                .unwrap_or(1),
        };

        let mut parts = Vec::new();
        if set_parts > 1 {
            for part in 0..set_parts {
                let residue = (part as u64, set_parts as u64);
                let mut caches = Vec::new();
                for (index, &whole) in geometries.iter().enumerate() {
                    let sets = whole.sets / set_parts as u32;
                    let simd = Simd::detect_best();
                    let geometry = CacheGeometry { sets, ..whole };
                    let cache = CacheSim::for_part(geometry, replacement, simd, residue)?;
                    caches.push((index, cache));
                }
                parts.push(GroupPart::new(caches, Some(residue)));
            }
        } else {
            for _ in 0..threads.min(geometries.len()) {
                parts.push(GroupPart::new(Vec::new(), None));
            }
            for (index, &geometry) in geometries.iter().enumerate() {
                let part_index = index % parts.len();
                let cache = CacheSim::new(geometry, replacement)?;
                parts[part_index].caches.push((index, cache));
            }
        }
        Ok(CacheSimGroup {
            parts,
            cache_count: geometries.len(),
            is_threaded: threads > 1,
        })
    }

    /// Simulates the next accesses, given as line addresses, while `meanwhile` runs on this thread.
    ///
    /// # Panics
    /// Propagates the panic of a thread.
    pub fn push_while<R>(&mut self, lines: &[u64], meanwhile: impl FnOnce() -> R) -> R {
        if !self.is_threaded {
            for part in &mut self.parts {
                part.push(lines);
            }
            return meanwhile();
        }
        std::thread::scope(|scope| {
            for part in &mut self.parts {
                scope.spawn(|| part.push(lines));
            }
            meanwhile()
        })
    }

    /// Of each part, the sets that take memory.
    #[cfg(test)]
    pub(super) fn set_counts(&self) -> Vec<usize> {
        let set_count = |(_, cache): &(usize, CacheSim)| match &cache.sets {
            SetStore::Lru(lru) => lru.set_count(),
            _ => 0,
        };
        let part_sets = |part: &GroupPart| part.caches.iter().map(set_count).sum();
        self.parts.iter().map(part_sets).collect()
    }

    /// One count per cache, in the order of the geometries.
    pub fn misses(&self) -> Vec<u64> {
        let mut misses = vec![0; self.cache_count];
        for (index, cache) in self.parts.iter().flat_map(|part| &part.caches) {
            misses[*index] += cache.misses();
        }
        misses
    }
}

impl GroupPart {
    fn new(caches: Vec<(usize, CacheSim)>, residue: Option<(u64, u64)>) -> Self {
        GroupPart {
            caches,
            residue,
            own_quotients: Vec::new(),
        }
    }

    fn push(&mut self, lines: &[u64]) {
        let Some((part, part_count)) = self.residue else {
            for (_, cache) in &mut self.caches {
                cache.push(lines);
            }
            return;
        };
        let simd = Simd::detect_best();
        for lines in lines.chunks(SEARCH_LINES) {
            list_quotients(simd, lines, part, part_count, &mut self.own_quotients);
            for (_, cache) in &mut self.caches {
                cache.push(&self.own_quotients);
            }
        }
    }
}

/// Replaces `quotients` by those of the lines that leave the remainder `part`.
fn list_quotients(simd: Simd, lines: &[u64], part: u64, part_count: u64, quotients: &mut Vec<u64>) {
    quotients.clear();
    if !part_count.is_power_of_two() {
        let own_lines = lines.iter().filter(|&line| line % part_count == part);
        quotients.extend(own_lines.map(|line| line / part_count));
        return;
    }
    quotients.resize(lines.len(), 0);
    let (shift, list) = (part_count.trailing_zeros(), &mut quotients[..]);
    let len = dispatch!(simd, list_by_bits(
        lines: &[u64], shift: u32, part: u64, list: &mut [u64]
    ) -> usize);
    quotients.truncate(len);
}

#[inline(always)]
unsafe fn list_by_bits<L: Lanes>(lines: &[u64], shift: u32, part: u64, list: &mut [u64]) -> usize {
    // SAFETY: the caller guarantees that the processor has `L`.
    unsafe { L::list_quotients(lines, shift, part, list) }
}
