//! Application of a plan, and the state in force as read back.

use std::collections::BTreeMap;

use cachemate_core::{
    ActiveShare, ActuationLimits, AppliedPlan, CacheId, Change, ChangeKind, ColorAssignment, CpuId, CpuSet,
    GangSchedule, IndexSet, MachineState, PageMigration, PendingItem, Plan, PlanItem, ProcessId, RefusalReason,
    RefusedItem, ShareMember, TaskId, TaskState, TrackedObject, Units, derive_changes, refused_items, run,
};

use super::{IntervalMachine, IntervalTask, cache_parts};
use crate::run_queues::QueueRotation;

/// A migration of a process's pages to other colors.
#[derive(Clone, Debug, PartialEq)]
pub struct PageMove {
    pub process: ProcessId,
    pub pages: u64,
    pub began_ns: u64,
    pub ends_ns: u64,
}

/// Share of a process's time that copying takes while its pages migrate.
const COPYING_SHARE: f64 = 0.5;

/// Returns the share of a process's pages that migrate, if the pages are evenly spread over `old_colors` before the
/// change and over `allowed` after it.
fn moved_share(old_colors: &IndexSet, allowed: &IndexSet) -> f64 {
    let share_per_color = |colors: &IndexSet| 1.0 / f64::from(colors.count().max(1));
    let vacated_lines = |color: u32| {
        if allowed.contains(color) {
            (share_per_color(old_colors) - share_per_color(allowed)).max(0.0)
        } else {
            share_per_color(old_colors)
        }
    };
    old_colors.iter().map(vacated_lines).sum()
}

fn refused_item(change: &Change, message: &str) -> RefusedItem {
    let item = change.items.first().cloned().unwrap_or(PlanItem::Plan);
    RefusedItem { item, reason: RefusalReason::Failed, message: message.to_string() }
}

impl IntervalMachine {
    /// Applies the plan as far as possible.
    pub(super) fn apply_plan(&mut self, plan: &Plan) -> AppliedPlan {
        let derived = derive_changes(plan, &[], &self.state(), &self.topology, &self.capabilities);
        let outcomes = run(&derived.changes, |change| self.apply_change(change));
        let mut refusals = derived.refused;
        refusals.extend(refused_items(&derived.changes, &outcomes));
        let gangs =
            |change: &Change| matches!(change.kind, ChangeKind::StartGangs { .. } | ChangeKind::StopGangs { .. });
        // While a probe holds CPUs, gangs wait until the probe has ended.
        if derived.changes.iter().any(gangs) && !self.has_probe_with_cpus() {
            self.seat_gangs();
        }
        if !derived.changes.is_empty() {
            self.engine.turns.balance();
        }
        if !plan.penalties.is_empty() {
            let message = "time sharing is averaged, so no task is picked individually".to_string();
            refusals.push(RefusedItem { item: PlanItem::Penalties, reason: RefusalReason::NotSupported, message });
        }
        self.plan = plan.clone();
        self.divide_caches();
        self.apply_probes(plan, &mut refusals);
        let mut applied = self.read_back();
        applied.refused = refusals;
        applied
    }

    fn live_tasks(&self) -> impl Iterator<Item = &IntervalTask> {
        self.tasks.iter().filter(|interval_task| !interval_task.exited)
    }

    /// Returns the state in force, object by object.
    fn state(&self) -> MachineState {
        let all_cpus: CpuSet = (0..self.spec.cpus()).collect();
        let change_task = |interval_task: &IntervalTask| {
            let sched = &self.engine.turns.tasks[interval_task.slot as usize];
            TaskState {
                task: interval_task.task,
                process: interval_task.process,
                name: self.jobs[interval_task.job].job.name.clone(),
                movable: !interval_task.fixed,
                group: None,
                affinity: Some(TrackedObject { current: sched.allowed.clone(), original: all_cpus.clone() }),
                weight: Some(TrackedObject { current: sched.weight, original: 1.0 }),
                class: interval_task.class,
                class_owner: None,
                no_idle_turns: None,
            }
        };
        let change_colors = |interval_task: &IntervalTask| {
            let now = self.colors.get(&interval_task.process).cloned();
            (interval_task.process, TrackedObject { current: now, original: None })
        };
        let colored = self.spec.pages.colors.is_some();
        let groups = self.spec.caches.iter().filter_map(|cache| Some(cache.way_partitions?.groups)).min().unwrap_or(1);
        MachineState {
            tasks: self.live_tasks().map(change_task).collect(),
            classes: self.classes.clone(),
            colors: if colored { self.live_tasks().map(change_colors).collect() } else { BTreeMap::new() },
            gangs: self.gangs.clone(),
            // Class 0 of the hardware is the default class of all tasks.
            limits: ActuationLimits { max_classes: Some(groups.max(1) - 1), ..ActuationLimits::default() },
            ..MachineState::default()
        }
    }

