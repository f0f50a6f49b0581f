//! A refinement of the thesis's form of RapidMRC that uses every entry of a short log and models
//! the losses of the log.
//!
//! A log is expensive and the cache is large, so the log ends long before the cache is full, and
//! most of its entries are first touches. The thesis's form spends part of the log on warming up
//! and counts every later first touch as a miss at all sizes, so it needs logs of ten times the
//! cache (a). It counts prefetched lines as misses (b), accounts for lost entries only through a
//! constant (c), and its fully associative stack ignores that some sets overflow before the cache
//! is full (d). No vertical shift of the curve removes these errors of shape.
//!
//! The idea is that a first touch says something: its distance is *at least* the number of distinct
//! lines logged before it. Such *censored* observations are what the product-limit estimator
//! (Kaplan and Meier 1958) is made for.
//!
//! For example, the log `a b a c b` has the distances ≥0, ≥1, 1, ≥2 and 2. Four accesses are known
//! to reach depth 1, of which one recurs there; two to reach depth 2, of which one recurs. So 3/4
//! of the accesses have a distance of 2 or more and 3/4 · 1/2 = 3/8 one of 3 or more, where
//! counting first touches as misses says 3/5 for every size from three lines on. (An access that is
//! censored within a step counts as half at risk there, which the example leaves out.)
//!
//! - (a) The share of accesses with a distance of `d` or more is a product over the depths below
//!   `d`; each factor is one minus (accesses that recur at this depth / accesses known to reach
//!   this depth). No warm-up is needed, and a cache that the log cannot fill is not a special case.
//!   Beyond the depth that enough accesses are known to reach, the tail continues with the power of
//!   the depth that fits the last third of the known depths.
//! - (d) [`SetGeometry`] models the sets: the bits of an address below the page size select the set
//!   in every frame, and all other bits of the set are those of a random frame. So only lines with
//!   the same offset in their page compete, each with the same probability. The number of them that
//!   evicts a line from w ways has a negative binomial distribution, over which the survival is
//!   averaged (Smith 1978; Hill and Smith 1989).
//! - (b) A repeated value is a line that the prefetcher brought: it takes its place in the stack,
//!   but is not a miss.
//! - (c) A counter in addition to the log gives the true number of first-level misses. If the log
//!   has fewer, the measured point determines three corrections in turn. The rate is scaled, up to
//!   the misses attributed to losses. Then the distances are stretched, by no more than that. The
//!   remainder (write-through stores, and code fetches if the log does not contain them) shifts the
//!   curve vertically, as in the thesis. Losses are at most those that the thesis measured. A
//!   counter that shows more has also counted stores; the more of them it has counted, the less is
//!   attributed to losses.
//!
//! The computation is pure and linear in the log. The curve passes through the measured point,
//! never rises and is never negative. A complete log of a cold start gives the exact curve of an
//! LRU stack.

use super::{MissLog, NO_REUSE, correct_and_classify, log_distances};
use crate::curve::MissRateCurve;

/// Number of depth steps up to the largest size of a fully associative cache.
const DEPTH_STEPS: usize = 960;
/// Maximum number of depth steps if lines compete with those of the same page offset only.
const OFFSET_STEPS: usize = 8192;
/// Smallest share of accesses still at risk at which a depth counts as known.
const MIN_AT_RISK_SHARE: f64 = 0.1;
/// Below that share, a depth counts only if two standard errors of its survival are within 10 %, by which a count may
/// differ from a curve without contradicting it.
const MAX_RELATIVE_ERROR: f64 = 0.05;
/// Number of consecutive sections of a log that count as independent of one another. Reuses are clustered, so the error
/// follows from the differences between sections (Lin and Wei 1989), and not only from the number of accesses at risk
/// (Greenwood 1926).
const LOG_SECTIONS: usize = 16;
/// Maximum number of entries lost per logged entry (thesis 5.6.5: none 59 %, one 36 %, two 4 %, three to ten 1 %).
const MAX_LOST_PER_ENTRY: f64 = 0.5;

