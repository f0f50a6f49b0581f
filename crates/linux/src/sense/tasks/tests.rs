use super::*;
use crate::fake_tests::FakeHost;
use crate::kernel::process_events::ProcessEvent;

fn everything() -> Vec<ManageRule> {
    vec![ManageRule {
        action: ManageAction::Manage(None),
        ..ManageRule::default()
    }]
}

/// A table with all threads of a host.
fn refreshed(host: &FakeHost) -> TaskTable {
    let mut tasks = TaskTable::default();
    tasks.refresh(host, &everything(), 0).unwrap();
    tasks
}

fn ids(tasks: &TaskTable) -> Vec<(u32, i32, bool)> {
    tasks
        .tasks()
        .iter()
        .map(|task| (task.task.0, task.thread.tid, task.has_exited))
        .collect()
}

/// Do threads get ids in order of arrival, keep them, and lose them for good at their exit, also if a pid is
/// reused?
#[test]
fn ids_are_dense_and_never_reused() {
    let host = FakeHost::default();
    host.add_thread(5, 5, 1, "0");
    host.add_thread(5, 6, 1, "0");
    let mut tasks = refreshed(&host);
    assert_eq!(ids(&tasks), [(0, 5, false), (1, 6, false)]);
    host.threads.borrow_mut().remove(&6);
    host.threads.borrow_mut().get_mut(&5).unwrap().start_ticks += 1; // another program under the same pid
    tasks.refresh(&host, &everything(), 1).unwrap();
    assert_eq!(ids(&tasks), [(0, 5, true), (1, 6, true), (2, 5, false)]);
    tasks.drop_exited();
    assert_eq!(ids(&tasks), [(2, 5, false)]);
    assert_ne!(tasks.tasks()[0].process, ProcessId(0));
}

/// Is a process that has not run assumed to be the same, and examined again as soon as it has?
#[test]
fn a_sleeping_process_is_not_examined_until_it_runs() {
    let host = FakeHost::default();
    let set_run_time = |ns: u64| {
        for (tid, ns) in [(5, ns), (6, 0)] {
            host.set_file(&format!("/proc-schedstat/{tid}"), &format!("{ns} 2 3\n"));
        }
    };
    set_run_time(10);
    host.add_thread(5, 5, 1, "0");
    let mut tasks = TaskTable::default();
    let look = |tasks: &mut TaskTable| {
        tasks.refresh(&host, &everything(), 0).unwrap();
        ids(tasks)
    };
    assert_eq!(look(&mut tasks), [(0, 5, false)]);
    host.add_thread(5, 6, 1, "0"); // cannot be: a thread is born by one that runs
    assert_eq!(look(&mut tasks), [(0, 5, false)]);
    set_run_time(11);
    assert_eq!(look(&mut tasks), [(0, 5, false), (1, 6, false)]);
    host.threads.borrow_mut().remove(&6);
    set_run_time(12); // an exit takes time as well
    host.files
        .borrow_mut()
        .remove(std::path::Path::new("/proc-schedstat/6"));
    assert_eq!(look(&mut tasks), [(0, 5, false), (1, 6, true)]);
}

/// Are programs that no rule matches left out completely?
#[test]
fn unmatched_programs_do_not_appear() {
    let host = FakeHost::default();
    host.add_thread(5, 5, 1, "0");
    let mut tasks = TaskTable::default();
    let rule = ManageRule {
        command: Some("other".into()),
        action: ManageAction::Manage(None),
        ..ManageRule::default()
    };
    tasks.refresh(&host, &[rule], 0).unwrap();
    assert!(tasks.tasks().is_empty());
}

/// Is every thread reported with the real user of its process, and without one if the kernel does not report it?
#[test]
fn threads_carry_their_process_user() {
    let host = FakeHost::default();
    host.set_file("/proc/5/status", "Name:\tx\nUid:\t1000\t0\t0\t0\n");
    for (pid, tid) in [(5, 5), (5, 6), (7, 7)] {
        host.add_thread(pid, tid, 1, "0");
    }
    let tasks = refreshed(&host);
    let users: Vec<_> = tasks
        .tasks()
        .iter()
        .map(|task| (task.thread.tid, task.user))
        .collect();
    assert_eq!(users, [(5, Some(1000)), (6, Some(1000)), (7, None)]);
}

