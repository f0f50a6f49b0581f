//! Probes with the same kinds of results, and the same costs, as on a host.
//!
//! A policy that were given its curves for nothing would look better here than it is on a host,
//! where a trace slows its program down and a solo interval keeps all others waiting. So what a
//! probe answers is drawn from the program's own curve, and what it costs is charged to those who
//! pay on a host. A probe with rows runs the tasks of one row at a time together on the cache's
//! CPUs, while all other tasks wait; counts refer to the tasks that ran. A trace interrupts its
//! task at every entry; its addresses follow the curve, so that an LRU analysis recovers it. Reuse
//! times follow from the same curve.
//!
//! For example, a program with ten log entries per thousand instructions and an instruction a cycle
//! fills a log of 80,000 entries in 8 million cycles of work. At 3,000 cycles for an interrupt, the
//! log takes 248 million cycles, in which the program hardly advances and its neighbors evict its
//! lines; the log is therefore checked in steps, and sees that.

use cachemate_core::{
    AccessSample, AddressKind, CacheId, CounterEvent, DataSource, EventCount, EventCounts, Plan,
    PlanItem, ProbeEvidence, ProbeKind, ProbeRequest, ProbeResult, RefusalReason, RefusedItem,
    ReuseSample, RowInterval, TaskId, TimeSpan,
};

use super::IntervalMachine;
use super::counter_noise::NoiseState;
use crate::engine::{DEMAND, REFERENCES, TaskTotals};
use crate::run_queues::QueueRotation;

/// A probe in progress.
#[derive(Clone, Debug, PartialEq)]
pub struct OngoingProbe {
    pub probe: ProbeRequest,
    state: ProbeState,
    started_ns: u64,
    cost_ns: Vec<(Option<TaskId>, u64)>,
}

impl OngoingProbe {
    /// `None` if the probe logs no accesses.
    fn logged_task(&self) -> Option<TaskId> {
        match self.probe.kind {
            ProbeKind::MissTrace { task, .. } => Some(task),
            _ => None,
        }
    }

    fn holds_cpus(&self) -> bool {
        matches!(
            self.probe.kind,
            ProbeKind::CoRunRows { .. } | ProbeKind::PairedRows { .. }
        )
    }
}

#[derive(Clone, Debug, PartialEq)]
enum ProbeState {
    Waiting,
    /// A row is running: whether it has settled, its end, and the totals of its tasks at the time when it had
    /// settled.
    Row {
        row_index: usize,
        is_settled: bool,
        until_ns: u64,
        totals_before: Vec<TaskTotals>,
        found: Vec<RowInterval>,
    },
    /// Results are collected until this time.
    Until {
        ns: u64,
        totals_before: TaskTotals,
        /// Share of the task's time that the log's interrupts take until then.
        interrupt_share: f64,
    },
    Ready(Box<ProbeEvidence>),
    Answered,
}

/// Approximate number of times that a log is checked before it is full.
const LOG_CHECKS: u64 = 16;

fn refuse_probe(probe: &ProbeRequest, reason: RefusalReason, message: &str) -> RefusedItem {
    RefusedItem {
        item: PlanItem::Probe(probe.id),
        reason,
        message: message.to_string(),
    }
}

