//! Snapshots of the checks on small trees. Those of Intel have the resources, numbers and groups of trees that
//! goresctrl's tests recorded on real machines; those with assigned counters, `io_alloc`, slow memory and events of
//! packages follow the kernel's documentation, because no recorded tree has these.

use super::*;
use crate::act::resctrl;
use crate::act::resctrl::tests::{machine_tree_of, resctrl_files, unpack_tree};
use crate::sense::topology::read_topology;

/// The files of a resource that divides a cache.
fn cache_info(resource: &str, mask: &str, shareable: &str, usage: &str, classes: &str) -> String {
    info(
        resource,
        &[
            ("cbm_mask", mask),
            ("min_cbm_bits", "1"),
            ("num_closids", classes),
            ("shareable_bits", shareable),
            ("bit_usage", usage),
        ],
    )
}

fn info(resource: &str, files: &[(&str, &str)]) -> String {
    let file =
        |(file, text): &(&str, &str)| resctrl_files(&[(&format!("info/{resource}/{file}"), text)]);
    files.iter().map(file).collect()
}

/// Limits of bandwidth, in percent as on Intel.
fn percent_info() -> String {
    info(
        "MB",
        &[
            ("num_closids", "8"),
            ("min_bandwidth", "10"),
            ("bandwidth_gran", "10"),
            ("delay_linear", "1"),
        ],
    )
}

const AMD: &str = "==> /proc/cpuinfo <==\nprocessor\t: 0\nvendor_id\t: AuthenticAMD\n";

fn amd_bandwidth(resource: &str) -> String {
    info(
        resource,
        &[
            ("num_closids", "16"),
            ("min_bandwidth", "1"),
            ("bandwidth_gran", "1"),
            ("delay_linear", "0"),
        ],
    )
}

const MONITORED: &str = "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes";

/// Monitors of these domains of L3, whose counters read `value`.
fn monitors(ids: &str, domains: &[u32], value: &str) -> String {
    let counters = |domain: &u32| {
        let file = |name: &str| format!("mon_data/mon_L3_{domain:02}/{name}");
        resctrl_files(&[
            (&file("llc_occupancy"), "4096"),
            (&file("mbm_total_bytes"), value),
            (&file("mbm_local_bytes"), value),
        ])
    };
    info("L3_MON", &[("num_rmids", ids), ("mon_features", MONITORED)])
        + &domains.iter().map(counters).collect::<String>()
}

/// Four sockets with all facilities of 2019, and groups of two other tools, one of them left behind.
fn full_intel() -> String {
    let schemata = "L3:0=fffff;1=fffff;2=fffff;3=fffff\nMB:0=100;1=100;2=100;3=100";
    let usage = "0=XXSSSSSSSSSSSSSSSSSS";
    let container = format!("mon_groups/{}/tasks", "0f".repeat(32));
    machine_tree_of(3, &[0, 1, 2, 3], 2)
        + &cache_info("L3", "fffff", "c0000", usage, "16")
        + &percent_info()
        + &monitors("192", &[0, 1, 2, 3], "17")
        + &resctrl_files(&[
            ("schemata", schemata),
            ("tasks", "1\n2"),
            (
                "goresctrl.Stale/schemata",
                "L3:0=3ffff;1=3ffff;2=3ffff;3=3ffff",
            ),
            ("goresctrl.Stale/tasks", ""),
            ("Guaranteed/schemata", schemata),
            ("Guaranteed/tasks", "3"),
            ("Guaranteed/mon_groups/db/tasks", ""),
            (&container, "5\n6"),
        ])
}

