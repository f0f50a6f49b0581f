//! Describes this host as a machine: values from the kernel, and marked estimates for the rest.
//!
//! Problem: predictors and the simulator need a machine file, and none exists for the user's own host. Method: CPUs,
//! caches, clock, memory and classes of service are read from the kernel; latencies, pipeline and bandwidth, which the
//! kernel does not report, are those of a current server, and are listed as estimates in `sources`. Properties: a host
//! whose cores or caches differ from each other is rejected, because a description has only one of each;
//! the text reads back as a machine; CPUs are numbered as in descriptions, not as in the kernel.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, bail};
use cachemate_core::{
    Cache, CacheLevel, CacheSpec, CoherenceSpec, CoreModel, Cpu, Inclusion, MachineSpec,
    MemorySchedulingSpec, MemorySpec, OsSpec, PageSpec, PmuSpec, PrefetcherSpec, ReplacementPolicy,
    SamplerModel, SetIndexing, Topology, WayPartitions, WritePolicy,
};

/// Assumed clock frequency if the kernel does not report one.
const ASSUMED_HERTZ: u64 = 2_500_000_000;
const ASSUMED_MEMORY_BYTES: u64 = 64 << 30;
/// Assumed latency from the core to data in memory.
const ASSUMED_MEMORY_NS: u64 = 110;
const ASSUMED_REMOTE_NS: u64 = 190;
const MEMORY_BYTES_PER_S_PER_CORE: f64 = 4e9;

/// Facts about the host besides its topology; `None` if it does not report them.
#[derive(Clone, Copy, Default)]
pub struct HostFacts {
    pub hertz: Option<u64>,
    pub memory_bytes: Option<u64>,
    /// Way partitions (classes of service) of the last level.
    pub classes: Option<WayPartitions>,
}

/// Maximum size of a kernel file: `/proc/cpuinfo` has about 1.5 KiB per CPU.
const MAX_KERNEL_FILE_BYTES: u64 = 16 << 20;

impl HostFacts {
    /// Reads the kernel's files below `root`.
    pub fn read(root: &Path) -> Self {
        let read_file = |file: &str| {
            cachemate_files::read_text_limited(&root.join(file), MAX_KERNEL_FILE_BYTES).ok()
        };
        let read_number = |file: &str| read_file(file)?.trim().parse::<u32>().ok();
        let parse_line_value = |text: &str, name: &str| {
            let value = text
                .lines()
                .find(|line| line.starts_with(name))?
                .split(':')
                .nth(1)?;
            value.split_ascii_whitespace().next()?.parse::<f64>().ok()
        };
        let info_dir = "sys/fs/resctrl/info/L3";
        let classes = read_number(&format!("{info_dir}/num_closids")).map(|groups| WayPartitions {
            groups,
            min_ways: read_number(&format!("{info_dir}/min_cbm_bits")).unwrap_or(1),
            contiguous: read_number(&format!("{info_dir}/sparse_masks")) != Some(1),
        });
        let megahertz =
            read_file("proc/cpuinfo").and_then(|text| parse_line_value(&text, "cpu MHz"));
        let kibibytes =
            read_file("proc/meminfo").and_then(|text| parse_line_value(&text, "MemTotal"));
        HostFacts {
            hertz: megahertz
                .filter(|mhz| *mhz >= 1.0)
                .map(|mhz| (mhz * 1e6).round() as u64),
            memory_bytes: kibibytes.map(|kib| kib as u64 * 1024),
            classes,
        }
    }
}

pub fn machine_text(name: &str, topology: &Topology, facts: HostFacts) -> anyhow::Result<String> {
    let machine = build_machine(name, topology, facts)?;
    let text = toml::to_string(&machine).context("the machine cannot be written as TOML")?;
    // The text is parsed again, so that an error appears here rather than at the next command.
    let machine = cachemate_spec::parse_machine(name, &text)?;
    cachemate_sim::check_machine(&machine)?;
    Ok(format!(
        "# Printed by 'cachemate topology --as-machine'. Estimates are named in sources: measure, and change them.\n{text}"
    ))
}

