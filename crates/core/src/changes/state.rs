//! The state of those objects of a machine that changes can refer to.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ChangeKind, ClassLimits, ColorAssignment, ServiceClassId, StaleChange};
use crate::{CacheId, CpuSet, GangSchedule, IndexSet, ProcessId, TaskId};

/// An object that is changed and restored.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TrackedObject<T> {
    /// The value in force.
    pub current: T,
    /// The value before the first change.
    pub original: T,
}

impl<T: Clone> TrackedObject<T> {
    /// Builds an object that was never changed.
    pub fn new(value: T) -> Self {
        TrackedObject {
            current: value.clone(),
            original: value,
        }
    }
}

/// A live task.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TaskState {
    /// The id that policies use.
    pub task: TaskId,
    /// The process that it belongs to.
    pub process: ProcessId,
    /// Command name, for messages.
    pub name: String,
    /// May the task be changed at all?
    pub movable: bool,
    /// The confined group that contains it and limits its affinity.
    pub group: Option<String>,
    /// Affinity of the task; `None` if it could not be read, or if no change of it was made or requested.
    pub affinity: Option<TrackedObject<CpuSet>>,
    /// Weight of the task; `None` under the same conditions as the affinity.
    pub weight: Option<TrackedObject<f64>>,
    /// The class of cachemate that contains the task; `None` if there is none.
    pub class: Option<ServiceClassId>,
    /// The reason why the task cannot join a class: it is in a class of another tool.
    pub class_owner: Option<String>,
    /// The reason why the task cannot be in a gang: it must not be kept off its CPU.
    pub no_idle_turns: Option<String>,
}

/// Limits on the ways in which a machine makes some of its changes.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ActuationLimits {
    /// Do affinity masks pin gang members to their CPUs?
    pub seats_are_affinities: bool,
    /// Is the machine unable to move a page on its next touch?
    pub no_lazy_moving: bool,
    /// Is the machine unable to identify hot pages, so that all pages migrate alike?
    pub no_hot_first: bool,
    /// Maximum number of classes of cachemate; `None` if the machine reports when there are no more.
    pub max_classes: Option<u32>,
}

/// The complete state.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct MachineState {
    /// Tasks in order of arrival.
    pub tasks: Vec<TaskState>,
    /// CPUs by confined group; the empty set means the parent's CPUs.
    pub groups: BTreeMap<String, TrackedObject<CpuSet>>,
    /// Classes of cachemate.
    pub classes: BTreeMap<ServiceClassId, ClassLimits>,
    /// Ways that another tool uses exclusively.
    pub reserved_ways: BTreeMap<CacheId, IndexSet>,
    /// Colors by process, for processes whose pages can be colored.
    pub colors: BTreeMap<ProcessId, TrackedObject<Option<ColorAssignment>>>,
    /// Running gang schedules, ascending by their CPUs, which are disjoint.
    pub gangs: Vec<GangSchedule>,
    /// Limits on changes, in which machines differ.
    pub limits: ActuationLimits,
}

impl MachineState {
    /// `None` unless the task is live.
    pub fn task(&self, task: TaskId) -> Option<&TaskState> {
        self.tasks.iter().find(|state| state.task == task)
    }

    /// Applies a change to this description, as a machine would apply it to its objects.
    ///
    /// # Errors
    /// The current state is not the one from which the change starts, or the change would break a rule of every
    /// machine.
    pub fn apply(&mut self, kind: &ChangeKind) -> Result<(), StaleChange> {
        let result = self.try_apply(kind);
        result.map_err(|mismatch| StaleChange {
            change: kind.to_string(),
            mismatch,
        })
    }

