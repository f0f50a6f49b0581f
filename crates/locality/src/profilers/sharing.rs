//! Builds shMaps from sampled remote accesses (thesis 3.4.2), with one filter per process that is cleared for every
//! round of detection.
//!
//! Processes that share memory access it at different virtual addresses. If the samples carry physical addresses, all
//! processes can instead use one filter over physical regions ([`SharingProfiler::with_cross_process_pages`]), so that
//! threads of different processes are compared like those of one.

use std::collections::BTreeMap;

use cachemate_core::{
    DataSource, Estimate, EvidenceKind, Fact, FactSource, Observation, ProbeEvidence, ProbeId,
    ProcessId, Profiler, Profiles, ShMapParameters, SharingFacts, SharingMap, TaskId,
};

use super::{find_sample, retain_live};
use crate::shmap::ShMaps;

/// Maximum number of lines that are followed in a round. Samples of further lines are counted, but not attributed to
/// other tasks.
const MAX_LINES: usize = 1 << 16;

/// Users of each sampled line in one round.
#[derive(Clone, Debug, Default)]
struct LineUsers {
    /// Number of remote accesses by line and task. The process of the line is `None` if the address is physical.
    accesses_by_line: BTreeMap<(Option<ProcessId>, u64), BTreeMap<TaskId, u32>>,
    accesses_by_task: BTreeMap<TaskId, u32>,
}

impl LineUsers {
    fn touch(&mut self, filter: Option<ProcessId>, line: u64, task: TaskId) {
        *self.accesses_by_task.entry(task).or_default() += 1;
        let has_room = self.accesses_by_line.len() < MAX_LINES;
        if has_room || self.accesses_by_line.contains_key(&(filter, line)) {
            *self
                .accesses_by_line
                .entry((filter, line))
                .or_default()
                .entry(task)
                .or_default() += 1;
        }
    }

    /// Share of a task's remote accesses that goes to lines of each other task. Samples do not show which task wrote a
    /// line last, so the accesses are divided among the line's other users in proportion to theirs.
    fn partner_shares(&self, task: TaskId) -> BTreeMap<TaskId, f64> {
        let mut sums: BTreeMap<TaskId, f64> = BTreeMap::new();
        let own_samples = f64::from(
            self.accesses_by_task
                .get(&task)
                .copied()
                .unwrap_or_default(),
        );
        for users in self.accesses_by_line.values() {
            let Some(&own_accesses) = users.get(&task) else {
                continue;
            };
            let other_users = || users.iter().filter(|(other, _)| **other != task);
            let other_samples: u32 = other_users().map(|(_, count)| count).sum();
            for (partner, &count) in other_users() {
                *sums.entry(*partner).or_default() += f64::from(own_accesses) * f64::from(count)
                    / f64::from(other_samples)
                    / own_samples;
            }
        }
        sums
    }

    /// Each share has the 95 % interval of a proportion over this number of samples (normal approximation).
    fn share_facts(&self, task: TaskId, window: u64) -> BTreeMap<TaskId, Fact<f64>> {
        let own_samples = f64::from(
            self.accesses_by_task
                .get(&task)
                .copied()
                .unwrap_or_default(),
        );
        let share_fact = |share: f64| {
            let margin = 1.96 * (share * (1.0 - share).max(0.0) / own_samples).sqrt();
            let estimate = Estimate {
                value: share,
                low: (share - margin).max(0.0),
                high: (share + margin).min(1.0),
            };
            Fact::from_measurement(estimate, FactSource::AccessSamples, window)
        };
        self.partner_shares(task)
            .into_iter()
            .map(|(partner, share)| (partner, share_fact(share)))
            .collect()
    }
}

/// Fills `sharing`: the task's shMap counters, and its shares of remote accesses to lines of other tasks.
#[derive(Clone, Debug)]
pub struct SharingProfiler {
    parameters: ShMapParameters,
    uses_machine_wide_filter: bool,
    /// Filters by process; under `None`, the filter of the whole machine, by physical line.
    filters: BTreeMap<Option<ProcessId>, ShMaps>,
    users: LineUsers,
    /// Probe that filled the maps, and whether its final answer has arrived.
    current_round: Option<(ProbeId, bool)>,
}

impl SharingProfiler {
    /// Builds a profiler with these parameters (thesis: 256 counters, regions of 128 bytes).
    pub fn new(parameters: ShMapParameters) -> Self {
        SharingProfiler {
            parameters,
            uses_machine_wide_filter: false,
            filters: BTreeMap::new(),
            users: LineUsers::default(),
            current_round: None,
        }
    }

    /// Configures the profiler to use one filter for all processes, for samples that carry the physical line.
    #[must_use]
    pub fn with_cross_process_pages(mut self) -> Self {
        self.uses_machine_wide_filter = true;
        self
    }

    /// Starts a new round and drops all counts of the old one, if the probe is new or the preceding answer was final.
    fn start_probe(&mut self, probe: ProbeId, complete: bool, profiles: &mut Profiles) {
        if self
            .current_round
            .is_none_or(|(current_probe, is_complete)| current_probe != probe || is_complete)
        {
            self.filters.clear();
            self.users = LineUsers::default();
            for profile in profiles.values_mut() {
                profile.sharing = SharingFacts::default();
            }
        }
        self.current_round = Some((probe, complete));
    }
}

