//! Confined groups whose CPUs their owner or a user has changed. Such a change takes precedence over the
//! configuration.
//!
//! Problem: a service manager, a kubelet or a batch system may also write a group's CPUs, and two programs that
//! correct each other never settle. Method: a value that is neither the configured one nor the last one set by
//! cachemate belongs to another writer, and the group is left alone until the operator reloads the configuration. A
//! group that has its original CPUs again was probably re-created; it is confined again, at most twice a minute.
//! Property: a group is changed at most twice in a minute.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use cachemate_core::{CpuSet, CpusetGroup, ServiceKind, service_of_cgroup};

use crate::act::actuator::Actuator;
use crate::act::cpusets::{CpusetGroups, cpus_in_state};
use crate::safety::journal::JournalObject;

/// Period in which a group is confined again at most [`MAX_CHANGES_PER_PERIOD`] times.
const PERIOD_NS: u64 = 60_000_000_000;
const MAX_CHANGES_PER_PERIOD: usize = 2;

/// A confined group whose CPUs its owner or a user has changed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupOverride {
    /// Path of the group below the hierarchy's root.
    pub cgroup: String,
    /// The CPUs of the configuration.
    pub configured_cpus: CpuSet,
    /// The CPUs that it has at present.
    pub current_cpus: CpuSet,
    /// The program that manages such groups.
    pub owner: Option<&'static str>,
}

/// Names the group, its two sets of CPUs and who may have written the second, for users.
impl fmt::Display for GroupOverride {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GroupOverride {
            cgroup,
            configured_cpus,
            current_cpus,
            ..
        } = self;
        let other = match self.owner {
            Some(owner) => format!("{owner} or a person"),
            None => "another program or a person".to_string(),
        };
        write!(
            formatter,
            "cpuset {cgroup}: CPUs {configured_cpus} overridden by {other}, now {current_cpus}"
        )
    }
}

/// The overridden groups, and the times at which others were confined again.
#[derive(Debug, Default)]
pub struct GroupOverrides {
    overrides: BTreeMap<String, GroupOverride>,
    change_times_ns: BTreeMap<String, VecDeque<u64>>,
}

impl GroupOverrides {
    /// Removes the groups that others have changed from those that are confined. Plans stay inside them all the same
    /// ([`crate::act::boundaries`]).
    pub fn observe(&mut self, groups: &mut CpusetGroups, actuator: &Actuator, now_ns: u64) {
        for group in std::mem::take(&mut groups.confined_groups) {
            if self.update_override(&group, groups, actuator, now_ns) {
                groups.remove(&group.cgroup);
            } else {
                groups.confined_groups.push(group);
            }
        }
    }

    /// The groups that others have changed.
    pub fn changed_groups(&self) -> impl Iterator<Item = &GroupOverride> {
        self.overrides.values()
    }

    /// Forgets all overrides after the operator has reloaded the configuration, which is in force again.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Updates the override of a group. Returns whether its owner or a user has changed its CPUs.
    fn update_override(
        &mut self,
        group: &CpusetGroup,
        groups: &CpusetGroups,
        actuator: &Actuator,
        now_ns: u64,
    ) -> bool {
        let name = &group.cgroup;
        let (Some(tracked_cpus), Some(file)) = (groups.cpus.get(name), groups.files.get(name))
        else {
            return false;
        };
        if tracked_cpus.current == group.cpus {
            self.overrides.remove(name);
            return false;
        }
        if let Some(group_override) = self.overrides.get_mut(name) {
            group_override
                .current_cpus
                .clone_from(&tracked_cpus.current);
            return true;
        }
        let last_cpus = actuator
            .last_state(&JournalObject::File { path: file.clone() })
            .and_then(cpus_in_state);
        let Some(last) = last_cpus.filter(|last| *last != tracked_cpus.current) else {
            return false;
        };
        if tracked_cpus.current == tracked_cpus.original && last == group.cpus {
            let change_times_ns = self.change_times_ns.entry(name.clone()).or_default();
            change_times_ns.retain(|change_ns| now_ns.saturating_sub(*change_ns) < PERIOD_NS);
            if change_times_ns.len() < MAX_CHANGES_PER_PERIOD {
                change_times_ns.push_back(now_ns);
                return false;
            }
        }
        let entry = GroupOverride {
            cgroup: name.clone(),
            configured_cpus: group.cpus.clone(),
            current_cpus: tracked_cpus.current.clone(),
            owner: cgroup_owner(name),
        };
        self.overrides.insert(name.clone(), entry);
        true
    }
}

