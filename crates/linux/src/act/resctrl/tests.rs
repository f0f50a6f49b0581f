//! Our groups on a fake resctrl that behaves like the lab guest's, and parsing of trees that were recorded on that
//! guest.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use cachemate_core::{
    BandwidthLimit, BandwidthSupport, BandwidthUnit, CacheId, CacheShare, Capabilities,
    CounterEvent, CounterScope, GroupId, PartitionSupport, Plan, PlanItem, ProcessId,
    RefusalReason, ShareMember, TaskId, Units, WindowLength,
};

use super::fake_tests::{FakeCat, FakeGroup, MOUNT, topology};
use super::{Resctrl, WayController, find, groups};
use crate::act::actuator::{Actuator, ApplyReport};
use crate::act::changes;
use crate::act::rules::{ManageAction, ManageRule};
use crate::fake_tests::{waiting_guardian, write_tree};
use crate::kernel::{Kernel, LinuxHost, ThreadKey};
use crate::safety::journal::Journal;
use crate::sense::tasks::TaskTable;
use crate::sense::topology::read_topology;

/// Unpacks a tree as text: one file for each `==> PATH <==`.
pub(crate) fn unpack_tree(tree: &str) -> (tempfile::TempDir, LinuxHost) {
    let dir = tempfile::tempdir().unwrap();
    write_tree(
        dir.path(),
        tree.split("==> ")
            .skip(1)
            .map(|part| part.split_once(" <==\n").unwrap()),
    );
    let host = LinuxHost::new(dir.path());
    (dir, host)
}

fn find_resctrl(tree: &str) -> Result<Resctrl, crate::MissingFacility> {
    let (dir, host) = unpack_tree(tree);
    find(&host, &read_topology(dir.path()).unwrap())
}

const GUEST: &str = include_str!("trees/guest-8-classes.txt");
const GUEST_WITH_OWNER: &str = include_str!("trees/guest-exclusive-owner.txt");
const GUEST_ONE_CLASS: &str = include_str!("trees/guest-1-class.txt");

/// A tree as above of a machine with `cpus` CPUs per L3, whose kernel ids are `ids`.
fn machine_tree(ids: &[u32], cpus: u32) -> String {
    machine_tree_of(3, ids, cpus)
}

/// The same of caches at another level; each is in a package of its own.
pub(crate) fn machine_tree_of(level: u32, ids: &[u32], cpus: u32) -> String {
    let mut tree = format!(
        "==> /sys/devices/system/cpu/online <==\n0-{}\n",
        ids.len() as u32 * cpus - 1
    );
    for (index, id) in ids.iter().enumerate() {
        for cpu in index as u32 * cpus..(index as u32 + 1) * cpus {
            let shared = format!("{}-{}", index as u32 * cpus, (index as u32 + 1) * cpus - 1);
            for (file, text) in [
                ("level", &*level.to_string()),
                ("type", "Unified"),
                ("id", &id.to_string()),
                ("size", "32768K"),
                ("shared_cpu_list", &shared),
            ] {
                tree += &format!(
                    "==> /sys/devices/system/cpu/cpu{cpu}/cache/index{level}/{file} <==\n{text}\n"
                );
            }
            tree += &format!(
                "==> /sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id <==\n{index}\n"
            );
        }
    }
    tree + "==> /proc/self/mountinfo <==\n36 35 0:30 / /sys/fs/resctrl rw,relatime shared:9 - resctrl resctrl rw\n"
}

pub(crate) fn resctrl_files(of: &[(&str, &str)]) -> String {
    of.iter()
        .map(|(path, text)| format!("==> /sys/fs/resctrl/{path} <==\n{text}\n"))
        .collect()
}

/// Are the trees of the guest's kernel read correctly: another mount point, three ways per cache, eight classes, one
/// class, and another tool's exclusive group?
#[test]
fn the_guests_trees_are_read() {
    let guest = find_resctrl(GUEST).unwrap();
    assert_eq!(guest.mount, Path::new("/mnt/rdt"));
    let ways = PartitionSupport::Ways {
        ways: 3,
        min_ways: 1,
        contiguous: true,
        max_groups: 8,
        device_ways: 1 << 2,
    };
    let caches: Vec<_> = guest
        .caches
        .iter()
        .map(|divided| (divided.cache, divided.domain))
        .collect();
    assert_eq!(
        guest.partitions(),
        [(caches[0].0, ways), (caches[1].0, ways)]
    );
    assert_eq!(
        caches.iter().map(|(_, domain)| *domain).collect::<Vec<_>>(),
        [0, 1]
    );
    assert_eq!(guest.caches[0].shared_with_io.to_string(), "2");
    let words = "at /mnt/rdt: 2 L3 caches of 3 ways, 1 or more in one piece a group, 7 groups";
    assert_eq!(guest.describe_ways().unwrap(), words);
    assert!(guest.monitored_caches.is_empty());

    let owned = find_resctrl(GUEST_WITH_OWNER).unwrap();
    assert_eq!((owned.other_group_count, owned.class_count), (1, 8));
    let (_dir, host) = unpack_tree(GUEST_WITH_OWNER);
    let exclusive = super::occupancy::exclusive_ways(
        &host,
        Path::new("/mnt/rdt"),
        cachemate_core::CacheLevel::L3,
    );
    assert_eq!(exclusive[&1].to_string(), "0");
    let status = groups::last_status(&host, Path::new("/mnt/rdt"));
    assert_eq!(
        status.as_deref(),
        Some("No task 999\nError while processing task 999")
    );

    let survey = find_resctrl(GUEST_ONE_CLASS).unwrap();
    assert_eq!(survey.caches.len(), 4);
    assert!(survey.partitions().is_empty());
    assert_eq!(
        survey.describe_ways().unwrap_err().reason,
        "/mnt/rdt: 1 classes of service, others hold 0, the root group has one"
    );
}

