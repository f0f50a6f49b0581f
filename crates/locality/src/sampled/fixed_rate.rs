//! SHARDS at a fixed rate, which runs the exact engine on a fixed share of the lines.

use cachemate_core::FieldError;

use super::{CurveEstimate, GROUPS, HASH_BITS, SampledCurve, group_of_line, salt_from_seed};
use crate::simd::{Lanes, Simd, dispatch};
use crate::stack::{DistanceHistogram, Segment, SegmentMeter, StackError};

/// Number of accesses that are filtered together.
const CHUNK_ACCESSES: usize = 4096;

/// A sampler of a fixed share of the lines; its memory is proportional to the number of sampled lines.
#[derive(Debug)]
pub struct FixedRateSampler {
    simd: Simd,
    salt: u64,
    threshold: u64,
    accesses: u64,
    distances: Segment,
    group_distances: Vec<Segment>,
    sampled_lines: Vec<u64>,
    lines_by_group: [Vec<u64>; GROUPS],
}

impl FixedRateSampler {
    /// Builds a sampler. `rate` is the share of lines to sample, rounded to a multiple of 2^-24.
    ///
    /// # Errors
    /// The rate is below 2^-25, which rounds to 0, or above 1.
    pub fn new(rate: f64, seed: u64) -> Result<Self, FieldError> {
        FixedRateSampler::with_simd(rate, seed, Simd::detect_best())
    }

    /// Like [`Self::new`], but with the given vector instructions, which do not affect the result.
    pub fn with_simd(rate: f64, seed: u64, simd: Simd) -> Result<Self, FieldError> {
        let threshold = (rate * f64::from(1 << HASH_BITS)).round();
        if !(threshold >= 1.0 && rate <= 1.0) {
            return Err(FieldError::new(
                "sample rate",
                rate,
                "a share above 2^-25 and up to 1",
            ));
        }
        Ok(FixedRateSampler {
            simd,
            salt: salt_from_seed(seed),
            threshold: threshold as u64,
            accesses: 0,
            distances: Segment::with_simd(simd),
            group_distances: (0..GROUPS).map(|_| Segment::with_simd(simd)).collect(),
            sampled_lines: vec![0; CHUNK_ACCESSES],
            lines_by_group: Default::default(),
        })
    }

    /// Adds the next accesses, as line addresses.
    ///
    /// # Errors
    /// The sample contains more than 2^31 distinct lines.
    pub fn push(&mut self, lines: &[u64]) -> Result<(), StackError> {
        for chunk in lines.chunks(CHUNK_ACCESSES) {
            self.accesses += chunk.len() as u64;
            let (simd, salt, threshold, retained_lines) = (
                self.simd,
                self.salt,
                self.threshold,
                &mut self.sampled_lines[..],
            );
            let retained_count = dispatch!(simd, filter_lines(
                chunk: &[u64], salt: u64, threshold: u64, retained_lines: &mut [u64]
            ) -> usize);
            let retained_lines = &self.sampled_lines[..retained_count];
            self.distances.push(retained_lines)?;
            retained_lines
                .iter()
                .for_each(|&line| self.lines_by_group[group_of_line(line, salt)].push(line));
            for (group, lines) in self
                .group_distances
                .iter_mut()
                .zip(&mut self.lines_by_group)
            {
                if lines.len() >= CHUNK_ACCESSES / GROUPS {
                    group.push(lines)?;
                    lines.clear();
                }
            }
        }
        Ok(())
    }

    /// Adds the accesses of `next`, a sampler with the same rate and seed, which follow those of this one, on up to
    /// this number of threads.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn merge(&mut self, mut next: FixedRateSampler, threads: usize) -> Result<(), StackError> {
        self.flush_groups()?;
        next.flush_groups()?;
        self.accesses += next.accesses;
        self.distances.merge(next.distances, threads)?;
        for (group, next_group) in self.group_distances.iter_mut().zip(next.group_distances) {
            group.merge(next_group, threads)?;
        }
        Ok(())
    }

    /// Passes the sampled lines that wait to their groups.
    fn flush_groups(&mut self) -> Result<(), StackError> {
        for (group, lines) in self
            .group_distances
            .iter_mut()
            .zip(&mut self.lines_by_group)
        {
            group.push(lines)?;
            lines.clear();
        }
        Ok(())
    }

    /// The curve estimated from all accesses, without error intervals if one of the groups has no sampled line.
    pub fn finish(mut self) -> Result<SampledCurve, StackError> {
        self.flush_groups()?;
        let rate = self.threshold as f64 / f64::from(1 << HASH_BITS);
        let histogram = self.distances.finish()?.histogram;
        let mut groups = Vec::with_capacity(GROUPS);
        for group in self.group_distances {
            groups.push(group.finish()?.histogram);
        }
        if groups.iter().any(|group| group.cold_count() == 0) {
            groups.clear();
        }
        Ok(SampledCurve {
            accesses: self.accesses,
            sampled_accesses: histogram.accesses(),
            sampled_lines: histogram.cold_count(),
            rate,
            groups: groups
                .iter()
                .map(|group| scale(group, rate / GROUPS as f64))
                .collect(),
            whole_curve: scale(&histogram, rate),
        })
    }
}

impl SegmentMeter for FixedRateSampler {
    type Access = u64;
    fn push(&mut self, lines: &[u64]) -> Result<(), StackError> {
        FixedRateSampler::push(self, lines)
    }
    fn merge(&mut self, next: Self, threads: usize) -> Result<(), StackError> {
        FixedRateSampler::merge(self, next, threads)
    }
    fn line_count(&self) -> usize {
        self.distances.line_count()
    }
}

/// Scales the sample's histogram up to the whole trace.
fn scale(histogram: &DistanceHistogram, rate: f64) -> CurveEstimate {
    let counts = histogram
        .counts()
        .iter()
        .map(|&(distance, count)| (distance as f64 / rate, count as f64 / rate));
    CurveEstimate::new(histogram.cold_count() as f64 / rate, counts)
}

#[inline(always)]
unsafe fn filter_lines<L: Lanes>(
    lines: &[u64],
    salt: u64,
    threshold: u64,
    retained: &mut [u64],
) -> usize {
    // SAFETY: the caller guarantees that the processor has `L`.
    unsafe { L::filter(lines, salt, threshold, retained, 0) }
}
