//! Rows of tasks that run without the other managed threads of their cache.
//!
//! Problem: services that always run together cannot be separated by watching them. Method: while a row runs, all
//! managed threads of the cache that are not in it wait as idle tasks. An idle task still gets a CPU that no other task
//! wants, so a thread of ours with low weight spins on each CPU of the cache; a task of the row loses at most a tenth
//! of its CPU to it. In a row with all tasks of the probe no thread waits: not one that was born since the request, nor
//! one that inherited the idle policy from a waiting thread. Our threads then only keep the CPUs awake, and have the
//! lowest weight. The tasks of the row stay where the kernel puts them. Properties: every change is journaled first; no
//! thread is stopped; all threads are restored when the last row ends. The counts are of the row's tasks only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use cachemate_core::{
    CacheId, CounterEvent, CpuId, CpuSet, EventCounts, ProbeEvidence, ProbeKind, ProbeRequest,
    RowInterval, TaskId, TimeSpan, complete_rows,
};

use super::{Participant, ProbeRunner};
use crate::act::desired_state::DesiredState;
use crate::act::thread_rotation::set_turn_policy;
use crate::kernel::{Kernel, lock};
use crate::safety::journal::{JournalEntry, JournalObject};
use crate::safety::restore::restore_inherited;
use crate::sense::counters::RunningTotal;
use crate::sense::probes::PinnedThread;

/// Nice value of our threads while tasks wait: a tenth of the weight of an ordinary task, and forty times that of an
/// idle one.
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
    /// Time before the first row, in clock ticks since the boot; `None` if the kernel does not report it.
    pub(crate) since_ticks: Option<u64>,
}

impl RowPlacement {
    /// Everything that the rows will change, for the journal.
    pub(crate) fn desired_states(&self, probe: &ProbeRequest) -> Vec<DesiredState> {
        self.pausable_participants(probe)
            .map(Participant::waiting_state)
            .collect()
    }

    /// The participants that wait in one of the rows.
    fn pausable_participants<'a>(
        &'a self,
        probe: &'a ProbeRequest,
    ) -> impl Iterator<Item = &'a Participant> {
        let rows = if let ProbeKind::CoRunRows { rows, .. } = &probe.kind {
            rows.as_slice()
        } else {
            &[]
        };
        self.participants
            .iter()
            .filter(|participant| rows.iter().any(|row| !row.contains(&participant.task)))
    }

    /// Makes the threads of all tasks outside of the row wait, and the others run. `None` makes all run, and also the
    /// threads that have inherited the policy of one that waited. Threads that have exited or that others have changed
    /// are left alone.
    fn set_row(&self, kernel: &dyn Kernel, probe: &ProbeRequest, row: Option<&[TaskId]>) {
        for Participant {
            task,
            thread,
            scheduling,
            ..
        } in &self.participants
        {
            drop(set_turn_policy(
                kernel,
                *thread,
                scheduling,
                waits(row, *task),
            ));
        }
        if let (None, Some(since_ticks)) = (row, self.since_ticks) {
            let entry_of = |participant: &Participant| {
                let object = JournalObject::Policy {
                    pid: participant.pid,
                    thread: participant.thread,
                };
                let original = participant.scheduling.into();
                let applied_states = vec![participant.scheduling.to_waiting().into()];
                (
                    object,
                    JournalEntry {
                        original,
                        applied_states,
                        since_ticks,
                        follows_cpuset: false,
                        family: None,
                    },
                )
            };
            // The journal need not name the inheritors, because whoever restores the host finds them by their
            // ancestors. One that cannot be restored here is restored after the window that lists it.
            drop(restore_inherited(
                kernel,
                &self.pausable_participants(probe).map(entry_of).collect(),
            ));
        }
    }
}

/// A task waits if the row lacks it; without a row, none waits.
fn waits(row: Option<&[TaskId]>, task: TaskId) -> bool {
    row.is_some_and(|row| !row.contains(&task))
}