/// Is an Intel host read: separate code and data, memory bandwidth with fewer classes, no report on gaps, monitors?
#[test]
fn an_intel_host_with_code_and_data_apart_is_read() {
    let control = |name: &str| {
        let info =
            |file: &str, text: &str| resctrl_files(&[(&format!("info/{name}/{file}"), text)]);
        info("cbm_mask", "7ff")
            + &info("min_cbm_bits", "2")
            + &info("num_closids", "8")
            + &info("shareable_bits", "600")
            + &info("bit_usage", "0=XXSSSSSSSSS;1=XXSSSSSSSSS")
    };
    let tree = machine_tree(&[0, 1], 2)
        + &control("L3CODE")
        + &control("L3DATA")
        + &resctrl_files(&[
            (
                "schemata",
                "    MB:0=  100;1=  100\nL3DATA:0=7ff;1=7ff\nL3CODE:0=7ff;1=7ff",
            ),
            ("info/MB/num_closids", "4"),
            ("info/MB/min_bandwidth", "10"),
            ("info/MB/bandwidth_gran", "10"),
            (
                "info/L3_MON/mon_features",
                "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes",
            ),
            ("mon_data/mon_L3_00/llc_occupancy", "4096"),
            ("mon_data/mon_L3_01/llc_occupancy", "4096"),
            ("mon_groups/perf/schemata-is-not-here", ""),
        ]);
    let intel = find_resctrl(&tree).unwrap();
    let ways = PartitionSupport::Ways {
        ways: 11,
        min_ways: 2,
        contiguous: true,
        max_groups: 4,
        device_ways: 0b11 << 9,
    };
    assert_eq!(intel.partitions(), [(CacheId(0), ways), (CacheId(1), ways)]);
    assert_eq!(
        intel.monitored_caches,
        BTreeMap::from([(0, CacheId(0)), (1, CacheId(1))])
    );
    assert!(
        intel.counted_events.has_occupancy
            && intel.counted_events.has_total_bytes
            && intel.counted_events.has_local_bytes
    );
}

/// Is an EPYC host read: gaps in masks allowed, sparse cache ids, and other tools' groups using classes?
#[test]
fn an_epyc_with_sparse_ids_and_other_owners_is_read() {
    let tree = machine_tree(&[0, 1, 8, 9], 2)
        + &resctrl_files(&[
            (
                "schemata",
                "L3:0=ffff;1=ffff;8=ffff;9=ffff\n    MB:0=2048;1=2048;8=2048;9=2048",
            ),
            ("info/L3/cbm_mask", "ffff"),
            ("info/L3/min_cbm_bits", "1"),
            ("info/L3/num_closids", "16"),
            ("info/L3/sparse_masks", "1"),
            ("info/L3/shareable_bits", "0"),
            ("info/MB/num_closids", "16"),
            ("info/MB/min_bandwidth", "1"),
            ("info/MB/bandwidth_gran", "1"),
            ("kube.guaranteed/schemata", "L3:0=f;1=f;8=f;9=f"),
            ("kube.burst/schemata", "L3:0=ff;1=f;8=f;9=f"),
        ]);
    let epyc = find_resctrl(&tree).unwrap();
    let ways = PartitionSupport::Ways {
        ways: 16,
        min_ways: 1,
        contiguous: false,
        max_groups: 14,
        device_ways: 0,
    };
    assert_eq!(epyc.partitions().len(), 4);
    assert_eq!(epyc.partitions()[2], (CacheId(2), ways));
    assert_eq!(epyc.cache(CacheId(2)).unwrap().domain, 8);
    assert_eq!(epyc.counted_events, super::MonitoredEvents::default());
    let limits = epyc.bandwidth_limits();
    assert_eq!((limits.len(), limits[2].0), (4, CacheId(2)));
    let unit = BandwidthUnit::EighthsOfGigabytePerSecond;
    let (support, largest) = (limits[2].1, 2048);
    assert_eq!((support.unit, support.max_level), (unit, largest));
    assert_eq!((support.min_level, support.step), (1, 1));
    assert_eq!(support.max_groups, 14);
}

/// If a file of one resource of bandwidth is bad: are the other resource and the ways still usable, with its number of
/// classes, and is the reason kept?
#[test]
fn a_bad_resource_of_bandwidth_is_left_out_alone() {
    let find = |bad: &str| {
        let files = ["MB", "SMBA"].map(|name| {
            let number = |file: &str, good: &'static str| {
                let path = format!("info/{name}/{file}");
                resctrl_files(&[(&path, if path == bad { "many" } else { good })])
            };
            number("num_closids", "4")
                + &number("min_bandwidth", "1")
                + &number("bandwidth_gran", "1")
        });
        let ways = [
            ("schemata", "L3:0=ffff\nMB:0=2048\nSMBA:0=2048"),
            ("info/L3/cbm_mask", "ffff"),
            ("info/L3/min_cbm_bits", "1"),
            ("info/L3/num_closids", "16"),
        ];
        find_resctrl(&(machine_tree(&[0], 2) + &resctrl_files(&ways) + &files.concat())).unwrap()
    };
    let good = find("");
    assert_eq!(good.bandwidth_limits().len(), 1);
    for (name, file) in [("MB", "bandwidth_gran"), ("SMBA", "min_bandwidth")] {
        let resctrl = find(&format!("info/{name}/{file}"));
        assert_eq!(resctrl.partitions(), good.partitions());
        let is_memory = name == "MB";
        assert_eq!(resctrl.bandwidth_limits().is_empty(), is_memory);
        let problem = resctrl.bandwidth[name].as_ref().unwrap_err();
        let path = resctrl.mount.join("info").join(name).join(file);
        assert_eq!(
            problem.reason,
            format!("{}: expected a whole number", path.display())
        );
    }
}

