//! Application of a plan, and the state in force as read back.

use std::collections::BTreeMap;

use cachemate_core::{
    ActiveShare, ActuationLimits, AppliedPlan, BandwidthLimit, CacheId, Change, ChangeKind,
    ClassLimits, ColorAssignment, CpuId, CpuSet, GangSchedule, IndexSet, MachineState,
    PageMigration, PendingItem, Plan, PlanItem, ProcessId, RefusalReason, RefusedItem,
    ServiceClassId, ShareMember, TaskId, TaskState, TrackedObject, Units, derive_changes,
    refused_items, run,
};

use super::{IntervalMachine, IntervalTask, cache_parts};
use crate::engine::{TrafficCap, TrafficLimit};
use crate::run_queues::QueueRotation;

/// A migration of a process's pages to other colors.
#[derive(Clone, Debug, PartialEq)]
pub struct PageMove {
    pub process: ProcessId,
    pub pages: u64,
    pub start_ns: u64,
    pub end_ns: u64,
}

/// Share of a process's time that copying takes while its pages migrate.
const COPYING_SHARE: f64 = 0.5;

/// Share of a process's pages that migrate, if the pages are evenly spread over `old_colors` before
/// the change and over `allowed_colors` after it.
fn migrating_share(old_colors: &IndexSet, allowed_colors: &IndexSet) -> f64 {
    let share_per_color = |colors: &IndexSet| 1.0 / f64::from(colors.count().max(1));
    let vacated_share = |color: u32| {
        if allowed_colors.contains(color) {
            (share_per_color(old_colors) - share_per_color(allowed_colors)).max(0.0)
        } else {
            share_per_color(old_colors)
        }
    };
    old_colors.iter().map(vacated_share).sum()
}

impl IntervalMachine {
    /// Applies the plan as far as possible.
    pub(super) fn apply_plan(&mut self, plan: &Plan) -> AppliedPlan {
        let derived_changes =
            derive_changes(plan, &[], &self.state(), &self.topology, &self.capabilities);
        let outcomes = run(&derived_changes.changes, |change| self.apply_change(change));
        let mut refusals = derived_changes.refused_items;
        refusals.extend(refused_items(&derived_changes.changes, &outcomes));
        let changes_gangs = |change: &Change| {
            matches!(
                change.kind,
                ChangeKind::StartGangs { .. } | ChangeKind::StopGangs { .. }
            )
        };

        // While a probe holds CPUs, gangs wait until the probe has ended.
        if derived_changes.changes.iter().any(changes_gangs) && !self.has_probe_with_cpus() {
            self.pass_gangs_to_queues();
        }

        if !derived_changes.changes.is_empty() {
            self.engine.run_queues.balance();
        }

        if !plan.penalties.is_empty() {
            let message = "time sharing is averaged, so no task is picked individually".to_string();
            refusals.push(RefusedItem {
                item: PlanItem::Penalties,
                reason: RefusalReason::NotSupported,
                message,
            });
        }

        self.plan = plan.clone();
        self.divide_caches();
        self.limit_bandwidth();
        self.apply_probes(plan, &mut refusals);
        self.refused.clone_from(&refusals);
        let mut applied_plan = self.read_back();
        applied_plan.refused = refusals;
        applied_plan
    }

    fn live_tasks(&self) -> impl Iterator<Item = &IntervalTask> {
        self.tasks
            .iter()
            .filter(|interval_task| !interval_task.exited)
    }

    /// What changes are derived from.
    fn state(&self) -> MachineState {
        let all_cpus: CpuSet = (0..self.spec.cpus()).collect();
        let task_state = |interval_task: &IntervalTask| {
            let queue_entry = &self.engine.run_queues.tasks[interval_task.slot as usize];
            TaskState {
                task: interval_task.task,
                process: interval_task.process,
                name: self.jobs[interval_task.job].job.name.clone(),
                movable: !interval_task.is_pinned,
                group: None,
                affinity: Some(TrackedObject {
                    current: queue_entry.allowed_cpus.clone(),
                    original: all_cpus.clone(),
                }),
                weight: Some(TrackedObject {
                    current: queue_entry.weight,
                    original: 1.0,
                }),
                class: interval_task.class,
                class_owner: None,
                no_idle_turns: None,
            }
        };

        let process_colors = |interval_task: &IntervalTask| {
            let current_assignment = self.colors.get(&interval_task.process).cloned();
            (
                interval_task.process,
                TrackedObject {
                    current: current_assignment,
                    original: None,
                },
            )
        };
        let has_colors = self.spec.pages.colors.is_some();

        MachineState {
            tasks: self.live_tasks().map(task_state).collect(),
            classes: self.classes.clone(),
            colors: if has_colors {
                self.live_tasks().map(process_colors).collect()
            } else {
                BTreeMap::new()
            },
            gangs: self.gangs.clone(),
            // Class 0 of the hardware is the default class of all tasks.
            limits: ActuationLimits {
                max_classes: Some(self.spec.class_count() - 1),
                ..ActuationLimits::default()
            },
            ..MachineState::default()
        }
    }

