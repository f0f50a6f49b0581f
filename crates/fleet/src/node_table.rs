//! The published states of nodes, which have dense numbers, and the search for a node's number by name.
//!
//! Problem: a request contains a thousand names, and comparing strings on the path of a search tree costs more than
//! the forecasts. Method: one binary search among sorted hashes, then one comparison of names. A version counts the
//! changes of each node, so that callers can detect outdated forecasts.

use std::collections::BTreeMap;

use crate::scorer::NodeCacheState;

/// A node with its state.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct NodeEntry {
    name: String,
    /// Time of publication, in seconds since the epoch.
    pub(crate) published_at: f64,
    pub(crate) state: NodeCacheState,
    /// Version from 1, incremented by each change of the state or of the placements in flight.
    pub(crate) version: u64,
}

/// All nodes that have published a state.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeTable {
    /// Nodes by name, ascending.
    nodes: Vec<NodeEntry>,
    /// Pairs of a name's hash and a node's number, ascending.
    number_by_hash: Vec<(u64, usize)>,
}

impl NodeTable {
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Replaces the states. Returns false if the set of nodes has changed, in which case the nodes have new numbers.
    pub(crate) fn publish(&mut self, states: BTreeMap<String, (f64, NodeCacheState)>) -> bool {
        let has_same_nodes = self.nodes.iter().map(|node| &node.name).eq(states.keys());
        if has_same_nodes {
            for (node, (published_at, state)) in self.nodes.iter_mut().zip(states.into_values()) {
                node.published_at = published_at;
                if node.state != state {
                    node.state = state;
                    node.version += 1;
                }
            }
        } else {
            let to_entry = |(name, (published_at, state))| NodeEntry {
                name,
                published_at,
                state,
                version: 1,
            };
            self.nodes = states.into_iter().map(to_entry).collect();
            self.number_by_hash = self
                .nodes
                .iter()
                .map(|node| name_hash(&node.name))
                .zip(0..)
                .collect();
            self.number_by_hash.sort_unstable();
        }

        has_same_nodes
    }

    /// The number of a node; `None` if it has not published a state.
    pub(crate) fn find_number(&self, name: &str) -> Option<usize> {
        let hash = name_hash(name);
        let first_position = self
            .number_by_hash
            .partition_point(|(entry_hash, _)| *entry_hash < hash);
        let equal_entries = self.number_by_hash[first_position..]
            .iter()
            .take_while(|(entry_hash, _)| *entry_hash == hash);
        equal_entries
            .map(|&(_, number)| number)
            .find(|&number| self.nodes[number].name == name)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &NodeEntry> {
        self.nodes.iter()
    }

    pub(crate) fn node(&self, number: usize) -> &NodeEntry {
        &self.nodes[number]
    }

    /// Records that the placements in flight of a node have changed.
    pub(crate) fn increment_version(&mut self, name: &str) {
        if let Some(number) = self.find_number(name) {
            self.nodes[number].version += 1;
        }
    }
}

/// The FNV-1a hash of a node's name.
fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scorer::tests::empty_node;

    fn sample_states(names: &[&str], caches: usize) -> BTreeMap<String, (f64, NodeCacheState)> {
        names
            .iter()
            .map(|name| (name.to_string(), (1.0, empty_node(caches))))
            .collect()
    }

    /// Is every node found by its name, and does its version change with the state but not with time?
    #[test]
    fn a_nodes_version_changes_with_its_state_only() {
        let mut table = NodeTable::default();
        assert!(!table.publish(sample_states(&["a", "b", "node-10"], 1)));
        let node_versions = |table: &NodeTable| {
            table
                .nodes
                .iter()
                .map(|node| node.version)
                .collect::<Vec<_>>()
        };
        let name_of = |name: &str| Some(table.node(table.find_number(name)?).name.clone());
        assert_eq!(
            (name_of("b").as_deref(), name_of("node-1")),
            (Some("b"), None)
        );
        let mut next = sample_states(&["a", "b", "node-10"], 1);
        next.get_mut("a").unwrap().0 = 2.0;
        next.get_mut("b").unwrap().1 = empty_node(2);
        assert!(table.publish(next));
        table.increment_version("node-10");
        table.increment_version("unknown");
        assert_eq!(
            (node_versions(&table), table.node(0).published_at),
            (vec![1, 2, 2], 2.0)
        );
        assert!(!table.publish(sample_states(&["a", "b"], 2)));
        assert_eq!((table.len(), node_versions(&table)), (2, vec![1, 1]));
    }
}
