//! Measures solo speeds in intervals in which a task has its cache to itself.
//!
//! Problem: a slowdown is relative to the speed of the same work without co-runners, but a host rarely runs a program
//! alone. Method: in an interval with a row of one task ([`cachemate_core::ProbeKind::CoRunRows`]), the machine keeps
//! all other tasks off the cache, so instructions per cycle are the solo speed of the work done then. Work is
//! recognized by its references to the cache per instruction, which co-runners do not change. In every window, the
//! profile gets the solo speed of the work of that window, if that speed is known.
//!
//! Properties: tasks on other caches keep running, so the counted waits in the memory queue widen the error upward. The
//! speed of a stored profile is used until an interval is measured. If references are not counted, a speed applies to
//! the phase in which it was measured.

use std::collections::BTreeMap;

use cachemate_core::{
    CacheLevel, CounterEvent, Estimate, EvidenceKind, Fact, FactSource, Observation, ProbeEvidence,
    Profile, Profiler, Profiles, RowInterval, StallCause, TaskId, TaskSample,
};

/// Relative error of one interval: counts end at the edge of a window, and the cache may still be filling.
const INTERVAL_ERROR: f64 = 0.01;
/// Maximum relative difference in references per instruction between intervals of the same work.
const MAX_WORK_DIFFERENCE: f64 = 0.05;
/// Maximum number of kinds of work stored for each task; beyond it, the kind that was measured first is dropped.
const MAX_WORK_KINDS: usize = 32;
/// Maximum number of intervals whose spread gives the error.
const MAX_SPEEDS: usize = 16;

/// Fills `solo_instr_per_cycle` and `solo_misses_per_kilo_instr` from co-run rows of one task.
#[derive(Clone, Debug)]
pub struct SoloIntervalProfiler {
    level: CacheLevel,
    tasks: BTreeMap<TaskId, Vec<SoloSums>>,
}

/// Counts of one task in an interval without other tasks on its cache.
struct SoloInterval {
    task: TaskId,
    instructions: f64,
    cycles: f64,
    references: Option<f64>,
    misses: Option<f64>,
}

/// Sums over all solo intervals of one kind of work.
#[derive(Clone, Debug, Default)]
struct SoloSums {
    phase_number: u32,
    instructions: f64,
    cycles: f64,
    references_per_instr: Option<f64>,
    misses: Option<f64>,
    /// Time that a miss waits in the memory queue while tasks on other caches run, in cycles.
    queue_cycles_per_miss: f64,
    /// Instructions per cycle in the latest intervals, whose spread is the error.
    speeds: Vec<f64>,
    /// Increase of the speed from the preceding interval of the same row to the last one, which shows that the cache
    /// was still filling; in instructions per cycle.
    speed_increase: f64,
}

impl SoloInterval {
    fn speed(&self) -> f64 {
        self.instructions / self.cycles
    }
}

impl SoloIntervalProfiler {
    /// Builds a profiler for the contended cache of this level.
    pub fn new(level: CacheLevel) -> Self {
        SoloIntervalProfiler {
            level,
            tasks: BTreeMap::new(),
        }
    }

    fn queue_cycles_per_miss(&self, task: &TaskSample) -> Option<f64> {
        let misses = task
            .counts
            .get(CounterEvent::Misses(self.level))
            .filter(|&misses| misses > 0.0)?;
        Some(
            task.counts
                .get(CounterEvent::StallCycles(StallCause::BusQueue))?
                / misses,
        )
    }

    fn references_per_instr(&self, task: &TaskSample) -> Option<f64> {
        let instructions = task
            .counts
            .get(CounterEvent::Instructions)
            .filter(|&count| count > 0.0)?;
        Some(task.counts.get(CounterEvent::References(self.level))? / instructions)
    }

    /// `None` if the row has several tasks, or if its task made no progress.
    fn build_solo_interval(&self, interval: &RowInterval) -> Option<SoloInterval> {
        let ([task], [counts]) = (interval.tasks.as_slice(), interval.task_counts.as_slice())
        else {
            return None;
        };
        let positive_count = |event| counts.get(event).filter(|count| *count > 0.0);
        Some(SoloInterval {
            task: *task,
            instructions: positive_count(CounterEvent::Instructions)?,
            cycles: positive_count(CounterEvent::Cycles)?,
            references: counts.get(CounterEvent::References(self.level)),
            misses: counts.get(CounterEvent::Misses(self.level)),
        })
    }

