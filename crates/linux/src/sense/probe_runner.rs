//! Execution of a plan's probes within the windows of the live machine.
//!
//! A probe has to run beside one program alone, and then without that program, on a host that is in
//! use, and may never stop a program, because a stopped service misses its deadlines, and stays
//! stopped if the daemon dies. So for some tenths of a second the other managed threads of
//! that cache wait as idle tasks, as for gangs, while the probed thread and the probe run on one
//! CPU each; to keep the probed thread off, it becomes an idle task as well, and a spinning thread
//! of ours takes its CPU. One such *bracket* is off-off / on-on / off, with the cache-line
//! ping-pong before and after it, so that drifts cancel and samples across a split are recognized.
//!
//! For example, the probe fills half of the cache and looks 50 ms later: 30 % of its lines are gone
//! while the program ran, and 5 % while it did not, which is what other guests and the kernel
//! evict. The program's intensity is about 0.25; the first figure alone would blame it for the
//! others.
//!
//! Every change is journaled first; no thread is stopped, and none waits longer than a bracket; a
//! share of the window is never exceeded; answers are raw.

pub(crate) mod rows;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cachemate_core::{
    AccessSample, AddressKind, CpuId, CpuSet, Neighbor, PlanItem, PrimeProbeSample, ProbeEvidence,
    ProbeKind, ProbeRequest, ProbeResult, RefusalReason, RefusedItem, ReuseSample, TaskId,
};

use crate::act::desired_state::DesiredState;
use crate::act::thread_rotation::{set_affinity_checked, set_turn_policy};
use crate::kernel::refused_calls::KernelCall;
use crate::kernel::scheduling::SchedParams;
use crate::kernel::{Kernel, ThreadKey, lock};
use crate::safety::journal::{JournalObject, ObjectState};
use crate::sense::access_probe::{SampledThreads, sample_accesses};
use crate::sense::counters::RunningTotal;
use crate::sense::events::EventCode;
use crate::sense::miss_trace::{MAX_TRACE_TIME, MissTracer, RECORD_COST_NS};
use crate::sense::probes::intensity::{BRACKET, PrimeProber, wait_time};
use crate::sense::probes::neighbor::NeighborLoad;
use crate::sense::probes::ping_pong::round_trip;
use crate::sense::probes::watch_candidates::WatchCandidates;
use crate::sense::probes::{PinnedThread, thread_time_ns, watchpoint};
use crate::sense::progress::{BracketCounts, ProgressReports, ProgressTotals};
use crate::sense::sampling::Facility;

/// Length of a phase with a neighbor: a stream beside a program needs some time until the occupancies are stable.
const PHASE_TIME: Duration = Duration::from_millis(150);
/// Maximum length of one session of watching words.
const WATCH_TIME: Duration = Duration::from_millis(150);
/// Tries after which a failing probe (its CPU was not free) is abandoned.
const MAX_FAILURES: u32 = 5;

/// The probes that the plan requests, with their progress.
pub(crate) struct ProbeRunner {
    /// The facility that samples accesses here, or the reason why there is none.
    facility: Result<Facility, String>,
    /// The events that trace misses here, or the reason why there are none.
    tracer: Result<MissTracer, String>,
    /// The event that counts instructions here.
    instructions: Option<EventCode>,
    /// The event that counts cycles here.
    cycles: Option<EventCode>,
    running_probes: Vec<RunningProbe>,
    reloader: Option<PrimeProber>,
    pub(crate) results: Vec<ProbeResult>,
    pub(crate) refused_items: Vec<RefusedItem>,
}

struct RunningProbe {
    probe: ProbeRequest,
    is_done: bool,
    failures: u32,
    cost_ns: u64,
    eviction_samples: Vec<PrimeProbeSample>,
    reuse_samples: Vec<ReuseSample>,
    watch_candidates: WatchCandidates,
    access_samples: Vec<AccessSample>,
    sampled_events: u64,
}

fn find_probe<'a>(
    running_probes: &'a mut [RunningProbe],
    probe: &ProbeRequest,
) -> Option<&'a mut RunningProbe> {
    running_probes
        .iter_mut()
        .find(|running_probe| running_probe.probe == *probe)
}

