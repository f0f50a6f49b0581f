//! Probes of a live machine, which run in the time that a window leaves them.

use std::collections::BTreeMap;
use std::sync::Mutex;

use cachemate_core::{
    Ability, CacheId, CpuId, CpuSet, ProbeKind, ProbeRequest, ProcessId, RefusalReason, Support,
    TaskId,
};

use super::{LiveMachine, OBSERVE_ONLY_REASON};
use crate::kernel::{Kernel, ThreadKey, clock_ns, lock};
use crate::sense::access_probe::SampledThreads;
use crate::sense::probe_runner::rows::RowPlacement;
use crate::sense::probe_runner::{Participant, ProbePlacement};
use crate::sense::tasks::ManagedThread;

const EXITED_REASON: &str = "the task has exited";

impl<K: Kernel + Send + 'static> LiveMachine<K> {
    /// Runs one step of the next unfinished probe. Returns false if there is none.
    pub(super) fn run_probe_step(&mut self) -> bool {
        let Some(probe) = self.probe_runner.next_probe() else {
            return false;
        };
        let task = match probe.kind {
            ProbeKind::PingPong { cpus } => {
                self.probe_runner.run_ping_pong(&probe, cpus);
                return true;
            }
            ProbeKind::AccessSamples {
                ref processes,
                sample_period: one_in,
                remote_only,
                max_samples: at_most,
            } => {
                self.sample_accesses(&probe, processes, one_in, remote_only, at_most);
                return true;
            }
            ProbeKind::MissTrace { task, entries, .. } => {
                self.trace_misses(&probe, task, entries);
                return true;
            }
            ProbeKind::CoRunRows { cache, .. } => {
                self.run_rows(&probe, cache);
                return true;
            }
            ProbeKind::PrimeProbe { task, .. }
            | ProbeKind::Neighbor { task, .. }
            | ProbeKind::ReuseTimes { task, .. } => task,
            _ => return false, // refused when it was requested
        };
        let kernel = self.kernel();
        let samples_reuse = matches!(probe.kind, ProbeKind::ReuseTimes { .. });
        if !samples_reuse && !self.may_pause_for(&probe) {
            return true;
        }
        let chosen_placement = self.choose_placement(&*lock(&kernel), task);
        let placement = match chosen_placement {
            Ok(placement) => placement,
            Err(message) => {
                self.probe_runner
                    .abandon(&probe, RefusalReason::NotFound, message);
                return true;
            }
        };
        if let ProbeKind::ReuseTimes { locations, .. } = probe.kind {
            self.probe_runner
                .run_reuse_probe(&kernel, &probe, &placement.target, locations);
            return true;
        }
        if !placement.target.scheduling.can_wait() {
            let message = format!(
                "{}: it cannot be kept off for a while",
                placement.target.scheduling
            );
            self.probe_runner
                .abandon(&probe, RefusalReason::NotSupported, &message);
            return true;
        }
        // The gangs are stopped, because during the probe, the probe decides which tasks run.
        let running_schedules = self.gang_runners.schedules();
        self.gang_runners.stop_all();
        self.run_bracket_probe(&kernel, &probe, task);
        self.restart_gangs(running_schedules);
        true
    }

    /// Threads may wait only if the daemon acts and can run gangs; otherwise the probe is abandoned with the reason.
    fn may_pause_for(&mut self, probe: &ProbeRequest) -> bool {
        let observe_only = (!self.options.should_act).then_some(OBSERVE_ONLY_REASON);
        let reason = observe_only
            .or_else(|| self.missing_ability(Ability::Gangs))
            .map(str::to_string);
        if let Some(reason) = &reason {
            self.probe_runner
                .abandon(probe, RefusalReason::NoPermission, reason);
        }
        reason.is_none()
    }

    /// Runs the rows of a probe: in each of them, the other managed threads of the cache wait.
    fn run_rows(&mut self, probe: &ProbeRequest, cache: CacheId) {
        if !self.may_pause_for(probe) {
            return;
        }
        let online = self.topology.online();
        let Some(cpus) = self
            .topology
            .caches
            .iter()
            .find(|known| known.id == cache)
            .map(|known| known.cpus.clone())
        else {
            self.probe_runner
                .abandon(probe, RefusalReason::NotFound, "there is no such cache");
            return;
        };
        let running_schedules = self.gang_runners.schedules();
        self.gang_runners.stop_all();
        let kernel = self.kernel();
        let busy_tasks = self
            .tasks
            .tasks()
            .into_iter()
            .filter(|task| task.cpu.is_some())
            .map(|task| task.task);
        let since_ticks = lock(&kernel).ticks_since_boot().ok();
        let placement = RowPlacement {
            cache,
            cpus: cpus.intersection(&online),
            participants: self.participants_on(&*lock(&kernel), &cpus),
            busy_tasks: busy_tasks.collect(),
            origin: self.start_time,
            since_ticks,
        };
        let desired_states = placement.desired_states(probe);
        let journal_result = self
            .actuator
            .journal_originals(&*lock(&kernel), &desired_states);
        match journal_result {
            Ok(()) => self.probe_runner.run_rows(&kernel, &placement, probe),
            Err(error) => {
                self.probe_runner
                    .abandon(probe, RefusalReason::NoCapacity, &error.to_string())
            }
        }
        self.restart_gangs(running_schedules);
    }

    /// Managed threads that may wait and last ran on these CPUs.
    fn participants_on(&self, kernel: &K, cpus: &CpuSet) -> Vec<Participant> {
        let is_nearby = |task: &&ManagedThread| {
            !task.is_fixed
                && !task.has_exited
                && task.last_cpu.is_none_or(|cpu| cpus.contains(cpu.0))
        };
        let participants = self.tasks.tasks().into_iter().filter(is_nearby);
        // Real-time threads cannot wait as idle tasks, so they stay unchanged.
        participants
            .filter_map(|task| read_participant(kernel, task))
            .filter(|participant| participant.scheduling.can_wait())
            .collect()
    }

    /// Runs the probe with the placement of this moment; the target may have exited since the check.
    fn run_bracket_probe(&mut self, kernel: &Mutex<K>, probe: &ProbeRequest, task: TaskId) {
        let chosen_placement = self.choose_placement(&*lock(kernel), task);
        let placement = match chosen_placement {
            Ok(placement) => placement,
            Err(message) => {
                return self
                    .probe_runner
                    .abandon(probe, RefusalReason::NotFound, message);
            }
        };
        let journal_result = self
            .actuator
            .journal_originals(&*lock(kernel), &placement.desired_states());
        match journal_result {
            Ok(()) => {
                self.probe_runner
                    .run_bracket(kernel, &placement, probe, &self.options.progress)
            }
            Err(error) => {
                self.probe_runner
                    .abandon(probe, RefusalReason::NoCapacity, &error.to_string())
            }
        }
    }

    /// The reason why this host lacks an ability, if the survey at the start found one.
    fn missing_ability(&self, ability: Ability) -> Option<&str> {
        match self.capabilities.abilities.get(&ability) {
            Some(Support::No { reason: why, .. }) => Some(why),
            _ => None,
        }
    }

    fn sample_accesses(
        &mut self,
        probe: &ProbeRequest,
        processes: &[ProcessId],
        sample_period: u32,
        remote_only: bool,
        max_samples: u32,
    ) {
        let is_sampled =
            |task: &&ManagedThread| processes.contains(&task.process) && !task.has_exited;
        let tasks = self.tasks.tasks().into_iter().filter(is_sampled);
        let threads: BTreeMap<i32, TaskId> =
            tasks.map(|task| (task.thread.tid, task.task)).collect();
        if threads.is_empty() {
            self.probe_runner.abandon(
                probe,
                RefusalReason::NotFound,
                "none of the processes has a managed thread",
            );
            return;
        }
        let now_ns = clock_ns(rustix::time::ClockId::Monotonic);
        let online = self.topology.online();
        let subjects = SampledThreads {
            threads: &threads,
            online: &online,
            line_bytes: self.line_bytes(),
            origin_ns: now_ns.saturating_sub(self.start_time.elapsed().as_nanos() as u64),
        };
        self.probe_runner.run_sampling_probe(
            probe,
            &subjects,
            sample_period,
            remote_only,
            max_samples,
        );
    }

    fn trace_misses(&mut self, probe: &ProbeRequest, task: TaskId, entries: u32) {
        if let Some(reason) = self
            .missing_ability(Ability::TraceAddresses)
            .map(str::to_string)
        {
            self.probe_runner
                .abandon(probe, RefusalReason::NotSupported, &reason);
            return;
        }
        let thread = self
            .tasks
            .get(task)
            .filter(|traced| !traced.has_exited)
            .map(|traced| traced.thread);
        let kernel = self.kernel();
        let is_live = |thread: &ThreadKey| lock(&kernel).stat_of(*thread).is_ok();
        let Some(thread) = thread.filter(is_live) else {
            self.probe_runner
                .abandon(probe, RefusalReason::NotFound, EXITED_REASON);
            return;
        };
        self.probe_runner
            .run_miss_trace(probe, (task, thread.tid), entries, self.line_bytes());
    }

    /// Size of a line of the last level.
    fn line_bytes(&self) -> u32 {
        self.topology
            .last_level_caches()
            .find_map(|cache| cache.line_bytes)
            .unwrap_or(64)
    }

    /// Chooses the placement for a probe of this task, in the cache that the task last ran on if possible.
    ///
    /// # Errors
    /// The reason why the task cannot be probed.
    fn choose_placement(&self, kernel: &K, task: TaskId) -> Result<ProbePlacement, &'static str> {
        let target = self
            .tasks
            .get(task)
            .filter(|task| !task.has_exited)
            .ok_or(EXITED_REASON)?;
        if target.is_fixed {
            return Err("its rule only observes the task");
        }
        let online = self.topology.online();
        let shared_cache = |cpu: CpuId| {
            let caches = self.topology.caches.iter();
            caches
                .filter(|cache| cache.last_level)
                .find(|cache| cache.cpus.contains(cpu.0) && cache.cpus.count() > 1)
        };
        let last_cpu_and_cache = target
            .last_cpu
            .and_then(|cpu| Some((cpu, shared_cache(cpu)?)));
        let (target_cpu, cache) = last_cpu_and_cache
            .or_else(|| {
                online
                    .iter()
                    .find_map(|cpu| Some((CpuId(cpu), shared_cache(CpuId(cpu))?)))
            })
            .ok_or("no last-level cache has two CPUs")?;
        let second_cpu = cache
            .cpus
            .intersection(&online)
            .iter()
            .find(|&cpu| cpu != target_cpu.0);
        let probe_cpu = second_cpu
            .map(CpuId)
            .ok_or("its cache has no second CPU online")?;
        let mut other_participants = self.participants_on(kernel, &cache.cpus);
        other_participants.retain(|participant| participant.task != task);
        Ok(ProbePlacement {
            target: read_participant(kernel, target).ok_or(EXITED_REASON)?,
            other_participants,
            target_cpu,
            probe_cpu,
            cache_bytes: cache.size_bytes,
        })
    }
}

