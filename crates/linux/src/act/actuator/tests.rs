use super::*;
use crate::act::changes::fixture::{self, ApplyFixture};
use crate::act::rules::{ManageAction, ManageRule};
use crate::fake_tests::{FakeHost, waiting_guardian};
use crate::sense::tasks::TaskTable;
use cachemate_core::{CpuSet, Plan, RefusalReason, TaskId, WindowLength};

/// An actuator on a fake host whose threads are all managed.
struct Bench {
    dir: tempfile::TempDir,
    host: FakeHost,
    tasks: TaskTable,
    actuator: Actuator,
}

impl Bench {
    fn new(tids: &[i32]) -> Self {
        Self::with_guardian(tids, waiting_guardian())
    }
    fn with_guardian(tids: &[i32], guardian: GuardianCommand) -> Self {
        let (host, mut tasks) = (
            FakeHost::with_threads(tids.iter().copied()),
            TaskTable::default(),
        );
        tasks.refresh(&host, &[rule_for(None)], 0).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let actuator = Actuator::new(dir.path(), guardian);
        Bench {
            dir,
            host,
            tasks,
            actuator,
        }
    }
    /// Applies a plan that moves these tasks.
    fn step(&mut self, cpus: &[(u32, &str)]) -> ApplyReport {
        let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
        plan.affinity.extend(
            cpus.iter()
                .map(|(task, list)| (TaskId(*task), list.parse::<CpuSet>().unwrap())),
        );
        let capabilities = fixture::sample_capabilities();
        let Bench {
            host,
            tasks,
            actuator,
            ..
        } = self;
        ApplyFixture {
            host,
            actuator,
            ways: None,
            tasks,
            capabilities: &capabilities,
            groups: &[],
        }
        .apply(&plan)
        .0
    }
    fn has_journal(&self) -> bool {
        self.dir.path().join(Journal::FILE_NAME).exists()
    }
    /// Restores everything; returns the masks of all threads.
    fn restored_masks(&mut self) -> Vec<String> {
        self.actuator.restore_all(&self.host).unwrap();
        self.host.masks()
    }
}

fn rule_for(pid: Option<i32>) -> ManageRule {
    ManageRule {
        pid,
        action: ManageAction::Manage(None),
        ..ManageRule::default()
    }
}

/// Is a plan the whole state: is a property that the next plan does not mention restored, and is the same plan again
/// no change?
#[test]
fn a_plan_is_the_whole_state() {
    let mut bench = Bench::new(&[5, 6]);
    assert_eq!(bench.step(&[]).write_calls, 0);
    assert!(
        !bench.has_journal(),
        "starting changes nothing, not even a file"
    );
    assert_eq!(bench.step(&[(0, "1"), (1, "2")]).write_calls, 2);
    assert_eq!(bench.step(&[(0, "1"), (1, "2")]).write_calls, 0);
    assert_eq!(bench.host.masks(), ["1", "2"]);
    bench.step(&[(1, "3")]);
    assert_eq!(bench.host.masks(), ["0-3", "3"]);
    assert_eq!(bench.restored_masks(), ["0-3", "0-3"]);
    assert!(!bench.has_journal());
}

/// If any change fails with any error: is it reported, are the others made, and can everything be restored?
#[test]
fn a_failing_change_is_reported_and_the_rest_is_done() {
    for errno in [
        libc::EPERM,
        libc::ESRCH,
        libc::EBUSY,
        libc::ENOSPC,
        libc::EINVAL,
    ] {
        for nth in 0..2 {
            let mut bench = Bench::new(&[5, 6]);
            bench.host.fault.set(Some((nth, errno)));
            let applied = bench.step(&[(0, "1"), (1, "2")]);
            assert_eq!(
                (applied.refused_items.len(), applied.read_back_states.len()),
                (1, 1),
                "{applied:?}"
            );
            assert_eq!(bench.restored_masks(), ["0-3", "0-3"]);
        }
    }
}