impl IntervalMachine {
    /// Starts new probes, and ends those that the plan no longer requests.
    pub(super) fn apply_probes(&mut self, plan: &Plan, refusals: &mut Vec<RefusedItem>) {
        let is_requested = |active: &OngoingProbe| plan.probes.contains(&active.probe);
        let is_row_dropped = self
            .probes
            .iter()
            .any(|active| matches!(active.state, ProbeState::Row { .. }) && !is_requested(active));
        let (continuing, dropped): (Vec<OngoingProbe>, Vec<OngoingProbe>) =
            std::mem::take(&mut self.probes)
                .into_iter()
                .partition(is_requested);
        self.probes = continuing;

        dropped
            .iter()
            .filter_map(OngoingProbe::logged_task)
            .for_each(|task| self.charge_overhead(task));
        self.answered_probes
            .retain(|id| plan.probes.iter().any(|probe| probe.id == *id));
        if is_row_dropped {
            self.restore_gangs();
        }

        for probe in &plan.probes {
            let is_running = self.probes.iter().any(|active| active.probe.id == probe.id);
            if is_running || self.answered_probes.contains(&probe.id) {
                continue;
            }

            match &probe.kind {
                ProbeKind::SuperSets { .. } => {
                    refusals.push(refuse_probe(
                        probe,
                        RefusalReason::NotSupported,
                        "the interval machine has no sets",
                    ));
                }
                ProbeKind::Neighbor { .. } | ProbeKind::PrimeProbe { .. } => {
                    let message =
                        "neighbors are modeled from profiles here; use counters or a trace";
                    refusals.push(refuse_probe(probe, RefusalReason::NotSupported, message));
                }
                _ => self.probes.push(OngoingProbe {
                    probe: probe.clone(),
                    state: ProbeState::Waiting,
                    started_ns: self.now_ns,
                    cost_ns: Vec::new(),
                }),
            }
        }
    }

    pub(super) fn next_probe_ns(&self) -> u64 {
        let are_cpus_reserved = self.has_probe_with_cpus();
        let due_ns = |active: &OngoingProbe| match active.state {
            // The probe begins when the preceding one has ended, which is a separate event.
            ProbeState::Waiting if are_cpus_reserved && active.holds_cpus() => u64::MAX,
            ProbeState::Waiting | ProbeState::Ready(_) => self.now_ns,
            ProbeState::Row { until_ns, .. } => until_ns,
            ProbeState::Until { ns, .. } => ns,
            ProbeState::Answered => u64::MAX,
        };
        self.probes.iter().map(due_ns).min().unwrap_or(u64::MAX)
    }

    fn totals_of_task(&self, task: TaskId) -> TaskTotals {
        self.slot_of(task)
            .map_or_else(TaskTotals::default, |slot| *self.engine.task_totals(slot))
    }

    /// Advances every probe to the present. Returns `true` if any probe has a result.
    pub(super) fn run_probes(&mut self) -> bool {
        let mut has_result = false;
        for index in 0..self.probes.len() {
            let ongoing_probe = self.probes[index].clone();
            let next_state = match ongoing_probe.state {
                ProbeState::Waiting => self.start_probe(&ongoing_probe.probe),
                ProbeState::Row { until_ns, .. } if until_ns <= self.now_ns => {
                    self.advance_rows(&ongoing_probe)
                }
                ProbeState::Until {
                    ns,
                    totals_before: before,
                    ..
                } if ns <= self.now_ns => match self.remaining_log_time(&ongoing_probe, &before) {
                    Some((ns, interrupt_share)) => ProbeState::Until {
                        ns,
                        totals_before: before,
                        interrupt_share,
                    },
                    None => self.collect_evidence(&ongoing_probe.probe, &before),
                },
                other => other,
            };
            has_result |= matches!(next_state, ProbeState::Ready(_));

            if matches!(next_state, ProbeState::Ready(_))
                && !matches!(self.probes[index].state, ProbeState::Ready(_))
            {
                let start_ns = self.probes[index].started_ns;
                self.probes[index].cost_ns =
                    self.cost_of(&ongoing_probe.probe, self.now_ns - start_ns);
            }
            self.probes[index].state = next_state;
            if let Some(task) = self.probes[index].logged_task() {
                self.charge_overhead(task);
            }
        }

        has_result
    }

    /// Share of a task's time that the interrupts of a log take.
    pub(super) fn logging_share(&self, task: TaskId) -> f64 {
        let interrupt_share_of = |active: &OngoingProbe| match active.state {
            ProbeState::Until {
                interrupt_share: taken_share,
                ..
            } if active.logged_task() == Some(task) => Some(taken_share),
            _ => None,
        };
        self.probes
            .iter()
            .find_map(interrupt_share_of)
            .unwrap_or(0.0)
    }

