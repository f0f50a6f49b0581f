//! From the shares of a plan to classes of service: pure.
//!
//! Problem: a plan divides one cache at a time, a class of service has one mask for every cache and a thread is in one
//! class. Method: every thread gets the row of masks of all shares that it is in; threads with the same row are one class,
//! as in the simulator. A class keeps the group that it had, so that a change of its masks moves nobody; classes that are
//! new take over groups that are left before new ones are made, as classes are few (4 to 16).
//! Properties: same plan, same classes; whoever is in no share is in no class; a share that cannot be had is refused and
//! the others stand.

use std::collections::BTreeMap;

use cachemate_core::{
    CacheId, CacheShare, GroupId, IndexSet, Item, Member, Plan, Refused, RefusedBecause, TaskId, Units,
};

use super::masks::{Limits, fit};
use crate::tasks::Managed;

/// A share of the plan: its group and its cache.
pub type Key = (GroupId, CacheId);

/// Threads under the same masks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Class {
    /// Shares that make it up, ascending; more than one of a cache where groups have the same mask.
    pub shares: Vec<Key>,
    pub masks: BTreeMap<CacheId, IndexSet>,
    /// In order of arrival.
    pub members: Vec<TaskId>,
}

impl Class {
    /// The one group whose share of this cache it is; `None` where several have the same mask and cannot be told apart.
    pub fn group_of(&self, cache: CacheId) -> Option<GroupId> {
        let mut groups = self.shares.iter().filter(|(_, of)| *of == cache).map(|(group, _)| *group);
        groups.next().filter(|_| groups.next().is_none())
    }
}

/// Is this task a member?
pub fn is_member(share: &CacheShare, task: &Managed) -> bool {
    share.members.contains(&Member::Task(task.task)) || share.members.contains(&Member::Process(task.process))
}

/// The classes of a plan, in order of their first member's arrival, and what cannot be done as asked.
pub fn classes(plan: &Plan, tasks: &[&Managed], limits: &BTreeMap<CacheId, Limits>) -> (Vec<Class>, Vec<Refused>) {
    let mut refused = Vec::new();
    let mut rows: BTreeMap<TaskId, BTreeMap<CacheId, (GroupId, IndexSet)>> = BTreeMap::new();
    for share in &plan.shares {
        let Units::Ways { mask } = &share.units else { continue };
        let mut refuse = |because, said: String| {
            refused.push(Refused { item: Item::Share(share.group, share.cache), because, said });
        };
        let Some(limits) = limits.get(&share.cache) else {
            refuse(RefusedBecause::NotSupported, format!("cache {} cannot be divided by ways", share.cache.0));
            continue;
        };
        let mask = match fit(mask, limits) {
            Err(said) => {
                refuse(RefusedBecause::NotSupported, said);
                continue;
            }
            Ok((mask, changed)) => {
                changed.into_iter().for_each(|said| refuse(RefusedBecause::NotSupported, said));
                mask
            }
        };
        let mut twice = None;
        for task in tasks.iter().filter(|task| !task.exited && !task.fixed && is_member(share, task)) {
            let row = rows.entry(task.task).or_default();
            match row.get(&share.cache) {
                Some((group, other)) if *other != mask => twice = Some((task.task, *group)),
                _ => {
                    row.insert(share.cache, (share.group, mask.clone()));
                }
            }
        }
        if let Some((task, group)) = twice {
            let said = format!("task {} keeps the ways of group {} in this cache", task.0, group.0);
            refuse(RefusedBecause::Busy, said);
        }
    }
    (by_row(&rows), refused)
}

fn by_row(rows: &BTreeMap<TaskId, BTreeMap<CacheId, (GroupId, IndexSet)>>) -> Vec<Class> {
    let mut classes: Vec<Class> = Vec::new();
    for (&task, row) in rows {
        let masks: BTreeMap<CacheId, IndexSet> = row.iter().map(|(&cache, (_, mask))| (cache, mask.clone())).collect();
        let at = classes.iter().position(|class| class.masks == masks).unwrap_or_else(|| {
            classes.push(Class { masks, ..Class::default() });
            classes.len() - 1
        });
        let class = &mut classes[at];
        class.members.push(task);
        class.shares.extend(row.iter().map(|(&cache, &(group, _))| (group, cache)));
        class.shares.sort_unstable();
        class.shares.dedup();
    }
    classes
}

