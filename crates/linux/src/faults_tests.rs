//! The whole live machine with faults on its writes: is the state consistent, reported, and restored?

mod everywhere;
mod gangs_by_scheduler;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use std::time::Duration;

use cachemate_core::test_support::{capabilities_fixture, topology_fixture};
use cachemate_core::{
    BandwidthLimit, CacheId, CacheShare, Capabilities, Gang, GangSchedule, GroupId, Machine, Plan,
    PlanItem, RefusalReason, RefusedItem, ShareMember, SplitMix64, TaskId, Topology, Units,
    WindowEnd, WindowLength,
};

use crate::act::actuator::Actuator;
use crate::act::cpusets::CpusetGroup;
use crate::act::desired_state::DesiredState;
use crate::act::resctrl::fake_tests::{FakeCat, FakeGroup, topology as cat_topology};
use crate::act::resctrl::{self, Resctrl};
use crate::act::rules::{ManageAction, ManageRule};
use crate::fake_tests::{FakeHost, SHORT, waiting_guardian};
use crate::kernel::Kernel;
use crate::machine::{LiveMachine, LiveOptions};
use crate::safety::journal::{IntendedChange, Journal, JournalObject, ObjectState};
use crate::safety::restore::RestoreOutcome;

/// Errors that a write may return; with the last one the change is made nevertheless.
const ERRORS: [i32; 7] = [
    libc::EPERM,
    libc::ESRCH,
    libc::EBUSY,
    libc::ENOSPC,
    libc::EINVAL,
    libc::EIO,
    SHORT,
];

/// State of all threads: mask, nice value, policy.
type States = Vec<(String, i32, u32)>;

fn host_states(host: &FakeHost) -> States {
    let group = host
        .files
        .borrow()
        .get(Path::new(GROUP))
        .cloned()
        .flatten()
        .unwrap_or_default();
    let threads = host.threads.borrow();
    let threads = threads
        .values()
        .map(|t| (t.cpus.to_string(), t.nice, t.policy));
    threads.chain([(group.trim().to_string(), 0, 0)]).collect()
}

/// The cpuset of a group that the configuration confines; empty, because its members are managed individually.
const GROUP: &str = "/sys/fs/cgroup/cpuset/batch/cpuset.cpus";

fn with_group(host: &FakeHost) {
    host.set_file(
        "/proc/mounts",
        "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n",
    );
    host.set_file(GROUP, "0-3\n");
    host.set_file("/sys/fs/cgroup/cpuset/batch/tasks", "");
}

/// A plan that keeps every task of the observation on CPU 1, with a window of `ns` nanoseconds.
fn confining_plan(observation: &cachemate_core::Observation, ns: u64) -> Plan {
    let affinity = observation
        .tasks
        .iter()
        .map(|task| (task.task, [1].into_iter().collect()))
        .collect();
    Plan {
        affinity,
        ..Plan::idle(WindowLength::Time { ns })
    }
}

/// A host with a confined group and these threads, which a machine with this state directory has just moved to CPU 1,
/// and the previous state of all threads.
fn machine_with_moved_threads(
    threads: std::ops::Range<i32>,
    state_dir: &std::path::Path,
) -> (LiveMachine<FakeHost>, States) {
    let host = FakeHost::with_threads(threads);
    with_group(&host);
    let states_before = host_states(&host);
    let mut machine = small_machine(host, state_dir);
    let observation = machine.observe().unwrap().unwrap();
    machine.apply(&confining_plan(&observation, 1)).unwrap();
    (machine, states_before)
}

fn small_machine(host: FakeHost, state_dir: &std::path::Path) -> LiveMachine<FakeHost> {
    machine_with(host, topology_fixture(4), None, state_dir)
}

fn machine_with<K: Kernel + Send + 'static>(
    host: K,
    topology: Topology,
    resctrl: Option<Resctrl>,
    state_dir: &std::path::Path,
) -> LiveMachine<K> {
    let capabilities = Capabilities {
        partitions: resctrl.iter().flat_map(Resctrl::partitions).collect(),
        bandwidth: resctrl.iter().flat_map(Resctrl::bandwidth_limits).collect(),
        ..capabilities_fixture(&[])
    };
    let options = LiveOptions {
        resctrl,
        ..sample_options(state_dir)
    };
    LiveMachine::new(host, topology, capabilities, Vec::new(), options)
}

