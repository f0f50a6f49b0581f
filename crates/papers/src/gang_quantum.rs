//! Computes the length of gangs' turns.
//!
//! At the start of a task's turn, the other gangs have displaced its footprint from the cache. Each of its `F` lines is
//! fetched once, which costs `m - h` more than a hit. So `R = F (m - h)` of a turn `T` is lost, and a task runs at `1 -
//! R/T` of its undisturbed speed. This is the law `T / (F + (T - F m) / h)` for the time of an access, divided by `h`.
//! It agrees within 2.5 % with points measured on a modeled machine (docs/sched-ext.md). Members of one gang fetch in
//! parallel, each on its own CPU.
//!
//! Properties: unknown footprints do not lengthen turns. A returned turn achieves the requested gain. Times are
//! nominal.

use cachemate_core::{Cache, CounterEvent, Profile, View};
use cachemate_locality::curve::plateau_rate;

/// Minimum and maximum length of a usual turn, in nanoseconds.
pub(crate) const TYPICAL_QUANTUM_NS: (f64, f64) = (20e6, 100e6);
/// Time that a task may wait in addition to two rotations (docs/sched-ext.md).
const WAIT_BEYOND_ROTATIONS_NS: u64 = 100_000_000;
/// Default maximum wait of a task.
pub const MAX_WAIT_NS: u64 = 1_000_000_000;
/// Desired length of a turn in multiples of the longest refill; at this length, accesses take a third more time than
/// without refills.
const REFILLS_PER_QUANTUM: f64 = 4.0;
/// The maximum length of a turn at which no task waits longer than allowed, in nanoseconds.
pub fn max_quantum_ns(gang_count: usize, max_wait_ns: u64) -> u64 {
    max_wait_ns.saturating_sub(WAIT_BEYOND_ROTATIONS_NS) / (2 * gang_count.max(1) as u64)
}

/// The cycles of a CPU per nanosecond: as counted for the tasks that ran, otherwise as the topology states. `None` if
/// neither is known.
pub fn cycles_per_ns(view: &View<'_>) -> Option<f64> {
    let (cycles, ns) = view.live_tasks().fold((0.0, 0.0), |(cycles, ns), task| {
        match task.counts.get(CounterEvent::Cycles) {
            Some(task_cycles) => (cycles + task_cycles, ns + task.ran_ns() as f64),
            None => (cycles, ns),
        }
    });
    let nominal_cycles_per_ns = || {
        view.topology
            .cpus
            .iter()
            .find_map(|cpu| cpu.hertz)
            .map(|hertz| hertz as f64 / 1e9)
    };
    if ns > 0.0 && cycles > 0.0 {
        Some(cycles / ns)
    } else {
        nominal_cycles_per_ns()
    }
}

/// The time in which a task refills its footprint, in nominal nanoseconds.
///
/// `None` while its curve, the cache's size or the cost of a miss is unknown. Misses are assumed to be serialized, so
/// turns are too long rather than too short.
pub(crate) fn refill_ns(profile: &Profile, cache: &Cache, view: &View<'_>) -> Option<f64> {
    let curve = profile
        .misses_per_kilo_instr()
        .filter(|curve| curve.len() >= 2)?;
    let size_bytes = cache.size_bytes.filter(|bytes| *bytes > 0)?;
    let penalty_cycles = view
        .predictor
        .miss_penalty_cycles()
        .filter(|cycles| *cycles > 0.0)?;

    let cache_points: Vec<(u64, f64)> = curve
        .iter()
        .map(|(bytes, rate)| (*bytes, rate.value))
        .take_while(|(bytes, _)| *bytes <= size_bytes)
        .collect();
    let (first_rate, last_rate) = (cache_points.first()?.1, cache_points.last()?.1);
    let Some(plateau) = plateau_rate(first_rate, last_rate) else {
        return Some(0.0);
    };
    let knee = cache_points.iter().find(|(_, rate)| *rate <= plateau)?;
    let footprint_lines = knee.0 as f64 / f64::from(cache.line_bytes.unwrap_or(64).max(1));
    Some(footprint_lines * penalty_cycles / cycles_per_ns(view)?)
}