/// Is the guardian never managed, even by rules that match every program?
#[test]
fn the_guardian_is_never_managed() {
    let host = FakeHost::default();
    host.add_thread(5, 5, 1, "0");
    host.add_thread(6, 6, FakeHost::OWN_PID, "0");
    let mut tasks = TaskTable::default();
    tasks.set_guardian(Some(6));
    tasks.refresh(&host, &everything(), 0).unwrap();
    assert_eq!(ids(&tasks), [(0, 5, false)]);
}

/// With events: is a birth read without a listing, a program that has ended by then only counted for the service that
/// started it, and an exit noticed?
#[test]
fn events_replace_listings() {
    let host = FakeHost::default();
    host.add_thread(5, 5, 1, "0");
    let mut tasks = refreshed(&host);
    tasks.births.add_listed([], true);
    let birth = |pid| ProcessEvent::ProcessStart { parent_pid: 5, pid };
    let exit = |pid| ProcessEvent::Exit { pid, tid: pid };
    [birth(7), birth(8), exit(8)]
        .into_iter()
        .for_each(|event| tasks.births.record(event));
    host.add_thread(7, 7, 5, "0");
    host.add_thread(9, 9, 5, "0"); // no event tells of it
    tasks.refresh(&host, &everything(), 0).unwrap();
    assert_eq!(ids(&tasks), [(0, 5, false), (1, 7, false)]);
    assert_eq!(
        tasks.unread_programs,
        BTreeMap::from([(ServiceIdentity::command("x"), 1)])
    );
    host.threads.borrow_mut().remove(&7);
    tasks.births.record(exit(7));
    tasks.refresh(&host, &everything(), 0).unwrap();
    assert_eq!(ids(&tasks), [(0, 5, false), (1, 7, true)]);
    tasks.births.forget();
    tasks.refresh(&host, &everything(), 0).unwrap();
    assert_eq!(
        ids(&tasks),
        [(0, 5, false), (1, 7, true), (2, 9, false)],
        "lost events cost a listing"
    );
}

/// A process 5 of a hundred threads that have run for 10 ns each, with events.
fn crowd() -> (FakeHost, TaskTable) {
    let host = FakeHost::default();
    for tid in 5..105 {
        host.add_thread(5, tid, 1, "0");
        set_run_time(&host, tid, 10);
    }
    let mut tasks = refreshed(&host);
    tasks.births.add_listed([], true);
    (host, tasks)
}

fn set_run_time(host: &FakeHost, tid: i32, ns: u64) {
    host.set_file(&format!("/proc-schedstat/{tid}"), &format!("{ns} 2 3\n"));
}

fn live_tids(tasks: &TaskTable) -> Vec<i32> {
    tasks
        .tasks()
        .iter()
        .filter(|task| !task.has_exited)
        .map(|task| task.thread.tid)
        .collect()
}

/// Are the idle threads of a large process counted but no tasks, does one that runs become a task with the time since
/// it was idle, and does it leave again after a rest, alive?
#[test]
fn only_the_threads_that_ran_in_a_large_process_become_tasks() {
    let (host, mut tasks) = crowd();
    let refresh = |tasks: &mut TaskTable| {
        tasks.drop_exited();
        tasks.refresh(&host, &everything(), 0).unwrap();
    };
    assert_eq!(
        (live_tids(&tasks), tasks.new_idle_threads().len()),
        (vec![5], 99)
    );
    assert_eq!(
        tasks.idle_counts(),
        BTreeMap::from([(ServiceIdentity::command("x"), 99)])
    );
    set_run_time(&host, 77, 20);
    refresh(&mut tasks);
    assert_eq!(
        (live_tids(&tasks), tasks.new_idle_threads().len()),
        (vec![5, 77], 0)
    );
    assert_eq!(tasks.woken_usage()[0].1.ran_ns, Some(10));
    let is_alive = |tasks: &TaskTable, tid: i32| {
        tasks.is_alive(ThreadKey {
            tid,
            start_ticks: tid as u64 * 10,
        })
    };
    assert!(is_alive(&tasks, 77) && is_alive(&tasks, 78) && !is_alive(&tasks, 200));
    let first_task = tasks.tasks()[1].task;
    (0..60).for_each(|_| refresh(&mut tasks));
    assert!(live_tids(&tasks) == [5] && is_alive(&tasks, 77));
    set_run_time(&host, 77, 30);
    refresh(&mut tasks);
    assert!(
        live_tids(&tasks) == [5, 77] && tasks.tasks()[1].task > first_task,
        "a new task"
    );
}

