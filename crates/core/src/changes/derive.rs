//! Derives the list of changes from the desired state.
//!
//! Order: gangs stop; groups widen from the top down, then narrow from the bottom up; tasks move and get their weights;
//! classes of service are created, get their ways and their members, and unused ones are removed; processes get their
//! colors; gangs start. In this order no task moves to CPUs that its group does not allow yet, and no task waits for
//! gangs that are being stopped.

use std::collections::{BTreeMap, BTreeSet};

use super::classes::{ServiceClass, assign_class_ids, classes};
use super::state::{TaskState, is_below};
use super::{Change, ChangeId, ChangeKind, ColorAssignment, CpusetGroup, MachineState, ServiceClassId, WayMasks};
use crate::{
    Ability, CacheId, CacheShare, Capabilities, CpuSet, GangSchedule, PageMigration, PartitionSupport, Plan, PlanItem,
    ProcessId, RefusalReason, RefusedItem, ShareMember, Support, TaskId, Topology, Units,
};

/// The changes to make, and the items of the plan that are impossible.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ChangeList {
    /// Changes in the order in which they are made.
    pub changes: Vec<Change>,
    /// Items of the plan that the machine cannot apply, or only in another form.
    pub refused: Vec<RefusedItem>,
    /// The classes of service that result from the changes.
    pub classes: BTreeMap<ServiceClassId, ServiceClass>,
}

/// The changes that lead from `state` to `plan` and the confined groups. Everything that neither mentions gets its
/// original value. If the state is already as desired, the list is empty.
pub fn derive_changes(
    plan: &Plan,
    confined: &[CpusetGroup],
    state: &MachineState,
    topology: &Topology,
    capabilities: &Capabilities,
) -> ChangeList {
    let online = topology.online();
    let mut list = ChangeListBuilder { plan, confined, state, capabilities, online, list: ChangeList::default() };
    let schedules = list.schedules();
    let stops = list.stop_gangs(&schedules);
    let widened = list.confine_groups();
    let moved = list.move_tasks(&schedules, &widened);
    list.set_weights();
    list.divide_ways();
    list.color_pages();
    list.start_gangs(&schedules, &stops, &moved);
    list.list
}

struct ChangeListBuilder<'a> {
    plan: &'a Plan,
    confined: &'a [CpusetGroup],
    state: &'a MachineState,
    capabilities: &'a Capabilities,
    online: CpuSet,
    list: ChangeList,
}

