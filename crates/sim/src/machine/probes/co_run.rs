//! Measures co-runs: CASC's rows (4.2.2.1) and its secondary measurement (4.2.2.2), among others.
//!
//! An interval begins when exactly the requested tasks are on processors below the cache, after the settling time. It
//! ends when any of them leaves, when enough has been collected, or with the window. With `boost`, the machine brings
//! each row together in turn. Each of its tasks gets a CPU, regardless of its affinity in the plan, because a plan that
//! has just put the intensive tasks on one CPU must not end the measurement. The other CPUs of the cache idle. This is
//! stronger than CASC's raised priorities, which wait for rows to occur; without `boost`, the machine waits as well.

use cachemate_core::{
    CacheId, CacheLevel, CounterEvent, CpuSet, EventCounts, ProbeEvidence, ProbeId, ProbeKind, RefusalReason,
    RowInterval, TaskId, TimeSpan,
};

use super::super::SimMachine;
use super::ProbeRefusal;
use crate::hw::{CacheCounters, TaskCounters};
use crate::os::gangs::assign_seats_with;
use crate::os::queues::Slot;
use crate::os::system::SeatHold;

struct CoRunRow {
    tasks: Vec<Slot>,
    collected: u64,
    given_up: bool,
}

/// An interval that has begun but not ended.
struct OpenInterval {
    members: Vec<Slot>,
    row: usize,
    counts_from: u64,
    begun: Option<(CacheCounters, Vec<TaskCounters>)>,
}

pub(super) struct CoRunProbe {
    id: ProbeId,
    cache: CacheId,
    cpus: CpuSet,
    level: CacheLevel,
    /// Rows to measure. For a probe beside a task, there is one row, that of the task, and its peers change.
    rows: Vec<CoRunRow>,
    peers: Option<Vec<Slot>>,
    total: u64,
    settle: u64,
    boost: bool,
    open_interval: Option<OpenInterval>,
    intervals: Vec<RowInterval>,
    held_since: Option<(u64, u64)>,
    idle_cycles: u64,
}

impl CoRunProbe {
    pub fn new(probe_kind: &ProbeKind, id: ProbeId, machine: &SimMachine) -> Result<Self, ProbeRefusal> {
        let (cache, rows, peers, total_ns, settle_ns, boost) = match probe_kind {
            ProbeKind::CoRunRows { cache, rows, total_ns, settle_ns, boost } => {
                (*cache, rows.clone(), None, *total_ns, *settle_ns, *boost)
            }
            ProbeKind::PairedRows { cache, task, peers, total_ns } => {
                (*cache, vec![vec![*task]], Some(peers.clone()), *total_ns, 0, false)
            }
            _ => return Err((RefusalReason::NotSupported, "not a measurement of rows".to_string())),
        };
        let Some(described) = machine.topology.caches.get(cache.0 as usize) else {
            return Err((RefusalReason::NotSupported, format!("{cache:?} does not exist")));
        };
        let live_slots = |tasks: &[TaskId]| -> Result<Vec<Slot>, ProbeRefusal> {
            let slot = |&task: &TaskId| machine.slot_of(task).filter(|_| !machine.is_gone(task));
            let row_slots: Vec<Slot> = tasks.iter().filter_map(slot).collect();
            if row_slots.len() == tasks.len() {
                Ok(row_slots)
            } else {
                Err((RefusalReason::NotFound, "a task has ended".into()))
            }
        };
        let mut probe = CoRunProbe {
            id,
            cache,
            cpus: described.cpus.clone(),
            level: described.level,
            rows: Vec::new(),
            peers: peers.as_deref().map(live_slots).transpose()?,
            total: machine.clock.to_cycles(total_ns),
            settle: if settle_ns == 0 { 0 } else { machine.clock.to_cycles(settle_ns) },
            boost,
            open_interval: None,
            intervals: Vec::new(),
            held_since: None,
            idle_cycles: 0,
        };
        for row in &rows {
            let tasks = live_slots(row)?;
            if boost && probe.assign_cpus(&tasks, machine).len() < tasks.len() {
                let message = format!("the CPUs below {cache:?} do not allow a row of {} tasks", tasks.len());
                return Err((RefusalReason::NoCapacity, message));
            }
            probe.rows.push(CoRunRow { tasks, collected: 0, given_up: false });
        }
        Ok(probe)
    }

    fn assign_cpus(&self, tasks: &[Slot], machine: &SimMachine) -> Vec<(u32, Slot)> {
        let members: Vec<(Slot, Option<u32>)> = tasks.iter().map(|&slot| (slot, None)).collect();
        let cpus_of = |slot: Slot| {
            let fixed = machine.task_of_slot.get(&slot).is_some_and(|task| machine.tasks[task.0 as usize].fixed);
            if fixed { machine.system.dispatcher.task(slot).allowed.clone() } else { self.cpus.clone() }
        };
        assign_seats_with(&members, &self.cpus, &machine.system.dispatcher, &cpus_of)
    }

    fn is_done(&self, row: usize) -> bool {
        self.rows[row].given_up || self.rows[row].collected >= self.total
    }

    pub fn idle_cycles(&self) -> u64 {
        self.idle_cycles
    }

    pub fn next_due(&self) -> u64 {
        self.open_interval.as_ref().map_or(u64::MAX, |interval| match interval.begun {
            None => interval.counts_from,
            Some(_) => interval.counts_from + self.total.saturating_sub(self.rows[interval.row].collected).max(1),
        })
    }

