//! A fault at every call of a machine's life, reads as well as writes: is everything restored at the end, or the
//! journal kept and this reported?

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cachemate_core::test_support::topology_fixture;
use cachemate_core::{
    BandwidthLimit, CacheId, CacheShare, CpuSet, GroupId, Machine, MachineError, Observation, Plan,
    ShareMember, TaskId, Units, WindowLength,
};

use super::{apply_individually, host_states, machine_with, one_of_each, with_group};
use crate::act::actuator::Actuator;
use crate::act::resctrl;
use crate::act::resctrl::fake_tests::{FakeCat, topology as cat_topology};
use crate::fake_tests::{FakeHost, waiting_guardian};
use crate::kernel::scheduling::SchedParams;
use crate::kernel::{DirLock, Kernel};
use crate::safety::fence::Fence;
use crate::safety::guardian::restore_left_behind;
use crate::safety::journal::{Journal, ObjectState};
use crate::safety::object_state::read_state;
use crate::safety::restore::RestoredObject;

/// Errors that a call may return for reasons unrelated to its object.
const ERRORS: [i32; 7] = [
    libc::EMFILE,
    libc::ENOMEM,
    libc::EIO,
    libc::EROFS,
    libc::ENOSPC,
    libc::EPERM,
    libc::EINTR,
];

/// A fault: a number of consecutive calls fail, from one position on.
#[derive(Clone, Copy, Debug)]
struct Fault {
    from: u32,
    calls: u32,
    errno: i32,
}

/// A host that counts its calls and lets some of them fail.
struct FaultyKernel<K> {
    inner: K,
    calls: Cell<u32>,
    fault: Cell<Option<Fault>>,
}

impl<K> FaultyKernel<K> {
    fn new(inner: K, fault: Option<Fault>) -> Self {
        FaultyKernel {
            inner,
            calls: Cell::new(0),
            fault: Cell::new(fault),
        }
    }
    fn next_call(&self) -> io::Result<&K> {
        let call_index = self.calls.replace(self.calls.get() + 1);
        match self.fault.get() {
            Some(Fault { from, calls, errno })
                if call_index >= from && call_index - from < calls =>
            {
                Err(io::Error::from_raw_os_error(errno))
            }
            _ => Ok(&self.inner),
        }
    }
}

impl<K: Kernel> Kernel for FaultyKernel<K> {
    fn own_pid(&self) -> i32 {
        self.inner.own_pid()
    }
    fn read(&self, path: &Path) -> io::Result<String> {
        self.next_call()?.read(path)
    }
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        self.next_call()?.write(path, text)
    }
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.next_call()?.make_dir(path)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.next_call()?.remove_dir(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.next_call()?.list(path)
    }
    fn lock_dir(&self, path: &Path, patience: Duration) -> io::Result<DirLock> {
        self.next_call()?.lock_dir(path, patience)
    }
    fn set_affinity(&self, tid: i32, cpus: &CpuSet) -> io::Result<()> {
        self.next_call()?.set_affinity(tid, cpus)
    }
    fn set_nice(&self, tid: i32, nice: i32) -> io::Result<()> {
        self.next_call()?.set_nice(tid, nice)
    }
    fn scheduling(&self, tid: i32) -> io::Result<SchedParams> {
        self.next_call()?.scheduling(tid)
    }
    fn set_scheduling(&self, tid: i32, params: &SchedParams) -> io::Result<()> {
        self.next_call()?.set_scheduling(tid, params)
    }
    fn set_fence(&self, fence: Option<std::sync::Arc<Fence>>) {
        self.inner.set_fence(fence);
    }
}

