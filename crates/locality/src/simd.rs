//! Vector operations whose instruction set is chosen at run time.
//!
//! Compilers do not vectorize "add one to the first n of 32 counters" or "move to the front of 16 ways" by themselves.
//! Each of these few operations is therefore written three times behind one trait: for AVX-512, for AVX2, and portably.
//! A loop that uses them is an `#[inline(always)]` function generic over [`Lanes`], called through [`dispatch!`], which
//! compiles it once per instruction set. All three give the same bits; tests run each one that the processor supports.

/// An instruction set that this processor supports. Only detection creates values of this type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Simd(SimdLevel);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SimdLevel {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Simd {
    /// The widest instruction set of this processor.
    pub fn detect_best() -> Simd {
        Simd::available()[0]
    }

    /// All instruction sets of this processor, from the widest to the portable one.
    pub fn available() -> Vec<Simd> {
        let mut instruction_sets = Vec::with_capacity(3);
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("lzcnt")
                && is_x86_feature_detected!("popcnt");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx2 && avx512 {
                instruction_sets.push(Simd(SimdLevel::Avx512));
            }
            if avx2 {
                instruction_sets.push(Simd(SimdLevel::Avx2));
            }
        }
        instruction_sets.push(Simd(SimdLevel::Portable));
        instruction_sets
    }

    /// For [`dispatch!`], the only code outside of this module that looks into the value.
    pub(crate) fn level(self) -> SimdLevel {
        self.0
    }

    /// `avx512`, `avx2` or `portable`.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => "avx2",
            SimdLevel::Portable => "portable",
        }
    }
}

/// One cache line of 32 counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C, align(64))]
pub(crate) struct U16x32(pub [u16; 32]);
/// One cache line of 16 counters, ways or tags.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C, align(64))]
pub(crate) struct U32x16(pub [u32; 16]);

/// Vector operations, implemented once for each instruction set.
///
/// # Safety
/// A function may be called only on a processor that has the instruction set of the implementing type, and with a
/// `lane` below the bound that it states.
pub(crate) trait Lanes {
    /// Adds one to every lane below `lane` (< 32). Returns lane `lane`, which stays as it is.
    unsafe fn bump_u16(counters: &mut U16x32, lane: usize) -> u16;
    /// Adds one to every lane below `lane` (< 16). Returns lane `lane`, which stays as it is.
    unsafe fn bump_u32(counters: &mut U32x16, lane: usize) -> u32;
    /// Bit i of the mask is set if lane i of the first eight equals `tag`.
    unsafe fn equal_8(lanes: &U32x16, tag: u32) -> u32;
    /// Searches for `tag` in the lanes selected by the mask `ways` (a run of low bits).
    ///
    /// If the tag is found, moves it to lane 0 and the lanes before it up by one. Otherwise, inserts it at lane 0 and
    /// moves all lanes up. Adds one to the matching lane of `hits`; returns whether a lane matched.
    unsafe fn move_to_front(
        lanes: &mut U32x16,
        tag: &u32,
        ways: u32,
        hits: &mut Self::Hits,
    ) -> bool;
    /// Number of hits by lane, in registers if the instruction set has any.
    type Hits: Copy;
    unsafe fn empty_hits() -> Self::Hits;
    unsafe fn count_by_lane(hits: Self::Hits) -> [u32; 16];
    /// Writes to `retained`, from `retained_count` on, the lines whose `scatter(line ^ salt) >> 40` is below
    /// `threshold` (1 to 2^24), and returns the new length. `retained` must have room for all lines.
    unsafe fn filter(
        lines: &[u64],
        salt: u64,
        threshold: u64,
        retained: &mut [u64],
        retained_count: usize,
    ) -> usize;
    /// Writes `line >> shift` to the begin of `quotients` for each line whose lowest `shift` bits are `residue`, and
    /// returns their number. `quotients` must have room for all lines.
    unsafe fn list_quotients(
        lines: &[u64],
        shift: u32,
        residue: u64,
        quotients: &mut [u64],
    ) -> usize;
}