    /// A traced task is charged for its interrupts, and tasks kept off a cache are charged for the
    /// time during which it was held.
    fn cost_of(&self, probe: &ProbeRequest, duration_ns: u64) -> Vec<(Option<TaskId>, u64)> {
        match &probe.kind {
            ProbeKind::MissTrace { task, entries, .. } => {
                vec![(
                    Some(*task),
                    (self.interrupts_ns(f64::from(*entries)) as u64).min(duration_ns),
                )]
            }
            ProbeKind::CoRunRows { rows, .. } => {
                let paused_ns = |task: &TaskId| {
                    let rows_without = rows.iter().filter(|row| !row.contains(task)).count() as u64;
                    duration_ns * rows_without / rows.len().max(1) as u64
                };
                self.tasks
                    .iter()
                    .map(|interval_task| (Some(interval_task.task), paused_ns(&interval_task.task)))
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    fn interrupts_ns(&self, entries: f64) -> f64 {
        entries * self.spec.counters.interrupt_cycles as f64 * 1e9 / self.spec.hertz as f64
    }

    fn start_probe(&mut self, probe: &ProbeRequest) -> ProbeState {
        match &probe.kind {
            ProbeKind::CoRunRows {
                cache,
                rows,
                settle_ns,
                ..
            } => {
                // One probe at a time may hold CPUs.
                if self.has_probe_with_cpus() {
                    return ProbeState::Waiting;
                }

                self.reserve_cpus(*cache, rows.first().map_or(&[], Vec::as_slice));
                let until_ns = self.now_ns + (*settle_ns).max(1);
                ProbeState::Row {
                    row_index: 0,
                    is_settled: false,
                    until_ns,
                    totals_before: Vec::new(),
                    found: Vec::new(),
                }
            }
            ProbeKind::PairedRows {
                cache, task, peers, ..
            } => {
                if self.has_probe_with_cpus() {
                    return ProbeState::Waiting;
                }

                let row: Vec<TaskId> = std::iter::once(*task)
                    .chain(peers.iter().copied())
                    .collect();
                self.reserve_cpus(*cache, &row);
                ProbeState::Row {
                    row_index: 0,
                    is_settled: false,
                    until_ns: self.now_ns + 1,
                    totals_before: Vec::new(),
                    found: Vec::new(),
                }
            }
            ProbeKind::MissTrace { task, entries, .. } => {
                let (pace_ns, interrupt_share) = self.log_pace(*task, f64::from(*entries));
                let ns = self.now_ns
                    + self
                        .next_log_step_ns(pace_ns, *entries)
                        .min(probe.budget_ns.max(1));
                let start_totals = self.totals_of_task(*task);
                ProbeState::Until {
                    ns,
                    totals_before: start_totals,
                    interrupt_share,
                }
            }
            ProbeKind::ReuseTimes { task, .. } => {
                let ns = self.now_ns + probe.budget_ns.clamp(1, 100_000_000);
                ProbeState::Until {
                    ns,
                    totals_before: self.totals_of_task(*task),
                    interrupt_share: 0.0,
                }
            }
            ProbeKind::AccessSamples { .. } => {
                let ns = self.now_ns + probe.budget_ns.clamp(1, 1_000_000_000);
                ProbeState::Until {
                    ns,
                    totals_before: TaskTotals::default(),
                    interrupt_share: 0.0,
                }
            }
            ProbeKind::PingPong { cpus } => {
                let run_queues = &self.engine.run_queues;
                let is_same_cache = run_queues.cache_of(cpus.0.0) == run_queues.cache_of(cpus.1.0);
                let package_of_cpu =
                    |cpu: u32| cpu / (self.spec.cores_per_package * self.spec.contexts_per_core);
                let coherence = &self.spec.coherence;
                let memory_cycles = self.spec.memory.local_latency_cycles;

                let cycles = if is_same_cache {
                    self.spec
                        .last_level_cache()
                        .map_or(memory_cycles, |cache| cache.latency_cycles)
                } else if package_of_cpu(cpus.0.0) == package_of_cpu(cpus.1.0) {
                    coherence.same_package_cycles.unwrap_or(memory_cycles)
                } else {
                    coherence.other_package_cycles.unwrap_or(memory_cycles)
                };
                let round_trip_ns = 2.0 * f64::from(cycles) * 1e9 / self.spec.hertz as f64;
                ProbeState::Ready(Box::new(ProbeEvidence::PingPong {
                    cpus: *cpus,
                    round_trip_ns,
                }))
            }
            ProbeKind::SuperSets { .. }
            | ProbeKind::Neighbor { .. }
            | ProbeKind::PrimeProbe { .. } => ProbeState::Answered,
        }
    }

    /// One task for each of the cache's CPUs, if it may run there; nothing else runs on them.
    fn reserve_cpus(&mut self, cache: CacheId, row: &[TaskId]) {
        let cpus = self
            .topology
            .caches
            .iter()
            .find(|described| described.id == cache)
            .map(|described| described.cpus.clone());
        let is_cpu_online = |cpu: &u32| self.engine.run_queues.is_online(*cpu);
        let cpus: cachemate_core::CpuSet = cpus
            .unwrap_or_default()
            .iter()
            .filter(is_cpu_online)
            .collect();

        let slots: Vec<u32> = row.iter().filter_map(|task| self.slot_of(*task)).collect();
        let members: Vec<(u32, Option<u32>)> = slots
            .into_iter()
            .take(cpus.count() as usize)
            .map(|slot| (slot, None))
            .collect();
        let endless_cycles = self.cycles_of(1 << 50);
        self.engine
            .run_queues
            .set_rotations(vec![QueueRotation::single_gang(
                cpus,
                endless_cycles,
                members,
            )]);
    }

    pub(super) fn has_probe_with_cpus(&self) -> bool {
        self.probes
            .iter()
            .any(|active| matches!(active.state, ProbeState::Row { .. }))
    }

    /// Restores the gangs that ran before the probe.
    fn restore_gangs(&mut self) {
        self.pass_gangs_to_queues();
        self.engine.run_queues.balance();
    }

    /// Advances the probe if a row has settled, or if a row has ended and the next one begins.
    fn advance_rows(&mut self, active_probe: &OngoingProbe) -> ProbeState {
        let ProbeState::Row {
            row_index: at,
            is_settled: settled,
            totals_before: before,
            mut found,
            ..
        } = active_probe.state.clone()
        else {
            return ProbeState::Answered;
        };

        let (cache, rows, total_ns, settle_ns) = match &active_probe.probe.kind {
            ProbeKind::CoRunRows {
                cache,
                rows,
                total_ns,
                settle_ns,
                ..
            } => (*cache, rows.clone(), *total_ns, *settle_ns),
            ProbeKind::PairedRows {
                cache,
                task,
                peers,
                total_ns,
            } => (
                *cache,
                vec![
                    std::iter::once(*task)
                        .chain(peers.iter().copied())
                        .collect(),
                ],
                *total_ns,
                0,
            ),
            _ => return ProbeState::Answered,
        };

        let Some(row) = rows.get(at) else {
            self.restore_gangs();
            return ProbeState::Ready(Box::new(ProbeEvidence::Rows(found)));
        };
        if !settled {
            let start_totals = row.iter().map(|task| self.totals_of_task(*task)).collect();
            return ProbeState::Row {
                row_index: at,
                is_settled: true,
                until_ns: self.now_ns + total_ns.max(1),
                totals_before: start_totals,
                found,
            };
        }

        found.push(self.build_row_interval(cache, row, &before, total_ns));
        match rows.get(at + 1) {
            Some(next) => {
                self.reserve_cpus(cache, next);
                let until_ns = self.now_ns + settle_ns.max(1);
                ProbeState::Row {
                    row_index: at + 1,
                    is_settled: false,
                    until_ns,
                    totals_before: Vec::new(),
                    found,
                }
            }
            None => {
                self.restore_gangs();
                ProbeState::Ready(Box::new(ProbeEvidence::Rows(found)))
            }
        }
    }

    fn build_row_interval(
        &self,
        cache: CacheId,
        row: &[TaskId],
        totals_before: &[TaskTotals],
        total_ns: u64,
    ) -> RowInterval {
        let level = self.counter_scopes.level;
        let build_counts = |instr: f64, cycles: f64, references: f64, misses: f64| {
            let counts = [
                (CounterEvent::Instructions, instr),
                (CounterEvent::Cycles, cycles),
                (CounterEvent::References(level), references),
                (CounterEvent::Misses(level), misses),
            ];
            EventCounts::exact(counts.map(|(event, count)| (event, count as u64)))
        };

        let mut sums = [0.0; 4];
        let mut task_counts = Vec::new();
        for (task, earlier) in row.iter().zip(totals_before) {
            let totals = self.totals_of_task(*task);
            let task_sums = [
                totals.instructions - earlier.instructions,
                totals.cycles - earlier.cycles,
                totals.counts[REFERENCES] - earlier.counts[REFERENCES],
                totals.counts[DEMAND] - earlier.counts[DEMAND],
            ];
            sums.iter_mut()
                .zip(task_sums)
                .for_each(|(sum, task_sum)| *sum += task_sum);

            task_counts.push(build_counts(
                task_sums[0],
                task_sums[1],
                task_sums[2],
                task_sums[3],
            ));
        }

        RowInterval {
            tasks: row.to_vec(),
            cache,
            span: TimeSpan {
                start_ns: self.now_ns - total_ns,
                elapsed_ns: total_ns,
                elapsed_cycles: None,
            },
            ended_by_task: None,
            cache_counts: build_counts(sums[0], sums[1], sums[2], sums[3]),
            task_counts,
        }
    }

    /// Misses of the first level or, if there are more, references of the contended cache.
    fn log_entries_per_instr(&self, task: TaskId) -> f64 {
        let Some(slot) = self.slot_of(task) else {
            return 0.0;
        };
        let phase = &self.engine.program_of(slot).phases[self.engine.phase_index(slot) as usize];
        let first_level = phase
            .private_levels
            .iter()
            .find(|private| private.level == cachemate_core::CacheLevel::L1Data);
        first_level.map_or(phase.references_per_instr, |private| {
            private.misses_per_instr.max(phase.references_per_instr)
        })
    }

    /// References of the first level; `None` if the profile lacks them.
    fn data_accesses_per_instr(&self, slot: u32) -> Option<f64> {
        let phase = &self.engine.program_of(slot).phases[self.engine.phase_index(slot) as usize];
        let first_level = phase
            .private_levels
            .iter()
            .find(|private| private.level == cachemate_core::CacheLevel::L1Data);
        first_level.map(|private| private.references_per_instr.max(private.misses_per_instr))
    }

    fn speed_of(&self, task: TaskId) -> f64 {
        self.slot_of(task)
            .map_or(0.0, |slot| self.engine.running_instr_per_cycle(slot))
    }

    /// Nanoseconds in which the task makes this many log entries at its present speed, and the
    /// share of them that interrupts take (one per entry).
    fn log_pace(&self, task: TaskId, entries: f64) -> (u64, f64) {
        let interrupts_ns = self.interrupts_ns(entries);
        let instructions = entries / self.log_entries_per_instr(task).max(1e-6);
        let run_ns = instructions / self.speed_of(task).max(1e-9) * 1e9 / self.spec.hertz as f64;
        (
            (interrupts_ns + run_ns) as u64 + 1,
            interrupts_ns / (interrupts_ns + run_ns.max(1.0)),
        )
    }

    /// A log is checked in steps because a traced task loses lines in the cache, which changes the
    /// rate of its entries.
    fn next_log_step_ns(&self, remaining_ns: u64, entries: u32) -> u64 {
        let min_step_ns = self.interrupts_ns(f64::from(entries)) as u64 / LOG_CHECKS + 1;
        (remaining_ns / LOG_CHECKS)
            .max(min_step_ns)
            .min(remaining_ns)
    }

    /// Time at which an incomplete log is checked again within its budget, and the share of the
    /// task's time that its interrupts take; `None` if the log is complete.
    fn remaining_log_time(
        &self,
        active_probe: &OngoingProbe,
        totals_before: &TaskTotals,
    ) -> Option<(u64, f64)> {
        let ProbeKind::MissTrace { task, entries, .. } = active_probe.probe.kind else {
            return None;
        };

        self.slot_of(task)?;
        let remaining_ns = active_probe
            .probe
            .budget_ns
            .checked_sub(self.now_ns - active_probe.started_ns)
            .filter(|&ns| ns > 0)?;
        let instructions = self.totals_of_task(task).instructions - totals_before.instructions;
        let misses = instructions * self.log_entries_per_instr(task);
        if misses + 0.5 >= f64::from(entries) {
            return None;
        }

        let (pace_ns, interrupt_share) = self.log_pace(task, f64::from(entries) - misses.max(0.0));
        Some((
            self.now_ns + self.next_log_step_ns(pace_ns, entries).min(remaining_ns),
            interrupt_share,
        ))
    }

    fn collect_evidence(&mut self, probe: &ProbeRequest, totals_before: &TaskTotals) -> ProbeState {
        let evidence = match &probe.kind {
            ProbeKind::MissTrace { task, entries, .. } => {
                self.draw_trace(*task, *entries, totals_before)
            }
            ProbeKind::ReuseTimes { task, locations } => {
                self.sample_reuses(*task, *locations, totals_before)
            }
            ProbeKind::AccessSamples {
                processes,
                sample_period: one_in,
                max_samples: at_most,
                ..
            } => {
                let processes = processes.clone();
                self.draw_access_samples(&processes, *one_in, *at_most)
            }
            _ => return ProbeState::Answered,
        };

        ProbeState::Ready(Box::new(evidence))
    }

    /// LRU stack distances are drawn from the curve: distance `d` has the probability that a cache
    /// of `d` lines hits and a cache of `d - 1` lines does not.
    fn draw_trace(
        &mut self,
        task: TaskId,
        entries: u32,
        totals_before: &TaskTotals,
    ) -> ProbeEvidence {
        let totals = self.totals_of_task(task);
        let mut noise = NoiseState::new(self.options.seed ^ self.window_count, task.0);
        // The number of entries is limited by the work that the task did, because co-runners may have slowed the task
        // down since the log began.
        let misses =
            (totals.instructions - totals_before.instructions) * self.log_entries_per_instr(task);
        let entries = entries.min((misses + 0.5).max(1.0) as u32);
        let lines = self.slot_of(task).map_or(Vec::new(), |slot| {
            crate::synthetic_trace::draw_addresses(
                self.engine.distance_distribution(slot),
                entries,
                self.engine.capacity_lines(),
                || noise.generator.draw_unit(),
            )
        });

        let reading = |event, count: f64| EventCount {
            event,
            count: count as u64,
            enabled_share: 1.0,
        };
        let level = self.counter_scopes.level;
        let readings = [
            reading(
                CounterEvent::Instructions,
                totals.instructions - totals_before.instructions,
            ),
            reading(CounterEvent::Cycles, totals.cycles - totals_before.cycles),
            reading(
                CounterEvent::References(level),
                totals.counts[REFERENCES] - totals_before.counts[REFERENCES],
            ),
            reading(
                CounterEvent::Misses(level),
                totals.counts[DEMAND] - totals_before.counts[DEMAND],
            ),
        ];

        ProbeEvidence::Trace {
            task,
            space: AddressKind::Physical,
            line_bytes: self.engine.line_bytes() as u32,
            lines,
            code_positions: Vec::new(),
            lost: Some(0),
            counts: EventCounts(readings.to_vec()),
            elapsed_ns: ((totals.cycles - totals_before.cycles) * 1e9 / self.spec.hertz as f64)
                as u64,
        }
    }

    /// A line is reused after the number of accesses that the program makes while its footprint
    /// grows to the line's distance. Watch points see all data accesses; if the profile states how
    /// many of them hit the first level, those are reused at once.
    fn sample_reuses(
        &mut self,
        task: TaskId,
        locations: u32,
        totals_before: &TaskTotals,
    ) -> ProbeEvidence {
        let totals = self.totals_of_task(task);
        let mut noise = NoiseState::new(self.options.seed ^ self.window_count ^ 0x5eed, task.0);
        let (watched_instr, speed) = (
            totals.instructions - totals_before.instructions,
            self.speed_of(task).max(1e-9),
        );
        let Some(slot) = self.slot_of(task) else {
            return ProbeEvidence::Reuses {
                task,
                samples: Vec::new(),
            };
        };
        let accesses_per_instr = self
            .data_accesses_per_instr(slot)
            .unwrap_or_else(|| self.log_entries_per_instr(task));
        let l1_miss_share = self.log_entries_per_instr(task) / accesses_per_instr.max(1e-12);
        let distances = self.engine.distance_distribution(slot);
        let draw_sample = |_| {
            if noise.generator.draw_unit() >= l1_miss_share {
                return ReuseSample {
                    accesses: Some(0),
                    elapsed_ns: 0,
                    reused: true,
                };
            }
            let distance = distances.value_at(noise.generator.draw_unit());
            let lines = distance.map_or(self.engine.capacity_lines(), |lines| lines as f32);
            let instr = self.engine.window_instr(slot, lines);
            let is_reused = distance.is_some() && instr <= watched_instr;
            let elapsed_ns =
                (instr.min(watched_instr) / speed * 1e9 / self.spec.hertz as f64) as u64;
            ReuseSample {
                accesses: is_reused.then_some((instr * accesses_per_instr) as u64),
                elapsed_ns,
                reused: is_reused,
            }
        };
        ProbeEvidence::Reuses {
            task,
            samples: (0..locations).map(draw_sample).collect(),
        }
    }

    /// Accesses to shared regions that another cache answered, at the present rates.
    fn draw_access_samples(
        &mut self,
        processes: &[cachemate_core::ProcessId],
        sample_period: u32,
        max_samples: u32,
    ) -> ProbeEvidence {
        let (line_bytes, now_ns) = (self.engine.line_bytes(), self.now_ns);
        let mut noise = NoiseState::new(self.options.seed ^ self.window_count ^ 0xacce, 1);
        let (mut samples, mut events) = (Vec::new(), 0u64);
        let candidates: Vec<(TaskId, u32)> = self
            .tasks
            .iter()
            .filter(|interval_task| {
                processes.contains(&interval_task.process) && !interval_task.exited
            })
            .map(|interval_task| (interval_task.task, interval_task.slot))
            .collect();

        for (task, slot) in candidates {
            let phase =
                self.engine.program_of(slot).phases[self.engine.phase_index(slot) as usize].clone();
            let remote_rate = self.engine.remote_per_instr(slot)
                * self.engine.running_instr_per_cycle(slot)
                * self.spec.hertz as f64;
            let access_rate: f64 = phase
                .sharing
                .iter()
                .map(|region_use| region_use.reads_per_instr + region_use.writes_per_instr)
                .sum();

            for region_use in &phase.sharing {
                let count = remote_rate
                    * (region_use.reads_per_instr + region_use.writes_per_instr)
                    / access_rate.max(1e-30);
                events += count as u64;
                let sample_count = (count / f64::from(sample_period.max(1))) as u32;
                for _ in 0..sample_count.min(max_samples.saturating_sub(samples.len() as u32)) {
                    let line_offset = (noise.generator.draw_unit()
                        * (region_use.bytes / line_bytes).max(1.0))
                        as u64;
                    samples.push(AccessSample {
                        task,
                        virtual_line: ((u64::from(region_use.region) + 1) << 32) + line_offset,
                        physical_line: None,
                        source: DataSource::RemoteCache,
                        latency_cycles: None,
                        at_ns: now_ns,
                    });
                }
            }
        }

        ProbeEvidence::Samples {
            sample_period,
            events,
            line_bytes: line_bytes as u32,
            samples,
        }
    }

    pub(super) fn take_results(&mut self) -> Vec<ProbeResult> {
        let mut results = Vec::new();
        for active_probe in &mut self.probes {
            if !matches!(active_probe.state, ProbeState::Ready(_)) {
                continue;
            }

            if let ProbeState::Ready(evidence) =
                std::mem::replace(&mut active_probe.state, ProbeState::Answered)
            {
                let cost_ns = std::mem::take(&mut active_probe.cost_ns);
                results.push(ProbeResult {
                    probe: active_probe.probe.id,
                    evidence: *evidence,
                    complete: true,
                    cost_ns,
                });
                self.answered_probes.push(active_probe.probe.id);
            }
        }

        let answered_ids = &self.answered_probes;
        self.probes
            .retain(|active| !answered_ids.contains(&active.probe.id));
        results
    }
}
