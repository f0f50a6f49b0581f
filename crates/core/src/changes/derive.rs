//! Derives the list of changes from the desired state.
//!
//! A plan says how the machine is to be, and the kernel accepts only steps, some of which are
//! refused in the wrong order: a thread cannot move to a CPU that its cpuset does not contain, and
//! a cpuset cannot lose CPUs that its children use (version 1; in version 2 they would silently
//! lose them too). So the steps have one order: Gangs stop. Groups widen from the top down, then
//! narrow from the bottom up. Tasks move and get their weights. Classes of service are created, get
//! their ways, limits and members, and unused ones are removed. Processes get their colors. Gangs
//! start.
//!
//! For example, a group and its child are confined to CPUs 0-1, and both are to have 2-3. The
//! parent is widened to 0-3 and then the child; the child is narrowed to 2-3 and then the parent.
//! At no moment does the child have a CPU that its parent lacks, and only then do tasks move. If a
//! change fails, only what depends on it is skipped.
//!
//! In this order no task moves to CPUs that its group does not allow yet, and no task waits for
//! gangs that are being stopped.

use std::collections::{BTreeMap, BTreeSet};

use super::classes::{ServiceClass, assign_class_ids, build_classes};
use super::cpuset_steps::{CpusetStep, cpuset_steps};
use super::state::{TaskState, is_below};
use super::{
    Change, ChangeId, ChangeKind, ClassLimits, ColorAssignment, CpusetGroup, MachineState,
    ServiceClassId,
};
use crate::{
    Ability, CacheShare, Capabilities, CpuSet, GangSchedule, PageMigration, Plan, PlanItem,
    ProcessId, RefusalReason, RefusedItem, ShareMember, Support, TaskId, Topology, Units,
};

/// The changes to make, and the items of the plan that are impossible.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ChangeList {
    /// Changes in the order in which they are made.
    pub changes: Vec<Change>,
    /// Items of the plan that the machine cannot apply, or only in another form.
    pub refused_items: Vec<RefusedItem>,
    /// The classes of service that result from the changes.
    pub classes: BTreeMap<ServiceClassId, ServiceClass>,
}

/// The list is empty if the state is already as desired. Objects that neither the plan nor
/// `confined_groups` mentions get back their original values.
pub fn derive_changes(
    plan: &Plan,
    confined_groups: &[CpusetGroup],
    state: &MachineState,
    topology: &Topology,
    capabilities: &Capabilities,
) -> ChangeList {
    let online = topology.online();
    let mut builder = ChangeListBuilder {
        plan,
        confined_groups,
        state,
        capabilities,
        online,
        change_list: ChangeList::default(),
    };
    let schedules = builder.select_runnable_schedules();
    let stop_changes = builder.stop_gangs(&schedules);

    let widening_changes = builder.confine_groups();
    let move_changes = builder.move_tasks(&schedules, &widening_changes);
    builder.set_weights();
    builder.limit_classes();
    builder.color_pages();
    builder.start_gangs(&schedules, &stop_changes, &move_changes);
    builder.change_list
}

struct ChangeListBuilder<'a> {
    plan: &'a Plan,
    confined_groups: &'a [CpusetGroup],
    state: &'a MachineState,
    capabilities: &'a Capabilities,
    online: CpuSet,
    change_list: ChangeList,
}