    fn apply_change(&mut self, change: &Change) -> Result<(), RefusedItem> {
        let refuse_exited = || refused_item(change, "the task has ended");
        match &change.kind {
            ChangeKind::Affinity { task, to, .. } => {
                let slot = self.slot_of(*task).ok_or_else(refuse_exited)?;
                self.engine.allow(slot, to.clone());
            }
            ChangeKind::Weight { task, to, .. } => {
                let slot = self.slot_of(*task).ok_or_else(refuse_exited)?;
                self.engine.turns.set_weight(slot, *to);
            }
            ChangeKind::CreateClass { class, masks } | ChangeKind::Schemata { class, to: masks, .. } => {
                self.classes.insert(*class, masks.clone());
            }
            ChangeKind::RemoveClass { class, .. } => {
                self.classes.remove(class);
            }
            ChangeKind::Member { task, to, .. } => {
                let interval_task = self
                    .tasks
                    .iter_mut()
                    .find(|interval_task| interval_task.task == *task)
                    .ok_or_else(refuse_exited)?;
                interval_task.class = *to;
            }
            ChangeKind::Colors { process, from, to: Some(to) } => {
                self.move_pages(*process, from.as_ref(), to);
                self.colors.insert(*process, to.clone());
            }
            ChangeKind::Colors { process, to: None, .. } => {
                self.colors.remove(process);
            }
            ChangeKind::StopGangs { schedule } => self.gangs.retain(|active_schedule| active_schedule != schedule),
            ChangeKind::StartGangs { schedule } => {
                let index = self.gangs.partition_point(|active_schedule| active_schedule.cpus < schedule.cpus);
                self.gangs.insert(index, schedule.clone());
            }
            ChangeKind::Cpuset { .. } => return Err(refused_item(change, "this machine has no groups")),
        }
        Ok(())
    }

    /// Passes the running gangs to the queues.
    pub(super) fn seat_gangs(&mut self) {
        let rotation_of = |schedule: &GangSchedule| {
            let slot_and_cpu =
                |&(task, cpu): &(TaskId, Option<CpuId>)| Some((self.slot_of(task)?, cpu.map(|cpu| cpu.0)));
            let gang_slots =
                |gang: &cachemate_core::Gang| (gang.members.iter().filter_map(slot_and_cpu).collect(), gang.slices);
            let gangs = schedule.gangs.iter().map(gang_slots).collect();
            QueueRotation::new(schedule.cpus.clone(), self.cycles_of(schedule.slice_ns), gangs)
        };
        let rotations = self.gangs.iter().map(rotation_of).collect();
        self.engine.turns.set_rotations(rotations);
    }

