//! Applies a plan, and reads back the state in force.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    ActiveShare, ActuationLimits, AppliedPlan, CacheShare, Change, ChangeKind, ColorAssignment, CpuId, CpuSet,
    GangSchedule, IndexSet, MachineState, PendingItem, Plan, PlanItem, RefusalReason, RefusedItem, ServiceClassId,
    ShareMember, TaskId, TaskState, TrackedObject, Units, WayMasks, derive_changes, refused_items, run,
};

use super::SimMachine;
use crate::hw::RequestError;
use crate::os::gangs::{SlotGang, SlotRotation};
use crate::os::queues::Slot;

fn hardware_class(class: Option<ServiceClassId>) -> u8 {
    class.map_or(0, |class| class.0 as u8 + 1)
}

fn refused_item(change: &Change, error: &impl std::fmt::Display) -> RefusedItem {
    let item = change.items.first().cloned().unwrap_or(PlanItem::Plan);
    RefusedItem { item, reason: RefusalReason::Failed, message: error.to_string() }
}

impl SimMachine {
    /// Applies the plan as far as possible, and returns the state in force with the refused items.
    pub(crate) fn apply_plan(&mut self, plan: &Plan) -> AppliedPlan {
        let derived = derive_changes(plan, &[], &self.state(), &self.topology, &self.capabilities);
        let outcomes = run(&derived.changes, |change| self.apply_change(change));
        let mut refusals = derived.refused;
        refusals.extend(refused_items(&derived.changes, &outcomes));
        self.seat_gangs();
        let tasks = &self.tasks;
        self.system
            .dispatcher
            .set_penalties(&plan.penalties, |task| tasks.get(task.0 as usize).map(|sim_task| sim_task.slot));
        self.plan = plan.clone();
        self.apply_probes(plan, &mut refusals);
        let is_live = |task: TaskId| !self.is_gone(task);
        let penalties = plan.penalties.iter().filter(|penalty| is_live(penalty.tasks.0) && is_live(penalty.tasks.1));
        self.penalties = penalties.copied().collect();
        let mut applied = self.read_back();
        applied.refused.extend(refusals);
        applied
    }

    fn live_tasks(&self) -> Vec<(TaskId, Slot)> {
        let live = (0..self.tasks.len() as u32).map(TaskId).filter(|&task| !self.is_gone(task));
        live.map(|task| (task, self.tasks[task.0 as usize].slot)).collect()
    }

    /// Returns the state in force, object by object.
    fn state(&self) -> MachineState {
        let live = self.live_tasks();
        let online_cpus = self.topology.online();
        let task_state = |&(id, slot): &(TaskId, Slot)| {
            let (sim_task, task) = (&self.tasks[id.0 as usize], self.system.dispatcher.task(slot));
            // The hardware's class 0 is the class of all tasks without a share.
            let class = self.system.thread(slot).and_then(|thread| thread.class.checked_sub(1));
            TaskState {
                task: id,
                process: self.process_id(self.system.task(slot).process),
                name: sim_task.name.clone(),
                movable: !sim_task.fixed,
                group: None,
                affinity: Some(TrackedObject { current: task.allowed.clone(), original: online_cpus.clone() }),
                weight: Some(TrackedObject { current: task.weight, original: 1.0 }),
                class: class.map(|class| ServiceClassId(class.into())),
                class_owner: None,
                no_idle_turns: None,
            }
        };
        let processes: BTreeSet<usize> = live.iter().map(|&(_, slot)| self.system.task(slot).process).collect();
        let colors = |&process: &usize| {
            let coloring = self.system.memory.coloring(process);
            let now = coloring.map(|now| ColorAssignment { allowed: now.allowed.clone(), migration: now.migration });
            (self.process_id(process), TrackedObject { current: now, original: None })
        };
        let colored = self.spec.pages.colors.is_some();
        let groups = self.spec.caches.iter().filter_map(|cache| Some(cache.way_partitions?.groups)).min().unwrap_or(1);
        MachineState {
            tasks: live.iter().map(task_state).collect(),
            classes: self.classes.clone(),
            colors: if colored { processes.iter().map(colors).collect() } else { BTreeMap::new() },
            gangs: self.gangs.clone(),
            limits: ActuationLimits { max_classes: Some(groups.clamp(1, 256) - 1), ..ActuationLimits::default() },
            ..MachineState::default()
        }
    }

    fn apply_change(&mut self, change: &Change) -> Result<(), RefusedItem> {
        let now = self.system.now();
        match &change.kind {
            ChangeKind::Affinity { task, to, .. } => {
                let slot = self.tasks[task.0 as usize].slot;
                self.system.dispatcher.set_allowed(now, slot, to.clone());
            }
            ChangeKind::Weight { task, to, .. } => {
                let slot = self.tasks[task.0 as usize].slot;
                self.system.dispatcher.set_weight(now, slot, *to);
            }
            ChangeKind::CreateClass { class, masks } | ChangeKind::Schemata { class, to: masks, .. } => {
                self.set_masks(*class, masks).map_err(|error| refused_item(change, &error))?;
                self.classes.insert(*class, masks.clone());
            }
            ChangeKind::RemoveClass { class, .. } => {
                self.set_masks(*class, &WayMasks::new()).map_err(|error| refused_item(change, &error))?;
                self.classes.remove(class);
            }
            ChangeKind::Member { task, to, .. } => {
                let slot = self.tasks[task.0 as usize].slot;
                if let Some(thread) = self.system.thread_mut(slot) {
                    thread.class = hardware_class(*to);
                }
            }
            ChangeKind::Colors { process, to, .. } => {
                let process = self.process_index(*process);
                match to {
                    Some(ColorAssignment { allowed, migration: moving }) => {
                        self.system.set_colors(process, allowed, *moving)
                    }
                    None => self.system.memory.clear_colors(process),
                }
            }
            ChangeKind::StopGangs { schedule } => self.gangs.retain(|active_schedule| active_schedule != schedule),
            ChangeKind::StartGangs { schedule } => {
                let index = self.gangs.partition_point(|active_schedule| active_schedule.cpus < schedule.cpus);
                self.gangs.insert(index, schedule.clone());
            }
            ChangeKind::Cpuset { .. } => return Err(refused_item(change, &"this machine has no groups")),
        }
        Ok(())
    }

