//! State of the objects that a plan mentions or that cachemate has changed.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;

use cachemate_core::{
    ActuationLimits, ColorAssignment, CpuSet, CpusetGroup, GangSchedule, IndexSet, MachineState,
    PageMigration, Plan, PlanItem, ProcessId, RefusedItem, ServiceClass, ServiceClassId,
    ShareMember, TaskId, TaskState, TrackedObject, Units,
};

use crate::act::actuator::Actuator;
use crate::act::colors::agents::agent_dir;
use crate::act::cpusets::CpusetGroups;
use crate::act::desired_state::{DesiredState, refusal};
use crate::kernel::scheduling::EXT;
use crate::kernel::{Kernel, ThreadKey};
use crate::safety::journal::{JournalObject, ObjectState};
use crate::safety::object_state::{ObjectAccess, read_state};
use crate::sense::tasks::ManagedThread;

/// The nice value that gives `weight` times the CPU share of `original`: one step is a factor of 1.25 in Linux's
/// table of weights (`sched_prio_to_weight`).
pub fn nice_value(weight: f64, original: i32) -> i32 {
    let steps = (weight.ln() / 1.25f64.ln()).round() as i32;
    original.saturating_sub(steps).clamp(-20, 19)
}

/// A managed thread as the target of changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadTarget {
    pub pid: i32,
    pub key: ThreadKey,
    pub original_nice: i32,
}

/// The state that changes start from, and the file or thread of each of its objects on this host.
#[derive(Debug, Default)]
pub(crate) struct HostSnapshot {
    pub state: MachineState,
    /// The confined groups, under the names that the state uses.
    pub confined_groups: Vec<CpusetGroup>,
    /// State of each object as it was read, with the line of the plan that it concerns.
    pub objects: BTreeMap<JournalObject, (PlanItem, ObjectState)>,
    /// Lines of the plan whose objects could not be read.
    pub refused_items: Vec<RefusedItem>,
    pub threads: BTreeMap<TaskId, ThreadTarget>,
    pub group_files: BTreeMap<String, PathBuf>,
    pub color_files: BTreeMap<ProcessId, PathBuf>,
    /// Affinities that the kernel may change along with a group's CPUs, and the possible results.
    pub pending_states: BTreeMap<String, Vec<DesiredState>>,
    pub originals: BTreeMap<JournalObject, ObjectState>,
    /// True if the gang scheduler runs; it may then give gang members its own scheduling policy.
    pub has_gang_scheduler: bool,
}

/// The settings that earlier lists of changes have left in force.
pub(crate) struct AppliedHistory<'a> {
    pub actuator: &'a Actuator,
    /// The weights that the nice values set by cachemate express.
    pub weights: &'a BTreeMap<ThreadKey, (f64, i32)>,
    pub gangs: Vec<GangSchedule>,
    /// Does the gang scheduler run?
    pub has_gang_scheduler: bool,
}

impl HostSnapshot {
    /// Reads the objects that `plan` mentions and those that were changed before, except classes of service.
    pub fn read(
        kernel: &dyn Kernel,
        plan: &Plan,
        tasks: &[&ManagedThread],
        groups: CpusetGroups,
        history: &AppliedHistory<'_>,
    ) -> Self {
        let limits = ActuationLimits {
            seats_are_affinities: true,
            no_lazy_moving: true,
            no_hot_first: true,
            max_classes: None,
        };
        let mut snapshot = HostSnapshot {
            state: MachineState {
                groups: groups.cpus,
                limits,
                ..MachineState::default()
            },
            confined_groups: groups.confined_groups,
            group_files: groups.files,
            pending_states: groups.pending_states,
            refused_items: groups.refused_items,
            originals: history.actuator.originals(),
            has_gang_scheduler: history.has_gang_scheduler,
            ..HostSnapshot::default()
        };
        for (group, file) in snapshot.group_files.clone() {
            let object = JournalObject::File { path: file };
            if let Ok(now) = read_state(kernel, &object) {
                snapshot.objects.insert(object, (PlanItem::Plan, now));
            } else {
                snapshot.state.groups.remove(&group);
            }
        }
        let gang_members: BTreeSet<TaskId> = plan
            .gangs
            .iter()
            .flat_map(|schedule| {
                schedule
                    .gangs
                    .iter()
                    .flat_map(|gang| gang.members.iter().map(|(task, _)| *task))
            })
            .collect();
        for task in tasks.iter().filter(|task| !task.has_exited) {
            let is_placed =
                plan.affinity.contains_key(&task.task) || gang_members.contains(&task.task);
            let group = groups.threads.get(&task.thread.tid).cloned();
            let affinity = snapshot.read_affinity(kernel, task, is_placed, history);
            let weight =
                snapshot.read_weight(kernel, task, plan.weights.contains_key(&task.task), history);
            snapshot.state.tasks.push(TaskState {
                task: task.task,
                process: task.process,
                name: task.name.clone(),
                movable: !task.is_fixed,
                group,
                affinity,
                weight,
                class: None,
                class_owner: None,
                no_idle_turns: gang_members
                    .contains(&task.task)
                    .then(|| snapshot.wait_refusal(kernel, task))
                    .flatten(),
            });
        }
        let mut gangs = history.gangs.clone();
        gangs.sort_by(|a, b| a.cpus.cmp(&b.cpus));
        snapshot.state.gangs = gangs;
        snapshot.read_colors(kernel, plan, tasks);
        snapshot
    }

