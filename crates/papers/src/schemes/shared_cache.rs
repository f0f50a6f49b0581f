//! The shared cache of a prediction, and the cost of its misses in run time.
//!
//! Problem: schemes estimate extra misses, but users and matchings need run time. Method: a first-order model of the
//! core is used. Alone, an instruction takes CPI = 1 / issue width + exposed latency of hits + misses per instruction x
//! cost of a miss. In an out-of-order core, a window hides the latency of hits up to its length. Misses in one window
//! overlap, up to the number of miss registers (Karkhanis and Smith 2004). In an in-order core, all latency is exposed.
//! A measured solo IPC replaces the model's. Queueing for memory is not modeled, so slowdowns by bandwidth are
//! underestimated (CA-2 finds them to be more than half).

use cachemate_core::{CoreModel, MachineSpec, Profile, ReplacementPolicy};
use cachemate_locality::curve::MissRateCurve;

/// The cache that the programs share, with the costs of hits and misses.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SharedCache {
    /// Size of the cache in bytes.
    pub size_bytes: u64,
    /// Number of ways.
    pub ways: u32,
    /// Size of a line in bytes.
    pub line_bytes: u32,
    /// Replacement policy of the cache.
    pub replacement: ReplacementPolicy,
    /// Additional latency of a miss over a hit, in cycles.
    pub miss_penalty_cycles: f64,
    /// Latency of a hit from the core's request to the data, in cycles.
    pub hit_latency_cycles: f64,
    /// Maximum number of instructions issued per cycle.
    pub issue_width: f64,
    /// Maximum number of instructions in flight; 1 means in order.
    pub window_instructions: f64,
    /// Maximum number of misses in flight.
    pub max_overlapping_misses: f64,
}

impl SharedCache {
    /// Builds an LRU cache behind an in-order, single-issue core, in which nothing overlaps and hits cost nothing
    /// extra.
    pub fn new(size_bytes: u64, ways: u32, line_bytes: u32, miss_penalty_cycles: f64) -> Self {
        SharedCache {
            size_bytes,
            ways,
            line_bytes,
            replacement: ReplacementPolicy::Lru,
            miss_penalty_cycles,
            hit_latency_cycles: 0.0,
            issue_width: 1.0,
            window_instructions: 1.0,
            max_overlapping_misses: 1.0,
        }
    }

    /// The contended cache of a machine, whose core window its contexts share; `None` without a data cache.
    pub fn from_machine(machine: &MachineSpec) -> Option<Self> {
        let cache = machine.last_level_cache()?;
        let contexts = f64::from(machine.contexts_per_core.max(1));
        let (issue_width, window, max_overlapping_misses) = match machine.pipeline {
            CoreModel::InOrder { issue_width, .. } => (issue_width, 1.0, 1.0),
            CoreModel::OutOfOrder {
                issue_width,
                window,
                mshrs,
                ..
            } => (
                issue_width,
                f64::from(window) / contexts,
                f64::from(mshrs) / contexts,
            ),
        };

        // A victim cache behind this one serves some of its misses with its own latency. A profile of this level does
        // not show how many, so the latency of memory is used as an upper bound.
        let miss_penalty_cycles = machine
            .memory
            .local_latency_cycles
            .saturating_sub(cache.latency_cycles);
        Some(SharedCache {
            size_bytes: cache.size_bytes,
            ways: cache.ways,
            line_bytes: cache.line_bytes,
            replacement: cache.replacement,
            miss_penalty_cycles: f64::from(miss_penalty_cycles),
            hit_latency_cycles: f64::from(cache.latency_cycles),
            issue_width: f64::from(issue_width),
            window_instructions: window.max(1.0),
            max_overlapping_misses: max_overlapping_misses.max(1.0),
        })
    }

    /// Capacity in lines, rounded down.
    pub fn lines(&self) -> u64 {
        self.size_bytes / u64::from(self.line_bytes.max(1))
    }

    /// The cost in cycles of one more miss, for a program with this miss rate; misses in one window overlap.
    pub fn miss_cycles(&self, misses_per_instr: f64) -> f64 {
        let overlapping_misses =
            (self.window_instructions * misses_per_instr).clamp(1.0, self.max_overlapping_misses);
        self.miss_penalty_cycles / overlapping_misses
    }