/// A managed thread that takes part in a probe.
#[derive(Clone, Debug)]
pub(crate) struct Participant {
    pub(crate) task: TaskId,
    pub(crate) pid: i32,
    pub(crate) thread: ThreadKey,
    pub(crate) scheduling: SchedParams,
    pub(crate) cpus: CpuSet,
}

impl Participant {
    /// The state in which it waits.
    fn waiting_state(&self) -> DesiredState {
        let object = JournalObject::Policy {
            pid: self.pid,
            thread: self.thread,
        };
        DesiredState::journaled(object, self.scheduling.to_waiting().into())
    }
}

/// Placement of the threads while a probe of a task runs.
pub(crate) struct ProbePlacement {
    pub(crate) target: Participant,
    pub(crate) other_participants: Vec<Participant>,
    pub(crate) target_cpu: CpuId,
    pub(crate) probe_cpu: CpuId,
    /// Size of the shared cache.
    pub(crate) cache_bytes: Option<u64>,
}

impl ProbePlacement {
    /// Everything that the bracket will change, for the journal.
    pub(crate) fn desired_states(&self) -> Vec<DesiredState> {
        let participants = self.other_participants.iter().chain([&self.target]);
        let waiting_states = participants.map(Participant::waiting_state);
        let object = JournalObject::Affinity {
            pid: self.target.pid,
            thread: self.target.thread,
        };
        let target_state = DesiredState::journaled(object, ObjectState::Cpus(self.target_cpus()));
        waiting_states.chain([target_state]).collect()
    }

    fn target_cpus(&self) -> CpuSet {
        [self.target_cpu.0].into_iter().collect()
    }
}

impl ProbeRunner {
    pub(crate) fn new(
        facility: Result<Facility, String>,
        tracer: Result<MissTracer, String>,
        [instructions, cycles]: [Option<EventCode>; 2],
    ) -> Self {
        ProbeRunner {
            facility,
            tracer,
            instructions,
            cycles,
            running_probes: Vec::new(),
            reloader: None,
            results: Vec::new(),
            refused_items: Vec::new(),
        }
    }

    /// Replaces the requests by the plan's; probes that were requested before continue.
    pub(crate) fn set_requests(&mut self, probes: &[ProbeRequest]) {
        let mut old_probes = std::mem::take(&mut self.running_probes);
        for probe in probes {
            let earlier_index = old_probes
                .iter()
                .position(|running_probe| running_probe.probe == *probe);
            let is_supported = matches!(
                probe.kind,
                ProbeKind::PrimeProbe { .. }
                    | ProbeKind::Neighbor { .. }
                    | ProbeKind::PingPong { .. }
                    | ProbeKind::ReuseTimes { .. }
            );
            let unsupported_reason = match &probe.kind {
                ProbeKind::AccessSamples { .. } => self.facility.as_ref().err().cloned(),
                ProbeKind::MissTrace { .. } => self.tracer.as_ref().err().cloned(),
                ProbeKind::CoRunRows { boost: true, .. } => self
                    .instructions
                    .and(self.cycles)
                    .is_none()
                    .then(|| "instructions and cycles are not counted here".to_string()),
                _ => (!is_supported).then(|| "a live host has no such probe".to_string()),
            };
            if let Some(reason) = unsupported_reason {
                self.refuse(probe, RefusalReason::NotSupported, &reason);
                continue;
            }
            self.running_probes.push(match earlier_index {
                Some(index) => old_probes.swap_remove(index),
                None => RunningProbe {
                    probe: probe.clone(),
                    is_done: false,
                    failures: 0,
                    cost_ns: 0,
                    eviction_samples: Vec::new(),
                    reuse_samples: Vec::new(),
                    watch_candidates: WatchCandidates::default(),
                    access_samples: Vec::new(),
                    sampled_events: 0,
                },
            });
        }
    }

    pub(crate) fn refuse(&mut self, probe: &ProbeRequest, reason: RefusalReason, message: &str) {
        self.refused_items.push(RefusedItem {
            item: PlanItem::Probe(probe.id),
            reason,
            message: message.to_string(),
        });
    }

