//! The one generator of this crate: splitmix64 (Steele, Lea, Flood 2014). Same seed, same bits, on every machine.

/// A seeded generator; its whole state is one number.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    pub fn new(seed: u64) -> Self {
        SplitMix64(seed)
    }
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// Uniform in `0..limit`, without bias (Lemire's rejection). 0 for an empty range.
    pub fn below(&mut self, limit: u64) -> u64 {
        if limit == 0 {
            return 0;
        }
        loop {
            let product = u128::from(self.next_u64()) * u128::from(limit);
            if product as u64 >= limit.wrapping_neg() % limit {
                return (product >> 64) as u64;
            }
        }
    }
    /// Uniform in [0, 1), 53 bits.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
    /// Fisher-Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are these the published first outputs for seed 0 and 1234567?
    #[test]
    fn the_generator_gives_the_published_numbers() {
        assert_eq!(SplitMix64::new(0).next_u64(), 0xe220_a839_7b1d_cdaf);
        let mut generator = SplitMix64::new(1_234_567);
        assert_eq!(generator.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(generator.next_u64(), 3_203_168_211_198_807_973);
    }

    /// Does every value of a small range come up about equally often?
    #[test]
    fn small_ranges_are_even() {
        let mut generator = SplitMix64::new(7);
        let mut seen = [0u32; 6];
        (0..6000).for_each(|_| seen[generator.below(6) as usize] += 1);
        assert!(seen.iter().all(|&count| (850..1150).contains(&count)), "{seen:?}");
    }
}