    /// The cycles per instruction if every access hits: issue, plus the latency of hits that the window does not hide.
    fn all_hit_cycles_per_instr(&self, refs_per_instr: f64) -> f64 {
        let hidden_cycles = (self.window_instructions - 1.0) / self.issue_width;
        1.0 / self.issue_width + refs_per_instr * (self.hit_latency_cycles - hidden_cycles).max(0.0)
    }
}

/// The speed of a program that has a shared cache to itself.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SoloRates {
    /// References of this cache per instruction.
    pub refs_per_instr: f64,
    /// Misses of this cache per instruction.
    pub misses_per_instr: f64,
    /// Cycles per instruction, measured or modeled.
    pub cycles_per_instr: f64,
    /// Cost of one more miss, in cycles.
    pub miss_cycles: f64,
}

impl SoloRates {
    /// Builds the rates from a profile; `None` if it has no references per instruction, or no misses at this cache.
    pub fn from_profile(profile: &Profile, cache: &SharedCache) -> Option<Self> {
        let refs_per_instr = refs_per_mega_instr(profile)? * 1e-6;
        let misses_per_instr = solo_misses_per_mega_instr(profile, cache)? * 1e-6;
        Some(Self::from_rates(
            profile,
            cache,
            refs_per_instr,
            misses_per_instr,
        ))
    }

    /// Builds the rates from given references and misses, such as those of a model's own miss ratio.
    pub fn from_rates(
        profile: &Profile,
        cache: &SharedCache,
        refs_per_instr: f64,
        misses_per_instr: f64,
    ) -> Self {
        let miss_cycles = cache.miss_cycles(misses_per_instr);
        let modeled_cycles =
            cache.all_hit_cycles_per_instr(refs_per_instr) + misses_per_instr * miss_cycles;
        let measured_cycles = profile
            .rates
            .solo_instr_per_cycle
            .map(|ipc| 1.0 / ipc.value)
            .filter(|cpi| cpi.is_finite() && *cpi > 0.0);

        SoloRates {
            refs_per_instr,
            misses_per_instr,
            cycles_per_instr: measured_cycles.unwrap_or(modeled_cycles),
            miss_cycles,
        }
    }

    /// The cycles per instruction if every access hit. For a measured CPI, the result is at least the CPI of issue
    /// alone.
    pub fn base_cycles_per_instr(&self, cache: &SharedCache) -> f64 {
        (self.cycles_per_instr - self.misses_per_instr * self.miss_cycles)
            .max(1.0 / cache.issue_width)
    }

    /// The slowdown by this many more misses: run time over solo run time, minus one.
    pub fn slowdown_from_misses(&self, extra_misses_per_instr: f64) -> f64 {
        extra_misses_per_instr * self.miss_cycles / self.cycles_per_instr
    }
}

/// The accesses to the shared cache per million instructions: the counted ones, or else the sum of the stack positions.
pub fn refs_per_mega_instr(profile: &Profile) -> Option<f64> {
    let counted_refs = profile.rates.llc_refs_per_mega_instr.map(|refs| refs.value);
    counted_refs.or_else(|| {
        profile
            .stack_positions()
            .map(|positions| positions.iter().sum())
    })
}

/// The hits at LRU positions 1..=ways and the misses, per million instructions; `None` if the profile is for another
/// number of ways.
pub fn stack_positions_on<'a>(profile: &'a Profile, cache: &SharedCache) -> Option<&'a [f64]> {
    profile
        .stack_positions()
        .filter(|positions| positions.len() == cache.ways as usize + 1)
}

/// The solo misses per million instructions on the cache, from the stack positions or else from the curve.
pub fn solo_misses_per_mega_instr(profile: &Profile, cache: &SharedCache) -> Option<f64> {
    misses_on_share_per_mega_instr(profile, cache, 1)
}

