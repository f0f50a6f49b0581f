//! StatStack: the miss ratio of an LRU cache, from sampled reuse times (Eklov and Hagersten 2010; papers BS 1).
//!
//! Problem: the misses of an LRU cache depend on the number of distinct lines between two touches (the stack distance),
//! but samples contain only the number of accesses between them. Method: count each access in between whose line is not
//! touched again before the window ends, because it is the last touch of a distinct line. The access that lies j
//! accesses before the end is one of them with probability P(T > j), where T is the reuse time of any access. A window
//! of x accesses therefore contains, in expectation,
//!
//! lines(x) = Σ_{j = 0 .. x − 1} P(T > j)
//!
//! distinct lines: the footprint of a window. Reuse time t becomes stack distance lines(t), and a cache of L lines
//! misses if and only if that is L or more. The sum starts at j = 0 because stack distance here counts the *other*
//! lines in between (immediate repeat = 0): a cycle through W lines has t = W − 1 and must give W − 1.
//!
//! Properties: lines(x) is continuous, increasing and concave; its inverse is the time that a program takes to fill a
//! cache, which the composition of several programs requires ([`crate::statcc`]).

use crate::reuse::ReuseTimes;

/// A range of times over which P(T >= x) falls evenly.
#[derive(Clone, Copy, Debug)]
struct SurvivalSegment {
    /// First time of the range, and number of times in it.
    start: f64,
    length: f64,
    /// P(T >= start), and the part of this probability that ends within the segment.
    survival: f64,
    ending_share: f64,
    /// Expected number of distinct lines in a window of `start` accesses.
    lines: f64,
}

impl SurvivalSegment {
    fn expected_lines(&self, offset: f64) -> f64 {
        self.lines + offset * self.survival
            - 0.5 * self.ending_share / self.length * offset * (offset + 1.0)
    }
}

/// The footprint of one program, prepared for queries. Probabilities are fractions of accesses, footprints are in
/// lines, and times are in accesses.
#[derive(Clone, Debug)]
pub struct StackModel {
    segments: Vec<SurvivalSegment>,
    /// First time after all observed reuse times, and the number of lines touched by then.
    end_time: f64,
    lines_at_end: f64,
    cold_share: f64,
}

impl StackModel {
    /// Builds the footprint from reuse times; `None` without samples.
    pub fn new(reuse: &ReuseTimes) -> Option<Self> {
        let samples = reuse.samples();
        if samples <= 0.0 {
            return None;
        }
        let (mut survival, mut lines, mut end_time) = (1.0, 0.0, 0.0);
        let mut segments = Vec::new();
        for bucket in reuse.all_buckets() {
            let length = (bucket.high - bucket.low) as f64 + 1.0;
            let segment = SurvivalSegment {
                start: bucket.low as f64,
                length,
                survival,
                ending_share: bucket.weight / samples,
                lines,
            };
            lines = segment.expected_lines(length);
            survival = (survival - segment.ending_share).max(0.0);
            end_time = segment.start + length;
            segments.push(segment);
        }
        Some(StackModel {
            segments,
            end_time,
            lines_at_end: lines,
            cold_share: reuse.unreused_samples() / samples,
        })
    }

    /// Expected number of distinct lines in a window of `accesses`.
    pub fn lines_in(&self, accesses: f64) -> f64 {
        if accesses >= self.end_time {
            return self.lines_at_end + (accesses - self.end_time) * self.cold_share;
        }
        let index = self
            .segments
            .partition_point(|segment| segment.start <= accesses)
            - 1;
        self.segments[index].expected_lines(accesses - self.segments[index].start)
    }

    /// Number of accesses until this many distinct lines have been touched; `None` if the program never touches that
    /// many.
    pub fn accesses_to_touch(&self, lines: f64) -> Option<f64> {
        // Sums of probabilities are rounded, but a cycle through 100 lines must count as touching 100 - 1 others.
        if lines > self.lines_at_end + 1e-9 * (1.0 + lines) {
            return (self.cold_share > 0.0)
                .then(|| self.end_time + (lines - self.lines_at_end) / self.cold_share);
        }
        let index = self
            .segments
            .partition_point(|segment| segment.lines <= lines)
            .saturating_sub(1);
        let segment = self.segments.get(index)?;
        // Smaller root of surviving·k − ending/(2·length)·(k² + k) = missing, in the form that avoids cancellation.
        let further_lines = lines - segment.lines;
        let curvature = 0.5 * segment.ending_share / segment.length;
        let initial_slope = segment.survival - curvature;
        let discriminant_root = (initial_slope * initial_slope - 4.0 * curvature * further_lines)
            .max(0.0)
            .sqrt();
        let offset = if further_lines <= 0.0 {
            0.0
        } else {
            2.0 * further_lines / (initial_slope + discriminant_root)
        };
        Some(segment.start + offset.min(segment.length))
    }

    /// Distinct lines that the program ever touches, as far as the samples show; infinite if some samples never
    /// recurred.
    pub fn max_lines(&self) -> f64 {
        if self.cold_share > 0.0 {
            f64::INFINITY
        } else {
            self.lines_at_end
        }
    }

    /// Number of accesses after which no sample recurred any more.
    pub fn max_reuse_time(&self) -> f64 {
        self.end_time
    }

    /// Fraction of accesses whose line recurs only after at least `accesses` others, or never.
    pub fn late_reuse_fraction(&self, accesses: f64) -> f64 {
        // Times are integers; this is the first one that is at least `accesses`, with a tolerance for earlier rounding.
        let first_time = (accesses * (1.0 - 1e-12) - 1e-9).ceil().max(0.0);
        if first_time >= self.end_time {
            return self.cold_share;
        }
        let index = self
            .segments
            .partition_point(|segment| segment.start <= first_time)
            - 1;
        let segment = &self.segments[index];
        segment.survival - segment.ending_share * (first_time - segment.start) / segment.length
    }