/// Counter values for the time in which the log was recorded.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct LogCounts {
    /// All misses of the cache level whose misses are logged; `None` if not counted.
    pub logged_level_misses: Option<f64>,
    /// A size in bytes that the task had, and the misses per thousand instructions measured with it.
    pub measured_point: Option<(u64, f64)>,
}

/// Sets in which lines compete, in a cache whose sizes are multiples of one line in each of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetGeometry {
    /// Sets of the cache, in all of its slices.
    pub sets: u64,
    /// Lines of a page, whose frame is random.
    pub page_lines: u64,
}

impl SetGeometry {
    /// Number of groups of lines that never compete, because their offsets in the page differ.
    fn offset_groups(self) -> u64 {
        self.page_lines.clamp(1, self.sets.max(1))
    }
}

/// Misses per thousand instructions at each of the ascending sizes of a fully associative cache. `None` if the log
/// contains no access by the program, or without sizes or instructions.
pub fn survival_curve(
    trace: &MissLog<'_>,
    counts: &LogCounts,
    sizes_bytes: &[u64],
) -> Option<MissRateCurve> {
    survival_curve_with_reach(trace, counts, sizes_bytes, None).map(|(curve, _)| curve)
}

/// Like [`survival_curve`], but also returns the size in bytes up to which the log determines the curve, and the rate
/// at that size. Beyond it, the curve is an extrapolation. If `geometry` is given, the sizes are multiples of one line
/// per set.
pub fn survival_curve_with_reach(
    trace: &MissLog<'_>,
    counts: &LogCounts,
    sizes_bytes: &[u64],
    geometry: Option<SetGeometry>,
) -> Option<(MissRateCurve, (u64, f64))> {
    let line_bytes = trace.line_bytes.max(1);
    let largest_lines = sizes_bytes.last()? / line_bytes;
    if !(trace.instructions.is_finite() && trace.instructions > 0.0) {
        return None;
    }
    let (lines, is_demanded) = correct_and_classify(trace.lines, trace.code_positions);
    let survival = match geometry {
        None => SurvivalCurve::new(&[(&lines, &is_demanded)], largest_lines, DEPTH_STEPS)?,
        Some(geometry) => survival_by_offset(&lines, &is_demanded, largest_lines, geometry)?,
    };
    let per_kilo_instr = 1000.0 / trace.instructions;
    let logged_rate = survival.access_count * per_kilo_instr;
    let known_factor = trace
        .lost_accesses
        .map(|lost| 1.0 + lost as f64 * per_kilo_instr / logged_rate);
    let unlogged_share = counts.logged_level_misses.map_or(0.0, |misses| {
        (misses * per_kilo_instr / logged_rate - 1.0).max(0.0)
    });
    let guessed_factor = 1.0
        + unlogged_share
            .min(MAX_LOST_PER_ENTRY)
            .min((2.0 * MAX_LOST_PER_ENTRY - unlogged_share).max(0.0));
    let (min_factor, max_factor) =
        known_factor.map_or((1.0, guessed_factor), |factor| (factor, factor));
    let cache = SurvivalInCache { survival, geometry };
    let lines_of = |size_bytes: u64| size_bytes as f64 / line_bytes as f64;
    let fit = match counts.measured_point {
        None => SurvivalFit {
            rate: logged_rate * min_factor,
            distance_scale: 1.0,
            shift: 0.0,
        },
        Some((size, rate)) => SurvivalFit::fit_through(
            &cache,
            logged_rate,
            min_factor,
            max_factor,
            lines_of(size),
            rate,
        ),
    };
    let point = |&size: &u64| (size, fit.rate_at(&cache, lines_of(size)));
    let curve = MissRateCurve::new(sizes_bytes.iter().map(point).collect()).ok()?;
    let groups = geometry.map_or(1, SetGeometry::offset_groups) as f64;
    let known_lines = cache.survival.known_lines * groups * fit.distance_scale;
    Some((
        curve,
        (
            (known_lines * line_bytes as f64) as u64,
            fit.rate_at(&cache, known_lines),
        ),
    ))
}

