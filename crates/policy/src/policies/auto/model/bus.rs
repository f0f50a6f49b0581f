//! Cost of a package's path to memory by its traffic, inferred from measurements.
//!
//! Problem: the wait of a miss depends on where misses meet, but a policy does not know the bandwidth. Method: the path
//! is a server that needs `S` cycles for each line, so a line waits `S rho / 2 (1 - rho)` with `rho = S x traffic`
//! (Pollaczek-Khinchine). Because the traffic and the wait of each package are counted, `S` can be computed. Properties:
//! if little or no queueing was counted, there is no model. Misses that overlap, and programs that always wait, are left
//! out, unlike in docs/simulators/interval.md; as `S` is fitted to counted waits, it contains part of both.

use std::collections::BTreeMap;

use cachemate_core::TaskId;

use super::problem::{CacheSite, ProblemTask};
use crate::policies::auto::evidence::speeds::ObservedSpeed;

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
/// Higher utilizations count as this one, since the wait is infinite at 1.
const MAX_UTILIZATION: f64 = 0.98;

fn queue_wait_cycles(line_cycles: f64, lines_per_cycle: f64) -> f64 {
    let utilization = (line_cycles * lines_per_cycle).min(MAX_UTILIZATION);
    line_cycles * utilization / (2.0 * (1.0 - utilization))
}

impl MemoryPathModel {
    /// Builds the model; `None` if the queue was not counted or waits are too short.
    pub fn new(
        sites: &[CacheSite],
        tasks: &[ProblemTask],
        line_bytes: f64,
        speed_of: impl Fn(TaskId) -> Option<ObservedSpeed>,
    ) -> Option<Self> {
        // By package: traffic in lines per cycle, misses per cycle, cycles waited per cycle.
        let mut sums: BTreeMap<u32, [f64; 3]> = BTreeMap::new();
        for problem_task in tasks {
            let Some((site, speed)) = problem_task.last_site.zip(speed_of(problem_task.task))
            else {
                continue;
            };
            let Some((misses, bytes)) = speed.misses_per_instr.zip(speed.bytes_per_miss) else {
                continue;
            };
            let misses_per_cycle = misses / speed.elapsed_cycles_per_instr.max(1e-9);
            let sum = sums.entry(sites[site].package).or_default();
            sum[0] += misses_per_cycle * (bytes / line_bytes);
            sum[1] += misses_per_cycle;
            sum[2] += misses_per_cycle * speed.queue_cycles_per_miss?;
        }
        let mut waits_by_package = BTreeMap::new();
        let (mut weighted_sum, mut weight_sum) = (0.0, 0.0);
        for (&package, &[traffic, misses, wait_cycles]) in &sums {
            let measured_wait = wait_cycles / misses.max(1e-12);
            waits_by_package.insert(package, measured_wait);
            if measured_wait >= MIN_WAIT_CYCLES && traffic > 0.0 {
                weighted_sum += traffic * service_time_for_wait(measured_wait, traffic);
                weight_sum += traffic;
            }
        }
        (weight_sum > 0.0).then(|| MemoryPathModel {
            line_cycles: weighted_sum / weight_sum,
            wait_by_package: waits_by_package,
        })
    }

    /// Returns the present wait of a miss on a package, in cycles.
    pub fn current_wait_cycles(&self, package: u32) -> f64 {
        self.wait_by_package.get(&package).copied().unwrap_or(0.0)
    }

    /// Returns the additional wait of a miss on a package with this traffic, relative to the package on which the wait
    /// was measured.
    pub fn added_wait_cycles(&self, lines_per_cycle: f64, measured_package: u32) -> f64 {
        queue_wait_cycles(self.line_cycles, lines_per_cycle)
            - self.current_wait_cycles(measured_package)
    }
}

fn service_time_for_wait(measured_wait: f64, traffic: f64) -> f64 {
    let (mut low, mut high) = (0.0, MAX_UTILIZATION / traffic);
    for _ in 0..40 {
        let middle = 0.5 * (low + high);
        if queue_wait_cycles(middle, traffic) > measured_wait {
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

    /// Can the service time of a line be recovered from the waits that the law predicts?
    #[test]
    fn a_lines_service_time_is_recovered_from_predicted_waits() {
        for (line_cycles, traffic) in [(10.0, 0.05), (4.0, 0.2), (20.0, 0.045)] {
            let solution = service_time_for_wait(queue_wait_cycles(line_cycles, traffic), traffic);
            assert!((solution / line_cycles - 1.0).abs() < 1e-3, "{solution}");
        }
    }
}