/// If the line of a limit of bandwidth is bad: are the ways still usable, and is the line named?
#[test]
fn a_bad_line_of_bandwidth_disables_bandwidth_alone() {
    let files = [
        ("schemata", "L3:0=ffff\nMB:0=unlimited"),
        ("info/L3/cbm_mask", "ffff"),
        ("info/L3/min_cbm_bits", "1"),
        ("info/L3/num_closids", "16"),
        ("info/MB/num_closids", "4"),
    ];
    let resctrl = find_resctrl(&(machine_tree(&[0], 2) + &resctrl_files(&files))).unwrap();
    assert_eq!((resctrl.partitions().len(), resctrl.class_count), (1, 4));
    assert!(resctrl.bandwidth_limits().is_empty());
    assert_eq!(
        resctrl.bandwidth["MB"].as_ref().unwrap_err().reason,
        "/sys/fs/resctrl/schemata: found 'MB:0=unlimited', expected a line such as MB:0=100;1=50"
    );
}

/// Are the counters of an L3 with sub-NUMA clusters read only if the kernel adds those of all clusters, and each line
/// once?
#[test]
fn counters_of_sub_numa_clusters_are_read_once_or_not_at_all() {
    let node = |node: u32, cpus: &str| {
        format!("==> /sys/devices/system/node/node{node}/cpulist <==\n{cpus}\n")
            + &format!("==> /sys/devices/system/node/node{node}/distance <==\n10 12\n")
    };
    let monitors = [
        ("info/L3_MON/mon_features", "llc_occupancy"),
        ("mon_data/mon_L3_00/llc_occupancy", "4096"),
    ];
    let old_kernel =
        machine_tree(&[0], 4) + &node(0, "0-1") + &node(1, "2-3") + &resctrl_files(&monitors);
    let resctrl = find_resctrl(&old_kernel).unwrap();
    assert!(resctrl.has_unknown_clusters && resctrl.monitored_caches.is_empty());

    let clusters = [
        ("mon_data/mon_L3_00/mon_sub_L3_00/llc_occupancy", "1024"),
        ("mon_data/mon_L3_00/mon_sub_L3_01/llc_occupancy", "3072"),
    ];
    let (dir, host) = unpack_tree(&(old_kernel + &resctrl_files(&clusters)));
    let resctrl = find(&host, &read_topology(dir.path()).unwrap()).unwrap();
    assert!(!resctrl.has_unknown_clusters);
    let uses = WayController::new(resctrl, OWNER).cache_use(&host);
    let occupancies: Vec<_> = uses.iter().map(|of| of.occupancy_bytes).collect();
    assert_eq!(occupancies, [Some(4096)]);
}

/// Not mounted, mounted read-only, one group bind-mounted elsewhere, a file with invalid content: is each reported,
/// without a panic?
#[test]
fn unusable_mounts_and_files_are_reported_without_a_panic() {
    let bare = machine_tree(&[0], 2);
    let with = |mountinfo: &str, filesystems: &str| {
        let start = bare.find("==> /proc").unwrap();
        let proc = format!(
            "==> /proc/self/mountinfo <==\n{mountinfo}\n==> /proc/filesystems <==\n{filesystems}\n"
        );
        find_resctrl(&format!("{}{proc}", &bare[..start])).unwrap_err()
    };
    assert_eq!(
        with("", "nodev\text4\n").reason,
        "the kernel has no resctrl, or the processor no RDT/QoS"
    );
    let not_mounted = with("1 2 0:3 / / rw - ext4 x rw", "nodev\tresctrl");
    assert_eq!(not_mounted.reason, "not mounted");
    assert_eq!(
        not_mounted.remedy.as_deref(),
        Some("mount -t resctrl resctrl /sys/fs/resctrl")
    );
    let bound = "36 35 0:30 /db /srv/db rw - resctrl resctrl rw";
    assert_eq!(
        with(bound, "resctrl").reason,
        "not mounted",
        "a mount of one group is not the whole"
    );
    assert_eq!(
        with("3 4 0:3 / /a\\040b ro - resctrl r rw", "resctrl").reason,
        "/a b: mounted read-only"
    );
    let broken = bare + &resctrl_files(&[("schemata", "L3:0=ff"), ("info/L3/cbm_mask", "zz")]);
    assert_eq!(
        find_resctrl(&broken).unwrap_err().reason,
        "/sys/fs/resctrl/info/L3/cbm_mask: expected a hexadecimal mask"
    );
}

/// Everything that a plan needs, on the fake host.
pub(super) struct ResctrlFixture {
    pub cat: FakeCat,
    tasks: TaskTable,
    actuator: Actuator,
    ways: WayController,
    dir: tempfile::TempDir,
    /// Partitions that were read before there were any groups.
    partitions: Vec<(CacheId, PartitionSupport)>,
    bandwidth: Vec<(CacheId, BandwidthSupport)>,
}

const OWNER: ThreadKey = ThreadKey {
    tid: 77,
    start_ticks: 5,
};

