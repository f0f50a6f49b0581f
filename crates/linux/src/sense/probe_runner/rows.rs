//! Rows of tasks that run without the other managed threads of their cache.
//!
//! Problem: services that always run together cannot be separated by watching them. Method: while a row runs, all
//! managed threads of the cache that are not in it wait as idle tasks. An idle task still gets a CPU that no other task
//! wants, so a thread of ours with low weight spins on each CPU of the cache; a task of the row loses at most a tenth of
//! its CPU to it. In a row with all tasks of the probe no thread waits, not even one that was born since the request; our
//! threads only keep the CPUs awake, and have the lowest weight. The tasks of the row stay where the kernel puts them.
//! Properties: every change is journaled first; no thread is stopped; all threads are restored when the last row ends. The
//! counts are of the row's tasks only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use cachemate_core::{
    CacheId, CounterEvent, CpuId, CpuSet, EventCounts, PlanItem, ProbeEvidence, ProbeKind, ProbeRequest, RowInterval,
    TaskId, TimeSpan, complete_rows,
};

use super::{Participant, ProbeRunner};
use crate::act::desired_state::DesiredState;
use crate::act::thread_rotation::set_turn_policy;
use crate::kernel::{Kernel, lock};
use crate::sense::counters::RunningTotal;
use crate::sense::probes::PinnedThread;

/// Nice value of our threads while tasks wait: a tenth of the weight of an ordinary task, and forty times that of an idle
/// one.
const SPINNER_NICE: i32 = 10;
/// Nice value while none waits: a seventieth of the weight of an ordinary task.
const AWAKE_NICE: i32 = 19;

/// The threads and the CPUs of a probe with rows.
pub(crate) struct RowPlacement {
    /// The cache.
    pub(crate) cache: CacheId,
    /// Online CPUs of the cache.
    pub(crate) cpus: CpuSet,
    /// Managed threads of the cache that may wait.
    pub(crate) participants: Vec<Participant>,
    /// Tasks that ran at the last refresh; only their waits are a cost.
    pub(crate) busy_tasks: BTreeSet<TaskId>,
    /// Time from which the machine counts.
    pub(crate) origin: Instant,
}

impl RowPlacement {
    /// Everything that the rows will change, for the journal.
    pub(crate) fn desired_states(&self, probe: &ProbeRequest) -> Vec<DesiredState> {
        let ProbeKind::CoRunRows { rows, .. } = &probe.kind else { return Vec::new() };
        let waits = |participant: &&Participant| rows.iter().any(|row| !row.contains(&participant.task));
        let item = PlanItem::Probe(probe.id);
        self.participants.iter().filter(waits).map(|participant| participant.waiting_state(&item)).collect()
    }

    /// Makes the threads of all tasks outside of the row wait, and the others run. Threads that have exited or that
    /// others have changed are left alone.
    fn set_row(&self, kernel: &dyn Kernel, runs: impl Fn(TaskId) -> bool) {
        for Participant { task, thread, scheduling, .. } in &self.participants {
            drop(set_turn_policy(kernel, *thread, scheduling, !runs(*task)));
        }
    }
}

/// Counters of instructions and cycles of each task.
struct RowCounters(BTreeMap<TaskId, [RunningTotal; 2]>);

impl RowCounters {
    fn read(&mut self) -> BTreeMap<TaskId, [u64; 2]> {
        let totals = self.0.iter_mut().filter_map(|(task, [instructions, cycles])| {
            Some((*task, [instructions.read_value()?, cycles.read_value()?]))
        });
        totals.collect()
    }
}

