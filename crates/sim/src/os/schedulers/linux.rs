//! Fair sharing in the manner of Linux' completely fair scheduler.
//!
//! Every CPU runs the waiting task with the smallest virtual run time, which is time on a processor over weight. New
//! tasks start one slice behind, sleepers return at most half a slice ahead, and a task that is more than a wake-up
//! granularity behind takes the CPU. Tasks wake where they last ran if that CPU is idle, otherwise on an idle core or
//! CPU below the same last-level cache, otherwise on any idle CPU. New ones go to the least loaded group of every
//! domain in turn.
//!
//! A CPU without work pulls from the nearest queue that has some. Periodically, each domain moves waiting tasks from
//! its busiest to its least busy group that affinity allows, as many as are needed to even out, or swaps one for the
//! sake of fairness.
//!
//! Not modeled are load averages that decay (load is the weight of runnable tasks now), wake-affine, NUMA balancing,
//! bandwidth control, and the tick after which an idle CPU outside the cache is found (here, at once).

use super::{CpuScheduler, EnqueueReason, SchedulerTimes, slot_entry_mut};
use crate::os::domains::{CORE, SHARED_CACHE};
use crate::os::queues::{SchedulerView, Slot};

/// Load of the busier part, in percent of the other's, above which tasks are moved (Linux' default for domains above a
/// core).
const IMBALANCE_PERCENT: f64 = 117.0;
/// Factor by which Linux lengthens the interval of balancing on a busy CPU. The model applies it always.
const BUSY_FACTOR: u64 = 16;

#[derive(Clone, Copy, Default)]
struct FairEntity {
    virtual_run_cycles: i64,
    run_cycles: u64,
    /// Queue to which the task's virtual time is relative.
    home_queue: Option<u32>,
}

pub(crate) struct LinuxLike {
    times: SchedulerTimes,
    tasks: Vec<FairEntity>,
    min_virtual_by_cpu: Vec<i64>,
    /// Cycle at which each level of domains is balanced next.
    next_balance_by_level: Vec<u64>,
}

impl LinuxLike {
    pub fn new(times: SchedulerTimes) -> Self {
        LinuxLike {
            times,
            tasks: Vec::new(),
            min_virtual_by_cpu: Vec::new(),
            next_balance_by_level: vec![0],
        }
    }

    fn update_min_virtual(&mut self, cpu: u32, view: &SchedulerView<'_>) -> i64 {
        let entities = &self.tasks;
        let virtual_cycles_of = |slot: Slot| entities.get(slot).map(|task| task.virtual_run_cycles);
        let min_virtual = view
            .waiting_tasks(cpu)
            .iter()
            .copied()
            .chain(view.running_task(cpu))
            .filter_map(virtual_cycles_of)
            .min();
        let stored_minimum = slot_entry_mut(&mut self.min_virtual_by_cpu, cpu as usize);
        *stored_minimum = (*stored_minimum).max(min_virtual.unwrap_or(*stored_minimum));
        *stored_minimum
    }

    fn choose_wake_cpu(&self, slot: Slot, last_cpu: u32, view: &SchedulerView<'_>) -> u32 {
        let domains = view.domains();
        let is_idle_for = |cpu: &u32| view.is_idle(*cpu) && view.is_allowed_on(slot, *cpu);
        if is_idle_for(&last_cpu) {
            return last_cpu;
        }
        let is_core_idle = |cpu: &u32| {
            domains
                .group_members(CORE, *cpu)
                .all(|sibling| view.is_idle(sibling))
        };
        let nearby_cpus = || domains.group_members(SHARED_CACHE, last_cpu);

        nearby_cpus()
            .find(|cpu| is_idle_for(cpu) && is_core_idle(cpu))
            .or_else(|| nearby_cpus().find(is_idle_for))
            .or_else(|| (0..domains.cpu_count()).find(|cpu| is_idle_for(cpu) && is_core_idle(cpu)))
            .or_else(|| (0..domains.cpu_count()).find(is_idle_for))
            .or_else(|| {
                Some(last_cpu).filter(|&last| view.is_allowed_on(slot, last) && view.is_open(last))
            })
            .unwrap_or_else(|| {
                view.best_cpu(slot, |cpu| {
                    (
                        domains.nearest_common_level(last_cpu, cpu),
                        view.load_milli(cpu),
                        cpu,
                    )
                })
            })
    }

