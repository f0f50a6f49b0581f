//! Speeds of processes under the shares in force, as the evidence for changes of shares.
//!
//! Only undisturbed windows count. A trace slows its program to a quarter of its speed (thesis 5.6.2), and neighbors,
//! streams and samples take resources from all programs. While pages move, the intended shares are not in effect yet.
//!
//! Only matching windows are compared, because programs have phases, and a record with more windows of a slow phase is
//! no evidence about shares. Windows match if equally many accesses reach the cache from the first level. This number
//! does not depend on the cache's allocation, unlike misses (thesis 5.6.2). The work of one record is then timed by the
//! windows of both.
//!
//! Properties: rates are sums over windows, so short windows weigh less. Memory is bounded. There is no result if less
//! than half of a program's work has a match in the other record.

use cachemate_core::{
    CacheLevel, CounterEvent, EventCounts, Observation, ProbeKind, ProcessId, StallCause,
    TaskSample,
};
use std::collections::BTreeMap;

use super::demand_curve::MeasuredSpeed;
use crate::verifier::noise::{
    Difference, MIN_AUTOCORRELATION_WINDOWS, corrected_autocorrelation, student_bound,
    variance_factor,
};

/// Returns whether the probe stops, occupies or slows programs. Watch points and hardware contexts' own counters do
/// not.
pub fn is_disturbing(kind: &ProbeKind) -> bool {
    !matches!(
        kind,
        ProbeKind::ReuseTimes { .. } | ProbeKind::SuperSets { .. }
    )
}

/// The counts of one process in one window; `None` means not counted.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SpeedSample {
    instructions: f64,
    cycles: f64,
    /// Misses of the cache.
    misses: Option<f64>,
    stall_cycles: Option<f64>,
    /// Misses of the two first-level caches and references of this one.
    incoming: Option<[f64; 3]>,
}

/// The most recent windows since the shares were last changed.
#[derive(Clone, Debug, Default)]
pub struct SpeedRecord {
    samples: BTreeMap<ProcessId, Vec<SpeedSample>>,
    pub windows: u32,
}

/// Maximum number of windows kept for each process.
const MAX_WINDOWS: usize = 64;
/// Windows match if their incoming accesses differ by at most the thesis's threshold (3 per 1000 instructions, 5.6.2)
/// plus [`RATE_TOLERANCE`].
const MAX_RATE_DIFFERENCE: f64 = 3.0;
/// Sampling noise of the incoming accesses, as a fraction of them.
const RATE_TOLERANCE: f64 = 0.1;
/// Minimum fraction of the work in a record that must have a match in the other record.
const MIN_COMMON_SHARE: f64 = 0.5;

/// Returns the causes of stalls on the memory behind a cache of this level.
fn stalls_beyond(level: CacheLevel) -> impl Iterator<Item = StallCause> {
    let hits = [CacheLevel::L2, CacheLevel::L3, CacheLevel::L4]
        .into_iter()
        .filter(move |&outer_level| outer_level > level)
        .map(StallCause::Hit);
    hits.chain([
        StallCause::LocalMemory,
        StallCause::RemoteMemory,
        StallCause::BusQueue,
    ])
}

/// Returns the counts of accesses that reach the cache; `None` if not all of them were counted.
pub fn incoming_accesses(counts: &EventCounts, level: CacheLevel) -> Option<[f64; 3]> {
    let miss_count = |level| counts.get(CounterEvent::Misses(level));
    Some([
        miss_count(CacheLevel::L1Data)?,
        miss_count(CacheLevel::L1Instruction)?,
        counts.get(CounterEvent::References(level))?,
    ])
}

impl SpeedSample {
    fn from_sample(task: &TaskSample, level: CacheLevel) -> Option<Self> {
        let instructions_and_cycles = task
            .counts
            .get(CounterEvent::Instructions)
            .zip(task.counts.get(CounterEvent::Cycles));
        let (instructions, cycles) = instructions_and_cycles.filter(|(_, cycles)| *cycles > 0.0)?;
        let stalls = stalls_beyond(level)
            .filter_map(|cause| task.counts.get(CounterEvent::StallCycles(cause)));
        Some(SpeedSample {
            instructions,
            cycles,
            misses: task.counts.get(CounterEvent::Misses(level)),
            stall_cycles: stalls.fold(None, |sum: Option<f64>, cycles| {
                Some(sum.unwrap_or(0.0) + cycles)
            }),
            incoming: incoming_accesses(&task.counts, level),
        })
    }