/// Options of a machine that acts on every program of a made-up host.
pub(crate) fn sample_options(state_dir: &std::path::Path) -> LiveOptions {
    LiveOptions {
        rules: vec![ManageRule {
            action: ManageAction::Manage(None),
            ..ManageRule::default()
        }],
        cpusets: vec![CpusetGroup {
            cgroup: "/batch".to_string(),
            cpus: "0-1".parse().unwrap(),
        }],
        should_act: true,
        state_dir: state_dir.to_path_buf(),
        guardian: waiting_guardian(),
        first_window: Duration::from_millis(1),
        probe_share: 0.5,
        ..LiveOptions::default()
    }
}

fn draw_plan(draw: &mut SplitMix64, tasks: &[TaskId]) -> Plan {
    let mut plan = Plan::idle(WindowLength::Time { ns: 1_000_000 });
    for &task in tasks {
        if draw.draw_below(3) > 0 {
            plan.affinity
                .insert(task, [draw.draw_below(4) as u32].into_iter().collect());
        }
        if draw.draw_below(3) == 0 {
            plan.weights.insert(task, 2.0);
        }
    }
    if draw.draw_below(2) == 0 {
        let gang = |task: &TaskId| Gang {
            members: vec![(*task, None)],
            slices: 1,
        };
        let gangs = tasks.iter().map(gang).collect();
        plan.gangs = vec![GangSchedule {
            cpus: (0..4).collect(),
            slice_ns: 500_000,
            gangs,
        }];
    }
    plan
}

/// If any write fails, with any error, gang turns included: does the machine continue, does its reported state match
/// the host's, and is every thread restored at the end?
#[test]
fn faults_on_any_write_leave_a_consistent_state() {
    for seed in 0..60 {
        let dir = tempfile::tempdir().unwrap();
        let host = FakeHost::with_threads(5..9);
        with_group(&host);
        let states_before = host_states(&host);
        let mut machine = small_machine(host, dir.path());
        let mut draw = SplitMix64::new(seed);
        for window in 0..8 {
            let observation = machine.observe().unwrap().unwrap();
            let tasks: Vec<TaskId> = observation.tasks.iter().map(|task| task.task).collect();
            if draw.draw_below(3) > 0 {
                let fault = (
                    draw.draw_below(8) as u32,
                    ERRORS[draw.draw_below(7) as usize],
                );
                machine.with_kernel(|host| host.fault.set(Some(fault)));
            }
            let plan = draw_plan(&mut draw, &tasks);
            let applied = machine.apply(&plan).unwrap();
            let is_applied = machine.with_kernel(|host| {
                applied.affinity.iter().all(|(task, cpus)| {
                    // The CPUs of gang members are in the schedule, not here.
                    host.threads.borrow()[&(5 + task.0 as i32)].cpus == *cpus
                        || !plan.gangs.is_empty()
                })
            });
            assert!(is_applied, "seed {seed}, window {window}: {applied:?}");
        }
        machine.with_kernel(|host| host.fault.set(None));
        machine.restore_all().unwrap();
        assert_eq!(
            machine.with_kernel(host_states),
            states_before,
            "seed {seed}"
        );
        assert!(
            !dir.path()
                .join(crate::safety::journal::Journal::FILE_NAME)
                .exists()
        );
    }
}

