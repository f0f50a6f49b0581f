//! Averages the counters of each task over time.
//!
//! DIO reads miss rates online, at most once every 10^9 cycles, and schedules by a running average (CA 4.2). The
//! averages include the effects of co-runners. Because co-running hardly changes the order of tasks by miss rate
//! (CA-5), the averages serve to compare tasks, but they are not solo rates.

use cachemate_core::{
    CacheLevel, CounterEvent, EvidenceKind, Fact, FactSource, Observation, Profiler, Profiles,
    StallCause, TaskSample,
};

use super::{PerTask, RunningStats};

/// Fills `observed_misses_per_kilo_instr`, `observed_read_bytes_per_kilo_instr`, `observed_instr_per_cycle`,
/// `llc_refs_per_mega_instr` and `remote_stall_share`.
#[derive(Clone, Debug)]
pub struct CountersProfiler {
    level: CacheLevel,
    min_instructions: f64,
    tasks: PerTask<RateState>,
}

#[derive(Clone, Copy, Debug, Default)]
struct RateState {
    pending_counts: UnfoldedCounts,
    misses_per_kilo_instr: RunningStats,
    read_bytes_per_kilo_instr: RunningStats,
    refs_per_mega_instr: RunningStats,
    instr_per_cycle: RunningStats,
    remote_stall_share: RunningStats,
}

/// Counts since the last reading that was added to the averages. An event that was not counted in some window is
/// `None`, because a sum over the other windows would give too low a rate.
#[derive(Clone, Copy, Debug)]
struct UnfoldedCounts {
    instructions: f64,
    cycles: Option<f64>,
    references: Option<f64>,
    misses: Option<f64>,
    read_bytes: Option<f64>,
    remote_stall_cycles: Option<f64>,
}

impl Default for UnfoldedCounts {
    fn default() -> Self {
        let zero_count = Some(0.0);
        UnfoldedCounts {
            instructions: 0.0,
            cycles: zero_count,
            references: zero_count,
            misses: zero_count,
            read_bytes: zero_count,
            remote_stall_cycles: zero_count,
        }
    }
}

impl UnfoldedCounts {
    fn add(&mut self, task: &TaskSample, level: CacheLevel, instructions: f64) {
        let add_event = |sum: &mut Option<f64>, event| {
            *sum = sum
                .zip(task.counts.get(event))
                .map(|(sum, addend)| sum + addend)
        };
        self.instructions += instructions;
        add_event(&mut self.cycles, CounterEvent::Cycles);
        add_event(&mut self.references, CounterEvent::References(level));
        add_event(&mut self.misses, CounterEvent::Misses(level));
        add_event(&mut self.read_bytes, CounterEvent::MemoryReadBytes);
        add_event(
            &mut self.remote_stall_cycles,
            CounterEvent::StallCycles(StallCause::RemoteCache),
        );
    }
}

impl CountersProfiler {
    /// Builds a profiler for the cache of this level.
    ///
    /// A reading is added to the averages once it covers `min_instructions` of the task, so that short windows do not
    /// weigh as much as long ones. DIO uses 10^9 cycles, scaled like the run.
    pub fn new(level: CacheLevel, min_instructions: f64) -> Self {
        CountersProfiler {
            level,
            min_instructions,
            tasks: PerTask::default(),
        }
    }
}

