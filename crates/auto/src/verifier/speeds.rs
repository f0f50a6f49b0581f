//! Speed of each process in one window.
//!
//! The threads of a process count together, because threads are created and exit, and a program with many of them must
//! not weigh more than one with few. Work is the sum over threads, per second ([`cachemate_papers::work_metric`]
//! defines work).

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    CacheLevel, CounterEvent, EventCounts, ProbeKind, ProcessId, TaskSample, View,
};
use cachemate_locality::profilers::AVERAGED;
use cachemate_papers::partition::partitioned_cache::ProcessPhase;
use cachemate_papers::work_metric::{WorkMetric, metrics_of};

/// Work of one process in one window.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ProcessSpeed {
    /// Natural logarithms of work per second, by kind of work.
    pub log_rates: BTreeMap<WorkMetric, f64>,
    /// Natural logarithm of the instructions per cycle over the solo value, if both are known.
    pub log_over_solo: Option<f64>,
    /// Accesses of each instruction that reach the last-level cache, which no plan changes; `None` if they were not
    /// counted.
    pub incoming_per_instr: Option<[f64; 3]>,
    /// Phase of the thread that has changed phase most often.
    pub phase: ProcessPhase,
}

impl ProcessSpeed {
    /// Whether the program's phases are averaged, so that windows of the same number and kind may be of different
    /// phases.
    pub fn has_averaged_phases(&self) -> bool {
        self.phase.kind == Some(AVERAGED)
    }
}

/// Speeds of one window. A live process without countable work has an empty entry.
pub type WindowSpeeds = BTreeMap<ProcessId, ProcessSpeed>;

/// The processes with at least one live thread, in order of arrival.
pub fn live_processes(tasks: &[TaskSample]) -> Vec<ProcessId> {
    let mut known_processes = BTreeSet::new();
    tasks
        .iter()
        .filter(|task| !task.exited && known_processes.insert(task.process))
        .map(|task| task.process)
        .collect()
}

/// The speeds of all live processes in the window of a view.
pub fn measure_speeds(view: &View<'_>) -> WindowSpeeds {
    let elapsed_ns = view.observation.span.elapsed_ns;
    let mut threads: BTreeMap<ProcessId, Vec<&TaskSample>> = BTreeMap::new();
    for task in &view.observation.tasks {
        threads.entry(task.process).or_default().push(task);
    }
    threads.retain(|_, threads| threads.iter().any(|thread| !thread.exited));
    if elapsed_ns == 0 {
        return WindowSpeeds::new();
    }

    let process_speed = |threads: Vec<&TaskSample>| ProcessSpeed {
        phase: ProcessPhase::from_threads(&threads, view),
        log_rates: log_rates(&threads, elapsed_ns),
        log_over_solo: log_over_solo(&threads, view),
        incoming_per_instr: incoming_per_instr(&threads, view),
    };
    threads
        .into_iter()
        .map(|(process, threads)| (process, process_speed(threads)))
        .collect()
}

fn log_rates(threads: &[&TaskSample], elapsed_ns: u64) -> BTreeMap<WorkMetric, f64> {
    let mut sums: BTreeMap<WorkMetric, f64> = BTreeMap::new();
    for thread in threads {
        for (metric, count) in metrics_of(thread, elapsed_ns) {
            *sums.entry(metric).or_insert(0.0) += count;
        }
    }

    // If a thread ran uncounted, the sum is only a part of the process's work, and does not measure its speed.
    let is_uncounted = |thread: &&&TaskSample| {
        let has_run = thread.has_run();
        has_run && !thread.exited && thread.counts.get(CounterEvent::Instructions).is_none()
    };
    if threads.iter().any(|thread| is_uncounted(&thread)) {
        sums.remove(&WorkMetric::Instructions);
    }

    let seconds = elapsed_ns as f64 / 1e9;
    let rates = sums.into_iter().map(|(work, sum)| (work, sum / seconds));
    rates
        .filter(|(_, rate)| rate.is_finite() && *rate > 0.0)
        .map(|(work, rate)| (work, libm::log(rate)))
        .collect()
}

fn log_over_solo(threads: &[&TaskSample], view: &View<'_>) -> Option<f64> {
    let solo_instr_per_cycle = threads
        .iter()
        .find_map(|thread| view.profiles.get(&thread.task)?.rates.solo_instr_per_cycle)?;
    let (mut instructions, mut cycles) = (0.0, 0.0);
    for thread in threads {
        let thread_counts = thread
            .counts
            .get(CounterEvent::Instructions)
            .zip(thread.counts.get(CounterEvent::Cycles));
        let (thread_instructions, thread_cycles) = thread_counts.unwrap_or((0.0, 0.0));
        instructions += thread_instructions;
        cycles += thread_cycles;
    }
    let ratio = instructions / cycles / solo_instr_per_cycle.value;
    (ratio.is_finite() && ratio > 0.0).then(|| libm::log(ratio))
}

/// Whether the probe stops, occupies or slows programs. Watch points and hardware contexts' own counters do not.
pub fn is_disturbing(kind: &ProbeKind) -> bool {
    !matches!(
        kind,
        ProbeKind::ReuseTimes { .. } | ProbeKind::SuperSets { .. }
    )
}

/// The counts of accesses that reach the cache: misses of the two first-level caches, and references of this one;
/// `None` if not all of them were counted.
fn incoming_accesses(counts: &EventCounts, level: CacheLevel) -> Option<[f64; 3]> {
    let miss_count = |level| counts.get(CounterEvent::Misses(level));
    Some([
        miss_count(CacheLevel::L1Data)?,
        miss_count(CacheLevel::L1Instruction)?,
        counts.get(CounterEvent::References(level))?,
    ])
}

fn incoming_per_instr(threads: &[&TaskSample], view: &View<'_>) -> Option<[f64; 3]> {
    let level = view.topology.last_level()?;
    let (mut instructions, mut sums) = (0.0, [0.0; 3]);
    for thread in threads.iter().filter(|thread| thread.has_run()) {
        let accesses = incoming_accesses(&thread.counts, level)?;
        instructions += thread.counts.get(CounterEvent::Instructions)?;
        sums.iter_mut()
            .zip(accesses)
            .for_each(|(sum, addend)| *sum += addend);
    }
    (instructions > 0.0).then(|| sums.map(|sum| sum / instructions))
}