    /// Builds a sample from the work per second and the incoming accesses per instruction.
    pub fn from_rate(work_per_s: f64, incoming_per_instr: Option<[f64; 3]>) -> Self {
        let incoming_per_s = incoming_per_instr.map(|rates| rates.map(|rate| rate * work_per_s));
        SpeedSample {
            instructions: work_per_s,
            cycles: 1.0,
            misses: None,
            stall_cycles: None,
            incoming: incoming_per_s,
        }
    }

    /// Returns the sample without its incoming accesses, so that it matches any other sample.
    pub fn without_traffic(&self) -> Self {
        SpeedSample {
            incoming: None,
            ..*self
        }
    }

    fn plus(self, addend: SpeedSample) -> Self {
        let sum_if_both = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a + b);
        let incoming = self.incoming.zip(addend.incoming);
        SpeedSample {
            instructions: self.instructions + addend.instructions,
            cycles: self.cycles + addend.cycles,
            misses: sum_if_both(self.misses, addend.misses),
            stall_cycles: sum_if_both(self.stall_cycles, addend.stall_cycles),
            incoming: incoming.map(|(a, b)| [a[0] + b[0], a[1] + b[1], a[2] + b[2]]),
        }
    }

    /// Returns whether equally many accesses reach the cache in both windows.
    fn has_similar_traffic(&self, other: &SpeedSample) -> bool {
        let Some((own_rates, other_rates)) = self.incoming.zip(other.incoming) else {
            return true;
        };
        let rate_per_kilo_instr =
            |sums: f64, sample: &SpeedSample| 1000.0 * sums / sample.instructions.max(1.0);
        (0..3).all(|index| {
            let (a, b) = (
                rate_per_kilo_instr(own_rates[index], self),
                rate_per_kilo_instr(other_rates[index], other),
            );
            (a - b).abs() <= MAX_RATE_DIFFERENCE + RATE_TOLERANCE * a.max(b)
        })
    }
}

impl SpeedRecord {
    /// Adds a window if it is undisturbed and a process ran. Returns whether it was added.
    pub fn add(
        &mut self,
        observation: &Observation,
        level: CacheLevel,
        probes: &[cachemate_core::ProbeRequest],
    ) -> bool {
        let is_disturbed = probes.iter().any(|probe| is_disturbing(&probe.kind));
        !is_disturbed && observation.applied.pending.is_empty() && self.observe(observation, level)
    }

    /// Adds a window, disturbed or not. Returns whether a process ran.
    pub fn observe(&mut self, observation: &Observation, level: CacheLevel) -> bool {
        let mut window: BTreeMap<ProcessId, SpeedSample> = BTreeMap::new();
        for task in &observation.tasks {
            if let Some(sample) = SpeedSample::from_sample(task, level) {
                let process_sample = window
                    .get(&task.process)
                    .map_or(sample, |earlier_sample| earlier_sample.plus(sample));
                window.insert(task.process, process_sample);
            }
        }
        let has_sample = !window.is_empty();
        for (process, sample) in window {
            let samples = self.samples.entry(process).or_default();
            if samples.len() == MAX_WINDOWS {
                samples.remove(0);
            }
            samples.push(sample);
        }
        self.windows += u32::from(has_sample);
        has_sample
    }

    /// Clears the record after a change of the shares.
    pub fn clear(&mut self) {
        *self = SpeedRecord::default();
    }

    /// Returns the last `windows` windows of each process.
    pub fn latest_windows(&self, windows: u32) -> SpeedRecord {
        let latest_samples = |samples: &[SpeedSample]| {
            samples[samples.len().saturating_sub(windows as usize)..].to_vec()
        };
        let samples = self
            .samples
            .iter()
            .map(|(&process, samples)| (process, latest_samples(samples)))
            .collect();
        SpeedRecord {
            samples,
            windows: self.windows.min(windows),
        }
    }

    /// Returns a record with the windows of both records, starting with those of this one.
    pub fn concatenated_with(&self, addend: &SpeedRecord) -> SpeedRecord {
        let mut joined_record = self.clone();
        for (&process, samples) in &addend.samples {
            joined_record
                .samples
                .entry(process)
                .or_default()
                .extend(samples);
        }
        joined_record.windows += addend.windows;
        joined_record
    }