impl ChangeListBuilder<'_> {
    fn push(&mut self, items: Vec<PlanItem>, after: impl IntoIterator<Item = ChangeId>, kind: ChangeKind) -> ChangeId {
        let id = ChangeId(self.list.changes.len() as u32);
        let after: BTreeSet<ChangeId> = after.into_iter().collect();
        self.list.changes.push(Change { id, items, depends_on: after.into_iter().collect(), kind });
        id
    }

    fn refuse(&mut self, item: PlanItem, because: RefusalReason, message: impl Into<String>) {
        self.list.refused.push(RefusedItem { item, reason: because, message: message.into() });
    }

    /// The reason for which this machine lacks the ability, if it gives one.
    fn unsupported_reason(&self, ability: Ability) -> Option<String> {
        match self.capabilities.abilities.get(&ability) {
            Some(Support::No { reason: why, .. }) => Some(why.clone()),
            _ => None,
        }
    }

    /// The plan's schedules with their indices in the plan, as far as they can run, without members that have exited.
    fn schedules(&mut self) -> Vec<(usize, GangSchedule)> {
        let mut all = Vec::new();
        let lacking = self.unsupported_reason(Ability::Gangs);
        for (index, schedule) in self.plan.gangs.iter().enumerate() {
            if let Some(why) = &lacking {
                self.refuse(PlanItem::Gangs(index), RefusalReason::NoPermission, why);
                continue;
            }
            let mut site_schedule = schedule.clone();
            let mut refused: BTreeMap<TaskId, (RefusalReason, String)> = BTreeMap::new();
            for gang in &mut site_schedule.gangs {
                gang.members.retain(|(task, _)| {
                    let why = match self.state.task(*task) {
                        None => (RefusalReason::NotFound, "a member has ended; the others keep their turn".to_string()),
                        Some(TaskState { no_idle_turns: Some(why), .. }) => (RefusalReason::NotSupported, why.clone()),
                        Some(_) => return true,
                    };
                    refused.insert(*task, why);
                    false
                });
            }
            for (because, message) in refused.into_values() {
                self.refuse(PlanItem::Gangs(index), because, message);
            }
            site_schedule.gangs.retain(|gang| !gang.members.is_empty());
            if !site_schedule.gangs.is_empty() {
                all.push((index, site_schedule));
            }
        }
        all
    }

    fn stop_gangs(&mut self, wanted: &[(usize, GangSchedule)]) -> Vec<(ChangeId, GangSchedule)> {
        let mut stops = Vec::new();
        for running in &self.state.gangs {
            if wanted.iter().any(|(_, schedule)| schedule == running) {
                continue;
            }
            // A schedule on the same CPUs replaces it; otherwise the plan no longer has one there.
            let instead = wanted.iter().filter(|(_, schedule)| schedule.cpus.intersects(&running.cpus));
            let items = items_or_whole_plan(instead.map(|(at, _)| PlanItem::Gangs(*at)).collect());
            let id = self.push(items, [], ChangeKind::StopGangs { schedule: running.clone() });
            stops.push((id, running.clone()));
        }
        stops
    }

    /// Confines groups to their CPUs, and returns the changes that widen, by group.
    fn confine_groups(&mut self) -> BTreeMap<String, ChangeId> {
        let mut steps: Vec<(String, CpuSet, CpuSet, CpuSet)> = Vec::new();
        let wanted: BTreeMap<&str, &CpuSet> = self.confined.iter().map(|c| (c.cgroup.as_str(), &c.cpus)).collect();
        for (group, cpus) in &self.state.groups {
            let to = wanted.get(group.as_str()).copied().unwrap_or(&cpus.original);
            if cpus.current != *to {
                steps.push((group.clone(), cpus.current.clone(), CpuSet::default(), to.clone()));
            }
        }
        let depth = |group: &str| group.split('/').filter(|part| !part.is_empty()).count();
        let groups: Vec<String> = steps.iter().map(|(group, ..)| group.clone()).collect();
        for (group, from, between, to) in &mut steps {
            let related = groups.iter().any(|other| is_below(other, group) || is_below(group, other));
            // Among related groups that both change, all widen before any of them narrows.
            *between = match (from.is_empty() || to.is_empty(), from.is_subset(to), related) {
                (true, ..) => {
                    if to.is_empty() {
                        to.clone()
                    } else {
                        from.clone()
                    }
                }
                (false, true, _) => to.clone(),
                (false, false, true) => from.union(to),
                (false, false, false) => from.clone(),
            };
        }
        steps.sort_by_key(|(group, ..)| depth(group));
        let mut widened: BTreeMap<String, ChangeId> = BTreeMap::new();
        for (group, from, between, _) in steps.iter().filter(|(_, from, between, _)| from != between) {
            let above = widened.iter().filter(|(other, _)| is_below(group, other)).map(|(_, id)| *id);
            let after: Vec<ChangeId> = above.collect();
            let kind = ChangeKind::Cpuset { group: group.clone(), from: from.clone(), to: between.clone() };
            let id = self.push(vec![PlanItem::Plan], after, kind);
            widened.insert(group.clone(), id);
        }
        let mut narrowed: Vec<(String, ChangeId)> = Vec::new();
        for (group, from, between, to) in steps.iter().rev().filter(|(_, _, between, to)| between != to) {
            let below = narrowed.iter().filter(|(other, _)| is_below(other, group)).map(|(_, id)| *id);
            // A group that is to become equal to its parent was narrower before, and may lie partly outside of what its
            // parent gets.
            let as_parent = steps.iter().filter(|(other, _, _, to)| to.is_empty() && is_below(other, group));
            let as_parent = as_parent.filter_map(|(other, ..)| widened.get(other)).copied();
            // A group that was equal to its parent may get CPUs that its parent must get first.
            let above = widened.iter().filter(|(other, _)| from.is_empty() && is_below(group, other));
            let above = above.map(|(_, id)| *id);
            let own = widened.get(group).copied();
            let after: Vec<ChangeId> = below.chain(as_parent).chain(above).chain(own).collect();
            let kind = ChangeKind::Cpuset { group: group.clone(), from: between.clone(), to: to.clone() };
            let id = self.push(vec![PlanItem::Plan], after, kind);
            narrowed.push((group.clone(), id));
        }
        widened
    }

    fn move_tasks(
        &mut self,
        schedules: &[(usize, GangSchedule)],
        widened: &BTreeMap<String, ChangeId>,
    ) -> BTreeMap<TaskId, ChangeId> {
        for &task in self.plan.affinity.keys().filter(|&&task| self.state.task(task).is_none()) {
            self.refuse(PlanItem::Affinity(task), RefusalReason::NotFound, "the task has ended");
        }
        let seats = match self.state.limits.seats_are_affinities {
            true => gang_seats(schedules),
            false => BTreeMap::new(),
        };
        let mut moved = BTreeMap::new();
        for task in self.state.tasks.iter().filter(|task| task.movable) {
            let Some(affinity) = &task.affinity else { continue };
            let target = seats.get(&task.task).or_else(|| self.plan.affinity.get(&task.task));
            let mut to = target.map_or_else(|| affinity.original.clone(), |cpus| cpus.intersection(&self.online));
            if to.is_empty() {
                self.refuse(PlanItem::Affinity(task.task), RefusalReason::NotSupported, "none of the CPUs exists");
                continue;
            }
            // Entirely outside its group: the request is kept, and the machine decides.
            if let Some(cpus) = self.group_cpus(task).filter(|cpus| cpus.intersects(&to)) {
                to = to.intersection(cpus);
            }
            if to != affinity.current {
                let after = task.group.as_ref().and_then(|group| widened.get(group)).copied();
                let (from, name) = (affinity.current.clone(), task.name.clone());
                let kind = ChangeKind::Affinity { task: task.task, name, from, to };
                moved.insert(task.task, self.push(vec![PlanItem::Affinity(task.task)], after, kind));
            }
        }
        moved
    }

    fn group_cpus(&self, task: &TaskState) -> Option<&CpuSet> {
        let group = task.group.as_ref()?;
        self.confined.iter().find(|confined| confined.cgroup == *group).map(|confined| &confined.cpus)
    }

    fn set_weights(&mut self) {
        let lacking = self.unsupported_reason(Ability::Weights);
        for &task in self.plan.weights.keys() {
            if let Some(why) = &lacking {
                self.refuse(PlanItem::Weight(task), RefusalReason::NoPermission, why);
            } else if self.state.task(task).is_none() {
                self.refuse(PlanItem::Weight(task), RefusalReason::NotFound, "the task has ended");
            }
        }
        for task in self.state.tasks.iter().filter(|task| task.movable) {
            let Some(weight) = &task.weight else { continue };
            let requested_weight = self.plan.weights.get(&task.task).filter(|_| lacking.is_none());
            let to = *requested_weight.unwrap_or(&weight.original);
            if to != weight.current {
                let (name, from) = (task.name.clone(), weight.current);
                let kind = ChangeKind::Weight { task: task.task, name, from, to };
                self.push(vec![PlanItem::Weight(task.task)], [], kind);
            }
        }
    }

    fn divide_ways(&mut self) {
        let (classes, refused) = classes(self.plan, self.state, self.capabilities);
        self.list.refused.extend(refused);
        let ids = assign_class_ids(&classes, self.state);
        let seated: BTreeMap<ServiceClassId, ServiceClass> = ids.into_iter().zip(classes).collect();
        let mut created: BTreeMap<ServiceClassId, ChangeId> = BTreeMap::new();
        for (&class, content) in seated.iter().filter(|(class, _)| !self.state.classes.contains_key(class)) {
            let kind = ChangeKind::CreateClass { class, masks: WayMasks::new() };
            created.insert(class, self.push(content.items(), [], kind));
        }
        let mut ready = created.clone();
        for (&class, content) in &seated {
            let from = self.state.classes.get(&class).cloned().unwrap_or_default();
            if from != content.masks {
                let kind = ChangeKind::Schemata { class, from, to: content.masks.clone() };
                ready.insert(class, self.push(content.items(), created.get(&class).copied(), kind));
            }
        }
        let of_task: BTreeMap<TaskId, ServiceClassId> =
            seated.iter().flat_map(|(class, content)| content.members.iter().map(|task| (*task, *class))).collect();
        let mut leaving: BTreeMap<ServiceClassId, Vec<ChangeId>> = BTreeMap::new();
        for task in self.state.tasks.iter().filter(|task| task.movable) {
            let to = of_task.get(&task.task).copied();
            if to == task.class {
                continue;
            }
            let items = to.and_then(|class| seated.get(&class)).map_or(vec![PlanItem::Plan], ServiceClass::items);
            let after = to.and_then(|class| ready.get(&class)).copied();
            let (name, from) = (task.name.clone(), task.class);
            let id = self.push(items, after, ChangeKind::Member { task: task.task, name, from, to });
            if let Some(class) = task.class {
                leaving.entry(class).or_default().push(id);
            }
        }
        for (&class, masks) in self.state.classes.iter().filter(|(class, _)| !seated.contains_key(class)) {
            let after = leaving.remove(&class).unwrap_or_default();
            self.push(vec![PlanItem::Plan], after, ChangeKind::RemoveClass { class, masks: masks.clone() });
        }
        self.list.classes = seated;
    }

    fn color_pages(&mut self) {
        let mut wanted: BTreeMap<ProcessId, (ColorAssignment, Vec<PlanItem>)> = BTreeMap::new();
        for share in &self.plan.shares {
            let Some(colors) = self.colors_of(share) else { continue };
            let item = PlanItem::Share(share.group, share.cache);
            for member in &share.members {
                let ShareMember::Process(process) = *member else { continue };
                if self.state.tasks.iter().all(|task| task.process != process) {
                    continue;
                }
                if !self.state.colors.contains_key(&process) {
                    let message = format!("process {} was not started by cachemate page-color run", process.0);
                    self.refuse(item.clone(), RefusalReason::NotSupported, message);
                    continue;
                }
                match wanted.get_mut(&process) {
                    None => {
                        wanted.insert(process, (colors.clone(), vec![item.clone()]));
                    }
                    // The same colors in another cache of the level.
                    Some((other, items)) if other.allowed == colors.allowed => items.push(item.clone()),
                    Some(_) => {
                        let message = "the process has other colors in another share; colors hold in every cache";
                        self.refuse(item.clone(), RefusalReason::Busy, message);
                    }
                }
            }
        }
        for (&process, tracked) in &self.state.colors {
            let (to, items) = match wanted.remove(&process) {
                Some((colors, items)) => (Some(colors), items),
                None => (tracked.original.clone(), vec![PlanItem::Plan]),
            };
            if to != tracked.current {
                self.push(items, [], ChangeKind::Colors { process, from: tracked.current.clone(), to });
            }
        }
    }

    /// The colors of a share as this machine can provide them; `None` for shares in ways and for impossible ones.
    fn colors_of(&mut self, share: &CacheShare) -> Option<ColorAssignment> {
        let Units::Colors { allowed, migration: moving } = &share.units else { return None };
        let manner = &self.state.limits;
        let message = if allowed.is_empty() || allowed.iter().last() >= colors_of_cache(self.capabilities, share.cache)
        {
            format!("colors {allowed}: none, or more than this machine has")
        } else if *moving == PageMigration::Lazy && manner.no_lazy_moving {
            "pages cannot be moved when they are touched next; all of them can be".to_string()
        } else {
            let all = *moving == PageMigration::HotFirst && manner.no_hot_first;
            return Some(ColorAssignment {
                allowed: allowed.clone(),
                migration: if all { PageMigration::All } else { *moving },
            });
        };
        self.refuse(PlanItem::Share(share.group, share.cache), RefusalReason::NotSupported, message);
        None
    }

    fn start_gangs(
        &mut self,
        wanted: &[(usize, GangSchedule)],
        stops: &[(ChangeId, GangSchedule)],
        moved: &BTreeMap<TaskId, ChangeId>,
    ) {
        for (at, schedule) in wanted.iter().filter(|(_, schedule)| !self.state.gangs.contains(schedule)) {
            let members: BTreeSet<TaskId> = members(schedule).collect();
            let in_the_way = |gone: &GangSchedule| {
                gone.cpus.intersects(&schedule.cpus) || self::members(gone).any(|task| members.contains(&task))
            };
            let stopped = stops.iter().filter(|(_, gone)| in_the_way(gone)).map(|(id, _)| *id);
            let seated = members.iter().filter_map(|task| moved.get(task)).copied();
            let after: Vec<ChangeId> = stopped.chain(seated).collect();
            self.push(vec![PlanItem::Gangs(*at)], after, ChangeKind::StartGangs { schedule: schedule.clone() });
        }
    }
}

