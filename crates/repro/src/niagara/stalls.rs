//! Attribution of a change of contention to resources.
//!
//! A context of an in-order core either issues an instruction or waits, and every cycle of waiting is booked under its
//! cause. A thread's speed is the inverse of its cycles per instruction. Its gain or loss at its new share of time is
//! therefore the change in waiting cycles per instruction, cause by cause and without a remainder.

use cachemate_sim::results::{RunResults, TaskResults};

/// Parts of [`crate::setup::Comparison::contention_gain`], which add up to it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ContentionBreakdown {
    /// Contention for the core's single issue slot.
    pub issue: f64,
    /// Latency of caches and memory, because of a different number of misses.
    pub misses: f64,
    /// Queues at the L2 and memory.
    pub queues: f64,
    /// The operating system's switches, faults and interrupts.
    pub system: f64,
}

/// The breakdown; `None` if a thread never ran in the old run. One that never ran in the new run
/// adds nothing.
pub fn break_down_contention(
    new_results: &RunResults,
    old_results: &RunResults,
) -> Option<ContentionBreakdown> {
    let (mut part_cycles, mut cycles_at_old_speeds) = ([0.0; 4], 0.0);
    for (new_task, old_task) in new_results.tasks.iter().zip(&old_results.tasks) {
        let (old_speed, old_waits) = per_instruction(old_task)?;
        let Some((new_speed, new_waits)) = per_instruction(new_task) else {
            continue;
        };
        cycles_at_old_speeds += new_task.run_time_share * old_speed;
        for ((part, new_wait), old_wait) in part_cycles.iter_mut().zip(new_waits).zip(old_waits) {
            // 1/a - 1/b = (b - a) / ab, in cycles per instruction.
            *part += new_task.run_time_share * new_speed * old_speed * (old_wait - new_wait);
        }
    }

    let [issue, misses, queues, system] = part_cycles.map(|cycles| cycles / cycles_at_old_speeds);
    Some(ContentionBreakdown {
        issue,
        misses,
        queues,
        system,
    })
}

/// The instructions per cycle on a context, and cycles per instruction caused by others, in the
/// order of [`ContentionBreakdown`].
fn per_instruction(task: &TaskResults) -> Option<(f64, [f64; 4])> {
    let cycles = task
        .on_cpu_cycles
        .iter()
        .map(|(_, cycles)| cycles)
        .sum::<u64>() as f64;
    let instructions = task.instructions as f64;
    let stalls = &task.stall_cycles;
    let hit_cycles: f64 = stalls.hit.iter().map(|(_, cycles)| cycles).sum();
    let miss_cycles = hit_cycles + stalls.remote_cache + stalls.local_memory + stalls.remote_memory;
    let waits_per_instr = [stalls.issue, miss_cycles, stalls.queue, stalls.system]
        .map(|cycles| cycles / instructions);
    (cycles > 0.0 && instructions > 0.0).then_some((instructions / cycles, waits_per_instr))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::{Comparison, Workload, WorkloadJob};

    /// Do the parts add up to the contention of the comparison if six threads share the contexts of one core?
    #[test]
    fn the_parts_add_up_to_the_contention() {
        let run_kernels = |seed: u64, kernels: [&str; 6]| {
            let jobs = kernels
                .iter()
                .map(|kernel| WorkloadJob::new(kernel, seed))
                .collect();
            let mut workload = Workload::from_machine_name("niagara-2core", jobs, seed)
                .unwrap()
                .with_length(400_000, 2_000_000);
            workload.machine.cores_per_package = 1;
            workload
                .machine
                .caches
                .iter_mut()
                .for_each(|cache| cache.shared_by_cores = 1);
            workload.options.scale = 200;
            workload.unmanaged_run().unwrap()
        };

        let old = run_kernels(1, ["gzip", "gzip", "art", "art", "mcf", "gzip"]);
        let new = run_kernels(2, ["gzip", "gzip", "art", "art", "mcf", "gzip"]);
        let (breakdown, contention_gain) = (
            break_down_contention(&new, &old).unwrap(),
            Comparison::compare(&new, &old).contention_gain,
        );
        let sum = breakdown.issue + breakdown.misses + breakdown.queues + breakdown.system;
        assert!(
            (sum - contention_gain).abs() < 0.002,
            "{breakdown:?} {contention_gain}"
        );
        assert_eq!(
            break_down_contention(&old, &old),
            Some(ContentionBreakdown::default())
        );
        // A thread that never ran in the new run does not count; one that never ran in the old run makes the comparison
        // impossible.
        let mut starved = old.clone();
        (
            starved.tasks[5].instructions,
            starved.tasks[5].run_time_share,
        ) = (0, 0.0);
        assert_eq!(
            break_down_contention(&starved, &old),
            Some(ContentionBreakdown::default())
        );
        assert_eq!(break_down_contention(&old, &starved), None);
    }
}
