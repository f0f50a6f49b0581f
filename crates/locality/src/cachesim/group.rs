//! Several caches on one trace, simulated on all threads with the result of one.
//!
//! Sets are independent of each other, so a thread can simulate a part of the sets of every cache. If the number of sets
//! is a multiple of the number of parts, the line modulo the latter says to which part a set belongs, whatever the cache,
//! and so one pass over the lines serves all caches. Otherwise, and under random replacement, where all sets share one
//! stream of random numbers, each cache is simulated by one thread.

use super::{CacheGeometry, CacheSim, Replacement};
use cachemate_core::FieldError;

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
    /// Caches with their index, of which the sets of this part are in use.
    caches: Vec<(usize, CacheSim)>,
    /// The lines modulo the second number that belong to this part; `None` for all lines.
    residue: Option<(u64, u64)>,
    own_lines: Vec<u64>,
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
                let mut caches = Vec::new();
                for (index, &geometry) in geometries.iter().enumerate() {
                    caches.push((index, CacheSim::new(geometry, replacement)?));
                }
                let residue = Some((part as u64, set_parts as u64));
                parts.push(GroupPart::new(caches, residue));
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

    /// Returns the misses of each cache, in the order of the geometries.
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
            own_lines: Vec::new(),
        }
    }

    fn push(&mut self, lines: &[u64]) {
        let Some((part, part_count)) = self.residue else {
            for (_, cache) in &mut self.caches {
                cache.push(lines);
            }
            return;
        };
        select_residue(lines, part, part_count, &mut self.own_lines);
        for (_, cache) in &mut self.caches {
            cache.push(&self.own_lines);
        }
    }
}

/// Replaces `own_lines` by the lines that leave the remainder `part`.
fn select_residue(lines: &[u64], part: u64, part_count: u64, own_lines: &mut Vec<u64>) {
    own_lines.resize(lines.len(), 0);
    let mut len = 0;
    if part_count.is_power_of_two() {
        for &line in lines {
            own_lines[len] = line;
            len += usize::from(line & (part_count - 1) == part);
        }
    } else {
        for &line in lines {
            own_lines[len] = line;
            len += usize::from(line % part_count == part);
        }
    }
    own_lines.truncate(len);
}