/// Counters of instructions and cycles of each task.
struct RowCounters(BTreeMap<TaskId, [RunningTotal; 2]>);

impl RowCounters {
    fn read(&mut self) -> BTreeMap<TaskId, [u64; 2]> {
        let totals = self
            .0
            .iter_mut()
            .filter_map(|(task, [instructions, cycles])| {
                Some((*task, [instructions.read_value()?, cycles.read_value()?]))
            });
        totals.collect()
    }
}

impl ProbeRunner {
    /// Runs all rows of a probe, and then lets all threads run again.
    pub(crate) fn run_rows<K: Kernel>(
        &mut self,
        kernel: &Mutex<K>,
        placement: &RowPlacement,
        probe: &ProbeRequest,
    ) {
        let ProbeKind::CoRunRows {
            rows,
            total_ns,
            settle_ns,
            ..
        } = &probe.kind
        else {
            return;
        };
        let Some((instructions, cycles)) = self.instructions.zip(self.cycles) else {
            return;
        };
        let counted_threads = placement
            .participants
            .iter()
            .filter(|known| rows.iter().flatten().any(|task| *task == known.task));
        let start_counters = |participant: &Participant| {
            let start = |code| RunningTotal::start(participant.thread.tid, code);
            Some((participant.task, [start(instructions)?, start(cycles)?]))
        };
        let mut counters = RowCounters(counted_threads.filter_map(start_counters).collect());
        let (is_over, nice) = (AtomicBool::new(false), AtomicI32::new(SPINNER_NICE));
        let mut waited_ns: BTreeMap<TaskId, u64> = BTreeMap::new();
        let (intervals, spinner_ns) = std::thread::scope(|scope| {
            let (is_over, nice) = (&is_over, &nice);
            let start_spinner =
                |cpu| scope.spawn(move || spin_at_low_weight(CpuId(cpu), nice, is_over));
            let spinners: Vec<_> = placement.cpus.iter().map(start_spinner).collect();
            let mut intervals = Vec::new();
            for (row, is_complete) in rows.iter().zip(complete_rows_of(rows)) {
                let start = Instant::now();
                nice.store(
                    if is_complete {
                        AWAKE_NICE
                    } else {
                        SPINNER_NICE
                    },
                    Ordering::Relaxed,
                );
                let partial_row = (!is_complete).then_some(row.as_slice());
                placement.set_row(&*lock(kernel), probe, partial_row);
                std::thread::sleep(Duration::from_nanos(*settle_ns));
                let (before, counted_since) = (counters.read(), Instant::now());
                std::thread::sleep(Duration::from_nanos(*total_ns));
                let (after, elapsed_ns) =
                    (counters.read(), counted_since.elapsed().as_nanos() as u64);
                for task in placement
                    .busy_tasks
                    .iter()
                    .filter(|task| waits(partial_row, **task))
                {
                    *waited_ns.entry(*task).or_default() += start.elapsed().as_nanos() as u64;
                }
                let counts_of = |task: &TaskId| {
                    let counts = before
                        .get(task)
                        .zip(after.get(task))
                        .map(|(before, after)| {
                            let events = [CounterEvent::Instructions, CounterEvent::Cycles];
                            [0, 1].map(|index| {
                                (events[index], after[index].saturating_sub(before[index]))
                            })
                        });
                    EventCounts::exact(counts.into_iter().flatten())
                };
                let start_ns = counted_since
                    .saturating_duration_since(placement.origin)
                    .as_nanos() as u64;
                intervals.push(RowInterval {
                    tasks: row.clone(),
                    cache: placement.cache,
                    span: TimeSpan {
                        start_ns,
                        elapsed_ns,
                        elapsed_cycles: None,
                    },
                    ended_by_task: None,
                    cache_counts: EventCounts::default(),
                    task_counts: row.iter().map(counts_of).collect(),
                });
            }
            is_over.store(true, Ordering::Relaxed);
            placement.set_row(&*lock(kernel), probe, None);
            let spinner_ns: u64 = spinners
                .into_iter()
                .map(|spinner| spinner.join().unwrap_or(0))
                .sum();
            (intervals, spinner_ns)
        });
        let paused_tasks = placement
            .participants
            .iter()
            .filter_map(|known| Some((Some(known.task), *waited_ns.get(&known.task)?)));
        let cost_ns = paused_tasks.chain([(None, spinner_ns)]).collect();
        self.record_result(probe, ProbeEvidence::Rows(intervals), cost_ns);
    }
}

