//! A sequential test of whether one plan is faster than another, which may be evaluated after every block.
//!
//! Problem: a trial that stops at the first apparently significant evaluation adopts plans without effect far more
//! often than its bound states, and windows that resemble their predecessor carry less evidence than their number
//! suggests. Method: the plans alternate in blocks ABBA or BAAB, with the order drawn from a seed ([`BlockDesign`]). A
//! block yields one number, the mean logarithm of new over old speed. A drift cancels in it, and because the order is
//! drawn, the noise of successive blocks is uncorrelated without an effect.
//!
//! [`SequentialTest`] is the Bayes factor of the t-test under the right Haar prior, mixed over two effect sizes.
//! Without an effect it is a martingale, whatever the size of the noise. It may therefore be evaluated after each block
//! (Hendriksen, de Heide and Grunwald, Bayesian Analysis 2021; Ville 1939).
//!
//! Properties: a plan without effect is adopted at most one time in forty, and a plan that gains enough is rejected at
//! most one time in forty. The result may stay open. With fewer than six blocks, no plan is adopted.

use cachemate_core::SplitMix64;

/// Squared effect sizes of a block under the alternative: one just above its noise, and one far above.
const EFFECTS: [f64; 2] = [0.2, 5.0];
/// Minimum number of blocks for an adoption. Without an effect, this many blocks have the same sign one time in
/// thirty-two, whatever their noise, and one given sign one time in sixty-four.
pub const MIN_BLOCKS: usize = 6;
/// Bayes factor that decides, which corresponds to a two-sided error of one in twenty, or one in forty each way.
const SURE: f64 = 20.0;

/// The verdict of the blocks so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SequentialVerdict {
    /// The new plan is faster, with statistical significance.
    Faster,
    /// The new plan is slower, with statistical significance.
    Slower,
    /// The gain is certainly smaller than the required one.
    Negligible,
    Undecided,
}

/// The test, with the blocks added so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SequentialTest {
    blocks: Vec<f64>,
}

impl SequentialTest {
    /// Adds one block, as the mean logarithm of new over old speed.
    pub fn add(&mut self, log_ratio: f64) {
        if log_ratio.is_finite() {
            self.blocks.push(log_ratio);
        }
    }

    /// Returns the number of blocks so far.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the mean of the blocks with its standard error; `None` for fewer than two blocks.
    pub fn mean(&self) -> Option<(f64, f64)> {
        let count = self.blocks.len() as f64;
        if self.blocks.len() < 2 {
            return None;
        }
        let mean = self.blocks.iter().sum::<f64>() / count;
        let squares: f64 = self.blocks.iter().map(|block| (block - mean) * (block - mean)).sum();
        Some((mean, libm::sqrt(squares / (count - 1.0) / count)))
    }

    /// Returns the likelihood ratio of another effect to an effect of exactly `null`, on the side of the mean.
    fn likelihood_ratio(&self, null: f64) -> f64 {
        let Some((mean, error)) = self.mean() else { return 1.0 };
        let count = self.blocks.len() as f64;
        let degrees_of_freedom = count - 1.0;
        // Readings without any noise would divide by zero; a millionth is below the noise of every counter.
        let t = (mean - null) / error.max(1e-6);
        let log_likelihood = |effect: f64| {
            let widened = 1.0 + count * effect;
            let fit = libm::log1p(t * t / degrees_of_freedom) - libm::log1p(t * t / (degrees_of_freedom * widened));
            libm::exp(0.5 * count * fit - 0.5 * libm::log(widened))
        };
        EFFECTS.iter().map(|&effect| log_likelihood(effect)).sum::<f64>() / EFFECTS.len() as f64
    }

    /// Returns the verdict, which may be evaluated after any block. `min_gain` is the minimum worthwhile gain, as a
    /// fraction.
    pub fn reach_verdict(&self, min_gain: f64) -> SequentialVerdict {
        let Some((mean, _)) = self.mean() else { return SequentialVerdict::Undecided };
        let log_min_gain = libm::log1p(min_gain);
        if self.likelihood_ratio(0.0) >= SURE {
            if mean < 0.0 {
                return SequentialVerdict::Slower;
            }
            // There is certainly an effect, and most likely a sufficient one.
            if mean >= log_min_gain {
                return if self.blocks.len() >= MIN_BLOCKS {
                    SequentialVerdict::Faster
                } else {
                    SequentialVerdict::Undecided
                };
            }
        }
        if mean < log_min_gain && self.likelihood_ratio(log_min_gain) >= SURE {
            SequentialVerdict::Negligible
        } else {
            SequentialVerdict::Undecided
        }
    }
}

/// The sequence of plans, in blocks of four legs whose order is drawn for each block.
#[derive(Clone, Debug)]
pub struct BlockDesign {
    generator: SplitMix64,
    new_first: bool,
    leg: u8,
}

impl BlockDesign {
    /// Builds the sequence; the order of the first block is drawn too.
    pub fn new(seed: u64) -> Self {
        let mut generator = SplitMix64::new(seed);
        let new_first = generator.draw_below(2) == 1;
        BlockDesign { generator, new_first, leg: 0 }
    }

