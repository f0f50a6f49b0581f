//! Our groups in resctrl, and the way masks that a plan gives them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cachemate_core::{
    ActiveShare, CacheShare, CounterScope, EventCounts, IndexSet, Plan, PlanItem, RefusalReason, RefusedItem,
    ServiceClass, ServiceClassId, ShareKey, ShareMember, Units, WayMasks,
};

use super::groups;
use super::info::{Resctrl, ResctrlCache};
use super::masks::Schemata;
use super::occupancy::{OtherGroupMasks, Traffic, exclusive_ways, explain, occupancy_bytes};
use crate::act::changes::{HostSnapshot, plan_item};
use crate::act::desired_state::refusal;
use crate::kernel::{DirLock, Kernel, ThreadKey};
use crate::safety::journal::{JournalObject, ObjectState};
use crate::safety::object_state::read_state;
use crate::sense::tasks::ManagedThread;

/// Maximum wait for another process's lock on resctrl before the plan's shares are refused for this window.
const PATIENCE: Duration = Duration::from_secs(1);

/// A group that we made.
#[derive(Debug)]
struct OwnGroup {
    path: PathBuf,
    /// The class that it implements; the empty class if only its directory is left.
    class: ServiceClass,
    /// Lock by which other processes recognize that the group's owner is alive.
    _alive: DirLock,
}

impl OwnGroup {
    fn name(&self) -> &std::ffi::OsStr {
        self.path.file_name().unwrap_or_default()
    }
}

/// Controller of the way masks that are ours on this host.
#[derive(Debug)]
pub struct WayController {
    resctrl: Resctrl,
    /// Prefix of our groups' names.
    prefix: String,
    groups: BTreeMap<ServiceClassId, OwnGroup>,
    is_swept: bool,
    /// Traffic by group and domain at the last read.
    traffic: BTreeMap<(String, u32), Traffic>,
}

impl WayController {
    /// A controller of the groups of process `owner`; constructing it changes nothing.
    pub fn new(resctrl: Resctrl, owner: ThreadKey) -> Self {
        WayController {
            resctrl,
            prefix: groups::own_prefix(owner),
            groups: BTreeMap::new(),
            is_swept: false,
            traffic: BTreeMap::new(),
        }
    }

    /// Forgets all groups, after everything has been restored.
    pub fn forget(&mut self) {
        self.groups.clear();
    }

    /// Reads our groups into the snapshot from which changes are derived. If resctrl's lock is unavailable, `plan`
    /// loses its shares of ways, and no group changes. The caller holds the lock until the changes are made; without
    /// `act` no lock is needed, because nothing changes.
    pub(crate) fn read(
        &mut self,
        kernel: &dyn Kernel,
        plan: &mut Plan,
        tasks: &[&ManagedThread],
        reading: &mut HostSnapshot,
        act: bool,
    ) -> Option<DirLock> {
        let of_ways = |share: &CacheShare| matches!(share.units, Units::Ways { .. });
        if !plan.shares.iter().any(of_ways) && self.groups.is_empty() {
            return None;
        }
        let lock = match act.then(|| kernel.lock_dir(&self.resctrl.mount, PATIENCE)).transpose() {
            Ok(lock) => lock,
            Err(error) => {
                let message = format!("{}: {error}", self.resctrl.mount.display());
                let items = plan.shares.iter().filter(|share| of_ways(share));
                let items = items.map(|share| PlanItem::Share(share.group, share.cache));
                reading.refused.extend(refuse_all(items, &RefusalReason::Busy, &message));
                plan.shares.retain(|share| !of_ways(share));
                return None;
            }
        };
        if act && !self.is_swept {
            self.is_swept = true;
            let items =
                |orphan: groups::OrphanGroup| refuse_all([PlanItem::Plan], &RefusalReason::Failed, &orphan.to_string());
            let swept = groups::remove_orphans(kernel, &self.resctrl.mount, &self.prefix).into_iter();
            reading.refused.extend(swept.filter(|orphan| orphan.error.is_some()).flat_map(items));
        }
        self.read_taken(kernel, reading);
        self.read_classes(kernel, reading);
        self.read_members(kernel, plan, tasks, reading);
        lock
    }

