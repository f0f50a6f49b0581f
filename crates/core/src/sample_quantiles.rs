//! Quantiles of samples, each by one definition.
//!
//! Hyndman and Fan (Sample Quantiles in Statistical Packages, The American Statistician 50, 1996) number nine definitions in
//! use, which differ by up to the distance of two neighboring values, so two figures can be compared only if both follow the
//! same. Here [`quantile`] and [`median`] interpolate linearly, by their definition 7, the default of R and NumPy. Where a
//! statement is about the samples themselves ("nine of ten errors are at most 3 points"), [`nearest_rank`] returns one of
//! them, by definition 1. For example, of 1, 2, 3 and 10, the median is 2.5, the 0.9 quantile 7.9, and three quarters of
//! the values do not exceed 3.

/// `None` without values.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// Value below which this share of the values lies, interpolated linearly between two of them;
/// `None` without values.
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let sorted_values = sort_ascending(values);
    let last_index = sorted_values.len().checked_sub(1)?;
    let position = share.clamp(0.0, 1.0) * last_index as f64;

    let lower_index = position as usize;
    let upper_weight = position - lower_index as f64;
    let lower_value = sorted_values[lower_index];
    // A neighbor without weight may be infinite.
    if upper_weight == 0.0 {
        return Some(lower_value);
    }
    let upper_value = sorted_values[(lower_index + 1).min(last_index)];
    Some((1.0 - upper_weight) * lower_value + upper_weight * upper_value)
}

/// Smallest of the values that this share of them does not exceed, so always one of the values;
/// `None` without values.
pub fn nearest_rank(values: &[f64], share: f64) -> Option<f64> {
    let sorted_values = sort_ascending(values);
    let last_index = sorted_values.len().checked_sub(1)?;
    let rank = libm::ceil(share * sorted_values.len() as f64).max(1.0) as usize;
    Some(sorted_values[(rank - 1).min(last_index)])
}

fn sort_ascending(values: &[f64]) -> Vec<f64> {
    let mut sorted_values = values.to_vec();
    sorted_values.sort_by(f64::total_cmp);
    sorted_values
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are quantiles those that NumPy prints (`numpy.quantile(values, share)`), in any order of the values?
    #[test]
    fn quantiles_are_those_of_numpy() {
        let values = [10.0, 2.0, 1.0, 3.0];
        let expected = [
            (0.0, 1.0),
            (0.25, 1.75),
            (0.5, 2.5),
            (0.75, 4.75),
            (0.9, 7.9),
            (1.0, 10.0),
        ];
        for (share, expected_value) in expected {
            let found = quantile(&values, share).unwrap();
            assert!(
                (found - expected_value).abs() < 1e-12,
                "{share}: {found} for {expected_value}"
            );
        }
    }

    /// Is the median the middle value or the mean of both, to the last digit, and absent without values?
    #[test]
    fn a_median_is_the_middle_value_or_the_mean_of_both() {
        assert_eq!(median(&[0.3, 0.1, f64::INFINITY]), Some(0.3));
        assert_eq!(median(&[0.7, 0.1, 0.3, 0.2]), Some((0.2 + 0.3) / 2.0));
        assert_eq!(median(&[]), None);
    }

    /// Is the 90th percentile by rank the value that nine of ten do not exceed, and always a value that occurs?
    #[test]
    fn a_rank_is_a_value_that_occurs() {
        let values: Vec<f64> = (1..=10).map(f64::from).collect();
        assert_eq!(nearest_rank(&values, 0.9), Some(9.0));
        assert_eq!(nearest_rank(&values, 0.91), Some(10.0));
        assert_eq!(nearest_rank(&values, 0.0), Some(1.0));
        assert_eq!(nearest_rank(&values, 7.0), Some(10.0));
        assert_eq!(nearest_rank(&[5.0], 0.9), Some(5.0));
        assert_eq!(nearest_rank(&[], 0.9), None);
    }
}
