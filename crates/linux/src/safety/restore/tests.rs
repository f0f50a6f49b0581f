use super::*;
use crate::fake_tests::FakeHost;
use crate::safety::journal::IntendedChange;

fn cpu_state(list: &str) -> ObjectState {
    ObjectState::Cpus(list.parse().unwrap())
}

/// Records the change as the journal would, and makes it.
fn apply_change(
    host: &FakeHost,
    entries: &mut BTreeMap<JournalObject, JournalEntry>,
    object: JournalObject,
    wanted: ObjectState,
) {
    let now = read_state(host, &object).unwrap();
    let follows = host
        .cpuset
        .borrow()
        .clone()
        .is_some_and(|cpuset| now == ObjectState::Cpus(cpuset));
    let change = IntendedChange {
        current: now,
        object,
        target: wanted,
        follows_cpuset: follows,
    };
    let entry = entries
        .entry(change.object.clone())
        .or_insert(JournalEntry {
            original: change.current,
            applied_states: Vec::new(),
            since_ticks: 65,
            follows_cpuset: change.follows_cpuset,
            family: None,
        });
    entry.applied_states.push(change.target.clone());
    write_state(host, &change.object, &change.target).unwrap();
}

fn affinity(pid: i32, thread: ThreadKey) -> JournalObject {
    JournalObject::Affinity { pid, thread }
}

fn file(path: &str) -> JournalObject {
    JournalObject::File { path: path.into() }
}

/// A host whose threads were moved from CPUs 0 to 3 to CPU 1, with the journal's entries.
fn moved_threads(tids: std::ops::Range<i32>) -> (FakeHost, BTreeMap<JournalObject, JournalEntry>) {
    let (host, mut entries) = (FakeHost::default(), BTreeMap::new());
    for tid in tids {
        let thread = host.add_thread(tid, tid, 1, "0-3");
        apply_change(&host, &mut entries, affinity(tid, thread), cpu_state("1"));
    }
    (host, entries)
}

/// Are objects of every kind restored, including threads in our own group?
#[test]
fn every_kind_of_object_is_restored() {
    let host = FakeHost::default();
    let thread = host.add_thread(5, 5, 1, "0-3");
    host.set_file("/cg/tasks", "5\n9\n");
    host.set_file("/cg/cpuset.cpus", "0-3");
    host.set_file("/cg/freezer.state", "THAWED");
    let mut entries = BTreeMap::new();
    let group = JournalObject::Directory {
        path: "/cg/ours".into(),
    };
    apply_change(&host, &mut entries, group, ObjectState::Present);
    let membership = JournalObject::Membership {
        hierarchy: "/cg".into(),
        pid: 5,
        thread,
    };
    apply_change(
        &host,
        &mut entries,
        membership,
        ObjectState::Group("/ours".into()),
    );
    apply_change(&host, &mut entries, affinity(5, thread), cpu_state("1"));
    apply_change(
        &host,
        &mut entries,
        JournalObject::Nice { pid: 5, thread },
        ObjectState::Nice(7),
    );
    apply_change(
        &host,
        &mut entries,
        JournalObject::Policy { pid: 5, thread },
        ObjectState::Policy(5),
    );
    apply_change(
        &host,
        &mut entries,
        file("/cg/cpuset.cpus"),
        ObjectState::Text("1".into()),
    );
    apply_change(
        &host,
        &mut entries,
        file("/cg/freezer.state"),
        ObjectState::Text("FROZEN".into()),
    );
    host.set_file("/cg/ours/tasks", "5\n6\n"); // a child was born into our group

    let account = restore(&host, &entries);
    assert_eq!(account.len(), 7);
    assert!(
        account
            .iter()
            .all(|restored| restored.outcome == RestoreOutcome::Restored),
        "{account:#?}"
    );
    assert_eq!(account[0].object, file("/cg/freezer.state"), "thaw first");
    assert_eq!(
        (host.mask_of(5), host.threads.borrow()[&5].nice),
        ("0-3".into(), 0)
    );
    assert_eq!(host.threads.borrow()[&5].policy, 0);
    assert_eq!(host.file_text("/cg/tasks"), "9\n5\n6\n");
    assert_eq!(
        (
            host.file_text("/cg/cpuset.cpus").trim(),
            host.file_text("/cg/freezer.state").trim()
        ),
        ("0-3", "THAWED")
    );
    assert!(!host.files.borrow().contains_key(Path::new("/cg/ours")));
    let second_account = restore(&host, &entries);
    assert!(
        second_account
            .iter()
            .all(|restored| restored.outcome == RestoreOutcome::Unchanged),
        "{second_account:#?}"
    );
}

