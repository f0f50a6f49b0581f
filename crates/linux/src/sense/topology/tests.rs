//! Topologies of small artificial trees.

use super::*;
use std::fs;

struct SysfsTree(tempfile::TempDir);

impl SysfsTree {
    fn new() -> Self {
        let tree = SysfsTree(tempfile::tempdir().unwrap());
        fs::create_dir_all(tree.0.path().join("sys/devices/system/cpu")).unwrap();
        tree
    }
    fn cpu(&self, file: &str, contents: &str) -> &Self {
        let file = self.0.path().join("sys/devices/system/cpu").join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, format!("{contents}\n")).unwrap();
        self
    }
    fn node(&self, node: u32, cpus: &str) -> &Self {
        let dir = self
            .0
            .path()
            .join(format!("sys/devices/system/node/node{node}"));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("cpulist"), cpus).unwrap();
        self
    }
    fn distance(&self, node: u32, distances: &str) -> &Self {
        fs::write(
            self.0
                .path()
                .join(format!("sys/devices/system/node/node{node}/distance")),
            distances,
        )
        .unwrap();
        self
    }
    fn place(&self, cpu: u32, package: i32, core: u32, siblings: &str) -> &Self {
        self.cpu(
            &format!("cpu{cpu}/topology/physical_package_id"),
            &package.to_string(),
        )
        .cpu(&format!("cpu{cpu}/topology/core_id"), &core.to_string())
        .cpu(&format!("cpu{cpu}/topology/thread_siblings_list"), siblings)
    }
    fn cache(
        &self,
        cpu: u32,
        index: u32,
        level_kind_size: (u32, &str, &str),
        id: u32,
        shared: &str,
    ) -> &Self {
        let (level, kind, size) = level_kind_size;
        let file = |name: &str| format!("cpu{cpu}/cache/index{index}/{name}");
        self.cpu(&file("level"), &level.to_string())
            .cpu(&file("type"), kind)
            .cpu(&file("size"), size)
            .cpu(&file("id"), &id.to_string())
            .cpu(&file("ways_of_associativity"), "16")
            .cpu(&file("coherency_line_size"), "64")
            .cpu(&file("shared_cpu_list"), shared)
    }
    fn read(&self) -> Result<HostTopology, TopologyError> {
        read_topology(self.0.path())
    }
}

/// The kernel's layout for one socket with eight 32 MB L3s of 8 cores with 2 threads each. Sibling threads are n and n
/// + 64, and cache ids come from the APIC id, so they have gaps after CPUs of L3 2 went offline.
fn epyc(offline: &[u32]) -> SysfsTree {
    let tree = SysfsTree::new();
    let online: CpuSet = (0..128).filter(|cpu| !offline.contains(cpu)).collect();
    tree.cpu("online", &online.to_string())
        .cpu("present", "0-127")
        .cpu("possible", "0-255")
        .node(0, "0-127");
    for cpu in 0..128 {
        if !online.contains(cpu) {
            tree.cpu(&format!("cpu{cpu}/online"), "0");
            continue;
        }
        let core = cpu % 64;
        let online_part = |cpus: &mut dyn Iterator<Item = u32>| {
            cpus.filter(|&c| online.contains(c))
                .collect::<CpuSet>()
                .to_string()
        };
        let siblings = online_part(&mut [core, core + 64].into_iter());
        let first = core / 8 * 8;
        let complex = online_part(&mut (first..first + 8).chain(first + 64..first + 72));
        tree.place(cpu, 0, core, &siblings);
        tree.cache(cpu, 2, (2, "Unified", "512K"), core, &siblings);
        tree.cache(cpu, 3, (3, "Unified", "32768K"), 2 * (core / 8), &complex);
    }
    tree
}

/// Are the eight L3s of one socket distinguished, with their CPUs, whatever the kernel's ids?
#[test]
fn an_epyc_has_eight_l3s_of_sixteen_cpus() {
    let host = epyc(&[]).read().unwrap();
    let last: Vec<&Cache> = host.topology.last_level_caches().collect();
    assert_eq!(last.len(), 8);
    assert_eq!(
        (last[1].cpus.to_string().as_str(), last[1].size_bytes),
        ("8-15,72-79", Some(32 << 20))
    );
    assert_eq!(host.kernel_cache_ids[last[7].id.0 as usize], Some(14));
    assert_eq!(host.topology.cpus[70].core, host.topology.cpus[6].core);
    assert_eq!(host.topology.caches.len(), 64 + 8);
    assert_eq!(host.warnings, Vec::<String>::new());
    assert!(
        host.topology
            .caches
            .iter()
            .enumerate()
            .all(|(index, cache)| cache.id.0 as usize == index)
    );
}