/// The solo misses per million instructions on one of `share_count` equal shares of the cache; `None` if the curve does
/// not reach that size.
pub fn misses_on_share_per_mega_instr(
    profile: &Profile,
    cache: &SharedCache,
    share_count: u32,
) -> Option<f64> {
    let shares = share_count.max(1);
    if let Some(positions) = stack_positions_on(profile, cache) {
        let ways = (cache.ways / shares).max(1) as usize;
        return Some(positions[ways.min(positions.len() - 1)..].iter().sum());
    }
    let curve = MissRateCurve::from_profile(profile.misses_per_kilo_instr()?).ok()?;
    Some(1000.0 * curve.rate_at(cache.size_bytes / u64::from(shares))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schemes::testing::with_positions;
    use cachemate_core::{CacheLevel, Estimate, Fact, FactSource, RateFacts};

    fn profile_fixture(refs: f64, curve: &[(u64, f64)]) -> Profile {
        let curve = curve
            .iter()
            .map(|&(size, rate)| (size, Estimate::exact(rate)))
            .collect();
        let rates = RateFacts {
            llc_refs_per_mega_instr: Some(Fact::oracle(refs)),
            ..RateFacts::default()
        };
        Profile::default()
            .with_rates(rates)
            .with_misses(CacheLevel::L2, curve, FactSource::Oracle)
    }

    /// Does the in-order model match the textbook sum, and is the slowdown that of extra misses at full latency?
    #[test]
    fn the_in_order_model_matches_the_textbook_sum() {
        let cache = SharedCache {
            hit_latency_cycles: 20.0,
            ..SharedCache::new(1 << 20, 16, 64, 100.0)
        };
        let solo =
            SoloRates::from_profile(&profile_fixture(10_000.0, &[(1 << 20, 2.0)]), &cache).unwrap();
        assert!((solo.cycles_per_instr - (1.0 + 0.01 * 20.0 + 0.002 * 100.0)).abs() < 1e-12);
        assert!((solo.slowdown_from_misses(0.001) - 0.1 / 1.4).abs() < 1e-12);
        assert!((solo.base_cycles_per_instr(&cache) - 1.2).abs() < 1e-12);
    }

    /// Does a window hide hits up to its length, and do misses overlap only if several fall into one window?
    #[test]
    fn out_of_order_misses_overlap_only_within_one_window() {
        let base = SharedCache::new(1 << 20, 16, 64, 200.0);
        let cache = SharedCache {
            hit_latency_cycles: 40.0,
            issue_width: 4.0,
            window_instructions: 101.0,
            max_overlapping_misses: 8.0,
            ..base
        };
        assert_eq!(cache.all_hit_cycles_per_instr(0.1), 0.25 + 0.1 * 15.0);
        assert_eq!(
            (cache.miss_cycles(0.001), cache.miss_cycles(0.5)),
            (200.0, 25.0)
        );
        assert!((cache.miss_cycles(0.04) - 200.0 / 4.04).abs() < 1e-9);
    }

    /// Is a measured solo IPC preferred, and a curve that does not reach the cache's size ignored?
    #[test]
    fn a_measured_ipc_is_preferred_and_short_curves_are_ignored() {
        let cache = SharedCache::new(1 << 20, 16, 64, 100.0);
        let mut known_profile = profile_fixture(10_000.0, &[(1 << 20, 2.0)]);
        known_profile.rates.solo_instr_per_cycle = Some(Fact::oracle(0.5));
        assert_eq!(
            SoloRates::from_profile(&known_profile, &cache)
                .unwrap()
                .cycles_per_instr,
            2.0
        );
        assert_eq!(
            SoloRates::from_profile(&profile_fixture(10_000.0, &[(1 << 19, 2.0)]), &cache),
            None
        );
    }

    /// On a share of the cache, do hits beyond the share miss, and is a curve read at the share's size, but not below
    /// its first point?
    #[test]
    fn hits_beyond_a_share_of_the_cache_are_misses() {
        let cache = SharedCache::new(1 << 20, 4, 64, 100.0);
        let positions = with_positions(&[8.0, 4.0, 2.0, 1.0, 0.5]);
        let misses_on_share =
            |parts: u32| misses_on_share_per_mega_instr(&positions, &cache, parts);
        assert_eq!(
            [1, 2, 4, 9].map(misses_on_share),
            [Some(0.5), Some(3.5), Some(7.5), Some(7.5)]
        );
        let curve = profile_fixture(10_000.0, &[(1 << 19, 3.0), (1 << 20, 2.0)]);
        let misses_on_share = |parts: u32| misses_on_share_per_mega_instr(&curve, &cache, parts);
        assert_eq!(
            [1, 2, 4].map(misses_on_share),
            [Some(2000.0), Some(3000.0), None]
        );
    }
}