/// Survival of accesses by the number of lines with the same offset in their page.
fn survival_by_offset(
    lines: &[u64],
    demanded: &[bool],
    largest_lines: u64,
    geometry: SetGeometry,
) -> Option<SurvivalCurve> {
    let groups = geometry.offset_groups();
    let mut logs = vec![(Vec::new(), Vec::new()); groups as usize];
    for (&line, &demanded) in lines.iter().zip(demanded) {
        let (group_lines, group_demanded) = &mut logs[(line % groups) as usize];
        group_lines.push(line);
        group_demanded.push(demanded);
    }
    let logs: Vec<(&[u64], &[bool])> = logs
        .iter()
        .map(|(lines, demanded)| (&lines[..], &demanded[..]))
        .collect();
    // Twice the cache, because the line that is evicted is rarely deeper: four standard deviations at 16 ways.
    SurvivalCurve::new(&logs, 2 * largest_lines.div_ceil(groups), OFFSET_STEPS)
}

/// Parameters that convert the survival of logged accesses to a miss rate.
#[derive(Clone, Copy, Debug)]
struct SurvivalFit {
    rate: f64,
    distance_scale: f64,
    shift: f64,
}

impl SurvivalFit {
    fn fit_through(
        cache: &SurvivalInCache,
        logged_rate: f64,
        min_factor: f64,
        max_factor: f64,
        lines: f64,
        measured_rate: f64,
    ) -> Self {
        let mut fit = SurvivalFit {
            rate: logged_rate * min_factor,
            distance_scale: 1.0,
            shift: 0.0,
        };
        let survival_share = cache.miss_share(lines, 1.0);
        if survival_share > 0.0 {
            fit.rate = (measured_rate / survival_share)
                .clamp(logged_rate * min_factor, logged_rate * max_factor);
        } else {
            fit.rate = logged_rate * max_factor;
        }
        if fit.rate_at(cache, lines) < measured_rate {
            let (mut low, mut high) = (1.0, max_factor);
            for _ in 0..30 {
                let middle = 0.5 * (low + high);
                let is_below_measured = SurvivalFit {
                    distance_scale: middle,
                    ..fit
                }
                .rate_at(cache, lines)
                    < measured_rate;
                if is_below_measured {
                    low = middle
                } else {
                    high = middle
                }
            }
            fit.distance_scale = low;
        }
        fit.shift = measured_rate - fit.rate_at(cache, lines);
        fit
    }

    fn rate_at(&self, cache: &SurvivalInCache, lines: f64) -> f64 {
        (self.rate * cache.miss_share(lines, self.distance_scale) + self.shift).max(0.0)
    }
}

/// Survival of the accesses of a log, and the cache that it is evaluated for.
struct SurvivalInCache {
    survival: SurvivalCurve,
    geometry: Option<SetGeometry>,
}

impl SurvivalInCache {
    /// Share of the accesses that miss in a cache of `lines` lines after all distances are scaled by `distance_scale`.
    fn miss_share(&self, lines: f64, distance_scale: f64) -> f64 {
        let Some(geometry) = self.geometry else {
            return self.survival.survival_at(lines / distance_scale);
        };
        let ways = lines / geometry.sets as f64;
        let (low, fraction) = (ways as u32, ways.fract());
        let share = |ways| self.miss_share_in_ways(ways, geometry, distance_scale);
        if fraction == 0.0 {
            share(low)
        } else {
            (1.0 - fraction) * share(low) + fraction * share(low + 1)
        }
    }

    fn miss_share_in_ways(&self, ways: u32, geometry: SetGeometry, distance_scale: f64) -> f64 {
        let p = geometry.offset_groups() as f64 / geometry.sets as f64;
        let survival_after = |lines: f64| self.survival.survival_at(lines / distance_scale);
        if ways == 0 || p >= 1.0 {
            return survival_after(f64::from(ways));
        }
        // Probability that the ways-th conflicting line is the n-th distinct line (negative binomial).
        let (ways, max_lines) = (
            f64::from(ways),
            self.survival.lines_per_step * self.survival.survival_by_step.len() as f64,
        );
        let (mut n, mut log_probability, mut remaining, mut share) =
            (ways, ways * libm::log(p), 1.0, 0.0);
        while n * p < ways || (remaining > 1e-9 && n < max_lines * distance_scale) {
            let probability = libm::exp(log_probability).min(remaining);
            share += probability * survival_after(n);
            remaining -= probability;
            n += 1.0;
            log_probability += libm::log1p(-p) + libm::log((n - 1.0) / (n - ways));
        }
        share + remaining * survival_after(n)
    }
}

