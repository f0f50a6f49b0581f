//! The sentence about what cachemate can change on a host, at the start of the daemon and in `status`.
//!
//! Problem: on many hosts no plan can help a promised program, and a daemon that then does nothing looks broken.
//! Method: the topology and the abilities of the machine decide which of four means exist: other caches, parts of a
//! cache, turns, and weights. The sentence names what exists, and what follows from the rest.

use std::collections::BTreeSet;

use cachemate_core::{Ability, Capabilities, PartitionSupport, Support, Topology};

/// Describes what this host allows and what it does not.
pub fn describe_means(topology: &Topology, capabilities: &Capabilities) -> String {
    let caches = topology.last_level_caches().count();
    let supports = |ability| {
        matches!(
            capabilities.abilities.get(&ability),
            Some(Support::Yes { .. })
        )
    };
    let has_partition = |is_wanted: fn(&PartitionSupport) -> bool| {
        let mut partitions = capabilities.partitions.iter();
        partitions.any(|(_, partition)| is_wanted(partition))
    };
    let can_separate = caches > 1 && supports(Ability::Affinity);
    let has_ways = has_partition(|partition| matches!(partition, PartitionSupport::Ways { .. }));
    let has_colors =
        has_partition(|partition| matches!(partition, PartitionSupport::Colors { .. }));

    let caches_text = match caches {
        0 => "its caches are unknown".to_string(),
        1 => "one last-level cache, so moving programs keeps none of them apart".to_string(),
        _ if can_separate => format!("programs can be moved between {caches} last-level caches"),
        _ => format!("{caches} last-level caches, but no program can be moved"),
    };
    let parts_text = match (has_ways, has_colors) {
        (true, true) => "ways and page colors divide a cache",
        (true, false) => "ways divide a cache, page colors do not",
        (false, true) => "page colors divide a cache, ways do not",
        (false, false) => "neither ways nor page colors divide it",
    };
    let device_ways: BTreeSet<String> = capabilities
        .partitions
        .iter()
        .map(|(_, partition)| partition.device_units())
        .filter(|ways| !ways.is_empty())
        .map(|ways| ways.to_string())
        .collect();
    let device_text = if device_ways.is_empty() {
        String::new()
    } else {
        let ways: Vec<String> = device_ways.into_iter().collect();
        format!(
            "; devices fill ways {} too, so groups get these last",
            ways.join(" or ")
        )
    };
    let remaining_means: Vec<&str> = [(Ability::Gangs, "turns"), (Ability::Weights, "weights")]
        .into_iter()
        .filter(|(ability, _)| supports(*ability))
        .map(|(_, name)| name)
        .collect();
    let remaining_text = match (
        can_separate || has_ways || has_colors,
        remaining_means.is_empty(),
    ) {
        (true, _) => String::new(),
        (false, true) => "; cachemate can measure here, and change nothing that helps".to_string(),
        (false, false) => format!(
            "; what is left is CPU time ({}), which cannot keep a promise against losses through the cache",
            remaining_means.join(" and ")
        ),
    };
    format!("{caches_text}; {parts_text}{device_text}{remaining_text}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::{capabilities_fixture, last_level_caches};
    use cachemate_core::{CacheId, CacheLevel};

    /// Does the sentence name what exists, and what a host without caches to choose from and without partitions cannot
    /// do?
    #[test]
    fn the_sentence_follows_from_caches_and_partitions() {
        let (one, two) = (
            last_level_caches(1, 2, CacheLevel::L3, 1 << 20),
            last_level_caches(2, 2, CacheLevel::L3, 1 << 20),
        );
        let abilities = [Ability::Affinity, Ability::Gangs, Ability::Weights];
        let bare = capabilities_fixture(&abilities);
        assert_eq!(
            describe_means(&one, &bare),
            "one last-level cache, so moving programs keeps none of them apart; neither ways nor page colors divide it; \
             what is left is CPU time (turns and weights), which cannot keep a promise against losses through the cache"
        );
        assert_eq!(
            describe_means(&two, &bare),
            "programs can be moved between 2 last-level caches; neither ways nor page colors divide it"
        );
        let mut with_ways = bare.clone();
        let ways = PartitionSupport::Ways {
            ways: 16,
            min_ways: 1,
            contiguous: true,
            max_groups: 8,
            device_ways: 0b11 << 14,
        };
        with_ways.partitions = vec![(CacheId(0), ways)];
        assert_eq!(
            describe_means(&one, &with_ways),
            "one last-level cache, so moving programs keeps none of them apart; ways divide a cache, page colors do not; \
             devices fill ways 14-15 too, so groups get these last"
        );
        assert!(
            describe_means(&one, &capabilities_fixture(&[])).contains("change nothing that helps")
        );
    }
}
