use super::*;
use crate::act::changes::fixture::{self, ApplyFixture};
use crate::act::rules::{ManageAction, ManageRule};
use crate::fake_tests::{FakeHost, waiting_guardian};
use crate::sense::tasks::TaskTable;
use cachemate_core::{CpuSet, Plan, RefusalReason, TaskId, WindowLength};

fn host_with(tids: &[i32]) -> (FakeHost, TaskTable) {
    let host = FakeHost::default();
    for &tid in tids {
        host.add_thread(tid, tid, 1, "0-3");
    }
    let mut tasks = TaskTable::default();
    tasks.refresh(&host, &[ManageRule { action: ManageAction::Manage(None), ..ManageRule::default() }], 0).unwrap();
    (host, tasks)
}

fn plan_to(cpus: &[(u32, &str)]) -> Plan {
    let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
    plan.affinity.extend(cpus.iter().map(|(task, list)| (TaskId(*task), list.parse::<CpuSet>().unwrap())));
    plan
}

fn step(actuator: &mut Actuator, host: &FakeHost, tasks: &TaskTable, plan: &Plan) -> ApplyReport {
    let capabilities = fixture::sample_capabilities();
    let bench = ApplyFixture { host, actuator, ways: None, tasks, capabilities: &capabilities, groups: &[] };
    bench.apply(plan).0
}

fn thread_masks(host: &FakeHost) -> Vec<String> {
    host.threads.borrow().values().map(|thread| thread.cpus.to_string()).collect()
}

