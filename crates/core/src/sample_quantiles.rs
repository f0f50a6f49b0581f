//! Quantiles of samples, each by one definition, and the bound of a mean from few samples.
//!
//! Hyndman and Fan (Sample Quantiles in Statistical Packages, The American Statistician 50, 1996) number nine
//! definitions in use, which differ by up to the distance of two neighboring values, so two figures can be compared
//! only if both follow the same. Here [`quantile`] and [`median`] interpolate linearly, by their definition 7, the
//! default of R and NumPy. Where a statement is about the samples themselves ("nine of ten errors are at most 3
//! points"), [`nearest_rank`] returns one of them, by definition 1. For example, of 1, 2, 3 and 10, the median is 2.5,
//! the 0.9 quantile 7.9, and three quarters of the values do not exceed 3.

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

/// The bound that Student's t exceeds with this probability, which is at most a half (Abramowitz and Stegun 26.2.23,
/// 26.7.5).
pub fn student_bound(probability: f64, degrees_of_freedom: f64) -> f64 {
    let t = libm::sqrt(-2.0 * libm::log(probability.clamp(1e-12, 0.5)));
    let numerator = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let denominator = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    let x = (t - numerator / denominator).max(0.0);
    let freedom = degrees_of_freedom.max(1.0);
    let squared = x * x;
    let g1 = x * (squared + 1.0) / 4.0;
    let g2 = x * (3.0 + squared * (16.0 + squared * 5.0)) / 96.0;
    let g3 = x * (-15.0 + squared * (17.0 + squared * (19.0 + squared * 3.0))) / 384.0;
    let g4 = x
        * (-945.0 + squared * (-1920.0 + squared * (1482.0 + squared * (776.0 + squared * 79.0))))
        / 92_160.0;
    x + (g1 + (g2 + (g3 + g4 / freedom) / freedom) / freedom) / freedom
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Do the bounds match those of the tables?
    #[test]
    fn student_bounds_are_those_of_the_tables() {
        let table = [
            (0.01, 4.0, 3.747),
            (0.01, 8.0, 2.896),
            (0.01, 23.0, 2.500),
            (0.01, 1e9, 2.326),
            (0.0025, 8.0, 3.833),
            (0.0025, 23.0, 3.104),
            (0.05, 5.0, 2.015),
        ];
        for (probability, degrees, expected) in table {
            let bound = student_bound(probability, degrees);
            assert!(
                (bound / expected - 1.0).abs() < 0.01,
                "{probability} {degrees}: {bound}, {expected} by the table"
            );
        }
    }

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
