//! Sampled remote accesses to shMaps (thesis 3.4.2); one filter per process, cleared for every new round of detection.
//!
//! Processes that share memory see it at different virtual addresses. Where samples carry the physical line, all
//! processes can have one filter over physical regions instead ([`SharingProfiler::across_processes`]), and threads of
//! different processes are compared like those of one.

use std::collections::BTreeMap;

use cachemate_core::{
    Evidence, EvidenceKind, Fact, FactSource, Observation, ProbeId, ProcessId, Profiler, Profiles, ShMapParameters,
    SharingMap, Source,
};

use super::{keep_present, seen_task};
use crate::shmap::ShMaps;

/// Fills `sharing`: the task's shMap counters.
#[derive(Clone, Debug)]
pub struct SharingProfiler {
    parameters: ShMapParameters,
    across_processes: bool,
    /// By process; `None` = the whole machine, by physical line.
    filters: BTreeMap<Option<ProcessId>, ShMaps>,
    /// The probe that the maps are of, and whether it has had its last answer.
    round: Option<(ProbeId, bool)>,
}

impl SharingProfiler {
    /// With the thesis's 256 counters of 128-byte regions, or others.
    pub fn new(parameters: ShMapParameters) -> Self {
        SharingProfiler { parameters, across_processes: false, filters: BTreeMap::new(), round: None }
    }

    /// With one filter for all processes, as far as samples say which physical line they touched.
    #[must_use]
    pub fn across_processes(mut self) -> Self {
        self.across_processes = true;
        self
    }

    /// A new probe, or the next answers of one that was complete, is a new round: nothing of the old one counts.
    fn begin(&mut self, probe: ProbeId, complete: bool, profiles: &mut Profiles) {
        if self.round.is_none_or(|(other, done)| other != probe || done) {
            self.filters.clear();
            for profile in profiles.values_mut() {
                profile.sharing.map = None;
            }
        }
        self.round = Some((probe, complete));
    }
}