/// Without a guardian or a place for the journal: is nothing changed?
#[test]
fn nothing_changes_without_a_guardian_or_a_journal() {
    let missing = GuardianCommand {
        program: "/no/such/program".into(),
        args: Vec::new(),
    };
    let mut bench = Bench::with_guardian(&[5], missing);
    assert_eq!(
        (
            bench.step(&[(0, "1")]).refused_items.len(),
            bench.host.changes.get()
        ),
        (1, 0)
    );
    assert!(!bench.has_journal());
    bench.actuator = Actuator::new(Path::new("/no/such/folder"), waiting_guardian());
    assert_eq!(
        (
            bench.step(&[(0, "1")]).refused_items.len(),
            bench.host.changes.get()
        ),
        (1, 0)
    );
}

/// If another process changes a mask that cachemate set: is it noticed?
#[test]
fn masks_changed_by_another_process_are_noticed() {
    let mut bench = Bench::new(&[5]);
    bench.step(&[(0, "1")]);
    bench
        .host
        .change_thread(5, |thread| thread.cpus = "3".parse().unwrap());
    let applied = bench.step(&[(0, "1")]);
    assert_eq!(applied.overridden_items, [PlanItem::Affinity(TaskId(0))]);
    bench.restored_masks();
}

/// Is a thread that was born under our mask given its parent's original when the plan no longer mentions it?
#[test]
fn an_inheriting_thread_is_given_its_parents_original_mask() {
    let mut bench = Bench::new(&[5]);
    bench.step(&[(0, "1")]);
    bench.host.add_thread(8, 8, 5, "1");
    bench
        .tasks
        .refresh(&bench.host, &[rule_for(None)], 1)
        .unwrap();
    bench
        .actuator
        .restore_inherited(&bench.host, &bench.tasks.tasks(), &[])
        .unwrap();
    bench.step(&[(0, "1")]);
    assert_eq!(bench.host.masks(), ["1", "0-3"]);
    assert_eq!(bench.restored_masks(), ["0-3", "0-3"]);
}

/// Does an unmanaged child lose the settings that it inherited, and a waiting member's child its idle policy?
#[test]
fn unmanaged_children_lose_inherited_settings() {
    let mut bench = Bench::new(&[5]);
    bench.step(&[(0, "1")]);
    let key = bench.tasks.tasks()[0].thread;
    let object = JournalObject::Policy {
        pid: 5,
        thread: key,
    };
    let idle = DesiredState::journaled(object, ObjectState::Policy(5));
    bench
        .actuator
        .journal_originals(&bench.host, &[idle])
        .unwrap();
    assert_eq!(
        bench.host.threads.borrow()[&5].policy,
        0,
        "writing originals down changes nothing"
    );
    for tid in [8, 9] {
        bench.host.add_thread(tid, tid, 5, "1");
        bench.host.change_thread(tid, |thread| thread.policy = 5);
    }
    bench
        .tasks
        .refresh(&bench.host, &[rule_for(Some(8))], 1)
        .unwrap();
    let new: Vec<&ManagedThread> = bench
        .tasks
        .tasks()
        .into_iter()
        .filter(|task| task.pid == 8)
        .collect();
    assert_eq!((new.len(), bench.tasks.new_unmanaged_pids()), (1, &[9][..]));
    bench
        .actuator
        .restore_inherited(&bench.host, &new, bench.tasks.new_unmanaged_pids())
        .unwrap();
    assert_eq!(
        (bench.host.policies(), &bench.host.masks()[1..]),
        (vec![0; 3], &["1", "0-3"].map(str::to_string)[..])
    );
    assert_eq!(bench.restored_masks(), ["0-3", "0-3", "0-3"]);
}