/// Which group (by number) each class gets: its own of before, one that is left, a new one. `have` are the groups that
/// there are with the shares that they were made for; numbers in `avoid` are taken by others.
pub fn seats(classes: &[Class], have: &BTreeMap<u32, Vec<Key>>, avoid: &[u32]) -> Vec<u32> {
    let mut seats: Vec<Option<u32>> = vec![None; classes.len()];
    let mut left: Vec<u32> = have.keys().copied().collect();
    for (class, seat) in classes.iter().zip(&mut seats) {
        if let Some(at) = left.iter().position(|number| have.get(number) == Some(&class.shares)) {
            *seat = Some(left.remove(at));
        }
    }
    let mut left = left.into_iter();
    let mut new = (0..).filter(|number| !have.contains_key(number) && !avoid.contains(number));
    let seat = |seat: Option<u32>| seat.or_else(|| left.next()).or_else(|| new.next());
    seats.into_iter().filter_map(seat).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::FakeHost;
    use crate::rules::{Action, Rule};
    use crate::tasks::Tasks;
    use cachemate_core::{ProcessId, Window};

    fn tasks(count: i32) -> Tasks {
        let host = FakeHost::default();
        for at in 0..count {
            host.thread(10 + at / 2 * 2, 10 + at, 1, "0-3");
        }
        let mut tasks = Tasks::default();
        tasks.look(&host, &[Rule { action: Action::Manage(None), ..Rule::default() }], 0).unwrap();
        tasks
    }

    fn share(group: u32, member: Member, cache: u32, mask: &str) -> CacheShare {
        let units = Units::Ways { mask: mask.parse().unwrap() };
        CacheShare { group: GroupId(group), members: vec![member], cache: CacheId(cache), units }
    }

    fn of(shares: Vec<CacheShare>) -> (Vec<Class>, Vec<Refused>) {
        let plan = Plan { shares, ..Plan::idle(Window::Time { ns: 1 }) };
        let limits = Limits { ways: 8, at_least: 1, contiguous: true, taken: IndexSet::default() };
        let limits = BTreeMap::from([(CacheId(0), limits.clone()), (CacheId(1), limits)]);
        classes(&plan, &tasks(6).all(), &limits)
    }

    fn shown(classes: &[Class]) -> Vec<(Vec<u32>, String)> {
        let masks = |class: &Class| class.masks.iter().map(|(c, m)| format!("{}:{m} ", c.0)).collect::<String>();
        classes.iter().map(|class| (class.members.iter().map(|t| t.0).collect(), masks(class))).collect()
    }

    /// Is a class a row of masks over all caches, of threads and of whole processes, equal rows being one?
    #[test]
    fn threads_with_the_same_row_of_masks_are_one_class() {
        let process = |id| Member::Process(ProcessId(id));
        let (classes, refused) = of(vec![
            share(0, process(0), 0, "0-3"),
            share(1, process(1), 0, "4-7"),
            share(1, process(1), 1, "0"),
            share(2, Member::Task(TaskId(4)), 0, "0-3"),
        ]);
        assert_eq!(refused, []);
        let want = [(vec![0, 1, 4], "0:0-3 ".to_string()), (vec![2, 3], "0:4-7 1:0 ".to_string())];
        assert_eq!(shown(&classes), want);
        assert_eq!(classes[0].group_of(CacheId(0)), None, "two groups with one mask are not told apart");
        assert_eq!(classes[1].group_of(CacheId(1)), Some(GroupId(1)));
    }

    /// Does a share that cannot be had leave the others standing, and is each told why?
    #[test]
    fn what_cannot_be_had_is_told_and_the_rest_stands() {
        let task = |id| Member::Task(TaskId(id));
        let (classes, refused) = of(vec![
            share(0, task(0), 9, "0"),
            share(1, task(1), 0, "12"),
            share(2, task(2), 0, "0-1,4"),
            share(3, task(2), 0, "7"),
        ]);
        assert_eq!(shown(&classes), [(vec![2], "0:0-1 ".to_string())]);
        let said: Vec<(u32, &str)> = refused
            .iter()
            .map(|refused| match &refused.item {
                Item::Share(group, _) => (group.0, refused.said.as_str()),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(
            said,
            [
                (0, "cache 9 cannot be divided by ways"),
                (1, "ways 12: the hardware takes 1 or more of ways 0-7, in one piece"),
                (2, "ways 0-1,4 became 0-1: the hardware takes 1 or more of ways 0-7, in one piece"),
                (3, "task 2 keeps the ways of group 2 in this cache"),
            ]
        );
    }

    /// Does a class keep its group when others come and go, and take what is left before anything new is made?
    #[test]
    fn groups_are_kept_then_taken_over_then_made() {
        let class = |group| Class { shares: vec![(GroupId(group), CacheId(0))], ..Class::default() };
        let key = |group| vec![(GroupId(group), CacheId(0))];
        let have = BTreeMap::from([(0, key(7)), (1, key(8)), (4, key(9))]);
        assert_eq!(seats(&[class(9), class(5), class(8), class(6), class(3)], &have, &[2]), [4, 0, 1, 3, 5]);
        assert_eq!(seats(&[], &have, &[]), [0; 0]);
    }
}
