//! Compares the footprint test of Linux's cache-aware scheduling with a process' own miss-rate curve.
//!
//! Problem: the kernel (`SCHED_CACHE`, 7.2 and later) gathers the threads of a process on one cache unless the
//! process touches more memory than the cache holds. A process may touch far more memory than it reuses, however.
//! Method: touched memory is the number of first touches in the recording; reused memory is the size at which the
//! miss-rate curve has fallen. Properties: touched memory is a lower bound, because a recording may be shorter than
//! the run and lines are smaller than pages. If the curve's error interval contains the cache's size, there is no
//! verdict. Source: `exceed_llc_capacity` of Linux 7.2, kernel/sched/fair.c.

use cachemate_core::Estimate;
use cachemate_locality::curve::plateau_rate;
use cachemate_report::text::{format_number, format_size};
use cachemate_trace::{ProfileFile, StoredCurve};

use crate::whole_distances;

/// Multiple of the cache's size by which each step of the tolerance above 1 raises the kernel's limit.
const TOLERANCE_STEP: f64 = 256.0;
/// Tolerance from which the kernel skips the test; the largest tolerance with a test is one less.
const MIN_UNTESTED_TOLERANCE: u32 = 100;

/// The kernel's test and the curve's verdict, for one process on one cache.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct KernelFootprint {
    /// Size of the last-level cache.
    pub cache_bytes: u64,
    /// Lower bound of the memory that the process touches.
    pub touched_bytes: u64,
    /// Reused memory: estimate, and ends of its error interval. All are 0 if more space has no effect.
    pub used_again_bytes: [u64; 3],
    /// Whether the process passes the kernel's test at the default tolerance of 1, if the kernel counts footprints.
    pub passes_test: bool,
    /// Whether the reused memory fits the cache; `None` if the curve's error is too large, or no memory is reused.
    pub fits: Option<bool>,
    /// The smallest tolerance at which the kernel's test agrees with the curve; `None` if no tolerance does, or the
    /// curve gives no verdict.
    pub tolerance: Option<u32>,
}

impl KernelFootprint {
    /// `None` if the file lacks a curve of all threads, or stack distances without pauses.
    pub fn from_profile(file: &ProfileFile, cache_bytes: u64) -> Option<Self> {
        let histogram = whole_distances(file)?;
        let touched_bytes = histogram
            .cold
            .saturating_mul(u64::from(histogram.line_bytes));
        let curve = file
            .curves
            .iter()
            .find(|curve| curve.thread.is_none() && curve.points.len() >= 2)?;
        let used_again_bytes = reused_bytes(curve)?;
        let passes_test = touched_bytes <= cache_bytes;
        let [low, _, high] = used_again_bytes;
        let fits = match (low <= cache_bytes, high <= cache_bytes) {
            _ if high == 0 => None,
            (true, true) => Some(true),
            (false, false) => Some(false),
            _ => None,
        };
        let tolerance = match fits {
            Some(true) => min_passing_tolerance(touched_bytes, cache_bytes),
            Some(false) if !passes_test => Some(1),
            _ => None,
        };
        Some(KernelFootprint {
            cache_bytes,
            touched_bytes,
            used_again_bytes,
            passes_test,
            fits,
            tolerance,
        })
    }

    /// False also if the curve does not tell whether the program fits.
    pub fn is_misjudged(&self) -> bool {
        self.fits.is_some_and(|fits| fits != self.passes_test)
    }
}

fn min_passing_tolerance(touched_bytes: u64, cache_bytes: u64) -> Option<u32> {
    let excess = touched_bytes as f64 / cache_bytes.max(1) as f64 - 1.0;
    let steps = (excess.max(0.0) / TOLERANCE_STEP).ceil();
    (steps < f64::from(MIN_UNTESTED_TOLERANCE - 1)).then(|| 1 + steps as u32)
}

/// Size at which the curve has fallen, and the ends of its error interval.
fn reused_bytes(curve: &StoredCurve) -> Option<[u64; 3]> {
    let (first_ratio, last_ratio) = (
        curve.points.first()?.miss_ratio.value,
        curve.points.last()?.miss_ratio.value,
    );
    let Some(plateau) = plateau_rate(first_ratio, last_ratio) else {
        return Some([0; 3]);
    };
    let largest_bytes = curve.points.last()?.size_bytes;
    let knee_bytes_of = |value: fn(&Estimate) -> f64| {
        curve
            .points
            .iter()
            .find(|point| value(&point.miss_ratio) <= plateau)
            .map_or(largest_bytes, |point| point.size_bytes)
    };
    Some([
        knee_bytes_of(|rate| rate.low),
        knee_bytes_of(|rate| rate.value),
        knee_bytes_of(|rate| rate.high),
    ])
}