    fn read_taken(&self, kernel: &dyn Kernel, reading: &mut HostSnapshot) {
        let mut taken_of = BTreeMap::new();
        for ResctrlCache { cache, level, domain, .. } in &self.resctrl.divided {
            let of_level =
                taken_of.entry(*level).or_insert_with(|| exclusive_ways(kernel, &self.resctrl.mount, *level));
            let reserved: IndexSet = of_level.get(domain).cloned().unwrap_or_default();
            reading.state.reserved_ways.insert(*cache, reserved);
        }
    }

    /// Reads the classes; a group that another process has removed no longer counts.
    fn read_classes(&mut self, kernel: &dyn Kernel, reading: &mut HostSnapshot) {
        let mut gone_groups = Vec::new();
        for (&id, group) in &self.groups {
            let item = plan_item(&group.class);
            let directory = JournalObject::Directory { path: group.path.clone() };
            let dir_state = read_state(kernel, &directory);
            if matches!(dir_state, Ok(ObjectState::Absent)) {
                gone_groups.push(id);
            }
            let Ok(dir_state) = dir_state else { continue };
            reading.objects.insert(directory, (item.clone(), dir_state));
            let object = self.schemata(id);
            let Ok(ObjectState::Text(now)) = read_state(kernel, &object) else {
                reading.add_class(id, WayMasks::new());
                continue;
            };
            let original_masks = match reading.originals.get(&object) {
                Some(ObjectState::Text(plain)) => Schemata::parse(plain).unwrap_or_default(),
                _ => Schemata::default(),
            };
            let text = Schemata::parse(&now).unwrap_or_default();
            let mut masks = WayMasks::new();
            for ResctrlCache { cache, level, domain, .. } in &self.resctrl.divided {
                let (now, original_mask) = (text.mask_of(*level, *domain), original_masks.mask_of(*level, *domain));
                let is_ours = group.class.masks.contains_key(cache)
                    || original_mask.is_some_and(|original_mask| now != Some(original_mask));
                masks.extend(now.filter(|_| is_ours).map(|now| (*cache, now)));
            }
            reading.objects.insert(object, (item, ObjectState::Text(now)));
            reading.add_class(id, masks);
        }
        for id in gone_groups {
            self.groups.remove(&id);
            reading.state.classes.remove(&id);
        }
    }

    /// The groups of the threads that the plan names or that we have moved.
    fn read_members(&self, kernel: &dyn Kernel, plan: &Plan, tasks: &[&ManagedThread], reading: &mut HostSnapshot) {
        for task in tasks.iter().filter(|task| !task.has_exited && !task.is_fixed) {
            let member = |share: &&CacheShare| {
                matches!(share.units, Units::Ways { .. })
                    && (share.members.contains(&ShareMember::Task(task.task))
                        || share.members.contains(&ShareMember::Process(task.process)))
            };
            let object = self.membership(task.pid, task.thread);
            let requested_share = plan.shares.iter().find(member);
            if requested_share.is_none() && !reading.originals.contains_key(&object) {
                continue;
            }
            let item = requested_share.map_or(PlanItem::Plan, |share| PlanItem::Share(share.group, share.cache));
            let group = match read_state(kernel, &object) {
                Ok(ObjectState::Group(group)) => group,
                Ok(_) => continue,
                Err(error) => {
                    reading.refused.push(refusal(kernel, &item, &object, &error));
                    continue;
                }
            };
            let class = self.groups.iter().find(|(_, own_group)| Path::new("/").join(own_group.name()) == group);
            let (class, is_ours) = (class.map(|(id, _)| *id), self.may_move(&group));
            if let Some(state) = reading.task_mut(task.task) {
                state.class = class;
                state.class_owner = (!is_ours).then(|| {
                    let (tid, group) = (task.thread.tid, group.display());
                    format!("thread {tid} is in resctrl group {group}, which belongs to another tool")
                });
            }
            reading.objects.insert(object, (item, ObjectState::Group(group)));
        }
    }

    /// Threads may be moved only from the root group itself (a monitoring group has an owner, too) and between our
    /// groups.
    fn may_move(&self, now: &Path) -> bool {
        let mut parts = now.strip_prefix("/").unwrap_or(now).iter();
        match (parts.next(), parts.next()) {
            (None, _) => true,
            (Some(name), None) => name.to_string_lossy().starts_with(&self.prefix),
            _ => false,
        }
    }

    pub(crate) fn group_path(&self, class: ServiceClassId) -> PathBuf {
        self.resctrl.mount.join(format!("{}{}", self.prefix, class.0))
    }

    pub(crate) fn schemata(&self, class: ServiceClassId) -> JournalObject {
        JournalObject::Schemata { path: self.group_path(class).join("schemata") }
    }

