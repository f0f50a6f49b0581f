//! Groups of our own in resctrl, brought to what a plan says.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use cachemate_core::{
    CacheId, CacheShare, Counts, Item, Member, Place, Plan, Refused, RefusedBecause, ShareHeld, TaskId, Units,
};

use super::classes::{Class, Key, classes, seats};
use super::groups;
use super::info::{Divided, Resctrl};
use super::masks::{Limits, Schemata};
use super::occupancy::{Others, Traffic, explain, occupancy_bytes, taken};
use crate::actuator::{Actuator, Made, Wanted};
use crate::journal::{Object, State};
use crate::kernel::{DirLock, Kernel, ThreadKey};
use crate::restore::read_state;
use crate::tasks::Managed;

/// How long we wait for somebody else's lock on resctrl before the plan's shares are refused for this window.
const PATIENCE: Duration = Duration::from_secs(1);

/// A group that we made.
#[derive(Debug)]
struct OwnGroup {
    path: PathBuf,
    /// What it is for; the empty class where nothing is left of it but the folder.
    class: Class,
    /// Tells others that its owner lives.
    _alive: DirLock,
}

/// The way masks of this host, as far as they are ours.
#[derive(Debug)]
pub struct Ways {
    resctrl: Resctrl,
    /// How our groups are called.
    prefix: String,
    groups: BTreeMap<u32, OwnGroup>,
    swept: bool,
    /// As we last read it back.
    last: BTreeMap<Object, State>,
    /// Traffic by group and domain at the last look.
    traffic: BTreeMap<(String, u32), Traffic>,
}

impl Ways {
    /// Nothing is changed by starting. `owner` is the process whose groups these will be.
    pub fn new(resctrl: Resctrl, owner: ThreadKey) -> Self {
        Ways {
            resctrl,
            prefix: groups::own_prefix(owner),
            groups: BTreeMap::new(),
            swept: false,
            last: BTreeMap::new(),
            traffic: BTreeMap::new(),
        }
    }

    /// Everything has been put back: nothing is ours any more.
    pub fn forget(&mut self) {
        self.groups.clear();
        self.last.clear();
    }

    /// Brings resctrl to the plan's shares of ways: groups, masks, threads, in this order, then removes what is left over.
    pub fn apply(&mut self, kernel: &dyn Kernel, actuator: &mut Actuator, plan: &Plan, tasks: &[&Managed]) -> Made {
        let mut made = Made::default();
        let asked = || plan.shares.iter().filter(|share| matches!(share.units, Units::Ways { .. }));
        if asked().next().is_none() && self.groups.is_empty() {
            return made;
        }
        let _lock = match kernel.lock_dir(&self.resctrl.mount, PATIENCE) {
            Ok(lock) => lock,
            Err(error) => {
                let said = format!("{}: its lock is held by somebody else: {error}", self.resctrl.mount.display());
                let items = asked().map(|share| Item::Share(share.group, share.cache));
                made.refused.extend(refuse_all(items, &RefusedBecause::Busy, &said));
                return made;
            }
        };
        if !self.swept {
            self.swept = true;
            let items = |said: String| refuse_all([Item::Plan], &RefusedBecause::Failed, &said);
            let swept = groups::sweep(kernel, &self.resctrl.mount, &self.prefix).into_iter();
            made.refused.extend(swept.filter(|said| said.contains("not removed")).flat_map(items));
        }
        let (classes, refused) = classes(plan, tasks, &self.limits(kernel));
        made.refused.extend(refused);
        let mut step = Step { kernel, actuator, made, wanted: Vec::new() };
        let seated = self.seat(&mut step, classes);
        let seated = self.set_masks(&mut step, seated);
        self.move_tasks(&mut step, &seated, tasks);
        self.remove_left(&mut step, &seated);
        let Step { mut made, wanted, .. } = step;
        made.note_overridden(&wanted, &self.last);
        self.last.clone_from(&made.held);
        made
    }

    fn limits(&self, kernel: &dyn Kernel) -> BTreeMap<CacheId, Limits> {
        let mut taken_of = BTreeMap::new();
        let mut limits = BTreeMap::new();
        for Divided { cache, level, domain, ways, at_least, contiguous, .. } in &self.resctrl.divided {
            let of_level = taken_of.entry(*level).or_insert_with(|| taken(kernel, &self.resctrl.mount, *level));
            let taken = of_level.get(domain).cloned().unwrap_or_default();
            limits.insert(*cache, Limits { ways: *ways, at_least: *at_least, contiguous: *contiguous, taken });
        }
        limits
    }

