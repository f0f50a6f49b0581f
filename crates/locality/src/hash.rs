//! Hash functions for tables and samples: bijections of 64-bit words whose *upper* bits are well mixed.

use cachemate_core::SplitMix64;

/// 2^64 divided by the golden ratio, rounded to an odd number.
const MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;

/// Mixes a key by one fold and one multiplication; only the upper bits are well mixed. This suffices for hash tables,
/// where a bad key costs one probe.
#[inline(always)]
pub fn mix(key: u64) -> u64 {
    (key ^ key >> 32).wrapping_mul(MULTIPLIER)
}

/// Like [`mix`], but a bijection of the keys below 2^`bits` (`bits` is at most 63).
#[inline(always)]
pub fn mix_bits(key: u64, bits: u32) -> u64 {
    (key ^ key >> (bits / 2)).wrapping_mul(MULTIPLIER) & ((1 << bits) - 1)
}

/// Inverse of [`mix_bits`] at the same `bits`: a table can store a part of the hash and still list its keys.
pub fn unmix_bits(hash: u64, bits: u32) -> u64 {
    // Newton's iteration doubles the number of correct low bits of the inverse: 5, 10, 20, 40, 80.
    let mut inverse = MULTIPLIER.wrapping_mul(3) ^ 2;
    for _ in 0..4 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(MULTIPLIER.wrapping_mul(inverse)));
    }
    let folded = hash.wrapping_mul(inverse) & ((1 << bits) - 1);
    // The fold is by at least a third of the word, so two rounds invert it.
    let shift = bits / 2;
    folded ^ folded >> shift ^ folded >> (2 * shift)
}

/// Mixes a key by two rounds (the finalizer of SplitMix64), for choosing samples, where a bad key would reduce
/// accuracy.
#[inline(always)]
pub fn scatter(key: u64) -> u64 {
    SplitMix64::scatter(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Is the narrow mix a bijection, and is it inverted correctly?
    #[test]
    fn narrow_mix_is_a_bijection() {
        for bits in [5, 12, 15] {
            let images: BTreeSet<u64> = (0..1u64 << bits).map(|key| mix_bits(key, bits)).collect();
            assert_eq!(images.len(), 1 << bits);
            assert!(images.last().is_some_and(|&last| last < 1 << bits));
            assert!((0..1u64 << bits).all(|key| unmix_bits(mix_bits(key, bits), bits) == key));
        }
    }

    /// Is the mix inverted correctly at the width that is used?
    #[test]
    fn the_wide_mix_is_inverted_correctly() {
        let mut random = SplitMix64::new(1);
        for _ in 0..1000 {
            let key = random.draw_below(1 << 41);
            assert_eq!(unmix_bits(mix_bits(key, 41), 41), key);
        }
    }
}
