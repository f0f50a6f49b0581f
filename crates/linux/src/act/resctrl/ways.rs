//! Our groups in resctrl, and the way masks and limits of bandwidth that a plan gives them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cachemate_core::{
    ActiveShare, BandwidthLimit, CacheId, CacheShare, CacheUse, ClassLimits, CounterEvent,
    CounterScope, EventCounts, IndexSet, Plan, PlanItem, ProcessId, RefusalReason, RefusedItem,
    ServiceClass, ServiceClassId, ShareKey, ShareMember, Units,
};

use super::groups;
use super::info::{Resctrl, ResctrlCache};
use super::masks::Schemata;
use super::monitors::{assign_counters, list_monitor_groups};
use super::occupancy::{
    OtherGroupMasks, Readings, add_readings, cache_dir, counts_since, exclusive_ways,
    explain_occupancy, missing_traffic, occupancy_bytes, package_dir, read_package, read_traffic,
};
use crate::act::changes::{HostSnapshot, plan_item};
use crate::act::desired_state::refusal;
use crate::kernel::{DirLock, Kernel, ThreadKey};
use crate::safety::journal::{JournalObject, ObjectState};
use crate::safety::object_state::{ObjectAccess, read_state};
use crate::sense::tasks::ManagedThread;

/// Maximum wait for another process's lock on resctrl before the plan's shares are refused for this window.
const MAX_LOCK_WAIT: Duration = Duration::from_secs(1);

/// Largest number of groups whose traffic is read in a window, because hosts may have hundreds of pods.
const MAX_READ_GROUPS: usize = 64;

/// A resctrl group that this process created.
#[derive(Debug)]
struct OwnGroup {
    path: PathBuf,
    /// The class that it implements; the empty class if only its directory is left.
    class: ServiceClass,
    /// Lock by which other processes recognize that the group's owner is alive.
    _liveness_lock: DirLock,
}

impl OwnGroup {
    fn name(&self) -> &std::ffi::OsStr {
        self.path.file_name().unwrap_or_default()
    }
}

/// Controller of this process's way masks and limits of bandwidth on this host.
#[derive(Debug)]
pub struct WayController {
    resctrl: Resctrl,
    /// Prefix of our groups' names.
    prefix: String,
    groups: BTreeMap<ServiceClassId, OwnGroup>,
    has_removed_orphans: bool,
    /// By directory of counters: those of groups and caches at the last read.
    last_readings: BTreeMap<PathBuf, Readings>,
    /// The same at the last read for single processes, which may be at other times.
    last_process_readings: BTreeMap<PathBuf, Readings>,
}

impl WayController {
    /// A controller of the groups of process `owner`; constructing it changes nothing.
    pub fn new(resctrl: Resctrl, owner: ThreadKey) -> Self {
        WayController {
            resctrl,
            prefix: groups::own_prefix(owner),
            groups: BTreeMap::new(),
            has_removed_orphans: false,
            last_readings: BTreeMap::new(),
            last_process_readings: BTreeMap::new(),
        }
    }

    /// Forgets all groups, after everything has been restored.
    pub fn forget(&mut self) {
        self.groups.clear();
    }