    /// Chooses a CPU from the top down, through the least loaded group of every domain.
    fn choose_cpu(&self, slot: Slot, view: &SchedulerView<'_>) -> u32 {
        let domains = view.domains();
        let mean_group_load = |level: usize, cpu: u32| {
            let (sum, cpus) = domains
                .group_members(level, cpu)
                .fold((0, 0), |(sum, cpus), other| {
                    (sum + view.load_milli(other), cpus + 1)
                });
            sum / cpus
        };
        view.best_cpu(slot, |cpu| {
            let loads: Vec<u64> = (0..domains.level_count())
                .rev()
                .map(|level| mean_group_load(level, cpu))
                .collect();
            (!view.is_idle(cpu), loads, view.load_milli(cpu), cpu)
        })
    }

    /// Plans moves of tasks within every group of one level, from its busiest part to its least busy one: as many as
    /// are needed to even out, or a single one if only a swap is possible.
    fn plan_level_moves(
        &self,
        level: usize,
        view: &SchedulerView<'_>,
        moves: &mut Vec<(Slot, u32)>,
    ) {
        let domains = view.domains();
        let part_number = |cpu: u32| {
            if level == 0 {
                cpu
            } else {
                domains.group_of(level - 1, cpu)
            }
        };
        let mut groups: Vec<u32> = (0..domains.cpu_count())
            .map(|cpu| domains.group_of(level, cpu))
            .collect();
        groups.sort_unstable();
        groups.dedup();

        for group in groups {
            let cpus: Vec<u32> = (0..domains.cpu_count())
                .filter(|&cpu| domains.group_of(level, cpu) == group && view.is_open(cpu))
                .collect();

            // If affinity restricts tasks to a part, equal sums may hide unequal queues (Linux marks such a group as
            // imbalanced), so single CPUs are compared.
            let slots_on_cpu = |cpu: u32| {
                view.waiting_tasks(cpu)
                    .iter()
                    .copied()
                    .chain(view.running_task(cpu))
            };
            let is_barred = |slot: Slot| cpus.iter().any(|&cpu| !view.is_allowed_on(slot, cpu));
            let is_restricted = cpus.iter().any(|&cpu| slots_on_cpu(cpu).any(is_barred));

            let mut parts: Vec<Vec<u32>> = Vec::new();
            for &cpu in &cpus {
                let is_same_part = |part_cpus: &&mut Vec<u32>| {
                    !is_restricted && part_number(part_cpus[0]) == part_number(cpu)
                };
                match parts.iter_mut().find(is_same_part) {
                    Some(part_cpus) => part_cpus.push(cpu),
                    None => parts.push(vec![cpu]),
                }
            }

            let mut round = BalanceRound {
                scheduler: self,
                view,
                loads: cpu_loads(view),
                moves,
                min_gain: 0.5,
            };
            while round.plan_move(&parts) {
                round.min_gain = 1.0;
            }
        }
    }
}

/// The task that one part may pull from another.
enum Pull {
    /// The task may be pulled; contains the task, its present CPU and the new one.
    Possible(Slot, u32, u32),
    /// Affinity prevents every move.
    BarredByAffinity,
    NoTask,
}

fn cpu_loads(view: &SchedulerView<'_>) -> Vec<f64> {
    (0..view.domains().cpu_count())
        .map(|cpu| view.load(cpu))
        .collect()
}

/// The queues while they are being evened out.
struct BalanceRound<'a> {
    scheduler: &'a LinuxLike,
    view: &'a SchedulerView<'a>,
    /// Load of each CPU, including the moves of this round.
    loads: Vec<f64>,
    moves: &'a mut Vec<(Slot, u32)>,
    /// Minimum imbalance for a move, as a multiple of the task's weight; at one half, the move only swaps the two
    /// loads.
    min_gain: f64,
}