/// A task for which a gang is planned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GangCandidate {
    /// Time in which the task refills its footprint, in nanoseconds; `None` if unknown.
    pub refill_ns: Option<f64>,
    /// Slowdown in its gang without refills: run time over solo run time, minus one.
    pub slowdown: f64,
}

/// The error if every turn that pays off would exceed the maximum wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuantumTooLong {
    /// Length of the shortest turn that pays off, in nanoseconds; `None` if no turn does.
    pub break_even_ns: Option<u64>,
    /// Maximum length of a turn, in nanoseconds.
    pub max_quantum_ns: u64,
}

impl std::fmt::Display for QuantumTooLong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let to_ms = |ns: u64| ns as f64 / 1e6;
        match self.break_even_ns {
            Some(break_even_ns) => write!(
                f,
                "no gangs: turns pay off from {:.0} ms on, but beyond {:.0} ms a task would wait too long",
                to_ms(break_even_ns),
                to_ms(self.max_quantum_ns)
            ),
            None => write!(
                f,
                "no gangs: at any length of turns, refills cost more than gangs gain"
            ),
        }
    }
}

/// The mean slowdown of all tasks with turns of this length, including refills.
pub(crate) fn mean_slowdown(tasks: &[GangCandidate], turn_ns: f64) -> f64 {
    let candidate_slowdown = |task: &GangCandidate| {
        let lost_share = task.refill_ns.unwrap_or(0.0) / turn_ns;
        if lost_share < 1.0 {
            (1.0 + task.slowdown) / (1.0 - lost_share) - 1.0
        } else {
            f64::INFINITY
        }
    };
    tasks.iter().map(candidate_slowdown).sum::<f64>() / tasks.len().max(1) as f64
}

/// The length of the turns of `gang_count` gangs in nanoseconds, or `None` if no refill time is known.
///
/// It is four times the longest refill, within [`TYPICAL_QUANTUM_NS`], lengthened until the mean slowdown is at most
/// `max_slowdown`, and never longer than `max_wait_ns` allows.
///
/// # Errors
/// No allowed turn pays off.
pub(crate) fn quantum_ns(
    tasks: &[GangCandidate],
    max_slowdown: f64,
    gang_count: usize,
    max_wait_ns: u64,
) -> Result<Option<u64>, QuantumTooLong> {
    let longest_refill_ns = tasks
        .iter()
        .filter_map(|task| task.refill_ns)
        .reduce(f64::max);
    let Some(longest_refill_ns) = longest_refill_ns else {
        return Ok(None);
    };

    let max_ns = max_quantum_ns(gang_count, max_wait_ns);
    let break_even_ns = break_even_ns(tasks, max_slowdown);
    match break_even_ns {
        Some(break_even_ns) if break_even_ns <= max_ns => {
            let target_ns = (REFILLS_PER_QUANTUM * longest_refill_ns)
                .clamp(TYPICAL_QUANTUM_NS.0, TYPICAL_QUANTUM_NS.1)
                as u64;
            Ok(Some(target_ns.max(break_even_ns).min(max_ns)))
        }
        _ => Err(QuantumTooLong {
            break_even_ns,
            max_quantum_ns: max_ns,
        }),
    }
}

/// The length of a turn at which gangs break even, by bisection, because the mean slowdown falls with the length.
/// `None` if no turn pays off.
fn break_even_ns(tasks: &[GangCandidate], max_slowdown: f64) -> Option<u64> {
    let is_worthwhile = |turn_ns: u64| mean_slowdown(tasks, turn_ns as f64) <= max_slowdown;
    let (mut too_short_ns, mut break_even_ns) = (0, 3_600_000_000_000);
    if !is_worthwhile(break_even_ns) {
        return None;
    }
    while break_even_ns - too_short_ns > 1 {
        let middle_ns = too_short_ns + (break_even_ns - too_short_ns) / 2;
        if is_worthwhile(middle_ns) {
            break_even_ns = middle_ns
        } else {
            too_short_ns = middle_ns
        }
    }
    Some(break_even_ns)
}

#[cfg(test)]
mod tests;