/// The share of the program's accesses whose stack distance is at least a given number of lines, by number of lines.
struct SurvivalCurve {
    lines_per_step: f64,
    /// Survival at step 0, 1, and so on.
    survival_by_step: Vec<f64>,
    access_count: f64,
    /// Depth in lines up to which the error is small.
    known_lines: f64,
}

impl SurvivalCurve {
    /// Builds the curve of logs with a stack each: their lines, and whether the program requested them.
    fn new(logs: &[(&[u64], &[bool])], largest_lines: u64, max_steps: usize) -> Option<Self> {
        let lines_per_step = (largest_lines.div_ceil(max_steps as u64)).max(1);
        let steps = largest_lines.div_ceil(lines_per_step) as usize;
        // By step of depth and section: accesses that recur there, and accesses known only to reach it.
        let mut recurrences = vec![[0.0; LOG_SECTIONS]; steps + 1];
        let mut censored_uses = vec![[0.0; LOG_SECTIONS]; steps + 1];
        let mut at_risk = [0.0; LOG_SECTIONS];
        for (lines, is_demanded) in logs {
            let mut distinct_lines = 0;
            for (index, (&distance, &demanded)) in
                log_distances(lines).iter().zip(*is_demanded).enumerate()
            {
                let depth = if distance == NO_REUSE {
                    distinct_lines
                } else {
                    u64::from(distance)
                };
                distinct_lines += u64::from(distance == NO_REUSE);
                if demanded {
                    let step = ((depth / lines_per_step) as usize).min(steps);
                    let section = index * LOG_SECTIONS / lines.len();
                    if distance == NO_REUSE {
                        censored_uses[step][section] += 1.0
                    } else {
                        recurrences[step][section] += 1.0
                    }
                    at_risk[section] += 1.0;
                }
            }
        }
        let accesses: f64 = at_risk.iter().sum();
        if accesses == 0.0 {
            return None;
        }
        let max_variance = MAX_RELATIVE_ERROR * MAX_RELATIVE_ERROR;
        let (mut survival_share, mut survival_by_step) = (1.0, vec![1.0]);
        // Recurrences of each section beyond those that the survival of all predicts, relative to the accesses at risk.
        let mut excess_shares = [0.0; LOG_SECTIONS];
        for (recurring, censored) in recurrences.iter().zip(&censored_uses).take(steps) {
            let all_at_risk: f64 = at_risk.iter().sum();
            let variance: f64 = excess_shares.iter().map(|excess| excess * excess).sum();
            let is_error_small = variance <= max_variance && all_at_risk >= 1.0 / max_variance;
            if all_at_risk < MIN_AT_RISK_SHARE * accesses && !is_error_small {
                break;
            }
            // Accesses censored within a step were at risk for about half of it.
            let effective: [f64; LOG_SECTIONS] =
                std::array::from_fn(|section| at_risk[section] - 0.5 * censored[section]);
            let all_effective: f64 = effective.iter().sum();
            if all_effective > 0.0 {
                let recurring_share = recurring.iter().sum::<f64>() / all_effective;
                for (section, excess) in excess_shares.iter_mut().enumerate() {
                    *excess +=
                        (recurring[section] - recurring_share * effective[section]) / all_effective;
                }
                survival_share *= (1.0 - recurring_share).max(0.0);
            }
            survival_by_step.push(survival_share);
            for (section, at_risk) in at_risk.iter_mut().enumerate() {
                *at_risk -= recurring[section] + censored[section];
            }
        }
        let known_lines = (survival_by_step.len() as u64 - 1) * lines_per_step;
        extend_survival(&mut survival_by_step, steps);
        let (lines_per_step, known_lines) = (lines_per_step as f64, known_lines as f64);
        Some(SurvivalCurve {
            lines_per_step,
            survival_by_step,
            access_count: accesses,
            known_lines,
        })
    }

