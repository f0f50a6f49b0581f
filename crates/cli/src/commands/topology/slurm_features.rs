//! `cachemate topology --slurm-features`: the features of a host by which Slurm jobs can ask for caches.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::Topology;
use cachemate_daemon::host;

use crate::session::Session;

/// Abilities of a host that are features of their own.
struct NodeAbilities {
    can_divide_caches: bool,
    counts_misses: bool,
    counts_traffic: bool,
}

/// Prints the features of this host for its line in slurm.conf.
pub fn print(session: &Session, as_json: bool) -> anyhow::Result<()> {
    let survey = host::survey_host(false)?;
    let abilities = NodeAbilities {
        can_divide_caches: survey
            .resctrl
            .as_ref()
            .is_some_and(|resctrl| !resctrl.partitions().is_empty()),
        counts_misses: survey.capability_survey.level == 1,
        counts_traffic: survey
            .resctrl
            .as_ref()
            .is_some_and(|resctrl| resctrl.counted_events.has_total_bytes),
    };
    let features = node_features(&survey.topology, &abilities);
    let result = BTreeMap::from([("features", &features)]);
    session.print_result(as_json, &result, || {
        format!("Features={}\n", features.join(","))
    })
}

/// Sizes of the host's last-level caches, their number, the CPUs of each, and its abilities.
fn node_features(topology: &Topology, abilities: &NodeAbilities) -> Vec<String> {
    let mut features = Vec::new();
    if let Some(level) = topology.last_level() {
        let level = cachemate_report::level_name(level).to_lowercase();
        let caches: Vec<_> = topology.last_level_caches().collect();
        let sizes: BTreeSet<u64> = caches.iter().filter_map(|cache| cache.size_bytes).collect();
        let cpu_counts: BTreeSet<u32> = caches.iter().map(|cache| cache.cpus.count()).collect();
        features.extend(
            sizes
                .into_iter()
                .map(|size_bytes| format!("{level}-{}", size_feature(size_bytes))),
        );
        features.push(format!("{level}-count-{}", caches.len()));
        features.extend(
            cpu_counts
                .into_iter()
                .map(|cpus| format!("{level}-cpus-{cpus}")),
        );
    }
    let ability_features = [
        (abilities.can_divide_caches, "cache-ways"),
        (abilities.counts_misses, "cache-misses"),
        (abilities.counts_traffic, "memory-traffic"),
    ];
    features.extend(
        ability_features
            .iter()
            .filter(|(has_ability, _)| *has_ability)
            .map(|(_, name)| name.to_string()),
    );
    features
}

/// In the largest unit that divides the size, because Slurm compares features as text.
fn size_feature(size_bytes: u64) -> String {
    match size_bytes {
        whole if whole % (1 << 20) == 0 => format!("{}m", whole >> 20),
        whole if whole % (1 << 10) == 0 => format!("{}k", whole >> 10),
        other => format!("{other}b"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::CacheLevel;
    use cachemate_core::test_support::last_level_caches;

    /// Does a node name every size of its caches once, their number, the CPUs of each, and only the abilities that it
    /// has?
    #[test]
    fn a_node_names_its_caches_and_its_abilities() {
        let mut topology = last_level_caches(3, 4, CacheLevel::L3, 32 << 20);
        let abilities = NodeAbilities {
            can_divide_caches: true,
            counts_misses: false,
            counts_traffic: true,
        };
        let expected = [
            "l3-32m",
            "l3-count-3",
            "l3-cpus-4",
            "cache-ways",
            "memory-traffic",
        ];
        assert_eq!(node_features(&topology, &abilities), expected);
        topology.caches[1].size_bytes = Some(1_536 << 10);
        topology.caches[2].size_bytes = None;
        let abilities = NodeAbilities {
            can_divide_caches: false,
            counts_misses: false,
            counts_traffic: false,
        };
        assert_eq!(
            node_features(&topology, &abilities),
            ["l3-1536k", "l3-32m", "l3-count-3", "l3-cpus-4"]
        );
        topology.caches.clear();
        assert_eq!(
            node_features(&topology, &abilities),
            [""; 0],
            "a host without known caches has no features"
        );
    }
}