    /// Records an object's state; if it cannot be read, `item` is refused.
    fn record(
        &mut self,
        kernel: &dyn Kernel,
        item: PlanItem,
        object: &JournalObject,
        read_result: io::Result<ObjectState>,
    ) -> Option<ObjectState> {
        match read_result {
            Ok(current_state) => {
                self.objects
                    .insert(object.clone(), (item, current_state.clone()));
                Some(current_state)
            }
            Err(error) => {
                self.refused_items
                    .push(refusal(kernel, &item, object, ObjectAccess::Read, &error));
                None
            }
        }
    }

    /// The affinity of a thread with its original; `None` if neither this plan nor an earlier one sets it.
    fn read_affinity(
        &mut self,
        kernel: &dyn Kernel,
        task: &ManagedThread,
        is_requested: bool,
        history: &AppliedHistory<'_>,
    ) -> Option<TrackedObject<CpuSet>> {
        let object = JournalObject::Affinity {
            pid: task.pid,
            thread: task.thread,
        };
        let target = ThreadTarget {
            pid: task.pid,
            key: task.thread,
            original_nice: task.initial_nice,
        };
        self.threads.insert(task.task, target);
        let original = self
            .originals
            .get(&object)
            .and_then(ObjectState::cpus)
            .cloned();
        if task.is_fixed || !(is_requested || original.is_some()) {
            return None;
        }
        // The cheaper read, if the affinity is still as it was left.
        let is_kept = |last: &&CpuSet| kernel.has_affinity(task.thread.tid, last).unwrap_or(false);
        let last_cpus = history
            .actuator
            .last_state(&object)
            .and_then(ObjectState::cpus)
            .filter(is_kept)
            .cloned();
        let read_result = last_cpus.map_or_else(
            || read_state(kernel, &object),
            |last| Ok(ObjectState::Cpus(last)),
        );
        let current = self
            .record(kernel, PlanItem::Affinity(task.task), &object, read_result)?
            .cpus()?
            .clone();
        Some(TrackedObject {
            original: original.unwrap_or_else(|| current.clone()),
            current,
        })
    }

    fn read_weight(
        &mut self,
        kernel: &dyn Kernel,
        task: &ManagedThread,
        is_requested: bool,
        history: &AppliedHistory<'_>,
    ) -> Option<TrackedObject<f64>> {
        let object = JournalObject::Nice {
            pid: task.pid,
            thread: task.thread,
        };
        let original = match self.originals.get(&object) {
            Some(ObjectState::Nice(original)) => Some(*original),
            _ => None,
        };
        if task.is_fixed || !(is_requested || original.is_some()) {
            return None;
        }
        let read_result = read_state(kernel, &object);
        let Some(ObjectState::Nice(nice)) =
            self.record(kernel, PlanItem::Weight(task.task), &object, read_result)
        else {
            return None;
        };
        let original = original.unwrap_or(nice);
        if let Some(thread) = self.threads.get_mut(&task.task) {
            thread.original_nice = original;
        }
        let current_weight = match history.weights.get(&task.thread) {
            Some((weight, set_nice)) if *set_nice == nice => *weight,
            _ => 1.25f64.powi(original - nice),
        };
        Some(TrackedObject {
            current: current_weight,
            original: 1.0,
        })
    }