    /// Reads our groups into the snapshot from which changes are derived. If resctrl's lock is unavailable, `plan`
    /// loses its shares of ways and limits of bandwidth, and no group changes. The caller holds the lock until the
    /// changes are made; without `may_act` no lock is needed, because nothing changes.
    pub(crate) fn read(
        &mut self,
        kernel: &dyn Kernel,
        plan: &mut Plan,
        tasks: &[&ManagedThread],
        snapshot: &mut HostSnapshot,
        may_act: bool,
    ) -> Option<DirLock> {
        let is_way_share = |share: &CacheShare| matches!(share.units, Units::Ways { .. });
        let needs_classes = plan.shares.iter().any(is_way_share) || !plan.bandwidth.is_empty();
        if !needs_classes && self.groups.is_empty() {
            return None;
        }
        let lock = match may_act
            .then(|| kernel.lock_dir(&self.resctrl.mount, MAX_LOCK_WAIT))
            .transpose()
        {
            Ok(lock) => lock,
            Err(error) => {
                let message = format!("{}: {error}", self.resctrl.mount.display());
                let shares = plan.shares.iter().filter(|share| is_way_share(share));
                let shares = shares.map(|share| PlanItem::Share(share.group, share.cache));
                let limits = plan.bandwidth.iter();
                let limits = limits.map(|limit| PlanItem::Bandwidth(limit.group, limit.cache));
                let items = shares.chain(limits);
                snapshot
                    .refused_items
                    .extend(refuse_all(items, &RefusalReason::Busy, &message));
                plan.shares.retain(|share| !is_way_share(share));
                plan.bandwidth.clear();
                return None;
            }
        };
        if may_act && !self.has_removed_orphans {
            self.has_removed_orphans = true;
            let refuse_orphan = |orphan: groups::OrphanGroup| {
                refuse_all(
                    [PlanItem::Plan],
                    &RefusalReason::Failed,
                    &orphan.to_string(),
                )
            };
            let orphans =
                groups::remove_orphans(kernel, &self.resctrl.mount, &self.prefix).into_iter();
            snapshot.refused_items.extend(
                orphans
                    .filter(|orphan| orphan.error.is_some())
                    .flat_map(refuse_orphan),
            );
        }
        self.read_reserved_ways(kernel, snapshot);
        self.read_classes(kernel, snapshot);
        self.read_members(kernel, plan, tasks, snapshot);
        lock
    }

    fn read_reserved_ways(&self, kernel: &dyn Kernel, snapshot: &mut HostSnapshot) {
        let mut reserved_by_level = BTreeMap::new();
        for ResctrlCache {
            cache,
            level,
            domain,
            ..
        } in &self.resctrl.caches
        {
            let reserved_by_domain = reserved_by_level
                .entry(*level)
                .or_insert_with(|| exclusive_ways(kernel, &self.resctrl.mount, *level));
            let reserved: IndexSet = reserved_by_domain.get(domain).cloned().unwrap_or_default();
            snapshot.state.reserved_ways.insert(*cache, reserved);
        }
    }

    /// Reads the classes; a group that another process has removed no longer counts.
    fn read_classes(&mut self, kernel: &dyn Kernel, snapshot: &mut HostSnapshot) {
        let mut missing_groups = Vec::new();
        for (&id, group) in &self.groups {
            let item = plan_item(&group.class);
            let directory = JournalObject::Directory {
                path: group.path.clone(),
            };
            let dir_state = read_state(kernel, &directory);
            if matches!(dir_state, Ok(ObjectState::Absent)) {
                missing_groups.push(id);
            }
            let Ok(dir_state) = dir_state else { continue };
            snapshot
                .objects
                .insert(directory, (item.clone(), dir_state));
            let object = self.schemata_object(id);
            let Ok(ObjectState::Text(current_text)) = read_state(kernel, &object) else {
                snapshot.add_class(id, ClassLimits::default());
                continue;
            };
            let original_schemata = match snapshot.originals.get(&object) {
                Some(ObjectState::Text(original_text)) => {
                    Schemata::parse(original_text).unwrap_or_default()
                }
                _ => Schemata::default(),
            };
            let current_schemata = Schemata::parse(&current_text).unwrap_or_default();
            let mut limits = ClassLimits::default();
            for ResctrlCache {
                cache,
                level,
                domain,
                ..
            } in &self.resctrl.caches
            {
                let (current_mask, original_mask) = (
                    current_schemata.mask_of(*level, *domain),
                    original_schemata.mask_of(*level, *domain),
                );
                let is_ours = group.class.limits.masks.contains_key(cache)
                    || original_mask
                        .is_some_and(|original_mask| current_mask != Some(original_mask));
                let current_mask = current_mask.filter(|_| is_ours);
                limits.masks.extend(current_mask.map(|now| (*cache, now)));
            }
            let memory = self.resctrl.memory_bandwidth();
            for (&domain, cache) in memory.iter().flat_map(|resource| &resource.domains) {
                let current_level = current_schemata.bandwidth_level(domain);
                let original_level = original_schemata.bandwidth_level(domain);
                let is_ours = group.class.limits.bandwidth.contains_key(cache)
                    || original_level.is_some_and(|level| current_level != Some(level));
                let current_level = current_level.filter(|_| is_ours);
                limits
                    .bandwidth
                    .extend(current_level.map(|now| (*cache, now)));
            }
            snapshot
                .objects
                .insert(object, (item, ObjectState::Text(current_text)));
            snapshot.add_class(id, limits);
        }
        for id in missing_groups {
            self.groups.remove(&id);
            snapshot.state.classes.remove(&id);
        }
    }

