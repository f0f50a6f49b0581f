//! The steps in which groups get their CPUs: among related groups that both change, all widen before any of them
//! narrows.

use std::collections::BTreeMap;

use super::state::is_below;
use super::{CpusetGroup, TrackedObject};
use crate::CpuSet;

/// The CPUs of a group before, between and after its two changes, each of which may be none.
pub(super) struct CpusetStep {
    pub group: String,
    pub current: CpuSet,
    pub intermediate: CpuSet,
    pub target: CpuSet,
}

impl CpusetStep {
    /// Whether the group must first get CPUs.
    pub fn widens(&self) -> bool {
        self.current != self.intermediate
    }

    /// Whether the group must lose CPUs afterward.
    pub fn narrows(&self) -> bool {
        self.intermediate != self.target
    }
}

/// Parents come first. Groups that are no longer confined get their original CPUs.
pub(super) fn cpuset_steps(
    groups: &BTreeMap<String, TrackedObject<CpuSet>>,
    confined_groups: &[CpusetGroup],
) -> Vec<CpusetStep> {
    let confinement_of = |group: &str| {
        confined_groups
            .iter()
            .rev()
            .find(|confined| confined.cgroup == group)
    };
    let changed_cpus = groups.iter().filter_map(|(group, cpus)| {
        let target = confinement_of(group).map_or(&cpus.original, |confined| &confined.cpus);
        (cpus.current != *target).then_some((group, &cpus.current, target))
    });

    let changed_cpus: Vec<(&String, &CpuSet, &CpuSet)> = changed_cpus.collect();
    let has_changing_relative = |group: &str| {
        changed_cpus
            .iter()
            .any(|(relative, ..)| is_below(relative, group) || is_below(group, relative))
    };
    let mut steps: Vec<CpusetStep> = changed_cpus
        .iter()
        .map(|&(group, current, target)| CpusetStep {
            group: group.clone(),
            current: current.clone(),
            intermediate: intermediate_cpus(current, target, has_changing_relative(group)),
            target: target.clone(),
        })
        .collect();
    steps.sort_by_key(|step| {
        step.group
            .split('/')
            .filter(|part| !part.is_empty())
            .count()
    });
    steps
}

/// CPUs between widening and narrowing. An empty set means those of the parent, so it is set in one
/// step.
fn intermediate_cpus(current: &CpuSet, target: &CpuSet, has_changing_relative: bool) -> CpuSet {
    if target.is_empty() || !current.is_empty() && current.is_subset(target) {
        target.clone()
    } else if current.is_empty() || !has_changing_relative {
        current.clone()
    } else {
        current.union(target)
    }
}