impl BalanceRound<'_> {
    /// Plans one move from the busiest to the least busy part between which affinity allows one. Returns whether there
    /// was one. (In Linux, every CPU looks for work, and skips the queues from which it may run no task.)
    fn plan_move(&mut self, parts: &[Vec<u32>]) -> bool {
        let load_of_part = |cpus: &[u32]| {
            let sum: f64 = cpus.iter().map(|&cpu| self.loads[cpu as usize]).sum();
            (sum / cpus.len() as f64, sum, cpus.len() as f64)
        };

        // The sort is stable: among equal parts, the first is the busiest, and the first is the idlest.
        let mut idlest_first: Vec<usize> = (0..parts.len()).collect();
        idlest_first.sort_by(|&a, &b| {
            load_of_part(&parts[a])
                .0
                .total_cmp(&load_of_part(&parts[b]).0)
        });

        let mut busiest_first: Vec<usize> = (0..parts.len()).collect();
        busiest_first.sort_by(|&a, &b| {
            load_of_part(&parts[b])
                .0
                .total_cmp(&load_of_part(&parts[a]).0)
        });
        for &busiest_index in &busiest_first {
            for &idlest_index in &idlest_first {
                let (source_load, target_load) = (
                    load_of_part(&parts[busiest_index]),
                    load_of_part(&parts[idlest_index]),
                );
                if busiest_index == idlest_index
                    || source_load.0 * 100.0 <= target_load.0 * IMBALANCE_PERCENT
                {
                    continue;
                }
                let mean_load = (source_load.1 + target_load.1) / (source_load.2 + target_load.2);
                let imbalance = ((source_load.0 - mean_load) * source_load.2)
                    .min((mean_load - target_load.0) * target_load.2);
                match self.plan_pull(&parts[busiest_index], &parts[idlest_index], imbalance) {
                    Pull::BarredByAffinity => {}
                    Pull::NoTask => return false,
                    Pull::Possible(slot, source, target) => {
                        let weight = self.view.weight(slot);
                        self.loads[source as usize] -= weight;
                        self.loads[target as usize] += weight;
                        self.moves.push((slot, target));
                        return true;
                    }
                }
            }
        }
        false
    }

    /// Plans a pull from the busiest CPU of one part to the least busy CPU of another that may run the task.
    fn plan_pull(&self, source_cpus: &[u32], target_cpus: &[u32], imbalance: f64) -> Pull {
        let view = self.view;
        // If only a swap is possible, the task that ran most is moved, because the tasks that stay behind gain and
        // those that it joins lose.
        let ran_cycles_of = |slot: Slot| {
            self.scheduler
                .tasks
                .get(slot)
                .map_or(0, |task| task.run_cycles)
        };
        let max_run_cycles = |cpu: u32| {
            view.waiting_tasks(cpu)
                .iter()
                .copied()
                .chain(view.running_task(cpu))
                .map(ran_cycles_of)
                .max()
        };

        let recorded_load = |cpu: u32| self.loads[cpu as usize];
        let compare_loads = |a: &u32, b: &u32| {
            recorded_load(*a)
                .total_cmp(&recorded_load(*b))
                .then(max_run_cycles(*b).cmp(&max_run_cycles(*a)))
        };
        let (mut targets, mut sources) = (target_cpus.to_vec(), source_cpus.to_vec());
        targets.sort_by(compare_loads);

        // Among equal CPUs, the last comes first.
        sources.reverse();
        sources.sort_by(|a, b| compare_loads(b, a));
        let is_moving = |slot: &Slot| self.moves.iter().any(|(other, _)| other == slot);
        let mut is_barred = false;

        for &source in &sources {
            let movable_tasks: Vec<Slot> = view
                .waiting_tasks(source)
                .iter()
                .copied()
                .filter(|slot| !is_moving(slot))
                .collect();
            // A queue gives up one task at a time, unless evening out requires more.
            if self.min_gain < 1.0 && movable_tasks.len() < view.count_waiting(source) {
                return Pull::NoTask;
            }

            for &target in &targets {
                if is_barred && recorded_load(source) <= recorded_load(target) {
                    break;
                }

                let is_movable = |slot: &Slot| {
                    view.is_allowed_on(*slot, target)
                        && view.weight(*slot) * self.min_gain <= imbalance + 1e-9
                };
                if let Some(slot) = movable_tasks
                    .iter()
                    .copied()
                    .filter(is_movable)
                    .max_by_key(|&slot| (ran_cycles_of(slot), slot))
                {
                    return Pull::Possible(slot, source, target);
                }

                if movable_tasks
                    .iter()
                    .all(|&slot| view.is_allowed_on(slot, target))
                {
                    return if is_barred {
                        Pull::BarredByAffinity
                    } else {
                        Pull::NoTask
                    };
                }
                is_barred = true;
            }
        }

        Pull::BarredByAffinity
    }
}

impl CpuScheduler for LinuxLike {
    fn choose_queue(&mut self, slot: Slot, reason: EnqueueReason, view: &SchedulerView<'_>) -> u32 {
        match (reason, view.last_cpu(slot)) {
            (EnqueueReason::New, _) | (_, None) => self.choose_cpu(slot, view),
            (EnqueueReason::Expired, Some(last)) if view.is_allowed_on(slot, last) => last,
            (_, Some(last)) => self.choose_wake_cpu(slot, last, view),
        }
    }