    /// Passes the gang schedules to the operating system. Schedules that ran before keep their turn.
    fn seat_gangs(&mut self) {
        let now = self.system.now();
        let rotation = |schedule: &GangSchedule| {
            let member = |&(task, cpu): &(TaskId, Option<CpuId>)| Some((self.slot_of(task)?, cpu.map(|cpu| cpu.0)));
            let gangs = schedule.gangs.iter().map(|gang| SlotGang {
                members: gang.members.iter().filter_map(member).collect(),
                slices: gang.slices,
            });
            SlotRotation::new(schedule.cpus.clone(), self.clock.to_cycles(schedule.slice_ns), gangs.collect(), now)
        };
        let rotations = self.gangs.iter().map(rotation).collect();
        self.system.set_rotations(rotations);
    }

    fn processes_of(&self, share: &CacheShare) -> Vec<usize> {
        let process_of = |member: &ShareMember| match member {
            ShareMember::Process(process) => Some(self.process_index(*process)),
            ShareMember::Task(_) => None,
        };
        share.members.iter().filter_map(process_of).filter(|&process| self.has_process(process)).collect()
    }
    fn has_process(&self, process: usize) -> bool {
        self.live_tasks().iter().any(|&(_, slot)| self.system.task(slot).process == process)
    }

    /// Gives a class its ways in every cache that can be partitioned; caches that the masks do not name give all ways.
    fn set_masks(&mut self, class: ServiceClassId, masks: &WayMasks) -> Result<(), RequestError> {
        for cache in &self.topology.caches {
            let described = self.spec.caches.iter().find(|described| described.level == cache.level);
            let Some(described) = described.filter(|described| described.way_partitions.is_some()) else { continue };
            let all_ways: IndexSet = (0..described.ways).collect();
            let mask = masks.get(&cache.id).unwrap_or(&all_ways);
            self.system.hw.set_way_mask(cache.id, hardware_class(Some(class)), mask)?;
        }
        Ok(())
    }

    /// Returns the state that the machine has now.
    pub(crate) fn read_back(&mut self) -> AppliedPlan {
        let all_cpus: CpuSet = (0..self.spec.cpus()).collect();
        let mut applied = AppliedPlan { penalties: self.penalties.clone(), ..AppliedPlan::default() };
        for (task, slot) in self.live_tasks() {
            let state = self.system.dispatcher.task(slot);
            if state.allowed != all_cpus || self.plan.affinity.contains_key(&task) {
                applied.affinity.insert(task, state.allowed.clone());
            }
            if state.weight != 1.0 || self.plan.weights.contains_key(&task) {
                applied.weights.insert(task, state.weight);
            }
        }
        applied.gangs = self.gangs.clone();
        applied.probes = self.active_probes();
        for share in self.plan.shares.clone() {
            self.read_back_share(share, &mut applied);
        }
        applied.cost_ns = self.clock.nominal_ns(self.system.page_copy_cycles);
        applied
    }

    fn read_back_share(&self, share: CacheShare, applied: &mut AppliedPlan) {
        let processes = self.processes_of(&share);
        let members_of = |slot: Slot| {
            let task = self.task_of_slot.get(&slot);
            task.is_some_and(|task| share.members.contains(&ShareMember::Task(*task)))
                || processes.contains(&self.system.task(slot).process)
        };
        let counted_if = |ways: bool| ways && self.spec.caches.iter().any(|cache| cache.way_partitions.is_some());
        let occupancy_bytes = counted_if(true).then(|| {
            let lines = self.system.hw.occupancy_bytes(share.cache).into_iter();
            lines.filter(|(task, _)| members_of(task.0 as usize)).map(|(_, bytes)| bytes).sum()
        });
        let active_share = match &share.units {
            Units::Ways { .. } => ActiveShare { share, pages_in_share: None, fallback_pages: None, occupancy_bytes },
            Units::Colors { .. } => {
                let (mut resident, mut inside, mut fallback, mut done, mut total) = (0, 0, 0, 0, 0);
                for &process in &processes {
                    let pages = self.system.memory.count_allowed_pages(process);
                    (resident, inside) = (resident + pages.0, inside + pages.1);
                    if let Some(coloring) = self.system.memory.coloring(process) {
                        fallback += coloring.fallback_pages;
                        total += coloring.total_pages;
                        done += coloring.total_pages - coloring.pending_pages();
                    }
                }
                if done < total {
                    let item = PlanItem::Share(share.group, share.cache);
                    applied.pending.push(PendingItem { item, done, total: Some(total) });
                }
                let pages_inside = (resident > 0).then(|| inside as f64 / resident as f64);
                ActiveShare { share, pages_in_share: pages_inside, fallback_pages: Some(fallback), occupancy_bytes }
            }
        };
        applied.shares.push(active_share);
    }
}
