//! Gangs in time: sets of tasks that run together, quantum by quantum, without freezing any task.
//!
//! Problem: the kernel has no gangs. Freezing the waiting gangs keeps them off the CPUs, but leaves them frozen if
//! the daemon dies, and wastes a CPU whenever a running member waits. Method: every task stays runnable; waiting
//! members are idle tasks (`SCHED_IDLE`, about 0.3 % of a normal task's weight), and running members have their
//! original policy, each on its own CPU. A turn takes a few `sched_setscheduler` calls. Properties: no task is ever
//! stopped; CPUs that the gang leaves free are used; if the daemon dies between two turns, some tasks keep a low
//! weight until the guardian acts; members of a real-time or deadline class are refused.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use cachemate_core::GangSchedule;

use crate::act::changes::GangController;
use crate::act::gang_scheduler::KernelGangScheduler;
use crate::act::gang_scheduler::NumberedCache;
use crate::act::gang_scheduler::compose::AdvisoryGangs;
pub use crate::act::thread_rotation::ThreadRotation;
use crate::act::thread_rotation::set_turn_policy;
use crate::kernel::scheduling::SchedParams;
use crate::kernel::{Kernel, ThreadKey, lock};

/// A running rotation; when dropped, it stops and restores every member.
#[derive(Debug)]
pub struct RotationRunner {
    stop_flag: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RotationRunner {
    /// Starts taking turns. The originals of all members must be in the journal already.
    ///
    /// # Errors
    /// The thread could not be started.
    pub fn start<K>(kernel: Arc<Mutex<K>>, rotation: ThreadRotation) -> std::io::Result<Self>
    where
        K: Kernel + Send + 'static,
    {
        let stop_flag = Arc::new(AtomicBool::new(false));
        let thread_stop = stop_flag.clone();
        let thread = std::thread::Builder::new()
            .name("cachemate-gangs".to_string())
            .spawn(move || take_turns(&kernel, &rotation, &thread_stop))?;
        Ok(RotationRunner {
            stop_flag,
            thread: Some(thread),
        })
    }
}

/// Runners by their schedules, and the schedules that the gang scheduler in the kernel keeps, if it runs.
#[derive(Debug)]
pub(crate) struct GangRunners<K> {
    kernel: Arc<Mutex<K>>,
    runners: Vec<(GangSchedule, RotationRunner)>,
    scheduler: Option<KernelGangScheduler>,
}

impl<K: Kernel + Send + 'static> GangRunners<K> {
    /// Runners for this kernel. `scheduler` is the socket of the gang scheduler, which need not be running.
    pub fn new(kernel: Arc<Mutex<K>>, scheduler: Option<&Path>) -> Self {
        GangRunners {
            kernel,
            runners: Vec::new(),
            scheduler: scheduler.map(KernelGangScheduler::new),
        }
    }

    pub fn schedules(&self) -> Vec<GangSchedule> {
        let schedules = self
            .scheduler
            .iter()
            .flat_map(KernelGangScheduler::schedules);
        self.runners
            .iter()
            .map(|(schedule, _)| schedule)
            .chain(schedules)
            .cloned()
            .collect()
    }

    /// Queries the gang scheduler for the state in force. If it no longer keeps its plan, its threads are restored, its
    /// schedules leave [`GangRunners::schedules`], and a message is returned. If it has started meanwhile, idle turns
    /// end, and the next plan is sent to it. The caller must not hold the kernel's lock, which this function and
    /// [`GangRunners::stop_all`] take.
    pub fn poll(&mut self) -> Option<String> {
        let scheduler = self.scheduler.as_mut()?;
        let was_running = scheduler.is_running();
        let lost_message = scheduler.poll();
        if lost_message.is_some() {
            scheduler.restore_released(&*lock(&self.kernel));
        } else if !was_running && scheduler.is_running() {
            self.runners.clear();
        }
        lost_message
    }

    /// Did the gang scheduler run at the last poll?
    pub fn is_scheduler_running(&self) -> bool {
        self.scheduler
            .as_ref()
            .is_some_and(KernelGangScheduler::is_running)
    }

    /// Sets the weights and the pairs that should not run together, for the gang scheduler. If the plan has no
    /// schedules, the pairs become advisory gangs.
    pub fn set_advice(
        &mut self,
        weights: BTreeMap<ThreadKey, f64>,
        clashes: Vec<(ThreadKey, ThreadKey)>,
        build_advisory_gangs: impl FnOnce(&[NumberedCache]) -> Option<AdvisoryGangs>,
    ) {
        if let Some(scheduler) = &mut self.scheduler {
            let advisory_gangs = build_advisory_gangs(scheduler.caches());
            scheduler.set_advice(weights, clashes);
            scheduler.set_advisory_gangs(advisory_gangs);
        }
    }

    /// Does the gang scheduler keep clashing tasks apart, in gangs of a schedule or in advisory ones?
    pub fn can_separate_clashes(&self) -> bool {
        self.scheduler
            .as_ref()
            .is_some_and(KernelGangScheduler::is_separating_clashes)
    }

    /// Threads that the gang scheduler has reported since the last call.
    pub fn take_complaints(&mut self) -> Vec<String> {
        self.scheduler
            .as_mut()
            .map(KernelGangScheduler::take_complaints)
            .unwrap_or_default()
    }

    /// Stops all gangs and restores their members.
    pub fn stop_all(&mut self) {
        self.runners.clear();
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.withdraw(&*lock(&self.kernel));
        }
    }
}