    /// The groups of the threads that the plan names or that we have moved.
    fn read_members(
        &self,
        kernel: &dyn Kernel,
        plan: &Plan,
        tasks: &[&ManagedThread],
        snapshot: &mut HostSnapshot,
    ) {
        for task in tasks
            .iter()
            .filter(|task| !task.has_exited && !task.is_fixed)
        {
            let has_task =
                |members: &[ShareMember]| ShareMember::name_task(members, task.task, task.process);
            let object = self.membership_object(task.pid, task.thread);
            let mut shares = plan.shares.iter();
            let share = shares.find(|share| {
                matches!(share.units, Units::Ways { .. }) && has_task(&share.members)
            });
            let mut limits = plan.bandwidth.iter();
            let limit = limits.find(|limit| has_task(&limit.members));
            let requested_item = share
                .map(|share| PlanItem::Share(share.group, share.cache))
                .or(limit.map(|limit| PlanItem::Bandwidth(limit.group, limit.cache)));
            if requested_item.is_none() && !snapshot.originals.contains_key(&object) {
                continue;
            }
            let item = requested_item.unwrap_or(PlanItem::Plan);
            let group = match read_state(kernel, &object) {
                Ok(ObjectState::Group(group)) => group,
                Ok(_) => continue,
                Err(error) => {
                    snapshot.refused_items.push(refusal(
                        kernel,
                        &item,
                        &object,
                        ObjectAccess::Read,
                        &error,
                    ));
                    continue;
                }
            };
            let class = self
                .groups
                .iter()
                .find(|(_, own_group)| Path::new("/").join(own_group.name()) == group);
            let (class, is_ours) = (class.map(|(id, _)| *id), self.may_move(&group));
            if let Some(state) = snapshot.task_mut(task.task) {
                state.class = class;
                state.class_owner = (!is_ours).then(|| {
                    let (tid, group) = (task.thread.tid, group.display());
                    format!(
                        "thread {tid} is in resctrl group {group}, which belongs to another tool"
                    )
                });
            }
            snapshot
                .objects
                .insert(object, (item, ObjectState::Group(group)));
        }
    }

    /// Threads may be moved only from the root group itself (a monitoring group has an owner, too) and between our
    /// groups.
    fn may_move(&self, group_path: &Path) -> bool {
        let mut components = group_path.strip_prefix("/").unwrap_or(group_path).iter();
        match (components.next(), components.next()) {
            (None, _) => true,
            (Some(name), None) => name.to_string_lossy().starts_with(&self.prefix),
            _ => false,
        }
    }

    pub(crate) fn group_path(&self, class: ServiceClassId) -> PathBuf {
        self.resctrl
            .mount
            .join(format!("{}{}", self.prefix, class.0))
    }

    pub(crate) fn schemata_object(&self, class: ServiceClassId) -> JournalObject {
        JournalObject::Schemata {
            path: self.group_path(class).join("schemata"),
        }
    }

    pub(crate) fn membership_object(&self, pid: i32, thread: ThreadKey) -> JournalObject {
        JournalObject::Membership {
            hierarchy: self.resctrl.mount.clone(),
            pid,
            thread,
        }
    }

    /// The group of a class, in the form of a thread's membership.
    pub(crate) fn group_state(&self, class: ServiceClassId) -> ObjectState {
        ObjectState::Group(Path::new("/").join(format!("{}{}", self.prefix, class.0)))
    }