    fn enqueue(&mut self, slot: Slot, cpu: u32, reason: EnqueueReason, view: &SchedulerView<'_>) {
        let min_virtual = self.update_min_virtual(cpu, view);
        let home = slot_entry_mut(&mut self.tasks, slot).home_queue;
        let home_min_virtual = home
            .filter(|&from| from != cpu)
            .map(|from| self.update_min_virtual(from, view));

        let slice = self.times.slice_cycles as i64;
        let task = slot_entry_mut(&mut self.tasks, slot);
        task.home_queue = Some(cpu);
        task.virtual_run_cycles = match reason {
            EnqueueReason::New => min_virtual + slice,
            EnqueueReason::Woken => {
                let carried_cycles =
                    home_min_virtual.map_or(task.virtual_run_cycles, |min_virtual_at_home| {
                        task.virtual_run_cycles - min_virtual_at_home + min_virtual
                    });
                carried_cycles.max(min_virtual - slice / 2)
            }
            _ => home_min_virtual.map_or(task.virtual_run_cycles, |home_min| {
                task.virtual_run_cycles - home_min + min_virtual
            }),
        };
    }

    fn queue_key(&self, slot: Slot) -> i64 {
        self.tasks
            .get(slot)
            .map_or(0, |task| task.virtual_run_cycles)
    }

    fn may_overtake(&self, slot: Slot, first_choice: Slot) -> bool {
        self.queue_key(slot) - self.queue_key(first_choice) <= self.times.slice_cycles as i64
    }

    fn slice_cycles(&self, slot: Slot, cpu: u32, view: &SchedulerView<'_>) -> u64 {
        let queue = view.waiting_tasks(cpu);
        let sum: f64 =
            queue.iter().map(|&other| view.weight(other)).sum::<f64>() + view.weight(slot);
        let share = view.weight(slot) * (queue.len() + 1) as f64 / sum;
        let slice = self.times.slice_cycles as f64;
        ((slice * share).max(slice / 4.0) as u64).max(1)
    }

    fn charge_cycles(&mut self, slot: Slot, cycles: u64, weight: f64) {
        let task = slot_entry_mut(&mut self.tasks, slot);
        task.run_cycles += cycles;
        task.virtual_run_cycles += (cycles as f64 / weight) as i64;
    }

    fn should_preempt(&self, newcomer: Slot, running_slot: Slot) -> bool {
        let granularity = self
            .times
            .millisecond_cycles
            .min(self.times.slice_cycles / 2) as i64;
        self.queue_key(newcomer) + granularity < self.queue_key(running_slot)
    }

    fn next_balance_cycle(&self) -> u64 {
        self.next_balance_by_level
            .iter()
            .copied()
            .min()
            .unwrap_or(u64::MAX)
    }

    fn plan_moves(&mut self, view: &SchedulerView<'_>) -> Vec<(Slot, u32)> {
        let domains = view.domains();
        self.next_balance_by_level.resize(domains.level_count(), 0);
        let mut moves = Vec::new();
        // Wide domains come first: a queue gives up one task at a time, and near moves are considered more often
        // anyway.
        for level in (0..domains.level_count()).rev() {
            if self.next_balance_by_level[level] <= view.now_cycles() {
                // The interval is that of a busy domain in Linux: `BUSY_FACTOR` times as many milliseconds as the
                // domain has CPUs.
                let interval_cycles = domains.group_members(level, 0).count() as u64
                    * BUSY_FACTOR
                    * self.times.millisecond_cycles;
                self.next_balance_by_level[level] = view.now_cycles() + interval_cycles.max(1);
                self.plan_level_moves(level, view, &mut moves);
            }
        }
        moves
    }

    fn steal(&mut self, cpu: u32, view: &SchedulerView<'_>) -> Option<Slot> {
        let domains = view.domains();
        let candidates = (0..domains.cpu_count())
            .filter(|&other| other != cpu && view.count_waiting_for(other, cpu) > 0);
        let nearest_busiest = |&other: &u32| {
            (
                domains.nearest_common_level(cpu, other),
                std::cmp::Reverse(view.load_milli(other)),
            )
        };
        let source = candidates.min_by_key(nearest_busiest)?;

        let starvation_key = |slot: &Slot| {
            (
                self.tasks.get(*slot).map_or(0, |task| task.run_cycles),
                *slot,
            )
        };
        view.waiting_tasks(source)
            .iter()
            .copied()
            .filter(|&slot| view.is_allowed_on(slot, cpu))
            .min_by_key(starvation_key)
    }
}
