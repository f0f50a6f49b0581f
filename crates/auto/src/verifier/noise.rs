//! Significance of a difference between two series of windows.
//!
//! Medians are compared, so that a pause in one window decides nothing. Their standard error comes from the spread of
//! both series together. Correlated windows carry less information: with autocorrelation r, n windows are worth
//! n (1 - r) / (1 + r) independent ones (Bartlett 1946; von Storch and Zwiers, Statistical Analysis in Climate
//! Research, 6.6.8). The bound is Student's, because a spread from few windows is itself uncertain.

use cachemate_core::median;

/// Number of windows required to estimate an autocorrelation.
pub const MIN_AUTOCORRELATION_WINDOWS: usize = 8;
/// Largest autocorrelation; without it, the error would be unbounded.
const MAX_AUTOCORRELATION: f64 = 0.8;

/// A difference of two medians.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Difference {
    pub value: f64,
    pub standard_error: f64,
    /// Degrees of freedom of the estimated error.
    pub degrees_of_freedom: f64,
}

/// The median of `values_after` minus that of the last `latest_count` of `values_before`; all of `values_before` is
/// used for the noise. `None` if either has fewer than two windows.
pub fn median_difference(
    values_before: &[f64],
    values_after: &[f64],
    latest_count: usize,
) -> Option<Difference> {
    if values_before.len() < 2 || values_after.len() < 2 {
        return None;
    }

    let latest_values =
        &values_before[values_before.len() - latest_count.clamp(2, values_before.len())..];
    let degrees_of_freedom = (values_before.len() + values_after.len() - 2) as f64;
    let variance =
        (squared_deviations(values_before) + squared_deviations(values_after)) / degrees_of_freedom;
    let variance_factor = variance_factor(window_autocorrelation(values_before, values_after));
    // The variance of a median is pi/2 times that of the mean.
    let median_variance = std::f64::consts::FRAC_PI_2 * variance * variance_factor;
    Some(Difference {
        value: median(values_after)? - median(latest_values)?,
        standard_error: libm::sqrt(
            median_variance * (1.0 / latest_values.len() as f64 + 1.0 / values_after.len() as f64),
        ),
        degrees_of_freedom,
    })
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn squared_deviations(values: &[f64]) -> f64 {
    let mean = mean(values);
    values
        .iter()
        .map(|value| (value - mean) * (value - mean))
        .sum()
}

/// The standard deviation; NaN for fewer than two values.
pub fn standard_deviation(values: &[f64]) -> f64 {
    libm::sqrt(squared_deviations(values) / (values.len() as f64 - 1.0))
}

/// The autocorrelation of successive windows, corrected for the subtracted mean (Kendall 1954); 0 if there are too few.
fn window_autocorrelation(values_before: &[f64], values_after: &[f64]) -> f64 {
    let count = (values_before.len() + values_after.len()) as f64;
    if values_before.len() < MIN_AUTOCORRELATION_WINDOWS {
        return 0.0;
    }
    let lagged_products = |values: &[f64]| {
        let mean = mean(values);
        values
            .windows(2)
            .map(|pair| (pair[0] - mean) * (pair[1] - mean))
            .sum::<f64>()
    };
    let autocorrelation = (lagged_products(values_before) + lagged_products(values_after))
        / (squared_deviations(values_before) + squared_deviations(values_after));
    corrected_autocorrelation(autocorrelation, 1, count)
}

/// Corrects the autocorrelation of this many values for the subtracted means of their series (Kendall 1954). 0 if it is
/// undefined.
pub fn corrected_autocorrelation(autocorrelation: f64, series_count: u32, value_count: f64) -> f64 {
    let corrected =
        autocorrelation + (1.0 + 3.0 * autocorrelation) * f64::from(series_count) / value_count;
    if corrected.is_finite() {
        corrected.clamp(0.0, MAX_AUTOCORRELATION)
    } else {
        0.0
    }
}

/// The factor by which an autocorrelation increases the variance of a mean (Bartlett 1946).
pub fn variance_factor(autocorrelation: f64) -> f64 {
    (1.0 + autocorrelation) / (1.0 - autocorrelation)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::SplitMix64;

    /// Is the standard error at least the spread of repetitions, whether or not successive windows are similar?
    #[test]
    fn the_error_is_no_smaller_than_the_spread_of_repetitions() {
        for autocorrelation in [0.0, 0.5] {
            let mut generator = SplitMix64::new(3);
            let (mut errors, mut values) = (Vec::new(), Vec::new());
            for _ in 0..2000 {
                let mut last = 0.0;
                let mut next = || {
                    last = autocorrelation * last + generator.draw_unit() - 0.5;
                    last
                };
                let series: Vec<f64> = (0..35).map(|_| next()).collect();
                let estimate = median_difference(&series[10..30], &series[30..], 5).unwrap();
                errors.push(estimate.standard_error * estimate.standard_error);
                values.push(estimate.value);
            }
            let ratio =
                libm::sqrt(mean(&errors) / (squared_deviations(&values) / values.len() as f64));
            assert!((0.85..1.6).contains(&ratio), "{autocorrelation}: {ratio}");
        }
    }

    /// Does a pause in one window leave the difference unchanged?
    #[test]
    fn a_pause_changes_nothing() {
        let values_before = [1.0, 1.1, 0.9, 1.0, 1.0];
        let estimate = median_difference(&values_before, &[1.0, -9.0, 1.1, 0.9, 1.0], 5).unwrap();
        assert_eq!(estimate.value, 0.0);
        assert_eq!(median_difference(&values_before, &[1.0], 5), None);
    }
}
