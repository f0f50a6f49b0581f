//! Derives reuse times from watched locations and, by StatCache or StatStack, a miss-rate curve (BS 1).
//!
//! A watch point counts all accesses, but the modeled cache receives only those that miss the L1. If both are counted,
//! the shortest times are treated as L1 hits and left out, and the others are converted to references behind the L1.
//! The remaining times describe the same footprint, because P(T > t) grows by the factor by which t shrinks.
//!
//! Code shares the cache with data. If the machine also watches fetched lines ([`ReuseProfiler::with_code`]), the curve
//! includes the occupancy and the misses of code. If it watches only data, references by code are subtracted from the
//! count, as if they hit.

use cachemate_core::{
    CacheLevel, CounterEvent, Estimate, EvidenceKind, Fact, FactSource, Observation, ProbeEvidence,
    Profiler, Profiles, ReplacementModel, TaskSample,
};

use super::{PerTask, find_sample, probe_evidence};
use crate::reuse::ReuseTimes;
use crate::{statcache, statstack};

/// Fills `reuse_times`, and `misses_per_kilo_instr` if the task's references per instruction are known.
#[derive(Clone, Debug)]
pub struct ReuseProfiler {
    level: CacheLevel,
    model: ReplacementModel,
    line_bytes: u64,
    sizes_bytes: Vec<u64>,
    includes_code: bool,
    tasks: PerTask<TaskReuses>,
}

/// Reuse times and rates of one task.
#[derive(Clone, Debug, Default)]
struct TaskReuses {
    /// Reuse times in accesses, as the watch points counted them.
    access_times: ReuseTimes,
    /// Reuse times in references behind the L1.
    reference_times: ReuseTimes,
    data_accesses: PerInstrRate,
    fetches: PerInstrRate,
    references: PerInstrRate,
    code_misses: PerInstrRate,
}

/// A rate per instruction, averaged over the windows in which the machine's multiplexed counters counted it.
#[derive(Clone, Copy, Debug, Default)]
struct PerInstrRate {
    count: f64,
    instructions: f64,
}

impl PerInstrRate {
    fn add(&mut self, task: &TaskSample, event: CounterEvent) {
        if let Some((count, instructions)) = task
            .counts
            .get(event)
            .zip(task.counts.get(CounterEvent::Instructions))
        {
            self.count += count;
            self.instructions += instructions;
        }
    }
    fn mean_rate(&self) -> Option<f64> {
        (self.instructions > 0.0).then(|| self.count / self.instructions)
    }
}

impl TaskReuses {
    /// Fraction of the watched accesses that miss the L1, in (0, 1]; 1 if this was not counted, which leaves the times
    /// unfiltered.
    fn l1_miss_share(&self, includes_code: bool) -> f64 {
        let counted_miss_share = || {
            let (fetches, code) = (
                self.fetches.mean_rate().unwrap_or(0.0),
                self.code_misses.mean_rate().unwrap_or(0.0),
            );
            let (watched_fetches, unwatched_misses) = if includes_code {
                (fetches, 0.0)
            } else {
                (0.0, code)
            };
            let access_rate = Some(self.data_accesses.mean_rate()? + watched_fetches)
                .filter(|&rate| rate > 0.0)?;
            Some(((self.references.mean_rate()? - unwatched_misses) / access_rate).clamp(0.0, 1.0))
        };
        counted_miss_share()
            .filter(|&share| share > 0.0)
            .unwrap_or(1.0)
    }
}

impl ReuseProfiler {
    /// Builds a profiler of the reuses among references to the cache of this level, and of the curve at these sizes by
    /// this replacement model. The sizes may be in any order.
    pub fn new(
        level: CacheLevel,
        model: ReplacementModel,
        line_bytes: u64,
        mut sizes_bytes: Vec<u64>,
    ) -> Self {
        sizes_bytes.sort_unstable();
        sizes_bytes.dedup();
        let line_bytes = line_bytes.max(1);
        ReuseProfiler {
            level,
            model,
            line_bytes,
            sizes_bytes,
            includes_code: false,
            tasks: PerTask::default(),
        }
    }

    /// Configures the profiler for machines whose watch points cover fetched code as well as data.
    #[must_use]
    pub fn with_code(self) -> Self {
        ReuseProfiler {
            includes_code: true,
            ..self
        }
    }

