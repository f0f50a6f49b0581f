//! Containers whose exclusive CPUs a kubelet took from several caches although one would have held them.
//!
//! A kubelet with the static CPU manager keeps a container's CPUs for its life, so that a wrong choice costs for as long.
//! With `prefer-align-cpus-by-uncorecache` it prefers the CPUs of one cache, and still takes, for example, CPUs 3, 5, 11,
//! 12 and 13 of two caches of eight (kubernetes/kubernetes#137315, open in 1.36); and before #131850 it aligned no odd
//! number of CPUs where cores have two threads (#131610). Its choice is in its checkpoint, so it can be said.

use std::collections::BTreeMap;
use std::path::Path;

use cachemate_core::{CpuSet, Topology};
use serde::Deserialize;

use crate::kernel::Kernel;

/// The checkpoint of the CPU manager.
pub const CHECKPOINT_FILE: &str = "/var/lib/kubelet/cpu_manager_state";

/// Exclusive CPUs by pod and container, as the checkpoint has them.
#[derive(Deserialize)]
struct Checkpoint {
    #[serde(default)]
    entries: BTreeMap<String, BTreeMap<String, String>>,
}

/// A sentence for each container that is spread over more caches than it needs; none without a kubelet that assigns
/// CPUs.
pub fn find_straddling_containers(kernel: &dyn Kernel, topology: &Topology) -> Vec<String> {
    let Ok(text) = kernel.read(Path::new(CHECKPOINT_FILE)) else {
        return Vec::new();
    };
    let checkpoint: Checkpoint = match serde_json::from_str(&text) {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            return vec![format!(
                "{CHECKPOINT_FILE}: {error}; expected the checkpoint of a kubelet's CPU manager"
            )];
        }
    };

    let mut sentences = Vec::new();
    for (pod, containers) in &checkpoint.entries {
        for (container, cpus) in containers {
            match cpus.parse() {
                Ok(cpus) => sentences.extend(describe_straddling(topology, pod, container, &cpus)),
                Err(_) => sentences.push(format!(
                    "{CHECKPOINT_FILE}: found '{cpus}' for {container} of pod {pod}, expected a list of CPUs"
                )),
            }
        }
    }
    sentences
}

fn describe_straddling(
    topology: &Topology,
    pod: &str,
    container: &str,
    cpus: &CpuSet,
) -> Option<String> {
    let used_count = topology
        .last_level_caches()
        .filter(|cache| cache.cpus.intersects(cpus))
        .count();
    let largest = topology
        .last_level_caches()
        .map(|cache| cache.cpus.count())
        .max()?;
    let needed_count = cpus.count().div_ceil(largest) as usize;
    if used_count <= needed_count {
        return None;
    }
    let odd_clause = if cpus.count() % 2 == 1 {
        " (an even number of CPUs avoids one cause of it, kubernetes/kubernetes#131610)"
    } else {
        ""
    };
    Some(format!(
        "the kubelet gave {container} of pod {pod} CPUs {cpus} of {used_count} caches, and {needed_count} would hold them \
         (kubernetes/kubernetes#137315): a new pod is placed anew once other CPUs are free{odd_clause}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::act::resctrl::fake_tests::topology;
    use crate::fake_tests::FakeHost;
    use cachemate_core::CacheLevel;
    use cachemate_core::test_support::last_level_caches;

    fn sentences_for(checkpoint: &str) -> Vec<String> {
        let host = FakeHost::default();
        host.set_file(CHECKPOINT_FILE, checkpoint);
        find_straddling_containers(&host, &topology().topology)
    }

    /// Is a container over two caches of two CPUs named if one cache would hold its CPUs, and none if not?
    #[test]
    fn only_needless_straddling_is_named() {
        let found = sentences_for(
            r#"{"policyName":"static","defaultCpuSet":"","entries":{"a-1":{"db":"1-2","web":"0-1","wide":"1-3"}},"checksum":1}"#,
        );
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("db of pod a-1 CPUs 1-2 of 2 caches, and 1 would hold"));
        assert!(!found[0].contains("131610"), "two CPUs are even");
    }

    /// Is an odd number of CPUs named as a cause, of which kubelets once aligned none?
    #[test]
    fn an_odd_number_of_cpus_has_its_own_remedy() {
        let host = FakeHost::default();
        host.set_file(
            CHECKPOINT_FILE,
            r#"{"entries":{"p":{"c":"2-4","even":"2-5"}}}"#,
        );
        let topology = last_level_caches(2, 4, CacheLevel::L3, 8 << 20);
        let sentences = find_straddling_containers(&host, &topology);
        assert_eq!(sentences.len(), 2, "{sentences:?}");
        assert!(sentences[0].contains("131610") && !sentences[1].contains("131610"));
    }

    /// Is a host without exclusive CPUs silent, and a damaged checkpoint an error with its place?
    #[test]
    fn a_damaged_checkpoint_is_said_and_an_absent_one_is_not() {
        let topology = topology().topology;
        assert!(find_straddling_containers(&FakeHost::default(), &topology).is_empty());
        assert!(
            sentences_for(r#"{"policyName":"none","defaultCpuSet":"","checksum":1}"#).is_empty()
        );
        assert!(sentences_for("{")[0].starts_with(CHECKPOINT_FILE));
        let odd = sentences_for(r#"{"entries":{"p":{"c":"many"}}}"#);
        assert!(odd[0].contains("found 'many'"), "{odd:?}");
    }
}