/// Is another process's later change kept, a thread with a reused id left unchanged, and an exit not a failure?
#[test]
fn later_changes_and_reused_ids_are_left_unchanged() {
    let (host, entries) = moved_threads(5..8);
    host.change_thread(5, |thread| thread.cpus = "2-3".parse().unwrap());
    host.change_thread(6, |thread| thread.start_ticks += 1);
    host.threads.borrow_mut().remove(&7);
    let outcomes: Vec<RestoreOutcome> = restore(&host, &entries)
        .into_iter()
        .map(|restored| restored.outcome)
        .collect();
    assert!(matches!(outcomes[0], RestoreOutcome::ChangedByOther(_)));
    assert_eq!(outcomes[1..], [RestoreOutcome::Gone, RestoreOutcome::Gone]);
    assert_eq!(host.mask_of(6), "1");
}

/// Do threads and children born under our mask get their ancestor's original, and only those that carry our mask?
#[test]
fn threads_that_inherited_our_mask_get_the_original() {
    let (host, entries) = moved_threads(5..6);
    host.add_thread(5, 50, 1, "1"); // a thread of the same process
    host.add_thread(8, 8, 5, "1"); // a child
    host.add_thread(9, 9, 8, "1"); // its child
    host.add_thread(10, 10, 5, "0"); // a child with a wish of its own
    host.add_thread(11, 11, 1, "1"); // no relation
    host.add_thread(6, 6, 5, "1"); // a child that lived before us and had this mask already
    restore(&host, &entries);
    let masks: Vec<String> = [5, 50, 8, 9, 10, 11, 6].map(|tid| host.mask_of(tid)).into();
    assert_eq!(masks, ["0-3", "0-3", "0-3", "0-3", "0", "1", "1"]);
}

/// After a double fork, without a record of births: does a child get the original of the program whose session or
/// control groups it is in, but not one that an unrelated living parent started, one of other groups, or an older one?
#[test]
fn orphans_of_a_managed_family_get_the_original() {
    let (host, mut entries) = moved_threads(5..6);
    for (tid, group) in [(5, "/a"), (8, "/b"), (9, "/a"), (10, "/b"), (11, "/a")] {
        host.set_file(&format!("/proc/{tid}/cgroup"), &format!("0::{group}\n"));
    }
    host.change_thread(5, |thread| thread.session = 5);
    let family = crate::safety::inheritance::read_family(&host, 5).unwrap();
    entries.values_mut().for_each(|entry| entry.family = family);
    for (tid, parent, session) in [(1, 0, 1), (2, 1, 2)] {
        host.add_thread(tid, tid, parent, "0-3");
        host.change_thread(tid, |thread| thread.session = session);
    }
    for (tid, parent, session) in [(8, 1, 5), (9, 1, 9), (10, 1, 10), (11, 2, 2), (6, 1, 5)] {
        host.add_thread(tid, tid, parent, "1");
        host.change_thread(tid, |thread| thread.session = session);
    }
    host.threads.borrow_mut().remove(&5);
    restore(&host, &entries);
    let masks: Vec<String> = [8, 9, 10, 11, 6].map(|tid| host.mask_of(tid)).into();
    assert_eq!(masks, ["0-3", "0-3", "1", "1", "1"]);
}

