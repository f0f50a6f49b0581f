//! Gangs through the scheduler in the kernel, on the whole machine.

use std::path::PathBuf;

use super::*;
use crate::act::gang_scheduler::fake_tests::FakeScheduler;
use crate::kernel::scheduling::EXT;
use cachemate_core::CoRunPenalty;

fn four_threads(dir: &Path) -> (LiveMachine<FakeHost>, PathBuf) {
    let host = FakeHost::with_threads(5..9);
    let socket = dir.join("gangs.sock");
    let options = LiveOptions {
        gang_scheduler_socket: Some(socket.clone()),
        cpusets: Vec::new(),
        ..sample_options(dir)
    };
    let machine = LiveMachine::new(
        host,
        topology_fixture(4),
        capabilities_fixture(&[]),
        Vec::new(),
        options,
    );
    (machine, socket)
}

fn policies(machine: &LiveMachine<FakeHost>) -> Vec<u32> {
    machine.with_kernel(|host| host.policies())
}

fn tasks(machine: &mut LiveMachine<FakeHost>) -> Vec<TaskId> {
    machine
        .observe()
        .unwrap()
        .unwrap()
        .tasks
        .iter()
        .map(|task| task.task)
        .collect()
}

/// A plan with weighted gangs of two tasks on the first cache.
fn two_gangs(tasks: &[TaskId]) -> Plan {
    let mut plan = Plan::idle(WindowLength::Time { ns: 1_000_000 });
    let gang = |pair: &[TaskId]| Gang {
        members: pair.iter().map(|task| (*task, None)).collect(),
        slices: 1,
    };
    let gangs = tasks.chunks(2).map(gang).collect();
    plan.gangs = vec![GangSchedule {
        cpus: "0-1".parse().unwrap(),
        slice_ns: 20_000_000,
        gangs,
    }];
    plan.weights.insert(tasks[0], 3.0);
    plan
}

/// Is a plan's schedule journaled, kept by the scheduler over several windows, and continued as idle turns, with a
/// report, after the scheduler's death?
#[test]
fn a_scheduler_plan_continues_as_idle_turns_after_its_death() {
    let dir = tempfile::tempdir().unwrap();
    let (mut machine, socket) = four_threads(dir.path());
    let scheduler = FakeScheduler::start(machine.kernel(), &socket);
    let observation = tasks(&mut machine);
    let plan = two_gangs(&observation);
    let applied = machine.apply(&plan).unwrap();
    assert_eq!((&applied.gangs, applied.refused), (&plan.gangs, Vec::new()));
    assert_eq!(policies(&machine), [EXT; 4]);
    let originals = machine.host_report().originals;
    let held_count = originals
        .iter()
        .filter(|state| state.original == "policy 0")
        .count();
    assert_eq!(held_count, 4, "{originals:?}");
    for _ in 0..3 {
        tasks(&mut machine);
        let applied = machine.apply(&plan).unwrap();
        assert_eq!((&applied.gangs, applied.refused), (&plan.gangs, Vec::new()));
    }
    assert_eq!(
        scheduler.inside.lock().unwrap().plans.len(),
        1,
        "an equal plan is sent once"
    );
    let weights: Vec<u32> = scheduler.inside.lock().unwrap().plans[0]
        .tasks
        .iter()
        .map(|task| task.weight)
        .collect();
    assert_eq!(weights, [300, 100, 100, 100]);
    drop(scheduler);
    tasks(&mut machine);
    let applied = machine.apply(&plan).unwrap();
    assert_eq!(applied.gangs, plan.gangs);
    let [lost] = &applied.refused[..] else {
        panic!("{applied:?}")
    };
    assert!(
        lost.message.contains("gangs are idle turns"),
        "{}",
        lost.message
    );
    assert!(!policies(&machine).contains(&EXT));
    machine.restore_all().unwrap();
    assert_eq!(policies(&machine), [0; 4]);
}

