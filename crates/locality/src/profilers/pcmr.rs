//! Derives partial-cache miss rates (PCMR) from co-run intervals (CASC 4.2.2).
//!
//! Problem: if only the cache as a whole has counters, the contribution of each thread to a group's miss rate cannot be
//! counted. Method: a group's miss rate is approximately the mean of its members' PCMRs. Therefore n + 1 groups, each
//! of which leaves out one of n + 1 threads, determine all PCMRs. This is the initial measurement, with the closed form
//! x_i = Σ rates − n · rate_i. A group with a single unknown member determines that member's PCMR; this is the
//! secondary measurement, x = n · rate − Σ known. Intervals under 200 µs are cold starts and are dropped. The others
//! are weighted by their length, until 2 ms are collected.
//!
//! If the machine counts each member separately, no equations are solved (`uses_task_counts`): a member's PCMR is its
//! own misses over its own references. This neither assumes that all members make equally many references nor amplifies
//! noise. A later probe of the same rows replaces the readings of the earlier one.
//!
//! Properties: a PCMR is a score of locality; if it was solved for, it may be negative or above 100. The solution
//! amplifies the noise of a group's rate by a factor of √((n − 1)² + n), which the interval of the estimate includes.

use std::collections::BTreeMap;

use cachemate_core::{
    CacheLevel, CoRunRowParameters, CounterEvent, Estimate, EvidenceKind, Fact, FactSource,
    Observation, ProbeEvidence, ProbeId, Profiler, Profiles, RowInterval, TaskId,
};

use super::PerTask;

/// Fills `pcmr`, in misses per 100 references.
#[derive(Clone, Debug)]
pub struct PcmrProfiler {
    level: CacheLevel,
    parameters: CoRunRowParameters,
    /// Readings of each row, by its members in order of id, with the last probe that measured them.
    rows: BTreeMap<Vec<TaskId>, (ProbeId, WeightedStats)>,
    newcomer_stats: PerTask<WeightedStats>,
    own_counts: PerTask<OwnCounts>,
    phases: BTreeMap<TaskId, u32>,
    /// Number of the current window.
    window: u64,
}

/// Mean and variance of interval readings, weighted by interval length.
#[derive(Clone, Copy, Debug, Default)]
struct WeightedStats {
    total_ns: f64,
    weighted_sum: f64,
    weighted_square_sum: f64,
    /// Σ length², from which the equivalent number of equal intervals follows.
    ns_square_sum: f64,
}

impl WeightedStats {
    fn add(&mut self, value: f64, ns: f64) {
        self.total_ns += ns;
        self.weighted_sum += ns * value;
        self.weighted_square_sum += ns * value * value;
        self.ns_square_sum += ns * ns;
    }
    fn mean(&self) -> f64 {
        self.weighted_sum / self.total_ns
    }
    /// Variance of the mean, not of the values; 0 for a single interval.
    fn variance(&self) -> f64 {
        let value_variance =
            (self.weighted_square_sum / self.total_ns - self.mean() * self.mean()).max(0.0);
        let largest_weight = self.ns_square_sum / (self.total_ns * self.total_ns);
        if largest_weight >= 1.0 {
            0.0
        } else {
            value_variance * largest_weight / (1.0 - largest_weight)
        }
    }
}

fn rate_fact(value: f64, variance: f64, window: u64) -> Fact<f64> {
    let error = 2.0 * variance.max(0.0).sqrt();
    let estimate = Estimate {
        value,
        low: value - error,
        high: value + error,
    };
    Fact::from_measurement(estimate, FactSource::CoRunRows, window)
}

/// Counts of one member of a row, if the machine counts members separately.
#[derive(Clone, Copy, Debug, Default)]
struct OwnCounts {
    probe: Option<ProbeId>,
    misses: f64,
    references: f64,
    ratios: WeightedStats,
}

impl PcmrProfiler {
    /// Builds a profiler for the shared cache of this level.
    pub fn new(level: CacheLevel, parameters: CoRunRowParameters) -> Self {
        PcmrProfiler {
            level,
            parameters,
            rows: BTreeMap::new(),
            newcomer_stats: PerTask::default(),
            own_counts: PerTask::default(),
            phases: BTreeMap::new(),
            window: 0,
        }
    }