    /// A group's schemata with these limits. Caches that they do not name keep the kernel's default: all ways that no
    /// group uses exclusively, and all bandwidth.
    ///
    /// # Errors
    /// The group is missing, or its file has unexpected content.
    pub(crate) fn schemata_state(
        &self,
        kernel: &dyn Kernel,
        snapshot: &HostSnapshot,
        class: ServiceClassId,
        limits: &ClassLimits,
    ) -> io::Result<ObjectState> {
        let object = self.schemata_object(class);
        let original_state = snapshot.originals.get(&object).cloned();
        let original_state = original_state.map_or_else(|| read_state(kernel, &object), Ok)?;
        let ObjectState::Text(original_text) = original_state else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let mut schemata = Schemata::parse(&original_text)
            .map_err(|problem| io::Error::new(io::ErrorKind::InvalidData, problem))?;
        for (cache, mask) in &limits.masks {
            if let Some(resctrl_cache) = self.resctrl.cache(*cache) {
                schemata.set(resctrl_cache.level, resctrl_cache.domain, mask);
            }
        }
        let memory = self.resctrl.memory_bandwidth();
        for (&domain, cache) in memory.iter().flat_map(|resource| &resource.domains) {
            if let Some(level) = limits.bandwidth.get(cache) {
                schemata.set_bandwidth_level(domain, *level);
            }
        }
        Ok(ObjectState::Text(schemata.to_string()))
    }

    /// Registers a group of ours that has just been created.
    pub(crate) fn register_created(&mut self, kernel: &dyn Kernel, class: ServiceClassId) {
        let path = self.group_path(class);
        // No other process can have locked a directory that was just created under resctrl's lock.
        let liveness_lock = kernel.lock_dir(&path, Duration::ZERO).unwrap_or_default();
        self.groups.insert(
            class,
            OwnGroup {
                path,
                class: ServiceClass::default(),
                _liveness_lock: liveness_lock,
            },
        );
    }

    /// Forgets a removed group; returns the objects that the journal can drop.
    pub(crate) fn forget_removed(&mut self, class: ServiceClassId) -> [JournalObject; 2] {
        self.groups.remove(&class);
        [
            JournalObject::Directory {
                path: self.group_path(class),
            },
            self.schemata_object(class),
        ]
    }

    /// Sets the class of each group from now on; a group without a class has none.
    pub(crate) fn assign_classes(&mut self, classes: &BTreeMap<ServiceClassId, ServiceClass>) {
        for (id, group) in &mut self.groups {
            group.class = classes.get(id).cloned().unwrap_or_default();
        }
    }

    /// The shares in force, read from the groups: masks, members, occupancy.
    pub fn read_back(
        &self,
        kernel: &dyn Kernel,
        shares: &[CacheShare],
        tasks: &[&ManagedThread],
    ) -> Vec<ActiveShare> {
        let mut active_shares = Vec::new();
        for group in self
            .groups
            .values()
            .filter(|group| !group.class.shares.is_empty())
        {
            let Some((schemata, group_threads)) = read_group(kernel, &group.path) else {
                continue;
            };
            for share in shares
                .iter()
                .filter(|share| group.class.shares.contains(&(share.group, share.cache)))
            {
                let Some(resctrl_cache) = self.resctrl.cache(share.cache) else {
                    continue;
                };
                let Some(mask) = schemata.mask_of(resctrl_cache.level, resctrl_cache.domain) else {
                    continue;
                };
                let members = members_in_group(&share.members, &group.class, tasks, &group_threads);
                if members.is_empty() {
                    continue;
                }
                let occupancy = self
                    .occupancy_domain(resctrl_cache)
                    .filter(|_| group.class.group_of(share.cache).is_some());
                let occupancy =
                    occupancy.and_then(|domain| occupancy_bytes(kernel, &group.path, domain));
                let share = CacheShare {
                    members,
                    units: Units::Ways { mask },
                    ..share.clone()
                };
                active_shares.push(ActiveShare {
                    share,
                    pages_in_share: None,
                    fallback_pages: None,
                    occupancy_bytes: occupancy,
                });
            }
        }
        active_shares
            .sort_by_key(|active_share| (active_share.share.cache, active_share.share.group));
        active_shares
    }