impl ResctrlFixture {
    fn new() -> Self {
        Self::with_cat(FakeCat::new())
    }
    fn with_cat(cat: FakeCat) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let actuator = Actuator::new(dir.path(), waiting_guardian());
        let resctrl = find(&cat, &topology()).unwrap();
        let (partitions, bandwidth) = (resctrl.partitions(), resctrl.bandwidth_limits());
        let ways = WayController::new(resctrl, OWNER);
        let mut bench = ResctrlFixture {
            cat,
            tasks: TaskTable::default(),
            actuator,
            ways,
            dir,
            partitions,
            bandwidth,
        };
        bench.refresh_tasks();
        bench
    }
    fn refresh_tasks(&mut self) {
        self.tasks
            .refresh(
                &self.cat,
                &[ManageRule {
                    action: ManageAction::Manage(None),
                    ..ManageRule::default()
                }],
                0,
            )
            .unwrap();
    }
    fn apply(&mut self, shares: &[CacheShare]) -> ApplyReport {
        self.apply_limits(shares, &[])
    }
    fn apply_limits(&mut self, shares: &[CacheShare], limits: &[BandwidthLimit]) -> ApplyReport {
        let plan = Plan {
            shares: shares.to_vec(),
            bandwidth: limits.to_vec(),
            ..Plan::idle(WindowLength::Time { ns: 1 })
        };
        let partitions = self.partitions.clone();
        let bandwidth = self.bandwidth.clone();
        let bench = changes::fixture::ApplyFixture {
            host: &self.cat,
            actuator: &mut self.actuator,
            ways: Some(&mut self.ways),
            tasks: &self.tasks,
            capabilities: &Capabilities {
                partitions,
                bandwidth,
                ..changes::fixture::sample_capabilities()
            },
            groups: &[],
        };
        bench.apply(&plan).0
    }
    fn active_shares(&self, shares: &[CacheShare]) -> Vec<String> {
        let held = self.ways.read_back(&self.cat, shares, &self.tasks.tasks());
        let text = |held: &cachemate_core::ActiveShare| {
            let Units::Ways { mask } = &held.share.units else {
                panic!("not ways")
            };
            let share = &held.share;
            format!(
                "{}@{}={mask}x{}",
                share.group.0,
                share.cache.0,
                share.members.len()
            )
        };
        held.iter().map(text).collect()
    }
    fn restore(&mut self) {
        self.actuator.restore_all(&self.cat).unwrap();
        self.ways.forget();
        assert!(
            self.cat
                .groups
                .borrow()
                .keys()
                .all(|name| !name.starts_with(groups::GROUP_PREFIX))
        );
        assert!(
            self.cat
                .groups_by_thread()
                .values()
                .all(|name| !name.starts_with(groups::GROUP_PREFIX))
        );
        assert!(!self.dir.path().join(Journal::FILE_NAME).exists());
    }
}

pub(super) fn share(group: u32, process: u32, cache: u32, mask: &str) -> CacheShare {
    let members = vec![ShareMember::Process(ProcessId(process))];
    let units = Units::Ways {
        mask: mask.parse().unwrap(),
    };
    CacheShare {
        group: GroupId(group),
        members,
        cache: CacheId(cache),
        units,
    }
}

/// Is a plan the whole state: are groups created, kept if only a mask changes, reused, and removed, and does a repeated
/// plan change nothing?
#[test]
fn a_plan_is_the_whole_state_of_the_groups() {
    let mut bench = ResctrlFixture::new();
    assert_eq!(bench.apply(&[]).write_calls, 0);
    assert!(
        !bench.dir.path().join(Journal::FILE_NAME).exists(),
        "starting changes nothing"
    );
    let first = [
        share(1, 0, 0, "0-3"),
        share(2, 1, 0, "4-7"),
        share(2, 1, 1, "0-1"),
    ];
    let applied = bench.apply(&first);
    assert_eq!(
        (applied.refused_items, applied.write_calls),
        (Vec::new(), 6),
        "two groups, two masks, two threads"
    );
    assert_eq!(bench.cat.mask_texts(), ["5:0=f,8=ff", "6:0=f0,8=3"]);
    assert_eq!(
        bench.active_shares(&first),
        ["1@0=0-3x1", "2@0=4-7x1", "2@1=0-1x1"]
    );
    assert_eq!(bench.apply(&first).write_calls, 0, "again is no change");
    // Only a mask changes: one write, and no thread moves.
    let narrower = [
        share(1, 0, 0, "0-1"),
        share(2, 1, 0, "4-7"),
        share(2, 1, 1, "0-1"),
    ];
    assert_eq!(bench.apply(&narrower).write_calls, 1);
    assert_eq!(bench.cat.mask_texts(), ["5:0=3,8=ff", "6:0=f0,8=3"]);
    // Another process's share reuses the remaining group, whose second cache is unrestricted again.
    let other = [share(1, 0, 0, "0-1"), share(3, 2, 0, "2-7")];
    bench.apply(&other);
    assert_eq!(bench.cat.mask_texts(), ["5:0=3,8=ff", "7:0=fc,8=ff"]);
    assert_eq!(bench.cat.groups.borrow().len(), 2);
    bench.apply(&other[..1]);
    assert_eq!(
        bench.cat.groups.borrow().len(),
        1,
        "what is not needed is removed: classes are few"
    );
    bench.restore();
}

fn limit(group: u32, process: u32, cache: u32, level: u32) -> BandwidthLimit {
    BandwidthLimit {
        group: GroupId(group),
        members: vec![ShareMember::Process(ProcessId(process))],
        cache: CacheId(cache),
        level,
    }
}

/// The limits of each thread's group, as text: `5:0=50,8=100`.
fn level_texts(cat: &FakeCat) -> Vec<String> {
    let groups = cat.groups.borrow();
    let text = |(tid, name): (&i32, &String)| {
        let levels = groups[name].levels.iter();
        let levels: Vec<String> = levels.map(|(id, level)| format!("{id}={level}")).collect();
        format!("{tid}:{}", levels.join(","))
    };
    cat.groups_by_thread().iter().map(text).collect()
}