    /// Misses per 100 references, and the weight of the interval; `None` for a cold start, or if the cache was not
    /// counted.
    fn miss_rate_and_weight(&self, interval: &RowInterval) -> Option<(f64, f64)> {
        let ns = interval.span.elapsed_ns as f64;
        let misses = interval
            .cache_counts
            .get(CounterEvent::Misses(self.level))?;
        let references = interval
            .cache_counts
            .get(CounterEvent::References(self.level))
            .filter(|&count| count > 0.0)?;
        let is_long_enough =
            ns >= self.parameters.min_interval_ns * self.parameters.scale && ns > 0.0;
        is_long_enough.then_some((100.0 * misses / references, ns))
    }

    /// Drops rows whose tasks have since changed phase or exited.
    fn drop_stale_rows(&mut self, profiles: &Profiles) {
        let phases = &self.phases;
        self.rows.retain(|members, _| {
            members.iter().all(|task| {
                profiles.get(task).map(|profile| profile.phase_number) == phases.get(task).copied()
            })
        });
        self.phases = profiles
            .iter()
            .map(|(&task, profile)| (task, profile.phase_number))
            .collect();
    }

    /// Adds the members' own counts. Returns `false` if the machine did not count every member separately.
    fn add_member_counts(
        &mut self,
        interval: &RowInterval,
        probe: ProbeId,
        ns: f64,
        profiles: &mut Profiles,
    ) -> bool {
        let misses_and_references = |counts: &cachemate_core::EventCounts| {
            Some((
                counts.get(CounterEvent::Misses(self.level))?,
                counts.get(CounterEvent::References(self.level))?,
            ))
        };
        let member_counts: Option<Vec<(f64, f64)>> = interval
            .task_counts
            .iter()
            .map(misses_and_references)
            .collect();
        let Some(member_counts) =
            member_counts.filter(|member_counts| member_counts.len() == interval.tasks.len())
        else {
            return false;
        };
        let min_ns = self.parameters.min_total_ns * self.parameters.scale;
        for (&task, (misses, references)) in interval.tasks.iter().zip(member_counts) {
            let Some((own_counts, profile)) = self.own_counts.find_profile(task, profiles) else {
                continue;
            };
            if own_counts.probe != Some(probe) {
                *own_counts = OwnCounts {
                    probe: Some(probe),
                    ..OwnCounts::default()
                };
            }
            if references > 0.0 {
                own_counts.misses += misses;
                own_counts.references += references;
                own_counts.ratios.add(100.0 * misses / references, ns);
            }
            if own_counts.ratios.total_ns >= min_ns {
                let rate = 100.0 * own_counts.misses / own_counts.references;
                profile.rates.pcmr =
                    Some(rate_fact(rate, own_counts.ratios.variance(), self.window));
            }
        }
        true
    }

    fn add_interval(&mut self, interval: &RowInterval, probe: ProbeId, profiles: &mut Profiles) {
        let Some((rate, ns)) = self.miss_rate_and_weight(interval) else {
            return;
        };
        if self.parameters.uses_task_counts && self.add_member_counts(interval, probe, ns, profiles)
        {
            return;
        }
        let mut members = interval.tasks.clone();
        members.sort_unstable();
        members.dedup();
        let known_pcmrs: Vec<f64> = members
            .iter()
            .filter_map(|task| Some(profiles.get(task)?.rates.pcmr?.value))
            .collect();
        let newcomer = members.iter().find(|task| {
            profiles
                .get(task)
                .is_some_and(|profile| profile.rates.pcmr.is_none())
        });
        match newcomer {
            Some(&newcomer)
                if known_pcmrs.len() + 1 == members.len() && !known_pcmrs.is_empty() =>
            {
                let value = members.len() as f64 * rate - known_pcmrs.iter().sum::<f64>();
                let min_ns = self.parameters.min_total_ns * self.parameters.scale;
                if let Some((stats, profile)) = self.newcomer_stats.find_profile(newcomer, profiles)
                {
                    stats.add(value, ns);
                    if stats.total_ns >= min_ns {
                        profile.rates.pcmr =
                            Some(rate_fact(stats.mean(), stats.variance(), self.window));
                    }
                }
            }
            _ => {
                let row = self
                    .rows
                    .entry(members)
                    .or_insert((probe, WeightedStats::default()));
                if row.0 != probe {
                    *row = (probe, WeightedStats::default());
                }
                row.1.add(rate, ns);
            }
        }
    }