impl Profiler for SharingProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("shared regions", Some(EvidenceKind::AccessSamples))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        retain_live(observation, profiles);
        let live_count = |process| {
            observation
                .tasks
                .iter()
                .filter(|task| task.process == process && !task.exited)
                .count()
        };
        let mut thread_counts: BTreeMap<ProcessId, usize> = BTreeMap::new();
        for task in &observation.tasks {
            thread_counts
                .entry(task.process)
                .or_insert_with(|| live_count(task.process));
        }
        let thread_count = thread_counts.values().sum();
        let mut started_probe = None;
        for probe_result in &observation.probe_results {
            let ProbeEvidence::Samples {
                line_bytes,
                samples,
                ..
            } = &probe_result.evidence
            else {
                continue;
            };
            if started_probe != Some(probe_result.probe) {
                self.start_probe(probe_result.probe, probe_result.complete, profiles);
                started_probe = Some(probe_result.probe);
            }
            for sample in samples
                .iter()
                .filter(|sample| sample.source == DataSource::RemoteCache)
            {
                let Some(task) = find_sample(observation, sample.task) else {
                    continue;
                };
                let process_threads = thread_counts.get(&task.process).copied().unwrap_or(1);
                let (filter, line, sharers) = match sample
                    .physical_line
                    .filter(|_| self.uses_machine_wide_filter)
                {
                    Some(line) => (None, line, thread_count),
                    None => (Some(task.process), sample.virtual_line, process_threads),
                };
                let maps = self
                    .filters
                    .entry(filter)
                    .or_insert_with(|| ShMaps::new(self.parameters));
                self.users.touch(filter, line, sample.task);
                maps.touch(
                    sample.task,
                    line.saturating_mul(u64::from(*line_bytes)),
                    sharers,
                );
            }
        }
        let is_process_live =
            |process: &ProcessId| thread_counts.get(process).is_some_and(|&count| count > 0);
        self.filters
            .retain(|filter, _| filter.as_ref().is_none_or(is_process_live));
        for task in &observation.tasks {
            let counters_of = |filter| {
                self.filters
                    .get(&filter)
                    .and_then(|maps: &ShMaps| maps.map_of(task.task))
            };
            let (machine_counters, process_counters) =
                (counters_of(None), counters_of(Some(task.process)));
            if let (Some(counters), Some(profile)) = (
                machine_counters.or(process_counters),
                profiles.get_mut(&task.task),
            ) {
                let map = SharingMap {
                    counters: counters.to_vec(),
                    machine_wide: machine_counters.is_some(),
                };
                profile.sharing.map = Some(Fact::new(
                    map,
                    FactSource::AccessSamples,
                    observation.window,
                ));
                if started_probe.is_some() {
                    profile.sharing.with = self.users.share_facts(task.task, observation.window);
                    profile.sharing.with.retain(|partner, _| {
                        find_sample(observation, *partner).is_some_and(|other| !other.exited)
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use crate::shmap::{self, global_entries, similarity};
    use cachemate_core::{AccessSample, ProbeResult};

    fn sample(task: u32, virtual_line: u64, source: DataSource) -> AccessSample {
        AccessSample {
            task: TaskId(task),
            virtual_line,
            physical_line: None,
            source,
            latency_cycles: None,
            at_ns: 0,
        }
    }
    fn round_window(probe: u32, complete: bool, samples: Vec<AccessSample>) -> Observation {
        let mut observation = idle_window(0, &[0, 1, 2, 3]);
        observation
            .tasks
            .iter_mut()
            .for_each(|task| task.process = ProcessId(0));
        let evidence = ProbeEvidence::Samples {
            sample_period: 10,
            events: 1000,
            line_bytes: 128,
            samples,
        };
        observation.probe_results = vec![ProbeResult {
            complete,
            ..complete_answer(probe, evidence)
        }];
        observation
    }
    fn paired_samples() -> Vec<AccessSample> {
        // Threads 0 and 1 share lines 1000.., threads 2 and 3 share lines 9000.., and one access is local and must be
        // ignored.
        let mut samples: Vec<AccessSample> = (0..400)
            .map(|index| {
                sample(
                    index % 4,
                    if index % 4 < 2 { 1000 } else { 9000 } + u64::from(index / 4 % 5),
                    DataSource::RemoteCache,
                )
            })
            .collect();
        samples.push(sample(0, 9000, DataSource::Memory));
        samples
    }

    /// Do threads that share data have similar maps, over several windows of one round?
    #[test]
    fn sharing_threads_have_similar_maps() {
        let (mut profiler, mut profiles) = (
            SharingProfiler::new(ShMapParameters::default()),
            Profiles::new(),
        );
        profiler.update(&round_window(1, false, paired_samples()), &mut profiles);
        profiler.update(&round_window(1, true, paired_samples()), &mut profiles);
        let maps: Vec<Vec<u8>> = profiles
            .values()
            .map(|profile| profile.sharing_map().unwrap().counters.clone())
            .collect();
        assert_eq!(
            maps[0].iter().map(|&count| u32::from(count)).sum::<u32>(),
            200
        );
        let maps: Vec<&[u8]> = maps.iter().map(Vec::as_slice).collect();
        let global = global_entries(&maps, &shmap::SharingCriteria::default());
        assert_eq!(similarity(maps[0], maps[1], &global, 3), 5 * 40 * 40);
        assert_eq!(similarity(maps[0], maps[2], &global, 3), 0);
    }

    /// Are remote accesses attributed to the only partner, or divided in proportion to the accesses of several?
    #[test]
    fn remote_accesses_are_attributed_to_tasks_on_the_same_lines() {
        let (mut profiler, mut profiles) = (
            SharingProfiler::new(ShMapParameters::default()),
            Profiles::new(),
        );
        profiler.update(&round_window(1, true, paired_samples()), &mut profiles);
        let partners_of = |profiles: &Profiles, task: u32| -> Vec<(u32, f64)> {
            profiles[&TaskId(task)]
                .sharing
                .with
                .iter()
                .map(|(partner, fact)| (partner.0, fact.value))
                .collect()
        };
        assert_eq!(
            [0, 1, 2, 3].map(|task| partners_of(&profiles, task)),
            [
                vec![(1, 1.0)],
                vec![(0, 1.0)],
                vec![(3, 1.0)],
                vec![(2, 1.0)]
            ]
        );
        // Task 0 samples line 7 four times, task 1 once and task 2 three times. Line 8, to which a third of task 0's
        // samples go, has no other user.
        let remote_samples =
            |task, line, times| vec![sample(task, line, DataSource::RemoteCache); times];
        let samples = [
            remote_samples(0, 7, 4),
            remote_samples(0, 8, 2),
            remote_samples(1, 7, 1),
            remote_samples(2, 7, 3),
        ]
        .concat();
        profiler.update(&round_window(2, true, samples), &mut profiles);
        let (profile, third) = (partners_of(&profiles, 0), 2.0 / 3.0);
        assert!(
            (profile[0].1 - third / 4.0).abs() < 1e-12
                && (profile[1].1 - third * 3.0 / 4.0).abs() < 1e-12,
            "{profile:?}"
        );
        let estimate = profiles[&TaskId(0)].sharing.with[&TaskId(2)].estimate();
        assert!(
            (estimate.value - estimate.low - 1.96 * (0.25f64 / 6.0).sqrt()).abs() < 1e-12,
            "of six half: {estimate:?}"
        );
        assert_eq!(
            partners_of(&profiles, 3),
            [],
            "a round that it is not in says nothing of it"
        );
    }

    /// Are threads of two processes that share memory similar by physical line, and not by virtual line?
    #[test]
    fn processes_that_share_memory_are_comparable_by_physical_line() {
        let map_with_shift = |shift: u64| {
            let shifted = |s: AccessSample| AccessSample {
                physical_line: Some(s.virtual_line),
                virtual_line: s.virtual_line + shift * u64::from(s.task.0),
                ..s
            };
            paired_samples()
                .into_iter()
                .map(shifted)
                .collect::<Vec<_>>()
        };
        for (across, alike) in [(true, 5 * 20 * 20), (false, 0)] {
            let mut profiler = SharingProfiler::new(ShMapParameters::default());
            profiler.uses_machine_wide_filter = across;
            let mut profiles = Profiles::new();
            let mut observation = round_window(1, true, map_with_shift(1 << 20));
            for task in &mut observation.tasks {
                task.process = cachemate_core::ProcessId(task.task.0);
            }
            profiler.update(&observation, &mut profiles);
            let counters_of = |task: u32| {
                profiles[&TaskId(task)]
                    .sharing_map()
                    .unwrap()
                    .counters
                    .clone()
            };
            assert_eq!(
                profiles[&TaskId(0)].sharing_map().unwrap().machine_wide,
                across
            );
            if across {
                assert_eq!(similarity(&counters_of(0), &counters_of(1), &[], 3), alike);
                assert_eq!(similarity(&counters_of(0), &counters_of(2), &[], 3), 0);
            }
        }
    }

    /// Does a new round start with an empty filter and empty maps?
    #[test]
    fn a_new_round_starts_with_empty_filter_and_maps() {
        let (mut profiler, mut profiles) = (
            SharingProfiler::new(ShMapParameters::default()),
            Profiles::new(),
        );
        profiler.update(&round_window(1, true, paired_samples()), &mut profiles);
        profiler.update(
            &round_window(1, true, vec![sample(0, 77, DataSource::RemoteCache)]),
            &mut profiles,
        );
        let counter_sum: u32 = profiles[&TaskId(0)]
            .sharing_map()
            .unwrap()
            .counters
            .iter()
            .map(|&count| u32::from(count))
            .sum();
        assert_eq!(counter_sum, 1);
        assert_eq!(profiles[&TaskId(1)].sharing_map(), None);
    }
}