/// After a double fork, without a record of births: does a child whose CPUs we set get the nice value of its program's
/// original, too, which it inherited and which no entry of its own names?
#[test]
fn an_orphan_with_an_entry_of_its_own_keeps_no_other_inherited_state() {
    let (host, mut entries) = moved_threads(5..6);
    let parent = host.stat(5).unwrap().key;
    let nice = JournalObject::Nice {
        pid: 5,
        thread: parent,
    };
    apply_change(&host, &mut entries, nice, ObjectState::Nice(7));
    host.add_thread(1, 1, 0, "0-3");
    let orphan = host.add_thread(8, 8, 1, "0-3");
    for (tid, session) in [(1, 1), (5, 5), (8, 5)] {
        host.change_thread(tid, |thread| thread.session = session);
    }
    host.change_thread(8, |thread| thread.nice = 7);
    apply_change(&host, &mut entries, affinity(8, orphan), cpu_state("1"));
    let family = crate::safety::inheritance::read_family(&host, 5).unwrap();
    entries.values_mut().for_each(|entry| entry.family = family);
    host.threads.borrow_mut().remove(&5);
    restore(&host, &entries);
    assert_eq!(
        (host.mask_of(8), host.threads.borrow()[&8].nice),
        ("0-3".into(), 0)
    );
}

/// If any one change fails with any error: is it reported, is everything else restored, and does a second try
/// succeed?
#[test]
fn one_failed_change_is_reported_and_the_rest_restored() {
    for errno in [libc::EPERM, libc::EBUSY, libc::ENOSPC, libc::EINVAL] {
        for nth in 0..3 {
            let (host, entries) = moved_threads(5..8);
            host.fault.set(Some((nth, errno)));
            let failed = restore(&host, &entries)
                .iter()
                .filter(|r| r.has_failed())
                .count();
            assert_eq!(failed, 1);
            let confined_count = host.masks().iter().filter(|mask| *mask == "1").count();
            assert_eq!(confined_count, 1);
            restore(&host, &entries);
            assert!(host.masks().iter().all(|mask| mask == "0-3"));
        }
    }
}

/// If the kernel reports "no such process" for an existing thread: is it queried again, never taken for exited, and
/// reported if the error persists?
#[test]
fn an_existing_thread_is_never_taken_for_exited() {
    for (errno_for, outcome) in [
        (2, RestoreOutcome::Restored),
        (u32::MAX, RestoreOutcome::Failed(String::new())),
    ] {
        let (host, entries) = moved_threads(5..6);
        host.no_such_process_for.set(errno_for);
        let account = restore(&host, &entries);
        match outcome {
            RestoreOutcome::Restored => assert_eq!(account[0].outcome, RestoreOutcome::Restored),
            _ => assert!(account[0].has_failed(), "{account:?}"),
        }
        host.no_such_process_for.set(0);
        restore(&host, &entries);
        assert_eq!(host.mask_of(5), "0-3");
    }
}

/// If a cpuset that was as its parent's cannot be emptied because it has processes: does it get the parent's CPUs?
#[test]
fn a_cpuset_that_cannot_be_emptied_gets_its_parents_cpus() {
    for populated in [false, true] {
        let host = FakeHost::default();
        host.set_file("/cg/cpuset.cpus.effective", "0-7\n");
        host.set_file("/cg/batch/cpuset.cpus", "\n");
        let mut entries = BTreeMap::new();
        apply_change(
            &host,
            &mut entries,
            file("/cg/batch/cpuset.cpus"),
            ObjectState::Text("4-5".into()),
        );
        if populated {
            host.fault.set(Some((0, libc::ENOSPC)));
        }
        let account = restore(&host, &entries);
        assert_eq!(account[0].outcome, RestoreOutcome::Restored, "{account:?}");
        assert_eq!(
            host.file_text("/cg/batch/cpuset.cpus").trim(),
            if populated { "0-7" } else { "" }
        );
    }
}