    /// The limits of bandwidth in force, read from the groups, with the members that are in them.
    pub fn read_back_bandwidth(
        &self,
        kernel: &dyn Kernel,
        limits: &[BandwidthLimit],
        tasks: &[&ManagedThread],
    ) -> Vec<BandwidthLimit> {
        let mut active_limits = Vec::new();
        let memory = self.resctrl.memory_bandwidth();
        let limited_groups = self.groups.values();
        for group in limited_groups.filter(|group| !group.class.bandwidth_limits.is_empty()) {
            let Some((schemata, group_threads)) = read_group(kernel, &group.path) else {
                continue;
            };
            for (&domain, &cache) in memory.iter().flat_map(|resource| &resource.domains) {
                let Some(level) = schemata.bandwidth_level(domain) else {
                    continue;
                };
                let is_of_group = |limit: &&BandwidthLimit| {
                    let key = (limit.group, limit.cache);
                    limit.cache == cache && group.class.bandwidth_limits.contains(&key)
                };
                for limit in limits.iter().filter(is_of_group) {
                    let members =
                        members_in_group(&limit.members, &group.class, tasks, &group_threads);
                    if !members.is_empty() {
                        active_limits.push(BandwidthLimit {
                            members,
                            level,
                            ..limit.clone()
                        });
                    }
                }
            }
        }
        active_limits.sort_by_key(|limit| (limit.cache, limit.group));
        active_limits
    }

    fn occupancy_domain(&self, resctrl_cache: &ResctrlCache) -> Option<u32> {
        let is_counted = self.resctrl.counted_events.has_occupancy
            && self
                .resctrl
                .monitored_caches
                .contains_key(&resctrl_cache.domain);
        (is_counted && resctrl_cache.level == cachemate_core::CacheLevel::L3)
            .then_some(resctrl_cache.domain)
    }

    /// The reasons why a share's lines differ from its mask.
    pub fn explain(&self, kernel: &dyn Kernel, active_share: &ActiveShare) -> Vec<String> {
        let Some(resctrl_cache) = self.resctrl.cache(active_share.share.cache) else {
            return Vec::new();
        };
        let key: ShareKey = (active_share.share.group, active_share.share.cache);
        let own_group = self
            .groups
            .values()
            .find(|group| group.class.shares.contains(&key));
        let mut other_masks = OtherGroupMasks::new();
        let group_dirs = groups::group_dirs(kernel, &self.resctrl.mount).unwrap_or_default();
        for dir in group_dirs {
            if own_group.is_some_and(|own_group| own_group.path == dir) {
                continue;
            }
            let mask = groups::read_schemata(kernel, &dir)
                .and_then(|schemata| schemata.mask_of(resctrl_cache.level, resctrl_cache.domain));
            let name = dir.strip_prefix(&self.resctrl.mount).unwrap_or(&dir);
            other_masks.extend(mask.map(|mask| (format!("/{}", name.display()), mask)));
        }
        let mut reasons = explain_occupancy(
            &active_share.share,
            active_share.occupancy_bytes,
            resctrl_cache,
            &other_masks,
        );
        let missing_reading = own_group.and_then(|group| {
            let domain = resctrl_cache.domain;
            missing_traffic(kernel, &group.path, domain, self.resctrl.counted_events)
        });
        reasons.extend(
            missing_reading
                .map(|missing| format!("its traffic is unknown: {}", missing.describe())),
        );
        reasons
    }

    /// Current occupancy and free classes of every last-level cache. Read-only.
    pub fn cache_use(&self, kernel: &dyn Kernel) -> Vec<CacheUse> {
        let Ok(group_dirs) = groups::group_dirs(kernel, &self.resctrl.mount) else {
            return Vec::new();
        };
        let free_classes = self
            .resctrl
            .class_count
            .saturating_sub(group_dirs.len() as u32);
        let occupancy_of_groups = |domain: u32| {
            group_dirs
                .iter()
                .map(|dir| occupancy_bytes(kernel, dir, domain))
                .sum::<Option<u64>>()
        };
        let use_of = |(&domain, &cache): (&u32, &CacheId)| CacheUse {
            cache,
            occupancy_bytes: self
                .resctrl
                .counted_events
                .has_occupancy
                .then(|| occupancy_of_groups(domain))
                .flatten(),
            free_classes: self.resctrl.cache(cache).map(|_| free_classes),
        };
        let unmonitored = |divided: &&ResctrlCache| {
            !self
                .resctrl
                .monitored_caches
                .values()
                .any(|cache| *cache == divided.cache)
        };
        let of_unmonitored = |divided: &ResctrlCache| CacheUse {
            cache: divided.cache,
            occupancy_bytes: None,
            free_classes: Some(free_classes),
        };
        let monitored = self.resctrl.monitored_caches.iter().map(use_of);
        monitored
            .chain(
                self.resctrl
                    .caches
                    .iter()
                    .filter(unmonitored)
                    .map(of_unmonitored),
            )
            .collect()
    }

