//! Applies a plan, and reads back the state in force.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    ActiveShare, ActuationLimits, AppliedPlan, CacheShare, Change, ChangeKind, ColorAssignment,
    CpuId, CpuSet, FieldError, GangSchedule, IndexSet, MachineState, PendingItem, Plan, PlanItem,
    RefusedItem, ServiceClassId, ShareMember, TaskId, TaskState, TrackedObject, Units, WayMasks,
    derive_changes, refused_items, run,
};

use super::SimMachine;
use crate::os::gangs::{SlotGang, SlotRotation};
use crate::os::queues::Slot;

fn class_number(class: Option<ServiceClassId>) -> u8 {
    class.map_or(0, |class| class.0 as u8 + 1)
}

impl SimMachine {
    /// Applies the plan as far as possible, and returns the state in force with the refused items.
    pub(crate) fn apply_plan(&mut self, plan: &Plan) -> AppliedPlan {
        let derived_changes = derive_changes(
            plan,
            &[],
            &self.machine_state(),
            &self.topology,
            &self.capabilities,
        );
        let outcomes = run(&derived_changes.changes, |change| self.apply_change(change));
        let mut refusals = derived_changes.refused_items;
        refusals.extend(refused_items(&derived_changes.changes, &outcomes));
        self.install_gangs();
        let tasks = &self.tasks;
        self.system
            .dispatcher
            .set_penalties(&plan.penalties, |task| {
                tasks.get(task.0 as usize).map(|sim_task| sim_task.slot)
            });
        self.plan = plan.clone();
        self.apply_probes(plan, &mut refusals);
        let is_live = |task: TaskId| !self.has_exited(task);
        let penalties = plan
            .penalties
            .iter()
            .filter(|penalty| is_live(penalty.tasks.0) && is_live(penalty.tasks.1));
        self.penalties = penalties.copied().collect();
        self.refused.clone_from(&refusals);
        let mut applied_plan = self.read_back();
        applied_plan.refused = refusals;
        applied_plan
    }

    fn live_tasks(&self) -> Vec<(TaskId, Slot)> {
        let live_ids = (0..self.tasks.len() as u32)
            .map(TaskId)
            .filter(|&task| !self.has_exited(task));
        live_ids
            .map(|task| (task, self.tasks[task.0 as usize].slot))
            .collect()
    }