    /// The next unanswered probe.
    pub(crate) fn next_probe(&self) -> Option<ProbeRequest> {
        self.running_probes
            .iter()
            .find(|running_probe| !running_probe.is_done)
            .map(|request| request.probe.clone())
    }

    /// The plan's probes, for the state that is read back.
    pub(crate) fn probe_ids(&self) -> Vec<cachemate_core::ProbeId> {
        self.running_probes
            .iter()
            .map(|running_probe| running_probe.probe.id)
            .collect()
    }

    /// Abandons a probe for good.
    pub(crate) fn abandon(&mut self, probe: &ProbeRequest, reason: RefusalReason, message: &str) {
        self.refuse(probe, reason, message);
        if let Some(running_probe) = find_probe(&mut self.running_probes, probe) {
            running_probe.is_done = true;
        }
    }

    /// Measures the ping-pong between two CPUs in a few milliseconds, without moving a managed thread.
    pub(crate) fn run_ping_pong(&mut self, probe: &ProbeRequest, cpus: (CpuId, CpuId)) {
        match round_trip(cpus) {
            Ok(measurement) => {
                let evidence = ProbeEvidence::PingPong {
                    cpus,
                    round_trip_ns: measurement.round_trip_ns,
                };
                self.record_result(probe, evidence, vec![(None, measurement.cost_ns)]);
            }
            Err(error) => self.record_failure(probe, &error),
        }
    }

    /// Runs one bracket of a probe that decides which tasks run.
    pub(crate) fn run_bracket<K: Kernel>(
        &mut self,
        kernel: &Mutex<K>,
        placement: &ProbePlacement,
        probe: &ProbeRequest,
        progress: &ProgressReports,
    ) {
        let session = ProbeSession { kernel, placement };
        let outcome = match probe.kind {
            ProbeKind::PrimeProbe { samples, .. } => {
                self.run_eviction_probe(&session, probe, samples)
            }
            ProbeKind::Neighbor { neighbor, .. } => {
                self.run_neighbor_probe(&session, probe, neighbor, progress)
            }
            _ => Ok(()),
        };
        if let Err(error) = outcome {
            self.record_failure(probe, &error);
        }
    }

    fn record_failure(&mut self, probe: &ProbeRequest, error: &std::io::Error) {
        let Some(running_probe) = find_probe(&mut self.running_probes, probe) else {
            return;
        };
        running_probe.failures += 1;
        if running_probe.failures >= MAX_FAILURES {
            let message = match error.raw_os_error() {
                Some(_) => call_of(&probe.kind).describe("", error),
                None => error.to_string(),
            };
            self.abandon(probe, RefusalReason::Busy, &message);
        }
    }

    fn record_result(
        &mut self,
        probe: &ProbeRequest,
        evidence: ProbeEvidence,
        cost_ns: Vec<(Option<TaskId>, u64)>,
    ) {
        if let Some(running_probe) = find_probe(&mut self.running_probes, probe) {
            running_probe.is_done = true;
        }
        self.results.push(ProbeResult {
            probe: probe.id,
            evidence,
            complete: true,
            cost_ns,
        });
    }