impl ChangeListBuilder<'_> {
    fn push(
        &mut self,
        items: Vec<PlanItem>,
        dependencies: impl IntoIterator<Item = ChangeId>,
        kind: ChangeKind,
    ) -> ChangeId {
        let id = ChangeId(self.change_list.changes.len() as u32);
        let dependencies: BTreeSet<ChangeId> = dependencies.into_iter().collect();
        self.change_list.changes.push(Change {
            id,
            items,
            depends_on: dependencies.into_iter().collect(),
            kind,
        });
        id
    }

    fn refuse(&mut self, item: PlanItem, reason: RefusalReason, message: impl Into<String>) {
        self.change_list.refused_items.push(RefusedItem {
            item,
            reason,
            message: message.into(),
        });
    }

    /// `None` also if the machine lacks the ability without stating why.
    fn unsupported_reason(&self, ability: Ability) -> Option<String> {
        match self.capabilities.abilities.get(&ability) {
            Some(Support::No { reason: why, .. }) => Some(why.clone()),
            _ => None,
        }
    }

    /// Each with its index in the plan, and without exited members.
    fn select_runnable_schedules(&mut self) -> Vec<(usize, GangSchedule)> {
        let mut schedules = Vec::new();
        let unsupported_reason = self.unsupported_reason(Ability::Gangs);

        for (index, schedule) in self.plan.gangs.iter().enumerate() {
            if let Some(reason) = &unsupported_reason {
                self.refuse(PlanItem::Gangs(index), RefusalReason::NoPermission, reason);
                continue;
            }

            let mut runnable_schedule = schedule.clone();
            let mut refused_members: BTreeMap<TaskId, (RefusalReason, String)> = BTreeMap::new();
            for gang in &mut runnable_schedule.gangs {
                gang.members.retain(|(task, _)| {
                    let refusal = match self.state.task(*task) {
                        None => (
                            RefusalReason::NotFound,
                            "a member has exited; the other members keep their turn".to_string(),
                        ),
                        Some(TaskState {
                            no_idle_turns: Some(reason),
                            ..
                        }) => (RefusalReason::NotSupported, reason.clone()),
                        Some(_) => return true,
                    };
                    refused_members.insert(*task, refusal);
                    false
                });
            }
            for (because, message) in refused_members.into_values() {
                self.refuse(PlanItem::Gangs(index), because, message);
            }

            runnable_schedule
                .gangs
                .retain(|gang| !gang.members.is_empty());

            if !runnable_schedule.gangs.is_empty() {
                schedules.push((index, runnable_schedule));
            }
        }

        schedules
    }

    fn stop_gangs(
        &mut self,
        planned_schedules: &[(usize, GangSchedule)],
    ) -> Vec<(ChangeId, GangSchedule)> {
        let mut stop_changes = Vec::new();

        for running_schedule in &self.state.gangs {
            if planned_schedules
                .iter()
                .any(|(_, schedule)| schedule == running_schedule)
            {
                continue;
            }
            // If the plan has a schedule on these CPUs, that schedule causes the stop; otherwise, the whole plan does.
            let replacements = planned_schedules
                .iter()
                .filter(|(_, schedule)| schedule.cpus.intersects(&running_schedule.cpus));
            let items = items_or_whole_plan(
                replacements
                    .map(|(index, _)| PlanItem::Gangs(*index))
                    .collect(),
            );
            let id = self.push(
                items,
                [],
                ChangeKind::StopGangs {
                    schedule: running_schedule.clone(),
                },
            );
            stop_changes.push((id, running_schedule.clone()));
        }
        stop_changes
    }

    /// Confines groups to their CPUs, and returns the changes that widen, by group.
    fn confine_groups(&mut self) -> BTreeMap<String, ChangeId> {
        let steps = cpuset_steps(&self.state.groups, self.confined_groups);
        let whole_plan = || vec![PlanItem::Plan];
        let mut widening_changes: BTreeMap<String, ChangeId> = BTreeMap::new();
        for CpusetStep {
            group,
            current,
            intermediate,
            ..
        } in steps.iter().filter(|step| step.widens())
        {
            let widened_ancestors = widening_changes
                .iter()
                .filter(|(widened_group, _)| is_below(group, widened_group));
            let dependencies: Vec<ChangeId> = widened_ancestors.map(|(_, id)| *id).collect();
            let kind = ChangeKind::Cpuset {
                group: group.clone(),
                from: current.clone(),
                to: intermediate.clone(),
            };
            let id = self.push(whole_plan(), dependencies, kind);
            widening_changes.insert(group.clone(), id);
        }

        let mut narrowing_changes: Vec<(String, ChangeId)> = Vec::new();
        for step in steps.iter().rev().filter(|step| step.narrows()) {
            let group = &step.group;
            let narrowed_descendants = narrowing_changes
                .iter()
                .filter(|(narrowed_group, _)| is_below(narrowed_group, group))
                .map(|(_, id)| *id);

            // A group that will inherit its parent's CPUs was narrower before, and may contain CPUs that the parent
            // loses.
            let inheriting_steps = steps.iter().filter(|inheriting_step| {
                inheriting_step.target.is_empty() && is_below(&inheriting_step.group, group)
            });
            let inheriting_widenings = inheriting_steps
                .filter_map(|inheriting_step| widening_changes.get(&inheriting_step.group))
                .copied();

            // A group that inherited its parent's CPUs may be given CPUs that the parent must receive first.
            let ancestor_widenings = widening_changes
                .iter()
                .filter(|(widened_group, _)| {
                    step.current.is_empty() && is_below(group, widened_group)
                })
                .map(|(_, id)| *id);
            let own_widening = widening_changes.get(group).copied();
            let dependencies: Vec<ChangeId> = narrowed_descendants
                .chain(inheriting_widenings)
                .chain(ancestor_widenings)
                .chain(own_widening)
                .collect();

            let (from, to) = (step.intermediate.clone(), step.target.clone());
            let kind = ChangeKind::Cpuset {
                group: group.clone(),
                from,
                to,
            };
            let id = self.push(whole_plan(), dependencies, kind);
            narrowing_changes.push((group.clone(), id));
        }

        widening_changes
    }

    fn move_tasks(
        &mut self,
        schedules: &[(usize, GangSchedule)],
        widening_changes: &BTreeMap<String, ChangeId>,
    ) -> BTreeMap<TaskId, ChangeId> {
        for &task in self
            .plan
            .affinity
            .keys()
            .filter(|&&task| self.state.task(task).is_none())
        {
            self.refuse(
                PlanItem::Affinity(task),
                RefusalReason::NotFound,
                "the task has ended",
            );
        }
        let cpus_by_gang_member = match self.state.limits.seats_are_affinities {
            true => cpus_by_gang_member(schedules),
            false => BTreeMap::new(),
        };
        let mut move_changes = BTreeMap::new();
        for task in self.state.tasks.iter().filter(|task| task.movable) {
            let Some(affinity) = &task.affinity else {
                continue;
            };
            let target = cpus_by_gang_member
                .get(&task.task)
                .or_else(|| self.plan.affinity.get(&task.task));
            let mut new_cpus = target.map_or_else(
                || affinity.original.clone(),
                |cpus| cpus.intersection(&self.online),
            );
            if new_cpus.is_empty() {
                self.refuse(
                    PlanItem::Affinity(task.task),
                    RefusalReason::NotSupported,
                    "none of the requested CPUs is online",
                );
                continue;
            }
            // If none of the CPUs belongs to the task's group, the request stays unchanged, and the machine decides.
            if let Some(cpus) = self
                .group_cpus(task)
                .filter(|cpus| cpus.intersects(&new_cpus))
            {
                new_cpus = new_cpus.intersection(cpus);
            }
            if new_cpus != affinity.current {
                let dependency = task
                    .group
                    .as_ref()
                    .and_then(|group| widening_changes.get(group))
                    .copied();
                let (current_cpus, name) = (affinity.current.clone(), task.name.clone());
                let kind = ChangeKind::Affinity {
                    task: task.task,
                    name,
                    from: current_cpus,
                    to: new_cpus,
                };
                move_changes.insert(
                    task.task,
                    self.push(vec![PlanItem::Affinity(task.task)], dependency, kind),
                );
            }
        }
        move_changes
    }

    fn group_cpus(&self, task: &TaskState) -> Option<&CpuSet> {
        let group = task.group.as_ref()?;
        self.confined_groups
            .iter()
            .find(|confined| confined.cgroup == *group)
            .map(|confined| &confined.cpus)
    }

    fn set_weights(&mut self) {
        let unsupported_reason = self.unsupported_reason(Ability::Weights);
        for &task in self.plan.weights.keys() {
            if let Some(reason) = &unsupported_reason {
                self.refuse(PlanItem::Weight(task), RefusalReason::NoPermission, reason);
            } else if self.state.task(task).is_none() {
                self.refuse(
                    PlanItem::Weight(task),
                    RefusalReason::NotFound,
                    "the task has ended",
                );
            }
        }
        for task in self.state.tasks.iter().filter(|task| task.movable) {
            let Some(weight) = &task.weight else { continue };
            let requested_weight = self
                .plan
                .weights
                .get(&task.task)
                .filter(|_| unsupported_reason.is_none());
            let target = *requested_weight.unwrap_or(&weight.original);
            if target != weight.current {
                let (name, current_weight) = (task.name.clone(), weight.current);
                let kind = ChangeKind::Weight {
                    task: task.task,
                    name,
                    from: current_weight,
                    to: target,
                };
                self.push(vec![PlanItem::Weight(task.task)], [], kind);
            }
        }
    }

    fn limit_classes(&mut self) {
        let (classes, refused_items) = build_classes(self.plan, self.state, self.capabilities);
        self.change_list.refused_items.extend(refused_items);
        let ids = assign_class_ids(&classes, self.state);
        let classes_by_id: BTreeMap<ServiceClassId, ServiceClass> =
            ids.into_iter().zip(classes).collect();
        let mut create_changes: BTreeMap<ServiceClassId, ChangeId> = BTreeMap::new();
        for (&class, service_class) in classes_by_id
            .iter()
            .filter(|(class, _)| !self.state.classes.contains_key(class))
        {
            let kind = ChangeKind::CreateClass {
                class,
                limits: ClassLimits::default(),
            };
            create_changes.insert(class, self.push(service_class.items(), [], kind));
        }

        let mut ready_changes = create_changes.clone();
        for (&class, content) in &classes_by_id {
            let current_limits = self.state.classes.get(&class).cloned().unwrap_or_default();
            if current_limits != content.limits {
                let kind = ChangeKind::Schemata {
                    class,
                    from: current_limits,
                    to: content.limits.clone(),
                };
                ready_changes.insert(
                    class,
                    self.push(content.items(), create_changes.get(&class).copied(), kind),
                );
            }
        }
        let class_by_task: BTreeMap<TaskId, ServiceClassId> = classes_by_id
            .iter()
            .flat_map(|(class, content)| content.members.iter().map(|task| (*task, *class)))
            .collect();
        let mut leave_changes: BTreeMap<ServiceClassId, Vec<ChangeId>> = BTreeMap::new();
        for task in self.state.tasks.iter().filter(|task| task.movable) {
            let target = class_by_task.get(&task.task).copied();
            if target == task.class {
                continue;
            }
            let items = target
                .and_then(|class| classes_by_id.get(&class))
                .map_or(vec![PlanItem::Plan], ServiceClass::items);
            let dependency = target.and_then(|class| ready_changes.get(&class)).copied();
            let (name, current_class) = (task.name.clone(), task.class);
            let id = self.push(
                items,
                dependency,
                ChangeKind::Member {
                    task: task.task,
                    name,
                    from: current_class,
                    to: target,
                },
            );
            if let Some(class) = task.class {
                leave_changes.entry(class).or_default().push(id);
            }
        }
        for (&class, limits) in self
            .state
            .classes
            .iter()
            .filter(|(class, _)| !classes_by_id.contains_key(class))
        {
            let dependencies = leave_changes.remove(&class).unwrap_or_default();
            self.push(
                vec![PlanItem::Plan],
                dependencies,
                ChangeKind::RemoveClass {
                    class,
                    limits: limits.clone(),
                },
            );
        }
        self.change_list.classes = classes_by_id;
    }

    fn color_pages(&mut self) {
        let mut requested_colors: BTreeMap<ProcessId, (ColorAssignment, Vec<PlanItem>)> =
            BTreeMap::new();
        for share in &self.plan.shares {
            let Some(colors) = self.resolve_colors(share) else {
                continue;
            };
            let item = PlanItem::Share(share.group, share.cache);
            for member in &share.members {
                let ShareMember::Process(process) = *member else {
                    continue;
                };
                if self.state.tasks.iter().all(|task| task.process != process) {
                    continue;
                }
                if !self.state.colors.contains_key(&process) {
                    let message = format!(
                        "process {} was not started by cachemate page-color run",
                        process.0
                    );
                    self.refuse(item.clone(), RefusalReason::NotSupported, message);
                    continue;
                }
                match requested_colors.get_mut(&process) {
                    None => {
                        requested_colors.insert(process, (colors.clone(), vec![item.clone()]));
                    }
                    // The same colors in another cache of the level.
                    Some((requested, items)) if requested.allowed == colors.allowed => {
                        items.push(item.clone())
                    }
                    Some(_) => {
                        let message = "the process has other colors in another share, but its colors apply to every cache";
                        self.refuse(item.clone(), RefusalReason::Busy, message);
                    }
                }
            }
        }
        for (&process, process_colors) in &self.state.colors {
            let (target, items) = match requested_colors.remove(&process) {
                Some((colors, items)) => (Some(colors), items),
                None => (process_colors.original.clone(), vec![PlanItem::Plan]),
            };
            if target != process_colors.current {
                self.push(
                    items,
                    [],
                    ChangeKind::Colors {
                        process,
                        from: process_colors.current.clone(),
                        to: target,
                    },
                );
            }
        }
    }

    /// Colors as this machine can provide them; `None` for shares in ways and for impossible ones.
    fn resolve_colors(&mut self, share: &CacheShare) -> Option<ColorAssignment> {
        let Units::Colors {
            allowed,
            migration: moving,
        } = &share.units
        else {
            return None;
        };

        let limits = &self.state.limits;
        let message = if allowed.is_empty()
            || allowed.iter().last() >= self.capabilities.colors_of(share.cache)
        {
            format!("colors {allowed}: none, or more than this machine has")
        } else if *moving == PageMigration::Lazy && limits.no_lazy_moving {
            "pages cannot be migrated on their next touch; migrating all pages is supported"
                .to_string()
        } else {
            let must_move_all = *moving == PageMigration::HotFirst && limits.no_hot_first;
            return Some(ColorAssignment {
                allowed: allowed.clone(),
                migration: if must_move_all {
                    PageMigration::All
                } else {
                    *moving
                },
            });
        };
        self.refuse(
            PlanItem::Share(share.group, share.cache),
            RefusalReason::NotSupported,
            message,
        );
        None
    }

    fn start_gangs(
        &mut self,
        planned_schedules: &[(usize, GangSchedule)],
        stops: &[(ChangeId, GangSchedule)],
        move_changes: &BTreeMap<TaskId, ChangeId>,
    ) {
        for (index, schedule) in planned_schedules
            .iter()
            .filter(|(_, schedule)| !self.state.gangs.contains(schedule))
        {
            let members: BTreeSet<TaskId> = gang_members(schedule).collect();
            let is_conflicting = |old_schedule: &GangSchedule| {
                old_schedule.cpus.intersects(&schedule.cpus)
                    || self::gang_members(old_schedule).any(|task| members.contains(&task))
            };
            let conflicting_stops = stops
                .iter()
                .filter(|(_, old_schedule)| is_conflicting(old_schedule))
                .map(|(id, _)| *id);
            let moves_of_members = members
                .iter()
                .filter_map(|task| move_changes.get(task))
                .copied();
            let dependencies: Vec<ChangeId> = conflicting_stops.chain(moves_of_members).collect();
            self.push(
                vec![PlanItem::Gangs(*index)],
                dependencies,
                ChangeKind::StartGangs {
                    schedule: schedule.clone(),
                },
            );
        }
    }
}