/// As above with way masks and limits of bandwidth on a fake resctrl, where children are born into groups: does the
/// reported state match the groups', are other tools' groups unchanged, and is none of our groups left at the end?
#[test]
fn faults_among_way_masks_and_limits_leave_a_consistent_state() {
    for seed in 0..40 {
        let dir = tempfile::tempdir().unwrap();
        let cat = FakeCat::with_bandwidth();
        let db = FakeGroup::with_threads([8]);
        cat.groups.borrow_mut().insert("db".into(), db.clone());
        let host = cat_topology();
        let resctrl = resctrl::find(&cat, &host).unwrap();
        let mut machine = machine_with(cat, host.topology, Some(resctrl), dir.path());
        let mut draw = SplitMix64::new(seed);
        for window in 0..8 {
            let observation = machine.observe().unwrap().unwrap();
            let tasks: Vec<TaskId> = observation.tasks.iter().map(|task| task.task).collect();
            if draw.draw_below(3) > 0 {
                let fault = (
                    draw.draw_below(8) as u32,
                    ERRORS[draw.draw_below(6) as usize],
                );
                machine.with_kernel(|cat| cat.host.fault.set(Some(fault)));
            }
            let mut plan = Plan::idle(WindowLength::Time { ns: 1_000_000 });
            for task in tasks {
                if draw.draw_below(3) == 0 {
                    continue;
                }
                let (first, width) = (draw.draw_below(7) as u32, 2 + draw.draw_below(3) as u32);
                let units = Units::Ways {
                    mask: (first..(first + width).min(8)).collect(),
                };
                let (group, members) = (GroupId(task.0), vec![ShareMember::Task(task)]);
                plan.shares.push(CacheShare {
                    group,
                    members,
                    cache: CacheId(window % 2),
                    units,
                });
                plan.bandwidth.push(BandwidthLimit {
                    group,
                    members: vec![ShareMember::Task(task)],
                    cache: CacheId(draw.draw_below(2) as u32),
                    level: 10 * (1 + draw.draw_below(9) as u32),
                });
            }
            let applied = machine.apply(&plan).unwrap();
            machine.with_kernel(|cat| {
                for limit in &applied.bandwidth {
                    let ShareMember::Task(task) = limit.members[0] else {
                        panic!("not a task: {limit:?}");
                    };
                    let thread = [5, 6, 7, 8, 30][task.0 as usize]; // in order of arrival
                    let group = cat.groups_by_thread()[&thread].clone();
                    let levels = &cat.groups.borrow()[&group].levels;
                    assert_eq!(levels[&(8 * limit.cache.0)], limit.level, "seed {seed}");
                }
                for active_share in &applied.shares {
                    let (ShareMember::Task(task), Units::Ways { mask }) =
                        (active_share.share.members[0], &active_share.share.units)
                    else {
                        panic!("neither a task nor ways: {active_share:?}");
                    };
                    let thread = [5, 6, 7, 8, 30][task.0 as usize]; // in order of arrival
                    let group = cat.groups_by_thread()[&thread].clone();
                    let masks = cat.groups.borrow()[&group].masks.clone();
                    assert_eq!(
                        masks[&(8 * active_share.share.cache.0)],
                        *mask,
                        "seed {seed}, window {window}"
                    );
                }
                assert_eq!(
                    cat.groups.borrow()["db"],
                    db,
                    "seed {seed}, window {window}"
                );
                if window == 4 {
                    cat.fork_child(5, 30);
                }
            });
        }
        machine.with_kernel(|cat| cat.host.fault.set(None));
        machine.restore_all().unwrap();
        let groups = machine.with_kernel(|cat| cat.groups.borrow().clone());
        assert_eq!(
            groups,
            BTreeMap::from([("db".to_string(), db)]),
            "seed {seed}"
        );
        assert!(
            !dir.path()
                .join(crate::safety::journal::Journal::FILE_NAME)
                .exists()
        );
    }
}

/// If a write of the restore itself fails: is this reported, the journal kept, and the next try complete?
#[test]
fn a_failing_restore_keeps_its_journal() {
    for errno in [
        libc::EPERM,
        libc::EBUSY,
        libc::ENOSPC,
        libc::EINVAL,
        libc::EIO,
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (mut machine, states_before) = machine_with_moved_threads(5..7, dir.path());
        machine.with_kernel(|host| host.fault.set(Some((0, errno))));
        let account = machine.restore_all().unwrap();
        let failure_count = account.iter().filter(|line| line.has_failed()).count();
        assert_eq!(failure_count, 1, "{account:?}");
        assert!(
            dir.path()
                .join(crate::safety::journal::Journal::FILE_NAME)
                .exists()
        );
        let restored = machine
            .with_kernel(|host| crate::safety::guardian::restore_left_behind(host, dir.path()))
            .unwrap();
        assert!(!restored.restored_objects.is_empty());
        assert_eq!(machine.with_kernel(host_states), states_before);
    }
}