impl std::fmt::Display for KernelFootprint {
    /// Writes a sentence or two; the caller names the program.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let touched_mib = format_number(self.touched_bytes as f64 / 1_048_576.0);
        let cache_text = format_size(self.cache_bytes);
        let [low, estimate, high] = self.used_again_bytes;
        write!(f, "touches {touched_mib} MiB at least")?;
        match (high, low == high) {
            (0, _) => write!(f, " and uses nothing again")?,
            (_, true) => write!(f, " and uses {} again", format_size(estimate))?,
            (_, false) => write!(
                f,
                " and uses {} again ({} to {})",
                format_size(estimate),
                format_size(low),
                format_size(high)
            )?,
        }
        let verb = if self.passes_test { "passes" } else { "fails" };
        write!(
            f,
            ": it {verb} the kernel's footprint test for {cache_text}"
        )?;
        match (self.fits, self.is_misjudged(), self.tolerance) {
            (None, ..) => write!(f, "; its curve does not tell whether that is right"),
            (Some(true), true, Some(tolerance)) => {
                write!(
                    f,
                    ", though the cache holds what it uses again; tolerance {tolerance} would let it pass"
                )
            }
            (Some(true), true, None) => {
                write!(
                    f,
                    ", though the cache holds what it uses again; only a tolerance of {MIN_UNTESTED_TOLERANCE} would let it pass"
                )
            }
            (Some(false), true, _) => {
                write!(f, ", though the cache does not hold what it uses again")
            }
            (Some(_), false, _) => write!(f, ", as it should by its curve"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_trace::{ProfileSource, StoredCurvePoint, StoredHistogram};

    const MIB: u64 = 1 << 20;

    /// A process with this touched memory, whose miss ratio falls from 1 to 0.1 at `knee_bytes`, within `error`.
    fn process_fixture(touched_bytes: u64, knee_bytes: u64, error: f64) -> ProfileFile {
        let footprint_at = |size_bytes: u64| {
            let value = if size_bytes < knee_bytes { 1.0 } else { 0.1 };
            let miss_ratio = Estimate {
                value,
                low: value - error,
                high: value + error,
            };
            StoredCurvePoint {
                size_bytes,
                miss_ratio,
                misses_per_kilo_instr: None,
            }
        };
        let points = (0..10).map(|power| footprint_at(MIB << power)).collect();
        let curve = StoredCurve {
            policy: "lru".into(),
            method: "sampled".into(),
            line_bytes: 64,
            thread: None,
            points,
        };
        let cold = touched_bytes / 64;
        let histogram = StoredHistogram {
            kind: "stack-distance".into(),
            line_bytes: 64,
            cold,
            buckets: Vec::new(),
        };
        ProfileFile {
            curves: vec![curve],
            histograms: vec![histogram],
            ..ProfileFile::new("p", ProfileSource::default())
        }
    }

    /// Is a large process with a small reused part distinguished from one that the cache cannot hold?
    #[test]
    fn a_large_process_with_a_small_reused_part_is_distinguished() {
        let judged = |touched, knee, cache| {
            KernelFootprint::from_profile(&process_fixture(touched, knee, 0.0), cache).unwrap()
        };
        let large = judged(512 * MIB, 4 * MIB, 32 * MIB);
        assert_eq!(
            (large.passes_test, large.fits, large.is_misjudged()),
            (false, Some(true), true)
        );
        assert_eq!(
            (large.used_again_bytes, large.tolerance),
            ([4 * MIB; 3], Some(2))
        );
        let small = judged(16 * MIB, 8 * MIB, 32 * MIB);
        assert_eq!(
            (
                small.passes_test,
                small.fits,
                small.is_misjudged(),
                small.tolerance
            ),
            (true, Some(true), false, Some(1))
        );
        let wide = judged(512 * MIB, 256 * MIB, 32 * MIB);
        assert_eq!(
            (
                wide.passes_test,
                wide.fits,
                wide.is_misjudged(),
                wide.tolerance
            ),
            (false, Some(false), false, Some(1))
        );
    }

    /// Does a tolerance let a process pass exactly when the kernel's limit at it is not below what the process touches?
    #[test]
    fn the_tolerance_is_the_smallest_that_passes() {
        let cache = MIB;
        for touched in [
            1,
            cache,
            cache + 1,
            257 * cache,
            257 * cache + 1,
            5_000 * cache,
        ] {
            let tolerance = min_passing_tolerance(touched, cache).unwrap();
            let limit = |tolerance: u32| cache as f64 * (1.0 + f64::from(tolerance - 1) * 256.0);
            assert!(touched as f64 <= limit(tolerance), "{touched}");
            assert!(
                tolerance == 1 || touched as f64 > limit(tolerance - 1),
                "{touched}"
            );
        }
        assert_eq!(min_passing_tolerance(u64::MAX, cache), None);
    }

    /// Is there no verdict if the curve's error spans the cache, and no reused memory for a stream?
    #[test]
    fn a_curve_error_that_spans_the_cache_gives_no_verdict() {
        let unsure =
            KernelFootprint::from_profile(&process_fixture(512 * MIB, 32 * MIB, 0.9), 32 * MIB)
                .unwrap();
        assert_eq!(
            (unsure.fits, unsure.is_misjudged(), unsure.tolerance),
            (None, false, None),
            "{unsure:?}"
        );
        let stream =
            KernelFootprint::from_profile(&process_fixture(512 * MIB, u64::MAX, 0.0), 32 * MIB)
                .unwrap();
        assert_eq!(
            (stream.used_again_bytes, stream.fits, stream.is_misjudged()),
            ([0; 3], None, false)
        );
        assert_eq!(
            KernelFootprint::from_profile(&ProfileFile::new("p", ProfileSource::default()), MIB),
            None,
            "nothing was measured"
        );
    }
}