    /// Starts the migration of pages outside the new colors, and of pages that overfill the remaining old colors. The
    /// migration takes time of the process, and the cached lines of these pages are lost.
    fn move_pages(
        &mut self,
        process: ProcessId,
        old_assignment: Option<&ColorAssignment>,
        new_assignment: &ColorAssignment,
    ) {
        let Some(colors) = self.spec.pages.colors else { return };
        let old_colors =
            old_assignment.map_or_else(|| (0..colors).collect::<IndexSet>(), |assignment| assignment.allowed.clone());
        let share = moved_share(&old_colors, &new_assignment.allowed);
        let of_process = self.tasks.iter().filter(|interval_task| interval_task.process == process);
        let slots: Vec<u32> = of_process.map(|interval_task| interval_task.slot).collect();
        let pages = (share * self.pages_of(&slots)) as u64;
        if new_assignment.migration == PageMigration::Never || pages == 0 {
            return;
        }
        let cost_ns = pages as f64 * self.spec.pages.migration_cycles as f64 * 1e9 / self.spec.hertz as f64;
        self.cost_ns += cost_ns;
        let ends_ns = self.now_ns + (cost_ns / COPYING_SHARE) as u64 + 1;
        for &slot in &slots {
            self.engine.drop_lines(slot, share);
        }
        self.moving.retain(|page_move| page_move.process != process);
        self.moving.push(PageMove { process, pages, began_ns: self.now_ns, ends_ns });
        self.charge_process(process);
    }

    /// Charges a task for copying its pages and for the interrupts of a log while either is in progress.
    pub(super) fn charge_overhead(&mut self, task: TaskId) {
        let Some(interval_task) =
            self.tasks.iter().find(|interval_task| interval_task.task == task && !interval_task.exited)
        else {
            return;
        };
        let copies = self.moving.iter().any(|moving| moving.process == interval_task.process);
        let copying = if copies { COPYING_SHARE } else { 0.0 };
        self.engine.steal(interval_task.slot, 1.0 - (1.0 - copying) * (1.0 - self.logging_share(task)));
    }

    fn charge_process(&mut self, process: ProcessId) {
        let of_process = self.tasks.iter().filter(|interval_task| interval_task.process == process);
        let tasks: Vec<TaskId> = of_process.map(|interval_task| interval_task.task).collect();
        tasks.into_iter().for_each(|task| self.charge_overhead(task));
    }

    /// Returns the number of resident pages: the footprint, or four caches' worth if the footprint is unknown.
    fn pages_of(&self, slots: &[u32]) -> f64 {
        let Some(&slot) = slots.first() else { return 0.0 };
        let phase = &self.engine.program_of(slot).phases[self.engine.phase_index(slot) as usize];
        let four_caches = 4.0 * f64::from(self.engine.capacity_lines()) * self.engine.line_bytes();
        phase.footprint_bytes.unwrap_or(four_caches) / self.spec.pages.page_bytes as f64
    }

    pub(super) fn moves_due(&self) -> u64 {
        self.moving.iter().map(|moving| moving.ends_ns).min().unwrap_or(u64::MAX)
    }

    pub(super) fn finish_moves(&mut self) {
        let now_ns = self.now_ns;
        let (finished_moves, moving): (Vec<PageMove>, Vec<PageMove>) =
            std::mem::take(&mut self.moving).into_iter().partition(|moving| moving.ends_ns <= now_ns);
        self.moving = moving;
        finished_moves.iter().for_each(|page_move| self.charge_process(page_move.process));
    }

    /// Divides every contended cache as classes, colors and events require.
    pub(super) fn divide_caches(&mut self) {
        let contended: Vec<CacheId> =
            self.topology.caches.iter().filter(|cache| cache.last_level).map(|cache| cache.id).collect();
        let level_ways = self.spec.last_level().map_or(1, |cache| cache.ways);
        for (at, cache) in contended.iter().enumerate() {
            let mut masks: Vec<IndexSet> = Vec::new();
            let mut members: Vec<(u32, usize)> = Vec::new();
            let mut units = level_ways;
            for interval_task in self.live_tasks() {
                let class_ways = || Some((self.classes.get(&interval_task.class?)?.get(cache)?.clone(), level_ways));
                // A frame has the same color in every cache.
                let colors =
                    || Some((self.colors.get(&interval_task.process)?.allowed.clone(), self.spec.pages.colors?));
                let assigned_units = class_ways().or_else(colors);
                if let Some((mask, unit_count)) = assigned_units {
                    units = unit_count;
                    members.push((interval_task.slot, masks.len()));
                    masks.push(mask);
                }
            }
            let live = self.live_tasks().count();
            let is_shared = members.len() < live || self.outside.contains_key(&(at as u32));
            let parts = cache_parts::divide_cache(units, &masks, is_shared);
            let shrunk = self.shrunk.get(&(at as u32)).copied().unwrap_or(1.0);
            let lines_of_share = |share: f64| (f64::from(self.engine.capacity_lines()) * share * shrunk) as f32;
            let domains: Vec<(f32, u8)> =
                parts.parts.iter().map(|&(share, group)| (lines_of_share(share), group)).collect();
            let groups: Vec<f32> = parts.groups.iter().map(|&share| lines_of_share(share)).collect();
            let slot_domains: Vec<(u32, u8)> =
                members.iter().map(|&(slot, mask)| (slot, parts.part_of_mask[mask])).collect();
            self.engine.divide_if_changed(at, &domains, &groups, &slot_domains);
        }
    }