    /// Solves the initial measurement for each set of threads whose rows are complete, if one of the threads has no
    /// PCMR or the last probe measured all rows.
    fn solve_complete_groups(&self, last_probe: Option<ProbeId>, profiles: &mut Profiles) {
        let min_ns = self.parameters.min_total_ns * self.parameters.scale;
        let complete_row = |members: &[TaskId]| {
            self.rows
                .get(members)
                .filter(|row| row.1.total_ns >= min_ns)
        };
        for (members, _) in self.rows.iter().filter(|(_, row)| row.1.total_ns >= min_ns) {
            let other_tasks: Vec<TaskId> = profiles
                .keys()
                .filter(|task| !members.contains(task))
                .copied()
                .collect();
            for added_task in other_tasks {
                let mut group = members.clone();
                group.push(added_task);
                group.sort_unstable();
                let group_without = |left_out: &TaskId| -> Vec<TaskId> {
                    group
                        .iter()
                        .filter(|task| *task != left_out)
                        .copied()
                        .collect()
                };
                let rows: Option<Vec<&(ProbeId, WeightedStats)>> = group
                    .iter()
                    .map(|task| complete_row(&group_without(task)))
                    .collect();
                let has_unknown_pcmr = group.iter().any(|task| {
                    profiles
                        .get(task)
                        .is_some_and(|profile| profile.rates.pcmr.is_none())
                });
                let Some(rows) = rows else { continue };
                if has_unknown_pcmr || rows.iter().all(|(probe, _)| Some(*probe) == last_probe) {
                    solve_members(
                        &group,
                        &rows.iter().map(|(_, row)| row).collect::<Vec<_>>(),
                        self.window,
                        profiles,
                    );
                }
            }
        }
    }
}

/// Applies the closed form to one group; `rows[i]` is the group without its member i.
fn solve_members(group: &[TaskId], rows: &[&WeightedStats], window: u64, profiles: &mut Profiles) {
    let co_runner_count = (group.len() - 1) as f64;
    let rate_sum: f64 = rows.iter().map(|row| row.mean()).sum();
    let variance_sum: f64 = rows.iter().map(|row| row.variance()).sum();
    for (task, row) in group.iter().zip(rows) {
        if let Some(profile) = profiles.get_mut(task) {
            let variance = variance_sum
                + ((co_runner_count - 1.0) * (co_runner_count - 1.0) - 1.0) * row.variance();
            profile.rates.pcmr = Some(rate_fact(
                rate_sum - co_runner_count * row.mean(),
                variance,
                window,
            ));
        }
    }
}