/// A host with one object of every kind that cachemate writes, and their desired states.
fn one_of_each() -> (FakeHost, Vec<DesiredState>) {
    let host = FakeHost::default();
    let thread = host.add_thread(5, 5, 1, "0-3");
    with_group(&host);
    let groups = Path::new("/sys/fs/cgroup/cpuset");
    host.set_file("/sys/fs/cgroup/cpuset/tasks", "5\n");
    let object = DesiredState::written;
    let desired_states = vec![
        object(
            JournalObject::Affinity { pid: 5, thread },
            ObjectState::Cpus("1".parse().unwrap()),
        ),
        object(JournalObject::Nice { pid: 5, thread }, ObjectState::Nice(7)),
        object(
            JournalObject::Policy { pid: 5, thread },
            ObjectState::Policy(5),
        ),
        object(
            JournalObject::File { path: GROUP.into() },
            ObjectState::Text("0-1".into()),
        ),
        object(
            JournalObject::Directory {
                path: groups.join("cachemate-ours"),
            },
            ObjectState::Present,
        ),
        object(
            JournalObject::Membership {
                hierarchy: groups.into(),
                pid: 5,
                thread,
            },
            ObjectState::Group("/batch".into()),
        ),
    ];
    (host, desired_states)
}

/// Changes each object individually, as the steps of a list.
fn apply_individually(
    actuator: &mut Actuator,
    host: &dyn Kernel,
    desired_states: &[DesiredState],
) -> (Vec<RefusedItem>, usize) {
    let intended_change = |desired_state: &DesiredState| {
        actuator
            .build_intended_change(host, &desired_state.object, &desired_state.state)
            .ok()
    };
    let changes: Vec<IntendedChange> = desired_states.iter().filter_map(intended_change).collect();
    if let Err(error) = actuator.journal_changes(host, &changes) {
        let because = RefusalReason::NoCapacity;
        let refuse = |_: &DesiredState| RefusedItem {
            item: PlanItem::Plan,
            reason: because.clone(),
            message: error.to_string(),
        };
        return (desired_states.iter().map(refuse).collect(), 0);
    }
    let is_intended = |desired_state: &&DesiredState| {
        changes
            .iter()
            .any(|change| change.object == desired_state.object)
    };
    let results = desired_states
        .iter()
        .filter(is_intended)
        .map(|desired_state| {
            actuator.set(
                host,
                &PlanItem::Plan,
                &desired_state.object,
                &desired_state.state,
            )
        });
    let (held, refused): (Vec<_>, Vec<_>) = results.partition(Result::is_ok);
    (
        refused.into_iter().filter_map(Result::err).collect(),
        held.len(),
    )
}

/// For every kind of write and every error: is the change refused with its reason, or in force; is the original never
/// lost; and does a restore that fails in the same way keep its journal, so that the next one completes?
#[test]
fn every_kind_of_write_is_refused_or_in_force_at_any_error() {
    let read_states =
        |host: &FakeHost, desired_states: &[DesiredState]| -> Vec<Option<ObjectState>> {
            desired_states
                .iter()
                .map(|desired_state| {
                    crate::safety::object_state::read_state(host, &desired_state.object).ok()
                })
                .collect()
        };
    for index in 0..one_of_each().1.len() {
        for errno in ERRORS {
            let dir = tempfile::tempdir().unwrap();
            let (host, desired_states) = one_of_each();
            let states_before = read_states(&host, &desired_states);
            let mut actuator = Actuator::new(dir.path(), waiting_guardian());
            host.fault.set(Some((index as u32, errno)));
            let (refused_items, held_count) =
                apply_individually(&mut actuator, &host, &desired_states);
            let case = format!(
                "{:?}, error {errno}: {refused_items:?}",
                desired_states[index].object
            );
            assert_eq!(refused_items.len(), 1, "{case}");
            let because = match errno {
                libc::EPERM => RefusalReason::NoPermission,
                libc::ESRCH => RefusalReason::NotFound,
                libc::EBUSY => RefusalReason::Busy,
                libc::ENOSPC => RefusalReason::NoCapacity,
                _ => RefusalReason::Failed,
            };
            assert_eq!(refused_items[0].reason, because, "{case}");
            assert_eq!(
                held_count,
                desired_states.len() - 1,
                "the others went on: {case}"
            );
            assert_eq!(
                actuator.originals().len(),
                desired_states.len(),
                "every original is written down: {case}"
            );
            // Once more without a fault, so that everything has to be restored; then the restore fails once.
            assert!(
                apply_individually(&mut actuator, &host, &desired_states)
                    .0
                    .is_empty(),
                "{case}"
            );
            host.fault.set(Some((index as u32, errno)));
            let account = actuator.restore_all(&host).unwrap();
            host.fault.set(None);
            let has_failed = account.iter().any(|line| line.has_failed());
            let has_journal = dir
                .path()
                .join(crate::safety::journal::Journal::FILE_NAME)
                .exists();
            assert_eq!(has_failed, has_journal, "{case}: {account:?}");
            crate::safety::guardian::restore_left_behind(&host, dir.path()).unwrap();
            assert_eq!(
                read_states(&host, &desired_states),
                states_before,
                "{case}: {account:?}"
            );
        }
    }
}