/// Ends a machine's life and checks the outcome; returns the number of calls.
fn check_life<K: Kernel, S: PartialEq + std::fmt::Debug>(
    kernel: &FaultyKernel<K>,
    dir: &Path,
    ended: &Result<Vec<RestoredObject>, String>,
    states: impl Fn(&K) -> S,
    before: &S,
) -> u32 {
    let (calls, case) = (
        kernel.calls.get(),
        format!("{:?}: {ended:?}", kernel.fault.get()),
    );
    let journal = dir.join(Journal::FILE_NAME);
    let message = ended
        .as_ref()
        .map_or(true, |account| account.iter().any(|line| line.has_failed()));
    if journal.exists() {
        assert!(message, "a journal stays unreported: {case}");
    } else {
        assert_eq!(&states(&kernel.inner), before, "no journal is left: {case}");
    }
    kernel.fault.set(None);
    let leftover = restore_left_behind(kernel, dir).unwrap();
    assert_eq!(&states(&kernel.inner), before, "{case}, then {leftover:?}");
    assert!(!journal.exists(), "{case}, then {leftover:?}");
    calls
}

/// Runs a few windows, in which a child is born; an error ends the run, as it ends a daemon.
fn run<K: Kernel + Send + 'static>(
    machine: &mut crate::machine::LiveMachine<K>,
    plan: impl Fn(u64, &[TaskId]) -> Plan,
    birth: impl Fn(&K),
) -> Result<(), MachineError> {
    for window in 0..4 {
        let Some(Observation { tasks, .. }) = machine.observe()? else {
            return Ok(());
        };
        let tasks: Vec<TaskId> = tasks.iter().map(|task| task.task).collect();
        machine.apply(&plan(window, &tasks))?;
        if window == 1 {
            machine.with_kernel(&birth);
        }
    }
    Ok(())
}

fn all_of<K: Kernel + Send + 'static>(
    machine: &mut crate::machine::LiveMachine<FaultyKernel<K>>,
    plan: impl Fn(u64, &[TaskId]) -> Plan,
    birth: impl Fn(&K),
) -> Result<Vec<RestoredObject>, String> {
    let outcome = run(machine, plan, |kernel| birth(&kernel.inner));
    let ended = machine.restore_all().map_err(|error| error.to_string());
    // A daemon whose step failed ends with that error, whatever the outcome of the restore.
    outcome.map_err(|error| error.to_string()).and(ended)
}

/// Tries every position, with a single failing call and with a lasting failure. The usual run alternates among the
/// errors; `CACHEMATE_FAULTS=all` (`make faults`) tries each of them.
///
/// Several lives run at once, because each mostly waits between the passes of its restore.
fn inject_at_every_call(life: impl Fn(Option<Fault>) -> u32 + Sync) {
    const LIVES_AT_ONCE: usize = 4;
    let is_exhaustive = std::env::var("CACHEMATE_FAULTS").is_ok_and(|text| text == "all");
    let calls = life(None);
    assert!(calls > 50, "{calls} calls");
    let faults_from = |from: u32| {
        let tried = move |index: &usize| is_exhaustive || from as usize % ERRORS.len() == *index;
        (0..ERRORS.len()).filter(tried).map(move |index| {
            let calls = [1, 3, 40][(from as usize + index) % 3];
            Fault {
                from,
                calls,
                errno: ERRORS[index],
            }
        })
    };
    let faults: Vec<Fault> = (0..calls).flat_map(faults_from).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..LIVES_AT_ONCE {
            scope.spawn(|| {
                while let Some(fault) = faults.get(next.fetch_add(1, Ordering::Relaxed)) {
                    life(Some(*fault));
                }
            });
        }
    });
    println!(
        "{} lives of {calls} calls, none of which lost anything",
        faults.len()
    );
}

/// A state directory in memory, because a life syncs its journal several times.
fn state_dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