/// If a guardian took this process for hung: is nothing changed until the fence is noticed, the interrupted change
/// restored, and a new guardian started?
#[test]
fn a_fenced_actuator_changes_nothing_before_it_rearms() {
    let args = [
        "-c",
        "echo ready; read beat; printf '\\001' >/proc/self/fd/$CACHEMATE_FENCE",
    ]
    .map(str::to_string);
    let command = GuardianCommand {
        program: "/bin/sh".into(),
        args: args.to_vec(),
    };
    let mut bench = Bench::with_guardian(&[5, 6], command);
    bench.step(&[(0, "1")]);
    let first = bench.actuator.guardian_pid();
    bench
        .actuator
        .heartbeat(&bench.host, Duration::from_secs(1))
        .unwrap();
    while !bench.actuator.is_fenced() {
        std::thread::sleep(Duration::from_millis(2));
    }
    // The guardian has restored the host, and this process has made one change since then.
    std::fs::remove_file(bench.dir.path().join(Journal::FILE_NAME)).unwrap();
    let applied = bench.step(&[(0, "2"), (1, "2")]);
    assert_eq!(
        (bench.host.masks(), applied.refused_items.len()),
        (vec!["1".to_string(), "0-3".to_string()], 2)
    );
    bench.actuator.rejoin(&bench.host).unwrap();
    assert_eq!(bench.host.masks(), ["0-3", "0-3"]);
    assert!(!bench.has_journal());
    bench.step(&[(0, "1")]);
    assert!(bench.has_journal() && bench.actuator.guardian_pid() != first);
    assert_eq!(bench.restored_masks(), ["0-3", "0-3"]);
}

/// If a thread has exited and its id was reused: is the new thread neither changed nor journaled?
#[test]
fn a_thread_with_a_reused_id_is_not_changed_or_journaled() {
    let mut bench = Bench::new(&[5, 6]);
    bench
        .host
        .change_thread(5, |thread| thread.start_ticks += 1);
    let applied = bench.step(&[(0, "1"), (1, "2")]);
    assert_eq!(
        (bench.host.masks(), applied.refused_items.len()),
        (vec!["0-3".to_string(), "2".to_string()], 1)
    );
    assert_eq!(applied.refused_items[0].reason, RefusalReason::NotFound);
    assert_eq!(bench.actuator.originals().len(), 1);
    let key = bench.tasks.tasks()[0].thread;
    let object = JournalObject::Affinity {
        pid: 5,
        thread: key,
    };
    let wanted = DesiredState::journaled(object, ObjectState::Cpus("1".parse().unwrap()));
    bench
        .actuator
        .journal_originals(&bench.host, &[wanted])
        .unwrap();
    assert_eq!(bench.actuator.originals().len(), 1);
    bench.restored_masks();
}

/// Does a thread that the plan no longer mentions follow its cpuset again at once, not only when cachemate ends?
#[test]
fn a_thread_dropped_by_the_plan_follows_its_cpuset_at_once() {
    let mut bench = Bench::new(&[5]);
    bench.host.set_cpuset("0-3");
    bench.step(&[(0, "1")]);
    assert!(bench.step(&[]).refused_items.is_empty());
    bench.host.set_cpuset("0-7");
    assert_eq!(bench.host.masks(), ["0-7"]);
    assert_eq!(bench.restored_masks(), ["0-7"]);
}

/// Is a thread that is no longer managed restored, and no other?
#[test]
fn only_threads_no_longer_managed_are_restored() {
    let mut bench = Bench::new(&[5, 6]);
    bench.step(&[(0, "1"), (1, "2")]);
    let only_six = [rule_for(Some(6))];
    let gone: BTreeSet<ThreadKey> = bench
        .tasks
        .reexamine(&bench.host, &only_six)
        .iter()
        .map(|task| task.thread)
        .collect();
    bench
        .actuator
        .release(&bench.host, &gone, &|_| false)
        .unwrap();
    assert_eq!(bench.host.masks(), ["0-3", "2"]);
    assert_eq!(bench.tasks.tasks().len(), 1);
    assert_eq!(bench.restored_masks(), ["0-3", "0-3"]);
}