    /// The state in force, object by object.
    fn machine_state(&self) -> MachineState {
        let live_tasks = self.live_tasks();
        let online_cpus = self.topology.online();
        let task_state = |&(id, slot): &(TaskId, Slot)| {
            let (sim_task, task) = (
                &self.tasks[id.0 as usize],
                self.system.dispatcher.task(slot),
            );
            // The hardware's class 0 is the class of all tasks without a share.
            let class = self
                .system
                .thread(slot)
                .and_then(|thread| thread.class.checked_sub(1));
            TaskState {
                task: id,
                process: self.process_id(self.system.task(slot).process),
                name: sim_task.name.clone(),
                movable: !sim_task.is_pinned,
                group: None,
                affinity: Some(TrackedObject {
                    current: task.allowed_cpus.clone(),
                    original: online_cpus.clone(),
                }),
                weight: Some(TrackedObject {
                    current: task.weight,
                    original: 1.0,
                }),
                class: class.map(|class| ServiceClassId(class.into())),
                class_owner: None,
                no_idle_turns: None,
            }
        };
        let processes: BTreeSet<usize> = live_tasks
            .iter()
            .map(|&(_, slot)| self.system.task(slot).process)
            .collect();
        let tracked_colors = |&process: &usize| {
            let coloring = self.system.memory.coloring(process);
            let colors_now = coloring.map(|now| ColorAssignment {
                allowed: now.allowed_colors.clone(),
                migration: now.migration,
            });
            (
                self.process_id(process),
                TrackedObject {
                    current: colors_now,
                    original: None,
                },
            )
        };
        let has_colors = self.spec.pages.colors.is_some();
        MachineState {
            tasks: live_tasks.iter().map(task_state).collect(),
            classes: self.classes.clone(),
            colors: if has_colors {
                processes.iter().map(tracked_colors).collect()
            } else {
                BTreeMap::new()
            },
            gangs: self.gangs.clone(),
            limits: ActuationLimits {
                max_classes: Some(self.spec.class_count().min(256) - 1),
                ..ActuationLimits::default()
            },
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
            ChangeKind::CreateClass { class, limits }
            | ChangeKind::Schemata {
                class, to: limits, ..
            } => {
                self.set_masks(*class, &limits.masks)
                    .map_err(|error| change.failed(error))?;
                self.classes.insert(*class, limits.clone());
            }
            ChangeKind::RemoveClass { class, .. } => {
                self.set_masks(*class, &WayMasks::new())
                    .map_err(|error| change.failed(error))?;
                self.classes.remove(class);
            }
            ChangeKind::Member { task, to, .. } => {
                let slot = self.tasks[task.0 as usize].slot;
                if let Some(thread) = self.system.thread_mut(slot) {
                    thread.class = class_number(*to);
                }
            }
            ChangeKind::Colors { process, to, .. } => {
                let process_index = self.process_index(*process);
                match to {
                    Some(ColorAssignment {
                        allowed,
                        migration: moving,
                    }) => self.system.set_colors(process_index, allowed, *moving),
                    None => self.system.memory.clear_colors(process_index),
                }
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

    /// Passes the gang schedules to the operating system. Schedules that were active before keep their turn.
    fn install_gangs(&mut self) {
        let now = self.system.now();
        let to_rotation = |schedule: &GangSchedule| {
            let to_slot_and_cpu = |&(task, cpu): &(TaskId, Option<CpuId>)| {
                Some((self.slot_of(task)?, cpu.map(|cpu| cpu.0)))
            };
            let gangs = schedule.gangs.iter().map(|gang| SlotGang {
                members: gang.members.iter().filter_map(to_slot_and_cpu).collect(),
                slices: gang.slices,
            });
            SlotRotation::new(
                schedule.cpus.clone(),
                self.clock.to_cycles(schedule.slice_ns),
                gangs.collect(),
                now,
            )
        };
        let rotations = self.gangs.iter().map(to_rotation).collect();
        self.system.set_rotations(rotations);
    }

    fn colored_processes_of(&self, share: &CacheShare) -> Vec<usize> {
        let process_of = |member: &ShareMember| match member {
            ShareMember::Process(process) => Some(self.process_index(*process)),
            ShareMember::Task(_) => None,
        };
        share
            .members
            .iter()
            .filter_map(process_of)
            .filter(|&process| self.has_process(process))
            .collect()
    }
    fn has_process(&self, process: usize) -> bool {
        self.live_tasks()
            .iter()
            .any(|&(_, slot)| self.system.task(slot).process == process)
    }

    /// The masks apply to every cache that can be partitioned; caches that they do not name give
    /// all ways.
    fn set_masks(&mut self, class: ServiceClassId, masks: &WayMasks) -> Result<(), FieldError> {
        for cache in &self.topology.caches {
            let cache_spec = self
                .spec
                .caches
                .iter()
                .find(|candidate_spec| candidate_spec.level == cache.level);
            let Some(cache_spec) =
                cache_spec.filter(|candidate_spec| candidate_spec.way_partitions.is_some())
            else {
                continue;
            };
            let all_ways: IndexSet = (0..cache_spec.ways).collect();
            let mask = masks.get(&cache.id).unwrap_or(&all_ways);
            self.system
                .hw
                .set_way_mask(cache.id, class_number(Some(class)), mask)?;
        }
        Ok(())
    }

    /// The state that the machine has now, and not the one that was requested.
    pub(crate) fn read_back(&mut self) -> AppliedPlan {
        let all_cpus: CpuSet = (0..self.spec.cpus()).collect();
        let mut applied_plan = AppliedPlan {
            penalties: self.penalties.clone(),
            ..AppliedPlan::default()
        };
        for (task, slot) in self.live_tasks() {
            let task_state = self.system.dispatcher.task(slot);
            applied_plan.record_task(
                task,
                &task_state.allowed_cpus,
                task_state.weight,
                &all_cpus,
                &self.plan,
            );
        }
        applied_plan.gangs = self.gangs.clone();
        applied_plan.probes = self.active_probes();
        for share in self.plan.shares.clone() {
            self.read_back_share(share, &mut applied_plan);
        }
        applied_plan.cost_ns = self.clock.to_nominal_ns(self.system.page_copy_cycles);
        applied_plan
    }

    fn read_back_share(&self, share: CacheShare, applied_plan: &mut AppliedPlan) {
        let processes = self.colored_processes_of(&share);
        let is_member = |slot: Slot| {
            let task = self.task_of_slot.get(&slot);
            task.is_some_and(|task| share.members.contains(&ShareMember::Task(*task)))
                || processes.contains(&self.system.task(slot).process)
        };

        let has_monitoring = self
            .spec
            .caches
            .iter()
            .any(|cache| cache.way_partitions.is_some());
        let occupancy_bytes = has_monitoring.then(|| {
            let lines = self.system.hw.occupancy_bytes(share.cache).into_iter();
            lines
                .filter(|(task, _)| is_member(task.0 as usize))
                .map(|(_, bytes)| bytes)
                .sum()
        });

        let active_share = match &share.units {
            Units::Ways { .. } => ActiveShare {
                share,
                pages_in_share: None,
                fallback_pages: None,
                occupancy_bytes,
            },
            Units::Colors { .. } => {
                let (
                    mut resident_pages,
                    mut pages_in_share,
                    mut fallback_pages,
                    mut assigned_pages,
                    mut total_pages,
                ) = (0, 0, 0, 0, 0);
                for &process in &processes {
                    let pages = self.system.memory.count_allowed_pages(process);
                    (resident_pages, pages_in_share) =
                        (resident_pages + pages.0, pages_in_share + pages.1);
                    if let Some(coloring) = self.system.memory.coloring(process) {
                        fallback_pages += coloring.fallback_pages;
                        total_pages += coloring.total_pages;
                        assigned_pages += coloring.total_pages - coloring.pending_pages();
                    }
                }

                if assigned_pages < total_pages {
                    let item = PlanItem::Share(share.group, share.cache);
                    applied_plan.pending.push(PendingItem {
                        item,
                        done: assigned_pages,
                        total: Some(total_pages),
                    });
                }

                let inside_fraction =
                    (resident_pages > 0).then(|| pages_in_share as f64 / resident_pages as f64);
                ActiveShare {
                    share,
                    pages_in_share: inside_fraction,
                    fallback_pages: Some(fallback_pages),
                    occupancy_bytes,
                }
            }
        };

        applied_plan.shares.push(active_share);
    }
}
