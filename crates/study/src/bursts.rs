//! The curve of a recording in bursts, with its error.
//!
//! Problem: between two bursts a program touches lines that the recording does not hold, so distances across a pause are
//! unknown. Method: each burst is measured by itself. Its n-th first touch has a distance of at least n lines, that of all
//! lines touched in the burst by then; every other access has an exact distance. From such censored distances, Kaplan and
//! Meier's product (1958) estimates the share of accesses at or beyond each distance. Bursts form groups of neighbors, and
//! the error is the jackknife's over the groups, because accesses of one burst resemble each other. Properties: with one
//! burst over the whole run, the product sees more distances than it needs and first touches are never certain misses; no
//! distance beyond the lines of the largest burst is estimated.

use cachemate_locality::stack::{DistanceHistogram, SegmentDistances, StackDistances, StackError};
use cachemate_trace::TraceTotals;

use crate::StudyError;

/// Maximum number of groups for the jackknife.
const MAX_GROUPS: usize = 16;
/// Student's t for 95 % on both sides, by degrees of freedom from 1.
const STUDENT_T: [f64; MAX_GROUPS - 1] = [
    12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131,
];

/// Measures the distances of each burst: push all lines in order, then [`finish`](Self::finish).
pub struct BurstDistances {
    /// Number of the first record of each burst that has not begun, in reverse order.
    next_bursts: Vec<u64>,
    record_count: u64,
    current_burst: StackDistances,
    /// Distances of a group of bursts, and the lines that each of its bursts touched.
    groups: Vec<BurstGroup>,
    started_bursts: usize,
    bursts_per_group: usize,
}

#[derive(Clone, Default)]
struct BurstGroup {
    distances: DistanceHistogram,
    /// Distinct lines of each burst, which are its first touches.
    line_counts: Vec<u64>,
}

/// The distances of a recording: exact, or estimated from bursts.
#[derive(Clone, PartialEq, Debug)]
pub struct MeasuredDistances {
    /// All recorded accesses by distance. Of bursts, those beyond the reach count as first touches.
    pub histogram: DistanceHistogram,
    /// Accesses that a limit of the memory keeps from being told apart, which count as first touches. If there are any, the
    /// number of distinct lines is unknown.
    pub beyond_count: u64,
    /// The estimate's reach and error; `None` if the distances are exact.
    pub bursts: Option<BurstSample>,
}

/// The reach and error of distances that are estimated from bursts.
#[derive(Clone, PartialEq, Debug)]
pub struct BurstSample {
    /// Lines of the largest burst: no larger cache has an estimate.
    pub reach_lines: u64,
    /// Number of bursts with records.
    pub count: usize,
    /// For each group, the estimate without it.
    leave_one_out: Vec<Survival>,
}

/// Share of accesses at this distance or beyond, for each distance at which it changes.
#[derive(Clone, PartialEq, Debug, Default)]
struct Survival {
    /// (distance in lines, share of accesses beyond it), ascending.
    steps: Vec<(u64, f64)>,
}

impl BurstDistances {
    /// Builds the analysis of bursts whose first records have these numbers, ascending.
    pub fn new(starts: &[u64]) -> Self {
        BurstDistances {
            next_bursts: starts.iter().rev().copied().collect(),
            record_count: 0,
            current_burst: StackDistances::new(),
            groups: Vec::new(),
            started_bursts: 0,
            bursts_per_group: starts.len().div_ceil(MAX_GROUPS).max(1),
        }
    }

    /// Processes the next lines, in order.
    ///
    /// # Errors
    /// More distinct lines than stack distances support.
    pub fn push(&mut self, mut lines: &[u64]) -> Result<(), StackError> {
        while let Some(&start) = self.next_bursts.last() {
            let records_until_start = start.saturating_sub(self.record_count);
            if records_until_start >= lines.len() as u64 {
                break;
            }
            let (burst_lines, next_burst_lines) = lines.split_at(records_until_start as usize);
            self.push_current(burst_lines)?;
            self.end_burst()?;
            self.next_bursts.pop();
            lines = next_burst_lines;
        }
        self.push_current(lines)
    }

    fn push_current(&mut self, lines: &[u64]) -> Result<(), StackError> {
        self.record_count += lines.len() as u64;
        self.current_burst.push(lines)
    }

