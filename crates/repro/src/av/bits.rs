//! The six vectors of a task (use and miss at three levels), the thresholds that define them, and a fitted line.
//!
//! The paper leaves the thresholds open. They were chosen before any run: a super set is active if it counts more than
//! the mean over all super sets of all nine programs alone, with one threshold for each of the six. A threshold
//! relative to the program's own mean would set about as many bits in a quiet program as in a busy one.

use cachemate_core::{IndexSet, SuperSetCount};
use cachemate_locality::activity::{self, ActivityThreshold, activity_vector};
use serde::{Deserialize, Serialize};

use super::samples::{LEVELS, TaskActivity};

/// Names of the six vectors, in the order of Table 1.
pub(super) const CELLS: [&str; 6] = [
    "D-cache use",
    "D-cache miss",
    "I-cache use",
    "I-cache miss",
    "L2-cache use",
    "L2-cache miss",
];

fn kind_of_cell(cell: usize) -> activity::ActivityKind {
    if cell.is_multiple_of(2) {
        activity::ActivityKind::Accesses
    } else {
        activity::ActivityKind::Misses
    }
}

/// Events per super set and sample above which a bit is set, one for each of [`CELLS`].
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(super) struct Thresholds([f64; 6]);

impl Thresholds {
    /// The means over all super sets of all samples.
    pub fn mean_of<'a>(samples: impl Iterator<Item = &'a TaskActivity>) -> Self {
        let (mut sums, mut count) = ([0.0; 6], [0.0; 6]);
        for activity in samples {
            for (cell, (sum, count)) in sums.iter_mut().zip(&mut count).enumerate() {
                for super_set in &activity[cell / 2] {
                    *sum += count_of_kind(super_set, kind_of_cell(cell)) as f64;
                    *count += 1.0;
                }
            }
        }
        Thresholds(std::array::from_fn(|cell| {
            sums[cell] / f64::max(count[cell], 1.0)
        }))
    }

    /// Thresholds for samples that are `length_ratio` times as long.
    pub fn scaled_by(self, length_ratio: f64) -> Self {
        Thresholds(self.0.map(|threshold| threshold * length_ratio))
    }

    /// The six vectors of one task's sample.
    pub fn vectors_of(&self, activity: &TaskActivity) -> [IndexSet; 6] {
        // For integer counts, "more than 4.2" and "more than 4" are the same.
        vectors_above(activity, |cell| {
            ActivityThreshold::Count(self.0[cell] as u64)
        })
    }
}

/// The six vectors with thresholds relative to the task's own mean: the other reading of the paper.
pub(super) fn vectors_above_own_mean(activity: &TaskActivity) -> [IndexSet; 6] {
    vectors_above(activity, |_| ActivityThreshold::MeanTimes(1.0))
}

fn vectors_above(
    activity: &TaskActivity,
    threshold_of: impl Fn(usize) -> ActivityThreshold,
) -> [IndexSet; 6] {
    std::array::from_fn(|cell| {
        activity_vector(&activity[cell / 2], kind_of_cell(cell), threshold_of(cell))
    })
}

fn count_of_kind(count: &SuperSetCount, kind: activity::ActivityKind) -> u64 {
    match kind {
        activity::ActivityKind::Accesses => count.accesses,
        activity::ActivityKind::Misses => count.misses,
    }
}

/// Combines several consecutive samples into one.
pub(super) fn combine_samples<'a>(
    samples: impl IntoIterator<Item = &'a TaskActivity>,
) -> Option<TaskActivity> {
    samples.into_iter().cloned().reduce(|mut sum, sample| {
        for level in 0..LEVELS.len() {
            for (sum, count) in sum[level].iter_mut().zip(&sample[level]) {
                sum.accesses += count.accesses;
                sum.misses += count.misses;
            }
        }
        sum
    })
}

/// A line fitted by least squares.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct FittedLine {
    pub slope: f64,
    pub r_squared: f64,
}

impl FittedLine {
    /// Fits a line; `None` if all x are equal, so that there is no slope. If all y are equal, the slope is 0 and
    /// explains nothing (r² = 0).
    pub fn fit(points: &[(f64, f64)]) -> Option<Self> {
        let point_count = points.len() as f64;
        let coordinate_mean =
            |value: fn(&(f64, f64)) -> f64| points.iter().map(value).sum::<f64>() / point_count;
        let (x, y) = (
            coordinate_mean(|point| point.0),
            coordinate_mean(|point| point.1),
        );
        let sum_of_products = |value: &dyn Fn(f64, f64) -> f64| {
            points
                .iter()
                .map(|point| value(point.0 - x, point.1 - y))
                .sum::<f64>()
        };
        let (xx, xy, yy) = (
            sum_of_products(&|dx, _| dx * dx),
            sum_of_products(&|dx, dy| dx * dy),
            sum_of_products(&|_, dy| dy * dy),
        );
        let r_squared = if yy > 0.0 { xy * xy / (xx * yy) } else { 0.0 };
        (xx > 0.0).then_some(FittedLine {
            slope: xy / xx,
            r_squared,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_activity(accesses: u64) -> TaskActivity {
        let level_counts = |times: u64| -> Vec<SuperSetCount> {
            (0..4)
                .map(|index| SuperSetCount {
                    accesses: times * accesses * index,
                    misses: index,
                })
                .collect()
        };
        [level_counts(1), level_counts(10), level_counts(100)]
    }

    /// Is the threshold the mean over programs and super sets, level by level, and does it scale with a sample's
    /// length?
    #[test]
    fn thresholds_are_means_and_scale_with_the_sample() {
        let samples = [sample_activity(1), sample_activity(3)];
        let thresholds = Thresholds::mean_of(samples.iter());
        assert_eq!(thresholds, Thresholds([3.0, 1.5, 30.0, 1.5, 300.0, 1.5]));
        let format_vectors = |vectors: [IndexSet; 6]| vectors.map(|vector| vector.to_string());
        let expected = ["2-3", "2-3", "2-3", "2-3", "2-3", "2-3"];
        assert_eq!(format_vectors(thresholds.vectors_of(&samples[1])), expected);
        assert_eq!(
            format_vectors(thresholds.vectors_of(&samples[0])),
            ["", "2-3", "", "2-3", "", "2-3"]
        );
        let double = combine_samples([&samples[1], &samples[1]]).unwrap();
        assert_eq!(
            format_vectors(thresholds.scaled_by(2.0).vectors_of(&double)),
            expected
        );
    }

    /// Does the fit reproduce a line, and is r² the share of the variance that it explains?
    #[test]
    fn the_fit_reproduces_a_line_and_its_explained_variance() {
        let line = FittedLine::fit(&[(0.0, 1.0), (1.0, 3.0), (3.0, 7.0)]).unwrap();
        assert!((line.slope - 2.0).abs() < 1e-12 && (line.r_squared - 1.0).abs() < 1e-12);
        // y = x, plus and minus 1 at equal x: half of the variance is explained.
        let line = FittedLine::fit(&[(0.0, 1.0), (0.0, -1.0), (2.0, 3.0), (2.0, 1.0)]).unwrap();
        assert!((line.slope - 1.0).abs() < 1e-12 && (line.r_squared - 0.5).abs() < 1e-12);
        assert_eq!(FittedLine::fit(&[(2.0, 1.0), (2.0, 3.0)]), None);
        assert_eq!(FittedLine::fit(&[]), None);
    }
}