/// Is advice on tasks that should not run together followed by the scheduler's gangs, journaled, and dropped with the
/// plan?
#[test]
fn the_schedulers_gangs_follow_advice_until_the_plan_drops_it() {
    let dir = tempfile::tempdir().unwrap();
    let (mut machine, socket) = four_threads(dir.path());
    machine.with_kernel(|host| {
        (9..13).for_each(|tid| {
            host.add_thread(tid, tid, 1, "0-3");
        });
    });
    let scheduler = FakeScheduler::start(machine.kernel(), &socket);
    let observation = tasks(&mut machine);
    let mut plan = Plan::idle(WindowLength::Time { ns: 1_000_000 });
    plan.penalties = vec![CoRunPenalty {
        tasks: (observation[0], observation[1]),
        penalty: 0.7,
    }];
    let applied = machine.apply(&plan).unwrap();
    assert_eq!(
        (&applied.penalties, &applied.gangs, applied.refused),
        (&plan.penalties, &Vec::new(), Vec::new())
    );
    assert_eq!(policies(&machine), [EXT; 8]);
    let sent_plan = scheduler.inside.lock().unwrap().plans[0].clone();
    let gang_of = |tid: u32| {
        sent_plan
            .tasks
            .iter()
            .find(|task| task.thread == Some(tid))
            .unwrap()
            .gang
    };
    assert_ne!(gang_of(5), gang_of(6));
    assert!(sent_plan.tasks.iter().all(|task| task.caches == [0, 1]));
    tasks(&mut machine);
    let applied = machine.apply(&Plan::idle(plan.window)).unwrap();
    assert_eq!(
        (applied.penalties, applied.refused),
        (Vec::new(), Vec::new())
    );
    assert_eq!(policies(&machine), [0; 8]);
    machine.restore_all().unwrap();
}

/// If any write fails, or the scheduler is killed, restarts, refuses or detaches at any time: does the machine
/// continue, and is every thread restored at the end?
#[test]
fn every_thread_is_restored_after_faults_around_the_scheduler() {
    for seed in 0..40 {
        let dir = tempfile::tempdir().unwrap();
        let (mut machine, socket) = four_threads(dir.path());
        let states_before = machine.with_kernel(host_states);
        let mut draw = SplitMix64::new(seed);
        let mut scheduler = None;
        for window in 0..10 {
            let observation = tasks(&mut machine);
            match draw.draw_below(5) {
                0 => scheduler = None,
                1 | 2 if scheduler.is_none() => {
                    scheduler = Some(FakeScheduler::start(machine.kernel(), &socket))
                }
                3 => {
                    if let Some(FakeScheduler { inside, .. }) = &scheduler {
                        let mut state = inside.lock().unwrap();
                        state.refuses = (draw.draw_below(2) == 0).then(|| "full".to_string());
                        state.guarded =
                            (draw.draw_below(3) == 0).then(|| "a CPU was taken".to_string());
                    }
                }
                _ => {}
            }
            if draw.draw_below(3) == 0 {
                let fault = (
                    draw.draw_below(8) as u32,
                    ERRORS[draw.draw_below(7) as usize],
                );
                machine.with_kernel(|host| host.fault.set(Some(fault)));
            }
            let mut expected_policies = if draw.draw_below(3) > 0 {
                two_gangs(&observation)
            } else {
                draw_plan(&mut draw, &observation)
            };
            if draw.draw_below(4) == 0 {
                expected_policies.penalties = vec![CoRunPenalty {
                    tasks: (observation[0], observation[1]),
                    penalty: 1.0,
                }];
            }
            let applied = machine.apply(&expected_policies).unwrap();
            let planned = |schedule: &GangSchedule| expected_policies.gangs.contains(schedule);
            assert!(
                applied.gangs.iter().all(planned),
                "seed {seed}, window {window}: {applied:?}"
            );
        }
        machine.with_kernel(|host| host.fault.set(None));
        machine.restore_all().unwrap();
        assert_eq!(
            machine.with_kernel(host_states),
            states_before,
            "seed {seed}"
        );
    }
}