impl ProbeRunner {
    /// Runs all rows of a probe, and then lets all threads run again.
    pub(crate) fn run_rows<K: Kernel>(&mut self, kernel: &Mutex<K>, placement: &RowPlacement, probe: &ProbeRequest) {
        let ProbeKind::CoRunRows { rows, total_ns, settle_ns, .. } = &probe.kind else { return };
        let Some((instructions, cycles)) = self.instructions.zip(self.cycles) else { return };
        let counted_threads =
            placement.participants.iter().filter(|known| rows.iter().flatten().any(|task| *task == known.task));
        let start_counters = |participant: &Participant| {
            let start = |code| RunningTotal::start(participant.thread.tid, code);
            Some((participant.task, [start(instructions)?, start(cycles)?]))
        };
        let mut counters = RowCounters(counted_threads.filter_map(start_counters).collect());
        let (is_over, nice) = (AtomicBool::new(false), AtomicI32::new(SPINNER_NICE));
        let mut waited_ns: BTreeMap<TaskId, u64> = BTreeMap::new();
        let (intervals, spinner_ns) = std::thread::scope(|scope| {
            let (is_over, nice) = (&is_over, &nice);
            let start_spinner = |cpu| scope.spawn(move || spin_at_low_weight(CpuId(cpu), nice, is_over));
            let spinners: Vec<_> = placement.cpus.iter().map(start_spinner).collect();
            let mut intervals = Vec::new();
            for (row, is_complete) in rows.iter().zip(complete_rows_of(rows)) {
                let start = Instant::now();
                nice.store(if is_complete { AWAKE_NICE } else { SPINNER_NICE }, Ordering::Relaxed);
                let runs = runs_in_row(row, is_complete);
                placement.set_row(&*lock(kernel), &runs);
                std::thread::sleep(Duration::from_nanos(*settle_ns));
                let (before, counted_since) = (counters.read(), Instant::now());
                std::thread::sleep(Duration::from_nanos(*total_ns));
                let (after, elapsed_ns) = (counters.read(), counted_since.elapsed().as_nanos() as u64);
                for task in placement.busy_tasks.iter().filter(|task| !runs(**task)) {
                    *waited_ns.entry(*task).or_default() += start.elapsed().as_nanos() as u64;
                }
                let counts_of = |task: &TaskId| {
                    let counts = before.get(task).zip(after.get(task)).map(|(before, after)| {
                        let events = [CounterEvent::Instructions, CounterEvent::Cycles];
                        [0, 1].map(|index| (events[index], after[index].saturating_sub(before[index])))
                    });
                    EventCounts::exact(counts.into_iter().flatten())
                };
                let start_ns = counted_since.saturating_duration_since(placement.origin).as_nanos() as u64;
                intervals.push(RowInterval {
                    tasks: row.clone(),
                    cache: placement.cache,
                    span: TimeSpan { start_ns, elapsed_ns, elapsed_cycles: None },
                    ended_by_task: None,
                    cache_counts: EventCounts::default(),
                    task_counts: row.iter().map(counts_of).collect(),
                });
            }
            is_over.store(true, Ordering::Relaxed);
            placement.set_row(&*lock(kernel), |_| true);
            let spinner_ns: u64 = spinners.into_iter().map(|spinner| spinner.join().unwrap_or(0)).sum();
            (intervals, spinner_ns)
        });
        let paused_tasks =
            placement.participants.iter().filter_map(|known| Some((Some(known.task), *waited_ns.get(&known.task)?)));
        let cost_ns = paused_tasks.chain([(None, spinner_ns)]).collect();
        self.record_result(probe, ProbeEvidence::Rows(intervals), cost_ns);
    }
}