    /// Records the intervals of one answer. If several of them measure the same task, only the last counts, because the
    /// cache fills during the earlier ones.
    fn record_intervals(
        &mut self,
        intervals: &[RowInterval],
        observation: &Observation,
        profiles: &Profiles,
    ) {
        for (index, interval) in intervals.iter().enumerate() {
            let Some(solo_interval) = self.build_solo_interval(interval) else {
                continue;
            };
            if intervals[index + 1..]
                .iter()
                .any(|later| later.tasks == interval.tasks)
            {
                continue;
            }
            let previous_interval = intervals[..index]
                .iter()
                .rfind(|earlier| earlier.tasks == interval.tasks);
            let previous_solo =
                previous_interval.and_then(|earlier| self.build_solo_interval(earlier));
            let sample = observation
                .tasks
                .iter()
                .find(|task_sample| task_sample.task == solo_interval.task);
            let queue_cycles_per_miss =
                sample.and_then(|task_sample| self.queue_cycles_per_miss(task_sample));
            let references_per_instr = solo_interval
                .references
                .map(|references| references / solo_interval.instructions);
            let phase_number = profiles
                .get(&solo_interval.task)
                .map_or(0, |profile| profile.phase_number);
            let kinds = self.tasks.entry(solo_interval.task).or_default();
            let known_index = kinds
                .iter()
                .position(|kind| kind.is_same_kind(references_per_instr, phase_number));
            let kind_index = known_index.unwrap_or_else(|| {
                if kinds.len() == MAX_WORK_KINDS {
                    kinds.remove(0);
                }
                kinds.push(SoloSums {
                    phase_number,
                    references_per_instr,
                    ..SoloSums::default()
                });
                kinds.len() - 1
            });
            kinds[kind_index].add(
                &solo_interval,
                previous_solo.as_ref(),
                queue_cycles_per_miss,
            );
        }
    }
}

impl SoloSums {
    /// Work of one kind has similar references per instruction or, if these are not counted, one phase number.
    fn is_same_kind(&self, references_per_instr: Option<f64>, phase_number: u32) -> bool {
        match self.references_per_instr.zip(references_per_instr) {
            Some((own, other)) => (own - other).abs() <= MAX_WORK_DIFFERENCE * own.max(1e-6),
            None => self.phase_number == phase_number,
        }
    }

    fn add(
        &mut self,
        solo: &SoloInterval,
        previous_interval: Option<&SoloInterval>,
        queue_cycles_per_miss: Option<f64>,
    ) {
        self.instructions += solo.instructions;
        self.cycles += solo.cycles;
        if let Some(misses) = solo.misses {
            *self.misses.get_or_insert(0.0) += misses;
        }
        self.queue_cycles_per_miss = queue_cycles_per_miss.unwrap_or(self.queue_cycles_per_miss);
        self.speed_increase = previous_interval.map_or(0.0, |previous_interval| {
            (solo.speed() - previous_interval.speed()).max(0.0)
        });
        self.speeds.push(solo.speed());
        if self.speeds.len() > MAX_SPEEDS {
            self.speeds.remove(0);
        }
    }

    fn speed(&self) -> Estimate {
        let value = self.instructions / self.cycles;
        let count = self.speeds.len() as f64;
        let squared_deviations = self
            .speeds
            .iter()
            .map(|speed| (speed - value) * (speed - value))
            .sum::<f64>();
        let error = if count < 2.0 {
            0.0
        } else {
            2.0 * libm::sqrt(squared_deviations / (count - 1.0) / count)
        };
        let error = error.max(INTERVAL_ERROR * value);
        // The work would be faster without the queue that tasks on other caches cause.
        let queue_cycles = self.misses.unwrap_or(0.0) * self.queue_cycles_per_miss;
        let unqueued_speed =
            self.instructions / (self.cycles - queue_cycles).max(0.5 * self.cycles);
        Estimate {
            value,
            low: value - error,
            high: unqueued_speed + error + 2.0 * self.speed_increase,
        }
    }

    fn fill_profile(&self, profile: &mut Profile, window: u64) {
        let speed_fact = |estimate| {
            Some(Fact::from_measurement(
                estimate,
                FactSource::CoRunRows,
                window,
            ))
        };
        profile.rates.solo_instr_per_cycle = speed_fact(self.speed());
        if let Some(misses) = self.misses {
            profile.rates.solo_misses_per_kilo_instr =
                speed_fact(Estimate::exact(1000.0 * misses / self.instructions));
        }
    }
}