    fn apply_change(&mut self, change: &Change) -> Result<(), RefusedItem> {
        let refuse_exited = || change.failed("the task has ended");

        match &change.kind {
            ChangeKind::Affinity { task, to, .. } => {
                let slot = self.slot_of(*task).ok_or_else(refuse_exited)?;
                self.engine.set_allowed_cpus(slot, to.clone());
            }
            ChangeKind::Weight { task, to, .. } => {
                let slot = self.slot_of(*task).ok_or_else(refuse_exited)?;
                self.engine.run_queues.set_weight(slot, *to);
            }
            ChangeKind::CreateClass { class, limits }
            | ChangeKind::Schemata {
                class, to: limits, ..
            } => {
                self.classes.insert(*class, limits.clone());
            }
            ChangeKind::RemoveClass { class, .. } => {
                self.classes.remove(class);
            }
            ChangeKind::Member { task, to, .. } => {
                let index = self
                    .tasks
                    .iter()
                    .position(|interval_task| interval_task.task == *task);
                self.tasks[index.ok_or_else(refuse_exited)?].class = *to;
            }
            ChangeKind::Colors {
                process,
                from,
                to: Some(to),
            } => {
                self.start_page_move(*process, from.as_ref(), to);
                self.colors.insert(*process, to.clone());
            }
            ChangeKind::Colors {
                process, to: None, ..
            } => {
                self.colors.remove(process);
            }
            ChangeKind::StopGangs { schedule } => self
                .gangs
                .retain(|active_schedule| active_schedule != schedule),
            ChangeKind::StartGangs { schedule } => {
                let index = self
                    .gangs
                    .partition_point(|active_schedule| active_schedule.cpus < schedule.cpus);
                self.gangs.insert(index, schedule.clone());
            }
            ChangeKind::Cpuset { .. } => return Err(change.failed("this machine has no groups")),
        }

        Ok(())
    }

    pub(super) fn pass_gangs_to_queues(&mut self) {
        let build_rotation = |schedule: &GangSchedule| {
            let slot_and_cpu = |&(task, cpu): &(TaskId, Option<CpuId>)| {
                Some((self.slot_of(task)?, cpu.map(|cpu| cpu.0)))
            };
            let gang_slots = |gang: &cachemate_core::Gang| {
                (
                    gang.members.iter().filter_map(slot_and_cpu).collect(),
                    gang.slices,
                )
            };
            let gangs = schedule.gangs.iter().map(gang_slots).collect();
            QueueRotation::new(
                schedule.cpus.clone(),
                self.cycles_of(schedule.slice_ns),
                gangs,
            )
        };

        let rotations = self.gangs.iter().map(build_rotation).collect();
        self.engine.run_queues.set_rotations(rotations);
    }

    /// Starts the migration of pages outside the new colors, and of pages that overfill the remaining old colors. The
    /// migration takes time of the process, and the cached lines of these pages are lost.
    fn start_page_move(
        &mut self,
        process: ProcessId,
        old_assignment: Option<&ColorAssignment>,
        new_assignment: &ColorAssignment,
    ) {
        let Some(colors) = self.spec.pages.colors else {
            return;
        };
        let old_colors = old_assignment.map_or_else(
            || (0..colors).collect(),
            |assignment| assignment.allowed.clone(),
        );
        let share = migrating_share(&old_colors, &new_assignment.allowed);
        let process_tasks = self
            .tasks
            .iter()
            .filter(|interval_task| interval_task.process == process);
        let slots: Vec<u32> = process_tasks
            .map(|interval_task| interval_task.slot)
            .collect();
        let pages = (share * slots.first().map_or(0.0, |&slot| self.program_pages(slot))) as u64;
        if new_assignment.migration == PageMigration::Never || pages == 0 {
            return;
        }
        let cost_ns =
            pages as f64 * self.spec.pages.migration_cycles as f64 * 1e9 / self.spec.hertz as f64;
        self.cost_ns += cost_ns;
        let end_ns = self.now_ns + (cost_ns / COPYING_SHARE) as u64 + 1;
        for &slot in &slots {
            self.engine.drop_lines(slot, share);
        }
        self.page_moves
            .retain(|page_move| page_move.process != process);
        self.page_moves.push(PageMove {
            process,
            pages,
            start_ns: self.now_ns,
            end_ns,
        });
        self.charge_process(process);
    }