/// Do offline CPUs stay listed, leave their caches, and remove a cache without any other CPU?
#[test]
fn offline_cpus_are_listed_but_share_nothing() {
    let gone: Vec<u32> = (16..24).chain(80..88).chain([0]).collect();
    let host = epyc(&gone).read().unwrap();
    let last: Vec<&Cache> = host.topology.last_level_caches().collect();
    assert_eq!(last.len(), 7, "the L3 of the complex that is gone is gone");
    assert_eq!(last[0].cpus.to_string(), "1-7,64-71");
    assert_eq!(host.topology.cpus.len(), 128);
    assert_eq!(
        host.topology.cpus.iter().filter(|cpu| !cpu.online).count(),
        17
    );
    let ids: Vec<_> = last
        .iter()
        .map(|cache| host.kernel_cache_ids[cache.id.0 as usize].unwrap())
        .collect();
    assert_eq!(ids, [0, 2, 6, 8, 10, 12, 14]);
}

/// Are two L2s per socket found if CPU numbers alternate between sockets, from an old kernel's maps alone?
#[test]
fn old_kernels_with_hexadecimal_maps_are_read() {
    let tree = SysfsTree::new();
    for cpu in 0..8u32 {
        tree.cpu(
            &format!("cpu{cpu}/topology/physical_package_id"),
            &(3 * (cpu % 2)).to_string(),
        );
        tree.cpu(
            &format!("cpu{cpu}/topology/core_id"),
            &(cpu / 2).to_string(),
        );
        tree.cpu(
            &format!("cpu{cpu}/topology/thread_siblings"),
            &format!("00000000,{:08x}", 1 << cpu),
        );
        tree.cpu(&format!("cpu{cpu}/cache/index0/level"), "2")
            .cpu(&format!("cpu{cpu}/cache/index0/size"), "4096K");
        let map = 0x11u32 << (cpu % 4);
        tree.cpu(
            &format!("cpu{cpu}/cache/index0/shared_cpu_map"),
            &format!("00000000,{map:08x}"),
        );
    }
    tree.cpu("cpu6/online", "0");
    let host = tree.read().unwrap();
    let shared: Vec<String> = host
        .topology
        .caches
        .iter()
        .map(|cache| cache.cpus.to_string())
        .collect();
    assert_eq!(shared, ["0,4", "1,5", "2", "3,7"]);
    assert_eq!(
        host.topology
            .cpus
            .iter()
            .map(|cpu| cpu.package)
            .collect::<Vec<_>>(),
        [0, 1, 0, 1, 0, 1, 0, 1]
    );
    assert!(!host.topology.cpus[6].online);
    assert_eq!(
        host.warnings,
        ["no sys/devices/system/node: all memory taken as one node"]
    );
}

/// Does a virtual machine without cache directories, packages or sizes still yield a topology, with warnings?
#[test]
fn a_bare_virtual_machine_is_read_with_warnings() {
    let tree = SysfsTree::new();
    tree.cpu("online", "0-1").node(0, "0-1");
    tree.cpu("cpu0/topology/physical_package_id", "-1")
        .cpu("cpu1/topology/core_id", "0");
    let host = tree.read().unwrap();
    assert_eq!(host.topology.cpus.len(), 2);
    assert!(host.topology.caches.is_empty());
    assert_eq!(
        host.warnings,
        [
            "CPUs 0-1: no physical_package_id; taken as one package",
            "CPUs 0-1: no cache directory; which caches they share is not known"
        ]
    );
    tree.cache(0, 3, (3, "Unified", "0K"), 0, "0-1")
        .cpu("cpu1/cache/index3/level", "3");
    let host = tree.read().unwrap();
    assert_eq!(
        host.topology.caches.len(),
        1,
        "contradicting claims are one cache"
    );
    assert_eq!(host.topology.caches[0].cpus.to_string(), "0-1");
    assert!(
        host.warnings
            .iter()
            .any(|warning| warning.contains("taken as private to CPU 1")),
        "{:?}",
        host.warnings
    );
    assert!(
        host.warnings
            .iter()
            .any(|warning| warning == "L3: the host does not report its size"),
        "{:?}",
        host.warnings
    );
}