    fn end_burst(&mut self) -> Result<(), StackError> {
        let histogram =
            std::mem::replace(&mut self.current_burst, StackDistances::new()).finish()?;
        if histogram.accesses() == 0 {
            return Ok(());
        }
        if self.started_bursts.is_multiple_of(self.bursts_per_group) {
            self.groups.push(BurstGroup::default());
        }
        self.started_bursts += 1;
        if let Some(group) = self.groups.last_mut() {
            group.line_counts.push(histogram.cold_count());
            group.distances.merge(&DistanceHistogram::new(
                0,
                histogram.counts().iter().copied(),
            ));
        }
        Ok(())
    }

    /// Ends the last burst and joins all of them.
    pub fn finish(mut self) -> Result<MeasuredDistances, StackError> {
        self.end_burst()?;
        let groups = self.groups;
        let survival = Survival::of_groups(&groups, None);
        let without_group = match groups.len() {
            0 | 1 => Vec::new(),
            count => (0..count)
                .map(|index| Survival::of_groups(&groups, Some(index)))
                .collect(),
        };
        let bursts = BurstSample {
            reach_lines: groups
                .iter()
                .flat_map(|group| &group.line_counts)
                .copied()
                .max()
                .unwrap_or(0),
            count: self.started_bursts,
            leave_one_out: without_group,
        };
        Ok(MeasuredDistances {
            histogram: survival.to_histogram(self.record_count),
            beyond_count: 0,
            bursts: Some(bursts),
        })
    }
}

impl From<DistanceHistogram> for MeasuredDistances {
    fn from(histogram: DistanceHistogram) -> Self {
        MeasuredDistances {
            histogram,
            beyond_count: 0,
            bursts: None,
        }
    }
}

impl From<SegmentDistances> for MeasuredDistances {
    fn from(distances: SegmentDistances) -> Self {
        MeasuredDistances {
            histogram: distances.histogram,
            beyond_count: distances.beyond_count,
            bursts: None,
        }
    }
}

impl Survival {
    /// Kaplan and Meier's product over all groups but one, as a jackknife needs it.
    fn of_groups(groups: &[BurstGroup], excluded_group: Option<usize>) -> Self {
        let mut distances = DistanceHistogram::default();
        let mut lines: Vec<u64> = Vec::new();
        for (_, group) in groups
            .iter()
            .enumerate()
            .filter(|(index, _)| Some(*index) != excluded_group)
        {
            distances.merge(&group.distances);
            lines.extend(&group.line_counts);
        }
        lines.sort_unstable();
        let mut exact_beyond = distances.accesses() as f64;
        // First touches of bursts with more lines than the distance, of which one each is censored at every distance below.
        let (mut first_touches, mut shorter_bursts) = (lines.iter().sum::<u64>() as f64, 0);
        let mut share = 1.0;
        let mut steps = Vec::with_capacity(distances.counts().len());
        for &(distance, count) in distances.counts() {
            while shorter_bursts < lines.len() && lines[shorter_bursts] <= distance {
                first_touches -= lines[shorter_bursts] as f64;
                shorter_bursts += 1;
            }
            let censored_beyond =
                first_touches - (lines.len() - shorter_bursts) as f64 * distance as f64;
            share *= 1.0 - count as f64 / (exact_beyond + censored_beyond);
            exact_beyond -= count as f64;
            steps.push((distance, share));
        }
        Survival { steps }
    }

    /// The curve stays at its last value beyond the reach of the bursts.
    fn miss_ratio(&self, lines: u64) -> f64 {
        let steps = self
            .steps
            .partition_point(|&(distance, _)| distance < lines);
        steps
            .checked_sub(1)
            .map_or(1.0, |index| self.steps[index].1)
    }

    /// A histogram with these shares, scaled to `accesses`.
    fn to_histogram(&self, accesses: u64) -> DistanceHistogram {
        let count_beyond = |share: f64| (share * accesses as f64).round() as u64;
        let mut remaining_count = accesses;
        let counts: Vec<(u64, u64)> = self
            .steps
            .iter()
            .map(|&(distance, share)| {
                let count = remaining_count - count_beyond(share).min(remaining_count);
                remaining_count -= count;
                (distance, count)
            })
            .collect();
        DistanceHistogram::new(remaining_count, counts)
    }
}

/// Refuses a recording whose bursts were not known when it was opened, because all of it was taken for one stretch.
///
/// # Errors
/// [`StudyError::LateBursts`].
pub fn refuse_late_bursts(known: &[u64], totals: Option<&TraceTotals>) -> Result<(), StudyError> {
    let has_bursts = totals.is_some_and(|totals| !totals.bursts.is_empty());
    if known.is_empty() && has_bursts {
        return Err(StudyError::LateBursts);
    }
    Ok(())
}

