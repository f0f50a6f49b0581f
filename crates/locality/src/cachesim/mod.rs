//! Exact simulation of set-associative caches on a trace: one level, or private L1s before a shared LLC.
//!
//! No time, no coherence, no write-backs: which accesses hit, and, under LRU, at which stack position (for SDC, Animal
//! and Pain: CA). Set = line mod sets, for any number of sets; a sliced cache first picks the slice by a hash of the
//! whole line address. LRU up to 16 ways keeps a set in one cache line and a whole access is one vector comparison and
//! one masked shift, without a branch; more ways, or line addresses too wide for 32-bit tags, take a plain loop. A
//! policy fills free ways first, the lowest first.

mod chain;
mod geometry;
mod index;
mod lru;
mod random_plru;
#[cfg(test)]
mod tests;

pub use chain::CacheHierarchy;
pub use geometry::{CacheGeometry, GeometryError};

use crate::simd::Simd;
use cachemate_core::can_allocate;
use index::SetIndex;
use lru::Lru;
use random_plru::{RandomReplacement, TreePlru};

/// Which line leaves a full set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Replacement {
    /// The one not touched for longest.
    Lru,
    /// Any, drawn by splitmix64 from this seed.
    Random {
        /// The same seed gives the same victims.
        seed: u64,
    },
    /// The one that a binary tree of "less recently used half" bits points at. Ways: a power of two, at most 64.
    TreePlru,
}

/// Hits of an n-way LRU cache by stack position within the set, and misses: which include the hits of a cache with
/// fewer ways and as many sets.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PositionProfile {
    /// `hits[i]`: hits at position i + 1, counted from the most recently used.
    pub hits: Vec<u64>,
    /// First touches among them.
    pub misses: u64,
}

impl PositionProfile {
    /// Hits at any position, and misses.
    pub fn accesses(&self) -> u64 {
        self.hits.iter().sum::<u64>() + self.misses
    }

    /// Misses with only `ways` ways in each set (at most as many as were simulated).
    pub fn misses_with(&self, ways: usize) -> u64 {
        self.misses + self.hits.iter().skip(ways).sum::<u64>()
    }
}

/// One cache, empty at first.
#[derive(Debug)]
pub struct CacheSim {
    index: SetIndex,
    sets: Sets,
    accesses: u64,
    misses: u64,
}

#[derive(Debug)]
enum Sets {
    Lru(Lru),
    Random(RandomReplacement),
    TreePlru(TreePlru),
}

impl CacheSim {
    /// # Errors
    /// The shape's own, or tree-PLRU with a number of ways that is no power of two or above 64.
    pub fn new(shape: CacheGeometry, replacement: Replacement) -> Result<Self, GeometryError> {
        CacheSim::with_simd(shape, replacement, Simd::detect_best())
    }

    /// With chosen vector instructions; the result is the same.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_simd(shape: CacheGeometry, replacement: Replacement, simd: Simd) -> Result<Self, GeometryError> {
        shape.check()?;
        // Tags of eight bytes, or a line of the host's cache for up to sixteen.
        if !can_allocate(shape.lines().saturating_mul(8).saturating_add(u64::from(shape.sets) * 64)) {
            return Err(GeometryError {
                field: "lines",
                found: shape.lines(),
                expected: "as many as this host has memory for",
            });
        }
        let (sets, ways) = (shape.sets as usize * shape.slices as usize, shape.ways as usize);
        let sets = match replacement {
            Replacement::Lru => Sets::Lru(Lru::new(sets, ways, simd)),
            Replacement::Random { seed } => Sets::Random(RandomReplacement::new(sets, ways, seed)),
            Replacement::TreePlru => {
                if !shape.ways.is_power_of_two() || shape.ways > 64 {
                    let expected = "a power of two up to 64 for tree-PLRU";
                    return Err(GeometryError { field: "ways", found: shape.ways.into(), expected });
                }
                Sets::TreePlru(TreePlru::new(sets, ways))
            }
        };
        Ok(CacheSim { index: SetIndex::new(shape.sets, shape.slices), sets, accesses: 0, misses: 0 })
    }

    /// The next accesses, as line addresses. Returns how many missed.
    pub fn push(&mut self, lines: &[u64]) -> u64 {
        self.run(lines, &mut |_| ())
    }

    /// The same; the lines that missed are appended to `missed`, in order.
    pub fn push_collecting(&mut self, lines: &[u64], missed: &mut Vec<u64>) -> u64 {
        self.run(lines, &mut |line| missed.push(line))
    }

    fn run(&mut self, lines: &[u64], on_miss: &mut impl FnMut(u64)) -> u64 {
        let misses = match &mut self.sets {
            Sets::Lru(lru) => lru.run(&self.index, lines, on_miss),
            Sets::Random(random) => random.run(&self.index, lines, on_miss),
            Sets::TreePlru(tree) => tree.run(&self.index, lines, on_miss),
        };
        self.accesses += lines.len() as u64;
        self.misses += misses;
        misses
    }

    /// All that were pushed.
    pub fn accesses(&self) -> u64 {
        self.accesses
    }

    /// Those that found their line absent; first touches among them.
    pub fn misses(&self) -> u64 {
        self.misses
    }

    /// Misses over accesses; `None` before the first access.
    pub fn miss_ratio(&self) -> Option<f64> {
        (self.accesses > 0).then(|| self.misses as f64 / self.accesses as f64)
    }

    /// Hits by stack position; `None` unless the cache replaces by LRU.
    pub fn positions(&self) -> Option<PositionProfile> {
        match &self.sets {
            Sets::Lru(lru) => Some(PositionProfile { hits: lru.hits(), misses: self.misses }),
            _ => None,
        }
    }
}