/// Are limits of bandwidth set, kept, changed and removed like ways, alone and beside ways, and read back?
#[test]
fn limits_of_bandwidth_are_set_and_removed_like_ways() {
    let mut bench = ResctrlFixture::with_cat(FakeCat::with_bandwidth());
    let limits = [limit(1, 0, 0, 50), limit(2, 1, 1, 20)];
    let applied = bench.apply_limits(&[], &limits);
    assert_eq!(
        (applied.refused_items, applied.write_calls),
        (Vec::new(), 6),
        "two groups, two schemata, two threads"
    );
    assert_eq!(level_texts(&bench.cat), ["5:0=50,8=100", "6:0=100,8=20"]);
    let tasks = bench.tasks.tasks();
    let active = bench.ways.read_back_bandwidth(&bench.cat, &limits, &tasks);
    assert_eq!(active, limits);
    assert_eq!(bench.apply_limits(&[], &limits).write_calls, 0, "again");
    let wider = [limit(1, 0, 0, 60)];
    bench.apply_limits(&[share(3, 0, 0, "0-3")], &wider);
    assert_eq!(level_texts(&bench.cat), ["5:0=60,8=100"]);
    assert_eq!(bench.cat.mask_texts(), ["5:0=f,8=ff"]);
    // Without the limit, the ways stay, and with neither, no group is left.
    bench.apply(&[share(3, 0, 0, "0-3")]);
    assert_eq!(level_texts(&bench.cat), ["5:0=100,8=100"]);
    bench.apply_limits(&[], &wider);
    assert_eq!(bench.cat.mask_texts(), ["5:0=ff,8=ff"]);
    bench.apply(&[]);
    assert!(bench.cat.groups.borrow().is_empty());
    bench.restore();
}

/// If another process changes our limit: is it reported, and set again? Is a limit that the hardware does not have
/// raised to the next one, once?
#[test]
fn changed_limits_are_reported_and_odd_ones_rounded() {
    let mut bench = ResctrlFixture::with_cat(FakeCat::with_bandwidth());
    let limits = [limit(1, 0, 0, 33)];
    let applied = bench.apply_limits(&[], &limits);
    assert_eq!(applied.overridden_items, []);
    assert_eq!(level_texts(&bench.cat), ["5:0=40,8=100"]);
    assert_eq!(bench.apply_limits(&[], &limits).write_calls, 0);
    for group in bench.cat.groups.borrow_mut().values_mut() {
        group.levels.insert(0, 100);
    }
    let applied = bench.apply_limits(&[], &limits);
    let item = PlanItem::Bandwidth(GroupId(1), CacheId(0));
    assert_eq!(applied.overridden_items, [item]);
    assert_eq!(level_texts(&bench.cat), ["5:0=40,8=100"]);
    bench.restore();
}

/// If any write of a limit fails, or the process is killed after any: is everything restored?
#[test]
fn limits_are_restored_after_faults_and_kills_at_any_step() {
    let limits = [limit(1, 0, 0, 50), limit(2, 1, 1, 20)];
    for error in [libc::EPERM, libc::EINVAL, libc::EIO, libc::EBUSY] {
        for nth in 0..6 {
            let mut bench = ResctrlFixture::with_cat(FakeCat::with_bandwidth());
            bench.cat.host.fault.set(Some((nth, error)));
            let applied = bench.apply_limits(&[], &limits);
            assert!(!applied.refused_items.is_empty(), "{error} at {nth}");
            let again = bench.apply_limits(&[], &limits);
            assert_eq!(again.refused_items, [], "{error} at {nth}");
            assert_eq!(level_texts(&bench.cat), ["5:0=50,8=100", "6:0=100,8=20"]);
            bench.restore();
        }
    }
    for killed_after in 0..7 {
        let mut bench = ResctrlFixture::with_cat(FakeCat::with_bandwidth());
        bench.cat.host.broken_from.set(Some(killed_after));
        bench.apply_limits(&[], &limits);
        bench.cat.host.broken_from.set(None);
        let ResctrlFixture { cat, dir, .. } = bench;
        crate::safety::guardian::restore_left_behind(&cat, dir.path()).unwrap();
        assert!(cat.groups.borrow().is_empty(), "after {killed_after}");
        assert!(!dir.path().join(Journal::FILE_NAME).exists());
    }
}

/// If classes run out: is as much applied as possible, and the rest left unrestricted and refused with the kernel's
/// message?
#[test]
fn the_rest_of_a_plan_is_applied_if_classes_run_out() {
    let mut bench = ResctrlFixture::new();
    bench
        .cat
        .groups
        .borrow_mut()
        .insert("db".into(), FakeGroup::with_threads([9]));
    let plan = [
        share(1, 0, 0, "0-1"),
        share(2, 1, 0, "2-3"),
        share(3, 2, 0, "4-5"),
        share(3, 2, 1, "4-5"),
    ];
    let applied = bench.apply(&plan);
    assert_eq!(bench.active_shares(&plan), ["1@0=0-1x1", "2@0=2-3x1"]);
    let items: Vec<&PlanItem> = applied
        .refused_items
        .iter()
        .map(|refused| &refused.item)
        .collect();
    assert_eq!(
        items,
        [
            &PlanItem::Share(GroupId(3), CacheId(0)),
            &PlanItem::Share(GroupId(3), CacheId(1))
        ]
    );
    assert!(
        applied
            .refused_items
            .iter()
            .all(|refused| refused.reason == RefusalReason::NoCapacity)
    );
    assert!(
        applied.refused_items[0]
            .message
            .ends_with("`cachemate doctor` names who has them; resctrl says: Out of CLOSIDs"),
        "{}",
        applied.refused_items[0].message
    );
    assert!(!bench.cat.groups_by_thread().contains_key(&7));
    bench.restore();
    assert!(
        bench.cat.groups.borrow().contains_key("db"),
        "others' groups stay"
    );
}