impl BurstSample {
    /// Half of the width of the 95 % interval; `None` with one group of bursts, which has no
    /// spread.
    pub fn miss_ratio_error(&self, lines: u64) -> Option<f64> {
        let group_count = self.leave_one_out.len();
        let student_t = group_count.checked_sub(2).map(|index| STUDENT_T[index])?;
        let ratios: Vec<f64> = self
            .leave_one_out
            .iter()
            .map(|survival| survival.miss_ratio(lines))
            .collect();
        let mean = ratios.iter().sum::<f64>() / group_count as f64;
        let squared_deviations: f64 = ratios
            .iter()
            .map(|ratio| (ratio - mean) * (ratio - mean))
            .sum();
        Some(
            student_t * (squared_deviations * (group_count - 1) as f64 / group_count as f64).sqrt(),
        )
    }
}

#[cfg(test)]
mod tests {
    use cachemate_core::SplitMix64;

    use super::*;

    /// Bursts of `length` accesses, one in ten, of a stream; with its exact curve.
    fn sample_bursts(
        stream: &[u64],
        length: usize,
    ) -> (DistanceHistogram, BurstSample, DistanceHistogram) {
        let bursts: Vec<&[u64]> = stream
            .chunks(10 * length)
            .map(|chunk| &chunk[..length.min(chunk.len())])
            .collect();
        let starts: Vec<u64> = (0..bursts.len())
            .map(|index| (index * length) as u64)
            .collect();
        let mut distances = BurstDistances::new(&starts);
        // Pieces that end between two bursts and within them.
        bursts
            .concat()
            .chunks(777)
            .for_each(|piece| distances.push(piece).unwrap());
        let mut exact = StackDistances::new();
        exact.push(stream).unwrap();
        let MeasuredDistances {
            histogram, bursts, ..
        } = distances.finish().unwrap();
        (histogram, bursts.unwrap(), exact.finish().unwrap())
    }

    /// Does the curve of bursts agree, within its stated error, with the exact one of independent references to lines of
    /// different popularity; and does a stitched recording not?
    #[test]
    fn bursts_give_the_curve_within_its_error() {
        let mut generator = SplitMix64::new(7);
        let stream: Vec<u64> = (0..1_000_000)
            .map(|_| {
                let range = 1 << generator.draw_below(13);
                generator.draw_below(range)
            })
            .collect();
        let (histogram, bursts, exact) = sample_bursts(&stream, 5_000);
        assert_eq!((bursts.count, histogram.accesses()), (20, 100_000));
        let sizes = [4, 16, 64, 256, 1024];
        assert!(bursts.reach_lines > 1024, "{}", bursts.reach_lines);
        let truth = exact.miss_ratio_curve(&sizes).unwrap();
        let estimate = histogram.miss_ratio_curve(&sizes).unwrap();
        for ((size, truth), estimate) in sizes.iter().zip(truth).zip(estimate) {
            let error = bursts.miss_ratio_error(*size).unwrap();
            assert!(
                (truth - estimate).abs() < 1.5 * error && error < 0.02,
                "{size}: {truth} {estimate} ±{error}"
            );
        }
    }

    /// Is a stream over more lines than a burst touches all misses up to the reach, although the recording returns to a line
    /// after a tenth of the lines?
    #[test]
    fn a_stream_has_no_hits_within_reach() {
        let stream: Vec<u64> = (0..20_000).cycle().take(400_000).collect();
        let (histogram, bursts, _) = sample_bursts(&stream, 1_000);
        assert_eq!(
            (bursts.reach_lines, histogram.misses_at(1_000)),
            (1_000, 40_000)
        );
    }

    /// Is the error unknown with one burst, and is no burst no curve?
    #[test]
    fn one_burst_has_no_stated_error() {
        let mut distances = BurstDistances::new(&[0]);
        distances.push(&[1, 2, 1, 2]).unwrap();
        let bursts = distances.finish().unwrap().bursts.unwrap();
        assert_eq!(
            (bursts.miss_ratio_error(2), bursts.count, bursts.reach_lines),
            (None, 1, 2)
        );
        let empty = BurstDistances::new(&[]).finish().unwrap();
        assert_eq!(
            (empty.histogram.accesses(), empty.bursts.unwrap().count),
            (0, 0)
        );
    }
}