/// Are births and exits in a large process read without its other threads?
#[test]
fn births_and_exits_are_read_without_the_other_threads() {
    let (host, mut tasks) = crowd();
    host.threads.borrow_mut().remove(&50);
    host.threads.borrow_mut().remove(&51); // no event tells of it
    host.files
        .borrow_mut()
        .remove(std::path::Path::new("/proc-schedstat/50"));
    host.files
        .borrow_mut()
        .remove(std::path::Path::new("/proc-schedstat/51"));
    host.add_thread(5, 200, 1, "0");
    set_run_time(&host, 200, 50);
    tasks.births.record(ProcessEvent::Exit { pid: 5, tid: 50 });
    tasks
        .births
        .record(ProcessEvent::ThreadStart { pid: 5, tid: 200 });
    tasks.refresh(&host, &everything(), 0).unwrap();
    assert_eq!(
        live_tids(&tasks),
        [5, 200],
        "a thread that worked since its birth is a task"
    );
    assert_eq!(tasks.idle_threads().count(), 98);
}

/// If the rules no longer allow a process to be moved: are its idle threads released as well?
#[test]
fn idle_threads_are_released() {
    let (host, mut tasks) = crowd();
    let ignore = [ManageRule {
        action: ManageAction::Ignore,
        ..ManageRule::default()
    }];
    assert_eq!(tasks.reexamine(&host, &ignore).len(), 100);
    assert_eq!(tasks.idle_threads().count(), 0);
    let (host, mut tasks) = crowd();
    host.set_file("/proc-comm/5", "other");
    tasks.births.record(ProcessEvent::ProgramChange { pid: 5 });
    set_run_time(&host, 5, 11);
    let rule = |command: &str, action| ManageRule {
        command: Some(command.into()),
        action,
        ..ManageRule::default()
    };
    let rules = [
        rule("other", ManageAction::Ignore),
        rule("*", ManageAction::Manage(None)),
    ];
    tasks.refresh(&host, &rules, 0).unwrap();
    assert_eq!(
        (tasks.take_released().len(), tasks.idle_threads().count()),
        (100, 0)
    );
}