    /// Memory traffic since the last window, of our groups, and of every monitored cache as the sum of all groups; and
    /// the energy and the stalls of our groups. Read-only.
    pub fn traffic_counts(&mut self, kernel: &dyn Kernel) -> Vec<(CounterScope, EventCounts)> {
        let earlier = std::mem::take(&mut self.last_readings);
        let mut count = |dir: PathBuf, readings: Readings| {
            // A new group has no earlier reading, and without it this window's sum would miss the group's traffic.
            let no_readings = Readings::new();
            let counts = counts_since(&readings, earlier.get(&dir).unwrap_or(&no_readings));
            self.last_readings.insert(dir, readings);
            counts
        };
        let class_of = |dir: &PathBuf| self.groups.values().find(|group| group.path == *dir);
        let mut traffic: BTreeMap<CounterScope, Option<Readings>> = BTreeMap::new();
        let group_dirs = groups::group_dirs(kernel, &self.resctrl.mount).unwrap_or_default();
        for (&domain, &cache) in &self.resctrl.monitored_caches {
            for group_dir in &group_dirs {
                let dir = cache_dir(group_dir, domain);
                let readings = read_traffic(kernel, &dir, self.resctrl.counted_events);
                let counts = count(dir, readings);
                let group = class_of(group_dir).and_then(|own| own.class.group_of(cache));
                let group = group.map(|group| CounterScope::Group(group, cache));
                for scope in group.into_iter().chain([CounterScope::Cache(cache)]) {
                    add_readings(traffic.entry(scope).or_default(), &counts);
                }
            }
        }
        // Energy and stalls are read only in packages with one last-level cache, to which they belong.
        let mut package_counts: BTreeMap<CounterScope, Option<Readings>> = BTreeMap::new();
        let has_package_events = !self.resctrl.package_events.is_empty();
        let packages = self.resctrl.package_caches.iter();
        for (&package, &cache) in packages.filter(|_| has_package_events) {
            for own_group in self.groups.values() {
                let dir = package_dir(&own_group.path, package);
                let readings = read_package(kernel, &dir);
                let counts = count(dir, readings);
                if let Some(group) = own_group.class.group_of(cache) {
                    let scope = CounterScope::Group(group, cache);
                    add_readings(package_counts.entry(scope).or_default(), &counts);
                }
            }
        }
        for (scope, counts) in package_counts {
            let all_counts = traffic.entry(scope).or_default().get_or_insert_default();
            all_counts.extend(counts.into_iter().flatten());
        }
        traffic
            .into_iter()
            .filter_map(|(scope, counts)| {
                Some((scope, counts.filter(|counts| !counts.is_empty())?))
            })
            .map(|(scope, counts)| (scope, EventCounts::exact(counts)))
            .collect()
    }

    /// Gives counters of traffic to our groups, where they have to be assigned: to limited groups first, because limits
    /// are judged by traffic.
    pub(crate) fn assign_counters(&self, kernel: &dyn Kernel) {
        if self.resctrl.counter_assignment.is_none() {
            return;
        }
        let mut own_groups: Vec<&OwnGroup> = self
            .groups
            .values()
            .filter(|group| !group.class.members.is_empty())
            .collect();
        own_groups.sort_by_key(|group| group.class.bandwidth_limits.is_empty());
        let paths: Vec<PathBuf> = own_groups
            .into_iter()
            .map(|group| group.path.clone())
            .collect();
        assign_counters(kernel, &paths);
    }