    /// Returns the speed of a process; `None` until it has run in an undisturbed window.
    pub fn measured_speed(&self, process: ProcessId) -> Option<MeasuredSpeed> {
        let sample_sum = self
            .samples
            .get(&process)?
            .iter()
            .copied()
            .reduce(SpeedSample::plus)?;
        let totals = Some(sample_sum).filter(|sums| sums.instructions > 0.0)?;
        let stalls_and_misses = totals
            .stall_cycles
            .zip(totals.misses.filter(|&misses| misses > 0.0));
        Some(MeasuredSpeed {
            cycles_per_instr: totals.cycles / totals.instructions,
            misses_per_kilo_instr: totals
                .misses
                .map(|misses| 1000.0 * misses / totals.instructions),
            stall_cycles_per_miss: stalls_and_misses.map(|(stalls, misses)| stalls / misses),
        })
    }

    /// Returns the sum of weighted speeds of the processes that ran.
    pub fn weighted_speed(&self, weights: &[(ProcessId, f64)]) -> f64 {
        let weighted_speed = |(process, weight): &(ProcessId, f64)| {
            Some(weight / self.measured_speed(*process)?.cycles_per_instr)
        };
        weights.iter().filter_map(weighted_speed).sum()
    }

    /// Returns the speeds of a process in this record and in another one over the same work: this record's windows of
    /// the kinds that both records contain. `None` if these windows contain too little of the work.
    pub fn match_speeds(&self, other: &SpeedRecord, process: ProcessId) -> Option<MatchedSpeeds> {
        match_samples(self.samples.get(&process)?, other.samples.get(&process)?)
    }

    /// Returns the sum of weighted speeds over that in another record, with weights in cycles per instruction; `None`
    /// if a process cannot be compared.
    pub fn speed_over(&self, other: &SpeedRecord, weights: &[(ProcessId, f64)]) -> Option<Ratio> {
        let (mut speed_sums, mut variances, mut degrees_of_freedom) =
            ([0.0; 2], [0.0; 2], f64::INFINITY);
        for &(process, weight) in weights {
            let matched_speeds = self.match_speeds(other, process)?;
            degrees_of_freedom = degrees_of_freedom.min(matched_speeds.degrees_of_freedom);
            for side in 0..2 {
                let speed = weight / matched_speeds.cycles_per_instr[side];
                speed_sums[side] += speed;
                variances[side] += matched_speeds.variance[side]
                    * (speed / matched_speeds.cycles_per_instr[side]).powi(2);
            }
        }
        let ratio = speed_sums[0] / speed_sums[1];
        let relative_variance: f64 = (0..2)
            .map(|side| variances[side] / (speed_sums[side] * speed_sums[side]))
            .sum();
        ratio.is_finite().then(|| Ratio {
            ratio,
            standard_error: ratio * libm::sqrt(relative_variance),
            degrees_of_freedom,
        })
    }
}

/// Returns the speeds of a process in two series of windows over the same work: the first series' windows of the kinds
/// that both series contain. `None` if these windows contain too little of the work.
pub fn match_samples(
    own_samples: &[SpeedSample],
    other_samples: &[SpeedSample],
) -> Option<MatchedSpeeds> {
    let mut window_kinds: Vec<MatchedWindows<'_>> = Vec::new();
    for (side, sample) in own_samples
        .iter()
        .map(|sample| (0, sample))
        .chain(other_samples.iter().map(|sample| (1, sample)))
    {
        match window_kinds.iter_mut().find(|window_kind| {
            window_kind[0]
                .iter()
                .chain(&window_kind[1])
                .next()
                .is_some_and(|kind_member| kind_member.has_similar_traffic(sample))
        }) {
            Some(kind) => kind[side].push(sample),
            None => {
                window_kinds.push([Vec::new(), Vec::new()]);
                window_kinds.last_mut()?[side].push(sample);
            }
        }
    }
    let work: f64 = own_samples.iter().map(|sample| sample.instructions).sum();
    window_kinds.retain(|kind| kind.iter().all(|side| !side.is_empty()));
    let common_work: f64 = window_kinds
        .iter()
        .map(|kind| total_instructions(&kind[0]))
        .sum();
    if common_work <= 0.0 || common_work < MIN_COMMON_SHARE * work {
        return None;
    }
    let (relative_variance, degrees_of_freedom) = pooled_variance(&window_kinds);
    let mut matched_speeds = MatchedSpeeds {
        cycles_per_instr: [0.0; 2],
        variance: [0.0; 2],
        degrees_of_freedom,
    };
    for kind in &window_kinds {
        let work_share = total_instructions(&kind[0]) / common_work;
        for (side, samples) in kind.iter().enumerate() {
            let cycles = work_share * cycles_per_instr(samples);
            matched_speeds.cycles_per_instr[side] += cycles;
            matched_speeds.variance[side] +=
                relative_variance * cycles * cycles / samples.len() as f64;
        }
    }
    Some(matched_speeds)
}

