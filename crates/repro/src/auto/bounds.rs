//! One-sided 95 % bounds of a mean, by bootstrap.

use cachemate_core::SplitMix64;

const RESAMPLE_COUNT: usize = 2_000;

/// The lower and upper bound of the mean; for a single value, both bounds equal the value.
pub fn confidence_bounds(values: &[f64]) -> (f64, f64) {
    if values.is_empty() {
        return (f64::NAN, f64::NAN);
    }
    let mut generator = SplitMix64::new(values.len() as u64);
    let mut resampled_mean = || {
        let sum: f64 = values
            .iter()
            .map(|_| values[generator.draw_below(values.len() as u64) as usize])
            .sum();
        sum / values.len() as f64
    };
    let mut means: Vec<f64> = (0..RESAMPLE_COUNT).map(|_| resampled_mean()).collect();
    means.sort_by(f64::total_cmp);
    (
        means[RESAMPLE_COUNT / 20],
        means[RESAMPLE_COUNT - 1 - RESAMPLE_COUNT / 20],
    )
}

/// The lower bound of the geometric mean of gains, in percent.
pub fn lower_bound(percents: &[f64]) -> f64 {
    let logs: Vec<f64> = percents
        .iter()
        .map(|percent| (percent / 100.0).max(-0.999).ln_1p())
        .collect();
    100.0 * confidence_bounds(&logs).0.exp_m1()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For roughly normal values, do the bounds contain the mean, and are they as wide as theory says?
    #[test]
    fn bounds_contain_the_mean_and_are_as_wide_as_in_theory() {
        let mut generator = SplitMix64::new(1);
        let values: Vec<f64> = (0..100)
            .map(|_| (0..12).map(|_| generator.draw_unit()).sum::<f64>() - 6.0)
            .collect();
        let mean = values.iter().sum::<f64>() / 100.0;
        let (low, high) = confidence_bounds(&values);
        // A standard deviation of 1, divided by ten, times 1.645.
        assert!(
            (mean - low - 0.1645).abs() < 0.04 && (high - mean - 0.1645).abs() < 0.04,
            "{low} {mean} {high}"
        );
        assert_eq!(confidence_bounds(&[2.0]), (2.0, 2.0));
    }
}