    fn run_eviction_probe<K: Kernel>(
        &mut self,
        session: &ProbeSession<'_, K>,
        probe: &ProbeRequest,
        requested_samples: u32,
    ) -> std::io::Result<()> {
        if self.reloader.is_none() {
            let _pinned = PinnedThread::new(session.placement.probe_cpu)?;
            self.reloader = Some(PrimeProber::fit_to_cache(session.placement.cache_bytes, 1)?);
        }
        let Some(reloader) = &mut self.reloader else {
            return Ok(());
        };
        let wait = wait_time(Some(reloader.cache_bytes()));
        let (samples, own_cpu_ns, off_ns) = session.run(|switch| {
            let mut samples = Vec::new();
            for (is_target_running, is_counted) in BRACKET {
                switch.set_running(is_target_running)?;
                let sample = reloader.sample(wait, is_target_running);
                samples.extend(is_counted.then_some(sample));
            }
            Ok(samples)
        })?;
        let (samples, round_trips) = samples;
        let buffer_bytes = reloader.buffer_bytes();
        let task = session.placement.target.task;
        let Some(running_probe) = find_probe(&mut self.running_probes, probe) else {
            return Ok(());
        };
        running_probe.cost_ns += own_cpu_ns;
        let complete_samples = samples.into_iter().map(|sample| PrimeProbeSample {
            round_trips_ns: round_trips,
            ..sample
        });
        running_probe.eviction_samples.extend(complete_samples);
        let running_samples = running_probe
            .eviction_samples
            .iter()
            .filter(|sample| sample.target_running)
            .count();
        if running_samples >= requested_samples as usize || running_probe.cost_ns >= probe.budget_ns
        {
            let samples = std::mem::take(&mut running_probe.eviction_samples);
            let cost = vec![(None, running_probe.cost_ns), (Some(task), off_ns)];
            let wait_ns = wait.as_nanos() as u64;
            self.record_result(
                probe,
                ProbeEvidence::PrimeProbe {
                    task,
                    buffer_bytes,
                    wait_ns,
                    samples,
                },
                cost,
            );
        }
        Ok(())
    }

    fn run_neighbor_probe<K: Kernel>(
        &mut self,
        session: &ProbeSession<'_, K>,
        probe: &ProbeRequest,
        neighbor: Neighbor,
        progress: &ProgressReports,
    ) -> std::io::Result<()> {
        // The measured size is preferred to the reported one.
        let cache_bytes = self
            .reloader
            .as_ref()
            .map(PrimeProber::cache_bytes)
            .or(session.placement.cache_bytes);
        let mut neighbor_load = NeighborLoad::new(neighbor, cache_bytes);
        let task = session.placement.target.task;
        let (pid, thread) = (
            session.placement.target.pid,
            session.placement.target.thread,
        );
        let mut counter = self
            .instructions
            .and_then(|code| RunningTotal::start(thread.tid, code));
        let mut read_totals = || {
            let instructions = counter.as_mut().and_then(RunningTotal::read_value);
            ProgressTotals::read_current(&*session.lock(), progress, pid, thread, instructions)
        };
        let ((rates, _gate), own_cpu_ns, off_ns) = session.run(|switch| {
            // The task alone and beside the neighbor in the order A B B A, then the neighbor alone; work and seconds of
            // each.
            let mut rates = BracketCounts::default();
            let mut neighbor_work = (0.0, 0.0);
            switch.set_running(true)?;
            for with_neighbor in [false, true, true, false] {
                let (totals_before, start) = (read_totals(), Instant::now());
                let lines = if with_neighbor {
                    neighbor_load.run(PHASE_TIME)
                } else {
                    spin(PHASE_TIME)
                };
                let seconds = start.elapsed().as_secs_f64();
                rates.add_phase(with_neighbor, totals_before, read_totals(), seconds);
                if with_neighbor {
                    neighbor_work = (neighbor_work.0 + lines as f64, neighbor_work.1 + seconds);
                }
            }
            switch.set_running(false)?;
            let start = Instant::now();
            let lines = neighbor_load.run(PHASE_TIME);
            let alone_ns = start.elapsed().as_nanos() as f64 / (lines as f64).max(1.0);
            Ok((
                rates,
                neighbor_work.1 * 1e9 / neighbor_work.0.max(1.0),
                alone_ns,
            ))
        })?;
        let (rates, neighbor_corun_ns, neighbor_alone_ns) = rates;
        let (rate_event, rates) = rates
            .best_rates()
            .map_or((None, None), |(rate_of, rates)| (rate_of, Some(rates)));
        let evidence = ProbeEvidence::NeighborSlowdown {
            task,
            neighbor,
            neighbor_alone_ns,
            neighbor_corun_ns,
            task_alone_rate: rates.map(|(alone_rate, _)| alone_rate),
            task_corun_rate: rates.map(|(_, corun_rate)| corun_rate),
            rate_event,
        };
        self.record_result(
            probe,
            evidence,
            vec![(None, own_cpu_ns), (Some(task), off_ns)],
        );
        Ok(())
    }

