//! The one pseudo-random generator of the workspace. The same seed gives the same bits on every machine.
//!
//! Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64).

/// 2^64 divided by the golden ratio, made odd: the step of the state.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A seeded generator with one word of state and a period of 2^64. Every seed is equally good. Not suitable for
/// secrets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Builds a generator that starts from `seed`.
    #[inline]
    pub const fn new(seed: u64) -> Self {
        SplitMix64(seed)
    }

    /// A bijection of 64-bit words that scatters neighboring words, and therefore a good hash; it
    /// is the generator's finalizer.
    #[inline(always)]
    pub const fn scatter(word: u64) -> u64 {
        let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Every other draw is derived from these bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        Self::scatter(self.0)
    }

    /// Uniform in `0..limit` without bias (Lemire 2019: multiplication, and rejection of the
    /// excess); 0 for an empty range.
    #[inline]
    pub fn draw_below(&mut self, limit: u64) -> u64 {
        loop {
            let product = u128::from(self.next_u64()) * u128::from(limit);
            let low = product as u64;
            // The remainder is needed only if the low half is below the limit, which is rare.
            if low >= limit || low >= limit.wrapping_neg() % limit {
                return (product >> 64) as u64;
            }
        }
    }

    /// Uniform from 0 (inclusive) to 1 (exclusive), with 53 bits.
    #[inline]
    pub fn draw_unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws by inversion, so one uniform draw makes one exponential one.
    #[inline]
    pub fn draw_exponential(&mut self, mean: f64) -> f64 {
        -mean * libm::log(1.0 - self.draw_unit())
    }

    /// Box and Muller (1958): takes two uniform draws each time.
    #[inline]
    pub fn draw_normal(&mut self) -> f64 {
        let radius = libm::sqrt(self.draw_exponential(2.0));
        radius * libm::cos(core::f64::consts::TAU * self.draw_unit())
    }

    /// Shuffles the items so that every order is equally likely (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.draw_below(last as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are these the published first outputs for the seeds 0 and 1234567?
    #[test]
    fn the_generator_gives_the_published_numbers() {
        let mut generator = SplitMix64::new(0);
        assert_eq!(
            [generator.next_u64(), generator.next_u64()],
            [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]
        );
        let mut generator = SplitMix64::new(1_234_567);
        assert_eq!(generator.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(generator.next_u64(), 3_203_168_211_198_807_973);
    }

    /// Are numbers, fractions and orders of a seed pinned, so that every recorded seed keeps its meaning?
    #[test]
    fn numbers_fractions_and_orders_of_a_seed_are_pinned() {
        let mut generator = SplitMix64::new(42);
        let drawn: Vec<u64> = [6, 1000, 1 << 20, 1 << 40, u64::MAX]
            .map(|limit| generator.draw_below(limit))
            .into();
        assert_eq!(drawn, [4, 159, 292134, 378441694990, 701532786141963249]);
        assert_eq!(
            [generator.draw_unit(), generator.draw_unit()],
            [0.8682280765465323, 0.21840519371218436]
        );
        let mut order: Vec<u32> = (0..8).collect();
        generator.shuffle(&mut order);
        assert_eq!(order, [0, 7, 5, 4, 1, 3, 2, 6]);
    }

    /// Do exponential draws have their mean, and is a share of exp(-1) of them above it?
    #[test]
    fn exponential_draws_have_their_mean_and_tail() {
        let mut generator = SplitMix64::new(11);
        let draws: Vec<f64> = (0..10_000)
            .map(|_| generator.draw_exponential(5.0))
            .collect();
        let mean = draws.iter().sum::<f64>() / 10_000.0;
        let tail_share = draws.iter().filter(|draw| **draw > 5.0).count() as f64 / 10_000.0;
        assert!(
            (mean / 5.0 - 1.0).abs() < 0.03 && (tail_share - libm::exp(-1.0)).abs() < 0.015,
            "{mean} {tail_share}"
        );
    }

    /// Do the values of a small range occur about equally often, and does an empty range give 0?
    #[test]
    fn values_of_a_small_range_are_equally_frequent() {
        let mut generator = SplitMix64::new(7);
        let mut draws = [0u32; 6];
        (0..6000).for_each(|_| draws[generator.draw_below(6) as usize] += 1);
        assert!(
            draws.iter().all(|&count| (850..1150).contains(&count)),
            "{draws:?}"
        );
        assert_eq!(generator.draw_below(0), 0);
    }

    /// Is a range of three quarters of all words uniform, for which multiplication alone gives every third value twice?
    #[test]
    fn a_range_of_three_quarters_of_all_words_is_uniform() {
        let mut generator = SplitMix64::new(3);
        let limit = 3 << 62;
        let mut rests = [0u32; 3];
        (0..6000).for_each(|_| rests[(generator.draw_below(limit) % 3) as usize] += 1);
        assert!(
            rests.iter().all(|&count| (1850..2150).contains(&count)),
            "{rests:?}"
        );
    }
}