fn wait_for_command(pid: i32, command: &str) {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let name = || crate::kernel::LinuxHost::new("/").stat(pid).unwrap().name;
    while name() != command {
        assert!(
            std::time::Instant::now() < until,
            "{} is not {command}",
            name()
        );
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

/// If a shell becomes another program (`bash -c 'sleep 2; exec prog'`): is that program managed within two
/// refreshes if a rule names it, and is a program that was managed under its shell's name released if a rule
/// ignores it?
#[test]
fn an_exec_neither_escapes_a_rule_nor_misses_one() {
    let dir = tempfile::tempdir().unwrap();
    let host = crate::kernel::LinuxHost::new("/");
    let rule = |command: &str, action| ManageRule {
        command: Some(command.into()),
        action,
        ..ManageRule::default()
    };
    let manage = ManageAction::Manage(None);
    let late =
        |rules: &[ManageRule], program: &str, refreshes_before: u32, refreshes_after: u32| {
            let path = dir.path().join(program);
            assert!(
                std::process::Command::new("cp")
                    .arg("/bin/sleep")
                    .arg(&path)
                    .status()
                    .unwrap()
                    .success()
            );
            let (reader, writer) = std::io::pipe().unwrap();
            let mut shell = std::process::Command::new("bash");
            shell
                .args(["-c", "read -r; exec -a sleep \"$0\" 100"])
                .arg(&path)
                .stdin(reader);
            let mut child = shell.spawn().unwrap();
            let pid = child.id() as i32;
            wait_for_command(pid, "bash");
            let mut tasks = TaskTable::default();
            let mut refresh = |refreshes: u32| {
                for _ in 0..refreshes {
                    tasks.refresh(&host, rules, 0).unwrap();
                }
                let released = tasks.take_released().len();
                let live = tasks
                    .tasks()
                    .into_iter()
                    .filter(|task| task.pid == pid && !task.has_exited);
                (
                    live.map(|task| task.name.clone()).collect::<Vec<_>>(),
                    released,
                )
            };
            let before = refresh(refreshes_before);
            std::io::Write::write_all(&mut { writer }, b"\n").unwrap();
            wait_for_command(pid, program);
            let after = refresh(refreshes_after);
            child.kill().unwrap();
            child.wait().unwrap();
            (before, after)
        };
    let none = || (Vec::<String>::new(), 0);
    let managed = |name: &str| (vec![name.to_string()], 0);
    assert_eq!(
        late(&[rule("managed-late", manage)], "managed-late", 2, 2),
        (none(), managed("managed-late"))
    );
    assert_eq!(
        late(&[rule("managed-old", manage)], "managed-old", 20, 10),
        (none(), managed("managed-old"))
    );
    let rules = [
        rule("ignored-late", ManageAction::Ignore),
        rule("bash", manage),
        rule("*-late", manage),
    ];
    assert_eq!(
        late(&rules, "ignored-late", 2, 2),
        (managed("bash"), (Vec::new(), 1))
    );
    let rules = [
        rule("fixed-late", ManageAction::Observe),
        rule("bash", manage),
    ];
    assert_eq!(
        late(&rules, "fixed-late", 2, 2),
        (managed("bash"), (vec!["fixed-late".to_string()], 1))
    );
}

/// If a process joins another control group, or changes its user, when it is old and asleep: does the rule for these
/// hold within ten refreshes?
#[test]
fn a_process_that_joins_a_control_group_later_is_matched() {
    let host = FakeHost::default();
    for pid in [5, 6] {
        host.add_thread(pid, pid, 1, "0");
        host.set_file(&format!("/proc/{pid}/cgroup"), "0::/user.slice\n");
        host.set_file(&format!("/proc/{pid}/status"), "Uid:\t1000\t0\t0\t0\n");
        host.set_file(&format!("/proc-schedstat/{pid}"), "1 2 3\n");
    }
    let rule = |cgroup: Option<&str>, user, action| ManageRule {
        cgroup: cgroup.map(str::to_string),
        user,
        action,
        ..ManageRule::default()
    };
    let rules = [
        rule(Some("/protected"), None, ManageAction::Ignore),
        rule(Some("/batch"), None, ManageAction::Manage(None)),
        rule(None, Some(7), ManageAction::Manage(None)),
    ];
    let mut tasks = TaskTable::default();
    let mut look = |refreshes: u32| {
        for _ in 0..refreshes {
            tasks.refresh(&host, &rules, 0).unwrap();
        }
        let live = tasks
            .tasks()
            .into_iter()
            .filter(|task| !task.has_exited)
            .map(|task| (task.pid, task.user));
        (
            live.collect::<BTreeSet<_>>()
                .into_iter()
                .collect::<Vec<_>>(),
            tasks.take_released().len(),
        )
    };
    assert_eq!(look(20), (vec![], 0));
    host.set_file("/proc/5/cgroup", "0::/batch/job\n");
    host.set_file("/proc/6/status", "Uid:\t7\t0\t0\t0\n");
    assert_eq!(look(MATCH_PERIOD), (vec![(5, Some(1000)), (6, Some(7))], 0));
    host.set_file("/proc/5/cgroup", "0::/protected\n");
    assert_eq!(look(MATCH_PERIOD), (vec![(6, Some(7))], 1));
}
