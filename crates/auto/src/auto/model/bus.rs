//! Cost of a package's path to memory by its traffic, inferred from measurements.
//!
//! Problem: the wait of a miss depends on where misses meet, but a policy does not know the bandwidth. Method: the
//! tasks of a package and its path to memory form the closed network of [`cachemate_locality::memory_queue`], which
//! gives the wait of a miss by the time `S` of a line. Because the speed, the traffic and the waits of each package are
//! counted, `S` can be computed. Properties: if little or no queueing was counted, there is no model; no forecast
//! exceeds one line per `S`. Misses that overlap are left out, unlike in docs/simulators/interval.md; as `S` is fitted
//! to counted waits, it contains part of them.

use std::collections::BTreeMap;

use cachemate_locality::memory_queue::{LineSource, QueueStation};

use crate::auto::evidence::speeds::ObservedSpeed;

/// The model of a path to memory; see the module's documentation.
#[derive(Clone, PartialEq, Debug)]
pub struct MemoryPathModel {
    /// Service time of a line in cycles.
    line_cycles: f64,
    /// Present wait of a miss by package, in cycles.
    wait_by_package: BTreeMap<u32, f64>,
}

/// Shorter waits are treated as noise.
const MIN_WAIT_CYCLES: f64 = 2.0;
/// Lines that a core has in flight at most.
const MAX_LINES_IN_FLIGHT: f64 = 64.0;
/// Smallest share of a task's cycles that are no waits for memory.
const MIN_UNQUEUED_SHARE: f64 = 0.02;

/// What a task asks of its path to memory, if each of its misses waits for `wait_cycles` of the given cycles per
/// instruction.
pub fn task_lines(
    cycles_per_instr: f64,
    misses_per_instr: f64,
    lines_per_miss: f64,
    wait_cycles: f64,
) -> LineSource {
    let unqueued_cycles = cycles_per_instr - misses_per_instr * wait_cycles;
    let lines = misses_per_instr * lines_per_miss;

    LineSource {
        cycles: unqueued_cycles.max(MIN_UNQUEUED_SHARE * cycles_per_instr),
        lines,
        reads: lines,
        demand_reads: lines,
        demand_waits: misses_per_instr,
        max_in_flight: MAX_LINES_IN_FLIGHT,
        together_lines: 1.0,
        random_share: 1.0,
        time_share: 1.0,
        ..LineSource::default()
    }
}

/// The cycles that a miss of each task waits if a line takes `line_cycles`.
fn waits_at(line_cycles: f64, sources: &[LineSource]) -> Vec<f64> {
    let station = QueueStation::in_order(line_cycles);
    let solution = station.solve(sources, 0.0);
    sources
        .iter()
        .map(|source| station.added_waits(source, &solution).mean)
        .collect()
}

impl MemoryPathModel {
    /// Builds the model from the speeds of tasks, each with its package; `None` if the queue was not counted or waits
    /// are too short.
    pub fn new(
        speeds: impl Iterator<Item = (u32, ObservedSpeed)>,
        line_bytes: f64,
    ) -> Option<Self> {
        // By package: the tasks' lines, misses per cycle, cycles waited per cycle.
        let mut sums: BTreeMap<u32, (Vec<LineSource>, f64, f64)> = BTreeMap::new();
        for (package, speed) in speeds {
            let Some((misses, bytes)) = speed.misses_per_instr.zip(speed.bytes_per_miss) else {
                continue;
            };
            let (cycles, queue_cycles) = (
                speed.elapsed_cycles_per_instr.max(1e-9),
                speed.queue_cycles_per_miss?,
            );
            let sum = sums.entry(package).or_default();
            sum.0
                .push(task_lines(cycles, misses, bytes / line_bytes, queue_cycles));
            sum.1 += misses / cycles;
            sum.2 += misses / cycles * queue_cycles;
        }
        let mut waits_by_package = BTreeMap::new();
        let (mut weighted_sum, mut weight_sum) = (0.0, 0.0);
        for (&package, (sources, misses, wait_cycles)) in &sums {
            let measured_wait = wait_cycles / misses.max(1e-12);
            waits_by_package.insert(package, measured_wait);
            let traffic = traffic_with_wait(sources, measured_wait);
            if measured_wait >= MIN_WAIT_CYCLES && traffic > 0.0 {
                weighted_sum += traffic * service_time_for_wait(measured_wait, sources);
                weight_sum += traffic;
            }
        }
        (weight_sum > 0.0).then(|| MemoryPathModel {
            line_cycles: weighted_sum / weight_sum,
            wait_by_package: waits_by_package,
        })
    }