    pub(crate) fn membership(&self, pid: i32, thread: ThreadKey) -> JournalObject {
        JournalObject::Membership { hierarchy: self.resctrl.mount.clone(), pid, thread }
    }

    /// The group of a class, in the form of a thread's membership.
    pub(crate) fn group(&self, class: ServiceClassId) -> ObjectState {
        ObjectState::Group(Path::new("/").join(format!("{}{}", self.prefix, class.0)))
    }

    /// A group's schemata with these masks. Caches that they do not name keep the kernel's default: all ways that no
    /// group uses exclusively.
    ///
    /// # Errors
    /// The group is missing, or its file has unexpected content.
    pub(crate) fn masks_text(
        &self,
        kernel: &dyn Kernel,
        reading: &HostSnapshot,
        class: ServiceClassId,
        masks: &WayMasks,
    ) -> io::Result<ObjectState> {
        let object = self.schemata(class);
        let original_state = reading.originals.get(&object).cloned();
        let original_state = original_state.map_or_else(|| read_state(kernel, &object), Ok)?;
        let ObjectState::Text(original_text) = original_state else { return Err(io::ErrorKind::InvalidData.into()) };
        let mut schemata =
            Schemata::parse(&original_text).map_err(|problem| io::Error::new(io::ErrorKind::InvalidData, problem))?;
        for (cache, mask) in masks {
            if let Some(divided) = self.resctrl.cache(*cache) {
                schemata.set(divided.level, divided.domain, mask);
            }
        }
        Ok(ObjectState::Text(schemata.to_string()))
    }

    /// Registers a group of ours that has just been created.
    pub(crate) fn register_created(&mut self, kernel: &dyn Kernel, class: ServiceClassId) {
        let path = self.group_path(class);
        // No other process can have locked a directory that was just created under resctrl's lock.
        let alive = kernel.lock_dir(&path, Duration::ZERO).unwrap_or_default();
        self.groups.insert(class, OwnGroup { path, class: ServiceClass::default(), _alive: alive });
    }

    /// Forgets a removed group; returns the objects that the journal can drop.
    pub(crate) fn forget_removed(&mut self, class: ServiceClassId) -> [JournalObject; 2] {
        self.groups.remove(&class);
        [JournalObject::Directory { path: self.group_path(class) }, self.schemata(class)]
    }

    /// Sets the class of each group from now on; a group without a class has none.
    pub(crate) fn assign(&mut self, classes: &BTreeMap<ServiceClassId, ServiceClass>) {
        for (id, group) in &mut self.groups {
            group.class = classes.get(id).cloned().unwrap_or_default();
        }
    }

    /// The shares in force, read from the groups: masks, members, occupancy.
    pub fn read_back(&self, kernel: &dyn Kernel, shares: &[CacheShare], tasks: &[&ManagedThread]) -> Vec<ActiveShare> {
        let mut active_shares = Vec::new();
        for group in self.groups.values().filter(|group| !group.class.shares.is_empty()) {
            let Ok(text) = kernel.read(&group.path.join("schemata")) else { continue };
            let Ok(schemata) = Schemata::parse(&text) else { continue };
            let group_threads: BTreeSet<i32> =
                groups::read_members(kernel, &group.path).unwrap_or_default().into_iter().collect();
            for share in shares.iter().filter(|share| group.class.shares.contains(&(share.group, share.cache))) {
                let Some(divided) = self.resctrl.cache(share.cache) else { continue };
                let Some(mask) = schemata.mask_of(divided.level, divided.domain) else { continue };
                let members = members_inside(share, &group.class, tasks, &group_threads);
                if members.is_empty() {
                    continue;
                }
                let occupancy = self.counts_occupancy(divided).filter(|_| group.class.group_of(share.cache).is_some());
                let occupancy = occupancy.and_then(|domain| occupancy_bytes(kernel, &group.path, domain));
                let share = CacheShare { members, units: Units::Ways { mask }, ..share.clone() };
                active_shares.push(ActiveShare {
                    share,
                    pages_in_share: None,
                    fallback_pages: None,
                    occupancy_bytes: occupancy,
                });
            }
        }
        active_shares.sort_by_key(|active_share| (active_share.share.cache, active_share.share.group));
        active_shares
    }

