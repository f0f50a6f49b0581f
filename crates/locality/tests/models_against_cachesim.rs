//! Do the statistical models, from one access in ten, agree with exact simulation of the caches that they model?

use cachemate_core::SplitMix64;
use cachemate_locality::cachesim::{CacheGeometry, CacheSim, Replacement};
use cachemate_locality::reuse::{ReuseSampler, ReuseTimes};
use cachemate_locality::{statcache, statstack};
use proptest::prelude::*;

const ACCESSES: usize = 120_000;
/// Sampling interval; it gives about 12 000 samples per run, so four standard errors of a fraction are 1.8 points.
const ONE_IN: u32 = 10;

/// A program with constant behavior: hot lines, a larger set touched evenly, and a stream, in given proportions.
#[derive(Clone, Copy, Debug)]
struct Mixture {
    hot_lines: u64,
    warm_lines: u64,
    hot_share: f64,
    stream_share: f64,
    seed: u64,
}

impl Mixture {
    fn lines(&self) -> Vec<u64> {
        let mut random = SplitMix64::new(self.seed);
        let next = |index: usize| {
            let draw = random.draw_unit();
            if draw < self.hot_share {
                random.draw_below(self.hot_lines)
            } else if draw < self.hot_share + self.stream_share {
                (1 << 40) + index as u64
            } else {
                (1 << 30) + random.draw_below(self.warm_lines)
            }
        };
        (0..ACCESSES).map(next).collect()
    }
}

fn any_mixture() -> impl Strategy<Value = Mixture> {
    (
        4u64..200,
        200u64..4000,
        0.0f64..0.7,
        0.0f64..0.3,
        any::<u64>(),
    )
        .prop_map(
            |(hot_lines, warm_lines, hot_share, stream_share, seed)| Mixture {
                hot_lines,
                warm_lines,
                hot_share,
                stream_share,
                seed,
            },
        )
}

fn sampled_times(lines: &[u64], seed: u64) -> ReuseTimes {
    let mut sampler = ReuseSampler::new(ONE_IN, seed);
    lines.iter().for_each(|&line| sampler.touch(line));
    sampler.finish()
}

fn simulated_miss_ratio(lines: &[u64], size_lines: u32, replacement: Replacement) -> f64 {
    let mut cache =
        CacheSim::new(CacheGeometry::fully_associative(size_lines), replacement).unwrap();
    cache.push(lines);
    cache.miss_ratio().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Is StatCache within 4 points of random replacement?
    #[test]
    fn statcache_agrees_with_random_replacement(mixture in any_mixture(), size_lines in 16u32..600) {
        let lines = mixture.lines();
        let model = statcache::miss_ratio(&sampled_times(&lines, mixture.seed), u64::from(size_lines)).unwrap();
        let exact = simulated_miss_ratio(&lines, size_lines, Replacement::Random { seed: 7 });
        prop_assert!((model - exact).abs() < 0.04, "{mixture:?}, {size_lines} lines: {model:.3}, exact {exact:.3}");
    }

    /// Is StatStack within 4 points of LRU?
    #[test]
    fn statstack_agrees_with_lru(mixture in any_mixture(), size_lines in 16u32..600) {
        let lines = mixture.lines();
        let model = statstack::miss_ratio(&sampled_times(&lines, mixture.seed), u64::from(size_lines)).unwrap();
        let exact = simulated_miss_ratio(&lines, size_lines, Replacement::Lru);
        prop_assert!((model - exact).abs() < 0.04, "{mixture:?}, {size_lines} lines: {model:.3}, exact {exact:.3}");
    }
}