/// If descriptors run out: while the existence of threads is unknown, are all originals kept, does the journal stay
/// when nothing can be restored, and does the next try restore everything?
#[test]
fn no_original_is_lost_if_descriptors_run_out() {
    let dir = tempfile::tempdir().unwrap();
    let (mut machine, states_before) = machine_with_moved_threads(5..9, dir.path());
    machine.with_kernel(|host| host.reads_fail.set(Some(libc::EMFILE)));
    let observation = machine.observe().unwrap().unwrap();
    assert!(
        observation.tasks.iter().all(|task| !task.exited),
        "a thread that cannot be read has not exited: {:?}",
        observation.tasks
    );
    let account = machine.restore_all().unwrap();
    let failure_count = account.iter().filter(|line| line.has_failed()).count();
    assert!(failure_count >= 4, "{account:?}");
    let restored = machine
        .with_kernel(|host| crate::safety::guardian::restore_left_behind(host, dir.path()))
        .unwrap();
    assert!(
        restored
            .restored_objects
            .iter()
            .filter(|line| line.has_failed())
            .count()
            >= 4,
        "{restored:?}"
    );
    assert!(
        dir.path()
            .join(crate::safety::journal::Journal::FILE_NAME)
            .exists()
    );
    machine.with_kernel(|host| host.reads_fail.set(None));
    machine.restore_all().unwrap();
    assert_eq!(machine.with_kernel(host_states), states_before);
    assert!(
        !dir.path()
            .join(crate::safety::journal::Journal::FILE_NAME)
            .exists()
    );
}

/// A user's machine with a host's threads, the host's states, and the announcement that root acts: file and text.
fn users_machine(
    host: FakeHost,
    dir: &Path,
) -> (LiveMachine<FakeHost>, States, (std::path::PathBuf, String)) {
    // A thread of the fake host with this process's id.
    let own_process = host.add_thread(FakeHost::OWN_PID, FakeHost::OWN_PID, 1, "0-3");
    let states_before = host_states(&host);
    let actuation_lock = Arc::new(crate::safety::actuation_lock::ActuationLock::below_root(
        &host, dir,
    ));
    let mut machine = small_machine(host, dir);
    machine.set_actuation_lock(actuation_lock);
    let announcement = format!("{} {}\n", own_process.tid, own_process.start_ticks);
    (
        machine,
        states_before,
        (dir.join("root-acts"), announcement),
    )
}

/// When root begins to act: does a user's machine restore the host, and change nothing more?
#[test]
fn a_users_machine_stops_acting_when_root_begins() {
    let dir = tempfile::tempdir().unwrap();
    let host = FakeHost::with_threads(5..7);
    with_group(&host);
    let (mut machine, states_before, (file, announcement)) = users_machine(host, dir.path());
    let observation = machine.observe().unwrap().unwrap();
    let plan = confining_plan(&observation, 1);
    assert_eq!(machine.apply(&plan).unwrap().affinity.len(), 2);
    std::fs::write(file, announcement).unwrap();
    machine.observe().unwrap().unwrap();
    assert!(!machine.host_report().is_acting);
    assert_eq!(machine.with_kernel(host_states), states_before);
    assert!(machine.apply(&plan).unwrap().affinity.is_empty());
    assert_eq!(machine.with_kernel(host_states), states_before);
}

/// Is a window flagged in which the daemon stood still, as in a paused virtual machine, and no other one?
#[test]
fn a_window_in_which_the_daemon_stood_still_is_flagged() {
    let dir = tempfile::tempdir().unwrap();
    let mut machine = small_machine(FakeHost::default(), dir.path());
    let reason =
        |machine: &mut LiveMachine<FakeHost>| machine.observe().unwrap().unwrap().end_reason;
    assert_eq!(reason(&mut machine), WindowEnd::Elapsed);
    machine
        .apply(&Plan::idle(WindowLength::Time { ns: 1_200_000_000 }))
        .unwrap();
    // The heartbeat is the one call out of the wait.
    let mut pauses = vec![Duration::from_millis(2_100)];
    machine.set_heartbeat(move || pauses.pop().into_iter().for_each(std::thread::sleep));
    assert_eq!(reason(&mut machine), WindowEnd::HostChanged);
    assert_eq!(reason(&mut machine), WindowEnd::Elapsed);
}