    /// Watches words of the task's process for a while, without moving any thread.
    pub(crate) fn run_reuse_probe<K: Kernel>(
        &mut self,
        kernel: &Mutex<K>,
        probe: &ProbeRequest,
        target: &Participant,
        locations: u32,
    ) {
        let Some(running_probe) = find_probe(&mut self.running_probes, probe) else {
            return;
        };
        let remaining = (locations as usize).saturating_sub(running_probe.reuse_samples.len());
        let start = Instant::now();
        let subject = watchpoint::WatchTarget {
            pid: target.pid,
            tid: target.thread.tid,
            candidates: &mut running_probe.watch_candidates,
            max_samples: remaining,
            max_word_time: Duration::from_millis(50),
            deadline: start + WATCH_TIME,
            seed: running_probe.cost_ns ^ u64::from(probe.id.0),
        };
        let guard = lock(kernel);
        let reuses = watchpoint::sample_reuses(&*guard, subject);
        drop(guard);
        match reuses {
            Err(error) => self.record_failure(probe, &error),
            Ok(samples) => {
                running_probe.reuse_samples.extend(samples);
                running_probe.cost_ns += start.elapsed().as_nanos() as u64;
                if running_probe.reuse_samples.len() >= locations as usize
                    || running_probe.cost_ns >= probe.budget_ns
                {
                    let samples = std::mem::take(&mut running_probe.reuse_samples);
                    let cost = vec![(None, running_probe.cost_ns)];
                    self.record_result(
                        probe,
                        ProbeEvidence::Reuses {
                            task: target.task,
                            samples,
                        },
                        cost,
                    );
                }
            }
        }
    }

    /// Samples accesses for a while, without moving any thread.
    pub(crate) fn run_sampling_probe(
        &mut self,
        probe: &ProbeRequest,
        subjects: &SampledThreads<'_>,
        requested_period: u32,
        remote_only: bool,
        max_samples: u32,
    ) {
        let Ok(facility) = &self.facility else { return };
        let Some(running_probe) = find_probe(&mut self.running_probes, probe) else {
            return;
        };
        let start = Instant::now();
        // The period varies by up to an eighth in either direction, so that no loop of the program runs in step with
        // it.
        let jitter = (running_probe.sampled_events ^ u64::from(probe.id.0))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            >> 54;
        let period =
            facility.accepted_period(u64::from(requested_period) * (3_584 + jitter) / 4_096);
        match sample_accesses(facility, subjects, period, remote_only) {
            Err(error) => self.record_failure(probe, &error),
            Ok((samples, events)) => {
                running_probe.access_samples.extend(samples);
                running_probe.sampled_events += events;
                running_probe.cost_ns += start.elapsed().as_nanos() as u64;
                if running_probe.access_samples.len() >= max_samples as usize
                    || running_probe.cost_ns >= probe.budget_ns
                {
                    let mut samples = std::mem::take(&mut running_probe.access_samples);
                    samples.truncate(max_samples as usize);
                    let (events, cost) = (
                        running_probe.sampled_events,
                        vec![(None, running_probe.cost_ns)],
                    );
                    let sample_period = u32::try_from(period).unwrap_or(u32::MAX);
                    let line_bytes = subjects.line_bytes;
                    let evidence = ProbeEvidence::Samples {
                        sample_period,
                        events,
                        line_bytes,
                        samples,
                    };
                    self.record_result(probe, evidence, cost);
                }
            }
        }
    }