    /// Memory traffic of processes since the last call, from all groups, ours and those of others, whose threads belong
    /// to one process each. Read-only.
    pub fn process_traffic(
        &mut self,
        kernel: &dyn Kernel,
        tasks: &[&ManagedThread],
    ) -> BTreeMap<ProcessId, u64> {
        let events = self.resctrl.counted_events;
        if !events.has_total_bytes || self.resctrl.monitored_caches.is_empty() {
            return BTreeMap::new();
        }
        let process_by_thread: BTreeMap<i32, ProcessId> = tasks
            .iter()
            .filter(|task| !task.has_exited)
            .map(|task| (task.thread.tid, task.process))
            .collect();
        let mut bytes_by_process: BTreeMap<ProcessId, u64> = BTreeMap::new();
        let earlier = std::mem::take(&mut self.last_process_readings);
        let groups = list_monitor_groups(kernel, &self.resctrl.mount).unwrap_or_default();
        let with_threads = groups.iter().filter(|group| {
            group.path != Path::new("/") && group.threads.is_some_and(|count| count > 0)
        });
        for group in with_threads.take(MAX_READ_GROUPS) {
            let below = group.path.strip_prefix("/").unwrap_or(&group.path);
            let dir = self.resctrl.mount.join(below);
            // A class also counts the groups below it, which are read on their own.
            let has_groups_below = group.has_class
                && groups
                    .iter()
                    .any(|other| !other.has_class && other.path.starts_with(&group.path));
            let members = groups::read_members(kernel, &dir).unwrap_or_default();
            let mut processes = members.iter().map(|tid| process_by_thread.get(tid));
            let Some(Some(&process)) = processes.next().filter(|_| !has_groups_below) else {
                continue;
            };
            if !processes.all(|other| other == Some(&process)) {
                continue;
            }
            for &domain in self.resctrl.monitored_caches.keys() {
                let cache_dir = cache_dir(&dir, domain);
                let readings = read_traffic(kernel, &cache_dir, events);
                let new_readings = earlier
                    .get(&cache_dir)
                    .map(|earlier| counts_since(&readings, earlier));
                let new_bytes =
                    new_readings.and_then(|counts| counts.get(&CounterEvent::MemoryBytes).copied());
                if let Some(new_bytes) = new_bytes {
                    *bytes_by_process.entry(process).or_default() += new_bytes;
                }
                self.last_process_readings.insert(cache_dir, readings);
            }
        }
        bytes_by_process
    }
}

/// The schemata of a group and its threads; `None` if the schemata cannot be read.
fn read_group(kernel: &dyn Kernel, path: &Path) -> Option<(Schemata, BTreeSet<i32>)> {
    let schemata = groups::read_schemata(kernel, path)?;
    let threads = groups::read_members(kernel, path).unwrap_or_default();
    Some((schemata, threads.into_iter().collect()))
}

/// Those of the members that are in the group: single tasks, and processes with all their threads in the group.
fn members_in_group(
    members: &[ShareMember],
    class: &ServiceClass,
    tasks: &[&ManagedThread],
    group_threads: &BTreeSet<i32>,
) -> Vec<ShareMember> {
    let is_task_in_group = |task: &&&ManagedThread| {
        group_threads.contains(&task.thread.tid) && class.members.contains(&task.task)
    };
    let live_tasks = || {
        tasks
            .iter()
            .filter(|task| !task.has_exited && !task.is_fixed)
    };
    let is_member_in_group = |member: &&ShareMember| match member {
        ShareMember::Task(id) => live_tasks()
            .filter(|task| task.task == *id)
            .any(|task| is_task_in_group(&task)),
        ShareMember::Process(id) => {
            let mut threads = live_tasks().filter(|task| task.process == *id).peekable();
            threads.peek().is_some() && threads.all(|task| is_task_in_group(&task))
        }
    };
    members.iter().filter(is_member_in_group).copied().collect()
}

fn refuse_all(
    items: impl IntoIterator<Item = PlanItem>,
    reason: &RefusalReason,
    message: &str,
) -> Vec<RefusedItem> {
    let refuse = |item| RefusedItem {
        item,
        reason: reason.clone(),
        message: message.to_string(),
    };
    items.into_iter().map(refuse).collect()
}