/// The speeds of one process over the same work in two records.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MatchedSpeeds {
    pub cycles_per_instr: [f64; 2],
    /// Variance of each of the two numbers of cycles per instruction.
    variance: [f64; 2],
    degrees_of_freedom: f64,
}

impl MatchedSpeeds {
    /// Returns the logarithm of the other speed over this record's speed.
    pub fn difference(&self) -> Difference {
        let [own_cycles, other_cycles] = self.cycles_per_instr;
        let relative_variance: f64 = (0..2)
            .map(|side| self.variance[side] / self.cycles_per_instr[side].powi(2))
            .sum();
        Difference {
            value: libm::log(own_cycles / other_cycles),
            standard_error: libm::sqrt(relative_variance),
            degrees_of_freedom: self.degrees_of_freedom,
        }
    }
}

/// A ratio of speeds with its standard error, which is infinite if the spread of the windows is unknown.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ratio {
    pub ratio: f64,
    pub standard_error: f64,
    /// Degrees of freedom of the estimated error.
    pub degrees_of_freedom: f64,
}

/// Maximum probability that all evaluations of a trial together judge a change without effect to be faster.
const FALSE_ADOPTION_RATE: f64 = 0.025;
/// Maximum number of evaluations of a trial on one side (`cache-sizing`'s A/B test), each with its part of the error
/// probability.
pub const MAX_EVALUATIONS: usize = 4;
/// Standard error below which no relevant difference can remain undetected.
const PRECISE_ERROR: f64 = 0.005;
/// Autocorrelation that is assumed with fewer windows.
const DEFAULT_AUTOCORRELATION: f64 = 0.6;

impl Ratio {
    /// Returns whether the difference exceeds chance, if it is evaluated no more than [`MAX_EVALUATIONS`] times.
    pub fn is_significant(&self) -> bool {
        let t_bound = student_bound(
            FALSE_ADOPTION_RATE / MAX_EVALUATIONS as f64,
            self.degrees_of_freedom,
        );
        self.ratio != 1.0 && (self.ratio - 1.0).abs() >= t_bound * self.standard_error
    }

    /// Returns whether a longer measurement is unlikely to reveal a relevant difference.
    pub fn is_precise_enough(&self) -> bool {
        self.standard_error <= PRECISE_ERROR || self.is_significant()
    }
}

/// The matching windows of one kind in the two records.
type MatchedWindows<'a> = [Vec<&'a SpeedSample>; 2];

fn total_instructions(samples: &[&SpeedSample]) -> f64 {
    samples.iter().map(|sample| sample.instructions).sum()
}

fn cycles_per_instr(samples: &[&SpeedSample]) -> f64 {
    samples.iter().map(|sample| sample.cycles).sum::<f64>() / total_instructions(samples)
}