    fn counts_occupancy(&self, resctrl_cache: &ResctrlCache) -> Option<u32> {
        let is_counted =
            self.resctrl.counted_events.occupancy && self.resctrl.monitored.contains_key(&resctrl_cache.domain);
        (is_counted && resctrl_cache.level == cachemate_core::CacheLevel::L3).then_some(resctrl_cache.domain)
    }

    /// The reasons why a share's lines differ from its mask.
    pub fn explain(&self, kernel: &dyn Kernel, active: &ActiveShare) -> Vec<String> {
        let Some(divided) = self.resctrl.cache(active.share.cache) else { return Vec::new() };
        let key: ShareKey = (active.share.group, active.share.cache);
        let own_group = self.groups.values().find(|group| group.class.shares.contains(&key));
        let mut other_masks = OtherGroupMasks::new();
        let names = groups::list_groups(kernel, &self.resctrl.mount).unwrap_or_default();
        for name in std::iter::once("").chain(names.iter().map(String::as_str)) {
            let path = if name.is_empty() { self.resctrl.mount.clone() } else { self.resctrl.mount.join(name) };
            if own_group.is_some_and(|own_group| own_group.path == path) {
                continue;
            }
            let masks = kernel.read(&path.join("schemata")).ok().and_then(|text| Schemata::parse(&text).ok());
            let mask = masks.and_then(|masks| masks.mask_of(divided.level, divided.domain));
            other_masks.extend(mask.map(|mask| (format!("/{name}"), mask)));
        }
        explain(&active.share, active.occupancy_bytes, divided, &other_masks)
    }

    /// Memory traffic since the last window: of our groups, and of every monitored cache as the sum of all groups.
    /// Read-only.
    pub fn traffic_counts(&mut self, kernel: &dyn Kernel) -> Vec<(CounterScope, EventCounts)> {
        let counted_events = self.resctrl.counted_events;
        if !(counted_events.total_bytes || counted_events.local_bytes) {
            return Vec::new();
        }
        let names = groups::list_groups(kernel, &self.resctrl.mount).unwrap_or_default();
        let mut now = BTreeMap::new();
        let mut places = Vec::new();
        for (&domain, &cache) in &self.resctrl.monitored {
            let mut cache_traffic: Option<Traffic> = None;
            for name in std::iter::once("").chain(names.iter().map(String::as_str)) {
                let key = (name.to_string(), domain);
                let read = Traffic::read(kernel, &self.resctrl.mount.join(name), domain, counted_events);
                // A new group has no earlier reading, and without it this window's sum would miss the group's traffic.
                let new_traffic =
                    self.traffic.get(&key).map_or(Traffic::default(), |&earlier| read.difference(earlier));
                now.insert(key, read);
                cache_traffic = Some(cache_traffic.map_or(new_traffic, |sum| sum.sum(new_traffic)));
                let own_group = self.groups.values().find(|group| group.path.ends_with(name) && !name.is_empty());
                if let Some(group) = own_group.and_then(|own_group| own_group.class.group_of(cache)) {
                    places.push((CounterScope::Group(group, cache), new_traffic.counts()));
                }
            }
            places.extend(cache_traffic.map(|sum| (CounterScope::Cache(cache), sum.counts())));
        }
        self.traffic = now;
        places.retain(|(_, counts)| !counts.0.is_empty());
        places.sort_by_key(|(place, _)| *place);
        places
    }
}

/// The members of a share that are in its group: single tasks, and processes of which all threads are in it.
fn members_inside(
    share: &CacheShare,
    class: &ServiceClass,
    tasks: &[&ManagedThread],
    inside: &BTreeSet<i32>,
) -> Vec<ShareMember> {
    let is_in = |task: &&&ManagedThread| inside.contains(&task.thread.tid) && class.members.contains(&task.task);
    let live = || tasks.iter().filter(|task| !task.has_exited && !task.is_fixed);
    let is_inside = |member: &&ShareMember| match member {
        ShareMember::Task(id) => live().filter(|task| task.task == *id).any(|task| is_in(&task)),
        ShareMember::Process(id) => {
            let mut threads = live().filter(|task| task.process == *id).peekable();
            threads.peek().is_some() && threads.all(|task| is_in(&task))
        }
    };
    share.members.iter().filter(is_inside).copied().collect()
}

fn refuse_all(items: impl IntoIterator<Item = PlanItem>, because: &RefusalReason, message: &str) -> Vec<RefusedItem> {
    let refuse = |item| RefusedItem { item, reason: because.clone(), message: message.to_string() };
    items.into_iter().map(refuse).collect()
}