    /// Reads the colors of processes that have an agent: those that the plan mentions, and those that were recolored
    /// before.
    fn read_colors(&mut self, kernel: &dyn Kernel, plan: &Plan, tasks: &[&ManagedThread]) {
        let mut items_by_process: BTreeMap<ProcessId, PlanItem> = BTreeMap::new();
        for share in plan
            .shares
            .iter()
            .filter(|share| matches!(share.units, Units::Colors { .. }))
        {
            for member in &share.members {
                if let ShareMember::Process(process) = member {
                    items_by_process
                        .entry(*process)
                        .or_insert(PlanItem::Share(share.group, share.cache));
                }
            }
        }
        let mut examined_processes = BTreeSet::new();
        for task in tasks.iter().filter(|task| !task.has_exited) {
            if !examined_processes.insert(task.process) {
                continue;
            }
            let changed_file = self.originals.keys().find_map(|object| match object {
                JournalObject::File { path } if pid_of_color_file(path) == Some(task.pid) => {
                    Some(path.clone())
                }
                _ => None,
            });
            let item = items_by_process.get(&task.process).cloned();
            let file = match (changed_file, &item) {
                (Some(path), _) => path,
                (None, Some(_)) => match agent_dir(kernel, task.pid) {
                    Some(dir) => dir.join("wanted"),
                    None => continue,
                },
                (None, None) => continue,
            };
            let object = JournalObject::File { path: file.clone() };
            let Ok(current_state) = read_state(kernel, &object) else {
                continue;
            };
            let original = parse_colors(self.originals.get(&object).unwrap_or(&current_state));
            let (Some(current_colors), Some(original)) = (parse_colors(&current_state), original)
            else {
                continue;
            };
            self.objects
                .insert(object, (item.unwrap_or(PlanItem::Plan), current_state));
            self.state.colors.insert(
                task.process,
                TrackedObject {
                    current: Some(current_colors),
                    original: Some(original),
                },
            );
            self.color_files.insert(task.process, file);
        }
    }

    /// The reason why a task cannot take turns; `None` if it can, or if it has exited, which the change itself detects.
    /// A task that the gang scheduler already runs for this daemon can take turns as before.
    fn wait_refusal(&self, kernel: &dyn Kernel, task: &ManagedThread) -> Option<String> {
        let object = JournalObject::Policy {
            pid: task.pid,
            thread: task.thread,
        };
        let original = || {
            self.originals
                .get(&object)
                .and_then(ObjectState::scheduling)
        };
        let current_scheduling = kernel.scheduling(task.thread.tid).ok()?;
        let scheduling = if current_scheduling.policy == EXT {
            original().unwrap_or(current_scheduling)
        } else {
            current_scheduling
        };
        let subject = format!(
            "task {} ({}, thread {})",
            task.task.0, task.name, task.thread.tid
        );
        (!scheduling.can_wait())
            .then(|| format!("{subject}: {scheduling}: it cannot wait for turns as an idle task"))
    }

    /// Adds a service class that cachemate created to the state.
    pub fn add_class(&mut self, id: ServiceClassId, limits: cachemate_core::ClassLimits) {
        self.state.classes.insert(id, limits);
    }

    /// The task's state, to be filled in.
    pub fn task_mut(&mut self, task: TaskId) -> Option<&mut TaskState> {
        self.state.tasks.iter_mut().find(|state| state.task == task)
    }

    /// Lines of the plan whose objects another process has changed since cachemate set them.
    pub fn overridden_items(&self, actuator: &Actuator) -> Vec<PlanItem> {
        let is_overridden = |(object, (_, now)): &(&JournalObject, &(PlanItem, ObjectState))| {
            actuator.last_state(object).is_some_and(|last| last != now)
        };
        let mut items: Vec<PlanItem> = self
            .objects
            .iter()
            .filter(is_overridden)
            .map(|(_, (item, _))| item.clone())
            .collect();
        items.dedup();
        items
    }
}

/// A line of the plan that a class is for.
pub(crate) fn plan_item(class: &ServiceClass) -> PlanItem {
    let share = class.shares.first();
    let share = share.map(|&(group, cache)| PlanItem::Share(group, cache));
    let limit = class.bandwidth_limits.first();
    let limit = limit.map(|&(group, cache)| PlanItem::Bandwidth(group, cache));
    share.or(limit).unwrap_or(PlanItem::Plan)
}

/// The process whose colors this control file sets.
pub(crate) fn pid_of_color_file(path: &std::path::Path) -> Option<i32> {
    let relative_path = path
        .strip_prefix(crate::act::colors::reference_set::BASE)
        .ok()?;
    (relative_path.file_name()? == "wanted").then_some(())?;
    relative_path.parent()?.file_name()?.to_str()?.parse().ok()
}

/// The colors that a `wanted` file requests.
fn parse_colors(text: &ObjectState) -> Option<ColorAssignment> {
    let ObjectState::Text(text) = text else {
        return None;
    };
    let (mask, must_move_all) = cachemate_agent::layout::parse_target(text.as_bytes())?;
    let allowed_colors: IndexSet = (0..64).filter(|color| mask >> color & 1 == 1).collect();
    Some(ColorAssignment {
        allowed: allowed_colors,
        migration: if must_move_all {
            PageMigration::All
        } else {
            PageMigration::Never
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a weight of two mean about three nice steps, either way, from whatever the host had?
    #[test]
    fn weights_become_nice_steps() {
        assert_eq!(
            [1.0, 2.0, 0.5, 1e9].map(|weight| nice_value(weight, 0)),
            [0, -3, 3, -20]
        );
        assert_eq!(nice_value(2.0, 5), 2);
    }
}
