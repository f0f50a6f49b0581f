//! Speeds of a process in two series of windows over the same work.
//!
//! Programs have phases, and a series with more windows of a slow phase is no evidence about plans. Windows match if
//! equally many accesses reach the cache from the first level. This number does not depend on the cache's allocation,
//! unlike misses (thesis 5.6.2). The work of one series is then timed by the windows of both. Properties: there is no
//! result if less than half of a program's work has a match in the other series.

use super::noise::{
    Difference, MIN_AUTOCORRELATION_WINDOWS, corrected_autocorrelation, variance_factor,
};

/// Windows match if their incoming accesses differ by at most the thesis's threshold (3 per 1000 instructions, 5.6.2)
/// plus [`RATE_TOLERANCE`].
const MAX_RATE_DIFFERENCE: f64 = 0.003;
/// Sampling noise of the incoming accesses, as a fraction of them.
const RATE_TOLERANCE: f64 = 0.1;
/// Minimum fraction of the work in a series that must have a match in the other one.
const MIN_COMMON_SHARE: f64 = 0.5;
/// Autocorrelation that is assumed with fewer windows.
const DEFAULT_AUTOCORRELATION: f64 = 0.6;

/// A window of a process.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct WorkWindow {
    pub work_per_s: f64,
    /// Accesses of each instruction that reach the cache; `None` matches any.
    pub incoming_per_instr: Option<[f64; 3]>,
}

impl WorkWindow {
    /// Whether equally many accesses reach the cache in both windows.
    fn has_similar_traffic(&self, other: &WorkWindow) -> bool {
        let Some((own, other)) = self.incoming_per_instr.zip(other.incoming_per_instr) else {
            return true;
        };
        own.iter()
            .zip(&other)
            .all(|(a, b)| (a - b).abs() <= MAX_RATE_DIFFERENCE + RATE_TOLERANCE * f64::max(*a, *b))
    }
}

/// The logarithm of the second series' speed over that of the first, over the work of the first that both contain.
/// `None` if that is too little.
pub fn speed_difference(before: &[WorkWindow], after: &[WorkWindow]) -> Option<Difference> {
    let kinds = matching_kinds(before, after);
    let total_work: f64 = before.iter().map(|window| window.work_per_s).sum();
    let common_work: f64 = kinds.iter().map(|[side, _]| work_of(side)).sum();
    if common_work <= 0.0 || common_work < MIN_COMMON_SHARE * total_work {
        return None;
    }

    let (relative_variance, degrees_of_freedom) = pooled_variance(&kinds);
    let mut time = [0.0; 2];
    let mut variance = [0.0; 2];
    for kind in &kinds {
        let work_share = work_of(&kind[0]) / common_work;
        for (side, windows) in kind.iter().enumerate() {
            let kind_time = work_share * time_per_work(windows);
            time[side] += kind_time;
            variance[side] += relative_variance * kind_time * kind_time / windows.len() as f64;
        }
    }
    let squared_error = (0..2).map(|side| variance[side] / (time[side] * time[side]));
    Some(Difference {
        value: libm::log(time[0] / time[1]),
        standard_error: libm::sqrt(squared_error.sum()),
        degrees_of_freedom,
    })
}

/// The matching windows of one kind in the two series.
type MatchedWindows<'a> = [Vec<&'a WorkWindow>; 2];

/// Groups the windows by their traffic, and returns the groups that both series contain.
fn matching_kinds<'a>(
    before: &'a [WorkWindow],
    after: &'a [WorkWindow],
) -> Vec<MatchedWindows<'a>> {
    let mut kinds: Vec<MatchedWindows<'a>> = Vec::new();
    for (side, windows) in [before, after].into_iter().enumerate() {
        for window in windows {
            let is_similar = |kind: &&mut MatchedWindows<'_>| {
                let first_window = kind.iter().flatten().next();
                first_window.is_some_and(|first| first.has_similar_traffic(window))
            };
            match kinds.iter_mut().find(is_similar) {
                Some(kind) => kind[side].push(window),
                None => {
                    let mut kind = [Vec::new(), Vec::new()];
                    kind[side].push(window);
                    kinds.push(kind);
                }
            }
        }
    }

    kinds.retain(|kind| kind.iter().all(|side| !side.is_empty()));
    kinds
}

fn work_of(windows: &[&WorkWindow]) -> f64 {
    windows.iter().map(|window| window.work_per_s).sum()
}

fn time_per_work(windows: &[&WorkWindow]) -> f64 {
    windows.len() as f64 / work_of(windows)
}

