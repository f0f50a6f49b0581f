//! Gangs that take turns on their CPUs.
//!
//! A rotation has exclusive use of its CPUs: in a gang's turn, each member has a CPU, and every other CPU of the
//! schedule idles. If no member of a gang can run, its turn ends at once. Members without a named CPU get the one on
//! which they last ran, if it is free. A bipartite matching gives as many members as possible a CPU that their affinity
//! allows.

use cachemate_core::CpuSet;

use super::dispatch::Dispatcher;
use super::queues::Slot;

/// A gang: the slot of each member with its CPU, if the plan names one, and the slices per turn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotGang {
    pub members: Vec<(Slot, Option<u32>)>,
    pub slices: u32,
}

/// A gang schedule in progress.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotRotation {
    pub cpus: CpuSet,
    pub slice_cycles: u64,
    pub gangs: Vec<SlotGang>,
    active_index: usize,
    turn_end: u64,
}

impl SlotRotation {
    pub fn new(cpus: CpuSet, slice_cycles: u64, gangs: Vec<SlotGang>, now: u64) -> Self {
        let first_slices = gangs.first().map_or(1, |gang| u64::from(gang.slices));
        SlotRotation {
            cpus,
            slice_cycles: slice_cycles.max(1),
            gangs,
            active_index: 0,
            turn_end: now + first_slices * slice_cycles.max(1),
        }
    }

    /// Schedules may be the same although their current turns differ.
    pub fn is_same_schedule(&self, other: &Self) -> bool {
        (&self.cpus, self.slice_cycles, &self.gangs)
            == (&other.cpus, other.slice_cycles, &other.gangs)
    }

    pub fn turn_end_cycle(&self) -> u64 {
        if self.gangs.len() > 1 {
            self.turn_end
        } else {
            u64::MAX
        }
    }

    /// An index into `gangs`.
    pub fn active_gang_index(&self) -> usize {
        self.active_index
    }

    /// Ends turns that are over, or whose gang cannot run while another can.
    pub fn advance(&mut self, now: u64, dispatcher: &Dispatcher) {
        let is_gang_runnable = |gang: &SlotGang| {
            gang.members
                .iter()
                .any(|&(slot, _)| dispatcher.is_runnable(slot))
        };
        if self.gangs.is_empty()
            || (self.turn_end > now && is_gang_runnable(&self.gangs[self.active_index]))
        {
            return;
        }

        let gang_count = self.gangs.len();
        let next_index = (1..=gang_count)
            .map(|step| (self.active_index + step) % gang_count)
            .find(|&index| is_gang_runnable(&self.gangs[index]));
        let is_turn_over = self.turn_end <= now;
        if let Some(next) = next_index {
            self.active_index = next;
            // A turn starts where the last one ended, so that rounding up to an event does not lengthen the rotation.
            let turn_start = if is_turn_over {
                self.turn_end.max(now.saturating_sub(self.slice_cycles))
            } else {
                now
            };
            self.turn_end = turn_start + u64::from(self.gangs[next].slices) * self.slice_cycles;
        } else if is_turn_over {
            self.turn_end = now + self.slice_cycles;
        }
    }

    /// CPUs of the members of the gang whose turn it is.
    pub fn active_assignments(&self, dispatcher: &Dispatcher) -> Vec<(u32, Slot)> {
        self.gangs
            .get(self.active_index)
            .map_or_else(Vec::new, |gang| {
                assign_cpus(&gang.members, &self.cpus, dispatcher)
            })
    }
}

/// The named CPU if there is one, otherwise an allowed CPU, preferably the one on which the member
/// last ran. No two members get the same.
pub fn assign_cpus(
    members: &[(Slot, Option<u32>)],
    cpus: &CpuSet,
    dispatcher: &Dispatcher,
) -> Vec<(u32, Slot)> {
    assign_allowed_cpus(members, cpus, dispatcher, &|slot| {
        dispatcher.task(slot).allowed_cpus.clone()
    })
}

/// Like [`assign_cpus`], but `allowed` replaces the affinities that the dispatcher knows.
pub fn assign_allowed_cpus(
    members: &[(Slot, Option<u32>)],
    cpus: &CpuSet,
    dispatcher: &Dispatcher,
    allowed: &dyn Fn(Slot) -> CpuSet,
) -> Vec<(u32, Slot)> {
    let mut assignments: Vec<(u32, Slot)> = Vec::new();
    for &(slot, cpu) in members {
        if let Some(cpu) = cpu.filter(|&cpu| allowed(slot).contains(cpu)) {
            assignments.push((cpu, slot));
        }
    }
    let pinned_count = assignments.len();
    let allowed_cpus =
        |slot: Slot| -> Vec<u32> { cpus.intersection(&allowed(slot)).iter().collect() };

    for &(slot, _) in members.iter().filter(|(_, cpu)| cpu.is_none()) {
        let mut tried_cpus = CpuSet::default();
        assign_cpu(
            slot,
            &allowed_cpus,
            dispatcher,
            &mut assignments,
            pinned_count,
            &mut tried_cpus,
        );
    }
    assignments.sort_unstable();
    assignments
}

/// Finds an augmenting path from `slot` to a free CPU, and applies it. The first `pinned_count` assignments do not
/// change. Returns whether there is such a path.
fn assign_cpu(
    slot: Slot,
    allowed_cpus_of: &dyn Fn(Slot) -> Vec<u32>,
    dispatcher: &Dispatcher,
    assignments: &mut Vec<(u32, Slot)>,
    pinned_count: usize,
    tried_cpus: &mut CpuSet,
) -> bool {
    let last_cpu = dispatcher.task(slot).last_cpu;
    let mut candidate_cpus = allowed_cpus_of(slot);
    candidate_cpus.sort_by_key(|&cpu| {
        let is_free = assignments.iter().all(|&(taken_cpu, _)| taken_cpu != cpu);
        (!(is_free && last_cpu == Some(cpu)), !is_free, cpu)
    });

    for cpu in candidate_cpus {
        if tried_cpus.contains(cpu) {
            continue;
        }
        tried_cpus.insert(cpu);

        match assignments.iter().position(|&(other, _)| other == cpu) {
            None => {
                assignments.push((cpu, slot));
                return true;
            }
            Some(index) if index >= pinned_count => {
                let (_, holder) = assignments[index];
                if assign_cpu(
                    holder,
                    allowed_cpus_of,
                    dispatcher,
                    assignments,
                    pinned_count,
                    tried_cpus,
                ) {
                    // The previous holder has another CPU now, so this task gets its old one.
                    assignments[index] = (cpu, slot);
                    return true;
                }
            }
            Some(_) => {}
        }
    }

    false
}