impl<K: Kernel + Send + 'static> GangController for GangRunners<K> {
    fn start(&mut self, schedule: &GangSchedule, rotation: ThreadRotation) -> std::io::Result<()> {
        if let Some(scheduler) = self
            .scheduler
            .as_mut()
            .filter(|scheduler| scheduler.is_running())
        {
            if scheduler.start(schedule, &rotation).is_ok() {
                return Ok(());
            }
            // This schedule uses idle turns, so its members must leave the scheduler first.
            self.commit_gangs()?;
        }
        let runner = RotationRunner::start(self.kernel.clone(), rotation)?;
        self.runners.push((schedule.clone(), runner));
        Ok(())
    }

    fn stop(&mut self, schedule: &GangSchedule) {
        if !self
            .scheduler
            .as_mut()
            .is_some_and(|scheduler| scheduler.stop(schedule))
        {
            self.runners
                .retain(|(running_schedule, _)| running_schedule != schedule);
        }
    }

    fn commit_gangs(&mut self) -> std::io::Result<()> {
        let Some(scheduler) = &mut self.scheduler else {
            return Ok(());
        };
        let submit_result = scheduler.submit();
        scheduler.restore_released(&*lock(&self.kernel));
        submit_result
    }
}

impl Drop for RotationRunner {
    fn drop(&mut self) {
        self.stop_flag.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join(); // the runtime reports a panic of the thread; the journal restores the policies
        }
    }
}

fn take_turns<K: Kernel>(kernel: &Mutex<K>, rotation: &ThreadRotation, stop_flag: &AtomicBool) {
    let mut next_gangs = (0..rotation.gangs.len()).cycle();
    let mut turn_end = Instant::now();
    while !stop_flag.load(Ordering::Relaxed) {
        let now = Instant::now();
        if turn_end <= now {
            let Some(gang) = next_gangs.next() else {
                break;
            };
            start_turn(kernel, rotation, gang);
            // The end is counted from the present, not from the previous end, so that a pause of the host causes no
            // burst of short turns.
            turn_end = now + rotation.slice * rotation.gangs[gang].1;
        }
        std::thread::park_timeout(turn_end.saturating_duration_since(Instant::now()));
    }
    for (member, original) in rotation.gangs.iter().flat_map(|(members, _)| members) {
        set_member_policy(kernel, *member, original, false);
    }
}

/// Raises the gang's members first and lowers the others afterwards, so that a CPU always has a task that may use it
/// fully.
fn start_turn<K: Kernel>(kernel: &Mutex<K>, rotation: &ThreadRotation, gang: usize) {
    let (current_members, _) = &rotation.gangs[gang];
    for (member, original) in current_members {
        set_member_policy(kernel, *member, original, false);
    }
    let other_members = rotation.gangs.iter().flat_map(|(members, _)| members);
    for (member, original) in other_members
        .filter(|(member, _)| current_members.iter().all(|(thread, _)| thread != member))
    {
        set_member_policy(kernel, *member, original, true);
    }
}

/// Leaves a member alone that has exited, may not be changed, or has chosen another class meanwhile.
fn set_member_policy<K: Kernel>(
    kernel: &Mutex<K>,
    member: ThreadKey,
    original: &SchedParams,
    is_waiting: bool,
) {
    let _ = set_turn_policy(&*lock(kernel), member, original, is_waiting);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fake_tests::FakeHost;

    fn rotation(host: &FakeHost, slices: [u32; 2]) -> ThreadRotation {
        let member = |tid| (host.add_thread(tid, tid, 1, "0-3"), SchedParams::default());
        let gangs = vec![
            (vec![member(5), member(6)], slices[0]),
            (vec![member(7), member(8)], slices[1]),
        ];
        ThreadRotation {
            slice: Duration::from_millis(2),
            gangs,
        }
    }

    /// Does exactly one gang have its turn at any time, and are all members restored afterwards?
    #[test]
    fn one_gang_runs_at_a_time_and_members_are_restored_afterward() {
        let host = FakeHost::default();
        let rotation = rotation(&host, [1, 1]);
        let host = Arc::new(Mutex::new(host));
        let policies = || {
            host.lock()
                .unwrap()
                .threads
                .borrow()
                .values()
                .map(|t| t.policy)
                .collect::<Vec<_>>()
        };
        let runner = RotationRunner::start(host.clone(), rotation.clone()).unwrap();
        for turn in [[0, 0, 5, 5], [5, 5, 0, 0]].repeat(2) {
            while policies() != turn {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        drop(runner);
        assert_eq!(policies(), [0, 0, 0, 0]);
        let mut visited = std::collections::BTreeSet::new();
        for gang in 0..2 {
            start_turn(&host, &rotation, gang);
            visited.insert(policies());
        }
        assert_eq!(
            visited.into_iter().collect::<Vec<_>>(),
            [vec![0, 0, 5, 5], vec![5, 5, 0, 0]]
        );
    }

    /// Is a member that has exited, or whose id was reused, left unchanged, and the others wait?
    #[test]
    fn a_reused_thread_id_is_not_touched() {
        let host = FakeHost::default();
        let rotation = rotation(&host, [1, 1]);
        host.change_thread(7, |thread| thread.start_ticks += 1);
        let host = Mutex::new(host);
        start_turn(&host, &rotation, 0);
        let policy_of = |tid| host.lock().unwrap().threads.borrow()[&tid].policy;
        assert_eq!([7, 8].map(policy_of), [0, 5]);
    }
}
