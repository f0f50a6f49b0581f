//! Decides whether the seeds so far determine a verdict, by comparing Student's interval over the seeds with the
//! target.

use serde::Serialize;

use crate::statistics::{least, mean, standard_deviation};

/// Minimum number of seeds of a line if seeds are added until it is decided.
pub const MIN_SEEDS: usize = 2;
/// Maximum number of seeds of a line; a line that needs more remains undecided.
pub const MAX_SEEDS: usize = 40;
/// Maximum number of seeds that the extrapolation reports.
const MAX_EXTRAPOLATED_SEEDS: usize = 10_000;

/// The 97.5 % quantiles of Student's t, by degrees of freedom from 1.
const STUDENT_QUANTILES: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];

/// The 95 % interval of a mean over seeds, compared with the bounds of the target.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct FindingConfidence {
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// Whether no bound of the target lies within the interval.
    pub is_decided: bool,
    /// Number of seeds that would decide the line if mean and spread stayed the same. `None` if the line is decided,
    /// or if even ten thousand seeds would not suffice.
    pub seeds_to_decide: Option<usize>,
}

impl FindingConfidence {
    /// Computes the interval; `None` for fewer than two values, or if a value is not a number. `bounds` are the
    /// bounds of the target.
    pub fn estimate(values: &[f64], bounds: &[f64]) -> Option<Self> {
        let count = values.len();
        if count < MIN_SEEDS || values.iter().any(|value| !value.is_finite()) {
            return None;
        }

        let (mean, spread) = (mean(values), standard_deviation(values));
        let half_width = interval_half_width(spread, count);
        let is_within = |bound: &f64| mean - half_width < *bound && *bound < mean + half_width;
        let is_decided = !bounds.iter().any(is_within);
        let distance = least(bounds.iter().map(|bound| (bound - mean).abs()));
        let is_deciding_count = |seeds: &usize| interval_half_width(spread, *seeds) <= distance;
        let seeds_to_decide = (count + 1..=MAX_EXTRAPOLATED_SEEDS)
            .find(is_deciding_count)
            .filter(|_| !is_decided);
        Some(FindingConfidence {
            low: mean - half_width,
            high: mean + half_width,
            is_decided,
            seeds_to_decide,
        })
    }

    /// The number of seeds for the next run of the line; at most twice the present number, `seeds`.
    pub fn next_seed_count(&self, seeds: usize) -> usize {
        self.seeds_to_decide
            .unwrap_or(usize::MAX)
            .min(2 * seeds)
            .max(seeds + 1)
    }
}

fn interval_half_width(spread: f64, seeds: usize) -> f64 {
    let degrees_of_freedom = seeds - 1;
    // Beyond the table, the quantile is approximated by Abramowitz and Stegun 26.7.5, with two terms.
    let (normal_quantile, n) = (1.959_964_f64, degrees_of_freedom as f64);
    let second_order_term =
        5.0 * normal_quantile.powi(5) + 16.0 * normal_quantile.powi(3) + 3.0 * normal_quantile;
    let expanded_quantile = || {
        normal_quantile
            + (normal_quantile.powi(3) + normal_quantile) / (4.0 * n)
            + second_order_term / (96.0 * n * n)
    };
    STUDENT_QUANTILES
        .get(degrees_of_freedom - 1)
        .copied()
        .unwrap_or_else(expanded_quantile)
        * spread
        / (seeds as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is the interval that of a textbook: do 9, 10, 11 have mean 10, spread 1, and a half width of 4.303 / √3?
    #[test]
    fn the_interval_matches_a_students_t_textbook_example() {
        let interval = FindingConfidence::estimate(&[9.0, 10.0, 11.0], &[12.0]).unwrap();
        assert!(
            (interval.high - 10.0 - 4.303 / 3.0_f64.sqrt()).abs() < 1e-12
                && (interval.low + interval.high - 20.0).abs() < 1e-12
        );
        assert!(!interval.is_decided, "12 lies within 7.5 to 12.5");
        assert_eq!(
            interval.seeds_to_decide,
            Some(4),
            "3.182 / 2 is less than 2"
        );
        assert_eq!(
            (interval.next_seed_count(3), interval.next_seed_count(2)),
            (4, 4)
        );
        assert!(
            (interval_half_width(1.0, 32) * 32.0_f64.sqrt() - 2.0395).abs() < 1e-3,
            "Student's t with 31 degrees of freedom"
        );
    }

    /// Is a line decided once its interval lies on one side of every bound of the target, and never by one value?
    #[test]
    fn a_line_is_decided_on_one_side_of_its_target() {
        let estimate_decides = |values: &[f64], bounds: &[f64]| {
            FindingConfidence::estimate(values, bounds).map(|interval| interval.is_decided)
        };
        assert_eq!(estimate_decides(&[10.0, 10.1, 9.9], &[9.0]), Some(true));
        assert_eq!(estimate_decides(&[10.0, 10.1, 9.9], &[10.0]), Some(false));
        assert_eq!(
            estimate_decides(&[10.0, 10.1, 9.9], &[9.0, 11.0]),
            Some(true)
        );
        assert_eq!(
            estimate_decides(&[10.0, 10.1, 9.9], &[9.0, 10.2]),
            Some(false)
        );
        assert_eq!(
            estimate_decides(&[7.0, 7.0], &[7.0]),
            Some(true),
            "without spread, the mean is the value"
        );
        assert_eq!(
            (
                estimate_decides(&[10.0], &[9.0]),
                estimate_decides(&[10.0, f64::NAN], &[9.0])
            ),
            (None, None)
        );
        let open = FindingConfidence::estimate(&[-1.0, 1.0], &[0.0]).unwrap();
        assert_eq!(
            (
                open.is_decided,
                open.seeds_to_decide,
                open.next_seed_count(8)
            ),
            (false, None, 16)
        );
    }
}
