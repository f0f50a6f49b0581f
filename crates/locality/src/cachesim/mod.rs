//! Exact trace-driven simulation of set-associative caches.
//!
//! Time, coherence and write-backs are not modeled. The simulator reports which accesses hit and, under LRU, at which
//! stack position, as the schemes SDC, Animal and Pain need (CA). The set is the line address modulo the number of
//! sets, which need not be a power of two; a sliced cache first selects the slice by a hash of the whole line address.
//!
//! Up to 16 ways, an LRU set fits in one cache line of the host, and an access is one vector comparison and one masked
//! shift, without a branch. Sets with more ways, or with line addresses too wide for 32-bit tags, use a plain loop. All
//! policies fill free ways first, in ascending order.

mod geometry;
mod group;
mod index;
mod lru;
mod random_plru;
#[cfg(test)]
mod tests;

pub use geometry::CacheGeometry;
use geometry::geometry_error;
pub use group::CacheSimGroup;

use crate::simd::Simd;
use cachemate_core::{FieldError, can_allocate};
use index::SetIndex;
use lru::Lru;
use random_plru::{RandomReplacement, TreePlru};

/// The replacement policy, which chooses the line that leaves a full set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Replacement {
    /// Evicts the line that was not touched for longest.
    Lru,
    /// Evicts a uniformly random line.
    Random {
        /// Seed of the splitmix64 generator; the same seed gives the same victims.
        seed: u64,
    },
    /// Evicts the line to which a binary tree of "less recently used half" bits points. The number of ways must be a
    /// power of two, at most 64.
    TreePlru,
}

/// Misses of an n-way LRU cache, and its hits by stack position within the set.
///
/// Together they determine the misses of every cache with fewer ways and the same number of sets.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PositionProfile {
    /// `hits[i]` is the number of hits at position i + 1, counted from the most recently used.
    pub hits: Vec<u64>,
    /// Misses, including first touches.
    pub misses: u64,
}

impl PositionProfile {
    /// All hits plus the misses.
    pub fn accesses(&self) -> u64 {
        self.hits.iter().sum::<u64>() + self.misses
    }
}

/// A simulated cache, initially empty.
#[derive(Debug)]
pub struct CacheSim {
    index: SetIndex,
    sets: SetStore,
    accesses: u64,
    misses: u64,
}

#[derive(Debug)]
enum SetStore {
    Lru(Lru),
    Random(RandomReplacement),
    TreePlru(TreePlru),
}

impl CacheSim {
    /// Builds an empty cache.
    ///
    /// # Errors
    /// The geometry is invalid, or tree-PLRU is requested with a number of ways that is not a power of two or is above
    /// 64.
    pub fn new(geometry: CacheGeometry, replacement: Replacement) -> Result<Self, FieldError> {
        CacheSim::with_simd(geometry, replacement, Simd::detect_best())
    }

    /// Like [`Self::new`], but with the given vector instructions, which do not affect the result.
    pub fn with_simd(
        geometry: CacheGeometry,
        replacement: Replacement,
        simd: Simd,
    ) -> Result<Self, FieldError> {
        CacheSim::for_part(geometry, replacement, simd, (0, 1))
    }

    /// Builds the sets of one of several parts, of which `geometry` has those of one: see `group.rs`.
    fn for_part(
        geometry: CacheGeometry,
        replacement: Replacement,
        simd: Simd,
        part: (u64, u64),
    ) -> Result<Self, FieldError> {
        geometry.check()?;
        // Each set takes 64 bytes in the narrow form; the wide form takes 8 bytes per tag.
        if !can_allocate(
            geometry
                .lines()
                .saturating_mul(8)
                .saturating_add(u64::from(geometry.sets) * 64),
        ) {
            return Err(geometry_error(
                "lines",
                geometry.lines(),
                "as many as this host has memory for",
            ));
        }
        let (sets, ways) = (
            geometry.sets as usize * geometry.slices as usize,
            geometry.ways as usize,
        );
        let sets = match replacement {
            Replacement::Lru => SetStore::Lru(Lru::new(sets, ways, simd)),
            Replacement::Random { seed } => {
                SetStore::Random(RandomReplacement::new(sets, ways, seed))
            }
            Replacement::TreePlru => {
                if !geometry.ways.is_power_of_two() || geometry.ways > 64 {
                    let expected = "a power of two up to 64 for tree-PLRU";
                    return Err(geometry_error("ways", geometry.ways.into(), expected));
                }
                SetStore::TreePlru(TreePlru::new(sets, ways))
            }
        };
        Ok(CacheSim {
            index: SetIndex::new(geometry.sets, geometry.slices, part),
            sets,
            accesses: 0,
            misses: 0,
        })
    }

    /// Simulates the next accesses, given as line addresses. Returns the number of misses.
    pub fn push(&mut self, lines: &[u64]) -> u64 {
        self.simulate(lines, &mut |_| ())
    }

    /// Like [`Self::push`]; also appends the lines that missed to `missed_lines`, in order of access.
    pub fn push_collecting(&mut self, lines: &[u64], missed_lines: &mut Vec<u64>) -> u64 {
        self.simulate(lines, &mut |line| missed_lines.push(line))
    }

    fn simulate(&mut self, lines: &[u64], on_miss: &mut impl FnMut(u64)) -> u64 {
        let misses = match &mut self.sets {
            SetStore::Lru(lru) => lru.simulate(&self.index, lines, on_miss),
            SetStore::Random(random) => random.run(&self.index, lines, on_miss),
            SetStore::TreePlru(tree) => tree.run(&self.index, lines, on_miss),
        };
        self.accesses += lines.len() as u64;
        self.misses += misses;
        misses
    }

    /// Hits and misses since the cache was built.
    pub fn accesses(&self) -> u64 {
        self.accesses
    }

    /// First touches included.
    pub fn misses(&self) -> u64 {
        self.misses
    }

    /// Misses over accesses, 0 to 1; `None` before the first access.
    pub fn miss_ratio(&self) -> Option<f64> {
        (self.accesses > 0).then(|| self.misses as f64 / self.accesses as f64)
    }

    /// Hits by stack position; `None` unless the cache replaces by LRU, because other policies keep no order of use.
    pub fn positions(&self) -> Option<PositionProfile> {
        match &self.sets {
            SetStore::Lru(lru) => Some(PositionProfile {
                hits: lru.hits(),
                misses: self.misses,
            }),
            _ => None,
        }
    }
}
