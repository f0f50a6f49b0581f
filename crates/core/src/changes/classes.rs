//! From the shares of a plan to classes of service.
//!
//! Problem: a plan partitions one cache at a time, but a class of service has one mask for every cache, and a thread is
//! in one class. Method: every thread gets the row of masks of all its shares, and threads with the same row form one
//! class. A class reuses the hardware class in which most of its members already are, so that a change of its masks
//! moves no task. New classes reuse free hardware classes before others are created, because there are few of them (4
//! to 16). Properties: equal plans give equal classes; a thread without a share is in no class; an impossible share is
//! refused without affecting the others.

use std::collections::BTreeMap;

use super::{MachineState, MaskConstraints, ServiceClassId, TaskState, WayMasks, nearest_mask};
use crate::{
    CacheId, CacheShare, Capabilities, GroupId, IndexSet, PartitionSupport, Plan, PlanItem,
    RefusalReason, RefusedItem, ShareMember, TaskId, Units,
};

/// A share of the plan: its group and its cache.
pub type ShareKey = (GroupId, CacheId);

/// Threads that have the same masks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServiceClass {
    /// The shares that form it, in ascending order; several of one cache if groups have the same mask.
    pub shares: Vec<ShareKey>,
    /// Ways that its members may fill; a cache in which they have no share is omitted.
    pub masks: WayMasks,
    /// Members in order of arrival.
    pub members: Vec<TaskId>,
}

impl ServiceClass {
    /// `None` also if several groups have the same mask, because they cannot be distinguished.
    pub fn group_of(&self, cache: CacheId) -> Option<GroupId> {
        let mut groups = self
            .shares
            .iter()
            .filter(|(_, shared_cache)| *shared_cache == cache)
            .map(|(group, _)| *group);
        groups.next().filter(|_| groups.next().is_none())
    }

    pub(super) fn items(&self) -> Vec<PlanItem> {
        self.shares
            .iter()
            .map(|&(group, cache)| PlanItem::Share(group, cache))
            .collect()
    }
}

fn is_member(share: &CacheShare, task: &TaskState) -> bool {
    share.members.contains(&ShareMember::Task(task.task))
        || share.members.contains(&ShareMember::Process(task.process))
}

fn find_mask_constraints(
    cache: CacheId,
    state: &MachineState,
    capabilities: &Capabilities,
) -> Option<MaskConstraints> {
    capabilities
        .partitions_of(cache)
        .find_map(|partition| match *partition {
            PartitionSupport::Ways {
                ways,
                min_ways: at_least,
                contiguous,
                ..
            } => {
                let reserved_ways = state.reserved_ways.get(&cache).cloned().unwrap_or_default();
                Some(MaskConstraints {
                    ways,
                    min_ways: at_least,
                    must_be_contiguous: contiguous,
                    reserved_ways,
                })
            }
            PartitionSupport::Colors { .. } => None,
        })
}

