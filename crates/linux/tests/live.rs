//! The live machine on the host that runs the tests, with children of the tests as the managed programs.

mod common;

use std::time::Duration;

use cachemate_core::{
    Ability, CpuSet, Gang, GangSchedule, Machine, Neighbor, Plan, PlanItem, ProbeId, ProbeKind,
    ProbeRequest, RefusalReason, Support, WindowLength,
};
use cachemate_linux::kernel::{Kernel, LinuxHost};
use common::{HEARTBEATS, Program, idle, machine, machine_that_can, own_cpus};

fn affinities(programs: &[Program]) -> Vec<CpuSet> {
    programs
        .iter()
        .map(|program| LinuxHost::new("/").affinity(program.pid()).unwrap())
        .collect()
}

fn policies(programs: &[Program]) -> Vec<u32> {
    programs
        .iter()
        .map(|program| LinuxHost::new("/").stat(program.pid()).unwrap().policy)
        .collect()
}

/// Are programs moved as planned, read back, and restored?
#[test]
fn programs_are_moved_read_back_and_restored() {
    let dir = tempfile::tempdir().unwrap();
    let programs = [Program::start(), Program::start()];
    let masks_before = affinities(&programs);
    let mut machine = machine(&programs, true, dir.path());
    let observation = machine.observe().unwrap().unwrap();
    assert_eq!(observation.tasks.len(), 2);
    let first_cpu: CpuSet = own_cpus().first().into_iter().collect();
    let mut plan = idle();
    plan.affinity = observation
        .tasks
        .iter()
        .map(|task| (task.task, first_cpu.clone()))
        .collect();
    let applied = machine.apply(&plan).unwrap();
    assert_eq!(
        (applied.affinity, applied.refused),
        (plan.affinity, Vec::new())
    );
    assert_eq!(affinities(&programs), [first_cpu.clone(), first_cpu]);
    assert!(machine.host_report().guardian_pid.is_some());
    machine.restore_all().unwrap();
    assert_eq!(affinities(&programs), masks_before);
}

/// Does an observing machine change nothing, and refuse every line with that reason?
#[test]
fn an_observer_changes_nothing_and_refuses_every_line() {
    let dir = tempfile::tempdir().unwrap();
    let programs = [Program::start()];
    let masks_before = affinities(&programs);
    let mut machine = machine(&programs, false, dir.path());
    let observation = machine.observe().unwrap().unwrap();
    let mut plan = idle();
    plan.affinity = observation
        .tasks
        .iter()
        .map(|task| (task.task, own_cpus().first().into_iter().collect()))
        .collect();
    let applied = machine.apply(&plan).unwrap();
    assert_eq!(applied.refused.len(), 1);
    assert_eq!(applied.refused[0].reason, RefusalReason::NoPermission);
    assert!(applied.is_only_proposed);
    assert_eq!(affinities(&programs), masks_before);
    assert!(
        std::fs::read_dir(dir.path()).unwrap().next().is_none(),
        "an observer leaves no file"
    );
}

/// Is a probe that would keep a program off refused by an observer, which leaves masks and scheduling as they are?
#[test]
fn an_observer_refuses_probes_that_keep_a_program_off() {
    let dir = tempfile::tempdir().unwrap();
    let programs = [Program::start(), Program::start()];
    let state_before = (affinities(&programs), policies(&programs));
    let mut machine = machine(&programs, false, dir.path());
    let task = machine.observe().unwrap().unwrap().tasks[0].task;
    let mut plan = Plan::idle(WindowLength::Time { ns: 300_000_000 });
    let neighbor = ProbeKind::Neighbor {
        task,
        neighbor: Neighbor::Chase {
            footprint_bytes: 1 << 20,
        },
    };
    let watched = ProbeKind::ReuseTimes { task, locations: 4 };
    let probe = |(id, probe_kind)| ProbeRequest {
        id: ProbeId(id),
        kind: probe_kind,
        budget_ns: 100_000_000,
    };
    plan.probes = [
        (0, neighbor),
        (1, ProbeKind::PrimeProbe { task, samples: 2 }),
        (2, watched),
    ]
    .map(probe)
    .to_vec();
    machine.apply(&plan).unwrap();
    let mut refused = Vec::new();
    for _ in 0..3 {
        let observation = machine.observe().unwrap().unwrap();
        assert_eq!((affinities(&programs), policies(&programs)), state_before);
        refused.extend(observation.applied.refused);
        machine.apply(&plan).unwrap();
    }
    let message = |id: u32| {
        refused
            .iter()
            .find(|no| no.item == PlanItem::Probe(ProbeId(id)))
            .map(|no| (no.reason.clone(), no.message.clone()))
    };
    for id in [0, 1] {
        let Some((because, words)) = message(id) else {
            panic!("probe {id}: {refused:?}")
        };
        // On a host whose CPUs share no cache, a probe is impossible as well.
        assert!(
            because == RefusalReason::NoPermission || words.contains("no second CPU"),
            "{words}"
        );
    }
    // Watching stops no thread, so only a host without watchpoints refuses it, and never the observer.
    assert!(
        message(2).is_none_or(|(because, _)| because != RefusalReason::NoPermission),
        "{refused:?}"
    );
    assert!(
        std::fs::read_dir(dir.path()).unwrap().next().is_none(),
        "an observer leaves no file"
    );
}