fn complete_rows_of(rows: &[Vec<TaskId>]) -> Vec<bool> {
    complete_rows(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

/// Spins on a CPU at the nice value `nice` until `is_over` is set; returns the processor time. Without the right to
/// lower the nice value again, the thread keeps the larger one.
fn spin_at_low_weight(cpu: CpuId, nice: &AtomicI32, is_over: &AtomicBool) -> u64 {
    let Ok(pinned) = PinnedThread::new(cpu) else {
        return 0;
    };
    let mut current_nice = 0;
    while !is_over.load(Ordering::Relaxed) {
        let wanted_nice = nice.load(Ordering::Relaxed);
        if wanted_nice != current_nice {
            // The nice value is the calling thread's own, and ends with it.
            if rustix::process::setpriority_process(None, wanted_nice).is_err() && current_nice == 0
            {
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
    use crate::kernel::scheduling::{IDLE, NORMAL, SchedParams};
    use crate::safety::guardian::restore_left_behind;
    use crate::safety::journal::{IntendedChange, Journal};
    use crate::sense::events::EventCode;
    use cachemate_core::ProbeId;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    const PAUSED_PID: &str = "CACHEMATE_TEST_PAUSED_PID";
    const JOURNAL_DIR: &str = "CACHEMATE_TEST_JOURNAL";

    fn probe_of(rows: Vec<Vec<TaskId>>, total_ns: u64) -> ProbeRequest {
        let kind = ProbeKind::CoRunRows {
            cache: CacheId(0),
            rows,
            total_ns,
            settle_ns: 0,
            boost: true,
        };
        ProbeRequest {
            id: ProbeId(1),
            kind,
            budget_ns: 1,
        }
    }

    fn placement_of(
        participants: Vec<Participant>,
        cpus: CpuSet,
        busy_tasks: &[TaskId],
    ) -> RowPlacement {
        let (origin, busy_tasks) = (Instant::now(), busy_tasks.iter().copied().collect());
        let since_ticks = LinuxHost::new("/").ticks_since_boot().ok();
        RowPlacement {
            cache: CacheId(0),
            cpus,
            participants,
            busy_tasks,
            origin,
            since_ticks,
        }
    }

    /// A thread of the real host, as task 1.
    fn participant_of(host: &LinuxHost, pid: i32) -> Participant {
        let (thread, scheduling) = (host.stat(pid).unwrap().key, host.scheduling(pid).unwrap());
        Participant {
            task: TaskId(1),
            pid,
            thread,
            scheduling,
            cpus: host.affinity(pid).unwrap(),
        }
    }

    /// Adds the threads 5, 6 and 7 to the host.
    fn add_participants(host: &FakeHost) -> Vec<Participant> {
        let add_participant = |tid: i32| {
            let (thread, cpus) = (host.add_thread(tid, tid, 1, "0-3"), "0-3".parse().unwrap());
            Participant {
                task: TaskId(tid as u32),
                pid: tid,
                thread,
                scheduling: SchedParams::default(),
                cpus,
            }
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
        let cpus = LinuxHost::new("/")
            .affinity(std::process::id() as i32)
            .unwrap()
            .first()
            .into_iter()
            .collect();
        let placement = placement_of(participants, cpus, &[TaskId(6)]);
        let probe = probe_of(vec![vec![TaskId(5)]; 2], 1_000_000);
        let paused: Vec<i32> = placement
            .desired_states(&probe)
            .iter()
            .filter_map(|state| Some(state.object.owner()?.0))
            .collect();
        assert_eq!(paused, [6, 7]);
        let policies =
            |host: &FakeHost| [5, 6, 7].map(|tid| host.scheduling(tid).unwrap().to_string());
        let original = policies(&host);
        placement.set_row(&host, &probe, Some(&[TaskId(5)]));
        let waiting = policies(&host);
        assert!(
            waiting[1] != original[1] && waiting[0] == original[0] && waiting[2] == original[2],
            "{waiting:?}"
        );
        let kernel = Mutex::new(host);
        let no_event = Some(EventCode {
            kind: 0,
            config: u64::MAX,
        });
        let mut runner = ProbeRunner::new(Err(String::new()), Err(String::new()), [no_event; 2]);
        runner.run_rows(&kernel, &placement, &probe);
        assert_eq!(policies(&kernel.lock().unwrap()), original);
        let result = &runner.results[0];
        let ProbeEvidence::Rows(intervals) = &result.evidence else {
            panic!("{result:?}")
        };
        assert_eq!(intervals.len(), 2);
        assert!(
            intervals
                .iter()
                .all(|row| row.task_counts == [EventCounts::default()]),
            "nothing was counted"
        );
        let cost_of = |task| {
            result
                .cost_ns
                .iter()
                .find(|(id, _)| *id == task)
                .map(|(_, ns)| *ns)
        };
        assert!(
            cost_of(Some(TaskId(6))).unwrap() >= 2_000_000 && cost_of(Some(TaskId(5))).is_none()
        );
    }

    /// Do the threads of a row with all tasks of the probe run as before, also one that the probe does not know?
    #[test]
    fn no_thread_waits_in_a_row_with_all_tasks() {
        let host = FakeHost::default();
        let participants = add_participants(&host);
        let policies = || [5, 6, 7].map(|tid| host.scheduling(tid).unwrap().policy);
        let placement = placement_of(participants, CpuSet::default(), &[]);
        let probe = probe_of(vec![vec![TaskId(5)], vec![TaskId(5), TaskId(6)]], 1);
        placement.set_row(&host, &probe, Some(&[TaskId(5)]));
        assert_eq!(policies(), [0, 5, 5]);
        placement.set_row(&host, &probe, None);
        assert_eq!(policies(), [0, 0, 0]);
        assert_eq!(
            complete_rows_of(&[vec![TaskId(5)], vec![TaskId(5), TaskId(6)]]),
            [false, true]
        );
        assert_eq!(
            complete_rows_of(&[vec![TaskId(5)], vec![TaskId(5)]]),
            [false, false],
            "all rows are equal"
        );
    }

    /// Do children that a paused shell has started run in the row with all tasks, whereas a child that made itself an
    /// idle task before the pause stays one?
    #[test]
    fn children_of_a_paused_program_run_in_a_row_with_all_tasks() {
        let host = LinuxHost::new("/");
        let script = "while read -r _; do sleep 60 & echo $!; done";
        let mut command = Command::new("sh");
        let shell = command
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        let (mut requests, mut answers) = (
            shell.stdin.take().unwrap(),
            BufReader::new(shell.stdout.take().unwrap()),
        );
        let mut start_child = || {
            let mut pid = String::new();
            writeln!(requests).unwrap();
            answers.read_line(&mut pid).unwrap();
            pid.trim().parse::<i32>().unwrap()
        };
        let idle_child = start_child();
        host.set_policy(idle_child, IDLE).unwrap();
        let birth_ticks = host.stat(idle_child).unwrap().key.start_ticks;
        while host.ticks_since_boot().unwrap() <= birth_ticks {
            std::thread::sleep(Duration::from_millis(5));
        }
        let placement = placement_of(
            vec![participant_of(&host, shell.id() as i32)],
            CpuSet::default(),
            &[],
        );
        let probe = probe_of(vec![vec![TaskId(2)], vec![TaskId(1), TaskId(2)]], 1);
        placement.set_row(&host, &probe, Some(&[TaskId(2)]));
        let child = start_child();
        let policies = || {
            [shell.id() as i32, child, idle_child].map(|pid| host.scheduling(pid).unwrap().policy)
        };
        let during_pause = policies();
        placement.set_row(&host, &probe, None);
        let after_pause = policies();
        drop(requests);
        shell.wait().unwrap();
        Command::new("kill")
            .args([child, idle_child].map(|pid| pid.to_string()))
            .status()
            .unwrap();
        assert_eq!(
            (during_pause, after_pause),
            ([IDLE; 3], [NORMAL, NORMAL, IDLE])
        );
    }

    /// If the process that pauses a program is killed during the pause, and no guardian lives: does the program go on,
    /// as an idle task, and are it and the children that it started meanwhile restored from the journal?
    #[test]
    fn a_paused_program_runs_on_and_is_restored_after_a_kill() {
        let (dir, host) = (tempfile::tempdir().unwrap(), LinuxHost::new("/"));
        let mut program = Command::new("sh")
            .args(["-c", "while :; do sh -c :; done"])
            .spawn()
            .unwrap();
        let pid = program.id() as i32;
        let mut pauser = Command::new(std::env::current_exe().unwrap());
        pauser
            .env(PAUSED_PID, pid.to_string())
            .env(JOURNAL_DIR, dir.path());
        let part = "sense::probe_runner::rows::tests::part_that_pauses_a_program";
        let mut pauser = pauser
            .args(["--exact", part, "--ignored"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
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
            let stats = host
                .processes()
                .unwrap()
                .into_iter()
                .filter_map(|pid| host.stat(pid).ok());
            stats
                .filter(|stat| stat.parent == pid)
                .map(|stat| stat.policy)
                .collect::<Vec<_>>()
        };
        let policies_after = [vec![policy()], children()].concat();
        program.kill().unwrap();
        program.wait().unwrap();
        assert!(
            was_paused && policy_during == 5 && runs_on,
            "{was_paused} {policy_during} {runs_on}"
        );
        assert!(
            policies_after.iter().all(|policy| *policy == 0),
            "{policies_after:?}, {restored:?}"
        );
        assert!(
            !dir.path().join(Journal::FILE_NAME).exists(),
            "{restored:?}"
        );
    }

    #[test]
    #[ignore = "run by the test above, which kills it"]
    fn part_that_pauses_a_program() {
        let (Ok(pid), Some(dir)) = (std::env::var(PAUSED_PID), std::env::var_os(JOURNAL_DIR))
        else {
            return;
        };
        let (host, pid) = (LinuxHost::new("/"), pid.parse().unwrap());
        let participant = participant_of(&host, pid);
        let (scheduling, cpus) = (participant.scheduling, participant.cpus.clone());
        let placement = placement_of(vec![participant], cpus, &[TaskId(1)]);
        let probe = probe_of(vec![Vec::new()], 100_000_000_000);
        let mut journal = Journal::create(dir.as_ref(), &host.boot_id().unwrap(), 0).unwrap();
        let intended_change = |desired_state: DesiredState| IntendedChange {
            object: desired_state.object,
            current: scheduling.into(),
            target: desired_state.state,
            follows_cpuset: false,
        };
        let changes: Vec<IntendedChange> = placement
            .desired_states(&probe)
            .into_iter()
            .map(intended_change)
            .collect();
        journal.journal_changes(&changes).unwrap();
        let no_event = Some(EventCode {
            kind: 0,
            config: u64::MAX,
        });
        let mut runner = ProbeRunner::new(Err(String::new()), Err(String::new()), [no_event; 2]);
        runner.run_rows(&Mutex::new(host), &placement, &probe);
    }
}