/// Classes are in order of their first member's arrival; items that are impossible as requested are
/// refused.
pub(super) fn build_classes(
    plan: &Plan,
    state: &MachineState,
    capabilities: &Capabilities,
) -> (Vec<ServiceClass>, Vec<RefusedItem>) {
    let mut refused_items = Vec::new();
    let mut mask_rows: Vec<(TaskId, BTreeMap<CacheId, (GroupId, IndexSet)>)> = state
        .tasks
        .iter()
        .map(|task| (task.task, BTreeMap::new()))
        .collect();
    for share in &plan.shares {
        let Units::Ways { mask } = &share.units else {
            continue;
        };
        let mut refuse_share = |reason, refusal_text: String| {
            refused_items.push(RefusedItem {
                item: PlanItem::Share(share.group, share.cache),
                reason,
                message: refusal_text,
            });
        };
        let Some(limits) = find_mask_constraints(share.cache, state, capabilities) else {
            refuse_share(
                RefusalReason::NotSupported,
                format!("cache {} cannot be divided by ways", share.cache.0),
            );
            continue;
        };
        let mask = match nearest_mask(mask, &limits) {
            Err(unsupported_mask) => {
                refuse_share(RefusalReason::NotSupported, unsupported_mask.to_string());
                continue;
            }
            Ok((mask, adjustment)) => {
                adjustment.into_iter().for_each(|refusal_text| {
                    refuse_share(RefusalReason::NotSupported, refusal_text)
                });
                mask
            }
        };
        let mut conflicts: Vec<String> = Vec::new();
        let members = state.tasks.iter().zip(&mut mask_rows);
        for (task, (_, row)) in members.filter(|(task, _)| task.movable && is_member(share, task)) {
            if let Some(owner) = &task.class_owner {
                refuse_share(RefusalReason::OwnedByOther, owner.clone());
                continue;
            }
            match row.get(&share.cache) {
                Some((group, other_mask)) if *other_mask != mask => {
                    conflicts.push(format!(
                        "task {} keeps the ways of group {}",
                        task.task.0, group.0
                    ));
                }
                _ => {
                    row.insert(share.cache, (share.group, mask.clone()));
                }
            }
        }
        if !conflicts.is_empty() {
            refuse_share(
                RefusalReason::Busy,
                format!("{} in this cache", conflicts.join(", ")),
            );
        }
    }
    let mut classes = group_by_row(&mask_rows);
    if let Some(max_classes) = state.limits.max_classes {
        for class in classes.split_off((max_classes as usize).min(classes.len())) {
            let message =
                format!("more combinations of masks than the {max_classes} classes of service");
            let refuse_for_capacity = |item| RefusedItem {
                item,
                reason: RefusalReason::NoCapacity,
                message: message.clone(),
            };
            refused_items.extend(class.items().into_iter().map(refuse_for_capacity));
        }
    }
    (classes, refused_items)
}

fn group_by_row(rows: &[(TaskId, BTreeMap<CacheId, (GroupId, IndexSet)>)]) -> Vec<ServiceClass> {
    let mut classes: Vec<ServiceClass> = Vec::new();
    for (task, row) in rows.iter().filter(|(_, row)| !row.is_empty()) {
        let masks: WayMasks = row
            .iter()
            .map(|(&cache, (_, mask))| (cache, mask.clone()))
            .collect();
        let index = classes
            .iter()
            .position(|class| class.masks == masks)
            .unwrap_or_else(|| {
                classes.push(ServiceClass {
                    masks,
                    ..ServiceClass::default()
                });
                classes.len() - 1
            });
        let class = &mut classes[index];
        class.members.push(*task);
        class
            .shares
            .extend(row.iter().map(|(&cache, &(group, _))| (group, cache)));
        class.shares.sort_unstable();
        class.shares.dedup();
    }
    classes
}

/// The hardware class that contains most of a class's members, or a free one, or a new one.
pub fn assign_class_ids(classes: &[ServiceClass], state: &MachineState) -> Vec<ServiceClassId> {
    let mut member_counts: BTreeMap<(usize, ServiceClassId), u32> = BTreeMap::new();
    for (index, class) in classes.iter().enumerate() {
        let current_classes = class
            .members
            .iter()
            .filter_map(|task| state.task(*task)?.class);
        let live_classes = current_classes.filter(|place| state.classes.contains_key(place));
        live_classes.for_each(|place| *member_counts.entry((index, place)).or_default() += 1);
    }
    let mut candidates: Vec<((usize, ServiceClassId), u32)> = member_counts.into_iter().collect();
    candidates.sort_by_key(|&(candidate, members)| (std::cmp::Reverse(members), candidate));
    let mut assigned_ids: Vec<Option<ServiceClassId>> = vec![None; classes.len()];
    let mut free_ids: Vec<ServiceClassId> = state.classes.keys().copied().collect();
    for ((index, candidate_id), _) in candidates {
        if assigned_ids[index].is_none()
            && let Some(free_index) = free_ids
                .iter()
                .position(|class_id| *class_id == candidate_id)
        {
            assigned_ids[index] = Some(free_ids.remove(free_index));
        }
    }
    let mut remaining_ids = free_ids.into_iter();
    let mut new_ids = (0..)
        .map(ServiceClassId)
        .filter(|class| !state.classes.contains_key(class));
    let assign_id = |seat: Option<ServiceClassId>| {
        seat.or_else(|| remaining_ids.next())
            .or_else(|| new_ids.next())
    };
    assigned_ids.into_iter().filter_map(assign_id).collect()
}