fn trees() -> Vec<(&'static str, String)> {
    let l3_files = |schemata: &str| resctrl_files(&[("schemata", schemata), ("tasks", "1")]);
    let amd_schemata = "  MB:0=2048;1=2048\n  L3:0=ffff;1=ffff";
    let amd = |monitored: &str| {
        machine_tree_of(3, &[0, 1], 2)
            + AMD
            + &cache_info(
                "L3",
                "ffff",
                "0",
                "0=SSSSSSSSSSSSSSSS;1=SSSSSSSSSSSSSSSS",
                "16",
            )
            + &amd_bandwidth("MB")
            + &monitors("256", &[0, 1], monitored)
    };
    vec![
        ("no resctrl", String::new()),
        (
            "not mounted",
            "==> /proc/filesystems <==\nnodev\tresctrl\n".to_string(),
        ),
        (
            "L3, bandwidth in percent, groups of others (recorded)",
            full_intel(),
        ),
        (
            "L2 only (recorded)",
            machine_tree_of(2, &[0, 1], 2)
                + &cache_info("L2", "ff", "0", "0=SSSSSSSS;1=SSSSSSSS", "4")
                + &l3_files("L2:0=ff;1=ff"),
        ),
        (
            "L2 and L3, code and data of L2 apart (recorded)",
            machine_tree_of(2, &[0, 1, 2, 3], 2)
                + &machine_tree_of(3, &[0], 8)
                + &cache_info("L3", "fff", "400", "0=SXSSSSSSSSSS", "4")
                + &cache_info("L2CODE", "fffff", "0", "0=SSSSSSSSSSSSSSSSSSSS", "4")
                + &cache_info("L2DATA", "fffff", "0", "0=SSSSSSSSSSSSSSSSSSSS", "4")
                + &l3_files(
                    "    L3:0=00fff\nL2DATA:0=fffff;1=fffff;2=fffff;3=fffff\nL2CODE:0=fffff;1=fffff;2=fffff;3=fffff",
                ),
        ),
        (
            "L2, L3 and bandwidth, two threads of a core throttled alike (recorded)",
            machine_tree_of(3, &[0, 1], 2)
                + &cache_info(
                    "L2",
                    "ffff",
                    "0",
                    "0=SSSSSSSSSSSSSSSS;1=SSSSSSSSSSSSSSSS",
                    "8",
                )
                + &cache_info(
                    "L3",
                    "fffff",
                    "c0001",
                    "0=XXSSSSSSSSSSSSSSSSSX;1=HH00SSSSSSSS0000000H",
                    "15",
                )
                + &percent_info()
                + &info("MB", &[("thread_throttle_mode", "max")])
                + &monitors("512", &[0, 1], "17")
                + &l3_files(
                    "    MB:0=  100;1=  100\n    L2:0=0ffff;1=0ffff\n    L3:0=fffff;1=fffff",
                ),
        ),
        (
            "bandwidth in percent, no cache divided (recorded)",
            machine_tree_of(3, &[0, 1], 2)
                + &percent_info()
                + &monitors("192", &[0, 1], "17")
                + &l3_files("MB:0=100;1=100"),
        ),
        (
            "bandwidth in MiB/s, no cache divided (recorded)",
            machine_tree_of(3, &[0, 1], 2).replace("resctrl rw\n", "resctrl rw,mba_MBps\n")
                + &percent_info()
                + &monitors("160", &[0, 1], "17")
                + &l3_files("MB:0=4294967295;1=4294967295"),
        ),
        (
            "L3 without bandwidth (recorded)",
            machine_tree_of(3, &[0, 1], 2)
                + &cache_info(
                    "L3",
                    "fffff",
                    "c0000",
                    "0=XXSSSSSSSSSSSSSSSSSS;1=XXSSSSSSSSSSSSSSSSSS",
                    "16",
                )
                + &monitors("192", &[0, 1], "17")
                + &l3_files("L3:0=fffff;1=fffff"),
        ),
        (
            "code and data of L3 apart (recorded)",
            machine_tree_of(3, &[0, 1], 2)
                + &cache_info(
                    "L3CODE",
                    "fffff",
                    "c0000",
                    "0=HH000000000SSSSSSSSS;1=HH000000000SSSSSSSSS",
                    "8",
                )
                + &cache_info(
                    "L3DATA",
                    "fffff",
                    "c0000",
                    "0=HH000000000SSSSSSSSS;1=HH000000000SSSSSSSSS",
                    "8",
                )
                + &monitors("176", &[0, 1], "17")
                + &l3_files("L3DATA:0=001ff;1=001ff\nL3CODE:0=001ff;1=001ff"),
        ),
        (
            "AMD, counters assigned, io_alloc disabled (documented)",
            amd("Unassigned")
                + &info(
                    "L3",
                    &[
                        ("sparse_masks", "1"),
                        ("io_alloc", "disabled"),
                        ("io_alloc_cbm", "0=0;1=0"),
                    ],
                )
                + &info(
                    "L3_MON",
                    &[
                        ("mbm_assign_mode", "[mbm_event]\ndefault"),
                        ("num_mbm_cntrs", "0=32;1=32"),
                        ("available_mbm_cntrs", "0=0;1=0"),
                    ],
                )
                + &l3_files(amd_schemata),
        ),
        (
            "AMD, io_alloc enabled, sparse masks, slow memory (documented)",
            amd("17")
                + &amd_bandwidth("SMBA")
                + &info(
                    "L3",
                    &[
                        ("sparse_masks", "1"),
                        ("io_alloc", "enabled"),
                        ("io_alloc_cbm", "0=f000;1=f00f"),
                    ],
                )
                + &resctrl_files(&[("db/schemata", "L3:0=fff;1=f0ff"), ("db/tasks", "7")])
                + &l3_files("SMBA:0=2048;1=2048\n  MB:0=2048;1=2048\n  L3:0=ffff;1=ffff"),
        ),
        (
            "monitors only, all ids in use, energy of packages (documented)",
            machine_tree_of(3, &[0, 1], 2)
                + &monitors("2", &[0, 1], "Unavailable")
                + &info(
                    "PERF_PKG_MON",
                    &[
                        ("num_rmids", "576"),
                        ("mon_features", "core_energy\nactivity"),
                    ],
                )
                + &resctrl_files(&[
                    ("mon_data/mon_PERF_PKG_00/core_energy", "42.375"),
                    ("mon_data/mon_PERF_PKG_01/core_energy", "0.5"),
                    ("mon_groups/qemu-1-vm-vcpus_0/tasks", ""),
                ]),
        ),
    ]
}