    /// The present wait of a miss on a package, in cycles.
    pub fn current_wait_cycles(&self, package: u32) -> f64 {
        self.wait_by_package.get(&package).copied().unwrap_or(0.0)
    }

    /// The wait of a miss of each task on one package, in cycles.
    pub fn wait_cycles(&self, sources: &[LineSource]) -> Vec<f64> {
        waits_at(self.line_cycles, sources)
    }
}

/// The lines per cycle of tasks whose misses wait this long.
fn traffic_with_wait(sources: &[LineSource], wait_cycles: f64) -> f64 {
    sources
        .iter()
        .map(|source| source.lines / (source.cycles + source.demand_waits * wait_cycles))
        .sum()
}

/// The time of a line with which misses wait as long as measured, in the mean.
fn service_time_for_wait(measured_wait: f64, sources: &[LineSource]) -> f64 {
    let misses = |source: &LineSource| {
        source.demand_waits / (source.cycles + source.demand_waits * measured_wait)
    };
    let all_misses: f64 = sources.iter().map(misses).sum();
    let (mut low, mut high) = (0.0, 1.0 / traffic_with_wait(sources, measured_wait));
    for _ in 0..40 {
        let middle = 0.5 * (low + high);
        let waited: f64 = waits_at(middle, sources)
            .iter()
            .zip(sources)
            .map(|(wait, source)| wait * misses(source))
            .sum();
        if waited > measured_wait * all_misses {
            high = middle
        } else {
            low = middle
        }
    }

    0.5 * (low + high)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Can the service time of a line be recovered from the waits and speeds that the network predicts?
    #[test]
    fn a_lines_service_time_is_recovered_from_predicted_waits() {
        for line_cycles in [4.0, 10.0, 20.0] {
            let unqueued = [(1.0, 0.01), (2.0, 0.02), (1.5, 0.002)]
                .map(|(cycles, misses)| task_lines(cycles, misses, 1.3, 0.0));
            let waits = waits_at(line_cycles, &unqueued);
            let counted: Vec<LineSource> = unqueued
                .iter()
                .zip(&waits)
                .map(|(source, wait)| {
                    let cycles = source.cycles + source.demand_waits * wait;
                    task_lines(cycles, source.demand_waits, 1.3, *wait)
                })
                .collect();
            let (mut waited, mut misses) = (0.0, 0.0);
            for (source, wait) in counted.iter().zip(&waits) {
                let rate = source.demand_waits / (source.cycles + source.demand_waits * wait);
                waited += rate * wait;
                misses += rate;
            }
            let solution = service_time_for_wait(waited / misses, &counted);
            assert!(
                (solution / line_cycles - 1.0).abs() < 0.02,
                "{solution} {line_cycles}"
            );
        }
    }

    /// Do twenty tasks that want twice the bandwidth get the bandwidth, and no more?
    #[test]
    fn tasks_beyond_the_bandwidth_share_it() {
        let sources = vec![task_lines(1.0, 0.01, 1.0, 0.0); 20];
        let wait = waits_at(10.0, &sources)[0];
        let traffic = traffic_with_wait(&sources, wait);
        assert!(traffic <= 0.102 && traffic > 0.09, "{traffic}");
    }
}