/// Calls `$body::<L>($args)`, where `L` is the implementation of `Lanes` that `$simd` selects.
macro_rules! dispatch {
    ($simd:expr, $body:ident ( $($arg:ident : $type:ty),* ) $(-> $out:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi1,bmi2,lzcnt,popcnt")]
        unsafe fn avx512($($arg: $type),*) $(-> $out)? {
            // SAFETY: this function runs only if the processor has its instruction set (below).
            unsafe { $body::<$crate::simd::Avx512>($($arg),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
        unsafe fn avx2($($arg: $type),*) $(-> $out)? {
            // SAFETY: this function runs only if the processor has its instruction set (below).
            unsafe { $body::<$crate::simd::Avx2>($($arg),*) }
        }
        match $simd.level() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Simd` of this level exists only if the processor has the instruction set.
            $crate::simd::SimdLevel::Avx512 => unsafe { avx512($($arg),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Simd` of this level exists only if the processor has the instruction set.
            $crate::simd::SimdLevel::Avx2 => unsafe { avx2($($arg),*) },
            // SAFETY: portable code needs only the instructions of the compilation target.
            $crate::simd::SimdLevel::Portable => unsafe { $body::<$crate::simd::Portable>($($arg),*) },
        }
    }};
}
pub(crate) use dispatch;

/// Prefetches the cache line at `address`; any address is allowed.
#[inline(always)]
pub(crate) fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address affects only the run time.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

pub(crate) struct Portable;

/// 32 ones followed by zeros: a window into this array adds one to the lanes below n.
static ONES_U16: [u16; 64] = {
    let mut one_masks = [0; 64];
    let mut index = 0;
    while index < 32 {
        one_masks[index] = 1;
        index += 1;
    }
    one_masks
};
static ONES_U32: [u32; 32] = {
    let mut one_masks = [0; 32];
    let mut index = 0;
    while index < 16 {
        one_masks[index] = 1;
        index += 1;
    }
    one_masks
};

/// Seventeen zeros followed by words of all ones: the window that begins at 16 - n keeps the lanes above n, and clears
/// lanes 0 to n. With n = 16 it clears all.
static KEEP_ABOVE: [u32; 32] = {
    let mut above_masks = [0; 32];
    let mut index = 17;
    while index < 32 {
        above_masks[index] = !0;
        index += 1;
    }
    above_masks
};

/// Moves `tag` to lane 0. Returns a mask with the bit of the lane that contained the tag, or 0 if none did. There is no
/// early exit, because the lane cannot be predicted.
#[cfg(any(test, not(target_arch = "x86_64")))]
fn move_tag_to_front(lanes: &mut U32x16, tag: u32, ways: u32) -> u32 {
    let previous_lanes = lanes.0;
    let matching_bit = |(index, lane): (usize, &u32)| u32::from(*lane == tag) << index;
    let matches = previous_lanes
        .iter()
        .enumerate()
        .map(matching_bit)
        .sum::<u32>()
        & ways;
    let match_lane = (matches | 1 << 16).trailing_zeros() as usize;
    lanes.0 = std::array::from_fn(|index| {
        let predecessor = if index == 0 {
            tag
        } else {
            previous_lanes[index - 1]
        };
        (previous_lanes[index] & KEEP_ABOVE[16 - match_lane + index])
            | (predecessor & !KEEP_ABOVE[16 - match_lane + index])
    });
    matches
}

impl Lanes for Portable {
    #[inline(always)]
    unsafe fn bump_u16(counters: &mut U16x32, lane: usize) -> u16 {
        let count = counters.0[lane & 31];
        let one_values: [u16; 32] = std::array::from_fn(|index| ONES_U16[32 - (lane & 31) + index]);
        counters.0 = std::array::from_fn(|index| counters.0[index].wrapping_add(one_values[index]));
        count
    }
    #[inline(always)]
    unsafe fn bump_u32(counters: &mut U32x16, lane: usize) -> u32 {
        let count = counters.0[lane & 15];
        let one_values: [u32; 16] = std::array::from_fn(|index| ONES_U32[16 - (lane & 15) + index]);
        counters.0 = std::array::from_fn(|index| counters.0[index].wrapping_add(one_values[index]));
        count
    }
    #[inline(always)]
    unsafe fn equal_8(lanes: &U32x16, tag: u32) -> u32 {
        let mut matches = 0;
        for (index, lane) in lanes.0[..8].iter().enumerate() {
            matches |= u32::from(*lane == tag) << index;
        }
        matches
    }
    #[inline(always)]
    unsafe fn move_to_front(
        lanes: &mut U32x16,
        tag: &u32,
        ways: u32,
        hits: &mut [u32; 16],
    ) -> bool {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 has SSE2.
        let matches = unsafe { x86::move_to_front_sse2(lanes, *tag, ways) };
        #[cfg(not(target_arch = "x86_64"))]
        let matches = move_tag_to_front(lanes, *tag, ways);
        hits[matches.trailing_zeros() as usize & 15] += u32::from(matches != 0);
        matches != 0
    }
    type Hits = [u32; 16];
    #[inline(always)]
    unsafe fn empty_hits() -> [u32; 16] {
        [0; 16]
    }
    #[inline(always)]
    unsafe fn count_by_lane(hits: [u32; 16]) -> [u32; 16] {
        hits
    }
    #[inline(always)]
    unsafe fn filter(
        lines: &[u64],
        salt: u64,
        threshold: u64,
        retained: &mut [u64],
        mut retained_count: usize,
    ) -> usize {
        for &line in lines {
            retained[retained_count] = line;
            retained_count += usize::from(crate::hash::scatter(line ^ salt) >> 40 < threshold);
        }
        retained_count
    }
    #[inline(always)]
    unsafe fn list_quotients(
        lines: &[u64],
        shift: u32,
        residue: u64,
        quotients: &mut [u64],
    ) -> usize {
        let mut count = 0;
        for &line in lines {
            quotients[count] = line >> shift;
            count += usize::from(line & ((1 << shift) - 1) == residue);
        }
        count
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{KEEP_ABOVE, Lanes, ONES_U16, ONES_U32, Portable, U16x32, U32x16};
    use std::arch::x86_64::*;

    /// For each set of four lanes of 64 bits, the halves of its lanes in order, followed by any others.
    static PACKING_ORDERS: [[u32; 8]; 16] = {
        let mut orders = [[0; 8]; 16];
        let mut lanes = 0;
        while lanes < 16 {
            let (mut lane, mut count) = (0, 0);
            while lane < 4 {
                if lanes >> lane & 1 == 1 {
                    orders[lanes][count] = 2 * lane;
                    orders[lanes][count + 1] = 2 * lane + 1;
                    count += 2;
                }
                lane += 1;
            }
            lanes += 1;
        }
        orders
    };

    pub(crate) struct Avx512;

    impl Lanes for Avx512 {
        #[inline(always)]
        unsafe fn bump_u16(counters: &mut U16x32, lane: usize) -> u16 {
            // SAFETY: the processor has the instructions and `lane` is below 32 (the caller's promise); the counters
            // are aligned to 64 bytes.
            unsafe {
                let count = *counters.0.get_unchecked(lane);
                let address = counters.0.as_mut_ptr().cast();
                let counts = _mm512_load_si512(address);
                let lanes_below = ((1u64 << lane) - 1) as u32;
                _mm512_store_si512(
                    address,
                    _mm512_mask_sub_epi16(counts, lanes_below, counts, _mm512_set1_epi16(-1)),
                );
                count
            }
        }
        #[inline(always)]
        unsafe fn bump_u32(counters: &mut U32x16, lane: usize) -> u32 {
            // SAFETY: the processor has the instructions and `lane` is below 16 (the caller's promise); the counters
            // are aligned to 64 bytes.
            unsafe {
                let count = *counters.0.get_unchecked(lane);
                let address = counters.0.as_mut_ptr().cast();
                let counts = _mm512_load_si512(address);
                let lanes_below = ((1u32 << lane) - 1) as u16;
                _mm512_store_si512(
                    address,
                    _mm512_mask_sub_epi32(counts, lanes_below, counts, _mm512_set1_epi32(-1)),
                );
                count
            }
        }
        #[inline(always)]
        unsafe fn equal_8(lanes: &U32x16, tag: u32) -> u32 {
            // SAFETY: the processor has the instructions (the caller's promise); the lanes are aligned to 64 bytes.
            unsafe {
                let tags = _mm256_load_si256(lanes.0.as_ptr().cast());
                u32::from(_mm256_cmpeq_epi32_mask(tags, _mm256_set1_epi32(tag as i32)))
            }
        }
        #[inline(always)]
        unsafe fn move_to_front(
            lanes: &mut U32x16,
            tag: &u32,
            ways: u32,
            hits: &mut __m512i,
        ) -> bool {
            // SAFETY: the processor has the instructions (the caller's promise); the lanes are aligned to 64 bytes.
            unsafe {
                let address = lanes.0.as_mut_ptr().cast();
                let tags = _mm512_load_si512(address);
                let front = _mm512_set1_epi32(*tag as i32);
                let matches = _mm512_mask_cmpeq_epi32_mask(ways as u16, tags, front);
                // Lanes up to and including the lowest set bit; all of them if there is none.
                let moved_lanes = matches ^ matches.wrapping_sub(1);
                let shifted_lanes = _mm512_alignr_epi32::<15>(tags, front);
                _mm512_store_si512(
                    address,
                    _mm512_mask_mov_epi32(tags, moved_lanes, shifted_lanes),
                );
                *hits = _mm512_mask_sub_epi32(*hits, matches, *hits, _mm512_set1_epi32(-1));
                matches != 0
            }
        }
        type Hits = __m512i;
        #[inline(always)]
        unsafe fn empty_hits() -> __m512i {
            // SAFETY: the processor has the instructions (the caller's promise).
            unsafe { _mm512_setzero_si512() }
        }
        #[inline(always)]
        unsafe fn count_by_lane(hits: __m512i) -> [u32; 16] {
            // SAFETY: any 64 bytes are sixteen numbers.
            unsafe { std::mem::transmute(hits) }
        }
        #[inline(always)]
        unsafe fn filter(
            lines: &[u64],
            salt: u64,
            threshold: u64,
            retained: &mut [u64],
            mut retained_count: usize,
        ) -> usize {
            // SAFETY: the processor has the instructions (the caller's promise). Each chunk has eight lines; at most as
            // many lines are written as the checked slice of `retained` is long.
            unsafe {
                let salts = _mm512_set1_epi64(salt as i64);
                // `SplitMix64::scatter`, eight lines at a time; its top 24 bits are compared.
                // The comparison is inclusive, because a threshold of 2^24 keeps every line.
                let max_key = _mm512_set1_epi64((threshold << 40).wrapping_sub(1) as i64);
                let first_multiplier = _mm512_set1_epi64(0xBF58_476D_1CE4_E5B9u64 as i64);
                let second_multiplier = _mm512_set1_epi64(0x94D0_49BB_1331_11EBu64 as i64);
                let mut chunks = lines.chunks_exact(8);
                for chunk in &mut chunks {
                    let line = _mm512_loadu_si512(chunk.as_ptr().cast());
                    let key = _mm512_xor_si512(line, salts);
                    let key = _mm512_mullo_epi64(
                        _mm512_xor_si512(key, _mm512_srli_epi64::<30>(key)),
                        first_multiplier,
                    );
                    let key = _mm512_mullo_epi64(
                        _mm512_xor_si512(key, _mm512_srli_epi64::<27>(key)),
                        second_multiplier,
                    );
                    let key = _mm512_xor_si512(key, _mm512_srli_epi64::<31>(key));
                    let keep = _mm512_cmple_epu64_mask(key, max_key);
                    if keep != 0 {
                        let packed_lines = _mm512_maskz_compress_epi64(keep, line);
                        let count = keep.count_ones();
                        let destination = retained[retained_count..][..count as usize].as_mut_ptr();
                        _mm512_mask_storeu_epi64(
                            destination.cast(),
                            ((1u32 << count) - 1) as u8,
                            packed_lines,
                        );
                        retained_count += count as usize;
                    }
                }
                Portable::filter(
                    chunks.remainder(),
                    salt,
                    threshold,
                    retained,
                    retained_count,
                )
            }
        }
        #[inline(always)]
        unsafe fn list_quotients(
            lines: &[u64],
            shift: u32,
            residue: u64,
            quotients: &mut [u64],
        ) -> usize {
            // SAFETY: a processor with AVX-512 has AVX2.
            unsafe { Avx2::list_quotients(lines, shift, residue, quotients) }
        }
    }

    /// Like [`super::move_tag_to_front`], but four lanes at a time.
    #[inline(always)]
    pub(super) unsafe fn move_to_front_sse2(lanes: &mut U32x16, tag: u32, ways: u32) -> u32 {
        // SAFETY: every x86-64 has SSE2; the lanes are aligned to 64 bytes, and the window into `KEEP_ABOVE` begins at
        // 0 to 16 of 32.
        unsafe {
            let address: *mut __m128i = lanes.0.as_mut_ptr().cast();
            let quarters: [__m128i; 4] =
                std::array::from_fn(|index| _mm_load_si128(address.add(index)));
            let front = _mm_set1_epi32(tag as i32);
            let matches_tag = |index: usize| _mm_cmpeq_epi32(quarters[index], front);
            let pairs = (
                _mm_packs_epi32(matches_tag(0), matches_tag(1)),
                _mm_packs_epi32(matches_tag(2), matches_tag(3)),
            );
            let matches = _mm_movemask_epi8(_mm_packs_epi16(pairs.0, pairs.1)) as u32 & ways;
            let match_lane = (matches | 1 << 16).trailing_zeros() as usize;
            let above_mask: *const __m128i = KEEP_ABOVE.as_ptr().add(16 - match_lane).cast();
            let mut preceding_quarter = front;
            for (index, quarter) in quarters.into_iter().enumerate() {
                // The last lane of the preceding quarter, followed by the first three lanes of this quarter.
                let shifted_lanes = _mm_or_si128(
                    _mm_slli_si128::<4>(quarter),
                    _mm_srli_si128::<12>(preceding_quarter),
                );
                let keep = _mm_loadu_si128(above_mask.add(index));
                _mm_store_si128(
                    address.add(index),
                    _mm_or_si128(
                        _mm_and_si128(keep, quarter),
                        _mm_andnot_si128(keep, shifted_lanes),
                    ),
                );
                preceding_quarter = quarter;
            }
            matches
        }
    }

    pub(crate) struct Avx2;

    impl Lanes for Avx2 {
        #[inline(always)]
        unsafe fn bump_u16(counters: &mut U16x32, lane: usize) -> u16 {
            // SAFETY: the processor has the instructions and `lane` is below 32 (the caller's promise); the counters
            // are aligned to 64 bytes.
            unsafe {
                let count = *counters.0.get_unchecked(lane);
                let counter_pointer: *mut __m256i = counters.0.as_mut_ptr().cast();
                let one_values: *const __m256i = ONES_U16.as_ptr().add(32 - lane).cast();
                for half_index in 0..2 {
                    let sum = _mm256_add_epi16(
                        _mm256_load_si256(counter_pointer.add(half_index)),
                        _mm256_loadu_si256(one_values.add(half_index)),
                    );
                    _mm256_store_si256(counter_pointer.add(half_index), sum);
                }
                count
            }
        }
        #[inline(always)]
        unsafe fn bump_u32(counters: &mut U32x16, lane: usize) -> u32 {
            // SAFETY: the processor has the instructions and `lane` is below 16 (the caller's promise); the counters
            // are aligned to 64 bytes.
            unsafe {
                let count = *counters.0.get_unchecked(lane);
                let counter_pointer: *mut __m256i = counters.0.as_mut_ptr().cast();
                let one_values: *const __m256i = ONES_U32.as_ptr().add(16 - lane).cast();
                for half_index in 0..2 {
                    let sum = _mm256_add_epi32(
                        _mm256_load_si256(counter_pointer.add(half_index)),
                        _mm256_loadu_si256(one_values.add(half_index)),
                    );
                    _mm256_store_si256(counter_pointer.add(half_index), sum);
                }
                count
            }
        }
        #[inline(always)]
        unsafe fn equal_8(lanes: &U32x16, tag: u32) -> u32 {
            // SAFETY: the processor has the instructions (the caller's promise); the lanes are aligned to 64 bytes.
            unsafe {
                let tags = _mm256_load_si256(lanes.0.as_ptr().cast());
                let equal_lanes = _mm256_cmpeq_epi32(tags, _mm256_set1_epi32(tag as i32));
                _mm256_movemask_ps(_mm256_castsi256_ps(equal_lanes)) as u32
            }
        }
        #[inline(always)]
        unsafe fn move_to_front(
            lanes: &mut U32x16,
            tag: &u32,
            ways: u32,
            hits: &mut (__m256i, __m256i),
        ) -> bool {
            // SAFETY: the processor has the instructions (the caller's promise); the lanes are aligned to 64 bytes.
            unsafe {
                let lane_pointer: *mut __m256i = lanes.0.as_mut_ptr().cast();
                let (low, high) = (
                    _mm256_load_si256(lane_pointer),
                    _mm256_load_si256(lane_pointer.add(1)),
                );
                let front = _mm256_set1_epi32(*tag as i32);
                let lanes_low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let lanes_high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
                let limit = _mm256_set1_epi32(ways.count_ones() as i32);
                let low_matches = _mm256_and_si256(
                    _mm256_cmpeq_epi32(low, front),
                    _mm256_cmpgt_epi32(limit, lanes_low),
                );
                let high_matches = _mm256_and_si256(
                    _mm256_cmpeq_epi32(high, front),
                    _mm256_cmpgt_epi32(limit, lanes_high),
                );
                hits.0 = _mm256_sub_epi32(hits.0, low_matches);
                hits.1 = _mm256_sub_epi32(hits.1, high_matches);
                let mask_bits = |half| _mm256_movemask_ps(_mm256_castsi256_ps(half)) as u32;
                let matches = mask_bits(low_matches) | mask_bits(high_matches) << 8;
                let rotation = _mm256_setr_epi32(7, 0, 1, 2, 3, 4, 5, 6);
                let shifted_low = _mm256_permutevar8x32_epi32(low, rotation);
                let shifted_high = _mm256_permutevar8x32_epi32(high, rotation);
                let new_low = _mm256_blend_epi32::<1>(shifted_low, front);
                let new_high = _mm256_blend_epi32::<1>(shifted_high, shifted_low);
                // Lane i moves if no lane below it matched, that is, if i <= the lowest match; without a match, all
                // lanes move.
                let match_lane = _mm256_set1_epi32((matches | 1 << 16).trailing_zeros() as i32);
                let keep_low = _mm256_cmpgt_epi32(lanes_low, match_lane);
                let keep_high = _mm256_cmpgt_epi32(lanes_high, match_lane);
                _mm256_store_si256(lane_pointer, _mm256_blendv_epi8(new_low, low, keep_low));
                _mm256_store_si256(
                    lane_pointer.add(1),
                    _mm256_blendv_epi8(new_high, high, keep_high),
                );
                matches != 0
            }
        }
        type Hits = (__m256i, __m256i);
        #[inline(always)]
        unsafe fn empty_hits() -> (__m256i, __m256i) {
            // SAFETY: the processor has the instructions (the caller's promise).
            unsafe { (_mm256_setzero_si256(), _mm256_setzero_si256()) }
        }
        #[inline(always)]
        unsafe fn count_by_lane(hits: (__m256i, __m256i)) -> [u32; 16] {
            let mut lanes = [0; 16];
            // SAFETY: two halves of eight numbers have the size of sixteen numbers.
            unsafe {
                _mm256_storeu_si256(lanes.as_mut_ptr().cast(), hits.0);
                _mm256_storeu_si256(lanes.as_mut_ptr().add(8).cast(), hits.1);
            }
            lanes
        }
        #[inline(always)]
        unsafe fn filter(
            lines: &[u64],
            salt: u64,
            threshold: u64,
            retained: &mut [u64],
            retained_count: usize,
        ) -> usize {
            // SAFETY: portable code needs only the instructions of the compilation target.
            unsafe { Portable::filter(lines, salt, threshold, retained, retained_count) }
        }
        #[inline(always)]
        unsafe fn list_quotients(
            lines: &[u64],
            shift: u32,
            residue: u64,
            quotients: &mut [u64],
        ) -> usize {
            assert!(quotients.len() >= lines.len());
            // SAFETY: the processor has the instructions (the caller's promise). Each chunk has four lines, and at most
            // as many quotients precede those of a chunk as there are lines before it.
            unsafe {
                let low_bits = _mm256_set1_epi64x((1 << shift) - 1);
                let residues = _mm256_set1_epi64x(residue as i64);
                let shift_count = _mm_cvtsi32_si128(shift as i32);
                let mut count = 0;
                let mut chunks = lines.chunks_exact(4);
                for chunk in &mut chunks {
                    let line = _mm256_loadu_si256(chunk.as_ptr().cast());
                    let is_own = _mm256_cmpeq_epi64(_mm256_and_si256(line, low_bits), residues);
                    let own_lanes = _mm256_movemask_pd(_mm256_castsi256_pd(is_own)) as usize;
                    let order = _mm256_loadu_si256(PACKING_ORDERS[own_lanes & 15].as_ptr().cast());
                    let packed =
                        _mm256_permutevar8x32_epi32(_mm256_srl_epi64(line, shift_count), order);
                    _mm256_storeu_si256(quotients.as_mut_ptr().add(count).cast(), packed);
                    count += own_lanes.count_ones() as usize;
                }
                let rest = chunks.remainder();
                count + Portable::list_quotients(rest, shift, residue, &mut quotients[count..])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::SplitMix64;

    /// Does every instruction set move the same lines to the front as the plain loop, for every number of ways?
    #[test]
    fn every_instruction_set_moves_the_same_lines_to_the_front() {
        let mut random = SplitMix64::new(5);
        for _ in 0..4000 {
            let ways = (1u32 << (1 + random.draw_below(16))) - 1;
            let mut tags: Vec<u32> = (1..=24).collect();
            (1..24).for_each(|at| tags.swap(at, random.draw_below(at as u64 + 1) as usize));
            let initial_lanes = U32x16(std::array::from_fn(|index| tags[index]));
            let tag = 1 + random.draw_below(24) as u32;
            let mut expected = initial_lanes;
            let matches = move_tag_to_front(&mut expected, tag, ways);
            let way_count = ways.count_ones() as usize;
            let mut list: Vec<u32> = initial_lanes.0[..way_count]
                .iter()
                .copied()
                .filter(|&lane_tag| lane_tag != tag)
                .collect();
            list.insert(0, tag);
            assert_eq!(expected.0[..way_count], list[..way_count]);
            for simd in Simd::available() {
                let mut lanes = initial_lanes;
                let (lanes, tag) = (&mut lanes, &tag);
                let hits =
                    dispatch!(simd, hits_of(lanes: &mut U32x16, tag: &u32, ways: u32) -> [u32; 16]);
                assert_eq!(
                    lanes.0[..way_count],
                    expected.0[..way_count],
                    "{}",
                    simd.name()
                );
                let is_hit = |way: usize| u32::from(matches >> way & 1 == 1);
                assert_eq!(hits, std::array::from_fn(is_hit), "{}", simd.name());
            }
        }
    }

    /// Does every instruction set list the quotients of the same lines, whatever their number?
    #[test]
    fn every_instruction_set_lists_the_same_quotients() {
        let mut random = SplitMix64::new(6);
        for len in 0..40 {
            let lines: Vec<u64> = (0..len).map(|_| random.next_u64()).collect();
            let lines = &lines[..];
            for shift in 1..4 {
                let residue = random.draw_below(1 << shift);
                let is_own = |line: &&u64| **line % (1 << shift) == residue;
                let own_lines = lines.iter().filter(is_own);
                let expected: Vec<u64> = own_lines.map(|line| line >> shift).collect();
                for simd in Simd::available() {
                    let mut quotients = vec![0; lines.len()];
                    let list = &mut quotients[..];
                    let count = dispatch!(simd, list_of(lines: &[u64], shift: u32, residue: u64, list: &mut [u64]) -> usize);
                    assert_eq!(quotients[..count], expected, "{}", simd.name());
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn list_of<L: Lanes>(
        lines: &[u64],
        shift: u32,
        residue: u64,
        list: &mut [u64],
    ) -> usize {
        // SAFETY: the caller guarantees that the processor has `L`.
        unsafe { L::list_quotients(lines, shift, residue, list) }
    }

    #[inline(always)]
    unsafe fn hits_of<L: Lanes>(lanes: &mut U32x16, tag: &u32, ways: u32) -> [u32; 16] {
        // SAFETY: the caller guarantees that the processor has `L`.
        unsafe {
            let mut hits = L::empty_hits();
            L::move_to_front(lanes, tag, ways, &mut hits);
            L::count_by_lane(hits)
        }
    }
}