    /// Miss ratio, 0 to 1, of an LRU cache of `lines` lines that the program has to itself.
    pub fn miss_ratio(&self, lines: u64) -> f64 {
        self.miss_ratio_at(lines as f64)
    }

    /// Like [`Self::miss_ratio`], for a fractional number of lines, such as an expected share.
    pub fn miss_ratio_at(&self, lines: f64) -> f64 {
        self.accesses_to_touch(lines)
            .map_or(self.cold_share, |fill| self.late_reuse_fraction(fill))
    }
}

/// Miss ratio (0 to 1, of the sampled accesses) of a program alone on a fully associative LRU cache of `lines` lines.
/// `None` without samples or lines.
pub fn miss_ratio(reuse: &ReuseTimes, lines: u64) -> Option<f64> {
    StackModel::new(reuse)
        .filter(|_| lines > 0)
        .map(|model| model.miss_ratio(lines))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reuse::ReuseSampler;
    use cachemate_core::SplitMix64;
    use proptest::prelude::*;

    fn all_reuses(lines: &[u64]) -> ReuseTimes {
        let mut sampler = ReuseSampler::new(1, 0);
        lines.iter().for_each(|&line| sampler.touch(line));
        sampler.finish()
    }

    /// Fraction of accesses with a stack distance of `size` or more, including cold ones, computed as directly as
    /// possible.
    fn lru_miss_ratio(lines: &[u64], size: usize) -> f64 {
        let (mut stack, mut misses): (Vec<u64>, u64) = (Vec::new(), 0);
        for &line in lines {
            match stack.iter().rposition(|&stored_line| stored_line == line) {
                Some(position) => {
                    misses += u64::from(stack.len() - 1 - position >= size);
                    stack.remove(position);
                }
                None => misses += 1,
            }
            stack.push(line);
        }
        misses as f64 / lines.len() as f64
    }

    /// Does a cycle through W lines miss always below W lines and never from W on, exactly?
    #[test]
    fn a_cycle_always_misses_exactly_below_its_number_of_lines() {
        for cycle in [2u64, 7, 15] {
            let mut reuse = ReuseTimes::new();
            reuse.add_weighted(Some(cycle - 1), 500.0);
            for lines in 1..2 * cycle {
                let expected = if lines < cycle { 1.0 } else { 0.0 };
                assert_eq!(
                    miss_ratio(&reuse, lines),
                    Some(expected),
                    "{cycle} lines, cache of {lines}"
                );
            }
        }
    }

    /// Does the model agree with exact LRU stack distances on patterns of different shape, within 2 points?
    #[test]
    fn agrees_with_exact_stack_distances() {
        let mut random = SplitMix64::new(23);
        let skewed: Vec<u64> = (0..40_000)
            .map(|_| random.draw_below(400) * random.draw_below(400) / 400)
            .collect();
        let uniform: Vec<u64> = (0..40_000).map(|_| random.draw_below(150)).collect();
        let chase: Vec<u64> = (0..40_000).map(|index| (index * 37) % 301).collect();
        let hot_and_stream: Vec<u64> = (0..40_000u64)
            .map(|index| {
                if index.is_multiple_of(4) {
                    1000 + index
                } else {
                    random.draw_below(60)
                }
            })
            .collect();
        for (name, stream) in [
            ("skewed", skewed),
            ("uniform", uniform),
            ("chase", chase),
            ("hot and stream", hot_and_stream),
        ] {
            let model = StackModel::new(&all_reuses(&stream)).unwrap();
            for size in [16, 40, 80, 120, 250, 350] {
                let (guess, real) = (
                    model.miss_ratio(size),
                    lru_miss_ratio(&stream, size as usize),
                );
                assert!(
                    (guess - real).abs() < 0.02,
                    "{name}, {size} lines: model {guess:.3}, exact {real:.3}"
                );
            }
        }
    }

    proptest! {
        /// Is the time to fill a cache the inverse of the footprint?
        #[test]
        fn the_fill_time_is_the_inverse_of_the_footprint(
            times in prop::collection::vec((0u64..50_000, 1u32..50), 1..30),
            never in 0u32..20,
            share in 0.01f64..0.99,
        ) {
            let mut reuse = ReuseTimes::new();
            times.iter().for_each(|&(time, weight)| reuse.add_weighted(Some(time), f64::from(weight)));
            reuse.add_weighted(None, f64::from(never));
            let model = StackModel::new(&reuse).unwrap();
            let lines = share * model.lines_at_end;
            let accesses = model.accesses_to_touch(lines).unwrap();
            prop_assert!((model.lines_in(accesses) - lines).abs() < 1e-6 * (1.0 + lines));
        }

        /// Does a larger cache never miss more, and never less than the samples that never recurred?
        #[test]
        fn a_larger_cache_misses_no_more(
            times in prop::collection::vec((0u64..10_000, 1u32..50), 1..30),
            lines in 1u64..4000,
        ) {
            let mut reuse = ReuseTimes::new();
            times.iter().for_each(|&(time, weight)| reuse.add_weighted(Some(time), f64::from(weight)));
            reuse.add(None);
            let model = StackModel::new(&reuse).unwrap();
            prop_assert!(model.miss_ratio(lines + 1) <= model.miss_ratio(lines) + 1e-12);
            prop_assert!(model.miss_ratio(lines) >= model.cold_share - 1e-12);
        }
    }
}
