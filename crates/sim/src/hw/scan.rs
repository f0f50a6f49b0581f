//! Searches the words of one set for a tag, or for the smallest age.
//!
//! Every x86-64 has SSE2, so tags are compared four at a time without a check. The smallest age is searched on every
//! insertion; that code is compiled a second time for processors with AVX2. Both find the same way.

/// A bit for each of four consecutive words that equals `tag`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn equal_4(words: &[u32; 4], tag: u32) -> u32 {
    use core::arch::x86_64::{
        _mm_castsi128_ps, _mm_cmpeq_epi32, _mm_loadu_si128, _mm_movemask_ps, _mm_set1_epi32,
    };
    // SAFETY: every x86-64 has SSE2, and the unaligned load reads the sixteen bytes of `words`.
    unsafe {
        let words = _mm_loadu_si128(words.as_ptr().cast());
        _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(
            words,
            _mm_set1_epi32(tag as i32),
        ))) as u32
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub(crate) fn equal_4(words: &[u32; 4], tag: u32) -> u32 {
    words
        .iter()
        .zip(0..)
        .fold(0, |bits, (&word, way)| bits | u32::from(word == tag) << way)
}

/// A bit for each word that equals `tag`. There is no loop if the number of words is known.
#[inline(always)]
pub(crate) fn equal_mask(words: &[u32], tag: u32) -> u32 {
    let (quads, remainder) = words.as_chunks::<4>();
    let mask = quads.iter().zip(0..).fold(0, |bits, (four, nth)| {
        bits | equal_4(four, tag) << (4 * nth)
    });
    remainder
        .iter()
        .zip(4 * quads.len()..)
        .fold(mask, |bits, (&word, way)| {
            bits | u32::from(word == tag) << way
        })
}

/// The first word that equals `tag`, without a branch per way.
#[inline(always)]
pub(crate) fn find_tag(words: &[u32], tag: u32) -> Option<usize> {
    let (quads, remainder) = words.as_chunks::<4>();
    let equal_ways = match quads {
        [a, b] => Some(equal_4(a, tag) | equal_4(b, tag) << 4),
        [a, b, c] => Some(equal_4(a, tag) | equal_4(b, tag) << 4 | equal_4(c, tag) << 8),
        [a, b, c, d] => Some(
            equal_4(a, tag) | equal_4(b, tag) << 4 | equal_4(c, tag) << 8 | equal_4(d, tag) << 12,
        ),
        _ => None,
    };
    if let Some(equal_ways) = equal_ways {
        let remaining_words = remainder.iter().zip(4 * quads.len()..);
        let equal_ways = remaining_words.fold(equal_ways, |ways, (&word, way)| {
            ways | u32::from(word == tag) << way
        });
        return (equal_ways != 0).then(|| equal_ways.trailing_zeros() as usize);
    }

    for (nth, four) in quads.iter().enumerate() {
        let equal_ways = equal_4(four, tag);
        if equal_ways != 0 {
            return Some(4 * nth + equal_ways.trailing_zeros() as usize);
        }
    }

    remainder
        .iter()
        .position(|&word| word == tag)
        .map(|way| 4 * quads.len() + way)
}

/// The first of the smallest words. A minimum of unsigned words takes one instruction from SSE4.1
/// on, and seven before.
#[inline(always)]
fn index_of_min(ages: &[u32]) -> usize {
    let (quads, remainder) = ages.as_chunks::<4>();
    let mut lanes = [u32::MAX; 4];
    for four in quads {
        lanes
            .iter_mut()
            .zip(four)
            .for_each(|(lane, &age)| *lane = age.min(*lane));
    }
    let minimum = lanes
        .iter()
        .chain(remainder)
        .fold(u32::MAX, |least, &age| age.min(least));
    find_tag(ages, minimum).unwrap_or(0)
}

/// Does the same as [`index_of_min`], with AVX2 instructions, and without a loop for the usual numbers of ways.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1")]
fn index_of_min_avx2(ages: &[u32]) -> usize {
    match (ages.first_chunk(), ages.last_chunk()) {
        (Some(first), Some(last)) if ages.len() <= 16 => {
            index_of_min_in_two(first, last, ages.len() - 8)
        }
        _ => index_of_min(ages),
    }
}

/// The first of the smallest words of two vectors, the second of which begins at `second_offset`.
/// They may overlap.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1")]
#[inline]
fn index_of_min_in_two(
    first_ages: &[u32; 8],
    second_ages: &[u32; 8],
    second_offset: usize,
) -> usize {
    use core::arch::x86_64::*;
    // SAFETY: the unaligned loads read the 32 bytes of each array.
    let (first, second) = unsafe {
        (
            _mm256_loadu_si256(first_ages.as_ptr().cast()),
            _mm256_loadu_si256(second_ages.as_ptr().cast()),
        )
    };
    let minima = _mm256_min_epu32(first, second);
    let halves = _mm_min_epu32(
        _mm256_castsi256_si128(minima),
        _mm256_extracti128_si256::<1>(minima),
    );
    let pairs = _mm_min_epu32(halves, _mm_shuffle_epi32::<0b01_00_11_10>(halves));
    let minimum = _mm_min_epu32(pairs, _mm_shuffle_epi32::<0b10_11_00_01>(pairs));
    let minimum = _mm256_broadcastd_epi32(minimum);
    let equality_mask =
        |eight| _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(eight, minimum))) as u32;
    (equality_mask(first) | equality_mask(second) << second_offset).trailing_zeros() as usize
}

/// The method of searching for the smallest age of a set.
#[derive(Clone, Copy)]
pub(crate) struct MinAgeScan {
    #[cfg(target_arch = "x86_64")]
    uses_avx2: bool,
}

/// Smallest number of ways for which the call is worth its cost.
#[cfg(target_arch = "x86_64")]
const MIN_WAYS_FOR_AVX2: usize = 8;

impl MinAgeScan {
    /// Chooses the faster method for sets of this many ways.
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables))]
    pub fn for_ways(ways: usize) -> Self {
        MinAgeScan {
            #[cfg(target_arch = "x86_64")]
            uses_avx2: ways >= MIN_WAYS_FOR_AVX2
                && is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("bmi1"),
        }
    }

    /// The first way of the smallest age.
    #[inline(always)]
    pub fn oldest_way(self, ages: &[u32]) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.uses_avx2 {
            // SAFETY: the processor was checked for both features.
            return unsafe { index_of_min_avx2(ages) };
        }
        index_of_min(ages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Do all methods find the same way as a plain loop, whatever the number of ways and the positions of equal ages?
    #[test]
    fn every_method_finds_the_same_way_as_a_plain_loop() {
        let mut dice = crate::hw::tests::TestRng::new(3);
        for ways in 1..=48 {
            for range in [2, 5, 1 << 32] {
                let ages: Vec<u32> = (0..ways).map(|_| dice.draw_below(range) as u32).collect();
                let expected_way = (0..ages.len()).min_by_key(|&way| ages[way]).unwrap();
                assert_eq!(index_of_min(&ages), expected_way, "{ages:?}");
                assert_eq!(
                    MinAgeScan::for_ways(ages.len()).oldest_way(&ages),
                    expected_way,
                    "{ages:?}"
                );
                let first = ages.iter().position(|&age| age == ages[expected_way]);
                assert_eq!(find_tag(&ages, ages[expected_way]), first);
                assert_eq!(find_tag(&ages, ages[expected_way].wrapping_sub(1)), None);
            }
        }
    }
}
