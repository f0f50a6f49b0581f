//! Making a list, and undoing what was made.

use std::collections::BTreeSet;

use super::{Change, ChangeId};
use crate::{PlanItem, RefusedItem};

/// A change that does not fit the state it is made in.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("cannot {change}: {mismatch}")]
pub struct StaleChange {
    /// The change in words.
    pub change: String,
    /// The mismatch between the state and the change.
    pub mismatch: &'static str,
}

/// The outcome of one change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ChangeOutcome<E> {
    /// It was made.
    Done,
    /// It was tried, and this went wrong.
    Failed(E),
    /// Not tried: this change, on which it depends, failed.
    Skipped(ChangeId),
}

/// Makes a list in its order. What depends on a change that failed is skipped, everything else is tried.
pub fn run<E>(list: &[Change], mut make: impl FnMut(&Change) -> Result<(), E>) -> Vec<ChangeOutcome<E>> {
    let mut all: Vec<ChangeOutcome<E>> = Vec::with_capacity(list.len());
    for change in list {
        let failed = change.depends_on.iter().find_map(|&needed| match all.get(needed.0 as usize) {
            Some(ChangeOutcome::Failed(_)) => Some(needed),
            Some(ChangeOutcome::Skipped(because)) => Some(*because),
            _ => None,
        });
        all.push(match failed {
            Some(because) => ChangeOutcome::Skipped(because),
            None => make(change).map_or_else(ChangeOutcome::Failed, |()| ChangeOutcome::Done),
        });
    }
    all
}

/// Refused lines of the plan: for each line, the first of its changes that failed, or the failed change that one of
/// them depends on. Each line occurs once.
pub fn refused_items(list: &[Change], outcomes: &[ChangeOutcome<RefusedItem>]) -> Vec<RefusedItem> {
    let mut reported: BTreeSet<PlanItem> = BTreeSet::new();
    let mut lines = Vec::new();
    for (change, outcome) in list.iter().zip(outcomes) {
        let why = match outcome {
            ChangeOutcome::Done => continue,
            ChangeOutcome::Failed(why) => why,
            ChangeOutcome::Skipped(because) => match outcomes.get(because.0 as usize) {
                Some(ChangeOutcome::Failed(why)) => why,
                _ => continue,
            },
        };
        let items = change.items.iter().filter(|item| reported.insert((*item).clone()));
        lines.extend(items.map(|item| RefusedItem { item: item.clone(), ..why.clone() }));
    }
    lines
}

/// The list that undoes the changes of `made`, which are some or all of one list: the inverses, the last one first. What
/// depended on a change is undone before the change is.
pub fn undo(applied: &[Change]) -> Vec<Change> {
    let mut undone: Vec<Change> = Vec::with_capacity(applied.len());
    for (index, change) in applied.iter().rev().enumerate() {
        let dependents = applied.iter().rev().take(index).enumerate();
        let dependents = dependents.filter(|(_, later)| later.depends_on.contains(&change.id));
        let after = dependents.map(|(place, _)| ChangeId(place as u32)).collect();
        let (id, items) = (ChangeId(index as u32), change.items.clone());
        undone.push(Change { id, items, depends_on: after, kind: change.kind.inverse() });
    }
    undone
}
