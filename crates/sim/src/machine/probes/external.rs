//! Measurements that need no PMU, as on a host without one: a neighbor beside a task, a line between two CPUs.

use cachemate_core::{
    CpuId, CpuSet, Neighbor, ProbeEvidence, ProbeId, ProbeKind, RefusalReason, TaskId,
};

use super::super::{PROBE_PROCESS, SimMachine};
use super::ProbeRefusal;
use super::injected::{InjectedPattern, InjectedSource};
use crate::os::gangs::assign_cpus;
use crate::os::queues::Slot;
use crate::os::system::SeatHold;

/// Maximum length of a phase of a measurement with a neighbor, in nominal time; a small budget shortens the phases.
const MAX_PHASE_NS: u64 = 10_000_000;
/// Length of a phase of ping-pong in cycles, which is about two hundred rounds.
const PING_PONG_CYCLES: u64 = 400_000;
/// Number of instructions between two turns of a ping-pong thread, enough for the other thread to have its turn.
const PING_PONG_GAP_INSTR: u64 = 1_000;
/// Footprint of a stream, which is larger than any cache.
const STREAM_BYTES: u64 = 64 << 20;
const LINE_BYTES: u64 = 64;

enum ExternalProbeKind {
    Neighbor {
        task: TaskId,
        slot: Slot,
        neighbor: Neighbor,
    },
    PingPong {
        cpus: (CpuId, CpuId),
    },
}

/// The threads that run during a phase: the measured task, and threads of the machine itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct MeasurementPhase {
    runs_task: bool,
    /// Range of the machine's own threads that run, as first index and end.
    thread_range: Option<(usize, usize)>,
}

pub(super) struct ExternalProbe {
    id: ProbeId,
    kind: ExternalProbeKind,
    reserved_cpus: CpuSet,
    thread_slots: Vec<Slot>,
    phases: Vec<MeasurementPhase>,
    current_phase: usize,
    phase_cycles: u64,
    /// Whether the first half of the phase, which only warms up, is over and counting has begun.
    is_counting: bool,
    phase_end: u64,
    start_cycle: Option<u64>,
    work_before: (f64, f64),
    /// For each phase, the task's instructions and the accesses of the machine's own threads, per nominal nanosecond.
    rates_by_phase: Vec<(f64, f64)>,
    held_cycles: u64,
}

impl ExternalProbe {
    pub fn new(
        probe_kind: &ProbeKind,
        id: ProbeId,
        budget_cycles: u64,
        machine: &mut SimMachine,
    ) -> Result<Self, ProbeRefusal> {
        let base_address = (1 << 40) + u64::from(id.0 % 1024) * (1 << 30);

        let (kind, reserved_cpus, sources, phases, phase_cycles) = match probe_kind {
            ProbeKind::PingPong { cpus } => {
                let are_valid = cpus.0 != cpus.1
                    && [cpus.0, cpus.1]
                        .iter()
                        .all(|cpu| cpu.0 < machine.spec.cpus());
                if !are_valid {
                    return Err((
                        RefusalReason::NotSupported,
                        "two different CPUs of this machine are needed".into(),
                    ));
                }
                let reserved_cpus: CpuSet = [cpus.0.0, cpus.1.0].into_iter().collect();

                // Both threads use one line in the first phase, and a line each in the second; the difference is the
                // time to transfer the line.
                let pattern_at = |line_index: u64| {
                    (
                        base_address + line_index * LINE_BYTES,
                        InjectedPattern::OneLine {
                            gap_instr: PING_PONG_GAP_INSTR,
                        },
                    )
                };
                let sources = vec![pattern_at(0), pattern_at(0), pattern_at(2), pattern_at(4)];

                let phases = vec![
                    MeasurementPhase {
                        runs_task: false,
                        thread_range: Some((0, 2)),
                    },
                    MeasurementPhase {
                        runs_task: false,
                        thread_range: Some((2, 4)),
                    },
                ];
                (
                    ExternalProbeKind::PingPong { cpus: *cpus },
                    reserved_cpus,
                    sources,
                    phases,
                    PING_PONG_CYCLES.min(budget_cycles / 4).max(1),
                )
            }
            ProbeKind::Neighbor { task, neighbor } => {
                let exited_refusal = (RefusalReason::NotFound, format!("{task:?} has ended"));
                let slot = machine
                    .slot_of(*task)
                    .filter(|_| !machine.has_exited(*task))
                    .ok_or(exited_refusal)?;
                let reserved_cpus = cpus_of_shared_cache(slot, machine)?;
                let pattern = match neighbor {
                    Neighbor::Chase { footprint_bytes } => InjectedPattern::Chase {
                        lines: (footprint_bytes / LINE_BYTES).max(1),
                    },
                    Neighbor::Pirate { footprint_bytes } => InjectedPattern::Sweep {
                        lines: (footprint_bytes / LINE_BYTES).max(1),
                    },
                    Neighbor::Stream => InjectedPattern::Sweep {
                        lines: STREAM_BYTES / LINE_BYTES,
                    },
                };
                let phases = [(true, None), (false, Some((0, 1))), (true, Some((0, 1)))].map(
                    |(task, thread_range)| MeasurementPhase {
                        runs_task: task,
                        thread_range,
                    },
                );
                let max_phase_cycles =
                    budget_cycles / (3 * u64::from(reserved_cpus.count()).max(1));
                let phase_cycles = machine
                    .clock
                    .to_cycles(MAX_PHASE_NS)
                    .min(max_phase_cycles)
                    .max(1);
                let kind = ExternalProbeKind::Neighbor {
                    task: *task,
                    slot,
                    neighbor: *neighbor,
                };
                (
                    kind,
                    reserved_cpus,
                    vec![(base_address, pattern)],
                    phases.to_vec(),
                    phase_cycles,
                )
            }
            _ => {
                return Err((
                    RefusalReason::NotSupported,
                    "not a probe from outside".to_string(),
                ));
            }
        };
        let thread_slots = sources
            .into_iter()
            .map(|(first_byte, pattern)| {
                let source = Box::new(InjectedSource::new(first_byte, pattern));
                let slot = machine.system.add_task(
                    PROBE_PROCESS,
                    source,
                    reserved_cpus.clone(),
                    1.0,
                    true,
                );
                machine.system.set_asleep(slot, true);
                slot
            })
            .collect();
        Ok(ExternalProbe {
            id,
            kind,
            reserved_cpus,
            thread_slots,
            phases,
            current_phase: 0,
            phase_cycles,
            is_counting: false,
            phase_end: 0,
            start_cycle: None,
            work_before: (0.0, 0.0),
            rates_by_phase: Vec::new(),
            held_cycles: 0,
        })
    }

