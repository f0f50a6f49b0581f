use std::sync::{Arc, Mutex};

use super::*;
use crate::act::gang_scheduler::fake_tests::FakeScheduler;
use crate::fake_tests::FakeHost;

/// Is the first missing prerequisite of the gang scheduler named with its remedy, until nothing is missing?
#[test]
fn the_gang_schedulers_first_missing_prerequisite_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("gangs.sock");
    let host = FakeHost::default();
    let query = |host: &FakeHost| check_gang_scheduler(host, &socket);
    let says = |host: &FakeHost, word: &str, remedy: &str| {
        let capability = query(host);
        assert!(
            !capability.is_usable() && capability.detail.contains(word),
            "{capability:?}"
        );
        assert!(
            capability
                .remedy
                .as_ref()
                .is_some_and(|remedy_text| remedy_text.contains(remedy)),
            "{capability:?}"
        );
    };
    host.set_file("/proc/sys/kernel/osrelease", "6.1.0-50-amd64\n");
    says(&host, "Linux 6.1.0-50-amd64 has no sched_ext", "6.18");
    host.set_file("/proc/sys/kernel/osrelease", "6.18.15+deb13-amd64\n");
    says(
        &host,
        "was built without CONFIG_SCHED_CLASS_EXT",
        "CONFIG_SCHED_CLASS_EXT",
    );
    host.set_file("/sys/kernel/sched_ext/state", "disabled\n");
    says(&host, "CONFIG_DEBUG_INFO_BTF", "CONFIG_DEBUG_INFO_BTF");
    host.set_file("/sys/kernel/btf/vmlinux", "");
    says(&host, "does not answer", "gangs run");
    let scheduler = FakeScheduler::start(Arc::new(Mutex::new(FakeHost::default())), &socket);
    let works = query(&host);
    assert!(
        works.is_usable() && works.detail == "attached, 2 last-level caches, 0 threads",
        "{works:?}"
    );
    scheduler.inside.lock().unwrap().guarded = Some("CPU 1: busy".to_string());
    assert!(query(&host).detail.contains("detached: CPU 1: busy"));
}

/// Is a modeled processor reported as such with its samples?
#[test]
fn a_modeled_processor_is_reported_with_its_samples() {
    let host = FakeHost::default();
    assert_eq!(describe_processor(&host), "");
    host.set_file(
        "/proc/cpuinfo",
        "processor\t: 0\nmodel name\t: cachemate lab: modeled caches, counters, PEBS\n",
    );
    assert_eq!(
        describe_processor(&host),
        " of 'cachemate lab: modeled caches, counters, PEBS'"
    );
}