/// The variance of a window's time per work around the mean of its kind and series, as a fraction of the squared mean,
/// with its degrees of freedom. The variance is increased if successive windows resemble each other (Bartlett 1946).
fn pooled_variance(kinds: &[MatchedWindows<'_>]) -> (f64, f64) {
    let (mut square_sum, mut product_sum) = (0.0, 0.0);
    let (mut window_count, mut series_count) = (0, 0);
    for windows in kinds.iter().flatten() {
        let mean_time = time_per_work(windows);
        let deviations: Vec<f64> = windows
            .iter()
            .map(|window| 1.0 / (mean_time * window.work_per_s.max(1.0)) - 1.0)
            .collect();
        square_sum += deviations
            .iter()
            .map(|deviation| deviation * deviation)
            .sum::<f64>();
        product_sum += deviations
            .windows(2)
            .map(|pair| pair[0] * pair[1])
            .sum::<f64>();
        window_count += windows.len();
        series_count += 1;
    }

    let degrees_of_freedom = (window_count - series_count) as f64;
    if degrees_of_freedom == 0.0 {
        return (f64::INFINITY, 1.0);
    }
    let autocorrelation = if window_count < MIN_AUTOCORRELATION_WINDOWS || square_sum <= 0.0 {
        DEFAULT_AUTOCORRELATION
    } else {
        let series = series_count as u32;
        corrected_autocorrelation(product_sum / square_sum, series, window_count as f64)
    };
    let variance_factor = variance_factor(autocorrelation);
    (
        square_sum / degrees_of_freedom * variance_factor,
        (degrees_of_freedom / variance_factor).max(1.0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A window with this much work per second, in a phase in which this many accesses of an instruction reach the
    /// cache.
    fn window_of(work_per_s: f64, incoming: f64) -> WorkWindow {
        WorkWindow {
            work_per_s,
            incoming_per_instr: Some([incoming, 0.0, incoming]),
        }
    }

    /// Do extra slow windows in one series not affect the comparison, and are phases that only one series has left out,
    /// or too much of the work for a result?
    #[test]
    fn series_are_compared_by_the_phases_that_both_have() {
        let (fast, slow) = (window_of(1e4, 0.1), window_of(2.5e3, 0.04));
        let other_phase = window_of(1e4, 0.01);
        let mostly_fast = [fast, fast, fast, slow];
        let ratio = |windows: &[WorkWindow]| {
            speed_difference(windows, &mostly_fast).map(|difference| libm::exp(difference.value))
        };
        let is_close = |ratio: Option<f64>, expected: f64| {
            ratio.is_some_and(|ratio| (ratio - expected).abs() < 1e-9)
        };
        assert!(is_close(ratio(&[slow, slow, slow, fast]), 1.0));
        // The first series is ten percent slower in both phases, for any mix of them.
        let slower = [window_of(9e3, 0.1), window_of(2.25e3, 0.04)];
        assert!(is_close(ratio(&slower), 1.0 / 0.9));
        assert!(is_close(ratio(&[fast, slow, other_phase]), 1.0));
        assert_eq!(ratio(&[fast, other_phase, other_phase]), None);
        // Further phases of the other series have no effect.
        assert!(is_close(ratio(&[slow]), 1.0));
    }

    /// Is the error no smaller than the spread of repetitions, and not much larger with independent windows, whose
    /// independence few windows cannot establish? Is it unknown if no two windows match?
    #[test]
    fn the_error_is_no_smaller_than_the_spread_of_repetitions() {
        let mut generator = cachemate_core::SplitMix64::new(5);
        let mut series = |windows: u32| -> Vec<WorkWindow> {
            let mut draw_work = || 1e6 / (2000 + generator.draw_below(1000)) as f64;
            (0..windows).map(|_| window_of(draw_work(), 0.1)).collect()
        };
        let differences: Vec<Difference> = (0..400)
            .map(|_| speed_difference(&series(8), &series(4)).unwrap())
            .collect();
        let mean = differences.iter().map(|found| found.value).sum::<f64>() / 400.0;
        let squares = differences.iter().map(|found| (found.value - mean).powi(2));
        let spread = libm::sqrt(squares.sum::<f64>() / 399.0);
        let squared_errors = differences.iter().map(|found| found.standard_error.powi(2));
        let error = libm::sqrt(squared_errors.sum::<f64>() / 400.0);
        assert!((0.95..1.35).contains(&(error / spread)), "{error} {spread}");
        let single = speed_difference(&series(1), &series(1)).unwrap();
        assert_eq!(single.standard_error, f64::INFINITY);
    }
}