    pub fn next_check_cycle(&self) -> u64 {
        if self.start_cycle.is_some() {
            self.phase_end
        } else {
            u64::MAX
        }
    }

    pub fn cost_cycles(&self) -> u64 {
        self.held_cycles
    }

    pub fn poll(&mut self, machine: &mut SimMachine) -> bool {
        if machine.cpu_holder.is_some_and(|holder| holder != self.id) {
            return false;
        }
        let now = machine.system.now();
        if let ExternalProbeKind::Neighbor { slot, .. } = self.kind
            && machine.system.task(slot).exited_cycle.is_some()
        {
            return true;
        }

        if self.start_cycle.is_none() {
            machine.cpu_holder = Some(self.id);
            self.start_cycle = Some(now);
            self.enter_phase(machine);
        }

        while self.phase_end <= now && self.current_phase < self.phases.len() {
            if !self.is_counting {
                self.is_counting = true;
                self.phase_end = now + self.phase_cycles / 2 + 1;
                self.work_before = self.work_so_far(machine);
                continue;
            }
            let elapsed_ns = machine
                .clock
                .to_nominal_ns(self.phase_cycles / 2 + 1 + now - self.phase_end)
                .max(1) as f64;

            let work = self.work_so_far(machine);
            self.rates_by_phase.push((
                (work.0 - self.work_before.0) / elapsed_ns,
                (work.1 - self.work_before.1) / elapsed_ns,
            ));
            self.held_cycles += self.phase_cycles * u64::from(self.reserved_cpus.count());
            self.current_phase += 1;
            if self.current_phase < self.phases.len() {
                self.enter_phase(machine);
            }
        }

        self.current_phase == self.phases.len()
    }

    fn enter_phase(&mut self, machine: &mut SimMachine) {
        let phase = self.phases[self.current_phase];
        let mut members: Vec<(Slot, Option<u32>)> = Vec::new();
        let active_slots: Vec<Slot> = phase.thread_range.map_or_else(Vec::new, |(start, end)| {
            self.thread_slots[start..end].to_vec()
        });
        match self.kind {
            ExternalProbeKind::PingPong { cpus } => {
                members.extend(
                    active_slots
                        .iter()
                        .copied()
                        .zip([Some(cpus.0.0), Some(cpus.1.0)]),
                );
            }
            ExternalProbeKind::Neighbor { slot, .. } => {
                members.extend(phase.runs_task.then_some((slot, None)));
                members.extend(active_slots.iter().map(|&thread_slot| (thread_slot, None)));
            }
        }
        for &slot in &self.thread_slots {
            machine
                .system
                .set_asleep(slot, !active_slots.contains(&slot));
        }
        let mut seats = assign_cpus(&members, &self.reserved_cpus, &machine.system.dispatcher);
        separate_from_task_core(&mut seats, &self.thread_slots, machine, &self.reserved_cpus);
        machine.system.set_hold(Some(SeatHold {
            cpus: self.reserved_cpus.clone(),
            seats,
        }));
        self.is_counting = false;
        self.phase_end = machine.system.now() + self.phase_cycles / 2;
    }

