//! Which resource a change of contention lies at.
//!
//! A context of an in-order core either issues an instruction or waits, and every cycle of waiting is booked under its cause. So
//! what threads gain or lose at their new shares of time is, cycle for cycle, what they wait less or more.

use cachemate_sim::results::{RunResults, TaskResults};

/// Parts of [`crate::setup::Comparison::contention_gain`]; together they are all of it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ContentionAt {
    /// The core's one issue slot, taken by the other contexts.
    pub issue: f64,
    /// Latency of caches and memory: other misses.
    pub misses: f64,
    /// Queues for the L2 and memory.
    pub queues: f64,
}

/// `None` where a thread never ran in either run.
pub fn contention_at(new: &RunResults, old: &RunResults) -> Option<ContentionAt> {
    let (mut at, mut at_old_speeds) = (ContentionAt::default(), 0.0);
    for (now, before) in new.tasks.iter().zip(&old.tasks) {
        let ((was_issue, was_misses, was_queues), was_speed) = per_cycle(before)?;
        let ((issue, misses, queues), _) = per_cycle(now)?;
        let share = now.run_time_share;
        at_old_speeds += share * was_speed;
        at.issue += share * (was_issue - issue);
        at.misses += share * (was_misses - misses);
        at.queues += share * (was_queues - queues);
    }
    let of_all = |part: f64| part / at_old_speeds;
    Some(ContentionAt { issue: of_all(at.issue), misses: of_all(at.misses), queues: of_all(at.queues) })
}

/// Cycles waited for (issue, misses, queues) and instructions, per cycle on a context.
fn per_cycle(task: &TaskResults) -> Option<((f64, f64, f64), f64)> {
    let cycles = task.on_cpu_cycles.iter().map(|(_, cycles)| cycles).sum::<u64>() as f64;
    let stalls = &task.stall_cycles;
    let hits: f64 = stalls.hit.iter().map(|(_, cycles)| cycles).sum();
    let misses = hits + stalls.remote_cache + stalls.local_memory + stalls.remote_memory;
    let waits = (stalls.issue / cycles, misses / cycles, stalls.queue / cycles);
    (cycles > 0.0).then_some((waits, task.instructions as f64 / cycles))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::{Comparison, Job, Workload};

    /// Do the parts add up to the contention that the comparison finds, where four threads of a core make way for others?
    #[test]
    fn the_parts_are_the_whole() {
        let run = |seed: u64, kernels: [&str; 6]| {
            let jobs = kernels.iter().map(|kernel| Job::new(kernel, seed)).collect();
            let mut workload = Workload::on("niagara-2core", jobs, seed).unwrap().lasting(400_000, 2_000_000);
            workload.machine.cores_per_package = 1;
            workload.machine.caches.iter_mut().for_each(|cache| cache.shared_by_cores = 1);
            workload.options.scale = 200;
            workload.unmanaged().unwrap()
        };
        let old = run(1, ["gzip", "gzip", "art", "art", "mcf", "gzip"]);
        let new = run(2, ["gzip", "gzip", "art", "art", "mcf", "gzip"]);
        let (at, whole) = (contention_at(&new, &old).unwrap(), Comparison::of(&new, &old).unwrap().contention_gain);
        let sum = at.issue + at.misses + at.queues;
        assert!((sum - whole).abs() < 0.01, "{at:?} {whole}");
        let none = ContentionAt { issue: 0.0, misses: 0.0, queues: 0.0 };
        assert_eq!(contention_at(&old, &old), Some(none));
    }
}