    /// Records the misses of a thread for a while, without moving it.
    pub(crate) fn run_miss_trace(
        &mut self,
        probe: &ProbeRequest,
        (task, tid): (TaskId, i32),
        entries: u32,
        line_bytes: u32,
    ) {
        let Ok(tracer) = &self.tracer else { return };
        let max_entries =
            entries.min(u32::try_from(probe.budget_ns / RECORD_COST_NS).unwrap_or(u32::MAX));
        let cpu_before_ns = thread_time_ns();
        match tracer.record(tid, max_entries, MAX_TRACE_TIME) {
            Err(error) => self.record_failure(probe, &error),
            Ok(log) => {
                let records = log.addresses.len() as u64;
                let lines = log
                    .addresses
                    .iter()
                    .map(|address| address / u64::from(line_bytes.max(1)))
                    .collect();
                let evidence = ProbeEvidence::Trace {
                    task,
                    space: AddressKind::Virtual,
                    line_bytes,
                    lines,
                    code_positions: Vec::new(),
                    lost: log.lost_misses,
                    counts: log.counts,
                    elapsed_ns: log.elapsed_ns,
                };
                let cost = vec![
                    (None, thread_time_ns() - cpu_before_ns),
                    (Some(task), records * RECORD_COST_NS),
                ];
                self.record_result(probe, evidence, cost);
            }
        }
    }
}

/// The call on which a probe depends.
fn call_of(kind: &ProbeKind) -> KernelCall {
    match kind {
        ProbeKind::ReuseTimes { .. } => KernelCall::OpenWatchpoint,
        ProbeKind::MissTrace { .. }
        | ProbeKind::AccessSamples { .. }
        | ProbeKind::SuperSets { .. } => KernelCall::OpenCounter,
        ProbeKind::PingPong { .. } => KernelCall::SetAffinity,
        ProbeKind::PrimeProbe { .. }
        | ProbeKind::Neighbor { .. }
        | ProbeKind::CoRunRows { .. }
        | ProbeKind::PairedRows { .. } => KernelCall::HoldThreads,
    }
}

/// Occupies a CPU without accessing memory.
fn spin(duration: Duration) -> u64 {
    let start = Instant::now();
    while start.elapsed() < duration {
        std::hint::spin_loop();
    }
    0
}

/// The threads of a bracket; all are restored when [`ProbeSession::run`] returns.
struct ProbeSession<'a, K: Kernel> {
    kernel: &'a Mutex<K>,
    placement: &'a ProbePlacement,
}

/// Switches the probed task on and off its CPU during a bracket.
struct TargetSwitch<'a, 'b, K: Kernel> {
    session: &'a ProbeSession<'b, K>,
    should_spin: &'a AtomicBool,
    off_since: Option<Instant>,
    off_ns: u64,
}

type RoundTrips = Option<(f64, f64)>;

impl<K: Kernel> ProbeSession<'_, K> {
    fn lock(&self) -> std::sync::MutexGuard<'_, K> {
        lock(self.kernel)
    }

    fn set_policy(&self, participant: &Participant, is_waiting: bool) -> std::io::Result<()> {
        set_turn_policy(
            &*self.lock(),
            participant.thread,
            &participant.scheduling,
            is_waiting,
        )
    }

    /// Keeps the others off, runs `measure` on the probe's CPU, and restores all threads whatever happens. Returns
    /// its result and the ping-pong around it, our processor time, and the time for which the task was kept off.
    fn run<T>(
        &self,
        measure: impl FnOnce(&mut TargetSwitch<'_, '_, K>) -> std::io::Result<T>,
    ) -> std::io::Result<((T, RoundTrips), u64, u64)> {
        let placement = self.placement;
        let (should_spin, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        let outcome = std::thread::scope(|scope| {
            let occupier = scope.spawn(|| occupy_cpu(placement.target_cpu, &should_spin, &is_over));
            // Other threads may exit meanwhile, which only leaves fewer to keep off.
            placement
                .other_participants
                .iter()
                .for_each(|participant| drop(self.set_policy(participant, true)));
            // A separate statement, because the lock would otherwise be held through `measure`, which takes it as well.
            let pin_result = set_affinity_checked(
                &*self.lock(),
                placement.target.thread,
                &placement.target_cpus(),
            );
            let measure_result = pin_result.and_then(|()| {
                let probe_thread = PinnedThread::new(placement.probe_cpu)?;
                let trip_before = round_trip((placement.probe_cpu, placement.target_cpu)).ok();
                let mut switch = TargetSwitch {
                    session: self,
                    should_spin: &should_spin,
                    off_since: None,
                    off_ns: 0,
                };
                let measurement = measure(&mut switch)?;
                switch.set_running(true)?;
                let trip_after = round_trip((placement.probe_cpu, placement.target_cpu)).ok();
                let round_trips = trip_before
                    .zip(trip_after)
                    .map(|(trip_before, trip_after)| {
                        (trip_before.round_trip_ns, trip_after.round_trip_ns)
                    });
                Ok((
                    (measurement, round_trips),
                    probe_thread.cost_ns(),
                    switch.off_ns,
                ))
            });
            is_over.store(true, Ordering::Relaxed);
            occupier.thread().unpark();
            let spinner_ns = occupier.join().unwrap_or(0);
            measure_result
                .map(|(measure, prober_ns, off_ns)| (measure, prober_ns + spinner_ns, off_ns))
        });
        // A thread that has exited needs nothing; after any other failure the original is in the journal.
        drop(self.set_policy(&placement.target, false));
        drop(set_affinity_checked(
            &*self.lock(),
            placement.target.thread,
            &placement.target.cpus,
        ));
        placement
            .other_participants
            .iter()
            .for_each(|participant| drop(self.set_policy(participant, false)));
        outcome
    }
}