/// If descriptors, memory or disk space run out while a thread's existence is checked: is it never taken for exited,
/// and is everything restored once they are available again?
#[test]
fn a_thread_that_cannot_be_checked_is_not_taken_for_exited() {
    for errno in [
        libc::EMFILE,
        libc::ENFILE,
        libc::ENOMEM,
        libc::EIO,
        libc::EPERM,
        libc::EINTR,
    ] {
        let (host, entries) = moved_threads(5..6);
        host.add_thread(7, 7, 5, "1"); // an inheritor
        host.reads_fail.set(Some(errno));
        let account = restore(&host, &entries);
        assert!(
            !account.is_empty() && account.iter().all(|line| line.has_failed()),
            "{account:?}"
        );
        host.reads_fail.set(None);
        restore(&host, &entries);
        assert!(host.masks().iter().all(|mask| mask == "0-3"));
    }
}

/// If another process removes one CPU from a mask of ours: is that mask kept; and does a CPU that the cpuset removed
/// not count as such a change?
#[test]
fn a_mask_narrowed_by_another_process_is_kept() {
    for (by_cpuset, outcome) in [
        (false, RestoreOutcome::ChangedByOther(String::new())),
        (true, RestoreOutcome::Restored),
    ] {
        let host = FakeHost::default();
        let thread = host.add_thread(5, 5, 1, "0-3");
        host.set_cpuset("0-3");
        let mut entries = BTreeMap::new();
        apply_change(&host, &mut entries, affinity(5, thread), cpu_state("1-2"));
        match by_cpuset {
            true => host.set_cpuset("0-1,3"),
            false => host.change_thread(5, |thread| thread.cpus = "1".parse().unwrap()),
        }
        assert_eq!(host.mask_of(5), "1");
        let account = restore(&host, &entries);
        assert_eq!(
            std::mem::discriminant(&account[0].outcome),
            std::mem::discriminant(&outcome),
            "{account:?}"
        );
        let now = host.mask_of(5);
        assert_eq!(now, if by_cpuset { "0-1,3" } else { "1" });
    }
}

/// If a mask was as wide as its cpuset: does it follow the cpuset again once it is restored, wider and narrower; and
/// does a narrower one not?
#[test]
fn a_mask_as_wide_as_its_cpuset_follows_it_again() {
    let host = FakeHost::default();
    let (wide, narrow) = (
        host.add_thread(5, 5, 1, "0-3"),
        host.add_thread(6, 6, 1, "2"),
    );
    host.change_thread(6, |thread| thread.asked = Some("2".parse().unwrap()));
    host.set_cpuset("0-3");
    let mut entries = BTreeMap::new();
    apply_change(&host, &mut entries, affinity(5, wide), cpu_state("1"));
    apply_change(&host, &mut entries, affinity(6, narrow), cpu_state("1"));
    restore(&host, &entries);
    let masks = || [5, 6].map(|tid| host.mask_of(tid));
    assert_eq!(masks(), ["0-3", "2"]);
    host.set_cpuset("0-7");
    assert_eq!(masks(), ["0-7", "2"]);
    host.set_cpuset("2-3");
    assert_eq!(masks(), ["2-3", "2"]);
}

/// Is a confined group that its owner has made a partition meanwhile left as it is, and a member restored?
#[test]
fn a_group_that_became_a_partition_is_left_to_its_owner() {
    for (kind, expected) in [("member\n", "0-3"), ("root\n", "1"), ("isolated\n", "1")] {
        let host = FakeHost::default();
        host.set_file("/cg/cpuset.cpus", "0-3");
        let mut entries = BTreeMap::new();
        apply_change(
            &host,
            &mut entries,
            file("/cg/cpuset.cpus"),
            ObjectState::Text("1".into()),
        );
        host.set_file("/cg/cpuset.cpus.partition", kind);
        let account = restore(&host, &entries);
        assert_eq!(host.file_text("/cg/cpuset.cpus").trim(), expected, "{kind}");
        let is_left = account[0].outcome
            == RestoreOutcome::ChangedByOther(format!("a cpuset partition ({})", kind.trim()));
        assert_eq!(is_left, expected == "1", "{account:?}");
    }
}