fn items_or_whole_plan(items: Vec<PlanItem>) -> Vec<PlanItem> {
    if items.is_empty() {
        vec![PlanItem::Plan]
    } else {
        items
    }
}

fn gang_members(schedule: &GangSchedule) -> impl Iterator<Item = TaskId> + '_ {
    schedule
        .gangs
        .iter()
        .flat_map(|gang| gang.members.iter().map(|(task, _)| *task))
}

/// The CPU that the plan names, or else one of the schedule's CPUs in order of membership. A member
/// of several gangs with different CPUs may use the CPUs of all of them.
fn cpus_by_gang_member(schedules: &[(usize, GangSchedule)]) -> BTreeMap<TaskId, CpuSet> {
    let mut cpus_by_member: BTreeMap<TaskId, CpuSet> = BTreeMap::new();
    for (_, schedule) in schedules {
        for gang in &schedule.gangs {
            let named_cpus: CpuSet = gang
                .members
                .iter()
                .filter_map(|(_, cpu)| cpu.map(|cpu| cpu.0))
                .collect();
            let mut free_cpus = schedule
                .cpus
                .iter()
                .filter(|&cpu| !named_cpus.contains(cpu))
                .collect::<Vec<_>>()
                .into_iter();
            for (task, cpu) in &gang.members {
                let cpu = cpu.map(|cpu| cpu.0).or_else(|| free_cpus.next());
                cpus_by_member.entry(*task).or_default().extend(cpu);
            }
        }
    }

    cpus_by_member
}