fn read_participant(kernel: &dyn Kernel, task: &ManagedThread) -> Option<Participant> {
    kernel.stat_of(task.thread).ok()?;
    let scheduling = kernel.scheduling(task.thread.tid).ok()?;
    let cpus = kernel.affinity(task.thread.tid).ok()?;
    Some(Participant {
        task: task.task,
        pid: task.pid,
        thread: task.thread,
        scheduling,
        cpus,
    })
}

#[cfg(test)]
mod tests {
    use cachemate_core::test_support::{capabilities_fixture, last_level_caches};
    use cachemate_core::{
        CacheLevel, CounterEvent, Machine, Plan, ProbeEvidence, ProbeId, WindowLength,
    };

    use super::*;
    use crate::fake_tests::FakeHost;
    use crate::faults_tests::sample_options;
    use crate::machine::LiveOptions;
    use crate::sense::counters::EventSurvey;
    use crate::sense::events::EventCode;

    /// Does a probe with rows come to its end in a live machine, and do all threads have their policy then?
    #[test]
    fn a_probe_with_rows_ends_and_leaves_the_policies_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let options = LiveOptions {
            cpusets: Vec::new(),
            ..sample_options(dir.path())
        };
        let code = Some(EventCode {
            kind: 0,
            config: u64::MAX,
        });
        let events = [CounterEvent::Instructions, CounterEvent::Cycles];
        let surveys = events.map(|event| EventSurvey {
            event,
            name: "none",
            code,
            absence_reason: None,
        });
        let topology = last_level_caches(1, 2, CacheLevel::L3, 1 << 20);
        let host = FakeHost::with_threads(5..7);
        let mut machine = LiveMachine::new(
            host,
            topology,
            capabilities_fixture(&[]),
            surveys.into(),
            options,
        );
        let policies = |machine: &LiveMachine<FakeHost>| {
            machine.with_kernel(|host| [5, 6].map(|tid| host.scheduling(tid).unwrap().policy))
        };
        let policies_before = policies(&machine);
        let tasks: Vec<TaskId> = machine
            .observe()
            .unwrap()
            .unwrap()
            .tasks
            .iter()
            .map(|task| task.task)
            .collect();
        let rows = vec![vec![tasks[0]], tasks.clone()];
        let kind = ProbeKind::CoRunRows {
            cache: CacheId(0),
            rows,
            total_ns: 1_000_000,
            settle_ns: 0,
            boost: true,
        };
        let mut plan = Plan::idle(WindowLength::Time { ns: 1_000_000 });
        plan.probes = vec![ProbeRequest {
            id: ProbeId(0),
            kind,
            budget_ns: 1,
        }];
        let mut results = Vec::new();
        while results.is_empty() {
            assert!(machine.apply(&plan).unwrap().refused.is_empty());
            results = machine.observe().unwrap().unwrap().probe_results;
        }
        let ProbeEvidence::Rows(intervals) = &results[0].evidence else {
            panic!("{results:?}")
        };
        assert_eq!((intervals.len(), policies(&machine)), (2, policies_before));
        machine.restore_all().unwrap();
    }
}
