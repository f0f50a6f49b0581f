//! Threads of the real-time and deadline classes beside a live machine: they cannot wait as idle tasks, and keep their
//! class.

mod common;

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use cachemate_core::{
    Gang, GangSchedule, Machine, Neighbor, Plan, PlanItem, ProbeId, ProbeKind, ProbeRequest,
    WindowLength,
};
use cachemate_linux::kernel::{Kernel, LinuxHost};
use cachemate_linux::safety::journal::{JournalEntry, JournalObject, ObjectState};
use cachemate_linux::safety::object_state::read_state;
use cachemate_linux::safety::restore::{RestoreOutcome, restore};
use common::not_shown::report_unchecked;
use common::{Program, idle, machine, own_cpus};

/// Arguments of chrt(1) for each class.
const CLASSES: [&[&str]; 3] = [
    &["--fifo", "10"],
    &["--rr", "11"],
    &[
        "--deadline",
        "--sched-runtime",
        "1000000",
        "--sched-period",
        "100000000",
        "0",
    ],
];

/// A sleeping program of that class; `None` if this host refuses it, which is reported.
fn start_in(class: &[&str]) -> Option<Program> {
    let mut program = Program(
        Command::new("chrt")
            .args(class)
            .args(["sleep", "100"])
            .spawn()
            .unwrap(),
    );
    for _ in 0..2_000 {
        if LinuxHost::new("/")
            .stat(program.pid())
            .is_ok_and(|stat| stat.name == "sleep")
        {
            return Some(program);
        }
        if program.0.try_wait().unwrap().is_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    report_unchecked(&format!("chrt {}", class.join(" ")), "refused by this host");
    None
}

/// A program's class with all parameters, by chrt(1).
fn class_of(program: &Program) -> String {
    let message = Command::new("chrt")
        .arg("-p")
        .arg(program.pid().to_string())
        .output()
        .unwrap();
    String::from_utf8(message.stdout).unwrap()
}

fn taking_turns(tasks: &[cachemate_core::TaskId]) -> Plan {
    let gangs = tasks
        .iter()
        .map(|&task| Gang {
            members: vec![(task, None)],
            slices: 1,
        })
        .collect();
    let mut plan = idle();
    plan.gangs = vec![GangSchedule {
        cpus: own_cpus().first().into_iter().collect(),
        slice_ns: 2_000_000,
        gangs,
    }];
    plan
}

/// Is a gang member of a real-time class refused with a reason, is its class never changed, and do the others take
/// turns?
#[test]
fn real_time_members_of_gangs_are_refused_and_keep_their_class() {
    for class in CLASSES {
        let Some(special) = start_in(class) else {
            continue;
        };
        let dir = tempfile::tempdir().unwrap();
        let programs = [special, Program::start(), Program::start()];
        let class_before = class_of(&programs[0]);
        let mut machine = machine(&programs, true, dir.path());
        let tasks: Vec<_> = machine
            .observe()
            .unwrap()
            .unwrap()
            .tasks
            .iter()
            .map(|task| task.task)
            .collect();
        let applied = machine.apply(&taking_turns(&tasks)).unwrap();
        let mut waited = false;
        for _ in 0..100 {
            assert_eq!(class_of(&programs[0]), class_before);
            waited |= LinuxHost::new("/").stat(programs[1].pid()).unwrap().policy == 5;
            std::thread::sleep(Duration::from_millis(2));
        }
        let refusals: Vec<_> = applied
            .refused
            .iter()
            .filter(|refused| refused.item == PlanItem::Gangs(0))
            .collect();
        assert!(
            waited && refusals.len() == 1 && refusals[0].message.contains("SCHED_"),
            "{class:?}: {applied:?}"
        );
        machine.restore_all().unwrap();
        assert_eq!(class_of(&programs[0]), class_before);
    }
}

/// Is a probe of a real-time thread refused with a reason, and its class never changed?
#[test]
fn real_time_threads_are_not_probed() {
    for class in CLASSES {
        let Some(special) = start_in(class) else {
            continue;
        };
        let dir = tempfile::tempdir().unwrap();
        let programs = [special];
        let class_before = class_of(&programs[0]);
        let mut machine = machine(&programs, true, dir.path());
        let task = machine.observe().unwrap().unwrap().tasks[0].task;
        let probe_kind = ProbeKind::Neighbor {
            task,
            neighbor: Neighbor::Chase {
                footprint_bytes: 1 << 20,
            },
        };
        let mut plan = Plan::idle(WindowLength::Time { ns: 50_000_000 });
        plan.probes = vec![ProbeRequest {
            id: ProbeId(0),
            kind: probe_kind,
            budget_ns: 1_000_000_000,
        }];
        let mut refused = Vec::new();
        for _ in 0..20 {
            refused.extend(machine.apply(&plan).unwrap().refused);
            assert!(machine.observe().unwrap().unwrap().probe_results.is_empty());
            assert_eq!(class_of(&programs[0]), class_before);
        }
        let no_second_cpu = own_cpus().count() < 2;
        assert!(
            no_second_cpu
                || refused
                    .iter()
                    .any(|refused| refused.message.contains("SCHED_")),
            "{refused:?}"
        );
        machine.restore_all().unwrap();
        assert_eq!(class_of(&programs[0]), class_before);
    }
}

/// Does a member that becomes a real-time thread while gangs take turns remain one, even after the end?
#[test]
fn a_member_that_becomes_real_time_stays_real_time() {
    let dir = tempfile::tempdir().unwrap();
    let programs = [Program::start(), Program::start()];
    let mut machine = machine(&programs, true, dir.path());
    let tasks: Vec<_> = machine
        .observe()
        .unwrap()
        .unwrap()
        .tasks
        .iter()
        .map(|task| task.task)
        .collect();
    assert!(
        machine
            .apply(&taking_turns(&tasks))
            .unwrap()
            .refused
            .is_empty()
    );
    std::thread::sleep(Duration::from_millis(20));
    let pid = programs[0].pid().to_string();
    let changed = Command::new("chrt")
        .args(["--fifo", "-p", "12", &pid])
        .status()
        .unwrap()
        .success();
    if !changed {
        report_unchecked("chrt --fifo", "refused by this host");
        return;
    }
    let wish = class_of(&programs[0]);
    for _ in 0..100 {
        assert_eq!(class_of(&programs[0]), wish);
        std::thread::sleep(Duration::from_millis(2));
    }
    machine.restore_all().unwrap();
    assert_eq!(class_of(&programs[0]), wish);
}

/// For every class in a journal, with any parameters: does a thread that waits as an idle task get exactly that class
/// again?
#[test]
fn every_class_is_restored_with_its_parameters() {
    let reset = &["--other", "--reset-on-fork", "0"][..];
    for class in CLASSES.into_iter().chain([reset]) {
        let host = LinuxHost::new("/");
        let Some(program) = start_in(class) else {
            continue;
        };
        let class_before = class_of(&program);
        let thread = host.stat(program.pid()).unwrap().key;
        let object = JournalObject::Policy {
            pid: program.pid(),
            thread,
        };
        let original = read_state(&host, &object).unwrap();
        let text = serde_json::to_string(&original).unwrap();
        assert_eq!(
            serde_json::from_str::<ObjectState>(&text).unwrap(),
            original,
            "{text}"
        );
        host.set_policy(program.pid(), 5).unwrap();
        assert_ne!(class_of(&program), class_before);
        let entry = JournalEntry {
            original,
            applied_states: vec![ObjectState::Policy(5)],
            since_ticks: u64::MAX,
            follows_cpuset: false,
            family: None,
        };
        let account = restore(&host, &BTreeMap::from([(object, entry)]));
        assert_eq!(
            (account.len(), &account[0].outcome),
            (1, &RestoreOutcome::Restored)
        );
        assert_eq!(class_of(&program), class_before);
    }
}
