//! Measures co-runs: CASC's rows (4.2.2.1) and its secondary measurement (4.2.2.2), among others.
//!
//! An interval begins when exactly the requested tasks are on processors below the cache, after the settling time. It
//! ends when any of them leaves, when enough has been collected, or with the window. With `boost`, the machine brings
//! each row together in turn. Each of its tasks gets a CPU, regardless of its affinity in the plan. Otherwise, a plan
//! that has just put the intensive tasks on one CPU would end the measurement. The other CPUs of the cache idle. This
//! is stronger than CASC's raised priorities, which wait for rows to occur; without `boost`, the machine waits as well.

use cachemate_core::{
    CacheId, CacheLevel, CounterEvent, CpuSet, EventCounts, ProbeEvidence, ProbeId, ProbeKind,
    RefusalReason, RowInterval, TaskId, TimeSpan,
};

use super::super::SimMachine;
use super::ProbeRefusal;
use crate::hw::{CacheCounters, TaskCounters};
use crate::os::gangs::assign_allowed_cpus;
use crate::os::queues::Slot;
use crate::os::system::SeatHold;

struct CoRunRow {
    slots: Vec<Slot>,
    collected_cycles: u64,
    is_abandoned: bool,
}

/// An interval that has begun but not ended.
struct OpenInterval {
    members: Vec<Slot>,
    row: usize,
    counting_start: u64,
    start_counters: Option<(CacheCounters, Vec<TaskCounters>)>,
}

pub(super) struct CoRunProbe {
    id: ProbeId,
    cache: CacheId,
    cpus: CpuSet,
    level: CacheLevel,
    /// Rows to measure. For a probe beside a task, there is one row, that of the task, and its peers change.
    rows: Vec<CoRunRow>,
    peers: Option<Vec<Slot>>,
    cycles_per_row: u64,
    settling_cycles: u64,
    is_boosted: bool,
    open_interval: Option<OpenInterval>,
    intervals: Vec<RowInterval>,
    hold_start_and_empty_cpus: Option<(u64, u64)>,
    idle_cycles: u64,
}

impl CoRunProbe {
    pub fn new(
        probe_kind: &ProbeKind,
        id: ProbeId,
        machine: &SimMachine,
    ) -> Result<Self, ProbeRefusal> {
        let (cache, rows, peers, total_ns, settle_ns, boost) = match probe_kind {
            ProbeKind::CoRunRows {
                cache,
                rows,
                total_ns,
                settle_ns,
                boost,
            } => (*cache, rows.clone(), None, *total_ns, *settle_ns, *boost),
            ProbeKind::PairedRows {
                cache,
                task,
                peers,
                total_ns,
            } => (
                *cache,
                vec![vec![*task]],
                Some(peers.clone()),
                *total_ns,
                0,
                false,
            ),
            _ => {
                return Err((
                    RefusalReason::NotSupported,
                    "not a measurement of rows".to_string(),
                ));
            }
        };

        let Some(cache_description) = machine.topology.caches.get(cache.0 as usize) else {
            return Err((
                RefusalReason::NotSupported,
                format!("{cache:?} does not exist"),
            ));
        };

        let live_slots = |tasks: &[TaskId]| -> Result<Vec<Slot>, ProbeRefusal> {
            let live_slot =
                |&task: &TaskId| machine.slot_of(task).filter(|_| !machine.has_exited(task));
            let row_slots: Vec<Slot> = tasks.iter().filter_map(live_slot).collect();
            if row_slots.len() == tasks.len() {
                Ok(row_slots)
            } else {
                Err((RefusalReason::NotFound, "a task has ended".into()))
            }
        };

        let mut probe = CoRunProbe {
            id,
            cache,
            cpus: cache_description.cpus.clone(),
            level: cache_description.level,
            rows: Vec::new(),
            peers: peers.as_deref().map(live_slots).transpose()?,
            cycles_per_row: machine.clock.to_cycles(total_ns),
            settling_cycles: if settle_ns == 0 {
                0
            } else {
                machine.clock.to_cycles(settle_ns)
            },
            is_boosted: boost,
            open_interval: None,
            intervals: Vec::new(),
            hold_start_and_empty_cpus: None,
            idle_cycles: 0,
        };

        for row in &rows {
            let tasks = live_slots(row)?;
            if boost && probe.seats_of_row(&tasks, machine).len() < tasks.len() {
                let message = format!(
                    "the CPUs below {cache:?} do not allow a row of {} tasks",
                    tasks.len()
                );
                return Err((RefusalReason::NoCapacity, message));
            }
            probe.rows.push(CoRunRow {
                slots: tasks,
                collected_cycles: 0,
                is_abandoned: false,
            });
        }
        Ok(probe)
    }