/// Is a plan the whole state: is a property that the next plan does not mention restored, and is the same plan again
/// no change?
#[test]
fn a_plan_is_the_whole_state() {
    let dir = tempfile::tempdir().unwrap();
    let (host, tasks) = host_with(&[5, 6]);
    let mut actuator = Actuator::new(dir.path(), waiting_guardian());
    assert_eq!(step(&mut actuator, &host, &tasks, &plan_to(&[])).write_calls, 0);
    assert!(!dir.path().join(Journal::FILE_NAME).exists(), "starting changes nothing, not even a file");
    assert_eq!(step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1"), (1, "2")])).write_calls, 2);
    assert_eq!(step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1"), (1, "2")])).write_calls, 0);
    assert_eq!(thread_masks(&host), ["1", "2"]);
    step(&mut actuator, &host, &tasks, &plan_to(&[(1, "3")]));
    assert_eq!(thread_masks(&host), ["0-3", "3"]);
    actuator.restore_all(&host).unwrap();
    assert_eq!(thread_masks(&host), ["0-3", "0-3"]);
    assert!(!dir.path().join(Journal::FILE_NAME).exists());
}

/// If any change fails with any error: is it reported, are the others made, and can everything be restored?
#[test]
fn a_failing_change_is_reported_and_the_rest_is_done() {
    for errno in [libc::EPERM, libc::ESRCH, libc::EBUSY, libc::ENOSPC, libc::EINVAL] {
        for nth in 0..2 {
            let dir = tempfile::tempdir().unwrap();
            let (host, tasks) = host_with(&[5, 6]);
            let mut actuator = Actuator::new(dir.path(), waiting_guardian());
            host.fault.set(Some((nth, errno)));
            let applied = step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1"), (1, "2")]));
            assert_eq!((applied.refused_items.len(), applied.read_back_states.len()), (1, 1), "{applied:?}");
            actuator.restore_all(&host).unwrap();
            assert_eq!(thread_masks(&host), ["0-3", "0-3"]);
        }
    }
}

/// Without a guardian or a place for the journal: is nothing changed?
#[test]
fn nothing_changes_without_a_guardian_or_a_journal() {
    let (host, tasks) = host_with(&[5]);
    let dir = tempfile::tempdir().unwrap();
    let missing = GuardianCommand { program: "/no/such/program".into(), args: Vec::new() };
    let mut actuator = Actuator::new(dir.path(), missing);
    let applied = step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
    assert_eq!((applied.refused_items.len(), host.changes.get()), (1, 0));
    assert!(!dir.path().join(Journal::FILE_NAME).exists());
    let mut actuator = Actuator::new(Path::new("/no/such/folder"), waiting_guardian());
    let applied = step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
    assert_eq!((applied.refused_items.len(), host.changes.get()), (1, 0));
}

/// If another process changes a mask that cachemate set: is it noticed?
#[test]
fn masks_changed_by_another_process_are_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let (host, tasks) = host_with(&[5]);
    let mut actuator = Actuator::new(dir.path(), waiting_guardian());
    step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
    host.threads.borrow_mut().get_mut(&5).unwrap().cpus = "3".parse().unwrap();
    let applied = step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
    assert_eq!(applied.overridden_items, [PlanItem::Affinity(TaskId(0))]);
    actuator.restore_all(&host).unwrap();
}

/// Is a thread that was born under our mask given its parent's original when the plan no longer mentions it?
#[test]
fn an_inheriting_thread_is_given_its_parents_original_mask() {
    let dir = tempfile::tempdir().unwrap();
    let (host, mut tasks) = host_with(&[5]);
    let mut actuator = Actuator::new(dir.path(), waiting_guardian());
    step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
    host.add_thread(8, 8, 5, "1");
    tasks.refresh(&host, &[ManageRule { action: ManageAction::Manage(None), ..ManageRule::default() }], 1).unwrap();
    actuator.restore_inherited(&host, &tasks.tasks(), &[]).unwrap();
    step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
    assert_eq!(thread_masks(&host), ["1", "0-3"]);
    actuator.restore_all(&host).unwrap();
    assert_eq!(thread_masks(&host), ["0-3", "0-3"]);
}

/// Does an unmanaged child lose the settings that it inherited, and a waiting member's child its idle policy?
#[test]
fn unmanaged_children_lose_inherited_settings() {
    let dir = tempfile::tempdir().unwrap();
    let (host, mut tasks) = host_with(&[5]);
    let mut actuator = Actuator::new(dir.path(), waiting_guardian());
    step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
    let key = tasks.tasks()[0].thread;
    let idle = DesiredState {
        item: PlanItem::Gangs(0),
        object: JournalObject::Policy { pid: 5, thread: key },
        state: ObjectState::Policy(5),
    };
    actuator.journal_originals(&host, &[idle]).unwrap();
    assert_eq!(host.threads.borrow()[&5].policy, 0, "writing originals down changes nothing");
    for tid in [8, 9] {
        host.add_thread(tid, tid, 5, "1");
        host.threads.borrow_mut().get_mut(&tid).unwrap().policy = 5;
    }
    tasks
        .refresh(&host, &[ManageRule { pid: Some(8), action: ManageAction::Manage(None), ..ManageRule::default() }], 1)
        .unwrap();
    let new: Vec<&ManagedThread> = tasks.tasks().into_iter().filter(|task| task.pid == 8).collect();
    assert_eq!((new.len(), tasks.unmanaged_children()), (1, &[(9, 5)][..]));
    actuator.restore_inherited(&host, &new, tasks.unmanaged_children()).unwrap();
    let seen: Vec<(u32, String)> = [8, 9]
        .iter()
        .map(|tid| (host.threads.borrow()[tid].policy, host.threads.borrow()[tid].cpus.to_string()))
        .collect();
    assert_eq!(seen, [(0, "1".to_string()), (0, "0-3".to_string())]);
    actuator.restore_all(&host).unwrap();
    assert_eq!(thread_masks(&host), ["0-3", "0-3", "0-3"]);
}

/// If a guardian took this process for hung: is nothing changed until the fence is noticed, the interrupted change
/// restored, and a new guardian started?
#[test]
fn a_fenced_actuator_changes_nothing_before_it_rearms() {
    let dir = tempfile::tempdir().unwrap();
    let (host, tasks) = host_with(&[5, 6]);
    let args = ["-c", "echo ready; read beat; printf '\\001' >/proc/self/fd/$CACHEMATE_FENCE"].map(str::to_string);
    let command = GuardianCommand { program: "/bin/sh".into(), args: args.to_vec() };
    let mut actuator = Actuator::new(dir.path(), command);
    step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
    let first = actuator.guardian_pid();
    actuator.heartbeat(&host, Duration::from_secs(1)).unwrap();
    while !actuator.is_fenced() {
        std::thread::sleep(Duration::from_millis(2));
    }
    // The guardian has restored the host, and this process has made one change since then.
    std::fs::remove_file(dir.path().join(Journal::FILE_NAME)).unwrap();
    let applied = step(&mut actuator, &host, &tasks, &plan_to(&[(0, "2"), (1, "2")]));
    assert_eq!((thread_masks(&host), applied.refused_items.len()), (vec!["1".to_string(), "0-3".to_string()], 2));
    actuator.rejoin(&host).unwrap();
    assert_eq!(thread_masks(&host), ["0-3", "0-3"]);
    assert!(!dir.path().join(Journal::FILE_NAME).exists());
    step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
    assert!(dir.path().join(Journal::FILE_NAME).exists() && actuator.guardian_pid() != first);
    actuator.restore_all(&host).unwrap();
    assert_eq!(thread_masks(&host), ["0-3", "0-3"]);
}

/// If a thread has exited and its id was reused: is the new thread neither changed nor journaled?
#[test]
fn a_thread_with_a_reused_id_is_not_changed_or_journaled() {
    let dir = tempfile::tempdir().unwrap();
    let (host, tasks) = host_with(&[5, 6]);
    host.threads.borrow_mut().get_mut(&5).unwrap().start_ticks += 1;
    let mut actuator = Actuator::new(dir.path(), waiting_guardian());
    let applied = step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1"), (1, "2")]));
    assert_eq!((thread_masks(&host), applied.refused_items.len()), (vec!["0-3".to_string(), "2".to_string()], 1));
    assert_eq!(applied.refused_items[0].reason, RefusalReason::NotFound);
    assert_eq!(actuator.originals().len(), 1);
    let key = tasks.tasks()[0].thread;
    let object = JournalObject::Affinity { pid: 5, thread: key };
    let wanted = DesiredState { item: PlanItem::Plan, object, state: ObjectState::Cpus("1".parse().unwrap()) };
    actuator.journal_originals(&host, &[wanted]).unwrap();
    assert_eq!(actuator.originals().len(), 1);
    actuator.restore_all(&host).unwrap();
}

/// Does a thread that the plan no longer mentions follow its cpuset again at once, not only when cachemate ends?
#[test]
fn a_thread_dropped_by_the_plan_follows_its_cpuset_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (host, tasks) = host_with(&[5]);
    host.set_cpuset("0-3");
    let mut actuator = Actuator::new(dir.path(), waiting_guardian());
    step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
    assert!(step(&mut actuator, &host, &tasks, &plan_to(&[])).refused_items.is_empty());
    host.set_cpuset("0-7");
    assert_eq!(thread_masks(&host), ["0-7"]);
    actuator.restore_all(&host).unwrap();
    assert_eq!(thread_masks(&host), ["0-7"]);
}

/// Is a thread that is no longer managed restored, and no other?
#[test]
fn only_threads_no_longer_managed_are_restored() {
    let dir = tempfile::tempdir().unwrap();
    let (host, mut tasks) = host_with(&[5, 6]);
    let mut actuator = Actuator::new(dir.path(), waiting_guardian());
    step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1"), (1, "2")]));
    let only_six = [ManageRule { pid: Some(6), action: ManageAction::Manage(None), ..ManageRule::default() }];
    let gone: Vec<ThreadKey> = tasks.reexamine(&host, &only_six).iter().map(|task| task.thread).collect();
    actuator.release(&host, &gone, &|_| false).unwrap();
    assert_eq!(thread_masks(&host), ["0-3", "2"]);
    assert_eq!(tasks.tasks().len(), 1);
    actuator.restore_all(&host).unwrap();
    assert_eq!(thread_masks(&host), ["0-3", "0-3"]);
}