/// Is a mask that the hardware rejects replaced by one that it accepts, or refused, and is the mask in force reported?
#[test]
fn masks_the_hardware_rejects_are_replaced_or_refused() {
    let mut bench = ResctrlFixture::new();
    let plan = [
        share(1, 0, 0, "3"),
        share(2, 1, 0, "0,5-6"),
        share(3, 2, 0, "9"),
    ];
    let applied = bench.apply(&plan);
    assert_eq!(bench.active_shares(&plan), ["1@0=3-4x1", "2@0=5-6x1"]);
    let messages: Vec<&str> = applied
        .refused_items
        .iter()
        .map(|refused| refused.message.split(':').next().unwrap())
        .collect();
    assert_eq!(
        messages,
        ["ways 3 became 3-4", "ways 0,5-6 became 5-6", "ways 9"]
    );
    bench.restore();
}

/// Is a thread in another tool's group, or in its monitoring group, left there?
#[test]
fn threads_in_others_groups_are_left_there() {
    let mut bench = ResctrlFixture::new();
    bench
        .cat
        .groups
        .borrow_mut()
        .insert("db".into(), FakeGroup::with_threads([5]));
    let plan = [share(1, 0, 0, "0-1"), share(2, 1, 0, "2-3")];
    let applied = bench.apply(&plan);
    assert_eq!(bench.cat.groups_by_thread()[&5], "db");
    assert_eq!(bench.active_shares(&plan), ["2@0=2-3x1"]);
    assert_eq!(applied.refused_items[0].reason, RefusalReason::OwnedByOther);
    assert_eq!(
        applied.refused_items[0].message,
        "thread 5 is in resctrl group /db, which belongs to another tool"
    );
    bench.restore();
    assert_eq!(
        bench.cat.groups_by_thread(),
        BTreeMap::from([(5, "db".to_string())])
    );
}

/// Is the traffic of another tool's group that of a process if the group has only its threads, and nobody's otherwise?
#[test]
fn traffic_in_others_groups_belongs_to_a_process_alone_in_its_group() {
    let mut bench = ResctrlFixture::new();
    for (name, threads) in [("db", vec![5]), ("mixed", vec![6, 7])] {
        bench
            .cat
            .groups
            .borrow_mut()
            .insert(name.into(), FakeGroup::with_threads(threads));
    }
    let tasks = bench.tasks.tasks();
    let mut traffic_at = |bytes: u64| {
        for (name, domain) in [("db", 0), ("db", 8), ("mixed", 0), ("mixed", 8)] {
            let place = (name.to_string(), domain);
            bench.cat.counted.borrow_mut().insert(place, (0, bytes));
        }
        bench.ways.process_traffic(&bench.cat, &tasks)
    };
    assert!(traffic_at(100).is_empty(), "one reading is no difference");
    let process = tasks.iter().find(|task| task.thread.tid == 5).unwrap();
    assert_eq!(
        traffic_at(140),
        BTreeMap::from([(process.process, 80)]),
        "40 bytes on each of two caches"
    );
}

/// Is the same true of monitoring groups, and is their traffic not counted again with the class above them?
#[test]
fn traffic_in_others_monitoring_groups_counts_once_and_for_one_process() {
    let mut bench = ResctrlFixture::new();
    bench
        .cat
        .groups
        .borrow_mut()
        .insert("db".into(), FakeGroup::with_threads([8]));
    let monitors = [
        ("mon_groups/alone", "5\n"),
        ("mon_groups/pair", "6\n7\n"),
        ("db/mon_groups/part", "8\n"),
    ];
    let tasks = bench.tasks.tasks();
    let mut traffic_at = |bytes: u64| {
        for (group, members) in monitors {
            let dir = format!("{MOUNT}/{group}");
            bench.cat.host.set_file(&format!("{dir}/tasks"), members);
            let file = format!("{dir}/mon_data/mon_L3_00/mbm_total_bytes");
            bench.cat.host.set_file(&file, &format!("{bytes}\n"));
        }
        let class = ("db".to_string(), 0);
        bench.cat.counted.borrow_mut().insert(class, (0, 7 * bytes));
        bench.ways.process_traffic(&bench.cat, &tasks)
    };
    assert!(traffic_at(100).is_empty(), "one reading is no difference");
    let process_of = |tid: i32| {
        let task = tasks.iter().find(|task| task.thread.tid == tid);
        task.unwrap().process
    };
    assert_eq!(
        traffic_at(140),
        BTreeMap::from([(process_of(5), 40), (process_of(8), 40)]),
        "the pair belongs to nobody, and the class adds nothing"
    );
}

/// Do children born into a group move to the plan's group or back to the original one, managed or not, also at the end?
#[test]
fn children_born_into_a_group_move_to_the_plans_or_original_one() {
    let mut bench = ResctrlFixture::new();
    bench.apply(&[share(1, 0, 0, "0-1")]);
    bench.cat.fork_child(5, 20);
    bench.refresh_tasks();
    bench
        .actuator
        .restore_inherited(&bench.cat, &bench.tasks.tasks(), &[])
        .unwrap();
    bench.apply(&[share(1, 0, 0, "0-1")]);
    assert_eq!(
        bench
            .cat
            .groups_by_thread()
            .keys()
            .copied()
            .collect::<Vec<_>>(),
        [5]
    );
    bench.cat.fork_child(5, 21);
    bench
        .actuator
        .restore_inherited(&bench.cat, &[], &[21])
        .unwrap();
    assert_eq!(
        bench
            .cat
            .groups_by_thread()
            .keys()
            .copied()
            .collect::<Vec<_>>(),
        [5]
    );
    bench.cat.fork_child(5, 22);
    bench.restore();
}

