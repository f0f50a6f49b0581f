//! Private L1 caches before one shared last-level cache.

use super::{CacheGeometry, CacheSim, GeometryError, Replacement};

/// Private L1 caches that pass their misses, in order, to one shared LLC.
///
/// The hierarchy is neither inclusive nor exclusive: an eviction from one level changes nothing in the other. A store
/// in one L1 does not invalidate lines in another.
#[derive(Debug)]
pub struct CacheHierarchy {
    l1s: Vec<CacheSim>,
    llc: CacheSim,
    missed_lines: Vec<u64>,
}

impl CacheHierarchy {
    /// Builds `cores` equal L1s in front of an empty LLC. If the L1s replace at random, the L1 of core i uses `seed` +
    /// i.
    ///
    /// # Errors
    /// Returns an error if the geometry of the L1 or of the LLC is invalid.
    pub fn new(
        cores: usize,
        l1: (CacheGeometry, Replacement),
        llc: (CacheGeometry, Replacement),
    ) -> Result<Self, GeometryError> {
        let replacement_of_core = |core: usize| match l1.1 {
            Replacement::Random { seed } => Replacement::Random { seed: seed.wrapping_add(core as u64) },
            replacement => replacement,
        };
        let l1s = (0..cores).map(|core| CacheSim::new(l1.0, replacement_of_core(core))).collect::<Result<_, _>>()?;
        Ok(CacheHierarchy { l1s, llc: CacheSim::new(llc.0, llc.1)?, missed_lines: Vec::new() })
    }

    /// Simulates the next accesses of one core, as line addresses. Returns the number that missed in both levels.
    ///
    /// # Panics
    /// `core` is not below the number of cores.
    pub fn push(&mut self, core: usize, lines: &[u64]) -> u64 {
        let mut misses = 0;
        for chunk in lines.chunks(1 << 14) {
            self.missed_lines.clear();
            self.l1s[core].push_collecting(chunk, &mut self.missed_lines);
            misses += self.llc.push(&self.missed_lines);
        }
        misses
    }

    /// Returns the private cache of one core.
    ///
    /// # Panics
    /// `core` is not below the number of cores.
    pub fn l1(&self, core: usize) -> &CacheSim {
        &self.l1s[core]
    }

    /// Returns the shared cache; its accesses are the misses of the L1s.
    pub fn llc(&self) -> &CacheSim {
        &self.llc
    }
}