impl<K: Kernel> TargetSwitch<'_, '_, K> {
    /// Lets the task run, or keeps it off its CPU.
    fn set_running(&mut self, should_run: bool) -> std::io::Result<()> {
        let target = &self.session.placement.target;
        if should_run {
            self.should_spin.store(false, Ordering::Relaxed);
            self.off_ns += self
                .off_since
                .take()
                .map_or(0, |since| since.elapsed().as_nanos() as u64);
            self.session.set_policy(target, false)
        } else {
            self.should_spin.store(true, Ordering::Relaxed);
            self.off_since.get_or_insert_with(Instant::now);
            self.session.set_policy(target, true)
        }
    }
}

/// Spins on a CPU while `should_spin` is set, until `is_over` is set; returns its processor time.
fn occupy_cpu(cpu: CpuId, should_spin: &AtomicBool, is_over: &AtomicBool) -> u64 {
    let Ok(pinned) = PinnedThread::new(cpu) else {
        return 0;
    };
    while !is_over.load(Ordering::Relaxed) {
        if should_spin.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    pinned.cost_ns()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::FakeHost;
    use crate::kernel::LinuxHost;

    /// If the probed thread exits during or before a probe and its id is reused: is the new thread's mask unchanged?
    #[test]
    fn a_thread_that_reuses_a_probed_threads_id_keeps_its_mask() {
        let host = FakeHost::default();
        let thread = host.add_thread(5, 5, 1, "0-3");
        let target = Participant {
            task: TaskId(0),
            pid: 5,
            thread,
            scheduling: SchedParams::default(),
            cpus: "0-1".parse().unwrap(),
        };
        // The probe's own threads run on a CPU that this test may use.
        let cpu = LinuxHost::new("/")
            .affinity(std::process::id() as i32)
            .unwrap()
            .first()
            .unwrap();
        let (target_cpu, probe_cpu) = (CpuId(cpu), CpuId(cpu));
        let placement = ProbePlacement {
            target,
            other_participants: Vec::new(),
            target_cpu,
            probe_cpu,
            cache_bytes: None,
        };
        let kernel = Mutex::new(host);
        let session = ProbeSession {
            kernel: &kernel,
            placement: &placement,
        };
        let reused = |host: &FakeHost| host.change_thread(5, |thread| thread.start_ticks += 1);
        let mask = || kernel.lock().unwrap().threads.borrow()[&5].cpus.to_string();
        let outcome = session.run(|_| {
            assert_eq!(mask(), cpu.to_string());
            let host = kernel.lock().unwrap();
            reused(&host);
            host.change_thread(5, |thread| thread.cpus = "2-3".parse().unwrap());
            Ok(())
        });
        drop(outcome);
        assert_eq!(mask(), "2-3", "it ended during the probe");
        assert!(session.run(|_| Ok(())).is_err(), "it has ended before");
        assert_eq!(mask(), "2-3");
    }
}
