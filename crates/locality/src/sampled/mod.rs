//! Miss-rate curves with error bars from a sample of the lines: SHARDS.
//!
//! An access is sampled if and only if a hash of its line is below a threshold, so a line is either always or never
//! followed. If a share R of the lines is sampled, a distance d among the sampled ones stands for d / R among all, and
//! an access for 1 / R accesses (Waldspurger, Park, Garthwaite, Ahmad, "Efficient MRC construction with SHARDS", FAST
//! 2015). [`FixedRateSampler`] keeps R constant.
//!
//! It applies the published adjustment: the number of all accesses is known exactly, so the sample's surplus or deficit
//! (because a hot line is in it or not) is assigned to distance 0. In other words, misses are divided by the actual
//! number of accesses, not by the sampled one.
//!
//! **Error bars.** Further bits of the hash split the sample into [`GROUPS`] groups of lines. Each group is by itself a
//! SHARDS sample at R / 8, and gives its own curve with its own distances. Their standard deviation over the square
//! root of 8, times the square root of 1 - R (a sample of everything has no error), is the standard error of the curve.
//! The half-width of a 95 % interval is that times Student's 2.365 (7 degrees of freedom). It covers both the choice of
//! lines and the scaling of distances, separately for each size. At a cliff of the curve, the error is all or nothing,
//! so the interval is too short.

mod fixed_rate;
#[cfg(test)]
mod tests;

pub use fixed_rate::FixedRateSampler;

use crate::hash::scatter;

/// Number of groups of lines from which the error bars are computed.
pub const GROUPS: usize = 8;
/// Student's t for a two-sided 95 % interval with 7 degrees of freedom.
const STUDENT_T: f64 = 2.364_624;
/// Number of bits of a threshold, whose unit is 2^-24.
const HASH_BITS: u32 = 24;

/// By bits of the hash that the threshold does not use, so that a group is a random part of the sample.
fn group_of_line(line: u64, salt: u64) -> usize {
    (scatter(line ^ salt) as usize) % GROUPS
}

fn salt_from_seed(seed: u64) -> u64 {
    scatter(seed ^ 0x5A17)
}

/// One estimate of a curve, with accesses scaled up to the whole trace.
#[derive(Clone, PartialEq, Debug)]
struct CurveEstimate {
    /// Distances in lines, ascending.
    distances_lines: Vec<f64>,
    /// Misses of a cache that misses all accesses from the distance at the same index on, including cold misses. One
    /// additional entry at the end counts the cold misses alone.
    misses: Vec<f64>,
}

impl CurveEstimate {
    /// Builds a curve from ascending pairs of distance in lines and number of accesses.
    fn new(cold_count: f64, counts: impl DoubleEndedIterator<Item = (f64, f64)>) -> Self {
        let (mut distances_lines, mut misses) = (Vec::new(), vec![cold_count]);
        let mut miss_sum = cold_count;
        for (distance, count) in counts.rev() {
            miss_sum += count;
            distances_lines.push(distance);
            misses.push(miss_sum);
        }
        distances_lines.reverse();
        misses.reverse();
        CurveEstimate {
            distances_lines,
            misses,
        }
    }

    fn miss_ratio(&self, lines: u64, accesses: u64) -> f64 {
        let first_missed = self
            .distances_lines
            .partition_point(|&distance| distance < lines as f64);
        (self.misses[first_missed] / accesses as f64).min(1.0)
    }
}

/// A sampled miss ratio.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SampledPoint {
    /// Estimated misses per access, from 0 to 1.
    pub miss_ratio: f64,
    /// Half-width of the 95 % interval; `None` if a group has no lines.
    pub half_width: Option<f64>,
}

/// A miss-rate curve of a fully associative LRU cache, estimated from a sample.
#[derive(Clone, PartialEq, Debug)]
pub struct SampledCurve {
    accesses: u64,
    sampled_accesses: u64,
    sampled_lines: u64,
    rate: f64,
    whole_curve: CurveEstimate,
    /// Curves of the groups; empty if any group has no lines.
    groups: Vec<CurveEstimate>,
}

impl SampledCurve {
    /// Accesses pushed, sampled or not.
    pub fn accesses(&self) -> u64 {
        self.accesses
    }
    /// Those of the accesses that touch a sampled line.
    pub fn sampled_accesses(&self) -> u64 {
        self.sampled_accesses
    }
    /// Distinct sampled lines.
    pub fn sampled_lines(&self) -> u64 {
        self.sampled_lines
    }
    /// Share of the lines that were sampled, 0 to 1.
    pub fn rate(&self) -> f64 {
        self.rate
    }

    /// Estimated number of distinct lines of the whole stream, sampled or not.
    pub fn lines(&self) -> f64 {
        self.whole_curve.misses.last().copied().unwrap_or(0.0)
    }

    /// Estimate for a cache of this many lines; `None` if no access was sampled.
    pub fn find_point(&self, lines: u64) -> Option<SampledPoint> {
        if self.sampled_accesses == 0 {
            return None;
        }
        let miss_ratio = self.whole_curve.miss_ratio(lines, self.accesses);
        let half_width = (!self.groups.is_empty()).then(|| {
            let ratios: Vec<f64> = self
                .groups
                .iter()
                .map(|group| group.miss_ratio(lines, self.accesses))
                .collect();
            let count = ratios.len() as f64;
            let mean = ratios.iter().sum::<f64>() / count;
            let variance = ratios
                .iter()
                .map(|ratio| (ratio - mean) * (ratio - mean))
                .sum::<f64>()
                / (count - 1.0);
            STUDENT_T * (variance / count * (1.0 - self.rate)).sqrt()
        });
        Some(SampledPoint {
            miss_ratio,
            half_width,
        })
    }

    /// Mean and largest half-width over the given sizes. `None` if no size has an error interval.
    pub fn error_bar(&self, sizes_lines: &[u64]) -> Option<ErrorBar> {
        let half_widths: Option<Vec<f64>> = sizes_lines
            .iter()
            .map(|&size| self.find_point(size)?.half_width)
            .collect();
        let widths = half_widths.filter(|widths| !widths.is_empty())?;
        let max_half_width = widths.iter().copied().fold(0.0, f64::max);
        Some(ErrorBar {
            mean_half_width: widths.iter().sum::<f64>() / widths.len() as f64,
            greatest_half_width: max_half_width,
        })
    }
}

/// Error bar of a sampled curve: 95 % intervals, in miss ratio.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ErrorBar {
    /// Mean half-width over the requested sizes.
    pub mean_half_width: f64,
    /// Half-width at the worst of these sizes.
    pub greatest_half_width: f64,
}