/// Does the growth of a rule's progress file count as the work of the rule's first process, is only that process
/// promised the rate, and is a file that shrinks or contains no number no evidence?
#[test]
fn the_first_process_of_a_rule_has_the_work_that_its_file_counts() {
    let dir = tempfile::tempdir().unwrap();
    let work_file = dir.path().join("transactions");
    let goal = cachemate_core::Goal {
        min_rate: Some(25.0),
        is_rate_reported: true,
        ..Default::default()
    };
    let mut machine = small_machine(FakeHost::with_threads([5, 6, 7]), dir.path());
    let counted_rule = ManageRule {
        pid: Some(6),
        progress_file: Some(work_file.clone()),
        action: ManageAction::Manage(Some(goal)),
        ..ManageRule::default()
    };
    let second_rule = ManageRule {
        pid: Some(7),
        ..counted_rule.clone()
    };
    let rules = [
        counted_rule,
        second_rule,
        sample_options(dir.path()).rules[0].clone(),
    ]
    .to_vec();
    machine.set_rules(rules, Vec::new(), false).unwrap();

    let cases = [
        ("100\n", None),
        ("110", Some(10.0)),
        ("110", Some(0.0)),
        ("oops", None),
        ("7", None),
        ("17", Some(10.0)),
        ("5", None),
    ];
    for (text, work) in cases {
        std::fs::write(&work_file, text).unwrap();
        let tasks = machine.observe().unwrap().unwrap().tasks;
        let progress: Vec<Option<f64>> = tasks.iter().map(|task| task.progress).collect();
        assert_eq!(progress, [None, work, None], "{text}");
        let is_promised =
            |task: &cachemate_core::TaskSample| task.goal.is_some_and(|goal| goal.is_promised());
        let promised: Vec<bool> = tasks.iter().map(is_promised).collect();
        assert_eq!(promised, [false, true, false]);
    }
}

/// When root begins to act during a long window: does a user's machine restore the host at once, and not at the
/// window's end?
#[test]
fn a_users_machine_yields_to_root_before_its_window_ends() {
    let dir = tempfile::tempdir().unwrap();
    let host = FakeHost::with_threads([5]);
    let (mut machine, states_before, (file, announcement)) = users_machine(host, dir.path());
    let observation = machine.observe().unwrap().unwrap();
    let plan = confining_plan(&observation, 3_600_000_000_000);
    assert_eq!(machine.apply(&plan).unwrap().affinity.len(), 1);
    let (sender, ended) = std::sync::mpsc::channel();
    let machine_thread = std::thread::spawn(move || {
        machine.observe().unwrap().unwrap();
        let account = machine.take_overruled();
        sender
            .send((
                machine.host_report().is_acting,
                machine.with_kernel(host_states),
                account,
            ))
            .unwrap();
    });
    std::thread::sleep(Duration::from_millis(50));
    std::fs::write(file, announcement).unwrap();
    let (acts, states_after, account) = ended
        .recv_timeout(Duration::from_secs(60))
        .expect("an hour is not waited for");
    machine_thread.join().unwrap();
    assert!(!acts);
    assert_eq!(states_after, states_before);
    assert!(
        account
            .iter()
            .any(|line| line.outcome == RestoreOutcome::Restored),
        "restored objects are reported: {account:?}"
    );
}

/// If new rules release a program that cannot be restored: is that reported, and kept in the journal for the next
/// try?
#[test]
fn a_reload_reports_programs_that_could_not_be_restored() {
    let dir = tempfile::tempdir().unwrap();
    let host = FakeHost::default();
    host.add_thread(5, 5, 1, "0-3");
    let states_before = host_states(&host);
    let mut machine = small_machine(host, dir.path());
    let observation = machine.observe().unwrap().unwrap();
    let plan = confining_plan(&observation, 1);
    machine.apply(&plan).unwrap();
    machine.with_kernel(|host| host.broken_from.set(Some(0)));
    for act in [true, false] {
        let account = machine.set_rules(Vec::new(), Vec::new(), act).unwrap();
        let has_failure = account.iter().any(|line| line.has_failed());
        assert!(has_failure, "act = {act}: {account:?}");
    }
    machine.with_kernel(|host| host.broken_from.set(None));
    machine.restore_all().unwrap();
    assert_eq!(machine.with_kernel(host_states), states_before);
}