    /// Returns whether the new plan is in force in this leg.
    pub fn is_new(&self) -> bool {
        self.new_first == (self.leg == 0 || self.leg == 3)
    }

    /// Advances to the next leg, and returns whether a block is complete.
    pub fn next_leg(&mut self) -> bool {
        self.leg = (self.leg + 1) % 4;
        if self.leg == 0 {
            self.new_first = self.generator.draw_below(2) == 1;
        }
        self.leg == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A generator of normally distributed noise of a window with this autocorrelation.
    struct AutocorrelatedNoise(SplitMix64, f64, f64);

    impl AutocorrelatedNoise {
        fn next(&mut self) -> f64 {
            let radius = libm::sqrt(-2.0 * libm::log(1.0 - self.0.draw_unit()));
            let fresh = radius * libm::cos(std::f64::consts::TAU * self.0.draw_unit());
            self.2 = self.1 * self.2 + libm::sqrt(1.0 - self.1 * self.1) * fresh;
            self.2
        }
    }

    /// Runs a trial of at most this number of windows, six to a leg, in which speeds vary by 30 %.
    fn run_trial(seed: u64, effect: f64, autocorrelation: f64, windows: u32) -> SequentialVerdict {
        let mut noise = AutocorrelatedNoise(SplitMix64::new(seed), autocorrelation, 0.0);
        let mut blocks = BlockDesign::new(seed ^ 0x5eed);
        let mut evidence = SequentialTest::default();
        for _ in 0..windows / 24 {
            let mut sums = [0.0; 2];
            loop {
                let is_new = blocks.is_new();
                for _ in 0..6 {
                    sums[usize::from(is_new)] +=
                        (0.3 * noise.next() + if is_new { libm::log1p(effect) } else { 0.0 }) / 12.0;
                }
                if blocks.next_leg() {
                    break;
                }
            }
            evidence.add(sums[1] - sums[0]);
            let message = evidence.reach_verdict(0.01);
            if message != SequentialVerdict::Undecided {
                return message;
            }
        }
        SequentialVerdict::Undecided
    }

    fn share_of_verdicts(verdicts: &[SequentialVerdict], effect: f64, autocorrelation: f64, windows: u32) -> f64 {
        let runs = 2_000;
        let hits = (0..runs).filter(|&seed| verdicts.contains(&run_trial(seed, effect, autocorrelation, windows)));
        hits.count() as f64 / runs as f64
    }

    /// Is a plan without effect adopted at most one time in forty, although it is evaluated after every block?
    ///
    /// Cost: 10 s of CPU, because one false adoption in forty shows only in thousands of trials.
    #[test]
    fn plans_without_effect_are_rarely_adopted() {
        for (autocorrelation, windows) in [(0.0, 3_000), (0.6, 12_000)] {
            let adopted = share_of_verdicts(&[SequentialVerdict::Faster], 0.0, autocorrelation, windows);
            assert!(adopted <= 0.025, "{adopted} at autocorrelation {autocorrelation}");
        }
    }

    /// Is a gain of five percent found under thirty percent of noise, four times out of five?
    #[test]
    fn five_per_cent_are_found() {
        for (autocorrelation, windows) in [(0.0, 3_000), (0.6, 12_000)] {
            let adopted = share_of_verdicts(&[SequentialVerdict::Faster], 0.05, autocorrelation, windows);
            assert!(adopted >= 0.8, "{adopted} at autocorrelation {autocorrelation}");
        }
    }

    /// Does a loss of five percent end the trial, almost never with an adoption?
    #[test]
    fn a_loss_ends_the_trial() {
        assert!(
            share_of_verdicts(&[SequentialVerdict::Slower, SequentialVerdict::Negligible], -0.05, 0.0, 3_000) >= 0.8
        );
        assert!(share_of_verdicts(&[SequentialVerdict::Faster], -0.05, 0.0, 3_000) <= 0.005);
    }

    /// Does a drift cancel within each block, whichever plan comes first?
    #[test]
    fn a_drift_cancels() {
        let mut blocks = BlockDesign::new(3);
        for block in 0..20 {
            let mut sums = [0.0; 2];
            for leg in 0..4 {
                sums[usize::from(blocks.is_new())] += f64::from(4 * block + leg);
                assert_eq!(blocks.next_leg(), leg == 3);
            }
            assert_eq!(sums[0], sums[1]);
        }
    }

    /// Do six clear blocks decide, and fewer not?
    #[test]
    fn few_clear_blocks_decide() {
        let mut evidence = SequentialTest::default();
        for (block, value) in [0.101, 0.099, 0.1, 0.1, 0.102, 0.1].into_iter().enumerate() {
            evidence.add(value);
            let expected = if block == 5 { SequentialVerdict::Faster } else { SequentialVerdict::Undecided };
            assert_eq!(evidence.reach_verdict(0.01), expected, "{} blocks", evidence.blocks());
        }
        let mut evidence = SequentialTest::default();
        [0.001, 0.0011, 0.0009, 0.001, 0.001].into_iter().for_each(|block| evidence.add(block));
        assert_eq!(evidence.reach_verdict(0.01), SequentialVerdict::Negligible);
    }
}
