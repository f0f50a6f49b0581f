//! Solaris' time-sharing class: multi-level feedback by the default dispatch table (`ts_dptbl`), with per-CPU queues.
//!
//! A thread that uses up its quantum falls to a lower level with a longer one (20 ms at the top, 200 ms at the bottom).
//! A thread that returns from sleep rises to the level in its table entry. Once a second, every thread that has gone
//! too long without using up a quantum is lifted, which keeps the bottom from starving. A queue that is longer than its
//! neighbor's at the thread's level passes the thread on, and an idle CPU takes the best waiting thread.
//!
//! Plan weights multiply the quantum, because the class itself has no shares.

use super::{CpuScheduler, EnqueueReason, SchedulerTimes, slot_entry_mut};
use crate::os::queues::{SchedulerView, Slot};

/// Level at which threads of the class start.
const START_LEVEL: u8 = 29;
/// Level from which on a thread is passed on if its queue has at least two waiting threads more than the neighbor's;
/// below it, at least three more are required.
const STRICT_BALANCE_LEVEL: u8 = 16;
const LIFT_INTERVAL_MS: u64 = 1000;

/// One line of the dispatch table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DispatchTableRow {
    quantum_ms: u64,
    /// Level after the thread has used up its quantum.
    expired_level: u8,
    /// Level after a sleep.
    woken_level: u8,
    /// Number of seconds without using up a quantum after which the thread is lifted.
    max_wait_s: u32,
    lifted_level: u8,
}

fn dispatch_row(level: u8) -> DispatchTableRow {
    let (quantum_ms, level_drop) = match level {
        0..=9 => (200, level),
        10..=19 => (160, 10),
        20..=29 => (120, 10),
        30..=39 => (80, 10),
        59 => (20, 10),
        _ => (40, 10),
    };

    let woken_level = match level {
        0..=9 => 50,
        10..=19 => 51,
        20..=29 => 52,
        30..=34 => 53,
        35..=39 => 54,
        40..=44 => 55,
        45 => 56,
        46 => 57,
        47..=58 => 58,
        _ => 59,
    };
    let lifted_level = if level < 49 { woken_level } else { 59 };
    let max_wait_s = if level == 59 { 32_000 } else { 0 };
    DispatchTableRow {
        quantum_ms,
        expired_level: level - level_drop,
        woken_level,
        max_wait_s,
        lifted_level,
    }
}

#[derive(Clone, Copy, Default)]
struct TimeSharingEntity {
    level: u8,
    unexpired_seconds: u32,
    has_started: bool,
    /// Part of the quantum at this level that has not been used yet.
    remaining_cycles: u64,
}

pub(crate) struct SolarisTimeSharing {
    times: SchedulerTimes,
    tasks: Vec<TimeSharingEntity>,
    next_lift_cycle: u64,
}

impl SolarisTimeSharing {
    pub fn new(times: SchedulerTimes) -> Self {
        let next_lift_cycle = LIFT_INTERVAL_MS * times.millisecond_cycles;
        SolarisTimeSharing {
            times,
            tasks: Vec::new(),
            next_lift_cycle,
        }
    }

    fn level_of(&self, slot: Slot) -> u8 {
        self.tasks.get(slot).map_or(START_LEVEL, |task| task.level)
    }

    fn quantum_cycles(&self, level: u8, weight: f64) -> u64 {
        ((dispatch_row(level).quantum_ms * self.times.millisecond_cycles) as f64 * weight).max(1.0)
            as u64
    }

    /// Threads at this level or a better one.
    fn count_waiting_at(&self, cpu: u32, level: u8, view: &SchedulerView<'_>) -> usize {
        view.waiting_tasks(cpu)
            .iter()
            .filter(|&&slot| self.level_of(slot) >= level)
            .count()
    }

    /// An idle CPU or, if there is none, the one that runs the lowest level.
    fn lowest_level_cpu(&self, slot: Slot, view: &SchedulerView<'_>) -> u32 {
        let domains = view.domains();
        let last_cpu = view.last_cpu(slot).unwrap_or(0);

        view.best_cpu(slot, |cpu| {
            let running_level = view
                .running_task(cpu)
                .map(|running_slot| self.level_of(running_slot) + 1)
                .unwrap_or(0);
            let is_busy = !view.is_idle(cpu);
            let busy_siblings = domains
                .group_members(0, cpu)
                .filter(|&sibling| !view.is_idle(sibling))
                .count();
            (
                is_busy,
                if is_busy { 0 } else { busy_siblings },
                view.count_waiting(cpu),
                running_level,
                domains.nearest_common_level(last_cpu, cpu),
                cpu,
            )
        })
    }
}