/// The number of colors; `None` if the cache cannot be colored.
fn colors_of_cache(capabilities: &Capabilities, cache: CacheId) -> Option<u32> {
    capabilities.partitions.iter().find_map(|(partitioned_cache, partition)| match partition {
        PartitionSupport::Colors { colors, .. } if *partitioned_cache == cache => Some(*colors),
        _ => None,
    })
}

fn items_or_whole_plan(items: Vec<PlanItem>) -> Vec<PlanItem> {
    if items.is_empty() { vec![PlanItem::Plan] } else { items }
}

fn members(schedule: &GangSchedule) -> impl Iterator<Item = TaskId> + '_ {
    schedule.gangs.iter().flat_map(|gang| gang.members.iter().map(|(task, _)| *task))
}

/// The CPU of each gang member: the one that the plan names, or else one of the schedule's CPUs in order of membership.
/// A member of several gangs with different CPUs may use the CPUs of all of them.
fn gang_seats(schedules: &[(usize, GangSchedule)]) -> BTreeMap<TaskId, CpuSet> {
    let mut seats: BTreeMap<TaskId, CpuSet> = BTreeMap::new();
    for (_, schedule) in schedules {
        for gang in &schedule.gangs {
            let occupied_cpus: CpuSet = gang.members.iter().filter_map(|(_, cpu)| cpu.map(|cpu| cpu.0)).collect();
            let mut free =
                schedule.cpus.iter().filter(|&cpu| !occupied_cpus.contains(cpu)).collect::<Vec<_>>().into_iter();
            for (task, cpu) in &gang.members {
                let seat = cpu.map(|cpu| cpu.0).or_else(|| free.next());
                seats.entry(*task).or_default().extend(seat);
            }
        }
    }
    seats
}