    /// Charges a task for copying its pages and for the interrupts of a log while either is in progress.
    pub(super) fn charge_overhead(&mut self, task: TaskId) {
        let Some(interval_task) = self
            .task(task)
            .filter(|interval_task| !interval_task.exited)
        else {
            return;
        };
        let is_copying = self
            .page_moves
            .iter()
            .any(|page_move| page_move.process == interval_task.process);
        let copying_share = if is_copying { COPYING_SHARE } else { 0.0 };
        self.engine.take_processor_time(
            interval_task.slot,
            1.0 - (1.0 - copying_share) * (1.0 - self.logging_share(task)),
        );
    }

    fn charge_process(&mut self, process: ProcessId) {
        let process_tasks = self
            .tasks
            .iter()
            .filter(|interval_task| interval_task.process == process);
        let tasks: Vec<TaskId> = process_tasks
            .map(|interval_task| interval_task.task)
            .collect();
        tasks
            .into_iter()
            .for_each(|task| self.charge_overhead(task));
    }

    pub(super) fn next_move_end_ns(&self) -> u64 {
        self.page_moves
            .iter()
            .map(|moving| moving.end_ns)
            .min()
            .unwrap_or(u64::MAX)
    }

    pub(super) fn finish_moves(&mut self) {
        let now_ns = self.now_ns;
        let (finished_moves, unfinished_moves): (Vec<PageMove>, Vec<PageMove>) =
            std::mem::take(&mut self.page_moves)
                .into_iter()
                .partition(|moving| moving.end_ns <= now_ns);
        self.page_moves = unfinished_moves;
        finished_moves
            .iter()
            .for_each(|page_move| self.charge_process(page_move.process));
    }

    /// Divides every contended cache as classes, colors and events require.
    pub(super) fn divide_caches(&mut self) {
        let contended_caches: Vec<CacheId> = self
            .topology
            .caches
            .iter()
            .filter(|cache| cache.last_level)
            .map(|cache| cache.id)
            .collect();
        let level_ways = self.spec.last_level_cache().map_or(1, |cache| cache.ways);

        for (cache_index, cache) in contended_caches.iter().enumerate() {
            let mut masks: Vec<IndexSet> = Vec::new();
            let mut members: Vec<(u32, usize)> = Vec::new();
            let mut units = level_ways;
            for interval_task in self.live_tasks() {
                let class_ways = || {
                    Some((
                        self.classes
                            .get(&interval_task.class?)?
                            .masks
                            .get(cache)?
                            .clone(),
                        level_ways,
                    ))
                };

                // A frame has the same color in every cache.
                let colors = || {
                    Some((
                        self.colors.get(&interval_task.process)?.allowed.clone(),
                        self.spec.pages.colors?,
                    ))
                };
                let assigned_units = class_ways().or_else(colors);
                if let Some((mask, unit_count)) = assigned_units {
                    units = unit_count;
                    members.push((interval_task.slot, masks.len()));
                    masks.push(mask);
                }
            }

            let live_count = self.live_tasks().count();
            let is_partly_shared = members.len() < live_count
                || self.external_slots.contains_key(&(cache_index as u32));
            let division = cache_parts::divide_cache(units, &masks, is_partly_shared);
            let remaining_share = self
                .remaining_shares
                .get(&(cache_index as u32))
                .copied()
                .unwrap_or(1.0);
            let lines_of_share = |share: f64| {
                (f64::from(self.engine.divisible_lines()) * share * remaining_share) as f32
            };
            let domains: Vec<(f32, u8)> = division
                .parts
                .iter()
                .map(|&(share, group)| (lines_of_share(share), group))
                .collect();

            let groups: Vec<f32> = division
                .groups
                .iter()
                .map(|&share| lines_of_share(share))
                .collect();
            let slot_domains: Vec<(u32, u8)> = members
                .iter()
                .map(|&(slot, mask)| (slot, division.part_of_mask[mask]))
                .collect();
            self.engine
                .divide_if_changed(cache_index, &domains, &groups, &slot_domains);
        }
    }

    /// Limits the traffic behind every contended cache as classes require.
    pub(super) fn limit_bandwidth(&mut self) {
        let Some(support) = self.spec.memory.bandwidth_limits else {
            return;
        };
        let contended_caches = self.topology.caches.iter().filter(|cache| cache.last_level);
        let caches: Vec<CacheId> = contended_caches.map(|cache| cache.id).collect();

        for (cache_index, cache) in caches.iter().enumerate() {
            let limit_of_class = |(class, limits): (&ServiceClassId, &ClassLimits)| {
                let level = *limits.bandwidth.get(cache)?;
                let members = self
                    .live_tasks()
                    .filter(|interval_task| interval_task.class == Some(*class));
                let cap = match support.unit.bytes_per_second() {
                    None => TrafficCap::RequestShare(level as f32 / 100.0),
                    Some(bytes) => TrafficCap::LinesPerCycle(
                        (f64::from(level) * bytes
                            / self.engine.line_bytes()
                            / self.spec.hertz as f64) as f32,
                    ),
                };
                Some(TrafficLimit {
                    cap,
                    slots: members.map(|interval_task| interval_task.slot).collect(),
                })
            };
            let limits: Vec<TrafficLimit> =
                self.classes.iter().filter_map(limit_of_class).collect();
            self.engine.limit_traffic(cache_index, &limits);
        }
    }