    /// Misses per thousand instructions by size in bytes, each with two standard errors of a proportion over this
    /// number of samples; `None` if the model has no result.
    fn estimate_curve(
        &self,
        reuse: &ReuseTimes,
        refs_per_kilo_instr: f64,
    ) -> Option<Vec<(u64, Estimate)>> {
        let point = |&size_bytes: &u64| {
            let lines = size_bytes / self.line_bytes;
            let ratio = match self.model {
                ReplacementModel::Random => statcache::miss_ratio(reuse, lines),
                ReplacementModel::Lru => statstack::miss_ratio(reuse, lines),
            }?;
            let error = 2.0 * (ratio * (1.0 - ratio) / reuse.samples()).max(0.0).sqrt();
            let clamped_rate = |ratio: f64| ratio.clamp(0.0, 1.0) * refs_per_kilo_instr;
            Some((
                size_bytes,
                Estimate {
                    value: clamped_rate(ratio),
                    low: clamped_rate(ratio - error),
                    high: clamped_rate(ratio + error),
                },
            ))
        };
        self.sizes_bytes.iter().map(point).collect()
    }

    /// Per nanosecond of the task's CPU time; `None` if the references or that time were not measured.
    fn references_per_ns(&self, task: Option<&TaskSample>) -> Option<f64> {
        let task = task?;
        let ran_ns = task.ran_ns();
        (ran_ns > 0)
            .then_some(task.counts.get(CounterEvent::References(self.level))? / ran_ns as f64)
    }
}