/// If another process moves our thread, changes our mask or removes our group: is it reported, and set again?
#[test]
fn changes_by_other_processes_are_reported_and_set_again() {
    let plan = [share(1, 0, 0, "0-1")];
    let item = PlanItem::Share(GroupId(1), CacheId(0));
    let changes: [fn(&FakeCat); 3] = [
        |cat| drop(cat.write(&Path::new(MOUNT).join("tasks"), "5")),
        |cat| {
            let mut groups = cat.groups.borrow_mut();
            groups
                .values_mut()
                .for_each(|group| drop(group.masks.insert(0, (0..8).collect())));
        },
        |cat| cat.groups.borrow_mut().clear(),
    ];
    for change in changes {
        let mut bench = ResctrlFixture::new();
        bench.apply(&plan);
        change(&bench.cat);
        let applied = bench.apply(&plan);
        assert!(applied.overridden_items.contains(&item), "{applied:?}");
        assert_eq!(bench.active_shares(&plan), ["1@0=0-1x1"]);
        assert_eq!(bench.apply(&plan).overridden_items, []);
        bench.restore();
    }
}

/// Is another owner's lock respected, and are orphans, and only they, swept?
#[test]
fn locks_are_respected_and_orphans_swept() {
    let mut bench = ResctrlFixture::new();
    let empty = || FakeGroup::with_threads([6]);
    bench.cat.host.add_thread(4, 4, 1, "0-3");
    for name in ["cachemate-3-9-0", "cachemate-4-40-0", "db"] {
        bench.cat.groups.borrow_mut().insert(name.into(), empty());
    }
    bench.cat.classes.set(9);
    let living = Path::new(MOUNT).join("cachemate-4-40-0");
    bench.cat.locked.borrow_mut().extend([living, MOUNT.into()]);
    let applied = bench.apply(&[share(1, 0, 0, "0-1")]);
    assert_eq!(
        (applied.write_calls, applied.refused_items[0].reason.clone()),
        (0, RefusalReason::Busy)
    );
    bench.cat.locked.borrow_mut().remove(Path::new(MOUNT));
    bench.apply(&[share(1, 0, 0, "0-1")]);
    let names: Vec<String> = bench.cat.groups.borrow().keys().cloned().collect();
    assert_eq!(names, ["cachemate-4-40-0", "cachemate-77-5-0", "db"]);
    bench.actuator.restore_all(&bench.cat).unwrap();
    let removed = groups::remove_orphans_if_mounted(&bench.cat);
    assert_eq!(removed, [], "the living one stays");
    bench.cat.locked.borrow_mut().clear();
    assert_eq!(
        groups::remove_orphans_if_mounted(&bench.cat),
        [],
        "even if it does not hold its lock"
    );
    bench.cat.host.threads.borrow_mut().remove(&4);
    assert_eq!(groups::remove_orphans_if_mounted(&bench.cat).len(), 1);
}

/// If a stranger holds the lock of an orphan, or of resctrl itself: is the orphan reported as not removed, and removed
/// once the lock is free?
#[test]
fn a_foreign_lock_on_an_orphan_is_reported() {
    let bench = ResctrlFixture::new();
    let orphan = Path::new(MOUNT).join("cachemate-3-9-0");
    let group = FakeGroup::with_threads([6]);
    bench
        .cat
        .groups
        .borrow_mut()
        .insert("cachemate-3-9-0".into(), group);
    for locked in [orphan.clone(), MOUNT.into()] {
        bench.cat.locked.borrow_mut().insert(locked);
        let swept = groups::remove_orphans_if_mounted(&bench.cat);
        assert_eq!((swept.len(), &swept[0].path), (1, &orphan));
        assert!(
            swept[0].error.is_some() && swept[0].to_string().contains("not removed"),
            "{}",
            swept[0]
        );
        bench.cat.locked.borrow_mut().clear();
    }
    let swept = groups::remove_orphans_if_mounted(&bench.cat);
    assert_eq!(
        swept,
        [groups::OrphanGroup {
            path: orphan,
            error: None
        }]
    );
}

/// If a stranger holds a flock on a directory that only root may write: is the wait bounded, and does the refusal name
/// the holder?
#[test]
fn the_holder_of_a_lock_is_named() {
    use std::io::Read;
    let dir = tempfile::tempdir().unwrap();
    crate::stranger_tests::open_to_all(dir.path());
    let mut holder = std::process::Command::new("flock");
    holder.args([
        "--shared",
        dir.path().to_str().unwrap(),
        "sh",
        "-c",
        "echo held; read line",
    ]);
    holder
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped());
    if rustix::process::geteuid().is_root() {
        std::os::unix::process::CommandExt::uid(&mut holder, crate::stranger_tests::NOBODY);
    } else {
        crate::skip_test::report_unchecked(
            "a lock that another user holds",
            "needs root to become another user",
        );
    }
    let mut holder = holder.spawn().unwrap();
    holder
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut [0; 5])
        .unwrap();
    let host = LinuxHost::new("/");
    let error = host
        .lock_dir(dir.path(), Duration::from_millis(50))
        .unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    assert!(
        error
            .to_string()
            .contains(&format!("{} (flock)", holder.id())),
        "{error}"
    );
    drop(holder.stdin.take());
    holder.wait().unwrap();
    assert!(host.lock_dir(dir.path(), Duration::from_secs(5)).is_ok());
}