    fn survival_at(&self, lines: f64) -> f64 {
        let steps = lines / self.lines_per_step;
        let low = (steps as usize).min(self.survival_by_step.len() - 1);
        let high = (low + 1).min(self.survival_by_step.len() - 1);
        let fraction = (steps - low as f64).clamp(0.0, 1.0);
        self.survival_by_step[low]
            + fraction * (self.survival_by_step[high] - self.survival_by_step[low])
    }
}

/// Extends the survival to this number of steps by a power of the depth that fits the last third.
fn extend_survival(survival_by_step: &mut Vec<f64>, steps: usize) {
    let known_steps = survival_by_step.len() - 1;
    let fit_start = known_steps - known_steps / 3;
    let (third_survival, last_survival) =
        (survival_by_step[fit_start], survival_by_step[known_steps]);
    let can_fit_power = fit_start > 0 && fit_start < known_steps && last_survival > 0.0;
    let power = if can_fit_power {
        libm::log(third_survival / last_survival) / libm::log(known_steps as f64 / fit_start as f64)
    } else {
        0.0
    };
    for step in known_steps + 1..=steps {
        survival_by_step
            .push(last_survival * libm::pow(known_steps.max(1) as f64 / step as f64, power));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rapidmrc::{Warmup, trace_curve};
    use cachemate_core::SplitMix64;

    const SIZES: [u64; 8] = [100, 200, 300, 400, 500, 600, 700, 800];

    fn trace_of(lines: &[u64]) -> MissLog<'_> {
        MissLog {
            lines,
            code_positions: &[],
            line_bytes: 1,
            instructions: lines.len() as f64 * 20.0,
            lost_accesses: None,
        }
    }
    fn curve_rates(curve: &MissRateCurve) -> Vec<f64> {
        curve.points().iter().map(|&(_, rate)| rate).collect()
    }
    /// A log of uniform accesses to a working set of W lines, for which an LRU cache of s lines has a miss ratio of
    /// 1 - s / W.
    fn uniform_log(entries: usize, working_set_lines: u64, seed: u64) -> Vec<u64> {
        let mut random = SplitMix64::new(seed);
        (0..entries)
            .map(|_| 10 * random.draw_below(working_set_lines))
            .collect()
    }
    fn worst_error(curve: &MissRateCurve, truth: impl Fn(f64) -> f64) -> f64 {
        curve
            .points()
            .iter()
            .map(|&(size, rate)| (rate - truth(size as f64)).abs())
            .fold(0.0, f64::max)
    }

    /// Does a log that is too short to fill the cache approximate the closed form better than the thesis's form does?
    #[test]
    fn a_short_log_gives_the_closed_form() {
        let truth: Vec<(u64, f64)> = SIZES
            .iter()
            .map(|&size| (size, 50.0 * (1.0 - size as f64 / 900.0)))
            .collect();
        let truth = MissRateCurve::new(truth).unwrap();
        let (mut ours, mut theirs) = (0.0, 0.0);
        for seed in 0..8 {
            let lines = uniform_log(1200, 900, seed);
            let survival =
                survival_curve(&trace_of(&lines), &LogCounts::default(), &SIZES).unwrap();
            let thesis = trace_curve(&trace_of(&lines), &SIZES, Warmup::Automatic, true).unwrap();
            ours += truth.mean_distance(&survival).unwrap() / 8.0;
            theirs += truth.mean_distance(&thesis).unwrap() / 8.0;
        }
        assert!(
            ours < 2.5 && theirs > 1.5 * ours,
            "mean distance {ours}, the thesis's form {theirs}"
        );
    }

    /// Does a long log give the LRU stack's curve, except for the warm-up of the thesis's form?
    #[test]
    fn a_long_log_agrees_with_the_stack() {
        let lines = uniform_log(100_000, 900, 6);
        let own_curve = survival_curve(&trace_of(&lines), &LogCounts::default(), &SIZES).unwrap();
        let histogram_curve =
            trace_curve(&trace_of(&lines), &SIZES, Warmup::Automatic, false).unwrap();
        assert!(
            own_curve.mean_distance(&histogram_curve).unwrap() < 0.3,
            "{:?} {:?}",
            curve_rates(&own_curve),
            curve_rates(&histogram_curve)
        );
    }

    /// Do first touches of a stream stay misses at every size, and do prefetched lines not count as misses?
    #[test]
    fn streams_miss_at_every_size_and_prefetched_lines_do_not() {
        // Every fourth line is a miss; the prefetcher brings the three lines after it.
        let lines: Vec<u64> = (0..4000u64).map(|index| index / 4 * 4).collect();
        let curve = survival_curve(&trace_of(&lines), &LogCounts::default(), &SIZES).unwrap();
        assert!(
            worst_error(&curve, |_| 12.5) < 1e-9,
            "{:?}",
            curve_rates(&curve)
        );
    }

    /// If the counter shows that entries were lost, is the curve scaled up to the true one at every size?
    #[test]
    fn the_curve_is_scaled_up_for_lost_entries() {
        let truth = |lines: f64| 50.0 * (1.0 - lines / 900.0).max(0.0);
        let all_lines = uniform_log(40_000, 900, 7);
        let mut random = SplitMix64::new(8);
        let retained: Vec<u64> = all_lines
            .iter()
            .copied()
            .filter(|_| random.draw_unit() < 0.7)
            .collect();
        let trace = MissLog {
            instructions: 800_000.0,
            ..trace_of(&retained)
        };
        let counts = LogCounts {
            logged_level_misses: Some(40_000.0),
            measured_point: Some((400, truth(400.0))),
        };
        let curve = survival_curve(&trace, &counts, &SIZES).unwrap();
        assert!(
            worst_error(&curve, truth) < 1.5,
            "{:?}",
            curve_rates(&curve)
        );
        let shifted_only = survival_curve(
            &trace,
            &LogCounts {
                logged_level_misses: None,
                ..counts
            },
            &SIZES,
        )
        .unwrap();
        assert!(
            worst_error(&shifted_only, truth) > 4.0,
            "{:?}",
            curve_rates(&shifted_only)
        );
    }

    /// Does the curve pass through the measured point and never rise, whatever the counter shows?
    #[test]
    fn the_curve_passes_through_the_point_and_never_rises() {
        let lines = uniform_log(3000, 500, 9);
        for (misses, rate) in [
            (None, 3.0),
            (Some(4000.0), 31.0),
            (Some(9000.0), 80.0),
            (Some(3000.0), 0.0),
        ] {
            let counts = LogCounts {
                logged_level_misses: misses,
                measured_point: Some((300, rate)),
            };
            let curve = survival_curve(&trace_of(&lines), &counts, &SIZES).unwrap();
            assert!(
                (curve.rate_at(300).unwrap() - rate).abs() < 1e-6,
                "{:?}",
                curve_rates(&curve)
            );
            assert!(
                curve_rates(&curve)
                    .windows(2)
                    .all(|pair| pair[0] >= pair[1] - 1e-12)
            );
        }
    }

    /// Is the reach of a short log below the largest size, and that of a long log all sizes at which lines are reused?
    #[test]
    fn a_logs_reach_grows_with_its_length() {
        let curve_and_reach = |entries: usize, working_set_lines: u64| {
            let log = uniform_log(entries, working_set_lines, 5);
            survival_curve_with_reach(&trace_of(&log), &LogCounts::default(), &SIZES, None).unwrap()
        };
        let (_, (short, rate)) = curve_and_reach(1_500, 900);
        assert!(short > 300 && short < 800, "{short}");
        assert!(
            (rate - 50.0 * (1.0 - short as f64 / 900.0)).abs() < 2.0,
            "{rate} at {short}"
        );
        assert_eq!(curve_and_reach(60_000, 900).1.0, 800);
        // Beyond the reach, the curve may be far off; here all 400 lines fit.
        let (curve, (reach_bytes, _)) = curve_and_reach(1_000, 400);
        assert!(
            reach_bytes < 400 && curve.rate_at(500).unwrap() > 1.0,
            "{reach_bytes} {:?}",
            curve_rates(&curve)
        );
    }

    /// Does a long log determine the curve at depths that less than a tenth of its accesses reach?
    #[test]
    fn a_rare_reuse_is_measured_if_the_log_is_long() {
        // Nine in a hundred accesses are uniform over 4096 lines, the others over 64.
        let mut random = SplitMix64::new(12);
        let mut draw = |_| {
            if random.draw_below(100) < 9 {
                64 + random.draw_below(4096)
            } else {
                random.draw_below(64)
            }
        };
        let lines: Vec<u64> = (0..400_000).map(&mut draw).collect();
        let sizes = [512, 1024, 2048];
        let (curve, (reach_bytes, _)) =
            survival_curve_with_reach(&trace_of(&lines), &LogCounts::default(), &sizes, None)
                .unwrap();
        // With the 64 lines in the cache, the miss ratio is 0.09 (1 - (size - 64) / 4096).
        assert!(
            worst_error(&curve, |size| 50.0 * 0.09 * (1.0 - (size - 64.0) / 4096.0)) < 0.1,
            "{:?}",
            curve_rates(&curve)
        );
        assert!(reach_bytes >= 2048, "{reach_bytes}");
    }

    /// Share of misses in a loop over so many lines, each in the same set with probability p: that of w conflicts or
    /// more.
    fn binomial_tail(lines: u64, p: f64, ways: u64) -> f64 {
        let (n, mut term) = ((lines - 1) as f64, (1.0 - p).powi(lines as i32 - 1));
        let mut below = 0.0;
        for k in 0..ways {
            below += term;
            term *= (n - k as f64) / (k as f64 + 1.0) * p / (1.0 - p);
        }
        1.0 - below
    }

    /// Do conflicts in the sets of a cache of few ways have their closed form, with and without known page offsets?
    #[test]
    fn conflicts_in_sets_have_their_closed_form() {
        let sizes: Vec<u64> = (1..=8).map(|ways| 256 * ways).collect();
        for (page_lines, stride, p) in [
            (1, 1, 1.0 / 256.0),
            (64, 1, 64.0 / 256.0),
            (64, 64, 64.0 / 256.0),
        ] {
            // With a stride of a page, all lines have the same offset.
            let in_loop = if stride == 64 { 16 } else { 1024 };
            let competing = if page_lines == 64 { 16 } else { 1024 };
            let lines: Vec<u64> = (0..64_000).map(|index| index % in_loop * stride).collect();
            let geometry = Some(SetGeometry {
                sets: 256,
                page_lines,
            });
            let (curve, _) = survival_curve_with_reach(
                &trace_of(&lines),
                &LogCounts::default(),
                &sizes,
                geometry,
            )
            .unwrap();
            let truth = |size: f64| 50.0 * binomial_tail(competing, p, size as u64 / 256);
            // The first pass of 64 000 / 1024 has no known distance.
            assert!(
                worst_error(&curve, truth) < 0.2,
                "{stride}: {:?}",
                curve_rates(&curve)
            );
        }
    }

    /// If each line of a page has a set of its own, does a cache of w ways hold w lines of each offset?
    #[test]
    fn a_cache_of_one_page_per_way_has_no_random_sets() {
        let lines: Vec<u64> = (0..6_400).map(|index| index % 320).collect();
        let geometry = Some(SetGeometry {
            sets: 64,
            page_lines: 64,
        });
        let sizes: Vec<u64> = (1..=8).map(|ways| 64 * ways).collect();
        let (curve, _) =
            survival_curve_with_reach(&trace_of(&lines), &LogCounts::default(), &sizes, geometry)
                .unwrap();
        // Five pages: five ways hold the loop. Its first pass has no known distance.
        assert!(
            worst_error(&curve, |size| if size < 320.0 { 50.0 } else { 0.0 }) < 0.3,
            "{:?}",
            curve_rates(&curve)
        );
    }

    /// Is there no curve without accesses or without instructions?
    #[test]
    fn a_log_without_accesses_or_instructions_has_no_curve() {
        assert!(survival_curve(&trace_of(&[]), &LogCounts::default(), &SIZES).is_none());
        let timeless = MissLog {
            instructions: 0.0,
            ..trace_of(&[1, 2])
        };
        assert!(survival_curve(&timeless, &LogCounts::default(), &SIZES).is_none());
        assert!(survival_curve(&trace_of(&[1, 2]), &LogCounts::default(), &[]).is_none());
    }
}