impl Profiler for ReuseProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("reuse times", Some(EvidenceKind::ReuseSamples))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        self.tasks.retain_current(observation, profiles);
        for task in observation
            .tasks
            .iter()
            .filter(|_| self.level > CacheLevel::L1Data)
        {
            let Some((task_reuses, _)) = self.tasks.find_profile(task.task, profiles) else {
                continue;
            };
            task_reuses
                .data_accesses
                .add(task, CounterEvent::References(CacheLevel::L1Data));
            task_reuses
                .fetches
                .add(task, CounterEvent::References(CacheLevel::L1Instruction));
            task_reuses
                .references
                .add(task, CounterEvent::References(self.level));
            task_reuses
                .code_misses
                .add(task, CounterEvent::Misses(CacheLevel::L1Instruction));
        }
        for evidence in probe_evidence(observation) {
            let ProbeEvidence::Reuses { task, samples } = evidence else {
                continue;
            };
            let references_per_ns = self.references_per_ns(find_sample(observation, *task));
            if let Some((task_reuses, profile)) = self.tasks.find_profile(*task, profiles) {
                task_reuses
                    .access_times
                    .merge(&ReuseTimes::from_samples(samples, references_per_ns));
                task_reuses.reference_times = task_reuses
                    .access_times
                    .filtered_by_cache(task_reuses.l1_miss_share(self.includes_code));
                let times = task_reuses.reference_times.to_profile();
                profile.locality.reuse_times = times
                    .map(|times| Fact::new(times, FactSource::ReuseSamples, observation.window));
            }
        }
        for (task, (_, task_reuses)) in &self.tasks.states {
            let Some(profile) = profiles.get_mut(task) else {
                continue;
            };
            let Some(refs) = profile.rates.llc_refs_per_mega_instr else {
                continue;
            };
            if let Some(curve) = self
                .estimate_curve(&task_reuses.reference_times, refs.value / 1000.0)
                .filter(|curve| !curve.is_empty())
            {
                let fact = Fact::new(curve, FactSource::ReuseSamples, observation.window);
                profile
                    .locality
                    .misses_per_kilo_instr
                    .insert(self.level, fact);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::{Profile, RateFacts, ReuseSample, TaskId};

    const LLC: CacheLevel = CacheLevel::L2;

    fn sampled_window(number: u64, samples: Vec<ReuseSample>) -> Observation {
        answered_window(
            number,
            &[0],
            ProbeEvidence::Reuses {
                task: TaskId(0),
                samples,
            },
        )
    }
    fn sample(accesses: Option<u64>, elapsed_ns: u64, touched_again: bool) -> ReuseSample {
        ReuseSample {
            accesses,
            elapsed_ns,
            reused: touched_again,
        }
    }

    /// Does a task whose references cycle through 64 lines get the corresponding curve, from samples over several
    /// windows?
    #[test]
    fn samples_over_several_windows_become_the_true_curve() {
        let mut profiler =
            ReuseProfiler::new(LLC, ReplacementModel::Lru, 64, vec![128 * 64, 4 * 64]);
        let refs = RateFacts {
            llc_refs_per_mega_instr: Some(Fact::oracle(16_000.0)),
            ..RateFacts::default()
        };
        let mut profiles: Profiles = [(TaskId(0), Profile::default().with_rates(refs))]
            .into_iter()
            .collect();
        for number in 0..4 {
            let mut samples = vec![sample(Some(0), 1, true); 140];
            samples.extend(vec![sample(Some(511), 1, true); 20]);
            profiler.update(&sampled_window(number, samples), &mut profiles);
        }
        let curve = profiles[&TaskId(0)]
            .misses_per_kilo_instr()
            .unwrap()
            .clone();
        assert_eq!(
            curve.iter().map(|(size, _)| *size).collect::<Vec<_>>(),
            [4 * 64, 128 * 64]
        );
        assert!(
            (curve[0].1.value - 2.0).abs() < 1e-9 && curve[0].1.low > 1.5 && curve[0].1.high < 2.5
        );
        assert_eq!(curve[1].1.value, 0.0);
    }

    /// Is the miss rate of a program whose L1 passes every fourth access computed from the passing accesses alone?
    #[test]
    fn accesses_that_hit_the_l1_are_left_out() {
        let mut profiler =
            ReuseProfiler::new(LLC, ReplacementModel::Lru, 64, vec![50 * 64, 200 * 64]);
        let mut profiles = Profiles::new();
        let counts = [
            (CounterEvent::Instructions, 3000),
            (CounterEvent::References(CacheLevel::L1Data), 1000),
            (CounterEvent::References(LLC), 250),
        ];
        // Every fourth access goes to the next of 100 lines; the other accesses repeat the last line.
        let mut samples = vec![sample(Some(0), 1, true); 300];
        samples.extend(vec![sample(Some(399), 1, true); 100]);
        let tasks = vec![synthetic_sample(0, &counts)];
        profiler.update(
            &Observation {
                tasks,
                ..sampled_window(0, samples)
            },
            &mut profiles,
        );
        let times = ReuseTimes::from_profile(profiles[&TaskId(0)].reuse_times().unwrap()).unwrap();
        let ratio_at = |lines| statstack::miss_ratio(&times, lines).unwrap();
        assert!(
            ratio_at(50) > 0.999 && ratio_at(200) < 0.001,
            "{} {}",
            ratio_at(50),
            ratio_at(200)
        );
    }

    /// If code is watched too, is the L1 miss fraction that of data accesses and fetches together?
    #[test]
    fn watched_code_counts_among_the_accesses_that_pass() {
        let counts = [
            (CounterEvent::Instructions, 3000),
            (CounterEvent::References(CacheLevel::L1Data), 600),
            (CounterEvent::References(CacheLevel::L1Instruction), 400),
            (CounterEvent::Misses(CacheLevel::L1Instruction), 130),
            (CounterEvent::References(LLC), 250),
        ];
        let mut samples = vec![sample(Some(0), 1, true); 300];
        samples.extend(vec![sample(Some(400), 1, true); 100]);
        let observation = Observation {
            tasks: vec![synthetic_sample(0, &counts)],
            ..sampled_window(0, samples)
        };
        let longest_reuse = |mut profiler: ReuseProfiler| {
            let mut profiles = Profiles::new();
            profiler.update(&observation, &mut profiles);
            let times =
                ReuseTimes::from_profile(profiles[&TaskId(0)].reuse_times().unwrap()).unwrap();
            times.buckets().last().unwrap().midpoint()
        };
        let new_profiler = || ReuseProfiler::new(LLC, ReplacementModel::Lru, 64, vec![4096]);
        // With code, 250 of 1000 watched accesses pass; without it, 120 of 600.
        let (with_code, without) = (
            longest_reuse(new_profiler().with_code()),
            longest_reuse(new_profiler()),
        );
        assert!(
            (with_code - 100.0).abs() < 4.0 && (without - 80.0).abs() < 4.0,
            "{with_code} {without}"
        );
    }

    /// Is there no curve without references per instruction, and are times in nanoseconds converted by the counters?
    #[test]
    fn times_without_references_give_no_curve() {
        let mut profiler = ReuseProfiler::new(LLC, ReplacementModel::Random, 64, vec![4096]);
        let mut profiles = Profiles::new();
        let tasks = vec![synthetic_sample(
            0,
            &[(CounterEvent::References(LLC), 100_000_000)],
        )];
        let window = sampled_window(0, vec![sample(None, 100, true), sample(None, 7, false)]);
        profiler.update(&Observation { tasks, ..window }, &mut profiles);
        let profile = &profiles[&TaskId(0)];
        assert_eq!(
            profile.reuse_times(),
            Some(&vec![(Some(10), 0.5), (None, 0.5)])
        );
        assert_eq!(profile.misses_per_kilo_instr(), None);
    }
}