impl Profiler for SharingProfiler {
    fn name(&self) -> &'static str {
        "shared regions"
    }
    fn needs(&self) -> &'static [EvidenceKind] {
        &[EvidenceKind::AccessSamples]
    }
    fn update(&mut self, seen: &Observation, profiles: &mut Profiles) {
        keep_present(seen, profiles);
        let alive = |process| seen.tasks.iter().filter(|task| task.process == process && !task.exited).count();
        let mut threads: BTreeMap<ProcessId, usize> = BTreeMap::new();
        for task in &seen.tasks {
            threads.entry(task.process).or_insert_with(|| alive(task.process));
        }
        let all = threads.values().sum();
        let mut began = None;
        for answer in &seen.answers {
            let Evidence::Samples { line_bytes, samples, .. } = &answer.evidence else { continue };
            if began != Some(answer.probe) {
                self.begin(answer.probe, answer.complete, profiles);
                began = Some(answer.probe);
            }
            for sample in samples.iter().filter(|sample| sample.source == Source::RemoteCache) {
                let Some(task) = seen_task(seen, sample.task) else { continue };
                let of_process = threads.get(&task.process).copied().unwrap_or(1);
                let (filter, line, sharers) = match sample.physical_line.filter(|_| self.across_processes) {
                    Some(line) => (None, line, all),
                    None => (Some(task.process), sample.virtual_line, of_process),
                };
                let maps = self.filters.entry(filter).or_insert_with(|| ShMaps::new(self.parameters));
                maps.touch(sample.task, line.saturating_mul(u64::from(*line_bytes)), sharers);
            }
        }
        let alive = |process: &ProcessId| threads.get(process).is_some_and(|&count| count > 0);
        self.filters.retain(|filter, _| filter.as_ref().is_none_or(alive));
        for task in &seen.tasks {
            let counters = |filter| self.filters.get(&filter).and_then(|maps: &ShMaps| maps.of(task.task));
            let (machine, process) = (counters(None), counters(Some(task.process)));
            if let (Some(counters), Some(profile)) = (machine.or(process), profiles.get_mut(&task.task)) {
                let map = SharingMap { counters: counters.to_vec(), machine_wide: machine.is_some() };
                profile.sharing.map = Some(Fact::new(map, FactSource::AccessSamples, seen.window));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use crate::shmap::{Sharing, global_entries, similarity};
    use cachemate_core::{AccessSample, Answer, TaskId};

    fn sample(task: u32, virtual_line: u64, source: Source) -> AccessSample {
        AccessSample { task: TaskId(task), virtual_line, physical_line: None, source, latency_cycles: None, at_ns: 0 }
    }
    fn round(probe: u32, complete: bool, samples: Vec<AccessSample>) -> Observation {
        let mut seen = window(0, &[0, 1, 2, 3]);
        seen.tasks.iter_mut().for_each(|task| task.process = ProcessId(0));
        let evidence = Evidence::Samples { one_in: 10, events: 1000, line_bytes: 128, samples };
        seen.answers = vec![Answer { complete, ..answer(probe, evidence) }];
        seen
    }
    fn pairs() -> Vec<AccessSample> {
        // Threads 0 and 1 share lines 1000.., threads 2 and 3 share lines 9000..; one local access that must not count.
        let mut samples: Vec<AccessSample> = (0..400)
            .map(|at| sample(at % 4, if at % 4 < 2 { 1000 } else { 9000 } + u64::from(at / 4 % 5), Source::RemoteCache))
            .collect();
        samples.push(sample(0, 9000, Source::Memory));
        samples
    }

    /// Do threads that share data come out alike, over several windows of one round?
    #[test]
    fn sharing_threads_have_similar_maps() {
        let (mut profiler, mut profiles) = (SharingProfiler::new(ShMapParameters::default()), Profiles::new());
        profiler.update(&round(1, false, pairs()), &mut profiles);
        profiler.update(&round(1, true, pairs()), &mut profiles);
        let maps: Vec<Vec<u8>> =
            profiles.values().map(|profile| profile.sharing_map().unwrap().counters.clone()).collect();
        assert_eq!(maps[0].iter().map(|&count| u32::from(count)).sum::<u32>(), 200);
        let maps: Vec<&[u8]> = maps.iter().map(Vec::as_slice).collect();
        let global = global_entries(&maps, &Sharing::default());
        assert_eq!(similarity(maps[0], maps[1], &global, 3), 5 * 40 * 40);
        assert_eq!(similarity(maps[0], maps[2], &global, 3), 0);
    }

    /// Do threads of two processes that share memory come out alike by physical line, and not by virtual line?
    #[test]
    fn processes_that_share_memory_are_comparable_by_physical_line() {
        let mapped = |shift: u64| {
            let shifted = |s: AccessSample| AccessSample {
                physical_line: Some(s.virtual_line),
                virtual_line: s.virtual_line + shift * u64::from(s.task.0),
                ..s
            };
            pairs().into_iter().map(shifted).collect::<Vec<_>>()
        };
        for (across, alike) in [(true, 5 * 20 * 20), (false, 0)] {
            let mut profiler = SharingProfiler::new(ShMapParameters::default());
            profiler.across_processes = across;
            let mut profiles = Profiles::new();
            let mut seen = round(1, true, mapped(1 << 20));
            for task in &mut seen.tasks {
                task.process = cachemate_core::ProcessId(task.task.0);
            }
            profiler.update(&seen, &mut profiles);
            let map = |task: u32| profiles[&TaskId(task)].sharing_map().unwrap().counters.clone();
            assert_eq!(profiles[&TaskId(0)].sharing_map().unwrap().machine_wide, across);
            if across {
                assert_eq!(similarity(&map(0), &map(1), &[], 3), alike);
                assert_eq!(similarity(&map(0), &map(2), &[], 3), 0);
            }
        }
    }

    /// Does a new round start with an empty filter and empty maps?
    #[test]
    fn a_new_round_starts_anew() {
        let (mut profiler, mut profiles) = (SharingProfiler::new(ShMapParameters::default()), Profiles::new());
        profiler.update(&round(1, true, pairs()), &mut profiles);
        profiler.update(&round(1, true, vec![sample(0, 77, Source::RemoteCache)]), &mut profiles);
        let counted: u32 =
            profiles[&TaskId(0)].sharing_map().unwrap().counters.iter().map(|&count| u32::from(count)).sum();
        assert_eq!(counted, 1);
        assert_eq!(profiles[&TaskId(1)].sharing_map(), None);
    }
}