    /// Reads the state in force from the machine.
    pub(super) fn read_back(&self) -> AppliedPlan {
        let all_cpus: CpuSet = (0..self.spec.cpus()).collect();
        let mut applied_plan = AppliedPlan {
            gangs: self.gangs.clone(),
            ..AppliedPlan::default()
        };
        for interval_task in self.live_tasks() {
            let queue_entry = &self.engine.run_queues.tasks[interval_task.slot as usize];
            let (cpus, weight) = (&queue_entry.allowed_cpus, queue_entry.weight);
            applied_plan.record_task(interval_task.task, cpus, weight, &all_cpus, &self.plan);
        }
        applied_plan.probes = self.probes.iter().map(|active| active.probe.id).collect();

        for share in &self.plan.shares {
            let has_colors = matches!(share.units, Units::Colors { .. });
            let page_move = self.page_moves.iter().find(|moving| {
                share
                    .members
                    .contains(&ShareMember::Process(moving.process))
            });
            let progress = |moving: &PageMove, total: f64| {
                total * (self.now_ns - moving.start_ns) as f64
                    / (moving.end_ns - moving.start_ns).max(1) as f64
            };
            let moved_share = page_move.map_or(1.0, |moving| progress(moving, 1.0));

            if let Some(moving) = page_move.filter(|_| has_colors) {
                let item = PlanItem::Share(share.group, share.cache);
                let done = (progress(moving, moving.pages as f64) as u64).min(moving.pages);
                applied_plan.pending.push(PendingItem {
                    item,
                    done,
                    total: Some(moving.pages),
                });
            }

            applied_plan.shares.push(ActiveShare {
                share: share.clone(),
                pages_in_share: has_colors.then_some(moved_share.min(1.0)),
                fallback_pages: has_colors.then_some(0),
                occupancy_bytes: self.share_occupancy(share),
            });
        }

        applied_plan.bandwidth = self.active_bandwidth();
        applied_plan.cost_ns = self.cost_ns as u64;
        applied_plan
    }

    /// The limits that the classes of their members have.
    fn active_bandwidth(&self) -> Vec<BandwidthLimit> {
        let with_level = |limit: &BandwidthLimit| {
            let is_member = |interval_task: &&IntervalTask| {
                let (task, process) = (interval_task.task, interval_task.process);
                ShareMember::name_task(&limit.members, task, process)
            };
            let class = self.live_tasks().find(is_member)?.class?;
            let level = *self.classes.get(&class)?.bandwidth.get(&limit.cache)?;
            Some(BandwidthLimit {
                level,
                ..limit.clone()
            })
        };
        self.plan.bandwidth.iter().filter_map(with_level).collect()
    }

    fn share_occupancy(&self, share: &cachemate_core::CacheShare) -> Option<u64> {
        let has_monitoring = self
            .spec
            .caches
            .iter()
            .any(|cache| cache.way_partitions.is_some());
        let contended_caches = self.topology.caches.iter().filter(|cache| cache.last_level);
        let index = contended_caches
            .map(|cache| cache.id)
            .position(|id| id == share.cache)
            .filter(|_| has_monitoring)?;
        let members = self.tasks.iter().filter(|interval_task| {
            ShareMember::name_task(&share.members, interval_task.task, interval_task.process)
        });
        Some(
            members
                .map(|interval_task| self.engine.occupied_bytes(interval_task.slot, index))
                .sum::<f64>() as u64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the number of migrated pages equal that of pages that leave the old colors or overfill them, in both
    /// directions?
    #[test]
    fn migrated_pages_equal_those_that_leave_or_overfill_colors() {
        let colors = |range: std::ops::Range<u32>| range.collect::<IndexSet>();
        assert_eq!(migrating_share(&colors(0..16), &colors(0..4)), 0.75);
        assert_eq!(migrating_share(&colors(0..4), &colors(0..16)), 0.75);
        assert_eq!(migrating_share(&colors(0..8), &colors(8..16)), 1.0);
        assert_eq!(migrating_share(&colors(0..8), &colors(4..12)), 0.5);
        assert_eq!(migrating_share(&colors(0..8), &colors(0..8)), 0.0);
    }
}
