//! Pinned randomness: the generator and the hash from which inputs and implicit values come.

/// SplitMix64's finaliser: a bijection that scatters neighbouring indices (Steele, Lea, Flood, OOPSLA 2014).
#[inline]
pub(crate) fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Maps a hash onto `0..limit`.
#[inline]
pub(crate) fn scale(hash: u64, limit: u64) -> u64 {
    ((u128::from(hash) * u128::from(limit)) >> 64) as u64
}

/// A scattered order of `0..count`: each index once (`count` is no multiple of the prime).
#[inline]
pub(crate) fn scatter(index: u64, count: u64) -> u64 {
    index * 1_000_000_007 % count
}

/// SplitMix64 as a stream.
#[derive(Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(mix(seed))
    }

    #[inline]
    pub fn bits(&mut self) -> u64 {
        let value = mix(self.0);
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        value
    }

    /// Uniform in `0..limit`.
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        scale(self.bits(), limit)
    }

    /// In `0..limit`, denser towards 0, as the product of two uniform numbers: the smallest fraction x of the values
    /// gets x·(1 − ln x) of the draws (a tenth of them a third, a hundredth 5.6 %).
    #[inline]
    pub fn skewed(&mut self, limit: u64) -> u64 {
        let bits = self.bits();
        scale((bits >> 32) * (bits & 0xffff_ffff), limit)
    }

    /// A function to call, of `count`: profiles are steep, with a long flat tail (one call in 32 goes anywhere).
    #[inline]
    pub fn function(&mut self, count: u64) -> u32 {
        let first = self.skewed(count);
        if first & 31 == 31 { self.below(count) as u32 } else { self.skewed(first + 1) as u32 }
    }
}
