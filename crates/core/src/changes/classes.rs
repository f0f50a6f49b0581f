//! From the shares and the limits of bandwidth of a plan to classes of service.
//!
//! Problem: a plan partitions one cache at a time, and limits the traffic of other groups, but a class of service has
//! one mask and one limit for every cache, and a thread is in one class. Method: every thread gets the row of masks and
//! limits of all its groups, and threads with the same row form one class. A class reuses the hardware class in which
//! most of its members already are, so that a change of its masks moves no task. New classes reuse free hardware
//! classes before others are created, because there are few of them (4 to 16). Properties: equal plans give equal
//! classes; a thread without a share is in no class; an impossible share is refused without affecting the others.

use std::collections::BTreeMap;

use super::{ClassLimits, MachineState, MaskConstraints, ServiceClassId, TaskState, nearest_mask};
use crate::{
    CacheId, Capabilities, GroupId, IndexSet, PartitionSupport, Plan, PlanItem, RefusalReason,
    RefusedItem, ShareMember, TaskId, Units,
};

/// A share of the plan: its group and its cache.
pub type ShareKey = (GroupId, CacheId);

/// Threads that have the same limits.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServiceClass {
    /// The shares that form it, in ascending order; several of one cache if groups have the same mask.
    pub shares: Vec<ShareKey>,
    /// The limits of bandwidth that form it, in ascending order.
    pub bandwidth_limits: Vec<ShareKey>,
    /// Ways that its members may fill, and limits of their traffic; a cache in which they have neither is omitted.
    pub limits: ClassLimits,
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
        let shares = self.shares.iter();
        let limits = self.bandwidth_limits.iter();
        shares
            .map(|&(group, cache)| PlanItem::Share(group, cache))
            .chain(limits.map(|&(group, cache)| PlanItem::Bandwidth(group, cache)))
            .collect()
    }
}

fn is_member(members: &[ShareMember], task: &TaskState) -> bool {
    ShareMember::name_task(members, task.task, task.process)
}

/// The masks and limits of a task, each with its group.
#[derive(Default)]
struct LimitRow {
    masks: BTreeMap<CacheId, (GroupId, IndexSet)>,
    bandwidth: BTreeMap<CacheId, (GroupId, u32)>,
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
    let mut rows: Vec<(TaskId, LimitRow)> = state
        .tasks
        .iter()
        .map(|task| (task.task, LimitRow::default()))
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
        let members = state.tasks.iter().zip(&mut rows);
        for (task, (_, row)) in
            members.filter(|(task, _)| task.movable && is_member(&share.members, task))
        {
            if let Some(owner) = &task.class_owner {
                refuse_share(RefusalReason::OwnedByOther, owner.clone());
                continue;
            }
            match row.masks.get(&share.cache) {
                Some((group, other_mask)) if *other_mask != mask => {
                    conflicts.push(format!(
                        "task {} keeps the ways of group {}",
                        task.task.0, group.0
                    ));
                }
                _ => {
                    row.masks.insert(share.cache, (share.group, mask.clone()));
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
    add_bandwidth_limits(plan, state, capabilities, &mut rows, &mut refused_items);
    let mut classes = group_by_row(&rows);
    if let Some(max_classes) = state.limits.max_classes {
        for class in classes.split_off((max_classes as usize).min(classes.len())) {
            let message =
                format!("more combinations of limits than the {max_classes} classes of service");
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

/// Adds the limits of bandwidth to the rows of their members, and refuses impossible ones.
fn add_bandwidth_limits(
    plan: &Plan,
    state: &MachineState,
    capabilities: &Capabilities,
    rows: &mut [(TaskId, LimitRow)],
    refused_items: &mut Vec<RefusedItem>,
) {
    for limit in &plan.bandwidth {
        let mut refuse_limit = |reason, message: String| {
            refused_items.push(RefusedItem {
                item: PlanItem::Bandwidth(limit.group, limit.cache),
                reason,
                message,
            });
        };
        let Some(support) = capabilities.bandwidth_of(limit.cache) else {
            refuse_limit(
                RefusalReason::NotSupported,
                format!("no bandwidth can be limited behind cache {}", limit.cache.0),
            );
            continue;
        };
        let level = support.nearest_level(limit.level);
        if level != limit.level {
            let describe = |level| support.unit.describe(level);
            refuse_limit(
                RefusalReason::NotSupported,
                format!("{} became {}", describe(limit.level), describe(level)),
            );
        }
        let members = state.tasks.iter().zip(&mut *rows);
        for (task, (_, row)) in
            members.filter(|(task, _)| task.movable && is_member(&limit.members, task))
        {
            if let Some(owner) = &task.class_owner {
                refuse_limit(RefusalReason::OwnedByOther, owner.clone());
                continue;
            }
            // A limit at the maximum limits nothing, so it needs no class.
            if level < support.max_level {
                row.bandwidth
                    .entry(limit.cache)
                    .or_insert((limit.group, level));
            }
        }
    }
}

fn group_by_row(rows: &[(TaskId, LimitRow)]) -> Vec<ServiceClass> {
    let mut classes: Vec<ServiceClass> = Vec::new();
    let is_limited = |row: &LimitRow| !row.masks.is_empty() || !row.bandwidth.is_empty();

    for (task, row) in rows.iter().filter(|(_, row)| is_limited(row)) {
        let limits = ClassLimits {
            masks: row
                .masks
                .iter()
                .map(|(&cache, (_, mask))| (cache, mask.clone()))
                .collect(),
            bandwidth: row
                .bandwidth
                .iter()
                .map(|(&cache, &(_, level))| (cache, level))
                .collect(),
        };
        let index = classes
            .iter()
            .position(|class| class.limits == limits)
            .unwrap_or_else(|| {
                classes.push(ServiceClass {
                    limits,
                    ..ServiceClass::default()
                });
                classes.len() - 1
            });
        let class = &mut classes[index];
        class.members.push(*task);
        let shares = row.masks.iter().map(|(&cache, &(group, _))| (group, cache));
        class.shares.extend(shares);
        let bandwidth = row.bandwidth.iter();
        class
            .bandwidth_limits
            .extend(bandwidth.map(|(&cache, &(group, _))| (group, cache)));

        for keys in [&mut class.shares, &mut class.bandwidth_limits] {
            keys.sort_unstable();
            keys.dedup();
        }
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