impl Profiler for CountersProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("counters", Some(EvidenceKind::TaskCounters))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        self.tasks.retain_current(observation, profiles);
        for task in &observation.tasks {
            let Some(instructions) = task.counts.get(CounterEvent::Instructions) else {
                continue;
            };
            let Some((state, profile)) = self.tasks.find_profile(task.task, profiles) else {
                continue;
            };
            state.pending_counts.add(task, self.level, instructions);
            if state.pending_counts.instructions < self.min_instructions
                || state.pending_counts.instructions <= 0.0
            {
                continue;
            }
            let pending_counts = std::mem::take(&mut state.pending_counts);
            let cycles = pending_counts.cycles.filter(|&cycles| cycles > 0.0);
            let add_reading = |mean: &mut RunningStats, reading: Option<f64>| {
                reading.iter().for_each(|&reading| mean.add(reading));
                mean.estimate().map(|estimate| {
                    Fact::from_measurement(estimate, FactSource::Counters, observation.window)
                })
            };
            let per_instr = |count: Option<f64>, scale: f64| {
                count.map(|count| scale * count / pending_counts.instructions)
            };
            let rates = &mut profile.rates;
            rates.observed_misses_per_kilo_instr = add_reading(
                &mut state.misses_per_kilo_instr,
                per_instr(pending_counts.misses, 1e3),
            );
            rates.observed_read_bytes_per_kilo_instr = add_reading(
                &mut state.read_bytes_per_kilo_instr,
                per_instr(pending_counts.read_bytes, 1e3),
            );
            let instr_per_cycle = cycles.map(|cycles| pending_counts.instructions / cycles);
            rates.observed_instr_per_cycle =
                add_reading(&mut state.instr_per_cycle, instr_per_cycle);
            if let Some(refs) = add_reading(
                &mut state.refs_per_mega_instr,
                per_instr(pending_counts.references, 1e6),
            ) {
                rates.llc_refs_per_mega_instr = Some(refs);
            }
            let remote_stall_share = pending_counts
                .remote_stall_cycles
                .zip(cycles)
                .map(|(stalled, cycles)| stalled / cycles);
            if let Some(share) = add_reading(&mut state.remote_stall_share, remote_stall_share) {
                rates.remote_stall_share = Some(share);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::TaskId;

    const LLC: CacheLevel = CacheLevel::L2;

    fn with_misses(number: u64, misses: u64) -> Observation {
        let readings = [
            (CounterEvent::Instructions, 1000),
            (CounterEvent::Cycles, 2000),
            (CounterEvent::References(LLC), 50),
            (CounterEvent::Misses(LLC), misses),
            (CounterEvent::MemoryReadBytes, 128 * misses),
        ];
        counted_window(number, &readings)
    }

    /// Does the average over readings equal the true rate per thousand instructions, with a confidence interval?
    #[test]
    fn readings_become_a_running_average() {
        let (mut profiler, mut profiles) = (CountersProfiler::new(LLC, 1000.0), Profiles::new());
        for (number, misses) in [8, 12, 10].into_iter().enumerate() {
            profiler.update(&with_misses(number as u64, misses), &mut profiles);
        }
        let profile = &profiles[&TaskId(0)];
        let rate = profile
            .rates
            .observed_misses_per_kilo_instr
            .unwrap()
            .estimate();
        assert!(
            (rate.value - 10.0).abs() < 1e-12 && rate.low < 9.0 && rate.high > 11.0,
            "{rate:?}"
        );
        assert!(
            (profile
                .rates
                .observed_read_bytes_per_kilo_instr
                .unwrap()
                .value
                - 1_280.0)
                .abs()
                < 1e-9
        );
        assert_eq!(profile.rates.observed_instr_per_cycle.unwrap().value, 0.5);
        assert!((profile.rates.llc_refs_per_mega_instr.unwrap().value - 50_000.0).abs() < 1e-6);
        assert_eq!(profile.rates.remote_stall_share, None);
    }

    /// Are short windows combined until a reading is long enough?
    #[test]
    fn short_windows_are_combined_into_a_reading() {
        let (mut profiler, mut profiles) = (CountersProfiler::new(LLC, 2000.0), Profiles::new());
        profiler.update(&with_misses(0, 4), &mut profiles);
        assert_eq!(
            profiles[&TaskId(0)].rates.observed_misses_per_kilo_instr,
            None
        );
        profiler.update(&with_misses(1, 6), &mut profiles);
        assert_eq!(
            profiles[&TaskId(0)]
                .rates
                .observed_misses_per_kilo_instr
                .unwrap()
                .value,
            5.0
        );
    }

    /// Is an event that was not counted in part of a reading treated as unknown rather than as zero?
    #[test]
    fn uncounted_events_are_not_averaged() {
        let (mut profiler, mut profiles) = (CountersProfiler::new(LLC, 2000.0), Profiles::new());
        profiler.update(&with_misses(0, 4), &mut profiles);
        let mut without_misses = idle_window(1, &[]);
        without_misses.tasks = vec![synthetic_sample(0, &[(CounterEvent::Instructions, 1000)])];
        profiler.update(&without_misses, &mut profiles);
        assert_eq!(
            profiles[&TaskId(0)].rates.observed_misses_per_kilo_instr,
            None
        );
    }

    /// Is evidence of exited tasks and earlier phases dropped?
    #[test]
    fn evidence_of_exited_tasks_and_old_phases_is_dropped() {
        let (mut profiler, mut profiles) = (CountersProfiler::new(LLC, 1000.0), Profiles::new());
        profiler.update(&with_misses(0, 4), &mut profiles);
        profiles.insert(
            TaskId(0),
            cachemate_core::Profile {
                phase_number: 1,
                ..Default::default()
            },
        );
        profiler.update(&with_misses(1, 30), &mut profiles);
        assert_eq!(
            profiles[&TaskId(0)]
                .rates
                .observed_misses_per_kilo_instr
                .unwrap()
                .value,
            30.0
        );
        let mut last = with_misses(2, 4);
        last.tasks[0].exited = true;
        profiler.update(&last, &mut profiles);
        assert!(profiles.is_empty());
    }
}