    fn try_apply(&mut self, kind: &ChangeKind) -> Result<(), &'static str> {
        match kind {
            ChangeKind::Affinity { task, from, to, .. } => {
                let affinity = self
                    .movable_task(*task)?
                    .affinity
                    .as_mut()
                    .ok_or("the affinity is not known")?;
                if to.is_empty() {
                    return Err("no CPU to run on");
                }
                replace_if_current(&mut affinity.current, from, to)
            }
            ChangeKind::Weight { task, from, to, .. } => {
                let weight = self
                    .movable_task(*task)?
                    .weight
                    .as_mut()
                    .ok_or("the weight is not known")?;
                replace_if_current(&mut weight.current, from, to)
            }
            ChangeKind::Cpuset { group, from, to } => self.confine(group, from, to),
            ChangeKind::CreateClass { class, limits } => {
                match self.classes.insert(*class, limits.clone()) {
                    None => Ok(()),
                    Some(_) => Err("the class is there already"),
                }
            }
            ChangeKind::Schemata { class, from, to } => replace_if_current(
                self.classes
                    .get_mut(class)
                    .ok_or("there is no such class")?,
                from,
                to,
            ),
            ChangeKind::Member { task, from, to, .. } => {
                if to.is_some_and(|class| !self.classes.contains_key(&class)) {
                    return Err("there is no such class");
                }
                replace_if_current(&mut self.movable_task(*task)?.class, from, to)
            }
            ChangeKind::RemoveClass { class, limits } => {
                if self.tasks.iter().any(|task| task.class == Some(*class)) {
                    return Err("the class has members");
                }
                match self.classes.remove(class) {
                    Some(removed_limits) if removed_limits == *limits => Ok(()),
                    _ => Err("there is no such class, or its limits differ"),
                }
            }
            ChangeKind::Colors { process, from, to } => {
                let colors = self
                    .colors
                    .get_mut(process)
                    .ok_or("the process cannot be colored")?;
                replace_if_current(&mut colors.current, from, to)
            }
            ChangeKind::StopGangs { schedule } => {
                let index = self.gangs.iter().position(|running| running == schedule);
                self.gangs.remove(index.ok_or("no such gangs run")?);
                Ok(())
            }
            ChangeKind::StartGangs { schedule } => {
                if self
                    .gangs
                    .iter()
                    .any(|running| running.cpus.intersects(&schedule.cpus))
                {
                    return Err("other gangs have one of the CPUs");
                }

                let index = self
                    .gangs
                    .partition_point(|running| running.cpus < schedule.cpus);
                self.gangs.insert(index, schedule.clone());
                Ok(())
            }
        }
    }

    fn movable_task(&mut self, task: TaskId) -> Result<&mut TaskState, &'static str> {
        let task = self
            .tasks
            .iter_mut()
            .find(|state| state.task == task)
            .ok_or("the task has ended")?;
        if task.movable {
            Ok(task)
        } else {
            Err("the task is fixed")
        }
    }

    /// Changes the CPUs of a group, unless a parent would be narrower than its child (cgroup v1).
    fn confine(
        &mut self,
        group: &str,
        expected: &CpuSet,
        target: &CpuSet,
    ) -> Result<(), &'static str> {
        let fits_within = |inner: &CpuSet, outer: &CpuSet| {
            inner.is_empty() || outer.is_empty() || inner.is_subset(outer)
        };
        for (related_group, state) in &self.groups {
            if is_below(related_group, group) && !fits_within(&state.current, target) {
                return Err("a group below has more CPUs");
            }
            if is_below(group, related_group) && !fits_within(target, &state.current) {
                return Err("a group above has fewer CPUs");
            }
        }

        replace_if_current(
            &mut self
                .groups
                .get_mut(group)
                .ok_or("there is no such group")?
                .current,
            expected,
            target,
        )
    }
}

/// A group is not below itself.
pub(super) fn is_below(group: &str, ancestor: &str) -> bool {
    let ancestor_path = ancestor.trim_end_matches('/');
    group
        .strip_prefix(ancestor_path)
        .is_some_and(|subpath| subpath.len() > 1 && subpath.starts_with('/'))
}

fn replace_if_current<T: PartialEq + Clone>(
    current: &mut T,
    expected: &T,
    target: &T,
) -> Result<(), &'static str> {
    if current != expected {
        return Err("its current state differs from the change's initial state");
    }
    current.clone_from(target);
    Ok(())
}
