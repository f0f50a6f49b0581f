//! Who descends from whom, also through processes that have ended.
//!
//! Problem: a child inherits the CPUs and the class that its parent has at that instant, and the kernel forgets the
//! parent when it ends: the grandchild of a double fork (`daemon`, `setsid`, `nohup`) is then a child of process 1.
//! Method: births are recorded as the kernel reports them. An ended process stays in the tree as long as it has a
//! living descendant. Properties: memory in proportion to the living processes; beyond a bound, or after a loss of
//! events, the record says that it is incomplete, and a caller falls back on what `/proc` shows.

use std::collections::BTreeMap;

use crate::kernel::process_events::ProcessEvent;

/// Maximum number of processes in the tree, beyond which it is forgotten.
const MAX_NODES: usize = 200_000;

/// The ancestors of a process, as their births were recorded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordedAncestry {
    /// Nearest first; also those that have ended.
    pub ancestors: Vec<i32>,
    /// The time, in clock ticks since the boot, from which no birth is missing; `None` if one may be.
    pub complete_since_ticks: Option<u64>,
}

#[derive(Debug)]
struct LineageNode {
    pid: i32,
    /// `None` if it was born before the record began.
    parent: Option<u64>,
    child_count: u32,
    /// `None` if it was born before the record began.
    live_threads: Option<u32>,
    is_alive: bool,
}

/// The tree of the processes that were born since the record began.
#[derive(Debug, Default)]
pub struct Lineage {
    nodes: BTreeMap<u64, LineageNode>,
    live_nodes: BTreeMap<i32, u64>,
    next_node: u64,
    complete_since_ticks: Option<u64>,
}

impl Lineage {
    /// A record that begins at this time.
    pub fn new(since_ticks: u64) -> Self {
        Lineage {
            complete_since_ticks: Some(since_ticks),
            ..Lineage::default()
        }
    }

    /// Forgets everything, because events were lost.
    pub fn forget(&mut self) {
        *self = Lineage {
            next_node: self.next_node,
            ..Lineage::default()
        };
    }

    /// Records an event.
    pub fn record(&mut self, event: ProcessEvent) {
        match event {
            ProcessEvent::ProcessStart { parent_pid, pid } => {
                let parent = match self.live_nodes.get(&parent_pid) {
                    Some(parent) => *parent,
                    None => self.add_node(parent_pid, None, None),
                };
                if let Some(reused) = self.live_nodes.remove(&pid) {
                    self.end_node(reused);
                }
                self.add_node(pid, Some(parent), Some(1));
            }
            ProcessEvent::ThreadStart { pid, .. } => {
                if let Some(live_threads) = self.live_threads_of(pid) {
                    *live_threads += 1;
                }
            }
            ProcessEvent::Exit { pid, tid } => {
                let has_ended = match self.live_threads_of(pid) {
                    Some(live_threads) => {
                        *live_threads -= 1;
                        *live_threads == 0
                    }
                    None => tid == pid,
                };
                if has_ended && let Some(node) = self.live_nodes.remove(&pid) {
                    self.end_node(node);
                }
            }
            ProcessEvent::ProgramChange { .. } | ProcessEvent::UserChange { .. } => {}
        }
        if self.nodes.len() > MAX_NODES {
            self.forget();
        }
    }

    /// The recorded ancestors of a living process; `None` if its birth was not recorded.
    pub fn ancestry_of(&self, pid: i32) -> Option<RecordedAncestry> {
        let mut next = self.nodes[self.live_nodes.get(&pid)?].parent;
        next?;

        let mut ancestors = Vec::new();
        while let Some(node) = next.and_then(|node| self.nodes.get(&node)) {
            ancestors.push(node.pid);
            next = node.parent;
        }
        Some(RecordedAncestry {
            ancestors,
            complete_since_ticks: self.complete_since_ticks,
        })
    }

    fn live_threads_of(&mut self, pid: i32) -> Option<&mut u32> {
        let node = self.live_nodes.get(&pid)?;
        self.nodes.get_mut(node)?.live_threads.as_mut()
    }