    /// Instructions of the task, and accesses of the machine's own threads, so far.
    fn work_so_far(&self, machine: &SimMachine) -> (f64, f64) {
        let task_instr = match self.kind {
            ExternalProbeKind::Neighbor { slot, .. } => {
                machine.system.task_counters(slot).instructions as f64
            }
            ExternalProbeKind::PingPong { .. } => 0.0,
        };
        let accesses_of = |&slot: &Slot| {
            machine
                .system
                .thread(slot)
                .and_then(|thread| thread.progress())
        };
        (
            task_instr,
            self.thread_slots.iter().filter_map(accesses_of).sum(),
        )
    }

    pub fn take_evidence(&mut self, is_complete: bool) -> Option<ProbeEvidence> {
        // If its own threads made no progress, a phase has measured nothing.
        let has_progress = |(phase, rates): (&MeasurementPhase, &(f64, f64))| {
            phase.thread_range.is_none() || rates.1 > 0.0
        };
        if !is_complete
            || self.rates_by_phase.len() < self.phases.len()
            || !self
                .phases
                .iter()
                .zip(&self.rates_by_phase)
                .all(has_progress)
        {
            return None;
        }

        let ns_per_access = |rate: f64| 1.0 / rate;
        Some(match self.kind {
            ExternalProbeKind::PingPong { cpus } => {
                // Each thread transfers the line once per turn, so a round consists of two turns.
                let turn_ns = |phase: usize| ns_per_access(self.rates_by_phase[phase].1 / 2.0);
                ProbeEvidence::PingPong {
                    cpus,
                    round_trip_ns: 2.0 * (turn_ns(0) - turn_ns(1)),
                }
            }
            ExternalProbeKind::Neighbor { task, neighbor, .. } => ProbeEvidence::NeighborSlowdown {
                task,
                neighbor,
                neighbor_alone_ns: ns_per_access(self.rates_by_phase[1].1),
                neighbor_corun_ns: ns_per_access(self.rates_by_phase[2].1),
                task_alone_rate: Some(self.rates_by_phase[0].0),
                task_corun_rate: Some(self.rates_by_phase[2].0),
                rate_event: None,
            },
        })
    }

    pub fn end(&mut self, machine: &mut SimMachine) {
        for slot in self.thread_slots.drain(..) {
            machine.system.end_own_task(slot);
        }
    }
}

/// The CPUs below the last-level cache that the task uses.
///
/// # Errors
/// The probe is refused if there are fewer than two such CPUs.
fn cpus_of_shared_cache(slot: Slot, machine: &SimMachine) -> Result<CpuSet, ProbeRefusal> {
    let state = machine.system.dispatcher.task(slot);
    let cpu = state
        .last_cpu
        .or_else(|| state.allowed_cpus.first())
        .unwrap_or(0);
    let shared_caches = machine
        .topology
        .caches
        .iter()
        .filter(|cache| cache.last_level && cache.cpus.contains(cpu));

    match shared_caches
        .map(|cache| cache.cpus.clone())
        .next()
        .filter(|cpus| cpus.count() > 1)
    {
        Some(cpus) => Ok(cpus),
        None => Err((
            RefusalReason::NoCapacity,
            format!("CPU {cpu} shares no last-level cache with another"),
        )),
    }
}

/// Moves a thread of the machine to another core than the task's if one is free, because contexts of one core share
/// more than the cache.
fn separate_from_task_core(
    seats: &mut [(u32, Slot)],
    thread_slots: &[Slot],
    machine: &SimMachine,
    reserved_cpus: &CpuSet,
) {
    let core_of = |cpu: u32| machine.topology.cpus[cpu as usize].core;
    let Some(task_cpu) = seats
        .iter()
        .find(|(_, slot)| !thread_slots.contains(slot))
        .map(|&(cpu, _)| cpu)
    else {
        return;
    };

    let used_cpus: Vec<u32> = seats.iter().map(|&(cpu, _)| cpu).collect();
    for (cpu, _) in seats
        .iter_mut()
        .filter(|(_, slot)| thread_slots.contains(slot))
    {
        let free_cpu = reserved_cpus
            .iter()
            .find(|&other| core_of(other) != core_of(task_cpu) && !used_cpus.contains(&other));
        if let Some(free_cpu) = free_cpu.filter(|_| core_of(*cpu) == core_of(task_cpu)) {
            *cpu = free_cpu;
        }
    }
}