    fn seats_of_row(&self, tasks: &[Slot], machine: &SimMachine) -> Vec<(u32, Slot)> {
        let members: Vec<(Slot, Option<u32>)> = tasks.iter().map(|&slot| (slot, None)).collect();
        let cpus_of = |slot: Slot| {
            let is_pinned = machine
                .task_of_slot
                .get(&slot)
                .is_some_and(|task| machine.tasks[task.0 as usize].is_pinned);
            if is_pinned {
                machine.system.dispatcher.task(slot).allowed_cpus.clone()
            } else {
                self.cpus.clone()
            }
        };
        assign_allowed_cpus(&members, &self.cpus, &machine.system.dispatcher, &cpus_of)
    }

    fn is_done(&self, row: usize) -> bool {
        self.rows[row].is_abandoned || self.rows[row].collected_cycles >= self.cycles_per_row
    }

    pub fn idle_cycles(&self) -> u64 {
        self.idle_cycles
    }

    pub fn next_check_cycle(&self) -> u64 {
        self.open_interval
            .as_ref()
            .map_or(u64::MAX, |interval| match interval.start_counters {
                None => interval.counting_start,
                Some(_) => {
                    interval.counting_start
                        + self
                            .cycles_per_row
                            .saturating_sub(self.rows[interval.row].collected_cycles)
                            .max(1)
                }
            })
    }

    /// Begins and ends intervals by the tasks that are running. Returns whether every row has been measured long enough
    /// or was abandoned.
    pub fn poll(&mut self, machine: &mut SimMachine) -> bool {
        let now = machine.system.now();
        for row in &mut self.rows {
            row.is_abandoned |= row
                .slots
                .iter()
                .any(|&slot| machine.system.task(slot).exited_cycle.is_some());
        }

        let running_slots: Vec<Slot> = self
            .cpus
            .iter()
            .filter_map(|cpu| machine.system.dispatcher.running_task(cpu))
            .collect();

        if let Some(interval) = &self.open_interval {
            let departed_slot = interval
                .members
                .iter()
                .copied()
                .find(|slot| !running_slots.contains(slot));
            let is_complete = interval.start_counters.is_some()
                && self.rows[interval.row].collected_cycles
                    + (now - interval.counting_start.min(now))
                    >= self.cycles_per_row;
            if departed_slot.is_some()
                || running_slots.len() != interval.members.len()
                || is_complete
            {
                self.close_interval(machine, departed_slot);
            }
        }

        if self.open_interval.is_none() {
            self.start_matching_interval(&running_slots, now);
        }

        if let Some(interval) = self
            .open_interval
            .as_mut()
            .filter(|interval| interval.start_counters.is_none() && interval.counting_start <= now)
        {
            let tasks = interval
                .members
                .iter()
                .map(|&slot| machine.system.task_counters(slot))
                .collect();
            interval.start_counters = Some((machine.cache_counters(self.cache), tasks));
        }
        self.seat_next_row(machine);
        (0..self.rows.len()).all(|row| self.is_done(row))
    }

    fn start_matching_interval(&mut self, running_slots: &[Slot], now: u64) {
        let is_running_row = |tasks: &[Slot]| {
            tasks.len() == running_slots.len()
                && tasks.iter().all(|slot| running_slots.contains(slot))
        };
        let matching_row = match &self.peers {
            None => (0..self.rows.len())
                .find(|&row| !self.is_done(row) && is_running_row(&self.rows[row].slots)),
            Some(peers) => {
                let task = self.rows[0].slots[0];
                let has_peers_only = running_slots
                    .iter()
                    .all(|slot| *slot == task || peers.contains(slot));
                (!self.is_done(0)
                    && running_slots.contains(&task)
                    && running_slots.len() > 1
                    && has_peers_only)
                    .then_some(0)
            }
        };
        let Some(row) = matching_row else { return };

        let mut members = self.rows[row].slots.clone();
        members.extend(
            running_slots
                .iter()
                .filter(|slot| !self.rows[row].slots.contains(slot)),
        );
        self.open_interval = Some(OpenInterval {
            members,
            row,
            counting_start: now + self.settling_cycles,
            start_counters: None,
        });
    }