impl Profiler for SoloIntervalProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("solo intervals", Some(EvidenceKind::CoRunRows))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        super::retain_live(observation, profiles);
        self.tasks.retain(|task, _| profiles.contains_key(task));
        for probe_result in &observation.probe_results {
            if let ProbeEvidence::Rows(intervals) = &probe_result.evidence {
                self.record_intervals(intervals, observation, profiles);
            }
        }
        for (task, kinds) in &self.tasks {
            let Some(profile) = profiles.get_mut(task) else {
                continue;
            };
            let sample = observation.tasks.iter().find(|sample| sample.task == *task);
            let references_per_instr = sample.and_then(|sample| self.references_per_instr(sample));
            match kinds
                .iter()
                .find(|kind| kind.is_same_kind(references_per_instr, profile.phase_number))
            {
                Some(kind) => kind.fill_profile(profile, observation.window),
                None => {
                    let rates = &mut profile.rates;
                    for fact in [
                        &mut rates.solo_instr_per_cycle,
                        &mut rates.solo_misses_per_kilo_instr,
                    ] {
                        *fact = fact
                            .take()
                            .filter(|fact| fact.source != FactSource::CoRunRows);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::{CacheId, EventCounts};

    const LLC: CacheLevel = CacheLevel::L2;

    fn interval(members: &[u32], instructions: u64, cycles: u64) -> RowInterval {
        let counts_read = EventCounts::exact([
            (CounterEvent::Instructions, instructions),
            (CounterEvent::Cycles, cycles),
            (CounterEvent::References(LLC), instructions / 100),
            (CounterEvent::Misses(LLC), instructions / 1000),
        ]);
        RowInterval {
            tasks: members.iter().map(|&task| TaskId(task)).collect(),
            cache: CacheId(0),
            span: time_span(100_000_000),
            ended_by_task: None,
            cache_counts: counts_read.clone(),
            task_counts: members.iter().map(|_| counts_read.clone()).collect(),
        }
    }

    fn solo_speed(profiles: &Profiles, task: u32) -> Option<Estimate> {
        profiles[&TaskId(task)]
            .rates
            .solo_instr_per_cycle
            .map(|fact| fact.estimate())
    }

    /// Does a row of one task give its solo speed with its error, a row of several none, and does the queue of other
    /// caches widen the error upward only?
    #[test]
    fn a_row_of_one_task_is_its_solo_speed() {
        let (mut profiler, mut profiles) = (SoloIntervalProfiler::new(LLC), Profiles::new());
        let mut observation = idle_window(0, &[0, 1]);
        let rows = vec![
            interval(&[0], 2_000_000, 4_000_000),
            interval(&[0, 1], 2_000_000, 9_000_000),
        ];
        observation.probe_results = vec![complete_answer(0, ProbeEvidence::Rows(rows))];
        profiler.update(&observation, &mut profiles);
        let speed = solo_speed(&profiles, 0).unwrap();
        assert!(
            (speed.value - 0.5).abs() < 1e-9 && speed.high < 0.51,
            "{speed:?}"
        );
        assert_eq!(solo_speed(&profiles, 1), None);
        observation.tasks[0].counts = EventCounts::exact([
            (CounterEvent::Misses(LLC), 1000),
            (CounterEvent::StallCycles(StallCause::BusQueue), 100_000),
        ]);
        profiler.update(&observation, &mut profiles);
        let queued = solo_speed(&profiles, 0).unwrap();
        assert!(
            (queued.value - 0.5).abs() < 1e-9 && queued.high > 0.52 && queued.low > 0.49,
            "{queued:?}"
        );
    }

    /// Is a solo speed used for the work with which it was measured, recalled when that work recurs, and never used for
    /// other work?
    #[test]
    fn a_solo_speed_is_used_only_for_the_work_it_was_measured_with() {
        let (mut profiler, mut profiles) = (SoloIntervalProfiler::new(LLC), Profiles::new());
        let mut observe_rows = |references: u64, rows: Vec<RowInterval>| {
            let mut observation = idle_window(0, &[0]);
            observation.tasks[0].counts = EventCounts::exact([
                (CounterEvent::Instructions, 1_000_000),
                (CounterEvent::References(LLC), references),
            ]);
            observation.probe_results = vec![complete_answer(0, ProbeEvidence::Rows(rows))];
            profiler.update(&observation, &mut profiles);
            solo_speed(&profiles, 0).map(|speed| speed.value)
        };
        assert_eq!(
            observe_rows(10_000, vec![interval(&[0], 2_000_000, 4_000_000)]),
            Some(0.5)
        );
        assert_eq!(observe_rows(20_000, Vec::new()), None);
        assert_eq!(observe_rows(10_200, Vec::new()), Some(0.5));
    }

    /// If the cache is still filling during the row, does the error extend above the last speed?
    #[test]
    fn a_filling_cache_widens_the_error() {
        let (mut profiler, mut profiles) = (SoloIntervalProfiler::new(LLC), Profiles::new());
        let rows = vec![
            interval(&[0], 2_000_000, 5_000_000),
            interval(&[0], 2_000_000, 4_000_000),
        ];
        profiler.update(
            &answered_window(0, &[0], ProbeEvidence::Rows(rows)),
            &mut profiles,
        );
        let speed = solo_speed(&profiles, 0).unwrap();
        assert!(
            (speed.value - 0.5).abs() < 1e-9 && speed.high > 0.69,
            "{speed:?}"
        );
    }
}