    /// Reads the state in force from the machine.
    pub(super) fn read_back(&self) -> AppliedPlan {
        let all_cpus: CpuSet = (0..self.spec.cpus()).collect();
        let mut applied = AppliedPlan { gangs: self.gangs.clone(), ..AppliedPlan::default() };
        for interval_task in self.live_tasks() {
            let (task, sched) = (interval_task.task, &self.engine.turns.tasks[interval_task.slot as usize]);
            if sched.allowed != all_cpus || self.plan.affinity.contains_key(&task) {
                applied.affinity.insert(task, sched.allowed.clone());
            }
            if sched.weight != 1.0 || self.plan.weights.contains_key(&task) {
                applied.weights.insert(task, sched.weight);
            }
        }
        applied.probes = self.probes.iter().map(|active| active.probe.id).collect();
        for share in &self.plan.shares {
            let colors = matches!(share.units, Units::Colors { .. });
            let moving =
                self.moving.iter().find(|moving| share.members.contains(&ShareMember::Process(moving.process)));
            if let Some(moving) = moving.filter(|_| colors) {
                let span = (moving.ends_ns - moving.began_ns).max(1) as f64;
                let moved_pages = (moving.pages as f64 * (self.now_ns - moving.began_ns) as f64 / span) as u64;
                let item = PlanItem::Share(share.group, share.cache);
                applied.pending.push(PendingItem {
                    item,
                    done: moved_pages.min(moving.pages),
                    total: Some(moving.pages),
                });
            }
            let allowed_share = moving.map_or(1.0, |moving| {
                let span = (moving.ends_ns - moving.began_ns).max(1) as f64;
                (self.now_ns - moving.began_ns) as f64 / span
            });
            applied.shares.push(ActiveShare {
                share: share.clone(),
                pages_in_share: colors.then_some(allowed_share.min(1.0)),
                fallback_pages: colors.then_some(0),
                occupancy_bytes: self.share_occupancy(share),
            });
        }
        applied.cost_ns = self.cost_ns as u64;
        applied
    }

    fn share_occupancy(&self, share: &cachemate_core::CacheShare) -> Option<u64> {
        let monitored = self.spec.caches.iter().any(|cache| cache.way_partitions.is_some());
        let contended = self.topology.caches.iter().filter(|cache| cache.last_level);
        let index = contended.map(|cache| cache.id).position(|id| id == share.cache).filter(|_| monitored)?;
        let members = self.tasks.iter().filter(|interval_task| {
            share.members.contains(&ShareMember::Task(interval_task.task))
                || share.members.contains(&ShareMember::Process(interval_task.process))
        });
        Some(members.map(|interval_task| self.engine.occupied_bytes(interval_task.slot, index)).sum::<f64>() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the number of migrated pages equal that of pages that leave the old colors or overfill them, in both
    /// directions?
    #[test]
    fn pages_move_from_and_to_more_colors_alike() {
        let colors = |range: std::ops::Range<u32>| range.collect::<IndexSet>();
        assert_eq!(moved_share(&colors(0..16), &colors(0..4)), 0.75);
        assert_eq!(moved_share(&colors(0..4), &colors(0..16)), 0.75);
        assert_eq!(moved_share(&colors(0..8), &colors(8..16)), 1.0);
        assert_eq!(moved_share(&colors(0..8), &colors(4..12)), 0.5);
        assert_eq!(moved_share(&colors(0..8), &colors(0..8)), 0.0);
    }
}