    /// Gives every class its group, making those that are not there yet; classes that get none are refused.
    fn seat(&mut self, step: &mut Step<'_>, classes: Vec<Class>) -> BTreeMap<u32, Class> {
        let have = self.groups.iter().map(|(number, group)| (*number, group.class.shares.clone())).collect();
        let numbers = seats(&classes, &have, &[]);
        let seated: BTreeMap<u32, Class> = numbers.into_iter().zip(classes).collect();
        let wanted: Vec<Wanted> = seated
            .iter()
            .map(|(number, class)| {
                let object = Object::Directory { path: self.path(*number) };
                Wanted { item: first_item(class), object, state: State::Present }
            })
            .collect();
        let standing = step.change(wanted);
        let mut kept = BTreeMap::new();
        for (number, class) in seated {
            let path = self.path(number);
            if !standing.contains(&Object::Directory { path: path.clone() }) {
                step.refuse_rest(&class);
                self.groups.remove(&number);
                continue;
            }
            let group = self.groups.entry(number).or_insert_with(|| {
                // Nobody else can hold what was made a moment ago under resctrl's lock.
                let alive = step.kernel.lock_dir(&path, Duration::ZERO).unwrap_or_default();
                OwnGroup { path, class: Class::default(), _alive: alive }
            });
            group.class.shares.clone_from(&class.shares);
            kept.insert(number, class);
        }
        kept
    }

    fn path(&self, number: u32) -> PathBuf {
        self.resctrl.mount.join(format!("{}{number}", self.prefix))
    }

    /// Classes whose masks could not be set are refused: their members would be under somebody else's.
    fn set_masks(&self, step: &mut Step<'_>, seated: BTreeMap<u32, Class>) -> BTreeMap<u32, Class> {
        let originals = step.actuator.originals();
        let mut wanted = Vec::new();
        for (number, class) in &seated {
            let object = Object::Schemata { path: self.path(*number).join("schemata") };
            // What the class says nothing of is as the kernel made it: all ways that nobody holds alone.
            let plain = originals.get(&object).cloned().or_else(|| read_state(step.kernel, &object).ok());
            let Some(State::Text(plain)) = plain else { continue };
            let Ok(mut schemata) = Schemata::parse(&plain) else { continue };
            for (cache, mask) in &class.masks {
                if let Some(divided) = self.resctrl.of(*cache) {
                    schemata.set(divided.level, divided.domain, mask);
                }
            }
            wanted.push(Wanted { item: first_item(class), object, state: State::Text(schemata.to_string()) });
        }
        let set = step.change(wanted);
        let is_set = |number: &u32| set.contains(&Object::Schemata { path: self.path(*number).join("schemata") });
        let (good, bad): (BTreeMap<_, _>, BTreeMap<_, _>) = seated.into_iter().partition(|(n, _)| is_set(n));
        bad.values().for_each(|class| step.refuse_rest(class));
        good
    }

    /// Members go to their groups; threads that the plan no longer puts anywhere go back to where they were.
    fn move_tasks(&mut self, step: &mut Step<'_>, seated: &BTreeMap<u32, Class>, tasks: &[&Managed]) {
        let of_task: BTreeMap<TaskId, (u32, &Class)> = seated
            .iter()
            .flat_map(|(number, class)| class.members.iter().map(move |task| (*task, (*number, class))))
            .collect();
        let originals = step.actuator.originals();
        let mut wanted = Vec::new();
        for task in tasks.iter().filter(|task| !task.exited && !task.fixed) {
            let hierarchy = self.resctrl.mount.clone();
            let object = Object::Membership { hierarchy, pid: task.pid, thread: task.thread };
            match of_task.get(&task.task) {
                Some((number, class)) => match read_state(step.kernel, &object) {
                    Ok(State::Group(now)) if !self.may_move(&now) => {
                        let said = format!(
                            "thread {} is in resctrl group {}, which is somebody else's",
                            task.thread.tid,
                            now.display()
                        );
                        let items = class.shares.iter().map(|&(group, cache)| Item::Share(group, cache));
                        step.made.refused.extend(refuse_all(items, &RefusedBecause::OwnedByAnother, &said));
                    }
                    // What cannot be read is refused by the change itself.
                    _ => {
                        let state = State::Group(Path::new("/").join(format!("{}{number}", self.prefix)));
                        wanted.push(Wanted { item: first_item(class), object, state });
                    }
                },
                None => {
                    let state = originals.get(&object).cloned();
                    wanted.extend(state.map(|state| Wanted { item: Item::Plan, object, state }));
                }
            }
        }
        step.change(wanted);
        for (number, class) in seated {
            if let Some(group) = self.groups.get_mut(number) {
                group.class.clone_from(class);
            }
        }
    }