/// The case covers affinities, weights and a confined group, with a child born under them.
#[test]
fn a_fault_at_any_call_loses_no_original() {
    inject_at_every_call(|fault| {
        let dir = state_dir();
        let host = FakeHost::with_threads(5..8);
        host.change_thread(6, |thread| thread.nice = 5);
        with_group(&host);
        let old = |host: &FakeHost| {
            let mut all_states = host_states(host);
            if host.threads.borrow().contains_key(&30) {
                all_states.remove(3); // compared with its parent below
            }
            all_states
        };
        let states_before = host_states(&host);
        let mut machine = machine_with(
            FaultyKernel::new(host, fault),
            topology_fixture(4),
            None,
            dir.path(),
        );
        let plan = |window: u64, tasks: &[TaskId]| {
            let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
            let moved = tasks.iter().filter(|task| window != 2 || task.0 != 1);
            plan.affinity = moved
                .map(|task| (*task, [(window % 2) as u32].into_iter().collect()))
                .collect();
            plan.weights = tasks.iter().take(1).map(|task| (*task, 2.0)).collect();
            plan
        };
        let birth = |host: &FakeHost| {
            let parent = host.threads.borrow()[&5].clone();
            host.add_thread(30, 30, 5, &parent.cpus.to_string());
            host.change_thread(30, |thread| thread.nice = parent.nice);
        };
        let ended = all_of(&mut machine, plan, birth);
        let calls = machine
            .with_kernel(|kernel| check_life(kernel, dir.path(), &ended, old, &states_before));
        machine.with_kernel(|kernel| {
            let threads = kernel.inner.threads.borrow();
            if let Some(child) = threads.get(&30) {
                let parent = &threads[&5];
                assert_eq!(
                    (&child.cpus, child.nice),
                    (&parent.cpus, parent.nice),
                    "{fault:?}: {ended:?}"
                );
            }
        });
        calls
    });
}

/// The case covers ways, limits of bandwidth, the groups of cachemate, and their members.
#[test]
fn a_fault_at_any_call_leaves_no_group() {
    inject_at_every_call(|fault| {
        let dir = state_dir();
        let cat = FakeCat::with_bandwidth();
        let host = cat_topology();
        let resctrl = resctrl::find(&cat, &host).unwrap();
        let groups = |cat: &FakeCat| cat.groups.borrow().clone();
        let groups_before = groups(&cat);
        let mut machine = machine_with(
            FaultyKernel::new(cat, fault),
            host.topology,
            Some(resctrl),
            dir.path(),
        );
        let plan = |window: u64, tasks: &[TaskId]| {
            let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
            let share = |task: &TaskId| CacheShare {
                group: GroupId(task.0),
                members: vec![ShareMember::Task(*task)],
                cache: CacheId(0),
                units: Units::Ways {
                    mask: (window as u32..window as u32 + 3).collect(),
                },
            };
            plan.shares = tasks
                .iter()
                .skip(window as usize % 2)
                .take(2)
                .map(share)
                .collect();
            let limit = |task: &TaskId| BandwidthLimit {
                group: GroupId(task.0),
                members: vec![ShareMember::Task(*task)],
                cache: CacheId(0),
                level: 10 * (2 + window as u32),
            };
            plan.bandwidth = tasks.iter().take(1).map(limit).collect();
            plan
        };
        let ended = all_of(&mut machine, plan, |cat| cat.fork_child(5, 30));
        machine.with_kernel(|kernel| check_life(kernel, dir.path(), &ended, groups, &groups_before))
    });
}

/// If one object of every kind is changed: is each restored, whichever call fails?
#[test]
fn a_fault_at_any_call_loses_no_kind_of_object() {
    inject_at_every_call(|fault| {
        let dir = state_dir();
        let (host, desired_states) = one_of_each();
        let read_states = |host: &FakeHost| -> BTreeMap<String, Option<ObjectState>> {
            let state = |desired_state: &crate::act::desired_state::DesiredState| {
                read_state(host, &desired_state.object).ok()
            };
            desired_states
                .iter()
                .map(|desired_state| (format!("{:?}", desired_state.object), state(desired_state)))
                .collect()
        };
        let states_before = read_states(&host);
        let host = FaultyKernel::new(host, fault);
        let mut actuator = Actuator::new(dir.path(), waiting_guardian());
        for _ in 0..3 {
            apply_individually(&mut actuator, &host, &desired_states);
        }
        let ended = actuator
            .restore_all(&host)
            .map_err(|error| error.to_string());
        check_life(&host, dir.path(), &ended, read_states, &states_before)
    });
}