/// Returns the host's description as a machine.
pub fn build_machine(
    name: &str,
    topology: &Topology,
    facts: HostFacts,
) -> anyhow::Result<MachineSpec> {
    let cpus: Vec<&Cpu> = topology.cpus.iter().filter(|cpu| cpu.online).collect();
    let contexts_per_core =
        uniform_group_size(&cpus, "CPUs of a core", |cpu| (cpu.package, cpu.core)).map_err(
            |error| match topology.cpus.len() - cpus.len() {
                0 => error,
                offline => error.context(format!(
                    "{offline} CPUs are offline: set their siblings offline too, or all online"
                )),
            },
        )?;
    let cores: BTreeSet<(u32, u32)> = cpus.iter().map(|cpu| (cpu.package, cpu.core)).collect();
    let packages: BTreeSet<u32> = cpus.iter().map(|cpu| cpu.package).collect();
    let cores_per_package = cores.len() / packages.len().max(1);
    if cores_per_package * packages.len() != cores.len() {
        bail!(
            "packages: found {} cores on {} packages, expected equally many on each",
            cores.len(),
            packages.len()
        );
    }
    let hertz = cpus.iter().find_map(|cpu| cpu.hertz).or(facts.hertz);
    let clock_hertz = hertz.unwrap_or(ASSUMED_HERTZ);
    let cycles_of = |ns: u64| u32::try_from(ns * clock_hertz / 1_000_000_000).unwrap_or(u32::MAX);
    if topology.caches.is_empty() {
        bail!(
            "caches: found none, expected at least one: the hypervisor hides them from this guest. Pass the host's caches \
             through (QEMU: -cpu host,host-cache-info=on), or copy a machine from 'cachemate topology --list' and edit its \
             caches"
        );
    }
    let levels: BTreeSet<CacheLevel> = topology.caches.iter().map(|cache| cache.level).collect();
    let mut caches = Vec::new();
    for level in levels {
        caches.push(cache_spec(
            topology,
            level,
            contexts_per_core,
            cores_per_package as u32,
        )?);
    }
    let l3_cache = caches
        .last_mut()
        .filter(|cache: &&mut CacheSpec| cache.level == CacheLevel::L3);
    let l3_assignment = l3_cache.map(|cache| cache.way_partitions = facts.classes);
    let node_count = cpus
        .iter()
        .map(|cpu| cpu.memory_node)
        .collect::<BTreeSet<u32>>()
        .len()
        .max(1);
    // A machine's node covers whole packages, so the nodes of one package are described as one.
    let usable_node_count = if packages.len().is_multiple_of(node_count) {
        node_count
    } else if node_count.is_multiple_of(packages.len()) {
        packages.len()
    } else {
        1
    };
    let node_text = if usable_node_count == node_count {
        "memory nodes".to_string()
    } else {
        format!(
            "memory nodes ({node_count}, described as {usable_node_count}, one for each package)"
        )
    };
    let page_bytes = PageSpec::default().page_bytes;
    let memory_bytes = facts.memory_bytes.unwrap_or(ASSUMED_MEMORY_BYTES) / page_bytes * page_bytes;
    let mut estimated_parts = vec![
        "latencies of caches, memory and coherence",
        "pipeline",
        "memory bandwidth",
        "prefetchers",
        "counters",
    ];
    for (is_known, subject) in [
        (hertz.is_some(), "clock"),
        (facts.memory_bytes.is_some(), "memory size"),
        (
            facts.classes.is_some() && l3_assignment.is_some(),
            "classes of service (none)",
        ),
    ] {
        if !is_known {
            estimated_parts.push(subject);
        }
    }
    Ok(MachineSpec {
        name: name.to_string(),
        description: format!("{name}: {} CPUs, as its kernel reports them", cpus.len()),
        sources: vec![
            format!(
                "host: CPUs, cores, packages, {node_text}; caches with sizes, ways, lines and sharers, from sysfs"
            ),
            format!(
                "estimate: {}; the figures of a server of today, measured nowhere here",
                estimated_parts.join(", ")
            ),
        ],
        hertz: clock_hertz,
        packages: packages.len() as u32,
        cores_per_package: cores_per_package as u32,
        contexts_per_core,
        pipeline: CoreModel::OutOfOrder {
            issue_width: 6,
            window: 320,
            mshrs: 24,
            loads_pass: true,
        },
        caches,
        coherence: CoherenceSpec {
            same_package_cycles: Some(cycles_of(ASSUMED_MEMORY_NS * 3 / 4)),
            other_package_cycles: (packages.len() > 1)
                .then(|| cycles_of(ASSUMED_REMOTE_NS * 3 / 4)),
        },
        prefetchers: vec![PrefetcherSpec::Stride {
            level: CacheLevel::L2,
            streams: 32,
            degree: 2,
        }],
        memory: MemorySpec {
            size_bytes: memory_bytes,
            nodes: usable_node_count as u32,
            local_latency_cycles: cycles_of(ASSUMED_MEMORY_NS),
            remote_latency_cycles: cycles_of(if usable_node_count > 1 {
                ASSUMED_REMOTE_NS
            } else {
                ASSUMED_MEMORY_NS
            }),
            bytes_per_cycle: (cores.len() / usable_node_count) as f64 * MEMORY_BYTES_PER_S_PER_CORE
                / clock_hertz as f64,
            package_bus_bytes_per_cycle: None,
            scheduling: MemorySchedulingSpec {
                demand_priority: true,
                ..MemorySchedulingSpec::default()
            },
        },
        pages: PageSpec::default(),
        os: OsSpec::default(),
        counters: PmuSpec {
            sampler: SamplerModel::Tagged,
            ..PmuSpec::default()
        },
    })
}