    /// Only from the root group itself (a monitoring group is somebody's too) and between groups of ours.
    fn may_move(&self, now: &Path) -> bool {
        let mut parts = now.strip_prefix("/").unwrap_or(now).iter();
        match (parts.next(), parts.next()) {
            (None, _) => true,
            (Some(name), None) => name.to_string_lossy().starts_with(&self.prefix),
            _ => false,
        }
    }

    fn remove_left(&mut self, step: &mut Step<'_>, seated: &BTreeMap<u32, Class>) {
        let left: Vec<u32> = self.groups.keys().copied().filter(|number| !seated.contains_key(number)).collect();
        if left.is_empty() {
            return;
        }
        let absent = |number: &u32| {
            let object = Object::Directory { path: self.path(*number) };
            Wanted { item: Item::Plan, object, state: State::Absent }
        };
        let gone = step.change(left.iter().map(absent).collect());
        let mut forgotten = Vec::new();
        for number in left {
            let path = self.path(number);
            let directory = Object::Directory { path: path.clone() };
            if gone.contains(&directory) {
                forgotten.extend([directory, Object::Schemata { path: path.join("schemata") }]);
                self.groups.remove(&number);
            } else if let Some(group) = self.groups.get_mut(&number) {
                group.class = Class::default();
            }
        }
        step.made.held.retain(|object, _| !forgotten.contains(object));
        step.actuator.forget(&forgotten);
    }

    /// The shares that hold, from what the groups say now: masks, members, occupancy.
    pub fn read_back(&self, kernel: &dyn Kernel, shares: &[CacheShare], tasks: &[&Managed]) -> Vec<ShareHeld> {
        let mut held = Vec::new();
        for group in self.groups.values().filter(|group| !group.class.shares.is_empty()) {
            let Ok(text) = kernel.read(&group.path.join("schemata")) else { continue };
            let Ok(schemata) = Schemata::parse(&text) else { continue };
            let inside: BTreeSet<i32> = groups::members(kernel, &group.path).unwrap_or_default().into_iter().collect();
            for share in shares.iter().filter(|share| group.class.shares.contains(&(share.group, share.cache))) {
                let Some(divided) = self.resctrl.of(share.cache) else { continue };
                let Some(mask) = schemata.mask(divided.level, divided.domain) else { continue };
                let members = members_inside(share, &group.class, tasks, &inside);
                if members.is_empty() {
                    continue;
                }
                let occupancy = self.counts_occupancy(divided).filter(|_| group.class.group_of(share.cache).is_some());
                let occupancy = occupancy.and_then(|domain| occupancy_bytes(kernel, &group.path, domain));
                let share = CacheShare { members, units: Units::Ways { mask }, ..share.clone() };
                held.push(ShareHeld { share, pages_inside: None, fallback_pages: None, occupancy_bytes: occupancy });
            }
        }
        held.sort_by_key(|held| (held.share.cache, held.share.group));
        held
    }

    fn counts_occupancy(&self, divided: &Divided) -> Option<u32> {
        let counted = self.resctrl.counted.occupancy && self.resctrl.monitored.contains_key(&divided.domain);
        (counted && divided.level == cachemate_core::Level::L3).then_some(divided.domain)
    }

    /// Why a share's lines are not exactly what its mask says.
    pub fn explain(&self, kernel: &dyn Kernel, held: &ShareHeld) -> Vec<String> {
        let Some(divided) = self.resctrl.of(held.share.cache) else { return Vec::new() };
        let key: Key = (held.share.group, held.share.cache);
        let own = self.groups.values().find(|group| group.class.shares.contains(&key));
        let mut others = Others::new();
        let names = groups::names(kernel, &self.resctrl.mount).unwrap_or_default();
        for name in std::iter::once("").chain(names.iter().map(String::as_str)) {
            let path = if name.is_empty() { self.resctrl.mount.clone() } else { self.resctrl.mount.join(name) };
            if own.is_some_and(|own| own.path == path) {
                continue;
            }
            let masks = kernel.read(&path.join("schemata")).ok().and_then(|text| Schemata::parse(&text).ok());
            let mask = masks.and_then(|masks| masks.mask(divided.level, divided.domain));
            others.extend(mask.map(|mask| (format!("/{name}"), mask)));
        }
        explain(&held.share, held.occupancy_bytes, divided, &others)
    }

