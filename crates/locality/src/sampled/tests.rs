//! Compares sampled curves with exact ones.

use super::*;
use crate::simd::Simd;
use crate::stack::{DistanceHistogram, StackDistances};
use cachemate_core::SplitMix64;
use proptest::prelude::*;

fn exact_histogram(lines: &[u64]) -> DistanceHistogram {
    let mut engine = StackDistances::new();
    engine.push(lines).unwrap();
    engine.finish().unwrap()
}

/// Accesses to popular and rare lines, whose popularity falls with a power of the rank, with an occasional loop. Their
/// miss-rate curve is smooth.
fn skewed_lines(len: usize, lines: u64, seed: u64) -> Vec<u64> {
    let mut random = SplitMix64::new(seed);
    (0..len)
        .map(|_| {
            let unit = (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
            let rank = (libm::pow(lines as f64, unit) - 1.0) as u64;
            // Neighboring ranks are not neighbors in memory.
            rank * 7919 % lines
        })
        .collect()
}

fn fixed_rate(rate: f64, seed: u64, lines: &[u64]) -> SampledCurve {
    let mut sample = FixedRateSampler::new(rate, seed).unwrap();
    sample.push(lines).unwrap();
    sample.finish().unwrap()
}

/// Measures the thirds of a trace by samplers of their own, and merges them from the last to the first.
fn fixed_rate_in_segments(rate: f64, seed: u64, lines: &[u64]) -> SampledCurve {
    let third = lines.len() / 3;
    let parts = [
        &lines[..third],
        &lines[third..2 * third],
        &lines[2 * third..],
    ];
    let [mut first, mut second, third] = parts.map(|lines| {
        let mut sample = FixedRateSampler::new(rate, seed).unwrap();
        sample.push(lines).unwrap();
        sample
    });
    second.merge(third, 1).unwrap();
    first.merge(second, 2).unwrap();
    first.finish().unwrap()
}

const SIZES: [u64; 8] = [50, 200, 500, 1000, 2000, 5000, 10_000, 15_000];

/// Fraction of intervals that cover the exact value, and the ratio of half-width to error, both as root mean squares.
fn interval_coverage(
    exact: &DistanceHistogram,
    curves: impl Iterator<Item = SampledCurve>,
) -> (f64, f64) {
    let (mut covered, mut count, mut widths, mut squares) = (0.0, 0.0, 0.0, 0.0);
    for curve in curves {
        for size in SIZES {
            let truth = exact.misses_at(size) as f64 / exact.accesses() as f64;
            let point = curve.find_point(size).unwrap();
            let (error, width) = (point.miss_ratio - truth, point.half_width.unwrap());
            covered += f64::from(u8::from(error.abs() <= width));
            widths += width * width;
            squares += error * error;
            count += 1.0;
        }
    }
    (covered / count, (widths / squares).sqrt())
}

/// Do about 95 % of the intervals cover the exact curve, without being needlessly wide? (An ideal interval is 1.96
/// times the error wide, one from 8 groups about 2.3 times.)
#[test]
fn about_95_percent_of_intervals_cover_the_exact_curve() {
    let lines = skewed_lines(200_000, 20_000, 1);
    let truth = exact_histogram(&lines);
    let (covered, width) =
        interval_coverage(&truth, (0..60).map(|seed| fixed_rate(0.05, seed, &lines)));
    assert!(
        (0.90..0.995).contains(&covered) && (1.6..3.5).contains(&width),
        "{covered} {width}"
    );
}

/// Does the adjustment keep a hot line, sampled or not, from shifting the curve?
#[test]
fn the_adjustment_keeps_a_hot_line_from_shifting_the_curve() {
    // Half of all accesses go to line 0, which always hits.
    let lines: Vec<u64> = skewed_lines(100_000, 20_000, 2)
        .into_iter()
        .flat_map(|line| [0, line + 1])
        .collect();
    let truth = exact_histogram(&lines).misses_at(2000) as f64 / lines.len() as f64;
    let has_line_0 = |seed| scatter(salt_from_seed(seed)) >> 40 < 1 << 20;
    let (with_line_0, without_line_0): (Vec<u64>, Vec<u64>) =
        (0..100).partition(|&seed| has_line_0(seed));
    for seed in with_line_0
        .iter()
        .take(2)
        .chain(without_line_0.iter().take(6))
    {
        let error = fixed_rate(1.0 / 16.0, *seed, &lines)
            .find_point(2000)
            .unwrap()
            .miss_ratio
            - truth;
        assert!(error.abs() < 0.03, "seed {seed}: {error}");
    }
}

/// Is there no result if nothing was observed?
#[test]
fn no_observation_gives_no_result() {
    assert_eq!(fixed_rate(0.5, 1, &[]).find_point(10), None);
    let three_accesses = fixed_rate(1.0, 1, &[1, 2, 1]);
    assert_eq!(
        three_accesses.find_point(10),
        Some(SampledPoint {
            miss_ratio: 2.0 / 3.0,
            half_width: None
        })
    );
    assert_eq!(three_accesses.error_bar(&[10]), None);
}

/// Does the error for an invalid sampler name the parameter?
#[test]
fn errors_for_invalid_samplers_name_the_parameter() {
    for rate in [0.0, -1.0, 1.5, f64::NAN, 1e-9] {
        assert!(
            FixedRateSampler::new(rate, 0)
                .unwrap_err()
                .to_string()
                .starts_with("sample rate: found"),
            "{rate}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Is a sample of all lines exact, and is a sample the same with every instruction set and in segments?
    #[test]
    fn sample_of_everything_is_exact(seed in any::<u64>(), lines in 1u64..500, len in 1usize..3000) {
        let trace = skewed_lines(len, lines, seed);
        let truth = exact_histogram(&trace);
        let curve = fixed_rate(1.0, seed, &trace);
        for index in [1, 2, 10, 100, 400] {
            let miss_ratio = truth.misses_at(index) as f64 / len as f64;
            let point = curve.find_point(index).unwrap();
            prop_assert!((point.miss_ratio - miss_ratio).abs() < 1e-12);
            prop_assert!(point.half_width.is_none_or(|width| width == 0.0));
        }
        let curves = Simd::available().into_iter().map(|simd| {
            let mut sample = FixedRateSampler::with_simd(0.3, seed, simd).unwrap();
            sample.push(&trace).unwrap();
            sample.finish().unwrap()
        });
        let mut curves: Vec<SampledCurve> = curves.collect();
        curves.push(fixed_rate_in_segments(0.3, seed, &trace));
        prop_assert!(curves.windows(2).all(|two| two[0] == two[1]));
    }
}