/// If a reload's release fails, because the journal can be neither compacted nor removed: do the previous rules stay in
/// force with their tasks, and does the same reload succeed later?
#[test]
fn a_reload_that_fails_leaves_the_previous_rules_in_force() {
    for seed in 0..4 {
        let mut draw = SplitMix64::new(seed);
        let should_act = seed % 2 == 0;
        // The originals of so many threads fill the journal beyond the size at which a release compacts it.
        let thread_count = if should_act { 2_000 } else { 20 };
        let rule_of = |pid| ManageRule {
            pid: Some(pid),
            action: ManageAction::Manage(None),
            ..ManageRule::default()
        };
        let rules: Vec<ManageRule> = (0..draw.draw_below(3))
            .map(|_| rule_of(5 + draw.draw_below(thread_count) as i32))
            .collect();
        let case = format!("seed {seed}, act = {should_act}, {} rules", rules.len());
        let dir = tempfile::tempdir().unwrap();
        let (mut machine, states_before) =
            machine_with_moved_threads(5..5 + thread_count as i32, dir.path());
        let (journal, aside) = (
            dir.path().join(Journal::FILE_NAME),
            dir.path().join("aside"),
        );
        let blocked_path = if should_act {
            journal.with_extension("journal.new")
        } else {
            journal.clone()
        };
        if !should_act {
            std::fs::rename(&journal, &aside).unwrap();
        }
        std::fs::create_dir(&blocked_path).unwrap();
        machine
            .set_rules(rules.clone(), Vec::new(), should_act)
            .expect_err(&case);
        let observation = machine.observe().unwrap().unwrap();
        let tasks: Vec<TaskId> = observation.tasks.iter().map(|task| task.task).collect();
        assert_eq!(
            tasks,
            (0..thread_count as u32).map(TaskId).collect::<Vec<_>>(),
            "{case}"
        );
        assert!(machine.host_report().is_acting, "{case}");
        machine.apply(&confining_plan(&observation, 1)).unwrap();
        assert!(
            machine
                .with_kernel(|host| host.masks())
                .iter()
                .all(|mask| mask == "1"),
            "{case}"
        );

        std::fs::remove_dir(&blocked_path).unwrap();
        if !should_act {
            std::fs::rename(&aside, &journal).unwrap();
        }
        machine
            .set_rules(rules.clone(), Vec::new(), should_act)
            .expect(&case);
        let kept_tasks = machine
            .observe()
            .unwrap()
            .unwrap()
            .tasks
            .iter()
            .filter(|task| !task.exited)
            .count();
        assert!(
            kept_tasks <= rules.len() && machine.host_report().is_acting == should_act,
            "{case}"
        );
        machine.restore_all().unwrap();
        assert_eq!(machine.with_kernel(host_states), states_before, "{case}");
    }
}

/// When rules release a member while gangs take turns: does the reload finish, with the member's original policy
/// restored?
#[test]
fn a_reload_ends_while_gangs_take_turns() {
    let dir = tempfile::tempdir().unwrap();
    let host = FakeHost::with_threads(5..7);
    let policies_before: Vec<u32> = host.policies();
    let mut machine = small_machine(host, dir.path());
    let observation = machine.observe().unwrap().unwrap();
    let gang = |task: &cachemate_core::TaskSample| Gang {
        members: vec![(task.task, None)],
        slices: 1,
    };
    let mut plan = Plan::idle(WindowLength::Time { ns: 1_000_000 });
    let gangs = observation.tasks.iter().map(gang).collect();
    plan.gangs = vec![GangSchedule {
        cpus: (0..1).collect(),
        slice_ns: 500_000,
        gangs,
    }];
    assert_eq!(machine.apply(&plan).unwrap().gangs, plan.gangs);
    let (sender, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        machine.set_rules(Vec::new(), Vec::new(), true).unwrap();
        let read_policies = |host: &FakeHost| host.policies();
        let policies = machine.with_kernel(read_policies);
        machine.restore_all().unwrap();
        sender.send(policies).unwrap();
    });
    let policies = ended
        .recv_timeout(Duration::from_secs(60))
        .expect("a reload never waits for a thread that waits for it");
    assert_eq!(policies, policies_before);
}