/// Are occupancy and traffic read if they are counted, traffic as a difference, and absent if a group is new?
#[test]
fn occupancy_and_traffic_are_read() {
    let mut bench = ResctrlFixture::new();
    let plan = [share(1, 0, 0, "0-3")];
    let counted = |name: &str, domain: u32, occupancy: u64, traffic: u64, cat: &FakeCat| {
        cat.counted
            .borrow_mut()
            .insert((name.to_string(), domain), (occupancy, traffic));
    };
    for domain in [0, 8] {
        counted("", domain, 0, 1000, &bench.cat);
    }
    assert!(
        bench.ways.traffic_counts(&bench.cat).is_empty(),
        "one reading is no difference"
    );
    bench.apply(&plan);
    counted("", 0, 0, 1500, &bench.cat);
    counted("cachemate-77-5-0", 0, 4 << 20, 100, &bench.cat);
    let places = bench.ways.traffic_counts(&bench.cat);
    assert_eq!(
        places.len(),
        0,
        "{places:?}: the new group's share of the window is not known"
    );
    counted("", 0, 0, 1600, &bench.cat);
    counted("cachemate-77-5-0", 0, 5 << 20, 140, &bench.cat);
    let places = bench.ways.traffic_counts(&bench.cat);
    let group = CounterScope::Group(GroupId(1), CacheId(0));
    let bytes = |place: CounterScope| {
        places
            .iter()
            .find(|(at, _)| *at == place)
            .unwrap()
            .1
            .get(CounterEvent::MemoryBytes)
    };
    assert_eq!(
        (bytes(group), bytes(CounterScope::Cache(CacheId(0)))),
        (Some(40.0), Some(140.0))
    );
    let held = bench
        .ways
        .read_back(&bench.cat, &plan, &bench.tasks.tasks());
    assert_eq!(held[0].occupancy_bytes, Some(5 << 20));
    counted("", 0, 1 << 20, 1600, &bench.cat);
    let all_groups = bench.ways.cache_use(&bench.cat);
    assert_eq!(
        all_groups[0].occupancy_bytes,
        Some(6 << 20),
        "the root's lines and the group's"
    );
    let why = bench.ways.explain(&bench.cat, &held[0]);
    assert_eq!(
        why,
        [
            "holds 5242880 bytes where its ways have 4194304: lines from before its mask stay until they are evicted",
            "ways 0-3 may also be filled by group /",
        ]
    );
    bench.restore();
}

/// If any write fails, with any error, at any step: is it reported, is the reported state true, is everything
/// restored, and does the same plan succeed when it is tried again?
#[test]
fn a_failed_write_at_any_step_is_reported_and_restored() {
    let plan = [
        share(1, 0, 0, "0-3"),
        share(2, 1, 0, "4-7"),
        share(2, 1, 1, "0-1"),
    ];
    for error in [
        libc::EPERM,
        libc::ENOSPC,
        libc::EINVAL,
        libc::EIO,
        libc::EBUSY,
    ] {
        for nth in 0..6 {
            let mut bench = ResctrlFixture::new();
            bench.cat.host.fault.set(Some((nth, error)));
            let applied = bench.apply(&plan);
            assert!(!applied.refused_items.is_empty(), "{error} at {nth}");
            let at_first = bench.active_shares(&plan);
            assert!(
                at_first.len() < plan.len(),
                "{error} at {nth}: {at_first:?}"
            );
            assert!(bench.apply(&plan).refused_items.is_empty());
            assert_eq!(
                bench.active_shares(&plan),
                ["1@0=0-3x1", "2@0=4-7x1", "2@1=0-1x1"],
                "{error} at {nth}"
            );
            // A fault during removal is reported, and the next try completes the removal.
            bench.cat.host.fault.set(Some((nth % 3, error)));
            bench.apply(&plan[..1]);
            bench.cat.host.fault.set(None);
            bench.apply(&plan[..1]);
            assert_eq!(bench.cat.groups.borrow().len(), 1, "{error} at {nth}");
            bench.restore();
        }
    }
}

/// Killed after any write, with only the journal left: is everything restored?
#[test]
fn the_journal_alone_restores_everything_after_a_kill() {
    let plan = [
        share(1, 0, 0, "0-3"),
        share(2, 1, 0, "4-7"),
        share(2, 1, 1, "0-1"),
    ];
    for killed_after in 0..7 {
        let cat = FakeCat::new();
        cat.groups
            .borrow_mut()
            .insert("db".into(), FakeGroup::with_threads([8]));
        let groups_before = cat.groups.borrow().clone();
        let mut bench = ResctrlFixture::with_cat(cat);
        // Every later write fails, as if the process had been killed.
        bench.cat.host.broken_from.set(Some(killed_after));
        bench.apply(&plan);
        bench.cat.host.broken_from.set(None);
        let ResctrlFixture { cat, dir, .. } = bench;
        crate::safety::guardian::restore_left_behind(&cat, dir.path()).unwrap();
        assert_eq!(
            *cat.groups.borrow(),
            groups_before,
            "killed after {killed_after} writes"
        );
        assert!(!dir.path().join(Journal::FILE_NAME).exists());
    }
}

/// Does a share of an unknown task do no harm?
#[test]
fn a_share_of_an_unknown_task_has_no_effect() {
    let mut bench = ResctrlFixture::new();
    let unknown_member = CacheShare {
        members: vec![ShareMember::Task(TaskId(99))],
        ..share(1, 0, 0, "0-1")
    };
    assert_eq!(bench.apply(&[unknown_member]).write_calls, 0);
    bench.restore();
}
