//! What to paste on this host, so that the programs of a plan stay on their caches.
//!
//! Problem: a plan names caches, and each of the tools that keep a program somewhere wants the kernel's CPU numbers in
//! its own form. Method: one block per cache in use, with a shell command, a systemd drop-in, a container's option, and
//! the entry of cachemate's own configuration, which also confines a pod. Memory nodes are named only on a host with
//! several.

use cachemate_core::{Cache, CpuSet, Topology};
use cachemate_papers::placement::{PlacedProgram, Placement};
use cachemate_report::text::escape_controls;

use crate::host_machine::KernelCpu;

/// Blocks for the caches of a plan for this host, whose CPUs have these numbers in the order of the topology's.
pub fn describe_pinning(
    placement: &Placement,
    topology: &Topology,
    kernel_cpus: &[KernelCpu],
) -> String {
    let caches: Vec<&Cache> = topology.last_level_caches().collect();
    if caches.len() < 2 {
        return "this host has one last-level cache: no choice of CPUs keeps programs apart in it\n"
            .to_string();
    }
    let first_node = kernel_cpus.first().map(|cpu| cpu.memory_node);
    let has_several_nodes = kernel_cpus
        .iter()
        .any(|cpu| Some(cpu.memory_node) != first_node);

    let mut text = "what keeps the programs on their caches, in the kernel's CPU numbers; paste \
                    the line that fits\n"
        .to_string();
    for cache in caches {
        let is_on_cache = |program: &&PlacedProgram| program.cache == Some(cache.id);
        let members = placement.programs.iter().filter(is_on_cache);
        let names: Vec<String> = members
            .map(|program| escape_controls(&program.name))
            .collect();
        if names.is_empty() {
            continue;
        }
        let cpus_of_cache: Vec<KernelCpu> = cache
            .cpus
            .iter()
            .filter_map(|cpu| kernel_cpus.get(cpu as usize).copied())
            .collect();
        let cpus = cpus_of_cache.iter().map(|cpu| cpu.cpu).collect();
        let nodes =
            has_several_nodes.then(|| cpus_of_cache.iter().map(|cpu| cpu.memory_node).collect());
        text += &describe_block(&names.join(", "), &cpus, nodes.as_ref());
    }
    text
}

fn describe_block(names: &str, cpus: &CpuSet, memory_nodes: Option<&CpuSet>) -> String {
    let mut shell = format!("taskset -c {cpus} COMMAND");
    let mut unit = format!("[Service]\\nAllowedCPUs={cpus}\\n");
    let mut container = format!("--cpuset-cpus={cpus}");
    if let Some(nodes) = memory_nodes {
        shell = format!("numactl --physcpubind={cpus} --membind={nodes} COMMAND");
        unit += &format!("AllowedMemoryNodes={nodes}\\n");
        container += &format!(" --cpuset-mems={nodes}");
    }
    format!(
        "  {names}\n    command    {shell}\n    \
         unit       mkdir -p /etc/systemd/system/UNIT.d && printf '{unit}' \
         >/etc/systemd/system/UNIT.d/cpus.conf && systemctl daemon-reload\n    \
         container  docker run {container} IMAGE\n    \
         pod        in cachemate.toml: [[cpusets]] cgroup = \"/kubepods.slice/.../POD\" cpus = \"{cpus}\"\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::last_level_caches;
    use cachemate_core::{CacheId, CacheLevel};
    use cachemate_papers::matrix::PairCosts;
    use cachemate_papers::placement::place;

    fn kernel_cpus(numbers: [u32; 4], nodes: [u32; 4]) -> Vec<KernelCpu> {
        let pairs = numbers.into_iter().zip(nodes);
        pairs
            .map(|(cpu, memory_node)| KernelCpu { cpu, memory_node })
            .collect()
    }

    /// Does each block have the kernel's CPU numbers of its programs' cache in every form, with memory nodes only where
    /// there are several, and is a host without a choice told so?
    #[test]
    fn blocks_have_the_kernels_numbers() {
        let names: Vec<String> = ["mcf", "gzip", "stream"].map(String::from).to_vec();
        let costs = PairCosts::from_slowdowns(vec![
            vec![0.0, 1.0, 90.0],
            vec![1.0, 0.0, 1.0],
            vec![1.0, 1.0, 0.0],
        ]);
        let topology = last_level_caches(2, 2, CacheLevel::L3, 1 << 23);
        let placement = place(&names, &costs, &costs, &topology, 0).unwrap();
        assert_ne!(placement.programs[0].cache, placement.programs[2].cache);
        // Siblings are numbered last, as Linux usually does.
        let one_node = kernel_cpus([0, 2, 1, 3], [0; 4]);
        let text = describe_pinning(&placement, &topology, &one_node);
        assert_eq!(text.matches("taskset").count(), 2, "two caches in\n{text}");
        for program in &placement.programs {
            let cpus = match program.cache {
                Some(CacheId(0)) => "0,2",
                _ => "1,3",
            };
            let block = text.split(&program.name).nth(1).unwrap();
            for line in [
                format!("taskset -c {cpus} COMMAND"),
                format!("[Service]\\nAllowedCPUs={cpus}\\n"),
                format!("docker run --cpuset-cpus={cpus} IMAGE"),
                format!("cpus = \"{cpus}\""),
            ] {
                let at = block
                    .find(&line)
                    .unwrap_or_else(|| panic!("{line} in\n{text}"));
                assert!(
                    at < 400,
                    "{line} stands in the program's own block of\n{text}"
                );
            }
        }
        assert!(
            !text.contains("numactl") && !text.contains("mems"),
            "{text}"
        );

        let two_nodes = kernel_cpus([0, 2, 1, 3], [0, 0, 1, 1]);
        let text = describe_pinning(&placement, &topology, &two_nodes);
        for line in [
            "numactl --physcpubind=1,3 --membind=1 COMMAND",
            "AllowedCPUs=1,3\\nAllowedMemoryNodes=1\\n",
            "--cpuset-cpus=0,2 --cpuset-mems=0",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }

        let one = last_level_caches(1, 4, CacheLevel::L3, 1 << 23);
        let placement = place(&names, &costs, &costs, &one, 0).unwrap();
        let text = describe_pinning(&placement, &one, &one_node);
        assert!(
            text.contains("one last-level cache") && !text.contains("taskset"),
            "{text}"
        );
    }
}
