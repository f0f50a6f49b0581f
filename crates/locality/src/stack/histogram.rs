//! Histograms of stack distances.

use std::fmt;
use std::str::FromStr;

/// Number of accesses at each stack distance, with cold accesses (first touches) counted separately.
///
/// One histogram determines a whole miss-rate curve: a fully associative LRU cache of `s` lines misses the cold
/// accesses and those at distance `s` or more. The text form is a line `cold N`, then a line `d count` for every
/// distance that occurs, in ascending order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DistanceHistogram {
    cold_count: u64,
    /// Pairs of distance in lines and number of accesses, ascending by distance and without zero counts.
    counts: Vec<(u64, u64)>,
}

impl DistanceHistogram {
    /// Builds a histogram from counts in any order; counts of equal distances are added, zero counts are dropped.
    pub fn new(cold_count: u64, counts: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let mut counts: Vec<(u64, u64)> =
            counts.into_iter().filter(|&(_, count)| count > 0).collect();
        if !counts.is_sorted_by(|a, b| a.0 < b.0) {
            counts.sort_unstable();
            counts.dedup_by(|next, previous| {
                let is_same_distance = next.0 == previous.0;
                if is_same_distance {
                    previous.1 += next.1;
                }
                is_same_distance
            });
        }
        DistanceHistogram { cold_count, counts }
    }

    /// First touches, of which there are as many as distinct lines.
    pub fn cold_count(&self) -> u64 {
        self.cold_count
    }

    /// Pairs of distance in lines and number of accesses, for every distance that occurs, ascending.
    pub fn counts(&self) -> &[(u64, u64)] {
        &self.counts
    }

    /// First touches included.
    pub fn accesses(&self) -> u64 {
        self.cold_count + self.counts.iter().map(|&(_, count)| count).sum::<u64>()
    }

    /// Misses of a fully associative LRU cache of `lines` lines, first touches included.
    pub fn misses_at(&self, lines: u64) -> u64 {
        let first_missed = self
            .counts
            .partition_point(|&(distance, _)| distance < lines);
        self.cold_count
            + self.counts[first_missed..]
                .iter()
                .map(|&(_, count)| count)
                .sum::<u64>()
    }

    /// Miss ratio at each size, in the order of `sizes_lines`; `None` if there are no accesses. The histogram is read
    /// once, whatever the number of sizes.
    pub fn miss_ratio_curve(&self, sizes_lines: &[u64]) -> Option<Vec<f64>> {
        let accesses = self.accesses();
        if accesses == 0 {
            return None;
        }
        let mut order: Vec<usize> = (0..sizes_lines.len()).collect();
        order.sort_unstable_by_key(|&index| sizes_lines[index]);
        let mut curve = vec![0.0; sizes_lines.len()];
        let (mut misses, mut next_index) = (accesses, 0);
        for slot in order {
            while next_index < self.counts.len() && self.counts[next_index].0 < sizes_lines[slot] {
                misses -= self.counts[next_index].1;
                next_index += 1;
            }
            curve[slot] = misses as f64 / accesses as f64;
        }
        Some(curve)
    }

    /// Adds the accesses of another histogram, for parts of a trace that did not share a cache, such as threads on
    /// private caches.
    pub fn merge(&mut self, other: &DistanceHistogram) {
        let mut merged_counts = Vec::with_capacity(self.counts.len().max(other.counts.len()));
        let (mut own_counts, mut other_counts) = (
            self.counts.iter().copied().peekable(),
            other.counts.iter().copied().peekable(),
        );
        loop {
            let next_count = match (own_counts.peek(), other_counts.peek()) {
                (Some(a), Some(b)) if a.0 == b.0 => (a.0, a.1 + b.1),
                (Some(a), Some(b)) => *if a.0 < b.0 { a } else { b },
                (Some(a), None) => *a,
                (None, Some(b)) => *b,
                (None, None) => break,
            };
            own_counts.next_if(|a| a.0 == next_count.0);
            other_counts.next_if(|b| b.0 == next_count.0);
            merged_counts.push(next_count);
        }
        self.cold_count += other.cold_count;
        self.counts = merged_counts;
    }
}

impl fmt::Display for DistanceHistogram {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "cold {}", self.cold_count)?;
        self.counts
            .iter()
            .try_for_each(|(distance, count)| writeln!(out, "{distance} {count}"))
    }
}