impl CpuScheduler for SolarisTimeSharing {
    fn choose_queue(&mut self, slot: Slot, reason: EnqueueReason, view: &SchedulerView<'_>) -> u32 {
        let home_cpu = match view.last_cpu(slot) {
            Some(last) if view.is_allowed_on(slot, last) && view.is_open(last) => last,
            _ => return self.lowest_level_cpu(slot, view),
        };
        if reason == EnqueueReason::Woken || reason == EnqueueReason::New {
            return if view.is_idle(home_cpu) {
                home_cpu
            } else {
                self.lowest_level_cpu(slot, view)
            };
        }

        // Like `setbackdq`, compares the queue with that of the next CPU of the partition.
        let level = self.level_of(slot);
        let cpus = view.domains().cpu_count();
        let later_cpus = (1..=cpus).map(|step| (home_cpu + step) % cpus);
        let next_cpu = later_cpus
            .into_iter()
            .find(|&cpu| view.is_open(cpu) && view.is_allowed_on(slot, cpu))
            .unwrap_or(home_cpu);

        let max_difference = if level >= STRICT_BALANCE_LEVEL { 1 } else { 2 };
        let excess_at_home = self
            .count_waiting_at(home_cpu, level, view)
            .saturating_sub(max_difference);
        if excess_at_home > 0 && self.count_waiting_at(next_cpu, level, view) < excess_at_home {
            next_cpu
        } else {
            home_cpu
        }
    }

    fn enqueue(&mut self, slot: Slot, _cpu: u32, reason: EnqueueReason, view: &SchedulerView<'_>) {
        let weight = view.weight(slot);
        let (mut level, has_started) = (
            self.level_of(slot),
            slot_entry_mut(&mut self.tasks, slot).has_started,
        );
        match reason {
            EnqueueReason::Expired => level = dispatch_row(level).expired_level,
            EnqueueReason::Woken
                if self.tasks[slot].unexpired_seconds > dispatch_row(level).max_wait_s
                    || has_started =>
            {
                level = dispatch_row(level).woken_level;
            }
            EnqueueReason::New => level = START_LEVEL,
            _ => return,
        }
        let remaining_cycles = self.quantum_cycles(level, weight);
        self.tasks[slot] = TimeSharingEntity {
            level,
            unexpired_seconds: 0,
            has_started: true,
            remaining_cycles,
        };
    }

    fn queue_key(&self, slot: Slot) -> i64 {
        -i64::from(self.level_of(slot))
    }

    fn slice_cycles(&self, slot: Slot, _cpu: u32, view: &SchedulerView<'_>) -> u64 {
        let remaining_cycles = self.tasks.get(slot).map_or(0, |task| task.remaining_cycles);
        if remaining_cycles > 0 {
            remaining_cycles
        } else {
            self.quantum_cycles(self.level_of(slot), view.weight(slot))
        }
    }

    fn charge_cycles(&mut self, slot: Slot, cycles: u64, _weight: f64) {
        let task = slot_entry_mut(&mut self.tasks, slot);
        task.remaining_cycles = task.remaining_cycles.saturating_sub(cycles);
    }

    fn should_preempt(&self, newcomer: Slot, running_slot: Slot) -> bool {
        self.level_of(newcomer) > self.level_of(running_slot)
    }

    fn next_balance_cycle(&self) -> u64 {
        self.next_lift_cycle
    }

    /// Lifts the threads that have not used up a quantum for too long, as `ts_update` does once a second.
    fn plan_moves(&mut self, view: &SchedulerView<'_>) -> Vec<(Slot, u32)> {
        self.next_lift_cycle = view.now_cycles() + LIFT_INTERVAL_MS * self.times.millisecond_cycles;
        for slot in 0..self.tasks.len() {
            let (level, weight) = (self.tasks[slot].level, view.weight(slot));
            self.tasks[slot].unexpired_seconds += 1;
            if self.tasks[slot].has_started
                && self.tasks[slot].unexpired_seconds > dispatch_row(level).max_wait_s
            {
                let lifted_level = dispatch_row(level).lifted_level;
                let remaining_cycles = self.quantum_cycles(lifted_level, weight);
                self.tasks[slot] = TimeSharingEntity {
                    level: lifted_level,
                    unexpired_seconds: 0,
                    has_started: true,
                    remaining_cycles,
                };
            }
        }
        Vec::new()
    }

    fn steal(&mut self, cpu: u32, view: &SchedulerView<'_>) -> Option<Slot> {
        let selection_key = |&slot: &Slot| {
            (
                std::cmp::Reverse(self.level_of(slot)),
                view.enqueue_number(slot),
            )
        };
        view.queued_tasks()
            .filter(|&slot| view.is_allowed_on(slot, cpu))
            .min_by_key(selection_key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the table match the published default at its corners: quanta, falls, returns and lifts?
    #[test]
    fn the_dispatch_table_is_the_published_default() {
        let row_fields = |level| {
            let line = dispatch_row(level);
            (
                line.quantum_ms,
                line.expired_level,
                line.woken_level,
                line.max_wait_s,
                line.lifted_level,
            )
        };

        assert_eq!(row_fields(0), (200, 0, 50, 0, 50));
        assert_eq!(row_fields(9), (200, 0, 50, 0, 50));
        assert_eq!(row_fields(10), (160, 0, 51, 0, 51));
        assert_eq!(row_fields(29), (120, 19, 52, 0, 52));
        assert_eq!(row_fields(40), (40, 30, 55, 0, 55));
        assert_eq!(row_fields(48), (40, 38, 58, 0, 58));
        assert_eq!(row_fields(49), (40, 39, 58, 0, 59));
        assert_eq!(row_fields(59), (20, 49, 59, 32_000, 59));
        assert!((0..60).all(|level| dispatch_row(level).lifted_level < 60));
    }
}
