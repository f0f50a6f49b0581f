//! Pinned randomness: the hash and the distributions from which inputs and implicit values are drawn.

use cachemate_core::SplitMix64;

/// Returns the first word of the generator that starts from `value`: a bijection that scatters neighboring indices.
#[inline]
pub(crate) fn mix(value: u64) -> u64 {
    SplitMix64::new(value).next_u64()
}

/// Maps a hash onto `0..limit`.
#[inline]
pub(crate) fn scale(hash: u64, limit: u64) -> u64 {
    ((u128::from(hash) * u128::from(limit)) >> 64) as u64
}

/// Returns element `index` of a scattered order of `0..count`, in which each index occurs once. `count` must not be a
/// multiple of the prime.
#[inline]
pub(crate) fn scatter(index: u64, count: u64) -> u64 {
    index * 1_000_000_007 % count
}

/// The workspace's random generator with a scattered seed, and with the distributions that kernels use.
#[derive(Clone)]
pub(crate) struct Rng(SplitMix64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(SplitMix64::new(mix(seed)))
    }

    #[inline]
    pub fn next_bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a uniform number in `0..limit`.
    #[inline]
    pub fn draw_below(&mut self, limit: u64) -> u64 {
        self.0.draw_below(limit)
    }

    /// Returns a number in `0..limit` that is denser toward 0, as the product of two uniform numbers.
    ///
    /// The smallest fraction x of the values gets x·(1 − ln x) of the draws: a tenth of the values gets a third, a
    /// hundredth 5.6 %.
    #[inline]
    pub fn draw_skewed(&mut self, limit: u64) -> u64 {
        let bits = self.next_bits();
        scale((bits >> 32) * (bits & 0xffff_ffff), limit)
    }

    /// Returns one of `count` functions to call. Profiles are steep, with a long flat tail: one call in 32 goes to any
    /// function.
    #[inline]
    pub fn draw_function(&mut self, count: u64) -> u32 {
        let skew_limit = self.draw_skewed(count);
        if skew_limit & 31 == 31 { self.draw_below(count) as u32 } else { self.draw_skewed(skew_limit + 1) as u32 }
    }
}