/// If CPUs differ in their last level (efficiency cores without an L3), is each CPU's own last level marked?
#[test]
fn each_cpus_own_last_level_is_marked() {
    let tree = SysfsTree::new();
    tree.cpu("online", "0-3").node(7, "0-3");
    for cpu in 0..4 {
        tree.place(cpu, 0, cpu, &cpu.to_string());
        tree.cache(
            cpu,
            2,
            (2, "Unified", "1M"),
            cpu,
            if cpu < 2 {
                ["0", "1"][cpu as usize]
            } else {
                "2-3"
            },
        );
    }
    tree.cache(0, 3, (3, "Unified", "8M"), 0, "0-1")
        .cache(1, 3, (3, "Unified", "8M"), 0, "0-1");
    let host = tree.read().unwrap();
    let last: Vec<(CacheLevel, String)> = host
        .topology
        .caches
        .iter()
        .filter(|c| c.last_level)
        .map(|c| (c.level, c.cpus.to_string()))
        .collect();
    assert_eq!(
        last,
        [
            (CacheLevel::L2, "2-3".to_string()),
            (CacheLevel::L3, "0-1".to_string())
        ]
    );
    assert!(host.topology.cpus.iter().all(|cpu| cpu.memory_node == 7));
}

/// Is a file that cannot be understood named, with what was found and expected?
#[test]
fn files_that_cannot_be_understood_are_named() {
    let error = |file: &str, contents: &str| {
        let tree = SysfsTree::new();
        tree.cpu("online", "0-1")
            .place(0, 0, 0, "0")
            .place(1, 0, 1, "1");
        tree.cache(1, 3, (3, "Unified", "8M"), 0, "0-1")
            .cpu(file, contents);
        tree.read().unwrap_err().to_string()
    };
    assert!(
        error("online", "0-x").ends_with("cpu/online: found '0-x', expected a list such as 0-3,8")
    );
    assert!(error("online", "900-901").contains("found no online CPU"));
    assert!(
        error("cpu1/cache/index3/size", "big")
            .ends_with("index3/size: found 'big', expected a size such as 32768K")
    );
    assert!(
        error("cpu1/cache/index3/level", "9").ends_with("index3/level: found 9, expected 1 to 4")
    );
    assert!(
        error("cpu1/topology/core_id", "five")
            .ends_with("core_id: found 'five', expected a whole number")
    );
    let nowhere = read_topology(Path::new("/nonexistent-root"))
        .unwrap_err()
        .to_string();
    assert!(
        nowhere.contains("sys/devices/system/cpu: found No such file"),
        "{nowhere}"
    );
}

/// Are distances assigned to the right nodes although their numbers have gaps, and are invalid ones left out with a
/// warning?
#[test]
fn distances_are_assigned_by_node_numbers_with_gaps() {
    let tree = epyc(&[]);
    assert_eq!(
        tree.read().unwrap().topology.memory_latency,
        Vec::<Vec<f64>>::new(),
        "one node"
    );
    tree.node(0, "0-63")
        .node(2, "64-127")
        .distance(0, "10 32\n")
        .distance(2, "32 10\n");
    let far = vec![vec![1.0, 0.0, 3.2], vec![], vec![3.2, 0.0, 1.0]];
    let topology = tree.read().unwrap().topology;
    assert_eq!(topology.memory_latency, far);
    let factors = [
        [4, 0, 0].as_slice(),
        &[1, 0, 1],
        &[0, 1, 0],
        &[0, 0, 0],
        &[0, 0, 0, 1],
    ];
    assert_eq!(
        factors.map(|pages| topology.memory_factor(0, pages)),
        [Some(1.0), Some(2.1), None, None, None]
    );
    tree.distance(2, "32 10 10\n");
    let host = tree.read().unwrap();
    assert!(
        host.topology.memory_latency.is_empty() && host.warnings[0].contains("node2/distance"),
        "{host:?}"
    );
    tree.distance(2, "32 near\n");
    assert!(tree.read().unwrap_err().file.ends_with("node2/distance"));
}