    fn close_interval(&mut self, machine: &SimMachine, departed_slot: Option<Slot>) {
        let Some(interval) = self.open_interval.take() else {
            return;
        };
        let Some((cache_before, tasks_before)) = interval.start_counters else {
            return;
        };

        let now = machine.system.now();
        let elapsed = now - interval.counting_start;
        if elapsed == 0 {
            return;
        }

        self.rows[interval.row].collected_cycles += elapsed;
        let task_of = |slot: &Slot| machine.task_of_slot.get(slot).copied();
        let cache_after = machine.cache_counters(self.cache);
        let level = self.level;
        let cache_counts = EventCounts::exact([
            (
                CounterEvent::References(level),
                cache_after.demand.references - cache_before.demand.references,
            ),
            (
                CounterEvent::Misses(level),
                cache_after.demand.all_misses() - cache_before.demand.all_misses(),
            ),
        ]);

        let counts_of_task = |(slot, counts_before): (&Slot, &TaskCounters)| {
            machine
                .system
                .task_counters(*slot)
                .since(counts_before)
                .all_event_counts(&machine.levels)
        };

        self.intervals.push(RowInterval {
            tasks: interval.members.iter().filter_map(task_of).collect(),
            cache: self.cache,
            span: TimeSpan {
                start_ns: machine.clock.to_nominal_ns(interval.counting_start),
                elapsed_ns: machine.clock.to_nominal_ns(elapsed),
                elapsed_cycles: Some(elapsed),
            },
            ended_by_task: departed_slot.as_ref().and_then(task_of),
            cache_counts,
            task_counts: interval
                .members
                .iter()
                .zip(&tasks_before)
                .map(counts_of_task)
                .collect(),
        });
    }

    /// With `is_boosted`, gives the next unfinished row its CPUs once no other probe holds CPUs.
    fn seat_next_row(&mut self, machine: &mut SimMachine) {
        if !self.is_boosted || machine.cpu_holder.is_some_and(|holder| holder != self.id) {
            return;
        }
        let now = machine.system.now();
        if let Some((hold_start, empty_cpus)) = self.hold_start_and_empty_cpus.take() {
            self.idle_cycles += (now - hold_start) * empty_cpus;
        }

        let next_row = (0..self.rows.len()).find(|&row| !self.is_done(row));
        machine.cpu_holder = next_row.map(|_| self.id);
        let seat_hold = next_row.map(|row| {
            let tasks = &self.rows[row].slots;
            self.hold_start_and_empty_cpus =
                Some((now, u64::from(self.cpus.count()) - tasks.len() as u64));
            SeatHold {
                cpus: self.cpus.clone(),
                seats: self.seats_of_row(tasks, machine),
            }
        });
        machine.system.set_hold(seat_hold);
    }

    /// Intervals of the window that ends. The current interval ends with the window, and another
    /// one begins in the next window.
    pub fn take_evidence(&mut self, machine: &mut SimMachine) -> Option<ProbeEvidence> {
        let open_interval = self
            .open_interval
            .as_ref()
            .filter(|interval| interval.start_counters.is_some());
        if let Some((members, row)) =
            open_interval.map(|interval| (interval.members.clone(), interval.row))
        {
            self.close_interval(machine, None);
            if !self.is_done(row) {
                let now = machine.system.now();
                self.open_interval = Some(OpenInterval {
                    members,
                    row,
                    counting_start: now,
                    start_counters: None,
                });
            }
        }

        let intervals = std::mem::take(&mut self.intervals);
        (!intervals.is_empty()).then_some(ProbeEvidence::Rows(intervals))
    }
}