    /// Memory traffic since the last look: of our groups, and of every monitored cache as the sum of all groups. Read-only.
    pub fn places(&mut self, kernel: &dyn Kernel) -> Vec<(Place, Counts)> {
        let counted = self.resctrl.counted;
        if !(counted.total_bytes || counted.local_bytes) {
            return Vec::new();
        }
        let names = groups::names(kernel, &self.resctrl.mount).unwrap_or_default();
        let mut now = BTreeMap::new();
        let mut places = Vec::new();
        for (&domain, &cache) in &self.resctrl.monitored {
            let mut whole: Option<Traffic> = None;
            for name in std::iter::once("").chain(names.iter().map(String::as_str)) {
                let key = (name.to_string(), domain);
                let read = Traffic::read(kernel, &self.resctrl.mount.join(name), domain, counted);
                // A group that is new has no earlier reading: this window's sum would miss what it moved.
                let since = self.traffic.get(&key).map_or(Traffic::default(), |&then| read.since(then));
                now.insert(key, read);
                whole = Some(whole.map_or(since, |sum| sum.and(since)));
                let own = self.groups.values().find(|group| group.path.ends_with(name) && !name.is_empty());
                if let Some(group) = own.and_then(|own| own.class.group_of(cache)) {
                    places.push((Place::Group(group, cache), since.counts()));
                }
            }
            places.extend(whole.map(|sum| (Place::Cache(cache), sum.counts())));
        }
        self.traffic = now;
        places.retain(|(_, counts)| !counts.0.is_empty());
        places.sort_by_key(|(place, _)| *place);
        places
    }
}

/// The members of a share that are in its group: tasks by themselves, a process if all its threads are.
fn members_inside(share: &CacheShare, class: &Class, tasks: &[&Managed], inside: &BTreeSet<i32>) -> Vec<Member> {
    let is_in = |task: &&&Managed| inside.contains(&task.thread.tid) && class.members.contains(&task.task);
    let live = || tasks.iter().filter(|task| !task.exited && !task.fixed);
    let holds = |member: &&Member| match member {
        Member::Task(id) => live().filter(|task| task.task == *id).any(|task| is_in(&task)),
        Member::Process(id) => {
            let mut threads = live().filter(|task| task.process == *id).peekable();
            threads.peek().is_some() && threads.all(|task| is_in(&task))
        }
    };
    share.members.iter().filter(holds).copied().collect()
}

/// One application of a plan under way.
struct Step<'a> {
    kernel: &'a dyn Kernel,
    actuator: &'a mut Actuator,
    made: Made,
    wanted: Vec<Wanted>,
}

impl Step<'_> {
    /// Makes some changes; answers with the objects that stand now, as wanted or as the kernel made them.
    fn change(&mut self, wanted: Vec<Wanted>) -> BTreeSet<Object> {
        let mut made = self.actuator.change(self.kernel, &wanted);
        let stand = made.held.keys().cloned().collect();
        self.made.refused.append(&mut made.refused);
        self.made.found.append(&mut made.found);
        self.made.held.append(&mut made.held);
        self.made.calls += made.calls;
        self.wanted.extend(wanted);
        stand
    }

    /// The actuator has refused a class by its first share: the others for the same reason.
    fn refuse_rest(&mut self, class: &Class) {
        let first = first_item(class);
        let Some(said) = self.made.refused.iter().rev().find(|refused| refused.item == first).cloned() else { return };
        let rest = class.shares.iter().skip(1).map(|&(group, cache)| Item::Share(group, cache));
        self.made.refused.extend(refuse_all(rest, &said.because, &said.said));
    }
}

fn first_item(class: &Class) -> Item {
    class.shares.first().map_or(Item::Plan, |&(group, cache)| Item::Share(group, cache))
}

fn refuse_all(items: impl IntoIterator<Item = Item>, because: &RefusedBecause, said: &str) -> Vec<Refused> {
    let refuse = |item| Refused { item, because: because.clone(), said: said.to_string() };
    items.into_iter().map(refuse).collect()
}