/// The program that manages groups of this path; `None` for a plain group without a manager.
pub fn cgroup_owner(cgroup: &str) -> Option<&'static str> {
    if cgroup.starts_with("/kubepods") {
        return Some("kubelet");
    }
    service_kind_owner(service_of_cgroup(cgroup)?.identity.kind)
}

/// The program that manages the CPUs of services of this kind.
pub fn service_kind_owner(kind: ServiceKind) -> Option<&'static str> {
    match kind {
        ServiceKind::Unit | ServiceKind::UserUnit | ServiceKind::Session => Some("systemd"),
        ServiceKind::Pod => Some("kubelet"),
        ServiceKind::Container => Some("container runtime"),
        ServiceKind::Job => Some("Slurm"),
        ServiceKind::Guest => Some("libvirt"),
        ServiceKind::Command => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::safety::journal::ObjectState;
    use cachemate_core::TrackedObject;

    const NAME: &str = "/system.slice/db.service";
    const FILE: &str = "/sys/fs/cgroup/system.slice/db.service/cpuset.cpus";

    fn cpus(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    fn groups(current: &str) -> CpusetGroups {
        let mut groups = CpusetGroups::default();
        groups.confined_groups.push(CpusetGroup {
            cgroup: NAME.into(),
            cpus: cpus("0"),
        });
        groups.cpus.insert(
            NAME.into(),
            TrackedObject {
                current: cpus(current),
                original: cpus("0-3"),
            },
        );
        groups.files.insert(NAME.into(), FILE.into());
        groups
    }

    fn acted() -> Actuator {
        let mut actuator = Actuator::default();
        let object = JournalObject::File { path: FILE.into() };
        actuator.set_last_states([(object, ObjectState::Text("0".into()))].into());
        actuator
    }

    /// Is a change by the owner kept, shown with the owner, and undone by a reload only?
    #[test]
    fn a_change_by_the_owner_is_kept_until_a_reload() {
        let actuator = acted();
        let mut overrides = GroupOverrides::default();
        let confined = |overrides: &mut GroupOverrides, current: &str, now_ns| {
            let mut groups = groups(current);
            overrides.observe(&mut groups, &actuator, now_ns);
            (groups.confined_groups.len(), groups.cpus.len())
        };
        assert_eq!(confined(&mut overrides, "0", 0), (1, 1));
        assert_eq!(
            confined(&mut overrides, "1", 1),
            (0, 0),
            "neither confined nor restored"
        );
        let entry = overrides.changed_groups().next().unwrap().clone();
        assert_eq!(
            (entry.owner, entry.current_cpus),
            (Some("systemd"), cpus("1"))
        );
        assert_eq!(confined(&mut overrides, "2", 2), (0, 0));
        assert_eq!(
            overrides.changed_groups().next().unwrap().current_cpus,
            cpus("2")
        );
        assert_eq!(confined(&mut overrides, "0", 3), (1, 1), "as wanted again");
        assert_eq!(confined(&mut overrides, "1", 4), (0, 0));
        overrides.clear();
        assert_eq!(overrides.changed_groups().count(), 0);
    }

    /// Is a re-created group confined again, and never more than twice a minute?
    #[test]
    fn a_recreated_group_is_confined_again_twice_a_minute_at_most() {
        let actuator = acted();
        let mut overrides = GroupOverrides::default();
        let mut confined = |now_s: u64| {
            let mut groups = groups("0-3");
            overrides.observe(&mut groups, &actuator, now_s * 1_000_000_000);
            groups.confined_groups.len()
        };
        assert_eq!(
            [confined(1), confined(2), confined(3), confined(30)],
            [1, 1, 0, 0]
        );
        assert_eq!(cgroup_owner("/fleet/redis"), None);
        assert_eq!(cgroup_owner("/kubepods"), Some("kubelet"));
    }
}