fn complete_rows_of(rows: &[Vec<TaskId>]) -> Vec<bool> {
    complete_rows(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

/// Returns the function that decides whether a task runs in a row; all tasks run in a complete one.
fn runs_in_row(row: &[TaskId], is_complete: bool) -> impl Fn(TaskId) -> bool + '_ {
    move |task| is_complete || row.contains(&task)
}

/// Spins on a CPU at the nice value `nice` until `is_over` is set; returns the processor time. Without the right to lower the
/// nice value again, the thread keeps the larger one.
fn spin_at_low_weight(cpu: CpuId, nice: &AtomicI32, is_over: &AtomicBool) -> u64 {
    let Ok(pinned) = PinnedThread::new(cpu) else { return 0 };
    let mut current_nice = 0;
    while !is_over.load(Ordering::Relaxed) {
        let wanted_nice = nice.load(Ordering::Relaxed);
        if wanted_nice != current_nice {
            // The nice value is the calling thread's own, and ends with it.
            if rustix::process::setpriority_process(None, wanted_nice).is_err() && current_nice == 0 {
                return 0;
            }
            current_nice = wanted_nice;
        }
        std::hint::spin_loop();
    }
    pinned.cost_ns()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::FakeHost;
    use crate::kernel::LinuxHost;
    use crate::kernel::scheduling::SchedParams;
    use crate::safety::guardian::restore_left_behind;
    use crate::safety::journal::{IntendedChange, Journal};
    use crate::sense::events::EventCode;
    use cachemate_core::ProbeId;
    use std::process::{Command, Stdio};

    const PAUSED_PID: &str = "CACHEMATE_TEST_PAUSED_PID";
    const JOURNAL_DIR: &str = "CACHEMATE_TEST_JOURNAL";

    /// Adds the threads 5, 6 and 7 to the host.
    fn add_participants(host: &FakeHost) -> Vec<Participant> {
        let add_participant = |tid: i32| {
            let (thread, cpus) = (host.add_thread(tid, tid, 1, "0-3"), "0-3".parse().unwrap());
            Participant { task: TaskId(tid as u32), pid: tid, thread, scheduling: SchedParams::default(), cpus }
        };
        [5, 6, 7].map(add_participant).into()
    }

    /// Is every thread outside of a row journaled as waiting, does it wait during the row, and do all threads run as
    /// before after the last row? A thread that took over an id meanwhile stays unchanged.
    #[test]
    fn paused_threads_are_journaled_and_restored() {
        let host = FakeHost::default();
        let participants = add_participants(&host);
        host.change_thread(7, |thread| thread.start_ticks += 1);
        // Our threads run on a CPU that this test may use.
        let cpus = LinuxHost::new("/").affinity(std::process::id() as i32).unwrap().first().into_iter().collect();
        let busy_tasks = [TaskId(6)].into();
        let placement = RowPlacement { cache: CacheId(0), cpus, participants, busy_tasks, origin: Instant::now() };
        let rows = vec![vec![TaskId(5)]; 2];
        let kind = ProbeKind::CoRunRows { cache: CacheId(0), rows, total_ns: 1_000_000, settle_ns: 0, boost: true };
        let probe = ProbeRequest { id: ProbeId(1), kind, budget_ns: 1 };
        let paused: Vec<i32> =
            placement.desired_states(&probe).iter().filter_map(|state| Some(state.object.owner()?.0)).collect();
        assert_eq!(paused, [6, 7]);
        let policies = |host: &FakeHost| [5, 6, 7].map(|tid| host.scheduling(tid).unwrap().to_string());
        let original = policies(&host);
        placement.set_row(&host, |task| task == TaskId(5));
        let waiting = policies(&host);
        assert!(waiting[1] != original[1] && waiting[0] == original[0] && waiting[2] == original[2], "{waiting:?}");
        let kernel = Mutex::new(host);
        let no_event = Some(EventCode { kind: 0, config: u64::MAX });
        let mut runner = ProbeRunner::new(Err(String::new()), Err(String::new()), [no_event; 2]);
        runner.run_rows(&kernel, &placement, &probe);
        assert_eq!(policies(&kernel.lock().unwrap()), original);
        let result = &runner.results[0];
        let ProbeEvidence::Rows(intervals) = &result.evidence else { panic!("{result:?}") };
        assert_eq!(intervals.len(), 2);
        assert!(intervals.iter().all(|row| row.task_counts == [EventCounts::default()]), "nothing was counted");
        let cost_of = |task| result.cost_ns.iter().find(|(id, _)| *id == task).map(|(_, ns)| *ns);
        assert!(cost_of(Some(TaskId(6))).unwrap() >= 2_000_000 && cost_of(Some(TaskId(5))).is_none());
    }

    /// Do the threads of a row with all tasks of the probe run as before, also one that the probe does not know?
    #[test]
    fn no_thread_waits_in_a_row_with_all_tasks() {
        let host = FakeHost::default();
        let participants = add_participants(&host);
        let policies = || [5, 6, 7].map(|tid| host.scheduling(tid).unwrap().policy);
        let (cpus, busy_tasks) = (CpuSet::default(), BTreeSet::new());
        let placement = RowPlacement { cache: CacheId(0), cpus, participants, busy_tasks, origin: Instant::now() };
        let rows = [vec![TaskId(5)], vec![TaskId(5), TaskId(6)]];
        let waits = |row: usize| {
            placement.set_row(&host, runs_in_row(&rows[row], complete_rows_of(&rows)[row]));
            policies()
        };
        assert_eq!(waits(0), [0, 5, 5]);
        assert_eq!(waits(1), [0, 0, 0]);
        let equal_rows = [vec![TaskId(5)], vec![TaskId(5)]];
        placement.set_row(&host, runs_in_row(&equal_rows[1], complete_rows_of(&equal_rows)[1]));
        assert_eq!(policies(), [0, 5, 5], "all rows are equal");
    }

    /// If the process that pauses a program is killed during the pause, and no guardian lives: does the program go on,
    /// as an idle task, and are it and the children that it started meanwhile restored from the journal?
    #[test]
    fn a_paused_program_runs_on_and_is_restored_after_a_kill() {
        let (dir, host) = (tempfile::tempdir().unwrap(), LinuxHost::new("/"));
        let mut program = Command::new("sh").args(["-c", "while :; do sh -c :; done"]).spawn().unwrap();
        let pid = program.id() as i32;
        let mut pauser = Command::new(std::env::current_exe().unwrap());
        pauser.env(PAUSED_PID, pid.to_string()).env(JOURNAL_DIR, dir.path());
        let part = "sense::probe_runner::rows::tests::part_that_pauses_a_program";
        let mut pauser = pauser.args(["--exact", part, "--ignored"]).stdout(Stdio::null()).spawn().unwrap();
        let within_a_minute = |is_reached: &dyn Fn() -> bool| {
            let start = Instant::now();
            while !is_reached() && start.elapsed() < Duration::from_secs(60) {
                std::thread::sleep(Duration::from_millis(5));
            }
            is_reached()
        };
        let policy = || host.scheduling(pid).unwrap().policy;
        let was_paused = within_a_minute(&|| policy() != 0);
        pauser.kill().unwrap();
        pauser.wait().unwrap();
        let ran_ns = || std::fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap();
        let (policy_during, ran_ns_during) = (policy(), ran_ns());
        let runs_on = within_a_minute(&|| ran_ns() != ran_ns_during);
        let restored = restore_left_behind(&host, dir.path()).unwrap();
        let children = || {
            let stats = host.processes().unwrap().into_iter().filter_map(|pid| host.stat(pid).ok());
            stats.filter(|stat| stat.parent == pid).map(|stat| stat.policy).collect::<Vec<_>>()
        };
        let policies_after = [vec![policy()], children()].concat();
        program.kill().unwrap();
        program.wait().unwrap();
        assert!(was_paused && policy_during == 5 && runs_on, "{was_paused} {policy_during} {runs_on}");
        assert!(policies_after.iter().all(|policy| *policy == 0), "{policies_after:?}, {restored:?}");
        assert!(!dir.path().join(Journal::FILE_NAME).exists(), "{restored:?}");
    }

    #[test]
    #[ignore = "run by the test above, which kills it"]
    fn part_that_pauses_a_program() {
        let (Ok(pid), Some(dir)) = (std::env::var(PAUSED_PID), std::env::var_os(JOURNAL_DIR)) else { return };
        let (host, pid) = (LinuxHost::new("/"), pid.parse().unwrap());
        let (thread, scheduling) = (host.stat(pid).unwrap().key, host.scheduling(pid).unwrap());
        let cpus = host.affinity(pid).unwrap();
        let participants = vec![Participant { task: TaskId(1), pid, thread, scheduling, cpus: cpus.clone() }];
        let busy_tasks = [TaskId(1)].into();
        let placement = RowPlacement { cache: CacheId(0), cpus, participants, busy_tasks, origin: Instant::now() };
        let kind = ProbeKind::CoRunRows {
            cache: CacheId(0),
            rows: vec![Vec::new()],
            total_ns: 100_000_000_000,
            settle_ns: 0,
            boost: true,
        };
        let probe = ProbeRequest { id: ProbeId(1), kind, budget_ns: 1 };
        let mut journal = Journal::create(dir.as_ref(), &host.boot_id().unwrap(), 0).unwrap();
        let intended_change = |desired_state: DesiredState| IntendedChange {
            object: desired_state.object,
            current: scheduling.into(),
            target: desired_state.state,
            follows_cpuset: false,
        };
        let changes: Vec<IntendedChange> = placement.desired_states(&probe).into_iter().map(intended_change).collect();
        journal.journal_changes(&changes).unwrap();
        let no_event = Some(EventCode { kind: 0, config: u64::MAX });
        let mut runner = ProbeRunner::new(Err(String::new()), Err(String::new()), [no_event; 2]);
        runner.run_rows(&Mutex::new(host), &placement, &probe);
    }
}