fn describe_tree(tree: &str) -> String {
    let (dir, host) = unpack_tree(tree);
    let topology = read_topology(dir.path());
    let resctrl = match &topology {
        Ok(topology) => resctrl::find(&host, topology),
        Err(_) => resctrl::find(&host, &no_caches()),
    };
    let checks = [
        check_monitoring(&host, &resctrl),
        check_package_events(&resctrl),
        check_monitor_groups(&host, &resctrl),
        check_ways(&resctrl),
        check_io_ways(&host, &resctrl),
        check_bandwidth(&resctrl),
        check_slow_bandwidth(&resctrl),
    ];
    let line = |check: &CapabilityCheck| {
        let remedy = check
            .remedy
            .as_ref()
            .map(|text| format!("\n    remedy: {text}"));
        format!(
            "  {} {}: {}{}\n",
            check.state.describe(),
            check.name,
            check.detail,
            remedy.unwrap_or_default()
        )
    };
    checks.iter().map(line).collect()
}

fn no_caches() -> crate::sense::topology::HostTopology {
    crate::sense::topology::HostTopology {
        topology: cachemate_core::Topology::default(),
        kernel_cache_ids: Vec::new(),
        warnings: Vec::new(),
    }
}

/// Is each facility usable, unusable with its cause and remedy, or absent, as the tree of each machine says?
#[test]
fn each_facility_is_usable_unusable_or_absent_as_the_tree_says() {
    let shown: String = trees()
        .iter()
        .map(|(name, tree)| format!("{name}\n{}", describe_tree(tree)))
        .collect();
    let expected = include_str!("snapshots.txt");
    assert!(shown == expected, "found:\n{shown}");
}
