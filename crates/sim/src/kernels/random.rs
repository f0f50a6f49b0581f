//! Reproducible randomness: the hash and the distributions from which inputs and implicit values are drawn.

use cachemate_core::SplitMix64;

/// A bijection that scatters neighboring indices: the first word of the generator that starts from
/// `value`.
#[inline]
pub(crate) fn hash_value(value: u64) -> u64 {
    SplitMix64::new(value).next_u64()
}

/// Maps a hash onto `0..limit`.
#[inline]
pub(crate) fn map_to_range(hash: u64, limit: u64) -> u64 {
    ((u128::from(hash) * u128::from(limit)) >> 64) as u64
}

/// Element `index` of a scattered order of `0..count`, in which each index occurs once. `count`
/// must not be a multiple of 1 000 000 007.
#[inline]
pub(crate) fn scatter(index: u64, count: u64) -> u64 {
    index * 1_000_000_007 % count
}

/// The workspace's random generator with a scattered seed, and with the distributions that kernels use.
#[derive(Clone)]
pub(crate) struct Rng(SplitMix64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(SplitMix64::new(hash_value(seed)))
    }

    #[inline]
    pub fn next_bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Uniform in `0..limit`.
    #[inline]
    pub fn draw_below(&mut self, limit: u64) -> u64 {
        self.0.draw_below(limit)
    }

    /// A number in `0..limit` that is denser toward 0, as the product of two uniform numbers.
    ///
    /// The smallest fraction x of the values gets x·(1 − ln x) of the draws: a tenth of the values
    /// gets a third, a hundredth 5.6 %.
    #[inline]
    pub fn draw_skewed(&mut self, limit: u64) -> u64 {
        let bits = self.next_bits();
        map_to_range((bits >> 32) * (bits & 0xffff_ffff), limit)
    }

    /// Profiles are steep: a few of `count` functions get most calls. With more than 31 functions,
    /// up to one call in 32 goes to any function, which gives a flat tail.
    #[inline]
    pub fn draw_function(&mut self, count: u64) -> u32 {
        let drawn_index = self.draw_skewed(count);
        if drawn_index & 31 == 31 {
            self.draw_below(count) as u32
        } else {
            self.draw_skewed(drawn_index + 1) as u32
        }
    }
}