/// Returns the variance of a window's cycles per instruction around the mean of its kind and record, as a fraction of
/// the squared mean, with its degrees of freedom. The variance is increased if successive windows resemble each other
/// (Bartlett 1946).
fn pooled_variance(kinds: &[MatchedWindows<'_>]) -> (f64, f64) {
    let (
        mut square_sum,
        mut product_sum,
        mut degrees_of_freedom,
        mut window_count,
        mut series_count,
    ) = (0.0, 0.0, 0, 0, 0);
    for samples in kinds.iter().flatten() {
        let mean_cycles_per_instr = cycles_per_instr(samples);
        let deviations: Vec<f64> = samples
            .iter()
            .map(|sample| {
                sample.cycles / (mean_cycles_per_instr * sample.instructions.max(1.0)) - 1.0
            })
            .collect();
        square_sum += deviations
            .iter()
            .map(|deviation| deviation * deviation)
            .sum::<f64>();
        product_sum += deviations
            .windows(2)
            .map(|pair| pair[0] * pair[1])
            .sum::<f64>();
        (degrees_of_freedom, window_count, series_count) = (
            degrees_of_freedom + samples.len() - 1,
            window_count + samples.len(),
            series_count + 1,
        );
    }
    if degrees_of_freedom == 0 {
        return (f64::INFINITY, 1.0);
    }
    let autocorrelation = if window_count < MIN_AUTOCORRELATION_WINDOWS || square_sum <= 0.0 {
        DEFAULT_AUTOCORRELATION
    } else {
        corrected_autocorrelation(product_sum / square_sum, series_count, window_count as f64)
    };
    let variance_factor = variance_factor(autocorrelation);
    (
        square_sum / degrees_of_freedom as f64 * variance_factor,
        (degrees_of_freedom as f64 / variance_factor).max(1.0),
    )
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use cachemate_core::test_support::observation_of;
    use cachemate_core::{CacheId, PendingItem, PlanItem, ProbeId, ProbeRequest, TaskId};

    pub fn observation_fixture(readings: &[(CounterEvent, u64)]) -> Observation {
        let task = TaskSample {
            name: "p".to_string(),
            counts: EventCounts::exact(readings.iter().copied()),
            ..TaskSample::new(TaskId(0), ProcessId(0))
        };
        observation_of(0, 1, [task])
    }

    /// Returns a window of one process with these counts.
    pub fn window_of(instructions: u64, cycles: u64, misses: u64) -> Observation {
        observation_fixture(&[
            (CounterEvent::Instructions, instructions),
            (CounterEvent::Cycles, cycles),
            (CounterEvent::Misses(CacheLevel::L2), misses),
        ])
    }

    /// Returns a window of one process in a phase in which this many accesses reach the cache.
    pub fn window_in_phase(instructions: u64, cycles: u64, l1_misses: u64) -> Observation {
        let [data, code] =
            [CacheLevel::L1Data, CacheLevel::L1Instruction].map(CounterEvent::Misses);
        let counts = [
            (CounterEvent::Instructions, instructions),
            (CounterEvent::Cycles, cycles),
            (data, l1_misses),
            (code, 0),
        ];
        observation_fixture(
            &[
                &counts[..],
                &[
                    (CounterEvent::References(CacheLevel::L2), l1_misses),
                    (CounterEvent::Misses(CacheLevel::L2), 10),
                ],
            ]
            .concat(),
        )
    }

    /// Are windows with disturbing probes or moving pages left out?
    #[test]
    fn only_undisturbed_windows_count() {
        let mut record = SpeedRecord::default();
        let stall = CounterEvent::StallCycles(StallCause::LocalMemory);
        let mut window = observation_fixture(&[
            (CounterEvent::Instructions, 1000),
            (CounterEvent::Cycles, 3000),
            (CounterEvent::Misses(CacheLevel::L2), 10),
            (stall, 1500),
        ]);
        let trace = ProbeRequest {
            id: ProbeId(1),
            kind: ProbeKind::MissTrace {
                task: TaskId(0),
                entries: 9,
                includes_code: false,
            },
            budget_ns: 1,
        };
        record.add(&window, CacheLevel::L2, &[trace]);
        let stream = ProbeKind::Neighbor {
            task: TaskId(0),
            neighbor: cachemate_core::Neighbor::Stream,
        };
        record.add(
            &window,
            CacheLevel::L2,
            &[ProbeRequest {
                id: ProbeId(2),
                kind: stream,
                budget_ns: 1,
            }],
        );
        let rows = ProbeKind::PairedRows {
            cache: CacheId(0),
            task: TaskId(0),
            peers: Vec::new(),
            total_ns: 1,
        };
        record.add(
            &window,
            CacheLevel::L2,
            &[ProbeRequest {
                id: ProbeId(3),
                kind: rows,
                budget_ns: 1,
            }],
        );
        assert_eq!(
            record.measured_speed(ProcessId(0)),
            None,
            "a trace, a stream and rows"
        );
        record.add(&window, CacheLevel::L2, &[]);
        let speed = record.measured_speed(ProcessId(0)).unwrap();
        assert_eq!(
            (speed.cycles_per_instr, speed.misses_per_kilo_instr),
            (3.0, Some(10.0))
        );
        assert_eq!(speed.stall_cycles_per_miss, Some(150.0));
        window.applied.pending.push(PendingItem {
            item: PlanItem::Plan,
            done: 1,
            total: Some(2),
        });
        record.add(&window, CacheLevel::L2, &[]);
        assert_eq!(record.windows, 1);
    }

    /// Are two records compared by their sums of speeds, and is there no result if one of them lacks a process?
    #[test]
    fn records_compare_by_sums_of_speeds() {
        let (mut slow, mut fast) = (SpeedRecord::default(), SpeedRecord::default());
        slow.add(&window_of(1000, 3000, 0), CacheLevel::L2, &[]);
        fast.add(&window_of(1000, 2000, 0), CacheLevel::L2, &[]);
        let ratio = |record: &SpeedRecord| {
            record
                .speed_over(&slow, &[(ProcessId(0), 2.0)])
                .map(|found| found.ratio)
        };
        assert_eq!(ratio(&fast), Some(1.5));
        assert_eq!(
            fast.speed_over(&slow, &[(ProcessId(0), 1.0), (ProcessId(1), 1.0)]),
            None
        );
    }

    /// Do extra slow windows in one record not affect the comparison, and are phases that only one record has left out,
    /// or too much of the work for a result?
    #[test]
    fn records_are_compared_by_the_phases_that_both_have() {
        let record = |windows: &[(u64, u64)]| {
            let mut record = SpeedRecord::default();
            for &(cycles, incoming) in windows {
                record.add(
                    &window_in_phase(10_000, cycles, incoming),
                    CacheLevel::L2,
                    &[],
                );
            }
            record
        };
        let (fast, slow) = ((10_000, 1_000), (40_000, 400));
        let mostly_fast = record(&[fast, fast, fast, slow]);
        let relative_speed = |windows: &[(u64, u64)]| {
            record(windows).speed_over(&mostly_fast, &[(ProcessId(0), 1.0)])
        };
        let is_close = |ratio: Option<Ratio>, expected: f64| {
            ratio.is_some_and(|ratio| (ratio.ratio - expected).abs() < 1e-9)
        };
        assert!(is_close(relative_speed(&[slow, slow, slow, fast]), 1.0));
        // The other record is ten percent faster in both phases, for any mix of them.
        assert!(is_close(
            relative_speed(&[(36_000, 400), (9_000, 1_000)]),
            1.0 / 0.9
        ));
        assert!(
            is_close(relative_speed(&[fast, slow, (90_000, 100)]), 1.0),
            "a phase that the other lacks"
        );
        assert_eq!(
            relative_speed(&[fast, (90_000, 100), (90_000, 100)]),
            None,
            "most of it is a phase that the other lacks"
        );
        // Further phases of the other record have no effect.
        assert!(is_close(
            record(&[slow]).speed_over(&mostly_fast, &[(ProcessId(0), 1.0)]),
            1.0
        ));
    }

    /// Is the error of a ratio no smaller than the spread of repetitions, and not much larger with independent windows,
    /// whose independence few windows cannot establish? Is it unknown if no two windows match?
    #[test]
    fn the_error_is_no_smaller_than_the_spread_of_repetitions() {
        let mut generator = cachemate_core::SplitMix64::new(5);
        let mut record = |windows: u32| {
            let mut record = SpeedRecord::default();
            for _ in 0..windows {
                record.add(
                    &window_of(1000, 2000 + generator.draw_below(1000), 10),
                    CacheLevel::L2,
                    &[],
                );
            }
            record
        };
        let weights = [(ProcessId(0), 1.0)];
        let ratios: Vec<Ratio> = (0..400)
            .map(|_| record(8).speed_over(&record(4), &weights).unwrap())
            .collect();
        let mean = ratios
            .iter()
            .map(|sample_ratio| sample_ratio.ratio)
            .sum::<f64>()
            / 400.0;
        let spread = libm::sqrt(
            ratios
                .iter()
                .map(|sample_ratio| (sample_ratio.ratio - mean).powi(2))
                .sum::<f64>()
                / 399.0,
        );
        let error = libm::sqrt(
            ratios
                .iter()
                .map(|sample_ratio| sample_ratio.standard_error.powi(2))
                .sum::<f64>()
                / 400.0,
        );
        assert!((0.95..1.35).contains(&(error / spread)), "{error} {spread}");
        assert_eq!(
            record(1)
                .speed_over(&record(1), &weights)
                .unwrap()
                .standard_error,
            f64::INFINITY
        );
    }
}