/// Do gangs wait as idle tasks, and are the policy and affinity of every thread restored when the gangs end?
#[test]
fn gangs_take_turns_and_every_thread_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let programs = [Program::start(), Program::start()];
    let state_before = (affinities(&programs), policies(&programs));
    let mut machine = machine(&programs, true, dir.path());
    let observation = machine.observe().unwrap().unwrap();
    let mut plan = idle();
    let gangs = observation
        .tasks
        .iter()
        .map(|task| Gang {
            members: vec![(task.task, None)],
            slices: 1,
        })
        .collect();
    let cpus = own_cpus().first().into_iter().collect();
    plan.gangs = vec![GangSchedule {
        cpus,
        slice_ns: 5_000_000,
        gangs,
    }];
    let applied = machine.apply(&plan).unwrap();
    assert_eq!((applied.gangs, applied.refused), (plan.gangs, Vec::new()));
    let mut waited = [false, false];
    for _ in 0..200 {
        policies(&programs)
            .iter()
            .zip(&mut waited)
            .for_each(|(policy, waited)| *waited |= *policy == 5);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(waited, [true, true]);
    machine.apply(&idle()).unwrap();
    assert_eq!((affinities(&programs), policies(&programs)), state_before);
    machine.restore_all().unwrap();
    assert_eq!((affinities(&programs), policies(&programs)), state_before);
}

/// If a lowered priority could not be raised again: is no thread lowered, and is that reported?
#[test]
fn no_thread_is_lowered_without_the_right_to_raise_it() {
    let dir = tempfile::tempdir().unwrap();
    let programs = [Program::start()];
    let state = || {
        LinuxHost::new("/")
            .stat(programs[0].pid())
            .map(|stat| (stat.nice, stat.policy))
            .unwrap()
    };
    let state_before = state();
    let no = Support::No {
        reason: "no right".to_string(),
        remedy: None,
    };
    let abilities = [(Ability::Weights, no.clone()), (Ability::Gangs, no)]
        .into_iter()
        .collect();
    let mut machine = machine_that_can(&programs, true, dir.path(), abilities);
    let observation = machine.observe().unwrap().unwrap();
    let mut plan = idle();
    plan.weights.insert(observation.tasks[0].task, 0.5);
    let gangs = vec![Gang {
        members: vec![(observation.tasks[0].task, None)],
        slices: 1,
    }];
    plan.gangs = vec![GangSchedule {
        cpus: own_cpus().first().into_iter().collect(),
        slice_ns: 5_000_000,
        gangs,
    }];
    let applied = machine.apply(&plan).unwrap();
    assert_eq!(applied.refused.len(), 2, "{applied:?}");
    assert!(applied.gangs.is_empty() && applied.weights.is_empty());
    assert_eq!(state(), state_before);
    machine.restore_all().unwrap();
}

/// Does a probe that moves threads end with a result or a refusal, and restore every thread?
#[test]
fn a_probe_ends_and_restores_every_thread() {
    let dir = tempfile::tempdir().unwrap();
    let programs = [Program::start(), Program::start()];
    let state_before = (affinities(&programs), policies(&programs));
    let mut machine = machine(&programs, true, dir.path());
    let task = machine.observe().unwrap().unwrap().tasks[0].task;
    let neighbor = ProbeKind::Neighbor {
        task,
        neighbor: Neighbor::Chase {
            footprint_bytes: 1 << 20,
        },
    };
    let evicted = ProbeKind::PrimeProbe { task, samples: 2 };
    let probe = |(id, probe_kind)| ProbeRequest {
        id: ProbeId(id),
        kind: probe_kind,
        budget_ns: 2_000_000_000,
    };
    let mut plan = Plan::idle(WindowLength::Time { ns: 100_000_000 });
    plan.probes = [(0, neighbor), (1, evicted)].map(probe).to_vec();
    let (sender, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut done, mut refused) = (Vec::new(), Vec::new());
        while done.len() + refused.len() < 2 {
            refused.extend(machine.apply(&plan).unwrap().refused);
            done.extend(machine.observe().unwrap().unwrap().probe_results);
            // Requested once; the plan of the next window continues with the unanswered probes.
            plan.probes
                .retain(|probe| !done.iter().any(|answer| answer.probe == probe.id));
        }
        machine.restore_all().unwrap();
        sender.send((done, refused)).unwrap();
    });
    let (done, refused) = ended
        .recv_timeout(Duration::from_secs(60))
        .expect("a probe holds what it waits for");
    assert!(!done.is_empty() || own_cpus().count() < 2, "{refused:?}");
    assert_eq!((affinities(&programs), policies(&programs)), state_before);
}

/// If a window lasts longer than a watchdog waits: do the watchdog and the guardian get heartbeats while it lasts, and
/// none while the machine does something else?
#[test]
fn heartbeats_are_sent_only_while_a_long_window_lasts() {
    let dir = tempfile::tempdir().unwrap();
    let programs = [Program::start()];
    let mut machine = machine(&programs, true, dir.path());
    let (sender, beats) = std::sync::mpsc::channel();
    machine.set_heartbeat(move || sender.send(()).unwrap());
    let observation = machine.observe().unwrap().unwrap();
    let mut plan = Plan::idle(WindowLength::Time { ns: 5_000_000_000 });
    plan.affinity = observation
        .tasks
        .iter()
        .map(|task| (task.task, own_cpus().first().into_iter().collect()))
        .collect();
    machine.apply(&plan).unwrap();
    let received = || {
        std::fs::read_to_string(dir.path().join(HEARTBEATS))
            .unwrap_or_default()
            .lines()
            .count()
    };
    let count_before = received();
    std::thread::sleep(Duration::from_millis(1_500));
    assert!(beats.try_recv().is_err(), "no beat outside of a window");
    machine.observe().unwrap().unwrap();
    let beats = beats.try_iter().count();
    assert!((1..=5).contains(&beats), "{beats} beats");
    machine.restore_all().unwrap();
    assert!(
        received() >= count_before + beats,
        "{} after {count_before}",
        received()
    );
}