impl Profiler for PcmrProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("co-run rows (PCMR)", Some(EvidenceKind::CoRunRows))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        self.window = observation.window;
        self.newcomer_stats.retain_current(observation, profiles);
        self.own_counts.retain_current(observation, profiles);
        self.drop_stale_rows(profiles);
        let mut last_probe = None;
        for probe_result in &observation.probe_results {
            if let ProbeEvidence::Rows(intervals) = &probe_result.evidence {
                intervals
                    .iter()
                    .for_each(|interval| self.add_interval(interval, probe_result.probe, profiles));
                last_probe = Some(probe_result.probe);
            }
        }
        self.solve_complete_groups(last_probe, profiles);
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::{CacheId, EventCounts, Profile, RateFacts};

    const LLC: CacheLevel = CacheLevel::L2;

    fn interval(members: &[u32], elapsed_ns: u64, rate: f64) -> RowInterval {
        RowInterval {
            tasks: members.iter().map(|&task| TaskId(task)).collect(),
            cache: CacheId(0),
            span: time_span(elapsed_ns),
            ended_by_task: None,
            cache_counts: EventCounts::exact([
                (CounterEvent::References(LLC), 1_000_000),
                (CounterEvent::Misses(LLC), (rate * 1e4) as u64),
            ]),
            task_counts: Vec::new(),
        }
    }
    fn observation_of_rows(tasks: &[u32], intervals: Vec<RowInterval>) -> Observation {
        answered_window(0, tasks, ProbeEvidence::Rows(intervals))
    }
    const PCMR: [f64; 5] = [2.0, 4.0, 6.0, 28.0, 30.0];
    /// Five rows of four threads each, including a cold start in each row that must be ignored.
    fn initial_rows(elapsed_ns: u64) -> Vec<RowInterval> {
        let row = |left_out: u32| {
            let members: Vec<u32> = (0..5).filter(|&task| task != left_out).collect();
            let rate = members.iter().map(|&task| PCMR[task as usize]).sum::<f64>() / 4.0;
            [
                interval(&members, 150_000, 99.0),
                interval(&members, elapsed_ns, rate),
            ]
        };
        (0..5).flat_map(row).collect()
    }

    /// Does the initial measurement return the true PCMRs and ignore cold starts?
    #[test]
    fn rows_that_leave_one_out_give_all_pcmrs() {
        let (mut profiler, mut profiles) = (
            PcmrProfiler::new(LLC, CoRunRowParameters::default()),
            Profiles::new(),
        );
        profiler.update(
            &observation_of_rows(&[0, 1, 2, 3, 4], initial_rows(1_500_000)),
            &mut profiles,
        );
        assert!(
            profiles
                .values()
                .all(|profile| profile.rates.pcmr.is_none()),
            "1.5 ms of each row are not enough"
        );
        profiler.update(
            &observation_of_rows(&[0, 1, 2, 3, 4], initial_rows(600_000)),
            &mut profiles,
        );
        for (profile, truth) in profiles.values().zip(PCMR) {
            assert!(
                (profile.rates.pcmr.unwrap().value - truth).abs() < 1e-3,
                "{:?}, true {truth}",
                profile.rates.pcmr
            );
        }
    }

    /// Does the time scale shorten both the cold start and the collection time?
    #[test]
    fn the_time_scale_shortens_cold_start_and_collection() {
        let parameters = CoRunRowParameters {
            scale: 0.001,
            ..CoRunRowParameters::default()
        };
        let (mut profiler, mut profiles) = (PcmrProfiler::new(LLC, parameters), Profiles::new());
        let mut rows = initial_rows(2_100);
        rows.iter_mut()
            .step_by(2)
            .for_each(|cold| cold.span.elapsed_ns = 150);
        profiler.update(&observation_of_rows(&[0, 1, 2, 3, 4], rows), &mut profiles);
        assert!((profiles[&TaskId(4)].rates.pcmr.unwrap().value - 30.0).abs() < 1e-3);
    }

    /// Is the PCMR of a new task derived from groups whose other members are known, weighted by length?
    #[test]
    fn a_newcomer_is_measured_beside_known_peers() {
        let (mut profiler, mut profiles) = (
            PcmrProfiler::new(LLC, CoRunRowParameters::default()),
            Profiles::new(),
        );
        for (task, pcmr) in [(0, 4.0), (1, 10.0)] {
            let rates = RateFacts {
                pcmr: Some(Fact::oracle(pcmr)),
                ..RateFacts::default()
            };
            profiles.insert(TaskId(task), Profile::default().with_rates(rates));
        }
        // The true value is 20: (4 + 20) / 2 = 12, and (10 + 20) / 2 = 15, measured as 14 and 16 in halves of the time.
        let rows = vec![
            interval(&[0, 2], 1_000_000, 12.0),
            interval(&[1, 2], 1_000_000, 16.0),
        ];
        profiler.update(&observation_of_rows(&[0, 1, 2], rows), &mut profiles);
        let pcmr = profiles[&TaskId(2)].rates.pcmr.unwrap().estimate();
        assert!(
            (pcmr.value - 21.0).abs() < 1e-3 && pcmr.low < 20.0 && pcmr.high > 22.0,
            "{pcmr:?}"
        );
        assert_eq!(profiles[&TaskId(0)].rates.pcmr, Some(Fact::oracle(4.0)));
    }

    /// Are rows ignored that were measured in an earlier phase of one of their tasks?
    #[test]
    fn rows_of_an_earlier_phase_are_ignored() {
        let (mut profiler, mut profiles) = (
            PcmrProfiler::new(LLC, CoRunRowParameters::default()),
            Profiles::new(),
        );
        profiler.update(
            &observation_of_rows(&[0, 1, 2, 3, 4], initial_rows(1_500_000)),
            &mut profiles,
        );
        profiles.get_mut(&TaskId(3)).unwrap().phase_number = 1;
        profiler.update(
            &observation_of_rows(&[0, 1, 2, 3, 4], initial_rows(600_000)),
            &mut profiles,
        );
        assert!(
            profiles
                .values()
                .all(|profile| profile.rates.pcmr.is_none())
        );
    }

    /// Does a later probe of the same rows replace the earlier one's results?
    #[test]
    fn measuring_again_replaces_the_estimate() {
        let (mut profiler, mut profiles) = (
            PcmrProfiler::new(LLC, CoRunRowParameters::default()),
            Profiles::new(),
        );
        profiler.update(
            &observation_of_rows(&[0, 1, 2, 3, 4], initial_rows(2_100_000)),
            &mut profiles,
        );
        let mut repeated_rows = initial_rows(2_100_000);
        for interval in &mut repeated_rows {
            interval.cache_counts = EventCounts::exact([
                (CounterEvent::References(LLC), 1_000),
                (CounterEvent::Misses(LLC), 500),
            ]);
        }
        let mut second_window = observation_of_rows(&[0, 1, 2, 3, 4], repeated_rows);
        second_window.probe_results[0].probe = ProbeId(9);
        profiler.update(&second_window, &mut profiles);
        assert!(
            profiles
                .values()
                .all(|profile| (profile.rates.pcmr.unwrap().value - 50.0).abs() < 1e-9),
            "{profiles:?}"
        );
    }

    /// Do the members' own counts give their true miss rates if one member makes few references, although solving the
    /// rows' rates is far off?
    #[test]
    fn members_own_counts_give_their_true_miss_rates() {
        let rates = [2.0, 4.0, 60.0];
        let references = [1_000_000u64, 1_000_000, 100_000];
        let row_of_pair = |members: [usize; 2]| {
            let references_and_misses = |index: usize| {
                (
                    references[index],
                    (references[index] as f64 * rates[index] / 100.0) as u64,
                )
            };
            let event_counts = |(references, misses): (u64, u64)| {
                EventCounts::exact([
                    (CounterEvent::References(LLC), references),
                    (CounterEvent::Misses(LLC), misses),
                ])
            };
            let (a, b) = (
                references_and_misses(members[0]),
                references_and_misses(members[1]),
            );
            RowInterval {
                cache_counts: event_counts((a.0 + b.0, a.1 + b.1)),
                task_counts: vec![event_counts(a), event_counts(b)],
                ..interval(&members.map(|index| index as u32), 2_100_000, 0.0)
            }
        };
        let rows = vec![
            row_of_pair([1, 2]),
            row_of_pair([0, 2]),
            row_of_pair([0, 1]),
        ];
        let pcmr_with = |own_counts: bool| {
            let parameters = CoRunRowParameters {
                uses_task_counts: own_counts,
                ..CoRunRowParameters::default()
            };
            let (mut profiler, mut profiles) =
                (PcmrProfiler::new(LLC, parameters), Profiles::new());
            profiler.update(
                &observation_of_rows(&[0, 1, 2], rows.clone()),
                &mut profiles,
            );
            profiles[&TaskId(2)].rates.pcmr.unwrap().value
        };
        assert!(
            (pcmr_with(true) - 60.0).abs() < 1e-9 && pcmr_with(false) < 20.0,
            "{} {}",
            pcmr_with(true),
            pcmr_with(false)
        );
    }

    /// Is the noise of equally noisy rows amplified by √((n − 1)² + n), as the closed form predicts?
    #[test]
    fn noise_of_rows_is_amplified_as_the_closed_form_predicts() {
        let row_with_spread = |spread: f64| {
            let mut row = WeightedStats::default();
            (0..100).for_each(|index| {
                row.add(10.0 + if index % 2 == 1 { spread } else { -spread }, 1.0)
            });
            row
        };
        let (n, noisy) = (8.0f64, row_with_spread(1.0));
        let tasks: Vec<TaskId> = (0..9).map(TaskId).collect();
        let mut profiles: Profiles = tasks
            .iter()
            .map(|&task| (task, Profile::default()))
            .collect();
        solve_members(&tasks, &[&noisy; 9], 0, &mut profiles);
        let pcmr = profiles[&TaskId(0)].rates.pcmr.unwrap();
        let amplified = 0.5 * (pcmr.estimate().high - pcmr.value) / noisy.variance().sqrt();
        assert!(
            (amplified - ((n - 1.0) * (n - 1.0) + n).sqrt()).abs() < 1e-9,
            "{amplified}"
        );
    }
}