/// Returns the number of CPUs per group, if it is the same for all groups.
fn uniform_group_size<K: Ord + std::fmt::Debug>(
    cpus: &[&Cpu],
    subject: &str,
    key: impl Fn(&Cpu) -> K,
) -> anyhow::Result<u32> {
    let mut group_sizes = std::collections::BTreeMap::<K, u32>::new();
    cpus.iter()
        .for_each(|cpu| *group_sizes.entry(key(cpu)).or_default() += 1);
    let distinct_sizes: BTreeSet<u32> = group_sizes.into_values().collect();
    match distinct_sizes.iter().copied().collect::<Vec<u32>>()[..] {
        [count] => Ok(count),
        _ => bail!(
            "{subject}: found {distinct_sizes:?} on one host, expected the same everywhere: a description has one kind of core"
        ),
    }
}

/// Describes the caches of one level as a single entry.
fn cache_spec(
    topology: &Topology,
    level: CacheLevel,
    contexts: u32,
    cores_per_package: u32,
) -> anyhow::Result<CacheSpec> {
    let online = topology.online();
    let name = cachemate_report::level_name(level);
    let level_caches: Vec<&Cache> = topology
        .caches
        .iter()
        .filter(|cache| cache.level == level)
        .collect();
    let common_size = |subject: &str, size_of: &dyn Fn(&Cache) -> Option<u64>| {
        let found: BTreeSet<Option<u64>> =
            level_caches.iter().map(|cache| size_of(cache)).collect();
        match found.iter().copied().collect::<Vec<_>>()[..] {
            [Some(value)] => Ok(value),
            [None] => bail!("{name}.{subject}: the kernel does not tell, expected a number"),
            _ => {
                bail!("{name}.{subject}: found {found:?} on one host, expected the same everywhere")
            }
        }
    };
    let cpus = common_size("cpus", &|cache| {
        Some(u64::from(cache.cpus.intersection(&online).count()))
    })? as u32;
    let cores = cpus / contexts;
    if cores == 0 || cores * contexts != cpus || !cores_per_package.is_multiple_of(cores) {
        bail!(
            "{name}.cpus: found {cpus}, expected whole cores, and equally many caches on each package of {cores_per_package} cores"
        );
    }
    // Modules of two cores share an L1 for instructions; a description gives each core its part.
    let is_split = level == CacheLevel::L1Instruction && cores > 1;
    let (divisor, shared_by_cores) = if is_split { (cores, 1) } else { (1, cores) };
    let size_bytes = common_size("size", &|cache| cache.size_bytes)? / u64::from(divisor);
    let latency_cycles = match level {
        CacheLevel::L1Instruction => 1,
        CacheLevel::L1Data => 4,
        CacheLevel::L2 => 14,
        CacheLevel::L3 => 60,
        CacheLevel::L4 => 120,
    };
    Ok(CacheSpec {
        level,
        size_bytes,
        ways: common_size("ways", &|cache| cache.ways.map(u64::from))? as u32,
        line_bytes: common_size("line", &|cache| cache.line_bytes.map(u64::from))? as u32,
        latency_cycles,
        replacement: ReplacementPolicy::Lru,
        write: WritePolicy::Back,
        inclusion: Inclusion::NonInclusive,
        index: SetIndexing::Physical,
        shared_by_cores,
        slices: 1,
        bandwidth_bytes_per_cycle: None,
        way_partitions: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the description of a machine's topology have the same topology?
    #[test]
    fn a_topologys_description_has_the_same_topology() {
        for name in [
            "epyc-7763",
            "epyc-9755",
            "xeon-8490h",
            "altra-max",
            "xeon-x5365",
            "opteron-2350",
            "niagara-2core",
        ] {
            let topology = cachemate_spec::load_topology(name).unwrap();
            let text = machine_text(name, &topology, HostFacts::default()).unwrap();
            let again = cachemate_spec::parse_machine(name, &text).unwrap();
            assert_eq!(again.topology().caches, topology.caches, "{name}");
            let cpu_positions = |topology: &Topology| {
                topology
                    .cpus
                    .iter()
                    .map(|cpu| (cpu.id, cpu.core, cpu.package))
                    .collect::<Vec<_>>()
            };
            assert_eq!(
                cpu_positions(&again.topology()),
                cpu_positions(&topology),
                "{name}"
            );
            assert!(
                again.sources[1].starts_with("estimate: latencies")
                    && again.sources[1].contains("memory size"),
                "{name}"
            );
        }
    }

    /// Is a host rejected with the place if its cores or caches differ, or if a value is unknown?
    #[test]
    fn an_irregular_host_is_rejected_with_the_place() {
        let whole = cachemate_spec::load_topology("epyc-7763").unwrap();
        let refusal_after = |change: &dyn Fn(&mut Topology)| {
            let mut topology = whole.clone();
            change(&mut topology);
            machine_text("x", &topology, HostFacts::default())
                .unwrap_err()
                .to_string()
        };
        let l3 = whole
            .caches
            .iter()
            .position(|cache| cache.level == CacheLevel::L3)
            .unwrap();
        assert!(
            refusal_after(&|t| t.caches[l3].size_bytes = Some(16 << 20))
                .starts_with("L3.size: found {"),
            "sizes differ"
        );
        assert!(
            refusal_after(&|t| t.caches.iter_mut().for_each(|cache| cache.ways = None))
                .contains("ways: the kernel does not tell")
        );
        assert!(
            refusal_after(&|t| t.cpus[1].online = false)
                .starts_with("1 CPUs are offline: set their siblings offline too")
        );
        assert!(
            refusal_after(&|t| t.caches.clear()).starts_with("caches: found none"),
            "a guest whose hypervisor hides the caches"
        );
    }

    /// Are the memory nodes of a package described as one, with their number in the sources?
    #[test]
    fn memory_nodes_of_a_package_are_described_as_one() {
        let mut topology = cachemate_spec::load_topology("epyc-7763").unwrap();
        let cpu_count = topology.cpus.len();
        for (index, cpu) in topology.cpus.iter_mut().enumerate() {
            cpu.memory_node = (index * 4 / cpu_count) as u32;
        }
        let machine = build_machine("x", &topology, HostFacts::default()).unwrap();
        assert_eq!(machine.memory.nodes, machine.packages);
        assert!(machine.sources[0].contains("memory nodes (4, described as 1"));
    }

    /// Is a module's shared L1 for instructions described so that every command accepts the machine?
    #[test]
    fn a_shared_instruction_cache_is_split_among_its_cores() {
        let mut topology = cachemate_spec::load_topology("xeon-x5365").unwrap();
        let is_instruction = |cache: &Cache| cache.level == CacheLevel::L1Instruction;
        let caches = std::mem::take(&mut topology.caches);
        let (l1_instruction, others): (Vec<Cache>, Vec<Cache>) =
            caches.into_iter().partition(is_instruction);
        let pairs = l1_instruction.chunks(2).map(|pair| Cache {
            cpus: pair[0].cpus.union(&pair[1].cpus),
            ..pair[0].clone()
        });
        topology.caches = pairs.chain(others).collect();
        let text = machine_text("x", &topology, HostFacts::default()).unwrap();
        let machine = cachemate_spec::parse_machine("x", &text).unwrap();
        assert_eq!(machine.caches[0].shared_by_cores, 1);
    }

    /// Are clock, memory and classes of service taken from the host's files, and missing values left as estimates?
    #[test]
    fn clock_memory_and_classes_are_taken_from_the_hosts_files() {
        let root = tempfile::tempdir().unwrap();
        let write_file = |file: &str, text: &str| {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write_file("proc/cpuinfo", "processor\t: 0\ncpu MHz\t\t: 2600.031\n");
        write_file(
            "proc/meminfo",
            "MemTotal:       16384000 kB\nMemFree: 1 kB\n",
        );
        write_file("sys/fs/resctrl/info/L3/num_closids", "16\n");
        write_file("sys/fs/resctrl/info/L3/min_cbm_bits", "1\n");
        write_file("sys/fs/resctrl/info/L3/sparse_masks", "1\n");
        let mut topology = cachemate_spec::load_topology("epyc-7763").unwrap();
        topology.cpus.iter_mut().for_each(|cpu| cpu.hertz = None);
        let machine = build_machine("x", &topology, HostFacts::read(root.path())).unwrap();
        assert_eq!(
            (machine.hertz, machine.memory.size_bytes),
            (2_600_031_000, 16_384_000 * 1024)
        );
        let classes = WayPartitions {
            groups: 16,
            min_ways: 1,
            contiguous: false,
        };
        assert_eq!(machine.caches.last().unwrap().way_partitions, Some(classes));
        assert!(
            !machine.sources[1].contains("clock") && !machine.sources[1].contains("classes"),
            "{:?}",
            machine.sources
        );
    }
}