/// The error for a text form that cannot be parsed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("histogram line {line}: found '{found}', expected {expected}")]
pub struct ParseHistogramError {
    /// Line number, from 1.
    pub line: usize,
    /// The first 80 characters of the line.
    pub found: String,
    /// Description of the valid values.
    pub expected: &'static str,
}

impl FromStr for DistanceHistogram {
    type Err = ParseHistogramError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let histogram_error = |line: usize, found: &str, expected| {
            Err(ParseHistogramError {
                line,
                found: found.chars().take(80).collect(),
                expected,
            })
        };
        let mut lines = text.lines().enumerate();
        let first_line = lines.next().map_or("", |(_, head)| head);
        let Some(cold) = first_line
            .strip_prefix("cold ")
            .and_then(|cold| cold.parse().ok())
        else {
            return histogram_error(1, first_line, "'cold' and a count");
        };
        let (mut counts, mut access_count): (Vec<(u64, u64)>, u64) = (Vec::new(), cold);
        for (index, line) in lines {
            let pair = line
                .split_once(' ')
                .and_then(|(d, count)| Some((d.parse().ok()?, count.parse().ok()?)));
            let Some((distance, count)) = pair.filter(|&(_, count)| count > 0) else {
                return histogram_error(index + 1, line, "a distance and a count above 0");
            };
            if counts
                .last()
                .is_some_and(|&(previous_distance, _)| previous_distance >= distance)
            {
                return histogram_error(index + 1, line, "distances in ascending order");
            }
            let Some(sum) = access_count.checked_add(count) else {
                return histogram_error(index + 1, line, "counts that add up to less than 2^64");
            };
            access_count = sum;
            counts.push((distance, count));
        }
        Ok(DistanceHistogram {
            cold_count: cold,
            counts,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_histogram() -> impl Strategy<Value = DistanceHistogram> {
        (
            0u64..1000,
            prop::collection::vec((0u64..50, 0u64..9), 0..40),
        )
            .prop_map(|(cold, counts)| DistanceHistogram::new(cold, counts))
    }

    /// Does the text form look as documented?
    #[test]
    fn text_form_is_cold_then_ascending_distances() {
        let histogram = DistanceHistogram::new(3, [(7, 1), (0, 2), (7, 4), (9, 0)]);
        assert_eq!(histogram.to_string(), "cold 3\n0 2\n7 5\n");
    }

    /// Is a damaged text rejected with the line number, the value found and the values expected?
    #[test]
    fn damaged_text_is_rejected_with_the_line() {
        let error_text = |text: &str| text.parse::<DistanceHistogram>().unwrap_err().to_string();
        assert_eq!(
            error_text(""),
            "histogram line 1: found '', expected 'cold' and a count"
        );
        assert_eq!(
            error_text("cold 1\n3 x\n"),
            "histogram line 2: found '3 x', expected a distance and a count above 0"
        );
        assert_eq!(
            error_text("cold 1\n3 1\n3 2\n"),
            "histogram line 3: found '3 2', expected distances in ascending order"
        );
        assert!(error_text(&format!("cold 1\n3 {}\n", u64::MAX)).contains("less than 2^64"));
    }

    proptest! {
        /// Does parsing the text form restore the same histogram?
        #[test]
        fn text_form_reads_back(histogram in any_histogram()) {
            prop_assert_eq!(histogram.to_string().parse::<DistanceHistogram>().unwrap(), histogram);
        }

        /// Does merging give the same result as counting everything into one histogram?
        #[test]
        fn merging_equals_counting_into_one_histogram(a in any_histogram(), b in any_histogram()) {
            let expected = DistanceHistogram::new(a.cold_count + b.cold_count, a.counts.iter().chain(&b.counts).copied());
            let mut merged = a.clone();
            merged.merge(&b);
            prop_assert_eq!(merged, expected);
        }

        /// Does the curve agree with the misses at each size, whatever the order of the sizes?
        #[test]
        fn curve_agrees_with_misses(histogram in any_histogram(), sizes in prop::collection::vec(0u64..60, 0..9)) {
            let accesses = histogram.accesses();
            match histogram.miss_ratio_curve(&sizes) {
                None => prop_assert_eq!(accesses, 0),
                Some(curve) => for (size, ratio) in sizes.iter().zip(curve) {
                    prop_assert_eq!(ratio, histogram.misses_at(*size) as f64 / accesses as f64);
                },
            }
        }
    }
}