    /// Checks which tasks are running, and returns `true` once every row has enough.
    pub fn poll(&mut self, machine: &mut SimMachine) -> bool {
        let now = machine.system.now();
        for row in &mut self.rows {
            row.given_up |= row.tasks.iter().any(|&slot| machine.system.task(slot).exited_cycle.is_some());
        }
        let running_slots: Vec<Slot> =
            self.cpus.iter().filter_map(|cpu| machine.system.dispatcher.running(cpu)).collect();
        if let Some(interval) = &self.open_interval {
            let departed = interval.members.iter().copied().find(|slot| !running_slots.contains(slot));
            let is_complete = interval.begun.is_some()
                && self.rows[interval.row].collected + (now - interval.counts_from.min(now)) >= self.total;
            if departed.is_some() || running_slots.len() != interval.members.len() || is_complete {
                self.close(machine, departed);
            }
        }
        if self.open_interval.is_none() {
            self.open_matching_row(&running_slots, now);
        }
        if let Some(interval) =
            self.open_interval.as_mut().filter(|interval| interval.begun.is_none() && interval.counts_from <= now)
        {
            let tasks = interval.members.iter().map(|&slot| machine.system.task_counters(slot)).collect();
            interval.begun = Some((machine.cache_counters(self.cache), tasks));
        }
        self.seat_next_row(machine);
        (0..self.rows.len()).all(|row| self.is_done(row))
    }

    fn open_matching_row(&mut self, running_slots: &[Slot], now: u64) {
        let is_running_set = |tasks: &[Slot]| {
            tasks.len() == running_slots.len() && tasks.iter().all(|slot| running_slots.contains(slot))
        };
        let open_row = match &self.peers {
            None => (0..self.rows.len()).find(|&row| !self.is_done(row) && is_running_set(&self.rows[row].tasks)),
            Some(peers) => {
                let task = self.rows[0].tasks[0];
                let has_peers_only = running_slots.iter().all(|slot| *slot == task || peers.contains(slot));
                (!self.is_done(0) && running_slots.contains(&task) && running_slots.len() > 1 && has_peers_only)
                    .then_some(0)
            }
        };
        let Some(row) = open_row else { return };
        let mut members = self.rows[row].tasks.clone();
        members.extend(running_slots.iter().filter(|slot| !self.rows[row].tasks.contains(slot)));
        self.open_interval = Some(OpenInterval { members, row, counts_from: now + self.settle, begun: None });
    }

    fn close(&mut self, machine: &SimMachine, departed: Option<Slot>) {
        let Some(interval) = self.open_interval.take() else { return };
        let Some((cache_before, tasks_before)) = interval.begun else { return };
        let now = machine.system.now();
        let elapsed = now - interval.counts_from;
        if elapsed == 0 {
            return;
        }
        self.rows[interval.row].collected += elapsed;
        let task = |slot: &Slot| machine.task_of_slot.get(slot).copied();
        let end_counts = machine.cache_counters(self.cache);
        let level = self.level;
        let cache_counts = EventCounts::exact([
            (CounterEvent::References(level), end_counts.demand.references - cache_before.demand.references),
            (CounterEvent::Misses(level), end_counts.demand.all_misses() - cache_before.demand.all_misses()),
        ]);
        let of_task = |(slot, counts_before): (&Slot, &TaskCounters)| {
            machine.system.task_counters(*slot).subtract_earlier(counts_before).all_event_counts(&machine.levels)
        };
        self.intervals.push(RowInterval {
            tasks: interval.members.iter().filter_map(task).collect(),
            cache: self.cache,
            span: TimeSpan {
                start_ns: machine.clock.nominal_ns(interval.counts_from),
                elapsed_ns: machine.clock.nominal_ns(elapsed),
                elapsed_cycles: Some(elapsed),
            },
            ended_by_task: departed.as_ref().and_then(task),
            cache_counts,
            task_counts: interval.members.iter().zip(&tasks_before).map(of_task).collect(),
        });
    }

    /// With `boost`, gives the next unfinished row its CPUs once no other probe holds CPUs.
    fn seat_next_row(&mut self, machine: &mut SimMachine) {
        if !self.boost || machine.holder.is_some_and(|holder| holder != self.id) {
            return;
        }
        let now = machine.system.now();
        if let Some((since, empty)) = self.held_since.take() {
            self.idle_cycles += (now - since) * empty;
        }
        let next = (0..self.rows.len()).find(|&row| !self.is_done(row));
        machine.holder = next.map(|_| self.id);
        let hold = next.map(|row| {
            let tasks = &self.rows[row].tasks;
            self.held_since = Some((now, u64::from(self.cpus.count()) - tasks.len() as u64));
            SeatHold { cpus: self.cpus.clone(), seats: self.assign_cpus(tasks, machine) }
        });
        machine.system.set_hold(hold);
    }

    /// Returns the intervals of the ending window; the current one is cut there and continues in the next window.
    pub fn take_evidence(&mut self, machine: &mut SimMachine) -> Option<ProbeEvidence> {
        let open_interval = self.open_interval.as_ref().filter(|interval| interval.begun.is_some());
        if let Some((members, row)) = open_interval.map(|interval| (interval.members.clone(), interval.row)) {
            self.close(machine, None);
            if !self.is_done(row) {
                let now = machine.system.now();
                self.open_interval = Some(OpenInterval { members, row, counts_from: now, begun: None });
            }
        }
        let intervals = std::mem::take(&mut self.intervals);
        (!intervals.is_empty()).then_some(ProbeEvidence::Rows(intervals))
    }
}