    fn add_node(&mut self, pid: i32, parent: Option<u64>, live_threads: Option<u32>) -> u64 {
        let id = self.next_node;
        self.next_node += 1;
        if let Some(parent) = parent.and_then(|parent| self.nodes.get_mut(&parent)) {
            parent.child_count += 1;
        }
        self.nodes.insert(
            id,
            LineageNode {
                pid,
                parent,
                child_count: 0,
                live_threads,
                is_alive: true,
            },
        );
        self.live_nodes.insert(pid, id);
        id
    }

    /// Marks a process as ended, and drops it and its ended ancestors unless they have descendants.
    fn end_node(&mut self, id: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.is_alive = false;
        }
        let mut next = Some(id);
        while let Some(id) = next {
            let Some(node) = self.nodes.get(&id) else {
                return;
            };
            if node.is_alive || node.child_count > 0 {
                return;
            }
            next = node.parent;
            self.nodes.remove(&id);
            if let Some(parent) = next.and_then(|parent| self.nodes.get_mut(&parent)) {
                parent.child_count -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn birth(parent_pid: i32, pid: i32) -> ProcessEvent {
        ProcessEvent::ProcessStart { parent_pid, pid }
    }

    fn exit(pid: i32) -> ProcessEvent {
        ProcessEvent::Exit { pid, tid: pid }
    }

    fn lineage_after(events: &[ProcessEvent]) -> Lineage {
        let mut lineage = Lineage::new(7);
        events.iter().for_each(|event| lineage.record(*event));
        lineage
    }

    fn ancestors_of(lineage: &Lineage, pid: i32) -> Option<Vec<i32>> {
        Some(lineage.ancestry_of(pid)?.ancestors)
    }

    /// Is the ancestor of a double fork known after both parents have ended, also if a pid is used again?
    #[test]
    fn a_grandchild_keeps_its_ancestors_after_they_end() {
        let mut lineage = lineage_after(&[birth(5, 10), birth(10, 11), exit(10), exit(5)]);
        assert_eq!(ancestors_of(&lineage, 11), Some(vec![10, 5]));
        assert_eq!(ancestors_of(&lineage, 5), None);
        lineage.record(birth(1, 10));
        lineage.record(birth(10, 12));
        assert_eq!(ancestors_of(&lineage, 11), Some(vec![10, 5]));
        assert_eq!(ancestors_of(&lineage, 12), Some(vec![10, 1]));
    }

    /// Does a process live until its last thread ends, and is nothing kept of a family that has ended?
    #[test]
    fn a_family_that_has_ended_takes_no_memory() {
        let mut lineage = lineage_after(&[
            birth(5, 10),
            ProcessEvent::ThreadStart { pid: 10, tid: 90 },
            exit(10),
            birth(10, 11),
        ]);
        assert_eq!(ancestors_of(&lineage, 11), Some(vec![10, 5]));
        lineage.record(ProcessEvent::Exit { pid: 10, tid: 90 });
        lineage.record(exit(11));
        assert_eq!((lineage.nodes.len(), lineage.live_nodes.len()), (1, 1));
        lineage.record(exit(5));
        assert_eq!((lineage.nodes.len(), lineage.live_nodes.len()), (0, 0));
    }

    /// Is a record that has lost events, or grown beyond its bound, marked as incomplete?
    #[test]
    fn a_record_with_a_gap_says_so() {
        let mut lineage = lineage_after(&[birth(5, 10)]);
        assert_eq!(
            lineage.ancestry_of(10).unwrap().complete_since_ticks,
            Some(7)
        );
        lineage.forget();
        lineage.record(birth(10, 11));
        assert_eq!(lineage.ancestry_of(11).unwrap().complete_since_ticks, None);
        (0..=MAX_NODES as i32).for_each(|pid| lineage.record(birth(1, pid + 100)));
        assert!(lineage.nodes.len() < MAX_NODES);
    }
}
